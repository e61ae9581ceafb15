"""Every study at the smallest scale, on shipped data alone: rows, tables, verdicts, figures, and nothing done twice."""

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
from neuboots_paper.registry import STUDIES
from neuboots_paper.reproduce import Reproduce
from neuboots_paper.runner import job_name, read_run, run_study
from neuboots_paper.study import SCALES, RunContext
from neuboots_paper.toy_datasets import TOY_DATASETS

NEED_NOTHING = {*TOY_DATASETS, "digits", "diabetes", "wine", "breast_cancer"}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_runs_at_the_smallest_scale(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NEUBOOTS_DATA", raising=False)
    Reproduce(name, scale="smoke", out=tmp_path, workers=1).run()
    out, folder = capsys.readouterr().out, tmp_path / "smoke" / name
    chapter = read_run(folder, STUDIES).chapter()
    assert chapter.tables
    assert all(table.rows for table in chapter.tables)
    assert all(table.title in out for table in chapter.tables)
    assert chapter.checks
    assert all(str(verdict) in out for verdict in chapter.checks)
    for figure in chapter.plots.values():
        ElementTree.fromstring(figure)
    linked = {link for table in chapter.tables for link in table.links if link}
    assert linked <= set(chapter.plots)
    assert (folder / "results.md").stat().st_size > 100
    for file in (folder / "rows").iterdir():  # no NaN, which no other language reads
        json.loads(file.read_text(), parse_constant=pytest.fail)

    def again(*_: object) -> None:
        pytest.fail("a finished unit was done again")

    monkeypatch.setattr(STUDIES[name], "measure", again)
    run_study(STUDIES[name].at("smoke"), "smoke", folder, RunContext(), command="")


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("scale", SCALES)
def test_settings_are_plain_and_units_have_names_of_their_own(name: str, scale: str) -> None:
    study = STUDIES[name].at(scale)  # type: ignore[arg-type]
    assert study.of(json.loads(json.dumps(study.settings))) == study
    names = [job_name(unit) for unit in study.units()]
    assert len(names) == len({*names}) > 1
    assert {unit["seed"] for unit in study.units() if "seed" in unit} <= {*study.seeds}
    assert all(re.fullmatch(r"[^/\s]{1,200}", name) for name in names)
    needed = {*study.sets}
    assert needed <= ({*DATASETS} | {*TOY_DATASETS} if scale != "smoke" else NEED_NOTHING)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_says_what_it_is(name: str) -> None:
    study = STUDIES[name]
    assert study.name == name
    assert re.search(r"table|figure|section|theorem|conclusion|beyond the paper", study.source)
    assert study.claim.endswith((".", "?"))  # the paper asks nothing of texts: we do
    assert {*study.presets} == {*SCALES}
    known = {field.name for field in fields(study)}
    assert all({*settings} <= known for settings in study.presets.values())


def test_published_figures_have_three_seeds() -> None:
    assert all(len(STUDIES[name].at("cpu").seeds) >= 3 for name in STUDIES)


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(UsageError, match="did you mean rotated-mnist") as caught:
        Reproduce("rotatedmnist").run()
    assert all(name in str(caught.value) for name in STUDIES)


def test_missing_data_are_named_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: object, **__: object) -> None:
        pytest.fail("work began")

    monkeypatch.setattr("neuboots_paper.runner.run_study", work)
    with pytest.raises(UsageError) as caught:
        Reproduce("all", scale="cpu", data_root=tmp_path, out=tmp_path / "out").run()
    assert all(name in str(caught.value) for name in ("mnist", "cifar10", "svhn", "sst2", "hippocampus3d"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "module"),
    [("dropout", "matplotlib"), ("dropout", "scipy"), ("time-vs-n", "gpytorch"), ("all", "gpytorch"), ("all", "monai")],
)
def test_a_missing_library_is_named_before_any_work(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["reproduce", name, "--scale", "smoke", "--out", str(tmp_path / "out")]) == 1
    said = f"neuboots: this needs {module}; get all it needs with: pip install 'neuboots[all]'\n"
    assert capsys.readouterr().err == said
    assert not (tmp_path / "out").exists()


def test_all_folders_are_looked_at_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke" / [*STUDIES][-1]).touch()
    with pytest.raises(UsageError, match="no folder that can be written to"):
        Reproduce("all", scale="smoke", out=tmp_path).run()
    assert len([*(tmp_path / "smoke").iterdir()]) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"seeds": ()}, "--seeds is empty"),
        ({"seeds": (1, 1)}, r"--seeds is 1 1; give whole numbers of at least 0 and below 2\*\*32, each once"),
        ({"seeds": (-1,)}, "--seeds is -1"),
        ({"seeds": (2**32,)}, "--seeds is 4294967296"),
        ({"workers": 0}, "--workers is 0"),
        ({"out": Path(__file__)}, "no folder that can be written to"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Reproduce("rotated-mnist", scale="smoke", **options).run()  # type: ignore[arg-type]
