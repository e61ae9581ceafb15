"""Evaluation report of a segmentation; pixels without a label are ignored."""

from collections.abc import Mapping
from typing import Any

import torch

from neuboots.evaluation.segmentation.metrics import UNCERTAINTY_MEASURES, SegmentationReport
from neuboots.report.checks import Check, decide
from neuboots.report.evaluation import (
    MARGIN,
    EvaluationReport,
    Reference,
    data_topic,
    format_count,
    make_plot,
    metrics_table,
)
from neuboots.report.section import Section
from neuboots.report.tables import format_percent, make_table

_MAX_PLOTTED_CLASSES = 12
_LABELS = {
    "mean_iou": "mean IoU",
    "mean_dice": "mean Dice",
    "error": "pixel error",
    "nll": "log loss, nats",
    "brier": "Brier score",
    "ece": "calibration error, ECE",
    "accepted": "images accepted",
}


def build_segmentation_report(
    pixels: SegmentationReport, columns: Mapping[str, Any], names: tuple[str, ...], reference: Reference
) -> EvaluationReport:
    """Build the report of label maps.

    Args:
        pixels: Metrics accumulated over all pixels.
        columns: Columns `abstain` and `ood_score` of the images.
        names: Names of the classes.
        reference: Results at training time.

    Returns:
        The report.
    """
    count = pixels.num_images
    metrics = {name: value for name, value in pixels.metrics.items() if name != "seconds"}
    metrics |= {"pixels": pixels.count, "accepted": 1 - float(columns["abstain"].mean())}
    metrics["ood_fraction"] = float((columns["ood_score"] > 1).mean())
    sizes = pixels.pixels.confusion_matrix.sum(1).tolist()
    classes = [
        {"class": name, "pixels": size, "iou": iou, "dice": dice}
        for name, size, iou, dice in zip(names, sizes, metrics["iou"], metrics["dice"], strict=True)
        if iou is not None
    ]
    details = {"classes": classes, "confusion": pixels.pixels.confusion_matrix.tolist()}
    uncertainty = [
        {
            "uncertainty": name,
            **{column: metrics[f"{name}_{column}"] for column in ("right", "wrong", "ratio", "auroc")},
        }
        for name in UNCERTAINTY_MEASURES
    ]
    title = f"{format_count(count, 'image')}, {pixels.count:,} labeled pixels, {len(names)} classes."
    ece_check = Check(
        "the confidence equals the accuracy",
        decide(metrics["ece"] < MARGIN, metrics["ece"] > 0.1),
        f"calibration error {format_percent(metrics['ece'])} over pixels",
    )
    plots = {"confusion": make_plot("plot_confusion", names, pixels.pixels.confusion_matrix)}
    topics = [
        Section(
            "masks",
            "How well are pixels classified?",
            tables=(
                metrics_table(title, _LABELS, metrics, pixels.majority, reference.metrics, {}),
                make_table("Classes.", classes),
            ),
            checks=tuple(_check_iou(pixels.mean_iou, pixels.majority["mean_iou"], reference.metrics)),
            plots=plots if len(names) <= _MAX_PLOTTED_CLASSES else {},
        ),
        Section(
            "uncertainty",
            "Does the confidence equal the accuracy, and are wrong pixels less confident?",
            tables=(make_table("Uncertainty of right and wrong pixels, means.", uncertainty),),
            checks=(ece_check, _check_error_detection(metrics["entropy_ratio"], metrics["entropy_auroc"])),
            plots={"reliability": make_plot("plot_reliability", {"the model": pixels.pixels.reliability_curve})},
        ),
        data_topic({"images": torch.from_numpy(columns["ood_score"])}, count, reference),
    ]
    return EvaluationReport(count, metrics, pixels.majority, details, topics)


def _check_iou(iou: float, majority: float, training: Mapping[str, Any]) -> list[Check]:
    """Compare with the majority class and the test split; pixels are dependent, so there is no interval."""
    evidence = f"mIoU {format_percent(iou)} against {format_percent(majority)} of the majority class"
    checks = [Check("better than a constant prediction (mIoU)", iou > majority, evidence)]
    before = training.get("mean_iou")
    if isinstance(before, float | int):
        evidence = f"mIoU {format_percent(iou)} against {format_percent(before)}"
        holds = decide(iou > before - 0.02, iou < before - 0.1)
        checks.insert(0, Check("masks no worse than on the test split at training time", holds, evidence))
    return checks


def _check_error_detection(ratio: float | None, auroc: float | None) -> Check:
    claim = "wrong pixels are less confident"
    if ratio is None or auroc is None:
        return Check(claim, None, "there are no wrong pixels, or no right ones")
    evidence = f"mean entropy of wrong pixels {ratio:.1f} × that of right ones, AUROC {auroc:.3f} (0.5 is chance)"
    return Check(claim, decide(auroc > 0.6, auroc < 0.5), evidence)
