"""The command `neuboots reproduce`: one experiment of the paper, or all of them, at one of three scales."""

import difflib
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from neuboots.cli._console import UsageError
from neuboots.data import CorruptFileError
from neuboots.report.section import format_text
from neuboots_paper.registry import NEEDS, STUDIES
from neuboots_paper.runner import check_folder, run_study
from neuboots_paper.study import RunContext, Scale, Study

_ALL_NEED = ("lightning_fabric", "matplotlib", "PIL", "rich", "scipy", "sklearn")


@dataclass(frozen=True)
class Reproduce:
    """Run an experiment of the paper, and set what comes out beside what the paper says.

    Leaves a folder with tidy rows, tables, figures and settings, and prints whether the paper's claim holds. A run that
    was cut short goes on with the same command; what is finished is never done again. `neuboots report` makes a page.
    """

    name: str
    """An experiment, or all."""
    scale: Scale = "cpu"
    """smoke: seconds, on data that are shipped; cpu: some minutes on real data; paper: the paper's settings."""
    data_root: Path | None = None
    """The folder of data sets; without it the variable NEUBOOTS_DATA, or the hub."""
    out: Path = Path("neuboots-results")
    """A folder for results; each scale and experiment has a folder of its own in it."""
    seeds: tuple[int, ...] | None = None
    """Which seeds, such as 0 1 2; a default for each experiment and scale. More can be added later."""
    workers: int | None = None
    """Processes that share the work; as many as there are cores, and one where there is a GPU."""

    def run(self) -> None:
        """Check everything, then work, print and write."""
        self._check()
        from rich import get_console

        say = partial(get_console().print, highlight=False, markup=False, soft_wrap=True)
        studies = [self._study(name) for name in self._names]
        for study in studies:
            check_folder(self._folder(study), study, self.scale)
        self._check_data(studies)
        for study in studies:
            self._one(study, say)

    def _one(self, study: Study, say: Callable[..., None]) -> None:
        folder = self._folder(study)
        say(f"\n{study.name}: {study.source}", style="bold")
        say(study.claim)
        if study.note:
            say(study.note)
        try:
            run = run_study(
                study,
                self.scale,
                folder,
                RunContext(self.data_root, progress=True),
                command=self._command(study.name),
                num_workers=self._workers(),
            )
        except CorruptFileError as fault:  # files are read when they are needed
            raise UsageError(str(fault)) from None
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted; what is finished is kept in {folder}: the same command goes on from there"
            ) from None
        chapter = run.chapter(figures=False)
        say(f"\n{format_text(chapter)}\n")
        say(f"Scale {self.scale}, {chapter.seeds}; {chapter.cost}. Rows, tables and figures: {folder}")

    @property
    def _names(self) -> list[str]:
        return list(STUDIES) if self.name == "all" else [self.name]

    def _folder(self, study: Study) -> Path:
        return self.out / self.scale / study.name

    def _study(self, name: str) -> Study:
        study = STUDIES[name].at(self.scale)
        return study if self.seeds is None else study.with_seeds(self.seeds)

    def _command(self, name: str) -> str:
        """What repeats this run; where the data and the results lie is each reader's own affair."""
        words = ["neuboots", "reproduce", name, "--scale", self.scale]
        if self.seeds is not None:
            words += ["--seeds", *map(str, self.seeds)]
        return shlex.join(words)

    def _workers(self) -> int:
        if self.workers is not None:
            return self.workers
        return 1 if torch.cuda.is_available() else os.cpu_count() or 1

    def _check(self) -> None:
        if self.name not in STUDIES and self.name != "all":
            close = difflib.get_close_matches(self.name, STUDIES, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UsageError(f"there is no experiment {self.name!r}; {hint}give one of {', '.join(STUDIES)}, or all")
        if self.seeds is not None and (
            not self.seeds or min(self.seeds) < 0 or max(self.seeds) >= 2**32 or len({*self.seeds}) < len(self.seeds)
        ):
            given = " ".join(map(str, self.seeds)) or "empty"
            raise UsageError(f"--seeds is {given}; give whole numbers of at least 0 and below 2**32, each once")
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers is {self.workers}; give a whole number of at least 1")
        needed = dict.fromkeys([*_ALL_NEED, *(module for name in self._names for module in NEEDS.get(name, ()))])
        if absent := [module for module in needed if find_spec(module) is None]:
            raise ImportError(f"this needs {', '.join(absent)}; get all it needs with: pip install 'neuboots[all]'")

    def _check_data(self, studies: list[Study]) -> None:
        """All sets of all studies are looked for before any work begins."""
        bench, missing = RunContext(self.data_root), {}
        for name in dict.fromkeys(name for study in studies for name in study.sets):
            try:
                bench.data(name)
            except ValueError as fault:  # a missing set says where it was looked for, and how to get it
                missing[name] = str(fault)
        if missing:
            raise UsageError("\n".join(missing.values()))
