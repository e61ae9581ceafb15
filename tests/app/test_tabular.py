"""Tests of app.tabular."""

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from _artifacts import rewrite_artifact

from neuboots._validation import ArgumentError
from neuboots.app import PredictionTable, load_model
from neuboots.app import tabular as module
from neuboots.app.model import RejectRule
from neuboots.app.tabular import LEVEL, TabularModel, class_values, compute_regression_metrics, fit_table
from neuboots.data import tabular as tables
from neuboots.data import train_val_test_split
from neuboots.data.tabular import TableSchema, TargetColumn
from neuboots.serialization import ArtifactError

OPTIONS: dict[str, Any] = {"epochs": 25, "num_samples": 10, "progress": False}


def houses(n: int = 400, *, seed: int = 0) -> pd.DataFrame:
    """A number and a class that depend on a number, a category and a date, with missing values and noise."""
    rng = np.random.default_rng(seed)
    area, town = rng.normal(100.0, 20.0, n), rng.choice(["Bonn", "Oslo", "Rome"], n)
    price = 3.0 * area + np.where(town == "Rome", 60.0, 0.0) + rng.normal(0.0, 10.0, n)
    return pd.DataFrame(
        {
            "area": np.where(rng.random(n) < 0.05, np.nan, area.round(2)),
            "rooms": rng.integers(1, 6, n),
            "town": town,
            "built": (pd.Timestamp("2000-01-01") + pd.to_timedelta(rng.integers(0, 7000, n), "D")).strftime("%Y-%m-%d"),
            "price": price.round(2),
            "dear": np.where(price + rng.normal(0.0, 5.0, n) > 320.0, "yes", "no"),
        }
    )


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "houses.csv"
    houses(1200).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def regressor(file: Path) -> TabularModel:
    return fit_table(file, "price", ignore=["dear"], **OPTIONS)


@pytest.fixture(scope="module")
def classifier(file: Path) -> TabularModel:
    return fit_table(file, "dear", ignore=["price"], **OPTIONS)


def predict(model: TabularModel, source: str | Path, **options: Any) -> pd.DataFrame:
    batches = [(batch, model.predict(batch, **options)) for batch in model.read(source)]
    return pd.concat([pd.DataFrame({**batch.keys, **table.columns}) for batch, table in batches], ignore_index=True)


# -- predictions ---------------------------------------------------------------------------------------


def test_regression_columns_are_in_the_units_of_the_file(regressor: TabularModel, file: Path) -> None:
    found, truth = predict(regressor, file), pd.read_csv(file).price
    assert list(found)[1:] == [
        *("prediction", "low", "high", "std", "confidence_low", "confidence_high", "ood_score", "abstain")
    ]
    assert np.corrcoef(found.prediction, truth)[0, 1] > 0.95
    assert ((found.low < found.prediction) & (found.prediction < found.high)).all()
    assert (found.high - found.low > found.confidence_high - found.confidence_low).all()
    assert found.ood_score.gt(1).mean() < 0.05
    assert regressor.classes == ()


def test_class_columns_agree_with_the_estimator(classifier: TabularModel, file: Path) -> None:
    found = predict(classifier, file, num_samples=10)
    (batch,) = classifier.read(file)
    probs = classifier.estimator.predict_proba(batch.x.numpy())
    np.testing.assert_allclose(found.probability, probs.max(1), atol=1e-5)
    assert found.prediction.tolist() == np.array(["no", "yes"])[probs.argmax(1)].tolist()
    np.testing.assert_allclose(found.entropy, -(probs * np.log(probs.clip(1e-30))).sum(1), atol=1e-5)
    assert ((found.mutual_information >= 0) & (found.mutual_information < found.entropy)).all()
    assert (found["std"] > 0).mean() > 0.9


def test_reject_rule_does_not_depend_on_the_level_of_the_intervals(regressor: TabularModel, file: Path) -> None:
    wide, narrow = (predict(regressor, file, level=level) for level in (LEVEL, 0.5))
    assert (narrow.high - narrow.low < wide.high - wide.low).all()
    assert narrow.abstain.tolist() == wide.abstain.tolist()
    width = wide.high - wide.low
    strict = replace(regressor, rule=RejectRule(width=float(width.median())))
    found = predict(strict, file, level=0.5)
    assert found.abstain.tolist() == ((width > width.median()) | (wide.ood_score > 1)).tolist()


@pytest.mark.parametrize("name", ["mean", "std", "low", "high", "confidence_low"])
def test_model_abstains_where_a_prediction_is_not_finite(
    name: str, regressor: TabularModel, file: Path, monkeypatch: Any
) -> None:
    batch = next(iter(regressor.read(file)))
    before, forecast = regressor.predict(batch).columns, regressor.estimator.forecast(batch.x.numpy())
    rows = np.arange(len(batch))
    values = np.where(rows == 7, np.nan, np.where(rows == 9, np.inf, getattr(forecast, name)))
    monkeypatch.setattr(regressor.estimator, "forecast", lambda *_, **__: replace(forecast, **{name: values}))
    found = regressor.predict(batch).columns["abstain"]
    assert (found == before["abstain"] | (rows == 7) | (rows == 9)).all()


@pytest.mark.parametrize("tensor", ["estimator.predictor.", "estimator.fitted.", "ood."])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_load_rejects_values_that_are_not_finite(
    tensor: str, value: float, regressor: TabularModel, tmp_path: Path
) -> None:
    regressor.save(tmp_path / "model")

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.startswith(tensor) and tensors[name].is_floating_point())
        tensors[name].view(-1)[-1] = value

    rewrite_artifact(tmp_path / "model", change)
    with pytest.raises(ArtifactError):
        load_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("kind", "names", "values"),
    [
        ("number", ("-1", "10"), [-1, 10]),
        ("number", ("0.5", "2"), [0.5, 2.0]),
        ("boolean", ("False", "True"), [False, True]),
        ("text", ("01", "b"), ["01", "b"]),
    ],
)
def test_class_values_have_the_type_of_the_target(kind: Any, names: tuple[str, ...], values: list[Any]) -> None:
    found = class_values(TargetColumn("y", kind, "classification", names)).tolist()
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


# -- reading -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_formats_and_batch_sizes_give_equal_predictions(
    suffix: str, regressor: TabularModel, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame, path = pd.read_csv(file)[:70], tmp_path / f"new.{suffix}"
    writers = {
        "csv": lambda: frame.to_csv(path, index=False),
        "parquet": lambda: frame.to_parquet(path),
        "jsonl": lambda: frame.to_json(path, orient="records", lines=True),
    }
    writers[suffix]()
    expected = predict(regressor, file)[:70]
    for name in (module, tables):
        monkeypatch.setattr(name, "MAX_CHUNK_CELLS", 60)
    batches = list(regressor.read(path))
    assert len(batches) > 3
    assert [len(batch.notes) for batch in batches] == [*[0] * (len(batches) - 1), 1]
    pd.testing.assert_frame_equal(predict(regressor, path), expected, rtol=1e-9)


def test_labels_are_read_on_request(regressor: TabularModel, classifier: TabularModel, tmp_path: Path) -> None:
    frame = houses(30)
    frame.loc[3, "price"], frame.loc[4, "dear"], frame.loc[5, "dear"] = np.nan, None, "perhaps"
    frame.to_csv(path := tmp_path / "new.csv", index=False)
    (numbers,), (classes,) = (list(model.read(path, with_labels=True)) for model in (regressor, classifier))
    assert numbers.y is not None
    assert classes.y is not None
    np.testing.assert_allclose(numbers.y[:, 0], frame.price)
    assert classes.y.tolist() == [{"no": 0, "yes": 1, "perhaps": -2}.get(str(value), -1) for value in frame.dear]
    assert "'perhaps'" in classes.notes[0]
    assert next(iter(regressor.read(path))).y is None
    frame.drop(columns="price").to_csv(path, index=False)
    with pytest.raises(ValueError, match="'price'"):
        regressor.read(path, with_labels=True)


def test_copied_columns_keep_their_text(regressor: TabularModel, tmp_path: Path) -> None:
    """With decimal commas, the text is copied and the number is predicted from."""
    text = "id;row;area;rooms;town;built\n007;a;100,50;3;Rome;2001-01-01\n008;b;90,25;2;Bonn;2002-01-01\n"
    (path := tmp_path / "new.csv").write_text(text)
    (batch,) = regressor.read(path, keep="all")
    assert {name: column.tolist() for name, column in batch.keys.items()} == {
        **{"row": [1, 2], "id": ["007", "008"], "input row": ["a", "b"], "area": ["100,50", "90,25"]},
        **{"rooms": ["3", "2"], "town": ["Rome", "Bonn"], "built": ["2001-01-01", "2002-01-01"]},
    }
    (plain,) = regressor.read(path)
    assert torch.equal(plain.x, batch.x)
    with pytest.raises(ValueError, match="keep"):
        regressor.read(path, keep=["no"])


def test_copied_columns_lose_no_information(regressor: TabularModel, tmp_path: Path) -> None:
    """NA is copied as text and read as missing; large numbers keep their digits."""
    (path := tmp_path / "new.csv").write_text(
        "land,row,input row,area,rooms,town,built\nNA,a,b,NA,1.0,NA,2001-01-01\n,c,d,9,null,Rome,2001-01-01\n"
    )
    (batch,) = regressor.read(path, keep=["land", "row", "input row", "area", "rooms", "town", "land"])
    copied = [column.tolist() for column in batch.keys.values()][2:6]
    assert copied == [["a", "c"], ["b", "d"], ["NA", "9"], ["1.0", "null"]]
    assert list(batch.keys) == ["row", "land", "input row", "input input row", "area", "rooms", "town"]
    assert batch.keys["land"][0] == "NA"
    assert pd.isna(batch.keys["land"][1])
    large = [2**53 + 1, None]
    rows = [{**row, "id": large[k], "tags": ["x", {"y": 1}]} for k, row in enumerate(houses(2).to_dict("records"))]
    (path := tmp_path / "new.jsonl").write_text("\n".join(map(json.dumps, rows)).replace("NaN", "null"))
    columns = {
        "id": pa.array(large),
        "amount": pa.array([Decimal("12345678901234567.89"), None]),
        "tags": pa.array([["x"], None]),
        "huge": pa.array([2**64 - 1, 1], pa.uint64()),
    }
    pq.write_table(pa.table({**{name: houses(2)[name] for name in houses(2)}, **columns}), tmp_path / "new.parquet")
    for source, tags in ((path, '["x", {"y": 1}]'), (tmp_path / "new.parquet", '["x"]')):
        (batch,) = regressor.read(source, keep="all")
        assert batch.keys["id"].tolist() == large
        assert batch.keys["tags"][0] == tags
        (plain,) = regressor.read(source)
        assert torch.equal(plain.x, batch.x)
    assert batch.keys["amount"].tolist()[0] == "12345678901234567.89"
    assert batch.keys["huge"].tolist() == [2**64 - 1, 1]


def test_notes_count_missing_and_unknown_values(regressor: TabularModel, tmp_path: Path, monkeypatch: Any) -> None:
    frame = houses(40).assign(town=["Paris", "Kyiv", *["Rome"] * 37, None])
    frame.loc[7:9, "rooms"] = np.nan
    frame.loc[:, "area"] = frame.area.fillna(100.0)
    frame.loc[0, "area"] = np.nan
    frame.to_csv(path := tmp_path / "new.csv", index=False)
    monkeypatch.setattr(module, "MAX_CHUNK_CELLS", 60)
    *others, last = regressor.read(path)
    assert all(batch.notes == () for batch in others)
    unknown, complete, incomplete = last.notes
    assert all(word in unknown for word in ("'town'", "2 of 40", "'Paris', 'Kyiv'"))
    assert "'rooms' (3), 'town' (1)" in complete
    assert "'area' (1)" in incomplete


def test_rows_without_known_values_are_rejected(file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Also if training rows have gaps in every column, so that missing values are not out of distribution."""
    rng = np.random.default_rng(0)
    frame = houses(400)[["area", "rooms", "town", "price"]]
    frame[["area", "rooms", "town"]] = frame[["area", "rooms", "town"]].mask(rng.random((400, 3)) < 0.4)
    frame.to_csv(path := tmp_path / "train.csv", index=False)
    model = fit_table(path, "price", max_width=1e9, **{**OPTIONS, "epochs": 1})
    assert model.rule.unknown == pytest.approx(5 / 6)
    (path := tmp_path / "new.csv").write_text(
        "area,rooms,town\n90,3,Rome\n,,\n100,,\n,,Atlantis\n,3,Rome\n" + "80,2,Oslo\n" * 40 + " , ?,NA\n"
    )
    monkeypatch.setattr(module, "MAX_CHUNK_CELLS", 60)
    model.save(tmp_path / "model")
    for each in (model, load_model(tmp_path / "model")):
        found = predict(each, path)  # type: ignore[arg-type]
        assert (found.ood_score[[0, 1, 45]] < 1).all()
        assert found.abstain[[0, 1, 3, 45]].tolist() == [False, True, True, True]
    notes = [note for batch in model.read(path) for note in batch.notes]
    assert notes[0].startswith("3 of 46 rows have no known value in more than 83% of the columns (first: row 2)")


def test_new_tables_are_read_with_the_decimal_sign_of_training(tmp_path: Path) -> None:
    frame = houses(240)[["area", "rooms", "price"]].round(1)
    frame.to_csv(path := tmp_path / "train.csv", index=False, sep=";", decimal=",")
    model = fit_table(path, "price", **{**OPTIONS, "epochs": 1})
    assert TableSchema.from_json(model.schema.to_json()).decimal == model.schema.decimal == ","
    for text, area in (
        ("area;rooms\n10,125;3\n", 10.125),
        ("area;rooms\n10.5;3\n", 10.5),
        ("area,rooms\n1.125,3\n", 1.125),
    ):
        (new := tmp_path / "new.csv").write_text(text)
        assert next(model.read(new)).x[0, 0] == area
    new.write_text("area;rooms\n1.050;3\n")
    with pytest.raises(ValueError, match=r"1\.050"):
        model.read(new)
    frame.to_csv(path, index=False)
    model = fit_table(path, "price", **{**OPTIONS, "epochs": 1})
    new.write_text("area;rooms\n1,050;3\n")
    with pytest.raises(ValueError, match="'area' has '1,050'"):
        next(model.read(new))


def test_values_that_may_mean_something_else_are_noted(tmp_path: Path) -> None:
    frame, n = houses(240)[["area", "town", "price"]], 240
    days = pd.Timestamp("2018-10-01") + pd.to_timedelta(np.arange(n) % 90, "D")
    others = {
        "zip": [f"{k * 977 % 90000:05d}" for k in range(n)],
        "day": days.strftime("%m%d%Y"),
        "size": [f"{k % 9},5" for k in range(n)],
        "town": np.where(np.arange(n) % 4 == 0, "ROME", frame.town),
        "code": 2**60 + np.arange(n) * 2**20,
        "month": days.strftime("%m"),
        "height": [f"{k % 11} m2" for k in range(n)],
    }
    frame.assign(**others).to_csv(path := tmp_path / "t.csv", index=False)
    notes: list[str] = []
    fit_table(path, "price", on_start=lambda schema, found: notes.extend(found), **{**OPTIONS, "epochs": 1})
    assert [note.split("'")[1] for note in notes] == ["code", "zip", "town", "size", "height", "day"]
    assert "has 31 values such as '00000'" in notes[1]


# -- training and saving -------------------------------------------------------------------------------


def test_regression_metrics_by_hand() -> None:
    columns = {
        "prediction": np.array([1.0, 2.0, 4.0]),
        "low": np.array([0.0, 1.0, 3.5]),
        "high": np.array([2.0, 3.0, 4.5]),
        "abstain": np.array([False, False, True]),
    }
    found = compute_regression_metrics(PredictionTable(columns), torch.tensor([[1.0], [2.5], [7.0]]), 3.0)
    expected = {
        "rmse": np.sqrt((0.25 + 9) / 3), "mae": 3.5 / 3, "r2": 1 - 9.25 / 19.5, "level": LEVEL, "coverage": 2 / 3,
        "mean_width": 5 / 3, "accepted": 2 / 3, "rmse_accepted": np.sqrt(0.125),
        "baseline_rmse": np.sqrt((4 + 0.25 + 16) / 3),
    }  # fmt: skip
    assert found == pytest.approx(expected)


def test_card_has_the_metrics_of_the_test_split(regressor: TabularModel, file: Path) -> None:
    frame = pd.read_csv(file)
    test = (train_val_test_split(len(frame), 0, 0.1, seed=0) == 2).numpy()
    found, truth, metrics = predict(regressor, file, num_samples=10)[test], frame.price[test], regressor.card.metrics
    assert regressor.card.rows == {"train": 972, "held out": 108, "test": 120}
    assert metrics["rmse"] == pytest.approx(np.sqrt(((found.prediction - truth) ** 2).mean()), rel=1e-6)
    assert metrics["coverage"] == pytest.approx(((found.low <= truth) & (truth <= found.high)).mean())
    assert metrics["accepted"] == pytest.approx(1 - found.abstain.mean())
    assert metrics["baseline_rmse"] == pytest.approx(np.sqrt(((truth - frame.price[~test].mean()) ** 2).mean()))
    assert metrics["rmse"] < 0.4 * metrics["baseline_rmse"]
    assert 0.88 <= metrics["coverage"] <= 1
    assert regressor.rule == RejectRule(std=pytest.approx(frame.price[~test].std(ddof=0)))


def test_small_table_is_cross_validated(tmp_path: Path) -> None:
    frame = houses(40)
    frame.to_csv(path := tmp_path / "small.csv", index=False)
    options: dict[str, Any] = {**OPTIONS, "epochs": 10}
    model = fit_table(path, "price", ignore=["dear"], test_fraction=0.25, **options)
    assert model.card.rows == {"train": 30, "held out": 0, "test": 10}
    assert model.estimator.scores_.shape == (30, 1)
    test = (train_val_test_split(40, 0, 0.25, seed=0) == 2).numpy()
    found, truth = predict(model, path, num_samples=10)[test], frame.price[test]
    assert model.card.metrics["coverage"] == pytest.approx(((found.low <= truth) & (truth <= found.high)).mean())
    assert model.card.metrics["coverage"] >= 0.7
    assert ((found.low <= found.confidence_low) & (found.confidence_high <= found.high)).all()
    frame[:4].to_csv(path, index=False)
    with pytest.raises(ArgumentError):
        fit_table(path, "price", ignore=["dear"], test_fraction=0.25, **options)


def test_card_of_a_classifier_and_a_maximum_width(classifier: TabularModel, file: Path) -> None:
    model = fit_table(file, "price", ignore=["dear"], max_width=12.5, **{**OPTIONS, "epochs": 1})
    assert model.rule == RejectRule(width=12.5)
    metrics = classifier.card.metrics
    assert metrics["error"] < 0.7 * metrics["majority_error"]
    assert classifier.rule.risk == 0.05
    assert metrics["error_accepted"] is None or metrics["error_accepted"] <= metrics["error"]
    json.dumps(metrics, allow_nan=False)


def test_row_counters_are_reported(file: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(file)[:300]
    n, rng = len(frame), np.random.default_rng(0)
    more = {
        "id": 100 + np.arange(n),
        "shuffled": rng.permutation(n),
        "integer": rng.integers(0, 50, n),
        "wide": rng.integers(0, 10**6, n),
        "half": np.arange(n) / 2,
    }
    frame.assign(**more).to_csv(path := tmp_path / "t.csv", index=False)
    notes: list[str] = []
    fit_table(path, "price", on_start=lambda schema, found: notes.extend(found), **{**OPTIONS, "epochs": 1})
    assert [note.split("'")[1] for note in notes] == ["id", "shuffled"]


@pytest.mark.parametrize(
    "options",
    [
        *({"max_error": value} for value in (1.0, True)),
        *({"max_width": value} for value in (0.0, float("inf"))),
        *({"epochs": 0}, {"seed": -1}, {"num_samples": 1}, {"test_fraction": 1.0}, {"method": "magic"}),
    ],
)
def test_wrong_option_raises_before_training(options: dict[str, Any], file: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        fit_table(file, "price", **{**OPTIONS, **options})


def test_saved_model_gives_equal_predictions(
    regressor: TabularModel, classifier: TabularModel, file: Path, tmp_path: Path
) -> None:
    for model in (regressor, classifier):
        model.save(folder := tmp_path / "model")
        loaded = load_model(folder)
        assert isinstance(loaded, TabularModel)
        assert (loaded.card, loaded.schema, loaded.rule) == (model.card, model.schema, model.rule)
        pd.testing.assert_frame_equal(predict(loaded, file), predict(model, file))
        assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".json", ".safetensors"}


def test_seed_determines_the_model(file: Path) -> None:
    options = {**OPTIONS, "epochs": 2}
    first, second, third = (fit_table(file, "dear", seed=seed, **options) for seed in (3, 3, 4))
    pd.testing.assert_frame_equal(predict(first, file), predict(second, file))
    assert not predict(first, file).probability.equals(predict(third, file).probability)
