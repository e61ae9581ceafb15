"""Tables of results: what we measured, mean ± standard deviation over seeds, with the paper's figure beside it.

cell = mean_s m_s ± √(Σ_s (m_s − mean)² / (T − 1)),   over the T rows of a group
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal
from urllib.parse import quote

Row = Mapping[str, Any]
PaperValues = Mapping[Any, Mapping[str, str | float]]
MISSING = "–"
PAPER_COLUMN = "paper"  # above a column of the paper's own figures


@dataclass(frozen=True)
class MetricColumn:
    """A figure of the rows, times `scale` (100 for per cent), to so many digits after the point."""

    key: str
    title: str
    scale: float = 1.0
    digits: int = 2
    better: Literal["lower", "higher", ""] = ""

    def show(self, value: float) -> str:
        shown = self.scale * value
        return f"{shown:z.{self.digits}f}" if abs(shown) < 1e9 else f"{shown:.3g}"  # z: no -0.00


@dataclass(frozen=True)
class Cell:
    """What stands in a table, and the number to sort it by, if it is one; `best` of its column."""

    text: str
    value: float | None = None
    best: bool = False


@dataclass(frozen=True)
class Table:
    """Lines of cells; `links` names for each line the figure that belongs to it, if there is one."""

    title: str
    heads: tuple[str, ...]
    lines: tuple[tuple[Cell, ...], ...]
    links: tuple[str | None, ...] = ()
    note: str = ""
    keys: int = 0  # so many columns on the left say what a line is of

    def __post_init__(self) -> None:
        for line in self.lines:
            if len(line) != len(self.heads):
                raise ValueError(f"got a line of {len(line)} cells; expected {len(self.heads)}, one for each head")
        if self.links and len(self.links) != len(self.lines):
            raise ValueError(f"got {len(self.links)} links for {len(self.lines)} lines; expected one for each, or none")

    @property
    def text(self) -> str:
        """Plain text in columns; the best of a column has a star."""
        columns = range(len(self.heads))
        starred = [any(line[k].best for line in self.lines) for k in columns]
        marks = [["*" if cell.best else " " * starred[k] for k, cell in enumerate(line)] for line in self.lines]
        shown = [
            list(self.heads),
            *[
                [cell.text + mark for cell, mark in zip(*pair, strict=True)]
                for pair in zip(self.lines, marks, strict=True)
            ],
        ]
        widths = [max(len(row[k]) for row in shown) for k in columns]
        number = [all(line[k].value is not None or line[k].text == MISSING for line in self.lines) for k in columns]
        lines = [
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, number, strict=True)
            ).rstrip()
            for row in shown
        ]
        return "\n".join([self.title, *lines, *([self.note] if self.note else [])])

    @property
    def markdown(self) -> str:
        """A Markdown table; the best of a column is bold."""
        rows = [[f"**{cell.text}**" if cell.best else cell.text for cell in line] for line in self.lines]
        lines = [list(self.heads), ["---"] * len(self.heads), *rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"{self.title}\n\n{body}\n" + (f"\n{self.note}\n" if self.note else "")

    @property
    def html(self) -> str:
        """An HTML table whose cells carry the number to sort by; `links` are the ids of figures on the same page."""
        kinds = [self._kind(k) for k in range(len(self.heads))]
        links = self.links or (None,) * len(self.lines)
        rows = "".join(self._html_row(k, link, kinds) for k, link in enumerate(links))
        title, note = html.escape(self.title), f'<p class="note">{html.escape(self.note)}</p>' if self.note else ""
        return (
            f'<figure class="table"><figcaption>{title}</figcaption>'
            f'<div class="scroll" role="region" tabindex="0" aria-label="{title}"><table>'
            f"<thead><tr>{self._html_heads(kinds)}</tr></thead><tbody>{rows}</tbody></table></div>{note}</figure>"
        )

    def _kind(self, k: int) -> str:
        """The classes of a column: are there numbers in it, are they the paper's, does it name the lines?"""
        number = all(line[k].value is not None or line[k].text == MISSING for line in self.lines)
        of_paper = self.heads[k].startswith(PAPER_COLUMN)
        return " ".join(
            ["number"] * number + ["paper"] * of_paper + ["name"] * (self.keys > 0 and k == self._name_place)
        )

    @property
    def _name_place(self) -> int:
        """The column by which a reader knows a line: of those that say what it is of, the last that has words in it."""
        words = [k for k in range(self.keys) if any(line[k].value is None for line in self.lines)]
        return words[-1] if words else max(self.keys - 1, 0)

    def _html_heads(self, kinds: Sequence[str]) -> str:
        heads, ours = [], ""
        for head, kind in zip(self.heads, kinds, strict=True):
            if head.startswith(PAPER_COLUMN):  # to the ear, "paper" alone says nothing
                shown = f'<span class="unseen">{html.escape(ours)}: </span>{html.escape(head)}'
            else:
                ours, shown = head, html.escape(head)
            heads.append(f'<th scope="col"{_class(kind)}>{shown}</th>')
        return "".join(heads)

    def _html_row(self, number: int, link: str | None, kinds: Sequence[str]) -> str:
        line, cells = self.lines[number], []
        for k, (cell, kind) in enumerate(zip(line, kinds, strict=True)):
            tag, scope = ("th", ' scope="row"') if k < self.keys else ("td", "")
            shown = html.escape(cell.text)
            if link is not None and k == self._name_place:
                shown = f'<a href="#{quote(link)}">{shown}</a>'
            if cell.best:
                kind, shown = f"{kind} best".strip(), f"<strong>{shown}</strong>"
            cells.append(f"<{tag}{scope}{_class(kind)}{_sort_by(cell.value)}>{shown}</{tag}>")
        grouped = self.keys > 1 and len({each[0] for each in self.lines}) < len(self.lines)
        new_group = grouped and number > 0 and self.lines[number - 1][0] != line[0]
        figure = "" if link is None else f' data-figure="{html.escape(link)}"'
        return f"<tr{_class('group' if new_group else '')}{figure}>{''.join(cells)}</tr>"


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""


def _sort_by(value: float | None) -> str:
    """The number as JavaScript reads it; what is none sorts as text does."""
    if value is None or math.isnan(value):
        return ""
    number = repr(float(value)) if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
    return f' data-value="{number}"'


def tabulate(
    title: str,
    rows: Sequence[Row],
    *,
    by: Sequence[str],
    columns: Sequence[MetricColumn],
    paper: PaperValues | None = None,
    link: str | None = None,
    note: str = "",
) -> Table:
    """A line for each group of rows that agree in `by`: mean ± standard deviation of each column, the paper's beside.

    `paper` has for each group (a value of `by`, or a tuple of them) the paper's figures by the key of their column.
    `link` is the name of the group's figure, such as "reliability-{method}", with the values of `by` filled in. The
    best of a column is marked within the groups that agree in all of `by` but the last.

    >>> rows = [{"method": "plain", "seed": s, "error": 0.1 + s / 50} for s in (0, 1)]
    >>> print(
    ...     tabulate(
    ...         "Error.",
    ...         rows,
    ...         by=("method",),
    ...         columns=(MetricColumn("error", "error, %", 100),),
    ...         paper={"plain": {"error": "12.5"}},
    ...     ).text
    ... )
    Error.
    method      error, %  paper
    plain   11.00 ± 1.41   12.5
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in by), []).append(row)
    printed = {key if isinstance(key, tuple) else (key,): figures for key, figures in (paper or {}).items()}
    beside = {column.key: any(column.key in printed.get(key, {}) for key in groups) for column in columns}
    best = {column.key: _best(groups, column) for column in columns}
    heads, lines, links = list(by), [], []
    for column in columns:
        heads += [column.title, *([PAPER_COLUMN] if beside[column.key] else [])]
    for key, members in groups.items():
        line = [_plain(part) for part in key]
        for column in columns:
            line.append(
                _cell(
                    [row[column.key] for row in members if row.get(column.key) is not None],
                    column,
                    best=key in best[column.key],
                )
            )
            if beside[column.key]:
                line.append(_paper(printed.get(key, {}).get(column.key)))
        lines.append(tuple(line))
        links.append(link.format(**dict(zip(by, key, strict=True))) if link else None)
    return Table(title, tuple(heads), tuple(lines), tuple(links) if link else (), note, keys=len(by))


def _plain(part: Any) -> Cell:
    number = isinstance(part, int | float) and not isinstance(part, bool)
    return Cell(str(part), float(part) if number else None)


def _cell(values: Sequence[float], column: MetricColumn, *, best: bool) -> Cell:
    if not values:
        return Cell(MISSING)
    mean = fmean(values)
    spread = f" ± {column.show(stdev(values))}" if len(values) > 1 else ""
    return Cell(column.show(mean) + spread, column.scale * mean, best)


def _paper(shown: str | float | None) -> Cell:
    if shown is None:
        return Cell(MISSING)
    text = str(shown)
    try:
        return Cell(text, float(text.split("±")[0]))
    except ValueError:
        return Cell(text)


def _best(groups: Mapping[tuple[Any, ...], Sequence[Row]], column: MetricColumn) -> set[tuple[Any, ...]]:
    """The groups with the best figure among those that share all keys but the last; none where all are alike."""
    if not column.better:
        return set()
    families: dict[tuple[Any, ...], dict[tuple[Any, ...], float]] = {}
    for key, members in groups.items():
        values = [row[column.key] for row in members if row.get(column.key) is not None]
        if values:
            families.setdefault(key[:-1], {})[key] = fmean(values)
    choose = min if column.better == "lower" else max
    return {
        key
        for means in families.values()
        for key, mean in means.items()
        if mean == choose(means.values()) and len({*means.values()}) > 1
    }
