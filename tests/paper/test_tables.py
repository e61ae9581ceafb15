"""Tests of neuboots_paper.tables and the formats of report.tables."""

from statistics import fmean, stdev

import pytest

from neuboots.report.tables import Table
from neuboots_paper.tables import MetricColumn, tabulate

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


def test_cell_is_mean_and_std_of_its_group() -> None:
    values = [row["error"] for row in ROWS if row["net"] == "small" and row["method"] == "a"]
    cell = table().rows[0][2]
    assert cell.text == f"{100 * fmean(values):.1f} ± {100 * stdev(values):.1f}"
    assert cell.value == pytest.approx(100 * fmean(values))


def test_paper_values_have_their_own_column() -> None:
    made = table()
    assert made.columns == ("net", "method", "error, %", "paper", "NLL")
    assert [row[3].text for row in made.rows] == ["19.5 ± 0.2", "–", "–", "7"]
    assert [row[3].value for row in made.rows] == [19.5, None, None, 7.0]


def test_best_is_marked_among_groups_that_share_all_but_the_last_key() -> None:
    best = [(row[0].text, row[1].text) for row in table().rows if row[2].best]
    assert best == [("small", "b"), ("large", "a")]
    higher = tabulate("T.", ROWS[:6], by=("method",), columns=(MetricColumn("error", "x", better="higher"),))
    assert [row[0].text for row in higher.rows if row[1].best] == ["a"]


def test_ties_are_all_marked_unless_all_are_equal() -> None:
    rows = [{"method": name, "error": error} for name, error in (("a", 0.0), ("b", 0.0), ("c", 1.0))]
    some = tabulate("T.", rows, by=("method",), columns=(ERROR,))
    assert [row[0].text for row in some.rows if row[1].best] == ["a", "b"]
    alike = tabulate("T.", rows[:2], by=("method",), columns=(ERROR,))
    assert not any(row[1].best for row in alike.rows)


def test_missing_metric_is_a_dash_and_single_row_has_no_std() -> None:
    assert [row[4].text for row in table().rows] == ["–", "1.000 ± 0.000", "–", "1.000 ± 0.000"]
    single = tabulate("T.", ROWS[:1], by=("method",), columns=(ERROR,))
    assert single.rows[0][1].text == "20.0"


def test_links_are_formatted_with_the_keys() -> None:
    assert table().links[0] == "reliability-small-a"
    assert tabulate("T.", ROWS, by=("method",), columns=(ERROR,)).links == ()


def test_markdown_rows_have_equal_lengths() -> None:
    lines = [line for line in table().markdown.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {6}
    assert "**" in lines[3]


def test_text_right_aligns_numbers() -> None:
    lines = table().text.splitlines()[1:]
    places = {line.index("±") for line in lines[1:] if "±" in line}
    assert len(places) == 1
    assert lines[0].startswith("net")


def test_format_of_extreme_numbers() -> None:
    column = MetricColumn("x", "x", scale=100)
    assert [column.format(x) for x in (-1e-9, 0.0, 123456.789, 1e300, -3.4e38)] == [
        "0.00", "0.00", "12345678.90", "1e+302", "-3.4e+40",
    ]  # fmt: skip
