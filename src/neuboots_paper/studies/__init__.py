"""Studies by name: every table and figure of the paper in its order, then the studies beyond it."""

from importlib import import_module

from neuboots._validation import check_choice
from neuboots_paper.study import Study

STUDY_NAMES = (
    "coverage",
    "blocks",
    "time-vs-n",
    "rotated-mnist",
    "amortized-classification",
    "amortized-regression",
    "dropout",
    "cost",
    "diversity",
    "calibration",
    "active",
    "ood",
    "bands",
    "segmentation-2d",
    "segmentation-3d",
    "imbalance",
    "corruption",
    "text",
    "uci",
    "validity",
    "dimensions",
    "same-weights",
)


def load_study(name: str) -> type[Study]:
    """Import the class of a study; "time-vs-n" is defined in `time_vs_n.py`.

    Raises:
        ArgumentError: If there is no study of this name.

    Example:
        >>> load_study("time-vs-n").source
        'figure 3'
    """
    check_choice("study", name, STUDY_NAMES)
    module = import_module(f"{__name__}.{name.replace('-', '_')}")
    return next(
        value for value in vars(module).values() if isinstance(value, type) and getattr(value, "name", None) == name
    )
