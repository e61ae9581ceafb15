"""Scores, the larger the surer, and a predictor that abstains where its score is too low."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from neuboots.prediction import Predictor, Summary
from neuboots.tasks.common import check_predictor, labels_for, targets_for
from neuboots.tasks.inputs import Inputs, answers_to

ScoreName = Literal["confidence", "entropy", "mutual_information", "std"]
Score = ScoreName | Callable[[Summary], Any]  # a function gives a tensor or an array, (N, *)

_SCORES: dict[str, Callable[[Summary], Tensor]] = {
    "confidence": lambda summary: summary.confidence,
    "entropy": lambda summary: -summary.entropy,
    "mutual_information": lambda summary: -summary.mutual_information,
    "std": lambda summary: -summary.std.mean(1),
}


def is_right(summary: Summary, y: Tensor, tolerance: float | None, void: int | None = None) -> tuple[Tensor, Tensor]:
    """Is the answer right, and does it count? (N, *) each."""
    if tolerance is None:
        labels = labels_for(summary.probs, y, void=void)
        counted = torch.ones_like(labels, dtype=torch.bool) if void is None else labels != void
        return summary.labels == labels, counted
    mean = summary.mean.double()
    target = targets_for(mean, y)
    if bool(target.isnan().any()):
        raise ValueError("got NaN targets; expected numbers: drop those rows")
    right = ((mean - target).abs() <= tolerance).all(1)
    return right, torch.ones_like(right)


def check_score(predictor: Any, score: Score, tolerance: float | None = None) -> None:
    check_predictor(predictor)
    if not callable(score) and score not in _SCORES:
        raise ValueError(f"got score={score!r}; expected one of {', '.join(_SCORES)}, or a function of a Summary")
    if tolerance is None:
        return
    if not (isinstance(tolerance, float | int) and tolerance >= 0):
        raise ValueError(f"got tolerance={tolerance!r}; expected a number ≥ 0, in the units of y")
    check_numbers(score, f"tolerance={tolerance}")


def check_numbers(score: Score, given: str) -> None:
    """Is this a score of numbers, and not of class probabilities?"""
    if not callable(score) and score != "std":
        raise ValueError(
            f"got {given} with score={score!r}; expected score='std' or a function of a Summary for a regression: the "
            "others are of class probabilities"
        )


def scores_of(summary: Summary, score: Score) -> Tensor:
    """(N, *), in float64."""
    given = score(summary) if callable(score) else _SCORES[score](summary)
    try:
        values = torch.as_tensor(given, dtype=torch.float64, device=summary.mean.device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"got scores of type {type(given).__name__}; expected a tensor of numbers, one for each input (and pixel)"
        ) from None
    shape = (summary.mean.shape[0], *summary.mean.shape[2:])
    if values.shape != shape:
        raise ValueError(f"got scores of shape {tuple(values.shape)}; expected {shape}, one for each input (and pixel)")
    if not bool(torch.isfinite(values).all()):
        raise ValueError("got scores that are NaN or infinite; expected finite numbers: check the net's outputs")
    return values


def name_of_score(score: Score) -> str:
    return getattr(score, "__name__", type(score).__name__) if callable(score) else score


def cut_at(scores: Tensor, place: int) -> float:
    """Between the score at `place` of a falling list and the next one, so that rounding moves no row across."""
    if place == len(scores) - 1:
        return -math.inf
    upper, lower = scores[place].item(), scores[place + 1].item()
    middle = lower + (upper - lower) / 2
    return middle if middle > lower else upper


class Answers(NamedTuple):
    """Answers to N inputs, and where to ask somebody else: abstain (N, *) is True where the score is too low."""

    labels: Tensor  # (N, *), or the mean (N, C, *) in regression
    abstain: Tensor  # (N, *)


@dataclass(frozen=True)
class Abstaining:
    """A predictor that abstains below a threshold; `abstaining` of what was found makes one.

    Made by hand, its score, B and seed are to be those that the threshold was found with.

    >>> from neuboots import PlainPredictor
    >>> careful = Abstaining(PlainPredictor(torch.nn.Identity()), 0.9, num_samples=1)
    >>> labels, abstain = careful.predict(torch.tensor([[5.0, 0.0], [0.0, 0.1]]), progress=False)
    >>> labels.tolist(), abstain.tolist()
    ([0, 1], [False, True])
    """

    predictor: Predictor
    threshold: float
    score: Score = "confidence"
    regression: bool = False  # answers are means, not labels
    num_samples: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        check_score(self.predictor, self.score)
        if self.regression:
            check_numbers(self.score, "regression=True")
        if not isinstance(self.threshold, float | int) or math.isnan(self.threshold):
            raise ValueError(f"got threshold {self.threshold!r}; expected a number, as threshold_for gives one")

    def predict(self, x: Inputs, *, batch_size: int = 256, progress: bool = True) -> Answers:
        """Labels (or means), and True where the answer should not be used: where score < threshold.

        Inputs are a tensor (a tuple or dict of them), a data set, or a loader.
        """
        parts = answers_to(self._answers, x, batch_size, title="answering", progress=progress)
        answers, abstain = zip(*parts, strict=True)
        return Answers(torch.cat(answers), torch.cat(abstain))

    def _answers(self, x: Any) -> Answers:
        summary = self.predictor.summarize(x, self.num_samples, seed=self.seed)
        abstain = scores_of(summary, self.score) < self.threshold
        return Answers(summary.mean if self.regression else summary.labels, abstain)
