"""Tests of `neuboots evaluate` and the evaluation reports."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _app import ArrayModel, error_message, fitted_table_model, make_classifier, make_regressor
from _html import HtmlReader
from PIL import Image
from scipy import stats
from sklearn import metrics as sklearn_metrics

from neuboots.app.masks import fit_masks
from neuboots.cli import UsageError, main
from neuboots.cli import evaluate as module
from neuboots.cli.evaluate import Evaluate, add_rows, evaluate_model, sampled_columns
from neuboots.evaluation.active_learning import RowSelector
from neuboots.report.evaluation import EvaluationReport


def evaluate(model: ArrayModel, **options: Any) -> EvaluationReport:
    return evaluate_model(model, "rows.csv", progress=False, **options)[0]


def check(report: EvaluationReport, words: str) -> bool | None:
    """The result of the one check whose claim has these words."""
    (holds,) = [each.holds for each in report.checks if words in each.claim]
    return holds


def run(model: ArrayModel, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    monkeypatch.setattr(module, "load_model", lambda folder: model)
    Evaluate("a-model", "rows.csv", **options).run()


# -- metrics -------------------------------------------------------------------------------------------


def test_class_metrics_agree_with_scikit_learn() -> None:
    model = make_classifier(700, classes=4, seed=3)
    metrics, probs, y = evaluate(model).metrics, model.probs, model.y.numpy()
    assert probs is not None
    labels, accepted = probs.argmax(1).numpy(), probs.amax(1).numpy() >= 0.6
    entropy = stats.entropy(probs.numpy(), axis=1)
    expected = {
        "error": 1 - sklearn_metrics.accuracy_score(y, labels),
        "nll": -np.log(probs.double().numpy()[range(700), y]).mean(),
        "macro_f1": sklearn_metrics.f1_score(y, labels, average="macro"),
        "balanced_accuracy": sklearn_metrics.balanced_accuracy_score(y, labels),
        "mean_confidence": float(probs.amax(1).double().mean()),
        "error_auroc_entropy": sklearn_metrics.roc_auc_score(labels != y, entropy),
        "accepted": accepted.mean(),
        "error_accepted": (labels != y)[accepted].mean(),
        "error_rejected": (labels != y)[~accepted].mean(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert metrics["auroc"] is None
    interval = stats.binomtest(round(700 * metrics["error"]), 700).proportion_ci(0.95, method="wilson")
    assert (metrics["error_low"], metrics["error_high"]) == pytest.approx((interval.low, interval.high), abs=1e-4)


def test_two_classes_have_an_auroc() -> None:
    model = make_classifier(300, classes=2)
    assert model.probs is not None
    expected = sklearn_metrics.roc_auc_score(model.y.numpy(), model.probs[:, 1].numpy())
    assert evaluate(model).metrics["auroc"] == pytest.approx(expected, abs=1e-6)


def test_class_baseline_predicts_the_frequencies() -> None:
    model = make_classifier(90)
    model.y = torch.tensor([0] * 60 + [1] * 30)
    expected = {
        "error": 1 / 3,
        "nll": stats.entropy([2 / 3, 1 / 3]),
        "brier": 4 / 9,
        "ece": 0.0,
        "macro_f1": sklearn_metrics.f1_score(model.y, np.zeros(90), average="macro"),
    }
    assert evaluate(model).baseline == pytest.approx(expected)


def test_regression_metrics_agree_with_their_definitions() -> None:
    model = make_regressor(600, seed=4)
    report = evaluate(model)
    assert model.mean is not None
    assert model.std is not None
    y, mean, std = model.y[:, 0].double().numpy(), model.mean.double().numpy(), model.std.double().numpy()
    expected = {
        "rmse": np.sqrt(np.mean((y - mean) ** 2)),
        "mae": np.abs(y - mean).mean(),
        "r2": sklearn_metrics.r2_score(y, mean),
        "bias": (mean - y).mean(),
        "nll": -stats.norm(mean, std).logpdf(y).mean(),
        "coverage": (np.abs(y - mean) <= stats.norm.ppf(0.975) * std).mean(),
        "mean_width": 2 * stats.norm.ppf(0.975) * std.mean(),
        "std_error_correlation": stats.spearmanr(std, np.abs(y - mean)).statistic,
    }
    assert {name: report.metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    pit = np.histogram(stats.norm.cdf((y - mean) / std), bins=20, range=(0, 1))[0]
    assert np.abs(np.array(report.details["pit"]) - pit).sum() <= 2  # values on an edge
    coverage = {row["level"]: row["coverage"] for row in report.details["levels"]}
    assert coverage[0.5] == pytest.approx((np.abs(y - mean) <= stats.norm.ppf(0.75) * std).mean())


def test_groups_by_std_have_every_row() -> None:
    groups = evaluate(make_regressor(640)).details["groups"]
    assert sum(group["rows"] for group in groups) == 640
    assert len(groups) == 10
    assert all(a["to"] <= b["from"] for a, b in pairwise(groups))
    ratios = [group["rmse"] / group["std"] for group in groups]
    assert 0.7 < min(ratios) < max(ratios) < 1.3


def test_large_targets_keep_their_variance() -> None:
    model = make_regressor(200)
    assert model.mean is not None
    model.mean, model.y = model.mean.double() + 1e9, model.y.double() + 1e9
    r2 = evaluate(model).metrics["r2"]
    assert r2 == pytest.approx(sklearn_metrics.r2_score(model.y[:, 0], model.mean), abs=1e-6)


@pytest.mark.parametrize("make", [make_classifier, make_regressor])
def test_batch_size_does_not_change_metrics(make: Any) -> None:
    one, other = (evaluate(make(300, batch_size=size)).metrics for size in (7, 300))
    assert {k: v for k, v in one.items() if v is not None} == pytest.approx(
        {k: v for k, v in other.items() if v is not None}, rel=1e-9
    )


def test_other_levels_are_predicted_for_the_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LEVEL_ROWS", 100)
    report = evaluate(make_regressor(300, batch_size=50), level=0.9)
    assert {row["rows"] for row in report.details["levels"]} == {100}
    assert [row["level"] for row in report.details["levels"]] == [0.5, 0.8, 0.9, 0.95, 0.99]
    assert report.count == 300


def test_sample_is_uniform_and_independent_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(batch_size: int) -> torch.Tensor:
        selector = RowSelector(200)
        for part in torch.arange(10_000).split(batch_size):
            add_rows(selector, {"number": part})
        return sampled_columns(selector)["number"]

    chosen = sample(64)
    assert torch.equal(chosen, sample(5000))
    assert len(chosen.unique()) == 200
    assert stats.kstest(chosen.numpy() / 10_000, "uniform").pvalue > 1e-3
    assert stats.kstest(chosen[:50].numpy() / 10_000, "uniform").pvalue > 1e-3
    monkeypatch.setattr(module, "MAX_SAMPLED_ROWS", 100)
    for make in (make_classifier, make_regressor):
        assert evaluate(make(1000, batch_size=50)).count == 1000


# -- checks --------------------------------------------------------------------------------------------


def test_correct_model_passes() -> None:
    classes = evaluate(make_classifier(3000, metrics={"error": 0.22}))
    assert [each.holds for each in classes.checks].count(False) == 0
    assert check(classes, "confidence equals") is True
    assert check(classes, "less confident") is True
    regression = evaluate(make_regressor(3000, metrics={"rmse": 1.35}))
    assert all(each.holds for each in regression.checks), regression.checks


def test_overconfidence_is_detected() -> None:
    model = make_classifier(1000)
    assert model.probs is not None
    model.probs = (model.probs.log() * 6).softmax(1)
    assert check(evaluate(model), "confidence equals") is False
    assert check(evaluate(make_regressor(500, scale=2.0)), "intervals cover") is False


def test_drift_is_detected_and_comes_first() -> None:
    report = evaluate(make_classifier(500, metrics={"error": 0.05}))
    assert report.checks[0].holds is False
    assert "at training time" in report.checks[0].claim
    assert check(evaluate(make_regressor(500, metrics={"rmse": 0.5})), "at training time") is False
    shifted = evaluate(make_classifier(500, ood_score=torch.linspace(0, 1.2, 500)))
    assert check(shifted, "distribution") is False


def test_chance_is_not_drift() -> None:
    """At most 3 false alarms of 40, where 2.5 % each are expected."""
    classes = [evaluate(make_classifier(80, seed=s, metrics={"error": 0.28})) for s in range(40)]
    assert [check(report, "at training time") for report in classes].count(False) <= 3
    numbers = [evaluate(make_regressor(60, seed=s, metrics={"rmse": 1.35})) for s in range(40)]
    assert [check(report, "at training time") for report in numbers].count(False) <= 3


def test_random_labels_fail() -> None:
    model = make_classifier(600)
    model.y = model.y[torch.randperm(600, generator=torch.Generator().manual_seed(1))]
    report = evaluate(model)
    assert check(report, "constant prediction") is not True
    assert check(report, "less confident") is None


# -- unusual data --------------------------------------------------------------------------------------


def test_rows_of_an_unseen_class_are_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every metric but the log loss; compared with scikit-learn, which knows the further class by its name."""
    model, usual = make_classifier(300), make_classifier(300)
    usual.y[:30], model.y[:30], model.y[30:40] = -1, -2, -1
    usual.y[30:40] = -1
    assert model.probs is not None
    report, counts = evaluate_model(model, "rows.csv", progress=False)
    assert (report.count, counts.unseen, counts.unlabeled, counts.rows) == (290, 30, 10, 300)
    y, labels = model.y.numpy()[model.y != -1], model.probs.argmax(1).numpy()[model.y != -1]
    assert report.metrics["error"] == pytest.approx((y != labels).mean())
    assert report.metrics["macro_f1"] == pytest.approx(sklearn_metrics.f1_score(y, labels, average="macro"))
    assert report.metrics["nll"] == pytest.approx(evaluate(usual).metrics["nll"])
    squares = (
        (model.probs[model.y != -1].double() - torch.nn.functional.one_hot(torch.tensor(y).clamp(0), 3)).square().sum(1)
    )
    squares[:30] = 1 + model.probs[:30].double().square().sum(1)
    assert report.metrics["brier"] == pytest.approx(float(squares.mean()), abs=1e-6)
    assert [row["rows"] for row in report.details["classes"]][-1] == 30
    run(model, monkeypatch, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == {"read": 300, "without label": 10, "of an unseen class": 30, "counted": 290}
    assert "30 of 300 rows have a class that is not in the training data" in found["notes"][0]
    model.y[:] = -2
    with pytest.raises(UsageError, match="300 have a class"):
        evaluate(model)


def test_unlabeled_rows_are_counted_and_excluded() -> None:
    model = make_classifier(200)
    assert model.probs is not None
    model.y[::5] = -1
    report, counts = evaluate_model(model, "rows.csv", progress=False)
    assert (report.count, counts.unlabeled, counts.rows) == (160, 40, 200)
    known = model.y >= 0
    expected = (model.probs[known].argmax(1) != model.y[known]).double().mean()
    assert report.metrics["error"] == pytest.approx(float(expected))
    numbers = make_regressor(100)
    numbers.y[:30] = math.nan
    assert evaluate(numbers).count == 70
    model.y[:] = -1
    with pytest.raises(UsageError, match="'what'"):
        evaluate(model)


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [make_classifier, make_regressor])
def test_few_rows_give_a_complete_report(
    count: int, make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(make(count), monkeypatch, out=tmp_path / "page.html")
    HtmlReader((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "nan" not in capsys.readouterr().out


@pytest.mark.parametrize("part", [slice(3), pytest.param(slice(3, 6), marks=pytest.mark.slow)], ids=["some", "rest"])
def test_degenerate_predictions_give_a_complete_report(
    part: slice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    single, one_label, right = make_classifier(50, classes=1), make_classifier(50), make_classifier(50)
    one_label.y[:] = 0
    assert right.probs is not None
    right.y = right.probs.argmax(1)
    certain, constant = make_regressor(40), make_regressor(40)
    assert certain.mean is not None
    certain.y, certain.std = certain.mean[:, None].clone(), torch.zeros(40)
    constant.y[:] = 7.0
    for k, model in enumerate((single, one_label, certain, right, constant, make_classifier(300, classes=70))[part]):
        run(model, monkeypatch, out=tmp_path / f"{k}.html", json=True)
        HtmlReader((tmp_path / f"{k}.html").read_text(encoding="utf-8"))


def test_infinite_intervals_are_null_in_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = ArrayModel.predict

    def predict(self: ArrayModel, batch: Any, **options: Any) -> Any:
        table = original(self, batch, **options)
        table.columns["high"] = np.full(len(batch), np.inf)
        return table

    monkeypatch.setattr(ArrayModel, "predict", predict)
    run(make_regressor(60), monkeypatch, json=True)
    assert json.loads(capsys.readouterr().out)["metrics"]["mean_width"] is None


# -- command -------------------------------------------------------------------------------------------


def test_json_has_all_results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_classifier(120, notes=("column 'x' is odd",), metrics={"error": 0.1, "notes": ["a"]})
    run(model, monkeypatch, json=True)
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert out.count("\n") == 1
    assert found["rows"] == {"read": 120, "without label": 0, "of an unseen class": 0, "counted": 120}
    assert found["notes"] == ["column 'x' is odd"]
    assert sum(map(sum, found["confusion"])) == 120
    assert sum(each["rows"] for each in found["classes"]) == 120
    assert found["at_training"]["metrics"]["error"] == 0.1
    assert {each["holds"] for each in found["checks"]} <= {True, False, None}
    assert found["page"] is None
    assert err == ""


def test_page_is_named_after_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(make_classifier(500, names=("a <b>", "b & c", "c"), metrics={"error": 0.01}), monkeypatch)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0].startswith("a-model on rows.csv: classification of 'what'")
    assert lines[1].startswith("✗ does NOT hold: no more errors")
    assert len(lines) < 70
    page = (tmp_path / "a-model-evaluation.html").read_text(encoding="utf-8")
    reader = HtmlReader(page)
    assert "a <b>" in reader.text
    assert "of the paper" not in reader.text
    assert {"predictions", "calibration", "selective-prediction", "classes", "rows"} <= {*reader.values("id")}


def test_error_leaves_the_page_unchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (page := tmp_path / "page.html").write_text("old", encoding="utf-8")
    with pytest.raises(ValueError, match="broken row"):
        run(make_classifier(200, error=ValueError("broken row")), monkeypatch, out=page)
    with pytest.raises(KeyboardInterrupt):
        run(make_classifier(200, error=KeyboardInterrupt()), monkeypatch, out=page)
    assert page.read_text(encoding="utf-8") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"level": 0.0}, "--level"),
        ({"level": math.nan}, "--level"),
        ({"num_samples": 0}, "--num-samples"),
        ({"out": Path("page.pdf")}, "--out"),
        ({"out": Path("/nowhere/page.html")}, "/nowhere"),
        ({"json": True}, "a-model"),
    ],
)
def test_wrong_option_is_named(options: dict[str, Any], name: str) -> None:
    assert name in error_message(Evaluate("a-model", "rows.csv", **options))


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_trained_table_model(task: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, rows = fitted_table_model(tmp_path, task)
    assert main(["evaluate", str(model), str(rows), "--out", str(tmp_path / "page.html")]) == 0
    assert f"{task} of 'y'" in capsys.readouterr().out
    HtmlReader((tmp_path / "page.html").read_text(encoding="utf-8"))
    header, *lines = rows.read_text(encoding="utf-8").splitlines()

    def evaluate_rows(*content: str) -> tuple[int, str, str]:
        (tmp_path / "other.csv").write_text("\n".join([*content, ""]), encoding="utf-8")
        code = main(["evaluate", str(model), str(tmp_path / "other.csv"), "--json"])
        return code, *capsys.readouterr()

    code, out, _ = evaluate_rows(header, *lines)
    found = json.loads(out)
    assert found["rows"]["counted"] == 160
    assert found["metrics"]["accuracy" if task == "classification" else "r2"] > 0.3
    code, _, err = evaluate_rows(header.rsplit(",", 1)[0], *(line.rsplit(",", 1)[0] for line in lines))
    assert code == 2
    assert "'y'" in err
    assert evaluate_rows("")[0] == evaluate_rows(header)[0] == 2
    code, out, _ = evaluate_rows(header, lines[0])
    assert (code, json.loads(out)["rows"]["counted"]) == (0, 1)


def test_trained_mask_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    model, data, page = str(tmp_path / "model"), str(tmp_path / "cells"), tmp_path / "page.html"
    assert main(["evaluate", model, data, "--num-samples", "5", "--out", str(page)]) == 0
    assert "12 images, 6,912 labeled pixels" in capsys.readouterr().out
    HtmlReader(page.read_text(encoding="utf-8"))
    assert main(["evaluate", model, data, "--num-samples", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    matrix = np.array(found["confusion"])
    union = matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
    assert found["metrics"]["mean_iou"] == pytest.approx((matrix.diagonal() / union).mean())
    assert main(["suggest", model, f"{data}/images", "-k", "3", "--num-samples", "5", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 3
    assert main(["predict", model, f"{data}/images", "--num-samples", "5", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "summary.csv").is_file()
    assert main(["predict", model, f"{data}/images"]) == 2
