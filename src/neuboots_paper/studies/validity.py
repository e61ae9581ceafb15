"""Beyond the paper: coverage of confidence bands at every x, and their cost.

    coverage(x), width(x) and likeness to a true bootstrap of every method, on synthetic regressions
    distance of the replicates from those of a true bootstrap, of every method, for classification

Regression is measured by `validity_curves`, summarized by `validity_summary` and reported by `validity_report`;
classification is in `validity_classes`. Rules of the influence bootstrap were chosen on problems of this kind, but on
other datasets (docs/decisions/0010).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots._prng import derive_keys, derive_seed
from neuboots.evaluation.coverage import SyntheticRegression
from neuboots.prediction import Predictor
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots.training import TrainingConfig
from neuboots.weights import Dirichlet
from neuboots_paper.studies import validity_classes as classes
from neuboots_paper.studies import validity_curves as curves
from neuboots_paper.studies.validity_report import band_checks, band_plots, band_tables
from neuboots_paper.study import BEYOND_PAPER, Job, Rows, RunContext, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CellKey = tuple[str, str, int, int]  # function, noise, width, n

_DATA_SEED = 0  # of the datasets: all jobs use the same ones

_CASES = tuple((function, noise) for function in ("smooth", "wiggly", "gap") for noise in ("constant", "varying"))
_GRID: tuple[CellKey, ...] = tuple(
    (*case, width, n) for width in (64, 256, 500) for n in (300, 100, 1000) for case in _CASES
)


@dataclass(frozen=True)
class Validity(Study):
    """Coverage at each x, width and shape of the band of every method, beside those of a true bootstrap."""

    name = "validity"
    source = BEYOND_PAPER
    requires = ("gpytorch",)
    claim = (
        "A 95 % confidence band for the regression function that costs one training, or two at most, covers the "
        "function in 95 % of the datasets, at every x inside the data, and is no wider than necessary."
    )

    cells: tuple[CellKey, ...] = (*_GRID, ("edge", "constant", 64, 1000))
    others: tuple[CellKey, ...] = (  # where the other methods are measured
        ("smooth", "constant", 64, 300),
        ("wiggly", "varying", 64, 300),
        ("gap", "constant", 64, 300),
        ("smooth", "constant", 256, 300),
        ("smooth", "constant", 500, 300),
    )
    more: CellKey = ("smooth", "constant", 64, 300)  # where all the rest are
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
            found += [{"part": "bands", **_name_cell(cell), "seed": seed} for cell in self.cells]
            if seed in self._classes.seeds:
                found += [{"part": "classes", "data": data, "seed": seed} for data in self._classes.data]
            found += [{"part": "around", **_name_cell(cell), "seed": seed} for cell in self.others]
            found += [
                {"part": "fitted", "method": method, **_name_cell(cell), "seed": seed}
                for cell in self.others
                for method in curves.TRAINED
            ]
            found += [
                {"part": "more", "method": method, **_name_cell(self.more), "seed": seed} for method in curves.OTHERS
            ]
            found += [
                {"part": "regressor", "function": function, "noise": noise, "n": n, "seed": seed}
                for function, noise, n in self.regressor_cells
            ]
            if seed == self.seeds[0]:
                found += [{"part": "true", **_name_cell(cell), "seed": seed} for cell in self.cells]
                found += [{"part": "cost", "width": width, "seed": seed} for width in self.cost_widths]
        return found

    def is_timing_job(self, job: Job) -> bool:
        return bool(job["part"] == "cost")

    def measure(self, job: Job, context: RunContext) -> Rows:
        part = job["part"]
        if part == "classes":
            return {"classes": classes.measure(job["data"], job["seed"], self._classes, context)}
        if part == "regressor":
            first = job["seed"] * self.regressor_each
            numbers = range(first, first + self.regressor_each)
            return {part: curves.regressor_rows(job, numbers, _DATA_SEED, dict(self.regressor_options))}
        if part == "cost":
            others = curves.OTHERS if job["width"] == self.more[2] else ()
            methods = (*curves.POST_HOC, *curves.TRAINED, *others)
            return {part: curves.cost_rows(job["width"], self.training, self.num_samples, methods)}
        cell = _Cell(self, job, curves.make_problem(job["function"], job["noise"]))
        if part == "true":
            return {part: [cell.true_bootstrap()]}
        if part == "bands":
            return {"bands": cell.influence_bands()}
        if part == "around":
            return {"bands": cell.post_hoc_bands()}
        each = dict(self.others_each)[job["width"]] if part == "fitted" else self.more_each
        return {"bands": [cell.trained_band({**curves.TRAINED, **curves.OTHERS}[job["method"]], each)]}

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
            "sin 4x + x/2, with an extremum at the end of the data; noise is 0.3, or varies as 0.1 + 0.2 |x|. Nets of "
            f"three hidden ReLU layers; {self.steps} steps of Adam on batches of {self.batch_size}, with cosine "
            f"annealing from {self.learning_rate:g}. The true bootstrap draws Dirichlet weights and other initial "
            "weights for each net. Where the fitted curve is biased, as at the edge, no bootstrap of the net can cover "
            "the function. The rules of the influence bootstrap were chosen, among several, on curves of this kind, "
            f"but on other data sets. {self._measured} These bands have the noise of training residuals, which "
            "suffices for one input and a short training; the band that is sized by a second training is that of an "
            "earlier version. `InfluenceBootstrap` sizes its band by errors at held-out rows if it has any: the study "
            "`dimensions` measures it. "
            "A check over all cells compares the measured values with the criterion regardless of their errors; where "
            "it fails, it lists by how much, and in how many cells by more than twice the standard error."
        )

    @property
    def _measured(self) -> str:
        """Which part of all cells of function, noise, width and n the run has."""
        cells = [cell for cell in self.cells if cell[:2] in _CASES]
        widths = sorted({width for *_, width, _ in cells})
        counts = [f"{sum(cell[2] == width for cell in cells)} at width {width}" for width in widths]
        return f"Of {3 * len(_CASES)} cells of function, noise and n, these many were measured: {', '.join(counts)}."


@dataclass(frozen=True, eq=False)
class _Cell:
    """A function, noise, width and n: datasets, trained nets, and rows of bands."""

    study: Validity
    job: Job
    problem: SyntheticRegression

    @property
    def config(self) -> TrainingConfig:
        return self.study.training.config(self.job["n"], _DATA_SEED)

    def draw(self, numbers: Sequence[int]) -> list[TensorDataset]:
        return [self.problem.draw(self.job["n"], seed=_DATA_SEED, number=number) for number in numbers]

    def train(self, numbers: Sequence[int], weights: Tensor | None = None) -> list[nn.Module]:
        """A net for each dataset, with an initialization that depends on its number alone."""
        seeds = [derive_seed(_DATA_SEED, "net", number) for number in numbers]
        return curves.train_nets(self.job["width"], self.draw(numbers), self.config, seeds=seeds, weights=weights)

    def influence_bands(self) -> list[dict[str, Any]]:
        """The influence bootstrap of the whole net, without and with a calibration fit."""
        first = self.job["seed"] * self.study.sets_each
        numbers = range(first, first + self.study.sets_each)
        keys = derive_keys(torch.tensor([*numbers]), _DATA_SEED, "replicate")
        replicates = self.train(numbers, Dirichlet().sample(keys, self.job["n"]))
        pairs = [
            curves.make_influence_predictors(net, replicate, data, self.config)
            for net, replicate, data in zip(self.train(numbers), replicates, self.draw(numbers), strict=True)
        ]
        whole, scaled = zip(*pairs, strict=True)
        return [self.row(curves.WHOLE, whole, first), self.row(curves.SCALED, scaled, first)]

    def post_hoc_bands(self) -> list[dict[str, Any]]:
        """The other post-hoc methods, all with the same trained nets."""
        each = dict(self.study.others_each)[self.job["width"]]
        first = self.job["seed"] * each
        numbers = range(first, first + each)
        pairs = list(zip(self.train(numbers), self.draw(numbers), strict=True))
        options = {"batch_size": self.config.batch_size, "seed": _DATA_SEED}
        return [
            self.row(name, [make().from_trained(net, data, **options) for net, data in pairs], first)
            for name, make in curves.POST_HOC.items()
            if name != curves.WHOLE
        ]

    def trained_band(self, make: Callable[[], Any], each: int) -> dict[str, Any]:
        """Row of a method with its own training."""
        first = self.job["seed"] * each
        predictors = []
        for number, data in enumerate(self.draw(range(first, first + each)), first):
            config = replace(self.config, seed=derive_seed(_DATA_SEED, "net", number))
            predictors.append(make().fit(curves.net_factory(self.job["width"]), data, config))
        return self.row(self.job["method"], predictors, first)

    def true_bootstrap(self) -> dict[str, Any]:
        """A true random-weight bootstrap of the first datasets."""
        width, n = self.job["width"], self.job["n"]
        members, outputs = dict(self.study.members)[width], []
        for number, data in enumerate(self.draw(range(dict(self.study.true_sets)[width]))):
            keys = derive_keys(torch.arange(members), _DATA_SEED, "true bootstrap", number)
            seeds = [derive_seed(_DATA_SEED, "true bootstrap", number, k) for k in range(members)]
            weights = Dirichlet().sample(keys, n)  # (K, n)
            nets = curves.train_nets(width, [data] * members, self.config, seeds=seeds, weights=weights)
            with torch.no_grad():
                outputs.append(torch.stack([net(self.problem.grid)[:, 0] for net in nets]).double())
        return curves.bootstrap_row(torch.stack(outputs), self.problem)

    def row(self, method: str, predictors: Sequence[Predictor], first: int) -> dict[str, Any]:
        """Row of these bands, with the widths of those whose dataset has a true bootstrap."""
        moments = [curves.compute_moments(each, self.problem.grid, self.study.num_samples) for each in predictors]
        mean, std = (torch.stack(values) for values in zip(*moments, strict=True))
        kept = max(0, dict(self.study.true_sets)[self.job["width"]] - first)
        return curves.band_row(method, mean, std, self.problem, kept)


def _name_cell(cell: CellKey) -> dict[str, Any]:
    return dict(zip(("function", "noise", "width", "n"), cell, strict=True))
