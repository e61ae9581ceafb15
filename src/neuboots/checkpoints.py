"""Checkpoints of a training run, written aside and renamed: the last good one is never lost."""

import json
import os
import shutil
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass
class Progress:
    """Where the run is: saved in every checkpoint."""

    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    best_loss: float = float("inf")
    waited: int = 0
    best: dict[str, Tensor] | None = None
    finished: bool = False


@dataclass(frozen=True)
class Keeper:
    """Writes checkpoints aside and renames them, so that the last good one is never lost."""

    fabric: "Fabric"
    folder: Path | None
    made_by: str  # what must not change between two runs that share a checkpoint
    net: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler

    @property
    def path(self) -> Path | None:
        return None if self.folder is None else Path(self.folder) / "checkpoint.ckpt"

    @property
    def advice(self) -> str:
        if self.path is None:
            return "training was interrupted; give a folder to be able to resume"
        return f"training was interrupted; the checkpoint is in {self.path.parent}: run again to resume"

    def save(self, at: Progress) -> None:
        if self.path is None:
            return
        aside = self.path.with_name(self.path.name + ".part")
        if self.fabric.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self.fabric.barrier()
        state = {
            "net": self.net,
            "optimizer": self.optimizer,
            "schedule": self.schedule.state_dict(),
            "at": dict(vars(at)),
            "made_by": self.made_by,
        }
        self.fabric.save(aside, state)
        self.fabric.barrier()
        if self.fabric.is_global_zero:
            if self.path.is_dir():  # a sharded checkpoint is a folder
                shutil.rmtree(self.path)
            os.replace(aside, self.path)
        self.fabric.barrier()

    def restore(self) -> Progress:
        if self.path is None:
            return Progress()
        self._try_folder(self.path.parent)
        if not self.path.exists():
            return Progress()
        state: dict[str, Any] = {"net": self.net, "optimizer": self.optimizer}
        try:
            rest = torch.load(self.path, map_location="cpu", weights_only=True) if self.path.is_file() else {}
        except Exception as error:
            raise ValueError(
                f"cannot read the checkpoint {self.path} ({type(error).__name__}); delete it to start anew"
            ) from error
        if not isinstance(rest, dict) or (self.path.is_file() and not {"made_by", "schedule", "at"} <= rest.keys()):
            raise ValueError(f"{self.path} is not a checkpoint of neuboots; delete it to start anew")
        self._check_maker(rest.get("made_by", self.made_by))
        left = self.fabric.load(self.path, state, strict=False, weights_only=True)
        self.schedule.load_state_dict(left["schedule"])
        return Progress(**left["at"])

    def _try_folder(self, folder: Path) -> None:
        """Say now, not after the first epoch, that nothing can be written there."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(folder, os.W_OK)
        except OSError:
            writable = False
        if not writable:
            raise ValueError(f"cannot write checkpoints to {folder}; expected a folder that can be made or written to")

    def _check_maker(self, made_by: str) -> None:
        mine, theirs = json.loads(self.made_by), json.loads(made_by)
        differing = [key for key in mine if mine[key] != theirs.get(key)]
        if differing:
            said = "; ".join(f"{key} was {theirs.get(key)}, is {mine[key]}" for key in differing)
            raise ValueError(
                f"the checkpoint {self.path} was made by another run ({said}): choose another folder, or delete it "
                "to start anew"
            )


def name_of(call: Any) -> str:
    """The name of a callable and the options that a partial fixes; no addresses, which change between runs."""
    if isinstance(call, partial):
        places = [name_of(value) if callable(value) else repr(value) for value in call.args]
        return " ".join([name_of(call.func), *places, str(sorted(call.keywords.items()))])
    return str(getattr(call, "__qualname__", type(call).__qualname__))


def identity_of(method: Any) -> str:
    """A method's name and options, the same in every process: what `train` writes into its checkpoints."""
    plain = (bool, int, float, str, nn.Module, type(None))
    options = {
        option.name: repr(value) if is_dataclass(value) or isinstance(value, plain) else name_of(value)
        for option in fields(method)
        for value in [getattr(method, option.name)]
    }
    return f"{type(method).__name__} {options}"
