"""Deployable models: a predictor with everything between it and the user's files, saved in one folder.

`neuboots fit` writes models of tables, image folders and mask folders; the other commands read them.
"""

from neuboots.app.model import Model, ModelCard, PredictionTable, RowBatch, load_model, unique_name

__all__ = ["Model", "ModelCard", "PredictionTable", "RowBatch", "load_model", "unique_name"]
