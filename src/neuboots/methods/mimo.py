"""MIMO: one net with K inputs and K heads, which learns K subnetworks.

    (z_1, …, z_K) = f(x_1, …, x_K),   loss = Σ_k mean over examples of ℓ(z_k, y_k),   f_k(x) = f(x, …, x)_k

In training the K inputs are the examples of a batch in K orders; at prediction they are equal. Linear layers and
convolutions that the input reaches read all K inputs, concatenated along their channels, and are K times as wide.
Operations before them (normalisation, embedding, flattening) are applied to each input separately. The head is
replicated K times; the net between is unchanged.

Havasi, Jenatton, Fort, Liu, Snoek, Lakshminarayanan, Dai and Tran, Training independent subnetworks for robust
prediction, ICLR 2021.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from neuboots._prng import derive_seed
from neuboots._validation import Count, check_fraction, check_int, check_memory, check_types
from neuboots.head import (
    HeadSplit,
    add_output_axis,
    as_tree,
    cast_inputs,
    channels_first,
    copy_to_meta,
    count_rows,
    eval_mode,
    make_head,
    split_head,
    take_rows,
)
from neuboots.loading import Batch
from neuboots.methods._base import ModifiedNetPredictor, count_net_bytes, register, set_context
from neuboots.prediction import SampleStream, num_bytes, stream_members
from neuboots.training import BaseMethod, FitInputs, mean_loss, mean_validation_metrics, prepare_net

# -- K inputs ------------------------------------------------------------------------------------------

_CHANNEL_AXES = {F.linear: -1, F.conv1d: -2, F.conv2d: -3, F.conv3d: -4}
_UNSUPPORTED_MAPS = {
    *("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear", "multi_head_attention_forward"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}

# Called with every weight that reads K inputs, while `_widen_input_layers` looks for layers.
_ON_READ: ContextVar[Callable[[Tensor], None] | None] = ContextVar("on_read", default=None)


def _unsupported(reason: str) -> ValueError:
    return ValueError(f"MIMO cannot widen the net: {reason}; expected only Linear layers and convolutions at the input")


class _MultiInput(Tensor):
    """K tensors that behave as one: operations apply to each; Linear layers and convolutions read all K.

    Example:
        >>> both = 2 * _combine_inputs([torch.zeros(5, 2), torch.ones(5, 2)]) + 1
        >>> both.shape, nn.Linear(4, 3)(both).shape
        (torch.Size([5, 2]), torch.Size([5, 3]))
    """

    parts: tuple[Tensor, ...]

    @classmethod
    def combine(cls, parts: Sequence[Tensor]) -> "_MultiInput":
        """Combine K tensors of one shape."""
        combined = parts[0].as_subclass(cls)
        combined.parts = tuple(parts)
        return combined

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (cls, Tensor, nn.Parameter) for kind in types):  # a recording of what follows the head
            raise _unsupported("it uses the input again after its head")
        leaves = tree_leaves((args, kwargs))
        if func in _CHANNEL_AXES:
            if not args or not isinstance(args[0], cls):
                raise _unsupported("the input is passed to a linear map by keyword or as its weights")
            _, weight, *rest = args
            if (on_read := _ON_READ.get()) is not None:
                on_read(weight)
            return func(torch.cat(args[0].parts, _CHANNEL_AXES[func]), weight, *rest, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _UNSUPPORTED_MAPS and any(isinstance(leaf, nn.Parameter) for leaf in leaves):
            raise _unsupported(f"an operation other than Linear and convolution reads the input ({name})")
        num_parts = next(len(leaf.parts) for leaf in leaves if isinstance(leaf, cls))
        if func is F.batch_norm and args and isinstance(args[0], cls):  # statistics of all K inputs, updated once
            return cls.combine(func(torch.cat(args[0].parts), *args[1:], **kwargs).chunk(num_parts))
        results = []
        for k in range(num_parts):
            mine = tree_map(lambda leaf, k=k: leaf.parts[k] if isinstance(leaf, cls) else leaf, (args, kwargs))
            results.append(func(*mine[0], **mine[1]))
        return results[0] if isinstance(results[0], torch.Size) else tree_map(cls._merge, *results)

    @classmethod
    def _merge(cls, *results: Any) -> Any:
        first = results[0]
        if isinstance(first, Tensor):
            return cls.combine(cast(tuple[Tensor, ...], results))
        if isinstance(first, bool | int | float) and any(result != first for result in results):
            raise _unsupported("it reads values of its input, which differ between the K inputs")
        return first


def _combine_inputs(inputs: Sequence[Any]) -> Any:
    """Combine K inputs of a net into one; parts without one row per example are those of the first input."""
    n = count_rows(inputs[0])

    def combine(*parts: Any) -> Any:
        per_example = all(isinstance(part, Tensor) and part.ndim and len(part) == n for part in parts)
        return _MultiInput.combine([part.clone() for part in parts]) if per_example else parts[0]  # a net may write

    return tree_map(combine, *map(as_tree, inputs))


def _permute(tensor: Tensor, *name: int | str) -> Tensor:
    """Return the values in a random order, which follow the distribution of the initial weights, whatever it is."""
    rng = torch.Generator().manual_seed(derive_seed(*name))
    order = torch.randperm(tensor.numel(), generator=rng).to(tensor.device)
    return tensor.flatten()[order].view(tensor.shape)


@torch.no_grad()
def _widen_layer(layer: Any, times: int, *name: int | str) -> None:
    """Multiply the number of inputs of a layer, in place.

    The new blocks of weights are permutations of the first one. All weights are divided by √K, as an initialisation
    with K times the fan-in would do.
    """
    weight = layer.weight
    blocks = [weight, *(_permute(weight, *name, k) for k in range(1, times))]
    weight.data = torch.cat(blocks, 1) / times**0.5
    width = "in_features" if isinstance(layer, nn.Linear) else "in_channels"
    setattr(layer, width, times * getattr(layer, width))


def _widen_input_layers(split: HeadSplit, example: Any, times: int, *, seed: int) -> list[str]:
    """Widen every layer that the input reaches, in place, and return their names; the net is run once to find them."""
    layers = {
        id(layer._parameters["weight"]): (name, layer)
        for name, layer in split.net.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and "weight" in layer._parameters
    }
    widened: list[str] = []

    def on_read(weight: Tensor) -> None:
        name, layer = layers.get(id(weight), ("", None))
        if layer is None:
            raise _unsupported("the weights that read the input are computed, or belong to no layer")
        if getattr(layer, "groups", 1) != 1:
            raise _unsupported(f"{name!r} reads the input in groups of channels")
        if times > 1 and not weight.requires_grad:
            raise _unsupported(f"{name!r} reads the input and is frozen, so that it cannot learn to read K inputs")
        if name not in widened:
            _widen_layer(layer, times, seed, "widen", name)
            widened.append(name)

    def shift(k: int) -> Any:
        """Change the inputs, so that whatever depends on them differs between the K inputs."""

        def part(tensor: Tensor) -> Tensor:
            rolled = tensor.roll(k, 0) if tensor.ndim else tensor
            return rolled + k if tensor.ndim and tensor.is_floating_point() else rolled

        return tree_map(part, example)

    try:
        with eval_mode(split.net), torch.no_grad(), set_context(_ON_READ, on_read):
            passed = split.trace(_combine_inputs([shift(k) for k in range(times)]))
    except (RuntimeError, TypeError) as error:
        raise _unsupported(str(error).splitlines()[0]) from error
    constants = [constant for constant, _ in passed.recording.constants if isinstance(constant, _MultiInput)]
    if any(not torch.equal(part, c.parts[0]) for c in constants if c is not passed.phi for part in c.parts):
        raise _unsupported("it uses the input again after its head")
    if not widened:
        raise _unsupported("none of its layers reads the input")
    return widened


def _draw_input_orders(rows: int, num_members: int, *, input_repetition: float, batch_repetition: int) -> Tensor:
    """Draw which example of the batch each of the K inputs holds: (K, rows · batch_repetition).

    The repeated batch is shuffled; a fraction 1 − ρ of it is then shuffled again for each input separately.
    """
    order = torch.arange(rows).repeat(batch_repetition)
    order = order[torch.randperm(len(order))]
    separate = round(len(order) * (1 - input_repetition))
    orders = [torch.cat([order[torch.randperm(separate)], order[separate:]]) for _ in range(num_members)]
    return torch.stack(orders)


# -- K heads -------------------------------------------------------------------------------------------


class MultiHeadNet(nn.Module):
    """The widened net with K heads, the first of which is its own.

    Args:
        split: The net, split at its head.
        num_members: Number of heads K.
        seed: Seed of the initial weights of the further heads.
    """

    def __init__(self, split: HeadSplit, num_members: int, *, seed: int) -> None:
        super().__init__()
        self.split, self.net, self.num_members = split, split.net, num_members
        weight, bias = split.head.weight.detach(), split.head.bias
        self.more_heads = nn.ModuleList(
            make_head(
                _permute(weight, seed, "head", k, "weight"),
                None if bias is None else _permute(bias.detach(), seed, "head", k, "bias"),
            )
            for k in range(1, num_members)
        )

    def forward(self, inputs: Sequence[Any], members: Sequence[int] | None = None) -> Tensor:
        """Evaluate the heads of these members (None: all) at K inputs: (K, N, C, *) or (K, N)."""
        x = _combine_inputs(inputs)
        passed = self.split.trace(x)
        heads = [self.split.head, *self.more_heads]
        chosen = heads if members is None else [heads[k] for k in members]
        outputs = (passed.finish(head(passed.phi)) for head in chosen)
        return torch.stack([channels_first(self.net, x, z, head=self.split.head) for z in outputs])


@dataclass(frozen=True)
class MIMOPredictor(ModifiedNetPredictor):
    """Predictor whose replicates are K heads: each run of K replicates has all, in an order drawn by the seed.

    Args:
        modified: The widened net with its heads.
        skeleton: The net before it was widened, on the meta device.
        widened: Names of the layers that read the input.
    """

    modified: MultiHeadNet
    widened: tuple[str, ...]

    @property
    def num_distinct(self) -> int:
        return self.modified.num_members

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        inputs = [cast_inputs(self.modified, x)] * self.num_distinct

        def run(numbers: Tensor) -> Tensor:
            return add_output_axis(self.modified(inputs, numbers.tolist()), ndim=3)

        return stream_members(num_samples, self.num_distinct, run, seed=seed)

    def config(self) -> dict[str, Any]:
        head, widened = self.modified.split.name, list(self.widened)
        return {"method": "mimo", "num_members": self.num_distinct, "head": head, "widened": widened}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "MIMOPredictor":
        check_types("predictor", config, {"num_members": Count, "head": str, "widened": list[str]})
        skeleton, num_members = copy_to_meta(net), config["num_members"]
        split = split_head(net, config["head"])
        for name in config["widened"]:
            _widen_layer(split.net.get_submodule(name), num_members, 0, name)
        return cls(MultiHeadNet(split, num_members, seed=0).eval(), skeleton, tuple(config["widened"]))


@register(
    "mimo",
    predictor=MIMOPredictor,
    summary="one net with K inputs and K heads: K subnetworks from one pass",
    members=True,
    train_cost="O(L + 2K)",
    predict_cost="O(L + 2K)",
    reference="Havasi et al., ICLR 2021",
)
@dataclass(frozen=True)
class MIMO(BaseMethod[MIMOPredictor]):
    """One net with K inputs and K heads.

    The authors use ρ = 0 with 4 repetitions for small images, and ρ = 0.6 with 2 for large ones.

    Args:
        loss: Loss per example.
        num_members: Number of inputs and heads K.
        input_repetition: Fraction ρ of a batch in which all K inputs are the same example.
        batch_repetition: Number of times that an example occurs in its batch; multiplies the cost of a step.
        head: Name of the last layer; None to find it by running the net.

    Example:
        >>> from neuboots import TrainingConfig
        >>> data = (torch.randn(8, 2), torch.arange(8) % 3)
        >>> net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> predictor = MIMO(num_members=3).fit(net, data, TrainingConfig(epochs=1, progress=False))
        >>> predictor.predict(torch.zeros(5, 2), 3).samples.shape  # (B, N, C)
        torch.Size([3, 5, 3])
    """

    num_members: int = 3
    input_repetition: float = 0.0
    batch_repetition: int = 1
    head: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("num_members", self.num_members, minimum=1)
        check_fraction("input_repetition", self.input_repetition, zero=True, one=True)
        check_int("batch_repetition", self.batch_repetition, minimum=1)

    def _fit(self, inputs: FitInputs) -> MIMOPredictor:
        num_members, seed = self.num_members, inputs.config.seed
        net, example = prepare_net(inputs, copy=True)
        skeleton = copy_to_meta(net)
        split = split_head(net, self.head, example=example)
        member_bytes = count_net_bytes(split.head) + sum(num_bytes(part) for part in tree_leaves(example))
        check_memory("num_members", num_members, num_members * member_bytes, hint="use fewer members")
        widened = _widen_input_layers(split, example, num_members, seed=seed)
        multi_head = MultiHeadNet(split, num_members, seed=seed)

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            rho, times = self.input_repetition, self.batch_repetition
            orders = _draw_input_orders(len(batch.y), num_members, input_repetition=rho, batch_repetition=times)
            orders = orders.to(batch.y.device)
            outputs = model([cast_inputs(model, take_rows(batch.x, rows)) for rows in orders])
            losses = [mean_loss(self.loss, z, batch.y[rows]) for z, rows in zip(outputs, orders, strict=True)]
            return torch.stack(losses).sum()

        def validate(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return mean_validation_metrics(self.loss, model([cast_inputs(model, batch.x)] * num_members), batch.y)

        self._train(multi_head, inputs, lambda epoch: objective, validate)
        return MIMOPredictor(multi_head.eval(), skeleton, tuple(widened))
