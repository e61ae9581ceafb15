"""Checks of the paper's claims by paired differences over seeds.

d_s = m_s(method) − m_s(other),   mean d ± t s_d / √T   over the T seeds that both have
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

import torch

from neuboots.evaluation._parallel import student_t_interval
from neuboots.report.checks import Check, decide


def combine_checks(claim: str, checks: Sequence[Check]) -> Check:
    """Combine checks into one, which fails if one fails and is open if one is open.

    Args:
        claim: The combined claim.
        checks: Checks of its parts.

    Returns:
        The combined check.

    Example:
        >>> str(combine_checks("better everywhere", [Check("a", True, "1 < 2"), Check("b", None, "2 ≈ 2")]))
        'not resolved: better everywhere (1 < 2; 2 ≈ 2)'
    """
    results = {check.holds for check in checks}
    holds = False if False in results else None if None in results or not checks else True
    return Check(claim, holds, "; ".join(check.evidence for check in checks))


def compare_groups(
    claim: str,
    rows: Sequence[Mapping[str, Any]],
    key: str,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    *,
    expect: Literal["lower", "higher", "equal"],
    pair: Sequence[str] = ("seed",),
    scale: float = 1.0,
    digits: int = 2,
    margin: float = 0.0,
    level: float = 0.95,
) -> Check:
    """Check whether a metric is lower, higher or equal in one group of rows than in another.

    Rows that agree in `pair` are compared; Student's interval of their mean difference decides. A claim of order holds
    if the interval is beyond zero on the claimed side, and fails if it is on the other side. A claim of equality holds
    if the interval is within the margin, and fails if it is outside. Otherwise, and with one pair, it is open.

    Args:
        claim: The claim.
        rows: Measurements.
        key: Name of the metric.
        first: Values that rows of the first group have.
        second: Values that rows of the second group have.
        expect: What the claim says of the first group.
        pair: Keys whose values pair a row with another.
        scale: Factor for `margin` and the printed values, such as 100 for %.
        digits: Printed digits.
        margin: Largest difference that counts as equal, in units of scale × key.
        level: Level of the interval.

    Returns:
        The check.

    Example:
        >>> rows = [
        ...     {"method": m, "seed": s, "ece": e + s / 1000} for m, e in (("a", 0.1), ("b", 0.2)) for s in range(3)
        ... ]
        >>> str(compare_groups("a is calibrated better", rows, "ece", {"method": "a"}, {"method": "b"}, expect="lower"))
        'holds: a is calibrated better (ece a 0.10 against b 0.20, difference -0.10 ± 0.00 over 3 pairs)'
    """
    ours, theirs = (_group_by(rows, key, values, pair) for values in (first, second))
    both = [name for name in ours if name in theirs]
    names = [" ".join(str(value) for value in values.values()) for values in (first, second)]
    if not both:
        return Check(claim, None, f"{key} of {names[0]} and {names[1]} was not measured")
    a, b = ([side[name] for name in both] for side in (ours, theirs))
    differences = [scale * (x - y) for x, y in zip(a, b, strict=True)]
    difference, half = fmean(differences), math.inf
    if len(both) > 1:
        ends = student_t_interval(torch.tensor(differences, dtype=torch.float64), level=level)
        half = float(ends[1] - ends[0]) / 2
    means = [f"{name} {scale * fmean(side):z.{digits}f}" for name, side in zip(names, (a, b), strict=True)]
    shown = f"{key} {means[0]} against {means[1]}, difference {difference:+z.{digits}f}"
    spread = " in a single pair" if len(both) == 1 else f" ± {half:.{digits}f} over {len(both)} pairs"
    low, high = difference - half, difference + half
    if expect == "equal":
        holds = decide(-margin <= low and high <= margin, low > margin or high < -margin)
    else:
        holds = decide(high < 0, low > 0) if expect == "lower" else decide(low > 0, high < 0)
    return Check(claim, holds, shown + spread)


def _group_by(
    rows: Sequence[Mapping[str, Any]], key: str, values: Mapping[str, Any], pair: Sequence[str]
) -> dict[Any, float]:
    """Return the mean of `key` for each value of `pair`, over the rows that have these values."""
    groups: dict[Any, list[float]] = {}
    for row in rows:
        if all(row.get(name) == value for name, value in values.items()) and row.get(key) is not None:
            groups.setdefault(tuple(row[name] for name in pair), []).append(float(row[key]))
    return {name: fmean(group) for name, group in groups.items()}
