"""Tests of every study: presets, jobs, a complete smoke run, and the options of `neuboots reproduce`."""

import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest

from neuboots.cli import UsageError, main
from neuboots.data import DATASETS
from neuboots_paper.reproduce import Reproduce
from neuboots_paper.runner import job_name, read_run, run_study
from neuboots_paper.studies import STUDY_NAMES, load_study
from neuboots_paper.studies.diversity import MEASURES
from neuboots_paper.study import SCALES, RunContext, Scale, load_preset
from neuboots_paper.toy_datasets import TOY_DATASETS

RESULTS = Path(__file__).resolve().parents[2] / "results" / "cpu"
SHIPPED = {*TOY_DATASETS, "digits", "diabetes", "wine", "breast_cancer"}  # datasets that need no file


@pytest.mark.parametrize("name", STUDY_NAMES)
def test_study_runs_at_smoke_scale(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NEUBOOTS_DATA", raising=False)
    Reproduce(name, scale="smoke", out=tmp_path, workers=1).run()
    out, folder = capsys.readouterr().out, tmp_path / "smoke" / name
    section = read_run(folder).section()
    assert section.tables
    assert all(table.rows and table.title in out for table in section.tables)
    assert section.checks
    assert all(str(check) in out for check in section.checks)
    for svg in section.plots.values():
        ElementTree.fromstring(svg)
    assert {link for table in section.tables for link in table.links if link} <= set(section.plots)
    assert (folder / "results.md").stat().st_size > 100
    for file in (folder / "rows").iterdir():  # valid JSON has no NaN
        json.loads(file.read_text(), parse_constant=pytest.fail)
    monkeypatch.setattr(load_study(name), "measure", lambda *_: pytest.fail("a finished job was repeated"))
    run_study(load_study(name).from_preset("smoke"), "smoke", folder, RunContext(), command="")


OURS = {"method": "neuboots"}
SCORES = {"accuracy": +1, "error": -1, "ece": -1, "nll": -1, "brier": -1}
RATIOS = {"fit_ratio": -1, "predict_ratio": -1, "relative_time": -1, "seconds": -1, "memory_mb": -1}
DETECTION = {"tnr": +1, "auroc": +1, "accuracy": +1, "aupr_in": +1, "aupr_out": +1}
DIVERSITY = {name: +1 if better == "higher" else -1 for name, (_, better) in MEASURES.items()}
BANDS = {"width": +1, "overlap": +1, "outside": +1}
# study, table, changed rows, better direction of the changed metrics, verdicts if they are better, and if worse:
# T holds, F does not hold, - not resolved
CHANGES: list[tuple[str, str, dict[str, str], dict[str, int], str, str]] = [
    ("active", "curve", OURS, SCORES, "T" * 16, "F" * 16),
    ("amortized-classification", "scores", OURS, SCORES, "TTTT", "FFFF"),
    ("amortized-classification", "scores", {**OURS, "n": "^100$"}, SCORES, "-TFT", "FFFF"),  # one size of four
    ("amortized-regression", "scores", OURS, {"rmse": -1}, "T" * 8, "F" * 8),
    ("bands", "groups", {"group": "unknown|far"}, BANDS, "TTTTTTFTTTTTTF", "F" * 14),
    ("bands", "single", {"image": "wolf"}, BANDS, "FFTTTTFFF-TTTF", "FFTTTTTFF-TTTT"),
    ("blocks", "distances", {"S": "^5$"}, {"ks": -1}, "FTFTTT", "TTTTTT"),
    ("blocks", "distances", {"grouping": "stratified"}, {"ratio": +1}, "TTTTTF", "TTTTTF"),
    ("blocks", "distances", {"grouping": "random"}, {"ks_regrouped": -1}, "TTTTFT", "TTTTFT"),
    ("calibration", "scores", OURS, {"ece": -1}, "TTF-TTFFT-", "FFF-FFFFT-"),  # two of ten claim equal ECEs
    ("calibration", "times", OURS, RATIOS, "TF--T--FTT", "TF--T--FFF"),
    ("corruption", "shift", OURS, SCORES, "FFTT", "T-FF"),
    ("corruption", "shift", {"method": "^deep-ensemble", "severity": "[1-5]"}, SCORES, "TT-F", "FF-F"),
    ("cost", "growth", OURS, {"fit_ratio": -1, "predict_ratio": -1}, "FTFTTTTTT", "FFFFTTTTT"),
    ("cost", "growth", {"method": "mimo", "members": "^1$"}, {"memory_mb": -1}, "T" * 9, "TTTTTFTTT"),
    ("cost", "mlp", OURS, RATIOS, "T" * 9, "TTTTTTFTT"),
    ("cost", "many", OURS, RATIOS, "T" * 9, "TTTTTTTTF"),
    ("cost", "others", {"method": "mc-dropout"}, RATIOS, "TTTFTTTTT", "T" * 9),
    ("diversity", "diversity", OURS, DIVERSITY, "T" * 10, "F" * 10),
    ("dropout", "scores", OURS, SCORES, "FTTTFTTT", "FFFFFFFF"),  # two of eight claim equal accuracies
    ("dropout", "scores", OURS, {"nll": -1}, "T-T--FTF", "T-F--FFF"),
    ("imbalance", "classes", OURS, {"f1": +1}, "TTTT-TTTT-TTTTT-TTTTT-", "FFFF-FFFF-FFFFF-FFFFF-"),
    ("ood", "detection", {"detector": "neuboots"}, DETECTION, "TTTTTTTTTTTTT-F", "FFFFFFTFFFFFF-F"),
    ("ood", "spread", OURS, {"std_out": +1}, "----F-T-------T", "----F-T-------F"),
    ("rotated-mnist", "scores", {**OURS, "B": "^25$"}, SCORES, "T" * 8, "F" * 8),
    ("segmentation-2d", "scores", OURS, {"mean_iou": +1, "ece": -1}, "T" * 9, "FFFFFFFFT"),
    ("segmentation-2d", "times", OURS, RATIOS, "F-F-F-F-T", "F-F-F-F-F"),
    ("segmentation-3d", "scores", OURS, {"mean_iou": +1, "ece": -1}, "T" * 9, "FFFFFFFFT"),
    ("segmentation-3d", "times", OURS, RATIOS, "--F-F-F-T", "--F-F-F-F"),
    ("text", "scores", OURS, SCORES, "T" * 8, "F" * 8),
    ("time-vs-n", "times", OURS, RATIOS, "TTT", "FFF"),
    ("uci", "scores", {"method": "NeuBootsRegressor"}, {"rmse": -1}, "TTT-TTTT-T", "FTT-FFTT-F"),
    ("uci", "scores", {"method": "NeuBootsRegressor"}, {"log_likelihood": +1}, "TTTTTTTTTT", "TTFFTTTFFT"),
    ("uci", "scores", {"method": "NeuBootsRegressor"}, {"coverage": +1}, "TFT-TTFT-T", "TFT-TTFT-T"),
]


@pytest.mark.parametrize(("name", "table", "chosen", "better", "if_better", "if_worse"), CHANGES)
def test_checks_follow_the_rows(
    name: str, table: str, chosen: dict[str, str], better: dict[str, int], if_better: str, if_worse: str
) -> None:
    """The committed rows, in which some are made far better or far worse than they are."""
    run = read_run(RESULTS / name)
    for sign, expected in ((+1, if_better), (-1, if_worse)):
        rows = [{**row} for row in run.rows[table]]
        changed = [row for row in rows if all(re.search(text, str(row[key])) for key, text in chosen.items())]
        for key, direction in better.items():
            step = 10 * max([abs(row[key]) for row in rows if row.get(key) is not None], default=0.0)
            for row in (row for row in changed if row.get(key) is not None):
                up = sign * direction
                row[key] = row[key] * 1000.0**up if key in RATIOS else row[key] + up * step
        found = run.study.checks({**run.rows, table: rows})
        assert "".join({True: "T", False: "F", None: "-"}[check.holds] for check in found) == expected


@pytest.mark.parametrize("name", STUDY_NAMES)
@pytest.mark.parametrize("scale", SCALES)
def test_settings_survive_json_and_job_names_are_unique(name: str, scale: Scale) -> None:
    study = load_study(name).from_preset(scale)
    assert study.from_settings(json.loads(json.dumps(study.settings))) == study
    jobs = study.jobs()
    names = [job_name(job) for job in jobs]
    assert len(names) == len({*names}) > 1
    assert all(re.fullmatch(r"[^/\s]{1,200}", name) for name in names)
    assert {job["seed"] for job in jobs if "seed" in job} <= {*study.seeds}
    assert {*study.dataset_names} <= (SHIPPED if scale == "smoke" else {*DATASETS, *TOY_DATASETS})


@pytest.mark.parametrize("name", STUDY_NAMES)
def test_study_has_a_source_a_claim_and_valid_presets(name: str) -> None:
    study = load_study(name)
    assert re.search(r"table|figure|section|theorem|conclusion|beyond the paper", study.source)
    assert study.claim.endswith((".", "?"))
    known = {field.name for field in fields(study)}
    assert all({*load_preset(name, scale)} <= known for scale in SCALES)
    assert len(study.from_preset("cpu").seeds) >= 3


def test_unknown_name_suggests_the_closest() -> None:
    with pytest.raises(UsageError, match="rotated-mnist") as caught:
        Reproduce("rotatedmnist").run()
    assert all(name in str(caught.value) for name in STUDY_NAMES)


def test_missing_datasets_are_listed_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        Reproduce("all", scale="cpu", data_root=tmp_path, out=tmp_path / "out").run()
    assert all(name in str(caught.value) for name in ("mnist", "cifar10", "svhn", "sst2", "hippocampus3d"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "package"),
    [("dropout", "matplotlib"), ("dropout", "scipy"), ("time-vs-n", "gpytorch"), ("all", "gpytorch"), ("all", "monai")],
)
def test_missing_package_is_named_before_any_work(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["reproduce", name, "--scale", "smoke", "--out", str(tmp_path / "out")]) == 1
    assert package in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_all_folders_are_checked_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke" / STUDY_NAMES[-1]).touch()
    with pytest.raises(UsageError, match=STUDY_NAMES[-1]):
        Reproduce("all", scale="smoke", out=tmp_path).run()
    assert len([*(tmp_path / "smoke").iterdir()]) == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seeds": ()}, "--seeds"),
        ({"seeds": (1, 1)}, "--seeds"),
        ({"seeds": (-1,)}, "--seeds"),
        ({"seeds": (2**32,)}, "--seeds"),
        ({"workers": 0}, "--workers"),
        ({"out": Path(__file__)}, "--out"),
    ],
)
def test_invalid_option_is_a_usage_error(options: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Reproduce("rotated-mnist", scale="smoke", **options).run()  # type: ignore[arg-type]
