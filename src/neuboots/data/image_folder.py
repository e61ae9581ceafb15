"""Data sets from folders of files: images by class, images with masks, and PASCAL VOC.

    path/<class>/…,               path/<split>/<class>/…                                          → a class
    path/{images, masks}/<name>,  path/<split>/{images, masks}/<name>,  path/{images, masks}/<split>/<name>  → a mask

Files are sorted by name and read on demand; hidden files and folders are skipped. Images are converted as in
`neuboots.data.images`.

Everingham, Van Gool, Williams, Winn and Zisserman, The PASCAL visual object classes challenge 2012. Hariharan,
Arbelaez, Bourdev, Maji and Malik, Semantic contours from inverse detectors, ICCV 2011 (SegmentationClassAug).
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from neuboots._validation import ArgumentError, check_int, format_names
from neuboots.data._common import CorruptFileError, DatasetNotFoundError, check_folder, identity, match_splits
from neuboots.data.augment import CropFlip, CropFlipCutout, check_sides
from neuboots.data.dataset import (
    DatasetBundle,
    FileSource,
    LazyDataset,
    PairDecoder,
    Standardizer,
    Transform,
    complete_splits,
)
from neuboots.data.images import ImageSize, decode_image, decode_mask, open_image

IMAGE_SUFFIXES = (
    ".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
MASK_SUFFIXES = (".png", ".bmp", ".gif", ".pgm", ".tif", ".tiff")  # lossless: JPEG would add classes at borders
IMAGE_FOLDERS, MASK_FOLDERS = ("images",), ("masks", "labels")
IGNORE_INDEX = 255  # mask value of pixels without a class, once a file is read
MAX_MASK_CLASSES = 64  # mask values that are taken for classes; masks with smoothed borders have more

IMAGENET_STANDARDIZERS = {
    1: Standardizer((0.449,), (0.226,)),
    3: Standardizer((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}  # default for 1 and 3 channels: the statistics of ImageNet, as pretrained nets expect

VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "dining table",
    "dog", "horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train", "tv monitor",
)  # fmt: skip


# -- files and folders ---------------------------------------------------------------------------------


class FileListing(NamedTuple):
    """Files below a folder: those with an accepted suffix, and all others."""

    files: list[Path]
    others: list[Path]


class FilePairs(NamedTuple):
    """Files of inputs and of their targets, and files with other suffixes, which are skipped."""

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    skipped: tuple[str, ...]


def list_folders(folder: Path) -> list[Path]:
    """List the folders in a folder, sorted by name, without hidden ones.

    Args:
        folder: The folder.

    Returns:
        Its subfolders.
    """
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not _is_hidden(entry.name))


def list_files(folder: Path, suffixes: Collection[str]) -> FileListing:
    """List all files below a folder, sorted by name; links are followed once.

    Args:
        folder: The folder.
        suffixes: Accepted suffixes, in lower case.

    Returns:
        Files with these suffixes, and all others.
    """
    listing, seen = FileListing([], []), set[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        for name in names:
            if not _is_hidden(name):
                (listing.files if name.lower().endswith(tuple(suffixes)) else listing.others).append(Path(place, name))
    return FileListing(sorted(listing.files), sorted(listing.others))


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__MACOSX"))


def find_split_folders(folder: Path) -> dict[str, Path]:
    """Find the folders of the splits.

    Args:
        folder: Folder that may have folders such as train, val and test.

    Returns:
        Folder of each split; empty without a training split.

    Raises:
        ValueError: If a split has two folders.
    """
    found = match_splits({entry.name: entry for entry in list_folders(folder)})
    return found if "train" in found else {}


def find_paired_folders(folder: Path, inputs: Sequence[str], targets: Sequence[str]) -> dict[str, tuple[Path, Path]]:
    """Find the folders of inputs and targets of each split.

    Args:
        folder: Folder in one of the layouts of this module.
        inputs: Accepted names of the folder of inputs.
        targets: Accepted names of the folder of targets.

    Returns:
        Folders of inputs and targets of each split; all files are "train" without folders of splits.

    Raises:
        DatasetNotFoundError: If a folder is missing.
    """
    splits = find_split_folders(folder)
    if splits:
        return {split: _find_pair(entry, inputs, targets) for split, entry in splits.items()}
    pair = _find_pair(folder, inputs, targets)
    input_splits, target_splits = map(find_split_folders, pair)
    if missing := [split for split in input_splits if split not in target_splits]:
        raise DatasetNotFoundError(f"{pair[1]} has no folder for the split {missing[0]!r}.")
    return {split: (entry, target_splits[split]) for split, entry in input_splits.items()} or {"train": pair}


def _find_pair(folder: Path, inputs: Sequence[str], targets: Sequence[str]) -> tuple[Path, Path]:
    names = {entry.name: entry for entry in list_folders(folder)}
    first, second = (next((names[name] for name in group if name in names), None) for group in (inputs, targets))
    if first is None or second is None:
        found = f"has the folders {format_names(list(names)) or 'none'}; expected {' or '.join(inputs)}"
        raise DatasetNotFoundError(f"{folder} {found} and {' or '.join(targets)}, in or above train, val and test.")
    return first, second


def list_pairs(folders: tuple[Path, Path], suffixes: Sequence[str], target_suffixes: Sequence[str]) -> FilePairs:
    """Match files of inputs and targets by name.

    Args:
        folders: Folder of the inputs and folder of the targets.
        suffixes: Accepted suffixes of the inputs.
        target_suffixes: Accepted suffixes of the targets.

    Returns:
        The pairs, sorted by name.

    Raises:
        DatasetNotFoundError: If there are no inputs, or a file has no partner.
        ValueError: If two files of a folder differ by their suffix only.
    """
    inputs, others = _index_by_stem(folders[0], suffixes)
    targets, other_targets = _index_by_stem(folders[1], target_suffixes)
    skipped = tuple(map(str, others + other_targets))
    if not inputs:
        found = f"({len(others)} other files)"
        raise DatasetNotFoundError(f"{folders[0]} has no file that ends in {', '.join(suffixes)} {found}.")
    if unmatched := sorted(inputs.keys() ^ targets.keys()):
        file = {**inputs, **targets}[unmatched[0]]
        raise DatasetNotFoundError(f"{file} has no partner of the same name in {folders[0]} and {folders[1]}.")
    return FilePairs(tuple(map(str, inputs.values())), tuple(str(targets[stem]) for stem in inputs), skipped)


def _index_by_stem(folder: Path, suffixes: Collection[str]) -> tuple[dict[str, Path], list[Path]]:
    """Files by their relative path without the suffix, and files with other suffixes."""
    listing, by_stem = list_files(folder, suffixes), dict[str, Path]()
    for file in listing.files:
        name = file.relative_to(folder).as_posix()
        stem = name[: -max(len(suffix) for suffix in suffixes if name.lower().endswith(suffix))]
        if stem in by_stem:
            raise ValueError(f"{by_stem[stem]} and {file} have the same name: remove one of them.")
        by_stem[stem] = file
    return by_stem, listing.others


def pairs_to_datasets(
    pairs: Mapping[str, FilePairs], decoder: PairDecoder, transform: Transform = identity
) -> dict[str, LazyDataset]:
    """Make a data set of each split.

    Args:
        pairs: Files of each split.
        decoder: Decodes an input and its target.
        transform: Transform of the inputs.

    Returns:
        The data sets.
    """
    return {
        split: LazyDataset(FileSource(files.inputs, files.targets, decoder, files.skipped), transform)
        for split, files in pairs.items()
    }


# -- decoding ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelMap:
    """Values of the classes in mask files.

    Attributes:
        values: Value of each class 0, 1, …
        ignore_index: Value of pixels without a class; None if there are none.

    Example:
        >>> LabelMap((0, 255), ignore_index=9)(torch.tensor([[0, 255, 9]]), "mask.png").tolist()
        [[0, 1, 255]]
    """

    values: tuple[int, ...]
    ignore_index: int | None = None

    def __call__(self, mask: Tensor, where: str | Path) -> Tensor:
        """Map the values of a file to classes.

        Args:
            mask: Values (H, W).
            where: The file, for error messages.

        Returns:
            Classes 0, 1, …, and `IGNORE_INDEX` for pixels without a class.

        Raises:
            CorruptFileError: If a value is unknown.
        """
        values, classes = torch.tensor(self.values).sort()
        index = torch.searchsorted(values, mask).clamp(max=len(values) - 1)
        known = values[index] == mask
        wrong = mask[~known] if self.ignore_index is None else mask[~known & (mask != self.ignore_index)]
        if len(wrong):
            accepted = format_names(self.values) + ("" if self.ignore_index is None else f" or {self.ignore_index}")
            raise CorruptFileError(where, f"it has the value {int(wrong[0])}", f"Expected {accepted}.")
        return classes[index].where(known, IGNORE_INDEX)


@dataclass(frozen=True)
class ImageDecoder:
    """Decoder of image files with classes or with mask files; a `neuboots.data.dataset.PairDecoder`.

    Attributes:
        channels: 1 for grayscale, 3 for RGB.
        size: Height and width to resize to; None to keep the size of each file.
        label_map: Values of the classes in the masks; None if targets are classes.
    """

    channels: int
    size: ImageSize | None = None
    label_map: LabelMap | None = None

    def __call__(self, file: str, target: Any) -> tuple[Tensor, Tensor]:
        image, mask = open_image(file, file), None
        if self.label_map is not None:
            mask = open_image(target, target)
            if image.size != mask.size:
                mask_size, image_size = (f"{height} × {width}" for width, height in (mask.size, image.size))
                hint = "Make the mask for the image as rotated by its EXIF tag."
                raise CorruptFileError(target, f"it is {mask_size}, but {file} is {image_size} pixels", hint)
        return decode_image(image, self.channels, file, size=self.size), self.decode_target(target, mask)

    def decode_target(self, target: Any, mask: Any = None) -> Tensor:
        """Decode the class, or the mask (H, W).

        Args:
            target: The class, or the path of the mask.
            mask: The opened mask; None opens it.

        Returns:
            The target.
        """
        if self.label_map is None:
            return torch.tensor(target)
        return self.label_map(decode_mask(mask or target, target, size=self.size), target)


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
    """Load images from one folder per class, path/<class>/…, which may be in folders train, val and test.

    Args:
        path: The folder.
        val_fraction: Fraction of the images for validation, stratified, if there is no folder for it; 0 for none.
        test_fraction: Fraction of the images for testing, stratified, if there is no folder for it; 0 for none.
        seed: Random seed of the splits.
        size: Height and width of the images. With a size, the augmentation pads by an eighth, crops and mirrors;
            without one, images keep their sizes and there is no augmentation.
        channels: 1 for grayscale, 3 for RGB.
        standardizer: Standardization of the images; None for that of ImageNet.

    Returns:
        The splits; `data.train.source.skipped` lists files that are not images by their suffix.

    Raises:
        DatasetNotFoundError: If folders or images are missing.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name, color in [("blue", "#0000ff"), ("red", "#ff0000")]:
        ...     (folder / name).mkdir()
        ...     for i in range(10):
        ...         Image.new("RGB", (40, 30), color).save(folder / name / f"{i}.png")
        >>> data = load_image_folder(folder, size=(32, 32))
        >>> x, y = data.train[0]
        >>> len(data.train), len(data.test), data.classes, x.shape, int(y)
        (16, 2, ('blue', 'red'), torch.Size([3, 32, 32]), 0)
    """
    folder = check_folder(path, "a folder with one folder of images for each class")
    standardizer = _check_standardizer(standardizer, channels)
    size = None if size is None else check_sides("size", size, axes=(2,))
    splits = find_split_folders(folder)
    if not splits or not list_folders(splits["train"]):  # a class may be called train, with images right in it
        splits = {"train": folder}
    classes = tuple(entry.name for entry in list_folders(splits["train"]))
    if len(classes) < 2:
        raise DatasetNotFoundError(
            f"{splits['train']} has {len(classes)} folder(s); expected at least two, one of images for each class."
        )
    decoder = ImageDecoder(channels, size)
    datasets = {
        split: LazyDataset(_list_images(entry, classes, decoder), standardizer) for split, entry in splits.items()
    }
    complete = complete_splits(datasets, val_fraction, test_fraction, seed, stratify=True)
    augmentation = size and CropFlipCutout(size, padding=max(1, min(size) // 8), fill=standardizer.mean)
    name = folder.resolve().name
    return DatasetBundle(name, "classification", *complete, channels, classes, standardizer, augmentation)


def _list_images(folder: Path, classes: tuple[str, ...], decoder: ImageDecoder) -> FileSource:
    if different := sorted({entry.name for entry in list_folders(folder)} ^ {*classes}):
        raise DatasetNotFoundError(f"{folder} and the training split do not both have the class {different[0]!r}.")
    files: list[Path] = []
    labels: list[int] = []
    others = [entry for entry in sorted(folder.iterdir()) if entry.is_file() and not _is_hidden(entry.name)]
    for label, name in enumerate(classes):
        listing = list_files(folder / name, IMAGE_SUFFIXES)
        if not listing.files:
            raise DatasetNotFoundError(
                f"{folder / name}, the folder of a class, has no image ({len(listing.others)} other files)."
            )
        files += listing.files
        labels += [label] * len(listing.files)
        others += listing.others
    return FileSource(tuple(map(str, files)), tuple(labels), decoder, tuple(map(str, others)))


# -- images with masks ---------------------------------------------------------------------------------


def check_class_names(classes: Any) -> tuple[str, ...]:
    """Return class names as a tuple.

    Args:
        classes: At least two distinct names.

    Returns:
        The names.

    Raises:
        ArgumentError: If there are fewer than two, or names repeat.
    """
    names = () if isinstance(classes, str) else tuple(map(str, classes))
    if len(names) < 2 or len(set(names)) < len(names):
        raise ArgumentError("classes", classes, "at least two distinct names such as ['background', 'cell']")
    return names


def infer_label_map(
    found: Iterable[int], classes: Sequence[str] | None = None, ignore_index: int | None = None
) -> tuple[tuple[str, ...], LabelMap]:
    """Infer the classes of masks from the values in their files.

    Args:
        found: Values in the files.
        classes: Names of the classes; None names them by their values. Names may include classes that no mask has,
            where values are 0, 1, …
        ignore_index: Value of pixels without a class. None takes 255, if it is found besides values 0, 1, … or besides
            as many values as there are names, and otherwise none.

    Returns:
        Names of the classes, and the map from values to classes.

    Raises:
        ArgumentError: If the values do not match the names, are fewer than 2, or more than 64 without names.

    Example:
        >>> infer_label_map([0, 255])
        (('0', '255'), LabelMap(values=(0, 255), ignore_index=None))
        >>> infer_label_map([0, 1, 255], ["ground", "house"])
        (('ground', 'house'), LabelMap(values=(0, 1), ignore_index=255))
        >>> infer_label_map([0, 2], ["ground", "house", "road"])
        (('ground', 'house', 'road'), LabelMap(values=(0, 1, 2), ignore_index=None))
    """
    names = None if classes is None else check_class_names(classes)
    distinct = sorted(set(found))
    if ignore_index is None and IGNORE_INDEX in distinct and (names is None or len(names) != len(distinct)):
        others = [value for value in distinct if value != IGNORE_INDEX]
        if names is not None or (len(others) > 1 and others[-1] < 2 * len(others)):
            ignore_index = IGNORE_INDEX
    values = [value for value in distinct if value != ignore_index]
    if len(values) < 2 and (names is None or ignore_index in distinct):  # 255 in binary masks would be ignored silently
        hint = "masks need at least two classes; renumber binary masks to 0 and 1"
        raise ArgumentError("ignore_index", ignore_index, f"a value besides those of the classes {values}", hint=hint)
    if names is None and len(values) > MAX_MASK_CLASSES:
        hint = "save masks without smoothed borders, or name all classes"
        raise ArgumentError("classes", classes, f"names, as masks have {len(values)} values", hint=hint)
    if names is not None:
        consecutive = [value for value in range(len(names) + 1) if value != ignore_index][: len(names)]
        values = consecutive if set(values) <= set(consecutive) else values
        if len(names) != len(values) or len(names) > IGNORE_INDEX:
            expected = f"a name for each of the values {format_names(values)}, at most {IGNORE_INDEX}"
            raise ArgumentError("classes", names, expected)
    return names or tuple(map(str, values)), LabelMap(tuple(values), ignore_index)


def read_label_map(
    files: Iterable[Any], read: Callable[[Any], Tensor], classes: Sequence[str] | None, ignore_index: int | None
) -> tuple[tuple[str, ...], LabelMap]:
    """Infer the classes of masks by reading them; with names, only until two of the classes were found.

    Args:
        files: The masks.
        read: Reads the values of a mask.
        classes: Names of the classes; None names them by their values.
        ignore_index: Value of pixels without a class; see `infer_label_map`.

    Returns:
        Names of the classes, and the map from values to classes.
    """
    found = set[int]()
    for file in files:
        found |= set(np.unique(read(file).numpy()).tolist())
        values = found - {ignore_index}
        if classes is not None and len(values) > 1 and values <= set(range(len(classes))):
            break
    return infer_label_map(found, classes, ignore_index)


def load_mask_folder(
    path: str | Path,
    *,
    classes: Sequence[str] | None = None,
    ignore_index: int | None = 255,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    seed: int = 0,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    standardizer: Standardizer | None = None,
) -> DatasetBundle:
    """Load images with masks of the same names from path/images and path/masks (or labels), in or above split folders.

    Args:
        path: The folder.
        classes: Names of the classes; None reads all masks and names classes by their values.
        ignore_index: Value of mask pixels without a class, which becomes 255; None infers it.
        val_fraction: Fraction of the images for validation, if there is no folder for it; 0 for none.
        test_fraction: Fraction of the images for testing, if there is no folder for it; 0 for none.
        seed: Random seed of the splits.
        size: Height and width of the images. With a size, the augmentation scales by 0.5 … 2, crops and mirrors;
            without one, images keep their sizes and there is no augmentation.
        channels: 1 for grayscale, 3 for RGB.
        standardizer: Standardization of the images; None for that of ImageNet.

    Returns:
        The splits.

    Raises:
        DatasetNotFoundError: If folders or files are missing.
        ArgumentError: If mask values do not match the classes.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name, color in [("images", "#0000ff"), ("masks", 1)]:
        ...     (folder / name).mkdir()
        ...     for i in range(10):
        ...         Image.new("RGB" if name == "images" else "L", (40, 30), color).save(folder / name / f"{i}.png")
        >>> data = load_mask_folder(folder, classes=["background", "cell"])
        >>> x, y = data.train[0]
        >>> len(data.train), x.shape, y.shape, int(y.max()), data.ignore_index
        (8, torch.Size([3, 30, 40]), torch.Size([30, 40]), 1, 255)
    """
    folder = check_folder(path, "a folder with the folders images and masks")
    ignore_index = None if ignore_index is None else check_int("ignore_index", ignore_index)
    standardizer = _check_standardizer(standardizer, channels)
    size = None if size is None else check_sides("size", size, axes=(2,))
    pairs = {
        split: list_pairs(folders, IMAGE_SUFFIXES, MASK_SUFFIXES)
        for split, folders in find_paired_folders(folder, IMAGE_FOLDERS, MASK_FOLDERS).items()
    }
    masks = [mask for files in pairs.values() for mask in files.targets]
    names, label_map = read_label_map(masks, lambda file: decode_mask(file, file), classes, ignore_index)
    datasets = pairs_to_datasets(pairs, ImageDecoder(channels, size, label_map), standardizer)
    splits = complete_splits(datasets, val_fraction, test_fraction, seed)
    augmentation = size and CropFlip(size, scale=(0.5, 2.0), fill=standardizer.mean, ignore_index=IGNORE_INDEX)
    name = folder.resolve().name
    return DatasetBundle(name, "segmentation", *splits, channels, names, standardizer, augmentation, IGNORE_INDEX)


# -- PASCAL VOC ----------------------------------------------------------------------------------------


def load_voc_folder(
    path: str | Path, *, val_fraction: float = 0.1, seed: int = 0, size: tuple[int, int] | None = None
) -> DatasetBundle:
    """Load PASCAL VOC 2012 from its published folders: 21 classes, and 255 at the borders of objects.

    train.txt is the training split and val.txt the test split, because the test masks are not public. If
    SegmentationClassAug and trainaug.txt exist, the 10,582 images of the latter are the training split. The
    augmentation is that of DeepLab: scaled by 0.5 … 2, cropped and mirrored.

    Args:
        path: The folder VOC2012, or one above it.
        val_fraction: Fraction of the training images for validation.
        seed: Random seed of the validation split.
        size: Height and width of the images; None keeps their sizes and crops to 513 × 513 in the augmentation.

    Returns:
        The splits.

    Raises:
        DatasetNotFoundError: If folders or files are missing.
    """
    root = _find_voc_root(check_folder(path, "the folder VOC2012, or one above it"))
    lists, train_masks = root / "ImageSets" / "Segmentation", root / "SegmentationClass"
    train_list = lists / "train.txt"
    for name in ("train_aug.txt", "trainaug.txt"):
        if (lists / name).is_file() and (root / "SegmentationClassAug").is_dir():
            train_list, train_masks = lists / name, root / "SegmentationClassAug"
    size = None if size is None else check_sides("size", size, axes=(2,))
    pairs = {
        "train": _list_voc_pairs(root, train_list, train_masks),
        "test": _list_voc_pairs(root, lists / "val.txt", root / "SegmentationClass"),
    }
    if both := set(pairs["train"].inputs) & set(pairs["test"].inputs):
        raise ValueError(f"{min(both)} is in {train_list} and in {lists / 'val.txt'}; expected it in one of them.")
    standardizer = IMAGENET_STANDARDIZERS[3]
    label_map = LabelMap(tuple(range(len(VOC_CLASSES))), IGNORE_INDEX)
    datasets = pairs_to_datasets(pairs, ImageDecoder(3, size, label_map), standardizer)
    splits = complete_splits(datasets, val_fraction, 0.0, seed)
    crop = CropFlip(size or (513, 513), scale=(0.5, 2.0), fill=standardizer.mean, ignore_index=IGNORE_INDEX)
    return DatasetBundle("voc2012", "segmentation", *splits, 3, VOC_CLASSES, standardizer, crop, IGNORE_INDEX)


def _find_voc_root(folder: Path) -> Path:
    for pattern in (".", "voc2012", "VOC2012", "VOCdevkit/VOC2012", "*/VOC2012", "*/VOCdevkit/VOC2012"):
        for root in [folder] if pattern == "." else sorted(folder.glob(pattern)):
            if (root / "JPEGImages").is_dir() and (root / "ImageSets" / "Segmentation").is_dir():
                return root
    raise DatasetNotFoundError(f"{folder} has no folder VOC2012: unpack VOCtrainval_11-May-2012.tar there.")


def _list_voc_pairs(root: Path, list_file: Path, masks: Path) -> FilePairs:
    try:
        lines = list_file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetNotFoundError(f"Cannot read the list of images {list_file} ({type(error).__name__}).") from None
    names = dict.fromkeys(Path(line.split()[0]).stem for line in lines if line.strip())  # a line may have two paths
    if not names:
        raise DatasetNotFoundError(f"{list_file} lists no image.")
    images = [root / "JPEGImages" / f"{name}.jpg" for name in names]
    targets = [masks / f"{name}.png" for name in names]
    for file in [*images, *targets]:
        if not file.is_file():
            raise DatasetNotFoundError(f"{file}, which {list_file} lists, does not exist.")
    return FilePairs(tuple(map(str, images)), tuple(map(str, targets)), ())


def _check_standardizer(standardizer: Standardizer | None, channels: int) -> Standardizer:
    if isinstance(channels, bool) or channels not in IMAGENET_STANDARDIZERS:
        raise ArgumentError("channels", channels, "1 (grayscale) or 3 (RGB)")
    standardizer = IMAGENET_STANDARDIZERS[channels] if standardizer is None else standardizer
    if len(standardizer.mean) != channels or standardizer.axes != 2:
        raise ArgumentError("standardizer", standardizer, f"one for {channels} channels, with axes=2")
    return standardizer
