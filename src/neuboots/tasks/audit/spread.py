"""The spread of generated replicates beside that of true ones, over inputs.

    s(x), t(x): standard deviation at x over generated and over true replicates
    ratio = exp mean log(s/t),   spread of the ratio = exp √(var₀ log(s/t)),
    correlation = cov(log s, log t) / √(var₀ log s · var₀ log t),   over inputs

K true replicates are few, and the figures say what K can tell. log t of few replicates is too small on average, which
is put back (see chance.py). Its error is common to all inputs, since all see the same K nets; intervals are therefore a
jackknife over replicates, not over inputs. That error also thins out a correlation over inputs. The variance var₀ that
is free of it is the covariance between the log standard deviations of two halves of the replicates, whose errors are
independent, averaged over random halves; this holds whatever the distribution of the replicates.

Spearman, The proof and measurement of association between two things, American Journal of Psychology 1904 (correlation
of what is measured with error); Efron and Stein, The jackknife estimate of variance, Annals of Statistics 1981.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neuboots.keys import seed_named
from neuboots.metrics.tally import Tally

RIGHT_SIZE = 1.25  # a band that is wider or narrower by less is as good as right: 95 % becomes 88 % to 99 %
FLAT = 0.01  # less than a hundredth of the true spread is no spread
CLOSE = 0.5  # the most that the interval of a correlation may reach to either side

_SPLITS = 32  # random halves
_GROUPS = 20  # of replicates left out together, where there are more than _SPLITS of them
NUM_SETS = 1 + _SPLITS + 2 * _SPLITS  # at most


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
        mean_square = torch.tensordot(self.rows, total, 1).square_().div_(count.clamp_min(1))
        inner = torch.tensordot(self.rows, squares, 1).sub_(mean_square).div_((count - 1).clamp_min(1))
        logs = inner.clamp_min_(torch.finfo(torch.float64).tiny).log_().mul_(0.5)
        return torch.maximum(logs, logs[:1] + math.log(FLAT))

    def without_one(self, sums: Tensor) -> Tensor:
        return sums[1 : 1 + self.groups]

    def halves(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        one, other = sums[1 + self.groups :].chunk(2)
        return one, other

    def error(self, figures: Tensor, *, statements: int = 1) -> Tensor:
        """Half the length of a 95 % interval, from a figure's values without each group (jackknife): (*,) of (G, *).

        Student's t with G − 1 degrees of freedom; of several statements, all hold together (Bonferroni).
        """
        from scipy.special import stdtrit

        if self.groups < 4:
            return torch.full_like(figures[0], math.inf)
        student = float(stdtrit(self.groups - 1, 1 - 0.025 / statements))
        share = (self.groups - 1) / self.groups
        return student * (share * (figures - figures.mean(0)).square().sum(0)).sqrt()


@dataclass(frozen=True, eq=False)
class Sums(Tally):
    """Sums over inputs, for each output, of log standard deviations and their products; t: true, s: generated."""

    count: Tensor  # (C,)
    t: Tensor  # of every set: (sets, C)
    s: Tensor
    t_s: Tensor  # every set of one with all of the other: (sets, C)
    s_t: Tensor
    t_t: Tensor  # every set with itself
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
            t_t=torch.einsum("rcl,rcl->rc", t, t),
            s_s=torch.einsum("rcl,rcl->rc", s, s),
            t_halves=halves[0],
            s_halves=halves[1],
        )

    def covariance(self, products: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Over inputs within each output, pooled over outputs: (…) of sums (…, C)."""
        pooled = (products - a * b / self.count.clamp_min(1)).sum(-1)
        return pooled / (self.count - 1).clamp_min(0).sum()


@dataclass(frozen=True)
class Ratio:
    """Generated over true standard deviation, a geometric mean over inputs, and its interval; 1 is right."""

    value: float
    low: float
    high: float
    true_share: float  # of the squared length of the interval: what the few true replicates are to blame for

    @classmethod
    def over_all(cls, sums: Sums, true: Sets, generated: Sets, *, chance: float) -> "Ratio | None":
        """Over all inputs and outputs, at 95 %; None where nothing has spread."""
        total = sums.count.sum()
        if total == 0:
            return None
        return cls._of(sums.t.sum(1) / total, sums.s.sum(1) / total, true, generated, chance, 1)

    @classmethod
    def by_output(cls, sums: Sums, true: Sets, generated: Sets, *, chance: float) -> "tuple[Ratio | None, ...]":
        """One for each output; all intervals hold together at 95 %."""
        return tuple(
            cls._of(sums.t[:, c] / count, sums.s[:, c] / count, true, generated, chance, len(sums.count))
            if count > 0
            else None
            for c, count in enumerate(sums.count)
        )

    @classmethod
    def _of(cls, t: Tensor, s: Tensor, true: Sets, generated: Sets, chance: float, statements: int) -> "Ratio":
        """Of the mean log standard deviation of each set: (sets,)."""
        log_ratio = float(s[0] - t[0]) - chance
        theirs = float(true.error(true.without_one(t), statements=statements))
        mine = float(generated.error(generated.without_one(s), statements=statements))
        both = math.hypot(theirs, mine)
        share = 0.0 if math.isinf(mine) else (theirs / both) ** 2 if both > 0 else 1.0
        return cls(math.exp(log_ratio), math.exp(log_ratio - both), _exp(log_ratio + both), share)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


@dataclass(frozen=True)
class Place:
    """How generated and true standard deviations go together over inputs."""

    spread: float = 1.0
    spread_low: float = 1.0  # its interval
    spread_high: float = 1.0
    raw: float | None = None
    reliability: float | None = None
    correlation: float | None = None
    error: float | None = None
    reason: str = ""  # why there is no correlation

    @classmethod
    def of(cls, sums: Sums, true: Sets, generated: Sets) -> "Place":
        if (sums.count - 1).clamp_min(0).sum() == 0:
            return cls(reason="there is one input")
        if min(true.groups, generated.groups) < 4:
            return cls(spread_high=math.inf, reason="fewer than 4 replicates do not tell where spread is large")
        both = float(sums.covariance(sums.t_s[0], sums.t[0], sums.s[0]))
        t_raw, s_raw = sums.covariance(sums.t_t, sums.t, sums.t), sums.covariance(sums.s_s, sums.s, sums.s)  # (sets,)
        t = float(sums.covariance(sums.t_halves, *true.halves(sums.t)).mean())
        s = float(sums.covariance(sums.s_halves, *generated.halves(sums.s)).mean())
        without_t = sums.covariance(true.without_one(sums.t_s), true.without_one(sums.t), sums.s[0])
        without_s = sums.covariance(generated.without_one(sums.s_t), generated.without_one(sums.s), sums.t[0])
        off = t + s - 2 * both  # var₀ log(s/t)
        off_error = math.hypot(
            float(true.error(true.without_one(t_raw) - 2 * without_t)),
            float(generated.error(generated.without_one(s_raw) - 2 * without_s)),
        )
        scale = float(t_raw[0] * s_raw[0])
        spread, low, high = (math.exp(math.sqrt(max(0.0, v))) for v in (off, off - off_error, off + off_error))
        known = cls(
            spread=spread,
            spread_low=low,
            spread_high=high,
            raw=both / math.sqrt(scale) if scale > 0 else None,
            reliability=min(1.0, max(0.0, t / float(t_raw[0]))) if t_raw[0] > 0 else None,
        )
        if t < math.log(RIGHT_SIZE) ** 2:  # one width for all inputs would be as good as right
            return replace(known, reason="true spread hardly differs between these inputs")
        scale = math.sqrt(t * max(s, 0.01 * t))  # a width that varies less than a tenth as much follows nothing
        error = math.hypot(float(true.error(without_t)), float(generated.error(without_s))) / scale
        if error > CLOSE:
            return replace(known, reason="these replicates are too few for a correlation")
        return replace(known, correlation=max(-1.0, min(1.0, both / scale)), error=error)
