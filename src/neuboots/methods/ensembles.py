"""Ensembles of K separately trained nets: deep ensemble, standard bootstrap and Bayesian bootstrap.

    f_b(x) = net_{k(b)}(x),   net_k = argmin 1/n Σᵢ w_{ki} ℓ(f(Xᵢ), yᵢ)

Deep ensemble: w = 1; members differ in their initial weights and in the order of the data. Lakshminarayanan, Pritzel
and Blundell, NeurIPS 2017; here with the plain loss and without adversarial training, as compared by Ashukha, Lyzhov,
Molchanov and Vetrov, Pitfalls of in-domain uncertainty estimation and ensembling in deep learning, ICLR 2020.

Standard bootstrap (eq. 2.2): w_k ~ Multinomial(n; 1/n, …, 1/n), how often each point is drawn with replacement. Efron,
Bootstrap methods: another look at the jackknife, Annals of Statistics 1979.

Bayesian bootstrap (eq. 2.3): w_k ~ n × Dirichlet(1, …, 1); every point has a positive weight. Rubin, The Bayesian
bootstrap, Annals of Statistics 1981; Newton and Raftery, Approximate Bayesian inference with the weighted likelihood
bootstrap, JRSS B 1994.

Weights are drawn over all n points, not within a batch. Initial weights, data order and bootstrap weights of member k
are functions of (seed, k) alone: an ensemble of 5 starts with the members of an ensemble of 3, and member 0 with
constant weights is the deterministic net of the same seed. Small nets are trained together by `torch.func.vmap`, with
the same result as one after another; large nets are trained sequentially, each with its own checkpoint.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._prng import derive_keys, derive_seed
from neuboots._validation import ArgumentError, Count, check_int, check_memory, check_types
from neuboots.head import (
    add_output_axis,
    cast_inputs,
    compute_output,
    copy_net,
    load_example,
    map_float_tensors,
    unwrap_model,
)
from neuboots.loading import Batch, check_length, dataset_length
from neuboots.losses import Loss, check_per_example, valid_mask, weighted_mean
from neuboots.methods._base import count_net_bytes, register
from neuboots.methods._vmap import StackedNets, find_vmap_obstacle
from neuboots.prediction import Predictor, SampleStream, draw_member_order, stream_members
from neuboots.training import (
    BaseMethod,
    FitInputs,
    TrainingConfig,
    describe_callable,
    initialize_model,
    mean_validation_metrics,
    train,
    validation_metrics,
)
from neuboots.weights import Dirichlet, Multinomial, WeightDistribution

Perturbation = Callable[[Tensor, Any], Any]  # (objective at x, x with gradients) → further inputs to train on

MAX_VMAP_PARAMETERS = 300_000  # per net; in larger nets the operations dominate, not the overhead per operation
_MAX_STACKED_ROWS = 128  # per forward pass of stacked nets, so that activations fit in the cache

# Optimizers that update each element separately, so that stacked nets are updated as separate nets are.
_ELEMENTWISE_OPTIMIZERS = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad),
    *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD),
)


def _derive_member_seed(seed: int, k: int) -> int:
    """Return the seed of member k; that of member 0 is the seed itself."""
    return seed if k == 0 else derive_seed(seed, "member", k)


@dataclass(frozen=True)
class EnsemblePredictor(Predictor):
    """Predictor whose replicates are K nets: each run of K replicates has all of them, in an order drawn by the seed.

    Args:
        members: The nets, as a list or stacked in one module.
        name: Name of the method.
    """

    members: nn.ModuleList | StackedNets
    name: str

    @property
    def vectorized(self) -> bool:
        """Whether the nets are stacked in one module."""
        return isinstance(self.members, StackedNets)

    @property
    def nets(self) -> list[nn.Module]:
        """The K nets; copies if they are stacked."""
        return self.members.nets() if isinstance(self.members, StackedNets) else list(self.members)

    @property
    def net(self) -> nn.Module:
        return self.members.template if isinstance(self.members, StackedNets) else self.members[0]

    @property
    def module(self) -> nn.Module:
        return self.members

    @property
    def num_distinct(self) -> int:
        return len(self.members)

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        x = cast_inputs(self.members, x)
        run = self._run_stacked if isinstance(self.members, StackedNets) else self._run_sequentially
        return stream_members(num_samples, len(self.members), partial(run, x), seed=seed)

    def _run_sequentially(self, x: Any, numbers: Tensor) -> Tensor:
        return torch.stack([add_output_axis(compute_output(self.nets[k], x)) for k in numbers.tolist()])

    def _run_stacked(self, x: Any, numbers: Tensor) -> Tensor:
        parts = torch.split(x, _MAX_STACKED_ROWS) if isinstance(x, Tensor) and len(x) else [x]
        outputs = torch.cat([self.members(part, shared_input=True) for part in parts], 1)
        outputs = add_output_axis(outputs, ndim=3)  # (K, N, C, *)
        return outputs if len(numbers) == len(outputs) else outputs[numbers.to(outputs.device)]

    def config(self) -> dict[str, Any]:
        return {"method": self.name, "num_members": len(self.members), "vectorized": self.vectorized}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "EnsemblePredictor":
        check_types("predictor", config, {"num_members": Count, "vectorized": bool})
        nets = [net, *(copy_net(net) for _ in range(config["num_members"] - 1))]
        return cls((StackedNets(nets) if config["vectorized"] else nn.ModuleList(nets)).eval(), config["method"])


# -- methods -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnsembleMethod(BaseMethod[EnsemblePredictor]):
    """Base class of the methods that train K nets.

    A subclass sets the distribution of the weights over the n points, or trains on perturbed inputs as well.

    Args:
        loss: Loss per example.
        num_members: Number of nets K.
        vectorized: Whether to train the nets together with `torch.func.vmap`; None decides by the size of the net and
            by a test that the result is the same.
    """

    num_members: int = 5
    vectorized: bool | None = None

    _weight_distribution: ClassVar[WeightDistribution | None] = None  # None: all weights are 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("num_members", self.num_members, minimum=1)
        if self.vectorized not in (None, True, False):
            raise ArgumentError("vectorized", self.vectorized, "True, False or None")

    def _make_perturbation(self, data: Dataset[Any], config: TrainingConfig) -> Perturbation | None:
        """Return a function that perturbs the inputs of a batch, to train on them as well."""
        return None

    def _fit(self, inputs: FitInputs) -> EnsemblePredictor:
        data, config = inputs.data, inputs.config
        first = initialize_model(inputs.member_factory, config.seed)
        member_bytes = count_net_bytes(first)
        if self._weight_distribution is not None:
            member_bytes += 4 * check_length(data)
        check_memory("num_members", self.num_members, self.num_members * member_bytes, hint="use fewer members")
        seeds = [_derive_member_seed(config.seed, k) for k in range(self.num_members)]
        members = fit_members(
            [first, *(initialize_model(inputs.member_factory, seed) for seed in seeds[1:])],
            data,
            config,
            loss=self.loss,
            seeds=seeds,
            weights=self._draw_weights(data, config.seed),
            identity=replace(self, num_members=1, vectorized=None),  # a member is independent of K
            val_data=inputs.val_data,
            perturb=self._make_perturbation(data, config),
            vectorized=self.vectorized,
        )
        return EnsemblePredictor(members.eval(), self.info.name)

    def _row_weights(
        self, predictor: EnsemblePredictor, data: Dataset[Any], num_samples: int, seed: int, fit_seed: int
    ) -> Tensor | None:
        if (self.num_members, self.info.name) != (len(predictor.members), predictor.name):
            found = f"{len(predictor.members)} members of {predictor.name}"
            raise ArgumentError("predictor", found, f"{self.num_members} of {self.info.name}")
        weights = self._draw_weights(data, fit_seed)
        return None if weights is None else weights[draw_member_order(len(weights), num_samples, seed=seed)]

    def _draw_weights(self, data: Dataset[Any], seed: int) -> Tensor | None:
        """Draw the weights of all members: (K, n)."""
        if self._weight_distribution is None:
            return None
        keys, n = derive_keys(torch.arange(self.num_members), seed, "point weights"), check_length(data)
        return torch.cat([self._weight_distribution.sample(key, n).float() for key in torch.split(keys, 1)])


@register(
    "deep-ensemble",
    predictor=EnsemblePredictor,
    summary="K nets with different initial weights and data order",
    members=True,
    train_cost="O(LK)",
    reference="Lakshminarayanan et al., NeurIPS 2017; Ashukha et al., ICLR 2020",
)
@dataclass(frozen=True)
class DeepEnsemble(EnsembleMethod):
    """K nets that differ in their initial weights and in the order of their data.

    Args:
        loss: Loss per example.
        num_members: Number of nets K.
        vectorized: Whether to train the nets together; None decides by the net.

    Example:
        >>> from neuboots import TrainingConfig
        >>> data = (torch.randn(8, 2), torch.arange(8) % 3)
        >>> predictor = DeepEnsemble(num_members=3).fit(nn.Linear(2, 3), data, TrainingConfig(epochs=1, progress=False))
        >>> predictor.predict(torch.zeros(1, 2), 3).samples.shape  # (B, N, C)
        torch.Size([3, 1, 3])
    """


@register(
    "standard-bootstrap",
    predictor=EnsemblePredictor,
    summary="K nets on data drawn with replacement",
    members=True,
    train_cost="O(LK)",
    reference="Efron, Annals of Statistics 1979",
)
@dataclass(frozen=True)
class StandardBootstrap(EnsembleMethod):
    """K nets, each on n points drawn with replacement (eq. 2.2).

    Args:
        loss: Loss per example.
        num_members: Number of nets K.
        vectorized: Whether to train the nets together; None decides by the net.

    Example:
        >>> from neuboots import TrainingConfig
        >>> method = StandardBootstrap(num_members=3)
        >>> data = (torch.randn(8, 2), torch.arange(8) % 3)
        >>> predictor = method.fit(nn.Linear(2, 3), data, TrainingConfig(epochs=1, progress=False))
        >>> predictor.predict(torch.zeros(1, 2), 3).samples.shape  # (B, N, C)
        torch.Size([3, 1, 3])
    """

    num_members: int = 20

    _weight_distribution: ClassVar[WeightDistribution | None] = Multinomial()


@register(
    "bayesian-bootstrap",
    predictor=EnsemblePredictor,
    summary="K nets on data with random (Dirichlet) weights",
    members=True,
    train_cost="O(LK)",
    reference="Rubin, Annals of Statistics 1981; Newton and Raftery, JRSS B 1994",
)
@dataclass(frozen=True)
class BayesianBootstrap(EnsembleMethod):
    """K nets, each on all n points with Dirichlet weights (eq. 2.3).

    Args:
        loss: Loss per example.
        num_members: Number of nets K.
        vectorized: Whether to train the nets together; None decides by the net.

    Example:
        >>> from neuboots import TrainingConfig
        >>> method = BayesianBootstrap(num_members=3)
        >>> data = (torch.randn(8, 2), torch.arange(8) % 3)
        >>> predictor = method.fit(nn.Linear(2, 3), data, TrainingConfig(epochs=1, progress=False))
        >>> predictor.predict(torch.zeros(1, 2), 3).samples.shape  # (B, N, C)
        torch.Size([3, 1, 3])
    """

    num_members: int = 20

    _weight_distribution: ClassVar[WeightDistribution | None] = Dirichlet()


# -- training ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _EnsembleObjective:
    """Objective of one net, or the sum of the objectives of K stacked nets: 1/N Σᵢ wᵢ ℓᵢ, also at perturbed inputs."""

    loss: Loss
    weights: Tensor | None  # (n,), or (K, n) for stacked nets
    perturb: Perturbation | None
    stacked: bool

    def __call__(self, net: nn.Module, batch: Batch) -> Tensor:
        x = cast_inputs(net, batch.x)
        w = torch.ones(batch.index.shape) if self.weights is None else self.weights.gather(-1, batch.index)
        if self.perturb is None:
            return self._weighted_loss(net, x, batch.y, w)
        x = map_float_tensors(lambda part: part.detach().requires_grad_(), x)
        value = self._weighted_loss(net, x, batch.y, w)
        return value + self._weighted_loss(net, self.perturb(value, x), batch.y, w)

    def _weighted_loss(self, net: nn.Module, x: Any, y: Tensor, w: Tensor) -> Tensor:
        mask = valid_mask(self.loss, y)
        if not self.stacked:
            return weighted_mean(self.loss(compute_output(net, x), y), w, mask)
        outputs = net(x)  # (K, N, C, *)
        losses = self.loss(outputs.flatten(0, 1), y.flatten(0, 1))
        check_per_example(losses, w.numel())
        losses = losses.view(*w.shape, *losses.shape[1:])  # (K, N, *)
        mapped = torch.vmap(weighted_mean, in_dims=(0, 0, None if mask is None else 0))
        return mapped(losses, w.to(losses), mask).sum()


def fit_members(
    nets: Sequence[nn.Module],
    data: Dataset[Any],
    config: TrainingConfig,
    *,
    loss: Loss,
    seeds: Sequence[int],
    weights: Tensor | None,
    identity: Any,
    val_data: Dataset[Any] | None = None,
    perturb: Perturbation | None = None,
    vectorized: bool | None = None,
) -> nn.ModuleList | StackedNets:
    """Train K nets in place, together or sequentially.

    Args:
        nets: The nets.
        data: Training data, of (x, y).
        config: Training options.
        loss: Loss with one value per example.
        seeds: Seed of each net, which decides on the order of its batches.
        weights: Weights of the n examples for each net, (K, n); None for 1.
        identity: What is trained, to recognise its checkpoints.
        val_data: Validation data.
        perturb: Function that returns further inputs to train on.
        vectorized: Whether to train the nets together; None decides by the net.

    Returns:
        The nets, as a list or stacked in one module.

    Raises:
        ArgumentError: If the nets share weights, or `vectorized` is True and the nets cannot be stacked.
    """
    nets = [unwrap_model(net) for net in nets]
    examples = [load_example(net, data, seed=seed) for net, seed in zip(nets, seeds, strict=True)]
    _check_separate(nets)

    def fit(net: nn.Module, w: Tensor | None, config: TrainingConfig, which: str, **options: Any) -> None:
        stacked = isinstance(net, StackedNets)
        objective = _EnsembleObjective(loss, w, perturb, stacked)
        options |= {"val_data": val_data, "validate": partial(_validate, loss, stacked), "identity": (identity, which)}
        train(net, data, lambda epoch: objective, config, **options)

    if _is_vectorizable(nets, data, config, examples[0], vectorized):
        stacked = StackedNets(nets)
        fit(stacked, weights, config, f"{len(nets)} together", seeds=seeds)
        return stacked
    for k, (net, seed) in enumerate(zip(nets, seeds, strict=True)):
        folder = None if config.folder is None else Path(config.folder) / f"member-{k}"
        title = f"member {k + 1}/{len(nets)}" if len(nets) > 1 else ""
        member_config = replace(config, seed=seed, folder=folder)
        fit(net, None if weights is None else weights[k], member_config, f"member {k}", title=title)
    return nn.ModuleList(nets)


def _validate(loss: Loss, stacked: bool, net: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the validation metrics of a net, or their means over stacked nets."""
    if not stacked:
        return validation_metrics(loss, compute_output(net, batch.x), batch.y)
    return mean_validation_metrics(loss, net(cast_inputs(net, batch.x), shared_input=True), batch.y)


def _check_separate(nets: list[nn.Module]) -> None:
    """Raise if nets share tensors, whose values one member would overwrite for another."""
    owners: dict[int, int] = {}
    for k, net in enumerate(nets):
        for tensor in [*net.parameters(), *net.buffers()]:
            if tensor.numel() and owners.setdefault(tensor.data_ptr(), k) != k:
                expected = "a function that returns nets without shared weights"
                raise ArgumentError("model", type(net), expected, hint="build the net inside the function")


def _is_vectorizable(
    nets: list[nn.Module], data: Dataset[Any], config: TrainingConfig, example: Any, vectorized: bool | None
) -> bool:
    if len(nets) == 1 or vectorized is False or (vectorized is None and not _is_small(nets[0])):
        return False  # without a test run, which copies all nets
    obstacle = _find_config_obstacle(data, config) or find_vmap_obstacle(nets, example)
    if vectorized and obstacle:
        raise ArgumentError("vectorized", vectorized, f"False or None, since {obstacle}")
    return obstacle is None


def _is_small(net: nn.Module) -> bool:
    """Whether stacking saves time. On a CPU, K stacked convolutions are slower than K separate ones (`make bench`)."""
    convolutional = any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in net.modules())
    size = sum(parameter.numel() for parameter in net.parameters())
    return size <= MAX_VMAP_PARAMETERS and (torch.cuda.is_available() or not convolutional)


def _find_config_obstacle(data: Dataset[Any], config: TrainingConfig) -> str | None:
    """Return why nets cannot be trained together on these data with these options, or None if they can."""
    optimizer = config.optimizer  # a custom function may depend on shapes, which stacking changes
    while isinstance(optimizer, partial):
        optimizer = optimizer.func
    distributed = (config.devices, config.num_nodes, config.strategy) != (1, 1, "auto")
    elementwise = f"the optimizer {describe_callable(optimizer)} is not known to update each element separately"
    obstacles = {
        "an iterable data set is read by one net at a time": dataset_length(data) is None,
        "workers load data for one net at a time": config.num_workers > 0,
        "members on several devices are trained sequentially": distributed,
        "clip_norm needs the gradient of one net": config.clip_norm is not None,
        "patience may stop each net at another epoch": config.patience is not None,
        elementwise: optimizer not in _ELEMENTWISE_OPTIMIZERS,
    }
    return next((obstacle for obstacle, present in obstacles.items() if present), None)
