"""BatchEnsemble: K members that share every weight matrix up to a rank-one factor each.

    W_k = W ∘ s_k r_kᵀ,   y_k = s_k ∘ (W (x ∘ r_k)) + b_k

All members run in one pass: the batch is tiled K times, and each layer multiplies by its own member's factors. In
training every member sees every row. Biases and BatchNorm belong to the member, all other weights to all of them.

Wen, Tran and Ba, BatchEnsemble: an alternative approach to efficient ensemble and lifelong learning, ICLR 2020.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from neuboots._prng import derive_seed
from neuboots._pytree import tile_rows
from neuboots._streaming import num_bytes
from neuboots.head import (
    Head,
    cast_inputs,
    copy_net,
    copy_to_meta,
    eval_mode,
    replace_layers,
    unwrap_model,
)
from neuboots.loading import Batch, preserve_rng_state, seed_everything
from neuboots.losses import CrossEntropy, Loss, check_loss, valid_mask, weighted_mean
from neuboots.methods._base import compute_output, load_example, register, validation_metrics
from neuboots.methods.ensembles import check_members
from neuboots.prediction import Predictor, SampleStream, stream_members
from neuboots.training import TrainingConfig, describe_callable, describe_method, initialize_model, train

FactorInit = Literal["normal", "random_sign"]
MakeLayer = Callable[[nn.Module, str], "RankOneLayer"]

LAYER_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
FACTOR_STD = 0.5  # standard deviation of factors around 1
_MAX_TILED_BYTES = 1 << 20  # bytes of tiled inputs in one pass while predicting: more would not fit in a cache

# The members that stand one behind the other in the batch; None: all K. A context variable, so that two threads may
# ask one predictor for different members.
_MEMBERS: ContextVar[tuple[int, ...] | None] = ContextVar("members", default=None)


@contextmanager
def select_members(members: Iterable[int]) -> Iterator[None]:
    """For a while the batch is a tile of these members, one part of it for each."""
    token = _MEMBERS.set(tuple(members))
    try:
        yield
    finally:
        _MEMBERS.reset(token)


def selected_members(num_members: int) -> list[int]:
    """Who stands in the batch, in order."""
    members = _MEMBERS.get()
    return list(range(num_members) if members is None else members)


def _untile(x: Tensor, times: int) -> Tensor:
    """(R·N, …) as (R, N, …)."""
    if x.ndim == 0 or len(x) % times:
        raise ValueError(
            f"got a tensor of shape {tuple(x.shape)} for {times} members; expected the batch on the first axis in all "
            "layers: move it there, or take a method that runs members one by one"
        )
    return x.reshape(times, len(x) // times, *x.shape[1:])


# -- layers --------------------------------------------------------------------------------------------


class RankOneLayer(nn.Module):
    """y_k = s_k ∘ (W (x ∘ r_k)) + b_k around a Linear or convolution, whose bias it takes over."""

    def __init__(self, layer: nn.Module, num_members: int) -> None:
        super().__init__()
        self.num_members = num_members
        self.layer = cast(Head, layer)
        weight = self.layer.weight.detach()
        self.r = nn.Parameter(weight.new_ones(num_members, weight.shape[1] * self._groups))
        self.s = nn.Parameter(weight.new_ones(num_members, weight.shape[0]))
        bias = self.layer.bias
        self.layer.bias = None
        self.biases = None
        if bias is not None:
            self.biases = nn.Parameter(bias.detach().repeat(num_members, 1), bias.requires_grad)

    def __getattr__(self, name: str) -> Any:
        """What the net asks of its layer, such as in_features, the layer answers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # how to copy it, for one
                raise
            return getattr(super().__getattr__("layer"), name)

    @property
    def _groups(self) -> int:
        return getattr(self.layer, "groups", 1)

    def factors(self) -> tuple[Tensor, Tensor]:
        """r and s of the members in the batch: (R, in), (R, out)."""
        members = selected_members(self.num_members)
        return self.r[members], self.s[members]

    def forward(self, x: Tensor) -> Tensor:
        r, s = self.factors()
        rows = _untile(x, len(r))
        y = _untile(self.layer((rows * self._shaped(r, rows)).flatten(0, 1)), len(r))
        y = y * self._shaped(s, y)
        if self.biases is not None:
            y = y + self._shaped(self.biases[selected_members(self.num_members)], y)
        return y.flatten(0, 1)

    def _shaped(self, factors: Tensor, like: Tensor) -> Tensor:
        """(R, D) shaped to multiply (R, N, …): outputs last for Linear, after the rows for convolutions."""
        if isinstance(self.layer, nn.Linear):
            return factors.view(len(factors), *[1] * (like.ndim - 2), -1)
        return factors.view(len(factors), 1, -1, *[1] * (like.ndim - 3))

    def fold(self) -> nn.Module:
        """The layer of the one member in the batch, W ∘ s rᵀ, as a plain layer."""
        (r,), (s,) = self.factors()
        layer = self.layer
        weight = layer.weight.detach()
        outputs, inputs = weight.shape[:2]  # inputs of one group
        per_output = r.view(self._groups, 1, inputs).expand(-1, outputs // self._groups, -1)
        outer = s[:, None] * per_output.reshape(outputs, inputs)
        bias = None if self.biases is None else self.biases[selected_members(self.num_members)[0]]
        return _plain_layer(layer, weight * outer.view(outputs, inputs, *[1] * (weight.ndim - 2)), bias)


def _plain_layer(layer: Head, weight: Tensor, bias: Tensor | None) -> Head:
    """A layer of the same geometry with these weights, whatever parametrisation the layer has."""
    plain: Head
    if isinstance(layer, nn.Linear):
        plain = nn.Linear(layer.in_features, layer.out_features, device="meta")
    else:
        kind = next(kind for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(layer, kind))
        geometry = ("stride", "padding", "dilation", "groups", "padding_mode")
        options = {name: getattr(layer, name) for name in geometry}
        plain = kind(layer.in_channels, layer.out_channels, cast(Any, layer.kernel_size), **options, device="meta")
    plain.weight = nn.Parameter(weight.detach().clone())
    plain.bias = None if bias is None else nn.Parameter(bias.detach().clone())
    return plain


class MemberBatchNorm(nn.Module):
    """BatchNorm with statistics and parameters of each member's own."""

    def __init__(self, norm: nn.Module, num_members: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([norm, *(copy.deepcopy(norm) for _ in range(num_members - 1))])

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        if others or named:
            raise ValueError(
                "a BatchNorm of the net is given more than its input, which cannot be parted between members; expected "
                "one tensor: take a method that runs members one by one"
            )
        members = selected_members(len(self.norms))
        return torch.cat([self.norms[k](part) for k, part in zip(members, _untile(x, len(members)), strict=True)])

    def fold(self) -> nn.Module:
        """The norm of the one member in the batch."""
        return self.norms[selected_members(len(self.norms))[0]]


# -- the ensemble --------------------------------------------------------------------------------------


def make_ensemble(net: nn.Module, num_members: int, make_layer: MakeLayer) -> nn.Module:
    """The net with member layers in the place of its own, in place."""
    if isinstance(net, LAYER_TYPES):
        net = nn.Sequential(net)  # a bare layer has no place in which another could stand
    if not replace_layers(net, LAYER_TYPES, make_layer):
        raise ValueError("the net has no Linear or convolution; expected at least one, which its members can differ in")
    # Each class by itself: a layer is swapped only where it has its kind's forward. Subclasses before their bases.
    norms = {type(module) for module in net.modules() if isinstance(module, _BatchNorm)}
    kinds = sorted(norms, key=lambda kind: -len(kind.__mro__))
    replace_layers(net, tuple(kinds), lambda norm, name: MemberBatchNorm(norm, num_members))
    return net


def find_rank_one_layers(ensemble: nn.Module) -> dict[str, RankOneLayer]:
    return {name: layer for name, layer in ensemble.named_modules() if isinstance(layer, RankOneLayer)}


@torch.no_grad()
def draw_factors(ensemble: nn.Module, init: FactorInit, *, seed: int) -> None:
    """First values of r and s: N(1, ½²), or random signs."""
    for name, layer in find_rank_one_layers(ensemble).items():
        rng = torch.Generator().manual_seed(derive_seed(seed, "factors", name))
        for factor in (layer.r, layer.s):
            if init == "normal":
                factor.copy_(1 + FACTOR_STD * torch.randn(factor.shape, generator=rng))
            else:
                factor.copy_(2 * torch.randint(2, factor.shape, generator=rng) - 1)


def run_members(ensemble: nn.Module, x: Any, members: Sequence[int]) -> Tensor:
    """The outputs of these members at x, from one pass: (R, N, C, *)."""
    with select_members(members):
        outputs = _untile(compute_output(ensemble, tile_rows(x, len(members))), len(members))
    return outputs[..., None] if outputs.ndim == 2 else outputs


def export_member(ensemble: nn.Module, k: int) -> nn.Module:
    """Member k by itself: a copy of the net with plain layers."""
    net = copy.deepcopy(ensemble)
    with select_members([k]):
        replace_layers(
            net, (RankOneLayer, MemberBatchNorm), lambda layer, name: cast(RankOneLayer | MemberBatchNorm, layer).fold()
        )
    return net


def check_ensemble(ensemble: nn.Module, num_members: int, example: Any) -> None:
    """A net whose members do not keep apart in a tile is refused now, not after the training."""
    last = num_members - 1
    norms = [(norm, norm.norms[0]) for norm in ensemble.modules() if isinstance(norm, MemberBatchNorm)]
    layers = [(layer, layer.layer) for layer in find_rank_one_layers(ensemble).values()]
    with eval_mode(ensemble), torch.no_grad():
        with check_replacements(layers), check_replacements(norms, needed=False):
            tiled = run_members(ensemble, example, range(num_members))[last]
        alone = run_members(export_member(ensemble, last), example, [last])[0]
    if outputs_match(tiled, alone):
        with preserve_rng_state(), torch.no_grad():
            tiled, alone = _in_training(ensemble, num_members, example)
    if not outputs_match(tiled, alone):
        raise ValueError(
            "a member's outputs in a tiled batch are not those it has alone; expected the batch on the first axis in "
            "all layers, and each row treated by itself: take a method that runs members one by one"
        )


def _in_training(ensemble: nn.Module, num_members: int, example: Any) -> tuple[Tensor, Tensor]:
    """The last member's outputs in a tile and alone, in training mode, where statistics of the batch may be taken.

    A pass that draws random numbers cannot be compared; it is then given twice.
    """

    def run(members: Sequence[int]) -> tuple[Tensor, bool]:
        seed_everything(0)
        expected = _next_numbers(ensemble)
        seed_everything(0)
        outputs = run_members(copy_net(ensemble).train(), example, members)[-1]
        return outputs, _next_numbers(ensemble) != expected

    alone, drawn = run([num_members - 1])
    return (alone, alone) if drawn else (run(range(num_members))[0], alone)


def _next_numbers(net: nn.Module) -> tuple[float, ...]:
    """What the generators that a net may draw from give next."""
    where = next(net.parameters()).device
    return float(torch.rand(())), float(torch.rand((), device=where)), random.random(), float(np.random.random())


def exclude_from_weight_decay(config: TrainingConfig, spared: Iterable[nn.Parameter]) -> TrainingConfig:
    """The recipe with no weight decay on these parameters: on factors it would pull all members to zero."""
    names = {id(parameter) for parameter in spared}

    def optimizer(parameters: list[nn.Parameter]) -> Optimizer:
        made = config.optimizer(parameters)
        for group in list(made.param_groups):
            own = [parameter for parameter in group["params"] if id(parameter) in names]
            if own and group.get("weight_decay"):
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in names]
                made.add_param_group({**group, "params": own, "weight_decay": 0.0})
        return made

    optimizer.__qualname__ = describe_callable(config.optimizer)  # what a checkpoint knows it by
    return replace(config, optimizer=optimizer)


def fit_ensemble(
    ensemble: nn.Module,
    data: Dataset[Any],
    loss: Loss,
    config: TrainingConfig,
    *,
    num_members: int,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    val_data: Dataset[Any] | None = None,
    identity: str = "",
) -> None:
    """Minimise 1/K Σ_k of the mean losses of all members, and the penalty."""
    config = exclude_from_weight_decay(
        config, [p for layer in find_rank_one_layers(ensemble).values() for p in (layer.r, layer.s)]
    )

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        y = tile_rows(batch.y, num_members)
        losses = loss(compute_output(model, tile_rows(batch.x, num_members)), y)
        value = weighted_mean(losses, losses.new_ones(len(y)), valid_mask(loss, y))
        return value if penalty is None else value + penalty(model)

    def validate(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return validation_metrics(
            loss, compute_output(model, tile_rows(batch.x, num_members)), tile_rows(batch.y, num_members)
        )

    train(ensemble, data, lambda epoch: objective, config, val_data=val_data, validate=validate, identity=identity)


# -- the method ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchEnsemblePredictor(Predictor):
    """Replicates are members: every K of them are all K, in an order that the seed draws."""

    ensemble: nn.Module
    skeleton: nn.Module  # the net before its layers were swapped, without its numbers
    num_members: int

    @property
    def net(self) -> nn.Module:
        return self.skeleton

    @property
    def module(self) -> nn.Module:
        return self.ensemble

    @property
    def num_distinct(self) -> int | None:
        return self.num_members

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        x = cast_inputs(self.ensemble, x)
        held = sum(num_bytes(part) for part in tree_leaves(x) if isinstance(part, Tensor))
        size = max(1, _MAX_TILED_BYTES // held)

        def run(numbers: Tensor) -> Tensor:
            with eval_mode(self.ensemble):
                parts = torch.split(numbers, size)
                return torch.cat([run_members(self.ensemble, x, part.tolist()) for part in parts])

        return stream_members(num_samples, self.num_members, run, seed=seed)

    def export(self, k: int) -> nn.Module:
        """Member k as a plain net: its layers have the weights W ∘ s_k r_kᵀ."""
        if not 0 <= k < self.num_members:
            raise ValueError(f"got member {k}; expected 0 … {self.num_members - 1}")
        return export_member(self.ensemble, k)

    def config(self) -> dict[str, Any]:
        return {"method": "batch-ensemble", "num_members": self.num_members}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "BatchEnsemblePredictor":
        skeleton, num_members = copy_to_meta(net), config["num_members"]
        ensemble = make_ensemble(net, num_members, lambda layer, name: RankOneLayer(layer, num_members))
        return cls(ensemble.eval(), skeleton, num_members)


@register(
    "batch-ensemble",
    predictor=BatchEnsemblePredictor,
    summary="K members of one net that differ by rank-one factors of its weights",
    members=True,
    train_cost="O(LK)",
    reference="Wen, Tran and Ba, ICLR 2020",
)
@dataclass(frozen=True)
class BatchEnsemble:
    """K members of one net. `init` draws their first factors: N(1, ½²), or "random_sign", ±1.

    Factors get no weight decay, whatever the recipe's optimiser does to the other weights.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(8, 2), torch.arange(8) % 3)
    >>> model = lambda: nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> predictor = BatchEnsemble(num_members=3).fit(model, data, TrainingConfig(epochs=1, progress=False))
    >>> predictor.predict(torch.zeros(5, 2), 3).samples.shape  # (B, N, C)
    torch.Size([3, 5, 3])
    """

    loss: Loss = field(default_factory=CrossEntropy)
    num_members: int = 4
    init: FactorInit = "normal"

    def __post_init__(self) -> None:
        check_loss(self.loss)
        check_members(self.num_members)
        if self.init not in get_args(FactorInit):
            raise ValueError(f"got init={self.init!r}; expected 'normal' or 'random_sign'")

    def fit(
        self,
        model: Callable[[], nn.Module],
        data: Dataset[Any],
        config: TrainingConfig,
        *,
        val_data: Dataset[Any] | None = None,
    ) -> BatchEnsemblePredictor:
        """Train the K members of the net that `model()` gives, on (x, y) rows, as the recipe says."""
        num_members = self.num_members
        net = initialize_model(model, config.seed)
        example = load_example(net, data, seed=config.seed)
        net = unwrap_model(net)
        skeleton = copy_to_meta(net)
        ensemble = make_ensemble(net, num_members, lambda layer, name: RankOneLayer(layer, num_members))
        draw_factors(ensemble, self.init, seed=config.seed)
        check_ensemble(ensemble, num_members, example)
        fit_ensemble(
            ensemble,
            data,
            self.loss,
            config,
            num_members=num_members,
            val_data=val_data,
            identity=describe_method(self),
        )
        return BatchEnsemblePredictor(ensemble.eval(), skeleton, num_members)


@contextmanager
def check_replacements(successors: Iterable[tuple[nn.Module, nn.Module]], *, needed: bool = True) -> Iterator[None]:
    """Refuse a net that in this pass calls a layer beside its successor, or none of the successors though `needed`.

    Of (successor, layer) pairs the net knows the successor by its attributes; a plain list of its own, or a reference,
    still holds the layer.
    """
    inside = called = 0
    stray = False
    places: list[tuple[nn.Module, Any]] = []  # modules, and the forward that they had of their own

    def succeeding(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside, called
            inside, called = inside + 1, called + 1
            try:
                return forward(*args, **kwargs)
            finally:
                inside -= 1

        return run

    def succeeded(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal stray
            stray = stray or not inside
            return forward(*args, **kwargs)

        return run

    try:
        for pair in successors:
            for module, around in zip(pair, (succeeding, succeeded), strict=True):
                places.append((module, vars(module).get("forward")))
                vars(module)["forward"] = around(module.forward)  # unlike a hook, it sees layer.forward(x) too
        yield
    finally:
        for module, own in places:
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own
    if stray or (needed and not called):
        raise ValueError(
            "the net calls its layers by other ways than its attributes, or reads their weights without calling them, "
            "so others cannot take their places; expected every layer to be called, and held in an attribute, an "
            "nn.ModuleList or an nn.Sequential, not in a plain list: hold them so, or take a method that leaves the "
            "layers as they are"
        )


def outputs_match(outputs: Tensor, expected: Tensor) -> bool:
    """Whether they are the same up to rounding, which goes by the size of the outputs."""
    if outputs.shape != expected.shape:
        return False
    return bool((outputs - expected).abs().amax() <= 1e-2 * expected.abs().amax())
