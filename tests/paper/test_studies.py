"""Tests of every study: presets, jobs, a complete smoke run, and the options of `neuboots reproduce`."""

import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest

from neuboots.cli import main
from neuboots.cli._console import UsageError
from neuboots.data import DATASETS
from neuboots_paper.reproduce import Reproduce
from neuboots_paper.runner import job_name, read_run, run_study
from neuboots_paper.studies import STUDY_NAMES, load_study
from neuboots_paper.study import SCALES, RunContext, Scale, load_preset
from neuboots_paper.toy_datasets import TOY_DATASETS

SHIPPED = {*TOY_DATASETS, "digits", "diabetes", "wine", "breast_cancer"}  # datasets that need no file


@pytest.mark.slow
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
