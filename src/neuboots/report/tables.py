"""Tables of results as plain text, Markdown and HTML."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MISSING = "–"
PAPER_COLUMN = "paper"  # header of a column of the paper's values
_FRACTIONS = {
    *("error", "ece", "adaptive_ece", "macro_f1", "balanced_accuracy", "aurc", "accuracy", "confidence", "precision"),
    *("recall", "f1", "fraction", "level", "coverage", "mean_iou", "mean_dice", "iou", "dice", "accepted"),
}


@dataclass(frozen=True)
class Cell:
    """A table cell.

    Args:
        text: Its text.
        value: The number to sort by, if it is one.
        best: Whether it is the best of its column.
    """

    text: str
    value: float | None = None
    best: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells.

    Args:
        title: Caption.
        columns: Headers.
        rows: Cells of each row.
        links: Name of the plot of each row, or None; empty for a table without plots.
        note: Remark below the table.
        num_keys: Number of leading columns that identify a row.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    links: tuple[str | None, ...] = ()
    note: str = ""
    num_keys: int = 0

    @property
    def text(self) -> str:
        """The table as plain text; the best value of a column has a star."""
        starred = [any(row[k].best for row in self.rows) for k in range(len(self.columns))]
        lines = [list(self.columns)]
        for row in self.rows:
            lines.append([c.text + ("*" if c.best else " " * star) for c, star in zip(row, starred, strict=True)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = [
            "  ".join(
                text.rjust(width) if self.is_numeric(k) else text.ljust(width)
                for k, (text, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *aligned, *([self.note] if self.note else [])])

    @property
    def markdown(self) -> str:
        """The table as Markdown; the best value of a column is bold."""
        texts = [[escape_markdown(cell.text) for cell in row] for row in self.rows]
        rows = [
            [f"**{text}**" if cell.best else text for text, cell in zip(line, row, strict=True)]
            for line, row in zip(texts, self.rows, strict=True)
        ]
        lines = [[*map(escape_markdown, self.columns)], ["---"] * len(self.columns), *rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"{self.title}\n\n{body}\n" + (f"\n{self.note}\n" if self.note else "")

    def is_numeric(self, k: int) -> bool:
        """Whether column k has only numbers and missing values."""
        return all(row[k].value is not None or row[k].text == MISSING for row in self.rows)

    def column_class(self, k: int) -> str:
        """CSS classes of column k."""
        name = self.num_keys > 0 and k == self.name_column
        paper = self.columns[k].startswith(PAPER_COLUMN)
        return " ".join(["number"] * self.is_numeric(k) + ["paper"] * paper + ["name"] * name)

    @property
    def name_column(self) -> int:
        """The column that names a row: the last of the keys that has text."""
        texts = [k for k in range(self.num_keys) if any(row[k].value is None for row in self.rows)]
        return texts[-1] if texts else max(self.num_keys - 1, 0)


# -- values --------------------------------------------------------------------------------------------


def make_table(title: str, rows: Sequence[Mapping[str, Any]], *, num_keys: int = 1, note: str = "") -> Table:
    """Build a table from rows of values, formatted by their type and column.

    Args:
        title: Caption.
        rows: Values of each row by column; None is missing.
        num_keys: Number of leading columns that identify a row.
        note: Remark below the table.

    Returns:
        The table.

    Example:
        >>> print(make_table("Classes.", [{"class": "cat", "recall": 0.5}, {"class": "dog", "recall": None}]).text)
        Classes.
        class  recall
        cat    50.0 %
        dog         –
    """
    columns = tuple(rows[0]) if rows else ()
    cells = [tuple(make_cell(column, row[column]) for column in columns) for row in rows]
    return Table(title, columns, tuple(cells), note=note, num_keys=num_keys)


def make_cell(name: str, value: Any, more: str = "") -> Cell:
    """Build a cell from a value, formatted by its type and column.

    Args:
        name: Name of the column or metric.
        value: The value; None is missing.
        more: Text after a number.

    Returns:
        The cell.
    """
    if value is None:
        return Cell(MISSING)
    if isinstance(value, tuple):
        return Cell(", ".join(value))
    return Cell(value) if isinstance(value, str) else Cell(format_value(name, value) + more, float(value))


def escape_markdown(text: str) -> str:
    """Escape what Markdown or HTML would interpret in a text, which becomes one line.

    Args:
        text: Any text, such as a name from a file.

    Returns:
        Its Markdown.

    Example:
        >>> print(escape_markdown("a*b | <c>, d_e _f_"))
        a\\*b \\| \\<c\\>, d_e \\_f\\_
    """
    return re.sub(r"([\\`*<>|\[\]$~#]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.splitlines()))


def format_value(name: str, value: float) -> str:
    """Return a value as text: integers with separators, fractions in %, other numbers with four digits.

    Args:
        name: Name of the metric or column.
        value: The value.

    Returns:
        The text.

    Example:
        >>> format_value("rows", 1200), format_value("recall", 0.5), format_value("rmse", 1234.5678)
        ('1,200', '50.0 %', '1235')
    """
    if isinstance(value, int):
        return f"{value:,}"
    return format_percent(value) if name in _FRACTIONS else format_number(value)


def format_percent(fraction: float) -> str:
    """Return a fraction in %.

    Args:
        fraction: The fraction.

    Returns:
        The text.

    Example:
        >>> format_percent(0.0721), format_percent(1.0)
        ('7.2 %', '100.0 %')
    """
    return f"{100 * fraction:.1f} %"


def format_interval(low: float, high: float) -> str:
    """Return the interval of a fraction in %, to follow its value.

    Args:
        low: Lower limit.
        high: Upper limit.

    Returns:
        The text.

    Example:
        >>> format_interval(0.911, 0.97)
        ' (91.1–97.0 %)'
    """
    return f" ({100 * low:.1f}–{100 * high:.1f} %)"


def format_number(value: float | None) -> str:
    """Return a number with four significant digits.

    Args:
        value: The number; None is missing.

    Returns:
        The text.

    Example:
        >>> format_number(1234.5678), format_number(None), format_number(math.inf)
        ('1235', '–', '∞')
    """
    return MISSING if value is None or math.isnan(value) else f"{value:.4g}".replace("inf", "∞")
