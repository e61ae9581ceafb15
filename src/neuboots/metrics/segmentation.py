"""How well does a net label pixels, over a whole data set?

    IoU_c = |Y_c ∩ G_c| / |Y_c ∪ G_c|,   Dice_c = 2 |Y_c ∩ G_c| / (|Y_c| + |G_c|)

with Y_c the pixels whose label is c and G_c those guessed to be c, over all images together: counts are gathered over
the data set and divided once. Pixels labelled `ignore_index` count nowhere. mIoU is the mean over the classes that occur as a
label or as a guess; a class that does neither has IoU and Dice 0 and is left out of the mean.

M. Everingham et al., The PASCAL visual object classes challenge: a retrospective, IJCV 2015.
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from neuboots.metrics._base import MetricState, RunningMean, flatten_probs
from neuboots.metrics.classification import ConfusionMatrix, ProbabilityMetrics, ReliabilityBins, probability_sums


@dataclass(frozen=True, eq=False)
class SegmentationMetrics(ProbabilityMetrics, MetricState):
    """Every figure of pixels, of images that come in parts; nothing is kept for a pixel.

    Error, NLL, Brier, ECE, MCE and the reliability curve are those of classification, a pixel being an input.

    >>> import torch
    >>> probs = torch.tensor([[[0.9, 0.2, 0.4]], [[0.1, 0.8, 0.6]]]).movedim(1, 0)  # one image, 2 classes, 3 pixels
    >>> labels = torch.tensor([[0, 1, 255]])
    >>> tally = sum([SegmentationMetrics.of(probs, labels), SegmentationMetrics.of(probs, labels)])
    >>> tally.count, tally.mean_iou, tally.nll
    (4, tensor(1., dtype=torch.float64), tensor(0.1643, dtype=torch.float64))
    """

    wrong: RunningMean
    surprise: RunningMean
    distance: RunningMean
    bins: ReliabilityBins
    confusion: ConfusionMatrix
    ignore_index: int

    @classmethod
    def of(cls, probs: Tensor, labels: Tensor, *, ignore_index: int = 255, num_bins: int = 15) -> Self:
        """Of probabilities (N, C, *) and labels (N, *)."""
        p, y = flatten_probs(probs, labels, ignore_index=ignore_index)
        return cls(*probability_sums(p, y, num_bins), ignore_index)

    @property
    def iou(self) -> Tensor:
        return self.confusion.iou

    @property
    def mean_iou(self) -> Tensor:
        return self.confusion.mean_iou

    @property
    def dice(self) -> Tensor:
        return self.confusion.f1


def iou(probs: Tensor, labels: Tensor, *, ignore_index: int = 255) -> Tensor:
    """|Y_c ∩ G_c| / |Y_c ∪ G_c| over all pixels not void: (C,); 0 for a class that occurs nowhere.

    >>> import torch
    >>> iou(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    return SegmentationMetrics.of(probs, labels, ignore_index=ignore_index).iou


def mean_iou(probs: Tensor, labels: Tensor, *, ignore_index: int = 255) -> Tensor:
    """The mean of `iou` over the classes that occur as a label or as a guess.

    >>> import torch
    >>> mean_iou(torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0]]), torch.tensor([0, 1]))
    tensor(1., dtype=torch.float64)
    """
    return SegmentationMetrics.of(probs, labels, ignore_index=ignore_index).mean_iou


def dice(probs: Tensor, labels: Tensor, *, ignore_index: int = 255) -> Tensor:
    """2 |Y_c ∩ G_c| / (|Y_c| + |G_c|) over all pixels not void: (C,); the F1 of class c.

    >>> import torch
    >>> dice(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
    tensor([0.6667, 0.6667], dtype=torch.float64)
    """
    return SegmentationMetrics.of(probs, labels, ignore_index=ignore_index).dice
