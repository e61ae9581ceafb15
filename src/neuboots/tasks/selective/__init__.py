"""Selective prediction: answer where the predictor is sure, abstain elsewhere.

    keep x if g(x) ≥ t,   coverage(t) = P(g ≥ t),   risk(t) = P(wrong | g ≥ t)

`selective` measures the curve of risk over coverage; `risk_controlled_threshold` finds a threshold that keeps its risk
for new inputs; both make an `Abstaining` predictor.
"""

from neuboots.tasks.selective.answers import Abstaining, Answers, Score
from neuboots.tasks.selective.control import ControlledThreshold, risk_controlled_threshold
from neuboots.tasks.selective.curve import Selective, selective

__all__ = [
    "Abstaining",
    "Answers",
    "ControlledThreshold",
    "Score",
    "Selective",
    "risk_controlled_threshold",
    "selective",
]
