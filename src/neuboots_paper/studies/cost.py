"""Tables 3.2, B.1 and B.2: time and memory of K members or replicates relative to a single net.

    ratio(method, K) = seconds(method, K) / seconds(single net, K),   growth = ratio(method, K) / ratio(method, 1)

Times are minima over repeats within a run, with the methods in alternation, and mean ± standard deviation over runs.
Memory is the peak of a process above its initial memory, measured in the first run, since it hardly varies. Nets are
trained for one epoch on few rows, which does not change the ratios.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from neuboots.evaluation.benchmark import benchmark_methods
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots.training import TrainingConfig
from neuboots_paper._common import PAPER_SGD, image_net, load_images, load_with_rows, make_method
from neuboots_paper.checks import combine_checks, compare_groups
from neuboots_paper.study import Job, Rows, RunContext, Study
from neuboots_paper.tables import MetricColumn, PaperValues, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDERS: PaperValues = {  # table 3.2
    "deep-ensemble": {"fit": "O(LK)", "predict": "O(LK)", "memory": "O(MK + I)"},
    "batch-ensemble": {"fit": "O(LK)", "predict": "O(LK)", "memory": "O(M + IK)"},
    "mimo": {"fit": "O(L + 2K)", "predict": "O(L + 2K)", "memory": "O(M + IK)"},
    "neuboots": {"fit": "O(L)", "predict": "O(L + K)", "memory": "O(M + I)"},
}
ABSOLUTE = {  # table B.1: seconds to train for an epoch, seconds to predict, MB
    "deterministic": (29.1, 1.69, 1605),
    "mc-dropout": (29.2, 8.45, 1605),
    "deep-ensemble": (145.5, 8.45, 7600),
    "batch-ensemble": (217.1, 6.59, 2474),
    "mimo": (30.2, 1.87, 1605),
    "neuboots": (29.2, 1.71, 1605),
}
MEGABYTES = {"mimo": (1515, 1633, 1741, 1885, 2067), "neuboots": (1515, 1517, 1517, 1517, 1517)}  # table B.2, K = 1 … 5
MLP_SECONDS = {3: {"mimo": 41.09, "neuboots": 7.57}, 5: {"mimo": 62.47, "neuboots": 7.68}}  # appendix B.2, an epoch
MANY_SECONDS = {"mc-dropout": 112, "neuboots": 1.9}  # section 3.2, B = 100

CASES = ("growth", "others", "mlp", "many")


def relative_published() -> PaperValues:
    """Table B.1 as ratios to its first row."""
    first = ABSOLUTE["deterministic"]
    keys = ("fit_ratio", "predict_ratio", "fit_mb_ratio")
    return {
        name: {key: f"{value / base:.2f}" for key, value, base in zip(keys, values, first, strict=True)}
        for name, values in ABSOLUTE.items()
    }


@dataclass(frozen=True)
class CostStudy(Study):
    """Training time, prediction time and memory of every method, and their growth with K; a seed is a run."""

    name = "cost"
    source = "tables 3.2, B.1, B.2"
    claim = (
        "NeuBoots trains and predicts about as fast as the plain net, with the same memory for every K; ensembles and "
        "MC dropout need K passes, and MIMO more memory with every member. A hundred replicates of NeuBoots cost 1.9 s "
        "where MC dropout takes 112 s; on an MLP it trains several times faster than MIMO."
    )

    data: str = "cifar100"
    net: str = "resnet-8"
    mlp: str = "mlp-500-500-500-500"  # five layers
    many_data: str = "cifar10"
    many: str = "resnet-34"
    shrink_many: int = 2  # images are averaged over shrink × shrink pixels
    n: int = 128
    n_mlp: int = 1_024
    n_many: int = 16
    inputs: int = 64
    inputs_many: int = 2
    batch_size: int = 16
    batch_size_mlp: int = 128
    counts: tuple[int, ...] = (1, 2, 3, 4, 5)  # K
    mlp_counts: tuple[int, ...] = (3, 5)
    replicates: int = 100  # B
    repeats: int = 2  # one with 100 replicates
    others: tuple[str, ...] = (  # methods beside those of table 3.2
        "mc-dropout",
        "adversarial-deep-ensemble",
        "standard-bootstrap",
        "lp-bnn",
        "gbs",
        "swag",
        "laplace",
        "neuboots-paper",
    )

    @property
    def dataset_names(self) -> Sequence[str]:
        return (self.data, self.many_data)

    def jobs(self) -> list[Job]:
        return self.job_grid(case=CASES)

    def is_timing_job(self, job: Job) -> bool:
        return True

    def measure(self, job: Job, context: RunContext) -> Rows:
        case, seed = job["case"], job["seed"]
        name, net, methods, counts, n, inputs, shrink = self._cases()[case]
        data = load_with_rows(context, name, n)
        memory = case in ("growth", "others") and seed == self.seeds[0]  # other runs would give the same
        batch_size = self.batch_size_mlp if case == "mlp" else self.batch_size
        found = benchmark_methods(
            {method: lambda K, method=method: make_method(method, members=K) for method in ("deterministic", *methods)},  # type: ignore[misc]
            image_net(net, data),
            load_images(data, "train", n, seed, shrink=shrink),
            load_images(data, "test", inputs, shrink=shrink).tensors[0],
            TrainingConfig(epochs=1, batch_size=batch_size, optimizer=PAPER_SGD, seed=seed, progress=False),
            baseline="deterministic",
            num_members=counts,
            repeats=1 if case == "many" else self.repeats,
            memory=memory,
            progress=False,
        )
        rows = [{key: _round(value) for key, value in asdict(row).items()} for row in found.rows]
        for row in rows:
            row["members"] = row.pop("num_members")
        for row in rows:
            row["memory_mb"] = None if row["predict_mb"] is None else _round(row["size_mb"] + row["predict_mb"])
        return {case: rows}

    def _cases(self) -> dict[str, tuple[str, str, Sequence[str], Sequence[int], int, int, int]]:
        """Dataset, net, methods, counts K, training rows, prediction inputs and shrink factor of each case."""
        return {
            "growth": (self.data, self.net, tuple(ORDERS), self.counts, self.n, self.inputs, 1),
            "others": (self.data, self.net, self.others, self.counts[-1:], self.n, self.inputs, 1),
            "mlp": (self.data, self.mlp, tuple(MLP_SECONDS[3]), self.mlp_counts, self.n_mlp, self.inputs, 1),
            "many": (
                self.many_data, self.many, tuple(MANY_SECONDS), (self.replicates,),
                self.n_many, self.inputs_many, self.shrink_many,
            ),
        }  # fmt: skip

    def tables(self, rows: Rows) -> list[Table]:
        K, runs = self.counts[-1], f"mean ± standard deviation over {len(self.seeds)} runs"
        growth = (
            MetricColumn("fit", "training time"),
            MetricColumn("predict", "prediction time"),
            MetricColumn("memory", "memory of prediction"),
        )
        memory = (MetricColumn("memory_mb", "memory, MB", digits=1), MetricColumn("memory", "× K = 1", digits=3))
        return [
            tabulate(
                f"What K = {K} cost in units of K = {self.counts[0]}, times as ratios to the plain net, {runs}; the "
                "paper's orders beside.",
                growth_rows(rows["growth"], self.counts[-1:]),
                by=("method",),
                columns=growth,
                paper=ORDERS,
                note="L: layers, M: size of a net, I: of the input. Members of a deep ensemble are asked in turn here.",
            ),
            tabulate(
                f"{self.net} on {self.data}, K = {K}: ratios to the plain net in the same run, {runs}. The paper's "
                "seconds and megabytes are shown as ratios to those of its baseline.",
                self._every_method(rows),
                by=("method",),
                columns=(
                    MetricColumn("fit_ratio", "training time, × plain"),
                    MetricColumn("predict_ratio", "prediction time, × plain"),
                    MetricColumn("fit_mb_ratio", "memory of training, × plain"),
                    MetricColumn("size_mb", "size of what was learned, MB"),
                ),
                paper=relative_published(),
                note="Members of an ensemble are trained in turn here, so their training holds one net's activations.",
            ),
            tabulate(
                f"Memory of prediction, parameters and {self.inputs:,} inputs under way, {runs}. The paper's megabytes "
                "are shown as ratios to those of K = 1.",
                [row for row in growth_rows(rows["growth"], self.counts) if row["method"] in MEGABYTES],
                by=("method", "K"),
                columns=memory,
                paper={
                    (method, k): {"memory": f"{value / values[0]:.3f}"}
                    for method, values in MEGABYTES.items()
                    for k, value in enumerate(values, 1)
                },
            ),
            tabulate(
                f"An epoch of a multilayer perceptron ({self.mlp}), training time of MIMO by that of NeuBoots, {runs}.",
                mlp_rows(rows["mlp"]),
                by=("K",),
                columns=(MetricColumn("mimo_by_neuboots", "MIMO / NeuBoots"),),
                paper={
                    k: {"mimo_by_neuboots": f"{each['mimo'] / each['neuboots']:.2f}"} for k, each in MLP_SECONDS.items()
                },
            ),
            tabulate(
                f"Prediction of B = {self.replicates} replicates with {self.many}, in units of the time of NeuBoots, "
                f"{runs}.",
                many_rows(rows["many"]),
                by=("method",),
                columns=(MetricColumn("slower", "time, × NeuBoots"), MetricColumn("predict_ratio", "time, × plain")),
                paper={name: {"slower": f"{s / MANY_SECONDS['neuboots']:.1f}"} for name, s in MANY_SECONDS.items()},
            ),
        ]

    def checks(self, rows: Rows) -> list[Check]:
        methods, growth = self._every_method(rows), growth_rows(rows["growth"], self.counts[-1:])
        ours, K = {"method": "neuboots"}, self.counts[-1]

        def faster(key: str, others: Sequence[str]) -> list[Check]:
            return [compare_groups("", methods, key, ours, {"method": other}, expect="lower") for other in others]

        few, more = self.mlp_counts[0], self.mlp_counts[-1]
        return [
            compare_groups(
                "NeuBoots trains in the time of the plain net, within a quarter",
                methods, "fit_ratio", ours, {"method": "deterministic"}, expect="equal", margin=0.25,
            ),
            combine_checks(
                "NeuBoots trains faster than the deep ensemble and BatchEnsemble",
                faster("fit_ratio", ("deep-ensemble", "batch-ensemble")),
            ),
            compare_groups(
                f"NeuBoots predicts K = {K} replicates in the time of the plain net, within a quarter",
                methods, "predict_ratio", ours, {"method": "deterministic"}, expect="equal", margin=0.25,
            ),
            combine_checks(
                f"NeuBoots predicts K = {K} replicates faster than MC dropout, the deep ensemble and BatchEnsemble",
                faster("predict_ratio", ("mc-dropout", "deep-ensemble", "batch-ensemble")),
            ),
            *check_memory(growth, self.counts[0], K),
            combine_checks(
                "on a multilayer perceptron NeuBoots trains faster than MIMO",
                [
                    compare_groups(
                        "", rows["mlp"], "fit_ratio", {**ours, "members": k}, {"method": "mimo", "members": k},
                        expect="lower",
                    )
                    for k in self.mlp_counts
                ],
            ),
            compare_groups(
                f"and that gap is wider with K = {more} than with K = {few}",
                mlp_rows(rows["mlp"]), "mimo_by_neuboots", {"K": more}, {"K": few}, expect="higher",
            ),
            compare_groups(
                f"NeuBoots predicts {self.replicates} replicates with {self.many} faster than MC dropout",
                rows["many"], "predict_ratio", ours, {"method": "mc-dropout"}, expect="lower",
            ),
        ]  # fmt: skip

    def _every_method(self, rows: Rows) -> list[dict[str, Any]]:
        """Rows of all methods at the largest K, in the order of table B.1."""
        growing = [row for row in rows["growth"] if row["members"] == self.counts[-1]]
        found = growing + [row for row in rows["others"] if row["method"] != "deterministic"]
        order = ["deterministic", *self.others, *ORDERS]
        return sorted(found, key=lambda row: order.index(row["method"]))

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        import torch
        from matplotlib.figure import Figure

        from neuboots.report.plots import plot_learning_curves

        panels = {
            "fit_ratio": "training time, × plain",
            "predict_ratio": "prediction time, × plain",
            "memory_mb": "memory of prediction / MB",
        }
        found = {key: [row for row in rows["growth"] if row[key] is not None] for key in panels}
        shown = [key for key in panels if found[key]]
        figure = Figure(figsize=(3.8 * len(shown), 3.6), layout="constrained")
        for ax, key in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            runs: dict[str, dict[int, list[float]]] = {}
            for row in found[key]:
                runs.setdefault(row["method"], {}).setdefault(row["seed"], []).append(row[key])
            curves = {method: (self.counts, torch.tensor(list(by_seed.values()))) for method, by_seed in runs.items()}
            plot_learning_curves(ax, curves, label=panels[key])
            ax.set(xlabel="members or replicates K", xticks=self.counts)
        return {"growth": figure}

    @property
    def note(self) -> str:
        size = f", averaged over {self.shrink_many} × {self.shrink_many} pixels" if self.shrink_many > 1 else ""
        return (
            f"{self.net} on {self.n:,} images of {self.data} for an epoch, and {self.inputs:,} to predict; "
            f"{self.many} predicts {self.inputs_many:,} of {self.many_data}{size}. The paper: ResNet-110 on CIFAR-100 "
            "and ResNet-34 on CIFAR-10, complete datasets, on a GPU."
        )


def growth_rows(rows: Sequence[dict[str, Any]], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Time (relative to the plain net) and memory at each K over those at the smallest K, in each run."""
    least = min(row["members"] for row in rows)
    first = {(row["method"], row["seed"]): row for row in rows if row["members"] == least}
    found = []
    for row in rows:
        if row["members"] in counts:
            base = first[row["method"], row["seed"]]
            known = row["memory_mb"] is not None
            found.append(
                {
                    "method": row["method"],
                    "K": row["members"],
                    "seed": row["seed"],
                    "fit": row["fit_ratio"] / base["fit_ratio"],
                    "predict": row["predict_ratio"] / base["predict_ratio"],
                    "memory": row["memory_mb"] / base["memory_mb"] if known else None,
                    "memory_mb": row["memory_mb"],
                }
            )
    return sorted(found, key=lambda row: ["deterministic", *ORDERS].index(row["method"]))


def check_memory(growth: Sequence[dict[str, Any]], few: int, many: int) -> list[Check]:
    """Checks by a fixed rule, since memory is measured once: growth below 2 % counts as none."""
    grown = {row["method"]: row["memory"] for row in growth if row["memory"] is not None}
    claims = (
        f"the memory that NeuBoots needs to predict does not grow from K = {few} to {many}, by a rule of 2 %",
        f"the memory that MIMO needs to predict grows from K = {few} to {many} by more than 2 %",
    )
    if not {"neuboots", "mimo"} <= grown.keys():
        return [Check(claim, None, "memory was not measured") for claim in claims]
    ours, theirs = grown["neuboots"], grown["mimo"]
    found = f"NeuBoots × {ours:.3f}, MIMO × {theirs:.3f}"
    holds = ours < 1.02, theirs > 1.02
    return [Check(claim, each, found) for claim, each in zip(claims, holds, strict=True)]


def mlp_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Training time of MIMO over that of NeuBoots, in each run at each K."""
    seconds = {(row["method"], row["members"], row["seed"]): row["fit_seconds"] for row in rows}
    return [
        {"K": K, "seed": seed, "mimo_by_neuboots": value / seconds["neuboots", K, seed]}
        for (method, K, seed), value in seconds.items()
        if method == "mimo"
    ]


def many_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prediction times over that of NeuBoots in the same run."""
    ours = {row["seed"]: row["predict_seconds"] for row in rows if row["method"] == "neuboots"}
    return [{**row, "slower": row["predict_seconds"] / ours[row["seed"]]} for row in rows]


def _round(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
