"""Measurement of ratios of times on a machine with other load, and rows of the table of benchmarks.

    ratio(a, b) = (shared + own_a) / (shared + own_b)

The time of a run varies by 5 % to 100 % from one minute to the next, so that a bound of 3 % cannot be checked on
complete runs. But the compared runs share nearly all their work, the same layers on the same inputs. The shared part
and the rest are timed separately; each is the minimum of several interleaved runs, and the shared part the minimum of
all runs. The ratio of complete runs is reported too, and would reveal a difference of the shared parts.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
SEED = 0


@dataclass(frozen=True)
class Parts:
    """Seconds of one run: the part shared with the other runs, and the rest."""

    shared: float
    own: float

    @property
    def whole(self) -> float:
        return self.shared + self.own


Runner = Callable[[], Parts]


@dataclass
class Watch:
    """Stopwatch that sums the seconds between start and stop."""

    clock: Callable[[], float] = time.perf_counter
    seconds: float = 0.0
    started: float = 0.0

    def start(self) -> None:
        self.started = self.clock()

    def stop(self) -> None:
        self.seconds += self.clock() - self.started

    def timed(self, run: Callable[[], Any]) -> Runner:
        """Runner of `run`; the time between start and stop is shared."""

        def runner() -> Parts:
            self.seconds = 0.0
            started = self.clock()
            run()
            whole = self.clock() - started
            return Parts(self.seconds, whole - self.seconds)

        return runner


class Watched(nn.Module):
    """Layers whose passes are timed as shared work: forward, and backward until the optimizer step.

    Passes in the other mode (training or evaluation) are not counted, such as the one that finds the head of a net.
    """

    def __init__(self, layers: nn.Module, watch: Watch, *, training: bool) -> None:
        super().__init__()
        self.layers, self.watch, self.counted = layers, watch, training

    def forward(self, x: Tensor) -> Tensor:
        if self.training != self.counted:
            return self.layers(x)
        self.watch.start()
        out: Tensor = self.layers(x)
        self.watch.stop()
        if out.requires_grad:  # called after the backward pass of the later layers
            out.register_hook(lambda grad: self.watch.start())
        return out


def stop_after_step(optimizer: torch.optim.Optimizer, watch: Watch) -> torch.optim.Optimizer:
    """Stop the watch after each step of the optimizer, and return it."""
    optimizer.register_step_post_hook(lambda *_: watch.stop())
    return optimizer


@dataclass
class Series:
    """Runs of each runner."""

    runs: dict[str, list[Parts]] = field(default_factory=dict)

    def ratio(self, name: str, other: str) -> float:
        shared = min(part.shared for parts in self.runs.values() for part in parts)
        mine, theirs = (min(part.own for part in self.runs[key]) for key in (name, other))
        return (shared + mine) / (shared + theirs)

    def whole_ratio(self, name: str, other: str) -> float:
        mine, theirs = (min(part.whole for part in self.runs[key]) for key in (name, other))
        return mine / theirs


def interleave(runners: Mapping[str, Runner], repeats: int) -> Series:
    """Run each runner once as a warm-up, then in `repeats` rounds of different order."""
    for run in runners.values():
        run()
    series = Series({name: [] for name in runners})
    names = list(runners)
    for i in range(repeats):
        rotated = names[i % len(names) :] + names[: i % len(names)]
        for name in rotated if i % 2 == 0 else reversed(rotated):
            series.runs[name].append(runners[name]())
    return series


@dataclass(frozen=True)
class Row:
    """A ratio and its bound; a row without a bound is for comparison."""

    name: str
    ratio: float
    at_most: float | None = None
    at_least: float | None = None
    whole_runs: float | None = None  # ratio of complete runs
    note: str = ""

    @property
    def holds(self) -> bool | None:
        if self.at_most is not None:
            return self.ratio <= self.at_most
        return None if self.at_least is None else self.ratio >= self.at_least

    @property
    def bound(self) -> str:
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return "" if self.at_least is None else f"≥ {self.at_least:g}"


@dataclass(frozen=True)
class Scale:
    """Number of repeats; quick sizes only test the benchmarks."""

    repeats: int
    quick: bool = False


def compare_runs(series: Series, other: str, name: str, label: str, at_most: float | None = None) -> Row:
    return Row(label, series.ratio(name, other), at_most=at_most, whole_runs=series.whole_ratio(name, other))


def run_python(*args: str, env: Mapping[str, str] | None = None) -> list[float]:
    """Numbers printed by `python *args` in a new process."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # of this process
    command = [sys.executable, *args]
    out = subprocess.run(command, cwd=ROOT, env=inherited | dict(env or {}), check=True, stdout=subprocess.PIPE)
    return [float(word) for word in out.stdout.split()]
