"""The studies by name: every table and figure of the paper, in its order, and what is beyond it.

A study lies in the file of its name (time-vs-n in time_vs_n.py) and is imported when it is asked for.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module

from neuboots_paper.study import Study

_CLASSES = {
    "coverage": "CoverageStudy",
    "blocks": "Blocks",
    "time-vs-n": "TimeVsN",
    "rotated-mnist": "RotatedMnist",
    "amortized-classification": "AmortizedClassification",
    "amortized-regression": "AmortizedRegression",
    "dropout": "Dropout",
    "cost": "CostStudy",
    "diversity": "DiversityStudy",
    "calibration": "CalibrationStudy",
    "active": "Active",
    "ood": "OutOfDistribution",
    "bands": "Bands",
    "segmentation-2d": "Segmentation2d",
    "segmentation-3d": "Segmentation3d",
    "imbalance": "ImbalanceStudy",
    "corruption": "CorruptionStudy",
    "text": "Text",
    "uci": "Uci",
    "validity": "Validity",
}

NEEDS: Mapping[str, tuple[str, ...]] = {
    "coverage": ("gpytorch",),
    "time-vs-n": ("gpytorch",),
    "segmentation-3d": ("monai",),
    "uci": ("pandas",),
    "validity": ("gpytorch",),
}
"""Libraries that a study imports only as it works, beyond those that all need."""


class _Studies(Mapping[str, type[Study]]):
    def __getitem__(self, name: str) -> type[Study]:
        class_name = _CLASSES[name]
        module = import_module(f"neuboots.experiments.{name.replace('-', '_')}")
        study: type[Study] = getattr(module, class_name)
        return study

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)


STUDIES: Mapping[str, type[Study]] = _Studies()
