"""What studies of figures against a size share: as many steps at each size, small rows, lines, claims for every size.

epochs(n) = ⌈steps / ⌈n / batch⌉⌉
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from neuboots.experiments.study import Rows
from neuboots.report.verdicts import Verdict, all_of, compare

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]


def epochs_for(steps: int, n: int, batch_size: int) -> int:
    """The epochs that make at least so many steps: few points are gone through more often.

    >>> epochs_for(400, 100, 128), epochs_for(400, 3_000, 128)
    (400, 17)
    """
    return -(-steps // -(-n // batch_size))


def rounded(rows: Rows, digits: int = 6) -> Rows:
    """Rows that take little room: numbers to so many digits after the point."""
    return {
        name: [
            {key: round(each, digits) if isinstance(each, float) else each for key, each in row.items()}
            for row in table
        ]
        for name, table in rows.items()
    }


def everywhere(
    claim: str, rows: Sequence[Row], key: str, first: Row, second: Row, places: Sequence[Row], **options: Any
) -> Verdict:
    """Does the comparison hold at each of these places, such as {"n": 100}? `options` are those of `compare`."""
    return all_of(
        claim, [compare(claim, rows, key, {**first, **place}, {**second, **place}, **options) for place in places]
    )


def draw_lines(
    ax: "Axes",
    rows: Sequence[Row],
    x: str,
    key: str,
    *,
    xlabel: str,
    label: str,
    scale: float = 1.0,
    by: str = "method",
) -> None:
    """scale × key against x, on a logarithmic axis: a line for each method, the mean and its interval over seeds."""
    from neuboots.report.figures import draw_learning_curves

    sizes, seeds = (sorted({row[name] for row in rows}) for name in (x, "seed"))
    found = {(row[by], row["seed"], row[x]): scale * row[key] for row in rows}
    names = dict.fromkeys(row[by] for row in rows)
    curves = {
        name: (sizes, torch.tensor([[found[name, seed, size] for size in sizes] for seed in seeds])) for name in names
    }
    draw_learning_curves(ax, curves, label=label)
    ax.set_xscale("log")
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.minorticks_off()
    ax.set_xlabel(xlabel)
    if ax.get_ylim()[0] < 0:  # an interval over few seeds, of a figure that cannot be negative
        ax.set_ylim(bottom=0)
