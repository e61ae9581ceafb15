"""The command `neuboots next`: the best rows of a stream, apart from each other, with a reason, in any format."""

import csv
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from _app import ArrayModel, classifier, fitted, regressor

import neuboots.app
from neuboots.cli import main
from neuboots.cli import suggest as module
from neuboots.cli._console import UsageError
from neuboots.cli.suggest import STRATEGIES, Candidates, Suggest, distance_features, greedy_diverse_selection


def chosen(model: ArrayModel, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Any]:
    """What --json says."""
    monkeypatch.setattr(neuboots.models, "load_model", lambda folder: model)
    with redirect_stdout(io.StringIO()) as out:
        Suggest("a-model", "pool.csv", json=True, **options).run()
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def rows(found: dict[str, Any]) -> list[int]:
    return [row["row"] for row in found["rows"]]


def by_hand(model: ArrayModel, name: str) -> np.ndarray[Any, Any]:
    """Row numbers from 1 on, the highest score first."""
    assert model.probs is not None
    if name == "margin":
        top = model.probs.topk(2, 1).values
        score = top[:, 1] - top[:, 0]
    else:
        score = -torch.xlogy(model.probs, model.probs).sum(1)
    return score.argsort(descending=True, stable=True).numpy() + 1


@pytest.mark.parametrize("name", ["margin", "entropy"])
@pytest.mark.parametrize("chunk", [7, 1000])
def test_the_highest_scores_of_a_stream(name: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier(500, chunk=chunk)
    found = chosen(model, monkeypatch, k=20, strategy=name, diverse=False)
    assert rows(found) == by_hand(model, name)[:20].tolist()
    scores = [row["score"] for row in found["rows"]]
    assert scores == sorted(scores, reverse=True)
    assert [row["rank"] for row in found["rows"]] == list(range(1, 21))


def test_numbers_by_the_width_of_their_band(monkeypatch: pytest.MonkeyPatch) -> None:
    model = regressor(300, chunk=50)
    assert model.std is not None
    found = chosen(model, monkeypatch, k=10, diverse=False)
    assert found["strategy"] == "band"
    assert rows(found) == (model.std.argsort(descending=True)[:10] + 1).tolist()
    assert found["rows"][0]["why"].startswith("its mean is between")


def test_copies_are_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier(200)
    assert model.probs is not None
    model.x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    model.probs[:60] = torch.tensor([0.34, 0.33, 0.33])  # the best by far, and all the same
    model.x[:60] = model.x[0]
    # the first column of x is the row's number for the stand-in: distances are of the others
    monkeypatch.setattr(module, "places_of", lambda x: distance_features(x[:, 1:]))
    plain = rows(chosen(model, monkeypatch, k=10, diverse=False))
    assert sum(row <= 60 for row in plain) == 10
    apart = rows(chosen(model, monkeypatch, k=10))
    assert sum(row <= 60 for row in apart) == 1
    assert apart[0] <= 60
    assert len(set(apart)) == 10


def test_all_copies_are_still_k_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier(50)
    assert model.probs is not None
    model.probs[:] = 1 / 3
    monkeypatch.setattr(module, "places_of", lambda x: torch.zeros(len(x), 2))
    assert len(set(rows(chosen(model, monkeypatch, k=12)))) == 12


def test_rows_apart_cover_more_than_the_highest_scores() -> None:
    rng = torch.Generator().manual_seed(0)
    places, scores = torch.randn(400, 2, generator=rng), torch.rand(400, generator=rng).double().numpy()
    order = np.argsort(-scores)
    apart = greedy_diverse_selection(scores[order], places[order], 20)

    def closest(which: Any) -> float:
        distances = torch.cdist(places[order][which], places[order][which])
        return float(distances.fill_diagonal_(torch.inf).min())

    assert closest(apart) > 3 * closest(np.arange(20))
    assert scores[order][apart].mean() > scores.mean()  # and are still good


def test_equal_scores_are_dealt_by_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one, same, other = (
        rows(chosen(classifier(300, chunk=size), monkeypatch, k=15, strategy="random", seed=seed))
        for size, seed in ((10, 1), (300, 1), (10, 2))
    )
    assert one == same != other
    assert max(one) > 150  # not the first of the file


def test_only_candidates_are_held() -> None:
    model = classifier(3000, chunk=100)
    held = Candidates(5, 50, 0, apart=True)
    for chunk in model.read("pool.csv"):
        answers = model.predict(chunk)
        held.add(chunk, answers, STRATEGIES["margin"].score(answers), model.classes)
        assert len(held._places) <= 50
        assert all(len(column) <= 50 for column in held._held.values())
    assert held.total == 3000
    assert len(held.table(STRATEGIES["margin"])["rank"]) == 5


def test_reasons_are_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier(100, names=("cat", "dog", "cow"), ood_score=torch.linspace(0, 3, 100))
    for name, word in (
        ("margin", " or "),
        ("entropy", "entropy"),
        ("mutual-information", "disagree"),
        ("std", "±"),
        ("unusual", "times as far out"),
        ("random", "drawn at random"),
    ):
        found = chosen(model, monkeypatch, k=30, strategy=name)
        assert all(word in row["why"] for row in found["rows"])
        if name != "unusual":
            marked = [row["row"] for row in found["rows"] if row["why"].endswith("unlike the training rows")]
            assert marked == [row for row in rows(found) if row > 34]


def test_a_pool_that_is_too_small_is_given_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(classifier(8), monkeypatch, k=100)
    assert sorted(rows(found)) == list(range(1, 9))
    assert found["notes"] == ["the pool has 8 rows, fewer than the 100 asked for: all are given"]
    assert rows(chosen(regressor(1), monkeypatch, k=3)) == [1]


def test_a_single_class_has_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(classifier(30, classes=1), monkeypatch, k=2)["rows"][0]["why"] == "class 0"


def test_more_than_can_be_set_apart_are_taken_by_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 10)
    model = classifier(100)
    found = chosen(model, monkeypatch, k=20)
    assert rows(found) == by_hand(model, "margin")[:20].tolist()
    assert "not chosen apart" in found["notes"][0]


def test_images_are_compared_by_their_cells() -> None:
    rng = torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, 20, 30, generator=rng)
    assert distance_features(images).shape == (4, 192)
    other = torch.randn(4, 3, 11, 9, generator=rng)  # of another size
    assert distance_features(other).shape == (4, 192)
    wide = torch.randn(3, 10_000, generator=rng)
    wide[1] = wide[0]
    places = distance_features(wide)
    assert places.shape == (3, 512)
    assert torch.equal(places[0], places[1])
    assert not torch.allclose(places[0], places[2])


# -- the command ---------------------------------------------------------------------------------------


def test_csv_on_standard_output(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    monkeypatch.setattr(neuboots.models, "load_model", lambda folder: classifier(60, notes=("a note",)))
    Suggest("a-model", "pool.csv", k=5, out="-").run()
    out, err = capsysbinary.readouterr()
    lines = list(csv.DictReader(io.StringIO(out.decode())))
    assert [line["rank"] for line in lines] == ["1", "2", "3", "4", "5"]
    assert list(lines[0]) == ["rank", "row", "score", "prediction", "why"]
    assert b"note: a note" in err
    assert b"5 of 60 rows" in err


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_files_by_their_ending(ending: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import pandas

    model = classifier(60)
    monkeypatch.setattr(neuboots.models, "load_model", lambda folder: model)
    out = tmp_path / f"chosen.{ending}"
    Suggest("a-model", "pool.csv", k=5, diverse=False, out=str(out)).run()
    read = {"csv": pandas.read_csv, "parquet": pandas.read_parquet}.get(ending)
    frame = pandas.read_json(out, lines=True) if read is None else read(out)
    assert frame["row"].tolist() == by_hand(model, "margin")[:5].tolist()


def test_a_terminal_has_the_first_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(neuboots.models, "load_model", lambda folder: classifier(300))
    Suggest("a-model", "pool.csv", k=50).run()
    out = capsys.readouterr().out
    assert "50 of 300 rows, by margin" in out
    assert "… and 30 more" in out


def test_a_fault_in_the_middle_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "chosen.csv"
    out.write_text("old", encoding="utf-8")
    model = classifier(200, fault=ValueError("got a broken row; expected a whole one"))
    monkeypatch.setattr(neuboots.models, "load_model", lambda folder: model)
    with pytest.raises(UsageError, match="a broken row"):
        Suggest("a-model", "pool.csv", out=str(out)).run()
    assert out.read_text(encoding="utf-8") == "old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"k": 0}, "--k is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"num_samples": 0}, "--num-samples is 0"),
        ({"out": "chosen.xlsx"}, "ends in"),
        ({"out": "/nowhere/chosen.csv"}, "no folder /nowhere"),
        ({"out": "-", "json": True}, "--json needs --out"),
    ],
)
def test_bad_options_are_sentences(options: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        Suggest("a-model", "pool.csv", **options).run()


@pytest.mark.parametrize(("make", "name"), [(regressor, "margin"), (classifier, "band"), (regressor, "entropy")])
def test_a_strategy_of_another_task_is_refused(make: Any, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuboots.models, "load_model", lambda folder: make(20))
    with pytest.raises(UsageError, match=f"--strategy is {name}, which is none for a .*; give one of"):
        Suggest("a-model", "pool.csv", strategy=name).run()


def test_every_strategy_is_explained_in_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("neuboots.cli.COMMANDS", {"next": Suggest, "other": Suggest})
    with pytest.raises(SystemExit):
        main(["next", "--help"])
    out = capsys.readouterr().out
    assert "-k INT" in out
    assert all(f"{name} (" in out for name in STRATEGIES)


# -- a real model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_real_table(task: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, rows_file = fitted(tmp_path, task)
    lines = rows_file.read_text(encoding="utf-8").splitlines()
    unlabelled = tmp_path / "pool.csv"
    unlabelled.write_text("\n".join(line.rsplit(",", 1)[0] for line in lines) + "\n", encoding="utf-8")
    assert main(["next", str(saved), str(unlabelled), "-k", "7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["read"] == len(lines) - 1
    assert len(set(rows(found))) == 7
    assert main(["next", str(saved), str(unlabelled), "-k", "7", "--out", str(tmp_path / "next.csv")]) == 0
    capsys.readouterr()
    with (tmp_path / "next.csv").open(encoding="utf-8", newline="") as file:
        assert [int(line["row"]) for line in csv.DictReader(file)] == rows(found)
    assert main(["next", str(saved), str(tmp_path / "nowhere.csv")]) == 2
    assert main(["next", str(saved), str(unlabelled), "--out", str(unlabelled)]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_columns_are_kept_beside_the_choice(tmp_path: Path) -> None:
    """Also one whose name is taken."""
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"a": rng.normal(size=80), "id": [f"n{i}" for i in range(80)], "score": range(80)})
    frame["y"] = np.where(frame.a > 0, "up", "down")
    frame.to_csv(tmp_path / "t.csv", index=False)
    model, out = str(tmp_path / "m"), tmp_path / "chosen.csv"
    table = str(tmp_path / "t.csv")
    assert main(["fit", table, "--target", "y", "--ignore", "id", "score", "--epochs", "2", "--out", model]) == 0
    assert main(["next", model, table, "-k", "5", "--keep", "id", "score", "--out", str(out)]) == 0
    chosen = pandas.read_csv(out)
    assert list(chosen.columns[:5]) == ["rank", "row", "id", "input score", "score"]
    assert chosen.id.tolist() == [f"n{row - 1}" for row in chosen.row]
    assert chosen["input score"].tolist() == (chosen.row - 1).tolist()
