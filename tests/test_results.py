"""docs/results.md is made from the committed rows, never typed; every study has its rows and is named in the docs."""

import re
from pathlib import Path

import pytest

from neuboots.experiments.report import chapters_in, render
from neuboots.experiments.runs import read_run
from neuboots.experiments.studies import STUDIES

HOME = Path(__file__).resolve().parent.parent
RESULTS = HOME / "results" / "cpu"


def test_the_page_shows_the_committed_rows() -> None:
    made = render(chapters_in(RESULTS, figures=False), ".md")
    assert (HOME / "docs" / "results.md").read_text(encoding="utf-8") == made


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_was_run_with_the_settings_that_stand_in_the_code(name: str) -> None:
    run = read_run(RESULTS / name, STUDIES)
    assert run.scale == "cpu"
    assert run.study == STUDIES[name].at("cpu")
    assert len(run.study.seeds) >= 3


@pytest.mark.parametrize("name", STUDIES)
def test_committed_rows_are_small(name: str) -> None:
    assert sum(file.stat().st_size for file in (RESULTS / name).rglob("*.json")) < 500_000


def test_the_docs_name_every_study() -> None:
    text = (HOME / "docs" / "reproduce.md").read_text(encoding="utf-8")
    named = {
        name for line in text.splitlines() if line.startswith("| `") for name in re.findall(r"`([a-z0-9-]+)`", line)
    }
    assert named == {*STUDIES}
