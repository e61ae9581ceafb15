"""Units of work: every unit once, in parallel, and what is finished is kept."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from neuboots._io import write_text
from neuboots.evaluation._parallel import can_fork, run_jobs


@pytest.mark.parametrize("num_workers", [1, 2, 7])
def test_results_stand_in_the_order_of_the_units(num_workers: int) -> None:
    weights = torch.arange(12.0).reshape(3, 4)  # a closure, which no pickle would take
    results = run_jobs(lambda k: float(weights[k].sum()), 3, num_workers=num_workers, progress=False)
    assert results == [6.0, 22.0, 38.0]


@pytest.mark.skipif(not can_fork(), reason="processes cannot be forked here")
def test_workers_are_other_processes_with_one_thread() -> None:
    seen = run_jobs(lambda k: [os.getpid(), torch.get_num_threads()], 4, num_workers=2, progress=False)
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
        return run_jobs(run, 3, **options)

    with pytest.raises(RuntimeError, match="broken off"):
        attempt()
    (tmp_path / "mended").touch()
    assert attempt() == [{"k": 0}, {"k": 1}, {"k": 2}]
    assert (tmp_path / "ran-0").read_text() == "x"
    assert (tmp_path / "ran-2").read_text() == "xx"
    assert not list((tmp_path / "units").glob("*.part"))


def test_more_units_go_on_where_fewer_ended(tmp_path: Path) -> None:
    done: list[int] = []
    run_jobs(lambda k: k, 2, folder=tmp_path, progress=False)
    assert run_jobs(lambda k: done.append(k) or k, 4, folder=tmp_path, progress=False) == [0, 1, 2, 3]  # type: ignore[func-returns-value]
    assert done == [2, 3]
    assert json.loads((tmp_path / "unit-0003.json").read_text()) == 3


def test_what_is_known_is_not_done_again_and_counts_as_done_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int | None, int]] = []

    @contextmanager
    def bar(title: str, total: int | None, *, show: bool, done: int) -> Iterator[Callable[[str], None]]:
        shown.append((total, done))
        yield lambda text: None

    monkeypatch.setattr("neuboots.training.progress_bar", bar)
    assert run_jobs(lambda k: k, 4, known={1: "one", 3: "three"}) == [0, "one", 2, "three"]
    assert shown == [(4, 2)]


def test_nothing_is_left_of_a_text_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "text", "\ud800")
    assert not list(tmp_path.iterdir())


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    run_jobs(lambda k: k, 1, folder=tmp_path, key="a", progress=False)
    with pytest.raises(ValueError, match="holds units of other settings; expected a new folder"):
        run_jobs(lambda k: k, 1, folder=tmp_path, key="b", progress=False)


@pytest.mark.parametrize(("count", "num_workers"), [(0, 1), (1, 0), (1, 1.5), (1, None)])
def test_no_units_or_no_workers_get_a_sentence(count: int, num_workers: int) -> None:
    with pytest.raises(ValueError, match="expected a whole number, at least 1"):
        run_jobs(lambda k: k, count, num_workers=num_workers, progress=False)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(ValueError, match="which is a file; expected a folder"):
        run_jobs(lambda k: k, 1, folder=tmp_path / "a", progress=False)


def test_results_are_the_same_kept_or_not(tmp_path: Path) -> None:
    results = [run_jobs(lambda k: {1: (k,)}, 2, folder=folder, progress=False) for folder in (None, tmp_path, tmp_path)]
    assert results[0] == results[1] == results[2] == [{"1": [0]}, {"1": [1]}]
    with pytest.raises(ValueError, match="the result of unit 0 is not JSON .*; expected numbers"):
        run_jobs(lambda k: torch.ones(1), 1, progress=False)

    def broken(k: int) -> None:
        raise TypeError("the unit's own fault")

    with pytest.raises(TypeError, match="the unit's own fault"):
        run_jobs(broken, 1, progress=False)


@pytest.mark.parametrize("damage", ["", "{", "[1, 2"])
def test_a_damaged_unit_is_done_again(tmp_path: Path, damage: str) -> None:
    run_jobs(lambda k: k, 3, folder=tmp_path, progress=False)
    (tmp_path / "unit-0001.json").write_text(damage)
    done: list[int] = []
    assert run_jobs(lambda k: done.append(k) or k, 3, folder=tmp_path, progress=False) == [0, 1, 2]  # type: ignore[func-returns-value]
    assert done == [1]
    (tmp_path / "units.json").write_text(damage)
    with pytest.raises(ValueError, match="holds units of other settings"):
        run_jobs(lambda k: k, 3, folder=tmp_path, progress=False)


@pytest.mark.skipif(not can_fork(), reason="processes cannot be forked here")
def test_a_killed_worker_gets_a_sentence_and_loses_nothing(tmp_path: Path) -> None:
    def run(k: int) -> int:
        if k == 1:
            while not (tmp_path / "unit-0000.json").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return k

    with pytest.raises(RuntimeError, match="a worker process was killed, often for want of memory.*finished units"):
        run_jobs(run, 2, num_workers=2, folder=tmp_path, progress=False)
    assert json.loads((tmp_path / "unit-0000.json").read_text()) == 0


class Odd(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("odd")


@pytest.mark.skipif(not can_fork(), reason="processes cannot be forked here")
def test_an_exception_that_cannot_travel_is_told() -> None:
    def run(k: int) -> None:
        raise Odd(1, 2)

    with pytest.raises(RuntimeError, match="unit . failed: Odd: odd"):
        run_jobs(run, 2, num_workers=2, progress=False)


def test_units_inside_units() -> None:
    inner = run_jobs(lambda k: run_jobs(lambda j: 10 * k + j, 2, num_workers=2, progress=False), 2, num_workers=2)
    assert inner == [[0, 1], [10, 11]]


def test_units_of_unknown_settings_are_not_adopted(tmp_path: Path) -> None:
    run_jobs(lambda k: k, 2, folder=tmp_path, progress=False)
    (tmp_path / "units.json").unlink()
    with pytest.raises(ValueError, match="holds units, but nothing says of what settings"):
        run_jobs(lambda k: k, 2, folder=tmp_path, progress=False)


@pytest.mark.skipif(not can_fork(), reason="processes cannot be forked here")
def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    program = f"""
import os, time
from pathlib import Path
from neuboots.tasks.units import run_units
def run(k):
    (Path({str(tmp_path)!r}) / f"pid-{{os.getpid()}}").touch()
    time.sleep(600)
run_units(run, 2, num_workers=2)
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    while len(pids := [int(file.name[4:]) for file in tmp_path.glob("pid-*")]) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    for _ in range(200):
        if not any(_alive(pid) for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError("the workers live on")


def _alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.skipif(not can_fork(), reason="processes cannot be forked here")
def test_an_interrupt_keeps_what_is_finished_and_waits_for_nobody(tmp_path: Path) -> None:
    program = f"""
import signal, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores interrupts
from neuboots.tasks.units import run_units
run_units(lambda k: time.sleep(600 if k else 0) or k, 4, num_workers=2, folder=Path({str(tmp_path)!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "unit-0000.json").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)  # to the parent alone
    _, said = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    assert sorted(file.name for file in tmp_path.iterdir()) == ["unit-0000.json", "units.json"]
