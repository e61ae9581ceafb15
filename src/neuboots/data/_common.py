"""Errors, the data root, optional imports and random splits that all data modules share."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from neuboots._prng import derive_seed
from neuboots._validation import ArgumentError, check_int

DATA_ROOT_VARIABLE = "NEUBOOTS_DATA"
NO_DATA_ROOT = f"no data root (neither root=... nor the environment variable {DATA_ROOT_VARIABLE} is set)"

SPLIT_NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing"),
}
"""Each split with the names that its files or its folder may have."""

TRAIN, VALIDATION, TEST = 0, 1, 2  # splits of rows

_T = TypeVar("_T")


class DatasetNotFoundError(ValueError):
    """A data set, a folder or a file that is not where it is expected."""

    @classmethod
    def for_dataset(cls, name: str, searched: Sequence[str | Path], hint: str) -> "DatasetNotFoundError":
        """Error for a named data set.

        Args:
            name: Name of the data set.
            searched: The places where it was searched.
            hint: How to get it.

        Returns:
            The error to raise.
        """
        return cls(f"Data set {name!r} not found in {' or '.join(map(str, searched))}. To get it, {hint}.")


class CorruptFileError(ValueError):
    """A file, or a row of a file, that cannot be read.

    Attributes:
        file: The file, or a description of the row.
        reason: What is wrong with it.

    Example:
        >>> print(CorruptFileError("cats/7.png", "not an image"))
        Cannot read cats/7.png: not an image. Download the file again or remove it.
    """

    def __init__(self, file: str | Path, reason: str, hint: str = "Download the file again or remove it.") -> None:
        """Store the fields.

        Args:
            file: The file, or a description of the row.
            reason: What is wrong with it.
            hint: What to do about it.
        """
        super().__init__(file, reason, hint)
        self.file, self.reason, self.hint = file, reason, hint

    def __str__(self) -> str:
        return f"Cannot read {self.file}: {self.reason}. {self.hint}"


def resolve_data_root(root: str | Path | None) -> Path | None:
    """Folder that holds all data sets: the argument, else the environment variable; None stands for the hub."""
    given, name = (root, "root") if root is not None else (os.environ.get(DATA_ROOT_VARIABLE), DATA_ROOT_VARIABLE)
    if given is None or (root is None and not given):
        return None
    if not isinstance(given, str | os.PathLike):
        raise ArgumentError(name, given, "the path of the folder that holds the data sets")
    path = Path(given).expanduser()
    if not os.fspath(given) or not path.is_dir():  # Path("") would be the working directory
        raise DatasetNotFoundError(f"{name}={str(given)!r} is not a folder.")
    return path


def import_optional(module: str, extra: str = "data") -> ModuleType:
    """Import a module of an optional dependency, with an install hint if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ImportError(f"{package} is required ({error}): pip install 'neuboots[{extra}]'") from None


def identity(x: _T) -> _T:
    """Return x; unlike a lambda, it can be sent to worker processes."""
    return x


def format_names(names: Sequence[object], max_names: int = 8, *, max_length: int = 60) -> str:
    """Join quoted names, at most `max_names` of them, each cut to `max_length` characters."""
    texts = [str(name) for name in names[:max_names]]
    shown = ", ".join(repr(text if len(text) <= max_length else f"{text[: max_length - 1]}…") for text in texts)
    return shown + (f" and {len(names) - max_names:,} more" if len(names) > max_names else "")


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
        split[draw_rows(n, test_fraction, "test", seed, strata)] = TEST
    rest = (split == TRAIN).nonzero()[:, 0]
    drawn = draw_rows(len(rest), val_fraction, "validation", seed, None if strata is None else strata[rest])
    split[rest[drawn]] = VALIDATION
    return split


def draw_rows(n: int, fraction: float, name: str, seed: int, strata: Tensor | None, *, keep_one: bool = True) -> Tensor:
    """Draw a random fraction of n rows, stratified; with `keep_one`, one row of each class is never drawn.

    Rows are ordered by class and, within a class, at random, and taken at even distances in that order.
    """
    classes = torch.zeros(n) if strata is None else strata.cpu()
    if classes.shape != (n,):
        raise ArgumentError("strata", f"a tensor of shape {tuple(classes.shape)}", f"one class for each of {n} rows")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(derive_seed(name, seed)))
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
