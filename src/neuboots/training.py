"""The training loop of every method (paper, Algorithm 1), on one CPU, or by lightning-fabric on other devices.

    for t in 0 … T−1:  α⁽ᵗ⁾ ~ P;  θ ← θ − ρ ∇_θ 1/n Σᵢ α⁽ᵗ⁾_{u(i)} ℓ(g_θ(Xᵢ, α⁽ᵗ⁾), yᵢ)

The loop does not know α: `objective_at(epoch)` returns the scalar to minimise. All randomness is a function of
(seed, epoch, example) or (seed, step), so that a resumed run ends bit for bit where an uninterrupted one does.
"""

import copy
import io
import math
import os
import shutil
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from neuboots._validation import ArgumentError, check_int, check_positive, escape_text
from neuboots.head import compute_output, copy_net, has_lazy_layers, load_example, unwrap_model
from neuboots.loading import (
    Batch,
    EnsembleLoader,
    EpochLoader,
    FitData,
    as_dataset,
    dataset_length,
    preserve_rng_state,
    seed_everything,
)
from neuboots.losses import BrierLoss, Loss, as_loss, valid_mask, weighted_mean
from neuboots.prediction import Predictor, class_probabilities

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
    checkpoint_steps: int | None = None
    steps_per_epoch: int | None = None
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
    if isinstance(data, DataLoader) and data.batch_size is not None:
        config = replace(config, batch_size=data.batch_size, num_workers=data.num_workers)
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
    identity: str = "",
    title: str = "",
    seeds: Sequence[int] | None = None,
) -> nn.Module:
    """Minimise objective_at(epoch)(net, batch) over the data, in place.

    Ctrl-C finishes the step and writes a checkpoint. With `seeds`, K members are trained in one net: a batch holds K
    batches, (K, N, …), each in the order of its own seed, and the objective is the sum over members.

    Args:
        net: Module to train.
        data: Training data set of pairs (x, y).
        objective_at: Function of the epoch that returns the objective of a batch.
        config: Training options.
        val_data: Validation data set.
        validate: Function of (net, batch) that returns the metrics of a validation batch; their means over `val_data`
            are reported, and "loss" decides on early stopping.
        identity: Description of what is trained; a checkpoint of another run is rejected.
        title: Text before the progress bar.
        seeds: Seeds of the K members.

    Returns:
        The trained net.

    Raises:
        ArgumentError: If an option does not fit, or the checkpoint in `config.folder` belongs to another run.
        FloatingPointError: If the loss becomes infinite or NaN.
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
    packed = fabric.launch(run)
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

    global_rank, world_size, is_global_zero = 0, 1, True

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

    def load(self, path: Path, modules: dict[str, Any], *, strict: bool, weights_only: bool) -> dict[str, Any]:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only)
        modules["net"].load_state_dict(content.pop("net"), strict=strict)
        modules["optimizer"].load_state_dict(content.pop("optimizer"))
        return content

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
    finished: bool = False  # whether training stopped early


@dataclass
class _Run:
    """One training run, called with the fabric of each process; the other fields are set by the call."""

    net: nn.Module
    data: Dataset[Any]
    objective_at: Callable[[int], Objective]
    config: TrainingConfig
    val_data: Dataset[Any] | None
    validate: ValidationStep | None
    identity: str
    title: str
    seeds: Sequence[int] | None
    process_id: int  # of the process that called `train`

    fabric: Any = field(init=False)  # lightning_fabric.Fabric, or _SingleCPU
    model: nn.Module = field(init=False)  # the net, as the fabric wraps it
    optimizer: Optimizer = field(init=False)
    lr_scheduler: LRScheduler = field(init=False)
    state: _TrainState = field(init=False, default_factory=_TrainState)

    def __call__(self, fabric: Any) -> bytes | None:
        """Train the net in place; a process other than the caller's returns the weights as bytes."""
        config, state = self.config, self.state
        self.fabric = fabric
        loader: EpochLoader | EnsembleLoader
        if self.seeds is None:
            loader = make_loader(self.data, config, rank=fabric.global_rank, world_size=fabric.world_size)
        else:
            loader = EnsembleLoader(self.data, batch_size=config.batch_size, seeds=self.seeds)
        self.model = fabric.setup_module(self.net)
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if not trainable:
            raise ArgumentError("model", type(self.net), "a net with parameters that require gradients")
        optimizer = config.optimizer(trainable)
        total = config.epochs * loader.steps
        self.lr_scheduler = config.lr_scheduler(optimizer, total)
        if isinstance(self.lr_scheduler, ReduceLROnPlateau):
            raise ArgumentError("lr_scheduler", ReduceLROnPlateau, "a scheduler that depends on the step alone")
        self.optimizer = fabric.setup_optimizers(optimizer)
        self._restore_checkpoint()
        enabled, done = config.progress and fabric.is_global_zero, state.epoch * loader.steps + state.step
        with (
            preserve_rng_state(),
            _catch_interrupt() as interrupted,
            progress_bar("training", total, enabled=enabled, done=done) as advance,
        ):
            while state.epoch < config.epochs and not state.finished:
                began = time.monotonic()
                objective = self.objective_at(state.epoch)
                self.model.train()
                for k, batch, rank_weight in loader.epoch(state.epoch, state.step):
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
        if os.getpid() == self.process_id:
            return None
        file = io.BytesIO()
        torch.save(self.net.state_dict(), file)
        return file.getvalue()

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
        state, patience = self.state, self.config.patience
        metrics = self._evaluate()
        loss = self._reduce(state.loss_sum / max(1, state.step), "mean")  # each rank has seen its own examples
        report = EpochReport(state.epoch, self.config.epochs, loss, metrics, seconds, self.title)
        state.epoch, state.step, state.loss_sum = state.epoch + 1, 0, 0.0
        if patience is not None:
            if metrics["loss"] < state.best_loss:
                state.best_loss, state.waited = metrics["loss"], 0
                state.best = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
            else:
                state.waited += 1
            state.finished = state.waited >= patience
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

    def fingerprint(self) -> dict[str, Any]:
        """What two runs that share a checkpoint must have in common."""
        names = ("epochs", "batch_size", "optimizer", "lr_scheduler", "seed", "clip_norm", "patience")
        return {
            "method": self.identity,
            **{name: _describe_option(getattr(self.config, name)) for name in (*names, "steps_per_epoch", "precision")},
            "examples": dataset_length(self.data),
            "seeds": None if self.seeds is None else list(self.seeds),
            "shapes": [list(p.shape) for p in self.net.parameters()],
        }

    def _save_checkpoint(self) -> None:
        """Write a checkpoint and then rename it, so that the last complete one is never lost."""
        path, fabric = self.checkpoint, self.fabric
        if path is None:
            return
        temporary = path.with_name(path.name + ".part")
        content = {
            "net": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler.state_dict(),
            "state": dict(vars(self.state)),
            "fingerprint": self.fingerprint(),
        }
        fabric.save(temporary, content)
        fabric.barrier()
        if fabric.is_global_zero:
            if path.is_dir():  # a sharded checkpoint is a folder
                shutil.rmtree(path)
            os.replace(temporary, path)
        fabric.barrier()

    def _restore_checkpoint(self) -> None:
        """Load net, optimizer, scheduler and state, if there is a checkpoint; raise ArgumentError if of another run."""
        path = self.checkpoint
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)  # raises now and not after the first epoch
        if not path.exists():
            return
        if path.is_file():
            self._check_fingerprint(path)
        modules = {"net": self.model, "optimizer": self.optimizer}
        rest = self.fabric.load(path, modules, strict=False, weights_only=True)
        self.lr_scheduler.load_state_dict(rest["lr_scheduler"])
        vars(self.state).update(rest["state"])

    def _check_fingerprint(self, path: Path) -> None:
        """Raise unless the checkpoint can be read and was written by this run."""
        folder, hint = str(path.parent), "delete it, or choose another folder"
        try:
            theirs = torch.load(path, map_location="cpu", weights_only=True)["fingerprint"]
        except Exception as error:
            expected = f"a checkpoint of neuboots ({path} cannot be read: {type(error).__name__})"
            raise ArgumentError("folder", folder, expected, hint=hint) from error
        ours = self.fingerprint().items()
        differences = [f"{key} was {theirs.get(key)}, is {value}" for key, value in ours if theirs.get(key) != value]
        if differences:
            expected = f"a checkpoint of the same run ({'; '.join(differences)})"
            raise ArgumentError("folder", folder, expected, hint=hint)


@contextmanager
def _catch_interrupt() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets; the second raises KeyboardInterrupt at once."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def handle(signum: int, frame: Any) -> None:
        interrupted.set()
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


def describe_method(method: Any) -> str:
    """Return a method's name and options, the same in every process, for the fingerprint of checkpoints.

    Args:
        method: A method.

    Returns:
        Its description.
    """
    options = {option.name: _describe_option(getattr(method, option.name)) for option in fields(method)}
    return f"{type(method).__name__} {options}"


def _describe_option(value: Any) -> str:
    plain = (bool, int, float, str, nn.Module, type(None))
    return repr(value) if is_dataclass(value) or isinstance(value, plain) else describe_callable(value)


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
        """
        return self._fit(resolve_fit(model if self.info.needs_net else nn.Identity(), data, config, val_data))

    @abstractmethod
    def _fit(self, inputs: FitInputs) -> P:
        """Train the method on validated inputs."""

    def _train(
        self, net: nn.Module, inputs: FitInputs, objective_at: Callable[[int], Objective], validate: ValidationStep
    ) -> None:
        """Run the training loop on a net, in place."""
        train(
            net,
            inputs.data,
            objective_at,
            inputs.config,
            val_data=inputs.val_data,
            validate=validate,
            identity=describe_method(self),
        )

    def _train_net(self, net: nn.Module, inputs: FitInputs, before_step: Callable[[Batch], None] | None = None) -> None:
        """Train a single net with the mean loss, in place."""
        if has_lazy_layers(net):
            load_example(net, inputs.data, seed=inputs.config.seed)

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            if before_step is not None:
                before_step(batch)
            return mean_loss(self.loss, compute_output(model, batch.x), batch.y)

        def validate(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return validation_metrics(self.loss, compute_output(model, batch.x), batch.y)

        self._train(net, inputs, lambda epoch: objective, validate)
