"""Batches of evaluation data, and alignment of labels and targets with outputs."""

import pytest
import torch
from torch import Tensor

from neuboots._validation import ArgumentError
from neuboots.evaluation._batching import align_labels, align_targets, iter_batches


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
