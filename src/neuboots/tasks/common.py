"""What several tasks share: rows of a data set in batches, checks of a call, a table of figures in plain text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from neuboots.batches import Loader, as_pair, own_randomness, size_of
from neuboots.prediction import Predictor
from neuboots.progress import bar

Rows = Dataset[Any] | Iterable[Any]  # a data set of rows (x, y), or batches (x, y) as a DataLoader gives them


def batches_of(data: Rows, batch_size: int = 256, *, title: str, progress: bool = True) -> Iterator[tuple[Any, Tensor]]:
    """(x, y) batch by batch: rows of a data set in their order, or the batches that a loader gives.

    >>> from torch.utils.data import TensorDataset
    >>> rows = TensorDataset(torch.zeros(5, 3), torch.arange(5))
    >>> [y.tolist() for x, y in batches_of(rows, 3, title="reading", progress=False)]
    [[0, 1, 2], [3, 4]]
    """
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        loader = Loader(data, batch_size=batch_size, seed=0, shuffle=False)
        total: int | None = loader.steps
        parts: Iterable[Any] = ((batch.x, batch.y) for _, batch, _ in loader.epoch(0))
    elif isinstance(data, IterableDataset):  # a stream of rows, of unknown length
        total, parts = None, DataLoader(data, batch_size=batch_size, collate_fn=default_collate)
    elif isinstance(data, Iterable):
        total, parts = _length(data), data
    else:
        raise ValueError(
            f"got data of type {type(data).__name__}; expected a data set of rows (x, y), or a loader that gives "
            "batches (x, y)"
        )
    empty = True
    with own_randomness(), bar(title, total, show=progress) as advance:
        for part in parts:
            x, y = as_pair(part)
            yield x, torch.as_tensor(y)
            empty = False
            advance(title)
    if empty:
        raise ValueError("got data that give no batch; expected at least one row")


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


def inputs_of(x: Any, batch_size: int = 256, *, title: str, progress: bool = True) -> Iterator[Any]:
    """The rows of one tensor (or of a tuple or dict of them) in batches, with progress."""
    first = next(iter(x.values())) if isinstance(x, Mapping) else x[0] if isinstance(x, tuple | list) else x
    total = -(-len(first) // batch_size)
    with bar(title, total, show=progress) as advance:
        for start in range(0, len(first), batch_size):
            yield part_of(x, slice(start, start + batch_size))
            advance(title)


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


def check_rows(data: Dataset[Any]) -> int:
    """n, or a sentence for a stream."""
    n = size_of(data)
    if n is None:
        raise ValueError("got a stream of unknown length; expected a data set with a length")
    return n


def labels_for(probs: Tensor, y: Tensor, *, void: int | None = None) -> Tensor:
    """Labels (N, *) for probabilities (N, C, *), as whole numbers 0 … C − 1 (or `void`) on their device.

    The targets of a net with one logit may be 0.0 and 1.0, and have an axis for that logit.

    >>> labels_for(torch.full((2, 2), 0.5), torch.tensor([[0.0], [1.0]]))
    tensor([0, 1])
    """
    shape, classes = (probs.shape[0], *probs.shape[2:]), probs.shape[1]
    if y.is_floating_point() and not bool(((y == 0) | (y == 1)).all()):
        raise ValueError("got labels that are not whole numbers; expected classes 0 … C − 1: is this a regression?")
    if y.numel() != probs.numel() // classes:
        raise ValueError(f"got labels of shape {tuple(y.shape)}; expected {shape}, one for each input (and pixel)")
    labels = y.to(probs.device).long().reshape(shape)
    wrong = (labels < 0) | (labels >= classes)
    if void is not None:
        wrong &= labels != void
    if bool(wrong.any()):
        raise ValueError(
            f"labels run from {int(labels.min())} to {int(labels.max())}; expected 0 to {classes - 1} for {classes} "
            "classes: renumber the labels, or drop the inputs without one"
        )
    return labels


def targets_for(mean: Tensor, y: Tensor) -> Tensor:
    """Targets in the shape, device and precision of the outputs (N, C, *): (N,) and (N, 1) are taken as one.

    >>> targets_for(torch.zeros(2, 1), torch.tensor([3, 4]))
    tensor([[3.],
            [4.]])
    """
    if y.shape[:1] != mean.shape[:1] or y.numel() != mean.numel():
        raise ValueError(f"got targets of shape {tuple(y.shape)}; expected {tuple(mean.shape)}, as the net's outputs")
    return y.reshape(mean.shape).to(mean)


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
