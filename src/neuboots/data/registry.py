"""Named data sets: `load_dataset("cifar10")`.

A data set is read from a data root (`root`, else the environment variable NEUBOOTS_DATA) in the layout of the Hugging
Face hub, <root>/<name>/data/<split>-*.parquet; without a data root it is loaded from the hub, if it is there.
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from neuboots._validation import ArgumentError
from neuboots.data import image_datasets as images
from neuboots.data._common import resolve_data_root
from neuboots.data.dataset import DatasetBundle, LoadOptions, Task
from neuboots.data.tabular import load_sklearn_table, load_uci
from neuboots.data.text import SST2_LOCATION, load_sst2
from neuboots.data.volumes import load_hippocampus3d


@dataclass(frozen=True)
class DatasetEntry:
    """A named data set.

    Attributes:
        loader: Loads it.
        summary: One line about it.
        task: "classification", "regression" or "segmentation".
        hub: Name on the Hugging Face hub; None if it is not there.
        hint: How to get it otherwise.
        splits: Number of standard test splits to choose from; 0 if it has one.
        shipped: Whether it is part of scikit-learn.
    """

    loader: Callable[[Path | None, LoadOptions], DatasetBundle]
    summary: str
    task: Task = "classification"
    hub: str | None = None
    hint: str = ""
    splits: int = 0
    shipped: bool = False


def _image_entry(spec: images.ImageDatasetSpec, summary: str, loader: Any = None) -> DatasetEntry:
    loader = loader or partial(images.load_image_dataset, spec)
    return DatasetEntry(loader, summary, spec.task, spec.location.hub, spec.location.hint)


def _sklearn_entry(name: str, summary: str, task: Task = "classification") -> DatasetEntry:
    loader = images.load_digits if name == "digits" else partial(load_sklearn_table, name)
    return DatasetEntry(loader, summary, task, hint="it is shipped with scikit-learn", shipped=True)


def _uci_entry(name: str, summary: str) -> DatasetEntry:
    hint = "put its CSV file and its test splits into the folder uci of a data root"
    return DatasetEntry(partial(load_uci, name), summary, "regression", hint=hint, splits=20)


DATASETS: dict[str, DatasetEntry] = {
    "digits": _sklearn_entry("digits", "1,797 handwritten digits, 8 × 8 grayscale, 10 classes"),
    "mnist": _image_entry(images.MNIST, "70,000 handwritten digits, 28 × 28 grayscale, 10 classes"),
    "fashion_mnist": _image_entry(images.FASHION_MNIST, "70,000 garments, 28 × 28 grayscale, 10 classes"),
    "rotated_mnist": _image_entry(
        images.ROTATED_MNIST, "MNIST, each image rotated by a random angle", images.load_rotated_mnist
    ),
    "cifar10": _image_entry(images.CIFAR10, "60,000 photographs, 32 × 32 RGB, 10 classes"),
    "cifar100": _image_entry(images.CIFAR100, "60,000 photographs, 32 × 32 RGB, 100 classes"),
    "svhn": _image_entry(images.SVHN, "99,289 house numbers, 32 × 32 RGB, 10 classes"),
    "wbc_cells": _image_entry(images.WBC_CELLS, "348 white blood cells, 80 × 80 grayscale, 4 classes, imbalanced"),
    "camvid": _image_entry(images.CAMVID, "701 street scenes, 160 × 120 RGB, masks of 11 classes"),
    "wbc_segmentation": _image_entry(
        images.WBC_SEGMENTATION, "400 white blood cells, 120 × 120 RGB, masks of 3 classes"
    ),
    "voc2012": _image_entry(
        images.VOC2012, "2,913 photographs of several sizes, masks of 21 classes", images.load_voc2012
    ),
    "hippocampus3d": DatasetEntry(
        load_hippocampus3d,
        "MRI of the hippocampus, volumes of about 35 × 50 × 36, masks of 3 classes",
        "segmentation",
        hint="take Task04_Hippocampus of the Medical Segmentation Decathlon (medicaldecathlon.com)",
    ),
    "diabetes": _sklearn_entry("diabetes", "442 patients, 10 columns: the disease a year later", "regression"),
    "breast_cancer": _sklearn_entry("breast_cancer", "569 tumours, 30 columns, 2 classes"),
    "wine": _sklearn_entry("wine", "178 wines, 13 columns, 3 classes"),
    "uci/boston": _uci_entry("boston", "506 houses, 13 columns: their price"),
    "uci/concrete": _uci_entry("concrete", "1,030 concretes, 8 columns: their strength"),
    "uci/energy": _uci_entry("energy", "768 buildings, 8 columns: their heating load"),
    "uci/power": _uci_entry("power", "9,568 hours of a power plant, 4 columns: its output"),
    "uci/wine_red": _uci_entry("wine_red", "1,599 red wines, 11 columns: their quality"),
    "uci/yacht": _uci_entry("yacht", "308 yachts, 6 columns: their resistance"),
    "sst2": DatasetEntry(load_sst2, "sentences of film reviews, 2 classes", hub=SST2_LOCATION.hub),
}

_ALIASES = {"voc": "voc2012", "pascalvoc": "voc2012", "pascalvoc2012": "voc2012", "hippocampus": "hippocampus3d"}


def load_dataset(
    name: str,
    *,
    root: str | Path | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
    streaming: bool = False,
    split: int = 0,
) -> DatasetBundle:
    """Load a named data set.

    Args:
        name: A key of `DATASETS`; case, dashes and underscores do not matter.
        root: Data root; None for the environment variable NEUBOOTS_DATA, else the Hugging Face hub.
        val_fraction: Fraction of the training rows for validation, where there is no validation split.
        seed: Random seed of the validation split.
        streaming: Whether splits are streams, in the order of the files; validation rows are then at even distances.
        split: Number of the test split of a UCI data set.

    Returns:
        The data set.

    Raises:
        ArgumentError: If there is no data set of this name.
        DatasetNotFoundError: If it is not found in the data root or on the hub.

    Example:
        >>> data = load_dataset("digits")
        >>> data
        DatasetBundle('digits', classification, 10 classes, 1 channels; train 1,294, validation 144, test 359)
        >>> x, y = data.augmented_train[0]
        >>> x.shape, int(y)
        (torch.Size([1, 8, 8]), 0)
    """
    entry = DATASETS[resolve_name(name)]
    if split != 0 and not entry.splits:
        raise ArgumentError("split", split, f"0, as {name} has one test split")
    return entry.loader(resolve_data_root(root), LoadOptions(val_fraction, seed, streaming, split))


def resolve_name(name: str) -> str:
    """Return the canonical name of a data set.

    Args:
        name: A name; case, dashes, underscores and the prefix "uci/" do not matter.

    Returns:
        The key of `DATASETS`.

    Raises:
        ArgumentError: If there is no such data set; the closest names are given.

    Example:
        >>> resolve_name("CIFAR-10"), resolve_name("boston")
        ('cifar10', 'uci/boston')
    """
    known = {_normalize_name(key): key for key in DATASETS} | _ALIASES
    known |= {_normalize_name(key.removeprefix("uci/")): key for key in DATASETS if key.startswith("uci/")}
    given = _normalize_name(name) if isinstance(name, str) else ""
    if given in known:
        return known[given]
    close = [known[found] for found in difflib.get_close_matches(given, known, n=3, cutoff=0.5)]
    hint = "load files of your own with load_image_folder, load_mask_folder, load_volume_folder or load_table"
    raise ArgumentError("name", name, ", ".join(dict.fromkeys([*close, *DATASETS])), hint=hint)


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_/\s.]", "", name).lower()
