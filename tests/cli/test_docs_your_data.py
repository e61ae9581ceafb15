"""docs/your-data.md is what its template and the committed run give; its commands parse, its figures are there."""

import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from neuboots.cli import COMMANDS

HOME = Path(__file__).resolve().parent.parent
DOCS = HOME / "docs"
PAGE = (DOCS / "your-data.md").read_text(encoding="utf-8")
TEMPLATE = (DOCS / "your-data.md.in").read_text(encoding="utf-8")
HELD: dict[str, Any] = json.loads((DOCS / "your-data.json").read_text(encoding="utf-8"))


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which stands beside its page."""
    monkeypatch.syspath_prepend(str(DOCS))
    import make_your_data

    return make_your_data


def commands_in(text: str) -> list[str]:
    """The lines of shell blocks that call neuboots."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("neuboots ")]


TYPED = [*commands_in(PAGE), *commands_in((HOME / "README.md").read_text(encoding="utf-8"))]


def test_the_page_is_what_the_committed_run_gives(maker: ModuleType) -> None:
    assert maker.page(TEMPLATE, HELD) == PAGE


def test_nothing_was_found_in_vain_and_nothing_is_left_open() -> None:
    places = {*re.findall(r"\{\{([\w:]+)\}\}", TEMPLATE)}
    ways = {f"{kind}:{name}" for name in HELD["runs"] for kind in ("run", "command")}
    shown = {place.partition(":")[2] for place in places & ways}
    assert shown == {*HELD["runs"]}
    assert places - ways == {*HELD["facts"], *(f"table:{name}" for name in HELD["tables"])}


def test_the_committed_run_is_of_the_commands_that_stand_in_the_code(maker: ModuleType) -> None:
    assert {name: run["command"] for name, run in HELD["runs"].items()} == maker.COMMANDS
    assert "Traceback" not in json.dumps(HELD)


@pytest.mark.parametrize("command", TYPED)
def test_every_command_can_be_typed(command: str) -> None:
    from tyro.conf import PositionalRequiredArgs
    from tyro.extras import subcommand_cli_from_dict

    words = shlex.split(command, comments=True)[1:]
    chosen = subcommand_cli_from_dict(COMMANDS, args=words, config=(PositionalRequiredArgs,))
    assert type(chosen) is COMMANDS[words[0]]


def test_the_page_shows_all_four_commands() -> None:
    assert {"fit", "predict", "evaluate", "next"} <= {shlex.split(command)[1] for command in TYPED}


def test_every_figure_is_there_used_and_small(maker: ModuleType) -> None:
    from your_data_figures import FIGURES

    used = {Path(link).name for link in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE)}
    there = {path.name: path.stat().st_size for path in (DOCS / "figures").glob("your-data-*")}
    assert used == {*there} == {f"your-data-{name}.png" for name in FIGURES}
    assert max(there.values()) <= 60_000


def test_new_rows_have_no_label_and_none_was_trained_on(maker: ModuleType, tmp_path: Path) -> None:
    import pandas as pd

    frame = maker.write_patients(tmp_path, seed=1)
    names = ("patients", "new", "followed-up", "few", "pool")
    parts = {name: pd.read_csv(tmp_path / f"{name}.csv") for name in names}
    assert "diagnosis" not in parts["new"]
    assert "diagnosis" not in parts["pool"]
    assert parts["new"].equals(parts["followed-up"].drop(columns="diagnosis"))
    assert len(parts["patients"]) + len(parts["new"]) == len(frame) == 569
    assert len(parts["few"]) + len(parts["pool"]) == len(parts["patients"])
    measured = list(parts["new"].columns)
    assert not pd.concat([parts["patients"], parts["followed-up"]]).duplicated(measured).any()


def test_what_was_chosen_gets_its_own_label(maker: ModuleType, tmp_path: Path) -> None:
    import pandas as pd

    frame = maker.write_patients(tmp_path, seed=0)
    pd.DataFrame({"row": [3, 1]}).to_csv(tmp_path / "to-label.csv", index=False)
    maker.write_labelled(tmp_path, frame, "to-label.csv")
    more, pool = pd.read_csv(tmp_path / "more.csv"), pd.read_csv(tmp_path / "pool.csv")
    added = more[maker.FEW :].reset_index(drop=True)
    assert added.drop(columns="diagnosis").equals(pool.iloc[[2, 0]].reset_index(drop=True))
    assert added["diagnosis"].tolist() == frame["diagnosis"].iloc[[maker.FEW + 2, maker.FEW]].tolist()


def test_long_lines_are_folded_and_lose_no_word(maker: ModuleType) -> None:
    line = "  note: " + "a word " * 40
    from your_data_page import folded as fold

    folded = fold(f"\n{line}\nshort\n")
    assert max(map(len, folded.splitlines())) <= maker.WIDTH
    assert folded.split() == [*line.split(), "short"]
