"""Data sets in the format of the Hugging Face hub: from a data root or downloaded, in memory-mapped or streamed form.

    root/<name>/data/<split>-*.parquet, or datasets.load_dataset(<hub name>)  →  Arrow tables

Arrow files with the required columns are cached by the `datasets` library (HF_HOME). A stream reads Parquet as it goes
and stores nothing. A data set with validation rows but no public test labels uses its validation rows as test split, as
published results do, and a fraction of its training rows for validation.

Lhoest et al., Datasets: a community library for natural language processing, EMNLP 2021.
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
from neuboots._validation import format_names, import_optional
from neuboots.data._common import DATA_ROOT_VARIABLE, NO_DATA_ROOT, SPLIT_NAMES, CorruptFileError, DatasetNotFoundError
from neuboots.data.dataset import LazyDataset, LoadOptions, StreamingDataset, Transform, hold_out

ROWS_PER_READ = 64  # rows of a stream that are in memory at once
_TIMEOUT_SECONDS = 10.0  # for the hub's first answer

Decoder = Callable[[Any, str], Tensor]  # of a value and a description of its row; sent to worker processes


@dataclass(frozen=True)
class DatasetLocation:
    """Where a data set is found.

    Attributes:
        name: Folder in a data root.
        hub: Name on the Hugging Face hub; None if it is not there.
        config: Configuration on the hub.
        hint: How to get it otherwise.
    """

    name: str
    hub: str | None = None
    config: str | None = None
    hint: str = ""

    def download_hint(self, root: Path | None) -> str:
        """Instructions for an error message.

        Args:
            root: The data root, if there is one.

        Returns:
            How to get the data set.
        """
        if self.hub is None:
            return f"{self.hint} and pass its parent folder as root=... or in {DATA_ROOT_VARIABLE}"
        folder = (root or Path("<data root>")) / self.name
        other = f"or unset root and {DATA_ROOT_VARIABLE} to load it from the hub" if root else "and pass <data root>"
        alternative = f"; or {self.hint}" if self.hint else ""
        return f"run `hf download {self.hub} --repo-type dataset --local-dir {folder}` {other}{alternative}"


def find_folder(location: DatasetLocation, root: Path) -> Path:
    """Find the folder of a data set in a data root, by its name or by that of its repository on the hub.

    Args:
        location: The data set.
        root: The data root.

    Returns:
        Its folder.

    Raises:
        DatasetNotFoundError: If there is none.
    """
    names = [location.name] + ([location.hub.split("/")[-1], location.hub] if location.hub else [])
    for folder in (root / name for name in names):
        if folder.is_dir():
            return folder
    raise DatasetNotFoundError.for_dataset(location.name, [root / location.name], location.download_hint(root))


def open_tables(
    location: DatasetLocation, root: Path | None, columns: Sequence[Sequence[str]], *, streaming: bool
) -> dict[str, Any]:
    """Open the splits of a data set.

    Args:
        location: The data set.
        root: Data root in which it must be; None loads it from the hub.
        columns: Accepted names of each required column; it gets the first one.
        streaming: Whether to stream.

    Returns:
        Table (a `datasets.Dataset` or `IterableDataset` of Arrow tables) of each split.

    Raises:
        DatasetNotFoundError: If the data set, its training split or a column is missing.
        CorruptFileError: If a file cannot be read.
    """
    datasets = import_optional("datasets")
    found = _load_from_hub(datasets, location, streaming) if root is None else _find_parquet_files(location, root)
    tables = {}
    for split, name in _match_splits(location, list(found)).items():
        table = found[name] if root is None else _load_parquet(datasets, found[name], streaming)
        tables[split] = _select_columns(location, split, table, columns)
    return tables


def _load_parquet(datasets: Any, paths: list[Path], streaming: bool) -> Any:
    """Table of one split; only its files' common columns are read."""
    columns, files = _read_common_columns(paths), [str(path) for path in paths]
    options = {"data_files": {"split": files}, "split": "split", "columns": columns, "streaming": streaming}
    try:
        with silence_datasets(datasets):
            return datasets.load_dataset("parquet", **options)
    except Exception as error:  # of Arrow, fsspec and datasets
        hint = "Download it again, or set HF_HOME to a folder with free space."
        raise CorruptFileError(paths[0].parent, _one_line(error), hint) from None


def _find_parquet_files(location: DatasetLocation, root: Path) -> dict[str, list[Path]]:
    """Files of each split, from the first subfolder that has any."""
    folder = find_folder(location, root)
    names = dict.fromkeys(filter(None, [location.config, "data", "plain_text", location.name, "."]))
    for subfolder in (folder / name for name in names):
        files: dict[str, list[Path]] = {}
        for path in sorted(subfolder.glob("*.parquet")):
            files.setdefault(re.split(r"[-.]", path.name)[0], []).append(path)
        for paths in files.values():
            total = re.search(r"-of-(\d+)", paths[0].name)
            if total is not None and int(total[1]) != len(paths):
                raise DatasetNotFoundError(f"Found {len(paths)} of {int(total[1])} files such as {paths[0]}.")
        if files:
            return files
    pattern = folder / "data" / "<split>-*.parquet"
    raise DatasetNotFoundError.for_dataset(location.name, [pattern], location.download_hint(root))


def _read_common_columns(paths: list[Path]) -> list[str]:
    """Columns that every file of a split has."""
    parquet = import_optional("pyarrow.parquet")
    columns: list[list[str]] = []
    for path in paths:
        try:
            with parquet.ParquetFile(path) as file:
                columns.append(file.schema_arrow.names)
                rows = file.metadata.num_rows
        except Exception as error:
            raise CorruptFileError(path, f"not a complete Parquet file ({type(error).__name__})") from None
        if rows == 0:  # which `datasets` cannot load
            raise CorruptFileError(path, "it has no rows")
    return [name for name in columns[0] if all(name in others for others in columns)]


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _load_from_hub(datasets: Any, location: DatasetLocation, streaming: bool) -> dict[str, Any]:
    hint = location.download_hint(None)
    if location.hub is None:
        raise DatasetNotFoundError.for_dataset(location.name, [NO_DATA_ROOT], hint)
    reachable, offline = _is_reachable(location.hub), datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = offline or not reachable  # then the cache alone is used, without retries
    try:
        with silence_datasets(datasets, progress_bars=reachable):
            return dict(datasets.load_dataset(location.hub, location.config, streaming=streaming).items())
    except Exception as error:
        state = _one_line(error) if reachable else "which cannot be reached"
        searched = f"the Hugging Face hub as {location.hub} ({state})"
        raise DatasetNotFoundError.for_dataset(location.name, [searched], hint) from None
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def _is_reachable(name: str) -> bool:
    """Ask the hub once with a time limit: `datasets` itself retries for half a minute."""
    try:
        import_optional("huggingface_hub").HfApi().dataset_info(name, timeout=_TIMEOUT_SECONDS)
    except Exception:  # of the network, a proxy, or offline mode
        return False
    return True


@contextmanager
def silence_datasets(datasets: Any, *, progress_bars: bool = False) -> Iterator[None]:
    """Suppress log messages and, unless wanted, progress bars of the `datasets` library.

    Args:
        datasets: The module `datasets`.
        progress_bars: Whether progress bars are shown.

    Yields:
        Nothing.
    """
    logger = logging.getLogger("datasets")
    level, hidden = logger.level, datasets.are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    fixed = datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is not None  # by the environment: changing it warns
    hide = not progress_bars and not hidden and not fixed
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if hide:
            datasets.enable_progress_bars()


def _match_splits(location: DatasetLocation, found: list[str]) -> dict[str, str]:
    """Split → its name among those found; "train" must be one of them."""
    matched = {split: name for split, names in SPLIT_NAMES.items() for name in reversed(names) if name in found}
    if "train" not in matched:
        raise DatasetNotFoundError(f"{location.name} has no training split, but {format_names(found) or 'none'}.")
    return matched


def _select_columns(location: DatasetLocation, split: str, table: Any, columns: Sequence[Sequence[str]]) -> Any:
    present = table.column_names or list(next(iter(table)))
    renamed: dict[str, str] = {}
    for names in columns:
        found = next((name for name in names if name in present), None)
        if found is None:
            expected = " or ".join(map(repr, names))
            raise DatasetNotFoundError(
                f"{location.name}, split {split}, has no column {expected}, but {format_names(present)}."
            )
        renamed[found] = names[0]
    table = table.select_columns(list(renamed)).with_format("arrow")
    if all(old == new for old, new in renamed.items()):
        return table
    if hasattr(table, "__len__"):
        return table.rename_columns(renamed)
    # rename_columns of a stream infers types from rows again and fails at a null
    features = table.features and type(table.features)({renamed[name]: kind for name, kind in table.features.items()})
    return table.map(partial(_rename, names=renamed), batched=True, batch_size=ROWS_PER_READ, features=features)


def _rename(rows: Any, names: Mapping[str, str]) -> Any:
    return rows.rename_columns([names[name] for name in rows.column_names])


def read_class_names(table: Any, column: str) -> tuple[str, ...]:
    """Read the class names that a file stores for a column of labels.

    Args:
        table: A table of `open_tables`.
        column: The column of labels.

    Returns:
        The names; empty if there are none.
    """
    feature = (table.features or {}).get(column)
    return tuple(getattr(feature, "names", None) or ())


@dataclass(frozen=True)
class ColumnSpec:
    """How two columns become inputs and targets.

    Attributes:
        x: Column of the inputs.
        y: Column of the targets.
        decode_x: Decodes an input.
        decode_y: Decodes a target.
        integer_target: Whether y holds integers, which are validated once and then read without decoding.
    """

    x: str
    y: str
    decode_x: Decoder
    decode_y: Decoder
    integer_target: bool

    def decode(self, x: Any, y: Any, where: str) -> tuple[Tensor, Tensor]:
        """Decode a row.

        Args:
            x: Value of the input column.
            y: Value of the target column.
            where: Description of the row, for error messages.

        Returns:
            Input and target.

        Raises:
            CorruptFileError: If a value cannot be decoded, or the mask has another size than its image.
        """
        decoded = self.decode_x(x, where), self.decode_y(y, where)
        image, mask = decoded[0].shape[1:], decoded[1].shape
        if len(mask) > 1 and image != mask:
            raise CorruptFileError(where, f"its mask is {tuple(mask)}, but its image {tuple(image)} pixels")
        return decoded


@dataclass(frozen=True, eq=False)
class ArrowSource:
    """Source that decodes rows of an Arrow table.

    Attributes:
        table: A `datasets.Dataset` of Arrow tables.
        where: Description such as "cifar10, split train".
        columns: How columns become inputs and targets.
    """

    table: Any
    where: str
    columns: ColumnSpec

    def __len__(self) -> int:
        return len(self.table)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and targets of some rows; see `neuboots.data.dataset.Source`."""
        found = self.table[list(rows)]
        values = (found.column(name).to_pylist() for name in (self.columns.x, self.columns.y))
        pairs = [self.columns.decode(x, y, f"{self.where}, row {row}") for x, y, row in zip(*values, rows, strict=True)]
        return [x for x, _ in pairs], [y for _, y in pairs]

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        """Targets of some rows; see `neuboots.data.dataset.Source`."""
        if self.columns.integer_target:
            return list(torch.from_numpy(self.table.data.column(self.columns.y).to_numpy()[list(rows)]).long())
        values = self.table.select_columns([self.columns.y])[list(rows)].column(self.columns.y).to_pylist()
        return [self.columns.decode_y(y, f"{self.where}, row {row}") for y, row in zip(values, rows, strict=True)]

    def check_targets(self) -> None:
        """Decode each distinct integer target once.

        Raises:
            CorruptFileError: If a target is not valid; the first such row is named.
        """
        values, first = self.table.data.column(self.columns.y).to_pylist(), dict[str, int]()
        for row, value in enumerate(values):
            first.setdefault(repr(value), row)  # of any type: NaN, which differs from itself, and lists
        for row in first.values():
            self.columns.decode_y(values[row], f"{self.where}, row {row}")


@dataclass(frozen=True, eq=False)
class ArrowStream:
    """Rows of a streamed table, from the start at each call; the argument `read` of `StreamingDataset`.

    A fraction is held out at even distances: row r if ⌊(r + 1) f + φ⌋ > ⌊r f + φ⌋, with φ given by the seed.

    Attributes:
        table: A `datasets.IterableDataset` of Arrow tables.
        where: Description such as "cifar10, split train".
        columns: How columns become inputs and targets.
        fraction: Fraction of the rows that is held out.
        seed: Random seed.
        held_out: Whether to read the rows held out, or all others.
    """

    table: Any
    where: str
    columns: ColumnSpec
    fraction: float = 0.0
    seed: int = 0
    held_out: bool = False

    def __call__(self) -> Iterator[tuple[int, Any, Any]]:
        number, datasets = 0, import_optional("datasets")
        key = derive_keys(torch.zeros(1), self.seed, "validation")
        phase = float(draw_uniform(key, torch.zeros(1, dtype=torch.int64)))
        batches = iter(self.table.iter(batch_size=ROWS_PER_READ))  # iter(table) would skip rows in a worker process
        while True:
            try:
                with silence_datasets(datasets):
                    batch = next(batches, None)
            except Exception as error:  # of the network or Parquet
                where = f"{self.where}, row {number} or after"
                raise CorruptFileError(where, f"the stream ended ({type(error).__name__})") from None
            if batch is None:
                return
            values = (batch.column(name).to_pylist() for name in (self.columns.x, self.columns.y))
            for x, y in zip(*values, strict=True):
                if is_held_out(number, self.fraction, phase) == self.held_out:
                    yield number, x, y
                number += 1

    def decode(self, row: tuple[int, Any, Any]) -> tuple[Tensor, Tensor]:
        """Decode a row; the argument `decode` of `StreamingDataset`.

        Args:
            row: Index of the row and the values of its two columns.

        Returns:
            Input and target.
        """
        number, x, y = row
        return self.columns.decode(x, y, f"{self.where}, row {number}")


def is_held_out(number: int, fraction: float, phase: float) -> bool:
    """Whether a row of a stream belongs to the fraction that is held out.

    Args:
        number: Index of the row.
        fraction: The fraction.
        phase: Offset in [0, 1).

    Returns:
        Whether the row is held out.

    Example:
        >>> [number for number in range(20) if is_held_out(number, 0.2, 0.0)]
        [4, 9, 14, 19]
    """
    return math.floor((number + 1) * fraction + phase) > math.floor(number * fraction + phase)


def build_splits(
    name: str, tables: Mapping[str, Any], columns: ColumnSpec, transform: Transform, options: LoadOptions
) -> tuple[Any, Any, Any]:
    """Make data sets of the splits of a table; a missing validation split is held out of the training split.

    Args:
        name: Name of the data set, for error messages.
        tables: Table of each split, as `open_tables` returns them.
        columns: How columns become inputs and targets.
        transform: Transform of the inputs.
        options: Options of the splits.

    Returns:
        Training, validation and test split; None for one that does not exist.

    Raises:
        CorruptFileError: If an integer target is not valid.
    """
    names = {split: split for split in tables}
    if "test" not in names and "validation" in names:
        names["test"] = names.pop("validation")
    splits: dict[str, Any] = {"validation": None, "test": None}
    for split, table_name in names.items():
        where, table = f"{name}, split {table_name}", tables[table_name]
        if options.streaming:
            stream = ArrowStream(table, where, columns)
            splits[split] = StreamingDataset(stream, transform, decode=stream.decode)
        else:
            source = ArrowSource(table, where, columns)
            if columns.integer_target:
                source.check_targets()
            splits[split] = LazyDataset(source, transform)
    train = splits["train"]
    if "validation" not in names and options.val_fraction > 0:
        if options.streaming:
            rest = replace(train.read, fraction=options.val_fraction, seed=options.seed)
            splits |= {
                "train": replace(train, read=rest),
                "validation": replace(train, read=replace(rest, held_out=True)),
            }
        else:
            strata = train.targets if columns.integer_target else None
            rest, held_out = hold_out(train, options.val_fraction, seed=options.seed, strata=strata)
            splits |= {"train": rest, "validation": held_out}
    return splits["train"], splits["validation"], splits["test"]
