"""Figure B.3: NeuBoots and Dropout before the last layer on MNIST.

    Dropout:  ℓ(f(φ ⊙ m / (1 − p)), y),  m ~ Bernoulli(1 − p)      NeuBoots:  α_{u(i)} ℓ(f(φ ⊙ α), y),  α ~ Dirichlet

Both multiply the last features of a net by random weights; only NeuBoots also weights the loss.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuboots.methods import MCDropout
from neuboots.nets import MLP
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots_paper._common import (
    CLASS_COLUMNS,
    class_scores,
    compare_everywhere,
    load_rows,
    load_with_rows,
    make_method,
    neuboots_variants,
    plot_curves,
    reliability_plots,
    round_rows,
)
from neuboots_paper.study import Job, Rows, RunContext, Study
from neuboots_paper.tables import MetricColumn, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = (("ece", "ECE, %", 100.0, 2), ("nll", "NLL", 1.0, 4), ("brier", "Brier score", 1.0, 4))
SAME = 0.3  # points of accuracy within which methods are equal


@dataclass(frozen=True)
class Dropout(Study):
    """Dropout before the last layer and NeuBoots, for MLPs of several widths with BatchNorm."""

    name = "dropout"
    source = "figure B.3"
    claim = (
        "On MNIST NeuBoots is as accurate as a net with Dropout before its last layer, and has a lower ECE, NLL and "
        "Brier score."
    )

    data: str = "mnist"
    widths: tuple[int, ...] = (50, 100, 200)
    n: int = 20_000
    n_test: int = 10_000
    epochs: int = 15
    batch_size: int = 128
    num_samples: int = 100  # B
    methods: tuple[str, ...] = ("mc-dropout", "neuboots", "neuboots-paper")
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    def jobs(self) -> list[Job]:
        return self.job_grid(width=self.widths, method=self.methods)

    def measure(self, job: Job, context: RunContext) -> Rows:
        data = load_with_rows(context, self.data, self.n)
        train, test = load_rows(data.train, self.n, job["seed"]), load_rows(data.test, self.n_test)
        size, widths = train[0][0].numel(), (job["width"],) * 3
        method = MCDropout.paper_mlp() if job["method"] == "mc-dropout" else make_method(job["method"])
        config = context.config(epochs=self.epochs, batch_size=self.batch_size, seed=job["seed"])
        predictor = method.fit(lambda: MLP(size, data.num_classes, widths=widths, batch_norm=True), train, config)
        return round_rows(class_scores(predictor, test, num_samples=self.num_samples))

    def tables(self, rows: Rows) -> list[Table]:
        table = tabulate(
            f"{self.data}, {self.n:,} to train, B = {self.num_samples}, mean ± standard deviation over "
            f"{len(self.seeds)} seeds.",
            sorted(rows["scores"], key=lambda row: row["width"]),
            by=("width", "method"),
            columns=(MetricColumn("accuracy", "accuracy, %", 100, better="higher"), *CLASS_COLUMNS[1:]),
            link="reliability-{width}-{method}",
        )
        return [table]

    def checks(self, rows: Rows) -> list[Check]:
        found, places = [], [{"width": width} for width in self.widths]
        for ours in neuboots_variants(self.methods):
            both = {"method": ours}, {"method": "mc-dropout"}
            found.append(
                compare_everywhere(
                    f"{ours} is as accurate as Dropout, within {SAME:g} points, at every width",
                    rows["scores"], "accuracy", *both, places, expect="equal", margin=SAME, scale=100,
                )
            )  # fmt: skip
            found += [
                compare_everywhere(
                    f"{ours} has a lower {title.removesuffix(', %')} than Dropout at every width",
                    rows["scores"], key, *both, places, expect="lower", scale=scale, digits=digits,
                )
                for key, title, scale, digits in MEASURES
            ]  # fmt: skip
        return found

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 3.8), layout="constrained")
        for ax, (key, label, scale, _) in zip(figure.subplots(1, 3), MEASURES, strict=True):
            plot_curves(ax, rows["scores"], "width", key, xlabel="hidden units of a layer", label=label, scale=scale)
        return {"scores": figure, **reliability_plots(rows["bins"], ("width", "method"))}

    @property
    def note(self) -> str:
        return (
            f"{self.n:,} images of {self.data}, {self.epochs} epochs, B = {self.num_samples}: the paper gives neither "
            "epochs nor B here, and plots its results without numbers."
        )
