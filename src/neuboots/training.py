"""The training loop of every method (paper, Algorithm 1), on one CPU, or by lightning-fabric on other devices.

    for t in 0 … T−1:  α⁽ᵗ⁾ ~ P;  θ ← θ − ρ ∇_θ 1/n Σᵢ α⁽ᵗ⁾_{u(i)} ℓ(g_θ(Xᵢ, α⁽ᵗ⁾), yᵢ)

The loop does not know α: `objective_at(epoch)` returns the scalar to minimise. All randomness is a function of
(seed, epoch, example) or (seed, step), so that a resumed run ends bit for bit where an uninterrupted one does.
"""

import copy
import io
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_map_only
from torch.utils.data import BatchSampler, DataLoader, Dataset

from neuboots._fingerprint import NO_EFFECT, describe, describe_data, digest, find_differences
from neuboots._validation import ArgumentError, check_int, check_memory, check_positive, escape_text
from neuboots.head import compute_output, copy_net, eval_mode, has_lazy_layers, load_example, unwrap_model
from neuboots.loading import (
    Batch,
    EnsembleLoader,
    EpochLoader,
    FitData,
    as_dataset,
    check_length,
    dataset_length,
    preserve_rng_state,
    seed_everything,
)
from neuboots.losses import BrierLoss, Loss, as_loss, has_independent_outputs, valid_mask, weighted_mean
from neuboots.prediction import Predictor, class_probabilities
from neuboots.weights import DRAW_BYTES

P = TypeVar("P", bound=Predictor)
T = TypeVar("T")

ModelFactory = Callable[[], nn.Module]
Objective = Callable[[nn.Module, Batch], Tensor]
ValidationStep = Callable[[nn.Module, Batch], Mapping[str, Tensor]]
OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer, int], LRScheduler]


# -- configuration -------------------------------------------------------------------------------------


def cosine_schedule(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Anneal the learning rate to zero along half a cosine, step by step (the paper's schedule).

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the run.

    Returns:
        The scheduler.
    """
    return CosineAnnealingLR(optimizer, max(1, total_steps))


def constant_schedule(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Keep the learning rate constant.

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the run.

    Returns:
        The scheduler.
    """
    return LambdaLR(optimizer, lambda step: 1.0)


DEFAULT_OPTIMIZER: OptimizerFactory = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class TrainingConfig:
    """Options of a training run.

    Args:
        epochs: Number of passes over the training data.
        batch_size: Number of examples in a batch, over all devices together.
        optimizer: Function of the parameters that returns an optimizer.
        lr_scheduler: Function of the optimizer and the number of steps that returns a scheduler, stepped once a step.
        seed: Seed of everything random.
        clip_norm: Maximum norm of the gradient; None: no clipping.
        patience: Number of epochs without a lower validation loss after which training stops; the best weights are
            restored. None: no early stopping.
        checkpoint_steps: Number of steps between checkpoints; None: one at the end of each epoch.
        steps_per_epoch: Number of batches of an iterable data set that make an epoch.
        num_workers: Number of worker processes that load data.
        accelerator: Passed to `lightning_fabric.Fabric`, as the next four.
        devices: Number or list of devices.
        num_nodes: Number of machines.
        strategy: Strategy of data parallelism.
        precision: Numerical precision.
        folder: Folder of checkpoints, from which an interrupted run resumes; None: no checkpoints.
        on_epoch: Function called with an `EpochReport` after each epoch.
        progress: Whether to show a progress bar.

    Raises:
        ArgumentError: If an option has a value that is not accepted.

    Example:
        >>> from functools import partial
        >>> TrainingConfig(epochs=3, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)).batch_size
        128
    """

    epochs: int = 30
    batch_size: int = 128
    optimizer: OptimizerFactory = DEFAULT_OPTIMIZER
    lr_scheduler: SchedulerFactory = cosine_schedule
    seed: int = 0
    clip_norm: float | None = None
    patience: int | None = None
    checkpoint_steps: int | None = field(default=None, metadata=NO_EFFECT)
    steps_per_epoch: int | None = None
    num_workers: int = field(default=0, metadata=NO_EFFECT)
    accelerator: str = field(default="auto", metadata=NO_EFFECT)
    devices: int | str | list[int] = field(default=1, metadata=NO_EFFECT)
    num_nodes: int = field(default=1, metadata=NO_EFFECT)
    strategy: Any = field(default="auto", metadata=NO_EFFECT)
    precision: Any = "32-true"
    folder: Path | None = field(default=None, metadata=NO_EFFECT)
    on_epoch: "Callable[[EpochReport], None] | None" = field(default=None, metadata=NO_EFFECT)
    progress: bool = field(default=True, metadata=NO_EFFECT)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "patience", "checkpoint_steps", "steps_per_epoch"):
            if getattr(self, name) is not None or name in ("epochs", "batch_size"):
                check_int(name, getattr(self, name), minimum=1)
        check_int("seed", self.seed)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
        for name in ("optimizer", "lr_scheduler"):
            if not callable(getattr(self, name)):
                hint = "use partial(torch.optim.SGD, lr=0.1)" if name == "optimizer" else "use cosine_schedule"
                raise ArgumentError(name, getattr(self, name), "a function that creates it", hint=hint)


@dataclass(frozen=True)
class EpochReport:
    """Result of one epoch.

    Attributes:
        epoch: Number of the epoch, from 0.
        epochs: Number of epochs of the run.
        loss: Mean training loss.
        val_metrics: Means of the validation metrics, by name; empty without validation data.
        seconds: Time taken.
        title: Which run of several this is, such as "member 2/5".
    """

    epoch: int
    epochs: int
    loss: float
    val_metrics: dict[str, float]
    seconds: float
    title: str = ""


# -- inputs of fit -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitInputs:
    """The arguments of a method's `fit` in their canonical form.

    Attributes:
        factory: Returns the net to train; the same net at each call if `fit` was given a module.
        member_factory: Returns a new net at each call; a module is copied and its parameters are initialised again.
        data: Training data set of pairs (x, y).
        config: Training options.
        val_data: Validation data set, or None.
    """

    factory: ModelFactory
    member_factory: ModelFactory
    data: Dataset[Any]
    config: TrainingConfig
    val_data: Dataset[Any] | None


def resolve_fit(
    model: nn.Module | ModelFactory | None,
    data: FitData,
    config: TrainingConfig | None = None,
    val_data: FitData | None = None,
) -> FitInputs:
    """Convert what a user may pass to a method's `fit` into its canonical form.

    Args:
        model: Module, trained in place from its present weights, or a function without arguments that returns one.
        data: Data set of pairs (x, y), pair (inputs, targets) of tensors or arrays, or a `DataLoader`, whose data set,
            batch size, number of workers and collate function are used.
        config: Training options; None: the defaults of `TrainingConfig`.
        val_data: Validation data, as `data`.

    Returns:
        The canonical inputs.

    Raises:
        ArgumentError: If an argument is of another kind.

    Example:
        >>> inputs = resolve_fit(nn.Linear(3, 1), (torch.zeros(5, 3), torch.zeros(5)))
        >>> len(inputs.data), inputs.config.epochs
        (5, 30)
    """
    if not callable(model):
        raise ArgumentError("model", model, "an nn.Module, or a function without arguments that returns one")
    config = TrainingConfig() if config is None else config
    if not isinstance(config, TrainingConfig):
        raise ArgumentError("config", config, "a TrainingConfig or None")
    if isinstance(data, DataLoader) and isinstance(data.batch_sampler, BatchSampler):
        config = replace(config, batch_size=data.batch_sampler.batch_size, num_workers=data.num_workers)
    factory = (lambda: model) if isinstance(model, nn.Module) else model
    member_factory = partial(_copy_and_reset, model) if isinstance(model, nn.Module) else model
    held_out = None if val_data is None else as_dataset(val_data, name="val_data")
    return FitInputs(factory, member_factory, as_dataset(data), config, held_out)


def initialize_model(factory: ModelFactory, seed: int) -> nn.Module:
    """Return `factory()`, with initial weights that depend on the seed alone; raise ArgumentError if not a module.

    Args:
        factory: Function that returns a net.
        seed: Seed of what is drawn.

    Returns:
        The net.
    """
    with preserve_rng_state():
        seed_everything(seed, "init")
        net = factory()
    if not isinstance(net, nn.Module):
        raise ArgumentError("model", type(net), "a function that returns an nn.Module")
    return net


def _copy_and_reset(model: nn.Module) -> nn.Module:
    """Return a copy with new initial weights, by the `reset_parameters` of its modules, children before parents."""
    net = copy.deepcopy(model)
    covered: set[nn.Parameter] = set()
    for module in reversed(list(net.modules())):
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
            covered.update(module.parameters())
    missing = [name for name, parameter in net.named_parameters() if parameter not in covered]
    if missing:
        expected = f"modules with reset_parameters() for every parameter, also {', '.join(missing[:3])}"
        raise ArgumentError("model", type(model), expected, hint="pass a function that returns a new model")
    return net


# -- the loop ------------------------------------------------------------------------------------------


def train(
    net: nn.Module,
    data: Dataset[Any],
    objective_at: Callable[[int], Objective],
    config: TrainingConfig,
    *,
    val_data: Dataset[Any] | None = None,
    validate: ValidationStep | None = None,
    identity: Any = None,
    title: str = "",
    seeds: Sequence[int] | None = None,
) -> nn.Module:
    """Minimise objective_at(epoch)(net, batch) over the data, in place.

    Ctrl-C finishes the step and writes a checkpoint. With `seeds`, K members are trained in one net: a batch holds K
    batches, (K, N, …), each in the order of its own seed, and the objective is the sum over members.

    A run resumes from the checkpoint in `config.folder` if both agree in

    - the data: all numbers of tensors in memory, or 32 examples and the targets that are in memory; validation data
      with early stopping; the first batch of a stream that can be read again
    - the options of the method, with the code of functions, the variables that they capture and the globals they read
    - what optimizer and scheduler functions return: class, learning rates and other options, the first 200 rates
    - the net: classes, attributes, code, weights that are not trained; and the loss of 16 examples at the checkpoint's
      weights, up to rounding

    Initial weights are not compared, since an interrupted run changes those of a module in place: to train from other
    pretrained weights, choose another folder. Devices, strategies, and workers may differ; with a stream, workers not.

    Args:
        net: Module to train.
        data: Training data set of pairs (x, y).
        objective_at: Function of the epoch that returns the objective of a batch.
        config: Training options.
        val_data: Validation data set.
        validate: Function of (net, batch) that returns the metrics of a validation batch; their means over `val_data`
            are reported, and "loss" decides on early stopping.
        identity: What is trained, such as the method; a checkpoint of a run with another description is rejected.
        title: Text before the progress bar.
        seeds: Seeds of the K members.

    Returns:
        The trained net.

    Raises:
        ArgumentError: If an option does not fit, or the checkpoint in `config.folder` is damaged or of another run.
        FloatingPointError: If the loss becomes infinite or NaN.
        RuntimeError: If one of several processes, or a worker, fails or is killed; the message names the checkpoint.
    """
    if config.patience is not None and (val_data is None or validate is None):
        raise ArgumentError("patience", config.patience, "None without validation data", hint="pass val_data")
    dataset_length(data)
    if "spawn" in str(config.strategy):
        hint = "the processes of 'spawn' cannot see local functions"
        raise ArgumentError("strategy", config.strategy, "'ddp' or 'ddp_fork'", hint=hint)
    names = ("accelerator", "devices", "num_nodes", "strategy", "precision")
    accelerator, *others = options = [getattr(config, name) for name in names]
    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    if accelerator in ("auto", "cpu") and others == [1, 1, "auto", "32-true"] and not has_gpu:
        fabric: Any = _SingleCPU()
    else:
        from lightning_fabric import Fabric

        fabric = Fabric(**dict(zip(names, options, strict=True)))
    run = _Run(net, data, objective_at, config, val_data, validate, identity, title, seeds, os.getpid())
    packed = _launch_forked(fabric, run) if "fork" in str(config.strategy) else fabric.launch(run)
    if packed is not None:  # a forked process trained a copy
        net.load_state_dict(torch.load(io.BytesIO(packed), weights_only=True))
    return net


def make_loader(data: Dataset[Any], config: TrainingConfig, **options: Any) -> EpochLoader:
    """Return a loader of the data with the batch size, seed and number of workers of a training run.

    Args:
        data: Data set of pairs (x, y).
        config: Training options.
        **options: Further options of `EpochLoader`.

    Returns:
        The loader.
    """
    names = ("batch_size", "seed", "num_workers", "steps_per_epoch")
    return EpochLoader(data, **{name: getattr(config, name) for name in names}, **options)


class _SingleCPU:
    """What training uses of `Fabric`, for one process on the CPU; the import of Fabric takes longer than torch's."""

    global_rank, world_size, is_global_zero, strategy = 0, 1, True, None

    def launch(self, run: "_Run") -> bytes | None:
        return run(self)

    def to_device(self, value: T) -> T:
        return value

    setup_module = setup_optimizers = to_device

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip_gradients(self, net: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), **options)

    def save(self, path: Path, content: dict[str, Any]) -> None:
        states = {key: value.state_dict() for key, value in content.items() if hasattr(value, "state_dict")}
        torch.save(content | states, path)

    def barrier(self) -> None:
        pass


@dataclass
class _TrainState:
    """Progress of a run, saved in every checkpoint."""

    epoch: int = 0
    step: int = 0  # number of steps of the epoch that are done
    loss_sum: float = 0.0  # of these steps
    best_loss: float = float("inf")  # lowest validation loss
    waited: int = 0  # number of epochs since then
    best: dict[str, Tensor] | None = None  # weights of that epoch


@dataclass
class _Run:
    """One training run, called with the fabric of each process; the other fields are set by the call."""

    net: nn.Module
    data: Dataset[Any]
    objective_at: Callable[[int], Objective]
    config: TrainingConfig
    val_data: Dataset[Any] | None
    validate: ValidationStep | None
    identity: Any
    title: str
    seeds: Sequence[int] | None
    process_id: int  # of the process that called `train`

    fabric: Any = field(init=False)  # lightning_fabric.Fabric, or _SingleCPU
    model: nn.Module = field(init=False)  # the net, as the fabric wraps it
    optimizer: Optimizer = field(init=False)
    lr_scheduler: LRScheduler = field(init=False)
    steps: int = field(init=False)  # of an epoch
    state: _TrainState = field(init=False, default_factory=_TrainState)
    description: dict[str, str] = field(init=False, default_factory=dict)  # of the run, if there is a folder
    probe: Batch | None = field(init=False, default=None)  # examples whose loss is stored in checkpoints

    def __call__(self, fabric: Any) -> bytes | None:
        """Train the net in place; a process other than the caller's returns the weights as bytes."""
        try:
            return self._train(fabric)
        except Exception as error:
            alone = fabric.world_size == 1 and os.getpid() == self.process_id
            if alone or isinstance(error, ArgumentError | FloatingPointError):
                raise
            for thread in threading.enumerate():  # of Fabric, which kills this process when another one has ended
                if "_child_processes" in vars(thread):
                    vars(thread)["_child_processes"] = []
            raise RuntimeError(self.describe_failure(f"process {fabric.global_rank}", error)) from error

    def describe_failure(self, where: str, error: object) -> str:
        """Message for the end of a run in one of its processes: what happened, and what is saved."""
        path = self.checkpoint
        if path is None:
            saved = "there is no checkpoint, since TrainingConfig has no folder"
        elif not path.is_file():
            saved = f"there is no checkpoint in {path.parent} yet: the same call starts anew"
        else:
            try:
                state = _read_checkpoint(path)["state"]
                place = f"epoch {state['epoch'] + 1}, step {state['step']}"
                saved = f"the checkpoint {path} is at {place}: the same call resumes"
            except Exception as problem:  # the message is about another error
                saved = f"the checkpoint {path} cannot be read ({problem})"
        what = " ".join(f"{type(error).__name__}: {error}".split()) if isinstance(error, BaseException) else error
        return f"training ended in {where} ({str(what)[:_MAX_MESSAGE]}); {saved}"

    def _train(self, fabric: Any) -> bytes | None:
        config, state = self.config, self.state
        self.fabric = fabric
        loader: EpochLoader | EnsembleLoader
        if self.seeds is None:
            loader = make_loader(self.data, config, rank=fabric.global_rank, world_size=fabric.world_size)
        else:
            loader = EnsembleLoader(self.data, batch_size=config.batch_size, seeds=self.seeds)
        if config.folder is not None:
            Path(config.folder).mkdir(parents=True, exist_ok=True)  # raises now and not after the first epoch
            self.description = self._describe_options()
        self.model = fabric.setup_module(self.net)
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if not trainable:
            raise ArgumentError("model", type(self.net), "a net with parameters that require gradients")
        optimizer = config.optimizer(trainable)
        self.steps, total = loader.steps, config.epochs * loader.steps
        if config.folder is not None:
            self._describe_run(optimizer, total)
        self.lr_scheduler = config.lr_scheduler(optimizer, total)
        if isinstance(self.lr_scheduler, ReduceLROnPlateau):
            raise ArgumentError("lr_scheduler", ReduceLROnPlateau, "a scheduler that depends on the step alone")
        self.optimizer = fabric.setup_optimizers(optimizer)
        self._restore_checkpoint()
        enabled, done = config.progress and fabric.is_global_zero, state.epoch * loader.steps + state.step
        with (
            preserve_rng_state(),
            _catch_interrupt(once=os.getpid() == self.process_id) as interrupted,
            progress_bar("training", total, enabled=enabled, done=done) as advance,
        ):
            while state.epoch < config.epochs and (config.patience is None or state.waited < config.patience):
                began = time.monotonic()
                objective = self.objective_at(state.epoch)
                self.model.train()
                for k, batch, rank_weight in self._read(loader.epoch(state.epoch, state.step)):
                    loss = self._step(objective, self._move(batch), rank_weight) / len(self.seeds or (config.seed,))
                    state.step, state.loss_sum = k + 1, state.loss_sum + loss
                    advance(f"{self.title}  epoch {state.epoch + 1}/{config.epochs}  loss {loss:.4f}".strip())
                    if self._reduce(interrupted.is_set(), "sum"):  # all ranks must stop at the same step
                        self._save_checkpoint()
                        raise KeyboardInterrupt(f"training was interrupted; checkpoint: {self.checkpoint}")
                    if config.checkpoint_steps and (batch.step + 1) % config.checkpoint_steps == 0:
                        self._save_checkpoint()
                report = self._end_epoch(time.monotonic() - began)
                self._save_checkpoint()
                if config.on_epoch is not None and fabric.is_global_zero:
                    config.on_epoch(report)
        if state.best is not None:
            self.model.load_state_dict(state.best)
        fabric.barrier()  # no process ends well if another one has failed
        if os.getpid() == self.process_id:
            return None
        file = io.BytesIO()
        torch.save(self.net.state_dict(), file)
        return file.getvalue()

    def _read(self, batches: Iterator[T]) -> Iterator[T]:
        """The batches; an error in a worker process becomes one with a short message."""
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:
                if not self.config.num_workers or isinstance(error, ArgumentError):
                    raise
                what = f"{type(error).__name__} while the data were read"
                raise RuntimeError(self.describe_failure("a worker process", what)) from error
            yield batch

    def _move(self, batch: Batch) -> Batch:
        """The batch on the device of this process."""
        return replace(batch, x=self.fabric.to_device(batch.x), y=self.fabric.to_device(batch.y))

    def _reduce(self, value: float, reduce_op: str) -> float:
        """The sum or mean of a number over the ranks."""
        if self.fabric.world_size == 1:
            return value
        return float(self.fabric.all_reduce(torch.tensor(float(value)), reduce_op=reduce_op))

    def _step(self, objective: Objective, batch: Batch, rank_weight: float) -> float:
        """Make one step and return its loss; a loss that is not finite changes nothing (LBFGS decides for itself)."""
        config, optimizer = self.config, self.optimizer

        def closure() -> Tensor:
            seed_everything(config.seed, "step", batch.step, self.fabric.global_rank)
            optimizer.zero_grad()
            loss = objective(self.model, batch) * rank_weight
            self.fabric.backward(loss)
            if config.clip_norm is not None:
                self.fabric.clip_gradients(self.model, optimizer, max_norm=config.clip_norm, error_if_nonfinite=False)
            return loss.detach()

        evaluates = isinstance(optimizer, torch.optim.LBFGS)  # the loss, several times in a step
        loss = float(cast(Any, optimizer).step(closure) if evaluates else closure())
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss became {loss} in epoch {self.state.epoch + 1}, step {self.state.step + 1}: look for NaN in "
                "the data, lower the learning rate, or clip gradients (TrainingConfig(clip_norm=1.0))"
            )
        if not evaluates:
            optimizer.step()
        self.lr_scheduler.step()
        return loss

    def _end_epoch(self, seconds: float) -> EpochReport:
        """Validate, advance the state to the next epoch, and apply early stopping."""
        state, metrics = self.state, self._evaluate()
        loss = self._reduce(state.loss_sum / max(1, state.step), "mean")  # each rank has seen its own examples
        report = EpochReport(state.epoch, self.config.epochs, loss, metrics, seconds, self.title)
        state.epoch, state.step, state.loss_sum = state.epoch + 1, 0, 0.0
        if self.config.patience is not None:
            if metrics["loss"] < state.best_loss:
                state.best_loss, state.waited = metrics["loss"], 0
                state.best = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
            else:
                state.waited += 1
        return report

    def _evaluate(self) -> dict[str, float]:
        """Means of the validation metrics over the validation data."""
        if self.val_data is None or self.validate is None:
            return {}
        sums: dict[str, float] = {}
        count = 0
        self.model.eval()
        with torch.no_grad():
            for _, batch, _ in make_loader(self.val_data, self.config, shuffle=False).epoch(0):
                for name, value in self.validate(self.model, self._move(batch)).items():
                    sums[name] = sums.get(name, 0.0) + float(value) * len(batch.index)
                count += len(batch.index)
        return {name: total / count for name, total in sums.items()}

    @property
    def checkpoint(self) -> Path | None:
        """Path of the checkpoint; None if none is written."""
        return None if self.config.folder is None else Path(self.config.folder) / "checkpoint.ckpt"

    def _describe_options(self) -> dict[str, str]:
        """Describe the net and the options, any of which training may change (a counter that a net keeps)."""
        options = {"config": self.config, "method": self.identity, "seeds": self.seeds, "model": self.net}
        described = (describe(value, name, training=True) for name, value in options.items())
        return {path: text for parts in described for path, text in parts.items()}

    def _describe_run(self, optimizer: Optimizer, total_steps: int) -> None:
        """Describe what two runs that share a checkpoint must have in common, beside the options."""
        config = self.config
        self.description |= describe(optimizer, "optimizer()", training=True)
        self.description |= _describe_schedule(config.lr_scheduler, optimizer, total_steps)
        self.description |= self._describe_data()
        if dataset_length(self.data) is None:  # each worker reads its own examples
            self.description["num_workers"] = f"{config.num_workers} in {self.fabric.world_size} processes"

    def _describe_data(self) -> dict[str, str]:
        """Describe the data that decide on the result, and keep some of them as a probe."""
        options = {"seed": self.config.seed, "batch_size": self.config.batch_size}
        parts, self.probe = describe_data(self.data, "data", **options)
        if self.config.patience is not None and self.val_data is not None:
            parts |= describe_data(self.val_data, "val_data", **options)[0]
        return parts

    def _probe_loss(self) -> float | None:
        """Loss of the probe, in evaluation mode and without side effects."""
        if self.probe is None or self.validate is None:
            return None
        with preserve_rng_state(), eval_mode(self.model), torch.no_grad():
            seed_everything(self.config.seed, "probe")
            loss = self.validate(self.model, self._move(self.probe)).get("loss")
        return None if loss is None else float(loss)

    def _save_checkpoint(self) -> None:
        """Write a checkpoint and then rename it, so that the last complete one is never lost."""
        from neuboots.serialization import atomic_file

        path, fabric = self.checkpoint, self.fabric
        if path is None:
            return
        now = self._describe_options()
        self.description = {key: text for key, text in self.description.items() if now.get(key, text) == text}
        content = {
            "net": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler.state_dict(),
            "state": dict(vars(self.state)),
            "description": self.description,
            "python": sys.implementation.cache_tag,
            "loss": self._probe_loss(),
        }
        with atomic_file(path) if fabric.is_global_zero else nullcontext(path) as temporary:
            fabric.save(temporary, content)
            if fabric.is_global_zero:
                if temporary.is_dir():
                    raise ArgumentError("strategy", self.config.strategy, "a strategy that saves one file")
                _append_checksum(temporary)
        fabric.barrier()

    def _restore_checkpoint(self) -> None:
        """Load net, optimizer, scheduler and state, if there is a checkpoint; raise ArgumentError if of another run."""
        path = self.checkpoint
        if path is None or not path.exists():
            return
        cause = None
        try:
            content = _read_checkpoint(path)
            if not (expected := self._compare_description(content)):
                self._load_content(path, content)
                expected = self._compare_loss(content["loss"])
        except Exception as error:  # whatever a damaged file leads to
            expected, cause = f"a checkpoint that can be read ({path}: {type(error).__name__}: {error})", error
        if expected:
            raise ArgumentError(
                "folder", str(path.parent), expected, hint="delete it, or choose another folder"
            ) from cause
        self.description = {key: text for key, text in self.description.items() if key in content["description"]}

    def _compare_description(self, content: dict[str, Any]) -> str:
        """Say what is expected if the run differs from that of a checkpoint: values before code."""
        same_python = content["python"] == sys.implementation.cache_tag
        differences = find_differences(content["description"], self.description, same_python=same_python)
        if any(key.startswith(("data.", "val_data.")) for key in differences):
            again = self._describe_data()  # data that draw random numbers of their own cannot be compared
            random = {key for key, text in again.items() if self.description[key] != text}
            differences = {key: texts for key, texts in differences.items() if key not in random}
            self.probe = None if random else self.probe
        pairs = sorted(differences.items(), key=lambda item: "#" in item[1][0])
        shown = "; ".join(f"{key} was {old}, is {new}" for key, (old, new) in pairs[:6])
        more = f" and {len(pairs) - 6} more" if len(pairs) > 6 else ""
        return f"a checkpoint of the same run ({shown}{more})" if pairs else ""

    def _compare_loss(self, old: float | None) -> str:
        """Say what is expected if the probe had another loss at the weights of a checkpoint."""
        new = self._probe_loss()
        if old is None or new is None or math.isclose(old, new, rel_tol=2e-3, abs_tol=1e-5):
            return ""
        return (
            f"a checkpoint of the same run (the loss of {len(cast(Batch, self.probe).index)} examples at its weights "
            f"was {old:.6g}, is {new:.6g}: the net or the loss function computes something else)"
        )

    def _load_content(self, path: Path, content: dict[str, Any]) -> None:
        """Load a checkpoint; raise an error, before anything is changed, if it does not fit."""
        state, weights, schedule = content["state"], self.model.state_dict(), self.lr_scheduler
        _check_like(state, vars(self.state) | {"best": None if state["best"] is None else weights}, "state", 2)
        for name, limit in (("epoch", self.config.epochs), ("step", self.steps)):
            if type(state[name]) is not int or not 0 <= state[name] <= limit:
                raise ValueError(f"it is at {name} {state[name]}")
        standard = type(schedule).__module__ == "torch.optim.lr_scheduler"
        _check_like(content["lr_scheduler"], schedule.state_dict(), "lr_scheduler", 3 if standard else 1)
        strategy = self.fabric.strategy
        if strategy is not None and _is_sharded(strategy):
            self.fabric.load(path, {"net": self.model, "optimizer": self.optimizer}, strict=False, weights_only=True)
        else:
            _check_like(content["net"], weights, "net", 1)
            self._check_optimizer(content["optimizer"], state["epoch"] * self.steps + state["step"])
            self.model.load_state_dict(content["net"])
            self.optimizer.load_state_dict(tree_map_only(Tensor, torch.clone, content["optimizer"]))
        schedule.load_state_dict(content["lr_scheduler"])
        vars(self.state).update(tree_map_only(Tensor, torch.clone, state))  # not of the memory of the file

    def _check_optimizer(self, theirs: Any, steps: int) -> None:
        """Raise an error unless the state is like that of ours: each parameter makes a step if it is torch's."""
        groups = theirs["param_groups"]
        _check_like(groups, self.optimizer.state_dict()["param_groups"], "param_groups", 3)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # of Fabric's wrapper
        irregular = isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam)
        if irregular or not type(optimizer).__module__.startswith("torch.optim."):
            return
        twin = copy.copy(optimizer)
        for group, ours in zip(groups, optimizer.param_groups, strict=True):
            for number, parameter in zip(group["params"], ours["params"], strict=True):
                if number not in theirs["state"]:
                    continue  # it had no gradient
                example = torch.zeros_like(parameter)
                example.grad = torch.zeros_like(parameter)
                twin.state, twin.param_groups = defaultdict(dict), [{**group, "params": [example]}]
                twin.step()
                state = theirs["state"][number]
                _check_like(state, dict(twin.state[example]), "state of the optimizer", 1)
                if not 0 <= float(state.get("step", 0)) <= steps:
                    raise ValueError("the state of the optimizer is that of another step")


# -- checkpoints ---------------------------------------------------------------------------------------

_CHECKPOINT_TYPES = {
    **{"net": dict, "optimizer": dict, "lr_scheduler": dict, "state": dict, "description": dict},
    **{"python": str, "loss": float | None},
}
_MAGIC = b"neuboots checkpoint 3\n"
_MAX_MESSAGE = 200  # characters of an error of another process
_NUM_RATES = 200  # of a schedule that are compared


def _describe_schedule(factory: SchedulerFactory, optimizer: Optimizer, total_steps: int) -> dict[str, str]:
    """Describe a schedule by its state and its first learning rates, on a copy of the optimizer's options."""
    twin = copy.copy(optimizer)
    twin.param_groups = [
        {key: value.clone() if key != "params" and isinstance(value, Tensor) else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer makes no steps
        schedule = factory(twin, total_steps)
        if isinstance(schedule, ReduceLROnPlateau):
            return {}
        parts = describe(schedule.state_dict(), "lr_scheduler()", training=True)
        rates = []
        for _ in range(min(total_steps, _NUM_RATES)):
            rates.append(", ".join(f"{float(group['lr']):.5g}" for group in twin.param_groups))
            schedule.step()
    shown = ", ".join(rates[:3])
    return parts | {
        "lr_scheduler()": type(schedule).__name__,
        "lr_scheduler().rates": f"{shown}, … {digest(*rates)}" if len(rates) > 3 else shown,
    }


def _checksum(file: BinaryIO, size: int) -> bytes:
    """Checksum of the first bytes of a file."""
    value = 0
    while size > 0 and (chunk := file.read(min(size, 1 << 20))):
        value = zlib.crc32(chunk, value)
        size -= len(chunk)
    return _MAGIC + value.to_bytes(4, "big")


def _append_checksum(path: Path) -> None:
    """Append the checksum of a file to it."""
    with path.open("rb+") as file:
        file.write(_checksum(file, path.stat().st_size))


def _read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint whose parts have the right types; raise an error for any other file."""
    if not path.is_file():  # a pipe would block
        raise ValueError("it is not a file")
    size, length = path.stat().st_size, len(_MAGIC) + 4
    with path.open("rb") as file:
        expected, stored = _checksum(file, size - length), file.read()
    if not stored.startswith(_MAGIC):
        raise ValueError("it is incomplete, or was not written by this version of neuboots")
    if stored != expected:
        raise ValueError("it is damaged: its checksum is another one")
    with zipfile.ZipFile(path) as archive:  # what torch reads must not be larger than the file
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(e.file_size for e in entries) > size:
        raise ValueError("it is compressed")
    # with mmap, a storage that claims to be larger than its record cannot be read beyond the file
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if type(content) is not dict or content.keys() != _CHECKPOINT_TYPES.keys():
        raise ValueError("it has other entries")
    for key, kind in _CHECKPOINT_TYPES.items():
        if not isinstance(content[key], kind):
            raise ValueError(f"{key!r} is a {type(content[key]).__name__}")
    if not all(type(text) is str for item in content["description"].items() for text in item):
        raise ValueError("'description' has other values than texts")
    required = {"config.epochs", "config.seed", "config.optimizer", "method", "model", "data", "lr_scheduler()"}
    if missing := required - content["description"].keys():
        raise ValueError(f"'description' has no {min(missing)!r}")
    _check_values(content, size)
    return cast(dict[str, Any], content)


def _check_values(content: Any, limit: int) -> None:
    """Raise ValueError unless there are at most `limit` tensors, numbers, texts, and containers of them."""
    stack, count = [(content, 0)], 0
    while stack:
        value, depth = stack.pop()
        count += 1
        if count > limit or depth > 50:
            raise ValueError("it has too many values")
        if isinstance(value, Mapping):
            stack += [(item, depth + 1) for pair in value.items() for item in pair]
        elif isinstance(value, list | tuple | set):
            stack += [(item, depth + 1) for item in value]
        elif isinstance(value, Tensor):
            dense = value.layout is torch.strided and value.device.type == "cpu"
            if not dense or value.numel() * value.element_size() > value.untyped_storage().nbytes():
                raise ValueError("a tensor is larger than its memory")
        elif not isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device | None):
            raise ValueError(f"it has a value of {type(value).__name__}")


def _check_like(theirs: Any, ours: Any, path: str, depth: int) -> None:
    """Raise ValueError unless a value of a checkpoint can replace ours: of one type, shape, and entries to a depth."""
    parts: Any = ()
    if isinstance(ours, Tensor):
        alike = isinstance(theirs, Tensor) and (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)
        alike = alike and not (bool(theirs.isnan().any()) and not bool(ours.isnan().any()))
    elif isinstance(ours, dict):
        alike, parts = isinstance(theirs, dict) and (not depth or theirs.keys() == ours.keys()), ours
    elif isinstance(ours, list | tuple):
        alike = isinstance(theirs, list | tuple) and (not depth or len(theirs) == len(ours))
        parts = range(len(ours))
    elif ours is None or type(ours) in (int, float):
        alike = theirs is ours or (type(theirs) in (int, float) and not math.isnan(theirs))
    else:
        alike = type(theirs) is type(ours)
    if not alike:
        raise ValueError(f"{path} has another type, shape or entries than that of the run, or contains NaN")
    for part in parts if depth else ():
        _check_like(theirs[part], ours[part], f"{path}[{part!r}]", depth - 1)


def _is_sharded(strategy: Any) -> bool:
    """Whether each process has a part of the parameters."""
    from lightning_fabric.strategies.strategy import Strategy

    return type(strategy).load_checkpoint is not Strategy.load_checkpoint


def _launch_forked(fabric: Any, run: _Run) -> bytes | None:
    """Run in forked processes, and return the weights; raise one error if one of them fails, when all have ended.

    The first Ctrl-C is passed on to the processes, which write a checkpoint; the second one ends them.
    """
    started = {*multiprocessing.active_children()}
    errors = multiprocessing.get_context("fork").SimpleQueue()

    def run_forked(fabric: Any) -> bytes | str | None:
        try:
            return run(fabric)
        except KeyboardInterrupt as error:
            return str(error)
        except ArgumentError as error:
            errors.put(partial(ArgumentError, **{key: str(value)[:500] for key, value in vars(error).items()}))
            raise
        except Exception as error:
            kind = FloatingPointError if isinstance(error, FloatingPointError) else RuntimeError
            errors.put(partial(kind, str(error)[:1000]))
            raise

    def interrupt(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        for process in {*multiprocessing.active_children()} - started:
            os.kill(cast(int, process.pid), signal.SIGINT)

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, interrupt) if in_main else None
    try:
        packed = fabric.launch(run_forked)
    except ProcessRaisedException as error:
        raise errors.get()() from error
    except ProcessExitedException as error:
        raise RuntimeError(run.describe_failure(f"process {error.error_index}", error)) from error
    finally:
        if in_main:
            signal.signal(signal.SIGINT, before)
        for process in {*multiprocessing.active_children()} - started:
            process.kill()
            process.join()
        errors.close()
    if isinstance(packed, str):
        raise KeyboardInterrupt(packed)
    return cast("bytes | None", packed)


@contextmanager
def _catch_interrupt(*, once: bool = True) -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets; with `once`, the second raises KeyboardInterrupt at once."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def handle(signum: int, frame: Any) -> None:
        interrupted.set()
        if once:
            signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def describe_callable(function: Any) -> str:
    """Return the name of a callable with the arguments that a partial binds, without addresses, which change.

    Args:
        function: A callable.

    Returns:
        Its description.
    """
    if isinstance(function, partial):
        args = [describe_callable(value) if callable(value) else repr(value) for value in function.args]
        return " ".join([describe_callable(function.func), *args, str(sorted(function.keywords.items()))])
    return str(getattr(function, "__qualname__", type(function).__qualname__))


@contextmanager
def progress_bar(
    title: str, total: int | None, *, enabled: bool = True, done: int = 0
) -> Iterator[Callable[[str], None]]:
    """Show a progress bar with the remaining time.

    Args:
        title: Text before the bar.
        total: Number of steps; None if unknown.
        enabled: Whether to show the bar; it is never shown if the output is no terminal.
        done: Number of steps that are already done.

    Yields:
        A function to call after each step with the new text before the bar.

    Example:
        >>> with progress_bar("counting", 2, enabled=False) as step:
        ...     step("one")
        ...     step("two")
    """
    if not enabled:
        yield lambda text: None
        return
    from rich import get_console
    from rich import progress as rich

    title_column = rich.TextColumn("{task.description}", markup=False)  # names from files are no markup
    columns = title_column, rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn()
    quiet = not get_console().is_terminal  # in a file or a pipe a bar would print blank lines
    period = float("inf")  # steps may take minutes, and rich forgets after half a minute
    with rich.Progress(*columns, transient=True, disable=quiet, speed_estimate_period=period) as progress:
        task = progress.add_task(escape_text(title), total=total, completed=done)
        progress.advance(task, 0)  # starts the clock, so that the first step gives an estimate
        yield lambda text: progress.update(task, advance=1, description=escape_text(text))


# -- training a net with a loss ------------------------------------------------------------------------


def prepare_net(inputs: FitInputs, *, copy: bool = False) -> tuple[nn.Module, Any]:
    """Return the net with its initial weights, without wrappers such as `DataParallel`, and an example of its inputs.

    Args:
        inputs: The arguments of `fit`.
        copy: Whether to return a copy of the net, for a method that replaces layers of it.

    Returns:
        The net and the inputs of its first examples.
    """
    net = initialize_model(inputs.factory, inputs.config.seed)
    example = load_example(net, inputs.data, seed=inputs.config.seed)
    net = unwrap_model(net)
    return copy_net(net) if copy else net, example


def mean_loss(loss: Loss, output: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss over the targets that are not ignored (eq. 2.1).

    Args:
        loss: Loss with one value per example.
        output: Outputs of a net, (N, C, *).
        y: Targets, (N, *).

    Returns:
        The mean, a scalar.
    """
    losses = loss(output, y)
    return weighted_mean(losses, losses.new_ones(len(y)), valid_mask(loss, y))


def validation_metrics(loss: Loss, output: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the mean loss of one batch and, for class labels, the error rate.

    Args:
        loss: Loss with one value per example.
        output: Outputs of a net, (N, C, *).
        y: Targets, (N, *).

    Returns:
        "loss" and, for class labels, "error".
    """
    metrics = {"loss": mean_loss(loss, output, y)}
    one_logit = isinstance(loss, nn.BCEWithLogitsLoss) and output.shape[1:2] == (1,)
    classes = isinstance(loss, nn.CrossEntropyLoss | BrierLoss) and not y.is_floating_point()
    if classes or one_logit:
        labels = class_probabilities(output, 1).argmax(1)
        wrong = (labels != y.reshape(labels.shape)).float()
        metrics["error"] = weighted_mean(wrong, wrong.new_ones(len(wrong)), valid_mask(loss, y))
    return metrics


def mean_validation_metrics(loss: Loss, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the means over K members of their validation metrics.

    Args:
        loss: Loss with one value per example.
        outputs: Outputs of the members, (K, N, C, *).
        y: Targets, (N, *).

    Returns:
        The means, by the names of `validation_metrics`.
    """
    metrics = [validation_metrics(loss, output, y) for output in outputs]
    return {name: torch.stack([each[name] for each in metrics]).mean() for name in metrics[0]}


# -- the base class of methods -------------------------------------------------------------------------


@dataclass(frozen=True)
class BaseMethod(ABC, Generic[P]):
    """Base class of the methods that train a net with a loss.

    A subclass is a frozen dataclass of options and implements `_fit`.

    Args:
        loss: Loss per example: a torch loss, or a function of (outputs, targets).

    Attributes:
        info: Facts about the method, a `MethodInfo`, set by `neuboots.methods.register`.
    """

    info: ClassVar[Any]

    loss: Loss = field(default_factory=nn.CrossEntropyLoss)

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", as_loss(self.loss))

    def fit(
        self,
        model: nn.Module | ModelFactory | None,
        data: FitData,
        config: TrainingConfig | None = None,
        *,
        val_data: FitData | None = None,
    ) -> P:
        """Train the method.

        Args:
            model: Net, trained in place from its present weights, or a function without arguments that returns one. A
                method with several nets calls the function once per net; of a module it trains copies with new initial
                weights. A method that replaces layers trains a copy. None for a method without a net.
            data: Training data: a data set of (x, y), a pair of tensors or arrays, or a `DataLoader`.
            config: Training options; None for the defaults.
            val_data: Validation data, for the metrics of each epoch and for early stopping.

        Returns:
            The fitted predictor.

        Raises:
            ArgumentError: If an argument is wrong.
            ValueError: If the method cannot be applied to the net, or the data do not fit the net or the loss.
            FloatingPointError: If the loss, a weight or a statistic becomes NaN or infinite.
        """
        inputs = resolve_fit(model if self.info.needs_net else nn.Identity(), data, config, val_data)
        predictor = self._declare(self._fit(inputs))
        if (name := cast(Any, predictor).find_not_finite()) is not None:
            raise FloatingPointError(f"{name!r} became NaN or infinite: lower the learning rate, or clip gradients")
        return predictor

    def _declare(self, predictor: P) -> P:
        """Return the predictor with what it has to know about the loss."""
        return cast(Any, predictor).as_independent() if has_independent_outputs(self.loss) else predictor

    def row_weights(
        self, predictor: P, data: FitData, num_samples: int, *, seed: int = 0, fit_seed: int = 0
    ) -> Tensor | None:
        """Return the weights of the training rows that the replicates of `predict` stand for, with mean 1.

        Args:
            predictor: Predictor that this method made.
            data: Its training data.
            num_samples: Number of replicates B.
            seed: Seed of the replicates.
            fit_seed: Seed of the training, `config.seed`.

        Returns:
            The weights, (B, n); None if replicates stand for no weights of the rows.

        Raises:
            ArgumentError: If another method made the predictor, from other rows as far as it knows, or the weights do
                not fit into memory.

        Example:
            >>> from neuboots import NeuBoots
            >>> data = torch.zeros(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
            >>> predictor = NeuBoots().fit(lambda: nn.Linear(2, 2), data, TrainingConfig(epochs=1, progress=False))
            >>> NeuBoots().row_weights(predictor, data, 10).shape
            torch.Size([10, 6])
        """
        kind = self.info.predictor
        if not isinstance(predictor, kind):
            raise ArgumentError("predictor", type(predictor), f"a {kind.__name__}, which this method makes")
        dataset, count = as_dataset(data), check_int("num_samples", num_samples, minimum=1)
        check_memory("num_samples", count, count * DRAW_BYTES * check_length(dataset), hint="use fewer replicates")
        seeds = check_int("seed", seed), check_int("fit_seed", fit_seed)
        return self._row_weights(predictor, dataset, count, *seeds)

    def _row_weights(
        self, predictor: P, data: Dataset[Any], num_samples: int, seed: int, fit_seed: int
    ) -> Tensor | None:
        """As `row_weights`, for a data set."""
        return None

    @abstractmethod
    def _fit(self, inputs: FitInputs) -> P:
        """Train the method on validated inputs."""

    def _train(
        self,
        net: nn.Module,
        inputs: FitInputs,
        objective_at: Callable[[int], Objective],
        validate: ValidationStep,
        title: str = "",
    ) -> None:
        """Run the training loop on a net, in place."""
        train(
            net,
            inputs.data,
            objective_at,
            inputs.config,
            val_data=inputs.val_data,
            validate=validate,
            identity=self,
            title=title,
        )

    def _train_net(
        self,
        net: nn.Module,
        inputs: FitInputs,
        before_step: Callable[[Batch], None] | None = None,
        title: str = "",
    ) -> None:
        """Train a single net with the mean loss, in place."""
        if has_lazy_layers(net):
            load_example(net, inputs.data, seed=inputs.config.seed)

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            if before_step is not None:
                before_step(batch)
            return mean_loss(self.loss, compute_output(model, batch.x), batch.y)

        def validate(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return validation_metrics(self.loss, compute_output(model, batch.x), batch.y)

        self._train(net, inputs, lambda epoch: objective, validate, title)
