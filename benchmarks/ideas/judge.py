"""How a band is judged, and the tables of the decision."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from benchmarks.ideas.generators import Band
from benchmarks.ideas.world import World

PAGE = Path(__file__).parents[2] / "docs" / "decisions" / "0010-generators-that-follow-the-data.md"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->"
LEVEL = 0.95

Row = dict[str, Any]


@dataclass(frozen=True)
class Idea:
    """What is tried; its price in plain trainings (None: one more than there are replicates of the true bootstrap);
    whether it is also measured with fewer rows and wider nets."""

    group: str
    name: str
    run: Callable[[World], Band]
    trainings: float | None = 1.0
    further: bool = False


def judged(world: World, band: Band) -> Row:
    """Coverage of the nominal 95 % band, its size and shape beside the true bootstrap's, and the error of the curve."""
    setting = world.setting
    inside = setting.inside
    errors = band.curve - setting.truth
    quantile = (1 + LEVEL) / 2
    factor = stats.norm.ppf(quantile) if band.replicates is None else stats.t.ppf(quantile, band.replicates - 1)
    covered = (errors.abs() <= factor * band.sd).float().mean(0)  # (G,)
    sampling = band.curve.std(0)
    true = world.true.std(0)
    relative = band.sd.mean(0) / sampling
    row = {
        "mean": covered[inside].mean(),
        "worst": covered[inside].min(),
        "worst_x": setting.grid[inside][covered[inside].argmin()],
        "ratio": relative[inside].mean(),
        "level": band.sd[:, inside].mean() / true[:, inside].mean(),
        "follows": 1.0 if torch.equal(band.sd, true) else follows(band.sd[:, inside], world.true[..., inside]),
        "rmse": errors[:, inside].square().mean().sqrt(),
    }
    if setting.function == "gap":
        row["in_gap"] = relative[~inside].mean()
    return {name: round(float(value), 4) for name, value in row.items()}


def follows(sd: Tensor, replicates: Tensor) -> float:
    """Correlation over x with the true bootstrap's sd, mean over data sets, as if its K replicates were many.

    The correlation between the halves of the replicates says how much of the true sd's shape is their noise (Spearman
    and Brown).
    """
    halves = correlation(replicates[::2].std(0), replicates[1::2].std(0)).mean()
    reliable = (2.0 * halves / (1.0 + halves)).clamp_min(1e-2)
    return float(correlation(sd, replicates.std(0)).mean() / reliable.sqrt())


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Of two (R, G), over the last axis; 0 where one does not vary."""
    a, b = (value - value.mean(-1, keepdim=True) for value in (a.double(), b.double()))
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp_min(1e-12)


# -- tables ----------------------------------------------------------------------------------------------

COLUMNS = [
    "idea",
    "settings",
    "price",
    "coverage",
    "worst x",
    "sd / sampling sd",
    "the same in the gap",
    "sd / bootstrap sd",
    "follows",
    "RMSE / plain",
]
HEADER = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]


def tables(rows: list[Row]) -> str:
    """A table for each n and width; the settings of each are averaged, with the least and the greatest in brackets."""
    lines = []
    for n, width in sorted({(row["n"], row["width"]) for row in rows}, key=lambda key: (key != (300, 64), key)):
        mine = [row for row in rows if (row["n"], row["width"]) == (n, width)]
        settings = sorted({(row["function"], row["noise"]) for row in mine})
        names = ", ".join(f"{function} {noise}" for function, noise in settings)
        lines += [f"**n = {n}, width {width}** ({names}; {mine[0]['sets']} data sets each)", "", *HEADER]
        plain = {_setting(row): row["rmse"] for row in mine if row["idea"] == "sampling sd"}
        for (group, name), found in itertools.groupby(mine, key=lambda row: (row["group"], row["idea"])):
            lines.append(_line(group, name, list(found), plain))
        lines.append("")
    return "\n".join(lines)


def _line(group: str, name: str, rows: list[Row], plain: dict[tuple[str, str], float]) -> str:
    cells = [_range([row["mean"] for row in rows], 3), _range([row["worst"] for row in rows], 2)]
    for key in ("ratio", "in_gap", "level", "follows"):
        cells.append(_range([row[key] for row in rows if key in row], 2))
    cells.append(_range([row["rmse"] / plain[_setting(row)] for row in rows], 2))
    return f"| {group}: {name} | {len(rows)} | {rows[0]['trainings']:g} | " + " | ".join(cells) + " |"


def _setting(row: Row) -> tuple[str, str]:
    return row["function"], row["noise"]


def _range(values: list[float], digits: int) -> str:
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else "–"
    mean = math.fsum(values) / len(values)
    return f"{mean:.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def page_with(text: str, rows: list[Row]) -> str:
    """The page with its tables made anew from the rows."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + tables(rows) + "\n" + END + after
