"""The audit: figures against other computations, corrections by simulation, verdicts on known replicates."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from _reference import standard_errors
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from neuboots import BayesianBootstrap, Deterministic, InfluenceBootstrap, MCDropout, NeuBoots, TrainingConfig
from neuboots.evaluation import bootstrap_audit as chance
from neuboots.evaluation import bootstrap_audit as spread
from neuboots.evaluation.bootstrap_audit import (
    MAX_FACTOR,
    MAX_FRACTION,
    MAX_SHIFT,
    MIN_CORRELATION,
    STD_RATIO_TOLERANCE,
    BootstrapAudit,
    PermutationNull,
    SampledLocations,
    StdAgreement,
    StdRatio,
    audit_bootstrap,
    compare_with_bootstrap,
    ks_and_wasserstein,
    shape_distances,
)
from neuboots.methods import CalibratedNeuBoots
from neuboots.nets import MLP
from neuboots.posthoc import ScaledPredictor
from neuboots.prediction import Predictor, SampleStream

N = 40
PLACES = torch.arange(N, dtype=torch.float64)[:, None]  # an input is its own number


@dataclass(frozen=True, eq=False)
class Given(Predictor):
    """Replicates that a test made up: (B, N, C, *), found by the number in the first column of x."""

    samples: Tensor
    num_distinct: int | None = None  # type: ignore[assignment]

    net = None

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        x = x["number"] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x
        out = self.samples[:num_samples, x[:, 0].long()]
        return SampleStream(num_samples, 1, lambda size: iter(out.split(size)))

    def config(self) -> dict[str, Any]:
        return {}


@dataclass
class Law:
    """Replicates that are smooth Gaussian functions times σ(x), log σ ~ N(0, spread²) at each of N inputs.

    `length` is how far along [0, 1] replicates go together: 0 not at all, 50 everywhere.
    """

    length: float
    spread: float
    seed: int

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(self.seed)
        x = torch.linspace(0, 1, N, dtype=torch.float64)
        near = torch.exp(-0.5 * ((x[:, None] - x) / max(self.length, 1e-9)).square())
        self.root = torch.linalg.cholesky(near + 1e-8 * torch.eye(N, dtype=torch.float64))
        self.std = (self.spread * self.normal(N)).exp()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64)

    def draw(self, num: int, std: Tensor | None = None) -> Tensor:
        """(num, N, 1)"""
        return ((self.normal(num, N) @ self.root.T) * (self.std if std is None else std))[..., None]


def compared(true: Tensor, generated: Tensor, distinct: int | None = None, **options: Any) -> BootstrapAudit:
    settings = {"num_samples": max(2, len(generated)), "progress": False} | options
    return compare_with_bootstrap(
        Given(generated, distinct), Given(true, len(true)), PLACES[: true.shape[1]], **settings
    )


# -- figures against other computations ----------------------------------------------------------------


@pytest.mark.parametrize("digits", [0, 1, 9])
def test_distances_are_those_of_scipy(digits: int) -> None:
    """Rounded numbers have ties within and between the samples."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(7, 30)).round(digits), rng.normal(0.5, 2, size=(20, 30)).round(digits)
    ks, wasserstein = ks_and_wasserstein(torch.from_numpy(a), torch.from_numpy(b))
    for k in range(30):
        assert float(ks[k]) == pytest.approx(scipy.stats.ks_2samp(a[:, k], b[:, k]).statistic, abs=1e-12)
        assert float(wasserstein[k]) == pytest.approx(scipy.stats.wasserstein_distance(a[:, k], b[:, k]), abs=1e-12)


def test_maps_are_those_of_numpy_and_scipy() -> None:
    weight_distribution = Law(0.1, 0.5, 0)
    t, s = 3 + weight_distribution.draw(9), 2 * weight_distribution.draw(50)
    found = compared(t, s)
    true, generated = t.numpy()[..., 0], s.numpy()[..., 0]
    torch.testing.assert_close(found.std[:, 0].numpy(), generated.std(0, ddof=1))
    torch.testing.assert_close(found.true_std[:, 0].numpy(), true.std(0, ddof=1))
    assert found.shift == pytest.approx(
        np.sort(np.abs(generated.mean(0) - true.mean(0)) / true.std(0, ddof=1))[N // 2 - 1]
    )
    for k in range(N):
        t_k, s_k = true[:, k] - true[:, k].mean(), generated[:, k] - generated[:, k].mean()
        pair = t_k / t_k.std(), s_k / s_k.std()
        assert float(found.wasserstein_map[k, 0]) == pytest.approx(scipy.stats.wasserstein_distance(*pair))
        assert float(found.ks_map[k, 0]) == pytest.approx(scipy.stats.ks_2samp(*pair).statistic)
    assert found.ks == pytest.approx(float(found.ks_map.mean()))
    assert found.wasserstein == pytest.approx(float(found.wasserstein_map.mean()))
    logs = np.log(generated.std(0, ddof=1)), np.log(true.std(0, ddof=1))
    assert found.place.raw == pytest.approx(np.corrcoef(*logs)[0, 1])


@pytest.mark.parametrize("count", [5, 8, 33, 50])
def test_the_standard_deviations_of_sets_are_those_of_their_replicates(count: int) -> None:
    sets = spread.Sets.of(count, seed=0)
    samples = torch.randn(count, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logs = sets.log_std(samples)
    group = torch.arange(count) % sets.groups
    assert len(sets.rows) == 1 + sets.groups + 64
    for row, log in zip(sets.rows, logs, strict=True):
        torch.testing.assert_close(log, samples[row[group] > 0].std(0).log())
    one, other = sets.halves(sets.rows)
    assert torch.equal(one + other, torch.ones(32, sets.groups, dtype=torch.float64))
    assert {int(row.sum()) for row in one} == {sets.groups // 2}
    assert torch.equal(sets.without_one(sets.rows), 1 - torch.eye(sets.groups, dtype=torch.float64))


@pytest.mark.parametrize("groups", [8, 20])
def test_the_jackknife_of_a_mean_is_its_standard_error(groups: int) -> None:
    values = torch.randn(groups, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    without = (values.sum() - values) / (groups - 1)
    sets = spread.Sets.of(groups, seed=0)
    for statements in (1, 10):
        student = scipy.stats.t.ppf(1 - 0.025 / statements, groups - 1)
        error = float(sets.error(without, statements=statements))
        assert error == pytest.approx(student * float(values.std()) / math.sqrt(groups))


# -- what chance shows ---------------------------------------------------------------------------------


def z_scores(kind: str, *shape: int, seed: int) -> Tensor:
    """Mean 0 and variance 1 (of t₃: about): Gaussian, heavy tails on both sides, or on one."""
    rng = np.random.default_rng(seed)
    drawn = {
        "gaussian": lambda: rng.normal(size=shape),
        "t3": lambda: rng.standard_t(3, size=shape) / math.sqrt(3),
        "log-normal": lambda: (np.exp(rng.normal(size=shape)) - math.exp(0.5)) / math.sqrt((math.e - 1) * math.e),
    }
    return torch.from_numpy(drawn[kind]())


@pytest.mark.parametrize(("num_true", "num_samples"), [(10, 60), (12, 12)])
@pytest.mark.parametrize("kind", ["gaussian", "log-normal"])
def test_chance_is_what_two_samples_of_one_distribution_show(kind: str, num_true: int, num_samples: int) -> None:
    """Independent places, so that means over 32 of them are close to expectations, which 4000 pairs give. The pool has
    72 (24) numbers at each place, standardised by themselves, which takes off some of the heaviest tails."""
    kept = SampledLocations(
        torch.zeros(32), z_scores(kind, num_true, 32, seed=1), z_scores(kind, num_samples, 32, seed=2)
    )
    found = PermutationNull.of(kept, away=2.0, seed=0)
    pair = z_scores(kind, num_true, 4000, seed=3), z_scores(kind, num_samples, 4000, seed=4)
    ks, wasserstein = (float(figure.mean()) for figure in shape_distances(*pair))
    assert (found.ks, found.wasserstein) == pytest.approx((ks, wasserstein), rel=0.1 if kind == "gaussian" else 0.2)
    assert found.wasserstein < found.wasserstein_limit < 1.5 * found.wasserstein
    log_ratio = float((pair[1].std(0) / pair[0].std(0)).log().mean())
    assert found.log_ratio == pytest.approx(log_ratio, abs=0.02)
    if kind == "log-normal" and num_samples > num_true:
        assert found.log_ratio > 0.15  # a Gaussian has 0.05


def test_the_share_far_away_by_chance_is_counted() -> None:
    """K = 4 with heavy tails: centres are often more than two of their small standard deviations apart."""
    skew = SampledLocations(
        torch.zeros(32), z_scores("log-normal", 4, 32, seed=1), z_scores("log-normal", 200, 32, seed=2)
    )
    found = PermutationNull.of(skew, away=2.0, seed=0)
    true, others = z_scores("log-normal", 4, 4000, seed=3), z_scores("log-normal", 200, 4000, seed=4)
    share = float(((true.mean(0) - others.mean(0)).abs() > 2 * true.std(0)).double().mean())
    assert share < found.away_limit < share + 5 * math.sqrt(share / 32)
    few = SampledLocations(torch.zeros(32), z_scores("gaussian", 20, 32, seed=1), z_scores("gaussian", 200, 32, seed=2))
    assert PermutationNull.of(few, away=2.0, seed=0).away_limit == 0.0


def test_the_places_that_are_kept_do_not_depend_on_how_they_are_cut() -> None:
    t, s = z_scores("gaussian", 5, 2, 300, seed=0), z_scores("gaussian", 7, 2, 300, seed=1)
    counted = torch.rand(2, 300, generator=torch.Generator().manual_seed(0)) < 0.5
    whole = SampledLocations.of(t, s, counted, start=0, seed=3)
    ends = [0, 10, 11, 200, 300]
    parts = [SampledLocations.of(t[..., a:b], s[..., a:b], counted[:, a:b], start=a, seed=3) for a, b in pairwise(ends)]
    joined = parts[0] + parts[1] + parts[2] + parts[3]
    assert torch.equal(joined.true, whole.true)
    assert torch.equal(joined.generated, whole.generated)
    assert whole.true.shape == (5, chance._PLACES)
    allowed = set(t[0][counted].tolist())
    assert set(whole.true[0].tolist()) <= allowed
    first = set(t[0, 0].tolist())
    assert 2 < sum(value in first for value in whole.true[0].tolist()) < 18  # both outputs, about half each
    assert not torch.equal(SampledLocations.of(t, s, counted, start=0, seed=4).true, whole.true)


# -- corrections, by simulation ------------------------------------------------------------------------

SEEDS = 100


@cache
def simulated(length: float, num_true: int, num_samples: int, distinct: bool) -> list[BootstrapAudit]:
    """True ratio 1.7, correlation 0.6 between log standard deviations, whose difference has variance 0.2."""
    found = []
    for seed in range(SEEDS):
        weight_distribution = Law(length, 0.5, seed)
        std = 1.7 * (0.6 * weight_distribution.std.log() + 0.8 * 0.5 * weight_distribution.normal(N)).exp()
        std = (
            std * (weight_distribution.std.log().mean() - std.log().mean() + math.log(1.7)).exp()
        )  # the geometric mean is exact
        found.append(
            compared(
                weight_distribution.draw(num_true),
                weight_distribution.draw(num_samples, std),
                num_samples if distinct else None,
            )
        )
    return found


CASES = [(0.0, 20, 100, False), (0.3, 20, 100, False), (50.0, 20, 100, False), (0.1, 12, 20, True)]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_case
def test_the_ratio_is_unbiased_and_its_interval_covers(case: tuple[float, int, int, bool]) -> None:
    """Whether inputs are missed together (length 50) or each by itself (0); K = 12 or 20, B = 20 or 100."""
    found = simulated(*case)
    logs = np.log([one.ratio for one in found])
    assert abs(logs.mean() - math.log(1.7)) < standard_errors(len(CASES)) * logs.std() / math.sqrt(SEEDS)
    hits = sum(one.size.low < 1.7 < one.size.high for one in found if one.size)
    assert scipy.stats.binomtest(hits, SEEDS, 0.95).pvalue > 1e-3 / len(CASES)


@every_case
def test_the_corrected_correlation_is_unbiased_where_the_raw_one_is_too_small(
    case: tuple[float, int, int, bool],
) -> None:
    """Of N = 40 inputs a correlation has a bias of −ρ(1 − ρ²)/2N = −0.005 of its own, which both have."""
    found = simulated(*case)
    assert all(one.correlation is not None and one.place.raw is not None for one in found)
    corrected, raw = (np.array([getattr(one.place, name) for one in found]) for name in ("correlation", "raw"))
    assert abs(corrected.mean() - 0.6) < standard_errors(2 * len(CASES)) * corrected.std() / math.sqrt(SEEDS) + 0.005
    if case[0] != 50.0:  # errors that are the same everywhere do not thin out a correlation
        gap = corrected - raw
        assert gap.mean() > standard_errors(2 * len(CASES)) * gap.std() / math.sqrt(SEEDS)
    if case[3]:
        assert raw.mean() < 0.55


@every_case
def test_the_spread_of_the_ratio_is_free_of_sampling_error(case: tuple[float, int, int, bool]) -> None:
    """The true log ratio has the variance (0.4 · 0.5)² + (0.8 · 0.5)² = 0.2 over inputs; its estimates scatter more."""
    found = simulated(*case)
    corrected = np.array([math.log(one.place.spread) ** 2 for one in found])
    assert abs(corrected.mean() - 0.2) < standard_errors(2 * len(CASES)) * corrected.std() / math.sqrt(SEEDS)
    crude = np.array([float((one.std / one.true_std).log().var()) for one in found])
    if case[0] != 50.0:
        assert crude.mean() > 0.2 + standard_errors(2 * len(CASES)) * crude.std() / math.sqrt(SEEDS)


# -- verdicts on known replicates ----------------------------------------------------------------------


@pytest.mark.parametrize(("length", "spread"), [(0.0, 0.5), (0.2, 0.0), (0.2, 0.5)])
@pytest.mark.parametrize("num_samples", [20, 100])
def test_true_replicates_are_called_faithful(length: float, spread: float, num_samples: int) -> None:
    """In 90 % of seeds or more, within binomial error, at K = 20; of a second ensemble of 20 (B = 20) the interval is
    longer, and one seed in five cannot tell. A fault is found in 5 % of seeds or less."""
    weight_distributions = [Law(length, spread, seed) for seed in range(50)]
    distinct = num_samples if num_samples == 20 else None
    found = [
        compared(weight_distribution.draw(20), weight_distribution.draw(num_samples), distinct).finding
        for weight_distribution in weight_distributions
    ]
    least = 0.8 if distinct else 0.9
    assert scipy.stats.binomtest(found.count("faithful"), 50, least, alternative="less").pvalue > 1e-3 / 12
    wrong = sum(finding not in ("faithful", "unknown") for finding in found)
    assert scipy.stats.binomtest(wrong, 50, 0.05, alternative="greater").pvalue > 1e-3 / 12


@pytest.mark.parametrize("kind", ["gaussian", "t3", "log-normal"])
def test_whatever_the_distribution_true_replicates_are_not_faulted(kind: str) -> None:
    """Both sides of one law, K = 20 and B = 500: in 10 % of seeds or fewer, within binomial error, a fault is found."""
    found = []
    for seed in range(60):
        weight_distribution = Law(0.05, 0.5, seed)
        t, s = (z_scores(kind, num, N, seed=1000 * num + seed) for num in (20, 500))
        if kind == "gaussian":
            t, s = t @ weight_distribution.root.T, s @ weight_distribution.root.T
        found.append(
            compared((t * weight_distribution.std)[..., None], (s * weight_distribution.std)[..., None]).finding
        )
    wrong = sum(finding not in ("faithful", "unknown") for finding in found)
    assert scipy.stats.binomtest(wrong, 60, 0.1, alternative="greater").pvalue > 1e-3 / 4
    if kind == "gaussian":
        assert scipy.stats.binomtest(found.count("faithful"), 60, 0.9, alternative="less").pvalue > 1e-3 / 4


def two_points(weight_distribution: Law, num: int) -> Tensor:
    """Replicates of the right mean and standard deviation that are one of two functions."""
    return weight_distribution.draw(num).sign() * weight_distribution.std[:, None]


FAULTS: dict[str, tuple[Callable[[Law], Tensor], str, str]] = {
    "constant": (
        lambda weight_distribution: torch.zeros(100, N, 1),
        "flat",
        "no spread at all: 20 true replicates differ",
    ),
    "nearly constant": (lambda weight_distribution: 1e-3 * weight_distribution.draw(100), "flat", "no spread at all"),
    "three times": (
        lambda weight_distribution: 3 * weight_distribution.draw(100),
        "wide",
        r"too wide by a factor [2-4]\.\d \(ratio",
    ),
    "a third": (
        lambda weight_distribution: weight_distribution.draw(100) / 3,
        "narrow",
        r"too narrow by a factor [2-4]\.\d \(ratio 0\.[23]",
    ),
    "shuffled": (
        lambda weight_distribution: weight_distribution.draw(100, weight_distribution.std.roll(N // 2)),
        "misplaced",
        r"the right size on average \(ratio .*\), but not where it should be \(correlation -?0\.[0-4]",
    ),
    "one width": (
        lambda weight_distribution: weight_distribution.draw(100, weight_distribution.std.log().mean().exp().expand(N)),
        "misplaced",
        "but not where it should be",
    ),
    "shuffled and a tenth": (
        lambda weight_distribution: 0.1 * weight_distribution.draw(100, weight_distribution.std.roll(N // 2)),
        "narrow",
        r"too narrow by a factor .*; and not where it should be \(correlation",
    ),
    "two points": (
        lambda weight_distribution: two_points(weight_distribution, 100),
        "shape",
        "but of another shape .Wasserstein distance 0.[4-6]",
    ),
    "even wide, odd narrow": (
        lambda weight_distribution: weight_distribution.draw(
            100, weight_distribution.std * torch.tensor([5.0, 0.2], dtype=torch.float64).repeat(N // 2)
        ),
        "misplaced",
        "not where it should be .correlation .*, off by a factor [4-6]",
    ),
    "differences too small": (
        lambda weight_distribution: weight_distribution.draw(100, weight_distribution.std**0.1),
        "misplaced",
        r"off by a factor [23]\.",
    ),
    "differences too large": (
        lambda weight_distribution: weight_distribution.draw(100, weight_distribution.std**3),
        "misplaced",
        r"off by a factor \d+\.",
    ),
    "a fifth without spread": (
        lambda weight_distribution: weight_distribution.draw(100) * (torch.arange(N) >= N // 5)[:, None],
        "flat",
        "^no spread at 20 % of the inputs, where true replicates differ$",
    ),
    "elsewhere at some inputs": (
        lambda weight_distribution: (
            weight_distribution.draw(100) + 10 * weight_distribution.std[:, None] * (torch.arange(N) < 0.4 * N)[:, None]
        ),
        "centre",
        "the right size .* around another centre at (3|4). % of the inputs",
    ),
    "elsewhere": (
        lambda weight_distribution: weight_distribution.draw(100) + 4 * weight_distribution.std[:, None],
        "centre",
        "around another centre at (9.|100) % of the inputs, more than 2 standard deviations away$",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", range(5))
def test_faults_are_found(name: str, seed: int) -> None:
    make, finding, sentence = FAULTS[name]
    weight_distribution = Law(0.05, 1.2 if name.startswith("differences") else 0.8, seed)
    weight_distribution.std /= weight_distribution.std.log().mean().exp()
    found = compared(weight_distribution.draw(20), make(weight_distribution))
    assert found.finding == finding, found.verdict
    assert not found.faithful
    assert re.search(sentence, found.verdict), found.verdict
    assert str(found).startswith(found.verdict)


def test_where_true_spread_does_not_differ_places_are_judged_by_the_factor() -> None:
    weight_distribution = Law(0.0, 0.0, 0)
    off = (1.2 * weight_distribution.normal(N)).exp()
    found = compared(weight_distribution.draw(20), weight_distribution.draw(200, off / off.log().mean().exp()))
    assert found.correlation is None
    assert found.place.spread > 2
    assert found.finding == "misplaced"
    same = compared(weight_distribution.draw(20), weight_distribution.draw(200))
    assert same.faithful
    assert re.search("off by a factor 1.[01] at a typical input, true spread hardly differs", same.verdict)
    assert "right places" not in same.verdict


def test_a_band_of_one_width_does_not_follow_even_a_mild_true_spread() -> None:
    """log σ ~ N(0, 0.4²): one width is typically off by a factor of 1.5 only, but it does not follow at all."""
    for seed in range(5):
        weight_distribution = Law(0.05, 0.4, seed)
        found = compared(
            weight_distribution.draw(20),
            weight_distribution.draw(500, weight_distribution.std.log().mean().exp().expand(N)),
        )
        assert found.finding == "misplaced"
        assert found.correlation is not None
        assert abs(found.correlation) < 0.4


def test_a_correlation_that_is_anybodys_guess_is_not_reported() -> None:
    weight_distributions = [Law(0.1, 0.25, seed) for seed in range(40)]
    found = [
        compared(weight_distribution.draw(20), weight_distribution.draw(20), 20)
        for weight_distribution in weight_distributions
    ]
    places = [one.place for one in found]
    assert all(place.correlation is None or 0 < place.error <= spread.CLOSE for place in places)  # type: ignore[operator]
    assert all((place.correlation is None) == (place.error is None) == bool(place.reason) for place in places)
    assert {place.correlation is None for place in places} == {True, False}
    assert all(place.raw is not None for place in places)
    assert "these replicates are too few for a correlation" in {place.reason for place in places}


def test_few_replicates_cannot_tell() -> None:
    weight_distribution = Law(0.3, 0.5, 0)
    found = compared(weight_distribution.draw(5), weight_distribution.draw(200))
    assert found.finding == "unknown"
    assert re.match(r"cannot tell \(ratio .* with 5 true replicates: train 20 true replicates", found.verdict)
    assert (
        compared(weight_distribution.draw(5), 20 * weight_distribution.draw(200)).finding == "wide"
    )  # but five do tell a factor of twenty
    assert "train 24 true replicates" in compared(Law(50.0, 0.5, 3).draw(12), Law(50.0, 0.5, 3).draw(200)).verdict


@pytest.mark.parametrize("members", [2, 3, 5])
def test_too_few_replicates_of_the_predictor_are_not_blamed_on_the_truth(members: int) -> None:
    weight_distribution = Law(0.3, 0.5, 0)
    found = compared(weight_distribution.draw(20), weight_distribution.draw(members), members)
    assert found.finding == "unknown"
    assert found.correlation is None
    assert f"with 20 true replicates and {members} of the predictor: the predictor's own" in found.verdict
    assert ("give or take more than a factor 10" in found.verdict) == (members < 4)
    for text in (found.verdict, str(found)):
        assert "inf" not in text
        assert "0.00" not in text
    assert compared(weight_distribution.draw(20), weight_distribution.draw(1), 1).finding == "flat"


@pytest.mark.parametrize("side", ["true", "generated"])
def test_a_replicate_that_lies_far_out_is_named(side: str) -> None:
    weight_distribution = Law(50.0, 0.5, 0)
    t, s = weight_distribution.draw(20), weight_distribution.draw(300)
    assert compared(t, s).far_out_true == compared(t, s).far_out == ()
    (t if side == "true" else s)[7] += 300 * weight_distribution.std[:, None]
    found = compared(t, s)
    assert (found.far_out_true, found.far_out) == (((7,), ()) if side == "true" else ((), (7,)))
    who = "true replicate" if side == "true" else "the predictor's replicate"
    assert f"{who} 7 of seed 0 lies far out and makes up most of the spread" in found.verdict
    if found.finding == "unknown":
        assert "look at the training" in found.verdict
    assert (
        compared(weight_distribution.draw(5), weight_distribution.draw(5), 5).far_out_true == ()
    )  # one of five may well be the largest part


def test_inputs_without_spread_are_left_out_of_the_other_figures() -> None:
    weight_distribution = Law(0.0, 0.5, 0)
    t, s = weight_distribution.draw(20), weight_distribution.draw(200)
    s[:, :8] = 0.0
    found = compared(t, s)
    assert found.flat == pytest.approx(0.2)
    assert [finding for finding, _ in found._faults] == ["flat"]
    rest = compare_with_bootstrap(Given(s), Given(t, 20), PLACES[8:], num_samples=200, progress=False)
    assert (found.place.raw, found.ks, found.wasserstein) == pytest.approx((rest.place.raw, rest.ks, rest.wasserstein))
    assert found.ratio == pytest.approx(rest.ratio, rel=0.01)  # other places tell what chance shows
    t[:, :8] = 1.0  # nor do true replicates differ there: nothing to compare
    assert compared(t, s).flat == 0.0
    assert compared(t, s).ratio == pytest.approx(rest.ratio, rel=0.01)
    assert bool(torch.isfinite(compared(t, s).wasserstein_map).all())
    s[:, 8:] = 0.0
    none = compared(t, s)
    assert (none.size, none.ks, none.wasserstein, none.ratio) == (None, None, None, 0.0)
    assert str(none).startswith("no spread at all")


# -- thresholds, on both sides of each -----------------------------------------------------------------


@cache
def good() -> BootstrapAudit:
    weight_distribution = Law(0.05, 0.8, 0)
    return replace(
        compared(weight_distribution.draw(20), weight_distribution.draw(200)),
        place=StdAgreement(1.1, 1.0, 1.2, 0.9, 0.9, 0.9, 0.1),
    )


def sized(value: float, factor: float) -> BootstrapAudit:
    ratio = StdRatio(value, value / factor, value * factor, 0.9)
    return replace(good(), size=ratio, sizes=(ratio,))


@pytest.mark.parametrize(
    ("value", "factor", "finding", "word"),
    [
        (1.24, 1.2, "faithful", "faithful"),
        (1.26, 1.2, "wide", "somewhat too wide"),
        (1.26, 1.3, "unknown", "cannot tell"),
        (1 / 1.24, 1.2, "faithful", "faithful"),
        (1 / 1.26, 1.2, "narrow", "somewhat too narrow"),
        (1 / 1.26, 1.3, "unknown", "cannot tell"),
        (1.52, 1.2, "wide", "too wide"),
        (1.48, 1.2, "wide", "somewhat too wide"),
        (1 / 1.52, 1.2, "narrow", "too narrow"),
        (1 / 1.48, 1.2, "narrow", "somewhat too narrow"),
        (1.0, 1.48, "faithful", "faithful"),
        (1.0, 1.52, "unknown", "cannot tell"),
        (0.58, 1.64, "narrow", "somewhat too narrow by a factor 1.7 (ratio 0.58, between 0.35 and 0.95)"),
        (1.36, 1.125, "wide", "somewhat too wide by a factor 1.4 (ratio 1.36, between 1.21 and 1.53)"),
    ],
)
def test_right_size(value: float, factor: float, finding: str, word: str) -> None:
    assert (STD_RATIO_TOLERANCE, MAX_FACTOR) == (1.25, 1.5)
    found = sized(value, factor)
    assert found.finding == finding
    assert found.verdict.startswith(word)


@pytest.mark.parametrize(
    ("spread", "correlation", "finding"),
    [
        ((1.4, 1.3, 1.6), (0.9, 0.1), "faithful"),
        ((1.51, 1.45, 1.6), (0.9, 0.1), "unknown"),  # off, but not proven
        ((1.6, 1.51, 1.7), (0.9, 0.1), "misplaced"),  # whatever the correlation
        ((1.2, 1.0, 1.3), (0.51, 0.4), "faithful"),
        ((1.2, 1.0, 1.3), (0.49, 0.4), "unknown"),
        ((1.2, 1.0, 1.3), (0.4, 0.11), "unknown"),
        ((1.2, 1.0, 1.3), (0.4, 0.09), "misplaced"),
        ((1.2, 1.0, 1.48), None, "faithful"),
        ((1.2, 1.0, 1.52), None, "unknown"),
    ],
)
def test_right_place(spread: Any, correlation: Any, finding: str) -> None:
    assert MIN_CORRELATION == 0.5
    reason = "" if correlation else "true spread hardly differs between these inputs"
    found = replace(good(), place=StdAgreement(*spread, 0.9, 0.9, *(correlation or (None, None)), reason))
    assert found.finding == finding
    assert ("in the right places" in found.verdict) == (finding == "faithful" and correlation is not None)


def test_shares_of_places_and_the_shape() -> None:
    assert (MAX_SHIFT, MAX_FRACTION) == (2.0, 0.05)
    for name, finding, note in (("flat", "flat", "no spread"), ("away", "centre", "another centre")):
        assert replace(good(), **{name: 0.06}).finding == finding
        few = replace(good(), **{name: 0.04})
        assert few.faithful
        assert few.verdict.endswith(f"; {note} at 4 % of the inputs")
    assert replace(good(), away=0.2, away_limit=0.3).faithful  # chance may show it
    assert replace(good(), wasserstein=0.31, wasserstein_limit=0.3).finding == "shape"
    assert replace(good(), wasserstein=0.29, wasserstein_limit=0.3).faithful


@pytest.mark.parametrize(("shift", "share"), [(1.6, 0.0), (2.5, 1.0)])
def test_two_standard_deviations_are_far_away(shift: float, share: float) -> None:
    """K = 1000: centres and standard deviations are known to a few per cent."""
    weight_distribution = Law(0.0, 0.5, 0)
    found = compared(
        weight_distribution.draw(1000), weight_distribution.draw(1000) + shift * weight_distribution.std[:, None]
    )
    assert found.away == share
    assert found.shift == pytest.approx(shift, rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_a_correlation_needs_a_true_spread_that_differs_by_more_than_is_right(seed: int) -> None:
    """K = 400: log σ takes two values, STD_RATIO_TOLERANCE^±0.8 or ^±1.25 about their mean."""
    weight_distribution = Law(0.0, 0.0, seed)
    for power in (0.8, 1.25):
        std = STD_RATIO_TOLERANCE ** (power * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(N // 2))
        found = compared(weight_distribution.draw(400, std), weight_distribution.draw(400, std))
        assert (found.correlation is None) == (power < 1)


# -- several outputs -----------------------------------------------------------------------------------


def test_one_output_too_wide_and_the_other_too_narrow_are_both_said() -> None:
    weight_distribution = Law(0.1, 0.5, 0)
    t = torch.cat([weight_distribution.draw(20), weight_distribution.draw(20)], 2)
    found = compared(t, torch.cat([12 * weight_distribution.draw(300), weight_distribution.draw(300) / 10], 2))
    assert found.finding == "wide"
    assert re.match(
        r"too wide by a factor 1\d \(ratio 1.*\) in output 0; and too narrow by a factor .* in output 1", found.verdict
    )
    assert [line.split()[0] for line in str(found).splitlines()[-3:]] == ["output", "0", "1"]
    flat = compared(t, torch.cat([weight_distribution.draw(300), torch.zeros(300, N, 1)], 2))
    assert flat.finding == "flat"
    assert "no spread at 50 % of the outputs at these inputs, nowhere in output 1, where" in flat.verdict
    three = compared(
        t.repeat(1, 1, 2),
        torch.cat([weight_distribution.draw(300), *(4 * weight_distribution.draw(300) for _ in range(3))], 2),
    )
    assert three.finding == "wide"  # over all of them, and no list


def test_the_intervals_of_outputs_hold_together() -> None:
    """Ten outputs: 95 % of the seeds have no interval that misses. An output that may be off is not passed over."""
    missed = 0
    for seed in range(60):
        weight_distribution = Law(0.2, 0.5, seed)
        t, s = (torch.cat([weight_distribution.draw(num) for _ in range(10)], 2) for num in (20, 100))
        found = compared(t, s)
        missed += not all(ratio is not None and ratio.low < 1 < ratio.high for ratio in found.sizes)
    assert scipy.stats.binomtest(missed, 60, 0.05, alternative="greater").pvalue > 1e-3
    ratio = StdRatio(1.52, 0.9, 2.6, 0.9)
    doubt = replace(good(), sizes=(*good().sizes, ratio))
    assert doubt.finding == "unknown"
    assert replace(good(), sizes=(*good().sizes, replace(ratio, value=1.48))).faithful


# -- outputs of all kinds ------------------------------------------------------------------------------


def figures(found: BootstrapAudit) -> list[float | None]:
    assert found.size is not None
    place = found.place
    more = [place.spread, place.correlation, place.raw, found.ks, found.wasserstein]
    return [found.size.value, found.size.low, found.size.high, *more]


def test_units_do_not_matter_and_outputs_of_several_units_are_compared_each_by_itself() -> None:
    """With a second output a thousand times as large, differences between outputs are no correlation over inputs."""
    weight_distribution = Law(0.05, 0.8, 0)
    t, s = weight_distribution.draw(20), weight_distribution.draw(100, weight_distribution.std.roll(N // 2))
    found = compared(t, s)
    assert figures(compared(1e3 * t - 7, 1e3 * s + 5)) == pytest.approx(figures(found))
    both = compared(torch.cat([t, 1e3 * t], 2), torch.cat([s, 1e3 * s], 2))
    for name in ("correlation", "raw", "reliability"):
        assert getattr(both.place, name) == pytest.approx(getattr(found.place, name), rel=1e-6)
    assert both.ks == pytest.approx(found.ks)
    assert both.ratio == pytest.approx(found.ratio, rel=0.01)
    assert both.finding == "misplaced"


def test_logits_are_compared_but_for_a_shift_of_all_of_them() -> None:
    weight_distribution = Law(0.1, 0.5, 0)
    t, s = (torch.cat([weight_distribution.draw(num) for _ in range(3)], 2) for num in (20, 100))
    found = compared(t, s, classes=True)
    shifted = compared(
        t + 9 * weight_distribution.normal(20, N, 1), s + weight_distribution.normal(100, N, 1), classes=True
    )
    assert figures(shifted) == pytest.approx(figures(found))
    torch.testing.assert_close(found.true_std, (t - t.mean(2, keepdim=True)).std(0))
    assert "logits of classes, less their mean" in str(found)
    assert compared(t + 9 * weight_distribution.normal(20, N, 1), s).finding == "narrow"  # as outputs of a regression
    one = compared(t[:, :, :1], s[:, :, :1], classes=True)  # a single logit has no shift to lose
    assert figures(one) == pytest.approx(figures(compared(t[:, :, :1], s[:, :, :1])))


def test_pixels_count_as_inputs_of_their_own() -> None:
    weight_distribution = Law(0.1, 0.5, 0)
    t, s = weight_distribution.draw(20), weight_distribution.draw(100)
    maps = [part.view(-1, 10, 2, 2).movedim(2, 3)[:, :, None].contiguous() for part in (t, s)]  # (B, N, 1, 2, 2)
    found = compared(*maps)
    assert found.std.shape == found.ks_map.shape == (10, 1, 2, 2)
    assert figures(found)[3:] == pytest.approx(figures(compared(t, s))[3:])
    torch.testing.assert_close(found.std, maps[1].std(0))
    two = compared(*(part.view(-1, 10, 2, 2) for part in (t, s)))  # (B, N, 2, 2): two outputs of two voxels
    torch.testing.assert_close(two.std, s.view(-1, 10, 2, 2).std(0))
    assert "10 inputs with pixels" in str(found)


def test_batches_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_distribution = Law(0.1, 0.5, 0)
    t, s = weight_distribution.draw(20), weight_distribution.draw(100)
    whole = compared(t, s)
    monkeypatch.setattr("neuboots.evaluation.bootstrap_audit._HELD", 7 * 120)
    parts = compared(t, s)
    assert figures(parts) == pytest.approx(figures(whole))
    torch.testing.assert_close(parts.std, whole.std)
    torch.testing.assert_close(parts.ks_map, whole.ks_map)
    truth, predictor = Given(t, 20), Given(s)
    rows = TensorDataset(PLACES, torch.zeros(N))
    for x in ({"number": PLACES}, (PLACES, PLACES), rows, TensorDataset(PLACES), DataLoader(rows, batch_size=9)):
        assert figures(compare_with_bootstrap(predictor, truth, x, num_samples=100, progress=False)) == pytest.approx(
            figures(whole)
        )


def test_memory_does_not_grow_with_the_replicates(monkeypatch: pytest.MonkeyPatch) -> None:
    """B times the inputs of a batch is bounded: with ten times the replicates, a tenth of the inputs at once; and
    pixels are cut, of one input too."""
    seen: list[int] = []

    @dataclass(frozen=True, eq=False)
    class Watched(Given):
        def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
            seen.append(num_samples * len(x))
            return super().stream(x, num_samples, seed=seed)

    weight_distribution = Law(0.1, 0.5, 0)
    t, s = weight_distribution.draw(20), weight_distribution.draw(400)
    monkeypatch.setattr("neuboots.evaluation.bootstrap_audit._HELD", 2000)
    for num_samples in (40, 400):
        compare_with_bootstrap(Watched(s), Given(t, 20), PLACES, num_samples=num_samples, progress=False)
    assert max(seen) <= 2000
    sizes: list[int] = []
    real = spread.Sets.log_std

    def log_std(self: spread.Sets, samples: Tensor) -> Tensor:
        found = real(self, samples)
        sizes.append(max(found.numel(), samples.numel()))
        return found

    monkeypatch.setattr(spread.Sets, "log_std", log_std)
    maps = compared(t.view(20, 1, 1, N), s.view(400, 1, 1, N))
    assert max(sizes) <= 2000
    assert len(sizes) > 10
    torch.testing.assert_close(maps.std, s.view(400, 1, 1, N).std(0))


def test_one_input_has_no_correlation() -> None:
    weight_distribution = Law(0.0, 0.5, 0)
    found = compared(weight_distribution.draw(20)[:, :1], weight_distribution.draw(200)[:, :1])
    assert (found.correlation, found.place.raw, found.place.reliability) == (None, None, None)
    assert "there is one input" in found.verdict
    assert "places" not in found.verdict
    assert "hardly" not in found.verdict
    assert found.size is not None
    assert found.size.low < 1 < found.size.high


def test_members_that_are_only_repeated_count_once() -> None:
    weight_distribution = Law(0.1, 0.5, 0)
    t, s = weight_distribution.draw(20), weight_distribution.draw(10)
    found = compared(t, s, 10, num_samples=1000)
    assert found.num_samples == 10
    assert figures(found) == figures(compared(t, s, 10, num_samples=10))


# -- what is refused -----------------------------------------------------------------------------------


def test_bad_input_gets_a_sentence() -> None:
    weight_distribution = Law(0.1, 0.5, 0)
    t, s = weight_distribution.draw(20), weight_distribution.draw(30)
    with pytest.raises(ValueError, match="got a truth whose replicates are no members; expected .* K ≥ 4 members"):
        compare_with_bootstrap(Given(s), Given(t), PLACES, progress=False)
    with pytest.raises(ValueError, match="got 3 true replicates; expected"):
        compared(t[:3], s)
    with pytest.raises(ValueError, match="got num_samples=1; expected at least 2"):
        compared(t, s, num_samples=1)
    with pytest.raises(ValueError, match="got a Tensor; expected a predictor"):
        compare_with_bootstrap(t, Given(t, 20), PLACES, progress=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got inputs of type ndarray; expected a tensor"):
        compare_with_bootstrap(Given(s), Given(t, 20), PLACES.numpy(), progress=False)
    with pytest.raises(ValueError, match="expected at least one row"):
        compare_with_bootstrap(Given(s), Given(t, 20), {}, num_samples=30, progress=False)
    with pytest.raises(ValueError, match="got no inputs; expected at least one"):
        compare_with_bootstrap(Given(s), Given(t, 20), PLACES[:0], num_samples=30, progress=False)
    with pytest.raises(
        ValueError, match=r"got outputs \(40, 2\) of the predictor and \(40, 1\) of the true replicates"
    ):
        compared(t, s.repeat(1, 1, 2))
    with pytest.raises(ValueError, match="NaN or infinite outputs"):
        compared(t, s.where(s < s.max(), math.nan))
    with pytest.raises(ValueError, match="the 20 true replicates do not differ at these inputs"):
        compared(t[:1].repeat(20, 1, 1), s)


# -- nets on data --------------------------------------------------------------------------------------

RECIPE = TrainingConfig(epochs=10, batch_size=50, optimizer=partial(torch.optim.AdamW, lr=1e-2), progress=False)
BOOTSTRAP = BayesianBootstrap(nn.MSELoss(), num_members=16)


def model() -> nn.Module:
    return MLP(10, 1, widths=(12,))


@cache
def diabetes() -> tuple[TensorDataset, Tensor]:
    """scikit-learn's diabetes, standardised: 300 rows to train with, 142 inputs to ask about."""
    from sklearn.datasets import load_diabetes

    x, y = (torch.tensor(part) for part in load_diabetes(return_X_y=True))
    x, y = ((part - part.mean(0)) / part.std(0) for part in (x, y))
    return TensorDataset(x[:300].float(), y[:300].float()), x[300:].float()


@cache
def ensemble() -> Predictor:
    return BOOTSTRAP.fit(model, diabetes()[0], RECIPE)


def audited(predictor: Predictor) -> BootstrapAudit:
    data, x = diabetes()
    return audit_bootstrap(predictor, BOOTSTRAP, model, data, RECIPE, x, num_samples=200, progress=False)


def test_on_diabetes_a_second_bootstrap_is_faithful_and_others_are_not() -> None:
    """The very recipe that the ensemble was trained with: the audit trains other nets nevertheless."""
    data, x = diabetes()
    second = BOOTSTRAP.fit(model, data, replace(RECIPE, seed=1))
    state = torch.get_rng_state()
    found = audited(ensemble())
    assert found.finding == "faithful", found
    assert found.ks_map.min() > 0  # not the same nets
    assert found.num_true == found.num_samples == 16
    assert found.correlation is not None
    assert found.correlation > 0.8
    assert audited(Deterministic(nn.MSELoss()).fit(model, data, RECIPE)).finding == "flat"
    assert torch.equal(torch.get_rng_state(), state)
    for scale, finding in ((3.0, "wide"), (1.0, "faithful"), (1 / 3, "narrow")):
        scaled = ScaledPredictor(second, std_scale=(scale,))
        assert compare_with_bootstrap(scaled, ensemble(), x, progress=False).finding == finding


@pytest.mark.parametrize(
    "method",
    [
        NeuBoots.regression(),
        MCDropout(nn.MSELoss()),
        CalibratedNeuBoots(nn.MSELoss()),
        InfluenceBootstrap(nn.MSELoss()),
        InfluenceBootstrap(nn.MSELoss(), layers="all", num_calibration_fits=1),
    ],
    ids=["neuboots", "mc-dropout", "calibrated-neuboots", "influence", "whole net"],
)
def test_any_method_gets_a_verdict(method: Any) -> None:
    found = audited(method.fit(model, diabetes()[0], RECIPE))
    assert found.num_samples == 200
    assert found.true_std.shape == (142, 1)
    assert f"ratio {found.ratio:.2f}" in found.verdict
    assert "K = 16 true replicates, B = 200 of the predictor" in str(found)


def test_classes_are_known_by_their_targets() -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long())
    method = BayesianBootstrap(num_members=8)
    predictor = NeuBoots().fit(lambda: nn.Linear(3, 3), data, RECIPE)
    settings = {"num_samples": 50, "progress": False}
    config = TrainingConfig(epochs=2, progress=False)
    found = audit_bootstrap(predictor, method, lambda: nn.Linear(3, 3), data, config, x, **settings)
    assert found.classes
    assert not audit_bootstrap(
        predictor, method, lambda: nn.Linear(3, 3), data, config, x, logits=False, **settings
    ).classes


def test_whole_numbers_for_several_outputs_are_no_classes() -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    config = TrainingConfig(epochs=1, progress=False)
    method = BayesianBootstrap(nn.MSELoss(), num_members=8)
    for y, outputs in ((x[:, :2].round().long(), 2), (x[:, 0].round().long(), 1)):
        data, net = TensorDataset(x, y), partial(nn.Linear, 3, outputs)
        second = method.fit(net, data, config)
        assert not audit_bootstrap(second, method, net, data, config, x, num_samples=8, progress=False).classes


def test_a_recipe_with_a_folder_is_refused(tmp_path: Path) -> None:
    data, x = diabetes()
    with pytest.raises(ValueError, match="got a recipe with a folder, .* expected none, .*replace.recipe, folder=None"):
        audit_bootstrap(ensemble(), BOOTSTRAP, model, data, replace(RECIPE, folder=tmp_path), x, progress=False)


def test_a_stream_is_refused_before_anything_is_trained() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("read")

    with pytest.raises(ValueError, match="got a stream of unknown length"):
        audit_bootstrap(ensemble(), BOOTSTRAP, model, Endless(), RECIPE, diabetes()[1])
