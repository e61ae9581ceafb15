"""Table 4.2, upper half: segmentation of images with DeepLab-v3 on two backbones.

    p(y | x) = 1/B Σ_b softmax up(W (α_b ⊙ φ(x)) + b),     φ the features after atrous spatial pyramid pooling

The weights of NeuBoots multiply the channels of the features before the last 1×1 convolution, so that all B replicates
need one pass through the net.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from neuboots.nets import DeepLabV3, deeplab_resnet50, deeplab_resnet101
from neuboots_paper.studies.segmentation_common import MakeNet, SegmentationStudy
from neuboots_paper.study import load_published


def thin_deeplab(channels: int, classes: int, *, depth: int) -> DeepLabV3:
    """A small DeepLab with output stride 4 and `depth` blocks in its last stage, in which ResNet-50 and 101 differ."""
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
    paper = load_published("segmentation-2d")
    paper_data = "PASCAL VOC 2012"
    calibrated = ("ResNet-50", "ResNet-101")
    makes: ClassVar[Mapping[str, MakeNet]] = {
        "deeplab-thin": lambda channels, classes: thin_deeplab(channels, classes, depth=1),
        "deeplab-thin-deep": lambda channels, classes: thin_deeplab(channels, classes, depth=3),
        "deeplab-resnet50": lambda channels, classes: deeplab_resnet50(classes, channels),
        "deeplab-resnet101": lambda channels, classes: deeplab_resnet101(classes, channels),
    }

    data: str = "wbc_segmentation"
    nets: tuple[str, str] = ("deeplab-thin", "deeplab-thin-deep")
    epochs: tuple[int, int] = (5, 5)
    learning_rates: tuple[float, float] = (5e-3, 5e-3)
    shrink: int = 2

    @property
    def note(self) -> str:
        stand_in = "" if self.data == "voc2012" else " PASCAL VOC and the paper's nets belong to the paper's scale."
        return f"{self.training}{stand_in} The paper does not state the initial weights of its backbones."
