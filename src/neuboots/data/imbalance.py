"""Imbalanced training sets: counts[c] rows of class c.

Paper, section 4.5 and figure 5. Cui, Jia, Lin, Song and Belongie, Class-balanced loss based on effective number of
samples, CVPR 2019 (exponential counts).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from neuboots._prng import derive_keys, draw_uniform
from neuboots._validation import check_int
from neuboots.loading import check_length, load_class_labels


def exponential_counts(largest: int, ratio: float, classes: int) -> list[int]:
    """counts[c] = ⌊largest · ratio^(−c / (C − 1))⌋: from `largest` rows of class 0 down to largest / ratio of the last.

    >>> exponential_counts(5000, 100, 10)  # the usual long-tailed CIFAR-10
    [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    """
    if largest < 1 or classes < 1 or not 1 <= ratio < math.inf:
        raise ValueError(
            f"got largest={largest}, ratio={ratio}, classes={classes}; expected at least one row and one class, and "
            "ratio ≥ 1, the largest count divided by the smallest"
        )
    shares = [ratio ** (-c / max(1, classes - 1)) for c in range(classes)]
    counts = [math.floor(largest * share * (1 + 1e-12)) for share in shares]  # 49.999… is 50, rounded
    if counts[-1] < 1:
        raise ValueError(
            f"got ratio={ratio} for largest={largest}; expected at most {largest}: the last class has no row"
        )
    return counts


def subsample_classes(data: Dataset[Any], counts: Sequence[int] | Mapping[int, int], *, seed: int = 0) -> "Subset[Any]":
    """counts[c] random rows of each class c, in the order of the data; a mapping takes only the classes it names.

    Counts are whole numbers in a list, an array or a tensor; labels may be floats, if they are whole. With one seed the
    rows of smaller counts are among those of larger ones.

    >>> from torch.utils.data import TensorDataset
    >>> labels = torch.arange(30) % 3
    >>> few = subsample_classes(TensorDataset(torch.zeros(30, 2), labels), [1, 5, 10])
    >>> labels[few.indices].bincount()
    tensor([ 1,  5, 10])
    """
    check_length(data)
    labels = load_class_labels(data)
    wanted = dict(counts) if isinstance(counts, Mapping) else dict(enumerate(counts))
    if not isinstance(counts, Mapping) and int(labels.max()) >= len(counts):
        raise ValueError(
            f"got counts for {len(counts)} classes and data with class {int(labels.max())}; expected a count for each "
            "class: a mapping such as {0: 50, 3: 500} takes some of them"
        )
    keys = derive_keys(torch.arange(len(labels)), check_int("seed", seed), "long tail")
    order = draw_uniform(keys, torch.zeros_like(keys)).argsort()
    chosen = []
    for c, value in wanted.items():
        rows, count = order[labels[order] == c], check_int(f"counts[{c}]", value, minimum=0)
        if count > len(rows):
            raise ValueError(f"got counts[{c}]={count} for data with {len(rows)} rows of class {c}; expected no more")
        chosen.append(rows[:count])
    indices = torch.cat(chosen).sort().values if chosen else torch.zeros(0)
    if len(indices) == 0:
        raise ValueError(f"got counts={counts}, which leave no row; expected at least one")
    return Subset(data, indices.tolist())
