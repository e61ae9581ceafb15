"""Tables of Hugging Face datasets: from a data root in the hub's layout, or from the hub.

    root/<set>/data/<split>-*.parquet, or load_dataset(<hub name>)  →  Arrow files that are mapped into memory

The Arrow files hold the columns that are needed, and lie in the cache of Hugging Face datasets, wherever HF_HOME says.
A stream reads Parquet as it goes and keeps nothing.

Lhoest et al., Datasets: a community library for natural language processing, EMNLP 2021.

Rows of tables of Hugging Face datasets: read by their number, or as they come; and the parts they make.

    validation = the set's own, else a share of the training rows;  test = the set's own

Where a set has rows for validation and none to test on, as their labels are not public, those for validation are the
test part, on which results are published, and a share of the training rows is for validation.
"""

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuboots._prng import derive_keys, draw_uniform
from neuboots._validation import check_int
from neuboots.data._common import (
    DATA_ROOT_VARIABLE,
    DatasetNotFoundError,
    check_fraction,
    corrupt_file_error,
    import_optional,
    not_found_error,
)
from neuboots.data.dataset import LazyDataset, Source, StreamingDataset, Transform
from neuboots.data.splits import hold_out

HUB_SPLIT_NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test",),
}
"""What the splits are called: ours, and the names that are taken for it."""

ROWS_PER_READ = 64  # rows of a stream that are in memory
PROBE_SECONDS = 10.0  # how long the hub may take to answer before it counts as out of reach


@dataclass(frozen=True)
class DatasetLocation:
    """Where a set lies: its folder in a data root, and its name on the hub (None: it is on no hub)."""

    name: str
    hub: str | None = None
    config: str | None = None
    how: str = ""  # how to get what is on no hub, or is elsewhere too


def open_tables(
    place: DatasetLocation, root: Path | None, columns: Sequence[Sequence[str]], *, streaming: bool
) -> "SplitTables":
    """The splits of a set, each with one column for each group of names in `columns`, under the group's first name.

    With a data root, that is where the set must lie; without, it is loaded from the hub.
    """
    datasets = import_optional("datasets")
    if root is None:
        found = _from_hub(datasets, place, streaming)
        tables = {ours: found[theirs] for ours, theirs in _named(place, list(found)).items()}
    else:
        tables = _from_root(datasets, place, root, columns, streaming)
    return {split: _with_columns(place, split, table, columns) for split, table in tables.items()}


SplitTables = Mapping[str, Any]
"""Split → a datasets.Dataset or IterableDataset."""


# -- a data root ---------------------------------------------------------------------------------------


def find_folder(place: DatasetLocation, root: Path) -> Path:
    """The folder of a set in a data root: by its name, or by that of its repository on the hub."""
    looked = [root / name for name in dict.fromkeys([place.name, *_hub_names(place)])]
    for folder in looked:
        if folder.is_dir():
            return folder
    raise not_found_error(place.name, looked[:1], download_hint(place, root))


def download_hint(place: DatasetLocation, root: Path | None) -> str:
    if place.hub is None:
        return f"{place.how}, and give its folder's parent as root=… or in the variable {DATA_ROOT_VARIABLE}"
    target = (root or Path("<data root>")) / place.name
    elsewhere = (
        f"or, with internet, load it from the Hugging Face hub as {place.hub}: without root and {DATA_ROOT_VARIABLE}"
        if root is not None
        else f"and give <data root> as root=… or in the variable {DATA_ROOT_VARIABLE}"
    )
    or_else = f"; or {place.how}" if place.how else ""
    return f"run `hf download {place.hub} --repo-type dataset --local-dir {target}`, {elsewhere}{or_else}"


def _hub_names(place: DatasetLocation) -> list[str]:
    return [] if place.hub is None else [place.hub.split("/")[-1], place.hub]


def _from_root(
    datasets: Any, place: DatasetLocation, root: Path, columns: Sequence[Sequence[str]], streaming: bool
) -> dict[str, Any]:
    folder = find_folder(place, root)
    files = _parquet_files(place, folder, root)
    tables = {}
    for ours, theirs in _named(place, list(files)).items():
        paths = files[theirs]
        present = _columns_in_all(paths)
        chosen = [_chosen(place, ours, present, names) for names in columns]
        with silence_datasets(datasets):
            try:
                tables[ours] = datasets.load_dataset(
                    "parquet",
                    data_files={ours: [str(path) for path in paths]},
                    split=ours,
                    columns=chosen,
                    streaming=streaming,
                )
            except Exception as fault:  # Arrow's, fsspec's and datasets' own
                raise _fault_of(paths, fault) from None
    return tables


def _parquet_files(place: DatasetLocation, folder: Path, root: Path) -> dict[str, list[Path]]:
    """Split → its files, in the first of the folders that has any; no file of a split may be missing."""
    names = dict.fromkeys(filter(None, [place.config, "data", "plain_text", place.name, "."]))
    for place_in in (folder / name for name in names):
        files: dict[str, list[Path]] = {}
        for path in sorted(place_in.glob("*.parquet")):
            files.setdefault(re.split(r"[-.]", path.name)[0], []).append(path)
        if files:
            for paths in files.values():
                _check_whole(paths)
            return files
    raise not_found_error(place.name, [folder / "data" / "<split>-*.parquet"], download_hint(place, root))


def _check_whole(paths: list[Path]) -> None:
    of = re.search(r"-of-(\d+)", paths[0].name)
    if of is not None and int(of[1]) != len(paths):
        raise DatasetNotFoundError(
            f"got {len(paths)} files such as {paths[0]}; expected {int(of[1])}, as its name says: fetch those that are "
            "missing, or remove those of another version"
        )


def _columns_in_all(paths: list[Path]) -> list[str]:
    """The columns that every file of a split has."""
    parquet = import_optional("pyarrow.parquet")
    found: list[list[str]] = []
    for path in paths:
        try:
            with parquet.ParquetFile(path) as file:
                found.append(file.schema_arrow.names)
                rows = file.metadata.num_rows
        except Exception as fault:
            raise corrupt_file_error(path, f"it is no whole Parquet file ({type(fault).__name__})") from None
        if rows == 0:  # the library stumbles over such a file
            raise corrupt_file_error(path, "it has no row")
    return [name for name in found[0] if all(name in names for names in found)]


def _fault_of(paths: list[Path], fault: Exception) -> ValueError:
    """Which file is to blame, by reading each; if none is, it was the writing of the cache, or they do not fit."""
    parquet = import_optional("pyarrow.parquet")
    for path in paths:
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=256):
                    del batch
        except Exception as inner:
            return corrupt_file_error(path, f"it is no whole Parquet file ({type(inner).__name__})")
    cause: BaseException = fault
    while cause.__cause__ is not None:
        cause = cause.__cause__
    expected = (
        "a cache that can be written: set HF_HOME to a folder with room"
        if isinstance(cause, OSError)
        else "files of a split whose columns are of the same types"
    )
    return ValueError(f"could not prepare {paths[0].parent} ({_line(cause)}); expected {expected}")


def _line(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split())}"[:200]


# -- the hub -------------------------------------------------------------------------------------------


def _from_hub(datasets: Any, place: DatasetLocation, streaming: bool) -> dict[str, Any]:
    if place.hub is None:
        looked = f"no data root, since neither root=… nor the variable {DATA_ROOT_VARIABLE} was given"
        raise not_found_error(place.name, [looked], download_hint(place, None))
    reachable = _is_reachable(place)
    try:
        with silence_datasets(datasets, bars=reachable), _offline(datasets, not reachable):
            found = datasets.load_dataset(place.hub, place.config, streaming=streaming)
            return dict(found.items())
    except Exception as fault:
        state = _line(fault) if reachable else "which cannot be reached from here"
        looked = f"the Hugging Face hub as {place.hub} ({state})"
        raise not_found_error(place.name, [looked], download_hint(place, None)) from None


def _is_reachable(place: DatasetLocation) -> bool:
    """Asked once, with a time limit: what follows tries again and again for half a minute."""
    hub = import_optional("huggingface_hub")
    try:
        hub.HfApi().dataset_info(place.hub, timeout=PROBE_SECONDS)
    except Exception:  # of the network, of a proxy, of a library set to be offline
        return False
    return True


@contextmanager
def _offline(datasets: Any, offline: bool) -> Iterator[None]:
    """The cache alone is asked, where the hub is out of reach."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


@contextmanager
def silence_datasets(datasets: Any, *, bars: bool = False) -> Iterator[None]:
    """No words of the library below an error; no bars but for a download."""
    logger = logging.getLogger("datasets")
    level, hidden = logger.level, datasets.are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    hide = not bars and not hidden and datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is None  # else it would warn
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if hide:
            datasets.enable_progress_bars()


# -- splits and columns --------------------------------------------------------------------------------


def _named(place: DatasetLocation, found: list[str]) -> dict[str, str]:
    """Our names of the splits that were found; train must be among them."""
    named = {ours: name for ours, names in HUB_SPLIT_NAMES.items() for name in reversed(names) if name in found}
    if "train" not in named:
        raise DatasetNotFoundError(
            f"got {place.name} with the splits {', '.join(found) or 'none'}; expected train among them"
        )
    return named


def _chosen(place: DatasetLocation, split: str, present: Sequence[str], names: Sequence[str]) -> str:
    for name in names:
        if name in present:
            return name
    raise DatasetNotFoundError(
        f"got {place.name}, split {split}, with the columns {', '.join(present)}; expected one called "
        f"{' or '.join(names)}"
    )


def _with_columns(place: DatasetLocation, split: str, table: Any, columns: Sequence[Sequence[str]]) -> Any:
    present = table.column_names or list(next(iter(table)))
    chosen = [_chosen(place, split, present, names) for names in columns]
    table = table.select_columns(chosen).with_format("arrow")
    ours = {old: names[0] for old, names in zip(chosen, columns, strict=True)}
    if all(old == new for old, new in ours.items()):
        return table
    if hasattr(table, "__len__"):
        return table.rename_columns(ours)
    # a stream's own rename_columns takes rows apart and guesses their types anew: one null, and it breaks off
    kinds = table.features and type(table.features)({ours[name]: kind for name, kind in table.features.items()})
    return table.map(partial(_renamed, names=ours), batched=True, batch_size=ROWS_PER_READ, features=kinds)


def _renamed(rows: Any, names: Mapping[str, str]) -> Any:
    return rows.rename_columns([names[name] for name in rows.column_names])


def read_class_names(table: Any, column: str) -> tuple[str, ...]:
    """Those that the file gives for a column of labels; none if it gives none."""
    feature = (table.features or {}).get(column)
    return tuple(getattr(feature, "names", None) or ())


Decoder = Callable[[Any, str], Tensor]
"""What a column holds, and where it lies for a sentence → a tensor. What decodes pickles: workers take it along."""


@dataclass(frozen=True, eq=False)
class ArrowSource:
    """The rows of a table as a source: columns x and y, decoded as they are read."""

    table: Any  # a datasets.Dataset that gives Arrow tables
    where: str  # such as "cifar10, split train"
    x: str
    y: str
    decode_x: Decoder
    decode_y: Decoder | None = None  # None: numbers, as they lie

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

    def _decoded(self, found: Any, column: str, decode: Decoder, rows: Sequence[int]) -> list[Tensor]:
        values = found.column(column).to_pylist()
        return [decode(value, f"{self.where}, row {row}") for value, row in zip(values, rows, strict=True)]


def _check_sizes(x: Tensor, y: Tensor, where: str) -> None:
    if y.ndim > 1 and x.shape[1:] != y.shape:
        image, mask = (" × ".join(map(str, shape)) for shape in (x.shape[1:], y.shape))
        raise corrupt_file_error(where, f"its mask of {mask} pixels does not fit its image of {image}")


NumberedRow = tuple[int, Any, Any]
"""The number of a row in its split, and what its two columns hold."""


@dataclass(frozen=True, eq=False)
class ArrowStream:
    """The rows of a streamed table from the start, not yet decoded: what `Stream(read=…)` takes.

    Of a share, the rows are taken that stand at even distances: ⌊(r + 1) share + φ⌋ > ⌊r share + φ⌋, φ by the seed.
    """

    table: Any  # a datasets.IterableDataset that gives Arrow tables
    where: str
    x: str
    y: str
    fraction: float = 0.0
    seed: int = 0
    held_out: bool = False  # the rows of the share, or all others

    def __call__(self) -> Iterator[NumberedRow]:
        number, datasets = 0, import_optional("datasets")
        phase = float(
            draw_uniform(derive_keys(torch.zeros(1), self.seed, "validation"), torch.zeros(1, dtype=torch.int64))
        )
        batches = iter(
            self.table.iter(batch_size=ROWS_PER_READ)
        )  # in a worker, iter(table) itself would leave out rows
        while True:
            try:
                with silence_datasets(datasets):
                    batch = next(batches, None)
            except Exception as fault:  # of the network, of Parquet
                raise corrupt_file_error(
                    f"{self.where}, row {number} or after", f"the stream broke off ({type(fault).__name__})"
                ) from None
            if batch is None:
                return
            for x, y in zip(batch.column(self.x).to_pylist(), batch.column(self.y).to_pylist(), strict=True):
                if is_held_out(number, self.fraction, phase) == self.held_out:
                    yield number, x, y
                number += 1


def is_held_out(number: int, fraction: float, phase: float) -> bool:
    """Whether a row of a stream is one of the share.

    >>> [number for number in range(20) if is_held_out(number, 0.2, 0.0)]
    [4, 9, 14, 19]
    """
    return math.floor((number + 1) * fraction + phase) > math.floor(number * fraction + phase)


@dataclass(frozen=True, eq=False)
class RowDecoder:
    """A row of a flow as (x, y): what `Stream(decode=…)` takes."""

    where: str
    decode_x: Decoder
    decode_y: Decoder

    def __call__(self, row: NumberedRow) -> tuple[Tensor, Tensor]:
        number, x, y = row
        where = f"{self.where}, row {number}"
        decoded = self.decode_x(x, where), self.decode_y(y, where)
        _check_sizes(*decoded, where)
        return decoded


def split_stream(flow: ArrowStream, fraction: float, *, seed: int) -> tuple[ArrowStream, ArrowStream | None]:
    """(the rest, a share of the rows for validation) of a stream."""
    fraction = check_fraction(fraction)
    if fraction == 0:
        return flow, None
    return replace(flow, fraction=fraction, seed=seed), replace(flow, fraction=fraction, seed=seed, held_out=True)


# -- parts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnSpec:
    """How the two columns of a set become x and y."""

    x: str
    y: str
    decode_x: Decoder
    decode_y: Decoder
    numbers: bool  # y is a column of numbers, which are read without decoding, and checked all at once


def build_splits(
    name: str,
    tables: SplitTables,
    columns: ColumnSpec,
    transform: Transform,
    *,
    val_fraction: float,
    seed: int,
    streaming: bool,
) -> dict[str, Any]:
    """{"train": …, "validation": …, "test": …} of the splits of a set, as parts or streams."""
    seed = check_int("seed", seed)
    splits = {split: split for split in tables}
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    make = _stream if streaming else _part
    parts: dict[str, Any] = {"validation": None, "test": None}
    for part, split in splits.items():
        parts[part] = make(f"{name}, split {split}", tables[split], columns, transform)
    if "validation" in splits:
        check_fraction(val_fraction)
    elif streaming:
        flow, apart = split_stream(parts["train"].read, val_fraction, seed=seed)
        parts["validation"] = None if apart is None else replace(parts["train"], read=apart)
        parts["train"] = replace(parts["train"], read=flow)
    else:
        strata = parts["train"].targets if columns.numbers else None
        parts["train"], parts["validation"] = hold_out(parts["train"], val_fraction, seed=seed, strata=strata)
    return parts


def _part(where: str, table: Any, columns: ColumnSpec, normalise: Transform) -> LazyDataset:
    if columns.numbers:
        _check_numbers(table.data.column(columns.y), columns.decode_y, where)
    decode_y = None if columns.numbers else columns.decode_y
    return LazyDataset(ArrowSource(table, where, columns.x, columns.y, columns.decode_x, decode_y), normalise)


def _stream(where: str, table: Any, columns: ColumnSpec, normalise: Transform) -> StreamingDataset:
    decode = RowDecoder(where, columns.decode_x, columns.decode_y)
    return StreamingDataset(ArrowStream(table, where, columns.x, columns.y), normalise, decode=decode)


def _check_numbers(values: Any, decode: Decoder, where: str) -> None:
    """Each value that occurs is decoded once; the first row that has a bad one is named."""
    listed, first = values.to_pylist(), dict[str, int]()
    for row, value in enumerate(listed):
        first.setdefault(repr(value), row)  # of whatever type: NaN, which is not itself, and lists too
    for row in first.values():
        decode(listed[row], f"{where}, row {row}")


def to_stream(part: LazyDataset) -> StreamingDataset:
    """A part as a stream of its rows.

    >>> from neuboots.data.dataset import Tensors
    >>> [int(y) for _, y in to_stream(LazyDataset(Tensors(torch.zeros(3, 1), torch.arange(3))).take([2, 0]))]
    [2, 0]
    """
    rows = part.rows if part.rows is not None else range(len(part))
    return StreamingDataset(_Numbers(rows), part.transform, part.augment, _Read(part.source))


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
