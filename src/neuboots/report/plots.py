"""Panels, each drawn on an Axes that the caller made; no global state, so no display is needed."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from torch import Tensor

from neuboots.evaluation._parallel import student_t_interval
from neuboots.metrics import CalibrationCurve, ReliabilityCurve, RiskCoverageCurve
from neuboots.report.checks import wilson_interval

# Okabe and Ito's colours, which colour-blind readers can tell apart.
GREY, BLUE, GREEN, ORANGE, PURPLE = "#7a7a7a", "#0072b2", "#009e73", "#d55e00", "#b5669a"
_COLORS, _MARKS = (GREY, BLUE, GREEN, ORANGE, PURPLE), "osv^DPX"


def plot_reliability(ax: Axes, curves: Mapping[str, ReliabilityCurve]) -> None:
    """Accuracy against confidence, bin by bin, with Wilson's 95 % intervals: wide where a bin holds few inputs."""
    _check_any(curves)
    ax.axline((0, 0), slope=1, color="black", lw=1, ls=":", label="perfect")
    colors = cycle((GREY, BLUE, GREEN, ORANGE, PURPLE))
    for k, (name, curve) in enumerate(curves.items()):
        color, held = next(colors), curve.count > 0
        x, y, n = curve.confidence[held], curve.accuracy[held], curve.count[held]
        low, high = zip(*map(wilson_interval, y.tolist(), n.tolist()), strict=True)
        x = x + 0.012 * (k - (len(curves) - 1) / 2)  # side by side, so that no bar hides another
        ax.vlines(x.tolist(), low, high, color=color, lw=2, alpha=0.35)
        ax.plot(x.tolist(), y.tolist(), color=color, lw=1, marker="o", ms=6, label=name)
    bins = max(len(curve.count) for curve in curves.values())
    ax.set(xlabel=f"confidence ({bins} bins)", ylabel="accuracy", xlim=(0, 1.03), ylim=(-0.03, 1.03))
    ax.legend(handlelength=1, borderaxespad=0.2, fontsize=9)
    _tidy(ax)


def plot_histograms(
    ax: Axes,
    groups: Mapping[str, Tensor],
    *,
    label: str,
    bottom: float | None = None,
    top: float | None = None,
    bins: int = 30,
) -> None:
    """The share of each group's inputs in equal bins of [bottom, top]; the dashed line is the group's mean.

    The range is that of the data unless it is given; inputs outside it are in no bar, and the legend counts them.
    """
    _check_any(groups)
    lists = {name: _numbers(name, values.flatten()) for name, values in groups.items()}
    low, high = _range([value for values in lists.values() for value in values], bottom, top)
    edges = [low + (high - low) * k / bins for k in range(bins + 1)]
    slack = 1e-5 * (high - low)  # rounding may carry a value past the last edge
    colors = cycle((GREEN, ORANGE, PURPLE, GREY))
    for name, values in lists.items():
        color, mean, size = next(colors), sum(values) / len(values), len(values)
        inside = [min(max(value, low), high) for value in values if low - slack <= value <= high + slack]
        outside = f", of which {size - len(inside):,} outside" if len(inside) < size else ""
        title = f"{name} ({size:,}{outside})"
        ax.hist(inside, edges, weights=[1 / size] * len(inside), color=color, alpha=0.55, label=title)
        ax.axvline(mean, color=color, lw=2, ls="--", label=f"mean {mean:.3g}")
    lowest = 0.7 / max(map(len, lists.values()))  # below a single input
    ax.set(xlabel=label, ylabel="share of the group", yscale="log", xlim=(low, high), ylim=(lowest, 1.5))
    ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.legend(loc="upper right")
    _tidy(ax)


def plot_class_intervals(
    ax: Axes,
    names: Sequence[str],
    probs: Tensor,
    low: Tensor,
    high: Tensor,
    *,
    deterministic: Tensor | None = None,
    name: str = "the net",
    level: float = 0.95,
) -> None:
    """Mean probability of each class with its band from `low` to `high`, beside the plain net's if given: (C,) each."""
    parts = {"probs": probs, "low": low, "high": high} | ({} if deterministic is None else {"plain": deterministic})
    means, lower, upper, *single = _columns(parts, len(names)).values()
    place = range(len(names))
    ax.bar(place, means, width=0.62, color=BLUE, alpha=0.3, label=f"{name}, mean of the replicates")
    ends = list(zip(lower, upper, strict=True))
    ax.errorbar(
        place,
        [(a + b) / 2 for a, b in ends],  # the mean may lie outside a skewed band
        [(b - a) / 2 for a, b in ends],
        fmt="none",
        color=BLUE,
        elinewidth=3,
        capsize=7,
        capthick=3,
        label=f"{name}, middle {100 * level:g} % of the replicates",
    )
    for values in single:
        ax.plot(place, values, "D", color="black", mfc="white", ms=5.5, label="plain")
    ax.set_xticks(place, names)
    ax.set(ylabel="probability", ylim=(-0.03, 1.05))
    _tidy(ax)


def plot_runtime(ax: Axes, times: Mapping[str, Mapping[int, float]], *, single: float) -> None:
    """Seconds against B for each way of predicting, beside one plain pass and B of them."""
    _check_any(times)
    seconds = {name: _numbers(name, list(line.values())) for name, line in times.items()}
    sizes = sorted({size for line in times.values() for size in line})
    ends = [sizes[0], sizes[-1]]
    ax.plot(ends, [1e3 * single * size for size in ends], color="black", lw=1, ls=":", label="B × one plain pass")
    ax.axhline(1e3 * single, color=GREY, lw=2, label="one plain pass")
    styles = cycle(((BLUE, "o"), (PURPLE, "s"), (GREEN, "^"), (ORANGE, "v")))
    for name, line in times.items():
        color, marker = next(styles)
        ax.plot(list(line), [1e3 * each for each in seconds[name]], marker=marker, color=color, lw=2, label=name)
    ax.set(xscale="log", yscale="log", xlabel="replicates B", ylabel="time / ms")
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    ax.minorticks_off()
    ax.legend(loc="upper left")
    _tidy(ax)


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
    """Mean and band of the regression function over one input: (N,) or (N, 1) each; truth and data where known.

    `xlabel` and `ylabel` name the axes and their units: "age / years".
    """
    parts = {"x": x, "mean": mean, "low": low, "high": high} | ({} if truth is None else {"truth": truth})
    columns = _columns(parts)
    order = sorted(range(len(columns["x"])), key=columns["x"].__getitem__)
    drawn = {name: [values[k] for k in order] for name, values in columns.items()}
    place = drawn["x"]
    if points is not None:
        ax.plot(*_columns({"x": points[0], "y": points[1]}).values(), ".", color=GREY, ms=3, alpha=0.5, label="data")
    if place[0] == place[-1]:  # a single place has a band without width
        ax.vlines(place, drawn["low"], drawn["high"], color=color, alpha=0.25, lw=12, label=label)
    else:
        ax.fill_between(place, drawn["low"], drawn["high"], color=color, alpha=0.25, lw=0, label=label)
        ax.set_xlim(place[0], place[-1])
    ax.plot(place, drawn["mean"], marker=_dot(place), color=color, lw=2, label="mean of the replicates")
    if truth is not None:
        ax.plot(place, drawn["truth"], marker=_dot(place), color="black", lw=1.2, ls="--", label="truth")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.legend(fontsize=9)
    _tidy(ax)


def plot_coverage(
    ax: Axes,
    x: Tensor,
    covered: Mapping[str, Tensor],
    *,
    level: float,
    num_sets: int,
    xlabel: str = "x",
    ylabel: str = "share of data sets covered",
) -> None:
    """The share of data sets whose band holds f(x), at each x: (N,); grey is what chance allows around the level."""
    from scipy.stats import binom

    _check_any(covered)
    low, high = (float(binom.ppf(q, num_sets, level)) / num_sets for q in (0.025, 0.975))
    ax.axhspan(low, high, color=GREY, alpha=0.15, lw=0, label=f"what {num_sets} data sets allow around {level:.0%}")
    ax.axhline(level, color="black", lw=1, ls=":")
    for (name, share), color in zip(covered.items(), cycle((BLUE, ORANGE, GREEN, PURPLE)), strict=False):
        place, shares = zip(*sorted(zip(*_columns({"x": x, name: share}).values(), strict=True)), strict=True)
        title = f"{name} (mean {sum(shares) / len(shares):.2f})"
        ax.plot(place, shares, marker=_dot(place), color=color, lw=2, label=title)
    ax.set(xlabel=xlabel, ylabel=ylabel, ylim=(-0.03, 1.03))
    ax.legend(loc="lower center", fontsize=9)
    _tidy(ax)


def plot_calibration_curve(ax: Axes, curves: Mapping[str, CalibrationCurve]) -> None:
    """The share of targets inside the central interval of each level, against the level."""
    _check_any(curves)
    ax.axline((0, 0), slope=1, color="black", lw=1, ls=":", label="perfect")
    for (name, curve), color in zip(curves.items(), cycle((BLUE, ORANGE, GREEN, PURPLE, GREY)), strict=False):
        level, share = _columns({f"the levels of {name}": curve.expected, name: curve.observed}).values()
        ax.plot(level, share, marker=_dot(level), color=color, lw=2, label=name)
    ax.set(xlabel="level of the interval", ylabel="share of targets inside", xlim=(0, 1), ylim=(0, 1))
    ax.legend(fontsize=9)
    _tidy(ax)


def plot_risk_coverage(ax: Axes, curves: Mapping[str, RiskCoverageCurve]) -> None:
    """The error among the inputs that are kept, against the share of inputs kept, most confident first."""
    _check_any(curves)
    for (name, curve), color in zip(curves.items(), cycle((GREY, BLUE, GREEN, ORANGE, PURPLE)), strict=False):
        share, risk = _numbers(name, curve.coverage), _numbers(name, curve.risk)
        ax.plot(share, risk, marker=_dot(share), color=color, lw=2, label=name, drawstyle="steps-post")
    ax.set(xlabel="coverage (share of inputs answered)", ylabel="risk (error among them)", xlim=(0, 1.02))
    ax.set_ylim(bottom=0)
    ax.legend(loc="upper left", fontsize=9)
    _tidy(ax)


def plot_learning_curves(
    ax: Axes, curves: Mapping[str, tuple[Sequence[int], Tensor]], *, label: str = "test accuracy"
) -> None:
    """Sizes of the labelled set and a figure (trials, rounds) for each: the mean, and its 95 % interval over trials."""
    _check_any(curves)
    styles = zip(cycle((GREY, BLUE, GREEN, ORANGE, PURPLE)), cycle("osv^DPX"), strict=False)
    for (name, (sizes, values)), (color, marker) in zip(curves.items(), styles, strict=False):
        place = _numbers(f"the sizes of {name}", sizes)
        if values.ndim != 2 or values.shape[1] != len(place) or len(values) == 0:
            raise ValueError(
                f"got {name} of shape {tuple(values.shape)} for {len(place)} sizes; expected (trials, {len(place)})"
            )
        trials = torch.tensor([_numbers(name, trial) for trial in values], dtype=torch.float64)
        mean = trials.mean(0)
        title = name
        if len(trials) > 1:
            low, high = (end.tolist() for end in student_t_interval(trials))
            if len(place) == 1:  # a band over one size has no width
                ax.vlines(place, low, high, color=color, alpha=0.35, lw=6)
            else:
                ax.fill_between(place, low, high, color=color, alpha=0.2, lw=0)
            title = f"{name} ({len(trials)} trials)"
        ax.plot(place, mean.tolist(), color=color, lw=2, marker=marker, ms=5, label=title)
    ax.set(xlabel="labelled inputs", ylabel=label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.legend(fontsize=9)
    _tidy(ax)


def plot_corruption(ax: Axes, lines: Mapping[str, Mapping[int, float]], *, label: str) -> None:
    """A figure against the severity of a corruption, a line for each method or corruption; severity 0 is clean."""
    _check_any(lines)
    styles = zip(cycle((GREY, BLUE, GREEN, ORANGE, PURPLE)), cycle("osv^DPX"), strict=False)
    for (name, line), (color, marker) in zip(lines.items(), styles, strict=False):
        ax.plot(list(line), _numbers(name, list(line.values())), color=color, lw=2, marker=marker, ms=5, label=name)
    ax.set(xlabel="severity of the corruption", ylabel=label)
    ax.set_xticks(sorted({severity for line in lines.values() for severity in line}))
    ax.legend(fontsize=9)
    _tidy(ax)


def plot_scaling(
    ax: Axes, lines: Mapping[str, Mapping[int, Sequence[float]]], *, xlabel: str, ylabel: str, yscale: str = "log"
) -> None:
    """A figure against a size on a logarithmic axis: the mean over seeds, and the range from the least to the most."""
    _check_any(lines)
    styles = zip(cycle((BLUE, ORANGE, GREEN, PURPLE, GREY)), cycle("osv^DPX"), strict=False)
    for (name, line), (color, marker) in zip(lines.items(), styles, strict=False):
        values = {size: _numbers(name, list(line[size])) for size in sorted(line)}
        sizes = list(values)
        means = [sum(each) / len(each) for each in values.values()]
        ax.fill_between(
            sizes, [min(each) for each in values.values()], [max(each) for each in values.values()],
            color=color, alpha=0.2, lw=0,
        )  # fmt: skip
        ax.plot(sizes, means, color=color, lw=2, marker=marker, ms=5, label=name)
    ax.set(xscale="log", yscale=yscale, xlabel=xlabel, ylabel=ylabel)
    sizes = sorted({size for line in lines.values() for size in line})
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.minorticks_off()
    if yscale == "log":
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # a range of less than ten has labels too
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    ax.legend(fontsize=9)
    _tidy(ax)


def plot_bars(ax: Axes, names: Sequence[str], bars: Mapping[str, Sequence[Sequence[float]]], *, label: str) -> None:
    """A group of bars for each name: the mean over seeds, its standard deviation, and a dot for each seed."""
    for k, (title, lists, color, place, width) in enumerate(_groups(bars, len(names))):
        means = [sum(values) / len(values) for values in lists]
        spread = [float(torch.tensor(values).std()) if len(values) > 1 else 0.0 for values in lists]
        ax.bar(place, means, width=0.92 * width, color=color, alpha=0.45, label=title)
        ax.errorbar(place, means, spread, fmt="none", color=color, elinewidth=2, capsize=2)
        dots = [(x, value) for x, values in zip(place, lists, strict=True) for value in values]
        ax.plot(*zip(*dots, strict=True), _MARKS[k % len(_MARKS)], color=color, ms=2.5)
    ax.set_xticks(range(len(names)), names, fontsize=8)
    ax.set_ylabel(label)
    _legend_above(ax)


def plot_boxes(ax: Axes, names: Sequence[str], boxes: Mapping[str, Sequence[Sequence[float]]], *, label: str) -> None:
    """A group of boxes for each name: median, quartiles, the whole range, and a mark at the mean."""
    for k, (title, lists, color, place, width) in enumerate(_groups(boxes, len(names))):
        drawn = ax.boxplot(
            lists, positions=place, widths=0.8 * width, whis=(0, 100), patch_artist=True, manage_ticks=False
        )
        for part in (line for lines in drawn.values() for line in lines):
            part.set_color(color)
        for box in drawn["boxes"]:
            box.set_facecolor(f"{color}66")  # some of what lies behind shows
        means = [sum(values) / len(values) for values in lists]
        ax.plot(place, means, _MARKS[k % len(_MARKS)], color=color, mec="black", mew=0.5, ms=4, label=title)
    ax.set_xticks(range(len(names)), names)
    ax.set_ylabel(label)
    _legend_above(ax)


def plot_image(ax: Axes, image: Tensor) -> None:
    """A grey image (H, W), ink dark on white."""
    ax.imshow(image.tolist(), cmap="Greys", interpolation="nearest")
    ax.set(xticks=[], yticks=[])


def save_png(figure: Figure, out: Path) -> None:
    """Write beside `out`, then rename: nobody ever sees half a figure."""
    aside = out.with_name(f".{out.name}.partial")
    try:
        figure.savefig(aside, format="png")
        aside.replace(out)
    finally:
        aside.unlink(missing_ok=True)


def _check_any(named: Mapping[str, Any]) -> None:
    if not named:
        raise ValueError("got nothing to draw; expected a name and what it stands for: {'NeuBoots': …}")


def _numbers(name: str, values: Any) -> list[float]:
    """(N,) or (N, 1), finite, with at least one number."""
    flat = torch.as_tensor(values).detach()
    if flat.ndim == 2 and flat.shape[1] == 1:
        flat = flat[:, 0]
    if flat.ndim != 1 or len(flat) == 0:
        raise ValueError(f"got {name} of shape {tuple(flat.shape)}; expected (N,) or (N, 1), with at least one number")
    if not bool(torch.isfinite(flat).all()):
        raise ValueError(f"got NaN or infinite values in {name}; expected finite numbers: drop them")
    numbers: list[float] = flat.tolist()
    return numbers


def _columns(parts: Mapping[str, Any], length: int | None = None) -> dict[str, list[float]]:
    """Numbers that belong together: as many in each."""
    columns = {name: _numbers(name, values) for name, values in parts.items()}
    lengths = {name: len(values) for name, values in columns.items()}
    if len({*lengths.values()} | ({length} if length is not None else set())) > 1:
        got = ", ".join(f"{count} of {name}" for name, count in lengths.items())
        expected = "as many of each" if length is None else f"{length} of each"
        raise ValueError(f"got {got}; expected {expected}")
    return columns


def _range(values: Sequence[float], bottom: float | None, top: float | None) -> tuple[float, float]:
    """From bottom to top, and where they are not given from the least value to the largest."""
    low = min(values) if bottom is None else bottom
    high = max(values) if top is None else top
    if low == high and (bottom is None or top is None):  # all values are one
        low, high = low - 0.5 * (bottom is None), high + 0.5 * (top is None)
    if not low < high:
        raise ValueError(f"got a range from {low:g} to {high:g}; expected bottom < top")
    return low, high


def _dot(x: Sequence[float]) -> str:
    """The marker of a line: a dot where there is one point, which no line shows."""
    return "o" if len(x) == 1 else ""


def _tidy(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#dddddd", lw=0.8)
    ax.set_axisbelow(True)


def _groups(
    lists: Mapping[str, Sequence[Sequence[float]]], size: int
) -> list[tuple[str, list[list[float]], str, list[float], float]]:
    """Of each member of every group: its name, its numbers in each group, colour, places and width."""
    _check_any(lists)
    width, found = 0.82 / len(lists), []
    for k, (name, values) in enumerate(lists.items()):
        if len(values) != size:
            raise ValueError(f"got {len(values)} lists of {name}; expected {size}, one for each group")
        place = [group + width * (k - (len(lists) - 1) / 2) for group in range(size)]
        numbers = [_numbers(name, each) for each in values]
        found.append((name, numbers, _COLORS[k % len(_COLORS)], place, width))
    return found


def _legend_above(ax: Axes) -> None:
    """Where it hides nothing."""
    _tidy(ax)
    ax.grid(axis="x", visible=False)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.1), ncols=3, fontsize=8, frameon=False, borderaxespad=0)


def plot_confusion(ax: Axes, names: Sequence[str], matrix: Tensor) -> None:
    """Rows of each true class by their guess, (C, C): as shares of the class by colour, and as numbers."""
    if matrix.shape != (len(names), len(names)) or not names:
        raise ValueError(f"got a matrix of shape {tuple(matrix.shape)} for {len(names)} names; expected (C, C)")
    shares = (matrix.double() / matrix.sum(1, keepdim=True).clamp_min(1)).tolist()
    size = min(9.0, 90 / len(names))
    for t, (line, counts) in enumerate(zip(shares, matrix.tolist(), strict=True)):
        for g, (share, count) in enumerate(zip(line, counts, strict=True)):
            if count:  # the ground shows through, light or dark
                color = BLUE if t == g else ORANGE
                ax.fill([g - 0.5, g + 0.5, g + 0.5, g - 0.5], [t - 0.5, t - 0.5, t + 0.5, t + 0.5], color=color,
                        alpha=0.08 + 0.62 * share, lw=0)  # fmt: skip
                ax.text(g, t, f"{count:,}", ha="center", va="center", fontsize=size)
    labels = [name if len(name) <= 18 else f"{name[:17]}…" for name in names]
    steep = len(labels) * max(map(len, labels)) > 30
    ax.set_xticks(range(len(names)), labels, rotation=45 if steep else 0, ha="right" if steep else "center")
    ax.set_yticks(range(len(names)), labels)
    ax.tick_params(length=0, labelsize=size)
    ax.set(xlabel="guess", ylabel="true class", xlim=(-0.5, len(names) - 0.5), ylim=(len(names) - 0.5, -0.5))
    ax.set_aspect("equal")
    ax.spines[:].set_visible(False)


def plot_predictions(ax: Axes, y: Tensor, mean: Tensor, low: Tensor, high: Tensor, *, name: str, level: float) -> None:
    """Predictions with their intervals against the truth, (N,) each: those that hold it, and those that miss it.

    An end may be infinite; it is then drawn to the edge of the panel.
    """
    truth, middle = _columns({"y": y, "mean": mean}).values()
    span = max(truth + middle) - min(truth + middle) or 1.0
    bottom, top = min(truth + middle) - 0.15 * span, max(truth + middle) + 0.15 * span
    ends = [[min(max(float(end), bottom - span), top + span) for end in side] for side in (low, high)]
    rows = list(zip(truth, middle, *ends, strict=True))
    ax.axline((bottom, bottom), slope=1, color="black", lw=1, ls=":", label="perfect")
    for title, color, which in (("holds", BLUE, True), ("misses", ORANGE, False)):
        chosen = [row for row in rows if (row[2] <= row[0] <= row[3]) == which]
        if chosen:
            at, dots, lower, upper = zip(*chosen, strict=True)
            ax.vlines(at, lower, upper, color=color, lw=1, alpha=0.3)
            label = f"{name}, {100 * level:g} % interval {title} the truth ({len(chosen):,})"
            ax.plot(at, dots, ".", color=color, ms=4, label=label)
    ax.set(xlabel="true value", ylabel="prediction", xlim=(bottom, top), ylim=(bottom, top))
    ax.legend(fontsize=9)
    _tidy(ax)


def plot_pit_histogram(ax: Axes, counts: Tensor, *, name: str, label: str) -> None:
    """The share of inputs in each of K equal bins of [0, 1], (K,), beside what is expected, 1/K, and chance."""
    numbers, bins, total = _numbers(name, counts), len(counts), float(counts.sum())
    if not total > 0:
        raise ValueError(f"got no inputs in the bins of {name}; expected some")
    low, high = wilson_interval(1 / bins, total)
    ax.axhspan(low, high, color=GREY, alpha=0.2, lw=0, label="what chance allows")
    ax.axhline(1 / bins, color="black", lw=1, ls=":")
    place = [(k + 0.5) / bins for k in range(bins)]
    ax.bar(place, [number / total for number in numbers], width=0.92 / bins, color=BLUE, alpha=0.5, label=name)
    ax.set(xlabel=label, ylabel="share of inputs", xlim=(0, 1))
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    ax.legend(fontsize=9)
    _tidy(ax)


def plot_spread_skill(ax: Axes, spread: Sequence[float], error: Sequence[float], *, name: str) -> None:
    """The RMSE of groups of inputs against the standard deviation that was said of them: equal where it is right."""
    x, y = _columns({"spread": torch.tensor(spread), "error": torch.tensor(error)}).values()
    most = 1.08 * max([*x, *y]) or 1.0
    ax.axline((0, 0), slope=1, color="black", lw=1, ls=":", label="perfect")
    ax.plot(x, y, marker="o", ms=6, color=BLUE, lw=1.5, label=name)
    ax.set(xlabel="predicted standard deviation", ylabel="RMSE found", xlim=(0, most), ylim=(0, most))
    ax.legend(fontsize=9)
    _tidy(ax)
