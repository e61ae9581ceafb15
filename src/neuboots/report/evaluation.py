"""Evaluation report: metrics, checks, tables and plots of predictions for labeled data.

The builders of `classification`, `regression` and `segmentation` fill one `EvaluationReport`; the terminal, the JSON
output and the HTML page are made from it. A check fails if a deviation is both statistically significant and larger
than a practical margin.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuboots.report.checks import Check, decide, wilson_interval
from neuboots.report.section import Section
from neuboots.report.tables import MISSING, Cell, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[["Axes"], None]

Z = 1.96  # standard errors of a 95 % interval
MARGIN = 0.03  # tolerated gap between confidence and accuracy, or between coverage and level
_OOD_QUANTILE = 0.99  # of the held-out rows have an OOD score below 1
_MAX_OOD_FRACTION = 0.02
_FRACTIONS = {
    *("error", "ece", "adaptive_ece", "macro_f1", "balanced_accuracy", "aurc", "accuracy", "confidence", "precision"),
    *("recall", "f1", "fraction", "level", "coverage", "mean_iou", "mean_dice", "iou", "dice", "accepted"),
}
OOD_LABEL = "OOD score (above 1: out of distribution)"


@dataclass(frozen=True)
class Reference:
    """What is known of a model from its training.

    Args:
        metrics: Metrics of the test split.
        num_test: Rows of the test split.
        num_held_out: Rows that the OOD score was calibrated on.
        target: Name of the target.
    """

    metrics: Mapping[str, Any]
    num_test: int
    num_held_out: int
    target: str


@dataclass(frozen=True)
class Topic:
    """One section of an evaluation report.

    Args:
        name: Title.
        question: What the section answers.
        tables: Tables.
        checks: Results of checks.
        plots: Names of its plots; unknown names are skipped.
        figsize: Size of each plot in inches.
        note: Remark.
    """

    name: str
    question: str
    tables: Sequence[Table] = ()
    checks: Sequence[Check | None] = ()
    plots: Sequence[str] = ()
    figsize: tuple[float, float] = (5.0, 4.2)
    note: str = ""


@dataclass(frozen=True, eq=False)
class EvaluationReport:
    """Metrics of a model on labeled data and the topics of its report.

    Args:
        count: Number of labeled rows or images.
        metrics: Every metric by name; None if undefined.
        baseline: Metrics of a constant prediction.
        details: Further results for JSON output.
        topics: Sections in order.
        plots: Returns functions that draw on a matplotlib Axes, by name.
    """

    count: int
    metrics: dict[str, Any]
    baseline: dict[str, Any]
    details: dict[str, Any]
    topics: list[Topic]
    plots: Callable[[], Mapping[str, Draw]]

    @property
    def checks(self) -> list[Check]:
        """All checks: failed ones first, then open ones."""
        checks = [check for topic in self.topics for check in topic.checks if check is not None]
        return sorted(checks, key=lambda check: (False, None, True).index(check.holds))

    def sections(self) -> list[Section]:
        """Return the sections with their plots as SVG."""
        from matplotlib.figure import Figure

        from neuboots.report.html import to_svg

        draw, sections = self.plots(), []
        for topic in self.topics:
            plots = {}
            for name in topic.plots:
                if name in draw:
                    figure = Figure(figsize=topic.figsize, layout="constrained")
                    draw[name](figure.add_subplot())
                    plots[name] = to_svg(figure, f"{topic.name}-{name}")
            checks = tuple(check for check in topic.checks if check is not None)
            section = Section(topic.name, topic.question, "", "", tuple(topic.tables), checks, plots, note=topic.note)
            sections.append(section)
        return sections


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
    cells = [tuple(_make_cell(column, row[column]) for column in columns) for row in rows]
    return Table(title, columns, tuple(cells), note=note, num_keys=num_keys)


def _make_cell(name: str, value: Any, more: str = "") -> Cell:
    if value is None:
        return Cell(MISSING)
    return Cell(value) if isinstance(value, str) else Cell(format_value(name, value) + more, float(value))


def metrics_table(
    title: str,
    labels: Mapping[str, str],
    metrics: Mapping[str, Any],
    baseline: Mapping[str, Any],
    training: Mapping[str, Any],
    intervals: Mapping[str, tuple[float, float]],
) -> Table:
    """Build a table of metrics beside those of a constant prediction and of the test split at training time.

    Args:
        title: Caption.
        labels: Label by name of the metric.
        metrics: Metrics of these rows; None is omitted.
        baseline: Metrics of a constant prediction.
        training: Metrics of the test split.
        intervals: 95 % intervals by name of the metric.

    Returns:
        The table.
    """
    names = [name for name in labels if metrics[name] is not None]
    others = {"constant prediction": baseline, "at training": training}
    others = {column: values for column, values in others.items() if any(values.get(n) is not None for n in names)}
    rows = []
    for name in names:
        interval = format_interval(*intervals[name]) if name in intervals else ""
        cells = [_make_cell(name, values.get(name)) for values in others.values()]
        rows.append((Cell(labels[name]), _make_cell(name, metrics[name], interval), *cells))
    return Table(title, ("metric", "here", *others), tuple(rows), num_keys=1)


def data_topic(num_rows: int, num_unlabeled: int, num_ood: int, count: int, num_held_out: int) -> Topic:
    """Build the section on the data themselves.

    Args:
        num_rows: Rows of the data.
        num_unlabeled: Rows without a label.
        num_ood: Rows of the sample that are out of distribution.
        count: Rows of the sample.
        num_held_out: Rows that the OOD score was calibrated on.

    Returns:
        The section.
    """
    numbers = {"rows": num_rows, "without a label, excluded": num_unlabeled, "out of distribution": num_ood}
    table = make_table("The rows.", [{"rows": name, "number": number} for name, number in numbers.items()])
    check = check_in_distribution(num_ood, count, num_held_out)
    return Topic("rows", "Are the rows from the distribution of the training data?", [table], [check], ["ood-score"])


def check_in_distribution(num_ood: int, count: int, num_held_out: int) -> Check:
    """Check that no more rows are out of distribution than expected.

    The score exceeds 1 above the r-th largest of m held-out rows, which a new row does with a probability distributed
    as Beta(r, m − r + 1); with few held-out rows many new rows may exceed it.

    Args:
        num_ood: Rows with a score above 1.
        count: Rows.
        num_held_out: Rows that the score was calibrated on.

    Returns:
        The check.

    Example:
        >>> check_in_distribution(30, 100, 1000).holds, check_in_distribution(10, 1000, 1000).holds
        (False, True)
        >>> check_in_distribution(20, 100, 9).holds
    """
    from scipy.stats import beta

    held_out = max(1, num_held_out)
    rank = held_out - math.ceil(_OOD_QUANTILE * (held_out - 1))  # as numpy's quantile with method="higher"
    limit = float(beta.ppf(0.975, rank, held_out - rank + 1))
    low, high = wilson_interval(num_ood / count, count)
    holds = decide(high < _MAX_OOD_FRACTION + MARGIN, low > max(_MAX_OOD_FRACTION, limit))
    expected = format_percent(rank / (held_out + 1))
    evidence = f"{format_percent(num_ood / count)} are out of distribution; {expected} are expected"
    return Check("the rows are from the distribution of the training data", holds, evidence)


def check_better_than_baseline(name: str, low: float, high: float, evidence: str, baseline: float) -> Check:
    """Check that an error in [low, high] is below that of a constant prediction.

    Args:
        name: Name of the error.
        low: Lower limit of its interval.
        high: Upper limit of its interval.
        evidence: The values in words.
        baseline: Error of a constant prediction.

    Returns:
        The check.
    """
    return Check(f"better than a constant prediction ({name})", decide(high < baseline, low > baseline), evidence)


def plot_clipped_histograms(ax: "Axes", groups: Mapping[str, Tensor], label: str) -> None:
    """Draw histograms from 0 to the 99.5 % quantile, as single rows may be far out.

    Args:
        ax: Axes to draw on.
        groups: Values by name; empty groups are skipped.
        label: Label of the axis.
    """
    from neuboots.report.plots import plot_histograms

    groups = {name: values for name, values in groups.items() if len(values)}
    top = float(torch.cat(list(groups.values())).double().quantile(0.995))
    plot_histograms(ax, groups, label=label, bottom=0.0, top=top if top > 0 else 1.0)


def thin_curve(*parts: Tensor, points: int = 400) -> list[Tensor]:
    """Return at most `points` points of a curve, including the last.

    Args:
        parts: Coordinates of the curve, (N,) each.
        points: Maximum number of points.

    Returns:
        The coordinates of the points.
    """
    index = torch.linspace(0, len(parts[0]) - 1, min(points, len(parts[0]))).round().long()
    return [part[index] for part in parts]


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun in the right number.

    Args:
        count: The count.
        noun: Singular noun.

    Returns:
        Text such as "2 rows".
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


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
