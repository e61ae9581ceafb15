"""Influence bootstrap of the whole net, or of its last k layers, in kernel space.

    f_w(x) = f̂(x) + k(x, X) L (LᵀKL + λ)⁻¹ ((w − 1) ⊙ ũ),   K = J Jᵀ,   k(x, X) = J(x) Jᵀ

J is the Jacobian of the outputs by the weights at the training inputs X; L and u come from the loss
(`working_residuals`), and ũ are the residuals u corrected for leverage. The replicates are linear in w: their mean and
variance over w are exact.

The kernel matrix has (n·C)² elements. Beyond `max_kernel_rows` a random subset of m rows is used, and deviations are
scaled by √(m/n), since H and the sum of squared gradients both grow with n.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.data import Dataset

from neuboots._prng import derive_keys, draw_normal
from neuboots._validation import ArgumentError, Count, available_memory, check_memory, check_types
from neuboots.head import (
    add_output_axis,
    call_net,
    cast_inputs,
    count_rows,
    eager_mode,
    eval_mode,
    is_head,
    load_example,
    row_slices,
    sample_rows,
    take_rows,
    tile_rows,
)
from neuboots.loading import check_length, select_examples
from neuboots.losses import GaussianNLL, Loss, valid_mask, weighted_mean
from neuboots.methods._base import (
    describe_tensors,
    fingerprint_tensors,
    functional_output,
    iterate_batches,
    make_tensors,
)
from neuboots.methods._least_squares import (
    POWERS,
    InfluencePredictor,
    NoiseLevel,
    choose_ridge,
    leverage_corrected,
    pointwise_losses,
    residual_variance_factor,
    ridge_inverse,
    working_residuals,
)
from neuboots.methods.influence._head import check_num_blocks
from neuboots.methods.neuboots import draw_replicate_weights
from neuboots.prediction import Moments, SampleStream, num_bytes
from neuboots.training import FitInputs, progress_bar
from neuboots.weights import assign_blocks

if TYPE_CHECKING:
    from neuboots.methods.influence import InfluenceBootstrap

Layers = int | Literal["all"]
_CHUNK_ELEMENTS = 1 << 24  # of k(x, X)
_MAX_STORED_ELEMENTS = 1 << 26  # of the deviations of all inputs; beyond: computed again
_MAX_TILE_ELEMENTS = 1 << 28  # of explicit rows of J that are held; beyond: computed again
_COLUMNS = 1 << 12  # of explicit rows of J that are multiplied at once
_BATCH_ROWS = 256
_MAX_HELD_OUT = 512  # rows × outputs of held-out data whose errors have a joint likelihood
_MIN_FREE = 1e-9  # mean variance that the rows leave, relative to that before them
_MAX_LOGIT, _NUM_RATIOS = 7.0, 141  # fractions of τ²C in the variance over which is integrated
_MAX_OUTSIDE = 0.5  # of the range of a feature in the training data
_NUM_DRAWS = 64  # of outputs of held-out rows of a classifier
_MANY_PASSES, _MAX_PASSES = 30_000, 3_000_000  # backward passes that are worth a warning, and that are refused


# -- the Jacobian --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearFactors:
    """One Linear layer at N inputs.

    Attributes:
        a: Its inputs, and 1 as last column, or 0 if it has no bias: (N, D + 1).
        d: Its slopes for each output of the net: (N, C, O).
    """

    a: Tensor
    d: Tensor


@dataclass(frozen=True)
class JacobianRows:
    """J at N inputs.

    Attributes:
        x: The inputs.
        z: All outputs of the net: (N, ·).
        outputs: C, the number of leading outputs that are differentiated.
        factors: Of each Linear layer.
        stored: The explicit part (N, C, P), once it was computed, if it is small.
    """

    x: Any
    z: Tensor
    outputs: int
    factors: tuple[LinearFactors, ...]
    stored: list[Tensor] = field(default_factory=list)


class Jacobian:
    """J of a net by the weights of its last layers. The net is not changed.

    For a Linear layer with input a and slope d = ∂z/∂(its output), a row of J is d ⊗ (a, 1), so that

        K(x, x′) = J(x) J(x′)ᵀ = Σ_layers (aᵀa′ + 1) dᵀd′

    needs no row of J itself. Other layers (convolutions, norms, a layer that is used twice, a Linear whose weights are
    computed from others) are differentiated row by row ("explicit" below). Jacot, Gabriel and Hongler, Neural tangent
    kernel: convergence and generalization in neural networks, NeurIPS 2018.

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
        self.on_row: Callable[[], object] = lambda: None  # called after each explicit row
        try:
            with _gradients(net):
                self._forward(take_rows(example, slice(1)))
        except (RuntimeError, ValueError, IndexError):
            self._needs_two_rows = True  # it squeezes the axis of a single row away before a layer that needs it
        called = _find_layers(net, example)
        chosen = list(called) if layers == "all" else list(called)[-layers:]
        modules = dict(net.named_modules())
        names = {id(parameter): name for name, parameter in net.named_parameters()}
        self._explicit: list[str] = []
        self._linear = [name for name in chosen if called[name]]
        self._linear = self._verify_factors(example, names)
        # of the net, some may be used without a call of their layer
        wanted = net.parameters() if layers == "all" else [p for name in chosen for p in modules[name].parameters()]
        covered = {id(p) for name in self._linear for p in modules[name].parameters()}
        self._explicit = list(dict.fromkeys(names[id(p)] for p in wanted if id(p) not in covered))
        self._explicit_size = sum(net.get_parameter(name).numel() for name in self._explicit)  # P
        self._max_tile = min(_MAX_TILE_ELEMENTS, available_memory() // 32)  # three of them in 3/8 of the memory
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
            total += torch.cat([_multiply(tile, theta[None])[:, :, 0] for _, tile in self._tiles(rows)])
        return total

    def kernel(self, rows: JacobianRows, others: JacobianRows) -> Tensor:
        """K = J J′ᵀ in double precision, the C outputs of a row next to each other: (N·C, N′·C)."""
        total = rows.z.new_zeros(len(rows.z), rows.outputs, len(others.z), others.outputs, dtype=torch.float64)
        for factors, their in zip(rows.factors, others.factors, strict=True):
            inputs = factors.a.double() @ their.a.double().T
            slopes = factors.d.double() @ their.d.double().flatten(0, 1).T
            total += slopes.view_as(total) * inputs[:, None, :, None]  # (aᵀa′ + 1) dᵀd′
        for start, mine in self._tiles(rows) if self._explicit else ():
            symmetric = rows is others
            following = self._tiles(others, start + len(mine) if symmetric else 0)
            for other, theirs in chain([(start, mine)] if symmetric else [], following):
                part = _multiply(mine, theirs.flatten(0, 1)).view(*mine.shape[:2], *theirs.shape[:2])
                here, there = slice(start, start + len(mine)), slice(other, other + len(theirs))
                total[here, :, there] += part
                if symmetric and other > start:
                    total[there, :, here] += part.permute(2, 3, 0, 1)
        return total.flatten(2).flatten(0, 1)

    def count_passes(self, n: int, outputs: int) -> int:
        """How many explicit rows are computed for the kernel of n rows: more than n if not all of them are held."""
        return sum(range(n, 0, -self._tile_rows(outputs))) if self._explicit else 0

    def check_cost(self, layers: Layers, n: int, outputs: int) -> None:
        """Warn if the kernel of n rows takes very many backward passes; raise ArgumentError if too many, or memory."""
        hint = "use a smaller max_kernel_rows, layers=2 or layers=1"
        check_memory("layers", layers, 2 * 4 * outputs * self._explicit_size, hint=hint)  # of a single row
        passes = outputs * self.count_passes(n, outputs)
        needed = (
            f"{self._explicit_size:,} weights outside of Linear layers need about {passes:,} backward passes for "
            f"{n} rows of {outputs} outputs"
        )
        if passes > _MAX_PASSES:
            raise ArgumentError("layers", layers, f"at most {_MAX_PASSES:,} backward passes; {needed}", hint=hint)
        if passes > _MANY_PASSES:
            warnings.warn(f"{needed}; {hint}", stacklevel=3)

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
            total += factors.d @ moved.view(len(moved), num, part.shape[1]).mT
        if self._explicit:
            with sdpa_kernel(SDPBackend.MATH), _gradients(self.net):  # faster kernels have no second derivative
                z, wanted = self._forward(rows.x, self._explicit)
                z = z[:, : rows.outputs]
                v = torch.zeros_like(z, requires_grad=True)
                slopes = torch.autograd.grad(z, wanted, v, create_graph=True, materialize_grads=True)  # Jᵀ v
                for k in range(num):
                    along = [part[k] for part in directions[len(rows.factors) :]]
                    total[..., k] += torch.autograd.grad(slopes, v, along, retain_graph=True, materialize_grads=True)[0]
        return total

    def squares(self, rows: JacobianRows) -> Tensor:
        """‖d‖² aⱼ², the part of K(x, x) of the weights of each unit j that enters a Linear layer: (N, C, Q).

        Layer after layer, the bias last, without the explicit part.
        """
        parts = [f.d.square().sum(-1, keepdim=True) * f.a.square()[:, None] for f in rows.factors]
        return torch.cat([rows.z.new_zeros(len(rows.z), rows.outputs, 0), *parts], -1)

    def diagonal(self, rows: JacobianRows) -> Tensor:
        """k(x, x) of each output in double precision, without those of two outputs: (N, C)."""
        total = self.squares(rows).double().sum(-1)
        for start, tile in self._tiles(rows) if self._explicit else ():
            total[start : start + len(tile)] += tile.double().square().sum(-1)
        return total

    def direction_elements(self, rows: JacobianRows) -> int:
        """How many numbers the product with a direction needs: its weights, or the outputs of the widest layer."""
        sizes = [factors.a.shape[1] * factors.d.shape[2] for factors in rows.factors]
        outputs = [len(rows.z) * factors.d.shape[2] for factors in rows.factors]
        return max([sum(sizes) + self._explicit_size, *outputs])

    def draw_directions(self, rows: JacobianRows, keys: Tensor) -> list[Tensor]:
        """Directions of the weights z ~ N(0, 1) for B keys, in parts as `pull` gives them: (B, O, D + 1), or (B, *)."""
        shapes: list[Sequence[int]] = [(factors.d.shape[2], factors.a.shape[1]) for factors in rows.factors]
        shapes += [self.net.get_parameter(name).shape for name in self._explicit]
        sizes = [math.prod(shape) for shape in shapes]
        drawn = torch.split(draw_normal(keys, sum(sizes)).to(rows.z), sizes, 1)
        return [part.view(len(keys), *shape) for part, shape in zip(drawn, shapes, strict=True)]

    def _verify_factors(self, example: Any, names: dict[int, str]) -> list[str]:
        """The Linear layers whose factors give their gradient: weights may also be used elsewhere."""
        rows = self.rows(example)
        c = torch.randn(len(rows.z), rows.outputs, 1, generator=torch.Generator().manual_seed(0))
        layers = {name: self.net.get_submodule(name) for name in self._linear}
        exact = iter(self._pull_explicit(example, c, [names[id(p)] for x in layers.values() for p in x.parameters()]))
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
        x = tree_map_only(Tensor, torch.clone, x)  # a net may write into its inputs
        # tensors that were made in inference mode cannot be part of a graph
        buffers = {name: b.clone() for name, b in self.net.named_buffers() if b.is_inference()}
        weights = {
            name: (p.clone() if p.is_inference() else p.detach()).requires_grad_()
            for name, p in self.net.named_parameters()
        }
        with eager_mode(self.net):  # a compiled part ignores hooks
            z = add_output_axis(functional_output(self.net, {**buffers, **weights}, x))
        if z.ndim != 2:
            raise ValueError(
                f"the net's outputs have shape {tuple(z.shape)}; expected (N, C): for pixels and tokens use layers=1"
            )
        z.requires_grad_()  # also if the net computes under no_grad: then its gradient is zero
        return z[:1] if n == 1 else z, [weights[name] for name in names]

    def _compute_factors(self, x: Any) -> tuple[Tensor, list[LinearFactors]]:
        """Outputs and factors of Linear layers: a forward pass, and a backward pass for each output."""
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def record(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            ones = float(module.bias is not None)
            seen[name] = (nn.functional.pad(inputs[0].detach(), (0, 1), value=ones), output.requires_grad_())
            return output.clone()  # the next layer may work in place

        with ExitStack() as hooks, _gradients(self.net):
            for name in self._linear:
                hooks.enter_context(self.net.get_submodule(name).register_forward_hook(partial(record, name)))
            z, _ = self._forward(x)
            outputs = [seen[name][1] for name in self._linear]
            slopes = [
                torch.autograd.grad(z[:, c].sum(), outputs, retain_graph=True, materialize_grads=True)
                for c in range((self.outputs or z.shape[1]) if outputs else 0)
            ]
        d = [torch.stack(part, 1) for part in zip(*slopes, strict=True)]
        return z.detach(), [LinearFactors(seen[name][0], part) for name, part in zip(self._linear, d, strict=True)]

    def _tile_rows(self, outputs: int) -> int:
        """How many explicit rows are held at once."""
        return max(1, self._max_tile // (outputs * self._explicit_size))

    def _tiles(self, rows: JacobianRows, first: int = 0) -> Iterator[tuple[int, Tensor]]:
        """The explicit part of J from a row on, as many rows at a time as can be held: (first row, (rows, C, P))."""
        n, limit = len(rows.z), self._tile_rows(rows.outputs)
        for start in range(first, n, limit):
            tile = rows.stored[0] if rows.stored else self._explicit_rows(rows, start, min(start + limit, n))
            if n <= limit:
                rows.stored[:] = [tile]
            yield start, tile

    def _explicit_rows(self, rows: JacobianRows, start: int, stop: int) -> Tensor:
        """The explicit part of J at some of the rows: (rows, C, P)."""
        each, found = torch.eye(rows.outputs)[None], rows.z.new_empty(stop - start, rows.outputs, self._explicit_size)
        for i in range(start, stop):
            pulled = self._pull_explicit(take_rows(rows.x, slice(i, i + 1)), each, self._explicit)
            found[i - start] = torch.cat([part.reshape(rows.outputs, -1) for part in pulled], 1)
            self.on_row()
        return found

    def _pull_explicit(self, x: Any, coefficients: Tensor, names: Sequence[str]) -> list[Tensor]:
        """The parts of Jᵀ c of the named weights: (K, *weights) each."""
        if not names:
            return []
        with _gradients(self.net):
            z, wanted = self._forward(x, names)
            z = z[:, : coefficients.shape[1]]
            columns = [
                torch.autograd.grad(z, wanted, column.to(z), retain_graph=True, materialize_grads=True)
                for column in coefficients.unbind(-1)
            ]
        return [torch.stack(part) for part in zip(*columns, strict=True)]


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Product with a transposed matrix in double precision, some columns at a time."""
    total = left.new_zeros(*left.shape[:-1], len(right), dtype=torch.float64)
    for mine, theirs in zip(torch.split(left, _COLUMNS, -1), torch.split(right, _COLUMNS, 1), strict=True):
        total += mine.double() @ theirs.double().T
    return total


@contextmanager
def _gradients(net: nn.Module) -> Iterator[None]:
    """Evaluation mode with gradients, whatever the caller's mode."""
    with eval_mode(net), torch.inference_mode(False), torch.enable_grad():
        yield


def _find_layers(net: nn.Module, example: Any) -> dict[str, bool]:
    """Layers with weights in the order of their last call; true for plain Linear layers that see rows (N, D) once.

    Weights of a module that holds layers count as used before these, as tokens and positions at the input are.
    """
    found: dict[str, bool] = {}
    holders = Counter(id(p) for module in net.modules() for p in module.parameters(recurse=False))

    def enter(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        found.pop(name, None)
        found[name] = False

    def leave(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        once = found.pop(name, None) is None and all(holders[id(p)] == 1 for p in module.parameters(recurse=False))
        # neither pruning nor weight or spectral norms, which compute the weights from other parameters
        plain = module._parameters.keys() == {"weight", "bias"} and isinstance(module, nn.Linear) and is_head(module)
        found[name] = once and plain and bool(inputs) and inputs[0].shape[:-1] == (count_rows(example),)

    with ExitStack() as hooks, eval_mode(net), torch.no_grad(), eager_mode(net):
        for name, module in net.named_modules():
            own_weights = is_parametrized(module) or any(True for _ in module.parameters(recurse=False))
            if not own_weights or "parametrizations" in name.split("."):  # which belong to the layer that holds them
                continue
            if any(True for part in module.children() for _ in part.parameters()):  # it holds layers
                hooks.enter_context(module.register_forward_pre_hook(partial(enter, name)))
            else:
                hooks.enter_context(module.register_forward_hook(partial(leave, name)))
        call_net(net, tree_map_only(Tensor, torch.clone, example))
    return found


# -- the predictor -------------------------------------------------------------------------------------


class TangentModel(nn.Module):
    """What prediction needs: the net, the training inputs, and the linear model in its eigenbasis.

    Args:
        net: The trained net.
        layers: Number of last layers that are bootstrapped, or "all".
        outputs: Number of leading outputs that are bootstrapped.
        structure: Structure of the inputs, as `_take_apart` returns it.
        tensors: `basis`, L V: (n·C, r), `influence`, (W + λ)⁻¹ Vᵀ ũ by block: (r, S), and the training inputs; with a
            prior also `prior`, τ: (C,), and `inverted`, (W + λ)⁻¹, and `shrink`, (W + 2λ)(W + λ)⁻²: (r,).
    """

    input_0: Tensor
    basis: Tensor
    influence: Tensor
    prior: Tensor
    inverted: Tensor
    shrink: Tensor

    def __init__(
        self, net: nn.Module, layers: Layers, outputs: int, structure: Any, tensors: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self.net, self.layers, self.outputs, self.structure = net, layers, outputs, structure
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self._cache: tuple[bytes, Jacobian, JacobianRows] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": None}

    @property
    def has_prior(self) -> bool:
        """Whether replicates also differ in directions that the data do not determine."""
        return "prior" in self._buffers

    def jacobian(self) -> tuple[Jacobian, JacobianRows]:
        """J, and its rows at the training inputs; cached until a weight, the precision or the device changes."""
        inputs = [tensor for name, tensor in self.named_buffers() if name.startswith("input_")]
        states = [value for value in self.net.state_dict().values() if isinstance(value, Tensor)]
        key = fingerprint_tensors([*states, *inputs])
        if self._cache is None or self._cache[0] != key:
            x = cast_inputs(self.net, _put_together(self.structure, iter(inputs)))
            jacobian = Jacobian(self.net, self.layers, sample_rows(x), outputs=self.outputs)
            self._cache = key, jacobian, jacobian.rows(x)
        return self._cache[1:]


class _Chunk(NamedTuple):
    """Some inputs of a prediction: J, and k(x, X) L V in double precision: (N·C, r)."""

    rows: JacobianRows
    along: Tensor


@dataclass(frozen=True)
class TangentPredictor(InfluencePredictor):
    """Replicates of the net's outputs, from its Jacobian at x and at the training inputs, which are stored.

    With a Gaussian head (`GaussianNLL`) the means are bootstrapped; log σ² is that of the net in every replicate.

    Attributes:
        tangent: The net, the training inputs and the influence of each block.
    """

    form: ClassVar[str] = "tangent"
    tangent: TangentModel

    @property
    def net(self) -> nn.Module:
        return self.tangent.net

    @property
    def module(self) -> nn.Module:
        return self.tangent

    @property
    def num_blocks(self) -> int:
        return self.tangent.influence.shape[1]

    @property
    def num_rows(self) -> int:
        """m, the number of training rows of the kernel."""
        return len(self.tangent.basis) // self.tangent.jacobian()[1].outputs

    def deviations(self, x: Any) -> tuple[Tensor, Tensor]:
        """f̂(x), (N, C), and by how much a unit of each block's weight moves it: (N, C, S)."""
        outputs, moved = zip(*((chunk.rows.z, self._moved(chunk)) for chunk in self._chunks(x)), strict=True)
        return torch.cat(outputs), torch.cat(moved)

    def _chunks(self, x: Any) -> Iterator[_Chunk]:
        """Some inputs at a time."""
        tangent = self.tangent
        jacobian, train = tangent.jacobian()
        for chunk in row_slices(count_rows(x), _CHUNK_ELEMENTS // (train.outputs**2 * len(train.z))):
            rows = jacobian.rows(take_rows(x, chunk))
            kernel = jacobian.kernel(rows, train)
            yield _Chunk(rows, kernel @ tangent.basis.to(kernel))

    def _moved(self, chunk: _Chunk) -> Tensor:
        """By how much a unit of each block's weight moves the outputs: (N, C, S)."""
        rows, along = chunk
        part = (along @ self.tangent.influence.to(along)).to(rows.z)
        return part.view(len(rows.z), rows.outputs, part.shape[1])

    def _std(self, chunk: _Chunk, moved: Tensor) -> Tensor:
        """Standard deviation of the replicates, zero for outputs that are not bootstrapped: like the outputs (N, ·)."""
        tangent, (rows, along) = self.tangent, chunk
        v, c = self.weight_distribution.covariance(moved.shape[2])
        variance = (v - c) * moved.square().sum(-1) + c * moved.sum(-1).square()  # (N, C)
        if tangent.has_prior:
            left = tangent.jacobian()[0].diagonal(rows) - (along.square() @ tangent.shrink.to(along)).view_as(variance)
            variance = variance + left * tangent.prior.square()
        std = torch.zeros_like(rows.z)
        std[:, : rows.outputs] = variance.clamp_min(0.0).sqrt()
        return std

    def _draw_prior(self, start: int, stop: int, seed: int) -> tuple[list[Tensor], Tensor]:
        """Directions z ~ N(0, 1) of the weights, and (W + λ)⁻¹ VᵀLᵀ J(X) z: (r, B)."""
        tangent, (jacobian, train) = self.tangent, self.tangent.jacobian()
        directions = jacobian.draw_directions(train, derive_keys(torch.arange(start, stop), seed, "prior"))
        pushed = jacobian.push(train, directions).to(tangent.basis.dtype).flatten(0, 1)
        return directions, tangent.inverted[:, None] * (tangent.basis.T @ pushed)

    def _warn_if_outside(self, x: Any) -> None:
        """Warn if rows of features are far outside of the training inputs."""
        known = self.tangent.input_0
        if isinstance(x, Tensor) and x.ndim == 2 == known.ndim and known.is_floating_point() and len(x):
            low, high = known.amin(0), known.amax(0)
            margin = _MAX_OUTSIDE * (high - low).where(high > low, math.inf)  # of a constant feature: unknown
            if bool(((x < low - margin) | (x > high + margin)).any()):
                warnings.warn(
                    f"some inputs are outside of the range of the training inputs, by more than {_MAX_OUTSIDE:.0%} of "
                    "it: the data say nothing about the function there, and no confidence band is reliable",
                    stacklevel=6,
                )

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        x = cast_inputs(self.net, x)
        self._warn_if_outside(x)
        tangent = self.tangent
        blocks, rank = tangent.influence.shape[1], tangent.influence.shape[0] * tangent.has_prior
        jacobian, train = tangent.jacobian()
        elements = count_rows(x) * (blocks + rank) * train.outputs
        Part = tuple[_Chunk, Tensor]

        def parts() -> Iterator[Part]:
            return ((chunk, self._moved(chunk)) for chunk in self._chunks(x))

        stored = [*parts()] if elements <= _MAX_STORED_ELEMENTS else None  # beyond that: computed again

        def samples(start: int, stop: int) -> Iterator[Tensor]:
            alphas = draw_replicate_weights(self.weight_distribution, blocks, start, stop, seed) - 1.0
            directions, solved = self._draw_prior(start, stop, seed) if tangent.has_prior else ([], None)
            for (rows, along), moved in stored or parts():
                replicates = rows.z.repeat(stop - start, 1, 1)  # (B, N, ·)
                change = moved @ alphas.to(moved).T  # (N, C, B)
                if solved is not None:
                    free = jacobian.push(rows, directions) - (along @ solved.to(along)).view_as(change)
                    change = change + tangent.prior[:, None] * free
                replicates[:, :, : rows.outputs] += change.movedim(-1, 0)
                yield replicates

        def chunks(size: int) -> Iterator[Tensor]:
            # one pass over all inputs serves as many replicates as memory allows
            group = size if stored else size * max(1, _MAX_STORED_ELEMENTS // (2 * size * (elements // blocks)))
            if tangent.has_prior:
                group = min(group, max(1, _MAX_STORED_ELEMENTS // jacobian.direction_elements(train)))
            for start in range(0, num_samples, group):
                stop = min(start + group, num_samples)
                yield from torch.split(torch.cat([*samples(start, stop)], 1), size)  # (group, N, C)

        moments = ((chunk.rows.z, self._std(chunk, moved)) for chunk, moved in stored or parts())
        output, std = (torch.cat(part) for part in zip(*moments, strict=True))
        return SampleStream(num_samples, 2 * num_bytes(output) + 8 * blocks, chunks, Moments(output, std))

    def config(self) -> dict[str, Any]:
        tangent = self.tangent
        return {
            **super().config(),
            "layers": tangent.layers,
            "outputs": tangent.outputs,
            "inputs": tangent.structure,
            "tensors": describe_tensors(dict(tangent.named_buffers(recurse=False))),
        }

    @classmethod
    def _rebuild(cls, config: dict[str, Any], net: nn.Module) -> TangentModel:
        types = {
            "layers": Count | Literal["all"],
            "outputs": Count,
            "inputs": dict | None,
            "tensors": dict[str, list[Any]],
        }
        check_types("predictor", config, types)
        structure, outputs, tensors = config["inputs"], config["outputs"], make_tensors(config["tensors"])
        inputs = [f"input_{k}" for k in range(_count_leaves(structure))]
        prior = ["prior", "inverted", "shrink"] if "prior" in tensors else []
        if tensors.keys() != {"basis", "influence", *inputs, *prior}:
            raise ValueError("its tensors are not those of its inputs")
        n, rank = len(tensors["input_0"]), len(tensors["influence"])
        expected = {"basis": (n * outputs, rank), "prior": (outputs,), "inverted": (rank,), "shrink": (rank,)}
        if any(len(tensors[name]) != n for name in inputs) or any(
            tuple(tensors[name].shape) != expected[name] for name in ("basis", *prior)
        ):
            raise ValueError("its tensors have shapes that do not fit each other")
        return TangentModel(net, config["layers"], outputs, structure, tensors)


def _take_apart(x: Any, leaves: list[Tensor]) -> Any:
    """Structure of inputs as JSON, None for a tensor, which is appended to the leaves.

    >>> _take_apart({"a": torch.zeros(1), "b": [torch.ones(1)]}, [])
    {'dict': {'a': None, 'b': {'list': [None]}}}
    """
    if isinstance(x, Tensor):
        leaves.append(x)
        return None
    kind: Any = type(x)
    if kind in (tuple, list):
        return {type(x).__name__: [_take_apart(part, leaves) for part in x]}
    if isinstance(x, dict) and all(type(key) is str for key in x):
        return {"dict": {key: _take_apart(part, leaves) for key, part in x.items()}}
    raise ArgumentError("data", f"inputs of {type(x)}", "a tensor, or a tuple, list or dict of tensors by name")


def _put_together(structure: Any, leaves: Iterator[Tensor]) -> Any:
    """Inputs of this structure."""
    if structure is None:
        return next(leaves)
    ((kind, parts),) = structure.items()
    if kind == "dict":
        return {key: _put_together(part, leaves) for key, part in parts.items()}
    values = [_put_together(part, leaves) for part in parts]
    return tuple(values) if kind == "tuple" else values


def _count_leaves(structure: Any) -> int:
    """Number of tensors of a structure that was stored; raise ValueError if it is none."""
    if structure is None:
        return 1
    kinds: dict[str, Any] = {"tuple": list, "list": list, "dict": dict}
    if isinstance(structure, dict) and len(structure) == 1:
        ((kind, parts),) = structure.items()
        if kind in kinds and type(parts) is kinds[kind] and parts:
            return sum(map(_count_leaves, parts.values() if kind == "dict" else parts))
    raise ValueError("its inputs have a structure of an unknown kind")


# -- setup ---------------------------------------------------------------------------------------------


def check_tangent(method: "InfluenceBootstrap", net: nn.Module, inputs: FitInputs) -> int:
    """Number of outputs that are bootstrapped; raise if this net, trained or not, cannot be bootstrapped."""
    if (n := check_length(inputs.data)) == 1:
        raise ArgumentError("data", "a single row", "at least two rows")
    example = load_example(net, inputs.data, seed=inputs.config.seed)
    jacobian = Jacobian(net, method.layers, example)
    z = jacobian.rows(example).z
    outputs = z.shape[1] // 2 if isinstance(method.loss, GaussianNLL) else z.shape[1]
    if method.max_kernel_rows < 2 * outputs:
        expected = f"at least {2 * outputs}, for two rows of {outputs} outputs"
        raise ArgumentError("max_kernel_rows", method.max_kernel_rows, expected)
    size = min(n * outputs, method.max_kernel_rows)
    check_memory("max_kernel_rows", method.max_kernel_rows, 6 * 8 * size**2, hint="use a smaller one")  # of K, V and L
    check_num_blocks(method.num_blocks, n, size)
    jacobian.check_cost(method.layers, size // outputs, outputs)
    return outputs


class HeldOut(NamedTuple):
    """A net, the data that it was trained on, and data that it was not trained on, of the same distribution."""

    net: nn.Module
    data: Dataset[Any]
    held_out: Dataset[Any]
    numbers: Tensor | None = None  # of the held-out rows in the training data of the method


class _LinearModel:
    """The linear model of a trained net at m of its training rows: LᵀKL = V W Vᵀ, and the ridge λ.

    It predicts y = f(x) + noise with f ~ f̂ + τ · GP(0, k) and whitened noise of variance s². Of its error at x, x′

        E(x, x′) = τ² [k(x, x′) − q(x)ᵀ (W + 2λ)(W + λ)⁻² q(x′)] + s² q(x)ᵀ (W + λ)⁻² q(x′),   q(x) = VᵀLᵀ k(X, x)

    the first part is what the rows do not determine, and the bias; the second is their noise.
    """

    def __init__(
        self, method: "InfluenceBootstrap", net: nn.Module, inputs: FitInputs, outputs: int, *, weighted: bool = False
    ) -> None:
        self.net, self.loss = net, method.loss
        self.x, y, self.index, self.fraction = _read_rows(inputs, method.max_kernel_rows // outputs)
        self.jacobian = Jacobian(net, method.layers, sample_rows(cast_inputs(net, self.x)), outputs=outputs)
        self.rows = rows = self.jacobian.rows(cast_inputs(net, self.x))
        n = len(rows.z)
        self.y, weight = (y[:, :-1], y[:, -1:]) if weighted else (y, torch.ones(n, 1))
        root, self.residual, self.num_valid = _working_residuals(method.loss, rows, self.y)
        self.scale = weight.to(self.residual).sqrt()
        self.root = root * self.scale[:, :, None]  # w ℓ has the curvature w Λ and the gradient w ∂ℓ/∂z
        passes = self.jacobian.count_passes(n, outputs)
        with progress_bar("Jacobian", passes, enabled=inputs.config.progress and bool(passes)) as advance:
            self.jacobian.on_row = partial(advance, "Jacobian")
            kernel = self.jacobian.kernel(rows, rows)
        self.magnitude = float(kernel.diagonal().mean())  # of k(x, x)
        kernel = torch.einsum("ned,nemf->ndmf", self.root, kernel.view(n, outputs, n, outputs))
        kernel = torch.einsum("ndmf,mfg->ndmg", kernel, self.root).reshape(n * outputs, n * outputs)
        values, vectors = torch.linalg.eigh(kernel)
        values = values.clamp_min(0.0)
        if method.ridge is None:
            target = torch.einsum("ned,ne->nd", self.root, self.jacobian.along(rows)) + self.residual * self.scale
            squares, size = (vectors.T @ target.flatten()).square(), float((self.residual * self.scale).square().sum())
            softmax = isinstance(method.loss, nn.CrossEntropyLoss)  # one degree of freedom less
            self.ridge = choose_ridge(values, squares, 0.0, self.num_valid * (outputs - softmax), residual=size)
        else:
            self.ridge = self.num_valid * float(method.ridge)
        inverted = ridge_inverse(values, self.ridge)
        self.degrees_of_freedom = float((values * inverted).sum())
        self.values, self.vectors = values, vectors
        kept = values > values[-1] * torch.finfo(values.dtype).eps * len(values)  # others are rounding
        self.kept, self.inverted = kept, inverted[kept]
        self.shrink = self.inverted * (1.0 + self.ridge * self.inverted)  # (W + 2λ)(W + λ)⁻²
        self.basis = (self.root @ vectors.view(n, outputs, -1)).flatten(0, 1)[:, kept]

    def error_covariance(self, rows: JacobianRows) -> tuple[Tensor, Tensor]:
        """The covariances of the error at M inputs for τ = 1 and for s = 1: (M·C, M·C) each."""
        q = self.jacobian.kernel(rows, self.rows) @ self.basis
        free = self.jacobian.kernel(rows, rows) - (q * self.shrink) @ q.T
        return free, self.fraction * (q * self.inverted.square()) @ q.T

    def influence(self, residual: Tensor) -> Tensor:
        """(W + λ)⁻¹ Vᵀ ũ by row, for corrected residuals ũ (n, C): (r, n)."""
        n, outputs = residual.shape
        along = torch.einsum("nek,ne->kn", self.vectors.view(n, outputs, -1), residual * self.scale)
        influence: Tensor = self.fraction**0.5 * self.inverted[:, None] * along[self.kept]
        return influence


def build_tangent_predictors(
    methods: Sequence["InfluenceBootstrap"],
    net: nn.Module,
    inputs: FitInputs,
    *,
    held_out: Sequence[HeldOut] = (),
    weighted: bool = False,
) -> list[TangentPredictor]:
    """The influence bootstrap of the last layers of a trained net, from the data it was trained on.

    The methods differ in residuals, weight distribution and blocks only: LᵀKL = V W Vᵀ is decomposed once. With
    `weighted` the last column of the targets (N, k + 1) is the factor of the row's loss. Rows that are held out from
    this net, or from others that were trained on parts of the data, decide on τ and on the level of the noise.
    """
    method = methods[0]
    outputs = check_tangent(method, net, inputs)
    model = _LinearModel(method, net, inputs, outputs, weighted=weighted)
    n = len(model.rows.z)
    leaves: list[Tensor] = []
    structure = _take_apart(model.x, leaves)
    stored = {f"input_{k}": leaf for k, leaf in enumerate(leaves)}
    errors = _fit_errors(method, model, held_out, inputs, weighted=weighted) if held_out else None
    if errors is not None:
        prior = (errors.prior / model.magnitude).sqrt()
        stored |= {"prior": prior, "inverted": model.inverted, "shrink": model.shrink}
    psi = model.vectors * model.values.sqrt()
    predictors = []
    for each in methods:
        # the noise is that of the targets, whatever the factor of a row's loss
        residual, fraction = model.residual, model.fraction
        if errors is not None and errors.residual is not None:
            residual, fraction = errors.residual, 0.0  # no row has leverage on a net that it is held out from
        corrected = _correct_residuals(each.correction, residual, psi, model.values, model.ridge, fraction)
        if errors is not None and errors.noise is not None:
            level = corrected.square().mean(0).clamp_min(1e-300)
            corrected = corrected * (errors.noise / level).sqrt()
        influence = model.influence(corrected)
        if each.num_blocks is not None:
            # not stratified by y: blocks of the same mixture have the same sum of residuals, and no spread
            blocks = assign_blocks(n, each.num_blocks, seed=inputs.config.seed).to(influence.device)
            influence = influence.new_zeros(len(influence), each.num_blocks).index_add_(1, blocks, influence)
        tensors = {"basis": model.basis, "influence": influence, **stored}
        tangent = TangentModel(net, method.layers, outputs, structure, tensors)
        ridge = model.ridge / model.num_valid
        predictors.append(TangentPredictor(each.weight_distribution, ridge, model.degrees_of_freedom, tangent))
    return predictors


# -- errors at held-out rows ---------------------------------------------------------------------------


class _Errors(NamedTuple):
    """What held-out rows say about the error of the net.

    Attributes:
        prior: τ², relative to the mean of k(x, x): (C,).
        noise: s², of whitened noise: (C,); None for classes, whose noise is that of their probabilities.
        residual: Whitened residuals of the rows of the kernel, each of a net that was not trained on it: (n, C), or
            None.
    """

    prior: Tensor
    noise: Tensor | None = None
    residual: Tensor | None = None


def _fit_errors(
    method: "InfluenceBootstrap",
    model: _LinearModel,
    held_out: Sequence[HeldOut],
    inputs: FitInputs,
    *,
    weighted: bool,
) -> _Errors:
    """Find τ and s from the errors at held-out rows."""
    outputs, residual = model.rows.outputs, torch.full_like(model.residual, torch.nan)
    errors: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in range(outputs)]
    classes: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for net, data, held, numbers in held_out:
        part = model
        if net is not model.net:
            part = _LinearModel(method, net, replace(inputs, data=data), outputs, weighted=weighted)
        if numbers is not None:  # of all rows of the kernel that this net has not seen
            mine = torch.isin(model.index, numbers)
            rows = part.jacobian.rows(cast_inputs(net, tree_map(lambda leaf: leaf[mine], model.x)))  # noqa: B023
            residual[mine] = _working_residuals(model.loss, rows, model.y[mine])[1]
        x, y, *_ = _read_rows(replace(inputs, data=held), max(2, _MAX_HELD_OUT // outputs))
        y = y[:, :-1] if weighted else y
        rows = part.jacobian.rows(cast_inputs(net, x))
        root, error, _ = _working_residuals(model.loss, rows, y)
        free, noise = part.error_covariance(rows)
        free = free / part.magnitude
        if float(free.diagonal().mean()) < _MIN_FREE:  # the rows determine the linear model up to rounding
            free = torch.zeros_like(free)
        if not _has_noise(model.loss):
            shape = len(rows.z), outputs, len(rows.z), outputs
            free, noise = (torch.einsum("mcmd->mcd", each.view(shape)) for each in (free, noise))
            classes.append((rows.z.double(), y, free, noise))
            continue
        for c, found in enumerate(errors):
            scale = root[:, c, c]  # of the noise: 1/σ(x)
            some = scale.nonzero()[:, 0]  # others are ignored
            at = outputs * some + c
            own = noise[at][:, at] + torch.diag(scale[some] ** -2)
            found.append((error[some, c] / scale[some], free[at][:, at], own))
    if not _has_noise(model.loss):
        return _Errors(torch.full((outputs,), _fit_class_prior(model.loss, classes)).to(residual))
    prior, noise = torch.tensor([fit_error_variances(found) for found in errors]).to(residual).T
    return _Errors(prior, noise, None if bool(residual.isnan().any()) else residual)


def _has_noise(loss: Loss) -> bool:
    """Whether the noise of the targets has a level of its own, as in a regression."""
    return isinstance(loss, GaussianNLL | nn.MSELoss)


def fit_error_variances(errors: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, float]:
    """The posterior means of τ² and s² for errors r ~ N(0, τ² C + s² N).

    The fraction f = τ² c / (τ² c + s²) of the variance that is not noise, c being the mean eigenvalue of N⁻¹ C, is
    uniform a priori, and log s² is. The most likely values would be smaller: few errors often seem to be noise alone.

    Args:
        errors: Residuals r (M,) and the covariances C and N (M, M), N positive definite, of independent sets of rows.

    Returns:
        τ² and s².

    Example:
        >>> r, rows = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64), torch.eye(3, dtype=torch.float64)
        >>> fit_error_variances([(r, 0 * rows, rows)])  # no signal: s² is the mean square
        (0.0, 2.0)
    """
    squares, eigenvalues = [], []
    for r, free, noise in errors:
        factor = torch.linalg.cholesky(noise)
        half = torch.linalg.solve_triangular(factor, free, upper=False)
        values, vectors = torch.linalg.eigh(torch.linalg.solve_triangular(factor, half.T, upper=False))
        squares.append((vectors.T @ torch.linalg.solve_triangular(factor, r[:, None], upper=False))[:, 0].square())
        eigenvalues.append(values.clamp_min(0.0))
    z, mu = torch.cat(squares), torch.cat(eigenvalues)
    scale = float(mu.mean())
    if not scale > 0.0 or not bool((z > 0.0).any()):
        return 0.0, float(z.mean())
    logit = torch.linspace(-_MAX_LOGIT, _MAX_LOGIT, _NUM_RATIOS, dtype=z.dtype)  # of f
    ratio = logit.exp() / scale  # τ²/s²
    total = 1.0 + ratio[:, None] * mu
    square = (z / total).sum(1)  # s² given the ratio has an inverse gamma distribution of M/2 and half of this
    log_posterior = -0.5 * (len(z) * square.log() + total.log().sum(1)) + (logit.sigmoid() * (-logit).sigmoid()).log()
    weight = log_posterior.softmax(0)
    noise_level = square / max(1, len(z) - 2)
    return float((weight * ratio * noise_level).sum()), float((weight * noise_level).sum())


def _fit_class_prior(loss: Loss, rows: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> float:
    """The τ² that maximizes the likelihood of held-out labels, averaged over outputs N(z, τ² C + N) of each row.

    Args:
        loss: Cross-entropy or binary cross-entropy.
        rows: Outputs z (M, C), targets, and the covariances of each row's outputs C and N (M, C, C).
    """
    z, y, free, noise = (torch.cat(parts) for parts in zip(*rows, strict=True))
    normal = draw_normal(derive_keys(torch.arange(_NUM_DRAWS // 2), 0, "classes"), z.shape[1])
    normal = torch.cat([normal, -normal]).to(z)  # (B, C)
    mask = valid_mask(loss, y)
    best, largest = 0.0, -math.inf
    for ratio in [0.0, *torch.logspace(-3.0, 3.0, 25).tolist()]:
        values, vectors = torch.linalg.eigh(ratio * free + noise)
        root = vectors * values.clamp_min(0.0).sqrt()[:, None]
        drawn = z + torch.einsum("mck,bk->bmc", root, normal)
        losses = torch.stack([pointwise_losses(loss, each, y).reshape(len(z), -1).sum(1) for each in drawn])  # (B, M)
        likelihood = torch.logsumexp(-losses, 0)
        total = float((likelihood if mask is None else likelihood[mask]).mean())
        if total > largest:
            best, largest = ratio, total
    return best


def _correct_residuals(
    correction: str, residual: Tensor, psi: Tensor, values: Tensor, ridge: float, fraction: float
) -> Tensor:
    """ũ, the residuals (n, C) corrected for leverage; Ψ = V W^½ and W are those of a fraction of the rows: (n, C)."""
    n, outputs = residual.shape
    if correction == "raw":
        return residual
    if correction in POWERS:
        psi = psi.view(n, outputs, -1)
        hat = fraction * (psi * ridge_inverse(values, ridge)) @ psi.mT  # of each row: (n, C, C)
        return leverage_corrected(hat, residual, power=POWERS[correction])
    corrected = torch.empty_like(residual)
    for c in range(outputs):  # each output has its own noise, and neighbours by its own block of the kernel
        mine = psi[c::outputs]
        own_values, own = values, mine
        if outputs > 1:
            own_values, vectors = torch.linalg.eigh(mine @ mine.T)
            own_values = own_values.clamp_min(0.0)
            own = vectors * own_values.sqrt()
        noise = NoiseLevel(own_values)
        factor = 1.0 + fraction * mine.square() @ residual_variance_factor(values, ridge)
        noise.add(own, residual[:, c], factor)
        corrected[:, c] = noise.correct(own, residual[:, c])
    return corrected


def _working_residuals(loss: Loss, rows: JacobianRows, y: Tensor) -> tuple[Tensor, Tensor, int]:
    """L and u of the outputs that are bootstrapped, zero for ignored targets, and the number of valid rows."""
    y = y.to(rows.z.device)
    losses = pointwise_losses(loss, rows.z, y)  # raises where targets do not fit
    weighted_mean(losses, losses.new_ones(len(y)))  # raises for a loss that reduces
    mask = valid_mask(loss, y)
    if mask is not None and not bool(mask.any()):
        raise ValueError("all targets are ignored; expected at least one that counts")
    root, residual, _ = working_residuals(loss, rows.z, y if mask is None else y.where(mask, 0))
    if not bool(root.any()):
        raise ArgumentError("loss", loss, "a loss with a positive second derivative in the outputs")
    if mask is not None:
        root, residual = root * mask[:, None, None], residual * mask[:, None]
    if not (bool(torch.isfinite(root).all()) and bool(torch.isfinite(residual).all())):
        raise ValueError("the losses of the trained net are NaN or infinite; expected finite outputs and targets")
    num_valid = len(y) if mask is None else int(mask.sum())
    return root[:, : rows.outputs, : rows.outputs], residual[:, : rows.outputs], num_valid


def _read_rows(inputs: FitInputs, max_rows: int) -> tuple[Any, Tensor, Tensor, float]:
    """Inputs, targets and numbers of all rows in order, or of a random subset of `max_rows`, and their fraction."""
    data, n = inputs.data, check_length(inputs.data)
    index = torch.arange(n)
    if n > max_rows:
        index = derive_keys(index, inputs.config.seed, "rows").argsort()[:max_rows].sort().values
        data = select_examples(data, index.tolist())
    batches = list(iterate_batches(data, inputs.config))
    try:
        x = tree_map(lambda *parts: torch.cat(parts), *(batch.x for batch in batches))
    except RuntimeError:
        raise ArgumentError("data", "inputs of several sizes", "inputs of one size", hint="use layers=1") from None
    return x, torch.cat([batch.y for batch in batches]), index, min(1.0, max_rows / n)
