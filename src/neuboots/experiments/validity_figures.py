"""Figures of the bands in the study of validity."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from neuboots.experiments.study import Rows
from neuboots.experiments.validity_curves import AROUND, FITTED, LEVEL, MORE, SIZED, TRUE
from neuboots.experiments.validity_summary import Found, summaries
from neuboots.experiments.validity_tables import bands_of, in_the_mark

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def band_figures(rows: Rows) -> "dict[str, Figure]":
    from matplotlib.figure import Figure

    from neuboots.report.figures import draw_coverage

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
            draw_coverage(ax, mine[0].x, curves, level=LEVEL, num_sets=mine[0].sets)
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

    from neuboots.report.figures import BLUE, ORANGE

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
