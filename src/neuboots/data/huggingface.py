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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuboots._prng import derive_keys, draw_uniform
from neuboots._validation import format_names, import_optional
from neuboots.data._common import (
    DATA_ROOT_VARIABLE,
    NO_DATA_ROOT,
    CorruptFileError,
    DatasetNotFoundError,
    first_line,
    match_splits,
)
from neuboots.data.dataset import LazyDataset, LoadOptions, StreamingDataset, Transform, complete_splits

ROWS_PER_READ = 64  # rows of a stream that are in memory at once
_TIMEOUT_SECONDS = 10.0  # for the hub's first answer


@dataclass(frozen=True)
class DatasetLocation:
    """Where a data set is found.

    Attributes:
        name: Folder in a data root.
        hub: Name on the Hugging Face hub; None if it is not there.
        config: Configuration on the hub.
        hint: How to get it otherwise.
        alias: Another name of its folder.
    """

    name: str
    hub: str | None = None
    config: str | None = None
    hint: str = ""
    alias: str | None = None

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
        alternative = f"; or {self.hint}" if self.hint else ""
        return f"run `hf download {self.hub} --repo-type dataset --local-dir {folder}`{alternative}"


def find_folder(location: DatasetLocation, root: Path | None) -> Path:
    """Find the folder of a data set in a data root, by its names or by that of its repository on the hub.

    Args:
        location: The data set.
        root: The data root.

    Returns:
        Its folder.

    Raises:
        DatasetNotFoundError: If there is none, or no data root.
    """
    hub = location.hub or location.name
    names = [location.name, location.alias or location.name, hub.split("/")[-1], hub]
    folders = [] if root is None else [root / name for name in dict.fromkeys(names)]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise DatasetNotFoundError.for_dataset(location.name, folders[:1] or [NO_DATA_ROOT], location.download_hint(root))


def open_tables(
    location: DatasetLocation, root: Path | None, columns: Sequence[Sequence[str]], *, streaming: bool
) -> dict[str, Any]:
    """Open the splits of a data set.

    Args:
        location: The data set.
        root: Data root in which it must be; None loads it from the hub.
        columns: Accepted names of the column of inputs and of that of targets.
        streaming: Whether to stream.

    Returns:
        Table (a `datasets.Dataset` or `IterableDataset` of Arrow tables) of each split, with these two columns.

    Raises:
        DatasetNotFoundError: If the data set, its training split or a column is missing.
        CorruptFileError: If a file cannot be read.
    """
    datasets = import_optional("datasets")
    from_hub = root is None and location.hub is not None
    found = _load_from_hub(datasets, location, streaming) if from_hub else _find_parquet_files(location, root)
    splits = match_splits(found)
    if "train" not in splits:
        raise DatasetNotFoundError(f"{location.name} has no training split, but {format_names(list(found)) or 'none'}.")
    tables = {}
    for split, content in splits.items():
        table = content if from_hub else _load_parquet(datasets, content, streaming)
        tables[split] = _select_columns(location, split, table, columns)
    return tables


def _load_parquet(datasets: Any, paths: list[Path], streaming: bool) -> Any:
    """Table of one split."""
    parquet = import_optional("pyarrow.parquet")
    for path in paths:
        try:
            parquet.read_metadata(path)
        except Exception as error:
            raise CorruptFileError(path, f"not a complete Parquet file ({type(error).__name__})") from None
    files = {"split": [str(path) for path in paths]}
    try:
        with silence_datasets(datasets):
            return datasets.load_dataset("parquet", data_files=files, split="split", streaming=streaming)
    except Exception as error:  # of Arrow, fsspec and datasets
        hint = "Download it again, or set HF_HOME to a folder with free space."
        raise CorruptFileError(paths[0].parent, first_line(error), hint) from None


def _find_parquet_files(location: DatasetLocation, root: Path | None) -> dict[str, list[Path]]:
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


def _load_from_hub(datasets: Any, location: DatasetLocation, streaming: bool) -> dict[str, Any]:
    reachable, offline = _is_reachable(str(location.hub)), datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = offline or not reachable  # then the cache alone is used, without retries
    try:
        with silence_datasets(datasets, progress_bars=reachable):
            return dict(datasets.load_dataset(location.hub, location.config, streaming=streaming).items())
    except Exception as error:
        state = first_line(error) if reachable else "which cannot be reached"
        searched = f"the Hugging Face hub as {location.hub} ({state})"
        raise DatasetNotFoundError.for_dataset(location.name, [searched], location.download_hint(None)) from None
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
    hide = not progress_bars and not hidden
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if hide:
            datasets.enable_progress_bars()


def _select_columns(location: DatasetLocation, split: str, table: Any, columns: Sequence[Sequence[str]]) -> Any:
    present = table.column_names or list(next(iter(table)))
    selected = [next((name for name in names if name in present), None) for names in columns]
    if None in selected:
        expected = f"no column {' or '.join(columns[selected.index(None)])}, but {format_names(present)}"
        raise DatasetNotFoundError(f"{location.name}, split {split}, has {expected}.")
    return table.select_columns(selected).with_format("arrow")


class RowId(NamedTuple):
    """Name of a row, which prints as "cifar10, split train, row 7"."""

    dataset: str
    split: str
    number: int

    def __str__(self) -> str:
        return f"{self.dataset}, split {self.split}, row {self.number}"


EncodedRow = tuple[RowId, Any, Any]  # name, input and target of a row, as they are stored
Decoder = Callable[[Any, RowId], Tensor]  # of a value and the name of its row; sent to worker processes


@dataclass(frozen=True)
class RowDecoder:
    """Decoder of rows.

    Attributes:
        decode_x: Decodes an input.
        decode_y: Decodes a target.
        finish: Applied to the decoded inputs of many rows at once; None for nothing.
    """

    decode_x: Decoder
    decode_y: Decoder
    finish: Callable[[list[Tensor], list[RowId]], list[Tensor]] | None = None

    def __call__(self, row: EncodedRow) -> tuple[Tensor, Tensor]:
        (x,), (y,) = self.decode_rows([row])
        return x, y

    def decode_rows(self, rows: Sequence[EncodedRow]) -> tuple[list[Tensor], list[Tensor]]:
        """Decode many rows.

        Args:
            rows: Rows as they are stored.

        Returns:
            One input and one target for each row.

        Raises:
            CorruptFileError: If a value cannot be decoded, or a mask has another size than its image.
        """
        xs, ys = [self.decode_x(x, where) for where, x, _ in rows], [self.decode_y(y, where) for where, _, y in rows]
        for (where, *_), x, y in zip(rows, xs, ys, strict=True):
            if y.ndim > 1 and x.shape[1:] != y.shape:
                sizes = f"its mask is {tuple(y.shape)}, but its image {tuple(x.shape[1:])} pixels"
                raise CorruptFileError(str(where), sizes)
        return (xs if self.finish is None or not xs else self.finish(xs, [where for where, *_ in rows])), ys


@dataclass(frozen=True, eq=False)
class ArrowSource:
    """Source that decodes rows of a table.

    Attributes:
        table: A `datasets.Dataset` of Arrow tables with the columns of inputs and targets.
        dataset: Name of the data set.
        split: Name of the split.
        decoder: Decodes rows.
    """

    table: Any
    dataset: str
    split: str
    decoder: RowDecoder

    def __len__(self) -> int:
        return len(self.table)

    def read(self, rows: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and targets of some rows; see `neuboots.data.dataset.Source`."""
        values = (column.to_pylist() for column in self.table[list(rows)].columns)
        return self.decoder.decode_rows([(self._name(row), x, y) for row, x, y in zip(rows, *values, strict=True)])

    def read_targets(self, rows: Sequence[int]) -> list[Tensor]:
        """Targets of some rows; see `neuboots.data.dataset.Source`."""
        name = self.table.column_names[1]
        values = self.table.select_columns([name])[list(rows)].column(0).to_pylist()
        return [self.decoder.decode_y(y, self._name(row)) for y, row in zip(values, rows, strict=True)]

    def _name(self, row: int) -> RowId:
        return RowId(self.dataset, self.split, row)


def stream_rows(
    table: Any, dataset: str, split: str, fraction: float = 0.0, seed: int = 0, *, held_out: bool = False
) -> Iterator[EncodedRow]:
    """Read the rows of a streamed table; the argument `read` of `StreamingDataset`.

    A fraction is held out at even distances: row r if ⌊(r + 1) f + φ⌋ > ⌊r f + φ⌋, with φ given by the seed.

    Args:
        table: A `datasets.IterableDataset` of Arrow tables with the columns of inputs and targets.
        dataset: Name of the data set.
        split: Name of the split.
        fraction: Fraction of the rows that is held out.
        seed: Random seed.
        held_out: Whether to read the rows held out, or all others.

    Yields:
        Rows as they are stored.

    Raises:
        CorruptFileError: If the stream ends early.
    """
    number, datasets = 0, import_optional("datasets")
    key = derive_keys(torch.zeros(1), seed, "validation")
    phase = float(draw_uniform(key, torch.zeros(1, dtype=torch.int64)))
    batches = iter(table.iter(batch_size=ROWS_PER_READ))  # iter(table) would skip rows in a worker process
    while True:
        try:
            with silence_datasets(datasets):
                batch = next(batches, None)
        except Exception as error:  # of the network or Parquet
            where = f"{RowId(dataset, split, number)} or after"
            raise CorruptFileError(where, f"the stream ended ({type(error).__name__})") from None
        if batch is None:
            return
        for x, y in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            is_held_out = math.floor((number + 1) * fraction + phase) > math.floor(number * fraction + phase)
            if is_held_out == held_out:
                yield RowId(dataset, split, number), x, y
            number += 1


def build_splits(
    name: str, tables: Mapping[str, Any], decoder: RowDecoder, transform: Transform, options: LoadOptions
) -> tuple[Any, Any, Any]:
    """Make data sets of the splits of a table; a missing validation split is held out of the training split.

    Args:
        name: Name of the data set, for error messages.
        tables: Table of each split, as `open_tables` returns them.
        decoder: Decodes rows.
        transform: Transform of the inputs.
        options: Options of the splits.

    Returns:
        Training, validation and test split; None for one that does not exist.

    Raises:
        CorruptFileError: If the class of a training row is not valid.
    """
    names = {split: split for split in tables}
    if "test" not in names and "validation" in names:
        names["test"] = names.pop("validation")
    if options.streaming:
        reads = {split: partial(stream_rows, tables[table], name, table) for split, table in names.items()}
        if "validation" not in names and options.val_fraction > 0:
            train = partial(reads["train"], options.val_fraction, options.seed)
            reads |= {"train": train, "validation": partial(train, held_out=True)}
        streams = {split: StreamingDataset(read, transform, decode=decoder) for split, read in reads.items()}
        return streams["train"], streams.get("validation"), streams.get("test")
    sources = {split: ArrowSource(tables[table], name, table, decoder) for split, table in names.items()}
    datasets = {split: LazyDataset(source, transform) for split, source in sources.items()}
    return complete_splits(datasets, options.val_fraction, 0.0, options.seed, stratify=True)
