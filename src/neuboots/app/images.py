"""Model of images by class: a small CNN trained on a folder of class folders.

The net is trained from scratch. Held-out images drive early stopping, temperature scaling and the reject rule; metrics
come from a separate test split.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from neuboots._validation import check_choice, check_fraction, check_int, format_names
from neuboots.app._images import (
    BATCH_SIZE,
    FeatureExtractor,
    ImagePreprocessing,
    OnStart,
    VisionModel,
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
from neuboots.app.model import (
    ModelCard,
    PredictionTable,
    RejectRule,
    RowBatch,
    compute_classification_metrics,
    fit_reject_rule,
    predict_classes,
)
from neuboots.data import DatasetNotFoundError, load_image_folder
from neuboots.data.image_folder import (
    find_split_folders,
    list_folders,
)
from neuboots.methods import create_method, list_methods
from neuboots.nets import ResNet, SmallCNN
from neuboots.posthoc import TemperatureScaling
from neuboots.prediction import check_summarized

_MAX_SIZE = 64  # default limit of the longer side in pixels
_MAX_CNN_SIZE = 32  # larger images need the receptive field of a ResNet
_MAX_EXAMPLES = {SmallCNN: 100_000, ResNet: 40_000}  # images seen in training, over all epochs
_MIN_SCALING_IMAGES = 15  # fewer held-out images do not determine a temperature
_MAX_SCALING_SAMPLES = 30
_LOG_TEMPERATURE_PRIOR_STD = 0.5  # a few images may all be right by chance


@dataclass(frozen=True, eq=False)
class ImageModel(VisionModel):
    """Model of the class of an image; `fit_images` trains one.

    Args:
        card: Description.
        predictor: Trained predictor.
        classes: Names of the classes.
        preprocessing: How files become inputs.
        features: Features of the OOD score.
        ood: Out-of-distribution score.
        rule: When to abstain.
    """

    kind = "images"

    rule: RejectRule

    def read(self, source: str | Path, *, with_labels: bool = False) -> Iterator[RowBatch]:
        """Read the images below a folder, or a single one; with labels, those of class folders."""
        notes: list[str] = []
        if with_labels:
            source, notes = self._find_labeled(Path(source).expanduser())
        root, listing = find_images(source)
        names = [relative_name(root, file) for file in listing.files]
        labels = [torch.tensor(self._label(name, root)) if with_labels else None for name in names]
        notes += skipped_files_note(root, listing.others)
        return read_batches(names, lambda i: (self.preprocessing(listing.files[i]), labels[i]), notes)

    def _find_labeled(self, folder: Path) -> tuple[Path, list[str]]:
        """Return the folder of class folders; its test split, if it has splits, as the rest was used in training."""
        if not folder.is_dir():
            raise DatasetNotFoundError(f"{folder} is not a folder; expected a folder of class folders")
        splits, notes = find_split_folders(folder), list[str]()
        if splits and list_folders(splits["train"]):  # else a class may be called train
            if "test" not in splits:
                raise DatasetNotFoundError(f"{folder} has splits but no test split; give the folder of one split")
            folder, notes = choose_split(folder, splits)
        if unknown := [entry.name for entry in list_folders(folder) if entry.name not in self.classes]:
            raise DatasetNotFoundError(f"{folder} has the class {unknown[0]!r}; expected {format_names(self.classes)}")
        return folder, notes

    def _label(self, name: str, root: Path) -> int:
        first, _, rest = name.partition("/")
        if not rest:
            raise DatasetNotFoundError(f"{root / name} is in no class folder; expected {format_names(self.classes)}")
        return self.classes.index(first)

    def predict(self, batch: RowBatch, *, num_samples: int = 100, level: float = 0.95) -> PredictionTable:
        """Predict the classes of a batch from B replicates."""
        values = np.array(self.classes, dtype=object)
        table = predict_classes(self.predictor, batch.x, values, num_samples, seed=self.card.seed)
        columns = table.columns | {"ood_score": self.ood(self.features(batch.x))}
        return PredictionTable(columns | {"abstain": self.rule(columns)}, table.probs)

    def _options(self) -> dict[str, Any]:
        return {"rule": self.rule.config()}

    @classmethod
    def _read_options(cls, config: dict[str, Any]) -> dict[str, Any]:
        return {"rule": RejectRule.from_config(config["rule"])}


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
    """Train a model of images by class.

    Args:
        path: Folder with one folder per class, or with the splits train, val and test above the classes.
        method: Method of uncertainty quantification.
        epochs: Maximum number of epochs; None chooses them from the number of images.
        size: Size of the inputs, one number or height and width; None for the median of the files, at most 64 pixels.
        channels: 1 (grey) or 3 (color).
        test_fraction: Fraction of the images for the metrics of the card, if there is no test folder.
        max_error: Error rate of accepted predictions to guarantee.
        num_samples: Replicates B.
        seed: Seed of splits, training and replicates.
        command: Command line for the card.
        progress: Whether to show progress.
        on_start: Called with the chosen options and notes before the training.

    Returns:
        The model.

    Raises:
        ArgumentError: If an argument is wrong.
        DatasetNotFoundError: If images are missing.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name, color in [("blue", "#0000ff"), ("red", "#ff0000")]:
        ...     (folder / name).mkdir()
        ...     for i in range(12):
        ...         Image.new("RGB", (12, 9), color).save(folder / name / f"{i}.png")
        >>> model = fit_images(folder, epochs=3, num_samples=5, progress=False)
        >>> model.classes, model.preprocessing.size, model.card.rows
        (('blue', 'red'), (8, 12), {'train': 18, 'held out': 4, 'test': 2})
    """
    check_fraction("max_error", max_error)
    check_choice("method", method, list_methods("classification"))
    check_summarized(check_int("num_samples", num_samples, minimum=1))
    data = load_image_folder(path, channels=channels, val_fraction=0, test_fraction=0)
    train: Any = data.train
    size = choose_size(size, median_size(train.source.files), _MAX_SIZE)
    data = load_image_folder(path, size=size, channels=channels, val_fraction=0, test_fraction=0)
    if wrong := [name for name in data.classes if name != name.encode("utf-8", "replace").decode()]:
        raise ValueError(f"the class folder {wrong[0]!r} has a name that is not UTF-8; rename it")
    parts: dict[str, Any] = {"train": data.train, "validation": data.validation, "test": data.test}
    folders = {name: part for name, part in parts.items() if part is not None}
    splits = split_images(folders, data.classes, test_fraction, seed=seed, progress=progress)
    net_class: Any = SmallCNN if max(size) <= _MAX_CNN_SIZE else ResNet
    n = len(splits.train)
    if epochs is None:  # more epochs for fewer images
        epochs = max(10, min(100, round(_MAX_EXAMPLES[net_class] / n)))
    config = make_config(method, epochs, 32 if n < 2000 else 64, 2e-3, seed, progress)
    skipped = [file for part in folders.values() for file in part.source.skipped]
    notes = [*skipped_files_note(Path(path).expanduser(), skipped), *splits.notes]
    chosen: dict[str, Any] = {"net": net_class.__name__, "size": list(size), "epochs": epochs}
    if on_start is not None:
        on_start({**chosen, "content": "images by class"}, notes)
    validation, calibration = splits.held_out, splits.held_out
    if len(splits.held_out) > 1:  # the guarantee needs images that nothing was tuned on
        validation, calibration = (splits.held_out.take(range(k, len(splits.held_out), 2)) for k in (0, 1))
    net = partial(_make_net, net_class, channels, data.num_classes)
    train = replace(splits.train, augment=data.augmentation)
    predictor = create_method(method, loss=nn.CrossEntropyLoss()).fit(net, train, config, val_data=validation)
    if len(validation) >= _MIN_SCALING_IMAGES:
        samples = min(num_samples, _MAX_SCALING_SAMPLES)
        scaling = TemperatureScaling(num_samples=samples, prior_std=_LOG_TEMPERATURE_PRIOR_STD)
        predictor = scaling.fit(predictor, validation)
        chosen["temperature"] = predictor.temperature
    rule, note = fit_reject_rule(predictor, calibration, max_error=max_error, num_samples=num_samples, seed=seed)
    card = ModelCard("classification", "class", method, splits.rows, seed, command)
    preprocessing = ImagePreprocessing(channels, size)
    features = FeatureExtractor.from_predictor(predictor, channels, size)
    ood = fit_ood_score(features, splits, BATCH_SIZE)
    model = ImageModel(card, predictor, data.classes, preprocessing, features, ood, rule)
    metrics: dict[str, Any] = {}
    if len(splits.test):
        batches = dataset_batches(splits.test, BATCH_SIZE)
        table = PredictionTable.concatenate([model.predict(batch, num_samples=num_samples) for batch in batches])
        labels: Any = splits.test.targets
        train_labels: Any = splits.train.targets
        metrics = compute_classification_metrics(table, labels, int(train_labels.bincount().argmax()))
    return replace(model, card=replace(card, metrics={**metrics, "chosen": chosen, "files": notes, "notes": [note]}))


def _make_net(net_class: type[nn.Module], channels: int, classes: int) -> nn.Module:
    if net_class is SmallCNN:
        return SmallCNN(channels, classes, widths=(16, 32, 64, 128))
    return ResNet(classes, channels, blocks=(1, 1, 1, 1), widths=(16, 32, 64, 128), shortcut="projection")
