"""Figure B.1: test error of bagged classifiers against the number N of training points.

    error(N)   of   p(y | x) = 1/B Σ_b softmax f_b(x),   f_b trained on N points

The paper names no dataset here. These are the rotated digits of its table 3.1, in the setting of Nalisnick and Smyth's
amortized bootstrap (ICML workshop on implicit models, 2017): a small multilayer perceptron.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots_paper._common import (
    CLASS_COLUMNS,
    class_scores,
    classifier,
    compare_everywhere,
    epochs_for,
    load_rows,
    make_method,
    neuboots_variants,
    plot_curves,
    reliability_plots,
    round_rows,
)
from neuboots_paper.checks import compare_groups
from neuboots_paper.study import Job, Rows, RunContext, Study
from neuboots_paper.tables import tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AmortizedClassification(Study):
    """Standard bootstrap, amortized bootstrap and NeuBoots as the training set grows."""

    name = "amortized-classification"
    source = "figure B.1"
    claim = "For every number N of training points, bagged NeuBoots makes fewer errors than the amortized bootstrap."

    data: str = "rotated_mnist"
    net: str = "mlp-100-100"
    sizes: tuple[int, ...] = (100, 300, 1_000, 3_000)  # N
    n_test: int = 4_000
    steps: int = 700
    batch_size: int = 128
    num_samples: int = 10  # B, and nets of the standard bootstrap
    methods: tuple[str, ...] = ("standard-bootstrap", "amortized-bootstrap", "neuboots", "neuboots-paper")
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    def jobs(self) -> list[Job]:
        return self.job_grid(n=self.sizes, method=self.methods)

    def measure(self, job: Job, context: RunContext) -> Rows:
        n, seed = job["n"], job["seed"]
        data = context.load_data(self.data, seed=seed)
        train, test = load_rows(data.train, n, seed), load_rows(data.test, self.n_test)
        config = context.config(
            epochs=epochs_for(self.steps, n, self.batch_size), batch_size=self.batch_size, seed=seed
        )
        predictor = make_method(job["method"], members=self.num_samples).fit(classifier(self.net, data), train, config)
        return round_rows(class_scores(predictor, test, num_samples=self.num_samples))

    def tables(self, rows: Rows) -> list[Table]:
        table = tabulate(
            f"{self.data}, B = {self.num_samples}, mean ± standard deviation over {len(self.seeds)} seeds.",
            sorted(rows["scores"], key=lambda row: row["n"]),
            by=("n", "method"),
            columns=CLASS_COLUMNS,
            link="reliability-{n}-{method}",
        )
        return [table]

    def checks(self, rows: Rows) -> list[Check]:
        found = []
        for ours in neuboots_variants(self.methods):
            first, second = {"method": ours}, {"method": "amortized-bootstrap"}
            found += [
                compare_everywhere(
                    f"{ours} makes fewer errors than the amortized bootstrap at every N",
                    rows["scores"], "error", first, second, [{"n": n} for n in self.sizes], expect="lower", scale=100,
                ),
                compare_groups(
                    f"{ours} makes fewer errors than the amortized bootstrap in the mean over N",
                    rows["scores"], "error", first, second, expect="lower", scale=100,
                ),
            ]  # fmt: skip
        return found

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.5, 3.8), layout="constrained")
        for ax, key, label in zip(figure.subplots(1, 2), ("error", "ece"), ("test error, %", "ECE, %"), strict=True):
            plot_curves(ax, rows["scores"], "n", key, xlabel="training points N", label=label, scale=100)
        return {"error": figure, **reliability_plots(rows["bins"], ("n", "method"))}

    @property
    def note(self) -> str:
        return (
            f"The paper names neither data nor net, and gives no numbers: here {self.net} on {self.data}, "
            f"about {self.steps:,} steps at every N, B = {self.num_samples}. Calibration is added."
        )
