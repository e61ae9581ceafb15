"""The command `neuboots segment`: segmentation of real images and volumes with uncertainty.

    entropy ratio = mean entropy on wrong pixels / mean entropy on right ones

Section 4.4 of the paper on datasets that fit a CPU: street scenes (CamVid), white blood cells, and MRI of the
hippocampus. An interrupted training resumes.
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

from neuboots.cli import UsageError
from neuboots.cli._console import echo_rich as echo
from neuboots.data import (
    CorruptFileError,
    DatasetBundle,
    Standardizer,
    find_volume_file,
    load_dataset,
    read_affine,
)
from neuboots.evaluation._batching import format_table
from neuboots.evaluation.segmentation import (
    SegmentationReport,
    evaluate_segmentation,
    predict_segmentation,
    write_maps,
)
from neuboots.methods import list_methods
from neuboots.nets import UResNet, small_deeplab
from neuboots.prediction import Predictor
from neuboots.serialization import write_json
from neuboots.training import TrainingConfig
from neuboots_paper._common import make_method

IGNORE_INDEX = 255


@dataclass(frozen=True)
class TrainingSetting:
    """Net and training of one dataset."""

    model: Callable[[int, int], nn.Module]  # of channels and classes
    epochs: int
    batch_size: int
    learning_rate: float


SETTINGS = {
    "camvid": TrainingSetting(lambda channels, classes: small_deeplab(classes, channels), 40, 8, 3e-3),
    "wbc_segmentation": TrainingSetting(lambda channels, classes: small_deeplab(classes, channels), 20, 8, 3e-3),
    "hippocampus3d": TrainingSetting(
        lambda channels, classes: UResNet(channels, classes, widths=(16, 32, 64)), 30, 4, 2e-3
    ),
}


@dataclass(frozen=True)
class Segment:
    """Train a network to segment real images or volumes, and show where it is uncertain.

    Prints mIoU, Dice, calibration and the uncertainty on right and wrong pixels of the test split, beside those of a
    constant prediction, and writes metrics and label and uncertainty maps of some test images (for volumes: NIfTI files
    and slices). Takes a few minutes per dataset on two CPU cores.
    """

    data: Literal["camvid", "wbc_segmentation", "hippocampus3d"]
    """Street scenes, white blood cells, or volumes of the hippocampus."""
    root: Path | None = None
    """Folder of datasets (default: the environment variable NEUBOOTS_DATA)."""
    out: Path = Path("neuboots-segmentation")
    """Folder for metrics and pictures; each dataset has a folder in it."""
    methods: tuple[str, ...] = ("neuboots",)
    """Names of methods, such as neuboots deterministic mc-dropout deep-ensemble; `neuboots list methods` lists them."""
    epochs: int | None = None
    """Epochs (default: depends on the dataset)."""
    num_samples: int = 30
    """Number B of bootstrap replicates."""
    seed: int = 0
    """Seed of the split, the training and the replicates."""
    pictures: int = 4
    """Number of test images to write, evenly spaced."""
    limit: int | None = None
    """Maximum number of training and test images, for a quick look."""

    @property
    def command(self) -> str:
        """Command line that repeats this run."""
        words = ["neuboots", "segment", self.data]
        for name, value in asdict(self).items():
            if name != "data" and value is not None:
                words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
        return shlex.join(words)

    def run(self) -> None:
        """Train, evaluate, print and write."""
        self._check()
        try:
            self._run()
        except (CorruptFileError, ValueError) as error:  # a missing dataset, or a folder of other options
            raise UsageError(str(error)) from None

    def _run(self) -> None:
        data = load_dataset(self.data, root=self.root, seed=self.seed)
        echo(self.command, style="bold")
        test = _first(data.test, self.limit)
        echo(f"{data}; B = {self.num_samples}, seed {self.seed}, {torch.get_num_threads()} threads")
        folder = self.out / self.data
        reports: dict[str, SegmentationReport] = {}
        for name in self.methods:
            predictor = self._fit(name, data, folder / name / "training")
            reports[name] = report = evaluate_segmentation(
                predictor, test, num_samples=self.num_samples, seed=self.seed, ignore_index=IGNORE_INDEX, batch_size=4
            )
            echo(f"\n{name}: {report}")
            self._write_pictures(predictor, data, test, folder / name)
            write_json(folder / name / "metrics.json", self._result(name, data, report))
        rows = [{"method": name} | {key: report.metrics[key] for key in _COLUMNS} for name, report in reports.items()]
        echo(f"\n{format_table(rows)}\n")
        for name, report in reports.items():
            echo(f"{name}: {summarize_report(report)}")
        echo(f"Metrics and pictures: {folder}")

    def _fit(self, name: str, data: DatasetBundle, folder: Path) -> Predictor:
        setting = SETTINGS[self.data]
        method = make_method(name, loss=nn.CrossEntropyLoss(ignore_index=IGNORE_INDEX))
        config = TrainingConfig(
            epochs=self.epochs or setting.epochs,
            batch_size=setting.batch_size,
            optimizer=partial(torch.optim.AdamW, lr=setting.learning_rate, weight_decay=1e-2),
            seed=self.seed,
            folder=folder,
        )
        model = partial(setting.model, data.channels, data.num_classes)
        return method.fit(model, _first(data.augmented_train, self.limit), config)

    def _write_pictures(self, predictor: Predictor, data: DatasetBundle, test: Any, folder: Path) -> None:
        for i in spaced(self.pictures, len(test)):
            x, y = test[i]
            is_volume = x.ndim == 4
            write_maps(
                predict_segmentation(predictor, x[None], self.num_samples, seed=self.seed),
                x[None],
                folder / "pictures",
                names=[find_volume_file(data.test, i).name.split(".")[0] if is_volume else f"{self.data}-{i:04d}"],
                labels=y[None],
                ignore_index=IGNORE_INDEX,
                class_names=data.classes,
                normalization=data.standardizer if isinstance(data.standardizer, Standardizer) else None,
                affine=read_affine(data.test, i) if is_volume else None,
            )

    def _result(self, name: str, data: DatasetBundle, report: SegmentationReport) -> dict[str, Any]:
        return {
            "command": self.command,
            "data": self.data,
            "method": name,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "epochs": self.epochs or SETTINGS[self.data].epochs,
            "threads": torch.get_num_threads(),
            "classes": list(data.classes),
            "metrics": report.metrics,
            "majority": report.majority,
        }

    def _check(self) -> None:
        for name, minimum in (("epochs", 1), ("num_samples", 1), ("pictures", 0), ("limit", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and not minimum <= value < 2**63:
                raise UsageError(f"--{name.replace('_', '-')} is {value}; expected an integer of at least {minimum}")
        supported = list_methods("segmentation")
        if not self.methods or not set(self.methods) <= set(supported):
            got = " ".join(self.methods) or "empty"
            raise UsageError(f"--methods is {got}; expected some of {', '.join(supported)}")
        existing = next(path for path in (self.out, *self.out.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise UsageError(f"--out is {self.out}, but {existing} is not a writable folder; choose another one")


_COLUMNS = (
    *("mean_iou", "mean_dice", "error", "ece", "nll", "entropy_right", "entropy_wrong", "entropy_ratio"),
    *("entropy_auroc", "entropy_border_ratio", "mutual_information_ratio"),
)


def summarize_report(report: SegmentationReport) -> str:
    """Compare the labels with a constant prediction, and the entropy on wrong pixels with that on right ones."""
    constant, ratio, error = report.majority, report.metrics["entropy_ratio"], report.metrics["error"]
    better = error < constant["error"] / 2 and report.mean_iou > 1.5 * constant["mean_iou"]
    labels = (
        f"mIoU {report.mean_iou:.1%} against {constant['mean_iou']:.1%} of the majority class, pixel error "
        f"{error:.1%} against {constant['error']:.1%}: {'clearly better' if better else 'NOT clearly better'}"
    )
    if ratio is None:
        return f"{labels}; all pixels are right, or all are wrong, so that there is no entropy ratio."
    comparison = "at least twice that" if ratio >= 2 else "LESS than twice that"
    return f"{labels}; mean entropy on wrong pixels is {ratio:.1f} × that on right ones, {comparison}."


def spaced(count: int, total: int) -> list[int]:
    """Evenly spaced indices from 0 to total − 1; all of them if there are fewer than `count`.

    Example:
        >>> spaced(4, 11), spaced(9, 3), spaced(1, 5)
        ([0, 3, 6, 10], [0, 1, 2], [0])
    """
    count = min(count, total)
    return [i * (total - 1) // max(1, count - 1) for i in range(count)]


def _first(split: Any, limit: int | None) -> Any:
    return split if limit is None else Subset(split, range(min(limit, len(split))))
