"""Plots of the studies and the demo, beside those of `neuboots.report.plots`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, StrMethodFormatter
from torch import Tensor

from neuboots.report.plots import BLUE, COLORS, GREEN, GREY, MARKERS, ORANGE, PURPLE, style_axes

_STYLES = ((BLUE, "o"), (PURPLE, "s"), (GREEN, "^"), (ORANGE, "v"))


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
    """Plot the mean probability of each class with its interval, beside that of a single net: (C,) each."""
    place = range(len(names))
    ax.bar(place, probs.tolist(), width=0.62, color=BLUE, alpha=0.3, label=f"{name}, mean of the replicates")
    center, half = (low + high) / 2, (high - low) / 2  # the mean may lie outside a skewed interval
    label = f"{name}, middle {100 * level:g} % of the replicates"
    ax.errorbar(
        place, center.tolist(), half.tolist(), fmt="none", color=BLUE, elinewidth=3, capsize=7, capthick=3, label=label
    )
    if deterministic is not None:
        ax.plot(place, deterministic.tolist(), "D", color="black", mfc="white", ms=5.5, label="single net")
    ax.set_xticks(place, names)
    ax.set(ylabel="probability", ylim=(-0.03, 1.05))
    style_axes(ax, show_legend=False)


def plot_runtime(ax: Axes, times: Mapping[str, Mapping[int, float]], *, single: float) -> None:
    """Plot prediction time against B, beside one forward pass and B of them."""
    sizes = sorted({size for line in times.values() for size in line})
    ends = [sizes[0], sizes[-1]]
    ax.plot(ends, [1e3 * single * size for size in ends], color="black", lw=1, ls=":", label="B × one forward pass")
    ax.axhline(1e3 * single, color=GREY, lw=2, label="one forward pass")
    for (name, line), (color, marker) in zip(times.items(), cycle(_STYLES), strict=False):
        milliseconds = [1e3 * seconds for seconds in line.values()]
        ax.plot(list(line), milliseconds, marker=marker, color=color, lw=2, label=name)
    ax.set(xscale="log", yscale="log", xlabel="replicates B", ylabel="time / ms")
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    ax.minorticks_off()
    style_axes(ax, loc="upper left")


def plot_scaling(
    ax: Axes, lines: Mapping[str, Mapping[int, Sequence[float]]], *, xlabel: str, ylabel: str, yscale: str = "log"
) -> None:
    """Plot a metric against a size on a logarithmic axis: mean and range over seeds."""
    colors = cycle((BLUE, ORANGE, GREEN, PURPLE, GREY))
    for (name, line), color, marker in zip(lines.items(), colors, cycle(MARKERS), strict=False):
        values = {size: line[size] for size in sorted(line)}
        sizes, lists = list(values), list(values.values())
        ax.fill_between(sizes, [min(v) for v in lists], [max(v) for v in lists], color=color, alpha=0.2, lw=0)
        ax.plot(sizes, [sum(v) / len(v) for v in lists], color=color, lw=2, marker=marker, ms=5, label=name)
    ax.set(xscale="log", yscale=yscale, xlabel=xlabel, ylabel=ylabel)
    sizes = sorted({size for line in lines.values() for size in line})
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.minorticks_off()
    if yscale == "log":
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # labels within one decade
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    style_axes(ax)


def plot_bars(ax: Axes, names: Sequence[str], bars: Mapping[str, Sequence[Sequence[float]]], *, label: str) -> None:
    """Plot a group of bars for each name: mean and standard deviation over seeds, and a dot for each seed."""
    for title, lists, color, marker, place, width in _grouped(bars, len(names)):
        means = [sum(values) / len(values) for values in lists]
        stds = [float(torch.tensor(values).std()) if len(values) > 1 else 0.0 for values in lists]
        ax.bar(place, means, width=0.92 * width, color=color, alpha=0.45, label=title)
        ax.errorbar(place, means, stds, fmt="none", color=color, elinewidth=2, capsize=2)
        dots = [(x, value) for x, values in zip(place, lists, strict=True) for value in values]
        ax.plot(*zip(*dots, strict=True), marker, color=color, ms=2.5)
    ax.set_xticks(range(len(names)), names, fontsize=8)
    _legend_above(ax, label)


def plot_boxes(ax: Axes, names: Sequence[str], boxes: Mapping[str, Sequence[Sequence[float]]], *, label: str) -> None:
    """Plot a group of boxes for each name: quartiles and range, with a mark at the mean."""
    for title, lists, color, marker, place, width in _grouped(boxes, len(names)):
        drawn = ax.boxplot(
            lists, positions=place, widths=0.8 * width, whis=(0, 100), patch_artist=True, manage_ticks=False
        )
        for part in (line for lines in drawn.values() for line in lines):
            part.set_color(color)
        for box in drawn["boxes"]:
            box.set_facecolor(f"{color}66")
        means = [sum(values) / len(values) for values in lists]
        ax.plot(place, means, marker, color=color, mec="black", mew=0.5, ms=4, label=title)
    ax.set_xticks(range(len(names)), names)
    _legend_above(ax, label)


def plot_image(ax: Axes, image: Tensor) -> None:
    """Plot a grey image (H, W), dark on white."""
    ax.imshow(image.tolist(), cmap="Greys", interpolation="nearest")
    ax.set(xticks=[], yticks=[])


def _grouped(
    lists: Mapping[str, Sequence[Sequence[float]]], size: int
) -> Iterator[tuple[str, Sequence[Sequence[float]], str, str, list[float], float]]:
    """Yield name, values, color, marker, places and width of each member of the groups."""
    width = 0.82 / len(lists)
    for k, (name, values) in enumerate(lists.items()):
        place = [group + width * (k - (len(lists) - 1) / 2) for group in range(size)]
        yield name, values, COLORS[k % len(COLORS)], MARKERS[k % len(MARKERS)], place, width


def _legend_above(ax: Axes, label: str) -> None:
    ax.set_ylabel(label)
    style_axes(ax, loc="lower left", bbox_to_anchor=(0, 1.1), ncols=3, fontsize=8, frameon=False, borderaxespad=0)
    ax.grid(axis="x", visible=False)
