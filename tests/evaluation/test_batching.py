"""Batches of evaluation data, and alignment of labels and targets with outputs."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from neuboots._validation import ArgumentError
from neuboots.evaluation._batching import align_labels, align_targets, iter_batches, iter_inputs, predict_batches


class Duck:
    """A map-style data set that does not inherit from torch Dataset."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i >= 6:
            raise IndexError
        return torch.eye(3)[i % 3], i % 3


def test_map_style_object_is_a_data_set() -> None:
    assert [len(y) for _, y in iter_batches(Duck(), 4, title="", progress=False)] == [4, 2]  # type: ignore[arg-type]


def test_reading_leaves_rng_state_unchanged() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    batches = iter_batches(Duck(), 2, title="", progress=False)  # type: ignore[arg-type]
    next(batches)
    assert torch.equal(torch.get_rng_state(), before)
    next(batches)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("probs", "y"), [((4, 3, 2, 5), (4, 5, 2)), ((4, 3), (2, 2)), ((4, 3), (4, 3))])
def test_labels_of_another_shape_are_errors(probs: tuple[int, ...], y: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="labels.shape"):
        align_labels(torch.rand(probs).softmax(1), torch.zeros(y, dtype=torch.long))


def test_targets_of_another_shape_are_errors() -> None:
    with pytest.raises(ArgumentError, match="targets.shape"):
        align_targets(torch.zeros(4, 2, 5), torch.zeros(4, 5, 2))
    assert align_targets(torch.zeros(4, 1, 2), torch.zeros(4, 2)).shape == (4, 1, 2)


@pytest.mark.parametrize("y", [torch.tensor([0.0, 2.0]), torch.tensor([[0], [2]]), torch.tensor([0, 2]).byte()])
def test_labels_may_be_floats_and_have_another_axis(y: Tensor) -> None:
    assert align_labels(torch.rand(2, 3).softmax(1), y).tolist() == [0, 2]


# -- inputs without labels -----------------------------------------------------------------------------


class Rows(Dataset[Any]):
    """A data set that is not in memory, with or without labels."""

    def __init__(self, x: Tensor, labeled: bool) -> None:
        self.x, self.labeled = x, labeled

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return (self.x[i], 1) if self.labeled else self.x[i]


class Stream(IterableDataset[Any]):
    def __init__(self, x: Tensor, labeled: bool) -> None:
        self.x, self.labeled = x, labeled

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(self.x, itertools.repeat(1)) if self.labeled else self.x)


def sources(x: Tensor) -> dict[str, Any]:
    y = torch.zeros(len(x))
    return {
        "tensor": x,
        "tensors": TensorDataset(x, y),
        "unlabeled tensors": TensorDataset(x),
        "subset": Subset(TensorDataset(x.flip(0), y), list(range(len(x)))[::-1]),
        "rows": Rows(x, True),
        "unlabeled rows": Rows(x, False),
        "loader": DataLoader(Rows(x, True), batch_size=4),
        "unlabeled loader": DataLoader(TensorDataset(x), batch_size=4),
        "batches": [(batch, y[: len(batch)]) for batch in x.split(4)],
        "generator": (batch for batch in x.split(4)),
        "stream": Stream(x, True),
        "unlabeled stream": DataLoader(Stream(x, False), batch_size=5),
    }


@pytest.mark.parametrize("name", list(sources(torch.zeros(1, 2))))
def test_inputs_of_any_source(name: str) -> None:
    x = torch.arange(44.0).reshape(22, 2)
    assert torch.equal(torch.cat(list(iter_inputs(sources(x)[name], 6, title="", progress=False))), x)


def test_inputs_may_be_tuples_and_dicts() -> None:
    x = {"a": torch.arange(5), "b": torch.zeros(5, 2)}
    assert [batch["a"].tolist() for batch in iter_inputs(x, 3, title="", progress=False)] == [[0, 1, 2], [3, 4]]
    assert [len(b) for _, b in iter_inputs(tuple(x.values()), 3, title="", progress=False)] == [3, 2]


def test_error_closes_the_source() -> None:
    """The traceback is referenced, but the loader and the progress bar are closed."""
    closed: list[bool] = []

    class Source:
        def __iter__(self) -> Iterator[Tensor]:
            try:
                yield from torch.zeros(4, 2).split(1)
            finally:
                closed.append(True)

    def fail(x: Tensor) -> tuple[Tensor, ...]:
        raise InterruptedError

    with pytest.raises(InterruptedError) as caught:
        predict_batches(fail, Source(), 2, title="", progress=False)
    assert closed == [True], caught


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: list(iter_inputs(torch.zeros(5, 6), 0, title="")), "batch_size"),
        (lambda: list(iter_inputs(7, title="")), "inputs"),
        (lambda: list(iter_inputs(np.zeros((5, 6)), title="")), "inputs"),
        (lambda: list(iter_batches([], title="")), "data"),
        (lambda: align_labels(torch.rand(2, 3), torch.tensor([0, 3])), "labels"),
        (lambda: align_labels(torch.rand(2, 3), torch.rand(2)), "labels"),
    ],
)
def test_invalid_arguments_are_errors(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.name == name
