"""A model's answers to labelled rows, chunk by chunk, and a fair sample of them.

    P(a row is in the sample) = min(1, most / N),   whatever N turns out to be

The rows with the least of numbers that the seed draws for each are kept: the same whatever the size of the chunks.

What the chapters of every evaluation are made with: tables of figures, diagrams, and the chapter on the rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from neuboots.app import Model, PredictionTable, RowBatch
from neuboots.cli.evaluation.checks import percent
from neuboots.evaluation.active_learning import row_uniforms
from neuboots.metrics import RiskCoverageCurve
from neuboots.report.checks import Check
from neuboots.report.section import Section
from neuboots.report.tables import MISSING, Cell, Table

MOST = 500_000  # rows that figures of ranks are found from: their error is then below 0.001
NOTES = 20  # sentences of a source that are passed on


@dataclass
class RowCounts:
    """What was met on the way: rows in all, rows without a label, and sentences for the user."""

    rows: int = 0
    unlabelled: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def counted(self) -> int:
        return self.rows - self.unlabelled

    def add(self, notes: Iterable[str]) -> None:
        """Each sentence once; a source may repeat itself from chunk to chunk."""
        self.notes += [each for each in dict.fromkeys(notes) if each not in self.notes]
        del self.notes[NOTES:]


@dataclass(frozen=True, eq=False)
class LabeledBatch:
    """Some rows: their chunk, which of them have a label (N,), the answers to those (n ≤ N), and the labels (n, …)."""

    chunk: RowBatch
    known: Tensor
    answers: PredictionTable
    y: Tensor


def iterate_labeled(
    model: Model, source: str | Path, seen: RowCounts, *, num_samples: int, level: float
) -> Iterator[LabeledBatch]:
    """The rows of a source that have a label, with their answers; the others are counted."""
    for chunk in model.read(source, with_labels=True):
        seen.add(chunk.notes)
        if chunk.y is None:
            raise ValueError(f"got rows of {source} without labels; expected a label for each row")
        known = has_label(chunk.y)
        seen.rows += len(chunk)
        seen.unlabelled += int((~known).sum())
        if bool(known.any()):
            answers = model.predict(chunk, num_samples=num_samples, level=level)
            yield LabeledBatch(chunk, known, select_rows(answers, known), chunk.y[known])
    if not seen.counted:
        rows = "row" if seen.rows == 1 else "rows"
        raise ValueError(
            f"got {source} with no label of {model.card.target!r} in any of its {seen.rows:,} {rows}; expected some"
        )


def has_label(y: Tensor) -> Tensor:
    """Where a label is there: a class is −1 and a number NaN where it is not: (N,) or (N, 1) → (N,).

    >>> has_label(torch.tensor([2, -1])).tolist(), has_label(torch.tensor([[0.5], [float("nan")]])).tolist()
    ([True, False], [True, False])
    """
    flat = y.reshape(len(y), -1)
    return ~flat.isnan().any(1) if y.is_floating_point() else (flat >= 0).all(1)


def select_rows(answers: PredictionTable, which: Tensor) -> PredictionTable:
    """The answers to these rows: (N,) of True and False."""
    if bool(which.all()):
        return answers
    mask = which.numpy()
    probs = None if answers.probs is None else answers.probs[which]
    return PredictionTable({name: column[mask] for name, column in answers.columns.items()}, probs)


class ReservoirSample:
    """At most `most` rows of a stream, each as likely as any other.

    >>> sample = ReservoirSample(3)
    >>> for start in (0, 5):
    ...     sample.add(number=torch.arange(start, start + 5))
    >>> len(sample.columns["number"]), sample.total
    (3, 10)
    """

    def __init__(self, most: int = MOST, *, seed: int = 0) -> None:
        self.most, self.seed, self.total = most, seed, 0
        self._keys = torch.zeros(0)
        self._held: dict[str, Tensor] = {}

    def add(self, **columns: Tensor) -> None:
        """Columns of N more rows, (N,) each."""
        count = len(next(iter(columns.values())))
        keys = row_uniforms(torch.arange(self.total, self.total + count), self.seed, "sample")
        self._keys = torch.cat([self._keys, keys]) if self.total else keys
        self._held = {
            name: torch.cat([self._held[name], column]) if self.total else column for name, column in columns.items()
        }
        self.total += count
        if len(self._keys) > 2 * self.most:
            self._choose()

    def _choose(self) -> None:
        """The rows with the least keys stay, in the order of their keys."""
        order = self._keys.argsort(stable=True)[: self.most]
        self._keys = self._keys[order]
        self._held = {name: column[order] for name, column in self._held.items()}

    @property
    def columns(self) -> dict[str, Tensor]:
        """In an order that has nothing to do with the file's, so that the first n are a fair sample too."""
        self._choose()
        return self._held


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
    def seen(self) -> RowCounts: ...
    @property
    def figures(self) -> Mapping[str, Any]: ...
    @property
    def of_rows(self) -> Sequence[Check]: ...


def chapter(
    name: str,
    question: str,
    *,
    tables: Sequence[Table] = (),
    checks: Sequence[Check] = (),
    drawings: Mapping[str, Draw] | None = None,
    note: str = "",
    size: tuple[float, float] = (5.0, 4.2),
) -> Section:
    """A chapter with a diagram for each drawing; None where no diagrams are wanted."""
    figures: dict[str, str] = {}
    for title, draw in (drawings or {}).items():
        from matplotlib.figure import Figure

        from neuboots.report.html import to_svg

        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        figures[title] = to_svg(figure, f"{name}-{title}")
    return Section(name, question, tables=tuple(tables), checks=tuple(checks), plots=figures, note=note)


def rows_chapter(found: Evaluated, drawn: Mapping[str, Draw]) -> Section:
    unusual = found.figures["unusual"]
    lines = [
        ("rows", f"{found.seen.rows:,}", float(found.seen.rows)),
        ("without a label, left out", f"{found.seen.unlabelled:,}", float(found.seen.unlabelled)),
        ("unusual, with a score above 1", percent(unusual), unusual),
    ]
    table = Table("The rows.", ("rows", "number"), tuple((Cell(a), Cell(b, c)) for a, b, c in lines), num_keys=1)
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
        num_keys=1,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def cell(value: Any, show: Callable[[float], str]) -> Cell:
    return Cell(show(value), value) if _is_number(value) else Cell(MISSING)


def counted(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def thinned(curve: RiskCoverageCurve) -> RiskCoverageCurve:
    """At most some hundred points of a curve, the last among them."""
    places = torch.linspace(0, len(curve.risk) - 1, min(CURVE, len(curve.risk))).round().long()
    return RiskCoverageCurve(*(part[places] for part in (curve.coverage, curve.risk, curve.threshold)))


def risk_drawing(ax: "Axes", curve: RiskCoverageCurve, answered: float, risk: float | None, *, label: str = "") -> None:
    """The curve, and where the model's own rule lies."""
    from neuboots.report import plots as figures

    figures.plot_risk_coverage(ax, {"the surest first": curve})
    if risk is not None:
        ax.plot([answered], [risk], "D", color=figures.ORANGE, ms=7, label="the model's own rule")
    else:
        ax.axvline(answered, color=figures.ORANGE, lw=2, ls="--", label="share that the model's own rule answers")
    if label:
        ax.set_ylabel(f"{label} among them")
    ax.legend(fontsize=9)


def histograms(groups: Mapping[str, Tensor], label: str) -> Draw:
    """From 0 to where all but a few of the rows end: a single one may lie very far out."""
    from neuboots.report import plots as figures

    top = float(torch.cat(list(groups.values())).double().quantile(0.995))
    return lambda ax: figures.plot_histograms(ax, groups, label=label, bottom=0.0, top=top if top > 0 else 1.0)
