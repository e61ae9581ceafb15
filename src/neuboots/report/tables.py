"""Result tables: mean ± standard deviation over seeds, with the paper's values beside them.

cell = mean_s m_s ± √(Σ_s (m_s − mean)² / (T − 1)),   over the T rows of a group
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

PaperValues = Mapping[Any, Mapping[str, str | float]]
MISSING = "–"
PAPER_COLUMN = "paper"  # header of a column of the paper's values


@dataclass(frozen=True)
class MetricColumn:
    """A metric as a column of a table.

    Args:
        key: Name of the metric in the rows.
        title: Header of the column.
        scale: Factor, such as 100 for %.
        digits: Digits after the decimal point.
        better: Which values are better; the best is marked.
    """

    key: str
    title: str
    scale: float = 1.0
    digits: int = 2
    better: Literal["lower", "higher", ""] = ""

    def format(self, value: float) -> str:
        """Return the scaled value as text."""
        scaled = self.scale * value
        return f"{scaled:z.{self.digits}f}" if abs(scaled) < 1e9 else f"{scaled:.3g}"  # z: no -0.00


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


def tabulate(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    by: Sequence[str],
    columns: Sequence[MetricColumn],
    paper: PaperValues | None = None,
    link: str | None = None,
    note: str = "",
) -> Table:
    """Aggregate rows into a table of mean ± standard deviation.

    The best value of a column is marked within the groups that agree in all of `by` but the last.

    Args:
        title: Caption.
        rows: Measurements.
        by: Keys; rows that agree in them form a group, which is a row of the table.
        columns: Metrics.
        paper: The paper's values by group (a value of `by`, or a tuple of them) and key of the metric.
        link: Name of the group's plot, such as "reliability-{method}", formatted with the values of `by`.
        note: Remark below the table.

    Returns:
        The table.

    Example:
        >>> rows = [{"method": "mlp", "seed": s, "error": 0.1 + s / 50} for s in (0, 1)]
        >>> error = MetricColumn("error", "error, %", 100)
        >>> print(tabulate("Error.", rows, by=("method",), columns=(error,), paper={"mlp": {"error": "12.5"}}).text)
        Error.
        method      error, %  paper
        mlp     11.00 ± 1.41   12.5
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in by), []).append(row)
    printed = {key if isinstance(key, tuple) else (key,): values for key, values in (paper or {}).items()}
    in_paper = {column.key: any(column.key in printed.get(key, {}) for key in groups) for column in columns}
    best = {column.key: _best_groups(groups, column) for column in columns}
    headers, lines, links = list(by), [], []
    for column in columns:
        headers += [column.title, *([PAPER_COLUMN] if in_paper[column.key] else [])]
    for key, members in groups.items():
        line = [_key_cell(part) for part in key]
        for column in columns:
            line.append(_metric_cell(_values(members, column), column, best=key in best[column.key]))
            if in_paper[column.key]:
                line.append(_paper_cell(printed.get(key, {}).get(column.key)))
        lines.append(tuple(line))
        links.append(link.format(**dict(zip(by, key, strict=True))) if link else None)
    return Table(title, tuple(headers), tuple(lines), tuple(links) if link else (), note, num_keys=len(by))


def _values(rows: Sequence[Mapping[str, Any]], column: MetricColumn) -> list[float]:
    return [row[column.key] for row in rows if row.get(column.key) is not None]


def _key_cell(part: Any) -> Cell:
    is_number = isinstance(part, int | float) and not isinstance(part, bool)
    return Cell(str(part), float(part) if is_number else None)


def _metric_cell(values: Sequence[float], column: MetricColumn, *, best: bool) -> Cell:
    if not values:
        return Cell(MISSING)
    mean = fmean(values)
    spread = f" ± {column.format(stdev(values))}" if len(values) > 1 else ""
    return Cell(column.format(mean) + spread, column.scale * mean, best)


def _paper_cell(printed: str | float | None) -> Cell:
    if printed is None:
        return Cell(MISSING)
    text = str(printed)
    try:
        return Cell(text, float(text.split("±")[0]))
    except ValueError:
        return Cell(text)


def _best_groups(
    groups: Mapping[tuple[Any, ...], Sequence[Mapping[str, Any]]], column: MetricColumn
) -> set[tuple[Any, ...]]:
    """Return the best group among those that share all keys but the last; none where all are equal."""
    if not column.better:
        return set()
    families: dict[tuple[Any, ...], dict[tuple[Any, ...], float]] = {}
    for key, members in groups.items():
        if values := _values(members, column):
            families.setdefault(key[:-1], {})[key] = fmean(values)
    choose = min if column.better == "lower" else max
    return {
        key
        for means in families.values()
        for key, mean in means.items()
        if mean == choose(means.values()) and len({*means.values()}) > 1
    }
