"""What `neuboots fit` saves and the other commands read: one class of models for each kind of data."""

from neuboots.models.model import KINDS, Answers, Card, Chunk, Model, check_place, load_model, untaken


def _table() -> type[Model]:
    from neuboots.models.table import TableModel

    return TableModel


def _images() -> type[Model]:
    from neuboots.models.images import ImageModel

    return ImageModel


def _masks() -> type[Model]:
    from neuboots.models.masks import MaskModel

    return MaskModel


KINDS |= {"table": _table, "images": _images, "masks": _masks}

__all__ = ["KINDS", "Answers", "Card", "Chunk", "Model", "check_place", "load_model", "untaken"]
