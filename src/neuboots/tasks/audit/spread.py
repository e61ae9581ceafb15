"""The spread of generated replicates beside that of true ones, over inputs.

    s(x), t(x): standard deviation at x over generated and over true replicates
    ratio = exp mean log(s/t),   correlation = cov(log s, log t) / √(var₀ log s · var₀ log t),   over inputs

K true replicates are few, and the figures say what K can tell. log t is too small by ½(log(ν/2) − ψ(ν/2)), ν = K − 1,
for Gaussian replicates, which is put back. Its error is common to all inputs, since all see the same K nets; the
interval of the ratio is therefore a jackknife over replicates, not over inputs. That error also thins out a correlation
over inputs. The variance var₀ that is free of it is the covariance between the log standard deviations of two halves of
the replicates, whose errors are independent, averaged over random halves; this holds whatever the distribution of the
replicates.

Spearman, The proof and measurement of association between two things, American Journal of Psychology 1904 (correlation
of what is measured with error); Efron and Stein, The jackknife estimate of variance, Annals of Statistics 1981.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neuboots.keys import seed_named
from neuboots.metrics.tally import Tally

FLAT = 0.01  # less than a hundredth of the true spread is no spread
RELIABLE = 0.3  # the least share of var log t that must be more than sampling error for a correlation to be judged
VARIES = math.log(1.1)  # and the least standard deviation of log t over inputs: spread that differs by 10 %
CLOSE = 0.5  # and the most that the interval of the correlation may reach to either side

_SPLITS = 32  # random halves
_GROUPS = 20  # of replicates left out together, where there are more than _SPLITS of them


@dataclass(frozen=True, eq=False)
class Sets:
    """Sets of replicates whose standard deviations are taken: all, all but one group, one half and the other."""

    sizes: Tensor  # replicates in each group: (G,)
    rows: Tensor  # which groups a set holds, 0 or 1: (1 + G + 2·splits, G)

    @classmethod
    def of(cls, count: int, *, seed: int) -> "Sets":
        groups = count if count <= _SPLITS else _GROUPS
        rng = torch.Generator().manual_seed(seed_named(seed, "halves", groups))
        half = torch.stack([torch.randperm(groups, generator=rng) < groups // 2 for _ in range(_SPLITS)]).double()
        rows = [torch.ones(1, groups), 1 - torch.eye(groups), half, 1 - half]
        sizes = torch.bincount(torch.arange(count) % groups)
        return cls(sizes.double(), torch.cat([part.double() for part in rows]))

    @property
    def groups(self) -> int:
        return len(self.sizes)

    def log_std(self, samples: Tensor) -> Tensor:
        """log standard deviation of each set, at least FLAT times that of all: (sets, C, L) of samples (B, C, L)."""
        group = torch.arange(len(samples)) % self.groups
        centred = samples - samples.mean(0)
        zeros = samples.new_zeros(self.groups, *samples.shape[1:])
        total, squares = zeros.index_add(0, group, centred), zeros.index_add(0, group, centred.square())
        count = (self.rows @ self.sizes)[:, None, None]
        inner = torch.tensordot(self.rows, squares, 1) - torch.tensordot(
            self.rows, total, 1
        ).square() / count.clamp_min(1)
        logs = 0.5 * (inner / (count - 1).clamp_min(1)).clamp_min(torch.finfo(torch.float64).tiny).log()
        return torch.maximum(logs, logs[:1] + math.log(FLAT))

    def without_one(self, sums: Tensor) -> Tensor:
        return sums[1 : 1 + self.groups]

    def halves(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        one, other = sums[1 + self.groups :].chunk(2)
        return one, other

    def error(self, figures: Tensor) -> float:
        """Half the length of a 95 % interval of a figure, from its values without each group (jackknife).

        2 √((G − 1)/(G − 3)) standard errors: that root is the standard deviation of Student's t with G − 1 degrees of
        freedom.
        """
        if self.groups < 4:
            return math.inf
        share = (self.groups - 1) / self.groups
        student = 2 * math.sqrt((self.groups - 1) / (self.groups - 3))
        return student * math.sqrt(share * float((figures - figures.mean()).square().sum()))


@dataclass(frozen=True, eq=False)
class Sums(Tally):
    """Sums over inputs, for each output, of log standard deviations and their products; t: true, s: generated."""

    count: Tensor  # (C,)
    t: Tensor  # of every set: (sets, C)
    s: Tensor
    t_s: Tensor  # every set of one with all of the other: (sets, C)
    s_t: Tensor
    t_t: Tensor  # (C,)
    s_s: Tensor
    t_halves: Tensor  # one half with the other: (splits, C)
    s_halves: Tensor

    @classmethod
    def of(cls, t: Tensor, s: Tensor, true: Sets, generated: Sets, counted: Tensor) -> "Sums":
        """Of logs (sets, C, L) where `counted` (C, L) is true."""
        t, s = t.where(counted, 0.0), s.where(counted, 0.0)
        halves = [torch.einsum("rcl,rcl->rc", *sets.halves(logs)) for sets, logs in ((true, t), (generated, s))]
        return cls(
            count=counted.sum(1).double(),
            t=t.sum(2),
            s=s.sum(2),
            t_s=torch.einsum("rcl,cl->rc", t, s[0]),
            s_t=torch.einsum("rcl,cl->rc", s, t[0]),
            t_t=t[0].square().sum(1),
            s_s=s[0].square().sum(1),
            t_halves=halves[0],
            s_halves=halves[1],
        )

    def covariance(self, products: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Over inputs within each output, pooled over outputs: (…) of sums (…, C)."""
        pooled = (products - a * b / self.count.clamp_min(1)).sum(-1)
        return pooled / (self.count - 1).clamp_min(0).sum()


def ratio_of(sums: Sums, true: Sets, generated: Sets, num_true: int, num_samples: int) -> tuple[float, float, float]:
    """exp of the mean log ratio, with the ends of its interval; zeros where nothing has spread."""
    total = sums.count.sum()
    if total == 0:
        return 0.0, 0.0, 0.0
    t, s = sums.t.sum(1) / total, sums.s.sum(1) / total  # mean log standard deviation of each set: (sets,)
    log_ratio = float(s[0] - t[0]) + _bias(num_samples) - _bias(num_true)
    error = math.hypot(true.error(true.without_one(t)), generated.error(generated.without_one(s)))
    return math.exp(log_ratio), math.exp(log_ratio - error), math.exp(log_ratio + error)


def _bias(count: int) -> float:
    """log σ − E log s of `count` Gaussian numbers: ½ (log(ν/2) − ψ(ν/2)), ν = count − 1."""
    half = torch.tensor(max(1, count - 1) / 2, dtype=torch.float64)
    return 0.5 * float(half.log() - torch.digamma(half))


@dataclass(frozen=True)
class Place:
    """How generated and true standard deviations go together over inputs."""

    spread: float = 1.0
    raw: float | None = None
    reliability: float | None = None
    correlation: float | None = None
    error: float | None = None

    @classmethod
    def of(cls, sums: Sums, true: Sets, generated: Sets) -> "Place":
        if (sums.count - 1).clamp_min(0).sum() == 0 or min(true.groups, generated.groups) < 4:
            return cls()  # one input, or too few replicates for halves
        both = float(sums.covariance(sums.t_s[0], sums.t[0], sums.s[0]))
        t_raw = float(sums.covariance(sums.t_t, sums.t[0], sums.t[0]))
        s_raw = float(sums.covariance(sums.s_s, sums.s[0], sums.s[0]))
        t = float(sums.covariance(sums.t_halves, *true.halves(sums.t)).mean())
        s = float(sums.covariance(sums.s_halves, *generated.halves(sums.s)).mean())
        known = cls(
            spread=math.exp(math.sqrt(max(0.0, t + s - 2 * both))),
            raw=both / math.sqrt(t_raw * s_raw) if min(t_raw, s_raw) > 0 else None,
            reliability=min(1.0, max(0.0, t / t_raw)) if t_raw > 0 else None,
        )
        if t < RELIABLE * t_raw or t < VARIES**2:
            return known
        scale = math.sqrt(t * max(s, 0.01 * t))  # a width that varies less than a tenth as much follows nothing
        without_t = sums.covariance(true.without_one(sums.t_s), true.without_one(sums.t), sums.s[0])
        without_s = sums.covariance(generated.without_one(sums.s_t), generated.without_one(sums.s), sums.t[0])
        error = math.hypot(true.error(without_t), generated.error(without_s)) / scale
        if error > CLOSE:
            return known
        return replace(known, correlation=max(-1.0, min(1.0, both / scale)), error=error)
