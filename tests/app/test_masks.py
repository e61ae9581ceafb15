"""Tests of app.masks."""

import copy
import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _artifacts import rewrite_artifact
from PIL import Image

from neuboots.app import load_model
from neuboots.app.masks import MaskModel, _find_unmasked, fit_masks
from neuboots.data import CorruptFileError, DatasetNotFoundError
from neuboots.data.image_folder import IGNORE_INDEX, LabelMap
from neuboots.serialization import ArtifactError

QUICK: dict[str, Any] = {"epochs": 1, "num_samples": 2, "progress": False}


def make_scene(rng: np.random.Generator, height: int, width: int) -> tuple[Any, Any]:
    """A bright box on a dark ground, and its mask."""
    mask = np.zeros((height, width), np.uint8)
    top, left = int(rng.integers(2, height // 2)), int(rng.integers(2, width // 2))
    mask[top : top + height // 2, left : left + width // 2] = 1
    shades = np.array([[50, 60, 90], [210, 190, 120]])[mask]
    return np.clip(shades + rng.normal(0, 15, shades.shape), 0, 255).astype(np.uint8), mask


def write_scenes(
    folder: Path, count: int = 12, *, size: tuple[int, int] | None = None, factor: int = 1, split: str = ""
) -> Path:
    """Write scenes of several sizes; the masks have the values 0 and `factor`."""
    rng = np.random.default_rng(count)
    for i in range(count):
        image, mask = make_scene(rng, *(size or rng.integers(20, 34, 2).tolist()))
        for kind, pixels in (("images", image), ("masks", factor * mask)):
            file = folder / split / kind / f"{i:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes"), 24, factor=255)


@pytest.fixture(scope="module")
def model(folder: Path) -> MaskModel:
    return fit_masks(folder, classes=["ground", "box"], epochs=12, num_samples=4, command="fit", progress=False)


# -- training ------------------------------------------------------------------------------------------


def test_card_describes_the_training_and_its_metrics(model: MaskModel) -> None:
    card, metrics = model.card, model.card.metrics
    assert (card.task, card.target, card.command) == ("segmentation", "mask", "fit")
    assert sum(card.rows.values()) == 24
    assert model.label_map == LabelMap((0, 255))
    assert metrics["mean_iou"] > 0.7 > metrics["majority_mean_iou"]
    assert metrics["accuracy"] == 1 - metrics["error"] > 1 - metrics["majority_error"]
    assert metrics["mean_iou"] < metrics["mean_dice"] < 1
    assert metrics["entropy_wrong"] > metrics["entropy_right"] > 0
    assert list(metrics["iou"]) == ["ground", "box"]
    assert 0 <= metrics["accepted"] <= 1
    assert 0.5 <= model.min_confidence < 1
    json.dumps(metrics)


def test_predictions_have_one_row_per_image_of_any_size(folder: Path, model: MaskModel) -> None:
    batches = list(model.read(folder))
    assert [name for batch in batches for name in batch.keys["file"]] == [f"images/{i:02d}.png" for i in range(24)]
    assert len({tuple(batch.x.shape[2:]) for batch in batches}) > 5
    for batch in batches[:3]:
        table = model.predict(batch, num_samples=4)
        assert list(table.columns) == [
            "mean_entropy", "mean_mutual_information", "uncertain_fraction", "ood_score", "abstain", "fraction_ground",
            "fraction_box",
        ]  # fmt: skip
        assert table.probs.shape == (len(batch), 2, *batch.x.shape[2:])
        assert np.allclose(table.columns["fraction_ground"] + table.columns["fraction_box"], 1)
        uncertain = (table.probs.amax(1) < model.min_confidence).double().flatten(1).mean(1)
        assert np.allclose(table.columns["uncertain_fraction"], uncertain)


def test_batches_have_images_of_one_size(tmp_path: Path, model: MaskModel) -> None:
    for i in range(5):
        Image.new("RGB", (300, 300)).save(tmp_path / f"{i}.png")
    Image.new("RGB", (20, 30)).save(tmp_path / "2b.png")
    assert [len(batch) for batch in model.read(tmp_path)] == [2, 1, 1, 2]


def test_large_image_is_predicted_in_windows(tmp_path: Path, model: MaskModel) -> None:
    image, _ = make_scene(np.random.default_rng(0), 300, 420)
    Image.fromarray(image).save(tmp_path / "large.png")
    (batch,) = model.read(tmp_path / "large.png")
    assert model.predict_maps(batch, num_samples=2).labels.shape == (1, 300, 420)
    assert len(model.predict(batch, num_samples=2)) == 1


def test_noise_image_is_out_of_distribution(tmp_path: Path, model: MaskModel) -> None:
    noise = np.random.default_rng(0).integers(0, 2, (28, 28, 3), dtype=np.uint8) * 255
    Image.fromarray(noise).save(tmp_path / "noise.png")
    (batch,) = model.read(tmp_path)
    columns = model.predict(batch, num_samples=4).columns
    assert columns["ood_score"] > 1
    assert columns["abstain"].tolist() == [True]


def test_model_abstains_where_outputs_are_not_finite(tmp_path: Path, model: MaskModel) -> None:
    broken = replace(model, predictor=copy.deepcopy(model.predictor))
    for i, shade in enumerate((60, 200)):  # the second image overflows
        Image.new("RGB", (24, 24), (shade, shade, shade)).save(tmp_path / f"{i}.png")
    bright = next(iter(model.read(tmp_path))).x[1].mean()

    def overflow(module: Any, args: Any, output: Any) -> Any:
        mask = args[0].flatten(1).mean(1) > bright - 0.1
        return torch.where(mask[:, None, None, None], torch.nan, output)

    broken.predictor.net.register_forward_hook(overflow)  # type: ignore[union-attr]
    (batch,) = broken.read(tmp_path)
    columns = broken.predict(batch, num_samples=2).columns
    assert np.isfinite(columns["mean_entropy"]).tolist() == [True, False]
    assert columns["abstain"].tolist()[1]
    summary = broken.predict_folder(tmp_path, tmp_path / "out", num_samples=2, progress=False)
    assert sum("1 images" in note for note in summary["notes"]) == 1
    rows = list(csv.DictReader((tmp_path / "out" / "summary.csv").read_text().splitlines()))
    assert [row["maps"] for row in rows] == ["maps/0-sheet.png", ""]
    assert not (tmp_path / "out" / "maps" / "1-sheet.png").exists()


def test_saved_model_gives_equal_predictions(tmp_path: Path, folder: Path, model: MaskModel) -> None:
    model.save(tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert isinstance(loaded, MaskModel)
    assert (loaded.card, loaded.label_map) == (model.card, model.label_map)
    for mine, its in list(zip(model.read(folder), loaded.read(folder), strict=True))[:3]:
        one, two = model.predict(mine, num_samples=4), loaded.predict(its, num_samples=4)
        assert torch.equal(one.probs, two.probs)
        assert all(np.array_equal(one.columns[name], two.columns[name]) for name in one.columns)
    rewrite_artifact(tmp_path / "model", lambda config, tensors: config.update(classes=["ground", "box", "sky"]))
    with pytest.raises(ArtifactError):
        load_model(tmp_path / "model")


@pytest.mark.parametrize(
    "options", [{"method": "gp"}, {"channels": 2}, {"size": 4}, {"classes": ["a", "b", "c"]}, {"ignore_index": -1}]
)
def test_wrong_option_raises(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        fit_masks(write_scenes(tmp_path, 3, factor=7), **{**QUICK, **options})


# -- files ---------------------------------------------------------------------------------------------


def test_split_folders_and_grey_images(tmp_path: Path) -> None:
    calls: list[Any] = []
    for split, count in (("train", 8), ("val", 2), ("test", 3)):
        write_scenes(tmp_path, count, split=split, size=(24, 32))
    model = fit_masks(tmp_path, channels=1, on_start=lambda *args: calls.append(args), **QUICK)
    assert model.card.rows == {"train": 8, "held out": 2, "test": 3}
    assert calls[0][0]["size"] == [24, 32]
    (batch,) = model.read(tmp_path, with_labels=True)
    assert batch.x.shape == (3, 1, 24, 32)
    assert len(batch.notes) == 1
    assert [len(batch) for batch in model.read(tmp_path)] == [13]
    (alone,) = model.read(tmp_path / "val", with_labels=True)
    assert alone.y.shape == (2, 24, 32)


def test_labels_are_classes_and_unknown_values_are_skipped(tmp_path: Path, model: MaskModel) -> None:
    write_scenes(tmp_path, 2, size=(20, 20), factor=255)
    (batch,) = model.read(tmp_path, with_labels=True)
    mask = np.array(Image.open(tmp_path / "masks" / "01.png"))
    assert np.array_equal(batch.y[1].numpy(), mask // 255)
    Image.fromarray(mask // 2).save(tmp_path / "masks" / "01.png")
    (one,) = model.read(tmp_path, with_labels=True)
    assert list(one.keys["file"]) == ["images/00.png"]
    assert "127" in one.notes[0]


def test_ignored_pixels(tmp_path: Path) -> None:
    write_scenes(tmp_path, 8, size=(20, 24))
    for file in (tmp_path / "masks").iterdir():
        mask = np.array(Image.open(file))
        mask[:3] = 255
        Image.fromarray(mask).save(file)
    model = fit_masks(tmp_path, **QUICK)
    assert model.label_map == LabelMap((0, 1), 255)
    (batch,) = model.read(tmp_path, with_labels=True)
    assert (batch.y[:, :3] == IGNORE_INDEX).all()
    assert (batch.y[:, 3:] < 2).all()
    assert fit_masks(tmp_path, ignore_index=0, **QUICK).label_map == LabelMap((1, 255), 0)


def test_corrupt_files_are_skipped_and_reported(tmp_path: Path) -> None:
    write_scenes(tmp_path, 20, size=(20, 24))
    (tmp_path / "images" / "03.png").write_bytes(b"not an image")
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "masks" / "05.png")
    (tmp_path / "images" / "words.txt").write_text("hello")
    model = fit_masks(tmp_path, **QUICK)
    assert sum(model.card.rows.values()) == 18
    others, corrupt, _ = model.card.metrics["files"]
    assert "images/words.txt" in others
    assert "2 of 20" in corrupt
    (batch,) = model.read(tmp_path)
    assert len(batch) == 19  # without labels, the mask does not matter
    for name in ("07", "08", "09"):
        (tmp_path / "masks" / f"{name}.png").write_bytes(b"")
    with pytest.raises(CorruptFileError, match="5 of 20"):
        fit_masks(tmp_path, **QUICK)


def test_missing_folders_and_masks_raise(tmp_path: Path) -> None:
    write_scenes(tmp_path, 5)
    (tmp_path / "masks" / "02.png").unlink()
    for source in (tmp_path, tmp_path / "nowhere", tmp_path / "images", write_scenes(tmp_path / "two", 2)):
        with pytest.raises(DatasetNotFoundError):
            fit_masks(source, **QUICK)


def test_small_images_are_skipped(tmp_path: Path, model: MaskModel) -> None:
    Image.new("RGB", (3, 5)).save(tmp_path / "a.png")
    Image.new("RGB", (30, 20)).save(tmp_path / "b.png")
    (batch,) = model.read(tmp_path)
    assert list(batch.keys["file"]) == ["b.png"]
    assert "a.png" in batch.notes[0]
    write_scenes(tmp_path / "data", 12, size=(20, 24))
    for kind, mode in (("images", "RGB"), ("masks", "L")):
        Image.new(mode, (4, 5)).save(tmp_path / "data" / kind / "tiny.png")
    trained = fit_masks(tmp_path / "data", **QUICK)
    assert sum(trained.card.rows.values()) == 12


def test_masks_beside_images_are_not_read_as_images(tmp_path: Path) -> None:
    for part in ("images", "masks", "a/images", "a/labels", "b/masks"):
        (tmp_path / part).mkdir(parents=True)
        (tmp_path / part / "1.png").touch()
    _, files, _ = _find_unmasked(tmp_path)
    assert [f.relative_to(tmp_path).as_posix() for f in files] == ["a/images/1.png", "b/masks/1.png", "images/1.png"]


# -- predict_folder ------------------------------------------------------------------------------------


def test_predict_folder_writes_maps_and_a_summary(tmp_path: Path, model: MaskModel) -> None:
    source, out = tmp_path / "new", tmp_path / "out"
    for name in ("a/1.png", "b/1.png", "A-1.jpg", "..odd.png", "naïve: (2)?.png"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(make_scene(np.random.default_rng(0), 20, 24)[0]).save(source / name)
    (source / "broken.png").write_bytes(b"")
    found = model.predict_folder(source, out, num_samples=3, progress=False)
    assert (found["images"], found["out"], len(found["notes"])) == (4, str(out), 1)  # ..odd.png is hidden
    assert {path.name for path in out.iterdir()} == {"summary.csv", "maps"}
    with (out / "summary.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == ["A-1.jpg", "a/1.png", "b/1.png", "naïve: (2)?.png"]
    assert all(row["abstain"] in ("true", "false") for row in rows)
    assert [row["maps"] for row in rows] == [f"maps/{stem}-sheet.png" for stem in ("A-1", "a-1-2", "b-1", "naïve- (2)")]
    labels = np.array(Image.open(out / "maps" / "b-1-labels.png"))
    assert labels.shape == (20, 24)
    assert abs(float(rows[2]["fraction_box"]) - (labels == 1).mean()) < 1e-9
    for part in ("image", "overlay", "entropy", "mutual-information", "std", "sheet"):
        assert (out / "maps" / f"b-1-{part}.png").is_file()


def test_predict_folder_replaces_only_earlier_predictions(tmp_path: Path, folder: Path, model: MaskModel) -> None:
    out, image = tmp_path / "out", folder / "images" / "00.png"
    model.predict_folder(image, out, num_samples=2, progress=False)
    model.predict_folder(folder / "images" / "01.png", out, num_samples=2, progress=False)
    assert not (out / "maps" / "00-sheet.png").exists()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "1.png").write_bytes(b"")
    for source, error in ((tmp_path / "nowhere", DatasetNotFoundError), (tmp_path / "bad", CorruptFileError)):
        with pytest.raises(error):
            model.predict_folder(source, out, progress=False)
    assert (out / "maps" / "01-sheet.png").exists()
    (out / "mine.txt").write_text("keep me")
    (tmp_path / "mine" / "maps").mkdir(parents=True)
    for target in (out, tmp_path / "mine"):
        with pytest.raises(FileExistsError):
            model.predict_folder(image, target, num_samples=2, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "mine", "out"]  # no temporary files
