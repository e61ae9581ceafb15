"""Image folders: reading, splitting and preprocessing, and the part that models of images and masks share.

A file that cannot be read is skipped with a note; more than 10 % of such files are an error.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from neuboots._validation import ArgumentError, check_fraction, check_int, check_memory, check_types, format_names
from neuboots.app.model import (
    Model,
    ModelCard,
    RowBatch,
)
from neuboots.data import CorruptFileError, DatasetNotFoundError, LazyDataset, Standardizer
from neuboots.data.dataset import to_unit_range
from neuboots.data.image_folder import (
    IMAGE_SUFFIXES,
    IMAGENET_STANDARDIZERS,
    FileListing,
    list_files,
)
from neuboots.data.images import decode_image, read_image_size
from neuboots.evaluation.ood.mahalanobis import MahalanobisScore, extract_features, find_feature_net
from neuboots.evaluation.segmentation.predict import clip_window, make_tiles
from neuboots.head import HeadSplit
from neuboots.loading import train_val_test_split
from neuboots.methods import find_method
from neuboots.posthoc import ScaledPredictor
from neuboots.prediction import Predictor
from neuboots.serialization import Artifact, ArtifactError, build_predictor, describe_predictor
from neuboots.training import TrainingConfig, progress_bar

OnStart = Callable[[Mapping[str, Any], Sequence[str]], None]
"""Called before a training with the chosen options and notes on the files."""

BATCH_SIZE = 64
WINDOW = 256  # pixels of a large image that the net sees at once
_MAX_CORRUPT_FRACTION = 0.1
_MAX_BYTES_IN_MEMORY = 1 << 30  # of decoded images during training
_VALIDATION_FRACTION = 0.2
_MAX_SAMPLED_FILES = 256  # files that the median size is computed from
_MIN_IMAGE_SIZE = 8  # pixels per side
_PIXEL_BYTES = 2 * 64 * 4 * 4  # of memory: two images, four layers of 64 channels at a time
_EXAMPLE_SIZE = (64, 64)  # of images whose size is not fixed
_POOL_SIZE = 8  # features are 8 × 8 cell means if a method has no net to take them from


@dataclass(frozen=True)
class ImagePreprocessing:
    """How a file becomes an input (C, H, W): channels and size (None: that of the file); ImageNet standardization."""

    channels: int
    size: tuple[int, int] | None = None

    @property
    def standardizer(self) -> Standardizer:
        return IMAGENET_STANDARDIZERS[self.channels]

    def __call__(self, file: str | Path) -> Tensor:
        return self.standardizer(to_unit_range(decode_image(file, self.channels, file, size=self.size)))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ImagePreprocessing":
        check_types("preprocessing", config, cls)
        if size := config["size"]:
            check_memory("size", size, _PIXEL_BYTES * size[0] * size[1], hint="use smaller images")
        return cls(config["channels"], size and tuple(size))


@dataclass(frozen=True, eq=False)
class FeatureExtractor:
    """Features φ(x) of images (N, C, H, W) for the OOD score, averaged over windows of large images.

    They are the head's input, averaged over pixels, or cell means if no single net computes the predictions.
    """

    split: HeadSplit | None

    @classmethod
    def from_predictor(cls, predictor: Predictor, channels: int, size: tuple[int, int] | None) -> "FeatureExtractor":
        inner = predictor.inner if isinstance(predictor, ScaledPredictor) else predictor
        example = torch.randn(2, channels, *(size or _EXAMPLE_SIZE), generator=torch.Generator().manual_seed(0))
        try:
            return cls(find_feature_net(inner, None, None, example))
        except ValueError:
            return cls(None)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:  # (N, D)
        size = x.shape[2:]
        tiles = make_tiles(size, clip_window(size, WINDOW, overlap=0.0), overlap=0.0)
        windows = [self._compute(x[(slice(None), slice(None), *tile.window)]) for tile in tiles]
        return torch.stack(windows).mean(0)

    def _compute(self, x: Tensor) -> Tensor:
        if self.split is None:
            return functional.adaptive_avg_pool2d(x, _POOL_SIZE).flatten(1)
        (features,) = extract_features(self.split, (), x)
        return features.float().cpu()


@dataclass(frozen=True, eq=False)
class VisionModel(Model):
    """What models of images and masks have in common.

    Args:
        card: Description.
        predictor: Trained predictor.
        classes: Names of the classes.
        preprocessing: How files become inputs.
        features: Features of the OOD score.
        ood: Out-of-distribution score.
    """

    card: ModelCard
    predictor: Predictor
    classes: tuple[str, ...]
    preprocessing: ImagePreprocessing
    features: FeatureExtractor
    ood: MahalanobisScore

    def _options(self) -> dict[str, Any]:
        """Return the further fields of the subclass for JSON."""
        raise NotImplementedError

    @classmethod
    def _read_options(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Return the further fields of the subclass."""
        raise NotImplementedError

    def _to_artifact(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config = {
            "predictor": describe_predictor(self.predictor),
            "classes": self.classes,
            "preprocessing": asdict(self.preprocessing),
        }
        tensors = {f"ood.{name}": value for name, value in self.ood.state_dict().items()}
        tensors |= {f"predictor.{name}": value for name, value in self.predictor.state_dict().items()}
        return config | self._options(), tensors

    @classmethod
    def _from_artifact(cls, artifact: Artifact, card: ModelCard) -> "VisionModel":
        config = artifact.config
        preprocessing, classes = ImagePreprocessing.from_config(config["preprocessing"]), tuple(config["classes"])
        predictor = build_predictor(config["predictor"], artifact.select("predictor."), path=artifact.folder)
        features = FeatureExtractor.from_predictor(predictor, preprocessing.channels, preprocessing.size)
        ood = MahalanobisScore.from_state_dict(artifact.select("ood."))
        x = torch.zeros(1, preprocessing.channels, *(preprocessing.size or _EXAMPLE_SIZE))
        if predictor.summarize(x, 1).probs.shape[1] != len(classes) or features(x).shape[1] != ood.num_features:
            raise ArtifactError(artifact.folder, "its parts are of different models")
        return cls(card, predictor, classes, preprocessing, features, ood, **cls._read_options(config))


# -- files ---------------------------------------------------------------------------------------------


def find_images(source: str | Path) -> tuple[Path, FileListing]:
    """Return the folder that names are relative to, and the images below it, of a folder or a single file."""
    path = Path(source).expanduser()
    suffixes = ", ".join(IMAGE_SUFFIXES)
    if path.is_file():
        if not path.name.lower().endswith(IMAGE_SUFFIXES):
            raise DatasetNotFoundError(f"{path} is not an image; expected a file that ends in {suffixes}")
        return path.parent, FileListing([path], [])
    if not path.is_dir():
        state = "is not a regular file" if path.exists() else "does not exist"
        raise DatasetNotFoundError(f"{source} {state}; expected a folder of images, or one image")
    listing = list_files(path, IMAGE_SUFFIXES)
    if not listing.files:
        raise DatasetNotFoundError(f"{path} has no images; expected files that end in {suffixes}")
    return path, listing


def read_batches(
    names: Sequence[str],
    read: Callable[[int], tuple[Tensor, Tensor | None]],
    notes: Sequence[str],
    max_pixels: int | None = None,
) -> Iterator[RowBatch]:
    """Yield batches of files of one size, as `read` returns x and y; files that cannot be read are in the notes."""
    rows, pending = list[tuple[str, Tensor, Any]](), list(notes)
    for i, name in enumerate(names):
        try:
            x, y = read(i)
        except CorruptFileError as error:
            pending.append(f"skipped {name}: {error.reason}")
            continue
        batch_size = BATCH_SIZE if max_pixels is None else max_pixels // x[0].numel()
        if rows and (rows[-1][1].shape != x.shape or len(rows) >= batch_size):
            yield _make_batch(rows, pending)
            rows, pending = [], []
        rows.append((name, x, y))
    if not rows:
        raise CorruptFileError(f"{len(names)} file(s)", f"none of them is an image ({pending[-1]})")
    yield _make_batch(rows, pending)


def _make_batch(rows: Sequence[tuple[str, Tensor, Any]], notes: Sequence[str]) -> RowBatch:
    names, x, y = zip(*rows, strict=True)
    keys = {"file": np.array(names, dtype=object)}
    return RowBatch(keys, torch.stack(x), None if y[0] is None else torch.stack(y), tuple(notes))


def choose_split(folder: Path, splits: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return the test split of labeled data, as the others were used in training, or the only split, and notes."""
    if len(splits) == 1:
        return splits["train"], []
    if "test" not in splits:
        raise DatasetNotFoundError(f"{folder} has the splits {', '.join(splits)}; expected test, or one split")
    return splits["test"], [f"only the split test of {folder} is read"]


def check_image_size(image: Tensor, where: str | Path) -> Tensor:
    """Return the image (C, H, W); raise CorruptFileError if it is too small for a segmentation net."""
    height, width = image.shape[-2:]
    if min(height, width) < _MIN_IMAGE_SIZE:
        raise CorruptFileError(where, f"it has {height} × {width} pixels; expected at least {_MIN_IMAGE_SIZE} per side")
    return image


def skipped_files_note(root: Path, others: Iterable[str | Path]) -> list[str]:
    """Return a note on files that are not images, if there are any."""
    names = [relative_name(root, file) for file in others]
    return [f"skipped {len(names)} file(s) that are not images: {format_names(names, 5)}"] if names else []


def relative_name(root: Path, file: str | Path) -> str:
    """Return the name of a file relative to the folder, with � for bytes that are not UTF-8."""
    path = Path(file)
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def choose_size(size: Any, median: tuple[int, int], largest: int, smallest: int = 8) -> tuple[int, int]:
    """Return the given size (one number, or height and width), else the median, scaled to `largest`."""
    if size is None:
        scale = min(1.0, largest / max(median))
        height, width = (max(smallest, round(side * scale / 4) * 4) for side in median)
        return height, width
    sides = tuple(size) if isinstance(size, Sequence) else (size,)
    if len(sides) not in (1, 2):
        raise ArgumentError("size", size, "one number of pixels, or height and width")
    return check_int("size", sides[0], minimum=8), check_int("size", sides[-1], minimum=8)


def median_size(files: Sequence[str | Path]) -> tuple[int, int]:
    """Return the median height and width over a sample of the files."""
    sizes = []
    for i in np.linspace(0, len(files) - 1, min(_MAX_SAMPLED_FILES, len(files))).round():
        try:
            sizes.append(read_image_size(files[int(i)], files[int(i)]))
        except CorruptFileError:
            continue  # reported when it is read
    if not sizes:
        raise CorruptFileError(f"{len(files)} files", f"none of them is an image, such as {files[0]}")
    height, width = np.median(sizes, axis=0)
    return int(height), int(width)


# -- splits --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class InMemorySource:
    """Decoded images and targets of any sizes."""

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
    """Training, held-out and test images, and notes on files that were skipped."""

    train: LazyDataset
    held_out: LazyDataset
    test: LazyDataset
    notes: tuple[str, ...]

    @property
    def rows(self) -> dict[str, int]:
        return {"train": len(self.train), "held out": len(self.held_out), "test": len(self.test)}


def split_images(
    folders: Mapping[str, LazyDataset], classes: Sequence[str], test_fraction: float, *, seed: int, progress: bool
) -> ImageSplits:
    """Read the images of "train", and of "validation" and "test" if they have folders, and make the missing splits.

    Every class has at least one training image.
    """
    check_fraction("test_fraction", test_fraction, zero=True)
    total = sum(map(len, folders.values()))
    errors: list[str] = []
    with progress_bar("reading", total, enabled=progress) as step:
        splits = {name: _load_readable(part, errors, step) for name, part in folders.items()}
    train, labels = splits["train"], splits["train"].targets
    counts = None if labels is None else labels.bincount(minlength=len(classes))
    if len(errors) > max(1, _MAX_CORRUPT_FRACTION * total):
        raise CorruptFileError(f"{len(errors):,} of {total:,} images", f"the first is {errors[0]}")
    empty = [name for name, split in splits.items() if not len(split)]
    if counts is not None and not bool(counts.all()):
        empty.append(repr(classes[int(counts.argmin())]))
    if empty:
        raise CorruptFileError(f"any image of {empty[0]}", f"the first is {errors[0]}", "Add complete images.")
    fractions = {"validation": _VALIDATION_FRACTION, "test": test_fraction}
    fractions = {name: 0.0 if name in splits else fraction for name, fraction in fractions.items()}
    needed = (1 if counts is None else len(counts)) + sum(fraction > 0 for fraction in fractions.values())
    if len(train) < needed:
        raise DatasetNotFoundError(f"{len(train)} training image(s) are too few; expected at least {needed}")
    split = train_val_test_split(len(train), fractions["validation"], fractions["test"], seed=seed, strata=labels)
    parts = {name: train.take((split == k).nonzero()[:, 0]) for k, name in enumerate(("train", "validation", "test"))}
    parts |= {name: splits[name] for name in ("validation", "test") if name in splits}
    notes = (f"skipped {len(errors)} of {total:,} images: {format_names(errors, 5, max_length=200)}",) if errors else ()
    return ImageSplits(parts["train"], parts["validation"], parts["test"], notes)


def _load_readable(dataset: LazyDataset, errors: list[str], step: Callable[[str], None]) -> LazyDataset:
    """Return the rows that can be read, in memory if they are small; the errors of the others are appended."""
    source: Any = dataset.source
    readable, memory, size = list[int](), InMemorySource([], []), 0
    for row, file in enumerate(source.files):
        try:
            (x,), (y,) = source.read([row])
            if y.ndim > 1:
                check_image_size(x, file)
        except CorruptFileError as error:
            errors.append(f"{file} ({error.reason})")
        else:
            y = y.to(torch.uint8) if y.ndim > 1 else y  # classes of a mask are bytes
            size += x.nbytes + y.nbytes
            readable.append(row)
            if size <= _MAX_BYTES_IN_MEMORY:
                memory.x.append(x)
                memory.y.append(y)
        step("reading")
    if size > _MAX_BYTES_IN_MEMORY:
        return replace(dataset, rows=tuple(readable))
    return LazyDataset(memory, dataset.transform)


# -- training ------------------------------------------------------------------------------------------


def make_config(
    method: str, epochs: int, batch_size: int, learning_rate: float, seed: int, progress: bool
) -> TrainingConfig:
    """Return a training with AdamW, which stops early after a third of the epochs if the method supports it."""
    patience = max(5, epochs // 3) if find_method(method).early_stopping else None
    optimizer = partial(torch.optim.AdamW, lr=learning_rate, weight_decay=1e-2)
    return TrainingConfig(epochs, batch_size, optimizer, seed=seed, patience=patience, progress=progress)


def dataset_batches(dataset: LazyDataset, batch_size: int) -> Iterator[RowBatch]:
    """Yield the rows of a data set with their labels."""
    for x, y in DataLoader(dataset, batch_size, generator=torch.Generator()):
        yield RowBatch({"row": np.arange(len(x))}, x, y)


def fit_ood_score(features: FeatureExtractor, splits: ImageSplits, batch_size: int) -> MahalanobisScore:
    """Fit the score to the training images and calibrate it on the held-out ones."""
    train, held_out = (
        torch.cat([features(batch.x) for batch in dataset_batches(split, batch_size)])
        for split in (splits.train, splits.held_out)
    )
    return MahalanobisScore.fit(train, held_out)
