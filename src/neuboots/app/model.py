"""Model: reads batches of rows from files and predicts them with uncertainty; the rule that rejects predictions.

    read(source) → batches;   predict(batch) → columns such as prediction, std, ood_score, abstain

    abstain:   a value that is not finite
               confidence(x) < t,   t such that P(wrong | accepted) ≤ r with probability 1 − δ for new rows
               std(x) > σ_y, or high(x) − low(x) > w, in a regression
               ood_score(x) > 1, or too few columns of x have a known value

t is fitted on held-out rows (`evaluation.selective`). A model is one artifact folder of JSON and safetensors.
"""

import csv
import io
import json
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from neuboots import metrics
from neuboots._validation import check_int, check_types, escape_text
from neuboots.loading import EpochLoader, preserve_rng_state
from neuboots.prediction import Predictor, class_probabilities
from neuboots.serialization import (
    Artifact,
    ArtifactError,
    atomic_file,
    check_restored,
    read_artifact,
    reading,
    write_artifact,
)

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
        y: Labels if requested: classes (N,) or numbers (N, 1) in the user's units; −1 or NaN if missing, −2 for a class
            that is not in the training data.
        notes: Messages for the user.
        unknown: Fraction of the columns of a table in which each row has no known value: (N,).
    """

    keys: dict[str, Array]
    x: Any
    y: Tensor | None = None
    notes: tuple[str, ...] = ()
    unknown: Array | None = None

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


def find_not_finite(columns: Mapping[str, Array]) -> Array:
    """Return which rows of a prediction have a value that is NaN or infinite.

    Args:
        columns: Columns by name, (N,) each.

    Returns:
        Boolean mask (N,).

    Example:
        >>> find_not_finite({"prediction": np.array(["a", "b"]), "std": np.array([0.5, np.nan])}).tolist()
        [False, True]
    """
    broken = np.zeros(len(next(iter(columns.values()))), dtype=bool)
    for column in columns.values():
        if column.dtype.kind == "f":
            broken |= ~np.isfinite(column)
    return broken


class Model(ABC):
    """A trained predictor with the reading of files and the formatting of its predictions.

    Attributes:
        kind: Kind of the files; see `MODEL_CLASSES`.
        card: Description.
        predictor: Trained predictor.
        classes: Names of the classes in the order of the probabilities; empty for a regression.
    """

    kind: ClassVar[str]
    card: ModelCard
    predictor: Predictor
    classes: tuple[str, ...]

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
        write_artifact(folder, *self.to_artifact(), kind="model")

    def to_artifact(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the config and tensors to save."""
        config, tensors = self._to_artifact()
        card = asdict(self.card)
        card["metrics"] = _without_nan(card["metrics"])
        return {"model": self.kind, "card": card, **config}, tensors


def _without_nan(value: Any) -> Any:
    """The metrics with None for numbers that are not finite, which JSON cannot store."""
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    with reading(artifact.folder):
        module, name = MODEL_CLASSES[artifact.config["model"]]
        card = _read_card(check_types("card", artifact.config["card"], ModelCard))
        model: Model = getattr(import_module(module), name)._from_artifact(artifact, card)
        task = "segmentation" if model.kind == "masks" else "classification" if model.classes else "regression"
        if card.task != task or not all(isinstance(each, str) for each in model.classes):
            raise ArtifactError(artifact.folder, f"its card states {card.task} for a model of {task}")
        check_restored(artifact, *model.to_artifact())
    return model


def _read_card(config: dict[str, Any]) -> ModelCard:
    """Return the card; raise TypeError or ValueError if a value has another type than `ModelCard` states."""
    card = ModelCard(**config)
    for name in ("task", "target", "method", "command", "version"):
        if not isinstance(getattr(card, name), str):
            raise TypeError(f"{name} of the card is not a text")
    if check_int("seed", card.seed, minimum=0) >= 1 << 63:
        raise ValueError(f"the seed of the card is {card.seed}")
    for split, count in card.rows.items():
        check_int(split, count, minimum=0)
    card.metrics.items()  # a mapping
    return card


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
        Columns prediction, probability, std (of that probability over replicates), entropy and mutual_information. A
        row with an output that is not finite has no prediction, and NaN elsewhere.

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
            finite = prediction.samples.isfinite().all(2).all(0).cpu()  # an infinite logit has a probability
            probs[~finite] = torch.nan
        predicted = class_values[labels.numpy()]
        if not bool(finite.all()):
            predicted = np.where(finite.numpy(), predicted.astype(object), None)
        columns = {
            "prediction": predicted,
            "probability": probs.amax(1).numpy(),
            "std": std.numpy(),
            "entropy": (prediction.entropy.float().cpu() + 0.0).numpy(),  # no −0
            "mutual_information": prediction.mutual_information.float().cpu().numpy(),
        }
        for name in ("std", "entropy", "mutual_information"):
            columns[name] = np.where(finite.numpy(), columns[name], np.float32(np.nan))
        tables.append(PredictionTable(columns, probs))
    return PredictionTable.concatenate(tables)


# -- rejection -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RejectRule:
    """When a model abstains; thresholds are in the user's units. It always abstains where a value is not finite.

    Args:
        confidence: Smallest accepted confidence; above 1 rejects every row.
        width: Widest accepted 95 % interval.
        std: Largest accepted standard deviation.
        unknown: Largest accepted fraction of the columns in which a row has no known value.
        risk: Error rate that `confidence` was fitted for.

    Example:
        >>> rule = RejectRule(confidence=0.8)
        >>> rule({"ood_score": np.array([0.5, 0.5, 3.0]), "probability": np.array([0.9, 0.6, 0.9])}).tolist()
        [False, True, True]
    """

    confidence: float = 0.0
    width: float = math.inf
    std: float = math.inf
    risk: float | None = None
    unknown: float = 0.5

    def __call__(self, columns: Mapping[str, Array], width: Array | float = 0.0, unknown: Array | float = 0.0) -> Array:
        """Return which rows to reject, by the columns of a prediction, the width of 95 % intervals, and the fraction of
        the columns without a known value: (N,)."""
        confidence, std = columns.get("probability", np.inf), columns.get("std", 0.0)
        certain = (
            (confidence >= self.confidence) & (width <= self.width) & (std <= self.std) & (unknown <= self.unknown)
        )
        return np.asarray(~((columns["ood_score"] <= 1) & certain) | find_not_finite(columns))

    def config(self) -> dict[str, Any]:
        """Return the thresholds for JSON, None without one."""
        return {
            name: value if value is not None and math.isfinite(value) else None for name, value in asdict(self).items()
        }

    @classmethod
    def from_config(cls, config: Any) -> "RejectRule":
        """Return the rule whose `config` was saved."""
        number = float | None
        names = {"width": number, "std": number, "risk": number}
        check_types("rule", config, {"confidence": float, "unknown": float, **names})
        return cls(**{name: math.inf if value is None and name != "risk" else value for name, value in config.items()})


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
    from neuboots.evaluation.selective import SelectivePredictionReport

    needed, count = math.ceil(math.log(DELTA) / math.log1p(-max_error)), len(held_out)
    if count < needed:
        return RejectRule(), (
            f"{count:,} held-out rows are too few to guarantee an error of at most {max_error:.1%} ({needed:,} are "
            "needed); the model abstains on out-of-distribution rows only"
        )
    ranking: Any = 0
    with preserve_rng_state():  # the loader seeds the global generators for each example
        for _, batch, _ in EpochLoader(held_out, batch_size=256, seed=0, shuffle=False).epoch(0):
            summary = predictor.summarize(batch.x, num_samples, seed=seed)
            correct = summary.labels.cpu() == batch.y
            ranking = ranking + metrics.ConfidenceRanking.from_confidence(summary.confidence.double().cpu(), correct)
    report = SelectivePredictionReport(ranking, "confidence", None, num_samples, seed, pixels=False)
    threshold = report.control_risk(risk=max_error, delta=DELTA).threshold
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


# -- output files --------------------------------------------------------------------------------------

Format = Literal["csv", "parquet", "jsonl"]
Write = Callable[[dict[str, Array]], None]


def is_device(out: str) -> bool:
    """Test whether `out` is standard output, a device or a pipe, which is not replaced but written to.

    Args:
        out: A path, or "-".

    Returns:
        Whether it is.
    """
    path = Path(out).expanduser()
    return out == "-" or (path.exists() and not path.is_file() and not path.is_dir())


@contextmanager
def open_writer(out: str, form: Format, *, raw_cells: bool = False) -> Iterator[Write]:
    """Open a file, or standard output, to write a table in batches; a file appears under its name when it is complete.

    A terminal gets texts with escapes for what is not printable.

    Args:
        out: The file; "-" is standard output.
        form: Format of the table.
        raw_cells: Whether texts of a CSV are written as they are; see `make_writer`.

    Yields:
        A function that writes a batch of columns.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "found.csv")
        >>> with open_writer(str(file), "csv") as write:
        ...     write({"row": np.array([1, 2]), "kind": np.array(["cat", "dog, small"]), "ok": np.array([True, False])})
        >>> print(file.read_text(encoding="utf-8"), end="")
        row,kind,ok
        1,"cat",true
        2,"dog, small",false
    """
    path = Path(out).expanduser()
    with ExitStack() as stack:
        if out == "-":
            if sys.stdout is None:
                raise OSError("standard output is closed; give a file")
            sys.stdout.flush()
            sink: IO[bytes] = sys.stdout.buffer
        else:
            target = path if is_device(out) else stack.enter_context(atomic_file(path.resolve()))  # a link stays one
            with _named_errors(out):
                sink = target.open("wb")
            stack.callback(_close, sink, out)
        if sink.isatty():
            if form == "parquet":
                raise ValueError("standard output is a terminal; give a file for Parquet")
            sink = _Terminal(sink)  # type: ignore[assignment]
        write = stack.enter_context(make_writer(sink, form, raw_cells=raw_cells))

        def write_named(columns: dict[str, Array]) -> None:
            with _named_errors(out):
                write(columns)

        yield write_named
        with _named_errors(out):
            stack.close()  # what was written may reach the disk only now


@contextmanager
def _named_errors(out: str) -> Iterator[None]:
    """Give errors of the operating system the name of the file."""
    try:
        yield
    except OSError as error:
        error.filename = "standard output" if out == "-" else out
        raise


def _close(sink: IO[bytes], out: str) -> None:
    with _named_errors(out):
        sink.close()


@dataclass(frozen=True)
class _Terminal:
    """Terminal that is sent escapes for what is not printable."""

    sink: IO[bytes]

    def write(self, content: Any) -> None:
        self.sink.write("\n".join(map(escape_text, bytes(content).decode().split("\n"))).encode())

    def flush(self) -> None:
        self.sink.flush()


@contextmanager
def make_writer(sink: IO[bytes], form: Format, *, raw_cells: bool = False) -> Iterator[Write]:
    """Open a writer of batches of columns to an open file, which flushes it.

    In a CSV, a text that a spreadsheet may take for a formula gets a leading apostrophe, also in the header: one whose
    first character other than spaces, quotes and invisible characters is = + - or @, or that begins with a tab or line
    break. Numbers stay as they are. Readers do not remove the apostrophe.

    Args:
        sink: The file.
        form: Format of the table.
        raw_cells: Whether texts of a CSV are written as they are.

    Yields:
        The function.

    Example:
        >>> sink = io.BytesIO()
        >>> with make_writer(sink, "csv") as write:
        ...     write({"text": np.array(["=1+1", "-5", "a"], dtype=object), "number": np.array([-1, -2, -3])})
        >>> print(sink.getvalue().decode(), end="")
        text,number
        '=1+1,-1
        -5,-2
        a,-3
    """
    import pyarrow

    parquet: Any = None
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str).encode
    has_header = False

    def write(columns: dict[str, Array]) -> None:
        nonlocal parquet, has_header
        names = _to_arrow(np.array([*columns], dtype=object))
        arrays = {name: _to_arrow(values) for name, values in zip(names.to_pylist(), columns.values(), strict=True)}
        if form == "parquet":
            parquet = parquet or _open_parquet(sink, arrays)
            parquet.write_table(_cast(arrays, parquet.schema))
            return
        if form == "csv":
            if not has_header:
                header = names if raw_cells else _neutralize(names)
                line = io.StringIO(newline="")
                csv.writer(line, lineterminator="\n").writerow(header.to_pylist())
                sink.write(line.getvalue().encode())
            sink.write(_render_csv(arrays if raw_cells else {name: _neutralize(a) for name, a in arrays.items()}))
        else:
            rows = pyarrow.table(arrays).to_pylist()
            sink.write("".join(f"{encode(row)}\n" for row in rows).encode())
        has_header = True
        sink.flush()

    try:
        yield write
    except BaseException:
        if parquet is not None:
            parquet.is_open = False  # without its footer the file is not valid
        raise
    if parquet is not None:
        parquet.close()
        sink.flush()


def _render_csv(arrays: dict[str, Any], style: str = "none") -> Any:
    """Return rows as CSV, quoted only if one of the texts needs quotes."""
    import pyarrow
    import pyarrow.csv

    table, text = pyarrow.table(arrays), pyarrow.BufferOutputStream()
    options = pyarrow.csv.WriteOptions(include_header=False, quoting_style=style, batch_size=max(1, len(table)))
    try:
        pyarrow.csv.write_csv(table, text, options)
    except pyarrow.ArrowInvalid:  # a text has a comma, a quote or a line break
        if style == "needed":
            raise
        return _render_csv(arrays, "needed")
    return text.getvalue()


_FORMULA = r"""^[\pC\pZ"'`]*[=+\-@＝＋－＠﹢﹣﹦﹫]|^[\t\r\n]"""
_NUMBER = r"^ *[+-]?[0-9.,]*[0-9][0-9.,]*([eE][+-]?[0-9]+)? *$"  # of any language


def _neutralize(array: Any) -> Any:
    """Return a column whose texts that a spreadsheet may take for a formula have a leading apostrophe."""
    import pyarrow
    import pyarrow.compute

    if not pyarrow.types.is_string(array.type):
        return array
    compute: Any = pyarrow.compute
    formula = compute.match_substring_regex(array, _FORMULA)
    if not compute.any(formula).as_py():
        return array
    formula = compute.and_not(formula, compute.match_substring_regex(array, _NUMBER))
    return compute.if_else(formula, compute.binary_join_element_wise("'", array, ""), array)


def _open_parquet(sink: IO[bytes], arrays: dict[str, Any]) -> Any:
    """Open a writer with the types of the first batch."""
    import pyarrow
    import pyarrow.parquet

    types = [pyarrow.string() if pyarrow.types.is_null(array.type) else array.type for array in arrays.values()]
    return pyarrow.parquet.ParquetWriter(sink, pyarrow.schema(list(zip(arrays, types, strict=True))))


def _cast(arrays: dict[str, Any], schema: Any) -> Any:
    """Return a table with the types of the schema."""
    import pyarrow

    for name, kind in zip(schema.names, schema.types, strict=True):
        try:
            arrays[name] = arrays[name].cast(kind)
        except pyarrow.ArrowException:
            raise ValueError(
                f"column {name!r} is {kind} in the first rows and {arrays[name].type} later, which Parquet does not "
                "support; write CSV, or do not copy the column"
            ) from None
    return pyarrow.table(arrays, schema=schema)


def _to_arrow(values: Array) -> Any:
    """Return a column; NaN and None are missing, and values of several types become texts."""
    import pyarrow

    try:
        return pyarrow.array(values, from_pandas=True)
    except (pyarrow.ArrowException, OverflowError, UnicodeError):
        texts = [None if value is None or value != value else str(value) for value in values.tolist()]
        return pyarrow.array([text and text.encode(errors="backslashreplace").decode() for text in texts])
