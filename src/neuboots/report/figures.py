"""Panels, each drawn on an Axes that the caller made; no global state, so no display is needed."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from neuboots.metrics import ReliabilityCurve

# Okabe and Ito's colours, which colour-blind readers can tell apart.
GREY, BLUE, GREEN, ORANGE, PURPLE = "#7a7a7a", "#0072b2", "#009e73", "#d55e00", "#b5669a"


def draw_reliability(ax: Axes, curves: Mapping[str, ReliabilityCurve]) -> None:
    """Accuracy against confidence; the bars are 95 % intervals (Wilson), wide where a bin holds few inputs."""
    ax.axline((0, 0), slope=1, color="black", lw=1, ls=":", label="perfect calibration")
    for k, (name, color) in enumerate(zip(curves, (GREY, BLUE, GREEN, ORANGE, PURPLE), strict=False)):
        curve = curves[name]
        held = curve.count > 0
        x, y, n = curve.confidence[held], curve.accuracy[held], curve.count[held].double()
        low, high = _wilson(y, n)
        x = x + 0.006 * (k - (len(curves) - 1) / 2)  # side by side, so that no bar hides another
        ax.vlines(x, low, high, color=color, lw=2, alpha=0.35)
        ax.plot(x, y, "o-", color=color, ms=6, lw=1.5, label=name)
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.03), ylim=(-0.03, 1.03))
    ax.legend(loc="upper left")
    _tidy(ax)


def draw_histograms(ax: Axes, groups: Mapping[str, Tensor], *, label: str, top: float, bins: int = 30) -> None:
    """The share of each group's inputs in equal bins of [0, top]; the dashed line is the group's mean."""
    edges = [top * k / bins for k in range(bins + 1)]
    for (name, values), color in zip(groups.items(), (GREEN, ORANGE, PURPLE, GREY), strict=False):
        shares = [1 / len(values)] * len(values)
        legend = f"{name} ({len(values):,})"
        ax.hist(values.tolist(), edges, weights=shares, color=color, alpha=0.55, label=legend)
        ax.axvline(float(values.mean()), color=color, lw=2, ls="--")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    ax.set(xlabel=label, ylabel="share of the group's images (log scale)", xlim=(0, top))
    ax.legend(loc="upper right")
    _tidy(ax)


def draw_bands(ax: Axes, names: Sequence[str], probs: Tensor, low: Tensor, high: Tensor, *, plain: Tensor) -> None:
    """Mean probability of each class with its band from `low` to `high`, beside the plain net's: (C,) each."""
    place = range(len(names))
    ax.bar(place, probs.tolist(), width=0.62, color=BLUE, alpha=0.3, label="NeuBoots, mean")
    ax.vlines(place, low.tolist(), high.tolist(), color=BLUE, lw=5, label="NeuBoots, 95 % band")
    ax.plot(place, plain.tolist(), "D", color="black", mfc="white", ms=6, label="plain net")
    ax.set_xticks(place, names)
    ax.set(ylabel="probability", ylim=(-0.03, 1.05))
    _tidy(ax)


def draw_times(ax: Axes, times: Mapping[str, Mapping[int, float]], *, single: float) -> None:
    """Seconds against B for each way of predicting, beside one plain pass and B of them."""
    sizes = sorted({size for line in times.values() for size in line})
    ends = [sizes[0], sizes[-1]]
    ax.plot(ends, [1e3 * single * size for size in ends], color="black", lw=1, ls=":", label="B × one plain pass")
    ax.axhline(1e3 * single, color=GREY, lw=2, label="one plain pass")
    for (name, line), color, marker in zip(times.items(), (BLUE, PURPLE, GREEN), "os^", strict=False):
        ax.plot(list(line), [1e3 * seconds for seconds in line.values()], marker=marker, color=color, lw=2, label=name)
    ax.set(xscale="log", yscale="log", xlabel="replicates B", ylabel="time / ms")
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.minorticks_off()
    ax.legend(loc="upper left")
    _tidy(ax)


def draw_image(ax: Axes, image: Tensor) -> None:
    """A grey image (H, W), ink dark on white."""
    ax.imshow(image.tolist(), cmap="Greys", interpolation="nearest")
    ax.set(xticks=[], yticks=[])


def write_png(figure: Figure, out: Path) -> None:
    """Write beside `out`, then rename: nobody ever sees half a figure."""
    aside = out.with_name(f".{out.name}.partial")
    try:
        figure.savefig(aside, format="png")
        aside.replace(out)
    finally:
        aside.unlink(missing_ok=True)


def _tidy(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#dddddd", lw=0.8)
    ax.set_axisbelow(True)


def _wilson(share: Tensor, count: Tensor, z: float = 1.96) -> tuple[Tensor, Tensor]:
    """Wilson's interval of a share seen in `count` inputs."""
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * (share * (1 - share) / count + z**2 / (4 * count**2)).sqrt() / (1 + z**2 / count)
    return middle - half, middle + half
