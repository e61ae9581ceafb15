"""`neuboots segment` on tiny made files: what it prints and writes, resuming, and one sentence for what goes wrong."""

import json
import shlex
import signal
from collections.abc import Callable
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
from neuboots.methods import METHODS
from neuboots_paper.segment import SETTINGS, Segment, Setting, spaced, verdict

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
    """One layer instead of a DeepLab, and a step for each image, where the net is not what is tested."""

    def make(channels: int, classes: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Conv2d(channels, 4, 3, padding=1), torch.nn.Conv2d(4, classes, 1))

    monkeypatch.setitem(SETTINGS, "camvid", Setting(make, 40, 1, 3e-3))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every step of the optimizer adds its number."""
    made: list[int] = []
    step = torch.optim.AdamW.step

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        made.append(len(made) + 1)
        return step(self, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    return made


def run(data: str, root: Path | None, out: Path, *options: str) -> int:
    """What the shell would see."""
    where = () if root is None else ("--root", str(root))
    try:
        return main(["segment", data, *where, "--out", str(out), *options])
    except SystemExit as stop:
        return int(stop.code or 0)


def figures(out: Path, data: str = "camvid", method: str = "neuboots") -> dict[str, Any]:
    """Without the times, which differ."""
    found: dict[str, Any] = json.loads((out / data / method / "figures.json").read_text())
    return {name: value for name, value in found["figures"].items() if name not in ("seconds", "relative_time")}


# -- what it does --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", SETTINGS)
def test_each_set_is_trained_measured_and_drawn(
    data: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(data, root, tmp_path, *QUICK) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / data / "neuboots/figures.json").read_text())
    assert found["command"] in printed
    assert (found["data"], found["method"], found["epochs"], found["num_samples"]) == (data, "neuboots", 1, 3)
    assert f"mIoU {found['figures']['mean_iou']:.1%} against {found['majority']['mean_iou']:.1%}" in printed
    assert f"is {found['figures']['entropy_ratio']:.1f} × that on right ones" in printed
    test = load_dataset(data, root=root).test
    assert len(found["classes"]) == len(found["figures"]["iou"]) == CLASSES.get(data, 3)
    assert f"N = 2 images, {sum(test[i][1].numel() for i in range(2)):,} pixels, B = 3, seed = 0" in printed
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
        with Image.open(pictures / f"{data}-0000-image.png") as shown:
            levels = np.asarray(shown) / 255
        wanted = load_dataset(data, root=root).standardizer.inverse(test[0][0])  # type: ignore[attr-defined]
        np.testing.assert_allclose(levels, wanted.clamp(0, 1).movedim(0, -1), atol=1 / 255)


def test_several_methods_make_one_table(
    thin: None, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    able = [name for name, entry in METHODS.items() if "segmentation" in entry.tasks]
    assert run("camvid", root, tmp_path, *QUICK, "--pictures", "0", "--methods", *able) == 0
    printed = capsys.readouterr().out
    heads = [line.split() for line in printed.splitlines()]
    table = next(k for k, words in enumerate(heads) if words[:2] == ["method", "mean_iou"])
    assert [words[0] for words in heads[table + 1 : table + 1 + len(able)]] == able
    assert all(f"\n{name}: mIoU " in printed for name in able)
    assert {path.name for path in (tmp_path / "camvid").iterdir()} == set(able)
    assert not [*tmp_path.glob("camvid/*/pictures")]


def test_the_command_repeats_the_run(thin: None, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a folder's name"
    assert run("camvid", root, out, *QUICK) == 0
    said = json.loads((out / "camvid/neuboots/figures.json").read_text())["command"]
    words = shlex.split(said)
    assert words[0] == "neuboots"
    chosen: list[Segment] = []
    monkeypatch.setattr(Segment, "run", lambda self: chosen.append(self))
    assert main(words[1:]) == 0
    assert chosen == [Segment("camvid", root, out, epochs=1, num_samples=3, limit=2, pictures=2)]


# -- resuming ------------------------------------------------------------------------------------------


def test_training_goes_on_where_it_was_cut_short(
    thin: None,
    root: Path,
    tmp_path: Path,
    steps: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C in the third of four steps: one is left, and the figures are those of a run that nobody cut short."""
    options = (*QUICK, "--epochs", "2")
    assert run("camvid", root, tmp_path / "whole", *options) == 0
    assert len(steps) == 4
    steps.clear()
    step: Callable[..., Any] = torch.optim.AdamW.step

    def cut(self: Any, *args: Any, **given: Any) -> Any:
        if len(steps) == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self, *args, **given)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", cut)
        capsys.readouterr()
        assert run("camvid", root, tmp_path / "cut", *options) == 130
    assert "run again to resume" in capsys.readouterr().err
    assert len(steps) == 3
    assert not (tmp_path / "cut/camvid/neuboots/figures.json").exists()
    assert run("camvid", root, tmp_path / "cut", *options) == 0
    assert len(steps) == 4
    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")


@pytest.mark.parametrize("option", ["--epochs", "--seed"])
def test_a_folder_with_the_training_of_other_options_is_refused(
    option: str, thin: None, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("camvid", root, tmp_path, *QUICK) == 0
    before = figures(tmp_path)
    capsys.readouterr()
    assert run("camvid", root, tmp_path, *QUICK, option, "3") == 2
    assert f"{option[2:]} was" in capsys.readouterr().err
    assert figures(tmp_path) == before


# -- what goes wrong -----------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], out: Path, code: int, expected: int, *parts: str) -> None:
    err = capsys.readouterr().err
    assert code == expected, err
    assert err.startswith("neuboots: ")
    assert err.count("\n") == 1
    assert all(part in err for part in parts), err
    assert not out.exists()


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--epochs", ["0"]),
        ("--num-samples", ["0"]),
        ("--pictures", ["-1"]),
        ("--limit", ["0"]),
        ("--seed", ["-1"]),
        ("--seed", [str(2**63)]),
        ("--methods", ["gp"]),
        ("--methods", ["neuboots", "magic"]),
        ("--methods", []),
    ],
)
def test_a_bad_value_gets_one_sentence(
    option: str, values: list[str], root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run("camvid", root, tmp_path / "out", option, *values)
    refused(capsys, tmp_path / "out", code, 2, f"{option} is {' '.join(values) or 'empty'}; give")


@pytest.mark.parametrize("data", SETTINGS)
def test_a_missing_set_says_where_it_was_looked_for(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    refused(capsys, out, run(data, tmp_path / "empty", out), 2, repr(data), str(tmp_path / "empty"))
    refused(capsys, out, run(data, tmp_path / "nowhere", out), 2, str(tmp_path / "nowhere"))
    refused(capsys, out, run(data, None, out), 2, repr(data), "NEUBOOTS_DATA")


# -- in words ------------------------------------------------------------------------------------------


def measured(labels: list[int], guesses: list[int], entropy: list[float]) -> SegmentationReport:
    probs = torch.nn.functional.one_hot(torch.tensor(guesses), 2).float().T[None, :, None]
    values: Tensor = torch.tensor(entropy)[None, None]
    return SegmentationReport.from_maps(
        SegmentationMaps(probs, values, values, values, 3, 0), torch.tensor(labels)[None, None]
    )


def test_the_verdict_says_what_the_figures_say() -> None:
    truth = [0, 0, 0, 0, 0, 1, 1, 1, 1]
    good = verdict(measured(truth, [0, 0, 0, 0, 0, 1, 1, 1, 0], [0.1] * 8 + [0.3]))
    assert "clearly better" in good
    assert "NOT" not in good
    assert "3.0 × that on right ones, at least twice that" in good
    bad = verdict(measured(truth, [0] * 9, [0.2] * 5 + [0.3] * 4))
    assert "NOT clearly better" in bad
    assert "1.5 × that on right ones, LESS than twice that" in bad
    assert "no wrong pixels" in verdict(measured(truth, truth, [0.1] * 9))


def test_pictures_are_of_different_images_from_the_first_to_the_last() -> None:
    for total in range(1, 300):
        for count in (1, 2, 4, 7, total):
            found = spaced(count, total)
            assert len(set(found)) == len(found) == min(count, total)
            assert found[0] == 0
            assert found == sorted(found)
            assert found[-1] == (total - 1 if min(count, total) > 1 else 0)
    assert spaced(0, 5) == []
