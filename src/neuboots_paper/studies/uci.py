"""Beyond the paper: `NeuBootsRegressor` with its defaults on six UCI datasets over their 20 standard splits.

    RMSE,   mean log N(y; m(x), s²(x)),   fraction of y in [low(x), high(x)]   of test rows, in the units of y

`NeuBootsRegressor()` is compared with scikit-learn's `MLPRegressor()`, both with defaults, and with the same net on
standardized rows, which is the fair comparison. Its density N(m(x), s²(x)) is compared with N(m(x), σ²), with the same
means and one σ from the same held-out rows, and with N(mean y, var y) of the training rows. Datasets and splits:
Hernández-Lobato and Adams (2015), Gal and Ghahramani (2016); see `neuboots.data.tabular`.
"""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from neuboots.data.tabular import read_uci
from neuboots.metrics import gaussian_nll, interval_coverage, mean_width, rmse
from neuboots.report.checks import Check
from neuboots.report.tables import MISSING, Cell, Table
from neuboots_paper._common import round_rows
from neuboots_paper.checks import combine_checks, compare_groups
from neuboots_paper.study import BEYOND_PAPER, Job, Rows, RunContext, Study
from neuboots_paper.tables import MetricColumn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from neuboots.estimators import NeuBootsRegressor

Array = np.ndarray[Any, Any]
Row = dict[str, Any]

OURS, MLP, STANDARDISED = "NeuBootsRegressor", "MLPRegressor", "MLPRegressor, standardised"
CONSTANT, MARGINAL = "one σ", "no x"  # densities with the same means, and without x
NUM_SPLITS = 20
TUNING_SPLITS = range(5)  # splits on which defaults were chosen (docs/decisions/0009)
LEVEL, MIN_COVERAGE, MAX_COVERAGE = 0.95, 0.92, 0.98  # level of the intervals, and accepted coverage


@dataclass(frozen=True)
class Uci(Study):
    """The defaults of the regressor against scikit-learn's, and its densities against simpler ones."""

    name = "uci"
    source = BEYOND_PAPER
    requires = ("pandas",)
    claim = (
        "As it comes, the regressor errs no more than scikit-learn's MLP, its 95 % intervals keep their level, and it "
        "knows where it is uncertain: its density is better than one of the same means and a constant variance."
    )

    data: tuple[str, ...] = (
        "uci/boston", "uci/concrete", "uci/energy", "uci/power", "uci/wine_red", "uci/yacht",
    )  # fmt: skip
    epochs: int | None = None  # None: the default of each estimator
    seeds: tuple[int, ...] = tuple(range(NUM_SPLITS))

    def jobs(self) -> list[Job]:
        return self.job_grid(data=self.data)

    def measure(self, job: Job, context: RunContext) -> Rows:
        from sklearn.compose import TransformedTargetRegressor
        from sklearn.neural_network import MLPRegressor
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        from neuboots.estimators import NeuBootsRegressor

        _warm_up()
        seed = job["seed"]
        (x, y), (x_test, y_test) = _split(job["data"], seed, context)
        ours = NeuBootsRegressor(random_state=seed, **_without_none(epochs=self.epochs))
        mlp = MLPRegressor(random_state=seed, **_without_none(max_iter=self.epochs))
        scaled = TransformedTargetRegressor(make_pipeline(StandardScaler(), mlp), transformer=StandardScaler())
        with threadpool_limits(1), warnings.catch_warnings():  # one thread for NumPy too
            warnings.filterwarnings("ignore", ".*Maximum iterations", category=UserWarning)  # of the MLPs
            seconds = {
                name: _seconds(lambda estimator=estimator: estimator.fit(x, y))  # type: ignore[misc]
                for name, estimator in ((OURS, ours), (MLP, mlp), (STANDARDISED, scaled))
            }
            plain, fair = mlp.predict(x_test), scaled.predict(x_test)
            rows = compute_metrics(ours, x, y, x_test, y_test)
        rows[0] |= {"rows": len(x) + len(x_test), "seconds": seconds[OURS], "epochs": len(ours.loss_curve_)}
        epochs = {MLP: mlp.n_iter_, STANDARDISED: scaled.regressor_[-1].n_iter_}
        for name, mean in ((MLP, plain), (STANDARDISED, fair)):
            row = {"rmse": _rmse(mean, y_test), "seconds": seconds[name], "epochs": epochs[name]}
            rows.append({"method": name, **row})
        return round_rows({"scores": rows})

    # -- tables ----------------------------------------------------------------------------------------

    def tables(self, rows: Rows) -> list[Table]:
        over = f"mean ± standard error over {len(self.seeds)} splits"
        tables = [
            _table(
                f"Test RMSE in the units of y: {over}.",
                self._rows_by_dataset(rows),
                (
                    MetricColumn("rows", "rows", digits=0),
                    *(MetricColumn(f"rmse {name}", name, digits=3) for name in (OURS, MLP, STANDARDISED)),
                    MetricColumn(f"rmse − {MLP}", "difference to MLPRegressor", digits=3),
                    MetricColumn(f"rmse − {STANDARDISED}", "to the standardised one", digits=3),
                ),
                "Differences are of the same split; below zero NeuBootsRegressor errs less.",
            ),
            _table(
                f"95 % intervals of {OURS}, in the units of y: {over}.",
                self._rows_by_dataset(rows),
                (
                    MetricColumn(f"coverage {OURS}", "prediction intervals cover, %", 100, digits=1),
                    MetricColumn(f"width {OURS}", "their mean width", digits=2),
                    MetricColumn(f"band {OURS}", "mean width of the confidence band", digits=3),
                ),
                "A prediction interval is for a new y, the confidence band for the regression function.",
            ),
            _table(
                f"Mean log-likelihood of test rows, in nats: {over}.",
                self._rows_by_dataset(rows),
                (
                    MetricColumn(f"log_likelihood {OURS}", OURS, digits=3),
                    MetricColumn(f"log_likelihood {CONSTANT}", "its means, one σ", digits=3),
                    MetricColumn(f"log_likelihood {MARGINAL}", "N(mean y, var y)", digits=3),
                    MetricColumn(f"log_likelihood − {CONSTANT}", "gain over one σ", digits=3),
                    MetricColumn(f"log_likelihood − {MARGINAL}", "over N(mean y, var y)", digits=3),
                ),
                "σ² is the mean squared error of the rows that were not trained on, by which s(x) is set as well.",
            ),
            _table(
                f"Training: {over}.",
                self._rows_by_dataset(rows),
                tuple(
                    MetricColumn(f"{key} {name}", f"{title}, {name}", digits=digits)
                    for key, title, digits in (("seconds", "s", 2), ("epochs", "epochs", 0))
                    for name in (OURS, MLP, STANDARDISED)
                ),
                "Processor seconds of a whole fit in one thread; of NeuBootsRegressor with its calibration.",
            ),
        ]
        if others := self._others(rows):
            tables.append(
                _table(
                    f"The {len(self._other_seeds)} splits by themselves that no default was chosen by: mean ± standard "
                    "error.",
                    self._rows_by_dataset(others),
                    (
                        MetricColumn(f"rmse {OURS}", f"RMSE, {OURS}", digits=3),
                        MetricColumn(f"rmse − {MLP}", "difference to MLPRegressor", digits=3),
                        MetricColumn(f"rmse − {STANDARDISED}", "to the standardised one", digits=3),
                        MetricColumn(f"coverage {OURS}", "intervals cover, %", 100, digits=1),
                        MetricColumn(f"log_likelihood {OURS}", "log-likelihood", digits=3),
                        MetricColumn(f"log_likelihood − {CONSTANT}", "gain over one σ", digits=3),
                    ),
                    "",
                )
            )
        return tables

    @property
    def _other_seeds(self) -> tuple[int, ...]:
        return tuple(seed for seed in self.seeds if seed % NUM_SPLITS not in TUNING_SPLITS)

    def _others(self, rows: Rows) -> Rows:
        """Rows of the splits on which no default was chosen; empty if there are none."""
        found = [row for row in rows["scores"] if row["seed"] in self._other_seeds]
        return {"scores": found} if found else {}

    def _rows_by_dataset(self, rows: Rows) -> dict[str, list[Row]]:
        """One row per dataset and split, with all metrics of all methods and the differences to ours."""
        lines: dict[str, dict[int, Row]] = {name: {} for name in self.data}
        for row in rows["scores"]:
            line = lines[row["data"]].setdefault(row["seed"], {})
            line |= {f"{key} {row['method']}": value for key, value in row.items()}
        for line in (line for splits in lines.values() for line in splits.values()):
            line["rows"] = line[f"rows {OURS}"]
            for key, others in (("rmse", (MLP, STANDARDISED)), ("log_likelihood", (CONSTANT, MARGINAL))):
                for other in others:
                    line[f"{key} − {other}"] = line[f"{key} {OURS}"] - line[f"{key} {other}"]
        return {name: list(splits.values()) for name, splits in lines.items()}

    # -- checks ----------------------------------------------------------------------------------------

    def checks(self, rows: Rows) -> list[Check]:
        parts = {f"{len(self.seeds)} splits": rows}
        if others := self._others(rows):
            parts[f"the {len(self._other_seeds)} splits that no default was chosen by"] = others
        return [check for over, some in parts.items() for check in self._check_splits(some, over)]

    def _check_splits(self, rows: Rows, over: str) -> list[Check]:
        return [
            self._check_rmse(rows, MLP, f"MLPRegressor with default settings, in the mean over {over},"),
            self._check_coverage(rows, over),
            *self._check_likelihood(rows, over),
            self._check_rmse(rows, STANDARDISED, f"MLPRegressor with standardised rows, in the mean over {over},"),
        ]

    def _check_rmse(self, rows: Rows, other: str, title: str) -> Check:
        """Check that the mean difference over splits is not above zero, on all datasets but one."""
        key = f"rmse − {other}"
        worse = [
            name for name, splits in self._rows_by_dataset(rows).items() if fmean(line[key] for line in splits) > 0
        ]
        needed = max(1, len(self.data) - 1)
        return Check(
            f"the regressor's RMSE is no higher than that of {title} on at least {needed} of {len(self.data)} sets",
            len(self.data) - len(worse) >= needed,
            "; ".join(f"{name} {difference}" for name, difference in self._format_differences(rows, key).items()),
        )

    def _check_coverage(self, rows: Rows, over: str) -> Check:
        key = f"coverage {OURS}"
        covered = {name: fmean(line[key] for line in splits) for name, splits in self._rows_by_dataset(rows).items()}
        return Check(
            f"the regressor's {LEVEL:.0%} prediction intervals cover {MIN_COVERAGE:.0%} to {MAX_COVERAGE:.0%} of the "
            f"test rows, in the mean over {over}, on every set",
            all(MIN_COVERAGE <= value <= MAX_COVERAGE for value in covered.values()),
            "; ".join(f"{name} {value:.1%}" for name, value in covered.items()),
        )

    def _check_likelihood(self, rows: Rows, over: str) -> list[Check]:
        """Check that the mean difference over splits is above zero, and that Student's interval of it is."""
        key = f"log_likelihood − {CONSTANT}"
        shown, in_mean, surely = self._format_differences(rows, key), [], []
        for name, splits in self._rows_by_dataset(rows).items():
            found = f"{name} {shown[name]}"
            in_mean.append(Check("", fmean(line[key] for line in splits) > 0, found))
            here = [row for row in rows["scores"] if row["data"] == name]
            pair = ({"method": OURS}, {"method": CONSTANT})
            surely.append(replace(compare_groups("", here, "log_likelihood", *pair, expect="higher"), evidence=found))
        claim = "the regressor's log-likelihood is higher than that of one σ for all x"
        return [
            combine_checks(f"{claim}, in the mean over {over}, on every set", in_mean),
            combine_checks(f"{claim}, by Student's interval over {over}, on every set", surely),
        ]

    def _format_differences(self, rows: Rows, key: str) -> dict[str, str]:
        """Mean ± standard error over splits, by dataset."""
        values = {name: [line[key] for line in splits] for name, splits in self._rows_by_dataset(rows).items()}
        return {name: f"{fmean(each):+.3f} ± {_standard_error(each):.3f}" for name, each in values.items()}

    # -- plots -----------------------------------------------------------------------------------------

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        from neuboots_paper.plots import plot_boxes

        lines = self._rows_by_dataset(rows)
        names = [name.removeprefix("uci/") for name in self.data]

        def of(value: Callable[[Row], float]) -> list[list[float]]:
            return [[value(line) for line in lines[name]] for name in self.data]

        def relative(other: str) -> list[list[float]]:
            return of(lambda line: 100 * (line[f"rmse {OURS}"] / line[f"rmse {other}"] - 1))

        panels = {
            "RMSE against the other's, %": {MLP: relative(MLP), "standardised": relative(STANDARDISED)},
            "log-likelihood: gain over one σ, nats": {OURS: of(lambda line: line[f"log_likelihood − {CONSTANT}"])},
            "test rows in 95 % intervals, %": {OURS: of(lambda line: 100 * line[f"coverage {OURS}"])},
        }
        figure = Figure(figsize=(12.5, 3.9), layout="constrained")
        axes = figure.subplots(1, len(panels))
        for ax, (label, boxes) in zip(axes, panels.items(), strict=True):
            plot_boxes(ax, names, boxes, label=label)
            ax.tick_params(axis="x", labelsize=8)
        for ax in axes[:2]:
            ax.axhline(0, color="black", lw=1, ls=":")
        axes[2].axhspan(100 * MIN_COVERAGE, 100 * MAX_COVERAGE, color="#009e73", alpha=0.12, lw=0)
        return {"splits": figure}

    @property
    def note(self) -> str:
        return (
            "Not in the paper: every estimator with its defaults on raw columns, with seed k for split k of a dataset. "
            f"Options of the regressor were chosen on the splits {TUNING_SPLITS[0]} to {TUNING_SPLITS[-1]} of all "
            "datasets except power, with their test metrics in view; the other splits are therefore also checked "
            "separately. All splits are subsets of the same rows, so that they vary less than new data would. "
            "MLPRegressor does not scale its inputs by default: the fair comparison is with standardized rows and "
            "targets, which ours has."
        )


# -- one unit ------------------------------------------------------------------------------------------


def compute_metrics(estimator: "NeuBootsRegressor", x: Array, y: Array, x_test: Array, y_test: Array) -> list[Row]:
    """Metrics of a fitted regressor and of simpler densities on test rows; x and y are its training data."""
    forecast = estimator.forecast(x_test, level=LEVEL)
    unseen = held_out_rows(estimator, x, y)
    sigma = math.sqrt(np.mean((y[unseen] - estimator.predict(x[unseen])) ** 2))
    one, ours = np.full_like(y_test, sigma), {"rmse": _rmse(forecast.mean, y_test)}
    low, high, sure_low, sure_high, true = (
        torch.from_numpy(values)
        for values in (forecast.low, forecast.high, forecast.confidence_low, forecast.confidence_high, y_test)
    )
    ours |= {
        "log_likelihood": log_likelihood(forecast.mean, forecast.std, y_test),
        "coverage": float(interval_coverage(low, high, true)),
        "width": float(mean_width(low, high)),
        "band": float(mean_width(sure_low, sure_high)),
    }
    marginal = log_likelihood(np.full_like(y_test, y.mean()), np.full_like(y_test, y.std()), y_test)
    return [
        {"method": OURS, **ours},
        {"method": CONSTANT, "log_likelihood": log_likelihood(forecast.mean, one, y_test), "sigma": sigma},
        {"method": MARGINAL, "log_likelihood": marginal},
    ]


def held_out_rows(estimator: "NeuBootsRegressor", x: Array, y: Array) -> Array:
    """Indices of the rows that the net was not trained on."""
    from neuboots.estimators import TRAIN

    rows = estimator._prepare_rows(x, y.reshape(len(y), -1), None)
    return np.asarray(rows.index[(rows.split != TRAIN).numpy()])


def log_likelihood(mean: Array, std: Array, y: Array) -> float:
    """mean of log N(y; mean, std²)."""
    return -float(gaussian_nll(*(torch.from_numpy(values) for values in (mean, std, y))))


def _rmse(mean: Array, y: Array) -> float:
    return float(rmse(torch.from_numpy(mean), torch.from_numpy(y)))


def _split(name: str, seed: int, context: RunContext) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Raw x and y for training and testing."""
    if name.startswith("uci/"):
        x, y, test = (
            part.numpy() for part in read_uci(name.removeprefix("uci/"), context.root, split=seed % NUM_SPLITS)
        )
        y = y[:, 0]
    else:
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True, scaled=False)
        test = np.random.default_rng(seed).permutation(len(x))[: len(x) // 10]
    held = np.zeros(len(x), dtype=bool)
    held[test] = True
    return (x[~held], y[~held]), (x[held], y[held])


def _without_none(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _seconds(work: Callable[[], Any]) -> float:
    """CPU seconds, which do not depend on other processes."""
    began = time.process_time()
    work()
    return time.process_time() - began


@cache
def _warm_up() -> None:
    """Import before timing, once per process."""
    from neuboots.estimators import NeuBootsRegressor

    x = np.random.default_rng(0).normal(size=(40, 2))
    NeuBootsRegressor(epochs=1, random_state=0).fit(x, x[:, 0])


def _table(title: str, lines: dict[str, list[Row]], columns: Sequence[MetricColumn], note: str) -> Table:
    """One row per dataset: mean ± standard error over its splits."""
    body = [
        (Cell(name), *(_cell([row[column.key] for row in rows], column) for column in columns))
        for name, rows in lines.items()
    ]
    return Table(title, ("data", *(column.title for column in columns)), tuple(body), note=note, num_keys=1)


def _cell(values: Sequence[float | None], column: MetricColumn) -> Cell:
    known = [value for value in values if value is not None]
    if not known:
        return Cell(MISSING)
    mean, same = fmean(known), len({*known}) == 1
    spread = "" if same else f" ± {column.format(_standard_error(known))}"
    return Cell(column.format(mean) + spread, column.scale * mean)


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
