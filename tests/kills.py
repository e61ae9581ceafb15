"""Kills at random moments of training, `fit`, `predict --out` and `reproduce`; run `python tests/kills.py 30`.

Each kill (SIGKILL) is followed by checks of what is left, and by a second run, after which nothing else may be left and
the result must be that of a run that nobody interrupted.
"""

import contextlib
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _kills import run_in_fork
from _study import Squares, run_squares
from torch import nn

from neuboots import NeuBoots, TrainingConfig
from neuboots.app import load_model
from neuboots.cli import main
from neuboots.serialization import parse_json


def command(*args: object) -> None:
    """Run a command of neuboots without its output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as words:
        code = main([str(arg) for arg in args])
    assert code == 0, words.getvalue()


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def write_table(file: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    lines = [f"{a:.4f},{b:.4f},{a - b:.4f}" for a, b in rng.normal(size=(rows, 2))]
    file.write_text("\n".join(["a,b,y", *lines]) + "\n", encoding="utf-8")


@dataclass
class Case:
    """What is run and killed.

    Args:
        shared: Folder of what all runs read.
    """

    shared: Path

    def prepare(self) -> None:
        """Make what all runs read."""

    def start(self, folder: Path) -> None:
        """Make an earlier result, which the run replaces."""

    def run(self, folder: Path) -> None:
        """Write a result to the folder."""

    def inspect(self, folder: Path) -> str:
        """Check what a killed run has left, and name it."""
        return "nothing"

    def verify(self, folder: Path, reference: Path) -> None:
        """Check the result of a second run against that of a run that nobody killed, and that nothing else is left."""
        assert names(folder) == names(reference), (names(folder), names(reference))


class Training(Case):
    """A training with a checkpoint at each step: resumed bit for bit."""

    def run(self, folder: Path) -> None:
        x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
        config = TrainingConfig(epochs=4, batch_size=32, seed=0, progress=False, accelerator="cpu")
        config = replace(config, folder=folder / "run", checkpoint_steps=1)

        def make_net() -> nn.Module:
            return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

        state = NeuBoots().fit(make_net, (x, (x[:, 0] > 0).long()), config).state_dict()
        torch.save(state, folder / "state")

    def inspect(self, folder: Path) -> str:
        return "checkpoint" if (folder / "run" / "checkpoint.ckpt").exists() else "nothing"

    def verify(self, folder: Path, reference: Path) -> None:
        super().verify(folder, reference)
        found, expected = (torch.load(place / "state", weights_only=True) for place in (folder, reference))
        assert all(torch.equal(found[name], expected[name]) for name in expected), "other weights"


class Fit(Case):
    """`neuboots fit` over an earlier model of another seed: the old model or the new one."""

    def prepare(self) -> None:
        write_table(self.shared / "table.csv", 120)
        self.fit(self.shared / "old", 0)

    def fit(self, out: Path, seed: int) -> None:
        command("fit", self.shared / "table.csv", "--target", "y", "--epochs", 2, "--seed", seed, "--out", out)

    def start(self, folder: Path) -> None:
        load_model(self.shared / "old").save(folder / "model")

    def run(self, folder: Path) -> None:
        self.fit(folder / "model", 1)

    def inspect(self, folder: Path) -> str:
        found = ("old", "new")[load_model(folder / "model").card.seed]
        assert names(folder) == ["model", *(f"model/{name}" for name in names(folder / "model"))], names(folder)
        return found


class Predict(Case):
    """`neuboots predict --out` over an earlier file: the old file or the new one."""

    def prepare(self) -> None:
        write_table(self.shared / "table.csv", 120)
        command("fit", self.shared / "table.csv", "--target", "y", "--epochs", 1, "--out", self.shared / "model")
        write_table(self.shared / "rows.csv", 3000)
        self.run(self.shared)

    def start(self, folder: Path) -> None:
        (folder / "out.csv").write_text("old")

    def run(self, folder: Path) -> None:
        command("predict", self.shared / "model", self.shared / "rows.csv", "--out", folder / "out.csv")

    def inspect(self, folder: Path) -> str:
        text = (folder / "out.csv").read_text()
        if text == "old":
            return "old"
        assert text == (self.shared / "out.csv").read_text(), "incomplete"
        return "new"


class Reproduce(Case):
    """The run of a study as `neuboots reproduce` does it: finished jobs are kept, and no file is incomplete."""

    def run(self, folder: Path) -> None:
        run_squares(folder / "run", Squares(seeds=tuple(range(40))))

    def inspect(self, folder: Path) -> str:
        files = [file for file in folder.rglob("*.json") if not file.name.startswith(".")]
        for file in files:
            parse_json(file.read_bytes())
        jobs = sum(file.parent.name == "units" for file in files)
        return "all jobs" if jobs == 80 else "some jobs" if jobs else "no job"

    def verify(self, folder: Path, reference: Path) -> None:
        super().verify(folder, reference)
        found, expected = ((place / "run" / "rows" / "squares.json").read_bytes() for place in (folder, reference))
        assert found == expected, "other rows"


CASES: dict[str, type[Case]] = {"training": Training, "fit": Fit, "predict --out": Predict, "reproduce": Reproduce}


def kill_at(work: Callable[[], object], delay: float) -> bool:
    """Run a function in a fork and kill it after a delay; return whether it was still at work."""
    if (child := os.fork()) == 0:
        os._exit(run_quietly(work))
    time.sleep(max(0.0, delay))
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"it ended with the status {status}"
    return status != 0


def run_quietly(work: Callable[[], object]) -> int:
    try:
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def run_case(name: str, kills: int, root: Path, seed: int = 0) -> Counter[str]:
    """Kill the runs of a case at random moments; count what they left, and the failures."""
    rng, case = random.Random(seed), CASES[name](root / "shared")
    case.shared.mkdir(parents=True)
    case.prepare()
    reference = root / "reference"
    reference.mkdir()
    case.run(reference)  # also imports what the forks need
    begin = time.perf_counter()
    again = root / "timed"
    again.mkdir()
    case.start(again)
    assert run_in_fork(lambda: case.run(again)) == 0
    duration = time.perf_counter() - begin
    outcomes: Counter[str] = Counter()
    for k in range(kills):
        folder = root / f"kill-{k}"
        folder.mkdir()
        case.start(folder)
        delay = rng.uniform(0, duration)
        try:
            while not kill_at(lambda folder=folder: case.run(folder), delay):  # type: ignore[misc]
                case.verify(folder, reference)  # it was faster than the timed run
                shutil.rmtree(folder)
                folder.mkdir()
                case.start(folder)
                delay *= 0.8
            left = case.inspect(folder)
            assert run_in_fork(lambda folder=folder: case.run(folder)) == 0, "the next run failed"  # type: ignore[misc]
            case.verify(folder, reference)
            outcomes[left] += 1
        except Exception as error:
            outcomes[f"FAILED: {type(error).__name__}: {error}"[:300]] += 1
    return outcomes


def run_all(kills: int) -> bool:
    """Run all cases and print a table; return whether all kills were survived."""
    failed = False
    for name in CASES:
        with tempfile.TemporaryDirectory() as root:
            outcomes = run_case(name, kills, Path(root))
        failed = failed or any(outcome.startswith("FAILED") for outcome in outcomes)
        print(f"{name:15}", "; ".join(f"{count} × {what}" for what, count in sorted(outcomes.items())), flush=True)
    return not failed


if __name__ == "__main__":
    torch.set_num_threads(1)
    kills: Any = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    sys.exit(not run_all(kills))
