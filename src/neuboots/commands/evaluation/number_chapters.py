"""The chapters of a regression: answers, intervals, abstaining, rows."""

import torch

from neuboots.commands.evaluation.chapters import (
    BARS,
    UNUSUAL,
    Draw,
    Show,
    cell,
    chapter,
    counted,
    figures_table,
    histograms,
    risk_drawing,
    rows_chapter,
    thinned,
)
from neuboots.commands.evaluation.checks import between, percent, short
from neuboots.commands.evaluation.numbers import NumberEvaluation
from neuboots.metrics import CalibrationCurve
from neuboots.report.chapters import Chapter
from neuboots.report.tables import Cell, Table

DOTS = 1_000  # rows of a diagram that draws each


def regression_chapters(found: NumberEvaluation, *, figures: bool = True) -> list[Chapter]:
    """Of a regression."""
    drawn = _number_drawings(found) if figures else {}
    return [
        chapter(
            "answers",
            "How far off is it?",
            tables=[number_figures(found)],
            checks=found.of_answers,
            drawings={name: drawn[name] for name in ("predicted-against-true",) if name in drawn},
        ),
        chapter(
            "intervals",
            "Do its intervals hold the truth as often as they say, for the rows it is sure of as for the others?",
            tables=[levels(found), groups(found)],
            checks=found.of_intervals,
            drawings={name: drawn[name] for name in ("coverage-by-level", "where-the-truth-falls") if name in drawn},
        ),
        chapter(
            "abstaining",
            "Does it know when to keep quiet? Its rule abstains where an interval is too wide, and where a row is "
            "unusual.",
            tables=[number_abstaining(found)],
            checks=found.of_abstaining,
            drawings={name: drawn[name] for name in ("error-by-coverage", "error-by-spread") if name in drawn},
        ),
        rows_chapter(found, drawn),
    ]


def number_summary(found: NumberEvaluation) -> list[Table]:
    """For a terminal."""
    return [number_figures(found), levels(found), groups(found), number_abstaining(found)]


def number_figures(found: NumberEvaluation) -> Table:
    """The figures of all rows, beside those of a constant guess and of the test rows at training time."""
    figures = found.figures
    shown: list[tuple[str, str, Show]] = [
        ("RMSE", "rmse", short),
        ("mean absolute error", "mae", short),
        ("R²", "r2", short),
        ("bias", "bias", short),
        ("log loss, nats", "nll", short),
        ("CRPS", "crps", short),
        (f"coverage of {100 * found.level:g} %", "coverage", percent),
        ("mean width", "mean_width", short),
        ("interval score", "interval_score", short),
    ]
    interval = {"coverage": between(figures["coverage_low"], figures["coverage_high"])}
    before = found.card.figures
    if before.get("level", found.level) != found.level:  # those of other intervals say nothing here
        before = before | dict.fromkeys(("coverage", "mean_width", "interval_score"))
    title = f"{counted(found.count, 'row')}, in the units of {found.card.target}."
    return figures_table(title, shown, figures, found.constant, before, interval)


def levels(found: NumberEvaluation) -> Table:
    """Coverage and width by level."""
    lines = tuple(
        (
            Cell(f"{100 * line['level']:g} %", line["level"]),
            cell(line["coverage"], percent),
            Cell(between(line["low"], line["high"])[2:-1], line["low"]),
            cell(line["mean_width"], short),
        )
        for line in found.levels
    )
    rows = found.levels[0]["rows"]
    note = f"Of the first {rows:,} rows." if rows < found.count else ""
    heads = ("level", "coverage", "95 % interval", "mean width")
    return Table("Intervals at several levels.", heads, lines, note=note, keys=1)


def groups(found: NumberEvaluation) -> Table:
    """Rows by how sure it is of them."""
    lines = tuple(
        (
            Cell(f"{short(line['from'])} to {short(line['to'])}", line["from"]),
            Cell(f"{line['rows']:,}", line["rows"]),
            cell(line["rmse"], short),
            cell(line["coverage"], percent),
            Cell(between(line["low"], line["high"])[2:-1], line["low"]),
        )
        for line in found.groups
    )
    heads = ("standard deviation", "rows", "RMSE", "coverage", "95 % interval")
    return Table("Rows by their predicted standard deviation, the surest first.", heads, lines, keys=1)


def number_abstaining(found: NumberEvaluation) -> Table:
    """How many rows the rule answers, and how far off those are."""
    figures, lines = found.figures, []
    sides = (("answered", found.tally.answered), ("abstained", found.tally.abstained))
    for name, squares in sides:
        count = int(squares.count)
        title = name if name == "answered" else "abstained from"
        lines.append(
            (
                Cell(title),
                Cell(f"{count:,}", count),
                cell(count / found.count, percent),
                cell(figures[f"rmse_{name}"], short),
            )
        )
    return Table("The model's own rule: answer, or abstain.", ("rows", "number", "share", "RMSE"), tuple(lines), keys=1)


def _number_drawings(found: NumberEvaluation) -> dict[str, Draw]:
    from neuboots.report import figures

    dots = {name: column[:DOTS] for name, column in found.sample.items()}
    at = torch.tensor([line["level"] for line in found.levels], dtype=torch.float64)
    inside = torch.tensor([line["coverage"] for line in found.levels], dtype=torch.float64)
    curves = {
        "its intervals": CalibrationCurve(at, inside),
        "a normal law with its std": found.tally.normal.calibration_curve,
    }
    curve = thinned(found.risk_coverage)
    spread, error = ([line[name] for line in found.groups] for name in ("std", "rmse"))
    return {
        "predicted-against-true": lambda ax: figures.draw_predictions(
            ax, dots["y"], dots["mean"], dots["low"], dots["high"], name="the model", level=found.level
        ),
        "coverage-by-level": lambda ax: figures.draw_calibration_curve(ax, curves),
        "where-the-truth-falls": lambda ax: figures.draw_shares(
            ax, found.tally.pit, name="the model", label="place of the truth in N(prediction, std²)"
        ),
        "error-by-coverage": lambda ax: risk_drawing(
            ax, curve, found.figures["answered"], None, label="mean absolute error"
        ),
        "error-by-spread": lambda ax: figures.draw_spread_skill(ax, spread, error, name="the model, by groups"),
        "unusual-rows": histograms({"rows": found.sample["ood_score"][:BARS]}, UNUSUAL),
    }
