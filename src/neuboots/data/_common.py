"""Errors and the data root that all data modules share."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

DATA_ROOT_VARIABLE = "NEUBOOTS_DATA"
NO_DATA_ROOT = f"no data root (neither root=... nor the environment variable {DATA_ROOT_VARIABLE} is set)"

SPLIT_NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing"),
}
"""Each split with the names that its files or its folder may have."""

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
    given = os.environ.get(DATA_ROOT_VARIABLE) or None if root is None else root
    return None if given is None else check_folder(given, "the folder that holds the data sets")


def check_folder(path: str | os.PathLike[str], expected: str) -> Path:
    """Return a folder that exists.

    Args:
        path: Path of the folder.
        expected: What it should contain, for the error message.

    Returns:
        The path.

    Raises:
        DatasetNotFoundError: If it is not a folder.
    """
    folder = Path(path).expanduser()
    if not os.fspath(path) or not folder.is_dir():  # Path("") would be the working directory
        state = "is a file" if folder.is_file() else "does not exist"
        raise DatasetNotFoundError(f"{os.fspath(path)!r} {state}; expected {expected}.")
    return folder


def match_splits(found: Mapping[str, _T]) -> dict[str, _T]:
    """Find the splits among named files, folders or tables.

    Args:
        found: What was found, by name.

    Returns:
        What belongs to each split, in the order of `SPLIT_NAMES`.

    Raises:
        ValueError: If a split occurs twice.
    """
    matched = dict[str, _T]()
    for split, names in SPLIT_NAMES.items():
        same = [name for name in found if name.lower() in names]
        if len(same) > 1:
            raise ValueError(f"The split {split!r} occurs as {' and as '.join(same)}; expected one of them.")
        if same:
            matched[split] = found[same[0]]
    return matched


def first_line(error: BaseException) -> str:
    """First line of an error message, without its period; the type if there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")[:200]


def identity(x: _T) -> _T:
    """Return x; unlike a lambda, it can be sent to worker processes."""
    return x
