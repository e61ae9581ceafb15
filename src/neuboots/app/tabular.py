"""A model of a table: its schema, an estimator, and when to say "I don't know".

    file → frames of some rows → schema → x (N, C) → estimator → prediction, interval or probabilities, s(x), abstain

Rows are read, encoded and answered a chunk at a time: a table may be larger than memory. New tables have the columns of
the training table by name, in any order and among others; the target is needed only where answers are compared with it.
"""

import difflib
import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from neuboots.app.model import Array, Model, ModelCard, PredictionTable, RowBatch, unique_name
from neuboots.app.rejection import (
    MahalanobisScore,
    RejectRule,
    check_max_error,
    compute_classification_metrics,
    compute_regression_metrics,
    fit_reject_rule,
    predict_classes,
)
from neuboots.data import DatasetBundle, TableSchema, load_table
from neuboots.data._common import format_names
from neuboots.data.table_files import MAX_CHUNK_CELLS, MISSING_VALUES, TableFile, select_columns
from neuboots.data.tabular import CategoricalColumn, NumericColumn, TargetColumn, canonical_text
from neuboots.prediction import Predictor
from neuboots.serialization import load_tensors

LEVEL = 0.95  # of the interval whose width decides
FAR = 1e6  # standard deviations: beyond, a row is as unusual as can be, and a net's sums might overflow
ROWS = 1 << 14  # that are answered at once
NAMED = 20  # columns in a sentence
FEW = 20  # rows that may be numbered by chance


@dataclass(frozen=True, eq=False)
class TabularModel(Model):
    """What answers rows of tables; `fit_table` makes one."""

    kind: ClassVar[str] = "table"
    files: ClassVar[tuple[str, ...]] = ("estimator", "arrays.safetensors")

    card: ModelCard
    schema: TableSchema
    estimator: Any  # a NeuBootsClassifier or NeuBootsRegressor
    unusual: MahalanobisScore
    abstain: RejectRule

    @property
    def predictor(self) -> Predictor:
        predictor: Predictor = self.estimator.predictor_
        return predictor

    @property
    def classes(self) -> tuple[str, ...]:
        return self.schema.target.classes

    # -- rows ------------------------------------------------------------------------------------------

    def read(
        self, source: str | Path, *, with_labels: bool = False, keep: Sequence[str] | Literal["all"] = ()
    ) -> Iterator[RowBatch]:
        """The rows of a CSV, Parquet or JSON Lines file, or of standard input ("-").

        A label that is missing, or a class that the model does not know, is −1; a missing number is NaN. `keep` names
        columns to be carried along in `keys`, of a CSV as they are written. The last chunk has the notes: what was
        missing or unknown, by column.
        """
        file = TableFile.open(source)
        target = [self.schema.target.name] if with_labels else []
        self._check(file, target)
        kept = [name for name in file.names if name] if keep == "all" else list(dict.fromkeys(keep))
        if lacking := [name for name in kept if name not in file.names]:
            raise ValueError(
                f"got {format_names(lacking)} to keep, but {file.path} has {format_names(file.names, NAMED)}"
            )
        return self._chunks(file, target, kept)

    def _chunks(self, file: TableFile, target: list[str], kept: list[str]) -> Iterator[RowBatch]:
        """The last chunk is known as such when there is no other: each waits for the next one."""
        odd = _Odd(self.schema)
        waiting: RowBatch | None = None
        wanted = (*self.schema.columns, *target, *kept)
        for frame in _pieces(file.frames(wanted, texts=self.schema.text_columns, raw=kept), len(self.schema.features)):
            if waiting is not None:
                yield waiting
            keys = {"row": frame.index.to_numpy() + 1}
            for name in kept:
                keys[unique_name(name, keys)] = frame[name].to_numpy(dtype=object)
            if file.format == "csv":
                frame = self._understood(frame, {*kept}, file.decimal)
            y = self.schema.read_target(frame) if target else None
            odd.add(frame, y)
            waiting = RowBatch(keys, self.schema.encode(frame).clamp_(-FAR, FAR), y)
        assert waiting is not None, "a table without rows is refused"
        yield replace(waiting, notes=odd.notes)

    def _understood(self, frame: Any, kept: set[str], decimal: str) -> Any:
        """Columns of a CSV that were kept as they are written, now as they are meant: with gaps and decimal points."""
        for name in kept & {*self.schema.columns, self.schema.target.name} & {*frame.columns}:
            column = frame[name].mask(frame[name].isin(MISSING_VALUES))
            numeric = decimal != "." and any(name == number.name for number in self.schema.numbers)
            frame = frame.assign(**{name: column.str.replace(decimal, ".") if numeric else column})
        return frame

    def _check(self, file: TableFile, target: list[str]) -> None:
        """Are all columns there? Those that are not are named, with the nearest that are."""
        there = {*file.names}
        lacking = [name for name in (*self.schema.columns, *target) if name not in there]
        if not lacking:
            return
        close = sorted(filter(None, file.names), key=lambda name: -_likeness(name, lacking[0]))[:3]
        more = " for the truth to compare with" if lacking == target else ""
        raise ValueError(
            f"{file.path} lacks {len(lacking)} column(s): {format_names(lacking, NAMED)}; expected all that the model was "
            f"trained on{more}: it has {format_names(close)}, if one of them was meant"
        )

    # -- answers ---------------------------------------------------------------------------------------

    def predict(self, chunk: RowBatch, *, num_samples: int = 100, level: float = LEVEL) -> PredictionTable:
        x = np.asarray(chunk.x)
        inputs = self.estimator.inputs(x)
        score = self.unusual.score(inputs)
        num_samples = min(num_samples, self.predictor.num_distinct or num_samples)  # each member once
        probs = None
        if self.classes:
            said = predict_classes(self.predictor, inputs, num_samples, seed=self.card.seed)
            probs = said.probs
            columns = {
                "prediction": class_values(self.schema.target)[said.labels.numpy()],
                "probability": said.confidence.numpy(),
                "std": said.std.numpy(),
                "entropy": said.entropy.numpy(),
                "mutual_information": said.mutual_information.numpy(),
            }
            unsure = self.abstain(ood_score=score, confidence=columns["probability"])
        else:
            said = self.estimator.forecast(x, level=level, num_samples=num_samples)
            names = ("low", "high", "std", "confidence_low", "confidence_high")
            columns = {"prediction": said.mean, **{name: getattr(said, name) for name in names}}
            width = None
            if self.abstain.width < math.inf:  # whatever level is shown
                usual = said if level == LEVEL else self.estimator.forecast(x, level=LEVEL, num_samples=num_samples)
                width = usual.high - usual.low
            unsure = self.abstain(ood_score=score, width=width, std=said.std)
        columns |= {"ood_score": score, "abstain": unsure}
        for name, values in columns.items():
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                row = chunk.keys["row"][int((~np.isfinite(values)).argmax())]
                raise ValueError(f"the model's {name} for row {row} is no finite number; expected one: train it again")
        return PredictionTable(columns, probs)

    # -- files -----------------------------------------------------------------------------------------

    def _write(self, folder: Path) -> dict[str, Any]:
        from safetensors.torch import save_file

        self.estimator.save(folder / "estimator")
        save_file(self.unusual.state_dict(), folder / "arrays.safetensors")
        return {"schema": json.loads(self.schema.to_json()), "abstain": self.abstain.config()}

    @classmethod
    def _read(cls, folder: Path, held: dict[str, Any], card: ModelCard) -> "TabularModel":
        from neuboots.estimators import NeuBootsClassifier, NeuBootsRegressor

        schema = TableSchema.from_json(json.dumps(held["schema"]))
        kind = NeuBootsClassifier if schema.target.classes else NeuBootsRegressor
        try:
            estimator = kind.load(folder / "estimator")
            unusual = MahalanobisScore.from_config(load_tensors(folder / "arrays.safetensors"))
            model = cls(card, schema, estimator, unusual, RejectRule.from_config(held["abstain"]))
            model._check_fit(folder)
        except (AttributeError, IndexError, RuntimeError) as fault:  # what was edited by hand may be of any type
            raise ValueError(f"{folder} is damaged ({fault}); expected what neuboots fit wrote") from None
        return model

    def _check_fit(self, folder: Path) -> None:
        """Do the parts belong together?"""
        numbers: tuple[NumericColumn | TargetColumn, ...] = (*self.schema.numbers, self.schema.target)
        fits = self.estimator.n_features_in_ == len(self.schema.features) == len(self.unusual.mean)
        fits = fits and all(0 < each.std < math.inf and math.isfinite(each.mean) for each in numbers)
        if self.classes:
            fits = fits and len(self.estimator.classes_) == len(self.classes)
        if not fits or bool(self.classes) != (self.schema.target.task == "classification"):
            raise ValueError(f"the parts of {folder} do not fit together; expected what one neuboots fit wrote")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are for the rows of a user
            self.predict(RowBatch({"row": np.ones(1)}, torch.zeros(1, len(self.schema.features))), num_samples=2)


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio()


def class_values(target: TargetColumn) -> Array:
    """The classes as the user writes them: whole numbers, True and False, other numbers, or texts: (C,).

    >>> class_values(TargetColumn("n", "number", "classification", ("0", "10"))).tolist()
    [0, 10]
    """
    if target.kind == "boolean":
        return np.array([name == "True" for name in target.classes])
    if target.kind == "number":
        numbers = np.array([float(name) for name in target.classes])
        return numbers.astype(np.int64) if (numbers == numbers.round()).all() else numbers
    return np.array(target.classes, dtype=object)


def _pieces(frames: Iterator[Any], features: int) -> Iterator[Any]:
    """Frames of so few rows that their inputs are few as well: a column may have hundreds of categories."""
    size = max(1, MAX_CHUNK_CELLS // max(1, features))
    for frame in frames:
        yield from (frame[start : start + size] for start in range(0, len(frame), size))


@dataclass
class _Odd:
    """What is missing and what is unknown in the rows so far, by column."""

    schema: TableSchema
    rows: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, frame: Any, y: Tensor | None) -> None:
        self.rows += len(frame)
        if y is not None and self.schema.target.classes:
            column = frame[self.schema.target.name]
            self._note(column[(y < 0).numpy() & column.notna().to_numpy()], ())
        gaps = select_columns(frame, list(self.schema.columns)).isna().sum()
        self.missing.update({name: int(count) for name, count in gaps.items() if count})
        for column in self.schema.categories:
            self._note(frame[column.name], column.values)

    def _note(self, column: Any, known: Sequence[str]) -> None:
        counts, usual = column.value_counts(), {*known, ""}
        for value, count in zip(counts.index, counts, strict=True):
            if (text := canonical_text(value)) not in usual:
                self.unknown[column.name] += int(count)
                some = self.examples.setdefault(column.name, [])
                if text not in some and len(some) < NAMED:
                    some.append(text)

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each column of unknown categories, and those for what is missing."""
        said = [
            f"column {name!r} has values that no training row had, in {count:,} of {self.rows:,} rows: "
            f"{format_names(self.examples[name])}"
            for name, count in self.unknown.most_common(NAMED)
        ]
        if len(self.unknown) > NAMED:
            said.append(f"{len(self.unknown) - NAMED:,} columns more have values that no training row had")
        columns: tuple[NumericColumn | CategoricalColumn, ...] = (*self.schema.numbers, *self.schema.categories)
        new = {column.name for column in columns if not column.missing}
        for names, what in (
            ([name for name in self.missing if name in new], "which no training row lacked (taken for usual ones)"),
            ([name for name in self.missing if name not in new], "as in some training rows"),
        ):
            if names:
                counts = ", ".join(f"{name!r} in {self.missing[name]:,}" for name in names[:NAMED])
                more = f" and {len(names) - NAMED} columns more" if len(names) > NAMED else ""
                said.append(f"of {self.rows:,} rows values are missing, {what}: {counts}{more}")
        return tuple(said)


# -- training ------------------------------------------------------------------------------------------


def fit_table(
    path: str | Path,
    target: str,
    *,
    task: Literal["classification", "regression"] | None = None,
    ignore: Sequence[str] = (),
    max_categories: int = 256,
    method: str = "neuboots",
    epochs: int | None = None,
    test_fraction: float = 0.1,
    max_error: float = 0.05,
    max_width: float | None = None,
    num_samples: int = 100,
    seed: int = 0,
    command: str = "",
    progress: bool = True,
    on_start: Callable[[TableSchema, Sequence[str]], None] | None = None,
) -> TabularModel:
    """Learn the column `target` from the others; the card has the figures of a share of the rows kept for the `test`.

    Where the model does not abstain, at most `max_error` of its classes are to be wrong; numbers are answered where the
    interval is at most `max_width` wide, or else where the standard deviation is below that of the training targets
    themselves. `say` is told what was made of the columns before the training begins.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "pets.csv")
    >>> lines = [f"{20 + k % 17},{'short' if k % 2 else 'long'},{k % 2 + k % 17 / 4}" for k in range(300)]
    >>> _ = file.write_text("\\n".join(["weight,hair,price", *lines]), encoding="utf-8")
    >>> model = fit_table(file, "price", epochs=2, num_samples=5, progress=False)
    >>> model.card.task, model.card.rows
    ('regression', {'train': 243, 'held out': 27, 'test': 30})
    >>> answers = model.predict(next(model.read(file)))
    >>> len(answers), list(answers.columns)[:4]
    (300, ['prediction', 'low', 'high', 'std'])
    """
    from neuboots.estimators import NeuBootsClassifier, NeuBootsRegressor

    check_max_error(max_error)
    if max_width is not None and not 0 < max_width < math.inf:
        raise ValueError(f"got max_width={max_width!r}; expected a width above 0, in the units of {target!r}")
    data = load_table(
        path, target=target, task=task, ignore=ignore, val_fraction=0, test_fraction=test_fraction, seed=seed, drop_high_cardinality=True,
        max_categories=max_categories,
    )  # fmt: skip
    schema = data.schema
    assert schema is not None
    x, y = _rows(data, "train")
    if on_start is not None:
        on_start(schema, _counters(schema, x))
    kind = NeuBootsClassifier if data.classes else NeuBootsRegressor
    options: dict[str, Any] = {} if epochs is None else {"epochs": epochs}
    estimator = kind(method=method, num_samples=num_samples, random_state=seed, verbose=progress, **options)
    estimator.fit(x.numpy(), y.numpy() if data.classes else y.numpy()[:, 0])
    held = torch.from_numpy(estimator.held_out_)
    inputs = estimator.inputs(x.numpy())
    if data.classes:
        rows = TensorDataset(inputs[held], y[held])
        abstain, promise = fit_reject_rule(
            estimator.predictor_, rows, max_error=max_error, num_samples=num_samples, seed=seed
        )
    else:
        abstain, promise = _narrow(y[:, 0], max_width)
    counts = {"train": int((~held).sum()), "held out": int(held.sum()), "test": len(_rows(data, "test")[0])}
    card = ModelCard(data.task, target, method, counts, seed, command, version("neuboots"))
    model = TabularModel(card, schema, estimator, MahalanobisScore.learn(inputs[~held], inputs[held]), abstain)
    return replace(model, card=replace(card, figures={**_figures(model, data, num_samples), "notes": [promise]}))


def _counters(schema: TableSchema, x: Tensor) -> list[str]:
    """A word on columns that number the rows: every new row would be unlike those."""
    notes = []
    for k, column in enumerate(schema.numbers):
        values = np.sort(np.asarray(x[:, k].double() * column.std + column.mean))
        whole = bool((np.abs(values - values.round()) < 0.1).all())
        close = len(x) >= FEW and values[-1] - values[0] < 1.5 * len(x) and bool((np.diff(values) > 0.5).all())
        if column.kind == "number" and not column.missing and whole and close:
            notes.append(f"{column.name!r} seems to number the rows; if so leave it out: new rows have other numbers")
    return notes


def _rows(data: DatasetBundle, part: str) -> tuple[Tensor, Tensor]:
    """x and y of a part; numbers in the user's units."""
    found: Any = getattr(data, part)
    if found is None:
        return torch.empty(0, data.channels), torch.empty(0)
    x, y = found.tensors
    return x, y if data.target_standardizer is None else data.target_standardizer.inverse(y.double())


def _narrow(y: Tensor, max_width: float | None) -> tuple[RejectRule, str]:
    """Numbers are answered where the model says more than their spread does, which knows nothing of the row."""
    if max_width is not None:
        return RejectRule(width=max_width), f"it answers where its {LEVEL:.0%} interval is at most {max_width:.4g} wide"
    std = float(y.std(correction=0))
    return RejectRule(
        std=std
    ), f"it answers where its standard deviation is below that of the training targets, {std:.4g}"


def _figures(model: TabularModel, data: DatasetBundle, num_samples: int) -> dict[str, Any]:
    """Of the test rows, which neither the net nor a threshold has seen."""
    x, y = _rows(data, "test")
    if not len(x):
        return {}
    chunks = [RowBatch({"row": np.arange(len(some)) + 1}, some) for some in torch.split(x, ROWS)]
    parts = [model.predict(chunk, num_samples=num_samples) for chunk in chunks]
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    if data.classes:
        answers = PredictionTable(columns, torch.cat([part.probs for part in parts if part.probs is not None]))
        return compute_classification_metrics(answers, y, int(_rows(data, "train")[1].bincount().argmax()))
    return compute_regression_metrics(PredictionTable(columns), y, model.schema.target.mean, LEVEL)
