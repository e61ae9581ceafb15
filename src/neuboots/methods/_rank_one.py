"""Layers of K members that share their weights up to a rank-one factor, for BatchEnsemble and its variants."""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from neuboots._prng import derive_seed
from neuboots._validation import ArgumentError, check_int, check_memory
from neuboots.head import LayerWrapper, add_output_axis, compute_output, copy_net, eval_mode, replace_layers, tile_rows
from neuboots.loading import Batch, preserve_rng_state, seed_everything
from neuboots.methods._base import set_context
from neuboots.training import (
    BaseMethod,
    FitInputs,
    P,
    TrainingConfig,
    mean_loss,
    validation_metrics,
)

FactorInit = Literal["normal", "random_sign"]
LayerFactory = Callable[[nn.Module, str], "RankOneLayer"]

LAYER_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
FACTOR_STD = 0.5  # of the initial factors around 1

# The members whose tiles are in the batch, in order; None: all K. A context variable, so that two threads can evaluate
# different members of one predictor.
_MEMBERS: ContextVar[tuple[int, ...] | None] = ContextVar("members", default=None)


def select_members(members: Iterable[int]) -> AbstractContextManager[None]:
    """Evaluate only these members inside a `with` block; the batch has one tile for each."""
    return set_context(_MEMBERS, tuple(members))


def selected_members(num_members: int) -> list[int]:
    """Return the members whose tiles are in the batch, in order."""
    members = _MEMBERS.get()
    return list(range(num_members) if members is None else members)


def _untile(x: Tensor, times: int) -> Tensor:
    """Reshape (R·N, …) to (R, N, …)."""
    if x.ndim == 0 or len(x) % times:
        raise ValueError(f"a layer gets {tuple(x.shape)} for {times} members; expected the batch on the first axis")
    return x.reshape(times, len(x) // times, *x.shape[1:])


# -- layers --------------------------------------------------------------------------------------------


class RankOneLayer(LayerWrapper):
    """K linear layers or convolutions y_k = s_k ∘ (W (x ∘ r_k)) + b_k that share W.

    Args:
        layer: The Linear or convolution; its bias becomes the initial bias of every member.
        num_members: Number of members K.
    """

    def __init__(self, layer: nn.Module, num_members: int) -> None:
        super().__init__(layer)
        self.num_members = num_members
        self.features_last = isinstance(layer, nn.Linear)
        weight = self.layer.weight.detach()
        self.r = nn.Parameter(weight.new_ones(num_members, weight.shape[1] * self._groups))
        self.s = nn.Parameter(weight.new_ones(num_members, weight.shape[0]))
        bias = self.layer.bias
        self.layer.bias = None
        self.biases = None
        if bias is not None:
            self.biases = nn.Parameter(bias.detach().repeat(num_members, 1), bias.requires_grad)

    @property
    def _groups(self) -> int:
        return getattr(self.layer, "groups", 1)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return r and s of the selected members: (R, in), (R, out)."""
        members = selected_members(self.num_members)
        return self.r[members], self.s[members]

    def forward(self, x: Tensor) -> Tensor:
        r, s = self.factors()
        rows = _untile(x, len(r))
        y = _untile(self.layer((rows * self._reshape(r, rows)).flatten(0, 1)), len(r))
        y = y * self._reshape(s, y)
        if self.biases is not None:
            y = y + self._reshape(self.biases[selected_members(self.num_members)], y)
        return y.flatten(0, 1)

    def _reshape(self, factors: Tensor, reference: Tensor) -> Tensor:
        """Reshape (R, D) to multiply (R, N, …), whose features are last for Linear, third for convolutions."""
        if self.features_last:
            return factors.view(len(factors), *[1] * (reference.ndim - 2), -1)
        return factors.view(len(factors), 1, -1, *[1] * (reference.ndim - 3))

    def merge(self) -> nn.Module:
        """Return the layer of the one selected member, with weights W ∘ s rᵀ, as a plain layer."""
        (r,), (s,) = self.factors()
        layer, weight = self.layer, self.layer.weight.detach()
        outputs, inputs = weight.shape[:2]  # inputs of one group
        outer = s[:, None] * r.view(self._groups, inputs).repeat_interleave(outputs // self._groups, 0)
        merged = weight * outer.view(outputs, inputs, *[1] * (weight.ndim - 2))
        # a new layer of the same geometry, since the weight may be a computed parametrization
        kind: Any = next(kind for kind in LAYER_TYPES if isinstance(layer, kind))
        options = {name: getattr(layer, name) for name in inspect.signature(kind).parameters if hasattr(layer, name)}
        plain = kind(**options, device="meta")
        plain.weight = nn.Parameter(merged.detach().clone())
        biases = None if self.biases is None else self.biases[selected_members(self.num_members)[0]]
        plain.bias = None if biases is None else nn.Parameter(biases.detach().clone())
        return cast(nn.Module, plain)


class MemberBatchNorm(nn.Module):
    """K BatchNorm layers, with separate statistics and parameters for each member.

    Args:
        norm: The BatchNorm layer that every member starts from.
        num_members: Number of members K.
    """

    def __init__(self, norm: nn.Module, num_members: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([norm, *(copy.deepcopy(norm) for _ in range(num_members - 1))])

    def forward(self, x: Tensor) -> Tensor:
        members = selected_members(len(self.norms))
        return torch.cat([self.norms[k](tile) for k, tile in zip(members, _untile(x, len(members)), strict=True)])

    def merge(self) -> nn.Module:
        """Return the layer of the one selected member."""
        return self.norms[selected_members(len(self.norms))[0]]


# -- the ensemble --------------------------------------------------------------------------------------


def make_ensemble(net: nn.Module, num_members: int, make_layer: LayerFactory) -> nn.Module:
    """Replace the layers of a net by layers of K members, in place."""
    if isinstance(net, LAYER_TYPES):
        net = nn.Sequential(net)  # a bare layer has no parent in which it could be replaced
    layers = [layer for layer in net.modules() if isinstance(layer, LAYER_TYPES)]
    factors = sum(2 * layer.weight.shape[0] + layer.weight.shape[1] for layer in layers if not is_lazy(layer.weight))
    check_memory("num_members", num_members, 4 * num_members * factors, hint="use fewer members")
    if not replace_layers(net, LAYER_TYPES, make_layer):
        raise ArgumentError("model", type(net), "a net with a Linear or convolution, in which members can differ")
    # Each class separately, subclasses first: a layer is replaced only if it has the forward of its class.
    norm_types = {type(module) for module in net.modules() if isinstance(module, _BatchNorm)}
    sorted_types = sorted(norm_types, key=lambda kind: -len(kind.__mro__))
    replace_layers(net, tuple(sorted_types), lambda norm, name: MemberBatchNorm(norm, num_members))
    return net


def find_rank_one_layers(ensemble: nn.Module) -> dict[str, RankOneLayer]:
    """Return the rank-one layers by name."""
    return {name: layer for name, layer in ensemble.named_modules() if isinstance(layer, RankOneLayer)}


@torch.no_grad()
def draw_factors(ensemble: nn.Module, init: FactorInit, *, seed: int) -> None:
    """Draw the initial r and s from N(1, ½²), or as random signs."""
    for name, layer in find_rank_one_layers(ensemble).items():
        rng = torch.Generator().manual_seed(derive_seed(seed, "factors", name))
        for factor in (layer.r, layer.s):
            if init == "normal":
                factor.copy_(1 + FACTOR_STD * torch.randn(factor.shape, generator=rng))
            else:
                factor.copy_(2 * torch.randint(2, factor.shape, generator=rng) - 1)


def run_members(ensemble: nn.Module, x: Any, members: Sequence[int]) -> Tensor:
    """Evaluate these members at x in one pass: (R, N, C, *)."""
    with select_members(members):
        outputs = _untile(compute_output(ensemble, tile_rows(x, len(members))), len(members))
    return add_output_axis(outputs, ndim=3)


def export_member(ensemble: nn.Module, k: int) -> nn.Module:
    """Return member k as a net with plain layers."""
    net = copy.deepcopy(ensemble)
    with select_members([k]):
        replace_layers(net, (RankOneLayer, MemberBatchNorm), lambda layer, name: cast(Any, layer).merge())
    return net


# -- checks before training ----------------------------------------------------------------------------


@contextmanager
def check_replacements(replacements: Iterable[tuple[nn.Module, nn.Module]], *, needed: bool = True) -> Iterator[None]:
    """Raise if the net, run inside the `with` block, calls a replaced layer directly.

    A net calls the replacement if it holds the layer as an attribute; a plain list still holds the layer itself.

    Args:
        replacements: Pairs of a replacement and the layer that it holds.
        needed: Whether to raise also if no replacement is called.
    """
    calls: Counter[str] = Counter()

    def count_calls(module: nn.Module, kind: str) -> Callable[..., Any]:
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            calls[kind] += 1
            return forward(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for pair in replacements:
            for module, kind in zip(pair, ("replacement", "layer"), strict=True):
                # unlike a hook, it also sees layer.forward(x)
                stack.enter_context(mock.patch.object(module, "forward", count_calls(module, kind)))
        yield
    # a replacement calls its layer once
    if calls["layer"] != calls["replacement"] or (needed and not calls["replacement"]):
        expected = "layers that are called, and held in attributes, nn.ModuleList or nn.Sequential"
        raise ValueError(f"the layers of the net cannot be replaced; expected {expected}")


def outputs_match(outputs: Tensor, expected: Tensor) -> bool:
    """Whether two outputs are equal up to rounding, relative to the largest output."""
    if outputs.shape != expected.shape:
        return False
    return bool((outputs - expected).abs().amax() <= 1e-2 * expected.abs().amax())


def check_ensemble(ensemble: nn.Module, num_members: int, example: Any) -> None:
    """Raise before training if a member in a tiled batch does not give the outputs that it gives alone."""
    last = num_members - 1
    norms = [(norm, norm.norms[0]) for norm in ensemble.modules() if isinstance(norm, MemberBatchNorm)]
    layers = [(layer, layer.layer) for layer in find_rank_one_layers(ensemble).values()]
    with eval_mode(ensemble), torch.no_grad():
        with check_replacements(layers), check_replacements(norms, needed=False):
            tiled = run_members(ensemble, example, range(num_members))[last]
        alone = run_members(export_member(ensemble, last), example, [last])[0]
    if outputs_match(tiled, alone):
        with preserve_rng_state(), torch.no_grad():
            tiled, alone = _run_in_training_mode(ensemble, num_members, example)
    if not outputs_match(tiled, alone):
        expected = "the batch on the first axis in all layers, and no operation across examples"
        raise ValueError(f"a member gives other outputs in a tiled batch than alone; expected {expected}")


def _run_in_training_mode(ensemble: nn.Module, num_members: int, example: Any) -> tuple[Tensor, Tensor]:
    """Return the last member's outputs in a tile and alone, in training mode, where batch statistics may be used.

    Random outputs cannot be compared; the same ones are then returned twice.
    """

    def run(members: Sequence[int], seed: int = 0) -> Tensor:
        seed_everything(seed)
        return run_members(copy_net(ensemble).train(), example, members)[-1]

    alone = run([num_members - 1])
    is_random = not outputs_match(run([num_members - 1], seed=1), alone)
    return alone if is_random else run(range(num_members)), alone


# -- training ------------------------------------------------------------------------------------------


def exclude_from_weight_decay(config: TrainingConfig, parameters: Iterable[nn.Parameter]) -> TrainingConfig:
    """Return training options without weight decay on these parameters."""
    factors, make = list(parameters), config.optimizer

    def optimizer(parameters: list[nn.Parameter]) -> Optimizer:
        excluded, made = {id(parameter) for parameter in factors}, make(parameters)
        for group in list(made.param_groups):
            mine = [parameter for parameter in group["params"] if id(parameter) in excluded]
            if mine and group.get("weight_decay"):
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in excluded]
                made.add_param_group({**group, "params": mine, "weight_decay": 0.0})
        return made

    return replace(config, optimizer=optimizer)


@dataclass(frozen=True)
class RankOneMethod(BaseMethod[P]):
    """Base class of the methods that train K members with rank-one factors.

    Args:
        loss: Loss per example.
        num_members: Number of members K.
    """

    num_members: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("num_members", self.num_members, minimum=1)

    def _train_members(
        self, ensemble: nn.Module, inputs: FitInputs, penalty: Callable[[nn.Module], Tensor] | None = None
    ) -> None:
        """Minimise the mean over members of their mean losses, plus the penalty."""
        num_members, loss = self.num_members, self.loss
        # weight decay would pull the factors of all members to zero
        factors = [p for layer in find_rank_one_layers(ensemble).values() for p in (layer.r, layer.s)]
        inputs = replace(inputs, config=exclude_from_weight_decay(inputs.config, factors))

        def run(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
            return compute_output(model, tile_rows(batch.x, num_members)), tile_rows(batch.y, num_members)

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            value = mean_loss(loss, *run(model, batch))
            return value if penalty is None else value + penalty(model)

        self._train(
            ensemble, inputs, lambda epoch: objective, lambda model, b: validation_metrics(loss, *run(model, b))
        )
