"""MIMO: K inputs and K heads in one net, which learns K subnetworks inside it.

    (z_1, …, z_K) = f(x_1, …, x_K),   loss = Σ_k mean over rows of ℓ(z_k, y_k),   f_k(x) = f(x, …, x)_k

In training the K inputs are rows of the batch in K orders of their own, at prediction they are the same. Linear layers
and convolutions that the inputs reach read all K, side by side on their axis of channels, and are K times as wide;
what stands before them (normalisation, embedding, flattening) sees each input by itself. The head is there K times,
and between the two the net is as it was.

Havasi, Jenatton, Fort, Liu, Snoek, Lakshminarayanan, Dai and Tran, Training independent subnetworks for robust
prediction, ICLR 2021.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset

from neuboots._prng import derive_seed
from neuboots.head import HeadSplit, cast_inputs, copy_to_meta, eval_mode, make_head, split_head, unwrap_model
from neuboots.loading import Batch
from neuboots.losses import CrossEntropy, Loss, check_loss, valid_mask, weighted_mean
from neuboots.methods._base import load_example, register, validation_metrics
from neuboots.methods.ensembles import check_members
from neuboots.prediction import Predictor, SampleStream, stream_members
from neuboots.training import TrainingConfig, describe_method, initialize_model, train

# -- K inputs ------------------------------------------------------------------------------------------

_AXES = {F.linear: -1, F.conv1d: -2, F.conv2d: -3, F.conv3d: -4}  # of the channels, from the end
_OTHER_MAPS = {
    *("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear", "multi_head_attention_forward"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}

# What is told of the weights that read K inputs, while layers are looked for.
_READ: ContextVar[Callable[[Tensor], None] | None] = ContextVar("read", default=None)


def _refused(why: str) -> ValueError:
    return ValueError(
        f"the net cannot be widened for MIMO: {why}; expected a plain Linear or convolution to read the input, and "
        "nothing but the layers to pass it on: take another method, or move the step into the data"
    )


class MultiInput(Tensor):
    """K tensors that look like one. What is done with it is done with each; linear layers and convolutions read all K.

    >>> a, b = torch.zeros(5, 2), torch.ones(5, 2)
    >>> both = 2 * combine_inputs([a, b]) + 1
    >>> both.shape, nn.Linear(4, 3)(both).shape
    (torch.Size([5, 2]), torch.Size([5, 3]))
    """

    parts: tuple[Tensor, ...]

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> "MultiInput":
        whole = parts[0].as_subclass(cls)
        whole.parts = tuple(parts)
        return whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (cls, Tensor, nn.Parameter) for kind in types):  # the record of what follows the head
            raise _refused("after its head it uses the input again")
        leaves = tree_leaves((args, kwargs))
        if func in _AXES:
            if not args or not isinstance(args[0], cls):
                raise _refused("the input is given to a linear map by name, or as its weights")
            _, weight, *rest = args
            if (read := _READ.get()) is not None:
                read(weight)
            return func(torch.cat(args[0].parts, _AXES[func]), weight, *rest, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _OTHER_MAPS and any(isinstance(leaf, nn.Parameter) for leaf in leaves):
            raise _refused(f"an operation other than Linear and convolution reads the input ({name})")
        times = next(len(leaf.parts) for leaf in leaves if isinstance(leaf, cls))
        if func is F.batch_norm and args and isinstance(args[0], cls):  # statistics of all K together, updated once
            return cls.of(func(torch.cat(args[0].parts), *args[1:], **kwargs).chunk(times))
        results = []
        for k in range(times):
            mine = tree_map(lambda leaf, k=k: leaf.parts[k] if isinstance(leaf, cls) else leaf, (args, kwargs))
            results.append(func(*mine[0], **mine[1]))
        return results[0] if isinstance(results[0], torch.Size) else tree_map(cls._joined, *results)

    @classmethod
    def _joined(cls, *results: Any) -> Any:
        first = results[0]
        if isinstance(first, Tensor):
            return cls.of(cast(tuple[Tensor, ...], results))
        if isinstance(first, bool | int | float) and any(result != first for result in results):
            raise _refused("it reads values of its input, which differ between the K inputs")
        return first


def combine_inputs(inputs: Sequence[Any]) -> Any:
    """K inputs of a net as one; what is not one row for each input stays as it is."""
    rows = next((len(part) for part in tree_leaves(inputs[0]) if isinstance(part, Tensor) and part.ndim), 0)

    def part(*tensors: Any) -> Any:
        each = all(isinstance(tensor, Tensor) and tensor.ndim and len(tensor) == rows for tensor in tensors)
        return (
            MultiInput.of([tensor.clone() for tensor in tensors]) if each else tensors[0]
        )  # a net may write into them

    return tree_map(part, *inputs)


def _redrawn(tensor: Tensor, *name: int | str) -> Tensor:
    """The same numbers in an order drawn by the name: as the first weights were drawn, whatever drew them."""
    rng = torch.Generator().manual_seed(derive_seed(*name))
    order = torch.randperm(tensor.numel(), generator=rng).to(tensor.device)
    return tensor.flatten()[order].view(tensor.shape)


@torch.no_grad()
def widen_layer(layer: nn.Module, times: int, *name: int | str) -> None:
    """The layer with `times` as many inputs, in place.

    Blocks of weights after the first are redrawn, and all are divided by √K, as a first draw over K times the inputs
    would be.
    """
    layer = cast(nn.Linear | nn.Conv2d, layer)
    if times == 1:
        return
    weight = layer.weight
    blocks = [weight, *(_redrawn(weight, *name, k) for k in range(1, times))]
    weight.data = torch.cat(blocks, 1) / times**0.5
    if isinstance(layer, nn.Linear):
        layer.in_features *= times
    else:
        layer.in_channels *= times


@contextmanager
def _telling(read: Callable[[Tensor], None]) -> Iterator[None]:
    token = _READ.set(read)
    try:
        yield
    finally:
        _READ.reset(token)


def _differs(used: Tensor) -> bool:
    return isinstance(used, MultiInput) and any(not torch.equal(part, used.parts[0]) for part in used.parts)


def widen_input_layers(split: HeadSplit, example: Any, times: int, *, seed: int) -> list[str]:
    """Widen every layer that the input reaches, in place, and give their names; the net runs once to find them."""
    layers = {
        id(layer._parameters["weight"]): (name, layer)
        for name, layer in split.net.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and "weight" in layer._parameters
    }
    widened: list[str] = []

    def read(weight: Tensor) -> None:
        name, layer = layers.get(id(weight), ("", None))
        if layer is None:
            raise _refused("the weights that read the input are computed from others, or in no layer")
        if getattr(layer, "groups", 1) != 1:
            raise _refused(f"{name!r} reads the input in groups of channels")
        if times > 1 and not weight.requires_grad:
            raise _refused(f"{name!r} reads the input and is frozen, so it would never learn to read K of them")
        if name not in widened:
            widen_layer(layer, times, seed, "widen", name)
            widened.append(name)

    def other(k: int) -> Any:
        """Inputs that differ: what does not differ with them is no use of the input."""

        def part(tensor: Tensor) -> Tensor:
            rolled = tensor.roll(k, 0) if tensor.ndim else tensor
            return rolled + k if tensor.ndim and tensor.is_floating_point() else rolled

        return tree_map(part, example)

    try:
        with eval_mode(split.net), torch.no_grad(), _telling(read):
            passed = split.trace(combine_inputs([other(k) for k in range(times)]))
    except (RuntimeError, TypeError) as error:
        raise _refused(str(error).splitlines()[0]) from error
    if any(used is not passed.phi and _differs(used) for used, _ in passed.tape.constants):
        raise _refused("after its head it uses the input again")
    if not widened:
        raise _refused("none of its layers reads the input")
    return widened


def draw_input_orders(rows: int, num_members: int, *, input_repetition: float, batch_repetition: int) -> Tensor:
    """Which row of the batch each input holds: (K, rows · batch_repetition).

    The batch is repeated and shuffled; of that, a share of 1 − ρ is shuffled once more for each input by itself.
    """
    whole = torch.arange(rows).repeat(batch_repetition)
    whole = whole[torch.randperm(len(whole))]
    apart = round(len(whole) * (1 - input_repetition))
    orders = [torch.cat([whole[torch.randperm(apart)], whole[apart:]]) for _ in range(num_members)]
    return torch.stack(orders)


def _rows_of(x: Any, rows: Tensor) -> Any:
    return tree_map(lambda part: part[rows], x)


# -- K heads -------------------------------------------------------------------------------------------


class MultiHeadNet(nn.Module):
    """The widened net with K heads, the first of which is its own."""

    def __init__(self, split: HeadSplit, num_members: int, *, seed: int) -> None:
        super().__init__()
        self.split, self.net, self.num_members = split, split.net, num_members
        weight, bias = split.head.weight.detach(), split.head.bias
        self.more_heads = nn.ModuleList(
            make_head(
                _redrawn(weight, seed, "head", k, "weight"),
                None if bias is None else _redrawn(bias.detach(), seed, "head", k, "bias"),
            )
            for k in range(1, num_members)
        )

    def forward(self, inputs: Sequence[Any], members: Sequence[int] | None = None) -> Tensor:
        """What the net makes of each head's output at K inputs: (K, N, C, *), or (K, N)."""
        passed = self.split.trace(combine_inputs(inputs))
        heads = [self.split.head, *self.more_heads]
        numbers = range(self.num_members) if members is None else members
        return torch.stack([passed.finish(heads[k](passed.phi)) for k in numbers])


@dataclass(frozen=True)
class MIMOPredictor(Predictor):
    """Replicates are heads, all of them from one pass: every K are all K, in an order that the seed draws."""

    multi: MultiHeadNet
    skeleton: nn.Module  # the net before it was widened, without its numbers
    widened: tuple[str, ...]  # the layers that read the input

    @property
    def net(self) -> nn.Module:
        return self.skeleton

    @property
    def module(self) -> nn.Module:
        return self.multi

    @property
    def num_distinct(self) -> int | None:
        return self.multi.num_members

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        num_members = self.multi.num_members
        inputs = [cast_inputs(self.multi, x)] * num_members

        def run(numbers: Tensor) -> Tensor:
            with eval_mode(self.multi):
                outputs: Tensor = self.multi(inputs, numbers.tolist())
            return outputs[..., None] if outputs.ndim == 2 else outputs

        return stream_members(num_samples, num_members, run, seed=seed)

    def config(self) -> dict[str, Any]:
        return {
            "method": "mimo",
            "num_members": self.multi.num_members,
            "head": self.multi.split.name,
            "widened": list(self.widened),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "MIMOPredictor":
        skeleton, num_members = copy_to_meta(net), config["num_members"]
        split = split_head(net, config["head"])
        for name in config["widened"]:
            widen_layer(split.net.get_submodule(name), num_members, 0, name)
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
class MIMO:
    """K inputs, K heads. `input_repetition` is ρ, the share of rows in which all K inputs are the same one;
    `batch_repetition` is how often a row stands in its batch, each time beside others; a step costs as many times more.
    The authors take ρ = 0 and 4 repetitions for small images, 0.6 and 2 for large ones. `head` names the last layer
    where it is in doubt.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(8, 2), torch.arange(8) % 3)
    >>> model = lambda: nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> predictor = MIMO(num_members=3).fit(model, data, TrainingConfig(epochs=1, progress=False))
    >>> predictor.predict(torch.zeros(5, 2), 3).samples.shape  # (B, N, C)
    torch.Size([3, 5, 3])
    """

    loss: Loss = field(default_factory=CrossEntropy)
    num_members: int = 3
    input_repetition: float = 0.0
    batch_repetition: int = 1
    head: str | None = None

    def __post_init__(self) -> None:
        check_loss(self.loss)
        check_members(self.num_members)
        if not 0 <= self.input_repetition <= 1:
            raise ValueError(f"got input_repetition={self.input_repetition!r}; expected a share from 0 to 1")
        if not isinstance(self.batch_repetition, int) or self.batch_repetition < 1:
            raise ValueError(f"got batch_repetition={self.batch_repetition!r}; expected at least 1, and a whole number")

    def fit(
        self,
        model: Callable[[], nn.Module],
        data: Dataset[Any],
        config: TrainingConfig,
        *,
        val_data: Dataset[Any] | None = None,
    ) -> MIMOPredictor:
        """Widen the net that `model()` gives and train it, on (x, y) rows, as the recipe says."""
        num_members = self.num_members
        net = initialize_model(model, config.seed)
        example = load_example(net, data, seed=config.seed)
        net = unwrap_model(net)
        skeleton = copy_to_meta(net)
        split = split_head(net, self.head, example=example)
        widened = widen_input_layers(split, example, num_members, seed=config.seed)
        multi = MultiHeadNet(split, num_members, seed=config.seed)

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            orders = draw_input_orders(
                len(batch.y),
                num_members,
                input_repetition=self.input_repetition,
                batch_repetition=self.batch_repetition,
            ).to(batch.y.device)
            outputs = model([cast_inputs(model, _rows_of(batch.x, rows)) for rows in orders])
            return torch.stack(
                [self._mean_loss(z, batch.y[rows]) for z, rows in zip(outputs, orders, strict=True)]
            ).sum()

        def validate(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            outputs = model([cast_inputs(model, batch.x)] * num_members)
            figures = [validation_metrics(self.loss, z, batch.y) for z in outputs]
            return {name: torch.stack([figure[name] for figure in figures]).mean() for name in figures[0]}

        train(
            multi,
            data,
            lambda epoch: objective,
            config,
            val_data=val_data,
            validate=validate,
            identity=describe_method(self),
        )
        return MIMOPredictor(multi.eval(), skeleton, tuple(widened))

    def _mean_loss(self, z: Tensor, y: Tensor) -> Tensor:
        losses = self.loss(z, y)
        return weighted_mean(losses, losses.new_ones(len(y)), valid_mask(self.loss, y))
