"""Statistics that add, so that a data set need not fit in memory.

    T(a ∪ b) = T(a) + T(b),   figure(a ∪ b) = figure(T(a) + T(b))

Every metric of this package is a figure of such a statistic; its one-shot form tallies all inputs at once. Sums and
counts take memory that does not grow with the data. Figures of ranks (AUROC, AURC, adaptive bins) need each input's
score and keep it: a few bytes an input, whatever the number of classes and replicates. A part may be empty, as the last
batch of a loader may; a figure of no inputs at all is refused.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from neuboots.metrics.checks import tensors

HELD = 1 << 20  # numbers looked at together: what is computed on the way stays small beside what is kept


@dataclass(frozen=True, eq=False)
class Tally:
    """Fields that are tensors add, tuples of tensors (values kept one by one) are joined, tallies inside add.

    Any other field is an option, and must be the same on both sides.

    >>> @dataclass(frozen=True, eq=False)
    ... class Share(Tally):
    ...     total: Tensor
    ...     count: Tensor
    >>> a, b = Share(torch.tensor(2.0), torch.tensor(1)), Share(torch.tensor(4.0), torch.tensor(2))
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


@dataclass(frozen=True, eq=False)
class Mean(Tally):
    """1/N Σᵢ vᵢ of numbers vᵢ that come in parts; sums run in float64.

    >>> (Mean.of(torch.tensor([1.0, 2.0])) + Mean.of(torch.tensor([6.0]))).value
    tensor(3., dtype=torch.float64)
    """

    total: Tensor  # ()
    count: Tensor  # ()

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Of any number of values, none included: a part may be empty, the whole not."""
        tensors(values=values)
        if values.is_complex() or values.isnan().any():
            raise ValueError(
                f"got {int(values.isnan().sum())} NaN among {values.numel()} values of {values.dtype}; expected real "
                "numbers: check the net's outputs and the data"
            )
        return cls(values.detach().sum(dtype=torch.float64), torch.tensor(values.numel(), device=values.device))

    @property
    def value(self) -> Tensor:
        return self.total / some(self.count)


def kept(*values: Tensor) -> tuple[Tensor, ...]:
    """Values that a tally keeps one by one, apart from the batch they came in."""
    return tuple(value.detach().flatten().clone() for value in values)


def joined(parts: tuple[Tensor, ...]) -> Tensor:
    """All values kept so far: (N,)."""
    return torch.cat([part.to(parts[0].device) for part in parts])


def some(count: Tensor) -> Tensor:
    """The number of inputs, if there are any: a part of the data may have none, a figure is not drawn from none."""
    if count == 0:
        raise ValueError("got a tally of no inputs; expected at least one: check the data set")
    return count


def run_ends(sorted_values: Tensor) -> Tensor:
    """How many values come up to the end of each run of equal ones: (K,), the last being N.

    >>> run_ends(torch.tensor([0.9, 0.5, 0.5, 0.1]))
    tensor([1, 3, 4])
    """
    last = torch.ones(len(sorted_values), dtype=torch.bool, device=sorted_values.device)
    last[:-1] = sorted_values[1:] != sorted_values[:-1]  # a difference would make ∞ − ∞ no tie
    return last.nonzero()[:, 0] + 1
