"""Is an input of confidence 0.8 right four times in five?

    ECE = Σ_k (n_k / n) |accuracy_k − confidence_k|,   MCE = max_k |accuracy_k − confidence_k|

over bins k of the confidence max p. Bins are (a, b], so that confidence 1 falls in the last; a confidence of 0 would
fall in the first.

C. Guo, G. Pleiss, Y. Sun, K. Weinberger, On calibration of modern neural networks, ICML 2017.
M. Pakdaman Naeini, G. Cooper, M. Hauskrecht, Obtaining well calibrated probabilities using Bayesian binning, AAAI 2015.

Which class was taken for which: the counts n_tg of inputs with true class t and guess g.

    precision_c = n_cc / Σ_t n_tc,   recall_c = n_cc / Σ_g n_cg,   F1_c = 2 n_cc / (Σ_t n_tc + Σ_g n_cg)
    IoU_c = n_cc / (Σ_t n_tc + Σ_g n_cg − n_cc),   Dice_c = F1_c

Where such a ratio is 0 / 0, as for a class that occurs nowhere, it is 0 (scikit-learn's `zero_division=0`).

How good are the probabilities p of C classes, given the true labels y?

    error = mean 1[argmax p ≠ y],   NLL = mean −log p_y,   Brier = mean Σ_c (p_c − 1[y = c])²

Everywhere `probs` is (N, C, *), rows of probabilities along the class axis, and `labels` the whole
numbers (N, *) in 0 … C − 1; pixels count as inputs of their own. Sums run in float64.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neuboots.metrics._base import (
    MetricState,
    RunningMean,
    check_int_at_least,
    check_integers,
    check_label_range,
    check_nonempty,
    flatten_logits,
    flatten_probs,
)
from neuboots.metrics.ranking import ConfidenceRanking, RiskCoverageCurve


@dataclass(frozen=True, eq=False)
class ReliabilityCurve:
    """Mean confidence, accuracy and number of inputs in each bin; an empty bin has NaN means."""

    confidence: Tensor  # (num_bins,)
    accuracy: Tensor  # (num_bins,)
    count: Tensor  # (num_bins,)


@dataclass(frozen=True, eq=False)
class ReliabilityBins(MetricState):
    """Sums of confidence and of right answers in each bin ((k − 1)/K, k/K] of the confidence."""

    confidence: Tensor  # (num_bins,)
    right: Tensor  # (num_bins,)
    count: Tensor  # (num_bins,)

    @classmethod
    def of(cls, confidence: Tensor, right: Tensor, *, num_bins: int) -> Self:
        """Of confidences (N,) and whether the guess is right (N,)."""
        check_int_at_least("num_bins", num_bins, 1)
        # The inner edges k/K, rounded as the probabilities are: 0.6 in float32 lies on 3/5, not above.
        edges = (torch.arange(1, num_bins, device=confidence.device).double() / num_bins).to(confidence.dtype)
        bins = torch.bucketize(confidence, edges)  # (N,)
        return cls(
            confidence=torch.bincount(bins, confidence.double(), minlength=num_bins).double(),
            right=torch.bincount(bins[right], minlength=num_bins),
            count=torch.bincount(bins, minlength=num_bins),
        )

    @property
    def curve(self) -> ReliabilityCurve:
        check_nonempty(self.count.sum())
        return ReliabilityCurve(self.confidence / self.count, self.right.double() / self.count, self.count)

    @property
    def ece(self) -> Tensor:
        return (self.right - self.confidence).abs().sum() / check_nonempty(self.count.sum())

    @property
    def mce(self) -> Tensor:
        check_nonempty(self.count.sum())
        return ((self.right - self.confidence).abs() / self.count.clamp_min(1)).max()


def reliability_curve(probs: Tensor, labels: Tensor, *, num_bins: int = 15) -> ReliabilityCurve:
    """Means of max p and of 1[argmax p = y] over the inputs with max p in ((k − 1)/K, k/K].

    >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [1.0, 0.0]])
    >>> curve = reliability_curve(probs, torch.tensor([0, 0, 0]), num_bins=2)
    >>> curve.count, curve.accuracy
    (tensor([0, 3]), tensor([   nan, 0.6667], dtype=torch.float64))
    """
    return _bins(probs, labels, num_bins).curve


def ece(probs: Tensor, labels: Tensor, *, num_bins: int = 15) -> Tensor:
    """Σ_k (n_k / n) |accuracy_k − confidence_k|, over the bins of `reliability_curve` not empty.

    >>> ece(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 1]))
    tensor(0.2000, dtype=torch.float64)
    """
    return _bins(probs, labels, num_bins).ece


def mce(probs: Tensor, labels: Tensor, *, num_bins: int = 15) -> Tensor:
    """max_k |accuracy_k − confidence_k|, over the bins of `reliability_curve` not empty.

    >>> mce(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 1]))
    tensor(0.3000, dtype=torch.float64)
    """
    return _bins(probs, labels, num_bins).mce


def _bins(probs: Tensor, labels: Tensor, num_bins: int) -> ReliabilityBins:
    p, y = flatten_probs(probs, labels)
    confidence, guess = p.max(1)  # (N,), (N,)
    return ReliabilityBins.of(confidence, guess == y, num_bins=num_bins)


@dataclass(frozen=True, eq=False)
class ConfusionMatrix(MetricState):
    """n_tg: a row for each true class, a column for each guess.

    >>> one, two = torch.tensor([0, 1, 1]), torch.tensor([0])
    >>> tally = ConfusionMatrix.of(one, torch.tensor([0, 1, 0]), classes=2) + ConfusionMatrix.of(two, two, classes=2)
    >>> tally.matrix.tolist(), tally.recall
    ([[2, 1], [0, 1]], tensor([0.6667, 1.0000], dtype=torch.float64))
    """

    matrix: Tensor  # (C, C)

    @classmethod
    def of(cls, guess: Tensor, truth: Tensor, *, classes: int) -> Self:
        """Of whole numbers (N,) in 0 … C − 1."""
        check_int_at_least("classes", classes, 1)
        check_integers(guess=guess, truth=truth)
        check_label_range("guesses", guess, classes)
        check_label_range("labels", truth, classes)
        row, column = truth.flatten().to(guess.device).long(), guess.flatten().long()
        cells = torch.bincount(row * classes + column, minlength=classes**2)
        return cls(cells.reshape(classes, classes))

    @property
    def counts(self) -> Tensor:
        """n_tg, of at least one input: (C, C)."""
        check_nonempty(self.matrix.sum())
        return self.matrix

    @property
    def occurs(self) -> Tensor:
        """Whether class c is the truth or the guess of any input: (C,)."""
        return self._sizes > 0

    @property
    def precision(self) -> Tensor:
        return self._hits / self.matrix.sum(0).clamp_min(1)

    @property
    def recall(self) -> Tensor:
        return self._hits / self.matrix.sum(1).clamp_min(1)

    @property
    def f1(self) -> Tensor:
        return 2 * self._hits / self._sizes.clamp_min(1)

    @property
    def iou(self) -> Tensor:
        return self._hits / (self._sizes - self._hits).clamp_min(1)

    @property
    def mean_iou(self) -> Tensor:
        return self.iou[self.occurs].mean()

    @property
    def _hits(self) -> Tensor:
        """n_cc: (C,); the ratios above have at least 1 below, so that 0 / 0 is 0."""
        return self.counts.diagonal().double()

    @property
    def _sizes(self) -> Tensor:
        return self.matrix.sum(0) + self.matrix.sum(1)


def confusion_matrix(probs: Tensor, labels: Tensor) -> Tensor:
    """n_tg = number of inputs with y = t and argmax p = g: (C, C), a row for each true class.

    >>> confusion_matrix(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
    tensor([[1, 0],
            [1, 1]])
    """
    return _confusion(probs, labels).counts


def precision(probs: Tensor, labels: Tensor) -> Tensor:
    """n_cc / Σ_t n_tc: of the inputs taken for class c, how many are: (C,); 0 where none was.

    >>> precision(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
    tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    return _confusion(probs, labels).precision


def recall(probs: Tensor, labels: Tensor) -> Tensor:
    """n_cc / Σ_g n_cg: of the inputs of class c, how many are taken for it: (C,); 0 where there are none.

    >>> recall(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    return _confusion(probs, labels).recall


def f1(probs: Tensor, labels: Tensor) -> Tensor:
    """2 n_cc / (Σ_t n_tc + Σ_g n_cg), the harmonic mean of precision and recall: (C,).

    >>> f1(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
    tensor([0.6667, 0.6667], dtype=torch.float64)
    """
    return _confusion(probs, labels).f1


def _confusion(probs: Tensor, labels: Tensor) -> ConfusionMatrix:
    p, y = flatten_probs(probs, labels)
    return ConfusionMatrix.of(p.argmax(1), y, classes=p.shape[1])


def error(probs: Tensor, labels: Tensor) -> Tensor:
    """mean of 1[argmax p ≠ y], a tie going to the first class.

    >>> error(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
    tensor(0.5000, dtype=torch.float64)
    """
    return RunningMean.of(_wrong(*flatten_probs(probs, labels))).value


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
    return RunningMean.of(_surprise(*flatten_probs(probs, labels))).value


def brier(probs: Tensor, labels: Tensor) -> Tensor:
    """mean of Σ_c (p_c − 1[y = c])², summed over classes: 0 is perfect and 2 the worst.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    tensor(0.5000, dtype=torch.float64)
    """
    return RunningMean.of(_distance(*flatten_probs(probs, labels))).value


def nll_at_mean_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """mean of −log softmax(z)_y at the mean z of the replicates' logits: (N, C, *).

    By convexity of −log softmax it is at most the mean NLL of the replicates, as `nll` is, but is no
    likelihood of the predictive probability: compare it only with itself.

    >>> nll_at_mean_logit(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor(0.6931, dtype=torch.float64)
    """
    return LogitMetrics.of(logits, labels).nll_at_mean_logit


def paper_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """10 × `nll_at_mean_logit`: the column NLL of the paper's tables.

    >>> paper_nll(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor(6.9315, dtype=torch.float64)
    """
    return LogitMetrics.of(logits, labels).paper_nll


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
class LogitMetrics(MetricState):
    """Scores of mean logits, for data that come in parts.

    >>> logits, labels = torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([1, 0])
    >>> tally = sum(LogitMetrics.of(z, y) for z, y in zip(logits.split(1), labels.split(1)))
    >>> tally.nll_at_mean_logit, tally.paper_nll
    (tensor(0.4100, dtype=torch.float64), tensor(4.1004, dtype=torch.float64))
    """

    surprise: RunningMean

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> Self:
        """Of the mean of the replicates' logits (N, C, *) and labels (N, *)."""
        z, y = flatten_logits(logits, labels)
        return cls(RunningMean.of(-_of_truth(z.double().log_softmax(1), y)))

    @property
    def nll_at_mean_logit(self) -> Tensor:
        return self.surprise.value

    @property
    def paper_nll(self) -> Tensor:
        return 10 * self.surprise.value


class ProbabilityMetrics:
    """The figures of classification that need no input's score kept, by one formula for every holder."""

    wrong: RunningMean
    surprise: RunningMean
    distance: RunningMean
    bins: ReliabilityBins
    confusion: ConfusionMatrix

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


def probability_sums(
    p: Tensor, y: Tensor, num_bins: int
) -> tuple[RunningMean, RunningMean, RunningMean, ReliabilityBins, ConfusionMatrix]:
    """The tallies that `ProbabilityMetrics` reads, of checked rows (N, C) and (N,)."""
    confidence, guess = p.max(1)  # (N,), (N,)
    return (
        RunningMean.of(guess != y),
        RunningMean.of(_surprise(p, y)),
        RunningMean.of(_distance(p, y)),
        ReliabilityBins.of(confidence, guess == y, num_bins=num_bins),
        ConfusionMatrix.of(guess, y, classes=p.shape[1]),
    )


@dataclass(frozen=True, eq=False)
class ClassificationMetrics(ProbabilityMetrics, MetricState):
    """Every figure of this file, of data that come in parts.

    >>> probs, labels = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]]), torch.tensor([0, 1, 0])
    >>> tally = sum(ClassificationMetrics.of(p, y) for p, y in zip(probs.split(2), labels.split(2)))
    >>> tally.count, tally.error
    (3, tensor(0.3333, dtype=torch.float64))
    >>> tally.f1
    tensor([0.6667, 0.6667], dtype=torch.float64)
    """

    wrong: RunningMean
    surprise: RunningMean
    distance: RunningMean
    bins: ReliabilityBins
    confusion: ConfusionMatrix
    ranking: ConfidenceRanking
    num_bins: int

    @classmethod
    def of(cls, probs: Tensor, labels: Tensor, *, num_bins: int = 15) -> Self:
        """Of probabilities (N, C, *) and labels (N, *)."""
        p, y = flatten_probs(probs, labels)
        confidence, guess = p.max(1)
        return cls(*probability_sums(p, y, num_bins), ConfidenceRanking.of(confidence, guess == y), num_bins)

    @property
    def adaptive_ece(self) -> Tensor:
        return self.ranking.adaptive_ece(self.num_bins)

    @property
    def risk_coverage(self) -> RiskCoverageCurve:
        return self.ranking.risk_coverage

    @property
    def aurc(self) -> Tensor:
        return self.ranking.aurc
