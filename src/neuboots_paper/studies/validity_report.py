"""Tables, plots and checks of the confidence bands in the study `validity`, and the criteria that they must meet."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any

from neuboots.report.checks import Check
from neuboots.report.tables import MISSING, Cell, Table
from neuboots_paper.studies.validity_curves import (
    BOOTSTRAP,
    LEVEL,
    OTHERS,
    POST_HOC,
    REGRESSOR,
    SCALED,
    TRAINED,
    WHOLE,
)
from neuboots_paper.studies.validity_summary import (
    CELL,
    IDEAL,
    BandSummary,
    Estimate,
    binomial_error,
    summarize,
    summarize_regressor,
)
from neuboots_paper.study import Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIN_COVERAGE, MAX_COVERAGE = 0.93, 0.97  # mean over x
MIN_COVERAGE_AT_X = 0.88  # at each x inside the data
MIN_LIKENESS = 0.8  # correlation with the true bootstrap's standard deviation over x
MAX_WIDTH = 1.25  # times the true bootstrap's, at the same coverage
MAX_TRAININGS = 2
ROUNDING = 1e-9  # a mean of 0.93 may be 0.92999…
TITLES = {
    WHOLE: "influence bootstrap of the whole net",
    SCALED: "influence bootstrap of the whole net sized by a second training",
}
HARD_FUNCTION = "edge"  # reported, but not in the claims: nets cannot fit it
METHODS = (SCALED, *POST_HOC, *TRAINED, *OTHERS, BOOTSTRAP)

Cells = Mapping[tuple[Any, ...], Mapping[str, BandSummary]]
Columns = dict[str, Callable[[BandSummary], Cell]]


def select_bands(cells: Cells, method: str) -> list[BandSummary]:
    """Bands of a method in every cell."""
    return [methods[method] for methods in cells.values() if method in methods]


def without_hard(bands: Sequence[BandSummary]) -> list[BandSummary]:
    """The bands that the claims are about."""
    return [band for band in bands if band.function != HARD_FUNCTION]


def coverage_miss(coverage: float) -> float:
    """Distance of a mean coverage from the accepted range; negative inside."""
    return max(MIN_COVERAGE - coverage, coverage - MAX_COVERAGE)


def relative_costs(rows: Rows) -> dict[tuple[str, int], float]:
    """Cost of each method by width, in plain trainings; that of a post-hoc method includes the net's own."""
    return {
        (row["method"], row["width"]): row["seconds"] / row["plain"] + (row["method"] in POST_HOC)
        for row in rows.get("cost", [])
    }


# -- cells ---------------------------------------------------------------------------------------------


def _text(value: Any) -> Cell:
    return Cell(str(value), float(value)) if isinstance(value, int) else Cell(str(value))


def _number(value: float | None, digits: int = 2, error: float | None = None) -> Cell:
    if value is None:
        return Cell(MISSING)
    return Cell(
        f"{value:.{digits}f}" + ("" if error is None or error != error else f" ± {error:.{digits}f}"),  # NaN: no error
        value,
    )


def _estimate(estimate: Estimate | None) -> Cell:
    return Cell(MISSING) if estimate is None else _number(estimate[0], 2, estimate[1])


def _coverage(band: BandSummary) -> Cell:
    return _number(100 * band.coverage, 1, 100 * band.coverage_error)


def _worst(band: BandSummary) -> Cell:
    rate, x = band.worst
    return Cell(f"{100 * rate:.0f} ± {100 * binomial_error(rate, band.sets):.0f} at {_format_x(x)}", rate)


def _format_x(x: float) -> str:
    """
    >>> _format_x(-1.9), _format_x(-1e-9), _format_x(0.3)
    ('−1.9', '0.0', '+0.3')
    """
    return f"{round(x, 1) or 0.0:+.1f}".replace("-", "−").replace("+0.0", "0.0")


def _range(values: Sequence[float], digits: int = 2) -> Cell:
    """
    >>> _range([0.25, 0.5, 0.75]).text, _range([]).text
    ('0.25 to 0.75', '–')
    """
    if not values:
        return Cell(MISSING)
    return Cell(f"{min(values):.{digits}f} to {max(values):.{digits}f}", fmean(values))


def _keys(*names: str) -> Columns:
    return {name: lambda band, name=name: _text(band.rows[0][name]) for name in names}  # type: ignore[misc]


_COVERAGE: Columns = {
    "data sets": lambda band: _text(band.sets),
    "coverage, %": _coverage,
    "at the worst x, %": _worst,
}
_STD: Columns = {"std of the band": lambda band: _number(band.std, 3)}
_CURVE: Columns = {
    "std of the curve": lambda band: _number(band.mean_curve_std, 3),
    "bias / std": lambda band: _number(band.bias),
}


def _make_table(title: str, bands: Sequence[BandSummary], columns: Columns, note: str, num_keys: int) -> Table:
    """A table with one row for each band."""
    rows = tuple(tuple(column(band) for column in columns.values()) for band in bands)
    return Table(title, tuple(columns), rows, note=note, num_keys=num_keys)


# -- tables --------------------------------------------------------------------------------------------


def band_tables(rows: Rows) -> list[Table]:
    """All tables of the bands."""
    cells, costs = summarize(rows), relative_costs(rows)
    measured = [methods for methods in cells.values() if any(method in methods for method in TRAINED)]
    compared = [methods[method] for methods in measured for method in METHODS if method in methods]
    return [
        _overview_table(cells, costs),
        _criteria_table(cells, SCALED, "two trainings"),
        _criteria_table(cells, WHOLE, "one training"),
        _methods_table(compared, costs),
        *(_coverage_table(select_bands(cells, method), f"the {TITLES[method]}") for method in (SCALED, WHOLE)),
        _coverage_table(compared, "every method in the cells where all were measured", _keys("method")),
        *_regressor_tables(rows),
        *_cost_tables(costs),
    ]


def _judged_bands(cells: Cells) -> dict[str, list[BandSummary]]:
    """The bands that must meet the criteria, and the ideal one."""
    whole, scaled = (select_bands(cells, method) for method in (WHOLE, SCALED))
    return {WHOLE: whole, SCALED: scaled, IDEAL: [band.ideal for band in whole or scaled]}


def _overview_table(cells: Cells, costs: Mapping[tuple[str, int], float]) -> Table:
    """One row for each method and width, with ranges over functions, noises and n."""
    columns = (
        *("method", "width", "cells", "coverage, %", "at the worst x, %", "cells that miss either"),
        *("likeness", "relative width", "true bootstrap's coverage, %", "cost in trainings"),
    )
    rows = []
    for method, all_bands in _judged_bands(cells).items():
        for width in sorted({band.cell[2] for band in without_hard(all_bands)}):
            bands = [band for band in without_hard(all_bands) if band.cell[2] == width]
            true = [cells[band.cell][BOOTSTRAP].coverage for band in bands if BOOTSTRAP in cells[band.cell]]
            likeness = [band.max_likeness if method == IDEAL else band.likeness for band in bands]
            missed = [b for b in bands if max(coverage_miss(b.coverage), MIN_COVERAGE_AT_X - b.worst[0]) > ROUNDING]
            rows.append(
                (
                    *map(_text, (method, width, len(bands))),
                    _range([100 * band.coverage for band in bands], 1),
                    _range([100 * band.worst[0] for band in bands], 1),
                    _text(len(missed)),
                    _range([estimate[0] for estimate in likeness if estimate]),
                    _range([band.relative_width[0] for band in bands if band.relative_width]),
                    _range([100 * coverage for coverage in true], 0),
                    _number(costs.get((method, width))),
                )
            )
    return Table(
        f"Overview: the {LEVEL:.0%} band of the influence bootstrap, minimum to maximum over all cells.",
        columns,
        tuple(rows),
        note=(
            f"Criteria: a mean coverage of {MIN_COVERAGE:.0%} to {MAX_COVERAGE:.0%}, at least {MIN_COVERAGE_AT_X:.0%} "
            f"at every x inside the data, a likeness of at least {MIN_LIKENESS}, a relative width of at most "
            f"{MAX_WIDTH}, a cost of at most {MAX_TRAININGS}. The columns are explained below. The ideal band, which "
            "cannot be computed from a single data set, is the fitted curve ± 1.96 times its own standard deviation "
            "over data sets. Its coverage is computed from the bias of the curve for a Gaussian error, and so has no "
            "sampling noise, which lowers the minimum of many measured rates. Its likeness is the maximum of any band "
            "that is the same for all data sets of a cell: where it is low, the true bootstrap's spread over x is "
            "mostly specific to the data set, and a band may have the right size at every x and still be unlike it."
        ),
        num_keys=2,
    )


def _criteria_table(cells: Cells, method: str, price: str) -> Table:
    def true(value: Callable[[BandSummary], Cell]) -> Callable[[BandSummary], Cell]:
        """A column of the true bootstrap in the same cell."""
        return lambda band: value(cells[band.cell][BOOTSTRAP]) if BOOTSTRAP in cells[band.cell] else Cell(MISSING)

    columns: Columns = {
        **_keys(*CELL),
        **_COVERAGE,
        "in the gap, %": lambda band: _number(None if band.gap_coverage is None else 100 * band.gap_coverage, 0),
        **_STD,
        **_CURVE,
        "ideal at the worst x, %": lambda band: _number(100 * band.ideal.worst[0], 0),
        "likeness": lambda band: _estimate(band.likeness),
        "most if the same for all sets": lambda band: _estimate(band.max_likeness),
        "relative width": lambda band: _estimate(band.relative_width),
        "true bootstrap: nets × sets": true(lambda band: Cell(f"{band.rows[0]['members']} × {band.sets}")),
        "true bootstrap's coverage, %": true(lambda band: _number(100 * band.coverage, 1)),
        "true bootstrap's std": true(lambda band: _number(band.std, 3)),
    }
    note = (
        "Coverage is the mean over x inside the data ± its standard error over jobs; at the worst x ± the binomial "
        "error. The std of the curve is that of the fitted curve over data sets; bias / std is the maximum over x "
        "inside the data, and the ideal band is that of the std of the curve, which this bias alone makes miss more "
        "often than it should. Likeness is the correlation over x, data set by data set, of the band's standard "
        "deviation with that of a true random-weight bootstrap, corrected for the noise of its few nets (where its "
        "spread hardly varies with x the correction is large, and may exceed 1); beside it the maximum of a band that "
        "is the same for all data sets, as the ideal one is. Relative width is against the true bootstrap's band "
        "scaled to the same coverage, as if it had very many nets; its own coverage is with Student's quantile. "
        "Errors of these are jackknife errors over data sets: sometimes the training of a wide net diverges, and a "
        "data set where this happened to one of the true nets counts for several."
    )
    title = f"The {LEVEL:.0%} band of the {TITLES[method]} ({price}, and a pass over the data)."
    return _make_table(title, select_bands(cells, method), columns, note, len(CELL))


def _methods_table(bands: Sequence[BandSummary], costs: Mapping[tuple[str, int], float]) -> Table:
    def compared(value: Callable[[BandSummary], Estimate | None]) -> Callable[[BandSummary], Cell]:
        return lambda band: Cell(MISSING) if band.method == BOOTSTRAP else _estimate(value(band))

    def cost(band: BandSummary) -> Cell:
        if band.method == BOOTSTRAP:
            return _text(band.rows[0]["members"])
        return _number(costs.get((band.method, band.cell[2])))

    columns: Columns = {
        **_keys(*CELL, "method"),
        **_COVERAGE,
        **_STD,
        "likeness": compared(lambda band: band.likeness),
        "relative width": compared(lambda band: band.relative_width),
        "cost in trainings": cost,
    }
    note = (
        "Cost: seconds of fitting and of predicting on the grid, over those of one plain training of the same net; "
        "for post-hoc methods, that training included. The error of the true bootstrap's coverage is as if a band "
        "missed at all x or at none. MC dropout has a rate of 0.1."
    )
    return _make_table("Every method in the cells where all were measured.", bands, columns, note, 5)


def _coverage_table(bands: Sequence[BandSummary], title: str, keys: Columns | None = None) -> Table:
    """Coverage at every second x."""
    keys = {**_keys(*CELL), **(keys or {})}

    def at(k: int) -> Callable[[BandSummary], Cell]:
        return lambda band: _number(100 * float(band.rate[k]), 0, 100 * binomial_error(float(band.rate[k]), band.sets))

    places = range(0, len(bands[0].x), 2) if bands else range(0)
    columns = keys | {f"x = {_format_x(float(bands[0].x[k]))}": at(k) for k in places}
    note = "In the gap, between −0.5 and 0.5, there are no data."
    return _make_table(f"Coverage in % at each x ± its binomial error: {title}.", bands, columns, note, len(keys))


def _regressor_tables(rows: Rows) -> list[Table]:
    bands = summarize_regressor(rows)
    if not bands:
        return []
    columns = {
        **_keys("function", "noise", "n"),
        "band": lambda band: _text(band.method),
        **_COVERAGE,
        **_STD,
        **_CURVE,
    }
    title = f"The {LEVEL:.0%} confidence band of the estimator with its defaults, one training."
    note = (
        "It standardizes, holds rows out, stops early and has a Gaussian head; its band is the influence bootstrap of "
        "the whole net with a correction for the early stop."
    )
    return [_make_table(title, bands, columns, note, 4)]


def _cost_tables(costs: Mapping[tuple[str, int], float]) -> list[Table]:
    if not costs:
        return []
    widths = sorted({width for _, width in costs})
    rows = [(_text(method), *(_number(costs.get((method, w)), 3) for w in widths)) for method in METHODS[:-1]]
    note = (
        "n = 300; minimum of three runs (with two trainings: fifteen), including the prediction on the grid, over the "
        "minimum of plain trainings that alternate with them. Post-hoc methods include 1 for the training of the net."
    )
    title = "Cost of each method, in plain trainings of the same net."
    return [Table(title, ("method", *(f"3 × {width}" for width in widths)), tuple(rows), note=note, num_keys=1)]


# -- plots ---------------------------------------------------------------------------------------------


def band_plots(rows: Rows) -> "dict[str, Figure]":
    """Coverage over x of the scaled influence bootstrap, and coverage of every method."""
    from matplotlib.figure import Figure

    from neuboots.report.plots import plot_coverage

    cells = summarize(rows)
    bands = without_hard(select_bands(cells, SCALED))
    cases = list(dict.fromkeys((band.function, band.cell[1]) for band in bands))
    widths = sorted({band.cell[2] for band in bands})
    figure = Figure(figsize=(4.2 * len(cases), 3.9 * len(widths)), layout="constrained")
    panels = figure.subplots(len(widths), len(cases), squeeze=False, sharex=True, sharey=True).flat
    legend: dict[str, Any] = {}  # one for all panels
    for ax, (width, (function, noise)) in zip(panels, product(widths, cases), strict=True):
        mine = [band for band in bands if band.cell[:3] == (function, noise, width)]
        mine.sort(key=lambda band: int(band.cell[3]))
        if mine:
            curves = {f"n = {band.cell[3]}": band.rate for band in mine}
            plot_coverage(ax, mine[0].x, curves, level=LEVEL, num_sets=mine[0].sets)
            handles, labels = ax.get_legend_handles_labels()
            ax.get_legend().remove()
            legend |= {label.split(" (mean")[0]: handle for handle, label in zip(handles, labels, strict=True)}
        ax.set_title(f"{function}, {noise} noise, width {width}" + ("" if mine else ": not measured"))
        ax.set_ylim(min([0.5, *(float(band.rate.min()) for band in bands)]) - 0.02, 1.01)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=len(legend) or 1)
    compared = {cell: methods for cell, methods in cells.items() if any(method in methods for method in TRAINED)}
    return {"coverage": figure, "methods": _plot_methods(list(compared.items()))}


def _plot_methods(cells: Sequence[tuple[tuple[Any, ...], Mapping[str, BandSummary]]]) -> "Figure":
    """Mean coverage and coverage at the worst x of every method, one panel for each cell."""
    from matplotlib.figure import Figure

    from neuboots.report.plots import BLUE, ORANGE

    names = [name for name in METHODS if any(name in methods for _, methods in cells)]
    size = (4.5 + 2.4 * max(1, len(cells)), 1.5 + 0.3 * len(names))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, max(1, len(cells)), squeeze=False, sharey=True)[0]
    for ax, ((function, noise, width, n), methods) in zip(panels, cells, strict=False):
        for k, name in enumerate(names):
            if name in methods:
                ax.plot(methods[name].coverage, k, "o", color=BLUE, label="mean over x" if not k else None)
                ax.plot(methods[name].worst[0], k, "x", color=ORANGE, label="at the worst x" if not k else None)
        ax.axvline(LEVEL, color="black", lw=1, ls=":")
        ax.set(xlim=(-0.03, 1.03), xlabel="fraction of data sets covered")
        ax.set_title(f"{function}, {noise} noise\nwidth {width}, n = {n}", fontsize=10)
        ax.grid(axis="y", alpha=0.3)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    if cells:
        panels[0].legend(loc="lower left", fontsize=8)
    return figure


# -- checks --------------------------------------------------------------------------------------------


def band_checks(rows: Rows) -> list[Check]:
    """Whether the criteria are met in every cell, and where they are not."""
    cells, costs = summarize(rows), relative_costs(rows)
    checks = [
        check for method in (SCALED, WHOLE) for check in _check_criteria(select_bands(cells, method), TITLES[method])
    ]
    ideal = without_hard(_judged_bands(cells)[IDEAL])
    checks.append(
        _check_everywhere(
            f"a band that is the same for all data sets, as the ideal one is, can correlate over x by {MIN_LIKENESS} "
            f"or more with the true bootstrap's {_in_each(ideal)}",
            {band: band.max_likeness for band in ideal},
            lambda value: MIN_LIKENESS - value,
            ".2f",
        )
    )
    for method in (SCALED, WHOLE):
        mine = {width: cost for (name, width), cost in costs.items() if name == method}
        evidence = ", ".join(f"{cost:.2f} at width {width}" for width, cost in mine.items())
        holds = max(mine.values()) <= MAX_TRAININGS if mine else None
        checks.append(Check(f"the {TITLES[method]} costs at most {MAX_TRAININGS} plain trainings", holds, evidence))
    if bands := [band for band in summarize_regressor(rows) if band.method == REGRESSOR]:
        cells_text = f"in each of {len(bands)} cells of function and n"
        checks += _check_coverage(bands, f"confidence band of {REGRESSOR}", cells_text)
    return checks


def _in_each(bands: Sequence[BandSummary]) -> str:
    return f"in each of {len(bands)} cells of function, noise, width and n"


def _check_coverage(bands: Sequence[BandSummary], name: str, cells_text: str) -> list[Check]:
    return [
        _check_everywhere(
            f"the {name} has a mean coverage of {MIN_COVERAGE:.0%} to {MAX_COVERAGE:.0%} {cells_text}",
            {band: (band.coverage, band.coverage_error) for band in bands},
            coverage_miss,
            ".2%",
        ),
        _check_everywhere(
            f"the {name} covers {MIN_COVERAGE_AT_X:.0%} or more at every x inside the data {cells_text}",
            {band: (band.worst[0], binomial_error(band.worst[0], band.sets)) for band in bands},
            lambda value: MIN_COVERAGE_AT_X - value,
            ".1%",
        ),
    ]


def _check_criteria(all_bands: Sequence[BandSummary], name: str) -> list[Check]:
    bands = without_hard(all_bands)
    cells_text = _in_each(bands)
    return [
        *_check_coverage(bands, name, cells_text),
        _check_everywhere(
            f"the standard deviation of the {name} over x correlates by {MIN_LIKENESS} or more with the true "
            f"bootstrap's {cells_text}",
            {band: band.likeness for band in bands},
            lambda value: MIN_LIKENESS - value,
            ".2f",
        ),
        _check_everywhere(
            f"the band of the {name} is at most {MAX_WIDTH} × as wide as the true bootstrap's at the same coverage "
            f"{cells_text}",
            {band: band.relative_width for band in bands},
            lambda value: value - MAX_WIDTH,
            ".2f",
        ),
    ]


def _check_everywhere(
    claim: str, estimates: Mapping[BandSummary, Estimate | None], miss: Callable[[float], float], form: str
) -> Check:
    """Check that every known estimate meets a criterion; the evidence lists the cells that miss it."""
    known = {band: estimate for band, estimate in estimates.items() if estimate is not None}
    unknown = len(estimates) - len(known)
    if not known:
        return Check(claim, None, f"not measured; undetermined in {unknown}")
    values = [value for value, _ in known.values()]
    missed = {band: value for band, (value, _) in known.items() if miss(value) > ROUNDING}
    evidence = f"{min(values):{form}} to {max(values):{form}}, mean {fmean(values):{form}}"
    if missed:
        clearly = sum(miss(value) > 2 * error for value, error in known.values())
        where = "; ".join(f"{_describe_cell(band)} {value:{form}}" for band, value in missed.items())
        evidence += f"; missed in {len(missed)}, by more than two standard errors in {clearly} of them: {where}"
    if unknown:
        evidence += f"; undetermined in {unknown}"
    return Check(claim, not missed, evidence)


def _describe_cell(band: BandSummary) -> str:
    row = band.rows[0]
    width = f", width {row['width']}" if "width" in row else ""
    return f"{row['function']}, {row['noise']} noise{width}, n = {row['n']}:"
