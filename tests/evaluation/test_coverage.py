"""Simulated coverage: bands of known coverage, exact bands of least squares, resuming from a folder."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from _reference import p_value, sandwich, standard_errors
from torch import Tensor, nn

from neuboots import BayesianBootstrap, InfluenceBootstrap, MCDropout, NeuBoots, TrainingConfig
from neuboots._prng import derive_keys, draw_normal
from neuboots._validation import ArgumentError
from neuboots.evaluation.coverage import (
    SYNTHETIC_REGRESSIONS,
    CoverageReport,
    SyntheticRegression,
    gaussian_noise,
    normal_design,
    simulate_coverage,
)
from neuboots.losses import GaussianNLL
from neuboots.prediction import Moments, Predictor, SampleStream
from neuboots.training import constant_schedule

CONFIG = TrainingConfig(epochs=1, progress=False)
LINE, SINE = SYNTHETIC_REGRESSIONS["line"], SYNTHETIC_REGRESSIONS["sine"]
QUIET = {"progress": False}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in the processes that a check forks: sums in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True, eq=False)
class FixedPredictor(Predictor):
    """N(mean(x), std²) replicates, each x by itself; the moments are exact."""

    mean: Tensor  # (N, C)
    std: float

    net = None

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        noise = draw_normal(derive_keys(torch.arange(num_samples), seed), self.mean.numel()).view(-1, *self.mean.shape)
        samples = self.mean + self.std * noise
        moments = Moments(self.mean, torch.full_like(self.mean, self.std))
        return SampleStream(num_samples, 1, lambda size: iter(samples.split(size)), moments)

    def config(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Oracle:
    """An estimator that errs by N(bias, error²) at every x, and predicts an error of N(0, (factor · error)²)."""

    truth: SyntheticRegression = SINE
    error: float = 0.1
    factor: float = 1.0
    bias: float = 0.0
    outputs: int = 1
    loss: Any = None

    def fit(self, model: Any, data: Any, config: TrainingConfig) -> Predictor:
        noise = draw_normal(derive_keys(torch.tensor([0]), config.seed, "error"), len(self.truth.grid))[0]
        mean = self.truth.values.double() + self.bias + self.error * noise
        others = torch.full((len(mean), self.outputs - 1), 9.0)  # such as log σ²
        return FixedPredictor(torch.cat([mean[:, None], others], 1), self.factor * self.error)


def checked(method: Any, **options: Any) -> CoverageReport:
    return simulate_coverage(method, None, SINE, CONFIG, **({"n": 5, "num_samples": 200} | QUIET | options))


# -- the counts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "level"), [(1.0, 0.95), (1.0, 0.5), (0.5, 0.95), (2.0, 0.9)])
def test_coverage_of_known_band_is_exact(factor: float, level: float) -> None:
    """mean ± factor · z · σ holds f with probability 2Φ(factor · z) − 1, at every x: binomial tests, Bonferroni."""
    R = 100
    found = checked(Oracle(factor=factor), num_datasets=R, level=level)
    exact = 2 * scipy.stats.norm.cdf(factor * scipy.stats.norm.ppf((1 + level) / 2)) - 1
    for hits in found.covered.sum(0).tolist():
        assert scipy.stats.binomtest(hits, R, exact).pvalue > p_value(4 * 41)
    assert abs(found.mean - exact) < standard_errors(4) * found.mean_standard_error
    width = 2 * scipy.stats.norm.ppf((1 + level) / 2) * factor * 0.1
    assert found.width.numpy() == pytest.approx(np.full(41, width), rel=1e-6)
    # a standard deviation of R numbers has a relative standard error of 1/√2R, that of all 41 · R far less
    assert (found.std_ratio.reciprocal() * factor - 1).abs().max() < standard_errors(4 * 41) / math.sqrt(2 * R)
    assert abs(found.mean_std_ratio / factor - 1) < standard_errors(4) / math.sqrt(2 * R * 41)
    assert found.bias.abs().max() < standard_errors(4 * 41) * 0.1 / math.sqrt(R)


def test_std_ratio_of_constant_estimator_is_infinite() -> None:
    found = checked(Oracle(error=0.0), num_datasets=3)
    assert found.mean == 1.0
    assert found.std_ratio.isposinf().all()
    assert math.isinf(found.mean_std_ratio)


def test_bias_is_measured() -> None:
    """Bias 3σ under a band of the right size: covered with probability Φ(z − 3) − Φ(−z − 3) = 15 %."""
    found = checked(Oracle(bias=0.3), num_datasets=200)
    expected = scipy.stats.norm.cdf(1.96 - 3)
    assert abs(found.mean - expected) < standard_errors(2) * found.mean_standard_error
    assert (found.bias - 0.3).abs().max() < standard_errors(2 * 41) * 0.1 / math.sqrt(200)
    assert found.mean_std_ratio == pytest.approx(1, abs=standard_errors(2) / math.sqrt(400 * 41))


def test_coverage_of_percentile_bands() -> None:
    """Percentiles of 200 replicates miss the level by the error of order statistics alone, about 1 %."""
    found = checked(Oracle(), num_datasets=200, interval="percentile", level=0.8)
    assert abs(found.mean - 0.8) < standard_errors(1) * found.mean_standard_error + 0.01
    assert float(found.width.std()) > 1e-3  # percentiles differ from x to x
    assert float(checked(Oracle(), num_datasets=2, interval="normal").width.std()) < 1e-12


def test_standard_errors_match_scatter_over_data_sets() -> None:
    """An estimator whose error is the same at all x: 41 inputs tell no more than one."""

    @dataclass(frozen=True)
    class Together(Oracle):
        def fit(self, model: Any, data: Any, config: TrainingConfig) -> Predictor:
            noise = draw_normal(derive_keys(torch.tensor([0]), config.seed, "error"), 1)
            return FixedPredictor(self.truth.values.double()[:, None] + self.error * noise, self.error)

    found = checked(Together(), num_datasets=100)
    one = math.sqrt(found.mean * (1 - found.mean) / 99)
    assert found.mean_standard_error == pytest.approx(one, rel=1e-9)
    assert found.standard_error == pytest.approx(math.sqrt(0.95 * 0.05 / 100))
    apart = checked(Oracle(), num_datasets=100)
    assert apart.mean_standard_error < found.mean_standard_error / 4  # 1/√41, with room


@pytest.mark.parametrize(
    ("num_datasets", "inputs", "level"), [(100, 41, 0.95), (20, 1, 0.5), (2000, 50, 0.95), (2, 41, 0.95)]
)
def test_worst_expected_by_chance_is_binomial_quantile(num_datasets: int, inputs: int, level: float) -> None:
    blank, covered = torch.zeros(inputs), torch.ones(num_datasets, inputs, dtype=torch.bool)
    found = CoverageReport(blank[:, None], blank, covered, *[blank] * 6, (), "", level, "normal", 1, 1, 0)
    lowest = round(found.worst_expected_by_chance * num_datasets)
    binomial = scipy.stats.binom(num_datasets, level)
    assert inputs * binomial.cdf(lowest - 1) <= 0.05 < inputs * binomial.cdf(lowest)


# -- what a data set is done with ------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
    """Notes the seeds that it is given; its band is wider for every other data set; draws from torch's own state."""

    fits: list[int] = field(default_factory=list)
    predictions: list[int] = field(default_factory=list)
    clock: list[float] = field(default_factory=lambda: [0.0])

    def fit(self, model: Any, data: Any, config: TrainingConfig) -> Predictor:
        torch.manual_seed(0)
        torch.rand(3)
        self.fits.append(config.seed)
        self.clock[0] += 10 * len(self.fits) ** 2
        return WatchedPredictor(SINE.values.double()[:, None], 1.0 + 2 * (len(self.fits) % 2), self)


@dataclass(frozen=True, eq=False)
class WatchedPredictor(FixedPredictor):
    by: Watched

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        self.by.predictions.append(seed)
        self.by.clock[0] += len(self.by.fits)
        return super().stream(x, num_samples, seed=seed)


def test_every_data_set_has_own_seeds() -> None:
    state = torch.get_rng_state()
    seen = Watched(), Watched(), Watched(), Watched()
    for method, options in zip(seen, ({}, {}, {"seed": 1}, {"config": replace(CONFIG, seed=1)}), strict=True):
        settings = {"config": CONFIG, "num_datasets": 4, "n": 5, "num_samples": 10} | QUIET | options
        simulate_coverage(method, None, SINE, **settings)
    first, again, seeded, config = seen
    assert (first.fits, first.predictions) == (again.fits, again.predictions)
    assert len({*first.fits, *seeded.fits, *config.fits}) == 12
    assert len({*first.predictions, *seeded.predictions}) == 8
    assert torch.equal(torch.get_rng_state(), state)


def test_band_std_is_root_mean_square_and_times_are_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits take 10, 40, 90, 160 and 250 ticks, predictions 1 … 5; the first band is three times as wide as the next."""
    method = Watched()
    monkeypatch.setattr("neuboots.evaluation.coverage.time.perf_counter", lambda: method.clock[0])
    found = checked(method, num_datasets=5)
    assert found.fit_seconds.tolist() == [10, 40, 90, 160, 250]
    assert found.predict_seconds.tolist() == [1, 2, 3, 4, 5]
    assert (found.metrics["fit_seconds"], found.metrics["predict_seconds"]) == (90, 3)
    torch.testing.assert_close(found.band_std, torch.full((41,), math.sqrt((3 * 9 + 2 * 1) / 5), dtype=torch.float64))


@pytest.mark.parametrize("interval", ["normal", "percentile"])
def test_num_samples_is_at_most_number_of_members(interval: Any) -> None:
    """B = 1000 of three members are three, also in their percentiles."""
    many, three = small(num_samples=1000, interval=interval), small(num_samples=3, interval=interval)
    assert many.num_samples == 3
    assert same(many, three)
    assert "of B = 3 replicates" in str(many)
    assert small(num_samples=2).num_samples == 2


# -- least squares -------------------------------------------------------------------------------------


FULL_BATCH = replace(CONFIG, batch_size=100, optimizer=partial(torch.optim.SGD, lr=0.5), lr_scheduler=constant_schedule)


@dataclass(frozen=True)
class LeastSquares:
    """The exact band of a line: White's standard errors, to which the bootstrap of least squares tends."""

    def fit(self, model: Any, data: Any, config: TrainingConfig) -> Predictor:
        x, y = (part.double().numpy() for part in data.tensors)
        X, grid = (np.column_stack([np.ones(len(part)), part]) for part in (x, LINE.grid.numpy()))
        theta = np.linalg.lstsq(X, y)[0]
        std = np.sqrt(np.einsum("gi,ij,gj->g", grid, sandwich(X, y), grid))
        return ExactPredictor(torch.from_numpy(grid @ theta)[:, None], torch.from_numpy(std)[:, None])


@dataclass(frozen=True, eq=False)
class ExactPredictor(FixedPredictor):
    std: Tensor  # type: ignore[assignment]

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        samples = self.mean.expand(num_samples, *self.mean.shape)
        return SampleStream(num_samples, 1, lambda size: iter(samples.split(size)), Moments(self.mean, self.std))


@pytest.mark.slow
def test_bootstrap_of_linear_net_covers_like_exact_band() -> None:
    """Both on the same data sets: their counts differ only where f lies at the very edge of a band, without a side, so
    that the mean difference is within k of its standard errors. The mean of K = 20 fits is σ/√K from the fit, with σ
    below 0.12, over R = 25 data sets: 4 standard errors are 0.02. A variance of K fits has a relative standard error of
    √(2/K), over 25 data sets 6.3 %, and its root half of that: 4 standard errors are 13 %."""
    config = replace(FULL_BATCH, epochs=15)
    options = {"num_datasets": 25, "n": 100, "num_samples": 20} | QUIET
    found = simulate_coverage(BayesianBootstrap(nn.MSELoss(), 20), lambda: nn.Linear(1, 1), LINE, config, **options)
    exact = simulate_coverage(LeastSquares(), None, LINE, config, **options)
    torch.testing.assert_close(found.bias, exact.bias, atol=0.02, rtol=0)
    differences = (found.covered.double() - exact.covered.double()).mean(1)
    assert abs(float(differences.mean())) <= standard_errors(1) * float(differences.std()) / math.sqrt(25)
    assert abs(found.mean - 0.95) < standard_errors(1) * found.mean_standard_error + 0.02
    assert found.band_std.numpy() == pytest.approx(exact.band_std.numpy(), rel=0.13)


@pytest.mark.parametrize("layers", [1, "all"])
def test_influence_bootstrap_of_linear_net_has_exact_band(layers: Any) -> None:
    """Dirichlet weights have the variance n/(n + 1); with raw residuals and no ridge the rest is White's band."""
    config = replace(FULL_BATCH, epochs=60)
    method = InfluenceBootstrap(nn.MSELoss(), layers=layers, ridge=0.0, residuals="raw", num_folds=0)
    options = {"num_datasets": 10, "n": 100, "num_samples": 2} | QUIET
    found = simulate_coverage(method, lambda: nn.Linear(1, 1), LINE, config, **options)
    exact = simulate_coverage(LeastSquares(), None, LINE, config, **options)
    torch.testing.assert_close(found.bias, exact.bias, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.band_std, exact.band_std * math.sqrt(100 / 101), atol=0, rtol=1e-4)


def test_exact_band_of_least_squares_covers_at_its_level() -> None:
    """n = 200: HC0 shrinks by 1 % at most, which costs 2 φ(z) z · 1 % = 0.3 points."""
    found = simulate_coverage(LeastSquares(), None, LINE, CONFIG, num_datasets=200, n=200, num_samples=2, **QUIET)
    assert abs(found.mean - 0.95) < standard_errors(1) * found.mean_standard_error + 0.003
    assert found.mean_std_ratio == pytest.approx(1, abs=standard_errors(1) / math.sqrt(400) + 0.01)


# -- any method ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", ["normal", "percentile"])
@pytest.mark.parametrize("name", ["sine", "jump", "uneven", "friedman"])
def test_every_problem_with_a_method(name: str, interval: Any) -> None:
    truth = SYNTHETIC_REGRESSIONS[name]
    d = truth.grid.shape[1]
    method = NeuBoots.regression() if name != "uneven" else MCDropout(nn.MSELoss())
    net = lambda: nn.Sequential(nn.Linear(d, 8), nn.ReLU(), nn.Linear(8, 1))  # noqa: E731
    found = simulate_coverage(
        method, net, truth, CONFIG, num_datasets=2, n=20, interval=interval, num_samples=10, **QUIET
    )
    assert found.x.shape == (len(truth.grid), d)
    assert found.rate.shape == found.width.shape == found.bias.shape == found.std_ratio.shape == (len(truth.grid),)
    assert len(found.bands) == 2
    assert torch.equal(found.bands[1].x, truth.draw(20, seed=0, number=1).tensors[0])
    torch.testing.assert_close(torch.stack([band.high - band.low for band in found.bands]).mean(0), found.width)
    covered = [(band.low <= found.truth) & (found.truth <= band.high) for band in found.bands]
    assert torch.equal(torch.stack(covered), found.covered)
    assert f"{name}: 2 data sets of n = 20, 95 % bands ({interval}) of B = 10" in str(found)
    assert (found.fit_seconds > 0).all()


def test_gaussian_head_is_evaluated_by_its_mean() -> None:
    method = BayesianBootstrap(GaussianNLL(), num_members=2)
    found = simulate_coverage(
        method, lambda: nn.Linear(1, 2), LINE, CONFIG, num_datasets=2, n=10, num_samples=2, **QUIET
    )
    assert found.width.shape == (41,)
    head = Oracle(outputs=2, loss=GaussianNLL())
    assert same(checked(Oracle(), num_datasets=5), checked(head, num_datasets=5))

    @dataclass(frozen=True)
    class Wrapped:
        inner: Any

        def fit(self, model: Any, data: Any, config: TrainingConfig) -> Predictor:
            fitted: Predictor = self.inner.fit(model, data, config)
            return fitted

    assert same(checked(Wrapped(head), num_datasets=5), checked(head, num_datasets=5))
    for outputs, loss in ((2, None), (2, nn.MSELoss()), (3, None)):
        with pytest.raises(ArgumentError, match="outputs"):
            checked(Oracle(outputs=outputs, loss=loss), num_datasets=2)
    with pytest.raises(ArgumentError, match="outputs"):
        checked(replace(head, outputs=4), num_datasets=2)


def test_problems_are_of_order_one() -> None:
    for truth in SYNTHETIC_REGRESSIONS.values():
        x, y = truth.draw(4000, seed=0, number=0).tensors
        f = truth.function(x)
        assert 0.5 < float(f.std()) < 1.05
        assert abs(float(f.mean())) < 0.1
        assert float((y - f).mean().abs()) < standard_errors(5) * float((y - f).std()) / math.sqrt(4000)
    assert float((y - f).std()) == pytest.approx(0.2, rel=standard_errors(1) / math.sqrt(8000))
    sine = SINE.draw(4000, seed=0, number=0).tensors
    noise = sine[1] - (math.pi / 2 * sine[0][:, 0]).sin()
    assert float(noise.var()) == pytest.approx(0.2, rel=standard_errors(1) * math.sqrt(2 / 4000))
    assert float(sine[0].std()) == pytest.approx(1, rel=standard_errors(1) / math.sqrt(8000))


# -- data sets, processes, folders ---------------------------------------------------------------------


def test_data_set_is_function_of_seed_and_number() -> None:
    a, b = LINE.draw(10, seed=1, number=2).tensors, LINE.draw(10, seed=1, number=2).tensors
    assert all(map(torch.equal, a, b))
    others = [LINE.draw(10, seed=1, number=3), LINE.draw(10, seed=2, number=2)]
    assert not any(torch.equal(a[0], other.tensors[0]) for other in others)


def same(a: CoverageReport, b: CoverageReport) -> bool:
    """Bit for bit, but for the seconds."""
    first, second = ({f.name: getattr(c, f.name) for f in fields(c)} for c in (a, b))
    tensors = [name for name, value in first.items() if isinstance(value, Tensor) and "seconds" not in name]
    assert len(tensors) == 7
    bands = zip(a.bands, b.bands, strict=True)
    return all(torch.equal(first[name], second[name]) for name in tensors) and all(
        torch.equal(getattr(p, f.name), getattr(q, f.name)) for p, q in bands for f in fields(p)
    )


def small(**options: Any) -> CoverageReport:
    method = BayesianBootstrap(nn.MSELoss(), num_members=3)
    settings = {"num_datasets": 5, "n": 10, "num_samples": 3} | QUIET | options
    return simulate_coverage(method, lambda: nn.Linear(1, 1), LINE, CONFIG, **settings)


@pytest.mark.slow
def test_result_is_independent_of_num_workers() -> None:
    state = torch.get_rng_state()
    assert same(small(), small(num_workers=2))
    assert torch.equal(torch.get_rng_state(), state)
    assert not same(small(), small(seed=1))


def test_interrupted_simulation_resumes_to_same_result(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Breaking:
        inner: Any = BayesianBootstrap(nn.MSELoss(), num_members=3)  # noqa: RUF009 -- frozen

        def fit(self, model: Any, data: Any, config: TrainingConfig) -> Predictor:
            if not (tmp_path / "repaired").exists() and len(list((tmp_path / "results").glob("job-*"))) == 2:
                raise RuntimeError("broken off")
            with (tmp_path / "fits").open("a") as log:
                log.write("x")
            return self.inner.fit(model, data, config)

    def attempt(problem: SyntheticRegression = LINE, **options: Any) -> CoverageReport:
        settings = {"num_datasets": 5, "n": 10, "num_samples": 3, "folder": tmp_path / "results"} | QUIET | options
        return simulate_coverage(Breaking(), lambda: nn.Linear(1, 1), problem, CONFIG, **settings)

    with pytest.raises(RuntimeError, match="broken off"):
        attempt()
    assert (tmp_path / "fits").read_text() == "xx"
    (tmp_path / "repaired").touch()
    assert same(attempt(), small())
    assert (tmp_path / "fits").read_text() == "xxxxx"
    assert json.loads((tmp_path / "results" / "job-0004.json").read_text()).keys() >= {"curves", "num_samples"}
    more = attempt(num_datasets=6)
    assert torch.equal(more.covered[:5], small().covered)
    noisy = replace(LINE, noise=gaussian_noise(0.6))
    for other in ({"n": 11}, {"level": 0.9}, {"seed": 1}, {"interval": "percentile"}, {"problem": noisy}):
        with pytest.raises(ArgumentError, match="folder"):
            attempt(**other)


# -- invalid arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_datasets", 1), ("num_datasets", 2.5), ("n", 2.5), ("n", 0), ("seed", 1.5), ("num_samples", 0)),
        *(("level", 1.0), ("interval", "basic"), ("num_workers", 0), ("model", nn.Linear(1, 1))),
        ("config", replace(CONFIG, folder=Path("somewhere"))),
    ],
)
def test_invalid_options_are_errors(name: str, value: Any) -> None:
    arguments = {"method": Oracle(), "model": None, "problem": SINE, "config": CONFIG, "num_datasets": 2} | QUIET
    with pytest.raises(ArgumentError, match=name):
        simulate_coverage(**arguments | {name: value})


def test_predictions_that_are_not_finite_are_errors() -> None:
    with pytest.raises(ArgumentError, match="outputs"):
        checked(Oracle(bias=math.nan), num_datasets=2)


def test_invalid_problems_are_errors() -> None:
    grid = torch.linspace(-1, 1, 5)[:, None]
    make = partial(SyntheticRegression, design=normal_design(), noise=gaussian_noise(0.1), grid=grid)
    for name, call in {
        "grid": lambda: make(lambda x: x[:, 0], grid=grid[:, 0]),
        "grid ": lambda: make(lambda x: x[:, 0], grid=grid.clone().requires_grad_()),
        "function": lambda: make(lambda x: x),
        "function ": lambda: make(lambda x: x[:, 0].log()),
        "design": lambda: make(lambda x: x[:, 0], design=normal_design(inputs=2)).draw(7, seed=0, number=0),
        "noise": lambda: make(lambda x: x[:, 0], noise=lambda x, rng: x[:, 0] / 0).draw(7, seed=0, number=0),
        "noise ": lambda: make(lambda x: x[:, 0], noise=lambda x, rng: x).draw(7, seed=0, number=0),
    }.items():
        with pytest.raises(ArgumentError) as error:
            call()
        assert error.value.name == name.strip()
