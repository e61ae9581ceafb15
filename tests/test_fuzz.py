"""The fuzzing driver: few random cases of every area, and planted faults of every kind that it must report."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz import driver
from fuzz.driver import Area, Failure, Workspace
from hypothesis import strategies as st

from neuboots import ArgumentError

CASES = {"tables": 6, "model folders": 8, "image folders": 6, "checkpoints": 4, "python api": 12}


@pytest.fixture(autouse=True)
def _keep_threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_few_random_cases_have_no_failure(name: str, tmp_path: Path) -> None:
    (area,) = (area for area in driver.all_areas() if area.name == name)
    results = driver.run_all(CASES[name], 0, tmp_path, areas=[area])
    assert sum(results.counts[name].values()) == CASES[name]
    assert results.ok, "\n".join(f"{found.outcome}\n{found.case}" for found in results.findings)


# -- planted faults ------------------------------------------------------------------------------------


def plant(fault: Callable[[Workspace], Any], *, expected: tuple[str, ...] = (), guarded: bool = True) -> Area:
    """An area whose only call of the library is a fault."""

    def run(prepared: Any, case: int, workspace: Workspace) -> str:
        (workspace.inputs / "data.csv").write_text("a\n1\n", encoding="utf-8")
        workspace.nets.append(prepared)
        if guarded:
            with workspace.guard(*expected):
                fault(workspace)
        else:
            fault(workspace)
        return driver.CORRECT

    return Area("planted", 1.0, lambda folder: torch.nn.BatchNorm1d(2), lambda prepared: st.integers(), run)


def run_one(area: Area, folder: Path, seconds: float = driver.SECONDS) -> driver.Outcome:
    return driver.fork_case(area, area.prepare(folder), 0, folder / "case", seconds=seconds)


def wrong_answer(workspace: Workspace) -> None:
    raise Failure("wrong answer", "1 is not 2")


def raw_exception(workspace: Workspace) -> None:
    _ = {}["a"]


def foreign_error(workspace: Workspace) -> None:
    np.zeros(3).reshape(2, 2)


def hang(workspace: Workspace) -> None:
    time.sleep(60)


def busy(workspace: Workspace) -> None:
    while True:
        pass


def crash(workspace: Workspace) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(workspace: Workspace) -> None:
    os._exit(0)


def use_memory(workspace: Workspace) -> None:
    np.ones(driver.MEMORY // 8 + (1 << 22)).sum()


def ask_for_memory(workspace: Workspace) -> None:
    np.ones(1 << 40)


def leave_file(workspace: Workspace) -> None:
    (workspace.outputs / ".found.csv.part").touch()


def leave_temporary_file(workspace: Workspace) -> None:
    (workspace.temporary / "tmp123").touch()


def fail_and_leave_the_output(workspace: Workspace) -> None:
    (workspace.outputs / "found.csv").touch()
    raise ArgumentError("k", 0, "1")


def change_input(workspace: Workspace) -> None:
    (workspace.inputs / "data.csv").write_text("a\n2\n", encoding="utf-8")


def add_input(workspace: Workspace) -> None:
    (workspace.inputs / "lock").touch()


def draw_torch(workspace: Workspace) -> None:
    torch.rand(1)


def draw_python(workspace: Workspace) -> None:
    random.random()


def draw_numpy(workspace: Workspace) -> None:
    np.random.rand()


def change_mode(workspace: Workspace) -> None:
    workspace.nets[0].eval()


def change_buffer(workspace: Workspace) -> None:
    workspace.nets[0](torch.zeros(3, 2))


def change_setting(workspace: Workspace) -> None:
    torch.set_default_dtype(torch.float64)


def run_code(workspace: Workspace) -> None:
    workspace.canary.touch()


def print_escape(workspace: Workspace) -> None:
    driver.check_terminal_text("a class \x1b[31mred")


def long_error(workspace: Workspace) -> None:
    raise ArgumentError("names", "x" * 10_000, "fewer")


FAULTS = {
    "wrong answer": (wrong_answer, run_code),
    "raw exception": (raw_exception, foreign_error),
    "hang": (hang, busy),
    "crash": (crash, leave),
    "memory": (use_memory, ask_for_memory),
    "leftovers": (leave_file, leave_temporary_file, fail_and_leave_the_output),
    "input changed": (change_input, add_input),
    "state changed": (draw_torch, draw_python, draw_numpy, change_mode, change_buffer, change_setting),
    "output": (print_escape, long_error),
}


@pytest.fixture
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MEMORY", 1 << 27)


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize(
    ("kind", "fault"),
    [(kind, fault) for kind, faults in FAULTS.items() for fault in faults],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_planted_fault_is_reported(kind: str, fault: Callable[[Workspace], None], tmp_path: Path) -> None:
    area = plant(fault, expected=("found.csv",))
    assert run_one(area, tmp_path, 1.0 if kind == "hang" else driver.SECONDS).kind == kind


def test_every_kind_of_failure_is_planted() -> None:
    assert set(FAULTS) == set(driver.FAILURES)


def raise_documented(workspace: Workspace) -> None:
    raise ArgumentError("k", 0, "1")


def test_documented_error_and_success_are_no_failures(tmp_path: Path) -> None:
    assert run_one(plant(raise_documented), tmp_path / "a").kind == driver.ERROR
    area = plant(lambda workspace: (workspace.outputs / "found.csv").touch(), expected=("found.csv",))
    assert run_one(area, tmp_path / "b").kind == driver.CORRECT


def test_failed_case_is_kept_with_its_description(tmp_path: Path) -> None:
    results = driver.run_all(3, 5, tmp_path, areas=[plant(raw_exception)])
    assert not results.ok
    assert len(results.findings) == results.counts["planted"]["raw exception"] == 3
    text = (tmp_path / "planted" / "1" / "failure.txt").read_text(encoding="utf-8")
    assert "seed 5" in text
    assert repr(results.findings[0].case) in text
    assert (tmp_path / "planted" / "1" / "inputs" / "data.csv").exists()
    assert "3 failures in 3 cases" in results.table()


def test_seed_determines_the_cases() -> None:
    def draw(seed: int) -> list[int]:
        found: list[int] = []
        driver._draw(st.integers(0, 1 << 40), 20, seed, found.append)
        return found

    assert draw(1) == draw(1) != draw(2)


def test_console_checks_the_output_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from neuboots import cli

    def command(text: str, code: int) -> Callable[[Any], int]:
        def main(argv: Any) -> int:
            print(text, file=sys.stderr)
            return code

        return main

    assert driver.run_command("--version").code == 0
    for text, code, kind in (
        ("neuboots: no", 2, None),
        ("neuboots: one\nneuboots: two", 2, "output"),
        ("neuboots: \x1b[31mred", 2, "output"),
        ("Traceback (most recent call last):\nneuboots: no", 2, "raw exception"),
        ("neuboots: no", 1, "raw exception"),
        ("neuboots: not enough memory", 2, "memory"),
    ):
        monkeypatch.setattr(cli, "main", command(text, code))
        if kind is None:
            assert driver.run_command("fit").code == 2
        else:
            with pytest.raises(Failure) as raised:
                driver.run_command("fit")
            assert raised.value.kind == kind
