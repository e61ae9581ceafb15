"""Tables of the bands in the study of validity, and the mark that they are held to."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from neuboots.experiments.study import Rows
from neuboots.experiments.validity_curves import AROUND, FITTED, LEVEL, MORE, SIZED, TRUE, WHOLE
from neuboots.experiments.validity_summary import IDEAL, Found, binomial_error, summaries
from neuboots.report.tables import MISSING, Cell, Table

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
        keys=2,
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
        keys=4,
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
        keys=5,
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
        keys=len(heads),
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
            keys=4,
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
            keys=1,
        )
    ]


def trainings(rows: Rows) -> dict[tuple[str, int], float]:
    """What each method costs, by width: in plain trainings, that of the net it goes around among them."""
    return {
        (row["method"], row["width"]): row["seconds"] / row["plain"] + (row["method"] in AROUND)
        for row in rows.get("cost", [])
    }
