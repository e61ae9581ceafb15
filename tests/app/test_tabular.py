"""Models of tables: what they read, what they say, what they promise, and what comes back from a folder."""

import io
import json
import sys
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
from neuboots.app.rejection import (
    RejectRule,
    compute_classification_metrics,
    compute_regression_metrics,
    fit_reject_rule,
)

from neuboots.app import RowBatch, load_model
from neuboots.app.tabular import FAR, LEVEL, TabularModel, class_values, fit_table
from neuboots.data import table_files, train_val_test_split


def houses(n: int = 400, *, seed: int = 0) -> pd.DataFrame:
    """A number and a class that follow from numbers, a category and a date, with gaps and noise."""
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


OPTIONS: dict[str, Any] = {"epochs": 40, "num_samples": 20, "progress": False}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "houses.csv"
    houses(1200).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def numbers(file: Path) -> TabularModel:
    return fit_table(file, "price", ignore=["dear"], **OPTIONS)


@pytest.fixture(scope="module")
def classes(file: Path) -> TabularModel:
    return fit_table(file, "dear", ignore=["price"], **OPTIONS)


def answers_of(model: TabularModel, source: str | Path, **options: Any) -> pd.DataFrame:
    chunks = [(chunk, model.predict(chunk, **options)) for chunk in model.read(source)]
    return pd.concat([pd.DataFrame({**chunk.keys, **answers.columns}) for chunk, answers in chunks], ignore_index=True)


# -- what is said --------------------------------------------------------------------------------------


def test_numbers_are_in_the_units_of_the_file(numbers: TabularModel, file: Path) -> None:
    found, truth = answers_of(numbers, file), pd.read_csv(file).price
    assert list(found)[1:] == [
        *("prediction", "low", "high", "std", "confidence_low", "confidence_high", "ood_score", "abstain")
    ]
    assert np.corrcoef(found.prediction, truth)[0, 1] > 0.95
    assert ((found.low < found.prediction) & (found.prediction < found.high)).all()
    assert (found.high - found.low > found.confidence_high - found.confidence_low).all()
    assert found.ood_score.gt(1).mean() < 0.05
    assert numbers.classes == ()


def test_classes_are_what_the_estimator_says(classes: TabularModel, file: Path) -> None:
    found = answers_of(classes, file, num_samples=20)
    (chunk,) = classes.read(file)
    probs = classes.estimator.predict_proba(chunk.x.numpy())
    np.testing.assert_allclose(found.probability, probs.max(1), atol=1e-5)
    assert found.prediction.tolist() == np.array(["no", "yes"])[probs.argmax(1)].tolist()
    entropy = -(probs * np.log(probs.clip(1e-30))).sum(1)
    np.testing.assert_allclose(found.entropy, entropy, atol=1e-5)
    assert ((found.mutual_information >= 0) & (found.mutual_information < found.entropy)).all()
    assert (found["std"] > 0).mean() > 0.9
    answers = classes.predict(chunk, num_samples=20)
    assert answers.probs is not None
    torch.testing.assert_close(answers.probs.double(), torch.from_numpy(probs), atol=1e-5, rtol=0)


def test_the_interval_of_another_level_and_the_same_rule(numbers: TabularModel, file: Path) -> None:
    usual, narrow = (answers_of(numbers, file, level=level) for level in (LEVEL, 0.5))
    assert (narrow.high - narrow.low < usual.high - usual.low).all()
    assert narrow.abstain.tolist() == usual.abstain.tolist()
    width = usual.high - usual.low
    strict = replace(numbers, abstain=RejectRule(width=float(width.median())))
    found = answers_of(strict, file, level=0.5)
    assert found.abstain.tolist() == ((width > width.median()) | (usual.ood_score > 1)).tolist()


def test_rows_far_away_are_unusual_and_finite(numbers: TabularModel) -> None:
    x = torch.full((3, len(numbers.schema.features)), FAR)
    x[1] *= -1
    x[2] = 0
    said = numbers.predict(RowBatch({"row": np.arange(3)}, x)).columns
    assert said["abstain"].tolist()[:2] == [True, True]
    assert all(np.isfinite(column).all() for name, column in said.items() if name != "abstain")


def test_an_answer_that_is_no_number_is_refused(numbers: TabularModel, file: Path, monkeypatch: Any) -> None:
    chunk = next(iter(numbers.read(file)))
    forecast = numbers.estimator.forecast(chunk.x.numpy())
    broken = replace(forecast, std=np.where(np.arange(len(chunk)) == 7, np.nan, forecast.std))
    monkeypatch.setattr(numbers.estimator, "forecast", lambda *_, **__: broken)
    with pytest.raises(ValueError, match="std for row 8 is no finite number"):
        numbers.predict(chunk)


@pytest.mark.parametrize(
    ("kind", "names", "values"),
    [
        ("number", ("-1", "10"), [-1, 10]),
        ("number", ("0.5", "2"), [0.5, 2.0]),
        ("boolean", ("False", "True"), [False, True]),
        ("text", ("01", "b"), ["01", "b"]),
    ],
)
def test_classes_have_the_types_of_the_target(kind: Any, names: tuple[str, ...], values: list[Any]) -> None:
    from neuboots.data.tabular import TargetColumn

    found = class_values(TargetColumn("y", kind, "classification", names)).tolist()
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


# -- rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_any_form_and_any_chunks_give_the_same(
    kind: str, numbers: TabularModel, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame, path = pd.read_csv(file)[:70], tmp_path / f"new.{kind}"
    writers = {
        "csv": lambda: frame.to_csv(path, index=False),
        "parquet": lambda: frame.to_parquet(path),
        "jsonl": lambda: frame.to_json(path, orient="records", lines=True),
    }
    writers[kind]()
    whole = answers_of(numbers, file)[:70]
    monkeypatch.setattr(table_files, "CELLS", 60)
    chunks = list(numbers.read(path))
    assert len(chunks) > 3
    assert [len(chunk.notes) for chunk in chunks] == [*[0] * (len(chunks) - 1), 1]
    pd.testing.assert_frame_equal(answers_of(numbers, path), whole, rtol=1e-9)


def test_labels_come_where_they_are_asked_for(numbers: TabularModel, classes: TabularModel, tmp_path: Path) -> None:
    frame = houses(30)
    frame.loc[3, "price"], frame.loc[4, "dear"], frame.loc[5, "dear"] = np.nan, None, "perhaps"
    frame.to_csv(path := tmp_path / "new.csv", index=False)
    (of_numbers,), (of_classes,) = (list(model.read(path, with_labels=True)) for model in (numbers, classes))
    assert of_numbers.y is not None
    assert of_classes.y is not None
    np.testing.assert_allclose(of_numbers.y[:, 0], frame.price)
    assert of_classes.y.tolist() == [{"no": 0, "yes": 1}.get(str(value), -1) for value in frame.dear]
    assert of_classes.notes[0] == "column 'dear' has values that no training row had, in 1 of 30 rows: 'perhaps'"
    assert next(iter(numbers.read(path))).y is None
    frame.drop(columns="price").to_csv(path, index=False)
    with pytest.raises(ValueError, match="lacks 1 column.*'price'.* for the truth to compare with"):
        numbers.read(path, with_labels=True)


def test_columns_are_kept_as_they_are_written(numbers: TabularModel, tmp_path: Path) -> None:
    """Also where numbers have decimal commas: what is kept is the text, what is answered is the number."""
    text = "id;row;area;rooms;town;built\n007;a;100,50;3;Rome;2001-01-01\n008;b;90,25;2;Bonn;2002-01-01\n"
    (path := tmp_path / "new.csv").write_text(text)
    (chunk,) = numbers.read(path, keep="all")
    assert {name: column.tolist() for name, column in chunk.keys.items()} == {
        **{"row": [1, 2], "id": ["007", "008"], "input row": ["a", "b"], "area": ["100,50", "90,25"]},
        **{"rooms": ["3", "2"], "town": ["Rome", "Bonn"], "built": ["2001-01-01", "2002-01-01"]},
    }
    (plain,) = numbers.read(path)
    assert torch.equal(plain.x, chunk.x)
    with pytest.raises(ValueError, match="got 'no' to keep, but .* has 'id', 'row', 'area'"):
        numbers.read(path, keep=["no"])


def test_what_is_kept_loses_nothing(numbers: TabularModel, tmp_path: Path) -> None:
    """NA is a text that is kept and a value that is missing; numbers keep their digits, whatever is beside them."""
    (path := tmp_path / "new.csv").write_text(
        "land,row,input row,area,rooms,town,built\nNA,a,b,NA,1.0,NA,2001-01-01\n,c,d,9,null,Rome,2001-01-01\n"
    )
    (chunk,) = numbers.read(path, keep=["land", "row", "input row", "area", "rooms", "town", "land"])
    assert [column.tolist() for column in chunk.keys.values()][2:6] == [
        ["a", "c"],
        ["b", "d"],
        ["NA", "9"],
        ["1.0", "null"],
    ]
    assert list(chunk.keys) == ["row", "land", "input row", "input input row", "area", "rooms", "town"]
    assert chunk.keys["land"][0] == "NA"
    assert pd.isna(chunk.keys["land"][1])
    (plain,) = numbers.read(path)
    assert torch.equal(plain.x, chunk.x)
    large = [2**53 + 1, None]
    rows = [{**row, "id": large[k], "tags": ["x", {"y": 1}]} for k, row in enumerate(houses(2).to_dict("records"))]
    (path := tmp_path / "new.jsonl").write_text("\n".join(map(json.dumps, rows)).replace("NaN", "null"))
    amounts = pa.array([Decimal("12345678901234567.89"), None])
    columns = {
        "id": pa.array(large),
        "amount": amounts,
        "tags": pa.array([["x"], None]),
        "huge": pa.array([2**64 - 1, 1], pa.uint64()),
    }
    pq.write_table(pa.table({**{name: houses(2)[name] for name in houses(2)}, **columns}), tmp_path / "new.parquet")
    for source, more in ((path, {"tags": '["x", {"y": 1}]'}), (tmp_path / "new.parquet", {"tags": '["x"]'})):
        (chunk,) = numbers.read(source, keep="all")
        assert chunk.keys["id"].tolist() == large
        assert chunk.keys["tags"][0] == more["tags"]
        (plain,) = numbers.read(source)
        assert torch.equal(plain.x, chunk.x)
    assert chunk.keys["amount"].tolist()[0] == "12345678901234567.89"
    assert chunk.keys["huge"].tolist() == [2**64 - 1, 1]


def test_notes_count_what_is_missing_and_unknown(numbers: TabularModel, tmp_path: Path, monkeypatch: Any) -> None:
    frame = houses(40).assign(town=["Paris", "Kyiv", *["Rome"] * 37, None])
    frame.loc[7:9, "rooms"] = np.nan
    frame.loc[:, "area"] = frame.area.fillna(100.0)
    frame.loc[0, "area"] = np.nan
    frame.to_csv(path := tmp_path / "new.csv", index=False)
    monkeypatch.setattr(table_files, "CELLS", 60)
    *others, last = numbers.read(path)
    assert all(chunk.notes == () for chunk in others)
    assert last.notes == (
        "column 'town' has values that no training row had, in 2 of 40 rows: 'Paris', 'Kyiv'",
        "of 40 rows values are missing, which no training row lacked (taken for usual ones): 'rooms' in 3, 'town' in 1",
        "of 40 rows values are missing, as in some training rows: 'area' in 1",
    )


class Slow(io.RawIOBase):
    """A pipe that gives a few bytes at a time."""

    def __init__(self, content: bytes) -> None:
        self.rest = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        some = self.rest.read(min(7, len(buffer)))
        buffer[: len(some)] = some
        return len(some)


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl", "semicolons"])
@pytest.mark.parametrize("start", [200, 1 << 20])
def test_standard_input_is_read_once(
    kind: str, start: int, numbers: TabularModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame, path = houses(50), tmp_path / "new"
    if kind == "parquet":
        frame.to_parquet(path)
    elif kind == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False, **({"sep": ";", "decimal": ","} if kind == "semicolons" else {}))
    expected = answers_of(numbers, path)

    class Stdin:
        buffer = io.BufferedReader(Slow(path.read_bytes()))

    monkeypatch.setattr(sys, "stdin", Stdin)
    monkeypatch.setattr(table_files, "START", start)
    pd.testing.assert_frame_equal(answers_of(numbers, "-"), expected)


def test_a_pipe_is_not_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BufferedReader(Slow(b"y,a\n1.5,2\n"))

    monkeypatch.setattr(sys, "stdin", Stdin)
    pipe = table_files.TableFile.open("-")
    assert [frame.y.tolist() for frame in pipe.frames()] == [[1.5]]
    with pytest.raises(ValueError, match="standard input to be read again; expected a file"):
        list(pipe.frames())


# -- what is promised ----------------------------------------------------------------------------------


def logits(n: int, sharp: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose probabilities are right."""
    rng = torch.Generator().manual_seed(seed)
    z = sharp * torch.randn(n, 3, generator=rng)
    return z, torch.multinomial(z.softmax(1), 1, generator=rng)[:, 0]


def test_the_promise_holds_on_new_rows() -> None:
    """P(error among the answered > r) ≤ δ = 0.1: of 100 draws at most 10 + 3 √(100 · 0.1 · 0.9) = 19 break it."""
    from torch.utils.data import TensorDataset

    from neuboots.methods import DeterministicPredictor

    net, broken, answering = DeterministicPredictor(torch.nn.Identity()), 0, 0
    z, y = logits(20_000, 4.0, seed=1)
    wrong, confidence = (z.argmax(1) != y), z.softmax(1).amax(1)
    for seed in range(100):
        data = TensorDataset(*logits(300, 4.0, seed=100 + seed))
        rule, words = fit_reject_rule(net, data, max_error=0.1, num_samples=1, seed=0)
        kept = confidence >= rule.confidence
        assert bool(kept.any()) == words.startswith("the model answers where its confidence is at least")
        answering += int(kept.any())
        broken += int(kept.any() and wrong[kept].double().mean() > 0.1)
    assert broken <= 19
    assert answering > 90


@pytest.mark.parametrize(
    ("rows", "sharp", "confidence", "words"),
    [
        (44, 9.0, 0.0, "44 held-out rows are too few for an error of at most 5.0%; that takes 45"),
        (2000, 0.01, 2.0, "the model abstains ALWAYS"),
    ],
)
def test_what_cannot_be_promised_is_said(rows: int, sharp: float, confidence: float, words: str) -> None:
    from torch.utils.data import TensorDataset

    from neuboots.methods import DeterministicPredictor

    data = TensorDataset(*logits(rows, sharp, seed=0))
    rule, said = fit_reject_rule(
        DeterministicPredictor(torch.nn.Identity()), data, max_error=0.05, num_samples=1, seed=0
    )
    assert rule.confidence == confidence
    assert words in said


def test_figures_of_classes_by_hand() -> None:
    from neuboots.app import PredictionTable

    probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.5, 0.5]])
    y = torch.tensor([0, 1, 1, 0])
    answers = PredictionTable({"abstain": np.array([False, True, False, True])}, probs)
    found = compute_classification_metrics(answers, y, 1)
    assert found["error"] == pytest.approx(0.25)
    assert found["nll"] == pytest.approx(-np.log([0.9, 0.4, 0.8, 0.5]).mean(), rel=1e-6)
    assert found["brier"] == pytest.approx(np.mean([0.02, 0.72, 0.08, 0.5]), rel=1e-5)
    assert (found["answered"], found["error_answered"], found["error_of_commonest"]) == (0.5, 0.0, 0.5)
    none = compute_classification_metrics(replace(answers, columns={"abstain": np.array([True] * 4)}), y, 1)
    assert (none["answered"], none["error_answered"]) == (0.0, None)


def test_figures_of_numbers_by_hand() -> None:
    from neuboots.app import PredictionTable

    columns = {
        "prediction": np.array([1.0, 2.0, 4.0]),
        "low": np.array([0.0, 1.0, 3.5]),
        "high": np.array([2.0, 3.0, 4.5]),
        "abstain": np.array([False, False, True]),
    }
    found = compute_regression_metrics(PredictionTable(columns), torch.tensor([[1.0], [2.5], [7.0]]), 3.0, 0.9)
    assert found["rmse"] == pytest.approx(np.sqrt((0.25 + 9) / 3))
    assert found["mae"] == pytest.approx(3.5 / 3)
    assert found["r2"] == pytest.approx(1 - 9.25 / 19.5)
    assert (found["coverage"], found["mean_width"], found["level"]) == (pytest.approx(2 / 3), pytest.approx(5 / 3), 0.9)
    assert (found["answered"], found["rmse_answered"]) == (pytest.approx(2 / 3), pytest.approx(np.sqrt(0.125)))
    assert found["rmse_of_constant"] == pytest.approx(np.sqrt((4 + 0.25 + 16) / 3))


# -- the card ------------------------------------------------------------------------------------------


def test_the_figures_are_those_of_rows_that_nothing_has_seen(numbers: TabularModel, file: Path) -> None:
    """The test rows are those that `train_val_test_split` draws by the seed; the card's figures are found again from them alone."""
    frame = pd.read_csv(file)
    tested = (train_val_test_split(len(frame), 0, 0.1, seed=0) == 2).numpy()
    found = answers_of(numbers, file, num_samples=20)[tested]
    truth = frame.price[tested]
    figures = numbers.card.figures
    assert numbers.card.rows == {"train": 972, "held out": 108, "test": 120}
    assert figures["rmse"] == pytest.approx(np.sqrt(((found.prediction - truth) ** 2).mean()), rel=1e-6)
    assert figures["coverage"] == pytest.approx(((found.low <= truth) & (truth <= found.high)).mean())
    assert figures["answered"] == pytest.approx(1 - found.abstain.mean())
    assert figures["rmse_of_constant"] == pytest.approx(np.sqrt(((truth - frame.price[~tested].mean()) ** 2).mean()))
    assert figures["rmse"] < 0.4 * figures["rmse_of_constant"]
    assert 0.88 <= figures["coverage"] <= 1
    assert numbers.abstain == RejectRule(std=pytest.approx(frame.price[~tested].std(ddof=0)))


def test_a_width_of_ones_own_and_a_card_of_classes(classes: TabularModel, file: Path) -> None:
    model = fit_table(file, "price", ignore=["dear"], max_width=12.5, **{**OPTIONS, "epochs": 1})
    assert model.abstain == RejectRule(width=12.5)
    assert "at most 12.5 wide" in model.card.figures["notes"][0]
    figures = classes.card.figures
    assert figures["error"] < 0.7 * figures["error_of_commonest"]
    assert classes.abstain.risk == 0.05
    assert figures["error_answered"] is None or figures["error_answered"] <= figures["error"]
    json.dumps(figures, allow_nan=False)


def test_row_numbers_are_pointed_out(file: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(file)[:300]
    n = len(frame)
    noise = np.random.default_rng(0)
    more = {
        "id": 100 + np.arange(n),
        "shuffled": noise.permutation(n),
        "whole": noise.integers(0, 50, n),
        "wide": noise.integers(0, 10**6, n),
        "half": np.arange(n) / 2,
    }
    frame.assign(**more).to_csv(path := tmp_path / "t.csv", index=False)
    said: list[str] = []
    fit_table(path, "price", on_start=lambda schema, notes: said.extend(notes), **{**OPTIONS, "epochs": 1})
    assert [note.split("'")[1] for note in said] == ["id", "shuffled"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_error": 1.0}, "got max_error=1.0; expected a share"),
        ({"max_error": True}, "got max_error=True"),
        ({"max_width": 0.0}, "got max_width=0.0; expected a width above 0, in the units of 'price'"),
        ({"max_width": float("inf")}, "got max_width=inf"),
        ({"method": "magic"}, "magic"),
        ({"epochs": 0}, "got epochs=0"),
    ],
)
def test_bad_options_get_a_sentence(options: dict[str, Any], sentence: str, file: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        fit_table(file, "price", **{**OPTIONS, **options})


# -- a folder ------------------------------------------------------------------------------------------


def test_a_model_comes_back_from_its_folder(
    numbers: TabularModel, classes: TabularModel, file: Path, tmp_path: Path
) -> None:
    for model in (numbers, classes):
        model.save(folder := tmp_path / "model")
        again = load_model(folder)
        assert isinstance(again, TabularModel)
        assert again.card == model.card
        assert again.schema == model.schema
        assert again.abstain == model.abstain
        pd.testing.assert_frame_equal(answers_of(again, file), answers_of(model, file))
        assert not [path for path in folder.rglob("*") if path.suffix in (".pkl", ".pt", ".pickle", ".joblib")]
        moved = tmp_path / "moved"
        folder.rename(moved)
        assert load_model(moved).card == model.card
        moved.rename(folder)


def test_the_same_seed_gives_the_same_model(file: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "epochs": 2}
    first, second, third = (fit_table(file, "dear", seed=seed, **options) for seed in (3, 3, 4))
    pd.testing.assert_frame_equal(answers_of(first, file), answers_of(second, file))
    assert not answers_of(first, file).probability.equals(answers_of(third, file).probability)
