"""Tables: reading of files, inference of a schema, encoding of rows as numbers, and the tables of scikit-learn and UCI.

    x̂ = [ (v − mean) / std  of numbers;   1[v is missing];   1[v = category] ]

A column has numbers (dates count days), Booleans (0 and 1) or categories. A missing number is imputed by the mean and
marked by an indicator column, if training rows have missing values. A category that no training row has is encoded by
zeros. All statistics are those of the training rows.

A file is CSV, Parquet or JSON Lines. A CSV file is UTF-8 with column names in its first line; its separator (comma,
semicolon, tab or bar) and its decimal sign are detected. Empty fields, "?" and the other strings in `MISSING_VALUES`
are missing values; "None" is a class if the target has texts. JSON Lines have an object on each line, whose keys are
the columns. The path "-" is standard input, which is copied to a temporary file, as is a named pipe.

What a file may mean otherwise is counted in `TableFile.notes`: rows that are too short and lack their last values,
blank lines of one column, a quoted text with line breaks and separators like those of rows, keys that first occur after
thousands of lines and are ignored. A row that is too long, a quote that is never closed, a repeated line of column
names and a number that may be 1.05 or 1050 are errors.

A file is read once to infer the schema and to encode its rows; a stream reads it twice to infer the schema and once per
epoch. Means and variances of chunks are combined by scikit-learn. The UCI regression data sets come with 20 standard
splits (Hernández-Lobato and Adams, Probabilistic backpropagation for scalable learning of Bayesian neural networks,
ICML 2015; Gal and Ghahramani, Dropout as a Bayesian approximation, ICML 2016).
"""

import csv
import difflib
import io
import json
import math
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from neuboots._validation import (
    ArgumentError,
    check_choice,
    check_fraction,
    check_int,
    check_memory,
    check_types,
    format_names,
    import_optional,
)
from neuboots.data._common import (
    DATA_ROOT_VARIABLE,
    NO_DATA_ROOT,
    CorruptFileError,
    DatasetNotFoundError,
    first_line,
    resolve_data_root,
)
from neuboots.data.dataset import DatasetBundle, LoadOptions, Standardizer, StreamingDataset, Task
from neuboots.loading import TEST, TRAIN, VALIDATION, train_val_test_split

TableFormat = Literal["csv", "parquet", "json lines"]
ColumnKind = Literal["number", "boolean", "date", "text"]

MAX_CHUNK_CELLS = 1 << 22  # 32 MiB of numbers
MAX_CHUNK_ROWS = 1 << 14  # one-hot encoding may turn a column into hundreds
MISSING_VALUES = (
    *("", "?", "NA", "N/A", "n/a", "<NA>", "#NA", "#N/A", "#N/A N/A", "NaN", "nan", "-NaN", "-nan", "NULL", "null"),
    *("None", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
)
_MISSING_CLASSES = tuple(value for value in MISSING_VALUES if value != "None")
Decimal = Literal[".", ","]
MAX_INTEGER_CLASSES = 20  # distinct integers of a target that are taken for classes
UCI_DATASETS = ("boston", "concrete", "energy", "power", "wine_red", "yacht")
_CURRENCY = r"(?:[$€£¥]|EUR|USD|GBP|CHF)"
# texts that may be meant as a number or a date, such as 1,5 or 28.2.2024
NUMBER_LIKE = rf"[-+]?(?:{_CURRENCY} ?)?[-+]?[\d.,'/:\s-]*\d(?:[eE][-+]?\d+)?(?: ?(?:%|{_CURRENCY}))?"

_ISO_DATE = r"\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"
_TRUTH_VALUES = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}
_NUMERIC_DTYPES: dict[ColumnKind, str] = {"number": "iuf", "boolean": "b", "date": "", "text": ""}
_FRACTION = r"(?:\d{{4,}}{0}\d+|0\d*{0}\d+|\d*{0}(?:\d\d?|\d{{4,}})|\d{{1,3}}(?:{1}\d{{3}})+{0}\d+)(?:[eE][-+]?\d+)?"
# numbers with a decimal point, with a decimal comma, and such as 1.050 and 1,050, in which either separates thousands
_DECIMAL_SIGNS = {
    ".": "[-+]?(?:" + _FRACTION.format("[.]", ",") + r"|\d{1,3}(?:,\d{3}){2,})",
    ",": "[-+]?" + _FRACTION.format(",", "[.]"),
    "?.": r"[-+]?[1-9]\d?\d?\.\d{3}",
    "?,": r"[-+]?[1-9]\d?\d?,\d{3}",
}
_OPENED, _CLOSED = re.compile(r' *"'), re.compile(r'(?:[^"]|"")*+"')  # a quoted text in a CSV file
_WITH_UNIT = re.compile(r"[-+]?\d[\d.,]* ?([^\W\d]\S{0,5})")  # such as 5 m2
_JSON_HINT = 'Each line must be an object such as {"age": 40, "town": "Rome"}.'
_Array = np.ndarray[Any, np.dtype[Any]]


# -- files ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableFile:
    """A table in a file, and how to read it.

    Attributes:
        path: Path of the file.
        names: Names of all columns; "" for a column without a name.
        separator: Separator of a CSV file.
        decimal: Decimal sign of a CSV file.
        format: "csv", "parquet" or "json lines".
        copy: Temporary file with the content of standard input or a named pipe; None for a regular file.
        notes: What the file may mean otherwise; complete when its rows were read.
        codes: Of columns of a CSV file with values such as 007: their number, and the first one.

    Example:
        >>> file = Path(tempfile.mkdtemp(), "pets.csv")
        >>> _ = file.write_text("name;weight\\nRex;8,5\\nTom;4,25\\n", encoding="utf-8")
        >>> table = TableFile.open(file)
        >>> table.names, [frame.weight.tolist() for frame in table.frames()]
        (('name', 'weight'), [[8.5, 4.25]])
    """

    path: Path
    names: tuple[str, ...]
    separator: str | None = None
    decimal: Decimal = "."
    format: TableFormat = "csv"
    copy: Any = field(default=None, compare=False)
    notes: list[str] = field(default_factory=list, compare=False)
    codes: dict[str, tuple[int, str]] = field(default_factory=dict, compare=False)

    @classmethod
    def open(cls, path: str | Path, *, decimal: Decimal | None = None) -> "TableFile":
        """Detect the format and the columns of a file.

        Args:
            path: Path of the file; "-" for standard input.
            decimal: Decimal sign of a CSV file whose numbers do not show it, such as 1,050; None makes that an error.

        Returns:
            The table.

        Raises:
            DatasetNotFoundError: If the file does not exist or cannot be opened.
            CorruptFileError: If it is not a table.
            ArgumentError: If the decimal sign is not clear.
        """
        if decimal is not None:
            check_choice("decimal", decimal, get_args(Decimal))
        if str(path) == "-":
            if sys.stdin is None:
                raise DatasetNotFoundError("Standard input is closed; expected a table there.")
            return cls._inspect(Path("standard input"), decimal, _copy_to_disk(sys.stdin.buffer))
        path = Path(path).expanduser()
        if not path.is_file() and not path.is_fifo():
            state = "is a folder" if path.is_dir() else "is not a regular file" if path.exists() else "does not exist"
            raise DatasetNotFoundError(f"The table {path} {state}; expected a CSV, Parquet or JSON Lines file.")
        try:
            if not path.is_fifo():
                return cls._inspect(path, decimal)
            with path.open("rb") as pipe:
                return cls._inspect(path, decimal, _copy_to_disk(pipe))
        except PermissionError:
            raise DatasetNotFoundError(f"No permission to read the table {path}.") from None

    @classmethod
    def _inspect(cls, path: Path, decimal: Decimal | None, copy: Any = None) -> "TableFile":
        scan = None
        with open(path if copy is None else copy.name, "rb") as file:
            table_format = _detect_format(path, file.read(4096))
            file.seek(0)
            if table_format == "csv":
                names, scan = _scan_csv(path, file, decimal)
            else:
                names = (_parquet_names if table_format == "parquet" else _json_names)(path, file)
        if repeated := [name for name, count in Counter(names).items() if name and count > 1]:
            raise CorruptFileError(path, f"several columns have the name {format_names(repeated, 20)}", "Rename them.")
        if scan is None:
            return cls(path, names, format=table_format, copy=copy)
        return cls(path, names, scan.separator, scan.decimal, table_format, copy, scan.notes, scan.codes)

    def frames(
        self,
        columns: Collection[str] | None = None,
        *,
        texts: Collection[str] = (),
        raw: Collection[str] = (),
        classes: str | None = None,
    ) -> Iterator[Any]:
        """Read the rows as pandas frames, whose index counts rows from 0.

        Args:
            columns: Columns to read; None for all that have a name.
            texts: Columns to read as strings.
            classes: Column in which "None" is not a missing value.
            raw: Columns to read as strings in which not even NA is missing; other types keep all digits, and lists and
                objects become JSON.

        Yields:
            Chunks of rows.

        Raises:
            CorruptFileError: If the file has no rows or cannot be read.
        """
        selected = None if columns is None else {*columns}
        wanted = [name for name in self.names if name and (selected is None or name in selected)]
        if self.format == "csv":
            chunks = self._read_csv({*texts, *raw}, {*raw}, classes)
        else:
            chunks = (self._read_parquet if self.format == "parquet" else self._read_json)(wanted, {*raw})
        start, pandas = 0, import_optional("pandas")
        for frame in chunks:
            frame.index = pandas.RangeIndex(start, start := start + len(frame))
            yield frame if list(frame.columns) == wanted else frame[wanted]  # no copy of all columns
        if start == 0:
            raise CorruptFileError(self.path, "it has no rows", "Add rows below the column names.")

    def _read_csv(self, texts: set[str], raw: set[str], classes: str | None) -> Iterator[Any]:
        pandas = import_optional("pandas")
        names = [name or f"\0{i}" for i, name in enumerate(self.names)]
        special = {} if classes is None else {classes: _MISSING_CLASSES}
        special |= dict.fromkeys(raw, ("",))
        options: dict[str, Any] = {
            "sep": self.separator,
            "decimal": self.decimal,
            "na_values": {**dict.fromkeys(names, MISSING_VALUES), **special} if special else MISSING_VALUES,
            "keep_default_na": False,
            "header": 0,
            "names": names,
            "index_col": False,
            "skipinitialspace": True,
            "low_memory": False,
            "dtype": dict.fromkeys(texts, str),
            "chunksize": _chunk_rows(len(names)),
        }
        try:
            with self._stored.open("rb") as file, pandas.read_csv(file, **options) as chunks:
                while True:
                    with warnings.catch_warnings():
                        warnings.simplefilter("error", pandas.errors.ParserWarning)  # a row longer than the first line
                        frame = next(chunks, None)
                    if frame is None:
                        return
                    yield frame
        except UnicodeDecodeError as error:
            raise _not_utf8(self.path, error) from None
        except pandas.errors.ParserWarning:
            reason = f"its rows have more fields than the {len(names)} names in its first line"
        except pandas.errors.ParserError as error:
            reason = first_line(error)
        hint = f"Put fields that contain the separator {self.separator!r} or a line break in double quotes."
        raise CorruptFileError(self.path, reason, hint)

    def _read_json(self, names: list[str], raw: set[str]) -> Iterator[Any]:
        pandas = import_optional("pandas")
        known, late, count = {*self.names}, "", 0
        with self._stored.open("rb") as file:
            records = _read_records(self.path, file)
            while some := list(islice(records, _chunk_rows(len(names)))):
                for record in some:
                    if new := [name for name in record if name not in known and name.strip()]:
                        late, count = late or new[0], count + 1
                columns: dict[str, Any] = {name: [record.get(name) for record in some] for name in names}
                for name, values in columns.items():
                    if name in raw:  # pandas would round integers in a column with missing values
                        columns[name] = pandas.Series([*map(_nested_to_json, values)], dtype=object)
                    elif any(isinstance(value, list | dict) for value in values):
                        raise _unsupported_type(self.path, name, "lists or objects")
                yield pandas.DataFrame(columns)
        note = f"{count:,} lines have keys that do not occur before and are ignored, such as {late!r}"
        if count and note not in self.notes:
            self.notes.append(note)

    def _read_parquet(self, names: list[str], raw: set[str]) -> Iterator[Any]:
        arrow, parquet = import_optional("pyarrow"), import_optional("pyarrow.parquet")
        try:
            with parquet.ParquetFile(self._stored) as file:
                for batch in file.iter_batches(_chunk_rows(len(names)), columns=names):
                    columns = [
                        _to_plain_type(arrow, self.path, name, batch.column(name), name in raw) for name in names
                    ]
                    frame = arrow.table(columns, names).to_pandas(ignore_metadata=True)
                    for name, column in zip(names, columns, strict=True):
                        if name in raw and column.null_count and arrow.types.is_integer(column.type):
                            frame[name] = column.to_pandas(integer_object_nulls=True)  # not rounded
                    yield frame
        except (arrow.ArrowException, OSError) as error:
            raise CorruptFileError(self.path, first_line(error)) from None

    @property
    def _stored(self) -> Path:
        return self.path if self.copy is None else Path(self.copy.name)


def _copy_to_disk(pipe: IO[bytes]) -> Any:
    """Temporary file with the content of a pipe, which is deleted with the returned object."""
    copy = tempfile.NamedTemporaryFile()  # noqa: SIM115
    shutil.copyfileobj(pipe, copy)
    copy.flush()
    return copy


def _detect_format(path: Path, start: bytes) -> TableFormat:
    """Detect the format by the first bytes and the suffix of a file."""
    suffix = path.suffix.lower()
    if start.startswith(b"PAR1") or suffix in (".parquet", ".pq"):
        return "parquet"
    if b"\0" in start or start.startswith((b"PK\x03\x04", b"\x1f\x8b")):
        hint = "Save a spreadsheet as CSV in UTF-8, and decompress the file."
        raise CorruptFileError(path, "it is neither UTF-8 text nor Parquet", hint)
    is_json = suffix in (".jsonl", ".ndjson", ".json") or start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
    return "json lines" if is_json else "csv"


def _chunk_rows(columns: int) -> int:
    return max(1, min(MAX_CHUNK_ROWS, MAX_CHUNK_CELLS // max(1, columns)))


def _to_plain_type(arrow: Any, path: Path, name: str, column: Any, raw: bool) -> Any:
    """Cast an Arrow column to numbers, strings, Booleans or timestamps; if `raw`, keep all digits."""
    types = arrow.types
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_decimal(column.type):
        return column.cast(arrow.string() if raw else arrow.float64())
    if types.is_date(column.type):
        return column.cast(arrow.timestamp("ms"))
    if str(column.type) == "string_view":
        return column.cast(arrow.large_string())
    plain = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string)
    if any(is_type(column.type) for is_type in (*plain, types.is_timestamp, types.is_null)):
        return column
    if not raw:
        raise _unsupported_type(path, name, str(column.type))
    texts = [value if value is None else str(_nested_to_json(value)) for value in column.to_pylist()]
    return arrow.array(texts, arrow.string())


def _unsupported_type(path: Path, name: str, found: str) -> CorruptFileError:
    reason = f"column {name!r} has {found}, expected numbers, strings, Booleans or dates"
    return CorruptFileError(path, reason, "Convert it, or exclude it from the training (ignore).")


def _nested_to_json(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else value


def _parquet_names(path: Path, file: IO[bytes]) -> tuple[str, ...]:
    arrow, parquet = import_optional("pyarrow"), import_optional("pyarrow.parquet")
    try:
        names = parquet.read_schema(file).names
    except (arrow.ArrowException, OSError) as error:
        raise CorruptFileError(path, first_line(error)) from None
    return tuple("" if name.startswith("__index_level_") else name for name in names)  # row labels of pandas


def _json_names(path: Path, file: IO[bytes]) -> tuple[str, ...]:
    """Keys of the first objects, in the order of their occurrence."""
    names = dict.fromkeys(name for record in islice(_read_records(path, file), MAX_CHUNK_ROWS) for name in record)
    if not names:
        raise CorruptFileError(path, "it is empty", _JSON_HINT)
    return tuple(name.strip() and name for name in names)


def _read_records(path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Object on each line that is not blank."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(
                line.decode("utf-8-sig" if number == 1 else "utf-8"), object_pairs_hook=_object_without_repeated_keys
            )
            if rb"\u" in line:
                json.dumps(record, ensure_ascii=False).encode()  # half of a surrogate pair is no character
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error) from None
        except (ValueError, RecursionError) as error:
            raise CorruptFileError(path, f"line {number} is not JSON ({error})", _JSON_HINT) from None
        if not isinstance(record, dict):
            raise CorruptFileError(path, f"line {number} is not an object ({line[:20]!r}…)", _JSON_HINT)
        yield record


def _object_without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(record := dict(pairs)) < len(pairs):
        raise ValueError("a key is repeated")
    return record


def _scan_csv(path: Path, beginning: IO[bytes], decimal: Decimal | None) -> tuple[tuple[str, ...], "_CsvScan"]:
    """Names of the columns, and what the lines of the whole file show."""
    try:
        with io.TextIOWrapper(beginning, encoding="utf-8-sig", newline="") as file:
            blank, line = next(((k, line) for k, line in enumerate(file) if line.strip()), (0, ""))
            if not line:
                raise CorruptFileError(path, "it is empty", "The first line must have the names of the columns.")
            unquoted = re.sub(r'"[^"]*"', "", line)
            separator = max(",;\t|", key=unquoted.count)
            reader = csv.reader(chain([line], file), delimiter=separator, skipinitialspace=True)
            names = tuple(name.strip() for name in next(reader))
            header = line.strip() if reader.line_num == 1 and len(names) > 1 else None
            scan = _CsvScan(path, separator, names, header, decimal)
            scan.read(enumerate(file, blank + reader.line_num + 1))
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None
    except csv.Error as error:
        raise CorruptFileError(path, f"its first line has no column names ({error})") from None
    return names, scan


@dataclass(eq=False)
class _CsvScan:
    """What the lines of a CSV file show beside the values: quotes, short rows, the decimal sign, codes such as 007."""

    path: Path
    separator: str
    names: tuple[str, ...]
    header: str | None
    default: Decimal | None
    codes: dict[str, tuple[int, str]] = field(default_factory=dict)
    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # count and first line of each issue
    _signs: dict[str, tuple[str, int]] = field(default_factory=dict)  # example and line: "." and "," if clear, or "?."

    def read(self, lines: Iterator[tuple[int, str]]) -> None:
        """Read all lines below the names."""
        sep = re.escape(self.separator)
        field_pattern = rf' *+(?:"(?:[^"]|"")*+" *+|(?!")[^{sep}\r\n]*+)'
        well_formed = re.compile(rf"{field_pattern}(?:{sep}{field_pattern})*+[\r\n]*")
        quoted = re.compile(rf'(?:^|(?<={sep})) *"(?:[^"]|"")*+"')
        begin, end = rf'(?:^|[{sep}"]) *', rf' *(?=[{sep}"\r\n]|$)'
        code = re.compile(rf"{begin}0\d\d+{end}")
        signs = {sign: re.compile(f"{begin}({pattern}){end}") for sign, pattern in _DECIMAL_SIGNS.items()}
        if self.separator == ",":  # a decimal comma is in quotes, and an exception
            commas = {sign: re.compile(f'"({_DECIMAL_SIGNS[sign]})"') for sign in (",", "?,")}
            signs = signs | commas if self.default == "," else {}
        for number, line in lines:
            if "\0" in line:
                raise CorruptFileError(self.path, f"line {number} has a NUL character", "Save it again as text.")
            if line.strip() == self.header:
                hint = "Remove it; or add a first line with the names, if there is none."
                raise CorruptFileError(self.path, f"line {number} repeats the first line, the column names", hint)
            if '"' not in line:
                fields = line.count(self.separator) + 1
            elif well_formed.fullmatch(line):
                fields = quoted.sub("", line).count(self.separator) + 1
            else:
                fields = self._read_quotes(number, line, lines)
            if not line.strip():
                if len(self.names) == 1:
                    self._count("blank", number)
            elif fields < len(self.names):
                self._count("short", number)
            for sign in [*signs]:
                if (sign[-1] in line or sign == ".") and (found := signs[sign].search(line)):
                    self._signs[sign] = found[1], number
                    del signs[sign]
            if code.search(line):
                self._add_codes(line)

    def _read_quotes(self, number: int, line: str, lines: Iterator[tuple[int, str]]) -> int:
        """Read a row with line breaks in quotes or a misplaced quote, as pandas does, and return its fields."""
        sep, last, position, fields = self.separator, len(self.names) - 1, 0, 0
        first, broken = number, ""
        while True:  # from the beginning of a field
            if opened := _OPENED.match(line, position):
                position, inner = opened.end(), list[int]()  # separators in each line of the text
                while (closed := _CLOSED.match(line, position)) is None:
                    inner.append(line.count(sep, position))
                    following = next(lines, None)
                    if following is None:
                        hint = "Close or remove it."
                        raise CorruptFileError(self.path, f"a quote in line {first} is never closed", hint)
                    (number, line), position = following, 0
                inner.append(line.count(sep, position, closed.end()))
                position = closed.end()
                like_rows = inner[0] == last - fields and {*inner[1:-1]} <= {last} and inner[-1] >= fields
                if len(inner) > 1 and last and like_rows and (last > 1 or len(inner) > 2):
                    self._count("rows", first, len(inner))
                broken = line[position:].split(sep, 1)[0].strip() and f"line {number}"
                if broken and len(inner) > 1:
                    reason = f"a quote in line {first} is closed in {broken}, before other text"
                    raise CorruptFileError(self.path, reason, "Write quotes in a quoted text twice.")
                if broken:
                    self._count("quote", number)
            fields += 1
            position = line.find(sep, position) + 1
            if not position:
                return fields

    def _add_codes(self, line: str) -> None:
        with suppress(csv.Error, StopIteration):
            values = next(csv.reader([line], delimiter=self.separator, skipinitialspace=True))
            for name, value in zip(self.names, values, strict=False):
                if re.fullmatch(r"0\d\d+", value.strip()):
                    count, example = self.codes.get(name, (0, value.strip()))
                    self.codes[name] = count + 1, example

    def _count(self, issue: str, line: int, count: int = 1) -> None:
        total, first = self._counts.get(issue, (0, line))
        self._counts[issue] = total + count, first

    @cached_property
    def decimal(self) -> Decimal:
        """The sign that the numbers show, else the given one."""
        signs = {*self._signs} | ({"."} if self.separator == "," and "?." in self._signs else set())
        clear = signs & {".", ","}
        if self.default is None and not clear and "?," in signs:
            text, line = self._signs["?,"]
            expected = (
                f"'.' or ',', as {text!r} in line {line} of {self.path} may be a decimal or {text.replace(',', '')}"
            )
            hint = "give the decimal sign, and write numbers without thousands separators"
            raise ArgumentError("decimal", None, expected, hint=hint)
        decimal: Decimal = self.default or "."
        if len(clear) == 1:
            decimal = "," if "," in clear else "."
        if decimal == "," and (points := signs & {".", "?."}):
            text, line = self._signs[min(points)]
            reason = f"{text!r} in line {line} has a point, but other numbers have decimal commas"
            raise CorruptFileError(self.path, reason, "Write all numbers as 1.5, or all as 1,5.")
        return decimal

    @property
    def notes(self) -> list[str]:
        """Notes with counts."""
        texts = {
            "blank": "{} blank lines are skipped (first: line {}); write missing values of the only column as NA",
            "short": "{} rows have fewer fields than the first line (first: line {}); their last values are missing",
            "rows": "a quoted text has {} lines with as many separators as rows have (first: line {}); if its quote is "
            "a mistake, remove it, as these lines are read as one row",
            "quote": "{} quoted texts have a quote that is not written twice (first: line {})",
        }
        notes = [texts[issue].format(f"{count:,}", line) for issue, (count, line) in self._counts.items()]
        if self.separator == ";" and self.decimal == "." and not {".", ","} & {*self._signs} and "?." in self._signs:
            text, line = self._signs["?."]
            notes.append(f"{text!r} in line {line} was read with a decimal point; remove separators of thousands")
        return notes


def _not_utf8(path: Path, error: UnicodeDecodeError) -> CorruptFileError:
    reason = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
    return CorruptFileError(path, reason, "Save it again in UTF-8 (a spreadsheet offers it when it saves a CSV).")


# -- schema --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NumericColumn:
    """Column of numbers, Booleans or dates.

    Attributes:
        name: Name of the column.
        kind: "number", "boolean" or "date".
        mean: Mean of the training rows.
        std: Standard deviation of the training rows.
        missing: Whether training rows have missing values.
    """

    name: str
    kind: ColumnKind
    mean: float
    std: float
    missing: bool

    def __str__(self) -> str:
        is_date = self.kind == "date"
        mean = np.datetime64(round(self.mean), "D") if is_date else f"{self.mean:.4g}"
        unit, missing = " days" * is_date, ", with missing values" * self.missing
        return f"{self.name!r}: {self.kind}, mean {mean}, std {self.std:.4g}{unit}{missing}"


@dataclass(frozen=True)
class CategoricalColumn:
    """Column of categories.

    Attributes:
        name: Name of the column.
        values: Categories of the training rows.
        missing: Whether training rows have missing values.
    """

    name: str
    values: tuple[str, ...]
    missing: bool

    def __str__(self) -> str:
        missing = ", with missing values" * self.missing
        return f"{self.name!r}: {len(self.values)} categories ({format_names(self.values)}){missing}"


@dataclass(frozen=True)
class TargetColumn:
    """Column to predict.

    Attributes:
        name: Name of the column.
        kind: What it holds.
        task: "classification" or "regression".
        classes: Names of the classes.
        mean: Mean of the training rows, in regression.
        std: Standard deviation of the training rows, in regression.
    """

    name: str
    kind: ColumnKind
    task: Literal["classification", "regression"]
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class TableSchema:
    """How rows of a table become inputs (N, C) and targets; serializable as JSON.

    Attributes:
        numbers: Numeric columns.
        categories: Categorical columns.
        target: Column to predict.
        excluded: Columns that are not used: without a name or a value, or to be ignored.
        decimal: Decimal sign of the training table.

    Example:
        >>> import pandas
        >>> columns = (
        ...     NumericColumn("age", "number", 40.0, 10.0, True),
        ...     CategoricalColumn("town", ("Bonn", "Rome"), False),
        ... )
        >>> schema = TableSchema(
        ...     columns[:1], columns[1:], TargetColumn("paid", "text", "classification", ("no", "yes"))
        ... )
        >>> frame = pandas.DataFrame({"age": [50, None], "town": ["Rome", "Oslo"], "paid": ["yes", "no"]})
        >>> schema.encode(frame)
        tensor([[1., 0., 0., 1.],
                [0., 1., 0., 0.]])
        >>> schema.features, schema.encode_target(frame).tolist()
        (('age', 'age is missing', 'town=Bonn', 'town=Rome'), [1, 0])
        >>> TableSchema.from_json(schema.to_json()) == schema
        True
    """

    numbers: tuple[NumericColumn, ...]
    categories: tuple[CategoricalColumn, ...]
    target: TargetColumn
    excluded: tuple[str, ...] = ()
    decimal: Decimal = "."

    @property
    def features(self) -> tuple[str, ...]:
        """Name of each of the C inputs."""
        names = [column.name for column in self.numbers]
        names += [f"{column.name} is missing" for column in self.numbers if column.missing]
        for column in self.categories:
            names += [f"{column.name}={value}" for value in column.values]
            names += [f"{column.name} is missing"] * column.missing
        return tuple(names)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that a table must have."""
        return (*(column.name for column in self.numbers), *(column.name for column in self.categories))

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Columns to read as strings: 01 is not the number 1."""
        target = [] if self.class_column is None else [self.class_column]
        return (*(column.name for column in self.categories), *target)

    @property
    def class_column(self) -> str | None:
        """The target if it has texts, of which "None" is one."""
        return self.target.name if self.target.kind == "text" else None

    @property
    def standardizer(self) -> Standardizer:
        """Standardizer of the C inputs; indicators are not scaled."""
        return Standardizer(*self.moments, axes=0)

    @property
    def moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each of the C inputs; 0 and 1 of indicators."""
        indicators = len(self.features) - len(self.numbers)
        mean, std = ([getattr(column, name) for column in self.numbers] for name in ("mean", "std"))
        return (*mean, *[0.0] * indicators), (*std, *[1.0] * indicators)

    def encode(self, frame: Any, *, standardize: bool = True) -> Tensor:
        """Encode rows as inputs.

        Args:
            frame: Pandas frame with the columns of the schema, in any order and among others.
            standardize: Whether numbers are standardized; otherwise they keep their units.

        Returns:
            Inputs (N, C): float32, or float64 without standardization. Missing numbers are imputed by the mean.

        Raises:
            ValueError: If columns are missing or repeated, or a value is not of its column's kind.
        """
        return self.encode_rows(frame, standardize=standardize)[0]

    def encode_rows(self, frame: Any, *, standardize: bool = True) -> tuple[Tensor, _Array]:
        """Encode rows as inputs, and count what is not known of them.

        Args:
            frame: Pandas frame as in `encode`.
            standardize: Whether numbers are standardized.

        Returns:
            Inputs (N, C), and the fraction of the columns in which each row has no value or an unknown category (N,).
        """
        _check_columns(frame, self.columns)
        values = to_numbers(frame, [(column.name, column.kind) for column in self.numbers])  # (N, numbers)
        missing = np.isnan(values)
        mean, std = (np.array([getattr(column, name) for column in self.numbers]) for name in ("mean", "std"))
        with np.errstate(over="ignore"):
            scaled = np.where(missing, 0.0, (values - mean) / std)
        if standardize and (far := np.argwhere(np.abs(scaled) > np.finfo(np.float32).max)).size:
            row, k = far[0].tolist()
            raise _value_error(frame, row, self.numbers[k].name, f"{values[row, k]:g}", "a number in single precision")
        numbers = scaled if standardize else np.where(missing, mean, values)
        blocks = [numbers, missing[:, [column.missing for column in self.numbers]]]
        unknown = missing.sum(1)
        for column in self.categories:
            rows, distinct = _factorize(frame[column.name])
            positions = _to_positions(to_texts(distinct), column.values)[rows][:, None]
            blocks.append(positions == np.arange(len(column.values)))
            if column.missing:
                blocks.append(positions == -1)
            unknown += positions[:, 0] < 0
        dtype = np.float32 if standardize else np.float64
        x = torch.from_numpy(np.concatenate(blocks, 1, dtype=dtype, casting="unsafe"))
        return x, unknown / len(self.columns)

    def encode_target(self, frame: Any) -> Tensor:
        """Encode targets.

        Args:
            frame: Pandas frame with the target column.

        Returns:
            Classes (N,), or standardized numbers (N, 1).

        Raises:
            ValueError: If a target is missing or unknown.
        """
        y = self.read_target(frame)
        if count := int((y.isnan() if y.is_floating_point() else y < 0).sum()):
            raise ValueError(f"Target {self.target.name!r} is missing or unknown in {count:,} of {len(frame):,} rows.")
        return y if self.target.classes else ((y - self.target.mean) / self.target.std).float()

    def read_target(self, frame: Any) -> Tensor:
        """Read targets that may be missing.

        Args:
            frame: Pandas frame with the target column.

        Returns:
            Classes (N,), −1 where missing and −2 where not in the training table; or numbers (N, 1) in their units, NaN
            where missing.
        """
        name, kind = self.target.name, self.target.kind
        _check_columns(frame, [name])
        if self.target.task == "regression":
            return torch.from_numpy(to_numbers(frame, [(name, kind)]))
        return torch.from_numpy(_to_positions(to_labels(frame, name, kind), self.target.classes))

    def to_json(self) -> str:
        """Serialize to JSON.

        Returns:
            JSON text.
        """
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "TableSchema":
        """Restore a schema from JSON.

        Args:
            text: What `to_json` returned.

        Returns:
            The schema.

        Raises:
            ValueError: If it is something else.
        """
        try:
            fields = check_types("schema", json.loads(text), cls)
            target = fields["target"]
            schema = cls(
                tuple(NumericColumn(**column) for column in fields["numbers"]),
                tuple(CategoricalColumn(c["name"], tuple(c["values"]), c["missing"]) for c in fields["categories"]),
                TargetColumn(**{**target, "classes": tuple(target["classes"])}),
                tuple(fields["excluded"]),
                fields.get("decimal", "."),
            )
            check_choice("decimal", schema.decimal, get_args(Decimal))
            scaled: list[NumericColumn | TargetColumn] = [*schema.numbers, schema.target]
            for column in scaled:
                check_choice("kind", column.kind, get_args(ColumnKind))
                if not isinstance(column.name, str) or not math.isfinite(column.mean) or not 0 < column.std < math.inf:
                    raise ValueError(f"column {column.name!r} has mean {column.mean!r} and std {column.std!r}")
            check_choice("task", schema.target.task, ("classification", "regression"))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"Not a schema in JSON ({type(error).__name__}: {error}).") from None
        return schema

    def __str__(self) -> str:
        """One line for each column."""
        target = self.target
        values = format_names(target.classes) if target.classes else f"mean {target.mean:.4g}, std {target.std:.4g}"
        lines = [f"{target.name!r} is the target: {target.task} ({values})"]
        lines += map(str, (*self.numbers, *self.categories))
        return "\n".join([*lines, *[f"{name!r}: excluded" for name in self.excluded]])


def _check_columns(frame: Any, names: Sequence[str]) -> None:
    if not isinstance(frame, import_optional("pandas").DataFrame):
        raise ArgumentError("frame", type(frame).__name__, "a pandas DataFrame")
    if missing := [name for name in names if name not in frame]:
        raise ValueError(f"The table has no column {format_names(missing)}.")
    if repeated := sorted({*frame.columns[frame.columns.duplicated()]} & {*names}):
        raise ValueError(f"The table has several columns named {format_names(repeated)}.")


# -- values of a column --------------------------------------------------------------------------------


def infer_column_kind(column: Any) -> ColumnKind | None:
    """Infer what a column holds: numbers if all its values can be read as numbers.

    Args:
        column: A pandas series.

    Returns:
        The kind; None if all values are missing.

    Example:
        >>> import pandas
        >>> columns = [1, None], ["2024-02-29"], [True, None], ["7", "x"], [None]
        >>> [infer_column_kind(pandas.Series(values)) for values in columns]
        ['number', 'date', 'boolean', 'text', None]
    """
    values = column.dropna()
    if not len(values):
        return None
    by_dtype: dict[str, ColumnKind] = {"i": "number", "u": "number", "f": "number", "b": "boolean", "M": "date"}
    if values.dtype.kind in by_dtype:
        return by_dtype[values.dtype.kind]
    if all(isinstance(value, bool | np.bool_) for value in values):
        return "boolean"
    if import_optional("pandas").to_numeric(values.astype(str), errors="coerce").notna().all():  # "True" is not 1
        return "number"
    return "date" if _parse_dates(values).notna().all() else "text"


def to_numbers(frame: Any, columns: Sequence[tuple[str, ColumnKind]]) -> _Array:
    """Convert columns to numbers.

    Args:
        frame: A pandas frame.
        columns: Names and kinds of the columns.

    Returns:
        Numbers (N, columns), float64; NaN where missing.

    Raises:
        ValueError: If a value cannot be converted or is infinite; its row and column are named.
    """
    values = np.empty((len(frame), len(columns)))
    for k, (name, kind) in enumerate(columns):
        values[:, k] = _parse_column(frame[name], kind)
    if (infinite := np.argwhere(np.isinf(values))).size:
        row, k = infinite[0].tolist()
        raise _value_error(frame, row, columns[k][0], str(values[row, k]), "a finite number")
    return values


def _parse_column(column: Any, kind: ColumnKind) -> _Array:
    if column.dtype.kind in _NUMERIC_DTYPES[kind]:
        return column.to_numpy(dtype=np.float64, na_value=np.nan)  # type: ignore[no-any-return]
    pandas = import_optional("pandas")
    present = column[column.notna()]
    if (column.dtype.kind, kind) != ("M", "date"):
        present = present.astype(str).str.strip()
    if kind == "boolean":
        numbers = present.str.lower().map(_TRUTH_VALUES)
    elif kind == "date":
        start = pandas.Timestamp(0, tz="UTC").as_unit("us")  # nanoseconds would end in the year 2262
        try:
            numbers = (_parse_dates(present).dt.as_unit("us") - start) / pandas.Timedelta(days=1)
        except pandas.errors.OutOfBoundsDatetime as error:
            raise ValueError(f"Column {column.name!r} has a date that is out of range ({error}).") from None
    else:
        numbers = pandas.to_numeric(present, errors="coerce")
    values = np.full(len(column), np.nan)
    values[column.notna().to_numpy()] = numbers.to_numpy(dtype=np.float64, na_value=np.nan)
    wrong = np.isnan(values) & column.notna().to_numpy()
    wrong[wrong] = column[wrong].astype(str).str.strip().ne("").to_numpy(dtype=bool)  # an empty text is a missing value
    if wrong.any():
        row, expected = int(wrong.argmax()), "a date such as 2024-02-29" if kind == "date" else f"a {kind}"
        raise _value_error(column, row, column.name, format_names([column.iloc[row]]), expected)
    return values


def _parse_dates(column: Any) -> Any:
    """Parse ISO dates; NaT for other texts."""
    if column.dtype.kind != "M":
        texts = column.astype(str).str.strip()
        column = texts.where(texts.str.fullmatch(_ISO_DATE))
    return import_optional("pandas").to_datetime(column, utc=True, format="ISO8601", errors="coerce")


def _value_error(frame: Any, row: int, column: str, value: str, expected: str) -> ValueError:
    """Error for a value; its row is numbered from 1, or named by the label of a frame."""
    label = frame.index[row]
    place = label + 1 if isinstance(label, int | np.integer) else repr(label)
    return ValueError(f"Column {column!r} has {value} in row {place}; expected {expected}.")


def to_texts(column: Any) -> list[str | None]:
    """Convert values to canonical texts.

    Args:
        column: A pandas series.

    Returns:
        Text of each value; None where it is missing or empty.

    Example:
        >>> import pandas
        >>> to_texts(pandas.Series([1.0, None, 2.5])), to_texts(pandas.Series([" red", ""]))
        (['1', None, '2.5'], ['red', None])
    """
    missing = column.isna()
    return [None if gone else canonical_text(value) or None for gone, value in zip(missing, column, strict=True)]


def canonical_text(value: Any) -> str:
    """Canonical text of a value: both 1.0 and 1 become "1".

    Args:
        value: The value.

    Returns:
        Its text without surrounding spaces.
    """
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def to_labels(frame: Any, name: str, kind: ColumnKind) -> list[str | None]:
    """Convert a column of classes to names.

    Args:
        frame: A pandas frame.
        name: The column.
        kind: What it holds.

    Returns:
        Class of each row; None where it is missing.

    Example:
        >>> import pandas
        >>> to_labels(pandas.DataFrame({"paid": ["TRUE", "false", None]}), "paid", "boolean")
        ['True', 'False', None]
    """
    if kind == "text":
        return to_texts(frame[name])
    format_value: Callable[[float], str] = canonical_text if kind == "number" else lambda value: str(bool(value))
    values = to_numbers(frame, [(name, kind)])[:, 0].tolist()
    return [None if math.isnan(value) else format_value(value) for value in values]


def _to_positions(texts: Sequence[str | None], values: Sequence[str]) -> _Array:
    """Position of each text among the values; −1 if it is missing, −2 if it is not there."""
    positions: dict[str | None, int] = {value: k for k, value in enumerate(values)} | {None: -1}
    return np.array([positions.get(text, -2) for text in texts], dtype=np.int64)


def _factorize(column: Any) -> tuple[Any, Any]:
    """Index of each row among the distinct values of a text column; others stay: 1 and True are equal to pandas."""
    pandas = import_optional("pandas")
    if pandas.api.types.infer_dtype(column, skipna=True) != "string":
        return slice(None), column
    rows, distinct = pandas.factorize(column, use_na_sentinel=False)
    return rows, pandas.Series(distinct)


# -- inference -----------------------------------------------------------------------------------------


def _add_rows(scaler: Any, values: _Array) -> None:
    """Update the moments of a `StandardScaler` by rows (N, k); NaN is missing."""
    if values.size:
        with np.errstate(over="ignore", invalid="ignore"):  # overflow is reported by `_mean_and_std`
            scaler.partial_fit(values)
        scaler.mean_[scaler.n_samples_seen_ == 0] = 0.0  # NaN, which a column without values so far has, would stay


def _mean_and_std(scaler: Any, names: Sequence[str]) -> list[tuple[float, float]]:
    """Mean and standard deviation of each column; 1 if it is constant, and NaN if it has no values."""
    empty = np.broadcast_to(scaler.n_samples_seen_ == 0, len(names))
    if (wrong := ~empty & ~np.isfinite(scaler.var_)).any():
        raise ValueError(f"Column {names[int(wrong.argmax())]!r} has numbers that are too large to square.")
    return list(zip(np.where(empty, np.nan, scaler.mean_).tolist(), scaler.scale_.tolist(), strict=True))


def _scan(
    file: TableFile, target: str, ignore: Sequence[str], *, keep: bool
) -> tuple[dict[str, ColumnKind | None], Any, list[Any] | None]:
    """Kind of each column, targets as a series, and all rows, unless texts such as 01 were read as numbers."""
    pandas = import_optional("pandas")
    kinds: dict[str, ColumnKind | None] = {name: None for name in file.names if name and name not in ignore}
    parsed = set[str]()
    frames, targets = [], []
    for frame in file.frames(kinds, classes=target):
        for name, column in frame.items():
            if kind := infer_column_kind(column):
                kinds[name] = kind if kinds[name] in (None, kind) else "text"
                if column.dtype.kind in "iufb":
                    parsed.add(name)
        targets.append(frame[target])
        if keep:
            frames.append(frame)
    reread = [name for name in parsed if kinds[name] == "text"]
    if target in reread:
        targets = [frame[target] for frame in file.frames([target], texts=[target], classes=target)]
    column = pandas.concat(targets)
    if kinds[target] == "text" and file.format == "csv":
        others = column.mask(column.astype(str).str.strip() == "None")
        if (kind := infer_column_kind(others)) != "text":  # "None" is a missing number
            kinds[target], column = kind, others
    return kinds, column, frames if keep and not reread else None


def _infer_target(
    file: TableFile, column: Any, kind: ColumnKind | None, task: str | None
) -> tuple[TargetColumn, Tensor]:
    """Target column, without its statistics, and the targets of all rows: classes (n,), or numbers (n, 1)."""
    name, frame = column.name, column.to_frame()
    if kind is None or kind == "date":
        found = "no values" if kind is None else "dates"
        raise ArgumentError("target", name, f"a column of classes or numbers, as {file.path} has {found} there")
    if kind == "text" and task == "regression":
        raise ArgumentError("target", name, f"a column of numbers for regression, as {file.path} has texts there")
    if kind == "number" or task == "regression":
        values = to_numbers(frame, [(name, kind)])[:, 0]
        _check_complete(file, name, np.isnan(values))
        distinct = np.unique(values)
        few = len(distinct) <= max(2, min(MAX_INTEGER_CLASSES, len(values) // 5))
        if task == "regression" or (task is None and not (few and bool((distinct == distinct.round()).all()))):
            if len(distinct) < 2:
                raise ArgumentError("target", name, f"a column that varies, as it is {distinct[0]:g} in every row")
            return TargetColumn(name, kind, "regression"), torch.from_numpy(values)[:, None]
        if np.abs(distinct).max() > 2**53:
            expected = "a column whose classes are integers up to 2^53, or texts"
            raise ArgumentError("target", name, expected, hint="larger integers cannot be told apart")
    rows, distinct_column = _factorize(column)
    labels = to_labels(distinct_column.to_frame(name), name, kind)
    by_value: Any = float if kind == "number" else None
    classes = tuple(sorted({label for label in labels if label is not None}, key=by_value))
    codes = _to_positions(labels, classes)[rows]
    _check_complete(file, name, codes < 0)
    n = len(codes)
    if n < 2 or not 2 <= len(classes) <= max(10, n // 2):
        expected = f"a column of classes that occur more than once, as {n:,} rows have {len(classes):,} distinct values"
        hint = f"such as {format_names(classes, 3)}; choose another target, or numbers such as 1.5 for regression"
        raise ArgumentError("target", name, expected, hint=hint)
    return TargetColumn(name, kind, "classification", classes), torch.from_numpy(codes)


def _check_complete(file: TableFile, name: str, missing: _Array) -> None:
    if missing.any():
        place = f"{int(missing.sum()):,} of {len(missing):,} rows of {file.path}, first in row {missing.argmax() + 1}"
        hint = "fill it in, or remove these rows"
        raise ArgumentError("target", name, f"a column without missing values; it is missing in {place}", hint=hint)


def _infer_schema(
    file: TableFile,
    frames: Iterable[Any],
    kinds: Mapping[str, ColumnKind | None],
    target: TargetColumn,
    train: Tensor,
    max_categories: int,
    *,
    drop: bool,
) -> TableSchema:
    """Schema of the rows where `train` (n,) is true; a text column that seems to hold numbers is never dropped."""
    texts = {name: set[str | None]() for name, kind in kinds.items() if kind == "text"}
    numeric = [(name, kind) for name, kind in kinds.items() if kind not in (None, "text")]
    scaler = import_optional("sklearn.preprocessing").StandardScaler()
    missing, start, large = np.zeros(len(numeric), dtype=bool), 0, Counter[str]()
    dropped: ValueError | None = None
    for frame in frames:
        selected, start = train[start : start + len(frame)].numpy(), start + len(frame)
        values = to_numbers(frame, numeric)
        for (name, kind), beyond in zip(numeric, (np.abs(values) > 2**53).sum(0).tolist(), strict=True):
            if beyond and kind == "number" and frame[name].dtype.kind != "f":
                large[name] += beyond
        values = values[selected]
        missing |= np.isnan(values).any(0)
        _add_rows(scaler, values)
        for name, found in list(texts.items()):
            found |= {*to_texts(_factorize(frame[name][selected])[1])}
            if len(found - {None}) > max_categories:
                expected = f"at least the number of distinct texts in column {name!r} of {file.path}"
                hint = "ignore the column, or write numbers as 1.5 and dates as 2024-02-29"
                dropped = ArgumentError("max_categories", max_categories, expected, hint=hint)
                is_number_like = frame[name].dropna().astype(str).str.strip().str.fullmatch(NUMBER_LIKE).mean() > 0.5
                if not drop or is_number_like:
                    raise dropped
                del texts[name]
    file.notes.extend(
        f"{name!r} has {count:,} integers beyond 2^53, which are rounded" for name, count in large.items()
    )
    moments = _mean_and_std(scaler, [name for name, _ in numeric]) if numeric else []
    numbers = [
        NumericColumn(*column, mean, std, gaps)
        for column, (mean, std), gaps in zip(numeric, moments, missing.tolist(), strict=True)
        if not math.isnan(mean)
    ]
    categories = [
        CategoricalColumn(name, tuple(sorted(filter(None, found))), None in found)
        for name, found in texts.items()
        if found - {None}
    ]
    if not numbers and not categories:
        raise dropped or CorruptFileError(file.path, "no column but the target has values", "Add columns.")
    schema = TableSchema(tuple(numbers), tuple(categories), target, decimal="," if file.decimal == "," else ".")
    used = {target.name, *schema.columns}
    return replace(schema, excluded=tuple(name or "(no name)" for name in file.names if name not in used))


# -- the user's own tables -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class EncodedTable:
    """Rows of a table as inputs and targets.

    Attributes:
        file: The file.
        schema: Its schema.
        split: Split of each row, 0 (training), 1 (validation) or 2 (test): (n,), uint8.
        x: Inputs (n, C), float32; None if they are not encoded.
        y: Classes (n,), or numbers (n, 1) in their units, float64.
        unknown: Fraction of the columns in which each row has no value or an unknown category: (n,); or None.
        notes: What the file may mean otherwise.
    """

    file: TableFile
    schema: TableSchema
    split: Tensor
    x: Tensor | None
    y: Tensor
    unknown: _Array | None
    notes: tuple[str, ...]


def read_table(
    path: str | Path,
    target: str,
    task: Literal["classification", "regression"] | None = None,
    ignore: Sequence[str] = (),
    fractions: tuple[float, float] = (0.1, 0.1),
    seed: int = 0,
    max_categories: int = 256,
    drop_high_cardinality: bool = False,
    *,
    decimal: Decimal | None = None,
    encode: bool = True,
    standardize: bool = True,
) -> EncodedTable:
    """Infer the schema of a table, split its rows and encode them.

    Args:
        path: A CSV, Parquet or JSON Lines file.
        target: Column to predict.
        task: "classification" or "regression". None infers it: texts, Booleans and at most 20 distinct integers that
            occur five times on average (two integers always) are classes, other numbers a regression target.
        ignore: Columns to exclude.
        fractions: Fraction of the rows that are not in the test split for validation, and of all rows for testing.
        seed: Random seed of the splits, which are stratified by class; every class is in the training split.
        max_categories: Maximum number of categories of a text column.
        drop_high_cardinality: Whether a text column with more categories is excluded; otherwise it is an error.
        decimal: Decimal sign of a CSV file whose numbers do not show it.
        encode: Whether to keep the rows in memory and encode them; otherwise the file is read twice.
        standardize: Whether encoded numbers are standardized.

    Returns:
        The encoded rows.

    Raises:
        ArgumentError: If a column does not exist or does not suit the task.
        CorruptFileError: If the file cannot be read.
    """
    if task is not None:
        check_choice("task", task, ("classification", "regression"))
    for name, fraction in zip(("val_fraction", "test_fraction"), fractions, strict=True):
        check_fraction(name, fraction, zero=True)
    check_int("max_categories", max_categories, minimum=2)
    file = TableFile.open(path, decimal=decimal)
    _check_names(file, target, ignore)
    kinds, values, kept = _scan(file, target, ignore, keep=encode)
    column, y = _infer_target(file, values, kinds.pop(target), task)
    split = train_val_test_split(len(y), *fractions, seed=seed, strata=y if column.classes else None)
    train = split == TRAIN
    if not column.classes:
        _add_rows(scaler := import_optional("sklearn.preprocessing").StandardScaler(), y[train].numpy())
        ((mean, std),) = _mean_and_std(scaler, [target])
        column = replace(column, mean=mean, std=std)
    frames: Iterable[Any] | None = kept
    if frames is None:
        texts = [name for name, kind in {**kinds, target: column.kind}.items() if kind == "text"]
        frames = file.frames((target, *kinds), texts=texts)
        frames = list(frames) if encode else frames
    schema = _infer_schema(file, frames, kinds, column, train, max_categories, drop=drop_high_cardinality)
    notes = (*file.notes, *_describe_values(file, schema))
    if not encode:
        return EncodedTable(file, schema, split, None, y, None, notes)
    needed = 2 * (4 if standardize else 8) * len(y) * len(schema.features)  # the parts, and all of them together
    check_memory("max_categories", max_categories, needed, hint="use a smaller one, or ignore columns of many texts")
    blocks, unknown = zip(*(schema.encode_rows(frame, standardize=standardize) for frame in frames), strict=True)
    return EncodedTable(file, schema, split, torch.cat(blocks), y, np.concatenate(unknown), notes)


def _describe_values(file: TableFile, schema: TableSchema) -> Iterator[str]:
    """Notes on values that may mean something else than what they were read as."""
    columns: tuple[NumericColumn | TargetColumn, ...] = (schema.target, *schema.numbers)
    for column in columns:
        if column.kind == "number" and column.name in file.codes:
            count, example = file.codes[column.name]
            yield f"{column.name!r} has {count:,} values such as {example!r}, which were read as numbers"
    target = schema.target
    texts = [(target.name, target.classes if target.kind == "text" else ())]
    for name, values in (*texts, *((column.name, column.values) for column in schema.categories)):
        numbers = [value for value in values if re.fullmatch(NUMBER_LIKE, value)]
        if 2 * len(numbers) > len(values):
            odd = [value for value in values if value not in numbers]
            besides = f" besides {format_names(odd, 3)}" if odd else ""
            yield (
                f"{name!r} was read as text, but has values such as {numbers[0]!r}{besides}; write numbers as 1.5, "
                "dates as 2024-02-29, and missing values as empty fields"
            )
        units = {match and match[1] for match in map(_WITH_UNIT.fullmatch, values)}
        if len(units) == 1 and len(values) >= 10 and None not in units:
            yield f"{name!r} was read as text, but has values such as {values[0]!r}; write numbers without a unit"
        folded = Counter(value.casefold() for value in values)
        if same := [value for value in values if folded[value.casefold()] > 1]:
            yield f"{name!r} has values that differ in case only: {format_names(same, 4)}"


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
    decimal: Decimal | None = None,
    streaming: bool = False,
) -> DatasetBundle:
    """Load a table from a CSV, Parquet or JSON Lines file.

    Numbers, Booleans and dates (2024-02-29, with or without a time; in days) are standardized, texts are one-hot
    encoded.

    Args:
        path: The file.
        target: Column to predict.
        task: "classification" or "regression"; None infers it from the target, see `read_table`.
        ignore: Columns to exclude.
        val_fraction: Fraction of the rows that are not in the test split, for validation.
        test_fraction: Fraction of the rows for testing.
        seed: Random seed of the splits.
        max_categories: Maximum number of categories of a text column.
        drop_high_cardinality: Whether a text column with more categories is excluded; otherwise it is an error.
        decimal: Decimal sign of a CSV file whose numbers do not show it, such as 1,050.
        streaming: Whether rows are read from the file in each epoch, in its order, so that a sorted file should be
            shuffled before. One byte per row is kept in memory.

    Returns:
        The splits; `schema` describes the columns, and its `encode(frame)` encodes new rows.

    Raises:
        ArgumentError: If a column does not exist or does not suit the task.
        CorruptFileError: If the file cannot be read.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "pets.csv")
        >>> lines = [f"{20 + i},{'short' if i % 2 else 'long'},{'dog' if i % 3 else 'cat'}" for i in range(30)]
        >>> _ = file.write_text("\\n".join(["weight,hair,kind", *lines]), encoding="utf-8")
        >>> data = load_table(file, target="kind")
        >>> data
        DatasetBundle('pets', classification, 2 classes, 3 channels; train 24, validation 3, test 3)
        >>> data.schema.features, data.classes
        (('weight', 'hair=long', 'hair=short'), ('cat', 'dog'))
    """
    fractions, encode = (val_fraction, test_fraction), not streaming
    options = task, ignore, fractions, seed, max_categories, drop_high_cardinality
    table = read_table(path, target, *options, decimal=decimal, encode=encode)
    for note in table.file.notes:
        warnings.warn(f"{table.file.path}: {note}.", UserWarning, stacklevel=2)
    schema, split, classes = table.schema, table.split, table.schema.target.classes
    scale = None if classes else Standardizer((schema.target.mean,), (schema.target.std,), axes=0)
    used, iterate = {*split.tolist()}, partial(_iterate_rows, table.file, schema, split)
    if table.x is None:
        splits: dict[int, Any] = {k: StreamingDataset(partial(iterate, k)) for k in used}
    else:
        y = table.y if scale is None else scale(table.y).float()
        splits = {k: TensorDataset(table.x[split == k], y[split == k]) for k in used}
    bundle = _build_bundle(table.file.path.stem, splits, classes, schema.standardizer, scale)
    return replace(bundle, schema=schema)


def _check_names(file: TableFile, target: str, ignore: Sequence[str]) -> None:
    if isinstance(ignore, str):
        raise ArgumentError("ignore", ignore, f"a list of names such as [{ignore!r}]")
    for argument, name in (("target", target), *(("ignore", name) for name in ignore)):
        if name not in file.names or not name:
            close = difflib.get_close_matches(str(name), file.names, n=len(file.names), cutoff=0.0)
            expected = f"a column of {file.path}: {format_names(close, 20)}"
            raise ArgumentError(argument, name, expected, hint="the first line of the file must have the names")
    if target in ignore:
        raise ArgumentError("ignore", ignore, f"columns other than the target {target!r}")
    if not [name for name in file.names if name and name not in (target, *ignore)]:
        raise CorruptFileError(file.path, f"it has no column but the target {target!r}", "Add columns.")


def _iterate_rows(file: TableFile, schema: TableSchema, split: Tensor, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of split k, read from the file."""
    start, names = 0, (*schema.columns, schema.target.name)
    for frame in file.frames(names, texts=schema.text_columns, classes=schema.class_column):
        selected = split[start : (start := start + len(frame))] == k
        if start > len(split):
            break
        yield from zip(schema.encode(frame)[selected], schema.encode_target(frame)[selected], strict=True)
    if start != len(split):
        raise CorruptFileError(file.path, f"it no longer has {len(split):,} rows", "Load it again after a change.")


def encode_file(path: str | Path, schema: TableSchema) -> Iterator[Tensor]:
    """Encode the rows of a new file.

    Args:
        path: The file; it need not have the target column.
        schema: Schema of the training table.

    Yields:
        Inputs (N, C) of a chunk of rows.
    """
    for frame in TableFile.open(path, decimal=schema.decimal).frames(schema.columns, texts=schema.text_columns):
        yield schema.encode(frame)


# -- scikit-learn and UCI ------------------------------------------------------------------------------


def load_sklearn_table(name: str, root: Path | None, options: LoadOptions) -> DatasetBundle:
    """Load a table that is shipped with scikit-learn; a fifth of its rows is the test split.

    Args:
        name: "diabetes", "breast_cancer" or "wine".
        root: Not used.
        options: Options of the splits.

    Returns:
        The splits.

    Example:
        >>> data = load_sklearn_table("diabetes", None, LoadOptions())
        >>> data
        DatasetBundle('diabetes', regression, numbers, 10 channels; train 319, validation 35, test 88)
        >>> x, y = data.test[0]
        >>> x.shape, bool(25 <= data.target_standardizer.inverse(y) <= 346)
        (torch.Size([10]), True)
    """
    arguments = {"scaled": False} if name == "diabetes" else {}
    table = getattr(import_optional("sklearn.datasets"), f"load_{name}")(**arguments)
    x, y = torch.from_numpy(table.data), torch.from_numpy(table.target)
    classes = tuple(str(label) for label in table.get("target_names", ()))
    strata = y if classes else None
    split = train_val_test_split(len(x), options.val_fraction, 0.2, seed=options.seed, strata=strata)
    return _standardize_splits(name, x, y, split, classes, options.streaming)


def load_uci(name: str, root: str | Path | None, options: LoadOptions) -> DatasetBundle:
    """Load a UCI regression data set with one of its 20 standard test splits.

    Args:
        name: One of `UCI_DATASETS`.
        root: Data root with uci/<name>.csv (target y) and uci/<name>.test_splits.json: {"0": [test rows], …}.
        options: Options of the splits.

    Returns:
        The splits.
    """
    x, y, test = read_uci(name, root, split=options.split)
    split = train_val_test_split(len(x), options.val_fraction, test, seed=options.seed)
    return _standardize_splits(name, x, y, split, (), options.streaming)


def read_uci(name: str, root: str | Path | None, *, split: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Read a UCI regression data set without standardization.

    Args:
        name: One of `UCI_DATASETS`.
        root: Data root; see `load_uci`.
        split: Number of the test split.

    Returns:
        Inputs (n, C), targets (n, 1) and the indices of the test rows.

    Raises:
        DatasetNotFoundError: If a file is missing.
        CorruptFileError: If a file cannot be read.
    """
    check_choice("name", name, UCI_DATASETS)
    folder = resolve_data_root(root)
    files = [Path(folder or "<data root>", "uci", f"{name}.{end}") for end in ("csv", "test_splits.json")]
    if missing := [file for file in files if not file.is_file()]:
        hint = f"put it, as features and y, and its test splits into the folder uci of the root in {DATA_ROOT_VARIABLE}"
        raise DatasetNotFoundError.for_dataset(name, missing if folder else [NO_DATA_ROOT], hint)
    frame = import_optional("pandas").concat(list(TableFile.open(files[0]).frames()))
    if "y" not in frame or len(frame.columns) < 2:
        raise CorruptFileError(files[0], f"its columns are {format_names(list(frame))}, not features and y")
    if any(dtype.kind not in "iuf" for dtype in frame.dtypes) or not np.isfinite(values := frame.to_numpy(float)).all():
        raise CorruptFileError(files[0], "it has values that are not finite numbers")
    x, y = (torch.from_numpy(values[:, selected]) for selected in (frame.columns != "y", frame.columns == "y"))
    return x, y, _read_test_rows(files[1], check_int("split", split), len(frame))


def _read_test_rows(file: Path, split: int, n: int) -> Tensor:
    try:
        splits = json.loads(file.read_text(encoding="utf-8"))
        test = np.array(splits.get(str(split), []))
    except (ValueError, AttributeError):
        raise CorruptFileError(file, 'it is not {"0": [row indices], …} in JSON') from None
    if str(split) not in splits:
        raise ArgumentError("split", split, f"an integer from 0 to {len(splits) - 1}, the splits in {file}")
    is_rows = test.ndim == 1 and test.dtype.kind == "i" and 0 < len(np.unique(test)) == len(test) < n
    if not is_rows or test.min() < 0 or test.max() >= n:
        raise CorruptFileError(file, f"split {split} is not a list of distinct rows among 0 … {n - 1}")
    return torch.from_numpy(test)


def _standardize_splits(
    name: str, x: Tensor, y: Tensor, split: Tensor, classes: tuple[str, ...], streaming: bool
) -> DatasetBundle:
    """Bundle of x (n, C) and y, standardized by the training rows."""
    standardizer = Standardizer.from_data(x[split == TRAIN])
    target = None if classes else Standardizer.from_data(y.reshape(-1, 1)[split == TRAIN])
    x, y = standardizer(x).float(), y.long() if target is None else target(y.reshape(-1, 1)).float()
    pairs = {k: (x[split == k], y[split == k]) for k in {*split.tolist()}}
    splits = {k: StreamingDataset(partial(zip, *p)) if streaming else TensorDataset(*p) for k, p in pairs.items()}
    return _build_bundle(name, splits, classes, standardizer, target)


def _build_bundle(
    name: str, splits: Mapping[int, Any], classes: tuple[str, ...], x: Standardizer, y: Standardizer | None
) -> DatasetBundle:
    task: Task = "classification" if classes else "regression"
    parts = splits[TRAIN], splits.get(VALIDATION), splits.get(TEST)
    return DatasetBundle(name, task, *parts, len(x.mean), classes, x, target_standardizer=y)
