"""Tests of app.model: loading, the reject rule and class predictions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from _nets import Stored
from torch.utils.data import TensorDataset

from neuboots.app import PredictionTable
from neuboots.app.model import RejectRule, compute_classification_metrics, fit_reject_rule, predict_classes
from neuboots.methods import DeterministicPredictor


def calibrated_logits(n: int, scale: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels drawn from their probabilities."""
    rng = torch.Generator().manual_seed(seed)
    z = scale * torch.randn(n, 3, generator=rng)
    return z, torch.multinomial(z.softmax(1), 1, generator=rng)[:, 0]


def test_reject_rule_guarantees_the_error_on_new_rows() -> None:
    """P(error of accepted rows > r) ≤ δ = 0.1: at most 10 + 3 √(100 · 0.1 · 0.9) = 19 of 100 draws violate it."""
    predictor, violations, accepting = DeterministicPredictor(torch.nn.Identity()), 0, 0
    z, y = calibrated_logits(20_000, 4.0, seed=1)
    wrong, confidence = (z.argmax(1) != y), z.softmax(1).amax(1)
    for seed in range(100):
        data = TensorDataset(*calibrated_logits(300, 4.0, seed=100 + seed))
        rule, _ = fit_reject_rule(predictor, data, max_error=0.1, num_samples=1, seed=0)
        accepted = confidence >= rule.confidence
        accepting += int(accepted.any())
        violations += int(accepted.any() and wrong[accepted].double().mean() > 0.1)
    assert violations <= 19
    assert accepting > 90


@pytest.mark.parametrize(("rows", "scale", "confidence"), [(44, 9.0, 0.0), (2000, 0.01, 2.0)])
def test_reject_rule_without_a_guarantee(rows: int, scale: float, confidence: float) -> None:
    """Too few rows accept everything; rows that cannot be predicted accept nothing."""
    data = TensorDataset(*calibrated_logits(rows, scale, seed=0))
    predictor = DeterministicPredictor(torch.nn.Identity())
    rule, _ = fit_reject_rule(predictor, data, max_error=0.05, num_samples=1, seed=0)
    assert rule.confidence == confidence


def test_classification_metrics_by_hand() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.5, 0.5]])
    y = torch.tensor([0, 1, 1, 0])
    table = PredictionTable({"abstain": np.array([False, True, False, True])}, probs)
    found = compute_classification_metrics(table, y, 1)
    assert found["error"] == pytest.approx(0.25)
    assert found["nll"] == pytest.approx(-np.log([0.9, 0.4, 0.8, 0.5]).mean(), rel=1e-6)
    assert found["brier"] == pytest.approx(np.mean([0.02, 0.72, 0.08, 0.5]), rel=1e-5)
    assert (found["accepted"], found["error_accepted"], found["majority_error"]) == (0.5, 0.0, 0.5)
    rejected = compute_classification_metrics(replace(table, columns={"abstain": np.array([True] * 4)}), y, 1)
    assert (rejected["accepted"], rejected["error_accepted"]) == (0.0, None)


def test_model_abstains_where_a_value_is_not_finite() -> None:
    columns = {"probability": np.full(4, 0.9), "std": np.array([0.1, np.nan, 0.1, 0.1])}
    columns |= {"ood_score": np.array([0.5, 0.5, np.nan, 0.5])}
    assert RejectRule()(columns, np.array([1.0, 1.0, 1.0, np.nan])).tolist() == [False, True, True, True]


@pytest.mark.parametrize("outputs", [[np.nan, 0.0], [np.inf, 0.0], [-np.inf, 0.0], [np.inf], [np.nan]])
def test_class_of_outputs_that_are_not_finite_is_missing(outputs: list[float]) -> None:
    samples = torch.zeros(3, 2, len(outputs))
    samples[1, 1] = torch.tensor(outputs)
    rows = torch.arange(2.0)[:, None]
    table = predict_classes(Stored(samples), rows, np.array([4, 5]), 3)
    assert table.columns["prediction"].tolist() == [4, None]
    for name in ("probability", "std", "entropy", "mutual_information"):
        assert np.isfinite(table.columns[name]).tolist() == [True, False]
    assert table.probs is not None
    assert table.probs.isnan().all(1).tolist() == [False, True]


def test_one_logit_is_a_class_of_two() -> None:
    table = predict_classes(DeterministicPredictor(torch.nn.Identity()), torch.tensor([[-2.0], [3.0]]), np.arange(2), 1)
    assert table.columns["prediction"].tolist() == [0, 1]
    np.testing.assert_allclose(table.columns["probability"], [1 / (1 + np.exp(-2)), 1 / (1 + np.exp(-3))], rtol=1e-6)
