"""Runs of a study: unit by unit into a folder, cut short and gone on with, and read again.

    OUT/settings.json · OUT/units/….json (each as soon as it is done) · OUT/rows/….json · OUT/results.md · OUT/figures/

Rows and settings are all that is needed to make tables, verdicts, figures and the page again.
"""

import json
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from neuboots._io import read_json, write_json, write_text
from neuboots.cli._console import UsageError
from neuboots.evaluation._parallel import run_jobs
from neuboots.report.section import Section, format_markdown
from neuboots_paper.study import Job, Rows, RunContext, Study

SETTINGS, ROWS, UNITS = "settings.json", "rows", "units"


class IncompleteRunError(UsageError):
    """A run was cut short, and nobody has gone on with it."""


@dataclass(frozen=True)
class Run:
    """What a folder holds: the study with its settings, the rows, and how they came about."""

    study: Study
    scale: str
    rows: Rows
    about: Mapping[str, Any]  # command, versions, threads, seconds

    def chapter(self, *, figures: bool = True) -> Section:
        """Everything there is to say of it, made from the rows; without figures in no time."""
        from neuboots.report.html import to_svg

        study = self.study
        drawn = study.figures(self.rows) if figures else {}
        return Section(
            name=study.name,
            source=study.source,
            claim=study.claim,
            scale=self.scale,
            note=study.note,
            tables=tuple(study.tables(self.rows)),
            checks=tuple(study.verdicts(self.rows)),
            plots={name: to_svg(figure, f"{study.name}-{name}") for name, figure in drawn.items()},
            settings=study.settings,
            about=dict(self.about),
        )


def run_study(study: Study, scale: str, folder: Path, bench: RunContext, *, command: str, num_workers: int = 1) -> Run:
    """Do the units that the folder does not hold yet, then gather all their rows; units that measure time come last."""
    check_folder(folder, study, scale)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UsageError(f"{folder} cannot be made ({fault.strerror}); give another folder with --out") from None
    with _alone_in(folder):
        for half in [*folder.glob("*.part"), *folder.glob("*/*.part")]:  # of a run that was killed as it wrote
            half.unlink()
        if not _is_run(read_json(folder / SETTINGS)):
            write_json(folder / SETTINGS, _identity(study, scale))
        results = _results(study, folder / UNITS, bench, num_workers)
        run = Run(study, scale, _gathered(results), _about(command, results))
        _write(run, folder)
    return run


def _results(study: Study, folder: Path, bench: RunContext, num_workers: int) -> list[dict[str, Any]]:
    """What each unit found, in the order of the units, each kept in a file as soon as it is done."""
    units = study.units()
    names = [job_name(unit) for unit in units]
    if len({*names}) < len(names):
        raise ValueError(f"{study.name} has two units of one name; expected each once")

    def work(k: int) -> dict[str, Any]:
        file = folder / f"{names[k]}.json"
        try:
            result = _measured(study, units[k], bench, file.with_suffix(""))
            write_json(file, result)
        except Exception as fault:
            fault.add_note(f"in the unit {names[k]} of {study.name}; what is finished is kept in {folder}")
            raise
        shutil.rmtree(file.with_suffix(""), ignore_errors=True)
        return result

    found = {k: result for k, name in enumerate(names) if (result := _kept(folder / f"{name}.json")) is not None}
    for timed in (False, True):
        some = [k for k, unit in enumerate(units) if study.timed(unit) == timed]
        if some:
            with nullcontext() if timed or torch.cuda.is_available() else _one_thread():
                results = run_jobs(
                    partial(_at, work, some),
                    len(some),
                    num_workers=1 if timed else num_workers,
                    known={place: found[k] for place, k in enumerate(some) if k in found},
                    description=f"{study.name}{', times' if timed else ''}",
                    progress=bench.progress,
                )
            found |= dict(zip(some, results, strict=True))
    return [found[k] for k in range(len(units))]


@contextmanager
def _one_thread() -> Iterator[None]:
    """As workers have it: the order of sums, and so the last digits, are the same whatever the number of workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _kept(file: Path) -> dict[str, Any] | None:
    """What an earlier run found in a unit; a damaged file is as good as none."""
    match read_json(file):
        case {"seconds": int() | float(), "rows": dict(rows)} as result if all(map(_is_table, rows.values())):
            shutil.rmtree(file.with_suffix(""), ignore_errors=True)  # checkpoints, if it was killed as it ended
            return dict(result)
    return None


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _about(command: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "command": command,
        "neuboots": version("neuboots"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "units": len(results),
        "core_seconds": round(sum(result["seconds"] for result in results), 1),
    }


def read_run(folder: Path, studies: Mapping[str, type[Study]]) -> Run:
    """The run whose settings and rows lie in the folder."""
    settings = read_json(folder / SETTINGS)
    if not _is_run(settings):
        raise UsageError(f"{folder} holds no {SETTINGS} of a run; give a folder that `neuboots reproduce` has made")
    if settings["study"] not in studies:
        raise UsageError(f"{folder} holds {settings['study']!r}; expected one of {', '.join(studies)}")
    rows = {file.stem: read_json(file) for file in sorted((folder / ROWS).glob("*.json"))}
    broken = [name for name, table in rows.items() if not _is_table(table)]
    again = f"repeat its command: neuboots reproduce {settings['study']} --scale {settings['scale']} …"
    if broken:
        raise UsageError(f"{folder} holds rows that cannot be read ({', '.join(broken)}); {again}")
    if not rows or not _is_about(settings.get("about")):
        raise IncompleteRunError(f"{folder} holds a run that is not finished; {again}")
    try:
        study = studies[settings["study"]].of(settings["settings"])
    except TypeError as fault:
        raise UsageError(f"{folder} has settings of another version ({fault}); make it again in a new folder") from None
    return Run(study, settings["scale"], rows, settings["about"])


def job_name(unit: Job) -> str:
    """A unit's values as a file name.

    >>> job_name({"data": "uci/energy", "method": "neuboots", "seed": 0})
    'data=uci-energy,method=neuboots,seed=0'
    """
    return ",".join(f"{key}={value}" for key, value in unit.items()).replace("/", "-").replace(" ", "")


def _at(work: Callable[[int], dict[str, Any]], numbers: list[int], place: int) -> dict[str, Any]:
    return work(numbers[place])


def _measured(study: Study, unit: Job, bench: RunContext, checkpoints: Path) -> dict[str, Any]:
    start = _cpu_seconds()
    tables = study.measure(unit, RunContext(bench.root, checkpoints, progress=False))
    rows = {name: [_finite({**unit, **row}) for row in table] for name, table in tables.items()}
    return {"seconds": _cpu_seconds() - start, "rows": rows}


def _cpu_seconds() -> float:
    """Of this process with all its threads, and of its children that have ended: what else the machine does is out."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """A figure that is no number is missing: JSON has no word for it, and a table shows that it is not there."""
    return {key: _number(value) for key, value in row.items()}


def _number(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_number(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _gathered(results: list[dict[str, Any]]) -> Rows:
    rows: Rows = {}
    for result in results:
        for name, table in result["rows"].items():
            rows.setdefault(name, []).extend(table)
    return rows


def check_folder(folder: Path, study: Study, scale: str) -> None:
    """Whether the folder is this study's with these settings, or can be; seeds may be added. Nothing is made yet."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UsageError(f"{there} is no folder that can be written to; give another one with --out")
    held, wanted = read_json(folder / SETTINGS), _identity(study, scale)
    if not _is_run(held):
        if there == folder and any(not path.name.startswith(SETTINGS) for path in folder.iterdir()):
            raise UsageError(f"{folder} is not empty and holds no run with {SETTINGS}; give another folder with --out")
        return
    other = [key for key in ("study", "scale") if held[key] != wanted[key]]
    before, now = held["settings"], wanted["settings"]
    other += [key for key in {**before, **now} if key != "seeds" and before.get(key, ...) != now.get(key, ...)]
    if other:
        raise UsageError(
            f"{folder} holds a run with other settings ({', '.join(other)}); give another folder with --out, or remove "
            "that one"
        )


def _identity(study: Study, scale: str) -> dict[str, Any]:
    """What stands in the settings' file of a new run, as JSON gives it back."""
    identity: dict[str, Any] = {"study": study.name, "scale": scale, "settings": study.settings}
    return json.loads(json.dumps(identity))  # type: ignore[no-any-return]


def _is_run(held: Any) -> bool:
    """Whether this is what `_identity` gave, perhaps with more."""
    match held:
        case {"study": str(), "scale": str(), "settings": dict()}:
            return True
    return False


def _is_about(held: Any) -> bool:
    """Whether this is what `_about` gave."""
    match held:
        case {"command": str(), "units": int(), "core_seconds": int() | float()}:
            return True
    return False


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two runs in one folder would train the same units and remove each other's checkpoints: the second is refused."""
    try:
        import fcntl
    except ImportError:  # on Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which ends with the process, however that ends
        except BlockingIOError:
            raise UsageError(
                f"another run is at work in {folder}; wait until it has ended, or give another folder with --out"
            ) from None
        yield
    finally:
        os.close(handle)


def _write(run: Run, folder: Path) -> None:
    chapter = run.chapter()
    _write_all(folder / ROWS, ".json", {name: _lines(table) for name, table in run.rows.items()})
    write_text(folder / "results.md", format_markdown(chapter))
    _write_all(folder / "figures", ".svg", chapter.plots)
    held = {"study": run.study.name, "scale": run.scale, "settings": run.study.settings, "about": run.about}
    write_text(folder / SETTINGS, json.dumps(held, indent=1, ensure_ascii=False) + "\n")  # last: the run is whole


def _lines(table: list[dict[str, Any]]) -> str:
    """JSON with a row in each line."""
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in table) + "\n]\n"


def _write_all(folder: Path, suffix: str, texts: Mapping[str, str]) -> None:
    """These files and no others: what an earlier run with other seeds left there goes."""
    for name, text in texts.items():
        write_text(folder / f"{name}{suffix}", text)
    for file in folder.glob(f"*{suffix}"):
        if file.name.removesuffix(suffix) not in texts:
            file.unlink()
