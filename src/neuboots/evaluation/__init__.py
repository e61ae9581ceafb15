"""Evaluation of predictors: one module per question, for any method.

Modules are imported by path, such as `from neuboots.evaluation.calibration import evaluate_calibration`.
"""
