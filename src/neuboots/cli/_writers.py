"""Columns of answers as a file, some rows at a time: CSV, Parquet or JSON Lines, or to standard output.

A file is written aside, under a hidden name in the same folder, and takes its place at the end: whatever goes wrong in
between, the place holds what it held before. Standard output gets its rows as they come.
"""

import csv
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from neuboots.cli._console import UsageError
from neuboots.data._common import import_optional

Format = Literal["csv", "parquet", "jsonl"]
Columns = dict[str, "np.ndarray[Any, Any]"]
Write = Callable[[Columns], None]

ENDINGS: dict[str, Format] = {
    **{".csv": "csv", ".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
}


def file_format(out: str, given: Format | None) -> Format:
    """What was asked for, else what the file's name says; standard output is CSV, and so are devices and pipes.

    >>> file_format("found.ndjson", None), file_format("-", None), file_format("-", "jsonl")
    ('jsonl', 'csv', 'jsonl')
    """
    if given is not None or is_device(out):
        return given or "csv"
    if (ending := Path(out).suffix.lower()) not in ENDINGS:
        raise UsageError(f"--out is {out}; give a name that ends in {', '.join(ENDINGS)}, or --format")
    return ENDINGS[ending]


def check_output_path(out: str, *inputs: str | Path) -> None:
    """Refuse now a place where nothing could be written in the end, and one that holds what is being read."""
    if out == "-":
        return
    path = Path(out).expanduser()
    if path.is_dir():
        raise UsageError(f"--out is {out}, which is a folder; give the name of a file in it, such as {path}/found.csv")
    if is_device(out):
        return
    for name in inputs:
        if path.exists() and _is_same(path, str(name)):
            raise UsageError(f"--out is {out}, the file that is read; give another name, so that it is not lost")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"--out is {out}, but there is no folder {folder}; create it, or give another place")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise UsageError(f"--out is {out}, which may not be written; give another place")


def is_device(out: str) -> bool:
    """Standard output, a device or a pipe: what is written to as it is, since there is nothing to take the place of."""
    path = Path(out).expanduser()
    return out == "-" or (path.exists() and not path.is_file() and not path.is_dir())


def _is_same(path: Path, name: str) -> bool:
    """Is this file the one of that name, or the one that standard input comes from?"""
    with suppress(OSError, ValueError):
        found = os.fstat(0) if name == "-" else os.stat(os.path.expanduser(name))
        return os.path.samestat(path.stat(), found)
    return False


@contextmanager
def open_writer(out: str, form: Format) -> Iterator[Write]:
    """Gives a function that takes some rows: columns of one length, always of the same names.

    >>> folder = tempfile.mkdtemp()
    >>> with open_writer(f"{folder}/found.csv", "csv") as write:
    ...     write({"row": np.array([1, 2]), "kind": np.array(["cat", "dog, small"]), "sure": np.array([True, False])})
    >>> print(Path(folder, "found.csv").read_text(encoding="utf-8"), end="")
    row,kind,sure
    1,"cat",true
    2,"dog, small",false
    """
    if out == "-":
        if sys.stdout is None:
            raise UsageError("standard output is closed; give a file as --out")
        sys.stdout.flush()
        with make_writer(sys.stdout.buffer, form) as write:
            yield write
        sys.stdout.buffer.flush()
        return
    path = Path(out).expanduser()
    if is_device(out):
        with path.open("wb") as sink, make_writer(sink, form) as write:
            yield write
        return
    path = path.resolve()  # a link stays one
    handle, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as sink, make_writer(sink, form) as write:
            yield write
        os.chmod(aside, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        os.replace(aside, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside)


@contextmanager
def make_writer(sink: IO[bytes], form: Format) -> Iterator[Write]:
    """Gives a function that writes rows to an open file in this form, and flushes."""
    if form == "parquet":
        writer = _Parquet(sink)
        try:
            yield writer.write
        except BaseException:
            writer.leave()
            raise
        writer.close()
        return
    yield _Csv(sink).write if form == "csv" else _JsonLines(sink).write


class _Csv:
    """Comma, decimal point, UTF-8; a text has quotes wherever one of the texts beside it needs them."""

    def __init__(self, sink: IO[bytes]) -> None:
        self.sink, self.begun = sink, False

    def write(self, columns: Columns) -> None:
        arrow, arrow_csv = import_optional("pyarrow"), import_optional("pyarrow.csv")
        if not self.begun:
            line = io.StringIO(newline="")
            csv.writer(line, lineterminator="\n").writerow(columns)
            self.sink.write(line.getvalue().encode())
            self.begun = True
        table = arrow.table({name: _arrow(values) for name, values in columns.items()})
        try:
            text = _rendered(arrow, arrow_csv, table, "none")
        except arrow.ArrowInvalid:  # a text holds a comma, a quote or a line break
            text = _rendered(arrow, arrow_csv, table, "needed")
        self.sink.write(text)
        self.sink.flush()


def _rendered(arrow: Any, arrow_csv: Any, table: Any, quotes: str) -> Any:
    text = arrow.BufferOutputStream()
    options = arrow_csv.WriteOptions(include_header=False, quoting_style=quotes, batch_size=max(1, len(table)))
    arrow_csv.write_csv(table, text, options)
    return text.getvalue()


class _JsonLines:
    """An object on each line; what is missing is null."""

    def __init__(self, sink: IO[bytes]) -> None:
        self.sink = sink

    def write(self, columns: Columns) -> None:
        values = [_arrow(column).to_pylist() for column in columns.values()]
        dump = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str).encode
        lines = [dump(dict(zip(columns, row, strict=True))) for row in zip(*values, strict=True)]
        self.sink.write("\n".join([*lines, ""]).encode())
        self.sink.flush()


class _Parquet:
    """Columns of the types that the first rows show."""

    def __init__(self, sink: IO[bytes]) -> None:
        self.sink = sink
        self.writer: Any = None
        self.schema: Any = None

    def write(self, columns: Columns) -> None:
        arrow, parquet = import_optional("pyarrow"), import_optional("pyarrow.parquet")
        arrays = {name: _arrow(values) for name, values in columns.items()}
        if self.writer is None:
            kinds = [arrow.string() if arrow.types.is_null(array.type) else array.type for array in arrays.values()]
            self.schema = arrow.schema(list(zip(arrays, kinds, strict=True)))
            self.writer = parquet.ParquetWriter(self.sink, self.schema)
        for field in self.schema:
            try:
                arrays[field.name] = arrays[field.name].cast(field.type)
            except arrow.ArrowException:
                raise ValueError(
                    f"column {field.name!r} holds {field.type} at first and {arrays[field.name].type} later; expected "
                    "one type, as Parquet does: write CSV, or leave it out of --keep"
                ) from None
        self.writer.write_table(arrow.table(arrays, schema=self.schema))

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def leave(self) -> None:
        """Without the end that would make a whole file of it."""
        if self.writer is not None:
            self.writer.is_open = False


def _arrow(values: "np.ndarray[Any, Any]") -> Any:
    """One column; NaN and None are missing, and values of several types become texts."""
    arrow = import_optional("pyarrow")
    try:
        return arrow.array(values, from_pandas=True)
    except (arrow.ArrowException, OverflowError):
        return arrow.array([None if value is None or value != value else str(value) for value in values.tolist()])


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
