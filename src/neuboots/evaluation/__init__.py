"""The questions people put to a predictor, one file each; any method will do.

Nothing is imported here: `from neuboots.evaluation.ood import Odin`.
"""
