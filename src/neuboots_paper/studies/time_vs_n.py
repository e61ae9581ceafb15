"""Figure 3: time from data to a confidence band as n grows, on the regression of figure 2.

    t(n) = seconds of training + seconds of the band,   growth = log(t(n') / t(n)) / log(n' / n)

All methods alternate within one job, so that other load on the machine slows them equally.
"""

import math
import time
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch

from neuboots.evaluation.coverage import SYNTHETIC_REGRESSIONS
from neuboots.prediction import Predictor
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots.training import TrainingConfig
from neuboots_paper.checks import combine_checks
from neuboots_paper.studies.coverage import PAPER_LAW, bootstrap_size, curve_net, make_regressor, net_title
from neuboots_paper.study import Job, Rows, RunContext, Study
from neuboots_paper.tables import MetricColumn, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOOTSTRAP, SPARSE = "standard-bootstrap", "sparse-gp"
_TITLES = {BOOTSTRAP: "standard bootstrap", SPARSE: "sparse GP"}
_WARM_UP_ROWS = 8  # rows for the warm-up


@dataclass(frozen=True)
class TimeVsN(Study):
    """NeuBoots, the standard bootstrap and the sparse Gaussian process as n grows."""

    name = "time-vs-n"
    source = "figure 3"
    requires = ("gpytorch",)
    claim = (
        "On the curves of figure 2 NeuBoots takes less time than the standard bootstrap and than the sparse Gaussian "
        "process, whatever the number n of training data."
    )

    function: str = "sine"
    arms: tuple[tuple[str, int], ...] = ((PAPER_LAW, 64), (PAPER_LAW, 500), (BOOTSTRAP, 64), (SPARSE, 0))
    sizes: tuple[int, ...] = (100, 300, 1_000, 3_000)  # n
    steps: int = 160  # of Adam on all n rows; the sparse GP takes its own
    learning_rate: float = 3e-3
    members: int = 10  # K nets of the standard bootstrap
    num_samples: int = 200  # B of all others

    def jobs(self) -> list[Job]:
        return self.job_grid(n=self.sizes)

    def is_timing_job(self, job: Job) -> bool:
        return True

    def measure(self, job: Job, context: RunContext) -> Rows:
        truth, n, seed = SYNTHETIC_REGRESSIONS[self.function], job["n"], job["seed"]
        _warm_up(self)
        rows = []
        turn = seed % len(self.arms)  # another method is first for each seed
        for method, width in (*self.arms[turn:], *self.arms[:turn]):
            began = time.perf_counter()
            predictor = self.fit(method, width, n, seed, steps=self.steps)
            fitted = time.perf_counter()
            count = min(self.num_samples, predictor.num_distinct or self.num_samples)
            predictor.summarize(truth.grid, count, seed=seed).interval()
            ended = time.perf_counter()
            rows.append(
                {
                    "method": method,
                    "width": width,
                    "replicates": count,
                    "fit_seconds": round(fitted - began, 6),
                    "predict_seconds": round(ended - fitted, 6),
                    "seconds": round(ended - began, 6),
                }
            )
        return {"times": rows}

    def fit(self, method: str, width: int, n: int, seed: int, *, steps: int) -> Predictor:
        """Train without checkpoints, which would be timed too."""
        data = SYNTHETIC_REGRESSIONS[self.function].draw(n, seed=seed, number=0)
        optimizer = partial(torch.optim.Adam, lr=self.learning_rate)
        config = TrainingConfig(epochs=steps, batch_size=n, optimizer=optimizer, seed=seed, progress=False)
        return make_regressor(method, self.members).fit(cast(Any, curve_net(method, width)), data, config)

    def tables(self, rows: Rows) -> list[Table]:
        columns = (
            MetricColumn("fit_seconds", "training, s"),
            MetricColumn("predict_seconds", "band, s", digits=3),
            MetricColumn("seconds", "together, s", better="lower"),
            MetricColumn("ratio", f"× {PAPER_LAW}, same net", digits=1),
            MetricColumn("each", "for each replicate, s", digits=4),
        )
        found = sorted(self._ratios(rows), key=lambda row: row["n"])
        growth = MetricColumn("growth", f"from n = {min(self.sizes):,} to {max(self.sizes):,}")
        steps = (growth, MetricColumn("late", "between the two largest n"))
        return [
            tabulate(
                f"Time on one curve ({self.function}), mean ± standard deviation over {len(self.seeds)} seeds.",
                found,
                by=("n", "method", "net"),
                columns=columns,
                note=(
                    f"K = {self.members} nets of the standard bootstrap, B = {self.num_samples} replicates of the "
                    "others. The sparse GP, which has no net, is set against NeuBoots' widest one."
                ),
            ),
            tabulate("Growth of the time, as a power of n.", self._growth(rows), by=("method", "net"), columns=steps),
        ]

    def _ratios(self, rows: Rows) -> list[dict[str, Any]]:
        """Rows with their ratio to NeuBoots in the same job, and the time per replicate."""
        widest = self._widest(PAPER_LAW)
        ours = {(row["n"], row["seed"], row["width"]): row for row in rows["times"] if row["method"] == PAPER_LAW}
        found = []
        for row in rows["times"]:
            beside = ours.get((row["n"], row["seed"], row["width"]), ours[row["n"], row["seed"], widest])
            ratio, each = row["seconds"] / beside["seconds"], row["seconds"] / row["replicates"]
            found.append({**row, "net": net_title(row["width"]), "ratio": ratio, "each": each})
        return found

    def _widest(self, method: str) -> int:
        return max(width for name, width in self.arms if name == method)

    def _growth(self, rows: Rows) -> list[dict[str, Any]]:
        """Exponent of n of the time, over all n and between the last two."""
        first, before, last = min(self.sizes), sorted(self.sizes)[-2], max(self.sizes)
        by = {(row["method"], row["width"], row["seed"], row["n"]): row["seconds"] for row in rows["times"]}
        return [
            {
                "method": method,
                "net": net_title(width),
                "growth": _power(by[method, width, seed, first], by[method, width, seed, last], last / first),
                "late": _power(by[method, width, seed, before], by[method, width, seed, last], last / before),
            }
            for method, width in self.arms
            for seed in self.seeds
        ]

    def checks(self, rows: Rows) -> list[Check]:
        pairs = [(width, BOOTSTRAP, width) for name, width in self.arms if name == BOOTSTRAP]
        pairs += [(width, SPARSE, 0) for name, width in self.arms if name == PAPER_LAW]
        return [
            combine_checks(
                f"NeuBoots ({net_title(ours)}) takes less time than the {_TITLES[other]} at every n, in every seed",
                [self._check_faster(rows, ours, other, theirs, n) for n in self.sizes],
            )
            for ours, other, theirs in pairs
        ]

    def _check_faster(self, rows: Rows, width: int, other: str, theirs: int, n: int) -> Check:
        """Check that NeuBoots is faster with each seed; open if only with some."""
        seconds: dict[tuple[str, int], dict[int, float]] = {}
        for row in rows["times"]:
            if row["n"] == n:
                seconds.setdefault((row["method"], row["width"]), {})[row["seed"]] = row["seconds"]
        ratios = [seconds[other, theirs][seed] / ours for seed, ours in seconds[PAPER_LAW, width].items()]
        faster = {ratio > 1 for ratio in ratios}
        shown = " to ".join(dict.fromkeys(f"{ratio:.2g}" for ratio in (min(ratios), max(ratios))))
        return Check("", faster.pop() if len(faster) == 1 else None, f"n = {n:,}: {shown} times")

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        from neuboots_paper.plots import plot_scaling

        lines: dict[str, dict[int, list[float]]] = {}
        for row in rows["times"]:
            net = f", {net_title(row['width'])}" if row["width"] else ""
            members = f", K = {self.members}" if row["method"] == BOOTSTRAP else ""
            lines.setdefault(row["method"] + net + members, {}).setdefault(row["n"], []).append(row["seconds"])
        figure = Figure(figsize=(6.2, 4.4), layout="constrained")
        plot_scaling(figure.subplots(), lines, xlabel="training data n", ylabel="training and band / s")
        return {"time": figure}

    @property
    def note(self) -> str:
        return (
            f"{self.steps} steps of Adam on all n rows for every net, the library's sparse GP with its own steps; "
            f"{bootstrap_size(self.members)}, whose time grows with their number."
        )


@cache
def _warm_up(study: TimeVsN) -> None:
    """Import and allocate before timing, once per process."""
    for method, width in study.arms:
        study.fit(method, width, _WARM_UP_ROWS, 0, steps=1)


def _power(before: float, after: float, growth: float) -> float:
    return math.log(after / before) / math.log(growth)
