"""What `neuboots fit` says: what was made of the columns, and how good the model is, in plain words."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from neuboots.data.learning import FIGURES, MOST_WHOLE_NUMBERS
from neuboots.data.schema import Schema, Target, listed
from neuboots.models import Model

SHOWN = 12  # columns that are described
FEW = 50  # test rows whose figures say little


def columns_in_words(
    data: str, schema: Schema, notes: Sequence[str], *, task: str | None, ignore: Sequence[str]
) -> Iterator[str]:
    """What was made of the table: the task and why, and each column."""
    target, other = schema.target, "regression" if schema.target.classes else "classification"
    yield f"{data} is a table; {target.name!r} is predicted as a {target.task}, {_why(target, task)}."
    if task is None and not (target.kind == "text" and other == "regression"):
        yield f"  (For a {other} give --task {other}.)"
    if target.classes:
        yield f"  {len(target.classes)} classes: {listed(target.classes, SHOWN)}"
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
        figures = [value for value in values if re.fullmatch(FIGURES, value)]
        if 2 * len(figures) > len(values):
            odd = [value for value in values if value not in figures]
            yield (
                f"  note: {name!r} was taken for {'classes' if name == target.name else 'categories'}, though it holds "
                f"figures such as {figures[0]!r}{f', beside {listed(odd, 3)}' if odd else ''}; write numbers as 1.5, "
                "dates as 2024-02-29, and nothing where one is missing"
            )
    yield from (f"  note: {note}" for note in notes)
    yield "  (To leave a column out give --ignore COLUMN.)"
    if told := [name for name in schema.left_out if name in ignore]:
        yield f"  left out, as told: {listed(told, SHOWN)}"
    if others := [name for name in schema.left_out if name not in ignore]:
        yield (
            f"  left out, as they have no name, no value, or more different texts than --max-categories: "
            f"{listed(others, SHOWN)}"
        )


def _texts(schema: Schema) -> Iterator[tuple[str, Sequence[str]]]:
    return ((column.name, column.values) for column in schema.categories)


def _why(target: Target, task: str | None) -> str:
    if task is not None:
        return "as --task says"
    if target.kind == "text":
        return "as it holds texts"
    if target.kind == "boolean":
        return "as it is true or false"
    if target.classes:
        return f"as it holds {len(target.classes)} different whole numbers, again and again"
    return f"as it holds numbers that are not whole, or more than {MOST_WHOLE_NUMBERS} different ones"


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
