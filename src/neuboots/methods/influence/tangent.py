"""The whole net, or its last k layers, in kernel space.

    f_w(x) = f̂(x) + k(x, X) L (LᵀKL + λ)⁻¹ ((w − 1) ⊙ ũ),   K = J Jᵀ,   k(x, X) = J(x) Jᵀ

J is the Jacobian of the outputs by the weights at the training inputs X; L and u come from the loss (`working_residuals`), and ũ
are the residuals u corrected for leverage. The replicates are linear in w: their mean and variance over w are exact.

The kernel matrix takes (n·C)² numbers. Of more rows than `most_rows` m are drawn, and the deviations of m rows are
scaled by √(m/n), since H and the sum of squared gradients both grow with n.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from neuboots._prng import derive_keys
from neuboots._pytree import count_rows, row_slices, sample_rows, take_rows
from neuboots._streaming import num_bytes
from neuboots.head import cast_inputs
from neuboots.loading import EpochLoader, dataset_length, preserve_rng_state
from neuboots.losses import GaussianNLL, Loss, valid_mask, weighted_mean
from neuboots.methods._base import load_example
from neuboots.methods._curvature import WorkingModel, pointwise_losses, working_residuals
from neuboots.methods.influence.jacobian import Jacobian, JacobianRows
from neuboots.methods.influence.leverage import (
    POWERS,
    NoiseLevel,
    choose_ridge,
    leverage_corrected,
    residual_variance_factor,
    ridge_inverse,
)
from neuboots.methods.influence.predictor import InfluencePredictor
from neuboots.prediction import Moments, SampleStream
from neuboots.training import TrainingConfig
from neuboots.weights import WeightDistribution, assign_blocks, build_distribution, describe_distribution

if TYPE_CHECKING:
    from neuboots.methods.influence.method import InfluenceBootstrap

_TILE = 1 << 24  # numbers of k(x, X) held at once
_HELD = 1 << 26  # numbers of the deviations of all inputs, up to which they are kept from one draw to the next
_KEPT = 1e-10  # eigenvalues, of λ: what is left out moves an output by their root, 1e-5 of what others do


class Tangent(nn.Module):
    """What prediction needs: the net, the training inputs, and the influence of each block in the eigenbasis."""

    basis: Tensor  # L V: (n·C, r)
    influence: Tensor  # (W + λ)⁻¹ Vᵀ ũ, by block: (r, S)

    def __init__(self, net: nn.Module, inputs: dict[str, Tensor], kind: str, basis: Tensor, influence: Tensor) -> None:
        super().__init__()
        self.net, self.kind, self.names = net, kind, list(inputs)
        for name, tensor in inputs.items():
            self.register_buffer(f"input_{name}", tensor)
        self.register_buffer("basis", basis)
        self.register_buffer("influence", influence)
        self._seen: tuple[bytes, Jacobian, JacobianRows] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": None}

    def slopes(self, layers: int | Literal["all"], outputs: int | None) -> tuple[Jacobian, JacobianRows]:
        """J, and its rows at the training inputs; kept until a weight, a precision or the device changes."""
        key = _digest([(layers, outputs), *self.net.state_dict().values(), *map(self.get_buffer, self.stored)])
        if self._seen is None or self._seen[0] != key:
            inputs = cast_inputs(self.net, self.inputs)
            jacobian = Jacobian(self.net, layers, sample_rows(inputs), outputs=outputs)
            self._seen = key, jacobian, jacobian.rows(inputs)
        return self._seen[1:]

    @property
    def stored(self) -> list[str]:
        """Names of the buffers that hold the training inputs."""
        return [f"input_{name}" for name in self.names]

    @property
    def inputs(self) -> Any:
        """The training inputs as the net takes them."""
        found = {name: getattr(self, f"input_{name}") for name in self.names}
        return found if self.kind == "dict" else tuple(found.values()) if self.kind == "tuple" else found["x"]


@dataclass(frozen=True)
class TangentPredictor(InfluencePredictor):
    """B replicates of the net's outputs, from its slopes at x and at the training inputs, which it keeps.

    With a Gaussian head (`GaussianNLL`) the means are bootstrapped; log σ² is that of the net in every replicate.
    """

    tangent: Tangent
    layers: int | Literal["all"]
    outputs: int | None  # that are bootstrapped, from the first; None: all
    weight_distribution: WeightDistribution
    ridge: float  # λ/n
    degrees_of_freedom: float  # tr H

    @property
    def net(self) -> nn.Module:
        return self.tangent.net

    @property
    def module(self) -> nn.Module:
        return self.tangent

    def deviations(self, x: Any) -> tuple[Tensor, Tensor]:
        """f̂(x), (N, C), and by how much a unit of each block's weight moves it: (N, C, S)."""
        outputs, moved = zip(*self._pieces(x), strict=True)
        return torch.cat(outputs), torch.cat(moved)

    def _pieces(self, x: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """The same, some inputs at a time."""
        tangent = self.tangent
        jacobian, train = tangent.slopes(self.layers, self.outputs)
        for piece in row_slices(count_rows(x), _TILE // (train.outputs**2 * len(train.z))):
            rows = jacobian.rows(take_rows(x, piece))
            kernel = jacobian.kernel(rows, train)
            part = (kernel @ tangent.basis.to(kernel) @ tangent.influence.to(kernel)).to(rows.z)
            yield rows.z, part.view(len(rows.z), rows.outputs, part.shape[-1])

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        x = cast_inputs(self.net, x)
        blocks = self.tangent.influence.shape[1]
        numbers = count_rows(x) * blocks * self.tangent.slopes(self.layers, self.outputs)[1].outputs
        held = [*self._pieces(x)] if numbers <= _HELD else None  # beyond that they are computed again
        v, c = self.weight_distribution.covariance(blocks)

        def moments() -> Iterator[tuple[Tensor, Tensor]]:
            for output, moved in held or self._pieces(x):
                std = torch.zeros_like(output)
                variance = (v - c) * moved.square().sum(-1) + c * moved.sum(-1).square()
                std[:, : moved.shape[1]] = variance.clamp_min(0.0).sqrt()
                yield output, std

        def samples(change: Tensor) -> Iterator[Tensor]:
            for output, moved in held or self._pieces(x):
                some = output.repeat(len(change), *[1] * output.ndim)
                some[:, :, : moved.shape[1]] += (moved @ change.to(moved).T).movedim(-1, 0)
                yield some

        def chunks(size: int) -> Iterator[Tensor]:
            # a pass over all inputs serves as many replicates as may be held
            group = size if held else size * max(1, _HELD // (2 * size * (numbers // blocks)))
            for start in range(0, num_samples, group):
                keys = derive_keys(torch.arange(start, min(start + group, num_samples)), seed, "replicate")
                drawn = torch.cat([*samples(self.weight_distribution.sample(keys, blocks) - 1.0)], 1)  # (group, N, C)
                yield from torch.split(drawn, size)

        output, std = (torch.cat(part) for part in zip(*moments(), strict=True))
        return SampleStream(num_samples, 2 * num_bytes(output), chunks, Moments(output, std))

    def config(self) -> dict[str, Any]:
        tangent = self.tangent
        inputs = {name: getattr(tangent, f"input_{name}") for name in tangent.names}
        return {
            "method": "influence",
            "form": "tangent",
            "layers": self.layers,
            "outputs": self.outputs,
            "law": describe_distribution(self.weight_distribution),
            "ridge": self.ridge,
            "degrees_of_freedom": self.degrees_of_freedom,
            "kind": tangent.kind,
            "inputs": {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in inputs.items()},
            "basis": [*tangent.basis.shape],
            "num_blocks": tangent.influence.shape[1],
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "TangentPredictor":
        inputs = {
            name: torch.empty(shape, dtype=getattr(torch, kind)) for name, (kind, *shape) in config["inputs"].items()
        }
        basis = torch.empty(config["basis"], dtype=torch.float64)
        influence = torch.empty(basis.shape[1], config["num_blocks"], dtype=torch.float64)
        return cls(
            Tangent(net, inputs, config["kind"], basis, influence).eval(),
            config["layers"],
            config["outputs"],
            build_distribution(config["law"]),
            config["ridge"],
            config["degrees_of_freedom"],
        )


def build_tangent_predictor(
    method: "InfluenceBootstrap", net: nn.Module, data: Dataset[Any], config: TrainingConfig, *, weighted: bool = False
) -> TangentPredictor:
    """The bootstrap of the last layers of a trained net: one pass over its data, and the eigenvectors of its kernel.

    With `weighted` the last column of the targets (N, k + 1) is what the loss of the row was multiplied by.
    """
    return _Kernel.of(method, net, data, config, weighted=weighted).predictor(method, config.seed)


def build_tangent_predictors(
    methods: Iterable["InfluenceBootstrap"], net: nn.Module, data: Dataset[Any], config: TrainingConfig
) -> list[TangentPredictor]:
    """The same for methods that differ in residuals, law or blocks alone, from one kernel."""
    first, *others = methods
    kernel = _Kernel.of(first, net, data, config, weighted=False)
    return [kernel.predictor(method, config.seed) for method in (first, *others)]


def check_tangent(method: "InfluenceBootstrap", net: nn.Module, data: Dataset[Any], config: TrainingConfig) -> int:
    """Refuse what cannot be done with this net, trained or not; else the number of outputs that are moved."""
    example = load_example(net, data, seed=config.seed)
    z = Jacobian(net, method.layers, example).rows(example).z
    outputs = z.shape[1] // 2 if isinstance(method.loss, GaussianNLL) else z.shape[1]
    if method.max_kernel_rows < 2 * outputs:
        raise ValueError(
            f"got most_rows={method.max_kernel_rows} for a net of {outputs} outputs; expected room for two rows at least, "
            f"{2 * outputs}: a single row has no spread"
        )
    return outputs


@dataclass(frozen=True)
class _Kernel:
    """LᵀKL = V W Vᵀ of a trained net and its data, the ridge λ, and what the weights of the rows move."""

    net: nn.Module
    x: Any
    outputs: int  # that are bootstrapped: C
    all_outputs: int
    share: float  # of the rows, that the kernel has
    counted: int  # rows that are not ignored
    root: Tensor  # L: (n, C, C)
    residual: Tensor  # u: (n, C)
    scale: Tensor | None  # root of what a row's loss was multiplied by: (n, 1)
    values: Tensor  # W: (n·C,)
    vectors: Tensor  # V: (n·C, n·C)
    ridge: float  # λ

    @classmethod
    def of(
        cls, method: "InfluenceBootstrap", net: nn.Module, data: Dataset[Any], config: TrainingConfig, *, weighted: bool
    ) -> "_Kernel":
        outputs = check_tangent(method, net, data, config)
        x, y, share = _rows_of(data, method.max_kernel_rows // outputs, config)
        jacobian = Jacobian(net, method.layers, sample_rows(cast_inputs(net, x)), outputs=outputs)
        jacobian.warn_of_work(len(y), outputs)
        rows = jacobian.rows(cast_inputs(net, x))
        n = len(rows.z)
        y, scale = (y[:, :-1], y[:, -1:].to(rows.z.device, torch.float64).sqrt()) if weighted else (y, None)
        (root, residual), counted = _working(method.loss, rows, y)
        if scale is not None:  # w ℓ has the curvature w Λ and the slope w ∂ℓ/∂z
            root, residual = root * scale[:, :, None], residual * scale
        kernel = torch.einsum("ned,nemf->ndmf", root, jacobian.kernel(rows, rows).view(n, outputs, n, outputs))
        kernel = torch.einsum("ndmf,mfg->ndmg", kernel, root).reshape(n * outputs, n * outputs)
        values, vectors = torch.linalg.eigh((kernel + kernel.T) / 2)
        values = values.clamp_min(0.0)
        if method.ridge is None:
            target = (torch.einsum("ned,ne->nd", root, jacobian.along(rows)) + residual).flatten()
            classes = isinstance(method.loss, nn.CrossEntropyLoss)  # whose outputs have one degree less
            size = float(residual.square().sum())
            squares = (vectors.T @ target).square()
            ridge = choose_ridge(values, squares, 0.0, counted * (outputs - classes), residual=size)
        else:
            ridge = counted * float(method.ridge)
        return cls(net, x, outputs, rows.z.shape[1], share, counted, root, residual, scale, values, vectors, ridge)

    def predictor(self, method: "InfluenceBootstrap", seed: int) -> TangentPredictor:
        """The bootstrap with the residuals, the law and the blocks of the method."""
        (n, outputs), values, scale = self.residual.shape, self.values, self.scale
        # noise is that of the targets, whatever a row counts
        plain = self.residual if scale is None else self.residual / scale
        corrected = _corrected(method, self.vectors * values.sqrt(), values, self.ridge, plain, self.share)
        corrected = corrected if scale is None else corrected * scale
        rounding = float(values[-1]) * torch.finfo(values.dtype).eps * len(values)
        kept = values > max(_KEPT * self.ridge, rounding)
        vectors = self.vectors.view(n, outputs, -1)
        influence = torch.einsum("nek,ne->kn", vectors, corrected)  # Vᵀ ũ, row by row: (n·C, n)
        influence = self.share**0.5 * (ridge_inverse(values, self.ridge)[:, None] * influence)[kept]
        basis = (self.root @ vectors).flatten(0, 1)[:, kept]
        if method.num_blocks is not None:
            # not stratified by y: blocks of the same mix have the same sum of residuals, and no spread
            blocks = assign_blocks(n, method.num_blocks, seed=seed).to(influence.device)
            influence = influence.new_zeros(len(influence), method.num_blocks).index_add_(1, blocks, influence)
        kind, inputs = _named(self.x)
        return TangentPredictor(
            Tangent(self.net, inputs, kind, basis, influence),  # in the net's own mode: prediction has its own
            method.layers,
            outputs if outputs < self.all_outputs else None,
            method.weight_distribution,
            self.ridge / self.counted,
            float((values * ridge_inverse(values, self.ridge)).sum()),
        )


def _corrected(
    method: "InfluenceBootstrap", psi: Tensor, values: Tensor, ridge: float, residual: Tensor, share: float
) -> Tensor:
    """ũ, the residuals corrected for leverage, as the options say: (n, C)."""
    n, outputs = residual.shape
    if method.correction == "raw":
        return residual
    if method.correction in POWERS:
        psi = psi.view(n, outputs, -1)
        hat = share * (psi * ridge_inverse(values, ridge)) @ psi.mT  # a row's block of H: (n, C, C)
        return leverage_corrected(hat, residual, power=POWERS[method.correction])
    corrected = torch.empty_like(residual)
    for c in range(outputs):  # each has a noise of its own, and neighbours by its own block of the kernel
        mine = psi[c::outputs]
        own_values, own = values, mine
        if outputs > 1:
            own_values, vectors = torch.linalg.eigh(mine @ mine.T)
            own_values = own_values.clamp_min(0.0)
            own = vectors * own_values.sqrt()
        noise = NoiseLevel.along(own_values)
        noise.add(own, residual[:, c], residual_variance_factor(mine, values, ridge, share=share))
        corrected[:, c] = noise.correct(own, residual[:, c])
    return corrected


def _working(loss: Loss, rows: JacobianRows, y: Tensor) -> tuple[WorkingModel, int]:
    """L and u of the outputs that are bootstrapped, and how many rows count: those that are ignored have none."""
    y = y.to(rows.z.device)
    losses = pointwise_losses(loss, rows.z, y)  # says what does not fit
    weighted_mean(losses, losses.new_ones(len(y)))  # refuses a loss that reduces
    mask = valid_mask(loss, y)
    if mask is not None and not bool(mask.any()):
        raise ValueError("got no row that counts: all targets are ignored; expected at least one")
    root, residual = working_residuals(loss, rows.z, y if mask is None else y.where(mask, 0))
    if mask is not None:
        root, residual = root * mask[:, None, None], residual * mask[:, None]
    if not (bool(torch.isfinite(root).all()) and bool(torch.isfinite(residual).all())):
        raise ValueError("got NaN or infinite losses of the trained net; expected finite outputs and targets")
    counted = len(y) if mask is None else int(mask.sum())
    return WorkingModel(root[:, : rows.outputs, : rows.outputs], residual[:, : rows.outputs]), counted


def _rows_of(data: Dataset[Any], most: int, config: TrainingConfig) -> tuple[Any, Tensor, float]:
    """Inputs and targets of all rows in their order, or of `most` drawn by the seed; and which share they are."""
    n = dataset_length(data)
    if n is None:
        raise ValueError(
            "got a stream of unknown length; expected a data set with a length: bootstrap the head (layers=1) of a net "
            "that was trained on a stream"
        )
    if n > most:
        drawn = derive_keys(torch.arange(n), config.seed, "rows").argsort()[:most].sort().values
        data = Subset(data, drawn.tolist())
    loader = EpochLoader(
        data, batch_size=config.batch_size, seed=config.seed, shuffle=False, num_workers=config.num_workers
    )
    with preserve_rng_state():
        batches = [batch for _, batch, _ in loader.epoch(0)]
    x, y = _joined([batch.x for batch in batches]), torch.cat([batch.y for batch in batches])
    return x, y, min(1.0, most / n)


def _digest(parts: Iterable[Any]) -> bytes:
    """What the tensors hold, where, and in which precision, and what else there is, in a few bytes."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, Tensor):
            found.update(repr((part.dtype, part.device, part.shape)).encode())
            found.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            found.update(repr(part).encode())
    return found.digest()


def _joined(parts: list[Any]) -> Any:
    try:
        return _concatenated(parts)
    except RuntimeError as fault:
        if "Sizes of tensors must match" not in str(fault):
            raise
        raise ValueError(
            "got inputs of several sizes; expected one size, since several layers keep all rows together: bootstrap "
            "the head (layers=1)"
        ) from None


def _concatenated(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: torch.cat([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(torch.cat([part[k] for part in parts]) for k in range(len(first)))
    return torch.cat(parts)


def _named(x: Any) -> tuple[str, dict[str, Tensor]]:
    """How the net takes its inputs, and these by name."""
    if isinstance(x, Mapping):
        return "dict", dict(x)
    if isinstance(x, tuple | list):
        return "tuple", {str(k): value for k, value in enumerate(x)}
    return "tensor", {"x": x}
