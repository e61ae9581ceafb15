"""What commands that ask a saved model share: its loading, words and tables for people, JSON for machines."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from neuboots.commands.boundary import hush, sentences, speak
from neuboots.experiments import UsageError

if TYPE_CHECKING:
    from neuboots.models import Chunk, Model
    from neuboots.report.tables import Table


def opened(folder: str) -> "Model":
    """The model in this folder."""
    from neuboots.models import load_model

    with sentences():
        return load_model(folder)


def chunks_of(model: "Model", source: str, keep: Sequence[str]) -> "Iterator[Chunk]":
    """The rows of a source; of a table with these columns carried along, or with all."""
    from neuboots.models.table import TableModel

    if isinstance(model, TableModel):
        return model.read(source, keep="all" if list(keep) == ["all"] else keep)
    if keep:
        raise UsageError(f"--keep is for tables, but the model is one of {model.kind}; leave it out")
    return model.read(source)


def check_whole(name: str, value: int, least: int) -> None:
    """Refuse what is no number of things."""
    if not least <= value < 2**31:
        raise UsageError(f"--{name} is {value}; give a whole number of at least {least}")


class Words:
    """What is said to people: to standard error (aside) where standard output carries the result."""

    def __init__(self, *, aside: bool) -> None:
        from rich.console import Console

        self.aside = aside
        self.console = Console(file=sys.stderr if aside else sys.stdout, highlight=False, markup=False)

    def say(self, words: Any, style: str | None = None) -> None:
        """A line, which is not broken, or anything else that rich can draw, in the width that there is."""
        with self.console.capture() as said:  # and then spoken: whoever reads may have gone
            self.console.print(words, style=style, soft_wrap=isinstance(words, str))
        speak(said.get().removesuffix("\n"), aside=self.aside)

    def show(self, table: "Table") -> None:
        """A table of the report room."""
        from rich import box
        from rich.table import Table as Drawn

        drawn = Drawn(box=box.SIMPLE, show_edge=False, padding=(0, 2, 0, 0))
        for k, head in enumerate(table.heads):
            number = k >= max(1, table.keys) or all(line[k].value is not None for line in table.lines)
            drawn.add_column(head, justify="right" if number else "left", overflow="fold")
        for line in table.lines:
            drawn.add_row(*(cell.text for cell in line))
        self.say(f"\n{table.title}", style="bold")
        if table.lines:
            self.say(drawn)
        if table.note:
            self.say(table.note)


def give(found: dict[str, Any]) -> None:
    """One JSON object on standard output; in ASCII, so that every terminal keeps each character of it."""
    try:
        print(json.dumps(plain(found)), flush=True)
    except BrokenPipeError:
        hush()
    except OSError as fault:
        hush()
        raise UsageError(f"standard output does not take the result ({fault})") from None


def plain(value: Any) -> Any:
    """As JSON takes it, which has no NaN and no infinities: they are null.

    >>> plain({"width": math.inf, "levels": (0.5, 1)})
    {'width': None, 'levels': [0.5, 1]}
    """
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
