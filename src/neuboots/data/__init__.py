"""Data sets behind one interface, corruptions of images, and imbalanced training sets."""

from neuboots.data.augment import CropFlip, CropFlipCutout
from neuboots.data.catalogue import SETS, load
from neuboots.data.folders import image_folder, mask_folder, voc_folder
from neuboots.data.imbalance import exponential_counts, long_tailed
from neuboots.data.parts import Part, Stream
from neuboots.data.schema import Schema
from neuboots.data.sets import DataSet, Normalisation
from neuboots.data.sources import Corrupt, Missing
from neuboots.data.tables import read_rows, table
from neuboots.data.text import Vocabulary
from neuboots.data.volumes import affine_of, file_of, volume_folder

__all__ = [
    "SETS",
    "Corrupt",
    "CropFlip",
    "CropFlipCutout",
    "DataSet",
    "Missing",
    "Normalisation",
    "Part",
    "Schema",
    "Stream",
    "Vocabulary",
    "affine_of",
    "exponential_counts",
    "file_of",
    "image_folder",
    "load",
    "long_tailed",
    "mask_folder",
    "read_rows",
    "table",
    "voc_folder",
    "volume_folder",
]
