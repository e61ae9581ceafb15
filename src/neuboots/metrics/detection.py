"""Metrics of scores that detect a positive class, such as out-of-distribution inputs.

    TPR(t) = P(s⁺ ≥ t),   FPR(t) = P(s⁻ ≥ t),   precision(t) = n⁺(s ≥ t) / n(s ≥ t)

The thresholds t are the scores that occur: inputs of equal score pass together, so no metric depends on the order of
the inputs. The caller names the positive class, since the metrics depend on it: the paper counts in-distribution inputs
as positive, other libraries the out-of-distribution ones.

D. Hendrycks, K. Gimpel, A baseline for detecting misclassified and out-of-distribution examples, ICLR 2017.
K. Lee, K. Lee, H. Lee, J. Shin, A simple unified framework for detecting out-of-distribution samples, NeurIPS 2018.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from neuboots._validation import ArgumentError, check_choice, check_fraction
from neuboots.metrics.classification import (
    MetricState,
    check_float_scores,
    check_same_shape,
    concat_values,
    flatten_reals,
)

PositiveClass = Literal["in", "out"]


def auroc(scores: Tensor, *, positive: Tensor) -> Tensor:
    """P(s⁺ > s⁻) + ½ P(s⁺ = s⁻): the area under the ROC curve.

    Args:
        scores: Real numbers (N,), larger for the positive class.
        positive: True where an input is of the positive class, (N,).

    Returns:
        The area, a 0-dim float64 tensor.

    Example:
        >>> confidence = torch.tensor([0.9, 0.6, 0.6, 0.4])
        >>> auroc(confidence, positive=torch.tensor([True, True, False, False]))
        tensor(0.8750, dtype=torch.float64)
    """
    true, false = _cumulative_counts(scores, positive)
    pairs = ((true[1:] + true[:-1]) * false.diff()).sum()  # integers: exact
    return pairs.double() / (2 * true[-1] * false[-1])


def aupr(scores: Tensor, *, positive: Tensor) -> Tensor:
    """∫ precision d TPR by the trapezoidal rule, from precision 1 at TPR 0.

    The value of OpenOOD and pytorch-ood; scikit-learn's `average_precision_score` sums steps instead of trapezia.

    Args:
        scores: Real numbers (N,), larger for the positive class.
        positive: True where an input is of the positive class, (N,).

    Returns:
        The area, a 0-dim float64 tensor.

    Example:
        >>> aupr(torch.tensor([0.9, 0.6, 0.5, 0.4]), positive=torch.tensor([True, False, True, False]))
        tensor(0.7917, dtype=torch.float64)
    """
    true, false = _cumulative_counts(scores, positive)
    precision = true.double() / (true + false).clamp_min(1)
    precision[0] = 1
    return ((precision[1:] + precision[:-1]) * true.diff()).sum() / (2 * true[-1])


def fpr_at_tpr(scores: Tensor, *, positive: Tensor, tpr: float = 0.95) -> Tensor:
    """FPR(t) at the highest threshold t with TPR(t) ≥ tpr.

    Args:
        scores: Real numbers (N,), larger for the positive class.
        positive: True where an input is of the positive class, (N,).
        tpr: Required true positive rate, between 0 and 1.

    Returns:
        The rate, a 0-dim float64 tensor.

    Example:
        >>> fpr_at_tpr(torch.tensor([0.9, 0.6, 0.5, 0.4]), positive=torch.tensor([True, False, True, False]))
        tensor(0.5000, dtype=torch.float64)
    """
    tpr = check_fraction("tpr", tpr)
    true, false = _cumulative_counts(scores, positive)
    reached = true.double() / true[-1] >= tpr
    return false[reached][0].double() / false[-1]


def tnr_at_tpr(scores: Tensor, *, positive: Tensor, tpr: float = 0.95) -> Tensor:
    """1 − FPR(t) at the highest threshold t with TPR(t) ≥ tpr.

    Args:
        scores: Real numbers (N,), larger for the positive class.
        positive: True where an input is of the positive class, (N,).
        tpr: Required true positive rate, between 0 and 1.

    Returns:
        The rate, a 0-dim float64 tensor.

    Example:
        >>> tnr_at_tpr(torch.tensor([0.9, 0.6, 0.5, 0.4]), positive=torch.tensor([True, False, True, False]))
        tensor(0.5000, dtype=torch.float64)
    """
    return 1 - fpr_at_tpr(scores, positive=positive, tpr=tpr)


def detection_accuracy(scores: Tensor, *, positive: Tensor) -> Tensor:
    """max_t ½ (TPR(t) + 1 − FPR(t)): the best balanced accuracy over thresholds; 0.5 is chance.

    Args:
        scores: Real numbers (N,), larger for the positive class.
        positive: True where an input is of the positive class, (N,).

    Returns:
        The accuracy, a 0-dim float64 tensor.

    Example:
        >>> detection_accuracy(torch.tensor([0.9, 0.6, 0.5, 0.4]), positive=torch.tensor([True, False, True, False]))
        tensor(0.7500, dtype=torch.float64)
    """
    true, false = _cumulative_counts(scores, positive)
    return (true.double() / true[-1] + 1 - false.double() / false[-1]).max() / 2


def _cumulative_counts(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Number of positives and negatives with s ≥ t, for t = ∞ and each distinct score, falling: (K + 1,) each."""
    check_same_shape(scores=scores, positive=positive)
    if positive.dtype != torch.bool:
        raise ArgumentError("positive.dtype", positive.dtype, "torch.bool", hint="pass a mask such as labels == 1")
    flatten_reals(allow_infinite=True, scores=scores)
    scores, mask = scores.detach().flatten(), positive.flatten().to(scores.device)
    if int(mask.sum()) in (0, len(mask)):
        found = f"{int(mask.sum())} of {len(mask)} inputs"
        raise ArgumentError("positive", found, "inputs of both classes", hint="pass both classes together")
    falling, order = scores.sort(descending=True)
    accepted = pad(torch.unique_consecutive(falling, return_counts=True)[1].cumsum(0), (1, 0))  # (K + 1,)
    true = pad(mask[order].cumsum(0), (1, 0))[accepted]
    return true, accepted - true


@dataclass(frozen=True, eq=False, repr=False)
class DetectionMetrics(MetricState):
    """Metrics of out-of-distribution detection for scores that come in batches; it stores the scores.

    Scores are larger for out-of-distribution inputs. A batch may lack one of the two classes.

    Args:
        id_scores: Scores of in-distribution inputs by batch, (N,) each.
        ood_scores: Scores of out-of-distribution inputs by batch, (N,) each.
        positive: Which class is positive, "in" or "out".
        tpr: True positive rate of `tnr_at_tpr` and `fpr_at_tpr`.

    Example:
        >>> id_scores, ood_scores = torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9])
        >>> state = DetectionMetrics.from_batch(id_scores, ood_scores, positive="out")
        >>> print(state)
        positive class: out-of-distribution (3 in, 2 out)
        AUROC               0.8333
        AUPR-in             0.9028
        AUPR-out            0.7917
        TNR at 95 % TPR     0.6667
        FPR at 95 % TPR     0.3333
        detection accuracy  0.8333
    """

    id_scores: tuple[Tensor, ...]
    ood_scores: tuple[Tensor, ...]
    positive: PositiveClass
    tpr: float = 0.95

    @classmethod
    def from_batch(cls, id_scores: Tensor, ood_scores: Tensor, *, positive: PositiveClass, tpr: float = 0.95) -> Self:
        """Return the state of one batch.

        Args:
            id_scores: Scores of in-distribution inputs.
            ood_scores: Scores of out-of-distribution inputs.
            positive: Which class is positive, "in" or "out".
            tpr: True positive rate of `tnr_at_tpr` and `fpr_at_tpr`.

        Raises:
            ArgumentError: If scores are NaN or not of a floating-point dtype, or an option is invalid.
        """
        check_choice("positive", positive, get_args(PositiveClass))
        for name, scores in (("id_scores", id_scores), ("ood_scores", ood_scores)):
            check_float_scores(name, scores)
        stored_id, stored_ood = (scores.detach().flatten().clone() for scores in (id_scores, ood_scores))
        return cls((stored_id,), (stored_ood,), positive, check_fraction("tpr", tpr))

    def _evaluate(self, metric: Callable[..., Tensor], positive: PositiveClass, **options: float) -> Tensor:
        """Apply a function of scores that are larger for the positive class."""
        id_scores, ood_scores = concat_values(self.id_scores), concat_values(self.ood_scores)
        scores = torch.cat([id_scores, ood_scores.to(id_scores.device)])
        is_ood = torch.arange(len(scores), device=scores.device) >= len(id_scores)
        if positive == "out":
            return metric(scores, positive=is_ood, **options)
        return metric(-scores, positive=~is_ood, **options)

    @property
    def auroc(self) -> Tensor:
        """Area under the ROC curve."""
        return self._evaluate(auroc, self.positive)

    @property
    def aupr_in(self) -> Tensor:
        """Area under the precision–recall curve with in-distribution as positive."""
        return self._evaluate(aupr, "in")

    @property
    def aupr_out(self) -> Tensor:
        """Area under the precision–recall curve with out-of-distribution as positive."""
        return self._evaluate(aupr, "out")

    @property
    def tnr_at_tpr(self) -> Tensor:
        """True negative rate at the true positive rate `tpr`."""
        return 1 - self.fpr_at_tpr

    @property
    def fpr_at_tpr(self) -> Tensor:
        """False positive rate at the true positive rate `tpr`."""
        return self._evaluate(fpr_at_tpr, self.positive, tpr=self.tpr)

    @property
    def detection_accuracy(self) -> Tensor:
        """Best balanced accuracy over thresholds."""
        return self._evaluate(detection_accuracy, self.positive)

    def __str__(self) -> str:
        metrics = {
            "AUROC": self.auroc,
            "AUPR-in": self.aupr_in,
            "AUPR-out": self.aupr_out,
            f"TNR at {100 * self.tpr:g} % TPR": self.tnr_at_tpr,
            f"FPR at {100 * self.tpr:g} % TPR": self.fpr_at_tpr,
            "detection accuracy": self.detection_accuracy,
        }
        name = {"in": "in-distribution", "out": "out-of-distribution"}[self.positive]
        num_in, num_out = (sum(map(len, parts)) for parts in (self.id_scores, self.ood_scores))
        lines = [f"{name:<18}  {value:.4f}" for name, value in metrics.items()]
        return "\n".join([f"positive class: {name} ({num_in} in, {num_out} out)", *lines])
