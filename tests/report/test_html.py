"""The page: whole, closed, escaped, an address for everything and nothing from elsewhere; bad folders are named."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from _reports import EVIL, OPENING, TITLE, chapters
from test_runs import STUDIES as MADE_UP
from test_runs import edit, run

from neuboots.cli import main
from neuboots.report.html import render_html
from neuboots.report.section import Section, format_markdown_report
from neuboots.report.tables import Cell, Table

VOID = {"meta", "link"}


class Reader(HTMLParser):
    """All elements with their attributes, ancestors and text; what is opened must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str], tuple[str, ...]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        assert len(given) == len(attrs)
        self.elements.append((tag, given, tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}, tuple(self.open)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data

    def having(self, key: str) -> list[str]:
        return [attrs[key] for _, attrs, _ in self.elements if key in attrs]


@cache
def text() -> str:
    return render_html(chapters(), title=TITLE, introduction=OPENING)


@cache
def read() -> Reader:
    return Reader(text())


def section(name: str, number: int = 0) -> str:
    """The part of the page that is of one chapter."""
    parts = re.findall(r'<section class="chapter".*?</section>\n', text(), re.DOTALL)
    return [part for part in parts if f"reproduce {name}" in part][number]


def test_the_same_chapters_give_the_same_page() -> None:
    assert render_html(chapters(), title=TITLE, introduction=OPENING) == text()


def test_addresses_are_unique_and_every_link_leads_somewhere() -> None:
    ids = read().having("id")
    assert [address for address, count in Counter(ids).items() if count > 1] == []
    assert all(address and not re.search(r"\s", address) for address in ids)
    links = [link for link in read().having("href") if not link.startswith("data:")]
    assert all(link.startswith("#") for link in links)
    assert {link[1:] for link in links} <= {*ids}
    assert {*re.findall(r"url\(#([^)]+)\)", text())} <= {*ids}
    assert {*read().having("data-figure")} <= {*ids}


def test_nothing_comes_from_elsewhere() -> None:
    assert {*re.findall(r"https?://[^\s\"'<]+", text())} == {"http://www.w3.org/2000/svg"}
    assert not {"src", "srcset", "data", "action"} & {key for _, attrs, _ in read().elements for key in attrs}
    assert "@import" not in text()
    (policy,) = (attrs["content"] for _, attrs, _ in read().elements if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'")


def test_every_string_is_escaped() -> None:
    assert text().count("<script") == 1  # the page's own
    assert "alert(" not in re.sub(r"alert\(&quot;x&quot;\)|alert\(\"x\"\)&lt;/script&gt;", "", text())
    assert read().text.count(EVIL) >= 12
    assert TITLE in read().text
    assert not any(
        "alert" in value for tag, attrs, _ in read().elements for key, value in attrs.items() if key[:2] == "on"
    )


def test_the_opening_has_its_stress_and_nothing_else() -> None:
    assert "marked <em>paper</em> are" in text()
    assert "2 * 3 * 4 &amp; <code>code</code>." in text()


def test_the_summary_counts_claims_and_leads_to_them() -> None:
    top = text()[: text().index('class="chapter"')]
    assert "5 claims of the paper" in top
    assert re.findall(r"<b>(\d)</b> <span>.*?</svg>([^<]+)</span>", top) == [
        ("2", "holds"),
        ("1", "does NOT hold"),
        ("2", "not resolved"),
    ]
    assert '<li class="no"><a href="#digits"><svg class="mark" aria-hidden="true"><use href="#mark-no"/></svg>' in top
    assert re.findall(r'<li><a href="(#[^"]+)"', top)[:4] == ["#top", "#digits", "#digits-2", "#curves"]


def test_a_chapter_has_everything_that_there_is_to_say() -> None:
    part = section("digits")
    shown = Reader(part).text
    chapter = chapters()[0]
    for verdict in chapter.verdicts:
        assert f"{verdict.word} {verdict.claim}{verdict.found}" in shown
    for word in (chapter.source, chapter.claim, chapter.tables[0].title, chapter.tables[0].note, chapter.cost):
        assert word in shown
    assert "seeds 0, 1. neuboots 0.1.0, torch 2.13.0, python 3.11.7, 2 cores." in shown
    assert "<code>neuboots reproduce digits --scale smoke</code>" in part
    assert "3 epochs on <code>digits</code>." in part
    settings = dict(re.findall(r"<dt>(\w+)</dt><dd>([^<]*)</dd>", part))
    assert settings == {
        "seeds": "0, 1", "net": "mlp-32", "sizes": "1, 25, 2, 3", "lr": "0.1", "augment": "false", "limit": "null",
    }  # fmt: skip


def test_the_papers_columns_are_marked_for_eye_and_ear() -> None:
    part = section("digits")
    assert '<th scope="col" class="number paper"><span class="unseen">error, %: </span>paper</th>' in part
    assert '<td class="number paper" data-value="22.57">22.57</td>' in part
    assert '<td class="number paper">–</td>' in part


def test_rows_lead_to_diagrams_that_are_kept_aside() -> None:
    part = section("digits")
    row = '<tr data-figure="digits--reliability-1-mc-dropout"><th scope="row" class="number" data-value="1.0">1</th>'
    assert row + '<th scope="row" class="name"><a href="#digits--reliability-1-mc-dropout">mc-dropout</a></th>' in part
    assert part.count("data-figure") == 9  # the tenth has no diagram, and is a row like others
    aside = part[part.index('<details class="diagrams">') :]
    assert aside.count('<figure class="drawing"') == part.count('<figure class="drawing"') == 9
    assert "9 diagrams, one for each underlined name in the table<" in aside
    assert "<figcaption>Reliability: B = 1, mc-dropout</figcaption>" in aside


def test_other_figures_are_shown_and_wide_ones_have_a_line_of_their_own() -> None:
    part = section("curves")
    assert '<details class="diagrams">' not in part
    assert '<figure class="drawing wide" id="curves--bands-of-all">' in part
    assert "<figcaption>Bands of all</figcaption>" in part
    assert '<figure class="drawing" id="curves--times">' in part
    assert 'aria-label="time / ms against replicates B:' in part


def test_a_new_group_of_lines_is_set_off() -> None:
    assert section("digits").count('<tr class="group"') == 1
    assert '<tr class="group"' not in section("curves")
    single = Table("T.", ("a", "b"), tuple((Cell(word), Cell("x")) for word in "pqr"), keys=2)
    assert "group" not in single.html


def test_cells_carry_what_javascript_sorts_by() -> None:
    values = [1.5, np.float32(2), math.inf, -math.inf, math.nan, None]
    table = Table("T.", ("a",), tuple((Cell("x", value),) for value in values))
    shown = [re.findall(r'data-value="([^"]+)"', cell) for cell in re.findall(r"<td[^>]*>", table.html)]
    assert shown == [["1.5"], ["2.0"], ["Infinity"], ["-Infinity"], [], []]  # the last two are not numbers


def test_the_name_of_a_line_is_the_last_word_that_says_what_it_is_of() -> None:
    line = (Cell("set"), Cell("plain"), Cell("60", 60.0), Cell("0.5", 0.5))
    table = Table("T.", ("data", "method", "images", "error"), (line,), ("figure",), keys=3)
    assert '<th scope="row" class="name"><a href="#figure">plain</a></th>' in table.html
    numbers = replace(table, lines=((Cell("1", 1.0), Cell("2", 2.0), Cell("60", 60.0), Cell("0.5", 0.5)),))
    assert 'data-value="60.0"><a href="#figure">60</a></th>' in numbers.html


def test_one_study_at_two_scales() -> None:
    assert '<a href="#digits-2">digits</a>\n<span class="scale">cpu</span>' in section("digits", 1)
    assert 'data-figure="digits-2--reliability-1-plain"' in section("digits", 1)


def test_chapters_without_figures_or_claims_and_no_chapters_at_all() -> None:
    bare = replace(chapters()[0], figures={}, verdicts=(), tables=())
    made = render_html([bare], title="T", introduction="O")
    Reader(made)
    assert "data-figure" not in re.sub(r"<style>.*</script>", "", made, flags=re.DOTALL)
    assert "0 claims of the paper" in render_html([], title="T", introduction="O")


def test_one_claim_is_a_claim() -> None:
    assert "1 claim of the paper" in render_html([one_claim()], title="T", introduction="O")


def one_claim() -> Section:
    return replace(chapters()[0], verdicts=chapters()[0].verdicts[:1])


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
    Reader(made)
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


def test_one_study_at_two_scales_has_two_places_in_markdown() -> None:
    made = format_markdown_report(chapters(), title="T", introduction="O")
    assert [*dict.fromkeys(re.findall(r"\[digits\]\(#([^)]+)\)", made))] == ["digits-table-31", "digits-table-31-1"]


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
