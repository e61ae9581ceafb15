"""Files in folders: which there are, in which split, and which belong together.

    path/<class>/…,               path/<split>/<class>/…
    path/{images, masks}/<name>,  path/<split>/{images, masks}/<name>,  path/{images, masks}/<split>/<name>

Files come sorted by name, folders are walked to the bottom, and what is hidden is passed over: .DS_Store,
.ipynb_checkpoints, and the ._ files that archives of a Mac leave beside every other.

The user's own images: a folder by class, a folder of images and masks, and PASCAL VOC's.

    path/<class>/<any name>.jpg → the class;    images/<name>.jpg, masks/<name>.png → a class for each pixel

An image is read and decoded when its row is asked for: turned as its EXIF tag says, made grey (channels=1) or colour
(channels=3), without its transparency, with 16 bits rounded to 8. Given a size, it is made as small as will cover that,
keeping its proportions, and cropped at the centre; without one, rows have the sizes of their files.

Everingham, Van Gool, Williams, Winn and Zisserman, The PASCAL visual object classes challenge 2012. Hariharan,
Arbelaez, Bourdev, Maji and Malik, Semantic contours from inverse detectors, ICCV 2011 (SegmentationClassAug).
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from neuboots._validation import check_int
from neuboots.data._common import CorruptFileError, DatasetNotFoundError
from neuboots.data.augment import CropFlip, CropFlipCutout
from neuboots.data.dataset import Augmentation, DatasetBundle, LazyDataset, Standardizer
from neuboots.data.images import decode_image, decode_mask, read_image_and_mask
from neuboots.data.splits import complete_splits, hold_out

FOLDER_SPLIT_NAMES: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing"),
}
"""What the folders of a split may be called."""


class FileListing(NamedTuple):
    files: list[Path]
    others: list[Path]  # of other kinds, passed over


def check_folder(path: str | Path, what: str) -> Path:
    """The folder that was given, or a sentence."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "is not there"
        raise DatasetNotFoundError(f"got {str(path)!r}, which {kind}; expected {what}")
    return folder


def list_folders(folder: Path) -> list[Path]:
    """The folders in a folder, by name, without hidden ones."""
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not _is_hidden(entry.name))


def list_files(folder: Path, endings: Collection[str]) -> FileListing:
    """All files below a folder whose names end so, and all others; links are followed, but in no circle."""
    found = FileListing([], [])
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        folders[:] = [] if real in seen else sorted(name for name in folders if not _is_hidden(name))
        if real in seen:
            continue
        seen.add(real)
        for name in names:
            if not _is_hidden(name):
                (found.files if name.lower().endswith(tuple(endings)) else found.others).append(Path(place, name))
    found.files.sort()
    found.others.sort()
    return found


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__MACOSX"))


# -- splits --------------------------------------------------------------------------------------------


def find_split_folders(folder: Path) -> dict[str, Path]:
    """Split → its folder, for those that there are; none of them, unless train is one."""
    found: dict[str, Path] = {}
    for entry in list_folders(folder):
        for split, names in FOLDER_SPLIT_NAMES.items():
            if entry.name.lower() in names:
                if split in found:
                    raise ValueError(f"got {found[split]} and {entry}; expected one folder for {split}: join the two")
                found[split] = entry
    return found if "train" in found else {}


# -- pairs ---------------------------------------------------------------------------------------------


class FilePairs(NamedTuple):
    inputs: list[str]
    targets: list[str]
    skipped: list[str]


def find_paired_folders(folder: Path, inputs: Sequence[str], targets: Sequence[str]) -> dict[str, tuple[Path, Path]]:
    """Split → (folder of inputs, folder of targets), in any of the three layouts; all is train where none is named."""
    here = _pair_in(folder, inputs, targets)
    if here is not None:
        first, second = find_split_folders(here[0]), find_split_folders(here[1])
        if not first:
            return {"train": here}
        for split, entry in first.items():
            if split not in second:
                raise DatasetNotFoundError(f"got {entry}, but no folder for {split} in {here[1]}; expected one in both")
        return {split: (entry, second[split]) for split, entry in first.items()}
    splits = find_split_folders(folder)
    found = {split: _pair_in(entry, inputs, targets) for split, entry in splits.items()}
    for split, pair in found.items():
        if pair is None:
            raise DatasetNotFoundError(
                f"got {splits[split]} without {' or '.join(inputs)}, or without {' or '.join(targets)}; expected both "
                "folders in it"
            )
    if not found:
        raise DatasetNotFoundError(
            f"got {folder} with {_listed(list_folders(folder))}; expected the folders {' or '.join(inputs)} and "
            f"{' or '.join(targets)}, or train with both in it"
        )
    return {split: pair for split, pair in found.items() if pair is not None}


def _pair_in(folder: Path, inputs: Sequence[str], targets: Sequence[str]) -> tuple[Path, Path] | None:
    names = {entry.name: entry for entry in list_folders(folder)}
    first = next((names[name] for name in inputs if name in names), None)
    second = next((names[name] for name in targets if name in names), None)
    return None if first is None or second is None else (first, second)


def list_pairs(folders: tuple[Path, Path], endings: Sequence[str], target_endings: Sequence[str]) -> FilePairs:
    """Inputs and targets of one name, whatever their endings; one without the other is named."""
    found = [list_files(folder, ends) for folder, ends in zip(folders, (endings, target_endings), strict=True)]
    inputs, targets = (
        _by_stem(listed.files, folder, ends)
        for listed, folder, ends in zip(found, folders, (endings, target_endings), strict=True)
    )
    for stem, file in inputs.items():
        if stem not in targets:
            expected = folders[1] / (stem + target_endings[0])
            raise DatasetNotFoundError(
                f"got {file} without its {folders[1].name}; expected a file such as {expected} "
                f"({_or(target_endings)}), or neither"
            )
    for stem, file in targets.items():
        if stem not in inputs:
            raise DatasetNotFoundError(
                f"got {file} without its file in {folders[0]}; expected one of the same name, or neither"
            )
    if not inputs:
        others = _kinds(found[0].others)
        raise DatasetNotFoundError(
            f"got {folders[0]} without any file{others}; expected names that end in {_or(endings)}"
        )
    passed_over = [str(file) for listed in found for file in listed.others]
    return FilePairs([str(file) for file in inputs.values()], [str(targets[stem]) for stem in inputs], passed_over)


def _by_stem(files: list[Path], folder: Path, endings: Collection[str]) -> dict[str, Path]:
    by_stem: dict[str, Path] = {}
    for file in files:
        name = file.relative_to(folder).as_posix()
        ending = max((end for end in endings if name.lower().endswith(end)), key=len)
        stem = name[: -len(ending)]
        if stem in by_stem:
            raise ValueError(f"got {by_stem[stem]} and {file}; expected one file of a name: remove one of them")
        by_stem[stem] = file
    return by_stem


def _kinds(others: list[Path]) -> str:
    """Of what was passed over, for a sentence."""
    if not others:
        return ""
    kinds = sorted({other.suffix or other.name for other in others})[:5]
    return f" that can be taken ({len(others)} of other kinds were passed over: {', '.join(kinds)})"


def _listed(folders: list[Path]) -> str:
    names = [folder.name for folder in folders]
    if not names:
        return "no folders"
    return f"the folders {', '.join(names[:8])}" + (" …" if len(names) > 8 else "")


def _or(endings: Collection[str]) -> str:
    return ", ".join(sorted(endings))


IMAGE_SUFFIXES = (
    ".bmp",
    ".gif",
    ".jfif",
    ".jp2",
    ".jpeg",
    ".jpg",
    ".pbm",
    ".pgm",
    ".png",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)
MASK_SUFFIXES = (
    ".png",
    ".bmp",
    ".gif",
    ".pgm",
    ".tif",
    ".tiff",
)  # nothing lossy: it would invent classes along borders

IMAGENET_STANDARDIZERS = {
    1: Standardizer((0.449,), (0.226,)),
    3: Standardizer((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""What images of one's own are normalised by, unless told otherwise: the statistics of ImageNet, as pretrained nets
expect; of grey images, their means over the colours."""

VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "dining table",
    "dog", "horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train", "tv monitor",
)  # fmt: skip


# -- images by class -----------------------------------------------------------------------------------


def load_image_folder(
    path: str | Path,
    *,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    seed: int = 0,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    standardizer: Standardizer | None = None,
) -> DatasetBundle:
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
    >>> data = load_image_folder(folder, size=(32, 32))
    >>> x, y = data.train[0]
    >>> len(data.train), len(data.test), data.classes, x.shape, int(y)
    (16, 2, ('blue', 'red'), torch.Size([3, 32, 32]), 0)
    """
    folder = check_folder(path, "a folder with one folder of images for each class")
    standardizer = _normalisation(standardizer, channels)
    size = _checked_size(size)
    splits = find_split_folders(folder)
    if not splits or not list_folders(splits["train"]):  # a class may be called train: its images lie right in it
        splits = {"train": folder}
    classes = tuple(entry.name for entry in list_folders(splits["train"]))
    if len(classes) < 2:
        had = f"one folder, {classes[0]}" if classes else "no folder"
        raise DatasetNotFoundError(
            f"got {splits['train']} with {had} in it; expected at least two, one of images for each class"
        )
    sources = {split: _by_class(entry, classes, size, channels) for split, entry in splits.items()}
    parts = {split: LazyDataset(source, standardizer) for split, source in sources.items()}
    train, held_out, tested = complete_splits(
        parts, val_fraction=val_fraction, test_fraction=test_fraction, seed=seed, stratified=True
    )
    augmentation: Augmentation | None = None
    if size is not None:
        augmentation = CropFlipCutout(size, padding=max(1, min(size) // 8), fill=standardizer.mean)
    return DatasetBundle(
        folder.resolve().name, "classification", train, held_out, tested, channels, classes, standardizer, augmentation
    )


@dataclass(frozen=True, eq=False)
class ImageFileSource:
    """Files of images and their labels (n,), as a source."""

    files: tuple[str, ...] = field(repr=False)
    labels: Tensor = field(repr=False)
    channels: int
    size: tuple[int, int] | None
    skipped: tuple[str, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        files = [self.files[row] for row in rows]
        return [decode_image(file, self.channels, file, size=self.size) for file in files], self.read_targets(rows)

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        return list(self.labels[list(rows)])


def _by_class(folder: Path, classes: tuple[str, ...], size: tuple[int, int] | None, channels: int) -> ImageFileSource:
    names = [entry.name for entry in list_folders(folder)]
    if sorted(names) != sorted(classes):
        for there, here, what in ((names, classes, "with"), (classes, names, "without")):
            for name in there:
                if name not in here:
                    raise DatasetNotFoundError(
                        f"got {folder} {what} the class {name!r}; expected those of train: {_few(classes)}"
                    )
    files: list[str] = []
    labels: list[int] = []
    others = [str(entry) for entry in sorted(folder.iterdir()) if entry.is_file() and not entry.name.startswith(".")]
    for label, name in enumerate(classes):
        found = list_files(folder / name, IMAGE_SUFFIXES)
        if not found.files:
            more = f" ({len(found.others)} files of other kinds were passed over)" if found.others else ""
            raise DatasetNotFoundError(
                f"got {folder / name}, the folder of a class, without an image{more}; expected files such as "
                f"{folder / name}/1.jpg: add some, or remove the folder"
            )
        files += map(str, found.files)
        labels += [label] * len(found.files)
        others += map(str, found.others)
    return ImageFileSource(tuple(files), torch.tensor(labels), channels, size, tuple(others))


# -- images and masks ----------------------------------------------------------------------------------


def load_mask_folder(
    path: str | Path,
    *,
    classes: Sequence[str] | None = None,
    ignore_index: int = 255,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    seed: int = 0,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    standardizer: Standardizer | None = None,
) -> DatasetBundle:
    """Images and masks of the same names: path/images and path/masks (or labels), in or above train, val and test.

    A mask is a picture, grey or with a palette, whose numbers are the classes 0, 1, …, and `ignore_index` where a pixel counts
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
    >>> data = load_mask_folder(folder, classes=["background", "cell"])
    >>> x, y = data.train[0]
    >>> len(data.train), x.shape, y.shape, int(y.max()), data.ignore_index
    (8, torch.Size([3, 30, 40]), torch.Size([30, 40]), 1, 255)
    """
    folder = check_folder(path, "a folder with the folders images and masks")
    ignore_index = check_int("void", ignore_index)
    standardizer = _normalisation(standardizer, channels)
    size = _checked_size(size)
    found = {
        split: list_pairs(folders, IMAGE_SUFFIXES, MASK_SUFFIXES)
        for split, folders in find_paired_folders(folder, ("images",), ("masks", "labels")).items()
    }
    names = infer_class_names(classes, _numbers_in(found), ignore_index)
    parts = {
        split: LazyDataset(_mask_files(pairs, len(names), ignore_index, channels, size), standardizer)
        for split, pairs in found.items()
    }
    train, held_out, tested = complete_splits(parts, val_fraction=val_fraction, test_fraction=test_fraction, seed=seed)
    augmentation: Augmentation | None = None
    if size is not None:
        augmentation = CropFlip(size, scale=(0.5, 2.0), fill=standardizer.mean, ignore_index=ignore_index)
    return DatasetBundle(
        folder.resolve().name,
        "segmentation",
        train,
        held_out,
        tested,
        channels,
        names,
        standardizer,
        augmentation,
        ignore_index,
    )


@dataclass(frozen=True, eq=False)
class MaskFileSource:
    """Files of images and of their masks, as a source; `ignore_index` pixels count nowhere."""

    images: tuple[str, ...] = field(repr=False)
    masks: tuple[str, ...] = field(repr=False)
    num_classes: int
    ignore_index: int
    channels: int
    size: tuple[int, int] | None
    skipped: tuple[str, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        pairs = [(Path(self.images[row]), Path(self.masks[row])) for row in rows]
        read = [read_image_and_mask(image, mask, self.channels, size=self.size) for image, mask in pairs]
        masks = [self._checked(mask, row) for (_, mask), row in zip(read, rows, strict=True)]
        return [image for image, _ in read], masks

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        masks = [decode_mask(self.masks[row], self.masks[row], size=self.size) for row in rows]
        return [self._checked(mask, row) for mask, row in zip(masks, rows, strict=True)]

    def _checked(self, mask: Tensor, row: int) -> Tensor:
        wrong = mask[((mask < 0) | (mask >= self.num_classes)) & (mask != self.ignore_index)]
        if len(wrong):
            raise CorruptFileError(
                f"got {self.masks[row]} with the number {int(wrong[0])}; expected classes from 0 to "
                f"{self.num_classes - 1}, or {self.ignore_index} for void"
            )
        return mask


def _mask_files(
    pairs: FilePairs, num_classes: int, ignore_index: int, channels: int, size: tuple[int, int] | None
) -> MaskFileSource:
    images, masks, others = map(tuple, pairs)
    return MaskFileSource(images, masks, num_classes, ignore_index, channels, size, others)


def _numbers_in(found: Mapping[str, FilePairs]) -> Iterator[set[int]]:
    for pairs in found.values():
        for file in pairs.targets:
            yield set(np.unique(decode_mask(file, file).numpy()).tolist())


def infer_class_names(classes: Any, numbers: Iterable[set[int]], ignore_index: int) -> tuple[str, ...]:
    """The names of the classes: those given, else their numbers; `flatten_reals` are those in each mask, read if need be.

    Masks of one class and void are refused: those of black and white have 255 for a class, which would count nowhere.
    """
    names = () if classes is None else check_class_names(classes)
    found: set[int] = set()
    for some in numbers:
        found |= some
        if names and len(found - {ignore_index}) > 1:
            return names
    if names and ignore_index not in found:
        return names
    known = found - {ignore_index}
    if len(known) < 2 or min(known) < 0 or 2 * len(known) <= max(known):
        hint = "" if names else ", or name the classes=[…] that there may be"
        raise ValueError(
            f"got masks with the numbers {sorted(found)[:8]}, where {ignore_index} is void; expected classes 0, 1, …: renumber "
            f"them, such as 255 to 1 in masks of black and white{hint}"
        )
    return tuple(str(number) for number in range(max(known) + 1))


def check_class_names(classes: Any) -> tuple[str, ...]:
    """Names of classes, each its own."""
    names = () if isinstance(classes, str) else tuple(map(str, classes))
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"got classes={classes!r}; expected at least two names, such as ['background', 'cell']")
    return names


# -- PASCAL VOC ----------------------------------------------------------------------------------------


def load_voc_folder(
    path: str | Path, *, val_fraction: float = 0.1, seed: int = 0, size: tuple[int, int] | None = None
) -> DatasetBundle:
    """PASCAL VOC 2012 as it is published: 21 classes, 255 on the borders of objects; `path` is VOC2012 or above it.

    train.txt gives train, and its share for validation; val.txt gives test, since the test masks are not public. Where
    there are SegmentationClassAug and trainaug.txt, the 10,582 images of the latter are train. The augmentation is
    DeepLab's: resized by 0.5 … 2, cropped to 513 × 513 (or `size`), mirrored.

    >>> load_voc_folder("/nowhere")
    Traceback (most recent call last):
    neuboots.data._common.DatasetNotFoundError: got '/nowhere', which is not there; expected the folder VOC2012, or one above it
    """
    folder = check_folder(path, "the folder VOC2012, or one above it")
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
    normalise = IMAGENET_STANDARDIZERS[3]
    parts = {
        split: LazyDataset(_mask_files(pairs, len(VOC_CLASSES), 255, 3, size), normalise)
        for split, pairs in found.items()
    }
    train, held_out = hold_out(parts["train"], val_fraction, seed=check_int("seed", seed))
    augmentation = CropFlip(size or (513, 513), scale=(0.5, 2.0), fill=normalise.mean, ignore_index=255)
    return DatasetBundle(
        "voc2012", "segmentation", train, held_out, parts["test"], 3, VOC_CLASSES, normalise, augmentation, 255
    )


def _voc_root(folder: Path) -> Path:
    usual = [folder, folder / "VOC2012", folder / "VOCdevkit" / "VOC2012"]
    for root in [*usual, *sorted(folder.glob("*/VOC2012")), *sorted(folder.glob("*/VOCdevkit/VOC2012"))]:
        if (root / "JPEGImages").is_dir() and (root / "ImageSets" / "Segmentation").is_dir():
            return root
    raise DatasetNotFoundError(
        f"got {folder}, where neither it nor {usual[1]} nor {usual[2]} holds JPEGImages, SegmentationClass and "
        "ImageSets/Segmentation; expected PASCAL VOC 2012 as it is published: unpack VOCtrainval_11-May-2012.tar there"
    )


def _voc_pairs(root: Path, listed: Path, masks: Path) -> FilePairs:
    try:
        lines = listed.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise DatasetNotFoundError(
            f"cannot read {listed} ({type(fault).__name__}); expected a list of images in it"
        ) from None
    names = [Path(line.split()[0]).stem for line in lines if line.strip()]  # some lists give paths of both files
    if not names:
        raise DatasetNotFoundError(f"got {listed} without a name; expected one on each line")
    pairs = FilePairs([], [], [])
    for name in dict.fromkeys(names):
        image, mask = root / "JPEGImages" / f"{name}.jpg", masks / f"{name}.png"
        for file in (image, mask):
            if not file.is_file():
                raise DatasetNotFoundError(f"got {name} in {listed}, but no file {file}; expected it there")
        pairs.inputs.append(str(image))
        pairs.targets.append(str(mask))
    return pairs


# -- what may be given ---------------------------------------------------------------------------------


def _normalisation(given: Standardizer | None, channels: int) -> Standardizer:
    if isinstance(channels, bool) or channels not in IMAGENET_STANDARDIZERS:
        raise ValueError(f"got channels={channels!r}; expected 1 (grey) or 3 (colour)")
    normalisation = IMAGENET_STANDARDIZERS[channels] if given is None else given
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
