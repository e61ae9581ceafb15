"""Simulated coverage of confidence bands: how often a band contains the true regression function.

    coverage(x) = 1/R Σ_r 1[ low_r(x) ≤ f(x) ≤ high_r(x) ],   y = f(X) + ε,   X ~ design,   R data sets

f is unknown on real data, so data sets are drawn from a known one. The band is that of the regression function f, not
of a new y. A band misses f for one of two reasons, and both are measured: the estimator is biased, or the band does not
have the width of the estimator's scatter over data sets (std_ratio = std of the band / std of the estimator).

Shin, Cho, Min and Lim, Neural bootstrapper, NeurIPS 2021 (section 3.2, figure 2); Friedman, Multivariate adaptive
regression splines, Annals of Statistics 1991 (the function of five inputs).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots._prng import derive_seed
from neuboots._validation import ArgumentError, check_choice, check_fraction, check_int, check_memory
from neuboots.evaluation._batching import check_predictor, format_columns, format_metrics
from neuboots.evaluation._parallel import check_repeated_fit, make_reference_net, run_jobs
from neuboots.loading import preserve_rng_state
from neuboots.losses import GaussianNLL
from neuboots.prediction import IntervalMethod, Method, check_summarized
from neuboots.training import TrainingConfig

DesignSampler = Callable[[int, torch.Generator], Tensor]  # n inputs: (n, d)
NoiseSampler = Callable[[Tensor, torch.Generator], Tensor]  # noise at x (n, d): (n,)

_NUM_STORED_BANDS = 3
_NUM_TABLE_ROWS = 9

# -- synthetic regressions -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SyntheticRegression:
    """y = f(x) + ε with x ~ design, and the inputs at which bands are evaluated.

    Data are not standardized: let f and ε be of the order of 1.

    Args:
        function: f, (N, d) → (N,).
        design: Function (n, generator) that draws inputs (n, d).
        noise: Function (x, generator) that draws ε, (n,).
        grid: Inputs at which bands are evaluated, (N, d).
        name: Name of the function.

    Example:
        >>> grid = torch.linspace(-1, 1, 5)[:, None]
        >>> problem = SyntheticRegression(lambda x: x[:, 0].square(), uniform_design(-1, 1), gaussian_noise(0.1), grid)
        >>> problem.draw(100, seed=0, number=3).tensors[0].shape
        torch.Size([100, 1])
    """

    function: Callable[[Tensor], Tensor]
    design: DesignSampler
    noise: NoiseSampler
    grid: Tensor
    name: str = ""

    def __post_init__(self) -> None:
        if self.grid.ndim != 2 or not len(self.grid) or not self.grid.is_floating_point() or self.grid.requires_grad:
            found = f"shape {tuple(self.grid.shape)} of {self.grid.dtype}"
            raise ArgumentError("grid", found, "floating-point numbers (N, d) without gradients")
        _check_values("function", self.values, len(self.grid))

    @property
    def values(self) -> Tensor:
        """f on the grid: (N,)."""
        return self.function(self.grid)

    def draw(self, n: int, *, seed: int, number: int) -> TensorDataset:
        """Draw a data set, a function of the three arguments alone.

        Args:
            n: Number of examples.
            seed: Seed.
            number: Number of the data set.

        Returns:
            Examples (x, y), (n, d) and (n,).
        """
        rng = torch.Generator().manual_seed(derive_seed(seed, "data set", number))
        x = self.design(n, rng).to(self.grid)
        if x.shape != (n, self.grid.shape[1]):
            raise ArgumentError("design", f"shape {tuple(x.shape)}", f"{(n, self.grid.shape[1])}, as the grid")
        y = self.function(x) + self.noise(x, rng)
        _check_values("noise", y, n)
        return TensorDataset(x, y.to(x))


def _check_values(name: str, values: Tensor, count: int) -> None:
    if values.shape != (count,) or not bool(torch.isfinite(values).all()):
        raise ArgumentError(name, f"values of shape {tuple(values.shape)}", f"finite numbers of shape ({count},)")


def uniform_design(low: float, high: float, *, inputs: int = 1) -> DesignSampler:
    """Return a sampler of x ~ U(low, high), independent.

    Args:
        low: Lower end.
        high: Upper end.
        inputs: Number of inputs d.

    Returns:
        Function (n, generator) that draws (n, d).
    """
    return lambda n, rng: low + (high - low) * torch.rand(n, inputs, generator=rng)


def normal_design(std: float = 1.0, *, inputs: int = 1) -> DesignSampler:
    """Return a sampler of x ~ N(0, std²), independent.

    Args:
        std: Standard deviation.
        inputs: Number of inputs d.

    Returns:
        Function (n, generator) that draws (n, d).
    """
    return lambda n, rng: std * torch.randn(n, inputs, generator=rng)


def gaussian_noise(std: float) -> NoiseSampler:
    """Return a sampler of ε ~ N(0, std²).

    Args:
        std: Standard deviation.

    Returns:
        Function (x, generator) that draws (n,).
    """
    return lambda x, rng: std * torch.randn(len(x), generator=rng)


def _friedman(x: Tensor) -> Tensor:
    """Friedman's function of five inputs, minus its mean 14.4 and divided by its standard deviation 4.9."""
    a, b, c, d, e = x.unbind(1)
    return (10 * torch.sin(math.pi * a * b) + 20 * (c - 0.5).square() + 10 * d + 5 * e - 14.4) / 4.9


def _increasing_noise(x: Tensor, rng: torch.Generator) -> Tensor:
    return (0.4 + 0.15 * x[:, 0]) * torch.randn(len(x), generator=rng)


def _line_grid(low: float, high: float) -> Tensor:
    return (low + (high - low) * torch.arange(41) / 40)[:, None]  # (41, 1)


# The paper does not name the functions of figure 2. "sine" is that of the authors' early script for this experiment:
# sin(π x / 2) with x ~ N(0, 1), noise of variance 0.2 and n = 300.
SYNTHETIC_REGRESSIONS: dict[str, SyntheticRegression] = {
    problem.name: problem
    for problem in [
        SyntheticRegression(
            lambda x: (0.5 * math.pi * x[:, 0]).sin(),
            normal_design(),
            gaussian_noise(math.sqrt(0.2)),
            _line_grid(-2, 2),
            "sine",
        ),
        # least squares has an exact band here, so it suits the tuning of a method's options
        SyntheticRegression(lambda x: x[:, 0], uniform_design(-1, 1), gaussian_noise(0.5), _line_grid(-1, 1), "line"),
        # no smooth estimator is unbiased at a jump
        SyntheticRegression(
            lambda x: x[:, 0].sign(), uniform_design(-2, 2), gaussian_noise(0.3), _line_grid(-1.9, 1.9), "jump"
        ),
        # noise from 0.1 on the left to 0.7 on the right: a band of one width cannot be right on both sides
        SyntheticRegression(
            lambda x: (2 * x[:, 0]).sin(), uniform_design(-2, 2), _increasing_noise, _line_grid(-2, 2), "uneven"
        ),
        # five inputs, evaluated at 50 random ones
        SyntheticRegression(
            _friedman,
            uniform_design(0, 1, inputs=5),
            gaussian_noise(0.2),
            torch.rand(50, 5, generator=torch.Generator().manual_seed(0)),
            "friedman",
        ),
    ]
}

# -- report --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SimulatedBand:
    """Band of one data set.

    Args:
        mean: Estimate on the grid, (N,).
        low: Lower end, (N,).
        high: Upper end, (N,).
        x: Inputs of the data set, (n, d).
        y: Targets of the data set, (n,).
    """

    mean: Tensor
    low: Tensor
    high: Tensor
    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class CoverageReport:
    """Result of `simulate_coverage` at the N inputs of the grid, over R data sets.

    Args:
        x: Inputs, (N, d).
        truth: f(x), (N,).
        covered: Whether band r contains f(x), (R, N).
        width: Mean width of the band, (N,).
        bias: Mean of the estimator minus f, (N,).
        estimator_std: Standard deviation over data sets of the estimator, the mean of the replicates, (N,).
        band_std: Standard deviation of the replicates, root mean square over data sets, (N,).
        fit_seconds: Time of each fit, (R,).
        predict_seconds: Time of each prediction, (R,).
        bands: Bands of the first few data sets.
        name: Name of the function.
        level: Level of the bands.
        interval: Kind of the bands, "normal" or "percentile".
        n: Number of examples of a data set.
        num_samples: Number of distinct replicates B.
        seed: Seed of the data sets.
    """

    x: Tensor
    truth: Tensor
    covered: Tensor
    width: Tensor
    bias: Tensor
    estimator_std: Tensor
    band_std: Tensor
    fit_seconds: Tensor
    predict_seconds: Tensor
    bands: tuple[SimulatedBand, ...]
    name: str
    level: float
    interval: IntervalMethod
    n: int
    num_samples: int
    seed: int

    @property
    def num_datasets(self) -> int:
        """Number of data sets R."""
        return len(self.covered)

    @property
    def rate(self) -> Tensor:
        """Fraction of data sets whose band contains f(x): (N,)."""
        return self.covered.double().mean(0)

    @property
    def standard_error(self) -> float:
        """√(level (1 − level) / R): standard error of the rate at one x if the coverage is the level."""
        return math.sqrt(self.level * (1 - self.level) / self.num_datasets)

    @property
    def mean(self) -> float:
        """Mean of the rate over x."""
        return float(self.rate.mean())

    @property
    def mean_standard_error(self) -> float:
        """Standard error of the mean, from its scatter over data sets, since neighbouring x are missed together."""
        return float(self.covered.double().mean(1).std()) / math.sqrt(self.num_datasets)

    @property
    def worst(self) -> float:
        """Minimum of the rate over x."""
        return float(self.rate.min())

    @property
    def worst_expected_by_chance(self) -> float:
        """Lower 95 % bound of `worst` if the coverage is the level at every x.

        The largest c/R with N · P(Binomial(R, level) < c) ≤ 0.05 (Bonferroni).
        """
        from scipy.stats import binom

        return float(binom.ppf(0.05 / len(self.x), self.num_datasets, self.level)) / self.num_datasets

    @property
    def std_ratio(self) -> Tensor:
        """Standard deviation of the band over that of the estimator, (N,): 1 is right, below 1 is too narrow.

        Infinite where the estimator is the same for all data sets.
        """
        return (self.band_std / self.estimator_std).where(self.estimator_std > 0, math.inf)

    @property
    def mean_std_ratio(self) -> float:
        """Ratio of the standard deviations whose squares are averaged over x."""
        band, estimator = float(self.band_std.square().mean()), float(self.estimator_std.square().mean())
        return math.sqrt(band / estimator) if estimator > 0 else math.inf

    @property
    def metrics(self) -> dict[str, float]:
        """Overall metrics by name; the bias is root mean square over x, times are medians over data sets."""
        return {
            "coverage": self.mean,
            "standard_error": self.mean_standard_error,
            "worst_coverage": self.worst,
            "worst_expected_by_chance": self.worst_expected_by_chance,
            "width": float(self.width.mean()),
            "rms_bias": float(self.bias.square().mean().sqrt()),
            "std_ratio": self.mean_std_ratio,
            "fit_seconds": float(self.fit_seconds.median()),
            "predict_seconds": float(self.predict_seconds.median()),
        }

    def __str__(self) -> str:
        header = (
            f"{self.name or 'function'}: {self.num_datasets} data sets of n = {self.n}, {100 * self.level:g} % bands "
            f"({self.interval}) of B = {self.num_samples} replicates at {len(self.x)} inputs, seed {self.seed}"
        )
        places = torch.linspace(0, len(self.x) - 1, min(_NUM_TABLE_ROWS, len(self.x))).round().int()
        columns = {"f(x)": self.truth, "coverage": self.rate, "width": self.width, "bias": self.bias}
        columns |= {"std_ratio": self.std_ratio}
        x = [" ".join(f"{value:.3g}" for value in row) for row in self.x[places].tolist()]
        table = format_columns({"x": x, **{name: values[places] for name, values in columns.items()}})
        note = f"standard error of the coverage at one x: {self.standard_error:.2g}"
        return f"{header}\n{format_metrics(self.metrics)}\n\n{table}\n{note}"


# -- simulation ----------------------------------------------------------------------------------------


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
    """Fit a method to R data sets drawn from a known function, and count how often its band contains the function.

    Data set r is a function of (seed, r) and its fit of (config.seed, seed, r), so that any number of workers gives the
    same result.

    Args:
        method: The method.
        model: Function that returns a new net at each call; None for a method without a net, as a Gaussian process.
        problem: What data sets are drawn from, such as one of `SYNTHETIC_REGRESSIONS`.
        config: Training options.
        num_datasets: Number of data sets R, at least 2.
        n: Number of examples of a data set.
        level: Level of the bands.
        interval: "normal" for mean ± z · std, or "percentile".
        num_samples: Number of replicates B; a method of K members uses at most K.
        seed: Seed of the data sets.
        num_workers: Number of processes.
        folder: Folder for the results of finished data sets, from which an interrupted simulation resumes.
        progress: Whether to show a progress bar.

    Returns:
        The report, which prints as tables.

    Raises:
        ArgumentError: If an option is invalid, or predictions are not finite or not of one output.

    Example:
        >>> from functools import partial
        >>> from neuboots import BayesianBootstrap
        >>> sgd = partial(torch.optim.SGD, lr=0.2)
        >>> config = TrainingConfig(epochs=20, batch_size=20, optimizer=sgd, progress=False)
        >>> method, line = BayesianBootstrap(nn.MSELoss(), num_members=10), SYNTHETIC_REGRESSIONS["line"]
        >>> options = {"num_datasets": 5, "n": 20, "progress": False}
        >>> report = simulate_coverage(method, lambda: nn.Linear(1, 1), line, config, **options)
        >>> report.rate.shape, report.num_datasets, bool((report.width > 0).all())
        (torch.Size([41]), 5, True)
    """
    if isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "a function that returns a new net for each data set")
    check_repeated_fit(config, None)
    num_datasets, n = check_int("num_datasets", num_datasets, minimum=2), check_int("n", n, minimum=1)
    check_memory("n", n, 64 * n, hint="use fewer examples")
    num_samples, seed = check_int("num_samples", num_samples, minimum=1), check_int("seed", seed)
    check_summarized(num_samples)
    check_choice("interval", interval, ("normal", "percentile"))
    level = check_fraction("level", level)
    options = {"n": n, "level": level, "interval": interval, "num_samples": num_samples, "seed": seed}
    # The problem is identified by its values: on the grid, and of one data set.
    values = (problem.grid, problem.values, problem.draw(n, seed=seed, number=0))
    settings = {"method": method, "net": make_reference_net(model, config.seed), "config": config, "problem": values}
    outputs = 2 if _has_gaussian_head(method) else 1

    def run(number: int) -> dict[str, Any]:
        """Draw a data set, fit the method and compute the band."""
        data = problem.draw(n, seed=seed, number=number)
        own_config = replace(config, seed=derive_seed(config.seed, seed, "fit", number), progress=False)
        start = time.perf_counter()
        with preserve_rng_state():
            predictor = method.fit(cast(Any, model), data, own_config)
        fit_seconds = time.perf_counter() - start
        check_predictor(predictor)
        quantiles = ((1 - level) / 2, (1 + level) / 2) if interval == "percentile" else ()
        B = min(num_samples, predictor.num_distinct or num_samples)
        start = time.perf_counter()
        summary = predictor.summarize(
            problem.grid, B, seed=derive_seed(seed, "replicates", number), quantiles=quantiles
        )
        low, high = summary.interval(level, method=interval)
        predict_seconds = time.perf_counter() - start
        curves = torch.stack([_select_mean(curve, outputs) for curve in (summary.mean, summary.std, low, high)])
        times = {"fit_seconds": fit_seconds, "predict_seconds": predict_seconds}
        return {"curves": curves.tolist(), "num_samples": B, **times}

    jobs: dict[str, Any] = {"num_workers": num_workers, "folder": folder, "progress": progress}
    results = run_jobs(run, num_datasets, settings=settings | options, description="data sets", **jobs)
    columns = {name: torch.tensor([result[name] for result in results], dtype=torch.float64) for name in results[0]}
    mean, std, low, high = columns["curves"].unbind(1)  # (R, N)
    truth = problem.values.double()  # (N,)
    stored = [problem.draw(n, seed=seed, number=k).tensors for k in range(min(_NUM_STORED_BANDS, num_datasets))]
    return CoverageReport(
        x=problem.grid,
        truth=truth,
        covered=(low <= truth) & (truth <= high),
        width=(high - low).mean(0),
        bias=(mean - truth).mean(0),
        estimator_std=mean.std(0),
        band_std=std.square().mean(0).sqrt(),
        fit_seconds=columns["fit_seconds"],
        predict_seconds=columns["predict_seconds"],
        bands=tuple(SimulatedBand(mean[k], low[k], high[k], x, y) for k, (x, y) in enumerate(stored)),
        name=problem.name,
        level=level,
        interval=interval,
        n=n,
        num_samples=int(columns["num_samples"].max()),
        seed=seed,
    )


def _select_mean(values: Tensor, outputs: int) -> Tensor:
    """The output that estimates f, the only one or the mean of a Gaussian head (μ, log σ²): (N,)."""
    if values.ndim != 2 or values.shape[1] != outputs:
        raise ArgumentError("outputs", tuple(values.shape), f"(N, {outputs}) for this loss")
    if not bool(torch.isfinite(values).all()):
        raise ArgumentError("outputs", "NaN or infinite values", "finite numbers", hint="check the training")
    return values[:, 0].cpu().double()


def _has_gaussian_head(method: Any) -> bool:
    """Whether the loss of the method, or of the method inside it, is GaussianNLL."""
    parts = vars(method).values() if hasattr(method, "__dict__") else ()
    return any(isinstance(part, GaussianNLL) or (hasattr(part, "fit") and _has_gaussian_head(part)) for part in parts)
