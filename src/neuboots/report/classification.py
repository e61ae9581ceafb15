"""Evaluation report of a classifier: accuracy, calibration, selective prediction and confusions."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from neuboots.metrics import ClassificationMetrics, auroc
from neuboots.report.checks import Check, decide, wilson_interval
from neuboots.report.evaluation import (
    MARGIN,
    EvaluationReport,
    Reference,
    Z,
    check_better_than_baseline,
    data_topic,
    decisions_table,
    format_count,
    make_plot,
    metrics_table,
)
from neuboots.report.section import Section
from neuboots.report.tables import format_percent, make_table

SCORES = ("entropy", "mutual_information", "std", "ood_score")  # larger for less trustworthy predictions
_MAX_CONFUSIONS = 20
_MAX_JSON_CLASSES = 100  # whose confusion matrix is part of the JSON output
_MAX_PLOTTED_CLASSES = 25
_LABELS = {
    "error": "error",
    "nll": "log loss, nats",
    "brier": "Brier score",
    "ece": "calibration error, ECE",
    "adaptive_ece": "ECE, equal bins",
    "macro_f1": "macro F1",
    "balanced_accuracy": "balanced accuracy",
    "auroc": "AUROC",
    "aurc": "AURC",
}


def build_classification_report(
    state: ClassificationMetrics, sample: Mapping[str, Tensor], names: tuple[str, ...], reference: Reference
) -> EvaluationReport:
    """Build the report of class predictions.

    Args:
        state: Metrics accumulated over all rows.
        sample: Columns of a uniform sample of the rows: confidence, wrong, abstain, those of `SCORES`, and for two
            classes the probability of the second (`second`) and the label (`truth`).
        names: Names of the classes.
        reference: Results at training time.

    Returns:
        The report.
    """
    count, wrong, abstain = state.count, sample["wrong"], sample["abstain"]
    labels = state.confusion_matrix.sum(1)  # (C,)
    error_auroc = {name: _auroc(sample[name], wrong) for name in SCORES}
    accepted, rejected = wrong[~abstain], wrong[abstain]
    error = float(state.error)
    interval = wilson_interval(error, count)
    fractions = labels.double() / labels.sum()
    majority = float(fractions.max())
    baseline = {
        "error": 1 - majority,
        "nll": float(-torch.xlogy(fractions, fractions).sum()),
        "brier": 1 - float(fractions.square().sum()),
        "ece": 0.0,
        "macro_f1": 2 * majority / (1 + majority) / int((labels > 0).sum()),
    }
    metrics: dict[str, Any] = {
        **{name: float(getattr(state, name)) for name in ("error", "accuracy", "nll", "brier", "ece", "mce")},
        **dict(zip(("error_low", "error_high"), interval, strict=True)),
        "adaptive_ece": float(state.adaptive_ece),
        "mean_confidence": float(sample["confidence"].double().mean()),
        "macro_f1": float(state.f1[state.occurs].mean()),
        "balanced_accuracy": float(state.recall[labels > 0].mean()),
        "auroc": _auroc(sample["second"], sample["truth"] == 1) if len(names) == 2 else None,
        "aurc": float(state.aurc),
        "accepted": len(accepted) / len(wrong),
        "error_accepted": _mean(accepted),
        "error_rejected": _mean(rejected),
        "ood_fraction": _mean(sample["ood_score"] > 1),
        **{f"error_auroc_{name}": value for name, value in error_auroc.items()},
    }
    bins, classes, confusions = _bin_rows(state), _class_rows(state, names), _confusion_rows(state, names)
    details = {
        "classes": classes,
        "confused": confusions,
        "confusion": state.confusion_matrix.tolist() if len(names) <= _MAX_JSON_CLASSES else None,
        "reliability": bins,
    }
    evidence = f"{format_percent(error)} wrong against {format_percent(1 - majority)} of the majority class"
    size, num_wrong = min(9.0, 2.2 + 0.55 * len(names)), int(wrong.sum())
    figsize = (max(4.6, size), max(4.0, size))
    plots = {"confusion": make_plot("plot_confusion", names, state.confusion_matrix, figsize=figsize)}
    risk = {"most confident first": state.risk_coverage_curve}
    entropy, ood_score = (
        {"right": sample[name][~wrong], "wrong": sample[name][wrong]} for name in ("entropy", "ood_score")
    )
    title = f"{format_count(count, 'row')}, {len(names)} classes."
    auroc_title = "AUROC of each score for wrong predictions; 0.5 is chance, 1 is perfect."
    topics = [
        Section(
            "predictions",
            "How often is the predicted class right?",
            tables=(metrics_table(title, _LABELS, metrics, baseline, reference.metrics, {"error": interval}),),
            checks=(
                *_check_error(error, count, reference.metrics.get("error"), reference.num_test),
                check_better_than_baseline("error", *interval, evidence, 1 - majority),
            ),
            plots=plots if len(names) <= _MAX_PLOTTED_CLASSES else {},
        ),
        Section(
            "calibration",
            "Are predictions with a confidence of 80 % right in 80 % of the rows?",
            tables=(make_table("Rows by confidence.", bins),),
            checks=(_check_calibration(metrics["mean_confidence"], metrics["accuracy"], count),),
            plots={"reliability": make_plot("plot_reliability", {"the model": state.reliability_curve})},
        ),
        Section(
            "selective prediction",
            "The model abstains on low-confidence and out-of-distribution rows. Does it abstain where it is wrong?",
            tables=(
                decisions_table(abstain, "error", {False: _mean(accepted), True: _mean(rejected)}),
                make_table(auroc_title, [{"score": name, "AUROC": value} for name, value in error_auroc.items()]),
            ),
            checks=(
                _check_selective_risk(_mean(accepted), len(accepted), _mean(rejected), len(rejected)),
                _check_error_detection(error_auroc["entropy"], num_wrong, len(wrong) - num_wrong),
            ),
            plots={
                "risk-coverage": make_plot("plot_risk_coverage", risk, mark=(metrics["accepted"], _mean(accepted))),
                "entropy": make_plot("plot_clipped_histograms", entropy, "entropy / nats"),
            },
        ),
        Section(
            "classes",
            "Which classes are difficult, and with which are they confused?",
            tables=(
                make_table("Classes, the lowest F1 first.", sorted(classes, key=lambda row: row["f1"])),
                make_table("Most frequent confusions.", confusions, num_keys=2),
            ),
        ),
        data_topic(ood_score, count, reference),
    ]
    return EvaluationReport(count, metrics, baseline, details, topics)


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None


def _auroc(scores: Tensor, positive: Tensor) -> float | None:
    return float(auroc(scores, positive=positive)) if 0 < int(positive.sum()) < len(positive) else None


def _bin_rows(state: ClassificationMetrics) -> list[dict[str, Any]]:
    """Mean confidence, accuracy and rows of each bin that has rows."""
    curve = state.reliability_curve
    bins = zip(curve.confidence.tolist(), curve.accuracy.tolist(), curve.count.tolist(), strict=True)
    return [dict(zip(("confidence", "accuracy", "count"), row, strict=True)) for row in bins if row[2]]


def _class_rows(state: ClassificationMetrics, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Counts, precision, recall and F1 of each class that occurs."""
    matrix = state.confusion_matrix
    columns = [each.tolist() for each in (matrix.sum(1), matrix.sum(0), state.precision, state.recall, state.f1)]
    keys = ("class", "rows", "predictions", "precision", "recall", "f1")
    rows = [dict(zip(keys, row, strict=True)) for row in zip(names, *columns, strict=True)]
    return [row for row in rows if row["rows"] or row["predictions"]]


def _confusion_rows(state: ClassificationMetrics, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Pairs of true and predicted class, the most frequent confusion first."""
    labels, matrix = state.confusion_matrix.sum(1), state.confusion_matrix.clone().fill_diagonal_(0)
    most = min(_MAX_CONFUSIONS, int((matrix > 0).sum()))
    pairs = [divmod(k, len(names)) for k in matrix.flatten().argsort(descending=True, stable=True)[:most].tolist()]
    return [
        {"class": names[t], "predicted": names[p], "rows": int(matrix[t, p]), "of": int(labels[t])} for t, p in pairs
    ]


# -- checks --------------------------------------------------------------------------------------------


def _check_error(error: float, count: int, training_error: Any, num_test: int) -> list[Check]:
    """Check that the error is not above that of the test split at training time, if that is known.

    Example:
        >>> str(_check_error(0.3, 100, 0.1, 100)[0])
        'does NOT hold: no more errors than on the test split at training time (30.0 % against 10.0 %)'
    """
    if not isinstance(training_error, float | int) or not 0 <= training_error <= 1 or num_test < 1:
        return []
    low, high = _newcombe_interval((error, count), (training_error, num_test))
    evidence = f"{format_percent(error)} against {format_percent(training_error)}"
    return [Check("no more errors than on the test split at training time", decide(high < 0.05, low > 0), evidence)]


def _newcombe_interval(one: tuple[float, int], other: tuple[float, int]) -> tuple[float, float]:
    """Return Newcombe's 95 % interval of the difference of two proportions, each with its count.

    Newcombe, Interval estimation for the difference between independent proportions, Statistics in Medicine 1998.

    Example:
        >>> [round(end, 3) for end in _newcombe_interval((0.3, 100), (0.1, 100))]
        [0.09, 0.306]
    """
    (a, low_a, high_a), (b, low_b, high_b) = ((p, *wilson_interval(p, count)) for p, count in (one, other))
    return a - b - math.hypot(a - low_a, high_b - b), a - b + math.hypot(high_a - a, b - low_b)


def _check_calibration(confidence: float, accuracy: float, count: int) -> Check:
    """Check that the mean confidence equals the accuracy.

    Example:
        >>> _check_calibration(0.99, 0.7, 500).holds, _check_calibration(0.9, 0.9, 5000).holds
        (False, True)
    """
    low, high = wilson_interval(accuracy, count)
    within = confidence - MARGIN <= low and high <= confidence + MARGIN
    beyond = high < confidence - MARGIN or low > confidence + MARGIN
    evidence = f"mean confidence {format_percent(confidence)}, accuracy {format_percent(accuracy)}"
    return Check("the confidence equals the accuracy", decide(within, beyond), evidence)


def _check_error_detection(auroc: float | None, wrong: int, right: int) -> Check:
    """Check that wrong predictions are less confident, by the Mann–Whitney test of AUROC ½.

    Example:
        >>> _check_error_detection(0.9, 50, 500).holds, _check_error_detection(0.55, 5, 5).holds
        (True, None)
    """
    claim = "wrong predictions are less confident"
    if auroc is None:
        return Check(claim, None, f"there are no {'wrong' if right else 'right'} predictions")
    half = Z * math.sqrt((wrong + right + 1) / (12 * wrong * right))
    holds = decide(auroc > 0.5 + half, auroc < 0.5 - half)
    return Check(claim, holds, f"AUROC {auroc:.3f} of the entropy for wrong predictions; 0.5 is chance")


def _check_selective_risk(error: float | None, accepted: int, other: float | None, rejected: int) -> Check:
    """Check that accepted predictions are wrong less often than those the model abstains from.

    Example:
        >>> _check_selective_risk(0.02, 900, 0.4, 100).holds, _check_selective_risk(0.1, 10, None, 0).holds
        (True, None)
    """
    claim = "accepted predictions are wrong less often than the others"
    if error is None:
        return Check(claim, None, "the model abstains on every row")
    if other is None:
        return Check(claim, None, "the model abstains on no row")
    low, high = _newcombe_interval((other, rejected), (error, accepted))
    evidence = f"{format_percent(error)} wrong of {accepted:,} accepted, {format_percent(other)} of {rejected:,} others"
    return Check(claim, decide(low > 0, high < 0), evidence)
