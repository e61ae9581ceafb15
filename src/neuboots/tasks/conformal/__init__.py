"""Split conformal prediction: sets of classes and intervals that hold the truth at least as often as they say.

    C(x) = {y : s(x, y) ≤ q},   P(Y ∈ C(X)) ≥ level

whatever the predictor and the law of the data, if the calibration rows and the new one are exchangeable and the
predictor has not seen them.
"""

from neuboots.tasks.conformal.intervals import ConformalIntervals, IntervalsReport, conformal_intervals
from neuboots.tasks.conformal.sets import ConformalSets, Sets, SetsReport, conformal_sets

__all__ = [
    "ConformalIntervals",
    "ConformalSets",
    "IntervalsReport",
    "Sets",
    "SetsReport",
    "conformal_intervals",
    "conformal_sets",
]
