"""Out-of-distribution detection with any predictor (paper, section 4.3 and table 4.1).

    detector = Odin(predictor).fit(validation_id, validation_ood)
    print(detector.evaluate(test_id, test_ood, positive="in"))

Scores are larger where an input is farther out of distribution. All detectors share the arguments of `fit`, `score` and
`evaluate`, and use those they need. They are for classification, where outputs are logits; for regression use
`PredictiveStd`, which reads the standard deviation over replicates alone.
"""

from neuboots.evaluation.ood.detector import (
    Detector,
    Energy,
    Entropy,
    MaxSoftmax,
    MutualInformation,
    PredictiveStd,
    holdout_split,
)
from neuboots.evaluation.ood.mahalanobis import ClassGaussians, Mahalanobis, MahalanobisEnsemble, MahalanobisScore
from neuboots.evaluation.ood.odin import STATISTICS, Odin, ReplicateDetector

__all__ = [
    "STATISTICS",
    "ClassGaussians",
    "Detector",
    "Energy",
    "Entropy",
    "Mahalanobis",
    "MahalanobisEnsemble",
    "MahalanobisScore",
    "MaxSoftmax",
    "MutualInformation",
    "Odin",
    "PredictiveStd",
    "ReplicateDetector",
    "holdout_split",
]
