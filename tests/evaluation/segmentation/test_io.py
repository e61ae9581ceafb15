"""Files of segmentation maps: their pixels, affines and names."""

import os
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _nets import noise
from PIL import Image
from torch import Tensor, nn

from neuboots import ArgumentError
from neuboots.evaluation.segmentation import SegmentationMaps, predict_segmentation, write_maps
from neuboots.evaluation.segmentation.io import class_colors, colorize_values
from neuboots.methods.deterministic import DeterministicPredictor


def read(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def by_part(paths: tuple[Path, ...]) -> dict[str, Path]:
    """By the end of their names."""
    return {path.name.split(".")[0].split("-", 1)[1]: path for path in paths}


def make_maps() -> tuple[SegmentationMaps, Tensor, Tensor]:
    """Two 2 × 3 images of four classes, with labels of which some are wrong and one is ignored."""
    labels = torch.tensor([[[0, 1, 2], [3, 0, 1]], [[1, 1, 1], [1, 1, 1]]])
    probs = F.one_hot(labels, 4).movedim(-1, 1) * 0.6 + 0.1
    values = torch.arange(12.0).view(2, 2, 3) / 10
    truth = torch.tensor([[[0, 1, 1], [3, 255, 0]], [[1, 1, 1], [1, 1, 1]]])
    return SegmentationMaps(probs.float(), values, values / 2, values / 4, 5, 0), noise(2, 3, 2, 3), truth


class Halved:
    """x̂ = (x − ½) · 2."""

    def inverse(self, x: Tensor) -> Tensor:
        return x / 2 + 0.5


def test_pictures_have_the_values_of_the_maps(tmp_path: Path) -> None:
    maps, x, truth = make_maps()
    paths = write_maps(maps, x, tmp_path / "new", names=["a", "b"], labels=truth, normalization=Halved())
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in paths)
    first = by_part(paths[:8])
    assert list(first) == ["image", "labels", "overlay", "errors", "entropy", "mutual-information", "std", "sheet"]
    colors = np.array([[0, 0, 0], [230, 159, 0], [86, 180, 233], [0, 158, 115]], np.uint8)
    image = (x[0] / 2 + 0.5).clamp(0, 1).mul(255).round().byte().movedim(0, -1).numpy()
    labels = maps.labels[0].numpy()
    np.testing.assert_array_equal(read(first["image"]), image)
    np.testing.assert_array_equal(read(first["labels"]), labels)  # the pixels are the class numbers
    with Image.open(first["labels"]) as shown:
        np.testing.assert_array_equal(np.asarray(shown.convert("RGB")), colors[labels])
    np.testing.assert_array_equal(read(first["overlay"]), (image.astype(int) + colors[labels]) // 2)
    wrong = np.array([[False, False, True], [False, False, True]])  # the ignored pixel is not wrong
    np.testing.assert_array_equal(read(first["errors"]), np.where(wrong[..., None], (213, 94, 0), image))
    for name in ("entropy", "mutual-information", "std"):
        values = getattr(maps, name.replace("-", "_"))
        largest = float(values.max())  # of both images
        np.testing.assert_array_equal(read(first[name]), colorize_values(values[0], largest).reshape(2, 3, 3))
        with Image.open(first[name]) as shown:
            assert shown.text["scale"].startswith(f"0 to {largest:.3g}")
    assert tuple(read(first["entropy"])[0, 0]) == (68, 1, 84)
    assert tuple(read(by_part(paths[8:])["entropy"])[1, 2]) == (253, 231, 37)


def test_sheet_has_all_panels_and_the_legend(tmp_path: Path) -> None:
    maps, x, truth = make_maps()
    paths = write_maps(maps, x, tmp_path, labels=truth, class_names=["sky", "Straße", "木", "a b"])
    page = read(by_part(paths[:8])["0000-sheet"])
    seen = {tuple(color) for color in page.reshape(-1, 3).tolist()}
    assert {tuple(color) for color in class_colors(4).tolist()} | {(68, 1, 84), (213, 94, 0), (255, 255, 255)} <= seen
    bare = by_part(write_maps(maps, x, tmp_path / "bare")[:7])
    assert "0000-errors" not in bare
    assert read(bare["0000-sheet"]).shape[1] < page.shape[1]
    large = SegmentationMaps(torch.rand(1, 2, 600, 900), *3 * [torch.rand(1, 600, 900)], 2, 0)
    assert max(read(write_maps(large, torch.rand(1, 3, 600, 900), tmp_path / "large")[-1]).shape) < 4 * 600


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_first_channel_is_scaled_to_gray(tmp_path: Path, channels: int) -> None:
    maps, _, _ = make_maps()
    x = torch.stack([torch.linspace(-3, 5, 6).view(1, 2, 3), torch.full((1, 2, 3), 7.0)])
    x = torch.cat([x, 9 * torch.ones(2, channels - 1, 2, 3)], 1)
    images = [read(path) for path in write_maps(maps, x, tmp_path) if path.name.endswith("-image.png")]
    np.testing.assert_array_equal(images[0][..., 0].flatten(), [0, 51, 102, 153, 204, 255])
    assert images[0].shape == (2, 3, 3)
    assert not images[1].any()


def test_class_colors_differ() -> None:
    colors = class_colors(60)
    assert np.array_equal(colors[:9], class_colors(9))
    assert len(np.unique(colors, axis=0)) == 60
    far = np.abs(colors[:22, None].astype(int) - colors[None, :22]).sum(-1) + 999 * np.eye(22, dtype=int)
    assert far.min() > 30  # the 22 of PASCAL VOC


AFFINE = np.array([[-1.5, 0, 0, 90], [0, 2, 0.25, -126], [0, -0.5, 3, -72], [0, 0, 0, 1]])


def make_volumes() -> tuple[SegmentationMaps, Tensor]:
    x = noise(2, 1, 12, 10, 8)
    return predict_segmentation(DeterministicPredictor(nn.Conv3d(1, 3, 1)), x, 3, window=8), x


@pytest.mark.parametrize("each", [False, True])
def test_volumes_have_the_affine_of_the_input(tmp_path: Path, each: bool) -> None:
    maps, x = make_volumes()
    other = np.diag([0.5, 1.0, 2.0, 1.0])
    affine = torch.from_numpy(np.stack([AFFINE, other])) if each else AFFINE
    paths = write_maps(maps, x, tmp_path, names=["v", "w"], affine=affine, labels=maps.labels, probs=True)
    for i, name in enumerate(("v", "w")):
        found = {path.name: nibabel.load(path) for path in paths if path.name.startswith(name) and ".nii" in path.name}
        parts = ("labels", "entropy", "mutual-information", "std", "probs")
        assert [*found] == [f"{name}-{part}.nii.gz" for part in parts]
        for volume in found.values():
            np.testing.assert_array_equal(volume.affine, other if each and i == 1 else AFFINE)
            assert volume.header.get_xyzt_units()[0] == "mm"
        labels = found[f"{name}-labels.nii.gz"]
        assert labels.get_data_dtype() == np.uint8
        np.testing.assert_array_equal(np.asarray(labels.dataobj), maps.labels[i].numpy())
        for part in ("entropy", "mutual-information", "std"):
            values = np.asarray(found[f"{name}-{part}.nii.gz"].dataobj)
            np.testing.assert_array_equal(values, getattr(maps, part.replace("-", "_"))[i].numpy())
        np.testing.assert_array_equal(np.asarray(found[f"{name}-probs.nii.gz"].dataobj), maps.probs[i].movedim(0, -1))
        assert read(tmp_path / f"{name}-sheet.png").ndim == 3


def test_many_classes_need_more_bits(tmp_path: Path) -> None:
    probs, values = torch.full((1, 300, 2, 2, 2), 1 / 300), torch.zeros(1, 2, 2, 2)
    probs[:, 299] = 0.5
    write_maps(SegmentationMaps(probs, values, values, values, 2, 0), torch.zeros(1, 1, 2, 2, 2), tmp_path)
    found = nibabel.load(tmp_path / "image-0000-labels.nii.gz")
    assert found.get_data_dtype() == np.int16
    assert np.unique(found.dataobj).tolist() == [299]
    flat = SegmentationMaps(probs[..., 0], *3 * [values[..., 0]], 2, 0)
    assert np.unique(read(write_maps(flat, torch.zeros(1, 1, 2, 2), tmp_path / "flat")[1])).tolist() == [299]


def test_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps, x, _ = make_maps()
    before = {path: path.read_bytes() for path in write_maps(maps, x, tmp_path)}
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left on device")))
    with pytest.raises(OSError, match="no space left"):
        write_maps(maps, x + noise(*x.shape), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_names_of_any_script_are_accepted(tmp_path: Path) -> None:
    maps, x, _ = make_maps()
    names = ["हिन्दी, किताब", "Straße (木)"]
    paths = write_maps(maps, x, tmp_path, names=names)
    assert all(path.is_file() for path in paths)
    assert {path.name.rsplit("-", 1)[0] for path in paths if path.name.endswith("sheet.png")} == set(names)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        *[({"names": ["a", wrong]}, "names") for wrong in ("../b", "/tmp/b", ".hidden", "", "b\n", "c:b", "b\\c", "A")],
        ({"names": ["a"]}, "names"),
        ({"class_names": ["one"]}, "class_names"),
        ({"affine": np.eye(4)}, "affine"),
        ({"probs": True}, "affine"),
        ({"labels": torch.zeros(2, 5, 5)}, None),
        ({"labels": torch.full((2, 2, 3), 9)}, None),
        ({"x": torch.zeros(2, 3, 4, 4)}, "x"),
    ],
)
def test_invalid_arguments_are_rejected(tmp_path: Path, options: dict[str, Any], name: str | None) -> None:
    maps, x, _ = make_maps()
    with pytest.raises(ArgumentError if name else ValueError, match=name):
        write_maps(maps, options.pop("x", x), tmp_path, **options)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("affine", [np.eye(3), np.stack([np.eye(4)] * 3), np.zeros((4, 4)), np.full((4, 4), np.nan)])
def test_invalid_affine_is_rejected(tmp_path: Path, affine: Any) -> None:
    with pytest.raises(ValueError, match="affine|broadcast|shape"):
        write_maps(*make_volumes(), tmp_path, affine=affine)
