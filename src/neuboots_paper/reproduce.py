"""The command `neuboots reproduce`: run one study of the paper, or all of them, at one of three scales."""

import difflib
import os
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from neuboots.cli import UsageError
from neuboots.cli._console import echo_rich as echo
from neuboots.data import CorruptFileError
from neuboots_paper.runner import check_run_folder, run_study
from neuboots_paper.studies import STUDY_NAMES, load_study
from neuboots_paper.study import RunContext, Scale, Study

_REQUIRED = ("lightning_fabric", "matplotlib", "PIL", "rich", "scipy", "sklearn")


@dataclass(frozen=True)
class Reproduce:
    """Run a study of the paper and compare the results with what the paper states.

    Writes a folder with tidy rows, tables, plots and settings, and prints whether the claims hold. An interrupted run
    resumes with the same command; finished jobs are not repeated. `neuboots report` makes a page of all results.
    """

    name: str
    """Name of a study, or all."""
    scale: Scale = "cpu"
    """smoke: seconds, on toy data; cpu: minutes, on real data; paper: the settings of the paper."""
    data_root: Path | None = None
    """Folder of datasets (default: the environment variable NEUBOOTS_DATA, then the hub)."""
    out: Path = Path("neuboots-results")
    """Results folder; each scale and study has a folder in it."""
    seeds: tuple[int, ...] | None = None
    """Seeds, such as 0 1 2 (default: those of the study at this scale). More can be added later."""
    workers: int | None = None
    """Number of processes (default: one per core; one if there is a GPU)."""

    def run(self) -> None:
        """Check everything first, then run each study, print and write."""
        self._check()
        studies = [self._study(name) for name in self._names]
        self._check_packages(studies)
        for study in studies:
            check_run_folder(self._folder(study), study, self.scale)
        self._check_data(studies)
        for study in studies:
            self._run(study)

    def _run(self, study: Study) -> None:
        folder = self._folder(study)
        echo(f"\n{study.name}: {study.source}", style="bold")
        echo(study.claim)
        if study.note:
            echo(study.note)
        workers = self.workers or (1 if torch.cuda.is_available() else os.cpu_count() or 1)
        context, command = RunContext(self.data_root, progress=True), self._command(study.name)
        try:
            run = run_study(study, self.scale, folder, context, command=command, num_workers=workers)
        except CorruptFileError as error:  # files are read when they are needed
            raise UsageError(str(error)) from None
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted; finished jobs are kept in {folder}, and the same command resumes"
            ) from None
        section = run.section(plots=False)
        for part in (*[table.text for table in section.tables], "\n".join(map(str, section.checks))):
            echo(f"\n{part}")
        echo(f"\nScale {self.scale}, {section.seeds}; {section.cost}. Rows, tables and plots: {folder}")

    @property
    def _names(self) -> tuple[str, ...]:
        return STUDY_NAMES if self.name == "all" else (self.name,)

    def _folder(self, study: Study) -> Path:
        return self.out / self.scale / study.name

    def _study(self, name: str) -> Study:
        study = load_study(name).from_preset(self.scale)
        return study if self.seeds is None else study.with_seeds(self.seeds)

    def _command(self, name: str) -> str:
        """Command line that repeats the run, without the paths of this machine."""
        words = ["neuboots", "reproduce", name, "--scale", self.scale]
        if self.seeds is not None:
            words += ["--seeds", *map(str, self.seeds)]
        return shlex.join(words)

    def _check(self) -> None:
        if self.name not in (*STUDY_NAMES, "all"):
            close = difflib.get_close_matches(self.name, STUDY_NAMES, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UsageError(f"unknown study {self.name!r}; {hint}expected all or one of {', '.join(STUDY_NAMES)}")
        if self.seeds is not None and (
            not self.seeds or min(self.seeds) < 0 or max(self.seeds) >= 2**32 or len({*self.seeds}) < len(self.seeds)
        ):
            got = " ".join(map(str, self.seeds)) or "empty"
            raise UsageError(f"--seeds is {got}; expected distinct integers of at least 0 and below 2**32")
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers is {self.workers}; expected an integer of at least 1")

    def _check_packages(self, studies: list[Study]) -> None:
        required = dict.fromkeys([*_REQUIRED, *(package for study in studies for package in study.requires)])
        if missing := [package for package in required if find_spec(package) is None]:
            raise ImportError(f"missing packages: {', '.join(missing)}; install them: pip install 'neuboots[all]'")

    def _check_data(self, studies: list[Study]) -> None:
        """Load every dataset of every study before any work begins."""
        context, missing = RunContext(self.data_root), {}
        for name in dict.fromkeys(name for study in studies for name in study.dataset_names):
            try:
                context.load_data(name)
            except ValueError as error:  # its message lists where the dataset was looked for
                missing[name] = str(error)
        if missing:
            raise UsageError("\n".join(missing.values()))
