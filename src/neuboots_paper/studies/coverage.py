"""Figure 2: how often a 95 % band holds the true curve, at each x, over data sets drawn again and again.

    coverage(x) = 1/R Σ_r 1[ low_r(x) ≤ f(x) ≤ high_r(x) ],   low, high = mean ∓ 1.96 std of the replicates

A band may hold the curve for a wrong reason, so its own standard deviation stands beside that of the curve it is drawn
around, over the data sets: a bootstrap estimates the second by the first.
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
from neuboots.report.checks import Check, combine_checks, compare_groups
from neuboots.report.tables import MetricColumn, Table, tabulate
from neuboots_paper._common import make_method
from neuboots_paper.study import Job, Rows, RunContext, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_LAW, PAPER_LAW_EXP = "neuboots-paper", "neuboots-paper-exp"
PAPER_MEMBERS = 1000  # nets of its standard bootstrap
_WITHOUT_NET = ("gp", "sparse-gp")
_TITLES = {
    PAPER_LAW: "NeuBoots",
    PAPER_LAW_EXP: "NeuBoots, exp link",
    "standard-bootstrap": "the standard bootstrap",
    "gp": "GP",
    "mc-dropout": "MC dropout",
}
_BELOW = 0.70  # what the paper saw of MC dropout
_ALMOST = 0.05  # what the average over x may lack, where the paper says "almost"
_CHANCE = 0.05


def regressor(name: str, num_members: int) -> Method:
    """The method of this name for curves; "neuboots" has the library's law for continuous targets."""
    if name == "neuboots":
        return NeuBoots.regression()
    if name == PAPER_LAW_EXP:
        return replace(NeuBoots.paper(nn.MSELoss()), link="exp")
    return make_method(name, members=num_members, loss=nn.MSELoss())


def curve_net(name: str, width: int) -> Callable[[], nn.Module] | None:
    """A net of three hidden layers, as the paper's; a Gaussian process needs none."""
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
    """Bands of NeuBoots with both links and several widths against the standard bootstrap, a GP and MC dropout."""

    name = "coverage"
    source = "figure 2"
    requires = ("gpytorch",)
    claim = (
        "The 95 % confidence band of NeuBoots holds the true regression function at each x in almost 95 % of the data "
        "sets, much as the standard bootstrap's does; that of MC dropout is unstable and sometimes below 70 %."
    )

    functions: tuple[str, ...] = ("sine", "uneven", "jump")
    arms: tuple[tuple[str, int], ...] = (  # the method and the width of its net
        *((PAPER_LAW, 64), (PAPER_LAW, 160), (PAPER_LAW, 500)),
        *((PAPER_LAW_EXP, 64), (PAPER_LAW_EXP, 500), ("neuboots", 64)),
        *(("standard-bootstrap", 64), ("gp", 0), ("mc-dropout", 64)),
    )
    n: int = 300
    steps: int = 160  # of Adam on all n rows: with more the nets begin to fit the noise
    learning_rate: float = 3e-3
    num_sets: int = 5  # data sets for each seed
    members: int = 20  # nets of the standard bootstrap
    num_samples: int = 200  # B
    level: float = 0.95
    every: int = 3  # of the grid's inputs, that rows are kept of

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
            regressor(method, self.members),
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
        if job["seed"] == self.seeds[0] and (method, width) in self._drawn:
            band = found.bands[0]
            curves = {key: getattr(band, key).tolist() for key in ("mean", "low", "high")}
            rows["bands"] = [
                {"x": x[k], **{key: round(curve[k], 4) for key, curve in curves.items()}} for k in range(len(x))
            ]
        return rows

    @property
    def _total(self) -> int:
        """Data sets of all seeds."""
        return self.num_sets * len(self.seeds)

    def _widest(self, method: str) -> tuple[str, int]:
        return method, max(width for name, width in self.arms if name == method)

    @property
    def _drawn(self) -> tuple[tuple[str, int], ...]:
        """Whose bands are drawn: figure 2, b and c."""
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
            note += f" The worst x, and the lines of the figure, are of one x in {self.every}."
        return [tabulate(title, shown, by=("function", "method", "net"), columns=columns, note=note)]

    def checks(self, rows: Rows) -> list[Check]:
        ours, bootstrap, dropout = map(self._widest, (PAPER_LAW, "standard-bootstrap", "mc-dropout"))
        each = [
            combine_checks(
                f"the band of {_TITLES[arm[0]]} ({net_title(arm[1])}) covers with {self.level:.0%} at each x, as far "
                f"as {self._total} data sets can tell",
                [self._kept(rows, function, arm) for function in self.functions],
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
        return [*each, *alike, self._below(rows, dropout)]

    def _kept(self, rows: Rows, function: str, arm: tuple[str, int]) -> Check:
        """Whether no x is covered less than chance allows, where the level is kept (Bonferroni).

        Few data sets refute little, so that it is open where the average over x is too low, but no single x is.
        """
        from scipy.stats import binom

        found = rates(rows["places"], function, *arm, self.num_sets)
        place, total = min(found, key=found.__getitem__), self._total
        places = len(found) * len(self.functions)
        least = next(c for c in range(total + 1) if places * binom.cdf(c, total, self.level) > _CHANCE) / total
        average = self._average(rows, arm, function)
        said = (
            f"{function}: {average:.0%} on average, {found[place]:.0%} at x = {place:g}, where chance leaves "
            f"{least:.0%} or more"
        )
        holds = False if found[place] < least else True if average >= self.level - _ALMOST else None
        return Check("", holds, said)

    def _average(self, rows: Rows, arm: tuple[str, int], *functions: str) -> float:
        """As in the table: over all x of the grid, not only those that rows are kept of."""
        return _mean(row["coverage"] for row in rows["scores"] for f in functions if _matches(row, f, *arm))

    def _below(self, rows: Rows, arm: tuple[str, int]) -> Check:
        """Whether an x is covered less than 70 %, or each one more, beyond chance; open where it may be chance."""
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
        above = binom.sf(count - 1, total, _BELOW) <= _CHANCE  # the least of them decides for all
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
        shares = Figure(figsize=(4.3 * columns, 9.4), layout="constrained")
        panels = shares.subplots(2, columns, squeeze=False, sharey=True)
        for line, arms in zip(panels, (methods, links), strict=True):
            for ax, function in zip(line, self.functions, strict=True):
                found = {title: rates(rows["places"], function, *arm, self.num_sets) for title, arm in arms.items()}
                place = torch.tensor([*next(iter(found.values()))])
                curves = {title: torch.tensor([*by_x.values()]) for title, by_x in found.items()}
                plot_coverage(ax, place, curves, level=self.level, num_sets=self._total)
                ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), fontsize=9)  # clear of the lines
                ax.set_title(function)
        bands = Figure(figsize=(4.3 * columns, 7.0), layout="constrained")
        panels = bands.subplots(2, columns, squeeze=False, sharey="col")
        for line, arm, color in zip(panels, self._drawn, (BLUE, ORANGE), strict=True):
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
                    ax.get_legend().remove()  # it would hide the curve, and is the same in all
        return {"coverage": shares, "bands": bands}

    @property
    def note(self) -> str:
        nets = ", ".join(net_title(width) for width in sorted({width for _, width in self.arms if width}))
        return (
            f"The paper names neither functions nor noise; here they are {', '.join(self.functions)}. Nets of {nets}; "
            f"{self.steps} steps of Adam on all {self.n} rows for every net; {bootstrap_size(self.members)}; "
            f"{self._total} data sets, of which the paper gives no number. neuboots-paper is "
            "Algorithm 1 with the identity link, neuboots-paper-exp with h(α) = exp(−α), neuboots the library's law "
            "for regression. At a jump every smooth curve is biased, which no bootstrap of the curve can show."
        )


def rates(
    places: Sequence[Mapping[str, Any]], function: str, method: str, width: int, num_sets: int
) -> dict[float, float]:
    """The share of data sets whose band holds f(x), at each x, over all seeds."""
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
