"""Tests of report.plots: labels, legends, data and errors."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from neuboots import metrics
from neuboots.report import plots

GRID, ONE = torch.linspace(-1, 1, 20), torch.tensor([0.5])
PROBS = torch.rand(200, 4, generator=torch.Generator().manual_seed(0)).softmax(1)
LABELS = torch.randint(4, (200,), generator=torch.Generator().manual_seed(1))
EQUAL = metrics.risk_coverage_curve(torch.full((20, 4), 0.25), torch.arange(20) % 4)
CALIBRATION = metrics.calibration_curve(torch.zeros(50), torch.ones(50), torch.linspace(-2, 2, 50))
TRIALS = torch.tensor([[0.5, 0.7], [0.6, 0.8]])

PLOTS: dict[str, Callable[[Axes], None]] = {
    "reliability": lambda ax: plots.plot_reliability(ax, {"a net": metrics.reliability_curve(PROBS, LABELS)}),
    "histograms": lambda ax: plots.plot_histograms(ax, {"a net": GRID, "other": GRID + 1}, label="x", bottom=-4, top=4),
    "one value": lambda ax: plots.plot_histograms(ax, {"a net": torch.full((5,), 2.0)}, label="energy"),
    "band": lambda ax: plots.plot_regression_band(
        ax, GRID, GRID**2, GRID**2 - 1, GRID**2 + 1, label="a net", truth=GRID, points=(GRID, GRID)
    ),
    "one place": lambda ax: plots.plot_regression_band(ax, ONE, ONE, ONE - 1, ONE + 1, label="a net", truth=ONE),
    "coverage": lambda ax: plots.plot_coverage(ax, GRID, {"a net": GRID.abs()}, level=0.95, num_sets=50),
    "calibration": lambda ax: plots.plot_calibration_curve(ax, {"a net": CALIBRATION}),
    "risk coverage": lambda ax: plots.plot_risk_coverage(ax, {"a net": metrics.risk_coverage_curve(PROBS, LABELS)}),
    "one score": lambda ax: plots.plot_risk_coverage(ax, {"a net": EQUAL}),
    "learning": lambda ax: plots.plot_learning_curves(ax, {"a net": ([20, 40], TRIALS), "b": ([20, 40], TRIALS[:1])}),
    "one size": lambda ax: plots.plot_learning_curves(ax, {"a net": ([20], TRIALS[:, :1])}),
    "corruption": lambda ax: plots.plot_corruption(ax, {"a net": {0: 0.1, 1: 0.2, 5: 0.5}}, label="error"),
    "predictions": lambda ax: plots.plot_predictions(
        ax, GRID, GRID + 0.1, GRID - 0.1, GRID + 0.3, name="a net", level=0.9
    ),
    "pit": lambda ax: plots.plot_pit_histogram(ax, torch.tensor([9, 11, 10]), name="a net", label="PIT"),
    "spread": lambda ax: plots.plot_spread_skill(ax, [0.1, 0.2], [0.15, 0.18], name="a net"),
}


def draw(plot: Callable[[Axes], None]) -> Axes:
    ax = Figure().add_subplot()
    plot(ax)
    return ax


def legend_texts(ax: Axes) -> list[str]:
    legend = ax.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


@pytest.mark.parametrize("name", PLOTS)
def test_plot_has_labels_and_a_legend(name: str, tmp_path: Path) -> None:
    ax = draw(PLOTS[name])
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert any("a net" in text for text in legend_texts(ax))
    plots.save_png(ax.figure, tmp_path / "plot.png")  # type: ignore[arg-type]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_histograms_count_values_outside_the_limits() -> None:
    groups = {"a": torch.tensor([-9.0, 0.5, 0.5, 1.0 + 1e-7]), "b": torch.tensor([0.0, 0.1, 5.0, 7.0])}
    ax = draw(lambda ax: plots.plot_histograms(ax, groups, label="x", bottom=0.0, top=1.0, bins=4))
    names = [text for text in legend_texts(ax) if "mean" not in text]
    assert names == ["a (4, of which 1 outside)", "b (4, of which 2 outside)"]
    heights = [[bar.get_height() for bar in bars] for bars in ax.containers]
    assert heights == [pytest.approx([0, 0, 0.5, 0.25]), pytest.approx([0.5, 0, 0, 0])]


def test_column_vectors_are_accepted() -> None:
    tall = GRID[:, None]
    flat = draw(lambda ax: plots.plot_regression_band(ax, GRID, GRID, GRID - 1, GRID + 1, label="b", truth=GRID))
    column = draw(lambda ax: plots.plot_regression_band(ax, tall, tall, tall - 1, tall + 1, label="b", truth=tall))
    lines = {line.get_label(): line.get_xydata() for line in column.lines}
    for line in flat.lines:
        assert lines[line.get_label()] == pytest.approx(line.get_xydata())


def test_single_points_are_visible() -> None:
    for name in ("one place", "one size", "one score"):
        ax = draw(PLOTS[name])
        assert all(line.get_marker() not in ("", "None") for line in ax.lines)
        assert all(collection.get_linewidth()[0] > 1 for collection in ax.collections)


def test_band_is_sorted_by_x() -> None:
    x = GRID[torch.randperm(20)]
    ax = draw(lambda ax: plots.plot_regression_band(ax, x, x**2, x**2, x**2, label="band"))
    line = next(line for line in ax.lines if line.get_label() == "mean of the replicates")
    assert torch.tensor(line.get_xdata()).tolist() == pytest.approx(GRID.tolist())
    assert torch.tensor(line.get_ydata()).tolist() == pytest.approx((GRID**2).tolist())


def test_learning_curve_has_a_student_interval() -> None:
    values = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
    ax = draw(lambda ax: plots.plot_learning_curves(ax, {"five trials": ([10], values)}))
    half = 2.7764451 * float(values.std()) / 5**0.5
    assert tuple(ax.collections[0].get_datalim(ax.transData).intervaly) == pytest.approx((3 - half, 3 + half))


def test_predictions_show_which_intervals_cover() -> None:
    y = torch.tensor([0.0, 1.0, 2.0])
    high = y + torch.tensor([2.0, 2.0, -0.1])
    ax = draw(lambda ax: plots.plot_predictions(ax, y, y + 1, y - 0.5, high, name="a net", level=0.95))
    lines = [list(line.get_xdata()) for line in ax.lines[1:]]
    assert lines == [[0.0, 1.0], [2.0]]
    endless = torch.full((3,), math.inf)
    ax = draw(lambda ax: plots.plot_predictions(ax, y, y, -endless, endless, name="a net", level=0.95))
    ends = [value for path in ax.collections[0].get_paths() for value in path.vertices[:, 1].tolist()]
    assert all(map(math.isfinite, ends))
    assert max(ends) > ax.get_ylim()[1]


def test_pit_histogram_has_fractions() -> None:
    ax = draw(lambda ax: plots.plot_pit_histogram(ax, torch.tensor([30, 10, 0, 0]), name="a net", label="PIT"))
    heights = [patch.get_height() for patch in ax.patches if isinstance(patch, Rectangle)][1:]  # the first is chance
    assert heights == [0.75, 0.25, 0.0, 0.0]


def test_confusion_matrix_shows_counts() -> None:
    names = ["cat", "dog", "a name that is far too long"]
    ax = draw(lambda ax: plots.plot_confusion(ax, names, torch.tensor([[1200, 3, 0]] * 3)))
    assert [text.get_text() for text in ax.texts] == ["1,200", "3"] * 3
    assert len(ax.patches) == 6
    assert [label.get_text() for label in ax.get_yticklabels()] == ["cat", "dog", "a name that is fa…"]


NAN, EMPTY = torch.full((20,), math.nan), torch.zeros(0)


@pytest.mark.parametrize(
    "plot",
    [
        lambda ax: plots.plot_reliability(ax, {}),
        lambda ax: plots.plot_histograms(ax, {}, label="x"),
        lambda ax: plots.plot_histograms(ax, {"a": EMPTY}, label="x"),
        lambda ax: plots.plot_histograms(ax, {"a": NAN}, label="x"),
        lambda ax: plots.plot_histograms(ax, {"a": GRID}, label="x", bottom=1.0, top=1.0),
        lambda ax: plots.plot_regression_band(ax, GRID, NAN, GRID, GRID, label="band"),
        lambda ax: plots.plot_regression_band(ax, torch.zeros(20, 2), GRID, GRID, GRID, label="band"),
        lambda ax: plots.plot_regression_band(ax, GRID, GRID[1:], GRID, GRID, label="band"),
        lambda ax: plots.plot_learning_curves(ax, {"a": ([10, 20], torch.rand(2))}),
        lambda ax: plots.plot_pit_histogram(ax, torch.zeros(4), name="a net", label="PIT"),
        lambda ax: plots.plot_confusion(ax, ["cat"], torch.eye(2)),
    ],
)
def test_wrong_values_raise(plot: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        draw(plot)
