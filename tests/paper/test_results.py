"""docs/results.md and docs/uci.md are made from the committed rows, never typed; the docs name every study."""

import re
from pathlib import Path

import pytest

from neuboots.cli._console import UsageError
from neuboots_paper.registry import STUDIES
from neuboots_paper.report import chapters_in, render
from neuboots_paper.runner import read_run

HOME = Path(__file__).resolve().parent.parent
RESULTS = HOME / "results" / "cpu"


@pytest.mark.parametrize(
    ("page", "folder", "without"),
    [
        ("results", RESULTS, ["uci", "validity"]),
        ("uci", RESULTS / "uci", []),
        ("validity", RESULTS / "validity", []),
    ],
)
def test_the_page_shows_the_committed_rows(page: str, folder: Path, without: list[str]) -> None:
    made = render(chapters_in(folder, figures=False, without=without), ".md")
    assert (HOME / "docs" / f"{page}.md").read_text(encoding="utf-8") == made


def test_what_is_beyond_the_paper_is_not_called_the_paper() -> None:
    ours, papers = (chapters_in(RESULTS / name, figures=False) for name in ("uci", "text"))
    assert render(ours, ".md").startswith("# Beyond the paper\n")
    assert render([*papers, *ours], ".md").startswith("# The paper, reproduced\n")


def test_experiments_are_left_out_by_name() -> None:
    found = [chapter.name for chapter in chapters_in(RESULTS, figures=False, without=["uci", "text"])]
    assert found == [name for name in STUDIES if name not in ("uci", "text")]
    with pytest.raises(UsageError, match="--without is uic; give some of coverage"):
        chapters_in(RESULTS, without=["uic"])
    with pytest.raises(UsageError, match="holds nothing but uci, which --without leaves out"):
        chapters_in(RESULTS / "uci", without=["uci"])


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_was_run_with_the_settings_that_stand_in_the_code(name: str) -> None:
    run = read_run(RESULTS / name, STUDIES)
    assert run.scale == "cpu"
    assert run.study == STUDIES[name].at("cpu")
    assert len(run.study.seeds) >= 3


@pytest.mark.parametrize("name", STUDIES)
def test_committed_rows_are_small(name: str) -> None:
    most = 4_000_000 if name == "validity" else 500_000  # which has widths by data set and x, for the correlations
    assert sum(file.stat().st_size for file in (RESULTS / name).rglob("*.json")) < most


def test_the_docs_name_every_study() -> None:
    text = (HOME / "docs" / "reproduce.md").read_text(encoding="utf-8")
    named = {
        name for line in text.splitlines() if line.startswith("| `") for name in re.findall(r"`([a-z0-9-]+)`", line)
    }
    assert named == {*STUDIES}
