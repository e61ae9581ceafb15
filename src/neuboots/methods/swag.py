"""SWAG: a Gaussian over all weights, fitted to the iterates of the last part of training.

    θ_b = θ̄ + √(s/2) · ( σ ⊙ z₁ + D̂ z₂ / √(K − 1) ),   z₁, z₂ ~ N(0, I)
    θ̄ = 1/T Σ_t θ_t,   σ² = 1/T Σ_t (θ_t − θ̄)²,   D̂ = the last K deviations θ_t − θ̄_t from the running mean

With s = 1 the covariance is ½ diag σ² + D̂ D̂ᵀ / (2 (K − 1)), the paper's.

Maddox, Garipov, Izmailov, Vetrov and Wilson, A Simple Baseline for Bayesian Uncertainty in Deep Learning, NeurIPS
2019. The first part of training follows the learning-rate schedule of the configuration; the rest has a constant
learning rate, by default half the initial one (0.05 after 0.1, as in the authors' scripts for CIFAR-100), and an
iterate is collected at the end of each epoch. BatchNorm statistics depend on the weights: for each θ_b they are
recomputed on training inputs.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import Dataset

from neuboots._prng import derive_keys, stable_hash
from neuboots._validation import (
    ArgumentError,
    Count,
    check_fraction,
    check_int,
    check_memory,
    check_positive,
    check_types,
)
from neuboots.head import add_output_axis, as_tree, call_net, cast_inputs, channels_first, copy_net
from neuboots.loading import Batch, EpochLoader, dataset_length, preserve_rng_state, select_examples
from neuboots.methods._base import count_net_bytes, describe_tensors, functional_output, make_tensors, register
from neuboots.prediction import Predictor, SampleStream, num_bytes, stream_forward_passes
from neuboots.training import (
    BaseMethod,
    FitInputs,
    SchedulerFactory,
    TrainingConfig,
    prepare_net,
)

_MIN_ITERATES = 10  # collected more often than once an epoch if needed
_MAX_CACHE_BYTES = 1 << 26  # of BatchNorm statistics kept for replicates


# -- moments of the iterates ---------------------------------------------------------------------------


class IterateMoments(nn.Module):
    """A net and the moments of its iterates, in buffers, so that checkpoints hold them.

    Args:
        net: The net; its weights are all parameters that are trained, flattened to (P,).
        columns: Number of deviations K.
        frozen: Names of parameters that are not trained.
    """

    mean: Tensor  # θ̄: (P,)
    squares: Tensor  # Σ_t (θ_t − θ̄)²: (P,), by Welford's algorithm
    deviations: Tensor  # D̂ᵀ: (K, P)
    count: Tensor  # T
    last_step: Tensor

    def __init__(self, net: nn.Module, columns: int, frozen: Collection[str] = ()) -> None:
        super().__init__()
        self.net = net
        self.names = [name for name, p in net.named_parameters() if p.requires_grad and name not in frozen]
        theta = self.flatten_weights()
        self.register_buffer("mean", torch.zeros_like(theta))
        self.register_buffer("squares", torch.zeros_like(theta))
        self.register_buffer("deviations", theta.new_zeros(columns, len(theta)))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last_step", torch.full((), -1))
        self.inputs: _StoredInputs | None = None  # for BatchNorm, after training
        # every rank computes the same values, so that DDP need not synchronise them
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_buffers(recurse=False)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)

    def flatten_weights(self) -> Tensor:
        """Return the current weights: (P,)."""
        parameters = dict(self.net.named_parameters())
        return torch.cat([parameters[name].detach().flatten() for name in self.names])

    def collect(self, step: int) -> None:
        """Add the current iterate, once per step."""
        if step <= int(self.last_step):
            return
        theta = self.flatten_weights()
        self.last_step.fill_(step)
        self.count += 1
        delta = theta - self.mean
        self.mean += delta / self.count
        deviation = theta - self.mean
        self.squares += delta * deviation
        self.deviations[(int(self.count) - 1) % len(self.deviations)] = deviation

    def draw_weights(self, seed: int, b: int, scale: float) -> dict[str, Tensor]:
        """Draw θ_b by name, a function of (seed, b) alone."""
        rng = torch.Generator().manual_seed(stable_hash(seed, "swag", b))
        columns = self.deviations[: int(self.count)]  # (K, P)
        z1 = torch.randn(len(self.mean), generator=rng, dtype=self.mean.dtype).to(self.mean.device)
        z2 = torch.randn(len(columns), generator=rng, dtype=self.mean.dtype).to(self.mean.device)
        noise = (self.squares / self.count).sqrt_().mul_(z1) + z2 @ columns / math.sqrt(len(columns) - 1)
        theta = self.mean + math.sqrt(0.5 * scale) * noise
        parameters = dict(self.net.named_parameters())
        parts = torch.split(theta, [parameters[name].numel() for name in self.names])
        return {name: part.view_as(parameters[name]) for name, part in zip(self.names, parts, strict=True)}


# -- BatchNorm statistics ------------------------------------------------------------------------------


class _StoredInputs(nn.Module):
    """Training inputs in buffers, so that they are saved with the predictor.

    Args:
        x: A tensor, or a tuple or dict of tensors.
    """

    def __init__(self, x: Any) -> None:
        super().__init__()
        parts, spec = tree_flatten(as_tree(x))
        self.structure = tree_unflatten(list(range(len(parts))), spec)  # with the number of its buffer at each leaf
        for i, part in enumerate(parts):
            self.register_buffer(f"part{i}", part)

    def describe(self) -> dict[str, Any]:
        """Return structure, shapes and dtypes for JSON."""
        return {"structure": self.structure, "tensors": describe_tensors(dict(self.named_buffers()))}

    def batches(self, size: int) -> Iterator[Any]:
        """Iterate over batches of nearly equal size, at least `size`, so that none is too small for BatchNorm."""
        parts = list(self.buffers())
        num_batches = max(1, len(parts[0]) // size)
        for batch in zip(*(torch.tensor_split(part, num_batches) for part in parts), strict=True):
            yield tree_map(lambda i, batch=batch: batch[i], self.structure)


def _find_batch_norms(net: nn.Module) -> list[str]:
    """Return the names of the BatchNorm layers that update their statistics in training; a net may keep some frozen."""
    layers = [(name, layer) for name, layer in copy_net(net).train().named_modules() if isinstance(layer, _BatchNorm)]
    return [name for name, layer in layers if layer.training and layer.running_mean is not None]


def _recompute_statistics(
    net: nn.Module, norms: Collection[str], weights: dict[str, Tensor], inputs: _StoredInputs, batch_size: int
) -> dict[str, Tensor]:
    """Compute the statistics of BatchNorm layers for other weights of the net.

    Each layer normalises by its batch, as in training, and keeps the means of the batch means and variances.

    Returns:
        The statistics by the names of their buffers.
    """
    net = copy_net(net).eval()
    net.load_state_dict(weights, strict=False)
    layers: dict[str, Any] = {name: net.get_submodule(name) for name in norms}
    for layer in layers.values():
        layer.train()
        layer.momentum = None  # the mean over batches
        # with a count of 0 the first batch overwrites the statistics; a layer that skips a batch keeps its own
        layer.num_batches_tracked.zero_()
    with torch.no_grad():
        for x in inputs.batches(batch_size):
            call_net(net, cast_inputs(net, x))
    return {f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.named_buffers()}


# -- the learning rate ---------------------------------------------------------------------------------


class _ConstantTailLR(LRScheduler):
    """A schedule for the first `start` steps, then a constant learning rate for each parameter group.

    Args:
        first: The schedule of the first steps.
        start: Number of first steps.
        rates: Constant learning rate of each parameter group.
    """

    def __init__(self, first: LRScheduler, start: int, rates: list[float]) -> None:
        self.first, self.start, self.rates = first, start, rates
        self.optimizer, self.last_epoch = first.optimizer, 0

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        if self.last_epoch < self.start:
            self.first.step()
            return
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.last_epoch, "first": self.first.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["steps"]
        self.first.load_state_dict(state_dict["first"])


def _make_constant_tail(lr_scheduler: SchedulerFactory, start: int, rate: float | None) -> SchedulerFactory:
    """Return a schedule that is constant after `start` steps, by default at half the initial learning rate."""

    def make(optimizer: Optimizer, total_steps: int) -> LRScheduler:
        rates = [0.5 * float(group["lr"]) if rate is None else rate for group in optimizer.param_groups]
        first = lr_scheduler(optimizer, total_steps)
        return first if isinstance(first, ReduceLROnPlateau) else _ConstantTailLR(first, start, rates)

    return make


# -- the method ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SWAGPredictor(Predictor):
    """Predictor with B nets, whose weights are drawn around the mean iterate.

    Args:
        iterates: The net and the moments of its iterates.
        scale: Factor s of the covariance.
        batch_size: Batch size of the passes that recompute BatchNorm statistics.
        norms: Names of the BatchNorm layers whose statistics are recomputed.
    """

    iterates: IterateMoments
    scale: float
    batch_size: int
    norms: tuple[str, ...]
    _cache: dict[Any, dict[str, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def net(self) -> nn.Module:
        return self.iterates.net

    @property
    def module(self) -> nn.Module:
        return self.iterates

    def tensors(self, b: int, *, seed: int = 0) -> dict[str, Tensor]:
        """Return the weights and BatchNorm statistics of one replicate, by name.

        Args:
            b: Number of the replicate.
            seed: Seed of the replicates, as in `predict`.
        """
        with torch.no_grad():
            weights = self.iterates.draw_weights(seed, b, self.scale)
        inputs = self.iterates.inputs
        if inputs is None:
            return weights
        # statistics come from a cache of all threads that drops the oldest entries, and those of other weights
        cache, key = self._cache, (self._fingerprint(), seed, b)
        statistics = cache.get(key)
        if statistics is None:
            statistics = _recompute_statistics(self.net, self.norms, weights, inputs, self.batch_size)
            limit = max(1, _MAX_CACHE_BYTES // sum(num_bytes(tensor) for tensor in statistics.values()))
            for old in [*cache]:
                if old[0] != key[0] or len(cache) >= limit:
                    cache.pop(old, None)
            cache[key] = statistics
        return {**weights, **statistics}

    def _fingerprint(self) -> int:
        """Return a hash that changes with any parameter or buffer."""
        tensors = [*self.iterates.parameters(), *self.iterates.buffers()]
        return hash(tuple((t.data_ptr(), t.dtype, t.device, t.is_inference() or t._version) for t in tensors))

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        net = self.net
        x = cast_inputs(net, x)

        def run(b: int) -> Tensor:
            return add_output_axis(channels_first(net, x, functional_output(net, self.tensors(b, seed=seed), x)))

        return stream_forward_passes(num_samples, run)

    def config(self) -> dict[str, Any]:
        inputs = self.iterates.inputs
        return {
            "method": "swag",
            "scale": self.scale,
            "batch_size": self.batch_size,
            "columns": len(self.iterates.deviations),
            "frozen": [name for name, _ in self.net.named_parameters() if name not in self.iterates.names],
            "norms": list(self.norms),
            "inputs": None if inputs is None else inputs.describe(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "SWAGPredictor":
        check_types(
            "predictor",
            config,
            {
                "scale": float,
                "batch_size": Count,
                "columns": Count,
                "frozen": list[str],
                "norms": list[str],
                "inputs": dict | None,
            },
        )
        iterates = IterateMoments(net, config["columns"], config["frozen"])
        if config["inputs"] is not None:
            tensors = make_tensors(config["inputs"]["tensors"])
            iterates.inputs = _StoredInputs(tree_map(lambda i: tensors[f"part{i}"], config["inputs"]["structure"]))
        return cls(iterates.eval(), config["scale"], config["batch_size"], tuple(config["norms"]))


@register(
    "swag",
    predictor=SWAGPredictor,
    summary="one net with a Gaussian over all its weights, fitted to the last iterates: B nets",
    early_stopping=False,
    reference="Maddox et al., NeurIPS 2019",
)
@dataclass(frozen=True)
class SWAG(BaseMethod[SWAGPredictor]):
    """A Gaussian over all weights, fitted to the iterates of the last part of training.

    If the net has BatchNorm layers, training inputs are stored with the predictor, and each replicate costs one pass
    over them, once. Layers that the net keeps in evaluation mode during training keep their statistics.

    Args:
        loss: Loss per example.
        start: Fraction of training before iterates are collected.
        rank: Number of deviations K that are kept.
        scale: Factor s of the covariance.
        every: Number of steps between iterates; None for one at the end of each epoch, or more often to get at least
            ten.
        learning_rate: Constant learning rate while iterates are collected; None for half the initial one.
        refresh_rows: Number of training inputs that are stored to recompute BatchNorm statistics.

    Example:
        >>> from neuboots import TrainingConfig
        >>> data = (torch.zeros(32, 2), torch.arange(32) % 3)
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> predictor = SWAG().fit(net, data, TrainingConfig(epochs=8, batch_size=8, progress=False))
        >>> int(predictor.iterates.count), predictor.predict(torch.zeros(4, 2), 10).samples.shape
        (9, torch.Size([10, 4, 3]))
    """

    start: float = 0.75
    rank: int = 20
    scale: float = 1.0
    every: int | None = None
    learning_rate: float | None = None
    refresh_rows: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("start", self.start, zero=True)
        check_positive("scale", self.scale)
        if self.learning_rate is not None:
            check_positive("learning_rate", self.learning_rate)
        check_int("rank", self.rank, minimum=2)
        check_int("refresh_rows", self.refresh_rows, minimum=2)
        if self.every is not None:
            check_int("every", self.every, minimum=1)

    def _fit(self, inputs: FitInputs) -> SWAGPredictor:
        config = inputs.config
        net, _ = prepare_net(inputs)
        if not any(parameter.requires_grad for parameter in net.parameters()):
            raise ArgumentError("model", type(net), "a net with parameters that require gradients")
        start, steps = self._plan_steps(inputs.data, config)
        rank = min(self.rank, len(steps))
        check_memory("rank", self.rank, (3 + rank) * count_net_bytes(net), hint="use a smaller rank")
        iterates = IterateMoments(net, rank)

        def collect(batch: Batch) -> None:
            if batch.step in steps:
                iterates.collect(batch.step)

        schedule = _make_constant_tail(config.lr_scheduler, start, self.learning_rate)
        inputs = replace(inputs, config=replace(config, lr_scheduler=schedule))
        self._train_net(iterates, inputs, before_step=collect)
        iterates.collect(steps[-1])
        if int(iterates.count) < 2:
            raise ValueError("training stopped before the second iterate; use no patience, or a smaller start")
        norms = tuple(_find_batch_norms(net))
        if norms:
            iterates.inputs = _StoredInputs(cast_inputs(net, self._load_inputs(inputs.data, config)))
        return SWAGPredictor(iterates.eval(), self.scale, config.batch_size, norms)

    def _plan_steps(self, data: Dataset[Any], config: TrainingConfig) -> tuple[int, range]:
        """Return the step from which the learning rate is constant, and the steps at which iterates are collected."""
        loader = EpochLoader(
            data, batch_size=config.batch_size, seed=config.seed, steps_per_epoch=config.steps_per_epoch
        )
        total = config.epochs * loader.steps
        start = max(1, math.floor(self.start * total))
        every = self.every or min(loader.steps, max(1, (total - start) // _MIN_ITERATES))
        steps = range(total, start - 1, -every)[::-1]
        if len(steps) < 2:
            expected = f"at least 2 iterates; training has {total} steps, of which {total - start} are after the start"
            raise ArgumentError("start", self.start, expected, hint="train for more epochs, or lower start or every")
        return start, steps

    def _load_inputs(self, data: Dataset[Any], config: TrainingConfig) -> Any:
        """Return training inputs drawn by the seed, or the first inputs of an iterable data set."""
        n = dataset_length(data)
        if n is not None:
            rows = derive_keys(torch.arange(n), config.seed, "refresh").argsort()[: self.refresh_rows]
            data = select_examples(data, rows.tolist())
        loader = EpochLoader(data, batch_size=self.refresh_rows, seed=config.seed, shuffle=False, steps_per_epoch=1)
        with preserve_rng_state():
            _, batch, _ = next(loader.epoch(0))
        return batch.x
