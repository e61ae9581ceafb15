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

from neuboots.data.parts import Part
from neuboots.keys import seed_named

VARIABLE = "NEUBOOTS_DATA"


class Missing(ValueError):
    """A set that is in none of the places where it was looked for."""


class Corrupt(ValueError):
    """A file or a row that cannot be read."""


def missing(name: str, looked: Sequence[str | Path], how: str) -> Missing:
    """What to raise for a set that is not there.

    >>> print(missing("svhn", ["/data/svhn"], "copy it there"))
    the data set 'svhn' is not there: looked in /data/svhn; to get it, copy it there
    """
    return Missing(
        f"the data set {name!r} is not there: looked in {' and in '.join(map(str, looked))}; to get it, {how}"
    )


def corrupt(file: str | Path, fault: str) -> Corrupt:
    """What to raise for a file, or a row of a set, that cannot be read.

    >>> print(corrupt("cats/7.png", "it holds no image"))
    cannot read cats/7.png: it holds no image; expected a whole file: fetch it again, or remove it
    """
    return Corrupt(f"cannot read {file}: {fault}; expected a whole file: fetch it again, or remove it")


def root_of(root: str | Path | None) -> Path | None:
    """The folder of all sets: the argument, else the environment variable NEUBOOTS_DATA, else None, the hub."""
    given, where = (root, "root") if root is not None else (os.environ.get(VARIABLE) or None, VARIABLE)
    if given is None:
        return None
    if not isinstance(given, str | os.PathLike):
        raise ValueError(f"got {where}={given!r}; expected the folder that holds the data sets, as a path")
    path = Path(os.path.expanduser(given))
    if not os.fspath(given) or not path.is_dir():  # Path("") would be the folder where the program runs
        raise Missing(f"got {where}={str(given)!r}, which is no folder; expected the folder that holds the data sets")
    return path


def need(module: str, extra: str = "data") -> ModuleType:
    """The library of this name, or a sentence that says how to get it.

    >>> need("math").sqrt(4.0)
    2.0
    """
    try:
        return importlib.import_module(module)
    except ImportError as fault:
        raise ImportError(
            f"this needs {module.split('.')[0]}, which could not be imported ({fault}): pip install 'neuboots[{extra}]'"
        ) from None


def split_off(part: Part, share: float, *, seed: int, strata: Tensor | None = None) -> tuple[Part, Part | None]:
    """(the rest, a share of the rows for validation), drawn by the seed; of each class of `strata` (n,) the same share.

    >>> from neuboots.data.parts import Tensors
    >>> whole = Part(Tensors(torch.zeros(20, 1), torch.arange(20) % 2))
    >>> rest, validation = split_off(whole, 0.2, seed=0, strata=whole.targets)
    >>> len(rest), sorted(validation.targets.tolist())
    (16, [0, 0, 1, 1])
    """
    share = checked_share(share)
    if share == 0:
        return part, None
    n = len(part)
    if n < 2:
        raise ValueError(f"got validation={share:g} of {n} rows; expected at least two rows, or validation=0")
    if strata is not None and strata.shape != (n,):
        raise ValueError(f"got strata of shape {tuple(strata.shape)} for {n} rows; expected one class for each")
    order = torch.randperm(n, generator=generator_named("validation", seed))
    if strata is not None:
        order = order[strata.cpu()[order].argsort(stable=True)]  # class by class, each in an order of its own
    size = min(max(1, round(share * n)), n - 1)
    apart = torch.zeros(n, dtype=torch.bool)
    apart[order[((torch.arange(size) + 0.5) * (n / size)).long()]] = True  # evenly spaced: so many of every class
    return part.take((~apart).nonzero()[:, 0].tolist()), part.take(apart.nonzero()[:, 0].tolist())


def checked_share(share: Any) -> float:
    """A share of the training rows for validation, in [0, 1)."""
    if isinstance(share, bool | str) or not hasattr(share, "__float__") or not 0 <= float(share) < 1:  # NaN fails too
        raise ValueError(f"got validation={share!r}; expected a share of the training rows from 0 to below 1")
    return float(share)


def generator_named(*name: str | int) -> torch.Generator:
    """A generator of this name: the same on every machine."""
    return torch.Generator().manual_seed(seed_named(*name))
