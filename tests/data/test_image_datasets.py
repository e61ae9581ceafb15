"""Named image data sets: splits, decoding, masks, rotation and the registry."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
from _hub import encoded, own_cache, pixels_of, write_images, write_split, write_voc
from PIL import Image
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
from neuboots.data.dataset import LoadOptions
from neuboots.data.image_datasets import (
    VOC2012,
    WBC_SEGMENTATION,
    load_image_dataset,
    rotation_angles,
    voc_color,
)
from neuboots.data.images import decode_mask
from neuboots.data.registry import resolve_name
from neuboots.loading import EpochLoader, load_class_labels

__all__ = ["own_cache"]

SPECS: dict[str, Any] = {
    spec.location.name: spec
    for spec in vars(image_datasets).values()
    if isinstance(spec, image_datasets.ImageDatasetSpec) and spec.task == "classification"
}


def folder_of(name: str) -> str:
    return "mnist" if name == "rotated_mnist" else name


def write(root: Path, name: str, *, train: int = 0, test: int = 12, **options: Any) -> None:
    spec = SPECS[folder_of(name)]
    classes, channels = len(spec.classes), len(spec.standardizer.mean)
    write_images(
        root / folder_of(name) / "data",
        counts={"train": train or 3 * classes, "test": test},
        size=spec.augmentation.size[0],
        channels=channels,
        classes=classes,
        **options,
    )


def part_of(data: Any) -> LazyDataset:
    assert isinstance(data, LazyDataset)
    return data


def stacked(part: Any) -> Tensor:
    return torch.stack([x for x, _ in part])


@pytest.mark.parametrize("name", SPECS)
def test_load_dataset_splits(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    data = load_dataset(name, root=tmp_path, val_fraction=1 / 3)
    spec = SPECS[name]
    classes = len(spec.classes)
    shape = (len(spec.standardizer.mean), *spec.augmentation.size)
    assert (data.name, data.task, data.num_classes, data.channels) == (name, "classification", classes, shape[0])
    assert data.classes == spec.classes
    assert len(set(data.classes)) == classes
    train, validation, test = part_of(data.train), part_of(data.validation), part_of(data.test)
    assert (len(train), len(validation), len(test)) == (2 * classes, classes, 12)
    assert load_class_labels(validation).bincount().tolist() == [1] * classes  # of each class the same
    x, y = train[0]
    assert (x.dtype, y.dtype, x.shape, y.shape) == (torch.float32, torch.int64, shape, ())
    if name != "rotated_mnist":
        pixels = pixels_of(1005, shape[1:] if shape[0] == 1 else (*shape[1:], 3)).reshape(*shape[1:], -1)
        raw = torch.from_numpy(pixels).permute(2, 0, 1) / 255
        assert torch.allclose(test[5][0], spec.standardizer(raw), atol=1e-5)
    torch.manual_seed(0)
    augmented = part_of(data.augmented_train)
    assert augmented.rows == train.rows
    assert augmented[0][0].shape == shape
    assert not torch.equal(augmented[0][0], augmented[0][0])


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
    data: Any = load_dataset(name, root=tmp_path, val_fraction=0.0)
    flow: Any = load_dataset(name, root=tmp_path, streaming=True, val_fraction=0.3)
    assert torch.allclose(stacked(flow.test), stacked(data.test), atol=1e-6)
    assert data.validation is None
    streamed = torch.cat([stacked(flow.train), stacked(flow.validation)])
    rows = torch.cdist(streamed.flatten(1), stacked(data.train).flatten(1)).argmin(1)
    assert sorted(rows.tolist()) == list(range(30))
    assert torch.allclose(streamed, stacked(data.train)[rows], atol=1e-6)
    assert len(list(flow.validation)) == 9
    torch.manual_seed(0)
    assert not torch.equal(stacked(flow.augmented_train), stacked(flow.augmented_train))


def test_set_without_rows_to_test_on(tmp_path: Path) -> None:
    write_images(tmp_path / "cifar10/data", counts={"train": 20})
    data = load_dataset("cifar10", root=tmp_path)
    assert data.test is None


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["mnist", "rotated_mnist"])
@pytest.mark.parametrize(("label", "size"), [(-1, (28, 28)), (10, (28, 28)), (3, (40, 30))])
def test_invalid_label_or_size_is_reported(
    tmp_path: Path, name: str, label: int, size: tuple[int, int], streaming: bool
) -> None:
    images = [encoded(pixels_of(row, (28, 28))) for row in range(5)] + [encoded(pixels_of(5, size))]
    write_split(tmp_path / "mnist/data", "train", {"image": images, "label": [*range(5), label]})
    with pytest.raises(CorruptFileError):
        list(load_dataset(name, root=tmp_path, streaming=streaming, val_fraction=0.0).train)  # type: ignore[call-overload]


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


# -- masks ---------------------------------------------------------------------------------------------


def mask_pixels(number: int, size: tuple[int, int], classes: int, ignore_index: int | None) -> Any:
    rng = np.random.default_rng(number)
    mask = rng.integers(0, classes, size).astype(np.uint8)
    if ignore_index is not None:
        mask[rng.random(size) < 0.2] = ignore_index
    return mask


def palette(mask: Any) -> Image.Image:
    """As PASCAL VOC has it: the colours of a picture, and the classes by their entries."""
    picture = Image.fromarray(mask)
    picture.putpalette([level for number in range(256) for level in voc_color(number).to_bytes(3)])
    assert picture.mode == "P"
    return picture


def write_masks(root: Path, name: str, counts: dict[str, int], *, sizes: Any, make: Any = encoded) -> None:
    classes, ignore_index = {"camvid": (11, 11), "wbc_segmentation": (3, None), "voc2012": (21, 255)}[name]
    for place, (split, count) in enumerate(counts.items()):
        rows = [(row, sizes[row % len(sizes)]) for row in range(1000 * place, 1000 * place + count)]
        columns = {
            "image": [encoded(pixels_of(row, (*size, 3))) for row, size in rows],
            "mask": [make(mask_pixels(row, size, classes, ignore_index)) for row, size in rows],
        }
        write_split(root / name / "data", split, columns)


def test_rgb_masks_need_a_color_map() -> None:
    mask = mask_pixels(0, (7, 5), 21, 255)
    coloured, bits = encoded(palette(mask), mode="RGB"), encoded(Image.fromarray(mask > 9))
    assert (decode_mask(bits, "here").numpy() == (mask > 9)).all()
    assert (decode_mask(coloured, "here", color_map=VOC2012.color_map).numpy() == mask).all()
    with pytest.raises(CorruptFileError):
        decode_mask(coloured, "here")
    with pytest.raises(CorruptFileError):
        decode_mask(encoded(pixels_of(0, (4, 4, 3))), "here", color_map=VOC2012.color_map)


def test_vocs_palette() -> None:
    """Facts of the development kit: background, aeroplane, bicycle, person, tv monitor, void."""
    colors = [voc_color(number) for number in (0, 1, 2, 15, 20, 255)]
    assert colors == [0x000000, 0x800000, 0x008000, 0xC08080, 0x004080, 0xE0E0C0]
    assert len({voc_color(number) for number in [*range(21), 255]}) == 22


@pytest.mark.parametrize("streaming", [False, True])
def test_camvid(tmp_path: Path, streaming: bool) -> None:
    write_masks(tmp_path, "camvid", {"train": 6, "validation": 4, "test": 5}, sizes=[(120, 160)])
    data = load_dataset("camvid", root=tmp_path, streaming=streaming)
    assert (data.task, data.num_classes, data.channels, data.ignore_index) == ("segmentation", 11, 3, 255)
    found = {name: list(getattr(data, name)) for name in ("train", "validation", "test")}
    assert {name: len(rows) for name, rows in found.items()} == {"train": 6, "validation": 4, "test": 5}
    x, y = found["test"][3]
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((3, 120, 160), torch.float32, (120, 160), torch.int64)
    mask = mask_pixels(2003, (120, 160), 11, 11)
    assert (y.numpy() == np.where(mask == 11, 255, mask)).all()
    raw = torch.from_numpy(pixels_of(2003, (120, 160, 3))).permute(2, 0, 1) / 255
    assert isinstance(data.standardizer, Standardizer)
    assert torch.allclose(data.standardizer.inverse(x), raw, atol=1e-5)
    loader = EpochLoader(data.augmented_train, batch_size=2, seed=0, steps_per_epoch=2 if streaming else None)
    batch = next(iter(loader.epoch(0)))[1]
    assert (batch.x.shape, batch.y.shape) == ((2, 3, 120, 160), (2, 120, 160))
    assert set(batch.y.unique().tolist()) <= {*range(11), 255}


def test_wbc_segmentation_sizes(tmp_path: Path) -> None:
    sizes = [(30, 30), (48, 48), (28, 30)]
    write_masks(tmp_path, "wbc_segmentation", {"train": 9, "test": 3}, sizes=sizes)
    data = load_dataset("wbc_segmentation", root=tmp_path, val_fraction=1 / 3)
    assert (data.num_classes, data.ignore_index, len(part_of(data.validation))) == (3, None, 3)
    for part in (data.train, data.validation, data.test):
        for x, y in part_of(part):
            assert (x.shape, y.shape) == ((3, 120, 120), (120, 120))
            assert y.unique().tolist() == [0, 1, 2]
    torch.manual_seed(0)
    for x, y in part_of(data.augmented_train):
        assert (x.shape, y.shape) == ((3, 120, 120), (120, 120))
        assert set(y.unique().tolist()) <= {0, 1, 2}  # no void comes in
    own = load_image_dataset(replace(WBC_SEGMENTATION, resize=None), tmp_path, LoadOptions(val_fraction=0.0))
    assert [tuple(y.shape) for _, y in part_of(own.test)] == [sizes[row % 3] for row in (1000, 1001, 1002)]
    thirty = load_image_dataset(replace(WBC_SEGMENTATION, resize=(30, 30)), tmp_path, LoadOptions(val_fraction=0.0))
    assert (part_of(thirty.train)[0][1].numpy() == mask_pixels(0, (30, 30), 3, None)).all()  # of this size already


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "make", [encoded, lambda mask: encoded(palette(mask)), lambda mask: encoded(palette(mask), mode="RGB")]
)
def test_voc_from_tables(tmp_path: Path, make: Any, streaming: bool) -> None:
    """With rows for validation alone, those are the test part, whose labels are public."""
    write_masks(tmp_path, "voc2012", {"train": 10, "val": 4}, sizes=[(20, 30), (30, 20)], make=make)
    data = load_dataset("voc2012", root=tmp_path, streaming=streaming, val_fraction=0.2)
    assert (data.num_classes, data.ignore_index) == (21, 255)
    found = {name: list(getattr(data, name)) for name in ("train", "validation", "test")}
    assert {name: len(rows) for name, rows in found.items()} == {"train": 8, "validation": 2, "test": 4}
    x, y = found["test"][1]
    assert x.shape == (3, 30, 20)
    assert (y.numpy() == mask_pixels(1001, (30, 20), 21, 255)).all()
    x, y = next(iter(data.augmented_train))  # type: ignore[call-overload]
    assert (x.shape, y.shape) == ((3, 513, 513), (513, 513))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("folder", ["VOCdevkit/VOC2012", "voc2012/VOCdevkit/VOC2012", "voc2012", "VOC2012"])
def test_voc_from_its_folders(tmp_path: Path, folder: str, streaming: bool) -> None:
    names = [f"2007_{row:06d}" for row in range(8)]
    made = write_voc(tmp_path / folder, {"train": names[:5], "val": names[5:]})
    data = load_dataset("voc2012", root=tmp_path, val_fraction=0.2, streaming=streaming)
    found = {name: list(getattr(data, name)) for name in ("train", "validation", "test")}
    assert {name: len(rows) for name, rows in found.items()} == {"train": 4, "validation": 1, "test": 3}
    assert (found["test"][0][1].numpy() == made[names[5]]).all()
    assert isinstance(data.train, StreamingDataset if streaming else LazyDataset)
    assert data.classes == VOC2012.classes
    assert data.ignore_index == 255


@pytest.mark.parametrize("streaming", [False, True])
def test_invalid_masks_are_reported(tmp_path: Path, streaming: bool) -> None:
    good = encoded(mask_pixels(0, (4, 6), 11, 11))
    for bad in (encoded(np.full((4, 6), 12)), encoded(np.zeros((4, 5))), encoded(pixels_of(0, (4, 6, 3))), good[:50]):
        columns = {"image": [encoded(pixels_of(0, (4, 6, 3)))] * 3, "mask": [good, bad, good]}
        for split in ("train", "validation", "test"):
            write_split(tmp_path / "camvid/data", split, columns)
        data = load_dataset("camvid", root=tmp_path, streaming=streaming)
        with pytest.raises(CorruptFileError):
            list(data.test)  # type: ignore[call-overload]
