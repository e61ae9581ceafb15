"""The command line on files and models that are damaged: exit code 2, one line, and no file changed."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from neuboots import cli
from neuboots.data import tabular

QUICK = ("--epochs", "1", "--num-samples", "4")
FEATURES = "".join(f"{k % 7 * 1.5},{'pqr'[k % 3]}\n" for k in range(60))
NUMBERS = "y,a,b\n" + "".join(f"{k}.5,{line}\n" for k, line in enumerate(FEATURES.splitlines()))


class Shell:
    """Runs commands and compares the files of a folder before and after."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def run(self, *words: str | Path) -> tuple[int, str, str]:
        self.capsys.readouterr()
        code = cli.main([str(word) for word in words])
        return code, *self.capsys.readouterr()

    def write(self, content: str | bytes, name: str = "t.csv") -> Path:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def files(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(self.folder.rglob("*")) if path.is_file()}

    def rejects(self, *words: str | Path) -> None:
        before = self.files()
        code, out, error = self.run(*words)
        assert (code, error.count("\n")) == (2, 1), error
        assert "Traceback" not in out + error
        assert self.files() == before

    def predict(self, model: Path, path: Path, *options: str) -> pd.DataFrame:
        code, _, error = self.run(
            "predict", model, path, "--out", self.folder / "p.csv", "--num-samples", "4", *options
        )
        assert code == 0, error
        found = pd.read_csv(self.folder / "p.csv")
        assert np.isfinite(found.select_dtypes("number").to_numpy()).all()
        return found


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, capsys)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fitted")
    (folder / "t.csv").write_text(NUMBERS)
    assert cli.main(["fit", str(folder / "t.csv"), "--target", "y", "--out", str(folder / "model"), *QUICK]) == 0
    return folder / "model"


@pytest.fixture
def model(shell: Shell, fitted: Path) -> Path:
    """A copy of the model for each test, beside the table that it was fitted to."""
    shell.write(NUMBERS)
    shutil.copytree(fitted, shell.folder / "model")
    return shell.folder / "model"


def test_fit_replaces_models_only(shell: Shell, model: Path) -> None:
    fit = ("fit", shell.write(NUMBERS), "--target", "y", *QUICK, "--out")
    for place in (shell.folder / "t.csv", shell.folder / "t.csv" / "model", shell.folder):
        shell.rejects(*fit, place)
    (link := shell.folder / "link").symlink_to(model)
    before = shell.files()
    assert shell.run(*fit, link, "--seed", "4")[0] == 0
    assert link.is_symlink()
    assert shell.files() != before
    (model / "notes.txt").write_text("mine")
    shell.rejects(*fit, model)


def test_fit_on_a_file_name_that_is_not_unicode(shell: Shell) -> None:
    path = shell.write(NUMBERS).rename(os.fsdecode(os.fsencode(shell.folder) + b"/\xff.csv"))
    assert shell.run("fit", path, "--target", "y", "--out", shell.folder / "model", *QUICK)[0] == 0
    assert len(shell.predict(shell.folder / "model", path)) == 60


@pytest.mark.parametrize("rows", [2, 12])
def test_few_rows_are_fitted_with_a_note(rows: int, shell: Shell) -> None:
    path = shell.write("y,a,b\n" + "".join(f"{'uv'[k % 2]},{k},p\n" for k in range(rows)))
    code, out, _ = shell.run("fit", path, "--target", "y", "--out", shell.folder / "m", "--test-fraction", "0", *QUICK)
    assert (code, "held-out" in out) == (0, True)
    assert len(shell.predict(shell.folder / "m", path)) == rows


@pytest.mark.parametrize(
    "content",
    [
        "A,b\n" + FEATURES,
        "a,b\n",
        "a,b\n" + FEATURES + "heavy,p\n",
        "a,b\n" + FEATURES + "1e300,p\n",
        "a,b\n" + FEATURES + "1,p,3\n",
        ("a,b\n" + FEATURES + "1,é\n").encode("latin-1"),
    ],
)
@pytest.mark.parametrize("out", ["out.csv", "out.parquet", "out.jsonl"])
def test_predict_leaves_no_output_after_an_error(
    content: str | bytes, out: str, shell: Shell, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tabular, "MAX_CHUNK_CELLS", 20)  # many chunks are written before the error
    path, place = shell.write(content, "new.csv"), shell.write("mine", out)
    shell.rejects("predict", model, path, "--out", place, "--num-samples", "4")


def test_predict_abstains_far_from_the_training_rows(shell: Shell, model: Path) -> None:
    found = shell.predict(model, shell.write("a,b\n1e38,p\n-1e38,q\n1e20,r\n1000,p\n", "far.csv"))
    assert found.abstain.all()
    assert (found.ood_score > 10).all()


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "other"])
def test_predict_rejects_damaged_models(damage: str, shell: Shell, model: Path) -> None:
    path = shell.folder / "t.csv"
    for folder in (shell.folder, path, shell.folder / "none"):
        shell.rejects("predict", folder, path)
    for file in [file for file in model.rglob("*") if file.is_file()]:
        content = file.read_bytes()
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "other": b"[1, 2]"}[damage])
        shell.rejects("predict", model, path)
        file.write_bytes(content)
    assert len(shell.predict(model, path)) == 60


def edit(config: Any, *keys: Any, value: Any) -> None:
    for key in keys[:-1]:
        config = config[key]
    config[keys[-1]] = value


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("schema", "numbers"), []),
        (("schema", "numbers", 0, "std"), "wide"),
        (("schema", "numbers", 0, "std"), 0.0),
        (("schema", "numbers", 0, "mean"), None),
        (("schema", "numbers", 0, "kind"), "mood"),
        (("schema", "categories", 0, "values"), ["p"]),
        (("schema", "target", "classes"), ["u", "v"]),
        (("schema", "target", "task"), "magic"),
        (("schema",), None),
        (("card",), {}),
        (("version",), 99),
    ],
)
def test_predict_rejects_edited_models(keys: tuple[Any, ...], value: Any, shell: Shell, model: Path) -> None:
    (file,) = [file for file in model.glob("*.json") if "schema" in json.loads(file.read_text())]
    config = json.loads(file.read_text())
    edit(config, *keys, value=value)
    file.write_text(json.dumps(config))
    shell.rejects("predict", model, shell.folder / "t.csv")
