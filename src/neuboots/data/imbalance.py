"""Imbalanced training sets: a given number of rows of each class (paper, section 4.5 and figure 5).

Cui, Jia, Lin, Song and Belongie, Class-balanced loss based on effective number of samples, CVPR 2019 (exponential
counts).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from neuboots._prng import derive_keys, draw_uniform
from neuboots._validation import ArgumentError, check_int
from neuboots.loading import check_length, load_class_labels


def exponential_counts(largest: int, ratio: float, classes: int) -> list[int]:
    """Counts of a long-tailed data set: counts[c] = ⌊largest · ratio^(−c / (C − 1))⌋.

    Args:
        largest: Number of rows of class 0.
        ratio: Largest count divided by the smallest one, at least 1.
        classes: Number of classes C.

    Returns:
        Number of rows of each class.

    Raises:
        ArgumentError: If the last class would have no row.

    Example:
        >>> exponential_counts(5000, 100, 10)  # the usual long-tailed CIFAR-10
        [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    """
    check_int("largest", largest, minimum=1)
    check_int("classes", classes, minimum=1)
    if not 1 <= ratio < math.inf:
        raise ArgumentError("ratio", ratio, "a number of at least 1")
    fractions = [ratio ** (-c / max(1, classes - 1)) for c in range(classes)]
    counts = [math.floor(largest * fraction * (1 + 1e-12)) for fraction in fractions]  # 49.999… is 50, rounded
    if counts[-1] < 1:
        raise ArgumentError("ratio", ratio, f"at most {largest}, so that the last class has a row")
    return counts


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
