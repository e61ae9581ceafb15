"""Figure B.4: accuracy and calibration on corrupted test images, by severity.

    m(severity) = mean ± sd over corruptions k and seeds of m(p(y | corrupt_k(x, severity))),   m: accuracy or ECE

The corruptions are those of Hendrycks and Dietterich (CIFAR-10-C), reimplemented; the plot follows Ovadia et al.
(NeurIPS 2019). Nets are trained on clean images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch.utils.data import TensorDataset

from neuboots.data import DatasetBundle, Standardizer
from neuboots.data.corruptions import CORRUPTIONS
from neuboots.evaluation.corruption import evaluate_corruptions
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots_paper._common import PAPER_SGD, image_net, load_rows, make_method, net_title, neuboots_variants
from neuboots_paper.checks import compare_groups
from neuboots_paper.study import Job, Rows, RunContext, Study
from neuboots_paper.tables import MetricColumn, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("deterministic", "mc-dropout", "deep-ensemble", "neuboots")  # of the paper
BETTER: Mapping[str, Any] = {"accuracy": max, "ece": min}


@dataclass(frozen=True)
class CorruptionStudy(Study):
    """One training per dataset, method and seed, tested with every corruption at every severity."""

    name = "corruption"
    source = "figure B.4, appendix B"
    claim = (
        "On corrupted images a deep ensemble is best in most cases, and NeuBoots is more accurate than the plain net."
    )

    data: tuple[str, ...] = ("cifar10",)
    net: str = "small-cnn/2"
    n: int = 5_000
    n_test: int = 700
    epochs: int = 12
    batch_size: int = 128
    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    num_samples: int = 5  # B
    augment: bool = False
    methods: tuple[str, ...] = (*METHODS, "neuboots-paper")

    def jobs(self) -> list[Job]:
        return self.job_grid(data=self.data, method=self.methods)

    def measure(self, job: Job, context: RunContext) -> Rows:
        data = context.load_data(job["data"], val_fraction=0.0)
        assert isinstance(data.standardizer, Standardizer), "images are standardized"
        train = load_rows(data.augmented_train if self.augment else data.train, self.n, job["seed"])
        config = context.config(epochs=self.epochs, batch_size=self.batch_size, seed=job["seed"], optimizer=PAPER_SGD)
        found = evaluate_corruptions(
            make_method(job["method"]).fit(image_net(self.net, data), train, config),
            load_raw_images(data, self.n_test),
            {name: CORRUPTIONS[name] for name in self.corruptions},
            severities=self.severities,
            preprocess=data.standardizer,
            num_samples=self.num_samples,
            progress=False,
        )
        return {
            "shift": [{k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()} for row in found.rows]
        }

    def tables(self, rows: Rows) -> list[Table]:
        columns = (
            MetricColumn("accuracy", "accuracy, %", 100, better="higher"),
            MetricColumn("ece", "ECE, %", 100, better="lower"),
            MetricColumn("nll", "NLL", digits=3, better="lower"),
            MetricColumn("brier", "Brier", digits=3, better="lower"),
        )
        by_severity = tabulate(
            f"By severity (0: clean), mean ± standard deviation over {len(self.corruptions)} corruptions and "
            f"{len(self.seeds)} seeds.",
            sorted(rows["shift"], key=lambda row: (self.data.index(row["data"]), row["severity"])),
            by=("data", "severity", "method"),
            columns=columns,
        )
        by_corruption = tabulate(
            f"Accuracy in % for each corruption, all severities and {len(self.seeds)} seeds together.",
            [{**row, row["method"]: row["accuracy"]} for row in rows["shift"]],
            by=("data", "corruption"),
            columns=[MetricColumn(method, method, 100) for method in self.methods],
        )
        return [by_severity, by_corruption]

    def checks(self, rows: Rows) -> list[Check]:
        checks = []
        for data in self.data:
            found = [row for row in rows["shift"] if row["data"] == data]
            corrupted = [row for row in found if row["severity"] > 0]
            for key, what in (("accuracy", "the most accurate"), ("ece", "calibrated best (ECE)")):
                checks.append(
                    compare_groups(
                        f"on {data}, in more than half of all cases the deep ensemble is {what} of the paper's four, "
                        "alone or with another",
                        count_wins(found, key), "fraction", {"method": "deep-ensemble"}, {"method": "half"},
                        expect="higher",
                    )
                )  # fmt: skip
            checks += [
                compare_groups(
                    f"on corrupted {data}, {title} is more accurate than the plain net",
                    corrupted, "accuracy", {"method": name}, {"method": "deterministic"}, expect="higher", scale=100,
                )
                for name, title in neuboots_variants(self.methods).items()
            ]  # fmt: skip
        return checks

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        from neuboots_paper.plots import plot_boxes

        figures = {}
        for data in self.data:
            figure = Figure(figsize=(7.5, 6.4), layout="constrained")
            levels = (0, *self.severities)
            for ax, (key, label) in zip(
                figure.subplots(2, 1), (("accuracy", "accuracy / %"), ("ece", "ECE / %")), strict=True
            ):
                boxes = {
                    method: [
                        [
                            100 * row[key]
                            for row in rows["shift"]
                            if (row["data"], row["method"], row["severity"]) == (data, method, level)
                        ]
                        for level in levels
                    ]
                    for method in self.methods
                }
                plot_boxes(ax, [str(level) for level in levels], boxes, label=label)
                ax.set_xlabel("severity of the corruption (0: clean)")
            figure.axes[0].set_title(data)
            figure.axes[1].legend().remove()  # same as above
            figures[f"severity-{data.replace('/', '-')}"] = figure
        return figures

    @property
    def note(self) -> str:
        return (
            f"{self.epochs} epochs of {net_title(self.net)} on up to {self.n:,} images of {' and '.join(self.data)}, "
            f"at most {self.n_test:,} to test; corrupted as in CIFAR-C ({', '.join(self.corruptions)}). "
            "The paper: ResNet-110 on CIFAR-10 and CIFAR-100, with the published files, and a plot without numbers."
        )


@cache  # shared by the jobs of one process
def load_raw_images(data: DatasetBundle, limit: int) -> TensorDataset:
    """Test images before standardization, in [0, 1], in memory."""
    assert isinstance(data.standardizer, Standardizer), "images are standardized"
    x, y = load_rows(data.test, limit).tensors
    return TensorDataset(data.standardizer.inverse(x).clamp(0.0, 1.0), y)


def count_wins(rows: Sequence[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    """Fraction of cases (a corruption at a severity, or clean images) in which the deep ensemble is the best of the
    paper's methods, by seed; and one half, to compare with."""
    cases: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if row["method"] in METHODS:
            cases.setdefault((row["seed"], row["corruption"], row["severity"]), {})[row["method"]] = row[key]
    won: dict[int, list[bool]] = {}
    for (seed, *_), values in cases.items():
        best = BETTER[key](values.values())
        won.setdefault(seed, []).append(values.get("deep-ensemble") == best)
    return [
        {"seed": seed, "method": method, "fraction": fraction}
        for seed, wins in won.items()
        for method, fraction in (("deep-ensemble", fmean(wins)), ("half", 0.5))
    ]
