"""Figure 2: coverage of 95 % confidence bands of a regression function at each x, over simulated datasets.

    coverage(x) = 1/R Σ_r 1[ low_r(x) ≤ f(x) ≤ high_r(x) ],   low, high = mean ∓ 1.96 std of the replicates

Coverage alone does not show whether a band has the right size. The standard deviation of the band is therefore compared
with that of its center over datasets, which a bootstrap estimates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuboots.evaluation.coverage import SYNTHETIC_REGRESSIONS, simulate_coverage
from neuboots.methods import NeuBoots
from neuboots.nets import MLP
from neuboots.prediction import Method
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots_paper._common import make_method
from neuboots_paper.checks import combine_checks, compare_groups
from neuboots_paper.study import Job, Rows, RunContext, Study
from neuboots_paper.tables import MetricColumn, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_LAW, PAPER_LAW_EXP = "neuboots-paper", "neuboots-paper-exp"
PAPER_MEMBERS = 1000  # nets of the paper's standard bootstrap
_WITHOUT_NET = ("gp", "sparse-gp")
_TITLES = {
    PAPER_LAW: "NeuBoots",
    PAPER_LAW_EXP: "NeuBoots, exp link",
    "standard-bootstrap": "the standard bootstrap",
    "gp": "GP",
    "mc-dropout": "MC dropout",
}
_BELOW = 0.70  # minimum coverage of MC dropout in the paper
_ALMOST = 0.05  # tolerated deficit of the average over x ("almost" in the paper)
_CHANCE = 0.05


def make_regressor(name: str, num_members: int) -> Method:
    """The method of this name for regression; "neuboots" has the library's weights for continuous targets."""
    if name == "neuboots":
        return NeuBoots.regression()
    if name == PAPER_LAW_EXP:
        return replace(NeuBoots.paper(nn.MSELoss()), link="exp")
    return make_method(name, members=num_members, loss=nn.MSELoss())


def curve_net(name: str, width: int) -> Callable[[], nn.Module] | None:
    """Factory of a net with three hidden layers; None for a Gaussian process."""
    return None if name in _WITHOUT_NET else lambda: MLP(1, 1, widths=(width,) * 3)


def bootstrap_size(members: int) -> str:
    """
    >>> bootstrap_size(20)
    '20 nets of the standard bootstrap (the paper: 1000)'
    """
    return f"{members} nets of the standard bootstrap" + (" (the paper: 1000)" if members != PAPER_MEMBERS else "")


def net_title(width: int) -> str:
    return f"3 × {width}" if width else "none"


@dataclass(frozen=True)
class CoverageStudy(Study):
    """Bands of NeuBoots with both links and several widths, the standard bootstrap, a GP and MC dropout."""

    name = "coverage"
    source = "figure 2"
    requires = ("gpytorch",)
    claim = (
        "The 95 % confidence band of NeuBoots holds the true regression function at each x in almost 95 % of the data "
        "sets, like that of the standard bootstrap; that of MC dropout is unstable and sometimes below 70 %."
    )

    functions: tuple[str, ...] = ("sine", "uneven", "jump")
    arms: tuple[tuple[str, int], ...] = (  # the method and the width of its net
        *((PAPER_LAW, 64), (PAPER_LAW, 160), (PAPER_LAW, 500)),
        *((PAPER_LAW_EXP, 64), (PAPER_LAW_EXP, 500), ("neuboots", 64)),
        *(("standard-bootstrap", 64), ("gp", 0), ("mc-dropout", 64)),
    )
    n: int = 300
    steps: int = 160  # of Adam on all n rows; with more the nets overfit
    learning_rate: float = 3e-3
    num_sets: int = 5  # datasets per seed
    members: int = 20  # nets of the standard bootstrap
    num_samples: int = 200  # B
    level: float = 0.95
    every: int = 3  # rows are stored for every third x of the grid

    def jobs(self) -> list[Job]:
        return [
            {"function": function, "method": method, "width": width, "seed": seed}
            for seed in self.seeds
            for function in self.functions
            for method, width in self.arms
        ]

    def measure(self, job: Job, context: RunContext) -> Rows:
        method, width = job["method"], job["width"]
        config = context.config(
            epochs=self.steps, batch_size=self.n, optimizer=partial(torch.optim.Adam, lr=self.learning_rate)
        )
        found = simulate_coverage(
            make_regressor(method, self.members),
            curve_net(method, width),
            SYNTHETIC_REGRESSIONS[job["function"]],
            replace(config, folder=None),
            num_datasets=self.num_sets,
            n=self.n,
            level=self.level,
            num_samples=self.num_samples,
            seed=job["seed"],
            folder=config.folder,
            progress=False,
        )
        x = [round(value, 4) for value in found.x[:, 0].tolist()]
        held = found.covered.sum(0).tolist()
        error = found.bias.square() + (1 - 1 / self.num_sets) * found.estimator_std.square()  # mean square: (N,)
        score = {
            "coverage": found.mean,
            "band_std": float(found.band_std.square().mean().sqrt()),
            "curve_std": float(found.estimator_std.square().mean().sqrt()),
            "rmse": float(error.mean().sqrt()),
        }
        rows: Rows = {
            "scores": [{key: round(value, 5) for key, value in score.items()}],
            "places": [{"x": x[k], "held": held[k]} for k in range(0, len(x), self.every)],
        }
        if job["seed"] == self.seeds[0] and (method, width) in self._plotted:
            band = found.bands[0]
            curves = {key: getattr(band, key).tolist() for key in ("mean", "low", "high")}
            rows["bands"] = [
                {"x": x[k], **{key: round(curve[k], 4) for key, curve in curves.items()}} for k in range(len(x))
            ]
        return rows

    @property
    def _total(self) -> int:
        """Number of datasets of all seeds."""
        return self.num_sets * len(self.seeds)

    def _widest(self, method: str) -> tuple[str, int]:
        return method, max(width for name, width in self.arms if name == method)

    @property
    def _plotted(self) -> tuple[tuple[str, int], ...]:
        """Methods whose bands are plotted (figure 2, b and c)."""
        return self._widest(PAPER_LAW), self._widest("standard-bootstrap")

    def tables(self, rows: Rows) -> list[Table]:
        shown = []
        for function in self.functions:
            for method, width in self.arms:
                names = {"function": function, "method": method, "net": net_title(width)}
                mine = [row for row in rows["scores"] if _matches(row, function, method, width)]
                band, curve = (sqrt(_mean(row[key] ** 2 for row in mine)) for key in ("band_std", "curve_std"))
                worst = min(rates(rows["places"], function, method, width, self.num_sets).values())
                shown += [{**names, **row} for row in mine] + [{**names, "worst": worst, "size": band / curve}]
        columns = (
            MetricColumn("coverage", "coverage, %", 100, digits=1),
            MetricColumn("worst", "at the worst x, %", 100, digits=0),
            MetricColumn("band_std", "std of the band", digits=3),
            MetricColumn("curve_std", "std of the curve", digits=3),
            MetricColumn("size", "band / curve"),
            MetricColumn("rmse", "RMSE of the curve", digits=3),
        )
        title = (
            f"Bands of {self.level:.0%} for the true curve, n = {self.n}: mean ± standard deviation over "
            f"{len(self.seeds)} seeds of {self.num_sets} data sets each."
        )
        note = (
            "The coverage is the mean over x. The curve is the mean of the replicates, and its standard deviation that "
            "over data sets: where band / curve is 1 the band has the size it should have."
        )
        if self.every > 1:
            note += f" The worst x, and the lines of the plot, are of one x in {self.every}."
        return [tabulate(title, shown, by=("function", "method", "net"), columns=columns, note=note)]

    def checks(self, rows: Rows) -> list[Check]:
        ours, bootstrap, dropout = map(self._widest, (PAPER_LAW, "standard-bootstrap", "mc-dropout"))
        each = [
            combine_checks(
                f"the band of {_TITLES[arm[0]]} ({net_title(arm[1])}) covers with {self.level:.0%} at each x, as far "
                f"as {self._total} data sets can tell",
                [self._check_level(rows, function, arm) for function in self.functions],
            )
            for arm in (ours, self._widest(PAPER_LAW_EXP), bootstrap)
        ]
        rival = {"method": bootstrap[0], "width": bootstrap[1]}
        alike = [
            compare_groups(
                f"the coverage of NeuBoots ({net_title(width)}) is that of the standard bootstrap "
                f"({net_title(bootstrap[1])}), within 5 points",
                rows["scores"], "coverage", {"method": PAPER_LAW, "width": width}, rival,
                expect="equal", margin=5.0, pair=("function", "seed"), scale=100, digits=1,
            )
            for width in sorted({ours[1], bootstrap[1]}, reverse=True)
        ]  # fmt: skip
        return [*each, *alike, self._check_below(rows, dropout)]

    def _check_level(self, rows: Rows, function: str, arm: tuple[str, int]) -> Check:
        """Check that no x has a coverage significantly below the level (Bonferroni).

        Few datasets have little power, so that the check is open if only the average over x is too low.
        """
        from scipy.stats import binom

        found = rates(rows["places"], function, *arm, self.num_sets)
        place, total = min(found, key=found.__getitem__), self._total
        places = len(found) * len(self.functions)
        least = next(c for c in range(total + 1) if places * binom.cdf(c, total, self.level) > _CHANCE) / total
        average = self._average(rows, arm, function)
        evidence = (
            f"{function}: {average:.0%} on average, {found[place]:.0%} at x = {place:g}, where chance leaves "
            f"{least:.0%} or more"
        )
        holds = False if found[place] < least else True if average >= self.level - _ALMOST else None
        return Check("", holds, evidence)

    def _average(self, rows: Rows, arm: tuple[str, int], *functions: str) -> float:
        """Mean coverage over all x of the grid, as in the table."""
        return _mean(row["coverage"] for row in rows["scores"] for f in functions if _matches(row, f, *arm))

    def _check_below(self, rows: Rows, arm: tuple[str, int]) -> Check:
        """Check that the coverage at some x is significantly below 70 %; open if neither this nor the opposite is."""
        from scipy.stats import binom

        by_place = {
            (function, x): rate
            for function in self.functions
            for x, rate in rates(rows["places"], function, *arm, self.num_sets).items()
        }
        (function, x), rate = min(by_place.items(), key=lambda item: item[1])
        total = self._total
        count = round(rate * total)
        below = len(by_place) * binom.cdf(count, total, _BELOW) <= _CHANCE
        above = binom.sf(count - 1, total, _BELOW) <= _CHANCE  # the minimum decides for all
        return Check(
            f"MC dropout ({net_title(arm[1])}) covers less than {_BELOW:.0%} at some x",
            True if below else False if above else None,
            f"{rate:.0%} at x = {x:g} of {function}, {self._average(rows, arm, *self.functions):.0%} on average, "
            f"{total} data sets",
        )

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        from neuboots.report.plots import BLUE, ORANGE, plot_coverage, plot_regression_band

        columns = len(self.functions)
        rival = [self._widest(name) for name in (PAPER_LAW, "standard-bootstrap", "gp", "mc-dropout")]
        own = [arm for arm in self.arms if arm[0] == PAPER_LAW] + [self._widest(PAPER_LAW_EXP)]
        methods = {_TITLES[arm[0]] + (f" {net_title(arm[1])}" if arm[1] else ""): arm for arm in rival}
        links = {f"{_TITLES[arm[0]]} {net_title(arm[1])}": arm for arm in own}
        coverage_plot = Figure(figsize=(4.3 * columns, 9.4), layout="constrained")
        panels = coverage_plot.subplots(2, columns, squeeze=False, sharey=True)
        for line, arms in zip(panels, (methods, links), strict=True):
            for ax, function in zip(line, self.functions, strict=True):
                found = {title: rates(rows["places"], function, *arm, self.num_sets) for title, arm in arms.items()}
                place = torch.tensor([*next(iter(found.values()))])
                curves = {title: torch.tensor([*by_x.values()]) for title, by_x in found.items()}
                plot_coverage(ax, place, curves, level=self.level, num_sets=self._total)
                ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), fontsize=9)  # below the lines
                ax.set_title(function)
        bands = Figure(figsize=(4.3 * columns, 7.0), layout="constrained")
        panels = bands.subplots(2, columns, squeeze=False, sharey="col")
        for line, arm, color in zip(panels, self._plotted, (BLUE, ORANGE), strict=True):
            for ax, function in zip(line, self.functions, strict=True):
                truth = SYNTHETIC_REGRESSIONS[function]
                mine = [row for row in rows["bands"] if _matches(row, function, *arm)]
                x, mean, low, high = (torch.tensor([row[key] for row in mine]) for key in ("x", "mean", "low", "high"))
                inputs, y = truth.draw(self.n, seed=mine[0]["seed"], number=0).tensors
                plot_regression_band(
                    ax, x, mean, low, high, label=f"{self.level:.0%} band", truth=truth.function(x[:, None]),
                    points=(inputs, y), color=color,
                )  # fmt: skip
                ax.set_title(f"{function}: {_TITLES[arm[0]]} {net_title(arm[1])}")
                if ax is not line[0]:
                    ax.get_legend().remove()  # same in all panels
        return {"coverage": coverage_plot, "bands": bands}

    @property
    def note(self) -> str:
        nets = ", ".join(net_title(width) for width in sorted({width for _, width in self.arms if width}))
        return (
            f"The paper names neither functions nor noise; here they are {', '.join(self.functions)}. Nets of {nets}; "
            f"{self.steps} steps of Adam on all {self.n} rows for every net; {bootstrap_size(self.members)}; "
            f"{self._total} data sets, whose number the paper does not give. neuboots-paper is "
            "Algorithm 1 with the identity link, neuboots-paper-exp with h(α) = exp(−α), neuboots the library's "
            "defaults for regression. At a jump every smooth curve is biased, which no bootstrap can show."
        )


def rates(
    places: Sequence[Mapping[str, Any]], function: str, method: str, width: int, num_sets: int
) -> dict[float, float]:
    """Coverage at each x over all seeds."""
    counts: dict[float, list[int]] = {}
    for row in places:
        if _matches(row, function, method, width):
            counts.setdefault(row["x"], []).append(row["held"])
    return {x: sum(held) / (num_sets * len(held)) for x, held in counts.items()}


def _matches(row: Mapping[str, Any], function: str, method: str, width: int) -> bool:
    return (row["function"], row["method"], row["width"]) == (function, method, width)


def _mean(values: Any) -> float:
    numbers = list(values)
    return float(sum(numbers) / len(numbers))
