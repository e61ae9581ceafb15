"""Metrics of class probabilities against third-party libraries, and edge cases."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.special
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_calibration_error,
)

from neuboots._validation import ArgumentError
from neuboots.metrics import (
    ClassificationMetrics,
    ConfidenceRanking,
    ConfusionMatrix,
    ProbabilityMetrics,
    ReliabilityBins,
    accuracy,
    adaptive_ece,
    aurc,
    brier,
    confusion_matrix,
    ece,
    error,
    f1,
    mce,
    nll,
    nll_at_mean_logit,
    paper_nll,
    precision,
    recall,
    reliability_curve,
    risk_coverage_curve,
)

SMOOTH = [error, nll, brier, ece]
CLASSIFICATION = [*SMOOTH, mce, adaptive_ece, aurc]
many = settings(deadline=None, max_examples=50, derandomize=True)

# -- other libraries -----------------------------------------------------------------------------


def random_case(seed: int, num: int, classes: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num, classes, generator=rng, dtype=torch.float64)
    return logits.softmax(1), torch.randint(classes, (num,), generator=rng)


cases = st.builds(random_case, st.integers(0, 10**6), st.integers(1, 60), st.integers(2, 6))


@many
@given(cases, st.integers(1, 20))
def test_accuracy_ece_mce_agree_with_torchmetrics(case: tuple[Tensor, Tensor], num_bins: int) -> None:
    probs, labels = case
    classes = probs.shape[1]
    theirs = multiclass_calibration_error(probs, labels, classes, n_bins=num_bins)
    # torchmetrics averages 60 numbers below 1 in float32, whose eps is 1.2e-7.
    assert ece(probs, labels, num_bins=num_bins).item() == pytest.approx(theirs.item(), abs=1e-5)
    theirs = multiclass_calibration_error(probs, labels, classes, n_bins=num_bins, norm="max")
    assert mce(probs, labels, num_bins=num_bins).item() == pytest.approx(theirs.item(), abs=1e-5)
    theirs = multiclass_accuracy(probs, labels, classes, average="micro")
    assert accuracy(probs, labels).item() == pytest.approx(theirs.item(), abs=1e-5)


@many
@given(cases)
def test_error_nll_brier_agree_with_scikit_learn(case: tuple[Tensor, Tensor]) -> None:
    probs, labels = case
    every = range(probs.shape[1])
    theirs = sklearn.metrics.log_loss(labels.numpy(), probs.numpy(), labels=every)
    assert nll(probs, labels).item() == pytest.approx(theirs)
    theirs = sklearn.metrics.zero_one_loss(labels.numpy(), probs.argmax(1).numpy())
    assert error(probs, labels).item() == pytest.approx(theirs)
    truth = torch.eye(len(every), dtype=torch.float64)[labels]
    theirs = sklearn.metrics.mean_squared_error(truth.numpy(), probs.numpy()) * len(every)
    assert brier(probs, labels).item() == pytest.approx(theirs)


def test_brier_and_nll_are_strictly_proper() -> None:
    """With labels in the proportions p, q ≠ p scores worse than p: by |p − q|², and by the divergence KL(p ‖ q)."""
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.45, 0.25, 0.3]).double()
    labels = torch.arange(3).repeat_interleave((10 * p).round().long())
    gaps = [float(score(q.expand(10, 3), labels) - score(p.expand(10, 3), labels)) for score in (brier, nll)]
    assert gaps == pytest.approx([float((p - q).square().sum()), float((p * (p / q).log()).sum())])


@many
@given(cases)
def test_class_counts_agree_with_scikit_learn(case: tuple[Tensor, Tensor]) -> None:
    """With few inputs some class is never a label, never predicted, or neither: its ratios are 0."""
    probs, labels = case
    every = list(range(probs.shape[1]))
    truth, preds = labels.numpy(), probs.argmax(1).numpy()
    counts = sklearn.metrics.confusion_matrix(truth, preds, labels=every)
    assert confusion_matrix(probs, labels).tolist() == counts.tolist()
    theirs = sklearn.metrics.precision_recall_fscore_support(truth, preds, labels=every, zero_division=0)
    for metric, expected in zip([precision, recall, f1], theirs, strict=False):
        np.testing.assert_allclose(metric(probs, labels).numpy(), expected, rtol=1e-14)


@many
@given(cases)
def test_nll_at_mean_logit_agrees_with_scipy(case: tuple[Tensor, Tensor]) -> None:
    logits, labels = 50 * (case[0] - 0.5), case[1]
    theirs = -scipy.special.log_softmax(logits.numpy(), 1)[np.arange(len(labels)), labels.numpy()].mean()
    assert nll_at_mean_logit(logits, labels).item() == pytest.approx(theirs)
    assert paper_nll(logits, labels).item() == pytest.approx(10 * theirs)


# -- bins ----------------------------------------------------------------------------------------------


@many
@given(
    st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=40),
    st.sampled_from([5, 10, 20]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_bins_match_definition_at_their_edges(
    twentieths: list[tuple[int, bool]], num_bins: int, dtype: torch.dtype
) -> None:
    """Confidences k/20 lie on the edges; integers decide which bin (a, b] they belong to."""
    higher = [max(k, 20 - k) for k, _ in twentieths]
    probs = torch.tensor([[k / 20, (20 - k) / 20] for k in higher], dtype=dtype)
    labels = torch.tensor([0 if right else 1 for _, right in twentieths])
    total = 0.0
    curve = reliability_curve(probs, labels, num_bins=num_bins)
    for b in range(num_bins):
        inside = [i for i, k in enumerate(higher) if b * 20 < k * num_bins <= (b + 1) * 20]
        assert curve.count[b] == len(inside)
        if inside:
            assert curve.accuracy[b].item() == pytest.approx(np.mean([labels[i] == 0 for i in inside]))
            assert curve.confidence[b].item() == pytest.approx(np.mean([higher[i] / 20 for i in inside]))
        total += abs(sum((labels[i] == 0).item() - higher[i] / 20 for i in inside))
    value = ece(probs, labels, num_bins=num_bins).item()
    assert value == pytest.approx(total / len(higher), abs=1e-6)


# -- edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", CLASSIFICATION)
def test_single_class_has_no_error(metric: Callable[..., Tensor]) -> None:
    assert metric(torch.ones(5, 1), torch.zeros(5, dtype=torch.long)) == 0


@pytest.mark.parametrize("num_bins", [1, 2, 15])
def test_confidence_one_is_in_last_bin(num_bins: int) -> None:
    probs, labels = torch.tensor([[1.0, 0.0], [0.99, 0.01]]), torch.tensor([0, 0])
    curve = reliability_curve(probs, labels, num_bins=num_bins)
    assert curve.count.tolist() == [0] * (num_bins - 1) + [2]
    assert ece(probs, labels, num_bins=num_bins).item() == pytest.approx(0.005, rel=1e-5)


def test_class_that_occurs_nowhere_has_zero_ratios() -> None:
    probs, labels = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]]), torch.tensor([0, 0])
    assert precision(probs, labels).tolist() == [1, 0, 0]
    assert recall(probs, labels).tolist() == [0.5, 0, 0]
    assert f1(probs, labels).tolist() == pytest.approx([2 / 3, 0, 0])


@pytest.mark.parametrize("num_bins", [1, 7])
def test_states_with_other_numbers_of_bins_do_not_add(num_bins: int) -> None:
    probs, labels = random_case(0, 20, 3)
    for state in (ReliabilityBins, ProbabilityMetrics, ClassificationMetrics):
        assert len(state.from_batch(probs, labels, num_bins=num_bins).bin_count) == num_bins
        with pytest.raises(ArgumentError):
            state.from_batch(probs, labels, num_bins=num_bins) + state.from_batch(probs, labels)


def test_empty_bins_have_nan_means_and_do_not_count() -> None:
    probs, labels = torch.tensor([[0.6, 0.4], [0.9, 0.1]]), torch.tensor([0, 1])
    curve = reliability_curve(probs, labels, num_bins=10)
    filled = curve.count > 0
    assert filled.nonzero().flatten().tolist() == [5, 8]
    assert curve.accuracy[filled].tolist() == [1, 0]
    assert curve.confidence[filled].tolist() == pytest.approx([0.6, 0.9])
    assert curve.accuracy[~filled].isnan().all()
    assert curve.confidence[~filled].isnan().all()
    assert ece(probs, labels, num_bins=10).item() == pytest.approx((0.4 + 0.9) / 2)
    assert mce(probs, labels, num_bins=10).item() == pytest.approx(0.9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nll_of_zero_probability_is_finite(dtype: torch.dtype) -> None:
    value = nll(torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([1]))
    assert value.item() == pytest.approx(-math.log(torch.finfo(dtype).tiny))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("metric", SMOOTH)
def test_half_precision_changes_metric_by_rounding_only(metric: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Rounded rows are off by at most eps/2 and used as they are: no metric changes by 2 eps."""
    probs, labels = random_case(0, 50, 3)
    rounded = (0.9 * probs + 0.1 / 3).to(dtype)
    exact = rounded.double()
    exact /= exact.sum(1, keepdim=True)
    allowed = 2 * torch.finfo(dtype).eps
    value = metric(rounded, labels).item()
    assert value == pytest.approx(metric(exact, labels).item(), abs=allowed)


@pytest.mark.parametrize("metric", CLASSIFICATION)
def test_pixels_count_as_inputs(metric: Callable[..., Tensor]) -> None:
    probs, labels = random_case(0, 2 * 4 * 5, 3)
    images = probs.reshape(2, 4, 5, 3).movedim(-1, 1)  # (N, C, H, W)
    assert metric(images, labels.reshape(2, 4, 5)) == metric(probs, labels)


# -- ranking by confidence ---------------------------------------------------------------------------------------


@many
@given(cases, st.integers(1, 20))
def test_adaptive_ece_matches_definition(case: tuple[Tensor, Tensor], num_bins: int) -> None:
    """NumPy cuts the sorted inputs into parts whose sizes differ by at most one; a part may be empty."""
    probs, labels = case
    confidence, preds = (part.numpy() for part in probs.max(1))
    order = np.argsort(confidence)
    correct = preds == labels.numpy()
    parts = [part for part in np.array_split(order, num_bins) if len(part)]
    gaps = [len(part) * abs(correct[part].mean() - confidence[part].mean()) for part in parts]
    value = adaptive_ece(probs, labels, num_bins=num_bins).item()
    assert value == pytest.approx(sum(gaps) / len(labels))


@many
@given(cases)
def test_risk_coverage_curve_matches_definition(case: tuple[Tensor, Tensor]) -> None:
    probs, labels = case
    curve = risk_coverage_curve(probs, labels)
    confidence, preds = probs.max(1)
    assert curve.threshold.tolist() == sorted(set(confidence.tolist()), reverse=True)
    for coverage, risk, threshold in zip(curve.coverage, curve.risk, curve.threshold, strict=True):
        accepted = confidence >= threshold
        assert coverage.item() == pytest.approx(accepted.double().mean().item())
        theirs = sklearn.metrics.zero_one_loss(labels[accepted].numpy(), preds[accepted].numpy())
        assert risk.item() == pytest.approx(theirs)


# -- ties: few inputs, whose confidences are tenths ----------------------------------------------------

tenths = st.lists(st.tuples(st.integers(6, 8), st.booleans()), min_size=1, max_size=6)


def of_tenths(rows: list[tuple[int, bool]]) -> tuple[Tensor, Tensor]:
    probs = torch.tensor([[k / 10, 1 - k / 10] for k, _ in rows], dtype=torch.float64)
    return probs, torch.tensor([0 if correct else 1 for _, correct in rows])


@many
@given(tenths)
def test_aurc_is_expectation_over_orders_of_ties(rows: list[tuple[int, bool]]) -> None:
    found = []
    for order in itertools.permutations(rows):
        if [k for k, _ in order] != sorted((k for k, _ in rows), reverse=True):
            continue
        wrong = np.cumsum([not correct for _, correct in order])
        risk = wrong / np.arange(1, len(rows) + 1)
        area = np.trapezoid(risk, np.arange(1, len(rows) + 1) / len(rows)) / (1 - 1 / max(2, len(rows)))
        found.append(area if len(rows) > 1 else risk[0])
    assert aurc(*of_tenths(rows)).item() == pytest.approx(np.mean(found))


@many
@given(tenths, st.integers(1, 4))
def test_adaptive_bins_divide_ties_in_proportion(rows: list[tuple[int, bool]], num_bins: int) -> None:
    """Each input counts with the accuracy of all that have its confidence."""
    accuracy = {}
    for k, _ in rows:
        tied = [correct for other, correct in rows if other == k]
        accuracy[k] = Fraction(sum(tied), len(tied))
    rising = sorted(k for k, _ in rows)
    parts = np.array_split(np.array(rising), num_bins)
    total = sum(abs(sum(accuracy[int(k)] - Fraction(int(k), 10) for k in part)) for part in parts)
    value = adaptive_ece(*of_tenths(rows), num_bins=num_bins).item()
    assert value == pytest.approx(float(total) / len(rows), abs=1e-15)


# -- edges ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("confidence", "correct", "name"),
    [
        (torch.rand(3), torch.ones(2) > 0, "correct.shape"),
        (torch.tensor([0.5, torch.nan]), torch.ones(2) > 0, "confidence"),
        (torch.rand(2), torch.ones(2), "correct.dtype"),
        (torch.arange(2), torch.ones(2) > 0, "confidence.dtype"),
    ],
)
def test_invalid_confidence_is_an_error(confidence: Tensor, correct: Tensor, name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        ConfidenceRanking.from_confidence(confidence, correct)
    assert error.value.name == name


# -- invalid arguments ---------------------------------------------------------------------------------

HALVES = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
ZEROS = torch.tensor([0, 0])


@pytest.mark.parametrize("metric", CLASSIFICATION)
@pytest.mark.parametrize(
    ("probs", "labels", "name"),
    [
        (HALVES, torch.tensor([0]), "labels.shape"),
        (torch.tensor([0.5, 0.5]), ZEROS, "probs.shape"),
        (torch.zeros(2, 0), ZEROS, "probs.shape"),
        (HALVES, torch.tensor([0.0, 1.0]), "labels.dtype"),
        (torch.tensor([[1, 0], [0, 1]]), ZEROS, "probs.dtype"),
        (torch.tensor([[0.5, 0.5], [math.nan, 0.5]]), ZEROS, "probs"),
        (torch.tensor([[0.5, 0.5], [0.5, 0.25]]), ZEROS, "probs"),
        (torch.tensor([[0.5, 0.5], [-1.0, 2.0]]), ZEROS, "probs"),
        (HALVES, torch.tensor([0, 2]), "labels"),
        (HALVES, torch.tensor([-1, 0]), "labels"),
    ],
)
def test_invalid_arguments_are_errors(metric: Callable[..., Tensor], probs: Tensor, labels: Tensor, name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        metric(probs, labels)
    assert error.value.name == name


@pytest.mark.parametrize("num_bins", [0, 2.5, "10", True, None])
@pytest.mark.parametrize("metric", [ece, mce, adaptive_ece])
def test_num_bins_is_a_positive_integer(metric: Callable[..., Tensor], num_bins: Any) -> None:
    with pytest.raises(ArgumentError, match="num_bins"):
        metric(HALVES, torch.tensor([0, 1]), num_bins=num_bins)
    assert metric(HALVES, torch.tensor([0, 1]), num_bins=np.int64(3)) == 0


@pytest.mark.parametrize(
    ("logits", "labels", "name"),
    [
        (torch.zeros(2, 1), ZEROS, "logits.shape"),
        (torch.tensor([[0.0, math.inf], [0.0, math.nan]]), ZEROS, "logits"),
        (torch.zeros(2), ZEROS, "logits.shape"),
        (torch.zeros(2, 3, dtype=torch.long), ZEROS, "logits.dtype"),
        (torch.zeros(2, 2), torch.tensor([0, -100]), "labels"),
    ],
)
def test_invalid_logits_are_errors(logits: Tensor, labels: Tensor, name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        nll_at_mean_logit(logits, labels)
    assert error.value.name == name


def test_nll_at_mean_logit_does_not_underflow() -> None:
    value = nll_at_mean_logit(torch.tensor([[0.0, -5000.0]]), torch.tensor([1]))
    assert value.item() == pytest.approx(5000)


@pytest.mark.parametrize("classes", [10, 50_000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_many_classes_in_half_precision_are_probabilities(dtype: torch.dtype, classes: int) -> None:
    """Each of 50,000 entries is rounded the same way, among the smallest numbers of half precision."""
    probs, labels = torch.full((4, classes), 1 / classes).to(dtype), torch.arange(4)
    for same in (probs, probs.float() if dtype == torch.float16 else probs):
        assert brier(same, labels).item() == pytest.approx(1 - 1 / classes, abs=1e-3)
    with pytest.raises(ArgumentError, match="probs"):
        brier(0.98 * probs, labels)


def test_confusion_matrix_checks_classes_and_does_not_overflow() -> None:
    preds, labels = torch.tensor([199, 3], dtype=torch.uint8), torch.tensor([199, 2], dtype=torch.uint8)
    state = ConfusionMatrix.from_preds(preds, labels, num_classes=200)
    assert state.matrix.nonzero().tolist() == [[2, 3], [199, 199]]
    for name, arguments in [
        ("preds", (preds, labels, 199)),
        ("labels", (preds, -labels.int(), 200)),
        ("labels.shape", (preds, labels[:1], 200)),
        ("preds.dtype", (preds.float(), labels, 200)),
        ("num_classes", (preds, labels, 2.5)),
    ]:
        with pytest.raises(ArgumentError) as error:
            ConfusionMatrix.from_preds(*arguments[:2], num_classes=arguments[2])
        assert error.value.name == name
