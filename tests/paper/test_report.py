"""Tests of `neuboots report`: pages from folders of results, and errors for unusable folders."""

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from paper.test_runner import STUDIES as MADE_UP
from paper.test_runner import edit, run

from neuboots.cli import main


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one finished run of a made-up study; the folder's own path says "units", which means nothing."""
    monkeypatch.setattr("neuboots_paper.registry.STUDIES", MADE_UP)
    folder = tmp_path / "units" / "results"
    run(folder / "smoke" / "squares")
    return folder


def test_the_command_writes_the_page(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(results)]) == 0
    assert capsys.readouterr().out == f"1 experiment: {results / 'report.html'}\n"
    made = (results / "report.html").read_text(encoding="utf-8")
    HTMLParser().feed(made)
    assert "Squares grow." in made
    assert main(["report", str(results), "--out", str(results / "page.md")]) == 0
    assert (results / "page.md").read_text(encoding="utf-8").startswith("# The paper, reproduced")


def test_a_run_that_is_not_finished_is_left_out_and_named(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(results / "cut" / "squares")
    (results / "cut" / "squares" / "rows" / "squares.json").unlink()
    assert main(["report", str(results)]) == 0
    assert "left out" in (err := capsys.readouterr().err)
    assert "cut/squares holds a run that is not finished" in err


def test_settings_of_other_programs_are_none_of_ours(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (results / ".vscode").mkdir()
    (results / ".vscode" / "settings.json").write_text("{}")
    assert main(["report", str(results)]) == 0
    assert capsys.readouterr().err == ""


def settings(folder: Path) -> Path:
    return folder / "smoke" / "squares" / "settings.json"


def rows(folder: Path) -> Path:
    return folder / "smoke" / "squares" / "rows" / "squares.json"


@pytest.mark.parametrize(
    ("spoil", "options", "sentence"),
    [
        (lambda folder: None, ["nowhere"], "nowhere is no folder; give one that"),
        (lambda folder: (folder / "empty").mkdir(), ["empty"], "holds no results; make some with: neuboots reproduce"),
        (lambda folder: None, [".", "--out", "page.pdf"], "give a name that ends in .html or .md"),
        (lambda folder: None, [".", "--out", "no/page.html"], "a file in a folder that exists"),
        (lambda folder: (folder / "is.html").mkdir(), [".", "--out", "is.html"], "a file in a folder that exists"),
        (lambda folder: None, [".", "--out", "/proc/page.html"], "cannot be written"),
        (lambda folder: None, [".", "--out", f"{'x' * 300}.html"], "cannot be written"),
        (lambda folder: rows(folder).unlink(), ["."], "holds a run that is not finished; repeat its command"),
        (lambda folder: rows(folder).write_text("["), ["."], "rows that cannot be read (squares)"),
        (lambda folder: rows(folder).write_text('[{"k": 0}]'), ["."], "lack what its tables need (KeyError: 'value')"),
        (lambda folder: rows(folder).write_text('[{"k": 0, "seed": 0, "value": "x"}]'), ["."], "lack what its tables"),
        (lambda folder: rows(folder).write_text("[3]"), ["."], "rows that cannot be read (squares)"),
        (lambda folder: settings(folder).write_text("{"), ["."], "holds no settings.json of a run; give"),
        (lambda folder: settings(folder).write_text("[]"), ["."], "holds no settings.json of a run; give"),
        (lambda folder: settings(folder).write_text("{}"), ["."], "holds no settings.json of a run; give"),
        (lambda folder: edit(settings(folder).parent, study="cubes"), ["."], "holds 'cubes'; expected one of squares"),
        (lambda folder: edit(settings(folder).parent, settings={"height": 3}), ["."], "settings of another version"),
    ],
)  # fmt: skip
def test_a_bad_folder_is_a_sentence(
    results: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], object],
    options: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(results)
    spoil(results)
    assert main(["report", *options]) == 2
    shown = capsys.readouterr().err
    assert sentence in shown
    assert "Traceback" not in shown
    assert not list(results.glob("*.html.*"))
