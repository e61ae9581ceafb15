"""The check itself: each of R data sets is drawn, fitted and judged by itself.

Shin, Cho, Min and Lim, Neural bootstrapper, NeurIPS 2021 (section 3.2, figure 2).
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots.batches import own_randomness
from neuboots.keys import seed_named, whole
from neuboots.losses import GaussianNLL
from neuboots.prediction import IntervalKind, Method, Predictor
from neuboots.tasks.common import check_predictor
from neuboots.tasks.coverage.result import Band, Coverage
from neuboots.tasks.coverage.truth import FUNCTIONS, Truth
from neuboots.tasks.identity import identity_of, net_of
from neuboots.tasks.repeated import check_fits
from neuboots.tasks.units import run_units
from neuboots.training import Recipe

BANDS = 3  # data sets whose bands are kept for drawing
_CURVES = ("mean", "std", "low", "high")  # of each data set, a number for each input
_KEYS = (*_CURVES, "num_samples", "fit_seconds", "predict_seconds")


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
    _check(method, make_net, truth, recipe)
    num_sets, n = whole("num_sets", num_sets, least=2), whole("n", n, least=1)
    num_samples, seed = whole("num_samples", num_samples, least=1), whole("seed", seed)
    if not 0.0 < level < 1.0:
        raise ValueError(f"got level {level}; expected a number between 0 and 1, such as 0.95")
    if kind not in ("normal", "percentile"):
        raise ValueError(f"got kind={kind!r}; expected 'normal' or 'percentile'")
    net, identity = net_of(make_net, recipe.seed), ""
    if folder is not None:  # the truth is known by its values: on the grid, and of one data set
        options = {"n": n, "level": level, "kind": kind, "num_samples": num_samples, "seed": seed}
        drawn = truth.draw(n, seed=seed, number=0)
        truths = (truth.grid, truth.values, drawn)
        identity = identity_of(method=method, net=net, recipe=recipe, truth=truths, **options)

    def run(number: int) -> dict[str, Any]:
        """One data set: drawn, fitted, judged."""
        data = truth.draw(n, seed=seed, number=number)
        mine = replace(recipe, seed=seed_named(recipe.seed, seed, "fit", number), progress=False)
        began = time.perf_counter()
        with own_randomness():  # of a method that draws without giving the state back
            predictor = _fitted(method, make_net, data, mine)
        fit_seconds = time.perf_counter() - began
        quantiles = ((1 - level) / 2, (1 + level) / 2) if kind == "percentile" else ()
        named = seed_named(seed, "replicates", number)
        count = min(num_samples, predictor.num_distinct or num_samples)  # members that are repeated say nothing new
        began = time.perf_counter()
        summary = predictor.summarize(truth.grid, count, seed=named, quantiles=quantiles)
        low, high = summary.interval(level, kind=kind)
        predict_seconds = time.perf_counter() - began
        parts = {"mean": summary.mean, "std": summary.std, "low": low, "high": high}
        judged = {key: _of_function(value, method).double().tolist() for key, value in parts.items()}
        return judged | {"num_samples": count, "fit_seconds": fit_seconds, "predict_seconds": predict_seconds}

    results = run_units(
        run, num_sets, num_workers=num_workers, folder=folder, identity=identity, title="data sets", progress=progress
    )
    found = {key: _column(key, results, len(truth.grid), folder) for key in _KEYS}
    mean, std, low, high = (found[key] for key in _CURVES)  # (R, N)
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
        num_samples=int(found["num_samples"].max()),
        seed=seed,
    )


def _check(method: Method, make_net: Any, truth: Any, recipe: Recipe) -> None:
    if isinstance(truth, str) and truth in FUNCTIONS:
        raise ValueError(f'got truth={truth!r}; expected a Truth: FUNCTIONS["{truth}"]')
    if not isinstance(truth, Truth):
        got = f"the class {truth.__name__}" if isinstance(truth, type) else f"truth of type {type(truth).__name__}"
        raise ValueError(f"got {got}; expected a Truth, such as one of FUNCTIONS: {', '.join(FUNCTIONS)}")
    if isinstance(make_net, nn.Module):
        raise ValueError(
            "got a net; expected a function that makes a new one for each data set: lambda: copy.deepcopy(net)"
        )
    check_fits(method, recipe, None, task="coverage")


def _fitted(method: Method, make_net: Any, data: TensorDataset, recipe: Recipe) -> Predictor:
    try:
        predictor = method.fit(make_net, data, recipe)
    except (TypeError, AttributeError) as error:
        if make_net is not None:
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
