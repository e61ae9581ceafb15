"""Between the library and whoever typed a command: faults and warnings become sentences, and sentences are printed.

What commands that ask a saved model share: its loading, words and tables for people, JSON for machines.

What `--help` calls the arguments that stand by themselves: DATA and MODEL instead of STR.

What `neuboots fit` says: what was made of the columns, and how good the model is, in plain words.
"""

import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TextIO

from neuboots.app import Model
from neuboots.data._common import format_names
from neuboots.data.tabular import MAX_INTEGER_CLASSES, NUMBER_LIKE, TableSchema, TargetColumn


class Command(Protocol):
    """Options that know how to run themselves."""

    def run(self) -> None: ...


class UsageError(ValueError):
    """An option has a value that cannot be used; the message says which, and what to give instead."""


_NAMES = (
    "channels|classes|epochs|ignore|level|max_categories|max_error|max_width|method|num_samples|seed|size|target|task|test|"
    "void"
)
_OPTION = re.compile(rf"(?<![\w/'\"])({_NAMES})=(\[)?('[^']*'|[^\s,;:]+?)(\])?(?=[\s,;:.]|$)")


@contextmanager
def user_errors() -> Iterator[None]:
    """What is wrong with a file, a model or an option is said in one line, and never with a traceback.

    >>> with user_errors():
    ...     raise ValueError("column 'id' is no number; leave it out with ignore=['id']")
    Traceback (most recent call last):
    neuboots.cli._console.UsageError: column 'id' is no number; leave it out with --ignore 'id'
    """
    try:
        yield
    except (UsageError, BrokenPipeError):
        raise
    except MemoryError:
        raise UsageError("the memory of this machine is too small for that; give fewer rows or columns") from None
    except (ValueError, OSError, OverflowError) as fault:
        raise UsageError(as_options(" ".join(str(fault).split()) or type(fault).__name__)) from None


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Gives a list that takes what the library itself warns of, each once; other libraries warn programmers."""
    notes: list[str] = []

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        sentence = as_options(" ".join(str(message).split()))
        ours = issubclass(category, UserWarning) and f"{os.sep}neuboots{os.sep}" in filename
        if ours and sentence not in notes:
            notes.append(sentence)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield notes


def echo(words: str, *, aside: bool = False) -> None:
    """Print, to standard error if `aside`; what cannot be shown, or nobody reads any more, stops no work."""
    stream = sys.stderr if aside else sys.stdout
    if stream is None:  # it is closed
        return
    encoding = stream.encoding or "utf-8"
    try:
        print(words.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
    except OSError:  # a reader that is gone, a disk that is full
        silence_stream(stream)


def silence_stream(stream: TextIO | None = None) -> None:
    """Standard output, or another stream, goes nowhere from now on: whoever read it has enough."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), (stream or sys.stdout).fileno())


def as_options(sentence: str) -> str:
    """A sentence about arguments as one about options.

    >>> as_options("got test=0.1 of 2 rows; give test=0, or raise max_categories")
    'got --test 0.1 of 2 rows; give --test 0, or raise --max-categories'
    """
    named = _OPTION.sub(lambda found: f"--{found[1].replace('_', '-')} {found[3]}", sentence)
    return named.replace("raise max_categories", "raise --max-categories").replace(" a larger validation_fraction,", "")


if TYPE_CHECKING:
    from neuboots.app import Model, RowBatch
    from neuboots.report.tables import Table


def load_or_exit(folder: str) -> "Model":
    """The model in this folder."""
    from neuboots.app import load_model

    with user_errors():
        return load_model(folder)


def read_batches(model: "Model", source: str, keep: Sequence[str]) -> "Iterator[RowBatch]":
    """The rows of a source; of a table with these columns carried along, or with all."""
    from neuboots.app.tabular import TabularModel

    if isinstance(model, TabularModel):
        return model.read(source, keep="all" if list(keep) == ["all"] else keep)
    if keep:
        raise UsageError(f"--keep is for tables, but the model is one of {model.kind}; leave it out")
    return model.read(source)


def check_int_option(name: str, value: int, least: int) -> None:
    """Refuse what is no number of things."""
    if not least <= value < 2**31:
        raise UsageError(f"--{name} is {value}; give a whole number of at least {least}")


class Console:
    """What is said to people: to standard error (aside) where standard output carries the result."""

    def __init__(self, *, aside: bool) -> None:
        from rich.console import Console

        self.aside = aside
        self.console = Console(file=sys.stderr if aside else sys.stdout, highlight=False, markup=False)

    def say(self, words: Any, style: str | None = None) -> None:
        """A line, which is not broken, or anything else that rich can draw, in the width that there is."""
        with self.console.capture() as said:  # and then spoken: whoever reads may have gone
            self.console.print(words, style=style, soft_wrap=isinstance(words, str))
        echo(said.get().removesuffix("\n"), aside=self.aside)

    def show(self, table: "Table") -> None:
        """A table of the report room."""
        from rich import box
        from rich.table import Table as Drawn

        drawn = Drawn(box=box.SIMPLE, show_edge=False, padding=(0, 2, 0, 0))
        for k, head in enumerate(table.columns):
            number = k >= max(1, table.num_keys) or all(line[k].value is not None for line in table.rows)
            drawn.add_column(head, justify="right" if number else "left", overflow="fold")
        for line in table.rows:
            drawn.add_row(*(cell.text for cell in line))
        self.say(f"\n{table.title}", style="bold")
        if table.rows:
            self.say(drawn)
        if table.note:
            self.say(table.note)


def print_json(found: dict[str, Any]) -> None:
    """One JSON object on standard output; in ASCII, so that every terminal keeps each character of it."""
    try:
        print(json.dumps(to_json(found)), flush=True)
    except BrokenPipeError:
        silence_stream()
    except OSError as fault:
        silence_stream()
        raise UsageError(f"standard output does not take the result ({fault})") from None


def to_json(value: Any) -> Any:
    """As JSON takes it, which has no NaN and no infinities: they are null.

    >>> to_json({"width": math.inf, "levels": (0.5, 1)})
    {'width': None, 'levels': [0.5, 1]}
    """
    if isinstance(value, dict):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _called(name: str) -> Any:
    try:
        from tyro.conf import arg
    except ImportError:  # the command line says what is missing; options can be made without it
        return name
    return arg(metavar=name)


DataPath = Annotated[str, _called("DATA")]
ModelFolder = Annotated[str, _called("MODEL")]


SHOWN = 12  # columns that are described
FEW = 50  # test rows whose figures say little


def columns_in_words(
    data: str, schema: TableSchema, notes: Sequence[str], *, task: str | None, ignore: Sequence[str]
) -> Iterator[str]:
    """What was made of the table: the task and why, and each column."""
    target, other = schema.target, "regression" if schema.target.classes else "classification"
    yield f"{data} is a table; {target.name!r} is predicted as a {target.task}, {_why(target, task)}."
    if task is None and not (target.kind == "text" and other == "regression"):
        yield f"  (For a {other} give --task {other}.)"
    if target.classes:
        yield f"  {len(target.classes)} classes: {format_names(target.classes, SHOWN)}"
    else:
        yield f"  mean {target.mean:.4g}, standard deviation {target.std:.4g}"
    numbers, categories = len(schema.numbers), len(schema.categories)
    yield f"Columns to learn from, {numbers:,} of numbers, dates or booleans and {categories:,} of categories:"
    lines = str(schema).splitlines()[1:]
    made = [line for line in lines if not line.endswith(": left out")]
    yield from (f"  {line}" for line in islice(made, SHOWN))
    if len(made) > SHOWN:
        yield f"  … and {len(made) - SHOWN:,} columns more"
    for name, values in ((target.name, target.classes if target.kind == "text" else ()), *_texts(schema)):
        figures = [value for value in values if re.fullmatch(NUMBER_LIKE, value)]
        if 2 * len(figures) > len(values):
            odd = [value for value in values if value not in figures]
            yield (
                f"  note: {name!r} was taken for {'classes' if name == target.name else 'categories'}, though it holds "
                f"figures such as {figures[0]!r}{f', beside {format_names(odd, 3)}' if odd else ''}; write numbers as 1.5, "
                "dates as 2024-02-29, and nothing where one is missing"
            )
    yield from (f"  note: {note}" for note in notes)
    yield "  (To leave a column out give --ignore COLUMN.)"
    if told := [name for name in schema.excluded if name in ignore]:
        yield f"  left out, as told: {format_names(told, SHOWN)}"
    if others := [name for name in schema.excluded if name not in ignore]:
        yield (
            f"  left out, as they have no name, no value, or more different texts than --max-categories: "
            f"{format_names(others, SHOWN)}"
        )


def _texts(schema: TableSchema) -> Iterator[tuple[str, Sequence[str]]]:
    return ((column.name, column.values) for column in schema.categories)


def _why(target: TargetColumn, task: str | None) -> str:
    if task is not None:
        return "as --task says"
    if target.kind == "text":
        return "as it holds texts"
    if target.kind == "boolean":
        return "as it is true or false"
    if target.classes:
        return f"as it holds {len(target.classes)} different whole numbers, again and again"
    return f"as it holds numbers that are not whole, or more than {MAX_INTEGER_CLASSES} different ones"


def pictures_in_words(data: str, kind: str, chosen: Mapping[str, Any], notes: Sequence[str]) -> Iterator[str]:
    """What was made of a folder of pictures."""
    if kind == "images":
        yield f"{data} is a folder of images by class (one with the folders images and masks would be of pixels)."
    else:
        yield f"{data} is a folder of images and masks, and each pixel gets a class (other folders would be classes)."
    height, width = chosen["size"]
    yield f"  the net {chosen['net']} sees {height} × {width} pixels (--size) for {chosen['epochs']} epochs at most"
    yield from (f"  note: {note}" for note in notes)


def summary_in_words(model: Model) -> Iterator[str]:
    """The figures of the test rows."""
    card = model.card
    rows, figures = card.rows, card.figures
    yield ""
    parts = ", ".join(f"{count:,} {part}" for part, count in rows.items())
    if not {"error", "rmse"} & {*figures}:
        yield f"Trained ({parts}). No rows were kept for a test: how good it is, evaluate says on others."
    else:
        yield f"On {rows['test']:,} test rows, which nothing was trained or calibrated on ({parts}):"
        words = {"classification": _classes, "regression": _numbers, "segmentation": _pixels}[card.task]
        yield from (f"  {line}" for line in words(figures))
        if rows["test"] < FEW:
            yield f"  So few test rows say little: another {rows['test']} might give quite other figures."
    yield from (f"  {note}" for note in figures.get("notes", ()))


def _classes(figures: dict[str, Any]) -> Iterator[str]:
    guess = figures["error_of_commonest"]
    yield f"{figures['error']:.1%} of the classes are wrong (always guessing the commonest class: {guess:.1%})"
    scores = f"NLL {figures['nll']:.3f} nats, Brier score {figures['brier']:.3f}"
    yield f"its probabilities are off by {figures['ece']:.1%} on average (ECE); {scores}"
    yield _abstaining(figures, "error_answered", lambda error: f"{error:.1%} of its answers are wrong")


def _numbers(figures: dict[str, Any]) -> Iterator[str]:
    r2 = "" if figures["r2"] is None else f", R² {figures['r2']:.3f}"
    yield (
        f"RMSE {figures['rmse']:.4g}, mean absolute error {figures['mae']:.4g}{r2} (always the mean: RMSE "
        f"{figures['rmse_of_constant']:.4g})"
    )
    yield (
        f"{figures['coverage']:.1%} of the true values lie in their {figures['level']:.0%} intervals, which are "
        f"{figures['mean_width']:.4g} wide on average"
    )
    yield _abstaining(figures, "rmse_answered", lambda rmse: f"the RMSE of its answers is {rmse:.4g}")


def _abstaining(figures: dict[str, Any], name: str, words: Any) -> str:
    among = figures.get(name)
    return f"it would abstain from {1 - figures['answered']:.1%} of the rows" + (
        f"; {words(among)}" if among is not None else ""
    )


def _pixels(figures: dict[str, Any]) -> Iterator[str]:
    constant = f"always the commonest class: {figures['error_of_commonest']:.1%}"
    yield f"{figures['error']:.1%} of the pixels are wrong ({constant}); mean IoU {figures['mean_iou']:.3f}"
    yield f"its probabilities are off by {figures['ece']:.1%} on average (ECE)"
    yield f"it would abstain from {1 - figures['answered']:.1%} of the images"
