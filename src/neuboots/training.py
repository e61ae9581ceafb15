"""Progress with the time left: one bar for everything that takes long.

Checkpoints of a training run, written aside and renamed: the last good one is never lost.

The one training loop (paper, Algorithm 1), on lightning-fabric.

    for t in 0 … T−1:  α⁽ᵗ⁾ ~ law;  θ ← θ − ρ ∇_θ 1/n Σᵢ α⁽ᵗ⁾_{u(i)} ℓ(g_θ(Xᵢ, α⁽ᵗ⁾), yᵢ)

The loop knows nothing of α: `objective_at(epoch)` gives the scalar to minimise. All randomness is a function
of (seed, epoch, row) or (seed, step), so a run resumed at any step goes on exactly as if never interrupted.
"""

import io
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset

from neuboots.loading import Batch, EnsembleLoader, EpochLoader, dataset_length, preserve_rng_state, seed_everything


@contextmanager
def progress_bar(
    title: str, total: int | None, *, enabled: bool = True, done: int = 0
) -> Iterator[Callable[[str], None]]:
    """Gives a function to call after each of `total` steps (None: unknown) with the text to stand before the bar.

    >>> with progress_bar("counting", 2, enabled=False) as step:
    ...     step("one")
    ...     step("two")
    """
    if not enabled:
        yield lambda text: None
        return
    from rich import get_console
    from rich import progress as rich

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeRemainingColumn(),
    )
    quiet = not get_console().is_terminal  # into a file or a pipe a bar would print blank lines
    period = float("inf")  # steps may take minutes, and rich forgets after half a minute
    with rich.Progress(*columns, transient=True, disable=quiet, speed_estimate_period=period) as progress:
        task = progress.add_task(title, total=total, completed=done)
        progress.advance(task, 0)  # from here time is taken, so that the first step tells how long the rest will be
        yield lambda text: progress.update(task, advance=1, description=text)


if TYPE_CHECKING:
    from lightning_fabric import Fabric


@dataclass
class TrainState:
    """Where the run is: saved in every checkpoint."""

    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    best_loss: float = float("inf")
    waited: int = 0
    best: dict[str, Tensor] | None = None
    finished: bool = False


@dataclass(frozen=True)
class CheckpointManager:
    """Writes checkpoints aside and renames them, so that the last good one is never lost."""

    fabric: "Fabric"
    folder: Path | None
    fingerprint: str  # what must not change between two runs that share a checkpoint
    net: nn.Module
    optimizer: Optimizer
    lr_scheduler: LRScheduler

    @property
    def path(self) -> Path | None:
        return None if self.folder is None else Path(self.folder) / "checkpoint.ckpt"

    @property
    def advice(self) -> str:
        if self.path is None:
            return "training was interrupted; give a folder to be able to resume"
        return f"training was interrupted; the checkpoint is in {self.path.parent}: run again to resume"

    def save(self, at: TrainState) -> None:
        if self.path is None:
            return
        aside = self.path.with_name(self.path.name + ".part")
        if self.fabric.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self.fabric.barrier()
        state = {
            "net": self.net,
            "optimizer": self.optimizer,
            "schedule": self.lr_scheduler.state_dict(),
            "at": dict(vars(at)),
            "made_by": self.fingerprint,
        }
        self.fabric.save(aside, state)
        self.fabric.barrier()
        if self.fabric.is_global_zero:
            if self.path.is_dir():  # a sharded checkpoint is a folder
                shutil.rmtree(self.path)
            os.replace(aside, self.path)
        self.fabric.barrier()

    def restore(self) -> TrainState:
        if self.path is None:
            return TrainState()
        self._try_folder(self.path.parent)
        if not self.path.exists():
            return TrainState()
        state: dict[str, Any] = {"net": self.net, "optimizer": self.optimizer}
        try:
            rest = torch.load(self.path, map_location="cpu", weights_only=True) if self.path.is_file() else {}
        except Exception as error:
            raise ValueError(
                f"cannot read the checkpoint {self.path} ({type(error).__name__}); delete it to start anew"
            ) from error
        if not isinstance(rest, dict) or (self.path.is_file() and not {"made_by", "schedule", "at"} <= rest.keys()):
            raise ValueError(f"{self.path} is not a checkpoint of neuboots; delete it to start anew")
        self._check_maker(rest.get("made_by", self.fingerprint))
        left = self.fabric.load(self.path, state, strict=False, weights_only=True)
        self.lr_scheduler.load_state_dict(left["schedule"])
        return TrainState(**left["at"])

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
        mine, theirs = json.loads(self.fingerprint), json.loads(made_by)
        differing = [key for key in mine if mine[key] != theirs.get(key)]
        if differing:
            said = "; ".join(f"{key} was {theirs.get(key)}, is {mine[key]}" for key in differing)
            raise ValueError(
                f"the checkpoint {self.path} was made by another run ({said}): choose another folder, or delete it "
                "to start anew"
            )


def describe_callable(call: Any) -> str:
    """The name of a callable and the options that a partial fixes; no addresses, which change between runs."""
    if isinstance(call, partial):
        places = [describe_callable(value) if callable(value) else repr(value) for value in call.args]
        return " ".join([describe_callable(call.func), *places, str(sorted(call.keywords.items()))])
    return str(getattr(call, "__qualname__", type(call).__qualname__))


def describe_method(method: Any) -> str:
    """A method's name and options, the same in every process: what `train` writes into its checkpoints."""
    plain = (bool, int, float, str, nn.Module, type(None))
    options = {
        option.name: repr(value) if is_dataclass(value) or isinstance(value, plain) else describe_callable(value)
        for option in fields(method)
        for value in [getattr(method, option.name)]
    }
    return f"{type(method).__name__} {options}"


if TYPE_CHECKING:
    from lightning_fabric import Fabric

Objective = Callable[[nn.Module, Batch], Tensor]
ValidationStep = Callable[[nn.Module, Batch], Mapping[str, Tensor]]
OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer, int], LRScheduler]


def cosine_schedule(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """From the first learning rate to zero along half a cosine, step by step (the paper's schedule)."""
    return CosineAnnealingLR(optimizer, max(1, total_steps))


def constant_schedule(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """The same learning rate throughout."""
    return LambdaLR(optimizer, lambda step: 1.0)


DEFAULT_OPTIMIZER: OptimizerFactory = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class TrainingConfig:
    """How to train: plain data. `optimizer` takes parameters, `schedule` an optimiser and the number of steps.

    >>> from functools import partial
    >>> config = TrainingConfig(epochs=3, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))

    `accelerator`, `devices`, `num_nodes`, `strategy` and `precision` go to lightning-fabric unchanged;
    `batch_size` counts the rows of all devices together. With a `folder`, checkpoints are written there and
    a run that was cut short goes on where it stopped. `on_epoch` is called with the figures of each epoch.
    """

    epochs: int = 30
    batch_size: int = 128
    optimizer: OptimizerFactory = DEFAULT_OPTIMIZER
    lr_scheduler: SchedulerFactory = cosine_schedule
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
        if not callable(self.lr_scheduler):
            raise ValueError(f"got schedule={self.lr_scheduler!r}; expected a function such as cosine or constant")


@dataclass(frozen=True)
class EpochReport:
    """What one epoch came to: the mean training loss and the validation figures."""

    epoch: int
    epochs: int
    loss: float
    val_metrics: dict[str, float]
    seconds: float
    title: str = ""  # which part of a longer training, such as "member 2/5"


def train(
    net: nn.Module,
    data: Dataset[Any],
    objective_at: Callable[[int], Objective],
    config: TrainingConfig,
    *,
    val_data: Dataset[Any] | None = None,
    validate: ValidationStep | None = None,
    identity: str = "",
    title: str = "",
    seeds: Sequence[int] | None = None,
) -> nn.Module:
    """Minimise objective_at(epoch)(net, batch) over the data; the net is trained in place and returned.

    Ctrl-C finishes the step and leaves a checkpoint. `validate_mean` gives figures of one validation batch; their
    means over `validation` are reported, and "loss" decides on early stopping (the best weights are restored).
    `identity` says what is trained: a checkpoint of something else is refused; `title` stands before the progress bar.
    With the seeds of K members a batch holds K batches, (K, N, …), each in the order of its own seed, and the objective
    is the sum over members, of which the mean is reported.
    """
    if val_data is not None and validate is None:
        raise ValueError("got validation data without validate; expected the function that gives its figures")
    if config.patience is not None and val_data is None:
        raise ValueError(f"got patience={config.patience} without validation data; expected validation=…")
    dataset_length(data)
    from lightning_fabric import Fabric

    fabric = Fabric(
        accelerator=config.accelerator,
        devices=config.devices,
        num_nodes=config.num_nodes,
        strategy=config.strategy,
        precision=config.precision,
    )
    if "spawn" in str(config.strategy):
        raise ValueError(
            f"got strategy={config.strategy!r}, whose processes cannot see your functions; expected 'ddp', which runs "
            "the script again for each device, or 'ddp_fork'"
        )
    members = None if seeds is None else tuple(seeds)
    job = _Job(net, data, objective_at, config, val_data, validate, identity, title, members, os.getpid())
    packed = fabric.launch(partial(_run, job))
    if packed is not None:  # a forked process trained a copy
        net.load_state_dict(torch.load(io.BytesIO(packed), weights_only=True))
    return net


@dataclass(frozen=True)
class _Job:
    net: nn.Module
    data: Dataset[Any]
    objective_at: Callable[[int], Objective]
    config: TrainingConfig
    val_data: Dataset[Any] | None
    validate: ValidationStep | None
    identity: str
    title: str
    seeds: tuple[int, ...] | None
    process: int  # the one that called train

    @property
    def fingerprint(self) -> str:
        """What must not change between two runs that share a checkpoint."""
        config = self.config
        identity = {
            "what": self.identity,
            "optimizer": describe_callable(config.optimizer),
            "schedule": describe_callable(config.lr_scheduler),
            "epochs": config.epochs,
            "batch_size": config.batch_size,
            "seed": config.seed,
            "clip_norm": config.clip_norm,
            "patience": config.patience,
            "steps_per_epoch": config.steps_per_epoch,
            "precision": str(config.precision),
            "rows": dataset_length(self.data),
            "seeds": None if self.seeds is None else list(self.seeds),
            "shapes": [list(p.shape) for p in self.net.parameters()],
        }
        return json.dumps(identity)

    def loader(self, fabric: "Fabric") -> EpochLoader | EnsembleLoader:
        config = self.config
        if self.seeds is not None:
            return EnsembleLoader(self.data, batch_size=config.batch_size, seeds=self.seeds)
        return EpochLoader(
            self.data,
            batch_size=config.batch_size,
            seed=config.seed,
            num_workers=config.num_workers,
            steps_per_epoch=config.steps_per_epoch,
            rank=fabric.global_rank,
            world=fabric.world_size,
        )


def _run(job: _Job, fabric: "Fabric") -> bytes | None:
    """Train the job's net in place; a process other than the caller's gives the weights back as bytes."""
    config = job.config
    loader = job.loader(fabric)
    net = fabric.setup_module(job.net)
    learned = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if not learned:
        raise ValueError("the net has no parameters to train; expected at least one with requires_grad")
    inner = config.optimizer(learned)
    schedule = config.lr_scheduler(inner, config.epochs * loader.steps)
    if isinstance(schedule, ReduceLROnPlateau):
        raise ValueError(
            "got ReduceLROnPlateau, which waits for a figure; expected a schedule that goes by steps alone"
        )
    optimizer = cast(Optimizer, fabric.setup_optimizers(inner))
    keeper = CheckpointManager(fabric, config.folder, job.fingerprint, net, optimizer, schedule)
    at = keeper.restore()
    shown = config.progress and fabric.is_global_zero
    total, done = config.epochs * loader.steps, at.epoch * loader.steps + at.step
    with (
        preserve_rng_state(),
        _interruptible() as stop,
        progress_bar("training", total, enabled=shown, done=done) as advance,
    ):
        while at.epoch < config.epochs and not at.finished:
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
                value /= len(job.seeds or (config.seed,))
                at.step, at.loss_sum = k + 1, at.loss_sum + value
                advance(f"{job.title}  epoch {at.epoch + 1}/{config.epochs}  loss {value:.4f}".strip())
                if _anyone(fabric, stop.asked):
                    keeper.save(at)
                    raise KeyboardInterrupt(keeper.advice)
                if config.checkpoint_steps and (batch.step + 1) % config.checkpoint_steps == 0:
                    keeper.save(at)
            report = _close_epoch(fabric, job, net, at, time.monotonic() - began)
            keeper.save(at)
            if config.on_epoch is not None and fabric.is_global_zero:
                config.on_epoch(report)
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
        seed_everything(job.config.seed, "step", number, fabric.global_rank)
        optimizer.zero_grad()
        loss = objective() * share
        fabric.backward(loss)
        if job.config.clip_norm is not None:
            fabric.clip_gradients(net, optimizer, max_norm=job.config.clip_norm, error_if_nonfinite=False)
        return loss.detach()

    if isinstance(optimizer, torch.optim.LBFGS):  # evaluates the loss several times in a step
        return float(cast(Any, optimizer).step(closure))
    value = float(closure())
    if np.isfinite(value):
        optimizer.step()
    return value


def _close_epoch(fabric: "Fabric", job: _Job, net: nn.Module, at: TrainState, seconds: float) -> EpochReport:
    figures = _validation_figures(fabric, job, net)
    loss = at.loss_sum / max(1, at.step)
    if fabric.world_size > 1:  # each rank has seen its own rows
        loss = float(cast(Tensor, fabric.all_reduce(torch.tensor(loss, device=fabric.device), reduce_op="mean")))
    report = EpochReport(at.epoch, job.config.epochs, loss, figures, seconds, job.title)
    at.epoch, at.step, at.loss_sum = at.epoch + 1, 0, 0.0
    if job.config.patience is not None:
        if figures["loss"] < at.best_loss:
            at.best_loss, at.waited = figures["loss"], 0
            at.best = {name: value.detach().cpu().clone() for name, value in net.state_dict().items()}
        else:
            at.waited += 1
        at.finished = at.waited >= job.config.patience
    return report


def _validation_figures(fabric: "Fabric", job: _Job, net: nn.Module) -> dict[str, float]:
    if job.val_data is None or job.validate is None:
        return {}
    config = job.config
    loader = EpochLoader(
        job.val_data,
        batch_size=config.batch_size,
        seed=config.seed,
        shuffle=False,
        num_workers=config.num_workers,
        steps_per_epoch=config.steps_per_epoch,
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


def initialize_model(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """model() with initial weights governed by the seed alone."""
    if isinstance(model, nn.Module):
        raise ValueError("got a net; expected a function that makes one, called once: give `lambda: net`")
    with preserve_rng_state():
        seed_everything(seed, "init")
        net = model()
    if not isinstance(net, nn.Module):
        raise ValueError(f"make_net() gave a {type(net).__name__}; expected an nn.Module")
    return net
