"""`neuboots predict`: the forms of its output, its streams, and what it keeps whole when something goes wrong."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neuboots import cli
from neuboots.app.tabular import TabularModel, fit_table
from neuboots.cli._console import UsageError
from neuboots.cli._writers import check_output_path, file_format, make_writer, open_writer
from neuboots.data import table_files

OPTIONS: dict[str, Any] = {"epochs": 2, "num_samples": 4, "progress": False}


def flowers(n: int = 300) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    size = rng.normal(5, 1, n)
    return pd.DataFrame(
        {
            "id": [f"{k:04d}" for k in range(n)],
            "size": size.round(3),
            "soil": rng.choice(["clay", "sand, wet"], n),
            "kind": np.where(size + rng.normal(0, 0.3, n) > 5, "rose", 'the "iris"'),
            "height": (3 * size + rng.normal(0, 0.5, n)).round(2),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, and models of a class and of a number."""
    folder = tmp_path_factory.mktemp("flowers")
    flowers().to_csv(folder / "flowers.csv", index=False)
    for target, other in (("kind", "height"), ("height", "kind")):
        fit_table(folder / "flowers.csv", target, ignore=["id", other], **OPTIONS).save(folder / target)
    return folder


def predict(*words: str | Path) -> int:
    return cli.main(["predict", *map(str, words), "--num-samples", "4"])


def read(path: Path) -> pd.DataFrame:
    if path.suffix == ".csv":
        return pd.read_csv(path, dtype={"id": str})
    return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_json(path, lines=True, dtype={"id": str})


# -- forms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["kind", "height"])
def test_all_forms_hold_the_same(target: str, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(table_files, "CELLS", 200)
    found = {}
    for ending in ("csv", "parquet", "jsonl"):
        out = tmp_path / f"out.{ending}"
        assert predict(folder / target, folder / "flowers.csv", "--out", out, "--keep", "id", "soil") == 0
        found[ending] = read(out)
        assert len(found[ending]) == 300
    for ending in ("parquet", "jsonl"):
        pd.testing.assert_frame_equal(found[ending], found["csv"], check_dtype=False, rtol=1e-6)
    frame = found["csv"]
    assert frame.row.tolist() == list(range(1, 301))
    assert frame.id.tolist() == flowers().id.tolist()
    assert frame.soil.tolist() == flowers().soil.tolist()
    assert frame["abstain"].dtype == bool
    if target == "kind":
        assert {*frame.prediction} <= {*flowers().kind}
        assert list(frame)[3:] == [
            *("prediction", "probability", "std", "entropy", "mutual_information", "ood_score", "abstain")
        ]


def test_a_column_for_each_class(folder: Path, tmp_path: Path) -> None:
    assert predict(folder / "kind", folder / "flowers.csv", "--out", tmp_path / "out.csv", "--probabilities") == 0
    found = read(tmp_path / "out.csv")
    both = found[["probability of rose", 'probability of the "iris"']]
    np.testing.assert_allclose(both.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(both.max(axis=1), found.probability, atol=1e-6)


def test_everything_is_kept_and_nothing_overwritten(folder: Path, tmp_path: Path) -> None:
    """Columns of the input that are called as those of the output get another name."""
    frame = flowers(40).assign(row="r", prediction="p", gap=np.nan)
    frame.to_csv(path := tmp_path / "new.csv", index=False)
    assert predict(folder / "height", path, "--out", tmp_path / "out.csv", "--keep", "all") == 0
    found = read(tmp_path / "out.csv")
    assert list(found)[:9] == [*("row", "id", "size", "soil", "kind", "height", "input row", "input prediction", "gap")]
    assert found.row.tolist() == list(range(1, 41))
    assert {*found["input prediction"]} == {"p"}
    assert found.kind.tolist() == frame.kind.tolist()


def test_a_level_of_ones_own(folder: Path, tmp_path: Path) -> None:
    widths = []
    for level in ("0.5", "0.9"):
        assert predict(folder / "height", folder / "flowers.csv", "--out", tmp_path / "out.csv", "--level", level) == 0
        found = read(tmp_path / "out.csv")
        widths.append(float((found.high - found.low).mean()))
    assert widths[0] < widths[1]


def test_a_summary_for_machines(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = flowers(50).assign(soil="rock")
    frame.to_csv(path := tmp_path / "new.csv", index=False)
    assert predict(folder / "height", path, "--out", tmp_path / "out.csv", "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert out.count("\n") == 1
    assert found["rows"] == 50
    assert found["abstained"] == int(read(tmp_path / "out.csv").abstain.sum())
    assert found["notes"] == ["column 'soil' has values that no training row had, in 50 of 50 rows: 'rock'"]
    assert "'rock'" in err


# -- streams -------------------------------------------------------------------------------------------


def test_standard_output_has_the_rows_and_nothing_else(folder: Path, capsysbinary: Any) -> None:
    assert predict(folder / "height", folder / "flowers.csv") == 0
    out, err = capsysbinary.readouterr()
    found = pd.read_csv(io.BytesIO(out))
    assert len(found) == 300
    assert b"300 rows, on standard output" in err
    for form in ("jsonl", "parquet"):
        assert predict(folder / "height", folder / "flowers.csv", "--format", form) == 0
        out = capsysbinary.readouterr().out
        again = pd.read_json(io.BytesIO(out), lines=True) if form == "jsonl" else pd.read_parquet(io.BytesIO(out))
        pd.testing.assert_frame_equal(again, found, rtol=1e-9)


def test_standard_input(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO((folder / "flowers.csv").read_bytes())

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert predict(folder / "height", "-", "--out", tmp_path / "piped.csv", "--keep", "id") == 0
    assert predict(folder / "height", folder / "flowers.csv", "--out", tmp_path / "read.csv", "--keep", "id") == 0
    assert (tmp_path / "piped.csv").read_bytes() == (tmp_path / "read.csv").read_bytes()


PROGRAM = """
import sys
from neuboots import cli
from neuboots.data import table_files
table_files.CELLS = 50
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_reader_that_has_enough_ends_it_quietly(folder: Path) -> None:
    """`neuboots predict … | head`: the pipe is closed after the first rows of many."""
    words = [sys.executable, "-c", PROGRAM, "predict", str(folder / "height"), str(folder / "flowers.csv")]
    with subprocess.Popen([*words, "--num-samples", "4"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"row,prediction")
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait() == 0
    assert b"Traceback" not in err
    assert b"Exception" not in err


def shell(folder: Path, line: str) -> "subprocess.CompletedProcess[str]":
    """A line of a shell, with the command as $N; what matters is what happens to its streams."""
    command = f"{sys.executable} -m neuboots.cli predict height flowers.csv --num-samples 4"
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env={**os.environ, "N": command}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("line", "code", "sentence"),
    [
        ("$N > /dev/full", 2, "No space left"),
        ("$N --out p.csv --json > /dev/full", 2, "standard output does not take the result"),
        ("$N --out p.csv > /dev/full && test -s p.csv", 0, ""),
        ("$N >&-", 2, "standard output is closed"),
        (
            "cp flowers.csv f.csv; ${N/flowers.csv/-} --out f.csv < f.csv; cmp f.csv flowers.csv && exit 2",
            2,
            "that is read",
        ),
    ],
)
def test_streams_that_take_nothing(line: str, code: int, sentence: str, folder: Path) -> None:
    """Words that nobody can read stop no work; a result that nobody gets is a fault."""
    done = shell(folder, line)
    assert done.returncode == code, done
    assert sentence in done.stderr
    assert done.stderr.count("\n") <= 1


def test_asked_to_end_it_clears_away(folder: Path, tmp_path: Path) -> None:
    """SIGTERM, while it waits for rows: nothing is left under a hidden name."""
    os.mkfifo(tmp_path / "rows.csv")
    command = [sys.executable, "-m", "neuboots.cli", "predict", str(folder / "height"), str(tmp_path / "rows.csv")]
    with (
        subprocess.Popen([*command, "--out", str(tmp_path / "p.csv")]) as process,
        (tmp_path / "rows.csv").open("wb"),  # once that is read, the place aside is there
    ):
        assert len(list(tmp_path.iterdir())) == 2
        process.terminate()
        assert process.wait() == 128 + 15
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


def test_rows_are_written_as_they_are_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than two chunks are read ahead of what is written."""
    monkeypatch.setattr(table_files, "CELLS", 50)
    events: list[str] = []
    answer = TabularModel.predict
    frames = table_files.TableFile.frames

    def counted(self: Any, *words: Any, **options: Any) -> Any:
        for frame in frames(self, *words, **options):
            events.append("read")
            yield frame

    def noted(self: Any, *words: Any, **options: Any) -> Any:
        events.extend(["answered"] if events else [])  # and not the row that is tried when the model is loaded
        return answer(self, *words, **options)

    monkeypatch.setattr(table_files.TableFile, "frames", counted)
    monkeypatch.setattr(TabularModel, "answer", noted)
    assert predict(folder / "height", folder / "flowers.csv", "--out", tmp_path / "out.csv") == 0
    ahead = np.cumsum([1 if event == "read" else -1 for event in events])
    assert len(events) == 60
    assert ahead.max() <= 2


# -- places --------------------------------------------------------------------------------------------


class Stop(BaseException):
    pass


def interrupted(place: str, form: Any, fault: type[BaseException]) -> None:
    with open_writer(place, form) as write:
        write({"row": np.arange(1000)})
        raise fault


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, ValueError, Stop])
def test_what_goes_wrong_leaves_the_place_as_it_was(form: Any, fault: type[BaseException], tmp_path: Path) -> None:
    place = tmp_path / "out"
    for before in (None, b"mine"):
        if before is not None:
            place.write_bytes(before)
        with pytest.raises(fault):
            interrupted(str(place), form, fault)
        assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if before is None else [before])


def test_a_file_is_replaced_as_a_whole_with_its_rights(tmp_path: Path) -> None:
    place = tmp_path / "out.csv"
    place.write_text("mine")
    place.chmod(0o640)
    (link := tmp_path / "link.csv").symlink_to(place)
    with open_writer(str(link), "csv") as write:
        write({"row": np.array([1])})
        assert place.read_text() == "mine"
    assert place.read_text() == "row\n1\n"
    assert link.is_symlink()
    assert place.stat().st_mode & 0o777 == 0o640
    old = os.umask(0o027)
    try:
        with open_writer(str(tmp_path / "new.csv"), "csv") as write:
            write({"row": np.array([1])})
    finally:
        os.umask(old)
    assert (tmp_path / "new.csv").stat().st_mode & 0o777 == 0o640


def test_a_device_stays_one(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    check_output_path(str(pipe))
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        with open_writer(str(pipe), "csv") as write:
            write({"row": np.array([1, 2])})
        assert reader.communicate()[0] == b"row\n1\n2\n"
    assert pipe.is_fifo()


def test_places_that_will_not_do(tmp_path: Path) -> None:
    (data := tmp_path / "data.csv").write_text("mine")
    (link := tmp_path / "link.csv").symlink_to(data)
    for out, sentence in (
        (tmp_path, "is a folder; give the name of a file in it"),
        (tmp_path / "none" / "out.csv", "there is no folder"),
        (data / "out.csv", "there is no folder|Not a directory"),
        (data, "the file that is read"),
        (link, "the file that is read"),
    ):
        with pytest.raises((UsageError, NotADirectoryError), match=sentence):
            check_output_path(str(out), data)
    check_output_path("-", data)
    check_output_path(str(tmp_path / "new.csv"), data, "-")
    with pytest.raises(UsageError, match=r"--out is out.txt; give a name that ends in .csv, .parquet, .pq, .jsonl"):
        file_format("out.txt", None)
    assert file_format("out.txt", "csv") == "csv"
    assert file_format("OUT.CSV", None) == "csv"
    assert file_format(os.devnull, None) == "csv"
    check_output_path(os.devnull, os.devnull)


# -- values --------------------------------------------------------------------------------------------


def rendered(form: Any, *parts: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    with make_writer(sink, form) as write:
        for part in parts:
            write({name: np.asarray(values) for name, values in part.items()})
    return sink.getvalue()


def test_texts_come_back_from_csv() -> None:
    texts = ["plain", "a,b", 'say "no"', "two\nlines", "", " spaces ", "é 🐈", "0012", "\r"]
    columns = {"row": np.arange(len(texts)), 'odd, "name"': np.array(texts, dtype=object)}
    frame = pd.read_csv(io.BytesIO(rendered("csv", columns)), keep_default_na=False, dtype=str)
    assert list(frame) == ["row", 'odd, "name"']
    assert frame.iloc[:, 1].tolist() == texts
    lines = [json.loads(line) for line in rendered("jsonl", columns).splitlines()]
    assert [line['odd, "name"'] for line in lines] == texts


def test_what_is_missing_stays_missing() -> None:
    values = np.array(["a", None, float("nan")], dtype=object)
    assert rendered("csv", {"row": np.arange(3), "a": values}) == b"row,a\n0,a\n1,\n2,\n"
    assert [json.loads(line)["a"] for line in rendered("jsonl", {"a": values}).splitlines()] == ["a", None, None]
    large = np.array([2**64 - 1, None], dtype=object)  # of a column that is kept
    assert rendered("csv", {"row": np.arange(2), "a": large}) == b"row,a\n0,18446744073709551615\n1,\n"
    assert rendered("jsonl", {"a": np.array([1.5, np.nan])}) == b'{"a": 1.5}\n{"a": null}\n'


def test_columns_whose_type_shows_late() -> None:
    """Of a column without a value at first, and one that is whole at first; texts that are no longer numbers."""
    first = {"a": np.array([None, None], dtype=object), "b": np.array([1, 2])}
    then = {"a": np.array(["x", None], dtype=object), "b": np.array([3.0, np.nan])}
    found = pq.read_table(io.BytesIO(rendered("parquet", first, then)))
    assert found.to_pydict() == {"a": [None, None, "x", None], "b": [1, 2, 3, None]}
    mixed = {"a": np.array([1, "x", None, True], dtype=object)}
    assert pq.read_table(io.BytesIO(rendered("parquet", mixed))).to_pydict() == {"a": ["1", "x", None, "True"]}
    with pytest.raises(ValueError, match="column 'b' holds int64 at first and .* later; expected one type"):
        rendered("parquet", first, {**then, "b": np.array(["x", "y"])})


def test_a_parquet_without_its_end_is_not_whole(tmp_path: Path) -> None:
    """What went to a pipe cannot be taken back; but it must not look complete."""
    os.mkfifo(pipe := tmp_path / "pipe")
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        with pytest.raises(Stop):
            interrupted(str(pipe), "parquet", Stop)
        sent = reader.communicate()[0]
    assert sent.startswith(b"PAR1")
    with pytest.raises(pa.ArrowInvalid, match="magic bytes"):
        pq.read_table(io.BytesIO(sent))
