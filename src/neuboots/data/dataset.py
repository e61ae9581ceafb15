"""Data sets that are read on demand, standardization, the bundle of a data set's splits, and imbalanced subsets.

    dataset[i] = (transform(augment(xᵢ)), yᵢ),    standardization: x̂ = (x − mean) / std for each channel

xᵢ comes from a source as it is stored: uint8 values, which are scaled to [0, 1], or floating-point numbers. Random
augmentation draws from torch's global random state, which the training loop seeds for each batch.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

from neuboots._prng import derive_keys, draw_uniform
from neuboots._validation import ArgumentError, check_fraction, check_int
from neuboots.data._common import identity
from neuboots.loading import check_length, draw_rows, load_class_labels

STREAM_BATCH_SIZE = 32  # rows of a stream that are transformed at once
LARGE_EXAMPLE = 1 << 16  # values of a row that is transformed by itself

Task = Literal["classification", "regression", "segmentation"]

Transform = Callable[[Tensor], Tensor]  # (N, C, *) → (N, C, *)
Augmentation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # images in [0, 1] with labels (N,) or masks (N, *)


class Source(Protocol):
    """Storage of rows (files, columns of a table, tensors) that is read on demand."""

    def __len__(self) -> int: ...

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Read inputs (C, *) and targets of some rows.

        Args:
            rows: Indices of the rows.

        Returns:
            One input and one target for each row.
        """
        ...

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        """Read targets alone, without decoding inputs.

        Args:
            rows: Indices of the rows.

        Returns:
            One target for each row.
        """
        ...


@dataclass(frozen=True, eq=False)
class TensorSource:
    """Source in memory.

    Attributes:
        x: Inputs (n, C, *).
        y: Targets (n, ...).
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and targets of some rows; see `Source`."""
        return list(self.x[list(rows)]), self.read_targets(rows)

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        """Targets of some rows; see `Source`."""
        return list(self.y[list(rows)])


class PairDecoder(Protocol):
    """Decoder of an input file and its target."""

    def __call__(self, file: str, target: Any) -> tuple[Tensor, Tensor]:
        """Decode input and target.

        Args:
            file: Path of the input.
            target: Its class, or the path of its mask.

        Returns:
            Input (C, *) and target.
        """
        ...

    def decode_target(self, target: Any) -> Tensor:
        """Decode the target alone.

        Args:
            target: The class, or the path of the mask.

        Returns:
            The target.
        """
        ...


@dataclass(frozen=True, eq=False)
class FileSource:
    """Source of files that are decoded on demand.

    Attributes:
        files: Paths of the inputs.
        targets: Class of each file, or path of its mask.
        decoder: Decodes an input and its target.
        skipped: Files with other suffixes in the same folders.
    """

    files: tuple[str, ...] = field(repr=False)
    targets: tuple[Any, ...] = field(repr=False)
    decoder: PairDecoder
    skipped: tuple[str, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and targets of some rows; see `Source`."""
        pairs = [self.decoder(self.files[row], self.targets[row]) for row in rows]
        return [x for x, _ in pairs], [y for _, y in pairs]

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        """Targets of some rows; see `Source`."""
        return [self.decoder.decode_target(self.targets[row]) for row in rows]


def to_unit_range(x: Tensor) -> Tensor:
    """Scale uint8 values to [0, 1]; other floating-point numbers become float32, integers stay.

    Args:
        x: Values as a source stores them.

    Returns:
        Values as a net takes them.
    """
    if x.dtype == torch.uint8:
        return x.float().div_(255)
    return x.to(torch.float32) if x.is_floating_point() else x


@dataclass(frozen=True, eq=False)
class LazyDataset(Dataset[Any]):
    """Map-style data set that reads, augments and transforms rows of a source on demand.

    Attributes:
        source: Where the rows come from.
        transform: Applied to inputs (N, C, *) after the augmentation.
        augment: Random augmentation of inputs and targets; None for none.
        rows: Indices of the rows in the source; None for all.

    Example:
        >>> source = TensorSource(torch.full((4, 1, 8, 8), 255, dtype=torch.uint8), torch.arange(4))
        >>> dataset = LazyDataset(source, transform=lambda x: x - 0.5)
        >>> x, y = dataset[3]
        >>> x.shape, float(x.max()), int(y), len(dataset.take([0, 2]))
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

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Many rows at once; rows of the same shape are augmented and transformed together."""
        xs, ys = self.source.read(self._source_rows(indices))
        return _prepare(xs, ys, self.transform, self.augment)

    def take(self, indices: Iterable[int]) -> "LazyDataset":
        """Select rows.

        Args:
            indices: Indices of the rows in this data set; a Boolean mask is an error.

        Returns:
            Data set of these rows, in this order.
        """
        values = indices.tolist() if isinstance(indices, Tensor | np.ndarray) else list(indices)
        return replace(self, rows=tuple(self._source_rows([check_int("row", i) for i in values])))

    def target(self, i: int) -> Tensor:
        """Read one target.

        Args:
            i: Index of the row.

        Returns:
            The target yᵢ.
        """
        return self.source.read_targets(self._source_rows([i]))[0]

    @property
    def targets(self) -> Tensor | None:
        """All targets (n,); None for masks, which may not fit in memory, and for an empty data set."""
        if len(self) == 0 or self.target(0).ndim > 1:
            return None
        return torch.stack(self.source.read_targets(self._source_rows(range(len(self)))))

    def to_stream(self) -> "StreamingDataset":
        """Read the rows in order as an iterable-style data set.

        Returns:
            The stream.
        """
        rows = self._source_rows(range(len(self)))
        return StreamingDataset(partial(iter, rows), self.transform, self.augment, self._read_one)

    def _read_one(self, row: int) -> tuple[Tensor, Tensor]:
        (x,), (y,) = self.source.read([row])
        return x, y

    def _source_rows(self, indices: Sequence[int]) -> list[int]:
        n = len(self)
        for i in indices:
            if not -n <= i < n:
                raise IndexError(f"Row {i} is out of range for {n} rows.")  # which also ends a loop over the data set
        return [i % n if self.rows is None else self.rows[i] for i in indices]


@dataclass(frozen=True, eq=False)
class StreamingDataset(IterableDataset[Any]):
    """Iterable-style data set; worker processes and data-parallel ranks take turns, each decoding its rows alone.

    Attributes:
        read: Starts a new pass and yields rows.
        transform: Applied to inputs (N, C, *) after the augmentation.
        augment: Random augmentation of inputs and targets; None for none.
        decode: Turns a row into (x, y); None if rows are pairs already.

    Example:
        >>> stream = StreamingDataset(lambda: iter([(torch.full((1, 2), 255, dtype=torch.uint8), torch.tensor(3))]))
        >>> [(x.tolist(), int(y)) for x, y in stream]
        [([[1.0, 1.0]], 3)]
    """

    read: Callable[[], Iterator[Any]]
    transform: Transform = identity
    augment: Augmentation | None = None
    decode: Callable[[Any], tuple[Tensor, Tensor]] | None = None

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
                yield from _prepare(xs, ys, self.transform, self.augment)
                xs, ys = [], []
        yield from _prepare(xs, ys, self.transform, self.augment)


def _prepare(
    xs: list[Tensor], ys: list[Tensor], transform: Transform, augment: Augmentation | None
) -> list[tuple[Tensor, Tensor]]:
    """Augment and transform rows, together if they have one shape."""
    same_shape = len({x.shape for x in xs}) == 1 == len({y.shape for y in ys})
    groups = [(xs, ys)] if same_shape else [([x], [y]) for x, y in zip(xs, ys, strict=True)]
    rows: list[tuple[Tensor, Tensor]] = []
    for group_x, group_y in groups:
        x, y = to_unit_range(torch.stack(group_x)), torch.stack(group_y)
        if augment is not None:
            x, y = augment(x, y)
        rows += zip(transform(x), y, strict=True)
    return rows


def hold_out(
    dataset: LazyDataset, fraction: float, *, seed: int, strata: Tensor | None = None
) -> tuple[LazyDataset, LazyDataset | None]:
    """Split a random fraction off a data set.

    Args:
        dataset: The data set to split.
        fraction: Fraction of its rows to hold out; 0 holds out none.
        seed: Random seed.
        strata: Class of each row (n,), for a stratified split.

    Returns:
        The remaining rows, and those held out (None if `fraction` is 0), both in the order of the data set.

    Raises:
        ArgumentError: If no row would remain.

    Example:
        >>> dataset = LazyDataset(TensorSource(torch.zeros(20, 1), torch.arange(20) % 2))
        >>> rest, held_out = hold_out(dataset, 0.2, seed=0, strata=dataset.targets)
        >>> len(rest), sorted(held_out.targets.tolist())
        (16, [0, 0, 1, 1])
    """
    if check_fraction("val_fraction", fraction, zero=True) == 0:
        return dataset, None
    drawn = torch.zeros(len(dataset), dtype=torch.bool)
    drawn[draw_rows(len(dataset), fraction, "validation", seed, strata, keep_one=False)] = True
    return dataset.take((~drawn).nonzero()[:, 0]), dataset.take(drawn.nonzero()[:, 0])


def complete_splits(
    splits: Mapping[str, LazyDataset], val_fraction: float, test_fraction: float, seed: int, *, stratify: bool = False
) -> tuple[LazyDataset, LazyDataset | None, LazyDataset | None]:
    """Hold out the splits that a data set does not have.

    Args:
        splits: The existing splits by name; "train" is among them.
        val_fraction: Fraction of the training rows for "validation", if that split does not exist.
        test_fraction: Fraction of the training rows for "test", if that split does not exist.
        seed: Random seed.
        stratify: Whether each class has the same fraction in each split.

    Returns:
        Training, validation and test split; None for one that does not exist and whose fraction is 0.

    Raises:
        ArgumentError: If the fractions leave no row for training.
    """
    check_fraction("val_fraction", val_fraction, zero=True)
    check_fraction("test_fraction", test_fraction, zero=True)
    seed = check_int("seed", seed)
    found: dict[str, Any] = dict(splits)
    remaining = 1.0
    for name, fraction in (("test", test_fraction), ("validation", val_fraction)):
        if name in splits:
            continue
        if fraction >= remaining:
            raise ArgumentError("val_fraction", val_fraction, f"below 1 together with test_fraction={test_fraction}")
        strata = found["train"].targets if stratify else None
        found["train"], found[name] = hold_out(found["train"], fraction / remaining, seed=seed, strata=strata)
        remaining -= fraction
    return found["train"], found["validation"], found["test"]


@dataclass(frozen=True)
class LoadOptions:
    """Options of the loaders of named data sets.

    Args:
        val_fraction: Fraction of the training rows for validation, where there is no validation split.
        seed: Random seed of the validation split.
        streaming: Whether splits are streams.
        split: Number of the test split, where there are several.
    """

    val_fraction: float = 0.1
    seed: int = 0
    streaming: bool = False
    split: int = 0

    def __post_init__(self) -> None:
        check_fraction("val_fraction", self.val_fraction, zero=True)
        check_int("seed", self.seed)
        check_int("split", self.split, minimum=0)


@dataclass(frozen=True)
class Standardizer:
    """x̂ = (x − mean) / std with one mean and standard deviation for each channel.

    Attributes:
        mean: Mean of each channel.
        std: Standard deviation of each channel, above 0.
        axes: Number of pixel axes that follow the channel axis; 0 for rows of a table.

    Example:
        >>> standardizer = Standardizer((0.5, 0.0), (0.25, 1.0), axes=0)
        >>> standardizer(torch.tensor([[1.0, 3.0]]))
        tensor([[2., 3.]])
        >>> standardizer.inverse(torch.tensor([2.0, 3.0]))
        tensor([1., 3.])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    axes: int = 2

    def __post_init__(self) -> None:
        if not self.mean or not all(map(math.isfinite, self.mean)):
            raise ArgumentError("mean", self.mean, "a finite number for each channel")
        if len(self.std) != len(self.mean) or not all(0 < s < math.inf for s in self.std):
            raise ArgumentError("std", self.std, f"a finite number above 0 for each of {len(self.mean)} channels")

    @classmethod
    def from_data(cls, x: Tensor, *, axes: int = 0) -> "Standardizer":
        """Mean and standard deviation of data; a constant channel has the standard deviation 1.

        Args:
            x: Inputs (n, C, *).
            axes: Number of pixel axes after the channel axis.

        Returns:
            The standardizer of these data.
        """
        values = np.moveaxis(x.double().cpu().numpy(), 1, -1).reshape(-1, x.shape[1])
        mean, std = values.mean(0), values.std(0)
        constant = values.min(0) == values.max(0)  # the computed deviation of a constant is rounding error
        mean, std = np.where(constant, values[0], mean), np.where(constant | (std == 0), 1.0, std)
        return cls(tuple(mean.tolist()), tuple(std.tolist()), axes)

    def __call__(self, x: Tensor) -> Tensor:
        mean, std = self._broadcastable(x)
        return (x - mean) / std

    def inverse(self, x: Tensor) -> Tensor:
        """Undo the standardization.

        Args:
            x: Standardized values (..., C, *).

        Returns:
            Values in their units.
        """
        mean, std = self._broadcastable(x)
        return x * std + mean

    def _broadcastable(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.ndim <= self.axes or x.shape[-1 - self.axes] != len(self.mean):
            expected = f"{len(self.mean)} channels before the last {self.axes} axes"
            raise ArgumentError("x", f"a tensor of shape {tuple(x.shape)}", expected)
        shape = (len(self.mean), *[1] * self.axes)
        return x.new_tensor(self.mean).view(shape), x.new_tensor(self.std).view(shape)


@dataclass(frozen=True, eq=False)
class DatasetBundle:
    """Splits of a data set with what a net and a task need to know about them.

    Inputs are floating point and standardized: (C, H, W), (C, D, H, W), (C,) for a row of a table; or token ids (T,).
    Targets are classes, masks (H, W) or (D, H, W), or standardized numbers (1,).

    Attributes:
        name: Name of the data set.
        task: "classification", "regression" or "segmentation".
        train: Training split.
        validation: Validation split; None if there is none.
        test: Test split; None if there is none.
        channels: Channels of an image or volume, columns of a table, or size of a vocabulary.
        classes: Names of the classes; empty in regression.
        standardizer: Transform of the inputs.
        augmentation: Augmentation of the training split; see `augmented_train`.
        ignore_index: Mask value of pixels without a class; None if there are none.
        target_standardizer: Standardizer of regression targets; its `inverse` gives their units.
        vocabulary: Vocabulary of a text data set.
        schema: Schema of a table.
    """

    name: str
    task: Task
    train: Dataset[Any]
    validation: Dataset[Any] | None
    test: Dataset[Any] | None
    channels: int
    classes: tuple[str, ...] = ()
    standardizer: Transform | None = None
    augmentation: Augmentation | None = None
    ignore_index: int | None = None
    target_standardizer: Standardizer | None = None
    vocabulary: Any = None
    schema: Any = None

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 in regression."""
        return len(self.classes)

    @property
    def augmented_train(self) -> Dataset[Any]:
        """Training split with the augmentation, drawn anew at each reading; `train` itself if there is none."""
        return self.train if self.augmentation is None else _with_augmentation(self.train, self.augmentation)

    def map_splits(self, function: Callable[[Any], Any]) -> "DatasetBundle":
        """Apply a function to each split that exists.

        Args:
            function: Maps a data set to a data set.

        Returns:
            The bundle of the new splits.
        """
        names = [name for name in ("train", "validation", "test") if getattr(self, name) is not None]
        return replace(self, **{name: function(getattr(self, name)) for name in names})

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {_format_size(getattr(self, name))}" for name in ("train", "validation", "test"))
        kind = f"{self.num_classes} classes" if self.classes else "numbers"
        return f"DatasetBundle({self.name!r}, {self.task}, {kind}, {self.channels} channels; {sizes})"


def _with_augmentation(train: Dataset[Any], augment: Augmentation) -> Dataset[Any]:
    if type(train) is Subset:  # as random_split makes them
        return Subset(_with_augmentation(train.dataset, augment), train.indices)
    if not isinstance(train, LazyDataset | StreamingDataset):
        raise TypeError(f"Cannot augment a {type(train).__name__}; expected a LazyDataset or a StreamingDataset.")
    return replace(train, augment=augment)


def _format_size(split: Dataset[Any] | None) -> str:
    if split is None:
        return "none"
    return f"{len(split):,}" if hasattr(split, "__len__") else "streamed"


def subsample_classes(data: Dataset[Any], counts: Sequence[int] | Mapping[int, int], *, seed: int = 0) -> "Subset[Any]":
    """Random subset with a given number of rows of each class, in the order of the data (paper, section 4.5).

    With one seed, the rows of smaller counts are among those of larger ones.

    Args:
        data: Classification data set with a length.
        counts: Number of rows of each class; a mapping excludes the classes that it does not name.
        seed: Random seed.

    Returns:
        The subset.

    Raises:
        ArgumentError: If a class has fewer rows than its count, or no row is left.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> labels = torch.arange(30) % 3
        >>> few = subsample_classes(TensorDataset(torch.zeros(30, 2), labels), [1, 5, 10])
        >>> labels[few.indices].bincount()
        tensor([ 1,  5, 10])
    """
    check_length(data)
    labels = load_class_labels(data)
    if not isinstance(counts, Mapping) and int(labels.max()) >= len(counts):
        raise ArgumentError("counts", counts, f"a count for each class 0 ... {int(labels.max())}, or a mapping")
    keys = derive_keys(torch.arange(len(labels)), check_int("seed", seed), "long tail")
    order = draw_uniform(keys, torch.zeros_like(keys)).argsort()
    selected = []
    for c, value in counts.items() if isinstance(counts, Mapping) else enumerate(counts):
        rows, count = order[labels[order] == c], check_int(f"counts[{c}]", value, minimum=0)
        if count > len(rows):
            raise ArgumentError(f"counts[{c}]", count, f"at most {len(rows)}, the number of rows of class {c}")
        selected.append(rows[:count])
    if not sum(map(len, selected)):
        raise ArgumentError("counts", counts, "at least one row")
    return Subset(data, torch.cat(selected).sort().values.tolist())
