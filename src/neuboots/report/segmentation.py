"""Evaluation report of a segmentation; pixels without a label are ignored."""

from collections.abc import Mapping
from typing import Any

from neuboots.evaluation.segmentation.metrics import UNCERTAINTY_MEASURES, SegmentationReport
from neuboots.report.checks import Check, decide
from neuboots.report.evaluation import (
    MARGIN,
    Draw,
    EvaluationReport,
    Reference,
    Topic,
    data_topic,
    format_count,
    format_percent,
    make_table,
    metrics_table,
)

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
    pixels: SegmentationReport, num_rejected: int, num_ood: int, names: tuple[str, ...], reference: Reference
) -> EvaluationReport:
    """Build the report of label maps.

    Args:
        pixels: Metrics accumulated over all pixels.
        num_rejected: Images that the model abstains from.
        num_ood: Images that are out of distribution.
        names: Names of the classes.
        reference: Results at training time.

    Returns:
        The report.
    """
    count = pixels.num_images
    metrics = {name: value for name, value in pixels.metrics.items() if name != "seconds"}
    metrics |= {"pixels": pixels.count, "accepted": 1 - num_rejected / count, "ood_fraction": num_ood / count}
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
    topics = [
        Topic(
            "masks",
            "How well are pixels classified?",
            [
                metrics_table(title, _LABELS, metrics, pixels.majority, reference.metrics, {}),
                make_table("Classes.", classes),
            ],
            _check_iou(pixels.mean_iou, pixels.majority["mean_iou"], reference.metrics),
            ["confusion"],
        ),
        Topic(
            "uncertainty",
            "Does the confidence equal the accuracy, and are wrong pixels less confident?",
            [make_table("Uncertainty of right and wrong pixels, means.", uncertainty)],
            [ece_check, _check_error_detection(metrics["entropy_ratio"], metrics["entropy_auroc"])],
            ["reliability"],
        ),
        data_topic(count, 0, num_ood, count, reference.num_held_out),
    ]

    def plots() -> dict[str, Draw]:
        from neuboots.report.plots import plot_confusion, plot_reliability

        found: dict[str, Draw] = {
            "reliability": lambda ax: plot_reliability(ax, {"the model": pixels.pixels.reliability_curve})
        }
        if len(names) <= _MAX_PLOTTED_CLASSES:
            found["confusion"] = lambda ax: plot_confusion(ax, names, pixels.pixels.confusion_matrix)
        return found

    return EvaluationReport(count, metrics, pixels.majority, details, topics, plots)


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
