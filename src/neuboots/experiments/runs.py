"""Runs of a study: unit by unit into a folder, cut short and gone on with, and read again.

    OUT/settings.json · OUT/units/….json (each as soon as it is done) · OUT/rows/….json · OUT/results.md · OUT/figures/

Rows and settings are all that is needed to make tables, verdicts, figures and the page again.
"""

import json
import math
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from neuboots.experiments import UsageError
from neuboots.experiments.study import Bench, Rows, Study, Unit
from neuboots.report.chapters import Chapter, markdown
from neuboots.tasks.repeated import kept
from neuboots.tasks.units import read_json, run_units, write_json, write_text

SETTINGS, ROWS = "settings.json", "rows"


class Unfinished(UsageError):
    """A run was cut short, and nobody has gone on with it."""


@dataclass(frozen=True)
class Run:
    """What a folder holds: the study with its settings, the rows, and how they came about."""

    study: Study
    scale: str
    rows: Rows
    about: Mapping[str, Any]  # command, versions, threads, seconds

    def chapter(self, *, figures: bool = True) -> Chapter:
        """Everything there is to say of it, made from the rows; without figures in no time."""
        from neuboots.report.svg import to_svg

        study = self.study
        drawn = study.figures(self.rows) if figures else {}
        return Chapter(
            name=study.name,
            source=study.source,
            claim=study.claim,
            scale=self.scale,
            note=study.note,
            tables=tuple(study.tables(self.rows)),
            verdicts=tuple(study.verdicts(self.rows)),
            figures={name: to_svg(figure, f"{study.name}-{name}") for name, figure in drawn.items()},
            settings=study.settings,
            about=dict(self.about),
        )


def execute(study: Study, scale: str, folder: Path, bench: Bench, *, command: str, num_workers: int = 1) -> Run:
    """Do the units that the folder does not hold yet, then gather all their rows; units that measure time come last."""
    _claim_folder(folder, study, scale)
    units = study.units()
    names = [name_of(unit) for unit in units]
    if len({*names}) < len(names):
        raise ValueError(f"{study.name} has two units of one name; expected each once")
    files = [folder / "units" / f"{name}.json" for name in names]

    def work(k: int) -> dict[str, Any]:
        return kept(files[k], lambda checkpoints: _measured(study, units[k], bench, checkpoints))

    found: dict[int, dict[str, Any]] = {}
    for timed in (False, True):
        some = [k for k, unit in enumerate(units) if study.timed(unit) == timed]
        if some:
            results = run_units(
                partial(_at, work, some),
                len(some),
                num_workers=1 if timed else num_workers,
                title=f"{study.name}{', times' if timed else ''}",
                progress=bench.progress,
            )
            found |= dict(zip(some, results, strict=True))
    results = [found[k] for k in range(len(units))]
    about = {
        "command": command,
        "neuboots": version("neuboots"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "units": len(units),
        "core_seconds": round(sum(result["seconds"] for result in results), 1),
    }
    run = Run(study, scale, _gathered(results), about)
    _write(run, folder)
    return run


def read_run(folder: Path, studies: Mapping[str, type[Study]]) -> Run:
    """The run whose settings and rows lie in the folder."""
    settings = read_json(folder / SETTINGS)
    if settings is None:
        raise UsageError(f"{folder} holds no {SETTINGS}; give a folder that `neuboots reproduce` has made")
    if settings["study"] not in studies:
        raise UsageError(f"{folder} holds {settings['study']!r}; expected one of {', '.join(studies)}")
    rows = {file.stem: read_json(file) for file in sorted((folder / ROWS).glob("*.json"))}
    broken = [name for name, table in rows.items() if table is None]
    again = f"repeat its command: neuboots reproduce {settings['study']} --scale {settings['scale']} …"
    if broken:
        raise UsageError(f"{folder} holds rows that cannot be read ({', '.join(broken)}); {again}")
    if not rows or "about" not in settings:
        raise Unfinished(f"{folder} holds a run that is not finished; {again}")
    try:
        study = studies[settings["study"]].of(settings["settings"])
    except TypeError as fault:
        raise UsageError(f"{folder} has settings of another version ({fault}); make it again in a new folder") from None
    return Run(study, settings["scale"], rows, settings["about"])


def name_of(unit: Unit) -> str:
    """A unit's values as a file name.

    >>> name_of({"data": "uci/energy", "method": "neuboots", "seed": 0})
    'data=uci-energy,method=neuboots,seed=0'
    """
    return ",".join(f"{key}={value}" for key, value in unit.items()).replace("/", "-").replace(" ", "")


def _at(work: Callable[[int], dict[str, Any]], numbers: list[int], place: int) -> dict[str, Any]:
    return work(numbers[place])


def _measured(study: Study, unit: Unit, bench: Bench, checkpoints: Path | None) -> dict[str, Any]:
    start = _cpu_seconds()
    tables = study.measure(unit, Bench(bench.root, checkpoints, progress=False))
    rows = {name: [_finite({**unit, **row}) for row in table] for name, table in tables.items()}
    return {"seconds": _cpu_seconds() - start, "rows": rows}


def _cpu_seconds() -> float:
    """Of this process with all its threads, and of its children that have ended: what else the machine does is out."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """A figure that is no number is missing: JSON has no word for it, and a table shows that it is not there."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def _gathered(results: list[dict[str, Any]]) -> Rows:
    rows: Rows = {}
    for result in results:
        for name, table in result["rows"].items():
            rows.setdefault(name, []).extend(table)
    return rows


def _claim_folder(folder: Path, study: Study, scale: str) -> None:
    """The folder is this study's with these settings, or new; seeds may be added later."""
    held = read_json(folder / SETTINGS)
    wanted = json.loads(json.dumps({"study": study.name, "scale": scale, "settings": study.settings}))
    if held is None:
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty and holds no run; give another folder with --out")
        write_json(folder / SETTINGS, wanted)
        return
    for key, value in wanted.items():
        if _seedless(held.get(key)) != _seedless(value):
            raise UsageError(
                f"{folder} holds a run with another {key}; give another folder with --out, or remove that one"
            )


def _seedless(value: Any) -> Any:
    return {key: each for key, each in value.items() if key != "seeds"} if isinstance(value, dict) else value


def _write(run: Run, folder: Path) -> None:
    chapter = run.chapter()
    for name, table in run.rows.items():
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in table)
        write_text(folder / ROWS / f"{name}.json", f"[\n{lines}\n]\n")
    write_text(folder / "results.md", markdown(chapter))
    shutil.rmtree(folder / "figures", ignore_errors=True)  # of fewer seeds, perhaps
    for name, figure in chapter.figures.items():
        write_text(folder / "figures" / f"{name}.svg", figure)
    held = {"study": run.study.name, "scale": run.scale, "settings": run.study.settings, "about": run.about}
    write_text(folder / SETTINGS, json.dumps(held, indent=1, ensure_ascii=False) + "\n")  # last: the run is whole
