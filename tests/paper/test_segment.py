"""Tests of `neuboots segment` on tiny files: output, resuming, and invalid options."""

import json
import shlex
import signal
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from _hub import encoded, own_cache, pixels_of, write_split
from PIL import Image
from torch import Tensor

from neuboots.cli import main
from neuboots.data import find_volume_file, load_dataset
from neuboots.evaluation.segmentation import SegmentationMaps, SegmentationReport
from neuboots_paper.segment import SETTINGS, Segment, TrainingSetting, spaced, summarize_report

__all__ = ["own_cache"]

SIZE = {"camvid": (24, 32), "wbc_segmentation": (20, 20)}
CLASSES = {"camvid": 11, "wbc_segmentation": 3}
SCAN = (7, 9, 8)
QUICK = ("--epochs", "1", "--num-samples", "3", "--limit", "2", "--pictures", "2")


def write_masks(root: Path, name: str) -> None:
    rng = np.random.default_rng(0)
    for split, count in {"train": 4, "validation": 2, "test": 3}.items():
        images = [encoded(pixels_of(row, (*SIZE[name], 3))) for row in range(count)]
        masks = [encoded(rng.integers(0, CLASSES[name], SIZE[name])) for _ in range(count)]
        write_split(root / name / "data", split, {"image": images, "mask": masks})


def write_scans(root: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(12):
        affine = np.diag([1.0, 2.0, 3.0 + i, 1.0])
        for folder, voxels in (("imagesTr", rng.normal(size=SCAN)), ("labelsTr", rng.integers(0, 3, SCAN))):
            file = root / "hippocampus3d" / folder / f"scan_{i:02d}.nii.gz"
            file.parent.mkdir(parents=True, exist_ok=True)
            kind = np.float32 if folder == "imagesTr" else np.uint8
            nibabel.save(nibabel.Nifti1Image(voxels.astype(kind), affine), file)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_masks(folder, "camvid")
    write_masks(folder, "wbc_segmentation")
    write_scans(folder)
    return folder


@pytest.fixture
def thin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small net instead of a DeepLab, with one step per image."""

    def make(channels: int, classes: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Conv2d(channels, 4, 3, padding=1), torch.nn.Conv2d(4, classes, 1))

    monkeypatch.setitem(SETTINGS, "camvid", TrainingSetting(make, 40, 1, 3e-3))


def run(data: str, root: Path | None, out: Path, *options: str) -> int:
    where = () if root is None else ("--root", str(root))
    try:
        return main(["segment", data, *where, "--out", str(out), *options])
    except SystemExit as stop:
        return int(stop.code or 0)


def read_metrics(out: Path, data: str = "camvid", method: str = "neuboots") -> dict[str, Any]:
    """Without the times, which differ."""
    found: dict[str, Any] = json.loads((out / data / method / "metrics.json").read_text())
    return {name: value for name, value in found["metrics"].items() if name not in ("seconds", "relative_time")}


@pytest.mark.parametrize("data", SETTINGS)
def test_dataset_is_trained_on_evaluated_and_written(
    data: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(data, root, tmp_path, *QUICK) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / data / "neuboots/metrics.json").read_text())
    assert found["command"] in printed
    assert (found["data"], found["method"], found["epochs"], found["num_samples"]) == (data, "neuboots", 1, 3)
    assert f"mIoU {found['metrics']['mean_iou']:.1%} against {found['majority']['mean_iou']:.1%}" in printed
    test = load_dataset(data, root=root).test
    assert len(found["classes"]) == len(found["metrics"]["iou"]) == CLASSES.get(data, 3)
    pictures = tmp_path / data / "neuboots/pictures"
    if data == "hippocampus3d":
        names = {path.name.split("-")[0] for path in pictures.iterdir()}
        assert names == {find_volume_file(test, i).name.split(".")[0] for i in range(2)}
        for name in names:
            source = nibabel.load(root / data / "imagesTr" / f"{name}.nii.gz")
            labels = nibabel.load(pictures / f"{name}-labels.nii.gz")
            assert labels.shape == source.shape
            np.testing.assert_array_equal(labels.affine, source.affine)
    else:
        for i in range(2):
            with Image.open(pictures / f"{data}-{i:04d}-image.png") as shown:
                assert shown.size == tuple(reversed(test[i][1].shape))


def test_several_methods_are_compared_in_a_table(
    thin: None, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["neuboots", "mc-dropout", "deep-ensemble"]
    assert run("camvid", root, tmp_path, *QUICK, "--pictures", "0", "--methods", *names) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = next(k for k, words in enumerate(lines) if words[:2] == ["method", "mean_iou"])
    assert [words[0] for words in lines[table + 1 : table + 1 + len(names)]] == names
    assert {path.name for path in (tmp_path / "camvid").iterdir()} == set(names)
    assert not [*tmp_path.glob("camvid/*/pictures")]


def test_printed_command_repeats_the_run(
    thin: None, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a folder's name"
    assert run("camvid", root, out, *QUICK) == 0
    words = shlex.split(json.loads((out / "camvid/neuboots/metrics.json").read_text())["command"])
    chosen: list[Segment] = []
    monkeypatch.setattr(Segment, "run", lambda self: chosen.append(self))
    assert main(words[1:]) == 0
    assert chosen == [Segment("camvid", root, out, epochs=1, num_samples=3, limit=2, pictures=2)]


def test_interrupted_training_resumes(thin: None, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGINT in the third of four steps: one step is left, and the metrics are those of an uninterrupted run."""
    options = (*QUICK, "--epochs", "2")
    assert run("camvid", root, tmp_path / "whole", *options) == 0
    steps: list[int] = []
    step = torch.optim.AdamW.step

    def interrupt(self: Any, *args: Any, **given: Any) -> Any:
        if len(self.param_groups[0]["params"]) > 1:  # not of a copy with an example parameter
            steps.append(1)
            if len(steps) == 3:
                signal.raise_signal(signal.SIGINT)
        return step(self, *args, **given)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupt)
    assert run("camvid", root, tmp_path / "cut", *options) == 130
    assert run("camvid", root, tmp_path / "cut", *options) == 0
    assert len(steps) == 4
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")


def test_folder_of_other_options_is_rejected(
    thin: None, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("camvid", root, tmp_path, *QUICK) == 0
    before = read_metrics(tmp_path)
    assert run("camvid", root, tmp_path, *QUICK, "--seed", "3") == 2
    assert "seed" in capsys.readouterr().err
    assert read_metrics(tmp_path) == before


@pytest.mark.parametrize(
    "options",
    [
        ["--epochs", "0"],
        ["--num-samples", "0"],
        ["--pictures", "-1"],
        ["--limit", "0"],
        ["--seed", str(2**63)],
        ["--methods", "gp"],
        ["--methods", "neuboots", "magic"],
        ["--methods"],
    ],
)
def test_invalid_option_is_a_usage_error(
    options: list[str], root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("camvid", root, tmp_path / "out", *options) == 2
    assert f"{options[0]} is {' '.join(options[1:]) or 'empty'}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("data", SETTINGS)
def test_missing_dataset_is_a_usage_error(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for folder, named in ((tmp_path / "empty", data), (tmp_path / "nowhere", "nowhere"), (None, "NEUBOOTS_DATA")):
        assert run(data, folder, tmp_path / "out") == 2
        assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def make_report(labels: list[int], predicted: list[int], entropy: list[float]) -> SegmentationReport:
    probs = torch.nn.functional.one_hot(torch.tensor(predicted), 2).float().T[None, :, None]
    values: Tensor = torch.tensor(entropy)[None, None]
    return SegmentationReport.from_maps(
        SegmentationMaps(probs, values, values, values, 3, 0), torch.tensor(labels)[None, None]
    )


def test_summary_compares_labels_and_entropy() -> None:
    truth = [0, 0, 0, 0, 0, 1, 1, 1, 1]
    good = summarize_report(make_report(truth, [0, 0, 0, 0, 0, 1, 1, 1, 0], [0.1] * 8 + [0.3]))
    assert "NOT" not in good
    assert "3.0 × that on right ones, at least twice that" in good
    bad = summarize_report(make_report(truth, [0] * 9, [0.2] * 5 + [0.3] * 4))
    assert "NOT clearly better" in bad
    assert "1.5 × that on right ones, LESS than twice that" in bad
    assert "no entropy ratio" in summarize_report(make_report(truth, truth, [0.1] * 9))


def test_spaced_indices_are_distinct_and_reach_the_ends() -> None:
    for total in (1, 2, 7, 299):
        for count in (1, 2, 4, 7, total):
            found = spaced(count, total)
            assert len(set(found)) == len(found) == min(count, total)
            assert found == sorted(found)
            assert found[-1] == (total - 1 if min(count, total) > 1 else 0)
    assert spaced(0, 5) == []
