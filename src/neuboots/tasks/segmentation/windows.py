"""Sliding windows over an image or volume, and the one window that each pixel is taken from.

    owner(p) = argmax_k depth_k(p),   depth_k(p) = min distance from p to a border of window k inside the image

A border that the window shares with the image does not count: nothing lies behind it. Windows stand on a grid, so the
owner is found axis by axis, and the pixels of one owner are a box.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from neuboots.keys import whole

Box = tuple[Any, ...]  # slices


@dataclass(frozen=True)
class Tile:
    """A window of the image, the box of pixels that are taken from it, and the same box counted from its corner."""

    window: Box
    kept: Box
    inner: Box


def tiles_of(size: Sequence[int], window: Sequence[int], *, overlap: float) -> list[Tile]:
    """Windows that cover an image of this size, all equally large; each pixel is kept from one of them.

    >>> [(tile.window[0], tile.kept[0]) for tile in tiles_of((10,), (6,), overlap=0.3)]
    [(slice(0, 6, None), slice(0, 5, None)), (slice(4, 10, None), slice(5, 10, None))]
    """
    by_axis = [spans_of(length, width, overlap=overlap) for length, width in zip(size, window, strict=True)]
    return [
        Tile(
            tuple(slice(start, start + width) for (start, _, _), width in zip(spans, window, strict=True)),
            tuple(slice(begin, end) for _, begin, end in spans),
            tuple(slice(begin - start, end - start) for start, begin, end in spans),
        )
        for spans in product(*by_axis)
    ]


def spans_of(length: int, window: int, *, overlap: float) -> list[tuple[int, int, int]]:
    """Along one axis: where each window starts, and where the pixels taken from it begin and end.

    Neighbours share at least this fraction of a window; the last one is pushed back to end where the image ends. The
    step is rounded down to a multiple of the largest power of two that divides the window and is no wider than overlap
    and step, so that the windows of a net with strides start on its grid wherever they can.

    >>> spans_of(160, 64, overlap=0.25)
    [(0, 0, 56), (48, 56, 104), (96, 104, 160)]
    """
    shared = math.ceil(overlap * window - 1e-9)  # rounding adds no pixel
    step = max(1, window - shared)
    grid = window & -window  # the largest power of two that divides it
    while grid > max(1, min(shared, step)):
        grid //= 2
    step -= step % grid
    last = length - window
    starts = [*range(0, last, step), last]
    # Two windows are equally deep in the middle of what they share; there the first has the pixel.
    cuts = [(a + b + window - 1) // 2 + 1 for a, b in pairwise(starts)]
    return list(zip(starts, [0, *cuts], [*cuts, length], strict=True))


def window_for(size: Sequence[int], window: Any, *, overlap: float) -> tuple[int, ...]:
    """The window's size along each axis, never more than the image's, or a sentence.

    >>> window_for((100, 20), 64, overlap=0.25)
    (64, 20)
    """
    number = isinstance(overlap, int | float) and not isinstance(overlap, bool)
    if not number or not 0 <= overlap < 1:
        raise ValueError(f"got overlap={overlap!r}; expected a fraction of the window from 0 to below 1, such as 0.25")
    several = window if isinstance(window, Sequence) else [window] * len(size)
    widths = tuple(whole("window", width, least=1) for width in several)
    if len(widths) != len(size):
        raise ValueError(
            f"got a window of {len(widths)} axes, {widths}, for images of {tuple(size)}; expected one number for each "
            f"of the {len(size)} axes, or one number for all"
        )
    return tuple(min(length, width) for length, width in zip(size, widths, strict=True))
