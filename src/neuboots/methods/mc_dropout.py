"""MC dropout: dropout stays active at prediction, and each replicate is one thinned net.

    f_b(x) = f(x; m_b),   layer(h) → layer(h ⊙ m_b / (1 − p)),   m_b ~ Bernoulli(1 − p), independent

Gal and Ghahramani, Dropout as a Bayesian Approximation: Representing Model Uncertainty in Deep Learning, ICML 2016.

A replicate has one mask per dropout layer, shared by all examples: it is one function of x, and its output at a single
x has the same distribution as with one mask per example. What precedes the first dropout is computed once; what follows
is recorded and replayed with other masks. If the only dropout precedes a plain head, the masks are merged into the
weights of the head: one product for all replicates, and exact moments.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_map_only

from neuboots._prng import derive_keys, draw_uniform
from neuboots._validation import ArgumentError, check_choice, check_fraction, check_types
from neuboots.head import (
    ForwardTrace,
    Head,
    HeadSplit,
    LayerWrapper,
    Recording,
    TracedTensor,
    add_output_axis,
    as_plain_tensor,
    call_net,
    cast_inputs,
    channels_first,
    check_module,
    copy_net,
    copy_to_meta,
    eager_mode,
    eval_mode,
    extract_output,
    find_head,
    load_example,
    replace_layers,
    tile_rows,
    unwrap_model,
)
from neuboots.loading import FitData, as_dataset
from neuboots.losses import Loss
from neuboots.methods._base import ModifiedNetPredictor, register, set_context
from neuboots.methods.neuboots import BootstrapGenerator, stream_head_weights
from neuboots.prediction import SampleStream, stream_forward_passes
from neuboots.training import BaseMethod, FitInputs, prepare_net

Placement = Literal["all", "head", "existing"]
Granularity = Literal["element", "channel"]

_LAYER_TYPES = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
_ALPHA_DROPOUTS = (nn.AlphaDropout, nn.FeatureAlphaDropout)  # set to a constant, and keep mean and variance
_DROPOUT_TYPES = (nn.Dropout, *_CHANNEL_DROPOUTS, nn.AlphaDropout)


# -- masks ---------------------------------------------------------------------------------------------


def _derive_mask_keys(ids: Tensor, seed: int, layer: str, call: int) -> Tensor:
    """Derive one key per replicate for the mask at the call-th use of a layer in a pass."""
    return derive_keys(ids, seed, "dropout", layer, call)


def _draw_mask(keys: Tensor, size: int, rate: float) -> Tensor:
    """Draw which elements are kept: (num, size)."""
    return draw_uniform(keys[:, None], torch.arange(size)) >= rate


@dataclass(frozen=True)
class Bernoulli:
    """Dropout as a weight distribution: α_s = m_s / (1 − p), m_s ~ Bernoulli(1 − p), independent.

    Args:
        rate: Dropout rate p.

    Example:
        >>> Bernoulli(0.2).covariance(10)  # p / (1 − p), 0
        (0.25, 0.0)
    """

    rate: float
    name = "bernoulli"

    def sample(self, keys: Tensor, size: int) -> Tensor:
        """Draw α for each key: (num, size)."""
        return _draw_mask(keys, size, self.rate).double() / (1.0 - self.rate)

    def covariance(self, size: int) -> tuple[float, float]:
        """Return the variance of one weight and the covariance of two."""
        return self.rate / (1.0 - self.rate), 0.0

    def laplace_transform(self, t: float, parts: int, size: int) -> float:
        """Return E exp(−t (α_1 + … + α_parts))."""
        return math.pow(self.rate + (1.0 - self.rate) * math.exp(-t / (1.0 - self.rate)), parts)


@dataclass
class _Replicate:
    """The replicate that is being computed.

    Attributes:
        seed: Seed of the replicates.
        b: Number of the replicate.
        first: Name of the dropout layer at which the recording starts; None: nothing is recorded.
        calls: Number of uses of each layer so far.
        anchor: Any tensor of the recording.
    """

    seed: int
    b: int
    first: str | None = None
    calls: Counter[str] = field(default_factory=Counter)
    anchor: Tensor | None = None


_REPLICATE: ContextVar[_Replicate | None] = ContextVar("dropout", default=None)


def _apply_mask(x: Tensor, anchor: Tensor | None, layer: "_DropoutWrapper", call: int) -> Tensor:
    """Apply the mask of the current replicate, as one operation of a recording.

    The anchor puts it on the recording also if x does not depend on the first dropout, such as a parallel branch.
    """
    if has_torch_function((x, anchor)):
        return handle_torch_function(_apply_mask, (x, anchor), x, anchor, layer, call)
    replicate = _REPLICATE.get()
    assert replicate is not None, "a mask belongs to a replicate"
    shape = layer.mask_shape(x)
    keys = _derive_mask_keys(torch.tensor([replicate.b]), replicate.seed, layer.name, call)
    return layer.mask_input(x, _draw_mask(keys, math.prod(shape), layer.rate).view(shape).to(x))


# -- layers --------------------------------------------------------------------------------------------


class _DropoutWrapper(LayerWrapper):
    """layer(dropout(h)) for a Linear or convolution, or a dropout layer of the net itself.

    It has a mask per example in training, one mask for all examples in a replicate, and none otherwise.

    Args:
        layer: The layer.
        name: Its name.
        rate: Dropout rate.
        batch_axis: Axis of the batch in the layer's input; None: it does not depend on the batch.
        by_channel: Whether an inserted dropout drops whole channels.
    """

    def __init__(self, layer: nn.Module, name: str, rate: float, batch_axis: int | None, *, by_channel: bool) -> None:
        super().__init__(layer)
        self.name, self.rate, self.batch_axis = name, rate, batch_axis
        self.existing = isinstance(layer, _DROPOUT_TYPES)
        if self.existing:
            by_channel = isinstance(layer, _CHANNEL_DROPOUTS)
        self.channel_axis = (-1 if isinstance(layer, nn.Linear) else 1) if by_channel else None
        if self.channel_axis == 1 and batch_axis != 0:
            raise ValueError(f"layer {name!r} drops channels; expected the batch on axis 0, got axis {batch_axis}")
        self.mark = nn.Identity()  # where a recording starts

    def mask_shape(self, x: Tensor) -> list[int]:
        """Return the shape of a mask for all examples, 1 along the batch."""
        axes = range(x.ndim) if self.channel_axis is None else [self.channel_axis % x.ndim]
        return [size if axis in axes and axis != self.batch_axis else 1 for axis, size in enumerate(x.shape)]

    def mask_input(self, x: Tensor, mask: Tensor) -> Tensor:
        """Drop elements of x and scale the others, so that the mean is x."""
        p = self.rate
        if p == 1.0:
            return torch.zeros_like(x)
        if not isinstance(self.layer, _ALPHA_DROPOUTS):
            return x * (mask / (1.0 - p))
        low = -1.7580993408473766  # limit of SELU (Klambauer et al., Self-Normalizing Neural Networks, 2017)
        scale = 1.0 / math.sqrt((1.0 - p) * (1.0 + p * low**2))
        return scale * (x * mask + low * (1.0 - mask)) - scale * p * low

    def drop(self, x: Tensor, replicate: _Replicate) -> Tensor:
        """Apply the mask of a replicate, and start its recording if this is the first dropout."""
        call = replicate.calls[self.name]
        replicate.calls[self.name] += 1
        if replicate.first is not None and replicate.anchor is None:
            if replicate.first != self.name:
                raise ValueError(f"the dropout {self.name!r} was called before {replicate.first!r}, unlike in fit")
            x = replicate.anchor = self.mark(x)
        return _apply_mask(x, replicate.anchor, self, call)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        replicate = _REPLICATE.get()
        if replicate is not None:
            dropped = self.drop(input, replicate)
            return dropped if self.existing else self.layer(dropped, *args, **kwargs)
        if self.existing or not self.training:
            return self.layer(input, *args, **kwargs)
        if self.channel_axis is None:
            return self.layer(F.dropout(input, self.rate), *args, **kwargs)
        shape = self.mask_shape(input)
        if self.batch_axis is not None:
            shape[self.batch_axis] = input.shape[self.batch_axis]  # a mask for each example
        return self.layer(input * F.dropout(input.new_ones(shape), self.rate), *args, **kwargs)


def _find_layers(net: nn.Module, types: tuple[type[nn.Module], ...]) -> dict[str, nn.Module]:
    """Return the layers of these types that can be replaced, by name."""
    layers: dict[str, nn.Module] = {}
    replace_layers(net, types, lambda layer, name: layers.setdefault(name, layer))
    return layers


def _find_dropout_rates(net: nn.Module) -> dict[str, float]:
    """Return the rates of the net's own dropout layers, without those that drop nothing."""
    rates = {name: cast(nn.Dropout, layer).p for name, layer in _find_layers(net, _DROPOUT_TYPES).items()}
    return {name: rate for name, rate in rates.items() if rate > 0}


def _insert_dropout(
    net: nn.Module,
    layer_names: Collection[str],
    rate: float,
    granularity: Granularity,
    batch_axes: Mapping[str, int | None] | None = None,
) -> nn.Module:
    """Insert dropout before layers of a net, in place; a bare layer becomes a net with one layer.

    Args:
        net: The net.
        layer_names: Names of the layers.
        rate: Dropout rate.
        granularity: Whether to drop elements or channels.
        batch_axes: Axis of the batch in the inputs of layers, where it is not the first.
    """
    net = _as_net(net)
    rates, batch_axes = dict.fromkeys(layer_names, rate) | _find_dropout_rates(net), batch_axes or {}

    def make(layer: nn.Module, name: str) -> nn.Module:
        if name not in rates:
            return layer
        axis, by_channel = batch_axes.get(name, 0), granularity == "channel"
        return _DropoutWrapper(layer, name, rates[name], axis, by_channel=by_channel)

    replace_layers(net, (*_DROPOUT_TYPES, *_LAYER_TYPES), make)
    return net


def _as_net(net: nn.Module) -> nn.Module:
    return nn.Sequential(net) if isinstance(net, _LAYER_TYPES) else net


# -- which layers a pass uses --------------------------------------------------------------------------


@dataclass
class _LayerUse:
    """How one pass uses a layer: whether an earlier layer's output reaches it, and the shape of each input."""

    follows: bool = False
    shapes: list[torch.Size] = field(default_factory=list)


def _trace_layers(net: nn.Module, example: Any) -> dict[str, _LayerUse]:
    """Return the layers that the example reaches, in order.

    The outputs of layers are recorded, so that an input that depends on one is recognised.
    """
    uses: dict[str, _LayerUse] = {}
    recording = Recording(strict=False)
    layers = _find_layers(net, _LAYER_TYPES)

    def note_input(name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors = [part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)]
        use = uses.setdefault(name, _LayerUse())
        use.follows |= any(isinstance(part, TracedTensor) for part in tensors)
        use.shapes.append(as_plain_tensor(tensors[0]).shape)
        return tree_map_only(TracedTensor, as_plain_tensor, (args, kwargs)) if name in layers else None

    def mark_output(name: str, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return recording.source(as_plain_tensor(out), name)

    with ExitStack() as hooks, eval_mode(net), torch.enable_grad(), eager_mode(net), _no_transformer_fastpath():
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(mark_output, name)))
        for name, layer in {**layers, **_find_layers(net, _DROPOUT_TYPES)}.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(note_input, name), with_kwargs=True))
        call_net(net, cast_inputs(net, example))
    return uses


@contextmanager
def _no_transformer_fastpath() -> Iterator[None]:
    """Disable torch's fast path through a transformer, which reads the weights and never calls the layers."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _find_batch_axis(name: str, use: _LayerUse, doubled: _LayerUse) -> int | None:
    """Return the axis of a layer's input that grows with the batch, or None if no axis does."""
    shapes = zip(use.shapes, doubled.shapes, strict=False)
    grown = {tuple(axis for axis in range(min(len(a), len(b))) if a[axis] != b[axis]) for a, b in shapes}
    axes = grown.pop() if grown else ()
    regular = list(map(len, use.shapes)) == list(map(len, doubled.shapes))
    if not regular or grown or len(axes) > 1:
        expected = "one axis that grows with the batch, the same at each use, so that all examples share a mask"
        raise ValueError(f"layer {name!r} has inputs of shapes {use.shapes}; expected {expected}")
    return axes[0] if axes else None


def _find_mergeable_head(
    net: nn.Module, layer_names: tuple[str, ...], granularity: Granularity, example: Any
) -> str | None:
    """Return the only layer with dropout if its masks can be merged into its weights (a plain head)."""
    if len(layer_names) != 1 or cast(_DropoutWrapper, net.get_submodule(layer_names[0])).batch_axis != 0:
        return None
    try:
        generator = BootstrapGenerator(net, head=f"{layer_names[0]}.layer")
        with eval_mode(generator), torch.no_grad():
            phi = generator.at(cast_inputs(generator, example)).trace.phi
    except ValueError:
        return None
    linear = isinstance(generator.split.head, nn.Linear)
    return layer_names[0] if phi.ndim == 2 or (granularity == "channel" and not linear) else None


# -- the method ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MCDropoutPredictor(ModifiedNetPredictor):
    """Predictor with B thinned nets.

    Args:
        modified: The net with dropout inserted.
        skeleton: The net before, on the meta device.
        rate: Dropout rate.
        granularity: Whether elements or channels are dropped.
        layer_names: Names of the layers before which dropout was inserted.
        first: Name of the first dropout that an input reaches.
        head: Name of the head, if its dropout is the only one and can be merged into its weights.
    """

    rate: float
    granularity: Granularity
    layer_names: tuple[str, ...]
    first: str
    head: str | None

    @cached_property
    def _generator(self) -> BootstrapGenerator:
        return BootstrapGenerator(self.modified, head=f"{self.head}.layer")

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        x = cast_inputs(self.modified, x)
        if self.head is None:
            return stream_forward_passes(num_samples, self._make_pass(x, seed))
        derive = partial(_derive_mask_keys, seed=seed, layer=self.head, call=0)
        return stream_head_weights(self._generator, x, num_samples, Bernoulli(self.rate), derive)

    def _make_pass(self, x: Any, seed: int) -> Callable[[int], Tensor]:
        """Return a function that computes replicate b, by a replay from the first dropout on if possible."""
        net = self.modified
        split = HeadSplit(net, self.first, cast(Head, net.get_submodule(f"{self.first}.mark")))
        passed: ForwardTrace | None = None
        # if it cannot be replayed, the whole net runs, which raises if the input is wrong
        with suppress(ValueError), set_context(_REPLICATE, _Replicate(seed, 0, self.first)):
            passed = split.trace(x)

        def run(b: int) -> Tensor:
            if passed is not None and b == 0:
                output = passed.output
            else:
                with set_context(_REPLICATE, _Replicate(seed, b)):
                    output = (
                        extract_output(call_net(net, x), x)
                        if passed is None
                        else passed.recording.replay(passed.phi, passed.slot)
                    )
            return add_output_axis(channels_first(net, x, output))

        return run

    def config(self) -> dict[str, Any]:
        dropouts = [module for module in self.modified.modules() if isinstance(module, _DropoutWrapper)]
        return {
            "method": "mc-dropout",
            "rate": self.rate,
            "granularity": self.granularity,
            "layer_names": list(self.layer_names),
            "first": self.first,
            "head": self.head,
            "batch_axes": {layer.name: layer.batch_axis for layer in dropouts if layer.batch_axis != 0},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "MCDropoutPredictor":
        check_types(
            "predictor",
            config,
            {
                "rate": float,
                "granularity": str,
                "layer_names": list[str],
                "first": str | None,
                "head": str | None,
                "batch_axes": dict[str, int | None],
            },
        )
        skeleton, layer_names = copy_to_meta(net), tuple(config["layer_names"])
        rate, granularity = config["rate"], config["granularity"]
        dropout_net = _insert_dropout(net, layer_names, rate, granularity, config["batch_axes"])
        return cls(dropout_net, skeleton, rate, granularity, layer_names, config["first"], config["head"])


@register(
    "mc-dropout",
    predictor=MCDropoutPredictor,
    summary="one net with dropout active at prediction: B thinned nets",
    predict_cost="O(LK); O(L + K) before the head only",
    reference="Gal and Ghahramani, ICML 2016",
)
@dataclass(frozen=True)
class MCDropout(BaseMethod[MCDropoutPredictor]):
    """Dropout that stays active at prediction.

    The net's own dropout layers are active as well, at their own rates. The batch may be on any axis of a layer's input
    (such as sequences first); the axis is found by running the net. Calls of `F.dropout` in a forward method, and the
    dropout inside attention and recurrent layers, cannot be reached and are inactive at prediction.

    Args:
        loss: Loss per example.
        rate: Rate of the inserted dropout.
        where: "all" inserts dropout before every Linear and convolution except the first ones, which read the input;
            "head" before the last layer only; "existing" nowhere, for a net with dropout layers.
        granularity: "element" drops elements; "channel" drops whole channels of maps (N, C, *).
        head: Name of the layer for `where="head"`; None to find the last layer by running the net.

    Example:
        >>> from neuboots import TrainingConfig
        >>> data = (torch.zeros(8, 2), torch.arange(8) % 3)
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> predictor = MCDropout(rate=0.5).fit(net, data, TrainingConfig(epochs=1, progress=False))
        >>> predictor.layer_names, predictor.predict(torch.zeros(4, 2), 100).samples.shape
        (('2',), torch.Size([100, 4, 3]))
    """

    rate: float = 0.2
    where: Placement = "all"
    granularity: Granularity = "element"
    head: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("rate", self.rate)
        check_choice("where", self.where, get_args(Placement))
        check_choice("granularity", self.granularity, get_args(Granularity))
        if self.head is not None and (not isinstance(self.head, str) or self.where != "head"):
            raise ArgumentError("head", self.head, "None, or the name of a layer together with where='head'")

    @classmethod
    def paper_mlp(cls, loss: Loss | None = None) -> "MCDropout":
        """Return the setting of the NeuBoots paper for MLPs: rate 0.1 before the last layer only.

        Args:
            loss: Loss per example; None for the cross-entropy.
        """
        return cls(loss=loss or nn.CrossEntropyLoss(), rate=0.1, where="head")

    def from_trained(
        self, model: nn.Module, data: FitData, *, batch_size: int = 128, seed: int = 0
    ) -> MCDropoutPredictor:
        """Create a predictor from a trained net, without training.

        Args:
            model: The trained net; it is copied.
            data: Data whose first inputs show how the net uses its layers, as in `fit`.
            batch_size: Not used; part of the signature that all post-hoc methods share.
            seed: Seed of the initial weights of lazy layers.

        Returns:
            The predictor.

        Raises:
            ArgumentError: If the net has no layer for dropout.
        """
        check_module(model)
        net = copy_net(unwrap_model(model))
        return self._declare(self._insert(net, load_example(net, as_dataset(data), seed=seed)))

    def _fit(self, inputs: FitInputs) -> MCDropoutPredictor:
        predictor = self._insert(*prepare_net(inputs, copy=True))
        self._train_net(predictor.modified, inputs)
        predictor.modified.eval()
        return predictor

    def _insert(self, net: nn.Module, example: Any) -> MCDropoutPredictor:
        """Return the predictor of a net, which is changed in place."""
        skeleton = copy_to_meta(net)
        net = _as_net(net)
        example = tile_rows(example, 2)  # a net may squeeze a single example away
        uses, doubled = _trace_layers(net, example), _trace_layers(net, tile_rows(example, 2))
        layer_names, rates = self._choose_layers(net, uses, example), _find_dropout_rates(net)
        dropouts = [name for name in uses if name in layer_names or name in rates]
        if not dropouts:
            hint = "try another placement, or add dropout layers; calls of F.dropout cannot be reached"
            raise ArgumentError("where", self.where, "a placement that reaches a layer", hint=hint)
        axes = {name: _find_batch_axis(name, uses[name], doubled.get(name, _LayerUse())) for name in dropouts}
        net = _insert_dropout(net, layer_names, self.rate, self.granularity, axes)
        head = None if rates else _find_mergeable_head(net, layer_names, self.granularity, example)
        return MCDropoutPredictor(net.eval(), skeleton, self.rate, self.granularity, layer_names, dropouts[0], head)

    def _choose_layers(self, net: nn.Module, uses: dict[str, _LayerUse], example: Any) -> tuple[str, ...]:
        """Return the names of the layers before which dropout is inserted."""
        layers = _find_layers(net, _LAYER_TYPES)
        if self.where == "existing":
            return ()
        if self.where == "all":
            return tuple(name for name, use in uses.items() if name in layers and use.follows)
        name = find_head(net, example=example) if self.head is None else self.head
        if name not in layers or name not in uses:
            candidates = [layer for layer in layers if layer in uses]
            raise ArgumentError("head", name, f"the name of a Linear or convolution that the net uses: {candidates}")
        return (name,)
