"""The schema of a table: what each column is, as the training rows show it, and how a row becomes numbers.

    x̂ = [ (v − mean) / std  of numbers;   1[v is missing];   1[v = category] ]

A column is numbers (dates count days), booleans (0 and 1) or categories. A missing number is set to the mean, 0 once
standardised, and marked by an indicator column if training rows lacked some. A category that the training rows do not
have is 0 in all of its columns.

What is learned from a table before a net sees it: its target, its parts, and the schema of its training rows.

Everything is gathered chunk by chunk: of a column, its mean, its spread and its categories are held; of a row, its
target and its part. Means and spreads of chunks are joined as in Chan, Golub and LeVeque, Algorithms for computing the
sample variance, The American Statistician 1983.

Tables: rows of numbers and categories, and a class or a number to predict.

    x̂ = (x − mean) / std,   ŷ = (y − mean) / std for numbers,   by the training rows alone

scikit-learn's own sets, the UCI regression sets with their 20 standard splits (Hernández-Lobato and Adams,
Probabilistic backpropagation for scalable learning of Bayesian neural networks, ICML 2015; Gal and Ghahramani, Dropout
as a Bayesian approximation, ICML 2016), and the user's CSV or Parquet file. Parts are TensorDatasets, or streams.
"""

import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from neuboots._validation import check_int
from neuboots.data._common import (
    DATA_ROOT_VARIABLE,
    CorruptFileError,
    corrupt_file_error,
    import_optional,
    not_found_error,
    resolve_data_root,
)
from neuboots.data.dataset import DatasetBundle, Standardizer, StreamingDataset
from neuboots.data.splits import train_val_test_split
from neuboots.data.table_files import TableFile, select_columns

ColumnKind = Literal["number", "boolean", "date", "text"]

_ISO_DATE = r"\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"
MAX_TEXT_LENGTH = 60  # characters of a text in a sentence
_TRUTHS = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}


@dataclass(frozen=True)
class NumericColumn:
    """A column of numbers, booleans or dates; `not_found_error`: did training rows lack some?"""

    name: str
    kind: ColumnKind
    mean: float
    std: float
    missing: bool


@dataclass(frozen=True)
class CategoricalColumn:
    """A column of texts, with those of the training rows."""

    name: str
    values: tuple[str, ...]
    missing: bool


@dataclass(frozen=True)
class TargetColumn:
    """The column to predict: one of `classes`, or a number with the mean and the std of the training rows."""

    name: str
    kind: ColumnKind
    task: Literal["classification", "regression"]
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class TableSchema:
    """How a table's rows become inputs (N, C) and targets; written beside a model as JSON, it reads new tables too.

    >>> import pandas
    >>> columns = NumericColumn("age", "number", 40.0, 10.0, True), CategoricalColumn("town", ("Bonn", "Rome"), False)
    >>> schema = TableSchema(columns[:1], columns[1:], TargetColumn("paid", "text", "classification", ("no", "yes")))
    >>> frame = pandas.DataFrame({"age": [50, None], "town": ["Rome", "Oslo"], "paid": ["yes", "no"]})
    >>> schema.encode(frame)
    tensor([[1., 0., 0., 1.],
            [0., 1., 0., 0.]])
    >>> schema.features, schema.encode_target(frame).tolist(), schema.unknown(frame)
    (('age', 'age is missing', 'town=Bonn', 'town=Rome'), [1, 0], {'town': ('Oslo',)})
    >>> TableSchema.from_json(schema.to_json()) == schema
    True
    """

    numbers: tuple[NumericColumn, ...]
    categories: tuple[CategoricalColumn, ...]
    target: TargetColumn
    excluded: tuple[str, ...] = ()  # columns without a name or a value in the training rows, and those to be ignored

    @property
    def features(self) -> tuple[str, ...]:
        """The name of each of the C inputs."""
        names = [column.name for column in self.numbers]
        names += [f"{column.name} is missing" for column in self.numbers if column.missing]
        for column in self.categories:
            names += [f"{column.name}={value}" for value in column.values]
            names += [f"{column.name} is missing"] * column.missing
        return tuple(names)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a table must have for its rows to be encoded."""
        return (*(column.name for column in self.numbers), *(column.name for column in self.categories))

    @property
    def texts(self) -> tuple[str, ...]:
        """Columns to be read as they are written: 01 is no number 1."""
        target = [self.target.name] if self.target.kind == "text" else []
        return (*(column.name for column in self.categories), *target)

    @property
    def standardizer(self) -> Standardizer:
        """Of the C inputs; what is 0 or 1 stays so."""
        others = len(self.features) - len(self.numbers)
        mean, std = ([getattr(column, name) for column in self.numbers] for name in ("mean", "std"))
        return Standardizer((*mean, *[0.0] * others), (*std, *[1.0] * others), axes=0)

    def encode(self, frame: Any) -> Tensor:
        """A pandas frame with these columns, in any order and among others, as inputs: (N, C), single precision."""
        _check_columns(frame, self.columns, "the columns that the schema was learned from")
        values = to_numbers(frame, [(column.name, column.kind) for column in self.numbers])  # (N, numbers)
        absent = np.isnan(values)
        mean, std = (np.array([getattr(column, name) for column in self.numbers]) for name in ("mean", "std"))
        scaled = np.where(absent, 0.0, (values - mean) / std)
        if (far := np.argwhere(np.abs(scaled) > np.finfo(np.float32).max)).size:
            row, k = far[0].tolist()
            raise ValueError(
                f"column {self.numbers[k].name!r} holds {values[row, k]:g} in {_row(frame, row)}, too far from the "
                f"training rows, of mean {mean[k]:g} and std {std[k]:g}, for single precision; expected a smaller one"
            )
        parts = [scaled, absent[:, [column.missing for column in self.numbers]]]
        for column in self.categories:
            codes, absent = _coded(frame[column.name], column.values)  # (N,)
            parts.append(codes[:, None] == np.arange(len(column.values)))
            if column.missing:
                parts.append(absent[:, None])
        return torch.from_numpy(np.concatenate(parts, 1, dtype=np.float32, casting="unsafe"))

    def encode_target(self, frame: Any) -> Tensor:
        """The targets of a frame: classes (N,), or standardised numbers (N, 1)."""
        y = self.read_target(frame)
        if fault := int((y.isnan() if y.is_floating_point() else y < 0).sum()):
            known = format_names(self.target.classes) if self.target.classes else "a number"
            raise ValueError(
                f"{self.target.name!r} is missing or unknown in {fault:,} of {len(frame):,} rows; expected {known}"
            )
        return y if self.target.classes else ((y - self.target.mean) / self.target.std).float()

    def read_target(self, frame: Any) -> Tensor:
        """Classes (N,), −1 where missing or unknown; or numbers (N, 1) in their units, NaN where missing."""
        name, kind = self.target.name, self.target.kind
        _check_columns(frame, [name], "a column of the target")
        if self.target.task == "regression":
            return torch.from_numpy(to_numbers(frame, [(name, kind)]))
        return torch.from_numpy(_places(to_labels(frame, name, kind), self.target.classes))

    def unknown(self, frame: Any) -> dict[str, tuple[str, ...]]:
        """Categories in a frame that the training rows did not have, by column."""
        found = {c.name: unique_texts(frame[c.name]) - {*c.values, None} for c in self.categories}
        return {name: tuple(sorted(map(str, values))) for name, values in found.items() if values}

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "TableSchema":
        try:
            read = json.loads(text)
            found = cls(
                tuple(NumericColumn(**column) for column in read["numbers"]),
                tuple(CategoricalColumn(c["name"], tuple(c["values"]), c["missing"]) for c in read["categories"]),
                TargetColumn(**{**read["target"], "classes": tuple(read["target"]["classes"])}),
                tuple(read["excluded"]),
            )
            found._check_types()
            return found
        except (ValueError, KeyError, TypeError) as fault:
            raise ValueError(
                f"got a text that is no schema ({type(fault).__name__}: {fault}); expected what to_json gave"
            ) from None

    def _check_types(self) -> None:
        """What was edited by hand may hold anything."""
        columns: tuple[NumericColumn | CategoricalColumn | TargetColumn, ...] = (
            *self.numbers,
            *self.categories,
            self.target,
        )
        texts = [column.name for column in columns]
        texts += [text for column in self.categories for text in column.values] + [*self.target.classes]
        scaled: tuple[NumericColumn | TargetColumn, ...] = (*self.numbers, self.target)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("names and categories are texts")
        for column in scaled:
            if not all(isinstance(value, int | float) for value in (column.mean, column.std)):
                raise TypeError(f"mean and std of {column.name!r} are numbers")
            if column.kind not in get_args(ColumnKind):
                raise TypeError(f"{column.name!r} is of no kind {column.kind!r}")
        if self.target.task not in ("classification", "regression"):
            raise TypeError(f"{self.target.task!r} is no task")

    def __str__(self) -> str:
        """What was made of each column."""
        target = self.target
        what = format_names(target.classes) if target.classes else f"mean {target.mean:.4g}, std {target.std:.4g}"
        lines = [f"{target.name!r} is the target: {target.task} ({what})"]
        lines += [f"{c.name!r}: {c.kind}, {_centre(c)}{_lacks(c)}" for c in self.numbers]
        lines += [
            f"{c.name!r}: {len(c.values)} categories ({format_names(c.values)}){_lacks(c)}" for c in self.categories
        ]
        return "\n".join([*lines, *[f"{name!r}: left out" for name in self.excluded]])


def _check_columns(frame: Any, names: Sequence[str], expected: str) -> None:
    if not isinstance(frame, import_optional("pandas").DataFrame):
        raise ValueError(f"got {type(frame).__name__}; expected a pandas frame with {expected}")
    if lacking := [name for name in names if name not in frame]:
        raise ValueError(f"the table lacks {format_names(lacking)}; expected {expected}")
    if twice := sorted({*frame.columns[frame.columns.duplicated()]} & {*names}):
        raise ValueError(f"the table has several columns named {format_names(twice)}; expected one of each")


def _places(texts: Sequence[str | None], values: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where each text stands among the values; −1 where it does not."""
    place = {value: k for k, value in enumerate(values)}
    return np.array([-1 if text is None else place.get(text, -1) for text in texts], dtype=np.int64)


def _coded(
    column: Any, values: Sequence[str]
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.bool_]]]:
    """Where each value of a column stands among `values`, −1 where nowhere; and whether it is missing: (N,) each."""
    rows, distinct = _distinct(column)
    texts = to_texts(distinct)
    return _places(texts, values)[rows], np.array([text is None for text in texts], dtype=bool)[rows]


def _distinct(column: Any) -> tuple[Any, Any]:
    """(the place of each row among the values, the values): of texts each one once, as it takes long to look at all.

    Others stay as they are: 1 and True are the same to pandas, and not to us.
    """
    pandas = import_optional("pandas")
    if pandas.api.types.infer_dtype(column, skipna=True) != "string":
        return slice(None), column
    rows, distinct = pandas.factorize(column, use_na_sentinel=False)
    return rows, pandas.Series(distinct)


def unique_texts(column: Any) -> set[str | None]:
    """The different texts of a column, with None if some are missing.

    >>> import pandas
    >>> sorted(unique_texts(pandas.Series(["red", " red", "blue"])))
    ['blue', 'red']
    """
    return {*to_texts(_distinct(column)[1])}


def _centre(column: NumericColumn) -> str:
    if column.kind != "date":
        return f"mean {column.mean:.4g}, std {column.std:.4g}"
    return f"mean {np.datetime64(round(column.mean), 'D')}, std {column.std:.4g} days"


def _lacks(column: NumericColumn | CategoricalColumn) -> str:
    return ", with missing values" if column.missing else ""


def format_names(names: Sequence[str], max_names: int = 8) -> str:
    """Names in one line, the first few of many.

    >>> format_names(["a", "b", "c"], 2)
    "'a', 'b' and 1 more"
    """
    more = f" and {len(names) - max_names:,} more" if len(names) > max_names else ""
    return ", ".join(map(_quoted, names[:max_names])) + more


def _quoted(text: str) -> str:
    """In quotes, and not too long for a sentence."""
    return repr(text if len(text) <= MAX_TEXT_LENGTH else f"{text[: MAX_TEXT_LENGTH - 1]}…")


# -- the values of a column ----------------------------------------------------------------------------


def infer_column_kind(column: Any) -> ColumnKind | None:
    """What a column of a pandas frame holds, if anything: numbers wherever all of it reads as numbers.

    >>> import pandas
    >>> [
    ...     infer_column_kind(pandas.Series(values))
    ...     for values in ([1, None], ["2024-02-29"], [True, None], ["7", "x"], [None])
    ... ]
    ['number', 'date', 'boolean', 'text', None]
    """
    values = column.dropna()
    if not len(values):
        return None
    if values.dtype.kind in "iuf":
        return "number"
    if values.dtype.kind in "bM":
        return "boolean" if values.dtype.kind == "b" else "date"
    if all(isinstance(value, bool | np.bool_) for value in values):
        return "boolean"
    if _numeric(values.astype(str)).notna().all():  # True is no number 1
        return "number"
    return "date" if _dates(values).notna().all() else "text"


def to_numbers(frame: Any, columns: Sequence[tuple[str, ColumnKind]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """These columns as numbers, (N, columns); missing values are nan. What is no number, or not finite, is named."""
    values = np.empty((len(frame), len(columns)))
    held = dict(zip(frame.columns, (dtype.kind for dtype in frame.dtypes), strict=True))
    plain = [kind != "date" and held[name] in ("iufb" if kind == "number" else "b") for name, kind in columns]
    names = [name for (name, _), easy in zip(columns, plain, strict=True) if easy]
    values[:, np.array(plain, dtype=bool)] = select_columns(frame, names).to_numpy(dtype=np.float64, na_value=np.nan)
    for k, (name, kind) in enumerate(columns):
        if not plain[k]:
            values[:, k] = _as_numbers(frame[name], kind)
    if (wrong := np.argwhere(np.isinf(values))).size:
        row, k = wrong[0].tolist()
        raise ValueError(
            f"column {columns[k][0]!r} holds {values[row, k]} in {_row(frame, row)}; expected finite numbers"
        )
    return values


def _numeric(values: Any) -> Any:
    """As numbers, NaN where one is none; of hundreds of digits, infinite."""
    try:
        return import_optional("pandas").to_numeric(values, errors="coerce")
    except OverflowError:
        return values.map(_float)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return math.nan


def _as_numbers(column: Any, kind: ColumnKind) -> np.ndarray[Any, np.dtype[np.float64]]:
    pandas = import_optional("pandas")
    present = column[column.notna()] if column.dtype.kind == "M" else column[column.notna()].astype(str).str.strip()
    if kind == "boolean":
        numbers = present.str.lower().map(_TRUTHS)
    elif kind == "date":
        start = pandas.Timestamp(0, tz="UTC").as_unit("us")  # nanoseconds would end with the year 2262
        numbers = (_dates(present).dt.as_unit("us") - start) / pandas.Timedelta(days=1)
    else:
        numbers = _numeric(present.astype(str))
    values = np.full(len(column), np.nan)
    values[column.notna().to_numpy()] = numbers.to_numpy(dtype=np.float64, na_value=np.nan)
    wrong = np.isnan(values) & column.notna().to_numpy()
    wrong[wrong] = column[wrong].astype(str).str.strip().ne("").to_numpy(dtype=bool)  # an empty text is a missing value
    if wrong.any():
        row, expected = int(wrong.argmax()), {"date": "a date such as 2024-02-29"}.get(kind, f"a {kind}")
        raise ValueError(
            f"column {column.name!r} holds {_quoted(str(column.iloc[row]))} in {_row(column, row)}; expected {expected}"
        )
    return values


def _dates(column: Any) -> Any:
    """Points in time; not one where something else than an ISO date is written."""
    if column.dtype.kind != "M":
        texts = column.astype(str).str.strip()
        column = texts.where(texts.str.fullmatch(_ISO_DATE))
    return import_optional("pandas").to_datetime(column, utc=True, format="ISO8601", errors="coerce")


def _row(frame: Any, place: int) -> str:
    """The row at this place, by its number in a file from 1 on, or by its label in a frame of the user's own."""
    label = frame.index[place]
    return f"row {label + 1}" if isinstance(label, int | np.integer) else f"row {label!r}"


def to_texts(column: Any) -> list[str | None]:
    """A column's values as texts, whole numbers without a decimal point; None where there is none.

    >>> import pandas
    >>> to_texts(pandas.Series([1.0, None, 2.5])), to_texts(pandas.Series([" red", ""]))
    (['1', None, '2.5'], ['red', None])
    """
    absent = column.isna()
    return [None if gone else canonical_text(value) or None for gone, value in zip(absent, column, strict=True)]


def to_labels(frame: Any, name: str, kind: ColumnKind) -> list[str | None]:
    """The classes in a column: texts, True and False, or numbers as they are called; None where there is none.

    >>> import pandas
    >>> to_labels(pandas.DataFrame({"paid": ["TRUE", "false", None]}), "paid", "boolean")
    ['True', 'False', None]
    """
    if kind == "text":
        return to_texts(frame[name])
    called: Callable[[float], str] = canonical_text if kind == "number" else lambda value: str(bool(value))
    return [None if np.isnan(value) else called(value) for value in to_numbers(frame, [(name, kind)])[:, 0].tolist()]


def canonical_text(value: Any) -> str:
    """A value as it is called: a whole number is called the same, whether a column holds whole numbers alone or not."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


MAX_INTEGER_CLASSES = 20  # that are taken for classes
_MONEY = r"(?:[$€£¥]|EUR|USD|GBP|CHF)"
NUMBER_LIKE = rf"[-+]?(?:{_MONEY} ?)?[-+]?[\d.,'/:\s-]*\d(?:[eE][-+]?\d+)?(?: ?(?:%|{_MONEY}))?"
"""What somebody may have meant as a number or a date."""
Values = np.ndarray[Any, np.dtype[np.float64]]

# -- parts ---------------------------------------------------------------------------------------------


# -- the target ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TargetValues:
    """The targets of all rows (n,): numbers, or places in `classes`."""

    name: str
    kind: ColumnKind
    task: Literal["classification", "regression"]
    values: Tensor
    classes: tuple[str, ...] = ()


def infer_target(file: TableFile, name: str, kind: ColumnKind | None, task: str | None) -> TargetValues:
    """The column to predict, and whether it holds classes or numbers: what `task` says, else what it looks like."""
    if kind is None or kind == "date":
        what = "no value" if kind is None else "dates"
        raise ValueError(f"got target {name!r} with {what} in {file.path}; expected classes or numbers")
    if kind == "text" and task == "regression":
        raise ValueError(f"got target {name!r} of texts in {file.path} for a regression; expected numbers")
    if kind == "number" or task == "regression":
        values = _target_numbers(file, name, kind)
        distinct = np.unique(values)
        few = len(distinct) <= max(2, min(MAX_INTEGER_CLASSES, len(values) // 5))
        if task == "regression" or (task is None and not (few and bool((distinct == distinct.round()).all()))):
            if len(distinct) < 2:
                raise ValueError(f"got target {name!r} that is {distinct[0]:g} in every row; expected it to vary")
            return TargetValues(name, kind, "regression", torch.from_numpy(values))
        if np.abs(distinct).max() > 2**53:
            raise ValueError(
                f"got target {name!r} with classes that are whole numbers beyond 2^53, which cannot be told apart; "
                "expected smaller numbers, or texts"
            )
        codes, classes = np.searchsorted(distinct, values), tuple(canonical_text(float(value)) for value in distinct)
    else:
        codes, classes = _target_classes(file, name, kind)
    n = len(codes)
    if n < 2:
        raise ValueError(f"got {file.path} with a single row; expected more, to train, to validate and to test with")
    if len(classes) < 2:
        raise ValueError(f"got target {name!r} with the one class {classes[0]!r}; expected at least two")
    if len(classes) > max(10, n // 2):
        raise _too_many(name, classes, n)
    return TargetValues(name, kind, "classification", torch.from_numpy(codes), classes)


def _target_numbers(file: TableFile, name: str, kind: ColumnKind) -> Values:
    values = np.concatenate([to_numbers(frame, [(name, kind)])[:, 0] for frame in file.frames([name], checked=True)])
    _check_present(file, name, np.isnan(values))
    return values


def _target_classes(
    file: TableFile, name: str, kind: ColumnKind
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], tuple[str, ...]]:
    place: dict[str | None, int] = {None: -1}
    found, n = [], 0
    for frame in file.frames([name], texts=[name] if kind == "text" else [], checked=True):
        texts, n = to_labels(frame, name, kind), n + len(frame)
        found.append(np.array([place.setdefault(text, len(place) - 1) for text in texts], dtype=np.int64))
        if len(place) > max(1000, n // 2):  # before every row of a column of names is held
            raise _too_many(name, [text for text in place if text], n)
    codes = np.concatenate(found)
    _check_present(file, name, codes < 0)
    del place[None]
    classes = sorted(map(str, place))
    return np.array([classes.index(text) for text in map(str, place)])[codes], tuple(classes)


def _check_present(file: TableFile, name: str, absent: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    if absent.any():
        raise ValueError(
            f"got target {name!r} that is missing in {int(absent.sum()):,} of {len(absent):,} rows of {file.path}, "
            f"first in row {int(absent.argmax()) + 1}; expected it in every row: fill it in, or remove these rows"
        )


def _too_many(name: str, classes: Any, n: int) -> ValueError:
    return ValueError(
        f"got target {name!r} with {len(classes):,} different values in {n:,} rows, such as {format_names(classes[:3])}; "
        "expected classes that come more than once, or numbers such as 1.5 for a regression: choose another target"
    )


# -- the schema ----------------------------------------------------------------------------------------


@dataclass
class _Moments:
    """Of each of k columns, over the rows so far: how many there are, their mean and spread, the least and the most."""

    k: int

    def __post_init__(self) -> None:
        self.rows = 0
        self.count, self.mean, self.squares = np.zeros(self.k), np.zeros(self.k), np.zeros(self.k)
        self.low, self.high = np.full(self.k, np.inf), np.full(self.k, -np.inf)

    def add(self, values: Values) -> None:
        """values (N, k); nan is missing."""
        absent = np.isnan(values)
        count = (~absent).sum(0)
        total = self.count + count
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large shows in the end
            mean = np.where(absent, 0.0, values).sum(0) / np.maximum(count, 1)
            squares = np.square(np.where(absent, 0.0, values - mean)).sum(0)
            apart, weight = mean - self.mean, count / np.maximum(total, 1)
            self.squares += squares + np.square(apart) * self.count * weight
            self.mean = self.mean + apart * weight
        self.low = np.minimum(self.low, np.where(absent, np.inf, values).min(0, initial=np.inf))
        self.high = np.maximum(self.high, np.where(absent, -np.inf, values).max(0, initial=-np.inf))
        self.count, self.rows = total, self.rows + len(values)

    def standard(self, names: Sequence[str]) -> tuple[Values, Values]:
        """Mean and std; a constant, whose computed spread would be mere rounding, is only shifted."""
        with np.errstate(invalid="ignore"):
            std = np.sqrt(self.squares / np.maximum(self.count, 1))
        constant = self.low == self.high
        if (wrong := ~constant & ~np.isfinite(std)).any():
            raise ValueError(
                f"column {names[int(wrong.argmax())]!r} holds numbers too large to square; expected smaller"
            )
        return np.where(constant, self.low, self.mean), np.where(constant | (std == 0), 1.0, std)


def fit_standardizer(x: Tensor, names: Sequence[str]) -> Standardizer:
    """That of the columns of x (n, C); the names are for a sentence.

    >>> fit_standardizer(torch.tensor([[1.0, 123456.789], [3.0, 123456.789]], dtype=torch.float64), "ab").std
    (1.0, 1.0)
    """
    moments = _Moments(x.shape[1])
    moments.add(x.double().numpy())
    mean, std = moments.standard(names)
    return Standardizer(tuple(mean.tolist()), tuple(std.tolist()), axes=0)


def infer_schema(
    file: TableFile,
    kinds: Mapping[str, ColumnKind | None],
    target: TargetValues,
    train: Tensor,
    max_categories: int,
    *,
    drop_high_cardinality: bool = False,
) -> TableSchema:
    """The schema of the rows where `train` (n,) is true; at most so many categories a column.

    A column of more texts is refused, or left out; one that seems to be numbers or dates is never left out.
    """
    texts = {name: set[str | None]() for name, kind in kinds.items() if kind == "text"}
    columns = [(name, kind) for name, kind in kinds.items() if kind is not None and kind != "text"]
    moments, start = _Moments(len(columns)), 0
    dropped: ValueError | None = None
    for frame in file.frames([target.name, *texts, *(name for name, _ in columns)], texts=texts, checked=True):
        chosen, start = train[start : start + len(frame)].numpy(), start + len(frame)
        moments.add(to_numbers(frame, columns)[chosen])
        for name, found in list(texts.items()):
            found |= unique_texts(frame[name][chosen])
            if len(found - {None}) > max_categories:
                dropped = _no_category(file, name, frame[name], max_categories)
                if not drop_high_cardinality or _seem_numbers(frame[name]):
                    raise dropped
                del texts[name]
    mean, std = moments.standard([name for name, _ in columns])
    present, lacks = moments.count > 0, moments.count < moments.rows
    numbers = [
        NumericColumn(name, kind, float(mean[k]), float(std[k]), bool(lacks[k]))
        for k, (name, kind) in enumerate(columns)
        if present[k]
    ]
    categories = [
        CategoricalColumn(name, tuple(sorted(filter(None, found))), None in found)
        for name, found in texts.items()
        if found - {None}
    ]
    if not numbers and not categories:
        raise dropped or ValueError(
            f"got {file.path} with no column but the target that has values; expected some to learn from"
        )
    used = {target.name, *(number.name for number in numbers), *(category.name for category in categories)}
    left_out = tuple(name or "(no name)" for name in file.names if name not in used)
    what = TargetColumn(target.name, target.kind, target.task, target.classes)
    if not target.classes:
        scale = fit_standardizer(target.values[train][:, None], [target.name])
        what = replace(what, mean=scale.mean[0], std=scale.std[0])
    return TableSchema(tuple(numbers), tuple(categories), what, left_out)


def _seem_numbers(column: Any) -> bool:
    """Are most of these texts figures, such as 1,5 or 28.2.2024?"""
    return bool(column.dropna().astype(str).str.strip().str.fullmatch(NUMBER_LIKE).mean() > 0.5)


def _no_category(file: TableFile, name: str, column: Any, most: int) -> ValueError:
    pandas = import_optional("pandas")
    texts = column.dropna()
    odd = texts[pandas.to_numeric(texts, errors="coerce").isna()]
    numeric = len(odd) < len(texts) / 2
    hint = f"; most of it are numbers, but not {format_names([str(odd.iloc[0])])}" if numeric and len(odd) else ""
    return ValueError(
        f"column {name!r} of {file.path} has more than {most} different texts, such as "
        f"{format_names([str(text) for text in texts.unique()[:3]])}{hint}; expected categories: leave it out with "
        f"ignore=[{name!r}], raise max_categories, or write numbers as 1.5 and dates as 2024-02-29"
    )


UCI_DATASETS = ("boston", "concrete", "energy", "power", "wine_red", "yacht")

# -- scikit-learn's ------------------------------------------------------------------------------------


def load_diabetes(root: Path | None, *, val_fraction: float, seed: int, streaming: bool) -> DatasetBundle:
    """442 patients, 10 measurements, the progress of the disease a year later; a fifth is for the test.

    >>> data = load_diabetes(None, val_data=0.1, seed=0, streaming=False)
    >>> data
    DataSet('diabetes', regression, numbers, 10 channels; train 319, validation 35, test 88)
    >>> x, y = data.test[0]
    >>> x.shape, bool(25 <= data.target.inverse(y) <= 346)
    (torch.Size([10]), True)
    """
    return _shipped("diabetes", val_fraction=val_fraction, seed=seed, streaming=streaming, scaled=False)


def load_breast_cancer(root: Path | None, *, val_fraction: float, seed: int, streaming: bool) -> DatasetBundle:
    """569 tumours, 30 measurements, malignant or benign; a fifth is for the test."""
    return _shipped("breast_cancer", val_fraction=val_fraction, seed=seed, streaming=streaming)


def load_wine(root: Path | None, *, val_fraction: float, seed: int, streaming: bool) -> DatasetBundle:
    """178 wines, 13 measurements, three growers; a fifth is for the test."""
    return _shipped("wine", val_fraction=val_fraction, seed=seed, streaming=streaming)


def _shipped(name: str, *, val_fraction: float, seed: int, streaming: bool, **options: bool) -> DatasetBundle:
    bunch = getattr(import_optional("sklearn.datasets"), f"load_{name}")(**options)
    x, y = torch.from_numpy(bunch.data), torch.from_numpy(bunch.target)
    classes = tuple(str(label) for label in bunch.get("target_names", ()))
    part = train_val_test_split(
        len(x), _share("validation", val_fraction), 0.2, seed=seed, strata=y if classes else None
    )
    return _build_numeric(name, x, y, part, classes, streaming)


# -- UCI -----------------------------------------------------------------------------------------------


def load_uci(
    name: str, root: str | Path | None, *, split: int = 0, val_fraction: float, seed: int, streaming: bool
) -> DatasetBundle:
    """A UCI regression set with one of its 20 standard test splits, from root/uci/<name>.csv (target y) and
    root/uci/<name>.test_splits.json: {"0": [rows of the test part], …}.

    The rows for validation are a share of those that are not for the test.
    """
    x, y, test = read_uci(name, root, split=split)
    part = train_val_test_split(len(x), _share("validation", val_fraction), test, seed=seed)
    return _build_numeric(name, x, y, part, (), streaming)


def read_uci(name: str, root: str | Path | None, *, split: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x (n, C) and y (n, 1) of a UCI set as its file has them, and the numbers of the rows for the test."""
    if name not in UCI_DATASETS:
        raise ValueError(f"got the UCI set {name!r}; expected one of {', '.join(UCI_DATASETS)}")
    folder = resolve_data_root(root)
    file, splits = (Path(folder or "<data root>", "uci", f"{name}.{end}") for end in ("csv", "test_splits.json"))
    if not (file.is_file() and splits.is_file()):
        none = [] if folder else [f"no data root, since neither root=… nor the variable {DATA_ROOT_VARIABLE} was given"]
        how = (
            f"put {file.name}, with the features and the target y, and {splits.name}, with the numbers of the test "
            f"rows of each split from 0 on, into the folder uci of a data root, and give it as root=… or in {DATA_ROOT_VARIABLE}"
        )
        raise not_found_error(name, none or [path for path in (file, splits) if not path.is_file()], how)
    frame = import_optional("pandas").concat(list(TableFile.open(file).frames()))
    if "y" not in frame or len(frame.columns) < 2:
        raise corrupt_file_error(file, f"its columns are {format_names(list(frame))}, and not features and y")
    if any(dtype.kind not in "iuf" for dtype in frame.dtypes) or not np.isfinite(values := frame.to_numpy(float)).all():
        raise corrupt_file_error(file, "it holds something else than finite numbers")
    x, y = (torch.from_numpy(values[:, chosen]) for chosen in (frame.columns != "y", frame.columns == "y"))
    return x, y, _test_rows(splits, check_int("split", split), len(frame))


def _test_rows(file: Path, split: int, n: int) -> Tensor:
    try:
        splits = json.loads(file.read_text(encoding="utf-8"))
        rows = {int(number): torch.tensor(rows) for number, rows in splits.items()}
    except (ValueError, TypeError, AttributeError, RuntimeError):
        raise corrupt_file_error(file, 'it is not {"0": [row numbers], …} as JSON') from None
    if split not in rows:
        raise ValueError(f"got split={split}; expected one of 0 … {len(rows) - 1}, the splits in {file}")
    test = rows[split]
    good = test.ndim == 1 and not test.is_floating_point() and 0 < len({*test.tolist()}) == len(test) < n
    if not good or not 0 <= int(test.min()) <= int(test.max()) < n:
        raise corrupt_file_error(file, f"split {split} is no list of different rows among 0 … {n - 1}")
    return test


def _build_numeric(
    name: str, x: Tensor, y: Tensor, part: Tensor, classes: tuple[str, ...], streaming: bool
) -> DatasetBundle:
    """A set of x (n, C) and y, in double precision, standardised by the rows of part 0."""
    normalisation = fit_standardizer(x[part == 0], [f"{name}, column {k}" for k in range(x.shape[1])])
    target = None if classes else fit_standardizer(y.reshape(-1, 1)[part == 0], [f"{name}, target"])
    x, y = normalisation(x).float(), y.long() if target is None else target(y.reshape(-1, 1)).float()
    parts = [_in_memory(x[part == k], y[part == k], streaming) for k in range(3)]
    return _data_set(name, parts, part, classes, normalisation, target)


def _data_set(
    name: str,
    parts: Sequence[Any],
    part: Tensor,
    classes: tuple[str, ...],
    normalisation: Standardizer,
    target: Standardizer | None,
    schema: TableSchema | None = None,
) -> DatasetBundle:
    train, validation, test = (data if bool((part == k).any()) else None for k, data in enumerate(parts))
    assert train is not None, "deal leaves rows to train with"
    return DatasetBundle(
        name,
        "classification" if classes else "regression",
        train,
        validation,
        test,
        channels=len(normalisation.mean),
        classes=classes,
        standardizer=normalisation,
        target=None if classes else target,
        schema=schema,
    )


def _in_memory(x: Tensor, y: Tensor, streaming: bool) -> TensorDataset | StreamingDataset:
    return StreamingDataset(partial(zip, x, y)) if streaming else TensorDataset(x, y)


def _share(name: str, share: Any) -> float:
    number = math.nan if isinstance(share, bool) or not isinstance(share, Real) else float(share)
    if not 0 <= number < 1:
        raise ValueError(f"got {name}={share!r}; expected a share of the rows from 0 to below 1")
    return number


# -- the user's own ------------------------------------------------------------------------------------


def load_table(
    path: str | Path,
    *,
    target: str,
    task: Literal["classification", "regression"] | None = None,
    ignore: Sequence[str] = (),
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    seed: int = 0,
    max_categories: int = 256,
    drop_high_cardinality: bool = False,
    streaming: bool = False,
) -> DatasetBundle:
    """The rows of a CSV or Parquet file, to predict the column `target` from all others but those to `ignore`.

    Numbers, booleans and dates (2024-02-29, with or without a time; as days) are standardised, texts become a column of
    0 and 1 for each category; see `neuboots.data.tabular` for missing values and unknown categories. A column of more
    than `max_categories` texts is refused or, with `leave_out_texts`, left out. Of the target, texts, booleans and
    at most 20 different whole numbers, each at least five times on average, are taken for classes (two whole numbers
    always); other numbers for a regression; `task` overrides that. `test` is a share of the rows, `validation` one of
    the rest, the same of every class, and every class stays among the training rows.

    The set's `schema`, printed, says what was made of each column; its `encode(frame)` gives the inputs of new rows.
    With `streaming`, rows are read from the file at each pass, a chunk at a time and in its order: a file that is
    sorted should be shuffled before. What is held of a row is a byte, for its part.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "pets.csv")
    >>> lines = [f"{20 + i},{'short' if i % 2 else 'long'},{'dog' if i % 3 else 'cat'}" for i in range(30)]
    >>> _ = file.write_text("\\n".join(["weight,hair,kind", *lines]), encoding="utf-8")
    >>> data = load_table(file, target="kind")
    >>> data, data.classes
    (DataSet('pets', classification, 2 classes, 3 channels; train 24, validation 3, test 3), ('cat', 'dog'))
    >>> data.schema.features
    ('weight', 'hair=long', 'hair=short')
    """
    if task not in (None, "classification", "regression"):
        raise ValueError(f"got task={task!r}; expected 'classification', 'regression', or None to decide by the target")
    shares = _share("validation", val_fraction), _share("test", test_fraction)
    most = check_int("max_categories", max_categories, minimum=2)
    file = TableFile.open(path)
    kinds = _kinds(file, target, ignore)
    found = infer_target(file, target, kinds.pop(target), task)
    part = train_val_test_split(len(found.values), *shares, seed=seed, strata=found.values if found.classes else None)
    schema = infer_schema(file, kinds, found, part == 0, most, drop_high_cardinality=drop_high_cardinality)
    if streaming:
        parts: list[Any] = [StreamingDataset(partial(_rows, file, schema, part, k)) for k in range(3)]
    else:
        parts = [TensorDataset(*tensors) for tensors in _encoded(file, schema, part)]
    scale = Standardizer((schema.target.mean,), (schema.target.std,), axes=0)
    return _data_set(file.path.stem, parts, part, found.classes, schema.standardizer, scale, schema)


def encode_file(path: str | Path, schema: TableSchema) -> Iterator[Tensor]:
    """The rows of a new file as inputs (N, C), chunk by chunk; it need not have the target."""
    for frame in TableFile.open(path).frames(schema.columns, texts=schema.texts):
        yield schema.encode(frame)


def _kinds(file: TableFile, target: str, ignore: Sequence[str]) -> dict[str, ColumnKind | None]:
    """What each column holds that is used, target and all; None for one without a value."""
    if isinstance(ignore, str):
        raise ValueError(f"got ignore={ignore!r}; expected a list of names: give [{ignore!r}]")
    for name in (target, *ignore):
        if name not in file.names or not name:
            close = difflib.get_close_matches(str(name), file.names, n=len(file.names), cutoff=0.0)
            raise ValueError(
                f"got {name!r}, which is no column of {file.path}; expected one of {format_names(close, 20)}: its first line "
                "must hold the names"
            )
    if target in ignore:
        raise ValueError(f"got {target!r} both to predict and to ignore; expected it once")
    kinds: dict[str, ColumnKind | None] = {name: None for name in file.names if name and name not in ignore}
    if len(kinds) < 2:
        raise ValueError(f"got {file.path} with no column but the target {target!r}; expected some to learn from")
    for frame in file.frames(kinds):
        numeric = [name for name, dtype in zip(frame.columns, frame.dtypes, strict=True) if dtype.kind in "iuf"]
        values = select_columns(frame, numeric).to_numpy(dtype=np.float64, na_value=np.nan)
        empty = dict(zip(numeric, np.isnan(values).all(0).tolist(), strict=True))
        for name, known in kinds.items():
            kind: ColumnKind | None = (
                (None if empty[name] else "number") if name in empty else infer_column_kind(frame[name])
            )
            kinds[name] = known if kind is None else kind if known in (None, kind) else "text"
    return kinds


def _chunks(file: TableFile, schema: TableSchema, n: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Inputs and targets, and which rows they are."""
    start = 0
    for frame in file.frames((*schema.columns, schema.target.name), texts=schema.texts, checked=True):
        rows = slice(start, start := start + len(frame))
        if start > n:
            break
        yield rows, schema.encode(frame), schema.encode_target(frame)
    if start != n:
        raise CorruptFileError(
            f"{file.path} has no longer the {n:,} rows that it had; expected it not to change: load it again"
        )


def _encoded(file: TableFile, schema: TableSchema, part: Tensor) -> list[tuple[Tensor, Tensor]]:
    """x and y of each part, filled chunk by chunk: nothing is held twice."""
    classes, sizes = schema.target.classes, [int((part == k).sum()) for k in range(3)]
    xs = [torch.empty(size, len(schema.features)) for size in sizes]
    ys = [torch.empty(size, dtype=torch.int64) if classes else torch.empty(size, 1) for size in sizes]
    filled = [0, 0, 0]
    for rows, x, y in _chunks(file, schema, len(part)):
        for k in range(3):
            chosen = part[rows] == k
            place = slice(filled[k], filled[k] + int(chosen.sum()))
            xs[k][place], ys[k][place], filled[k] = x[chosen], y[chosen], place.stop
    return list(zip(xs, ys, strict=True))


def _rows(file: TableFile, schema: TableSchema, part: Tensor, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of part k, one after the other."""
    for rows, x, y in _chunks(file, schema, len(part)):
        chosen = part[rows] == k
        yield from zip(x[chosen], y[chosen], strict=True)
