"""The command `neuboots evaluate`: right figures, honest checks, a whole page, a sentence for what cannot be used."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _app import ArrayModel, classifier, fitted, regressor
from scipy import stats
from sklearn import metrics as theirs
from test_page import Reader

import neuboots.app
from neuboots.cli import main
from neuboots.cli._console import UsageError
from neuboots.cli.evaluate import Evaluate
from neuboots.cli.evaluation import chapters_of, evaluate
from neuboots.cli.evaluation import regression as numbers_module
from neuboots.cli.evaluation.classification import ClassEvaluation
from neuboots.cli.evaluation.regression import NumberEvaluation
from neuboots.cli.evaluation.sections import ReservoirSample


def measured(model: ArrayModel, **options: Any) -> Any:
    return evaluate(model, "rows.csv", progress=False, **options)


def of_classes(model: ArrayModel) -> ClassEvaluation:
    found = measured(model)
    assert isinstance(found, ClassEvaluation)
    return found


def of_numbers(model: ArrayModel, **options: Any) -> NumberEvaluation:
    found = measured(model, **options)
    assert isinstance(found, NumberEvaluation)
    return found


def check(found: Any, word: str) -> bool | None:
    """The one check that speaks of this."""
    (holds,) = [each.holds for each in found.checks if word in each.claim]
    return holds  # type: ignore[no-any-return]


def run(model: ArrayModel, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    monkeypatch.setattr(neuboots.models, "load_model", lambda folder: model)
    Evaluate("a-model", "rows.csv", **options).run()


# -- figures -------------------------------------------------------------------------------------------


def test_figures_of_classes_are_scikit_learns() -> None:
    model = classifier(700, classes=4, seed=3)
    figures, probs, y = of_classes(model).figures, model.probs, model.y.numpy()
    assert probs is not None
    guess = probs.argmax(1).numpy()
    assert figures["error"] == pytest.approx(1 - theirs.accuracy_score(y, guess))
    assert figures["nll"] == pytest.approx(-np.log(probs.double().numpy()[range(700), y]).mean(), rel=1e-5)
    assert figures["macro_f1"] == pytest.approx(theirs.f1_score(y, guess, average="macro"))
    assert figures["balanced_accuracy"] == pytest.approx(theirs.balanced_accuracy_score(y, guess))
    entropy = stats.entropy(probs.numpy(), axis=1)
    assert figures["finds_errors_by_entropy"] == pytest.approx(theirs.roc_auc_score(guess != y, entropy), abs=1e-6)
    assert figures["auroc"] is None
    answered = probs.amax(1).numpy() >= 0.6
    assert figures["answered"] == pytest.approx(answered.mean())
    assert figures["error_answered"] == pytest.approx((guess != y)[answered].mean())
    assert figures["error_abstained"] == pytest.approx((guess != y)[~answered].mean())


def test_two_classes_have_an_auroc() -> None:
    model = classifier(300, classes=2)
    assert model.probs is not None
    expected = theirs.roc_auc_score(model.y.numpy(), model.probs[:, 1].numpy())
    assert of_classes(model).figures["auroc"] == pytest.approx(expected, abs=1e-6)


def test_wilsons_interval_of_the_error_is_scipys() -> None:
    model = classifier(150)
    figures = of_classes(model).figures
    found = stats.binomtest(round(150 * figures["error"]), 150).proportion_ci(0.95, method="wilson")
    assert (figures["error_low"], figures["error_high"]) == pytest.approx((found.low, found.high), abs=1e-4)


def test_a_constant_guess_is_that_of_these_rows() -> None:
    model = classifier(90)
    model.y = torch.tensor([0] * 60 + [1] * 30)
    constant = of_classes(model).constant
    assert constant["error"] == pytest.approx(1 / 3)
    assert constant["nll"] == pytest.approx(stats.entropy([2 / 3, 1 / 3]))
    assert constant["brier"] == pytest.approx(4 / 9)
    assert constant["macro_f1"] == pytest.approx(theirs.f1_score(model.y, np.zeros(90), average="macro"))


def test_figures_of_numbers_are_those_of_their_definitions() -> None:
    model = regressor(600, seed=4)
    found = of_numbers(model)
    assert model.mean is not None
    assert model.std is not None
    y, mean, std = model.y[:, 0].double().numpy(), model.mean.double().numpy(), model.std.double().numpy()
    figures = found.figures
    assert figures["rmse"] == pytest.approx(np.sqrt(np.mean((y - mean) ** 2)))
    assert figures["mae"] == pytest.approx(np.abs(y - mean).mean())
    assert figures["r2"] == pytest.approx(theirs.r2_score(y, mean))
    assert figures["bias"] == pytest.approx((mean - y).mean())
    assert figures["nll"] == pytest.approx(-stats.norm(mean, std).logpdf(y).mean())
    inside = np.abs(y - mean) <= stats.norm.ppf(0.975) * std
    assert figures["coverage"] == pytest.approx(inside.mean())
    assert figures["mean_width"] == pytest.approx(2 * stats.norm.ppf(0.975) * std.mean())
    expected = stats.spearmanr(std, np.abs(y - mean)).statistic
    assert figures["std_error_correlation"] == pytest.approx(expected, abs=1e-6)
    pit = np.histogram(stats.norm.cdf((y - mean) / std), bins=20, range=(0, 1))[0]
    assert np.abs(found.tally.pit.numpy() - pit).sum() <= 2  # of values on an edge
    assert {line["level"]: line["coverage"] for line in found.levels}[0.5] == pytest.approx(
        (np.abs(y - mean) <= stats.norm.ppf(0.75) * std).mean()
    )


def test_groups_are_by_the_predicted_std_and_hold_every_row() -> None:
    found = of_numbers(regressor(640))
    groups = found.groups
    assert sum(group["rows"] for group in groups) == 640
    assert len(groups) == 10
    assert all(a["to"] <= b["from"] for a, b in pairwise(groups))
    spread = [group["rmse"] / group["std"] for group in groups]
    assert 0.7 < min(spread) < max(spread) < 1.3  # a std that is right


def test_targets_far_from_zero_keep_their_variance() -> None:
    model = regressor(200)
    assert model.mean is not None
    model.mean, model.y = model.mean.double() + 1e9, model.y.double() + 1e9
    found = of_numbers(model)
    assert found.figures["r2"] == pytest.approx(theirs.r2_score(model.y[:, 0], model.mean), abs=1e-6)


@pytest.mark.parametrize("make", [classifier, regressor])
def test_chunks_of_any_size_give_the_same_figures(make: Any) -> None:
    one, other = (measured(make(300, chunk=size)).figures for size in (7, 300))
    assert {k: v for k, v in one.items() if v is not None} == pytest.approx(
        {k: v for k, v in other.items() if v is not None}, rel=1e-9
    )


def test_levels_other_than_the_one_asked_for_cost_only_the_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers_module, "AT_LEVELS", 100)
    found = of_numbers(regressor(300, chunk=50), level=0.9)
    assert {line["rows"] for line in found.levels} == {100}
    assert [line["level"] for line in found.levels] == [0.5, 0.8, 0.9, 0.95, 0.99]
    assert found.count == 300


# -- a sample ------------------------------------------------------------------------------------------


def test_a_sample_is_fair_and_the_same_for_any_chunks() -> None:
    def of(chunk: int) -> torch.Tensor:
        sample = ReservoirSample(200)
        for part in torch.arange(10_000).split(chunk):
            sample.add(number=part)
        return sample.columns["number"]

    chosen = of(64)
    assert torch.equal(chosen, of(5000))
    assert len(chosen.unique()) == 200
    assert stats.kstest(chosen.numpy() / 10_000, "uniform").pvalue > 1e-3
    assert stats.kstest(chosen[:50].numpy() / 10_000, "uniform").pvalue > 1e-3  # the first of them are fair, too
    assert not torch.equal(chosen, chosen.sort().values)


def test_memory_does_not_grow_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuboots.cli.evaluation.sections.ReservoirSample.__init__.__defaults__", (100,))
    for make in (classifier, regressor):
        found = measured(make(1000, chunk=50))
        assert {len(column) for column in found.sample.values()} == {100}
        assert found.count == 1000  # sums are of all


# -- checks --------------------------------------------------------------------------------------------


def test_a_model_that_says_the_truth_passes() -> None:
    found = of_classes(classifier(3000, figures={"error": 0.22}))
    assert [each.holds for each in found.checks].count(False) == 0
    assert check(found, "right as often") is True
    assert check(found, "less sure") is True
    numbers = of_numbers(regressor(3000, figures={"rmse": 1.35}))
    assert all(each.holds for each in numbers.checks), numbers.checks


def test_too_sure_is_found() -> None:
    model = classifier(1000)
    assert model.probs is not None
    model.probs = (model.probs.log() * 6).softmax(1)
    assert check(of_classes(model), "right as often") is False
    numbers = of_numbers(regressor(500, wrong=2.0))
    assert check(numbers, "hold the truth") is False


def test_drift_is_found_and_comes_first() -> None:
    found = of_classes(classifier(500, figures={"error": 0.05}))
    assert check(found, "at training time") is False
    assert "at training time" in found.checks[0].claim
    numbers = of_numbers(regressor(500, figures={"rmse": 0.5}))
    assert check(numbers, "at training time") is False
    strange = of_classes(classifier(500, ood_score=torch.linspace(0, 1.2, 500)))
    assert check(strange, "trained on") is False


def test_chance_is_not_drift() -> None:
    wrong = [check(of_classes(classifier(80, seed=s, figures={"error": 0.28})), "at training time") for s in range(40)]
    assert wrong.count(False) <= 3
    again = [check(of_numbers(regressor(60, seed=s, figures={"rmse": 1.35})), "at training time") for s in range(40)]
    assert again.count(False) <= 3


def test_labels_that_have_nothing_to_do_with_the_answers() -> None:
    model = classifier(600)
    model.y = model.y[torch.randperm(600, generator=torch.Generator().manual_seed(1))]
    found = of_classes(model)
    assert check(found, "constant guess") is not True
    assert check(found, "less sure") is None


# -- odd rows ------------------------------------------------------------------------------------------


def test_rows_without_a_label_are_left_out_and_counted() -> None:
    whole, some = classifier(200), classifier(200)
    some.y[::5] = -1
    found = of_classes(some)
    assert (found.count, found.seen.unlabelled, found.seen.rows) == (160, 40, 200)
    kept = some.y >= 0
    assert whole.probs is not None
    expected = (whole.probs[kept].argmax(1) != whole.y[kept]).double().mean()
    assert found.figures["error"] == pytest.approx(float(expected))
    numbers = regressor(100)
    numbers.y[:30] = math.nan
    assert of_numbers(numbers).count == 70


def test_no_label_at_all_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = classifier(20)
    model.y[:] = -1
    with pytest.raises(UsageError, match="no label of 'what' in any of its 20 rows"):
        run(model, monkeypatch, out=tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("make", [classifier, regressor])
def test_few_rows_make_a_whole_page(
    count: int, make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(make(count), monkeypatch, out=tmp_path / "page.html")
    Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    out = capsys.readouterr().out
    assert f"{count} row" in out
    assert "nan" not in out


def test_odd_answers_make_a_whole_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    single = classifier(50, classes=1)
    one_label = classifier(50)
    one_label.y[:] = 0
    right = classifier(50)
    assert right.probs is not None
    right.y = right.probs.argmax(1)
    certain = regressor(40)
    assert certain.mean is not None
    certain.y, certain.std = certain.mean[:, None].clone(), torch.zeros(40)
    constant = regressor(40)
    constant.y[:] = 7.0
    for k, model in enumerate((single, one_label, right, certain, constant, classifier(300, classes=70))):
        run(model, monkeypatch, out=tmp_path / f"{k}.html", json=True)
        Reader((tmp_path / f"{k}.html").read_text(encoding="utf-8"))


def test_infinite_intervals_are_null_in_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = regressor(60)
    assert model.std is not None
    answer = ArrayModel.predict

    def endless(self: ArrayModel, chunk: Any, **options: Any) -> Any:
        found = answer(self, chunk, **options)
        found.columns["high"] = np.full(len(chunk), np.inf)
        return found

    monkeypatch.setattr(ArrayModel, "answer", endless)
    run(model, monkeypatch, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["figures"]["mean_width"] is None
    assert len(chapters_of(measured(model))) == 4


# -- the command ---------------------------------------------------------------------------------------


def test_json_has_all_figures_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(classifier(120, notes=("column 'x' is odd",), figures={"error": 0.1, "notes": ["a"]}), monkeypatch, json=True)
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert out.count("\n") == 1
    assert found["rows"] == {"read": 120, "without label": 0, "counted": 120}
    assert found["notes"] == ["column 'x' is odd"]
    assert sum(map(sum, found["confusion"])) == 120
    assert sum(each["rows"] for each in found["classes"]) == 120
    assert found["at_training"]["figures"]["error"] == 0.1
    assert {each["holds"] for each in found["checks"]} <= {True, False, None}
    assert found["page"] is None
    assert err == ""


def test_the_page_is_named_after_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(classifier(80, names=("a <b>", "b & c", "c")), monkeypatch)
    page = (tmp_path / "a-model-evaluation.html").read_text(encoding="utf-8")
    read = Reader(page)
    assert "a <b>" in read.text
    assert "of the paper" not in read.text
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert {"answers", "calibration", "abstaining", "classes", "rows"} <= {*read.having("id")}
    assert "a-model-evaluation.html" in capsys.readouterr().out


def test_words_are_few_and_the_worst_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(classifier(500, figures={"error": 0.01}), monkeypatch, out=tmp_path / "p.html")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0].startswith("a-model on rows.csv: classification of 'what'")
    assert lines[1].startswith("✗ does NOT hold: no more errors")
    assert len(lines) < 60


def test_a_fault_in_the_middle_leaves_the_old_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old", encoding="utf-8")
    with pytest.raises(UsageError, match="a broken row"):
        run(classifier(200, fault=ValueError("got a broken row; expected a whole one")), monkeypatch, out=page)
    with pytest.raises(KeyboardInterrupt):
        run(classifier(200, fault=KeyboardInterrupt()), monkeypatch, out=page)  # type: ignore[arg-type]
    assert page.read_text(encoding="utf-8") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"level": 0.0}, "--level is 0.0"),
        ({"level": math.nan}, "--level is nan"),
        ({"num_samples": 0}, "--num-samples is 0"),
        ({"out": Path("page.pdf")}, "ends in .html"),
        ({"out": Path("/nowhere/page.html")}, "no folder /nowhere"),
    ],
)
def test_bad_options_are_sentences(options: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        Evaluate("a-model", "rows.csv", **options).run()


def test_a_folder_that_is_no_model_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no saved model"):
        Evaluate(str(tmp_path), "rows.csv", out=tmp_path / "p.html").run()


# -- real models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_real_table(task: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, rows_file = fitted(tmp_path, task)
    assert main(["evaluate", str(saved), str(rows_file), "--out", str(tmp_path / "page.html")]) == 0
    assert f"{task} of 'y'" in capsys.readouterr().out
    Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert main(["evaluate", str(saved), str(rows_file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"]["counted"] == 160
    assert found["figures"]["accuracy" if task == "classification" else "r2"] > 0.3
    assert found["at_training"]["rows"]["test"] > 0


def test_tables_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, rows_file = fitted(tmp_path, "classification")
    head, *lines = rows_file.read_text(encoding="utf-8").splitlines()

    def said(*rows: str) -> tuple[int, str, str]:
        (tmp_path / "other.csv").write_text("\n".join([*rows, ""]), encoding="utf-8")
        code = main(["evaluate", str(saved), str(tmp_path / "other.csv"), "--json"])
        return code, *capsys.readouterr()

    code, _, err = said(head.rsplit(",", 1)[0], *(line.rsplit(",", 1)[0] for line in lines))
    assert code == 2
    assert "lacks 1 column(s): 'y'" in err
    code, _, err = said(head.replace("a", "q", 1), *lines)
    assert code == 2
    assert "'a'" in err
    assert said("")[0] == said(head)[0] == 2
    code, out, err = said(head, *lines, f"{lines[0].rsplit(',', 1)[0]},", f"{lines[0].rsplit(',', 1)[0]},purple")
    found = json.loads(out)
    assert found["rows"] == {"read": 162, "without label": 2, "counted": 160}
    assert any("'purple'" in note for note in found["notes"])
    code, out, _ = said(head, lines[0])
    assert (code, json.loads(out)["rows"]["counted"]) == (0, 1)


def test_a_folder_of_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    from neuboots.app.masks import fit_masks

    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (tmp_path / "cells" / name).mkdir(parents=True)
    for k in range(12):
        mask = np.zeros((24, 24), np.uint8)
        mask[4 + k % 3 : 16, 6:18] = 1
        image = (60 + 120 * mask[..., None] + rng.normal(0, 20, (24, 24, 3))).clip(0, 255).astype(np.uint8)
        Image.fromarray(image).save(tmp_path / "cells" / "images" / f"{k}.png")
        Image.fromarray(mask).save(tmp_path / "cells" / "masks" / f"{k}.png")
    fit_masks(tmp_path / "cells", epochs=1, num_samples=5, progress=False).save(tmp_path / "model")
    options = ["--num-samples", "5"]
    page = tmp_path / "page.html"
    assert main(["evaluate", str(tmp_path / "model"), str(tmp_path / "cells"), *options, "--out", str(page)]) == 0
    assert "12 images, 6,912 pixels" in capsys.readouterr().out
    Reader(page.read_text(encoding="utf-8"))
    assert main(["evaluate", str(tmp_path / "model"), str(tmp_path / "cells"), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    matrix = np.array(found["confusion"])
    union = matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
    assert found["figures"]["mean_iou"] == pytest.approx((matrix.diagonal() / union).mean())
    assert (
        main(["next", str(tmp_path / "model"), str(tmp_path / "cells" / "images"), "-k", "3", *options, "--json"]) == 0
    )
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 3
