"""Table 4.2, lower half: segmentation of volumes with U-ResNet and SCNAS.

    p(y | x) = 1/B Σ_b softmax(W (α_b ⊙ φ(x)) + b),     φ the features before the last 1×1×1 convolution

The volumes of the paper, cells (NIH3T3) in a commercial microscope, are not public; MRI of the hippocampus is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from neuboots.nets import UResNet
from neuboots_paper.scnas.net import SCNAS
from neuboots_paper.studies.segmentation_common import MakeNet, SegmentationStudy
from neuboots_paper.study import load_published


@dataclass(frozen=True)
class Segmentation3d(SegmentationStudy):
    """Five methods with two U-net-like nets on volumes."""

    name = "segmentation-3d"
    source = "table 4.2 (3D)"
    requires = ("monai",)
    claim = (
        "On volumes NeuBoots improves mIoU and ECE over the plain net with U-ResNet and with SCNAS; its mIoU is the "
        "best of all methods, with SCNAS its ECE too; and it predicts faster than MC dropout and the deep ensembles."
    )
    paper = load_published("segmentation-3d")
    paper_data = "NIH3T3 cells"
    calibrated = ("SCNAS",)
    makes: ClassVar[Mapping[str, MakeNet]] = {
        "uresnet": UResNet,
        "uresnet-tiny": lambda channels, classes: UResNet(channels, classes, widths=(4, 8)),
        "uresnet-small": lambda channels, classes: UResNet(channels, classes, widths=(16, 32, 64)),
        "scnas": SCNAS,
        "scnas-tiny": lambda channels, classes: SCNAS(channels, classes, width=2, levels=1),
        "scnas-small": lambda channels, classes: SCNAS(channels, classes, width=8, levels=2),
    }

    data: str = "hippocampus3d"
    nets: tuple[str, str] = ("uresnet-small", "scnas-small")
    epochs: tuple[int, int] = (5, 4)
    learning_rates: tuple[float, float] = (5e-3, 2e-2)
    batch_size: int = 2
    shrink: int = 3

    @property
    def note(self) -> str:
        return (
            f"{self.training} The paper's volumes of NIH3T3 cells are not public, so that no scale has them: its "
            "values are shown for the order of the methods only. The cells of SCNAS are those of our own search."
        )
