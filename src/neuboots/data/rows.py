"""Rows of tables of Hugging Face datasets: read by their number, or as they come; and the parts they make.

    validation = the set's own, else a share of the training rows;  test = the set's own

Where a set has rows for validation and none to test on, as their labels are not public, those for validation are the
test part, on which results are published, and a share of the training rows is for validation.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from neuboots.data.hub import AT_ONCE, Tables, quiet
from neuboots.data.parts import Normalise, Part, Source, Stream
from neuboots.data.sources import checked_share, corrupt, need, split_off
from neuboots.keys import draw_keys, uniforms, whole

Decode = Callable[[Any, str], Tensor]
"""What a column holds, and where it lies for a sentence → a tensor. What decodes pickles: workers take it along."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a table as a source: columns x and y, decoded as they are read."""

    table: Any  # a datasets.Dataset that gives Arrow tables
    where: str  # such as "cifar10, split train"
    x: str
    y: str
    decode_x: Decode
    decode_y: Decode | None = None  # None: numbers, as they lie

    def __len__(self) -> int:
        return len(self.table)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        found = self.table[list(rows)]
        xs, ys = self._decoded(found, self.x, self.decode_x, rows), self._targets(found, rows)
        for x, y, row in zip(xs, ys, rows, strict=True):
            _check_sizes(x, y, f"{self.where}, row {row}")
        return xs, ys

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        if self.decode_y is None:  # one column of numbers, faster than its rows
            return list(torch.from_numpy(self.table.data.column(self.y).to_numpy()[list(rows)]).long())
        return self._targets(self.table.select_columns([self.y])[list(rows)], rows)

    def _targets(self, found: Any, rows: Sequence[int]) -> list[Tensor]:
        if self.decode_y is None:
            return list(torch.tensor(found.column(self.y).to_pylist(), dtype=torch.int64))
        return self._decoded(found, self.y, self.decode_y, rows)

    def _decoded(self, found: Any, column: str, decode: Decode, rows: Sequence[int]) -> list[Tensor]:
        values = found.column(column).to_pylist()
        return [decode(value, f"{self.where}, row {row}") for value, row in zip(values, rows, strict=True)]


def _check_sizes(x: Tensor, y: Tensor, where: str) -> None:
    if y.ndim > 1 and x.shape[1:] != y.shape:
        image, mask = (" × ".join(map(str, shape)) for shape in (x.shape[1:], y.shape))
        raise corrupt(where, f"its mask of {mask} pixels does not fit its image of {image}")


Row = tuple[int, Any, Any]
"""The number of a row in its split, and what its two columns hold."""


@dataclass(frozen=True, eq=False)
class Flow:
    """The rows of a streamed table from the start, not yet decoded: what `Stream(read=…)` takes.

    Of a share, the rows are taken that stand at even distances: ⌊(r + 1) share + φ⌋ > ⌊r share + φ⌋, φ by the seed.
    """

    table: Any  # a datasets.IterableDataset that gives Arrow tables
    where: str
    x: str
    y: str
    share: float = 0.0
    seed: int = 0
    inside: bool = False  # the rows of the share, or all others

    def __call__(self) -> Iterator[Row]:
        number, datasets = 0, need("datasets")
        phase = float(uniforms(draw_keys(torch.zeros(1), self.seed, "validation"), torch.zeros(1, dtype=torch.int64)))
        batches = iter(self.table.iter(batch_size=AT_ONCE))  # in a worker, iter(table) itself would leave out rows
        while True:
            try:
                with quiet(datasets):
                    batch = next(batches, None)
            except Exception as fault:  # of the network, of Parquet
                raise corrupt(
                    f"{self.where}, row {number} or after", f"the stream broke off ({type(fault).__name__})"
                ) from None
            if batch is None:
                return
            for x, y in zip(batch.column(self.x).to_pylist(), batch.column(self.y).to_pylist(), strict=True):
                if is_apart(number, self.share, phase) == self.inside:
                    yield number, x, y
                number += 1


def is_apart(number: int, share: float, phase: float) -> bool:
    """Whether a row of a stream is one of the share.

    >>> [number for number in range(20) if is_apart(number, 0.2, 0.0)]
    [4, 9, 14, 19]
    """
    return math.floor((number + 1) * share + phase) > math.floor(number * share + phase)


@dataclass(frozen=True, eq=False)
class DecodeRow:
    """A row of a flow as (x, y): what `Stream(decode=…)` takes."""

    where: str
    decode_x: Decode
    decode_y: Decode

    def __call__(self, row: Row) -> tuple[Tensor, Tensor]:
        number, x, y = row
        where = f"{self.where}, row {number}"
        decoded = self.decode_x(x, where), self.decode_y(y, where)
        _check_sizes(*decoded, where)
        return decoded


def split_flow(flow: Flow, share: float, *, seed: int) -> tuple[Flow, Flow | None]:
    """(the rest, a share of the rows for validation) of a stream."""
    share = checked_share(share)
    if share == 0:
        return flow, None
    return replace(flow, share=share, seed=seed), replace(flow, share=share, seed=seed, inside=True)


# -- parts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """How the two columns of a set become x and y."""

    x: str
    y: str
    decode_x: Decode
    decode_y: Decode
    numbers: bool  # y is a column of numbers, which are read without decoding, and checked all at once


def parts_of(
    name: str, tables: Tables, columns: Columns, normalise: Normalise, *, validation: float, seed: int, streaming: bool
) -> dict[str, Any]:
    """{"train": …, "validation": …, "test": …} of the splits of a set, as parts or streams."""
    seed = whole("seed", seed)
    splits = {split: split for split in tables}
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    make = _stream if streaming else _part
    parts: dict[str, Any] = {"validation": None, "test": None}
    for part, split in splits.items():
        parts[part] = make(f"{name}, split {split}", tables[split], columns, normalise)
    if "validation" in splits:
        checked_share(validation)
    elif streaming:
        flow, apart = split_flow(parts["train"].read, validation, seed=seed)
        parts["validation"] = None if apart is None else replace(parts["train"], read=apart)
        parts["train"] = replace(parts["train"], read=flow)
    else:
        strata = parts["train"].targets if columns.numbers else None
        parts["train"], parts["validation"] = split_off(parts["train"], validation, seed=seed, strata=strata)
    return parts


def _part(where: str, table: Any, columns: Columns, normalise: Normalise) -> Part:
    if columns.numbers:
        _check_numbers(table.data.column(columns.y), columns.decode_y, where)
    decode_y = None if columns.numbers else columns.decode_y
    return Part(Rows(table, where, columns.x, columns.y, columns.decode_x, decode_y), normalise)


def _stream(where: str, table: Any, columns: Columns, normalise: Normalise) -> Stream:
    decode = DecodeRow(where, columns.decode_x, columns.decode_y)
    return Stream(Flow(table, where, columns.x, columns.y), normalise, decode=decode)


def _check_numbers(values: Any, decode: Decode, where: str) -> None:
    """Each value that occurs is decoded once; the first row that has a bad one is named."""
    listed, first = values.to_pylist(), dict[str, int]()
    for row, value in enumerate(listed):
        first.setdefault(repr(value), row)  # of whatever type: NaN, which is not itself, and lists too
    for row in first.values():
        decode(listed[row], f"{where}, row {row}")


def in_order(part: Part) -> Stream:
    """A part as a stream of its rows.

    >>> from neuboots.data.parts import Tensors
    >>> [int(y) for _, y in in_order(Part(Tensors(torch.zeros(3, 1), torch.arange(3))).take([2, 0]))]
    [2, 0]
    """
    rows = part.rows if part.rows is not None else range(len(part))
    return Stream(_Numbers(rows), part.normalise, part.augment, _Read(part.source))


@dataclass(frozen=True, eq=False)
class _Numbers:
    rows: Sequence[int]

    def __call__(self) -> Iterator[int]:
        return iter(self.rows)


@dataclass(frozen=True, eq=False)
class _Read:
    source: Source

    def __call__(self, row: int) -> tuple[Tensor, Tensor]:
        (x,), (y,) = self.source.read([row])
        return x, y
