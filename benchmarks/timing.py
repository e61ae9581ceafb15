"""Ratios of times on a machine that is not quiet.

    ratio(a, b) = (shared + own_a) / (shared + own_b)

A bound of 3 % cannot be read off whole runs where the same run takes 5 % more or 100 % more from one minute
to the next. But the runs that are compared share nearly all their work, the same layers on the same inputs: a
watch times that part and the rest apart, every figure is the best of several interleaved runs, and the
shared part is the best of all runs. Beside it stands the ratio of whole runs, best of several, which would
show if the shared part were not the same after all.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Parts:
    """Seconds of one run: what it shares with the runs it is compared with, and the rest."""

    shared: float
    own: float

    @property
    def whole(self) -> float:
        return self.shared + self.own


Runner = Callable[[], Parts]


@dataclass
class Watch:
    """Adds up the seconds between start and stop."""

    clock: Callable[[], float] = time.perf_counter
    seconds: float = 0.0
    began: float = 0.0

    def start(self) -> None:
        self.began = self.clock()

    def stop(self) -> None:
        self.seconds += self.clock() - self.began

    def timed(self, run: Callable[[], Any]) -> Runner:
        """A runner of `run`: what happens between start and stop is shared."""

        def runner() -> Parts:
            self.seconds = 0.0
            began = self.clock()
            run()
            whole = self.clock() - began
            return Parts(self.seconds, whole - self.seconds)

        return runner


class Watched(nn.Module):
    """Layers whose passes are timed as shared work: forward, and backward until the optimiser has stepped.

    Passes in the other mode (training or evaluation) are not counted: before it trains, a net is run once in
    evaluation mode to find its head, and that is set-up.
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
        if out.requires_grad:  # the gradient arrives here once everything after these layers is done
            out.register_hook(lambda grad: self.watch.start())
        return out


def stopping(optimizer: torch.optim.Optimizer, watch: Watch) -> torch.optim.Optimizer:
    """The optimiser, ending the shared part of each training step."""
    optimizer.register_step_post_hook(lambda *_: watch.stop())
    return optimizer


@dataclass
class Series:
    """The runs of each runner."""

    runs: dict[str, list[Parts]] = field(default_factory=dict)

    def ratio(self, name: str, other: str) -> float:
        shared = min(part.shared for parts in self.runs.values() for part in parts)
        mine, theirs = (min(part.own for part in self.runs[key]) for key in (name, other))
        return (shared + mine) / (shared + theirs)

    def whole_ratio(self, name: str, other: str) -> float:
        mine, theirs = (min(part.whole for part in self.runs[key]) for key in (name, other))
        return mine / theirs


def interleave(runners: Mapping[str, Runner], repeats: int) -> Series:
    """Every runner once to warm up, then `repeats` rounds, each in another order."""
    for run in runners.values():
        run()
    series = Series({name: [] for name in runners})
    names = list(runners)
    for i in range(repeats):
        turned = names[i % len(names) :] + names[: i % len(names)]
        for name in turned if i % 2 == 0 else reversed(turned):
            series.runs[name].append(runners[name]())
    return series
