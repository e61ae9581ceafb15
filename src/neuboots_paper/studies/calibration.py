"""Tables B.3 and B.4, figure 4a: is a net as often right as it says?

    ECE = Σ_m n_m / N |accuracy_m − confidence_m|,   p(y | x) = 1/B Σ_b softmax f_b(x),   B = K = 5

Two deep ensembles are compared: the original one, with adversarial training and the Brier score (Lakshminarayanan et
al., NeurIPS 2017), and that of plain cross-entropy (Ashukha et al., ICLR 2020), which table B.3 has beside it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from neuboots.evaluation.benchmark import benchmark_methods
from neuboots.prediction import Method
from neuboots.report.checks import Check, combine_checks, compare_groups
from neuboots.report.tables import MetricColumn, PaperValues, Table, tabulate
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
from neuboots_paper.study import Job, Rows, RunContext, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KEYS = ("fit_ratio", "predict_ratio", "error", "ece", "paper_nll", "brier")
_PRINTED = {  # the lines of tables B.3 and B.4: relative times, error, ECE, NLL and Brier score in %
    ("cifar100", "resnet", "plain"): "1.0 | 1.0 | 26.69 ± 0.35 | 16.43 ± 0.15 | 14.19 ± 0.71 | 42.09 ± 0.51",
    ("cifar100", "resnet", "mc-dropout"): "1.1 | 5.0 | 26.45 ± 0.08 | 13.65 ± 1.25 | 13.16 ± 0.64 | 40.46 ± 0.30",
    ("cifar100", "resnet", "deep-ensemble-original"): (
        "9.5 | 5.0 | 34.84 ± 0.21 | 27.33 ± 4.92 | 18.69 ± 1.44 | 56.12 ± 3.02"
    ),
    ("cifar100", "resnet", "deep-ensemble"): "5.0 | 5.0 | 24.28 ± 0.11 | 4.74 ± 0.17 | 7.05 ± 0.28 | 28.29 ± 0.12",
    ("cifar100", "resnet", "neuboots"): "1.1 | 1.2 | 26.53 ± 0.19 | 8.13 ± 0.28 | 15.68 ± 0.31 | 39.31 ± 0.64",
    ("cifar100", "densenet", "plain"): "1.0 | 1.0 | 24.02 ± 0.3 | 12.38 ± 0.21 | 10.93 ± 0.34 | 36.40 ± 0.63",
    ("cifar100", "densenet", "mc-dropout"): "1.1 | 5.0 | 23.88 ± 0.09 | 9.49 ± 0.35 | 10.22 ± 0.86 | 34.94 ± 0.67",
    ("cifar100", "densenet", "deep-ensemble-original"): (
        "9.5 | 5.0 | 25.51 ± 0.24 | 6.67 ± 5.06 | 9.66 ± 0.24 | 35.33 ± 1.21"
    ),
    ("cifar100", "densenet", "deep-ensemble"): "5.0 | 5.0 | 20.16 ± 0.21 | 4.74 ± 0.42 | 7.07 ± 0.14 | 30.29 ± 0.12",
    ("cifar100", "densenet", "neuboots"): "1.1 | 1.3 | 23.46 ± 0.09 | 2.38 ± 0.12 | 11.58 ± 0.13 | 34.67 ± 0.24",
    ("cifar10", "resnet", "plain"): "1.0 | 1.0 | 5.89 | 4.46 | 3.34 | 10.2",
    ("cifar10", "resnet", "mc-dropout"): "1.0 | 5.0 | 5.93 | 3.96 | 2.57 | 9.7",
    ("cifar10", "resnet", "deep-ensemble-original"): "9.5 | 5.0 | 5.44 | 5.72 | 2.43 | 8.81",
    ("cifar10", "resnet", "neuboots"): "1.1 | 1.2 | 5.65 | 0.89 | 3.28 | 9.32",
    ("cifar10", "densenet", "plain"): "1.0 | 1.0 | 5.13 | 3.2 | 2.23 | 8.3",
    ("cifar10", "densenet", "mc-dropout"): "1.1 | 5.0 | 4.95 | 2.72 | 1.93 | 8.1",
    ("cifar10", "densenet", "deep-ensemble-original"): "9.5 | 5.0 | 4.63 | 0.54 | 1.46 | 6.74",
    ("cifar10", "densenet", "neuboots"): "1.1 | 1.3 | 4.0 | 2.87 | 2.82 | 8.66",
    ("svhn", "resnet", "plain"): "1.0 | 1.0 | 3.55 | 2.39 | 1.75 | 5.8",
    ("svhn", "resnet", "mc-dropout"): "1.1 | 5.0 | 3.64 | 1.8 | 1.73 | 6.11",
    ("svhn", "resnet", "deep-ensemble-original"): "9.5 | 5.0 | 2.65 | 1.78 | 1.2 | 4.16",
    ("svhn", "resnet", "neuboots"): "1.1 | 1.2 | 3.51 | 0.96 | 1.48 | 5.6",
    ("svhn", "densenet", "plain"): "1.0 | 1.0 | 3.6 | 3.2 | 2.23 | 8.3",
    ("svhn", "densenet", "mc-dropout"): "1.1 | 5.0 | 3.6 | 1.6 | 1.62 | 5.89",
    ("svhn", "densenet", "deep-ensemble-original"): "9.5 | 5.0 | 2.68 | 1.55 | 1.18 | 4.23",
    ("svhn", "densenet", "neuboots"): "1.1 | 1.3 | 3.65 | 0.47 | 1.49 | 5.7",
}
PRINTED: dict[tuple[str, str, str], dict[str, str]] = {
    key: dict(zip(_KEYS, line.split(" | "), strict=True)) for key, line in _PRINTED.items()
}
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
    """Six methods on three sets with two nets: figures of calibration, relative times, reliability diagrams."""

    name = "calibration"
    source = "tables B.3 and B.4, figure 4a"
    claim = (
        "NeuBoots is calibrated better than the plain net and MC dropout and about as well as a deep ensemble, at the "
        "accuracy of the plain net; it predicts at least three times as fast as both, and trains at least nine times "
        "as fast as the original deep ensemble."
    )
    presets: ClassVar = {
        "smoke": {
            "data": ("digits",),
            "nets": ("resnet-8", "densenet-10"),
            "shrink": 2,
            "n": 64,
            "n_test": 60,
            "n_timed": 32,
            "epochs": 1,
            "num_samples": 2,
            "repeats": 1,
            "seeds": (0, 1),
        },
        "cpu": {},
        "paper": {
            "nets": ("resnet-110", "densenet-100"),
            "shrink": 1,
            "augment": True,
            "n": 100_000,
            "n_test": 30_000,
            "n_timed": 10_000,
            "epochs": 200,
            "batch_size": 128,
            "few_seeds": (),
            "seeds": (0, 1, 2, 3, 4),
        },
    }

    data: tuple[str, ...] = ("cifar100", "cifar10", "svhn")
    nets: tuple[str, ...] = ("resnet-8", "densenet-10")
    shrink: int = 4  # means over so many pixels on a side
    augment: bool = False
    n: int = 1_200
    n_test: int = 1_500
    n_timed: int = 512
    epochs: int = 15
    batch_size: int = 64
    num_samples: int = 5  # K of the ensembles, B of the others
    repeats: int = 2  # of times
    few_seeds: tuple[str, ...] = ("deep-ensemble-original",)  # ten trainings each: the first seed alone
    methods: tuple[str, ...] = (
        "plain",
        "mc-dropout",
        "deep-ensemble-original",
        "deep-ensemble",
        "neuboots",
        "neuboots-paper",
    )

    @property
    def sets(self) -> Sequence[str]:
        return self.data

    def units(self) -> list[Job]:
        trained = [
            {"data": data, "net": net, "method": method, "seed": seed}
            for seed in self.seeds
            for data in self.data
            for net in self.nets
            for method in self.methods
            if seed == self.seeds[0] or method not in self.few_seeds
        ]
        times = [{"data": data, "net": net, "seed": self.seeds[0]} for data in self.data for net in self.nets]
        return trained + times

    def timed(self, unit: Job) -> bool:
        return "method" not in unit

    def measure(self, unit: Job, bench: RunContext) -> Rows:
        data, seed = load_with_rows(bench, unit["data"], self.n), unit["seed"]
        net, prepare = image_net(unit["net"], data), partial(load_images, data, shrink=self.shrink)
        options = {"batch_size": self.batch_size, "optimizer": PAPER_SGD, "seed": seed}
        if self.timed(unit):
            return {"times": self._times(net, prepare, TrainingConfig(epochs=1, progress=False, **options))}
        train = prepare("train", self.n, seed, augment=self.augment)
        predictor = self._method(unit["method"], self.num_samples).fit(
            net, train, bench.config(epochs=self.epochs, **options)
        )
        found = class_scores(predictor, prepare("test", self.n_test), num_samples=self.num_samples)
        scores = {**found["scores"][0], "overconfidence": overconfidence(found["bins"])}
        return {"scores": [_rounded(scores, 5)], "bins": [_rounded(row, 4) for row in found["bins"]]}

    def _times(self, net: Any, prepare: Any, config: TrainingConfig) -> list[dict[str, Any]]:
        """An epoch on few rows: relative times do not depend on what is learned."""
        found = benchmark_methods(
            {name: partial(self._method, name) for name in self.methods},
            net,
            prepare("train", self.n_timed, augment=self.augment),
            prepare("test", self.n_timed).tensors[0],
            config,
            baseline="plain",
            num_members=(self.num_samples,),
            repeats=self.repeats,
            memory=False,
            progress=False,
        )
        return [
            {"method": row.method, "fit_ratio": round(row.fit_ratio, 4), "predict_ratio": round(row.predict_ratio, 4)}
            for row in found.rows
        ]

    def _method(self, name: str, K: int) -> Method:
        return make_method(name, **({"num_members": K} if name.startswith("deep-ensemble") else {}))

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
                    "that can only guess, and says so, has a low ECE, too: read it beside the error."
                ),
            )
            for data in self.data
        ]

    def _paper(self) -> PaperValues:
        """The printed lines under the names of our nets: its ResNet-110 beside our ResNet, and so on."""
        return {
            (data, net, method): figures
            for net in self.nets
            for (data, family, method), figures in PRINTED.items()
            if net.startswith(family)
        }

    def verdicts(self, rows: Rows) -> list[Check]:
        faster = [
            times_faster(rows["times"], "predict_ratio", other, least=3) for other in ("mc-dropout", "deep-ensemble")
        ]
        names = neuboots_variants(self.methods).items()
        return [
            *(verdict for name, title in names for verdict in self._calibrated(name, title, rows["scores"])),
            combine_checks(
                "NeuBoots predicts at least three times as fast as MC dropout and the deep ensemble", faster
            ),
            times_faster(rows["times"], "fit_ratio", "deep-ensemble-original", least=9),
        ]

    def _calibrated(self, name: str, title: str, rows: Sequence[dict[str, Any]]) -> Iterator[Check]:
        everywhere = ("data", "net", "seed")
        against = partial(compare_groups, rows=rows, first={"method": name}, pair=everywhere, scale=100)
        for other, called in (("plain", "the plain net"), ("mc-dropout", "MC dropout")):
            claim = f"{title} has a lower ECE than {called}, over all sets and nets"
            yield against(claim, key="ece", second={"method": other}, expect="lower")
        yield against(  # in the paper the two differ by at most 3.4 points
            f"the ECE of {title} is that of the deep ensemble within 3.5 points, over all sets and nets",
            key="ece", second={"method": "deep-ensemble"}, expect="equal", margin=3.5,
        )  # fmt: skip
        yield against(  # in the paper by at most 1.2 points
            f"{title} makes as many errors as the plain net, within 2 points, over all sets and nets",
            key="error", second={"method": "plain"}, expect="equal", margin=2.0,
        )  # fmt: skip

    def figures(self, rows: Rows) -> "dict[str, Figure]":
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
            f"{' and '.join(self.nets)}, {self.epochs} epochs on {self.n:,} images of each set{size}; the paper has "
            f"ResNet-110 and DenseNet-100 on whole sets.{few} Times are those of an epoch on {self.n_timed:,} images."
        )


def overconfidence(bins: Sequence[dict[str, Any]]) -> float:
    """Mean confidence less accuracy: above 0, the net says more than it knows."""
    gaps = sum(row["count"] * (row["confidence"] - row["accuracy"]) for row in bins)
    return float(gaps / sum(row["count"] for row in bins))


def times_faster(
    rows: Sequence[dict[str, Any]], key: Literal["fit_ratio", "predict_ratio"], other: str, *, least: float
) -> Check:
    """Is NeuBoots at least so many times as fast as another method?"""
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


def _rounded(row: dict[str, Any], digits: int) -> dict[str, Any]:
    return {key: round(value, digits) for key, value in row.items()}
