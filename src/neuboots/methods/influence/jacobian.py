"""J(x), the derivative of a net's outputs by its weights, and the tangent kernel K(x, x′) = J(x) J(x′)ᵀ.

For a Linear layer with input a and slope d = ∂z/∂(its output), a row of J is d ⊗ (a, 1), so that

    K(x, x′) = Σ_layers (aᵀa′ + 1) dᵀd′

needs no row of J itself. Other layers (convolutions, norms, a layer that is used twice, a Linear whose weights are
computed from others) are differentiated row by row.
Jacot, Gabriel and Hongler, Neural tangent kernel: convergence and generalization in neural networks, NeurIPS 2018.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import is_parametrized

from neuboots._pytree import count_rows, row_slices, take_rows, tile_rows
from neuboots.head import call_net, eager_mode, eval_mode, extract_output, is_head

_ROWS = 256  # passed through the net at once
_HELD = 1 << 26  # numbers of explicit rows of J that are held; beyond that they are computed again, tile by tile
_MANY = 30_000  # backward passes, about which a word is said


@dataclass(frozen=True)
class LinearFactors:
    """One Linear layer at N inputs: its input a, its slopes d for each output of the net, and whether it has a bias."""

    a: Tensor  # (N, D)
    d: Tensor  # (N, C, O)
    biased: bool

    def kernel(self, other: "LinearFactors") -> Tensor:
        """(aᵀa′ + 1) dᵀd′, in double precision: (N, C, N′, C)."""
        inputs = self.a.double() @ other.a.double().T + float(self.biased)
        slopes = self.d.double().flatten(0, 1) @ other.d.double().flatten(0, 1).T
        return slopes.view(*self.d.shape[:2], *other.d.shape[:2]) * inputs[:, None, :, None]


@dataclass(frozen=True)
class JacobianRows:
    """J at N inputs x: the outputs of the net there, and the factors of its Linear layers for the C leading ones."""

    x: Any
    z: Tensor  # (N, all outputs)
    outputs: int  # C
    factors: tuple[LinearFactors, ...]
    held: list[Tensor] = field(default_factory=list)  # the explicit part, once it was asked for and is small: (N, C, P)


class Jacobian:
    """J of a net by the weights of its last k layers, or of all of them. The net stays as it is.

    `outputs` is how many of its outputs are differentiated, from the first one; None is all.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    >>> jacobian = Jacobian(net, "all", x)
    >>> jacobian.kernel(jacobian.rows(x), jacobian.rows(x)).shape  # (N·C, N·C)
    torch.Size([5, 5])
    """

    def __init__(
        self, net: nn.Module, layers: int | Literal["all"], example: Any, *, outputs: int | None = None
    ) -> None:
        self.net, self.outputs, self._company = net, outputs, False
        self._company = not self._takes_one(example)
        called = _called(net, example)
        chosen = list(called) if layers == "all" else list(called)[-layers:]
        modules = dict(net.named_modules())
        uses = _uses(net)
        self._linear = [
            name for name in chosen if called[name] and all(uses[id(p)] == 1 for p in modules[name].parameters())
        ]
        self._linear = self._factored(example)  # those of them that it holds for
        names = {id(parameter): name for name, parameter in net.named_parameters()}
        covered = {id(p) for name in self._linear for p in modules[name].parameters()}
        wanted: list[nn.Parameter] = []
        if layers == "all":
            wanted = list(net.parameters())
        else:
            for name in chosen:  # a layer's own weights, and those of parts that it uses without calling them
                inside = [part for key, part in modules[name].named_modules(prefix=name) if key not in called]
                wanted += modules[name].parameters(recurse=False)
                wanted += [p for part in inside for p in part.parameters(recurse=False)]
        self._explicit = list(dict.fromkeys(names[id(p)] for p in wanted if id(p) not in covered))
        if not (self._linear or self._explicit):
            raise ValueError("got a net without weights; expected layers with weights to be re-weighted")

    def _takes_one(self, example: Any) -> bool:
        """Whether one row can pass by itself: a net may squeeze its axis away before a layer that needs it."""
        try:
            with eval_mode(self.net), torch.no_grad():
                return self._outputs(_own(take_rows(example, slice(1)))).shape[:1] == (1,)
        except (RuntimeError, ValueError, IndexError):
            return False

    def _factored(self, example: Any) -> list[str]:
        """The Linear layers whose factors give their gradient: weights may be used elsewhere too, without a call."""
        if not self._linear:
            return []
        z, factors = self._some(example)
        outputs = self.outputs or z.shape[1]
        random = torch.Generator().manual_seed(0)
        with eval_mode(self.net), torch.inference_mode(False), torch.enable_grad():
            c = torch.randn(len(z), outputs, generator=random).to(z)  # another number for each row and output
            weights = self._weights
            wanted = [weights[f"net.{name}"] for name in _own_names(self.net, self._linear)]
            slope = (self._outputs(_own(example), weights)[:, :outputs] * c).sum()
            still = [torch.zeros_like(weight) for weight in wanted]
            exact = iter(torch.autograd.grad(slope, wanted, materialize_grads=True) if slope.requires_grad else still)
        tolerance = max(1e-2, 16 * torch.finfo(z.dtype).eps)  # a layer that is taken for another kind is only slower
        found = []
        for name, layer in zip(self._linear, factors, strict=True):
            pulled = torch.einsum("nco,nc,nd->od", layer.d, c.to(layer.d), _with_bias(layer).to(layer.d))
            pairs = [(pulled[:, :-1], next(exact)), *([(pulled[:, -1], next(exact))] if layer.biased else [])]
            if all(bool((mine - true).norm() <= tolerance * true.norm()) for mine, true in pairs):
                found.append(name)
        return found

    def rows(self, x: Any, *, at_once: int = _ROWS) -> JacobianRows:
        """The parts of J at inputs x, so many of which pass through the net at once."""
        n = count_rows(x)
        together = tile_rows(x, 2) if n == 1 else x  # a row by itself may lose its axis on the way through the net
        parts = [self._some(take_rows(together, piece)) for piece in row_slices(count_rows(together), at_once)]
        z = torch.cat([part[0] for part in parts])[:n]
        factors = tuple(
            LinearFactors(torch.cat([f.a for f in layer])[:n], torch.cat([f.d for f in layer])[:n], layer[0].biased)
            for layer in zip(*(part[1] for part in parts), strict=True)
        )
        return JacobianRows(x, z, self.outputs or z.shape[1], factors)

    def along(self, rows: JacobianRows) -> Tensor:
        """J θ̂, double precision: what the linear model with these slopes gives: (N, C)."""
        total = rows.z.new_zeros(len(rows.z), rows.outputs, dtype=torch.float64)
        for name, factors in zip(self._linear, rows.factors, strict=True):
            total += self._along(name, factors)
        if self._explicit:
            weights = dict(self.net.named_parameters())
            theta = torch.cat([weights[name].detach().flatten() for name in self._explicit]).double()
            total += torch.cat([J.double() @ theta for _, J in self._tiles(rows)])
        return total

    def kernel(self, rows: JacobianRows, others: JacobianRows) -> Tensor:
        """K = J J′ᵀ, the C outputs of a row beside each other, in double precision: (N·C, N′·C).

        Whoever divides by a small λ divides the rounding of K as well.
        """
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

    def warn_of_work(self, n: int, outputs: int) -> None:
        """Say beforehand that the kernel of n rows takes very many backward passes, and what takes fewer."""
        tiles = -(-n * outputs * self._size // _HELD)
        passes = n * outputs * (tiles + (tiles > 1))
        if passes > _MANY:
            warnings.warn(
                f"{self._size:,} weights lie outside Linear layers and are differentiated row by row: about {passes:,} "
                f"backward passes for {n} rows of {outputs} outputs; a smaller most_rows, the last layers (layers=2) "
                "or the head (layers=1) take fewer",
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
            parts.append(torch.einsum("nko,nd->kod", slopes, _with_bias(factors)))
        if self._explicit:
            with eval_mode(self.net), torch.inference_mode(False), torch.enable_grad():
                weights = self._weights
                wanted = [weights[f"net.{name}"] for name in self._explicit]
                z = self._outputs(_own(rows.x), weights)[:, : rows.outputs]
                columns = [
                    torch.autograd.grad((z * column.to(z)).sum(), wanted, retain_graph=True, materialize_grads=True)
                    for column in coefficients.unbind(-1)
                ]
            parts += [torch.stack(part) for part in zip(*columns, strict=True)]
        return parts

    def push(self, rows: JacobianRows, directions: Sequence[Tensor]) -> Tensor:
        """J u for K directions of the weights, in parts as `pull` gives them: (N, C, K)."""
        num = len(directions[0])
        total = rows.z.new_zeros(len(rows.z), rows.outputs, num)
        for factors, part in zip(rows.factors, directions, strict=False):
            moved = _with_bias(factors) @ part.to(factors.a).flatten(0, 1).T  # (N, K·O)
            total += factors.d @ moved.view(len(moved), num, -1).mT
        if self._explicit:
            others = [part.to(rows.z) for part in directions[len(rows.factors) :]]
            attention = sdpa_kernel(SDPBackend.MATH)  # the faster ones have no second derivative
            with attention, eval_mode(self.net), torch.inference_mode(False), torch.enable_grad():
                weights = self._weights
                wanted = [weights[f"net.{name}"] for name in self._explicit]
                z = self._outputs(_own(rows.x), weights)[:, : rows.outputs]
                v = torch.zeros_like(z, requires_grad=True)
                slopes = torch.autograd.grad(z, wanted, v, create_graph=True, materialize_grads=True)  # Jᵀ v
                columns = [
                    torch.autograd.grad(slopes, v, [part[k] for part in others], retain_graph=True)[0]  # its slope by v
                    for k in range(num)
                ]
            total += torch.stack(columns, -1)
        return total

    def squares(self, rows: JacobianRows) -> Tensor:
        """‖d‖² aⱼ²: what the weights of each unit j that enters a Linear layer add to K(x, x): (N, C, Q).

        Layer after layer, the bias last; layers that J has row by row are left out.
        """
        parts = [f.d.square().sum(-1, keepdim=True) * _with_bias(f).square()[:, None] for f in rows.factors]
        return torch.cat(parts, -1) if parts else rows.z.new_zeros(len(rows.z), rows.outputs, 0)

    def _along(self, name: str, factors: LinearFactors) -> Tensor:
        """d · (W a + b): what the layer's own weights add to J θ̂: (N, C)."""
        layer = self.net.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        with torch.no_grad():
            output = layer(factors.a)
        return torch.einsum("nco,no->nc", factors.d.double(), output.double())

    def _outputs(self, x: Any, weights: dict[str, Tensor] | None = None) -> Tensor:
        """z with a graph of its own, whatever asks for gradients in the net: (N, C)."""
        if self._company and count_rows(x) == 1:
            return self._outputs(tile_rows(x, 2), weights)[:1]
        z = extract_output(functional_call(_Called(self.net), self._weights if weights is None else weights, (x,)), x)
        z = z[:, None] if z.ndim == 1 else z
        if z.ndim != 2:
            raise ValueError(
                f"got outputs of shape {tuple(z.shape)}; expected (N, C): for pixels and tokens bootstrap the head "
                "(layers=1)"
            )
        return z

    @property
    def _size(self) -> int:
        """How many weights are differentiated row by row."""
        return sum(self.net.get_parameter(name).numel() for name in self._explicit)

    @property
    def _weights(self) -> dict[str, Tensor]:
        """The weights as leaves of a graph, with buffers that could not stand in one: a net of an inference mode."""
        buffers = {f"net.{name}": b.clone() for name, b in self.net.named_buffers() if b.is_inference()}
        numbers = {f"net.{name}": p.clone() if p.is_inference() else p for name, p in self.net.named_parameters()}
        return {**buffers, **{name: p.detach().requires_grad_() for name, p in numbers.items()}}

    def _some(self, x: Any) -> tuple[Tensor, list[LinearFactors]]:
        """Outputs, and the factors of Linear layers: a pass forward, and one backward for each output."""
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            seen[name] = (inputs[0].detach().clone(), output)
            return output.clone()  # what follows may work in place

        layers = {name: self.net.get_submodule(name) for name in self._linear}
        hooks = [module.register_forward_hook(partial(note, name)) for name, module in layers.items()]
        try:
            with eval_mode(self.net), torch.inference_mode(False), torch.enable_grad():
                z = self._outputs(_own(x))
                moving = [name for name in self._linear if seen[name][1].requires_grad and z.requires_grad]
                outputs = [seen[name][1] for name in moving]  # not those inside a no_grad, whose slopes are zero
                slopes = [
                    torch.autograd.grad(z[:, c].sum(), outputs, retain_graph=True, materialize_grads=True)
                    for c in range((self.outputs or z.shape[1]) if outputs else 0)
                ]
        finally:
            for hook in hooks:
                hook.remove()
        still = {name: z.new_zeros(len(z), self.outputs or z.shape[1], seen[name][1].shape[1]) for name in self._linear}
        d = still | {name: torch.stack([slope[k] for slope in slopes], 1) for k, name in enumerate(moving)}
        factors = [LinearFactors(seen[name][0], d[name], layers[name].bias is not None) for name in self._linear]
        return z.detach(), factors

    def _tiles(self, rows: JacobianRows) -> Iterator[tuple[int, Tensor]]:
        """The explicit part of J, some rows at a time: (first row, (rows, C, P))."""
        if rows.held:
            yield 0, rows.held[0]
            return
        n, step = len(rows.z), max(1, _HELD // (rows.outputs * self._size))
        for start in range(0, n, step):
            J = torch.stack([self._row(take_rows(rows.x, slice(i, i + 1))) for i in range(start, min(start + step, n))])
            if len(J) == n:
                rows.held.append(J)
            yield start, J

    def _row(self, x: Any) -> Tensor:
        """The explicit part of J at one input: (C, P)."""
        with eval_mode(self.net), torch.inference_mode(False), torch.enable_grad():
            weights = self._weights
            wanted = [weights[f"net.{name}"] for name in self._explicit]
            z = self._outputs(_own(x), weights)[0, : self.outputs]
            slopes = [torch.autograd.grad(one, wanted, retain_graph=True, materialize_grads=True) for one in z]
        return torch.stack([torch.cat([part.flatten() for part in slope]) for slope in slopes])


class _Called(nn.Module):
    """The net with its inputs in one piece: `functional_call` takes positions, a net may take keywords."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.training = net.training

    def forward(self, x: Any) -> Any:
        with eager_mode(self.net):  # a compiled part does not see hooks
            return call_net(self.net, x)


def _with_bias(factors: LinearFactors) -> Tensor:
    """(a, 1), or (a, 0) of a layer without a bias: (N, D + 1)."""
    return torch.nn.functional.pad(factors.a, (0, 1), value=float(factors.biased))


def _own(x: Any) -> Any:
    """The inputs without a graph, and usable in one."""
    ours: Callable[[Tensor], Tensor] = lambda tensor: tensor.detach().clone()  # noqa: E731
    if isinstance(x, Mapping):
        return {key: ours(value) for key, value in x.items()}
    return tuple(map(ours, x)) if isinstance(x, tuple | list) else ours(x)


def _called(net: nn.Module, example: Any) -> dict[str, bool]:
    """The layers with weights in the order of their last call, and which are Linear ones that see each row once.

    Weights of a module that holds layers are taken to be used before these, as tokens and positions at the input are.
    """
    found: dict[str, bool] = {}

    def begin(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        found.pop(name, None)
        found[name] = False

    def note(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        once = found.pop(name, None) is None
        matrix = bool(inputs) and isinstance(inputs[0], Tensor) and inputs[0].shape[:-1] == (count_rows(example),)
        found[name] = once and matrix and isinstance(module, nn.Linear) and is_head(module) and _is_plain(module)

    hooks = [
        module.register_forward_pre_hook(partial(begin, name))
        if _holds_layers(module)
        else module.register_forward_hook(partial(note, name))
        for name, module in net.named_modules()
        if (is_parametrized(module) or next(module.parameters(recurse=False), None) is not None)
        and "parametrizations" not in name.split(".")  # which belong to the layer that holds them
    ]
    try:
        with eval_mode(net), torch.no_grad(), eager_mode(net):
            call_net(net, _own(example))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _holds_layers(module: nn.Module) -> bool:
    """Whether a part of the module that can be called by itself has weights."""
    children = (child for name, child in module.named_children() if name != "parametrizations")
    return any(next(child.parameters(), None) is not None for child in children)


def _is_plain(layer: nn.Linear) -> bool:
    """Whether its weights are parameters, and not computed from others (pruning, weight and spectral norms)."""
    return not is_parametrized(layer) and layer._parameters.keys() == {"weight", "bias"}


def _own_names(net: nn.Module, layers: Sequence[str]) -> list[str]:
    """The names of the layers' own parameters, weight before bias."""
    return [
        f"{layer}.{name}".lstrip(".")
        for layer in layers
        for name, _ in net.get_submodule(layer).named_parameters(recurse=False)
    ]


def _uses(net: nn.Module) -> dict[int, int]:
    """How many layers hold each parameter."""
    uses: dict[int, int] = {}
    for module in net.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return uses
