"""What class probabilities are worth on labelled rows: how often right, how sure, and where to keep quiet.

    error among the rows it answers ≤ error of all ≤ error among those it abstains from, of a rule that is worth having

Sums and counts are of all rows; figures of ranks (AUROC, AURC, adaptive bins) are of at most 500,000, drawn fairly.

The chapters of a classification: answers, calibration, abstaining, classes, rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from neuboots.app import ModelCard, PredictionTable
from neuboots.cli.evaluation import checks
from neuboots.cli.evaluation.checks import between, percent, short
from neuboots.cli.evaluation.sections import (
    BARS,
    UNUSUAL,
    Draw,
    LabeledBatch,
    ReservoirSample,
    RowCounts,
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
from neuboots.metrics import ConfidenceRanking, ProbabilityMetrics, RunningMean, auroc
from neuboots.metrics._base import flatten_probs
from neuboots.report.checks import Check, wilson_interval
from neuboots.report.section import Section
from neuboots.report.tables import Cell, Table

SCORES = ("entropy", "mutual_information", "std", "ood_score")  # larger where an answer is to be trusted less
PAIRS = 20  # of confused classes that are listed
LISTED = 100  # classes whose whole confusion matrix is
BINS = 15


@dataclass(frozen=True, eq=False)
class ClassTally(ProbabilityMetrics):
    """Sums over rows: those of classification, and of who abstains and who is unusual."""

    answered: RunningMean  # wrong, of the rows that are answered
    abstained: RunningMean  # wrong, of the others
    unusual: RunningMean

    @classmethod
    def of(cls, answers: PredictionTable, y: Tensor) -> Self:
        """Of the answers to N rows of classes y (N,)."""
        assert answers.probs is not None, "a classifier gives probabilities"
        p, truth = flatten_probs(answers.probs, y)
        wrong = p.argmax(1) != truth
        abstain, score = (torch.from_numpy(answers.columns[name]) for name in ("abstain", "ood_score"))
        return cls(
            **vars(ProbabilityMetrics.from_batch(p, truth, num_bins=BINS)),
            answered=RunningMean.from_batch(wrong[~abstain]),
            abstained=RunningMean.from_batch(wrong[abstain]),
            unusual=RunningMean.from_batch(score > 1),
        )


@dataclass(frozen=True, eq=False)
class ClassEvaluation:
    """What `measure_classes` found."""

    tally: ClassTally
    sample: dict[str, Tensor]
    names: tuple[str, ...]
    card: ModelCard
    seen: RowCounts

    @property
    def count(self) -> int:
        return self.tally.count

    @cached_property
    def ranking(self) -> ConfidenceRanking:
        """Rows by confidence, the surest first."""
        return ConfidenceRanking.from_confidence(self.sample["confidence"], ~self.sample["wrong"])

    @property
    def labels(self) -> Tensor:
        """Rows of each true class: (C,)."""
        return self.tally.confusion_matrix.sum(1)

    @property
    def constant(self) -> dict[str, float]:
        """What the commonest class of these rows gets, with the shares of the classes for probabilities."""
        shares = self.labels.double() / self.labels.sum()
        return {
            "error": 1 - float(shares.max()),
            "nll": float(-torch.xlogy(shares, shares).sum()),
            "brier": 1 - float(shares.square().sum()),
            "ece": 0.0,
            "macro_f1": float(2 * shares.max() / (1 + shares.max()) / (self.labels > 0).sum()),
        }

    @cached_property
    def finds(self) -> dict[str, float | None]:
        """How well each score tells wrong answers from right ones, by AUROC; None where there are none of one kind."""
        wrong = self.sample["wrong"]
        both = 0 < int(wrong.sum()) < len(wrong)
        return {name: float(auroc(self.sample[name], positive=wrong)) if both else None for name in SCORES}

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Every figure by name; None where there is nothing to find it from."""
        tally = self.tally
        occurs = tally.occurs
        held = self.labels > 0
        low, high = wilson_interval(float(tally.error), self.count)
        found: dict[str, Any] = {
            **{"error": float(tally.error), "error_low": low, "error_high": high, "accuracy": float(tally.accuracy)},
            **{name: float(getattr(tally, name)) for name in ("nll", "brier", "ece", "mce")},
            "adaptive_ece": float(self.ranking.compute_adaptive_ece(BINS)),
            "mean_confidence": float(tally.bin_confidence.sum()) / self.count,
            "macro_f1": float(tally.f1[occurs].mean()),
            "balanced_accuracy": float(tally.recall[held].mean()),
            "auroc": self._auroc(),
            "aurc": float(self.ranking.aurc),
            "answered": int(tally.answered.count) / self.count,
            "error_answered": _value(tally.answered),
            "error_abstained": _value(tally.abstained),
            "unusual": float(tally.unusual.value),
        }
        return found | {f"finds_errors_by_{name}": value for name, value in self.finds.items()}

    def _auroc(self) -> float | None:
        """Of the second of two classes."""
        if len(self.names) != 2 or int((self.labels > 0).sum()) < 2:
            return None
        return float(auroc(self.sample["second"], positive=self.sample["truth"] == 1))

    @property
    def classes(self) -> list[dict[str, Any]]:
        """A line for each class that occurs as a label or as a guess."""
        columns = [getattr(self.tally, name).tolist() for name in ("precision", "recall", "f1")]
        guesses = self.tally.confusion_matrix.sum(0).tolist()
        lines = zip(self.names, self.labels.tolist(), guesses, *columns, strict=True)
        heads = ("class", "rows", "guesses", "precision", "recall", "f1")
        return [dict(zip(heads, line, strict=True)) for line in lines if line[1] or line[2]]

    @property
    def confused(self) -> list[dict[str, Any]]:
        """Pairs of classes by how often the first is taken for the second, the commonest first."""
        matrix = self.tally.confusion_matrix.clone().fill_diagonal_(0)
        most = min(PAIRS, int((matrix > 0).sum()))
        places = matrix.flatten().argsort(descending=True, stable=True)[:most].tolist()
        return [
            {"class": self.names[t], "taken for": self.names[g], "rows": int(matrix[t, g]), "of": int(self.labels[t])}
            for t, g in (divmod(place, len(self.names)) for place in places)
        ]

    @property
    def details(self) -> dict[str, Any]:
        """What JSON has besides the figures."""
        curve = self.tally.reliability_curve
        heads = ("confidence", "accuracy", "count")
        bins = zip(*(getattr(curve, head).tolist() for head in heads), strict=True)
        return {
            "classes": self.classes,
            "confused": self.confused,
            "confusion": self.tally.confusion_matrix.tolist() if len(self.names) <= LISTED else None,
            "reliability": [dict(zip(heads, each, strict=True)) for each in bins if each[2]],
        }

    @property
    def checks(self) -> list[Check]:
        """The worst first."""
        return checks.worst_first([*self.of_answers, *self.of_calibration, *self.of_abstaining, *self.of_rows])

    @property
    def of_answers(self) -> list[Check]:
        figures, constant = self.figures, self.constant["error"]
        before = checks.no_worse_error(
            figures["error"], self.count, self.card.figures.get("error"), self.card.rows.get("test", 0)
        )
        said = f"{checks.percent(figures['error'])} wrong against {checks.percent(constant)} of the commonest class"
        better = checks.better_than_constant("error", figures["error_low"], figures["error_high"], said, constant)
        return [*([before] if before else []), better]

    @property
    def of_calibration(self) -> list[Check]:
        figures = self.figures
        return [checks.right_as_often_as_it_says(figures["mean_confidence"], figures["accuracy"], self.count)]

    @property
    def of_abstaining(self) -> list[Check]:
        wrong = int(self.sample["wrong"].sum())
        answered, abstained = ((_value(m) or 0.0, int(m.count)) for m in (self.tally.answered, self.tally.abstained))
        return [
            checks.abstains_well(answered, abstained),
            checks.finds_errors(self.finds["entropy"], wrong, len(self.sample["wrong"]) - wrong),
        ]

    @property
    def of_rows(self) -> list[Check]:
        return [checks.usual_rows(int(self.tally.unusual.total), self.count, self.card.rows.get("held out", 0))]


def measure_classes(
    parts: Iterable[LabeledBatch], names: tuple[str, ...], card: ModelCard, seen: RowCounts
) -> ClassEvaluation:
    """All figures of a stream of answers to labelled rows."""
    tally: ClassTally | int = 0
    sample = ReservoirSample()
    for part in parts:
        answers, y = part.answers, part.y.long().flatten()
        tally = tally + ClassTally.of(answers, y)
        assert answers.probs is not None, "a classifier gives probabilities"
        confidence, guess = answers.probs.max(1)
        scores = {name: torch.from_numpy(answers.columns[name]).float() for name in SCORES}
        second = {"second": answers.probs[:, 1].float(), "truth": y} if len(names) == 2 else {}
        sample.add(confidence=confidence.float(), wrong=guess != y, **scores, **second)
    assert isinstance(tally, ClassTally), "there is at least one labelled row"
    return ClassEvaluation(tally, sample.columns, names, card, seen)


def _value(mean: RunningMean) -> float | None:
    return float(mean.value) if int(mean.count) else None


CLASSES = 25  # whose confusion matrix can still be read


def classification_chapters(found: ClassEvaluation, *, figures: bool = True) -> list[Section]:
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
        "The model's own rule: answer, or abstain.", ("rows", "number", "share", "error"), tuple(lines), num_keys=1
    )


def finding(found: ClassEvaluation) -> Table:
    """How well each score finds the wrong answers."""
    lines = tuple((Cell(name.replace("_", " ")), cell(found.finds[name], short)) for name in SCORES)
    title = "Which score finds wrong answers? AUROC, wrong against right: 0.5 is chance, 1 is perfect."
    return Table(title, ("score", "AUROC"), lines, num_keys=1)


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
        num_keys=1,
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
    return Table("The commonest mistakes." if lines else "No class is taken for another.", heads, lines, num_keys=2)


def _bins(found: ClassEvaluation) -> Table:
    curve = found.tally.reliability_curve
    rows = zip(*(part.tolist() for part in (curve.confidence, curve.accuracy, curve.count)), strict=True)
    lines = tuple(
        (Cell(f"{k / len(curve.count):.2f} to {(k + 1) / len(curve.count):.2f}"), Cell(f"{count:,}", count),
         cell(confidence, percent), cell(right, percent))
        for k, (confidence, right, count) in enumerate(rows)
        if count
    )  # fmt: skip
    return Table("Rows by confidence.", ("confidence", "rows", "it says", "it is right in"), lines, num_keys=1)


def _class_drawings(found: ClassEvaluation) -> dict[str, Draw]:
    from neuboots.report import plots as figures

    sample, figure = found.sample, found.figures
    curve = thinned(found.ranking.risk_coverage_curve)
    drawn: dict[str, Draw] = {
        "reliability": lambda ax: figures.plot_reliability(ax, {"the model": found.tally.reliability_curve}),
        "risk-by-coverage": lambda ax: risk_drawing(ax, curve, figure["answered"], figure["error_answered"]),
    }
    if len(found.names) <= CLASSES:
        drawn["confusion"] = lambda ax: figures.plot_confusion(ax, found.names, found.tally.confusion_matrix)
    kinds = {"right": ~sample["wrong"][:BARS], "wrong": sample["wrong"][:BARS]}
    for title, name, label in (("entropy", "entropy", "entropy / nats"), ("unusual-rows", "ood_score", UNUSUAL)):
        groups = {kind: sample[name][:BARS][which] for kind, which in kinds.items() if bool(which.any())}
        drawn[title] = histograms(groups, label)
    return drawn
