"""Every figure has labels, a legend with a name for each thing drawn, and the data it was given."""

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
from neuboots.report import plots as figures

GRID = torch.linspace(-1, 1, 20)
PROBS = torch.rand(200, 4, generator=torch.Generator().manual_seed(0)).softmax(1)
LABELS = torch.randint(4, (200,), generator=torch.Generator().manual_seed(1))


def reliability(ax: Axes) -> None:
    figures.plot_reliability(ax, {"a net": metrics.reliability_curve(PROBS, LABELS)})


def histograms(ax: Axes) -> None:
    groups = {"a net": torch.tensor([-3.0, -1.0]), "outside": torch.tensor([0.0, 2.0])}
    figures.plot_histograms(ax, groups, label="energy", bottom=-4.0, top=4.0)


def band(ax: Axes) -> None:
    figures.plot_regression_band(
        ax, GRID, GRID**2, GRID**2 - 1, GRID**2 + 1, label="a net", truth=GRID, points=(GRID, GRID)
    )


def coverage(ax: Axes) -> None:
    figures.plot_coverage(ax, GRID, {"a net": torch.full((20,), 0.9)}, level=0.95, num_sets=50)


def calibration_curve(ax: Axes) -> None:
    curve = metrics.calibration_curve(torch.zeros(50), torch.ones(50), torch.linspace(-2, 2, 50))
    figures.plot_calibration_curve(ax, {"a net": curve})


def risk_coverage(ax: Axes) -> None:
    figures.plot_risk_coverage(ax, {"a net": metrics.risk_coverage_curve(PROBS, LABELS)})


def learning_curves(ax: Axes) -> None:
    figures.plot_learning_curves(
        ax, {"a net": ([20, 40], torch.tensor([[0.5, 0.7], [0.6, 0.8]])), "one": ([20, 40], torch.rand(1, 2))}
    )


def shift(ax: Axes) -> None:
    figures.plot_corruption(ax, {"a net": {0: 0.1, 1: 0.2, 5: 0.5}}, label="error")


def growth(ax: Axes) -> None:
    figures.plot_scaling(ax, {"a net": {100: [1.0, 2.0], 10: [0.5]}, "one": {10: [3.0]}}, xlabel="n", ylabel="time / s")


def bands(ax: Axes) -> None:
    third = torch.full((3,), 1 / 3)
    figures.plot_class_intervals(
        ax, ["a", "b", "c"], third, third - 0.1, third + 0.2, deterministic=third, name="a net"
    )
    ax.set_xlabel("class")
    ax.legend()


def times(ax: Axes) -> None:
    figures.plot_runtime(ax, {"a net": {1: 0.01, 100: 0.02}}, single=0.008)


def bars(ax: Axes) -> None:
    figures.plot_bars(ax, ["a", "b"], {"a net": [[0.1, 0.2], [0.3]], "another": [[0.5], [0.4]]}, label="F1")
    ax.set_xlabel("class")


def boxes(ax: Axes) -> None:
    figures.plot_boxes(ax, ["0", "1"], {"a net": [[0.1], [0.3, 0.4, 0.2]]}, label="accuracy")
    ax.set_xlabel("severity")


def one_place(ax: Axes) -> None:
    one = torch.tensor([0.5])
    figures.plot_regression_band(ax, one, one, one - 1, one + 1, label="a net", truth=one, points=(one, one))


def one_size(ax: Axes) -> None:
    figures.plot_learning_curves(ax, {"a net": ([20], torch.rand(3, 1)), "one": ([20], torch.rand(1, 1))})


def one_score(ax: Axes) -> None:
    curve = metrics.risk_coverage_curve(torch.full((20, 4), 0.25), torch.arange(20) % 4)
    figures.plot_risk_coverage(ax, {"a net": curve})


def one_value(ax: Axes) -> None:
    figures.plot_histograms(ax, {"a net": torch.full((5,), 2.0)}, label="energy")


def predictions(ax: Axes) -> None:
    figures.plot_predictions(ax, GRID, GRID + 0.1, GRID - 0.1, GRID + 0.3, name="a net", level=0.9)


def shares(ax: Axes) -> None:
    figures.plot_pit_histogram(ax, torch.tensor([9, 11, 10]), name="a net", label="place")


def spread_skill(ax: Axes) -> None:
    figures.plot_spread_skill(ax, [0.1, 0.2], [0.15, 0.18], name="a net")


PANELS = [
    *(reliability, histograms, band, coverage, calibration_curve, risk_coverage, learning_curves, shift, bands, times),
    *(one_place, one_size, one_score, one_value, bars, boxes, predictions, shares, spread_skill),
]


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
    figures.save_png(figure, tmp_path / "panel.png")
    assert (tmp_path / "panel.png").read_bytes().startswith(b"\x89PNG")


def names_in(ax: Axes) -> list[str]:
    legend = ax.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def test_axes_have_the_names_and_units_they_are_given() -> None:
    ax = Figure().add_subplot()
    figures.plot_regression_band(ax, GRID, GRID, GRID, GRID, label="band", xlabel="age / years", ylabel="mass / kg")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("age / years", "mass / kg")
    ax = Figure().add_subplot()
    figures.plot_coverage(ax, GRID, {"a": GRID.abs()}, level=0.9, num_sets=9, xlabel="age / years", ylabel="covered")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("age / years", "covered")


def test_bands_are_named_after_whoever_made_them() -> None:
    ax = Figure().add_subplot()
    half = torch.full((2,), 0.5)
    figures.plot_class_intervals(ax, ["a", "b"], half, half, half, deterministic=half, name="MC dropout", level=0.8)
    labels = ax.get_legend_handles_labels()[1]
    assert labels == ["plain", "MC dropout, mean of the replicates", "MC dropout, middle 80 % of the replicates"]
    other = Figure().add_subplot()
    figures.plot_class_intervals(other, ["a", "b"], half, half, half)
    assert "plain" not in other.get_legend_handles_labels()[1]


def test_histograms_say_what_they_leave_out() -> None:
    ax = Figure().add_subplot()
    groups = {"a": torch.tensor([-9.0, 0.5, 0.5, 1.0 + 1e-7]), "b": torch.tensor([0.0, 0.1, 5.0, 7.0])}
    figures.plot_histograms(ax, groups, label="x", bottom=0.0, top=1.0, bins=4)
    assert [name for name in names_in(ax) if "mean" not in name] == [
        "a (4, of which 1 outside)",
        "b (4, of which 2 outside)",
    ]
    heights = [[bar.get_height() for bar in bars] for bars in ax.containers]
    assert heights == [pytest.approx([0, 0, 0.5, 0.25]), pytest.approx([0.5, 0, 0, 0])]


def test_histograms_reach_as_far_as_the_data() -> None:
    ax = Figure().add_subplot()
    figures.plot_histograms(ax, {"a": torch.tensor([[-3.0, 2.0]]), "b": torch.tensor([4.0])}, label="x")
    assert ax.get_xlim() == (-3.0, 4.0)
    assert [sum(bar.get_height() for bar in bars) for bars in ax.containers] == pytest.approx([1.0, 1.0])
    assert not any("outside" in name for name in names_in(ax))


def test_columns_of_one_are_flat() -> None:
    flat, column = Figure().add_subplot(), Figure().add_subplot()
    figures.plot_regression_band(flat, GRID, GRID, GRID - 1, GRID + 1, label="band", truth=GRID)
    tall = GRID[:, None]
    figures.plot_regression_band(column, tall, tall, tall - 1, tall + 1, label="band", truth=tall, points=(tall, tall))
    mine = {line.get_label(): line.get_xydata() for line in column.lines}
    for line in flat.lines:
        assert mine[line.get_label()] == pytest.approx(line.get_xydata())


def test_one_place_is_seen() -> None:
    """A line of one point shows nothing, and a band of no width neither."""
    for draw in (one_place, one_size, one_score):
        ax = Figure().add_subplot()
        draw(ax)
        assert all(line.get_marker() not in ("", "None") for line in ax.lines)
        left, right = ax.get_xlim()
        assert left < right
        assert all(collection.get_linewidth()[0] > 1 for collection in ax.collections)


@pytest.mark.parametrize("sizes", [[20], [20, 40], [100, 150, 200]])
def test_ticks_of_sizes_are_the_sizes_they_say(sizes: list[int]) -> None:
    ax = Figure().add_subplot()
    figures.plot_learning_curves(ax, {"a": (sizes, torch.rand(2, len(sizes)))})
    ticks = ax.xaxis.get_majorticklocs().tolist()
    assert [label.replace(",", "") for label in ax.xaxis.get_major_formatter().format_ticks(ticks)] == [
        f"{tick:g}" for tick in ticks
    ]


NAN = torch.full((20,), math.nan)
EMPTY = torch.zeros(0)


@pytest.mark.parametrize(
    ("draw", "sentence"),
    [
        *(
            (lambda ax, draw=draw: draw(ax, {}), "got nothing to draw; expected a name")
            for draw in (
                figures.plot_reliability,
                figures.plot_calibration_curve,
                figures.plot_risk_coverage,
                figures.plot_learning_curves,
            )
        ),
        (lambda ax: figures.plot_histograms(ax, {}, label="x"), "got nothing to draw"),
        (lambda ax: figures.plot_runtime(ax, {}, single=1.0), "got nothing to draw"),
        (lambda ax: figures.plot_corruption(ax, {}, label="error"), "got nothing to draw"),
        (lambda ax: figures.plot_coverage(ax, GRID, {}, level=0.9, num_sets=5), "got nothing to draw"),
        (lambda ax: figures.plot_histograms(ax, {"a": EMPTY}, label="x"), r"got a of shape \(0,\); expected \(N,\)"),
        (lambda ax: figures.plot_histograms(ax, {"a": NAN}, label="x"), "got NaN or infinite values in a; expected"),
        (
            lambda ax: figures.plot_histograms(ax, {"a": GRID}, label="x", bottom=1.0, top=1.0),
            "got a range from 1 to 1; expected bottom < top",
        ),
        (lambda ax: figures.plot_histograms(ax, {"a": GRID}, label="x", top=-2.0), "got a range from -1 to -2"),
        (
            lambda ax: figures.plot_regression_band(ax, GRID, NAN, GRID, GRID, label="band"),
            "got NaN or infinite values in mean",
        ),
        (
            lambda ax: figures.plot_regression_band(ax, EMPTY, EMPTY, EMPTY, EMPTY, label="band"),
            r"got x of shape \(0,\)",
        ),
        (
            lambda ax: figures.plot_regression_band(ax, torch.zeros(20, 2), GRID, GRID, GRID, label="band"),
            r"got x of shape \(20, 2\); expected \(N,\) or \(N, 1\)",
        ),
        (
            lambda ax: figures.plot_regression_band(ax, GRID, GRID[1:], GRID, GRID, label="band"),
            "got 20 of x, 19 of mean, 20 of low, 20 of high; expected as many of each",
        ),
        (lambda ax: figures.plot_coverage(ax, GRID, {"a": NAN}, level=0.9, num_sets=5), "got NaN or infinite"),
        (
            lambda ax: figures.plot_class_intervals(ax, ["a"], GRID, GRID, GRID, deterministic=GRID),
            "got 20 of probs, 20 of low, 20 of high, 20 of plain; expected 1 of each",
        ),
        (
            lambda ax: figures.plot_learning_curves(ax, {"a": ([10, 20], torch.rand(2))}),
            r"got a of shape \(2,\) for 2 sizes; expected \(trials, 2\)",
        ),
        (lambda ax: figures.plot_learning_curves(ax, {"a": ([10], NAN[:1, None])}), "got NaN or infinite values in a"),
        (
            lambda ax: figures.plot_corruption(ax, {"a": {0: math.nan}}, label="error"),
            "got NaN or infinite values in a",
        ),
        (lambda ax: figures.plot_bars(ax, ["a"], {}, label="F1"), "got nothing to draw"),
        (lambda ax: figures.plot_bars(ax, ["a", "b"], {"x": [[1.0]]}, label="F1"), "got 1 lists of x; expected 2, one"),
        (lambda ax: figures.plot_boxes(ax, ["a"], {"x": [[]]}, label="F1"), r"got x of shape \(0,\)"),
        (lambda ax: figures.plot_runtime(ax, {"a": {}}, single=1.0), r"got a of shape \(0,\); expected"),
    ],
)
def test_bad_calls_get_one_sentence(draw: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        draw(Figure().add_subplot())


def test_a_band_is_drawn_in_the_order_of_x() -> None:
    ax = Figure().add_subplot()
    shuffled = GRID[torch.randperm(20)]
    figures.plot_regression_band(ax, shuffled, shuffled**2, shuffled**2, shuffled**2, label="band")
    line = next(line for line in ax.lines if line.get_label() == "mean of the replicates")
    assert torch.tensor(line.get_xdata()).tolist() == pytest.approx(GRID.tolist())
    assert torch.tensor(line.get_ydata()).tolist() == pytest.approx((GRID**2).tolist())


def test_the_interval_of_a_learning_curve_is_students() -> None:
    ax = Figure().add_subplot()
    values = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
    figures.plot_learning_curves(ax, {"five trials": ([10], values)})
    low, high = ax.collections[0].get_datalim(ax.transData).intervaly
    half = 2.7764451 * float(values.std()) / 5**0.5
    assert (low, high) == pytest.approx((3 - half, 3 + half))


def test_bars_are_means_with_their_standard_deviation() -> None:
    ax = Figure().add_subplot()
    figures.plot_bars(ax, ["a", "b"], {"x": [[1.0, 3.0], [5.0]], "y": [[2.0], [2.0]]}, label="F1")
    drawn = [bar for bar in ax.patches if isinstance(bar, Rectangle)]
    assert [bar.get_height() for bar in drawn] == pytest.approx([2.0, 5.0, 2.0, 2.0])
    low, high = ax.collections[0].get_datalim(ax.transData).intervaly
    assert (low, high) == pytest.approx((2 - 2**0.5, 5.0))
    left = [bar.get_x() for bar in drawn]
    assert left[0] < left[2] < left[1] < left[3]  # side by side in each group


def test_boxes_reach_over_the_whole_range_with_a_mark_at_the_mean() -> None:
    ax = Figure().add_subplot()
    figures.plot_boxes(ax, ["0"], {"x": [[0.0, 1.0, 8.0]]}, label="accuracy")
    heights = [float(y) for line in ax.lines for y in torch.as_tensor(line.get_ydata()).flatten()]
    assert (min(heights), max(heights)) == (0.0, 8.0)
    assert ax.lines[-1].get_ydata() == pytest.approx([3.0])


def test_growth_is_drawn_from_the_least_size_with_means_and_ranges() -> None:
    ax = Figure().add_subplot()
    figures.plot_scaling(ax, {"a net": {100: [1.0, 3.0], 10: [0.5]}}, xlabel="n", ylabel="time / s", yscale="linear")
    assert torch.tensor(ax.lines[0].get_xdata()).tolist() == [10, 100]
    assert torch.tensor(ax.lines[0].get_ydata()).tolist() == [0.5, 2.0]
    assert ax.collections[0].get_datalim(ax.transData).intervaly.tolist() == [0.5, 3.0]


def test_predictions_tell_who_holds_the_truth() -> None:
    ax = Figure().add_subplot()
    y = torch.tensor([0.0, 1.0, 2.0])
    figures.plot_predictions(ax, y, y + 1, y - 0.5, y + torch.tensor([2.0, 2.0, -0.1]), name="a net", level=0.95)
    names = names_in(ax)
    assert names == ["perfect", "a net, 95 % interval holds the truth (2)", "a net, 95 % interval misses the truth (1)"]
    lines = {str(line.get_label()): list(line.get_xdata()) for line in ax.lines}
    assert lines[names[1]] == [0.0, 1.0]
    assert lines[names[2]] == [2.0]


def test_endless_intervals_are_drawn_to_the_edge() -> None:
    ax = Figure().add_subplot()
    endless = torch.full((3,), math.inf)
    figures.plot_predictions(ax, torch.arange(3.0), torch.arange(3.0), -endless, endless, name="a net", level=0.95)
    ends = [value for path in ax.collections[0].get_paths() for value in path.vertices[:, 1].tolist()]
    assert all(map(math.isfinite, ends))
    assert max(ends) > ax.get_ylim()[1]
    one = Figure().add_subplot()
    figures.plot_predictions(one, *[torch.tensor([2.0])] * 4, name="a net", level=0.95)
    assert one.get_xlim()[0] < 2 < one.get_xlim()[1]


def test_shares_are_of_all_inputs() -> None:
    ax = Figure().add_subplot()
    figures.plot_pit_histogram(ax, torch.tensor([30, 10, 0, 0]), name="a net", label="place")
    heights = [patch.get_height() for patch in ax.patches if isinstance(patch, Rectangle)][1:]  # the first is chance
    assert heights == [0.75, 0.25, 0.0, 0.0]
    with pytest.raises(ValueError, match="got no inputs in the bins of a net"):
        figures.plot_pit_histogram(ax, torch.zeros(4), name="a net", label="place")


def test_a_confusion_matrix_has_every_number_and_no_empty_cell() -> None:
    ax = Figure().add_subplot()
    figures.plot_confusion(ax, ["cat", "dog", "a name that is far too long"], torch.tensor([[1200, 3, 0]] * 3))
    written = [text.get_text() for text in ax.texts]
    assert written == ["1,200", "3"] * 3
    assert len(ax.patches) == 6
    assert [label.get_text() for label in ax.get_yticklabels()] == ["cat", "dog", "a name that is fa…"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("guess", "true class")
    with pytest.raises(ValueError, match=r"got a matrix of shape \(2, 2\) for 1 names"):
        figures.plot_confusion(ax, ["cat"], torch.eye(2))
