"""Tests of report.html: SVG of figures and the HTML page."""

import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from _hostile import CONTROLS, LONG, MARKUP, NAMES
from _html import HtmlReader
from _reports import EVIL, INTRODUCTION, TITLE, sections
from matplotlib.figure import Figure

from neuboots._validation import escape_text
from neuboots.report.html import describe_figure, render_html, to_svg
from neuboots.report.plots import plot_confusion
from neuboots.report.section import Section
from neuboots.report.tables import Cell, Table, escape_markdown, make_table


@cache
def text() -> str:
    return render_html(sections(), title=TITLE, introduction=INTRODUCTION)


@cache
def page() -> HtmlReader:
    return HtmlReader(text())


def section(name: str, number: int = 0) -> str:
    """The HTML of one section."""
    parts = re.findall(r'<section class="topic".*?</section>\n', text(), re.DOTALL)
    return [part for part in parts if f"reproduce {name}" in part][number]


def render(*tables: Table) -> str:
    return render_html([Section("s", "c", tables=tables, plots={"plot": "<svg/>"})], title="T", introduction="I")


# -- names from files ----------------------------------------------------------------------------------


def test_names_of_classes_are_drawn_literally() -> None:
    figure = Figure(figsize=(12, 12))
    plot_confusion(figure.add_subplot(), NAMES, torch.eye(len(NAMES), dtype=torch.long))
    root = ElementTree.fromstring(to_svg(figure, "confusion"))
    drawn = {element.text for element in root.iter() if element.tag.endswith("text")}
    escaped = [escape_text(name) for name in NAMES]
    assert {name if len(name) <= 18 else f"{name[:17]}…" for name in escaped} <= drawn
    assert not [element for element in root.iter() if element.tag.endswith("script")]


def test_names_are_text_of_the_page() -> None:
    """In titles, prose, tables, settings and commands."""
    tables = make_table("All. " + "".join(MARKUP), [{"name": name, "value": 1.0} for name in NAMES])
    about = {"command": " ".join(MARKUP), "neuboots": "0"}
    topic = Section("s", "c", tables=(tables,), note=escape_markdown(" ".join(MARKUP)), about=about, settings={})
    topic = replace(topic, settings={name: name for name in (*MARKUP, *CONTROLS)})
    introduction = escape_markdown(" ".join(MARKUP))
    written = render_html([topic], title=" ".join((*MARKUP, *CONTROLS)), introduction=introduction, is_paper=False)
    written.encode()
    page = HtmlReader(written)
    assert Counter(tag for tag, _ in page.elements)["script"] == 1
    assert not [key for _, attrs in page.elements for key in attrs if key.startswith("on")]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", written)
    assert page.text.count(" ".join(MARKUP)) >= 3
    assert "\\x1b[31m" in page.text
    assert LONG in page.text


def test_markdown_of_names_is_escaped() -> None:
    table = make_table("T", [{"name": name, "value": 1.0} for name in ("a|b", "*x*", "a\nb", "<b>", "`x`", "[a](b)")])
    lines = table.markdown.splitlines()[4:]
    assert lines[:3] == [r"| a\|b | 1 |", r"| \*x\* | 1 |", "| a b | 1 |"]
    assert lines[3:] == [r"| \<b\> | 1 |", r"| \`x\` | 1 |", r"| \[a\](b) | 1 |"]


# -- page ----------------------------------------------------------------------------------------------


def test_ids_are_unique_and_every_link_resolves() -> None:
    ids = page().values("id")
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    assert all(name and not re.search(r"\s", name) for name in ids)
    links = [link for link in page().values("href") if not link.startswith("data:")]
    assert {link[1:] for link in links} <= {*ids}
    assert {*re.findall(r"url\(#([^)]+)\)", text())} <= {*ids}
    assert {*page().values("data-figure")} <= {*ids}


def test_page_loads_nothing_from_elsewhere() -> None:
    assert {*re.findall(r"https?://[^\s\"'<]+", text())} == {"http://www.w3.org/2000/svg"}
    assert not {"src", "srcset", "data", "action"} & {key for _, attrs in page().elements for key in attrs}
    assert "@import" not in text()
    (policy,) = (attrs["content"] for _, attrs in page().elements if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'")


def test_every_string_is_escaped() -> None:
    assert text().count("<script") == 1
    assert page().text.count(EVIL) >= 12
    assert TITLE in page().text
    assert not any("alert" in value for _, attrs in page().elements for key, value in attrs.items() if key[:2] == "on")


def test_summary_counts_outcomes_and_links_to_sections() -> None:
    top = text()[: text().index('class="topic"')]
    assert "5 claims of the paper" in top
    counts = re.findall(r"<b>(\d)</b> <span>.*?</svg>([^<]+)</span>", top)
    assert counts == [("2", "holds"), ("1", "does NOT hold"), ("2", "not resolved")]
    assert re.findall(r'<li><a href="(#[^"]+)"', top)[:4] == ["#top", "#digits", "#digits-2", "#curves"]


def test_section_has_checks_tables_settings_and_provenance() -> None:
    html, first = section("digits"), sections()[0]
    shown = HtmlReader(html).text
    for check in first.checks:
        assert f"{check.outcome} {check.claim}{check.evidence}" in shown
    for words in (first.source, first.claim, first.tables[0].title, first.tables[0].note, first.cost):
        assert words in shown
    assert "seeds 0, 1. neuboots 0.1.0, torch 2.13.0, python 3.11.7, 2 cores." in shown
    assert "<code>neuboots reproduce digits --scale smoke</code>" in html
    settings = dict(re.findall(r"<dt>(\w+)</dt><dd>([^<]*)</dd>", html))
    assert settings == {
        "seeds": "0, 1", "net": "mlp-32", "sizes": "1, 25, 2, 3", "lr": "0.1", "augment": "false", "limit": "null",
    }  # fmt: skip


def test_paper_columns_are_marked() -> None:
    html = section("digits")
    assert '<th scope="col" class="number paper"><span class="unseen">error, %: </span>paper</th>' in html
    assert '<td class="number paper" data-value="22.57">22.57</td>' in html
    assert '<td class="number paper">–</td>' in html


def test_rows_link_to_plots_that_are_collapsed() -> None:
    html = section("digits")
    row = '<tr data-figure="digits--reliability-1-mc-dropout"><th scope="row" class="number" data-value="1.0">1</th>'
    assert row + '<th scope="row" class="name"><a href="#digits--reliability-1-mc-dropout">mc-dropout</a></th>' in html
    assert html.count("data-figure") == 9  # the tenth row has no plot
    collapsed = html[html.index('<details class="diagrams">') :]
    assert collapsed.count('<figure class="drawing"') == html.count('<figure class="drawing"') == 9
    assert "<figcaption>Reliability: B = 1, mc-dropout</figcaption>" in collapsed


def test_unlinked_plots_are_shown_and_wide_ones_span_the_page() -> None:
    html = section("curves")
    assert '<details class="diagrams">' not in html
    assert '<figure class="drawing wide" id="curves--bands-of-all">' in html
    assert "<figcaption>Bands of all</figcaption>" in html
    assert '<figure class="drawing" id="curves--times">' in html


def test_repeated_section_name_gets_its_own_ids() -> None:
    assert '<a href="#digits-2">digits</a>\n<span class="scale">cpu</span>' in section("digits", 1)
    assert 'data-figure="digits-2--reliability-1-plain"' in section("digits", 1)


def test_rows_are_grouped_by_their_first_key() -> None:
    assert section("digits").count('<tr class="group"') == 1
    assert '<tr class="group"' not in section("curves")
    single = Table("T.", ("a", "b"), tuple((Cell(word), Cell("x")) for word in "pqr"), num_keys=2)
    assert '<tr class="group"' not in render(single)


def test_cells_have_the_value_to_sort_by() -> None:
    values = [1.5, np.float32(2), math.inf, -math.inf, math.nan, None]
    html = render(Table("T.", ("a",), tuple((Cell("x", value),) for value in values)))
    shown = [re.findall(r'data-value="([^"]+)"', cell) for cell in re.findall(r"<td[^>]*>", html)]
    assert shown == [["1.5"], ["2.0"], ["Infinity"], ["-Infinity"], [], []]


def test_name_column_is_the_last_key_with_text() -> None:
    row = (Cell("set"), Cell("plain"), Cell("60", 60.0), Cell("0.5", 0.5))
    table = Table("T.", ("data", "method", "images", "error"), (row,), ("plot",), num_keys=3)
    assert '<th scope="row" class="name"><a href="#s--plot">plain</a></th>' in render(table)
    numbers = replace(table, rows=((Cell("1", 1.0), Cell("2", 2.0), Cell("60", 60.0), Cell("0.5", 0.5)),))
    assert 'data-value="60.0"><a href="#s--plot">60</a></th>' in render(numbers)


def test_sections_without_plots_or_checks_and_no_sections() -> None:
    bare = replace(sections()[0], plots={}, checks=(), tables=())
    html = render_html([bare], title="T", introduction="I")
    HtmlReader(html)
    assert "data-figure" not in re.sub(r"<style>.*</script>", "", html, flags=re.DOTALL)
    assert "0 claims of the paper" in render_html([], title="T", introduction="I")
    one = replace(sections()[0], checks=sections()[0].checks[:1])
    assert "1 claim of the paper" in render_html([one], title="T", introduction="I")
    assert "1 check<" in render_html([one], title="T", introduction="I", is_paper=False)


# -- SVG -----------------------------------------------------------------------------------------------


def example_figure() -> Figure:
    figure = Figure()
    ax = figure.subplots()
    ax.plot([0, 1], [0, 1], "kD", mfc="white", label="ours")
    ax.bar([0], [0.123456], color="black")
    ax.bar([1], [1], hatch="/", fill=False)
    ax.grid(color="#dddddd")
    ax.text(0, 0.5, "green", color="#009e73")
    ax.text(0, 0.6, "on a bar", color="white")
    ax.text(0, 0.7, "math $x_i^2$")
    ax.set(title="a title", xlabel="x & <b>", ylabel="y / ms")
    ax.legend()
    return figure


@cache
def example_svg() -> str:
    return to_svg(example_figure(), "one")


def elements(svg: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter())


def svg_ids(svg: str) -> list[str]:
    return re.findall(r' id="([^"]+)"', svg)


def svg_references(svg: str) -> set[str]:
    return {*re.findall(r"url\(#([^)]+)\)", svg), *re.findall(r' href="#([^"]+)"', svg)}


def test_to_svg_is_deterministic_and_keeps_the_figure() -> None:
    figure = example_figure()
    before = figure.get_facecolor(), figure.axes[0].get_facecolor()
    assert to_svg(figure, "one") == example_svg()
    assert (figure.get_facecolor(), figure.axes[0].get_facecolor()) == before


def test_text_stays_text() -> None:
    words = {"".join(element.itertext()) for element in elements(example_svg()) if element.tag.endswith("}text")}
    assert {"a title", "x & <b>", "y / ms", "ours", "on a bar"} <= words
    assert any("math" in word and "2" in word for word in words)


def test_black_white_and_grey_follow_the_page() -> None:
    svg = example_svg()
    assert "#000000" not in svg
    assert elements(svg)[0].get("fill") == "currentColor"
    assert "stroke: currentColor" in svg
    assert "fill: #ffffff; fill: var(--paper, #ffffff)" in svg
    assert "stroke: #dddddd; stroke: var(--grid, #dddddd)" in svg


def test_colored_text_is_mixed_with_the_text_color() -> None:
    styles = {element.text: element.get("style") or "" for element in elements(example_svg())}
    assert "fill: color-mix(in srgb, #009e73 55%, currentColor)" in styles["green"]
    assert styles["on a bar"].endswith("fill: #ffffff")
    assert "fill" not in styles["a title"]


def test_black_shapes_stay_black_beside_an_image() -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    left.imshow([[0, 1]], cmap="gray")
    right.bar([0], [1], color="black")
    right.set_title("title")
    drawn = elements(to_svg(figure, "one"))
    (bar,) = (each for each in drawn if (each.get("d") or "").endswith("z") and "fill: #000000" in str(each.attrib))
    assert "clip-path" in bar.attrib
    (title,) = (each for each in drawn if each.text == "title")
    assert "fill" not in str(title.get("style"))


def test_svg_ids_are_unique() -> None:
    ids = svg_ids(example_svg())
    assert len(ids) == len({*ids}) > 3
    assert {*ids} >= svg_references(example_svg())


@pytest.mark.parametrize("name", ["two", 'a "b" <c> (d)', "one-1", "é/ü"])
def test_figures_of_different_names_share_no_ids(name: str) -> None:
    other = svg_ids(to_svg(example_figure(), name))
    assert not {*svg_ids(example_svg())} & {*other}
    assert all(re.fullmatch(r"[\w.-]+", each) for each in other)


def test_describe_figure_names_titles_axes_and_legends() -> None:
    assert describe_figure(example_figure()) == "a title: y / ms against x & <b>: ours"
    assert elements(example_svg())[0].get("aria-label") == describe_figure(example_figure())
    assert elements(to_svg(Figure(), "an empty one"))[0].get("aria-label") == "an empty one"
    two = Figure()
    for ax in two.subplots(1, 2):
        ax.set(xlabel="$x_1$\nof all")
    two.suptitle("both")
    assert describe_figure(two) == "both; x_1 of all"


def test_coordinates_are_exact_to_a_hundredth() -> None:
    figure = Figure(figsize=(2, 2), dpi=72)
    figure.add_axes((0.1, 0.1, 0.8, 0.8)).set(xlim=(0, 3), ylim=(0, 3))
    figure.axes[0].plot([1, 2], [1, 2], color="#0072b2")
    (line,) = (each for each in elements(to_svg(figure, "one")) if "#0072b2" in (each.get("style") or ""))
    assert line.get("d") == "M 52.8 91.2 L 91.2 52.8"
