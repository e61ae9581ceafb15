"""Figures of merit: pure functions of tensors, each a 0-dim float64 tensor."""

from neuboots.metrics.classification import (
    ReliabilityCurve,
    brier,
    ece,
    error,
    nll,
    reliability_curve,
)
from neuboots.metrics.ood import auroc

__all__ = [
    "ReliabilityCurve",
    "auroc",
    "brier",
    "ece",
    "error",
    "nll",
    "reliability_curve",
]
