"""Beyond the paper: the regressor as it comes, on six UCI sets over their 20 standard splits.

    RMSE,   mean log N(y; m(x), s²(x)),   share of y in [low(x), high(x)]   of test rows, in the units of y

`NeuBootsRegressor()` with no option but a seed stands against scikit-learn's `MLPRegressor()` with no option but a
seed, and against the same net with standardised rows, which is how one should use it. Its density N(m(x), s²(x))
stands against N(m(x), σ²) with the same means and one σ, from the same held-out rows, and against N(mean y, var y) of
the training rows, which knows nothing of x. Sets and splits: Hernández-Lobato and Adams (2015), Gal and Ghahramani
(2016); see `neuboots.data.tabular`.
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
from neuboots.report.checks import Check, combine_checks, compare_groups
from neuboots.report.tables import MISSING, Cell, MetricColumn, Table
from neuboots_paper._common import round_rows
from neuboots_paper.study import BEYOND_PAPER, Job, Rows, RunContext, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from neuboots.estimators import NeuBootsRegressor

Array = np.ndarray[Any, Any]
Row = dict[str, Any]

OURS, MLP, STANDARDISED = "NeuBootsRegressor", "MLPRegressor", "MLPRegressor, standardised"
CONSTANT, MARGINAL = "one σ", "no x"  # densities with the same means, and with none
NUM_SPLITS = 20
IN_VIEW = range(5)  # splits whose test figures were looked at as the defaults were chosen (docs/decisions/0009)
LEVEL, LEAST, MOST = 0.95, 0.92, 0.98  # of the intervals, and what they may cover


@dataclass(frozen=True)
class Uci(Study):
    """The regressor's defaults against scikit-learn's, and its densities against simpler ones."""

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
    epochs: int | None = None  # the defaults of each estimator
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
        ours = NeuBootsRegressor(random_state=seed, **_given(epochs=self.epochs))
        mlp = MLPRegressor(random_state=seed, **_given(max_iter=self.epochs))
        scaled = TransformedTargetRegressor(make_pipeline(StandardScaler(), mlp), transformer=StandardScaler())
        with threadpool_limits(1), warnings.catch_warnings():  # NumPy has the one thread that torch has
            warnings.filterwarnings("ignore", ".*Maximum iterations", category=UserWarning)  # of the MLPs
            seconds = {
                name: _seconds(lambda estimator=estimator: estimator.fit(x, y))  # type: ignore[misc]
                for name, estimator in ((OURS, ours), (MLP, mlp), (STANDARDISED, scaled))
            }
            plain, fair = mlp.predict(x_test), scaled.predict(x_test)
            rows = figures(ours, x, y, x_test, y_test)
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
                self._lines(rows),
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
                self._lines(rows),
                (
                    MetricColumn(f"coverage {OURS}", "prediction intervals cover, %", 100, digits=1),
                    MetricColumn(f"width {OURS}", "their mean width", digits=2),
                    MetricColumn(f"band {OURS}", "mean width of the confidence band", digits=3),
                ),
                "A prediction interval is for a new y, the confidence band for the regression function.",
            ),
            _table(
                f"Mean log-likelihood of test rows, in nats: {over}.",
                self._lines(rows),
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
                self._lines(rows),
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
                    self._lines(others),
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
        return tuple(seed for seed in self.seeds if seed % NUM_SPLITS not in IN_VIEW)

    def _others(self, rows: Rows) -> Rows:
        """The rows of the splits that no default was chosen by; nothing where there are none."""
        found = [row for row in rows["scores"] if row["seed"] in self._other_seeds]
        return {"scores": found} if found else {}

    def _lines(self, rows: Rows) -> dict[str, list[Row]]:
        """For each set a row for each split, with all figures of all methods, and the differences to ours."""
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

    # -- verdicts --------------------------------------------------------------------------------------

    def checks(self, rows: Rows) -> list[Check]:
        parts = {f"{len(self.seeds)} splits": rows}
        if others := self._others(rows):
            parts[f"the {len(self._other_seeds)} splits that no default was chosen by"] = others
        return [verdict for over, some in parts.items() for verdict in self._claims(some, over)]

    def _claims(self, rows: Rows, over: str) -> list[Check]:
        return [
            self._no_worse(rows, MLP, f"MLPRegressor with default settings, in the mean over {over},"),
            self._covers(rows, over),
            *self._gains(rows, over),
            self._no_worse(rows, STANDARDISED, f"MLPRegressor with standardised rows, in the mean over {over},"),
        ]

    def _no_worse(self, rows: Rows, other: str, title: str) -> Check:
        """Rule: the mean difference over splits is not above zero, on all sets but one."""
        key = f"rmse − {other}"
        worse = [name for name, splits in self._lines(rows).items() if fmean(line[key] for line in splits) > 0]
        needed = max(1, len(self.data) - 1)
        return Check(
            f"the regressor's RMSE is no higher than that of {title} on at least {needed} of {len(self.data)} sets",
            len(self.data) - len(worse) >= needed,
            "; ".join(f"{name} {difference}" for name, difference in self._shown(rows, key).items()),
        )

    def _covers(self, rows: Rows, over: str) -> Check:
        key = f"coverage {OURS}"
        covered = {name: fmean(line[key] for line in splits) for name, splits in self._lines(rows).items()}
        return Check(
            f"the regressor's {LEVEL:.0%} prediction intervals cover {LEAST:.0%} to {MOST:.0%} of the test rows, in "
            f"the mean over {over}, on every set",
            all(LEAST <= share <= MOST for share in covered.values()),
            "; ".join(f"{name} {share:.1%}" for name, share in covered.items()),
        )

    def _gains(self, rows: Rows, over: str) -> list[Check]:
        """Two rules: the mean difference over splits is above zero; and Student's interval of it is."""
        key = f"log_likelihood − {CONSTANT}"
        shown, in_mean, surely = self._shown(rows, key), [], []
        for name, splits in self._lines(rows).items():
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

    def _shown(self, rows: Rows, key: str) -> dict[str, str]:
        """Mean ± standard error over splits, by set."""
        values = {name: [line[key] for line in splits] for name, splits in self._lines(rows).items()}
        return {name: f"{fmean(each):+.3f} ± {_standard_error(each):.3f}" for name, each in values.items()}

    # -- figures ---------------------------------------------------------------------------------------

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        from neuboots.report.plots import plot_boxes

        lines = self._lines(rows)
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
        axes[2].axhspan(100 * LEAST, 100 * MOST, color="#009e73", alpha=0.12, lw=0)
        return {"splits": figure}

    @property
    def note(self) -> str:
        return (
            "No table of the paper, but what a user gets without setting anything: raw columns in, split k of each set "
            f"with seed k of every estimator. Options of the regressor were chosen on the splits {IN_VIEW[0]} to "
            f"{IN_VIEW[-1]} of all these sets but power, with their test figures in view; the other splits are "
            "therefore judged by themselves as well. All splits are cuts of the same rows, so that they vary less than "
            "new data would. MLPRegressor's defaults do not scale its rows: the fairer opponent is one whose rows and "
            "targets are standardised, as ours are inside."
        )


# -- one unit ------------------------------------------------------------------------------------------


def figures(estimator: "NeuBootsRegressor", x: Array, y: Array, x_test: Array, y_test: Array) -> list[Row]:
    """What a fitted regressor and simpler densities say of test rows; x and y are what it was fitted to."""
    said = estimator.forecast(x_test, level=LEVEL)
    unseen = not_trained_on(estimator, x, y)
    sigma = math.sqrt(np.mean((y[unseen] - estimator.predict(x[unseen])) ** 2))
    one, ours = np.full_like(y_test, sigma), {"rmse": _rmse(said.mean, y_test)}
    low, high, sure_low, sure_high, true = (
        torch.from_numpy(values) for values in (said.low, said.high, said.confidence_low, said.confidence_high, y_test)
    )
    ours |= {
        "log_likelihood": log_likelihood(said.mean, said.std, y_test),
        "coverage": float(interval_coverage(low, high, true)),
        "width": float(mean_width(low, high)),
        "band": float(mean_width(sure_low, sure_high)),
    }
    marginal = log_likelihood(np.full_like(y_test, y.mean()), np.full_like(y_test, y.std()), y_test)
    return [
        {"method": OURS, **ours},
        {"method": CONSTANT, "log_likelihood": log_likelihood(said.mean, one, y_test), "sigma": sigma},
        {"method": MARGINAL, "log_likelihood": marginal},
    ]


def not_trained_on(estimator: "NeuBootsRegressor", x: Array, y: Array) -> Array:
    """The places of all rows that the net was not trained on, those that stopped it and those that calibrate."""
    from neuboots.estimators._base import TRAIN

    rows = estimator._prepare_rows(x, y.reshape(len(y), -1), None)
    return np.asarray(rows.index[(rows.split != TRAIN).numpy()])


def log_likelihood(mean: Array, std: Array, y: Array) -> float:
    """mean of log N(y; mean, std²)."""
    return -float(gaussian_nll(*(torch.from_numpy(values) for values in (mean, std, y))))


def _rmse(mean: Array, y: Array) -> float:
    return float(rmse(torch.from_numpy(mean), torch.from_numpy(y)))


def _split(name: str, seed: int, context: RunContext) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """x and y as the user has them, to train and to test with."""
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


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _seconds(work: Callable[[], Any]) -> float:
    """Of the processor, so that what else the machine does is out."""
    began = time.process_time()
    work()
    return time.process_time() - began


@cache
def _warm_up() -> None:
    """What is imported at the first fit, once in a process, is no part of its cost."""
    from neuboots.estimators import NeuBootsRegressor

    x = np.random.default_rng(0).normal(size=(40, 2))
    NeuBootsRegressor(epochs=1, random_state=0).fit(x, x[:, 0])


def _table(title: str, lines: dict[str, list[Row]], columns: Sequence[MetricColumn], note: str) -> Table:
    """A line for each set: mean ± standard error over its splits."""
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
