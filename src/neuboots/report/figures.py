"""Panels, each drawn on an Axes that the caller made; no global state, so no display is needed."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from torch import Tensor

from neuboots.metrics import CalibrationCurve, ReliabilityCurve, RiskCoverage

# Okabe and Ito's colours, which colour-blind readers can tell apart.
GREY, BLUE, GREEN, ORANGE, PURPLE = "#7a7a7a", "#0072b2", "#009e73", "#d55e00", "#b5669a"
_Z = 1.96  # standard errors on either side of a 95 % interval


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


def draw_histograms(
    ax: Axes, groups: Mapping[str, Tensor], *, label: str, top: float, bottom: float = 0.0, bins: int = 30
) -> None:
    """The share of each group's inputs in equal bins of [bottom, top]; the dashed line is the group's mean."""
    edges = [bottom + (top - bottom) * k / bins for k in range(bins + 1)]
    colors = cycle((GREEN, ORANGE, PURPLE, GREY))
    for name, values in groups.items():
        color, mean, size = next(colors), float(values.mean()), len(values)
        inside = values.clamp(bottom, top).tolist()  # rounding may carry a value past the last edge
        ax.hist(inside, edges, weights=[1 / size] * size, color=color, alpha=0.55, label=f"{name} ({size:,})")
        ax.axvline(mean, color=color, lw=2, ls="--", label=f"mean {mean:.3g}")
    lowest = 0.7 / max(len(values) for values in groups.values())  # below a single input
    ax.set(xlabel=label, ylabel="share of the group", yscale="log", xlim=(bottom, top), ylim=(lowest, 1.5))
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


def draw_regression_band(
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
) -> None:
    """Mean and band of the regression function over one input: (N,) each; the truth and the data where known."""
    order = x.argsort()
    place = x[order].tolist()
    middle, lower, upper = (values[order].tolist() for values in (mean, low, high))
    if points is not None:
        ax.plot(points[0].tolist(), points[1].tolist(), ".", color=GREY, ms=3, alpha=0.5, label="data")
    ax.fill_between(place, lower, upper, color=color, alpha=0.25, lw=0, label=label)
    ax.plot(place, middle, color=color, lw=2, label="mean of the replicates")
    if truth is not None:
        ax.plot(place, truth[order].tolist(), color="black", lw=1.2, ls="--", label="truth")
    ax.set(xlabel="x", ylabel="y", xlim=(place[0], place[-1]))
    ax.legend(fontsize=9)
    _tidy(ax)


def draw_coverage(ax: Axes, x: Tensor, covered: Mapping[str, Tensor], *, level: float, num_sets: int) -> None:
    """The share of data sets whose band holds f(x), at each x: (N,); grey is what chance allows around the level."""
    from scipy.stats import binom

    low, high = (float(binom.ppf(q, num_sets, level)) / num_sets for q in (0.025, 0.975))
    ax.axhspan(low, high, color=GREY, alpha=0.15, lw=0, label=f"what {num_sets} data sets allow around {level:.0%}")
    ax.axhline(level, color="black", lw=1, ls=":")
    order = x.argsort()
    for (name, share), color in zip(covered.items(), cycle((BLUE, ORANGE, GREEN, PURPLE)), strict=False):
        ax.plot(x[order].tolist(), share[order].tolist(), color=color, lw=2, label=f"{name} (mean {share.mean():.2f})")
    ax.set(xlabel="x", ylabel="share of data sets covered", ylim=(-0.03, 1.03))
    ax.legend(loc="lower center", fontsize=9)
    _tidy(ax)


def draw_calibration_curve(ax: Axes, curves: Mapping[str, CalibrationCurve]) -> None:
    """The share of targets inside the central interval of each level, against the level."""
    ax.axline((0, 0), slope=1, color="black", lw=1, ls=":", label="perfect")
    for (name, curve), color in zip(curves.items(), cycle((BLUE, ORANGE, GREEN, PURPLE, GREY)), strict=False):
        ax.plot(curve.expected.tolist(), curve.observed.tolist(), color=color, lw=2, label=name)
    ax.set(xlabel="level of the interval", ylabel="share of targets inside", xlim=(0, 1), ylim=(0, 1))
    ax.legend(fontsize=9)
    _tidy(ax)


def draw_risk_coverage(ax: Axes, curves: Mapping[str, RiskCoverage]) -> None:
    """The error among the inputs that are kept, against the share of inputs kept, most confident first."""
    for (name, curve), color in zip(curves.items(), cycle((GREY, BLUE, GREEN, ORANGE, PURPLE)), strict=False):
        ax.plot(curve.coverage.tolist(), curve.risk.tolist(), color=color, lw=2, label=name, drawstyle="steps-post")
    ax.set(xlabel="coverage (share of inputs answered)", ylabel="risk (error among them)", xlim=(0, 1))
    ax.set_ylim(bottom=0)
    ax.legend(loc="upper left", fontsize=9)
    _tidy(ax)


def draw_learning_curves(
    ax: Axes, curves: Mapping[str, tuple[Sequence[int], Tensor]], *, label: str = "test accuracy"
) -> None:
    """Sizes of the labelled set and a figure (trials, rounds) for each: the mean, and its 95 % interval over trials."""
    styles = zip(cycle((GREY, BLUE, GREEN, ORANGE, PURPLE)), cycle("osv^DPX"), strict=False)
    for (name, (sizes, values)), (color, marker) in zip(curves.items(), styles, strict=False):
        mean = values.mean(0)
        title = name
        if len(values) > 1:
            half = _student(len(values)) * values.std(0) / len(values) ** 0.5
            ax.fill_between(sizes, (mean - half).tolist(), (mean + half).tolist(), color=color, alpha=0.2, lw=0)
            title = f"{name} ({len(values)} trials)"
        ax.plot(sizes, mean.tolist(), color=color, lw=2, marker=marker, ms=5, label=title)
    ax.set(xlabel="labelled inputs", ylabel=label)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.legend(fontsize=9)
    _tidy(ax)


def draw_shift(ax: Axes, lines: Mapping[str, Mapping[int, float]], *, label: str) -> None:
    """A figure against the severity of a corruption, a line for each method or corruption; severity 0 is clean."""
    styles = zip(cycle((GREY, BLUE, GREEN, ORANGE, PURPLE)), cycle("osv^DPX"), strict=False)
    for (name, line), (color, marker) in zip(lines.items(), styles, strict=False):
        ax.plot(list(line), list(line.values()), color=color, lw=2, marker=marker, ms=5, label=name)
    ax.set(xlabel="severity of the corruption", ylabel=label)
    ax.set_xticks(sorted({severity for line in lines.values() for severity in line}))
    ax.legend(fontsize=9)
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


def _wilson(share: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Wilson's 95 % interval of a share seen in `count` inputs."""
    middle = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z * (share * (1 - share) / count + _Z**2 / (4 * count**2)).sqrt() / (1 + _Z**2 / count)
    return middle - half, middle + half


def _student(count: int) -> float:
    """How many standard errors make a 95 % interval of a mean over `count` trials: 2.78 for five."""
    from scipy.stats import t

    return float(t.ppf(0.975, count - 1))
