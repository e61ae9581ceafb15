"""Result tables of studies: mean ± standard deviation over seeds, with the paper's values beside them.

cell = mean_s m_s ± √(Σ_s (m_s − mean)² / (T − 1)),   over the T rows of a group
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from neuboots.report.tables import MISSING, PAPER_COLUMN, Cell, Table

PaperValues = Mapping[Any, Mapping[str, str | float]]


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
