"""A table in a file, CSV, Parquet or JSON Lines, read in chunks of rows: never more than one of them is in memory.

A CSV has a first line of names, in UTF-8; its separator (comma, semicolon, tab or bar) and a decimal comma are found by
looking at it. Empty fields, "?" and what else is usual (`MISSING_VALUES`: NA, null, …) are missing; a row that is too short
lacks its last values, one that is too long is refused. JSON Lines have an object on each line, whose keys are the
columns; those of the first few thousand lines are known. The path "-" is standard input, which is read once.
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

from neuboots.data._common import CorruptFileError, DatasetNotFoundError, corrupt_file_error, import_optional

MAX_CHUNK_CELLS = 1 << 22  # of a chunk, at most: 32 MiB of numbers
MAX_CHUNK_ROWS = 1 << 14  # of a chunk, at most: a column may become hundreds, one for each category
MAX_SNIFFED_FIELDS = 200_000  # that are looked at for a decimal comma
SNIFFED_BYTES = 1 << 20  # bytes of standard input that are looked at
MISSING_VALUES = (
    *("", "?", "NA", "N/A", "n/a", "<NA>", "#NA", "#N/A", "#N/A N/A", "NaN", "nan", "-NaN", "-nan", "NULL", "null"),
    *("None", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
)
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_DECIMAL_POINT = re.compile(r"[-+]?\d*\.\d+")


@dataclass(frozen=True)
class TableFile:
    """Where a table lies, and how to read it; `names` are those of all its columns, "" where one has none.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "pets.csv")
    >>> _ = file.write_text("name;weight\\nRex;8,5\\nTom;4,25\\n", encoding="utf-8")
    >>> table = TableFile.open(file)
    >>> table.names, [frame.weight.tolist() for frame in table.frames()]
    (('name', 'weight'), [[8.5, 4.25]])
    """

    path: Path
    names: tuple[str, ...]
    separator: str | None = None  # of a CSV
    decimal: str = "."
    form: Literal["csv", "parquet", "json lines"] = "csv"
    pipe: IO[bytes] | None = field(default=None, compare=False)  # standard input, from its first byte on

    @classmethod
    def open(cls, path: str | Path) -> "TableFile":
        """Looks at the file's beginning; a sentence says what is wrong with it."""
        if str(path) == "-":
            if sys.stdin is None:
                raise DatasetNotFoundError("standard input is closed; expected a table there, or the path of one")
            return cls._open_pipe(sys.stdin.buffer)
        path = Path(path).expanduser()
        if not path.is_file() and not path.is_fifo():
            what = "is a folder" if path.is_dir() else "is not there"
            raise DatasetNotFoundError(f"the table {path} {what}; expected a CSV or Parquet file: give the path of one")
        try:
            if path.is_fifo():
                return cls._open_pipe(path.open("rb"), path)
            with path.open("rb") as file:
                return cls._of(path, _form(path, file.read(4096)), file)
        except PermissionError:
            raise DatasetNotFoundError(
                f"the table {path} may not be read; expected a file that you have the right to read"
            ) from None

    @classmethod
    def _open_pipe(cls, pipe: IO[bytes], path: Path = Path("standard input")) -> "TableFile":
        """A pipe gives its bytes once: those looked at are kept before the others; Parquet, read from its end, is
        copied to a file without a name."""
        start = pipe.read(SNIFFED_BYTES)
        form = _form(path, start[:4096])
        if form == "parquet":
            copy = tempfile.TemporaryFile()  # noqa: SIM115
            copy.write(start)
            shutil.copyfileobj(pipe, copy)
            return cls._of(path, form, copy, copy)
        start += pipe.readline(1 << 24) if len(start) == SNIFFED_BYTES else b""
        whole = start[: 1 + max(start.rfind(b"\n"), start.rfind(b"\r"))] or start
        return cls._of(path, form, io.BytesIO(whole), io.BufferedReader(_Joined(start, pipe), SNIFFED_BYTES))

    @classmethod
    def _of(cls, path: Path, form: Any, beginning: IO[bytes], pipe: IO[bytes] | None = None) -> "TableFile":
        beginning.seek(0)
        if form == "parquet":
            table = cls(path, _parquet_names(path, beginning), form=form, pipe=pipe)
        elif form == "json lines":
            table = cls(path, _json_names(path, beginning), form=form, pipe=pipe)
        else:
            table = cls(path, *_csv_beginning(path, beginning), pipe=pipe)
        if twice := [name for name, count in Counter(table.names).items() if name and count > 1]:
            which = ", ".join(map(repr, twice[:20]))
            raise ValueError(f"got {path} with several columns named {which}; expected one of each: rename them")
        return table

    def frames(
        self,
        columns: Collection[str] | None = None,
        *,
        texts: Collection[str] = (),
        raw: Collection[str] = (),
        checked: bool = False,
    ) -> Iterator[Any]:
        """Rows as pandas frames, numbered on from 0; `texts` are columns to be read as they are written, and of `raw`
        ones not even NA is missing; what is no text there keeps all its digits, and lists and objects become JSON.

        Of a file that was `checked` by reading all of it before, columns that are not wanted are skipped: pandas then
        cuts rows that are too long without a word.
        """
        chosen = None if columns is None else {*columns}
        wanted = [name for name in self.names if name and (chosen is None or name in chosen)]
        if self.pipe is not None and self.pipe.closed:
            raise ValueError(f"got {self.path} to be read again; expected a file: a pipe gives its rows once")
        if self.form == "csv":
            chunks = self._csv_frames({*texts, *raw}, {*raw}, wanted, checked)
        else:
            chunks = (self._parquet_frames if self.form == "parquet" else self._json_frames)(wanted, {*raw})
        empty = True
        for frame in chunks:
            empty = empty and not len(frame)
            yield select_columns(frame, wanted)
        if empty:
            raise ValueError(f"got {self.path} without rows; expected some below the names of the columns")

    def _csv_frames(self, texts: set[str], raw: set[str], wanted: list[str], checked: bool) -> Iterator[Any]:
        pandas = import_optional("pandas")
        names = [name or f"\0{i}" for i, name in enumerate(self.names)]
        missing = {name: [""] if name in raw else MISSING_VALUES for name in names} if raw else MISSING_VALUES
        options: dict[str, Any] = {
            **{"sep": self.separator, "decimal": self.decimal, "na_values": missing, "keep_default_na": False},
            **{"header": 0, "names": names, "index_col": False, "skipinitialspace": True, "low_memory": False},
            "usecols": wanted if checked else None,
            "dtype": dict.fromkeys(texts, str),
            "chunksize": _rows_at_once(len(names)),
        }
        try:
            with self._opened() as file, pandas.read_csv(file, **options) as chunks:
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
            fault = f"its rows have more fields than the {len(names)} names of its first line"
        except pandas.errors.ParserError as error:
            fault = str(error).replace("Error tokenizing data. C error: ", "").strip()
        raise CorruptFileError(
            f"cannot read {self.path}: {fault}; expected one field for each column, with fields that hold the "
            f"separator {self.separator!r} or a line break in double quotes"
        )

    def _json_frames(self, names: list[str], raw: set[str]) -> Iterator[Any]:
        pandas = import_optional("pandas")
        start = 0
        with self._opened() as file:
            records = _records(self.path, file)
            while some := list(islice(records, _rows_at_once(len(names)))):
                columns: dict[str, Any] = {name: [record.get(name) for record in some] for name in names}
                for name, values in columns.items():
                    if name in raw:  # of whole numbers with gaps, pandas would make others with rounded digits
                        columns[name] = pandas.Series([*map(_as_json, values)], dtype=object)
                    elif any(isinstance(value, list | dict) for value in values):
                        raise ValueError(
                            f"got column {name!r} of {self.path} with lists or objects; expected numbers, texts, "
                            f"booleans or dates: leave it out with ignore=[{name!r}]"
                        )
                frame = pandas.DataFrame(columns)
                frame.index = pandas.RangeIndex(start, start := start + len(some))
                yield frame

    def _opened(self) -> IO[bytes]:
        return self.path.open("rb") if self.pipe is None else self.pipe

    def _parquet_frames(self, names: list[str], raw: set[str]) -> Iterator[Any]:
        pandas, arrow, parquet = (
            import_optional("pandas"),
            import_optional("pyarrow"),
            import_optional("pyarrow.parquet"),
        )
        start = 0
        try:
            with self._opened() as opened, parquet.ParquetFile(self.path if self.pipe is None else opened) as file:
                for batch in file.iter_batches(_rows_at_once(len(names)), columns=names):
                    columns = [_plain(arrow, name, batch.column(name), name in raw) for name in names]
                    frame = arrow.table(columns, names).to_pandas(ignore_metadata=True)
                    for name, column in zip(names, columns, strict=True):
                        if name in raw and column.null_count and arrow.types.is_integer(column.type):
                            frame[name] = column.to_pandas(integer_object_nulls=True)  # and not rounded
                    frame.index = pandas.RangeIndex(start, start + len(frame))
                    start += len(frame)
                    yield frame
        except (arrow.ArrowException, OSError) as error:
            raise corrupt_file_error(self.path, _first_line(error)) from None


class _Joined(io.RawIOBase):
    """Bytes that were read already, and then the rest."""

    def __init__(self, start: bytes, rest: IO[bytes]) -> None:
        self.start, self.rest = io.BytesIO(start), rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        some = self.start.read(len(buffer)) or self.rest.read(len(buffer))
        buffer[: len(some)] = some
        return len(some)

    def close(self) -> None:
        if self.rest is not sys.stdin.buffer:  # which is not ours to close
            self.rest.close()
        super().close()


def _form(path: Path, start: bytes) -> Literal["csv", "parquet", "json lines"]:
    """By the file's first bytes, and by its name."""
    ending = path.suffix.lower()
    if start.startswith(b"PAR1") or ending in (".parquet", ".pq"):
        return "parquet"
    if b"\0" in start or start.startswith((b"PK\x03\x04", b"\x1f\x8b")):
        raise CorruptFileError(
            f"cannot read {path}: it is neither text in UTF-8 nor Parquet; expected a CSV or Parquet file: save a "
            "spreadsheet as CSV in UTF-8, and unpack what is packed"
        )
    json_lines = ending in (".jsonl", ".ndjson", ".json") or start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
    return "json lines" if json_lines else "csv"


def _rows_at_once(columns: int) -> int:
    return max(1, min(MAX_CHUNK_ROWS, MAX_CHUNK_CELLS // max(1, columns)))


def select_columns(frame: Any, names: list[str]) -> Any:
    """These columns of a pandas frame; itself if it has no others, since of thousands a copy takes long."""
    return frame if list(frame.columns) == names else frame[names]


def _plain(arrow: Any, name: str, column: Any, raw: bool) -> Any:
    """The column as numbers, texts, booleans or points in time; if `raw`, whatever it holds, and with all digits."""
    kinds = arrow.types
    if kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kinds.is_decimal(column.type):
        return column.cast(arrow.string() if raw else arrow.float64())
    if kinds.is_date(column.type):
        return column.cast(arrow.timestamp("ms"))
    if str(column.type) == "string_view":
        return column.cast(arrow.large_string())
    known = (kinds.is_integer, kinds.is_floating, kinds.is_boolean, kinds.is_string, kinds.is_large_string)
    if not any(is_kind(column.type) for is_kind in (*known, kinds.is_timestamp, kinds.is_null)):
        if raw:
            texts = [value if value is None else str(_as_json(value)) for value in column.to_pylist()]
            return arrow.array(texts, arrow.string())
        raise ValueError(
            f"got column {name!r} of {column.type}; expected numbers, texts, booleans or dates: leave it out with "
            f"ignore=[{name!r}]"
        )
    return column


def _as_json(value: Any) -> Any:
    """A list or an object as a text; anything else as it is."""
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else value


def _parquet_names(path: Path, file: IO[bytes]) -> tuple[str, ...]:
    arrow, parquet = import_optional("pyarrow"), import_optional("pyarrow.parquet")
    try:
        names = parquet.read_schema(file).names
    except (arrow.ArrowException, OSError) as error:
        raise corrupt_file_error(path, _first_line(error)) from None
    return tuple("" if name.startswith("__index_level_") else name for name in names)  # pandas' row numbers


def _json_names(path: Path, file: IO[bytes]) -> tuple[str, ...]:
    """The keys of the first objects, in the order in which they come."""
    names = dict.fromkeys(name for record in islice(_records(path, file), MAX_CHUNK_ROWS) for name in record)
    if not names:
        raise ValueError(f'got {path}, which is empty; expected an object on each line, such as {{"age": 40}}')
    return tuple(name.strip() and name for name in names)


def _records(path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The object on each line that has one."""
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")) if line.strip() else None
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error) from None
        except (ValueError, RecursionError) as error:
            raise CorruptFileError(f"cannot read {path}: line {number} is no JSON ({error}); {_AN_OBJECT}") from None
        if isinstance(record, dict):
            yield record
        elif record is not None or line.strip():
            raise CorruptFileError(f"cannot read {path}: line {number} holds {line[:20]!r}…, no object; {_AN_OBJECT}")


_AN_OBJECT = 'expected an object on each line, such as {"age": 40, "town": "Rome"}'


def _csv_beginning(path: Path, beginning: IO[bytes]) -> tuple[tuple[str, ...], str, str]:
    """The names of the columns, the separator and the decimal sign."""
    try:
        with io.TextIOWrapper(beginning, encoding="utf-8-sig", newline="") as file:
            line, more = _first_line_of(file)
            bare = re.sub(r'"[^"]*"', "", line)
            separator = max(",;\t|", key=bare.count)
            some = 0 if separator == "," else max(100, MAX_SNIFFED_FIELDS // (1 + bare.count(separator)))
            rows = list(_readable(islice(csv.reader(chain(more, file), delimiter=separator), some)))
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None
    if not line:
        raise ValueError(f"got {path}, which is empty; expected a first line of names and a row on each line below")
    try:
        names = next(csv.reader(io.StringIO(line, newline=""), delimiter=separator, skipinitialspace=True))
    except csv.Error as error:
        raise corrupt_file_error(path, f"its first line holds no names ({error})") from None
    fields = [field.strip() for row in rows for field in row]
    comma = any(map(_DECIMAL_COMMA.fullmatch, fields)) and not any(map(_DECIMAL_POINT.fullmatch, fields))
    return tuple(name.strip() for name in names), separator, "," if comma else "."


def _first_line_of(file: IO[str]) -> tuple[str, list[str]]:
    """The first line that is not blank, with those that a quoted line break joins to it; and lines read beyond it."""
    line, more = next((line for line in file if line.strip()), ""), list[str]()
    quotes, size = line.count('"'), len(line)
    while quotes % 2 and size < SNIFFED_BYTES and (another := file.readline()):
        more.append(another)
        quotes, size = quotes + another.count('"'), size + len(another)
    return (line, more) if quotes % 2 else (line + "".join(more), [])  # a quote may be none, as in 5"


def _readable(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """Rows up to one that the library does not take, such as a very long text: pandas has the last word on it."""
    with suppress(csv.Error):
        yield from rows


def _not_utf8(path: Path, error: UnicodeDecodeError) -> CorruptFileError:
    return CorruptFileError(
        f"cannot read {path}: byte 0x{error.object[error.start]:02x} is no UTF-8; expected a CSV in UTF-8: save it "
        "again in that encoding (a spreadsheet offers it when it saves a CSV)"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
