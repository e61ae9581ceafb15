"""Statistics that add, so that a data set need not fit in memory.

    T(a ∪ b) = T(a) + T(b),   figure(a ∪ b) = figure(T(a) + T(b))

Every metric of this package is a figure of such a statistic; its one-shot form tallies all inputs at once. Sums and
counts take memory that does not grow with the data. Figures of ranks (AUROC, AURC, adaptive bins) need each input's
score and keep it: a few bytes an input, whatever the number of classes and replicates.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tally:
    """Fields that are tensors add, tuples of tensors (values kept one by one) are joined, tallies inside add.

    Any other field is an option, and must be the same on both sides.

    >>> @dataclass(frozen=True, eq=False)
    ... class Mean(Tally):
    ...     total: Tensor
    ...     count: Tensor
    >>> a, b = Mean(torch.tensor(2.0), torch.tensor(1)), Mean(torch.tensor(4.0), torch.tensor(2))
    >>> both = sum([a, b])  # as over the batches of a loader
    >>> both.total / both.count
    tensor(2.)
    """

    def __add__(self, other: Self) -> Self:
        if type(other) is not type(self):
            return NotImplemented
        return type(self)(*(_joined(part.name, self, other) for part in fields(self)))

    def __radd__(self, other: int) -> Self:
        """sum() begins with 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented


def _joined(name: str, a: Tally, b: Tally) -> Any:
    mine, theirs = getattr(a, name), getattr(b, name)
    if isinstance(mine, tuple | Tally):
        return mine + theirs
    if isinstance(mine, Tensor):
        if mine.shape != theirs.shape:
            raise ValueError(
                f"got {name} of shapes {tuple(mine.shape)} and {tuple(theirs.shape)}; expected the same: both parts "
                "must have the same classes, replicates and bins"
            )
        return mine + theirs.to(mine.device)
    if mine != theirs:
        raise ValueError(f"got {name}={mine!r} and {name}={theirs!r}; expected tallies with the same options")
    return mine


def kept(*values: Tensor) -> tuple[Tensor, ...]:
    """Values that a tally keeps one by one, apart from the batch they came in."""
    return tuple(value.detach().flatten().clone() for value in values)


def joined(parts: tuple[Tensor, ...]) -> Tensor:
    """All values kept so far: (N,)."""
    return torch.cat([part.to(parts[0].device) for part in parts])
