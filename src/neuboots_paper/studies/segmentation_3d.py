"""Table 4.2, lower half: segmentation of volumes with U-ResNet and SCNAS.

    p(y | x) = 1/B Σ_b softmax(W (α_b ⊙ φ(x)) + b),     φ the features before the last 1×1×1 convolution

The volumes of the paper, cells (NIH3T3) in a commercial microscope, are not public: MRI of the hippocampus stands in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from neuboots.nets import UResNet
from neuboots.report.tables import PaperValues
from neuboots_paper.scnas.net import SCNAS
from neuboots_paper.studies.segmentation_common import METHODS, MakeNet, SegmentationStudy

PAPER: PaperValues = {
    ("U-ResNet", "plain"): {"mean_iou": "61.54 ± 1.14", "ece": "1.85 ± 0.19", "relative_time": 1.0},
    ("U-ResNet", "mc-dropout"): {"mean_iou": "64.15 ± 0.48", "ece": "1.53 ± 0.09", "relative_time": 5.5},
    ("U-ResNet", "deep-ensemble-original"): {"mean_iou": "59.71 ± 1.82", "ece": "1.78 ± 0.29", "relative_time": 5.5},
    ("U-ResNet", "deep-ensemble"): {"mean_iou": "65.71 ± 1.69", "ece": "0.94 ± 0.24", "relative_time": 5.5},
    ("U-ResNet", "neuboots"): {"mean_iou": "67.78 ± 1.01", "ece": "1.67 ± 0.19", "relative_time": 3.5},
    ("SCNAS", "plain"): {"mean_iou": "67.52 ± 1.95", "ece": "1.45 ± 0.19", "relative_time": 1.0},
    ("SCNAS", "mc-dropout"): {"mean_iou": "65.37 ± 1.13", "ece": "0.64 ± 0.17", "relative_time": 5.2},
    ("SCNAS", "deep-ensemble-original"): {"mean_iou": "60.04 ± 2.11", "ece": "1.39 ± 0.05", "relative_time": 5.3},
    ("SCNAS", "deep-ensemble"): {"mean_iou": "68.66 ± 2.58", "ece": "0.83 ± 0.09", "relative_time": 5.3},
    ("SCNAS", "neuboots"): {"mean_iou": "70.80 ± 1.58", "ece": "0.63 ± 0.16", "relative_time": 2.1},
}


@dataclass(frozen=True)
class Segmentation3d(SegmentationStudy):
    """Five methods with two U-net-like nets on volumes."""

    name = "segmentation-3d"
    source = "table 4.2 (3D)"
    claim = (
        "On volumes NeuBoots improves mIoU and ECE over the plain net with U-ResNet and with SCNAS; its mIoU is the "
        "best of all methods, with SCNAS its ECE too; and it predicts faster than MC dropout and the deep ensembles."
    )
    paper = PAPER
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
    presets: ClassVar = {
        "smoke": {
            "data": "shipped/balls",
            "nets": ("uresnet-tiny", "scnas-tiny"),
            "n": 4,
            "n_test": 4,
            "shrink": 2,
            "epochs": (1, 1),
            "batch_size": 4,
            "replicates": 2,
            "methods": METHODS[:-1],
            "time_repeats": 1,
            "seeds": (0, 1),
        },
        "cpu": {},
        "paper": {
            "nets": ("uresnet", "scnas"),
            "epochs": (200, 200),
            "learning_rates": (2e-3, 2e-3),
            "batch_size": 4,
            "shrink": 1,
            "seeds": (0, 1, 2, 3, 4),
        },
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
            "figures stand beside ours for the order of the methods alone. The cells of SCNAS are those that our own "
            "search found."
        )
