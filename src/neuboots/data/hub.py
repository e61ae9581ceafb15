"""Tables of Hugging Face datasets: from a data root in the hub's layout, or from the hub.

    root/<set>/data/<split>-*.parquet, or load_dataset(<hub name>)  →  Arrow files that are mapped into memory

The Arrow files hold the columns that are needed, and lie in the cache of Hugging Face datasets, wherever HF_HOME says.
A stream reads Parquet as it goes and keeps nothing.

Lhoest et al., Datasets: a community library for natural language processing, EMNLP 2021.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from neuboots.data.sources import VARIABLE, Missing, corrupt, missing, need

SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test",),
}
"""What the splits are called: ours, and the names that are taken for it."""

AT_ONCE = 64  # rows of a stream that are in memory
PROBE_SECONDS = 10.0  # how long the hub may take to answer before it counts as out of reach


@dataclass(frozen=True)
class Place:
    """Where a set lies: its folder in a data root, and its name on the hub (None: it is on no hub)."""

    name: str
    hub: str | None = None
    config: str | None = None
    how: str = ""  # how to get what is on no hub, or is elsewhere too


def open_tables(place: Place, root: Path | None, columns: Sequence[Sequence[str]], *, streaming: bool) -> "Tables":
    """The splits of a set, each with one column for each group of names in `columns`, under the group's first name.

    With a data root, that is where the set must lie; without, it is loaded from the hub.
    """
    datasets = need("datasets")
    if root is None:
        found = _from_hub(datasets, place, streaming)
        tables = {ours: found[theirs] for ours, theirs in _named(place, list(found)).items()}
    else:
        tables = _from_root(datasets, place, root, columns, streaming)
    return {split: _with_columns(place, split, table, columns) for split, table in tables.items()}


Tables = Mapping[str, Any]
"""Split → a datasets.Dataset or IterableDataset."""


# -- a data root ---------------------------------------------------------------------------------------


def folder_of(place: Place, root: Path) -> Path:
    """The folder of a set in a data root: by its name, or by that of its repository on the hub."""
    looked = [root / name for name in dict.fromkeys([place.name, *_hub_names(place)])]
    for folder in looked:
        if folder.is_dir():
            return folder
    raise missing(place.name, looked[:1], how_to_get(place, root))


def how_to_get(place: Place, root: Path | None) -> str:
    if place.hub is None:
        return f"{place.how}, and give its folder's parent as root=… or in the variable {VARIABLE}"
    target = (root or Path("<data root>")) / place.name
    elsewhere = (
        f"or, with internet, load it from the Hugging Face hub as {place.hub}: without root and {VARIABLE}"
        if root is not None
        else f"and give <data root> as root=… or in the variable {VARIABLE}"
    )
    or_else = f"; or {place.how}" if place.how else ""
    return f"run `hf download {place.hub} --repo-type dataset --local-dir {target}`, {elsewhere}{or_else}"


def _hub_names(place: Place) -> list[str]:
    return [] if place.hub is None else [place.hub.split("/")[-1], place.hub]


def _from_root(
    datasets: Any, place: Place, root: Path, columns: Sequence[Sequence[str]], streaming: bool
) -> dict[str, Any]:
    folder = folder_of(place, root)
    files = _parquet_files(place, folder, root)
    tables = {}
    for ours, theirs in _named(place, list(files)).items():
        paths = files[theirs]
        present = _columns_in_all(paths)
        chosen = [_chosen(place, ours, present, names) for names in columns]
        with quiet(datasets):
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


def _parquet_files(place: Place, folder: Path, root: Path) -> dict[str, list[Path]]:
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
    raise missing(place.name, [folder / "data" / "<split>-*.parquet"], how_to_get(place, root))


def _check_whole(paths: list[Path]) -> None:
    of = re.search(r"-of-(\d+)", paths[0].name)
    if of is not None and int(of[1]) != len(paths):
        raise Missing(
            f"got {len(paths)} files such as {paths[0]}; expected {int(of[1])}, as its name says: fetch those that are "
            "missing, or remove those of another version"
        )


def _columns_in_all(paths: list[Path]) -> list[str]:
    """The columns that every file of a split has."""
    parquet = need("pyarrow.parquet")
    found: list[list[str]] = []
    for path in paths:
        try:
            with parquet.ParquetFile(path) as file:
                found.append(file.schema_arrow.names)
                rows = file.metadata.num_rows
        except Exception as fault:
            raise corrupt(path, f"it is no whole Parquet file ({type(fault).__name__})") from None
        if rows == 0:  # the library stumbles over such a file
            raise corrupt(path, "it has no row")
    return [name for name in found[0] if all(name in names for names in found)]


def _fault_of(paths: list[Path], fault: Exception) -> ValueError:
    """Which file is to blame, by reading each; if none is, it was the writing of the cache, or they do not fit."""
    parquet = need("pyarrow.parquet")
    for path in paths:
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=256):
                    del batch
        except Exception as inner:
            return corrupt(path, f"it is no whole Parquet file ({type(inner).__name__})")
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


def _from_hub(datasets: Any, place: Place, streaming: bool) -> dict[str, Any]:
    if place.hub is None:
        looked = f"no data root, since neither root=… nor the variable {VARIABLE} was given"
        raise missing(place.name, [looked], how_to_get(place, None))
    reachable = _is_reachable(place)
    try:
        with quiet(datasets, bars=reachable), _offline(datasets, not reachable):
            found = datasets.load_dataset(place.hub, place.config, streaming=streaming)
            return dict(found.items())
    except Exception as fault:
        state = _line(fault) if reachable else "which cannot be reached from here"
        looked = f"the Hugging Face hub as {place.hub} ({state})"
        raise missing(place.name, [looked], how_to_get(place, None)) from None


def _is_reachable(place: Place) -> bool:
    """Asked once, with a time limit: what follows tries again and again for half a minute."""
    hub = need("huggingface_hub")
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
def quiet(datasets: Any, *, bars: bool = False) -> Iterator[None]:
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


def _named(place: Place, found: list[str]) -> dict[str, str]:
    """Our names of the splits that were found; train must be among them."""
    named = {ours: name for ours, names in SPLITS.items() for name in reversed(names) if name in found}
    if "train" not in named:
        raise Missing(f"got {place.name} with the splits {', '.join(found) or 'none'}; expected train among them")
    return named


def _chosen(place: Place, split: str, present: Sequence[str], names: Sequence[str]) -> str:
    for name in names:
        if name in present:
            return name
    raise Missing(
        f"got {place.name}, split {split}, with the columns {', '.join(present)}; expected one called "
        f"{' or '.join(names)}"
    )


def _with_columns(place: Place, split: str, table: Any, columns: Sequence[Sequence[str]]) -> Any:
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
    return table.map(partial(_renamed, names=ours), batched=True, batch_size=AT_ONCE, features=kinds)


def _renamed(rows: Any, names: Mapping[str, str]) -> Any:
    return rows.rename_columns([names[name] for name in rows.column_names])


def class_names(table: Any, column: str) -> tuple[str, ...]:
    """Those that the file gives for a column of labels; none if it gives none."""
    feature = (table.features or {}).get(column)
    return tuple(getattr(feature, "names", None) or ())
