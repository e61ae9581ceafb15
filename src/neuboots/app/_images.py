"""Image folders: reading, splitting and preprocessing, and the part that models of images and masks share.

A file that cannot be read is skipped with a note; more than 10 % of such files are an error.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from neuboots._validation import ArgumentError, check_choice, check_fraction, check_int, format_names
from neuboots.app.model import Model, ModelCard, RowBatch
from neuboots.data import CorruptFileError, DatasetBundle, DatasetNotFoundError, LazyDataset, Standardizer
from neuboots.data.dataset import to_unit_range
from neuboots.data.image_folder import IMAGE_SUFFIXES, FileListing, list_files
from neuboots.data.images import decode_image, read_image_size
from neuboots.evaluation.ood.mahalanobis import MahalanobisScore, extract_features, find_feature_net
from neuboots.head import HeadSplit
from neuboots.loading import train_val_test_split
from neuboots.methods import create_method, find_method, list_methods
from neuboots.posthoc import ScaledPredictor
from neuboots.prediction import Predictor
from neuboots.serialization import Artifact, ArtifactError, build_predictor, describe_predictor
from neuboots.training import TrainingConfig, progress_bar

OnStart = Callable[[Mapping[str, Any], Sequence[str]], None]
"""Called before a training with the chosen options and notes on the files."""

_MAX_CORRUPT_FRACTION = 0.1
_MAX_BYTES_IN_MEMORY = 1 << 30  # of decoded images during training
_VALIDATION_FRACTION = 0.2
_MAX_SAMPLED_FILES = 256  # files that the median size is computed from
_MIN_IMAGE_SIZE = 8  # pixels per side
_POOL_SIZE = 8  # features are 8 × 8 cell means if a method has no net to take them from


@dataclass(frozen=True)
class ImagePreprocessing:
    """How a file becomes an input (C, H, W): channels, standardization and size (None: that of the file)."""

    channels: int
    standardizer: Standardizer
    size: tuple[int, int] | None = None

    def __call__(self, file: str | Path) -> Tensor:
        return self.standardizer(to_unit_range(decode_image(file, self.channels, file, size=self.size)))

    def config(self) -> dict[str, Any]:
        mean, std = self.standardizer.mean, self.standardizer.std
        return {"channels": self.channels, "mean": mean, "std": std, "size": self.size}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ImagePreprocessing":
        size = None if config["size"] is None else (int(config["size"][0]), int(config["size"][1]))
        return cls(int(config["channels"]), Standardizer(tuple(config["mean"]), tuple(config["std"])), size)


@dataclass(frozen=True, eq=False)
class FeatureExtractor:
    """Features φ(x) of images (N, C, H, W) for the OOD score: the head's input, averaged over pixels, or cell means."""

    split: HeadSplit | None

    @classmethod
    def from_predictor(cls, predictor: Predictor, channels: int, size: tuple[int, int]) -> "FeatureExtractor":
        inner = predictor.inner if isinstance(predictor, ScaledPredictor) else predictor
        example = torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0))
        try:
            return cls(find_feature_net(inner, None, None, example))
        except ValueError:  # no single net computes the predictions
            return cls(None)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:  # (N, D)
        if self.split is None:
            return functional.adaptive_avg_pool2d(x, _POOL_SIZE).flatten(1)
        (features,) = extract_features(self.split, (), x)
        return features.float().cpu()


@dataclass(frozen=True, eq=False)
class VisionModel(Model):
    """What models of images and masks have in common.

    Args:
        card: Description.
        fitted: Trained predictor.
        names: Names of the classes.
        preprocessing: How files become inputs.
        features: Features of the OOD score.
        ood: Out-of-distribution score.
    """

    card: ModelCard
    fitted: Predictor
    names: tuple[str, ...]
    preprocessing: ImagePreprocessing
    features: FeatureExtractor
    ood: MahalanobisScore

    @property
    def predictor(self) -> Predictor:
        """The trained predictor."""
        return self.fitted

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.names

    def _to_artifact(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config = {
            "predictor": describe_predictor(self.fitted),
            "classes": self.names,
            "preprocessing": self.preprocessing.config(),
        }
        tensors = {f"ood.{name}": value for name, value in self.ood.state_dict().items()}
        return config, tensors | {f"predictor.{name}": value for name, value in self.fitted.state_dict().items()}

    @classmethod
    def _shared_fields(cls, artifact: Artifact, card: ModelCard, size: tuple[int, int]) -> dict[str, Any]:
        """Return the fields of this class; raise ArtifactError if they do not belong together."""
        config = artifact.config
        preprocessing = ImagePreprocessing.from_config(config["preprocessing"])
        fitted = build_predictor(config["predictor"], artifact.select("predictor."), path=artifact.folder)
        size = preprocessing.size or size
        features = FeatureExtractor.from_predictor(fitted, preprocessing.channels, size)
        ood = MahalanobisScore.from_state_dict(artifact.select("ood."))
        x, names = torch.zeros(1, preprocessing.channels, *size), tuple(config["classes"])
        if fitted.summarize(x, 1).probs.shape[1] != len(names) or features(x).shape[1] != ood.num_features:
            raise ArtifactError(artifact.folder, "its parts are of different models")
        return {
            "card": card,
            "fitted": fitted,
            "names": names,
            "preprocessing": preprocessing,
            "features": features,
            "ood": ood,
        }


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
        raise DatasetNotFoundError(f"{source} does not exist; expected a folder of images, or one image")
    listing = list_files(path, IMAGE_SUFFIXES)
    if not listing.files:
        raise DatasetNotFoundError(f"{path} has no images; expected files that end in {suffixes}")
    return path, listing


def read_batches(
    names: Sequence[str],
    read: Callable[[int], tuple[Tensor, Tensor | None]],
    *,
    batch_size: Callable[[Tensor], int],
    notes: Sequence[str],
) -> Iterator[RowBatch]:
    """Yield batches of files of one size, as `read` returns x and y; files that cannot be read are in the notes.

    `batch_size(x)` is the largest number of rows such as x in a batch.
    """
    rows, pending = list[tuple[str, Tensor, Any]](), list(notes)
    for i, name in enumerate(names):
        try:
            x, y = read(i)
        except CorruptFileError as error:
            pending.append(f"skipped {name}: {error.reason}")
            continue
        if rows and (rows[-1][1].shape != x.shape or len(rows) >= batch_size(x)):
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


def choose_size(size: Any, files: Sequence[str | Path], largest: int, smallest: int = 8) -> tuple[int, int]:
    """Return the given size (one number, or height and width), else the median of the files, scaled to `largest`."""
    if size is None:
        height, width = median_size(files)
        scale = min(1.0, largest / max(height, width))
        return max(smallest, round(height * scale / 4) * 4), max(smallest, round(width * scale / 4) * 4)
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
    test: LazyDataset | None
    notes: tuple[str, ...]

    @property
    def rows(self) -> dict[str, int]:
        test = 0 if self.test is None else len(self.test)
        return {"train": len(self.train), "held out": len(self.held_out), "test": test}


def split_images(
    data: DatasetBundle, test_fraction: float, *, seed: int, files: Callable[[Any], Sequence[str]], progress: bool
) -> ImageSplits:
    """Read the images of a folder and split them; a split with its own folder is used as it is.

    `files` returns the files of a source. Every class has at least one training image.
    """
    check_fraction("test_fraction", test_fraction, zero=True)
    folders = {
        name: part for name in ("train", "validation", "test") if isinstance(part := getattr(data, name), LazyDataset)
    }
    total = sum(map(len, folders.values()))
    errors: list[str] = []
    with progress_bar("reading", total, enabled=progress) as step:
        splits = {name: _load_readable(part, files(part.source), errors, step) for name, part in folders.items()}
    train, labels = splits["train"], splits["train"].targets
    counts = None if labels is None else labels.bincount(minlength=data.num_classes)
    if len(errors) > max(1, _MAX_CORRUPT_FRACTION * total):
        raise CorruptFileError(f"{len(errors):,} of {total:,} images", f"the first is {errors[0]}")
    empty = [name for name, split in splits.items() if not len(split)]
    if counts is not None and not bool(counts.all()):
        empty.append(repr(data.classes[int(counts.argmin())]))
    if empty:
        raise CorruptFileError(f"any image of {empty[0]}", f"the first is {errors[0]}", "Add complete images.")
    fractions = {"validation": _VALIDATION_FRACTION, "test": test_fraction}
    fractions = {name: 0.0 if name in splits else fraction for name, fraction in fractions.items()}
    needed = (1 if counts is None else len(counts)) + sum(fraction > 0 for fraction in fractions.values())
    if len(train) < needed:
        raise DatasetNotFoundError(f"{len(train)} training image(s) are too few; expected at least {needed}")
    split = train_val_test_split(len(train), fractions["validation"], fractions["test"], seed=seed, strata=labels)
    held_out, test = (
        splits[name] if name in splits else train.take((split == number).nonzero()[:, 0])
        for number, name in ((1, "validation"), (2, "test"))
    )
    notes = (f"skipped {len(errors)} of {total:,} images: {format_names(errors, 5, max_length=200)}",) if errors else ()
    return ImageSplits(train.take((split == 0).nonzero()[:, 0]), held_out, test if len(test) else None, notes)


def _load_readable(
    dataset: LazyDataset, files: Sequence[str], errors: list[str], step: Callable[[str], None]
) -> LazyDataset:
    """Return the rows that can be read, in memory if they are small; the errors of the others are appended."""
    readable, memory, size = list[int](), InMemorySource([], []), 0
    for row in range(len(dataset.source)) if dataset.rows is None else dataset.rows:
        try:
            (x,), (y,) = dataset.source.read([row])
            if y.ndim > 1:
                check_image_size(x, files[row])
        except CorruptFileError as error:
            errors.append(f"{files[row]} ({error.reason})")
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


def train_predictor(
    method: str,
    task: Any,
    loss: nn.Module,
    model: Callable[[], nn.Module],
    train: LazyDataset,
    held_out: LazyDataset,
    config: TrainingConfig,
) -> Predictor:
    """Train a method by its name, with early stopping on the held-out images if the method supports it."""
    check_choice("method", method, list_methods(task))
    if not find_method(method).early_stopping:
        config = replace(config, patience=None)
    created: Any = create_method(method, loss=loss)
    predictor: Predictor = created.fit(model, train, config, val_data=held_out)
    return predictor


def make_config(epochs: int, batch_size: int, learning_rate: float, seed: int, progress: bool) -> TrainingConfig:
    """Return a training with AdamW that stops after a third of the epochs without improvement."""
    return TrainingConfig(
        epochs=check_int("epochs", epochs, minimum=1),
        batch_size=batch_size,
        optimizer=partial(torch.optim.AdamW, lr=learning_rate, weight_decay=1e-2),
        seed=seed,
        patience=max(5, epochs // 3),
        progress=progress,
    )
