"""Tests of `neuboots report`: pages of result folders, unusable folders, and the committed pages."""

import re
import runpy
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
from _reports import sections
from _study import edit_settings, find_squares, run_squares

from neuboots.cli import UsageError, main
from neuboots_paper.report import format_markdown_report, read_sections, render_report
from neuboots_paper.runner import read_run
from neuboots_paper.studies import STUDY_NAMES, load_study

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "cpu"


# -- the command ---------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one finished run of a fake study; "units" in its own path has no meaning."""
    monkeypatch.setattr("neuboots_paper.report.read_run", partial(read_run, find_study=find_squares))
    monkeypatch.setattr("neuboots_paper.report.STUDY_NAMES", ("squares",))
    folder = tmp_path / "units" / "results"
    run_squares(folder / "smoke" / "squares")
    return folder


def test_command_writes_a_page(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(results)]) == 0
    assert capsys.readouterr().out == f"1 study: {results / 'report.html'}\n"
    page = (results / "report.html").read_text(encoding="utf-8")
    HTMLParser().feed(page)
    assert "Squares grow." in page
    assert main(["report", str(results), "--out", str(results / "page.md")]) == 0
    assert (results / "page.md").read_text(encoding="utf-8").startswith("# The paper, reproduced")


def test_incomplete_run_is_excluded_and_named(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_squares(results / "cut" / "squares")
    (results / "cut" / "squares" / "rows" / "squares.json").unlink()
    assert main(["report", str(results)]) == 0
    assert "cut/squares" in capsys.readouterr().err


def test_settings_of_other_programs_are_ignored(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (results / ".vscode").mkdir()
    (results / ".vscode" / "settings.json").write_text("{}")
    assert main(["report", str(results)]) == 0
    assert capsys.readouterr().err == ""


def settings(folder: Path) -> Path:
    return folder / "smoke" / "squares" / "settings.json"


def rows(folder: Path) -> Path:
    return folder / "smoke" / "squares" / "rows" / "squares.json"


@pytest.mark.parametrize(
    ("damage", "options", "named"),
    [
        (lambda folder: None, ["nowhere"], "nowhere"),
        (lambda folder: (folder / "empty").mkdir(), ["empty"], "empty"),
        (lambda folder: None, [".", "--out", "page.pdf"], "page.pdf"),
        (lambda folder: None, [".", "--out", "no/page.html"], "no/page.html"),
        (lambda folder: (folder / "is.html").mkdir(), [".", "--out", "is.html"], "is.html"),
        (lambda folder: None, [".", "--out", "/proc/page.html"], "/proc/page.html"),
        (lambda folder: None, [".", "--out", f"{'x' * 300}.html"], "--out"),
        (lambda folder: None, [".", "--without", "uci"], "--without is uci"),
        (lambda folder: None, [".", "--without", "squares"], "--without"),
        (lambda folder: rows(folder).unlink(), ["."], "incomplete"),
        (lambda folder: rows(folder).write_text('[{"k": 0}]'), ["."], "KeyError: 'value'"),
        (lambda folder: rows(folder).write_text('[{"k": 0, "seed": 0, "value": "x"}]'), ["."], "squares"),
        (lambda folder: edit_settings(settings(folder).parent, study="cubes"), ["."], "cubes"),
    ],
)
def test_unusable_folder_or_option_is_a_usage_error(
    results: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    options: list[str],
    named: str,
) -> None:
    monkeypatch.chdir(results)
    damage(results)
    assert main(["report", *options]) == 2
    assert named in capsys.readouterr().err
    assert not list(results.glob("*.html.*"))


def test_markdown_report_gives_repeated_names_their_own_anchors() -> None:
    text = format_markdown_report(sections(), title="T", introduction="I")
    assert [*dict.fromkeys(re.findall(r"\[digits\]\(#([^)]+)\)", text))] == ["digits-table-31", "digits-table-31-1"]
    assert "Of 5 claims: 2 hold, 1 do NOT hold, 2 are not resolved." in text


# -- committed results ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "folder", "without"),
    [
        ("results", RESULTS, ["uci", "validity", "dimensions", "same-weights"]),
        ("uci", RESULTS / "uci", []),
        ("validity-details", RESULTS / "validity", []),
        ("dimensions", RESULTS / "dimensions", []),
        ("same-weights", RESULTS / "same-weights", []),
    ],
)
def test_committed_page_shows_the_committed_rows(page: str, folder: Path, without: list[str]) -> None:
    expected = render_report(read_sections(folder, plots=False, without=without), ".md")
    assert (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") == expected


def test_page_on_validity_shows_the_committed_rows() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "make_validity.py"))
    assert (ROOT / "docs" / "validity.md").read_text(encoding="utf-8") == script["render"]()


def test_studies_beyond_the_paper_have_another_title() -> None:
    beyond, paper = (read_sections(RESULTS / name, plots=False) for name in ("uci", "text"))
    assert render_report(beyond, ".md").startswith("# Beyond the paper\n")
    assert render_report([*paper, *beyond], ".md").startswith("# The paper, reproduced\n")


def test_studies_are_excluded_by_name() -> None:
    found = [section.name for section in read_sections(RESULTS, plots=False, without=["uci", "text"])]
    assert found == [name for name in STUDY_NAMES if name not in ("uci", "text")]
    for folder, without in ((RESULTS, "uic"), (RESULTS / "uci", "uci")):
        with pytest.raises(UsageError, match=f"--without.*{without}"):
            read_sections(folder, without=[without])


@pytest.mark.parametrize("name", STUDY_NAMES)
def test_committed_settings_are_those_of_the_preset(name: str) -> None:
    run = read_run(RESULTS / name)
    assert run.scale == "cpu"
    assert run.study == load_study(name).from_preset("cpu")
    assert len(run.study.seeds) >= 3
    maximum = 4_000_000 if name == "validity" else 500_000
    assert sum(file.stat().st_size for file in (RESULTS / name).rglob("*.json")) < maximum


def test_docs_list_every_study() -> None:
    text = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row)} == {*STUDY_NAMES}
