"""Tests of `neuboots predict`."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from _app import error_message

from neuboots import cli
from neuboots.app import tabular
from neuboots.app.tabular import TabularModel, fit_table
from neuboots.cli.models import Predict
from neuboots.data import tabular as tables

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
    """A table, a classifier and a regressor."""
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


# -- output --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["kind", "height"])
def test_formats_have_equal_content(target: str, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tabular, "MAX_CHUNK_CELLS", 200)
    found = {}
    for suffix in ("csv", "parquet", "jsonl"):
        out = tmp_path / f"out.{suffix}"
        assert predict(folder / target, folder / "flowers.csv", "--out", out, "--keep", "id", "soil") == 0
        found[suffix] = read(out)
        assert len(found[suffix]) == 300
    for suffix in ("parquet", "jsonl"):
        pd.testing.assert_frame_equal(found[suffix], found["csv"], check_dtype=False, rtol=1e-6)
    frame = found["csv"]
    assert frame.row.tolist() == list(range(1, 301))
    assert frame.id.tolist() == flowers().id.tolist()
    assert frame.soil.tolist() == flowers().soil.tolist()
    assert frame["abstain"].dtype == bool
    if target == "kind":
        assert {*frame.prediction} <= {*flowers().kind}


def test_probabilities_have_a_column_per_class(folder: Path, tmp_path: Path) -> None:
    assert predict(folder / "kind", folder / "flowers.csv", "--out", tmp_path / "out.csv", "--probabilities") == 0
    found = read(tmp_path / "out.csv")
    both = found[["probability of rose", 'probability of the "iris"']]
    np.testing.assert_allclose(both.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(both.max(axis=1), found.probability, atol=1e-6)


def test_copied_columns_are_renamed_if_taken(folder: Path, tmp_path: Path) -> None:
    frame = flowers(40).assign(row="r", prediction="p", gap=np.nan)
    frame.to_csv(path := tmp_path / "new.csv", index=False)
    assert predict(folder / "height", path, "--out", tmp_path / "out.csv", "--keep", "all") == 0
    found = read(tmp_path / "out.csv")
    assert list(found)[:9] == [*("row", "id", "size", "soil", "kind", "height", "input row", "input prediction", "gap")]
    assert found.row.tolist() == list(range(1, 41))
    assert {*found["input prediction"]} == {"p"}


def test_json_is_a_summary(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flowers(50).assign(soil="rock").to_csv(path := tmp_path / "new.csv", index=False)
    assert predict(folder / "height", path, "--out", tmp_path / "out.csv", "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert out.count("\n") == 1
    assert found["rows"] == 50
    assert found["abstained"] == int(read(tmp_path / "out.csv").abstain.sum())
    assert "'rock'" in found["notes"][0]
    assert "'rock'" in err


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"level": 0.0}, "--level"),
        ({"num_samples": 0}, "--num-samples"),
        ({"json": True}, "--json"),
        ({"out": "out.txt"}, "--out"),
        ({"probabilities": True}, "--probabilities"),
        ({"keep": ("nothing",)}, "--keep"),
        ({"model": "nowhere"}, "nowhere"),
        ({"data": "nowhere.csv"}, "nowhere.csv"),
    ],
)
def test_wrong_option_is_named(options: dict[str, Any], name: str, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    assert name in error_message(Predict(**{"model": "height", "data": "flowers.csv", **options}))


# -- streams -------------------------------------------------------------------------------------------


def test_standard_output_has_only_the_rows(folder: Path, capsysbinary: Any) -> None:
    assert predict(folder / "height", folder / "flowers.csv") == 0
    out, err = capsysbinary.readouterr()
    found = pd.read_csv(io.BytesIO(out))
    assert len(found) == 300
    assert b"300 rows" in err
    for form in ("jsonl", "parquet"):
        assert predict(folder / "height", folder / "flowers.csv", "--format", form) == 0
        out = capsysbinary.readouterr().out
        again = pd.read_json(io.BytesIO(out), lines=True) if form == "jsonl" else pd.read_parquet(io.BytesIO(out))
        pd.testing.assert_frame_equal(again, found, rtol=1e-9)


def test_standard_input_is_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (folder / "flowers.csv").open() as table:
        monkeypatch.setattr(sys, "stdin", table)
        assert predict(folder / "height", "-", "--out", tmp_path / "piped.csv", "--keep", "id") == 0
    assert predict(folder / "height", folder / "flowers.csv", "--out", tmp_path / "read.csv", "--keep", "id") == 0
    assert (tmp_path / "piped.csv").read_bytes() == (tmp_path / "read.csv").read_bytes()


def test_rows_are_written_as_they_are_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two chunks are read ahead of what is written."""
    monkeypatch.setattr(tables, "MAX_CHUNK_CELLS", 50)
    events: list[str] = []
    original, frames = TabularModel.predict, tables.TableFile.frames

    def count_reads(self: Any, *args: Any, **options: Any) -> Any:
        for frame in frames(self, *args, **options):
            events.append("read")
            yield frame

    def count_predictions(self: Any, *args: Any, **options: Any) -> Any:
        events.extend(["predict"] if events else [])  # not the check when the model is loaded
        return original(self, *args, **options)

    monkeypatch.setattr(tables.TableFile, "frames", count_reads)
    monkeypatch.setattr(TabularModel, "predict", count_predictions)
    assert predict(folder / "height", folder / "flowers.csv", "--out", tmp_path / "out.csv") == 0
    ahead = np.cumsum([1 if event == "read" else -1 for event in events])
    assert len(events) > 20
    assert ahead.max() <= 2


PROGRAM = """
import sys
from neuboots import cli
from neuboots.app import tabular
tabular.MAX_CHUNK_CELLS = 50
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_closed_pipe_ends_without_an_error(folder: Path) -> None:
    """As in `neuboots predict … | head`."""
    words = [sys.executable, "-c", PROGRAM, "predict", str(folder / "height"), str(folder / "flowers.csv")]
    with subprocess.Popen([*words, "--num-samples", "4"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"row,prediction")
        process.stdout.close()
        error = process.stderr.read()
        assert process.wait(60) == 0
    assert b"Traceback" not in error
    assert b"Exception" not in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("$N > /dev/full", 2),
        ("$N --out p.csv --json > /dev/full", 2),
        ("$N --out p.csv > /dev/full && test -s p.csv", 0),
        ("$N >&-", 2),
        ("$N --out p.csv --json >&-", 2),
        ("cp flowers.csv f.csv; ${N/flowers.csv/-} --out f.csv < f.csv; cmp f.csv flowers.csv && exit 2", 2),
    ],
)
def test_streams_that_cannot_be_written(line: str, code: int, folder: Path) -> None:
    """A result that is lost is an error; text that is lost is not."""
    command = f"{sys.executable} -m neuboots predict height flowers.csv --num-samples 4"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={**os.environ, "N": command},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == code, done
    assert done.stderr.count("\n") <= 1


@pytest.mark.slow
def test_sigterm_removes_temporary_files(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.csv")
    command = [sys.executable, "-m", "neuboots", "predict", str(folder / "height"), str(tmp_path / "rows.csv")]
    with subprocess.Popen([*command, "--out", str(tmp_path / "p.csv")]) as process:
        pipe = os.open(tmp_path / "rows.csv", os.O_RDWR)  # never blocks, even if the process has died
        try:
            for _ in range(600):
                if process.poll() is not None or len(list(tmp_path.iterdir())) == 2:
                    break
                subprocess.run(["sleep", "0.1"], check=True)
            assert len(list(tmp_path.iterdir())) == 2
            process.terminate()
            assert process.wait(60) == 128 + 15
        finally:
            process.kill()
            os.close(pipe)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
