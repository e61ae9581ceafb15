"""Operations on the inputs of a net: a tensor, or a tuple, list or dict of tensors (a pytree).

The rows of an input are its examples, on the first axis. A part that does not have one row per example, such as
positions (1, T) beside images (N, …), is shared by all rows and stays unchanged.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_PROBE_ROWS = 16


def as_tree(x: Any) -> Any:
    """Return any mapping as a dict, the only mapping that torch's pytree functions traverse."""
    return dict(x) if isinstance(x, Mapping) else x


def count_rows(x: Any) -> int:
    """Return the number of rows N; parts of one row may be shared by all rows of the others.

    >>> count_rows((torch.zeros(1, 4), torch.zeros(3, 2))), count_rows(torch.zeros(1, 4))
    (3, 1)
    """
    lengths = [len(part) for part in tree_leaves(as_tree(x)) if isinstance(part, Tensor) and part.ndim]
    return next((length for length in lengths if length != 1), min(1, len(lengths)))


def map_rows(function: Callable[[Tensor], Any], x: Any) -> Any:
    """Apply a function to every tensor that has one row per example."""
    n = count_rows(x)
    return tree_map(
        lambda part: function(part) if isinstance(part, Tensor) and part.ndim and len(part) == n else part, as_tree(x)
    )


def take_rows(x: Any, rows: slice | Tensor) -> Any:
    """Select rows by a slice or an index tensor."""
    return map_rows(lambda part: part[rows], x)


def tile_rows(x: Any, times: int) -> Any:
    """Repeat the rows `times` times, as `torch.tile` does along the first axis."""
    return map_rows(lambda part: part.repeat(times, *[1] * (part.ndim - 1)), x)


def sample_rows(x: Any) -> Any:
    """Select up to 16 evenly spaced rows, to probe what a net does with them."""
    n = count_rows(x)
    return take_rows(x, torch.linspace(0, n - 1, min(_PROBE_ROWS, n)).round().long())


def row_slices(n: int, size: int) -> list[slice]:
    """Split n rows into slices of `size` rows; the last slice never has a single row, which a net may squeeze away.

    >>> row_slices(5, 2), row_slices(0, 2)
    ([slice(0, 2, None), slice(2, 5, None)], [slice(0, 0, None)])
    """
    starts = [start for start in range(0, max(1, n), max(1, size)) if start == 0 or start < n - 1]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], n], strict=True)]


def float_tensors(x: Any) -> list[Tensor]:
    """Return the floating-point tensors of an input."""
    return [part for part in tree_leaves(as_tree(x)) if isinstance(part, Tensor) and part.is_floating_point()]


def map_float_tensors(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """Apply a function to every floating-point tensor, in the order of `float_tensors`."""
    return tree_map(
        lambda part: function(part) if isinstance(part, Tensor) and part.is_floating_point() else part, as_tree(x)
    )
