"""What the chapters of every evaluation are made with: tables of figures, diagrams, and the chapter on the rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from neuboots.commands.evaluation.checks import percent
from neuboots.commands.evaluation.stream import Seen
from neuboots.metrics import RiskCoverage
from neuboots.report.chapters import Chapter
from neuboots.report.tables import MISSING, Cell, Table
from neuboots.report.verdicts import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BARS = 5_000  # rows of a histogram
UNUSUAL = "out-of-distribution score (above 1: unusual)"
CURVE = 400  # points of a curve

Draw = Callable[["Axes"], None]
Show = Callable[[float], str]


class Evaluated(Protocol):
    """What is known of the rows, whatever was predicted of them."""

    @property
    def seen(self) -> Seen: ...
    @property
    def figures(self) -> Mapping[str, Any]: ...
    @property
    def of_rows(self) -> Sequence[Verdict]: ...


def chapter(
    name: str,
    question: str,
    *,
    tables: Sequence[Table] = (),
    checks: Sequence[Verdict] = (),
    drawings: Mapping[str, Draw] | None = None,
    note: str = "",
    size: tuple[float, float] = (5.0, 4.2),
) -> Chapter:
    """A chapter with a diagram for each drawing; None where no diagrams are wanted."""
    figures: dict[str, str] = {}
    for title, draw in (drawings or {}).items():
        from matplotlib.figure import Figure

        from neuboots.report.svg import to_svg

        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        figures[title] = to_svg(figure, f"{name}-{title}")
    return Chapter(name, "", question, "", tuple(tables), tuple(checks), figures, {}, {}, note)


def rows_chapter(found: Evaluated, drawn: Mapping[str, Draw]) -> Chapter:
    unusual = found.figures["unusual"]
    lines = [
        ("rows", f"{found.seen.rows:,}", float(found.seen.rows)),
        ("without a label, left out", f"{found.seen.unlabelled:,}", float(found.seen.unlabelled)),
        ("unusual, with a score above 1", percent(unusual), unusual),
    ]
    table = Table("The rows.", ("rows", "number"), tuple((Cell(a), Cell(b, c)) for a, b, c in lines), keys=1)
    return chapter(
        "rows",
        "Are the rows like those it was trained on?",
        tables=[table],
        checks=found.of_rows,
        drawings={name: drawn[name] for name in ("unusual-rows",) if name in drawn},
        note=" ".join(found.seen.notes),
    )


def figures_table(
    title: str,
    shown: Sequence[tuple[str, str, Callable[[float], str]]],
    figures: Mapping[str, Any],
    constant: Mapping[str, Any],
    before: Mapping[str, Any],
    interval: Mapping[str, str],
) -> Table:
    """A line for each figure that there is; columns of which none is known are left out."""
    lines = [(name, key, show) for name, key, show in shown if figures[key] is not None]
    others = {
        head: values
        for head, values in (("constant guess", constant), ("at training", before))
        if any(_is_number(values.get(key)) for _, key, _ in lines)
    }
    return Table(
        title,
        ("figure", "here", *others),
        tuple(
            (
                Cell(name),
                Cell(show(figures[key]) + interval.get(key, ""), figures[key]),
                *(cell(values.get(key), show) for values in others.values()),
            )
            for name, key, show in lines
        ),
        keys=1,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def cell(value: Any, show: Callable[[float], str]) -> Cell:
    return Cell(show(value), value) if _is_number(value) else Cell(MISSING)


def counted(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def thinned(curve: RiskCoverage) -> RiskCoverage:
    """At most some hundred points of a curve, the last among them."""
    places = torch.linspace(0, len(curve.risk) - 1, min(CURVE, len(curve.risk))).round().long()
    return RiskCoverage(*(part[places] for part in (curve.coverage, curve.risk, curve.threshold)))


def risk_drawing(ax: "Axes", curve: RiskCoverage, answered: float, risk: float | None, *, label: str = "") -> None:
    """The curve, and where the model's own rule lies."""
    from neuboots.report import figures

    figures.draw_risk_coverage(ax, {"the surest first": curve})
    if risk is not None:
        ax.plot([answered], [risk], "D", color=figures.ORANGE, ms=7, label="the model's own rule")
    else:
        ax.axvline(answered, color=figures.ORANGE, lw=2, ls="--", label="share that the model's own rule answers")
    if label:
        ax.set_ylabel(f"{label} among them")
    ax.legend(fontsize=9)


def histograms(groups: Mapping[str, Tensor], label: str) -> Draw:
    """From 0 to where all but a few of the rows end: a single one may lie very far out."""
    from neuboots.report import figures

    top = float(torch.cat(list(groups.values())).double().quantile(0.995))
    return lambda ax: figures.draw_histograms(ax, groups, label=label, bottom=0.0, top=top if top > 0 else 1.0)
