"""Model: reads batches of rows from files and predicts them with uncertainty; the rule that rejects predictions.

    read(source) → batches;   predict(batch) → columns such as prediction, std, ood_score, abstain

    abstain:   confidence(x) < t,   t such that P(wrong | accepted) ≤ r with probability 1 − δ for new rows
               std(x) > σ_y, or high(x) − low(x) > w, in a regression
               ood_score(x) > 1

t is fitted on held-out rows (`evaluation.selective`). A model is one artifact folder of JSON and safetensors.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from neuboots import metrics
from neuboots.prediction import Predictor, class_probabilities
from neuboots.serialization import Artifact, ArtifactError, check_artifact_folder, read_artifact, write_artifact

Task = Literal["classification", "regression", "segmentation"]
Array = np.ndarray[Any, Any]

MODEL_CLASSES = {
    "table": ("neuboots.app.tabular", "TabularModel"),
    "images": ("neuboots.app.images", "ImageModel"),
    "masks": ("neuboots.app.masks", "MaskModel"),
}
"""Module and class of each kind of model; imported when a model of the kind is loaded."""

DELTA = 0.1  # probability that the guarantee of the reject rule fails
_MAX_SAMPLE_VALUES = 1 << 20  # values of replicates in memory at once


@dataclass(frozen=True)
class ModelCard:
    """How a model was trained, and its metrics on the test split.

    Args:
        task: Task of the model.
        target: Name of what is predicted.
        method: Method of uncertainty quantification.
        rows: Number of rows of the splits "train", "held out" and "test".
        seed: Seed of splits, training and replicates.
        command: Command line that repeats the training.
        version: Version of neuboots.
        metrics: Metrics of the test split and notes.
    """

    task: Task
    target: str
    method: str
    rows: dict[str, int]
    seed: int
    command: str = ""
    version: str = field(default_factory=lambda: version("neuboots"))
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Consecutive rows of a source.

    Args:
        keys: What identifies the rows: {"row": 1, 2, …} of a table, {"file": …} of a folder, and copied columns.
        x: Inputs as `Model.predict` takes them.
        y: Labels if requested: classes (N,) or numbers (N, 1) in the user's units; −1 or NaN if unknown.
        notes: Messages for the user.
    """

    keys: dict[str, Array]
    x: Any
    y: Tensor | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.keys.values())))


@dataclass(frozen=True, eq=False)
class PredictionTable:
    """Predictions of a batch as columns.

    Classification: prediction, probability, std, entropy, mutual_information, ood_score, abstain. Regression:
    prediction, low, high, std, confidence_low, confidence_high, ood_score, abstain.

    Args:
        columns: Columns by name, (N,) each.
        probs: Class probabilities (N, C, *).
    """

    columns: dict[str, Array]
    probs: Tensor | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def select(self, mask: Tensor) -> "PredictionTable":
        """Return the rows where a Boolean mask (N,) is true."""
        columns = {name: column[mask.numpy()] for name, column in self.columns.items()}
        return PredictionTable(columns, None if self.probs is None else self.probs[mask])

    @staticmethod
    def concatenate(tables: "Sequence[PredictionTable]") -> "PredictionTable":
        """Join tables with the same columns."""
        columns = {name: np.concatenate([table.columns[name] for table in tables]) for name in tables[0].columns}
        probs = [table.probs for table in tables if table.probs is not None]
        return PredictionTable(columns, torch.cat(probs) if probs else None)


class Model(ABC):
    """A trained predictor with the reading of files and the formatting of its predictions."""

    kind: ClassVar[str]
    card: ModelCard

    @property
    @abstractmethod
    def predictor(self) -> Predictor:
        """The trained predictor."""

    @property
    @abstractmethod
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of the probabilities; empty for a regression."""

    @abstractmethod
    def read(self, source: str | Path, *, with_labels: bool = False) -> Iterator[RowBatch]:
        """Read a file or folder in batches, with labels if requested."""

    def inputs(self, batch: RowBatch) -> Tensor:
        """Standardized inputs of the predictor."""
        inputs: Tensor = batch.x
        return inputs

    @abstractmethod
    def predict(self, batch: RowBatch, *, num_samples: int = 100, level: float = 0.95) -> PredictionTable:
        """Predict a batch from B replicates; intervals have this level."""

    @abstractmethod
    def _to_artifact(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the config and tensors to save."""

    @classmethod
    @abstractmethod
    def _from_artifact(cls, artifact: Artifact, card: ModelCard) -> "Model":
        """Return the model that was saved."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model to a folder; an earlier model there is replaced."""
        config, tensors = self._to_artifact()
        write_artifact(folder, {"model": self.kind, "card": asdict(self.card), **config}, tensors, kind="model")


def check_model_folder(folder: str | os.PathLike[str]) -> None:
    """Raise FileExistsError if a model could not be saved here; for a check before the training.

    Args:
        folder: Folder of the model.
    """
    check_artifact_folder(folder)


def load_model(folder: str | os.PathLike[str]) -> Model:
    """Load a model.

    Args:
        folder: Folder written by `Model.save` or `neuboots fit`.

    Returns:
        The model.

    Raises:
        FileNotFoundError: If there is no model.
        ArtifactError: If it is damaged.
    """
    artifact = read_artifact(folder, kind="model")
    try:
        module, name = MODEL_CLASSES[artifact.config["model"]]
        card = ModelCard(**artifact.config["card"])
        model: Model = getattr(import_module(module), name)._from_artifact(artifact, card)
    except (FileNotFoundError, ArtifactError):
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ArtifactError(artifact.folder, f"{type(error).__name__}: {error}") from None
    return model


def unique_name(name: str, taken: Collection[str]) -> str:
    """Prefix a name with "input" until it is not taken.

    Args:
        name: The name.
        taken: Names in use.

    Returns:
        The new name.

    Example:
        >>> unique_name("age", ["row"]), unique_name("row", ["row", "input row"])
        ('age', 'input input row')
    """
    return unique_name(f"input {name}", taken) if name in taken else name


def predict_classes(
    predictor: Predictor, x: Tensor, class_values: Array, num_samples: int, *, seed: int = 0
) -> PredictionTable:
    """Predict class probabilities in bounded memory.

    Args:
        predictor: The predictor.
        x: Inputs (N, …).
        class_values: What to write for each class: (C,).
        num_samples: Replicates B; members of an ensemble are not repeated.
        seed: Seed of the replicates.

    Returns:
        Columns prediction, probability, std (of that probability over replicates), entropy and mutual_information.

    Example:
        >>> from neuboots.methods import DeterministicPredictor
        >>> x = torch.tensor([[0.0, 0.0], [9.0, 0.0]])
        >>> table = predict_classes(DeterministicPredictor(torch.nn.Identity()), x, np.array(["a", "b"]), 5)
        >>> table.columns["prediction"].tolist(), table.columns["probability"].round(3).tolist()
        (['a', 'a'], [0.5, 1.0])
    """
    num_samples = min(num_samples, predictor.num_distinct or num_samples)
    outputs = predictor.summarize(x[:1], 1, seed=seed).mean.shape[1]
    tables = []
    for part in torch.split(x, max(1, _MAX_SAMPLE_VALUES // (num_samples * outputs))):
        with torch.no_grad():
            prediction = predictor.predict(part, num_samples, seed=seed)
            probs = prediction.probs.float().cpu()  # (N, C)
            labels = probs.argmax(1)
            samples = class_probabilities(prediction.samples.float(), 2).cpu()  # (B, N, C)
            chosen = samples.gather(2, labels[None, :, None].expand(len(samples), -1, 1))[..., 0]  # (B, N)
            std = chosen.std(0) if len(chosen) > 1 else torch.zeros(len(labels))
        columns = {
            "prediction": class_values[labels.numpy()],
            "probability": probs.amax(1).numpy(),
            "std": std.numpy(),
            "entropy": (prediction.entropy.float().cpu() + 0.0).numpy(),  # no −0
            "mutual_information": prediction.mutual_information.float().cpu().numpy(),
        }
        tables.append(PredictionTable(columns, probs))
    return PredictionTable.concatenate(tables)


# -- rejection -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RejectRule:
    """When a model abstains; thresholds are in the user's units.

    Args:
        confidence: Smallest accepted confidence; above 1 rejects every row.
        width: Widest accepted 95 % interval.
        std: Largest accepted standard deviation.
        risk: Error rate that `confidence` was fitted for.

    Example:
        >>> rule = RejectRule(confidence=0.8)
        >>> rule(ood_score=np.array([0.5, 0.5, 3.0]), confidence=np.array([0.9, 0.6, 0.9])).tolist()
        [False, True, True]
    """

    confidence: float = 0.0
    width: float = math.inf
    std: float = math.inf
    risk: float | None = None

    def __call__(
        self,
        *,
        ood_score: Array,
        confidence: Array | float = math.inf,
        width: Array | float = 0.0,
        std: Array | float = 0.0,
    ) -> Array:
        """Return which rows to reject: (N,)."""
        uncertain = (confidence < self.confidence) | (width > self.width) | (std > self.std)
        return np.asarray((ood_score > 1) | uncertain)

    def config(self) -> dict[str, Any]:
        """Return the finite thresholds for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None and math.isfinite(value)}


def fit_reject_rule(
    predictor: Predictor, held_out: Any, *, max_error: float, num_samples: int, seed: int
) -> tuple[RejectRule, str]:
    """Fit the confidence threshold that keeps the error of accepted predictions below `max_error`.

    With too few held-out rows every in-distribution row is accepted and nothing is guaranteed; if the error cannot be
    guaranteed, every row is rejected.

    Args:
        predictor: Trained classifier.
        held_out: Rows (x, y) that were not trained on.
        max_error: Error rate to guarantee.
        num_samples: Replicates B.
        seed: Seed of the replicates.

    Returns:
        The rule, and a note that describes its guarantee.
    """
    from neuboots.evaluation.selective import fit_risk_controlled_threshold

    needed, count = math.ceil(math.log(DELTA) / math.log1p(-max_error)), len(held_out)
    if count < needed:
        return RejectRule(), (
            f"{count:,} held-out rows are too few to guarantee an error of at most {max_error:.1%} ({needed:,} are "
            "needed); the model abstains on out-of-distribution rows only"
        )
    threshold = fit_risk_controlled_threshold(
        predictor, held_out, risk=max_error, delta=DELTA, num_samples=num_samples, seed=seed, progress=False
    ).threshold
    if threshold == math.inf:
        return RejectRule(2.0, risk=max_error), (
            f"no confidence threshold guarantees an error of at most {max_error:.1%}; the model ALWAYS abstains: raise "
            "the maximum error, or train on more rows"
        )
    confidence = max(0.0, threshold)
    where = f"with a confidence of at least {confidence:.1%}" if confidence else "that are in distribution"
    return RejectRule(confidence, risk=max_error), (
        f"the model accepts rows {where}; at most {max_error:.1%} of their predictions are wrong, with probability "
        f"{1 - DELTA:.0%}"
    )


def compute_classification_metrics(table: PredictionTable, y: Tensor, majority: int) -> dict[str, Any]:
    """Compute the card's metrics of class predictions.

    Args:
        table: Predictions.
        y: Labels (N,).
        majority: Most frequent class of the training split.

    Returns:
        Metrics by name.
    """
    assert table.probs is not None, "classes have probabilities"
    accepted, wrong = ~table.columns["abstain"], (table.probs.argmax(1) != y).numpy()
    return {
        **{name: float(getattr(metrics, name)(table.probs, y)) for name in ("error", "nll", "brier", "ece")},
        "accepted": float(accepted.mean()),
        "error_accepted": float(wrong[accepted].mean()) if accepted.any() else None,
        "majority_error": float((y != majority).double().mean()),
    }
