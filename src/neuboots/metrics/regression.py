"""How good is the normal prediction N(μ, σ²) of a number y?

    NLL = mean ½ log 2πσ² + z²/2,   CRPS = mean σ [z (2Φ(z) − 1) + 2φ(z) − 1/√π],   z = (y − μ) / σ

`mean`, `std` and `y` have one shape; every element is an input of its own. σ = 0 is the point mass at μ, the limit of
each figure (its CRPS is |y − μ|) but of the likelihood, which is refused.

T. Gneiting, A. Raftery, Strictly proper scoring rules, prediction, and estimation, JASA 2007.
V. Kuleshov, N. Fenner, S. Ermon, Accurate uncertainties for deep learning using calibrated regression, ICML 2018.
Y. Chung et al., Uncertainty toolbox: an open-source library for assessing, visualizing, and improving uncertainty
quantification, 2021 (the levels over which check score, interval score and calibration are averaged).
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neuboots.metrics import normal
from neuboots.metrics.checks import at_least, between, non_negative, numbers
from neuboots.metrics.intervals import Intervals
from neuboots.metrics.normal import CalibrationCurve
from neuboots.metrics.tally import Mean, Tally, some


@dataclass(frozen=True, eq=False)
class Regression(Tally):
    """Every figure of normal predictions, of data that come in parts.

    `coverage`, `mean_width` and `interval_score` are those of the central interval of `level`.

    >>> mean, std, y = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 6.0])
    >>> tally = sum(Regression.of(*row) for row in zip(mean[:, None], std[:, None], y[:, None]))
    >>> tally.count, tally.rmse, tally.coverage
    (2, tensor(3.5532, dtype=torch.float64), tensor(0.5000, dtype=torch.float64))
    """

    squares: Mean  # (y − μ)²
    surprise: Mean  # −log N(y; μ, σ²), where σ > 0
    ranked: Mean
    checks: Mean
    intervals: Mean
    variance: Mean  # σ²
    central: Intervals
    inside: Tensor  # (num_levels,) how many y lie in the central interval of each level
    level: float

    @classmethod
    def of(cls, mean: Tensor, std: Tensor, y: Tensor, *, level: float = 0.95, num_levels: int = 100) -> Self:
        """Of means, standard deviations and targets of one shape."""
        between("level", level)
        at_least("num_levels", num_levels, 2)
        mu, sigma, target = numbers(mean=mean, std=std, y=y)
        non_negative("std", sigma)
        r = target - mu
        half = normal.quantiles(torch.tensor(0.5 + level / 2, dtype=torch.float64)).to(sigma.device) * sigma
        spread = sigma > 0
        return cls(
            squares=Mean.of(r.square()),
            surprise=Mean.of(normal.surprise(r[spread], sigma[spread])),
            ranked=Mean.of(normal.ranked(r, sigma)),
            checks=Mean.of(normal.check_scores(r, sigma)),
            intervals=Mean.of(normal.interval_scores(r, sigma)),
            variance=Mean.of(sigma.square()),
            central=Intervals.of(mu - half, mu + half, target, level=level),
            inside=normal.inside(r, sigma, num_levels),
            level=level,
        )

    @property
    def count(self) -> int:
        return int(self.squares.count)

    @property
    def rmse(self) -> Tensor:
        return self.squares.value.sqrt()

    @property
    def nll(self) -> Tensor:
        certain = self.count - int(self.surprise.count)
        if certain:
            raise ValueError(
                f"std is 0 for {certain} of {self.count} inputs, which have no likelihood; expected std > 0: add the "
                "noise of y to the variance, or use crps"
            )
        return self.surprise.value

    @property
    def crps(self) -> Tensor:
        return self.ranked.value

    @property
    def check_score(self) -> Tensor:
        return self.checks.value

    @property
    def mean_interval_score(self) -> Tensor:
        return self.intervals.value

    @property
    def sharpness(self) -> Tensor:
        return self.variance.value.sqrt()

    @property
    def coverage(self) -> Tensor:
        return self.central.coverage

    @property
    def mean_width(self) -> Tensor:
        return self.central.mean_width

    @property
    def interval_score(self) -> Tensor:
        return self.central.interval_score

    @property
    def calibration_curve(self) -> CalibrationCurve:
        expected = torch.linspace(0, 1, len(self.inside), dtype=torch.float64, device=self.inside.device)
        return CalibrationCurve(expected, self.inside.double() / some(self.squares.count))

    @property
    def mean_absolute_calibration(self) -> Tensor:
        return self.calibration_curve.mean_absolute_error

    @property
    def rms_calibration(self) -> Tensor:
        return self.calibration_curve.rms_error

    @property
    def miscalibration_area(self) -> Tensor:
        return self.calibration_curve.area


@dataclass(frozen=True, eq=False)
class Spreads(Tally):
    """How wide predictions are, whatever y, of data that come in parts.

    >>> (Spreads.of(torch.tensor([3.0])) + Spreads.of(torch.tensor([4.0]))).sharpness
    tensor(3.5355, dtype=torch.float64)
    """

    variance: Mean  # σ²

    @classmethod
    def of(cls, std: Tensor) -> Self:
        """Of standard deviations of any shape."""
        (sigma,) = numbers(std=std)
        non_negative("std", sigma)
        return cls(Mean.of(sigma.square()))

    @property
    def count(self) -> int:
        return int(self.variance.count)

    @property
    def sharpness(self) -> Tensor:
        return self.variance.value.sqrt()


@dataclass(frozen=True, eq=False)
class Residuals(Tally):
    """How far point predictions miss, of data that come in parts.

    >>> (Residuals.of(torch.zeros(1), torch.ones(1)) + Residuals.of(torch.zeros(1), 7 * torch.ones(1))).rmse
    tensor(5., dtype=torch.float64)
    """

    squares: Mean  # (y − μ)²

    @classmethod
    def of(cls, mean: Tensor, y: Tensor) -> Self:
        """Of means and targets of one shape."""
        mu, target = numbers(mean=mean, y=y)
        return cls(Mean.of((target - mu).square()))

    @property
    def count(self) -> int:
        return int(self.squares.count)

    @property
    def rmse(self) -> Tensor:
        return self.squares.value.sqrt()


def rmse(mean: Tensor, y: Tensor) -> Tensor:
    """√ mean (y − μ)².

    >>> rmse(torch.tensor([0.0, 1.0]), torch.tensor([3.0, 5.0]))
    tensor(3.5355, dtype=torch.float64)
    """
    return Residuals.of(mean, y).rmse


def sharpness(std: Tensor) -> Tensor:
    """√ mean σ²: how narrow the predictions are, right or wrong.

    >>> sharpness(torch.tensor([3.0, 4.0]))
    tensor(3.5355, dtype=torch.float64)
    """
    return Spreads.of(std).sharpness


def gaussian_nll(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """mean of ½ log 2πσ² + ½ ((y − μ) / σ)², in nats; σ = 0 is refused.

    >>> gaussian_nll(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 6.0]))
    tensor(2.8905, dtype=torch.float64)
    """
    return Regression.of(mean, std, y).nll


def crps(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """mean of σ [z (2Φ(z) − 1) + 2φ(z) − 1/√π], z = (y − μ) / σ: ∫ (Φ_μσ(t) − 1[y ≤ t])² dt, in units of y.

    >>> crps(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 6.0]))
    tensor(2.1055, dtype=torch.float64)
    """
    return Regression.of(mean, std, y).crps


def check_score(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """mean of the pinball loss at the quantiles μ + z_q σ, over q = 0.01, 0.02, …, 0.99.

    >>> check_score(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 6.0]))
    tensor(1.0635, dtype=torch.float64)
    """
    return Regression.of(mean, std, y).check_score


def mean_interval_score(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """mean of the interval score at the central intervals of level p, over p = 0.01, 0.02, …, 0.99.

    >>> mean_interval_score(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 6.0]))
    tensor(11.3865, dtype=torch.float64)
    """
    return Regression.of(mean, std, y).mean_interval_score


def calibration_curve(mean: Tensor, std: Tensor, y: Tensor, *, num_levels: int = 100) -> CalibrationCurve:
    """The share of y with |y − μ| ≤ w_p σ, p = P(|Z| ≤ w_p), for the levels p = 0, 1/(K − 1), …, 1.

    >>> curve = calibration_curve(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 1.5]), num_levels=3)
    >>> curve.expected.tolist(), curve.observed.tolist()
    ([0.0, 0.5, 1.0], [0.0, 0.5, 1.0])
    """
    return Regression.of(mean, std, y, num_levels=num_levels).calibration_curve


def mean_absolute_calibration(mean: Tensor, std: Tensor, y: Tensor, *, num_levels: int = 100) -> Tensor:
    """mean over the levels of |observed − expected|, of the `calibration_curve`.

    >>> mean_absolute_calibration(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 0.5]), num_levels=3)
    tensor(0.1667, dtype=torch.float64)
    """
    return Regression.of(mean, std, y, num_levels=num_levels).mean_absolute_calibration


def rms_calibration(mean: Tensor, std: Tensor, y: Tensor, *, num_levels: int = 100) -> Tensor:
    """√ mean over the levels of (observed − expected)², of the `calibration_curve`.

    >>> rms_calibration(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 0.5]), num_levels=3)
    tensor(0.2887, dtype=torch.float64)
    """
    return Regression.of(mean, std, y, num_levels=num_levels).rms_calibration


def miscalibration_area(mean: Tensor, std: Tensor, y: Tensor, *, num_levels: int = 100) -> Tensor:
    """∫ |observed(p) − p| dp along the `calibration_curve`: 0 is calibrated, ½ the worst.

    >>> miscalibration_area(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 0.5]), num_levels=3)
    tensor(0.2500, dtype=torch.float64)
    """
    return Regression.of(mean, std, y, num_levels=num_levels).miscalibration_area
