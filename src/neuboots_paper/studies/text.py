"""Section 6 (future work): NeuBoots for a text transformer, on the sentiment dataset SST-2.

    p(y | x) = 1/B Σ_b softmax W (φ(x) ⊙ α_b),   φ: mean of the encoder's outputs over tokens

The net has dropout layers. The deterministic net disables them at prediction, MC dropout does not; both are trained in
the same way. NeuBoots trains the same net with its dropout, and weights its last features.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import TensorDataset

from neuboots.nets import TextTransformer
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots_paper._common import (
    CLASS_COLUMNS,
    class_scores,
    load_rows,
    make_method,
    neuboots_variants,
    pool_bins,
    reliability_plots,
    round_rows,
)
from neuboots_paper.checks import combine_checks, compare_groups
from neuboots_paper.study import Job, Rows, RunContext, Study
from neuboots_paper.tables import tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSS = 1.0  # tolerated increase of the error, in points


@dataclass(frozen=True)
class Text(Study):
    """A small transformer: deterministic, with MC dropout, and with NeuBoots."""

    name = "text"
    source = "section 6, future work"
    claim = (
        "The paper only proposes NeuBoots for language transformers. The question here: are its class probabilities "
        "better calibrated than those of the plain net and of MC dropout, at no loss of error?"
    )

    data: str = "sst2"
    width: int = 64
    depth: int = 2
    heads: int = 4
    dropout: float = 0.1
    length: int = 40  # maximum number of tokens
    epochs: int = 5
    batch_size: int = 64
    num_samples: int = 20  # B
    methods: tuple[str, ...] = ("deterministic", "mc-dropout", "neuboots", "neuboots-paper")
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    def jobs(self) -> list[Job]:
        return self.job_grid(method=self.methods)

    def measure(self, job: Job, context: RunContext) -> Rows:
        data = context.load_data(self.data)
        model = partial(
            TextTransformer,
            data.channels,
            data.num_classes,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            max_length=self.length,
            dropout=self.dropout,
        )
        options: dict[str, Any] = {"where": "existing"} if job["method"] == "mc-dropout" else {}
        config = context.config(epochs=self.epochs, batch_size=self.batch_size, seed=job["seed"])
        predictor = make_method(job["method"], **options).fit(model, self._truncate(data.train), config)
        return round_rows(class_scores(predictor, self._truncate(data.test), num_samples=self.num_samples))

    def _truncate(self, part: Any) -> TensorDataset:
        ids, labels = load_rows(part).tensors
        return TensorDataset(ids[:, : self.length], labels)

    def tables(self, rows: Rows) -> list[Table]:
        table = tabulate(
            f"{self.data}, B = {self.num_samples}, mean ± standard deviation over {len(self.seeds)} seeds.",
            rows["scores"],
            by=("method",),
            columns=CLASS_COLUMNS,
            link="reliability-{method}",
        )
        return [table]

    def checks(self, rows: Rows) -> list[Check]:
        found = []
        for ours in neuboots_variants(self.methods):
            for other, title in (("deterministic", "the plain net"), ("mc-dropout", "MC dropout")):
                found += [_check_calibration(rows, ours, other, title), _check_error(rows, ours, other, title)]
        return found

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        from neuboots.report.plots import plot_reliability

        figure = Figure(figsize=(6, 5), layout="constrained")
        curves = {name: pool_bins([row for row in rows["bins"] if row["method"] == name]) for name in self.methods}
        plot_reliability(figure.subplots(), curves)
        return {"reliability": figure, **reliability_plots(rows["bins"], ("method",))}

    @property
    def note(self) -> str:
        return (
            f"The paper has no values to compare with. {self.epochs} epochs from scratch on {self.data}, with "
            f"{self.depth} {'block' if self.depth == 1 else 'blocks'} of width {self.width} and texts of at most "
            f"{self.length} words; dropout {self.dropout:g} in the net of every method."
        )


def _check_calibration(rows: Rows, ours: str, other: str, title: str) -> Check:
    claim = f"{ours} is better calibrated than {title}: lower ECE, NLL and Brier score"
    both = {"method": ours}, {"method": other}
    parts = [
        compare_groups(claim, rows["scores"], key, *both, expect="lower", scale=scale, digits=digits)
        for key, scale, digits in (("ece", 100, 2), ("nll", 1, 3), ("brier", 1, 3))
    ]
    return combine_checks(claim, parts)


def _check_error(rows: Rows, ours: str, other: str, title: str) -> Check:
    """Check that the error is below that of the other method plus LOSS points."""
    claim = f"{ours} makes no more errors than {title}, within {LOSS:g} point"
    both = {"method": ours}, {"method": other}
    allowed = [row | {"error": row["error"] + LOSS / 100 * (row["method"] == other)} for row in rows["scores"]]
    holds = compare_groups(claim, allowed, "error", *both, expect="lower", scale=100).holds
    return replace(compare_groups(claim, rows["scores"], "error", *both, expect="lower", scale=100), holds=holds)
