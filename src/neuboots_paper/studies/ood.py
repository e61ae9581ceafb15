"""Table 4.1 and figure B.5: out-of-distribution detection.

    log P(out) / P(in) = w · (max_c p_c, mean_c std_b f_b,c, 1/B Σ_b H(p_b), H(p)) + w₀,   p = 1/B Σ_b p_b

The paper's detector is a logistic regression on these four statistics, fitted on a validation split of both test sets;
NeuBoots, MC dropout and both deep ensembles use it. The deterministic net has the baseline, ODIN and both forms of
Mahalanobis. "Calibration" is the paper's word for input preprocessing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from neuboots.evaluation.ood import (
    Detector,
    Mahalanobis,
    MahalanobisEnsemble,
    MaxSoftmax,
    Odin,
    ReplicateDetector,
    holdout_split,
)
from neuboots.metrics import DetectionMetrics
from neuboots.prediction import Predictor
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots_paper._common import (
    CLASS_COLUMNS,
    PAPER_SGD,
    class_scores,
    classifier,
    load_images,
    load_with_rows,
    make_method,
    neuboots_variants,
    reliability_plots,
)
from neuboots_paper.checks import compare_groups
from neuboots_paper.study import Job, Rows, RunContext, Study, load_published
from neuboots_paper.tables import MetricColumn, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED = load_published("ood")
COLUMNS = (
    MetricColumn("tnr", "TNR at TPR 95 %", 100, better="higher"),
    MetricColumn("auroc", "AUROC", 100, better="higher"),
    MetricColumn("accuracy", "detection accuracy", 100, better="higher"),
    MetricColumn("aupr_in", "AUPR in", 100, better="higher"),
    MetricColumn("aupr_out", "AUPR out", 100, better="higher"),
)
OTHERS = {  # without preprocessing
    "deterministic": "the baseline",
    "mc-dropout": "MC dropout",
    "adversarial-deep-ensemble": "the original deep ensemble",
    "deep-ensemble": "the deep ensemble with cross-entropy",
    "odin": "ODIN",
}
BEST_MAHALANOBIS = "mahalanobis + calibration"  # with features of all layers and preprocessing
ENSEMBLE_SEEDS = 3  # at most, since the two ensembles take three quarters of the time
QUANTITIES = ("probabilities", "logits")  # of which the standard deviation is measured


@dataclass(frozen=True)
class OutOfDistribution(Study):
    """Nine detectors on the nets of five methods, and the spread of NeuBoots by B."""

    name = "ood"
    source = "table 4.1, figure B.5"
    claim = (
        "The statistics of NeuBoots separate CIFAR-10 from SVHN better than the baseline, deep ensembles and ODIN, "
        "and with input preprocessing better than Mahalanobis in most metrics; the spread of its replicates separates "
        "the datasets."
    )

    inside: str = "cifar10"
    outside: str = "svhn"
    net: str = "small-cnn"
    shrink: int = 2  # images are averaged over shrink × shrink pixels
    augment: bool = False
    n: int = 9_000
    n_test: int = 2_500  # of each dataset, including the validation split
    epochs: int = 6
    batch_size: int = 128
    num_validation: int = 500  # of each dataset, to fit the detectors
    num_members: int = 5  # of the ensembles
    num_samples: int = 30  # B of MC dropout and NeuBoots
    sizes: tuple[int, ...] = (2, 5, 10, 20, 30)  # B of figure B.5
    bins: int = 24
    methods: tuple[str, ...] = (
        "deterministic",
        "mc-dropout",
        "adversarial-deep-ensemble",
        "deep-ensemble",
        "neuboots",
        "neuboots-paper",
    )

    @property
    def dataset_names(self) -> Sequence[str]:
        return (self.inside, self.outside)

    def jobs(self) -> list[Job]:
        few, grid = self.seeds[:ENSEMBLE_SEEDS], self.job_grid(method=self.methods)
        return [job for job in grid if job["seed"] in few or "ensemble" not in job["method"]]

    def measure(self, job: Job, context: RunContext) -> Rows:
        data, other = load_with_rows(context, self.inside, self.n), context.load_data(self.outside)
        train = load_images(data, "train", self.n, job["seed"], shrink=self.shrink, augment=self.augment)
        test = [
            load_images(each, "test", self.n_test, reference=data, shrink=self.shrink).tensors for each in (data, other)
        ]
        validation, (inside, outside) = zip(*(holdout_split(each, self.num_validation) for each in test), strict=True)
        config = context.config(epochs=self.epochs, batch_size=self.batch_size, optimizer=PAPER_SGD, seed=job["seed"])
        predictor = make_method(job["method"], members=self.num_members).fit(classifier(self.net, data), train, config)
        B = 1 if job["method"] == "deterministic" else predictor.num_distinct or self.num_samples
        plain_train = load_images(data, "train", self.n, job["seed"], shrink=self.shrink)
        found = []
        for name, detector in make_detectors(job["method"], predictor, B).items():
            fitted = detector.fit(validation[0][0], validation[1][0], train_data=plain_train, progress=False)
            tally = fitted.evaluate(inside[0], outside[0], positive="in", progress=False)
            found.append({"detector": name, "n_in": len(inside[0]), "n_out": len(outside[0]), **select_metrics(tally)})
        rows = {"detection": found, **class_scores(predictor, TensorDataset(*inside), num_samples=B)}
        return rows | (self._spread_rows(predictor, inside[0], outside[0]) if job["method"] == "neuboots" else {})

    def _spread_rows(self, predictor: Predictor, inside: Tensor, outside: Tensor) -> Rows:
        """AUROC and histograms of the predictive standard deviation for each B."""
        found = {group: compute_spreads(predictor, x, self.sizes) for group, x in (("in", inside), ("out", outside))}
        rows: Rows = {"spread": [], "histogram": []}
        for of in QUANTITIES:
            for B in self.sizes:
                ours, theirs = found["in"][of, B], found["out"][of, B]
                means = {"std_in": float(ours.mean()), "std_out": float(theirs.mean())}
                auroc = float(DetectionMetrics.from_batch(ours, theirs, positive="in").auroc)
                rows["spread"].append({"of": of, "B": B, **means, "auroc": auroc})
        top = max(float(found[group]["probabilities", B].max()) for group in found for B in self.sizes)
        for group, B in ((group, B) for group in found for B in self.sizes):
            counts = torch.histc(found[group]["probabilities", B].double(), self.bins, 0.0, top).long().tolist()
            rows["histogram"] += [
                {"group": group, "B": B, "low": float(f"{top * k / self.bins:.6g}"), "count": count}
                for k, count in enumerate(counts)
            ]
        return rows

    def tables(self, rows: Rows) -> list[Table]:
        order = [*PUBLISHED, "neuboots-paper", "neuboots-paper + calibration"]
        fewer = f", of ensembles {ENSEMBLE_SEEDS}" if len(self.seeds) > ENSEMBLE_SEEDS else ""
        seeds = f"mean ± standard deviation over {len(self.seeds)} seeds"
        some = rows["detection"][0]
        spread = (
            MetricColumn("std_in", "mean std inside", digits=4),
            MetricColumn("std_out", "mean std outside", digits=4),
            MetricColumn("auroc", "AUROC of the std, %", 100, better="higher"),
        )
        return [
            tabulate(
                f"{some['n_in']:,} images of {self.inside} (positive) against {some['n_out']:,} of {self.outside}, "
                f"in %, {seeds}{fewer}.",
                sorted(rows["detection"], key=lambda row: order.index(row["detector"])),
                by=("detector",),
                columns=COLUMNS,
                paper=PUBLISHED,
            ),
            tabulate(
                f"The standard deviation over B replicates of NeuBoots, mean over the classes, {seeds}.",
                sorted(rows["spread"], key=lambda row: QUANTITIES.index(row["of"])),
                by=("of", "B"),
                columns=spread,
            ),
            tabulate(
                f"The nets behind the detectors, on {self.inside}, {seeds}{fewer}.",
                rows["scores"],
                by=("method",),
                columns=CLASS_COLUMNS,
                link="reliability-{method}",
            ),
        ]

    def checks(self, rows: Rows) -> list[Check]:
        names, last = neuboots_variants(self.methods).items(), max(self.sizes)
        sides = [
            {"seed": row["seed"], "group": group, "std": row[f"std_{group}"]}
            for row in rows["spread"] if row["B"] == last and row["of"] == "probabilities"
            for group in ("in", "out")
        ]  # fmt: skip
        return [
            *(check for name, title in names for check in check_detector(name, title, rows["detection"])),
            compare_groups(
                f"with B = {last}, the predictive standard deviation of NeuBoots is larger outside than inside",
                sides, "std", {"group": "out"}, {"group": "in"}, expect="higher", digits=4,
            ),
        ]  # fmt: skip

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        """Figure B.5, of the first seed; and the reliability of each method's nets."""
        from matplotlib.figure import Figure

        from neuboots.report.plots import BLUE, ORANGE

        seed = rows["histogram"][0]["seed"]
        bars = [row for row in rows["histogram"] if row["seed"] == seed]
        width = max(row["low"] for row in bars) / (self.bins - 1)
        figure = Figure(figsize=(2.1 * len(self.sizes) + 0.6, 4.2), layout="constrained")
        axes = figure.subplots(2, len(self.sizes), sharex=True, sharey=True, squeeze=False)
        groups = (("in", self.inside, BLUE), ("out", self.outside, ORANGE))
        for line, (group, set_name, color) in zip(axes, groups, strict=True):
            for ax, B in zip(line, self.sizes, strict=True):
                mine = [row for row in bars if row["group"] == group and row["B"] == B]
                total = sum(row["count"] for row in mine)
                percent = [100 * row["count"] / total for row in mine]
                ax.bar([row["low"] for row in mine], percent, width, align="edge", color=color)
                where = {"seed": seed, "of": "probabilities", "B": B}
                (mean,) = [row[f"std_{group}"] for row in rows["spread"] if where.items() <= row.items()]
                ax.axvline(mean, color="black", lw=1.2, ls="--")
                ax.set_title(f"B = {B}" if group == "in" else "", fontsize=10)
                ax.spines[["top", "right"]].set_visible(False)
            line[0].set_ylabel(f"{set_name} ({group})\nimages, %")
        figure.supxlabel("standard deviation of the probabilities over B replicates (dashed: its mean)", fontsize=10)
        return {"spread": figure, **reliability_plots(rows["bins"], ("method",))}

    @property
    def note(self) -> str:
        net = f"{self.net}, {self.epochs} epochs of at most {self.n:,} images"
        small = f", shrunk by {self.shrink}" if self.shrink > 1 else ""
        instead = "" if self.net == "resnet-34" else ", in place of the paper's ResNet-34 on all of CIFAR-10"
        return (
            f"{net}{small}{instead}. {self.num_validation:,} test images of each set fit the detectors, the others "
            "test them. The paper has more images outside than inside, which raises AUPR out and lowers AUPR in. It "
            "does not state of what its standard deviation is; the plot has that of the probabilities."
        )


def compute_spreads(predictor: Predictor, x: Tensor, sizes: Sequence[int]) -> dict[tuple[str, int], Tensor]:
    """Standard deviation of probabilities and of logits over the first B replicates, mean over classes: (N,) each."""
    parts: dict[tuple[str, int], list[Tensor]] = {(of, B): [] for of in QUANTITIES for B in sizes}
    for some in torch.split(x, 256):
        logits = predictor.predict(some, max(sizes)).samples  # (B, N, C)
        for (of, B), found in parts.items():
            values = logits[:B].softmax(2) if of == "probabilities" else logits[:B]
            found.append(values.std(0).mean(1))
    return {key: torch.cat(found) for key, found in parts.items()}


# -- detectors -----------------------------------------------------------------------------------------


def make_detectors(method: str, predictor: Predictor, num_samples: int) -> dict[str, Detector]:
    """Detectors of table 4.1 for the net of a method, by name."""
    if method == "deterministic":
        return {
            "deterministic": MaxSoftmax(predictor, num_samples=num_samples),
            "odin": Odin(predictor, num_samples=num_samples),
            "mahalanobis": Mahalanobis(predictor),
            "mahalanobis + calibration": MahalanobisEnsemble(predictor),
        }
    found: dict[str, Detector] = {method: ReplicateDetector(predictor, num_samples=num_samples)}
    if method.startswith("neuboots"):
        found[f"{method} + calibration"] = ReplicateDetector(predictor, num_samples=num_samples, preprocess=True)
    return found


def select_metrics(tally: DetectionMetrics) -> dict[str, float]:
    """The five metrics of table 4.1, as fractions."""
    return {
        "tnr": float(tally.tnr_at_tpr),
        "auroc": float(tally.auroc),
        "accuracy": float(tally.detection_accuracy),
        "aupr_in": float(tally.aupr_in),
        "aupr_out": float(tally.aupr_out),
    }


def check_detector(name: str, title: str, rows: Sequence[dict[str, Any]]) -> Iterator[Check]:
    """Check the AUROC against the other detectors, against Mahalanobis with preprocessing, and without it."""
    ours, preprocessed, far = ({"detector": which} for which in (name, f"{name} + calibration", BEST_MAHALANOBIS))
    higher = partial(compare_groups, rows=rows, expect="higher", scale=100)
    for other, words in OTHERS.items():
        claim = f"{title} has a higher AUROC than {words}, without preprocessing"
        yield higher(claim, key="auroc", first=ours, second={"detector": other})
    yield check_majority(
        f"with preprocessing {title} is better than Mahalanobis with features of all layers, in most metrics",
        [higher(column.title, key=column.key, first=preprocessed, second=far) for column in COLUMNS],
    )
    yield higher(f"preprocessing increases the AUROC of {title}", key="auroc", first=preprocessed, second=ours)


def check_majority(claim: str, parts: Sequence[Check]) -> Check:
    """Check that more than half of several checks hold; it fails if half or more of them fail.

    >>> check_majority("mostly", [Check("a", True, "1"), Check("b", True, "2"), Check("c", False, "3")]).holds
    True
    """
    yes, no = (sum(part.holds is word for part in parts) for word in (True, False))
    holds = True if 2 * yes > len(parts) else False if 2 * no >= len(parts) else None
    return Check(claim, holds, f"{yes} of {len(parts)} are: " + "; ".join(part.evidence for part in parts))
