"""Statistics that compare a predictor's replicates with bootstrap replicates at the same inputs.

    s(x), t(x): standard deviation at x over the predictor's and over the bootstrap replicates
    ratio = exp mean log(s/t),   spread of the ratio = exp √(var₀ log(s/t)),
    correlation = cov(log s, log t) / √(var₀ log s · var₀ log t),   over inputs
    KS = sup |F_s − F_t|,   W₁ = ∫ |F_s − F_t|,   of standardized replicates at one input

K bootstrap replicates are few. log t of few replicates is too small on average, which a permutation test corrects. Its
error is common to all inputs, since all are computed by the same K nets; intervals are therefore a jackknife over
replicates, not over inputs. The error also attenuates a correlation over inputs. The variance var₀ that is free of it
is the covariance between the log standard deviations of two halves of the replicates, whose errors are independent,
averaged over random halves; this holds for any distribution of the replicates.

Permutation test: replicates are often skewed or have heavy tails, so that K of them differ from B of them even if both
have one distribution. At a sample of locations, the standardized replicates of both kinds are pooled and divided at
random many times into K and B; the distances and the ratio of standard deviations between the two are the null
distribution. One division serves all locations, since the K nets are the same at all inputs.

Spearman, The proof and measurement of association between two things, American Journal of Psychology 1904 (correlation
of what is measured with error); Efron and Stein, The jackknife estimate of variance, Annals of Statistics 1981; Fisher,
The design of experiments, 1935 (permutation test).
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neuboots._prng import derive_seed
from neuboots.metrics import MetricState

MIN_STD_FRACTION = 0.01  # less than this fraction of the bootstrap's standard deviation counts as no spread
STD_RATIO_TOLERANCE = 1.25  # an acceptable factor: a 95 % band covers 88 % to 99 %
MAX_CORRELATION_ERROR = 0.5  # half width of the interval of a correlation that is reported

_NUM_SPLITS = 32  # random halves
_NUM_GROUPS = 20  # of replicates that the jackknife leaves out, if there are more than _NUM_SPLITS of them
MAX_SUBSETS = 1 + _NUM_SPLITS + 2 * _NUM_SPLITS
NUM_LOCATIONS = 20  # of the permutation test
_NUM_DISTANCE_DIVISIONS = 32
_NUM_RATIO_DIVISIONS = 400
_LIMIT_SIGMAS = 3.5  # of a null distribution, above its mean


# -- standard deviations -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ReplicateSubsets:
    """Subsets of the replicates whose standard deviations are computed: all, all but one group, random halves."""

    sizes: Tensor  # replicates in each group: (G,)
    members: Tensor  # groups of each subset, 0 or 1: (1 + G + 2·splits, G)

    @classmethod
    def make(cls, count: int, *, seed: int) -> "ReplicateSubsets":
        groups = count if count <= _NUM_SPLITS else _NUM_GROUPS
        rng = torch.Generator().manual_seed(derive_seed(seed, "halves", groups))
        half = torch.stack([torch.randperm(groups, generator=rng) < groups // 2 for _ in range(_NUM_SPLITS)]).double()
        members = [torch.ones(1, groups), 1 - torch.eye(groups), half, 1 - half]
        sizes = torch.bincount(torch.arange(count) % groups)
        return cls(sizes.double(), torch.cat([part.double() for part in members]))

    @property
    def num_groups(self) -> int:
        return len(self.sizes)

    def log_std(self, samples: Tensor) -> Tensor:
        """Log standard deviation of each subset, at least MIN_STD_FRACTION of that of all: (B, C, L) → (sets, C, L)."""
        group = torch.arange(len(samples)) % self.num_groups
        centered = samples - samples.mean(0)
        zeros = samples.new_zeros(self.num_groups, *samples.shape[1:])
        total, squares = zeros.index_add(0, group, centered), zeros.index_add(0, group, centered.square())
        count = (self.members @ self.sizes)[:, None, None]
        mean_square = torch.tensordot(self.members, total, 1).square_().div_(count.clamp_min(1))
        inner = torch.tensordot(self.members, squares, 1).sub_(mean_square).div_((count - 1).clamp_min(1))
        logs = inner.clamp_min_(torch.finfo(torch.float64).tiny).log_().mul_(0.5)
        return torch.maximum(logs, logs[:1] + math.log(MIN_STD_FRACTION))

    def halves(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        one, other = sums[1 + self.num_groups :].chunk(2)
        return one, other

    def jackknife_error(self, values: Tensor, *, num_statements: int = 1) -> float:
        """Half width of a 95 % interval of a statistic, from its values on every subset (sets,).

        Student's t with G − 1 degrees of freedom, with a Bonferroni correction for several statements.
        """
        from scipy.special import stdtrit

        if self.num_groups < 4:
            return math.inf
        without = values[1 : 1 + self.num_groups]
        student = float(stdtrit(self.num_groups - 1, 1 - 0.025 / num_statements))
        factor = (self.num_groups - 1) / self.num_groups
        return student * float((factor * (without - without.mean()).square().sum()).sqrt())


@dataclass(frozen=True, eq=False)
class LogStdSums(MetricState):
    """Sums over inputs, for each output, of the log standard deviations of one kind of replicates, and of products."""

    subsets: ReplicateSubsets
    count: Tensor  # (C,)
    total: Tensor  # of every subset: (sets, C)
    squares: Tensor  # every subset with itself
    cross: Tensor  # every subset with all replicates of the other kind
    halves: Tensor  # one half with the other: (splits, C)

    @classmethod
    def from_logs(cls, logs: Tensor, other: Tensor, subsets: ReplicateSubsets, counted: Tensor) -> "LogStdSums":
        """Sums of logs (sets, C, L) where `counted` (C, L) is true, given those of the other kind."""
        logs, other = logs.where(counted, 0.0), other.where(counted, 0.0)
        return cls(
            subsets=subsets,
            count=counted.sum(1).double(),
            total=logs.sum(2),
            squares=torch.einsum("rcl,rcl->rc", logs, logs),
            cross=torch.einsum("rcl,cl->rc", logs, other[0]),
            halves=torch.einsum("rcl,rcl->rc", *subsets.halves(logs)),
        )

    def covariance(self, products: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Covariance over inputs within each output, pooled over outputs, from sums: (…, C) → (…)."""
        pooled = (products - a * b / self.count.clamp_min(1)).sum(-1)
        return pooled / (self.count - 1).clamp_min(0).sum()

    def corrected_variance(self) -> float:
        """var₀, from the covariances of halves."""
        return float(self.covariance(self.halves, *self.subsets.halves(self.total)).mean())


@dataclass(frozen=True)
class StdRatio:
    """Standard deviation of the predictor's over that of the bootstrap replicates, with its 95 % interval; 1 is right.

    Attributes:
        value: Geometric mean over inputs; NaN where the predictor's replicates are constant.
        low: Lower end of the interval.
        high: Upper end.
        bootstrap_fraction: Fraction of the interval's squared width that is due to the bootstrap replicates.
    """

    value: float
    low: float
    high: float
    bootstrap_fraction: float

    @classmethod
    def from_sums(cls, t: LogStdSums, s: LogStdSums, *, bias: float, output: int | None = None) -> "StdRatio":
        """Of one output or of all, given the expected log ratio of equal distributions."""
        outputs = slice(None) if output is None else slice(output, output + 1)
        num_statements = 1 if output is None else len(t.count)
        count = t.count[outputs].sum()
        t_mean, s_mean = (sums.total[:, outputs].sum(1) / count for sums in (t, s))  # (sets,)
        log_ratio = float(s_mean[0] - t_mean[0]) - bias
        t_error = t.subsets.jackknife_error(t_mean, num_statements=num_statements)
        s_error = s.subsets.jackknife_error(s_mean, num_statements=num_statements)
        both = math.hypot(t_error, s_error)
        fraction = 0.0 if math.isinf(s_error) else (t_error / both) ** 2 if both > 0 else 1.0
        high = math.inf if log_ratio + both > 700 else math.exp(log_ratio + both)
        return cls(math.exp(log_ratio), math.exp(log_ratio - both), high, fraction)


@dataclass(frozen=True)
class StdAgreement:
    """Agreement of the two standard deviations over inputs.

    Attributes:
        factor: Typical factor between them, exp √(var₀ log(s/t)), after a common factor is removed.
        factor_low: Lower end of its interval.
        factor_high: Upper end.
        raw_correlation: Correlation of log standard deviations.
        reliability: var₀ log t / var log t.
        correlation: Correlation corrected for few replicates; None: see `reason`.
        error: Half width of its 95 % interval.
        reason: Why there is no correlation.
    """

    factor: float = 1.0
    factor_low: float = 1.0
    factor_high: float = 1.0
    raw_correlation: float | None = None
    reliability: float | None = None
    correlation: float | None = None
    error: float | None = None
    reason: str = ""

    @classmethod
    def from_sums(cls, t_sums: LogStdSums, s_sums: LogStdSums) -> "StdAgreement":
        """From the sums over inputs."""
        if (t_sums.count - 1).clamp_min(0).sum() == 0:
            return cls(reason="there is one input")
        if min(t_sums.subsets.num_groups, s_sums.subsets.num_groups) < 4:
            return cls(factor_high=math.inf, reason="fewer than 4 replicates")
        t, s = t_sums.corrected_variance(), s_sums.corrected_variance()
        t_raw, s_raw = (sums.covariance(sums.squares, sums.total, sums.total) for sums in (t_sums, s_sums))  # (sets,)
        t_cross = t_sums.covariance(t_sums.cross, t_sums.total, s_sums.total[0])
        s_cross = s_sums.covariance(s_sums.cross, s_sums.total, t_sums.total[0])
        t_error, s_error = t_sums.subsets.jackknife_error, s_sums.subsets.jackknife_error
        both = float(t_cross[0])
        variance = t + s - 2 * both  # var₀ log(s/t)
        variance_error = math.hypot(t_error(t_raw - 2 * t_cross), s_error(s_raw - 2 * s_cross))
        scale = float(t_raw[0] * s_raw[0])
        ends = (variance, variance - variance_error, variance + variance_error)
        factor, low, high = (math.exp(math.sqrt(max(0.0, v))) for v in ends)
        known = cls(
            factor=factor,
            factor_low=low,
            factor_high=high,
            raw_correlation=both / math.sqrt(scale) if scale > 0 else None,
            reliability=min(1.0, max(0.0, t / float(t_raw[0]))) if t_raw[0] > 0 else None,
        )
        if t < math.log(STD_RATIO_TOLERANCE) ** 2:  # a constant standard deviation would be acceptable
            return replace(known, reason="the bootstrap's standard deviation hardly differs between inputs")
        # A standard deviation that varies less than a tenth as much is constant.
        scale = math.sqrt(t * max(s, 0.01 * t))
        error = math.hypot(t_error(t_cross), s_error(s_cross)) / scale
        if error > MAX_CORRELATION_ERROR:
            return replace(known, reason="too few replicates for a correlation")
        return replace(known, correlation=max(-1.0, min(1.0, both / scale)), error=error)


# -- shapes --------------------------------------------------------------------------------------------


def ks_and_wasserstein(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Kolmogorov–Smirnov and Wasserstein-1 distance of each pair of columns: (K, M), (B, M) → (M,), (M,).

    >>> ks, w1 = ks_and_wasserstein(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [3.0]]))
    >>> ks.tolist(), w1.tolist()
    ([0.5], [1.0])
    """
    values, order = torch.cat([a, b]).sort(0)  # (K + B, M)
    step = torch.cat([a.new_full((len(a),), 1 / len(a)), a.new_full((len(b),), -1 / len(b))])
    gap = step[order].cumsum(0)[:-1].abs()
    length = values.diff(dim=0)
    ks = gap.where(length > 0, 0.0).amax(0)  # among equal values the step is incomplete
    return ks, (gap * length).sum(0)


def standardize(samples: Tensor) -> Tensor:
    """Subtract the mean and divide by the standard deviation (1/B Σ); zeros where it is 0: (B, M)."""
    centered = samples - samples.mean(0)
    std = centered.square().mean(0).sqrt()
    return centered / std.where(std > 0, 1.0)


@dataclass(frozen=True)
class PermutationNull:
    """Expected statistics of K and B replicates of one distribution, and limits that they hardly ever exceed."""

    ks: float
    wasserstein: float
    wasserstein_limit: float
    shifted_limit: float  # of the fraction of locations whose means differ
    log_ratio: float  # of the standard deviation of B to that of K

    @classmethod
    def permute(cls, t: Tensor, s: Tensor, *, max_shift: float, seed: int) -> "PermutationNull":
        """From random divisions of replicates (K, M) and (B, M) at M locations.

        Means more than `max_shift` standard deviations apart differ.
        """
        pool = torch.cat([standardize(t), standardize(s)])  # (K + B, M)
        rng = torch.Generator().manual_seed(derive_seed(seed, "divisions", len(pool)))
        chosen = torch.rand(_NUM_RATIO_DIVISIONS, len(pool), generator=rng).topk(len(t), 1, sorted=False).indices
        first = torch.zeros(_NUM_RATIO_DIVISIONS, len(pool), dtype=torch.bool).scatter_(1, chosen, True)
        distances = [
            torch.stack(ks_and_wasserstein(standardize(pool[part]), standardize(pool[~part])))
            for part in first[:_NUM_DISTANCE_DIVISIONS]
        ]
        ks, wasserstein = torch.stack(distances).mean(2).unbind(1)  # means over locations: (divisions,)
        (mean, std), (other_mean, other_std) = _moments(first, pool), _moments(~first, pool)  # (divisions, M)
        shifted = ((mean - other_mean).abs() > max_shift * std).double().mean(1)  # (divisions,)
        limits = [values.mean() + _LIMIT_SIGMAS * values.std() for values in (wasserstein, shifted)]
        log_ratio = (other_std / std).log()
        return cls(*(float(value) for value in (ks.mean(), wasserstein.mean(), *limits, log_ratio.mean())))


def _moments(part: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, and standard deviation, at least MIN_STD_FRACTION, of each part of the pool: (divisions, M)."""
    weight = part.double()
    count = weight.sum(1, keepdim=True)
    mean = weight @ pool / count
    inner = weight @ pool.square() - count * mean.square()
    return mean, (inner / (count - 1).clamp_min(1)).clamp_min(MIN_STD_FRACTION**2).sqrt()
