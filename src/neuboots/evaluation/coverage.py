"""Coverage: how often does a band of level 95 % hold the true regression function? The check of figure 2.

    coverage(x) = 1/R Σ_r 1[ low_r(x) ≤ f(x) ≤ high_r(x) ],   y = f(X) + ε,   R data sets drawn anew

Nobody knows f on real data; here it is ours. The band is that of the regression function f, not of a new y.

Known functions, and data sets drawn from them.

    y = f(x) + ε,   x ~ design

Friedman, Multivariate adaptive regression splines, Annals of Statistics 1991 (the function of five inputs).

What the check found: coverage by x, and why a band misses.

A band misses for one of two reasons, and both are measured: the estimator lies beside f on average (bias), or the band
is of another size than the estimator's own scatter over data sets (size = band's standard deviation / estimator's, 1 is
right).

The check itself: each of R data sets is drawn, fitted and judged by itself.

Shin, Cho, Min and Lim, Neural bootstrapper, NeurIPS 2021 (section 3.2, figure 2).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots._prng import derive_seed
from neuboots._validation import check_int
from neuboots.evaluation._batching import check_predictor, format_table
from neuboots.evaluation._parallel import check_repeated_fit, fingerprint, make_reference_net, run_jobs
from neuboots.loading import preserve_rng_state
from neuboots.losses import GaussianNLL
from neuboots.prediction import IntervalMethod, Method, Predictor
from neuboots.training import TrainingConfig

DesignSampler = Callable[[int, torch.Generator], Tensor]  # n inputs: (n, d)
NoiseSampler = Callable[[Tensor, torch.Generator], Tensor]  # what is added to f at x (n, d): (n,)


@dataclass(frozen=True, eq=False)
class SyntheticRegression:
    """y = f(x) + ε with x ~ design: all that a data set is drawn from, and the inputs at which bands are judged.

    Nothing is standardised on the way: let f and ε be of the order of 1, as nets like them.

    >>> truth = SyntheticRegression(
    ...     lambda x: x[:, 0].square(), uniform_design(-1, 1), gaussian_noise(0.1), torch.linspace(-1, 1, 5)[:, None]
    ... )
    >>> truth.draw(100, seed=0, number=3).tensors[0].shape
    torch.Size([100, 1])
    """

    function: Callable[[Tensor], Tensor]  # (N, d) → (N,)
    design: DesignSampler
    noise: NoiseSampler
    grid: Tensor  # (N, d)
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.grid, Tensor) or self.grid.requires_grad:
            got = "a grid that asks for gradients" if isinstance(self.grid, Tensor) else f"a {type(self.grid).__name__}"
            raise ValueError(f"got {got}; expected a grid of numbers: torch.as_tensor(grid).detach()")
        if self.grid.ndim != 2 or not len(self.grid) or not self.grid.is_floating_point():
            raise ValueError(
                f"got a grid of shape {tuple(self.grid.shape)} and type {self.grid.dtype}; expected floating-point "
                "numbers (N, d): with one input use grid[:, None]"
            )
        _check_values("function(grid)", self.values, len(self.grid))

    @property
    def values(self) -> Tensor:
        """f on the grid: (N,)."""
        return self.function(self.grid)

    def draw(self, n: int, *, seed: int, number: int) -> TensorDataset:
        """Data set `number` of a seed: n rows (x, y), (n, d) and (n,); a function of these three alone."""
        rng = torch.Generator().manual_seed(derive_seed(seed, "data set", number))
        x = self.design(n, rng)
        if not isinstance(x, Tensor):
            raise ValueError(f"design(n, rng) gave a {type(x).__name__}; expected a tensor: torch.as_tensor(x)")
        x = x.to(self.grid)
        if x.shape != (n, self.grid.shape[1]):
            raise ValueError(f"design(n, rng) gave {tuple(x.shape)}; expected {(n, self.grid.shape[1])}, as the grid")
        y = self.function(x) + self.noise(x, rng)
        _check_values("function(x) + noise(x, rng)", y, n)
        return TensorDataset(x, y.to(x))


def _check_values(what: str, values: Any, count: int) -> None:
    if not isinstance(values, Tensor):
        raise ValueError(f"{what} gave a {type(values).__name__}; expected a tensor: compute with torch, not NumPy")
    if values.shape != (count,):
        raise ValueError(f"{what} gave shape {tuple(values.shape)}; expected ({count},), one number for each input")
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{what} gave NaN or infinite values; expected finite numbers")


def uniform_design(low: float, high: float, *, inputs: int = 1) -> DesignSampler:
    """x ~ U(low, high), independent: (n, d)."""
    return lambda n, rng: low + (high - low) * torch.rand(n, inputs, generator=rng)


def normal_design(std: float = 1.0, *, inputs: int = 1) -> DesignSampler:
    """x ~ N(0, std²), independent: (n, d)."""
    return lambda n, rng: std * torch.randn(n, inputs, generator=rng)


def gaussian_noise(std: float) -> NoiseSampler:
    """ε ~ N(0, std²): (n,)."""
    return lambda x, rng: std * torch.randn(len(x), generator=rng)


def _friedman(x: Tensor) -> Tensor:
    """Friedman's function of five inputs, less its mean 14.4 and over its standard deviation 4.9."""
    a, b, c, d, e = x.unbind(1)
    return (10 * torch.sin(math.pi * a * b) + 20 * (c - 0.5).square() + 10 * d + 5 * e - 14.4) / 4.9


def _growing(x: Tensor, rng: torch.Generator) -> Tensor:
    return (0.4 + 0.15 * x[:, 0]) * torch.randn(len(x), generator=rng)


def _line(low: float, high: float) -> Tensor:
    return (low + (high - low) * torch.arange(41) / 40)[:, None]  # (41, 1)


# The paper does not name the functions of figure 2. "sine" is that of the authors' early script for this experiment:
# sin(π x / 2) with x ~ N(0, 1), noise of variance 0.2 and n = 300.
SYNTHETIC_REGRESSIONS: dict[str, SyntheticRegression] = {
    truth.name: truth
    for truth in [
        SyntheticRegression(
            lambda x: (0.5 * math.pi * x[:, 0]).sin(),
            normal_design(),
            gaussian_noise(math.sqrt(0.2)),
            _line(-2, 2),
            "sine",
        ),
        # least squares has an exact band here: the case to try a method's options on
        SyntheticRegression(lambda x: x[:, 0], uniform_design(-1, 1), gaussian_noise(0.5), _line(-1, 1), "line"),
        # no smooth estimator is unbiased at a jump
        SyntheticRegression(
            lambda x: x[:, 0].sign(), uniform_design(-2, 2), gaussian_noise(0.3), _line(-1.9, 1.9), "jump"
        ),
        # noise from 0.1 on the left to 0.7 on the right: a band of one width cannot be right on both sides
        SyntheticRegression(lambda x: (2 * x[:, 0]).sin(), uniform_design(-2, 2), _growing, _line(-2, 2), "uneven"),
        # five inputs, judged at 50 random ones
        SyntheticRegression(
            _friedman,
            uniform_design(0, 1, inputs=5),
            gaussian_noise(0.2),
            torch.rand(50, 5, generator=torch.Generator().manual_seed(0)),
            "friedman",
        ),
    ]
}


_SHOWN = 9  # inputs in the printed table


@dataclass(frozen=True, eq=False)
class SimulatedBand:
    """The band of one data set on the grid, (N,) each, and that data set: (n, d), (n,)."""

    mean: Tensor
    low: Tensor
    high: Tensor
    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class CoverageReport:
    """What `simulate_coverage` found at the N inputs of the grid, over R data sets; `print` shows it as a table."""

    x: Tensor  # (N, d)
    truth: Tensor  # f(x): (N,)
    covered: Tensor  # whether band r holds f(x): (R, N)
    width: Tensor  # mean width of the band: (N,)
    bias: Tensor  # mean of the estimator less f: (N,)
    estimator_std: Tensor  # of the estimator, the mean of the replicates, over data sets: (N,)
    band_std: Tensor  # of the replicates, root mean square over data sets: (N,)
    fit_seconds: Tensor  # (R,)
    predict_seconds: Tensor  # (R,)
    bands: tuple[SimulatedBand, ...]  # of the first few data sets
    name: str  # of the function
    level: float
    kind: IntervalMethod
    n: int
    num_samples: int  # B, or the number of different replicates where that is smaller
    seed: int

    @property
    def num_sets(self) -> int:
        return len(self.covered)

    @property
    def rate(self) -> Tensor:
        """The share of data sets whose band holds f(x): (N,)."""
        return self.covered.double().mean(0)

    @property
    def standard_error(self) -> float:
        """√(level (1 − level) / R): how far the rate at one x strays by chance, where the level is kept."""
        return math.sqrt(self.level * (1 - self.level) / self.num_sets)

    @property
    def mean(self) -> float:
        """The mean over x of the rate."""
        return float(self.rate.mean())

    @property
    def mean_standard_error(self) -> float:
        """Of the mean over x, from its scatter over data sets: neighbouring x are missed together."""
        return float(self.covered.double().mean(1).std()) / math.sqrt(self.num_sets)

    @property
    def worst(self) -> float:
        """The least rate over x."""
        return float(self.rate.min())

    @property
    def worst_expected_by_chance(self) -> float:
        """The lowest rate that the worst of N inputs shows in 95 % of such checks or more, if the level is kept.

        The largest c/R with N · P(Binomial(R, level) < c) ≤ 0.05 (Bonferroni).
        """
        sets, tail = self.num_sets, 0.0
        for count in range(sets + 1):
            ways = math.lgamma(sets + 1) - math.lgamma(count + 1) - math.lgamma(sets - count + 1)
            tail += math.exp(ways + count * math.log(self.level) + (sets - count) * math.log1p(-self.level))
            if len(self.x) * tail > 0.05:
                return count / sets
        return 1.0

    @property
    def size(self) -> Tensor:
        """Standard deviation of the band over that of the estimator; 1 is right, less is too narrow: (N,).

        Infinite where the estimator is the same for all data sets.
        """
        return (self.band_std / self.estimator_std).where(self.estimator_std > 0, math.inf)

    @property
    def mean_size(self) -> float:
        """The same of the mean variances over x."""
        band, estimator = float(self.band_std.square().mean()), float(self.estimator_std.square().mean())
        return math.sqrt(band / estimator) if estimator > 0 else math.inf

    @property
    def figures(self) -> dict[str, float]:
        """The overall figures by name; the bias is root mean square over x, times are medians over data sets."""
        return {
            "coverage": self.mean,
            "standard error": self.mean_standard_error,
            "worst x": self.worst,
            "worst x by chance": self.worst_expected_by_chance,
            "width": float(self.width.mean()),
            "rms bias": float(self.bias.square().mean().sqrt()),
            "size of band": self.mean_size,
            "seconds to fit": float(self.fit_seconds.median()),
            "seconds to predict": float(self.predict_seconds.median()),
        }

    def __str__(self) -> str:
        header = (
            f"{self.name or 'function'}: {self.num_sets} data sets of n = {self.n}, {100 * self.level:g} % bands "
            f"({self.kind}) of B = {self.num_samples} replicates at {len(self.x)} inputs, seed {self.seed}"
        )
        overall = format_table([{"figure": name, "value": value} for name, value in self.figures.items()])
        shown = torch.linspace(0, len(self.x) - 1, min(_SHOWN, len(self.x))).round().int()
        rows = [
            {
                "x": " ".join(f"{value:.3g}" for value in self.x[i].tolist()),
                "f(x)": float(self.truth[i]),
                "coverage": float(self.rate[i]),
                "width": float(self.width[i]),
                "bias": float(self.bias[i]),
                "size of band": float(self.size[i]),
            }
            for i in shown.tolist()
        ]
        note = f"at one x the coverage has a standard error of {self.standard_error:.2g}"
        return f"{header}\n{overall}\n\n{format_table(rows)}\n{note}"


_NUM_STORED_BANDS = 3  # data sets whose bands are kept for drawing
_CURVES = ("mean", "std", "low", "high")  # of each data set, a number for each input
_KEYS = (*_CURVES, "num_samples", "fit_seconds", "predict_seconds")


def simulate_coverage(
    method: Method,
    model: Callable[[], nn.Module] | None,
    problem: SyntheticRegression,
    config: TrainingConfig,
    *,
    num_datasets: int = 100,
    n: int = 300,
    level: float = 0.95,
    interval: IntervalMethod = "normal",
    num_samples: int = 1000,
    seed: int = 0,
    num_workers: int = 1,
    folder: Path | None = None,
    progress: bool = True,
) -> CoverageReport:
    """Draw R data sets of n rows from the truth, fit the method to each, and count how often its band holds f.

    Data set r is named by (seed, r) and its fit by (the recipe's seed, seed, r), so that any number of processes
    (`num_workers`) gives the same result. With a folder each finished data set is kept, and a check that was cut short
    goes on with the others. `model` must make a new net at each call; a Gaussian process takes None.

    >>> from functools import partial
    >>> from neuboots import BayesianBootstrap
    >>> config = TrainingConfig(epochs=20, batch_size=20, optimizer=partial(torch.optim.SGD, lr=0.2), progress=False)
    >>> method = BayesianBootstrap(nn.MSELoss(), num_members=10)
    >>> line = SYNTHETIC_REGRESSIONS["line"]
    >>> found = simulate_coverage(method, lambda: nn.Linear(1, 1), line, config, num_datasets=5, n=20, progress=False)
    >>> found.rate.shape, found.num_sets, bool((found.width > 0).all())
    (torch.Size([41]), 5, True)
    """
    _check(method, model, problem, config)
    num_datasets, n = check_int("num_sets", num_datasets, minimum=2), check_int("n", n, minimum=1)
    num_samples, seed = check_int("num_samples", num_samples, minimum=1), check_int("seed", seed)
    if not 0.0 < level < 1.0:
        raise ValueError(f"got level {level}; expected a number between 0 and 1, such as 0.95")
    if interval not in ("normal", "percentile"):
        raise ValueError(f"got kind={interval!r}; expected 'normal' or 'percentile'")
    net, identity = make_reference_net(model, config.seed), ""
    if folder is not None:  # the truth is known by its values: on the grid, and of one data set
        options = {"n": n, "level": level, "kind": interval, "num_samples": num_samples, "seed": seed}
        drawn = problem.draw(n, seed=seed, number=0)
        truths = (problem.grid, problem.values, drawn)
        identity = fingerprint(method=method, net=net, config=config, truth=truths, **options)

    def run(number: int) -> dict[str, Any]:
        """One data set: drawn, fitted, judged."""
        data = problem.draw(n, seed=seed, number=number)
        mine = replace(config, seed=derive_seed(config.seed, seed, "fit", number), progress=False)
        began = time.perf_counter()
        with preserve_rng_state():  # of a method that draws without giving the state back
            predictor = _fitted(method, model, data, mine)
        fit_seconds = time.perf_counter() - began
        quantiles = ((1 - level) / 2, (1 + level) / 2) if interval == "percentile" else ()
        named = derive_seed(seed, "replicates", number)
        count = min(num_samples, predictor.num_distinct or num_samples)  # members that are repeated say nothing new
        began = time.perf_counter()
        summary = predictor.summarize(problem.grid, count, seed=named, quantiles=quantiles)
        low, high = summary.interval(level, method=interval)
        predict_seconds = time.perf_counter() - began
        parts = {"mean": summary.mean, "std": summary.std, "low": low, "high": high}
        judged = {key: _of_function(value, method).double().tolist() for key, value in parts.items()}
        return judged | {"num_samples": count, "fit_seconds": fit_seconds, "predict_seconds": predict_seconds}

    results = run_jobs(
        run,
        num_datasets,
        num_workers=num_workers,
        folder=folder,
        key=identity,
        description="data sets",
        progress=progress,
    )
    found = {key: _column(key, results, len(problem.grid), folder) for key in _KEYS}
    mean, std, low, high = (found[key] for key in _CURVES)  # (R, N)
    values = problem.values.double()  # (N,)
    kept = [problem.draw(n, seed=seed, number=k).tensors for k in range(min(_NUM_STORED_BANDS, num_datasets))]
    return CoverageReport(
        x=problem.grid,
        truth=values,
        covered=(low <= values) & (values <= high),
        width=(high - low).mean(0),
        bias=(mean - values).mean(0),
        estimator_std=mean.std(0),
        band_std=std.square().mean(0).sqrt(),
        fit_seconds=found["fit_seconds"],
        predict_seconds=found["predict_seconds"],
        bands=tuple(SimulatedBand(mean[k], low[k], high[k], x, y) for k, (x, y) in enumerate(kept)),
        name=problem.name,
        level=level,
        kind=interval,
        n=n,
        num_samples=int(found["num_samples"].max()),
        seed=seed,
    )


def _check(method: Method, model: Any, truth: Any, config: TrainingConfig) -> None:
    if isinstance(truth, str) and truth in SYNTHETIC_REGRESSIONS:
        raise ValueError(f'got truth={truth!r}; expected a Truth: FUNCTIONS["{truth}"]')
    if not isinstance(truth, SyntheticRegression):
        got = f"the class {truth.__name__}" if isinstance(truth, type) else f"truth of type {type(truth).__name__}"
        raise ValueError(f"got {got}; expected a Truth, such as one of FUNCTIONS: {', '.join(SYNTHETIC_REGRESSIONS)}")
    if isinstance(model, nn.Module):
        raise ValueError(
            "got a net; expected a function that makes a new one for each data set: lambda: copy.deepcopy(net)"
        )
    check_repeated_fit(config, None)


def _fitted(method: Method, model: Any, data: TensorDataset, config: TrainingConfig) -> Predictor:
    try:
        predictor = method.fit(model, data, config)
    except (TypeError, AttributeError) as error:
        if model is not None:
            raise
        raise ValueError(
            f"got make_net=None, and {type(method).__name__} failed ({error}); expected a function that makes a net, "
            "unless the method needs none, as a Gaussian process"
        ) from error
    check_predictor(predictor)
    return predictor


def _column(key: str, results: list[Any], count: int, folder: Path | None) -> Tensor:
    """One figure of all data sets, (R,) or (R, N), or a sentence for a kept one that lacks it."""
    for number, result in enumerate(results):
        value = result.get(key) if isinstance(result, dict) else None
        if value is None or (key in _CURVES and (not isinstance(value, list) or len(value) != count)):
            raise ValueError(
                f"data set {number} in {folder} has no {key!r} of the right length; expected what coverage wrote: "
                f"delete unit-{number:04d}.json, and it is done again"
            )
    return torch.tensor([result[key] for result in results], dtype=torch.float64)


def _of_function(figure: Tensor, method: Method) -> Tensor:
    """The output that estimates f, the only one or the mean of a Gaussian head (μ, log σ²): (N,)."""
    outputs = 2 if _has_gaussian_head(method) else 1
    if figure.ndim != 2 or figure.shape[1] != outputs:
        raise ValueError(
            f"got outputs of shape {tuple(figure.shape)}; expected (N, {outputs}), since f has one output"
            + (" and the loss is GaussianNLL" if outputs == 2 else " and the loss is not GaussianNLL")
        )
    if not bool(torch.isfinite(figure).all()):
        raise ValueError(
            "got NaN or infinite predictions; expected finite numbers: look at the training of one data set"
        )
    return figure[:, 0].cpu()


def _has_gaussian_head(method: Any) -> bool:
    """By its loss, or by that of the method inside it."""
    parts = vars(method).values() if hasattr(method, "__dict__") else ()
    return any(isinstance(part, GaussianNLL) or (hasattr(part, "fit") and _has_gaussian_head(part)) for part in parts)
