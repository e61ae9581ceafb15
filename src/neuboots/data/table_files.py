"""Reading of tables in CSV, Parquet or JSON Lines files, one chunk of rows at a time.

A CSV file is UTF-8 with column names in its first line; its separator (comma, semicolon, tab or bar) and a decimal
comma are detected. Empty fields, "?" and the other strings in `MISSING_VALUES` are missing values; a row that is too
short lacks its last values, one that is too long is an error. JSON Lines have an object on each line, whose keys are
the columns; keys that first occur after thousands of lines are ignored. The path "-" is standard input, which is copied
to a temporary file, as is a named pipe.
"""

import csv
import io
import json
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal

from neuboots._validation import ArgumentError, format_names, import_optional
from neuboots.data._common import CorruptFileError, DatasetNotFoundError, first_line

MAX_CHUNK_CELLS = 1 << 22  # 32 MiB of numbers
MAX_CHUNK_ROWS = 1 << 14  # one-hot encoding may turn a column into hundreds
MAX_SNIFFED_FIELDS = 200_000  # fields that are searched for a decimal comma
MISSING_VALUES = (
    *("", "?", "NA", "N/A", "n/a", "<NA>", "#NA", "#N/A", "#N/A N/A", "NaN", "nan", "-NaN", "-nan", "NULL", "null"),
    *("None", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
)
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_DECIMAL_POINT = re.compile(r"[-+]?\d*\.\d+")
_JSON_HINT = 'Each line must be an object such as {"age": 40, "town": "Rome"}.'

TableFormat = Literal["csv", "parquet", "json lines"]


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
    decimal: str = "."
    format: TableFormat = "csv"
    copy: Any = field(default=None, compare=False)

    @classmethod
    def open(cls, path: str | Path) -> "TableFile":
        """Detect the format and the columns of a file.

        Args:
            path: Path of the file; "-" for standard input.

        Returns:
            The table.

        Raises:
            DatasetNotFoundError: If the file does not exist or cannot be opened.
            CorruptFileError: If it is not a table.
        """
        if str(path) == "-":
            if sys.stdin is None:
                raise DatasetNotFoundError("Standard input is closed; expected a table there.")
            return cls._inspect(Path("standard input"), _copy_to_disk(sys.stdin.buffer))
        path = Path(path).expanduser()
        if not path.is_file() and not path.is_fifo():
            state = "is a folder" if path.is_dir() else "does not exist"
            raise DatasetNotFoundError(f"The table {path} {state}; expected a CSV, Parquet or JSON Lines file.")
        try:
            if not path.is_fifo():
                return cls._inspect(path)
            with path.open("rb") as pipe:
                return cls._inspect(path, _copy_to_disk(pipe))
        except PermissionError:
            raise DatasetNotFoundError(f"No permission to read the table {path}.") from None

    @classmethod
    def _inspect(cls, path: Path, copy: Any = None) -> "TableFile":
        separator, decimal = None, "."
        with open(path if copy is None else copy.name, "rb") as file:
            table_format = _detect_format(path, file.read(4096))
            file.seek(0)
            if table_format == "csv":
                names, separator, decimal = _sniff_csv(path, file)
            else:
                names = (_parquet_names if table_format == "parquet" else _json_names)(path, file)
        if repeated := [name for name, count in Counter(names).items() if name and count > 1]:
            raise CorruptFileError(path, f"several columns have the name {format_names(repeated, 20)}", "Rename them.")
        return cls(path, names, separator, decimal, table_format, copy)

    def frames(
        self,
        columns: Collection[str] | None = None,
        *,
        texts: Collection[str] = (),
        raw: Collection[str] = (),
    ) -> Iterator[Any]:
        """Read the rows as pandas frames, whose index counts rows from 0.

        Args:
            columns: Columns to read; None for all that have a name.
            texts: Columns to read as strings.
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
            chunks = self._read_csv({*texts, *raw}, {*raw})
        else:
            chunks = (self._read_parquet if self.format == "parquet" else self._read_json)(wanted, {*raw})
        start, pandas = 0, import_optional("pandas")
        for frame in chunks:
            frame.index = pandas.RangeIndex(start, start := start + len(frame))
            yield select_columns(frame, wanted)
        if start == 0:
            raise CorruptFileError(self.path, "it has no rows", "Add rows below the column names.")

    def _read_csv(self, texts: set[str], raw: set[str]) -> Iterator[Any]:
        pandas = import_optional("pandas")
        names = [name or f"\0{i}" for i, name in enumerate(self.names)]
        options: dict[str, Any] = {
            "sep": self.separator,
            "decimal": self.decimal,
            "na_values": {name: [""] if name in raw else MISSING_VALUES for name in names} if raw else MISSING_VALUES,
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
            reason = str(error).replace("Error tokenizing data. C error: ", "").strip()
        hint = f"Put fields that contain the separator {self.separator!r} or a line break in double quotes."
        raise CorruptFileError(self.path, reason, hint)

    def _read_json(self, names: list[str], raw: set[str]) -> Iterator[Any]:
        pandas = import_optional("pandas")
        with self._stored.open("rb") as file:
            records = _read_records(self.path, file)
            while some := list(islice(records, _chunk_rows(len(names)))):
                columns: dict[str, Any] = {name: [record.get(name) for record in some] for name in names}
                for name, values in columns.items():
                    if name in raw:  # pandas would round integers in a column with missing values
                        columns[name] = pandas.Series([*map(_nested_to_json, values)], dtype=object)
                    elif any(isinstance(value, list | dict) for value in values):
                        raise _unsupported_type(self.path, name, "lists or objects")
                yield pandas.DataFrame(columns)

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


def select_columns(frame: Any, names: list[str]) -> Any:
    """Select columns of a pandas frame without copying it if it has no others.

    Args:
        frame: The frame.
        names: The columns.

    Returns:
        Frame of these columns.
    """
    return frame if list(frame.columns) == names else frame[names]


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


def _unsupported_type(path: Path, name: str, found: str) -> ArgumentError:
    hint = f"exclude column {name!r} of {path}, which has {found}"
    return ArgumentError("ignore", (), "all columns that are not numbers, strings, Booleans or dates", hint=hint)


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
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error) from None
        except (ValueError, RecursionError) as error:
            raise CorruptFileError(path, f"line {number} is not JSON ({error})", _JSON_HINT) from None
        if not isinstance(record, dict):
            raise CorruptFileError(path, f"line {number} is not an object ({line[:20]!r}…)", _JSON_HINT)
        yield record


def _sniff_csv(path: Path, beginning: IO[bytes]) -> tuple[tuple[str, ...], str, str]:
    """Names of the columns, separator and decimal sign."""
    rows: list[list[str]] = []
    try:
        with io.TextIOWrapper(beginning, encoding="utf-8-sig", newline="") as file:
            line = next((line for line in file if line.strip()), "")
            unquoted = re.sub(r'"[^"]*"', "", line)
            separator = max(",;\t|", key=unquoted.count)
            reader = csv.reader(chain([line], file), delimiter=separator, skipinitialspace=True)
            names = next(reader)
            num_rows = 0 if separator == "," else max(100, MAX_SNIFFED_FIELDS // (1 + unquoted.count(separator)))
            with suppress(csv.Error):  # such as a very long text: pandas decides about it
                rows.extend(islice(reader, num_rows))
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None
    except csv.Error as error:
        raise CorruptFileError(path, f"its first line has no column names ({error})") from None
    if not line:
        raise CorruptFileError(path, "it is empty", "The first line must have the names of the columns.")
    fields = [value.strip() for row in rows for value in row]
    comma = any(map(_DECIMAL_COMMA.fullmatch, fields)) and not any(map(_DECIMAL_POINT.fullmatch, fields))
    return tuple(name.strip() for name in names), separator, "," if comma else "."


def _not_utf8(path: Path, error: UnicodeDecodeError) -> CorruptFileError:
    reason = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
    return CorruptFileError(path, reason, "Save it again in UTF-8 (a spreadsheet offers it when it saves a CSV).")
