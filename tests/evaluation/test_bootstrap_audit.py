"""Bootstrap audit: statistics against references, corrections by simulation, findings on constructed replicates."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from _nets import Stored
from _reference import standard_errors
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import neuboots_paper.baselines  # noqa: F401  # registers GBS
from neuboots import (
    ArgumentError,
    BayesianBootstrap,
    Deterministic,
    InfluenceBootstrap,
    NeuBoots,
    Predictor,
    StandardBootstrap,
    TrainingConfig,
    create_method,
)
from neuboots._prng import derive_keys
from neuboots.evaluation import _audit_stats, bootstrap_audit
from neuboots.evaluation._audit_stats import (
    MAX_CORRELATION_ERROR,
    PermutationNull,
    ReplicateSubsets,
    StdAgreement,
    StdRatio,
    ks_and_wasserstein,
    standardize,
)
from neuboots.evaluation.bootstrap_audit import (
    BootstrapAudit,
    WeightAudit,
    audit_bootstrap,
    audit_weights,
    compare_with_bootstrap,
    refit_with_weights,
)
from neuboots.nets import MLP
from neuboots.prediction import SampleStream
from neuboots.weights import assign_blocks, compute_strata

N = 40
INPUTS = torch.arange(N, dtype=torch.float64)[:, None]  # an input is its own number


@dataclass
class Process:
    """Smooth Gaussian functions times σ(x), log σ ~ N(0, spread²) at each of N inputs, with a correlation length."""

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

    def draw(self, count: int, std: Tensor | None = None) -> Tensor:
        """(count, N, 1)"""
        return ((self.normal(count, N) @ self.root.T) * (self.std if std is None else std))[..., None]


def compare(true: Tensor, generated: Tensor, distinct: int | None = None, **options: Any) -> BootstrapAudit:
    settings = {"num_samples": max(2, len(generated)), "progress": False} | options
    return compare_with_bootstrap(
        Stored(generated, distinct), Stored(true, len(true)), INPUTS[: true.shape[1]], **settings
    )


def statistics(found: BootstrapAudit) -> list[float | None]:
    ratio, agreement = found.std_ratio, found.agreement
    others = [agreement.factor, agreement.correlation, agreement.raw_correlation, found.ks, found.wasserstein]
    return [ratio.value, ratio.low, ratio.high, *others]


# -- statistics against references ---------------------------------------------------------------------


@pytest.mark.parametrize("digits", [0, 1, 9])
def test_distances_match_scipy(digits: int) -> None:
    """Rounded numbers have ties within and between the samples."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(7, 30)).round(digits), rng.normal(0.5, 2, size=(20, 30)).round(digits)
    ks, wasserstein = ks_and_wasserstein(torch.from_numpy(a), torch.from_numpy(b))
    for k in range(30):
        assert float(ks[k]) == pytest.approx(scipy.stats.ks_2samp(a[:, k], b[:, k]).statistic, abs=1e-12)
        assert float(wasserstein[k]) == pytest.approx(scipy.stats.wasserstein_distance(a[:, k], b[:, k]), abs=1e-12)


def test_maps_match_numpy_and_scipy() -> None:
    process = Process(0.1, 0.5, 0)
    t, s = 3 + process.draw(9), 2 * process.draw(50)
    found = compare(t, s)
    true, generated = t.numpy()[..., 0], s.numpy()[..., 0]
    torch.testing.assert_close(found.std[:, 0].numpy(), generated.std(0, ddof=1))
    torch.testing.assert_close(found.bootstrap_std[:, 0].numpy(), true.std(0, ddof=1))
    shift = np.abs(generated.mean(0) - true.mean(0)) / true.std(0, ddof=1)
    assert found.shift == pytest.approx(np.sort(shift)[N // 2 - 1])
    for k in range(N):
        pair = [(part[:, k] - part[:, k].mean()) / part[:, k].std() for part in (true, generated)]
        assert float(found.wasserstein_map[k, 0]) == pytest.approx(scipy.stats.wasserstein_distance(*pair))
        assert float(found.ks_map[k, 0]) == pytest.approx(scipy.stats.ks_2samp(*pair).statistic)
    assert found.wasserstein == pytest.approx(float(found.wasserstein_map.mean()))
    logs = np.log(generated.std(0, ddof=1)), np.log(true.std(0, ddof=1))
    assert found.agreement.raw_correlation == pytest.approx(np.corrcoef(*logs)[0, 1])


@pytest.mark.parametrize("count", [5, 33])
def test_standard_deviations_of_subsets(count: int) -> None:
    subsets = ReplicateSubsets.make(count, seed=0)
    samples = torch.randn(count, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    group = torch.arange(count) % subsets.num_groups
    for members, log in zip(subsets.members, subsets.log_std(samples), strict=True):
        torch.testing.assert_close(log, samples[members[group] > 0].std(0).log())
    one, other = subsets.halves(subsets.members)
    assert torch.equal(one + other, torch.ones(32, subsets.num_groups, dtype=torch.float64))
    leave_one_out = subsets.members[1 : 1 + subsets.num_groups]
    assert torch.equal(leave_one_out, 1 - torch.eye(subsets.num_groups, dtype=torch.float64))


@pytest.mark.parametrize("groups", [8, 20])
def test_jackknife_of_a_mean_is_its_standard_error(groups: int) -> None:
    values = torch.randn(groups, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    without = torch.cat([values.mean()[None], (values.sum() - values) / (groups - 1)])
    for count in (1, 10):
        error = ReplicateSubsets.make(groups, seed=0).jackknife_error(without, num_statements=count)
        student = scipy.stats.t.ppf(1 - 0.025 / count, groups - 1)
        assert error == pytest.approx(student * float(values.std()) / math.sqrt(groups))


def draw_standardized(kind: str, *shape: int, seed: int) -> Tensor:
    """Mean 0 and variance 1 (of t₃: about): Gaussian, heavy tails on both sides, or on one."""
    rng = np.random.default_rng(seed)
    draws = {
        "gaussian": lambda: rng.normal(size=shape),
        "t3": lambda: rng.standard_t(3, size=shape) / math.sqrt(3),
        "log-normal": lambda: (np.exp(rng.normal(size=shape)) - math.exp(0.5)) / math.sqrt((math.e - 1) * math.e),
    }
    return torch.from_numpy(draws[kind]())


@pytest.mark.parametrize(("num_true", "num_samples"), [(10, 60), (12, 12)])
@pytest.mark.parametrize("kind", ["gaussian", "log-normal"])
def test_permutation_null_is_that_of_two_samples(kind: str, num_true: int, num_samples: int) -> None:
    """Expectations by 4,000 pairs of one distribution. The pool is standardized, which removes some of the tails."""
    draw = partial(draw_standardized, kind)
    null = PermutationNull.permute(draw(num_true, 32, seed=1), draw(num_samples, 32, seed=2), max_shift=2.0, seed=0)
    t, s = draw(num_true, 4000, seed=3), draw(num_samples, 4000, seed=4)
    ks, wasserstein = (float(value.mean()) for value in ks_and_wasserstein(standardize(t), standardize(s)))
    assert (null.ks, null.wasserstein) == pytest.approx((ks, wasserstein), rel=0.1 if kind == "gaussian" else 0.2)
    assert null.wasserstein < null.wasserstein_limit < 1.5 * null.wasserstein
    assert null.log_ratio == pytest.approx(float((s.std(0) / t.std(0)).log().mean()), abs=0.02)


# -- corrections, by simulation ------------------------------------------------------------------------

SEEDS = 60
CASES: list[Any] = [(0.3, 20, 100, False), (0.1, 12, 20, True)]
CASES += [pytest.param(case, marks=pytest.mark.slow) for case in ((0.0, 20, 100, False), (50.0, 20, 100, False))]


@cache
def simulate(length: float, num_true: int, num_samples: int, distinct: bool) -> list[BootstrapAudit]:
    """True ratio 1.7, correlation 0.6 between log standard deviations, whose difference has variance 0.2."""
    found = []
    for seed in range(SEEDS):
        process = Process(length, 0.5, seed)
        std = (0.6 * process.std.log() + 0.8 * 0.5 * process.normal(N)).exp()
        std = std * (process.std.log().mean() - std.log().mean() + math.log(1.7)).exp()  # the geometric mean is exact
        found.append(compare(process.draw(num_true), process.draw(num_samples, std), num_samples if distinct else None))
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ratio_and_correlation_are_unbiased(case: tuple[float, int, int, bool]) -> None:
    """A correlation over N = 40 inputs has a bias of −ρ(1 − ρ²)/2N = −0.005 of its own."""
    found = simulate(*case)
    sigmas = standard_errors(3 * len(CASES)) / math.sqrt(SEEDS)
    logs = np.log([one.ratio for one in found])
    assert abs(logs.mean() - math.log(1.7)) < sigmas * logs.std()
    hits = sum(one.std_ratio.low < 1.7 < one.std_ratio.high for one in found)
    assert scipy.stats.binomtest(hits, SEEDS, 0.95).pvalue > 1e-3 / len(CASES)
    corrected, raw = (
        np.array([getattr(one.agreement, n) for one in found]) for n in ("correlation", "raw_correlation")
    )
    assert abs(corrected.mean() - 0.6) < sigmas * corrected.std() + 0.005
    variance = np.array([math.log(one.agreement.factor) ** 2 for one in found])
    assert abs(variance.mean() - 0.2) < sigmas * variance.std()
    if case[0] != 50.0:  # an error that is equal at all inputs does not attenuate a correlation
        assert (corrected - raw).mean() > sigmas * (corrected - raw).std()


# -- findings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaussian", *(pytest.param(k, marks=pytest.mark.slow) for k in ("t3", "log-normal"))])
def test_replicates_of_one_distribution_have_no_defect(kind: str) -> None:
    """K = 20, B = 500: a defect in at most 10 % of seeds, within binomial error."""
    findings = []
    for seed in range(40):
        process = Process(0.05, 0.5, seed)
        t, s = (draw_standardized(kind, num, N, seed=1000 * num + seed) for num in (20, 500))
        if kind == "gaussian":
            t, s = t @ process.root.T, s @ process.root.T
        findings.append(compare((t * process.std)[..., None], (s * process.std)[..., None]).finding)
    wrong = sum(finding not in ("faithful", "inconclusive") for finding in findings)
    assert scipy.stats.binomtest(wrong, 40, 0.1, alternative="greater").pvalue > 1e-3 / 4
    if kind == "gaussian":
        assert scipy.stats.binomtest(findings.count("faithful"), 40, 0.9, alternative="less").pvalue > 1e-3 / 4


DEFECTS: dict[str, tuple[Callable[[Process], Tensor], str]] = {
    "constant": (lambda p: torch.zeros(100, N, 1), "no spread"),
    "nearly constant": (lambda p: 1e-3 * p.draw(100), "no spread"),
    "three times": (lambda p: 3 * p.draw(100), "wide"),
    "a third": (lambda p: p.draw(100) / 3, "narrow"),
    "shuffled": (lambda p: p.draw(100, p.std.roll(N // 2)), "misplaced"),
    "one width": (lambda p: p.draw(100, p.std.log().mean().exp().expand(N)), "misplaced"),
    "shuffled and a tenth": (lambda p: 0.1 * p.draw(100, p.std.roll(N // 2)), "narrow"),
    "two points": (lambda p: p.draw(100).sign() * p.std[:, None], "shape"),
    "differences too small": (lambda p: p.draw(100, p.std**0.1), "misplaced"),
    "differences too large": (lambda p: p.draw(100, p.std**3), "misplaced"),
    "a fifth constant": (lambda p: p.draw(100) * (torch.arange(N) >= N // 5)[:, None], "no spread"),
    "shifted": (lambda p: p.draw(100) + 4 * p.std[:, None], "shifted"),
    "shifted at some inputs": (
        lambda p: p.draw(100) + 10 * p.std[:, None] * (torch.arange(N) < 0.4 * N)[:, None],
        "shifted",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.parametrize("seed", range(3))
def test_defects_are_found(name: str, seed: int) -> None:
    make, finding = DEFECTS[name]
    process = Process(0.05, 1.2 if name.startswith("differences") else 0.8, seed)
    process.std /= process.std.log().mean().exp()
    found = compare(process.draw(20), make(process))
    assert found.finding == finding, found.verdict
    assert not found.faithful
    assert str(found).startswith(found.verdict)


def test_constant_bootstrap_spread_is_judged_by_the_factor() -> None:
    process = Process(0.0, 0.0, 0)
    off = (1.2 * process.normal(N)).exp()
    found = compare(process.draw(20), process.draw(200, off / off.log().mean().exp()))
    assert found.correlation is None
    assert found.agreement.factor > 2
    assert found.finding == "misplaced"
    assert compare(process.draw(20), process.draw(200)).faithful


def test_uncertain_correlation_is_not_reported() -> None:
    found = [compare((p := Process(0.1, 0.25, seed)).draw(20), p.draw(20), 20).agreement for seed in range(40)]
    assert {agreement.correlation is None for agreement in found} == {True, False}
    assert all((a.correlation is None) == (a.error is None) == bool(a.reason) for a in found)
    assert all(a.error is None or 0 < a.error <= MAX_CORRELATION_ERROR for a in found)


@pytest.mark.parametrize(("num_true", "members"), [(5, 200), (20, 2), (20, 5)])
def test_few_replicates_are_inconclusive(num_true: int, members: int) -> None:
    process = Process(0.3, 0.5, 0)
    found = compare(process.draw(num_true), process.draw(members), members)
    assert found.finding == "inconclusive"
    assert ("replicates of the bootstrap" in found.verdict) == (num_true == 5)
    assert "inf" not in found.verdict
    assert compare(process.draw(5), 20 * process.draw(200)).finding == "wide"  # a factor of twenty is significant
    assert compare(process.draw(20), process.draw(1), 1).finding == "no spread"


@pytest.mark.parametrize("side", ["bootstrap_outliers", "outliers"])
def test_outlying_replicate_is_named(side: str) -> None:
    process = Process(50.0, 0.5, 0)
    t, s = process.draw(20), process.draw(300)
    assert compare(t, s).bootstrap_outliers == compare(t, s).outliers == ()
    (s if side == "outliers" else t)[7] += 300 * process.std[:, None]
    found = compare(t, s)
    assert {name: getattr(found, name) for name in ("bootstrap_outliers", "outliers") if getattr(found, name)} == {
        side: (7,)
    }
    assert "replicate 7" in found.verdict


def test_constant_locations_do_not_count_elsewhere() -> None:
    process = Process(0.0, 0.5, 0)
    t, s = process.draw(20), process.draw(200)
    s[:, :8] = 0.0
    found = compare(t, s)
    rest = compare_with_bootstrap(Stored(s), Stored(t, 20), INPUTS[8:], num_samples=200, progress=False)
    assert found.constant == pytest.approx(0.2)
    assert (found.ks, found.wasserstein) == pytest.approx((rest.ks, rest.wasserstein))
    assert found.ratio == pytest.approx(rest.ratio, rel=0.01)  # other locations give the null
    t[:, :8] = 1.0  # nothing to compare there
    assert compare(t, s).constant == 0.0
    assert compare(t, s).ratio == pytest.approx(rest.ratio, rel=0.01)
    s[:, 8:] = 0.0
    none = compare(t, s)
    assert none.ratio == 0.0
    assert all(math.isnan(value) for value in (none.std_ratio.value, none.ks, none.null.ks))


@cache
def good() -> BootstrapAudit:
    process = Process(0.05, 0.8, 0)
    agreement = StdAgreement(1.1, 1.0, 1.2, 0.9, 0.9, 0.9, 0.1)
    return replace(compare(process.draw(20), process.draw(200)), agreement=agreement)


def ratio(value: float, factor: float) -> dict[str, Any]:
    found = StdRatio(value, value / factor, value * factor, 0.9)
    return {"std_ratio": found, "std_ratios": (found,)}


def agreement(*factors: float, correlation: float | None = 0.9, error: float | None = 0.1) -> dict[str, Any]:
    return {"agreement": StdAgreement(*factors, 0.9, 0.9, correlation, error, "reason")}


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        (ratio(1.24, 1.2), "faithful"),
        (ratio(1.26, 1.2), "wide"),
        (ratio(1.26, 1.3), "inconclusive"),
        (ratio(1 / 1.26, 1.2), "narrow"),
        (ratio(1.0, 1.48), "faithful"),
        (ratio(1.0, 1.52), "inconclusive"),
        (agreement(1.4, 1.3, 1.6), "faithful"),
        (agreement(1.51, 1.45, 1.6), "inconclusive"),
        (agreement(1.6, 1.51, 1.7), "misplaced"),
        (agreement(1.2, 1.0, 1.3, correlation=0.51, error=0.4), "faithful"),
        (agreement(1.2, 1.0, 1.3, correlation=0.49, error=0.4), "inconclusive"),
        (agreement(1.2, 1.0, 1.3, correlation=0.4, error=0.09), "misplaced"),
        (agreement(1.2, 1.0, 1.48, correlation=None, error=None), "faithful"),
        (agreement(1.2, 1.0, 1.52, correlation=None, error=None), "inconclusive"),
        ({"constant": 0.06}, "no spread"),
        ({"shifted": 0.06}, "shifted"),
        ({"shifted": 0.2, "shifted_limit": 0.3}, "faithful"),
        ({"wasserstein": 0.31, "wasserstein_limit": 0.3}, "shape"),
        ({"wasserstein": 0.29, "wasserstein_limit": 0.3}, "faithful"),
    ],
)
def test_thresholds_of_findings(changes: dict[str, Any], finding: str) -> None:
    limits = {name: value for name, value in changes.items() if name.endswith("_limit")}
    others = {name: value for name, value in changes.items() if name not in limits}
    assert replace(good(), null=replace(good().null, **limits), **others).finding == finding


# -- outputs and inputs --------------------------------------------------------------------------------


def test_outputs_are_judged_separately() -> None:
    process = Process(0.1, 0.5, 0)
    t = torch.cat([process.draw(20), process.draw(20)], 2)
    found = compare(t, torch.cat([12 * process.draw(300), process.draw(300) / 10], 2))
    assert [finding for finding, _ in found._defects][:2] == ["wide", "narrow"]
    assert "output 0" in found.verdict
    assert "output 1" in found.verdict
    assert compare(t, torch.cat([process.draw(300), torch.zeros(300, N, 1)], 2)).finding == "no spread"
    large = compare(torch.cat([t, 1e3 * t], 2), torch.cat([t, 1e3 * t], 2))  # units do not matter
    assert large.agreement.raw_correlation == pytest.approx(1.0)


def test_intervals_of_outputs_hold_jointly() -> None:
    missed = 0
    for seed in range(30):
        process = Process(0.2, 0.5, seed)
        t, s = (torch.cat([process.draw(num) for _ in range(10)], 2) for num in (20, 100))
        ratios = compare(t, s).std_ratios
        missed += not all(ratio.low < 1 < ratio.high for ratio in ratios)
    assert scipy.stats.binomtest(missed, 30, 0.05, alternative="greater").pvalue > 1e-3


def test_shift_of_all_logits_does_not_matter() -> None:
    process = Process(0.1, 0.5, 0)
    t, s = (torch.cat([process.draw(num) for _ in range(3)], 2) for num in (20, 100))
    found = compare(t, s, logits=True)
    shifted = compare(t + 9 * process.normal(20, N, 1), s + process.normal(100, N, 1), logits=True)
    assert statistics(shifted) == pytest.approx(statistics(found))
    torch.testing.assert_close(found.bootstrap_std, (t - t.mean(2, keepdim=True)).std(0))
    assert compare(t + 9 * process.normal(20, N, 1), s).finding == "narrow"


def test_pixels_are_locations() -> None:
    process = Process(0.1, 0.5, 0)
    t, s = process.draw(20), process.draw(100)
    maps = [part.view(-1, 10, 2, 2).movedim(2, 3)[:, :, None].contiguous() for part in (t, s)]  # (B, N, 1, 2, 2)
    found = compare(*maps)
    assert found.std.shape == found.ks_map.shape == (10, 1, 2, 2)
    assert statistics(found)[3:] == pytest.approx(statistics(compare(t, s))[3:])
    torch.testing.assert_close(found.std, maps[1].std(0))


def test_batches_do_not_matter_and_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Recorded(Stored):
        def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
            seen.append(num_samples * len(x))
            return super().stream(x, num_samples, seed=seed)

    process = Process(0.1, 0.5, 0)
    t, s = process.draw(20), process.draw(100)
    whole = compare(t, s)
    monkeypatch.setattr(bootstrap_audit, "_MAX_VALUES", 7 * 120)
    data = TensorDataset(INPUTS, torch.zeros(N))
    for x in (INPUTS, data, TensorDataset(INPUTS), DataLoader(data, batch_size=9)):
        found = compare_with_bootstrap(Recorded(s), Stored(t, 20), x, num_samples=100, progress=False)
        assert statistics(found) == pytest.approx(statistics(whole))
        torch.testing.assert_close(found.ks_map, whole.ks_map)
    assert max(seen) <= 7 * 120
    sizes: list[int] = []
    log_std = ReplicateSubsets.log_std

    def recorded(self: ReplicateSubsets, samples: Tensor) -> Tensor:
        sizes.append(samples.numel())
        return log_std(self, samples)

    monkeypatch.setattr(_audit_stats.ReplicateSubsets, "log_std", recorded)
    compare(t.view(20, 1, 1, N), s.view(100, 1, 1, N))  # the pixels of one input
    assert max(sizes) <= 7 * 120


def test_repeated_members_count_once_and_one_input_has_no_correlation() -> None:
    process = Process(0.1, 0.5, 0)
    t, s = process.draw(20), process.draw(10)
    assert compare(t, s, 10, num_samples=1000).num_samples == 10
    one = compare(t[:, :1], process.draw(200)[:, :1])
    assert (one.correlation, one.agreement.raw_correlation) == (None, None)


def test_invalid_comparisons_are_rejected() -> None:
    process = Process(0.1, 0.5, 0)
    t, s = process.draw(20), process.draw(30)
    with pytest.raises(ArgumentError, match="bootstrap"):
        compare(t[:3], s)
    with pytest.raises(ArgumentError, match="bootstrap"):
        compare_with_bootstrap(Stored(s), Stored(t), INPUTS, progress=False)
    with pytest.raises(ArgumentError, match="bootstrap"):
        compare(t[:1].repeat(20, 1, 1), s)
    with pytest.raises(ArgumentError, match="num_samples"):
        compare(t, s, num_samples=1)
    for wrong in (s.repeat(1, 1, 2), s.where(s < s.max(), math.nan)):
        with pytest.raises(ArgumentError, match="predictor"):
            compare(t, wrong)


# -- nets on data --------------------------------------------------------------------------------------

CONFIG = TrainingConfig(epochs=10, batch_size=50, optimizer=partial(torch.optim.AdamW, lr=1e-2), progress=False)
BOOTSTRAP = BayesianBootstrap(nn.MSELoss(), num_members=16)


def make_net() -> nn.Module:
    return MLP(10, 1, widths=(12,))


@cache
def diabetes() -> tuple[TensorDataset, Tensor]:
    x, y = (torch.tensor(part) for part in load_diabetes(return_X_y=True))
    x, y = ((part - part.mean(0)) / part.std(0) for part in (x, y))
    return TensorDataset(x[:300].float(), y[:300].float()), x[300:].float()


def audit(predictor: Predictor, **options: Any) -> BootstrapAudit:
    data, x = diabetes()
    return audit_bootstrap(predictor, BOOTSTRAP, make_net, data, CONFIG, x, num_samples=200, progress=False, **options)


def test_second_bootstrap_is_faithful_and_a_single_net_is_not(tmp_path: Path) -> None:
    data, x = diabetes()
    state = torch.get_rng_state()
    found = audit(BOOTSTRAP.fit(make_net, data, CONFIG))
    assert found.finding == "faithful", found
    assert found.ks_map.min() > 0  # other nets, though the config is the same
    assert found.num_bootstrap == found.num_samples == 16
    assert audit(Deterministic(nn.MSELoss()).fit(make_net, data, CONFIG)).finding == "no spread"
    predictor = NeuBoots.regression().fit(make_net, data, CONFIG)
    boots = audit(predictor)
    assert (boots.num_samples, boots.bootstrap_std.shape) == (200, (142, 1))
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ArgumentError, match="config"):
        audit_bootstrap(predictor, BOOTSTRAP, make_net, data, replace(CONFIG, folder=tmp_path), x)


def test_logits_are_inferred_from_the_targets() -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    config = TrainingConfig(epochs=1, progress=False)
    cases: list[tuple[Tensor, int, Any, bool]] = [
        ((x[:, 0] > 0).long(), 3, nn.CrossEntropyLoss(), True),
        (x[:, :2].round().long(), 2, nn.MSELoss(), False),
        (x[:, 0].round().long(), 1, nn.MSELoss(), False),
    ]
    for y, outputs, loss, expected in cases:
        data, method = TensorDataset(x, y), BayesianBootstrap(loss, num_members=8)
        net = partial(nn.Linear, 3, outputs)
        predictor = method.fit(net, data, config)
        found = audit_bootstrap(predictor, method, net, data, config, x, num_samples=8, progress=False)
        assert found.logits == expected


# -- the same weights ----------------------------------------------------------------------------------


def test_weight_audit_matches_numpy() -> None:
    rng = np.random.default_rng(0)
    refits = rng.normal(size=(12, 7, 2)) + np.arange(7)[:, None]  # a mean that differs between inputs does not count
    samples = 0.5 * refits + rng.normal(size=refits.shape) + 9.0
    audit = WeightAudit.from_samples(torch.from_numpy(samples).float(), torch.from_numpy(refits))
    a, b = ((values - values.mean(0)).reshape(12, -1) for values in (samples, refits))
    assert audit.correlation == pytest.approx(np.corrcoef(a.ravel(), b.ravel())[0, 1], abs=1e-6)
    assert audit.ratio == pytest.approx(a.std() / b.std(), abs=1e-6)
    left_out = [np.corrcoef(np.delete(a, k, 0).ravel(), np.delete(b, k, 0).ravel())[0, 1] for k in range(12)]
    jackknife = math.sqrt(11 / 12 * np.square(left_out - np.mean(left_out)).sum())
    assert audit.error == pytest.approx(jackknife, rel=0.05)  # means are those of all replicates
    assert "correlation 0." in str(audit)
    for wrong in (samples[:2], samples[:, :3]):
        with pytest.raises(ArgumentError, match="samples"):
            WeightAudit.from_samples(torch.from_numpy(wrong), torch.from_numpy(refits[: len(wrong)]))


def linear_problem(n: int = 200) -> tuple[TensorDataset, Tensor, nn.Linear]:
    """Rows, new inputs, and the linear net of least squares."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n + 50, 4, generator=generator).double()
    y = (x @ torch.tensor([1.0, -1.0, 0.5, 0.0]).double() + torch.randn(len(x), generator=generator))[:, None]
    net = nn.Linear(4, 1).double()
    solution = torch.linalg.lstsq(torch.cat([x[:n], torch.ones(n, 1)], 1).double(), y[:n]).solution
    with torch.no_grad():
        net.weight.copy_(solution[:4].T)
        net.bias.copy_(solution[4])
    return TensorDataset(x[:n], y[:n]), x[n:], net


def weighted_least_squares(data: TensorDataset, weights: Tensor, new: Tensor) -> Tensor:
    """Predictions of the least squares under each row of weights, (B, N, 1)."""
    x, y = data.tensors
    design, test = (torch.cat([part, torch.ones(len(part), 1).double()], 1) for part in (x, new))
    return torch.stack(
        [test @ torch.linalg.lstsq(w.sqrt()[:, None] * design, w.sqrt()[:, None] * y)[0] for w in weights]
    )


@pytest.mark.parametrize("num_blocks", [None, 40])
@pytest.mark.parametrize("layers", [1, "all"])
def test_row_weights_of_the_influence_bootstrap_are_those_of_its_replicates(
    layers: Any, num_blocks: int | None
) -> None:
    data, new, net = linear_problem()
    method = InfluenceBootstrap(nn.MSELoss(), layers=layers, num_blocks=num_blocks, ridge=0.0, residuals="raw")
    predictor = method.from_trained(net, data, seed=3)
    weights = method.row_weights(predictor, data, 30, seed=5, fit_seed=3).double()
    assert weights.shape == (30, 200)
    assert weights.mean().item() == pytest.approx(1.0, abs=0.02)
    samples = predictor.predict(new, 30, seed=5).samples
    right = WeightAudit.from_samples(samples, weighted_least_squares(data, weights, new))
    assert right.correlation > 0.97
    assert right.ratio == pytest.approx(1.0, abs=0.1)
    others = method.row_weights(predictor, data, 30, seed=6, fit_seed=3).double()
    assert abs(WeightAudit.from_samples(samples, weighted_least_squares(data, others, new)).correlation) < 0.4


def test_row_weights_of_ensembles_are_those_of_their_members() -> None:
    data, new, _ = linear_problem()
    config = TrainingConfig(
        epochs=200, batch_size=200, optimizer=partial(torch.optim.Adam, lr=0.1), precision="64-true", progress=False
    )
    for method in (BayesianBootstrap(nn.MSELoss(), num_members=10), StandardBootstrap(nn.MSELoss(), num_members=10)):
        predictor = method.fit(lambda: nn.Linear(4, 1), data, config)
        weights = method.row_weights(predictor, data, 10, seed=4, fit_seed=0).double()
        exact = weighted_least_squares(data, weights, new)
        assert WeightAudit.from_samples(predictor.predict(new, 10, seed=4).samples, exact).correlation > 0.99


def test_row_weights_of_neuboots_are_alpha_of_the_blocks() -> None:
    x, y = torch.randn(30, 3, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 2
    config = TrainingConfig(epochs=1, seed=2, progress=False)
    for method in (NeuBoots(), NeuBoots(num_blocks=5), create_method("gbs"), create_method("calibrated-neuboots")):
        predictor: Any = method.fit(lambda: MLP(3, 2, widths=(8,)), (x, y), config)
        weights = method.row_weights(predictor, (x, y), 4, seed=1, fit_seed=2)
        num_blocks = predictor.modified.num_blocks if method.info.name == "gbs" else predictor.generator.num_blocks
        blocks = assign_blocks(30, num_blocks, strata=compute_strata(y), seed=2)
        alphas = predictor.weight_distribution.sample(derive_keys(torch.arange(4), 1, "replicate"), num_blocks)
        torch.testing.assert_close(weights, alphas[:, blocks], rtol=0, atol=0)


def test_refits_tell_a_bootstrap_from_other_replicates() -> None:
    data, new, net = linear_problem()
    config = TrainingConfig(
        epochs=200, batch_size=200, optimizer=partial(torch.optim.Adam, lr=0.1), precision="64-true", progress=False
    )
    weights = torch.rand(5, 200, generator=torch.Generator().manual_seed(1)).double() - 0.1
    before = net.weight.detach().clone()
    refits = refit_with_weights(net, data, config, weights, loss=nn.MSELoss())(new)
    exact = weighted_least_squares(data, weights.clamp_min(0.0), new)  # in the order of the weights
    torch.testing.assert_close(refits, exact, rtol=0.0, atol=0.02)
    assert bool((net.weight == before).all())
    influence, paper = InfluenceBootstrap(nn.MSELoss()), NeuBoots.paper(nn.MSELoss())
    found = {
        name: audit_weights(predictor, method, net, data, config, new, progress=False)
        for name, method, predictor in (
            ("influence", influence, influence.from_trained(net, data)),
            ("paper", paper, paper.fit(lambda: nn.Linear(4, 1), data, config)),
        )
    }
    assert found["influence"].correlation > 0.9
    assert found["paper"].correlation < 0.6
    assert found["paper"].ratio > 3.0
    loader = DataLoader(TensorDataset(new, new[:, :1]), batch_size=7)
    batches = audit_weights(influence.from_trained(net, data), influence, net, data, config, loader, progress=False)
    assert batches.correlation == pytest.approx(found["influence"].correlation, abs=1e-9)


def test_logits_are_compared_without_their_mean() -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    data, config = TensorDataset(x, (x[:, 0] > 0).long()), TrainingConfig(epochs=20, progress=False)
    method = InfluenceBootstrap()
    predictor = method.fit(lambda: nn.Linear(3, 2), data, config)
    audits = [
        audit_weights(predictor, method, predictor.net, data, config, x, logits=logits, progress=False)
        for logits in (None, True, False)
    ]
    assert audits[0] == audits[1] != audits[2]


def test_methods_without_weights_and_few_replicates_are_rejected() -> None:
    data, new, net = linear_problem(20)
    config = TrainingConfig(epochs=1, precision="64-true", progress=False)
    for method in (Deterministic(nn.MSELoss()), create_method("deep-ensemble", loss=nn.MSELoss())):
        predictor = method.fit(lambda: nn.Linear(4, 1), data, config)
        assert method.row_weights(predictor, data, 3) is None
        with pytest.raises(ArgumentError, match=r"method='(deterministic|deep-ensemble)'"):
            audit_weights(predictor, method, net, data, config, new, progress=False)
    influence = InfluenceBootstrap(nn.MSELoss(), layers="all", max_kernel_rows=10)
    part = influence.from_trained(net, data)
    for call, name in (
        (lambda: audit_weights(part, influence, net, data, config, new, num_samples=2), "num_samples"),
        (lambda: audit_weights(part, influence, net, data, replace(config, folder=Path("x")), new), "folder"),
        (lambda: influence.row_weights(part, data, 3), "20 rows"),
        (lambda: influence.row_weights(part, data, 0), "num_samples"),
    ):
        with pytest.raises(ArgumentError, match=name):
            call()


def test_comparisons_without_meaning_are_rejected() -> None:
    values = torch.randn(5, 4, 1, generator=torch.Generator().manual_seed(0)).double()
    for scale in (1e-90, 1e-170, 1e200):
        audit = WeightAudit.from_samples(scale * values, scale * values)
        assert (audit.correlation, audit.ratio) == pytest.approx((1.0, 1.0))
    constant = WeightAudit.from_samples(torch.ones(5, 4, 1), values)
    assert (constant.correlation, constant.ratio) == (0.0, 0.0)
    for samples, refits, name in (
        (values, torch.ones(5, 4, 1), "refits"),
        (values, torch.zeros(5, 4, 1), "refits"),
        (values * torch.nan, values, "samples"),
        (values, values * torch.inf, "samples"),
    ):
        with pytest.raises(ArgumentError) as error:
            WeightAudit.from_samples(samples, refits)
        assert error.value.name == name


def test_weights_of_other_predictors_and_rows_are_rejected() -> None:
    data, _, net = linear_problem(30)
    config = TrainingConfig(epochs=1, precision="64-true", progress=False)
    head, whole = InfluenceBootstrap(nn.MSELoss()), InfluenceBootstrap(nn.MSELoss(), layers="all", ridge=1.0)
    bootstrap = BayesianBootstrap(nn.MSELoss(), num_members=4)
    of_head, of_whole = (method.from_trained(net, data) for method in (head, whole))
    members = bootstrap.fit(lambda: nn.Linear(4, 1), data, config)
    few, many = linear_problem(10)[0], linear_problem(60)[0]
    for call, name in (
        (lambda: bootstrap.row_weights(of_whole, data, 3), "predictor"),  # type: ignore[arg-type]
        (lambda: whole.row_weights(members, data, 3), "predictor"),  # type: ignore[arg-type]
        (lambda: replace(bootstrap, num_members=6).row_weights(members, data, 3), "predictor"),
        (lambda: StandardBootstrap(nn.MSELoss(), num_members=4).row_weights(members, data, 3), "predictor"),
        (lambda: whole.row_weights(of_whole, few, 3), "data"),
        (lambda: whole.row_weights(of_whole, many, 3), "data"),
        (lambda: head.row_weights(of_head, few, 3), "data"),
        (lambda: head.row_weights(of_head, data, 10**20), "num_samples"),
        (lambda: head.row_weights(of_head, data, 3, seed="a"), "seed"),  # type: ignore[arg-type]
        (lambda: head.row_weights(of_head, data, 3, fit_seed=None), "fit_seed"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentError) as error:
            call()
        assert error.value.name == name, name
