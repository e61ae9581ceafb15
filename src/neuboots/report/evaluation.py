"""Evaluation report: metrics, checks, tables and plots of predictions for labeled data.

The builders of `classification`, `regression` and `segmentation` fill one `EvaluationReport`; the terminal, the JSON
output and the HTML page are made from it. A check fails if a deviation is both statistically significant and larger
than a practical margin.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from neuboots.report.checks import Check, decide, wilson_interval
from neuboots.report.section import Section
from neuboots.report.tables import Cell, Table, format_interval, format_percent, make_cell, make_table

Z = 1.96  # standard errors of a 95 % interval
MARGIN = 0.03  # tolerated gap between confidence and accuracy, or between coverage and level
_OOD_QUANTILE = 0.99  # of the held-out rows have an OOD score below 1
_MAX_OOD_FRACTION = 0.02
_OOD_LABEL = "OOD score (above 1: out of distribution)"


@dataclass(frozen=True)
class Reference:
    """What is known of a model from its training, and of the data beside the labeled rows.

    Args:
        metrics: Metrics of the test split.
        num_test: Rows of the test split.
        num_held_out: Rows that the OOD score was calibrated on.
        target: Name of the target.
        num_unlabeled: Rows of the evaluated data that have no label.
    """

    metrics: Mapping[str, Any]
    num_test: int
    num_held_out: int
    target: str
    num_unlabeled: int = 0


@dataclass(frozen=True, eq=False)
class EvaluationReport:
    """Metrics of a model on labeled data and the topics of its report.

    Args:
        count: Number of labeled rows or images.
        metrics: Every metric by name; None if undefined.
        baseline: Metrics of a constant prediction.
        details: Further results for JSON output.
        topics: Sections in order; their plots are functions that return SVG text.
    """

    count: int
    metrics: dict[str, Any]
    baseline: dict[str, Any]
    details: dict[str, Any]
    topics: list[Section]

    @property
    def checks(self) -> list[Check]:
        """All checks: failed ones first, then open ones."""
        checks = [check for topic in self.topics for check in topic.checks]
        return sorted(checks, key=lambda check: (False, None, True).index(check.holds))

    def sections(self) -> list[Section]:
        """Return the sections with their plots as SVG."""
        return [
            replace(topic, plots={name: draw(f"{topic.name}-{name}") for name, draw in topic.plots.items()})
            for topic in self.topics
        ]


def make_plot(
    function: str, /, *args: Any, figsize: tuple[float, float] = (5.0, 4.2), **options: Any
) -> Callable[[str], str]:
    """Return a function that draws a plot; matplotlib is imported when it is called.

    Args:
        function: Name of a function of `neuboots.report.plots`.
        args: Its arguments after the Axes.
        figsize: Width and height in inches.
        options: Its options.

    Returns:
        A function of the name of the figure that returns SVG text.
    """

    def draw(name: str) -> str:
        from matplotlib.figure import Figure

        from neuboots.report import plots
        from neuboots.report.html import to_svg

        figure = Figure(figsize=figsize, layout="constrained")
        getattr(plots, function)(figure.add_subplot(), *args, **options)
        return to_svg(figure, name)

    return draw


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
        cells = [make_cell(name, values.get(name)) for values in others.values()]
        rows.append((Cell(labels[name]), make_cell(name, metrics[name], interval), *cells))
    return Table(title, ("metric", "here", *others), tuple(rows), num_keys=1)


def decisions_table(abstain: Tensor, name: str, errors: Mapping[bool, float | None]) -> Table:
    """Build a table of the rows that the model accepts and of those it abstains from.

    Args:
        abstain: Whether the model abstains: (N,).
        name: Name of the error.
        errors: Error of the rows with each value of `abstain`.

    Returns:
        The table.
    """
    counts = {"accepted": (~abstain).sum(), "abstained": abstain.sum()}
    rows = [
        {"rows": decision, "number": int(count), "fraction": float(count) / len(abstain), name: error}
        for (decision, count), error in zip(counts.items(), (errors[False], errors[True]), strict=True)
    ]
    return make_table("Rows by the decision of the model.", rows)


def data_topic(scores: Mapping[str, Tensor], count: int, reference: Reference) -> Section:
    """Build the section on the data themselves.

    Args:
        scores: OOD scores of groups of rows.
        count: Number of labeled rows.
        reference: Results at training time.

    Returns:
        The section.
    """
    values = torch.cat(list(scores.values()))
    num_ood, unlabeled = int((values > 1).sum()), reference.num_unlabeled
    numbers = {"rows": count + unlabeled, "without a label, excluded": unlabeled, "out of distribution": num_ood}
    return Section(
        "rows",
        "Are the rows from the distribution of the training data?",
        tables=(make_table("The rows.", [{"rows": name, "number": number} for name, number in numbers.items()]),),
        checks=(check_in_distribution(num_ood, len(values), reference.num_held_out),),
        plots={"ood-score": make_plot("plot_clipped_histograms", scores, _OOD_LABEL)},
    )


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


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun in the right number.

    Args:
        count: The count.
        noun: Singular noun.

    Returns:
        Text such as "2 rows".
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
