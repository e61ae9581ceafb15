"""Inputs of a net by their rows: a tensor, a tuple of tensors or a dict of them.

Parts that have not a row for each input, such as positions (1, T) beside images (N, …), stay as they are.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_TRIED = 16  # rows on which something is tried


def count_rows(x: Any) -> int:
    """N of inputs; a part of one row may serve all rows of the others.

    >>> count_rows((torch.zeros(1, 4), torch.zeros(3, 2))), count_rows(torch.zeros(1, 4))
    (3, 1)
    """
    lengths = [len(part) for part in tree_leaves(_plain(x)) if isinstance(part, Tensor) and part.ndim]
    return next((length for length in lengths if length != 1), min(1, len(lengths)))


def take_rows(x: Any, rows: slice | Tensor) -> Any:
    """These rows of the inputs."""
    return _of_rows(lambda part: part[rows], x)


def tile_rows(x: Any, times: int) -> Any:
    """The rows of the inputs, `times` times behind one another."""
    return _of_rows(lambda part: part.repeat(times, *[1] * (part.ndim - 1)), x)


def sample_rows(x: Any) -> Any:
    """A few rows from all over the inputs, on which to try what a net does."""
    n = count_rows(x)
    return take_rows(x, torch.linspace(0, n - 1, min(_TRIED, n)).round().long())


def row_slices(n: int, at_once: int) -> list[slice]:
    """So many rows at a time; no row is left by itself, which a net may squeeze away.

    >>> row_slices(5, 2), row_slices(0, 2)
    ([slice(0, 2, None), slice(2, 5, None)], [slice(0, 0, None)])
    """
    starts = [start for start in range(0, max(1, n), max(1, at_once)) if start == 0 or start < n - 1]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], n], strict=True)]


def _of_rows(change: Callable[[Tensor], Tensor], x: Any) -> Any:
    n = count_rows(x)
    return tree_map(
        lambda part: change(part) if isinstance(part, Tensor) and part.ndim and len(part) == n else part, _plain(x)
    )


def _plain(x: Any) -> Any:
    """A mapping as a dict, whatever its class: torch looks into no other."""
    return dict(x) if isinstance(x, Mapping) else x


def map_float_tensors(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """The function on every floating-point tensor of the inputs."""
    if isinstance(x, Mapping):
        return {key: map_float_tensors(function, value) for key, value in x.items()}
    if isinstance(x, tuple | list):
        return type(x)(map_float_tensors(function, value) for value in x)
    return function(x) if x.is_floating_point() else x
