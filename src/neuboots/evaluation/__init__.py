"""Evaluation of predictors: one module per question, for any method.

Functions are imported by path, such as `from neuboots.evaluation.calibration import evaluate_calibration`; a module is
imported when it is first used as an attribute.
"""

from neuboots._validation import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, {})
