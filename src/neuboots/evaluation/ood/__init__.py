"""Is an input like those the net was trained on? Detectors around any predictor (paper, section 4.3 and table 4.1).

    detector = Odin(predictor).fit(validation_in, validation_out)
    print(detector.evaluate(test_in, test_out, positive="in"))

Scores are larger where an input is further out of distribution. All detectors have `fit`, `score` and `evaluate` with
the same arguments, and use those they need: `fit(inside, outside, train=…)`. They are for predictors of classes, whose
outputs are logits; nothing in an output tells a regression from one, so for numbers take `UncertaintySums`, which reads the
spread of the replicates alone (`Mahalanobis` needs a class for each training row).
"""

from neuboots.evaluation.ood.detector import (
    Detector,
    Energy,
    Entropy,
    LogisticRule,
    MaxSoftmax,
    MutualInformation,
    PredictiveStd,
    holdout_split,
)
from neuboots.evaluation.ood.mahalanobis import ClassGaussians, Mahalanobis, MahalanobisEnsemble
from neuboots.evaluation.ood.odin import STATISTICS, Odin, ReplicateDetector

__all__ = [
    "STATISTICS",
    "ClassGaussians",
    "Detector",
    "Energy",
    "Entropy",
    "LogisticRule",
    "Mahalanobis",
    "MahalanobisEnsemble",
    "MaxSoftmax",
    "MutualInformation",
    "Odin",
    "PredictiveStd",
    "ReplicateDetector",
    "holdout_split",
]
