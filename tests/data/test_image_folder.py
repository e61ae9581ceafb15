"""Folders of images by class, images with masks, and PASCAL VOC."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _hub import assert_not_found, write_voc
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from neuboots._validation import ArgumentError
from neuboots.data._common import CorruptFileError
from neuboots.data.augment import CropFlip, CropFlipCutout
from neuboots.data.dataset import Standardizer
from neuboots.data.image_folder import (
    VOC_CLASSES,
    LabelMap,
    infer_label_map,
    list_files,
    load_image_folder,
    load_mask_folder,
    load_voc_folder,
)
from neuboots.data.images import decode_image, read_image_size

PLAIN = Standardizer((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def image_from(file: Path, channels: int) -> Tensor:
    return decode_image(file, channels, file)


RNG = np.random.default_rng(0)


def picture(height: int = 6, width: int = 8, channels: int = 3) -> np.ndarray:
    shape = (height, width, 3) if channels == 3 else (height, width)
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def save(pixels: np.ndarray, file: Path, **options: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file, **options)
    return file


def by_class(folder: Path, counts: dict[str, int]) -> dict[str, np.ndarray]:
    return {
        f"{name}/{i:03d}.png": (pixels := picture(), save(pixels, folder / name / f"{i:03d}.png"))[0]
        for name, count in counts.items()
        for i in range(count)
    }


def paired(folder: Path, names: list[str], *, masks: str = "masks", classes: int = 3) -> dict[str, Any]:
    made = {}
    for name in names:
        image, mask = picture(), RNG.integers(0, classes, (6, 8), dtype=np.uint8)
        mask[0, :classes] = range(classes)
        save(image, folder / "images" / f"{name}.png")
        save(mask, folder / masks / f"{name}.png")
        made[name] = (image, mask)
    return made


def test_every_row_is_its_file_and_its_folder(tmp_path: Path) -> None:
    made = by_class(tmp_path, {"dog": 12, "cat": 20, "Ünï code": 8})
    data = load_image_folder(tmp_path, standardizer=PLAIN)
    assert data.classes == ("cat", "dog", "Ünï code")
    assert (data.task, data.channels, data.num_classes, data.name) == ("classification", 3, 3, tmp_path.name)
    assert data.augmentation is None
    seen = []
    for part in (data.train, data.validation, data.test):
        for i in range(len(part)):
            x, y = part[i]
            file = Path(part.source.files[part.rows[i]])
            name = file.relative_to(tmp_path).as_posix()
            assert torch.equal((255 * x).round(), torch.from_numpy(made[name]).movedim(-1, 0))
            assert data.classes[int(y)] == file.parent.name
            assert int(part.target(i)) == int(y)
            seen.append(name)
    assert sorted(seen) == sorted(made)
    counts = [part.targets.bincount().tolist() for part in (data.train, data.validation, data.test)]
    assert counts == [[16, 10, 6], [2, 1, 1], [2, 1, 1]]  # of each class the same share


def test_splits_that_have_folders(tmp_path: Path) -> None:
    for split, count in {"train": 10, "valid": 4, "test": 3}.items():
        by_class(tmp_path / split, {"a": count, "b": count})
    data = load_image_folder(tmp_path)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [20, 8, 6]
    assert all("/test/" in file for file in data.test.source.files)
    (tmp_path / "valid").rename(tmp_path / "elsewhere")
    assert len(load_image_folder(tmp_path, val_fraction=0.2).validation) == 4


def test_class_may_be_called_train(tmp_path: Path) -> None:
    by_class(tmp_path, {"bus": 5, "train": 5})
    assert load_image_folder(tmp_path).classes == ("bus", "train")


def test_files_of_other_kinds_are_skipped_and_listed(tmp_path: Path) -> None:
    by_class(tmp_path, {"a": 3, "b": 3})
    (tmp_path / "README.txt").write_text("hello")
    (tmp_path / "a" / "notes.txt").write_text("hello")
    (tmp_path / "a" / ".DS_Store").write_bytes(b"\0")
    (tmp_path / "a" / "._000.png").write_bytes(b"\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / "__MACOSX").mkdir()
    data = load_image_folder(tmp_path)
    names = sorted(Path(file).name for file in data.train.source.skipped)
    assert (data.classes, names, len(data.train.source)) == (("a", "b"), ["README.txt", "notes.txt"], 6)


def test_folders_within_classes_odd_names_and_links(tmp_path: Path) -> None:
    by_class(tmp_path, {"a": 2, "b": 2})
    save(picture(), tmp_path / "a" / "deep" / "er" / "IMAGE.JPEG")
    save(picture(), tmp_path / "a" / "folder.png" / "1.png")  # a folder that is called like an image
    (tmp_path / "a" / "circle").symlink_to(tmp_path / "a", target_is_directory=True)
    found = list_files(tmp_path / "a", [".png", ".jpeg"]).files
    assert [file.relative_to(tmp_path / "a").as_posix() for file in found] == [
        "000.png",
        "001.png",
        "deep/er/IMAGE.JPEG",
        "folder.png/1.png",
    ]


def test_size_covers_and_crops_at_centre(tmp_path: Path) -> None:
    """A wide image with a marked middle: the sides go, the middle stays, at half its size."""
    pixels = np.zeros((8, 24, 3), dtype=np.uint8)
    pixels[:, 8:16] = 200
    save(pixels, tmp_path / "a" / "wide.png")
    by_class(tmp_path, {"a": 4, "b": 4})
    data = load_image_folder(tmp_path, size=(4, 4), val_fraction=0, test_fraction=0, standardizer=PLAIN)
    whole = next(data.train[i][0] for i, file in enumerate(data.train.source.files) if "wide" in file)
    middle = (255 * whole).round()[:, :, 1:3]
    assert middle.unique().tolist() == [200]
    assert {tuple(x.shape) for x, _ in data.train} == {(3, 4, 4)}
    assert data.augmentation == CropFlipCutout((4, 4), padding=1, fill=(0.0, 0.0, 0.0))
    x, y = next(iter(DataLoader(data.augmented_train, batch_size=5)))
    assert x.shape == (5, 3, 4, 4)
    assert y.shape == (5,)


def test_folder_without_classes(tmp_path: Path) -> None:
    assert_not_found(load_image_folder, tmp_path / "nowhere")
    (tmp_path / "file.zip").write_bytes(b"")
    assert_not_found(load_image_folder, tmp_path / "file.zip")
    (tmp_path / "file.zip").unlink()
    assert_not_found(load_image_folder, tmp_path)
    save(picture(), tmp_path / "1.png")
    assert_not_found(load_image_folder, tmp_path)
    by_class(tmp_path, {"only": 3})
    assert_not_found(load_image_folder, tmp_path)


def test_splits_of_unlike_classes(tmp_path: Path) -> None:
    by_class(tmp_path / "train", {"a": 3, "b": 3})
    by_class(tmp_path / "test", {"a": 3})
    assert_not_found(load_image_folder, tmp_path)
    by_class(tmp_path / "test", {"b": 3, "c": 3})
    assert_not_found(load_image_folder, tmp_path)


def test_two_folders_for_one_split(tmp_path: Path) -> None:
    for split in ("train", "val", "valid"):
        by_class(tmp_path / split, {"a": 2, "b": 2})
    with pytest.raises(ValueError, match="validation"):
        load_image_folder(tmp_path)


@pytest.mark.parametrize("content", ["cut", "empty", "text", None])
def test_broken_image_is_reported_when_it_is_read(tmp_path: Path, content: str | None) -> None:
    by_class(tmp_path, {"a": 3, "b": 3})
    bad = save(picture(40, 40), tmp_path / "a" / "bad.jpg")
    data = load_image_folder(tmp_path, val_fraction=0, test_fraction=0)
    if content is None:
        bad.unlink()
    else:
        bad.write_bytes({"cut": bad.read_bytes()[:-300], "empty": b"", "text": b"no image at all"}[content])
    with pytest.raises(CorruptFileError) as caught:
        data.train[data.train.source.files.index(str(bad))]
    assert caught.value.file == str(bad)
    data.train[0]


@pytest.mark.parametrize(
    "options",
    [
        {"val_fraction": 1.0},
        {"test_fraction": -0.1},
        {"test_fraction": float("nan")},
        {"test_fraction": True},
        {"test_fraction": "0.1"},
        {"val_fraction": 0.5, "test_fraction": 0.5},
        {"seed": 0.5},
        {"channels": 2},
        {"channels": 1, "standardizer": PLAIN},
        {"size": 32},
        {"size": (0, 32)},
    ],
)
def test_options_are_rejected(tmp_path: Path, options: dict[str, Any]) -> None:
    by_class(tmp_path, {"a": 3, "b": 3})
    with pytest.raises(ArgumentError):
        load_image_folder(tmp_path, **options)


def test_image_follows_its_exif_tag(tmp_path: Path) -> None:
    pixels = picture(4, 6)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter to the right
    turned = image_from(save(pixels, tmp_path / "1.png", exif=exif.tobytes()), 3)
    assert torch.equal(turned, torch.from_numpy(np.rot90(pixels, -1).copy()).movedim(-1, 0))


def test_images_of_every_kind(tmp_path: Path) -> None:
    """Against PIL's own conversion where that is right; 16 bits by hand, where it is not."""
    grey, colour = picture(5, 4, channels=1), picture(5, 4)
    file = save(grey, tmp_path / "grey.png")
    assert torch.equal(image_from(file, 1)[0], torch.from_numpy(grey))
    assert torch.equal(image_from(file, 3), torch.from_numpy(grey).expand(3, -1, -1))
    file = save(colour, tmp_path / "colour.png")
    luma = np.array(Image.fromarray(colour).convert("L"))
    assert torch.equal(image_from(file, 1)[0], torch.from_numpy(luma))
    alpha = np.concatenate([colour, np.zeros((5, 4, 1), np.uint8)], 2)
    assert torch.equal(image_from(save(alpha, tmp_path / "alpha.png"), 3), torch.from_numpy(colour).movedim(-1, 0))
    palette = Image.fromarray(colour).quantize(8)
    palette.info["transparency"] = bytes(8)  # which PIL would warn of
    palette.save(tmp_path / "palette.png", transparency=bytes(8))
    expected = torch.from_numpy(np.array(palette.convert("RGBA"))[..., :3].copy()).movedim(-1, 0)
    assert torch.equal(image_from(tmp_path / "palette.png", 3), expected)
    Image.fromarray(colour).convert("CMYK").save(tmp_path / "cmyk.jpg")
    assert image_from(tmp_path / "cmyk.jpg", 3).shape == (3, 5, 4)
    Image.fromarray(grey > 127).save(tmp_path / "bits.png")
    assert image_from(tmp_path / "bits.png", 1).unique().tolist() == [0, 255]


def test_sixteen_bits_are_rounded_to_eight(tmp_path: Path) -> None:
    deep = RNG.integers(0, 65536, (5, 4)).astype(np.uint16)
    rounded = torch.from_numpy(np.rint(deep / 257))
    for name in ("deep.png", "deep.tif"):
        Image.fromarray(deep).save(tmp_path / name)
        assert torch.equal(image_from(tmp_path / name, 1)[0].double(), rounded)
        assert torch.equal(image_from(tmp_path / name, 3).double(), rounded.expand(3, -1, -1))
    Image.fromarray(np.ones((3, 3), np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(CorruptFileError):
        image_from(tmp_path / "float.tif", 3)


@pytest.mark.parametrize("masks", ["masks", "labels"])
def test_every_pair_is_its_two_files(tmp_path: Path, masks: str) -> None:
    made = paired(tmp_path, [f"s{i}/{i}.x" for i in range(10)], masks=masks)
    data = load_mask_folder(tmp_path, standardizer=PLAIN)
    assert (data.task, data.classes, data.ignore_index, data.channels) == ("segmentation", ("0", "1", "2"), 255, 3)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [8, 1, 1]
    for part in (data.train, data.validation, data.test):
        for i in range(len(part)):
            x, y = part[i]
            name = Path(part.source.files[part.rows[i]]).relative_to(tmp_path / "images").as_posix()
            image, mask = made[name.removesuffix(".png")]
            assert torch.equal((255 * x).round(), torch.from_numpy(image).movedim(-1, 0))
            assert y.dtype == torch.int64
            assert torch.equal(y, torch.from_numpy(mask).long())
            assert torch.equal(part.target(i), y)


@pytest.mark.parametrize("above", [True, False])
def test_masks_in_splits(tmp_path: Path, above: bool) -> None:
    for split, count in {"train": 5, "val": 2, "test": 3}.items():
        paired(tmp_path / split, [f"{split}{i}" for i in range(count)])
        if not above:
            for kind in ("images", "masks"):
                (tmp_path / kind).mkdir(exist_ok=True)
                (tmp_path / split / kind).rename(tmp_path / kind / split)
            (tmp_path / split).rmdir()
    data = load_mask_folder(tmp_path)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [5, 2, 3]
    assert "val0" in data.validation.source.targets[0]


def test_masks_with_palette_are_its_numbers_and_ignore_index_is_left(tmp_path: Path) -> None:
    paired(tmp_path, ["a", "b", "c"])
    mask = np.zeros((6, 8), np.uint8)
    mask[0, :3], mask[1] = [0, 1, 2], 255
    coloured = Image.fromarray(mask, mode="L")
    coloured.putpalette([7, 0, 9] * 256)
    assert coloured.mode == "P"
    coloured.save(tmp_path / "masks" / "a.png")
    data = load_mask_folder(tmp_path, val_fraction=0, test_fraction=0)
    assert data.classes == ("0", "1", "2")
    assert torch.equal(data.train.target(0), torch.from_numpy(mask).long())
    Image.fromarray(mask.astype(np.uint16)).save(tmp_path / "masks" / "a.png")
    assert torch.equal(data.train.target(0), torch.from_numpy(mask).long())


def test_size_cuts_images_and_masks_alike(tmp_path: Path) -> None:
    """Masks that were drawn from their images, without a gradient to smooth, still fit after both are resized."""
    for i in range(4):
        mask = np.kron(RNG.integers(0, 2, (4, 6)), np.ones((6, 6), np.int64)).astype(np.uint8)  # 24 × 36
        save(np.repeat(200 * mask[..., None], 3, 2).astype(np.uint8), tmp_path / "images" / f"{i}.png")
        save(mask, tmp_path / "masks" / f"{i}.png")
    data = load_mask_folder(
        tmp_path, classes=["out", "in"], size=(12, 12), val_fraction=0, test_fraction=0, standardizer=PLAIN
    )
    for x, y in data.train:
        assert y.shape == (12, 12)
        assert torch.equal(x[0] > 0.4, y == 1)
    assert data.augmentation == CropFlip((12, 12), scale=(0.5, 2.0), fill=(0.0, 0.0, 0.0), ignore_index=255)
    x, y = next(iter(DataLoader(data.augmented_train, batch_size=4)))
    assert x.shape == (4, 3, 12, 12)
    assert set(y.unique().tolist()) <= {0, 1, 255}


def test_files_that_do_not_match_by_name(tmp_path: Path) -> None:
    paired(tmp_path, ["a", "b"])
    lonely = save(picture(), tmp_path / "images" / "lonely.jpg")
    assert_not_found(load_mask_folder, tmp_path)
    lonely.rename(tmp_path / "masks" / "lonely.png")
    assert_not_found(load_mask_folder, tmp_path)
    (tmp_path / "masks" / "lonely.png").unlink()
    save(picture(), tmp_path / "images" / "a.jpg")
    with pytest.raises(ValueError, match=r"a\.jpg"):
        load_mask_folder(tmp_path)


def test_folders_missing(tmp_path: Path) -> None:
    assert_not_found(load_mask_folder, tmp_path)
    (tmp_path / "images").mkdir()
    assert_not_found(load_mask_folder, tmp_path)
    (tmp_path / "masks").mkdir()
    assert_not_found(load_mask_folder, tmp_path)
    paired(tmp_path / "s" / "train", ["a", "b"])
    (tmp_path / "s" / "test" / "images").mkdir(parents=True)
    assert_not_found(load_mask_folder, tmp_path / "s")
    save(picture(), tmp_path / "t" / "images" / "train" / "a.png")
    (tmp_path / "t" / "masks").mkdir()
    assert_not_found(load_mask_folder, tmp_path / "t")


@pytest.mark.parametrize("size", [None, (4, 4)])
def test_masks_that_do_not_match(tmp_path: Path, size: tuple[int, int] | None) -> None:
    """Also before they are resized: a mask on its side could be made to fit."""
    paired(tmp_path, ["a", "b", "c", "d", "e"])
    masks = tmp_path / "masks"
    data = load_mask_folder(tmp_path, classes=["x", "y", "z"], size=size, val_fraction=0, test_fraction=0)
    save(np.zeros((8, 6), np.uint8), masks / "a.png")
    save(picture(), masks / "b.png")
    save(np.full((6, 8), 3, np.uint8), masks / "c.png")
    (masks / "d.png").write_bytes((masks / "c.png").read_bytes()[:45])
    for row in range(4):
        with pytest.raises(CorruptFileError):
            data.train[row]
    data.train[4]
    with pytest.raises(CorruptFileError):
        load_mask_folder(tmp_path)  # which reads all of them to count the classes


def test_masks_of_black_and_white(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        save(picture(), tmp_path / "images" / f"{name}.png")
        save(np.array([[0, 255]], np.uint8), tmp_path / "masks" / f"{name}.png")
    with pytest.raises(ArgumentError):
        load_mask_folder(tmp_path)
    with pytest.raises(ArgumentError):
        load_mask_folder(tmp_path, classes=["background", "cell"])  # else all cells would be void
    save(np.array([[1, 255]], np.uint8), tmp_path / "masks" / "c.png")
    assert load_mask_folder(tmp_path, classes=["background", "cell"]).num_classes == 2
    save(np.array([[0, 128]], np.uint8), tmp_path / "masks" / "c.png")
    assert load_mask_folder(tmp_path).classes == ("0", "128")
    for classes in ("cell", ["a", "a"]):
        with pytest.raises(ArgumentError):
            load_mask_folder(tmp_path, classes=classes)


@pytest.mark.parametrize(
    ("found", "classes", "ignore_index", "names", "values", "ignored"),
    [
        ([0, 255], None, None, ("0", "255"), (0, 255), None),
        ([0, 1, 255], None, None, ("0", "1"), (0, 1), 255),
        ([0, 1, 255], ["a", "b"], None, ("a", "b"), (0, 1), 255),
        ([0, 1, 255], ["a", "b", "c"], None, ("a", "b", "c"), (0, 1, 255), None),
        ([0, 100, 255], None, None, ("0", "100", "255"), (0, 100, 255), None),
        ([0, 2], ["a", "b", "c"], None, ("a", "b", "c"), (0, 1, 2), None),
        ([1, 2, 0], ["a", "b"], 0, ("a", "b"), (1, 2), 0),
    ],
)
def test_infer_label_map(
    found: Any, classes: Any, ignore_index: Any, names: Any, values: Any, ignored: int | None
) -> None:
    assert infer_label_map(found, classes, ignore_index) == (names, LabelMap(values, ignored))


@pytest.mark.parametrize(
    ("found", "classes"), [([0], None), (range(65), None), ([0, 1, 2], ["a", "b"]), (range(256), map(str, range(256)))]
)
def test_infer_label_map_rejects_values_that_are_not_classes(found: Any, classes: Any) -> None:
    with pytest.raises(ArgumentError):
        infer_label_map(found, None if classes is None else list(classes))


NAMES = {"train": [f"2007_{i:06d}" for i in range(10)], "val": [f"2008_{i:06d}" for i in range(4)]}


@pytest.mark.parametrize("above", ["", "VOC2012", "VOCdevkit/VOC2012", "x/VOCdevkit/VOC2012"])
def test_voc_in_its_layout(tmp_path: Path, above: str) -> None:
    made = write_voc(tmp_path / above, NAMES)
    data = load_voc_folder(tmp_path)
    assert (data.classes, data.num_classes, data.ignore_index, data.name) == (VOC_CLASSES, 21, 255, "voc2012")
    assert [len(part) for part in (data.train, data.validation, data.test)] == [9, 1, 4]
    x, y = data.test[2]
    assert x.shape == (3, 20, 30)
    assert torch.equal(y, torch.from_numpy(made["2008_000002"]).long())
    x, y = next(iter(DataLoader(data.augmented_train, batch_size=3)))
    assert x.shape == (3, 3, 513, 513)
    assert y.shape == (3, 513, 513)


def test_voc_with_masks_of_more_images(tmp_path: Path) -> None:
    write_voc(tmp_path, NAMES)
    names = [f"2009_{i:06d}" for i in range(6)]
    write_voc(tmp_path, {"trainaug": names}, masks="SegmentationClassAug")
    lines = [f"/JPEGImages/{name}.jpg /SegmentationClassAug/{name}.png" for name in names]  # as some lists have them
    for text in ("\n".join(names), "\n".join(lines)):
        (tmp_path / "ImageSets" / "Segmentation" / "trainaug.txt").write_text(text)
        data = load_voc_folder(tmp_path, val_fraction=0)
        assert [len(data.train), len(data.test)] == [6, 4]
        assert "SegmentationClassAug" in data.train.source.targets[0]


def test_incomplete_voc_is_rejected(tmp_path: Path) -> None:
    assert_not_found(load_voc_folder, tmp_path)
    write_voc(tmp_path, {"train": NAMES["train"]})
    assert_not_found(load_voc_folder, tmp_path)
    write_voc(tmp_path, {"val": []})
    assert_not_found(load_voc_folder, tmp_path)
    write_voc(tmp_path, {"val": NAMES["train"][:1]})
    with pytest.raises(ValueError, match=r"val\.txt"):
        load_voc_folder(tmp_path)
    write_voc(tmp_path, {"val": NAMES["val"]})
    (tmp_path / "SegmentationClass" / "2008_000001.png").unlink()
    assert_not_found(load_voc_folder, tmp_path)


def test_pipes_devices_and_empty_files_are_no_images(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "empty.png").touch()
    for name in ("pipe.png", "zero.png", "loop.png", "empty.png"):
        with pytest.raises(CorruptFileError, match=name):
            decode_image(tmp_path / name, 3, tmp_path / name)
        with pytest.raises(CorruptFileError, match=name):
            read_image_size(tmp_path / name, tmp_path / name)
