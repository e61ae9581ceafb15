"""The figures of docs/your-data.md; make_your_data.py calls each with what it found."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from neuboots.metrics import reliability_curve, risk_coverage_curve
from neuboots.report.plots import BLUE, GREY, ORANGE, plot_predictions, plot_reliability, plot_risk_coverage

Drawn = dict[str, Any]


def panels(count: int, width: float = 8.6, height: float = 3.7) -> tuple[Figure, list[Axes]]:
    """A figure as wide as a page of documentation, with panels side by side."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    return figure, [figure.add_subplot(1, count, k + 1) for k in range(count)]


def write(figure: Figure, out: Path) -> None:
    """A PNG of 64 colours, which is a third as large as one of all and looks the same."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(64).save(out, optimize=True)


def tidy(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#dddddd", lw=0.8)
    ax.set_axisbelow(True)


def legend_above(ax: Axes) -> None:
    """Where it hides nothing."""
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), fontsize=9, frameon=False, borderaxespad=0.2)


def in_percent(value: float, _: int) -> str:
    return f"{100 * value:g} %"


def decision(out: Path, drawn: Drawn) -> None:
    """Errors among the answered against their share, with the model's rule; accuracy against confidence."""
    sure, wrong, answered = drawn["decision"]
    probs = torch.tensor(np.stack([sure, 1 - sure], 1))  # of the guess, and of the other class
    y = torch.tensor(wrong.astype(int))
    figure, (left, right) = panels(2, height=4.2)
    plot_risk_coverage(left, {"answering the surest first": risk_coverage_curve(probs, y)})
    share, error = answered.mean(), wrong[answered].mean()
    left.plot(share, error, "D", color=ORANGE, ms=8, zorder=5, label=f"the model's rule: {100 * share:.0f} % answered")
    left.axhline(0.1, color="black", lw=1, ls=":", label="allowed")
    left.xaxis.set_major_formatter(in_percent)
    left.yaxis.set_major_formatter(in_percent)
    left.set(xlabel="share of the new rows answered", ylabel="wrong among the answered", ylim=(0, 0.11))
    legend_above(left)
    curve = reliability_curve(probs, y, num_bins=10)
    plot_reliability(right, {f"the {len(sure)} new rows, and how many are in each bin": curve})
    for x, accuracy, count in zip(curve.confidence, curve.accuracy, curve.count, strict=True):
        if count:
            right.annotate(f"{int(count)}", (x, accuracy), (-7, 5), textcoords="offset points", ha="right", fontsize=9)
    right.set(xlabel="probability of the prediction (bins of a tenth)", ylabel="share that is right")
    right.set(xlim=(0.48, 1.03), ylim=(0, 1.08))
    legend_above(right)
    write(figure, out)


def unlike(out: Path, drawn: Drawn) -> None:
    """ood_score of new rows, and of the same rows with a column in other units, on a logarithmic axis."""
    usual, changed = drawn["unlike"]
    figure, (ax,) = panels(1, height=3.0)
    edges = np.geomspace(min(usual.min(), 0.1), 1.1 * changed.max(), 45)
    ax.hist(usual, edges, color=BLUE, alpha=0.65, label="new rows")
    ax.hist(changed, edges, color=ORANGE, alpha=0.65, hatch="//", label="the same rows, one column in other units")
    ax.axvline(1, color="black", lw=1.5, ls="--", label="above 1: abstain")
    ax.set(xscale="log", xlabel="ood_score", ylabel="rows")
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if edges[0] <= tick <= edges[-1]]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.legend(fontsize=9)
    tidy(ax)
    write(figure, out)


def shuffles(out: Path, drawn: Drawn) -> None:
    """Errors of all rows and of the answered ones, for each shuffle."""
    every, answered = drawn["shuffles"][:, 0], drawn["shuffles"][:, 2]
    figure, (ax,) = panels(1, width=7.0, height=3.0)
    place = np.arange(len(every))
    ax.vlines(place, every, answered, color=GREY, lw=1)
    ax.plot(place, every, "o", color=GREY, ms=7, label="wrong among all rows")
    ax.plot(place, answered, "D", color=ORANGE, ms=7, label="among those it answers", clip_on=False, zorder=5)
    ax.axhline(0.1, color="black", lw=1, ls=":", label="allowed")
    ax.yaxis.set_major_formatter(in_percent)
    ax.set(xlabel="shuffle", xticks=place, ylim=(0, max(0.11, 1.1 * max(every.max(), np.nanmax(answered)))))
    figure.legend(*ax.get_legend_handles_labels(), fontsize=9, loc="outside upper center", ncols=3, frameon=False)
    tidy(ax)
    write(figure, out)


def labels(out: Path, drawn: Drawn) -> None:
    """Errors before and after more labels, for each shuffle and in the mean."""
    before, chosen, random = drawn["shuffles"][:, 3:].T
    figure, (ax,) = panels(1, width=7.0, height=3.2)
    for at, after, color, mark, name in (
        (0, chosen, BLUE, "o", "labels chosen by next"),
        (2, random, GREY, "s", "labels drawn at random"),
    ):
        ax.plot((at, at + 1), np.stack([before, after]), color=color, lw=1, alpha=0.5)
        ax.plot(
            (at, at + 1), (before.mean(), after.mean()), color=color, lw=3, marker=mark, ms=8, label=f"{name}, mean"
        )
    ax.yaxis.set_major_formatter(in_percent)
    ax.set(ylabel="wrong", xlim=(-0.4, 3.4), ylim=(0, 1.1 * drawn["shuffles"][:, 3:].max()))
    ax.set_xticks(range(4), ["before", "after", "before", "after"])
    figure.legend(*ax.get_legend_handles_labels(), fontsize=9, loc="outside upper center", ncols=2, frameon=False)
    tidy(ax)
    write(figure, out)


def numbers(out: Path, drawn: Drawn) -> None:
    """Left, predictions with their intervals against the truth; right, both intervals, rows in order of prediction."""
    truth, mean, low, high, sure_low, sure_high = drawn["numbers"]
    figure, (left, right) = panels(2)
    plot_predictions(left, *map(torch.tensor, (truth, mean, low, high)), name="", level=0.95)
    handles, names = left.get_legend_handles_labels()
    left.legend(handles, [name.removeprefix(", ") for name in names], fontsize=8, loc="upper left")
    limits = (min(0, min(low)), 1.25 * max(high))
    left.set(xlabel="true progression", ylabel="prediction", ylim=limits)
    order, place = np.argsort(mean), np.arange(len(mean))
    right.vlines(place, low[order], high[order], color=BLUE, lw=2, alpha=0.25, label="low to high: of a new row")
    right.vlines(place, sure_low[order], sure_high[order], color=BLUE, lw=2, label="confidence: of the mean")
    right.plot(place, truth[order], "o", color=ORANGE, ms=3.5, label="truth")
    right.set(xlabel="new rows, in order of prediction", ylabel="progression", ylim=limits)
    right.legend(fontsize=8, loc="upper left")
    tidy(right)
    write(figure, out)


FIGURES: dict[str, Callable[[Path, Drawn], None]] = {
    "decision": decision,
    "unlike": unlike,
    "shuffles": shuffles,
    "labels": labels,
    "numbers": numbers,
}
"""By the names of their files, your-data-NAME.png."""
