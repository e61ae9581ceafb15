"""Tests of the commands in the documentation."""

import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest

from neuboots.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page: (ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/your-data.md")}
LINES = [line for text in PAGES.values() for line in re.findall(r"^neuboots [a-z].*$", text, re.MULTILINE)]


@pytest.mark.parametrize("line", dict.fromkeys(LINES))
def test_command_line_is_valid(line: str) -> None:
    import tyro

    _, name, *arguments = shlex.split(line, comments=True)
    module, _, attribute = COMMANDS[name][0].partition(":")
    command = getattr(import_module(module), attribute)
    assert isinstance(tyro.cli(command, args=arguments, config=(tyro.conf.PositionalRequiredArgs,)), command)


def test_page_shows_the_main_commands_with_outputs() -> None:
    assert {"fit", "predict", "evaluate", "suggest"} <= {line.split()[1] for line in LINES}
    assert "```text\n```" not in PAGES["docs/your-data.md"]


def test_outputs_are_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.delitem(sys.modules, "make_your_data", raising=False)
    import make_your_data

    block = "```sh\nneuboots list methods --json\n```\n\n```text\n{}\n```"
    page = "text\n\n```sh\npip install x\n```\n\n" + block
    updated = make_your_data.update(page.format("old"), tmp_path)
    assert "old" not in updated
    assert '"neuboots"' in updated
    assert "pip install x" in updated
