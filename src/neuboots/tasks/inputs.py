"""Inputs of any kind, batch by batch, and what is done with each of them.

A task that needs no labels takes a tensor of inputs (a tuple or dict of them for a net of several), a data set, or a
loader, whose labels, if there are any, it passes over.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from neuboots.batches import as_pair, in_memory
from neuboots.progress import bar
from neuboots.tasks.common import batches_of, check_batch_size, part_of

Answer = TypeVar("Answer")
Inputs = Any  # a tensor of inputs (or a tuple or dict of them), a data set, or a loader


class _Unlabelled(Dataset[Any]):
    """Rows of inputs, with or without a label, as (x, 0)."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(cast(Sized, self.data))

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return _input_of(self.data[i]), 0


@dataclass(frozen=True)
class _Batches:
    """Batches of inputs, with or without labels, as (x, [0])."""

    loader: Any

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, list[int]]]:
        return ((_input_of(batch), [0]) for batch in self.loader)


def _input_of(row: Any) -> Any:
    if isinstance(row, tuple | list):
        return row[0] if len(row) == 1 else as_pair(row)[0]
    return row


def are_tensors(data: Inputs) -> bool:
    """Whether these are inputs themselves, and not a data set or loader of them."""
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else (data,)
    return len(parts) > 0 and all(isinstance(part, Tensor) for part in parts)


def input_batches(
    data: Inputs, batch_size: int = 256, *, title: str, progress: bool = True
) -> Generator[Any, None, None]:
    """x, batch by batch, in the order in which the data give it.

    >>> import torch
    >>> [len(x) for x in input_batches(torch.zeros(5, 2), 3, title="reading", progress=False)]
    [3, 2]
    """
    if are_tensors(data):
        if rows_in(data) == 0:
            raise ValueError("got no inputs; expected at least one row")
        check_batch_size(batch_size)
        starts = range(0, rows_in(data), batch_size)
        with bar(title, len(starts), show=progress) as advance:
            for start in starts:
                yield part_of(data, slice(start, start + batch_size))
                advance(title)
        return
    if isinstance(data, np.ndarray) or not isinstance(data, Dataset | Iterable | Sized):
        raise ValueError(
            f"got inputs of type {type(data).__name__}; expected a tensor of inputs, a data set, or a loader of "
            "batches: torch.as_tensor(x) makes a tensor of an array"
        )
    if isinstance(data, list) and any(isinstance(part, Tensor) for part in data):
        raise ValueError("got a list of tensors; expected one tensor of inputs: torch.stack(rows) makes it")
    rows: Any = data
    if isinstance(rows, IterableDataset):
        rows = DataLoader(rows, batch_size=batch_size)
    tensors, _ = in_memory(getattr(rows, "dataset", rows))
    if tensors is None or len(tensors) == 1:  # labels, if there are any, are not looked at
        rows = _Batches(rows) if isinstance(rows, Iterable) and not isinstance(rows, Dataset) else _Unlabelled(rows)
    for x, _ in batches_of(rows, batch_size, title=title, progress=progress):
        yield x


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors of one batch of inputs."""
    return [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, Mapping) else x)


def rows_in(x: Any) -> int:
    """N of one batch of inputs."""
    return len(tensors_in(x)[0])


def per_input(values: Tensor) -> Tensor:
    """One number for each input: the mean over its pixels: (N, *) → (N,)."""
    return values.flatten(1).mean(1) if values.ndim > 1 else values


def row_names(x: Any) -> list[bytes]:
    """Eight bytes for each row, a hash of its numbers: the same after a copy to float64, for −0 and for 0, and
    in whatever order a dict has its keys.

    >>> import torch
    >>> a, b = row_names(torch.tensor([[0.5, -0.0], [0.5, 1.0]]))
    >>> a == row_names(torch.tensor([[0.5, 0.0]], dtype=torch.float64))[0] != b
    True
    """
    parts = [x[key] for key in sorted(x)] if isinstance(x, Mapping) else tensors_in(x)
    columns = [_words(part) for part in parts]
    return [hashlib.blake2b(b"".join(row), digest_size=8).digest() for row in zip(*columns, strict=True)]


def _words(part: Tensor) -> list[bytes]:
    part = part.detach().cpu()
    values = part.double() + 0.0 if part.is_floating_point() else part.long()
    return [row.tobytes() for row in values.numpy()]


def answers_to(ask: Callable[[Any], Answer], x: Inputs, batch_size: int, *, title: str, progress: bool) -> list[Answer]:
    """ask(batch) for each batch of inputs; tensors without a row are one batch.

    >>> import torch
    >>> answers_to(len, torch.zeros(5, 2), 3, title="counting", progress=False)
    [3, 2]
    """
    if are_tensors(x) and rows_in(x) == 0:
        return [ask(x)]
    answers = []
    for part in input_batches(x, batch_size, title=title, progress=progress):  # no comprehension: it would hold a
        answers.append(ask(part))  # failed call's bar open for as long as its traceback lives
    return answers
