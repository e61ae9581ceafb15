"""A part of a data set: rows that are read when they are asked for, many at once where that is quicker.

    part[i] = (normalise(augment(xᵢ)), yᵢ)

xᵢ comes from its source as it lies there: bytes 0 … 255, which are taken as numbers in [0, 1], or floating-point
numbers. What the augmentation draws, it draws from torch's random state, which the loop that trains seeds by name for
each batch.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from neuboots.keys import whole

AT_ONCE = 32  # rows of a stream that are prepared together, which takes a third of the time of one by one
LARGE = 1 << 16  # numbers of a row that is prepared by itself: a stream holds few of those

Normalise = Callable[[Tensor], Tensor]
"""(N, C, *) → (N, C, *)."""

Augment = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Images (N, C, *) in [0, 1] and their labels (N,) or masks (N, *) → the same, changed at random; labels stay."""


class Source(Protocol):
    """Where rows lie: files, columns of a table, tensors. Nothing is read before it is asked for."""

    def __len__(self) -> int: ...

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs, (C, *) each, and targets of these rows."""
        ...

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        """Targets alone: no image is decoded for its label."""
        ...


def as_is(x: Tensor) -> Tensor:
    """x, for data that need no normalisation."""
    return x


@dataclass(frozen=True, eq=False)
class Part(Dataset[Any]):
    """Some rows (all, if `rows` is None) of a source, normalised, and augmented if there is an augmentation.

    >>> source = Tensors(torch.full((4, 1, 8, 8), 255, dtype=torch.uint8), torch.arange(4))
    >>> part = Part(source, normalise=lambda x: x - 0.5)
    >>> x, y = part[3]
    >>> x.shape, float(x.max()), int(y), len(part.take([0, 2]))
    (torch.Size([1, 8, 8]), 0.5, 3, 2)
    """

    source: Source
    normalise: Normalise = as_is
    augment: Augment | None = None
    rows: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.source) if self.rows is None else len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([whole("row", i)])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Many rows at once; images of one size are augmented and normalised together."""
        xs, ys = self.source.read(self._places(numbers))
        return _prepared(xs, ys, self.normalise, self.augment)

    def take(self, numbers: Iterable[int]) -> "Part":
        """These rows of the part, by their numbers, as a part."""
        listed = numbers.tolist() if isinstance(numbers, Tensor | np.ndarray) else list(numbers)
        return replace(self, rows=tuple(self._places([whole("row", i) for i in listed])))

    def target(self, i: int) -> Tensor:
        """yᵢ alone."""
        return self.source.read_targets(self._places([i]))[0]

    @property
    def targets(self) -> Tensor | None:
        """All labels or numbers, (n,); None where targets are masks, which need not fit in memory."""
        if len(self) == 0 or self.target(0).ndim > 1:
            return None
        return torch.stack(self.source.read_targets(self._places(range(len(self)))))

    def _places(self, numbers: Sequence[int]) -> list[int]:
        n = len(self)
        for i in numbers:
            if not -n <= i < n:
                raise IndexError(f"got row {i}; expected 0 … {n - 1}")  # which also ends a loop over the part
        if self.rows is None:
            return [i % n for i in numbers]
        return [self.rows[i] for i in numbers]


def _prepared(
    xs: list[Tensor], ys: list[Tensor], normalise: Normalise, augment: Augment | None
) -> list[tuple[Tensor, Tensor]]:
    one_size = all(x.shape == xs[0].shape for x in xs) and all(y.shape == ys[0].shape for y in ys)
    groups = [(xs, ys)] if one_size and xs else [([x], [y]) for x, y in zip(xs, ys, strict=True)]
    rows: list[tuple[Tensor, Tensor]] = []
    for some_x, some_y in groups:
        x, y = in_unit_range(torch.stack(some_x)), torch.stack(some_y)
        if augment is not None:
            x, y = augment(x, y)
        rows += zip(normalise(x), y, strict=True)
    return rows


def in_unit_range(x: Tensor) -> Tensor:
    """Bytes as numbers in [0, 1]; other numbers as they are, in single precision at most."""
    if x.dtype == torch.uint8:
        return x.float().div_(255)
    return x if not x.is_floating_point() else x.to(torch.float32)


@dataclass(frozen=True, eq=False)
class Stream(IterableDataset[Any]):
    """Rows that come one after the other, of unknown number: a part that is never held.

    `read()` begins anew and gives rows, which `decode` turns into (x, y) as a source gives them; loader processes and
    data-parallel ranks take turns, and decode their own alone. Small rows are augmented and normalised some at once.

    >>> stream = Stream(lambda: iter([(torch.full((1, 2), 255, dtype=torch.uint8), torch.tensor(3))]))
    >>> [(x.tolist(), int(y)) for x, y in stream]
    [([[1.0, 1.0]], 3)]
    """

    read: Callable[[], Iterator[Any]]
    normalise: Normalise = as_is
    augment: Augment | None = None
    decode: Callable[[Any], tuple[Tensor, Tensor]] | None = None  # None: they are (x, y)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        lane, lanes = (worker.id, worker.num_workers) if worker else (0, 1)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            lane += torch.distributed.get_rank() * lanes
            lanes *= torch.distributed.get_world_size()
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        for row in itertools.islice(self.read(), lane, None, lanes):
            x, y = row if self.decode is None else self.decode(row)
            xs.append(x)
            ys.append(y)
            if len(xs) == AT_ONCE or x.numel() > LARGE:
                yield from _prepared(xs, ys, self.normalise, self.augment)
                xs, ys = [], []
        yield from _prepared(xs, ys, self.normalise, self.augment)


@dataclass(frozen=True, eq=False)
class Tensors:
    """A source in memory: inputs (n, C, *) and targets (n, …)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        return list(self.x[list(rows)]), self.read_targets(rows)

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        return list(self.y[list(rows)])
