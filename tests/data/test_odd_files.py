"""Files that nobody planned for, through the command line: each works, or fails with one sentence and no trace.

Works: exit code 0, a model that loads, and answers without a gap. Fails: exit code 2, one line on standard error, and
no file that was not there before.
"""

import gzip
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file, save_file

from neuboots import cli
from neuboots.cli.fit import Fit
from neuboots.data import table_files
from neuboots.data.table_files import TableFile

QUICK = ("--epochs", "1", "--num-samples", "4")


class Said(NamedTuple):
    code: int
    out: str
    err: str


class Shell:
    """A folder, and commands that are typed in it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def __call__(self, *words: str | Path) -> Said:
        self.capsys.readouterr()
        code = cli.main([str(word) for word in words])
        return Said(code, *self.capsys.readouterr())

    def write(self, content: str | bytes, name: str = "t.csv") -> Path:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def files(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(self.folder.rglob("*")) if path.is_file()}

    def refused(self, sentence: str, *words: str | Path) -> None:
        """One line, exit code 2, and every file as it was."""
        before = self.files()
        said = self(*words)
        assert said.code == 2, said
        assert said.err.startswith("neuboots: ")
        assert said.err.count("\n") == 1, said.err
        assert "Traceback" not in said.out + said.err
        assert self.files() == before
        assert re.search(sentence, said.err), said.err

    def fit(self, path: Path, *options: str, target: str = "y", name: str = "model") -> Path:
        said = self("fit", path, "--target", target, "--out", self.folder / name, *QUICK, *options)
        assert said.code == 0, said
        assert said.err == ""
        assert f"neuboots predict {self.folder / name}" in said.out.splitlines()[-1]
        return self.folder / name

    def predict(self, model: Path, path: Path, *options: str) -> pd.DataFrame:
        """The answers, which have no gap."""
        out = self.folder / "answers.parquet"
        said = self("predict", model, path, "--out", out, "--num-samples", "4", *options)
        assert said.code == 0, said
        found = pd.read_parquet(out)
        answers = found.loc[:, "prediction":]  # type: ignore[misc]
        assert answers.notna().all(axis=None)
        assert np.isfinite(answers.select_dtypes("number").to_numpy()).all()
        assert found.row.tolist() == list(range(1, len(found) + 1))
        return found


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, capsys)


def lines(n: int = 60, *, y: str = "{k}.5", more: Sequence[str] = ()) -> str:
    """n rows of y, a number a and a category b, and one more column if there is something for it."""
    rows = [f"{y.format(k=k, c='uv'[k % 2])},{k % 7 * 1.5},{'pqr'[k % 3]}" for k in range(n)]
    return "".join(f"{row},{more[k % len(more)]}\n" if more else f"{row}\n" for k, row in enumerate(rows))


NUMBERS = "y,a,b\n" + lines()
CLASSES = "y,a,b\n" + lines(y="{c}")


# -- files that work -----------------------------------------------------------------------------------


WORKS: dict[str, str | bytes] = {
    "bom": "\ufeff" + NUMBERS,
    "semicolons": NUMBERS.replace(",", ";"),
    "decimal commas": NUMBERS.replace(",", ";").replace(".", ","),
    "tabs": NUMBERS.replace(",", "\t"),
    "bars": NUMBERS.replace(",", "|"),
    "crlf": NUMBERS.replace("\n", "\r\n"),
    "old mac": NUMBERS.replace("\n", "\r"),
    "no last line end": NUMBERS.rstrip("\n"),
    "blank lines": NUMBERS.replace("\n", "\n\n"),
    "quoted newlines": NUMBERS.replace(",p\n", ',"p\np"\n'),
    "quoted separators": NUMBERS.replace(",p\n", ',"p, and ""p"""\n'),
    "quoted names": NUMBERS.replace("y,a,b", '"y","a, or\n""A""","b"'),
    "unnamed column": ",y,a,b\n" + "".join(f"{k},{line}\n" for k, line in enumerate(lines().splitlines())),
    "all-missing column": "y,a,b,c\n" + lines(more=[""]),
    "missing numbers": NUMBERS.replace(",1.5,", ",NaN,").replace(",3.0,", ",,"),
    "missing categories": NUMBERS.replace(",q\n", ",\n"),
    "constant column": "y,a,b,c\n" + lines(more=["7"]),
    "constant text": "y,a,b,c\n" + lines(more=["same"]),
    "row too short": NUMBERS + "3.5,1\n4.5\n",
    "ids": "y,a,b,id\n" + lines(600, more=[f"id-{k:04d}-x" for k in range(600)]),
    "row numbers": "y,a,b,id\n" + lines(more=[str(k) for k in range(60)]),
    "very long text": NUMBERS + '3.5,1,"' + "long " * 60_000 + '"\n',
    "dates": "y,a,b,d\n" + lines(more=[f"2024-02-{k:02d}" for k in range(1, 30)]),
    "times": "y,a,b,d\n" + lines(more=[f"2024-02-{k:02d} 08:{k}:00" for k in range(10, 30)]),
    "mixed types": "y,a,b,m\n" + lines(more=["1", "x", "true", ""]),
    "beyond 2^53": "y,a,b,i\n" + lines(more=[str(2**53 + k) for k in range(60)]),
    "emoji": NUMBERS.replace("a,b", "größe,名前 🐈").replace(",p\n", ",🐈\n"),
    "booleans": "y,a,b,t\n" + lines(more=["TRUE", "false"]),
    "large offset": "y,a,b\n" + "".join(f"{1e9 + k / 8},{1e12 + k % 5},p\n" for k in range(60)),
    "tiny numbers": "y,a,b\n" + "".join(f"{k * 1e-30},{k % 5 * 1e-200},p\n" for k in range(60)),
}


@pytest.mark.parametrize("kind", WORKS)
def test_works(kind: str, shell: Shell) -> None:
    path = shell.write(WORKS[kind])
    model = shell.fit(path)
    found = shell.predict(model, path)
    assert len(found) == {"row too short": 62, "ids": 600, "very long text": 61}.get(kind, 60)
    assert list(found) == [
        *("row", "prediction", "low", "high", "std", "confidence_low", "confidence_high", "ood_score", "abstain")
    ]
    assert ((found.low < found.prediction) & (found.prediction < found.high)).all()


@pytest.mark.parametrize("y", ["{c}", "0{c}", "é {c}"])
def test_classes_are_given_back_as_they_are_written(y: str, shell: Shell) -> None:
    path = shell.write("y,a,b\n" + lines(y=y))
    found = shell.predict(shell.fit(path), path, "--probabilities")
    names = sorted(y.format(c=c) for c in "uv")
    assert {*found.prediction} <= {*names}
    assert list(found)[-2:] == [f"probability of {name}" for name in names]


@pytest.mark.parametrize(
    ("values", "kind"),
    [(("0", "1"), "i"), (("7", "10"), "i"), (("TRUE", "FALSE"), "b"), (("01", "x"), "O"), (("-1", "1"), "i")],
)
def test_predictions_have_the_type_of_the_target(values: tuple[str, str], kind: str, shell: Shell) -> None:
    path = shell.write("y,a\n" + "".join(f"{values[k % 2]},{k % 2 + k / 100}\n" for k in range(60)))
    found = shell.predict(shell.fit(path), path)
    assert pd.Series(found.prediction.tolist()).astype(object).map(type).nunique() == 1
    assert {*map(str, found.prediction)} <= {*values, "True", "False"}
    assert np.asarray(found.prediction.tolist()).dtype.kind == {"O": "U"}.get(kind, kind)


def test_a_class_of_one_row(shell: Shell) -> None:
    path = shell.write(CLASSES + "w,3,p\n")
    found = shell.predict(shell.fit(path), path, "--probabilities")
    assert "probability of w" in found


def test_ten_thousand_columns(shell: Shell) -> None:
    values = np.random.default_rng(0).normal(size=(40, 10_000)).round(2)
    path = shell.folder / "wide.csv"
    pd.DataFrame(values, columns=[f"c{k}" for k in range(10_000)]).to_csv(path, index=False)
    model = shell.fit(path, target="c7")
    assert len(shell.predict(model, path)) == 40


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t"])
def test_parquet_under_any_name(name: str, shell: Shell) -> None:
    frame = pd.read_csv(shell.write(NUMBERS, "plain.csv"))
    path = shell.folder / name
    frame.to_parquet(path)
    shell.predict(shell.fit(path), path)


@pytest.mark.parametrize("name", ["t.jsonl", "t.ndjson", "t.txt"])
def test_json_lines(name: str, shell: Shell) -> None:
    frame = pd.read_csv(plain := shell.write(NUMBERS, "plain.csv"))
    path = shell.folder / name
    frame.to_json(path, orient="records", lines=True)
    model = shell.fit(path)
    pd.testing.assert_frame_equal(shell.predict(model, path), shell.predict(model, plain))


# -- files that do not ---------------------------------------------------------------------------------


REFUSED: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "is empty; expected a first line of names"),
    "blank": ("\n \n", "is empty"),
    "header only": ("y,a,b\n", "without rows"),
    "one row": ("y,a,b\n1.5,2,p\n", "in every row; expected it to vary"),
    "two rows": ("y,a,b\nu,2,p\nv,3,q\n", "got --test 0.1 of 2 rows in 2 class.*give --test 0"),
    "constant target": ("y,a,b\n" + lines(y="1.5"), "'y' that is 1.5 in every row; expected it to vary"),
    "a single class": ("y,a,b\n" + lines(y="same"), "with the one class 'same'"),
    "target with gaps": (NUMBERS + ",1,p\n", "missing in 1 of 61 rows of .*, first in row 61"),
    "target without values": ("y,a,b\n" + lines(y=""), "'y' with no value"),
    "target of names": ("y,a,b\n" + lines(y="name {k}"), "60 different values in 60 rows"),
    "target of dates": ("y,a,b\n" + lines(9, y="2024-02-1{k}"), "got target 'y' with dates"),
    "duplicate names": ("y,a,a\n" + lines(), "several columns named 'a'"),
    "target alone": ("y\n1.5\n2.5\n", "no column but the target"),
    "others without values": ("y,a\n" + "1.5,\n2.5,\n" * 9, "no column but the target that has values"),
    "latin-1": (NUMBERS.replace(",p\n", ",é\n").encode("latin-1"), "byte 0xe9 is no UTF-8"),
    "utf-16": (NUMBERS.encode("utf-16"), "neither text in UTF-8 nor Parquet"),
    "gzip": (gzip.compress(NUMBERS.encode(), mtime=0), "unpack what is packed"),
    "infinite": (NUMBERS.replace(",1.5,", ",inf,"), "'a' holds inf in row 2; expected finite numbers"),
    "minus infinite": (NUMBERS.replace(",1.5,", ",-Infinity,"), "'a' holds -inf in row 2"),
    "infinite target": (NUMBERS.replace("\n7.5", "\ninf"), "'y' holds inf in row 8"),
    "huge": (NUMBERS.replace(",1.5,", ",1e300,"), "'a' holds numbers too large to square"),
    "huge target": (NUMBERS.replace("\n7.5", "\n1e300"), "'y' holds numbers too large to square"),
    "row too long": (NUMBERS + "3.5,1,p,7\n", "Expected 3 fields in line 62, saw 4"),
    "rows too long": ("y,a,b\n" + lines(more=["7"]), "more fields than the 3 names"),
    "open quote": (NUMBERS + '3.5,1,"p\n', "EOF inside string"),
    "classes beyond 2^53": (
        "y,a\n" + "".join(f"{2**60 + k % 2 * 1024},{k % 5}\n" for k in range(60)),
        "beyond 2\\^53, which cannot be told apart",
    ),
    "decimal commas in quotes": (
        "y,a\n" + "".join(f'{k}.5,"{k},{k % 10}5"\n' for k in range(600)),
        "'a' of .* more than 256 different texts.*--ignore 'a'.*write numbers as 1.5",
    ),
    "hundreds of digits": (NUMBERS.replace(",1.5,", f",{'9' * 400},"), "'a' holds inf in row 2"),
    "nothing but names": (
        "y,a\n" + "".join(f"{k}.5,somebody called {k} or so\n" for k in range(600)),
        "'a' of .* more than 256 different texts",
    ),
    "a very long name": (
        "y,a\n" + "".join(f"{k}.5,{k}\n" for k in range(600)) + f"1.5,{'long' * 9999}\n",
        "but not 'longlong.{20,60}…'",
    ),
    "numbers with a word": (
        "y,a\n" + "".join(f"{k}.5,{k}\n" for k in range(600)) + "3.5,many\n",
        "most of it are numbers, but not 'many'",
    ),
    "binary": (bytes(range(256)) * 40, "neither text in UTF-8 nor Parquet"),
    "one long line": (b"x" * 300_000, "its first line holds no names"),
    "half of a parquet": (b"PAR1" + bytes(200), "cannot read"),
    "json array": ('{"y": 1.5, "a": [1]}\n' * 60, "column 'a' of .* with lists or objects.*--ignore 'a'"),
    "json broken": ('{"y": 1.5, "a": 1}\n{"y": 2.5,\n', "line 2 is no JSON"),
    "json numbers": ('{"y": 1.5, "a": 1}\n7\n', "line 2 holds .*, no object"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str, shell: Shell) -> None:
    content, sentence = REFUSED[kind]
    path = shell.write(content)
    shell.refused(sentence, "fit", path, "--target", "y", "--out", shell.folder / "model", *QUICK)


def test_few_rows_say_what_is_not_promised(shell: Shell) -> None:
    path = shell.write("y,a,b\n" + lines(12))
    said = shell("fit", path, "--target", "y", "--out", shell.folder / "model", *QUICK)
    assert said.code == 0
    assert "So few test rows say little" in said.out
    assert "the interval is a normal one, without a guarantee" in said.out
    said = shell("predict", shell.folder / "model", path, "--out", shell.folder / "out.csv")
    assert said.err.count("without a guarantee") == 1
    path = shell.write("y,a,b\n" + lines(12, y="{c}"))
    said = shell("fit", path, "--target", "y", "--out", shell.folder / "model", *QUICK)
    assert "0 held-out rows are too few for an error of at most 5.0%" in said.out


def test_no_test_rows(shell: Shell) -> None:
    path = shell.write("y,a,b\nu,2,p\nv,3,q\n")
    model = shell.fit(path, "--test", "0")
    assert len(shell.predict(model, path)) == 2
    assert (
        "No rows were kept for a test" in shell("fit", path, "--target", "y", "--out", model, "--test", "0", *QUICK).out
    )


# -- places --------------------------------------------------------------------------------------------


def test_data_that_are_no_file(shell: Shell) -> None:
    out = ("--out", shell.folder / "model", *QUICK)
    shell.refused("none.csv is not there", "fit", shell.folder / "none.csv", "--target", "y", *out)
    shell.refused("is a folder; give the file of a table", "fit", shell.folder, "--target", "y", *out)
    shell.refused("training reads its rows several times", "fit", "-", "--target", "y", *out)
    path = shell.write(NUMBERS)
    shell.refused("--target is missing", "fit", path, *out)
    shell.refused("--out is missing", "fit", path, "--target", "y")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(shell: Shell) -> None:
    path = shell.write(NUMBERS)
    path.chmod(0)
    try:
        said = shell("fit", path, "--target", "y", "--out", shell.folder / "model")
        assert (said.code, said.err.count("\n")) == (2, 1)
        assert "may not be read" in said.err
    finally:
        path.chmod(0o600)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--target", "Y"), "got 'Y', which is no column of .*; expected one of 'y'"),
        (("--target", "prize"), "got 'prize', which is no column"),
        (("--target", ""), "got '', which is no column"),
        (("--target", "y", "--ignore", "y"), "got 'y' both to predict and to ignore"),
        (("--target", "y", "--ignore", "c"), "got 'c', which is no column"),
        (("--target", "y", "--ignore", "a", "b"), "no column but the target"),
        (("--target", "b", "--task", "regression"), "'b' of texts in .* for a regression"),
        (("--target", "y", "--task", "classification"), "with 60 different values in 60 rows"),
        (("--target", "y", "--method", "magic"), "--method is magic; give one of .*neuboots"),
        (("--target", "y", "--test", "1"), "--test is 1.0; give a share"),
        (("--target", "y", "--test", "nan"), "--test is nan; give a share"),
        (("--target", "y", "--max-error", "0"), "got --max-error 0.0; expected a share"),
        (("--target", "y", "--max-width", "-1"), "got --max-width -1.0; expected a width"),
        (("--target", "y", "--max-width", "nan"), "got --max-width nan; expected a width"),
        (("--target", "y", "--epochs", "0"), "--epochs is 0; give a whole number"),
        (("--target", "y", "--num-samples", "0"), "--num-samples is 0; give a whole number"),
        (("--target", "y", "--seed", "-1"), "--seed is -1; give a whole number"),
        (("--target", "y", "--max-categories", "1"), "--max-categories is 1; give a whole number"),
        (("--target", "y", "--size", "32"), "--size is for images and masks, but .* is read as table"),
        (("--target", "y", "--void", "0"), "--void is for masks"),
    ],
)
def test_options_that_do_not_fit(options: tuple[str, ...], sentence: str, shell: Shell) -> None:
    shell.refused(sentence, "fit", shell.write(NUMBERS), "--out", shell.folder / "model", *options)


def test_a_model_is_only_written_where_nothing_is_lost(shell: Shell) -> None:
    path = shell.write(NUMBERS)
    fit = ("fit", path, "--target", "y", *QUICK, "--out")
    shell.refused("t.csv exists and is not a saved model", *fit, path)
    shell.refused("t.csv is no folder that can be written to", *fit, path / "model")
    shell.refused("exists and is not a saved model", *fit, shell.folder)
    model = shell.fit(path, name="deep/model")  # folders are made
    before = (model / "model.json").read_text()
    shell.fit(path, "--seed", "3", name="deep/model")  # an earlier model is replaced
    assert (model / "model.json").read_text() != before
    (link := shell.folder / "link").symlink_to(model)
    shell.fit(path, "--seed", "4", name="link")  # and a link stays one
    assert link.is_symlink()
    assert '"seed": 4' in (model / "model.json").read_text()
    (model / "notes.txt").write_text("mine")
    shell.refused("exists and is not a saved model", *fit, model)


def test_the_folder_that_one_is_in(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shell.write(NUMBERS)
    (inside := shell.folder / "empty").mkdir()
    monkeypatch.chdir(inside)
    shell.refused("holds the folder that you are in", "fit", path, "--target", "y", "--out", ".")


def test_a_file_whose_name_is_no_text(shell: Shell) -> None:
    path = shell.write(NUMBERS)
    path = path.rename(os.fsdecode(os.fsencode(path.parent) + b"/\xff.csv"))
    model = shell.fit(path)
    assert shell("predict", model, path, "--out", shell.folder / "p.csv").code == 0


@pytest.mark.parametrize("head", ["PKID,x,y", "PK,x,y", '5" pipe,x,y', '"a;b;c;d",x,y', '"two\nlines, one name",x,y'])
def test_names_of_columns(head: str, shell: Shell) -> None:
    lines = "".join(f"{k % 5},{k % 7}.5,{k}.25\n" for k in range(60))
    shell.fit(shell.write(f"{head}\n{lines}"))


def test_a_quote_that_is_never_closed_is_not_looked_for_for_ever(shell: Shell) -> None:
    lines = "".join(f"{k % 5},{k}.25\n" for k in range(300_000))
    assert TableFile.open(shell.write(f'5" pipe,y\n{lines}')).names == ('5" pipe', "y")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_place(shell: Shell) -> None:
    path = shell.write(NUMBERS)
    place = shell.folder / "fixed"
    place.mkdir(mode=0o500)
    shell.refused("no folder that can be written to", "fit", path, "--target", "y", "--out", place / "model")


# -- predicting ----------------------------------------------------------------------------------------


FEATURES = "".join(f"{k % 7 * 1.5},{'pqr'[k % 3]}\n" for k in range(60))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fitted")
    (folder / "t.csv").write_text(NUMBERS)
    Fit(str(folder / "t.csv"), target="y", out=folder / "model", epochs=1, num_samples=4).run()
    return folder / "model"


@pytest.fixture
def model(shell: Shell, fitted: Path) -> Path:
    """A model of its own for each test, and the table it was fitted to."""
    shell.write(NUMBERS)
    shutil.copytree(fitted, shell.folder / "model")
    return shell.folder / "model"


@pytest.mark.parametrize("kind", [kind for kind in WORKS if kind not in ("quoted names", "emoji")])
def test_predicts_for_the_same_files(kind: str, shell: Shell, model: Path) -> None:
    """By a model of a plain file: all have the columns a and b."""
    assert len(shell.predict(model, shell.write(WORKS[kind], "odd.csv"))) >= 60


def test_columns_in_another_order_and_among_others(shell: Shell, model: Path) -> None:
    whole = shell.write("y,a,b\n" + "".join(f"0,{line}\n" for line in FEATURES.splitlines()), "whole.csv")
    turned = "more,b,a\n" + "".join(f"x,{line.split(',')[1]},{line.split(',')[0]}\n" for line in FEATURES.splitlines())
    pd.testing.assert_frame_equal(shell.predict(model, whole), shell.predict(model, shell.write(turned, "turned.csv")))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("A,b\n" + FEATURES, "lacks 1 column.s.: 'a'; expected all that the model was trained on: it has 'A', 'b'"),
        ("x,z\n" + FEATURES, "lacks 2 column.s.: 'a', 'b';"),
        ("a,b,b\n1,p,p\n", "several columns named 'b'"),
        ("a,b\n", "without rows"),
        ("", "is empty"),
        ("a,b\n" + FEATURES + "heavy,p\n", "'a' holds 'heavy' in row 61; expected a number"),
        ("a,b\n" + FEATURES + "inf,p\n", "'a' holds inf in row 61"),
        ("a,b\n" + FEATURES + "1e300,p\n", "'a' holds 1e.300 in row 61, too far from the training rows"),
        ("a,b\n" + FEATURES + "1,p,3\n", "Expected 2 fields in line 62, saw 3"),
        (("a,b\n" + FEATURES + "1,é\n").encode("latin-1"), "byte 0xe9 is no UTF-8"),
        (gzip.compress(b"a,b\n", mtime=0), "unpack what is packed"),
    ],
)
@pytest.mark.parametrize("out", ["out.csv", "out.parquet", "out.jsonl"])
def test_a_fault_in_any_row_leaves_no_output(
    content: str | bytes, sentence: str, out: str, shell: Shell, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of ten rows: many were written before the fault comes, over an earlier output that stays."""
    monkeypatch.setattr(table_files, "CELLS", 20)
    path = shell.write(content, "new.csv")
    place = shell.write("mine", out)
    shell.refused(sentence, "predict", model, path, "--out", place, "--num-samples", "4")


def test_twenty_missing_columns_are_named(shell: Shell) -> None:
    names = [f"c{k}" for k in range(30)]
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(40, 30)), columns=names)
    frame.assign(y=np.arange(40) / 3).to_csv(path := shell.folder / "t.csv", index=False)
    model = shell.fit(path)
    frame[["c0"]].to_csv(path, index=False)
    shell.refused("lacks 29 column.s.: 'c1', 'c2', .*'c20' and 9 more; .*it has 'c0'", "predict", model, path)


def test_what_was_never_seen_is_named_once(shell: Shell, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "CELLS", 20)
    path = shell.write("a,b\n" + FEATURES.replace(",q\n", ",zebra\n").replace("3.0,", ","), "new.csv")
    said = shell("predict", model, path, "--out", shell.folder / "out.csv", "--num-samples", "4")
    assert said.code == 0
    assert said.err.count("column 'b' has values that no training row had, in 20 of 60 rows: 'zebra'") == 1
    assert said.err.count("which no training row lacked (taken for usual ones): 'a' in 9") == 1
    assert said.err.count("\n") == 2 + said.err.count("without a guarantee")
    found = pd.read_csv(shell.folder / "out.csv")
    assert found.notna().all(axis=None)


def test_far_away_rows_have_finite_answers_and_abstain(shell: Shell, model: Path) -> None:
    path = shell.write("a,b\n1e38,p\n-1e38,q\n1e20,r\n1000,p\n", "far.csv")
    found = shell.predict(model, path)
    assert found.abstain.all()
    assert (found.ood_score > 10).all()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--out", "out.xlsx"), "--out is .*out.xlsx; give a name that ends in .csv"),
        (("--out", "none/out.csv"), "there is no folder"),
        (("--out", "."), "which is a folder; give the name of a file"),
        (("--out", "t.csv"), "the file that is read; give another name"),
        (("--level", "1"), "--level is 1.0; give a number between"),
        (("--level", "nan"), "--level is nan"),
        (("--num-samples", "0"), "--num-samples is 0"),
        (("--keep", "c"), "got 'c' to keep, but .* has 'y', 'a', 'b'"),
        (("--probabilities",), "are of classes, but the model answers with numbers"),
        (("--json",), "--json needs --out to be a file"),
    ],
)
def test_predicting_with_options_that_do_not_fit(
    words: tuple[str, ...], sentence: str, shell: Shell, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shell.folder)
    shell.refused(sentence, "predict", model, "t.csv", *words)


# -- models --------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_model(shell: Shell, model: Path) -> None:
    path = shell.write(NUMBERS)
    shell.refused("is no saved model; expected a folder written by neuboots fit", "predict", shell.folder, path)
    shell.refused("is no saved model", "predict", path, path)
    shell.refused("is no saved model", "predict", shell.folder / "none", path)
    for part in ("estimator", "estimator/predictor"):
        shell.refused("is no saved model", "predict", model / part, path)


@pytest.mark.parametrize(
    "name",
    [
        "arrays.safetensors",
        "estimator/arrays.safetensors",
        "estimator/predictor/model.safetensors",
        "estimator/estimator.json",
        "estimator/predictor/config.json",
        "model.json",
    ],
)
@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "other"])
def test_a_damaged_model_is_refused(name: str, damage: str, shell: Shell, model: Path) -> None:
    path, part = shell.write(NUMBERS), model / name
    whole = part.read_bytes()
    if damage == "gone":
        part.unlink()
    else:
        part.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "other": b"[1, 2]"}[damage])
    shell.refused("cannot be read|does not exist|is no saved|is not a|is damaged", "predict", model, path)


def test_an_estimator_that_lacks_something_is_refused(shell: Shell, model: Path) -> None:
    place = model / "estimator" / "arrays.safetensors"
    arrays = load_file(place)
    del arrays["scores_"]
    save_file(arrays, place)
    shell.refused("expected", "predict", model, shell.write(NUMBERS))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("schema", "numbers"), []),
        (("schema", "numbers", 0, "std"), "wide"),
        (("schema", "numbers", 0, "std"), 0.0),
        (("schema", "numbers", 0, "mean"), None),
        (("schema", "numbers", 0, "kind"), "mood"),
        (("schema", "numbers", 0, "name"), 3),
        (("schema", "categories", 0, "values"), ["p"]),
        (("schema", "categories", 0, "values"), 7),
        (("schema", "target", "classes"), ["u", "v"]),
        (("schema", "target", "task"), "magic"),
        (("schema",), None),
        (("abstain",), {"sure": 1}),
        (("abstain", "width"), "wide"),
        (("abstain",), None),
        (("card",), {}),
        (("card",), None),
        (("kind",), "sound"),
        (("version",), 99),
    ],
)
def test_an_edited_model_is_refused(place: tuple[Any, ...], value: Any, shell: Shell, model: Path) -> None:
    text = json.loads((model / "model.json").read_text())
    at = text
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    (model / "model.json").write_text(json.dumps(text))
    shell.refused("expected", "predict", model, shell.write(NUMBERS))


def test_parts_of_two_models_do_not_fit(shell: Shell, model: Path) -> None:
    path = shell.write(NUMBERS.replace("y,a,b", "y,a,c").replace(",p\n", ",pp\n").replace(",r\n", ",q\n"))
    other = shell.fit(path, name="other")
    shutil.rmtree(model / "estimator")
    shutil.copytree(other / "estimator", model / "estimator")
    shell.refused("do not fit together", "predict", model, shell.write(NUMBERS))
