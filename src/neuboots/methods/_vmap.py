"""K small nets of one architecture as one: parameters stacked, the pass mapped over them by torch.func.

    Stacked(x)[k] = net_k(x_k)

Small nets spend their time between operations, not in them; K nets in one operation cost little more than one.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from neuboots.head import copy_net, copy_to_meta
from neuboots.loading import preserve_rng_state
from neuboots.methods._base import functional_output


class StackedNets(nn.Module):
    """K nets side by side, as one module.

    >>> nets = [nn.Linear(4, 3) for _ in range(5)]
    >>> x = torch.ones(2, 4)
    >>> bool(torch.allclose(StackedNets(nets)(x, alike=True)[2], nets[2](x)))
    True
    """

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        super().__init__()
        self.num_members = len(nets)
        self.stacked = copy_to_meta(nets[0])  # its tree holds the stacked tensors under their own names
        self.stacked.train(nets[0].training)
        self._template = (copy_to_meta(nets[0]),)  # in a tuple: its empty tensors are no state
        states = [_named_tensors(net) for net in nets]
        for name, tensor in _named_tensors(self.stacked).items():
            whole = torch.stack([state[name].detach() for state in states])  # (K, …)
            if isinstance(tensor, nn.Parameter):
                whole = nn.Parameter(whole, tensor.requires_grad)
            _put(self.stacked, tensor, whole)

    def __len__(self) -> int:
        return self.num_members

    @property
    def template(self) -> nn.Module:
        """One net without its numbers."""
        return self._template[0]

    def nets(self) -> list[nn.Module]:
        """The K nets, each with its own copy of its rows."""
        wholes = _named_tensors(self.stacked)
        found = []
        for k in range(len(self)):
            rows: dict[int, Any] = {}
            for name, empty in _named_tensors(self.template).items():
                row = wholes[name][k].detach().clone()
                rows[id(empty)] = nn.Parameter(row, empty.requires_grad) if isinstance(empty, nn.Parameter) else row
            found.append(copy.deepcopy(self.template, rows))
            for mine, theirs in zip(found[-1].modules(), self.stacked.modules(), strict=True):
                mine.training = theirs.training
        return found

    def forward(self, x: Any, *, alike: bool = False) -> Tensor:
        """Each net at its own inputs (K, N, …), or all of them alike at (N, …): (K, N, C, *)."""
        template = self.template
        for mine, theirs in zip(self.stacked.modules(), template.modules(), strict=True):
            theirs.training = mine.training

        tensors = _named_tensors(self.stacked)
        axes = tree_map(lambda part: None if alike or not isinstance(part, Tensor) else 0, x)
        out: Tensor = vmap(partial(functional_output, template), in_dims=(0, axes))(tensors, x)
        return out


def _named_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those that are not saved among them."""
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def _put(tree: nn.Module, old: Tensor, new: Tensor) -> None:
    """`new` in every place of `old`: tied weights stay tied."""
    for module in tree.modules():
        for places in (module._parameters, module._buffers):
            for key, tensor in places.items():
                if tensor is old:
                    places[key] = new  # type: ignore[assignment]


def find_vmap_obstacle(nets: Sequence[nn.Module], run: Callable[[nn.Module, Any], Tensor], x: Any) -> str | None:
    """Why these nets cannot run side by side with the same result, found by a trial; None if they can.

    `x` are a few inputs of one net. A net that draws random numbers, reads values, or uses operations that cannot be
    mapped does not pass; nor do nets whose outputs, gradients or BatchNorm statistics come out different, or that
    keep something beside tensors from one pass to the next.
    """
    for net in nets:
        for module in net.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (module.padding_idx is not None or module.sparse):
                return "torch.func does not map an embedding with a padding index or sparse gradients"
    # torch warns where it maps an operation in a slow way
    with preserve_rng_state(), warnings.catch_warnings(action="error"):
        try:
            return _difference([_jittered(net, k) for k, net in enumerate(nets)], run, x)
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, KeyError, Warning) as error:
            return (
                f"torch.func cannot map the net ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            )


def _jittered(net: nn.Module, k: int) -> nn.Module:
    """A copy with a little noise on every parameter: a head that begins at zero would hide all differences."""
    twin = copy_net(net)
    rng = torch.Generator().manual_seed(k)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=rng).to(parameter))
    return twin


def _difference(nets: list[nn.Module], run: Callable[[nn.Module, Any], Tensor], x: Any) -> str | None:
    """How K nets side by side differ from the same nets apart, over two passes in training and one in evaluation."""
    plain = [_plain_state(net) for net in nets]
    if any(state != plain[0] for state in plain):
        return "the nets differ in more than their numbers"
    stacked = StackedNets([copy_net(net) for net in nets])
    mixed = [tree_map(partial(_rolled, k), x) for k in range(len(nets))]
    both = tree_map(lambda *parts: torch.stack(parts) if isinstance(parts[0], Tensor) else parts[0], *mixed)
    for training in (True, True, False):
        for module in (*nets, stacked):
            module.train(training)
        together = stacked(both)
        apart = torch.stack([run(net, inputs) for net, inputs in zip(nets, mixed, strict=True)])
        if not torch.allclose(together, apart, rtol=1e-3, atol=1e-4):
            return "the nets give other outputs side by side"
    projection = torch.randn(together.shape, generator=torch.Generator().manual_seed(0)).to(together)
    if together.requires_grad:
        torch.autograd.backward((together * projection).sum() + (apart * projection).sum())
    for net, twin, k in zip(nets, stacked.nets(), range(len(nets)), strict=True):
        mine, theirs = _named_tensors(twin), _named_tensors(net)
        if not all(torch.allclose(mine[name], value, rtol=1e-3, atol=1e-4) for name, value in theirs.items()):
            return "the nets keep other statistics side by side"
        for name, parameter in net.named_parameters():
            whole = stacked.stacked.get_parameter(name).grad
            gradient = None if whole is None else whole[k]
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            if not torch.allclose(gradient, expected, rtol=1e-3, atol=1e-4):
                return "the nets have other gradients side by side"
    if any(_plain_state(net) != state for net, state in zip(nets, plain, strict=True)):
        return "the net keeps something beside its tensors from one pass to the next"
    return None


def _rolled(k: int, part: Any) -> Any:
    """The rows in another order, so that each net has inputs of its own."""
    return part.roll(k, 0) if isinstance(part, Tensor) and part.ndim else part


def _plain_state(net: nn.Module) -> list[dict[str, Any]]:
    """What the modules hold beside modules, parameters and buffers, as far as it can be compared."""
    return [
        {"": type(module).__qualname__}
        | {
            key: value.tolist() if isinstance(value, Tensor) else value
            for key, value in vars(module).items()
            if isinstance(value, int | float | str | bool | tuple | list | Tensor | None) and key != "training"
        }
        for module in net.modules()
    ]
