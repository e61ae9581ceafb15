"""Small data sets in the layout of the Hugging Face hub, and a cache of its library that is the test's own."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

from neuboots.data import DatasetNotFoundError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Import this into a test file: nothing is written to the user's cache, and no data root is taken from outside."""
    import datasets

    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.delenv("NEUBOOTS_DATA", raising=False)
    return cache


def tensors(split: Any) -> tuple[Tensor, Tensor]:
    """x and y of all rows of a split, in memory or streamed."""
    if isinstance(split, TensorDataset):
        return split.tensors  # type: ignore[return-value]
    x, y = zip(*split, strict=True)
    return torch.stack(x), torch.stack(y)


def assert_not_found(load: Callable[[Path], Any], path: Path) -> None:
    with pytest.raises(DatasetNotFoundError):
        load(path)


def encoded(pixels: Any, *, mode: str | None = None, kind: str = "PNG") -> bytes:
    """An array (H, W) or (H, W, 3) of bytes, or a PIL image, as a file."""
    file = io.BytesIO()
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(np.asarray(pixels, dtype=np.uint8))
    (picture.convert(mode) if mode else picture).save(file, kind)
    return file.getvalue()


def pixels_of(number: int, shape: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, tuple(shape), dtype=np.uint8)


def write_split(
    folder: Path,
    split: str,
    columns: dict[str, Sequence[Any]],
    *,
    labels: Sequence[str] = (),
    shards: int = 1,
    features: bool = True,
) -> list[Path]:
    """<folder>/<split>-0000k-of-0000n.parquet; bytes are columns of images, and "label" columns have names."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    def feature(name: str, values: Sequence[Any]) -> Any:
        if isinstance(values[0], bytes):
            return datasets.Image()
        if labels and name.endswith("label"):
            return datasets.ClassLabel(names=list(labels))
        return datasets.Value("string" if isinstance(values[0], str) else "int64")

    kinds = datasets.Features({name: feature(name, values) for name, values in columns.items()})
    rows = {
        name: [{"bytes": value, "path": None} for value in values] if isinstance(values[0], bytes) else list(values)
        for name, values in columns.items()
    }
    table = pa.table(rows, schema=kinds.arrow_schema)
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-len(table) // shards)
    paths = [folder / f"{split}-{k:05d}-of-{shards:05d}.parquet" for k in range(shards)]
    for k, path in enumerate(paths):
        part = table.slice(k * size, size)
        pq.write_table(part if features else part.replace_schema_metadata(None), path)
    return paths


def write_voc(root: Path, lists: dict[str, list[str]], *, masks: str = "SegmentationClass") -> dict[str, Any]:
    """Images and masks of 20 × 30 pixels in the folders of PASCAL VOC; returns the masks by name."""
    made = {}
    for folder in ("JPEGImages", masks, "ImageSets/Segmentation"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for listed, names in lists.items():
        for name in names:
            made[name] = pixels_of(len(made), (20, 30)) % 21
            made[name][0] = 255
            picture = Image.fromarray(made[name])
            picture.putpalette(list(range(256)) * 3)
            (root / masks / f"{name}.png").write_bytes(encoded(picture))
            (root / "JPEGImages" / f"{name}.jpg").write_bytes(encoded(pixels_of(0, (20, 30, 3)), kind="JPEG"))
        (root / "ImageSets" / "Segmentation" / f"{listed}.txt").write_text("\n".join(names) + "\n\n")
    return made


def write_images(
    folder: Path,
    *,
    counts: dict[str, int],
    size: int = 32,
    channels: int = 3,
    classes: int = 10,
    image: str = "image",
    label: str = "label",
    **options: Any,
) -> None:
    """Splits of random images whose labels go round; row r of split s is pixels_of(1000 · place of s + r)."""
    shape = (size, size) if channels == 1 else (size, size, channels)
    for place, (split, count) in enumerate(counts.items()):
        images = [encoded(pixels_of(1000 * place + row, shape)) for row in range(count)]
        write_split(folder, split, {image: images, label: [row % classes for row in range(count)]}, **options)
