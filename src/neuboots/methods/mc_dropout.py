"""MC dropout: dropout stays on at prediction, and each replicate is one thinned net.

    f_b(x) = f(x; m_b),   layer(h) → layer(h ⊙ m_b / (1 − p)),   m_b ~ Bernoulli(1 − p), independent

Gal and Ghahramani, Dropout as a Bayesian Approximation: Representing Model Uncertainty in Deep Learning, ICML 2016.

A replicate has one mask for each dropout layer, shared by all rows of x, on whichever axis they are there: it is one
function of x, and the law of its output at any one x is that of a mask drawn for each row. What lies before the first
dropout is computed once; what follows is recorded and repeated under other masks. Where the only dropout stands before
a plain head, the masks fold into the head's weights: one product for all replicates, and exact moments.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.data import Dataset

from neuboots._prng import derive_keys, draw_uniform
from neuboots._pytree import tile_rows
from neuboots._replay import Recording, TracedTensor, as_plain_tensor
from neuboots._streaming import num_bytes
from neuboots.generator import BootstrapGenerator
from neuboots.head import (
    Head,
    HeadSplit,
    cast_inputs,
    copy_to_meta,
    eager_mode,
    eval_mode,
    find_head,
    replace_layers,
    unwrap_model,
)
from neuboots.losses import CrossEntropy, Loss, check_loss
from neuboots.methods._base import add_output_axis, compute_output, fit_net, load_example, register
from neuboots.prediction import Predictor, SampleStream, stream_forward_passes
from neuboots.training import TrainingConfig, describe_method, initialize_model

Placement = Literal["all", "head", "own"]
Granularity = Literal["element", "channel"]

_LAYERS = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # drop whole channels
_ALPHA = (nn.AlphaDropout, nn.FeatureAlphaDropout)  # set to a constant and keep mean and variance
_OWN = (nn.Dropout, *_CHANNELS, *_ALPHA)


# -- masks ---------------------------------------------------------------------------------------------


def _keys(ids: Tensor, seed: int, layer: str, call: int) -> Tensor:
    """One key for the mask of each replicate at the call-th use of this layer in a pass."""
    return derive_keys(ids, seed, "dropout", layer, call)


def _kept(keys: Tensor, size: int, rate: float) -> Tensor:
    """Which elements are kept: (num, size)."""
    return draw_uniform(keys[:, None], torch.arange(size)) >= rate


@dataclass(frozen=True)
class Bernoulli:
    """α_s = m_s / (1 − p), m_s ~ Bernoulli(1 − p), independent: dropout as a law of weights.

    >>> Bernoulli(0.2).covariance(10)  # p / (1 − p), 0
    (0.25, 0.0)
    """

    rate: float
    name = "bernoulli"

    def sample(self, keys: Tensor, size: int) -> Tensor:
        return _kept(keys, size, self.rate).double() / (1.0 - self.rate)

    def covariance(self, size: int) -> tuple[float, float]:
        return self.rate / (1.0 - self.rate), 0.0

    def laplace(self, t: float, parts: int, size: int) -> float:
        return math.pow(self.rate + (1.0 - self.rate) * math.exp(-t / (1.0 - self.rate)), parts)


@dataclass
class _Draw:
    """The replicate under way. `first` names the layer where the recording begins; None: nothing is recorded."""

    seed: int
    b: int
    first: str | None = None
    calls: Counter[str] = field(default_factory=Counter)
    anchor: Tensor | None = None  # any tensor on the tape


_DRAW: ContextVar[_Draw | None] = ContextVar("dropout", default=None)


@contextmanager
def _drawing(draw: _Draw) -> Iterator[None]:
    token = _DRAW.set(draw)
    try:
        yield
    finally:
        _DRAW.reset(token)


def _masked(x: Tensor, anchor: Tensor | None, layer: "_Drops", call: int) -> Tensor:
    """x under the mask that the replicate under way has here: an operation of its own, noted whole on a tape.

    The anchor puts it on the tape also where x does not come from there: a branch beside the first dropout.
    """
    if has_torch_function((x, anchor)):
        return handle_torch_function(_masked, (x, anchor), x, anchor, layer, call)
    draw = _DRAW.get()
    assert draw is not None, "a mask belongs to a replicate"
    shape = layer.mask_shape(x)
    kept = _kept(_keys(torch.tensor([draw.b]), draw.seed, layer.name, call), math.prod(shape), layer.rate)
    return layer.under(x, kept.view(shape).to(x))


# -- layers --------------------------------------------------------------------------------------------


class _Drops(nn.Module):
    """A dropout: in training anew for each row, in a replicate one mask for all rows, else nothing."""

    def __init__(self, layer: nn.Module, name: str, rate: float, axis: int | None) -> None:
        super().__init__()
        self.layer, self.name, self.rate = layer, name, rate
        self.axis = axis  # the batch's, in what the layer is given; None: it is given the same for any batch
        self.mark = nn.Identity()  # where a recording begins

    @property
    def features(self) -> int | None:
        """The axis of what is dropped whole, if anything is."""
        raise NotImplementedError

    def mask_shape(self, x: Tensor) -> list[int]:
        """The shape of a mask for all rows of x: 1 along the batch."""
        if self.features is None:
            return [1 if axis == self.axis else size for axis, size in enumerate(x.shape)]
        shape = [1] * x.ndim
        shape[self.features] = x.shape[self.features]
        return shape

    def under(self, x: Tensor, kept: Tensor) -> Tensor:
        """x where it is kept, scaled so that the mean is x."""
        return x * (kept / (1.0 - self.rate))

    def drop(self, x: Tensor, draw: _Draw) -> Tensor:
        call = draw.calls[self.name]
        draw.calls[self.name] += 1
        if draw.first is not None and draw.anchor is None:
            if draw.first != self.name:
                raise ValueError(f"the dropout {self.name!r} came before {draw.first!r}; expected the order of the fit")
            x = draw.anchor = self.mark(x)
        return _masked(x, draw.anchor, self, call)

    def __getattr__(self, name: str) -> Any:
        """What the net asks of the layer in its place (`weight`, `p`), the layer answers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class DropoutBefore(_Drops):
    """layer(drop(h)), for a Linear or convolution."""

    def __init__(self, layer: nn.Module, name: str, rate: float, axis: int | None, kind: Granularity) -> None:
        super().__init__(layer, name, rate, axis)
        self.granularity = kind

    @property
    def features(self) -> int | None:
        if self.granularity == "element":
            return None
        return -1 if isinstance(self.layer, nn.Linear) else 1

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        draw = _DRAW.get()
        if draw is not None:
            dropped = self.drop(input, draw)
        elif self.training and self.granularity == "channel":
            shape = self.mask_shape(input)
            if self.axis is not None:
                shape[self.axis] = input.shape[self.axis]  # a mask for each row
            dropped = input * F.dropout(input.new_ones(shape), self.rate)
        else:
            dropped = F.dropout(input, self.rate, self.training)
        out: Tensor = self.layer(dropped, *args, **kwargs)
        return out


class ExistingDropout(_Drops):
    """A dropout layer that the net came with, at its own rate."""

    @property
    def features(self) -> int | None:
        return 1 if isinstance(self.layer, (*_CHANNELS, nn.FeatureAlphaDropout)) else None

    def under(self, x: Tensor, kept: Tensor) -> Tensor:
        p = self.rate
        if p == 1.0:
            return torch.zeros_like(x)
        if not isinstance(self.layer, _ALPHA):
            return super().under(x, kept)
        low = -1.7580993408473766  # what SELU tends to (Klambauer et al., Self-Normalizing Neural Networks, 2017)
        scale = 1.0 / math.sqrt((1.0 - p) * (1.0 + p * low**2))
        return scale * (x * kept + low * (1.0 - kept)) - scale * p * low

    def forward(self, input: Tensor) -> Tensor:
        draw = _DRAW.get()
        if draw is not None:
            return self.drop(input, draw)
        out: Tensor = self.layer(input)
        return out


# -- surgery -------------------------------------------------------------------------------------------


def _layers_of(net: nn.Module, kinds: tuple[type[nn.Module], ...]) -> dict[str, nn.Module]:
    """The layers of these kinds that can be replaced, by name."""
    found: dict[str, nn.Module] = {}
    replace_layers(net, kinds, lambda layer, name: found.setdefault(name, layer))
    return found


def _own(net: nn.Module) -> dict[str, float]:
    """The net's own dropout layers that drop anything, and their rates."""
    rates = {name: cast(nn.Dropout, layer).p for name, layer in _layers_of(net, _OWN).items()}
    return {name: rate for name, rate in rates.items() if rate > 0}


def insert_dropout(
    net: nn.Module,
    places: Collection[str],
    rate: float,
    kind: Granularity,
    axes: Mapping[str, int | None] | None = None,
) -> nn.Module:
    """The net with dropout before the layers of these names, in place; a bare layer becomes a net of one layer.

    `axes` says where the batch is in what a layer is given, if not on the first axis.
    """
    net = _as_net(net)
    own, axes = _own(net), axes or {}

    def make(layer: nn.Module, name: str) -> nn.Module:
        if name in own:
            return ExistingDropout(layer, name, own[name], axes.get(name, 0))
        return DropoutBefore(layer, name, rate, axes.get(name, 0), kind) if name in places else layer

    replace_layers(net, (*_OWN, *_LAYERS), make)
    return net


def _dropouts(net: nn.Module) -> list[_Drops]:
    return [module for module in net.modules() if isinstance(module, _Drops)]


def _as_net(net: nn.Module) -> nn.Module:
    return nn.Sequential(net) if isinstance(net, _LAYERS) else net


@dataclass
class _Use:
    """How one pass uses a layer."""

    follows: bool = False  # whether the output of an earlier layer reaches it
    shapes: list[torch.Size] = field(default_factory=list)  # of what it is given, call by call


def _uses(net: nn.Module, example: Any) -> tuple[dict[str, _Use], int]:
    """The layers that the example reaches, in order, and how many rows come out.

    The outputs of layers go onto a tape: whatever comes from one is on it too.
    """
    used: dict[str, _Use] = {}
    tape = Recording(strict=False)
    layers = _layers_of(net, _LAYERS)

    def note(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def see(module: nn.Module, args: Any, kwargs: Any) -> Any:
            given = [part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)]
            use = used.setdefault(name, _Use())
            use.follows |= any(isinstance(part, TracedTensor) for part in given)
            use.shapes.append(as_plain_tensor(given[0]).shape)
            if name not in layers:
                return None
            return tuple(_off_tape(part) for part in args), {key: _off_tape(part) for key, part in kwargs.items()}

        return see

    def mark(name: str) -> Callable[[nn.Module, Any, Any], Tensor]:
        return lambda module, args, out: tape.source(as_plain_tensor(out), name)

    hooks = [layer.register_forward_hook(mark(name)) for name, layer in layers.items()]
    for name, layer in {**layers, **_layers_of(net, _OWN)}.items():
        hooks.append(layer.register_forward_pre_hook(note(name), with_kwargs=True))
    try:
        with eval_mode(net), torch.enable_grad(), eager_mode(net), _layer_by_layer():
            output = compute_output(net, example)
    finally:
        for hook in hooks:
            hook.remove()
    return used, len(output) if output.ndim else 1


def _off_tape(part: Any) -> Any:
    return as_plain_tensor(part) if isinstance(part, TracedTensor) else part


@contextmanager
def _layer_by_layer() -> Iterator[None]:
    """Without torch's fast path through a transformer, which reads the weights and never calls the layers."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _batch_axis(name: str, few: _Use, many: _Use) -> int | None:
    """The axis of the batch in what a layer is given: the one that grows with it; None if none does."""
    if len(few.shapes) != len(many.shapes):
        raise ValueError(
            f"the layer {name!r} is used {len(few.shapes)} times, and {len(many.shapes)} times for twice as many rows; "
            "expected all rows at each use, so that they share a mask: call it once for the batch"
        )
    found: set[int | None] = set()
    for one, other in zip(few.shapes, many.shapes, strict=True):
        grown = [axis for axis, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
        if len(grown) > 1 or len(one) != len(other):
            raise ValueError(
                f"the layer {name!r} is given {tuple(one)}, and {tuple(other)} for twice as many rows; expected one "
                "axis to grow with the batch, so that all rows share a mask: keep the rows on one axis up to there"
            )
        found |= set(grown) or {None}
    if len(found) > 1:
        raise ValueError(
            f"the layer {name!r} is used with the batch on different axes; expected the same one at each use: give "
            "each use a layer of its own"
        )
    return next(iter(found))


def _check_channels(net: nn.Module) -> None:
    """Whole channels of maps are on the second axis, after the batch; those of a Linear, on the last, never are it."""
    for layer in _dropouts(net):
        if layer.features == 1 and layer.axis != 0:
            got = "no batch" if layer.axis is None else f"the batch on axis {layer.axis}"
            raise ValueError(
                f"the layer {layer.name!r} is given {got}, and is to drop whole channels; expected the batch first and "
                "then the channels: put them so, or drop single elements (kind='element', nn.Dropout)"
            )


# -- the method ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MCDropoutPredictor(Predictor):
    """B thinned nets."""

    dropped: nn.Module  # with dropout put in
    skeleton: nn.Module  # as its maker built it
    rate: float
    granularity: Granularity
    places: tuple[str, ...]  # layers before which dropout was put
    first: str  # the first dropout that an input reaches
    head: str | None  # the plain head before which the only dropout stands, if it does

    @property
    def net(self) -> nn.Module:
        return self.skeleton

    @property
    def module(self) -> nn.Module:
        return self.dropped

    @cached_property
    def _generator(self) -> BootstrapGenerator:
        return BootstrapGenerator(self.dropped, head=f"{self.head}.layer")

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        x = cast_inputs(self.dropped, x)
        if self.head is not None:
            return self._stream_heads(x, num_samples, seed, self.head)
        return stream_forward_passes(num_samples, self._passes(x, seed))

    def _stream_heads(self, x: Any, num_samples: int, seed: int, head: str) -> SampleStream:
        """Masks folded into the head's weights."""
        generator, weight_distribution = self._generator, Bernoulli(self.rate)
        with eval_mode(generator):
            at = generator.at(x)

        def chunks(size: int) -> Iterator[Tensor]:
            for start in range(0, num_samples, size):
                keys = _keys(torch.arange(start, min(start + size, num_samples)), seed, head, 0)
                samples = at(weight_distribution.sample(keys, generator.num_blocks))
                yield samples if samples.ndim > 2 else samples[..., None]
                del samples  # the next chunk finds the memory as this one did

        moments = at.moments(weight_distribution) if at.passed.ends_at_head else None
        each = num_bytes(at.output) + num_bytes(generator.split.head.weight)
        return SampleStream(num_samples, each, chunks, moments)

    def _passes(self, x: Any, seed: int) -> Callable[[int], Tensor]:
        """Replicate b: what follows the first dropout, repeated, or else a whole pass."""
        net = self.dropped
        mark = net.get_submodule(f"{self.first}.mark")
        split = HeadSplit(net, self.first, cast(Head, mark))
        try:
            with eval_mode(net), _drawing(_Draw(seed, 0, self.first)):
                passed = split.trace(x)
        except ValueError:  # what follows cannot be repeated; if it is the input that is wrong, a whole pass says so

            def whole(b: int) -> Tensor:
                with eval_mode(net), _drawing(_Draw(seed, b)):
                    return add_output_axis(compute_output(net, x))

            return whole

        def repeated(b: int) -> Tensor:
            if b == 0:
                return add_output_axis(passed.output)
            with _drawing(_Draw(seed, b)):
                return add_output_axis(passed.tape.repeat(passed.phi, passed.slot))

        return repeated

    def config(self) -> dict[str, Any]:
        return {
            "method": "mc-dropout",
            "rate": self.rate,
            "kind": self.granularity,
            "places": list(self.places),
            "first": self.first,
            "head": self.head,
            "axes": {layer.name: layer.axis for layer in _dropouts(self.dropped) if layer.axis != 0},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "MCDropoutPredictor":
        skeleton, places = copy_to_meta(net), tuple(config["places"])
        dropped = insert_dropout(net, places, config["rate"], config["kind"], config["axes"])
        return cls(dropped, skeleton, config["rate"], config["kind"], places, config["first"], config["head"])


@register(
    "mc-dropout",
    predictor=MCDropoutPredictor,
    summary="one net with dropout that stays on: B thinned nets",
    predict_cost="O(LK); O(L + K) before the head only",
    reference="Gal and Ghahramani, ICML 2016",
)
@dataclass(frozen=True)
class MCDropout:
    """Options of MC dropout.

    `where="all"` puts dropout at `rate` before every Linear and convolution that comes after another one (inputs are
    not dropped), `"head"` before the last layer only (or the one named by `head`), `"own"` nowhere: the net's own
    dropout layers do it. Those stay on at prediction in any case, at their own rates. `kind="channel"` drops whole
    channels of maps (N, C, *), `"element"` single elements; for (N, D) they are the same. `MCDropout.paper_mlp()` is
    the setting of the paper's MLP. The batch may be on any axis of what a layer is given (sequences first): it is found
    by running the example once with every row twice. Calls of `F.dropout` inside a forward, and the dropout inside
    attention and recurrent layers, cannot be reached and stay off at prediction.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.zeros(8, 2), torch.arange(8) % 3)
    >>> model = lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> predictor = MCDropout(rate=0.5).fit(model, data, TrainingConfig(epochs=1, progress=False))
    >>> predictor.places, predictor.predict(torch.zeros(4, 2), 100).samples.shape
    (('2',), torch.Size([100, 4, 3]))
    """

    loss: Loss = field(default_factory=CrossEntropy)
    rate: float = 0.2
    where: Placement = "all"
    granularity: Granularity = "element"
    head: str | None = None

    def __post_init__(self) -> None:
        check_loss(self.loss)
        if isinstance(self.rate, bool) or not isinstance(self.rate, int | float) or not 0.0 < self.rate < 1.0:
            raise ValueError(f"got rate={self.rate!r}; expected a number between 0 and 1, such as 0.2")
        if self.where not in ("all", "head", "own"):
            raise ValueError(f"got where={self.where!r}; expected 'all', 'head' or 'own'")
        if self.granularity not in ("element", "channel"):
            raise ValueError(f"got kind={self.granularity!r}; expected 'element' or 'channel'")
        if self.head is not None and not isinstance(self.head, str):
            raise ValueError(f"got head={self.head!r}; expected the name of a layer")
        if self.head is not None and self.where != "head":
            raise ValueError(f"got head={self.head!r} with where={self.where!r}; expected where='head' with it")

    @classmethod
    def paper_mlp(cls, loss: Loss | None = None) -> "MCDropout":
        """Rate 0.1 before the final layer only (paper, NeuBoots vs Dropout)."""
        return cls(loss=loss or CrossEntropy(), rate=0.1, where="head")

    def fit(
        self,
        model: Callable[[], nn.Module],
        data: Dataset[Any],
        config: TrainingConfig,
        *,
        val_data: Dataset[Any] | None = None,
    ) -> MCDropoutPredictor:
        """Train the net that `model()` gives with dropout, on (x, y) rows, as the recipe says."""
        net = unwrap_model(initialize_model(model, config.seed))
        predictor = self.from_trained(net, load_example(net, data, seed=config.seed))
        fit_net(predictor.dropped, data, self.loss, config, val_data=val_data, identity=describe_method(self))
        predictor.dropped.eval()
        return predictor

    def from_trained(self, net: nn.Module, example: Any) -> MCDropoutPredictor:
        """The predictor around a net that is trained already, changed in place; `example` are a few of its inputs."""
        net = unwrap_model(net)
        skeleton = copy_to_meta(net)
        net = _as_net(net)
        uses, rows = _uses(net, example)
        places, own = self._places(net, uses, example), _own(net)
        first = next((name for name in uses if name in places or name in own), None)
        if first is None:
            raise ValueError(self._nothing_drops())
        if rows == 1:  # which a net may squeeze away
            example = tile_rows(example, 2)
            uses, rows = _uses(net, example)
        longer, _ = _uses(net, tile_rows(example, 2))
        drops = [name for name in uses if name in places or name in own]
        axes = {name: _batch_axis(name, uses[name], longer.get(name, _Use())) for name in drops}
        dropped = insert_dropout(net, places, self.rate, self.granularity, axes)
        _check_channels(dropped)
        head = None if own else _plain_head(dropped, places, self.granularity, example)
        return MCDropoutPredictor(dropped.eval(), skeleton, self.rate, self.granularity, places, first, head)

    def _places(self, net: nn.Module, uses: dict[str, _Use], example: Any) -> tuple[str, ...]:
        layers = _layers_of(net, _LAYERS)
        if self.where == "own":
            return ()
        if self.where == "all":
            return tuple(name for name, use in uses.items() if name in layers and use.follows)
        name = find_head(net, example=example) if self.head is None else self.head
        if name not in layers or name not in uses:
            used = ", ".join(repr(layer) for layer in layers if layer in uses)
            raise ValueError(f"got head={name!r}; expected a Linear or convolution that the net uses: one of {used}")
        return (name,)

    def _nothing_drops(self) -> str:
        if self.where == "own":
            return (
                "the net uses no dropout layer of its own (a call of F.dropout inside forward cannot be reached), so "
                "all replicates would be the same; expected nn.Dropout layers: put some in, or choose where='all'"
            )
        return (
            "the net has no Linear or convolution after its first one, so all replicates would be the same; expected a "
            "second layer: deepen the net, or choose where='head'"
        )


def _plain_head(dropped: nn.Module, places: tuple[str, ...], kind: Granularity, example: Any) -> str | None:
    """The only layer with dropout, if its masks fold into its weights: a plain head and one mask for each feature."""
    if len(places) != 1 or cast(_Drops, dropped.get_submodule(places[0])).axis != 0:
        return None
    try:
        generator = BootstrapGenerator(dropped, head=f"{places[0]}.layer")
        with eval_mode(generator), torch.no_grad():
            phi = generator.at(cast_inputs(generator, example)).passed.phi
    except ValueError:
        return None
    linear = isinstance(generator.split.head, nn.Linear)
    return places[0] if phi.ndim == 2 or (kind == "channel" and not linear) else None
