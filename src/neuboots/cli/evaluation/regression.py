"""What predicted numbers and their intervals are worth on labelled rows.

    r = y − μ,   RMSE² = mean r²,   R² = 1 − mean r² / var y,   PIT = Φ(r / σ), uniform where σ is right

Sums and counts are of all rows; figures of ranks, and of groups of rows by their σ, are of at most 500,000, drawn
fairly. Intervals at levels other than the one asked for cost a pass each, and are asked for the first rows only.

The chapters of a regression: answers, intervals, abstaining, rows.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from neuboots.app import Model, ModelCard, PredictionTable
from neuboots.cli.evaluation import checks
from neuboots.cli.evaluation.checks import between, percent, short
from neuboots.cli.evaluation.sections import (
    BARS,
    UNUSUAL,
    Draw,
    LabeledBatch,
    ReservoirSample,
    RowCounts,
    Show,
    cell,
    chapter,
    counted,
    figures_table,
    histograms,
    risk_drawing,
    rows_chapter,
    select_rows,
    thinned,
)
from neuboots.metrics import (
    CalibrationCurve,
    IntervalMetrics,
    MetricState,
    RegressionMetrics,
    RiskCoverageCurve,
    RunningMean,
)
from neuboots.metrics._base import run_ends
from neuboots.report.checks import Check, wilson_interval
from neuboots.report.section import Section
from neuboots.report.tables import Cell, Table

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
AT_LEVELS = 20_000  # rows whose intervals are asked for at all of them
PIT_BINS = 20
GROUPS, IN_GROUP = 10, 30  # groups of rows by their σ at most, and rows in each at least


@dataclass(frozen=True, eq=False)
class NumberTally(MetricState):
    """Sums over rows. `origin` is any number near the targets, lest their squares lose all digits."""

    normal: RegressionMetrics
    intervals: IntervalMetrics
    misses: RunningMean  # |r|
    signed: RunningMean  # −r
    fourth: RunningMean  # r⁴
    targets: RunningMean  # y − origin
    squared_targets: RunningMean  # (y − origin)²
    pit: Tensor  # (PIT_BINS,)
    answered: RunningMean  # r², of the rows that are answered
    abstained: RunningMean  # r², of the others
    held: RunningMean  # whether the interval holds y, of the rows that are answered
    unusual: RunningMean
    origin: float

    @classmethod
    def of(cls, answers: PredictionTable, y: Tensor, *, level: float, origin: float) -> Self:
        """Of the answers to N rows of numbers y (N,)."""
        mean, std, low, high = (_column(answers, name) for name in ("prediction", "std", "low", "high"))
        abstain, r, at = _column(answers, "abstain"), y - mean, y - origin
        pit = torch.special.ndtr(torch.where(r == 0, 0.0, r / std))
        holds = (low <= y) & (y <= high)
        return cls(
            normal=RegressionMetrics.from_batch(mean, std, y, level=level),
            intervals=IntervalMetrics.from_batch(low, high, y, level=level),
            misses=RunningMean.from_batch(r.abs()),
            signed=RunningMean.from_batch(-r),
            fourth=RunningMean.from_batch(r**4),
            targets=RunningMean.from_batch(at),
            squared_targets=RunningMean.from_batch(at.square()),
            pit=torch.bincount((pit * PIT_BINS).long().clamp_max(PIT_BINS - 1), minlength=PIT_BINS),
            answered=RunningMean.from_batch(r[~abstain].square()),
            abstained=RunningMean.from_batch(r[abstain].square()),
            held=RunningMean.from_batch(holds[~abstain]),
            unusual=RunningMean.from_batch(_column(answers, "ood_score") > 1),
            origin=origin,
        )


@dataclass(frozen=True, eq=False)
class NumberEvaluation:
    """What `measure_numbers` found; everything is in the user's units."""

    tally: NumberTally
    sample: dict[str, Tensor]
    by_level: dict[float, IntervalMetrics]
    level: float
    card: ModelCard
    seen: RowCounts

    @property
    def count(self) -> int:
        return self.tally.normal.count

    @property
    def variance(self) -> float:
        """Of the targets."""
        middle = float(self.tally.targets.value)
        return max(0.0, float(self.tally.squared_targets.value) - middle**2)

    @property
    def constant(self) -> dict[str, float | None]:
        """What the mean and the standard deviation of these targets get, the same for each row."""
        std = math.sqrt(self.variance)
        nll = math.log(std) + 0.5 * math.log(2 * math.pi * math.e) if std > 0 else None
        return {"rmse": std, "r2": 0.0, "bias": 0.0, "nll": nll}

    @cached_property
    def correlation(self) -> float | None:
        """Spearman's, of σ and |r|; None where either is all alike."""
        std, size = self.sample["std"], (self.sample["y"] - self.sample["mean"]).abs()
        if len(std) < 3 or float(std.max() - std.min()) <= 1e-6 * float(std.max()) or size.max() == size.min():
            return None
        return float(torch.corrcoef(torch.stack([_ranks(std), _ranks(size)]))[0, 1])

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Every figure by name; None where there is nothing to find it from."""
        tally, normal, intervals = self.tally, self.tally.normal, self.tally.intervals
        squares = float(normal.squared_errors.value)
        certain = normal.count > int(normal.log_losses.count)  # of a σ of 0 there is no likelihood
        low, high = wilson_interval(float(intervals.coverage), self.count)
        return {
            "rmse": math.sqrt(squares),
            "mae": float(tally.misses.value),
            "r2": 1 - squares / self.variance if self.variance > 0 else None,
            "bias": float(tally.signed.value),
            "nll": None if certain else float(normal.nll),
            "crps": float(normal.crps),
            "level": self.level,
            "coverage": float(intervals.coverage),
            "coverage_low": low,
            "coverage_high": high,
            "mean_width": float(intervals.mean_width),
            "interval_score": float(intervals.interval_score),
            "miscalibration_area": float(normal.miscalibration_area),
            "sharpness": float(normal.sharpness),
            "std_error_correlation": self.correlation,
            "answered": int(tally.answered.count) / self.count,
            "rmse_answered": _root(tally.answered),
            "rmse_abstained": _root(tally.abstained),
            "coverage_answered": float(tally.held.value) if int(tally.held.count) else None,
            "unusual": float(tally.unusual.value),
        }

    @property
    def levels(self) -> list[dict[str, Any]]:
        """Coverage and mean width at each of some levels."""
        lines = []
        for level, found in sorted(self.by_level.items()):
            low, high = wilson_interval(float(found.coverage), found.count)
            shares = {"level": level, "coverage": float(found.coverage), "low": low, "high": high}
            lines.append(shares | {"mean_width": float(found.mean_width), "rows": found.count})
        return lines

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Rows by their σ, from the surest: how large errors are there, and how many intervals hold."""
        std = self.sample["std"]
        count = max(1, min(GROUPS, len(std) // IN_GROUP))
        lines = []
        for rows in std.argsort(stable=True).tensor_split(count):
            y, mean, low, high = (self.sample[name][rows] for name in ("y", "mean", "low", "high"))
            held = float(((low <= y) & (y <= high)).double().mean())
            lines.append(
                {
                    "from": float(std[rows].min()),
                    "to": float(std[rows].max()),
                    "rows": len(rows),
                    "std": float(std[rows].square().mean().sqrt()),
                    "rmse": float((y - mean).square().mean().sqrt()),
                    **dict(zip(("coverage", "low", "high"), (held, *wilson_interval(held, len(rows))), strict=True)),
                }
            )
        return lines

    @cached_property
    def risk_coverage(self) -> RiskCoverageCurve:
        """Mean |r| among the surest rows, by their share."""
        order = self.sample["std"].argsort(stable=True)
        size = (self.sample["y"] - self.sample["mean"]).abs()[order]
        kept = torch.arange(1, len(size) + 1, dtype=torch.float64)
        return RiskCoverageCurve(kept / len(size), size.cumsum(0) / kept, -self.sample["std"][order])

    @property
    def details(self) -> dict[str, Any]:
        """What JSON has besides the figures."""
        return {"levels": self.levels, "groups": self.groups, "pit": self.tally.pit.tolist()}

    @property
    def checks(self) -> list[Check]:
        """The worst first."""
        return checks.worst_first([*self.of_answers, *self.of_intervals, *self.of_abstaining, *self.of_rows])

    @property
    def of_answers(self) -> list[Check]:
        mean, before = float(self.tally.normal.squared_errors.value), self.card.figures.get("rmse")
        std = math.sqrt(max(0.0, float(self.tally.fourth.value) - mean**2))
        half = checks.Z * std / math.sqrt(self.count) if self.count > 1 else math.inf
        drift = checks.no_worse_squares(mean, std, self.count, before, self.card.rows.get("test", 0))
        found = f"RMSE {checks.short(math.sqrt(mean))} against {checks.short(self.constant['rmse'])} of their mean"
        better = checks.better_than_constant("RMSE", mean - half, mean + half, found, self.variance)
        return [*([drift] if drift else []), better]

    @property
    def of_intervals(self) -> list[Check]:
        return [checks.covers(float(self.tally.intervals.coverage), self.level, self.count)]

    @property
    def of_abstaining(self) -> list[Check]:
        return [checks.follows(self.correlation, len(self.sample["std"]))]

    @property
    def of_rows(self) -> list[Check]:
        return [checks.usual_rows(int(self.tally.unusual.total), self.count, self.card.rows.get("held out", 0))]


def measure_numbers(
    parts: Iterable[LabeledBatch], model: Model, seen: RowCounts, *, level: float, num_samples: int
) -> NumberEvaluation:
    """All figures of a stream of answers to labelled rows."""
    tally: NumberTally | int = 0
    by_level: dict[float, IntervalMetrics] = {}
    sample, origin, asked = ReservoirSample(), None, 0
    for part in parts:
        answers, y = part.answers, part.y.double().flatten()
        origin = float(y[0]) if origin is None else origin
        tally = tally + NumberTally.of(answers, y, level=level, origin=origin)
        if asked < AT_LEVELS:
            asked += len(y)
            for other in {*LEVELS, level}:
                found = answers
                if other != level:
                    with warnings.catch_warnings():  # of few held-out rows, which is the model's own affair
                        warnings.simplefilter("ignore", UserWarning)
                        found = select_rows(model.predict(part.chunk, num_samples=num_samples, level=other), part.known)
                held = IntervalMetrics.from_batch(_column(found, "low"), _column(found, "high"), y, level=other)
                by_level[other] = by_level[other] + held if other in by_level else held
        names = {"mean": "prediction", "std": "std", "low": "low", "high": "high", "ood_score": "ood_score"}
        sample.add(y=y, **{ours: _column(answers, theirs) for ours, theirs in names.items()})
    assert isinstance(tally, NumberTally), "there is at least one labelled row"
    return NumberEvaluation(tally, sample.columns, by_level, level, model.card, seen)


def _column(answers: PredictionTable, name: str) -> Tensor:
    column = torch.from_numpy(answers.columns[name])
    return column if column.dtype == torch.bool else column.double()


def _root(squares: RunningMean) -> float | None:
    return math.sqrt(float(squares.value)) if int(squares.count) else None


def _ranks(values: Tensor) -> Tensor:
    """From 0 on, equals sharing the mean of theirs: (N,).

    >>> _ranks(torch.tensor([0.3, 0.1, 0.3])).tolist()
    [1.5, 0.0, 1.5]
    """
    ordered, order = values.sort(stable=True)
    ends = run_ends(ordered)  # (K,)
    counts = ends.diff(prepend=ends.new_zeros(1))
    middle = ends.double() - (counts.double() + 1) / 2
    return torch.empty(len(values), dtype=torch.float64).scatter(0, order, middle.repeat_interleave(counts))


DOTS = 1_000  # rows of a diagram that draws each


def regression_chapters(found: NumberEvaluation, *, figures: bool = True) -> list[Section]:
    """Of a regression."""
    drawn = _number_drawings(found) if figures else {}
    return [
        chapter(
            "answers",
            "How far off is it?",
            tables=[number_figures(found)],
            checks=found.of_answers,
            drawings={name: drawn[name] for name in ("predicted-against-true",) if name in drawn},
        ),
        chapter(
            "intervals",
            "Do its intervals hold the truth as often as they say, for the rows it is sure of as for the others?",
            tables=[levels(found), groups(found)],
            checks=found.of_intervals,
            drawings={name: drawn[name] for name in ("coverage-by-level", "where-the-truth-falls") if name in drawn},
        ),
        chapter(
            "abstaining",
            "Does it know when to keep quiet? Its rule abstains where an interval is too wide, and where a row is "
            "unusual.",
            tables=[number_abstaining(found)],
            checks=found.of_abstaining,
            drawings={name: drawn[name] for name in ("error-by-coverage", "error-by-spread") if name in drawn},
        ),
        rows_chapter(found, drawn),
    ]


def number_summary(found: NumberEvaluation) -> list[Table]:
    """For a terminal."""
    return [number_figures(found), levels(found), groups(found), number_abstaining(found)]


def number_figures(found: NumberEvaluation) -> Table:
    """The figures of all rows, beside those of a constant guess and of the test rows at training time."""
    figures = found.figures
    shown: list[tuple[str, str, Show]] = [
        ("RMSE", "rmse", short),
        ("mean absolute error", "mae", short),
        ("R²", "r2", short),
        ("bias", "bias", short),
        ("log loss, nats", "nll", short),
        ("CRPS", "crps", short),
        (f"coverage of {100 * found.level:g} %", "coverage", percent),
        ("mean width", "mean_width", short),
        ("interval score", "interval_score", short),
    ]
    interval = {"coverage": between(figures["coverage_low"], figures["coverage_high"])}
    before = found.card.figures
    if before.get("level", found.level) != found.level:  # those of other intervals say nothing here
        before = before | dict.fromkeys(("coverage", "mean_width", "interval_score"))
    title = f"{counted(found.count, 'row')}, in the units of {found.card.target}."
    return figures_table(title, shown, figures, found.constant, before, interval)


def levels(found: NumberEvaluation) -> Table:
    """Coverage and width by level."""
    lines = tuple(
        (
            Cell(f"{100 * line['level']:g} %", line["level"]),
            cell(line["coverage"], percent),
            Cell(between(line["low"], line["high"])[2:-1], line["low"]),
            cell(line["mean_width"], short),
        )
        for line in found.levels
    )
    rows = found.levels[0]["rows"]
    note = f"Of the first {rows:,} rows." if rows < found.count else ""
    heads = ("level", "coverage", "95 % interval", "mean width")
    return Table("Intervals at several levels.", heads, lines, note=note, num_keys=1)


def groups(found: NumberEvaluation) -> Table:
    """Rows by how sure it is of them."""
    lines = tuple(
        (
            Cell(f"{short(line['from'])} to {short(line['to'])}", line["from"]),
            Cell(f"{line['rows']:,}", line["rows"]),
            cell(line["rmse"], short),
            cell(line["coverage"], percent),
            Cell(between(line["low"], line["high"])[2:-1], line["low"]),
        )
        for line in found.groups
    )
    heads = ("standard deviation", "rows", "RMSE", "coverage", "95 % interval")
    return Table("Rows by their predicted standard deviation, the surest first.", heads, lines, num_keys=1)


def number_abstaining(found: NumberEvaluation) -> Table:
    """How many rows the rule answers, and how far off those are."""
    figures, lines = found.figures, []
    sides = (("answered", found.tally.answered), ("abstained", found.tally.abstained))
    for name, squares in sides:
        count = int(squares.count)
        title = name if name == "answered" else "abstained from"
        lines.append(
            (
                Cell(title),
                Cell(f"{count:,}", count),
                cell(count / found.count, percent),
                cell(figures[f"rmse_{name}"], short),
            )
        )
    return Table(
        "The model's own rule: answer, or abstain.", ("rows", "number", "share", "RMSE"), tuple(lines), num_keys=1
    )


def _number_drawings(found: NumberEvaluation) -> dict[str, Draw]:
    from neuboots.report import plots as figures

    dots = {name: column[:DOTS] for name, column in found.sample.items()}
    at = torch.tensor([line["level"] for line in found.levels], dtype=torch.float64)
    inside = torch.tensor([line["coverage"] for line in found.levels], dtype=torch.float64)
    curves = {
        "its intervals": CalibrationCurve(at, inside),
        "a normal law with its std": found.tally.normal.calibration_curve,
    }
    curve = thinned(found.risk_coverage)
    spread, error = ([line[name] for line in found.groups] for name in ("std", "rmse"))
    return {
        "predicted-against-true": lambda ax: figures.plot_predictions(
            ax, dots["y"], dots["mean"], dots["low"], dots["high"], name="the model", level=found.level
        ),
        "coverage-by-level": lambda ax: figures.plot_calibration_curve(ax, curves),
        "where-the-truth-falls": lambda ax: figures.plot_pit_histogram(
            ax, found.tally.pit, name="the model", label="place of the truth in N(prediction, std²)"
        ),
        "error-by-coverage": lambda ax: risk_drawing(
            ax, curve, found.figures["answered"], None, label="mean absolute error"
        ),
        "error-by-spread": lambda ax: figures.plot_spread_skill(ax, spread, error, name="the model, by groups"),
        "unusual-rows": histograms({"rows": found.sample["ood_score"][:BARS]}, UNUSUAL),
    }
