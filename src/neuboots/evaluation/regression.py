"""How good are the predictive distributions of a regression? All figures over labelled data.

    y | x ~ N(m(x), v(x) + σ²),   m, v: mean and variance over replicates, σ²: the noise

The band of the regression function alone says nothing about where a new y falls; the noise must come from somewhere:
from the net itself (a Gaussian head), or from held-out residuals (`neuboots.residual_std`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuboots.evaluation._batching import (
    LabeledData,
    align_targets,
    check_predictor,
    format_table,
    iter_batches,
    take_rows,
)
from neuboots.metrics import RegressionMetrics
from neuboots.prediction import Predictor, split_gaussian


@dataclass(frozen=True, eq=False)
class RegressionReport:
    """What `evaluate_regression` found; `count_outcomes` has every figure, and its parts add."""

    tally: RegressionMetrics
    num_samples: int
    seed: int

    @property
    def figures(self) -> dict[str, float]:
        """Every figure by name, in the units of y (NLL in nats)."""
        names = (
            *("rmse", "nll", "crps", "coverage", "mean_width", "interval_score", "mean_interval_score", "check_score"),
            *("mean_absolute_calibration", "rms_calibration", "miscalibration_area", "sharpness"),
        )
        return {name: float(getattr(self.tally, name)) for name in names}

    def __str__(self) -> str:
        rows = [{"figure": name, "value": value} for name, value in self.figures.items()]
        header = f"N = {int(self.tally.count):,}, B = {self.num_samples}, seed {self.seed}, level {self.tally.level:g}"
        return f"{header}\n{format_table(rows)}"


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
    """RMSE, NLL, CRPS, coverage and width of the prediction interval, and calibration, over rows (x, y).

    `noise_std` is σ, one number or one for each output; a net with a Gaussian head (twice as many outputs as targets)
    brings its own, and takes none.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import DeterministicPredictor
    >>> x = torch.randn(500, 1, generator=torch.Generator().manual_seed(0))
    >>> noise = torch.randn(500, 1, generator=torch.Generator().manual_seed(1))
    >>> rows = TensorDataset(x, 2 * x + 0.5 * noise)
    >>> net = torch.nn.Linear(1, 1)
    >>> _ = net.load_state_dict({"weight": torch.tensor([[2.0]]), "bias": torch.zeros(1)})
    >>> found = evaluate_regression(DeterministicPredictor(net), rows, noise_std=0.5, progress=False)
    >>> round(found.figures["rmse"], 1), round(found.figures["coverage"], 2)
    (0.5, 0.95)
    """
    check_predictor(predictor)
    total: RegressionMetrics | int = 0
    gaussian: bool | None = None
    for x, y in iter_batches(data, batch_size, title="regression", progress=progress):
        if gaussian is None:
            gaussian = has_gaussian_head(predictor, x, y, seed=seed)
            _check_noise(noise_std, gaussian)
        mean, std = _predictive(predictor, x, None if gaussian else noise_std, num_samples, seed)
        total = total + RegressionMetrics.of(mean, std, align_targets(mean, y), level=level)
    assert isinstance(total, RegressionMetrics), "batches_of gives at least one batch"
    return RegressionReport(total, num_samples, seed)


def has_gaussian_head(predictor: Predictor, x: Any, y: Tensor, *, seed: int = 0) -> bool:
    """Has the net twice as many outputs as there are targets? One row tells.

    >>> import torch
    >>> from neuboots import DeterministicPredictor
    >>> has_gaussian_head(DeterministicPredictor(torch.nn.Linear(3, 2)), torch.zeros(5, 3), torch.zeros(5))
    True
    """
    return predictor.summarize(take_rows(x, slice(0, 1)), 1, seed=seed).mean.numel() == 2 * y[:1].numel()


def _check_noise(noise_std: Tensor | float | None, gaussian: bool) -> None:
    if noise_std is None and not gaussian:
        raise ValueError(
            "got no noise_std for a net without a Gaussian head; expected the standard deviation of the noise: give "
            "noise_std=residual_std(predictor, x, y) of rows that were not trained on"
        )
    if noise_std is not None and gaussian:
        raise ValueError(
            "got noise_std for a net with twice as many outputs as targets; expected none, since a Gaussian head "
            "brings its own noise: leave noise_std out"
        )


def _predictive(
    predictor: Predictor, x: Any, noise_std: Tensor | float | None, num_samples: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a new y, (N, C, *) each; without noise_std the net has a Gaussian head."""
    if noise_std is None:
        band, noise = split_gaussian(predictor.predict(x, num_samples, seed=seed))
        return band.mean, torch.hypot(band.std, noise)
    summary = predictor.summarize(x, num_samples, seed=seed)
    return summary.mean, summary.predictive_std(noise_std)
