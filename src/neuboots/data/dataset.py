"""A part of a data set: rows that are read when they are asked for, many at once where that is quicker.

    part[i] = (normalise(augment(xᵢ)), yᵢ)

xᵢ comes from its source as it lies there: bytes 0 … 255, which are taken as numbers in [0, 1], or floating-point
numbers. What the augmentation draws, it draws from torch's random state, which the loop that trains seeds by name for
each batch.

A data set: its parts, and what a net must know of them.

x̂ = (x − mean) / std,   a mean and a std for each channel
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

from neuboots._validation import check_int
from neuboots.data._common import identity
from neuboots.data.corruptions import CORRUPTIONS, ROTATION, CorruptedDataset
from neuboots.data.imbalance import subsample_classes

STREAM_BATCH_SIZE = 32  # rows of a stream that are prepared together, which takes a third of the time of one by one
LARGE_EXAMPLE = 1 << 16  # numbers of a row that is prepared by itself: a stream holds few of those

Transform = Callable[[Tensor], Tensor]
"""(N, C, *) → (N, C, *)."""

Augmentation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
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


@dataclass(frozen=True, eq=False)
class LazyDataset(Dataset[Any]):
    """Some rows (all, if `flatten_probs` is None) of a source, normalised, and augmented if there is an augmentation.

    >>> source = TensorSource(torch.full((4, 1, 8, 8), 255, dtype=torch.uint8), torch.arange(4))
    >>> part = LazyDataset(source, transform=lambda x: x - 0.5)
    >>> x, y = part[3]
    >>> x.shape, float(x.max()), int(y), len(part.take([0, 2]))
    (torch.Size([1, 8, 8]), 0.5, 3, 2)
    """

    source: Source
    transform: Transform = identity
    augment: Augmentation | None = None
    rows: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.source) if self.rows is None else len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([check_int("row", i)])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Many rows at once; images of one size are augmented and normalised together."""
        xs, ys = self.source.read(self._places(numbers))
        return _prepared(xs, ys, self.transform, self.augment)

    def take(self, numbers: Iterable[int]) -> "LazyDataset":
        """These rows of the part, by their numbers, as a part."""
        listed = numbers.tolist() if isinstance(numbers, Tensor | np.ndarray) else list(numbers)
        return replace(self, rows=tuple(self._places([check_int("row", i) for i in listed])))

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
    xs: list[Tensor], ys: list[Tensor], normalise: Transform, augment: Augmentation | None
) -> list[tuple[Tensor, Tensor]]:
    one_size = all(x.shape == xs[0].shape for x in xs) and all(y.shape == ys[0].shape for y in ys)
    groups = [(xs, ys)] if one_size and xs else [([x], [y]) for x, y in zip(xs, ys, strict=True)]
    rows: list[tuple[Tensor, Tensor]] = []
    for some_x, some_y in groups:
        x, y = to_unit_range(torch.stack(some_x)), torch.stack(some_y)
        if augment is not None:
            x, y = augment(x, y)
        rows += zip(normalise(x), y, strict=True)
    return rows


def to_unit_range(x: Tensor) -> Tensor:
    """Bytes as numbers in [0, 1]; other numbers as they are, in single precision at most."""
    if x.dtype == torch.uint8:
        return x.float().div_(255)
    return x if not x.is_floating_point() else x.to(torch.float32)


@dataclass(frozen=True, eq=False)
class StreamingDataset(IterableDataset[Any]):
    """Rows that come one after the other, of unknown number: a part that is never held.

    `read()` begins anew and gives rows, which `decode` turns into (x, y) as a source gives them; loader processes and
    data-parallel ranks take turns, and decode their own alone. Small rows are augmented and normalised some at once.

    >>> stream = StreamingDataset(lambda: iter([(torch.full((1, 2), 255, dtype=torch.uint8), torch.tensor(3))]))
    >>> [(x.tolist(), int(y)) for x, y in stream]
    [([[1.0, 1.0]], 3)]
    """

    read: Callable[[], Iterator[Any]]
    transform: Transform = identity
    augment: Augmentation | None = None
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
            if len(xs) == STREAM_BATCH_SIZE or x.numel() > LARGE_EXAMPLE:
                yield from _prepared(xs, ys, self.transform, self.augment)
                xs, ys = [], []
        yield from _prepared(xs, ys, self.transform, self.augment)


@dataclass(frozen=True, eq=False)
class TensorSource:
    """A source in memory: inputs (n, C, *) and targets (n, …)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        return list(self.x[list(rows)]), self.read_targets(rows)

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        return list(self.y[list(rows)])


Task = Literal["classification", "regression", "segmentation"]


@dataclass(frozen=True)
class Standardizer:
    """x̂ = (x − mean) / std, with a pair of numbers for each channel; `axes` pixel axes follow the channels.

    >>> import torch
    >>> normalise = Standardizer((0.5, 0.0), (0.25, 1.0), axes=0)
    >>> normalise(torch.tensor([[1.0, 3.0]]))
    tensor([[2., 3.]])
    >>> normalise.inverse(torch.tensor([2.0, 3.0]))
    tensor([1., 3.])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    axes: int = 2

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(
                f"got {len(self.mean)} means and {len(self.std)} standard deviations; expected one for each channel"
            )
        if not all(map(math.isfinite, self.mean)) or not all(math.isfinite(s) and s > 0 for s in self.std):
            raise ValueError(f"got mean={self.mean}, std={self.std}; expected finite numbers, standard deviations > 0")

    @classmethod
    def of(cls, x: Tensor, *, axes: int = 0) -> "Standardizer":
        """That of these inputs (n, C, *); a constant channel is only shifted."""
        others = [0, *range(2, x.ndim)]
        mean, std = x.double().mean(others), x.double().std(others, correction=0)
        varies = x.amin(others) < x.amax(others)  # the computed spread of a constant is rounding
        return cls(tuple(mean.tolist()), tuple(std.where(varies & (std > 0), 1.0).tolist()), axes)

    def __call__(self, x: Tensor) -> Tensor:
        mean, std = self._shaped(x)
        return (x - mean) / std

    def inverse(self, x: Tensor) -> Tensor:
        """x from x̂."""
        mean, std = self._shaped(x)
        return x * std + mean

    def _shaped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.ndim <= self.axes or x.shape[-1 - self.axes] != len(self.mean):
            raise ValueError(
                f"got an input of shape {tuple(x.shape)}; expected {len(self.mean)} channels before its last "
                f"{self.axes} axes"
            )
        shape = (len(self.mean), *[1] * self.axes)
        return x.new_tensor(self.mean).view(shape), x.new_tensor(self.std).view(shape)


@dataclass(frozen=True, eq=False)
class DatasetBundle:
    """Parts of rows (x, y), and what a net and a task must know of them.

    x is floating point and normalised: (C, H, W), (C, D, H, W) or (C,) for a row of a table; or the numbers of words,
    (T,). y is a class, a mask (H, W) or (D, H, W) whose `ignore_index` pixels count nowhere, or a number, standardised by
    `target`.
    """

    name: str
    task: Task
    train: Dataset[Any]
    validation: Dataset[Any] | None  # None where none of the training rows were to be kept apart
    test: Dataset[Any] | None  # None where the labels of a set's test rows are not public
    channels: int  # of an image or a volume; columns of a table; words of a vocabulary
    classes: tuple[str, ...] = ()  # their names; none in regression
    standardizer: Transform | None = None
    augmentation: Augmentation | None = None
    ignore_index: int | None = None
    target: Standardizer | None = None  # of the targets of a regression: target.inverse gives them in their units
    vocabulary: Any = None  # of a set of texts: vocabulary.encode(sentence) gives x
    schema: Any = None  # of a table: what was made of each column; schema.encode(frame) gives x

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def augmented_train(self) -> Dataset[Any]:
        """The training part with the set's augmentation, drawn anew at each reading; train itself without one."""
        return self.train if self.augmentation is None else _augmented(self.train, self.augmentation)

    def with_class_counts(self, counts: Sequence[int] | Mapping[int, int], *, seed: int = 0) -> "DatasetBundle":
        """The same set with counts[c] training rows of class c, drawn by the seed (paper, section 4.5: 50 … 500)."""
        self._must_be("classification", "imbalanced")
        rows = subsample_classes(self.train, counts, seed=seed)
        train = self.train.take(rows.indices) if isinstance(self.train, LazyDataset) else rows
        return replace(self, train=train)

    def with_corruption(self, corruption: str, severity: int, *, seed: int = 0) -> "DatasetBundle":
        """The same set with corrupted test images: before they are normalised, as a camera would."""
        known = CORRUPTIONS | ROTATION
        if corruption not in known:
            raise ValueError(f"got corruption={corruption!r}; expected one of {', '.join(known)}")
        if not isinstance(self.standardizer, Standardizer) or self.standardizer.axes != 2:
            raise ValueError(f"got {self.name}, whose inputs are no images; expected images to corrupt")
        if corruption in ROTATION and self.task == "segmentation":
            raise ValueError(
                f"got {corruption} of {self.name}, whose masks would not turn with their images; expected one of "
                f"{', '.join(CORRUPTIONS)}"
            )
        if self.test is None or isinstance(self.test, IterableDataset):
            raise ValueError(f"got {self.name} without test rows that can be read by number; expected some")
        raw = _Raw(self.test, self.standardizer)
        test = CorruptedDataset(raw, known[corruption], severity, seed=seed, transform=self.standardizer)
        return replace(self, test=test)

    def _must_be(self, task: Task, what: str) -> None:
        if self.task != task or isinstance(self.train, IterableDataset):
            kind = "a stream" if isinstance(self.train, IterableDataset) else self.task
            raise ValueError(f"got {self.name}, which is {kind}; expected {task} with rows to count for .{what}(…)")

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {_size(getattr(self, name))}" for name in ("train", "validation", "test"))
        kind = f"{self.num_classes} classes" if self.classes else "numbers"
        return f"DataSet({self.name!r}, {self.task}, {kind}, {self.channels} channels; {sizes})"


def _augmented(train: Dataset[Any], augment: Augmentation) -> Dataset[Any]:
    if isinstance(train, Subset):  # random_split's, too
        return Subset(_augmented(train.dataset, augment), train.indices)
    if not isinstance(train, LazyDataset | StreamingDataset):
        raise ValueError(
            f"got training rows of type {type(train).__name__}, which take no augmentation; expected a Part, a Stream, "
            "or a Subset of a Part"
        )
    return replace(train, augment=augment)


def _size(part: Dataset[Any] | None) -> str:
    if part is None:
        return "none"
    return f"{len(part):,}" if hasattr(part, "__len__") else "streamed"


@dataclass(frozen=True, eq=False)
class _Raw(Dataset[Any]):
    """The images of a part as they were before they were normalised, in [0, 1]."""

    data: Dataset[Any]
    standardizer: Standardizer

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        x, y = self.data[i]
        return self.standardizer.inverse(x).clamp(0.0, 1.0), y
