"""Figures as SVG: the same bytes each time, addresses of their own, and colours that a page can turn."""

import re
from functools import cache
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from neuboots.report.html import describe_figure, prefix_ids, slug, to_svg


def drawn() -> Figure:
    figure = Figure(figsize=(4, 3), layout="constrained")
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
def made() -> str:
    return to_svg(drawn(), "one")


def elements(svg: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter())


def test_the_same_figure_gives_the_same_bytes() -> None:
    assert to_svg(drawn(), "one") == made()


def test_text_stays_text() -> None:
    words = {"".join(element.itertext()) for element in elements(made()) if element.tag.endswith("}text")}
    assert {"a title", "x & <b>", "y / ms", "ours", "on a bar"} <= words
    assert any("math" in word and "2" in word for word in words)


def test_black_takes_the_colour_of_the_text_and_white_that_of_the_page() -> None:
    svg = made()
    assert "#000000" not in svg
    assert elements(svg)[0].get("fill") == "currentColor"  # the default of all that is filled with black
    assert "stroke: currentColor" in svg
    assert "fill: #ffffff; fill: var(--paper, #ffffff)" in svg
    assert "stroke: #dddddd; stroke: var(--grid, #dddddd)" in svg


def test_letters_in_a_colour_lean_towards_the_text_and_white_ones_stay() -> None:
    styles = {element.text: element.get("style") or "" for element in elements(made())}
    assert "fill: color-mix(in srgb, #009e73 55%, currentColor)" in styles["green"]
    assert styles["on a bar"].endswith("fill: #ffffff")
    assert "fill" not in styles["a title"]


def test_black_shapes_stay_black_beside_a_picture() -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    left.imshow([[0, 1]], cmap="gray")
    right.bar([0], [1], color="black")
    right.set_title("black letters turn")
    svg = to_svg(figure, "one")
    (bar,) = (
        each for each in elements(svg) if (each.get("d") or "").endswith("z") and "fill: #000000" in str(each.attrib)
    )
    assert "clip-path" in bar.attrib
    (title,) = (each for each in elements(svg) if each.text == "black letters turn")
    assert "fill" not in str(title.get("style"))


def test_there_is_no_background_and_nothing_that_speaks_to_the_whole_page() -> None:
    svg = made()
    assert not {"style", "metadata"} & {element.tag.split("}")[1] for element in elements(svg)}
    assert 'style="fill: none"' not in svg


def test_the_figure_itself_is_left_as_it_was() -> None:
    figure = drawn()
    before = figure.get_facecolor(), figure.axes[0].get_facecolor()
    to_svg(figure, "one")
    assert (figure.get_facecolor(), figure.axes[0].get_facecolor()) == before


def test_every_address_is_used_and_leads_somewhere() -> None:
    svg = made()
    ids = re.findall(r' id="([^"]+)"', svg)
    used = {*re.findall(r"url\(#([^)]+)\)", svg), *re.findall(r' href="#([^"]+)"', svg)}
    assert len(ids) == len({*ids})
    assert {*ids} == used
    assert len(ids) > 3  # a clip, ticks, markers, a hatch


@pytest.mark.parametrize("name", ["two", 'a "b" <c> (d)', "one-1", "é/ü"])
def test_figures_of_other_names_have_other_addresses(name: str) -> None:
    ids = [{*re.findall(r' id="([^"]+)"', svg)} for svg in (made(), to_svg(drawn(), name))]
    assert not ids[0] & ids[1]
    assert all(re.fullmatch(r"[\w.-]+", address) for address in ids[1])


def test_addresses_can_be_given_once_more() -> None:
    svg = prefix_ids(made(), "again (2)")
    ids = re.findall(r' id="([^"]+)"', svg)
    assert all(address.startswith("again-2-one-") for address in ids)
    assert {*ids} == {*re.findall(r"url\(#([^)]+)\)", svg), *re.findall(r' href="#([^"]+)"', svg)}


def test_a_figure_says_what_it_shows() -> None:
    assert describe_figure(drawn()) == "a title: y / ms against x & <b>: ours"
    assert elements(made())[0].get("aria-label") == describe_figure(drawn())
    assert elements(to_svg(Figure(), "an empty one"))[0].get("aria-label") == "an empty one"
    two = Figure()
    for ax in two.subplots(1, 2):
        ax.set(xlabel="$x_1$\nof all")
    two.suptitle("both")
    assert describe_figure(two) == "both; x_1 of all"  # panels that say the same are named once


def test_shapes_are_where_they_were_to_a_hundredth() -> None:
    figure = Figure(figsize=(2, 2), dpi=72)
    figure.add_axes((0.1, 0.1, 0.8, 0.8)).set(xlim=(0, 3), ylim=(0, 3))
    figure.axes[0].plot([1, 2], [1, 2], color="#0072b2")
    (line,) = (each for each in elements(to_svg(figure, "one")) if "#0072b2" in (each.get("style") or ""))
    assert line.get("d") == "M 52.8 91.2 L 91.2 52.8"


def test_slugs_are_addresses() -> None:
    assert slug("a b/c(d)é") == "a-b-c-d-é"
    assert slug("—") == ""
