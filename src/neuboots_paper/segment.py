"""Segmentation of real images and volumes: labels, where they are unsure, and whether that is where they are wrong.

    mean entropy on wrong pixels / mean entropy on right ones

Paper, section 4.4, on sets that fit a CPU: street scenes (CamVid), white blood cells, and MRI of the hippocampus.
Whatever is printed, written and drawn is measured in the run. Training goes on where it was cut short.
"""

import os
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import Subset

from neuboots._io import write_json
from neuboots.cli._console import UsageError
from neuboots.data import CorruptFileError, DatasetBundle, Standardizer, find_volume_file, load_dataset, read_affine
from neuboots.evaluation._batching import format_table
from neuboots.evaluation.segmentation import SegmentationReport, evaluate_segmentation, predict_segmentation, write_maps
from neuboots.methods import METHODS
from neuboots.nets import UResNet, small_deeplab
from neuboots.prediction import Predictor
from neuboots.training import TrainingConfig

VOID = 255


@dataclass(frozen=True)
class Setting:
    """How a net is trained on one of the sets."""

    model: Callable[[int, int], nn.Module]  # of channels and classes
    epochs: int
    batch_size: int
    learning_rate: float


SETTINGS = {
    "camvid": Setting(lambda channels, classes: small_deeplab(classes, channels), 40, 8, 3e-3),
    "wbc_segmentation": Setting(lambda channels, classes: small_deeplab(classes, channels), 20, 8, 3e-3),
    "hippocampus3d": Setting(lambda channels, classes: UResNet(channels, classes, widths=(16, 32, 64)), 30, 4, 2e-3),
}


@dataclass(frozen=True)
class Segment:
    """Train a network to segment real images or volumes, and show where it is unsure.

    Prints mIoU, Dice, calibration and the uncertainty on right and on wrong pixels of the test part, beside what a
    constant guess gets, and writes the figures and pictures of some test images (for volumes: NIfTI files and slices).
    A few minutes for each set on two CPU cores. The data root is given with --root or the variable NEUBOOTS_DATA.
    """

    data: Literal["camvid", "wbc_segmentation", "hippocampus3d"]
    """Street scenes, white blood cells, or volumes of the hippocampus."""
    root: Path | None = None
    """The folder of data sets."""
    out: Path = Path("neuboots-segmentation")
    """A folder for figures and pictures; each set has a folder of its own in it."""
    methods: tuple[str, ...] = ("neuboots",)
    """Methods by name, such as neuboots plain mc-dropout deep-ensemble; `neuboots methods` lists them."""
    epochs: int | None = None
    """Passes over the training images; a default for each set."""
    num_samples: int = 30
    """Bootstrap replicates B behind each pixel."""
    seed: int = 0
    """Governs the split, the training and the replicates."""
    pictures: int = 4
    """How many test images are drawn, at even distances."""
    limit: int | None = None
    """Only so many training and test images, for a quick look."""

    @property
    def command(self) -> str:
        """The command line that repeats this run."""
        words = ["neuboots", "segment", self.data]
        for name, value in asdict(self).items():
            if name != "data" and value is not None:
                words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
        return shlex.join(words)

    def run(self) -> None:
        """Train, measure, print, and write figures and pictures."""
        self._check()
        from rich import get_console

        try:
            self._run(partial(get_console().print, highlight=False, markup=False, soft_wrap=True))
        except CorruptFileError as fault:  # files are read when they are needed
            raise UsageError(str(fault)) from None

    def _run(self, say: Callable[..., None]) -> None:
        try:
            data = load_dataset(self.data, root=self.root, seed=self.seed)
        except ValueError as fault:  # a missing set says where it was looked for
            raise UsageError(str(fault)) from None
        say(self.command, style="bold")
        test = _first(data.test, self.limit)
        say(f"{data}; B = {self.num_samples}, seed {self.seed}, {torch.get_num_threads()} threads")
        folder = self.out / self.data
        found: dict[str, SegmentationReport] = {}
        for name in self.methods:
            predictor = self._fit(name, data, folder / name / "training")
            found[name] = evaluate_segmentation(
                predictor, test, num_samples=self.num_samples, seed=self.seed, ignore_index=VOID, batch_size=4
            )
            say(f"\n{name}: {found[name]}")
            self._draw(predictor, data, test, folder / name)
            write_json(folder / name / "figures.json", self._row(name, data, found[name]))
        say(f"\n{format_table([_line(name, figures) for name, figures in found.items()])}\n")
        for name, figures in found.items():
            say(f"{name}: {verdict(figures)}")
        say(f"Figures and pictures: {folder}")

    def _fit(self, name: str, data: DatasetBundle, folder: Path) -> Predictor:
        setting = SETTINGS[self.data]
        method = METHODS[name].make(loss=nn.CrossEntropyLoss(ignore_index=VOID))
        config = TrainingConfig(
            epochs=self.epochs or setting.epochs,
            batch_size=setting.batch_size,
            optimizer=partial(torch.optim.AdamW, lr=setting.learning_rate, weight_decay=1e-2),
            seed=self.seed,
            folder=folder,
        )
        model = partial(setting.model, data.channels, data.num_classes)
        try:
            return method.fit(model, _first(data.augmented_train, self.limit), config)
        except ValueError as fault:  # such as a folder that holds the training of other options
            raise UsageError(str(fault)) from None

    def _draw(self, predictor: Predictor, data: DatasetBundle, test: Any, folder: Path) -> None:
        """Maps of some test images, each of its own size."""
        for i in spaced(self.pictures, len(test)):
            x, y = test[i]
            maps = predict_segmentation(predictor, x[None], self.num_samples, seed=self.seed)
            volume = x.ndim == 4
            normalisation = data.standardizer if isinstance(data.standardizer, Standardizer) else None
            name = find_volume_file(data.test, i).name.split(".")[0] if volume else f"{self.data}-{i:04d}"
            write_maps(
                maps,
                x[None],
                folder / "pictures",
                names=[name],
                labels=y[None],
                ignore_index=VOID,
                class_names=data.classes,
                normalization=normalisation,
                affine=read_affine(data.test, i) if volume else None,
            )

    def _row(self, name: str, data: DatasetBundle, found: SegmentationReport) -> dict[str, Any]:
        return {
            "command": self.command,
            "data": self.data,
            "method": name,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "epochs": self.epochs or SETTINGS[self.data].epochs,
            "threads": torch.get_num_threads(),
            "classes": list(data.classes),
            "figures": found.metrics,
            "majority": found.majority,
        }

    def _check(self) -> None:
        for name, least in (("epochs", 1), ("num_samples", 1), ("pictures", 0), ("limit", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < 2**63:
                raise UsageError(f"--{name.replace('_', '-')} is {value}; give a whole number of at least {least}")
        able = [name for name, entry in METHODS.items() if "segmentation" in entry.tasks]
        unknown = [name for name in self.methods if name not in able]
        if unknown or not self.methods:
            raise UsageError(f"--methods is {' '.join(self.methods) or 'empty'}; give some of {', '.join(able)}")
        there = next(path for path in (self.out, *self.out.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UsageError(f"--out is {self.out}, but {there} is no folder that can be written to; give another one")


def verdict(found: SegmentationReport) -> str:
    """Whether the labels beat a constant guess and the uncertainty tells right pixels from wrong ones, in words."""
    constant, ratio = found.majority, found.entropy_ratio
    better = found.error < constant["error"] / 2 and found.mean_iou > 1.5 * constant["mean_iou"]
    labels = (
        f"mIoU {found.mean_iou:.1%} against {constant['mean_iou']:.1%} of the commonest class, pixel error "
        f"{found.error:.1%} against {constant['error']:.1%}: {'clearly better' if better else 'NOT clearly better'}"
    )
    if ratio is None:
        return f"{labels}; there are no wrong pixels, or no right ones, to compare the entropy on."
    holds = "at least twice that" if ratio >= 2 else "LESS than twice that"
    return f"{labels}; mean entropy on wrong pixels is {ratio:.1f} × that on right ones, {holds}."


_SHOWN = (
    "mean_iou", "mean_dice", "error", "ece", "nll", "entropy_right", "entropy_wrong", "entropy_ratio", "entropy_auroc",
    "entropy_border_ratio", "mutual_information_ratio", "relative_time",
)  # fmt: skip


def _line(name: str, found: SegmentationReport) -> dict[str, Any]:
    figures = found.metrics
    return {"method": name} | {key: figures[key] for key in _SHOWN}


def spaced(count: int, total: int) -> list[int]:
    """So many of the numbers 0 … total − 1, or all, from the first to the last at even distances.

    >>> spaced(4, 11), spaced(9, 3), spaced(1, 5)
    ([0, 3, 6, 10], [0, 1, 2], [0])
    """
    count = min(count, total)
    return [i * (total - 1) // max(1, count - 1) for i in range(count)]


def _first(part: Any, limit: int | None) -> Any:
    return part if limit is None else Subset(part, range(min(limit, len(part))))
