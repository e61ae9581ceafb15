"""SWAG: a Gaussian over all weights, fitted to the iterates of the end of the training.

    θ_b = θ̄ + √(s/2) · ( σ ⊙ z₁ + D̂ z₂ / √(K − 1) ),   z₁, z₂ ~ N(0, I)
    θ̄ = 1/T Σ_t θ_t,   σ² = 1/T Σ_t (θ_t − θ̄)²,   D̂ = the last K deviations θ_t − θ̄_t from the mean so far

With s = 1 the covariance is ½ diag σ² + D̂ D̂ᵀ / (2 (K − 1)), the paper's.

Maddox, Garipov, Izmailov, Vetrov and Wilson, A Simple Baseline for Bayesian Uncertainty in Deep Learning, NeurIPS
2019. The first part of the training follows the recipe's schedule, the rest has a constant learning rate, by default
half the first one (0.05 after 0.1, as in the authors' scripts for CIFAR-100), and an iterate is collected at the end
of each epoch. BatchNorm statistics belong to weights: for each θ_b they are computed anew on training inputs.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset, Subset

from neuboots._prng import derive_keys, stable_hash
from neuboots._streaming import num_bytes
from neuboots.head import cast_inputs, eval_mode, unwrap_model
from neuboots.loading import Batch, EpochLoader, dataset_length, preserve_rng_state
from neuboots.losses import CrossEntropy, Loss, check_loss, valid_mask, weighted_mean
from neuboots.methods._base import (
    add_output_axis,
    compute_output,
    functional_output,
    load_example,
    register,
    validation_metrics,
)
from neuboots.prediction import Predictor, SampleStream, stream_forward_passes
from neuboots.training import (
    Objective,
    SchedulerFactory,
    TrainingConfig,
    describe_callable,
    describe_method,
    initialize_model,
    train,
)

_MIN_ITERATES = 10  # iterates to collect, if need be more often than once an epoch
_MAX_CACHE_BYTES = 1 << 26  # bytes of BatchNorm statistics kept for replicates already seen


# -- what is collected ---------------------------------------------------------------------------------


class IterateMoments(nn.Module):
    """The net, and the moments of its weights: buffers, so that a checkpoint holds them.

    Weights are all parameters that learn, flat: (P,).
    """

    mean: Tensor  # θ̄: (P,)
    squares: Tensor  # Σ_t (θ_t − θ̄)²: (P,), by Welford's rule
    deviations: Tensor  # D̂ᵀ: (K, P)
    count: Tensor  # T
    seen: Tensor  # the step of the last iterate

    def __init__(self, net: nn.Module, columns: int, frozen: Collection[str] = ()) -> None:
        super().__init__()
        self.net = net
        self.names = [name for name, p in net.named_parameters() if p.requires_grad and name not in frozen]
        flat = self.flat()
        self.register_buffer("mean", torch.zeros_like(flat))
        self.register_buffer("squares", torch.zeros_like(flat))
        self.register_buffer("deviations", flat.new_zeros(columns, len(flat)))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.full((), -1))
        self.inputs: StoredInputs | None = None  # for BatchNorm, after the training
        # every rank computes the same: nothing to send at each step
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_buffers(recurse=False)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)

    def flat(self) -> Tensor:
        """The weights as they are now: (P,)."""
        parameters = dict(self.net.named_parameters())
        return torch.cat([parameters[name].detach().flatten() for name in self.names])

    def collect(self, step: int) -> None:
        """Add the iterate after so many steps, once."""
        if step <= int(self.seen):
            return
        theta = self.flat()
        self.seen.fill_(step)
        self.count += 1
        shift = theta - self.mean
        self.mean += shift / self.count
        last = theta - self.mean
        self.squares += shift * last
        self.deviations[(int(self.count) - 1) % len(self.deviations)] = last

    def weights(self, seed: int, b: int, scale: float) -> dict[str, Tensor]:
        """θ_b by name: a function of (seed, b) alone."""
        rng = torch.Generator().manual_seed(stable_hash(seed, "swag", b))
        columns = self.deviations[: int(self.count)]  # (K, P)
        z1 = torch.randn(len(self.mean), generator=rng, dtype=self.mean.dtype).to(self.mean.device)
        z2 = torch.randn(len(columns), generator=rng, dtype=self.mean.dtype).to(self.mean.device)
        spread = (self.squares / self.count).sqrt_().mul_(z1) + z2 @ columns / math.sqrt(len(columns) - 1)
        theta = self.mean + math.sqrt(0.5 * scale) * spread
        parameters = dict(self.net.named_parameters())
        parts = torch.split(theta, [parameters[name].numel() for name in self.names])
        return {name: part.view_as(parameters[name]) for name, part in zip(self.names, parts, strict=True)}


class StoredInputs(nn.Module):
    """Training inputs, as the net takes them: a tensor, a tuple of them, or a dict."""

    def __init__(self, parts: list[Tensor], keys: list[str] | int | None) -> None:
        super().__init__()
        self.keys = keys  # the names of a dict, the number of a tuple, None for a single tensor
        for i, part in enumerate(parts):
            self.register_buffer(f"part{i}", part)

    @classmethod
    def of(cls, x: Any) -> "StoredInputs":
        if isinstance(x, Mapping):
            return cls(list(x.values()), list(x))
        return cls(list(x), len(x)) if isinstance(x, tuple | list) else cls([x], None)

    @classmethod
    def described(cls, description: dict[str, Any]) -> "StoredInputs":
        dtypes = [getattr(torch, name) for name in description["dtypes"]]
        shapes = zip(description["shapes"], dtypes, strict=True)
        return cls([torch.zeros(shape, dtype=dtype) for shape, dtype in shapes], description["keys"])

    def describe(self) -> dict[str, Any]:
        parts = list(self.buffers())
        dtypes = [str(part.dtype).removeprefix("torch.") for part in parts]
        return {"keys": self.keys, "shapes": [list(part.shape) for part in parts], "dtypes": dtypes}

    def batches(self, size: int) -> Iterator[Any]:
        """Batches of about the same number of rows, `size` or more: none is too small for BatchNorm."""
        parts = list(self.buffers())
        num = max(1, len(parts[0]) // size)
        for rows in zip(*(torch.tensor_split(part, num) for part in parts), strict=True):
            if isinstance(self.keys, list):
                yield dict(zip(self.keys, rows, strict=True))
            else:
                yield rows[0] if self.keys is None else rows


# -- BatchNorm -----------------------------------------------------------------------------------------


def find_batch_norms(net: nn.Module) -> list[str]:
    """The BatchNorm layers that keep statistics and gather them in training; some nets keep theirs frozen."""
    modes = [(module, module.training) for module in net.modules()]
    try:
        net.train()
        layers = [(name, layer) for name, layer in net.named_modules() if isinstance(layer, _BatchNorm)]
        return [name for name, layer in layers if layer.training and layer.running_mean is not None]
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _gathering(layers: Collection[_BatchNorm]) -> Iterator[None]:
    """These layers take the mean of the statistics of all batches; afterwards they are as they were."""
    before = [(layer, layer.training, layer.momentum) for layer in layers]
    try:
        for layer in layers:
            layer.training, layer.momentum = True, None
        yield
    finally:
        for layer, training, momentum in before:
            layer.training, layer.momentum = training, momentum


def recompute_statistics(
    net: nn.Module, norms: Collection[str], weights: dict[str, Tensor], inputs: StoredInputs, batch_size: int
) -> dict[str, Tensor]:
    """The statistics of these BatchNorm layers with these weights on these inputs, by name of the buffer.

    Each layer is normalised by its batch, as in training, and keeps the mean of the batches' means and variances.
    """
    layers = {name: cast(_BatchNorm, net.get_submodule(name)) for name in norms}
    names = [f"{name}.{buffer}" for name, layer in layers.items() for buffer, _ in layer.named_buffers(recurse=False)]
    buffers = dict(net.named_buffers())
    # counts from zero: the first batch then overwrites the statistics. A layer that does not gather on a batch of one
    # row goes on with those it has.
    fresh = {
        name: torch.zeros_like(buffers[name]) if name.endswith("num_batches_tracked") else buffers[name].clone()
        for name in names
    }
    with torch.no_grad(), eval_mode(net), _gathering(layers.values()):
        for x in inputs.batches(batch_size):
            functional_output(net, {**weights, **fresh}, cast_inputs(net, x))  # the layers write into `fresh`
    return fresh


# -- the learning rate ---------------------------------------------------------------------------------


class ConstantTailLR(LRScheduler):
    """A schedule for the first `start` steps, then one learning rate for each group of parameters."""

    def __init__(self, first: LRScheduler, start: int, rates: list[float]) -> None:
        self.first, self.start, self.rates = first, start, rates
        self.optimizer, self.last_epoch = first.optimizer, 0
        self._hold()

    def _hold(self) -> None:
        if self.last_epoch >= self.start:
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        if self.last_epoch < self.start:
            self.first.step()
        self._hold()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.last_epoch, "first": self.first.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["steps"]
        self.first.load_state_dict(state_dict["first"])


def make_constant_tail(schedule: SchedulerFactory, start: int, rate: float | None) -> SchedulerFactory:
    """The schedule for `start` steps, then `rate`, or half of the optimiser's first learning rate."""

    def make(optimizer: Optimizer, total_steps: int) -> LRScheduler:
        rates = [0.5 * float(group["lr"]) if rate is None else rate for group in optimizer.param_groups]
        first = schedule(optimizer, total_steps)
        return first if isinstance(first, ReduceLROnPlateau) else ConstantTailLR(first, start, rates)

    make.__qualname__ = f"{describe_callable(schedule)}, then constant"  # part of a checkpoint's identity
    return make


# -- the method ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SWAGPredictor(Predictor):
    """B nets with weights drawn around the mean of the iterates."""

    iterates: IterateMoments
    scale: float
    batch_size: int  # of the passes that compute BatchNorm statistics
    norms: tuple[str, ...]  # the BatchNorm layers whose statistics they are
    _statistics: OrderedDict[Any, dict[str, Tensor]] = field(
        default_factory=OrderedDict, init=False, repr=False, compare=False
    )

    @property
    def net(self) -> nn.Module:
        return self.iterates.net

    @property
    def module(self) -> nn.Module:
        return self.iterates

    def tensors(self, b: int, *, seed: int = 0) -> dict[str, Tensor]:
        """The weights of replicate b and the BatchNorm statistics that go with them, by name."""
        with torch.no_grad():
            weights = self.iterates.weights(seed, b, self.scale)
        if self.iterates.inputs is None:
            return weights
        return {**weights, **self._statistics_of(seed, b, weights, self.iterates.inputs)}

    def _statistics_of(self, seed: int, b: int, weights: dict[str, Tensor], inputs: StoredInputs) -> dict[str, Tensor]:
        """From memory where the replicate was seen before; the oldest are forgotten first."""
        known, name = self._statistics, (self._state(), seed, b)
        if known and next(iter(known))[0] != name[0]:
            known.clear()  # other weights, other statistics
        if name not in known:
            known[name] = recompute_statistics(self.net, self.norms, weights, inputs, self.batch_size)
            each = sum(num_bytes(tensor) for tensor in known[name].values())
            while len(known) > max(1, _MAX_CACHE_BYTES // each):
                known.popitem(last=False)
        return known[name]

    def _state(self) -> int:
        """A number that changes with any parameter or buffer."""
        tensors = [*self.iterates.parameters(), *self.iterates.buffers()]
        versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
        return hash(tuple((t.data_ptr(), t.dtype, t.device, v) for t, v in zip(tensors, versions, strict=True)))

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        net = self.net
        x = cast_inputs(net, x)

        def run(b: int) -> Tensor:
            tensors = self.tensors(b, seed=seed)
            with eval_mode(net):
                return add_output_axis(functional_output(net, tensors, x))

        return stream_forward_passes(num_samples, run)

    def config(self) -> dict[str, Any]:
        inputs = self.iterates.inputs
        learned = set(self.iterates.names)
        return {
            "method": "swag",
            "scale": self.scale,
            "batch_size": self.batch_size,
            "columns": len(self.iterates.deviations),
            "frozen": [name for name, _ in self.net.named_parameters() if name not in learned],
            "norms": list(self.norms),
            "inputs": None if inputs is None else inputs.describe(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "SWAGPredictor":
        iterates = IterateMoments(net, config["columns"], config["frozen"])
        if config["inputs"] is not None:
            iterates.inputs = StoredInputs.described(config["inputs"])
        return cls(iterates.eval(), config["scale"], config["batch_size"], tuple(config["norms"]))


@register(
    "swag",
    predictor=SWAGPredictor,
    summary="one net with a Gaussian over all its weights, fitted to the last iterates: B nets",
    reference="Maddox et al., NeurIPS 2019",
    early_stopping=False,
)
@dataclass(frozen=True)
class SWAG:
    """Options of SWAG.

    Iterates are collected over the last (1 − `start`) of the training, every `every` steps (None: at the end of each
    epoch, or more often where that would be fewer than ten). `_rank` is the number K of deviations kept, `scale`
    multiplies the covariance, `learning_rate` is the constant one (None: half of the optimiser's first). If the net
    has BatchNorm, `refresh_rows` training inputs are kept with the predictor, and each replicate pays one pass over
    them, once; layers that the net holds in evaluation mode while it trains keep their statistics.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.zeros(32, 2), torch.arange(32) % 3)
    >>> model = lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> predictor = SWAG().fit(model, data, TrainingConfig(epochs=8, batch_size=8, progress=False))
    >>> int(predictor.iterates.count), predictor.predict(torch.zeros(4, 2), 10).samples.shape
    (9, torch.Size([10, 4, 3]))
    """

    loss: Loss = field(default_factory=CrossEntropy)
    start: float = 0.75
    rank: int = 20
    scale: float = 1.0
    every: int | None = None
    learning_rate: float | None = None
    refresh_rows: int = 512

    def __post_init__(self) -> None:
        check_loss(self.loss)
        if not (_number(self.start) and 0.0 <= self.start < 1.0):
            raise ValueError(f"got start={self.start!r}; expected the part of the training before, from 0 to below 1")
        if not (_number(self.scale) and 0.0 < self.scale < math.inf):
            raise ValueError(f"got scale={self.scale!r}; expected a positive number (1 is the paper's)")
        rate = self.learning_rate
        if rate is not None and not (_number(rate) and 0.0 < rate < math.inf):
            raise ValueError(f"got learning_rate={rate!r}; expected a positive number, or None for half the first one")
        for name, least in (("rank", 2), ("every", 1), ("refresh_rows", 2)):
            value = getattr(self, name)
            missing = value is None and name == "every"
            if not missing and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"got {name}={value!r}; expected at least {least}, and a whole number")

    def fit(
        self,
        model: Callable[[], nn.Module],
        data: Dataset[Any],
        config: TrainingConfig,
        *,
        val_data: Dataset[Any] | None = None,
    ) -> SWAGPredictor:
        """Train the net that `model()` gives, on (x, y) rows, as the recipe says, and collect its iterates."""
        net = unwrap_model(initialize_model(model, config.seed))
        load_example(net, data, seed=config.seed)  # lazy layers take their shapes
        if not any(parameter.requires_grad for parameter in net.parameters()):
            raise ValueError("the net has no parameters to train; expected at least one with requires_grad")
        start, steps = self.steps(data, config)
        iterates = IterateMoments(net, min(self.rank, len(steps)))

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            if batch.step in steps:  # the iterate after as many steps
                iterates.collect(batch.step)
            losses = self.loss(compute_output(model, batch.x), batch.y)
            return weighted_mean(losses, losses.new_ones(len(batch.index)), valid_mask(self.loss, batch.y))

        def objective_at(epoch: int) -> Objective:
            return objective

        def validate(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return validation_metrics(self.loss, compute_output(model, batch.x), batch.y)

        train(
            iterates,
            data,
            objective_at,
            replace(config, lr_scheduler=make_constant_tail(config.lr_scheduler, start, self.learning_rate)),
            val_data=val_data,
            validate=validate,
            identity=describe_method(self),
        )
        iterates.collect(steps[-1])
        if int(iterates.count) < 2:
            raise ValueError(
                f"the training stopped with {int(iterates.count)} iterate collected; expected at least 2: leave "
                "patience away, or lower start"
            )
        norms = tuple(find_batch_norms(net))
        if norms:
            iterates.inputs = StoredInputs.of(cast_inputs(net, self._inputs(data, config)))
        return SWAGPredictor(iterates.eval(), self.scale, config.batch_size, norms)

    def steps(self, data: Dataset[Any], config: TrainingConfig) -> tuple[int, range]:
        """The step at which the learning rate becomes constant, and the steps after which an iterate is collected."""
        loader = EpochLoader(
            data, batch_size=config.batch_size, seed=config.seed, steps_per_epoch=config.steps_per_epoch
        )
        total = config.epochs * loader.steps
        start = max(1, math.floor(self.start * total))
        every = self.every or min(loader.steps, max(1, (total - start) // _MIN_ITERATES))
        steps = range(total, start - 1, -every)[::-1]
        if len(steps) < 2:
            raise ValueError(
                f"the recipe has {total} steps, {total - start} of them after start={self.start}, which gives "
                f"{len(steps)} iterate; expected at least 2: train for more epochs, or lower start or every"
            )
        return start, steps

    def _inputs(self, data: Dataset[Any], config: TrainingConfig) -> Any:
        """Training inputs for BatchNorm, chosen by the seed; of a stream, its first ones."""
        n = dataset_length(data)
        if n is not None:
            rows = derive_keys(torch.arange(n), config.seed, "refresh").argsort()[: self.refresh_rows]
            whole, places = (data.dataset, data.indices) if isinstance(data, Subset) else (data, range(n))
            data = Subset(whole, [places[i] for i in rows.tolist()])
        loader = EpochLoader(data, batch_size=self.refresh_rows, seed=config.seed, shuffle=False, steps_per_epoch=1)
        with preserve_rng_state():
            _, batch, _ = next(loader.epoch(0))
        return batch.x


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
