"""Units of work: every unit once, in parallel, and what is finished is kept."""

import json
import os
from pathlib import Path

import pytest
import torch

from neuboots.tasks.units import can_fork, run_units


@pytest.mark.parametrize("num_workers", [1, 2, 7])
def test_results_stand_in_the_order_of_the_units(num_workers: int) -> None:
    weights = torch.arange(12.0).reshape(3, 4)  # a closure, which no pickle would take
    results = run_units(lambda k: float(weights[k].sum()), 3, num_workers=num_workers, progress=False)
    assert results == [6.0, 22.0, 38.0]


@pytest.mark.skipif(not can_fork(), reason="processes cannot be forked here")
def test_workers_are_other_processes_with_one_thread() -> None:
    seen = run_units(lambda k: [os.getpid(), torch.get_num_threads()], 4, num_workers=2, progress=False)
    assert os.getpid() not in {pid for pid, _ in seen}
    assert {threads for _, threads in seen} == {1}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_finished_units_are_not_done_again(tmp_path: Path, num_workers: int) -> None:
    def run(k: int) -> dict[str, int]:
        with (tmp_path / f"ran-{k}").open("a") as log:
            log.write("x")
        if k == 2 and not (tmp_path / "mended").exists():
            raise RuntimeError("broken off")
        return {"k": k}

    def attempt() -> list[dict[str, int]]:
        options = {"num_workers": num_workers, "folder": tmp_path / "units", "identity": "a", "progress": False}
        return run_units(run, 3, **options)

    with pytest.raises(RuntimeError, match="broken off"):
        attempt()
    (tmp_path / "mended").touch()
    assert attempt() == [{"k": 0}, {"k": 1}, {"k": 2}]
    assert (tmp_path / "ran-0").read_text() == "x"
    assert (tmp_path / "ran-2").read_text() == "xx"
    assert not list((tmp_path / "units").glob("*.part"))


def test_more_units_go_on_where_fewer_ended(tmp_path: Path) -> None:
    done: list[int] = []
    run_units(lambda k: k, 2, folder=tmp_path, progress=False)
    assert run_units(lambda k: done.append(k) or k, 4, folder=tmp_path, progress=False) == [0, 1, 2, 3]  # type: ignore[func-returns-value]
    assert done == [2, 3]
    assert json.loads((tmp_path / "unit-0003.json").read_text()) == 3


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    run_units(lambda k: k, 1, folder=tmp_path, identity="a", progress=False)
    with pytest.raises(ValueError, match="holds units of other settings; expected a new folder"):
        run_units(lambda k: k, 1, folder=tmp_path, identity="b", progress=False)


@pytest.mark.parametrize(("count", "num_workers"), [(0, 1), (1, 0)])
def test_no_units_or_no_workers_get_a_sentence(count: int, num_workers: int) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        run_units(lambda k: k, count, num_workers=num_workers, progress=False)
