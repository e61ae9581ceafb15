"""Table 4.2, upper half: segmentation of images with DeepLab-v3 on two backbones.

    p(y | x) = 1/B Σ_b softmax up(W (α_b ⊙ φ(x)) + b),     φ the features after atrous spatial pyramid pooling

NeuBoots's weights multiply the channels of the features before the last 1×1 convolution: one pass through the net for
all B replicates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from neuboots.nets import DeepLabV3, deeplab_resnet50, deeplab_resnet101
from neuboots.report.tables import PaperValues
from neuboots_paper.studies.segmentation_common import METHODS, MakeNet, SegmentationStudy

PAPER: PaperValues = {
    ("ResNet-50", "plain"): {"mean_iou": "84.57 ± 0.72", "ece": "15.35 ± 0.21", "relative_time": 1.0},
    ("ResNet-50", "mc-dropout"): {"mean_iou": "87.81 ± 1.83", "ece": "6.6 ± 0.1", "relative_time": 5.4},
    ("ResNet-50", "deep-ensemble-original"): {
        "mean_iou": "90.09 ± 0.61", "ece": "17.31 ± 0.74", "relative_time": 5.5,
    },
    ("ResNet-50", "deep-ensemble"): {"mean_iou": "86.95 ± 0.57", "ece": "12.36 ± 0.53", "relative_time": 5.5},
    ("ResNet-50", "neuboots"): {"mean_iou": "90.14 ± 2.17", "ece": "6.00 ± 0.1", "relative_time": 2.7},
    ("ResNet-101", "plain"): {"mean_iou": "85.35 ± 0.23", "ece": "15.49 ± 0.44", "relative_time": 1.0},
    ("ResNet-101", "mc-dropout"): {"mean_iou": "88.08 ± 1.80", "ece": "6.48 ± 0.08", "relative_time": 5.3},
    ("ResNet-101", "deep-ensemble-original"): {
        "mean_iou": "90.40 ± 0.11", "ece": "17.94 ± 0.03", "relative_time": 5.3,
    },
    ("ResNet-101", "deep-ensemble"): {"mean_iou": "87.48 ± 0.09", "ece": "11.52 ± 0.02", "relative_time": 5.3},
    ("ResNet-101", "neuboots"): {"mean_iou": "90.56 ± 1.71", "ece": "6.14 ± 0.11", "relative_time": 2.5},
}  # fmt: skip


def thin_deeplab(channels: int, classes: int, *, depth: int) -> DeepLabV3:
    """At output stride 4 with `depth` blocks in its last, dilated stage: where ResNet-101 is deeper than ResNet-50."""
    return DeepLabV3(
        classes,
        channels,
        blocks=(1, 1, depth),
        widths=(12, 24, 32),
        block="basic",
        stem="small",
        output_stride=4,
        aspp_width=32,
        rates=(2, 4, 6),
    )


@dataclass(frozen=True)
class Segmentation2d(SegmentationStudy):
    """Five methods with two DeepLab-v3 nets on images."""

    name = "segmentation-2d"
    source = "table 4.2 (2D)"
    claim = (
        "With DeepLab-v3 on PASCAL VOC 2012, NeuBoots improves mIoU and ECE over the plain net, to the best of all "
        "methods with either backbone, and predicts faster than MC dropout and the deep ensembles."
    )
    paper = PAPER
    paper_data = "PASCAL VOC 2012"
    calibrated = ("ResNet-50", "ResNet-101")
    makes: ClassVar[Mapping[str, MakeNet]] = {
        "deeplab-thin": lambda channels, classes: thin_deeplab(channels, classes, depth=1),
        "deeplab-thin-deep": lambda channels, classes: thin_deeplab(channels, classes, depth=3),
        "deeplab-resnet50": lambda channels, classes: deeplab_resnet50(classes, channels),
        "deeplab-resnet101": lambda channels, classes: deeplab_resnet101(classes, channels),
    }
    presets: ClassVar = {
        "smoke": {
            "data": "shipped/ink",
            "n": 8,
            "n_test": 4,
            "shrink": 2,
            "epochs": (1, 1),
            "replicates": 2,
            "methods": METHODS[:-1],
            "time_repeats": 1,
            "seeds": (0, 1),
        },
        "cpu": {},
        "paper": {
            "data": "voc2012",
            "nets": ("deeplab-resnet50", "deeplab-resnet101"),
            "epochs": (50, 50),
            "optimizer": "sgd",
            "learning_rates": (0.01, 0.01),
            "batch_size": 16,
            "shrink": 1,
            "seeds": (0, 1, 2, 3, 4),
        },
    }

    data: str = "wbc_segmentation"
    nets: tuple[str, str] = ("deeplab-thin", "deeplab-thin-deep")
    epochs: tuple[int, int] = (5, 5)
    learning_rates: tuple[float, float] = (5e-3, 5e-3)
    shrink: int = 2

    @property
    def note(self) -> str:
        stand_in = "" if self.data == "voc2012" else " PASCAL VOC and the paper's nets belong to the paper's scale."
        return f"{self.training}{stand_in} The paper does not say with which weights its backbones began."
