"""The schema of a table: what each column is, as the training rows show it, and how a row becomes numbers.

    x̂ = [ (v − mean) / std  of numbers;   1[v is missing];   1[v = category] ]

A column is numbers (dates count days), booleans (0 and 1) or categories. A missing number is set to the mean, 0 once
standardised, and marked by an indicator column if training rows lacked some. A category that the training rows do not
have is 0 in all of its columns.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from neuboots.data.sets import Normalisation
from neuboots.data.sources import need
from neuboots.data.table_files import columns_of

Kind = Literal["number", "boolean", "date", "text"]

_ISO_DATE = r"\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"
LONGEST = 60  # characters of a text in a sentence
_TRUTHS = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}


@dataclass(frozen=True)
class Number:
    """A column of numbers, booleans or dates; `missing`: did training rows lack some?"""

    name: str
    kind: Kind
    mean: float
    std: float
    missing: bool


@dataclass(frozen=True)
class Category:
    """A column of texts, with those of the training rows."""

    name: str
    values: tuple[str, ...]
    missing: bool


@dataclass(frozen=True)
class Target:
    """The column to predict: one of `classes`, or a number with the mean and the std of the training rows."""

    name: str
    kind: Kind
    task: Literal["classification", "regression"]
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Schema:
    """How a table's rows become inputs (N, C) and targets; written beside a model as JSON, it reads new tables too.

    >>> import pandas
    >>> columns = Number("age", "number", 40.0, 10.0, True), Category("town", ("Bonn", "Rome"), False)
    >>> schema = Schema(columns[:1], columns[1:], Target("paid", "text", "classification", ("no", "yes")))
    >>> frame = pandas.DataFrame({"age": [50, None], "town": ["Rome", "Oslo"], "paid": ["yes", "no"]})
    >>> schema.encode(frame)
    tensor([[1., 0., 0., 1.],
            [0., 1., 0., 0.]])
    >>> schema.features, schema.encode_target(frame).tolist(), schema.unknown(frame)
    (('age', 'age is missing', 'town=Bonn', 'town=Rome'), [1, 0], {'town': ('Oslo',)})
    >>> Schema.from_json(schema.to_json()) == schema
    True
    """

    numbers: tuple[Number, ...]
    categories: tuple[Category, ...]
    target: Target
    left_out: tuple[str, ...] = ()  # columns without a name or a value in the training rows, and those to be ignored

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
    def normalisation(self) -> Normalisation:
        """Of the C inputs; what is 0 or 1 stays so."""
        others = len(self.features) - len(self.numbers)
        mean, std = ([getattr(column, name) for column in self.numbers] for name in ("mean", "std"))
        return Normalisation((*mean, *[0.0] * others), (*std, *[1.0] * others), axes=0)

    def encode(self, frame: Any) -> Tensor:
        """A pandas frame with these columns, in any order and among others, as inputs: (N, C), single precision."""
        _check_columns(frame, self.columns, "the columns that the schema was learned from")
        values = numbers_of(frame, [(column.name, column.kind) for column in self.numbers])  # (N, numbers)
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
            known = listed(self.target.classes) if self.target.classes else "a number"
            raise ValueError(
                f"{self.target.name!r} is missing or unknown in {fault:,} of {len(frame):,} rows; expected {known}"
            )
        return y if self.target.classes else ((y - self.target.mean) / self.target.std).float()

    def read_target(self, frame: Any) -> Tensor:
        """Classes (N,), −1 where missing or unknown; or numbers (N, 1) in their units, NaN where missing."""
        name, kind = self.target.name, self.target.kind
        _check_columns(frame, [name], "a column of the target")
        if self.target.task == "regression":
            return torch.from_numpy(numbers_of(frame, [(name, kind)]))
        return torch.from_numpy(_places(labels_of(frame, name, kind), self.target.classes))

    def unknown(self, frame: Any) -> dict[str, tuple[str, ...]]:
        """Categories in a frame that the training rows did not have, by column."""
        found = {c.name: distinct_texts(frame[c.name]) - {*c.values, None} for c in self.categories}
        return {name: tuple(sorted(map(str, values))) for name, values in found.items() if values}

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Schema":
        try:
            read = json.loads(text)
            found = cls(
                tuple(Number(**column) for column in read["numbers"]),
                tuple(Category(c["name"], tuple(c["values"]), c["missing"]) for c in read["categories"]),
                Target(**{**read["target"], "classes": tuple(read["target"]["classes"])}),
                tuple(read["left_out"]),
            )
            found._check_types()
            return found
        except (ValueError, KeyError, TypeError) as fault:
            raise ValueError(
                f"got a text that is no schema ({type(fault).__name__}: {fault}); expected what to_json gave"
            ) from None

    def _check_types(self) -> None:
        """What was edited by hand may hold anything."""
        columns: tuple[Number | Category | Target, ...] = (*self.numbers, *self.categories, self.target)
        texts = [column.name for column in columns]
        texts += [text for column in self.categories for text in column.values] + [*self.target.classes]
        scaled: tuple[Number | Target, ...] = (*self.numbers, self.target)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("names and categories are texts")
        for column in scaled:
            if not all(isinstance(value, int | float) for value in (column.mean, column.std)):
                raise TypeError(f"mean and std of {column.name!r} are numbers")
            if column.kind not in get_args(Kind):
                raise TypeError(f"{column.name!r} is of no kind {column.kind!r}")
        if self.target.task not in ("classification", "regression"):
            raise TypeError(f"{self.target.task!r} is no task")

    def __str__(self) -> str:
        """What was made of each column."""
        target = self.target
        what = listed(target.classes) if target.classes else f"mean {target.mean:.4g}, std {target.std:.4g}"
        lines = [f"{target.name!r} is the target: {target.task} ({what})"]
        lines += [f"{c.name!r}: {c.kind}, {_centre(c)}{_lacks(c)}" for c in self.numbers]
        lines += [f"{c.name!r}: {len(c.values)} categories ({listed(c.values)}){_lacks(c)}" for c in self.categories]
        return "\n".join([*lines, *[f"{name!r}: left out" for name in self.left_out]])


def _check_columns(frame: Any, names: Sequence[str], expected: str) -> None:
    if not isinstance(frame, need("pandas").DataFrame):
        raise ValueError(f"got {type(frame).__name__}; expected a pandas frame with {expected}")
    if lacking := [name for name in names if name not in frame]:
        raise ValueError(f"the table lacks {listed(lacking)}; expected {expected}")
    if twice := sorted({*frame.columns[frame.columns.duplicated()]} & {*names}):
        raise ValueError(f"the table has several columns named {listed(twice)}; expected one of each")


def _places(texts: Sequence[str | None], values: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where each text stands among the values; −1 where it does not."""
    place = {value: k for k, value in enumerate(values)}
    return np.array([-1 if text is None else place.get(text, -1) for text in texts], dtype=np.int64)


def _coded(
    column: Any, values: Sequence[str]
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.bool_]]]:
    """Where each value of a column stands among `values`, −1 where nowhere; and whether it is missing: (N,) each."""
    rows, distinct = _distinct(column)
    texts = texts_of(distinct)
    return _places(texts, values)[rows], np.array([text is None for text in texts], dtype=bool)[rows]


def _distinct(column: Any) -> tuple[Any, Any]:
    """(the place of each row among the values, the values): of texts each one once, as it takes long to look at all.

    Others stay as they are: 1 and True are the same to pandas, and not to us.
    """
    pandas = need("pandas")
    if pandas.api.types.infer_dtype(column, skipna=True) != "string":
        return slice(None), column
    rows, distinct = pandas.factorize(column, use_na_sentinel=False)
    return rows, pandas.Series(distinct)


def distinct_texts(column: Any) -> set[str | None]:
    """The different texts of a column, with None if some are missing.

    >>> import pandas
    >>> sorted(distinct_texts(pandas.Series(["red", " red", "blue"])))
    ['blue', 'red']
    """
    return {*texts_of(_distinct(column)[1])}


def _centre(column: Number) -> str:
    if column.kind != "date":
        return f"mean {column.mean:.4g}, std {column.std:.4g}"
    return f"mean {np.datetime64(round(column.mean), 'D')}, std {column.std:.4g} days"


def _lacks(column: Number | Category) -> str:
    return ", with missing values" if column.missing else ""


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names in one line, the first few of many.

    >>> listed(["a", "b", "c"], 2)
    "'a', 'b' and 1 more"
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(_quoted, names[:most])) + more


def _quoted(text: str) -> str:
    """In quotes, and not too long for a sentence."""
    return repr(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…")


# -- the values of a column ----------------------------------------------------------------------------


def kind_of(column: Any) -> Kind | None:
    """What a column of a pandas frame holds, if anything: numbers wherever all of it reads as numbers.

    >>> import pandas
    >>> [kind_of(pandas.Series(values)) for values in ([1, None], ["2024-02-29"], [True, None], ["7", "x"], [None])]
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


def numbers_of(frame: Any, columns: Sequence[tuple[str, Kind]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """These columns as numbers, (N, columns); missing values are nan. What is no number, or not finite, is named."""
    values = np.empty((len(frame), len(columns)))
    held = dict(zip(frame.columns, (dtype.kind for dtype in frame.dtypes), strict=True))
    plain = [kind != "date" and held[name] in ("iufb" if kind == "number" else "b") for name, kind in columns]
    names = [name for (name, _), easy in zip(columns, plain, strict=True) if easy]
    values[:, np.array(plain, dtype=bool)] = columns_of(frame, names).to_numpy(dtype=np.float64, na_value=np.nan)
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
        return need("pandas").to_numeric(values, errors="coerce")
    except OverflowError:
        return values.map(_float)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return math.nan


def _as_numbers(column: Any, kind: Kind) -> np.ndarray[Any, np.dtype[np.float64]]:
    pandas = need("pandas")
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
    return need("pandas").to_datetime(column, utc=True, format="ISO8601", errors="coerce")


def _row(frame: Any, place: int) -> str:
    """The row at this place, by its number in a file from 1 on, or by its label in a frame of the user's own."""
    label = frame.index[place]
    return f"row {label + 1}" if isinstance(label, int | np.integer) else f"row {label!r}"


def texts_of(column: Any) -> list[str | None]:
    """A column's values as texts, whole numbers without a decimal point; None where there is none.

    >>> import pandas
    >>> texts_of(pandas.Series([1.0, None, 2.5])), texts_of(pandas.Series([" red", ""]))
    (['1', None, '2.5'], ['red', None])
    """
    absent = column.isna()
    return [None if gone else text_of(value) or None for gone, value in zip(absent, column, strict=True)]


def labels_of(frame: Any, name: str, kind: Kind) -> list[str | None]:
    """The classes in a column: texts, True and False, or numbers as they are called; None where there is none.

    >>> import pandas
    >>> labels_of(pandas.DataFrame({"paid": ["TRUE", "false", None]}), "paid", "boolean")
    ['True', 'False', None]
    """
    if kind == "text":
        return texts_of(frame[name])
    called: Callable[[float], str] = text_of if kind == "number" else lambda value: str(bool(value))
    return [None if np.isnan(value) else called(value) for value in numbers_of(frame, [(name, kind)])[:, 0].tolist()]


def text_of(value: Any) -> str:
    """A value as it is called: a whole number is called the same, whether a column holds whole numbers alone or not."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()
