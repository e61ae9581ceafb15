"""Rows of a data set with their numbers, in an order named by (seed, epoch).

    batch k of epoch t = rows π_t[k·G … (k+1)·G),   π_t a permutation of [n]

The number i of a row finds its block u(i), whatever the order it comes in. Under data parallelism every rank
takes its share of the same global batch; a run may start at any batch of any epoch.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from neuboots._prng import derive_seed, stable_hash


@dataclass(frozen=True)
class Batch:
    """N rows: inputs, targets, their numbers in the data set, and the number of the step since the start."""

    x: Any
    y: Tensor
    index: Tensor
    step: int = 0


class IndexedDataset(Dataset[Any]):
    """A data set of (x, y) that also gives the number of each row: (x, y, i). For a loop of your own.

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


def unpack_example(row: Any) -> tuple[Any, Any]:
    """One row as (inputs, target), or a sentence."""
    if isinstance(row, tuple | list) and len(row) == 2:
        return row[0], row[1]
    raise ValueError(
        f"got a row of type {type(row).__name__}; expected (x, y), where x is a tensor, a tuple for a net of several "
        "inputs, or a dict for a net called with keywords: wrap the data set to give such pairs"
    )


def dataset_length(data: Dataset[Any]) -> int | None:
    """n, or None for a stream."""
    if isinstance(data, DataLoader):
        raise ValueError("got a DataLoader; expected the data set itself: give loader.dataset")
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        return None
    n = len(cast(Sized, data))
    if n < 1:
        raise ValueError("got a data set with n = 0 rows; expected at least one")
    return n


def check_length(data: Dataset[Any]) -> int:
    """n, or a sentence for a stream."""
    n = dataset_length(data)
    if n is None:
        raise ValueError("got a stream of unknown length; expected a data set with a length")
    return n


def load_targets(data: Dataset[Any], *, seed: int = 0, reduce: Callable[[Tensor], Tensor] = lambda y: y) -> Tensor:
    """All targets, (n, …): from the tensors or the `.targets` of the data set, else by reading it once; a data set that
    has `target(i)` is asked for that alone.

    Rows that are read are named by the seed, as in training, and `reduce` makes each small before the next is read.
    """
    tensors, places = get_tensors(data)
    if tensors is not None:
        return tensors[-1] if places is None else tensors[-1][places]
    whole, places = _unwrapped(data)
    if (targets := getattr(whole, "targets", None)) is not None:
        targets = torch.as_tensor(targets)
        return targets if places is None else targets[places]
    found = []
    target_alone: Callable[[int], Any] | None = getattr(whole, "target", None)
    with preserve_rng_state():
        for i in range(len(cast(Sized, data))):
            if target_alone is not None:  # no image is decoded for its mask
                target = target_alone(i if places is None else int(places[i]))
            else:
                seed_everything(seed, "target", i)
                target = unpack_example(data[i])[1]
            found.append(reduce(_as_target(target)))
    if any(target.shape != found[0].shape for target in found):
        raise ValueError("got targets of several shapes; expected one shape for all rows")
    return torch.stack(found)


def load_class_labels(data: Dataset[Any]) -> Tensor:
    """The class of each row: (n,)."""
    labels = load_targets(data)
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    whole = not labels.is_floating_point() or bool((labels == labels.round()).all())
    if labels.ndim != 1 or not whole or bool((labels < 0).any()):
        raise ValueError(
            f"got targets of shape {tuple(labels.shape)} and type {labels.dtype}; expected the class of each row, a "
            "whole number from 0 on"
        )
    return labels.long().cpu()


def _as_target(y: Any) -> Tensor:
    try:
        return torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"got a target of type {type(y).__name__}; expected a number or a tensor: turn labels into 0 … C − 1"
        ) from None


def seed_everything(*name: int | str) -> None:
    """Python, NumPy and torch from one name: whatever a net or an augmentation draws is governed by it."""
    word = derive_seed(*name)
    torch.default_generator.manual_seed(word)  # torch.manual_seed asks every device: a hundred times slower
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(word)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(word)
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """The caller's random states are given back untouched."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@dataclass
class _Order:
    """Batches of (epoch, row) for one rank; `epoch` and `start` are set before each pass."""

    n: int
    batch_size: int
    seed: int
    shuffle: bool = True
    rank: int = 0
    world: int = 1
    epoch: int = 0
    start: int = 0

    def __len__(self) -> int:
        """A last batch of a single row, which BatchNorm cannot take, joins the one before."""
        whole, rest = divmod(self.n, self.batch_size)
        return max(1, whole + (rest > 1))

    def bounds(self, k: int) -> tuple[int, int]:
        """Where global batch k lies in the order of the epoch."""
        return k * self.batch_size, self.n if k == len(self) - 1 else (k + 1) * self.batch_size

    def order(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.n)
        rng = torch.Generator().manual_seed(stable_hash(self.seed, "order", self.epoch))
        return torch.randperm(self.n, generator=rng)

    def rows(self, k: int, order: Tensor) -> Tensor:
        """This rank's rows of global batch k; one row, of no weight, where the batch has too few for all."""
        start, stop = self.bounds(k)
        whole = order[start:stop]
        mine = whole[self.rank :: self.world]
        return mine if len(mine) else whole[:1]

    def share(self, k: int) -> float:
        """What a mean over this rank's rows weighs in the mean over the global batch, times the number of ranks."""
        start, stop = self.bounds(k)
        rows = stop - start
        return self.world * len(range(self.rank, rows, self.world)) / rows

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = self.order()
        for k in range(self.start, len(self)):
            yield [(self.epoch, i) for i in self.rows(k, order).tolist()]


class _SeededRows(Dataset[Any]):
    """Row i of epoch t, read with randomness named by (seed, t, i): augmentation does not depend on workers.

    A data set that reads many rows at once (`__getitems__`) draws for all of a batch, by the name of its first row.
    """

    def __init__(self, data: Dataset[Any], seed: int) -> None:
        self.data, self.seed = data, seed
        self.at_once = hasattr(_unwrapped(data)[0], "__getitems__")  # a Subset always has it, its data may not

    def __getitem__(self, named: tuple[int, int]) -> tuple[Any, Any, int]:
        epoch, i = named
        seed_everything(self.seed, "row", epoch, i)
        x, y = unpack_example(self.data[i])
        return x, y, i

    def __getitems__(self, named: list[tuple[int, int]]) -> list[tuple[Any, Any, int]]:
        if not self.at_once:
            return [self[name] for name in named]
        rows = [i for _, i in named]
        seed_everything(self.seed, "rows", *named[0])
        pairs = cast(Any, self.data).__getitems__(rows)
        return [(*unpack_example(pair), i) for pair, i in zip(pairs, rows, strict=True)]


class _NumberedStream(IterableDataset[Any]):
    """A stream with a running number for each row, the same at each pass; `epoch` is set before each one.

    What it draws as it gives a row is named by (seed, epoch, number), as for rows that are read by their number.
    """

    def __init__(self, data: Dataset[Any], seed: int, rank: int, world: int) -> None:
        self.data, self.seed, self.rank, self.world = data, seed, rank, world
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[Any, Any, int]]:
        worker = get_worker_info()
        lane, lanes = (worker.id, worker.num_workers) if worker else (0, 1)
        lane, lanes = lane + self.rank * lanes, lanes * self.world
        seed_everything(self.seed, "stream", self.epoch, lane)
        rows = iter(cast(Iterable[Any], self.data))
        for number in itertools.count(lane, lanes):
            seed_everything(self.seed, "row", self.epoch, number)
            try:
                x, y = unpack_example(next(rows))
            except StopIteration:
                return
            yield x, y, number


def _unwrapped(data: Dataset[Any]) -> tuple[Dataset[Any], Tensor | None]:
    """The data set inside any Subsets, and the places of their rows in it (None: all)."""
    places: Tensor | None = None
    while isinstance(data, Subset):
        rows = torch.as_tensor(list(data.indices), dtype=torch.int64)
        places = rows if places is None else rows[places]
        data = data.dataset
    return data, places


def get_tensors(data: Dataset[Any]) -> tuple[tuple[Tensor, ...] | None, Tensor | None]:
    """The tensors of a TensorDataset, or of a Subset of one together with the places of its rows."""
    whole, places = _unwrapped(data)
    return (whole.tensors, places) if isinstance(whole, TensorDataset) else (None, None)


def _collate(rows: list[Any]) -> Any:
    """torch's own, but for a word on rows of several sizes."""
    try:
        return default_collate(rows)
    except RuntimeError:
        first = [row[0].values() if isinstance(row[0], Mapping) else row[:1] for row in rows]
        shapes = sorted({tuple(part.shape) for parts in first for part in parts if isinstance(part, Tensor)})
        if len(shapes) < 2:
            raise
        raise ValueError(
            f"got inputs of several sizes in one batch, such as {shapes[0]} and {shapes[-1]}; expected one size: crop "
            "or resize images (an augmentation may), pad texts to one length, or take batch_size=1"
        ) from None


class EpochLoader:
    """Passes over a data set: `epoch(t, start)` yields (k, batch, share) from batch k = start on.

    Tensors in memory are sliced directly; other data go through torch's DataLoader; a stream gives its first
    `steps_per_epoch` batches at each pass, and with several workers each of them makes batches of its own rows.
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
        world: int = 1,
    ) -> None:
        self.data = data
        self.tensors, self.places = get_tensors(data)
        self.shuffle = shuffle
        n = dataset_length(data)
        if batch_size < 1:
            raise ValueError(f"got batch_size {batch_size}; expected at least 1")
        if self.tensors is not None and len(self.tensors) < 2:
            raise ValueError("got a TensorDataset with one tensor; expected inputs and targets")
        if n is None:
            if steps_per_epoch is None:
                raise ValueError(
                    "got a stream of unknown length; expected Recipe(steps_per_epoch=…) to say how many batches "
                    "make an epoch"
                )
            self.steps = steps_per_epoch
            self.stream = _NumberedStream(data, seed, rank, world)
            size = max(1, batch_size // world)
            self.loader: DataLoader[Any] = DataLoader(
                self.stream, batch_size=size, num_workers=num_workers, collate_fn=_collate
            )
            return
        self.order = _Order(n, batch_size, seed, shuffle, rank, world)
        self.steps = len(self.order)
        if self.tensors is None:
            self.loader = DataLoader(
                _SeededRows(data, seed),
                batch_sampler=cast(Any, self.order),
                num_workers=num_workers,
                persistent_workers=num_workers > 0,
                collate_fn=_collate,
            )

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[int, Batch, float]]:
        if dataset_length(self.data) is None:
            yield from self._from_stream(epoch, start)
            return
        self.order.epoch, self.order.start = epoch, start
        for k, (x, y, index) in enumerate(self._parts(), start):
            yield k, Batch(x, y, index, epoch * self.steps + k), self.order.share(k)

    def _from_stream(self, epoch: int, start: int) -> Iterator[tuple[int, Batch, float]]:
        self.stream.epoch = epoch
        done = 0
        for k, (x, y, index) in zip(range(self.steps), self.loader, strict=False):
            done = k + 1
            if k >= start:  # a stream cannot be entered in the middle
                yield k, Batch(x, y, index, epoch * self.steps + k), 1.0
        if done < (self.steps if self.shuffle else 1):  # a validation stream may be as short as it likes
            raise ValueError(
                f"the stream ended after {done} of {self.steps} batches in epoch {epoch + 1}; expected as many as "
                "Recipe(steps_per_epoch=…) says: lower it, or let the stream go on"
            )

    def _parts(self) -> Iterator[tuple[Any, Tensor, Tensor]]:
        if self.tensors is None:
            yield from self.loader
            return
        order = self.order.order()
        for k in range(self.order.start, self.steps):
            rows = self.order.rows(k, order)
            yield *self.select_rows(rows), rows

    def select_rows(self, rows: Tensor) -> tuple[Any, Tensor]:
        """(x, y) of these rows, from tensors in memory."""
        assert self.tensors is not None, "rows of other data come from a DataLoader"
        *inputs, targets = self.tensors
        where = rows if self.places is None else self.places[rows]
        parts = tuple(tensor[where] for tensor in inputs)
        return parts[0] if len(parts) == 1 else parts, targets[where]


class EnsembleLoader:
    """Passes of K members side by side: batch k holds batch k of each one's own pass: x (K, N, …), index (K, N).

    Member m sees the rows in the order, and augmented with the randomness, of a Loader with seeds[m].
    """

    def __init__(self, data: Dataset[Any], *, batch_size: int, seeds: Sequence[int]) -> None:
        self.loaders = [EpochLoader(data, batch_size=batch_size, seed=seed) for seed in seeds]
        self.steps = self.loaders[0].steps

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[int, Batch, float]]:
        if self.loaders[0].tensors is not None:
            yield from self._from_memory(epoch, start)
            return
        for parts in zip(*(loader.epoch(epoch, start) for loader in self.loaders), strict=True):
            k, first, share = parts[0]
            x, y, index = default_collate([(batch.x, batch.y, batch.index) for _, batch, _ in parts])
            yield k, Batch(x, y, index, first.step), share

    def _from_memory(self, epoch: int, start: int) -> Iterator[tuple[int, Batch, float]]:
        """One look-up for all members."""
        first = self.loaders[0]
        for loader in self.loaders:
            loader.order.epoch = epoch
        orders = torch.stack([loader.order.order() for loader in self.loaders])  # (K, n)
        for k in range(start, self.steps):
            rows = orders[:, slice(*first.order.bounds(k))]  # (K, N)
            x, y = first.select_rows(rows)
            yield k, Batch(x, y, rows, epoch * self.steps + k), 1.0
