"""Named segmentation data sets and masks in Parquet files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _hub import encoded, own_cache, pixels_of, write_split
from _nets import data_root
from PIL import Image

from neuboots.data import (
    CorruptFileError,
    LazyDataset,
    Standardizer,
    StreamingDataset,
    load_dataset,
)
from neuboots.data.dataset import LoadOptions
from neuboots.data.image_datasets import VOC2012, WBC_SEGMENTATION, load_image_dataset, voc_color
from neuboots.data.images import decode_mask
from neuboots.loading import EpochLoader

__all__ = ["own_cache"]

real = pytest.mark.skipif(data_root() is None, reason="no data root: set NEUBOOTS_DATA to the folder of the real sets")
CLASSES = {"camvid": 11, "wbc_segmentation": 3, "voc2012": 21}


def mask_pixels(number: int, size: tuple[int, int], classes: int, ignore_index: int | None) -> Any:
    rng = np.random.default_rng(number)
    mask = rng.integers(0, classes, size).astype(np.uint8)
    if ignore_index is not None:
        mask[rng.random(size) < 0.2] = ignore_index
    return mask


def palette(mask: Any) -> Image.Image:
    """As PASCAL VOC has it: the colours of a picture, and the classes by their entries."""
    picture = Image.fromarray(mask)
    picture.putpalette([level for number in range(256) for level in voc_color(number)])
    assert picture.mode == "P"
    return picture


def write(root: Path, name: str, counts: dict[str, int], *, sizes: Any = ((12, 16),), make: Any = encoded) -> None:
    ignore_index = {"camvid": 11, "wbc_segmentation": None, "voc2012": 255}[name]
    for place, (split, count) in enumerate(counts.items()):
        rows = range(1000 * place, 1000 * place + count)
        shapes = [sizes[row % len(sizes)] for row in rows]
        columns = {
            "image": [encoded(pixels_of(row, (*shape, 3))) for row, shape in zip(rows, shapes, strict=True)],
            "mask": [
                make(mask_pixels(row, shape, CLASSES[name], ignore_index))
                for row, shape in zip(rows, shapes, strict=True)
            ],
        }
        write_split(root / name / "data", split, columns)


def part_of(data: Any) -> LazyDataset:
    assert isinstance(data, LazyDataset)
    return data


def test_masks_are_gray_or_have_palette() -> None:
    mask = mask_pixels(0, (7, 5), 21, 255)
    for file in (encoded(mask), encoded(palette(mask))):
        found = decode_mask(file, "here")
        assert found.dtype == torch.int64
        assert (found.numpy() == mask).all()
    bits = Image.fromarray(mask > 9)
    assert bits.mode == "1"
    assert (decode_mask(encoded(bits), "here").numpy() == (mask > 9)).all()


def test_rgb_masks_need_a_color_map() -> None:
    mask = mask_pixels(0, (7, 5), 21, 255)
    coloured = encoded(palette(mask), mode="RGB")
    assert (decode_mask(coloured, "here", colors=VOC2012.colors).numpy() == mask).all()
    with pytest.raises(CorruptFileError):
        decode_mask(coloured, "here")
    with pytest.raises(CorruptFileError):
        decode_mask(encoded(pixels_of(0, (4, 4, 3))), "here", colors=VOC2012.colors)


def test_vocs_palette() -> None:
    """Facts of the development kit: background, aeroplane, bicycle, person, tv monitor, void."""
    assert [voc_color(number) for number in (0, 1, 2, 15, 20, 255)] == [
        (0, 0, 0),
        (128, 0, 0),
        (0, 128, 0),
        (192, 128, 128),
        (0, 64, 128),
        (224, 224, 192),
    ]
    assert len({colour for colour, _ in VOC2012.colors}) == 22


@pytest.mark.parametrize("streaming", [False, True])
def test_camvid(tmp_path: Path, streaming: bool) -> None:
    write(tmp_path, "camvid", {"train": 6, "validation": 4, "test": 5}, sizes=[(120, 160)])
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
    write(tmp_path, "wbc_segmentation", {"train": 9, "test": 3}, sizes=sizes)
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
    own = load_image_dataset(
        replace(WBC_SEGMENTATION, resize=None), tmp_path, LoadOptions(val_fraction=0.0, seed=0, streaming=False)
    )
    assert [tuple(y.shape) for _, y in part_of(own.test)] == [sizes[row % 3] for row in (1000, 1001, 1002)]
    thirty = load_image_dataset(
        replace(WBC_SEGMENTATION, resize=30), tmp_path, LoadOptions(val_fraction=0.0, seed=0, streaming=False)
    )
    assert (part_of(thirty.train)[0][1].numpy() == mask_pixels(0, (30, 30), 3, None)).all()  # of this size already


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "make", [encoded, lambda mask: encoded(palette(mask)), lambda mask: encoded(palette(mask), mode="RGB")]
)
def test_voc_from_tables(tmp_path: Path, make: Any, streaming: bool) -> None:
    """With rows for validation alone, those are the test part, whose labels are public."""
    write(tmp_path, "voc2012", {"train": 10, "val": 4}, sizes=[(20, 30), (30, 20)], make=make)
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
    root = tmp_path / folder
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (root / name).mkdir(parents=True)
    for split, rows in (("train", range(5)), ("val", range(5, 8))):
        (root / f"ImageSets/Segmentation/{split}.txt").write_text("\n".join(f"2007_{row:06d}" for row in rows) + "\n")
        for row in rows:
            (root / f"JPEGImages/2007_{row:06d}.jpg").write_bytes(encoded(pixels_of(row, (9, 8, 3)), kind="JPEG"))
            mask = palette(mask_pixels(row, (9, 8), 21, 255))
            (root / f"SegmentationClass/2007_{row:06d}.png").write_bytes(encoded(mask))
    data = load_dataset("voc2012", root=tmp_path, val_fraction=0.2, streaming=streaming)
    found = {name: list(getattr(data, name)) for name in ("train", "validation", "test")}
    assert {name: len(rows) for name, rows in found.items()} == {"train": 4, "validation": 1, "test": 3}
    assert (found["test"][0][1].numpy() == mask_pixels(5, (9, 8), 21, 255)).all()
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
