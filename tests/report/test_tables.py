"""Tables of results: mean ± standard deviation of each group, the paper's figure beside it, in three forms."""

from html.parser import HTMLParser
from statistics import fmean, stdev
from typing import ClassVar

import pytest

from neuboots.report.tables import Cell, MetricColumn, Table, tabulate

ROWS = [
    {"net": net, "method": method, "seed": seed, "error": base + seed / 100, "nll": None if method == "a" else 1.0}
    for net, shift in (("small", 0.0), ("large", 0.1))
    for method, base in (("a", 0.2 + shift), ("b", 0.1 + 3 * shift))
    for seed in range(3)
]
ERROR = MetricColumn("error", "error, %", 100, digits=1, better="lower")
PAPER = {("small", "a"): {"error": "19.5 ± 0.2"}, ("large", "b"): {"error": 7}}


def table() -> Table:
    columns = (ERROR, MetricColumn("nll", "NLL", digits=3))
    return tabulate("T.", ROWS, by=("net", "method"), columns=columns, paper=PAPER, link="reliability-{net}-{method}")


def test_a_cell_is_the_mean_and_the_spread_of_its_group() -> None:
    values = [row["error"] for row in ROWS if row["net"] == "small" and row["method"] == "a"]
    cell = table().lines[0][2]
    assert cell.text == f"{100 * fmean(values):.1f} ± {100 * stdev(values):.1f}"
    assert cell.value == pytest.approx(100 * fmean(values))


def test_the_papers_figure_stands_beside_ours() -> None:
    made = table()
    assert made.heads == ("net", "method", "error, %", "paper", "NLL")
    assert [line[3].text for line in made.lines] == ["19.5 ± 0.2", "–", "–", "7"]
    assert [line[3].value for line in made.lines] == [19.5, None, None, 7.0]


def test_the_best_is_marked_among_those_that_share_all_but_the_last_key() -> None:
    best = [(line[0].text, line[1].text) for line in table().lines if line[2].best]
    assert best == [("small", "b"), ("large", "a")]
    higher = tabulate("T.", ROWS[:6], by=("method",), columns=(MetricColumn("error", "x", better="higher"),))
    assert [line[0].text for line in higher.lines if line[1].best] == ["a"]


def test_all_that_are_as_good_as_the_best_are_marked_and_none_where_all_are_alike() -> None:
    rows = [{"method": name, "error": error} for name, error in (("a", 0.0), ("b", 0.0), ("c", 1.0))]
    some = tabulate("T.", rows, by=("method",), columns=(ERROR,))
    assert [line[0].text for line in some.lines if line[1].best] == ["a", "b"]
    alike = tabulate("T.", rows[:2], by=("method",), columns=(ERROR,))
    assert not any(line[1].best for line in alike.lines)


def test_a_figure_that_nobody_measured_is_missing_and_a_single_row_has_no_spread() -> None:
    assert [line[4].text for line in table().lines] == ["–", "1.000 ± 0.000", "–", "1.000 ± 0.000"]
    single = tabulate("T.", ROWS[:1], by=("method",), columns=(ERROR,))
    assert single.lines[0][1].text == "20.0"


def test_links_are_filled_in() -> None:
    assert table().links[0] == "reliability-small-a"
    assert tabulate("T.", ROWS, by=("method",), columns=(ERROR,)).links == ()


def test_markdown_has_as_many_cells_in_each_line() -> None:
    lines = [line for line in table().markdown.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {6}
    assert "**" in lines[3]


def test_text_aligns_numbers_to_the_right() -> None:
    lines = table().text.splitlines()[1:]
    places = {line.index("±") for line in lines[1:] if "±" in line}
    assert len(places) == 1
    assert lines[0].startswith("net")


def test_html_is_closed_and_escaped() -> None:
    made = Table("<b>", ("a & b",), ((Cell("<script>", 1.5),),), ("fig<",))

    class Reader(HTMLParser):
        opened: ClassVar[list[str]] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.opened.append(tag)
            if tag == "tr" and attrs:
                assert dict(attrs)["data-figure"] == "fig<"
            if tag == "td":
                assert dict(attrs)["data-value"] == "1.5"

        def handle_endtag(self, tag: str) -> None:
            assert self.opened.pop() == tag

    reader = Reader()
    reader.feed(made.html)
    assert reader.opened == []
    assert "<script>" not in made.html


def test_lines_and_links_must_fit() -> None:
    with pytest.raises(ValueError, match="a line of 1 cells; expected 2"):
        Table("T.", ("a", "b"), ((Cell("x"),),))
    with pytest.raises(ValueError, match="2 links for 1 lines"):
        Table("T.", ("a",), ((Cell("x"),),), ("p", "q"))


def test_odd_numbers_stay_short() -> None:
    column = MetricColumn("x", "x", scale=100)
    assert [column.show(x) for x in (-1e-9, 0.0, 123456.789, 1e300, -3.4e38)] == [
        "0.00", "0.00", "12345678.90", "1e+302", "-3.4e+40",
    ]  # fmt: skip
