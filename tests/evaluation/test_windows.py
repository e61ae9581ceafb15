"""Sliding windows: every pixel has one owner, and it is a window in which no other lies deeper."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuboots.evaluation.segmentation.predict import Tile, clip_window, make_spans, make_tiles

many = settings(deadline=None, max_examples=60, derandomize=True)
axes = st.integers(1, 23).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length)))
overlaps = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.75, 0.95])


def depth(tile: Tile, pixel: tuple[int, ...], size: tuple[int, ...]) -> float:
    """Pixel by pixel: steps to the nearest border of the window that is not the image's; −1 outside the window."""
    found = math.inf
    for window, at, length in zip(tile.window, pixel, size, strict=True):
        if not window.start <= at < window.stop:
            return -1
        if window.start > 0:
            found = min(found, at - window.start)
        if window.stop < length:
            found = min(found, window.stop - 1 - at)
    return found


@many
@given(st.lists(axes, min_size=1, max_size=2), overlaps)
def test_each_pixel_is_kept_once_from_a_window_in_which_it_lies_deepest(
    sizes: list[tuple[int, int]], overlap: float
) -> None:
    size, window = (tuple(part) for part in zip(*sizes, strict=True))
    tiles = make_tiles(size, window, overlap=overlap)
    for pixel in itertools.product(*map(range, size)):
        owners = [t for t in tiles if all(box.start <= at < box.stop for box, at in zip(t.kept, pixel, strict=True))]
        assert len(owners) == 1, pixel
        assert depth(owners[0], pixel, size) == max(depth(tile, pixel, size) for tile in tiles), pixel


@many
@given(axes, overlaps)
def test_windows_are_equally_wide_and_share_what_they_must(axis: tuple[int, int], overlap: float) -> None:
    length, window = axis
    spans = make_spans(length, window, overlap=overlap)
    starts = [start for start, _, _ in spans]
    assert starts[0] == 0
    assert starts[-1] + window == length
    for a, b in itertools.pairwise(starts):
        shared = a + window - b
        assert b > a
        assert shared >= min(math.ceil(overlap * window - 1e-9), window - 1)
        margin = shared // 2  # what every pixel kept from either window has on that side
        end = next(end for start, _, end in spans if start == a)
        assert a + window - end >= margin
        assert end - b >= margin


def test_boxes_are_counted_from_the_image_and_from_the_window() -> None:
    size = (9, 14, 11)
    image = torch.arange(math.prod(size)).view(size)
    for tile in make_tiles(size, (4, 8, 11), overlap=0.5):
        assert torch.equal(image[tile.window][tile.inner], image[tile.kept])


@pytest.mark.parametrize(
    ("length", "window", "overlap", "starts"),
    [
        (160, 64, 0.25, [0, 48, 96]),  # a multiple of 16
        (192, 96, 0.25, [0, 64, 96]),  # 72 would be no multiple of 16
        (100, 50, 0.0, [0, 50]),
        (101, 50, 0.0, [0, 50, 51]),
        (7, 7, 0.5, [0]),
        (5, 1, 0.0, [0, 1, 2, 3, 4]),
        (20, 10, 0.99, list(range(11))),
    ],
)
def test_windows_start_on_the_grid_of_a_net_with_strides(
    length: int, window: int, overlap: float, starts: list[int]
) -> None:
    assert [start for start, _, _ in make_spans(length, window, overlap=overlap)] == starts


def test_an_image_smaller_than_the_window_is_taken_whole() -> None:
    assert clip_window((40, 100), (64, 64), overlap=0.25) == (40, 64)
    (tile,) = make_tiles((40, 30), clip_window((40, 30), 64, overlap=0.25), overlap=0.25)
    assert tile.window == tile.kept == tile.inner == (slice(0, 40), slice(0, 30))


@pytest.mark.parametrize(
    ("window", "overlap", "sentence"),
    [
        ((64, 64, 64), 0.25, "a window of 3 axes.*expected one number for each of the 2 axes"),
        (0, 0.25, "got window=0; expected a whole number, at least 1"),
        ((8, 2.5), 0.25, "got window=2.5; expected a whole number"),
        (True, 0.25, "got window=True"),
        ("64", 0.25, "got window='6'"),
        (64, 1.0, "got overlap=1.0; expected a fraction of the window from 0 to below 1"),
        (64, -0.1, "got overlap=-0.1"),
        (64, 16, "got overlap=16"),
        (64, math.nan, "got overlap=nan"),
        (64, "half", "got overlap='half'"),
    ],
)
def test_windows_that_make_no_sense_are_refused(window: object, overlap: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        clip_window((100, 100), window, overlap=overlap)  # type: ignore[arg-type]
