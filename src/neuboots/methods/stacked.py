"""K small nets of one architecture as one: parameters stacked, the pass mapped over them by torch.func.

    Stacked(x)[k] = net_k(x_k)

Small nets spend their time between operations, not in them; K nets in one operation cost little more than one.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

from neuboots.batches import own_randomness
from neuboots.surgery import main_output, skeleton_of


class Stacked(nn.Module):
    """K nets side by side, as one module.

    >>> nets = [nn.Linear(4, 3) for _ in range(5)]
    >>> x = torch.ones(2, 4)
    >>> bool(torch.allclose(Stacked(nets)(x, alike=True)[2], nets[2](x)))
    True
    """

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        super().__init__()
        states = [_named_tensors(net) for net in nets]
        self.stacked = skeleton_of(nets[0])  # its tree holds the stacked tensors under their own names
        self.stacked.train(nets[0].training)
        self._template = (skeleton_of(nets[0]),)  # in a tuple: its empty tensors are no state
        for name, tensor in _named_tensors(self.stacked).items():
            whole = torch.stack([state[name].detach() for state in states])  # (K, …)
            if isinstance(tensor, nn.Parameter):
                whole = nn.Parameter(whole, tensor.requires_grad)
            _put(self.stacked, tensor, whole)

    def forward(self, x: Any, *, alike: bool = False) -> Tensor:
        """Each net at its own inputs (K, N, …), or all of them alike at (N, …): (K, N, C, *)."""
        template = self._template[0]
        for mine, theirs in zip(self.stacked.modules(), template.modules(), strict=True):
            theirs.training = mine.training

        def one(tensors: dict[str, Tensor], x: Any) -> Tensor:
            args, kwargs = ((), x) if isinstance(x, Mapping) else (x if isinstance(x, tuple | list) else (x,), {})
            return main_output(functional_call(template, tensors, tuple(args), dict(kwargs)))

        tensors = _named_tensors(self.stacked)
        axes = tree_map(lambda part: None if alike or not isinstance(part, Tensor) else 0, x)
        out: Tensor = vmap(one, in_dims=(0, axes))(tensors, x)
        return out

    @torch.no_grad()
    def write_back(self, nets: Sequence[nn.Module]) -> None:
        """Row k of every stacked tensor into net k."""
        for k, net in enumerate(nets):
            mine = _named_tensors(net)
            for name, whole in _named_tensors(self.stacked).items():
                mine[name].copy_(whole[k])


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


def why_not_together(nets: Sequence[nn.Module], run: Callable[[nn.Module, Any], Tensor], x: Any) -> str | None:
    """Why nets of this architecture cannot run side by side with the same result, found by a trial; None if they can.

    `x` are a few inputs of one net. A net that draws random numbers, reads values, or uses operations that cannot be
    mapped does not pass; nor does one whose outputs, BatchNorm statistics included, come out different.
    """
    pair = [copy.deepcopy(nets[0]), copy.deepcopy(nets[-1])]
    stacked = Stacked([copy.deepcopy(net) for net in pair])
    both = tree_map(lambda part: torch.stack([part, part.flip(0)]) if isinstance(part, Tensor) else part, x)
    inputs = [tree_map(lambda part, k=k: part[k] if isinstance(part, Tensor) else part, both) for k in range(2)]
    try:
        for training in (True, False):
            for module in (*pair, stacked):
                module.train(training)
            with (
                torch.no_grad(),
                own_randomness(),
                warnings.catch_warnings(action="error"),
            ):  # torch warns of slow paths
                together = stacked(both)
                apart = torch.stack([run(net, x) for net, x in zip(pair, inputs, strict=True)])
            if not torch.allclose(together, apart, rtol=1e-3, atol=1e-4):
                return "the nets give other outputs side by side"
    except (RuntimeError, TypeError, ValueError, AttributeError, Warning) as error:
        return f"torch.func cannot map the net ({str(error).splitlines()[0]})"
    after = [copy.deepcopy(net) for net in pair]
    stacked.write_back(after)
    tensors = zip(
        *([value for net in nets for value in net.state_dict().values()] for nets in (after, pair)), strict=True
    )
    if not all(torch.allclose(mine, theirs, rtol=1e-3, atol=1e-4) for mine, theirs in tensors):
        return "the nets keep other statistics side by side"
    return None
