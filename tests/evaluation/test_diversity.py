"""Diversity of replicates over data that come in batches, for any method."""

from functools import partial
from typing import Any

import pytest
import torch
from _nets import Stored, noise, numbered
from _reference import standard_errors
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import TrainingConfig, metrics
from neuboots._validation import ArgumentError
from neuboots.evaluation.diversity import DiversityReport, evaluate_diversity
from neuboots.methods import create_method


def measure(samples: Tensor, y: Tensor, **options: Any) -> DiversityReport:
    return evaluate_diversity(Stored(samples), numbered(y), num_samples=len(samples), progress=False, **options)


@pytest.mark.parametrize("batch_size", [7, 100])
def test_metrics_are_independent_of_batch_size(batch_size: int) -> None:
    samples, y = 2 * noise(5, 60, 4), torch.arange(60) % 4
    found = measure(samples, y, batch_size=batch_size).metrics
    preds = samples.argmax(2)
    for name in ("ratio_error", "q_statistic", "correlation", "disagreement"):
        assert found[name] == pytest.approx(float(getattr(metrics, name)(preds, y)))
    assert found["pairwise_kl"] == pytest.approx(float(metrics.pairwise_kl(samples.softmax(2))), rel=1e-5)


def test_identical_members_have_no_diversity() -> None:
    y = torch.arange(60) % 4
    found = measure(noise(1, 60, 4).expand(5, 60, 4), y).metrics
    assert found["disagreement"] == 0
    assert found["pairwise_kl"] == 0
    assert found["ratio_error"] == 0
    assert found["q_statistic"] == pytest.approx(1)
    assert found["correlation"] == pytest.approx(1)


def test_independent_random_predictions_are_uncorrelated() -> None:
    """Six random predictors of four classes, correct a quarter of the time; fifteen uncorrelated pairs."""
    N, B, C = 4000, 6, 4
    found = measure(noise(B, N, C), torch.arange(N) % C, batch_size=1500).metrics
    pairs = B * (B - 1) // 2
    k = standard_errors(4)
    assert abs(found["correlation"]) < k / (N * pairs) ** 0.5
    # d Q / d log(odds ratio) = 1/2 at 0; the log odds ratio has variance Σ 1 / expected count
    p = 1 / C
    cells = [p * p, p * (1 - p), p * (1 - p), (1 - p) ** 2]
    assert abs(found["q_statistic"]) < k * 0.5 * (sum(1 / (N * cell) for cell in cells) / pairs) ** 0.5
    assert abs(found["disagreement"] - (1 - p)) < k * (p * (1 - p) / (N * pairs)) ** 0.5
    # Both wrong, C − 1 wrong answers each: C − 2 pairs of different ones for each same one.
    both_wrong, same = N * (1 - p) ** 2, 1 / (C - 1)
    ratio_error = (same * (1 - same) / both_wrong) ** 0.5 / same**2
    assert abs(found["ratio_error"] - (C - 2)) < k * ratio_error / pairs**0.5


def test_single_logit_and_pixels() -> None:
    y = torch.arange(20) % 2
    one = noise(4, 20, 1)
    two = torch.cat([torch.zeros_like(one), one], 2)
    assert measure(one, y).metrics == pytest.approx(measure(two, y).metrics, rel=1e-5)
    assert measure(one, y[:, None].float()).metrics == pytest.approx(measure(two, y).metrics, rel=1e-5)
    images, labels = noise(4, 6, 3, 2, 2), torch.arange(24).reshape(6, 2, 2) % 3
    flat = images.movedim(2, -1).reshape(4, 24, 3)
    assert measure(images, labels, batch_size=4).metrics == pytest.approx(measure(flat, labels.flatten()).metrics)


@pytest.mark.parametrize("ignore_index", [255, -100, 1])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_ignored_pixels_do_not_count(ignore_index: int, batch_size: int) -> None:
    samples, y = noise(4, 6, 3, 2, 2), torch.arange(24).reshape(6, 2, 2) % 3
    y[y == 1] = ignore_index
    y[2] = ignore_index
    there = y != ignore_index
    found = measure(samples, y, batch_size=batch_size, ignore_index=ignore_index)
    expected = measure(samples.movedim(2, -1)[:, there], y[there])
    assert found.metrics == pytest.approx(expected.metrics)
    assert found.state.count == int(there.sum())
    with pytest.raises(ArgumentError, match="ignore_index"):
        measure(samples, torch.full_like(y, ignore_index), ignore_index=ignore_index)


@pytest.mark.parametrize(("asked", "used"), [(None, 3), (2, 2), (3, 3), (50, 3)])
def test_num_samples_is_at_most_number_of_members(asked: int | None, used: int) -> None:
    samples, y = noise(3, 60, 4), torch.arange(60) % 4
    found = evaluate_diversity(Stored(samples, num_distinct=3), numbered(y), num_samples=asked, progress=False)
    assert found.num_samples == used
    assert found.num_pairs == used * (used - 1) // 2
    assert found.metrics == measure(samples[:used], y).metrics


def test_default_number_of_replicates() -> None:
    y = torch.arange(60) % 4
    found = evaluate_diversity(Stored(noise(30, 60, 4)), numbered(y), seed=3, progress=False)
    assert (found.num_samples, found.num_pairs) == (20, 190)
    assert str(found).splitlines()[0] == "N = 60, B = 20 (190 pairs), seed 3"
    assert [line.split()[0] for line in str(found).splitlines()[2:]] == list(found.metrics)


@pytest.mark.parametrize(("samples", "distinct"), [(1, None), (5, 1), (None, 1), (0, None)])
def test_fewer_than_two_replicates_are_an_error(samples: int | None, distinct: int | None) -> None:
    predictor = Stored(noise(5, 6, 3), num_distinct=distinct)
    with pytest.raises(ArgumentError, match="num_samples"):
        evaluate_diversity(predictor, numbered(torch.arange(6) % 3), num_samples=samples, progress=False)


def test_invalid_arguments_are_errors() -> None:
    for change in ({"num_samples": 2.5}, {"num_samples": "a"}, {"seed": 1.5}, {"predictor": nn.Linear(1, 2)}):
        options: dict[str, Any] = {"predictor": Stored(noise(3, 6, 3)), "data": numbered(torch.arange(6) % 3)}
        with pytest.raises(ArgumentError, match=next(iter(change))):
            evaluate_diversity(**options | change, progress=False)
    with pytest.raises(ArgumentError, match="labels"):
        measure(noise(2, 4, 3), torch.arange(4))
    with pytest.raises(ArgumentError, match="probs"):
        measure(noise(2, 4, 3) * torch.nan, torch.arange(4) % 3)


METHODS = {"neuboots": {}, "mc-dropout": {"rate": 0.3}, "deep-ensemble": {"num_members": 3}}


@pytest.mark.parametrize("name", list(METHODS))
def test_metrics_of_a_method_on_digits(name: str) -> None:
    """Replicates differ, but their errors are correlated."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    method = create_method(name, **METHODS[name])
    config = TrainingConfig(epochs=10, batch_size=32, optimizer=partial(torch.optim.Adam, lr=0.01), progress=False)
    predictor = method.fit(model, TensorDataset(x[:300], y[:300]), config)
    found = evaluate_diversity(
        predictor, TensorDataset(x[300:600], y[300:600]), num_samples=8, batch_size=128, progress=False
    )
    assert found.num_samples == (3 if name == "deep-ensemble" else 8)
    assert 0 < found.metrics["disagreement"] < 0.45  # half of what guessers at random would have
    assert 0 < found.metrics["correlation"] < 1
    assert found.metrics["pairwise_kl"] > 0
