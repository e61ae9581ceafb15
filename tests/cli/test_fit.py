"""`neuboots fit`: what it decides and says, for tables and for folders of pictures; what it leaves behind."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from neuboots import cli
from neuboots.app import load_model
from neuboots.cli import _console as boundary
from neuboots.cli._console import UsageError, as_options, collect_warnings, echo, user_errors
from neuboots.cli.fit import Fit

QUICK = ("--epochs", "1", "--num-samples", "4")


def pets(folder: Path, n: int = 120) -> Path:
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


# -- tables --------------------------------------------------------------------------------------------


def test_it_says_what_it_made_of_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = pets(tmp_path), tmp_path / "model"
    options = ("--max-categories", "50", "--ignore", "legs")
    assert fit(path, "--target", "price", "--out", model, *options) == 0
    said = capsys.readouterr().out
    assert f"{path} is a table; 'price' is predicted as a regression, as it holds numbers that are not whole" in said
    assert "(For a classification give --task classification.)" in said
    assert "  'weight': number, mean " in said
    assert "  'born': date, mean 202" in said
    assert "  'hair': 2 categories ('long', 'short')" in said
    assert "note: 'id' seems to number the rows; if so leave it out" in said
    assert "left out, as told: 'legs'" in said
    assert "or more different texts than --max-categories: 'name', 'nothing'" in said
    assert "On 12 test rows, which nothing was trained or calibrated on (97 train, 11 held out, 12 test):" in said
    assert "of the true values lie in their 95% intervals" in said
    assert "it would abstain from" in said
    assert said.splitlines()[-1] == f"Saved to {model}. Next: neuboots predict {model} NEW.csv --out predictions.csv"
    assert load_model(model).card.command == " ".join(
        ["neuboots", "fit", str(path), "--target", "price", "--out", str(model), "--ignore", "legs", "--epochs", "1",
         "--max-categories", "50", "--num-samples", "4"]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "options", "why"),
    [
        ("hair", (), "'hair' is predicted as a classification, as it holds texts."),
        (
            "legs",
            (),
            "'legs' is predicted as a classification, as it holds 2 different whole numbers, again and again.",
        ),
        ("legs", ("--task", "regression"), "'legs' is predicted as a regression, as --task says."),
        ("id", (), "'id' is predicted as a regression, as it holds numbers that are not whole, or more than 20"),
    ],
)
def test_it_says_why(target: str, options: tuple[str, ...], why: str, tmp_path: Path, capsys: Any) -> None:
    assert fit(pets(tmp_path), "--target", target, "--out", tmp_path / "model", "--ignore", "name", *options) == 0
    said = capsys.readouterr().out
    assert why in said
    assert ("give --task" in said) == (target != "hair" and not options)


def test_figures_that_look_like_numbers_are_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f'{k}.5,"{k % 9},5",{k % 3}/2024' for k in range(80)]
    (path := tmp_path / "t.csv").write_text("\n".join(["y,a,b", *lines]))
    assert fit(path, "--target", "y", "--out", tmp_path / "model") == 0
    said = capsys.readouterr().out
    assert "'a' was taken for categories, though it holds figures such as '0,5'; write numbers as 1.5" in said
    assert "'b' was taken for categories, though it holds figures such as '0/2024'" in said


@pytest.mark.parametrize(
    ("target", "column", "note"),
    [
        ("{0}.5%", "{1}", "'y' was taken for classes, though it holds figures such as '0.5%'; write"),
        ("{1}", "€ {0}.50", "'a' was taken for categories, though it holds figures such as '€ 0.50'; write"),
        ("{1}", "{0}.5{2}", "'a' was taken for categories, though it holds figures such as '0.5', beside '5.5 or so'"),
    ],
)
def test_money_shares_and_what_stands_beside_numbers(
    target: str, column: str, note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        ",".join(each.format(k % 9, k / 3, " or so" * (k % 9 == 5)) for each in (target, column)) for k in range(80)
    ]
    (path := tmp_path / "t.csv").write_text("\n".join(["y,a", *lines]), encoding="utf-8")
    assert fit(path, "--target", "y", "--out", tmp_path / "model") == 0
    assert note in capsys.readouterr().out


def test_many_columns_are_not_all_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 40)), columns=[f"c{k}" for k in range(40)])
    frame.to_csv(path := tmp_path / "t.csv", index=False)
    assert fit(path, "--target", "c0", "--out", tmp_path / "model") == 0
    said = capsys.readouterr().out
    assert "… and 27 columns more" in said
    assert "'c13'" not in said


def test_one_object_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(pets(tmp_path), "--target", "hair", "--out", tmp_path / "model", "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert out.count("\n") == 1
    assert found["rows"] == {"train": 97, "held out": 11, "test": 12}
    assert (found["kind"], found["task"], found["model"]) == ("table", "classification", str(tmp_path / "model"))
    assert {"error", "nll", "brier", "ece", "answered", "error_answered", "error_of_commonest", "notes"} <= {
        *found["figures"]
    }
    assert "is a table" in err
    assert load_model(tmp_path / "model").card.figures == found["figures"]


def test_an_interrupted_training_leaves_nothing(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from neuboots.estimators import NeuBootsRegressor

    path = pets(tmp_path)
    (tmp_path / "model").mkdir()

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(NeuBootsRegressor, "fit", stop)
    assert fit(path, "--target", "price", "--out", tmp_path / "model") == 130
    assert "Traceback" not in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["model", "pets.csv"]


def test_a_terminal_that_shows_less_loses_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that the encoding of standard output lacks, and a reader that has gone."""

    class Ascii(io.StringIO):
        encoding = "ascii"

        def write(self, text: str) -> int:
            if self.tell():
                raise BrokenPipeError
            return super().write(text.encode("ascii").decode())

    lines = [f"{k}.5,{k % 9},{'äö'[k % 2]}" for k in range(60)]
    (path := tmp_path / "größe.csv").write_text("\n".join(["größe,a,🐈", *lines]), encoding="utf-8")
    monkeypatch.setattr(boundary.sys, "stdout", Ascii())
    assert fit(path, "--target", "größe", "--out", tmp_path / "model") == 0
    monkeypatch.undo()
    assert load_model(tmp_path / "model").card.target == "größe"


# -- pictures ------------------------------------------------------------------------------------------


def picture(path: Path, colour: Any, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (12, 12), colour).save(path)


def test_class_folders_are_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for k in range(12):
        picture(tmp_path / "data" / "blue" / f"{k}.png", "#0000ff")
        picture(tmp_path / "data" / "red" / f"{k}.png", "#ff0000")
    (tmp_path / "data" / "red" / "readme.txt").write_text("red")
    assert fit(tmp_path / "data", "--out", tmp_path / "model", "--size", "8") == 0
    said = capsys.readouterr().out
    assert "is a folder of images by class" in said
    assert "sees 8 × 8 pixels" in said
    assert "of the classes are wrong" in said
    assert said.splitlines()[-1].endswith("NEW_IMAGES --out predictions.csv")
    model = load_model(tmp_path / "model")
    assert (model.kind, model.classes) == ("images", ("blue", "red"))


@pytest.mark.parametrize("inside", ["", "train/"])
@pytest.mark.parametrize("masks", ["masks", "labels"])
def test_images_and_masks_are_found(inside: str, masks: str, tmp_path: Path) -> None:
    """Only what is decided: training is for the tests of masks."""
    picture(tmp_path / inside / "images" / "1.png", "#0000ff")
    picture(tmp_path / inside / masks / "1.png", 1, "L")
    assert Fit(str(tmp_path), out=tmp_path / "model")._check() == "masks"
    with pytest.raises(UsageError, match="--max-error is for table and images, but .* is read as masks"):
        Fit(str(tmp_path), out=tmp_path / "model", max_error=0.2)._check()


def test_a_class_called_images_is_a_class(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "1.png", "#0000ff")
    picture(tmp_path / "paintings" / "1.png", "#0000ff")
    assert Fit(str(tmp_path), out=tmp_path / "model")._check() == "images"


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    assert fit(tmp_path / "data", "--out", tmp_path / "model") == 2
    assert capsys.readouterr().err.count("\n") == 1


# -- sentences -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("leave it out with ignore=['a b']", "leave it out with --ignore 'a b'"),
        ("got test=1.5; expected", "got --test 1.5; expected"),
        ("got max_error=True; expected", "got --max-error True; expected"),
        ("cannot read /data/test=1/seed=2.csv: no", "cannot read /data/test=1/seed=2.csv: no"),
        ("column 'test=1' is odd", "column 'test=1' is odd"),
        ("x=3 stays", "x=3 stays"),
    ],
)
def test_arguments_become_options(sentence: str, expected: str) -> None:
    assert as_options(sentence) == expected


def test_faults_become_one_line() -> None:
    for fault in (ValueError("a\nb"), FileNotFoundError(2, "No such file", "x"), MemoryError()):
        with pytest.raises(UsageError) as caught, user_errors():
            raise fault
        assert "\n" not in str(caught.value)
        assert caught.value.__suppress_context__
    with pytest.raises(UsageError, match="^ValueError$"), user_errors():
        raise ValueError
    with pytest.raises(KeyError), user_errors():  # a fault of our own is not hidden
        raise KeyError("x")


def test_only_our_warnings_become_notes(recwarn: pytest.WarningsRecorder) -> None:
    import warnings

    with collect_warnings() as notes:
        for _ in range(3):
            warnings.warn_explicit("got\nlevel=0.9", UserWarning, "/x/neuboots/a.py", 1)
        warnings.warn_explicit("other", UserWarning, "/x/pandas/a.py", 1)
        warnings.warn_explicit("old", DeprecationWarning, "/x/neuboots/a.py", 2)
    assert notes == ["got --level 0.9"]
    assert not recwarn


def test_words_go_aside(capsys: pytest.CaptureFixture[str]) -> None:
    echo("here")
    echo("there", aside=True)
    assert capsys.readouterr() == ("here\n", "there\n")
