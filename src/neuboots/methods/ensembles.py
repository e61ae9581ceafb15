"""K nets, each trained by itself: what the bootstraps and the deep ensembles share.

    f_b(x) = net_{k(b)}(x),   net_k = argmin 1/n Σᵢ w_{ki} ℓ(f(Xᵢ), yᵢ)

Member k is named by (seed, k): first weights, order of the rows and bootstrap weights depend on nothing else, so
K = 5 begins with the members of K = 3, and member 0 under constant weights is the plain net of the same seed. Small
nets are trained together, with the same result as one after another; large ones in turn, each with its own
checkpoint, so that a run that was cut short goes on at the member that was under way.

Deep ensemble: K nets that differ in their first weights and in the order of their data.

    p(y | x) = 1/K Σ_k softmax f_{θ_k}(x)

Lakshminarayanan, Pritzel and Blundell, NeurIPS 2017; with the plain cross-entropy and without adversarial training,
as Ashukha, Lyzhov, Molchanov and Vetrov (Pitfalls of in-domain uncertainty estimation and ensembling in deep
learning, ICLR 2020) compare it. `AdversarialDeepEnsemble` is the original.

Standard bootstrap: K nets, each on a data set drawn with replacement.

    θ_k = argmin 1/n Σᵢ w_{ki} ℓ(f_θ(Xᵢ), yᵢ),   w_k ~ Multinomial(n; 1/n, …, 1/n)                        (eq. 2.2)

The weights are drawn over all n points at once, never inside a batch: wᵢ counts how often point i was drawn.

Efron, Bootstrap methods: another look at the jackknife, Annals of Statistics 1979.

Random-weight (Bayesian) bootstrap: K nets, each on all data under smooth random weights.

    θ_k = argmin 1/n Σᵢ w_{ki} ℓ(f_θ(Xᵢ), yᵢ),   w_k ~ n × Dirichlet(1, …, 1)                        (eq. 2.3)

The weights are drawn over all n points at once, never inside a batch: no point is ever left out.

Rubin, The Bayesian bootstrap, Annals of Statistics 1981; Newton and Raftery, Approximate Bayesian inference with the
weighted likelihood bootstrap, JRSS B 1994.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._prng import derive_keys, derive_seed
from neuboots._pytree import map_float_tensors
from neuboots.head import cast_inputs, copy_net, eval_mode, unwrap_model
from neuboots.loading import Batch, dataset_length
from neuboots.losses import CrossEntropy, Loss, check_loss, valid_mask, weighted_mean
from neuboots.methods._base import add_output_axis, compute_output, load_example, register, validation_metrics
from neuboots.methods._vmap import StackedNets, find_vmap_obstacle
from neuboots.prediction import Predictor, SampleStream, stream_members
from neuboots.training import TrainingConfig, describe_callable, describe_method, initialize_model, train
from neuboots.weights import Dirichlet, Multinomial, WeightDistribution

Perturbation = Callable[[Tensor, Any], Any]  # (the objective at x, x with gradients) → other inputs to train on as well

_MAX_STACKED_ROWS = 128  # that K nets side by side take at once: more would not fit in a cache
MAX_VMAP_PARAMETERS = 300_000  # parameters of one net; above, the operations themselves take the time

# Each element is updated by itself, so that K nets in one tensor are updated as K nets apart.
_ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad),
    *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD),
)


def derive_member_seed(seed: int, k: int) -> int:
    """The seed of member k; member 0 has the recipe's own."""
    return seed if k == 0 else derive_seed(seed, "member", k)


def check_members(num_members: int) -> None:
    if isinstance(num_members, bool) or not isinstance(num_members, int) or num_members < 1:
        raise ValueError(f"got num_members={num_members!r}; expected K ≥ 1, a whole number")


@dataclass(frozen=True)
class EnsemblePredictor(Predictor):
    """Replicates are members: every K of them are all K, in an order that the seed draws.

    Nets that were trained side by side stay so, in one module with stacked parameters; `nets` gives them apart.
    """

    members: nn.ModuleList | StackedNets
    name: str  # of the method

    @property
    def vectorized(self) -> bool:
        return isinstance(self.members, StackedNets)

    @property
    def nets(self) -> list[nn.Module]:
        """The K nets; copies, where they are held side by side."""
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
        run = self._run_stacked if isinstance(self.members, StackedNets) else self._run_in_turn
        with eval_mode(self.members):
            return stream_members(num_samples, len(self.members), partial(run, x), seed=seed)

    def _run_in_turn(self, x: Any, numbers: Tensor) -> Tensor:
        return torch.stack([add_output_axis(compute_output(self.nets[k], x)) for k in numbers.tolist()])

    def _run_stacked(self, x: Any, numbers: Tensor) -> Tensor:
        parts = torch.split(x, _MAX_STACKED_ROWS) if isinstance(x, Tensor) and len(x) else [x]
        outputs = torch.cat([self.members(part, alike=True) for part in parts], 1)
        outputs = outputs[..., None] if outputs.ndim == 2 else outputs  # (K, N, C, *)
        return outputs if len(numbers) == len(outputs) else outputs[numbers.to(outputs.device)]

    def config(self) -> dict[str, Any]:
        return {"method": self.name, "num_members": len(self.members), "together": self.vectorized}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "EnsemblePredictor":
        nets = [net, *(copy_net(net) for _ in range(config["num_members"] - 1))]
        return cls((StackedNets(nets) if config["together"] else nn.ModuleList(nets)).eval(), config["method"])


# -- fitting -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _EnsembleObjective:
    """The objective of one net, or the sum of those of K stacked nets: 1/N Σᵢ wᵢ ℓᵢ, plain and adversarial."""

    loss: Loss
    weights: Tensor | None  # (n,), or (K, n) for stacked nets
    perturb: Perturbation | None
    stacked: bool

    def __call__(self, net: nn.Module, batch: Batch) -> Tensor:
        x = cast_inputs(net, batch.x)
        w = self._weights_of(batch)
        if self.perturb is None:
            return self._value(net, x, batch.y, w)
        x = map_float_tensors(lambda part: part.detach().requires_grad_(), x)
        value = self._value(net, x, batch.y, w)
        return value + self._value(net, self.perturb(value, x), batch.y, w)

    def _weights_of(self, batch: Batch) -> Tensor:
        if self.weights is None:
            return torch.ones(batch.index.shape)
        return self.weights.gather(-1, batch.index)

    def _value(self, net: nn.Module, x: Any, y: Tensor, w: Tensor) -> Tensor:
        if not self.stacked:
            losses = self.loss(compute_output(net, x), y)
            return weighted_mean(losses, w, valid_mask(self.loss, y))
        outputs = net(x)  # (K, N, C, *)
        mask = valid_mask(self.loss, y)
        losses = self.loss(outputs.flatten(0, 1), y.flatten(0, 1))
        losses = losses.view(*w.shape, *losses.shape[1:])  # (K, N, *)
        mapped = torch.vmap(weighted_mean, in_dims=(0, 0, None if mask is None else 0))
        return mapped(losses, w.to(losses), mask).sum()


def draw_point_weights(weight_distribution: WeightDistribution, n: int, k: int, *, seed: int) -> Tensor:
    """w_k over the n points for member k: (n,)."""
    return weight_distribution.sample(derive_keys(torch.tensor([k]), seed, "point weights"), n)[0].float()


@dataclass(frozen=True)
class EnsembleMethod:
    """K nets; `together` trains them side by side (None: where that is faster and gives the same).

    What a method of this kind adds is a law of weights over the n points, or other inputs to train on as well.
    """

    loss: Loss = field(default_factory=CrossEntropy)
    num_members: int = 5
    vectorized: bool | None = None

    name: ClassVar[str]  # in the table of methods
    weight_distribution: ClassVar[WeightDistribution | None] = None  # None: all points count alike

    def __post_init__(self) -> None:
        check_loss(self.loss)
        check_members(self.num_members)
        if self.vectorized not in (None, True, False):
            raise ValueError(f"got together={self.vectorized!r}; expected True, False, or None to let it be found out")

    def make_perturbation(self, data: Dataset[Any], config: TrainingConfig) -> Perturbation | None:
        """How inputs are changed to be trained on a second time, if they are."""
        return None

    def fit(
        self,
        model: Callable[[], nn.Module],
        data: Dataset[Any],
        config: TrainingConfig,
        *,
        val_data: Dataset[Any] | None = None,
    ) -> EnsemblePredictor:
        """Train K nets that `model()` gives, on (x, y) rows, as the recipe says: together, or in turn."""
        seeds = [derive_member_seed(config.seed, k) for k in range(self.num_members)]
        members = fit_members(
            [initialize_model(model, seed) for seed in seeds],
            data,
            config,
            loss=self.loss,
            seeds=seeds,
            weights=self._weights(data, config.seed),
            identity=describe_method(
                replace(self, num_members=1, vectorized=None)
            ),  # a member knows nothing of the others
            val_data=val_data,
            perturb=self.make_perturbation(data, config),
            vectorized=self.vectorized,
        )
        return EnsemblePredictor(members.eval(), self.name)

    def _weights(self, data: Dataset[Any], seed: int) -> Tensor | None:
        """w_k over the n points, for every member: (K, n)."""
        if self.weight_distribution is None:
            return None
        n = dataset_length(data)
        if n is None:
            raise ValueError(
                f"got a stream of unknown length; expected a data set with a length, since {type(self).__name__} draws "
                "weights over all n points"
            )
        return torch.stack(
            [draw_point_weights(self.weight_distribution, n, k, seed=seed) for k in range(self.num_members)]
        )


def fit_members(
    nets: Sequence[nn.Module],
    data: Dataset[Any],
    config: TrainingConfig,
    *,
    loss: Loss,
    seeds: Sequence[int],
    weights: Tensor | None,
    identity: str,
    val_data: Dataset[Any] | None = None,
    perturb: Perturbation | None = None,
    vectorized: bool | None = None,
) -> nn.ModuleList | StackedNets:
    """Train K nets in place, net k on rows in the order of its seed, under its weights (K, n): together, or in turn."""
    nets = [unwrap_model(net) for net in nets]
    examples = [load_example(net, data, seed=seed) for net, seed in zip(nets, seeds, strict=True)]
    _check_apart(nets)

    def fit(net: nn.Module, rows: Tensor | None, config: TrainingConfig, what: str = "", **options: Any) -> None:
        """Train one net under its weights (n,), or all of them stacked under (K, n)."""
        objective = _EnsembleObjective(loss, rows, perturb, stacked=isinstance(net, StackedNets))
        validate = partial(_figures, loss, isinstance(net, StackedNets))
        options |= {"val_data": val_data, "validate": validate, "identity": identity + what}
        train(net, data, lambda epoch: objective, config, **options)

    if _go_together(nets, data, config, examples[0], vectorized):
        stacked = StackedNets(nets)
        fit(stacked, weights, config, f" {len(nets)} together", seeds=seeds)
        return stacked
    for k, (net, seed) in enumerate(zip(nets, seeds, strict=True)):
        mine = replace(config, seed=seed, folder=_member_folder(config, k))
        title = f"member {k + 1}/{len(nets)}" if len(nets) > 1 else ""
        fit(net, None if weights is None else weights[k], mine, f" {k}", title=title)
    return nn.ModuleList(nets)


def _go_together(
    nets: list[nn.Module], data: Dataset[Any], config: TrainingConfig, example: Any, together: bool | None
) -> bool:
    if len(nets) == 1 or together is False or (together is None and not _is_small(nets[0])):
        return False  # without a trial, which would copy all the nets
    why = _why_in_turn(nets, data, config, example)
    if together and why:
        raise ValueError(f"got together=True, but {why}; expected together=False, or None to let it be found out")
    return why is None


def _check_apart(nets: list[nn.Module]) -> None:
    """Members that share a layer would overwrite each other."""
    seen: dict[int, int] = {}
    for k, net in enumerate(nets):
        for tensor in [*net.parameters(), *net.buffers()]:
            if tensor.numel() and seen.setdefault(tensor.data_ptr(), k) != k:
                raise ValueError(
                    "make_net() gave nets that share weights, which would overwrite each other; expected a new net at "
                    "each call: build it inside make_net, or copy.deepcopy what is pretrained"
                )


def _member_folder(config: TrainingConfig, k: int) -> Path | None:
    return None if config.folder is None else Path(config.folder) / f"member-{k}"


def _figures(loss: Loss, stacked: bool, net: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The validation figures of a net; of K nets, their means."""
    if not stacked:
        return validation_metrics(loss, compute_output(net, batch.x), batch.y)
    figures = [validation_metrics(loss, output, batch.y) for output in net(cast_inputs(net, batch.x), alike=True)]
    return {name: torch.stack([figure[name] for figure in figures]).mean() for name in figures[0]}


def _is_small(net: nn.Module) -> bool:
    """Whether the net spends its time between operations. On a CPU convolutions keep it busy by themselves: K of them
    in one are slower than K in turn (a row of `make bench`)."""
    convolves = any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in net.modules())
    busy = convolves and not torch.cuda.is_available()
    return sum(parameter.numel() for parameter in net.parameters()) <= MAX_VMAP_PARAMETERS and not busy


def _why_in_turn(nets: list[nn.Module], data: Dataset[Any], config: TrainingConfig, example: Any) -> str | None:
    """Why these nets must be trained one after another; None if they need not."""
    optimizer = config.optimizer  # a function of your own may look at shapes, which stacking changes
    while isinstance(optimizer, partial):
        optimizer = optimizer.func
    if dataset_length(data) is None:
        return "a stream can be read by one net at a time"
    if config.num_workers:
        return "workers read rows for one net at a time"
    if config.devices != 1 or config.num_nodes != 1 or config.strategy != "auto":
        return "members on several devices train in turn"
    if config.clip_norm is not None:
        return "clip_norm looks at the gradients of one net"
    if config.patience is not None:
        return "patience may stop each net at another epoch"
    if optimizer not in _ELEMENTWISE:
        return f"the optimizer {describe_callable(optimizer)} is not known to update each element by itself"
    return find_vmap_obstacle(nets, compute_output, example)


@register(
    "deep-ensemble",
    predictor=EnsemblePredictor,
    summary="K nets from other first weights and in another order of the data",
    members=True,
    train_cost="O(LK)",
    reference="Lakshminarayanan et al., NeurIPS 2017; Ashukha et al., ICLR 2020",
)
@dataclass(frozen=True)
class DeepEnsemble(EnsembleMethod):
    """K nets; `together` trains them side by side (None: where that is faster and gives the same).

    >>> import torch
    >>> from torch import nn
    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import TrainingConfig
    >>> data = TensorDataset(torch.randn(8, 2), torch.arange(8) % 3)
    >>> predictor = DeepEnsemble(num_members=3).fit(
    ...     lambda: nn.Linear(2, 3), data, TrainingConfig(epochs=1, progress=False)
    ... )
    >>> predictor.predict(torch.zeros(1, 2), 3).samples.shape  # (B, N, C)
    torch.Size([3, 1, 3])
    """

    name: ClassVar[str] = "deep-ensemble"


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
    """K nets on resampled data; `together` trains them side by side (None: where that is faster and gives the same).

    >>> import torch
    >>> from torch import nn
    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import TrainingConfig, SquaredError
    >>> data = TensorDataset(torch.randn(8, 2), torch.randn(8))
    >>> method = StandardBootstrap(SquaredError(), num_members=3)
    >>> predictor = method.fit(lambda: nn.Linear(2, 1), data, TrainingConfig(epochs=1, progress=False))
    >>> predictor.predict(torch.zeros(1, 2), 3).samples.shape  # (B, N, C)
    torch.Size([3, 1, 1])
    """

    num_members: int = 20

    name: ClassVar[str] = "standard-bootstrap"
    weight_distribution: ClassVar[WeightDistribution | None] = Multinomial()


@register(
    "bayesian-bootstrap",
    predictor=EnsemblePredictor,
    summary="K nets on data under random (Dirichlet) weights",
    members=True,
    train_cost="O(LK)",
    reference="Rubin, Annals of Statistics 1981; Newton and Raftery, JRSS B 1994",
)
@dataclass(frozen=True)
class BayesianBootstrap(EnsembleMethod):
    """K nets on re-weighted data; `together` trains them side by side (None: where that is faster and gives the same).

    >>> import torch
    >>> from torch import nn
    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import TrainingConfig, SquaredError
    >>> data = TensorDataset(torch.randn(8, 2), torch.randn(8))
    >>> method = BayesianBootstrap(SquaredError(), num_members=3)
    >>> predictor = method.fit(lambda: nn.Linear(2, 1), data, TrainingConfig(epochs=1, progress=False))
    >>> predictor.predict(torch.zeros(1, 2), 3).samples.shape  # (B, N, C)
    torch.Size([3, 1, 1])
    """

    num_members: int = 20

    name: ClassVar[str] = "bayesian-bootstrap"
    weight_distribution: ClassVar[WeightDistribution | None] = Dirichlet()
