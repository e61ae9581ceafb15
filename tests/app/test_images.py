"""Tests of app.images and the image folders of app._images."""

import copy
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _artifacts import rewrite_artifact
from PIL import Image

from neuboots.app import RowBatch, load_model
from neuboots.app.images import ImageModel, fit_images
from neuboots.data import CorruptFileError, DatasetNotFoundError
from neuboots.nets import ResNet, SmallCNN
from neuboots.posthoc import ScaledPredictor
from neuboots.serialization import ArtifactError

COLORS = {"blue": (40, 60, 200), "green": (40, 190, 60), "red": (200, 50, 40)}
QUICK: dict[str, Any] = {"epochs": 5, "num_samples": 8, "progress": False}
ONE_EPOCH: dict[str, Any] = {"epochs": 1, "num_samples": 2, "progress": False}


def pixels(name: str, rng: np.random.Generator, height: int = 10, width: int = 12) -> Any:
    noisy = np.array(COLORS[name]) + rng.normal(0, 40, (height, width, 3))
    return np.clip(noisy, 0, 255).astype(np.uint8)


def write_images(folder: Path, count: int = 20, *, names: tuple[str, ...] = tuple(COLORS), **sizes: int) -> Path:
    """Write noisy images of one color per class."""
    rng = np.random.default_rng(0)
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.fromarray(pixels(name, rng, **sizes)).save(folder / name / f"{i:03d}.png")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("colors"), 60)


@pytest.fixture(scope="module")
def model(folder: Path) -> ImageModel:
    return fit_images(folder, command="neuboots fit colors", max_error=0.2, **QUICK)


def predict(model: ImageModel, source: Path, **options: Any) -> tuple[list[str], list[str], list[RowBatch]]:
    """Files, predictions and batches."""
    batches = list(model.read(source, **options))
    files = [name for batch in batches for name in batch.keys["file"]]
    tables = [model.predict(batch, num_samples=8) for batch in batches]
    return files, [label for table in tables for label in table.columns["prediction"]], batches


def overflowing(predictor: Any) -> Any:
    """The predictor with finite weights whose outputs overflow."""
    broken = copy.deepcopy(predictor)
    with torch.no_grad():
        for parameter in broken.module.parameters():
            parameter.mul_(1e20)
    return broken


def test_model_abstains_where_outputs_overflow(folder: Path, model: ImageModel, tmp_path: Path) -> None:
    broken = replace(model, predictor=overflowing(model.predictor))
    batch = next(iter(broken.read(folder)))
    table = broken.predict(batch, num_samples=4)
    assert table.columns["abstain"].all()
    assert set(table.columns["prediction"]) == {None}
    scored = replace(model, ood=replace(model.ood, limit=np.nan)).predict(batch, num_samples=4)
    assert scored.columns["abstain"].all()


def assert_equal_columns(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert all(np.array_equal(one[name], two[name]) for name in one)


# -- training ------------------------------------------------------------------------------------------


def test_card_describes_the_training_and_its_metrics(model: ImageModel) -> None:
    card, metrics = model.card, model.card.metrics
    assert (card.task, card.method, card.command, card.seed) == ("classification", "neuboots", "neuboots fit colors", 0)
    assert card.rows == {"train": 130, "held out": 32, "test": 18}
    assert metrics["error"] < 0.2 < metrics["majority_error"]
    assert 0 < metrics["nll"] < np.log(3)
    assert metrics["accepted"] > 0.5
    assert metrics["error_accepted"] <= metrics["error"]
    temperature = model.predictor.temperature
    assert metrics["chosen"] == {"net": "SmallCNN", "size": [8, 12], "epochs": 5, "temperature": temperature}
    assert isinstance(model.predictor, ScaledPredictor)
    assert model.rule.risk == 0.2
    json.dumps(metrics)


def test_predictions_have_every_column(folder: Path, model: ImageModel) -> None:
    first, *others = model.read(folder)
    assert [len(batch) for batch in (first, *others)] == [64, 64, 52]
    table = model.predict(first, num_samples=8)
    columns = table.columns
    assert list(columns) == [
        "prediction", "probability", "std", "entropy", "mutual_information", "ood_score", "abstain",
    ]  # fmt: skip
    assert table.probs.shape == (64, 3)
    assert np.allclose(columns["probability"], table.probs.amax(1))
    assert [model.classes[k] for k in table.probs.argmax(1)] == list(columns["prediction"])
    assert (columns["mutual_information"] <= columns["entropy"] + 1e-6).all()
    assert (columns["std"] > 0).any()
    assert (columns["ood_score"] < 1).mean() > 0.9


def test_noise_images_are_out_of_distribution(tmp_path: Path, model: ImageModel) -> None:
    rng = np.random.default_rng(1)
    for i in range(6):
        Image.fromarray(255 * rng.integers(0, 2, (12, 12, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    (batch,) = model.read(tmp_path)
    columns = model.predict(batch, num_samples=8).columns
    assert (columns["ood_score"] > 1).all()
    assert columns["abstain"].all()


def test_saved_model_gives_equal_predictions(tmp_path: Path, folder: Path, model: ImageModel) -> None:
    model.save(tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "config.json",
        "manifest.json",
        "model.safetensors",
    }
    loaded = load_model(tmp_path / "model")
    assert isinstance(loaded, ImageModel)
    assert (loaded.card, loaded.classes, loaded.rule) == (model.card, model.classes, model.rule)
    assert loaded.preprocessing == model.preprocessing
    for mine, its in zip(model.read(folder), loaded.read(folder), strict=True):
        assert torch.equal(mine.x, its.x)
        assert_equal_columns(model.predict(mine).columns, loaded.predict(its).columns)
    for change in ({"classes": ["blue", "green"]}, {"preprocessing": {}}, {"rule": {"more": 1}}):
        model.save(tmp_path / "model")
        rewrite_artifact(tmp_path / "model", lambda config, tensors, change=change: config.update(change))  # type: ignore[misc]
        with pytest.raises(ArtifactError):
            load_model(tmp_path / "model")


@pytest.mark.parametrize(
    "method",
    [
        "deterministic",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mc-dropout", "deep-ensemble", "laplace", "swag")),
    ],
)
def test_methods_by_name(method: str, tmp_path: Path) -> None:
    write_images(tmp_path / "data", 10)
    model = fit_images(tmp_path / "data", method=method, epochs=3, num_samples=4, progress=False)
    assert model.card.method == method
    model.save(tmp_path / "model")
    (batch,) = model.read(tmp_path / "data")
    one = model.predict(batch, num_samples=4).columns
    assert_equal_columns(one, load_model(tmp_path / "model").predict(batch, num_samples=4).columns)
    many = model.predict(batch, num_samples=200).columns  # four heads of a wide posterior say little
    assert (many["prediction"] == [name.split("/")[0] for name in batch.keys["file"]]).mean() > 0.6


@pytest.mark.parametrize("options", [{"method": "gp"}, {"size": 4}, {"size": (8, 8, 8)}, {"size": 8.5}, {"epochs": 0}])
def test_wrong_option_raises(options: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        fit_images(folder, **{**ONE_EPOCH, **options})


def test_size_and_net_depend_on_the_files(tmp_path: Path) -> None:
    calls: list[Any] = []
    write_images(tmp_path, 4, names=("blue", "red"), height=60, width=100)
    model = fit_images(tmp_path, on_start=lambda *args: calls.append(args), **ONE_EPOCH)
    assert model.preprocessing.size == (40, 64)  # aspect ratio of 60 × 100
    assert isinstance(model.predictor.net, ResNet)
    assert calls == [({"net": "ResNet", "size": [40, 64], "epochs": 1, "content": "images by class"}, [])]
    small = fit_images(tmp_path, size=(16,), channels=1, **ONE_EPOCH)
    assert isinstance(small.predictor.net, SmallCNN)
    (batch,) = small.read(tmp_path)
    assert batch.x.shape == (8, 1, 16, 16)
    assert fit_images(tmp_path, size=(8, 24), **ONE_EPOCH).preprocessing.size == (8, 24)


# -- files ---------------------------------------------------------------------------------------------


def test_split_folders_are_used(tmp_path: Path) -> None:
    for split, count in (("train", 12), ("val", 4), ("test", 5)):
        write_images(tmp_path / split, count)
    model = fit_images(tmp_path, **ONE_EPOCH)
    assert model.card.rows == {"train": 36, "held out": 12, "test": 15}
    files, _, (batch,) = predict(model, tmp_path, with_labels=True)
    assert len(files) == 15  # only the test split has labels that were not used
    assert batch.y.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert len(batch.notes) == 1
    assert len(predict(model, tmp_path)[0]) == 63
    (tmp_path / "test").rename(tmp_path / "elsewhere")
    with pytest.raises(DatasetNotFoundError):
        model.read(tmp_path, with_labels=True)


def test_test_split_is_optional(tmp_path: Path) -> None:
    model = fit_images(write_images(tmp_path, 5), test_fraction=0, **ONE_EPOCH)
    assert model.card.rows == {"train": 12, "held out": 3, "test": 0}
    assert set(model.card.metrics) == {"chosen", "files", "notes"}
    with pytest.raises(ValueError, match="test_fraction"):
        fit_images(tmp_path, test_fraction=1.0, **ONE_EPOCH)


def test_every_class_has_a_training_image(tmp_path: Path) -> None:
    write_images(tmp_path, 30, names=("blue", "green"))
    write_images(tmp_path, 1, names=("red",))
    model = fit_images(tmp_path, seed=1, **ONE_EPOCH)
    assert model.card.rows["train"] == 44
    assert model.classes == ("blue", "green", "red")


@pytest.mark.parametrize(("count", "names"), [(1, tuple(COLORS)), (0, tuple(COLORS)), (3, ("blue",)), (0, ())])
def test_too_few_images_or_classes_raise(count: int, names: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError):
        fit_images(write_images(tmp_path, count, names=names), **ONE_EPOCH)


def test_corrupt_and_other_files_are_skipped_and_reported(tmp_path: Path) -> None:
    write_images(tmp_path, 10)
    Image.new("RGB", (40, 40), "blue").save(tmp_path / "blue" / "broken.jpg")
    (tmp_path / "blue" / "broken.jpg").write_bytes((tmp_path / "blue" / "broken.jpg").read_bytes()[:200])
    (tmp_path / "red" / "words.jpg").write_text("not an image")
    (tmp_path / "red" / "notes.txt").write_text("hello")
    (tmp_path / "README.md").write_text("hello")
    model = fit_images(tmp_path, **ONE_EPOCH)
    assert sum(model.card.rows.values()) == 30
    others, corrupt = model.card.metrics["files"]
    assert all(name in others for name in ("README.md", "red/notes.txt"))
    assert all(name in corrupt for name in ("2 of 32", "blue/broken.jpg", "red/words.jpg"))
    files, _, (batch,) = predict(model, tmp_path)
    assert len(files) == 30
    assert len(batch.notes) == 3


def test_too_many_corrupt_files_raise(tmp_path: Path, model: ImageModel) -> None:
    write_images(tmp_path, 4)
    for i in range(3):
        (tmp_path / "red" / f"empty{i}.png").write_bytes(b"")
    with pytest.raises(CorruptFileError, match="3 of 15"):
        fit_images(tmp_path, **ONE_EPOCH)
    for file in [*(tmp_path / "red").glob("0*.png"), *(tmp_path / "red" / f"empty{i}.png" for i in (1, 2))]:
        file.unlink()
    with pytest.raises(CorruptFileError, match="red"):
        fit_images(tmp_path, **ONE_EPOCH)
    with pytest.raises(CorruptFileError):
        list(model.read(tmp_path / "red"))


def test_batches_are_never_empty(tmp_path: Path, model: ImageModel) -> None:
    for i in range(200):
        (tmp_path / f"{i:03d}.png").write_bytes(b"")
    for i in (0, 150):
        Image.new("RGB", (12, 12), "red").save(tmp_path / f"{i:03d}.png")
    (batch,) = model.read(tmp_path)
    assert list(batch.keys["file"]) == ["000.png", "150.png"]
    assert len(batch.notes) == 198


def test_flat_folder_and_single_file(tmp_path: Path, model: ImageModel) -> None:
    write_images(tmp_path / "by", 2)
    (flat := tmp_path / "flat").mkdir()
    for file in sorted((tmp_path / "by").rglob("*.png")):
        file.rename(flat / f"{file.parent.name}-{file.name}")
    files, predictions, (batch,) = predict(model, flat)
    assert predictions == [file.split("-")[0] for file in files]
    assert batch.y is None
    assert predict(model, flat / "red-001.png")[:2] == (["red-001.png"], ["red"])
    (flat / "words.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for source, with_labels in (
        *((flat, True), (flat / "red-001.png", True)),
        *((flat / "words.txt", False), (tmp_path / "nowhere", False), (tmp_path / "empty", False)),
    ):
        with pytest.raises(DatasetNotFoundError):
            model.read(source, with_labels=with_labels)
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(DatasetNotFoundError, match="not a regular file"):
        model.read(tmp_path / "pipe.png")


def test_labels_are_the_class_folders(tmp_path: Path, model: ImageModel) -> None:
    write_images(tmp_path, 3, names=("red", "blue"))
    (tmp_path / "red" / "deep").mkdir()
    Image.new("RGB", (9, 9), "red").save(tmp_path / "red" / "deep" / "er.png")
    files, _, (batch,) = predict(model, tmp_path, with_labels=True)
    assert [model.classes[y] for y in batch.y] == [file.split("/")[0] for file in files]
    assert files[-1] == "red/deep/er.png"
    (tmp_path / "zebra").mkdir()
    with pytest.raises(DatasetNotFoundError, match="zebra"):
        model.read(tmp_path, with_labels=True)


def test_class_name_that_is_not_utf8_and_missing_test_split_raise(tmp_path: Path, model: ImageModel) -> None:
    write_images(tmp_path / "splits" / "train", 2)
    with pytest.raises(DatasetNotFoundError, match="test split"):
        model.read(tmp_path / "splits", with_labels=True)
    folder = write_images(tmp_path / "classes", 2)
    try:
        (folder / "red").rename(folder / b"caf\xe9".decode("utf-8", "surrogateescape"))
    except OSError:
        pytest.skip("the file system supports only UTF-8")
    with pytest.raises(ValueError, match="UTF-8"):
        fit_images(folder, **ONE_EPOCH)


def test_file_name_that_is_not_utf8_is_shown(tmp_path: Path, model: ImageModel) -> None:
    try:
        Image.new("RGB", (9, 9), "red").save(tmp_path / b"caf\xe9.png".decode("utf-8", "surrogateescape"))
    except OSError:
        pytest.skip("the file system supports only UTF-8")
    (batch,) = model.read(tmp_path)
    assert list(batch.keys["file"]) == ["caf�.png"]
