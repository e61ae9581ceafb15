"""Figure 5: F1 of each class on imbalanced CIFAR-10 and on white blood cells.

    F1_c = 2 n_cc / (Σ_t n_tc + Σ_g n_cg),   n_tg: test images of class t predicted as g by the predictive mean

The minor class has the fewest training rows, the major class the most. CIFAR-10 is subsampled to the paper's counts, 50
airplanes up to 500 trucks; the cells are imbalanced by nature. The paper shows bars without numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any

from neuboots.data.dataset import subsample_classes
from neuboots.evaluation.imbalance import evaluate_imbalance
from neuboots.loading import load_class_labels
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots_paper._common import PAPER_SGD, image_net, load_rows, make_method, net_title, neuboots_variants
from neuboots_paper.checks import combine_checks, compare_groups
from neuboots_paper.study import Job, Rows, RunContext, Study
from neuboots_paper.tables import MetricColumn, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNTS = (50, 100, 150, 200, 250, 300, 350, 400, 450, 500)  # section 4.5: airplane … truck
OTHERS = ("deterministic", "mc-dropout", "deep-ensemble")
NAMED = "eosinophil"  # the rarest class of the paper


@dataclass(frozen=True)
class ImbalanceStudy(Study):
    """One training per dataset, method and seed; F1 of every class."""

    name = "imbalance"
    source = "figure 5, section 4.5"
    claim = (
        "On imbalanced data NeuBoots classifies better than the plain net, MC dropout and a deep ensemble, especially "
        "the rarest class (eosinophil), with little variation."
    )

    cases: tuple[tuple[str, str, int, int], ...] = (  # data, net, epochs, batch size
        ("cifar10", "small-cnn/2", 15, 128),
        ("wbc_cells", "small-cnn/2", 30, 32),
    )
    subsampled: str = "cifar10"  # dataset that is subsampled to counts[c] rows of class c
    counts: tuple[int, ...] = COUNTS
    num_samples: int = 5  # B
    augment: bool = False
    methods: tuple[str, ...] = (*OTHERS, "neuboots", "neuboots-paper")

    @property
    def dataset_names(self) -> Sequence[str]:
        return [case[0] for case in self.cases]

    def jobs(self) -> list[Job]:
        return self.job_grid(data=self.dataset_names, method=self.methods)

    def measure(self, job: Job, context: RunContext) -> Rows:
        _, net, epochs, batch_size = next(case for case in self.cases if case[0] == job["data"])
        data = context.load_data(job["data"], val_fraction=0.0)
        train = load_rows(data.augmented_train if self.augment else data.train)
        if job["data"] == self.subsampled:
            train = subsample_classes(train, self.counts, seed=job["seed"])
        counts = load_class_labels(train).bincount(minlength=data.num_classes)
        config = context.config(epochs=epochs, batch_size=batch_size, seed=job["seed"], optimizer=PAPER_SGD)
        predictor = make_method(job["method"]).fit(image_net(net, data), train, config)
        found = evaluate_imbalance(
            predictor, load_rows(data.test), train_counts=counts.tolist(), num_samples=self.num_samples, progress=False
        )
        roles = {found.minor: "minor", found.major: "major"}
        figures = {"f1": found.f1, "precision": found.precision, "recall": found.recall, "f1 sd": found.f1_std}
        rows = [
            {"class": name, "role": roles.get(c, ""), "train rows": int(counts[c]), "test rows": int(found.support[c])}
            | {key: round(float(values[c]), 6) for key, values in figures.items()}
            for c, name in enumerate(data.classes)
        ]
        return {"classes": rows}

    def tables(self, rows: Rows) -> list[Table]:
        over = f"mean ± standard deviation over {len(self.seeds)} seeds"
        columns = (
            MetricColumn("minor", "minor class", 100, better="higher"),
            MetricColumn("major", "major class", 100, better="higher"),
            MetricColumn("mean", "mean of all classes", 100, better="higher"),
        )
        each = [
            {
                **row,
                row["method"]: row["f1"],
                "class": f"{row['class']}{' (' + row['role'] + ')' if row['role'] else ''}",
            }
            for row in rows["classes"]
        ]
        return [
            tabulate(f"F1 in %, {over}.", summarize_trainings(rows["classes"]), by=("data", "method"), columns=columns),
            tabulate(
                "F1 of each class in %, and its number of training rows.",
                each,
                by=("data", "class", "train rows"),
                columns=[MetricColumn(method, method, 100) for method in self.methods],
            ),
        ]

    def checks(self, rows: Rows) -> list[Check]:
        return [
            check
            for data in self.dataset_names
            for ours, title in neuboots_variants(self.methods).items()
            for check in _check_method(ours, title, data, [row for row in rows["classes"] if row["data"] == data])
        ]

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        from neuboots_paper.plots import plot_bars

        ends = Figure(figsize=(4.6 * len(self.dataset_names), 3.8), layout="constrained")
        figures = {"minor-and-major": ends}
        for ax, data in zip(
            ends.subplots(1, len(self.dataset_names), squeeze=False)[0], self.dataset_names, strict=True
        ):
            of_set = [row for row in rows["classes"] if row["data"] == data]
            titles = {row["class"]: f"{row['class']}\n{row['train rows']}" for row in of_set}
            roles = {row["class"]: row["role"] for row in of_set if row["role"]}
            whole = Figure(figsize=(max(5.0, 1.05 * len(titles)), 3.8), layout="constrained")
            chosen = sorted(roles, key=lambda name: roles[name], reverse=True)
            for axes, names in ((ax, chosen), (whole.subplots(), list(titles))):
                bars = {
                    method: [
                        [100 * row["f1"] for row in of_set if (row["method"], row["class"]) == (method, name)]
                        for name in names
                    ]
                    for method in self.methods
                }
                named = [f"{roles[name]}: {titles[name]}" if names is chosen else titles[name] for name in names]
                plot_bars(axes, named, bars, label="F1 / %")
                axes.set(title=data, xlabel="class and its rows to train with", ylim=(0, 100))
            figures[f"classes-{data.replace('/', '-')}"] = whole
        return figures

    @property
    def note(self) -> str:
        cases = "; ".join(f"{data}: {epochs} epochs of {net_title(net)}" for data, net, epochs, _ in self.cases)
        cells = (
            " The paper's cells (144 eosinophils, 281 monocytes, 2,195 lymphocytes, 3,177 neutrophils) are not public: "
            "wbc_cells has 233 to train and 115 to test, and its rarest class is the monocyte."
            if "wbc_cells" in self.dataset_names
            else ""
        )
        return f"{cases}.{cells} The paper: ResNet-18, and bars without numbers."


def summarize_trainings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per training: F1 of the minor and the major class, and the mean over classes."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["data"], row["method"], row["seed"]), []).append(row)
    return [
        {"data": data, "method": method, "seed": seed, "mean": fmean(row["f1"] for row in members)}
        | {row["role"]: row["f1"] for row in members if row["role"]}
        for (data, method, seed), members in groups.items()
    ]


def _check_method(ours: str, title: str, data: str, rows: Sequence[dict[str, Any]]) -> Iterator[Check]:
    """Check the mean F1 and that of the rarest class against each other method, and its variance over seeds."""
    found, higher = (
        summarize_trainings(rows),
        partial(compare_groups, first={"method": ours}, expect="higher", scale=100),
    )
    for other in OTHERS:
        claim = f"on {data}, {title} has a higher mean F1 than {other}"
        yield higher(claim, rows=found, key="mean", second={"method": other})
    minor = next(row["class"] for row in rows if row["role"] == "minor")
    parts = [higher("", rows=found, key="minor", second={"method": other}) for other in OTHERS]
    yield combine_checks(f"on {data}, {title} has the highest F1 of the rarest class, {minor}", parts)
    spoken = [row for row in rows if row["class"] == NAMED]
    if spoken and minor != NAMED:
        parts = [higher("", rows=spoken, key="f1", second={"method": other}) for other in OTHERS]
        yield combine_checks(f"on {data}, {title} has the highest F1 of {NAMED}", parts)
    parts = [_check_variance(found, "minor", ours, other) for other in OTHERS]
    yield combine_checks(f"on {data}, the F1 of the rarest class varies less with {title} than with the others", parts)


def _check_variance(rows: Sequence[dict[str, Any]], key: str, first: str, other: str, *, level: float = 0.95) -> Check:
    """Check by an F test that the variance over seeds is smaller than that of another method."""
    from scipy.stats import f

    ours, theirs = ([100 * row[key] for row in rows if row["method"] == which] for which in (first, other))
    if min(len(ours), len(theirs)) < 2:
        return Check("", None, f"the spread of {first} and {other} was not measured")
    lost = [name for name, values in ((first, ours), (other, theirs)) if not any(values)]
    if lost:  # a constant F1 of zero
        return Check("", None, f"{' and '.join(lost)} never found the class")
    a, b = variance(ours), variance(theirs)
    low, high = (float(f.ppf(q, len(ours) - 1, len(theirs) - 1)) for q in ((1 - level) / 2, (1 + level) / 2))
    holds = True if a < low * b else False if a > high * b else None
    return Check("", holds, f"sd {first} {a**0.5:.2f} against {other} {b**0.5:.2f} over {len(ours)} seeds")
