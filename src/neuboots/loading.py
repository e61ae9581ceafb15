"""Deterministic data loading: every batch is a function of (seed, epoch, step).

    batch k of epoch t = examples π_t[k·G … (k+1)·G),   π_t a permutation of [n]

Each example carries its index i in the data set, which selects its block u(i) in any order of reading. Under data
parallelism every rank takes its part of the same global batch, and reading can start at any batch of any epoch.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from neuboots._prng import derive_seed, stable_hash
from neuboots._validation import ArgumentError, check_int

FitData = Dataset[Any] | DataLoader[Any] | Sequence[Any]
CollateFn = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Batch:
    """A mini-batch of N examples.

    Attributes:
        x: Inputs: a tensor, or a tuple or dict of tensors.
        y: Targets, (N, *).
        index: Positions of the examples in the data set, (N,).
        step: Number of the optimizer step since the start of training.
    """

    x: Any
    y: Tensor
    index: Tensor
    step: int = 0


class IndexedDataset(Dataset[Any]):
    """A data set of (x, y) that also returns the index of each example, (x, y, i), for a custom training loop.

    Args:
        data: Map-style data set of pairs (x, y).

    Example:
        >>> data = IndexedDataset(TensorDataset(torch.zeros(5, 3), torch.arange(5)))
        >>> x, y, i = data[4]
        >>> int(y), i
        (4, 4)
    """

    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(cast(Sized, self.data))

    def __getitem__(self, i: int) -> tuple[Any, Any, int]:
        x, y = unpack_example(self.data[i])
        return x, y, i


# -- data sets -----------------------------------------------------------------------------------------


class _CollatedDataset(Dataset[Any]):
    """A data set with the collate function of the DataLoader that it was taken from."""

    def __init__(self, data: Dataset[Any], collate_fn: CollateFn) -> None:
        self.data, self.collate_fn = data, collate_fn

    def __len__(self) -> int:
        return len(cast(Sized, self.data))

    def __getitem__(self, i: int) -> Any:
        return self.data[i]

    def __iter__(self) -> Iterator[Any]:
        return iter(cast(Iterable[Any], self.data))


def select_examples(data: Dataset[Any], indices: Sequence[int]) -> Dataset[Any]:
    """Return the subset of a data set with these examples; it keeps the collate function.

    Args:
        data: Data set with a length.
        indices: Indices of the examples.

    Returns:
        The subset.
    """
    if isinstance(data, _CollatedDataset):
        return _CollatedDataset(select_examples(data.data, indices), data.collate_fn)
    return Subset(data, indices)


def as_dataset(data: FitData, *, name: str = "data") -> Dataset[Any]:
    """Return training data as a data set.

    Args:
        data: A data set of pairs (x, y), a pair (inputs, targets) of tensors or NumPy arrays, or a `DataLoader`, whose
            data set and collate function are used.
        name: Name of the argument in error messages.

    Returns:
        The data set.

    Raises:
        ArgumentError: If the data are none of these, or if a `DataLoader` selects or orders examples in its own way.

    Example:
        >>> len(as_dataset((np.zeros((5, 3)), np.arange(5))))
        5
    """
    if isinstance(data, DataLoader):
        _check_sampler(data, name)
        return data.dataset if data.collate_fn is default_collate else _CollatedDataset(data.dataset, data.collate_fn)
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(d, Tensor | np.ndarray) for d in data):
        if not all(d.ndim and getattr(d, "layout", torch.strided) == torch.strided for d in data):
            found = [(tuple(d.shape), getattr(d, "layout", "dense")) for d in data]
            raise ArgumentError(name, found, "dense arrays with a row for each example")
        if len(data[0]) != len(data[1]):
            raise ArgumentError(name, f"{len(data[0])} inputs, {len(data[1])} targets", "as many targets as inputs")
        arrays = (d if isinstance(d, Tensor) else np.require(d, requirements=["C", "W"]) for d in data)
        return TensorDataset(*map(torch.as_tensor, arrays))
    pair = isinstance(data, tuple) and len(data) == 2 and not all(isinstance(d, tuple | list) for d in data)
    if pair or isinstance(data, Tensor | np.ndarray) or not (hasattr(data, "__getitem__") or hasattr(data, "__iter__")):
        raise ArgumentError(name, type(data), "a Dataset, a pair (inputs, targets) of arrays, or a DataLoader")
    return cast(Dataset[Any], data)


def _check_sampler(loader: DataLoader[Any], name: str) -> None:
    """Raise if the loader does more than reading all examples once, in order or shuffled."""
    batches = loader.batch_sampler
    known = type(batches) is BatchSampler and not batches.drop_last
    if known and not isinstance(loader.dataset, IterableDataset):
        sampler = cast(BatchSampler, batches).sampler  # loader.sampler is a default where a batch_sampler is given
        shuffles = type(sampler) is RandomSampler and not sampler.replacement
        reads_all = len(cast(Sized, sampler)) == len(cast(Sized, loader.dataset))
        known = (shuffles or type(sampler) is SequentialSampler) and reads_all
    if not known:
        expected = "a DataLoader with batch_size, without its own sampler, batch_sampler or drop_last"
        raise ArgumentError(name, type(loader), expected, hint="pass its dataset: the seed determines the order")


def unpack_example(example: Any) -> tuple[Any, Any]:
    """Return one example of a data set as (inputs, target); raise ArgumentError if it is not a pair.

    Args:
        example: An example of a data set.

    Returns:
        Inputs and target.
    """
    if isinstance(example, tuple | list) and len(example) == 2:
        return example[0], example[1]
    expected = "examples (x, y), where x is a tensor, a tuple (several inputs) or a dict (keyword inputs)"
    raise ArgumentError("data", type(example), expected)


def dataset_length(data: Dataset[Any]) -> int | None:
    """Return the number of examples n, or None for an iterable data set; raise ArgumentError if n = 0.

    Args:
        data: Data set of pairs (x, y).

    Returns:
        n, or None.
    """
    inner = data.data if isinstance(data, _CollatedDataset) else data
    if isinstance(inner, IterableDataset) or not hasattr(inner, "__len__"):
        return None
    n = len(cast(Sized, inner))
    if n < 1:
        raise ArgumentError("data", "an empty data set", "at least one example")
    return n


def check_length(data: Dataset[Any]) -> int:
    """Return the number of examples n; raise ArgumentError for an iterable data set, whose length is unknown.

    Args:
        data: Data set of pairs (x, y).

    Returns:
        n.
    """
    n = dataset_length(data)
    if n is None:
        raise ArgumentError("data", type(data), "a data set with a length")
    return n


def _unwrap_subsets(data: Dataset[Any]) -> tuple[Dataset[Any], Tensor | None]:
    """Return the data set inside any Subsets and the positions of the selected examples in it (None: all).

    A subclass of Subset stays: its `__getitem__` may change the examples.
    """
    positions: Tensor | None = None
    while type(data) is Subset or isinstance(data, _CollatedDataset):
        if isinstance(data, _CollatedDataset):
            data = data.data
            continue
        rows = torch.as_tensor(list(data.indices), dtype=torch.int64)
        positions = rows if positions is None else rows[positions]
        data = data.dataset
    return data, positions


def get_tensors(data: Dataset[Any]) -> tuple[tuple[Tensor, ...] | None, Tensor | None]:
    """Return the tensors (x, …, y) of a TensorDataset, or of a Subset of one, and the positions of its examples.

    Args:
        data: Data set of pairs (x, y).

    Returns:
        The tensors (None for other data) and the positions (None: all).
    """
    inner, positions = _unwrap_subsets(data)
    in_memory = type(inner) is TensorDataset and len(inner.tensors) > 1 and not isinstance(data, _CollatedDataset)
    return (inner.tensors, positions) if in_memory else (None, None)  # type: ignore[attr-defined]


def load_targets(data: Dataset[Any], *, seed: int = 0, reduce: Callable[[Tensor], Tensor] = lambda y: y) -> Tensor:
    """Return all targets, (n, *): from tensors or `.targets` of the data set if it has them, else by reading it once.

    Args:
        data: Data set of pairs (x, y). If it has a method `target(i)`, only that is called.
        seed: Seed of what the data set draws while it is read.
        reduce: Function applied to each target before the next one is read.

    Returns:
        The targets, stacked.
    """
    inner, positions = _unwrap_subsets(data)
    stored = inner.tensors[-1] if type(inner) is TensorDataset else getattr(inner, "targets", None)
    if stored is not None and getattr(inner, "target_transform", None) is None:
        stored = torch.as_tensor(stored)
        return stored if positions is None else stored[positions]
    targets = []
    read_target: Callable[[int], Any] | None = getattr(inner, "target", None)
    with preserve_rng_state():
        for i in range(len(cast(Sized, data))):
            if read_target is not None:  # no image is decoded for its mask
                target = read_target(i if positions is None else int(positions[i]))
            else:
                seed_everything(seed, "target", i)
                target = collate_examples(data, [data[i]])[1][0]
            targets.append(reduce(torch.as_tensor(target)))
    return torch.stack(targets)


def load_class_labels(data: Dataset[Any]) -> Tensor:
    """Return the class of each example, (n,); raise ArgumentError if the targets are not class labels.

    Args:
        data: Data set of pairs (x, y).

    Returns:
        The classes, int64.
    """
    labels = load_targets(data)
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    integral = not labels.is_floating_point() or bool((labels == labels.round()).all())
    if labels.ndim != 1 or not integral or bool((labels < 0).any()):
        raise ArgumentError(
            "data", f"targets {tuple(labels.shape)} of {labels.dtype}", "class labels (n,), integers from 0 on"
        )
    return labels.long().cpu()


# -- randomness ----------------------------------------------------------------------------------------


def seed_everything(*name: int | str) -> None:
    """Seed the global generators of Python, NumPy and torch from one name, such as (seed, "step", 3)."""
    seed = derive_seed(*name)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every device: a hundred times slower
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the global random states of Python, NumPy and torch on exit.

    Yields:
        Nothing.
    """
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


# -- batches -------------------------------------------------------------------------------------------


@dataclass
class _EpochSampler:
    """Batches (epoch, rows) of one rank; `epoch` and `start` are set before each pass."""

    n: int
    batch_size: int
    seed: int
    shuffle: bool = True
    rank: int = 0
    world_size: int = 1
    epoch: int = 0
    start: int = 0

    def __len__(self) -> int:
        """Number of batches; a last batch of one example, which BatchNorm rejects, is joined to the previous one."""
        full, rest = divmod(self.n, self.batch_size)
        return max(1, full + (rest > 1))

    def bounds(self, k: int) -> tuple[int, int]:
        """Start and end of global batch k in the order of the epoch."""
        return k * self.batch_size, self.n if k == len(self) - 1 else (k + 1) * self.batch_size

    def rank_weight(self, k: int) -> float:
        """Weight of the mean over this rank's examples in the mean over the global batch, times the world size."""
        start, stop = self.bounds(k)
        size = stop - start
        return self.world_size * len(range(self.rank, size, self.world_size)) / size

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        rng = torch.Generator().manual_seed(stable_hash(self.seed, "order", self.epoch))
        order = torch.randperm(self.n, generator=rng) if self.shuffle else torch.arange(self.n)
        for k in range(self.start, len(self)):
            batch = order[slice(*self.bounds(k))]
            mine = batch[self.rank :: self.world_size]
            yield self.epoch, mine if len(mine) else batch[:1]  # one example of weight 0 on a rank without examples


class _BatchReader(Dataset[Any]):
    """Batches (x, y, rows), read under the seed (seed, epoch, row): augmentation does not depend on workers.

    Tensors in memory are indexed directly. A data set that reads many examples at once (`__getitems__`) is seeded once
    a batch, by its first example.
    """

    def __init__(self, data: Dataset[Any], seed: int) -> None:
        self.data, self.seed = data, seed
        self.tensors, self.positions = get_tensors(data)
        # a Subset always has `__getitems__`, its data may not; one that is inherited would bypass a new `__getitem__`
        classes = type(_unwrap_subsets(data)[0]).__mro__
        readers = (name for cls in classes for name in ("__getitems__", "__getitem__") if name in vars(cls))
        self.batched = next(readers, None) == "__getitems__"

    def __getitem__(self, key: tuple[int, Tensor]) -> tuple[Any, Any, Tensor]:
        epoch, rows = key
        if self.tensors is not None:
            places = rows if self.positions is None else self.positions[rows]
            *inputs, targets = (tensor[places] for tensor in self.tensors)
            return inputs[0] if len(inputs) == 1 else tuple(inputs), targets, rows
        numbers = rows.tolist()
        if self.batched:
            seed_everything(self.seed, "rows", epoch, numbers[0])
            data = self.data.data if isinstance(self.data, _CollatedDataset) else self.data
            examples = cast(Any, data).__getitems__(numbers)
        else:
            examples = [self._read_example(epoch, i) for i in numbers]
        return *collate_examples(self.data, examples), rows

    def _read_example(self, epoch: int, i: int) -> Any:
        seed_everything(self.seed, "row", epoch, i)
        return self.data[i]


class _IndexedStream(IterableDataset[Any]):
    """An iterable data set whose examples are numbered, the same at each pass; `epoch` is set before each one.

    What it draws for an example is seeded by (seed, epoch, number), as for a map-style data set.
    """

    def __init__(self, data: Dataset[Any], seed: int, rank: int, world_size: int) -> None:
        self.data, self.seed, self.rank, self.world_size = data, seed, rank, world_size
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        first, step = worker_id + self.rank * num_workers, num_workers * self.world_size
        seed_everything(self.seed, "stream", self.epoch, first)
        examples = iter(cast(Iterable[Any], self.data))
        for number in itertools.count(first, step):
            seed_everything(self.seed, "row", self.epoch, number)
            try:
                example = next(examples)
            except StopIteration:
                return
            yield example, number

    def collate(self, rows: list[tuple[Any, int]]) -> tuple[Any, Any, Tensor]:
        """Collate (example, number)."""
        return *collate_examples(self.data, [row[0] for row in rows]), torch.tensor([row[1] for row in rows])


def collate_examples(data: Dataset[Any], examples: list[Any]) -> tuple[Any, Any]:
    """Return a batch (x, y) of these examples, by the data set's own collate function if it has one.

    Args:
        data: Data set of pairs (x, y).
        examples: Pairs (x, y), or whatever the collate function of the data set turns into a batch (x, y).

    Returns:
        Batched inputs and targets.
    """
    return unpack_example(getattr(data, "collate_fn", default_collate)(examples))


class EpochLoader:
    """Reads a data set in epochs: `epoch(t, start)` yields (k, batch, rank_weight) from batch k = start on.

    Tensors in memory are indexed directly; other data go through torch's `DataLoader`. An iterable data set gives its
    first `steps_per_epoch` batches at each pass; with several workers, each of them makes batches of its own examples.

    Args:
        data: Data set of pairs (x, y).
        batch_size: Number of examples in a global batch.
        seed: Seed of the order and of what the data set draws.
        shuffle: Whether the order changes with the epoch.
        num_workers: Number of worker processes.
        steps_per_epoch: Number of batches of an iterable data set.
        rank: Rank of this process.
        world_size: Number of processes that share a global batch.
    """

    def __init__(
        self,
        data: Dataset[Any],
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        num_workers: int = 0,
        steps_per_epoch: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        n = dataset_length(data)
        check_int("batch_size", batch_size, minimum=1)
        self.shuffle = shuffle
        self.loader: DataLoader[Any] | None = None
        self.source: _EpochSampler | _IndexedStream
        if n is None:
            if steps_per_epoch is None:
                raise ArgumentError(
                    "steps_per_epoch", None, "the number of batches of an iterable data set in an epoch"
                )
            self.steps = steps_per_epoch
            self.source = _IndexedStream(data, seed, rank, world_size)
            size = max(1, batch_size // world_size)
            self.loader = DataLoader(self.source, size, num_workers=num_workers, collate_fn=self.source.collate)
            return
        self.source = _EpochSampler(n, batch_size, seed, shuffle, rank, world_size)
        self.steps = len(self.source)
        self.reader = _BatchReader(data, seed)
        if num_workers and self.reader.tensors is None:
            options: dict[str, Any] = {"batch_size": None, "collate_fn": _identity, "persistent_workers": True}
            self.loader = DataLoader(self.reader, sampler=self.source, num_workers=num_workers, **options)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[int, Batch, float]]:
        """Yield (k, batch k, weight of this rank's mean in the mean over the global batch) for k = start, …"""
        self.source.epoch = epoch
        if isinstance(self.source, _EpochSampler):
            self.source.start = start
            batches = map(self.reader.__getitem__, self.source) if self.loader is None else self.loader
            for k, (x, y, index) in enumerate(batches, start):
                yield k, Batch(x, y, index, epoch * self.steps + k), self.source.rank_weight(k)
            return
        done = 0
        for k, (x, y, index) in zip(range(self.steps), cast(Iterable[Any], self.loader), strict=False):
            done = k + 1
            if k >= start:  # a stream cannot be entered in the middle
                yield k, Batch(x, y, index, epoch * self.steps + k), 1.0
        if done < (self.steps if self.shuffle else 1):  # validation data may be shorter
            hint = "lower it, or let the data set yield more"
            expected = f"at most {done}, the number of batches in the data set"
            raise ArgumentError("steps_per_epoch", self.steps, expected, hint=hint)


def _identity(batch: Any) -> Any:
    return batch


class EnsembleLoader:
    """Reads a data set for K members at once: batch k holds batch k of each member, x (K, N, …) and index (K, N).

    Member m sees the examples in the order, and with the random augmentation, of an `EpochLoader` with `seeds[m]`.

    Args:
        data: Data set of pairs (x, y).
        batch_size: Number of examples of each member in a batch.
        seeds: Seeds of the members.
    """

    def __init__(self, data: Dataset[Any], *, batch_size: int, seeds: Sequence[int]) -> None:
        n = check_length(data)
        self.samplers = [_EpochSampler(n, batch_size, seed) for seed in seeds]
        self.readers = [_BatchReader(data, seed) for seed in seeds]
        self.steps = len(self.samplers[0])

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[int, Batch, float]]:
        """Yield (k, batch k of all members, weight 1) for k = start, …"""
        for sampler in self.samplers:
            sampler.epoch, sampler.start = epoch, start
        for k, keys in enumerate(zip(*self.samplers, strict=True), start):
            index = torch.stack([rows for _, rows in keys])
            if self.readers[0].tensors is not None:  # one lookup for all members
                x, y, _ = self.readers[0][epoch, index]
            else:
                x, y, _ = default_collate([reader[key] for reader, key in zip(self.readers, keys, strict=True)])
            yield k, Batch(x, y, index, epoch * self.steps + k), 1.0


# -- splits --------------------------------------------------------------------------------------------

TRAIN, VALIDATION, TEST = 0, 1, 2  # splits of rows


def train_val_test_split(
    n: int, val_fraction: float, test_fraction: float | Tensor, *, seed: int, strata: Tensor | None = None
) -> Tensor:
    """Assign each of n rows to the training, validation or test split.

    Args:
        n: Number of rows.
        val_fraction: Fraction of the rows that are not in the test split.
        test_fraction: Fraction of all rows, or the indices of the test rows.
        seed: Random seed.
        strata: Class of each row (n,). Each class has the same fraction in each split up to rounding, and at least one
            row in the training split.

    Returns:
        Split of each row, 0 (training), 1 (validation) or 2 (test): (n,), uint8.

    Raises:
        ArgumentError: If there are too few rows to leave one of each class for training.

    Example:
        >>> split = train_val_test_split(20, 0.25, 0.2, seed=0, strata=torch.arange(20) % 2)
        >>> split.bincount().tolist(), split[::2].bincount().tolist()
        ([12, 4, 4], [6, 2, 2])
    """
    split, seed = torch.zeros(n, dtype=torch.uint8), check_int("seed", seed)
    if isinstance(test_fraction, Tensor):
        split[test_fraction] = TEST
    else:
        split[draw_rows(n, test_fraction, "test", seed, strata)] = TEST
    rest = (split == TRAIN).nonzero()[:, 0]
    drawn = draw_rows(len(rest), val_fraction, "validation", seed, None if strata is None else strata[rest])
    split[rest[drawn]] = VALIDATION
    return split


def draw_rows(n: int, fraction: float, name: str, seed: int, strata: Tensor | None, *, keep_one: bool = True) -> Tensor:
    """Draw a random fraction of n rows, stratified; with `keep_one`, one row of each class is never drawn.

    Rows are ordered by class and, within a class, at random, and taken at even distances in that order.

    Args:
        n: Number of rows.
        fraction: Fraction of the rows to draw.
        name: Name of the draw, which determines it together with the seed.
        seed: Seed of the draw.
        strata: Class of each row, or None for one class: (n,).
        keep_one: Whether one row of each class is never drawn.

    Returns:
        Indices of the rows.
    """
    classes = torch.zeros(n) if strata is None else strata.cpu()
    if classes.shape != (n,):
        raise ArgumentError("strata", f"a tensor of shape {tuple(classes.shape)}", f"one class for each of {n} rows")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed(name, seed)))
    order = order[classes[order].argsort(stable=True)]
    if keep_one:
        order = order[classes[order].diff(prepend=classes[order][:1] - 1) == 0]
    size = max(1, round(fraction * n)) if fraction > 0 else 0
    if size > len(order) - (not keep_one):
        raise ArgumentError(
            f"{'val' if name == 'validation' else name}_fraction",
            fraction,
            f"a fraction of {n} rows that leaves one of each class for training",
            hint="add rows, or use a smaller fraction",
        )
    return order[((torch.arange(size) + 0.5) * (len(order) / max(1, size))).long()]
