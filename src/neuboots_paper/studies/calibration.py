"""Tables B.3 and B.4, figure 4a: calibration, accuracy and relative times of six methods.

    ECE = Σ_m n_m / N |accuracy_m − confidence_m|,   p(y | x) = 1/B Σ_b softmax f_b(x),   B = K = 5

There are two deep ensembles: the original one, with adversarial training and the Brier score (Lakshminarayanan et al.,
NeurIPS 2017), and the one with cross-entropy (Ashukha et al., ICLR 2020), which table B.3 also has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from neuboots.evaluation.benchmark import benchmark_methods
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots.training import TrainingConfig
from neuboots_paper._common import (
    PAPER_SGD,
    class_scores,
    image_net,
    load_images,
    load_with_rows,
    make_method,
    neuboots_variants,
    pool_bins,
    reliability_plots,
)
from neuboots_paper.checks import combine_checks, compare_groups
from neuboots_paper.study import Job, Rows, RunContext, Study, load_published
from neuboots_paper.tables import MetricColumn, PaperValues, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED = load_published("calibration")
COLUMNS = (
    MetricColumn("fit_ratio", "training time, × plain", digits=1),
    MetricColumn("predict_ratio", "prediction time, × plain", digits=1),
    MetricColumn("error", "error, %", 100, better="lower"),
    MetricColumn("ece", "ECE, %", 100, better="lower"),
    MetricColumn("nll", "NLL", digits=3, better="lower"),
    MetricColumn("paper_nll", "10 × NLL at the mean logit", better="lower"),
    MetricColumn("brier", "Brier, %", 100, better="lower"),
    MetricColumn("overconfidence", "confidence − accuracy, %", 100),
)


@dataclass(frozen=True)
class CalibrationStudy(Study):
    """Six methods on three datasets with two nets: metrics, relative times and reliability diagrams."""

    name = "calibration"
    source = "tables B.3 and B.4, figure 4a"
    claim = (
        "NeuBoots is better calibrated than the plain net and MC dropout and about as well as a deep ensemble, at the "
        "accuracy of the plain net; it predicts at least three times as fast as both, and trains at least nine times "
        "as fast as the original deep ensemble."
    )

    data: tuple[str, ...] = ("cifar100", "cifar10", "svhn")
    nets: tuple[str, ...] = ("resnet-8", "densenet-10")
    shrink: int = 4  # images are averaged over shrink × shrink pixels
    augment: bool = False
    n: int = 1_200
    n_test: int = 1_500
    n_timed: int = 512
    epochs: int = 15
    batch_size: int = 64
    num_samples: int = 5  # K of the ensembles, B of the others
    repeats: int = 2  # of timing
    few_seeds: tuple[str, ...] = ("adversarial-deep-ensemble",)  # ten trainings each: only the first seed
    methods: tuple[str, ...] = (
        "deterministic",
        "mc-dropout",
        "adversarial-deep-ensemble",
        "deep-ensemble",
        "neuboots",
        "neuboots-paper",
    )

    def jobs(self) -> list[Job]:
        first, grid = self.seeds[0], self.job_grid(data=self.data, net=self.nets, method=self.methods)
        trained = [job for job in grid if job["seed"] == first or job["method"] not in self.few_seeds]
        times = [{"data": data, "net": net, "seed": first} for data in self.data for net in self.nets]
        return trained + times

    def is_timing_job(self, job: Job) -> bool:
        return "method" not in job

    def measure(self, job: Job, context: RunContext) -> Rows:
        data, seed = load_with_rows(context, job["data"], self.n), job["seed"]
        net, prepare = image_net(job["net"], data), partial(load_images, data, shrink=self.shrink)
        options = {"batch_size": self.batch_size, "optimizer": PAPER_SGD, "seed": seed}
        if self.is_timing_job(job):
            return {"times": self._times(net, prepare, TrainingConfig(epochs=1, progress=False, **options))}
        train = prepare("train", self.n, seed, augment=self.augment)
        predictor = make_method(job["method"], members=self.num_samples).fit(
            net, train, context.config(epochs=self.epochs, **options)
        )
        found = class_scores(predictor, prepare("test", self.n_test), num_samples=self.num_samples)
        scores = {**found["scores"][0], "overconfidence": overconfidence(found["bins"])}
        return {"scores": [_round_row(scores, 5)], "bins": [_round_row(row, 4) for row in found["bins"]]}

    def _times(self, net: Any, prepare: Any, config: TrainingConfig) -> list[dict[str, Any]]:
        """Times of one epoch on few rows, since relative times do not depend on what is learned."""
        found = benchmark_methods(
            {name: lambda K, name=name: make_method(name, members=K) for name in self.methods},  # type: ignore[misc]
            net,
            prepare("train", self.n_timed, augment=self.augment),
            prepare("test", self.n_timed).tensors[0],
            config,
            baseline="deterministic",
            num_members=(self.num_samples,),
            repeats=self.repeats,
            memory=False,
            progress=False,
        )
        return [
            {"method": row.method, "fit_ratio": round(row.fit_ratio, 4), "predict_ratio": round(row.predict_ratio, 4)}
            for row in found.rows
        ]

    def tables(self, rows: Rows) -> list[Table]:
        few = f" ({', '.join(self.few_seeds)}: the first one)" if self.few_seeds else ""
        return [
            tabulate(
                f"{data}, B = K = {self.num_samples}, mean ± standard deviation over {len(self.seeds)} seeds{few}.",
                [row for row in rows["scores"] + rows["times"] if row["data"] == data],
                by=("data", "net", "method"),
                columns=COLUMNS,
                paper=self._paper(),
                link="reliability-{data}-{net}-{method}",
                note=(
                    "The paper's NLL is ten times that at the mean logit. NLL: of the mean probability, in nats. A net "
                    "with uninformative but calibrated probabilities also has a low ECE: compare the error."
                ),
            )
            for data in self.data
        ]

    def _paper(self) -> PaperValues:
        """Published values by our nets: those of ResNet-110 for our ResNet, and so on."""
        return {
            (data, net, method): values
            for net in self.nets
            for (data, family, method), values in PUBLISHED.items()
            if net.startswith(family)
        }

    def checks(self, rows: Rows) -> list[Check]:
        faster = [
            check_speed(rows["times"], "predict_ratio", other, least=3) for other in ("mc-dropout", "deep-ensemble")
        ]
        names = neuboots_variants(self.methods).items()
        return [
            *(check for name, title in names for check in self._check_method(name, title, rows["scores"])),
            combine_checks(
                "NeuBoots predicts at least three times as fast as MC dropout and the deep ensemble", faster
            ),
            check_speed(rows["times"], "fit_ratio", "adversarial-deep-ensemble", least=9),
        ]

    def _check_method(self, name: str, title: str, rows: Sequence[dict[str, Any]]) -> Iterator[Check]:
        everywhere = ("data", "net", "seed")
        against = partial(compare_groups, rows=rows, first={"method": name}, pair=everywhere, scale=100)
        for other, called in (("deterministic", "the plain net"), ("mc-dropout", "MC dropout")):
            claim = f"{title} has a lower ECE than {called}, over all sets and nets"
            yield against(claim, key="ece", second={"method": other}, expect="lower")
        yield against(  # in the paper the two differ by at most 3.4 points
            f"the ECE of {title} is that of the deep ensemble within 3.5 points, over all sets and nets",
            key="ece", second={"method": "deep-ensemble"}, expect="equal", margin=3.5,
        )  # fmt: skip
        yield against(  # in the paper by at most 1.2 points
            f"{title} makes as many errors as the plain net, within 2 points, over all sets and nets",
            key="error", second={"method": "deterministic"}, expect="equal", margin=2.0,
        )  # fmt: skip

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        from neuboots.report.plots import plot_reliability

        data = self.data[0]
        figure = Figure(figsize=(5.2 * len(self.nets), 4.6), layout="constrained")
        for ax, net in zip(figure.subplots(1, len(self.nets), squeeze=False)[0], self.nets, strict=True):
            bins = [row for row in rows["bins"] if (row["data"], row["net"]) == (data, net)]
            curves = {
                m: pool_bins([row for row in bins if row["method"] == m]) for m in self.methods if m != "neuboots-paper"
            }
            plot_reliability(ax, curves)
            ax.set_title(f"{net} on {data}")
        return {"figure-4a": figure, **reliability_plots(rows["bins"], ("data", "net", "method"))}

    @property
    def note(self) -> str:
        size = f", images averaged over {self.shrink} × {self.shrink} pixels" if self.shrink > 1 else ""
        few = f" {', '.join(self.few_seeds)}: one seed." if self.few_seeds else ""
        return (
            f"{' and '.join(self.nets)}, {self.epochs} epochs on {self.n:,} images of each dataset{size}; the paper "
            f"has ResNet-110 and DenseNet-100 on complete datasets.{few} Times: an epoch on {self.n_timed:,} images."
        )


def overconfidence(bins: Sequence[dict[str, Any]]) -> float:
    """Mean confidence minus accuracy."""
    gaps = sum(row["count"] * (row["confidence"] - row["accuracy"]) for row in bins)
    return float(gaps / sum(row["count"] for row in bins))


def check_speed(
    rows: Sequence[dict[str, Any]], key: Literal["fit_ratio", "predict_ratio"], other: str, *, least: float
) -> Check:
    """Check that NeuBoots is at least `least` times as fast as another method."""
    ours = {(row["data"], row["net"]): row[key] for row in rows if row["method"] == "neuboots"}
    found = []
    for row in rows:
        if row["method"] == other:
            place = {"data": row["data"], "net": row["net"]}
            found.append({**place, "of": f"of {other}", "speed": row[key] / ours[row["data"], row["net"]]})
            found.append({**place, "of": "the claim's", "speed": least})
    what = "trains" if key == "fit_ratio" else "predicts"
    claim = f"NeuBoots {what} at least {least:g} times as fast as {other}"
    return compare_groups(
        claim, found, "speed", {"of": f"of {other}"}, {"of": "the claim's"}, expect="higher", pair=("data", "net")
    )


def _round_row(row: dict[str, Any], digits: int) -> dict[str, Any]:
    return {key: round(value, digits) for key, value in row.items()}
