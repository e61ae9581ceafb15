"""The figures that other libraries agree on, to the printed digits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import neuboots.metrics as m
from neuboots.prediction import Prediction


@dataclass(frozen=True)
class Golden:
    logits: Tensor  # (8, 500, 4)
    labels: Tensor  # (500,)
    elsewhere: Tensor  # (300, 4) probabilities
    mean: Tensor  # (500,)
    std: Tensor  # (500,)
    y: Tensor  # (500,)

    @property
    def samples(self) -> Tensor:
        return self.logits.softmax(2)

    @property
    def probs(self) -> Tensor:
        return self.samples.mean(0)

    @property
    def detection(self) -> tuple[Tensor, Tensor]:
        """Scores, larger = more out-of-distribution, inside and outside."""
        return -self.probs.amax(1), -self.elsewhere.amax(1)


def golden_set() -> Golden:
    def softmax(z: np.ndarray) -> np.ndarray:
        weights: np.ndarray = np.exp(z)
        return weights / weights.sum(-1, keepdims=True)

    rng = np.random.default_rng(0)
    logits = rng.normal(size=(500, 4)) * 2
    samples = logits[None] + rng.normal(size=(8, 500, 4)) * 0.7
    labels = np.array([rng.choice(4, p=p) for p in softmax(logits)])
    elsewhere = softmax(rng.normal(size=(300, 4)) * 0.6)
    mean = rng.normal(size=500)
    std = 0.5 + rng.random(500)
    y = mean + std * rng.normal(size=500) * 1.3
    return Golden(*map(torch.from_numpy, (samples, labels, elsewhere, mean, std, y)))


GOLDEN = golden_set()


def of_classes(metric: Callable[..., Tensor], **options: Any) -> Callable[[], Tensor]:
    return lambda: metric(GOLDEN.probs, GOLDEN.labels, **options)


def of_guesses(metric: Callable[..., Tensor]) -> Callable[[], Tensor]:
    return lambda: metric(GOLDEN.samples.argmax(2), GOLDEN.labels)


def of_numbers(metric: Callable[..., Tensor]) -> Callable[[], Tensor]:
    return lambda: metric(GOLDEN.mean, GOLDEN.std, GOLDEN.y)


def of_scores(metric: Callable[..., Tensor], positive: str) -> Callable[[], Tensor]:
    def value() -> Tensor:
        scores = torch.cat(GOLDEN.detection)
        outside = torch.arange(800) >= 500
        return metric(scores, positive=outside) if positive == "out" else metric(-scores, positive=~outside)

    return value


def of_detection(figure: str, positive: Any) -> Callable[[], Tensor]:
    return lambda: getattr(m.Detection.of(*GOLDEN.detection, positive=positive), figure)


def of_prediction(figure: str) -> Callable[[], Tensor]:
    return lambda: getattr(Prediction(GOLDEN.logits), figure).mean()


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (of_classes(m.accuracy), "0.680"),
        (of_classes(m.ece, num_bins=10), "0.0631242"),
        (of_classes(m.ece), "0.0689147"),
        (of_classes(m.adaptive_ece), "0.0701223"),
        (of_classes(m.brier), "0.4269366"),
        (of_classes(m.nll), "0.7635682"),
        (lambda: m.nll_at_mean_logit(GOLDEN.logits.mean(0), GOLDEN.labels), "0.7572897"),
        (lambda: m.paper_nll(GOLDEN.logits.mean(0), GOLDEN.labels), "7.572897"),
        (of_classes(m.aurc), "0.1592960"),
        (of_prediction("entropy"), "0.8323329"),
        (of_prediction("expected_entropy"), "0.7507586"),
        (of_prediction("mutual_information"), "0.0815744"),
        (of_guesses(m.disagreement), "0.2666429"),
        (of_guesses(m.q_statistic), "0.8382323"),
        (of_guesses(m.correlation), "0.5303534"),
        (of_guesses(m.ratio_error), "0.2430040"),
        (of_scores(m.auroc, "in"), "0.8816133"),
        (of_scores(m.auroc, "out"), "0.8816133"),
        (of_scores(m.aupr, "in"), "0.9332891"),
        (of_scores(m.aupr, "out"), "0.7805471"),
        (of_scores(m.fpr_at_tpr, "out"), "0.408"),
        (of_scores(m.tnr_at_tpr, "in"), "0.42333"),
        (of_scores(m.detection_accuracy, "in"), "0.81933"),
        (of_scores(m.detection_accuracy, "out"), "0.81933"),
        (of_detection("aupr_in", "out"), "0.9332891"),
        (of_detection("aupr_out", "in"), "0.7805471"),
        (of_detection("fpr_at_95_tpr", "out"), "0.408"),
        (of_detection("tnr_at_95_tpr", "in"), "0.42333"),
        (of_numbers(m.gaussian_nll), "1.7288950"),
        (of_numbers(m.crps), "0.7208968"),
        (of_numbers(m.check_score), "0.3639524"),
        (of_numbers(m.mean_interval_score), "3.7015790"),
        (of_numbers(m.mean_absolute_calibration), "0.06724"),
        (of_numbers(m.rms_calibration), "0.0739931"),
        (of_numbers(m.miscalibration_area), "0.0679192"),
    ],
)
def test_golden_values(value: Callable[[], Tensor], printed: str) -> None:
    """To the printed digits."""
    digits = len(printed.split(".")[1])
    assert f"{value():.{digits}f}" == printed
