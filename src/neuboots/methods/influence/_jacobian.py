"""Jacobian J(x) of a net's outputs by its weights, and the tangent kernel K(x, x′) = J(x) J(x′)ᵀ.

For a Linear layer with input a and slope d = ∂z/∂(its output), a row of J is d ⊗ (a, 1), so that

    K(x, x′) = Σ_layers (aᵀa′ + 1) dᵀd′

needs no row of J itself. Other layers (convolutions, norms, a layer that is used twice, a Linear whose weights are
computed from others) are differentiated row by row ("explicit" below).
Jacot, Gabriel and Hongler, Neural tangent kernel: convergence and generalization in neural networks, NeurIPS 2018.
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map_only

from neuboots._pytree import count_rows, row_slices, take_rows, tile_rows
from neuboots.head import add_output_axis, call_net, eager_mode, eval_mode, is_head
from neuboots.methods._base import functional_output

Layers = int | Literal["all"]
_BATCH_ROWS = 256
_MAX_STORED_ELEMENTS = 1 << 26  # of explicit rows of J; beyond that they are computed again, tile by tile
_MANY_PASSES = 30_000  # backward passes that are worth a warning


@dataclass(frozen=True)
class LinearFactors:
    """One Linear layer at N inputs.

    Attributes:
        a: Its inputs, and 1 as last column, or 0 if it has no bias: (N, D + 1).
        d: Its slopes for each output of the net: (N, C, O).
    """

    a: Tensor
    d: Tensor

    def kernel(self, other: "LinearFactors") -> Tensor:
        """(aᵀa′ + 1) dᵀd′, in double precision: (N, C, N′, C)."""
        inputs = self.a.double() @ other.a.double().T
        slopes = self.d.double().flatten(0, 1) @ other.d.double().flatten(0, 1).T
        return slopes.view(*self.d.shape[:2], *other.d.shape[:2]) * inputs[:, None, :, None]


@dataclass(frozen=True)
class JacobianRows:
    """J at N inputs.

    Attributes:
        x: The inputs.
        z: All outputs of the net: (N, ·).
        outputs: C, the number of leading outputs that are differentiated.
        factors: Of each Linear layer.
        stored: The explicit part, once it was computed and is small: (N, C, P).
    """

    x: Any
    z: Tensor
    outputs: int
    factors: tuple[LinearFactors, ...]
    stored: list[Tensor] = field(default_factory=list)


class Jacobian:
    """J of a net by the weights of its last layers. The net is not changed.

    Args:
        net: The net.
        layers: Number of layers with weights, counted from the last call, or "all".
        example: Inputs on which the net is tried.
        outputs: Number of leading outputs that are differentiated; None is all.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        >>> jacobian = Jacobian(net, "all", x)
        >>> jacobian.kernel(jacobian.rows(x), jacobian.rows(x)).shape  # (N·C, N·C)
        torch.Size([5, 5])
    """

    def __init__(self, net: nn.Module, layers: Layers, example: Any, *, outputs: int | None = None) -> None:
        self.net, self.outputs, self._needs_two_rows = net, outputs, False
        self._needs_two_rows = not self._accepts_one_row(example)
        called = _find_layers(net, example)
        chosen = list(called) if layers == "all" else list(called)[-layers:]
        modules = dict(net.named_modules())
        uses = Counter(id(p) for module in net.modules() for p in module.parameters(recurse=False))
        self._linear = [
            name for name in chosen if called[name] and all(uses[id(p)] == 1 for p in modules[name].parameters())
        ]
        self._explicit: list[str] = []
        self._linear = self._verify_factors(example)
        wanted: list[nn.Parameter] = list(net.parameters()) if layers == "all" else []
        for name in chosen if layers != "all" else ():  # its own weights, and those of parts it uses without a call
            inside = modules[name].named_modules(prefix=name)
            parts = [part for key, part in inside if key == name or key not in called]
            wanted += [p for part in parts for p in part.parameters(recurse=False)]
        names = {id(parameter): name for name, parameter in net.named_parameters()}
        covered = {id(p) for name in self._linear for p in modules[name].parameters()}
        self._explicit = list(dict.fromkeys(names[id(p)] for p in wanted if id(p) not in covered))
        self._explicit_size = sum(net.get_parameter(name).numel() for name in self._explicit)  # P
        if not (self._linear or self._explicit):
            raise ValueError("the net has no weights; expected layers with weights")

    def rows(self, x: Any, *, batch_rows: int = _BATCH_ROWS) -> JacobianRows:
        """Compute the outputs and the factors of Linear layers at inputs x.

        Args:
            x: Inputs of the net.
            batch_rows: Rows that pass through the net at once.
        """
        n = count_rows(x)
        batched = tile_rows(x, 2) if n == 1 else x  # a net may squeeze the axis of a single row
        parts = [
            self._compute_factors(take_rows(batched, rows)) for rows in row_slices(count_rows(batched), batch_rows)
        ]
        z = torch.cat([part[0] for part in parts])[:n]
        factors = tuple(
            LinearFactors(torch.cat([f.a for f in layer])[:n], torch.cat([f.d for f in layer])[:n])
            for layer in zip(*(part[1] for part in parts), strict=True)
        )
        return JacobianRows(x, z, self.outputs or z.shape[1], factors)

    def along(self, rows: JacobianRows) -> Tensor:
        """J θ̂ in double precision, the outputs of the linear model with these slopes: (N, C)."""
        total = rows.z.new_zeros(len(rows.z), rows.outputs, dtype=torch.float64)
        for name, factors in zip(self._linear, rows.factors, strict=True):
            with torch.no_grad():
                output = self.net.get_submodule(name)(factors.a[:, :-1])
            total += torch.einsum("nco,no->nc", factors.d.double(), output.double())
        if self._explicit:
            weights = dict(self.net.named_parameters())
            theta = torch.cat([weights[name].detach().flatten() for name in self._explicit]).double()
            total += torch.cat([J.double() @ theta for _, J in self._tiles(rows)])
        return total

    def kernel(self, rows: JacobianRows, others: JacobianRows) -> Tensor:
        """K = J J′ᵀ in double precision, the C outputs of a row next to each other: (N·C, N′·C)."""
        total = rows.z.new_zeros(len(rows.z), rows.outputs, len(others.z), others.outputs, dtype=torch.float64)
        for mine, theirs in zip(rows.factors, others.factors, strict=True):
            total += mine.kernel(theirs)
        if self._explicit:
            for start, mine_J in self._tiles(rows):
                for other, their_J in self._tiles(others):
                    part = mine_J.flatten(0, 1).double() @ their_J.flatten(0, 1).double().T
                    where = (slice(start, start + len(mine_J)), slice(None), slice(other, other + len(their_J)))
                    total[where] += part.view(*mine_J.shape[:2], *their_J.shape[:2])
        return total.flatten(2, 3).flatten(0, 1)

    def warn_of_cost(self, n: int, outputs: int) -> None:
        """Warn if the kernel of n rows takes very many backward passes."""
        tiles = -(-n * outputs * self._explicit_size // _MAX_STORED_ELEMENTS)
        passes = n * outputs * (tiles + (tiles > 1))
        if passes > _MANY_PASSES:
            warnings.warn(
                f"{self._explicit_size:,} weights outside of Linear layers need about {passes:,} backward passes for "
                f"{n} rows of {outputs} outputs; use a smaller max_kernel_rows, layers=2 or layers=1",
                stacklevel=3,
            )

    def pull(self, rows: JacobianRows, coefficients: Tensor) -> list[Tensor]:
        """Jᵀ c for K columns of coefficients (N, C, K), a part for each layer: (K, O, D + 1), or (K, *weights).

        >>> net, x = nn.Linear(3, 1), torch.tensor([[1.0, 2.0, 3.0]])
        >>> jacobian = Jacobian(net, "all", x)
        >>> jacobian.pull(jacobian.rows(x), torch.ones(1, 1, 1))[0].tolist()  # z = w·x + b
        [[[1.0, 2.0, 3.0, 1.0]]]
        """
        parts = []
        for factors in rows.factors:
            slopes = torch.einsum("nco,nck->nko", factors.d, coefficients.to(factors.d))
            parts.append(torch.einsum("nko,nd->kod", slopes, factors.a))
        return parts + self._pull_explicit(rows.x, coefficients, self._explicit)

    def push(self, rows: JacobianRows, directions: Sequence[Tensor]) -> Tensor:
        """J u for K directions of the weights, in parts as `pull` gives them: (N, C, K)."""
        num = len(directions[0])
        total = rows.z.new_zeros(len(rows.z), rows.outputs, num)
        for factors, part in zip(rows.factors, directions, strict=False):
            moved = factors.a @ part.to(factors.a).flatten(0, 1).T  # (N, K·O)
            total += factors.d @ moved.view(len(moved), num, -1).mT
        if self._explicit:
            others = [part.to(rows.z) for part in directions[len(rows.factors) :]]
            with sdpa_kernel(SDPBackend.MATH), _gradients(self.net):  # faster kernels have no second derivative
                z, wanted = self._forward(rows.x, self._explicit)
                z = z[:, : rows.outputs]
                v = torch.zeros_like(z, requires_grad=True)
                slopes = torch.autograd.grad(z, wanted, v, create_graph=True, materialize_grads=True)  # Jᵀ v
                columns = [
                    torch.autograd.grad(slopes, v, [part[k] for part in others], retain_graph=True)[0]  # its slope by v
                    for k in range(num)
                ]
            total += torch.stack(columns, -1)
        return total

    def squares(self, rows: JacobianRows) -> Tensor:
        """‖d‖² aⱼ², the part of K(x, x) of the weights of each unit j that enters a Linear layer: (N, C, Q).

        Layer after layer, the bias last, without the explicit part.
        """
        parts = [f.d.square().sum(-1, keepdim=True) * f.a.square()[:, None] for f in rows.factors]
        return torch.cat(parts, -1) if parts else rows.z.new_zeros(len(rows.z), rows.outputs, 0)

    def _accepts_one_row(self, example: Any) -> bool:
        """Whether a single row can pass: a net may squeeze its axis away before a layer that needs it."""
        try:
            with eval_mode(self.net), torch.no_grad():
                return self._forward(take_rows(example, slice(1)))[0].shape[:1] == (1,)
        except (RuntimeError, ValueError, IndexError):
            return False

    def _verify_factors(self, example: Any) -> list[str]:
        """The Linear layers whose factors give their gradient: weights may also be used elsewhere, without a call."""
        rows = self.rows(example)
        c = torch.randn(len(rows.z), rows.outputs, 1, generator=torch.Generator().manual_seed(0))
        layers = {name: self.net.get_submodule(name) for name in self._linear}
        names = [f"{key}.{own}".lstrip(".") for key, layer in layers.items() for own, _ in layer.named_parameters()]
        exact = iter(self._pull_explicit(example, c, names))
        tolerance = max(1e-2, 16 * torch.finfo(rows.z.dtype).eps)  # a layer that is rejected by mistake is only slower
        verified = []
        for (name, layer), pulled in zip(layers.items(), self.pull(rows, c), strict=True):
            pairs = [(pulled[..., :-1], next(exact))]
            pairs += [] if layer.bias is None else [(pulled[..., -1], next(exact))]
            if all(bool((mine - true).norm() <= tolerance * true.norm()) for mine, true in pairs):
                verified.append(name)
        return verified

    def _forward(self, x: Any, names: Sequence[str] = ()) -> tuple[Tensor, list[Tensor]]:
        """z (N, C), with a graph of its own, and the named weights as leaves of that graph."""
        n = count_rows(x)
        if self._needs_two_rows and n == 1:
            x = tile_rows(x, 2)
        x = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), x)  # a net may write into its inputs
        # tensors that were made in inference mode cannot be part of a graph
        buffers = {name: b.clone() for name, b in self.net.named_buffers() if b.is_inference()}
        weights = {name: p.clone() if p.is_inference() else p for name, p in self.net.named_parameters()}
        weights = {name: p.detach().requires_grad_() for name, p in weights.items()}
        with eager_mode(self.net):  # a compiled part ignores hooks
            z = add_output_axis(functional_output(self.net, {**buffers, **weights}, x))
        if z.ndim != 2:
            raise ValueError(
                f"the net's outputs have shape {tuple(z.shape)}; expected (N, C): for pixels and tokens use layers=1"
            )
        return z[:1] if n == 1 else z, [weights[name] for name in names]

    def _compute_factors(self, x: Any) -> tuple[Tensor, list[LinearFactors]]:
        """Outputs and factors of Linear layers: a forward pass, and a backward pass for each output."""
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def record(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            ones = float(module.bias is not None)
            seen[name] = (nn.functional.pad(inputs[0].detach(), (0, 1), value=ones), output)
            return output.clone()  # the next layer may work in place

        layers = {name: self.net.get_submodule(name) for name in self._linear}
        hooks = [module.register_forward_hook(partial(record, name)) for name, module in layers.items()]
        try:
            with _gradients(self.net):
                z, _ = self._forward(x)
                active = [name for name in self._linear if seen[name][1].requires_grad and z.requires_grad]
                outputs = [seen[name][1] for name in active]  # not those under no_grad, whose slopes are zero
                slopes = [
                    torch.autograd.grad(z[:, c].sum(), outputs, retain_graph=True, materialize_grads=True)
                    for c in range((self.outputs or z.shape[1]) if outputs else 0)
                ]
        finally:
            for hook in hooks:
                hook.remove()
        d = {name: z.new_zeros(len(z), self.outputs or z.shape[1], seen[name][1].shape[1]) for name in self._linear}
        d |= {name: torch.stack([slope[k] for slope in slopes], 1) for k, name in enumerate(active)}
        return z.detach(), [LinearFactors(seen[name][0], d[name]) for name in self._linear]

    def _tiles(self, rows: JacobianRows) -> Iterator[tuple[int, Tensor]]:
        """The explicit part of J, some rows at a time: (first row, (rows, C, P))."""
        if rows.stored:
            yield 0, rows.stored[0]
            return
        n, step = len(rows.z), max(1, _MAX_STORED_ELEMENTS // (rows.outputs * self._explicit_size))
        each = torch.eye(rows.outputs)[None]
        for start in range(0, n, step):
            inputs = (take_rows(rows.x, slice(i, i + 1)) for i in range(start, min(start + step, n)))
            pulled = (self._pull_explicit(x, each, self._explicit) for x in inputs)
            J = torch.stack([torch.cat([part.reshape(rows.outputs, -1) for part in parts], 1) for parts in pulled])
            if len(J) == n:
                rows.stored.append(J)
            yield start, J

    def _pull_explicit(self, x: Any, coefficients: Tensor, names: Sequence[str]) -> list[Tensor]:
        """The parts of Jᵀ c of the named weights: (K, *weights) each."""
        if not names:
            return []
        with _gradients(self.net):
            z, wanted = self._forward(x, names)
            if not z.requires_grad:  # the net computes under no_grad
                return [weight.new_zeros(coefficients.shape[-1], *weight.shape) for weight in wanted]
            z = z[:, : coefficients.shape[1]]
            columns = [
                torch.autograd.grad((z * column.clone().to(z)).sum(), wanted, retain_graph=True, materialize_grads=True)
                for column in coefficients.unbind(-1)
            ]
        return [torch.stack(part) for part in zip(*columns, strict=True)]


@contextmanager
def _gradients(net: nn.Module) -> Iterator[None]:
    """Evaluation mode with gradients, whatever the caller's mode."""
    with eval_mode(net), torch.inference_mode(False), torch.enable_grad():
        yield


def _find_layers(net: nn.Module, example: Any) -> dict[str, bool]:
    """Layers with weights in the order of their last call; true for plain Linear layers that see each row once.

    Weights of a module that holds layers count as used before these, as tokens and positions at the input are.
    """
    found: dict[str, bool] = {}

    def enter(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        found.pop(name, None)
        found[name] = False

    def leave(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        first = found.pop(name, None) is None
        matrix = bool(inputs) and isinstance(inputs[0], Tensor) and inputs[0].shape[:-1] == (count_rows(example),)
        # neither pruning nor weight or spectral norms, which compute the weights from other parameters
        plain = not is_parametrized(module) and module._parameters.keys() == {"weight", "bias"}
        found[name] = first and matrix and isinstance(module, nn.Linear) and is_head(module) and plain

    hooks = [
        module.register_forward_pre_hook(partial(enter, name))
        if _holds_layers(module)
        else module.register_forward_hook(partial(leave, name))
        for name, module in net.named_modules()
        if (is_parametrized(module) or next(module.parameters(recurse=False), None) is not None)
        and "parametrizations" not in name.split(".")  # which belong to the layer that holds them
    ]
    try:
        with eval_mode(net), torch.no_grad(), eager_mode(net):
            call_net(net, tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), example))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _holds_layers(module: nn.Module) -> bool:
    """Whether a submodule that can be called by itself has weights."""
    children = (child for name, child in module.named_children() if name != "parametrizations")
    return any(next(child.parameters(), None) is not None for child in children)
