"""What several tasks share: rows of a data set in batches, checks of a call, a table of figures in plain text.

Inputs of any kind, batch by batch, and what is done with each of them.

A task that needs no labels takes a tensor of inputs (a tuple or dict of them for a net of several), a data set, or a
loader, whose labels, if there are any, it passes over.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from neuboots.loading import EpochLoader, get_tensors, preserve_rng_state, unpack_example
from neuboots.prediction import Predictor
from neuboots.training import progress_bar

LabeledData = Dataset[Any] | Iterable[Any]  # a data set of rows (x, y), or batches (x, y) as a DataLoader gives them


def iter_batches(
    data: LabeledData, batch_size: int = 256, *, title: str, progress: bool = True
) -> Generator[tuple[Any, Tensor], None, None]:
    """(x, y) batch by batch: rows of a data set in their order, or the batches that a loader gives.

    >>> from torch.utils.data import TensorDataset
    >>> rows = TensorDataset(torch.zeros(5, 3), torch.arange(5))
    >>> [y.tolist() for x, y in iter_batches(rows, 3, title="reading", progress=False)]
    [[0, 1, 2], [3, 4]]
    """
    check_batch_size(batch_size)
    total: int | None = None  # of a stream nobody knows it
    parts: Iterator[Any]
    if isinstance(data, IterableDataset):
        parts = iter(DataLoader(data, batch_size=batch_size))
    elif isinstance(data, Dataset) or _is_map_style(data):
        loader = EpochLoader(cast(Dataset[Any], data), batch_size=batch_size, seed=0, shuffle=False)
        total, parts = loader.steps, ((batch.x, batch.y) for _, batch, _ in loader.epoch(0))
    elif isinstance(data, Iterable):
        total, parts = _length(data), (_pair(part, data) for part in data)
    else:
        raise ValueError(
            f"got data of type {type(data).__name__}; expected a data set of rows (x, y), or a loader that gives "
            "batches (x, y)"
        )
    empty = True
    with progress_bar(title, total, enabled=progress) as advance:
        while True:
            with preserve_rng_state():  # around the reading alone: whoever stops in the middle finds his own again
                part = next(parts, None)
            if part is None:
                break
            x, y = unpack_example(part)
            yield x, _as_batch(y)
            empty = False
            advance(title)
    if empty:
        raise ValueError("got data that give no batch; expected at least one row")


def _is_map_style(data: Any) -> bool:
    """Rows by their numbers, though it is no torch Dataset by name."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Iterable)


def _pair(part: Any, loader: Any) -> tuple[Any, Any]:
    """A loader's batch as (x, y); that of tensors in memory may have several inputs before the target."""
    tensors, _ = get_tensors(getattr(loader, "dataset", loader))
    if tensors is not None and len(tensors) > 2 and isinstance(part, tuple | list) and len(part) == len(tensors):
        return tuple(part[:-1]), part[-1]
    return unpack_example(part)


def _as_batch(y: Any) -> Tensor:
    batch: Tensor = torch.as_tensor(y)
    if batch.ndim == 0:
        raise ValueError(
            "got single rows (x, y); expected batches of them, or a data set: wrap a list of rows in DataLoader(rows, "
            "batch_size=256)"
        )
    return batch


def check_batch_size(batch_size: int) -> None:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"got batch_size={batch_size!r}; expected a whole number, at least 1")


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


def take_rows(x: Any, rows: Any) -> Any:
    """These rows of a tensor, or of each in a tuple or dict of tensors."""
    if isinstance(x, Mapping):
        return {key: value[rows] for key, value in x.items()}
    if isinstance(x, tuple | list):
        return tuple(value[rows] for value in x)
    return x[rows]


def check_predictor(predictor: Any) -> None:
    if not isinstance(predictor, Predictor):
        raise ValueError(f"got a {type(predictor).__name__}; expected a predictor, as a method's fit gives one")


def align_labels(probs: Tensor, y: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """Labels (N, *) for probabilities (N, C, *), as whole numbers 0 … C − 1 (or `ignore_index`) on their device.

    They may be floats, as the targets of a net with one logit are, and have axes of length 1 besides.

    >>> align_labels(torch.full((2, 2), 0.5), torch.tensor([[0.0], [1.0]]))
    tensor([0, 1])
    """
    shape, classes = (probs.shape[0], *probs.shape[2:]), probs.shape[1]
    if y.is_floating_point() and not bool((y == y.round()).all()):
        raise ValueError("got labels that are not whole numbers; expected classes 0 … C − 1: is this a regression?")
    _check_axes("labels", y, shape)
    labels = y.to(probs.device).long().reshape(shape)
    wrong = (labels < 0) | (labels >= classes)
    if ignore_index is not None:
        wrong &= labels != ignore_index
    if bool(wrong.any()):
        raise ValueError(
            f"labels run from {int(labels.min())} to {int(labels.max())}; expected 0 to {classes - 1} for {classes} "
            "classes: renumber the labels, drop the inputs without one, or name the label of pixels without one (void)"
        )
    return labels


def align_targets(mean: Tensor, y: Tensor) -> Tensor:
    """Targets in the shape, device and precision of the outputs (N, C, *): (N,) and (N, 1) are taken as one.

    >>> align_targets(torch.zeros(2, 1), torch.tensor([3, 4]))
    tensor([[3.],
            [4.]])
    """
    _check_axes("targets", y, tuple(mean.shape))
    return y.reshape(mean.shape).to(mean)


def _check_axes(what: str, y: Tensor, shape: tuple[int, ...]) -> None:
    """Axes of length 1 may be missing or more; no other may differ, lest pixels or outputs change places."""
    got, expected = ([d for d in axes[1:] if d != 1] for axes in (tuple(y.shape), shape))
    if y.shape[:1] != shape[:1] or got != expected:
        raise ValueError(f"got {what} of shape {tuple(y.shape)}; expected {shape}, as the predictor's outputs")


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as text, a column for each key; numbers to four significant figures, right-aligned.

    >>> print(format_table([{"method": "plain", "error": 0.25}, {"method": "neuboots", "error": 0.2}]))
    method    error
    plain      0.25
    neuboots    0.2
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_shown(row.get(name)) for name in names] for row in rows]
    numeric = [all(isinstance(row.get(name), int | float | Tensor | None) for row in rows) for name in names]
    widths = [max(len(line[k]) for line in [names, *cells]) for k in range(len(names))]
    lines = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in [names, *cells]
    ]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Tensor):
        value = value.item()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_Result = TypeVar("_Result")
InputData = Any  # a tensor of inputs (or a tuple or dict of them), a data set, or a loader


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
        return row[0] if len(row) == 1 else unpack_example(row)[0]
    return row


def is_input_batch(data: InputData) -> bool:
    """Whether these are inputs themselves, and not a data set or loader of them."""
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else (data,)
    return len(parts) > 0 and all(isinstance(part, Tensor) for part in parts)


def iter_inputs(
    data: InputData, batch_size: int = 256, *, title: str, progress: bool = True
) -> Generator[Any, None, None]:
    """x, batch by batch, in the order in which the data give it.

    >>> import torch
    >>> [len(x) for x in iter_inputs(torch.zeros(5, 2), 3, title="reading", progress=False)]
    [3, 2]
    """
    if is_input_batch(data):
        if num_rows(data) == 0:
            raise ValueError("got no inputs; expected at least one row")
        check_batch_size(batch_size)
        starts = range(0, num_rows(data), batch_size)
        with progress_bar(title, len(starts), enabled=progress) as advance:
            for start in starts:
                yield take_rows(data, slice(start, start + batch_size))
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
    tensors, _ = get_tensors(getattr(rows, "dataset", rows))
    if tensors is None or len(tensors) == 1:  # labels, if there are any, are not looked at
        rows = _Batches(rows) if isinstance(rows, Iterable) and not isinstance(rows, Dataset) else _Unlabelled(rows)
    for x, _ in iter_batches(rows, batch_size, title=title, progress=progress):
        yield x


def input_tensors(x: Any) -> list[Tensor]:
    """The tensors of one batch of inputs."""
    return [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, Mapping) else x)


def num_rows(x: Any) -> int:
    """N of one batch of inputs."""
    return len(input_tensors(x)[0])


def mean_per_input(values: Tensor) -> Tensor:
    """One number for each input: the mean over its pixels: (N, *) → (N,)."""
    return values.flatten(1).mean(1) if values.ndim > 1 else values


def hash_rows(x: Any) -> list[bytes]:
    """Eight bytes for each row, a hash of its numbers: the same after a copy to float64, for −0 and for 0, and
    in whatever order a dict has its keys.

    >>> import torch
    >>> a, b = hash_rows(torch.tensor([[0.5, -0.0], [0.5, 1.0]]))
    >>> a == hash_rows(torch.tensor([[0.5, 0.0]], dtype=torch.float64))[0] != b
    True
    """
    parts = [x[key] for key in sorted(x)] if isinstance(x, Mapping) else input_tensors(x)
    columns = [_words(part) for part in parts]
    return [hashlib.blake2b(b"".join(row), digest_size=8).digest() for row in zip(*columns, strict=True)]


def _words(part: Tensor) -> list[bytes]:
    part = part.detach().cpu()
    values = part.double() + 0.0 if part.is_floating_point() else part.long()
    return [row.tobytes() for row in values.numpy()]


def map_batches(
    ask: Callable[[Any], _Result], x: InputData, batch_size: int, *, title: str, progress: bool
) -> list[_Result]:
    """ask(batch) for each batch of inputs; tensors without a row are one batch.

    >>> import torch
    >>> map_batches(len, torch.zeros(5, 2), 3, title="counting", progress=False)
    [3, 2]
    """
    if is_input_batch(x) and num_rows(x) == 0:
        return [ask(x)]
    answers = []
    for part in iter_inputs(x, batch_size, title=title, progress=progress):  # no comprehension: it would hold a
        answers.append(ask(part))  # failed call's bar open for as long as its traceback lives
    return answers
