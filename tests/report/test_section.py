"""Tests of report.section."""

import re

from _reports import sections

from neuboots.report.section import count_outcomes, format_markdown_report, format_text


def test_markdown_report_gives_repeated_names_their_own_anchors() -> None:
    text = format_markdown_report(sections(), title="T", introduction="I")
    assert [*dict.fromkeys(re.findall(r"\[digits\]\(#([^)]+)\)", text))] == ["digits-table-31", "digits-table-31-1"]
    assert "Of 5 claims: 2 hold, 1 do NOT hold, 2 are not resolved." in text


def test_format_text_has_tables_and_checks() -> None:
    first = sections()[0]
    text = format_text(first)
    assert first.tables[0].text in text
    assert all(str(check) in text for check in first.checks)
    assert list(count_outcomes(first.checks).values()) == [1, 1, 1]
