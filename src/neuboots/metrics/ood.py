"""How well does a score tell two kinds of input apart, such as in- and out-of-distribution?

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

from neuboots.metrics.checks import between, tensors
from neuboots.metrics.tally import Tally, joined, kept, run_ends

Side = Literal["in", "out"]
_NAMES: dict[Side, str] = {"in": "in-distribution", "out": "out-of-distribution"}


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
    between("tpr", tpr)
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
    tensors(scores=scores, positive=positive)
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


def check_side(positive: object) -> None:
    if positive not in _NAMES:
        raise ValueError(f"got positive={positive!r}; expected 'in' or 'out': name the positive class")


@dataclass(frozen=True, eq=False, repr=False)
class Detection(Tally):
    """Every figure of this file, of scores that come in parts: larger = more out-of-distribution.

    Which inputs are positive is stated by whoever builds it, and printed. A part may lack one of the groups.

    >>> inside, outside = torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9])
    >>> tally = Detection.of(inside, outside, positive="out")
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
    positive: Side
    tpr: float = 0.95  # of `tnr_at_tpr` and `fpr_at_tpr`

    @classmethod
    def of(cls, inside: Tensor, outside: Tensor, *, positive: Side, tpr: float = 0.95) -> Self:
        """Of scores of in-distribution inputs and of out-of-distribution inputs: (N,) each."""
        check_side(positive)
        between("tpr", tpr)
        tensors(inside=inside, outside=outside)
        for scores in inside, outside:
            if not scores.is_floating_point():  # −s of an unsigned s would wrap around
                raise ValueError(f"scores are {scores.dtype}; expected floats: convert them with .float()")
            _refuse_nan(scores)
        return cls(kept(inside), kept(outside), positive, tpr)

    def _as(self, side: Side) -> tuple[Tensor, Tensor]:
        """Scores, larger = more positive, and the mask of positives, if `side` is the positive class: (N,) each."""
        inside, outside = joined(self.inside), joined(self.outside)
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
        sizes = f"{len(joined(self.inside))} inside, {len(joined(self.outside))} outside"
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
        sizes = f"{len(joined(self.inside))} in, {len(joined(self.outside))} out"
        lines = [f"{name:<18}  {value:.4f}" for name, value in figures.items()]
        return "\n".join([f"positive class: {_NAMES[self.positive]} ({sizes})", *lines])
