"""The scores of `neuboots.metrics.regression` for one number at a time, and the calibration curve.

    r = y − μ,   z = r / σ,   z = 0 where r = σ = 0

Every function takes r and σ, (N,) each, and has its limit at σ = 0, but the likelihood, which has none there.

How good are intervals, quantiles and samples as predictions of a number y?

    pinball_q(a, y) = (1[y ≤ a] − q)(a − y)
    interval score_p([l, u], y) = u − l + 2/(1 − p) · (max(0, l − y) + max(0, y − u))
    CRPS(x_1 … x_B, y) = 1/B Σ_b |x_b − y| − 1/(2B²) Σ_b Σ_b′ |x_b − x_b′|

T. Gneiting, A. Raftery, Strictly proper scoring rules, prediction, and estimation, JASA 2007.
R. Koenker, G. Bassett, Regression quantiles, Econometrica 1978.

How good is the normal prediction N(μ, σ²) of a number y?

    NLL = mean ½ log 2πσ² + z²/2,   CRPS = mean σ [z (2Φ(z) − 1) + 2φ(z) − 1/√π],   z = (y − μ) / σ

`mean`, `std` and `y` have one shape; every element is an input of its own. σ = 0 is the point mass at μ, the limit of
each figure (its CRPS is |y − μ|) but of the likelihood, which is refused.

T. Gneiting, A. Raftery, Strictly proper scoring rules, prediction, and estimation, JASA 2007.
V. Kuleshov, N. Fenner, S. Ermon, Accurate uncertainties for deep learning using calibrated regression, ICML 2018.
Y. Chung et al., Uncertainty toolbox: an open-source library for assessing, visualizing, and improving uncertainty
quantification, 2021 (the levels over which check score, interval score and calibration are averaged).
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neuboots.metrics._base import (
    MAX_CHUNK_ELEMENTS,
    MetricState,
    RunningMean,
    check_fraction,
    check_int_at_least,
    check_non_negative,
    check_nonempty,
    check_tensors,
    flatten_reals,
)

_PERCENT = 99  # the levels 0.01, 0.02, …, 0.99 of check score and interval score


@dataclass(frozen=True, eq=False)
class CalibrationCurve:
    """The share of y that should fall, and that falls, in the central interval of each level."""

    expected: Tensor  # (num_levels,)
    observed: Tensor  # (num_levels,)

    @property
    def mean_absolute_error(self) -> Tensor:
        return (self.expected - self.observed).abs().mean()

    @property
    def rms_error(self) -> Tensor:
        return (self.expected - self.observed).square().mean().sqrt()

    @property
    def area(self) -> Tensor:
        """∫ |observed − expected| between the levels, both lines straight: where they cross, two triangles."""
        gap = self.observed - self.expected
        left, right = gap[:-1], gap[1:]
        total = left.abs() + right.abs()
        crossing = (left.square() + right.square()) / total.where(total > 0, 1.0)
        return (self.expected.diff() * torch.where(left * right < 0, crossing, total) / 2).sum()


def _normal_quantile(levels: Tensor) -> Tensor:
    """Φ⁻¹ of each level."""
    found: Tensor = torch.special.ndtri(levels)
    return found


def _standardized(r: Tensor, sigma: Tensor) -> Tensor:
    """z = r / σ; ±∞ where only σ is 0, and 0 where both are."""
    return torch.where(r == 0, 0.0, r / sigma)


def _gaussian_nll(r: Tensor, sigma: Tensor) -> Tensor:
    return (r / sigma).square() / 2 + sigma.log() + math.log(2 * math.pi) / 2


def _gaussian_crps(r: Tensor, sigma: Tensor) -> Tensor:
    z = _standardized(r, sigma)
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    return r * torch.erf(z / math.sqrt(2)) + sigma * (2 * density - 1 / math.sqrt(math.pi))


def _check_scores(r: Tensor, sigma: Tensor) -> Tensor:
    """Mean over the levels q of the pinball loss at μ + z_q σ.

    Σ_q (1[z_q ≥ z] − q)(z_q σ − r) needs, at each input, only sums over the levels above z: two look-ups.
    """
    q = torch.arange(1, _PERCENT + 1, dtype=torch.float64, device=r.device) / (_PERCENT + 1)
    at = _normal_quantile(q)
    below = torch.bucketize(_standardized(r, sigma), at)  # (N,) how many z_q < z
    above = at.sum() - torch.cat([at.new_zeros(1), at.cumsum(0)])[below]  # (N,) Σ z_q over the others
    weighted = above - (q * at).sum()
    return (sigma * weighted - r * (_PERCENT - below - q.sum())) / _PERCENT


def _interval_scores(r: Tensor, sigma: Tensor) -> Tensor:
    """Mean over the levels p of 2 w_p σ + 2/(1 − p) · max(0, |r| − w_p σ), the interval being μ ± w_p σ."""
    p = torch.arange(1, _PERCENT + 1, dtype=torch.float64, device=r.device) / (_PERCENT + 1)
    at, price = _normal_quantile(0.5 + p / 2), 2 / (1 - p)
    missed = torch.bucketize(_standardized(r, sigma).abs(), at)  # (N,) how many w_p < |z|
    prices = torch.cat([at.new_zeros(1), price.cumsum(0)])[missed]
    priced = torch.cat([at.new_zeros(1), (price * at).cumsum(0)])[missed]
    return (sigma * (2 * at.sum() - priced) + r.abs() * prices) / _PERCENT


def _count_inside(r: Tensor, sigma: Tensor, num_levels: int) -> Tensor:
    """How many inputs have |z| ≤ w_p, for each level p = 0, …, 1: (num_levels,)."""
    p = torch.linspace(0, 1, num_levels, dtype=torch.float64, device=r.device)
    first = torch.bucketize(_standardized(r, sigma).abs(), _normal_quantile(0.5 + p / 2))
    return torch.bincount(first, minlength=num_levels).cumsum(0)


@dataclass(frozen=True, eq=False)
class IntervalMetrics(MetricState):
    """How often intervals [low, high] hold y, and how wide they are, of data that come in parts.

    >>> tally = IntervalMetrics.of(
    ...     torch.tensor([0.0, 0.0]), torch.tensor([1.0, 3.0]), torch.tensor([0.5, 4.0]), level=0.5
    ... )
    >>> tally.coverage, tally.mean_width, tally.interval_score
    (tensor(0.5000, dtype=torch.float64), tensor(2., dtype=torch.float64), tensor(4., dtype=torch.float64))
    """

    holds: RunningMean
    width: RunningMean
    miss: RunningMean  # how far outside y lies
    level: float

    @classmethod
    def of(cls, low: Tensor, high: Tensor, y: Tensor, *, level: float = 0.95) -> Self:
        """Of ends and targets of one shape; an end may be infinite. Only `interval_score` asks for the level."""
        check_fraction("level", level)
        width = _widths(low, high)
        lower, upper, target = flatten_reals(infinite=True, low=low, high=high, y=y)
        flatten_reals(y=y)
        return cls(
            holds=RunningMean.of((lower <= target) & (target <= upper)),
            width=RunningMean.of(width),
            miss=RunningMean.of((lower - target).clamp_min(0) + (target - upper).clamp_min(0)),
            level=level,
        )

    @property
    def count(self) -> int:
        return int(self.holds.count)

    @property
    def coverage(self) -> Tensor:
        return self.holds.value

    @property
    def mean_width(self) -> Tensor:
        return self.width.value

    @property
    def interval_score(self) -> Tensor:
        return self.width.value + 2 / (1 - self.level) * self.miss.value


@dataclass(frozen=True, eq=False)
class WidthMetrics(MetricState):
    """How wide intervals are, whatever y, of data that come in parts.

    >>> (
    ...     WidthMetrics.of(torch.tensor([0.0]), torch.tensor([1.0]))
    ...     + WidthMetrics.of(torch.zeros(1), torch.ones(1) * 3)
    ... ).mean_width
    tensor(2., dtype=torch.float64)
    """

    width: RunningMean

    @classmethod
    def of(cls, low: Tensor, high: Tensor) -> Self:
        """Of ends of one shape; an end may be infinite."""
        return cls(RunningMean.of(_widths(low, high)))

    @property
    def count(self) -> int:
        return int(self.width.count)

    @property
    def mean_width(self) -> Tensor:
        return self.width.value


@dataclass(frozen=True, eq=False)
class QuantileMetrics(MetricState):
    """The pinball loss of a predicted quantile, of data that come in parts.

    >>> QuantileMetrics.of(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 3.0]), q=0.9).pinball
    tensor(0.9500, dtype=torch.float64)
    """

    loss: RunningMean
    q: float

    @classmethod
    def of(cls, quantile: Tensor, y: Tensor, *, q: float) -> Self:
        """Of the predicted q-quantile and targets of one shape."""
        check_fraction("q", q)
        at, target = flatten_reals(quantile=quantile, y=y)
        gap = at - target
        return cls(RunningMean.of(torch.where(gap >= 0, (1 - q) * gap, -q * gap)), q)

    @property
    def count(self) -> int:
        return int(self.loss.count)

    @property
    def pinball(self) -> Tensor:
        return self.loss.value


@dataclass(frozen=True, eq=False)
class SampleMetrics(MetricState):
    """The CRPS of samples, of data that come in parts.

    >>> SampleMetrics.of(torch.tensor([[0.0], [1.0]]), torch.tensor([0.0])).crps
    tensor(0.2500, dtype=torch.float64)
    """

    ranked: RunningMean

    @classmethod
    def of(cls, samples: Tensor, y: Tensor) -> Self:
        """Of samples (B, *) and targets (*): the law of y is that of the B samples, each with weight 1/B."""
        check_tensors(samples=samples, y=y)
        if samples.shape[1:] != y.shape or samples.dim() == 0:
            raise ValueError(
                f"samples has shape {tuple(samples.shape)} and y {tuple(y.shape)}; expected (B, *) and (*): reshape "
                "one of them, since (N,) and (N, 1) do not pair up"
            )
        if len(samples) == 0:
            raise ValueError(f"samples has shape {tuple(samples.shape)}; expected at least one replicate")
        (drawn,), (target,) = flatten_reals(samples=samples), flatten_reals(y=y)
        drawn, target = drawn.view(len(samples), len(target)), target.to(drawn.device)  # (B, N), (N,)
        width = max(1, MAX_CHUNK_ELEMENTS // len(drawn))
        parts = zip(torch.split(drawn, width, dim=1), torch.split(target, width), strict=True)
        return cls(RunningMean.of(torch.cat([_ranked(x, to) for x, to in parts])))

    @property
    def count(self) -> int:
        return int(self.ranked.count)

    @property
    def crps(self) -> Tensor:
        return self.ranked.value


def interval_coverage(low: Tensor, high: Tensor, y: Tensor) -> Tensor:
    """mean of 1[low ≤ y ≤ high].

    >>> interval_coverage(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0]))
    tensor(0.5000, dtype=torch.float64)
    """
    return IntervalMetrics.of(low, high, y).coverage


def mean_width(low: Tensor, high: Tensor) -> Tensor:
    """mean of high − low.

    >>> mean_width(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 3.0]))
    tensor(2., dtype=torch.float64)
    """
    return WidthMetrics.of(low, high).mean_width


def pinball(quantile: Tensor, y: Tensor, *, q: float) -> Tensor:
    """mean of (1[y ≤ a] − q)(a − y): the loss whose minimum is the q-quantile a.

    >>> pinball(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 3.0]), q=0.9)
    tensor(0.9500, dtype=torch.float64)
    """
    return QuantileMetrics.of(quantile, y, q=q).pinball


def interval_score(low: Tensor, high: Tensor, y: Tensor, *, level: float) -> Tensor:
    """mean of u − l + 2/(1 − p) · (max(0, l − y) + max(0, y − u)), for central intervals [l, u] of level p.

    >>> interval_score(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([2.0]), level=0.5)
    tensor(5., dtype=torch.float64)
    """
    return IntervalMetrics.of(low, high, y, level=level).interval_score


def crps_samples(samples: Tensor, y: Tensor) -> Tensor:
    """mean of 1/B Σ_b |x_b − y| − 1/(2B²) Σ_b Σ_b′ |x_b − x_b′|: samples (B, *), y (*).

    >>> crps_samples(torch.tensor([[0.0], [1.0]]), torch.tensor([0.0]))
    tensor(0.2500, dtype=torch.float64)
    """
    return SampleMetrics.of(samples, y).crps


def _ranked(samples: Tensor, y: Tensor) -> Tensor:
    """CRPS of samples (B, N) at y (N,): 2/B² Σ_b (x_(b) − y)(B 1[y < x_(b)] − b + ½) over sorted samples: (N,).

    No sum over pairs, and no cancellation.
    """
    B = len(samples)
    gap = (samples - y).sort(0).values
    rank = torch.arange(B, device=gap.device, dtype=torch.float64) + 0.5
    weight = torch.where(gap > 0, B, 0.0) - rank[:, None]
    return 2 / B**2 * (weight * gap).sum(0)


def _widths(low: Tensor, high: Tensor) -> Tensor:
    """u − l ≥ 0: (N,)."""
    lower, upper = flatten_reals(infinite=True, low=low, high=high)
    width = upper - lower
    wrong = int((~(width >= 0)).sum())
    if wrong:
        raise ValueError(
            f"low is above high, or both are the same infinity, for {wrong} of {len(width)} inputs; expected "
            "low ≤ high: swap them"
        )
    return width


@dataclass(frozen=True, eq=False)
class RegressionMetrics(MetricState):
    """Every figure of normal predictions, of data that come in parts.

    `simulate_coverage`, `mean_width` and `interval_score` are those of the central interval of `level`.

    >>> mean, std, y = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 6.0])
    >>> tally = sum(RegressionMetrics.of(*row) for row in zip(mean[:, None], std[:, None], y[:, None]))
    >>> tally.count, tally.rmse, tally.coverage
    (2, tensor(3.5532, dtype=torch.float64), tensor(0.5000, dtype=torch.float64))
    """

    squares: RunningMean  # (y − μ)²
    surprise: RunningMean  # −log N(y; μ, σ²), where σ > 0
    ranked: RunningMean
    checks: RunningMean
    intervals: RunningMean
    variance: RunningMean  # σ²
    central: IntervalMetrics
    inside: Tensor  # (num_levels,) how many y lie in the central interval of each level
    level: float

    @classmethod
    def of(cls, mean: Tensor, std: Tensor, y: Tensor, *, level: float = 0.95, num_levels: int = 100) -> Self:
        """Of means, standard deviations and targets of one shape."""
        check_fraction("level", level)
        check_int_at_least("num_levels", num_levels, 2)
        mu, sigma, target = flatten_reals(mean=mean, std=std, y=y)
        check_non_negative("std", sigma)
        r = target - mu
        half = _normal_quantile(torch.tensor(0.5 + level / 2, dtype=torch.float64)).to(sigma.device) * sigma
        spread = sigma > 0
        return cls(
            squares=RunningMean.of(r.square()),
            surprise=RunningMean.of(_gaussian_nll(r[spread], sigma[spread])),
            ranked=RunningMean.of(_gaussian_crps(r, sigma)),
            checks=RunningMean.of(_check_scores(r, sigma)),
            intervals=RunningMean.of(_interval_scores(r, sigma)),
            variance=RunningMean.of(sigma.square()),
            central=IntervalMetrics.of(mu - half, mu + half, target, level=level),
            inside=_count_inside(r, sigma, num_levels),
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
        return CalibrationCurve(expected, self.inside.double() / check_nonempty(self.squares.count))

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
class SharpnessMetrics(MetricState):
    """How wide predictions are, whatever y, of data that come in parts.

    >>> (SharpnessMetrics.of(torch.tensor([3.0])) + SharpnessMetrics.of(torch.tensor([4.0]))).sharpness
    tensor(3.5355, dtype=torch.float64)
    """

    variance: RunningMean  # σ²

    @classmethod
    def of(cls, std: Tensor) -> Self:
        """Of standard deviations of any shape."""
        (sigma,) = flatten_reals(std=std)
        check_non_negative("std", sigma)
        return cls(RunningMean.of(sigma.square()))

    @property
    def count(self) -> int:
        return int(self.variance.count)

    @property
    def sharpness(self) -> Tensor:
        return self.variance.value.sqrt()


@dataclass(frozen=True, eq=False)
class ResidualMetrics(MetricState):
    """How far point predictions miss, of data that come in parts.

    >>> (ResidualMetrics.of(torch.zeros(1), torch.ones(1)) + ResidualMetrics.of(torch.zeros(1), 7 * torch.ones(1))).rmse
    tensor(5., dtype=torch.float64)
    """

    squares: RunningMean  # (y − μ)²

    @classmethod
    def of(cls, mean: Tensor, y: Tensor) -> Self:
        """Of means and targets of one shape."""
        mu, target = flatten_reals(mean=mean, y=y)
        return cls(RunningMean.of((target - mu).square()))

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
    return ResidualMetrics.of(mean, y).rmse


def sharpness(std: Tensor) -> Tensor:
    """√ mean σ²: how narrow the predictions are, right or wrong.

    >>> sharpness(torch.tensor([3.0, 4.0]))
    tensor(3.5355, dtype=torch.float64)
    """
    return SharpnessMetrics.of(std).sharpness


def gaussian_nll(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """mean of ½ log 2πσ² + ½ ((y − μ) / σ)², in nats; σ = 0 is refused.

    >>> gaussian_nll(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 6.0]))
    tensor(2.8905, dtype=torch.float64)
    """
    return RegressionMetrics.of(mean, std, y).nll


def crps(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """mean of σ [z (2Φ(z) − 1) + 2φ(z) − 1/√π], z = (y − μ) / σ: ∫ (Φ_μσ(t) − 1[y ≤ t])² dt, in units of y.

    >>> crps(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 6.0]))
    tensor(2.1055, dtype=torch.float64)
    """
    return RegressionMetrics.of(mean, std, y).crps


def check_score(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """mean of the pinball loss at the quantiles μ + z_q σ, over q = 0.01, 0.02, …, 0.99.

    >>> check_score(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 6.0]))
    tensor(1.0635, dtype=torch.float64)
    """
    return RegressionMetrics.of(mean, std, y).check_score


def mean_interval_score(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """mean of the interval score at the central intervals of level p, over p = 0.01, 0.02, …, 0.99.

    >>> mean_interval_score(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 6.0]))
    tensor(11.3865, dtype=torch.float64)
    """
    return RegressionMetrics.of(mean, std, y).mean_interval_score


def calibration_curve(mean: Tensor, std: Tensor, y: Tensor, *, num_levels: int = 100) -> CalibrationCurve:
    """The share of y with |y − μ| ≤ w_p σ, p = P(|Z| ≤ w_p), for the levels p = 0, 1/(K − 1), …, 1.

    >>> curve = calibration_curve(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 1.5]), num_levels=3)
    >>> curve.expected.tolist(), curve.observed.tolist()
    ([0.0, 0.5, 1.0], [0.0, 0.5, 1.0])
    """
    return RegressionMetrics.of(mean, std, y, num_levels=num_levels).calibration_curve


def mean_absolute_calibration(mean: Tensor, std: Tensor, y: Tensor, *, num_levels: int = 100) -> Tensor:
    """mean over the levels of |observed − expected|, of the `calibration_curve`.

    >>> mean_absolute_calibration(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 0.5]), num_levels=3)
    tensor(0.1667, dtype=torch.float64)
    """
    return RegressionMetrics.of(mean, std, y, num_levels=num_levels).mean_absolute_calibration


def rms_calibration(mean: Tensor, std: Tensor, y: Tensor, *, num_levels: int = 100) -> Tensor:
    """√ mean over the levels of (observed − expected)², of the `calibration_curve`.

    >>> rms_calibration(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 0.5]), num_levels=3)
    tensor(0.2887, dtype=torch.float64)
    """
    return RegressionMetrics.of(mean, std, y, num_levels=num_levels).rms_calibration


def miscalibration_area(mean: Tensor, std: Tensor, y: Tensor, *, num_levels: int = 100) -> Tensor:
    """∫ |observed(p) − p| dp along the `calibration_curve`: 0 is calibrated, ½ the worst.

    >>> miscalibration_area(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 0.5]), num_levels=3)
    tensor(0.2500, dtype=torch.float64)
    """
    return RegressionMetrics.of(mean, std, y, num_levels=num_levels).miscalibration_area
