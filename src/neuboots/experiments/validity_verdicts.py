"""Verdicts on the bands in the study of validity: whether the mark is met in every cell, and where it is not."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from neuboots.experiments.study import Rows
from neuboots.experiments.validity_curves import REGRESSOR, SIZED, WHOLE
from neuboots.experiments.validity_summary import IDEAL, Found, binomial_error, summaries
from neuboots.experiments.validity_tables import (
    LEAST,
    LEAST_AT_X,
    LEAST_LIKENESS,
    MOST,
    MOST_TRAININGS,
    MOST_WIDTH,
    ROUNDING,
    TITLES,
    bands_of,
    in_the_mark,
    judged,
    off_level,
    regressor_bands,
    trainings,
)
from neuboots.report.verdicts import Verdict


def band_verdicts(rows: Rows) -> list[Verdict]:
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
        found.append(Verdict(f"the {TITLES[method]} costs at most {MOST_TRAININGS} plain trainings", holds, shown))
    if mine := [each for each in regressor_bands(rows) if each.method == REGRESSOR]:
        found += _covers(mine, f"confidence band of {REGRESSOR}", f"in each of {len(mine)} cells of function and n")
    return found


def _covers(ours: Sequence[Found], name: str, every: str) -> list[Verdict]:
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


def _marks(every_cell: Sequence[Found], name: str) -> list[Verdict]:
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
) -> Verdict:
    """Rule: in every cell where the figure (value, error) is known. Where it is missed, which and by how much."""
    known = {found: figure for found, figure in figures.items() if figure is not None}
    if not known:
        return Verdict(claim, None, f"not measured; not to be told in {len(figures)}")
    values = [value for value, _ in known.values()]
    missed = {found: value for found, (value, _) in known.items() if miss(value) > ROUNDING}
    said = f"{show(min(values))} to {show(max(values))}, mean {show(fmean(values))}"
    if missed:
        clearly = sum(miss(value) > 2 * error for value, error in known.values())
        where = "; ".join(f"{_short(found)} {show(value)}" for found, value in missed.items())
        said += f"; missed in {len(missed)}, by more than two standard errors in {clearly} of them: {where}"
    if len(known) < len(figures):
        said += f"; not to be told in {len(figures) - len(known)}"
    return Verdict(claim, not missed, said)


def _short(found: Found) -> str:
    row = found.rows[0]
    width = f", width {row['width']}" if "width" in row else ""
    return f"{row['function']}, {row['noise']} noise{width}, n = {row['n']}:"
