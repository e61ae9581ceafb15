"""Which inputs to trust first: those of the highest confidence max p.

    risk(c) = error among the share c of inputs with the highest confidence,   AURC = ∫ risk(c) dc

Inputs of equal confidence have no order among themselves: each counts with the mean accuracy of all of them. For risk
and AURC that is the expectation over their orders; in adaptive bins, a tie that two bins share is shared in proportion.

Y. Geifman, G. Uziel, R. El-Yaniv, Bias-reduced uncertainty estimation for deep neural classifiers, ICLR 2019.
J. Nixon, M. Dusenberry, L. Zhang, G. Jerfel, D. Tran, Measuring calibration in deep learning, CVPR Workshops 2019.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neuboots.metrics.checks import at_least, one_shape, rows, tensors
from neuboots.metrics.tally import Tally, joined, kept, run_ends, some


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """Accept where confidence ≥ threshold: the share of inputs accepted, and the error among them.

    One point for each confidence that occurs, from the highest down.
    """

    coverage: Tensor  # (K,)
    risk: Tensor  # (K,)
    threshold: Tensor  # (K,)


@dataclass(frozen=True, eq=False)
class Ranking(Tally):
    """The confidence of each input, and whether the guess is right; larger = to be trusted first.

    >>> first = Ranking.of(torch.tensor([0.9, 0.6]), torch.tensor([True, False]))
    >>> tally = first + Ranking.of(torch.tensor([0.8]), torch.tensor([True]))
    >>> tally.risk_coverage.risk.tolist(), tally.aurc
    ([0.0, 0.0, 0.3333333333333333], tensor(0.0833, dtype=torch.float64))
    """

    confidence: tuple[Tensor, ...]
    right: tuple[Tensor, ...]

    @classmethod
    def of(cls, confidence: Tensor, right: Tensor) -> Self:
        """Of confidences (N,) and whether the guess is right (N,)."""
        tensors(confidence=confidence, right=right)
        one_shape(confidence=confidence, right=right)
        if not confidence.is_floating_point() or right.dtype != torch.bool:
            raise ValueError(
                f"got confidence of {confidence.dtype} and right of {right.dtype}; expected floats and torch.bool: "
                "pass such as guess == labels"
            )
        if confidence.isnan().any():
            raise ValueError(
                f"got {int(confidence.isnan().sum())} NaN among {confidence.numel()} of confidence; expected numbers: "
                "check the net's outputs"
            )
        return cls(kept(confidence), kept(right))

    def _accepted(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each confidence that occurs, falling; how many inputs have it or more; how many of them are right: (K,)."""
        confidence, order = joined(self.confidence).sort(descending=True)
        some(torch.tensor(len(confidence)))
        accepted = run_ends(confidence)
        right = joined(self.right)[order].cumsum(0)[accepted - 1]
        return confidence[accepted - 1], accepted, right

    def _groups(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each confidence that occurs, falling; the accuracy of the inputs that have it; their number: (K,)."""
        values, accepted, right = self._accepted()
        count = accepted.diff(prepend=accepted.new_zeros(1))
        return values, right.diff(prepend=right.new_zeros(1)).double() / count, count

    @property
    def risk_coverage(self) -> RiskCoverage:
        threshold, accepted, right = self._accepted()
        return RiskCoverage(accepted.double() / accepted[-1], (accepted - right).double() / accepted, threshold)

    @property
    def aurc(self) -> Tensor:
        _, share, count = self._groups()
        wrong = (1 - share).repeat_interleave(count)  # (N,) in expectation over ties
        risk = wrong.cumsum(0) / torch.arange(1, len(wrong) + 1, device=wrong.device)
        if len(risk) == 1:
            return risk[0]
        # The trapezoidal rule from coverage 1/N to 1, over that length: there is no risk at coverage 0.
        return (risk.sum() - (risk[0] + risk[-1]) / 2) / (len(risk) - 1)

    def adaptive_ece(self, num_bins: int) -> Tensor:
        at_least("num_bins", num_bins, 1)
        values, share, count = self._groups()
        gap = (share - values.double()).repeat_interleave(count).flip(0)  # (N,) confidence rising
        return torch.stack([part.sum().abs() for part in gap.tensor_split(num_bins)]).sum() / len(gap)


def adaptive_ece(probs: Tensor, labels: Tensor, *, num_bins: int = 15) -> Tensor:
    """Σ_k (n_k / n) |accuracy_k − confidence_k| over bins of equal size: inputs sorted by confidence, cut into K parts.

    Of n inputs, the n mod K bins of least confidence have one more than the others.

    >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]])
    >>> adaptive_ece(probs, torch.tensor([0, 1, 1, 1]), num_bins=2)
    tensor(0.3500, dtype=torch.float64)
    """
    return _ranking(probs, labels).adaptive_ece(num_bins)


def risk_coverage(probs: Tensor, labels: Tensor) -> RiskCoverage:
    """risk(t) = mean of 1[argmax p ≠ y] over the inputs with max p ≥ t, and their share, for each t that occurs.

    >>> curve = risk_coverage(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
    >>> curve.coverage.tolist(), curve.risk.tolist()
    ([0.5, 1.0], [0.0, 0.5])
    """
    return _ranking(probs, labels).risk_coverage


def aurc(probs: Tensor, labels: Tensor) -> Tensor:
    """The mean of risk over coverage from 1/N to 1, by the trapezoidal rule; of a single input, its error.

    >>> aurc(torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.8, 0.2]]), torch.tensor([0, 1, 0]))
    tensor(0.0833, dtype=torch.float64)
    """
    return _ranking(probs, labels).aurc


def _ranking(probs: Tensor, labels: Tensor) -> Ranking:
    p, y = rows(probs, labels)
    confidence, guess = p.max(1)
    return Ranking.of(confidence, guess == y)
