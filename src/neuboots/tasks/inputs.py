"""Inputs of any kind, batch by batch, and what is done with each of them.

A task that needs no labels takes a tensor of inputs (a tuple or dict of them for a net of several), a data set, or a
loader, whose labels, if there are any, it passes over.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from neuboots.batches import as_pair, in_memory
from neuboots.tasks.common import batches_of, inputs_of

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
    """Batches of inputs, with or without labels, as (x, 0)."""

    loader: Any

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        return ((_input_of(batch), 0) for batch in self.loader)


def _input_of(row: Any) -> Any:
    if isinstance(row, tuple | list):
        return row[0] if len(row) == 1 else as_pair(row)[0]
    return row


def are_tensors(data: Inputs) -> bool:
    """Whether these are inputs themselves, and not a data set or loader of them."""
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else (data,)
    return len(parts) > 0 and all(isinstance(part, Tensor) for part in parts)


def input_batches(data: Inputs, batch_size: int = 256, *, title: str, progress: bool = True) -> Iterator[Any]:
    """x, batch by batch, in the order in which the data give it.

    >>> import torch
    >>> [len(x) for x in input_batches(torch.zeros(5, 2), 3, title="reading", progress=False)]
    [3, 2]
    """
    if are_tensors(data):
        if rows_in(data) == 0:
            raise ValueError("got no inputs; expected at least one row")
        yield from inputs_of(data, batch_size, title=title, progress=progress)
        return
    if not isinstance(data, Dataset | Iterable):
        raise ValueError(
            f"got inputs of type {type(data).__name__}; expected a tensor of inputs, a data set, or a loader of batches"
        )
    rows: Any = data
    if isinstance(rows, IterableDataset):
        rows = DataLoader(rows, batch_size=batch_size)
    if isinstance(rows, Dataset):
        tensors, _ = in_memory(rows)
        labelled = tensors is not None and len(tensors) > 1
        rows = rows if labelled else _Unlabelled(rows)
    else:
        rows = _Batches(rows)
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
    """Eight bytes for each row, a hash of its numbers: the same in float32 and in float64, for −0 and for 0,
    and in whatever order a dict has its keys.

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
