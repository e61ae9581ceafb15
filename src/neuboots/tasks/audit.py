"""Audit: how close are generated replicates to the real bootstrap on this data?

    s(x), t(x): standard deviation at x over generated and over true replicates
    ratio = exp mean log(s/t),   correlation = cov(log s, log t) / √(var₀ log s · var₀ log t),   over inputs

A handful of nets is trained on re-weighted data, which is what a bootstrap is, and compared with a predictor at the
same inputs. K true replicates are few, and the figures say what K can tell. log t is too small by
½(log(ν/2) − ψ(ν/2)), ν = K − 1, for Gaussian replicates, which is put back. Its error is common to all inputs, since
all see the same K nets; the interval of the ratio is therefore a jackknife over replicates, not over inputs. That error
also thins out a correlation over inputs. The variance var₀ that is free of it is the covariance between the log
standard deviations of two halves of the replicates, whose errors are independent, averaged over random halves; this
holds whatever the distribution of the replicates.

The distance of Kolmogorov and Smirnov compares the shapes at one input: replicates less their mean, over their standard
deviation. Wasserstein's (W₁) compares size and shape: replicates less their mean, over the true standard deviation.
Beside both stands what K and B numbers from one Gaussian show by chance.

For classes the logits are compared, less their mean over classes: softmax does not see a shift of all of them, and
probabilities near 0 and 1 have no spread to compare. True replicates differ in their random first weights and order of
rows as well as in their bootstrap weights, as bootstrapped nets do. To compare the weights alone, give all of them one
start: `make_net=lambda: copy.deepcopy(net)`.

Newton and Raftery, Approximate Bayesian inference with the weighted likelihood bootstrap, JRSS B 1994 (true
replicates); Spearman, The proof and measurement of association between two things, American Journal of Psychology 1904
(correlation of what is measured with error); Efron and Stein, The jackknife estimate of variance, Annals of Statistics
1981.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots.batches import own_randomness
from neuboots.keys import seed_named
from neuboots.metrics.tally import Tally
from neuboots.prediction import Method, Predictor
from neuboots.tasks.common import check_predictor, check_rows, inputs_of, part_of, table
from neuboots.tasks.inputs import rows_in
from neuboots.training import Recipe

Finding = Literal["faithful", "flat", "narrow", "wide", "misplaced", "centre", "shape", "unknown"]

# What counts as faithful. An interval of 95 % must leave these bounds before a fault is found, and "faithful" also
# needs an interval that is short enough to have found one.
RIGHT_SIZE = 1.25  # a band that is wider or narrower by less is as good as right: 95 % becomes 88 % to 99 %
TOLD_APART = 2.0  # an interval of the ratio that is longer than this factor to either side tells nothing
RIGHT_PLACE = 0.5  # the least correlation; below, most of the differences between inputs are the predictor's own
OFF_PLACE = 2.0  # where true spread hardly differs between inputs: the factor by which it may typically be missed
RELIABLE = 0.3  # the least share of var log t that must be more than sampling error for a correlation to be judged
VARIES = math.log(1.1)  # and the least standard deviation of log t over inputs: spread that differs by 10 %
CLOSE = 0.5  # and the most that its interval may reach to either side
AWAY = 2.0  # standard deviations between the centres: a band of mean ± 2 standard deviations misses the other centre
FLAT = 0.01  # less than a hundredth of the true spread is no spread
FEW = 8  # true replicates; halves of fewer than four do not tell where spread is large

_HELD = 1 << 21  # replicates × outputs looked at together: memory does not grow with B
_SPLITS = 32  # random halves
_GROUPS = 20  # of replicates left out together, where there are more than _SPLITS of them
_PAIRS = 1000  # Gaussian samples behind the distances by chance
_RARE = 0.01  # of these pairs are farther apart than the limit


# -- standard deviations of all, of all but one, and of halves -----------------------------------------


@dataclass(frozen=True, eq=False)
class _Sets:
    """Sets of replicates whose standard deviations are taken: all, all but one group, one half and the other."""

    sizes: Tensor  # replicates in each group: (G,)
    rows: Tensor  # which groups a set holds, 0 or 1: (1 + G + 2·splits, G)

    @classmethod
    def of(cls, count: int, *, seed: int) -> "_Sets":
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
class _Sums(Tally):
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
    def of(cls, t: Tensor, s: Tensor, true: _Sets, generated: _Sets, counted: Tensor) -> "_Sums":
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


# -- distances -----------------------------------------------------------------------------------------


def distances(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """sup |F_a − F_b| (Kolmogorov–Smirnov) and ∫ |F_a − F_b| (Wasserstein-1) of each column of (K, M), (B, M): (M,).

    >>> ks, w1 = distances(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [3.0]]))
    >>> ks.tolist(), w1.tolist()
    ([0.5], [1.0])
    """
    values, order = torch.cat([a, b]).sort(0)  # (K + B, M)
    step = torch.cat([a.new_full((len(a),), 1 / len(a)), a.new_full((len(b),), -1 / len(b))])
    gap = step[order].cumsum(0)[:-1].abs()
    length = values.diff(dim=0)
    ks = gap.where(length > 0, 0.0).amax(0)  # between equal values the step is not finished
    return ks, (gap * length).sum(0)


def _distances_of_replicates(true: Tensor, generated: Tensor) -> tuple[Tensor, Tensor]:
    """KS of the shapes, and Wasserstein of size and shape in true standard deviations, of (K, M) and (B, M): (M,)."""
    t, s = true - true.mean(0), generated - generated.mean(0)
    t_std, s_std = t.square().mean(0).sqrt(), s.square().mean(0).sqrt()
    ks, _ = distances(t / t_std, s / s_std.where(s_std > 0, 1.0))
    _, wasserstein = distances(t, s)
    return ks, wasserstein / true.std(0)


@lru_cache(maxsize=16)
def _by_chance(num_true: int, num_samples: int, *, seed: int) -> tuple[float, float, float]:
    """Mean KS, the KS that one pair in a hundred exceeds, and mean Wasserstein, of two samples of one Gaussian."""
    rng = torch.Generator().manual_seed(seed_named(seed, "chance", num_true, num_samples))
    found = []
    size = max(1, _HELD // (num_true + num_samples))
    for start in range(0, _PAIRS, size):
        width = min(size, _PAIRS - start)
        pair = [torch.randn(rows, width, generator=rng, dtype=torch.float64) for rows in (num_true, num_samples)]
        found.append(torch.stack(_distances_of_replicates(*pair)))
    ks, wasserstein = torch.cat(found, 1)
    return float(ks.mean()), float(ks.quantile(1 - _RARE)), float(wasserstein.mean())


# -- the result ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Audit:
    """What `compare` and `audit` found; `verdict` says it in a sentence, `print` shows all figures.

    Maps are (N, C, *), one value for each input, output and pixel; the other figures are over all of them.
    """

    ratio: float  # geometric mean of generated over true standard deviation; 1 is right
    ratio_low: float  # its 95 % interval
    ratio_high: float
    ratio_spread: float  # the factor by which the ratio at one input typically differs from their mean; 1 is none
    correlation: float | None  # over inputs, of log standard deviations, corrected; None: true spread hardly differs
    correlation_error: float | None  # half its 95 % interval
    raw_correlation: float | None  # not corrected for the few replicates
    reliability: float | None  # share of var log t that is more than sampling error
    ks: float  # mean Kolmogorov–Smirnov distance
    ks_chance: float  # of two samples of one Gaussian
    ks_limit: float  # which one in a hundred of such pairs exceeds
    wasserstein: float  # mean Wasserstein-1 distance, in true standard deviations
    wasserstein_chance: float
    shift: float  # median distance of the centres, in true standard deviations
    flat: float  # share of places where true replicates differ and generated ones do not
    std: Tensor  # maps
    true_std: Tensor
    ks_map: Tensor
    wasserstein_map: Tensor
    num_true: int  # K
    num_samples: int  # B, or the number of distinct generated replicates where that is smaller
    classes: bool
    seed: int

    @property
    def faithful(self) -> bool:
        return self.finding == "faithful"

    @property
    def finding(self) -> Finding:
        """The first fault that the figures prove; "unknown" where they could not have, "faithful" where none is."""
        if self.flat > 0.5:
            return "flat"
        if self.ratio_high < 1 / RIGHT_SIZE:
            return "narrow"
        if self.ratio_low > RIGHT_SIZE:
            return "wide"
        if self.num_true < FEW:
            return "unknown"
        if self._misplaced:
            return "misplaced"
        if self.ratio_high / self.ratio > TOLD_APART or self._place_unknown:
            return "unknown"
        if self.shift > AWAY:
            return "centre"
        return "shape" if self.ks > self.ks_limit else "faithful"

    @property
    def _misplaced(self) -> bool:
        if self.correlation is None or self.correlation_error is None:
            return self.ratio_spread > OFF_PLACE
        return self.correlation + self.correlation_error < RIGHT_PLACE

    @property
    def _place_unknown(self) -> bool:
        return self.correlation is not None and self.correlation < RIGHT_PLACE and not self._misplaced

    @property
    def verdict(self) -> str:
        """One sentence with its numbers."""
        if self.finding == "flat":
            return f"no spread at all: {self.num_true} true replicates differ, the predictor's do not"
        size = f"ratio {self.ratio:.2f}, between {self.ratio_low:.2f} and {self.ratio_high:.2f}"
        sentence = {
            "narrow": f"too narrow by a factor {1 / self.ratio:.1f} ({size}){self._and_misplaced}",
            "wide": f"too wide by a factor {self.ratio:.1f} ({size}){self._and_misplaced}",
            "misplaced": f"the right size on average ({size}), but not where it should be ({self._place})",
            "centre": f"the right spread ({size}; {self._place}), but around another centre, {self.shift:.1f} standard "
            "deviations away",
            "shape": f"the right size ({size}) in the right places ({self._place}), but of another shape (KS distance "
            f"{self.ks:.2f}, by chance {self.ks_chance:.2f})",
            "unknown": f"cannot tell with {self._replicates} ({size}; {self._place}): train "
            f"{max(20, 2 * self.num_true)} true replicates",
            "faithful": f"faithful: the right size ({size}) in the right places ({self._place}), as far as "
            f"{self.num_true} true replicates can tell",
        }[self.finding]
        return sentence + (f"; no spread at {100 * self.flat:.0f} % of the outputs" if self.flat > 0.005 else "")

    @property
    def _replicates(self) -> str:
        own = f" and {self.num_samples} of the predictor" if self.num_samples < self.num_true else ""
        return f"{self.num_true} true replicates{own}"

    @property
    def _place(self) -> str:
        if self.correlation is None:
            return "true spread hardly differs between these inputs"
        return f"correlation {self.correlation:.2f}"

    @property
    def _and_misplaced(self) -> str:
        return f", and not where it should be ({self._place})" if self.num_true >= FEW and self._misplaced else ""

    def __str__(self) -> str:
        places = "inputs" if self.std.ndim == 2 else "inputs with pixels"
        what = "logits of classes, less their mean" if self.classes else "outputs"
        header = (
            f"{len(self.std):,} {places}, {what}; K = {self.num_true} true replicates, B = {self.num_samples} of the "
            f"predictor, seed {self.seed}"
        )
        rows: list[dict[str, Any]] = [
            {"figure": "ratio of standard deviations", "value": self.ratio, "compare with": 1.0},
            {"figure": "  its interval, from", "value": self.ratio_low, "compare with": None},
            {"figure": "  to", "value": self.ratio_high, "compare with": None},
            {"figure": "  spread over inputs (factor)", "value": self.ratio_spread, "compare with": 1.0},
            {"figure": "correlation over inputs", "value": self.correlation, "compare with": 1.0},
            {"figure": "  not corrected", "value": self.raw_correlation, "compare with": None},
            {"figure": "  reliability of true spread", "value": self.reliability, "compare with": None},
            {"figure": "KS distance", "value": self.ks, "compare with": self.ks_chance},
            {"figure": "Wasserstein distance", "value": self.wasserstein, "compare with": self.wasserstein_chance},
            {"figure": "shift of the centre", "value": self.shift, "compare with": 0.0},
        ]
        return f"{self.verdict}\n{header}\n{table(rows)}"


# -- the comparison ------------------------------------------------------------------------------------


def audit(
    predictor: Predictor,
    bootstrap: Method,
    make_net: Callable[[], nn.Module],
    data: Dataset[Any],
    recipe: Recipe,
    x: Any,
    *,
    num_samples: int = 1000,
    seed: int = 0,
    classes: bool | None = None,
    progress: bool = True,
) -> Audit:
    """Train true replicates with `bootstrap` on the data that the predictor was trained on, and compare both at x.

    `bootstrap` is a method whose replicates are K nets on re-weighted or resampled data, such as
    `BayesianBootstrap(loss, num_members=20)`, which trains small nets side by side. They are trained as the recipe
    says, but under a seed of their own, lest they be nets that the predictor itself consists of. `classes` says whether
    outputs are logits of classes (None: they are if targets are whole numbers).

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import BayesianBootstrap, Plain, SquaredError
    >>> x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    >>> data, recipe = TensorDataset(x, x.sum(1)), Recipe(epochs=1, progress=False)
    >>> make_net = lambda: nn.Linear(2, 1)
    >>> plain = Plain(SquaredError()).fit(make_net, data, recipe)
    >>> audit(plain, BayesianBootstrap(SquaredError(), 8), make_net, data, recipe, x[:20], progress=False).verdict
    "no spread at all: 8 true replicates differ, the predictor's do not"
    """
    check_predictor(predictor)
    check_rows(data)
    named = seed_named(recipe.seed, seed, "audit")
    with own_randomness():
        if classes is None:
            row: Any = data[0]
            classes = not torch.as_tensor(row[-1]).is_floating_point()
        truth = bootstrap.fit(make_net, data, replace(recipe, seed=named, progress=recipe.progress and progress))
    return compare(predictor, truth, x, num_samples=num_samples, seed=seed, classes=classes, progress=progress)


def compare(
    predictor: Predictor,
    truth: Predictor,
    x: Any,
    *,
    num_samples: int = 1000,
    seed: int = 0,
    classes: bool = False,
    progress: bool = True,
) -> Audit:
    """Compare a predictor's replicates with K true ones, the members of `truth`, at x.

    x is a tensor, or a tuple or dict of them. Inputs are taken a few at a time: memory grows with neither B nor N, but
    for the maps. `classes` says that outputs are logits of classes.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import BayesianBootstrap, SquaredError
    >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    >>> data = TensorDataset(x, x.sum(1) + torch.randn(60, generator=torch.Generator().manual_seed(1)))
    >>> method = BayesianBootstrap(SquaredError(), num_members=20)
    >>> one, other = (
    ...     method.fit(lambda: nn.Linear(3, 1), data, Recipe(epochs=5, seed=s, progress=False)) for s in (1, 2)
    ... )
    >>> compare(one, other, x, progress=False).faithful
    True
    """
    check_predictor(predictor)
    check_predictor(truth)
    num_true, num_samples = _check_counts(predictor, truth, num_samples)
    if rows_in(x) == 0:
        raise ValueError("got no inputs; expected at least one")
    one = truth.predict(part_of(x, slice(0, 1)), 1, seed=seed).samples  # (1, 1, C, *)
    true, generated = _Sets.of(num_true, seed=seed), _Sets.of(num_samples, seed=seed)
    size = max(1, _HELD // ((num_true + num_samples) * one.numel()))
    sums: _Sums | int = 0
    parts: list[_Maps] = []
    for batch in inputs_of(x, size, title="audit", progress=progress):
        pair = truth.predict(batch, num_true, seed=seed), predictor.predict(batch, num_samples, seed=seed)
        theirs, mine = (tuple(prediction.samples.shape[1:]) for prediction in pair)
        if mine != theirs:
            raise ValueError(
                f"got outputs {mine} of the predictor and {theirs} of the true replicates; expected the same: train "
                "both with the same net"
            )
        t, s = (_places(prediction.samples, classes) for prediction in pair)
        parts.append(maps := _Maps.of(t, s))
        sums = sums + _Sums.of(true.log_std(t), generated.log_std(s), true, generated, maps.counted)
    assert isinstance(sums, _Sums), "there is at least one input"
    whole = _Maps(*(torch.cat([getattr(part, field.name) for part in parts], 1) for field in fields(_Maps)))
    if not bool(whole.differs.any()):
        raise ValueError(
            f"the {num_true} true replicates do not differ at these inputs; expected a bootstrap that draws weights "
            "for each of them: is it BayesianBootstrap or StandardBootstrap?"
        )
    shape = (one.shape[2], -1, *one.shape[3:])  # (C, N, *)
    ks_chance, ks_limit, wasserstein_chance = _by_chance(num_true, num_samples, seed=seed)
    ratio, ratio_low, ratio_high = _of_ratio(sums, true, generated, num_true, num_samples)
    place = _Place.of(sums, true, generated)
    return Audit(
        ratio=ratio,
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        ratio_spread=place.spread,
        correlation=place.correlation,
        correlation_error=place.error,
        raw_correlation=place.raw,
        reliability=place.reliability,
        ks=float(whole.ks[whole.differs].mean()),
        ks_chance=ks_chance,
        ks_limit=ks_limit,
        wasserstein=float(whole.wasserstein[whole.differs].mean()),
        wasserstein_chance=wasserstein_chance,
        shift=float(whole.shift[whole.differs].median()),
        flat=1 - float(whole.counted.sum() / whole.differs.sum()),
        std=whole.std.view(shape).movedim(0, 1),
        true_std=whole.true_std.view(shape).movedim(0, 1),
        ks_map=whole.ks.view(shape).movedim(0, 1),
        wasserstein_map=whole.wasserstein.view(shape).movedim(0, 1),
        num_true=num_true,
        num_samples=num_samples,
        classes=classes,
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


def _places(samples: Tensor, classes: bool) -> Tensor:
    """Outputs as they are compared, inputs and pixels in one axis: (B, N, C, *) → (B, C, L)."""
    if not bool(torch.isfinite(samples).all()):
        raise ValueError("got replicates with NaN or infinite outputs; expected finite numbers: look at the training")
    samples = samples.detach().cpu().double()
    if classes and samples.shape[2] > 1:
        samples = samples - samples.mean(2, keepdim=True)
    return samples.movedim(2, 1).flatten(2)


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
        ks, wasserstein = _distances_of_replicates(true.flatten(1), generated.flatten(1))
        shift = (generated.mean(0) - true.mean(0)).abs() / true_std
        wasserstein = wasserstein.view_as(std).where(differs, 0.0)
        return cls(std, true_std, ks.view_as(std), wasserstein, shift, differs, differs & (std >= FLAT * true_std))


def _of_ratio(
    sums: _Sums, true: _Sets, generated: _Sets, num_true: int, num_samples: int
) -> tuple[float, float, float]:
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
class _Place:
    """How generated and true standard deviations go together over inputs."""

    spread: float = 1.0
    raw: float | None = None
    reliability: float | None = None
    correlation: float | None = None
    error: float | None = None

    @classmethod
    def of(cls, sums: _Sums, true: _Sets, generated: _Sets) -> "_Place":
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
