"""The one training loop (paper, Algorithm 1), on lightning-fabric.

    for t in 0 … T−1:  α⁽ᵗ⁾ ~ law;  θ ← θ − ρ ∇_θ 1/n Σᵢ α⁽ᵗ⁾_{u(i)} ℓ(g_θ(Xᵢ, α⁽ᵗ⁾), yᵢ)

The loop knows nothing of α: `objective_at(epoch)` gives the scalar to minimise. All randomness is a function
of (seed, epoch, row) or (seed, step), so a run resumed at any step goes on exactly as if never interrupted.
"""

import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset

from neuboots.batches import Batch, Loader, MemberLoader, own_randomness, seed_everything, size_of
from neuboots.checkpoints import Keeper, Progress, name_of
from neuboots.progress import bar

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Objective = Callable[[nn.Module, Batch], Tensor]
Validate = Callable[[nn.Module, Batch], Mapping[str, Tensor]]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
MakeSchedule = Callable[[Optimizer, int], LRScheduler]


def cosine(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """From the first learning rate to zero along half a cosine, step by step (the paper's schedule)."""
    return CosineAnnealingLR(optimizer, max(1, total_steps))


def constant(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """The same learning rate throughout."""
    return LambdaLR(optimizer, lambda step: 1.0)


ADAMW: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class Recipe:
    """How to train: plain data. `optimizer` takes parameters, `schedule` an optimiser and the number of steps.

    >>> from functools import partial
    >>> recipe = Recipe(epochs=3, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))

    `accelerator`, `devices`, `num_nodes`, `strategy` and `precision` go to lightning-fabric unchanged;
    `batch_size` counts the rows of all devices together. With a `folder`, checkpoints are written there and
    a run that was cut short goes on where it stopped. `on_epoch` is called with the figures of each epoch.
    """

    epochs: int = 30
    batch_size: int = 128
    optimizer: MakeOptimizer = ADAMW
    schedule: MakeSchedule = cosine
    seed: int = 0
    clip_norm: float | None = None
    patience: int | None = None  # epochs without a better validation loss before stopping
    checkpoint_steps: int | None = None  # between checkpoints; None: at the end of each epoch
    steps_per_epoch: int | None = None  # for streams, whose length is unknown
    num_workers: int = 0
    accelerator: str = "auto"
    devices: int | str | list[int] = 1
    num_nodes: int = 1
    strategy: Any = "auto"
    precision: Any = "32-true"
    folder: Path | None = None
    on_epoch: "Callable[[EpochReport], None] | None" = None
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "patience", "checkpoint_steps", "steps_per_epoch"):
            value = getattr(self, name)
            missing = value is None and name not in ("epochs", "batch_size")
            if not missing and (not isinstance(value, int) or value < 1):
                raise ValueError(f"got {name}={value!r}; expected at least 1, and a whole number")
        if self.clip_norm is not None and not 0 < self.clip_norm < float("inf"):
            raise ValueError(f"got clip_norm={self.clip_norm}; expected a positive number or None")
        if isinstance(self.optimizer, Optimizer) or not callable(self.optimizer):
            raise ValueError(
                f"got optimizer={self.optimizer!r}; expected a function of the parameters, such as "
                "functools.partial(torch.optim.SGD, lr=0.1)"
            )
        if not callable(self.schedule):
            raise ValueError(f"got schedule={self.schedule!r}; expected a function such as cosine or constant")


@dataclass(frozen=True)
class EpochReport:
    """What one epoch came to: the mean training loss and the validation figures."""

    epoch: int
    epochs: int
    loss: float
    validation: dict[str, float]
    seconds: float
    title: str = ""  # which part of a longer training, such as "member 2/5"


def train(
    net: nn.Module,
    data: Dataset[Any],
    objective_at: Callable[[int], Objective],
    recipe: Recipe,
    *,
    validation: Dataset[Any] | None = None,
    validate: Validate | None = None,
    identity: str = "",
    title: str = "",
    seeds: Sequence[int] | None = None,
) -> nn.Module:
    """Minimise objective_at(epoch)(net, batch) over the data; the net is trained in place and returned.

    Ctrl-C finishes the step and leaves a checkpoint. `validate` gives figures of one validation batch; their
    means over `validation` are reported, and "loss" decides on early stopping (the best weights are restored).
    `identity` says what is trained: a checkpoint of something else is refused; `title` stands before the progress bar.
    With the seeds of K members a batch holds K batches, (K, N, …), each in the order of its own seed, and the objective
    is the sum over members, of which the mean is reported.
    """
    if validation is not None and validate is None:
        raise ValueError("got validation data without validate; expected the function that gives its figures")
    if recipe.patience is not None and validation is None:
        raise ValueError(f"got patience={recipe.patience} without validation data; expected validation=…")
    size_of(data)
    from lightning_fabric import Fabric

    fabric = Fabric(
        accelerator=recipe.accelerator,
        devices=recipe.devices,
        num_nodes=recipe.num_nodes,
        strategy=recipe.strategy,
        precision=recipe.precision,
    )
    if "spawn" in str(recipe.strategy):
        raise ValueError(
            f"got strategy={recipe.strategy!r}, whose processes cannot see your functions; expected 'ddp', which runs "
            "the script again for each device, or 'ddp_fork'"
        )
    members = None if seeds is None else tuple(seeds)
    job = _Job(net, data, objective_at, recipe, validation, validate, identity, title, members, os.getpid())
    packed = fabric.launch(partial(_run, job))
    if packed is not None:  # a forked process trained a copy
        net.load_state_dict(torch.load(io.BytesIO(packed), weights_only=True))
    return net


@dataclass(frozen=True)
class _Job:
    net: nn.Module
    data: Dataset[Any]
    objective_at: Callable[[int], Objective]
    recipe: Recipe
    validation: Dataset[Any] | None
    validate: Validate | None
    identity: str
    title: str
    seeds: tuple[int, ...] | None
    process: int  # the one that called train

    @property
    def made_by(self) -> str:
        """What must not change between two runs that share a checkpoint."""
        recipe = self.recipe
        identity = {
            "what": self.identity,
            "optimizer": name_of(recipe.optimizer),
            "schedule": name_of(recipe.schedule),
            "epochs": recipe.epochs,
            "batch_size": recipe.batch_size,
            "seed": recipe.seed,
            "clip_norm": recipe.clip_norm,
            "patience": recipe.patience,
            "steps_per_epoch": recipe.steps_per_epoch,
            "precision": str(recipe.precision),
            "rows": size_of(self.data),
            "seeds": None if self.seeds is None else list(self.seeds),
            "shapes": [list(p.shape) for p in self.net.parameters()],
        }
        return json.dumps(identity)

    def loader(self, fabric: "Fabric") -> Loader | MemberLoader:
        recipe = self.recipe
        if self.seeds is not None:
            return MemberLoader(self.data, batch_size=recipe.batch_size, seeds=self.seeds)
        return Loader(
            self.data,
            batch_size=recipe.batch_size,
            seed=recipe.seed,
            num_workers=recipe.num_workers,
            steps_per_epoch=recipe.steps_per_epoch,
            rank=fabric.global_rank,
            world=fabric.world_size,
        )


def _run(job: _Job, fabric: "Fabric") -> bytes | None:
    """Train the job's net in place; a process other than the caller's gives the weights back as bytes."""
    recipe = job.recipe
    loader = job.loader(fabric)
    net = fabric.setup_module(job.net)
    learned = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if not learned:
        raise ValueError("the net has no parameters to train; expected at least one with requires_grad")
    inner = recipe.optimizer(learned)
    schedule = recipe.schedule(inner, recipe.epochs * loader.steps)
    if isinstance(schedule, ReduceLROnPlateau):
        raise ValueError(
            "got ReduceLROnPlateau, which waits for a figure; expected a schedule that goes by steps alone"
        )
    optimizer = cast(Optimizer, fabric.setup_optimizers(inner))
    keeper = Keeper(fabric, recipe.folder, job.made_by, net, optimizer, schedule)
    at = keeper.restore()
    shown = recipe.progress and fabric.is_global_zero
    total, done = recipe.epochs * loader.steps, at.epoch * loader.steps + at.step
    with own_randomness(), _interruptible() as stop, bar("training", total, show=shown, done=done) as advance:
        while at.epoch < recipe.epochs and not at.finished:
            began = time.monotonic()
            objective = job.objective_at(at.epoch)
            net.train()
            for k, batch, share in loader.epoch(at.epoch, at.step):
                moved = Batch(fabric.to_device(batch.x), fabric.to_device(batch.y), batch.index, batch.step)
                value = _step(fabric, job, net, optimizer, partial(objective, net, moved), batch.step, share)
                if not np.isfinite(value):
                    raise FloatingPointError(
                        f"the loss became {value} in epoch {at.epoch + 1}, step {k + 1}: look for NaN in the data, "
                        "lower the learning rate, or clip gradients (Recipe(clip_norm=1.0))"
                    )
                schedule.step()
                value /= len(job.seeds or (recipe.seed,))
                at.step, at.loss_sum = k + 1, at.loss_sum + value
                advance(f"{job.title}  epoch {at.epoch + 1}/{recipe.epochs}  loss {value:.4f}".strip())
                if _anyone(fabric, stop.asked):
                    keeper.save(at)
                    raise KeyboardInterrupt(keeper.advice)
                if recipe.checkpoint_steps and (batch.step + 1) % recipe.checkpoint_steps == 0:
                    keeper.save(at)
            report = _close_epoch(fabric, job, net, at, time.monotonic() - began)
            keeper.save(at)
            if recipe.on_epoch is not None and fabric.is_global_zero:
                recipe.on_epoch(report)
    if at.best is not None:
        net.load_state_dict(at.best)
    if os.getpid() == job.process:
        return None
    file = io.BytesIO()
    torch.save(job.net.state_dict(), file)
    return file.getvalue()


def _step(
    fabric: "Fabric",
    job: _Job,
    net: nn.Module,
    optimizer: Optimizer,
    objective: Callable[[], Tensor],
    number: int,
    share: float,
) -> float:
    """One step; its loss. The optimiser does not step on a loss that is not finite (LBFGS judges for itself)."""

    def closure() -> Tensor:
        seed_everything(job.recipe.seed, "step", number, fabric.global_rank)
        optimizer.zero_grad()
        loss = objective() * share
        fabric.backward(loss)
        if job.recipe.clip_norm is not None:
            fabric.clip_gradients(net, optimizer, max_norm=job.recipe.clip_norm, error_if_nonfinite=False)
        return loss.detach()

    if isinstance(optimizer, torch.optim.LBFGS):  # evaluates the loss several times in a step
        return float(cast(Any, optimizer).step(closure))
    value = float(closure())
    if np.isfinite(value):
        optimizer.step()
    return value


def _close_epoch(fabric: "Fabric", job: _Job, net: nn.Module, at: Progress, seconds: float) -> EpochReport:
    figures = _validation_figures(fabric, job, net)
    loss = at.loss_sum / max(1, at.step)
    if fabric.world_size > 1:  # each rank has seen its own rows
        loss = float(cast(Tensor, fabric.all_reduce(torch.tensor(loss, device=fabric.device), reduce_op="mean")))
    report = EpochReport(at.epoch, job.recipe.epochs, loss, figures, seconds, job.title)
    at.epoch, at.step, at.loss_sum = at.epoch + 1, 0, 0.0
    if job.recipe.patience is not None:
        if figures["loss"] < at.best_loss:
            at.best_loss, at.waited = figures["loss"], 0
            at.best = {name: value.detach().cpu().clone() for name, value in net.state_dict().items()}
        else:
            at.waited += 1
        at.finished = at.waited >= job.recipe.patience
    return report


def _validation_figures(fabric: "Fabric", job: _Job, net: nn.Module) -> dict[str, float]:
    if job.validation is None or job.validate is None:
        return {}
    recipe = job.recipe
    loader = Loader(
        job.validation,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        shuffle=False,
        num_workers=recipe.num_workers,
        steps_per_epoch=recipe.steps_per_epoch,
    )
    sums: dict[str, float] = {}
    rows = 0
    net.eval()
    with torch.no_grad():
        for _, batch, _ in loader.epoch(0):
            moved = Batch(fabric.to_device(batch.x), fabric.to_device(batch.y), batch.index)
            for name, value in job.validate(net, moved).items():
                sums[name] = sums.get(name, 0.0) + float(value) * len(batch.index)
            rows += len(batch.index)
    if rows == 0:
        raise ValueError("got an empty validation set; expected at least one row")
    return {name: total / rows for name, total in sums.items()}


# -- interruption, progress, first weights ----------------------------------------------------------------


@dataclass
class _Stop:
    asked: bool = False


@contextmanager
def _interruptible() -> Iterator[_Stop]:
    """The first Ctrl-C asks for a stop after this step; the second stops at once."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(signum: int, frame: Any) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _anyone(fabric: "Fabric", asked: bool) -> bool:
    """Whether any rank was asked to stop: all must stop at the same step."""
    if fabric.world_size == 1:
        return asked
    votes = fabric.all_reduce(torch.tensor(float(asked), device=fabric.device), reduce_op="sum")
    return bool(votes)


def make_seeded(make_net: Callable[[], nn.Module], seed: int) -> nn.Module:
    """make_net() with initial weights governed by the seed alone."""
    if isinstance(make_net, nn.Module):
        raise ValueError("got a net; expected a function that makes one, called once: give `lambda: net`")
    with own_randomness():
        seed_everything(seed, "init")
        net = make_net()
    if not isinstance(net, nn.Module):
        raise ValueError(f"make_net() gave a {type(net).__name__}; expected an nn.Module")
    return net
