"""What the rows of many bands say of a method in a cell: coverage, width, and likeness to a true bootstrap.

    r = Σ cov(s, t) / √(Σ var(s) · Σ cov(t₁, t₂)),   s the band's standard deviation over x, t the true bootstrap's

with sums over data sets; t₁ and t₂ come from two halves of the true bootstrap's nets, whose noise is independent, so
that r is not lowered by there being few of them. The true bootstrap's band is also scaled, by the quantile of
|m(x) − f(x)|/t(x), to the coverage that the method has: a fair comparison of widths. A t of K nets is noisy and, in the
mean, c₄(K) times too small: Student's quantile and c₄ make up for that, as if there were very many.

What can be asked of a band at all is said by the ideal one, m(x) ± z σ(x) with σ the standard deviation of the fitted
curve over data sets, which nobody knows who has but one. It is the same for all data sets, and then

    r ≤ √(mean of cov(t, t′) over pairs of data sets / mean of cov(t₁, t₂) over data sets)

Tables of the bands in the study of validity, and the mark that they are held to.

Figures of the bands in the study of validity.

Verdicts on the bands in the study of validity: whether the mark is met in every cell, and where it is not.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuboots.report.checks import Check
from neuboots.report.tables import MISSING, Cell, Table
from neuboots_paper.studies.validity_curves import AROUND, FITTED, LEVEL, MORE, REGRESSOR, SIZED, TRUE, WHOLE, Z, inside
from neuboots_paper.study import Rows

Row = Mapping[str, Any]
CELL = ("function", "noise", "width", "n")
IDEAL = "ideal: the curve's own std over data sets"


@dataclass(frozen=True, eq=False)
class Found:
    """A method in a cell, over all its data sets."""

    method: str
    rows: Sequence[Row]  # of its parts
    true: Row | None  # of the true bootstrap in the same cell

    @property
    def function(self) -> str:
        return str(self.rows[0]["function"])

    @property
    def cell(self) -> tuple[Any, ...]:
        return tuple(self.rows[0][key] for key in CELL)

    @property
    def sets(self) -> int:
        return sum(row["sets"] for row in self.rows)

    @cached_property
    def x(self) -> Tensor:
        return torch.linspace(-1.9, 1.9, len(self.rows[0]["held"]))

    @cached_property
    def inside(self) -> Tensor:
        return inside(self.function, self.x)

    @cached_property
    def rate(self) -> Tensor:
        """The share of data sets whose band holds f(x): (N,)."""
        return torch.tensor([row["held"] for row in self.rows], dtype=torch.float64).sum(0) / self.sets

    def _mean(self, key: str) -> Tensor:
        """The mean over data sets of a figure that parts have the mean of: (N,)."""
        weights = torch.tensor([row["sets"] for row in self.rows], dtype=torch.float64) / self.sets
        return weights @ torch.tensor([row[key] for row in self.rows], dtype=torch.float64)

    @property
    def coverage(self) -> float:
        return float(self.rate[self.inside].mean())

    @property
    def coverage_error(self) -> float:
        """From the scatter over parts where there are several, else as if a curve missed at all x or at none."""
        parts = [float(torch.tensor(row["held"])[self.inside].double().mean()) / row["sets"] for row in self.rows]
        if len(parts) > 1:
            return float(torch.tensor(parts).std()) / math.sqrt(len(parts))
        return binomial_error(self.coverage, self.sets)

    @property
    def worst(self) -> tuple[float, float]:
        """(least rate inside the data, its x)."""
        place = int(self.rate.where(self.inside, 2.0).argmin())
        return float(self.rate[place]), float(self.x[place])

    @property
    def in_gap(self) -> float | None:
        return float(self.rate[~self.inside].mean()) if bool((~self.inside).any()) else None

    @property
    def std(self) -> float:
        """The mean standard deviation of the band inside the data."""
        return float(self._mean("std")[self.inside].mean())

    @cached_property
    def curve_std(self) -> Tensor:
        """The standard deviation of the fitted curve over data sets: (N,)."""
        return (self._mean("square") - self._mean("error").square()).clamp_min(1e-12).sqrt()

    @cached_property
    def curve_bias(self) -> Tensor:
        """The mean error of the fitted curve, in its standard deviations: (N,)."""
        return self._mean("error") / self.curve_std

    @property
    def size(self) -> float:
        """The mean standard deviation of the band against that of the curve."""
        return self.std / float(self.curve_std[self.inside].mean())

    @property
    def bias(self) -> float:
        """The largest bias of the curve inside the data, in its standard deviations."""
        return float(self.curve_bias[self.inside].abs().max())

    @property
    def ideal(self) -> "Found":
        """The band of the curve's own standard deviation, which a Gaussian error of this bias leaves now and then."""
        upper, lower = (torch.special.ndtr(side * Z - self.curve_bias) for side in (1.0, -1.0))
        row = {key: self.rows[0][key] for key in ("function", "noise", "width", "n", "seed")} | {
            "sets": self.sets,
            "held": ((upper - lower) * self.sets).tolist(),
            "error": self._mean("error").tolist(),
            "square": self._mean("square").tolist(),
            "std": self.curve_std.tolist(),
            "stds": [],
        }
        return Found(IDEAL, [row], self.true)

    # -- beside the true bootstrap -------------------------------------------------------------------

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Standard deviations of the band, of the true bootstrap and of its halves, by data set: (R, N) each."""
        kept = [line for row in sorted(self.rows, key=lambda row: row["seed"]) for line in row["stds"]]
        if self._of_true is None or not kept:
            return None
        count = min(len(kept), len(self._of_true[0]))
        band = torch.tensor(kept[:count], dtype=torch.float64)[:, self.inside]
        whole, even, odd = (part[:count] for part in self._of_true)
        return band, whole, even, odd

    @cached_property
    def _of_true(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Standard deviations of the true bootstrap and of its halves, as of very many nets: (R, N) each."""
        if self.true is None:
            return None
        nets = self.true["members"]
        found = (
            (self.true["stds"], nets),
            (self.true["halves"][0], (nets + 1) // 2),
            (self.true["halves"][1], nets // 2),
        )
        whole, *halves = (torch.tensor(s, dtype=torch.float64)[:, self.inside] / c4(count) for s, count in found)
        return whole, halves[0], halves[1]

    @property
    def likeness(self) -> tuple[float, float] | None:
        """(r, its standard error over data sets by the jackknife); None where halves of the true nets do not agree on
        how their spread varies with x."""
        if self._pairs is None:
            return None
        return jackknife(_correlation, *self._pairs)

    @property
    def most_alike(self) -> tuple[float, float] | None:
        """(the largest r of a band that is the same for all data sets, its standard error)."""
        return None if self._of_true is None else jackknife(_shared, *self._of_true)

    @property
    def relative_width(self) -> tuple[float, float] | None:
        """(mean width / that of the true bootstrap's band scaled to the same coverage, its standard error)."""
        if self.true is None:
            return None
        assert self._of_true is not None
        away = torch.tensor(self.true["away"], dtype=torch.float64)[:, self.inside]
        level = min(self.coverage, 1.0 - 0.5 / away.numel())  # where all is held, so many more would be needed
        noise = student(level, self.true["members"]) / student(level)

        def ratio(away: Tensor, spread: Tensor) -> float:
            scale = float(away.flatten().quantile(level)) / (noise * Z)
            return self.std / (scale * float(spread.mean()))

        return jackknife(ratio, away, self._of_true[0])


def _centred(*parts: Tensor) -> list[Tensor]:
    """Less their means over x; what does not vary beyond rounding is zero."""
    found = [part - part.mean(1, keepdim=True) for part in parts]
    return [part.where(part.abs() > 1e-12 * whole.abs().max(), 0.0) for part, whole in zip(found, parts, strict=True)]


def _correlation(band: Tensor, true: Tensor, even: Tensor, odd: Tensor) -> float:
    band, true, even, odd = _centred(band, true, even, odd)
    size = float(band.square().sum()) * float((even * odd).sum())
    return float((band * true).sum()) / math.sqrt(size) if size > 0 else math.nan


def _shared(true: Tensor, even: Tensor, odd: Tensor) -> float:
    """√(covariance over x between data sets / the variance over x within one): 1 if all have one shape.

    With its sign, since a share that is nothing comes out below it as often as above.
    """
    true, even, odd = _centred(true, even, odd)
    sets, within = len(true), float((even * odd).sum()) / len(true)
    between = float(true.sum(0).square().sum() - true.square().sum()) / (sets * max(1, sets - 1))
    return math.copysign(math.sqrt(abs(between) / within), between) if within > 0 else math.nan


def c4(count: int) -> float:
    """E s / σ of the standard deviation s of so many Gaussian numbers.

    >>> round(c4(2), 4), round(c4(10), 4)
    (0.7979, 0.9727)
    """
    return math.sqrt(2 / (count - 1)) * math.exp(math.lgamma(count / 2) - math.lgamma((count - 1) / 2))


def student(level: float, count: int | None = None) -> float:
    """The half-width of a band of this level in standard deviations of so many numbers; None: of very many.

    >>> round(student(0.95), 2), round(student(0.95, 10), 2)
    (1.96, 2.26)
    """
    from scipy import stats

    weight_distribution = stats.norm if count is None else stats.t(count - 1)
    return float(weight_distribution.ppf((1 + level) / 2))


def jackknife(figure: Callable[..., float], *parts: Tensor) -> tuple[float, float] | None:
    """(figure, √((R − 1)/R Σ_r (figure without row r − mean)²)), over the R rows of all parts; None if it is no number.

    >>> jackknife(lambda values: float(values.mean()), torch.tensor([1.0, 2.0, 3.0]))
    (2.0, 0.5773502691896257)
    """
    whole, count = figure(*parts), len(parts[0])
    if not math.isfinite(whole):
        return None
    if count < 2:
        return whole, math.nan
    each = [figure(*(torch.cat([part[:r], part[r + 1 :]]) for part in parts)) for r in range(count)]
    values = torch.tensor(each, dtype=torch.float64)
    return whole, math.sqrt((count - 1) / count * float((values - values.mean()).square().sum()))


def binomial_error(rate: float, sets: int) -> float:
    return math.sqrt(max(0.0, rate * (1.0 - rate)) / sets)


def summaries(rows: Rows) -> dict[tuple[Any, ...], dict[str, Found]]:
    """By cell, then by method; the true bootstrap among them."""
    true = {tuple(row[key] for key in CELL): _by_student(row) for row in rows.get("true", [])}
    parts: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in [*rows["bands"], *true.values()]:
        parts.setdefault(tuple(row[key] for key in CELL), {}).setdefault(row["method"], []).append(row)
    return {
        cell: {method: Found(method, found, true.get(cell)) for method, found in methods.items()}
        for cell, methods in parts.items()
    }


def _by_student(row: Row) -> Row:
    """The row of a true bootstrap, its band with the quantile that its number of nets asks for."""
    held = torch.tensor(row["away"], dtype=torch.float64) <= student(LEVEL, row["members"])
    return {**row, "held": held.sum(0).tolist()}


LEAST, MOST = 0.93, 0.97  # of the mean coverage
LEAST_AT_X = 0.88  # of the coverage at each x inside the data
LEAST_LIKENESS = 0.8  # correlation with the true bootstrap's standard deviation over x
MOST_WIDTH = 1.25  # times the true bootstrap's, at the same coverage
MOST_TRAININGS = 2
ROUNDING = 1e-9  # 0.93 may be 0.92999… where it is a mean
TITLES = {
    WHOLE: "influence bootstrap of the whole net",
    SIZED: "influence bootstrap of the whole net sized by a second training",
}
HARD = "edge"  # a curve that nets miss: shown, and not among those of the claim

Cells = Mapping[tuple[Any, ...], Mapping[str, Found]]


def _text(value: Any) -> Cell:
    return Cell(str(value), float(value)) if isinstance(value, int) else Cell(str(value))


def _number(value: float | None, digits: int = 2, error: float | None = None) -> Cell:
    if value is None:
        return Cell(MISSING)
    shown = f"{value:.{digits}f}" + ("" if error is None or error != error else f" ± {error:.{digits}f}")
    return Cell(shown, value)


def _pair(found: tuple[float, float] | None, digits: int = 2) -> Cell:
    return Cell(MISSING) if found is None else _number(found[0], digits, found[1])


def _worst(found: Found) -> Cell:
    rate, x = found.worst
    error = 100 * binomial_error(rate, found.sets)
    return Cell(f"{100 * rate:.0f} ± {error:.0f} at {_place(x)}", rate)


def _place(x: float) -> str:
    """
    >>> _place(-1.9), _place(-1e-9), _place(0.3)
    ('−1.9', '0.0', '+0.3')
    """
    return f"{round(x, 1) or 0.0:+.1f}".replace("-", "−").replace("+0.0", "0.0")


def _percent(found: Found) -> Cell:
    return _number(100 * found.coverage, 1, 100 * found.coverage_error)


# -- tables --------------------------------------------------------------------------------------------


def band_tables(rows: Rows) -> list[Table]:
    cells = summaries(rows)
    return [
        _glance(cells, rows),
        _mark(cells, SIZED, "two trainings"),
        _mark(cells, WHOLE, "one training"),
        _methods(cells, rows),
        *(_by_x(bands_of(cells, method), f"the {TITLES[method]}") for method in (SIZED, WHOLE)),
        _by_x(_compared(cells), "every method in the cells where all were measured", named=True),
        *_regressors(rows),
        *_costs(rows),
    ]


def bands_of(cells: Cells, method: str) -> list[Found]:
    return [methods[method] for methods in cells.values() if method in methods]


def judged(cells: Cells) -> dict[str, list[Found]]:
    """The bands that the mark is for, and beside them the ideal one."""
    whole, sized = (bands_of(cells, method) for method in (WHOLE, SIZED))
    return {WHOLE: whole, SIZED: sized, IDEAL: [found.ideal for found in whole or sized]}


def in_the_mark(bands: Sequence[Found]) -> list[Found]:
    return [found for found in bands if found.function != HARD]


def off_level(coverage: float) -> float:
    """By how much a mean coverage misses the mark; below 0 it does not."""
    return max(LEAST - coverage, coverage - MOST)


def _compared(cells: Cells) -> list[Found]:
    """Every method in the cells where all were measured."""
    there = [methods for methods in cells.values() if any(method in methods for method in FITTED)]
    order = (SIZED, *AROUND, *FITTED, *MORE, TRUE)
    return [methods[method] for methods in there for method in order if method in methods]


def _glance(cells: Cells, rows: Rows) -> Table:
    """A line for each form and width, the ideal among them: the least and the greatest over functions, noises and n."""
    heads = (
        *("method", "width", "cells", "coverage, %", "at the worst x, %", "cells that miss either"),
        *("likeness", "relative width", "true bootstrap's coverage, %", "cost in trainings"),
    )
    costs = trainings(rows)
    lines = []
    for method, bands in judged(cells).items():
        ours = in_the_mark(bands)
        for width in sorted({found.cell[2] for found in ours}):
            mine = [found for found in ours if found.cell[2] == width]
            true = [cells[found.cell][TRUE].coverage for found in mine if TRUE in cells[found.cell]]
            alike = [found.most_alike if method == IDEAL else found.likeness for found in mine]
            missed = [f for f in mine if max(off_level(f.coverage), LEAST_AT_X - f.worst[0]) > ROUNDING]
            lines.append(
                (
                    *map(_text, (method, width, len(mine))),
                    _range([100 * found.coverage for found in mine], 1),
                    _range([100 * found.worst[0] for found in mine], 1),
                    _text(len(missed)),
                    _range([found[0] for found in alike if found]),
                    _range([found.relative_width[0] for found in mine if found.relative_width]),
                    _range([100 * coverage for coverage in true], 0),
                    _number(costs.get((method, width))),
                )
            )
    return Table(
        f"At a glance: the {LEVEL:.0%} band of the influence bootstrap, from the least to the greatest over all cells.",
        heads,
        tuple(lines),
        note=(
            f"The mark: a mean coverage of {LEAST:.0%} to {MOST:.0%}, {LEAST_AT_X:.0%} or more at every x inside the "
            f"data, a likeness of {LEAST_LIKENESS} or more, a relative width of {MOST_WIDTH} or less, a cost of "
            f"{MOST_TRAININGS} or less. The columns are explained below. The ideal band, which nobody can have "
            "who has but one data set, is the fitted curve ± 1.96 times its own standard deviation over data sets. Its "
            "coverage is computed from the bias of the curve, as for a Gaussian error, and so is free of the chance "
            "that makes the least of many measured rates low. Its likeness is the most that any band has which is the "
            "same for all data sets of a cell: where that is low, the true bootstrap's spread over x is mostly that of "
            "the data set at hand, and a band may have the right size at every x and be unlike it."
        ),
        num_keys=2,
    )


def _range(values: Sequence[float], digits: int = 2) -> Cell:
    """
    >>> _range([0.25, 0.5, 0.75]).text, _range([]).text
    ('0.25 to 0.75', '–')
    """
    if not values:
        return Cell(MISSING)
    return Cell(f"{min(values):.{digits}f} to {max(values):.{digits}f}", fmean(values))


def _mark(cells: Cells, method: str, price: str) -> Table:
    heads = (
        *("function", "noise", "width", "n", "data sets", "coverage, %", "at the worst x, %", "in the gap, %"),
        *("std of the band", "std of the curve", "bias / std", "ideal at the worst x, %", "likeness"),
        *("most if the same for all sets", "relative width"),
        *("true bootstrap: nets × sets", "true bootstrap's coverage, %", "true bootstrap's std"),
    )
    lines = []
    for found in bands_of(cells, method):
        true = cells[found.cell].get(TRUE)
        ideal = found.ideal
        gap = None if found.in_gap is None else 100 * found.in_gap
        lines.append(
            (
                *map(_text, found.cell),
                _text(found.sets),
                _percent(found),
                _worst(found),
                _number(gap, 0),
                _number(found.std, 3),
                _number(found.std / found.size, 3),
                _number(found.bias, 2),
                _number(100 * ideal.worst[0], 0),
                _pair(found.likeness),
                _pair(found.most_alike),
                _pair(found.relative_width),
                Cell(MISSING) if true is None else Cell(f"{true.rows[0]['members']} × {true.sets}"),
                Cell(MISSING) if true is None else _number(100 * true.coverage, 1),
                Cell(MISSING) if true is None else _number(true.std, 3),
            )
        )
    return Table(
        f"The {LEVEL:.0%} band of the {TITLES[method]} ({price}, and a pass over the data).",
        heads,
        tuple(lines),
        note=(
            "Coverage is the mean over x inside the data ± its standard error, from the scatter over four parts of the "
            "data sets; at the worst x ± the binomial error. The std of the curve is that of the fitted curve over "
            "data sets; bias / std is the largest over x inside the data, and the ideal band is that of the std of the "
            "curve, which this bias alone makes miss more often than it should. "
            "Likeness is the correlation over x, data set by data set, of the band's standard deviation with that of a "
            "true random-weight bootstrap, corrected for the noise of its few nets (where its spread hardly "
            "varies with x the correction is large, and may overshoot 1); beside it the most that a band can have "
            "which is the same for all data sets, as the ideal one is. Relative width is against the true bootstrap's "
            "band scaled to the same coverage, as if it had very many nets; its own coverage is with Student's "
            "quantile. Errors of these are the jackknife's over data sets: now and then a wide net goes astray in "
            "training, and a data set where one of the true nets did so counts for several."
        ),
        num_keys=4,
    )


def _methods(cells: Cells, rows: Rows) -> Table:
    heads = (
        *("function", "noise", "width", "n", "method", "data sets", "coverage, %", "at the worst x, %"),
        *("std of the band", "likeness", "relative width", "cost in trainings"),
    )
    costs = trainings(rows)
    lines = [
        (
            *map(_text, (*found.cell, found.method, found.sets)),
            _percent(found),
            _worst(found),
            _number(found.std, 3),
            Cell(MISSING) if found.method == TRUE else _pair(found.likeness),
            Cell(MISSING) if found.method == TRUE else _pair(found.relative_width),
            _text(found.rows[0]["members"])
            if found.method == TRUE
            else _number(costs.get((found.method, found.cell[2]))),
        )
        for found in _compared(cells)
    ]
    return Table(
        "Every method in the cells where all were measured.",
        heads,
        tuple(lines),
        note=(
            "Cost: seconds of fitting and of predicting on the grid, over those of one plain training of the same net; "
            "for methods that go around a trained net, that training included. The true bootstrap's coverage has the "
            "error that it would have if a curve missed at all x or at none. MC dropout has a rate of 0.1."
        ),
        num_keys=5,
    )


def _by_x(bands: Sequence[Found], title: str, *, named: bool = False) -> Table:
    """Every second x of these bands, with the names of their methods or without."""
    places = range(0, len(bands[0].x), 2) if bands else range(0)
    heads = ("function", "noise", "width", "n", *(("method",) * named))
    lines = [
        (
            *map(_text, (*found.cell, *((found.method,) * named))),
            *(
                _number(100 * float(found.rate[k]), 0, 100 * binomial_error(float(found.rate[k]), found.sets))
                for k in places
            ),
        )
        for found in bands
    ]
    return Table(
        f"Coverage in per cent at each x ± its binomial error: {title}.",
        (*heads, *(f"x = {_place(float(bands[0].x[k]))}" for k in places)),
        tuple(lines),
        note="In the gap, between −0.5 and 0.5, there are no data.",
        num_keys=len(heads),
    )


def regressor_bands(rows: Rows) -> list[Found]:
    parts: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows.get("regressor", []):
        parts.setdefault((row["function"], row["noise"], row["n"], row["method"]), []).append(row)
    return [Found(key[-1], found, None) for key, found in parts.items()]


def _regressors(rows: Rows) -> list[Table]:
    heads = ("function", "noise", "n", "band", "data sets", "coverage, %", "at the worst x, %", "std of the band")
    lines = [
        (
            *(_text(found.rows[0][key]) for key in ("function", "noise", "n", "method")),
            _text(found.sets),
            _percent(found),
            _worst(found),
            *(_number(value, 3) for value in (found.std, found.std / found.size)),
            _number(found.bias),
        )
        for found in regressor_bands(rows)
    ]
    return [
        Table(
            f"The {LEVEL:.0%} confidence band of the estimator with its defaults, one training.",
            (*heads, "std of the curve", "bias / std"),
            tuple(lines),
            note=(
                "It standardises, holds rows out, stops early and has a Gaussian head; its band is the influence "
                "bootstrap of the whole net with the step that early stopping left undone."
            ),
            num_keys=4,
        )
    ] * bool(lines)


def _costs(rows: Rows) -> list[Table]:
    costs = trainings(rows)
    if not costs:
        return []
    widths = sorted({width for _, width in costs})
    lines = [
        (_text(method), *(_number(costs.get((method, width)), 3) for width in widths))
        for method in (SIZED, *AROUND, *FITTED, *MORE)
    ]
    return [
        Table(
            "What each method costs, in plain trainings of the same net.",
            ("method", *(f"3 × {width}" for width in widths)),
            tuple(lines),
            note=(
                "n = 300; the least seconds of three runs (of two trainings: fifteen), with the prediction on the "
                "grid, over the least of plain trainings in turn with them. Methods that go around a trained net have "
                "1 for its training, and the rest is theirs."
            ),
            num_keys=1,
        )
    ]


def trainings(rows: Rows) -> dict[tuple[str, int], float]:
    """What each method costs, by width: in plain trainings, that of the net it goes around among them."""
    return {
        (row["method"], row["width"]): row["seconds"] / row["plain"] + (row["method"] in AROUND)
        for row in rows.get("cost", [])
    }


if TYPE_CHECKING:
    from matplotlib.figure import Figure


def band_plots(rows: Rows) -> "dict[str, Figure]":
    from matplotlib.figure import Figure

    from neuboots.report.plots import plot_coverage

    cells = summaries(rows)
    ours = in_the_mark(bands_of(cells, SIZED))
    cases = list(dict.fromkeys((found.function, found.cell[1]) for found in ours))
    widths = sorted({found.cell[2] for found in ours})
    by_x = Figure(figsize=(4.2 * len(cases), 3.9 * len(widths)), layout="constrained")
    panels = by_x.subplots(len(widths), len(cases), squeeze=False, sharex=True, sharey=True).flat
    shown: dict[str, Any] = {}  # one legend for all: in the gap there is no room for another
    for ax, (width, (function, noise)) in zip(panels, product(widths, cases), strict=True):
        mine = [found for found in ours if found.cell[:3] == (function, noise, width)]
        mine.sort(key=lambda found: int(found.cell[3]))
        if mine:
            curves = {f"n = {found.cell[3]}": found.rate for found in mine}
            plot_coverage(ax, mine[0].x, curves, level=LEVEL, num_sets=mine[0].sets)
            handles, labels = ax.get_legend_handles_labels()
            ax.get_legend().remove()
            shown |= {label.split(" (mean")[0]: handle for handle, label in zip(handles, labels, strict=True)}
        ax.set_title(f"{function}, {noise} noise, width {width}" + ("" if mine else ": not measured"))
        ax.set_ylim(min([0.5, *(float(found.rate.min()) for found in ours)]) - 0.02, 1.01)
    by_x.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown) or 1)
    compared = {cell: methods for cell, methods in cells.items() if any(method in methods for method in FITTED)}
    return {"coverage": by_x, "methods": _bars(list(compared.items()))}


def _bars(cells: Sequence[tuple[tuple[Any, ...], Mapping[str, Found]]]) -> "Figure":
    """Mean coverage and that at the worst x of every method, a panel for each cell."""
    from matplotlib.figure import Figure

    from neuboots.report.plots import BLUE, ORANGE

    names = [name for name in (SIZED, *AROUND, *FITTED, *MORE, TRUE) if any(name in methods for _, methods in cells)]
    size = (4.5 + 2.4 * max(1, len(cells)), 1.5 + 0.3 * len(names))  # with room for the names
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, max(1, len(cells)), squeeze=False, sharey=True)[0]
    for ax, ((function, noise, width, n), methods) in zip(panels, cells, strict=False):
        for k, name in enumerate(names):
            if name in methods:
                ax.plot(methods[name].coverage, k, "o", color=BLUE, label="mean over x" if not k else None)
                ax.plot(methods[name].worst[0], k, "x", color=ORANGE, label="at the worst x" if not k else None)
        ax.axvline(LEVEL, color="black", lw=1, ls=":")
        ax.set(xlim=(-0.03, 1.03), xlabel="share of data sets covered")
        ax.set_title(f"{function}, {noise} noise\nwidth {width}, n = {n}", fontsize=10)
        ax.grid(axis="y", alpha=0.3)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    if cells:
        panels[0].legend(loc="lower left", fontsize=8)
    return figure


def band_checks(rows: Rows) -> list[Check]:
    cells = summaries(rows)
    found = [verdict for method in (SIZED, WHOLE) for verdict in _marks(bands_of(cells, method), TITLES[method])]
    ideal = in_the_mark(judged(cells)[IDEAL])
    found.append(
        _everywhere(
            f"a band that is the same for all data sets, as the ideal one is, can correlate over x by {LEAST_LIKENESS} "
            f"or more with the true bootstrap's {_every(ideal)}",
            {each: each.most_alike for each in ideal},
            lambda value: LEAST_LIKENESS - value,
            lambda value: f"{value:.2f}",
        )
    )
    for method in (SIZED, WHOLE):
        costs = {width: cost for (name, width), cost in trainings(rows).items() if name == method}
        shown = ", ".join(f"{cost:.2f} at width {width}" for width, cost in costs.items())
        holds = max(costs.values()) <= MOST_TRAININGS if costs else None
        found.append(Check(f"the {TITLES[method]} costs at most {MOST_TRAININGS} plain trainings", holds, shown))
    if mine := [each for each in regressor_bands(rows) if each.method == REGRESSOR]:
        found += _covers(mine, f"confidence band of {REGRESSOR}", f"in each of {len(mine)} cells of function and n")
    return found


def _covers(ours: Sequence[Found], name: str, every: str) -> list[Check]:
    return [
        _everywhere(
            f"the {name} has a mean coverage of {LEAST:.0%} to {MOST:.0%} {every}",
            {found: (found.coverage, found.coverage_error) for found in ours},
            off_level,
            lambda value: f"{value:.2%}",
        ),
        _everywhere(
            f"the {name} covers {LEAST_AT_X:.0%} or more at every x inside the data {every}",
            {found: (found.worst[0], binomial_error(found.worst[0], found.sets)) for found in ours},
            lambda value: LEAST_AT_X - value,
            lambda value: f"{value:.1%}",
        ),
    ]


def _every(ours: Sequence[Found]) -> str:
    return f"in each of {len(ours)} cells of function, noise, width and n"


def _marks(every_cell: Sequence[Found], name: str) -> list[Check]:
    ours = in_the_mark(every_cell)
    every = _every(ours)
    return [
        *_covers(ours, name, every),
        _everywhere(
            f"the standard deviation of the {name} over x correlates by {LEAST_LIKENESS} or more with the true "
            f"bootstrap's {every}",
            {found: found.likeness for found in ours},
            lambda value: LEAST_LIKENESS - value,
            lambda value: f"{value:.2f}",
        ),
        _everywhere(
            f"the band of the {name} is at most {MOST_WIDTH} × as wide as the true bootstrap's at the same coverage "
            f"{every}",
            {found: found.relative_width for found in ours},
            lambda value: value - MOST_WIDTH,
            lambda value: f"{value:.2f}",
        ),
    ]


def _everywhere(
    claim: str,
    figures: Mapping[Found, tuple[float, float] | None],
    miss: Callable[[float], float],
    show: Callable[[float], str],
) -> Check:
    """Rule: in every cell where the figure (value, error) is known. Where it is missed, which and by how much."""
    known = {found: figure for found, figure in figures.items() if figure is not None}
    if not known:
        return Check(claim, None, f"not measured; not to be told in {len(figures)}")
    values = [value for value, _ in known.values()]
    missed = {found: value for found, (value, _) in known.items() if miss(value) > ROUNDING}
    said = f"{show(min(values))} to {show(max(values))}, mean {show(fmean(values))}"
    if missed:
        clearly = sum(miss(value) > 2 * error for value, error in known.values())
        where = "; ".join(f"{_short(found)} {show(value)}" for found, value in missed.items())
        said += f"; missed in {len(missed)}, by more than two standard errors in {clearly} of them: {where}"
    if len(known) < len(figures):
        said += f"; not to be told in {len(figures) - len(known)}"
    return Check(claim, not missed, said)


def _short(found: Found) -> str:
    row = found.rows[0]
    width = f", width {row['width']}" if "width" in row else ""
    return f"{row['function']}, {row['noise']} noise{width}, n = {row['n']}:"
