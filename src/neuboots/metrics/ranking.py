"""Which inputs to trust first: those of the highest confidence max p.

    risk(c) = error among the share c of inputs with the highest confidence,   AURC = ∫ risk(c) dc

Inputs of equal confidence have no order among themselves: each counts with the mean accuracy of all of them. For risk
and AURC that is the expectation over their orders; in adaptive bins, a tie that two bins share is shared in proportion.

Y. Geifman, G. Uziel, R. El-Yaniv, Bias-reduced uncertainty estimation for deep neural classifiers, ICLR 2019.
J. Nixon, M. Dusenberry, L. Zhang, G. Jerfel, D. Tran, Measuring calibration in deep learning, CVPR Workshops 2019.

How well does a score tell two kinds of input apart, such as in- and out-of-distribution?

    TPR(t) = P(s⁺ ≥ t),   FPR(t) = P(s⁻ ≥ t),   precision(t) = n⁺(s ≥ t) / n(s ≥ t)

The caller states the positive class by name, since figures depend on it: the paper counts the
in-distribution inputs as positive, other libraries the out-of-distribution ones. Thresholds t are the
scores that occur: inputs of equal score pass together, so no figure depends on the order of the inputs.

D. Hendrycks, K. Gimpel, A baseline for detecting misclassified and out-of-distribution examples, ICLR 2017.
K. Lee, K. Lee, H. Lee, J. Shin, A simple unified framework for detecting out-of-distribution samples, NeurIPS 2018.
"""

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from neuboots.metrics._base import (
    MetricState,
    check_fraction,
    check_int_at_least,
    check_nonempty,
    check_same_shape,
    check_tensors,
    concat_values,
    flatten_probs,
    run_ends,
    store_values,
)


@dataclass(frozen=True, eq=False)
class RiskCoverageCurve:
    """Accept where confidence ≥ threshold: the share of inputs accepted, and the error among them.

    One point for each confidence that occurs, from the highest down.
    """

    coverage: Tensor  # (K,)
    risk: Tensor  # (K,)
    threshold: Tensor  # (K,)


@dataclass(frozen=True, eq=False)
class ConfidenceRanking(MetricState):
    """The confidence of each input, and whether the guess is right; larger = to be trusted first.

    >>> first = ConfidenceRanking.of(torch.tensor([0.9, 0.6]), torch.tensor([True, False]))
    >>> tally = first + ConfidenceRanking.of(torch.tensor([0.8]), torch.tensor([True]))
    >>> tally.risk_coverage.risk.tolist(), tally.aurc
    ([0.0, 0.0, 0.3333333333333333], tensor(0.0833, dtype=torch.float64))
    """

    confidence: tuple[Tensor, ...]
    right: tuple[Tensor, ...]

    @classmethod
    def of(cls, confidence: Tensor, right: Tensor) -> Self:
        """Of confidences (N,) and whether the guess is right (N,)."""
        check_tensors(confidence=confidence, right=right)
        check_same_shape(confidence=confidence, right=right)
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
        return cls(store_values(confidence), store_values(right))

    def _accepted(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each confidence that occurs, falling; how many inputs have it or more; how many of them are right: (K,)."""
        confidence, order = concat_values(self.confidence).sort(descending=True)
        check_nonempty(torch.tensor(len(confidence)))
        accepted = run_ends(confidence)
        right = concat_values(self.right)[order].cumsum(0)[accepted - 1]
        return confidence[accepted - 1], accepted, right

    def _groups(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each confidence that occurs, falling; the accuracy of the inputs that have it; their number: (K,)."""
        values, accepted, right = self._accepted()
        count = accepted.diff(prepend=accepted.new_zeros(1))
        return values, right.diff(prepend=right.new_zeros(1)).double() / count, count

    @property
    def risk_coverage(self) -> RiskCoverageCurve:
        threshold, accepted, right = self._accepted()
        return RiskCoverageCurve(accepted.double() / accepted[-1], (accepted - right).double() / accepted, threshold)

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
        check_int_at_least("num_bins", num_bins, 1)
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


def risk_coverage_curve(probs: Tensor, labels: Tensor) -> RiskCoverageCurve:
    """risk(t) = mean of 1[argmax p ≠ y] over the inputs with max p ≥ t, and their share, for each t that occurs.

    >>> curve = risk_coverage_curve(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
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


def _ranking(probs: Tensor, labels: Tensor) -> ConfidenceRanking:
    p, y = flatten_probs(probs, labels)
    confidence, guess = p.max(1)
    return ConfidenceRanking.of(confidence, guess == y)


PositiveClass = Literal["in", "out"]
_NAMES: dict[PositiveClass, str] = {"in": "in-distribution", "out": "out-of-distribution"}


def auroc(scores: Tensor, *, positive: Tensor) -> Tensor:
    """P(s⁺ > s⁻) + ½ P(s⁺ = s⁻): the chance that a positive input outscores a negative one.

    `positive` is True where an input is of the positive class. The trapezoidal rule counts a tie as one half.

    >>> confidence = torch.tensor([0.9, 0.6, 0.6, 0.4])
    >>> in_distribution = torch.tensor([True, True, False, False])
    >>> auroc(confidence, positive=in_distribution)
    tensor(0.8750, dtype=torch.float64)
    """
    ours, theirs = _passed(scores, positive)
    pairs = ((ours[1:] + ours[:-1]) * theirs.diff()).sum()  # whole numbers: exact
    return pairs.double() / (2 * ours[-1] * theirs[-1])


def aupr(scores: Tensor, *, positive: Tensor) -> Tensor:
    """∫ precision d TPR by the trapezoidal rule, from precision 1 at TPR 0.

    The value of OpenOOD and pytorch-ood; scikit-learn's `average_precision_score` takes steps instead of trapezia.

    >>> aupr(torch.tensor([0.9, 0.6, 0.5, 0.4]), positive=torch.tensor([True, False, True, False]))
    tensor(0.7917, dtype=torch.float64)
    """
    ours, theirs = _passed(scores, positive)
    precision = ours.double() / (ours + theirs).clamp_min(1)
    precision[0] = 1
    return ((precision[1:] + precision[:-1]) * ours.diff()).sum() / (2 * ours[-1])


def fpr_at_tpr(scores: Tensor, *, positive: Tensor, tpr: float = 0.95) -> Tensor:
    """FPR(t) at the highest threshold t with TPR(t) ≥ tpr.

    >>> fpr_at_tpr(torch.tensor([0.9, 0.6, 0.5, 0.4]), positive=torch.tensor([True, False, True, False]))
    tensor(0.5000, dtype=torch.float64)
    """
    check_fraction("tpr", tpr)
    ours, theirs = _passed(scores, positive)
    reached = ours.double() / ours[-1] >= tpr
    return theirs[reached][0].double() / theirs[-1]


def tnr_at_tpr(scores: Tensor, *, positive: Tensor, tpr: float = 0.95) -> Tensor:
    """1 − FPR(t) at the highest threshold t with TPR(t) ≥ tpr: the negatives turned away.

    >>> tnr_at_tpr(torch.tensor([0.9, 0.6, 0.5, 0.4]), positive=torch.tensor([True, False, True, False]))
    tensor(0.5000, dtype=torch.float64)
    """
    return 1 - fpr_at_tpr(scores, positive=positive, tpr=tpr)


def detection_accuracy(scores: Tensor, *, positive: Tensor) -> Tensor:
    """max_t ½ (TPR(t) + 1 − FPR(t)): the best accuracy if both classes were as frequent; 0.5 is chance.

    >>> detection_accuracy(torch.tensor([0.9, 0.6, 0.5, 0.4]), positive=torch.tensor([True, False, True, False]))
    tensor(0.7500, dtype=torch.float64)
    """
    ours, theirs = _passed(scores, positive)
    return (ours.double() / ours[-1] + 1 - theirs.double() / theirs[-1]).max() / 2


def _passed(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """How many positives and negatives have s ≥ t, for t = ∞ and each score that occurs, falling: (K + 1,) each."""
    check_tensors(scores=scores, positive=positive)
    if positive.dtype != torch.bool or scores.shape != positive.shape:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)} and positive {tuple(positive.shape)} of "
            f"{positive.dtype}; expected one shape and torch.bool: pass a mask such as labels == 1"
        )
    if scores.is_complex() or scores.dtype == torch.bool:
        raise ValueError(f"scores are {scores.dtype}; expected real numbers: convert them with .float()")
    scores, mask = scores.detach().flatten(), positive.flatten().to(scores.device)
    marked = int(mask.sum())
    if marked in (0, len(mask)):
        raise ValueError(
            f"positive marks {marked} of {scores.numel()} scores; expected some of both "
            "classes: pass positive and negative inputs together"
        )
    _refuse_nan(scores)
    falling, order = scores.sort(descending=True)
    passed = torch.nn.functional.pad(run_ends(falling), (1, 0))  # (K + 1,)
    ours = torch.nn.functional.pad(mask[order].cumsum(0), (1, 0))[passed]
    return ours, passed - ours


def _refuse_nan(scores: Tensor) -> None:
    if scores.isnan().any():
        raise ValueError(
            f"scores has {int(scores.isnan().sum())} NaN among {scores.numel()}; expected numbers: "
            "check the net's outputs"
        )


def check_positive_class(positive: object) -> None:
    if positive not in _NAMES:
        raise ValueError(f"got positive={positive!r}; expected 'in' or 'out': name the positive class")


@dataclass(frozen=True, eq=False, repr=False)
class DetectionMetrics(MetricState):
    """Every figure of this file, of scores that come in parts: larger = more out-of-distribution.

    Which inputs are positive is stated by whoever builds it, and printed. A part may lack one of the groups.

    >>> inside, outside = torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9])
    >>> tally = DetectionMetrics.of(inside, outside, positive="out")
    >>> tally
    Detection(positive='out', 3 inside, 2 outside)
    >>> print(tally)
    positive class: out-of-distribution (3 in, 2 out)
    AUROC               0.8333
    AUPR-in             0.9028
    AUPR-out            0.7917
    TNR at 95 % TPR     0.6667
    FPR at 95 % TPR     0.3333
    detection accuracy  0.8333
    """

    inside: tuple[Tensor, ...]
    outside: tuple[Tensor, ...]
    positive: PositiveClass
    tpr: float = 0.95  # of `tnr_at_tpr` and `fpr_at_tpr`

    @classmethod
    def of(cls, inside: Tensor, outside: Tensor, *, positive: PositiveClass, tpr: float = 0.95) -> Self:
        """Of scores of in-distribution inputs and of out-of-distribution inputs: (N,) each."""
        check_positive_class(positive)
        check_fraction("tpr", tpr)
        check_tensors(inside=inside, outside=outside)
        for scores in inside, outside:
            if not scores.is_floating_point():  # −s of an unsigned s would wrap around
                raise ValueError(f"scores are {scores.dtype}; expected floats: convert them with .float()")
            _refuse_nan(scores)
        return cls(store_values(inside), store_values(outside), positive, tpr)

    def _as(self, side: PositiveClass) -> tuple[Tensor, Tensor]:
        """Scores, larger = more positive, and the mask of positives, if `side` is the positive class: (N,) each."""
        inside, outside = concat_values(self.inside), concat_values(self.outside)
        scores = torch.cat([inside, outside.to(inside.device)])
        is_out = torch.arange(len(scores), device=scores.device) >= len(inside)
        return (scores, is_out) if side == "out" else (-scores, ~is_out)

    @property
    def auroc(self) -> Tensor:
        scores, positive = self._as(self.positive)
        return auroc(scores, positive=positive)

    @property
    def aupr_in(self) -> Tensor:
        scores, positive = self._as("in")
        return aupr(scores, positive=positive)

    @property
    def aupr_out(self) -> Tensor:
        scores, positive = self._as("out")
        return aupr(scores, positive=positive)

    @property
    def tnr_at_tpr(self) -> Tensor:
        scores, positive = self._as(self.positive)
        return tnr_at_tpr(scores, positive=positive, tpr=self.tpr)

    @property
    def fpr_at_tpr(self) -> Tensor:
        scores, positive = self._as(self.positive)
        return fpr_at_tpr(scores, positive=positive, tpr=self.tpr)

    @property
    def tnr_at_95_tpr(self) -> Tensor:
        scores, positive = self._as(self.positive)
        return tnr_at_tpr(scores, positive=positive)

    @property
    def fpr_at_95_tpr(self) -> Tensor:
        scores, positive = self._as(self.positive)
        return fpr_at_tpr(scores, positive=positive)

    @property
    def detection_accuracy(self) -> Tensor:
        scores, positive = self._as(self.positive)
        return detection_accuracy(scores, positive=positive)

    def __repr__(self) -> str:
        sizes = f"{len(concat_values(self.inside))} inside, {len(concat_values(self.outside))} outside"
        return f"Detection(positive={self.positive!r}, {sizes})"

    def __str__(self) -> str:
        figures = {
            "AUROC": self.auroc,
            "AUPR-in": self.aupr_in,
            "AUPR-out": self.aupr_out,
            f"TNR at {100 * self.tpr:g} % TPR": self.tnr_at_tpr,
            f"FPR at {100 * self.tpr:g} % TPR": self.fpr_at_tpr,
            "detection accuracy": self.detection_accuracy,
        }
        sizes = f"{len(concat_values(self.inside))} in, {len(concat_values(self.outside))} out"
        lines = [f"{name:<18}  {value:.4f}" for name, value in figures.items()]
        return "\n".join([f"positive class: {_NAMES[self.positive]} ({sizes})", *lines])
