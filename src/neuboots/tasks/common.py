"""What several tasks share: rows of a data set in batches, checks of a call, a table of figures in plain text."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from neuboots.batches import Loader, as_pair, in_memory, own_randomness
from neuboots.prediction import Predictor
from neuboots.progress import bar

Rows = Dataset[Any] | Iterable[Any]  # a data set of rows (x, y), or batches (x, y) as a DataLoader gives them


def batches_of(
    data: Rows, batch_size: int = 256, *, title: str, progress: bool = True
) -> Generator[tuple[Any, Tensor], None, None]:
    """(x, y) batch by batch: rows of a data set in their order, or the batches that a loader gives.

    >>> from torch.utils.data import TensorDataset
    >>> rows = TensorDataset(torch.zeros(5, 3), torch.arange(5))
    >>> [y.tolist() for x, y in batches_of(rows, 3, title="reading", progress=False)]
    [[0, 1, 2], [3, 4]]
    """
    check_batch_size(batch_size)
    total: int | None = None  # of a stream nobody knows it
    parts: Iterator[Any]
    if isinstance(data, IterableDataset):
        parts = iter(DataLoader(data, batch_size=batch_size))
    elif isinstance(data, Dataset) or _is_map_style(data):
        loader = Loader(cast(Dataset[Any], data), batch_size=batch_size, seed=0, shuffle=False)
        total, parts = loader.steps, ((batch.x, batch.y) for _, batch, _ in loader.epoch(0))
    elif isinstance(data, Iterable):
        total, parts = _length(data), (_pair(part, data) for part in data)
    else:
        raise ValueError(
            f"got data of type {type(data).__name__}; expected a data set of rows (x, y), or a loader that gives "
            "batches (x, y)"
        )
    empty = True
    with bar(title, total, show=progress) as advance:
        while True:
            with own_randomness():  # around the reading alone: whoever stops in the middle finds his own again
                part = next(parts, None)
            if part is None:
                break
            x, y = as_pair(part)
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
    tensors, _ = in_memory(getattr(loader, "dataset", loader))
    if tensors is not None and len(tensors) > 2 and isinstance(part, tuple | list) and len(part) == len(tensors):
        return tuple(part[:-1]), part[-1]
    return as_pair(part)


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


def part_of(x: Any, rows: Any) -> Any:
    """These rows of a tensor, or of each in a tuple or dict of tensors."""
    if isinstance(x, Mapping):
        return {key: value[rows] for key, value in x.items()}
    if isinstance(x, tuple | list):
        return tuple(value[rows] for value in x)
    return x[rows]


def check_predictor(predictor: Any) -> None:
    if not isinstance(predictor, Predictor):
        raise ValueError(f"got a {type(predictor).__name__}; expected a predictor, as a method's fit gives one")


def labels_for(probs: Tensor, y: Tensor, *, void: int | None = None) -> Tensor:
    """Labels (N, *) for probabilities (N, C, *), as whole numbers 0 … C − 1 (or `void`) on their device.

    They may be floats, as the targets of a net with one logit are, and have axes of length 1 besides.

    >>> labels_for(torch.full((2, 2), 0.5), torch.tensor([[0.0], [1.0]]))
    tensor([0, 1])
    """
    shape, classes = (probs.shape[0], *probs.shape[2:]), probs.shape[1]
    if y.is_floating_point() and not bool((y == y.round()).all()):
        raise ValueError("got labels that are not whole numbers; expected classes 0 … C − 1: is this a regression?")
    _check_axes("labels", y, shape)
    labels = y.to(probs.device).long().reshape(shape)
    wrong = (labels < 0) | (labels >= classes)
    if void is not None:
        wrong &= labels != void
    if bool(wrong.any()):
        raise ValueError(
            f"labels run from {int(labels.min())} to {int(labels.max())}; expected 0 to {classes - 1} for {classes} "
            "classes: renumber the labels, drop the inputs without one, or name the label of pixels without one (void)"
        )
    return labels


def targets_for(mean: Tensor, y: Tensor) -> Tensor:
    """Targets in the shape, device and precision of the outputs (N, C, *): (N,) and (N, 1) are taken as one.

    >>> targets_for(torch.zeros(2, 1), torch.tensor([3, 4]))
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


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as text, a column for each key; numbers to four significant figures, right-aligned.

    >>> print(table([{"method": "plain", "error": 0.25}, {"method": "neuboots", "error": 0.2}]))
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
