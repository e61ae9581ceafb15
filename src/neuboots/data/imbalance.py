"""Imbalanced training sets: a given number of rows of each class (paper, section 4.5 and figure 5)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from neuboots._prng import derive_keys, draw_uniform
from neuboots._validation import ArgumentError, check_int
from neuboots.loading import check_length, load_class_labels


def subsample_classes(data: Dataset[Any], counts: Sequence[int] | Mapping[int, int], *, seed: int = 0) -> "Subset[Any]":
    """Random subset with a given number of rows of each class, in the order of the data.

    With one seed, the rows of smaller counts are among those of larger ones.

    Args:
        data: Classification data set with a length.
        counts: Number of rows of each class; a mapping excludes the classes that it does not name.
        seed: Random seed.

    Returns:
        The subset.

    Raises:
        ArgumentError: If a class has fewer rows than its count, or no row is left.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> labels = torch.arange(30) % 3
        >>> few = subsample_classes(TensorDataset(torch.zeros(30, 2), labels), [1, 5, 10])
        >>> labels[few.indices].bincount()
        tensor([ 1,  5, 10])
    """
    check_length(data)
    labels = load_class_labels(data)
    if not isinstance(counts, Mapping) and int(labels.max()) >= len(counts):
        raise ArgumentError("counts", counts, f"a count for each class 0 ... {int(labels.max())}, or a mapping")
    keys = derive_keys(torch.arange(len(labels)), check_int("seed", seed), "long tail")
    order = draw_uniform(keys, torch.zeros_like(keys)).argsort()
    selected = []
    for c, value in counts.items() if isinstance(counts, Mapping) else enumerate(counts):
        rows, count = order[labels[order] == c], check_int(f"counts[{c}]", value, minimum=0)
        if count > len(rows):
            raise ArgumentError(f"counts[{c}]", count, f"at most {len(rows)}, the number of rows of class {c}")
        selected.append(rows[:count])
    if not sum(map(len, selected)):
        raise ArgumentError("counts", counts, "at least one row")
    return Subset(data, torch.cat(selected).sort().values.tolist())
