"""docs/your-data.md from its template and from what was found; see make_your_data.py."""

import re
import textwrap
from typing import Any

import numpy as np

WIDTH = 100  # of output blocks, in characters


def percent(share: Any) -> str:
    """A share in words: 0.034 is 3.4 %."""
    return f"{100 * float(share):.1f} %"


def short(value: Any) -> str:
    """A cell of a table on the page.

    >>> [short(value) for value in (0.123456, 1e-9, 12, True, "benign")]
    ['0.123', '0.000', '12', 'true', 'benign']
    """
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def page(template: str, held: dict[str, Any]) -> str:
    """The template with what was found in its places: {{fact}}, {{table:name}}, {{command:name}}, {{run:name}}.

    >>> page("{{n}} rows: {{table:t}}", {"facts": {"n": "3"}, "tables": {"t": [["a"], ["b"]]}, "runs": {}})
    '3 rows: | a |\\n| --- |\\n| b |'
    """

    def found(place: re.Match[str]) -> str:
        kind, _, name = place[1].rpartition(":")
        if kind == "table":
            head, *lines = held["tables"][name]
            return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))
        if kind:
            run = held["runs"][name]
            block = f"```sh\n{run['command']}\n```"
            return block if kind == "command" else f"{block}\n\n```text\n{folded(run['output'])}\n```"
        return str(held["facts"][name])

    return re.sub(r"\{\{([\w:]+)\}\}", found, template)


def folded(text: str) -> str:
    """Long lines folded at words, and indented a little further than they began; no blank lines at the ends."""
    lines = []
    for line in text.strip("\n").splitlines():
        margin = " " * (len(line) - len(line.lstrip()) + 2)
        lines += (
            textwrap.wrap(line, WIDTH, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)
            if len(line.rstrip()) > WIDTH
            else [line.rstrip()]
        )
    return "\n".join(lines)
