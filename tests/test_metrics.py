"""The metrics against known figures, against other people's libraries, and at their edges."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_calibration_error,
)

from neuboots.metrics import auroc, brier, ece, error, nll, reliability_curve

CLASSIFICATION = [error, nll, brier, ece]
many = settings(deadline=None, max_examples=50, derandomize=True)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights: np.ndarray = np.exp(logits)
    weights /= weights.sum(-1, keepdims=True)
    return weights


@pytest.fixture(scope="module")
def golden() -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities (500, 4), the mean of 8 samples; labels (500,); 300 rows from elsewhere."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(500, 4)) * 2
    samples = logits[None] + rng.normal(size=(8, 500, 4)) * 0.7
    labels = np.array([rng.choice(4, p=p) for p in softmax(logits)])
    elsewhere = softmax(rng.normal(size=(300, 4)) * 0.6)
    probs = softmax(samples).mean(0)
    return torch.from_numpy(probs), torch.from_numpy(labels), torch.from_numpy(elsewhere)


def test_golden_values(golden: tuple[Tensor, Tensor, Tensor]) -> None:
    """To the printed digits, as torchmetrics, torch-uncertainty, netcal and baal give them."""
    probs, labels, _ = golden
    assert f"{1 - error(probs, labels):.3f}" == "0.680"
    assert f"{ece(probs, labels, num_bins=10):.7f}" == "0.0631242"
    assert f"{ece(probs, labels, num_bins=15):.7f}" == "0.0689147"
    assert f"{brier(probs, labels):.7f}" == "0.4269366"
    assert f"{nll(probs, labels):.7f}" == "0.7635682"


def test_golden_auroc(golden: tuple[Tensor, Tensor, Tensor]) -> None:
    """The maximum of p as the score and in-distribution as the positive class."""
    inside, _, outside = golden
    scores = torch.cat([inside, outside]).amax(1)
    in_distribution = torch.arange(800) < 500
    assert f"{auroc(scores, positive=in_distribution):.7f}" == "0.8816133"
    assert f"{auroc(-scores, positive=~in_distribution):.7f}" == "0.8816133"


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
    accuracy = multiclass_accuracy(probs, labels, classes, average="micro")
    assert 1 - error(probs, labels).item() == pytest.approx(accuracy.item(), abs=1e-5)


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
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=2, max_size=60))
def test_auroc_agrees_with_scikit_learn_on_many_ties(pairs: list[tuple[int, bool]]) -> None:
    scores = torch.tensor([float(score) for score, _ in pairs] + [4.0, 5.0])
    positive = torch.tensor([flag for _, flag in pairs] + [True, False])
    theirs = sklearn.metrics.roc_auc_score(positive.numpy(), scores.numpy())
    assert auroc(scores, positive=positive).item() == pytest.approx(theirs)


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
    for b in range(num_bins):
        inside = [i for i, k in enumerate(higher) if b * 20 < k * num_bins <= (b + 1) * 20]
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


def test_a_tie_goes_to_the_first_class() -> None:
    probs = torch.full((2, 4), 0.25)
    assert error(probs, torch.tensor([0, 3])) == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_certain_mistake_costs_a_finite_loss(dtype: torch.dtype) -> None:
    value = nll(torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([1]))
    assert value.item() == pytest.approx(-math.log(torch.finfo(dtype).tiny))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("metric", CLASSIFICATION)
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


def test_auroc_at_its_limits() -> None:
    positive = torch.tensor([True, True, False])
    assert auroc(torch.tensor([2.0, 3.0, 1.0]), positive=positive) == 1
    assert auroc(torch.tensor([1.0, 2.0, 3.0]), positive=positive) == 0
    assert auroc(torch.tensor([0.0, -0.0, 0.0]), positive=positive) == 0.5
    assert auroc(torch.tensor([math.inf, -math.inf, 0.0]), positive=positive) == 0.5
    assert auroc(torch.tensor([1, 2, 1]), positive=positive) == 0.75


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
            "probs has shape (0, 3), which is empty; expected at least one input and one class: check the data set",
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
    with pytest.raises(ValueError, match=r"^num_bins is 0; expected at least 1: pass such a number$"):
        ece(HALVES, ZEROS, num_bins=0)


@pytest.mark.parametrize(
    ("scores", "positive", "sentence"),
    [
        (
            torch.zeros(3),
            torch.tensor([True, True, True]),
            "positive marks 3 of 3 scores; expected some of both classes: pass positive and negative inputs together",
        ),
        (
            torch.zeros(0),
            torch.zeros(0, dtype=torch.bool),
            "positive marks 0 of 0 scores; expected some of both classes: pass positive and negative inputs together",
        ),
        (
            torch.zeros(3),
            torch.tensor([1, 0, 1]),
            "scores has shape (3,) and positive (3,) of torch.int64; expected one shape and "
            "torch.bool: pass a mask such as labels == 1",
        ),
        (
            torch.zeros(3),
            torch.tensor([True, False]),
            "scores has shape (3,) and positive (2,) of torch.bool; expected one shape and "
            "torch.bool: pass a mask such as labels == 1",
        ),
        (
            torch.tensor([0.0, math.nan]),
            torch.tensor([True, False]),
            "scores has 1 NaN among 2; expected numbers: check the net's outputs",
        ),
    ],
)
def test_auroc_bad_arguments_get_one_sentence(scores: Tensor, positive: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole sentence is compared)
        auroc(scores, positive=positive)
    assert str(caught.value) == sentence
