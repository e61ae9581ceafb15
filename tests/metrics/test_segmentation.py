"""Segmentation metrics against torchmetrics and scikit-learn, and edge cases."""

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.functional.classification import multiclass_jaccard_index

from neuboots._validation import ArgumentError
from neuboots.metrics import SegmentationMetrics, dice, iou, mean_iou

many = settings(deadline=None, max_examples=40, derandomize=True)


def random_case(seed: int, num: int, classes: int, predicted: int) -> tuple[Tensor, Tensor]:
    """Images 3 × 2 of which a fifth of the pixels is ignored; only the first classes are ever predicted."""
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num, classes, 3, 2, generator=rng, dtype=torch.float64)
    logits[:, predicted:] = -30
    labels = torch.randint(classes, (num, 3, 2), generator=rng)
    labels[torch.rand(labels.shape, generator=rng) < 0.2] = 255
    labels[0, 0, 0] = 0
    return logits.softmax(1), labels


cases = st.builds(
    random_case, st.integers(0, 10**6), st.integers(1, 6), st.integers(3, 8), st.integers(1, 3)
)  # up to 8 classes on at least 6 pixels: some occur nowhere


def counted_rows(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the pixels that count."""
    flat = probs.movedim(1, -1).flatten(0, -2)
    return flat[labels.flatten() != 255], labels.flatten()[labels.flatten() != 255]


@many
@given(cases)
def test_iou_and_dice_agree_with_torchmetrics_and_scikit_learn(case: tuple[Tensor, Tensor]) -> None:
    probs, labels = case
    classes = probs.shape[1]
    rows, truth = counted_rows(probs, labels)
    preds = rows.argmax(1)
    for average, ours in (("macro", mean_iou), ("none", iou)):
        theirs = multiclass_jaccard_index(probs, labels, classes, average=average, ignore_index=255)
        # torchmetrics divides in float32.
        torch.testing.assert_close(ours(probs, labels), theirs.double(), rtol=1e-6, atol=1e-6)
    every = list(range(classes))
    theirs = sklearn.metrics.jaccard_score(truth, preds, labels=every, average=None, zero_division=0)
    np.testing.assert_allclose(iou(probs, labels).numpy(), theirs, rtol=1e-14)
    # Without `labels`, scikit-learn averages over the classes that occur as a truth or as a preds.
    theirs = sklearn.metrics.jaccard_score(truth, preds, average="macro", zero_division=0)
    assert mean_iou(probs, labels).item() == pytest.approx(theirs)
    theirs = sklearn.metrics.f1_score(truth, preds, labels=every, average=None, zero_division=0)
    np.testing.assert_allclose(dice(probs, labels).numpy(), theirs, rtol=1e-14)


def test_iou_is_over_the_data_set_and_not_over_images() -> None:
    """Class 1 is 1 pixel of image one, found, and 9 of image two, missed: 1/10, not the mean of 1 and 0."""
    preds = torch.zeros(2, 10, dtype=torch.long)
    truth = torch.zeros(2, 10, dtype=torch.long)
    truth[0, 0], truth[1, :9], preds[0, 0] = 1, 1, 1
    probs = torch.nn.functional.one_hot(preds, 2).movedim(-1, 1).float()
    state = sum(SegmentationMetrics.from_batch(probs[k : k + 1], truth[k : k + 1]) for k in range(2))
    assert state.iou.tolist() == pytest.approx([10 / 19, 1 / 10])
    assert state.mean_iou.item() == pytest.approx((10 / 19 + 1 / 10) / 2)
    assert state.dice.tolist() == pytest.approx([20 / 29, 2 / 11])


@pytest.mark.parametrize(
    ("ignore_index", "dtype"), [(255, torch.uint8), (255, torch.int64), (-100, torch.int64), (2, torch.int32)]
)
def test_ignored_pixels_do_not_count(ignore_index: int, dtype: torch.dtype) -> None:
    """Not even if their probabilities are NaN; in uint8, 255 is not −1."""
    probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [torch.nan, torch.nan]])
    state = SegmentationMetrics.from_batch(
        probs, torch.tensor([0, 0, ignore_index]).to(dtype), ignore_index=ignore_index
    )
    assert state.count == 2
    assert state.confusion_matrix.tolist() == [[1, 1], [0, 0]]


def test_batch_may_be_all_ignored_but_data_set_may_not() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    none, some = (
        SegmentationMetrics.from_batch(probs, torch.tensor([255, 255]), ignore_index=255),
        SegmentationMetrics.from_batch(probs, torch.tensor([0, 1]), ignore_index=255),
    )
    assert (none + some).mean_iou == 1
    assert (none + some).ece == some.ece
    for metric_name in ("error", "nll", "brier", "ece", "mce", "reliability_curve", "iou", "mean_iou", "dice", "f1"):
        with pytest.raises(ArgumentError, match="count"):
            getattr(none, metric_name)
