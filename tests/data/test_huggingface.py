"""Data roots, the Hugging Face hub, Arrow sources and held-out rows."""

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from _hub import encoded, own_cache, pixels_of, write_images, write_split
from torch.utils.data import DataLoader

from neuboots._validation import ArgumentError
from neuboots.data._common import CorruptFileError, DatasetNotFoundError, resolve_data_root
from neuboots.data.dataset import LazyDataset, StreamingDataset, TensorSource, hold_out
from neuboots.data.huggingface import (
    ArrowSource,
    DatasetLocation,
    RowDecoder,
    RowId,
    open_tables,
    stream_rows,
)
from neuboots.data.images import decode_image

__all__ = ["own_cache"]

PLACE = DatasetLocation("toys", "someone/toys", "plain_text")
COLUMNS = [("image", "img"), ("label", "fine_label")]


def colour(value: Any, where: RowId) -> torch.Tensor:
    return decode_image(value, 3, str(where))


def number(value: Any, where: RowId) -> torch.Tensor:
    return torch.tensor(value)


DECODER = RowDecoder(colour, number)


def opened(root: Path | None, *, streaming: bool = False, place: DatasetLocation = PLACE) -> Any:
    return open_tables(place, root, COLUMNS, streaming=streaming)


def lazy(root: Path | None, split: str = "train") -> LazyDataset:
    return LazyDataset(ArrowSource(opened(root)[split], "toys", split, DECODER))


def stream(root: Path | None, split: str = "train") -> StreamingDataset:
    return StreamingDataset(partial(stream_rows, opened(root, streaming=True)[split], "toys", split), decode=DECODER)


def row_numbers(table: Any, *options: Any, **more: Any) -> list[int]:
    return [row.number for row, _, _ in stream_rows(table, "toys", "train", *options, **more)]


def test_argument_comes_before_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_data_root(None) is None
    monkeypatch.setenv("NEUBOOTS_DATA", str(tmp_path))
    assert resolve_data_root(None) == tmp_path
    (tmp_path / "other").mkdir()
    assert resolve_data_root(str(tmp_path / "other")) == tmp_path / "other"
    monkeypatch.setenv("NEUBOOTS_DATA", "")
    assert resolve_data_root(None) is None
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_data_root("~/other") == tmp_path / "other"


def test_root_missing_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatasetNotFoundError):
        resolve_data_root(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatasetNotFoundError):  # and not the folder where one stands
        resolve_data_root("")
    with pytest.raises(TypeError):
        resolve_data_root(7)  # type: ignore[arg-type]
    monkeypatch.setenv("NEUBOOTS_DATA", str(tmp_path / "gone"))
    with pytest.raises(DatasetNotFoundError):
        resolve_data_root(None)


def labelled(counts: list[int]) -> LazyDataset:
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    return LazyDataset(TensorSource(torch.arange(len(labels))[:, None], labels))


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
def test_every_class_gives_its_fraction(share: float) -> None:
    part = labelled([100, 57, 31, 4])
    rest, some = hold_out(part, share, seed=3, strata=part.targets)
    assert some is not None
    assert len(some) == round(share * len(part))
    for label, count in enumerate([100, 57, 31, 4]):
        assert abs(int((some.targets == label).sum()) - share * count) <= 1
    rows = [int(x) for part in (rest, some) for x, _ in part]
    assert sorted(rows) == list(range(len(part)))
    assert rows != sorted(rows)


def test_rows_for_validation_are_drawn_by_seed() -> None:
    part = labelled([40, 40])
    rows = [held_out.rows for seed in (0, 0, 1) if (held_out := hold_out(part, 0.25, seed=seed)[1]) is not None]
    assert rows[0] == rows[1] != rows[2]


def test_hold_out_checks_fraction_and_strata() -> None:
    part = labelled([5, 5])
    assert hold_out(part, 0, seed=0) == (part, None)
    for share in (-0.1, 1, 1.5, float("nan"), True, "0.1", None):
        with pytest.raises(ArgumentError):
            hold_out(part, share, seed=0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        hold_out(part.take([0]), 0.5, seed=0)
    with pytest.raises(ArgumentError):
        hold_out(part, 0.5, seed=0, strata=torch.zeros(3))
    rest, some = hold_out(part, 0.001, seed=0)  # a share that was asked for is never none
    assert (len(rest), len(some or [])) == (9, 1)


@pytest.mark.parametrize(("image", "label"), [("image", "label"), ("img", "fine_label")])
@pytest.mark.parametrize("folder", ["toys/data", "toys/plain_text", "toys", "someone/toys/data"])
@pytest.mark.parametrize("make", [lazy, stream])
def test_both_namings_in_every_layout(tmp_path: Path, image: str, label: str, folder: str, make: Any) -> None:
    write_images(tmp_path / folder, counts={"train": 5, "test": 3}, image=image, label=label)
    assert list(opened(tmp_path)) == ["train", "test"]
    rows = list(make(tmp_path, "test"))
    assert (rows[2][0].permute(1, 2, 0).numpy() * 255).round().astype(int).tolist() == pixels_of(
        1002, (32, 32, 3)
    ).tolist()
    assert [int(y) for _, y in rows] == [0, 1, 2]


@pytest.mark.parametrize("make", [lazy, stream])
def test_columns_are_found_in_any_order(tmp_path: Path, make: Any) -> None:
    images = [encoded(pixels_of(row, (4, 4, 3))) for row in range(3)]
    write_split(tmp_path / "toys/data", "train", {"label": [2, 1, 0], "more": [7, 8, 9], "img": images})
    assert [int(y) for _, y in make(tmp_path)] == [2, 1, 0]


def test_rows_are_read_in_order_that_is_asked_for(tmp_path: Path) -> None:
    write_images(tmp_path / "toys/data", counts={"train": 50}, classes=50, shards=3)
    source = lazy(tmp_path).source
    assert len(source) == 50
    rows = [41, 3, 3, 49, 0]
    xs, ys = source.read(rows)
    for x, y, target, row in zip(xs, ys, source.read_targets(rows), rows, strict=True):
        assert (x.permute(1, 2, 0).numpy() == pixels_of(row, (32, 32, 3))).all()
        assert int(y) == int(target) == row
        assert y.dtype == target.dtype == torch.int64
        assert y.shape == ()
    assert source.read([]) == ([], [])


def test_nothing_is_printed_and_bars_are_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_images(tmp_path / "toys/data", counts={"train": 3})
    assert not datasets.are_progress_bars_disabled()
    opened(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()


def test_dataset_missing_in_root_or_outside_hub(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match="hf download someone/toys"):
        opened(tmp_path)
    (tmp_path / "toys").mkdir()
    for root, place in ((tmp_path, PLACE), (tmp_path, DatasetLocation("cells")), (None, DatasetLocation("cells"))):
        with pytest.raises(DatasetNotFoundError):
            opened(root, place=place)


def test_splits_columns_and_files_missing(tmp_path: Path) -> None:
    write_images(tmp_path / "toys/data", counts={"test": 3, "extra": 3})
    with pytest.raises(DatasetNotFoundError):
        opened(tmp_path)
    write_images(tmp_path / "toys/data", counts={"train": 3}, image="picture")
    with pytest.raises(DatasetNotFoundError):
        opened(tmp_path)
    paths = write_split(tmp_path / "toys/data", "train", {"image": [encoded(pixels_of(0, (4, 4)))] * 4}, shards=2)
    paths[0].unlink()
    (tmp_path / "toys/data/train-00000-of-00001.parquet").unlink()
    with pytest.raises(DatasetNotFoundError):
        opened(tmp_path)


class Unreachable:
    def dataset_info(self, name: str, timeout: float) -> None:
        raise OSError("no route to host")


def test_unreachable_hub_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tries again and again: the library is told that it is offline, and looks into its cache alone."""
    states = []

    def load_dataset(name: str, config: str, streaming: bool) -> None:
        states.append((name, config, datasets.config.HF_HUB_OFFLINE))
        raise ConnectionError("not cached")

    monkeypatch.setattr("huggingface_hub.HfApi", Unreachable)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DatasetNotFoundError, match="hf download someone/toys"):
        opened(None)
    assert states == [("someone/toys", "plain_text", True)]
    assert not datasets.config.HF_HUB_OFFLINE


def test_hub_is_asked_by_name_and_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path, counts={"train": 4, "test": 2, "extra": 3}, image="img", label="fine_label")
    real, asked = datasets.load_dataset, []

    def load_dataset(name: str, config: str, streaming: bool) -> Any:
        asked.append((name, config, datasets.config.HF_HUB_OFFLINE))
        files = {split: str(tmp_path / f"{split}-*.parquet") for split in ("train", "test", "extra")}
        return real("parquet", data_files=files, streaming=streaming)

    monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(dataset_info=lambda name, timeout: None))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for make in (lazy, stream):
        assert [int(y) for _, y in make(None, "test")] == [0, 1]
    assert list(opened(None)) == ["train", "test"]
    assert asked[0] == ("someone/toys", "plain_text", False)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("broken", ["cut off", "empty", "text"])
def test_parquet_file_that_is_no_whole_one_is_reported(tmp_path: Path, broken: str, streaming: bool) -> None:
    write_images(tmp_path / "toys/data", counts={"train": 30}, shards=2)
    file = tmp_path / "toys/data/train-00001-of-00002.parquet"
    whole = file.read_bytes()
    file.write_bytes({"cut off": whole[: len(whole) // 2], "empty": b"", "text": b"<html>not found</html>"}[broken])
    with pytest.raises(CorruptFileError):
        opened(tmp_path, streaming=streaming)


def test_interrupted_stream_raises_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The library itself would write its own words on the file that does not fit."""
    _, file = write_split(
        tmp_path / "toys/data", "train", {"image": [encoded(pixels_of(0, (4, 4)))] * 4, "label": [0, 1, 2, 3]}, shards=2
    )
    pq.write_table(pq.read_table(file).set_column(1, "label", [["a", "b"]]), file)
    logger = logging.getLogger("datasets")
    logger.addHandler(caplog.handler)
    with pytest.raises(CorruptFileError):
        list(stream(tmp_path))
    logger.removeHandler(caplog.handler)
    assert caplog.records == []


@pytest.mark.parametrize("streaming", [False, True])
def test_null_affects_one_row(tmp_path: Path, streaming: bool) -> None:
    """No type is guessed from the rows that pass by."""
    columns = {"img": [encoded(pixels_of(row, (4, 4, 3))) for row in range(150)], "label": list(range(150))}
    (path,) = write_split(tmp_path / "toys/data", "train", columns)
    labels = [None if row in (0, 70) else row for row in range(150)]
    pq.write_table(pq.read_table(path).set_column(1, "label", pa.array(labels, pa.int64())), path)
    table = opened(tmp_path, streaming=streaming)["train"]
    if streaming:
        found = [value for _, _, value in stream_rows(table, "toys", "train")]
    else:
        found = table[:].column("label").to_pylist()
    assert found == labels


def test_cache_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "toys/data", counts={"train": 3})
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    with pytest.raises(ValueError, match=str(tmp_path)):
        opened(tmp_path)


@pytest.mark.parametrize("make", [lazy, stream])
def test_image_that_is_no_image_is_reported(tmp_path: Path, make: Any) -> None:
    images = [encoded(pixels_of(row, (8, 8, 3))) for row in range(4)]
    images[2] = images[2][:60]
    write_split(tmp_path / "toys/data", "train", {"image": images, "label": [0, 1, 2, 3]})
    with pytest.raises(CorruptFileError, match="toys, split train, row 2"):
        list(make(tmp_path))
    assert len(lazy(tmp_path).__getitems__([0, 1, 3])) == 3


@pytest.mark.parametrize("share", [0.1, 0.3, 0.8])
def test_stream_holds_out_rows_at_even_distances(tmp_path: Path, share: float) -> None:
    write_images(tmp_path / "toys/data", counts={"train": 200}, classes=200, size=2, shards=2)
    table = opened(tmp_path, streaming=True)["train"]
    assert row_numbers(table) == list(range(200))
    apart = {*row_numbers(table, share, held_out=True)}
    assert {*row_numbers(table, share)} == set(range(200)) - apart
    assert abs(len(apart) - 200 * share) <= 1
    assert max(abs(sum(number < k for number in apart) - k * share) for k in range(200)) <= 1  # at even distances
    assert {*row_numbers(table, share, held_out=True)} == apart
    assert len({tuple(row_numbers(table, share, seed, held_out=True)) for seed in range(9)}) > 1


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [lazy, stream])
def test_other_processes_read_each_row_once(tmp_path: Path, context: str, make: Any) -> None:
    write_images(tmp_path / "toys/data", counts={"train": 41}, classes=41, size=4, shards=2)
    loader = DataLoader(make(tmp_path), batch_size=7, num_workers=2, multiprocessing_context=context)
    assert sorted(torch.cat([y for _, y in loader]).tolist()) == list(range(41))
