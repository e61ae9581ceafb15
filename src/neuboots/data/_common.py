"""Where a data set lies: the data root that was given, else the environment's, else the hub.

    root = argument, else $NEUBOOTS_DATA, else none: the Hugging Face hub

What is not there or cannot be read is said in one sentence: which set, where it was looked for, and how to get it.
"""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from neuboots._prng import derive_seed


def identity(x: Tensor) -> Tensor:
    """x, for data that need no normalisation."""
    return x


DATA_ROOT_VARIABLE = "NEUBOOTS_DATA"


class DatasetNotFoundError(ValueError):
    """A set that is in none of the places where it was looked for."""


class CorruptFileError(ValueError):
    """A file or a row that cannot be read."""


def not_found_error(name: str, looked: Sequence[str | Path], how: str) -> DatasetNotFoundError:
    """What to raise for a set that is not there.

    >>> print(not_found_error("svhn", ["/data/svhn"], "copy it there"))
    the data set 'svhn' is not there: looked in /data/svhn; to get it, copy it there
    """
    return DatasetNotFoundError(
        f"the data set {name!r} is not there: looked in {' and in '.join(map(str, looked))}; to get it, {how}"
    )


def corrupt_file_error(file: str | Path, fault: str) -> CorruptFileError:
    """What to raise for a file, or a row of a set, that cannot be read.

    >>> print(corrupt_file_error("cats/7.png", "it holds no image"))
    cannot read cats/7.png: it holds no image; expected a whole file: fetch it again, or remove it
    """
    return CorruptFileError(f"cannot read {file}: {fault}; expected a whole file: fetch it again, or remove it")


def resolve_data_root(root: str | Path | None) -> Path | None:
    """The folder of all sets: the argument, else the environment variable NEUBOOTS_DATA, else None, the hub."""
    given, where = (
        (root, "root") if root is not None else (os.environ.get(DATA_ROOT_VARIABLE) or None, DATA_ROOT_VARIABLE)
    )
    if given is None:
        return None
    if not isinstance(given, str | os.PathLike):
        raise ValueError(f"got {where}={given!r}; expected the folder that holds the data sets, as a path")
    path = Path(os.path.expanduser(given))
    if not os.fspath(given) or not path.is_dir():  # Path("") would be the folder where the program runs
        raise DatasetNotFoundError(
            f"got {where}={str(given)!r}, which is no folder; expected the folder that holds the data sets"
        )
    return path


def import_optional(module: str, extra: str = "data") -> ModuleType:
    """The library of this name, or a sentence that says how to get it.

    >>> import_optional("math").sqrt(4.0)
    2.0
    """
    try:
        return importlib.import_module(module)
    except ImportError as fault:
        raise ImportError(
            f"this needs {module.split('.')[0]}, which could not be imported ({fault}): pip install 'neuboots[{extra}]'"
        ) from None


def check_fraction(share: Any) -> float:
    """A share of the training rows for validation, in [0, 1)."""
    if isinstance(share, bool | str) or not hasattr(share, "__float__") or not 0 <= float(share) < 1:  # NaN fails too
        raise ValueError(f"got validation={share!r}; expected a share of the training rows from 0 to below 1")
    return float(share)


def named_generator(*name: str | int) -> torch.Generator:
    """A generator of this name: the same on every machine."""
    return torch.Generator().manual_seed(derive_seed(*name))
