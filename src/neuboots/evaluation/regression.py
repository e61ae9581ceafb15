"""Metrics of the predictive distributions of a regression over labeled data.

    y | x ~ N(m(x), v(x) + σ²),   m, v: mean and variance over replicates, σ²: variance of the noise

The confidence band of the regression function says nothing about where a new y falls: the noise must come from the net
itself (a Gaussian head) or from held-out residuals (`neuboots.residual_std`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuboots._validation import ArgumentError
from neuboots.evaluation._batching import (
    LabeledData,
    align_targets,
    check_predictor,
    format_metrics,
    iter_batches,
)
from neuboots.head import take_rows
from neuboots.metrics import RegressionMetrics
from neuboots.prediction import Predictor, split_gaussian

_METRICS = (
    *("rmse", "nll", "crps", "coverage", "mean_width", "interval_score", "mean_interval_score", "check_score"),
    *("mean_absolute_calibration", "rms_calibration", "miscalibration_area", "sharpness"),
)


@dataclass(frozen=True, eq=False)
class RegressionReport:
    """Result of `evaluate_regression`.

    Args:
        state: State of all metrics; states of parts of a data set add.
        num_samples: Number of replicates B.
        seed: Seed of the replicates.
    """

    state: RegressionMetrics
    num_samples: int
    seed: int

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics by name, in the units of y (NLL in nats)."""
        return {name: float(getattr(self.state, name)) for name in _METRICS}

    def __str__(self) -> str:
        header = f"N = {self.state.count:,}, B = {self.num_samples}, seed {self.seed}, level {self.state.level:g}"
        return f"{header}\n{format_metrics(self.metrics)}"


def evaluate_regression(
    predictor: Predictor,
    data: LabeledData,
    *,
    noise_std: Tensor | float | None = None,
    level: float = 0.95,
    num_samples: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = True,
) -> RegressionReport:
    """Compute RMSE, NLL, CRPS, coverage and width of the prediction interval, and calibration errors.

    Args:
        predictor: Predictor of a regression.
        data: Data set of examples (x, y), or a loader of batches.
        noise_std: Standard deviation σ of the noise, one number or one per output; None for a net with a Gaussian head
            (twice as many outputs as targets), which predicts its own.
        level: Level of the prediction interval.
        num_samples: Number of replicates B.
        seed: Seed of the replicates.
        batch_size: Number of inputs at a time, for a data set.
        progress: Whether to show a progress bar.

    Returns:
        The report, which prints as a table.

    Raises:
        ArgumentError: If targets do not fit the outputs, or `noise_std` does not fit the head.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> x = torch.randn(500, 1, generator=torch.Generator().manual_seed(0))
        >>> noise = torch.randn(500, 1, generator=torch.Generator().manual_seed(1))
        >>> data = TensorDataset(x, 2 * x + 0.5 * noise)
        >>> net = torch.nn.Linear(1, 1)
        >>> _ = net.load_state_dict({"weight": torch.tensor([[2.0]]), "bias": torch.zeros(1)})
        >>> report = evaluate_regression(DeterministicPredictor(net), data, noise_std=0.5, progress=False)
        >>> round(report.metrics["rmse"], 1), round(report.metrics["coverage"], 2)
        (0.5, 0.95)
    """
    check_predictor(predictor)
    total: RegressionMetrics | int = 0
    gaussian: bool | None = None
    for x, y in iter_batches(data, batch_size, title="regression", progress=progress):
        if gaussian is None:
            gaussian = has_gaussian_head(predictor, x, y, seed=seed)
            if gaussian != (noise_std is None):
                expected = "None for a net with a Gaussian head, else the standard deviation of the noise"
                raise ArgumentError("noise_std", noise_std, expected, hint="use residual_std of held-out rows")
        if gaussian:
            band, noise = split_gaussian(predictor.predict(x, num_samples, seed=seed))
            mean, std = band.mean, torch.hypot(band.std, noise)
        else:
            summary = predictor.summarize(x, num_samples, seed=seed)
            mean, std = summary.mean, summary.predictive_std(0.0 if noise_std is None else noise_std)
        total = total + RegressionMetrics.from_batch(mean, std, align_targets(mean, y), level=level)
    assert isinstance(total, RegressionMetrics), "iter_batches yields at least one batch"
    return RegressionReport(total, num_samples, seed)


def has_gaussian_head(predictor: Predictor, x: Any, y: Tensor, *, seed: int = 0) -> bool:
    """Return whether the net has twice as many outputs as there are targets.

    Args:
        predictor: Predictor of a regression.
        x: A batch of inputs; only the first row is used.
        y: Their targets.
        seed: Seed of the replicate.

    Returns:
        Whether the head predicts means and log-variances.

    Example:
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> has_gaussian_head(DeterministicPredictor(torch.nn.Linear(3, 2)), torch.zeros(5, 3), torch.zeros(5))
        True
    """
    return predictor.summarize(take_rows(x, slice(0, 1)), 1, seed=seed).mean.numel() == 2 * y[:1].numel()
