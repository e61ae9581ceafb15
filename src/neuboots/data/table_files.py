"""A table in a file, CSV or Parquet, read in chunks of rows: in memory there is never more than one of them.

A CSV has a first line of names, in UTF-8; its separator (comma, semicolon, tab or bar) and a decimal comma are found by
looking at it. Empty fields, "?" and what pandas takes for missing (NA, null, …) are missing; a row that is too short
lacks its last values, one that is too long is refused.
"""

import csv
import io
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from neuboots.data.sources import Corrupt, Missing, corrupt, need

CELLS = 1 << 22  # of a chunk, at most: 32 MiB of numbers
ROWS = 1 << 14  # of a chunk, at most: a column may become hundreds, one for each category
FIELDS = 200_000  # that are looked at for a decimal comma
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
    separator: str | None = None  # of a CSV; None for Parquet
    decimal: str = "."

    @classmethod
    def open(cls, path: str | Path) -> "TableFile":
        """Looks at the file's beginning; a sentence says what is wrong with it."""
        path = Path(path).expanduser()
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "is not there"
            raise Missing(f"the table {path} {what}; expected a CSV or Parquet file: give the path of one")
        with path.open("rb") as file:
            start = file.read(4096)
        if start.startswith(b"PAR1") or path.suffix in (".parquet", ".pq"):
            table = cls(path, _parquet_names(path))
        elif b"\0" in start or start.startswith((b"PK", b"\x1f\x8b")):
            raise Corrupt(
                f"cannot read {path}: it is neither text in UTF-8 nor Parquet; expected a CSV or Parquet file: save a "
                "spreadsheet as CSV in UTF-8, and unpack what is packed"
            )
        else:
            table = cls(path, *_csv_beginning(path))
        if twice := [name for name, count in Counter(table.names).items() if name and count > 1]:
            which = ", ".join(map(repr, twice))
            raise ValueError(f"got {path} with several columns named {which}; expected one of each: rename them")
        return table

    def frames(
        self, columns: Collection[str] | None = None, *, texts: Collection[str] = (), checked: bool = False
    ) -> Iterator[Any]:
        """Rows as pandas frames, numbered on from 0; `texts` are columns to be read as they are written.

        Of a file that was `checked` by reading all of it before, columns that are not wanted are skipped: pandas then
        cuts rows that are too long without a word.
        """
        chosen = None if columns is None else {*columns}
        wanted = [name for name in self.names if name and (chosen is None or name in chosen)]
        chunks = self._parquet_frames(wanted) if self.separator is None else self._csv_frames(texts, wanted, checked)
        empty = True
        for frame in chunks:
            empty = empty and not len(frame)
            yield columns_of(frame, wanted)
        if empty:
            raise ValueError(f"got {self.path} without rows; expected some below the names of the columns")

    def _csv_frames(self, texts: Collection[str], wanted: list[str], checked: bool) -> Iterator[Any]:
        pandas = need("pandas")
        names = [name or f"\0{i}" for i, name in enumerate(self.names)]
        options: dict[str, Any] = {
            **{"sep": self.separator, "decimal": self.decimal, "na_values": ["?"]},
            **{"header": 0, "names": names, "index_col": False, "skipinitialspace": True, "low_memory": False},
            "usecols": wanted if checked else None,
            "dtype": dict.fromkeys(texts, str),
            "chunksize": _rows_at_once(len(names)),
        }
        try:
            with pandas.read_csv(self.path, **options) as chunks:
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
        raise Corrupt(
            f"cannot read {self.path}: {fault}; expected one field for each column, with fields that hold the "
            f"separator {self.separator!r} or a line break in double quotes"
        )

    def _parquet_frames(self, names: list[str]) -> Iterator[Any]:
        pandas, arrow, parquet = need("pandas"), need("pyarrow"), need("pyarrow.parquet")
        start = 0
        try:
            with parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(_rows_at_once(len(names)), columns=names):
                    columns = [_plain(arrow, name, batch.column(name)) for name in names]
                    frame = arrow.table(columns, names).to_pandas(ignore_metadata=True)
                    frame.index = pandas.RangeIndex(start, start + len(frame))
                    start += len(frame)
                    yield frame
        except (arrow.ArrowException, OSError) as error:
            raise corrupt(self.path, _first_line(error)) from None


def _rows_at_once(columns: int) -> int:
    return max(1, min(ROWS, CELLS // max(1, columns)))


def columns_of(frame: Any, names: list[str]) -> Any:
    """These columns of a pandas frame; itself if it has no others, since of thousands a copy takes long."""
    return frame if list(frame.columns) == names else frame[names]


def _plain(arrow: Any, name: str, column: Any) -> Any:
    """The column as numbers, texts, booleans or points in time."""
    kinds = arrow.types
    if kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kinds.is_decimal(column.type):
        return column.cast(arrow.float64())
    if kinds.is_date(column.type):
        return column.cast(arrow.timestamp("ms"))
    if str(column.type) == "string_view":
        return column.cast(arrow.large_string())
    known = (kinds.is_integer, kinds.is_floating, kinds.is_boolean, kinds.is_string, kinds.is_large_string)
    if not any(is_kind(column.type) for is_kind in (*known, kinds.is_timestamp, kinds.is_null)):
        raise ValueError(
            f"got column {name!r} of {column.type}; expected numbers, texts, booleans or dates: leave it out with "
            f"ignore=[{name!r}]"
        )
    return column


def _parquet_names(path: Path) -> tuple[str, ...]:
    arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
    except (arrow.ArrowException, OSError) as error:
        raise corrupt(path, _first_line(error)) from None
    return tuple("" if name.startswith("__index_level_") else name for name in names)  # pandas' row numbers


def _csv_beginning(path: Path) -> tuple[tuple[str, ...], str, str]:
    """The names of the columns, the separator and the decimal sign."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            line = next((line for line in file if line.strip()), "")
            while line.count('"') % 2 and (more := file.readline()):
                line += more
            bare = re.sub(r'"[^"]*"', "", line)
            separator = max(",;\t|", key=bare.count)
            some = 0 if separator == "," else max(100, FIELDS // (1 + bare.count(separator)))
            rows = list(islice(csv.reader(file, delimiter=separator), some))
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None
    except csv.Error as error:
        raise corrupt(path, str(error)) from None
    if not line:
        raise ValueError(f"got {path}, which is empty; expected a first line of names and a row on each line below")
    names = next(csv.reader(io.StringIO(line, newline=""), delimiter=separator, skipinitialspace=True))
    fields = [field.strip() for row in rows for field in row]
    comma = any(map(_DECIMAL_COMMA.fullmatch, fields)) and not any(map(_DECIMAL_POINT.fullmatch, fields))
    return tuple(name.strip() for name in names), separator, "," if comma else "."


def _not_utf8(path: Path, error: UnicodeDecodeError) -> Corrupt:
    return Corrupt(
        f"cannot read {path}: byte 0x{error.object[error.start]:02x} is no UTF-8; expected a CSV in UTF-8: save it "
        "again in that encoding (a spreadsheet offers it when it saves a CSV)"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
