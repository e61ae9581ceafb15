"""Tests of the console of cli and the writers of app.model: errors, warnings, text and file writers."""

import csv
import errno
import io
import json
import lzma
import os
import pty
import subprocess
import sys
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from _hostile import LONG, MARKUP, NAMES, is_escaped
from PIL import Image
from safetensors import SafetensorError

from neuboots._validation import ArgumentError
from neuboots.app.model import make_writer, open_writer
from neuboots.cli._console import (
    UsageError,
    check_output_path,
    collect_warnings,
    describe_error,
    echo,
    echo_rich,
    echo_table,
    file_format,
    print_json,
)
from neuboots.report.tables import Cell, Table


class Stop(BaseException):
    pass


# -- errors and text -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "word", "code"),
    [
        (ValueError("a\nb"), "a", 2),
        (ValueError(), "ValueError", 2),
        (UsageError("--out is x"), "--out", 2),
        (ArgumentError("max_error", 2, "a fraction", hint="use 0.1"), "--max-error is 2", 2),
        (FileNotFoundError(errno.ENOENT, "No such file", "t.csv"), "t.csv", 2),
        (OSError(errno.ENOSPC, "No space left on device", "p.csv"), "p.csv", 2),
        (OSError("standard output is closed"), "closed", 2),
        (MemoryError(), "memory", 2),
        (pa.ArrowMemoryError("malloc of size 8 failed"), "memory", 2),
        (torch.OutOfMemoryError("CUDA"), "memory", 2),
        (RecursionError(), "nested", 2),
        (UnicodeDecodeError("utf-8", b"a\xff", 1, 2, "invalid"), "0xff", 2),
        (OverflowError("int too large"), "large", 2),
        (EOFError(), "file", 2),
        (zlib.error("invalid header"), "header", 2),
        (zipfile.BadZipFile("not a zip file"), "zip", 2),
        (lzma.LZMAError("corrupt"), "corrupt", 2),
        (pa.ArrowKeyError("column"), "column", 2),
        (pa.ArrowNotImplementedError("list"), "list", 2),
        (SafetensorError("header"), "header", 2),
        (Image.DecompressionBombError("large"), "large", 2),
        (pd.errors.ParserError("line 3"), "line 3", 2),
        (ModuleNotFoundError("No module", name="pyarrow.lib"), "neuboots[tables]", 1),
        (ModuleNotFoundError("No module", name="neuboots.cli.x"), "ModuleNotFoundError", 1),
        (RuntimeError("mat1 and mat2 shapes\ncannot be multiplied"), "mat1", 1),
        (KeyError("column"), "KeyError", 1),
        (TypeError("int"), "TypeError", 1),
        (AssertionError(), "AssertionError", 1),
        (KeyboardInterrupt(), "interrupted", 130),
    ],
)
def test_every_error_has_a_message_and_a_code(error: BaseException, word: str, code: int) -> None:
    message, found = describe_error(error)
    assert word in message
    assert found == code


def test_only_our_warnings_become_notes(recwarn: pytest.WarningsRecorder) -> None:
    with collect_warnings() as notes:
        for _ in range(3):
            warnings.warn_explicit("too\nfew rows", UserWarning, "/x/neuboots/a.py", 1)
        warnings.warn_explicit("other", UserWarning, "/x/pandas/a.py", 1)
        warnings.warn_explicit("old", DeprecationWarning, "/x/neuboots/a.py", 2)
    assert notes == ["too few rows"]
    assert not recwarn


def test_text_tables_and_json_go_to_their_streams(capsys: pytest.CaptureFixture[str]) -> None:
    echo("here")
    echo("there", to_stderr=True)
    assert capsys.readouterr() == ("here\n", "there\n")
    rows = tuple((Cell(f"r{k}"), Cell(f"{k}", k)) for k in range(15))
    echo_table(Table("Title.", ("name", "value"), rows, note="a note"), to_stderr=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert all(word in err for word in ("Title.", "name", "r9", "5 more", "a note"))
    assert "r10" not in err
    print_json({"width": float("inf"), "levels": (0.5, 1)})
    assert json.loads(capsys.readouterr().out) == {"width": None, "levels": [0.5, 1]}


def test_terminal_shows_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """No escape sequence, no markup of rich, no further line, and no line of 100 kB."""
    echo(*NAMES)
    echo_rich("\n".join(MARKUP), style="bold")
    rows = tuple((Cell(name), Cell("1", 1.0)) for name in NAMES)
    echo_table(Table("\x1b[2J\n", ("[red]a[/red]", LONG), rows, note="\u202e"), max_rows=100)
    out = capsys.readouterr().out
    assert is_escaped(out)
    assert out.count("[red]x[/red]") == 3
    assert out.count(":smile:") == 3
    assert len(out.splitlines()) < 6 * len(NAMES)
    assert max(map(len, out.splitlines())) < 5_000


# -- paths ---------------------------------------------------------------------------------------------


def write_and_raise(path: str, form: Any, error: type[BaseException]) -> None:
    with open_writer(path, form) as write:
        write({"row": np.arange(1000)})
        raise error


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, Stop])
def test_error_leaves_the_file_unchanged(form: Any, error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "out"
    for before in (None, b"mine"):
        if before is not None:
            path.write_bytes(before)
        with pytest.raises(error):
            write_and_raise(str(path), form, error)
        assert [each.read_bytes() for each in tmp_path.iterdir()] == ([] if before is None else [before])


def test_file_is_replaced_with_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.write_text("mine")
    path.chmod(0o640)
    (link := tmp_path / "link.csv").symlink_to(path)
    with open_writer(str(link), "csv") as write:
        write({"row": np.array([1])})
        assert path.read_text() == "mine"
    assert path.read_text() == "row\n1\n"
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    old = os.umask(0o027)
    try:
        with open_writer(str(tmp_path / "new.csv"), "csv") as write:
            write({"row": np.array([1])})
    finally:
        os.umask(old)
    assert (tmp_path / "new.csv").stat().st_mode & 0o777 == 0o640


def test_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    check_output_path(str(pipe))
    with subprocess.Popen(["timeout", "60", "cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        with open_writer(str(pipe), "csv") as write:
            write({"row": np.array([1, 2])})
        assert reader.communicate()[0] == b"row\n1\n2\n"
    assert pipe.is_fifo()


def test_output_paths_that_cannot_be_written_raise(tmp_path: Path) -> None:
    (data := tmp_path / "data.csv").write_text("mine")
    (link := tmp_path / "link.csv").symlink_to(data)
    for out in (tmp_path, tmp_path / "none" / "out.csv", data / "out.csv", data, link):
        with pytest.raises((UsageError, NotADirectoryError)):
            check_output_path(str(out), data)
    check_output_path("-", data)
    check_output_path(str(tmp_path / "new.csv"), data, "-")
    check_output_path(os.devnull, os.devnull)
    with pytest.raises(UsageError, match="out.txt"):
        file_format("out.txt", None)
    assert [file_format("out.txt", "csv"), file_format("OUT.CSV", None), file_format(os.devnull, None)] == ["csv"] * 3


# -- values --------------------------------------------------------------------------------------------


def render(form: Any, *batches: dict[str, Any], **options: bool) -> bytes:
    sink = io.BytesIO()
    with make_writer(sink, form, **options) as write:
        for batch in batches:
            write({name: np.asarray(values) for name, values in batch.items()})
    return sink.getvalue()


def test_texts_survive_csv_and_json_lines() -> None:
    texts = ["plain", "a,b", 'say "no"', "two\nlines", "", " spaces ", "é 🐈", "0012", "\r"]
    columns = {"row": np.arange(len(texts)), 'odd, "name"': np.array(texts, dtype=object)}
    frame = pd.read_csv(io.BytesIO(render("csv", columns, raw_cells=True)), keep_default_na=False, dtype=str)
    assert list(frame) == ["row", 'odd, "name"']
    assert frame.iloc[:, 1].tolist() == texts
    lines = [json.loads(line) for line in render("jsonl", columns).splitlines()]
    assert [line['odd, "name"'] for line in lines] == texts


FORMULAS = [
    *("=1+1", "+1+1", "-1+1", "@sum(1)", " =1", "\t=1", "\t1", "\r1", "\n1", "＝1", "＋a", "－a", "＠a", '"=1"', "'=1"),
    *("\ufeff=1", "\u200b=1", "\x00=1", "\xa0=1", "-", "+49 170", '=HYPERLINK("http://a.b","c")', "=cmd|' /C calc'!A0"),
]
HARMLESS = ["", "a", "-5", "+1.5", " -5 ", "-1.234,56", "-2e-7", "a=1", "2-1", "1+1", "é", "#", "(=1)"]


def test_formulas_get_an_apostrophe_in_csv() -> None:
    texts = np.array([*FORMULAS, *HARMLESS, None], dtype=object)
    columns = {"=row": np.arange(len(texts)), "@text": texts, "number": -np.ones(len(texts)), "+flag": texts == "a"}
    columns |= {"\t1": columns["=row"], "'\t1": columns["number"]}
    rows = [*csv.reader(io.StringIO(render("csv", columns).decode(), newline=""))]
    assert rows[0] == ["'=row", "'@text", "number", "'+flag", "'\t1", "'\t1"]
    assert rows[3][4:] == ["2", "-1"]
    assert [row[1] for row in rows[1:]] == [*(f"'{text}" for text in FORMULAS), *HARMLESS, ""]
    assert {row[2] for row in rows[1:]} == {"-1"}
    rows = [*csv.reader(io.StringIO(render("csv", columns, raw_cells=True).decode(), newline=""))]
    assert rows[0] == [*columns]
    assert [row[1] for row in rows[1:]] == [*FORMULAS, *HARMLESS, ""]


def test_other_formats_keep_formulas() -> None:
    columns = {"=a": np.array(FORMULAS, dtype=object)}
    assert pq.read_table(io.BytesIO(render("parquet", columns))).to_pydict() == {"=a": FORMULAS}
    assert [json.loads(line)["=a"] for line in render("jsonl", columns).splitlines()] == FORMULAS


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
def test_text_that_utf8_cannot_encode_is_escaped(form: Any) -> None:
    found = render(form, {"a\ud800": np.array(["b\udcff", None], dtype=object)})
    assert b"a\\ud800" in found.replace(b"\\\\", b"\\")
    assert b"b\\udcff" in found.replace(b"\\\\", b"\\")


def test_column_that_csv_cannot_hold_raises() -> None:
    with pytest.raises(pa.ArrowInvalid):
        render("csv", {"a": np.array([[1], [2, 3], None], dtype=object)})


def test_terminal_gets_escaped_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        with open_writer("-", "csv") as write:
            write({"\x1b]0;a\x07": np.array(["\x1b[2J", "\u202eb", "größe"], dtype=object)})
        with pytest.raises(ValueError, match="Parquet"), open_writer("-", "parquet"):
            pass
        monkeypatch.undo()
        found = os.read(leader, 10_000).decode()
    os.close(leader)
    assert [line for line in found.splitlines() if line] == [r"\x1b]0;a\x07", r"\x1b[2J", r"\u202eb", "größe"]


class FullDisk(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
def test_full_disk_is_reported_with_the_name_of_the_file(form: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Path, "open", lambda *_: io.BufferedWriter(FullDisk()))
    with pytest.raises(OSError, match="out.csv") as caught, open_writer(str(tmp_path / "out.csv"), form) as write:
        write({"row": np.arange(10)})
    assert caught.value.errno == errno.ENOSPC
    assert not [*tmp_path.iterdir()]


def test_missing_values_stay_missing() -> None:
    values = np.array(["a", None, float("nan")], dtype=object)
    assert render("csv", {"row": np.arange(3), "a": values}) == b"row,a\n0,a\n1,\n2,\n"
    assert [json.loads(line)["a"] for line in render("jsonl", {"a": values}).splitlines()] == ["a", None, None]
    large = np.array([2**64 - 1, None], dtype=object)
    assert render("csv", {"row": np.arange(2), "a": large}) == b"row,a\n0,18446744073709551615\n1,\n"
    assert render("jsonl", {"a": np.array([1.5, np.nan])}) == b'{"a": 1.5}\n{"a": null}\n'


def test_parquet_types_come_from_the_first_batch() -> None:
    first = {"a": np.array([None, None], dtype=object), "b": np.array([1, 2])}
    then = {"a": np.array(["x", None], dtype=object), "b": np.array([3.0, np.nan])}
    found = pq.read_table(io.BytesIO(render("parquet", first, then)))
    assert found.to_pydict() == {"a": [None, None, "x", None], "b": [1, 2, 3, None]}
    mixed = {"a": np.array([1, "x", None, True], dtype=object)}
    assert pq.read_table(io.BytesIO(render("parquet", mixed))).to_pydict() == {"a": ["1", "x", None, "True"]}
    with pytest.raises(ValueError, match="'b'"):
        render("parquet", first, {**then, "b": np.array(["x", "y"])})


def test_interrupted_parquet_is_not_valid(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with subprocess.Popen(["timeout", "60", "cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        with pytest.raises(Stop):
            write_and_raise(str(pipe), "parquet", Stop)
        sent = reader.communicate()[0]
    assert sent.startswith(b"PAR1")
    with pytest.raises(pa.ArrowInvalid):
        pq.read_table(io.BytesIO(sent))
