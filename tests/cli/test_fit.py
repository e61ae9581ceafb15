"""Tests of `neuboots fit`."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from _app import error_message
from PIL import Image

from neuboots import cli
from neuboots.app import load_model
from neuboots.app.tabular import TabularModel
from neuboots.cli.models import Fit
from neuboots.estimators import NeuBootsRegressor

QUICK = ("--epochs", "1", "--num-samples", "4")


def write_pets(folder: Path, n: int = 120) -> Path:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "id": np.arange(n),
            "name": [f"pet number {k}" for k in range(n)],
            "weight": rng.normal(8, 2, n).round(2),
            "hair": rng.choice(["long", "short"], n),
            "born": (pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, n), "D")).strftime("%Y-%m-%d"),
            "nothing": np.nan,
            "legs": rng.choice([3, 4], n),
            "price": rng.normal(size=n).round(3),
        }
    )
    frame.to_csv(path := folder / "pets.csv", index=False)
    return path


def fit(*words: str | Path) -> int:
    return cli.main(["fit", *map(str, words), *QUICK])


def write_image(path: Path, color: Any, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (12, 12), color).save(path)


def test_table_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = write_pets(tmp_path), tmp_path / "model"
    options = ("--max-categories", "50", "--ignore", "legs")
    assert fit(path, "--target", "price", "--out", model, *options) == 0
    out = capsys.readouterr().out
    for words in (
        *("regression of 'price'", "--task classification", "'weight': number", "'born': date", "'hair': 2 categories"),
        *("'id' seems to number the rows", "requested: 'legs'", "'name', 'nothing'", "97 train, 11 held out, 12 test"),
        *("prediction intervals cover", "the model abstains on"),
    ):
        assert words in out
    assert out.splitlines()[-1].endswith(f"neuboots predict {model} NEW.csv --out predictions.csv")
    assert load_model(model).card.command == " ".join(
        ["neuboots", "fit", str(path), "--target", "price", "--out", str(model), "--ignore", "legs", "--epochs", "1",
         "--max-categories", "50", "--num-samples", "4"]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "options", "task"),
    [
        ("hair", (), "classification"),
        ("legs", (), "classification"),
        ("legs", ("--task", "regression"), "regression"),
        ("id", (), "regression"),
    ],
)
def test_task_is_inferred_or_given(target: str, options: tuple[str, ...], task: str, tmp_path: Path) -> None:
    path, model = write_pets(tmp_path), tmp_path / "model"
    assert fit(path, "--target", target, "--out", model, "--ignore", "name", *options) == 0
    assert load_model(model).card.task == task


@pytest.mark.parametrize(
    ("target", "column", "name", "example"),
    [
        ("{0}.5%", "{1}", "y", "0.5%"),
        ("{1}", "€ {0}.50", "a", "€ 0.50"),
        ("{1}", "{0}.5{2}", "a", "5.5 or so"),
        ("{1}", '"{0},5"', "a", "0,5"),
    ],
)
def test_text_that_looks_like_numbers_is_noted(
    target: str, column: str, name: str, example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        ",".join(each.format(k % 9, k / 3, " or so" * (k % 9 == 5)) for each in (target, column)) for k in range(80)
    ]
    (path := tmp_path / "t.csv").write_text("\n".join(["y,a", *lines]), encoding="utf-8")
    assert fit(path, "--target", "y", "--out", tmp_path / "model") == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "was read as text" in line]
    assert f"'{name}'" in note
    assert example in note


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(write_pets(tmp_path), "--target", "hair", "--out", tmp_path / "model", "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert out.count("\n") == 1
    assert found["rows"] == {"train": 97, "held out": 11, "test": 12}
    assert (found["kind"], found["task"], found["model"]) == ("table", "classification", str(tmp_path / "model"))
    assert {"error", "nll", "brier", "ece", "accepted", "error_accepted", "majority_error"} <= {*found["metrics"]}
    assert "is a table" in err
    assert load_model(tmp_path / "model").card.metrics == found["metrics"]


def test_interrupted_training_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    path = write_pets(tmp_path)
    (tmp_path / "model").mkdir()

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(NeuBootsRegressor, "fit", stop)
    assert fit(path, "--target", "price", "--out", tmp_path / "model") == 130
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["model", "pets.csv"]


@pytest.mark.parametrize("full", [("model",), ("model", "temporary"), ("model", "temporary", "home", "here")])
def test_full_disk_does_not_lose_the_training(
    full: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, save = write_pets(tmp_path), TabularModel.save

    def save_unless_full(self: TabularModel, folder: Any) -> None:
        if Path(folder).relative_to(tmp_path).parts[0] in full:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        save(self, folder)

    for name in ("temporary", "home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(TabularModel, "save", save_unless_full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    assert fit(path, "--target", "price", "--out", tmp_path / "model") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(tmp_path / "model") in error
    saved = [folder for folder in tmp_path.glob("*/*/*") if folder.is_dir()]
    assert len(saved) == (len(full) < 4)
    for folder in saved:
        assert str(folder) in error
        assert load_model(folder).card.target == "price"
    assert len([*tmp_path.glob("*/neuboots-*")]) == len(saved)


def test_too_little_space_is_an_error_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_pets(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    monkeypatch.setattr(NeuBootsRegressor, "fit", lambda *_, **__: pytest.fail("trained"))
    assert fit(path, "--target", "price", "--out", tmp_path / "model") == 2


@pytest.mark.slow
def test_limit_of_the_file_size_is_reported(tmp_path: Path) -> None:
    """Nothing can be written: the model is lost, but no file is left behind."""
    path = write_pets(tmp_path)
    command = f"ulimit -f 8; {sys.executable} -m neuboots fit {path} --target price --out {tmp_path}/model --epochs 1"
    environment = {**os.environ, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    options: Any = {"capture_output": True, "text": True, "check": False, "env": environment, "cwd": tmp_path}
    done = subprocess.run(["bash", "-c", command], **options)
    assert done.returncode == 2
    assert done.stderr.startswith("neuboots: --out is")
    assert done.stderr.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["pets.csv"]


def test_limited_terminal_does_not_stop_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoding without the column's letters, and a reader that has gone."""

    class Ascii(io.StringIO):
        encoding = "ascii"

        def write(self, text: str) -> int:
            if self.tell():
                raise BrokenPipeError
            return super().write(text.encode("ascii").decode())

    lines = [f"{k}.5,{k % 9},{'äö'[k % 2]}" for k in range(60)]
    (path := tmp_path / "größe.csv").write_text("\n".join(["größe,a,🐈", *lines]), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", Ascii())
    assert fit(path, "--target", "größe", "--out", tmp_path / "model") == 0
    monkeypatch.undo()
    assert load_model(tmp_path / "model").card.target == "größe"


def test_class_folders_are_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for k in range(12):
        write_image(tmp_path / "data" / "blue" / f"{k}.png", "#0000ff")
        write_image(tmp_path / "data" / "red" / f"{k}.png", "#ff0000")
    assert fit(tmp_path / "data", "--out", tmp_path / "model", "--size", "8") == 0
    out = capsys.readouterr().out
    assert "8 × 8 pixels" in out
    assert out.splitlines()[-1].endswith("NEW_IMAGES --out predictions.csv")
    model = load_model(tmp_path / "model")
    assert (model.kind, model.classes) == ("images", ("blue", "red"))


@pytest.mark.parametrize("split", ["", "train/"])
@pytest.mark.parametrize("masks", ["masks", "labels"])
def test_folders_of_images_and_masks_are_recognized(split: str, masks: str, tmp_path: Path) -> None:
    write_image(tmp_path / split / "images" / "1.png", "#0000ff")
    write_image(tmp_path / split / masks / "1.png", 1, "L")
    assert Fit(str(tmp_path))._kind() == "masks"
    assert "--max-error" in error_message(Fit(str(tmp_path), out=tmp_path / "model", max_error=0.2))


def test_class_may_be_called_images(tmp_path: Path) -> None:
    write_image(tmp_path / "images" / "1.png", "#0000ff")
    write_image(tmp_path / "paintings" / "1.png", "#0000ff")
    assert Fit(str(tmp_path))._kind() == "images"


@pytest.mark.parametrize(
    ("data", "options", "name"),
    [
        ("pets.csv", {}, "--target"),
        ("pets.csv", {"target": "nothing here"}, "nothing here"),
        ("pets.csv", {"target": "price", "out": None}, "--out"),
        ("pets.csv", {"target": "price", "out": Path("pets.csv")}, "pets.csv"),
        ("pets.csv", {"target": "price", "out": Path("pets.csv/model")}, "--out"),
        ("pets.csv", {"target": "price", "size": (8,)}, "--size"),
        ("pets.csv", {"target": "price", "test_fraction": 1.0}, "--test-fraction"),
        ("pets.csv", {"target": "price", "epochs": 0}, "--epochs"),
        ("pets.csv", {"target": "price", "max_error": 0.0}, "--max-error"),
        ("pets.csv", {"target": "price", "max_width": -1.0}, "--max-width"),
        ("pets.csv", {"target": "price", "max_categories": 1}, "--max-categories"),
        ("pets.csv", {"target": "name", "task": "regression"}, "name"),
        ("pets.csv", {"target": "price", "method": "magic"}, "magic"),
        ("-", {"target": "price"}, "DATA"),
        ("empty", {}, "empty"),
        ("empty", {"target": "price"}, "--target"),
        ("nowhere.csv", {"target": "price"}, "nowhere.csv"),
    ],
)
def test_wrong_option_is_named(
    data: str, options: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pets(tmp_path)
    (tmp_path / "empty").mkdir()
    assert name in error_message(Fit(data, **{"out": Path("model"), **options}))
    assert not (tmp_path / "model").exists()
