"""Coverage: how often does a band of level 95 % hold the true regression function? The check of figure 2.

    coverage(x) = 1/R Σ_r 1[ low_r(x) ≤ f(x) ≤ high_r(x) ],   y = f(X) + ε,   R data sets drawn anew

Nobody knows f on real data; here it is ours. Each of R data sets is drawn, fitted and judged by itself. A band misses
for one of two reasons, and both are measured: the estimator lies beside f on average (bias), or the band is of another
size than the estimator's own scatter over data sets (size = band's standard deviation / estimator's, 1 is right). The
band is that of the regression function f, not of a new y.

Shin, Cho, Min and Lim, Neural bootstrapper, NeurIPS 2021 (section 3.2, figure 2); Friedman, Multivariate adaptive
regression splines, Annals of Statistics 1991 (the function of five inputs).
"""

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots.batches import own_randomness
from neuboots.keys import seed_named
from neuboots.prediction import IntervalKind, Method, Summary
from neuboots.tasks.common import table
from neuboots.tasks.units import described, run_units
from neuboots.training import Recipe, make_seeded

Design = Callable[[int, torch.Generator], Tensor]  # n inputs: (n, d)
Noise = Callable[[Tensor, torch.Generator], Tensor]  # what is added to f at x (n, d): (n,)

BANDS = 3  # data sets whose bands are kept for drawing
_SHOWN = 9  # inputs in the printed table


# -- known functions -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Truth:
    """y = f(x) + ε with x ~ design: all that a data set is drawn from, and the inputs at which bands are judged.

    Nothing is standardised on the way: let f and ε be of the order of 1, as nets like them.

    >>> truth = Truth(lambda x: x[:, 0].square(), uniform(-1, 1), gaussian(0.1), torch.linspace(-1, 1, 5)[:, None])
    >>> truth.draw(100, seed=0, number=3).tensors[0].shape
    torch.Size([100, 1])
    """

    function: Callable[[Tensor], Tensor]  # (N, d) → (N,)
    design: Design
    noise: Noise
    grid: Tensor  # (N, d)
    name: str = ""

    def __post_init__(self) -> None:
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
        rng = torch.Generator().manual_seed(seed_named(seed, "data set", number))
        x = self.design(n, rng).to(self.grid)
        if x.shape != (n, self.grid.shape[1]):
            raise ValueError(f"design(n, rng) gave {tuple(x.shape)}; expected {(n, self.grid.shape[1])}, as the grid")
        y = self.function(x) + self.noise(x, rng)
        _check_values("function(x) + noise(x, rng)", y, n)
        return TensorDataset(x, y.to(x))


def _check_values(what: str, values: Tensor, count: int) -> None:
    if values.shape != (count,):
        raise ValueError(f"{what} gave shape {tuple(values.shape)}; expected ({count},), one number for each input")
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{what} gave NaN or infinite values; expected finite numbers")


def uniform(low: float, high: float, *, inputs: int = 1) -> Design:
    """x ~ U(low, high), independent: (n, d)."""
    return lambda n, rng: low + (high - low) * torch.rand(n, inputs, generator=rng)


def normal(std: float = 1.0, *, inputs: int = 1) -> Design:
    """x ~ N(0, std²), independent: (n, d)."""
    return lambda n, rng: std * torch.randn(n, inputs, generator=rng)


def gaussian(std: float) -> Noise:
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
FUNCTIONS: dict[str, Truth] = {
    truth.name: truth
    for truth in [
        Truth(lambda x: (0.5 * math.pi * x[:, 0]).sin(), normal(), gaussian(math.sqrt(0.2)), _line(-2, 2), "sine"),
        # least squares has an exact band here: the case to try a method's options on
        Truth(lambda x: x[:, 0], uniform(-1, 1), gaussian(0.5), _line(-1, 1), "line"),
        # no smooth estimator is unbiased at a jump
        Truth(lambda x: x[:, 0].sign(), uniform(-2, 2), gaussian(0.3), _line(-1.9, 1.9), "jump"),
        # noise from 0.1 on the left to 0.7 on the right: a band of one width cannot be right on both sides
        Truth(lambda x: (2 * x[:, 0]).sin(), uniform(-2, 2), _growing, _line(-2, 2), "uneven"),
        # five inputs, judged at 50 random ones
        Truth(
            _friedman,
            uniform(0, 1, inputs=5),
            gaussian(0.2),
            torch.rand(50, 5, generator=torch.Generator().manual_seed(0)),
            "friedman",
        ),
    ]
}


# -- the result ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Band:
    """The band of one data set on the grid, (N,) each, and that data set: (n, d), (n,)."""

    mean: Tensor
    low: Tensor
    high: Tensor
    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class Coverage:
    """What `coverage` found at the N inputs of the grid, over R data sets; `print` shows it as a table."""

    x: Tensor  # (N, d)
    truth: Tensor  # f(x): (N,)
    covered: Tensor  # whether band r holds f(x): (R, N)
    width: Tensor  # mean width of the band: (N,)
    bias: Tensor  # mean of the estimator less f: (N,)
    estimator_std: Tensor  # of the estimator, the mean of the replicates, over data sets: (N,)
    band_std: Tensor  # of the replicates, root mean square over data sets: (N,)
    fit_seconds: Tensor  # (R,)
    predict_seconds: Tensor  # (R,)
    bands: tuple[Band, ...]  # of the first few data sets
    name: str  # of the function
    level: float
    kind: IntervalKind
    n: int
    num_samples: int
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
    def worst_by_chance(self) -> float:
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
        """The overall figures by name; the bias is root mean square over x, times are means over data sets."""
        return {
            "coverage": self.mean,
            "standard error": self.mean_standard_error,
            "worst x": self.worst,
            "worst x by chance": self.worst_by_chance,
            "width": float(self.width.mean()),
            "rms bias": float(self.bias.square().mean().sqrt()),
            "size of band": self.mean_size,
            "seconds to fit": float(self.fit_seconds.mean()),
            "seconds to predict": float(self.predict_seconds.mean()),
        }

    def __str__(self) -> str:
        header = (
            f"{self.name or 'function'}: {self.num_sets} data sets of n = {self.n}, {100 * self.level:g} % bands "
            f"({self.kind}) of B = {self.num_samples} replicates at {len(self.x)} inputs, seed {self.seed}"
        )
        overall = table([{"figure": name, "value": value} for name, value in self.figures.items()])
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
        return f"{header}\n{overall}\n\n{table(rows)}\n{note}"


# -- the check -----------------------------------------------------------------------------------------


def coverage(
    method: Method,
    make_net: Callable[[], nn.Module] | None,
    truth: Truth,
    recipe: Recipe,
    *,
    num_sets: int = 100,
    n: int = 300,
    level: float = 0.95,
    kind: IntervalKind = "normal",
    num_samples: int = 1000,
    seed: int = 0,
    num_workers: int = 1,
    folder: Path | None = None,
    progress: bool = True,
) -> Coverage:
    """Draw R data sets of n rows from the truth, fit the method to each, and count how often its band holds f.

    Data set r is named by (seed, r) and its fit by (the recipe's seed, seed, r), so that any number of processes
    (`num_workers`) gives the same result. With a folder each finished data set is kept, and a check that was cut short
    goes on with the others. `make_net` must make a new net at each call; a Gaussian process takes None.

    >>> from functools import partial
    >>> from neuboots import BayesianBootstrap, SquaredError
    >>> recipe = Recipe(epochs=20, batch_size=20, optimizer=partial(torch.optim.SGD, lr=0.2), progress=False)
    >>> method = BayesianBootstrap(SquaredError(), num_members=10)
    >>> line = FUNCTIONS["line"]
    >>> found = coverage(method, lambda: nn.Linear(1, 1), line, recipe, num_sets=5, n=20, progress=False)
    >>> found.rate.shape, found.num_sets, bool((found.width > 0).all())
    (torch.Size([41]), 5, True)
    """
    _check(num_sets, n, level, kind, recipe)
    identity = _identity(
        [method, _net_of(make_net, recipe.seed), replace(recipe, progress=False), n, level, kind, num_samples, seed],
        [truth.grid, truth.values, *truth.draw(n, seed=seed, number=0).tensors],
    )

    def run(number: int) -> dict[str, Any]:
        """One data set: drawn, fitted, judged."""
        data = truth.draw(n, seed=seed, number=number)
        mine = replace(recipe, seed=seed_named(recipe.seed, seed, "fit", number), progress=False)
        began = time.perf_counter()
        with own_randomness():  # of a method that draws without giving the state back
            predictor = method.fit(make_net, data, mine)
        fitted = time.perf_counter()
        quantiles = ((1 - level) / 2, (1 + level) / 2) if kind == "percentile" else ()
        named = seed_named(seed, "replicates", number)
        summary = predictor.summarize(truth.grid, num_samples, seed=named, quantiles=quantiles)
        low, high = summary.interval(level, kind=kind)
        parts = {"mean": summary.mean, "std": summary.std, "low": low, "high": high}
        judged = {key: _of_function(value, summary).double().tolist() for key, value in parts.items()}
        return judged | {"fit_seconds": fitted - began, "predict_seconds": time.perf_counter() - fitted}

    results = run_units(
        run, num_sets, num_workers=num_workers, folder=folder, identity=identity, title="data sets", progress=progress
    )
    found = {key: torch.tensor([result[key] for result in results], dtype=torch.float64) for key in results[0]}
    mean, std, low, high = (found[key] for key in ("mean", "std", "low", "high"))  # (R, N)
    values = truth.values.double()  # (N,)
    kept = [truth.draw(n, seed=seed, number=k).tensors for k in range(min(BANDS, num_sets))]
    return Coverage(
        x=truth.grid,
        truth=values,
        covered=(low <= values) & (values <= high),
        width=(high - low).mean(0),
        bias=(mean - values).mean(0),
        estimator_std=mean.std(0),
        band_std=std.square().mean(0).sqrt(),
        fit_seconds=found["fit_seconds"],
        predict_seconds=found["predict_seconds"],
        bands=tuple(Band(mean[k], low[k], high[k], x, y) for k, (x, y) in enumerate(kept)),
        name=truth.name,
        level=level,
        kind=kind,
        n=n,
        num_samples=num_samples,
        seed=seed,
    )


def _check(num_sets: int, n: int, level: float, kind: str, recipe: Recipe) -> None:
    if num_sets < 2:
        raise ValueError(
            f"got num_sets={num_sets}; expected at least 2 data sets, better 100: one says nothing of chance"
        )
    if n < 1:
        raise ValueError(f"got n={n}; expected at least one row in a data set")
    if not 0.0 < level < 1.0:
        raise ValueError(f"got level {level}; expected a number between 0 and 1, such as 0.95")
    if kind not in ("normal", "percentile"):
        raise ValueError(f"got kind={kind!r}; expected 'normal' or 'percentile'")
    if recipe.folder is not None:
        raise ValueError(
            "got a recipe with a folder, which all data sets would share; expected none: give coverage(folder=…), "
            "which keeps every data set that is finished"
        )


def _net_of(make_net: Callable[[], nn.Module] | None, seed: int) -> nn.Module | None:
    """One net, to know it by, having seen that the next would be another one."""
    if make_net is None:
        return None
    first, second = make_seeded(make_net, seed), make_seeded(make_net, seed)
    if {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}:
        raise ValueError(
            "make_net() gave the same weights twice, so that each data set would go on with the net of the last; "
            "expected a new net at each call: build it inside make_net, or copy.deepcopy what is pretrained"
        )
    return first


def _identity(settings: list[Any], tensors: list[Tensor]) -> str:
    """What the results in a folder depend on: settings, and the values of a truth that has no name."""
    values = hashlib.blake2b(b"".join(tensor.numpy().tobytes() for tensor in tensors), digest_size=8).hexdigest()
    return f"{described(*settings)} {values}"


def _of_function(figure: Tensor, summary: Summary) -> Tensor:
    """The output that estimates f, the only one or the mean of a Gaussian head (μ, log σ²): (N,)."""
    if summary.mean.ndim != 2 or summary.mean.shape[1] > 2:
        raise ValueError(
            f"got outputs of shape {tuple(summary.mean.shape)}; expected (N, 1), or (N, 2) from a Gaussian head: f has "
            "one output"
        )
    if not bool(torch.isfinite(figure).all()):
        raise ValueError(
            "got NaN or infinite predictions; expected finite numbers: look at the training of one data set"
        )
    return figure[:, 0].cpu()
