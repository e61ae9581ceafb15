"""NIfTI volumes with labels."""

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from _hub import assert_not_found
from torch.utils.data import DataLoader

from neuboots._validation import ArgumentError
from neuboots.data._common import CorruptFileError
from neuboots.data.augment import CropFlip
from neuboots.data.dataset import LoadOptions
from neuboots.data.volumes import (
    find_volume_file,
    load_hippocampus3d,
    load_volume_folder,
    read_affine,
    standardize_volumes,
)

SHAPE = (5, 6, 7)
RNG = np.random.default_rng(0)


def save(voxels: np.ndarray, file: Path, affine: np.ndarray | None = None) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4) if affine is None else affine), file)
    return file


def pairs(
    folder: Path, count: int, *, names: tuple[str, str] = ("images", "labels"), end: str = ".nii.gz", channels: int = 0
) -> dict[str, Any]:
    """Volumes of unlike scales, labels 0, 1, 2, and an affine of its own for each."""
    made = {}
    for i in range(count):
        shape = (*SHAPE, channels) if channels else SHAPE
        voxels = RNG.normal(100, 7, shape).astype(np.float32) * np.float32(1000 ** (i % 2))
        labels = RNG.integers(0, 3, SHAPE, dtype=np.uint8)
        labels[0, 0, :3] = range(3)
        affine = np.diag([1.0, 2.0, 3.0 + i, 1.0])
        affine[:3, 3] = [i, -i, 0.5]
        save(voxels, folder / names[0] / f"scan_{i}{end}", affine)
        save(labels, folder / names[1] / f"scan_{i}{end}", affine)
        made[f"scan_{i}{end}"] = voxels, labels, affine
    return made


@pytest.mark.parametrize("names", [("images", "labels"), ("imagesTr", "labelsTr")])
@pytest.mark.parametrize("end", [".nii", ".nii.gz"])
def test_every_row_is_its_two_files(tmp_path: Path, names: tuple[str, str], end: str) -> None:
    made = pairs(tmp_path, 10, names=names, end=end)
    (tmp_path / names[0] / f"._scan_0{end}").write_bytes(b"\0")  # as in the Decathlon's archives
    (tmp_path / names[0] / "notes.txt").write_text("hello")
    data = load_volume_folder(tmp_path)
    assert (data.task, data.channels, data.classes, data.ignore_index) == ("segmentation", 1, ("0", "1", "2"), 255)
    assert [Path(file).name for file in data.train.source.skipped] == ["notes.txt"]
    seen = []
    for part in (data.train, data.validation, data.test):
        for i in range(len(part)):
            x, y = part[i]
            name = find_volume_file(part, i).name
            voxels, labels, affine = made[name]
            wanted = (voxels.astype(np.float64) - voxels.mean(dtype=np.float64)) / voxels.std(dtype=np.float64)
            assert x.dtype == torch.float32
            assert x.shape == (1, *SHAPE)
            assert torch.allclose(x[0].double(), torch.from_numpy(wanted), rtol=0, atol=1e-5)
            assert y.dtype == torch.int64
            assert torch.equal(y, torch.from_numpy(labels).long())
            assert torch.equal(part.target(i), y)
            assert np.array_equal(read_affine(part, i), affine)
            seen.append(name)
    assert sorted(seen) == sorted(made)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [8, 1, 1]


def test_files_and_affines_after_rows_were_taken(tmp_path: Path) -> None:
    made = pairs(tmp_path, 6)
    data = load_volume_folder(tmp_path, val_fraction=0, test_fraction=0)
    few = data.train.take([4, 1]).take([1, 0])
    assert [find_volume_file(few, i).name for i in (0, 1, -1)] == ["scan_1.nii.gz", "scan_4.nii.gz", "scan_4.nii.gz"]
    assert np.array_equal(read_affine(few, 1), made["scan_4.nii.gz"][2])
    assert find_volume_file(data.train, -1).name == "scan_5.nii.gz"
    with pytest.raises(IndexError):
        find_volume_file(few, 2)
    with pytest.raises(ArgumentError):
        find_volume_file([1], 0)


def test_channels_come_first(tmp_path: Path) -> None:
    made = pairs(tmp_path, 3, channels=2)
    data = load_volume_folder(tmp_path, val_fraction=0, test_fraction=0)
    x, _ = data.train[1]
    assert (data.channels, x.shape) == (2, (2, *SHAPE))
    voxels = torch.from_numpy(made["scan_1.nii.gz"][0]).movedim(-1, 0)
    for channel, raw in zip(x, voxels, strict=True):
        assert float(torch.corrcoef(torch.stack([channel.flatten(), raw.flatten()]))[0, 1]) > 0.9999
        assert abs(float(channel.mean())) < 1e-5
    save(made["scan_0.nii.gz"][0][..., None, :], tmp_path / "images" / "scan_1.nii.gz", made["scan_1.nii.gz"][2])
    assert data.train[1][0].shape == (2, *SHAPE)  # (X, Y, Z, 1, C), as NIfTI has vectors
    save(made["scan_0.nii.gz"][0][..., 0], tmp_path / "images" / "scan_2.nii.gz", made["scan_2.nii.gz"][2])
    with pytest.raises(CorruptFileError):
        data.train[2]


def test_labels_that_were_scaled_are_whole_again(tmp_path: Path) -> None:
    made = pairs(tmp_path, 3)
    _, labels, affine = made["scan_0.nii.gz"]
    image = nibabel.Nifti1Image((85 * labels).astype(np.uint8), affine)
    image.header.set_slope_inter(1 / 85, 0)  # which is not quite that in single precision
    nibabel.save(image, tmp_path / "labels" / "scan_0.nii.gz")
    data = load_volume_folder(tmp_path, val_fraction=0, test_fraction=0)
    assert torch.equal(data.train.target(0), torch.from_numpy(labels).long())


def test_standardize_is_definition_and_changes_nothing_twice() -> None:
    x = torch.rand(2, 3, 4, 5, 6, dtype=torch.float64) * torch.tensor([1.0, 1e6]).view(2, 1, 1, 1, 1) + 3
    once = standardize_volumes(x)
    flat = x.flatten(2)
    wanted = (flat - flat.mean(2, keepdim=True)) / flat.std(2, correction=0, keepdim=True)
    assert torch.allclose(once.flatten(2), wanted, rtol=1e-9, atol=1e-9)
    assert torch.allclose(standardize_volumes(once), once, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "labels",
    [
        {"0": "background", "2": "right", "1": "left"},
        {"background": 0, "left": 1, "right": 2},  # as nnU-Net has it
    ],
)
def test_names_of_classes_from_description(tmp_path: Path, labels: dict[str, Any]) -> None:
    pairs(tmp_path, 3, names=("imagesTr", "labelsTr"))
    (tmp_path / "imagesTs").mkdir()
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": labels}))
    assert load_volume_folder(tmp_path).classes == ("background", "left", "right")
    assert load_volume_folder(tmp_path, classes=["x", "y", "z"]).classes == ("x", "y", "z")


def test_crops_with_ignore_index_around(tmp_path: Path) -> None:
    pairs(tmp_path, 6)
    assert load_volume_folder(tmp_path).augmentation is None
    data = load_volume_folder(tmp_path, crop=(4, 8, 4), val_fraction=0, test_fraction=0)
    assert data.augmentation == CropFlip((4, 8, 4), flips=(0,), ignore_index=255)
    x, y = next(iter(DataLoader(pickle.loads(pickle.dumps(data.augmented_train)), batch_size=6)))
    assert x.shape == (6, 1, 4, 8, 4)
    assert y.unique().tolist() == [0, 1, 2, 255]
    assert bool((x[:, 0][y == 255] == 0).all())
    assert int((y == 255).sum()) == 6 * 4 * 4 * 2


def broken(tmp_path: Path) -> tuple[Any, Path, Path]:
    pairs(tmp_path, 3)
    data = load_volume_folder(tmp_path, classes=["a", "b", "c"], val_fraction=0, test_fraction=0)
    return data, tmp_path / "images" / "scan_1.nii.gz", tmp_path / "labels" / "scan_1.nii.gz"


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("content", ["cut", "header", "empty", "text", "gone"])
def test_broken_file_is_reported(tmp_path: Path, which: int, content: str) -> None:
    data, *files = broken(tmp_path)
    bad = files[which - 1]
    whole = bad.read_bytes()
    text = {"cut": whole[: len(whole) // 2], "header": whole[:20], "empty": b"", "text": b"no volume at all"}
    bad.unlink() if content == "gone" else bad.write_bytes(text[content])
    with pytest.raises(CorruptFileError):
        data.train[1]
    data.train[0]


@pytest.mark.parametrize(
    ("voxels", "affine"),
    [
        (np.zeros((5, 6, 8)), None),
        (np.zeros(SHAPE), np.diag([1.0, 2.0, 4.5, 1.0])),
        (np.full(SHAPE, 3), None),
        (np.full(SHAPE, -1), None),
        (np.full(SHAPE, 0.5), None),
        (np.full(SHAPE, np.nan), None),
        (np.full(SHAPE, np.inf), None),
        (np.zeros((*SHAPE, 2)), None),
        (np.zeros(SHAPE[:2]), None),
    ],
)
def test_labels_that_do_not_match(tmp_path: Path, voxels: np.ndarray, affine: np.ndarray | None) -> None:
    data, image, label = broken(tmp_path)
    own = nibabel.load(image).affine
    save(voxels.astype(np.float32), label, own if affine is None else affine)
    with pytest.raises(CorruptFileError):
        data.train[1]


@pytest.mark.parametrize("which", [0, 1])
def test_file_whose_checksum_fails_is_reported(tmp_path: Path, which: int) -> None:
    """All voxels can be unpacked, but one of them is another: nibabel stops before the checksum."""
    data, *files = broken(tmp_path)
    bad = files[which]
    voxels = gzip.decompress(bad.read_bytes())
    bad.write_bytes(gzip.compress(voxels, 0))  # stored as it is: a voxel can be found
    data.train[1]
    packed = bytearray(bad.read_bytes())
    packed[-20] ^= 1
    bad.write_bytes(packed)
    with pytest.raises(CorruptFileError):
        data.train[1]


@pytest.mark.parametrize("unit", [1.0, 1e-4])
def test_affines_may_differ_by_less_than_half_voxel(tmp_path: Path, unit: float) -> None:
    """Whatever the size of a voxel: a micrometre is nothing to a scanner, and much to a microscope."""
    data, image, label = broken(tmp_path)
    affine = np.diag([unit, 2 * unit, 3 * unit, 1.0])
    affine[:3, 3] = [90 * unit, -126 * unit, 7 * unit]
    save(np.ones(SHAPE, np.float32), image, affine)
    for shift, fits in ((0.4, True), (0.6, False)):
        moved = affine.copy()
        moved[2, 3] += 3 * unit * shift
        save(np.zeros(SHAPE, np.uint8), label, moved)
        if fits:
            data.train[1]
        else:
            with pytest.raises(CorruptFileError):
                data.train[1]


def test_folders_and_files_missing(tmp_path: Path) -> None:
    assert_not_found(load_volume_folder, tmp_path / "nowhere")
    assert_not_found(load_volume_folder, tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    (tmp_path / "images" / "scan.dcm").write_bytes(b"")
    assert_not_found(load_volume_folder, tmp_path)
    pairs(tmp_path, 3)
    (tmp_path / "labels" / "scan_2.nii.gz").unlink()
    assert_not_found(load_volume_folder, tmp_path)


@pytest.mark.parametrize("name", ["hippocampus3d", "Task04_Hippocampus"])
def test_hippocampus_in_either_layout(tmp_path: Path, name: str) -> None:
    kinds = ("images", "labels") if name == "hippocampus3d" else ("imagesTr", "labelsTr")
    pairs(tmp_path / name, 20, names=kinds)
    data, other = (
        load_hippocampus3d(tmp_path, LoadOptions(val_fraction=0.25, seed=seed, streaming=False)) for seed in (0, 1)
    )
    assert data.classes == ("background", "anterior", "posterior")
    assert [len(part) for part in (data.train, data.validation, data.test)] == [12, 4, 4]
    assert data.test.rows == other.test.rows  # one test set for all
    assert data.validation.rows != other.validation.rows
    x, y = data.augmented_train[0]
    assert (tuple(x.shape), tuple(y.shape)) == ((1, 32, 48, 32), (32, 48, 32))


def test_streams_give_same_rows(tmp_path: Path) -> None:
    pairs(tmp_path / "hippocampus3d", 20)
    data, streamed = (load_hippocampus3d(tmp_path, LoadOptions(0.25, streaming=s)) for s in (False, True))
    for name in ("train", "validation", "test"):
        part, rows = getattr(data, name), list(getattr(streamed, name))
        assert len(rows) == len(part)
        assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(rows, part, strict=True))
    assert load_hippocampus3d(tmp_path, LoadOptions(0.0, streaming=True)).validation is None
    assert next(iter(DataLoader(streamed.augmented_train, batch_size=2)))[0].shape == (2, 1, 32, 48, 32)
