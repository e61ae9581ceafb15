"""What `neuboots fit` saves and the other commands read: one class of models for each kind of data."""

from neuboots.app.model import (
    MODEL_CLASSES,
    Model,
    ModelCard,
    PredictionTable,
    RowBatch,
    check_model_folder,
    load_model,
    unique_name,
)


def _table() -> type[Model]:
    from neuboots.app.tabular import TabularModel

    return TabularModel


def _images() -> type[Model]:
    from neuboots.app.images import ImageModel

    return ImageModel


def _masks() -> type[Model]:
    from neuboots.app.masks import MaskModel

    return MaskModel


MODEL_CLASSES |= {"table": _table, "images": _images, "masks": _masks}

__all__ = [
    "MODEL_CLASSES",
    "Model",
    "ModelCard",
    "PredictionTable",
    "RowBatch",
    "check_model_folder",
    "load_model",
    "unique_name",
]
