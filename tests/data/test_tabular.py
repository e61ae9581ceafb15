"""Tables: schema inference and encoding, compared with scikit-learn's encoders."""

import json
import pickle
import re
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from _hub import tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import datasets
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import Tensor
from torch.utils.data import DataLoader

from neuboots._validation import ArgumentError
from neuboots.data import tabular, train_val_test_split
from neuboots.data._common import CorruptFileError, DatasetNotFoundError
from neuboots.data.dataset import DatasetBundle, LoadOptions
from neuboots.data.tabular import (
    CategoricalColumn,
    NumericColumn,
    TableSchema,
    TargetColumn,
    encode_file,
    load_sklearn_table,
    load_table,
    load_uci,
)

PARTS = ("train", "validation", "test")


@pytest.fixture(autouse=True)
def _no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEUBOOTS_DATA", raising=False)


def all_rows(data: DatasetBundle) -> np.ndarray:
    """The rows of all parts in the units of the file, in an order of their own."""
    rows = []
    for x, y in (tensors(getattr(data, part)) for part in PARTS if getattr(data, part) is not None):
        raw = data.standardizer.inverse(x.double())  # type: ignore[union-attr]
        targets = (
            y[:, None].double() if data.target_standardizer is None else data.target_standardizer.inverse(y.double())
        )
        rows.append(torch.cat([raw, targets], 1))
    whole = torch.cat(rows).numpy()
    return whole[np.lexsort(whole.T)]


@settings(deadline=None, max_examples=60)
@given(
    classes=st.lists(st.integers(0, 4), min_size=30, max_size=120),
    validation=st.floats(0, 0.4),
    test=st.floats(0, 0.4),
    seed=st.integers(0, 99),
)
def test_rows_are_split_by_class(classes: list[int], validation: float, test: float, seed: int) -> None:
    """Each class has its share in each part, up to rounding: at most one row for each of its two borders, and one more
    for the row that must stay."""
    strata = torch.tensor(classes)
    part = train_val_test_split(len(classes), validation, test, seed=seed, strata=strata)
    assert torch.equal(part, train_val_test_split(len(classes), validation, test, seed=seed, strata=strata))
    expected = {2: test, 1: (1 - test) * validation}
    for c in strata.unique():
        mine = part[strata == c]
        assert (mine == 0).any()
        for k, share in expected.items():
            assert abs(int((mine == k).sum()) - share * len(mine)) <= 4
    size = round(test * len(classes)) if test * len(classes) >= 1 else int(test > 0)
    assert int((part == 2).sum()) == size


def test_class_of_one_row_stays_among_training_rows() -> None:
    strata = torch.tensor([0] * 50 + [1, 2, 3] + [4] * 47)
    for seed in range(20):
        assert train_val_test_split(100, 0.4, 0.4, seed=seed, strata=strata)[50:53].tolist() == [0, 0, 0]


def test_split_is_uniform_over_rows() -> None:
    """Over 2,000 seeds each of 20 rows is for the test 2,000 · 0.2 times: within 4 standard errors (Bonferroni: 20)."""
    counts = sum((train_val_test_split(20, 0.0, 0.2, seed=seed) == 2).double() for seed in range(2000))
    assert isinstance(counts, Tensor)
    assert float((counts - 400).abs().max()) < 4 * (2000 * 0.2 * 0.8) ** 0.5


def test_diabetes_is_that_of_scikit_learn_standardized_by_its_training_rows() -> None:
    data = load_sklearn_table("diabetes", None, LoadOptions())
    x, y = tensors(data.train)
    assert (data.task, data.channels, data.num_classes) == ("regression", 10, 0)
    assert [len(getattr(data, part)) for part in PARTS] == [319, 35, 88]  # type: ignore[arg-type]
    assert y.shape == (319, 1)
    assert x.dtype == y.dtype == torch.float32
    for values in (x, y):
        assert float(values.mean(0).abs().max()) < 1e-6
        assert float((values.std(0, correction=0) - 1).abs().max()) < 1e-5
    raw, target = datasets.load_diabetes(return_X_y=True, scaled=False)
    expected = np.column_stack([raw, target])
    np.testing.assert_allclose(all_rows(data), expected[np.lexsort(expected.T)], rtol=1e-5, atol=1e-4)


def test_classes_of_scikit_learn_keep_their_names_and_fractions() -> None:
    data = load_sklearn_table("breast_cancer", None, LoadOptions())
    assert (data.task, data.classes, data.target_standardizer) == ("classification", ("malignant", "benign"), None)
    counts = np.bincount(datasets.load_breast_cancer().target)
    for part in PARTS:
        _, y = tensors(getattr(data, part))
        assert y.dtype == torch.int64
        assert abs(int(y.sum()) - len(y) * counts[1] / counts.sum()) <= 2
    assert load_sklearn_table("wine", None, LoadOptions()).num_classes == 3


def test_streams_of_sets_in_memory_give_same_rows() -> None:
    data, streamed = (load_sklearn_table("diabetes", None, LoadOptions(streaming=s)) for s in (False, True))
    for part in PARTS:
        for held, read in zip(tensors(getattr(data, part)), tensors(getattr(streamed, part)), strict=True):
            assert torch.equal(held, read)
    pickle.loads(pickle.dumps(streamed.train))  # workers take it along


def write_uci(root: Path, *, name: str = "yacht", splits: Any = None) -> np.ndarray:
    """40 rows of two features, one of them constant, in the layout of the data root."""
    values = np.column_stack([np.arange(40.0) ** 2, np.full(40, 123456.789), np.arange(40.0) / 7])
    folder = root / "uci"
    folder.mkdir(exist_ok=True)
    pd.DataFrame(values, columns=["x0", "x1", "y"]).to_csv(folder / f"{name}.csv", index=False)
    splits = {str(k): list(range(k, 40, 10)) for k in range(20)} if splits is None else splits
    (folder / f"{name}.test_splits.json").write_text(splits if isinstance(splits, str) else json.dumps(splits))
    return values


def test_uci_reads_its_split(tmp_path: Path) -> None:
    values = write_uci(tmp_path)
    data = load_uci("yacht", tmp_path, LoadOptions(split=3))
    x, y = tensors(data.test)
    np.testing.assert_allclose(data.target_standardizer.inverse(y)[:, 0], values[3::10, 2], rtol=1e-5)  # type: ignore[union-attr]
    assert torch.equal(x[:, 1], torch.zeros(4))  # a constant is 0, whatever rounding says of its spread
    expected = values[np.lexsort(values.T)]
    np.testing.assert_allclose(all_rows(data), expected, rtol=1e-5, atol=1e-4)
    train = tensors(data.train)[0]
    assert len(train) == 32
    assert abs(float(train[:, 0].std(correction=0)) - 1) < 1e-5


@pytest.mark.parametrize(
    "change", [{"name": "cats"}, {"split": 20}, {"split": -1}, {"split": 0.5}, {"root": None}, {"name": "power"}]
)
def test_uci_rejects_invalid_arguments(change: dict[str, Any], tmp_path: Path) -> None:
    write_uci(tmp_path)
    options: dict[str, Any] = {"name": "yacht", "root": tmp_path, "split": 0} | change
    with pytest.raises((ArgumentError, DatasetNotFoundError)):
        load_uci(options["name"], options["root"], LoadOptions(split=options["split"]))


ROWS = [[], [1, 1], [40], [-1], [0.5], [[1]], list(range(40))]
TEXTS = ["x0,x1\n1,2\n", "y\n1\n", "x0,y\n1,2\n,3\n", "x0,y\na,2\n", "x0,y\n1,inf\n"]


@pytest.mark.parametrize(("rows", "text"), [*((rows, None) for rows in ROWS), *(([0], text) for text in TEXTS)])
def test_invalid_uci_files_are_reported(rows: list[Any], text: str | None, tmp_path: Path) -> None:
    write_uci(tmp_path, splits={"0": rows})
    if text is not None:
        (tmp_path / "uci" / "yacht.csv").write_text(text)
    with pytest.raises(CorruptFileError):
        load_uci("yacht", tmp_path, LoadOptions())


def pets(n: int = 120, *, seed: int = 0) -> pd.DataFrame:
    """Numbers with and without gaps, booleans, dates and categories, and a class and a number to predict."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(1e6, 20.0, n)  # an offset that single precision would drown
    age = np.where(rng.random(n) < 0.2, np.nan, rng.integers(0, 20, n))
    return pd.DataFrame(
        {
            "weight": weight,
            "age": age,
            "vaccinated": rng.random(n) < 0.6,
            "born": (pd.Timestamp("2020-02-28") + pd.to_timedelta(rng.integers(0, 900, n), "D")).strftime("%Y-%m-%d"),
            "colour": rng.choice(["red", "green", None, "blue, dark"], n),
            "kind": rng.choice(["cat", "dog"], n),
            "price": rng.normal(size=n).round(3),
        }
    )


def written(frame: pd.DataFrame, folder: Path, kind: str) -> Path:
    path = folder / f"pets.{kind}"
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    return path


def expected_rows(frame: pd.DataFrame, train: np.ndarray) -> np.ndarray:
    """By scikit-learn, on the rows where `train` is true."""
    days = (pd.to_datetime(frame.born) - pd.Timestamp("1970-01-01")).dt.total_seconds() / 86400
    numbers = np.column_stack([frame.weight, frame.age, frame.vaccinated.astype(float), days])
    filled = SimpleImputer(strategy="mean").fit(numbers[train]).transform(numbers)
    scaler = StandardScaler().fit(SimpleImputer(strategy="mean").fit_transform(numbers[train]))
    present = numbers[train][~np.isnan(numbers[train][:, 1]), 1]  # the spread is that of the ages that are known
    scaled = scaler.transform(filled)
    scaled[:, 1] = (filled[:, 1] - present.mean()) / present.std()
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    colours = frame[["colour"]].fillna("zz missing")
    one_hot = encoder.fit(colours[train].to_numpy(dtype=object)).transform(colours.to_numpy(dtype=object))
    return np.column_stack([scaled, np.isnan(numbers[:, 1]), one_hot])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("cells", [1 << 22, 30])
def test_table_is_encoded_as_scikit_learn_does(
    kind: str, streaming: bool, cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory and streamed, in one chunk and in chunks of a few rows, from CSV and from Parquet."""
    monkeypatch.setattr(tabular, "MAX_CHUNK_CELLS", cells)
    frame = pets().drop(columns="kind")
    data = load_table(written(frame, tmp_path, kind), target="price", streaming=streaming)
    part = train_val_test_split(len(frame), 0.1, 0.1, seed=0).numpy()
    expected = expected_rows(frame, part == 0)
    mean, std = frame.price[part == 0].mean(), frame.price[part == 0].std(ddof=0)
    for k, name in enumerate(PARTS):
        x, y = tensors(getattr(data, name))
        assert x.dtype == y.dtype == torch.float32
        np.testing.assert_allclose(x, expected[part == k], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(y[:, 0], (frame.price[part == k] - mean) / std, rtol=1e-4, atol=1e-5)
    assert data.channels == expected.shape[1] == len(data.schema.features)
    assert data.schema.features[:5] == ("weight", "age", "vaccinated", "born", "age is missing")


def target_table(folder: Path, values: list[Any]) -> Path:
    path = folder / "t.csv"
    path.write_text("\n".join(["x,y", *(f"{i},{value}" for i, value in enumerate(values))]))
    return path


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        ([1, 2, 3] * 10, ("1", "2", "3")),
        ([10, 9, 10, 9] * 10, ("9", "10")),  # by value, not by text
        ([0.0, 1.0] * 20, ("0", "1")),
        (["TRUE", "false"] * 20, ("False", "True")),
        (["01", "b"] * 20, ("01", "b")),
        (["no", "yes", "not sure"] * 10, ("no", "not sure", "yes")),
        ([1, 0, 0], ("0", "1")),  # two whole numbers always
        (list(range(20)) * 5, tuple(map(str, range(20)))),
        (list(range(21)) * 5, ()),
        (list(range(10)) * 4, ()),  # four times each: rather numbers
        ([0.5, 1.5] * 20, ()),
        ([f"{i}e3" for i in range(40)], ()),
    ],
)
def test_infer_target_task(values: list[Any], classes: tuple[str, ...], tmp_path: Path) -> None:
    data = load_table(target_table(tmp_path, values), target="y", val_fraction=0, test_fraction=0)
    assert data.classes == classes
    assert data.task == ("classification" if classes else "regression")
    if classes:
        names = [str(v).removesuffix(".0").replace("TRUE", "True").replace("false", "False") for v in values]
        assert tensors(data.train)[1].tolist() == [classes.index(name) for name in names]


def test_task_argument_overrides_inference(tmp_path: Path) -> None:
    path = target_table(tmp_path, [1, 2, 3] * 10)
    assert load_table(path, target="y", task="regression").task == "regression"
    path = target_table(tmp_path, [0.5, 1.5] * 20)
    assert load_table(path, target="y", task="classification").classes == ("0.5", "1.5")
    with pytest.raises(ArgumentError):
        load_table(path, target="y", task="rank")  # type: ignore[arg-type]


def test_column_without_values_in_first_chunks_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabular, "MAX_CHUNK_ROWS", 7)
    late = np.where(np.arange(40) < 20, np.nan, np.arange(40.0))
    frame = pd.DataFrame({"y": np.arange(40) / 3, "late": late, "never": np.nan})
    schema = load_table(written(frame, tmp_path, "csv"), target="y", val_fraction=0, test_fraction=0).schema
    assert schema is not None
    ((name, mean, std),) = [(column.name, column.mean, column.std) for column in schema.numbers]
    assert (name, mean, std) == ("late", pytest.approx(np.nanmean(late)), pytest.approx(np.nanstd(late)))


def test_column_that_is_text_in_later_chunk_is_text_throughout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of ten rows: the first and the last hold what looks like numbers there, in a feature and in the target."""
    monkeypatch.setattr(tabular, "MAX_CHUNK_CELLS", 20)
    path = tmp_path / "t.csv"
    path.write_text("code,y\n" + "01,07\n02,08\n" * 20 + "A,x\n" * 3 + "01,07\n" * 20)
    data = load_table(path, target="y")
    assert data.schema.categories[0].values == ("01", "02", "A")
    assert data.classes == ("07", "08", "x")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_row_of_later_chunk_is_reported_by_its_number(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tabular, "MAX_CHUNK_CELLS", 30)
    frame = pets()
    frame.loc[100, "weight"] = np.inf
    with pytest.raises(ValueError, match="row 101"):
        load_table(written(frame, tmp_path, kind), target="price")


@pytest.mark.parametrize(
    "options",
    [
        {"target": "prise"},
        {"target": ""},
        {"ignore": "age"},
        {"ignore": ["ages"]},
        {"ignore": ["price"]},
        {"target": "kind", "task": "regression"},
        {"test_fraction": 1.0},
        {"val_fraction": None},
        {"max_categories": 2},
        {"max_categories": 0},
        {"seed": "1"},
    ],
)
def test_invalid_options(options: dict[str, Any], tmp_path: Path) -> None:
    path = written(pets(), tmp_path, "csv")
    with pytest.raises(ArgumentError):
        load_table(path, **{"target": "price", **options})


def test_columns_of_parquet(tmp_path: Path) -> None:
    """Types that CSV does not have: categories, time zones, decimals, gaps in whole numbers; lists are refused."""
    from decimal import Decimal

    n = 60
    frame = pd.DataFrame(
        {
            "group": pd.Categorical(["a", "b", "c"] * 20),
            "when": pd.date_range("2024-01-01", periods=n, freq="12h", tz="Asia/Tokyo"),
            "day": pd.date_range("2024-01-01", periods=n).date,
            "amount": [Decimal(k) / 4 for k in range(n)],
            "count": pd.array([None if k % 5 == 0 else k for k in range(n)], dtype="Int64"),
            "flag": pd.array([True, False, None] * 20, dtype="boolean"),
            "a.b": np.arange(n, dtype=np.int8),
            "half": np.arange(n, dtype=np.float16),
            "y": np.arange(n) / 3,
            "tags": [["x"]] * n,
        },
        index=np.arange(n) + 7,
    )
    path = tmp_path / "t.parquet"
    frame.to_parquet(path)
    with pytest.raises(CorruptFileError):
        load_table(path, target="y")
    data = load_table(path, target="y", ignore=["tags"], val_fraction=0, test_fraction=0)
    kinds = {number.name: number.kind for number in data.schema.numbers}
    assert kinds == {
        **{"when": "date", "day": "date", "amount": "number", "count": "number", "flag": "boolean"},
        **{"a.b": "number", "half": "number"},
    }
    assert data.schema.excluded == ("tags", "(no name)")
    x = dict(zip(data.schema.features, data.standardizer.inverse(tensors(data.train)[0]).T, strict=True))  # type: ignore
    start = (pd.Timestamp("2024-01-01") - pd.Timestamp("1970-01-01")).days
    torch.testing.assert_close(x["when"], start - 9 / 24 + torch.arange(n) / 2, atol=0.01, rtol=0)
    torch.testing.assert_close(x["day"], start + torch.arange(n).float(), atol=0.01, rtol=0)
    torch.testing.assert_close(x["amount"], torch.arange(n) / 4, atol=1e-5, rtol=0)
    assert x["flag is missing"].tolist() == [0.0, 0.0, 1.0] * 20
    assert x["group=b"].tolist() == [0.0, 1.0, 0.0] * 20


def test_new_rows_are_read_by_schema(tmp_path: Path) -> None:
    """A file without the target, with its columns in another order, other categories, and numbers as texts."""
    frame = pets()
    data = load_table(written(frame, tmp_path, "csv"), target="price", ignore=["kind"], val_fraction=0, test_fraction=0)
    schema = TableSchema.from_json(data.schema.to_json())
    assert schema == data.schema
    new = tmp_path / "new.csv"
    frame[["colour", "vaccinated", "born", "age", "weight"]].assign(more=1).to_csv(new, index=False)
    assert torch.equal(torch.cat(list(encode_file(new, schema))), tensors(data.train)[0])
    assert torch.equal(schema.encode(frame), tensors(data.train)[0])
    assert torch.equal(schema.encode(frame.astype(object)), tensors(data.train)[0])
    assert torch.equal(schema.encode_target(frame), tensors(data.train)[1])
    twice = pd.concat([frame, frame])  # row labels come twice
    assert torch.equal(schema.encode(twice)[: len(frame)], tensors(data.train)[0])
    odd = frame.assign(colour=["violet", *frame.colour[1:]], weight=[np.nan, *frame.weight[1:]])
    row = dict(zip(schema.features, schema.encode(odd)[0].tolist(), strict=True))
    assert row["weight"] == 0.0  # no indicator: no training row lacks it
    assert [value for name, value in row.items() if name.startswith("colour")] == [0.0] * 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", None),
        ("weight", "heavy"),
        ("weight", pd.Timestamp("2020-01-01")),
        ("weight", float("inf")),
        ("weight", 1e300),
        ("vaccinated", "perhaps"),
        ("vaccinated", 2),
        ("born", "28.2.2020"),
        ("born", 20200228),
        ("born", True),
    ],
)
def test_encode_rejects_values_of_another_kind(name: str, value: Any, tmp_path: Path) -> None:
    frame = pets()
    schema = load_table(written(frame, tmp_path, "csv"), target="price").schema
    changed = frame.drop(columns=name) if value is None else frame.assign(**{name: value})
    with pytest.raises(ValueError, match=f"'{name}'"):
        schema.encode(changed)
    if isinstance(value, str):  # the same from a file, and in a frame with labels of its own
        changed.to_csv(tmp_path / "new.csv", index=False)
        with pytest.raises(ValueError, match="row 1"):
            list(encode_file(tmp_path / "new.csv", schema))
        with pytest.raises(ValueError, match="row 'r0'"):
            schema.encode(changed.set_index(pd.Index([f"r{k}" for k in range(len(changed))])))


def test_only_frame_with_one_column_of_name_is_encoded(tmp_path: Path) -> None:
    frame = pets()
    schema = load_table(written(frame, tmp_path, "csv"), target="price").schema
    for name in ("weight", "colour"):
        with pytest.raises(ValueError, match=name):
            schema.encode(pd.concat([frame, frame[[name]]], axis=1))
    assert len(schema.encode(frame.assign(z=1, w=2).rename(columns={"w": "z"}))) == len(frame)  # of no interest
    for other in (frame.to_numpy(), dict(frame), frame.iloc[0]):
        with pytest.raises(ArgumentError):
            schema.encode(other)
    with pytest.raises(ValueError, match="price"):
        schema.encode_target(pd.concat([frame, frame[["price"]]], axis=1))


def test_targets_that_are_new_or_missing(tmp_path: Path) -> None:
    frame = pets()
    path = written(frame, tmp_path, "csv")
    by_class, by_number = (load_table(path, target=target).schema for target in ("kind", "price"))
    with pytest.raises(ValueError, match="kind"):
        by_class.encode_target(frame.assign(kind="fish"))
    with pytest.raises(ValueError, match="price"):
        by_number.encode_target(frame.assign(price=np.nan))
    with pytest.raises(ValueError, match="kind"):
        by_class.encode_target(frame.drop(columns="kind"))
    new = frame[:4].assign(kind=["dog", None, "fish", "cat"], price=[1.5, None, -2.0, 0.0])
    assert by_class.read_target(new).tolist() == [1, -1, -2, 0]
    found = by_number.read_target(new)
    assert (found.shape, found[0, 0].item(), bool(found[1, 0].isnan())) == ((4, 1), 1.5, True)


NAMES = st.text(min_size=1, max_size=8)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
STDS = st.floats(min_value=1e-300, allow_infinity=False)


@settings(deadline=None, max_examples=25)
@given(
    numbers=st.lists(
        st.builds(NumericColumn, NAMES, st.sampled_from(["number", "boolean", "date"]), NUMBERS, STDS, st.booleans())
    ),
    categories=st.lists(st.builds(CategoricalColumn, NAMES, st.lists(NAMES).map(tuple), st.booleans())),
    target=st.builds(
        TargetColumn, NAMES, st.just("text"), st.just("classification"), st.lists(NAMES).map(tuple), NUMBERS, STDS
    ),
    left_out=st.lists(NAMES).map(tuple),
)
def test_schema_comes_back_from_json(numbers: Any, categories: Any, target: Any, left_out: Any) -> None:
    schema = TableSchema(tuple(numbers), tuple(categories), target, left_out)
    assert TableSchema.from_json(schema.to_json()) == schema
    assert TableSchema.from_json(schema.to_json().encode().decode("utf-8")) == schema


NO_SCHEMAS = [
    {"numbers": [{"name": "a", "kind": "number", "mean": "x", "std": 1, "missing": False}]},
    {"numbers": [{"name": "a", "kind": "mood", "mean": 0, "std": 1, "missing": False}]},
    {"numbers": [{"name": 7, "kind": "number", "mean": 0, "std": 1, "missing": False}]},
    {"target": {"name": "y", "kind": "text", "task": "magic", "classes": [], "mean": 0, "std": 1}},
]
WHOLE = {"numbers": [], "categories": [], "excluded": [], "decimal": "."}
UNITS = {"mean": 0, "std": 1}
WHOLE["target"] = {"name": "y", "kind": "text", "task": "classification", "classes": ["u"], **UNITS}  # type: ignore[assignment]


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"numbers": [{"name": "a"}]}', *(json.dumps({**WHOLE, **wrong}) for wrong in NO_SCHEMAS)]
)
def test_invalid_schema_is_rejected(text: str) -> None:
    assert TableSchema.from_json(json.dumps(WHOLE)).target.classes == ("u",)
    with pytest.raises(ValueError, match="JSON"):
        TableSchema.from_json(text)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_dates_of_any_year(tmp_path: Path, kind: str) -> None:
    """Far beyond what nanoseconds can count: 9999-12-31 stands for "for ever" in many tables."""
    days = [date(1583, 1, 1), date(9999, 12, 31), *[date(2024, 1, 1 + k % 28) for k in range(38)]]
    path = written(pd.DataFrame({"until": days, "y": np.arange(40) / 3}), tmp_path, kind)
    data = load_table(path, target="y", val_fraction=0, test_fraction=0)
    (column,) = data.schema.numbers
    counted = np.array([(day - date(1970, 1, 1)).days for day in days])
    assert (column.kind, column.missing) == ("date", False)
    assert column.mean == pytest.approx(counted.mean())
    assert column.std == pytest.approx(counted.std())


def test_dates_beyond_microseconds_are_rejected() -> None:
    seconds = pd.Series(np.array([0, 2**44], "datetime64[s]"), name="until")
    with pytest.raises(ValueError, match="Column 'until' has a date that is out of range"):
        tabular.to_numbers(seconds.to_frame(), [("until", "date")])


def test_decimal_comma_may_come_late(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("y;a\n" + "".join(f"{k};{k}\n" for k in range(500)) + "1,5;2,25\n", encoding="utf-8")
    data = load_table(path, target="y", val_fraction=0, test_fraction=0)
    assert (data.task, data.schema.features) == ("regression", ("a",))
    assert float(data.standardizer.inverse(data.train[500][0])) == pytest.approx(2.25, abs=1e-4)


def test_stream_goes_to_workers(tmp_path: Path) -> None:
    data = load_table(written(pets(), tmp_path, "parquet"), target="kind", streaming=True)
    loader = DataLoader(data.train, batch_size=None, num_workers=2)
    found = sorted(tuple(x.tolist()) for x, _ in loader)
    assert found == sorted(tuple(x.tolist()) for x, _ in data.train)


def test_file_that_changed_is_rejected(tmp_path: Path) -> None:
    path = written(pets(), tmp_path, "csv")
    data = load_table(path, target="price", streaming=True)
    for n in (100, 130):
        pets(n).to_csv(path, index=False)
        with pytest.raises(CorruptFileError):
            list(data.train)


def test_column_without_values_among_training_rows_is_excluded(tmp_path: Path) -> None:
    part = train_val_test_split(40, 0.1, 0.1, seed=0)
    path = tmp_path / "t.csv"
    rows = [f"{i}.5,{i},{'' if k == 0 else 'z'},{'' if k == 0 else 3},," for i, k in enumerate(part.tolist())]
    path.write_text("\n".join(["y,a,b,c,d,", *rows]))
    data = load_table(path, target="y")
    assert data.schema.features == ("a",)
    assert data.schema.excluded == ("b", "c", "d", "(no name)")
    assert re.search("'d': excluded", str(data.schema))


def test_columns_of_many_texts_are_excluded_if_told(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("y,name,a\n" + "".join(f"{k}.5,somebody {k} x,{k % 3}\n" for k in range(600)))
    data = load_table(path, target="y", drop_high_cardinality=True)
    assert (data.schema.features, data.schema.excluded) == (("a",), ("name",))
    assert load_table(path, target="y", drop_high_cardinality=True, max_categories=700).channels > 400
    with pytest.raises(ArgumentError):
        load_table(path, target="y")
    with pytest.raises(ArgumentError):
        load_table(path, target="y", drop_high_cardinality=True, ignore=["a"])  # nothing would be left


@pytest.mark.parametrize("written", ['"{k},5"', "{k}.2.2024", "{k}%", "2024/{k}", "12:{k}", "1'{k}"])
def test_what_seems_to_be_numbers_or_dates_is_never_excluded(written: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("y,a,b\n" + "".join(f"{k}.5,{written.format(k=k)},{k % 3}\n" for k in range(600)))
    with pytest.raises(ArgumentError):
        load_table(path, target="y", drop_high_cardinality=True)


@pytest.mark.parametrize("cells", [1 << 22, 30])
def test_json_lines_are_table(cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabular, "MAX_CHUNK_CELLS", cells)
    frame, path = pets(), tmp_path / "pets.jsonl"
    frame.to_json(path, orient="records", lines=True, double_precision=15)
    path.write_text("\ufeff" + path.read_text().replace("\n", "\n\n"))  # a mark at the beginning, and blank lines
    data, expected = (load_table(file, target="price") for file in (path, written(frame, tmp_path, "csv")))
    assert data.schema.features == expected.schema.features
    for part in PARTS:
        for mine, theirs in zip(tensors(getattr(data, part)), tensors(getattr(expected, part)), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_json_lines_may_lack_keys_and_mix_types(tmp_path: Path) -> None:
    """1, true and "1" are three categories to JSON, and two to us: a number is called as it is written."""
    values = ["1", "true", '"1"', "null", "2.0"]
    lines = [f'{{"y": {k}.5, "a": {values[k % 5]}}}' if k % 7 else f'{{"y": {k}.5}}' for k in range(70)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    data = load_table(tmp_path / "t.jsonl", target="y", val_fraction=0, test_fraction=0)
    assert data.schema.features == ("a=1", "a=2", "a=True", "a is missing")
    found = dict(zip(data.schema.features, tensors(data.train)[0].sum(0).tolist(), strict=True))
    assert found == {"a=1": 24.0, "a=2": 12.0, "a=True": 12.0, "a is missing": 22.0}
