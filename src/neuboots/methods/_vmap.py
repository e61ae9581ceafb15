"""K nets of one architecture as one module: parameters are stacked and the forward pass is mapped by `torch.func.vmap`.

    StackedNets(x)[k] = net_k(x_k)

The time of a small net is dominated by overhead per operation, so that K nets in one call cost little more than one.
"""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from neuboots.head import compute_output, copy_net, copy_to_meta, find_output_axis
from neuboots.loading import preserve_rng_state
from neuboots.methods._base import functional_output


class StackedNets(nn.Module):
    """K nets of one architecture, evaluated together.

    Args:
        nets: The K nets; their parameters and buffers are copied.

    Example:
        >>> nets = [nn.Linear(4, 3) for _ in range(5)]
        >>> x = torch.ones(2, 4)
        >>> bool(torch.allclose(StackedNets(nets)(x, shared_input=True)[2], nets[2](x)))
        True
    """

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        super().__init__()
        self.num_members = len(nets)
        self.stacked = copy_to_meta(nets[0])  # holds the stacked tensors under the names of the net's tensors
        self.stacked.train(nets[0].training)
        self._template = (copy_to_meta(nets[0]),)  # in a tuple, so that its empty tensors are not part of the state
        states = [_named_tensors(net) for net in nets]
        for name, tensor in _named_tensors(self.stacked).items():
            _replace_tensor(self.stacked, tensor, torch.stack([state[name].detach() for state in states]))  # (K, …)

    def __len__(self) -> int:
        return self.num_members

    @property
    def template(self) -> nn.Module:
        """One net without its numbers."""
        return self._template[0]

    def nets(self) -> list[nn.Module]:
        """Return copies of the K nets."""
        stacks = _named_tensors(self.stacked)
        nets = []
        for k in range(len(self)):
            nets.append(copy_to_meta(self.template))
            for name, empty in _named_tensors(nets[-1]).items():
                _replace_tensor(nets[-1], empty, stacks[name][k].detach().clone())
            _copy_modes(self.stacked, nets[-1])
        return nets

    def forward(self, x: Any, *, shared_input: bool = False) -> Tensor:
        """Evaluate each net at its own inputs (K, N, …), or all nets at the same inputs (N, …): (K, N, C, *)."""
        _copy_modes(self.stacked, self.template)
        axes = tree_map(lambda part: None if shared_input or not isinstance(part, Tensor) else 0, x)
        run = vmap(partial(functional_output, self.template), in_dims=(0, axes))
        out: Tensor = run(_named_tensors(self.stacked), x)
        return out


def _named_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, including buffers that are not saved."""
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def _copy_modes(source: nn.Module, target: nn.Module) -> None:
    """Copy the training mode of every module."""
    for theirs, mine in zip(source.modules(), target.modules(), strict=True):
        mine.training = theirs.training


def _replace_tensor(net: nn.Module, old: Tensor, values: Tensor) -> None:
    """Replace a parameter or buffer wherever it occurs, so that tied weights stay tied."""
    new = nn.Parameter(values, old.requires_grad) if isinstance(old, nn.Parameter) else values
    for module in net.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is old:
                    tensors[key] = new  # type: ignore[assignment]


def find_vmap_obstacle(nets: Sequence[nn.Module], x: Any) -> str | None:
    """Return why stacked nets would not give the results of the separate nets, or None if they do.

    The nets are run on `x`, a few inputs of one net. Nets are rejected that draw random numbers, branch on values, use
    operations that cannot be mapped, keep state outside tensors, or whose outputs, gradients or BatchNorm statistics
    differ when stacked.
    """
    for net in nets:
        for module in net.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (module.padding_idx is not None or module.sparse):
                return "torch.func cannot map an embedding with a padding index or sparse gradients"
    with preserve_rng_state(), warnings.catch_warnings(action="error"):  # torch warns about slow fallbacks
        try:
            return _compare_stacked([_perturb(net, k) for k, net in enumerate(nets)], x)
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, KeyError, Warning) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return f"torch.func cannot map the net ({reason})"


def _perturb(net: nn.Module, k: int) -> nn.Module:
    """Return a copy with noise added to every parameter: a head initialised with zeros would hide all differences."""
    noisy = copy_net(net)
    rng = torch.Generator().manual_seed(k)
    with torch.no_grad():
        for parameter in noisy.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=rng).to(parameter))
    return noisy


def _compare_stacked(nets: list[nn.Module], x: Any) -> str | None:
    """Return how stacked nets differ from separate ones, over two passes in training mode and one in evaluation."""
    initial = [_other_state(net) for net in nets]
    if any(state != initial[0] for state in initial):
        return "the nets differ in more than their tensors"
    stacked = StackedNets([copy_net(net) for net in nets])
    inputs = [tree_map(partial(_roll, k), x) for k in range(len(nets))]
    stacked_inputs = tree_map(lambda *parts: torch.stack(parts) if isinstance(parts[0], Tensor) else parts[0], *inputs)
    for training in (True, True, False):
        for module in (*nets, stacked):
            module.train(training)
        mapped = stacked(stacked_inputs)
        if mapped.ndim > 3 and find_output_axis(nets[0], inputs[0], mapped[0]) != 1:
            return "the outputs of its tokens are moved to axis 1"
        separate = torch.stack([compute_output(net, part) for net, part in zip(nets, inputs, strict=True)])
        if not _close(mapped, separate):
            return "stacked nets give other outputs"
    projection = torch.randn(mapped.shape, generator=torch.Generator().manual_seed(0)).to(mapped)
    if mapped.requires_grad:
        torch.autograd.backward((mapped * projection).sum() + (separate * projection).sum())
    for k, (net, copied) in enumerate(zip(nets, stacked.nets(), strict=True)):
        mine = _named_tensors(copied)
        if not all(_close(mine[name], value) for name, value in _named_tensors(net).items()):
            return "stacked nets keep other BatchNorm statistics"
        for name, parameter in net.named_parameters():
            gradients, zero = stacked.stacked.get_parameter(name).grad, torch.zeros_like(parameter)
            mapped_gradient = zero if gradients is None else gradients[k]
            if not _close(mapped_gradient, zero if parameter.grad is None else parameter.grad):
                return "stacked nets have other gradients"
    if any(_other_state(net) != state for net, state in zip(nets, initial, strict=True)):
        return "the net keeps state outside its tensors"
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4)


def _roll(k: int, part: Any) -> Any:
    """Shift the rows, so that each net has its own inputs."""
    return part.roll(k, 0) if isinstance(part, Tensor) and part.ndim else part


def _other_state(net: nn.Module) -> list[dict[str, Any]]:
    """Return the comparable attributes of all modules other than modules, parameters and buffers."""
    return [
        {"": type(module).__qualname__}
        | {
            key: value.tolist() if isinstance(value, Tensor) else value
            for key, value in vars(module).items()
            if isinstance(value, int | float | str | bool | tuple | list | Tensor | None) and key != "training"
        }
        for module in net.modules()
    ]
