"""The data sets by name.

    load("cifar10") → DatasetBundle(train, validation, test, …)

A set lies in a data root (`root`, else the environment variable NEUBOOTS_DATA) in the layout of the Hugging Face hub,
<root>/<name>/data/<split>-*.parquet, or is loaded from the hub where no data root is given and it has a name there.
Validation is the set's own, else a share of the training rows, drawn by the seed: the same of each class.
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from neuboots._validation import check_int
from neuboots.data._common import resolve_data_root
from neuboots.data.dataset import DatasetBundle
from neuboots.data.huggingface import DatasetLocation
from neuboots.data.images import IMAGE_DATASETS, load_digits, load_image_dataset, load_rotated_mnist
from neuboots.data.masks import CAMVID, VOC2012, WBC_SEGMENTATION, load_camvid, load_voc2012, load_wbc_segmentation
from neuboots.data.tabular import load_breast_cancer, load_diabetes, load_uci, load_wine
from neuboots.data.text import SST2_LOCATION, load_sst2
from neuboots.data.volumes import load_hippocampus3d


@dataclass(frozen=True)
class DatasetEntry:
    """A set of the catalogue: what loads it, a line on it, its name on the hub, and how to get it otherwise."""

    loader: Callable[..., DatasetBundle]
    summary: str
    hub: str | None = None
    how: str = ""
    splits: int = 0  # how many standard test splits it has to choose from


def _images(name: str, summary: str) -> DatasetEntry:
    spec = IMAGE_DATASETS[name]
    return _entry(partial(load_image_dataset, spec), summary, spec.place)


def _entry(loader: Callable[..., DatasetBundle], summary: str, place: DatasetLocation) -> DatasetEntry:
    return DatasetEntry(loader, summary, place.hub, place.how)


_SHIPPED = "it is shipped with scikit-learn"
_UCI = {
    "boston": "506 houses, 13 columns: their price",
    "concrete": "1,030 concretes, 8 columns: their strength",
    "energy": "768 buildings, 8 columns: their heating load",
    "power": "9,568 hours of a power plant, 4 columns: its output",
    "wine_red": "1,599 red wines, 11 columns: their quality",
    "yacht": "308 yachts, 6 columns: their resistance",
}

DATASETS: dict[str, DatasetEntry] = {
    "digits": DatasetEntry(load_digits, "1,797 handwritten digits, 8 × 8 grey, 10 classes", how=_SHIPPED),
    "mnist": _images("mnist", "70,000 handwritten digits, 28 × 28 grey, 10 classes"),
    "fashion_mnist": _images("fashion_mnist", "70,000 garments, 28 × 28 grey, 10 classes"),
    "rotated_mnist": _entry(
        load_rotated_mnist, "MNIST, each image turned by an angle named by the seed", IMAGE_DATASETS["mnist"].place
    ),
    "cifar10": _images("cifar10", "60,000 photographs, 32 × 32 colour, 10 classes"),
    "cifar100": _images("cifar100", "60,000 photographs, 32 × 32 colour, 100 classes"),
    "svhn": _images("svhn", "99,289 house numbers, 32 × 32 colour, 10 classes"),
    "wbc_cells": _images("wbc_cells", "348 white blood cells, 80 × 80 grey, 4 classes, imbalanced"),
    "camvid": _entry(load_camvid, "701 street scenes, 160 × 120 colour, masks of 11 classes", CAMVID.place),
    "wbc_segmentation": _entry(
        load_wbc_segmentation, "400 white blood cells, 120 × 120 colour, masks of 3 classes", WBC_SEGMENTATION.place
    ),
    "voc2012": _entry(load_voc2012, "2,913 photographs of many sizes, masks of 21 classes", VOC2012.place),
    "hippocampus3d": DatasetEntry(
        load_hippocampus3d,
        "MRI of the hippocampus, volumes of about 35 × 50 × 36, masks of 3 classes",
        how="take Task04_Hippocampus of the Medical Segmentation Decathlon (medicaldecathlon.com)",
    ),
    "diabetes": DatasetEntry(load_diabetes, "442 patients, 10 columns: the disease a year later", how=_SHIPPED),
    "breast_cancer": DatasetEntry(load_breast_cancer, "569 tumours, 30 columns, 2 classes", how=_SHIPPED),
    "wine": DatasetEntry(load_wine, "178 wines, 13 columns, 3 classes", how=_SHIPPED),
    **{
        f"uci/{name}": DatasetEntry(
            partial(load_uci, name),
            summary,
            how="put its CSV file and its test splits into the folder uci of a data root",
            splits=20,
        )
        for name, summary in _UCI.items()
    },
    "sst2": _entry(load_sst2, "sentences of film reviews, 2 classes", SST2_LOCATION),
}
"""Every set by its name."""

_ALSO = {"voc": "voc2012", "pascalvoc": "voc2012", "pascalvoc2012": "voc2012", "hippocampus": "hippocampus3d"}
_ALSO |= {_squeezed: f"uci/{name}" for name in _UCI for _squeezed in [name.replace("_", "")]}


def load_dataset(
    name: str,
    *,
    root: str | Path | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
    streaming: bool = False,
    split: int = 0,
) -> DatasetBundle:
    """The set of this name; capitals, dashes and underscores do not matter. `holdout_split` is one of a UCI set's 20.

    With streaming, parts are streams in the order of the files, which keep nothing; then validation is the rows at even
    distances.

    >>> data = load_dataset("digits")
    >>> data
    DataSet('digits', classification, 10 classes, 1 channels; train 1,294, validation 144, test 359)
    >>> x, y = data.augmented_train[0]
    >>> x.shape, data.with_class_counts([5, 10, 15, 20, 25, 30, 35, 40, 45, 50])
    (torch.Size([1, 8, 8]),
     DataSet('digits', classification, 10 classes, 1 channels; train 275, validation 144, test 359))
    """
    entry = DATASETS[resolve_name(name)]
    options: dict[str, Any] = {
        "val_fraction": val_fraction,
        "seed": check_int("seed", seed),
        "streaming": bool(streaming),
    }
    if entry.splits:
        options["split"] = check_int("split", split, minimum=0)
    elif split != 0:
        raise ValueError(f"got split={split!r} for {name}, which has one test part; expected split=0")
    return entry.loader(resolve_data_root(root), **options)


def resolve_name(name: str) -> str:
    """The name in the catalogue, or a sentence with the closest ones.

    >>> resolve_name("CIFAR-10"), resolve_name("boston")
    ('cifar10', 'uci/boston')
    >>> resolve_name("cifar")
    Traceback (most recent call last):
    ValueError: got the data set 'cifar'; expected cifar10, cifar100, ...
    """
    known = {_squeeze(entry): entry for entry in DATASETS} | _ALSO
    given = _squeeze(name) if isinstance(name, str) else ""
    if given in known:
        return known[given]
    close = [known[found] for found in difflib.get_close_matches(given, known, n=3, cutoff=0.5)]
    names = ", ".join(dict.fromkeys([*close, *DATASETS]))
    raise ValueError(f"got the data set {name!r}; expected {names}; or one of your own: image_folder(…), table(…)")


def _squeeze(name: str) -> str:
    return re.sub(r"[-_/\s.]", "", name).lower()
