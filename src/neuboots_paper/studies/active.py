"""Figure 4b: test accuracy of active learning with each method.

    next rows = the k with the largest H(p̄(x)),   p̄ = 1/B Σ_b softmax f_b(x);   then train again

The protocol is that of Moon, Kim, Shin and Hwang (Confidence-aware learning for deep neural networks, ICML 2020). A
seed is a trial: initial labels and initial weights are the same for all methods. "random" is the deterministic net with
random rows. The paper gives one number: 71.6 % for NeuBoots on CIFAR-100, 2.5 points more than MC dropout and the deep
ensemble. With `augment`, rows of the pool are augmented when they are scored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from neuboots.evaluation.active_learning import run_active_learning
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots_paper._common import PAPER_SGD, image_net, load_rows, make_method, net_title, neuboots_variants
from neuboots_paper.checks import combine_checks, compare_groups
from neuboots_paper.study import Job, Rows, RunContext, Study
from neuboots_paper.tables import MetricColumn, PaperValues, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER: PaperValues = {("cifar100", "neuboots"): {"accuracy": 71.6}}
GAP = 2.5  # points between NeuBoots and the two others, as stated in the paper
OTHERS = ("random", "mc-dropout", "deep-ensemble")


@dataclass(frozen=True)
class Active(Study):
    """Learning curves of each method, by dataset and trial."""

    name = "active"
    source = "figure 4b, section 4.2"
    claim = (
        "With rows selected by entropy, NeuBoots is more accurate for the same number of labels than random rows, MC "
        "dropout and a deep ensemble: "
        f"on CIFAR-100 it ends at {PAPER['cifar100', 'neuboots']['accuracy']} %, {GAP} points above the last two."
    )

    data: tuple[str, ...] = ("cifar10", "fashion_mnist")
    net: str = "small-cnn/2"
    pool: int = 3_000
    n_test: int = 1_000
    start: int = 100
    query: int = 100
    rounds: int = 5
    epochs: int = 15
    batch_size: int = 32
    num_samples: int = 5  # B
    augment: bool = False
    methods: tuple[str, ...] = ("random", "mc-dropout", "deep-ensemble", "neuboots", "neuboots-paper")

    def jobs(self) -> list[Job]:
        return self.job_grid(data=self.data, method=self.methods)

    def measure(self, job: Job, context: RunContext) -> Rows:
        data, chance = context.load_data(job["data"], val_fraction=0.0), job["method"] == "random"
        config = context.config(epochs=self.epochs, batch_size=self.batch_size, optimizer=PAPER_SGD)
        found = run_active_learning(
            make_method("deterministic" if chance else job["method"]),
            image_net(self.net, data),
            load_rows(data.augmented_train if self.augment else data.train, self.pool, job["seed"]),
            load_rows(data.test, self.n_test),
            replace(config, folder=None),  # each round has its own
            strategy="random" if chance else "entropy",
            initial_size=self.start,
            query_size=self.query,
            num_rounds=self.rounds,
            num_trials=1,
            num_samples=self.num_samples,
            seed=job["seed"],
            folder=config.folder,
            progress=context.progress,
        )
        metrics = {name: values[0].tolist() for name, values in found.metrics.items()}
        return {
            "curve": [
                {"labels": labels} | {name: round(metrics[name][r], 6) for name in ("accuracy", "ece", "nll")}
                for r, labels in enumerate(found.num_labels.tolist())
            ]
        }

    def tables(self, rows: Rows) -> list[Table]:
        columns = (
            MetricColumn("accuracy", "accuracy with all labels, %", 100, better="higher"),
            MetricColumn("mean accuracy", "mean accuracy of the curve, %", 100, better="higher"),
            MetricColumn("ece", "ECE with all labels, %", 100, better="lower"),
        )
        ends = tabulate(
            f"Active learning, {self._labels}, mean ± standard deviation over {len(self.seeds)} trials.",
            summarize_curves(rows["curve"]),
            by=("data", "method"),
            columns=columns,
            paper=PAPER,
        )
        curves = tabulate(
            "Accuracy in % as labels are added.",
            _pivot_methods(rows["curve"]),
            by=("data", "labels"),
            columns=[MetricColumn(method, method, 100) for method in self.methods],
        )
        return [ends, curves]

    def checks(self, rows: Rows) -> list[Check]:
        names, found = neuboots_variants(self.methods).items(), summarize_curves(rows["curve"])
        return [
            check
            for data in self.data
            for name, title in names
            for check in _check_method(name, f"on {data}, {title}", [row for row in found if row["data"] == data])
        ]

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        import torch
        from matplotlib.figure import Figure

        from neuboots.report.plots import plot_learning_curves

        figure = Figure(figsize=(4.6 * len(self.data), 4.0), layout="constrained")
        for ax, data in zip(figure.subplots(1, len(self.data), squeeze=False)[0], self.data, strict=True):
            curves = {}
            for method in self.methods:
                lines = _group_trials([row for row in rows["curve"] if (row["data"], row["method"]) == (data, method)])
                sizes = [row["labels"] for row in lines[0]]
                values = [[100 * row["accuracy"] for row in line] for line in lines]
                curves[method] = sizes, torch.tensor(values, dtype=torch.float64)
            plot_learning_curves(ax, curves, label="test accuracy / %")
            low, high = ax.get_ylim()
            ax.set(title=data, ylim=(max(0.0, low), min(100.0, high)))  # intervals of few trials reach beyond
            ax.legend(loc="lower right", fontsize=8)
        return {"learning-curves": figure}

    @property
    def _labels(self) -> str:
        return f"{self.start:,} labels, then {self.rounds} times {self.query:,} more"

    @property
    def note(self) -> str:
        return (
            f"{self._labels} of a pool of up to {self.pool:,}; {self.epochs} epochs of {net_title(self.net)} at each "
            f"round, on {' and '.join(self.data)}. The paper: ResNet-18 on CIFAR-10 and CIFAR-100, 2,000 labels, then "
            "10 times 2,000 more."
        )


def _check_method(name: str, who: str, rows: Sequence[dict[str, Any]]) -> Iterator[Check]:
    """Check the accuracy against each other method with all labels, and over the whole curve."""
    higher = partial(compare_groups, rows=rows, first={"method": name}, expect="higher", scale=100)
    for other in OTHERS:
        yield higher(f"{who} ends more accurate than {other}", key="accuracy", second={"method": other})
    means = [higher("", key="mean accuracy", second={"method": other}) for other in OTHERS]
    yield combine_checks(f"{who} is the most accurate over the whole curve", means)


def _group_trials(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows of each trial, sorted by the number of labels."""
    trials: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["labels"]):
        trials.setdefault(row["seed"], []).append(row)
    return list(trials.values())


def summarize_curves(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per learning curve: last accuracy and ECE, and mean accuracy over its sizes."""
    found = []
    for data, method in dict.fromkeys((row["data"], row["method"]) for row in rows):
        for line in _group_trials([row for row in rows if (row["data"], row["method"]) == (data, method)]):
            last = line[-1]
            mean = fmean(row["accuracy"] for row in line)
            values = {"accuracy": last["accuracy"], "mean accuracy": mean, "ece": last["ece"]}
            found.append({"data": data, "method": method, "seed": last["seed"], **values})
    return found


def _pivot_methods(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per dataset, number of labels and trial, with one column of accuracies per method."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = {name: row[name] for name in ("data", "labels", "seed")}
        found.setdefault(tuple(key.values()), key)[row["method"]] = row["accuracy"]
    return list(found.values())
