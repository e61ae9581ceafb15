"""Panels, each drawn on an Axes that the caller made; no global state, so no display is needed."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from torch import Tensor

from neuboots.metrics import ReliabilityCurve

# Okabe and Ito's colours, which colour-blind readers can tell apart.
GREY, BLUE, GREEN, ORANGE, PURPLE = "#7a7a7a", "#0072b2", "#009e73", "#d55e00", "#b5669a"


def draw_reliability(ax: Axes, curves: Mapping[str, ReliabilityCurve]) -> None:
    """Accuracy against confidence, bin by bin, with Wilson's 95 % intervals: wide where a bin holds few inputs."""
    ax.axline((0, 0), slope=1, color="black", lw=1, ls=":", label="perfect")
    colors = cycle((GREY, BLUE, GREEN, ORANGE, PURPLE))
    for k, (name, curve) in enumerate(curves.items()):
        color, held = next(colors), curve.count > 0
        x, y, n = curve.confidence[held], curve.accuracy[held], curve.count[held].double()
        low, high = _wilson(y, n)
        x = x + 0.012 * (k - (len(curves) - 1) / 2)  # side by side, so that no bar hides another
        ax.vlines(x, low, high, color=color, lw=2, alpha=0.35)
        ax.plot(x, y, color=color, lw=1, marker="o", ms=6, label=name)
    bins = max(len(curve.count) for curve in curves.values())
    ax.set(xlabel=f"confidence ({bins} bins)", ylabel="accuracy", xlim=(0, 1.03), ylim=(-0.03, 1.03))
    ax.legend(handlelength=1, borderaxespad=0.2, fontsize=9)
    _tidy(ax)


def draw_histograms(ax: Axes, groups: Mapping[str, Tensor], *, label: str, top: float, bins: int = 30) -> None:
    """The share of each group's inputs in equal bins of [0, top]; the dashed line is the group's mean."""
    edges = [top * k / bins for k in range(bins + 1)]
    colors = cycle((GREEN, ORANGE, PURPLE, GREY))
    for name, values in groups.items():
        color, mean, size = next(colors), float(values.mean()), len(values)
        inside = values.clamp(0, top).tolist()  # rounding may carry a value past the last edge
        ax.hist(inside, edges, weights=[1 / size] * size, color=color, alpha=0.55, label=f"{name} ({size:,})")
        ax.axvline(mean, color=color, lw=2, ls="--", label=f"mean {mean:.2f}")
    lowest = 0.7 / max(len(values) for values in groups.values())  # below a single input
    ax.set(xlabel=label, ylabel="share of the group", yscale="log", xlim=(0, top), ylim=(lowest, 1.5))
    ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.legend(loc="upper right")
    _tidy(ax)


def draw_bands(ax: Axes, names: Sequence[str], probs: Tensor, low: Tensor, high: Tensor, *, plain: Tensor) -> None:
    """Mean probability of each class with its band from `low` to `high`, beside the plain net's: (C,) each."""
    place = range(len(names))
    ax.bar(place, probs.tolist(), width=0.62, color=BLUE, alpha=0.3, label="NeuBoots, mean of the replicates")
    middle, half = (low + high) / 2, (high - low) / 2  # the mean may lie outside a skewed band
    ax.errorbar(
        place,
        middle.tolist(),
        half.tolist(),
        fmt="none",
        color=BLUE,
        elinewidth=3,
        capsize=7,
        capthick=3,
        label="NeuBoots, middle 95 % of the replicates",
    )
    ax.plot(place, plain.tolist(), "D", color="black", mfc="white", ms=5.5, label="plain")
    ax.set_xticks(place, names)
    ax.set(ylabel="probability", ylim=(-0.03, 1.05))
    _tidy(ax)


def draw_times(ax: Axes, times: Mapping[str, Mapping[int, float]], *, single: float) -> None:
    """Seconds against B for each way of predicting, beside one plain pass and B of them."""
    sizes = sorted({size for line in times.values() for size in line})
    ends = [sizes[0], sizes[-1]]
    ax.plot(ends, [1e3 * single * size for size in ends], color="black", lw=1, ls=":", label="B × one plain pass")
    ax.axhline(1e3 * single, color=GREY, lw=2, label="one plain pass")
    styles = cycle(((BLUE, "o"), (PURPLE, "s"), (GREEN, "^"), (ORANGE, "v")))
    for name, line in times.items():
        color, marker = next(styles)
        ax.plot(list(line), [1e3 * seconds for seconds in line.values()], marker=marker, color=color, lw=2, label=name)
    ax.set(xscale="log", yscale="log", xlabel="replicates B", ylabel="time / ms")
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
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
