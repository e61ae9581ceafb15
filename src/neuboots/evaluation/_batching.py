"""Batches of evaluation data, alignment of labels and targets with outputs, and tables of metrics as text.

Labeled data are a data set of examples (x, y) or a loader of batches (x, y). Where no labels are needed, inputs may be
a tensor (a tuple or dict of tensors for a net of several inputs), a data set or a loader, whose labels are ignored.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from neuboots._validation import ArgumentError, check_int
from neuboots.head import count_rows, take_rows
from neuboots.loading import EpochLoader, get_tensors, preserve_rng_state, unpack_example
from neuboots.prediction import Prediction, Predictor, Summary
from neuboots.training import progress_bar

LabeledData = Dataset[Any] | Iterable[Any]  # a data set of examples (x, y), or a loader of batches (x, y)
InputData = Any  # a tensor of inputs (or a tuple or dict of them), a data set, or a loader

_Result = TypeVar("_Result")

# -- batches -------------------------------------------------------------------------------------------


def iter_batches(
    data: LabeledData, batch_size: int = 256, *, title: str, progress: bool = True
) -> Generator[tuple[Any, Tensor], None, None]:
    """Yield batches (x, y): examples of a data set in their order, or the batches of a loader.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.zeros(5, 3), torch.arange(5))
    >>> [y.tolist() for x, y in iter_batches(data, 3, title="reading", progress=False)]
    [[0, 1, 2], [3, 4]]
    """
    check_int("batch_size", batch_size, minimum=1)
    total, batches = _open(data, batch_size)
    in_memory = isinstance(getattr(data, "loader", data), list) or (
        isinstance(data, Dataset) and get_tensors(data)[0] is not None
    )
    read = nullcontext if in_memory else preserve_rng_state  # the global generators are those of other threads, too
    empty = True
    with progress_bar(title, total, enabled=progress) as advance:
        while True:
            with read():  # only while reading: a caller who stops early gets the RNG state back
                batch = next(batches, None)
            if batch is None:
                break
            x, y = unpack_example(batch)
            y = torch.as_tensor(y)
            if y.ndim == 0:
                raise ArgumentError("data", "single examples", "batches or a data set", hint="use a DataLoader")
            yield x, y
            empty = False
            advance(title)
    if empty:
        raise ArgumentError("data", "no batch", "at least one example")


def _open(data: Any, batch_size: int) -> tuple[int | None, Iterator[Any]]:
    """The number of batches, if it is known, and the batches."""
    if isinstance(data, IterableDataset):
        return None, iter(DataLoader(data, batch_size=batch_size))
    map_style = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Iterable)
    if isinstance(data, Dataset) or map_style:
        loader = EpochLoader(cast(Dataset[Any], data), batch_size=batch_size, seed=0, shuffle=False)
        return loader.steps, ((batch.x, batch.y) for _, batch, _ in loader.epoch(0))
    if not isinstance(data, Iterable):
        raise ArgumentError("data", type(data).__name__, "a data set of examples (x, y), or a loader of batches (x, y)")
    try:
        total = len(cast(Sized, data))
    except TypeError:
        total = None
    return total, (_unpack_batch(batch, data) for batch in data)


def _unpack_batch(batch: Any, loader: Any) -> tuple[Any, Any]:
    """A loader's batch as (x, y); that of tensors in memory may have several inputs before the target."""
    tensors, _ = get_tensors(getattr(loader, "dataset", loader))
    if tensors is not None and len(tensors) > 2 and isinstance(batch, tuple | list) and len(batch) == len(tensors):
        return tuple(batch[:-1]), batch[-1]
    return unpack_example(batch)


class _UnlabeledDataset(Dataset[Any]):
    """Inputs of a data set, with or without a label, as (x, 0)."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return _drop_label(self.data[i]), 0


@dataclass(frozen=True)
class _UnlabeledLoader:
    """Batches of inputs of a loader, with or without labels, as (x, [0])."""

    loader: Any

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, list[int]]]:
        return ((_drop_label(batch), [0]) for batch in self.loader)


def _drop_label(example: Any) -> Any:
    if isinstance(example, tuple | list):
        return example[0] if len(example) == 1 else unpack_example(example)[0]
    return example


def is_input_batch(data: InputData) -> bool:
    """Whether data are inputs themselves, and not a data set or loader of them."""
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else (data,)
    return len(parts) > 0 and all(isinstance(part, Tensor) for part in parts)


def iter_inputs(
    data: InputData, batch_size: int = 256, *, title: str, progress: bool = True
) -> Generator[Any, None, None]:
    """Yield batches x of inputs in the order of the data.

    >>> [len(x) for x in iter_inputs(torch.zeros(5, 2), 3, title="reading", progress=False)]
    [3, 2]
    """
    if is_input_batch(data):
        starts = range(0, count_rows(data), check_int("batch_size", batch_size, minimum=1))
        data = [(take_rows(data, slice(start, start + batch_size)),) for start in starts]  # views
    stacked = isinstance(data, np.ndarray) or (isinstance(data, list) and any(isinstance(x, Tensor) for x in data))
    if stacked or not isinstance(data, Dataset | Iterable | Sized):
        raise ArgumentError("inputs", type(data).__name__, "a tensor (see torch.as_tensor), a data set, or a loader")
    source: Any = DataLoader(data, batch_size=batch_size) if isinstance(data, IterableDataset) else data
    tensors, _ = get_tensors(getattr(source, "dataset", source))
    if tensors is None or len(tensors) == 1:
        is_loader = isinstance(source, Iterable) and not isinstance(source, Dataset)
        source = _UnlabeledLoader(source) if is_loader else _UnlabeledDataset(source)
    for x, _ in iter_batches(source, batch_size, title=title, progress=progress):
        yield x


def predict_batches(
    function: Callable[[Any], tuple[Tensor, ...]], x: InputData, batch_size: int, *, title: str, progress: bool
) -> tuple[Tensor, ...]:
    """Apply a function to each batch of inputs and concatenate its results; tensors without a row are one batch.

    >>> predict_batches(lambda x: (x.sum(1),), torch.ones(3, 2), 2, title="adding", progress=False)
    (tensor([2., 2., 2.]),)
    """
    if is_input_batch(x) and count_rows(x) == 0:
        return function(x)
    results = []
    # No comprehension: after an error it would keep the progress bar open for as long as the traceback lives.
    for batch in iter_inputs(x, batch_size, title=title, progress=progress):
        results.append(function(batch))
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


# -- inputs, labels and targets ------------------------------------------------------------------------


def input_tensors(x: Any) -> list[Tensor]:
    """Return the tensors of one batch of inputs."""
    return [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, Mapping) else x)


def mean_per_input(values: Tensor) -> Tensor:
    """Average over the pixels of each input: (N, *) → (N,)."""
    return values.flatten(1).mean(1) if values.ndim > 1 else values


def hash_rows(x: Any) -> list[bytes]:
    """Return an eight-byte hash of the values of each row, the same for every dtype, sign of 0 and order of keys.

    >>> a, b = hash_rows(torch.tensor([[0.5, -0.0], [0.5, 1.0]]))
    >>> a == hash_rows(torch.tensor([[0.5, 0.0]], dtype=torch.float64))[0] != b
    True
    """
    columns = []
    for part in [x[key] for key in sorted(x)] if isinstance(x, Mapping) else input_tensors(x):
        values = part.detach().cpu()
        values = values.double() + 0.0 if values.is_floating_point() else values.long()
        columns.append([row.tobytes() for row in values.numpy()])
    return [hashlib.blake2b(b"".join(row), digest_size=8).digest() for row in zip(*columns, strict=True)]


def check_predictor(predictor: Any) -> None:
    """Check that the argument is a predictor."""
    if not isinstance(predictor, Predictor):
        raise ArgumentError("predictor", type(predictor).__name__, "a Predictor", hint="pass what method.fit returns")


def exclusive_probs(prediction: Prediction | Summary) -> Tensor:
    """Return the probabilities of exclusive classes, (N, C, *); raise ArgumentError for independent outputs."""
    if prediction.independent:
        hint = "evaluate_calibration, fit_conformal_classifier and TemperatureScaling take independent labels"
        raise ArgumentError("predictor", "independent outputs", "outputs of exclusive classes", hint=hint)
    return prediction.probs


def align_labels(probs: Tensor, y: Tensor, *, ignore_index: int | None = None) -> Tensor:
    """Return labels (N, *) for probabilities (N, C, *), as integers 0 … C − 1 (or `ignore_index`) on their device.

    They may be floats, as the targets of a net with one logit are, and have more or fewer axes of length 1.

    >>> align_labels(torch.full((2, 2), 0.5), torch.tensor([[0.0], [1.0]]))
    tensor([0, 1])
    """
    if y.is_floating_point() and not bool((y == y.round()).all()):
        raise ArgumentError("labels", "numbers that are no integers", "classes 0 … C − 1", hint="is this a regression?")
    shape, num_classes = (probs.shape[0], *probs.shape[2:]), probs.shape[1]
    _check_axes("labels", y, shape)
    labels = y.to(probs.device).long().reshape(shape)
    valid = is_counted(labels, ignore_index)
    if bool((((labels < 0) | (labels >= num_classes)) & valid).any()):
        found, expected = f"{int(labels.min())} to {int(labels.max())}", f"0 to {num_classes - 1}"
        raise ArgumentError("labels", found, expected, hint="renumber or drop the others, or pass ignore_index")
    return labels


def is_counted(labels: Tensor, ignore_index: int | None) -> Tensor:
    """Return which labels are not `ignore_index`: (N, *)."""
    return torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index


def check_any_counted(count: int, ignore_index: float | None) -> None:
    """Check that not all labels or targets are `ignore_index`."""
    if count == 0:
        raise ArgumentError("data", f"only labels equal to ignore_index ({ignore_index})", "some other labels")


def align_targets(mean: Tensor, y: Tensor) -> Tensor:
    """Return targets in the shape, device and dtype of the outputs (N, C, *); (N,) and (N, 1) are the same.

    >>> align_targets(torch.zeros(2, 1), torch.tensor([3, 4]))
    tensor([[3.],
            [4.]])
    """
    _check_axes("targets", y, tuple(mean.shape))
    return y.reshape(mean.shape).to(mean)


def _check_axes(name: str, y: Tensor, shape: tuple[int, ...]) -> None:
    """Check all axes whose length is not 1, so that pixels and outputs are not permuted."""
    got, expected = ([d for d in axes[1:] if d != 1] for axes in (tuple(y.shape), shape))
    if y.shape[:1] != shape[:1] or got != expected:
        raise ArgumentError(f"{name}.shape", tuple(y.shape), f"{shape}, as the outputs of the predictor")


# -- tables --------------------------------------------------------------------------------------------


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as text, a column for each key; numbers are right-aligned, with four significant digits.

    >>> print(format_table([{"method": "deterministic", "error": 0.25}, {"method": "neuboots", "error": 0.2}]))
    method         error
    deterministic   0.25
    neuboots         0.2
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_format_cell(row.get(name)) for name in names] for row in rows]
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


def format_columns(columns: Mapping[str, Sequence[Any] | Tensor]) -> str:
    """Format columns of equal length as `format_table` does.

    >>> print(format_columns({"class": range(2), "error": torch.tensor([0.25, 0.5])}))
    class  error
        0   0.25
        1    0.5
    """
    return format_table([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Format metrics as a table of two columns."""
    return format_columns({"metric": list(metrics), "value": list(metrics.values())})


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Tensor):
        value = value.item()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
