"""Model of a table: schema, estimator, OOD score and reject rule.

    file → frames → schema.encode → x (N, C) → estimator → prediction, interval or probabilities, ood_score, abstain

Rows are read, encoded and predicted in batches, so that a table may be larger than memory. New tables need the columns
of the training table in any order; the target is needed only for evaluation.
"""

import difflib
import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from neuboots._validation import ArgumentError, check_fraction, check_int, format_names
from neuboots.app.model import (
    Array,
    Model,
    ModelCard,
    PredictionTable,
    RejectRule,
    RowBatch,
    compute_classification_metrics,
    find_not_finite,
    fit_reject_rule,
    predict_classes,
    unique_name,
)
from neuboots.data.tabular import (
    MAX_CHUNK_CELLS,
    MISSING_VALUES,
    Decimal,
    TableFile,
    TableSchema,
    TargetColumn,
    canonical_text,
    read_table,
)
from neuboots.evaluation.ood.mahalanobis import MahalanobisScore
from neuboots.prediction import Predictor
from neuboots.serialization import Artifact, ArtifactError

LEVEL = 0.95  # level of the interval whose width the reject rule limits
_MAX_STD = 1e6  # inputs are clipped at so many standard deviations, so that sums in the net do not overflow
_MAX_TEST_BATCH = 1 << 14
_MAX_NAMES = 20  # columns and values in a message
_MIN_COUNTER_ROWS = 20  # fewer rows may be consecutive integers by chance
_KNOWN_QUANTILE = 0.99  # of the training rows lack no more columns than an accepted row may, unless it is a half


@dataclass(frozen=True, eq=False)
class TabularModel(Model):
    """Model of a table; `fit_table` trains one.

    Args:
        card: Description.
        schema: Encoding of the columns.
        estimator: A fitted NeuBootsClassifier or NeuBootsRegressor.
        ood: Out-of-distribution score of the estimator's inputs.
        rule: When to abstain.
    """

    kind = "table"

    card: ModelCard
    schema: TableSchema
    estimator: Any
    ood: MahalanobisScore
    rule: RejectRule

    @property
    def predictor(self) -> Predictor:  # type: ignore[override]
        """The estimator's predictor."""
        predictor: Predictor = self.estimator.predictor_
        return predictor

    @property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the classes; empty for a regression."""
        return self.schema.target.classes

    def read(
        self, source: str | Path, *, with_labels: bool = False, keep: Sequence[str] | Literal["all"] = ()
    ) -> Iterator[RowBatch]:
        """Read the rows of a CSV, Parquet or JSON Lines file, or of standard input ("-").

        Missing labels are −1 or NaN; classes that are not in the training data are −2. The columns `keep` are copied to
        the keys, those of a CSV as they are written. The last batch has notes on missing values, unknown categories and
        lines that may be read wrongly.
        """
        file = TableFile.open(source, decimal=self.schema.decimal)
        target = [self.schema.target.name] if with_labels else []
        if missing := [name for name in (*self.schema.columns, *target) if name not in {*file.names}]:
            close = difflib.get_close_matches(missing[0], list(filter(None, file.names)), 3, cutoff=0.0)
            raise ValueError(
                f"{file.path} has no column {format_names(missing, _MAX_NAMES)}, which the model needs"
                f"{' as labels' if missing == target else ''}; its columns are similar to {format_names(close)}"
            )
        copied = [name for name in file.names if name] if keep == "all" else list(dict.fromkeys(keep))
        if missing := [name for name in copied if name not in file.names]:
            raise ArgumentError("keep", format_names(missing), f"columns of {format_names(file.names, _MAX_NAMES)}")
        return self._read_batches(file, target, copied)

    def _read_batches(self, file: TableFile, target: list[str], copied: list[str]) -> Iterator[RowBatch]:
        issues, batch = _DataIssues(self.schema, self.rule.unknown), None
        size = max(1, MAX_CHUNK_CELLS // max(1, len(self.schema.features)))  # one-hot columns are many
        columns = (*self.schema.columns, *target, *copied)
        classes = self.schema.class_column
        for chunk in file.frames(columns, texts=self.schema.text_columns, raw=copied, classes=classes):
            for start in range(0, len(chunk), size):
                frame = chunk[start : start + size]
                if batch is not None:
                    yield batch
                keys = {"row": frame.index.to_numpy() + 1}
                for name in copied:
                    keys[unique_name(name, keys)] = frame[name].to_numpy(dtype=object)
                if file.format == "csv":
                    frame = self._parse_copied(frame, {*copied}, file.decimal)
                y = self.schema.read_target(frame) if target else None
                x, unknown = self.schema.encode_rows(frame, standardize=False)
                issues.add(frame, y, unknown)
                batch = RowBatch(keys, self._clip(x), y, unknown=unknown)
        assert batch is not None, "an empty table is an error"
        yield replace(batch, notes=(*file.notes, *issues.notes))  # the last one

    def _parse_copied(self, frame: Any, copied: set[str], decimal: str) -> Any:
        """Parse the columns of a CSV that were read as text because they are copied as well."""
        for name in copied & {*self.schema.columns, self.schema.target.name} & {*frame.columns}:
            missing = {*MISSING_VALUES} - ({"None"} if name == self.schema.class_column else set())
            column = frame[name].mask(frame[name].isin(missing))
            numeric = decimal != "." and any(name == number.name for number in self.schema.numbers)
            frame = frame.assign(**{name: column.str.replace(decimal, ".") if numeric else column})
        return frame

    def inputs(self, batch: RowBatch) -> Tensor:
        """Standardized inputs of the predictor."""
        inputs: Tensor = self.estimator.inputs(batch.x.numpy())
        return inputs

    def predict(self, batch: RowBatch, *, num_samples: int = 100, level: float = LEVEL) -> PredictionTable:
        """Predict a batch from B replicates; intervals have this level."""
        x, inputs, probs = batch.x.numpy(), self.inputs(batch), None
        width: Any = 0.0
        if self.classes:
            values = class_values(self.schema.target)
            table = predict_classes(self.predictor, inputs, values, num_samples, seed=self.card.seed)
            columns, probs = table.columns, table.probs
        else:
            num_samples = min(num_samples, self.predictor.num_distinct or num_samples)
            forecast = self.estimator.forecast(x, level=level, num_samples=num_samples)
            names = ("low", "high", "std", "confidence_low", "confidence_high")
            columns = {"prediction": forecast.mean, **{name: getattr(forecast, name) for name in names}}
            if self.rule.width < math.inf:  # at the rule's own level
                if level != LEVEL:
                    forecast = self.estimator.forecast(x, level=LEVEL, num_samples=num_samples)
                width = forecast.high - forecast.low
        columns["ood_score"] = self.ood(inputs)
        columns["abstain"] = self.rule(columns, width, 0.0 if batch.unknown is None else batch.unknown)
        return PredictionTable(columns, probs)

    def _clip(self, x: Tensor) -> Tensor:
        mean, std = map(x.new_tensor, self.schema.moments)
        return torch.clamp(x, mean - _MAX_STD * std, mean + _MAX_STD * std)

    def _to_artifact(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        estimator, tensors = self.estimator.to_artifact()
        config = {"schema": json.loads(self.schema.to_json()), "rule": self.rule.config(), "estimator": estimator}
        tensors = {f"estimator.{name}": value for name, value in tensors.items()}
        return config, tensors | {f"ood.{name}": value for name, value in self.ood.state_dict().items()}

    @classmethod
    def _from_artifact(cls, artifact: Artifact, card: ModelCard) -> "TabularModel":
        from neuboots.estimators import NeuBootsClassifier, NeuBootsRegressor

        schema = TableSchema.from_json(json.dumps(artifact.config["schema"]))
        estimator_class: Any = NeuBootsClassifier if schema.target.classes else NeuBootsRegressor
        inner = Artifact(artifact.folder, artifact.config["estimator"], artifact.select("estimator."))
        estimator = estimator_class.from_artifact(inner)
        ood = MahalanobisScore.from_state_dict(artifact.select("ood."))
        model = cls(card, schema, estimator, ood, RejectRule.from_config(artifact.config["rule"]))
        consistent = estimator.n_features_in_ == len(schema.features) == ood.num_features
        if model.classes:
            consistent = consistent and len(estimator.classes_) == len(model.classes)
        if not consistent:
            raise ArtifactError(artifact.folder, "its parts are of different models")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = model.predict(RowBatch({"row": np.ones(1)}, torch.tensor([schema.moments[0]])), num_samples=2)
        if find_not_finite(found.columns).any():
            raise ArtifactError(artifact.folder, "its prediction of the training mean is not finite")
        return model


def class_values(target: TargetColumn) -> Array:
    """Return the classes as the user writes them: integers, Booleans, numbers or texts: (C,).

    Args:
        target: Target column of a classification.

    Returns:
        The values.

    Example:
        >>> class_values(TargetColumn("n", "number", "classification", ("0", "10"))).tolist()
        [0, 10]
    """
    if target.kind == "boolean":
        return np.array([name == "True" for name in target.classes])
    if target.kind == "number":
        numbers = np.array([float(name) for name in target.classes])
        return numbers.astype(np.int64) if (numbers == numbers.round()).all() else numbers
    return np.array(target.classes, dtype=object)


@dataclass
class _DataIssues:
    """Missing values and unknown categories of the rows read so far, by column."""

    schema: TableSchema
    max_unknown: float  # of a row that is accepted
    rows: int = 0
    unknown_rows: int = 0
    first_unknown: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, frame: Any, y: Tensor | None, unknown: Array) -> None:
        self.rows += len(frame)
        if (rejected := unknown > self.max_unknown).any():
            self.first_unknown = self.first_unknown or int(frame.index[rejected][0]) + 1
            self.unknown_rows += int(rejected.sum())
        if y is not None and self.schema.target.classes:
            column = frame[self.schema.target.name]
            self._count_unknown(column[(y < 0).numpy() & column.notna().to_numpy()], ())
        gaps = frame[list(self.schema.columns)].isna().sum()
        self.missing.update({name: int(count) for name, count in gaps.items() if count})
        for column in self.schema.categories:
            self._count_unknown(frame[column.name], column.values)

    def _count_unknown(self, column: Any, known: Sequence[str]) -> None:
        counts, accepted = column.value_counts(), {*known, ""}
        for value, count in zip(counts.index, counts, strict=True):
            if (text := canonical_text(value)) not in accepted:
                self.unknown[column.name] += int(count)
                examples = self.examples.setdefault(column.name, [])
                if text not in examples and len(examples) < _MAX_NAMES:
                    examples.append(text)

    @property
    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.unknown_rows:
            notes.append(
                f"{self.unknown_rows:,} of {self.rows:,} rows have no known value in more than {self.max_unknown:.0%} "
                f"of the columns (first: row {self.first_unknown}); the model abstains on them"
            )
        notes += [
            f"column {name!r} has values that are not in the training data, in {count:,} of {self.rows:,} rows: "
            f"{format_names(self.examples[name])}"
            for name, count in self.unknown.most_common(_MAX_NAMES)
        ]
        if (more := len(self.unknown) - _MAX_NAMES) > 0:
            notes.append(f"{more:,} more columns have values that are not in the training data")
        columns: tuple[Any, ...] = (*self.schema.numbers, *self.schema.categories)
        gaps = {column.name for column in columns if column.missing}
        for expected, where in ((False, "without gaps in training (mean is imputed)"), (True, "with gaps in training")):
            counts = [f"{name!r} ({count:,})" for name, count in self.missing.items() if (name in gaps) == expected]
            if counts:
                more = len(counts) - _MAX_NAMES
                rest = f" and {more} more" if more > 0 else ""
                shown = ", ".join(counts[:_MAX_NAMES]) + rest
                notes.append(f"missing values in columns {where}, of {self.rows:,} rows: {shown}")
        return tuple(notes)


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
    decimal: Decimal | None = None,
    command: str = "",
    progress: bool = True,
    on_start: Callable[[TableSchema, Sequence[str]], None] | None = None,
) -> TabularModel:
    """Train a model that predicts a column of a table from the others.

    Args:
        path: CSV, Parquet or JSON Lines file.
        target: Column to predict.
        task: Task; None infers it.
        ignore: Columns to exclude.
        max_categories: Text columns with more distinct values are excluded.
        method: Method of uncertainty quantification.
        epochs: Maximum number of epochs; None for the estimator's default.
        test_fraction: Fraction of the rows for the metrics of the card.
        max_error: Error rate of accepted class predictions to guarantee.
        max_width: Widest accepted 95 % interval; None accepts standard deviations up to that of the targets.
        num_samples: Replicates B.
        seed: Seed of splits, training and replicates.
        decimal: Decimal sign of a CSV file whose numbers do not show it, such as 1,050.
        command: Command line for the card.
        progress: Whether to show progress.
        on_start: Called before the training with the schema, and with notes on what the table may mean otherwise.

    Returns:
        The model.

    Raises:
        ArgumentError: If an argument is wrong or does not suit the table.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "pets.csv")
        >>> lines = [f"{20 + k / 15},{'short' if k % 2 else 'long'},{k % 2 + k / 60}" for k in range(300)]
        >>> _ = file.write_text("\\n".join(["weight,hair,price", *lines]), encoding="utf-8")
        >>> model = fit_table(file, "price", epochs=2, num_samples=5, progress=False)
        >>> model.card.task, model.card.rows
        ('regression', {'train': 243, 'held out': 27, 'test': 30})
        >>> predictions = model.predict(next(model.read(file)))
        >>> len(predictions), list(predictions.columns)[:4]
        (300, ['prediction', 'low', 'high', 'std'])
    """
    from neuboots.estimators import NeuBootsClassifier, NeuBootsRegressor

    check_fraction("max_error", max_error)
    check_fraction("test_fraction", test_fraction, zero=True)
    for name, value, minimum in (("num_samples", num_samples, 2), ("seed", seed, 0), ("epochs", epochs, 1)):
        if value is not None:
            check_int(name, value, minimum=minimum)
    if max_width is not None and not 0 < max_width < math.inf:
        raise ArgumentError("max_width", max_width, f"a positive number in the units of {target!r}")
    options = task, ignore, (0.0, test_fraction), seed, max_categories
    encoded = read_table(path, target, *options, drop_high_cardinality=True, decimal=decimal, standardize=False)
    schema, classes, train, test = encoded.schema, encoded.schema.target.classes, encoded.split == 0, encoded.split == 2
    assert encoded.x is not None, "rows are encoded"
    assert encoded.unknown is not None, "with them"
    x, y = encoded.x[train], encoded.y[train]
    if on_start is not None:
        on_start(schema, [*encoded.notes, *_find_codes(schema, x)])
    estimator_class = NeuBootsClassifier if classes else NeuBootsRegressor
    limit: dict[str, Any] = {} if epochs is None else {"epochs": epochs}
    estimator = estimator_class(method=method, num_samples=num_samples, random_state=seed, verbose=progress, **limit)
    estimator.fit(x.numpy(), y.numpy() if classes else y.numpy()[:, 0])
    held_out = torch.from_numpy(estimator.held_out_)
    inputs = estimator.inputs(x.numpy())
    if classes:
        validation = TensorDataset(inputs[held_out], y[held_out])
        rule, note = fit_reject_rule(
            estimator.predictor_, validation, max_error=max_error, num_samples=num_samples, seed=seed
        )
    elif max_width is not None:
        rule = RejectRule(width=max_width)
        note = f"the model accepts {LEVEL:.0%} intervals of at most {max_width:.4g}"
    else:
        rule = RejectRule(std=float(y.std(correction=0)))
        note = f"the model accepts standard deviations below that of the training targets, {rule.std:.4g}"
    known = encoded.unknown[train.numpy()][~held_out.numpy()]
    usual = max(0.5, float(np.quantile(known, _KNOWN_QUANTILE, method="higher")))
    rule = replace(rule, unknown=min(usual, 1 - 0.5 / len(schema.columns)))  # a row without any value is never accepted
    x_test, y_test, unknown = encoded.x[test], encoded.y[test], encoded.unknown[test.numpy()]
    counts = {"train": int((~held_out).sum()), "held out": int(held_out.sum()), "test": len(x_test)}
    card = ModelCard(schema.target.task, target, method, counts, seed, command)
    model = TabularModel(card, schema, estimator, MahalanobisScore.fit(inputs[~held_out], inputs[held_out]), rule)
    metrics: dict[str, Any] = {}
    if len(x_test):
        parts = np.split(np.arange(len(x_test)), range(_MAX_TEST_BATCH, len(x_test), _MAX_TEST_BATCH))
        batches = [RowBatch({"row": part + 1}, x_test[part], unknown=unknown[part]) for part in parts]
        table = PredictionTable.concatenate([model.predict(batch, num_samples=num_samples) for batch in batches])
        if classes:
            metrics = compute_classification_metrics(table, y_test, int(y.bincount().argmax()))
        else:
            metrics = compute_regression_metrics(table, y_test, schema.target.mean)
    return replace(model, card=replace(card, metrics={**metrics, "notes": [note]}))


def _find_codes(schema: TableSchema, x: Tensor) -> list[str]:
    """Return a note for each column that seems to number the rows, which makes every new row out of distribution, and
    for each whose numbers seem to be dates, such as 10142018."""
    notes = []
    for k, column in enumerate(schema.numbers):
        values = np.sort(x[:, k].numpy())
        integer = bool((np.abs(values - values.round()) < 0.1).all())
        dense = values[-1] - values[0] < 1.5 * len(x) and bool((np.diff(values) > 0.5).all())
        if column.kind == "number" and not column.missing and integer and dense and len(x) >= _MIN_COUNTER_ROWS:
            notes.append(f"{column.name!r} seems to number the rows; if so, exclude it")
        elif column.kind == "number" and integer and values[0] > 1e6 and _are_dates(values.astype(np.int64)):
            notes.append(f"{column.name!r} was read as numbers such as {values[0]:.0f}; write dates as 2024-02-29")
    return notes


def _are_dates(values: Array) -> bool:
    """Test whether all integers are dates as yyyymmdd, mmddyyyy or ddmmyyyy."""
    for year, rest in ((values // 10_000, values % 10_000), (values % 10_000, values // 10_000)):
        for month, day in ((rest // 100, rest % 100), (rest % 100, rest // 100)):
            valid = (year >= 1900) & (year < 2100) & (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
            if valid.all():
                return True
    return False


def compute_regression_metrics(table: PredictionTable, y: Tensor, constant: float) -> dict[str, Any]:
    """Compute the card's metrics of predicted numbers, in their units.

    Args:
        table: Predictions with intervals of level 0.95.
        y: True values (N, 1).
        constant: Mean of the training targets, as a baseline.

    Returns:
        Metrics by name.
    """
    columns, truth = table.columns, y.double().numpy()[:, 0]
    if find_not_finite(columns).any():
        raise FloatingPointError("predictions of the test rows are not finite; lower the learning rate")
    error, accepted = columns["prediction"] - truth, ~columns["abstain"]
    squares = np.square(truth - truth.mean()).sum()

    def rms(values: Array) -> float:
        return float(np.sqrt(np.square(values).mean()))

    return {
        "rmse": rms(error),
        "mae": float(np.abs(error).mean()),
        "r2": float(1 - np.square(error).sum() / squares) if squares > 0 else None,
        "level": LEVEL,
        "coverage": float(((columns["low"] <= truth) & (truth <= columns["high"])).mean()),
        "mean_width": float((columns["high"] - columns["low"]).mean()),
        "accepted": float(accepted.mean()),
        "rmse_accepted": rms(error[accepted]) if accepted.any() else None,
        "baseline_rmse": rms(constant - truth),
    }
