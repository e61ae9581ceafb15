"""Metrics of pixel labels over a whole data set.

    IoU_c = |Y_c ∩ G_c| / |Y_c ∪ G_c|,   Dice_c = 2 |Y_c ∩ G_c| / (|Y_c| + |G_c|)

with Y_c the pixels whose label is c and G_c those predicted as c, over all images together: counts are summed over the
data set and divided once. Pixels labelled `ignore_index` do not count. mIoU is the mean over the classes that occur as
a label or as a prediction; a class that does neither has IoU and Dice 0 and is excluded from the mean.

M. Everingham et al., The PASCAL visual object classes challenge: a retrospective, IJCV 2015.
"""

from dataclasses import dataclass

from torch import Tensor

from neuboots.metrics.classification import ProbabilityMetrics


@dataclass(frozen=True, eq=False)
class SegmentationMetrics(ProbabilityMetrics):
    """All metrics of pixels for images that come in batches; it stores nothing per pixel.

    Error, NLL, Brier, ECE, MCE and the reliability curve are those of classification with pixels as inputs.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[[0.9, 0.2, 0.4]], [[0.1, 0.8, 0.6]]]).movedim(1, 0)  # 1 image, 2 classes, 3 pixels
        >>> labels = torch.tensor([[0, 1, 255]])
        >>> state = sum(SegmentationMetrics.from_batch(probs, labels, ignore_index=255) for _ in range(2))
        >>> state.count, state.mean_iou, state.nll
        (4, tensor(1., dtype=torch.float64), tensor(0.1643, dtype=torch.float64))
    """

    @property
    def dice(self) -> Tensor:
        """Dice coefficient of each class: (C,)."""
        return self.f1


def iou(probs: Tensor, labels: Tensor, *, ignore_index: int | None = 255) -> Tensor:
    """|Y_c ∩ G_c| / |Y_c ∪ G_c| over all pixels.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).
        ignore_index: Label of pixels that do not count, or None.

    Returns:
        Intersection over union of each class (C,); 0 for a class that occurs nowhere.

    Example:
        >>> import torch
        >>> iou(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    return SegmentationMetrics.from_batch(probs, labels, ignore_index=ignore_index).iou


def mean_iou(probs: Tensor, labels: Tensor, *, ignore_index: int | None = 255) -> Tensor:
    """Mean of `iou` over the classes that occur as a label or as a prediction.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).
        ignore_index: Label of pixels that do not count, or None.

    Returns:
        The mean, a 0-dim float64 tensor.

    Example:
        >>> import torch
        >>> mean_iou(torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0]]), torch.tensor([0, 1]))
        tensor(1., dtype=torch.float64)
    """
    return SegmentationMetrics.from_batch(probs, labels, ignore_index=ignore_index).mean_iou


def dice(probs: Tensor, labels: Tensor, *, ignore_index: int | None = 255) -> Tensor:
    """2 |Y_c ∩ G_c| / (|Y_c| + |G_c|) over all pixels: the F1 of class c.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).
        ignore_index: Label of pixels that do not count, or None.

    Returns:
        Dice coefficient of each class (C,); 0 for a class that occurs nowhere.

    Example:
        >>> import torch
        >>> dice(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
        tensor([0.6667, 0.6667], dtype=torch.float64)
    """
    return SegmentationMetrics.from_batch(probs, labels, ignore_index=ignore_index).dice
