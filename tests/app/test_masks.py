"""Models of masks, on pictures made here: what is learned, drawn, skipped and refused."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from neuboots.app import load_model
from neuboots.app._images import IGNORE_INDEX, LabelMap, exclude_masks, infer_label_map
from neuboots.app.masks import MaskModel, fit_masks
from neuboots.data import CorruptFileError, DatasetNotFoundError

QUICK: dict[str, Any] = {"epochs": 2, "num_samples": 3, "progress": False}


def scene(rng: np.random.Generator, height: int, width: int) -> tuple[Any, Any]:
    """A bright box on a dark ground, and where it is."""
    mask = np.zeros((height, width), np.uint8)
    top, left = int(rng.integers(2, height // 2)), int(rng.integers(2, width // 2))
    mask[top : top + height // 2, left : left + width // 2] = 1
    shades = np.array([[50, 60, 90], [210, 190, 120]])[mask]
    return np.clip(shades + rng.normal(0, 15, shades.shape), 0, 255).astype(np.uint8), mask


def scenes(
    folder: Path, count: int = 12, *, size: tuple[int, int] | None = None, factor: int = 1, part: str = ""
) -> Path:
    """Boxes in images of several sizes; masks of 0 and `factor`."""
    rng = np.random.default_rng(count)
    for i in range(count):
        image, mask = scene(rng, *(size or rng.integers(20, 34, 2).tolist()))
        for kind, pixels in (("images", image), ("masks", factor * mask)):
            file = folder / part / kind / f"{i:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scenes(tmp_path_factory.mktemp("scenes"), 30, factor=255)


@pytest.fixture(scope="module")
def model(folder: Path) -> MaskModel:
    return fit_masks(folder, classes=["ground", "box"], epochs=12, num_samples=5, command="fit", progress=False)


# -- learning ------------------------------------------------------------------------------------------


def test_boxes_in_black_and_white_are_learned(model: MaskModel) -> None:
    card, figures = model.card, model.card.figures
    assert (card.task, card.target, card.command) == ("segmentation", "mask", "fit")
    assert card.rows == {"train": 22, "held out": 5, "test": 3}
    assert model.coding == LabelMap((0, 255))
    assert figures["mean_iou"] > 0.8 > figures["mean_iou_of_commonest"]
    assert figures["accuracy"] == 1 - figures["error"] > 1 - figures["error_of_commonest"]
    assert figures["mean_iou"] < figures["mean_dice"] < 1
    assert figures["entropy_wrong"] > figures["entropy_right"] > 0
    assert figures["ece"] < 0.2
    assert list(figures["iou"]) == ["ground", "box"]
    assert 0 <= figures["answered"] <= 1
    assert figures["files"] == ["classes by their numbers in the masks: 0 is ground, 255 is box; no number is void"]
    json.dumps(figures)


def test_a_row_for_each_image_of_any_size(folder: Path, model: MaskModel) -> None:
    chunks = list(model.read(folder))
    files = [name for chunk in chunks for name in chunk.keys["file"]]
    assert files == [f"images/{i:02d}.png" for i in range(30)]  # and not the masks
    assert len({tuple(chunk.x.shape[2:]) for chunk in chunks}) > 5
    for chunk in chunks[:3]:
        answers = model.predict(chunk, num_samples=4)
        assert list(answers.columns) == [
            "mean_entropy", "mean_mutual_information", "unsure_share", "ood_score", "abstain", "share_ground",
            "share_box",
        ]  # fmt: skip
        assert answers.probs.shape == (len(chunk), 2, *chunk.x.shape[2:])
        assert np.allclose(answers.columns["share_ground"] + answers.columns["share_box"], 1)
        unsure = (answers.probs.amax(1) < model.sure).double().flatten(1).mean(1)
        assert np.allclose(answers.columns["unsure_share"], unsure)
    assert 0.5 <= model.sure < 1


def test_images_of_one_size_come_together_but_not_too_many(tmp_path: Path, model: MaskModel) -> None:
    for i in range(5):
        Image.new("RGB", (300, 300)).save(tmp_path / f"{i}.png")
    Image.new("RGB", (20, 30)).save(tmp_path / "2b.png")
    assert [len(chunk) for chunk in model.read(tmp_path)] == [2, 1, 1, 2]


def test_a_large_image_is_seen_window_by_window(tmp_path: Path, model: MaskModel) -> None:
    image, _ = scene(np.random.default_rng(0), 300, 420)
    Image.fromarray(image).save(tmp_path / "large.png")
    (chunk,) = model.read(tmp_path / "large.png")
    maps = model.maps(chunk, num_samples=3)
    assert maps.labels.shape == (1, 300, 420)
    assert len(model.predict(chunk, num_samples=3)) == 1


def test_images_of_another_world_are_unusual(tmp_path: Path, model: MaskModel) -> None:
    noise = np.random.default_rng(0).integers(0, 2, (28, 28, 3), dtype=np.uint8) * 255
    Image.fromarray(noise).save(tmp_path / "noise.png")
    (chunk,) = model.read(tmp_path)
    columns = model.predict(chunk, num_samples=4).columns
    assert columns["ood_score"] > 1
    assert columns["abstain"].tolist() == [True]


def test_a_saved_model_gives_the_same_bits(tmp_path: Path, folder: Path, model: MaskModel) -> None:
    model.save(tmp_path / "model")
    twin = load_model(tmp_path / "model")
    assert isinstance(twin, MaskModel)
    assert twin.writes_folder
    assert (twin.card, twin.coding, twin.look) == (model.card, model.coding, model.look)
    for mine, its in zip(model.read(folder), twin.read(folder), strict=True):
        one, two = model.predict(mine, num_samples=4), twin.predict(its, num_samples=4)
        assert torch.equal(one.probs, two.probs)
        assert all(np.array_equal(one.columns[name], two.columns[name]) for name in one.columns)
    text = json.loads((tmp_path / "model" / "model.json").read_text(encoding="utf-8"))
    text["classes"] = ["ground", "box", "sky"]
    (tmp_path / "model" / "model.json").write_text(json.dumps(text), encoding="utf-8")
    with pytest.raises(ValueError, match="do not fit together"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize("method", ["deterministic", "mc-dropout", "deep-ensemble", "laplace"])
def test_other_methods_by_name(method: str, tmp_path: Path) -> None:
    scenes(tmp_path / "data", 8, size=(16, 20))
    model = fit_masks(tmp_path / "data", method=method, epochs=1, num_samples=2, progress=False)
    assert model.card.method == method
    model.save(tmp_path / "model")
    (chunk,) = model.read(tmp_path / "data")
    one = model.predict(chunk, num_samples=2).columns
    two = load_model(tmp_path / "model").predict(chunk, num_samples=2).columns
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    scenes(tmp_path, 3)
    with pytest.raises(ValueError, match="method 'gp'; expected one for segmentation"):
        fit_masks(tmp_path, method="gp")
    with pytest.raises(ValueError, match="channels=2; expected 1"):
        fit_masks(tmp_path, channels=2)
    with pytest.raises(ValueError, match="size=4"):
        fit_masks(tmp_path, size=4, **QUICK)
    with pytest.raises(ValueError, match="got 3 names of classes for masks with the numbers 0, 7"):
        fit_masks(scenes(tmp_path / "seven", 3, factor=7), classes=["a", "b", "c"])
    with pytest.raises(DatasetNotFoundError, match="2 image.s. to train with; expected at least 3"):
        fit_masks(scenes(tmp_path / "two", 2), **QUICK)


# -- folders and files ---------------------------------------------------------------------------------


def test_parts_that_have_folders_and_grey_images(tmp_path: Path) -> None:
    heard: list[Any] = []
    for part, count in (("train", 8), ("val", 2), ("test", 3)):
        scenes(tmp_path, count, part=part, size=(24, 32))
    model = fit_masks(tmp_path, channels=1, on_start=lambda *words: heard.append(words), **QUICK)
    assert model.card.rows == {"train": 8, "held out": 2, "test": 3}
    assert heard[0][0] == {"net": "small_deeplab", "size": [24, 32], "epochs": 2}
    (chunk,) = model.read(tmp_path, with_labels=True)
    assert chunk.x.shape == (3, 1, 24, 32)
    assert chunk.notes == (f"of {tmp_path} only the part test is read",)
    assert [len(chunk) for chunk in model.read(tmp_path)] == [13]
    (alone,) = model.read(tmp_path / "val", with_labels=True)
    assert alone.y.shape == (2, 24, 32)


def test_labels_are_classes_and_void(tmp_path: Path, model: MaskModel) -> None:
    scenes(tmp_path, 2, size=(20, 20), factor=255)
    (chunk,) = model.read(tmp_path, with_labels=True)
    mask = np.array(Image.open(tmp_path / "masks" / "01.png"))
    assert np.array_equal(chunk.y[1].numpy(), mask // 255)
    Image.fromarray(mask // 2).save(tmp_path / "masks" / "01.png")
    (one,) = model.read(tmp_path, with_labels=True)
    assert list(one.keys["file"]) == ["images/00.png"]
    (note,) = one.notes
    assert "passed over images/01.png: got " in note
    assert "with the number 127" in note


def test_void_pixels_count_nowhere(tmp_path: Path) -> None:
    scenes(tmp_path, 8, size=(20, 24))
    for file in (tmp_path / "masks").iterdir():
        mask = np.array(Image.open(file))
        mask[:3] = 255
        Image.fromarray(mask).save(file)
    model = fit_masks(tmp_path, **QUICK)
    assert model.coding == LabelMap((0, 1), 255)
    assert "255 is void: its pixels count nowhere" in model.card.figures["files"][-1]
    (chunk,) = model.read(tmp_path, with_labels=True)
    assert (chunk.y[:, :3] == IGNORE_INDEX).all()
    assert (chunk.y[:, 3:] < 2).all()
    other = fit_masks(tmp_path, ignore_index=0, **QUICK)  # what was the ground counts nowhere now
    assert other.coding == LabelMap((1, 255), 0)


def test_broken_files_are_passed_over_and_named(tmp_path: Path) -> None:
    scenes(tmp_path, 20, size=(20, 24))
    (tmp_path / "images" / "03.png").write_bytes(b"I am no picture")
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "masks" / "05.png")
    (tmp_path / "images" / "words.txt").write_text("hello")
    model = fit_masks(tmp_path, **QUICK)
    assert sum(model.card.rows.values()) == 18
    stray, broken, _ = model.card.figures["files"]
    assert stray == "passed over 1 file(s) that are no images by their names: images/words.txt"
    assert "2 of 20 images" in broken
    assert "masks/05.png of 9 × 9 for" in broken
    (chunk,) = model.read(tmp_path)
    assert len(chunk) == 19  # an image without a fitting mask is an image
    assert chunk.notes[1].startswith("passed over images/03.png: it holds no whole image")
    for name in ("07", "08", "09"):
        (tmp_path / "masks" / f"{name}.png").write_bytes(b"")
    with pytest.raises(CorruptFileError, match="20 images of which 5 cannot be read"):
        fit_masks(tmp_path, **QUICK)


def test_a_mask_that_is_missing_is_named(tmp_path: Path) -> None:
    scenes(tmp_path, 5)
    (tmp_path / "masks" / "02.png").unlink()
    with pytest.raises(DatasetNotFoundError, match="images/02.png without its masks"):
        fit_masks(tmp_path, **QUICK)
    with pytest.raises(DatasetNotFoundError, match="which is not there"):
        fit_masks(tmp_path / "nowhere")
    with pytest.raises(DatasetNotFoundError, match="expected the folders images and masks or labels"):
        fit_masks(tmp_path / "images")


def test_masks_in_colours(tmp_path: Path) -> None:
    scenes(tmp_path, 6, size=(20, 24))
    for file in (tmp_path / "masks").iterdir():
        Image.open(file).convert("RGB").save(file)  # grey, but saved in three channels
    assert fit_masks(tmp_path, **QUICK).coding == LabelMap((0, 1))
    for file in (tmp_path / "masks").iterdir():
        mask = np.array(Image.open(file))
        Image.fromarray(mask * np.array([200, 0, 0], np.uint8)).save(file)
    with pytest.raises(CorruptFileError, match="a mask in colours"):
        fit_masks(tmp_path, **QUICK)


def test_tiny_images_are_passed_over(tmp_path: Path, model: MaskModel) -> None:
    Image.new("RGB", (3, 5)).save(tmp_path / "a.png")
    Image.new("RGB", (30, 20)).save(tmp_path / "b.png")
    (chunk,) = model.read(tmp_path)
    assert list(chunk.keys["file"]) == ["b.png"]
    assert "of 5 × 3 pixels" in chunk.notes[0]


def test_masks_beside_images_are_no_images(tmp_path: Path) -> None:
    for part in ("images", "masks", "a/images", "a/labels", "b/masks"):
        (tmp_path / part).mkdir(parents=True)
        (tmp_path / part / "1.png").touch()
    files = sorted(tmp_path.rglob("*.png"))
    kept = [file.relative_to(tmp_path).as_posix() for file in exclude_masks(tmp_path, files)]
    assert kept == ["a/images/1.png", "b/masks/1.png", "images/1.png"]


# -- numbers in masks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "names", "ignore_index", "expected"),
    [
        ([0, 1, 2], None, None, (("0", "1", "2"), (0, 1, 2), None)),
        ([0, 1, 3, 255], None, None, (("0", "1", "3"), (0, 1, 3), 255)),
        ([0, 255], None, None, (("0", "255"), (0, 255), None)),
        ([0, 255], ["a", "b"], None, (("a", "b"), (0, 255), None)),
        ([0, 128, 255], None, None, (("0", "128", "255"), (0, 128, 255), None)),
        ([0, 1, 255], ["a", "b", "c"], None, (("a", "b", "c"), (0, 1, 255), None)),
        ([0, 1, 255], ["a", "b", "c", "d"], None, (("a", "b", "c", "d"), (0, 1, 2, 3), 255)),
        ([0, 2, 255], ["a", "b", "c"], 255, (("a", "b", "c"), (0, 1, 2), 255)),
        ([0, 1, 2], ["a", "b"], 0, (("a", "b"), (1, 2), 0)),
        ([0, 1, 3], ["a", "b", "c"], 0, (("a", "b", "c"), (1, 2, 3), 0)),
        ([0, 300], None, None, (("0", "300"), (0, 300), None)),
    ],
)
def test_what_numbers_stand_for(found: list[int], names: Any, ignore_index: int | None, expected: Any) -> None:
    classes, coding = infer_label_map(found, names, ignore_index)
    assert (classes, coding.numbers, coding.ignore_index) == expected


@pytest.mark.parametrize(
    ("found", "names", "ignore_index", "sentence"),
    [
        ([0], None, None, "with the numbers 0; expected .* mark at least two in them"),
        ([0, 255], ["a", "b", "c"], None, "with the numbers 0, besides 255 for void"),
        ([0, 255], None, 255, "with the numbers 0, besides 255 for void"),
        (range(200), None, None, "0, 1, 2, 3, 4, 5, 6, 7 …; .* without smoothed borders"),
        ([0, 7, 9], ["a", "b"], None, "2 names of classes for masks with the numbers 0, 7, 9"),
        ([0, 1], ["a"], None, "expected at least two names"),
    ],
)
def test_numbers_that_are_no_classes(found: Any, names: Any, ignore_index: int | None, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        infer_label_map(found, names, ignore_index)


def test_numbers_of_16_bits_and_out_of_order() -> None:
    coding = LabelMap((300, 7, 0), ignore_index=9)
    assert coding(torch.tensor([[0, 7, 300, 9]]), "m").tolist() == [[2, 1, 0, IGNORE_INDEX]]
    with pytest.raises(CorruptFileError, match="m with the number 8; expected one of 300, 7, 0, or 9 for void"):
        coding(torch.tensor([[8]]), "m")


# -- pictures ------------------------------------------------------------------------------------------


def test_a_folder_of_pictures_and_a_row_for_each(tmp_path: Path, folder: Path, model: MaskModel) -> None:
    source, out = tmp_path / "new", tmp_path / "out"
    for name in ("a/1.png", "b/1.png", "A-1.jpg", "..odd.png", "naïve: (2)?.png"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(scene(np.random.default_rng(0), 20, 24)[0]).save(source / name)
    (source / "broken.png").write_bytes(b"")
    found = model.predict_folder(source, out, num_samples=3, progress=False)
    assert (found["images"], found["out"], len(found["notes"])) == (4, str(out), 1)  # ..odd.png is hidden
    assert "passed over broken.png" in found["notes"][0]
    assert {path.name for path in out.iterdir()} == {"summary.csv", "maps"}
    with (out / "summary.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == ["A-1.jpg", "a/1.png", "b/1.png", "naïve: (2)?.png"]
    assert all(row["abstain"] in ("true", "false") for row in rows)
    assert [row["maps"] for row in rows] == [f"maps/{stem}-sheet.png" for stem in ("A-1", "a-1-2", "b-1", "naïve- (2)")]
    assert all((out / row["maps"]).is_file() for row in rows)
    labels = np.array(Image.open(out / "maps" / "b-1-labels.png"))
    assert labels.shape == (20, 24)
    assert abs(float(rows[2]["share_box"]) - (labels == 1).mean()) < 1e-9
    for part in ("image", "overlay", "entropy", "mutual-information", "std", "sheet"):
        assert (out / "maps" / f"b-1-{part}.png").is_file()


def test_an_earlier_folder_is_replaced_as_a_whole_and_another_is_not(
    tmp_path: Path, folder: Path, model: MaskModel
) -> None:
    out = tmp_path / "out"
    image = folder / "images" / "00.png"
    model.predict_folder(image, out, num_samples=2, progress=False)
    model.predict_folder(folder / "images" / "01.png", out, num_samples=2, progress=False)
    assert not (out / "maps" / "00-sheet.png").exists()
    assert (out / "maps" / "01-sheet.png").exists()
    with pytest.raises(DatasetNotFoundError):
        model.predict_folder(tmp_path / "nowhere", out, progress=False)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "1.png").write_bytes(b"")
    with pytest.raises(CorruptFileError, match="none can be read"):
        model.predict_folder(tmp_path / "bad", out, progress=False)
    assert (out / "maps" / "01-sheet.png").exists()
    (out / "mine.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="not an earlier prediction of masks"):
        model.predict_folder(image, out, num_samples=2, progress=False)
    mine = tmp_path / "mine" / "maps"
    mine.mkdir(parents=True)
    with pytest.raises(FileExistsError):
        model.predict_folder(image, mine.parent, num_samples=2, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "mine", "out"]  # nothing half-done is left
