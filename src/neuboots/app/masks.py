"""Model of masks: a segmentation net that predicts a class and its uncertainty for every pixel.

A pixel is uncertain if its probability is below t; on held-out images, the other pixels are wrong half as often as all
of them. The model abstains on images with more uncertain pixels than 95 % of the held-out ones, and on images that are
out of distribution.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuboots._validation import check_choice, check_int, check_types
from neuboots.app._images import (
    WINDOW,
    FeatureExtractor,
    ImagePreprocessing,
    OnStart,
    VisionModel,
    check_image_size,
    choose_size,
    choose_split,
    dataset_batches,
    find_images,
    fit_ood_score,
    make_config,
    median_size,
    read_batches,
    relative_name,
    skipped_files_note,
    split_images,
)
from neuboots.app.model import Array, ModelCard, PredictionTable, RowBatch, find_not_finite, open_writer
from neuboots.data import CorruptFileError, CropFlip, LazyDataset
from neuboots.data._common import check_folder
from neuboots.data.image_folder import (
    IGNORE_INDEX,
    IMAGE_FOLDERS,
    IMAGE_SUFFIXES,
    MASK_FOLDERS,
    MASK_SUFFIXES,
    FilePairs,
    ImageDecoder,
    LabelMap,
    find_paired_folders,
    infer_label_map,
    list_pairs,
    pairs_to_datasets,
)
from neuboots.data.images import decode_mask
from neuboots.evaluation.segmentation import SegmentationMaps, SegmentationReport, predict_segmentation, write_maps
from neuboots.evaluation.selective import SelectivePredictionReport
from neuboots.methods import create_method, list_methods
from neuboots.metrics import ConfidenceRanking
from neuboots.nets import small_deeplab
from neuboots.prediction import check_summarized
from neuboots.serialization import atomic_folder
from neuboots.training import progress_bar

_MAX_CROP = 128  # default limit of the longer side of training crops
_MAX_BATCH_PIXELS = 1 << 18
_LARGE_IMAGE = 1 << 20  # pixels; batches of larger images are small
_MAX_CROPS = 6_000  # of 128 × 128 seen in training, over all epochs
_MAX_PIXELS_PER_IMAGE = 10_000  # of a held-out image, for the threshold
_ACCEPTED_QUANTILE = 0.95
_MAX_STEM_BYTES = 120


@dataclass(frozen=True, eq=False)
class MaskModel(VisionModel):
    """Model of the class of every pixel; `fit_masks` trains one.

    Args:
        card: Description.
        predictor: Trained predictor.
        classes: Names of the classes.
        preprocessing: How files become inputs.
        features: Features of the OOD score.
        ood: Out-of-distribution score.
        label_map: Values of the classes in mask files.
        min_confidence: Smallest probability of a pixel that is not uncertain.
        max_uncertain_fraction: Largest fraction of uncertain pixels of an accepted image.
    """

    kind = "masks"

    label_map: LabelMap
    min_confidence: float = 0.0
    max_uncertain_fraction: float = 1.0

    def read(self, source: str | Path, *, with_labels: bool = False) -> Iterator[RowBatch]:
        """Read the images below a folder, or a single one, or images with masks; a batch has images of one size."""
        if not with_labels:
            root, images, notes = _find_unmasked(source)
            return self._read_batches(root, images, None, notes)
        folder, splits = _find_pairs(source)
        pairs, notes = choose_split(folder, splits)
        decoder = ImageDecoder(self.preprocessing.channels, label_map=self.label_map)
        dataset = pairs_to_datasets({"test": pairs}, decoder, self.preprocessing.standardizer)["test"]
        return self._read_batches(folder, pairs.inputs, dataset, notes + skipped_files_note(folder, pairs.skipped))

    def _read_batches(
        self, root: Path, images: Sequence[str | Path], dataset: LazyDataset | None, notes: list[str]
    ) -> Iterator[RowBatch]:
        def read(i: int) -> tuple[Tensor, Tensor | None]:
            x, y = (self.preprocessing(images[i]), None) if dataset is None else dataset[i]
            return check_image_size(x, images[i]), y

        names = [relative_name(root, image) for image in images]
        return read_batches(names, read, notes, _MAX_BATCH_PIXELS)

    def predict_maps(self, batch: RowBatch, *, num_samples: int = 100) -> SegmentationMaps:
        """Predict probabilities and uncertainties of each pixel, of large images in windows."""
        num_samples = min(num_samples, self.predictor.num_distinct or num_samples)
        options: Any = {"seed": self.card.seed, "window": WINDOW, "batch_size": 4, "check_finite": False}
        return predict_segmentation(self.predictor, batch.x, num_samples, **options)

    def predict(self, batch: RowBatch, *, num_samples: int = 100, level: float = 0.95) -> PredictionTable:
        """Predict a batch: mean uncertainties of each image and the fraction of each class."""
        return self.summarize_maps(batch, self.predict_maps(batch, num_samples=num_samples))

    def summarize_maps(self, batch: RowBatch, maps: SegmentationMaps) -> PredictionTable:
        """Return one row for each image from its maps."""

        def image_mean(values: Tensor) -> Array:
            return np.asarray(values.double().flatten(1).mean(1))

        uncertain = image_mean(~(maps.confidence >= self.min_confidence))  # also where it is NaN
        score = self.ood(self.features(batch.x))
        columns = {
            "mean_entropy": image_mean(maps.entropy),
            "mean_mutual_information": image_mean(maps.mutual_information),
            "uncertain_fraction": uncertain,
            "ood_score": score,
            "abstain": ~((score <= 1) & (uncertain <= self.max_uncertain_fraction)),
            **{f"fraction_{name}": image_mean(maps.labels == c) for c, name in enumerate(self.classes)},
        }
        columns["abstain"] |= find_not_finite(columns)
        return PredictionTable(columns, maps.probs)

    def predict_folder(
        self,
        source: str | Path,
        out: str | Path,
        *,
        num_samples: int = 100,
        raw_cells: bool = False,
        progress: bool = True,
    ) -> dict[str, Any]:
        """Write out/summary.csv, one row per image, and images of the maps to out/maps; return a summary.

        An image with outputs that are not finite has no maps. The folder appears when it is complete; only an earlier
        prediction is replaced. `make_writer` explains `raw_cells`.
        """
        target = Path(out)
        root, images, skipped = _find_unmasked(source)
        stems, notes, abstained, broken, uncertain = set[str](), list[str](), 0, 0, 0.0
        with (
            atomic_folder(target, _predicted_files, "an earlier prediction of masks") as temporary,
            open_writer(str(temporary / "summary.csv"), "csv", raw_cells=raw_cells) as write,
            progress_bar("segmenting", len(images), enabled=progress) as step,
        ):
            for batch in self._read_batches(root, images, None, skipped):
                names = [_unique_stem(str(name), stems) for name in batch.keys["file"]]
                maps = self.predict_maps(batch, num_samples=num_samples)
                options: Any = {"class_names": self.classes, "normalization": self.preprocessing.standardizer}
                columns = self.summarize_maps(batch, maps).columns
                finite = maps.entropy.flatten(1).isfinite().all(1)
                if bool(finite.any()):
                    probs, entropy, information, std = (part[finite] for part in maps.tensors)
                    shown = SegmentationMaps(probs, entropy, information, std, maps.num_samples, maps.seed)
                    stored = list(compress(names, finite))
                    write_maps(shown, batch.x[finite], temporary / "maps", names=stored, **options)
                sheets = [f"maps/{name}-sheet.png" if ok else "" for name, ok in zip(names, finite, strict=True)]
                write({**batch.keys, "maps": np.array(sheets), **columns})
                notes += batch.notes
                broken += int((~finite).sum())
                abstained += int(columns["abstain"].sum())
                uncertain += float(columns["uncertain_fraction"].sum())
                for _ in names:
                    step("segmenting")
        if broken:
            notes.append(f"{broken:,} images have outputs that are not finite; the model abstains on them")
        counts = {"images": len(stems), "abstained": abstained, "uncertain_fraction": uncertain / len(stems)}
        return {**counts, "out": str(out), "notes": notes}

    def _options(self) -> dict[str, Any]:
        return {
            "label_values": self.label_map.values,
            "ignore_index": self.label_map.ignore_index,
            "min_confidence": self.min_confidence,
            "max_uncertain_fraction": self.max_uncertain_fraction,
        }

    @classmethod
    def _read_options(cls, config: dict[str, Any]) -> dict[str, Any]:
        number = dict.fromkeys(("min_confidence", "max_uncertain_fraction"), float)
        check_types("masks", config, {"label_values": list[int], "ignore_index": int | None, **number})
        label_map = LabelMap(tuple(config["label_values"]), config["ignore_index"])
        limits = {name: float(config[name]) for name in number}
        return {"label_map": label_map, **limits}


def _find_pairs(path: str | Path) -> tuple[Path, dict[str, FilePairs]]:
    """Return the folder, and the images and masks of the same names in each of its splits."""
    folder = check_folder(path, "a folder with the folders images and masks")
    splits = find_paired_folders(folder, IMAGE_FOLDERS, MASK_FOLDERS)
    return folder, {split: list_pairs(folders, IMAGE_SUFFIXES, MASK_SUFFIXES) for split, folders in splits.items()}


def _find_unmasked(source: str | Path) -> tuple[Path, list[Path], list[str]]:
    """Return the root, the images below it that are not in a folder of masks beside one of images, and notes."""
    root, listing = find_images(source)

    def is_mask(file: Path) -> bool:
        parents = file.relative_to(root).parts[:-1]
        return any(
            name in MASK_FOLDERS and any(root.joinpath(*parents[:i], images).is_dir() for images in IMAGE_FOLDERS)
            for i, name in enumerate(parents)
        )

    return root, [file for file in listing.files if not is_mask(file)], skipped_files_note(root, listing.others)


def _predicted_files(folder: Path) -> tuple[str, ...]:
    return ("summary.csv", "maps") if (folder / "summary.csv").is_file() else ()


def _unique_stem(name: str, used: set[str]) -> str:
    """Return a new file name without suffix that every file system accepts."""
    plain = re.sub(r"[^\w.() -]+", "-", name.rsplit(".", 1)[0]).strip(". -")
    plain = plain.encode()[:_MAX_STEM_BYTES].decode(errors="ignore").strip(". -") or "image"
    stem, k = plain, 1
    while stem.casefold() in used:
        k += 1
        stem = f"{plain}-{k}"
    used.add(stem.casefold())
    return stem


# -- metrics -------------------------------------------------------------------------------------------


def evaluate_masks(
    model: MaskModel, batches: Iterable[RowBatch], num_samples: int
) -> tuple[SegmentationReport, dict[str, Array]]:
    """Evaluate a model on labeled batches.

    Args:
        model: The model.
        batches: Batches with masks.
        num_samples: Replicates B.

    Returns:
        Metrics of the pixels, and the columns of the predictions.
    """
    pixels: Any = 0
    tables = []
    for batch in batches:
        assert batch.y is not None, "labels were requested"
        maps = model.predict_maps(batch, num_samples=num_samples)
        pixels = pixels + SegmentationReport.from_maps(maps, batch.y, ignore_index=IGNORE_INDEX)
        tables.append(PredictionTable(model.summarize_maps(batch, maps).columns))
    return pixels, PredictionTable.concatenate(tables).columns


def _fit_limits(model: MaskModel, held_out: LazyDataset, num_samples: int) -> tuple[float, float]:
    """Return the threshold t, and the fraction of uncertain pixels that 95 % of the held-out images stay below."""
    images: list[Tensor] = []
    ranking: Any = 0
    for batch in dataset_batches(held_out, 1):
        assert batch.y is not None, "a held-out image has a mask"
        maps = model.predict_maps(batch, num_samples=num_samples)
        confidence, right = maps.confidence.flatten(), (maps.labels == batch.y).flatten()
        labeled = (batch.y.flatten() != IGNORE_INDEX).nonzero()[:, 0]
        index = labeled[torch.linspace(0, len(labeled) - 1, min(_MAX_PIXELS_PER_IMAGE, len(labeled))).long()]
        if len(index):
            ranking = ranking + ConfidenceRanking.from_confidence(confidence[index], right[index])
            images.append(confidence[index])
    if not images:
        return 0.0, 1.0
    report = SelectivePredictionReport(ranking, "confidence", None, num_samples, 0, pixels=True)
    threshold = min(1.0, max(0.0, report.threshold_for(risk=report.risk / 2)))
    fractions = [float((image < threshold).double().mean()) for image in images]
    return threshold, float(np.quantile(fractions, _ACCEPTED_QUANTILE, method="higher"))


def _card_metrics(pixels: SegmentationReport, abstain: Array, names: tuple[str, ...]) -> dict[str, Any]:
    if pixels.count == 0:
        return {}
    metrics = pixels.metrics
    shown = ("mean_iou", "mean_dice", "error", "ece", "nll", "entropy_right", "entropy_wrong")
    return {
        **{name: metrics[name] for name in shown},
        "accuracy": 1 - metrics["error"],
        "iou": dict(zip(names, metrics["iou"], strict=True)),
        "accepted": 1 - float(abstain.mean()),
        "majority_mean_iou": pixels.majority["mean_iou"],
        "majority_error": pixels.majority["error"],
    }


# -- training ------------------------------------------------------------------------------------------


def fit_masks(
    path: str | Path,
    *,
    method: str = "neuboots",
    epochs: int | None = None,
    size: Any = None,
    channels: int = 3,
    classes: Sequence[str] | None = None,
    ignore_index: int | None = None,
    test_fraction: float = 0.1,
    num_samples: int = 30,
    seed: int = 0,
    command: str = "",
    progress: bool = True,
    on_start: OnStart | None = None,
) -> MaskModel:
    """Train a model of masks.

    Args:
        path: Folder with the folders images and masks, below or above the splits train, val and test.
        method: Method of uncertainty quantification.
        epochs: Maximum number of epochs; None chooses them from the number and size of the images.
        size: Size of training crops, one number or height and width; None for the median of the files, at most 128.
        channels: 1 (grey) or 3 (color).
        classes: Names of the classes in the order of their values in the masks; None names them by their values.
        ignore_index: Value of pixels without a class; None takes 255 if the other values are 0, 1, …
        test_fraction: Fraction of the images for the metrics of the card, if there is no test folder.
        num_samples: Replicates B.
        seed: Seed of splits, training and replicates.
        command: Command line for the card.
        progress: Whether to show progress.
        on_start: Called with the chosen options and notes before the training.

    Returns:
        The model.

    Raises:
        ArgumentError: If an argument is wrong or does not suit the masks.
        DatasetNotFoundError: If images or masks are missing.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("images", "masks"):
        ...     (folder / name).mkdir()
        ...     for i in range(8):
        ...         image = Image.new("L", (20, 16), 0)
        ...         image.paste(255, (i, 4, i + 9, 12))  # white on black, in both
        ...         image.save(folder / name / f"{i}.png")
        >>> model = fit_masks(folder, classes=["paper", "ink"], epochs=1, num_samples=2, progress=False)
        >>> model.classes, model.label_map.values, model.card.rows
        (('paper', 'ink'), (0, 255), {'train': 6, 'held out': 1, 'test': 1})
    """
    check_choice("method", method, list_methods("segmentation"))
    check_summarized(check_int("num_samples", num_samples, minimum=1))
    check_choice("channels", str(channels), ("1", "3"))
    folder, pairs = _find_pairs(path)
    ignore_index = None if ignore_index is None else check_int("ignore_index", ignore_index, minimum=0)
    values = _read_values([mask for split in pairs.values() for mask in split.targets], progress)
    names, label_map = infer_label_map(values, classes or None, ignore_index)
    preprocessing = ImagePreprocessing(channels)
    standardizer = preprocessing.standardizer
    folders = pairs_to_datasets(pairs, ImageDecoder(channels, label_map=label_map), standardizer)
    splits = split_images(folders, names, test_fraction, seed=seed, progress=progress)
    median = median_size(pairs["train"].inputs)
    size = choose_size(size, median, _MAX_CROP, 16)
    crop = CropFlip(size, scale=(0.75, 1.5), fill=standardizer.mean, ignore_index=IGNORE_INDEX)
    if epochs is None:  # more epochs for fewer images and smaller crops
        crops = _MAX_CROPS * _MAX_CROP**2 / (size[0] * size[1])
        epochs = max(10, min(60, round(crops / len(splits.train))))
    config = make_config(method, epochs, 8 if median[0] * median[1] <= _LARGE_IMAGE else 2, 3e-3, seed, progress)
    others = [file for files in pairs.values() for file in files.skipped]
    notes = [*skipped_files_note(folder, others), *splits.notes, _describe_label_map(names, label_map)]
    chosen = {"net": "small_deeplab", "size": list(size), "epochs": epochs}
    if on_start is not None:
        on_start({**chosen, "content": "images and masks"}, notes)
    train = replace(splits.train, augment=crop)
    validation = replace(splits.held_out, augment=replace(crop, scale=(1.0, 1.0), flips=()))
    created = create_method(method, loss=nn.CrossEntropyLoss(ignore_index=IGNORE_INDEX))
    predictor = created.fit(partial(small_deeplab, len(names), channels), train, config, val_data=validation)
    card = ModelCard("segmentation", "mask", method, splits.rows, seed, command)
    features = FeatureExtractor.from_predictor(predictor, channels, None)
    ood = fit_ood_score(features, splits, 1)
    model = MaskModel(card, predictor, names, preprocessing, features, ood, label_map)
    threshold, fraction = _fit_limits(model, splits.held_out, num_samples)
    model = replace(model, min_confidence=threshold, max_uncertain_fraction=fraction)
    metrics: dict[str, Any] = {"chosen": chosen, "files": notes}
    if len(splits.test):
        pixels, columns = evaluate_masks(model, dataset_batches(splits.test, 1), num_samples)
        metrics = _card_metrics(pixels, columns["abstain"], names) | metrics
    return replace(model, card=replace(card, metrics=metrics))


def _read_values(masks: Sequence[str], progress: bool) -> set[int]:
    """Return all values in the masks; a mask that cannot be read is reported with its image."""
    values: set[int] = set()
    with progress_bar("reading masks", len(masks), enabled=progress) as step:
        for mask in masks:
            with suppress(CorruptFileError):
                values |= set(np.unique(decode_mask(mask, mask).numpy()).tolist())
            step("reading masks")
    if not values:
        raise CorruptFileError(f"{len(masks)} files", f"none of them is a mask, such as {masks[0]}")
    return values


def _describe_label_map(names: tuple[str, ...], label_map: LabelMap) -> str:
    pairs = zip(label_map.values, names, strict=True)
    values = ", ".join(name if name == str(value) else f"{value} is {name}" for value, name in pairs)
    ignored = "none is ignored" if label_map.ignore_index is None else f"{label_map.ignore_index} is ignored"
    return f"classes by their values in the masks: {values}; {ignored}"
