"""The command line on files and models that are damaged: exit code 2, one line, and no file changed."""

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from _artifacts import rewrite_artifact
from _hostile import NAMES, is_escaped
from _html import HtmlReader

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


@pytest.mark.slow
def test_notes_are_printed_and_part_of_the_json(shell: Shell, model: Path) -> None:
    """Of fit, predict, evaluate and suggest, on a file in which a stray quote hides rows and a row is short."""
    rows = NUMBERS.splitlines()[1:]
    text = "\n".join(["y,a,b", *rows, '7.5,1.5,"p', *rows[:5], '8.5,1.5,p"', "9.5,3.0", ""])
    path, new = shell.write(text), shell.write("a,b\n1.5,p\n,\n", "new.csv")
    commands = (
        ("fit", path, "--target", "y", "--out", shell.folder / "other", *QUICK),
        ("evaluate", model, path, "--out", shell.folder / "page.html"),
        ("suggest", model, path),
        ("predict", model, path, "--out", shell.folder / "p.csv"),
    )
    for command in commands:
        code, out, error = shell.run(*command)
        assert (code, "a quoted text has 7 lines" in out + error) == (0, True)
        assert "1 rows have fewer fields" in out + error
        notes = " ".join(json.loads(shell.run(*command, "--json")[1])["notes"])
        assert ("a quoted text has 7 lines" in notes, "1 rows have fewer fields" in notes) == (True, True)
    code, out, _ = shell.run("predict", model, new, "--out", shell.folder / "p.csv", "--json")
    assert (code, json.loads(out)["rows"]) == (0, 2)
    assert any("1 of 2 rows have no known value" in note for note in json.loads(out)["notes"])
    wide = shell.write("y;a;b\n" + "".join(f"{k};1,{k:03d};p{k}\n" for k in range(300)), "wide.csv")
    fit = ("fit", wide, "--target", "y", "--out", shell.folder / "wide", *QUICK, "--max-categories", "9")
    shell.rejects(*fit)
    code, out, _ = shell.run(*fit, "--decimal", ",", "--json")
    assert (code, json.loads(out)["excluded"]) == (0, ["b"])


def test_predict_abstains_far_from_the_training_rows(shell: Shell, model: Path) -> None:
    found = shell.predict(model, shell.write("a,b\n1e38,p\n-1e308,q\n1e308,r\n1000,p\n", "far.csv"))
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
        (("card",), []),
        (("card", "task"), "regress"),
        (("card", "task"), "classification"),
        (("card", "task"), ["regression"]),
        (("card", "target"), {"a": "\x1b[2J"}),
        (("card", "command"), 3),
        (("card", "version"), None),
        (("card", "rows"), {"test": "many"}),
        (("card", "rows"), {"test": -1}),
        (("card", "rows"), 7),
        (("card", "seed"), "0"),
        (("card", "seed"), 10**30),
        (("card", "metrics"), "good"),
        (("model",), "mood"),
        (("model",), ["table"]),
        (("rule",), {"width": "wide"}),
    ],
)
def test_predict_rejects_edited_models(keys: tuple[Any, ...], value: Any, shell: Shell, model: Path) -> None:
    rewrite_artifact(model, lambda config, tensors: edit(config, *keys, value=value))
    shell.rejects("predict", model, shell.folder / "t.csv")


VALUES = (1e308, -1e308, -5, 7.5, True, "0.1", "\x1b[2J", None, [0.1], {"a": 1}, [[[]]])


@pytest.mark.parametrize("shift", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, len(VALUES)))])
def test_evaluate_reads_metrics_of_any_type(shift: int, shell: Shell, model: Path) -> None:
    """The card is written by whoever made the model."""

    def change(config: dict[str, Any], tensors: Any) -> None:
        names = (*config["card"]["metrics"], "\x1b[2J")
        config["card"]["metrics"] = {name: VALUES[(k + shift) % len(VALUES)] for k, name in enumerate(names)}

    rewrite_artifact(model, change)
    code, out, error = shell.run("evaluate", model, shell.folder / "t.csv", "--json", "--num-samples", "4")
    assert code == 0, error
    assert is_escaped(out + error)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, '{"format": "neuboots", "x": ' + "[" * 100_000])
def test_deep_json_is_rejected(content: str, shell: Shell, model: Path) -> None:
    (model / "config.json").write_text(content)
    for command in ("predict", "evaluate", "suggest"):
        shell.rejects(command, model, shell.folder / "t.csv")
    table = shell.write(content + "\n", "deep.jsonl")
    shell.rejects("fit", table, "--target", "y", "--out", shell.folder / "new")


# -- names ---------------------------------------------------------------------------------------------

TABLES = {
    "columns": ([name for name in NAMES if "\x00" not in name], ["u", "v"]),
    "classes": (["a"], NAMES[:12]),
    "more classes": (["a"], NAMES[12:24]),
    "further classes": (["a"], NAMES[24:36]),
    "last classes": (["a"], [name for name in NAMES[36:] if name.strip()]),
}


@pytest.mark.parametrize(
    "content", ["columns", *(pytest.param(name, marks=pytest.mark.slow) for name in TABLES if name != "columns")]
)
@pytest.mark.parametrize("form", ["jsonl", pytest.param("parquet", marks=pytest.mark.slow)])
def test_hostile_names(content: str, form: str, shell: Shell) -> None:
    columns, classes = TABLES[content]
    rows: list[dict[str, Any]] = [
        {**{name: NAMES[(k + i) % 40] if i % 8 == 1 else k % 7 + i for i, name in enumerate(columns)}}
        | {"number": k % 5 + k / 97, "target": classes[k % len(classes)]}
        for k in range(96)
    ]
    table = shell.write("\n".join(map(json.dumps, rows)), "t.jsonl")
    if form == "parquet":
        pd.DataFrame(rows).to_parquet(table := shell.folder / "t.parquet")
    model, few = shell.folder / "\x1b[31m $\\foo{$ model", ("--num-samples", "4")
    commands: list[tuple[str | Path, ...]] = [
        ("fit", table, "--target", "target", "--out", model, "--max-categories", "500", *QUICK),
        *(
            ("predict", model, table, "--out", shell.folder / f"p.{suffix}", "--keep", "all", *few)
            for suffix in ("csv", "jsonl", "parquet")
        ),
        ("suggest", model, table, "--keep", "all", "-k", "9", *few),
    ]
    page = shell.folder / "e.html"
    if content != "columns":
        commands.append(("evaluate", model, table, "--out", page, *few))
    for words in commands:
        code, out, error = shell.run(*words)
        assert code == 0, error[-1000:]
        assert is_escaped(out + error)
        assert max(map(len, (out + error).splitlines())) < 5_000
    with (shell.folder / "p.csv").open(newline="", encoding="utf-8") as file:
        csv.field_size_limit(1 << 20)
        cells = [cell for line in csv.reader(file) for cell in line]
    assert not [cell for cell in cells if cell[:1] in ("=", "@", "\t", "\r")]
    assert not [cell for cell in cells if cell[:1] in ("+", "-") and not cell[1:].replace(".", "").isdigit()]
    kept = pd.read_parquet(shell.folder / "p.parquet")
    assert [*kept["target"]] == [row["target"] for row in rows]
    if page.exists():
        reader = HtmlReader(page.read_text(encoding="utf-8"))
        assert sum(tag == "script" for tag, _ in reader.elements) == 1
        assert not [key for _, attrs in reader.elements for key in attrs if key.startswith("on")]
