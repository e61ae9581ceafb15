"""Peak memory of `summarize` and of the calibration metrics, each in a new process.

    python -m benchmarks.memory CASE B [--quick]

prints the bytes by which the process grew at its peak. The kernel's high-water mark (VmHWM) counts everything:
tensors, scratch space of the matrix library and what malloc keeps. It is never reset, hence one process for
each figure; `ru_maxrss` would not do, since a child inherits that of its parent.

Malloc serves blocks above a threshold from the system and gives them back when freed; smaller ones it keeps.
By default the threshold moves with use, so that the mark depends on how the holes between blocks happened to
fit. EXACT holds it fixed: then the mark is what was in use at once, to within a megabyte.
"""

import argparse
import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import measure
from neuboots import NeuBoots, Predictor
from neuboots.evaluation.calibration import evaluate_calibration
from neuboots.evaluation.segmentation import predict_segmentation
from neuboots.methods import NeuBootsPredictor
from neuboots.methods.neuboots import BootstrapGenerator
from neuboots.nets import UResNet, deeplab_resnet50, small_deeplab

EXACT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Case:
    """A net and inputs whose peak is tens of megabytes: far above a page, and B = 1000 in seconds."""

    net: nn.Module
    x: Tensor
    labels: Tensor | None = None  # with labels: not the summary alone, but all figures of its calibration
    window: int | None = None  # with a window: all maps of segmentation

    def work(self, predictor: Predictor, rows: slice, num_samples: int) -> None:
        if self.window is not None:
            predict_segmentation(predictor, self.x[rows], num_samples, window=self.window)
        elif self.labels is None:
            predictor.summarize(self.x[rows], num_samples)
        else:
            data = TensorDataset(self.x[rows], self.labels[rows])
            # in one batch, where everything there is to hold is held at once
            figures = evaluate_calibration(
                predictor, data, num_samples=num_samples, batch_size=len(data), progress=False
            )
            assert figures.metrics["ece"] >= 0


def flat(quick: bool) -> Case:
    """(N, C) outputs."""
    n = 100 if quick else 10_000
    return Case(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 50)), torch.randn(n, 16))


def upsampled(quick: bool) -> Case:
    """(N, C, H, W) outputs: a 1×1 convolution at a quarter of the resolution, then upsampling."""
    side = 16 if quick else 128
    layers = [nn.Conv2d(3, 64, 3, stride=4, padding=1), nn.ReLU(), nn.Conv2d(64, 21, 1)]
    return Case(nn.Sequential(*layers, nn.Upsample(scale_factor=4, mode="bilinear")), torch.randn(2, 3, side, side))


def labelled(quick: bool) -> Case:
    """10,000 inputs of 100 classes."""
    n = 100 if quick else 10_000
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 100))
    return Case(net, torch.randn(n, 16), torch.arange(n) % 100)


def deeplab(quick: bool) -> Case:
    """The net of the paper's table 4.2 on one image."""
    side = 33 if quick else 513
    net = small_deeplab(21) if quick else deeplab_resnet50(21, output_stride=8)
    return Case(net, torch.randn(1, 3, side, side))


def volume(quick: bool) -> Case:
    """A U-ResNet on one volume."""
    side = 8 if quick else 64
    return Case(UResNet(1, 4, widths=(4, 8) if quick else (32, 64, 128, 256)), torch.randn(1, 1, side, side, side))


def tiles(quick: bool) -> Case:
    """A volume as large as the paper's, window by window."""
    size, window = ((16, 16, 8), 8) if quick else ((512, 512, 64), 64)
    return Case(UResNet(1, 6, widths=(4, 8) if quick else (8, 16, 32)), torch.randn(1, 1, *size), window=window)


CASES = {
    "flat": flat,
    "upsampled": upsampled,
    "labelled": labelled,
    "deeplab": deeplab,
    "volume": volume,
    "tiles": tiles,
}


def resident(field: str) -> int:
    """Bytes now (VmRSS) or at the highest (VmHWM); where there is no /proc, the highest for both."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
        return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def extra(case: Case, num_samples: int) -> int:
    """Bytes that the work needed beyond what was there before."""
    predictor = NeuBootsPredictor(BootstrapGenerator(case.net).eval(), NeuBoots().weight_distribution)
    first_window = [slice(case.window)] * (case.x.ndim - 2)  # all of x without a window
    warm = replace(case, x=case.x[(slice(None), slice(None), *first_window)])
    warm.work(predictor, slice(2), 2)  # threads, kernels and their caches are there before we look
    before = resident("VmRSS")
    case.work(predictor, slice(None), num_samples)
    return resident("VmHWM") - before


def peak(case: str, num: int, *, quick: bool, exact: bool) -> float:
    """Bytes at the peak with B = num, in a fresh process."""
    flags = ["--quick"] if quick else []
    return measure.run_python("-m", "benchmarks.memory", case, str(num), *flags, env=EXACT if exact else {})[0]


def growth(case: str, few: int, many: int, *, quick: bool, exact: bool) -> tuple[float, float]:
    """(peak at `many` / peak at `join_names`, peak at `join_names` in megabytes)."""
    peaks = [peak(case, num, quick=quick, exact=exact) for num in (few, many)]
    return peaks[1] / max(1.0, peaks[0]), peaks[0] / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("B", type=int)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(extra(CASES[args.case](args.quick), args.B))


if __name__ == "__main__":
    main()
