"""The chapters of a classification: answers, calibration, abstaining, classes, rows."""

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
from neuboots.commands.evaluation.classes import SCORES, ClassEvaluation
from neuboots.report.chapters import Chapter
from neuboots.report.tables import Cell, Table

CLASSES = 25  # whose confusion matrix can still be read


def classification_chapters(found: ClassEvaluation, *, figures: bool = True) -> list[Chapter]:
    """Of a classification."""
    drawn = _class_drawings(found) if figures else {}
    size = min(9.0, 2.2 + 0.55 * len(found.names))
    return [
        chapter(
            "answers",
            "How often is it right?",
            tables=[class_figures(found)],
            checks=found.of_answers,
            drawings={name: drawn[name] for name in ("confusion",) if name in drawn},
            size=(max(4.6, size), max(4.0, size)),
        ),
        chapter(
            "calibration",
            "Is it right as often as it says? Of the rows with a confidence of about 80 %, are 80 % right?",
            tables=[_bins(found)],
            checks=found.of_calibration,
            drawings={name: drawn[name] for name in ("reliability",) if name in drawn},
        ),
        chapter(
            "abstaining",
            "Does it know when to keep quiet? Its rule abstains where it is unsure, and where a row is unusual.",
            tables=[abstaining(found), finding(found)],
            checks=found.of_abstaining,
            drawings={name: drawn[name] for name in ("risk-by-coverage", "entropy") if name in drawn},
        ),
        chapter(
            "classes", "Which classes are hard, and what are they taken for?", tables=[classes(found), pairs(found)]
        ),
        rows_chapter(found, drawn),
    ]


def class_summary(found: ClassEvaluation) -> list[Table]:
    """For a terminal: of many classes the worst alone."""
    tables = [class_figures(found), abstaining(found), finding(found), classes(found, 10)]
    return [*tables, pairs(found, 5)] if len(found.names) > 2 and found.confused else tables


def class_figures(found: ClassEvaluation) -> Table:
    """The figures of all rows, beside those of a constant guess and of the test rows at training time."""
    figures = found.figures
    shown: list[tuple[str, str, Show]] = [
        ("error", "error", percent),
        ("log loss, nats", "nll", short),
        ("Brier score", "brier", short),
        ("calibration error, ECE", "ece", percent),
        ("ECE, equal bins", "adaptive_ece", percent),
        ("macro F1", "macro_f1", percent),
        ("balanced accuracy", "balanced_accuracy", percent),
        ("AUROC", "auroc", short),
        ("AURC", "aurc", percent),
    ]
    interval = {"error": between(figures["error_low"], figures["error_high"])}
    title = f"{counted(found.count, 'row')}, {len(found.names)} classes."
    return figures_table(title, shown, figures, found.constant, found.card.figures, interval)


def abstaining(found: ClassEvaluation) -> Table:
    """How many rows the rule answers, and how many of those are wrong."""
    lines = []
    for name, mean in (("answered", found.tally.answered), ("abstained from", found.tally.abstained)):
        count = int(mean.count)
        lines.append(
            (
                Cell(name),
                Cell(f"{count:,}", count),
                cell(count / found.count, percent),
                cell(float(mean.value) if count else None, percent),
            )
        )
    return Table(
        "The model's own rule: answer, or abstain.", ("rows", "number", "share", "error"), tuple(lines), keys=1
    )


def finding(found: ClassEvaluation) -> Table:
    """How well each score finds the wrong answers."""
    lines = tuple((Cell(name.replace("_", " ")), cell(found.finds[name], short)) for name in SCORES)
    title = "Which score finds wrong answers? AUROC, wrong against right: 0.5 is chance, 1 is perfect."
    return Table(title, ("score", "AUROC"), lines, keys=1)


def classes(found: ClassEvaluation, most: int | None = None) -> Table:
    """Precision, recall and F1 of each class, or of the `most` with the lowest F1."""
    lines = sorted(found.classes, key=lambda line: line["f1"]) if most else found.classes
    some = lines[:most]
    title = "Each class." if len(some) == len(lines) else f"The {len(some)} of {len(lines)} classes with the lowest F1."
    heads = ("class", "rows", "guesses", "precision", "recall", "F1")
    return Table(
        title,
        heads,
        tuple(
            (
                Cell(line["class"]),
                *(Cell(f"{line[name]:,}", line[name]) for name in ("rows", "guesses")),
                *(cell(line[name], percent) for name in ("precision", "recall", "f1")),
            )
            for line in some
        ),
        keys=1,
    )


def pairs(found: ClassEvaluation, most: int | None = None) -> Table:
    """Which class is taken for which, the commonest mistakes first."""
    heads = ("class", "taken for", "rows", "of its rows")
    lines = tuple(
        (
            Cell(line["class"]),
            Cell(line["taken for"]),
            Cell(f"{line['rows']:,}", line["rows"]),
            cell(line["rows"] / line["of"], percent),
        )
        for line in found.confused[:most]
    )
    return Table("The commonest mistakes." if lines else "No class is taken for another.", heads, lines, keys=2)


def _bins(found: ClassEvaluation) -> Table:
    curve = found.tally.reliability_curve
    rows = zip(*(part.tolist() for part in (curve.confidence, curve.accuracy, curve.count)), strict=True)
    lines = tuple(
        (Cell(f"{k / len(curve.count):.2f} to {(k + 1) / len(curve.count):.2f}"), Cell(f"{count:,}", count),
         cell(confidence, percent), cell(right, percent))
        for k, (confidence, right, count) in enumerate(rows)
        if count
    )  # fmt: skip
    return Table("Rows by confidence.", ("confidence", "rows", "it says", "it is right in"), lines, keys=1)


def _class_drawings(found: ClassEvaluation) -> dict[str, Draw]:
    from neuboots.report import figures

    sample, figure = found.sample, found.figures
    curve = thinned(found.ranking.risk_coverage)
    drawn: dict[str, Draw] = {
        "reliability": lambda ax: figures.draw_reliability(ax, {"the model": found.tally.reliability_curve}),
        "risk-by-coverage": lambda ax: risk_drawing(ax, curve, figure["answered"], figure["error_answered"]),
    }
    if len(found.names) <= CLASSES:
        drawn["confusion"] = lambda ax: figures.draw_confusion(ax, found.names, found.tally.confusion_matrix)
    kinds = {"right": ~sample["wrong"][:BARS], "wrong": sample["wrong"][:BARS]}
    for title, name, label in (("entropy", "entropy", "entropy / nats"), ("unusual-rows", "ood_score", UNUSUAL)):
        groups = {kind: sample[name][:BARS][which] for kind, which in kinds.items() if bool(which.any())}
        drawn[title] = histograms(groups, label)
    return drawn
