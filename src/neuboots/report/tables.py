"""Tables of results as plain text, Markdown and HTML."""

from dataclasses import dataclass

MISSING = "–"
PAPER_COLUMN = "paper"  # header of a column of the paper's values


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

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"got a row of {len(row)} cells; expected {len(self.columns)}, one per column")
        if self.links and len(self.links) != len(self.rows):
            raise ValueError(f"got {len(self.links)} links for {len(self.rows)} rows; expected one per row, or none")

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
        rows = [[f"**{cell.text}**" if cell.best else cell.text for cell in row] for row in self.rows]
        lines = [list(self.columns), ["---"] * len(self.columns), *rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
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
