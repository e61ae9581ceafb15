"""Where is the uncertainty: on the pixels that are wrong, and at the borders between labels?

    ratio = mean H over wrong pixels / mean H over right ones,   AUROC = P(H_wrong > H_right) + ½ P(H_wrong = H_right)

Sums and counts alone are kept. For the AUROC, pixels are counted by the first 9 binary digits of their uncertainty,
which tells values apart that differ by 0.4 %; those that it does not count as equal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neuboots.metrics import Tally
from neuboots.tasks.segmentation.maps import Maps

MEASURES = ("entropy", "mutual_information", "std")
_DROPPED = 15  # bits of a positive float32, whose order is that of its bits as a whole number
_LEVELS = 1 << (31 - _DROPPED)


@dataclass(frozen=True, eq=False)
class Spread(Tally):
    """Sums of the three uncertainties over right and wrong pixels, inside and at borders; images in parts add.

    >>> values = torch.tensor([[0.25, 0.75, 2.0]])
    >>> found = Spread.of(values.expand(3, 3), torch.tensor([False, False, True]), torch.tensor([False, True, True]))
    >>> found.mean("entropy", wrong=True) / found.mean("entropy", wrong=False), found.auroc("entropy")
    (4.0, 1.0)
    """

    totals: Tensor  # (3, 2, 2): uncertainty, right or wrong, inside or border
    counts: Tensor  # (2, 2)
    levels: Tensor  # (3, 2, K): pixels, right or wrong, at each level of an uncertainty

    @classmethod
    def of(cls, values: Tensor, wrong: Tensor, border: Tensor) -> Self:
        """Of the three uncertainties (3, P) of P pixels, of whether they are wrong (P,) and at a border (P,)."""
        group = 2 * wrong.long() + border.long()  # (P,)
        level = (values.float().clamp_min(0) + 0.0).view(torch.int32).long() >> _DROPPED  # (3, P); −0 + 0 = 0
        sums = [torch.bincount(group, value.double(), minlength=4).double() for value in values]
        counted = [torch.bincount(_LEVELS * wrong.long() + one, minlength=2 * _LEVELS) for one in level]
        return cls(
            torch.stack(sums).view(len(values), 2, 2),
            torch.bincount(group, minlength=4).view(2, 2),
            torch.stack(counted).view(len(values), 2, _LEVELS),
        )

    def count(self, *, wrong: bool | None = None, border: bool | None = None) -> int:
        """Pixels of one kind; None stands for both."""
        return int(self.counts[_which(wrong), _which(border)].sum())

    def mean(self, measure: str, *, wrong: bool | None = None, border: bool | None = None) -> float | None:
        """The mean uncertainty over pixels of one kind; None if there are none."""
        total = self.totals[MEASURES.index(measure), _which(wrong), _which(border)].sum()
        count = self.count(wrong=wrong, border=border)
        return float(total) / count if count else None

    def auroc(self, measure: str) -> float | None:
        """The chance that a wrong pixel is less certain than a right one; None where one kind is missing."""
        right, wrong = self.levels[MEASURES.index(measure)].double()  # (K,), (K,)
        pairs = float(right.sum() * wrong.sum())
        return float((wrong * (right.cumsum(0) - right / 2)).sum()) / pairs if pairs else None


def _which(kind: bool | None) -> slice:
    return slice(None) if kind is None else slice(int(kind), int(kind) + 1)


def ratio(above: float | None, below: float | None) -> float | None:
    """above / below; None where either is missing or nothing is below."""
    return above / below if above is not None and below else None


def uncertainties(maps: Maps, image: int) -> Tensor:
    """The three of MEASURES, of one image: (3, *)."""
    return torch.stack([getattr(maps, name)[image] for name in MEASURES])


def at_borders(labels: Tensor, *, void: int) -> Tensor:
    """Whether the 3 × 3 (× 3) pixels around one hold two labels or more besides void: (N, *) → (N, *).

    >>> at_borders(torch.tensor([[0, 0, 0, 1, 255, 0]]), void=255).int()
    tensor([[0, 0, 1, 1, 0, 0]], dtype=torch.int32)
    """
    labels, unknown = labels.int(), labels == void
    least = labels.masked_fill(unknown, torch.iinfo(torch.int32).max)
    most = labels.masked_fill(unknown, torch.iinfo(torch.int32).min)
    for axis in range(1, labels.ndim):
        least, most = _widened(least, axis, torch.minimum), _widened(most, axis, torch.maximum)
    return (least < most) & ~unknown


def _widened(values: Tensor, axis: int, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Each value joined with those before and after it along an axis."""
    wide, count = values.clone(), values.shape[axis] - 1
    for ours, theirs in ((0, 1), (1, 0)):
        side = wide.narrow(axis, ours, count)
        side.copy_(join(side, values.narrow(axis, theirs, count)))
    return wide
