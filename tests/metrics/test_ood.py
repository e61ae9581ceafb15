"""Metrics of scores that tell two kinds of input apart, against scikit-learn and torchmetrics, and at their edges."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from neuboots.metrics import DetectionMetrics, aupr, auroc, detection_accuracy, fpr_at_tpr, tnr_at_tpr

METRICS = [auroc, aupr, fpr_at_tpr, tnr_at_tpr, detection_accuracy]
many = settings(deadline=None, max_examples=50, derandomize=True)

# Few different scores, so that many tie; both kinds are there.
ties = st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60).map(
    lambda pairs: (
        torch.tensor([float(score) for score, _ in pairs] + [4.0, 5.0]),
        torch.tensor([flag for _, flag in pairs] + [True, False]),
    )
)

# -- other libraries -----------------------------------------------------------------------------------


@many
@given(ties)
def test_auroc_agrees_with_scikit_learn_and_torchmetrics(case: tuple[Tensor, Tensor]) -> None:
    scores, positive = case
    theirs = sklearn.metrics.roc_auc_score(positive.numpy(), scores.numpy())
    assert auroc(scores, positive=positive).item() == pytest.approx(theirs)
    # torchmetrics takes scores outside [0, 1] for logits, and adds in float32.
    theirs = binary_auroc(scores / 10, positive.long()).item()
    assert auroc(scores, positive=positive).item() == pytest.approx(theirs, abs=1e-5)


@many
@given(ties)
def test_aupr_agrees_with_scikit_learn(case: tuple[Tensor, Tensor]) -> None:
    """The area under its curve; `average_precision_score` takes steps and is another number."""
    scores, positive = case
    precision, recall, _ = sklearn.metrics.precision_recall_curve(positive.numpy(), scores.numpy())
    assert aupr(scores, positive=positive).item() == pytest.approx(sklearn.metrics.auc(recall, precision))


@many
@given(ties, st.sampled_from([0.05, 0.5, 0.8, 0.95]))
def test_rates_agree_with_scikit_learn(case: tuple[Tensor, Tensor], level: float) -> None:
    scores, positive = case
    fpr, tpr, _ = sklearn.metrics.roc_curve(positive.numpy(), scores.numpy(), drop_intermediate=False)
    at = np.argmax(tpr >= level)
    assert fpr_at_tpr(scores, positive=positive, tpr=level).item() == pytest.approx(fpr[at])
    assert tnr_at_tpr(scores, positive=positive, tpr=level).item() == pytest.approx(1 - fpr[at])


@many
@given(ties)
def test_detection_accuracy_is_the_best_balanced_accuracy(case: tuple[Tensor, Tensor]) -> None:
    scores, positive = case
    thresholds = [*scores.unique().tolist(), math.inf]
    theirs = [
        sklearn.metrics.balanced_accuracy_score(positive.numpy(), (scores >= threshold).numpy())
        for threshold in thresholds
    ]
    assert detection_accuracy(scores, positive=positive).item() == pytest.approx(max(theirs))


# -- edges ---------------------------------------------------------------------------------------------


def test_auroc_at_its_limits() -> None:
    positive = torch.tensor([True, True, False])
    assert auroc(torch.tensor([2.0, 3.0, 1.0]), positive=positive) == 1
    assert auroc(torch.tensor([1.0, 2.0, 3.0]), positive=positive) == 0
    assert auroc(torch.tensor([0.0, -0.0, 0.0]), positive=positive) == 0.5
    assert auroc(torch.tensor([math.inf, -math.inf, 0.0]), positive=positive) == 0.5
    assert auroc(torch.tensor([1, 2, 1]), positive=positive) == 0.75


@pytest.mark.parametrize("metric", METRICS)
def test_the_order_of_the_inputs_does_not_matter(metric: Callable[..., Tensor]) -> None:
    """Least of all among ties: sorted with the positives first and with them last."""
    scores, positive = torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0]), torch.tensor([True, True, False, True, False])
    assert metric(scores, positive=positive) == metric(scores.flip(0), positive=positive.flip(0))


@pytest.mark.parametrize(
    ("metric", "perfect", "chance"),
    [(auroc, 1, 0.5), (aupr, 1, 0.75), (fpr_at_tpr, 0, 1), (tnr_at_tpr, 1, 0), (detection_accuracy, 1, 0.5)],
)
def test_perfect_and_useless_scores(metric: Callable[..., Tensor], perfect: float, chance: float) -> None:
    """A constant score passes all or none: the precision falls from 1 to the share of positives, ½, in one line."""
    positive = torch.tensor([True, False, True, False])
    assert metric(positive.float(), positive=positive) == perfect
    assert metric(torch.zeros(4), positive=positive) == chance


def test_a_rate_that_is_met_exactly_is_met() -> None:
    """19 of 20 is 95 %; with the negative above the 19th positive, it is not reached without it."""
    positive = torch.arange(21) < 20
    scores = -torch.arange(21.0)
    scores[20] = -18.5  # the negative comes after 19 positives
    assert fpr_at_tpr(scores, positive=positive) == 0
    scores[20] = -17.5
    assert fpr_at_tpr(scores, positive=positive) == 1


def test_infinite_scores_tie() -> None:
    scores, positive = torch.tensor([math.inf, math.inf]), torch.tensor([True, False])
    assert auroc(scores, positive=positive) == 0.5


# -- the tally states its positive class ---------------------------------------------------------------

INSIDE, OUTSIDE = torch.tensor([0.1, 0.2, 0.3, 0.6]), torch.tensor([0.5, 0.7])


def test_the_positive_class_is_required_and_printed() -> None:
    with pytest.raises(TypeError, match="positive"):
        DetectionMetrics.from_batch(INSIDE, OUTSIDE)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"^got positive='ood'; expected 'in' or 'out': name the positive class$"):
        DetectionMetrics.from_batch(INSIDE, OUTSIDE, positive="ood")  # type: ignore[arg-type]
    for side, name in (("in", "in-distribution"), ("out", "out-of-distribution")):
        tally = DetectionMetrics.from_batch(INSIDE, OUTSIDE, positive=side)  # type: ignore[arg-type]
        assert repr(tally) == f"Detection(positive='{side}', 4 inside, 2 outside)"
        assert str(tally).splitlines()[0] == f"positive class: {name} (4 in, 2 out)"


def test_figures_of_the_tally_by_hand() -> None:
    """Sorted: in in in OUT in OUT. All OUT pass at 0.5, with one of four in; all in pass at 0.6, with one OUT."""
    out = DetectionMetrics.from_batch(INSIDE, OUTSIDE, positive="out")
    into = DetectionMetrics.from_batch(INSIDE, OUTSIDE, positive="in")
    assert out.auroc == into.auroc == 7 / 8
    assert (out.fpr_at_tpr, out.tnr_at_tpr) == (1 / 4, 3 / 4)
    assert (into.fpr_at_tpr, into.tnr_at_tpr) == (1 / 2, 1 / 2)
    assert out.aupr_in == into.aupr_in
    assert out.detection_accuracy == into.detection_accuracy == 7 / 8


def test_a_part_may_lack_one_kind_but_the_whole_may_not() -> None:
    none = torch.zeros(0)
    parts = [
        DetectionMetrics.from_batch(INSIDE, none, positive="in"),
        DetectionMetrics.from_batch(none, OUTSIDE, positive="in"),
    ]
    assert sum(parts).auroc == DetectionMetrics.from_batch(INSIDE, OUTSIDE, positive="in").auroc
    with pytest.raises(ValueError, match="^positive marks 4 of 4 scores; expected some of both classes: "):
        _ = parts[0].auroc


def test_scores_that_cannot_be_negated_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^scores are torch.uint8; expected floats: convert them with .float\(\)$"):
        DetectionMetrics.from_batch(INSIDE.byte(), OUTSIDE, positive="in")


# -- bad arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
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
def test_bad_arguments_get_one_sentence(
    metric: Callable[..., Tensor], scores: Tensor, positive: Tensor, sentence: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole sentence is compared)
        metric(scores, positive=positive)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("level", [0.0, 1.0, math.nan])
def test_a_rate_lies_between_0_and_1(level: float) -> None:
    with pytest.raises(ValueError, match=f"^tpr is {level}; expected a number between 0 and 1: "):
        fpr_at_tpr(torch.tensor([0.0, 1.0]), positive=torch.tensor([False, True]), tpr=level)


def test_a_rate_of_ones_own_in_parts_and_in_print() -> None:
    rng = torch.Generator().manual_seed(0)
    inside, outside = torch.randn(50, generator=rng), 1 + torch.randn(40, generator=rng)
    tally = sum(
        DetectionMetrics.from_batch(a, b, positive="out", tpr=0.8)
        for a, b in zip(inside.split(25), outside.split(20), strict=True)
    )
    scores, mask = torch.cat([inside, outside]), torch.arange(90) >= 50
    assert tally.fpr_at_tpr == fpr_at_tpr(scores, positive=mask, tpr=0.8) != tally.fpr_at_tpr
    assert tally.tnr_at_tpr == tnr_at_tpr(scores, positive=mask, tpr=0.8)
    assert f"FPR at 80 % TPR     {tally.fpr_at_tpr:.4f}" in str(tally)
    with pytest.raises(ValueError, match=r"^got tpr=0.8 and tpr=0.95; expected tallies with the same options$"):
        tally + DetectionMetrics.from_batch(inside, outside, positive="out")
    for tpr in (0.0, 1.5, "0.9", True):
        with pytest.raises(ValueError, match=r"^tpr is .*; expected a number between 0 and 1"):
            DetectionMetrics.from_batch(inside, outside, positive="out", tpr=tpr)


@pytest.mark.parametrize("scores", [torch.tensor([1j, 0]), torch.tensor([True, False])])
def test_scores_without_an_order_are_refused(scores: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^scores are .*; expected real numbers: "):
        auroc(scores, positive=torch.tensor([True, False]))
