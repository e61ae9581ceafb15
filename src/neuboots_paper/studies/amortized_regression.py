"""Figure B.2: test RMSE of bagged regressions against the number N of training points, on two datasets.

    RMSE(N) = √ mean (y − f̄(x))²,   f̄ = 1/B Σ_b f_b,   f_b trained on N points

The paper names no dataset here. At full size these are two UCI datasets with their standard test splits, one for each
seed. Densities are y | x ~ N(f̄(x), v(x) + σ²), with v over replicates and σ from the validation split.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from neuboots.data import DatasetBundle
from neuboots.evaluation.regression import evaluate_regression
from neuboots.methods import NeuBoots
from neuboots.nets import MLP
from neuboots.prediction import Method, residual_std
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots_paper._common import (
    compare_everywhere,
    epochs_for,
    load_rows,
    make_method,
    neuboots_variants,
    plot_curves,
    round_rows,
)
from neuboots_paper.checks import compare_groups
from neuboots_paper.study import Job, Rows, RunContext, Study
from neuboots_paper.tables import MetricColumn, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_SPLITS = 20  # of a UCI dataset


@dataclass(frozen=True)
class AmortizedRegression(Study):
    """Standard bootstrap, amortized bootstrap and NeuBoots as the training set grows."""

    name = "amortized-regression"
    source = "figure B.2"
    claim = "On two regression datasets the error of bagged NeuBoots is lower than that of the amortized bootstrap."

    data: tuple[str, ...] = ("uci/boston", "uci/concrete")
    widths: tuple[int, ...] = (50, 50)
    sizes: tuple[int, ...] = (50, 100, 200, 400)  # N
    steps: int = 800
    batch_size: int = 32
    num_samples: int = 25  # B, and the nets of the standard bootstrap
    methods: tuple[str, ...] = ("standard-bootstrap", "amortized-bootstrap", "neuboots", "neuboots-paper")
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    def jobs(self) -> list[Job]:
        return self.job_grid(data=self.data, n=self.sizes, method=self.methods)

    def measure(self, job: Job, context: RunContext) -> Rows:
        n, seed = job["n"], job["seed"]
        data = self._data(job["data"], seed, context)
        assert data.target_standardizer is not None, "regression datasets have standardized targets"
        config = context.config(
            epochs=epochs_for(self.steps, n, self.batch_size),
            batch_size=self.batch_size,
            seed=seed,
        )
        predictor = self._method(job["method"]).fit(
            lambda: MLP(data.channels, 1, widths=self.widths), load_rows(data.train, n, seed), config
        )
        noise = residual_std(predictor, *load_rows(data.validation).tensors)
        test, std = load_rows(data.test), data.target_standardizer.std[0]  # outputs are standardized
        found = evaluate_regression(
            predictor, test, noise_std=noise, num_samples=self.num_samples, progress=False
        ).metrics
        scores = {
            "rmse": std * found["rmse"],
            "crps": std * found["crps"],
            "nll": found["nll"] + math.log(std),
            "coverage": found["coverage"],
        }
        return round_rows({"scores": [scores]})

    def _data(self, name: str, seed: int, context: RunContext) -> DatasetBundle:
        options: dict[str, Any] = {"split": seed % NUM_SPLITS} if name.startswith("uci/") else {}
        return context.load_data(name, seed=seed, **options)

    def _method(self, name: str) -> Method:
        if name == "neuboots":
            return NeuBoots.regression()
        return make_method(name, members=self.num_samples, loss=nn.MSELoss())

    def tables(self, rows: Rows) -> list[Table]:
        columns = (
            MetricColumn("rmse", "RMSE", digits=3, better="lower"),
            MetricColumn("crps", "CRPS", digits=3, better="lower"),
            MetricColumn("nll", "NLL", digits=3, better="lower"),
            MetricColumn("coverage", "95 % intervals cover, %", 100, digits=1),
        )
        return [
            tabulate(
                f"{name}, in the units of its target, B = {self.num_samples}, mean ± standard deviation over "
                f"{len(self.seeds)} seeds.",
                sorted((row for row in rows["scores"] if row["data"] == name), key=lambda row: row["n"]),
                by=("n", "method"),
                columns=columns,
            )
            for name in self.data
        ]

    def checks(self, rows: Rows) -> list[Check]:
        found = []
        for name in self.data:
            for ours in neuboots_variants(self.methods):
                here = [row for row in rows["scores"] if row["data"] == name]
                first, second = {"method": ours}, {"method": "amortized-bootstrap"}
                found += [
                    compare_everywhere(
                        f"on {name}, {ours} has a lower RMSE than the amortized bootstrap at every N",
                        here, "rmse", first, second, [{"n": n} for n in self.sizes], expect="lower", digits=3,
                    ),
                    compare_groups(
                        f"on {name}, {ours} has a lower RMSE than the amortized bootstrap in the mean over N",
                        here, "rmse", first, second, expect="lower", digits=3,
                    ),
                ]  # fmt: skip
        return found

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.75 * len(self.data), 3.8), layout="constrained")
        for ax, name in zip(figure.subplots(1, len(self.data), squeeze=False)[0], self.data, strict=True):
            here = [row for row in rows["scores"] if row["data"] == name]
            plot_curves(ax, here, "n", "rmse", xlabel="training points N", label="test RMSE, units of the target")
            ax.set_title(name)
        return {"rmse": figure}

    @property
    def note(self) -> str:
        net = "-".join(map(str, self.widths))
        return (
            f"The paper names neither data nor net, and gives no numbers: here MLPs of {net} units on "
            f"{' and '.join(self.data)}, about {self.steps:,} steps at every N, B = {self.num_samples}; each seed has "
            "another test split. NeuBoots has the defaults for regression (neuboots), or is the paper's Algorithm 1."
        )
