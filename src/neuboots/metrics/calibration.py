"""Is an input of confidence 0.8 right four times in five?

    ECE = Σ_k (n_k / n) |accuracy_k − confidence_k|,   MCE = max_k |accuracy_k − confidence_k|

over bins k of the confidence max p. Bins are (a, b], so that confidence 1 falls in the last; a confidence of 0 would
fall in the first.

C. Guo, G. Pleiss, Y. Sun, K. Weinberger, On calibration of modern neural networks, ICML 2017.
M. Pakdaman Naeini, G. Cooper, M. Hauskrecht, Obtaining well calibrated probabilities using Bayesian binning, AAAI 2015.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neuboots.metrics.checks import at_least, rows
from neuboots.metrics.tally import Tally, some


@dataclass(frozen=True, eq=False)
class ReliabilityCurve:
    """Mean confidence, accuracy and number of inputs in each bin; an empty bin has NaN means."""

    confidence: Tensor  # (num_bins,)
    accuracy: Tensor  # (num_bins,)
    count: Tensor  # (num_bins,)


@dataclass(frozen=True, eq=False)
class Bins(Tally):
    """Sums of confidence and of right answers in each bin ((k − 1)/K, k/K] of the confidence."""

    confidence: Tensor  # (num_bins,)
    right: Tensor  # (num_bins,)
    count: Tensor  # (num_bins,)

    @classmethod
    def of(cls, confidence: Tensor, right: Tensor, *, num_bins: int) -> Self:
        """Of confidences (N,) and whether the guess is right (N,)."""
        at_least("num_bins", num_bins, 1)
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
        some(self.count.sum())
        return ReliabilityCurve(self.confidence / self.count, self.right.double() / self.count, self.count)

    @property
    def ece(self) -> Tensor:
        return (self.right - self.confidence).abs().sum() / some(self.count.sum())

    @property
    def mce(self) -> Tensor:
        some(self.count.sum())
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


def _bins(probs: Tensor, labels: Tensor, num_bins: int) -> Bins:
    p, y = rows(probs, labels)
    confidence, guess = p.max(1)  # (N,), (N,)
    return Bins.of(confidence, guess == y, num_bins=num_bins)
