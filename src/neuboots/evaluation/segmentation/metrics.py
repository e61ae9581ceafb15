"""Metrics of label and uncertainty maps over labeled images.

    ratio = mean H over wrong pixels / mean H over correct ones
    AUROC = P(H_wrong > H_correct) + ½ P(H_wrong = H_correct)

besides mean IoU and ECE, as in the paper's table 4.2 (section 4.4). Only sums and counts are stored. For the AUROC,
pixels are counted by the first 9 binary digits of their uncertainty; values that differ by less than 0.4 % count as
equal. The baselines are constant predictions, known from the label counts alone: labels of the majority class,
probabilities of the class frequencies.

Shin, Cho, Min and Lim, Neural bootstrapper, NeurIPS 2021.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from neuboots._validation import ArgumentError, check_int
from neuboots.evaluation._batching import (
    LabeledData,
    align_labels,
    check_any_counted,
    check_predictor,
    format_table,
    iter_batches,
)
from neuboots.evaluation.segmentation.predict import SegmentationMaps, Window, clip_window, predict_segmentation
from neuboots.metrics import ConfusionMatrix, MetricState, SegmentationMetrics
from neuboots.prediction import Predictor

UNCERTAINTY_MEASURES = ("entropy", "mutual_information", "std")

_DROPPED_BITS = 15  # of a positive float32, whose order is that of its bits as an integer
_NUM_LEVELS = 1 << (31 - _DROPPED_BITS)
_MAX_PIXELS = 1 << 18  # whose metrics are computed at once


@dataclass(frozen=True, eq=False)
class UncertaintySums(MetricState):
    """Sums of the three uncertainties over correct and wrong pixels, inside and at label boundaries.

    Attributes:
        totals: Sums by uncertainty, correct or wrong, inside or boundary: (3, 2, 2).
        counts: Number of pixels: (2, 2).
        levels: Number of pixels, correct or wrong, at each level of an uncertainty: (3, 2, K).
    """

    totals: Tensor
    counts: Tensor
    levels: Tensor

    @classmethod
    def from_pixels(cls, values: Tensor, wrong: Tensor, boundary: Tensor) -> Self:
        """Return the sums of uncertainties (3, P) of P pixels, which are wrong (P,) or at a boundary (P,)."""
        group = 2 * wrong.long() + boundary.long()  # (P,)
        level = (values.float().clamp_min(0) + 0.0).view(torch.int32).long() >> _DROPPED_BITS  # (3, P); −0 + 0 = 0
        sums = [torch.bincount(group, value.double(), minlength=4).double() for value in values]
        counted = [torch.bincount(_NUM_LEVELS * wrong.long() + one, minlength=2 * _NUM_LEVELS) for one in level]
        return cls(
            torch.stack(sums).view(len(values), 2, 2),
            torch.bincount(group, minlength=4).view(2, 2),
            torch.stack(counted).view(len(values), 2, _NUM_LEVELS),
        )

    @property
    def means(self) -> dict[str, Tensor]:
        """Means over pixels by their kind, their ratios, and the AUROC of wrong against correct ones: (3,) each.

        They are not finite if there are no such pixels.
        """
        right, wrong = (self.totals.sum(2) / self.counts.sum(1)).unbind(1)
        inside, border = (self.totals.sum(1) / self.counts.sum(0)).unbind(1)
        correct, incorrect = self.levels.double().unbind(1)  # (3, K), (3, K)
        pairs = (incorrect * (correct.cumsum(1) - correct / 2)).sum(1)
        return {
            "": self.totals.sum((1, 2)) / self.counts.sum(),
            "_right": right,
            "_wrong": wrong,
            "_ratio": wrong / right,
            "_auroc": pairs / (correct.sum(1) * incorrect.sum(1)),
            "_border": border,
            "_inside": inside,
            "_border_ratio": border / inside,
        }


def find_boundaries(labels: Tensor, *, ignore_index: int) -> Tensor:
    """Find the pixels with two labels or more in the 3 × 3 (× 3) pixels around them.

    Args:
        labels: (N, *).
        ignore_index: Label of pixels that do not count.

    Returns:
        Whether each pixel is at a boundary: (N, *).

    Example:
        >>> find_boundaries(torch.tensor([[0, 0, 0, 1, 255, 0]]), ignore_index=255).int()
        tensor([[0, 0, 1, 1, 0, 0]], dtype=torch.int32)
    """
    ignored = labels == ignore_index
    max_pool = getattr(functional, f"max_pool{labels.ndim - 1}d")
    signed = (part.float().masked_fill(ignored, -torch.inf) for part in (labels, -labels))
    highest, lowest = (max_pool(part[:, None], 3, 1, 1)[:, 0] for part in signed)
    boundary: Tensor = (highest > -lowest) & ~ignored
    return boundary


@dataclass(frozen=True, eq=False)
class SegmentationReport(MetricState):
    """Metrics over labeled images, as returned by `evaluate_segmentation`. Reports of several images add up.

    Attributes:
        pixels: Metrics of the labels and probabilities; pixels with `ignore_index` do not count.
        uncertainty: Sums of the uncertainties.
        image_count: Number of images: ().
        total_seconds: Time of prediction: ().
        num_samples: Number of replicates B.
        seed: Seed.

    Example:
        >>> values = torch.tensor([[[0.3, 0.5]]])
        >>> maps = SegmentationMaps(torch.tensor([[[[0.9, 0.2]], [[0.1, 0.8]]]]), values, values, values, 5, 0)
        >>> report = SegmentationReport.from_maps(maps, torch.tensor([[[0, 0]]]))
        >>> report.count, report.metrics["error"], report.majority["error"], round(report.metrics["entropy_ratio"], 3)
        (2, 0.5, 0.0, 1.667)
    """

    pixels: SegmentationMetrics
    uncertainty: UncertaintySums
    image_count: Tensor
    total_seconds: Tensor
    num_samples: int
    seed: int

    @classmethod
    def from_maps(
        cls,
        maps: SegmentationMaps,
        labels: Tensor,
        *,
        ignore_index: int | None = 255,
        num_bins: int = 15,
        seconds: float = 0.0,
    ) -> Self:
        """Return the metrics of the maps of N images, given labels (N, *).

        Args:
            maps: Maps of the images.
            labels: (N, *).
            ignore_index: Label of pixels that do not count; None: all count.
            num_bins: Number of bins of the calibration error.
            seconds: Time of the prediction.

        Returns:
            The report.
        """
        labels = align_labels(maps.probs, labels, ignore_index=ignore_index)
        ignore_index = -1 if ignore_index is None else check_int("ignore_index", ignore_index)  # −1 is no label now
        boundary = find_boundaries(labels, ignore_index=ignore_index)
        measures = torch.stack([getattr(maps, name) for name in UNCERTAINTY_MEASURES])  # (3, N, *)
        parts = (maps.probs.flatten(2), labels.flatten(1), boundary.flatten(1), measures.flatten(2))  # pixels last
        width = max(1, _MAX_PIXELS // len(labels))
        pixels: Any = 0
        uncertainty: Any = 0
        for probs, y, edge, values in zip(*(torch.split(part, width, -1) for part in parts), strict=True):
            pixels += SegmentationMetrics.from_batch(probs, y, ignore_index=ignore_index, num_bins=num_bins)
            counted = y != ignore_index
            wrong = (probs.argmax(1) != y)[counted]
            uncertainty += UncertaintySums.from_pixels(values[:, counted], wrong, edge[counted])
        images, total = torch.tensor(len(labels)), torch.tensor(seconds, dtype=torch.float64)
        return cls(pixels, uncertainty, images, total, maps.num_samples, maps.seed)

    @property
    def count(self) -> int:
        """Number of pixels that count."""
        return self.pixels.count

    @property
    def num_images(self) -> int:
        """Number of images."""
        return int(self.image_count)

    @property
    def mean_iou(self) -> float:
        """Mean IoU over the classes that occur as a label or as a prediction."""
        return float(self.pixels.mean_iou)

    @property
    def majority(self) -> dict[str, float]:
        """Metrics of constant predictions: labels of the majority class, probabilities of the class frequencies."""
        counts = self.pixels.confusion_matrix.sum(1)  # (C,)
        matrix = torch.zeros_like(self.pixels.confusion_matrix)
        matrix[:, counts.argmax()] = counts
        constant, frequencies = ConfusionMatrix(matrix), counts.double() / counts.sum()
        return {
            "mean_iou": float(constant.mean_iou),
            "mean_dice": _mean_dice(constant),
            "error": 1 - float(frequencies.max()),
            "ece": 0.0,
            "nll": float(-torch.xlogy(frequencies, frequencies).sum()),
            "brier": 1 - float(frequencies.square().sum()),
        }

    @property
    def seconds(self) -> float:
        """Mean time of predicting one image."""
        return float(self.total_seconds / self.image_count)

    @property
    def metrics(self) -> dict[str, Any]:
        """All metrics by name, as JSON values; None if undefined. Uncertainties are means over pixels."""
        names = ("mean_iou", "error", "ece", "mce", "nll", "brier")
        counts, means = self.uncertainty.counts, self.uncertainty.means
        inside, border = (counts[1] / counts.sum(0)).tolist()
        found = {name: float(getattr(self.pixels, name)) for name in names} | {"mean_dice": _mean_dice(self.pixels)}
        found |= {f"{n}{end}": float(means[end][k]) for k, n in enumerate(UNCERTAINTY_MEASURES) for end in means}
        found |= {"error_border": border, "error_inside": inside}
        found |= {"border_fraction": float(counts[:, 1].sum() / counts.sum()), "seconds": self.seconds}
        defined = {name: value if math.isfinite(value) else None for name, value in found.items()}
        occurs = self.pixels.occurs.tolist()
        by_class = {name: zip(getattr(self.pixels, name).tolist(), occurs, strict=True) for name in ("iou", "dice")}
        return defined | {name: [v if there else None for v, there in pairs] for name, pairs in by_class.items()}

    def __str__(self) -> str:
        metrics, constant = self.metrics, self.majority
        labels = [{"metric": name, "value": metrics[name], "majority": constant[name]} for name in constant]
        columns = ("right", "wrong", "ratio", "auroc", "inside", "border", "border_ratio")
        rows = [{"uncertainty": n} | {c: metrics[f"{n}_{c}"] for c in columns} for n in UNCERTAINTY_MEASURES]
        rows.append({"uncertainty": "error", "inside": metrics["error_inside"], "border": metrics["error_border"]})
        head = f"N = {self.num_images:,} images, {self.count:,} pixels, B = {self.num_samples}, seed = {self.seed}"
        return "\n".join([head, format_table(labels), "", format_table(rows), "", f"{self.seconds:.3g} s per image"])


def _mean_dice(confusion: ConfusionMatrix) -> float:
    return float(confusion.f1[confusion.occurs].mean())


def evaluate_segmentation(
    predictor: Predictor,
    data: LabeledData,
    *,
    num_samples: int = 100,
    seed: int = 0,
    ignore_index: int | None = 255,
    window: Window = None,
    overlap: float = 0.25,
    batch_size: int = 1,
    num_bins: int = 15,
    progress: bool = True,
) -> SegmentationReport:
    """Compute mIoU, Dice, ECE, time, and the uncertainty of correct and wrong pixels, over labeled images.

    Args:
        predictor: Predictor of any method.
        data: Data set of images and masks, or a loader; images may have several sizes.
        num_samples: Number of replicates B.
        seed: Seed of the replicates.
        ignore_index: Label of pixels that do not count; None: all count.
        window: Pixels that the net sees at a time; see `predict_segmentation`.
        overlap: Minimum fraction of a window that neighbors share.
        batch_size: Consecutive images of one size, or windows of one image, per batch.
        num_bins: Number of bins of the calibration error.
        progress: Whether to show a progress bar.

    Returns:
        The report.

    Raises:
        ArgumentError: If masks do not have the size of their images, or no pixel counts.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> x = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> net = torch.nn.Conv2d(2, 2, 1)
        >>> _ = net.load_state_dict({"weight": 9 * torch.eye(2).view(2, 2, 1, 1), "bias": torch.zeros(2)})
        >>> data = TensorDataset(x, x.argmax(1))
        >>> report = evaluate_segmentation(DeterministicPredictor(net), data, num_samples=1, progress=False)
        >>> report.mean_iou, report.count, round(report.majority["mean_iou"], 2)
        (1.0, 256, 0.25)
    """
    check_predictor(predictor)
    check_int("batch_size", batch_size, minimum=1)
    options: dict[str, Any] = {"seed": seed, "window": window, "overlap": overlap, "batch_size": batch_size}
    total: SegmentationReport | int = 0
    for x, y in _iter_images(data, batch_size, window, overlap, progress):
        start = time.perf_counter()
        maps = predict_segmentation(predictor, x, num_samples, **options)  # on the CPU: a GPU has finished
        seconds = time.perf_counter() - start
        total = total + SegmentationReport.from_maps(
            maps, y, ignore_index=ignore_index, num_bins=num_bins, seconds=seconds
        )
    assert isinstance(total, SegmentationReport), "iter_batches gives at least one batch"
    check_any_counted(total.count, ignore_index)
    return total


def _iter_images(
    data: LabeledData, batch_size: int, window: Window, overlap: float, progress: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of images (N, C, *) of one size and their masks (N, *); images larger than the window one by one."""
    batches = iter_batches(data, 1, title="segmentation", progress=progress)
    rows = (row for x, y in batches for row in zip(*_as_images(x, y), strict=True))
    for shape, group in groupby(rows, key=lambda row: tuple(row[0].shape[1:])):
        fits = window is None or clip_window(shape, window, overlap=overlap) == shape
        while chunk := list(islice(group, batch_size if fits else 1)):
            yield torch.stack([x for x, _ in chunk]), torch.stack([y for _, y in chunk])


def _as_images(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A batch, or a single example as a batch of one, with masks (N, *)."""
    for images, masks in ((x, y), (x[None], y[None])):
        shape = (len(images), *images.shape[2:])
        if images.ndim in (4, 5) and masks.shape in (shape, (shape[0], 1, *shape[1:])):
            return images, masks.reshape(shape)
    got = f"images {tuple(x.shape)} and masks {tuple(y.shape)}"
    raise ArgumentError("data", got, "images (N, C, *) and masks (N, *) of the same size")
