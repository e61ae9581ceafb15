"""Metrics of predicted real numbers y: normal predictions N(μ, σ²), intervals, quantiles and samples.

    NLL = mean ½ log 2πσ² + z²/2,   CRPS = mean σ [z (2Φ(z) − 1) + 2φ(z) − 1/√π],   z = (y − μ) / σ
    pinball_q(a, y) = (1[y ≤ a] − q)(a − y)
    interval score_p([l, u], y) = u − l + 2/(1 − p) · (max(0, l − y) + max(0, y − u))
    CRPS(x_1 … x_B, y) = 1/B Σ_b |x_b − y| − 1/(2B²) Σ_b Σ_b′ |x_b − x_b′|

Arguments have one shape; every element is an input of its own. σ = 0 is the point mass at μ, and each metric takes its
limit there (the CRPS is |y − μ|), except the likelihood, which has none and is an error.

T. Gneiting, A. Raftery, Strictly proper scoring rules, prediction, and estimation, JASA 2007.
R. Koenker, G. Bassett, Regression quantiles, Econometrica 1978.
V. Kuleshov, N. Fenner, S. Ermon, Accurate uncertainties for deep learning using calibrated regression, ICML 2018.
Y. Chung et al., Uncertainty toolbox: an open-source library for assessing, visualizing, and improving uncertainty
quantification, 2021 (the levels over which check score, interval score and calibration are averaged).
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from neuboots._validation import ArgumentError, check_fraction, check_int, check_memory
from neuboots.metrics import classification
from neuboots.metrics.classification import MetricState, RunningMean, check_tensors, flatten_reals

_LEVELS = torch.arange(1, 100, dtype=torch.float64) / 100  # of check score and interval score

# -- states --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CalibrationCurve:
    """Expected and observed fraction of y inside the central interval of each level.

    Args:
        expected: The levels, (num_levels,).
        observed: Fraction of y inside, (num_levels,).
    """

    expected: Tensor
    observed: Tensor


@dataclass(frozen=True, eq=False)
class IntervalMetrics(MetricState):
    """Coverage, width and score of intervals [low, high], for data that come in batches.

    Args:
        covered: Mean of 1[low ≤ y ≤ high].
        widths: Mean of high − low.
        distances: Mean distance of y from the interval.
        level: Nominal coverage.

    Example:
        >>> low, high, y = torch.zeros(2), torch.tensor([1.0, 3.0]), torch.tensor([0.5, 4.0])
        >>> state = IntervalMetrics.from_batch(low, high, y, level=0.5)
        >>> state.coverage, state.mean_width, state.interval_score
        (tensor(0.5000, dtype=torch.float64), tensor(2., dtype=torch.float64), tensor(4., dtype=torch.float64))
    """

    covered: RunningMean
    widths: RunningMean
    distances: RunningMean
    level: float

    @classmethod
    def from_batch(cls, low: Tensor, high: Tensor, y: Tensor, *, level: float = 0.95) -> Self:
        """Return the sums of one batch.

        Args:
            low: Lower ends, possibly −∞.
            high: Upper ends, possibly ∞.
            y: Targets.
            level: Nominal coverage of the intervals, used by `interval_score`.

        Raises:
            ArgumentError: If shapes differ, a value is NaN, or an interval has low > high.
        """
        lower, upper, target = flatten_reals(allow_infinite=True, low=low, high=high, y=y)
        flatten_reals(y=y)
        widths = upper - lower
        if invalid := int((~(widths >= 0)).sum()):
            got = f"above high, or the same infinity, in {invalid} of {len(widths)} intervals"
            raise ArgumentError("low", got, "low ≤ high")
        return cls(
            covered=RunningMean.from_batch((lower <= target) & (target <= upper)),
            widths=RunningMean.from_batch(widths),
            distances=RunningMean.from_batch((lower - target).clamp_min(0) + (target - upper).clamp_min(0)),
            level=check_fraction("level", level),
        )

    @property
    def count(self) -> int:
        """Number of intervals."""
        return int(self.covered.count)

    @property
    def coverage(self) -> Tensor:
        """Fraction of intervals that contain y."""
        return self.covered.value

    @property
    def mean_width(self) -> Tensor:
        """Mean of high − low."""
        return self.widths.value

    @property
    def interval_score(self) -> Tensor:
        """Interval score at the nominal level."""
        return self.widths.value + 2 / (1 - self.level) * self.distances.value


@dataclass(frozen=True, eq=False)
class RegressionMetrics(IntervalMetrics):
    """All metrics of normal predictions for data that come in batches.

    `coverage`, `mean_width` and `interval_score` are those of the central interval of `level`.

    Args:
        squared_errors: Mean of (y − μ)².
        log_losses: Mean of −log N(y; μ, σ²), where σ > 0.
        crps_values: Mean CRPS.
        check_scores: Mean check score.
        interval_scores: Mean interval score over all levels.
        variances: Mean of σ².
        inside: Number of y in the central interval of each level, (num_levels,).

    Example:
        >>> mean, std, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [2.0]]), torch.tensor([[0.5], [6.0]])
        >>> state = sum(RegressionMetrics.from_batch(*batch) for batch in zip(mean, std, y))
        >>> state.count, state.rmse, state.coverage
        (2, tensor(3.5532, dtype=torch.float64), tensor(0.5000, dtype=torch.float64))
    """

    squared_errors: RunningMean
    log_losses: RunningMean
    crps_values: RunningMean
    check_scores: RunningMean
    interval_scores: RunningMean
    variances: RunningMean
    inside: Tensor

    @classmethod
    def from_batch(cls, mean: Tensor, std: Tensor, y: Tensor, *, level: float = 0.95, num_levels: int = 100) -> Self:
        """Return the sums of one batch.

        Args:
            mean: Predicted means μ.
            std: Predicted standard deviations σ ≥ 0.
            y: Targets.
            level: Level of the central interval.
            num_levels: Number of levels of the calibration curve, at least 2.

        Raises:
            ArgumentError: If shapes differ, a value is not finite, or a standard deviation is negative.
        """
        level, num_levels = check_fraction("level", level), check_int("num_levels", num_levels, minimum=2)
        check_memory("num_levels", num_levels, 32 * num_levels, hint="use fewer levels")
        mu, sigma, target = flatten_reals(mean=mean, std=std, y=y)
        _check_non_negative("std", sigma)
        r = target - mu
        half = _normal_quantile(torch.tensor(0.5 + level / 2, dtype=torch.float64)).to(sigma.device) * sigma
        positive = sigma > 0
        central = IntervalMetrics.from_batch(mu - half, mu + half, target, level=level)
        return cls(
            **vars(central),
            squared_errors=RunningMean.from_batch(r.square()),
            log_losses=RunningMean.from_batch(_gaussian_nll(r[positive], sigma[positive])),
            crps_values=RunningMean.from_batch(_gaussian_crps(r, sigma)),
            check_scores=RunningMean.from_batch(_check_scores(r, sigma)),
            interval_scores=RunningMean.from_batch(_interval_scores(r, sigma)),
            variances=RunningMean.from_batch(sigma.square()),
            inside=_count_inside(r, sigma, num_levels),
        )

    @property
    def rmse(self) -> Tensor:
        """Root mean squared error of μ."""
        return self.squared_errors.value.sqrt()

    @property
    def nll(self) -> Tensor:
        """Negative log-likelihood in nats; raises ArgumentError if a σ is 0."""
        num_zero = self.count - int(self.log_losses.count)
        if num_zero:
            hint = "add the variance of the noise of y, or use the CRPS"
            raise ArgumentError("std", f"0 for {num_zero} of {self.count} inputs", "std > 0", hint=hint)
        return self.log_losses.value

    @property
    def crps(self) -> Tensor:
        """Continuous ranked probability score, in units of y."""
        return self.crps_values.value

    @property
    def check_score(self) -> Tensor:
        """Mean pinball loss over the levels 0.01, …, 0.99."""
        return self.check_scores.value

    @property
    def mean_interval_score(self) -> Tensor:
        """Mean interval score over the levels 0.01, …, 0.99."""
        return self.interval_scores.value

    @property
    def sharpness(self) -> Tensor:
        """Root mean square of σ."""
        return self.variances.value.sqrt()

    @property
    def calibration_curve(self) -> CalibrationCurve:
        """Expected and observed coverage of central intervals."""
        expected = torch.linspace(0, 1, len(self.inside), dtype=torch.float64, device=self.inside.device)
        return CalibrationCurve(expected, self.inside.double() / check_int("count", self.count, minimum=1))

    @property
    def _gap(self) -> Tensor:
        """Observed − expected coverage of each level: (num_levels,)."""
        return self.calibration_curve.observed - self.calibration_curve.expected

    @property
    def mean_absolute_calibration(self) -> Tensor:
        """Mean absolute calibration error."""
        return self._gap.abs().mean()

    @property
    def rms_calibration(self) -> Tensor:
        """Root mean square calibration error."""
        return self._gap.square().mean().sqrt()

    @property
    def miscalibration_area(self) -> Tensor:
        """∫ |observed(p) − p| dp, linear between the levels; where the curve crosses the diagonal, two triangles."""
        left, right = self._gap[:-1], self._gap[1:]
        total = left.abs() + right.abs()
        crossing = (left.square() + right.square()) / total.where(total > 0, 1.0)
        return (torch.where(left * right < 0, crossing, total) / 2).mean()


# -- functions -----------------------------------------------------------------------------------------


def rmse(mean: Tensor, y: Tensor) -> Tensor:
    """√ mean (y − μ)².

    Args:
        mean: Predictions μ.
        y: Targets.

    Returns:
        The root mean squared error, a 0-dim float64 tensor.

    Example:
        >>> rmse(torch.tensor([0.0, 1.0]), torch.tensor([3.0, 5.0]))
        tensor(3.5355, dtype=torch.float64)
    """
    mu, target = flatten_reals(mean=mean, y=y)
    return RunningMean.from_batch((target - mu).square()).value.sqrt()


def sharpness(std: Tensor) -> Tensor:
    """√ mean σ²: how narrow the predictions are, whether or not they are correct.

    Args:
        std: Standard deviations σ ≥ 0.

    Returns:
        The sharpness, a 0-dim float64 tensor.

    Example:
        >>> sharpness(torch.tensor([3.0, 4.0]))
        tensor(3.5355, dtype=torch.float64)
    """
    (sigma,) = flatten_reals(std=std)
    _check_non_negative("std", sigma)
    return RunningMean.from_batch(sigma.square()).value.sqrt()


def gaussian_nll(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """Mean of ½ log 2πσ² + ½ ((y − μ) / σ)², in nats.

    Args:
        mean: Predicted means μ.
        std: Predicted standard deviations σ > 0.
        y: Targets.

    Returns:
        The negative log-likelihood, a 0-dim float64 tensor.

    Example:
        >>> gaussian_nll(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 6.0]))
        tensor(2.8905, dtype=torch.float64)
    """
    return RegressionMetrics.from_batch(mean, std, y).nll


def crps(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """Continuous ranked probability score ∫ (Φ_μσ(t) − 1[y ≤ t])² dt of normal predictions, in units of y.

    Args:
        mean: Predicted means μ.
        std: Predicted standard deviations σ ≥ 0.
        y: Targets.

    Returns:
        The mean score, a 0-dim float64 tensor.

    Example:
        >>> crps(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 6.0]))
        tensor(2.1055, dtype=torch.float64)
    """
    return RegressionMetrics.from_batch(mean, std, y).crps


def check_score(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """Mean pinball loss at the quantiles μ + z_q σ, over q = 0.01, 0.02, …, 0.99.

    Args:
        mean: Predicted means μ.
        std: Predicted standard deviations σ ≥ 0.
        y: Targets.

    Returns:
        The mean score, a 0-dim float64 tensor.

    Example:
        >>> check_score(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 6.0]))
        tensor(1.0635, dtype=torch.float64)
    """
    return RegressionMetrics.from_batch(mean, std, y).check_score


def mean_interval_score(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """Mean interval score of the central intervals of level p, over p = 0.01, 0.02, …, 0.99.

    Args:
        mean: Predicted means μ.
        std: Predicted standard deviations σ ≥ 0.
        y: Targets.

    Returns:
        The mean score, a 0-dim float64 tensor.

    Example:
        >>> mean_interval_score(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 6.0]))
        tensor(11.3865, dtype=torch.float64)
    """
    return RegressionMetrics.from_batch(mean, std, y).mean_interval_score


def calibration_curve(mean: Tensor, std: Tensor, y: Tensor, *, num_levels: int = 100) -> CalibrationCurve:
    """Fraction of y with |y − μ| ≤ w_p σ, p = P(|Z| ≤ w_p), for the levels p = 0, 1/(K − 1), …, 1.

    Args:
        mean: Predicted means μ.
        std: Predicted standard deviations σ ≥ 0.
        y: Targets.
        num_levels: Number of levels K, at least 2.

    Returns:
        The curve.

    Example:
        >>> curve = calibration_curve(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 1.5]), num_levels=3)
        >>> curve.expected.tolist(), curve.observed.tolist()
        ([0.0, 0.5, 1.0], [0.0, 0.5, 1.0])
    """
    return RegressionMetrics.from_batch(mean, std, y, num_levels=num_levels).calibration_curve


def mean_absolute_calibration(mean: Tensor, std: Tensor, y: Tensor, *, num_levels: int = 100) -> Tensor:
    """Mean over the levels of |observed − expected| of the `calibration_curve`.

    Args:
        mean: Predicted means μ.
        std: Predicted standard deviations σ ≥ 0.
        y: Targets.
        num_levels: Number of levels, at least 2.

    Returns:
        The error, a 0-dim float64 tensor.

    Example:
        >>> mean_absolute_calibration(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 0.5]), num_levels=3)
        tensor(0.1667, dtype=torch.float64)
    """
    return RegressionMetrics.from_batch(mean, std, y, num_levels=num_levels).mean_absolute_calibration


def rms_calibration(mean: Tensor, std: Tensor, y: Tensor, *, num_levels: int = 100) -> Tensor:
    """Root mean square over the levels of observed − expected of the `calibration_curve`.

    Args:
        mean: Predicted means μ.
        std: Predicted standard deviations σ ≥ 0.
        y: Targets.
        num_levels: Number of levels, at least 2.

    Returns:
        The error, a 0-dim float64 tensor.

    Example:
        >>> rms_calibration(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 0.5]), num_levels=3)
        tensor(0.2887, dtype=torch.float64)
    """
    return RegressionMetrics.from_batch(mean, std, y, num_levels=num_levels).rms_calibration


def miscalibration_area(mean: Tensor, std: Tensor, y: Tensor, *, num_levels: int = 100) -> Tensor:
    """∫ |observed(p) − p| dp along the `calibration_curve`: 0 is calibrated, ½ the maximum.

    Args:
        mean: Predicted means μ.
        std: Predicted standard deviations σ ≥ 0.
        y: Targets.
        num_levels: Number of levels, at least 2.

    Returns:
        The area, a 0-dim float64 tensor.

    Example:
        >>> miscalibration_area(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 0.5]), num_levels=3)
        tensor(0.2500, dtype=torch.float64)
    """
    return RegressionMetrics.from_batch(mean, std, y, num_levels=num_levels).miscalibration_area


def interval_coverage(low: Tensor, high: Tensor, y: Tensor) -> Tensor:
    """Mean of 1[low ≤ y ≤ high].

    Args:
        low: Lower ends.
        high: Upper ends.
        y: Targets.

    Returns:
        The coverage, a 0-dim float64 tensor.

    Example:
        >>> interval_coverage(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0]))
        tensor(0.5000, dtype=torch.float64)
    """
    return IntervalMetrics.from_batch(low, high, y).coverage


def mean_width(low: Tensor, high: Tensor) -> Tensor:
    """Mean of high − low.

    Args:
        low: Lower ends.
        high: Upper ends.

    Returns:
        The width, a 0-dim float64 tensor.

    Example:
        >>> mean_width(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 3.0]))
        tensor(2., dtype=torch.float64)
    """
    check_tensors(low=low)
    return IntervalMetrics.from_batch(low, high, torch.zeros_like(low)).mean_width


def interval_score(low: Tensor, high: Tensor, y: Tensor, *, level: float) -> Tensor:
    """Mean of u − l + 2/(1 − p) · (max(0, l − y) + max(0, y − u)) for central intervals [l, u] of level p.

    Args:
        low: Lower ends l.
        high: Upper ends u.
        y: Targets.
        level: Nominal coverage p.

    Returns:
        The mean score, a 0-dim float64 tensor.

    Example:
        >>> interval_score(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([2.0]), level=0.5)
        tensor(5., dtype=torch.float64)
    """
    return IntervalMetrics.from_batch(low, high, y, level=level).interval_score


def pinball(quantile: Tensor, y: Tensor, *, q: float) -> Tensor:
    """Mean of (1[y ≤ a] − q)(a − y): the loss whose minimum is the q-quantile a.

    Args:
        quantile: Predicted q-quantiles a.
        y: Targets.
        q: Probability of the quantile, between 0 and 1.

    Returns:
        The mean loss, a 0-dim float64 tensor.

    Example:
        >>> pinball(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 3.0]), q=0.9)
        tensor(0.9500, dtype=torch.float64)
    """
    q = check_fraction("q", q)
    a, target = flatten_reals(quantile=quantile, y=y)
    gap = a - target
    return RunningMean.from_batch(torch.where(gap >= 0, (1 - q) * gap, -q * gap)).value


def crps_samples(samples: Tensor, y: Tensor) -> Tensor:
    """Continuous ranked probability score 1/B Σ_b |x_b − y| − 1/(2B²) Σ_b Σ_b′ |x_b − x_b′| of samples.

    Args:
        samples: Samples (B, *), each of weight 1/B.
        y: Targets (*).

    Returns:
        The mean score, a 0-dim float64 tensor.

    Example:
        >>> crps_samples(torch.tensor([[0.0], [1.0]]), torch.tensor([0.0]))
        tensor(0.2500, dtype=torch.float64)
    """
    check_tensors(samples=samples, y=y)
    if samples.dim() == 0 or len(samples) == 0 or samples.shape[1:] != y.shape:
        expected = f"(B, *) with B ≥ 1 and (*) = {tuple(y.shape)}, the shape of y"
        raise ArgumentError("samples.shape", tuple(samples.shape), expected)
    (x,), (target,) = flatten_reals(samples=samples), flatten_reals(y=y)
    B, target = len(samples), target.to(x.device)
    width = max(1, classification.MAX_CHUNK_ELEMENTS // B)
    scores = []
    for part, t in zip(torch.split(x.view(B, -1), width, dim=1), torch.split(target, width), strict=True):
        # 2/B² Σ_b (x_(b) − y)(B 1[y < x_(b)] − b + ½) over sorted samples: no sum over pairs, and no cancellation.
        gap = (part - t).sort(0).values
        rank = torch.arange(B, device=gap.device, dtype=torch.float64) + 0.5
        weight = torch.where(gap > 0, B, 0.0) - rank[:, None]
        scores.append(2 / B**2 * (weight * gap).sum(0))
    return RunningMean.from_batch(torch.cat(scores)).value


def _check_non_negative(name: str, values: Tensor) -> None:
    if values.numel() and values.min() < 0:
        raise ArgumentError(name, f"a minimum of {values.min():.3g}", "standard deviations ≥ 0")


# -- per-input scores of N(μ, σ²) from residuals r = y − μ: (N,) each ----------------------------------


def _standardize(r: Tensor, sigma: Tensor) -> Tensor:
    """z = r / σ; ±∞ where only σ is 0, and 0 where both are."""
    return torch.where(r == 0, 0.0, r / sigma)


def _gaussian_nll(r: Tensor, sigma: Tensor) -> Tensor:
    return (r / sigma).square() / 2 + sigma.log() + math.log(2 * math.pi) / 2


def _gaussian_crps(r: Tensor, sigma: Tensor) -> Tensor:
    z = _standardize(r, sigma)
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    return r * torch.erf(z / math.sqrt(2)) + sigma * (2 * density - 1 / math.sqrt(math.pi))


def _normal_quantile(levels: Tensor) -> Tensor:
    quantile: Tensor = torch.special.ndtri(levels)
    return quantile


def _check_scores(r: Tensor, sigma: Tensor) -> Tensor:
    """Mean over the levels q of the pinball loss at μ + z_q σ.

    Σ_q (1[z_q ≥ z] − q)(z_q σ − r) needs, at each input, only sums over the levels above z: two look-ups.
    """
    q = _LEVELS.to(r.device)
    quantile = _normal_quantile(q)
    below = torch.bucketize(_standardize(r, sigma), quantile)  # (N,) number of z_q < z
    above = quantile.sum() - pad(quantile.cumsum(0), (1, 0))[below]  # (N,) Σ z_q over the others
    return (sigma * (above - (q * quantile).sum()) - r * (len(q) - below - q.sum())) / len(q)


def _interval_scores(r: Tensor, sigma: Tensor) -> Tensor:
    """Mean over the levels p of 2 w_p σ + 2/(1 − p) · max(0, |r| − w_p σ) for the interval μ ± w_p σ."""
    p = _LEVELS.to(r.device)
    w, penalty = _normal_quantile(0.5 + p / 2), 2 / (1 - p)
    missed = torch.bucketize(_standardize(r, sigma).abs(), w)  # (N,) number of w_p < |z|
    penalties, weighted = (pad(part.cumsum(0), (1, 0))[missed] for part in (penalty, penalty * w))
    return (sigma * (2 * w.sum() - weighted) + r.abs() * penalties) / len(p)


def _count_inside(r: Tensor, sigma: Tensor, num_levels: int) -> Tensor:
    """Number of inputs with |z| ≤ w_p, for each level p = 0, …, 1: (num_levels,)."""
    p = torch.linspace(0, 1, num_levels, dtype=torch.float64, device=r.device)
    first = torch.bucketize(_standardize(r, sigma).abs(), _normal_quantile(0.5 + p / 2))
    return torch.bincount(first, minlength=num_levels).cumsum(0)
