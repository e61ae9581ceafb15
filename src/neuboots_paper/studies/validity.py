"""Beyond the paper: whose band is right everywhere, and what does it cost?

    coverage(x), width(x), likeness to a true bootstrap: of every method, for known curves
    distance of the replicates from a true bootstrap's: of every method, for classes

Curves lie in `validity_curves`, what is said of them in `validity_summary`, `validity_tables`, `validity_verdicts` and
`validity_figures`, classes in `validity_classes`. Rules of the influence bootstrap were chosen on curves of this kind,
but on other data sets (docs/decisions/0010).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuboots._prng import derive_seed
from neuboots.prediction import Predictor
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots_paper.studies import validity_classes as classes
from neuboots_paper.studies import validity_curves as curves
from neuboots_paper.studies.validity_summary import band_checks, band_plots, band_tables
from neuboots_paper.study import BEYOND_PAPER, Job, Rows, RunContext, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = tuple[str, str, int, int]  # function, noise, width, n

_CASES = tuple((function, noise) for function in ("smooth", "wiggly", "gap") for noise in ("constant", "varying"))
_GRID: tuple[Cell, ...] = tuple(
    (*case, width, n) for width in (64, 256, 500) for n in (300, 100, 1000) for case in _CASES
)


@dataclass(frozen=True)
class Validity(Study):
    """Coverage at each x, width and shape of the band of every method, beside those of a true bootstrap."""

    name = "validity"
    source = BEYOND_PAPER
    requires = ("gpytorch",)
    claim = (
        "A 95 % confidence band for the regression function that costs one training, or two at most, holds the truth "
        "95 % of the time, at every x inside the data, and is no wider than it need be."
    )

    cells: tuple[Cell, ...] = (*_GRID, ("edge", "constant", 64, 1000))
    others: tuple[Cell, ...] = (  # where the other methods are measured
        ("smooth", "constant", 64, 300),
        ("wiggly", "varying", 64, 300),
        ("gap", "constant", 64, 300),
        ("smooth", "constant", 256, 300),
        ("smooth", "constant", 500, 300),
    )
    more: Cell = ("smooth", "constant", 64, 300)  # where all the rest are
    more_each: int = 5
    sets_each: int = 50  # data sets of a seed
    others_each: tuple[tuple[int, int], ...] = ((64, 10), (256, 5), (500, 3))  # the same, by width
    true_sets: tuple[tuple[int, int], ...] = ((64, 24), (256, 12), (500, 12))  # data sets with a true bootstrap
    members: tuple[tuple[int, int], ...] = ((64, 16), (256, 10), (500, 10))  # its nets
    steps: int = 500
    batch_size: int = 50
    learning_rate: float = 1e-2
    num_samples: int = 200  # B, of methods that do not know their moments
    regressor_cells: tuple[tuple[str, str, int], ...] = (
        ("smooth", "varying", 300),
        ("wiggly", "constant", 300),
        ("smooth", "varying", 1000),
        ("gap", "constant", 300),
        ("wiggly", "varying", 100),
    )
    regressor_each: int = 25  # data sets of a seed, for the estimator with its defaults
    regressor_options: tuple[tuple[str, int], ...] = ()
    cost_widths: tuple[int, ...] = (64, 256, 500)
    class_scale: str = "cpu"
    seeds: tuple[int, ...] = (0, 1, 2, 3)

    @property
    def dataset_names(self) -> Sequence[str]:
        return self._classes.dataset_names

    @property
    def _classes(self) -> classes.ClassSettings:
        return classes.ClassSettings.from_preset(self.class_scale)

    @property
    def training(self) -> curves.Training:
        return curves.Training(self.steps, self.batch_size, self.learning_rate)

    def jobs(self) -> list[Job]:
        found: list[Job] = []
        for seed in self.seeds:
            found += [{"part": "bands", **_named(cell), "seed": seed} for cell in self.cells]
            if seed in self._classes.seeds:
                found += [{"part": "classes", "data": data, "seed": seed} for data in self._classes.data]
            found += [{"part": "around", **_named(cell), "seed": seed} for cell in self.others]
            found += [
                {"part": "fitted", "method": method, **_named(cell), "seed": seed}
                for cell in self.others
                for method in curves.FITTED
            ]
            found += [{"part": "more", "method": method, **_named(self.more), "seed": seed} for method in curves.MORE]
            found += [
                {"part": "regressor", "function": function, "noise": noise, "n": n, "seed": seed}
                for function, noise, n in self.regressor_cells
            ]
            if seed == self.seeds[0]:
                found += [{"part": "true", **_named(cell), "seed": seed} for cell in self.cells]
                found += [{"part": "cost", "width": width, "seed": seed} for width in self.cost_widths]
        return found

    def is_timing_job(self, job: Job) -> bool:
        return bool(job["part"] == "cost")

    def measure(self, job: Job, context: RunContext) -> Rows:
        if job["part"] == "classes":
            return {"classes": classes.measure(job["data"], job["seed"], self._classes, context)}
        parts: dict[str, Callable[[Job], Rows]] = {
            "bands": self._bands,
            "around": self._around,
            "fitted": self._fitted,
            "more": self._more,
            "regressor": self._regressor,
            "true": self._true,
            "cost": self._cost,
        }
        return parts[job["part"]](job)

    def _bands(self, job: Job) -> Rows:
        """The influence bootstrap of the whole net, and the same with its size set by a second training."""
        first, config = job["seed"] * self.sets_each, self.training.config(job["n"], _DATA)
        numbers = range(first, first + self.sets_each)
        others = curves.replicates_of(job, numbers, self.training, _DATA)
        whole: list[tuple[Tensor, Tensor]] = []
        sized: list[tuple[Tensor, Tensor]] = []
        for (data, net), other in zip(curves.plain_nets(job, numbers, self.training, _DATA), others, strict=True):
            for found, predictor in zip((whole, sized), curves.whole_and_sized(net, other, data, config), strict=True):
                found.append(self._moments(job, predictor))
        return {
            "bands": [self._row(job, curves.WHOLE, whole, first), self._row(job, curves.SIZED, sized, first)],
        }

    def _around(self, job: Job) -> Rows:
        """The other methods that go around a trained net, all around the same."""
        each, config = self._of(self.others_each, job), self.training.config(job["n"], _DATA)
        first = job["seed"] * each
        pairs = curves.plain_nets(job, range(first, first + each), self.training, _DATA)
        rows = []
        for name, make in curves.AROUND.items():
            if name != curves.WHOLE:
                found = [
                    self._moments(job, make().from_trained(net, data, batch_size=config.batch_size, seed=config.seed))
                    for data, net in pairs
                ]
                rows.append(self._row(job, name, found, first))
        return {"bands": rows}

    def _moments(self, job: Job, predictor: Predictor) -> tuple[Tensor, Tensor]:
        return curves.moments_of(predictor, curves.curve(job["function"], job["noise"]).grid, self.num_samples)

    def _row(self, job: Job, method: str, moments: Sequence[tuple[Tensor, Tensor]], first: int) -> dict[str, Any]:
        """With the widths of every band of a data set that has a true bootstrap."""
        kept = max(0, self._of(self.true_sets, job) - first)
        mean, std = (torch.stack(part) for part in zip(*moments, strict=True))
        return curves.band_row(method, mean, std, curves.curve(job["function"], job["noise"]), kept)

    def _fitted(self, job: Job) -> Rows:
        return self._trained(job, curves.FITTED, self._of(self.others_each, job))

    def _more(self, job: Job) -> Rows:
        return self._trained(job, curves.MORE, self.more_each)

    def _trained(self, job: Job, methods: Mapping[str, Callable[[], Any]], each: int) -> Rows:
        """A method with a training of its own."""
        truth = curves.curve(job["function"], job["noise"])
        first, found = job["seed"] * each, []
        for number in range(first, first + each):
            data = truth.draw(job["n"], seed=_DATA, number=number)
            config = self.training.config(job["n"], derive_seed(_DATA, "net", number))
            predictor = methods[job["method"]]().fit(curves.net_of(job["width"]), data, config)
            found.append(self._moments(job, predictor))
        return {"bands": [self._row(job, job["method"], found, first)]}

    def _regressor(self, job: Job) -> Rows:
        """The estimator, which has a net and a training of its own."""
        first = job["seed"] * self.regressor_each
        numbers = range(first, first + self.regressor_each)
        return {"regressor": curves.regressor_rows(job, numbers, _DATA, dict(self.regressor_options))}

    def _true(self, job: Job) -> Rows:
        """A true random-weight bootstrap of the first few data sets."""
        truth, members = curves.curve(job["function"], job["noise"]), self._of(self.members, job)
        outputs = torch.stack(
            [
                curves.true_members(job, number, members, self.training, _DATA)
                for number in range(self._of(self.true_sets, job))
            ]
        )  # (R, K, N)
        return {"true": [curves.true_row(outputs, truth)]}

    def _cost(self, job: Job) -> Rows:
        """Seconds of one training, and of each method's work after it or with it, at n = 300."""
        methods = (
            *curves.TWO_NETS,
            *curves.AROUND,
            *curves.FITTED,
            *(curves.MORE if job["width"] == self.more[2] else ()),
        )
        return {"cost": curves.cost_rows(job["width"], self.training, self.num_samples, methods)}

    def _of(self, by_width: tuple[tuple[int, int], ...], job: Job) -> int:
        return dict(by_width)[job["width"]]

    def tables(self, rows: Rows) -> list[Table]:
        return [*band_tables(rows), *classes.tables(rows.get("classes", []))]

    def checks(self, rows: Rows) -> list[Check]:
        return [*band_checks(rows), *classes.checks(rows.get("classes", []))]

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        drawn = classes.plots(rows["classes"]) if rows.get("classes") else {}
        return {**band_plots(rows), **{f"classes-{name}": figure for name, figure in drawn.items()}}

    @property
    def note(self) -> str:
        return (
            f"Curves on (−2, 2): smooth is sin 2x, wiggly sin 3.5x, gap sin 2x without data between −0.5 and 0.5, edge "
            "sin 4x + x/2, which turns where the data end; noise is 0.3, or varies as 0.1 + 0.2 |x|. Nets of three "
            f"hidden ReLU layers; {self.steps} steps of Adam on batches of {self.batch_size}, from the rate "
            f"{self.learning_rate:g} along half a cosine. The true bootstrap draws Dirichlet weights and other first "
            "weights for each net. Where the fitted curve is biased, as at the edge, no bootstrap of the net can cover "
            "the truth. The rules of the influence bootstrap were chosen, among several, on curves of the same kind, "
            f"but on other data sets. {self._measured} What is recommended for a confidence band follows from this "
            'page: the influence bootstrap of the whole net, `InfluenceBootstrap(loss, layers="all")`, around any '
            "trained net; where the net is wide and a second training can be paid for, `fit` with `num_calibration_fits=1`. The "
            "regressor and the command use the first by default, with a Gaussian head and the step that early stopping "
            "left undone. "
            "A verdict on every cell compares what was measured with the mark, whatever its error; where it is missed, "
            "the verdict says by how much, and in how many cells by more than twice the error of the measurement."
        )

    @property
    def _measured(self) -> str:
        """Which part of all cells of function, noise, width and n the run has."""
        cells = [cell for cell in self.cells if cell[:2] in _CASES]
        widths = sorted({width for *_, width, _ in cells})
        counts = [f"{sum(cell[2] == width for cell in cells)} at width {width}" for width in widths]
        return f"Of {3 * len(_CASES)} cells of function, noise and n, these many were measured: {', '.join(counts)}."


_DATA = 0  # names the data sets: all jobs draw from the same ones


def _named(cell: Cell) -> dict[str, Any]:
    return dict(zip(("function", "noise", "width", "n"), cell, strict=True))
