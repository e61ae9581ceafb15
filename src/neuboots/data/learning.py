"""What is learned from a table before a net sees it: its target, its parts, and the schema of its training rows.

Everything is gathered chunk by chunk: of a column, its mean, its spread and its categories are held; of a row, its
target and its part. Means and spreads of chunks are joined as in Chan, Golub and LeVeque, Algorithms for computing the
sample variance, The American Statistician 1983.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from neuboots.data.schema import (
    Category,
    Kind,
    Number,
    Schema,
    Target,
    distinct_texts,
    labels_of,
    listed,
    numbers_of,
    text_of,
)
from neuboots.data.sets import Normalisation
from neuboots.data.sources import generator_named, need
from neuboots.data.table_files import TableFile
from neuboots.keys import whole

MOST_WHOLE_NUMBERS = 20  # that are taken for classes
_MONEY = r"(?:[$€£¥]|EUR|USD|GBP|CHF)"
FIGURES = rf"[-+]?(?:{_MONEY} ?)?[-+]?[\d.,'/:\s-]*\d(?:[eE][-+]?\d+)?(?: ?(?:%|{_MONEY}))?"
"""What somebody may have meant as a number or a date."""
Values = np.ndarray[Any, np.dtype[np.float64]]

# -- parts ---------------------------------------------------------------------------------------------


def deal(n: int, validation: float, test: float | Tensor, *, seed: int, strata: Tensor | None = None) -> Tensor:
    """The part of each row: 0 training, 1 validation, 2 test; drawn by the seed: (n,) bytes.

    `test` is a share of the rows or their numbers, `validation` a share of the others. Of every class of `strata` (n,)
    the same share is taken, as nearly as can be, and at least one row is left to train with.

    >>> part = deal(20, 0.25, 0.2, seed=0, strata=torch.arange(20) % 2)
    >>> [int((part == k).sum()) for k in range(3)], part[::2].bincount().tolist()
    ([12, 4, 4], [6, 2, 2])
    """
    part, seed = torch.zeros(n, dtype=torch.uint8), whole("seed", seed)
    if isinstance(test, Tensor):
        part[test] = 2
    else:
        part[_drawn(torch.arange(n), test, "test", seed, strata)] = 2
    rest = (part == 0).nonzero()[:, 0]
    part[_drawn(rest, validation, "validation", seed, None if strata is None else strata[rest])] = 1
    return part


def _drawn(rows: Tensor, share: float, name: str, seed: int, strata: Tensor | None) -> Tensor:
    """A share of the rows, at even distances once they are ordered by class and, within a class, by chance."""
    order = torch.randperm(len(rows), generator=generator_named(name, seed))
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


# -- the target ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Found:
    """The targets of all rows (n,): numbers, or places in `classes`."""

    name: str
    kind: Kind
    task: Literal["classification", "regression"]
    values: Tensor
    classes: tuple[str, ...] = ()


def target_of(file: TableFile, name: str, kind: Kind | None, task: str | None) -> Found:
    """The column to predict, and whether it holds classes or numbers: what `task` says, else what it looks like."""
    if kind is None or kind == "date":
        what = "no value" if kind is None else "dates"
        raise ValueError(f"got target {name!r} with {what} in {file.path}; expected classes or numbers")
    if kind == "text" and task == "regression":
        raise ValueError(f"got target {name!r} of texts in {file.path} for a regression; expected numbers")
    if kind == "number" or task == "regression":
        values = _target_numbers(file, name, kind)
        distinct = np.unique(values)
        few = len(distinct) <= max(2, min(MOST_WHOLE_NUMBERS, len(values) // 5))
        if task == "regression" or (task is None and not (few and bool((distinct == distinct.round()).all()))):
            if len(distinct) < 2:
                raise ValueError(f"got target {name!r} that is {distinct[0]:g} in every row; expected it to vary")
            return Found(name, kind, "regression", torch.from_numpy(values))
        if np.abs(distinct).max() > 2**53:
            raise ValueError(
                f"got target {name!r} with classes that are whole numbers beyond 2^53, which cannot be told apart; "
                "expected smaller numbers, or texts"
            )
        codes, classes = np.searchsorted(distinct, values), tuple(text_of(float(value)) for value in distinct)
    else:
        codes, classes = _target_classes(file, name, kind)
    n = len(codes)
    if n < 2:
        raise ValueError(f"got {file.path} with a single row; expected more, to train, to validate and to test with")
    if len(classes) < 2:
        raise ValueError(f"got target {name!r} with the one class {classes[0]!r}; expected at least two")
    if len(classes) > max(10, n // 2):
        raise _too_many(name, classes, n)
    return Found(name, kind, "classification", torch.from_numpy(codes), classes)


def _target_numbers(file: TableFile, name: str, kind: Kind) -> Values:
    values = np.concatenate([numbers_of(frame, [(name, kind)])[:, 0] for frame in file.frames([name], checked=True)])
    _check_present(file, name, np.isnan(values))
    return values


def _target_classes(
    file: TableFile, name: str, kind: Kind
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], tuple[str, ...]]:
    place: dict[str | None, int] = {None: -1}
    found, n = [], 0
    for frame in file.frames([name], texts=[name] if kind == "text" else [], checked=True):
        texts, n = labels_of(frame, name, kind), n + len(frame)
        found.append(np.array([place.setdefault(text, len(place) - 1) for text in texts], dtype=np.int64))
        if len(place) > max(1000, n // 2):  # before every row of a column of names is held
            raise _too_many(name, [text for text in place if text], n)
    codes = np.concatenate(found)
    _check_present(file, name, codes < 0)
    del place[None]
    classes = sorted(map(str, place))
    return np.array([classes.index(text) for text in map(str, place)])[codes], tuple(classes)


def _check_present(file: TableFile, name: str, absent: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    if absent.any():
        raise ValueError(
            f"got target {name!r} that is missing in {int(absent.sum()):,} of {len(absent):,} rows of {file.path}, "
            f"first in row {int(absent.argmax()) + 1}; expected it in every row: fill it in, or remove these rows"
        )


def _too_many(name: str, classes: Any, n: int) -> ValueError:
    return ValueError(
        f"got target {name!r} with {len(classes):,} different values in {n:,} rows, such as {listed(classes[:3])}; "
        "expected classes that come more than once, or numbers such as 1.5 for a regression: choose another target"
    )


# -- the schema ----------------------------------------------------------------------------------------


@dataclass
class _Moments:
    """Of each of k columns, over the rows so far: how many there are, their mean and spread, the least and the most."""

    k: int

    def __post_init__(self) -> None:
        self.rows = 0
        self.count, self.mean, self.squares = np.zeros(self.k), np.zeros(self.k), np.zeros(self.k)
        self.low, self.high = np.full(self.k, np.inf), np.full(self.k, -np.inf)

    def add(self, values: Values) -> None:
        """values (N, k); nan is missing."""
        absent = np.isnan(values)
        count = (~absent).sum(0)
        total = self.count + count
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large shows in the end
            mean = np.where(absent, 0.0, values).sum(0) / np.maximum(count, 1)
            squares = np.square(np.where(absent, 0.0, values - mean)).sum(0)
            apart, weight = mean - self.mean, count / np.maximum(total, 1)
            self.squares += squares + np.square(apart) * self.count * weight
            self.mean = self.mean + apart * weight
        self.low = np.minimum(self.low, np.where(absent, np.inf, values).min(0, initial=np.inf))
        self.high = np.maximum(self.high, np.where(absent, -np.inf, values).max(0, initial=-np.inf))
        self.count, self.rows = total, self.rows + len(values)

    def standard(self, names: Sequence[str]) -> tuple[Values, Values]:
        """Mean and std; a constant, whose computed spread would be mere rounding, is only shifted."""
        with np.errstate(invalid="ignore"):
            std = np.sqrt(self.squares / np.maximum(self.count, 1))
        constant = self.low == self.high
        if (wrong := ~constant & ~np.isfinite(std)).any():
            raise ValueError(
                f"column {names[int(wrong.argmax())]!r} holds numbers too large to square; expected smaller"
            )
        return np.where(constant, self.low, self.mean), np.where(constant | (std == 0), 1.0, std)


def standard(x: Tensor, names: Sequence[str]) -> Normalisation:
    """That of the columns of x (n, C); the names are for a sentence.

    >>> standard(torch.tensor([[1.0, 123456.789], [3.0, 123456.789]], dtype=torch.float64), "ab").std
    (1.0, 1.0)
    """
    moments = _Moments(x.shape[1])
    moments.add(x.double().numpy())
    mean, std = moments.standard(names)
    return Normalisation(tuple(mean.tolist()), tuple(std.tolist()), axes=0)


def learned(
    file: TableFile,
    kinds: Mapping[str, Kind | None],
    target: Found,
    train: Tensor,
    most: int,
    *,
    leave_out_texts: bool = False,
) -> Schema:
    """The schema of the rows where `train` (n,) is true; at most so many categories a column.

    A column of more texts is refused, or left out; one that seems to be numbers or dates is never left out.
    """
    texts = {name: set[str | None]() for name, kind in kinds.items() if kind == "text"}
    columns = [(name, kind) for name, kind in kinds.items() if kind is not None and kind != "text"]
    moments, start = _Moments(len(columns)), 0
    dropped: ValueError | None = None
    for frame in file.frames([target.name, *texts, *(name for name, _ in columns)], texts=texts, checked=True):
        chosen, start = train[start : start + len(frame)].numpy(), start + len(frame)
        moments.add(numbers_of(frame, columns)[chosen])
        for name, found in list(texts.items()):
            found |= distinct_texts(frame[name][chosen])
            if len(found - {None}) > most:
                dropped = _no_category(file, name, frame[name], most)
                if not leave_out_texts or _seem_numbers(frame[name]):
                    raise dropped
                del texts[name]
    mean, std = moments.standard([name for name, _ in columns])
    present, lacks = moments.count > 0, moments.count < moments.rows
    numbers = [
        Number(name, kind, float(mean[k]), float(std[k]), bool(lacks[k]))
        for k, (name, kind) in enumerate(columns)
        if present[k]
    ]
    categories = [
        Category(name, tuple(sorted(filter(None, found))), None in found)
        for name, found in texts.items()
        if found - {None}
    ]
    if not numbers and not categories:
        raise dropped or ValueError(
            f"got {file.path} with no column but the target that has values; expected some to learn from"
        )
    used = {target.name, *(number.name for number in numbers), *(category.name for category in categories)}
    left_out = tuple(name or "(no name)" for name in file.names if name not in used)
    what = Target(target.name, target.kind, target.task, target.classes)
    if not target.classes:
        scale = standard(target.values[train][:, None], [target.name])
        what = replace(what, mean=scale.mean[0], std=scale.std[0])
    return Schema(tuple(numbers), tuple(categories), what, left_out)


def _seem_numbers(column: Any) -> bool:
    """Are most of these texts figures, such as 1,5 or 28.2.2024?"""
    return bool(column.dropna().astype(str).str.strip().str.fullmatch(FIGURES).mean() > 0.5)


def _no_category(file: TableFile, name: str, column: Any, most: int) -> ValueError:
    pandas = need("pandas")
    texts = column.dropna()
    odd = texts[pandas.to_numeric(texts, errors="coerce").isna()]
    numeric = len(odd) < len(texts) / 2
    hint = f"; most of it are numbers, but not {listed([str(odd.iloc[0])])}" if numeric and len(odd) else ""
    return ValueError(
        f"column {name!r} of {file.path} has more than {most} different texts, such as "
        f"{listed([str(text) for text in texts.unique()[:3]])}{hint}; expected categories: leave it out with "
        f"ignore=[{name!r}], raise max_categories, or write numbers as 1.5 and dates as 2024-02-29"
    )
