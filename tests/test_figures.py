"""Every figure has labels, a legend with a name for each thing drawn, and the data it was given."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from neuboots import metrics
from neuboots.report import figures

GRID = torch.linspace(-1, 1, 20)
PROBS = torch.rand(200, 4, generator=torch.Generator().manual_seed(0)).softmax(1)
LABELS = torch.randint(4, (200,), generator=torch.Generator().manual_seed(1))


def reliability(ax: Axes) -> None:
    figures.draw_reliability(ax, {"a net": metrics.reliability_curve(PROBS, LABELS)})


def histograms(ax: Axes) -> None:
    groups = {"a net": torch.tensor([-3.0, -1.0]), "outside": torch.tensor([0.0, 2.0])}
    figures.draw_histograms(ax, groups, label="energy", bottom=-4.0, top=4.0)


def band(ax: Axes) -> None:
    figures.draw_regression_band(
        ax, GRID, GRID**2, GRID**2 - 1, GRID**2 + 1, label="a net", truth=GRID, points=(GRID, GRID)
    )


def coverage(ax: Axes) -> None:
    figures.draw_coverage(ax, GRID, {"a net": torch.full((20,), 0.9)}, level=0.95, num_sets=50)


def calibration_curve(ax: Axes) -> None:
    curve = metrics.calibration_curve(torch.zeros(50), torch.ones(50), torch.linspace(-2, 2, 50))
    figures.draw_calibration_curve(ax, {"a net": curve})


def risk_coverage(ax: Axes) -> None:
    figures.draw_risk_coverage(ax, {"a net": metrics.risk_coverage(PROBS, LABELS)})


def learning_curves(ax: Axes) -> None:
    figures.draw_learning_curves(
        ax, {"a net": ([20, 40], torch.tensor([[0.5, 0.7], [0.6, 0.8]])), "one": ([20, 40], torch.rand(1, 2))}
    )


def shift(ax: Axes) -> None:
    figures.draw_shift(ax, {"a net": {0: 0.1, 1: 0.2, 5: 0.5}}, label="error")


PANELS = [reliability, histograms, band, coverage, calibration_curve, risk_coverage, learning_curves, shift]


@pytest.mark.parametrize("draw", PANELS, ids=lambda draw: draw.__name__)
def test_a_panel_has_labels_and_a_legend(draw: Callable[[Axes], None], tmp_path: Path) -> None:
    figure = Figure()
    ax = figure.add_subplot()
    draw(ax)
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    legend = ax.get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert any("a net" in name for name in names), names
    figures.write_png(figure, tmp_path / "panel.png")
    assert (tmp_path / "panel.png").read_bytes().startswith(b"\x89PNG")


def test_a_band_is_drawn_in_the_order_of_x() -> None:
    ax = Figure().add_subplot()
    shuffled = GRID[torch.randperm(20)]
    figures.draw_regression_band(ax, shuffled, shuffled**2, shuffled**2, shuffled**2, label="band")
    line = next(line for line in ax.lines if line.get_label() == "mean of the replicates")
    assert torch.tensor(line.get_xdata()).tolist() == pytest.approx(GRID.tolist())
    assert torch.tensor(line.get_ydata()).tolist() == pytest.approx((GRID**2).tolist())


def test_the_interval_of_a_learning_curve_is_students() -> None:
    ax = Figure().add_subplot()
    values = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
    figures.draw_learning_curves(ax, {"five trials": ([10], values)})
    low, high = ax.collections[0].get_datalim(ax.transData).intervaly
    half = 2.7764451 * float(values.std()) / 5**0.5
    assert (low, high) == pytest.approx((3 - half, 3 + half))
