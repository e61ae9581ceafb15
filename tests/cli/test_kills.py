"""A few kills of each command; `python tests/kills.py` does many."""

from pathlib import Path

import pytest
from kills import CASES, run_case


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_killed_command_leaves_no_broken_file(name: str, tmp_path: Path) -> None:
    outcomes = run_case(name, 3, tmp_path)
    assert not [outcome for outcome in outcomes if outcome.startswith("FAILED")]
