"""neuboots.data.splits"""

from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuboots._validation import check_int
from neuboots.data._common import check_fraction, named_generator

if TYPE_CHECKING:
    from neuboots.data.dataset import LazyDataset


def train_val_test_split(
    n: int, val_fraction: float, test_fraction: float | Tensor, *, seed: int, strata: Tensor | None = None
) -> Tensor:
    """The part of each row: 0 training, 1 validation, 2 test; drawn by the seed: (n,) bytes.

    `test` is a share of the rows or their numbers, `validation` a share of the others. Of every class of `strata` (n,)
    the same share is taken, as nearly as can be, and at least one row is left to train with.

    >>> part = train_val_test_split(20, 0.25, 0.2, seed=0, strata=torch.arange(20) % 2)
    >>> [int((part == k).sum()) for k in range(3)], part[::2].bincount().tolist()
    ([12, 4, 4], [6, 2, 2])
    """
    part, seed = torch.zeros(n, dtype=torch.uint8), check_int("seed", seed)
    if isinstance(test_fraction, Tensor):
        part[test_fraction] = 2
    else:
        part[_draw_rows(torch.arange(n), test_fraction, "test", seed, strata)] = 2
    rest = (part == 0).nonzero()[:, 0]
    part[_draw_rows(rest, val_fraction, "validation", seed, None if strata is None else strata[rest])] = 1
    return part


def _draw_rows(rows: Tensor, share: float, name: str, seed: int, strata: Tensor | None) -> Tensor:
    """A share of the rows, at even distances once they are ordered by class and, within a class, by chance."""
    order = torch.randperm(len(rows), generator=named_generator(name, seed))
    classes = torch.zeros(len(rows)) if strata is None else strata
    order = order[classes[order].argsort(stable=True)]
    first = classes[order].diff(prepend=classes[order][:1] - 1) != 0  # of its class: it stays
    free = order[~first]
    size = round(share * len(rows)) if len(rows) * share >= 1 else int(share > 0)
    if size > len(free):
        raise ValueError(
            f"got {name}={share:g} of {len(rows)} rows in {int(first.sum())} class(es); expected enough rows to leave "
            f"one of each class to train with: add rows, or give {name}=0"
        )
    places = ((torch.arange(size) + 0.5) * (len(free) / max(1, size))).long()
    return rows[free[places]]


def complete_splits(
    parts: "Mapping[str, LazyDataset]", *, val_fraction: Any, test_fraction: Any, seed: int, stratified: bool = False
) -> "tuple[LazyDataset, LazyDataset | None, LazyDataset | None]":
    """(train, validation, test): those that have folders of their own, the others as shares of all rows of train,
    of each class the same share if `stratified`."""
    seed = check_int("seed", seed)
    shares = {"validation": val_fraction, "test": test_fraction}
    for name, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 <= float(share) < 1:  # NaN fails too
            raise ValueError(f"got {name}={share!r}; expected a share of the rows from 0 to below 1")
    drawn = {name: float(share) for name, share in shares.items() if name not in parts}
    if sum(drawn.values()) >= 1:
        raise ValueError(
            f"got validation={val_fraction:g} and test={test_fraction:g}; expected shares that leave rows to train on"
        )
    train, n = parts["train"], len(parts["train"])
    needed = 1 + sum(share > 0 for share in drawn.values())
    if n < needed:
        names = " and ".join(f"{name}=0" for name, share in drawn.items() if share > 0)
        raise ValueError(f"got {n} rows to share out; expected at least {needed}: add some, or take {names}")
    found: dict[str, LazyDataset | None] = dict(parts)
    left = 1.0
    for name in ("test", "validation"):
        if name not in drawn:
            continue
        strata = train.targets if stratified else None
        train, found[name] = hold_out(train, drawn[name] / left, seed=seed, strata=strata)
        left -= drawn[name]
    return train, found["validation"], found["test"]


def hold_out(
    part: "LazyDataset", fraction: float, *, seed: int, strata: Tensor | None = None
) -> "tuple[LazyDataset, LazyDataset | None]":
    """(the rest, a share of the rows for validation), drawn by the seed; of each class of `strata` (n,) the same share.

    >>> from neuboots.data.dataset import Tensors
    >>> whole = LazyDataset(Tensors(torch.zeros(20, 1), torch.arange(20) % 2))
    >>> rest, val_data = hold_out(whole, 0.2, seed=0, strata=whole.targets)
    >>> len(rest), sorted(val_data.targets.tolist())
    (16, [0, 0, 1, 1])
    """
    fraction = check_fraction(fraction)
    if fraction == 0:
        return part, None
    n = len(part)
    if n < 2:
        raise ValueError(f"got validation={fraction:g} of {n} rows; expected at least two rows, or validation=0")
    if strata is not None and strata.shape != (n,):
        raise ValueError(f"got strata of shape {tuple(strata.shape)} for {n} rows; expected one class for each")
    order = torch.randperm(n, generator=named_generator("validation", seed))
    if strata is not None:
        order = order[strata.cpu()[order].argsort(stable=True)]  # class by class, each in an order of its own
    size = min(max(1, round(fraction * n)), n - 1)
    apart = torch.zeros(n, dtype=torch.bool)
    apart[order[((torch.arange(size) + 0.5) * (n / size)).long()]] = True  # evenly spaced: so many of every class
    return part.take((~apart).nonzero()[:, 0].tolist()), part.take(apart.nonzero()[:, 0].tolist())
