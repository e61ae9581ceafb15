"""Checkpoints of an interrupted training, damaged or of another run: the result is that of one run, or an error."""

import os
import pickle
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from neuboots import DeepEnsemble, NeuBoots, TrainingConfig
from neuboots.nets import MLP

from .driver import CORRECT, Area, Failure, Workspace
from .models import VALUES, _paths, _RunsCode


class Run(NamedTuple):
    """An interrupted run: how it continues, its folder, and the outputs of a run that was not interrupted."""

    fit: Any
    folder: Path
    truth: Tensor


X = torch.linspace(-2, 2, 12).reshape(3, 4)


class _StopError(Exception):
    pass


def _stop(report: Any) -> None:
    if report.epoch == 0:
        raise _StopError


def make_data(seed: int) -> tuple[Tensor, Tensor]:
    """Rows and classes."""
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


def fit(method: str, config: TrainingConfig, seed: int, hidden: int, folder: Path | None, stop: bool = False) -> Tensor:
    """Train, from a checkpoint if the folder has one, and return outputs."""
    created: Any = NeuBoots(num_blocks=8) if method == "neuboots" else DeepEnsemble(num_members=2)
    config = replace(config, folder=folder, on_epoch=_stop if stop else None)
    net = partial(MLP, 4, 2, widths=(hidden,))
    samples: Tensor = created.fit(net, make_data(seed), config).predict(X, 3).samples
    return samples


def prepare(folder: Path) -> list[Run]:
    """Interrupt a run of each kind after its first epoch."""
    runs = []
    config = TrainingConfig(epochs=2, batch_size=12, progress=False)
    for method in ("neuboots", "ensemble"):
        place = folder / method
        place.mkdir(parents=True)
        continued = partial(fit, method, config)
        try:
            continued(0, 8, place, stop=True)
        except _StopError:
            runs.append(Run(continued, place, continued(0, 8, None)))
    return runs


@dataclass(frozen=True)
class CheckpointCase:
    """Damage of a checkpoint folder."""

    which: int
    damage: str
    at: int
    value: int


DAMAGE = ("none", "flip", "flip", "flip", "truncate", "append", "empty", "pickle", "torch pickle",
          "folder", "fifo", "link loop", "other data", "other targets", "other net", "value", "value", "value",
          "tensor", "tensor", "swap", "extra file", "part")  # fmt: skip
CASES = st.builds(
    CheckpointCase,
    which=st.integers(0, 1),
    damage=st.sampled_from(DAMAGE),
    at=st.integers(0, 1 << 20),
    value=st.integers(0, 1 << 16),
)


def run(prepared: list[Run], case: CheckpointCase, workspace: Workspace) -> str:
    """Damage a copy of the folder and continue the run."""
    chosen = prepared[case.which]
    folder = workspace.inputs / "run"
    shutil.copytree(chosen.folder, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    _damage(files[case.at % len(files)], files, prepared, case, workspace)
    seed, hidden = (1 if case.damage == "other data" else 0), (9 if case.damage == "other net" else 8)
    present = {*folder.rglob("*")}
    with workspace.guard(inputs_may_change=True):
        found = chosen.fit(seed, hidden, folder)
    truth = chosen.truth
    if case.damage in ("other data", "other net"):  # accepted only if it was trained anew
        truth = chosen.fit(seed, hidden, None)
    crafted = case.damage in ("value", "tensor") and bool(found.isfinite().all())  # as valid as any other run
    if not torch.equal(found, truth) and not crafted:
        raise Failure("wrong answer", f"a run that continued from a checkpoint ({case.damage}) has another result")
    if left := {*folder.rglob("*")} - present:
        raise Failure("leftovers", ", ".join(path.name for path in left))
    return CORRECT


def _damage(file: Path, files: list[Path], prepared: list[Run], case: CheckpointCase, workspace: Workspace) -> None:
    content, damage = file.read_bytes(), case.damage
    at = case.at % len(content)
    if damage in ("flip", "truncate", "append", "empty", "pickle"):
        file.write_bytes({
            "flip": content[:at] + bytes([content[at] ^ (1 << case.value % 8)]) + content[at + 1 :],
            "truncate": content[:at],
            "append": content + b"x" * 100,
            "empty": b"",
            "pickle": pickle.dumps(_RunsCode(workspace.canary)),
        }[damage])  # fmt: skip
    elif damage == "torch pickle":
        torch.save({"net": _RunsCode(workspace.canary), "fingerprint": {}}, file)
    elif damage in ("folder", "fifo", "link loop"):
        file.unlink()
        {"folder": os.mkdir, "fifo": os.mkfifo, "link loop": lambda path: os.symlink(path, path)}[damage](file)
    elif damage in ("extra file", "part"):
        file.with_name(file.name + ".part" if damage == "part" else "\x1b[31mnotes").write_bytes(content[: at + 1])
    elif damage == "swap":
        other = prepared[1 - case.which].folder
        found = sorted(path for path in other.rglob("*") if path.is_file())
        shutil.copyfile(found[case.value % len(found)], file)
    elif damage in ("value", "tensor"):
        try:
            stored = torch.load(file, weights_only=True)
        except Exception:  # a file of another format
            file.write_bytes(content[:at])
            return
        paths = [path for path in _paths(stored) if isinstance(_get(stored, path), Tensor) == (damage == "tensor")]
        path = paths[case.at % len(paths)]
        parent, old = _get(stored, path[:-1]), _get(stored, path)
        if damage == "value":
            parent[path[-1]] = VALUES[case.value % len(VALUES)]
        else:
            changed = old.clone().double() if case.value % 5 == 0 else old.clone().flatten()[:1]
            parent[path[-1]] = (changed, changed, old[None], old * float("nan"), "x")[case.value % 5]
        torch.save(stored, file)


def _get(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


AREA = Area("checkpoints", 0.07, prepare, lambda prepared: CASES, run)
