"""Tests of the runner: cached jobs, interrupted runs, and unusable folders."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _study import Squares, edit_settings, find_squares, run_squares

from neuboots.cli import UsageError
from neuboots_paper.runner import IncompleteRunError, job_name, read_run
from neuboots_paper.study import Job, Rows, RunContext, Study


@pytest.fixture(autouse=True)
def _reset(monkeypatch: pytest.MonkeyPatch) -> None:
    Squares.log.clear()
    monkeypatch.setattr(Squares, "fail_at", None)


def read_rows(folder: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(
        (folder / "rows" / "squares.json").read_text(), parse_constant=pytest.fail
    )
    return rows


def test_run_writes_rows_settings_tables_and_plots(tmp_path: Path) -> None:
    done = run_squares(tmp_path / "new")
    assert read_rows(tmp_path / "new")[1] == {"k": 1, "seed": 0, "value": 1.0, "nothing": None}  # in the order of jobs
    settings = json.loads((tmp_path / "new" / "settings.json").read_text())
    assert settings["settings"] == {"seeds": [0, 1], "size": 2, "widths": [3, 4]}
    assert settings["about"]["units"] == 4
    assert settings["about"]["core_seconds"] >= 0
    assert "Squares grow." in (tmp_path / "new" / "results.md").read_text()
    assert (tmp_path / "new" / "figures" / "line.svg").read_text().startswith("<svg")
    assert not any(path.is_dir() for path in (tmp_path / "new" / "units").iterdir())  # checkpoints are removed
    again = read_run(tmp_path / "new", find_squares)
    assert again == done
    assert again.section() == done.section()


def test_timing_jobs_run_last(tmp_path: Path) -> None:
    run_squares(tmp_path)
    assert [job["k"] for job in Squares.log] == [1, 1, 0, 0]


def test_finished_jobs_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Squares, "fail_at", 0)
    with pytest.raises(KeyboardInterrupt):
        run_squares(tmp_path)
    assert len(Squares.log) == 2
    with pytest.raises(IncompleteRunError):
        read_run(tmp_path, find_squares)
    monkeypatch.setattr(Squares, "fail_at", None)
    run_squares(tmp_path)
    run_squares(tmp_path)
    assert len(Squares.log) == 4 == len({job_name(job) for job in Squares.log})


def test_seeds_can_be_added_and_removed(tmp_path: Path) -> None:
    run_squares(tmp_path, Squares(seeds=(0,)))
    for file in ("rows/cubes.json", "figures/cubes.svg"):
        (tmp_path / file).write_text("[]")
    run_squares(tmp_path, Squares(seeds=(0, 1, 2)))
    assert len(Squares.log) == 6
    assert {row["seed"] for row in read_rows(tmp_path)} == {0, 1, 2}
    assert [file.name for kind in ("rows", "figures") for file in (tmp_path / kind).iterdir()] == [
        "squares.json",
        "line.svg",
    ]
    run_squares(tmp_path, Squares(seeds=(1,)))
    assert {row["seed"] for row in read_rows(tmp_path)} == {1}


@pytest.mark.parametrize(
    "damage",
    ["", '{"rows": {', "3", "[1]", "{}", '{"seconds": 1, "rows": []}', '{"seconds": 1, "rows": {"squares": [3]}}'],
)
def test_damaged_result_is_measured_again(tmp_path: Path, damage: str) -> None:
    done = run_squares(tmp_path)
    (tmp_path / "units" / "k=1,seed=0.json").write_text(damage)
    again = run_squares(tmp_path)
    assert [job_name(job) for job in Squares.log].count("k=1,seed=0") == 2
    assert again.rows == done.rows


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".part-7-settings.json").touch()
    run_squares(tmp_path)
    checkpoints = tmp_path / "units" / "k=1,seed=0"
    checkpoints.mkdir()  # its job is finished
    (tmp_path / "units" / ".part-7-k=1,seed=0.json").touch()
    run_squares(tmp_path)
    assert not checkpoints.exists()
    assert not list(tmp_path.rglob(".part-*"))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_failed_job_is_named_and_the_others_are_kept(tmp_path: Path, num_workers: int) -> None:
    class Failing(Squares):
        def measure(self, job: Job, context: RunContext) -> Rows:
            if job == {"k": 1, "seed": 1}:
                raise ZeroDivisionError("far off")
            return super().measure(job, context)

    with pytest.raises(ZeroDivisionError, match="far off") as caught:
        run_squares(tmp_path, Failing(seeds=(0, 1)), num_workers=num_workers)
    (note,) = caught.value.__notes__
    assert "k=1,seed=1" in note
    assert str(tmp_path / "units") in note
    if num_workers == 1:  # parallel jobs that run when another fails are aborted
        assert (tmp_path / "units" / "k=1,seed=0.json").exists()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_jobs_have_one_thread_and_timing_jobs_all(tmp_path: Path, num_workers: int) -> None:
    class Threads(Squares):
        def measure(self, job: Job, context: RunContext) -> Rows:
            return {"squares": [{"value": torch.get_num_threads()}]}

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run_squares(tmp_path, Threads(seeds=(0, 1)), num_workers=num_workers)
    finally:
        torch.set_num_threads(before)
    assert {(row["k"], row["value"]) for row in read_rows(tmp_path)} == {(0, 3), (1, 1)}


def test_two_workers_give_the_same_rows(tmp_path: Path) -> None:
    assert run_squares(tmp_path / "a").rows == run_squares(tmp_path / "b", num_workers=2).rows


def test_numbers_that_are_not_finite_are_stored_as_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"value": 1.0, "curve": [[1e300, float("inf")], float("nan")], "word": "NaN", "none": None}
    monkeypatch.setattr(Squares, "measure", lambda *_: {"squares": [row]})
    run_squares(tmp_path)
    expected = {"k": 0, "seed": 0, "value": 1.0, "curve": [[1e300, None], None], "word": "NaN", "none": None}
    assert read_rows(tmp_path)[0] == expected


def test_abstract_study_cannot_be_created() -> None:
    class Half(Study):
        name = "half"

    with pytest.raises(TypeError, match="measure"):
        Half()  # type: ignore[abstract]


@pytest.mark.parametrize("study", [Squares(size=3, seeds=(0, 1)), Squares(widths=(9,))])
def test_folder_with_other_settings_is_rejected(tmp_path: Path, study: Study) -> None:
    run_squares(tmp_path)
    with pytest.raises(UsageError, match="size|widths"):
        run_squares(tmp_path, study)


def test_folder_with_other_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    with pytest.raises(UsageError, match="not empty"):
        run_squares(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("damage", ["", "3", "[]", "{}", '{"study": "squares", "scale": "smoke", "settings": []}'])
def test_folder_with_damaged_settings_is_rejected(tmp_path: Path, damage: str) -> None:
    run_squares(tmp_path)
    (tmp_path / "settings.json").write_text(damage)
    with pytest.raises(UsageError, match="settings.json"):
        run_squares(tmp_path)


def test_folder_that_cannot_be_created_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match="--out"):
            run_squares(folder)


def test_second_run_in_a_folder_in_use_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def another(self: Squares, job: Job, context: RunContext) -> Rows:
        with pytest.raises(UsageError, match="another run"):
            run_squares(tmp_path)
        return {"squares": [{"value": 1.0}]}

    monkeypatch.setattr(Squares, "measure", another)
    run_squares(tmp_path)
    run_squares(tmp_path)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda folder: (folder / "settings.json").unlink(), UsageError),
        (lambda folder: (folder / "rows" / "squares.json").write_text("["), UsageError),
        (lambda folder: (folder / "rows" / "squares.json").write_text("3"), UsageError),
        (lambda folder: (folder / "rows" / "squares.json").unlink(), IncompleteRunError),
        (lambda folder: edit_settings(folder, study="cubes"), UsageError),
        (lambda folder: edit_settings(folder, settings={"height": 3}), UsageError),
        (lambda folder: edit_settings(folder, settings=[3]), UsageError),
        (lambda folder: edit_settings(folder, study=["squares"]), UsageError),
        (lambda folder: edit_settings(folder, about=3), IncompleteRunError),
        (lambda folder: edit_settings(folder, about={"command": "x"}), IncompleteRunError),
    ],
)
def test_damaged_folder_cannot_be_read(
    tmp_path: Path, damage: Callable[[Path], object], error: type[Exception]
) -> None:
    run_squares(tmp_path)
    damage(tmp_path)
    with pytest.raises(UsageError, match=str(tmp_path)) as caught:
        read_run(tmp_path, find_squares)
    assert type(caught.value) is error


KILLED = """
    import signal, sys, time
    from pathlib import Path
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore interrupts
    sys.path.insert(0, {tests!r})
    from _study import Squares, run_squares
    class Slow(Squares):
        def measure(self, job, context):
            if job["k"] == 2 and not Path({marker!r}).exists():
                print("under way", flush=True)
                time.sleep(60)
            return super().measure(job, context)
    run_squares(Path({folder!r}), Slow(size=3, seeds=(0,)))
    print("did", len(Squares.log), flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_run_resumes(tmp_path: Path, how: signal.Signals) -> None:
    folder, marker = tmp_path / "run", tmp_path / "marker"
    code = textwrap.dedent(KILLED).format(tests=str(Path(__file__).parents[1]), marker=str(marker), folder=str(folder))
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "under way\n"
        os.kill(first.pid, how)
    assert [file.name for file in (folder / "units").glob("*.json")] == ["k=1,seed=0.json"]
    marker.touch()
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert second.stdout == "did 2\n"  # the one under way, and the timing job
