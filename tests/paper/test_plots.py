"""Tests of neuboots_paper.plots."""

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from neuboots_paper import plots


def test_bars_are_means_with_standard_deviations() -> None:
    ax = Figure().add_subplot()
    plots.plot_bars(ax, ["a", "b"], {"x": [[1.0, 3.0], [5.0]], "y": [[2.0], [2.0]]}, label="F1")
    bars = [bar for bar in ax.patches if isinstance(bar, Rectangle)]
    assert [bar.get_height() for bar in bars] == pytest.approx([2.0, 5.0, 2.0, 2.0])
    assert tuple(ax.collections[0].get_datalim(ax.transData).intervaly) == pytest.approx((2 - 2**0.5, 5.0))


def test_boxes_show_range_and_mean() -> None:
    ax = Figure().add_subplot()
    plots.plot_boxes(ax, ["0"], {"x": [[0.0, 1.0, 8.0]]}, label="accuracy")
    heights = [float(y) for line in ax.lines for y in torch.as_tensor(line.get_ydata()).flatten()]
    assert (min(heights), max(heights)) == (0.0, 8.0)
    assert ax.lines[-1].get_ydata() == pytest.approx([3.0])


def test_scaling_is_sorted_by_size() -> None:
    ax = Figure().add_subplot()
    plots.plot_scaling(ax, {"a net": {100: [1.0, 3.0], 10: [0.5]}}, xlabel="n", ylabel="time / s", yscale="linear")
    assert torch.tensor(ax.lines[0].get_xydata()).tolist() == [[10, 0.5], [100, 2.0]]
