"""Data sets: named ones, tables and folders of files, with augmentation, corruption and class imbalance.

A module is imported when one of its functions or classes is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from neuboots.data._common import CorruptFileError, DatasetNotFoundError
from neuboots.data.dataset import DatasetBundle, LazyDataset, Standardizer, StreamingDataset, subsample_classes
from neuboots.loading import train_val_test_split

if TYPE_CHECKING:
    from neuboots.data.augment import CropFlip, CropFlipCutout
    from neuboots.data.image_folder import load_image_folder, load_mask_folder, load_voc_folder
    from neuboots.data.registry import DATASETS, load_dataset
    from neuboots.data.tabular import TableSchema, encode_file, load_table
    from neuboots.data.text import Vocabulary
    from neuboots.data.volumes import find_volume_file, load_volume_folder, read_affine

_MODULES = {
    "augment": ("CropFlip", "CropFlipCutout"),
    "image_folder": ("load_image_folder", "load_mask_folder", "load_voc_folder"),
    "registry": ("DATASETS", "load_dataset"),
    "tabular": ("TableSchema", "encode_file", "load_table"),
    "text": ("Vocabulary",),
    "volumes": ("find_volume_file", "load_volume_folder", "read_affine"),
}

__all__ = [
    "DATASETS",
    "CorruptFileError",
    "CropFlip",
    "CropFlipCutout",
    "DatasetBundle",
    "DatasetNotFoundError",
    "LazyDataset",
    "Standardizer",
    "StreamingDataset",
    "TableSchema",
    "Vocabulary",
    "encode_file",
    "find_volume_file",
    "load_dataset",
    "load_image_folder",
    "load_mask_folder",
    "load_table",
    "load_voc_folder",
    "load_volume_folder",
    "read_affine",
    "subsample_classes",
    "train_val_test_split",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"neuboots.data.{module}"), name)
    raise AttributeError(f"module 'neuboots.data' has no attribute {name!r}")
