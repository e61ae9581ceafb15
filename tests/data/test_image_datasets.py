"""Named image data sets: splits, decoding, rotation and the registry."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
from _hub import encoded, own_cache, pixels_of, write_images, write_split
from _nets import data_root
from torch import Tensor

from neuboots._validation import ArgumentError
from neuboots.data import (
    DATASETS,
    CorruptFileError,
    DatasetNotFoundError,
    LazyDataset,
    Standardizer,
    StreamingDataset,
    image_datasets,
    load_dataset,
)
from neuboots.data.image_datasets import ROTATED_MNIST, rotation_angles
from neuboots.data.registry import resolve_name
from neuboots.loading import EpochLoader, load_class_labels

__all__ = ["own_cache"]

SPECS = {
    spec.location.name: spec
    for spec in vars(image_datasets).values()
    if isinstance(spec, image_datasets.ImageDatasetSpec) and spec.task == "classification"
} | {"mnist": image_datasets.MNIST}
NAMES = [*SPECS, "rotated_mnist"]
real = pytest.mark.skipif(data_root() is None, reason="no data root: set NEUBOOTS_DATA to the folder of the real sets")


def folder_of(name: str) -> str:
    return "mnist" if name == "rotated_mnist" else name


def write(root: Path, name: str, *, train: int = 0, test: int = 12, **options: Any) -> None:
    spec = SPECS[folder_of(name)]
    classes, channels = len(spec.classes), len(spec.mean)
    write_images(
        root / folder_of(name) / "data",
        counts={"train": train or 3 * classes, "test": test},
        size=spec.side,
        channels=channels,
        classes=classes,
        **options,
    )


def part_of(data: Any) -> LazyDataset:
    assert isinstance(data, LazyDataset)
    return data


def stacked(part: Any) -> Tensor:
    return torch.stack([x for x, _ in part])


@pytest.mark.parametrize("name", NAMES)
def test_load_dataset_splits(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    data = load_dataset(name, root=tmp_path, val_fraction=1 / 3)
    spec = ROTATED_MNIST if name == "rotated_mnist" else SPECS[name]
    classes = len(spec.classes)
    shape = (len(spec.mean), spec.side, spec.side)
    assert (data.name, data.task, data.num_classes, data.channels) == (name, "classification", classes, shape[0])
    assert data.classes == spec.classes
    assert len(set(data.classes)) == classes
    train, validation, test = part_of(data.train), part_of(data.validation), part_of(data.test)
    assert (len(train), len(validation), len(test)) == (2 * classes, classes, 12)
    assert load_class_labels(validation).bincount().tolist() == [1] * classes  # of each class the same
    x, y = train[0]
    assert (x.dtype, y.dtype, x.shape, y.shape) == (torch.float32, torch.int64, shape, ())
    if name != "rotated_mnist":
        mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (spec.mean, spec.std))
        raw = torch.from_numpy(pixels_of(1005, (*shape[1:], shape[0]))).permute(2, 0, 1)
        if shape[0] == 1:
            raw = torch.from_numpy(pixels_of(1005, shape[1:]))[None]
        assert torch.allclose(test[5][0], (raw / 255 - mean) / std, atol=1e-5)
    torch.manual_seed(0)
    augmented = part_of(data.augmented_train)
    assert augmented.rows == train.rows
    assert augmented[0][0].shape == shape
    assert not torch.equal(augmented[0][0], augmented[0][0])


def test_augmentation_is_settings() -> None:
    """DeVries and Taylor: cutout 16 for CIFAR-10, 8 for CIFAR-100, 20 for SVHN; digits are not mirrored."""
    found = {name: spec.augmentation for name, spec in SPECS.items()}
    assert {name: augment.cutout for name, augment in found.items() if augment.cutout} == {
        "cifar10": 16,
        "cifar100": 8,
        "svhn": 20,
    }
    assert {name for name, augment in found.items() if not augment.flip} == {"mnist", "svhn"}
    assert all(found[name].padding == 4 for name in ("cifar10", "cifar100", "svhn"))
    assert all(augment.fill == (0.0,) for name, augment in found.items())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cifar10", {"image": "img"}),
        ("cifar100", {"image": "img", "label": "fine_label"}),
        ("cifar100", {"labels": [f"c{c}" for c in range(100)]}),
        ("svhn", {"features": False}),
    ],
)
def test_hubs_columns_and_files_names(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    write(tmp_path, name, **options)
    data = load_dataset(name, root=tmp_path)
    assert data.classes == tuple(options.get("labels", SPECS[name].classes))
    assert int(part_of(data.test)[7][1]) == 7


@pytest.mark.parametrize("name", ["cifar10", "rotated_mnist"])
def test_stream_has_same_rows(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    data, flow = (
        load_dataset(name, root=tmp_path, val_fraction=0.0),
        load_dataset(name, root=tmp_path, streaming=True, val_fraction=0.3),
    )
    assert isinstance(flow.train, StreamingDataset)
    assert isinstance(flow.validation, StreamingDataset)
    assert isinstance(flow.test, StreamingDataset)
    assert torch.allclose(stacked(flow.test), stacked(data.test), atol=1e-6)
    assert data.validation is None
    streamed = torch.cat([stacked(flow.train), stacked(flow.validation)])
    rows = torch.cdist(streamed.flatten(1), stacked(data.train).flatten(1)).argmin(1)
    assert sorted(rows.tolist()) == list(range(30))
    assert torch.allclose(streamed, stacked(data.train)[rows], atol=1e-6)
    assert len(list(flow.validation)) == 9
    torch.manual_seed(0)
    assert not torch.equal(stacked(flow.augmented_train), stacked(flow.augmented_train))
    batches = EpochLoader(flow.augmented_train, batch_size=4, seed=0, steps_per_epoch=2).epoch(0)
    assert [batch.x.shape[0] for _, batch, _ in batches] == [4, 4]


def test_set_without_rows_to_test_on(tmp_path: Path) -> None:
    write_images(tmp_path / "cifar10/data", counts={"train": 20})
    data = load_dataset("cifar10", root=tmp_path)
    assert data.test is None


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("label", [-1, 10])
def test_label_that_is_no_class_is_reported(tmp_path: Path, label: int, streaming: bool) -> None:
    image = encoded(pixels_of(0, (28, 28)))
    write_split(
        tmp_path / "mnist/data", "train", {"image": [image] * 30, "label": [*range(10), *range(10)] + [label] * 10}
    )
    with pytest.raises(CorruptFileError):
        list(load_dataset("mnist", root=tmp_path, streaming=streaming, val_fraction=0.0).train)  # type: ignore[call-overload]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["mnist", "rotated_mnist"])
def test_image_of_another_size_is_reported(tmp_path: Path, name: str, streaming: bool) -> None:
    """It would be cut to size where it is augmented, and nowhere else."""
    images = [encoded(pixels_of(row, (28, 28) if row != 3 else (40, 30))) for row in range(6)]
    write_split(tmp_path / "mnist/data", "train", {"image": images, "label": list(range(6))})
    data = load_dataset(name, root=tmp_path, streaming=streaming, val_fraction=0.0)
    loader = EpochLoader(data.augmented_train, batch_size=6, seed=0, steps_per_epoch=1 if streaming else None)
    with pytest.raises(CorruptFileError):
        list(loader.epoch(0))


def test_angles_are_uniform_and_named_by_seed_split_and_row() -> None:
    train = rotation_angles(range(4000), 0, "train")
    assert scipy.stats.kstest(train.numpy() / 360, "uniform").pvalue > 1e-3
    assert torch.equal(rotation_angles([7, 3], 0, "train"), train[[7, 3]])
    for other in (rotation_angles(range(4000), 1, "train"), rotation_angles(range(4000), 0, "test")):
        assert abs(float(torch.corrcoef(torch.stack([train, other]))[0, 1])) < 5 / 4000**0.5


def test_images_are_rotated_by_their_angles(tmp_path: Path) -> None:
    disc = np.fromfunction(lambda i, j: (i - 13.5) ** 2 + (j - 13.5) ** 2 < 144, (28, 28))
    pixels = [scipy.ndimage.gaussian_filter(pixels_of(row, (28, 28)).astype(float), 2) * disc for row in range(30)]
    images = [encoded(image) for image in pixels]
    for split in ("train", "test"):
        write_split(tmp_path / "mnist/data", split, {"image": images, "label": [row % 10 for row in range(30)]})
    data = load_dataset("rotated_mnist", root=tmp_path, seed=5, val_fraction=0.2)
    for part, split in ((data.train, "train"), (data.validation, "train"), (data.test, "test")):
        part = part_of(part)
        rows = list(part.rows or range(30))
        assert isinstance(data.standardizer, Standardizer)
        turned = data.standardizer.inverse(stacked(part))
        for x, row, degrees in zip(turned, rows, rotation_angles(rows, 5, split).tolist(), strict=True):
            expected = scipy.ndimage.rotate(np.floor(pixels[row]) / 255, degrees, reshape=False, order=1)
            assert np.abs(x[0].numpy() - expected).max() < 0.02
    again = load_dataset("rotated_mnist", root=tmp_path, seed=5, val_fraction=0.2)
    other = load_dataset("rotated_mnist", root=tmp_path, seed=6, val_fraction=0.2)
    assert torch.equal(stacked(data.test), stacked(again.test))
    assert not torch.allclose(stacked(data.test), stacked(other.test), atol=0.1)
    many = part_of(data.test).__getitems__([4, 9])
    assert torch.equal(many[1][0], part_of(data.test)[9][0])  # whatever the batch around it
    assert torch.equal(pickle.loads(pickle.dumps(data.test))[9][0], many[1][0])


def test_digits_splits() -> None:
    data = load_dataset("digits")
    x, y = part_of(data.train)[3]
    assert (x.shape, x.dtype, y.dtype) == ((1, 8, 8), torch.float32, torch.int64)
    whole = torch.cat([stacked(part) for part in (data.train, data.validation)])
    assert float(whole.mean()) == pytest.approx(0, abs=1e-3)
    assert float(whole.std()) == pytest.approx(1, abs=1e-3)
    assert part_of(load_dataset("digits", seed=9).test).rows == part_of(data.test).rows
    assert part_of(load_dataset("digits", seed=9).validation).rows != part_of(data.validation).rows
    streamed = load_dataset("digits", streaming=True)
    assert isinstance(streamed.test, StreamingDataset)
    assert torch.equal(stacked(streamed.test), stacked(data.test))
    assert load_dataset("digits", val_fraction=0.0).validation is None
    assert load_dataset("digits", val_fraction=0.0, streaming=True).validation is None


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("CIFAR-10", "cifar10"),
        ("cifar_100", "cifar100"),
        ("Fashion-MNIST", "fashion_mnist"),
        ("fashionmnist", "fashion_mnist"),
        ("rotated mnist", "rotated_mnist"),
        ("VOC", "voc2012"),
        ("PASCAL-VOC-2012", "voc2012"),
        ("wine_red", "uci/wine_red"),
        ("UCI/Boston", "uci/boston"),
        ("SST-2", "sst2"),
    ],
)
def test_resolve_name_accepts_spellings(given: str, name: str) -> None:
    assert resolve_name(given) == name


@pytest.mark.parametrize("wrong", ["cifar11", "svhm", "camvd"])
def test_unknown_name_lists_closest_first(wrong: str) -> None:
    with pytest.raises(ArgumentError) as error:
        load_dataset(wrong)
    assert all(name in str(error.value) for name in DATASETS)
    with pytest.raises(ArgumentError):
        load_dataset(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name, entry in DATASETS.items() if not entry.shipped])
def test_missing_dataset_names_searched_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(DatasetNotFoundError, match=str(tmp_path)):
        load_dataset(name, root=tmp_path)
