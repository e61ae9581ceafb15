"""How good are the probabilities p of C classes, given the true labels y?

    error = mean 1[argmax p ≠ y],   NLL = mean −log p_y,   Brier = mean Σ_c (p_c − 1[y = c])²

Everywhere `probs` is (N, C, *), rows of probabilities along the class axis, and `labels` the whole
numbers (N, *) in 0 … C − 1; pixels count as inputs of their own. Sums run in float64.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neuboots.metrics.calibration import Bins, ReliabilityCurve
from neuboots.metrics.checks import logit_rows, rows
from neuboots.metrics.confusion import Confusion
from neuboots.metrics.ranking import Ranking, RiskCoverage
from neuboots.metrics.tally import Mean, Tally


def error(probs: Tensor, labels: Tensor) -> Tensor:
    """mean of 1[argmax p ≠ y], a tie going to the first class.

    >>> error(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
    tensor(0.5000, dtype=torch.float64)
    """
    return Mean.of(_wrong(*rows(probs, labels))).value


def accuracy(probs: Tensor, labels: Tensor) -> Tensor:
    """mean of 1[argmax p = y] = 1 − error.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
    tensor(0.5000, dtype=torch.float64)
    """
    return 1 - error(probs, labels)


def nll(probs: Tensor, labels: Tensor) -> Tensor:
    """mean of −log p_y, in nats; p is the predictive (mean) probability.

    A probability below the smallest normal number of its dtype (`torch.finfo(dtype).tiny`, zero
    included) counts as that number, so a certain mistake costs 87.3 nats in float32, not infinity.

    >>> nll(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    tensor(0.6931, dtype=torch.float64)
    """
    return Mean.of(_surprise(*rows(probs, labels))).value


def brier(probs: Tensor, labels: Tensor) -> Tensor:
    """mean of Σ_c (p_c − 1[y = c])², summed over classes: 0 is perfect and 2 the worst.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    tensor(0.5000, dtype=torch.float64)
    """
    return Mean.of(_distance(*rows(probs, labels))).value


def nll_at_mean_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """mean of −log softmax(z)_y at the mean z of the replicates' logits: (N, C, *).

    By convexity of −log softmax it is at most the mean NLL of the replicates, as `nll` is, but is no
    likelihood of the predictive probability: compare it only with itself.

    >>> nll_at_mean_logit(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor(0.6931, dtype=torch.float64)
    """
    return LogitScores.of(logits, labels).nll_at_mean_logit


def paper_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """10 × `nll_at_mean_logit`: the column NLL of the paper's tables.

    >>> paper_nll(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor(6.9315, dtype=torch.float64)
    """
    return LogitScores.of(logits, labels).paper_nll


def _wrong(p: Tensor, y: Tensor) -> Tensor:
    return p.argmax(1) != y  # (N,)


def _surprise(p: Tensor, y: Tensor) -> Tensor:
    return -_of_truth(p, y).clamp_min(torch.finfo(p.dtype).tiny).double().log()  # (N,)


def _distance(p: Tensor, y: Tensor) -> Tensor:
    gap = p.to(torch.float64, copy=True)  # (N, C)
    gap[torch.arange(len(y), device=y.device), y] -= 1
    return gap.square_().sum(1)  # (N,)


def _of_truth(p: Tensor, y: Tensor) -> Tensor:
    return p.gather(1, y[:, None])[:, 0]  # (N,)


@dataclass(frozen=True, eq=False)
class LogitScores(Tally):
    """Scores of mean logits, for data that come in parts.

    >>> logits, labels = torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([1, 0])
    >>> tally = sum(LogitScores.of(z, y) for z, y in zip(logits.split(1), labels.split(1)))
    >>> tally.nll_at_mean_logit, tally.paper_nll
    (tensor(0.4100, dtype=torch.float64), tensor(4.1004, dtype=torch.float64))
    """

    surprise: Mean

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> Self:
        """Of the mean of the replicates' logits (N, C, *) and labels (N, *)."""
        z, y = logit_rows(logits, labels)
        return cls(Mean.of(-_of_truth(z.double().log_softmax(1), y)))

    @property
    def nll_at_mean_logit(self) -> Tensor:
        return self.surprise.value

    @property
    def paper_nll(self) -> Tensor:
        return 10 * self.surprise.value


class ClassFigures:
    """The figures of classification that need no input's score kept, by one formula for every holder."""

    wrong: Mean
    surprise: Mean
    distance: Mean
    bins: Bins
    confusion: Confusion

    @property
    def count(self) -> int:
        return int(self.wrong.count)

    @property
    def error(self) -> Tensor:
        return self.wrong.value

    @property
    def accuracy(self) -> Tensor:
        return 1 - self.wrong.value

    @property
    def nll(self) -> Tensor:
        return self.surprise.value

    @property
    def brier(self) -> Tensor:
        return self.distance.value

    @property
    def ece(self) -> Tensor:
        return self.bins.ece

    @property
    def mce(self) -> Tensor:
        return self.bins.mce

    @property
    def reliability_curve(self) -> ReliabilityCurve:
        return self.bins.curve

    @property
    def confusion_matrix(self) -> Tensor:
        return self.confusion.counts

    @property
    def precision(self) -> Tensor:
        return self.confusion.precision

    @property
    def recall(self) -> Tensor:
        return self.confusion.recall

    @property
    def f1(self) -> Tensor:
        return self.confusion.f1


def tallied(p: Tensor, y: Tensor, num_bins: int) -> tuple[Mean, Mean, Mean, Bins, Confusion]:
    """The tallies that `ClassFigures` reads, of checked rows (N, C) and (N,)."""
    confidence, guess = p.max(1)  # (N,), (N,)
    return (
        Mean.of(guess != y),
        Mean.of(_surprise(p, y)),
        Mean.of(_distance(p, y)),
        Bins.of(confidence, guess == y, num_bins=num_bins),
        Confusion.of(guess, y, classes=p.shape[1]),
    )


@dataclass(frozen=True, eq=False)
class Classification(ClassFigures, Tally):
    """Every figure of this file, of data that come in parts.

    >>> probs, labels = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]]), torch.tensor([0, 1, 0])
    >>> tally = sum(Classification.of(p, y) for p, y in zip(probs.split(2), labels.split(2)))
    >>> tally.count, tally.error
    (3, tensor(0.3333, dtype=torch.float64))
    >>> tally.f1
    tensor([0.6667, 0.6667], dtype=torch.float64)
    """

    wrong: Mean
    surprise: Mean
    distance: Mean
    bins: Bins
    confusion: Confusion
    ranking: Ranking
    num_bins: int

    @classmethod
    def of(cls, probs: Tensor, labels: Tensor, *, num_bins: int = 15) -> Self:
        """Of probabilities (N, C, *) and labels (N, *)."""
        p, y = rows(probs, labels)
        confidence, guess = p.max(1)
        return cls(*tallied(p, y, num_bins), Ranking.of(confidence, guess == y), num_bins)

    @property
    def adaptive_ece(self) -> Tensor:
        return self.ranking.adaptive_ece(self.num_bins)

    @property
    def risk_coverage(self) -> RiskCoverage:
        return self.ranking.risk_coverage

    @property
    def aurc(self) -> Tensor:
        return self.ranking.aurc
