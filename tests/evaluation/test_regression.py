"""Regression metrics over batches against functions of all data, and the source of the noise."""

import pytest
import torch
from _reference import standard_errors
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import neuboots
from neuboots import Deterministic, NeuBoots, TrainingConfig, metrics
from neuboots._validation import ArgumentError
from neuboots.evaluation.regression import evaluate_regression
from neuboots.losses import GaussianNLL
from neuboots.methods import DeterministicPredictor
from neuboots.nets import MLP


def diabetes() -> tuple[Tensor, Tensor]:
    x, y = load_diabetes(return_X_y=True)
    x, y = torch.from_numpy(x).float(), torch.from_numpy(y).float()
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()


def test_report_agrees_with_metrics() -> None:
    x, y = diabetes()
    fitted = NeuBoots.regression().fit(
        lambda: MLP(10, 1, widths=(16,)), TensorDataset(x[:300], y[:300]), TrainingConfig(epochs=40, progress=False)
    )
    noise = neuboots.residual_std(fitted, x[300:370], y[300:370])
    found = evaluate_regression(
        fitted, TensorDataset(x[370:], y[370:]), noise_std=noise, num_samples=30, batch_size=20, progress=False
    )
    prediction = fitted.predict(x[370:], 30)
    mean, std, truth = prediction.mean, prediction.predictive_std(noise), y[370:, None]
    low, high = prediction.prediction_interval(0.95, noise_std=noise)
    expected = {
        "rmse": metrics.rmse(mean, truth),
        "nll": metrics.gaussian_nll(mean, std, truth),
        "crps": metrics.crps(mean, std, truth),
        "coverage": metrics.interval_coverage(low, high, truth),
        "mean_width": metrics.mean_width(low, high),
        "sharpness": metrics.sharpness(std),
    }
    for name, value in expected.items():
        assert found.metrics[name] == pytest.approx(float(value), rel=1e-4), name
    assert found.metrics["rmse"] < 1.0  # better than the mean of y
    assert f"N = {len(truth)}, B = 30" in str(found)


def test_gaussian_head_provides_noise() -> None:
    x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    y = x[:, 0] + 0.3 * torch.randn(400, generator=torch.Generator().manual_seed(1))
    fitted = Deterministic(loss=GaussianNLL()).fit(
        lambda: MLP(2, 2, widths=(16,)), TensorDataset(x[:300], y[:300]), TrainingConfig(epochs=60, progress=False)
    )
    found = evaluate_regression(fitted, TensorDataset(x[300:], y[300:]), num_samples=1, progress=False)
    assert abs(found.metrics["coverage"] - 0.95) < standard_errors(1) * (0.95 * 0.05 / 100) ** 0.5


@pytest.mark.parametrize(("outputs", "noise_std"), [(2, 0.5), (1, None)])
def test_noise_std_is_given_unless_the_head_is_gaussian(outputs: int, noise_std: float | None) -> None:
    rows, predictor = TensorDataset(torch.ones(40, 3), torch.ones(40)), DeterministicPredictor(nn.Linear(3, outputs))
    with pytest.raises(ArgumentError, match="noise_std"):
        evaluate_regression(predictor, rows, noise_std=noise_std, progress=False)


def test_net_runs_once_per_batch_and_once_for_first_row() -> None:
    sizes: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return super().forward(x)

    rows = TensorDataset(torch.randn(50, 3), torch.randn(50, 1))
    evaluate_regression(DeterministicPredictor(Counting(3, 2)), rows, num_samples=4, batch_size=20, progress=False)
    assert sizes == [1, 20, 20, 10]
    sizes.clear()
    evaluate_regression(
        DeterministicPredictor(Counting(3, 1)), rows, noise_std=1.0, num_samples=4, batch_size=25, progress=False
    )
    assert sizes == [1, 25, 25]
