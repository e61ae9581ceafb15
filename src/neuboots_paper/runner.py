"""Run a study job by job, resume an interrupted run, and read a finished one.

    OUT/settings.json · OUT/units/….json (one per finished job) · OUT/rows/….json · OUT/results.md · OUT/figures/

Settings and rows are all that is needed to make the tables, checks, plots and the report again.
"""

import json
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from neuboots.cli import UsageError
from neuboots.evaluation._parallel import run_jobs
from neuboots.report.section import Section
from neuboots.serialization import read_json, write_json, write_text
from neuboots_paper._common import one_thread
from neuboots_paper.studies import load_study
from neuboots_paper.study import Job, Rows, RunContext, Study

SETTINGS, ROWS, JOBS = "settings.json", "rows", "units"


class IncompleteRunError(UsageError):
    """A run was interrupted and has not been resumed."""


@dataclass(frozen=True)
class Run:
    """Content of a results folder: the study with its settings, its rows, and their provenance."""

    study: Study
    scale: str
    rows: Rows
    about: Mapping[str, Any]  # command, versions, threads, seconds

    def section(self, *, plots: bool = True) -> Section:
        """Section of the report, made from the rows; without plots it takes no time."""
        from neuboots.report.html import to_svg

        study = self.study
        figures = study.plots(self.rows) if plots else {}
        return Section(
            name=study.name,
            source=study.source,
            claim=study.claim,
            scale=self.scale,
            note=study.note,
            tables=tuple(study.tables(self.rows)),
            checks=tuple(study.checks(self.rows)),
            plots={name: to_svg(figure, f"{study.name}-{name}") for name, figure in figures.items()},
            settings=study.settings,
            about=dict(self.about),
        )


def run_study(
    study: Study, scale: str, folder: Path, context: RunContext, *, command: str, num_workers: int = 1
) -> Run:
    """Run the jobs that the folder has no results of, then write rows, tables and plots.

    Args:
        study: Study to run.
        scale: Name of its preset, stored with the settings.
        folder: Results folder; a run with the same settings in it is resumed, and seeds may be added.
        context: Data root and progress bars.
        command: Command line that repeats the run, stored with the results.
        num_workers: Processes that share the jobs; timing jobs run alone, after all others.

    Returns:
        The finished run.

    Raises:
        UsageError: If the folder holds other files or other settings, or another process works in it.
    """
    check_run_folder(folder, study, scale)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create {folder} ({error.strerror}); choose another folder with --out") from None
    with _lock(folder):
        for partial_file in [*folder.glob(".part-*"), *folder.glob("*/.part-*")]:  # of a killed run
            partial_file.unlink()
        if not _is_run(read_json(folder / SETTINGS)):
            write_json(folder / SETTINGS, _identity(study, scale))
        results = _run_jobs(study, folder / JOBS, context, num_workers)
        run = Run(study, scale, _collect_rows(results), _provenance(command, results))
        _write(run, folder)
    return run


def _run_jobs(study: Study, folder: Path, context: RunContext, num_workers: int) -> list[dict[str, Any]]:
    """Results of all jobs in their order, each cached in a file as soon as it is done."""
    jobs = study.jobs()
    names = [job_name(job) for job in jobs]
    assert len({*names}) == len(names), f"two jobs of {study.name} have the same name"

    def work(k: int) -> dict[str, Any]:
        file = folder / f"{names[k]}.json"
        try:
            result = _measure(study, jobs[k], RunContext(context.root, file.with_suffix("")))
            write_json(file, result)
        except Exception as error:
            error.add_note(f"in job {names[k]} of {study.name}; finished jobs are kept in {folder}")
            raise
        shutil.rmtree(file.with_suffix(""), ignore_errors=True)
        return result

    results = {k: result for k, name in enumerate(names) if (result := _read_result(folder / f"{name}.json"))}
    for timing in (False, True):
        selected = [k for k, job in enumerate(jobs) if study.is_timing_job(job) == timing and k not in results]
        if selected:
            with nullcontext() if timing or torch.cuda.is_available() else one_thread():
                found = run_jobs(
                    lambda place, selected=selected: work(selected[place]),  # type: ignore[misc]
                    len(selected),
                    num_workers=1 if timing else num_workers,
                    description=f"{study.name}{', times' if timing else ''}",
                    progress=context.progress,
                )
            results |= dict(zip(selected, found, strict=True))
    return [results[k] for k in range(len(jobs))]


def _measure(study: Study, job: Job, context: RunContext) -> dict[str, Any]:
    start = _cpu_seconds()
    tables = study.measure(job, context)
    rows = {name: [_to_json({**job, **row}) for row in table] for name, table in tables.items()}
    return {"seconds": _cpu_seconds() - start, "rows": rows}


def _cpu_seconds() -> float:
    """CPU time of this process, all its threads, and its finished children."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _to_json(value: Any) -> Any:
    """The value with None for numbers that are not finite, which JSON cannot store."""
    if isinstance(value, dict):
        return {key: _to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_result(file: Path) -> dict[str, Any] | None:
    """Cached result of a job; None if there is none or the file is damaged."""
    match read_json(file):
        case {"seconds": int() | float(), "rows": dict(rows)} as result if all(map(_is_table, rows.values())):
            shutil.rmtree(file.with_suffix(""), ignore_errors=True)  # checkpoints of a job killed at its end
            return dict(result)
    return None


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _collect_rows(results: list[dict[str, Any]]) -> Rows:
    rows: Rows = {}
    for result in results:
        for name, table in result["rows"].items():
            rows.setdefault(name, []).extend(table)
    return rows


def _provenance(command: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "command": command,
        "neuboots": version("neuboots"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "units": len(results),
        "core_seconds": round(sum(result["seconds"] for result in results), 1),
    }


def read_run(folder: Path, find_study: Callable[[str], type[Study]] = load_study) -> Run:
    """Read a finished run.

    Args:
        folder: Results folder that `run_study` wrote.
        find_study: Class of a study by name; raises a ValueError if there is none.

    Returns:
        The run.

    Raises:
        IncompleteRunError: If the run was interrupted.
        UsageError: If the folder holds no run, or one that this version cannot read.
    """
    settings = read_json(folder / SETTINGS)
    if not _is_run(settings):
        raise UsageError(f"{folder} has no {SETTINGS} of a run; pass a folder written by `neuboots reproduce`")
    repeat = f"repeat its command: neuboots reproduce {settings['study']} --scale {settings['scale']} …"
    rows = {file.stem: read_json(file) for file in sorted((folder / ROWS).glob("[!.]*.json"))}
    if damaged := [name for name, table in rows.items() if not _is_table(table)]:
        raise UsageError(f"cannot read the rows {', '.join(damaged)} in {folder}; {repeat}")
    match settings.get("about"):
        case {"command": str(), "units": int(), "core_seconds": int() | float()} as about if rows:
            pass
        case _:
            raise IncompleteRunError(f"the run in {folder} is incomplete; {repeat}")
    try:
        study = find_study(settings["study"]).from_settings(settings["settings"])
    except (TypeError, ValueError) as error:
        raise UsageError(f"{folder} was written by another version ({error}); {repeat}") from None
    return Run(study, settings["scale"], rows, about)


def job_name(job: Job) -> str:
    """Values of a job as a file name.

    Example:
        >>> job_name({"data": "uci/energy", "method": "neuboots", "seed": 0})
        'data=uci-energy,method=neuboots,seed=0'
    """
    return ",".join(f"{key}={value}" for key, value in job.items()).replace("/", "-").replace(" ", "")


def check_run_folder(folder: Path, study: Study, scale: str) -> None:
    """Raise a UsageError unless the folder is new, empty, or holds this study with these settings (but other seeds)."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UsageError(f"{existing} is not a writable folder; choose another one with --out")
    stored, wanted = read_json(folder / SETTINGS), _identity(study, scale)
    if not _is_run(stored):
        if existing == folder and any(not path.name.endswith(SETTINGS) for path in folder.iterdir()):
            raise UsageError(f"{folder} is not empty and holds no {SETTINGS} of a run; choose another one with --out")
        return
    before, now = ({"study": each["study"], "scale": each["scale"], **each["settings"]} for each in (stored, wanted))
    different = [key for key in {**before, **now} if key != "seeds" and before.get(key, ...) != now.get(key, ...)]
    if different:
        raise UsageError(
            f"{folder} holds a run with other settings ({', '.join(different)}); remove it, or choose another folder "
            "with --out"
        )


def _identity(study: Study, scale: str) -> dict[str, Any]:
    """Content of the settings file of a new run, as JSON returns it."""
    identity: dict[str, Any] = {"study": study.name, "scale": scale, "settings": study.settings}
    return json.loads(json.dumps(identity))  # type: ignore[no-any-return]


def _is_run(stored: Any) -> bool:
    match stored:
        case {"study": str(), "scale": str(), "settings": dict()}:
            return True
    return False


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Exclusive lock: two runs in one folder would repeat jobs and remove each other's checkpoints."""
    try:
        import fcntl
    except ImportError:  # on Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, however it ends
        except BlockingIOError:
            raise UsageError(f"another run uses {folder}; wait for it, or choose another folder with --out") from None
        yield
    finally:
        os.close(handle)


def _write(run: Run, folder: Path) -> None:
    section = run.section()
    tables = {name: ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) for name, rows in run.rows.items()}
    _write_all(folder / ROWS, ".json", {name: f"[\n{lines}\n]\n" for name, lines in tables.items()})
    write_text(folder / "results.md", format_markdown(section))
    _write_all(folder / "figures", ".svg", section.plots)
    stored = {"study": run.study.name, "scale": run.scale, "settings": run.study.settings, "about": run.about}
    write_text(folder / SETTINGS, json.dumps(stored, indent=1, ensure_ascii=False) + "\n")  # last: the run is complete


def _write_all(folder: Path, suffix: str, texts: Mapping[str, str]) -> None:
    """Write these files and remove the others, which an earlier run with other seeds wrote."""
    for name, text in texts.items():
        write_text(folder / f"{name}{suffix}", text)
    for file in folder.glob(f"*{suffix}"):
        if file.name.removesuffix(suffix) not in texts:
            file.unlink()


def format_markdown(section: Section) -> str:
    """Return a section as Markdown: claim, checks, tables and how to repeat the run.

    Args:
        section: A section of a study.

    Returns:
        The Markdown text.
    """
    checks = "\n".join(f"- **{check.outcome}**: {check.claim} ({check.evidence})" for check in section.checks)
    tables = "\n".join(table.markdown for table in section.tables)
    note = f"{section.note}\n\n" if section.note else ""
    return (
        f"## {section.name}: {section.source}\n\n{section.claim}\n\n{note}{checks}\n\n{tables}\n"
        f"Scale {section.scale}, {section.seeds}; {section.cost}: `{section.about['command']}`\n"
    )
