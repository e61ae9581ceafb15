"""The user's own images: a folder by class, a folder of images and masks, and PASCAL VOC's.

    path/<class>/<any name>.jpg → the class;    images/<name>.jpg, masks/<name>.png → a class for each pixel

An image is read and decoded when its row is asked for: turned as its EXIF tag says, made grey (channels=1) or colour
(channels=3), without its transparency, with 16 bits rounded to 8. Given a size, it is made as small as will cover that,
keeping its proportions, and cropped at the centre; without one, rows have the sizes of their files.

Everingham, Van Gool, Williams, Winn and Zisserman, The PASCAL visual object classes challenge 2012. Hariharan,
Arbelaez, Bourdev, Maji and Malik, Semantic contours from inverse detectors, ICCV 2011 (SegmentationClassAug).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuboots.data.augment import CropFlip, CropFlipCutout
from neuboots.data.listing import (
    Pairs,
    files_in,
    folder_at,
    folders_in,
    paired_folders,
    pairs_in,
    split_folders,
    three_parts,
)
from neuboots.data.parts import Augment, Part
from neuboots.data.pixels import image_of, mask_of, pair_of
from neuboots.data.sets import DataSet, Normalisation
from neuboots.data.sources import Corrupt, Missing, split_off
from neuboots.keys import whole

IMAGES = (".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
MASKS = (".png", ".bmp", ".gif", ".pgm", ".tif", ".tiff")  # nothing lossy: it would invent classes along borders

IMAGENET = {
    1: Normalisation((0.449,), (0.226,)),
    3: Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""What images of one's own are normalised by, unless told otherwise: the statistics of ImageNet, as pretrained nets
expect; of grey images, their means over the colours."""

VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "dining table",
    "dog", "horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train", "tv monitor",
)  # fmt: skip


# -- images by class -----------------------------------------------------------------------------------


def image_folder(
    path: str | Path,
    *,
    validation: float = 0.1,
    test: float = 0.1,
    seed: int = 0,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    normalisation: Normalisation | None = None,
) -> DataSet:
    """Images by class: path/<class>/…, or with train, val and test above the classes.

    A split without a folder of its own is a share of the training images, of each class the same, drawn by the seed; a
    share of 0 gives None. Files that are no images by their names are passed over: `data.train.source.passed_over`
    lists them. With a size, the augmentation pads by an eighth, crops and mirrors; without, there is none.

    >>> import tempfile
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name, colour in [("blue", "#0000ff"), ("red", "#ff0000")]:
    ...     (folder / name).mkdir()
    ...     for i in range(10):
    ...         Image.new("RGB", (40, 30), colour).save(folder / name / f"{i}.png")
    >>> data = image_folder(folder, size=(32, 32))
    >>> x, y = data.train[0]
    >>> len(data.train), len(data.test), data.classes, x.shape, int(y)
    (16, 2, ('blue', 'red'), torch.Size([3, 32, 32]), 0)
    """
    folder = folder_at(path, "a folder with one folder of images for each class")
    normalisation = _normalisation(normalisation, channels)
    size = _checked_size(size)
    splits = split_folders(folder)
    if not splits or not folders_in(splits["train"]):  # a class may be called train: its images lie right in it
        splits = {"train": folder}
    classes = tuple(entry.name for entry in folders_in(splits["train"]))
    if len(classes) < 2:
        had = f"one folder, {classes[0]}" if classes else "no folder"
        raise Missing(f"got {splits['train']} with {had} in it; expected at least two, one of images for each class")
    sources = {split: _by_class(entry, classes, size, channels) for split, entry in splits.items()}
    parts = {split: Part(source, normalisation) for split, source in sources.items()}
    train, held_out, tested = three_parts(parts, validation=validation, test=test, seed=seed, stratified=True)
    augmentation: Augment | None = None
    if size is not None:
        augmentation = CropFlipCutout(size, padding=max(1, min(size) // 8), fill=normalisation.mean)
    return DataSet(
        folder.resolve().name, "classification", train, held_out, tested, channels, classes, normalisation, augmentation
    )


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Files of images and their labels (n,), as a source."""

    files: tuple[str, ...] = field(repr=False)
    labels: Tensor = field(repr=False)
    channels: int
    size: tuple[int, int] | None
    passed_over: tuple[str, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        files = [self.files[row] for row in rows]
        return [image_of(file, self.channels, file, size=self.size) for file in files], self.read_targets(rows)

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        return list(self.labels[list(rows)])


def _by_class(folder: Path, classes: tuple[str, ...], size: tuple[int, int] | None, channels: int) -> ImageFiles:
    names = [entry.name for entry in folders_in(folder)]
    if sorted(names) != sorted(classes):
        for there, here, what in ((names, classes, "with"), (classes, names, "without")):
            for name in there:
                if name not in here:
                    raise Missing(f"got {folder} {what} the class {name!r}; expected those of train: {_few(classes)}")
    files: list[str] = []
    labels: list[int] = []
    others = [str(entry) for entry in sorted(folder.iterdir()) if entry.is_file() and not entry.name.startswith(".")]
    for label, name in enumerate(classes):
        found = files_in(folder / name, IMAGES)
        if not found.files:
            more = f" ({len(found.others)} files of other kinds were passed over)" if found.others else ""
            raise Missing(
                f"got {folder / name}, the folder of a class, without an image{more}; expected files such as "
                f"{folder / name}/1.jpg: add some, or remove the folder"
            )
        files += map(str, found.files)
        labels += [label] * len(found.files)
        others += map(str, found.others)
    return ImageFiles(tuple(files), torch.tensor(labels), channels, size, tuple(others))


# -- images and masks ----------------------------------------------------------------------------------


def mask_folder(
    path: str | Path,
    *,
    classes: Sequence[str] | None = None,
    void: int = 255,
    validation: float = 0.1,
    test: float = 0.1,
    seed: int = 0,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    normalisation: Normalisation | None = None,
) -> DataSet:
    """Images and masks of the same names: path/images and path/masks (or labels), in or above train, val and test.

    A mask is a picture, grey or with a palette, whose numbers are the classes 0, 1, …, and `void` where a pixel counts
    nowhere. `classes` are their names; without, all masks are read once to count them; with, until two classes came. A
    split without a folder is a share of the training images, drawn by the seed. With a size, the augmentation resizes
    by 0.5 … 2, crops and mirrors; without, there is none.

    >>> import tempfile
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name, colour in [("images", "#0000ff"), ("masks", 1)]:
    ...     (folder / name).mkdir()
    ...     for i in range(10):
    ...         Image.new("RGB" if name == "images" else "L", (40, 30), colour).save(folder / name / f"{i}.png")
    >>> data = mask_folder(folder, classes=["background", "cell"])
    >>> x, y = data.train[0]
    >>> len(data.train), x.shape, y.shape, int(y.max()), data.void
    (8, torch.Size([3, 30, 40]), torch.Size([30, 40]), 1, 255)
    """
    folder = folder_at(path, "a folder with the folders images and masks")
    void = whole("void", void)
    normalisation = _normalisation(normalisation, channels)
    size = _checked_size(size)
    found = {
        split: pairs_in(folders, IMAGES, MASKS)
        for split, folders in paired_folders(folder, ("images",), ("masks", "labels")).items()
    }
    names = names_of(classes, _numbers_in(found), void)
    parts = {
        split: Part(_mask_files(pairs, len(names), void, channels, size), normalisation)
        for split, pairs in found.items()
    }
    train, held_out, tested = three_parts(parts, validation=validation, test=test, seed=seed)
    augmentation: Augment | None = None
    if size is not None:
        augmentation = CropFlip(size, scale=(0.5, 2.0), fill=normalisation.mean, void=void)
    return DataSet(
        folder.resolve().name,
        "segmentation",
        train,
        held_out,
        tested,
        channels,
        names,
        normalisation,
        augmentation,
        void,
    )


@dataclass(frozen=True, eq=False)
class MaskFiles:
    """Files of images and of their masks, as a source; `void` pixels count nowhere."""

    images: tuple[str, ...] = field(repr=False)
    masks: tuple[str, ...] = field(repr=False)
    num_classes: int
    void: int
    channels: int
    size: tuple[int, int] | None
    passed_over: tuple[str, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        pairs = [(Path(self.images[row]), Path(self.masks[row])) for row in rows]
        read = [pair_of(image, mask, self.channels, size=self.size) for image, mask in pairs]
        masks = [self._checked(mask, row) for (_, mask), row in zip(read, rows, strict=True)]
        return [image for image, _ in read], masks

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        masks = [mask_of(self.masks[row], self.masks[row], size=self.size) for row in rows]
        return [self._checked(mask, row) for mask, row in zip(masks, rows, strict=True)]

    def _checked(self, mask: Tensor, row: int) -> Tensor:
        wrong = mask[((mask < 0) | (mask >= self.num_classes)) & (mask != self.void)]
        if len(wrong):
            raise Corrupt(
                f"got {self.masks[row]} with the number {int(wrong[0])}; expected classes from 0 to "
                f"{self.num_classes - 1}, or {self.void} for void"
            )
        return mask


def _mask_files(pairs: Pairs, num_classes: int, void: int, channels: int, size: tuple[int, int] | None) -> MaskFiles:
    images, masks, others = map(tuple, pairs)
    return MaskFiles(images, masks, num_classes, void, channels, size, others)


def _numbers_in(found: Mapping[str, Pairs]) -> Iterator[set[int]]:
    for pairs in found.values():
        for file in pairs.targets:
            yield set(np.unique(mask_of(file, file).numpy()).tolist())


def names_of(classes: Any, numbers: Iterable[set[int]], void: int) -> tuple[str, ...]:
    """The names of the classes: those given, else their numbers; `numbers` are those in each mask, read if need be.

    Masks of one class and void are refused: those of black and white have 255 for a class, which would count nowhere.
    """
    names = () if classes is None else checked_names(classes)
    found: set[int] = set()
    for some in numbers:
        found |= some
        if names and len(found - {void}) > 1:
            return names
    if names and void not in found:
        return names
    known = found - {void}
    if len(known) < 2 or min(known) < 0 or 2 * len(known) <= max(known):
        hint = "" if names else ", or name the classes=[…] that there may be"
        raise ValueError(
            f"got masks with the numbers {sorted(found)[:8]}, where {void} is void; expected classes 0, 1, …: renumber "
            f"them, such as 255 to 1 in masks of black and white{hint}"
        )
    return tuple(str(number) for number in range(max(known) + 1))


def checked_names(classes: Any) -> tuple[str, ...]:
    """Names of classes, each its own."""
    names = () if isinstance(classes, str) else tuple(map(str, classes))
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"got classes={classes!r}; expected at least two names, such as ['background', 'cell']")
    return names


# -- PASCAL VOC ----------------------------------------------------------------------------------------


def voc_folder(
    path: str | Path, *, validation: float = 0.1, seed: int = 0, size: tuple[int, int] | None = None
) -> DataSet:
    """PASCAL VOC 2012 as it is published: 21 classes, 255 on the borders of objects; `path` is VOC2012 or above it.

    train.txt gives train, and its share for validation; val.txt gives test, since the test masks are not public. Where
    there are SegmentationClassAug and trainaug.txt, the 10,582 images of the latter are train. The augmentation is
    DeepLab's: resized by 0.5 … 2, cropped to 513 × 513 (or `size`), mirrored.

    >>> voc_folder("/nowhere")
    Traceback (most recent call last):
    neuboots.data.sources.Missing: got '/nowhere', which is not there; expected the folder VOC2012, or one above it
    """
    folder = folder_at(path, "the folder VOC2012, or one above it")
    root = _voc_root(folder)
    lists = root / "ImageSets" / "Segmentation"
    more = root / "SegmentationClassAug"
    augmented = next((lists / name for name in ("trainaug.txt", "train_aug.txt") if (lists / name).is_file()), None)
    official = root / "SegmentationClass"
    if augmented is not None and more.is_dir():
        train_list, train_masks = augmented, more
    else:
        train_list, train_masks = lists / "train.txt", official
    size = _checked_size(size)
    found = {"train": _voc_pairs(root, train_list, train_masks), "test": _voc_pairs(root, lists / "val.txt", official)}
    both = set(found["train"].inputs) & set(found["test"].inputs)
    if both:
        raise ValueError(f"got {min(both)} in {train_list} and in {lists / 'val.txt'}; expected it in one of them")
    normalise = IMAGENET[3]
    parts = {
        split: Part(_mask_files(pairs, len(VOC_CLASSES), 255, 3, size), normalise) for split, pairs in found.items()
    }
    train, held_out = split_off(parts["train"], validation, seed=whole("seed", seed))
    augmentation = CropFlip(size or (513, 513), scale=(0.5, 2.0), fill=normalise.mean, void=255)
    return DataSet(
        "voc2012", "segmentation", train, held_out, parts["test"], 3, VOC_CLASSES, normalise, augmentation, 255
    )


def _voc_root(folder: Path) -> Path:
    usual = [folder, folder / "VOC2012", folder / "VOCdevkit" / "VOC2012"]
    for root in [*usual, *sorted(folder.glob("*/VOC2012")), *sorted(folder.glob("*/VOCdevkit/VOC2012"))]:
        if (root / "JPEGImages").is_dir() and (root / "ImageSets" / "Segmentation").is_dir():
            return root
    raise Missing(
        f"got {folder}, where neither it nor {usual[1]} nor {usual[2]} holds JPEGImages, SegmentationClass and "
        "ImageSets/Segmentation; expected PASCAL VOC 2012 as it is published: unpack VOCtrainval_11-May-2012.tar there"
    )


def _voc_pairs(root: Path, listed: Path, masks: Path) -> Pairs:
    try:
        lines = listed.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise Missing(f"cannot read {listed} ({type(fault).__name__}); expected a list of images in it") from None
    names = [Path(line.split()[0]).stem for line in lines if line.strip()]  # some lists give paths of both files
    if not names:
        raise Missing(f"got {listed} without a name; expected one on each line")
    pairs = Pairs([], [], [])
    for name in dict.fromkeys(names):
        image, mask = root / "JPEGImages" / f"{name}.jpg", masks / f"{name}.png"
        for file in (image, mask):
            if not file.is_file():
                raise Missing(f"got {name} in {listed}, but no file {file}; expected it there")
        pairs.inputs.append(str(image))
        pairs.targets.append(str(mask))
    return pairs


# -- what may be given ---------------------------------------------------------------------------------


def _normalisation(given: Normalisation | None, channels: int) -> Normalisation:
    if isinstance(channels, bool) or channels not in IMAGENET:
        raise ValueError(f"got channels={channels!r}; expected 1 (grey) or 3 (colour)")
    normalisation = IMAGENET[channels] if given is None else given
    if len(normalisation.mean) != channels or normalisation.axes != 2:
        raise ValueError(
            f"got normalisation={normalisation} for {channels} channels; expected a mean and a standard deviation for "
            "each, and axes=2"
        )
    return normalisation


def _checked_size(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    return CropFlipCutout(size).size  # which says what is wrong with it


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
