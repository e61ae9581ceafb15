"""Data sets: named ones, tables and folders of files, with augmentation, corruption and class imbalance."""

from neuboots.data._common import CorruptFileError, DatasetNotFoundError
from neuboots.data.augment import CropFlip, CropFlipCutout
from neuboots.data.dataset import DatasetBundle, LazyDataset, Standardizer, StreamingDataset, subsample_classes
from neuboots.data.image_folder import load_image_folder, load_mask_folder, load_voc_folder
from neuboots.data.registry import DATASETS, load_dataset
from neuboots.data.tabular import TableSchema, encode_file, load_table
from neuboots.data.text import Vocabulary
from neuboots.data.volumes import find_volume_file, load_volume_folder, read_affine
from neuboots.loading import train_val_test_split

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
