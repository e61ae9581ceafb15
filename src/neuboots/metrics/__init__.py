"""Figures of merit: pure functions of tensors, and tallies of data that come in parts.

A figure is a float64 tensor. `X.of(...)` tallies one part of the data; tallies add, and have the same figures.
"""

from neuboots.metrics.calibration import ReliabilityCurve, ece, mce, reliability_curve
from neuboots.metrics.classification import (
    Classification,
    LogitScores,
    accuracy,
    brier,
    error,
    nll,
    nll_at_mean_logit,
    paper_nll,
)
from neuboots.metrics.confusion import Confusion, confusion_matrix, f1, precision, recall
from neuboots.metrics.diversity import (
    Diversity,
    correlation,
    disagreement,
    pairwise_kl,
    q_statistic,
    ratio_error,
)
from neuboots.metrics.intervals import (
    Intervals,
    Quantiles,
    SampleScores,
    coverage,
    crps_samples,
    interval_score,
    mean_width,
    pinball,
)
from neuboots.metrics.normal import CalibrationCurve
from neuboots.metrics.ood import Detection, aupr, auroc, detection_accuracy, fpr_at_tpr, tnr_at_tpr
from neuboots.metrics.ranking import Ranking, RiskCoverage, adaptive_ece, aurc, risk_coverage
from neuboots.metrics.regression import (
    Regression,
    calibration_curve,
    check_score,
    crps,
    gaussian_nll,
    mean_absolute_calibration,
    mean_interval_score,
    miscalibration_area,
    rms_calibration,
    rmse,
    sharpness,
)
from neuboots.metrics.segmentation import Segmentation, dice, iou, mean_iou
from neuboots.metrics.tally import Mean, Tally

__all__ = [
    "CalibrationCurve",
    "Classification",
    "Confusion",
    "Detection",
    "Diversity",
    "Intervals",
    "LogitScores",
    "Mean",
    "Quantiles",
    "Ranking",
    "Regression",
    "ReliabilityCurve",
    "RiskCoverage",
    "SampleScores",
    "Segmentation",
    "Tally",
    "accuracy",
    "adaptive_ece",
    "aupr",
    "aurc",
    "auroc",
    "brier",
    "calibration_curve",
    "check_score",
    "confusion_matrix",
    "correlation",
    "coverage",
    "crps",
    "crps_samples",
    "detection_accuracy",
    "dice",
    "disagreement",
    "ece",
    "error",
    "f1",
    "fpr_at_tpr",
    "gaussian_nll",
    "interval_score",
    "iou",
    "mce",
    "mean_absolute_calibration",
    "mean_interval_score",
    "mean_iou",
    "mean_width",
    "miscalibration_area",
    "nll",
    "nll_at_mean_logit",
    "pairwise_kl",
    "paper_nll",
    "pinball",
    "precision",
    "q_statistic",
    "ratio_error",
    "recall",
    "reliability_curve",
    "risk_coverage",
    "rms_calibration",
    "rmse",
    "sharpness",
    "tnr_at_tpr",
]
