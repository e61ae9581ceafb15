"""Detection metrics against scikit-learn and torchmetrics, with ties and edge cases."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from neuboots._validation import ArgumentError
from neuboots.metrics import (
    DetectionMetrics,
    aupr,
    auroc,
    detection_accuracy,
    fpr_at_tpr,
    tnr_at_tpr,
)

many = settings(deadline=None, max_examples=50, derandomize=True)


DETECTION = [auroc, aupr, fpr_at_tpr, tnr_at_tpr, detection_accuracy]

# Few distinct scores, so that many tie; both classes occur.
ties = st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60).map(
    lambda pairs: (
        torch.tensor([float(score) for score, _ in pairs] + [4.0, 5.0]),
        torch.tensor([flag for _, flag in pairs] + [True, False]),
    )
)


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
def test_detection_accuracy_is_best_balanced_accuracy(case: tuple[Tensor, Tensor]) -> None:
    scores, positive = case
    thresholds = [*scores.unique().tolist(), math.inf]
    theirs = [
        sklearn.metrics.balanced_accuracy_score(positive.numpy(), (scores >= threshold).numpy())
        for threshold in thresholds
    ]
    assert detection_accuracy(scores, positive=positive).item() == pytest.approx(max(theirs))


def test_auroc_by_hand() -> None:
    positive = torch.tensor([True, True, False])
    assert auroc(torch.tensor([0.0, -0.0, 0.0]), positive=positive) == 0.5
    assert auroc(torch.tensor([math.inf, -math.inf, 0.0]), positive=positive) == 0.5
    assert auroc(torch.tensor([math.inf, -math.inf, math.inf]), positive=positive) == 0.25
    assert auroc(torch.tensor([1, 2, 1]), positive=positive) == 0.75


def test_tpr_that_is_reached_exactly_counts() -> None:
    """19 of 20 is 95 %; with the negative above the 19th positive, it is not reached without it."""
    positive = torch.arange(21) < 20
    scores = -torch.arange(21.0)
    scores[20] = -18.5  # the negative comes after 19 positives
    assert fpr_at_tpr(scores, positive=positive) == 0
    scores[20] = -17.5
    assert fpr_at_tpr(scores, positive=positive) == 1


@pytest.mark.parametrize("metric", DETECTION)
@pytest.mark.parametrize(
    ("scores", "positive", "name"),
    [
        (torch.zeros(3), torch.tensor([True, True, True]), "positive"),
        (torch.zeros(3), torch.tensor([1, 0, 1]), "positive.dtype"),
        (torch.zeros(3), torch.tensor([True, False]), "positive.shape"),
        (torch.tensor([0.0, math.nan]), torch.tensor([True, False]), "scores"),
        (torch.tensor([1j, 0]), torch.tensor([True, False]), "scores.dtype"),
    ],
)
def test_invalid_scores_are_errors(metric: Callable[..., Tensor], scores: Tensor, positive: Tensor, name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        metric(scores, positive=positive)
    assert error.value.name == name


ID_SCORES, OOD_SCORES = torch.tensor([0.1, 0.2, 0.3, 0.6]), torch.tensor([0.5, 0.7])


def test_detection_metrics_by_hand() -> None:
    """Sorted: in in in OUT in OUT. All OUT pass at 0.5, with one of four in; all in pass at 0.6, with one OUT."""
    out, into = (DetectionMetrics.from_batch(ID_SCORES, OOD_SCORES, positive=side) for side in ("out", "in"))
    assert out.auroc == into.auroc == 7 / 8
    assert (out.fpr_at_tpr, out.tnr_at_tpr) == (1 / 4, 3 / 4)
    assert (into.fpr_at_tpr, into.tnr_at_tpr) == (1 / 2, 1 / 2)
    assert out.aupr_in == into.aupr_in
    assert out.detection_accuracy == into.detection_accuracy == 7 / 8
    assert DetectionMetrics.from_batch(ID_SCORES, OOD_SCORES, positive="out", tpr=0.4).fpr_at_tpr == 0
    assert "out-of-distribution (4 in, 2 out)" in str(out)


def test_batch_of_one_class_adds_but_has_no_metrics() -> None:
    none = torch.zeros(0)
    parts = [DetectionMetrics.from_batch(*scores, positive="in") for scores in ((ID_SCORES, none), (none, OOD_SCORES))]
    assert sum(parts).auroc == 7 / 8
    with pytest.raises(ArgumentError, match="positive"):
        _ = parts[0].auroc


@pytest.mark.parametrize(
    ("options", "name"),
    [({"positive": "ood"}, "positive"), *(({"positive": "in", "tpr": t}, "tpr") for t in (0.0, 1.0))],
)
def test_invalid_detection_options_are_errors(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        DetectionMetrics.from_batch(ID_SCORES, OOD_SCORES, **options)
    with pytest.raises(ArgumentError, match="id_scores.dtype"):  # −s of an unsigned integer would overflow
        DetectionMetrics.from_batch(ID_SCORES.byte(), OOD_SCORES, positive="in")
