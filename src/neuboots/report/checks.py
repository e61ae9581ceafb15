"""Whether a claim holds in what was measured: yes, no, or not to be told at this scale.

d_s = m_s(method) − m_s(other),   mean d ± t s_d / √T   over the T seeds that both have
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

Row = Mapping[str, Any]
_Z = 1.96  # standard errors on either side of a 95 % interval


@dataclass(frozen=True)
class Check:
    """A claim of the paper, whether it holds here (None: within noise, or too few seeds), and what was found."""

    claim: str
    holds: bool | None
    found: str

    @property
    def word(self) -> str:
        return {True: "holds", False: "does NOT hold", None: "not resolved"}[self.holds]

    def __str__(self) -> str:
        return f"{self.word}: {self.claim} ({self.found})"


def combine_checks(claim: str, parts: Sequence[Check]) -> Check:
    """One claim made of several: it fails if one fails, and is open if one is open.

    >>> str(combine_checks("better everywhere", [Check("a", True, "1 < 2"), Check("b", None, "2 ≈ 2")]))
    'not resolved: better everywhere (1 < 2; 2 ≈ 2)'
    """
    words = {part.holds for part in parts}
    holds = False if False in words else None if None in words or not parts else True
    return Check(claim, holds, "; ".join(part.found for part in parts))


def compare_groups(
    claim: str,
    rows: Sequence[Row],
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
    """Is `key` lower (higher, equal within `margin`) in the rows that match `first` than in those that match `second`?

    Rows that agree in `pair` are set against each other; Student's interval of their mean difference decides. A
    claim of order holds if the interval lies beyond zero on the claimed side, and fails if it lies on the other side.
    A claim of equality holds if the whole interval is within the margin, and fails if it is wholly outside. Otherwise,
    and with a single pair, nothing is resolved. `margin` and what is printed are in the units of scale × key.

    >>> rows = [{"method": m, "seed": s, "ece": e + s / 1000} for m, e in (("a", 0.1), ("b", 0.2)) for s in range(3)]
    >>> str(compare_groups("a is calibrated better", rows, "ece", {"method": "a"}, {"method": "b"}, expect="lower"))
    'holds: a is calibrated better (ece a 0.10 against b 0.20, difference -0.10 ± 0.00 over 3 pairs)'
    """
    ours, theirs = (_by_pair(rows, key, which, pair) for which in (first, second))
    both = [name for name in ours if name in theirs]
    names = [" ".join(str(value) for value in which.values()) for which in (first, second)]
    if not both:
        return Check(claim, None, f"{key} of {names[0]} and {names[1]} was not measured")
    a, b = ([side[name] for name in both] for side in (ours, theirs))
    differences = [scale * (x - y) for x, y in zip(a, b, strict=True)]
    difference, half = fmean(differences), _half_interval(differences, level)
    means = [f"{name} {scale * fmean(side):z.{digits}f}" for name, side in zip(names, (a, b), strict=True)]
    shown = f"{key} {means[0]} against {means[1]}, difference {difference:+z.{digits}f}"
    spread = " in a single pair" if len(both) == 1 else f" ± {half:.{digits}f} over {len(both)} pairs"
    return Check(claim, _decide(difference, half, expect, margin), shown + spread)


def wilson_interval(share: float, count: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share seen in `count_rows` inputs: wide where they are few, and never beyond 0 and 1.

    >>> [round(end, 3) for end in wilson_interval(0.0, 10)], [round(end, 3) for end in wilson_interval(0.5, 1000)]
    ([0.0, 0.278], [0.469, 0.531])
    """
    middle = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2)) / (1 + _Z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def _by_pair(rows: Sequence[Row], key: str, which: Mapping[str, Any], pair: Sequence[str]) -> dict[Any, float]:
    found: dict[Any, list[float]] = {}
    for row in rows:
        if all(row.get(name) == value for name, value in which.items()) and row.get(key) is not None:
            found.setdefault(tuple(row[name] for name in pair), []).append(float(row[key]))
    return {name: fmean(values) for name, values in found.items()}


def _half_interval(differences: Sequence[float], level: float) -> float:
    if len(differences) < 2:
        return float("inf")
    from scipy.stats import t

    quantile = float(t.ppf((1 + level) / 2, len(differences) - 1))
    return quantile * stdev(differences) / math.sqrt(len(differences))


def _decide(difference: float, half: float, expect: str, margin: float) -> bool | None:
    low, high = difference - half, difference + half
    if expect == "equal":
        return True if -margin <= low and high <= margin else False if low > margin or high < -margin else None
    if expect == "higher":
        low, high = -high, -low
    return True if high < 0 else False if low > 0 else None
