"""Train, validation and test splits: random, stratified by class, a function of (seed, number of rows) alone.

Rows are ordered by class and, within a class, at random; a split takes rows at even distances in that order, so that
each class has the same fraction in each split up to rounding. Unlike scikit-learn's stratified splitters, a class may
have a single row, which stays in the training split.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuboots._prng import derive_seed
from neuboots._validation import ArgumentError, check_fraction, check_int

if TYPE_CHECKING:
    from neuboots.data.dataset import LazyDataset

TRAIN, VALIDATION, TEST = 0, 1, 2


def train_val_test_split(
    n: int, val_fraction: float, test_fraction: float | Tensor, *, seed: int, strata: Tensor | None = None
) -> Tensor:
    """Assign each of n rows to the training, validation or test split.

    Args:
        n: Number of rows.
        val_fraction: Fraction of the rows that are not in the test split.
        test_fraction: Fraction of all rows, or the indices of the test rows.
        seed: Random seed.
        strata: Class of each row (n,). Each class has the same fraction in each split up to rounding, and at least one
            row in the training split.

    Returns:
        Split of each row, 0 (training), 1 (validation) or 2 (test): (n,), uint8.

    Raises:
        ArgumentError: If there are too few rows to leave one of each class for training.

    Example:
        >>> split = train_val_test_split(20, 0.25, 0.2, seed=0, strata=torch.arange(20) % 2)
        >>> split.bincount().tolist(), split[::2].bincount().tolist()
        ([12, 4, 4], [6, 2, 2])
    """
    split, seed = torch.zeros(n, dtype=torch.uint8), check_int("seed", seed)
    if isinstance(test_fraction, Tensor):
        split[test_fraction] = TEST
    else:
        split[_draw_rows(n, test_fraction, "test", seed, strata)] = TEST
    rest = (split == TRAIN).nonzero()[:, 0]
    drawn = _draw_rows(len(rest), val_fraction, "validation", seed, None if strata is None else strata[rest])
    split[rest[drawn]] = VALIDATION
    return split


def _draw_rows(
    n: int, fraction: float, name: str, seed: int, strata: Tensor | None, *, keep_one: bool = True
) -> Tensor:
    """Indices of a random fraction of n rows; with `keep_one`, never the first one of each class."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed(name, seed)))
    classes = torch.zeros(n) if strata is None else strata.cpu()
    order = order[classes[order].argsort(stable=True)]
    if keep_one:
        order = order[classes[order].diff(prepend=classes[order][:1] - 1) == 0]
    size = max(1, round(fraction * n)) if fraction > 0 else 0
    if size > len(order) - (not keep_one):
        raise ArgumentError(
            f"{'val' if name == 'validation' else name}_fraction",
            fraction,
            f"a fraction of {n} rows that leaves one of each class for training",
            hint="add rows, or use a smaller fraction",
        )
    return order[((torch.arange(size) + 0.5) * (len(order) / max(1, size))).long()]


def hold_out(
    dataset: "LazyDataset", fraction: float, *, seed: int, strata: Tensor | None = None
) -> tuple["LazyDataset", "LazyDataset | None"]:
    """Split a random fraction off a data set.

    Args:
        dataset: The data set to split.
        fraction: Fraction of its rows to hold out; 0 holds out none.
        seed: Random seed.
        strata: Class of each row (n,), for a stratified split.

    Returns:
        The remaining rows, and those held out (None if `fraction` is 0), both in the order of the data set.

    Raises:
        ArgumentError: If no row would remain.

    Example:
        >>> from neuboots.data.dataset import LazyDataset, TensorSource
        >>> dataset = LazyDataset(TensorSource(torch.zeros(20, 1), torch.arange(20) % 2))
        >>> rest, held_out = hold_out(dataset, 0.2, seed=0, strata=dataset.targets)
        >>> len(rest), sorted(held_out.targets.tolist())
        (16, [0, 0, 1, 1])
    """
    if check_fraction("val_fraction", fraction, zero=True) == 0:
        return dataset, None
    drawn = torch.zeros(len(dataset), dtype=torch.bool)
    drawn[_draw_rows(len(dataset), fraction, "validation", seed, strata, keep_one=False)] = True
    return dataset.take((~drawn).nonzero()[:, 0]), dataset.take(drawn.nonzero()[:, 0])


def complete_splits(
    splits: Mapping[str, "LazyDataset"], *, val_fraction: float, test_fraction: float, seed: int, stratify: bool = False
) -> tuple["LazyDataset", "LazyDataset | None", "LazyDataset | None"]:
    """Hold out the splits that a data set does not have.

    Args:
        splits: The existing splits by name; "train" is among them.
        val_fraction: Fraction of the training rows for "validation", if that split does not exist.
        test_fraction: Fraction of the training rows for "test", if that split does not exist.
        seed: Random seed.
        stratify: Whether each class has the same fraction in each split.

    Returns:
        Training, validation and test split; None for one that does not exist and whose fraction is 0.

    Raises:
        ArgumentError: If the fractions leave no row for training.
    """
    fractions = {"validation": val_fraction, "test": test_fraction}
    for name, argument in (("validation", "val_fraction"), ("test", "test_fraction")):
        check_fraction(argument, fractions[name], zero=True)
    missing = {name: float(fraction) for name, fraction in fractions.items() if name not in splits}
    if sum(missing.values()) >= 1:
        raise ArgumentError("val_fraction", val_fraction, f"below 1 together with test_fraction={test_fraction}")
    found: dict[str, Any] = dict(splits)
    remaining = 1.0
    for name in ("test", "validation"):
        if name in missing:
            strata = found["train"].targets if stratify else None
            fraction = missing[name] / remaining
            found["train"], found[name] = hold_out(
                found["train"], fraction, seed=check_int("seed", seed), strata=strata
            )
            remaining -= missing[name]
    return found["train"], found["validation"], found["test"]
