"""A fake study that measures squares and records the jobs that it ran."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from neuboots._validation import ArgumentError
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots_paper.checks import compare_groups
from neuboots_paper.runner import Run, run_study
from neuboots_paper.study import Job, Rows, RunContext, Study
from neuboots_paper.tables import MetricColumn, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Squares(Study):
    """Two jobs per seed; job k = 0 measures time, and job `fail_at` is interrupted."""

    name = "squares"
    source = "nowhere"
    claim = "Squares grow."
    log: ClassVar[list[Job]] = []
    fail_at: ClassVar[int | None] = None

    size: int = 2
    widths: tuple[int, ...] = (3, 4)

    def jobs(self) -> list[Job]:
        return self.job_grid(k=range(self.size))

    def is_timing_job(self, job: Job) -> bool:
        return bool(job["k"] == 0)

    def measure(self, job: Job, context: RunContext) -> Rows:
        if job["k"] == self.fail_at:
            raise KeyboardInterrupt
        self.log.append(job)
        assert context.folder is not None
        context.folder.mkdir(parents=True, exist_ok=True)  # a killed job may have made it
        (context.folder / "checkpoint").touch()
        return {"squares": [{"value": job["k"] ** 2 + job["seed"] / 10, "nothing": float("nan")}]}

    def tables(self, rows: Rows) -> list[Table]:
        return [tabulate("Squares.", rows["squares"], by=("k",), columns=(MetricColumn("value", "value"),))]

    def checks(self, rows: Rows) -> list[Check]:
        return [compare_groups("1 > 0", rows["squares"], "value", {"k": 1}, {"k": 0}, expect="higher")]

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        figure = Figure()
        figure.subplots().plot([row["value"] for row in rows["squares"]])
        return {"line": figure}


def find_squares(name: str) -> type[Study]:
    if name != "squares":
        raise ArgumentError("name", name, "squares")
    return Squares


def run_squares(folder: Path, study: Study | None = None, **options: int) -> Run:
    study = study or Squares(seeds=(0, 1))
    return run_study(study, "smoke", folder, RunContext(), command="neuboots …", **options)


def edit_settings(folder: Path, **changes: object) -> None:
    file = folder / "settings.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
