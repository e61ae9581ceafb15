"""Influence bootstrap of the head of a trained net, for any number of rows.

    θ_α = θ̂ + H⁻¹ Σ_s (α_s − 1) G_s,   G_s = Σ_{i ∈ block s} wᵢ Jᵢᵀ Lᵢ ũᵢ,   Jᵢ = I ⊗ φ̃ᵢᵀ,   φ̃ = (φ, 1)

One pass over the data computes H, a second the noise level (for `residuals="smooth"`), a last one the block sums G.
H⁻¹G is stored, a shift of the head for each block; B heads are then one product, as in eq. 3.1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from neuboots._validation import ArgumentError, Count, check_memory, check_types
from neuboots.head import add_output_axis, cast_inputs, check_inputs, copy_net, make_head
from neuboots.loading import dataset_length
from neuboots.losses import Loss, as_loss, build_loss, describe_loss
from neuboots.methods._base import describe_tensors, make_tensors
from neuboots.methods._curvature import (
    MAX_FULL_SIZE,
    FeaturePass,
    FullGGN,
    HeadPoints,
    HeadReplicates,
    KronGGN,
    append_ones,
    apply_heads,
    head_parameters,
    map_points,
    maximize_evidence,
    output_is_head,
    split_at_head,
    to_double,
)
from neuboots.methods._least_squares import (
    POWERS,
    InfluencePredictor,
    NoiseLevel,
    choose_ridge,
    covariance_root,
    leverage_corrected,
    residual_variance_factor,
    ridge_inverse,
    working_residuals,
)
from neuboots.methods.neuboots import BootstrapGenerator, GeneratorAtInput, draw_replicate_weights
from neuboots.prediction import Moments, num_bytes
from neuboots.training import FitInputs
from neuboots.weights import SPARE_BLOCKS, Blocks, BlockTable, HashedBlocks, assign_blocks

if TYPE_CHECKING:
    from neuboots.methods.influence import InfluenceBootstrap

_MAX_SHIFT_ELEMENTS = 10_000_000  # of all blocks together
_MIN_BLOCKS, _ENOUGH_BLOCKS = 64, 256  # always affordable; from here on rows may share a block
_MAX_OUTPUTS = 4096  # each point needs a matrix of outputs × outputs
_CHUNK_ELEMENTS = 1 << 22
_MAX_STORED_BYTES = 1 << 28  # of the features of refitted heads
_MAX_SYSTEM_SIZE = 3000  # unknowns of the linear system that is solved for each replicate
_MAX_STEPS = 100
_TOLERANCE = 1e-10  # of the gradient, relative to those of the blocks


# -- heads that are refitted ---------------------------------------------------------------------------


class Refit(nn.Module):
    """Heads refitted under other weights of the data: Newton's method to convergence for each replicate.

        θ_α = argmin_θ Σᵢ α_{u(i)} ℓ̃ᵢ(θ) + ½λ|θ − θ̂|² − (θ − θ̂)ᵀ Σᵢ ∇ℓ̃ᵢ(θ̂),   ∇ℓ̃ᵢ(θ̂) = −Jᵢᵀ Lᵢ ũᵢ

    ℓ̃ is the loss, tilted so that its gradients at θ̂ are the corrected ones; α = 1 gives θ̂ back. Features are stored.

    Args:
        tensors: `sums`, the corrected gradients G̃ by block, and `tilts`, the part G̃ − G that the correction added, each
            (S, C, D̃); all points as `phi` (M, D), `y` (M, ·), `weight` (M,) and `block` (M,).
        penalty: λ.
        loss: Its gradients and curvature count as in `working_residuals`.
    """

    def __init__(self, tensors: Mapping[str, Tensor], penalty: float, loss: Loss) -> None:
        super().__init__()
        self.penalty, self.loss = penalty, loss
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def head(self, theta: Tensor, alpha: Tensor, at: Tensor) -> Tensor:
        """θ_α around θ̂ (C, D̃) for weights α (S,), from the first Newton step (C, D̃): (C, D̃)."""
        loss, alpha, at = self.loss, alpha.to(theta), at.to(theta)
        stored = {name: tensor.to(theta.device) for name, tensor in self.named_buffers(recurse=False)}
        phi = append_ones(stored["phi"], theta.shape[1] > stored["phi"].shape[1])
        w = stored["weight"].to(theta) * alpha[stored["block"]]
        size = max(1, _CHUNK_ELEMENTS // (len(theta) * max(theta.shape)))
        chunks = list(zip(*(torch.split(part, size) for part in (phi, stored["y"], w)), strict=True))
        offset = stored["sums"].to(theta).sum(0) - torch.einsum("s,scd->cd", alpha, stored["tilts"].to(theta))

        def gradient_at(at: Tensor) -> Tensor:
            total = self.penalty * (at - theta) + offset
            for phi, y, w in chunks:
                total = total - (w[:, None] * working_residuals(loss, phi @ at.T, y).slope).T @ phi
            return total

        gradient, scale = gradient_at(at), float(stored["sums"].abs().sum())
        for _ in range(_MAX_STEPS):
            if float(gradient.abs().sum()) <= _TOLERANCE * scale:
                return at
            curvature = FullGGN(*theta.shape).to(theta.device)
            for phi, y, w in chunks:
                root = working_residuals(loss, phi @ at.T, y).root
                curvature.add(phi, root @ root.mT, w)
            step = -_solve(curvature, self.penalty, gradient.view(1, -1)).view_as(theta)
            for _ in range(60):
                following = gradient_at(at + step)
                if abs(float((following * step).sum())) < -float((gradient * step).sum()):
                    break  # convex along the step: closer to the minimum
                step = step / 2
            else:
                return at  # the gradient is rounding error
            at, gradient = at + step, following
        raise ValueError(
            f"Newton's method did not converge in {_MAX_STEPS} steps for a replicate; expected a loss that is convex "
            "in the outputs: use a larger ridge, or refit=False"
        )

    def config(self) -> dict[str, Any]:
        """Describe it as JSON, for `from_config`."""
        tensors = describe_tensors(dict(self.named_buffers(recurse=False)))
        return {"tensors": tensors, "penalty": self.penalty, "loss": describe_loss(self.loss)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Refit":
        """Create it with tensors whose values `load` fills in."""
        check_types("refit", config, {"tensors": dict[str, list[Any]], "penalty": float, "loss": dict})
        return cls(make_tensors(config["tensors"]), config["penalty"], build_loss(config["loss"]))


def _solve(curvature: FullGGN, penalty: float, vectors: Tensor) -> Tensor:
    """(H + λ)⁻¹ v of each row v, for a sum H that is not decomposed yet; zero where there is no curvature."""
    shifted = curvature.vectors + penalty * torch.eye(vectors.shape[1]).to(vectors)
    factor, failed = torch.linalg.cholesky_ex(shifted)
    pivots = factor.diagonal()
    if not int(failed) and float(pivots.min()) > 1e-6 * float(pivots.max()):
        return torch.cholesky_solve(vectors.T, factor).T
    curvature.decompose()
    return curvature.lift(curvature.project(vectors) * ridge_inverse(curvature.eigenvalues(), penalty))


# -- the predictor -------------------------------------------------------------------------------------


class ShiftedHead(nn.Module):
    """A generator, the shifts of its head by a unit of each block's weight, and what refitting needs."""

    shifts: Tensor  # H⁻¹G: (S, C, D̃)

    def __init__(self, generator: BootstrapGenerator, shifts: Tensor, refit: Refit | None = None) -> None:
        super().__init__()
        self.generator, self.refit = generator, refit
        self.register_buffer("shifts", shifts)


@dataclass(frozen=True)
class HeadPredictor(HeadReplicates, InfluencePredictor):
    """Replicates that differ in their heads, from one pass through the features.

    Attributes:
        shifted: The net and the shifts of its head.
    """

    form: ClassVar[str] = "head"
    shifted: ShiftedHead

    @property
    def module(self) -> nn.Module:
        return self.shifted

    @property
    def num_blocks(self) -> int:
        """S, the number of blocks that rows are assigned to."""
        return len(self.shifted.shifts)

    @property
    def _num_drawn(self) -> int:
        return self.num_blocks

    def heads(self, start: int, stop: int, *, seed: int) -> Tensor:
        shifts, refit, theta = self.shifted.shifts, self.shifted.refit, head_parameters(self.generator)
        alphas = draw_replicate_weights(self.weight_distribution, self.num_blocks, start, stop, seed)
        moved = (alphas - 1.0).to(shifts) @ shifts.flatten(1)
        heads = theta.to(shifts) + moved.view(-1, *shifts.shape[1:])
        if refit is None:
            return heads
        return torch.stack([refit.head(theta, *each) for each in zip(alphas, heads, strict=True)]).to(shifts)

    @cached_property
    def _covariance_root(self) -> Tensor:
        """R with Var f_c(x) = |R_c φ̃|²: (C, min(S, D̃), D̃)."""
        root = covariance_root(self.weight_distribution, to_double(self.shifted.shifts)).movedim(1, 0)  # (C, S, D̃)
        factor: Tensor = torch.linalg.qr(root, mode="r").R
        return factor

    def _std(self, at: GeneratorAtInput) -> Tensor | None:
        if self.shifted.refit is not None or not output_is_head(at):
            return None
        root = self._covariance_root.to(at.trace.phi)  # (C, R, D̃)
        size = _CHUNK_ELEMENTS // root[..., 0].numel()
        return map_points(at, lambda phi: (phi.to(root) @ root.mT).square().sum(2).T, size).sqrt()

    def moments(self, x: Any) -> Moments:
        """Compute the exact mean and standard deviation over all replicates (B = ∞).

        After an upsampling the net is finished once for each block.

        Raises:
            ValueError: If the heads are refitted.
        """
        check_inputs(x)
        if self.shifted.refit is not None:
            raise ValueError("moments of refitted heads have no closed form; use predict, or refit=False")
        generator = self.copy_for_thread().generator
        with torch.no_grad():
            at = generator.at(cast_inputs(generator, x))
            output, theta, exact = add_output_axis(at.output), head_parameters(generator), self._std(at)
            if exact is not None:
                return Moments(output, exact.to(output))
            v, c = self.weight_distribution.covariance(self.num_blocks)
            total, squares = torch.zeros_like(output), torch.zeros_like(output)
            for shift in self.shifted.shifts:
                moved = apply_heads(at, (theta + shift)[None])[0] - output
                total += moved
                squares += moved.square()
        return Moments(output, ((v - c) * squares + c * total.square()).clamp_min(0.0).sqrt())

    def export(self, b: int, *, seed: int = 0) -> nn.Module:
        """Copy the net with the head of replicate b of this seed."""
        split = self.generator.split
        theta = self.heads(b, b + 1, seed=seed)[0].to(split.head.weight)
        bias = theta[:, split.width] if split.head.bias is not None else None
        net = copy_net(self.generator.net)
        parent, _, key = split.name.rpartition(".")
        net.get_submodule(parent)._modules[key] = make_head(theta[:, : split.width].view_as(split.head.weight), bias)
        return net

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "head": self.generator.split.name,
            "num_blocks": self.num_blocks,
            "refit": None if self.shifted.refit is None else self.shifted.refit.config(),
        }

    @classmethod
    def _rebuild(cls, config: dict[str, Any], net: nn.Module) -> ShiftedHead:
        check_types("predictor", config, {"head": str, "num_blocks": Count, "refit": dict | None})
        generator = BootstrapGenerator(net, head=config["head"])
        shape = (config["num_blocks"], *head_parameters(generator).shape)
        refit = None if config["refit"] is None else Refit.from_config(config["refit"])
        return ShiftedHead(generator, torch.zeros(shape), refit)


# -- setup ---------------------------------------------------------------------------------------------


def build_head_predictor(method: "InfluenceBootstrap", net: nn.Module, inputs: FitInputs) -> HeadPredictor:
    """The influence bootstrap of the head of a trained net, from the data it was trained on."""
    generator = check_head(method, net, inputs)
    passes = FeaturePass(generator, method.loss, inputs)
    blocks = _make_blocks(method, passes.num_parameters, inputs)
    if not method.refit:
        passes.reduce()
    curvature, gram, ridge = _compute_curvature(method, passes)
    correct = _make_correction(method.correction, passes, curvature, gram, ridge)
    sums = passes.theta.new_zeros(blocks.num_blocks, passes.theta.numel())  # G: (S, K)
    for points in passes.points():
        _add_gradients(sums, points, correct(points), blocks(points.row))
    values = curvature.eigenvalues()
    inverted = ridge_inverse(values, ridge)
    shifts = curvature.lift(curvature.project(sums) * inverted).view(-1, *passes.theta.shape)
    shifts = shifts if passes.basis is None else shifts @ passes.basis.T
    weight = generator.split.head.weight
    dtype = torch.promote_types(weight.dtype, torch.float32)  # the net's own precision, at least single
    refit = _build_refit(passes, blocks, sums, ridge).to(weight.device) if method.refit else None
    shifted = ShiftedHead(generator, shifts.to(weight.device, dtype), refit)
    df = float((values * inverted).sum())
    return HeadPredictor(method.weight_distribution, ridge / passes.num_rows, df, shifted)


def check_head(method: "InfluenceBootstrap", net: nn.Module, inputs: FitInputs) -> BootstrapGenerator:
    """Split the net, trained or not, at its head; raise if its head cannot be bootstrapped."""
    if dataset_length(inputs.data) == 1:
        raise ArgumentError("data", "a single row", "at least two rows")
    generator = split_at_head(net, method.head, inputs)
    outputs, width = head_parameters(generator).shape
    if outputs > _MAX_OUTPUTS:
        raise ValueError(f"the head has {outputs} outputs; expected at most {_MAX_OUTPUTS}")
    if method.refit and outputs * width > _MAX_SYSTEM_SIZE:
        expected = f"False for a head of {outputs} × {width} parameters (linear systems of at most {_MAX_SYSTEM_SIZE})"
        raise ArgumentError("refit", True, expected)
    n = dataset_length(inputs.data)
    check_num_blocks(method.num_blocks, n, outputs * width)
    if n is not None and n >= width:  # known before training
        FeaturePass(generator, method.loss, inputs).check_cost(full=False)
    return generator


def _compute_curvature(method: "InfluenceBootstrap", passes: FeaturePass) -> tuple[FullGGN | KronGGN, Tensor, float]:
    """H, Σ wφ̃φ̃ᵀ and λ, from one pass over the data."""
    theta = passes.theta
    outputs, width = theta.shape
    kron = passes.likelihood == "squared" or passes.num_parameters > MAX_FULL_SIZE
    passes.check_cost(full=not kron)
    curvature = (KronGGN if kron else FullGGN)(outputs, width).to(theta.device)
    gram, along = theta.new_zeros(width, width), theta.new_zeros(outputs, width)
    length = residual = count = 0.0
    for points in passes.points():
        phi, root, w = points.phi, points.root, points.weight
        curvature.add(phi, root @ root.mT, w)
        gram += phi.T @ (w[:, None] * phi)
        target = (root.mT @ points.z[:, :, None])[:, :, 0] + points.residual  # of the linear model
        along += ((root @ target[:, :, None])[:, :, 0] * w[:, None]).T @ phi
        length += float(w @ target.square().sum(1))
        residual += float(w @ points.residual.square().sum(1))
        count += outputs * float(w.sum())
    if not passes.num_rows:
        raise ValueError("all targets are ignored; expected at least one that counts")
    curvature.decompose()
    values = curvature.eigenvalues()
    if not float(values.max()) and float(gram.abs().max()):
        raise ArgumentError("loss", method.loss, "a loss with a positive second derivative in the outputs")
    if method.ridge is not None:
        return curvature, gram, passes.num_rows * float(method.ridge)
    if not passes.continuous:  # Pearson residuals of rare classes have too heavy tails to measure the fit
        return curvature, gram, maximize_evidence(values, passes.squared_norm)
    positive = values > values.max() * 1e-12
    squares = torch.where(positive, curvature.project(along.view(1, -1))[0].square() / values, 0.0)
    rest = max(0.0, length - float(squares.sum()))
    missing = passes.num_parameters - len(values)  # directions outside of the span of the points
    values, squares = (torch.cat([part, part.new_zeros(missing)]) for part in (values, squares))
    return curvature, gram, choose_ridge(values, squares, rest, max(1, round(count)), residual=residual)


def _make_blocks(method: "InfluenceBootstrap", size: int, inputs: FitInputs) -> Blocks:
    """u: one block per row up to the number of head parameters (or 256); beyond that rows are assigned at random.

    Blocks are not stratified by the targets: strata have the same sum of residuals, and no spread.
    """
    n = dataset_length(inputs.data)
    most = max(_MIN_BLOCKS, min(max(_ENOUGH_BLOCKS, size), _MAX_SHIFT_ELEMENTS // size))
    if method.num_blocks is None and n is not None and n <= most:
        return BlockTable(torch.arange(n), n)
    num_blocks = method.num_blocks or most
    if n is None:
        return HashedBlocks(num_blocks, inputs.config.seed)
    return BlockTable(assign_blocks(n, num_blocks, seed=inputs.config.seed), num_blocks)


def check_num_blocks(num_blocks: int | None, n: int | None, size: int) -> None:
    """Raise ArgumentError if n rows leave too many blocks empty, or their gradients do not fit."""
    if num_blocks is None:
        return
    if n is not None and num_blocks > max(n, SPARE_BLOCKS):
        raise ArgumentError("num_blocks", num_blocks, f"at most {SPARE_BLOCKS:,}, or the number of rows, {n:,}")
    check_memory("num_blocks", num_blocks, 3 * 8 * num_blocks * size, hint="use fewer blocks")


def _add_gradients(sums: Tensor, points: HeadPoints, residual: Tensor, blocks: Tensor) -> None:
    """Add wᵢ Jᵢᵀ Lᵢ ũᵢ of these points and residuals ũ (M, C) to the sums of their blocks (S, K)."""
    added = points.root @ (residual - points.residual)[:, :, None]  # by the correction: (M, C, 1)
    slope = points.weight[:, None] * (points.slope + added[:, :, 0])
    gradient = (slope[:, :, None] * points.phi[:, None]).flatten(1)  # (M, K)
    sums.index_add_(0, blocks.to(sums.device), gradient)


def _build_refit(passes: FeaturePass, blocks: Blocks, sums: Tensor, penalty: float) -> Refit:
    """Store what refitting needs, in one more pass; `sums` are the corrected gradients of the blocks (S, K)."""
    if passes.upsampled and passes.likelihood == "gaussian":
        raise ArgumentError("refit", True, "False for a net that upsamples means and variances")
    raw = torch.zeros_like(sums)
    stored: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    stored_bytes, split = 0, passes.generator.split
    for points in passes.points():
        block = blocks(points.row).to(sums.device)
        _add_gradients(raw, points, points.residual, block)
        stored.append((points.phi[:, : split.width].to(split.head.weight.dtype), points.y, points.weight, block))
        stored_bytes += sum(num_bytes(part) for part in stored[-1])
        if stored_bytes > _MAX_STORED_BYTES:
            expected = f"False for features of more than {_MAX_STORED_BYTES >> 20} MB"
            raise ArgumentError("refit", True, expected, hint="use fewer training rows")
    columns = (torch.cat(parts) for parts in zip(*stored, strict=True))
    tensors = dict(zip(("phi", "y", "weight", "block"), columns, strict=True))
    tensors |= {"sums": sums.view(-1, *passes.theta.shape), "tilts": (sums - raw).view(-1, *passes.theta.shape)}
    # targets at the resolution of the head are already smoothed
    loss = as_loss(nn.CrossEntropyLoss()) if passes.upsampled and passes.likelihood == "softmax" else passes.loss
    return Refit(tensors, penalty, loss)


def _make_correction(
    kind: str, passes: FeaturePass, curvature: FullGGN | KronGGN, gram: Tensor, ridge: float
) -> Callable[[HeadPoints], Tensor]:
    """A function that returns ũ, the residuals of points corrected for leverage: (M, C)."""
    h = curvature.eigenvalues()

    def block(points: HeadPoints, f: Tensor) -> Tensor:
        """LᵀJ f(H) JᵀL, times the point's weight: (M, C, C)."""
        size = max(1, _CHUNK_ELEMENTS // (len(f) * curvature.outputs))
        found = torch.cat([curvature.at(phi, f) for phi in torch.split(points.phi, size)])
        return points.weight[:, None, None] * (points.root.mT @ found @ points.root)

    if kind == "smooth":  # each output has its own noise
        values, vectors = torch.linalg.eigh(gram)
        noise = [NoiseLevel(values.clamp_min(0.0)) for _ in range(curvature.outputs)]
        for points in passes.points():
            factors = 1.0 + block(points, residual_variance_factor(h, ridge)).diagonal(dim1=1, dim2=2)
            for c, level in enumerate(noise):
                level.add(points.phi @ vectors, points.residual[:, c], factors[:, c])

    def correct(points: HeadPoints) -> Tensor:
        if kind == "raw":
            return points.residual
        if kind == "smooth":
            psi = points.phi @ vectors
            return torch.stack([level.correct(psi, points.residual[:, c]) for c, level in enumerate(noise)], 1)
        return leverage_corrected(block(points, ridge_inverse(h, ridge)), points.residual, power=POWERS[kind])

    return correct
