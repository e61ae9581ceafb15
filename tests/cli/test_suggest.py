"""Tests of `neuboots suggest`."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from _app import ArrayModel, error_message, fitted_table_model, make_classifier, make_regressor

from neuboots.cli import main
from neuboots.cli import suggest as module
from neuboots.cli.suggest import Suggest


@pytest.fixture
def suggest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on a model with --json."""

    def run(model: ArrayModel, **options: Any) -> dict[str, Any]:
        monkeypatch.setattr(module, "load_model", lambda folder: model)
        Suggest("a-model", "pool.csv", json=True, **options).run()
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def rows(found: dict[str, Any]) -> list[int]:
    return [row["row"] for row in found["rows"]]


def best_rows(model: ArrayModel, strategy: str) -> list[int]:
    """Row numbers by decreasing score."""
    assert model.probs is not None
    top = model.probs.topk(2, 1).values
    scores = {"margin": top[:, 1] - top[:, 0], "entropy": -torch.xlogy(model.probs, model.probs).sum(1)}
    return (scores[strategy].argsort(descending=True, stable=True) + 1).tolist()


@pytest.mark.parametrize("strategy", ["margin", "entropy"])
@pytest.mark.parametrize("batch_size", [7, 1000])
def test_highest_scores_of_a_stream(strategy: Any, batch_size: int, suggest: Any) -> None:
    model = make_classifier(500, batch_size=batch_size)
    found = suggest(model, k=20, strategy=strategy, diverse=False)
    assert rows(found) == best_rows(model, strategy)[:20]
    scores = [row["score"] for row in found["rows"]]
    assert scores == sorted(scores, reverse=True)
    assert [row["rank"] for row in found["rows"]] == list(range(1, 21))


def test_regression_uses_the_confidence_band(suggest: Any) -> None:
    model = make_regressor(300, batch_size=50)
    assert model.std is not None
    found = suggest(model, k=10, diverse=False)
    assert found["strategy"] == "band"
    assert rows(found) == (model.std.argsort(descending=True)[:10] + 1).tolist()


def test_copies_are_selected_once(suggest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from neuboots.evaluation import active_learning

    model = make_classifier(200)
    assert model.probs is not None
    model.x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    model.probs[:60] = torch.tensor([0.34, 0.33, 0.33])
    model.x[:60] = model.x[0]
    original = active_learning.distance_features
    monkeypatch.setattr(active_learning, "distance_features", lambda x: original(x[:, 1:]))  # without the row number
    assert sum(row <= 60 for row in rows(suggest(model, k=10, diverse=False))) == 10
    diverse = rows(suggest(model, k=10))
    assert sum(row <= 60 for row in diverse) == 1
    assert diverse[0] <= 60
    assert len(set(diverse)) == 10


def test_ties_are_broken_by_the_seed(suggest: Any) -> None:
    one, same, other = (
        rows(suggest(make_classifier(300, batch_size=size), k=15, strategy="random", seed=seed))
        for size, seed in ((10, 1), (300, 1), (10, 2))
    )
    assert one == same != other
    assert max(one) > 150


def test_reasons_mention_out_of_distribution_rows(suggest: Any) -> None:
    model = make_classifier(100, names=("cat", "dog", "cow"), ood_score=torch.linspace(0, 3, 100))
    for name in ("margin", "entropy", "mutual-information", "std", "ood", "random"):
        found = suggest(model, k=30, strategy=name)
        assert all(row["why"] for row in found["rows"])
        if name != "ood":
            marked = [row["row"] for row in found["rows"] if row["why"].endswith("out of distribution")]
            assert marked == [row for row in rows(found) if row > 34]
    assert suggest(make_classifier(30, classes=1), k=2)["rows"][0]["why"] == "class 0"


def test_small_pool_is_selected_completely(suggest: Any) -> None:
    found = suggest(make_classifier(8), k=100)
    assert sorted(rows(found)) == list(range(1, 9))
    assert len(found["notes"]) == 1
    assert suggest(make_classifier(8), k=10_000)["notes"] == [found["notes"][0].replace("100", "10,000")]
    assert rows(suggest(make_regressor(1), k=3)) == [1]


def test_many_rows_are_selected_by_score(suggest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DIVERSE_ROWS", 10)
    model = make_classifier(100)
    found = suggest(model, k=20)
    assert rows(found) == best_rows(model, "margin")[:20]
    assert len(found["notes"]) == 1


# -- output --------------------------------------------------------------------------------------------


def test_csv_on_standard_output(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    monkeypatch.setattr(module, "load_model", lambda folder: make_classifier(60, notes=("a note",)))
    Suggest("a-model", "pool.csv", k=5, out="-").run()
    out, err = capsysbinary.readouterr()
    lines = list(csv.DictReader(io.StringIO(out.decode())))
    assert [line["rank"] for line in lines] == ["1", "2", "3", "4", "5"]
    assert list(lines[0]) == ["rank", "row", "score", "prediction", "why"]
    assert b"note: a note" in err


def test_terminal_shows_the_first_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "load_model", lambda folder: make_classifier(300))
    Suggest("a-model", "pool.csv", k=50).run()
    out = capsys.readouterr().out
    assert "50 of 300 rows" in out
    assert "30 more" in out


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"k": 0}, "--k"),
        ({"seed": -1}, "--seed"),
        ({"num_samples": 0}, "--num-samples"),
        ({"out": "chosen.xlsx"}, "--out"),
        ({"out": "/nowhere/chosen.csv"}, "/nowhere"),
        ({"out": "-", "json": True}, "--json"),
    ],
)
def test_wrong_option_is_named(options: dict[str, Any], name: str) -> None:
    assert name in error_message(Suggest("a-model", "pool.csv", **options))


@pytest.mark.parametrize(
    ("make", "name"), [(make_regressor, "margin"), (make_classifier, "band"), (make_regressor, "entropy")]
)
def test_strategy_of_another_task_raises(make: Any, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_model", lambda folder: make(20))
    assert f"--strategy is {name}" in error_message(Suggest("a-model", "pool.csv", strategy=name))


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_trained_table_model(task: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, labeled = fitted_table_model(tmp_path, task)
    lines = labeled.read_text(encoding="utf-8").splitlines()
    (pool := tmp_path / "pool.csv").write_text("\n".join(line.rsplit(",", 1)[0] for line in lines) + "\n", "utf-8")
    assert main(["suggest", str(model), str(pool), "-k", "7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["read"] == len(lines) - 1
    assert len(set(rows(found))) == 7
    out = tmp_path / "next.csv"
    assert main(["suggest", str(model), str(pool), "-k", "7", "--keep", "a", "--out", str(out)]) == 0
    frame = pd.read_csv(out)
    assert frame.row.tolist() == rows(found)
    assert list(frame)[:4] == ["rank", "row", "a", "score"]
    inputs = pd.read_csv(pool)
    np.testing.assert_allclose(frame.a, inputs.a[frame.row - 1])
    assert main(["suggest", str(model), str(tmp_path / "nowhere.csv")]) == 2
    assert main(["suggest", str(model), str(pool), "--out", str(pool)]) == 2
