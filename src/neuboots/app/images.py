"""A model of images by class: trained on a folder of class folders, asked about any images.

    path/<class>/<any name>.jpg → class, probability, and how far both can be trusted

The net is small and learns from nothing: hundreds or thousands of images take minutes on a CPU. Of the images some are
held out: they stop the training, set the temperature and the confidence below which the model abstains; others, seen by
nothing of all that, give the figures.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from neuboots._validation import check_int
from neuboots.app._images import (
    BATCH_SIZE,
    FeatureExtractor,
    ImagePreprocessing,
    ImageSplits,
    OnStart,
    check_consistent,
    check_size,
    find_images,
    iterate_batches,
    join_names,
    median_size,
    method_for_task,
    read_batches,
    relative_name,
    scaled_size,
    skipped_files_note,
    split_images,
    test_folder,
    train_predictor,
)
from neuboots.app.model import Model, ModelCard, PredictionTable, RowBatch
from neuboots.app.rejection import (
    MahalanobisScore,
    RejectRule,
    check_max_error,
    compute_classification_metrics,
    fit_reject_rule,
    predict_classes,
)
from neuboots.data import DatasetNotFoundError, LazyDataset, load_image_folder
from neuboots.data.image_folder import IMAGENET_STANDARDIZERS, ImageFileSource, list_folders
from neuboots.nets import ResNet, SmallCNN
from neuboots.posthoc import TemperatureScaling
from neuboots.prediction import Predictor
from neuboots.serialization import load, load_tensors, save
from neuboots.training import TrainingConfig

LARGEST = 64  # pixels of the longer side, unless told otherwise
SMALL = 32  # up to which the plain convolutional net sees enough of an image
LOOKS: dict[type[nn.Module], int] = {SmallCNN: 100_000, ResNet: 40_000}  # at images in training, all epochs together
SCALED = 15  # held-out images from which on a temperature is fitted
REPLICATES = 30  # at most, for the temperature: it hardly depends on them
PRIOR = 0.5  # of log T: few images may all be right by luck, for which no temperature is low enough


@dataclass(frozen=True, eq=False)
class ImageModel(Model):
    """A predictor of the class of an image, with what its files must become."""

    kind: ClassVar[str] = "images"
    files: ClassVar[tuple[str, ...]] = ("predictor", "arrays.safetensors")

    card: ModelCard
    fitted: Predictor
    names: tuple[str, ...]
    look: ImagePreprocessing
    features: FeatureExtractor
    unusual: MahalanobisScore
    abstain: RejectRule

    @property
    def predictor(self) -> Predictor:
        return self.fitted

    @property
    def classes(self) -> tuple[str, ...]:
        return self.names

    def read(self, source: str | Path, *, with_labels: bool = False) -> Iterator[RowBatch]:
        """The images of a folder, in it or below, or of a single file; `iterate_labeled`: of class folders."""
        notes: tuple[str, ...] = ()
        if with_labels:
            if not Path(source).expanduser().is_dir():
                raise DatasetNotFoundError(
                    f"got {str(source)!r}, which is no folder; expected one of class folders, for their labels"
                )
            source, notes = test_folder(Path(source).expanduser())
            self._check_classes(source)
        root, found = find_images(source)
        names = [relative_name(root, file) for file in found.files]
        labels = [self._label(name, root) for name in names] if with_labels else None
        return self._chunks(found.files, names, labels, (*notes, *skipped_files_note(root, found.others)))

    def _chunks(
        self, files: list[Path], names: list[str], labels: list[int] | None, notes: tuple[str, ...]
    ) -> Iterator[RowBatch]:
        def full(rows: Any, row: Tensor) -> bool:
            return len(rows) >= BATCH_SIZE

        for numbers, rows, said in read_batches(names, lambda i: self.look(files[i]), full=full, notes=notes):
            keys = {"file": np.array([names[i] for i in numbers], dtype=object)}
            y = None if labels is None else torch.tensor([labels[i] for i in numbers])
            yield RowBatch(keys, torch.stack(rows), y, said)

    def _check_classes(self, folder: Path) -> None:
        unknown = [entry.name for entry in list_folders(folder) if entry.name not in self.names]
        if unknown:
            raise DatasetNotFoundError(
                f"got {folder} with the class folder {unknown[0]!r}; expected those that the model knows: "
                f"{join_names(self.names, 8)}: rename or remove it"
            )

    def _label(self, name: str, root: Path) -> int:
        first, _, rest = name.partition("/")
        if not rest:
            raise DatasetNotFoundError(
                f"got {root / name} outside of any class folder; expected it in one of {join_names(self.names, 8)}"
            )
        return self.names.index(first)

    def predict(self, chunk: RowBatch, *, num_samples: int = 100, level: float = 0.95) -> PredictionTable:
        num_samples = min(num_samples, self.fitted.num_distinct or num_samples)  # each member once
        said = predict_classes(self.fitted, chunk.x, num_samples, seed=self.card.seed)
        score = self.unusual.score(self.features(chunk.x))
        columns = {
            "prediction": np.array(self.names, dtype=object)[said.labels.cpu().numpy()],
            "probability": said.confidence.cpu().numpy(),
            "std": said.std.cpu().numpy(),
            "entropy": said.entropy.cpu().numpy(),
            "mutual_information": said.mutual_information.cpu().numpy(),
            "ood_score": score,
        }
        columns["abstain"] = self.abstain(ood_score=score, confidence=columns["probability"])
        return PredictionTable(columns, said.probs.cpu())

    def _write(self, folder: Path) -> dict[str, Any]:
        from safetensors.torch import save_file

        save(self.fitted, folder / "predictor")
        save_file(self.unusual.state_dict(), folder / "arrays.safetensors")
        return {"classes": self.names, "look": self.look.config(), "abstain": self.abstain.config()}

    @classmethod
    def _read(cls, folder: Path, held: dict[str, Any], card: ModelCard) -> "ImageModel":
        fitted, look = load(folder / "predictor"), ImagePreprocessing.from_config(held["look"])
        size, names = look.size or (LARGEST, LARGEST), tuple(held["classes"])
        features = FeatureExtractor.of(fitted, look.channels, size)
        unusual = MahalanobisScore.from_config(load_tensors(folder / "arrays.safetensors"))
        check_consistent(folder, fitted, features, unusual, len(names), (look.channels, *size))
        return cls(card, fitted, names, look, features, unusual, RejectRule.from_config(held["abstain"]))


# -- training ------------------------------------------------------------------------------------------


def fit_images(
    path: str | Path,
    *,
    method: str = "neuboots",
    epochs: int | None = None,
    size: Any = None,
    channels: int = 3,
    test_fraction: float = 0.1,
    max_error: float = 0.05,
    num_samples: int = 100,
    seed: int = 0,
    command: str = "",
    progress: bool = True,
    on_start: OnStart | None = None,
) -> ImageModel:
    """Train on path/<class>/…, or with train, val and test above the classes; the card has figures of the test part.

    A part without a folder of its own is a share of the training images, of each class the same. Images are brought to
    `size`, one number or height and width; without, to the median of the files, at most 64 pixels. `max_error` is the
    share of wrong answers that the model may give where it does not abstain. `say` is told what was found and chosen
    before the training begins.

    >>> import tempfile
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name, colour in [("blue", "#0000ff"), ("red", "#ff0000")]:
    ...     (folder / name).mkdir()
    ...     for i in range(12):
    ...         Image.new("RGB", (12, 9), colour).save(folder / name / f"{i}.png")
    >>> model = fit_images(folder, epochs=3, num_samples=5, progress=False)
    >>> model.classes, model.look.size, model.card.rows
    (('blue', 'red'), (8, 12), {'train': 18, 'held out': 4, 'test': 2})
    """
    check_max_error(max_error)
    maker = method_for_task(method, "classification", nn.CrossEntropyLoss())
    if size is None:
        listed = load_image_folder(path, channels=channels, val_fraction=0, test_fraction=0)
        size = scaled_size(median_size(_source(listed.train).files), LARGEST)
    size = check_size(size)
    data = load_image_folder(path, size=size, channels=channels, val_fraction=0, test_fraction=0)
    _check_names(data.classes)
    parts = split_images(data, test_fraction, seed=seed, files=lambda source: source.files, progress=progress)
    train = replace(parts.train, augment=data.augmentation)
    net = SmallCNN if max(size) <= SMALL else ResNet
    config = _recipe(net, len(train), epochs, seed, progress)
    others = [file for part in (data.train, data.validation, data.test) for file in _source(part).skipped]
    notes = [*skipped_files_note(Path(path).expanduser(), others), *parts.notes]
    chosen: dict[str, Any] = {"net": net.__name__, "size": list(size), "epochs": config.epochs}
    if on_start is not None:
        on_start(chosen, notes)
    stop, untouched = _halves(parts.held_out)
    predictor = train_predictor(method, maker, partial(_net, net, channels, data.num_classes), train, stop, config)
    if len(stop) >= SCALED:
        scaling = TemperatureScaling(num_samples=min(num_samples, REPLICATES), prior_std=PRIOR)
        predictor = scaling.fit(predictor, stop)
        chosen["temperature"] = predictor.temperature
    abstain, promise = fit_reject_rule(predictor, untouched, max_error=max_error, num_samples=num_samples, seed=seed)
    features = FeatureExtractor.of(predictor, channels, size)
    known, unknown = (
        torch.cat([features(torch.stack(x)) for x, _ in iterate_batches(part)])
        for part in (parts.train, parts.held_out)
    )
    model = ImageModel(
        ModelCard("classification", "class", method, parts.rows, seed, command, version("neuboots")),
        predictor,
        data.classes,
        ImagePreprocessing(channels, IMAGENET_STANDARDIZERS[channels], size),
        features,
        MahalanobisScore.learn(known, unknown),
        abstain,
    )
    figures = {} if parts.test is None else _figures(model, parts, num_samples)
    return replace(
        model, card=replace(model.card, figures={**figures, "chosen": chosen, "files": notes, "notes": [promise]})
    )


def _halves(held_out: LazyDataset) -> tuple[LazyDataset, LazyDataset]:
    """Images that stop the training and set the temperature, and others that the promise comes from."""
    if len(held_out) < 2:
        return held_out, held_out
    return held_out.take(range(0, len(held_out), 2)), held_out.take(range(1, len(held_out), 2))


def _check_names(names: tuple[str, ...]) -> None:
    """Can they be written to files, as they must?"""
    for name in names:
        if name != name.encode("utf-8", "replace").decode():
            raise ValueError(f"got the class folder {name!r}, whose name is no UTF-8; expected one that is: rename it")


def _source(part: Any) -> ImageFileSource:
    """The files of a part; none, where there is no part."""
    if not isinstance(part, LazyDataset):
        return ImageFileSource((), torch.zeros(0), 3, None)
    assert isinstance(part.source, ImageFileSource)
    return part.source


def _net(kind: type[nn.Module], channels: int, classes: int) -> nn.Module:
    if kind is SmallCNN:
        return SmallCNN(channels, classes, widths=(16, 32, 64, 128))
    return ResNet(classes, channels, blocks=(1, 1, 1, 1), widths=(16, 32, 64, 128), shortcut="projection")


def _recipe(net: type[nn.Module], n: int, epochs: int | None, seed: int, progress: bool) -> TrainingConfig:
    """Many passes over few images, fewer over many; steps enough for both."""
    epochs = max(10, min(100, round(LOOKS[net] / n))) if epochs is None else check_int("epochs", epochs, minimum=1)
    return TrainingConfig(
        epochs=epochs,
        batch_size=32 if n < 2000 else 64,
        optimizer=partial(torch.optim.AdamW, lr=2e-3, weight_decay=1e-2),
        seed=seed,
        patience=max(5, epochs // 3),
        progress=progress,
    )


def _figures(model: ImageModel, parts: ImageSplits, num_samples: int) -> dict[str, Any]:
    """Of the test images, which neither the net nor a threshold has seen."""
    assert parts.test is not None, "there are images to test with"
    answers, labels = [], []
    for x, y in iterate_batches(parts.test):
        answers.append(model.predict(RowBatch({"row": np.arange(len(x))}, torch.stack(x)), num_samples=num_samples))
        labels += y
    columns = {name: np.concatenate([part.columns[name] for part in answers]) for name in answers[0].columns}
    probs = torch.cat([part.probs for part in answers if part.probs is not None])
    seen = parts.train.targets
    assert seen is not None, "images have classes"
    return compute_classification_metrics(
        PredictionTable(columns, probs), torch.stack(labels), int(seen.bincount().argmax())
    )
