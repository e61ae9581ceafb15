"""Metrics of class probabilities against other people's libraries, and at their edges."""

import math
from collections.abc import Callable

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

from neuboots.metrics import (
    ConfusionMatrix,
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
def test_agrees_with_torchmetrics(case: tuple[Tensor, Tensor], num_bins: int) -> None:
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
def test_agrees_with_scikit_learn(case: tuple[Tensor, Tensor]) -> None:
    probs, labels = case
    every = range(probs.shape[1])
    theirs = sklearn.metrics.log_loss(labels.numpy(), probs.numpy(), labels=every)
    assert nll(probs, labels).item() == pytest.approx(theirs)
    theirs = sklearn.metrics.zero_one_loss(labels.numpy(), probs.argmax(1).numpy())
    assert error(probs, labels).item() == pytest.approx(theirs)
    truth = torch.eye(len(every), dtype=torch.float64)[labels]
    theirs = sklearn.metrics.mean_squared_error(truth.numpy(), probs.numpy()) * len(every)
    assert brier(probs, labels).item() == pytest.approx(theirs)


@many
@given(cases)
def test_classes_agree_with_scikit_learn(case: tuple[Tensor, Tensor]) -> None:
    """With few inputs some class is never true, never guessed, or neither: its ratios are 0."""
    probs, labels = case
    every = list(range(probs.shape[1]))
    truth, guess = labels.numpy(), probs.argmax(1).numpy()
    counts = sklearn.metrics.confusion_matrix(truth, guess, labels=every)
    assert confusion_matrix(probs, labels).tolist() == counts.tolist()
    theirs = sklearn.metrics.precision_recall_fscore_support(truth, guess, labels=every, zero_division=0)
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
def test_ece_on_bin_edges_is_the_definition(
    twentieths: list[tuple[int, bool]], num_bins: int, dtype: torch.dtype
) -> None:
    """Confidences k/20 lie on the edges; whole numbers say which bin (a, b] is theirs."""
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
def test_figures_are_0_dim_float64(metric: Callable[..., Tensor]) -> None:
    value = metric(torch.tensor([[0.25, 0.75]]), torch.tensor([1]))
    assert value.shape == ()
    assert value.dtype == torch.float64


def test_one_sample() -> None:
    probs, labels = torch.tensor([[0.25, 0.75]]), torch.tensor([1])
    assert error(probs, labels) == 0
    assert nll(probs, labels).item() == pytest.approx(-math.log(0.75))
    assert brier(probs, labels) == 0.125
    assert ece(probs, labels) == 0.25


@pytest.mark.parametrize("metric", CLASSIFICATION)
def test_one_class_is_always_right(metric: Callable[..., Tensor]) -> None:
    assert metric(torch.ones(5, 1), torch.zeros(5, dtype=torch.long)) == 0


@pytest.mark.parametrize("num_bins", [1, 2, 15])
def test_confidence_one_falls_in_the_last_bin(num_bins: int) -> None:
    probs, labels = torch.tensor([[1.0, 0.0], [0.99, 0.01]]), torch.tensor([0, 0])
    curve = reliability_curve(probs, labels, num_bins=num_bins)
    assert curve.count.tolist() == [0] * (num_bins - 1) + [2]
    assert ece(probs, labels, num_bins=num_bins).item() == pytest.approx(0.005, rel=1e-5)


def test_empty_bins_have_no_mean_and_do_not_count() -> None:
    probs, labels = torch.tensor([[0.6, 0.4], [0.9, 0.1]]), torch.tensor([0, 1])
    curve = reliability_curve(probs, labels, num_bins=10)
    filled = curve.count > 0
    assert filled.nonzero().flatten().tolist() == [5, 8]
    assert curve.accuracy[filled].tolist() == [1, 0]
    assert curve.confidence[filled].tolist() == pytest.approx([0.6, 0.9])
    assert curve.accuracy[~filled].isnan().all()
    assert curve.confidence[~filled].isnan().all()
    assert ece(probs, labels, num_bins=10).item() == pytest.approx((0.4 + 0.9) / 2)


def test_the_worst_bin_is_one_that_has_inputs() -> None:
    probs, labels = torch.tensor([[0.6, 0.4], [0.9, 0.1]]), torch.tensor([0, 1])
    assert mce(probs, labels, num_bins=10).item() == pytest.approx(0.9)


def test_a_class_that_occurs_nowhere_has_zeros() -> None:
    probs, labels = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]]), torch.tensor([0, 0])
    assert precision(probs, labels).tolist() == [1, 0, 0]
    assert recall(probs, labels).tolist() == [0.5, 0, 0]
    assert f1(probs, labels).tolist() == pytest.approx([2 / 3, 0, 0])


def test_a_tie_goes_to_the_first_class() -> None:
    probs = torch.full((2, 4), 0.25)
    assert error(probs, torch.tensor([0, 3])) == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_certain_mistake_costs_a_finite_loss(dtype: torch.dtype) -> None:
    value = nll(torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([1]))
    assert value.item() == pytest.approx(-math.log(torch.finfo(dtype).tiny))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("metric", SMOOTH)
def test_half_precision_is_welcome(metric: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Rounded rows are off by at most eps/2 and used as they are: no figure moves by 2 eps."""
    probs, labels = random_case(0, 50, 3)
    rounded = (0.9 * probs + 0.1 / 3).to(dtype)
    exact = rounded.double()
    exact /= exact.sum(1, keepdim=True)
    allowed = 2 * torch.finfo(dtype).eps
    value = metric(rounded, labels).item()
    assert value == pytest.approx(metric(exact, labels).item(), abs=allowed)


@pytest.mark.parametrize("metric", CLASSIFICATION)
def test_pixels_are_inputs_of_their_own(metric: Callable[..., Tensor]) -> None:
    probs, labels = random_case(0, 2 * 4 * 5, 3)
    images = probs.reshape(2, 4, 5, 3).movedim(-1, 1)  # (N, C, H, W)
    assert metric(images, labels.reshape(2, 4, 5)) == metric(probs, labels)


@pytest.mark.parametrize("metric", CLASSIFICATION)
def test_the_order_of_the_inputs_does_not_matter(metric: Callable[..., Tensor]) -> None:
    probs, labels = random_case(0, 100, 3)
    value = metric(probs.flip(0), labels.flip(0)).item()
    assert value == pytest.approx(metric(probs, labels).item())


# -- bad arguments -------------------------------------------------------------------------------

HALVES = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
ZEROS = torch.tensor([0, 0])


@pytest.mark.parametrize("metric", CLASSIFICATION)
@pytest.mark.parametrize(
    ("probs", "labels", "sentence"),
    [
        (
            HALVES,
            torch.tensor([0]),
            "probs has shape (2, 2) and labels (1,); expected (N, C, *) and (N, *): reshape one of them",
        ),
        (
            torch.tensor([0.5, 0.5]),
            ZEROS,
            "probs has shape (2,) and labels (2,); expected (N, C, *) and (N, *): reshape one of them",
        ),
        (
            HALVES,
            torch.tensor([0.0, 1.0]),
            "probs is torch.float32 and labels torch.float32; expected floats and integers: "
            "convert them with .float() and .long()",
        ),
        (
            torch.tensor([[1, 0], [0, 1]]),
            ZEROS,
            "probs is torch.int64 and labels torch.int64; expected floats and integers: "
            "convert them with .float() and .long()",
        ),
        (
            torch.zeros(0, 3),
            torch.zeros(0, dtype=torch.long),
            "got a tally of no inputs; expected at least one: check the data set",
        ),
        (
            torch.tensor([[0.5, 0.5], [math.nan, 0.5]]),
            ZEROS,
            "probs has NaN in 1 of 2 rows; expected numbers: check the net's outputs",
        ),
        (
            torch.tensor([[0.5, 0.5], [0.5, 0.25]]),
            ZEROS,
            "probs has a smallest entry of 0.25 and a row whose sum misses 1 by 0.25; "
            "expected probabilities: pass logits through softmax(1) first",
        ),
        (
            torch.tensor([[0.5, 0.5], [-1.0, 2.0]]),
            ZEROS,
            "probs has a smallest entry of -1 and a row whose sum misses 1 by 0; "
            "expected probabilities: pass logits through softmax(1) first",
        ),
        (
            HALVES,
            torch.tensor([0, 2]),
            "labels run from 0 to 2; expected 0 to 1 for 2 classes: "
            "renumber the labels, or drop the inputs without one",
        ),
        (
            HALVES,
            torch.tensor([-1, 0]),
            "labels run from -1 to 0; expected 0 to 1 for 2 classes: "
            "renumber the labels, or drop the inputs without one",
        ),
    ],
)
def test_bad_arguments_get_one_sentence(
    metric: Callable[..., Tensor], probs: Tensor, labels: Tensor, sentence: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole sentence is compared)
        metric(probs, labels)
    assert str(caught.value) == sentence


def test_ece_needs_a_bin() -> None:
    with pytest.raises(ValueError, match=r"^num_bins is 0; expected a whole number of at least 1: pass such a number$"):
        ece(HALVES, ZEROS, num_bins=0)


@pytest.mark.parametrize("metric", [nll_at_mean_logit, paper_nll])
@pytest.mark.parametrize(
    ("logits", "labels", "sentence"),
    [
        (
            torch.zeros(2, 1),
            ZEROS,
            "logits has shape (2, 1); expected at least two classes: a single logit z of the second of two classes is "
            "torch.cat([0 * z, z], 1)",
        ),
        (
            torch.tensor([[0.0, math.inf], [0.0, math.nan]]),
            ZEROS,
            "logits has 2 NaN or infinite value(s) among 4; expected numbers: check the net's outputs",
        ),
        (
            torch.zeros(2),
            ZEROS,
            "logits has shape (2,) and labels (2,); expected (N, C, *) and (N, *): reshape one of them",
        ),
        (
            torch.zeros(2, 3, dtype=torch.long),
            ZEROS,
            "logits is torch.int64 and labels torch.int64; expected floats and integers: "
            "convert them with .float() and .long()",
        ),
        (
            torch.zeros(2, 2),
            torch.tensor([0, 2]),
            "labels run from 0 to 2; expected 0 to 1 for 2 classes: "
            "renumber the labels, or drop the inputs without one",
        ),
    ],
)
def test_bad_logits_get_one_sentence(
    metric: Callable[..., Tensor], logits: Tensor, labels: Tensor, sentence: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole sentence is compared)
        metric(logits, labels)
    assert str(caught.value) == sentence


def test_a_logit_far_below_the_others_costs_its_distance() -> None:
    """Where a probability would have underflowed, the logit has not."""
    value = nll_at_mean_logit(torch.tensor([[0.0, -5000.0]]), torch.tensor([1]))
    assert value.item() == pytest.approx(5000)


@pytest.mark.parametrize("num_bins", [2.5, "10", True, None])
@pytest.mark.parametrize("metric", [ece, mce, adaptive_ece])
def test_bins_are_a_whole_number(metric: Callable[..., Tensor], num_bins: object) -> None:
    with pytest.raises(ValueError, match=r"^num_bins is .*; expected a whole number of at least 1: "):
        metric(torch.full((2, 2), 0.5), torch.tensor([0, 1]), num_bins=num_bins)
    assert metric(torch.full((2, 2), 0.5), torch.tensor([0, 1]), num_bins=np.int64(3)) == 0


@pytest.mark.parametrize("classes", [10, 50_000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_many_classes_in_half_precision_are_probabilities_still(dtype: torch.dtype, classes: int) -> None:
    """Each of 50,000 entries is rounded the same way, among the smallest numbers that half precision has."""
    probs, labels = torch.full((4, classes), 1 / classes).to(dtype), torch.arange(4)
    for same in (probs, probs.float() if dtype == torch.float16 else probs):
        assert brier(same, labels).item() == pytest.approx(1 - 1 / classes, abs=1e-3)
    with pytest.raises(ValueError, match=r"a row whose sum misses 1 by "):
        brier(0.98 * probs, labels)


def test_counts_of_classes_refuse_what_they_would_count_wrongly() -> None:
    """Small integers would wrap around, and a class too many would fall into another row."""
    guess, truth = torch.tensor([199, 3], dtype=torch.uint8), torch.tensor([199, 2], dtype=torch.uint8)
    matrix = ConfusionMatrix.of(guess, truth, classes=200).matrix
    assert matrix.nonzero().tolist() == [[2, 3], [199, 199]]
    for bad, sentence in [
        (
            {"guess": guess, "truth": truth, "classes": 199},
            "guesses run from 3 to 199; expected 0 to 198",
        ),
        ({"guess": guess, "truth": -guess.int(), "classes": 200}, "labels run from -199 to -3; expected 0 to 199"),
        (
            {"guess": guess, "truth": truth[:1], "classes": 200},
            r"got shapes guess \(2,\) and truth \(1,\)",
        ),
        ({"guess": guess.float(), "truth": truth, "classes": 200}, "got guess of torch.float32; expected integers"),
        ({"guess": guess, "truth": truth, "classes": 2.5}, "classes is 2.5; expected a whole number of at least 1"),
        ({"guess": [1], "truth": truth, "classes": 2}, "got guess of type list; expected a tensor"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            ConfusionMatrix.of(**bad)
