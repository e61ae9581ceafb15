"""What class probabilities are worth on labelled rows: how often right, how sure, and where to keep quiet.

    error among the rows it answers ≤ error of all ≤ error among those it abstains from, of a rule that is worth having

Sums and counts are of all rows; figures of ranks (AUROC, AURC, adaptive bins) are of at most 500,000, drawn fairly.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from neuboots.commands.evaluation import checks
from neuboots.commands.evaluation.stream import Part, Sample, Seen
from neuboots.metrics import Mean, Ranking, Tally, auroc
from neuboots.metrics.calibration import Bins
from neuboots.metrics.checks import rows
from neuboots.metrics.classification import ClassFigures, tallied
from neuboots.metrics.confusion import Confusion
from neuboots.models import Answers, Card
from neuboots.report.verdicts import Verdict, wilson

SCORES = ("entropy", "mutual_information", "std", "ood_score")  # larger where an answer is to be trusted less
PAIRS = 20  # of confused classes that are listed
LISTED = 100  # classes whose whole confusion matrix is
BINS = 15


@dataclass(frozen=True, eq=False)
class ClassTally(ClassFigures, Tally):
    """Sums over rows: those of classification, and of who abstains and who is unusual."""

    wrong: Mean
    surprise: Mean
    distance: Mean
    bins: Bins
    confusion: Confusion
    answered: Mean  # wrong, of the rows that are answered
    abstained: Mean  # wrong, of the others
    unusual: Mean

    @classmethod
    def of(cls, answers: Answers, y: Tensor) -> Self:
        """Of the answers to N rows of classes y (N,)."""
        assert answers.probs is not None, "a classifier gives probabilities"
        p, truth = rows(answers.probs, y)
        wrong = p.argmax(1) != truth
        abstain, score = (torch.from_numpy(answers.columns[name]) for name in ("abstain", "ood_score"))
        return cls(
            *tallied(p, truth, BINS),
            answered=Mean.of(wrong[~abstain]),
            abstained=Mean.of(wrong[abstain]),
            unusual=Mean.of(score > 1),
        )


@dataclass(frozen=True, eq=False)
class ClassEvaluation:
    """What `measure_classes` found."""

    tally: ClassTally
    sample: dict[str, Tensor]
    names: tuple[str, ...]
    card: Card
    seen: Seen

    @property
    def count(self) -> int:
        return self.tally.count

    @cached_property
    def ranking(self) -> Ranking:
        """Rows by confidence, the surest first."""
        return Ranking.of(self.sample["confidence"], ~self.sample["wrong"])

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
        tally, bins = self.tally, self.tally.bins
        occurs = tally.confusion.occurs
        held = self.labels > 0
        low, high = wilson(float(tally.error), self.count)
        found: dict[str, Any] = {
            **{"error": float(tally.error), "error_low": low, "error_high": high, "accuracy": float(tally.accuracy)},
            **{name: float(getattr(tally, name)) for name in ("nll", "brier", "ece", "mce")},
            "adaptive_ece": float(self.ranking.adaptive_ece(BINS)),
            "mean_confidence": float(bins.confidence.sum()) / self.count,
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
    def checks(self) -> list[Verdict]:
        """The worst first."""
        return checks.worst_first([*self.of_answers, *self.of_calibration, *self.of_abstaining, *self.of_rows])

    @property
    def of_answers(self) -> list[Verdict]:
        figures, constant = self.figures, self.constant["error"]
        before = checks.no_worse_error(
            figures["error"], self.count, self.card.figures.get("error"), self.card.rows.get("test", 0)
        )
        said = f"{checks.percent(figures['error'])} wrong against {checks.percent(constant)} of the commonest class"
        better = checks.better_than_constant("error", figures["error_low"], figures["error_high"], said, constant)
        return [*([before] if before else []), better]

    @property
    def of_calibration(self) -> list[Verdict]:
        figures = self.figures
        return [checks.right_as_often_as_it_says(figures["mean_confidence"], figures["accuracy"], self.count)]

    @property
    def of_abstaining(self) -> list[Verdict]:
        wrong = int(self.sample["wrong"].sum())
        answered, abstained = ((_value(m) or 0.0, int(m.count)) for m in (self.tally.answered, self.tally.abstained))
        return [
            checks.abstains_well(answered, abstained),
            checks.finds_errors(self.finds["entropy"], wrong, len(self.sample["wrong"]) - wrong),
        ]

    @property
    def of_rows(self) -> list[Verdict]:
        return [checks.usual_rows(int(self.tally.unusual.total), self.count, self.card.rows.get("held out", 0))]


def measure_classes(parts: Iterable[Part], names: tuple[str, ...], card: Card, seen: Seen) -> ClassEvaluation:
    """All figures of a stream of answers to labelled rows."""
    tally: ClassTally | int = 0
    sample = Sample()
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


def _value(mean: Mean) -> float | None:
    return float(mean.value) if int(mean.count) else None
