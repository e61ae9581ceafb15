"""What the pixels of labelled images say of a model of masks.

t = the least probability with P(wrong | p ≥ t) ≤ P(wrong) / 2 on held-out images

A model of masks: trained on images and masks of the same names, gives a class and an uncertainty to every pixel.

    images/<name>.jpg, masks/<name>.png → labels, entropy, mutual information of each pixel;   a row for each image

A pixel is unsure where its probability is below t: on held-out images, the surer pixels are wrong half as often as all
of them. The model abstains from an image with more unsure pixels than 95 % of the held-out ones, or unlike all of them.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from neuboots._validation import check_int
from neuboots.app._images import (
    FeatureExtractor,
    ImagePreprocessing,
    MaskPairSource,
    OnStart,
    check_consistent,
    check_image_size,
    check_size,
    exclude_masks,
    find_images,
    find_pairs,
    find_test_pairs,
    make_dataset,
    mask_values,
    median_size,
    method_for_task,
    read_batches,
    relative_name,
    scaled_size,
    skipped_files_note,
    split_images,
    train_predictor,
)
from neuboots.app.model import Array, Model, ModelCard, PredictionTable, RowBatch
from neuboots.app.rejection import MahalanobisScore
from neuboots.data import CropFlip, LazyDataset
from neuboots.data.image_folder import IGNORE_INDEX, IMAGENET_STANDARDIZERS, LabelMap, infer_label_map
from neuboots.evaluation.segmentation import SegmentationMaps, SegmentationReport, predict_segmentation, write_maps
from neuboots.evaluation.segmentation.predict import clip_window, make_tiles
from neuboots.evaluation.selective import SelectivePredictionReport
from neuboots.metrics import ConfidenceRanking
from neuboots.nets import small_deeplab
from neuboots.prediction import Predictor
from neuboots.serialization import atomic_folder, load, load_tensors, save
from neuboots.training import TrainingConfig, progress_bar

if TYPE_CHECKING:
    pass

PIXELS = 10_000  # of a held-out image, at even distances, that tell when a pixel is unsure
UNSURE = 0.95  # of the held-out images have no more unsure pixels than are answered


@dataclass(frozen=True, eq=False)
class MaskMetrics:
    """Figures of pixels over labelled images, the share of images that the model answers, and notes on the files."""

    pixels: SegmentationReport
    answered: float
    notes: tuple[str, ...]


def evaluate_masks(
    model: "MaskModel",
    chunks: Iterable[RowBatch],
    num_samples: int,
    *,
    total: int | None = None,
    progress: bool = False,
) -> MaskMetrics:
    """Of chunks that have labels, so many in all."""
    pixels: SegmentationReport | int = 0
    kept: list[Array] = []
    notes: list[str] = []
    with progress_bar("segmenting", total, enabled=progress) as step:
        for chunk in chunks:
            assert chunk.y is not None, "labels were asked for"
            maps = model.maps(chunk, num_samples=num_samples)
            pixels = pixels + SegmentationReport.from_maps(maps, chunk.y, ignore_index=IGNORE_INDEX)
            kept.append(~model.described(chunk, maps).columns["abstain"])
            notes += chunk.notes
            step("segmenting")
    assert isinstance(pixels, SegmentationReport), "there is at least one chunk"
    return MaskMetrics(pixels, float(np.concatenate(kept).mean()), tuple(notes))


def single_image_batches(part: LazyDataset) -> Iterator[RowBatch]:
    """The images of a part, each a chunk of its own size."""
    for i in range(len(part)):
        x, y = part[i]
        yield RowBatch({"row": np.array([i])}, x[None], y[None])


def fit_uncertainty_limits(model: "MaskModel", held_out: LazyDataset, num_samples: int) -> tuple[float, float]:
    """(t, the share of unsure pixels that 95 % of held-out images stay below)."""
    images: list[Tensor] = []
    ranking: ConfidenceRanking | int = 0
    for chunk in single_image_batches(held_out):
        assert chunk.y is not None, "a held-out image has a mask"
        maps = model.maps(chunk, num_samples=num_samples)
        confidence, right = maps.confidence.flatten(), (maps.labels == chunk.y).flatten()
        counted = (chunk.y.flatten() != IGNORE_INDEX).nonzero()[:, 0]
        some = counted[torch.linspace(0, len(counted) - 1, min(PIXELS, len(counted))).long()]
        if len(some):
            ranking = ranking + ConfidenceRanking.from_confidence(confidence[some], right[some])
            images.append(confidence[some])
    if not isinstance(ranking, ConfidenceRanking):
        return 0.0, 1.0
    curve = SelectivePredictionReport(ranking, "confidence", None, num_samples, 0)
    sure = min(1.0, max(0.0, curve.threshold_for(risk=curve.risk / 2)))
    shares = [float((image < sure).double().mean()) for image in images]
    return sure, float(np.quantile(shares, UNSURE, method="higher"))


def card_metrics(found: MaskMetrics, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the card, beside what one class everywhere would get; of pixels that are all void there are none."""
    if found.pixels.count == 0:
        return {}
    figures, constant = found.pixels.metrics, found.pixels.majority
    kept = ("mean_iou", "mean_dice", "error", "ece", "nll", "entropy_right", "entropy_wrong")
    return {
        **{name: figures[name] for name in kept},
        "accuracy": 1 - figures["error"],
        "iou": dict(zip(names, figures["iou"], strict=True)),
        "answered": found.answered,
        "mean_iou_of_commonest": constant["mean_iou"],
        "error_of_commonest": constant["error"],
    }


LARGEST = 128  # pixels of the longer side of a crop to train on, unless told otherwise
WINDOW = 256  # pixels that the net sees at once of a large image
AT_ONCE = 1 << 18  # pixels of a chunk
LARGE = 1 << 20  # pixels of an image of which only a few are held at once
LOOKS = 6_000  # at crops of 128 × 128 in training, all epochs together
EXAMPLE = (64, 64)  # an image to try the net with
_LONGEST = 120  # bytes of the beginning of a file's name


@dataclass(frozen=True, eq=False)
class MaskModel(Model):
    """A predictor of the class of each pixel, with what its files must become."""

    kind: ClassVar[str] = "masks"
    files: ClassVar[tuple[str, ...]] = ("predictor", "arrays.safetensors")
    writes_folder: ClassVar[bool] = True  # `predict_folder` writes pictures; a table would have one row for each

    card: ModelCard
    fitted: Predictor
    names: tuple[str, ...]
    coding: LabelMap
    look: ImagePreprocessing
    features: FeatureExtractor
    unusual: MahalanobisScore
    sure: float = 0.0  # t: the least probability of a pixel that is not unsure
    max_uncertain_fraction: float = 1.0  # the largest share of unsure pixels of an image that is answered

    @property
    def predictor(self) -> Predictor:
        return self.fitted

    @property
    def classes(self) -> tuple[str, ...]:
        return self.names

    # -- rows

    def read(self, source: str | Path, *, with_labels: bool = False) -> Iterator[RowBatch]:
        """The images of a folder, in it or below, or of a single file; `iterate_labeled`: with their masks. A chunk has images
        of one size, and y the class of each pixel, 255 where there is none: (N, H, W)."""
        if with_labels:
            root, pairs, notes = find_test_pairs(source)
            images: Sequence[str | Path] = pairs.inputs
            notes += skipped_files_note(root, pairs.skipped)
            rows = MaskPairSource(pairs.inputs, pairs.targets, self.coding, self.look.channels)
        else:
            root, images, notes = self._images_at(source)
            rows = None
        return self._chunks([relative_name(root, image) for image in images], images, rows, notes)

    def _images_at(self, source: str | Path) -> tuple[Path, list[Path], list[str]]:
        root, found = find_images(source)
        return root, exclude_masks(root, found.files), skipped_files_note(root, found.others)

    def _chunks(
        self, names: list[str], images: Sequence[str | Path], masks: MaskPairSource | None, notes: list[str]
    ) -> Iterator[RowBatch]:
        part = None if masks is None else LazyDataset(masks, self.look.standardizer)

        def read(i: int) -> tuple[Tensor, Tensor | None]:
            return (check_image_size(self.look(images[i]), images[i]), None) if part is None else part[i]

        def full(rows: Any, row: tuple[Tensor, Tensor | None]) -> bool:
            shape = row[0].shape
            return rows[-1][0].shape != shape or (len(rows) + 1) * shape[1] * shape[2] > AT_ONCE

        for numbers, rows, said in read_batches(names, read, full=full, notes=notes):
            keys = {"file": np.array([names[i] for i in numbers], dtype=object)}
            y = None if part is None else torch.stack([mask for _, mask in rows])
            yield RowBatch(keys, torch.stack([x for x, _ in rows]), y, said)

    def maps(self, chunk: RowBatch, *, num_samples: int = 100) -> SegmentationMaps:
        """Probabilities and uncertainties of each pixel, of large images window by window."""
        num_samples = min(num_samples, self.fitted.num_distinct or num_samples)  # each member once
        return predict_segmentation(self.fitted, chunk.x, num_samples, seed=self.card.seed, window=WINDOW, batch_size=4)

    def predict(self, chunk: RowBatch, *, num_samples: int = 100, level: float = 0.95) -> PredictionTable:
        """One row for each image: how unsure its pixels are, and the share of each class."""
        return self.described(chunk, self.maps(chunk, num_samples=num_samples))

    def described(self, chunk: RowBatch, maps: SegmentationMaps) -> PredictionTable:
        """The rows of images whose maps are known."""
        unsure = np.asarray((maps.confidence < self.sure).double().flatten(1).mean(1))
        score = self.unusual.score(window_features(self.features, chunk.x))
        columns: dict[str, Array] = {
            "mean_entropy": np.asarray(maps.entropy.double().flatten(1).mean(1)),
            "mean_mutual_information": np.asarray(maps.mutual_information.double().flatten(1).mean(1)),
            "unsure_share": unsure,
            "ood_score": score,
            "abstain": (score > 1) | (unsure > self.max_uncertain_fraction),
        }
        shares = torch.stack([(maps.labels == c).double().flatten(1).mean(1) for c in range(len(self.names))])
        columns |= {f"share_{name}": np.asarray(share) for name, share in zip(self.names, shares, strict=True)}
        return PredictionTable(columns, maps.probs)

    # -- pictures

    def write_maps(
        self, chunk: RowBatch, folder: Path, *, names: Sequence[str], num_samples: int = 100
    ) -> PredictionTable:
        """Labels, an overlay and the uncertainties of each image as PNG files of a folder; gives the rows as well."""
        maps = self.maps(chunk, num_samples=num_samples)
        write_maps(
            maps,
            chunk.x,
            folder,
            names=names,
            labels=chunk.y,
            ignore_index=IGNORE_INDEX,
            class_names=self.names,
            normalization=self.look.standardizer,
        )
        return self.described(chunk, maps)

    def predict_folder(
        self, source: str | Path, out: str | Path, *, num_samples: int = 100, progress: bool = True
    ) -> dict[str, Any]:
        """Write out/summary.csv, a row for each image, and pictures of all in out/maps; gives what there was.

        The folder appears as a whole at the end. Only an earlier one of this kind is replaced.
        """
        target = Path(out)
        root, images, said = self._images_at(source)
        chunks = self._chunks([relative_name(root, image) for image in images], images, None, said)
        known = ("summary.csv", "maps") if (target / "summary.csv").is_file() else ()
        used: set[str] = set()
        notes: list[str] = []
        abstained, unsure = 0, 0.0
        with atomic_folder(target, known, "an earlier prediction of masks") as aside:
            maps = aside / "maps"
            with (
                (aside / "summary.csv").open("w", newline="", encoding="utf-8") as file,
                progress_bar("segmenting", len(images), enabled=progress) as step,
            ):
                writer = csv.writer(file)
                for chunk in chunks:
                    stems = [_stem(str(name), used) for name in chunk.keys["file"]]
                    columns = self.write_maps(chunk, maps, names=stems, num_samples=num_samples).columns
                    table = {**chunk.keys, "maps": np.array([f"maps/{stem}-sheet.png" for stem in stems]), **columns}
                    if file.tell() == 0:
                        writer.writerow(table)
                    writer.writerows(zip(*(_cells(column) for column in table.values()), strict=True))
                    notes += chunk.notes
                    abstained += int(columns["abstain"].sum())
                    unsure += float(columns["unsure_share"].sum())
                    for _ in stems:
                        step("segmenting")
        return {
            "images": len(used),
            "abstained": abstained,
            "unsure_share": unsure / len(used),
            "out": str(out),
            "notes": notes,
        }

    # -- files

    def _write(self, folder: Path) -> dict[str, Any]:
        from safetensors.torch import save_file

        save(self.fitted, folder / "predictor")
        save_file(self.unusual.state_dict(), folder / "arrays.safetensors")
        return {
            "classes": self.names,
            "numbers": self.coding.values,
            "void": self.coding.ignore_index,
            "look": self.look.config(),
            "sure": self.sure,
            "most_unsure": self.max_uncertain_fraction,
        }

    @classmethod
    def _read(cls, folder: Path, held: dict[str, Any], card: ModelCard) -> "MaskModel":
        fitted, look = load(folder / "predictor"), ImagePreprocessing.from_config(held["look"])
        names, coding = tuple(held["classes"]), LabelMap(tuple(held["numbers"]), held["void"])
        features = FeatureExtractor.of(fitted, look.channels, EXAMPLE)
        unusual = MahalanobisScore.from_config(load_tensors(folder / "arrays.safetensors"))
        check_consistent(folder, fitted, features, unusual, len(names), (look.channels, *EXAMPLE))
        return cls(card, fitted, names, coding, look, features, unusual, held["sure"], held["most_unsure"])


def _stem(name: str, used: set[str]) -> str:
    """What the names of an image's pictures begin with: the name of its file as any file system takes it, each once."""
    plain = re.sub(r"[^\w.() -]+", "-", name.rsplit(".", 1)[0]).strip(". -")
    plain = plain.encode()[:_LONGEST].decode(errors="ignore").strip(". -") or "image"
    stem, k = plain, 1
    while stem.casefold() in used:
        k += 1
        stem = f"{plain}-{k}"
    used.add(stem.casefold())
    return stem


def _cells(column: Array) -> list[Any]:
    """As a CSV has them; truth in small letters, as in JSON."""
    return [str(value).lower() for value in column.tolist()] if column.dtype == bool else column.tolist()


def window_features(features: FeatureExtractor, x: Tensor) -> Tensor:
    """The mean of the features over windows of images: (N, C, H, W) → (N, D)."""
    size = x.shape[2:]
    tiles = make_tiles(size, clip_window(size, WINDOW, overlap=0.0), overlap=0.0)
    found = [features(x[(slice(None), slice(None), *tile.window)]) for tile in tiles]
    return torch.stack(found).mean(0)


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
    """Train on path/images and path/masks, in or above train, val and test; the card has figures of the test part.

    The masks' numbers are classes, named by `classes` in their order, and `ignore_index` where a pixel has none; without, 255
    is void where the others are 0, 1, … The net sees crops of `size`, one number or height and width; without, of the
    median of the files, at most 128 pixels. `say` is told what was found and chosen before the training begins.

    >>> import tempfile
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("images", "masks"):
    ...     (folder / name).mkdir()
    ...     for i in range(8):
    ...         picture = Image.new("L", (20, 16), 0)
    ...         picture.paste(255, (i, 4, i + 9, 12))  # white on black, in both
    ...         picture.save(folder / name / f"{i}.png")
    >>> model = fit_masks(folder, classes=["paper", "ink"], epochs=1, num_samples=2, progress=False)
    >>> model.classes, model.coding.values, model.card.rows
    (('paper', 'ink'), (0, 255), {'train': 6, 'held out': 1, 'test': 1})
    """
    maker = method_for_task(method, "segmentation", nn.CrossEntropyLoss(ignore_index=IGNORE_INDEX))
    if channels not in IMAGENET_STANDARDIZERS:
        raise ValueError(f"got channels={channels!r}; expected 1 (grey) or 3 (colour)")
    folder, pairs = find_pairs(path)
    found = mask_values([mask for part in pairs.values() for mask in part.targets], progress=progress)
    names, coding = infer_label_map(
        found, classes, None if ignore_index is None else check_int("void", ignore_index, minimum=0)
    )
    parts = split_images(
        make_dataset(folder, pairs, names, coding, channels),
        test_fraction,
        seed=seed,
        files=lambda source: source.images,
        progress=progress,
    )
    median = median_size(pairs["train"].inputs)
    size = scaled_size(median, LARGEST, least=16) if size is None else check_size(size)
    look = ImagePreprocessing(channels, IMAGENET_STANDARDIZERS[channels])
    crop = CropFlip(size, scale=(0.75, 1.5), fill=look.standardizer.mean, ignore_index=IGNORE_INDEX)
    config = _recipe(len(parts.train), median, size, epochs, seed, progress)
    others = [file for part in pairs.values() for file in part.skipped]
    notes = [*skipped_files_note(folder, others), *parts.notes, _about(names, coding)]
    chosen = {"net": "small_deeplab", "size": list(size), "epochs": config.epochs}
    if on_start is not None:
        on_start(chosen, notes)
    predictor = train_predictor(
        method,
        maker,
        partial(small_deeplab, len(names), channels),
        replace(parts.train, augment=crop),
        replace(parts.held_out, augment=replace(crop, scale=(1.0, 1.0), flips=())),
        config,
    )
    features = FeatureExtractor.of(predictor, channels, EXAMPLE)
    known, unknown = (
        torch.cat([window_features(features, chunk.x) for chunk in single_image_batches(part)])
        for part in (parts.train, parts.held_out)
    )
    card = ModelCard("segmentation", "mask", method, parts.rows, seed, command, version("neuboots"))
    model = MaskModel(card, predictor, names, coding, look, features, MahalanobisScore.learn(known, unknown))
    sure, most_unsure = fit_uncertainty_limits(model, parts.held_out, num_samples)
    model = replace(model, sure=sure, max_uncertain_fraction=most_unsure)
    figures: dict[str, Any] = {"chosen": chosen, "files": notes}
    if parts.test is not None:
        tested = evaluate_masks(
            model, single_image_batches(parts.test), num_samples, total=len(parts.test), progress=progress
        )
        figures = card_metrics(tested, names) | figures
    return replace(model, card=replace(card, figures=figures))


def _recipe(
    n: int, image: tuple[int, int], size: tuple[int, int], epochs: int | None, seed: int, progress: bool
) -> TrainingConfig:
    """Many passes over few images, fewer over many or large crops; few large images in memory at once."""
    if epochs is None:
        epochs = max(10, min(60, round(LOOKS * LARGEST**2 / (size[0] * size[1]) / n)))
    epochs = check_int("epochs", epochs, minimum=1)
    return TrainingConfig(
        epochs=epochs,
        batch_size=8 if image[0] * image[1] <= LARGE else 2,
        optimizer=partial(torch.optim.AdamW, lr=3e-3, weight_decay=1e-2),
        seed=seed,
        patience=max(5, epochs // 3),
        progress=progress,
    )


def _about(names: tuple[str, ...], coding: LabelMap) -> str:
    """What the numbers in the masks were taken for."""
    pairs = zip(coding.values, names, strict=True)
    of = ", ".join(name if name == str(number) else f"{number} is {name}" for number, name in pairs)
    ignore_index = (
        "no number is void"
        if coding.ignore_index is None
        else f"{coding.ignore_index} is void: its pixels count nowhere"
    )
    return f"classes by their numbers in the masks: {of}; {ignore_index}"
