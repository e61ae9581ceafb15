"""Plots: each function draws on a matplotlib Axes that the caller made, so that no display is needed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter
from torch import Tensor

from neuboots._validation import ArgumentError, escape_text
from neuboots.evaluation._parallel import student_t_interval
from neuboots.metrics import CalibrationCurve, ReliabilityCurve, RiskCoverageCurve
from neuboots.report.checks import wilson_interval
from neuboots.serialization import atomic_file

GREY, BLUE, GREEN, ORANGE, PURPLE = "#7a7a7a", "#0072b2", "#009e73", "#d55e00", "#b5669a"
"""Colors of Okabe and Ito, which color-blind readers can distinguish."""
COLORS, MARKERS = (GREY, BLUE, GREEN, ORANGE, PURPLE), "osv^DPX"
Array = np.ndarray[Any, Any]
_MAX_CURVE_POINTS = 400
_MAX_HISTOGRAM_VALUES = 5_000


def plot_reliability(ax: Axes, curves: Mapping[str, ReliabilityCurve]) -> None:
    """Plot accuracy against confidence in bins, with Wilson's 95 % intervals.

    Args:
        ax: Axes to draw on.
        curves: Reliability curves by name.
    """
    ax.axline((0, 0), slope=1, color="black", lw=1, ls=":", label="perfect")
    for k, (name, curve, color, _) in enumerate(_styled(curves)):
        used = curve.count > 0
        x, y, n = curve.confidence[used], curve.accuracy[used], curve.count[used]
        low, high = zip(*map(wilson_interval, y.tolist(), n.tolist()), strict=True)
        x = x + 0.012 * (k - (len(curves) - 1) / 2)  # so that bars do not overlap
        ax.vlines(x.tolist(), low, high, color=color, lw=2, alpha=0.35)
        ax.plot(x.tolist(), y.tolist(), color=color, lw=1, marker="o", ms=6, label=name)
    bins = max(len(curve.count) for curve in curves.values())
    ax.set(xlabel=f"confidence ({bins} bins)", ylabel="accuracy", xlim=(0, 1.03), ylim=(-0.03, 1.03))
    style_axes(ax, handlelength=1, borderaxespad=0.2)


def plot_histograms(
    ax: Axes,
    groups: Mapping[str, Tensor],
    *,
    label: str,
    bottom: float | None = None,
    top: float | None = None,
    bins: int = 30,
) -> None:
    """Plot the fraction of each group in equal bins, with dashed lines at the means.

    Args:
        ax: Axes to draw on.
        groups: Values by name.
        label: Label of the axis.
        bottom: Lower limit; None for the smallest value.
        top: Upper limit; None for the largest value. The legend counts values outside the limits.
        bins: Number of bins.
    """
    arrays = {name: _to_array(name, values.flatten()) for name, values in groups.items()}
    everything = np.concatenate([[], *arrays.values()])
    low = everything.min(initial=math.inf) if bottom is None else bottom
    high = everything.max(initial=-math.inf) if top is None else top
    if low == high and (bottom is None or top is None):  # all values are equal
        low, high = low - 0.5 * (bottom is None), high + 0.5 * (top is None)
    if not low < high:
        raise ArgumentError("bottom", low, f"a number below top={high:g}")
    slack = 1e-5 * (high - low)  # rounding may move a value beyond the last edge
    for name, values, color, _ in _styled(arrays, (GREEN, ORANGE, PURPLE, GREY)):
        inside = values[(low - slack <= values) & (values <= high + slack)].clip(low, high)
        outside = f", of which {len(values) - len(inside):,} outside" if len(inside) < len(values) else ""
        weights = np.full(len(inside), 1 / len(values))
        title = f"{name} ({len(values):,}{outside})"
        ax.hist(inside, bins, range=(low, high), weights=weights, color=color, alpha=0.55, label=title)
        ax.axvline(values.mean(), color=color, lw=2, ls="--", label=f"mean {values.mean():.3g}")
    smallest = 0.7 / max(map(len, arrays.values()))
    ax.set(xlabel=label, ylabel="fraction of the group", yscale="log", xlim=(low, high), ylim=(smallest, 1.5))
    ax.yaxis.set_major_formatter(lambda fraction, _: f"{100 * fraction:g} %")
    ax.yaxis.set_minor_formatter(NullFormatter())
    style_axes(ax, loc="upper right")


def plot_clipped_histograms(ax: Axes, groups: Mapping[str, Tensor], label: str) -> None:
    """Plot histograms from 0 to the 99.5 % quantile, as single values may be far out.

    Args:
        ax: Axes to draw on.
        groups: Values by name, of which the first 5,000 are drawn; empty groups are skipped.
        label: Label of the axis.
    """
    groups = {name: values[:_MAX_HISTOGRAM_VALUES] for name, values in groups.items() if len(values)}
    top = float(torch.cat(list(groups.values())).double().quantile(0.995))
    plot_histograms(ax, groups, label=label, bottom=0.0, top=top if top > 0 else 1.0)


def plot_regression_band(
    ax: Axes,
    x: Tensor,
    mean: Tensor,
    low: Tensor,
    high: Tensor,
    *,
    label: str,
    truth: Tensor | None = None,
    points: tuple[Tensor, Tensor] | None = None,
    color: str = BLUE,
    xlabel: str = "x",
    ylabel: str = "y",
) -> None:
    """Plot mean and band of a regression function of one input.

    Args:
        ax: Axes to draw on.
        x: Inputs (N,) or (N, 1).
        mean: Mean of the replicates.
        low: Lower limit of the band.
        high: Upper limit of the band.
        label: Name of the band.
        truth: True function values, if known.
        points: Inputs and targets of the data, if they are to be shown.
        color: Color of the band.
        xlabel: Label of the x axis with its unit.
        ylabel: Label of the y axis with its unit.
    """
    columns = {"x": x, "mean": mean, "low": low, "high": high} | ({} if truth is None else {"truth": truth})
    place, center, lower, upper, *true = _to_arrays(columns, sort=True)
    if points is not None:
        ax.plot(*_to_arrays({"x": points[0], "y": points[1]}), ".", color=GREY, ms=3, alpha=0.5, label="data")
    if place[0] == place[-1]:  # a single place has a band without width
        ax.vlines(place, lower, upper, color=color, alpha=0.25, lw=12, label=label)
    else:
        ax.fill_between(place, lower, upper, color=color, alpha=0.25, lw=0, label=label)
        ax.set_xlim(place[0], place[-1])
    _plot_line(ax, place, center, color, "mean of the replicates")
    for values in true:
        _plot_line(ax, place, values, "black", "truth", lw=1.2, ls="--")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    style_axes(ax)


def plot_coverage(
    ax: Axes,
    x: Tensor,
    covered: Mapping[str, Tensor],
    *,
    level: float,
    num_sets: int,
    xlabel: str = "x",
    ylabel: str = "coverage over data sets",
) -> None:
    """Plot the fraction of data sets whose band covers f(x), with the range that chance allows.

    Args:
        ax: Axes to draw on.
        x: Inputs (N,).
        covered: Coverage at each input by name, (N,) each.
        level: Nominal level.
        num_sets: Number of data sets.
        xlabel: Label of the x axis.
        ylabel: Label of the y axis.
    """
    from scipy.stats import binom

    low, high = (float(binom.ppf(q, num_sets, level)) / num_sets for q in (0.025, 0.975))
    ax.axhspan(low, high, color=GREY, alpha=0.15, lw=0, label=f"chance for {num_sets} data sets at {level:.0%}")
    ax.axhline(level, color="black", lw=1, ls=":")
    for name, coverage, color, _ in _styled(covered, (BLUE, ORANGE, GREEN, PURPLE)):
        place, values = _to_arrays({"x": x, name: coverage}, sort=True)
        _plot_line(ax, place, values, color, f"{name} (mean {values.mean():.2f})")
    ax.set(xlabel=xlabel, ylabel=ylabel, ylim=(-0.03, 1.03))
    style_axes(ax, loc="lower center")


def plot_calibration_curve(ax: Axes, curves: Mapping[str, CalibrationCurve]) -> None:
    """Plot the fraction of targets in the central interval of each level against the level.

    Args:
        ax: Axes to draw on.
        curves: Calibration curves by name.
    """
    ax.axline((0, 0), slope=1, color="black", lw=1, ls=":", label="perfect")
    for name, curve, color, _ in _styled(curves, (BLUE, ORANGE, GREEN, PURPLE, GREY)):
        level, observed = _to_arrays({"levels": curve.expected, name: curve.observed})
        _plot_line(ax, level, observed, color, name)
    ax.set(xlabel="level of the interval", ylabel="fraction of targets inside", xlim=(0, 1), ylim=(0, 1))
    style_axes(ax)


def plot_risk_coverage(
    ax: Axes,
    curves: Mapping[str, RiskCoverageCurve],
    *,
    mark: tuple[float, float | None] | None = None,
    label: str = "error",
) -> None:
    """Plot the error of accepted inputs against their fraction, most confident first.

    Args:
        ax: Axes to draw on.
        curves: Risk-coverage curves by name; of long ones, 400 points are drawn.
        mark: Coverage and risk of the model's own rule, if it accepts any input.
        label: Name of the error.
    """
    for name, curve, color, _ in _styled(curves):
        coverage, risk = _to_arrays({"coverage": curve.coverage, name: curve.risk})
        points = np.linspace(0, len(risk) - 1, min(_MAX_CURVE_POINTS, len(risk))).round().astype(int)
        _plot_line(ax, coverage[points], risk[points], color, name, drawstyle="steps-post")
    if mark is not None and mark[1] is not None:
        ax.plot(mark[0], mark[1], "D", color=ORANGE, ms=7, label="the model's rule")
    ax.set(xlabel="coverage (fraction of inputs accepted)", ylabel=f"risk ({label} among them)", xlim=(0, 1.02))
    ax.set_ylim(bottom=0)
    style_axes(ax, loc="upper left")


def plot_learning_curves(
    ax: Axes, curves: Mapping[str, tuple[Sequence[int], Tensor]], *, label: str = "test accuracy"
) -> None:
    """Plot a metric against the size of the labeled set: mean and 95 % interval over trials.

    Args:
        ax: Axes to draw on.
        curves: Sizes and values (trials, rounds) by name.
        label: Label of the metric.
    """
    for name, (sizes, values), color, marker in _styled(curves):
        place = _to_array(f"the sizes of {name}", sizes)
        if values.ndim != 2 or values.shape[1] != len(place) or len(values) == 0:
            raise ArgumentError("curves", f"{name} of shape {tuple(values.shape)}", f"shape (trials, {len(place)})")
        trials = torch.stack([torch.from_numpy(_to_array(name, trial)) for trial in values])
        title = name
        if len(trials) > 1:
            low, high = student_t_interval(trials)
            if len(place) == 1:  # a band over one size has no width
                ax.vlines(place, low, high, color=color, alpha=0.35, lw=6)
            else:
                ax.fill_between(place, low, high, color=color, alpha=0.2, lw=0)
            title = f"{name} ({len(trials)} trials)"
        ax.plot(place, trials.mean(0), color=color, lw=2, marker=marker, ms=5, label=title)
    ax.set(xlabel="labeled inputs", ylabel=label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    style_axes(ax)


def plot_corruption(ax: Axes, lines: Mapping[str, Mapping[int, float]], *, label: str) -> None:
    """Plot a metric against the severity of a corruption.

    Args:
        ax: Axes to draw on.
        lines: Metric by severity (0 is clean) by name.
        label: Label of the metric.
    """
    for name, line, color, marker in _styled(lines):
        ax.plot(list(line), _to_array(name, list(line.values())), color=color, lw=2, marker=marker, ms=5, label=name)
    ax.set(xlabel="severity of the corruption", ylabel=label)
    ax.set_xticks(sorted({severity for line in lines.values() for severity in line}))
    style_axes(ax)


def plot_confusion(ax: Axes, names: Sequence[str], matrix: Tensor) -> None:
    """Plot a confusion matrix: counts as text, fractions of the true class as color.

    Args:
        ax: Axes to draw on.
        names: Names of the classes.
        matrix: Counts by true and predicted class: (C, C).
    """
    if matrix.shape != (len(names), len(names)) or not names:
        raise ArgumentError("matrix", tuple(matrix.shape), f"shape ({len(names)}, {len(names)}), one row per name")
    fractions = (matrix.double() / matrix.sum(1, keepdim=True).clamp_min(1)).tolist()
    size = min(9.0, 90 / len(names))
    for t, p in matrix.nonzero().tolist():  # cells without a count stay transparent
        corners = [p - 0.5, p + 0.5, p + 0.5, p - 0.5], [t - 0.5, t - 0.5, t + 0.5, t + 0.5]
        ax.fill(*corners, color=BLUE if t == p else ORANGE, alpha=0.08 + 0.62 * fractions[t][p], lw=0)
        ax.text(p, t, f"{int(matrix[t, p]):,}", ha="center", va="center", fontsize=size)
    texts = [escape_text(name) for name in names]
    labels = [text if len(text) <= 18 else f"{text[:17]}…" for text in texts]
    steep = len(labels) * max(map(len, labels)) > 30
    ax.set_xticks(
        range(len(names)), labels, rotation=45 if steep else 0, ha="right" if steep else "center", parse_math=False
    )
    ax.set_yticks(range(len(names)), labels, parse_math=False)
    ax.tick_params(length=0, labelsize=size)
    limits = (-0.5, len(names) - 0.5)
    ax.set(xlabel="predicted class", ylabel="true class", xlim=limits, ylim=limits[::-1], aspect="equal")
    ax.spines[:].set_visible(False)


def plot_predictions(ax: Axes, y: Tensor, mean: Tensor, low: Tensor, high: Tensor, *, name: str, level: float) -> None:
    """Plot predictions with their intervals against the true values; infinite intervals reach the edge.

    Args:
        ax: Axes to draw on.
        y: True values (N,).
        mean: Predictions.
        low: Lower limits.
        high: Upper limits.
        name: Name of the model.
        level: Level of the intervals.
    """
    truth, center = _to_arrays({"y": y, "mean": mean})
    both = np.concatenate([truth, center])
    span = np.ptp(both) or 1.0
    bottom, top = both.min() - 0.15 * span, both.max() + 0.15 * span
    lower, upper = (np.asarray(end, dtype=float).clip(bottom - span, top + span) for end in (low, high))
    covered = (lower <= truth) & (truth <= upper)
    ax.axline((bottom, bottom), slope=1, color="black", lw=1, ls=":", label="perfect")
    for verb, color, rows in (("covers", BLUE, covered), ("misses", ORANGE, ~covered)):
        if rows.any():
            ax.vlines(truth[rows], lower[rows], upper[rows], color=color, lw=1, alpha=0.3)
            label = f"{name}, {100 * level:g} % interval {verb} the true value ({rows.sum():,})"
            ax.plot(truth[rows], center[rows], ".", color=color, ms=4, label=label)
    ax.set(xlabel="true value", ylabel="prediction", xlim=(bottom, top), ylim=(bottom, top))
    style_axes(ax)


def plot_pit_histogram(ax: Axes, counts: Tensor, *, name: str, label: str) -> None:
    """Plot the fraction of inputs in K equal bins of [0, 1] with the range that chance allows around 1/K.

    Args:
        ax: Axes to draw on.
        counts: Inputs in each bin: (K,).
        name: Name of the model.
        label: Label of the axis.
    """
    fractions, bins, total = _to_array(name, counts), len(counts), float(counts.sum())
    if not total > 0:
        raise ArgumentError("counts", counts.tolist(), "at least one input")
    ax.axhspan(*wilson_interval(1 / bins, total), color=GREY, alpha=0.2, lw=0, label="chance")
    ax.axhline(1 / bins, color="black", lw=1, ls=":")
    place = (np.arange(bins) + 0.5) / bins
    ax.bar(place, fractions / total, width=0.92 / bins, color=BLUE, alpha=0.5, label=name)
    ax.set(xlabel=label, ylabel="fraction of inputs", xlim=(0, 1))
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda fraction, _: f"{100 * fraction:g} %")
    style_axes(ax)


def plot_spread_skill(ax: Axes, spread: Sequence[float], error: Sequence[float], *, name: str) -> None:
    """Plot the RMSE of groups of inputs against their predicted standard deviation.

    Args:
        ax: Axes to draw on.
        spread: Predicted standard deviation of each group.
        error: RMSE of each group.
        name: Name of the model.
    """
    x, y = _to_arrays({"spread": spread, "error": error})
    limit = 1.08 * max(x.max(), y.max()) or 1.0
    ax.axline((0, 0), slope=1, color="black", lw=1, ls=":", label="perfect")
    ax.plot(x, y, marker="o", ms=6, color=BLUE, lw=1.5, label=name)
    ax.set(xlabel="predicted standard deviation", ylabel="RMSE", xlim=(0, limit), ylim=(0, limit))
    style_axes(ax)


def save_png(figure: Figure, out: Path) -> None:
    """Write a figure atomically.

    Args:
        figure: The figure.
        out: File to write.
    """
    with atomic_file(out) as temporary:
        figure.savefig(temporary, format="png")


def style_axes(ax: Axes, *, show_legend: bool = True, **legend: Any) -> None:
    """Add a grid and a legend, and hide the upper and right spine.

    Args:
        ax: Axes to style.
        show_legend: Whether to add a legend.
        legend: Options of the legend.
    """
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#dddddd", lw=0.8)
    ax.set_axisbelow(True)
    if show_legend:
        ax.legend(**{"fontsize": 9, **legend})


def _styled(items: Mapping[str, Any], colors: Sequence[str] = COLORS) -> Iterator[tuple[str, Any, str, str]]:
    """Yield name, value, color and marker of each item; raise ArgumentError if there is none."""
    if not items:
        raise ArgumentError("curves", dict(items), "at least one name with its values")
    for (name, value), color, marker in zip(items.items(), cycle(colors), cycle(MARKERS), strict=False):
        yield name, value, color, marker


def _plot_line(ax: Axes, x: Array, y: Array, color: str, label: str, **options: Any) -> None:
    """Plot a line; one of a single point is visible only with a marker."""
    ax.plot(x, y, **{"marker": "o" if len(x) == 1 else "", "color": color, "lw": 2, "label": label, **options})


def _to_array(name: str, values: Any) -> Array:
    """Return (N,) or (N, 1) values as an array; raise ArgumentError if they are empty or not finite."""
    flat = torch.as_tensor(values).detach().double()
    if flat.ndim == 2 and flat.shape[1] == 1:
        flat = flat[:, 0]
    if flat.ndim != 1 or len(flat) == 0 or not bool(torch.isfinite(flat).all()):
        raise ArgumentError(name, f"a tensor of shape {tuple(flat.shape)}", "finite values (N,) or (N, 1), N ≥ 1")
    return flat.numpy()


def _to_arrays(parts: Mapping[str, Any], *, sort: bool = False) -> list[Array]:
    """Return values as arrays of equal length, sorted by the first of them if requested."""
    arrays = [_to_array(name, values) for name, values in parts.items()]
    if len({len(array) for array in arrays}) > 1:
        raise ArgumentError(next(iter(parts)), [len(array) for array in arrays], "values of equal length")
    order = np.argsort(arrays[0], kind="stable") if sort else slice(None)
    return [array[order] for array in arrays]
