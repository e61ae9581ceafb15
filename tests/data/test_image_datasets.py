"""Sets of images, on small files in the hub's layout and on the real sets; and the catalogue of all sets."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.ndimage
import scipy.stats
import torch
from _hub import encoded, own_cache, pixels_of, write_images, write_split
from _nets import data_root
from PIL import Image
from torch import Tensor

from neuboots._validation import ArgumentError
from neuboots.data import (
    DATASETS,
    CorruptFileError,
    DatasetBundle,
    DatasetNotFoundError,
    LazyDataset,
    Standardizer,
    StreamingDataset,
    image_datasets,
    load_dataset,
)
from neuboots.data.image_datasets import ROTATED_MNIST, rotation_angles
from neuboots.data.images import decode_image, decode_mask
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


# -- pixels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP"])
def test_images_of_every_mode_become_grey_or_colour(kind: str) -> None:
    rgb = pixels_of(0, (6, 5, 3))
    picture = Image.fromarray(rgb)
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    file = io.BytesIO()
    picture.save(file, kind, **options)
    colour = decode_image(file.getvalue(), 3, "here")
    assert colour.dtype == torch.uint8
    assert (colour.permute(1, 2, 0).numpy() == rgb).all()
    assert (decode_image(file.getvalue(), 1, "here")[0].numpy() == np.array(picture.convert("L"))).all()
    grey = encoded(rgb[..., 0])
    assert (decode_image(grey, 3, "here").numpy() == rgb[None, ..., 0]).all()
    assert (decode_image(encoded(picture, mode="RGBA"), 3, "here").permute(1, 2, 0).numpy() == rgb).all()

    clear = Image.fromarray(rgb[..., 0]).convert("P")
    file = io.BytesIO()
    clear.save(file, "PNG", transparency=bytes(range(256)))
    assert (decode_image(file.getvalue(), 3, "here").permute(1, 2, 0).numpy() == np.array(clear.convert("RGB"))).all()


def test_a_row_may_name_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(pixels_of(3, (4, 4))))
    x = decode_image({"bytes": None, "path": str(tmp_path / "a.png")}, 1, "here")
    assert (x[0].numpy() == pixels_of(3, (4, 4))).all()
    with pytest.raises(CorruptFileError):
        decode_image({"bytes": None, "path": str(tmp_path / "b.png")}, 1, "here")


@pytest.mark.parametrize("keep", [0, 7, 40, 80])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_what_is_left_of_an_image_is_refused(kind: str, keep: int) -> None:
    with pytest.raises(CorruptFileError):
        decode_image(encoded(pixels_of(0, (32, 32, 3)), kind=kind)[:keep], 3, "cifar10, row 3")


def test_numbers_of_16_bits_become_bytes_of_an_image_and_classes_of_a_mask() -> None:
    deep = Image.fromarray(np.arange(16, dtype=np.uint16).reshape(4, 4))
    assert decode_image(encoded(deep), 1, "here").unique().tolist() == [0]
    assert decode_mask(encoded(deep), "here").tolist() == np.arange(16).reshape(4, 4).tolist()  # as classes they are


# -- on small files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_set_gives_its_parts(tmp_path: Path, name: str) -> None:
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


def test_augmentation_is_the_settings() -> None:
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
def test_the_hubs_columns_and_the_files_names(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    write(tmp_path, name, **options)
    data = load_dataset(name, root=tmp_path)
    assert data.classes == tuple(options.get("labels", SPECS[name].classes))
    assert int(part_of(data.test)[7][1]) == 7


@pytest.mark.parametrize("name", ["cifar10", "rotated_mnist"])
def test_a_stream_has_the_same_rows(tmp_path: Path, name: str) -> None:
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


def test_a_set_with_rows_for_validation_gives_those(tmp_path: Path) -> None:
    write_images(tmp_path / "cifar10/data", counts={"train": 20, "validation": 6, "test": 5})
    data = load_dataset("cifar10", root=tmp_path)
    assert [len(part_of(part)) for part in (data.train, data.validation, data.test)] == [20, 6, 5]


def test_a_set_without_rows_to_test_on(tmp_path: Path) -> None:
    write_images(tmp_path / "cifar10/data", counts={"train": 20})
    data = load_dataset("cifar10", root=tmp_path)
    assert data.test is None


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("label", [-1, 10])
def test_a_label_that_is_no_class_is_named(tmp_path: Path, label: int, streaming: bool) -> None:
    image = encoded(pixels_of(0, (28, 28)))
    write_split(
        tmp_path / "mnist/data", "train", {"image": [image] * 30, "label": [*range(10), *range(10)] + [label] * 10}
    )
    with pytest.raises(CorruptFileError):
        list(load_dataset("mnist", root=tmp_path, streaming=streaming, val_fraction=0.0).train)  # type: ignore[call-overload]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("bad", ["one", 0.5, float("nan"), None, [1]])
def test_labels_of_another_type_are_refused(tmp_path: Path, bad: Any, streaming: bool) -> None:
    (path,) = write_split(
        tmp_path / "mnist/data", "train", {"image": [encoded(pixels_of(0, (28, 28)))] * 2, "label": [0, 1]}
    )
    kind = pa.int64() if bad is None else None
    pq.write_table(pq.read_table(path).set_column(1, "label", pa.array([bad] * 2, kind)), path)
    with pytest.raises(CorruptFileError):
        list(load_dataset("mnist", root=tmp_path, streaming=streaming, val_fraction=0.0).train)  # type: ignore[call-overload]


@pytest.mark.parametrize("streaming", [False, True])
def test_labels_that_are_true_or_false_are_numbers(tmp_path: Path, streaming: bool) -> None:
    (path,) = write_split(
        tmp_path / "mnist/data", "train", {"image": [encoded(pixels_of(0, (28, 28)))] * 2, "label": [0, 1]}
    )
    pq.write_table(pq.read_table(path).set_column(1, "label", [[True, False]]), path)
    rows = list(load_dataset("mnist", root=tmp_path, streaming=streaming, val_fraction=0.0).train)  # type: ignore[call-overload]
    assert [(y.dtype, int(y)) for _, y in rows] == [(torch.int64, 1), (torch.int64, 0)]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["mnist", "rotated_mnist"])
def test_an_image_of_another_size_is_named(tmp_path: Path, name: str, streaming: bool) -> None:
    """It would be cut to size where it is augmented, and nowhere else."""
    images = [encoded(pixels_of(row, (28, 28) if row != 3 else (40, 30))) for row in range(6)]
    write_split(tmp_path / "mnist/data", "train", {"image": images, "label": list(range(6))})
    data = load_dataset(name, root=tmp_path, streaming=streaming, val_fraction=0.0)
    loader = EpochLoader(data.augmented_train, batch_size=6, seed=0, steps_per_epoch=1 if streaming else None)
    with pytest.raises(CorruptFileError):
        list(loader.epoch(0))


def test_a_rotten_image_is_named_in_a_set(tmp_path: Path) -> None:
    images = [encoded(pixels_of(row, (32, 32, 3))) for row in range(20)]
    images[13] = b"\x89PNG rotten"
    write_split(tmp_path / "cifar10/data", "train", {"img": images, "label": [0, 1] * 10})
    data = load_dataset("cifar10", root=tmp_path, val_fraction=0)
    with pytest.raises(CorruptFileError):
        list(EpochLoader(data.augmented_train, batch_size=8, seed=0).epoch(0))
    assert load_class_labels(data.train).tolist() == [0, 1] * 10  # labels are read without images


def test_seeds_draw_other_rows_for_validation(tmp_path: Path) -> None:
    write(tmp_path, "cifar10", train=100)
    rows = [part_of(load_dataset("cifar10", root=tmp_path, seed=seed).validation).rows for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]
    for seed in (0.5, "0", True):
        with pytest.raises(ArgumentError):
            load_dataset("cifar10", root=tmp_path, seed=seed)  # type: ignore[arg-type]


def test_the_variable_is_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "cifar10")
    monkeypatch.setenv("NEUBOOTS_DATA", str(tmp_path))
    assert len(part_of(load_dataset("cifar10").test)) == 12
    with pytest.raises(DatasetNotFoundError):
        load_dataset("svhn")


# -- rotated MNIST -------------------------------------------------------------------------------------


def test_angles_are_uniform_and_named_by_seed_split_and_row() -> None:
    train = rotation_angles(range(4000), 0, "train")
    assert scipy.stats.kstest(train.numpy() / 360, "uniform").pvalue > 1e-3
    assert torch.equal(rotation_angles([7, 3], 0, "train"), train[[7, 3]])
    for other in (rotation_angles(range(4000), 1, "train"), rotation_angles(range(4000), 0, "test")):
        assert abs(float(torch.corrcoef(torch.stack([train, other]))[0, 1])) < 5 / 4000**0.5


def test_images_are_turned_by_their_angles(tmp_path: Path) -> None:
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


# -- the catalogue -------------------------------------------------------------------------------------


def test_digits_are_always_there() -> None:
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
def test_names_as_people_write_them(given: str, name: str) -> None:
    assert resolve_name(given) == name


@pytest.mark.parametrize("wrong", ["cifar11", "svhm", "camvd"])
def test_a_wrong_name_gets_the_closest_first_and_all(wrong: str) -> None:
    with pytest.raises(ArgumentError) as error:
        load_dataset(wrong)
    assert all(name in str(error.value) for name in DATASETS)
    with pytest.raises(ArgumentError):
        load_dataset(7)  # type: ignore[arg-type]


def test_every_set_has_a_line_and_a_way_to_get_it() -> None:
    for name, entry in DATASETS.items():
        assert resolve_name(name) == name
        assert 10 < len(entry.summary) < 90
        assert entry.hub or entry.hint, name


def test_only_uci_sets_have_several_splits() -> None:
    with pytest.raises(ArgumentError):
        load_dataset("digits", split=3)


@pytest.mark.parametrize("name", [name for name, entry in DATASETS.items() if not entry.shipped])
def test_every_other_set_that_is_missing_says_where_it_was_looked_for(tmp_path: Path, name: str) -> None:
    with pytest.raises(DatasetNotFoundError, match=str(tmp_path)):
        load_dataset(name, root=tmp_path)


# -- the real sets -------------------------------------------------------------------------------------

COUNTS = {
    "mnist": (60_000, 10_000),
    "fashion_mnist": (15_000, 5_000),
    "cifar10": (10_000, 2_500),
    "cifar100": (8_000, 2_500),
    "svhn": (4_000, 4_000),
    "wbc_cells": (233, 115),
    "rotated_mnist": (60_000, 10_000),
}


@real
@pytest.mark.parametrize("name", NAMES)
def test_the_real_set(name: str) -> None:
    data = load_dataset(name, root=data_root())
    sizes = [len(part_of(part)) for part in (data.train, data.validation, data.test)]
    assert sizes[0] + sizes[1] >= COUNTS[name][0]  # here a part of the set may lie, elsewhere the whole
    assert sizes[1] == pytest.approx(0.1 * (sizes[0] + sizes[1]), abs=1)
    assert sizes[2] >= COUNTS[name][1]
    labels = load_class_labels(data.train)
    assert labels.unique().tolist() == list(range(data.num_classes))
    some = torch.randperm(sizes[0], generator=torch.Generator().manual_seed(0))[:1000].tolist()
    x = torch.stack([x for x, _ in part_of(data.train).__getitems__(some)])
    assert x.shape[1:] == (data.channels, *[SPECS[folder_of(name)].side] * 2)
    # 0.02 for the part of the set that lies here, and for rounded constants
    for channel in x.transpose(0, 1):
        means = channel.flatten(1).mean(1)
        assert abs(float(means.mean())) < 5 * float(means.std()) / len(means) ** 0.5 + 0.02
        assert float(channel.std()) == pytest.approx(1, abs=0.05)


@real
def test_computed_constants_are_those_of_the_training_rows() -> None:
    """All 233 cells; and rotated MNIST, whose first 3,000 rows stand for all."""
    cells = Standardizer.from_data(in_units(load_dataset("wbc_cells", root=data_root(), val_fraction=0.0)), axes=2)
    spec = SPECS["wbc_cells"]
    assert (*cells.mean, *cells.std) == pytest.approx((*spec.mean, *spec.std), abs=6e-5)
    turned = load_dataset("rotated_mnist", root=data_root(), val_fraction=0.0)
    some = Standardizer.from_data(in_units(turned, 3000), axes=2)
    assert some.mean == pytest.approx(ROTATED_MNIST.mean, abs=0.003)
    assert some.std == pytest.approx(ROTATED_MNIST.std, abs=0.003)


def in_units(data: DatasetBundle, most: int | None = None) -> Tensor:
    assert isinstance(data.standardizer, Standardizer)
    part = part_of(data.train)
    rows = part.__getitems__(range(most or len(part)))
    return data.standardizer.inverse(torch.stack([x for x, _ in rows]))


@real
def test_the_real_classes_have_the_names_of_the_files() -> None:
    assert load_dataset("cifar100", root=data_root()).classes == SPECS["cifar100"].classes
    assert load_dataset("cifar10", root=data_root()).classes == SPECS["cifar10"].classes
    assert load_dataset("fashion_mnist", root=data_root()).classes == SPECS["fashion_mnist"].classes
