"""Audit: how close are generated replicates to the real bootstrap on this data?

A handful of nets is trained on re-weighted data, which is what a bootstrap is, and compared with a predictor at the
same inputs: the size of the spread, where it is large, its shape and its centre; and a verdict in a sentence.

Two distances between the shapes of two distributions of replicates at one input.

    KS = sup |F_a − F_b|,   W₁ = ∫ |F_a − F_b|

The distances of Kolmogorov and Smirnov, and of Wasserstein, between replicates less their mean, over their standard
deviation. Wasserstein's decides: it changes little where replicates are moved a little, but the other one jumps where
they have few values.

The spread of generated replicates beside that of true ones, over inputs.

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

What chance alone shows where true and generated replicates have one distribution, whatever that is.

    pool = standardised true ∪ standardised generated replicates;   K of them at random against the other B

Replicates are often skewed or have heavy tails, and K of them then differ from B of them in ways that a Gaussian does
not know. So both are thrown together at a sample of places, and divided anew at random many times: the distances and
the ratio of standard deviations between the parts are what chance shows. One division serves all places, since K nets
are the same at all inputs.

Fisher, The design of experiments, 1935 (division at random of what is compared).

What an audit found, and what it means: a verdict with its numbers, by thresholds that are stated.

Generated replicates beside true ones at the same inputs.

For classes the logits are compared, less their mean over classes: softmax does not see a shift of all of them, and
probabilities near 0 and 1 have no spread to compare. True replicates differ in their random first weights and order of
rows as well as in their bootstrap weights, as bootstrapped nets do. To compare the weights alone, give all of them one
start: `model=lambda: copy.deepcopy(net)`.

Newton and Raftery, Approximate Bayesian inference with the weighted likelihood bootstrap, JRSS B 1994 (true
replicates).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._prng import derive_keys, derive_seed, draw_uniform
from neuboots.evaluation._batching import check_predictor, format_table, iter_batches, iter_inputs, num_rows, take_rows
from neuboots.loading import check_length, preserve_rng_state
from neuboots.metrics._base import MetricState
from neuboots.prediction import Method, Predictor
from neuboots.training import TrainingConfig


def ks_and_wasserstein(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """sup |F_a − F_b| (Kolmogorov–Smirnov) and ∫ |F_a − F_b| (Wasserstein-1) of each column of (K, M), (B, M): (M,).

    >>> ks, w1 = ks_and_wasserstein(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [3.0]]))
    >>> ks.tolist(), w1.tolist()
    ([0.5], [1.0])
    """
    values, order = torch.cat([a, b]).sort(0)  # (K + B, M)
    step = torch.cat([a.new_full((len(a),), 1 / len(a)), a.new_full((len(b),), -1 / len(b))])
    gap = step[order].cumsum(0)[:-1].abs()
    length = values.diff(dim=0)
    ks = gap.where(length > 0, 0.0).amax(0)  # between equal values the step is not finished
    return ks, (gap * length).sum(0)


def standardize(samples: Tensor) -> Tensor:
    """Less the mean, over the standard deviation (1/B Σ): (B, M); zeros where there is none."""
    centred = samples - samples.mean(0)
    std = centred.square().mean(0).sqrt()
    return centred / std.where(std > 0, 1.0)


def shape_distances(true: Tensor, generated: Tensor) -> tuple[Tensor, Tensor]:
    """The distances between standardised replicates, (K, M) and (B, M): (M,) each."""
    return ks_and_wasserstein(standardize(true), standardize(generated))


STD_RATIO_TOLERANCE = 1.25  # a band that is wider or narrower by less is as good as right: 95 % becomes 88 % to 99 %
MIN_STD_FRACTION = 0.01  # less than a hundredth of the true spread is no spread
MAX_CORRELATION_ERROR = 0.5  # the most that the interval of a correlation may reach to either side

_SPLITS = 32  # random halves
_GROUPS = 20  # of replicates left out together, where there are more than _SPLITS of them
MAX_SUBSETS = 1 + _SPLITS + 2 * _SPLITS  # at most


@dataclass(frozen=True, eq=False)
class ReplicateSubsets:
    """Sets of replicates whose standard deviations are taken: all, all but one group, one half and the other."""

    sizes: Tensor  # replicates in each group: (G,)
    rows: Tensor  # which groups a set holds, 0 or 1: (1 + G + 2·splits, G)

    @classmethod
    def of(cls, count: int, *, seed: int) -> "ReplicateSubsets":
        groups = count if count <= _SPLITS else _GROUPS
        rng = torch.Generator().manual_seed(derive_seed(seed, "halves", groups))
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
        return torch.maximum(logs, logs[:1] + math.log(MIN_STD_FRACTION))

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
class LogStdSums(MetricState):
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
    def of(
        cls, t: Tensor, s: Tensor, true: ReplicateSubsets, generated: ReplicateSubsets, counted: Tensor
    ) -> "LogStdSums":
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
class StdRatio:
    """Generated over true standard deviation, a geometric mean over inputs, and its interval; 1 is right."""

    value: float
    low: float
    high: float
    true_share: float  # of the squared length of the interval: what the few true replicates are to blame for

    @classmethod
    def over_all(
        cls, sums: LogStdSums, true: ReplicateSubsets, generated: ReplicateSubsets, *, chance: float
    ) -> "StdRatio | None":
        """Over all inputs and outputs, at 95 %; None where nothing has spread."""
        total = sums.count.sum()
        if total == 0:
            return None
        return cls._of(sums.t.sum(1) / total, sums.s.sum(1) / total, true, generated, chance, 1)

    @classmethod
    def by_output(
        cls, sums: LogStdSums, true: ReplicateSubsets, generated: ReplicateSubsets, *, chance: float
    ) -> "tuple[StdRatio | None, ...]":
        """One for each output; all intervals hold together at 95 %."""
        return tuple(
            cls._of(sums.t[:, c] / count, sums.s[:, c] / count, true, generated, chance, len(sums.count))
            if count > 0
            else None
            for c, count in enumerate(sums.count)
        )

    @classmethod
    def _of(
        cls, t: Tensor, s: Tensor, true: ReplicateSubsets, generated: ReplicateSubsets, chance: float, statements: int
    ) -> "StdRatio":
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
class StdAgreement:
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
    def of(cls, sums: LogStdSums, true: ReplicateSubsets, generated: ReplicateSubsets) -> "StdAgreement":
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
        if t < math.log(STD_RATIO_TOLERANCE) ** 2:  # one width for all inputs would be as good as right
            return replace(known, reason="true spread hardly differs between these inputs")
        scale = math.sqrt(t * max(s, 0.01 * t))  # a width that varies less than a tenth as much follows nothing
        error = math.hypot(float(true.error(without_t)), float(generated.error(without_s))) / scale
        if error > MAX_CORRELATION_ERROR:
            return replace(known, reason="these replicates are too few for a correlation")
        return replace(known, correlation=max(-1.0, min(1.0, both / scale)), error=error)


_PLACES = 20  # at which replicates are kept
_DISTANCES = 32  # divisions whose distances are taken
_RATIOS = 400  # divisions whose standard deviations are taken, which costs little
_RARE = 3.5  # standard deviations above the mean


@dataclass(frozen=True, eq=False)
class SampledLocations:
    """Replicates at a random sample of places: those with the lowest numbers drawn, however places are cut in parts."""

    drawn: Tensor  # (M,)
    true: Tensor  # (K, M)
    generated: Tensor  # (B, M)

    @classmethod
    def of(cls, true: Tensor, generated: Tensor, counted: Tensor, *, start: int, seed: int) -> "SampledLocations":
        """Of replicates (K, C, L) and (B, C, L) at the places `start` … `start` + L − 1, where `counted` (C, L)."""
        outputs, places = counted.shape
        number = torch.arange(outputs)[:, None] + outputs * torch.arange(start, start + places)  # (C, L)
        drawn = draw_uniform(derive_keys(torch.tensor(0), seed, "places"), number).where(counted, math.inf).flatten()
        return cls(drawn, true.flatten(1), generated.flatten(1))._least()

    def _least(self) -> "SampledLocations":
        drawn, order = self.drawn.sort()
        best = order[:_PLACES][torch.isfinite(drawn[:_PLACES])]
        return SampledLocations(self.drawn[best], self.true[:, best], self.generated[:, best])

    def __add__(self, other: "SampledLocations") -> "SampledLocations":
        pairs = zip((self.drawn, self.true, self.generated), (other.drawn, other.true, other.generated), strict=True)
        return SampledLocations(*(torch.cat(pair, -1) for pair in pairs))._least()


@dataclass(frozen=True)
class PermutationNull:
    """Between K and B replicates of one distribution."""

    ks: float  # the mean over places, expected
    wasserstein: float
    wasserstein_limit: float  # and what it hardly ever exceeds
    away_limit: float  # share of places whose centres are far apart: what it hardly ever exceeds
    log_ratio: float  # of the standard deviation of B to that of K, expected

    @classmethod
    def of(cls, kept: SampledLocations, *, away: float, seed: int) -> "PermutationNull":
        """Of what is kept, at one place at least; centres more than `away` standard deviations apart are far apart."""
        num_true = len(kept.true)
        pool = torch.cat([standardize(kept.true), standardize(kept.generated)])  # (K + B, M)
        rng = torch.Generator().manual_seed(derive_seed(seed, "divisions", len(pool)))
        chosen = torch.rand(_RATIOS, len(pool), generator=rng).topk(num_true, 1, sorted=False).indices
        first = torch.zeros(_RATIOS, len(pool), dtype=torch.bool).scatter_(1, chosen, True)  # (divisions, K + B)
        found = [torch.stack(shape_distances(pool[part], pool[~part])) for part in first[:_DISTANCES]]
        ks, wasserstein = torch.stack(found).mean(2).unbind(1)  # means over places: (divisions,)
        (mean, std), (others, others_std) = _moments(first, pool), _moments(~first, pool)  # (divisions, M)
        apart = ((mean - others).abs() > away * std).double().mean(1)  # (divisions,)
        limits = [figure.mean() + _RARE * figure.std() for figure in (wasserstein, apart)]
        log_ratio = (others_std / std).log()
        return cls(*(float(figure) for figure in (ks.mean(), wasserstein.mean(), *limits, log_ratio.mean())))


def _moments(part: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, and standard deviation, at least FLAT, of each part of the pool: (divisions, M)."""
    weight = part.double()
    count = weight.sum(1, keepdim=True)
    mean = weight @ pool / count
    inner = weight @ pool.square() - count * mean.square()
    return mean, (inner / (count - 1).clamp_min(1)).clamp_min(MIN_STD_FRACTION**2).sqrt()


AuditFinding = Literal["faithful", "flat", "narrow", "wide", "misplaced", "centre", "shape", "unknown"]

# What counts as faithful, beside STD_RATIO_TOLERANCE. A fault is found where a 95 % interval proves it; "faithful" needs
# intervals that are short enough to have found one.
MAX_FACTOR = 1.5  # the factor by which one output or a typical input may be off, and to which an interval may reach
MIN_CORRELATION = 0.5  # the least correlation; below, most of the differences between inputs are the predictor's own
MAX_SHIFT = (
    2.0  # standard deviations between the centres: a band of mean ± 2 standard deviations misses the other centre
)
MAX_FRACTION = 0.05  # the share of places at which something may be amiss
_SHOWN = 10  # outputs in the printed table


@dataclass(frozen=True, eq=False)
class BootstrapAudit:
    """What `compare_with_bootstrap` and `audit_bootstrap` found; `verdict` says it in a sentence, `print` shows all figures.

    Maps are (N, C, *), one value for each input, output and pixel, which is a place; other figures are over all places.
    """

    size: StdRatio | None  # of generated to true standard deviation; None: the predictor has no spread anywhere
    sizes: tuple[StdRatio | None, ...]  # the same for each output
    place: StdAgreement  # how they go together over inputs
    ks: float | None  # mean Kolmogorov–Smirnov distance, where there is spread
    ks_chance: float | None  # of replicates of one distribution
    wasserstein: float | None  # mean Wasserstein-1 distance of standardised replicates
    wasserstein_chance: float | None
    wasserstein_limit: float | None  # which replicates of one distribution hardly ever exceed
    shift: float  # median distance of the centres, in true standard deviations
    away: float  # share of places where it is more than AWAY
    away_limit: float  # which replicates of one distribution hardly ever exceed
    flat: float  # share of places where true replicates differ and generated ones do not
    far_out_true: tuple[int, ...]  # numbers of true replicates that make up most of the spread by themselves
    far_out: tuple[int, ...]  # and of generated ones
    std: Tensor  # maps
    true_std: Tensor
    ks_map: Tensor
    wasserstein_map: Tensor
    num_true: int  # K
    num_samples: int  # B, or the number of distinct generated replicates where that is smaller
    classes: bool
    seed: int

    @property
    def ratio(self) -> float:
        """Geometric mean of generated over true standard deviation; 1 is right, 0 no spread at all."""
        return 0.0 if self.size is None else self.size.value

    @property
    def correlation(self) -> float | None:
        """Over inputs, of log standard deviations, corrected for few replicates; None: see `place.reason`."""
        return self.place.correlation

    @property
    def faithful(self) -> bool:
        return self.finding == "faithful"

    @property
    def finding(self) -> AuditFinding:
        """The first fault that the figures prove; "unknown" where they could not have, "faithful" where none is."""
        return self._faults[0][0] if self._faults else "unknown" if self._doubts else "faithful"

    @property
    def _faults(self) -> list[tuple[AuditFinding, str]]:
        """All that is proven, with a sentence for each."""
        faults: list[tuple[AuditFinding, str]] = []
        if self.flat > MAX_FRACTION:
            faults.append(("flat", self._no_spread))
        faults += self._wrong_sizes
        if self._misplaced:
            faults.append(("misplaced", f"not where it should be ({self._where})"))
        if self.away > max(MAX_FRACTION, self.away_limit):
            away = f"around another centre at {_percent(self.away)} of the {self._places}, more than {MAX_SHIFT:g} standard"
            faults.append(("centre", f"{away} deviations away"))
        if self.wasserstein is not None and self.wasserstein_limit is not None:
            distance = f"Wasserstein distance {self.wasserstein:.2f}, by chance {self.wasserstein_chance:.2f}"
            if self.wasserstein > self.wasserstein_limit:
                faults.append(("shape", f"of another shape ({distance})"))
        return faults

    @property
    def _no_spread(self) -> str:
        if self.size is None:
            return f"no spread at all: {self.num_true} true replicates differ, the predictor's do not"
        without = [str(c) for c, ratio in enumerate(self.sizes) if ratio is None]
        which = f", nowhere in output {', '.join(without)}" if without else ""
        return f"no spread at {_percent(self.flat)} of the {self._places}{which}, where true replicates differ"

    @property
    def _wrong_sizes(self) -> list[tuple[AuditFinding, str]]:
        """Over all outputs, or else in the worst of them; the larger fault first."""
        found: list[tuple[float, AuditFinding, str]] = []
        kinds: tuple[AuditFinding, AuditFinding] = ("wide", "narrow")
        for kind in kinds:
            if self.size is not None and _wrong(self.size) == kind:
                found.append((abs(math.log(self.size.value)), kind, _too(kind, self.size)))
                continue
            bad = {c: ratio for c, ratio in enumerate(self.sizes) if ratio is not None and _wrong(ratio) == kind}
            if bad:
                worst = max(bad, key=lambda c: abs(math.log(bad[c].value)))
                more = f", the worst of {len(bad)} such outputs" if len(bad) > 1 else ""
                sentence = f"{_too(kind, bad[worst])} in output {worst}{more}"
                found.append((abs(math.log(bad[worst].value)), kind, sentence))
        return [(kind, sentence) for _, kind, sentence in sorted(found, reverse=True)]

    @property
    def _misplaced(self) -> bool:
        place = self.place
        follows = place.correlation is None or place.correlation + (place.error or 0.0) >= MIN_CORRELATION
        return place.spread_low > MAX_FACTOR or not follows

    @property
    def _doubts(self) -> list[str]:
        """What is neither proven wrong nor seen to be right."""
        place, doubts = self.place, []
        if not self._size_known:
            doubts.append("size")
        off = [
            c
            for c, ratio in enumerate(self.sizes)
            if ratio is not None and abs(math.log(ratio.value)) > math.log(MAX_FACTOR)
        ]
        if off and len(self.sizes) > 1:
            doubts.append(f"size of output {off[0]}")
        judged = place.spread_high <= MAX_FACTOR if place.correlation is None else place.correlation >= MIN_CORRELATION
        if not judged or place.spread > MAX_FACTOR:
            doubts.append("places")
        return doubts

    @property
    def _size_known(self) -> bool:
        """Right, and by an interval that is short enough to say so."""
        size = self.size
        return (
            size is not None
            and 1 / STD_RATIO_TOLERANCE <= size.value <= STD_RATIO_TOLERANCE
            and size.high / size.value <= MAX_FACTOR
        )

    @property
    def verdict(self) -> str:
        """One sentence with its numbers."""
        faults = [sentence for _, sentence in self._faults]
        if self.size is None:
            return faults[0]
        if faults:
            before = f"the right size on average ({_shown(self.size)}), but " if self._right_size else ""
            return before + "; and ".join(faults) + self._notes
        if self._doubts:
            return f"cannot tell ({_shown(self.size)}; {self._where}) {self._with}: {self._advice}{self._notes}"
        right = f"the right size ({_shown(self.size)}; {self._where})"
        if self.correlation is not None:
            right = f"the right size ({_shown(self.size)}) in the right places ({self._where})"
        return f"faithful: {right}, as far as one can tell {self._with}{self._notes}"

    @property
    def _right_size(self) -> bool:
        return self._size_known and self._faults[0][0] in ("misplaced", "centre", "shape")

    @property
    def _where(self) -> str:
        place = self.place
        parts = [] if place.correlation is None else [f"correlation {place.correlation:.2f}"]
        if place.spread_low > MAX_FACTOR or (place.correlation is None and 1 < place.spread_high < math.inf):
            parts.append(f"off by a factor {place.spread:.1f} at a typical input")
        return ", ".join([*parts, place.reason] if place.reason else parts)

    @property
    def _with(self) -> str:
        own = f" and {self.num_samples} of the predictor" if self.num_samples < 2 * self.num_true else ""
        return f"with {self.num_true} true replicates{own}"

    @property
    def _advice(self) -> str:
        """More of those replicates that the interval is long for."""
        assert self.size is not None, "otherwise a fault is found"
        if self.far_out_true or self.far_out:
            return "look at the training"
        if self.size.true_share >= 0.5:
            return f"train {max(20, 2 * self.num_true)} true replicates"
        return f"the predictor's own {self.num_samples} replicates are too few; give it more members or num_samples"

    @property
    def _notes(self) -> str:
        notes = [
            f"{who} {', '.join(map(str, numbers))} of seed {self.seed} lies far out and makes up most of the spread"
            for who, numbers in (("true replicate", self.far_out_true), ("the predictor's replicate", self.far_out))
            if numbers
        ]
        notes += [
            f"{what} at {_percent(share)} of the {self._places}"
            for what, share in (("no spread", self.flat), ("another centre", self.away))
            if 0.005 < share <= MAX_FRACTION
        ]
        return "".join(f"; {note}" for note in notes)

    @property
    def _places(self) -> str:
        return "inputs" if self.std.ndim == 2 and len(self.sizes) == 1 else "outputs at these inputs"

    def __str__(self) -> str:
        places = "inputs" if self.std.ndim == 2 else "inputs with pixels"
        what = "logits of classes, less their mean" if self.classes else "outputs"
        header = (
            f"{len(self.std):,} {places}, {what}; K = {self.num_true} true replicates, B = {self.num_samples} of the "
            f"predictor, seed {self.seed}"
        )
        low, high = (None, None) if self.size is None else (_finite(self.size.low), _finite(self.size.high))
        rows: list[dict[str, Any]] = [
            {"figure": "ratio of standard deviations", "value": self.ratio, "compare with": 1.0},
            {"figure": "  its interval, from", "value": low, "compare with": None},
            {"figure": "  to", "value": high, "compare with": None},
            {"figure": "  spread over inputs (factor)", "value": self.place.spread, "compare with": 1.0},
            {"figure": "correlation over inputs", "value": self.correlation, "compare with": 1.0},
            {"figure": "  not corrected", "value": self.place.raw, "compare with": None},
            {"figure": "  reliability of true spread", "value": self.place.reliability, "compare with": None},
            {"figure": "KS distance", "value": self.ks, "compare with": self.ks_chance},
            {"figure": "Wasserstein distance", "value": self.wasserstein, "compare with": self.wasserstein_chance},
            {"figure": "shift of the centre", "value": self.shift, "compare with": 0.0},
            {"figure": "  share of places far away", "value": self.away, "compare with": 0.0},
            {"figure": "share of places without spread", "value": self.flat, "compare with": 0.0},
        ]
        return f"{self.verdict}\n{header}\n{format_table(rows)}{self._by_output}"

    @property
    def _by_output(self) -> str:
        """The outputs whose ratios are farthest from 1."""
        if len(self.sizes) == 1:
            return ""
        far = [math.inf if ratio is None else abs(math.log(ratio.value)) for ratio in self.sizes]
        shown = sorted(sorted(range(len(far)), key=lambda c: -far[c])[:_SHOWN])
        rows = [
            {"output": str(c), "ratio": 0.0, "from": None, "to": None}
            if (ratio := self.sizes[c]) is None
            else {"output": str(c), "ratio": ratio.value, "from": _finite(ratio.low), "to": _finite(ratio.high)}
            for c in shown
        ]
        return f"\n\n{format_table(rows)}"


def _wrong(ratio: StdRatio) -> AuditFinding | None:
    """Not of the right size, and proven to be larger or smaller than true."""
    if ratio.value > STD_RATIO_TOLERANCE and ratio.low > 1:
        return "wide"
    return "narrow" if ratio.value < 1 / STD_RATIO_TOLERANCE and ratio.high < 1 else None


def _too(kind: AuditFinding, ratio: StdRatio) -> str:
    """Somewhat, where the interval reaches what is as good as right."""
    somewhat = "somewhat " if ratio.high > 1 / STD_RATIO_TOLERANCE and ratio.low < STD_RATIO_TOLERANCE else ""
    factor = max(ratio.value, 1 / ratio.value)
    return f"{somewhat}too {kind} by a factor {factor:.{1 if factor < 10 else 0}f} ({_shown(ratio)})"


def _shown(ratio: StdRatio) -> str:
    if ratio.high / ratio.value > 10:
        return f"ratio {_number(ratio.value)}, give or take more than a factor 10"
    return f"ratio {_number(ratio.value)}, between {_number(ratio.low)} and {_number(ratio.high)}"


def _number(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _finite(value: float | None) -> float | None:
    return value if value is not None and 0 < value < math.inf else None


_HELD = 1 << 21  # numbers looked at together
_FAR_OUT = 0.5  # of the variance, on average over places, that goes if one replicate is left out


def audit_bootstrap(
    predictor: Predictor,
    bootstrap: Method,
    model: Callable[[], nn.Module],
    data: Dataset[Any],
    config: TrainingConfig,
    x: Any,
    *,
    num_samples: int = 1000,
    seed: int = 0,
    logits: bool | None = None,
    progress: bool = True,
) -> BootstrapAudit:
    """Train true replicates with `bootstrap` on the data that the predictor was trained on, and compare both at x.

    `bootstrap` is a method whose replicates are K nets on re-weighted or resampled data, such as
    `BayesianBootstrap(loss, num_members=20)`, which trains small nets side by side. They are trained as the recipe
    says, but under a seed of their own, lest they be nets that the predictor itself consists of. `classes` says whether
    outputs are logits of classes (None: they are if a target is one whole number, and the net has several outputs).

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import BayesianBootstrap, Deterministic
    >>> x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    >>> data, config = TensorDataset(x, x.sum(1)), TrainingConfig(epochs=1, progress=False)
    >>> model = lambda: nn.Linear(2, 1)
    >>> plain = Deterministic(nn.MSELoss()).fit(model, data, config)
    >>> audit_bootstrap(plain, BayesianBootstrap(nn.MSELoss(), 8), model, data, config, x[:20], progress=False).verdict
    "no spread at all: 8 true replicates differ, the predictor's do not"
    """
    check_predictor(predictor)
    check_length(data)
    if config.folder is not None:
        raise ValueError(
            "got a recipe with a folder, where the fit of the predictor may be; expected none, since other nets are "
            "trained: give dataclasses.replace(recipe, folder=None)"
        )
    named = derive_seed(config.seed, seed, "audit")
    with preserve_rng_state():
        truth = bootstrap.fit(model, data, replace(config, seed=named, progress=config.progress and progress))
    check_predictor(truth)
    if logits is None:
        logits = _are_classes(truth, data, seed=seed)
    return compare_with_bootstrap(
        predictor, truth, x, num_samples=num_samples, seed=seed, logits=logits, progress=progress
    )


def _are_classes(truth: Predictor, data: Dataset[Any], *, seed: int) -> bool:
    """A label is one whole number for each input or pixel, where the net has several outputs for it."""
    x, y = next(iter_batches(data, 1, title="", progress=False))
    outputs = truth.predict(x, 1, seed=seed).samples[0]  # (1, C, *)
    return not y.is_floating_point() and outputs.shape[1] > 1 and y.numel() == outputs[:, 0].numel()


def compare_with_bootstrap(
    predictor: Predictor,
    bootstrap: Predictor,
    x: Any,
    *,
    num_samples: int = 1000,
    seed: int = 0,
    logits: bool = False,
    progress: bool = True,
) -> BootstrapAudit:
    """Compare a predictor's replicates with K true ones, the members of `truth`, at x.

    x is a tensor (a tuple or dict of them), a data set or a loader. Memory is bounded by the B replicates at one input
    (of many pixels, if it has them) and by the maps, one number for each input and output. `classes` says that outputs
    are logits of classes.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import BayesianBootstrap
    >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    >>> data = TensorDataset(x, x.sum(1) + torch.randn(60, generator=torch.Generator().manual_seed(1)))
    >>> method = BayesianBootstrap(nn.MSELoss(), num_members=20)
    >>> one, other = (
    ...     method.fit(lambda: nn.Linear(3, 1), data, TrainingConfig(epochs=5, seed=s, progress=False)) for s in (1, 2)
    ... )
    >>> compare_with_bootstrap(one, other, x, progress=False).faithful
    True
    """
    check_predictor(predictor)
    check_predictor(bootstrap)
    num_true, num_samples = _check_counts(predictor, bootstrap, num_samples)
    true, generated = ReplicateSubsets.of(num_true, seed=seed), ReplicateSubsets.of(num_samples, seed=seed)
    sums: LogStdSums | int = 0
    shares: _Shares | int = 0
    kept: list[SampledLocations] = []
    maps: list[_Maps] = []
    pixels: tuple[int, ...] = ()
    start = 0
    for batch in _batches(x, bootstrap, num_true + num_samples, seed=seed, progress=progress):
        pair = (
            bootstrap.predict(batch, num_true, seed=seed).samples,
            predictor.predict(batch, num_samples, seed=seed).samples,
        )
        theirs, mine = (tuple(samples.shape[1:]) for samples in pair)
        if mine != theirs:
            raise ValueError(
                f"got outputs {mine} of the predictor and {theirs} of the true replicates; expected the same: train "
                "both with the same net"
            )
        pixels = theirs[2:]
        for t, s in _places(*pair, logits):
            maps.append(part := _Maps.of(t, s))
            sums = sums + LogStdSums.of(true.log_std(t), generated.log_std(s), true, generated, part.counted)
            shares = shares + _Shares.of(t, s, part.differs)
            new = SampledLocations.of(t, s, part.counted, start=start, seed=seed)
            kept = [kept[0] + new] if kept else [new]
            start += t.shape[2]
    assert isinstance(sums, LogStdSums), "there is at least one input"
    assert isinstance(shares, _Shares)
    whole = _Maps(*(torch.cat([getattr(part, field.name) for part in maps], 1) for field in fields(_Maps)))
    if not bool(whole.differs.any()):
        raise ValueError(
            f"the {num_true} true replicates do not differ at these inputs; expected a bootstrap that draws weights "
            "for each of them: is it BayesianBootstrap or StandardBootstrap?"
        )
    chance = PermutationNull.of(kept[0], away=MAX_SHIFT, seed=seed) if bool(whole.counted.any()) else None
    by_chance = 0.0 if chance is None else chance.log_ratio
    shape = (len(whole.std), -1, *pixels)  # (C, N, *)
    return BootstrapAudit(
        size=StdRatio.over_all(sums, true, generated, chance=by_chance),
        sizes=StdRatio.by_output(sums, true, generated, chance=by_chance),
        place=StdAgreement.of(sums, true, generated),
        ks=None if chance is None else float(whole.ks[whole.counted].mean()),
        ks_chance=None if chance is None else chance.ks,
        wasserstein=None if chance is None else float(whole.wasserstein[whole.counted].mean()),
        wasserstein_chance=None if chance is None else chance.wasserstein,
        wasserstein_limit=None if chance is None else chance.wasserstein_limit,
        shift=float(whole.shift[whole.differs].median()),
        away=float((whole.shift[whole.differs] > MAX_SHIFT).double().mean()),
        away_limit=0.0 if chance is None else chance.away_limit,
        flat=1 - float(whole.counted.sum() / whole.differs.sum()),
        far_out_true=_far_out(shares.true / shares.count),
        far_out=_far_out(shares.generated / shares.count),
        std=whole.std.view(shape).movedim(0, 1),
        true_std=whole.true_std.view(shape).movedim(0, 1),
        ks_map=whole.ks.view(shape).movedim(0, 1),
        wasserstein_map=whole.wasserstein.view(shape).movedim(0, 1),
        num_true=num_true,
        num_samples=num_samples,
        classes=logits,
        seed=seed,
    )


def _check_counts(predictor: Predictor, truth: Predictor, num_samples: int) -> tuple[int, int]:
    """K and B; replicates that are only repeated tell nothing new."""
    num_true = truth.num_distinct
    if num_true is None or num_true < 4:
        got = "a truth whose replicates are no members" if num_true is None else f"{num_true} true replicates"
        raise ValueError(f"got {got}; expected the predictor of a bootstrap with K ≥ 4 members, better 20")
    if not isinstance(num_samples, int) or num_samples < 2:
        raise ValueError(f"got num_samples={num_samples!r}; expected at least 2 replicates, better 1000")
    return num_true, num_samples if predictor.num_distinct is None else min(num_samples, predictor.num_distinct)


def _batches(x: Any, truth: Predictor, replicates: int, *, seed: int, progress: bool) -> Iterator[Any]:
    """So many inputs at a time that their replicates are no more than _HELD numbers, one at least."""
    size = 0
    for batch in iter_inputs(x, title="audit", progress=progress):
        if not size:
            one = truth.predict(take_rows(batch, slice(0, 1)), 1, seed=seed).samples  # (1, 1, C, *)
            size = max(1, _HELD // (replicates * one.numel()))
        for start in range(0, num_rows(batch), size):
            yield take_rows(batch, slice(start, start + size))


def _places(true: Tensor, generated: Tensor, classes: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs as they are compared, inputs and pixels in one axis, some at a time: (B, N, C, *) → (B, C, L)."""
    if not all(bool(torch.isfinite(samples).all()) for samples in (true, generated)):
        raise ValueError("got replicates with NaN or infinite outputs; expected finite numbers: look at the training")
    pair = [samples.detach().movedim(2, 1).flatten(2) for samples in (true, generated)]
    size = max(1, _HELD // (max(len(true) + len(generated), 2 * MAX_SUBSETS) * pair[0].shape[1]))
    for t, s in zip(*(torch.split(samples, size, 2) for samples in pair), strict=True):
        t, s = t.cpu().double(), s.cpu().double()
        if classes and t.shape[1] > 1:
            t, s = t - t.mean(1, keepdim=True), s - s.mean(1, keepdim=True)
        yield t, s


@dataclass(frozen=True, eq=False)
class _Maps:
    """Figures of each output at each place: (C, L)."""

    std: Tensor
    true_std: Tensor
    ks: Tensor
    wasserstein: Tensor
    shift: Tensor
    differs: Tensor  # the true replicates do
    counted: Tensor  # and the generated ones do

    @classmethod
    def of(cls, true: Tensor, generated: Tensor) -> "_Maps":
        """Of replicates (K, C, L) and (B, C, L)."""
        std = generated.std(0) if len(generated) > 1 else torch.zeros_like(generated[0])
        true_std = true.std(0)
        # float32 outputs differ by rounding in the seventh figure
        differs = true_std > 1e-6 * true.square().mean(0).sqrt()
        ks, wasserstein = shape_distances(true.flatten(1), generated.flatten(1))
        shift = (generated.mean(0) - true.mean(0)).abs() / true_std
        counted = differs & (std >= MIN_STD_FRACTION * true_std)
        return cls(std, true_std, ks.view_as(std), wasserstein.view_as(std), shift, differs, counted)


@dataclass(frozen=True, eq=False)
class _Shares(MetricState):
    """For each replicate, the share of the variance that goes with it, summed over places: (K,), (B,)."""

    true: Tensor
    generated: Tensor
    count: Tensor

    @classmethod
    def of(cls, true: Tensor, generated: Tensor, differs: Tensor) -> "_Shares":
        shares = []
        for samples in (true, generated):
            squares = (samples - samples.mean(0)).square()  # (B, C, L)
            total = squares.sum(0) * (1 - 1 / len(samples))
            share = squares / total.clamp_min(torch.finfo(torch.float64).tiny)
            shares.append(share.where(differs, 0.0).sum((1, 2)))
        return cls(shares[0], shares[1], differs.sum().double())


def _far_out(share: Tensor) -> tuple[int, ...]:
    """Which replicates make up most of the spread; of fewer than eight, any of them may."""
    return () if len(share) < 8 else tuple((share > _FAR_OUT).nonzero()[:, 0].tolist())
