"""What models of images and of masks share: how files are read, how a folder is dealt out, and what is unusual.

A file that cannot be read is passed over and named; where more than a tenth are like that, all are refused, since then
the folder is not what it was taken for.

Images and masks that belong together, and what the numbers in masks stand for.

masks of 0, 1, 2 and 255 → three classes and void;    of 0 and 255 → two classes, black and white
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from neuboots._validation import check_int
from neuboots.app.rejection import MahalanobisScore
from neuboots.data import CorruptFileError, DatasetBundle, DatasetNotFoundError, LazyDataset, Standardizer
from neuboots.data.dataset import to_unit_range
from neuboots.data.image_folder import (
    IGNORE_INDEX,
    IMAGE_FOLDERS,
    IMAGE_SUFFIXES,
    IMAGENET_STANDARDIZERS,
    MASK_FOLDERS,
    MASK_SUFFIXES,
    FileListing,
    FilePairs,
    LabelMap,
    MaskFileSource,
    check_folder,
    find_paired_folders,
    find_split_folders,
    list_files,
    list_folders,
    list_pairs,
)
from neuboots.data.images import decode_image, decode_mask, read_image_size
from neuboots.data.splits import train_val_test_split
from neuboots.evaluation.ood.mahalanobis import extract_features, find_feature_net
from neuboots.head import HeadSplit
from neuboots.losses import Loss
from neuboots.methods import METHODS, ScaledPredictor
from neuboots.prediction import Method, Predictor
from neuboots.training import TrainingConfig, progress_bar

MAX_CORRUPT_FRACTION = 0.1  # the share of broken files that is passed over; one always is
MAX_BYTES_IN_MEMORY = 1 << 30  # bytes of pictures that are kept in memory while training
VALIDATION_FRACTION = 0.2  # the share of the training pictures that stops the training and calibrates
MAX_SAMPLED_FILES = 256  # files whose sizes are looked at
POOL_SIZE = 8  # of each side, whose mean pixels stand for features where a method has no net to take them from
BATCH_SIZE = 64  # pictures at once

OnStart = Callable[[Mapping[str, Any], Sequence[str]], None]
"""What is told before a training begins: what was chosen, by name, and notes on the files."""

# -- files ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImagePreprocessing:
    """How a file becomes an input (C, H, W): in grey or colour, of one size or of its own, normalised."""

    channels: int
    standardizer: Standardizer
    size: tuple[int, int] | None = None

    def __call__(self, file: str | Path) -> Tensor:
        return self.standardizer(to_unit_range(decode_image(file, self.channels, file, size=self.size)))

    def config(self) -> dict[str, Any]:
        return {
            "channels": self.channels,
            "mean": self.standardizer.mean,
            "std": self.standardizer.std,
            "size": self.size,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ImagePreprocessing":
        size = None if config["size"] is None else (int(config["size"][0]), int(config["size"][1]))
        return cls(int(config["channels"]), Standardizer(tuple(config["mean"]), tuple(config["std"])), size)


def find_images(source: str | Path) -> tuple[Path, FileListing]:
    """(the folder that names are counted from, the files below it), of a folder or of a single file."""
    path = Path(source).expanduser()
    if path.is_file():
        if not path.name.lower().endswith(IMAGE_SUFFIXES):
            raise DatasetNotFoundError(
                f"got {path}, which is no image by its name; expected one that ends in {', '.join(IMAGE_SUFFIXES)}"
            )
        return path.parent, FileListing([path], [])
    if not path.is_dir():
        raise DatasetNotFoundError(
            f"got {str(source)!r}, which is not there; expected a folder of images, or one image"
        )
    found = list_files(path, IMAGE_SUFFIXES)
    if not found.files:
        others = f" ({len(found.others)} files of other kinds were passed over)" if found.others else ""
        raise DatasetNotFoundError(
            f"got {path} without an image{others}; expected files that end in {', '.join(IMAGE_SUFFIXES)}"
        )
    return path, found


def test_folder(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """The folder whose labels may be compared with: its test part, where it has parts; and what to say of that.

    The rest of such a folder is what a model was trained on, and would flatter it.
    """
    splits = find_split_folders(folder)
    if not splits or not list_folders(splits["train"]):  # a class may be called train: its images lie right in it
        return folder, ()
    if "test" not in splits:
        names = ", ".join(entry.name for entry in splits.values())
        raise DatasetNotFoundError(
            f"got {folder} with the parts {names}; expected one to test with: give {folder}/test, or another"
        )
    return splits["test"], (f"of {folder} only the part {splits['test'].name} is read",)


def read_batches(
    names: Sequence[str],
    read: Callable[[int], Any],
    *,
    full: Callable[[Sequence[Any], Any], bool],
    notes: Sequence[str] = (),
) -> Iterator[tuple[list[int], list[Any], tuple[str, ...]]]:
    """(numbers of files, what was read of them, notes), some at a time; files that cannot be read are in the notes.

    `full` says whether what was read so far leaves no place for the next. All notes come with some rows, so that
    nobody has to look at a chunk without any.
    """
    numbers: list[int] = []
    rows: list[Any] = []
    said, done = list(notes), 0
    for i, name in enumerate(names):
        try:
            row = read(i)
        except CorruptFileError as fault:
            said.append(f"passed over {name}: {fault.reason}")
            continue
        if rows and full(rows, row):
            yield numbers, rows, tuple(said)
            numbers, rows, said = [], [], []
        numbers.append(i)
        rows.append(row)
        done += 1
    if not done:
        raise CorruptFileError(f"{len(names)} file(s)", f"none of them is an image ({said[-1]})")
    yield numbers, rows, tuple(said)


def join_names(names: Iterable[str], most: int = 5) -> str:
    """Some of these names, for a sentence.

    >>> join_names("abc"), join_names("abc", 2)
    ('a, b, c', 'a, b and 1 more')
    """
    found = list(names)
    return ", ".join(found) if len(found) <= most else f"{', '.join(found[:most])} and {len(found) - most} more"


def skipped_files_note(root: Path, others: Iterable[str | Path]) -> list[str]:
    """A note on files that are no images by their names, if there are any."""
    names = [relative_name(root, file) for file in others]
    return [f"passed over {len(names)} file(s) that are no images by their names: {join_names(names)}"] if names else []


def relative_name(root: Path, file: str | Path) -> str:
    """The name of a file as seen from the folder, the same on every machine, with � for what is no UTF-8."""
    path = Path(file)
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# -- sizes ---------------------------------------------------------------------------------------------


def median_size(files: Sequence[str | Path]) -> tuple[int, int]:
    """(H, W), each the median over some of the files, at even distances."""
    chosen = [files[int(i)] for i in np.linspace(0, len(files) - 1, min(MAX_SAMPLED_FILES, len(files))).round()]
    sizes = []
    for file in chosen:
        try:
            sizes.append(read_image_size(file, file))
        except CorruptFileError:
            continue  # it is named when it is read
    if not sizes:
        raise CorruptFileError(f"{len(files)} files", f"none of them is an image, such as {files[0]}")
    height, width = np.median(sizes, axis=0)
    return int(height), int(width)


def scaled_size(size: tuple[int, int], most: int, *, step: int = 4, least: int = 8) -> tuple[int, int]:
    """A size of these proportions, whose longer side is at most so long, in multiples of `step`.

    >>> scaled_size((480, 640), 64), scaled_size((28, 28), 64)
    ((48, 64), (28, 28))
    """
    scale = min(1.0, most / max(size))
    height, width = (max(least, round(side * scale / step) * step) for side in size)
    return height, width


def check_size(size: Any) -> tuple[int, int]:
    """A size that was given: one number for a square, or height and width."""
    sides = (size, size) if not isinstance(size, Sequence) else tuple(size)
    if len(sides) != 2:
        raise ValueError(f"got size={size!r}; expected one number of pixels, or height and width")
    height, width = (check_int("size", side, minimum=8) for side in sides)
    return height, width


# -- parts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class InMemorySource:
    """A source in memory: pictures and targets of any sizes."""

    x: list[Tensor]
    y: list[Tensor]

    def __len__(self) -> int:
        return len(self.x)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        return [self.x[row] for row in rows], self.read_targets(rows)

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        return [self.y[row].long() for row in rows]


@dataclass(frozen=True)
class ImageSplits:
    """Pictures to train with, those that are held out of that, those to test with, and what is to be said of them."""

    train: LazyDataset
    held_out: LazyDataset
    test: LazyDataset | None
    notes: tuple[str, ...]

    @property
    def rows(self) -> dict[str, int]:
        return {
            "train": len(self.train),
            "held out": len(self.held_out),
            "test": 0 if self.test is None else len(self.test),
        }


def split_images(
    data: DatasetBundle, test: float, *, seed: int, files: Callable[[Any], Sequence[str]], progress: bool
) -> ImageSplits:
    """The pictures of the folder that can be read, in three parts: those with a folder of their own, others by chance.

    `files` gives the files of a source. Of every class one picture at least is left to train with.
    """
    if isinstance(test, bool) or not isinstance(test, int | float) or not 0 <= test < 1:
        raise ValueError(f"got test={test!r}; expected a share of the images from 0 to below 1")
    given = {
        name: part for name in ("train", "validation", "test") if isinstance(part := getattr(data, name), LazyDataset)
    }
    total = sum(map(len, given.values()))
    with progress_bar("reading", total, enabled=progress) as step:
        found = {name: _readable(part, files(part.source), step) for name, part in given.items()}
    faults = [fault for _, some in found.values() for fault in some]
    parts = {name: part for name, (part, _) in found.items()}
    train, labels = parts["train"], parts["train"].targets
    counts = None if labels is None else labels.bincount(minlength=data.num_classes)
    _check_readable(parts, faults, total, data.classes, counts)
    shares = {
        name: 0.0 if name in parts else share for name, share in (("validation", VALIDATION_FRACTION), ("test", test))
    }
    least = (1 if counts is None else len(counts)) + sum(share > 0 for share in shares.values())
    if len(train) < least:
        of = "" if counts is None else f" of {len(counts)} classes"
        raise DatasetNotFoundError(
            f"got {len(train)} image(s){of} to train with; expected at least {least}, so that some can be held out and "
            "tested with: add images"
        )
    place = train_val_test_split(len(train), shares["validation"], shares["test"], seed=seed, strata=labels)
    held_out, tested = (
        parts[name] if name in parts else train.take((place == number).nonzero()[:, 0])
        for number, name in ((1, "validation"), (2, "test"))
    )
    notes = (
        [f"passed over {len(faults)} of {total:,} images that cannot be read: {join_names(faults)}"] if faults else []
    )
    return ImageSplits(
        train.take((place == 0).nonzero()[:, 0]), held_out, tested if len(tested) else None, tuple(notes)
    )


def _check_readable(
    parts: Mapping[str, LazyDataset], faults: Sequence[str], total: int, classes: Sequence[str], counts: Tensor | None
) -> None:
    """Are there images enough, in every part and of every class?"""
    if len(faults) > max(1, MAX_CORRUPT_FRACTION * total):
        raise CorruptFileError(f"{len(faults):,} of {total:,} images", f"the first is {faults[0]}")
    empty = [name for name, part in parts.items() if not len(part)]
    if counts is not None and not bool(counts.all()):
        empty.append(repr(classes[int(counts.argmin())]))
    if empty:
        raise CorruptFileError(f"any image of {empty[0]}", f"the first is {faults[0]}", "Add complete images.")


def _readable(part: LazyDataset, files: Sequence[str], step: Callable[[str], None]) -> tuple[LazyDataset, list[str]]:
    """The rows of a part that can be read, in memory if they are small, and what is wrong with the others."""
    kept: list[int] = []
    held, size = InMemorySource([], []), 0
    faults = []
    for row in range(len(part.source)) if part.rows is None else part.rows:
        try:
            (x,), (y,) = part.source.read([row])
        except CorruptFileError as fault:
            faults.append(f"{files[row]} ({fault.reason})")
        else:
            y = y.to(torch.uint8) if y.ndim > 1 else y  # of a mask, whose classes and void are bytes
            size += x.nbytes + y.nbytes
            kept.append(row)
            if size <= MAX_BYTES_IN_MEMORY:
                held.x.append(x)
                held.y.append(y)
        step("reading")
    if size > MAX_BYTES_IN_MEMORY:
        return replace(part, rows=tuple(kept)), faults
    return LazyDataset(held, part.transform), faults


def iterate_batches(part: LazyDataset, size: int = BATCH_SIZE) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Inputs and targets of a part, some at a time, in its order."""
    for start in range(0, len(part), size):
        rows = part.__getitems__(range(start, min(start + size, len(part))))
        yield [x for x, _ in rows], [y for _, y in rows]


# -- methods -------------------------------------------------------------------------------------------


def method_for_task(name: str, task: Any, loss: Loss) -> Method:
    """The method of this name, if it can do the task, or a sentence."""
    able = [entry.name for entry in METHODS.values() if task in entry.tasks]
    if name not in able:
        raise ValueError(f"got the method {name!r}; expected one for {task}: {', '.join(able)}")
    return METHODS[name].make(loss=loss)


def train_predictor(
    name: str,
    method: Any,
    model: Callable[[], nn.Module],
    train: LazyDataset,
    held_out: LazyDataset,
    config: TrainingConfig,
) -> Predictor:
    """The method fitted, with the weights that did best on what is held out."""
    if name == "swag":  # its Gaussian is that of the last iterates: it must get there
        config = replace(config, patience=None)
    predictor: Predictor = method.fit(model, train, config, val_data=held_out)
    return predictor


# -- unusual pictures ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FeatureExtractor:
    """φ of images (N, C, H, W): what the head of the trained net reads, in the mean over pixels; else mean pixels."""

    split: HeadSplit | None

    @classmethod
    def of(cls, predictor: Predictor, channels: int, size: tuple[int, int]) -> "FeatureExtractor":
        """Those of a predictor; the same again for the same predictor, saved and loaded."""
        inner = predictor.inner if isinstance(predictor, ScaledPredictor) else predictor
        few = torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0))
        try:
            return cls(find_feature_net(inner, None, None, few))
        except ValueError:  # it has none whose features are what it predicts by
            return cls(None)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """(N, D)."""
        if self.split is None:
            return functional.adaptive_avg_pool2d(x, POOL_SIZE).flatten(1)
        (phi,) = extract_features(self.split, (), x)
        return phi.float().cpu()


def check_consistent(
    folder: Path,
    predictor: Predictor,
    features: FeatureExtractor,
    unusual: MahalanobisScore,
    classes: int,
    shape: tuple[int, int, int],
) -> None:
    """Do the parts of a saved model belong together? Images (C, H, W) of this shape are given to all of them."""
    x = torch.zeros(1, *shape)
    try:
        fits = predictor.summarize(x, 1).probs.shape[1] == classes and len(unusual.score(features(x))) == 1
    except (RuntimeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"the parts of {folder} do not fit together; expected what one neuboots fit wrote")


MIN_IMAGE_SIZE = 8  # pixels of a side that a net can tell anything about

# -- files ---------------------------------------------------------------------------------------------


def find_pairs(path: str | Path) -> tuple[Path, dict[str, FilePairs]]:
    """(the folder, part → images and masks of the same names), in any layout that has images and masks (or labels)."""
    folder = check_folder(path, "a folder with the folders images and masks")
    parts = find_paired_folders(folder, IMAGE_FOLDERS, MASK_FOLDERS)
    return folder, {part: list_pairs(folders, IMAGE_SUFFIXES, MASK_SUFFIXES) for part, folders in parts.items()}


def find_test_pairs(path: str | Path) -> tuple[Path, FilePairs, list[str]]:
    """(the folder, images and masks that may be compared with, notes): of several parts, those to test with."""
    folder, parts = find_pairs(path)
    if len(parts) == 1:
        return folder, parts["train"], []
    if "test" not in parts:
        raise DatasetNotFoundError(
            f"got {folder} with the parts {', '.join(parts)}; expected test among them, or one part alone"
        )
    return folder, parts["test"], [f"of {folder} only the part test is read"]


def exclude_masks(root: Path, files: Iterable[Path]) -> list[Path]:
    """The files that are not in a folder of masks beside one of images."""

    def of_masks(file: Path) -> bool:
        inner = file.relative_to(root).parts[:-1]
        return any(
            name in MASK_FOLDERS and any(root.joinpath(*inner[:i], images).is_dir() for images in IMAGE_FOLDERS)
            for i, name in enumerate(inner)
        )

    return [file for file in files if not of_masks(file)]


@dataclass(frozen=True, eq=False)
class MaskPairSource(MaskFileSource):
    """Source of image files with mask files that rejects images of a few pixels."""

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        images, masks = super().read(rows)
        return [check_image_size(image, self.images[row]) for image, row in zip(images, rows, strict=True)], masks


def check_image_size(image: Tensor, where: str | Path) -> Tensor:
    """The image (C, H, W), or what to raise for one of a few pixels."""
    height, width = image.shape[-2:]
    if min(height, width) < MIN_IMAGE_SIZE:
        raise CorruptFileError(where, f"it has {height} × {width} pixels; expected at least {MIN_IMAGE_SIZE} per side")
    return image


def mask_values(masks: Sequence[str], *, progress: bool) -> set[int]:
    """All numbers in the masks that can be read; if none can, what is wrong with the first."""
    found: set[int] = set()
    faults: list[CorruptFileError] = []
    with progress_bar("reading masks", len(masks), enabled=progress) as step:
        for mask in masks:
            try:
                found |= set(np.unique(decode_mask(mask, mask).numpy()).tolist())
            except CorruptFileError as fault:  # it is named when it is read with its image
                faults.append(fault)
            step("reading masks")
    if not found:
        raise faults[0]
    return found


def make_dataset(
    folder: Path, pairs: dict[str, FilePairs], names: tuple[str, ...], coding: LabelMap, channels: int
) -> DatasetBundle:
    """The images and masks of a folder, each of its own size."""
    look = IMAGENET_STANDARDIZERS[channels]
    parts: dict[str, LazyDataset | None] = {
        part: LazyDataset(MaskPairSource(found.inputs, found.targets, coding, channels), look)
        for part, found in pairs.items()
    }
    return DatasetBundle(
        folder.name,
        "segmentation",
        parts["train"],  # type: ignore[arg-type]
        parts.get("validation"),
        parts.get("test"),
        channels,
        names,
        look,
        ignore_index=IGNORE_INDEX,
    )
