"""Influence bootstrap of the whole net, or of its last k layers, in kernel space.

    f_w(x) = f̂(x) + k(x, X) L (LᵀKL + λ)⁻¹ ((w − 1) ⊙ ũ),   K = J Jᵀ,   k(x, X) = J(x) Jᵀ

J is the Jacobian of the outputs by the weights at the training inputs X; L and u come from the loss
(`working_residuals`), and ũ are the residuals u corrected for leverage. The replicates are linear in w: their mean and
variance over w are exact.

The kernel matrix has (n·C)² elements. Beyond `max_kernel_rows` a random subset of m rows is used, and deviations are
scaled by √(m/n), since H and the sum of squared gradients both grow with n.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten, treespec_dumps, treespec_loads

from neuboots._prng import derive_keys
from neuboots._pytree import count_rows, row_slices, sample_rows, take_rows
from neuboots._validation import ArgumentError
from neuboots.head import cast_inputs, load_example
from neuboots.loading import check_length, select_examples
from neuboots.losses import GaussianNLL, Loss, valid_mask, weighted_mean
from neuboots.methods._base import describe_tensors, fingerprint_tensors, iterate_batches, make_tensors
from neuboots.methods._curvature import pointwise_losses, working_residuals
from neuboots.methods.influence._head import InfluencePredictor, check_two_rows
from neuboots.methods.influence._jacobian import Jacobian, JacobianRows, Layers
from neuboots.methods.influence._leverage import (
    POWERS,
    NoiseLevel,
    choose_ridge,
    leverage_corrected,
    residual_variance_factor,
    ridge_inverse,
)
from neuboots.methods.neuboots import draw_replicate_weights
from neuboots.prediction import Moments, SampleStream, num_bytes
from neuboots.training import FitInputs
from neuboots.weights import assign_blocks, build_distribution

if TYPE_CHECKING:
    from neuboots.methods.influence import InfluenceBootstrap

_CHUNK_ELEMENTS = 1 << 24  # of k(x, X)
_MAX_STORED_ELEMENTS = 1 << 26  # of the deviations of all inputs, to keep them from one draw to the next
_MIN_EIGENVALUE = 1e-10  # relative to λ: smaller ones move an output by at most 1e-5 of what others do


class TangentModel(nn.Module):
    """What prediction needs: the net, the training inputs, and the influence of each block in the eigenbasis.

    Args:
        net: The trained net.
        layers: Number of last layers that are bootstrapped, or "all".
        outputs: Number of leading outputs that are bootstrapped; None is all.
        spec: Structure of the inputs (a tensor, tuple or dict), as torch's pytree serializes it.
        tensors: `basis`, L V: (n·C, r), `influence`, (W + λ)⁻¹ Vᵀ ũ by block: (r, S), and the training inputs.
    """

    basis: Tensor
    influence: Tensor

    def __init__(
        self, net: nn.Module, layers: Layers, outputs: int | None, spec: str, tensors: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self.net, self.layers, self.outputs, self.spec, self.names = net, layers, outputs, spec, list(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self._cache: tuple[bytes, Jacobian, JacobianRows] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": None}

    def jacobian(self) -> tuple[Jacobian, JacobianRows]:
        """J, and its rows at the training inputs; cached until a weight, the precision or the device changes."""
        inputs = [self.get_buffer(name) for name in self.names if name.startswith("input_")]
        states = [value for value in self.net.state_dict().values() if isinstance(value, Tensor)]
        key = fingerprint_tensors([*states, *inputs])
        if self._cache is None or self._cache[0] != key:
            x = cast_inputs(self.net, tree_unflatten(inputs, treespec_loads(self.spec)))
            jacobian = Jacobian(self.net, self.layers, sample_rows(x), outputs=self.outputs)
            self._cache = key, jacobian, jacobian.rows(x)
        return self._cache[1:]


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

    def deviations(self, x: Any) -> tuple[Tensor, Tensor]:
        """f̂(x), (N, C), and by how much a unit of each block's weight moves it: (N, C, S)."""
        outputs, moved = zip(*self._chunks(x), strict=True)
        return torch.cat(outputs), torch.cat(moved)

    def _chunks(self, x: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """`deviations`, some inputs at a time."""
        tangent = self.tangent
        jacobian, train = tangent.jacobian()
        for chunk in row_slices(count_rows(x), _CHUNK_ELEMENTS // (train.outputs**2 * len(train.z))):
            rows = jacobian.rows(take_rows(x, chunk))
            kernel = jacobian.kernel(rows, train)
            part = (kernel @ tangent.basis.to(kernel) @ tangent.influence.to(kernel)).to(rows.z)
            yield rows.z, part.view(len(rows.z), rows.outputs, part.shape[-1])

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        x = cast_inputs(self.net, x)
        blocks = self.tangent.influence.shape[1]
        elements = count_rows(x) * blocks * self.tangent.jacobian()[1].outputs
        stored = [*self._chunks(x)] if elements <= _MAX_STORED_ELEMENTS else None  # beyond that: computed again
        v, c = self.weight_distribution.covariance(blocks)

        def moments() -> Iterator[tuple[Tensor, Tensor]]:
            for output, moved in stored or self._chunks(x):
                std = torch.zeros_like(output)
                variance = (v - c) * moved.square().sum(-1) + c * moved.sum(-1).square()
                std[:, : moved.shape[1]] = variance.clamp_min(0.0).sqrt()
                yield output, std

        def samples(change: Tensor) -> Iterator[Tensor]:
            for output, moved in stored or self._chunks(x):
                replicates = output.repeat(len(change), *[1] * output.ndim)
                replicates[:, :, : moved.shape[1]] += (moved @ change.to(moved).T).movedim(-1, 0)
                yield replicates

        def chunks(size: int) -> Iterator[Tensor]:
            # one pass over all inputs serves as many replicates as memory allows
            group = size if stored else size * max(1, _MAX_STORED_ELEMENTS // (2 * size * (elements // blocks)))
            for start in range(0, num_samples, group):
                stop = min(start + group, num_samples)
                alphas = draw_replicate_weights(self.weight_distribution, blocks, start, stop, seed)
                yield from torch.split(torch.cat([*samples(alphas - 1.0)], 1), size)  # (group, N, C)

        output, std = (torch.cat(part) for part in zip(*moments(), strict=True))
        return SampleStream(num_samples, 2 * num_bytes(output), chunks, Moments(output, std))

    def config(self) -> dict[str, Any]:
        tangent = self.tangent
        return {
            **super().config(),
            "layers": tangent.layers,
            "outputs": tangent.outputs,
            "spec": tangent.spec,
            "tensors": describe_tensors({name: tangent.get_buffer(name) for name in tangent.names}),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "TangentPredictor":
        tensors = make_tensors(config["tensors"])
        tangent = TangentModel(net, config["layers"], config["outputs"], config["spec"], tensors).eval()
        distribution = build_distribution(config["weight_distribution"])
        return cls(distribution, config["ridge"], config["degrees_of_freedom"], tangent)


# -- setup ---------------------------------------------------------------------------------------------


def check_tangent(method: "InfluenceBootstrap", net: nn.Module, inputs: FitInputs) -> int:
    """Number of outputs that are bootstrapped; raise if this net, trained or not, cannot be bootstrapped."""
    check_length(inputs.data)
    check_two_rows(inputs)
    example = load_example(net, inputs.data, seed=inputs.config.seed)
    z = Jacobian(net, method.layers, example).rows(example).z
    outputs = z.shape[1] // 2 if isinstance(method.loss, GaussianNLL) else z.shape[1]
    if method.max_kernel_rows < 2 * outputs:
        expected = f"at least {2 * outputs}, for two rows of {outputs} outputs"
        raise ArgumentError("max_kernel_rows", method.max_kernel_rows, expected)
    return outputs


def build_tangent_predictors(
    methods: Sequence["InfluenceBootstrap"], net: nn.Module, inputs: FitInputs, *, weighted: bool = False
) -> list[TangentPredictor]:
    """The influence bootstrap of the last layers of a trained net, from the data it was trained on.

    The methods differ in residuals, weight distribution and blocks only: LᵀKL = V W Vᵀ is decomposed once. With
    `weighted` the last column of the targets (N, k + 1) is the factor of the row's loss.
    """
    method = methods[0]
    outputs = check_tangent(method, net, inputs)
    x, y, fraction = _read_rows(inputs, method.max_kernel_rows // outputs)
    jacobian = Jacobian(net, method.layers, sample_rows(cast_inputs(net, x)), outputs=outputs)
    jacobian.warn_of_cost(len(y), outputs)
    rows = jacobian.rows(cast_inputs(net, x))
    n = len(rows.z)
    y, weight = (y[:, :-1], y[:, -1:]) if weighted else (y, torch.ones(n, 1))
    root, residual, num_valid = _working_residuals(method.loss, rows, y)
    scale = weight.to(residual).sqrt()
    root = root * scale[:, :, None]  # w ℓ has the curvature w Λ and the gradient w ∂ℓ/∂z
    kernel = torch.einsum("ned,nemf->ndmf", root, jacobian.kernel(rows, rows).view(n, outputs, n, outputs))
    kernel = torch.einsum("ndmf,mfg->ndmg", kernel, root).reshape(n * outputs, n * outputs)
    values, vectors = torch.linalg.eigh((kernel + kernel.T) / 2)
    values = values.clamp_min(0.0)
    if method.ridge is None:
        target = (torch.einsum("ned,ne->nd", root, jacobian.along(rows)) + residual * scale).flatten()
        squares, size = (vectors.T @ target).square(), float((residual * scale).square().sum())
        softmax = isinstance(method.loss, nn.CrossEntropyLoss)  # one degree of freedom less
        ridge = choose_ridge(values, squares, 0.0, num_valid * (outputs - softmax), residual=size)
    else:
        ridge = num_valid * float(method.ridge)
    inverted = ridge_inverse(values, ridge)
    rounding = float(values[-1]) * torch.finfo(values.dtype).eps * len(values)
    kept = values > max(_MIN_EIGENVALUE * ridge, rounding)
    leaves, spec = tree_flatten(x)
    stored = {f"input_{k}": leaf for k, leaf in enumerate(leaves)}
    moved = outputs if outputs < rows.z.shape[1] else None
    by_row = vectors.view(n, outputs, -1)
    predictors = []
    for each in methods:
        # the noise is that of the targets, whatever the factor of a row's loss
        corrected = scale * _correct_residuals(
            each.correction, residual, vectors * values.sqrt(), values, ridge, fraction
        )
        influence = torch.einsum("nek,ne->kn", by_row, corrected)  # Vᵀ ũ
        influence = fraction**0.5 * (inverted[:, None] * influence)[kept]  # (r, n)
        if each.num_blocks is not None:
            # not stratified by y: blocks of the same mixture have the same sum of residuals, and no spread
            blocks = assign_blocks(n, each.num_blocks, seed=inputs.config.seed).to(influence.device)
            influence = influence.new_zeros(len(influence), each.num_blocks).index_add_(1, blocks, influence)
        tensors = {"basis": (root @ by_row).flatten(0, 1)[:, kept], "influence": influence, **stored}
        tangent = TangentModel(net, method.layers, moved, treespec_dumps(spec), tensors)
        df = float((values * inverted).sum())
        predictors.append(TangentPredictor(each.weight_distribution, ridge / num_valid, df, tangent))
    return predictors


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
        noise = NoiseLevel.from_eigenvalues(own_values)
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


def _read_rows(inputs: FitInputs, max_rows: int) -> tuple[Any, Tensor, float]:
    """Inputs and targets of all rows in order, or of a random subset of `max_rows`, and their fraction of all."""
    data, n = inputs.data, check_length(inputs.data)
    if n > max_rows:
        drawn = derive_keys(torch.arange(n), inputs.config.seed, "rows").argsort()[:max_rows].sort().values
        data = select_examples(data, drawn.tolist())
    batches = list(iterate_batches(data, inputs.config))
    try:
        x = tree_map(lambda *parts: torch.cat(parts), *(batch.x for batch in batches))
    except RuntimeError:
        raise ArgumentError("data", "inputs of several sizes", "inputs of one size", hint="use layers=1") from None
    return x, torch.cat([batch.y for batch in batches]), min(1.0, max_rows / n)
