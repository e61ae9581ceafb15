"""A model: a predictor and all that stands between it and the user's files, kept in one folder.

    read(source) → chunks of rows;   answer(chunk) → a column for each thing that is known of a row

There is one class for each kind of data (`kind`): tables, folders of images by class, folders of images and masks. A
model is a folder of JSON and safetensors, never a pickle: it loads on any machine that has the library.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from neuboots.prediction import Predictor
from neuboots.serialization import atomic_folder, check_replaceable

FORMAT = "neuboots model"
VERSION = 1
Task = Literal["classification", "regression", "segmentation"]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ModelCard:
    """What a model was made from, and how it did on rows that it has not seen: what people ask of a model."""

    task: Task
    target: str  # the name of what is predicted
    method: str
    rows: dict[str, int]  # of "train", "held out" and "test"
    seed: int
    command: str
    version: str  # of neuboots
    figures: dict[str, Any] = field(default_factory=dict)  # of the test rows, by name


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Some rows of a source, in its order."""

    keys: dict[str, Array]  # what tells the rows apart: {"row": 1, 2, …} of a table, {"file": …} of a folder
    x: Any  # as `answer` takes it
    y: Tensor | None = None  # where labels were asked for: classes (N,), or numbers (N, 1) in the user's units
    notes: tuple[str, ...] = ()  # sentences for the user, such as "column 'town' has categories never seen …"

    def __len__(self) -> int:
        return len(next(iter(self.keys.values())))


def unique_name(name: str, taken: Collection[str]) -> str:
    """The name, with as many "input" before it as it takes to be none of those.

    >>> unique_name("age", ["row"]), unique_name("row", ["row", "input row"])
    ('age', 'input input row')
    """
    return unique_name(f"input {name}", taken) if name in taken else name


@dataclass(frozen=True, eq=False)
class PredictionTable:
    """What a model says of the rows of a chunk: `columns` as they are written to a file, and what they come from.

    Classification: prediction, probability, std, entropy, mutual_information, ood_score, abstain, and `probs`.
    Regression: prediction, low, high, std, confidence_low, confidence_high, ood_score, abstain.
    """

    columns: dict[str, Array]
    probs: Tensor | None = None  # (N, C)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


class Model(ABC):
    """A trained predictor together with how to read files for it and how to say what it found."""

    kind: ClassVar[str]
    files: ClassVar[tuple[str, ...]]  # names in the folder, beside model.json
    card: ModelCard

    @property
    @abstractmethod
    def predictor(self) -> Predictor: ...

    @property
    @abstractmethod
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the probabilities; none for a regression."""

    @abstractmethod
    def read(self, source: str | Path, *, with_labels: bool = False) -> Iterator[RowBatch]:
        """The rows of a file or folder, a chunk at a time; `iterate_labeled` asks for y as well."""

    @abstractmethod
    def predict(self, chunk: RowBatch, *, num_samples: int = 100, level: float = 0.95) -> PredictionTable:
        """What the model says of these rows, from B replicates; intervals are at this level."""

    @abstractmethod
    def _write(self, folder: Path) -> dict[str, Any]:
        """Write `files`, and give what model.json holds of this kind."""

    @classmethod
    @abstractmethod
    def _read(cls, folder: Path, held: dict[str, Any], card: ModelCard) -> "Model":
        """The model that `_write` wrote."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model to a folder; an earlier model there is replaced as a whole."""
        with atomic_folder(folder, _all_files(), "a saved model") as aside:
            held = self._write(aside)
            text = {"format": FORMAT, "version": VERSION, "kind": self.kind, "card": asdict(self.card), **held}
            (aside / "model.json").write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")


MODEL_CLASSES: dict[str, Callable[[], type[Model]]] = {}
"""The classes of models by kind; each is imported when a model of its kind is read."""


def _all_files() -> set[str]:
    return {"model.json", *(name for kind in MODEL_CLASSES.values() for name in kind().files)}


def check_model_folder(folder: str | os.PathLike[str]) -> None:
    """Refuse now what `save` would refuse after the training: a folder of other files."""
    check_replaceable(folder, _all_files(), "a saved model")


def load_model(folder: str | os.PathLike[str]) -> Model:
    """The model that `save` wrote to this folder, or a sentence that says what is wrong with it."""
    source = Path(folder)
    path = source / "model.json"
    try:
        text = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{source} is no saved model; expected a folder written by neuboots fit") from None
    except (ValueError, OSError) as fault:
        raise ValueError(f"{path} cannot be read as JSON ({fault}); expected what neuboots fit wrote") from None
    if not isinstance(text, dict) or text.get("format") != FORMAT:
        raise ValueError(f"{path} is not a model's; expected a folder written by neuboots fit")
    if text.get("version") != VERSION or text.get("kind") not in MODEL_CLASSES:
        raise ValueError(
            f"{path} is of version {text.get('version')} and kind {text.get('kind')!r}; expected version {VERSION} and "
            f"one of {', '.join(MODEL_CLASSES)}: load it with the release that wrote it"
        )
    try:
        return MODEL_CLASSES[text["kind"]]()._read(source, text, ModelCard(**text["card"]))
    except (KeyError, TypeError) as fault:
        raise ValueError(
            f"{path} is damaged ({type(fault).__name__}: {fault}); expected what neuboots fit wrote"
        ) from None
