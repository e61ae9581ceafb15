"""Models of images by class, on pictures made here: what is learned, said, skipped and refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from neuboots.app import RowBatch, load_model
from neuboots.app.images import ImageModel, fit_images
from neuboots.data import CorruptFileError, DatasetNotFoundError
from neuboots.methods import ScaledPredictor
from neuboots.nets import ResNet, SmallCNN

COLOURS = {"blue": (40, 60, 200), "green": (40, 190, 60), "red": (200, 50, 40)}
QUICK: dict[str, Any] = {"epochs": 5, "num_samples": 8, "progress": False}


def pixels(name: str, rng: np.random.Generator, height: int = 10, width: int = 12) -> Any:
    noisy = np.array(COLOURS[name]) + rng.normal(0, 40, (height, width, 3))
    return np.clip(noisy, 0, 255).astype(np.uint8)


def coloured(folder: Path, count: int = 20, *, names: tuple[str, ...] = tuple(COLOURS), **sizes: int) -> Path:
    rng = np.random.default_rng(0)
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.fromarray(pixels(name, rng, **sizes)).save(folder / name / f"{i:03d}.png")
    return folder


def break_one(folder: Path, name: str = "blue/broken.jpg") -> Path:
    file = folder / name
    Image.new("RGB", (40, 40), "blue").save(file)
    file.write_bytes(file.read_bytes()[:200])
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return coloured(tmp_path_factory.mktemp("colours"), 60)


@pytest.fixture(scope="module")
def model(folder: Path) -> ImageModel:
    return fit_images(folder, command="neuboots fit colours", max_error=0.2, **QUICK)


def rows(model: ImageModel, source: Path, **options: Any) -> tuple[list[str], list[str], list[RowBatch]]:
    """Files, predictions and chunks."""
    chunks = list(model.read(source, **options))
    files = [name for chunk in chunks for name in chunk.keys["file"]]
    said = [guess for chunk in chunks for guess in model.predict(chunk, num_samples=8).columns["prediction"]]
    return files, said, chunks


# -- learning ------------------------------------------------------------------------------------------


def test_colours_are_learned_and_the_card_says_how_well(folder: Path, model: ImageModel) -> None:
    card, figures = model.card, model.card.figures
    assert (card.task, card.method, card.command, card.seed) == (
        "classification",
        "neuboots",
        "neuboots fit colours",
        0,
    )
    assert card.rows == {"train": 130, "held out": 32, "test": 18}
    assert figures["error"] < 0.2 < figures["error_of_commonest"]
    assert 0 < figures["nll"] < np.log(3)
    assert 0 <= figures["ece"] <= 1
    assert 0 <= figures["brier"] < 2 / 3
    assert figures["answered"] > 0.5
    assert figures["error_answered"] <= figures["error"]
    assert figures["chosen"] == {
        "net": "SmallCNN",
        "size": [8, 12],
        "epochs": 5,
        "temperature": model.predictor.temperature,
    }
    assert isinstance(model.predictor, ScaledPredictor)  # 32 images are held out: enough for a temperature
    assert model.abstain.risk == 0.2
    json.dumps(figures)


def test_every_column_is_there_and_makes_sense(folder: Path, model: ImageModel) -> None:
    (first, *others) = model.read(folder)
    assert [len(chunk) for chunk in (first, *others)] == [64, 64, 52]
    answers = model.predict(first, num_samples=8)
    columns = answers.columns
    assert list(columns) == [
        "prediction", "probability", "std", "entropy", "mutual_information", "ood_score", "abstain",
    ]  # fmt: skip
    assert answers.probs.shape == (64, 3)
    assert np.allclose(columns["probability"], answers.probs.amax(1))
    assert [model.classes[k] for k in answers.probs.argmax(1)] == list(columns["prediction"])
    assert (columns["mutual_information"] <= columns["entropy"] + 1e-6).all()
    assert (columns["std"] > 0).any()
    assert columns["abstain"].dtype == bool
    assert (columns["ood_score"] < 1).mean() > 0.9


def test_images_of_another_world_are_unusual(tmp_path: Path, model: ImageModel) -> None:
    rng = np.random.default_rng(1)
    for i in range(6):
        Image.fromarray(255 * rng.integers(0, 2, (12, 12, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    (chunk,) = model.read(tmp_path)
    columns = model.predict(chunk, num_samples=8).columns
    assert (columns["ood_score"] > 1).all()
    assert columns["abstain"].all()


def test_the_seed_makes_the_same_model_again(folder: Path, model: ImageModel) -> None:
    again = fit_images(folder, max_error=0.2, **QUICK)
    assert again.card.figures == model.card.figures
    (one, *_), (two, *_) = again.read(folder), model.read(folder)
    assert np.array_equal(again.predict(one).columns["entropy"], model.predict(two).columns["entropy"])


def test_a_saved_model_gives_the_same_bits(tmp_path: Path, folder: Path, model: ImageModel) -> None:
    model.save(tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"model.json", "predictor", "arrays.safetensors"}
    twin = load_model(tmp_path / "model")
    assert isinstance(twin, ImageModel)
    assert twin.card == model.card
    assert (twin.classes, twin.look, twin.abstain) == (model.classes, model.look, model.abstain)
    for mine, its in zip(model.read(folder), twin.read(folder), strict=True):
        assert torch.equal(mine.x, its.x)
        one, two = model.predict(mine, num_samples=8).columns, twin.predict(its, num_samples=8).columns
        assert all(np.array_equal(one[name], two[name]) for name in one)


def test_a_damaged_model_is_refused(tmp_path: Path, model: ImageModel) -> None:
    place = tmp_path / "model"
    model.save(place)
    text = json.loads((place / "model.json").read_text(encoding="utf-8"))
    for name, value, sentence in (
        ("classes", ["blue", "green"], "do not fit together"),
        ("look", {}, "damaged"),
        ("abstain", {"risk": "x", "more": 1}, "when to abstain"),
    ):
        (place / "model.json").write_text(json.dumps(text | {name: value}), encoding="utf-8")
        with pytest.raises(ValueError, match=sentence):
            load_model(place)
    (place / "model.json").write_text(json.dumps(text), encoding="utf-8")
    (place / "arrays.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        load_model(place)


@pytest.mark.parametrize("method", ["deterministic", "mc-dropout", "deep-ensemble", "laplace", "swag"])
def test_other_methods_by_name(method: str, tmp_path: Path) -> None:
    coloured(tmp_path / "data", 10)
    model = fit_images(tmp_path / "data", method=method, epochs=3, num_samples=4, progress=False)
    assert model.card.method == method
    model.save(tmp_path / "model")
    (chunk,) = model.read(tmp_path / "data")
    one = model.predict(chunk, num_samples=4).columns
    two = load_model(tmp_path / "model").predict(chunk, num_samples=4).columns
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert (one["prediction"] == [name.split("/")[0] for name in chunk.keys["file"]]).mean() > 0.6


@pytest.mark.parametrize(("method", "able"), [("gp", "plain, neuboots"), ("nonsense", "plain, neuboots")])
def test_methods_that_cannot_are_refused(method: str, able: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"method '{method}'; expected one for classification: {able}"):
        fit_images(tmp_path, method=method)


def test_the_promise_is_made_only_where_it_can_be(tmp_path: Path) -> None:
    coloured(tmp_path, 10)
    few = fit_images(tmp_path, **QUICK)
    assert (few.abstain.confidence, few.abstain.risk) == (0.0, None)
    assert "too few" in few.card.figures["notes"][-1]
    assert not isinstance(few.predictor, ScaledPredictor)
    mixed = tmp_path / "mixed"
    for k, name in enumerate(("a", "b")):  # one kind of picture under two names: nothing can be known
        (mixed / name).mkdir(parents=True)
        for i in range(300):
            rng = np.random.default_rng(2 * i + k)
            Image.fromarray(pixels("red", rng, 8, 8)).save(mixed / name / f"{i}.png")
    none = fit_images(mixed, epochs=1, num_samples=4, progress=False)
    assert none.abstain.confidence == 2.0
    assert none.card.figures["answered"] == 0
    assert none.card.figures["error_answered"] is None
    assert "ALWAYS" in none.card.figures["notes"][-1]


# -- sizes and kinds of pictures -----------------------------------------------------------------------


def test_the_size_is_that_of_the_files_and_the_net_fits_it(tmp_path: Path) -> None:
    heard: list[Any] = []
    coloured(tmp_path, 4, names=("blue", "red"), height=60, width=100)
    model = fit_images(tmp_path, epochs=1, num_samples=2, progress=False, on_start=lambda *words: heard.append(words))
    assert model.look.size == (40, 64)  # the proportions of 60 × 100
    assert isinstance(model.predictor.net, ResNet)
    assert heard == [({"net": "ResNet", "size": [40, 64], "epochs": 1}, [])]
    small = fit_images(tmp_path, size=16, channels=1, epochs=1, num_samples=2, progress=False)
    assert small.look.size == (16, 16)
    assert isinstance(small.predictor.net, SmallCNN)
    (chunk,) = small.read(tmp_path)
    assert chunk.x.shape == (8, 1, 16, 16)
    assert fit_images(tmp_path, size=(8, 24), epochs=1, num_samples=2, progress=False).look.size == (8, 24)
    for size in (4, (8, 8, 8), "32", 8.5):
        with pytest.raises(ValueError, match="size="):
            fit_images(tmp_path, size=size, **QUICK)


def test_pictures_of_all_kinds_are_read_alike(tmp_path: Path, model: ImageModel) -> None:
    red = Image.new("RGB", (30, 20), (200, 50, 40))
    red.save(tmp_path / "plain.png")
    red.convert("RGBA").save(tmp_path / "alpha.png")
    red.quantize(8).save(tmp_path / "palette.gif")
    red.convert("CMYK").save(tmp_path / "print.jpg", quality=95)
    red.save(tmp_path / "SHOUTED.JPG", quality=95)
    deep = np.full((20, 30), 30000, np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.tif")
    red.convert("L").save(tmp_path / "grey.png")
    red.convert("1").save(tmp_path / "bits.png")
    (tmp_path / "below").mkdir()
    red.save(tmp_path / "below" / "nested.webp")
    files, said, chunks = rows(model, tmp_path)
    guess = dict(zip(files, said, strict=True))
    assert len(files) == 9
    for name in ("plain.png", "alpha.png", "palette.gif", "print.jpg", "SHOUTED.JPG", "below/nested.webp"):
        assert guess[name] == "red", name
    assert all(chunk.notes == () for chunk in chunks)


def test_a_photograph_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    """Blue above red; half of the files lie on their side, and say so."""
    for name, top in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        (tmp_path / name).mkdir()
        for i in range(8):
            picture = Image.new("RGB", (16, 32), (120, 120, 120))
            picture.paste(top, (0, 0, 16, 8))
            exif = Image.Exif()
            if i % 2:
                picture, exif[0x0112] = picture.rotate(90, expand=True), 6  # to be turned by 270
            picture.save(tmp_path / name / f"{i}.jpg", quality=95, exif=exif)
    model = fit_images(tmp_path, epochs=1, num_samples=2, progress=False)
    assert model.look.size == (32, 16)  # as they are seen, not as they are stored
    (chunk,) = model.read(tmp_path)
    straight, turned = chunk.x[0], chunk.x[1]
    assert torch.allclose(straight, turned, atol=0.3)


# -- folders -------------------------------------------------------------------------------------------


def test_parts_that_have_folders(tmp_path: Path) -> None:
    for part, count in (("train", 12), ("val", 4), ("test", 5)):
        coloured(tmp_path / part, count)
    model = fit_images(tmp_path, **QUICK)
    assert model.card.rows == {"train": 36, "held out": 12, "test": 15}
    files, _, (chunk,) = rows(model, tmp_path, labelled=True)
    assert len(files) == 15  # the training images would flatter the model
    assert chunk.y.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert chunk.notes == (f"of {tmp_path} only the part test is read",)
    assert len(rows(model, tmp_path)[0]) == 63
    (tmp_path / "test").rename(tmp_path / "elsewhere")
    with pytest.raises(DatasetNotFoundError, match="the parts train, val; expected one to test with"):
        model.read(tmp_path, with_labels=True)


def test_no_test_part_if_none_is_wanted(tmp_path: Path) -> None:
    model = fit_images(coloured(tmp_path, 5), test_fraction=0, **QUICK)
    assert model.card.rows == {"train": 12, "held out": 3, "test": 0}
    assert set(model.card.figures) == {"chosen", "files", "notes"}
    for test in (1.0, -0.1, float("nan"), "half"):
        with pytest.raises(ValueError, match="test="):
            fit_images(tmp_path, test_fraction=test, **QUICK)


def test_every_class_keeps_an_image_to_train_with(tmp_path: Path) -> None:
    coloured(tmp_path, 30, names=("blue", "green"))
    coloured(tmp_path, 1, names=("red",))
    for seed in range(3):
        model = fit_images(tmp_path, seed=seed, epochs=1, num_samples=2, progress=False)
        assert model.card.rows["train"] == 44
        assert model.classes == ("blue", "green", "red")


@pytest.mark.parametrize(("count", "least"), [(1, 5), (0, 0)])
def test_one_image_a_class_leaves_none_to_hold_out(count: int, least: int, tmp_path: Path) -> None:
    coloured(tmp_path, count)
    sentence = f"3 image.s. of 3 classes .* expected at least {least}" if count else "blue, .* without an image"
    with pytest.raises(DatasetNotFoundError, match=sentence):
        fit_images(tmp_path, **QUICK)


def test_folders_that_are_no_classes(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match="which is not there"):
        fit_images(tmp_path / "nowhere")
    with pytest.raises(DatasetNotFoundError, match="no folder in it; expected at least two"):
        fit_images(tmp_path)
    coloured(tmp_path, 3, names=("blue",))
    with pytest.raises(DatasetNotFoundError, match="one folder, blue"):
        fit_images(tmp_path)
    (tmp_path / "red").mkdir()
    with pytest.raises(DatasetNotFoundError, match="red, the folder of a class, without an image"):
        fit_images(tmp_path)
    (tmp_path / "red" / "list.txt").write_text("a")
    with pytest.raises(DatasetNotFoundError, match="1 files of other kinds were passed over"):
        fit_images(tmp_path)


# -- files that are broken -----------------------------------------------------------------------------


def test_a_broken_image_and_a_stray_text_are_passed_over_and_named(tmp_path: Path) -> None:
    coloured(tmp_path, 10)
    break_one(tmp_path)
    (tmp_path / "red" / "words.jpg").write_text("I am no picture")
    (tmp_path / "red" / "notes.txt").write_text("hello")
    (tmp_path / "README.md").write_text("hello")
    model = fit_images(tmp_path, **QUICK)
    assert sum(model.card.rows.values()) == 30
    stray, broken = model.card.figures["files"]
    assert stray == "passed over 2 file(s) that are no images by their names: README.md, red/notes.txt"
    assert broken.startswith("passed over 2 of 32 images that cannot be read: ")
    assert "blue/broken.jpg" in broken
    assert "red/words.jpg (it holds no whole image" in broken
    files, _, (chunk,) = rows(model, tmp_path)
    assert len(files) == 30
    assert chunk.notes[0] == stray
    assert chunk.notes[1].startswith("passed over blue/broken.jpg: it holds no whole image")
    assert chunk.notes[2].startswith("passed over red/words.jpg: ")


def test_a_folder_of_broken_images_is_refused(tmp_path: Path, model: ImageModel) -> None:
    coloured(tmp_path, 4)
    for i in range(3):
        (tmp_path / "red" / f"empty{i}.png").write_bytes(b"")
    with pytest.raises(CorruptFileError, match=r"15 images of which 3 cannot be read, .*red/empty0.png \(it is empty"):
        fit_images(tmp_path, **QUICK)
    for file in (tmp_path / "red").glob("0*.png"):
        file.unlink()
    for file in ("red/empty1.png", "red/empty2.png"):
        (tmp_path / file).unlink()
    with pytest.raises(CorruptFileError, match="no image of 'red' that can be read"):
        fit_images(tmp_path, **QUICK)
    with pytest.raises(
        CorruptFileError, match="1 file.s. of which none can be read .passed over empty0.png: it is empty"
    ):
        list(model.read(tmp_path / "red"))
    with pytest.raises(CorruptFileError, match="which none can be read"):
        fit_images(_all_empty(tmp_path / "all"), **QUICK)


def _all_empty(folder: Path) -> Path:
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for i in range(3):
            (folder / name / f"{i}.png").write_bytes(b"")
    return folder


def test_what_is_said_of_broken_files_comes_with_some_rows(tmp_path: Path, model: ImageModel) -> None:
    """Chunks are never empty, though whole stretches of files are broken, the last among them."""
    for i in range(200):
        (tmp_path / f"{i:03d}.png").write_bytes(b"")
    for i in (0, 150):
        Image.new("RGB", (12, 12), "red").save(tmp_path / f"{i:03d}.png")
    (chunk,) = model.read(tmp_path)
    assert list(chunk.keys["file"]) == ["000.png", "150.png"]
    assert len(chunk.notes) == 198
    assert chunk.notes[-1].startswith("passed over 199.png")


# -- what is asked of a model --------------------------------------------------------------------------


def test_a_flat_folder_and_a_single_file(tmp_path: Path, model: ImageModel) -> None:
    coloured(tmp_path / "by", 2)
    flat = tmp_path / "flat"
    flat.mkdir()
    for file in sorted((tmp_path / "by").rglob("*.png")):
        file.rename(flat / f"{file.parent.name}-{file.name}")
    files, said, (chunk,) = rows(model, flat)
    assert said == [file.split("-")[0] for file in files]
    assert chunk.y is None
    assert rows(model, flat / "red-001.png")[:2] == (["red-001.png"], ["red"])
    with pytest.raises(
        DatasetNotFoundError, match="red-001.png outside of any class folder|blue-000.png outside of any class"
    ):
        model.read(flat, with_labels=True)
    with pytest.raises(DatasetNotFoundError, match="which is no folder; expected one of class folders"):
        model.read(flat / "red-001.png", with_labels=True)
    (flat / "words.txt").write_text("hello")
    with pytest.raises(DatasetNotFoundError, match="which is no image by its name"):
        model.read(flat / "words.txt")
    with pytest.raises(DatasetNotFoundError, match="which is not there"):
        model.read(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetNotFoundError, match="without an image; expected files that end in"):
        model.read(tmp_path / "empty")


def test_labels_are_the_class_folders(tmp_path: Path, model: ImageModel) -> None:
    coloured(tmp_path, 3, names=("red", "blue"))  # a class may be missing
    (tmp_path / "red" / "deep").mkdir()
    Image.new("RGB", (9, 9), "red").save(tmp_path / "red" / "deep" / "er.png")
    files, _, (chunk,) = rows(model, tmp_path, labelled=True)
    assert [model.classes[y] for y in chunk.y] == [file.split("/")[0] for file in files]
    assert files[-1] == "red/deep/er.png"
    (tmp_path / "zebra").mkdir()
    with pytest.raises(
        DatasetNotFoundError, match="class folder 'zebra'; expected those that the model knows: blue, green, red"
    ):
        model.read(tmp_path, with_labels=True)


def test_a_name_that_is_no_utf8_is_still_shown(tmp_path: Path, model: ImageModel) -> None:
    odd = tmp_path / b"caf\xe9.png".decode("utf-8", "surrogateescape")
    try:
        Image.new("RGB", (9, 9), "red").save(odd)
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    (chunk,) = model.read(tmp_path)
    assert list(chunk.keys["file"]) == ["caf�.png"]
