"""Tests of `neuboots list`."""

import json
from pathlib import Path

import pytest
from _app import error_message

from neuboots.cli.list import List, find_datasets
from neuboots.data import DATASETS
from neuboots.methods import METHODS


def test_methods_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    List("methods").run()
    out = capsys.readouterr().out
    assert all(name in out for name in METHODS)
    List("methods", json=True).run()
    methods = json.loads(capsys.readouterr().out)["methods"]
    assert [method["name"] for method in methods] == sorted(METHODS)
    assert next(method for method in methods if method["name"] == "gp")["tasks"] == ["regression"]


def test_datasets_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEUBOOTS_DATA", raising=False)
    List("datasets", json=True).run()
    found = json.loads(capsys.readouterr().out)
    assert found["root"] is None
    assert [each["name"] for each in found["datasets"]] == list(DATASETS)
    for each in found["datasets"]:
        assert each["task"] in ("classification", "regression", "segmentation")
        assert each["available"] is (None if each["where"] == "hub" else each["where"] == "package")
    List("datasets").run()
    out = capsys.readouterr().out
    assert all(name in out for name in DATASETS)


def test_data_root_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mnist" / "data").mkdir(parents=True)
    (tmp_path / "Task04_Hippocampus").mkdir()
    (tmp_path / "uci").mkdir()
    for name in ("boston.csv", "yacht.csv", "yacht.test_splits.json"):
        (tmp_path / "uci" / name).touch()
    found = find_datasets(tmp_path)
    available = {each["name"] for each in found if each["available"] and each["where"] == "root"}
    assert available == {"mnist", "rotated_mnist", "hippocampus3d", "uci/yacht"}  # the splits of boston are missing
    assert {each["available"] for each in found} == {True, False}
    monkeypatch.setenv("NEUBOOTS_DATA", str(tmp_path))
    List("datasets", json=True).run()
    assert json.loads(capsys.readouterr().out)["root"] == str(tmp_path)
    assert "nowhere" in error_message(List("datasets", root=tmp_path / "nowhere"))
