"""The one number that calibration finds: the quantile of the scores, and how many rows it takes.

    q the k-th smallest of s(X₁, Y₁), …, s(X_n, Y_n),   k = ⌈level · (n + 1)⌉,   P(Y ∈ C(X)) ≥ k / (n + 1) ≥ level

Where scores have no ties, the coverage given the calibration rows is itself a draw from Beta(k, n + 1 − k). Pixels of
an image are not exchangeable with each other, images are: q is then the least number at which the shares of covered
pixels, added over the n images, reach level · (n + 1), and the expected share of a new image's pixels that are covered
is at least `level` (conformal risk control). Every image counts the same, however many of its pixels have a label; with
P pixels in each that is rank ⌈level · (n + 1) · P⌉ among all scores, and P = 1 is the case above.

Rounding. In another batch a net rounds the same input otherwise, and where scores have ties, all those at q would drop
out together. With e(x, y) the most that a score may move, s(x, y) + e(x, y) is as good a score: calibration takes its
quantile, by raising every score that it sees by 2 e, and the guarantee then holds in batches of any size. 2 e is 64 eps
of the outputs' type (at most 2⁻⁷), relative to their size. That is an allowance and no bound: a very deep net, or TF32,
may move its outputs by more. Where scores have ties, ask such a net in batches as large as in calibration.

Vovk, Gammerman and Shafer, Algorithmic learning in a random world, Springer 2005 (split conformal); Angelopoulos,
Bates, Fisch, Lei and Schuster, Conformal risk control, ICLR 2024 (pixels).
"""

import math
from dataclasses import fields
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from neuboots.tasks.common import check_predictor


def rounding(dtype: torch.dtype) -> float:
    """2 e for outputs of size 1: how far apart two batches may put the same input.

    Half precision is capped: its nets add in float32, and only what they store is rounded.
    """
    return min(64 * torch.finfo(dtype).eps, 2.0**-7)


def rank(level: float, rows: int, pixels: int) -> int:
    """⌈level · (n + 1) · P⌉, with the level as it was typed: 0.07 · 100 is 7, not 7.000000000000001."""
    return math.ceil(Fraction(str(float(level))) * (rows + 1) * pixels)


def quantile(scores: Tensor, counts: Tensor, level: float) -> float:
    """The score that a new row stays below with this probability; ∞ where the rows are too few to tell.

    `counts` (n,) says how many of the scores, one row after another, belong to each: rows without any do not count.

    >>> quantile(torch.tensor([3.0, 1.0, 2.0]), torch.ones(3), 0.5)
    2.0
    """
    counts = counts[counts > 0].long()
    rows = len(counts)
    if not enough(level, rows):
        return math.inf
    unit, wanted = math.lcm(*set(counts.tolist())), 0.0
    if unit * rows < 1 << 62:  # shares in whole numbers
        shares, wanted = unit // counts, rank(level, rows, unit)
    else:
        shares, wanted = 1 / counts.double(), level * (rows + 1) * (1 + 1e-9)  # outwards, by more than sums are off
    ordered, order = scores.sort()
    reached = shares.repeat_interleave(counts)[order].cumsum(0)
    return float(ordered[min(int((reached < wanted).sum()), len(ordered) - 1)])


def enough(level: float, rows: int) -> bool:
    """Is there a rank for this level? level · (n + 1) ≤ n."""
    return rank(level, rows, 1) <= rows


def check_calibration_rows(level: float, rows: int) -> None:
    if not enough(level, rows):
        share = Fraction(str(float(level)))
        raise ValueError(
            f"got {rows} calibration rows; expected at least {math.ceil(share / (1 - share))} for level {level:g}, or "
            "every set would have to hold everything: give more rows, or a lower level"
        )


def check_options(predictor: Any, level: float, kind: str, kinds: tuple[str, ...]) -> None:
    check_predictor(predictor)
    if not (isinstance(level, float | int) and 0.0 < level < 1.0):
        raise ValueError(f"got level {level!r}; expected a number between 0 and 1, such as 0.9")
    if kind not in kinds:
        raise ValueError(f"got kind={kind!r}; expected one of {', '.join(map(repr, kinds))}")


def per_row(counted: Tensor) -> Tensor:
    """How many pixels of each row count: (N, *) → (N,)."""
    return counted.reshape(len(counted), -1).sum(1).cpu()


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
