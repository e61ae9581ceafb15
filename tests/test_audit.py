"""The audit: figures against other computations, corrections by simulation, verdicts on known replicates."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from oracle import standard_errors
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from neuboots import BayesianBootstrap, MCDropout, NeuBoots, Plain, Recipe, SquaredError
from neuboots.methods.scaling import ScaledPredictor
from neuboots.nets import MLP
from neuboots.prediction import Predictor, Stream
from neuboots.tasks.audit import Audit, audit, compare, spread
from neuboots.tasks.audit.distances import distances, distances_by_chance

N = 40
PLACES = torch.arange(N, dtype=torch.float64)[:, None]  # an input is its own number


@dataclass(frozen=True, eq=False)
class Given(Predictor):
    """Replicates that a test made up: (B, N, C, *), found by the number in the first column of x."""

    samples: Tensor
    num_distinct: int | None = None  # type: ignore[assignment]

    net = None

    def stream(self, x: Any, num_samples: int, *, seed: int) -> Stream:
        x = x["number"] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x
        out = self.samples[:num_samples, x[:, 0].long()]
        return Stream(num_samples, 1, lambda size: iter(out.split(size)))

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


def compared(true: Tensor, generated: Tensor, distinct: int | None = None, **options: Any) -> Audit:
    settings = {"num_samples": max(2, len(generated)), "progress": False} | options
    return compare(Given(generated, distinct), Given(true, len(true)), PLACES[: true.shape[1]], **settings)


# -- figures against other computations ----------------------------------------------------------------


@pytest.mark.parametrize("digits", [0, 1, 9])
def test_distances_are_those_of_scipy(digits: int) -> None:
    """Rounded numbers have ties within and between the samples."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(7, 30)).round(digits), rng.normal(0.5, 2, size=(20, 30)).round(digits)
    ks, wasserstein = distances(torch.from_numpy(a), torch.from_numpy(b))
    for k in range(30):
        assert float(ks[k]) == pytest.approx(scipy.stats.ks_2samp(a[:, k], b[:, k]).statistic, abs=1e-12)
        assert float(wasserstein[k]) == pytest.approx(scipy.stats.wasserstein_distance(a[:, k], b[:, k]), abs=1e-12)


def test_maps_are_those_of_numpy_and_scipy() -> None:
    law = Law(0.1, 0.5, 0)
    t, s = 3 + law.draw(9), 2 * law.draw(50)
    found = compared(t, s)
    true, generated = t.numpy()[..., 0], s.numpy()[..., 0]
    torch.testing.assert_close(found.std[:, 0].numpy(), generated.std(0, ddof=1))
    torch.testing.assert_close(found.true_std[:, 0].numpy(), true.std(0, ddof=1))
    assert found.shift == pytest.approx(
        np.sort(np.abs(generated.mean(0) - true.mean(0)) / true.std(0, ddof=1))[N // 2 - 1]
    )
    for k in range(N):
        t_k, s_k = true[:, k] - true[:, k].mean(), generated[:, k] - generated[:, k].mean()
        wasserstein = scipy.stats.wasserstein_distance(t_k, s_k) / true[:, k].std(ddof=1)
        assert float(found.wasserstein_map[k, 0]) == pytest.approx(wasserstein)
        assert float(found.ks_map[k, 0]) == pytest.approx(
            scipy.stats.ks_2samp(t_k / t_k.std(), s_k / s_k.std()).statistic
        )
    assert found.ks == pytest.approx(float(found.ks_map.mean()))
    assert found.wasserstein == pytest.approx(float(found.wasserstein_map.mean()))
    logs = np.log(generated.std(0, ddof=1)), np.log(true.std(0, ddof=1))
    assert found.raw_correlation == pytest.approx(np.corrcoef(*logs)[0, 1])


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
    error = spread.Sets.of(groups, seed=0).error(without)
    assert error == pytest.approx(2 * math.sqrt((groups - 1) / (groups - 3)) * float(values.std()) / math.sqrt(groups))
    assert error == pytest.approx(
        scipy.stats.t.ppf(0.975, groups - 1) * float(values.std()) / math.sqrt(groups), rel=0.02
    )


@pytest.mark.parametrize("count", [2, 5, 20])
def test_the_bias_of_a_log_standard_deviation_is_taken_off(count: int) -> None:
    logs = np.log(np.random.default_rng(0).normal(size=(count, 20_000)).std(0, ddof=1))
    assert abs(logs.mean() + spread._bias(count)) < standard_errors(3) * logs.std() / math.sqrt(20_000)


def test_chance_is_what_gaussian_samples_show() -> None:
    """An independent simulation; standard errors of both, 1000 pairs each; the limit is exceeded by 1 % of them."""
    mean, limit, wasserstein = distances_by_chance(10, 40, seed=0)
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=10), rng.normal(size=40)) for _ in range(1000)]
    pairs = [(a - a.mean(), b - b.mean(), a.std(ddof=1)) for a, b in pairs]
    ks = np.array([scipy.stats.ks_2samp(a / a.std(), b / b.std()).statistic for a, b, _ in pairs])
    w1 = np.array([scipy.stats.wasserstein_distance(a, b) / std for a, b, std in pairs])
    for mine, theirs in ((mean, ks), (wasserstein, w1)):
        assert abs(mine - theirs.mean()) < standard_errors(2) * theirs.std() * math.sqrt(2 / 1000)
    assert 0.001 < (ks > limit).mean() < 0.025


# -- corrections, by simulation ------------------------------------------------------------------------

SEEDS = 100


@cache
def simulated(length: float, num_true: int, num_samples: int, distinct: bool) -> list[Audit]:
    """True ratio 1.7, correlation 0.6 between log standard deviations, whose difference has variance 0.2."""
    found = []
    for seed in range(SEEDS):
        law = Law(length, 0.5, seed)
        std = 1.7 * (0.6 * law.std.log() + 0.8 * 0.5 * law.normal(N)).exp()
        std = std * (law.std.log().mean() - std.log().mean() + math.log(1.7)).exp()  # the geometric mean is exact
        found.append(compared(law.draw(num_true), law.draw(num_samples, std), num_samples if distinct else None))
    return found


CASES = [(0.0, 20, 100, False), (0.3, 20, 100, False), (50.0, 20, 100, False), (0.1, 12, 20, True)]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_case
def test_the_ratio_is_unbiased_and_its_interval_covers(case: tuple[float, int, int, bool]) -> None:
    """Whether inputs are missed together (length 50) or each by itself (0); K = 12 or 20, B = 20 or 100."""
    found = simulated(*case)
    logs = np.log([one.ratio for one in found])
    assert abs(logs.mean() - math.log(1.7)) < standard_errors(len(CASES)) * logs.std() / math.sqrt(SEEDS)
    hits = sum(one.ratio_low < 1.7 < one.ratio_high for one in found)
    assert scipy.stats.binomtest(hits, SEEDS, 0.95).pvalue > 1e-3 / len(CASES)


@every_case
def test_the_corrected_correlation_is_unbiased_where_the_raw_one_is_too_small(
    case: tuple[float, int, int, bool],
) -> None:
    """Of N = 40 inputs a correlation has a bias of −ρ(1 − ρ²)/2N = −0.005 of its own, which both have."""
    found = simulated(*case)
    assert all(one.correlation is not None and one.raw_correlation is not None for one in found)
    corrected, raw = (np.array([getattr(one, name) for one in found]) for name in ("correlation", "raw_correlation"))
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
    corrected = np.array([math.log(one.ratio_spread) ** 2 for one in found])
    assert abs(corrected.mean() - 0.2) < standard_errors(2 * len(CASES)) * corrected.std() / math.sqrt(SEEDS)
    crude = np.array([float((one.std / one.true_std).log().var()) for one in found])
    if case[0] != 50.0:
        assert crude.mean() > 0.2 + standard_errors(2 * len(CASES)) * crude.std() / math.sqrt(SEEDS)


# -- verdicts on known replicates ----------------------------------------------------------------------


@pytest.mark.parametrize(("length", "spread"), [(0.0, 0.5), (0.2, 0.0), (0.2, 0.5)])
@pytest.mark.parametrize("num_samples", [20, 100])
def test_true_replicates_are_called_faithful(length: float, spread: float, num_samples: int) -> None:
    """In 90 % of seeds or more, within binomial error, at K = 20: also for a second ensemble of 20 (B = 20)."""
    laws = [Law(length, spread, seed) for seed in range(80)]
    distinct = num_samples if num_samples == 20 else None
    hits = sum(compared(law.draw(20), law.draw(num_samples), distinct).faithful for law in laws)
    assert scipy.stats.binomtest(hits, 80, 0.9, alternative="less").pvalue > 1e-3 / 6


def two_points(law: Law, num: int) -> Tensor:
    """Replicates of the right mean and standard deviation that are one of two functions."""
    return law.draw(num).sign() * law.std[:, None]


FAULTS: dict[str, tuple[Callable[[Law], Tensor], str, str]] = {
    "constant": (lambda law: torch.zeros(100, N, 1), "flat", "no spread at all: 20 true replicates differ"),
    "nearly constant": (lambda law: 1e-3 * law.draw(100), "flat", "no spread at all"),
    "three times": (lambda law: 3 * law.draw(100), "wide", r"too wide by a factor [2-4]\.\d \(ratio"),
    "a third": (lambda law: law.draw(100) / 3, "narrow", r"too narrow by a factor [2-4]\.\d \(ratio 0\.[23]"),
    "shuffled": (
        lambda law: law.draw(100, law.std.roll(N // 2)),
        "misplaced",
        r"the right size on average \(ratio .*\), but not where it should be \(correlation -?0\.[0-4]",
    ),
    "one width": (
        lambda law: law.draw(100, law.std.log().mean().exp().expand(N)),
        "misplaced",
        "but not where it should be",
    ),
    "shuffled and a tenth": (
        lambda law: 0.1 * law.draw(100, law.std.roll(N // 2)),
        "narrow",
        r"too narrow by a factor .*, and not where it should be \(correlation",
    ),
    "two points": (lambda law: two_points(law, 100), "shape", "but of another shape .KS distance 0.[34]"),
    "elsewhere": (
        lambda law: law.draw(100) + 4 * law.std[:, None],
        "centre",
        r"around another centre, [345]\.\d standard deviations away",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", range(5))
def test_faults_are_found(name: str, seed: int) -> None:
    make, finding, sentence = FAULTS[name]
    law = Law(0.05, 0.8, seed)
    found = compared(law.draw(20), make(law))
    assert found.finding == finding
    assert not found.faithful
    assert re.search(sentence, found.verdict), found.verdict
    assert str(found).startswith(found.verdict)


def test_where_true_spread_does_not_differ_places_are_judged_by_the_factor() -> None:
    law = Law(0.0, 0.0, 0)
    off = (1.2 * law.normal(N)).exp()
    found = compared(law.draw(20), law.draw(200, off / off.log().mean().exp()))
    assert found.correlation is None
    assert found.ratio_spread > 2
    assert found.finding == "misplaced"
    same = compared(law.draw(20), law.draw(200))
    assert same.faithful
    assert "true spread hardly differs between these inputs" in same.verdict
    assert same.ratio_spread < 1.2


def test_a_band_of_one_width_does_not_follow_even_a_mild_true_spread() -> None:
    """log σ ~ N(0, 0.4²): one width is typically off by a factor of 1.5 only, but it does not follow at all."""
    for seed in range(5):
        law = Law(0.05, 0.4, seed)
        found = compared(law.draw(20), law.draw(500, law.std.log().mean().exp().expand(N)))
        assert found.finding == "misplaced"
        assert found.correlation is not None
        assert abs(found.correlation) < 0.4


def test_a_correlation_that_is_anybodys_guess_is_not_reported() -> None:
    laws = [Law(0.1, 0.25, seed) for seed in range(40)]
    found = [compared(law.draw(20), law.draw(20), 20) for law in laws]
    assert all(one.correlation is None or 0 < one.correlation_error <= spread.CLOSE for one in found)  # type: ignore[operator]
    assert all((one.correlation is None) == (one.correlation_error is None) for one in found)
    assert {one.correlation is None for one in found} == {True, False}
    assert all(one.raw_correlation is not None for one in found)


def test_few_replicates_cannot_tell() -> None:
    law = Law(0.1, 0.5, 0)
    found = compared(law.draw(5), law.draw(200))
    assert found.finding == "unknown"
    assert found.verdict.startswith("cannot tell with 5 true replicates (ratio")
    assert found.verdict.endswith("train 20 true replicates")
    assert compared(law.draw(5), 20 * law.draw(200)).finding == "wide"  # but five do tell a factor of twenty
    pair = compared(law.draw(20), law.draw(2), 2)
    assert pair.finding == "unknown"
    assert "cannot tell with 20 true replicates and 2 of the predictor" in pair.verdict
    assert pair.correlation is None
    assert math.isinf(pair.ratio_high)
    assert compared(law.draw(20), law.draw(1), 1).finding == "flat"


def test_inputs_without_spread_are_left_out_and_said() -> None:
    law = Law(0.0, 0.5, 0)
    t, s = law.draw(20), law.draw(200)
    s[:, :8] = 0.0
    found = compared(t, s)
    assert found.flat == pytest.approx(0.2)
    assert found.finding == "faithful"
    assert found.verdict.endswith("; no spread at 20 % of the outputs")
    rest = compare(Given(s), Given(t, 20), PLACES[8:], num_samples=200, progress=False)
    assert (found.ratio, found.raw_correlation) == pytest.approx((rest.ratio, rest.raw_correlation))
    t[:, :8] = 1.0  # nor do true replicates differ there: nothing to compare
    assert compared(t, s).flat == 0.0
    assert compared(t, s).ratio == pytest.approx(rest.ratio)
    assert bool(torch.isfinite(compared(t, s).wasserstein_map).all())


# -- outputs of all kinds ------------------------------------------------------------------------------


def figures(found: Audit) -> list[float | None]:
    names = ("ratio", "ratio_low", "ratio_high", "ratio_spread", "correlation", "raw_correlation", "ks", "wasserstein")
    return [getattr(found, name) for name in names]


def test_units_do_not_matter_and_outputs_of_several_units_are_compared_each_by_itself() -> None:
    """With a second output a thousand times as large, differences between outputs are no correlation over inputs."""
    law = Law(0.05, 0.8, 0)
    t, s = law.draw(20), law.draw(100, law.std.roll(N // 2))
    found = compared(t, s)
    assert figures(compared(1e3 * t - 7, 1e3 * s + 5)) == pytest.approx(figures(found))
    both = compared(torch.cat([t, 1e3 * t], 2), torch.cat([s, 1e3 * s], 2))
    for name in ("ratio", "correlation", "raw_correlation", "reliability", "ks"):
        assert getattr(both, name) == pytest.approx(getattr(found, name), rel=1e-6)
    assert both.finding == "misplaced"


def test_logits_are_compared_but_for_a_shift_of_all_of_them() -> None:
    law = Law(0.1, 0.5, 0)
    t, s = (torch.cat([law.draw(num) for _ in range(3)], 2) for num in (20, 100))
    found = compared(t, s, classes=True)
    shifted = compared(t + 9 * law.normal(20, N, 1), s + law.normal(100, N, 1), classes=True)
    assert figures(shifted) == pytest.approx(figures(found))
    torch.testing.assert_close(found.true_std, (t - t.mean(2, keepdim=True)).std(0))
    assert "logits of classes, less their mean" in str(found)
    assert compared(t + 9 * law.normal(20, N, 1), s).finding == "narrow"  # as outputs of a regression
    one = compared(t[:, :, :1], s[:, :, :1], classes=True)  # a single logit has no shift to lose
    assert figures(one) == pytest.approx(figures(compared(t[:, :, :1], s[:, :, :1])))


def test_pixels_count_as_inputs_of_their_own() -> None:
    law = Law(0.1, 0.5, 0)
    t, s = law.draw(20), law.draw(100)
    maps = [part.view(-1, 10, 2, 2).movedim(2, 3)[:, :, None].contiguous() for part in (t, s)]  # (B, N, 1, 2, 2)
    found = compared(*maps)
    assert found.std.shape == found.ks_map.shape == (10, 1, 2, 2)
    assert figures(found) == pytest.approx(figures(compared(t, s)))
    torch.testing.assert_close(found.std, maps[1].std(0))
    two = compared(*(part.view(-1, 10, 2, 2) for part in (t, s)))  # (B, N, 2, 2): two outputs of two voxels
    torch.testing.assert_close(two.std, s.view(-1, 10, 2, 2).std(0))
    assert "10 inputs with pixels" in str(found)


def test_batches_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    law = Law(0.1, 0.5, 0)
    t, s = law.draw(20), law.draw(100)
    whole = compared(t, s)
    monkeypatch.setattr("neuboots.tasks.audit.comparison._HELD", 7 * 120)
    parts = compared(t, s)
    assert figures(parts) == pytest.approx(figures(whole))
    assert torch.equal(parts.std, whole.std)
    assert torch.equal(parts.ks_map, whole.ks_map)
    truth, predictor = Given(t, 20), Given(s)
    for x in ({"number": PLACES}, (PLACES, PLACES)):
        assert figures(compare(predictor, truth, x, num_samples=100, progress=False)) == pytest.approx(figures(whole))


def test_memory_does_not_grow_with_the_replicates(monkeypatch: pytest.MonkeyPatch) -> None:
    """B times the inputs of a batch is bounded: with ten times the replicates, a tenth of the inputs at once."""
    seen: list[int] = []

    @dataclass(frozen=True, eq=False)
    class Watched(Given):
        def stream(self, x: Any, num_samples: int, *, seed: int) -> Stream:
            seen.append(num_samples * len(x))
            return super().stream(x, num_samples, seed=seed)

    law = Law(0.1, 0.5, 0)
    t, s = law.draw(20), law.draw(400)
    monkeypatch.setattr("neuboots.tasks.audit.comparison._HELD", 2000)
    for num_samples in (40, 400):
        compare(Watched(s), Given(t, 20), PLACES, num_samples=num_samples, progress=False)
    assert max(seen) <= 2000


def test_one_input_has_no_correlation() -> None:
    law = Law(0.0, 0.5, 0)
    found = compared(law.draw(20)[:, :1], law.draw(200)[:, :1])
    assert (found.correlation, found.raw_correlation, found.reliability) == (None, None, None)
    assert found.ratio_low < 1 < found.ratio_high


def test_members_that_are_only_repeated_count_once() -> None:
    law = Law(0.1, 0.5, 0)
    t, s = law.draw(20), law.draw(10)
    found = compared(t, s, 10, num_samples=1000)
    assert found.num_samples == 10
    assert figures(found) == figures(compared(t, s, 10, num_samples=10))


# -- what is refused -----------------------------------------------------------------------------------


def test_bad_input_gets_a_sentence() -> None:
    law = Law(0.1, 0.5, 0)
    t, s = law.draw(20), law.draw(30)
    with pytest.raises(ValueError, match="got a truth whose replicates are no members; expected .* K ≥ 4 members"):
        compare(Given(s), Given(t), PLACES, progress=False)
    with pytest.raises(ValueError, match="got 3 true replicates; expected"):
        compared(t[:3], s)
    with pytest.raises(ValueError, match="got num_samples=1; expected at least 2"):
        compared(t, s, num_samples=1)
    with pytest.raises(ValueError, match="got a Tensor; expected a predictor"):
        compare(t, Given(t, 20), PLACES, progress=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got no inputs; expected at least one"):
        compare(Given(s), Given(t, 20), PLACES[:0], num_samples=30, progress=False)
    with pytest.raises(
        ValueError, match=r"got outputs \(40, 2\) of the predictor and \(40, 1\) of the true replicates"
    ):
        compared(t, s.repeat(1, 1, 2))
    with pytest.raises(ValueError, match="NaN or infinite outputs"):
        compared(t, s.where(s < s.max(), math.nan))
    with pytest.raises(ValueError, match="the 20 true replicates do not differ at these inputs"):
        compared(t[:1].repeat(20, 1, 1), s)


# -- nets on data --------------------------------------------------------------------------------------

RECIPE = Recipe(epochs=10, batch_size=50, optimizer=partial(torch.optim.AdamW, lr=1e-2), progress=False)
BOOTSTRAP = BayesianBootstrap(SquaredError(), num_members=16)


def make_net() -> nn.Module:
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
    return BOOTSTRAP.fit(make_net, diabetes()[0], RECIPE)


def audited(predictor: Predictor) -> Audit:
    data, x = diabetes()
    return audit(predictor, BOOTSTRAP, make_net, data, RECIPE, x, num_samples=200, progress=False)


def test_on_diabetes_a_second_bootstrap_is_faithful_and_others_are_not() -> None:
    """The very recipe that the ensemble was trained with: the audit trains other nets nevertheless."""
    data, x = diabetes()
    second = BOOTSTRAP.fit(make_net, data, replace(RECIPE, seed=1))
    state = torch.get_rng_state()
    found = audited(ensemble())
    assert found.finding == "faithful", found
    assert found.ks_map.min() > 0  # not the same nets
    assert found.num_true == found.num_samples == 16
    assert found.correlation is not None
    assert found.correlation > 0.8
    assert audited(Plain(SquaredError()).fit(make_net, data, RECIPE)).finding == "flat"
    assert torch.equal(torch.get_rng_state(), state)
    for scale, finding in ((3.0, "wide"), (1.0, "faithful"), (1 / 3, "narrow")):
        scaled = ScaledPredictor(second, std_scale=(scale,))
        assert compare(scaled, ensemble(), x, progress=False).finding == finding


@pytest.mark.parametrize("method", [NeuBoots.regression(), MCDropout(SquaredError())], ids=["neuboots", "mc-dropout"])
def test_any_method_gets_a_verdict(method: Any) -> None:
    found = audited(method.fit(make_net, diabetes()[0], RECIPE))
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
    recipe = Recipe(epochs=2, progress=False)
    found = audit(predictor, method, lambda: nn.Linear(3, 3), data, recipe, x, **settings)
    assert found.classes
    assert not audit(predictor, method, lambda: nn.Linear(3, 3), data, recipe, x, classes=False, **settings).classes


def test_a_stream_is_refused_before_anything_is_trained() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("read")

    with pytest.raises(ValueError, match="got a stream of unknown length"):
        audit(ensemble(), BOOTSTRAP, make_net, Endless(), RECIPE, diabetes()[1])
