"""The command `neuboots data`: every set that has a name, and whether it is there, without a look into it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from neuboots.cli._console import UsageError
from neuboots.cli.list import TASKS, ListDatasets, find_datasets
from neuboots.data import DATASETS, load_dataset


def test_every_set_is_listed_with_what_is_known_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEUBOOTS_DATA", raising=False)
    ListDatasets(json=True).run()
    found = json.loads(capsys.readouterr().out)
    assert found["root"] is None
    assert [each["name"] for each in found["sets"]] == list(DATASETS)
    for each in found["sets"]:
        assert each["summary"] == DATASETS[each["name"]].summary
        assert each["task"] in TASKS
        assert each["there"] is (None if each["where"] == "hub" else each["where"] == "package")
    ListDatasets().run()
    out = capsys.readouterr().out
    assert all(name in out for name in DATASETS)


def test_the_tasks_are_those_of_the_sets() -> None:
    tasks = {each["name"]: each["task"] for each in find_datasets(None)}
    for name in ("digits", "diabetes", "breast_cancer", "wine"):
        assert load_dataset(name).task == tasks[name]
    assert {name for name, task in tasks.items() if task == "segmentation"} == {
        name for name, entry in DATASETS.items() if "masks of" in entry.summary
    }
    assert all(task == "regression" for name, task in tasks.items() if name.startswith("uci/"))


def test_a_data_root_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mnist" / "data").mkdir(parents=True)
    (tmp_path / "Task04_Hippocampus").mkdir()
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci" / "boston.csv").touch()
    (tmp_path / "uci" / "yacht.csv").touch()
    (tmp_path / "uci" / "yacht.test_splits.json").touch()
    there = {each["name"] for each in find_datasets(tmp_path) if each["there"] and each["where"] == "root"}
    assert there == {"mnist", "rotated_mnist", "hippocampus3d", "uci/yacht"}  # boston's splits are missing
    assert {each["there"] for each in find_datasets(tmp_path)} == {True, False}


def test_the_variable_names_a_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEUBOOTS_DATA", str(tmp_path))
    ListDatasets(json=True).run()
    assert json.loads(capsys.readouterr().out)["root"] == str(tmp_path)


def test_a_root_that_is_no_folder_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="which is no folder"):
        ListDatasets(tmp_path / "nowhere").run()


def test_nothing_is_loaded() -> None:
    program = """
import sys
from neuboots.cli.list import Sets
Sets(json=True).run()
slow = sys.modules.keys() & {"sklearn", "datasets", "pandas", "matplotlib", "kornia", "PIL"}
assert not slow, f"the list loads {slow}"
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
