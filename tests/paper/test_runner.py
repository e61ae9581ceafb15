"""Runs of a study: units kept as they are done, never done twice; rows, tables and figures made again from a folder."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from neuboots.cli._console import UsageError
from neuboots.report.checks import Check, compare_groups
from neuboots.report.tables import MetricColumn, Table, tabulate
from neuboots_paper.runner import job_name, read_run, run_study
from neuboots_paper.study import Job, Rows, RunContext, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Squares(Study):
    """A study of nothing, which notes each unit that it is asked to measure."""

    name = "squares"
    source = "nowhere"
    claim = "Squares grow."
    at_scale: ClassVar = {"smoke": {}, "cpu": {"size": 3}, "paper": {"size": 9}}
    log: ClassVar[list[Job]] = []
    fail_at: ClassVar[int | None] = None

    size: int = 2
    widths: tuple[int, ...] = (3, 4)

    @property
    def sets(self) -> Sequence[str]:
        return ("digits",)

    def units(self) -> list[Job]:
        return [{"k": k, "seed": seed} for seed in self.seeds for k in range(self.size)]

    def timed(self, unit: Job) -> bool:
        return bool(unit["k"] == 0)

    def measure(self, unit: Job, bench: RunContext) -> Rows:
        if unit["k"] == self.fail_at:
            raise KeyboardInterrupt
        self.log.append(unit)
        assert bench.folder is not None
        bench.folder.mkdir(parents=True)
        (bench.folder / "checkpoint").touch()
        return {"squares": [{"value": unit["k"] ** 2 + unit["seed"] / 10, "nothing": float("nan")}]}

    def tables(self, rows: Rows) -> list[Table]:
        return [tabulate("Squares.", rows["squares"], by=("k",), columns=(MetricColumn("value", "value"),))]

    def verdicts(self, rows: Rows) -> list[Check]:
        return [compare_groups("1 > 0", rows["squares"], "value", {"k": 1}, {"k": 0}, expect="higher")]

    def figures(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        figure = Figure()
        figure.subplots().plot([row["value"] for row in rows["squares"]])
        return {"line": figure}


STUDIES = {"squares": Squares}


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    Squares.log.clear()
    monkeypatch.setattr(Squares, "fail_at", None)


def run(folder: Path, study: Study | None = None, **options: int) -> object:
    return run_study(study or Squares(seeds=(0, 1)), "smoke", folder, RunContext(), command="neuboots …", **options)


def test_the_folder_holds_rows_settings_tables_and_figures(tmp_path: Path) -> None:
    run(tmp_path / "new")
    rows = json.loads((tmp_path / "new" / "rows" / "squares.json").read_text())
    assert rows[1] == {"k": 1, "seed": 0, "value": 1.0, "nothing": None}  # in the order of the units
    settings = json.loads((tmp_path / "new" / "settings.json").read_text())
    assert settings["settings"] == {"seeds": [0, 1], "size": 2, "widths": [3, 4]}
    assert settings["about"]["units"] == 4
    assert settings["about"]["core_seconds"] >= 0
    assert "Squares grow." in (tmp_path / "new" / "results.md").read_text()
    assert (tmp_path / "new" / "figures" / "line.svg").read_text().startswith("<svg")
    assert not any(path.is_dir() for path in (tmp_path / "new" / "units").iterdir())  # checkpoints are gone


def test_units_that_measure_time_come_last(tmp_path: Path) -> None:
    run(tmp_path)
    assert [unit["k"] for unit in Squares.log] == [1, 1, 0, 0]


def test_finished_units_are_never_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Squares, "fail_at", 0)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert len(Squares.log) == 2
    with pytest.raises(UsageError, match="not finished"):
        read_run(tmp_path, STUDIES)
    monkeypatch.setattr(Squares, "fail_at", None)
    run(tmp_path)
    run(tmp_path)
    assert len(Squares.log) == 4 == len({job_name(unit) for unit in Squares.log})


def test_seeds_can_be_added(tmp_path: Path) -> None:
    run(tmp_path, Squares(seeds=(0,)))
    run(tmp_path, Squares(seeds=(0, 1, 2)))
    assert len(Squares.log) == 6
    assert {row["seed"] for row in read_run(tmp_path, STUDIES).rows["squares"]} == {0, 1, 2}


@pytest.mark.parametrize(
    "damage",
    ["", '{"rows": {', "3", "[1]", "{}", '{"seconds": 1, "rows": []}', '{"seconds": 1, "rows": {"squares": [3]}}'],
)
def test_a_damaged_unit_is_done_again(tmp_path: Path, damage: str) -> None:
    whole = run(tmp_path)
    (tmp_path / "units" / "k=1,seed=0.json").write_text(damage)
    again = run(tmp_path)
    assert [job_name(unit) for unit in Squares.log].count("k=1,seed=0") == 2
    assert again.rows == whole.rows  # type: ignore[attr-defined]


def test_what_was_killed_as_it_wrote_leaves_nothing_and_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "settings.json.7.part").touch()
    run(tmp_path)
    checkpoints = tmp_path / "units" / "k=1,seed=0"
    checkpoints.mkdir()  # its unit is written
    (tmp_path / "units" / "k=1,seed=0.json.7.part").touch()
    run(tmp_path)
    assert not checkpoints.exists()
    assert not list(tmp_path.rglob("*.part"))


def test_what_other_seeds_left_goes(tmp_path: Path) -> None:
    run(tmp_path)
    for file in ("rows/cubes.json", "figures/cubes.svg"):
        (tmp_path / file).write_text("[]")
    run(tmp_path, Squares(seeds=(1,)))
    assert {row["seed"] for row in read_run(tmp_path, STUDIES).rows["squares"]} == {1}
    assert [file.name for kind in ("rows", "figures") for file in (tmp_path / kind).iterdir()] == [
        "squares.json",
        "line.svg",
    ]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_unit_that_fails_is_named_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    measure = Squares.measure

    def fail(self: Squares, unit: Job, bench: RunContext) -> Rows:
        if unit == {"k": 1, "seed": 1}:
            raise ZeroDivisionError("far off")
        return measure(self, unit, bench)

    monkeypatch.setattr(Squares, "measure", fail)
    with pytest.raises(ZeroDivisionError, match="far off") as caught:
        run(tmp_path, num_workers=num_workers)
    assert caught.value.__notes__ == [
        f"in the unit k=1,seed=1 of squares; what is finished is kept in {tmp_path / 'units'}"
    ]
    assert (tmp_path / "units" / "k=1,seed=0.json").exists()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_units_have_one_thread_however_many_work_and_those_that_measure_time_have_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    def threads(self: Squares, unit: Job, bench: RunContext) -> Rows:
        return {"squares": [{"value": torch.get_num_threads()}]}

    monkeypatch.setattr(Squares, "measure", threads)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run(tmp_path, num_workers=num_workers)
    finally:
        torch.set_num_threads(before)
    rows = json.loads((tmp_path / "rows" / "squares.json").read_text())
    assert {(row["k"], row["value"]) for row in rows} == {(0, 3), (1, 1)}


def test_no_figure_is_nan_however_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"value": 1.0, "curve": [[1e300, float("inf")], float("nan")], "word": "NaN", "none": None}
    monkeypatch.setattr(Squares, "measure", lambda *_: {"squares": [row]})
    run(tmp_path)
    rows = json.loads((tmp_path / "rows" / "squares.json").read_text(), parse_constant=pytest.fail)
    assert rows[0] == {"k": 0, "seed": 0, "value": 1.0, "curve": [[1e300, None], None], "word": "NaN", "none": None}


def test_a_study_that_lacks_a_part_cannot_begin() -> None:
    class Half(Study):
        name = "half"

    with pytest.raises(TypeError, match="figures, measure, sets, tables, units, verdicts"):
        Half()  # type: ignore[abstract]


@pytest.mark.parametrize("change", [lambda s: Squares(size=3, seeds=s.seeds), lambda s: Squares(widths=(9,))])
def test_a_folder_of_other_settings_is_refused(tmp_path: Path, change: Callable[[Study], Study]) -> None:
    run(tmp_path)
    with pytest.raises(UsageError, match=r"other settings \((size|widths)\); give another folder"):
        run(tmp_path, change(Squares(seeds=(0, 1))))


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    with pytest.raises(UsageError, match="is not empty and holds no run"):
        run(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("damage", ["", "3", "[]", "{}", '{"study": "squares", "scale": "smoke", "settings": []}'])
def test_settings_that_cannot_be_read_adopt_no_units(tmp_path: Path, damage: str) -> None:
    run(tmp_path)
    (tmp_path / "settings.json").write_text(damage)
    with pytest.raises(UsageError, match="holds no run with settings.json"):
        run(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError, match="file is no folder that can be written to"):
            run(folder)
    with pytest.raises(UsageError, match="cannot be made .*give another folder"):
        run(tmp_path / ("x" * 300))


def test_two_runs_in_one_folder_are_one_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def another(self: Squares, unit: Job, bench: RunContext) -> Rows:
        with pytest.raises(UsageError, match="another run is at work in"):
            run(tmp_path)
        return {"squares": [{"value": 1.0}]}

    monkeypatch.setattr(Squares, "measure", another)
    run(tmp_path)
    run(tmp_path)


def test_a_run_is_read_as_it_was(tmp_path: Path) -> None:
    done = run(tmp_path)
    again = read_run(tmp_path, STUDIES)
    assert again == done
    assert again.chapter() == done.chapter()  # type: ignore[attr-defined]


def test_two_workers_find_the_same_rows(tmp_path: Path) -> None:
    alone, together = run(tmp_path / "a"), run(tmp_path / "b", num_workers=2)
    assert alone.rows == together.rows  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "settings.json").unlink(), "holds no settings.json of a run"),
        (lambda folder: (folder / "rows" / "squares.json").write_text("["), "rows that cannot be read \\(squares\\)"),
        (lambda folder: (folder / "rows" / "squares.json").unlink(), "not finished"),
        (lambda folder: edit(folder, study="cubes"), "holds 'cubes'; expected one of squares"),
        (lambda folder: edit(folder, settings={"height": 3}), "settings of another version"),
        (lambda folder: edit(folder, settings=[3]), "holds no settings.json of a run"),
        (lambda folder: edit(folder, study=["squares"]), "holds no settings.json of a run"),
        (lambda folder: edit(folder, about=3), "not finished"),
        (lambda folder: edit(folder, about={"command": "x"}), "not finished"),
        (lambda folder: (folder / "rows" / "squares.json").write_text("3"), "rows that cannot be read"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path: Path, damage: Callable[[Path], object], sentence: str) -> None:
    run(tmp_path)
    damage(tmp_path)
    with pytest.raises(UsageError, match=sentence):
        read_run(tmp_path, STUDIES)


def edit(folder: Path, **changes: object) -> None:
    file = folder / "settings.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


KILLED = """
    import signal, sys, time
    from pathlib import Path
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores interrupts
    sys.path.insert(0, {tests!r})
    from neuboots_paper.study import Bench
    from neuboots_paper.runner import execute
    from test_runs import Squares
    class Slow(Squares):
        def measure(self, unit, bench):
            if unit["k"] == 2 and not Path({marker!r}).exists():
                print("under way", flush=True)
                time.sleep(60)
            return super().measure(unit, bench)
    execute(Slow(size=3, seeds=(0,)), "smoke", Path({folder!r}), Bench(), command="")
    print("did", len(Squares.log), flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_goes_on(tmp_path: Path, how: signal.Signals) -> None:
    folder, marker = tmp_path / "run", tmp_path / "marker"
    code = textwrap.dedent(KILLED).format(tests=str(Path(__file__).parent), marker=str(marker), folder=str(folder))
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "under way\n"
        os.kill(first.pid, how)
    assert [file.name for file in (folder / "units").glob("*.json")] == ["k=1,seed=0.json"]
    marker.touch()
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert second.stdout == "did 2\n"  # the one under way, and the timed one
