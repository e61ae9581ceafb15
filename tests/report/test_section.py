"""Tests of report.section."""

from _reports import sections

from neuboots.report.section import count_outcomes


def test_outcomes_are_counted() -> None:
    assert list(count_outcomes(sections()[0].checks).values()) == [1, 1, 1]
