"""The one number that calibration finds: the quantile of the scores, and how many rows it takes.

    q the k-th smallest of s(X₁, Y₁), …, s(X_n, Y_n),   k = ⌈level · (n + 1)⌉,   P(Y ∈ C(X)) ≥ k / (n + 1) ≥ level

Where scores have no ties, the coverage given the calibration rows is itself a draw from Beta(k, n + 1 − k). Pixels of
an image are not exchangeable with each other, images are: with P pixels an image the rank is ⌈level · (n + 1) · P⌉
among the n · P scores, and the expected share of a new image's pixels that are covered is at least `level` (conformal
risk control); P = 1 is the case above.

Vovk, Gammerman and Shafer, Algorithmic learning in a random world, Springer 2005 (split conformal); Angelopoulos,
Bates, Fisch, Lei and Schuster, Conformal risk control, ICLR 2024 (pixels).
"""

import math
from dataclasses import fields
from fractions import Fraction
from typing import Any

from torch import Tensor

from neuboots.tasks.common import check_predictor


def rank(level: float, rows: int, pixels: int) -> int:
    """⌈level · (n + 1) · P⌉, with the level as it was typed: 0.07 · 100 is 7, not 7.000000000000001."""
    return math.ceil(Fraction(str(float(level))) * (rows + 1) * pixels)


def quantile(scores: Tensor, level: float, rows: int) -> float:
    """The score that the new row stays below with this probability; ∞ where the rows are too few to tell: (n · P,)."""
    k = rank(level, rows, len(scores) // rows) if rows else 1
    return math.inf if k > len(scores) else float(scores.kthvalue(k).values)


def check_options(predictor: Any, level: float, kind: str, kinds: tuple[str, ...]) -> None:
    check_predictor(predictor)
    if not 0.0 < level < 1.0:
        raise ValueError(f"got level {level}; expected a number between 0 and 1, such as 0.9")
    if kind not in kinds:
        raise ValueError(f"got kind={kind!r}; expected one of {', '.join(map(repr, kinds))}")


def check_enough(level: float, rows: int, pixels: int) -> None:
    if rank(level, rows, pixels) > rows * pixels:
        needed = math.ceil(Fraction(str(float(level))) / (1 - Fraction(str(float(level)))))
        raise ValueError(
            f"got {rows} calibration rows; expected at least {needed} for level {level:g}, or every set would have to "
            "hold everything: give more rows, or a lower level"
        )


def _plain(value: Any) -> Any:
    """JSON has neither tuples nor ∞."""
    return [None if math.isinf(q) else q for q in value] if isinstance(value, tuple) else value


def config_of(rule: Any) -> dict[str, Any]:
    return {part.name: _plain(getattr(rule, part.name)) for part in fields(rule) if part.name != "predictor"}


def restored(config: dict[str, Any]) -> dict[str, Any]:
    """Lists are tuples again, and nulls ∞."""
    return {
        name: tuple(math.inf if q is None else q for q in value) if isinstance(value, list) else value
        for name, value in config.items()
    }
