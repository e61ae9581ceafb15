"""Tests of the console of cli and the writers of app.model: errors, warnings, text and file writers."""

import io
import json
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neuboots.app.model import make_writer, open_writer
from neuboots.cli._console import (
    UsageError,
    check_output_path,
    collect_warnings,
    echo,
    echo_table,
    file_format,
    print_json,
    user_errors,
)
from neuboots.report.tables import Cell, Table


class Stop(BaseException):
    pass


# -- errors and text -----------------------------------------------------------------------------------


def test_errors_become_one_line() -> None:
    for error in (ValueError("a\nb"), FileNotFoundError(2, "No such file", "x"), MemoryError(), ValueError()):
        with pytest.raises(UsageError) as caught, user_errors():
            raise error
        assert "\n" not in str(caught.value)
        assert caught.value.__suppress_context__
    with pytest.raises(KeyError), user_errors():  # a bug is not hidden
        raise KeyError("x")


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


def render(form: Any, *batches: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    with make_writer(sink, form) as write:
        for batch in batches:
            write({name: np.asarray(values) for name, values in batch.items()})
    return sink.getvalue()


def test_texts_survive_csv_and_json_lines() -> None:
    texts = ["plain", "a,b", 'say "no"', "two\nlines", "", " spaces ", "é 🐈", "0012", "\r"]
    columns = {"row": np.arange(len(texts)), 'odd, "name"': np.array(texts, dtype=object)}
    frame = pd.read_csv(io.BytesIO(render("csv", columns)), keep_default_na=False, dtype=str)
    assert list(frame) == ["row", 'odd, "name"']
    assert frame.iloc[:, 1].tolist() == texts
    lines = [json.loads(line) for line in render("jsonl", columns).splitlines()]
    assert [line['odd, "name"'] for line in lines] == texts


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
