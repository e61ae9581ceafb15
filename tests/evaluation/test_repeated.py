"""Fits that are repeated: what is kept of each, and the interval of their mean."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from neuboots._validation import check_int
from neuboots.evaluation._parallel import cached_result, student_t_interval


def test_a_fit_is_done_once_and_its_checkpoints_go(tmp_path: Path) -> None:
    folders: list[Any] = []

    def fit(folder: Path | None) -> dict[str, Any]:
        folders.append(folder)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "checkpoint.ckpt").touch()
        return {"figure": 0.1, "fit": len(folders)}

    assert cached_result(None, fit) == {"figure": 0.1, "fit": 1}
    assert folders == [None]
    file = tmp_path / "trial" / "round-001.json"
    assert cached_result(file, fit) == cached_result(file, fit) == {"figure": 0.1, "fit": 2}
    assert folders == [None, tmp_path / "trial" / "round-001"]
    assert [path.name for path in file.parent.iterdir()] == ["round-001.json"]
    file.write_text("{")
    assert cached_result(file, fit)["fit"] == 3  # a damaged file is as good as none


def test_a_fit_broken_off_keeps_its_checkpoints(tmp_path: Path) -> None:
    def fit(folder: Path | None) -> dict[str, Any]:
        assert folder is not None
        folder.mkdir()
        raise RuntimeError("broken off")

    with pytest.raises(RuntimeError, match="broken off"):
        cached_result(tmp_path / "seed-0.json", fit)
    assert [path.name for path in tmp_path.iterdir()] == ["seed-0"]


def test_the_interval_is_students() -> None:
    values = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()
    low, high = student_t_interval(values, level=0.9)
    for k in range(3):
        expected = scipy.stats.t.interval(0.9, 6, values[:, k].mean(), scipy.stats.sem(values[:, k]))
        assert (float(low[k]), float(high[k])) == pytest.approx(expected)
    with pytest.raises(ValueError, match="got 1 value, which has no spread; expected at least 2"):
        student_t_interval(values[:1])
    for level in (0.0, 1.0, 2.0, float("nan")):
        with pytest.raises(ValueError, match="got level=.*; expected a number between 0 and 1"):
            student_t_interval(values, level=level)


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3), torch.tensor(3), np.uint8(3)])
def test_whole_numbers(value: Any) -> None:
    found = check_int("k", value, minimum=3)
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize("value", [3.0, "3", None, True, np.float64(3), torch.tensor(3.0), torch.tensor([1, 2]), [3]])
def test_what_is_no_whole_number_gets_a_sentence(value: Any) -> None:
    with pytest.raises(ValueError, match="got k=.*; expected a whole number"):
        check_int("k", value)
    with pytest.raises(ValueError, match="got k=2; expected a whole number, at least 3"):
        check_int("k", 2, minimum=3)
