"""Data sets: named ones, tables and folders of files, with augmentation, corruption and class imbalance.

A module is imported when one of its functions or classes is first used.
"""

from typing import TYPE_CHECKING

from neuboots._validation import lazy_exports
from neuboots.loading import train_val_test_split as train_val_test_split

if TYPE_CHECKING:
    from neuboots.data._common import CorruptFileError as CorruptFileError
    from neuboots.data._common import DatasetNotFoundError as DatasetNotFoundError
    from neuboots.data.augment import CropFlip as CropFlip
    from neuboots.data.augment import CropFlipCutout as CropFlipCutout
    from neuboots.data.dataset import DatasetBundle as DatasetBundle
    from neuboots.data.dataset import LazyDataset as LazyDataset
    from neuboots.data.dataset import Standardizer as Standardizer
    from neuboots.data.dataset import StreamingDataset as StreamingDataset
    from neuboots.data.dataset import subsample_classes as subsample_classes
    from neuboots.data.image_folder import load_image_folder as load_image_folder
    from neuboots.data.image_folder import load_mask_folder as load_mask_folder
    from neuboots.data.image_folder import load_voc_folder as load_voc_folder
    from neuboots.data.registry import DATASETS as DATASETS
    from neuboots.data.registry import load_dataset as load_dataset
    from neuboots.data.tabular import TableSchema as TableSchema
    from neuboots.data.tabular import encode_file as encode_file
    from neuboots.data.tabular import load_table as load_table
    from neuboots.data.text import Vocabulary as Vocabulary
    from neuboots.data.volumes import find_volume_file as find_volume_file
    from neuboots.data.volumes import load_volume_folder as load_volume_folder
    from neuboots.data.volumes import read_affine as read_affine

_EXPORTS = {
    "_common": ("CorruptFileError", "DatasetNotFoundError"),
    "augment": ("CropFlip", "CropFlipCutout"),
    "dataset": ("DatasetBundle", "LazyDataset", "Standardizer", "StreamingDataset", "subsample_classes"),
    "image_folder": ("load_image_folder", "load_mask_folder", "load_voc_folder"),
    "registry": ("DATASETS", "load_dataset"),
    "tabular": ("TableSchema", "encode_file", "load_table"),
    "text": ("Vocabulary",),
    "volumes": ("find_volume_file", "load_volume_folder", "read_affine"),
}

__all__ = ["train_val_test_split", *(name for names in _EXPORTS.values() for name in names)]
__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
