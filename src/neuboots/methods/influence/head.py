"""The head of a trained net under other weights of its data, for any number of rows.

    θ_α = θ̂ + H⁻¹ Σ_s (α_s − 1) G_s,   G_s = Σ_{i ∈ block s} wᵢ Jᵢᵀ Lᵢ ũᵢ,   Jᵢ = I ⊗ φ̃ᵢᵀ,   φ̃ = (φ, 1)

A pass over the data gathers H, a second the level of the noise (for `residuals="smooth"`), a last one the block sums G.
What is kept is H⁻¹G, a shift of the head for each block; B heads then are one product, as in eq. 3.1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._streaming import num_bytes
from neuboots.generator import BootstrapGenerator, GeneratorAtInput
from neuboots.head import cast_inputs, copy_net, eval_mode, make_head
from neuboots.loading import dataset_length
from neuboots.methods._base import add_output_axis, load_example
from neuboots.methods._curvature import (
    Curvature,
    Product,
    Whole,
    append_ones,
    check_after_head,
    head_parameters,
    maximize_evidence,
    to_double,
)
from neuboots.methods.influence._passes import FeaturePass, HeadPoints, output_is_head
from neuboots.methods.influence.leverage import POWERS, NoiseLevel, choose_ridge, leverage_corrected, ridge_inverse
from neuboots.methods.influence.predictor import InfluencePredictor
from neuboots.methods.influence.refit import Refit, add_gradients, build_refit, check_refit
from neuboots.methods.neuboots import draw_replicate_weights
from neuboots.prediction import Moments, SampleStream, check_inputs
from neuboots.training import TrainingConfig
from neuboots.weights import (
    Blocks,
    BlockTable,
    HashedBlocks,
    WeightDistribution,
    assign_blocks,
    build_distribution,
    describe_distribution,
)

if TYPE_CHECKING:
    from neuboots.methods.influence.method import InfluenceBootstrap

_WHOLE = 3000  # numbers in the head up to which H is held whole: its square in memory, its cube in time, once
_SHIFTS = 10_000_000  # numbers in all shifts together, beyond which blocks are fewer
_FEWEST, _ENOUGH = 64, 256  # blocks that are always had; blocks from which rows may share them
_MOST_OUTPUTS = 4096  # of a head: each point needs their square
_PIECE = 1 << 22  # numbers held at once


class ShiftedHead(nn.Module):
    """A generator, by how much a unit of each block's weight moves its head, and what refitting needs beside."""

    shifts: Tensor  # H⁻¹G: (S, C, D̃)

    def __init__(self, generator: BootstrapGenerator, shifts: Tensor, refit: Refit | None = None) -> None:
        super().__init__()
        self.generator, self.refit = generator, refit
        self.register_buffer("shifts", shifts)


@dataclass(frozen=True)
class HeadPredictor(InfluencePredictor):
    """B heads around the trained one, from one pass through the features: linear in the weights, or refitted."""

    shifted: ShiftedHead
    weight_distribution: WeightDistribution
    ridge: float  # λ/n
    degrees: float  # of freedom: tr H(H + λ)⁻¹

    @property
    def net(self) -> nn.Module:
        return self.generator.net

    @property
    def module(self) -> nn.Module:
        return self.shifted

    @property
    def generator(self) -> BootstrapGenerator:
        return self.shifted.generator

    @property
    def num_blocks(self) -> int:
        return len(self.shifted.shifts)

    def heads(self, start: int, stop: int, *, seed: int) -> Tensor:
        """θ_b for b in start … stop−1, each a function of (seed, b) alone: (stop − start, C, D̃)."""
        shifts, refit, theta = self.shifted.shifts, self.shifted.refit, head_parameters(self.generator)
        alphas = draw_replicate_weights(self.weight_distribution, self.num_blocks, start, stop, seed)
        moved = (alphas - 1.0).to(shifts) @ shifts.flatten(1)
        heads = theta.to(shifts) + moved.view(-1, *shifts.shape[1:])
        return heads if refit is None else refit.heads(theta, alphas, heads).to(shifts)

    @cached_property
    def _spread(self) -> Tensor:
        """R with Var f_c(x) = |R_c φ̃|²: (C, min(S, D̃), D̃).

        Cov α = (v − c) I + c 11ᵀ is the square of a I + (b − a) 11ᵀ/S with a² = v − c and b² = v + (S − 1) c.
        """
        shifts = to_double(self.shifted.shifts)
        v, c = self.weight_distribution.covariance(self.num_blocks)
        along = math.sqrt(max(0.0, v + (self.num_blocks - 1) * c))  # of Σ_s α_s
        across = math.sqrt(v - c)
        spread = (across * shifts + (along - across) * shifts.mean(0)).movedim(1, 0)  # (C, S, D̃)
        if spread.shape[1] <= spread.shape[2]:
            return spread
        factor: Tensor = torch.linalg.qr(spread, mode="r").R
        return factor

    def _std(self, at: GeneratorAtInput) -> Tensor:
        """The standard deviation of every output of a net that ends at its head: (N, C, *)."""
        axis = self.generator.split.axis
        phi = at.passed.phi.movedim(axis, -1)
        phi = phi if phi.ndim > 1 else phi[None]  # a single row whose axis was squeezed away
        spread = self._spread.to(phi)
        outputs, rank, width = spread.shape
        points = append_ones(phi.flatten(0, -2), width > phi.shape[-1]).to(phi)
        size = max(1, _PIECE // (outputs * rank))
        parts = [(some @ spread.mT).square().sum(2).T for some in torch.split(points, size)]  # (M, C) each
        return torch.cat(parts).sqrt().view(*phi.shape[:-1], outputs).movedim(-1, 1)

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        generator = self.generator
        with eval_mode(generator):
            at = generator.at(cast_inputs(generator, x))
        output = add_output_axis(at.output)
        linear = self.shifted.refit is None and output_is_head(at)
        moments = Moments(output, self._std(at).to(output)) if linear else None
        width = generator.split.width

        def chunks(size: int) -> Iterator[Tensor]:
            for start in range(0, num_samples, size):
                theta = self.heads(start, min(start + size, num_samples), seed=seed).to(at.passed.phi)
                biases = theta[..., width] if theta.shape[-1] > width else None
                samples = at.heads(theta[..., :width], biases)
                yield samples if samples.ndim > 2 else samples[..., None]
                del samples  # the next chunk finds the memory as this one did

        each = num_bytes(output) + 2 * num_bytes(self.shifted.shifts[0])  # a replicate's outputs and its head
        return SampleStream(num_samples, each, chunks, moments)

    def moments(self, x: Any) -> Moments:
        """Exact mean and standard deviation over all replicates (B = ∞); past an upsampling, block by block."""
        check_inputs(x)
        if self.shifted.refit is not None:
            raise ValueError("got refitted heads, whose moments are not known; expected refit=False: use predict")
        generator = self.generator
        with eval_mode(generator), torch.no_grad():
            at = generator.at(cast_inputs(generator, x))
            output = add_output_axis(at.output)
            if output_is_head(at):
                return Moments(output, self._std(at).to(output))
            width, theta = generator.split.width, head_parameters(generator)
            v, c = self.weight_distribution.covariance(self.num_blocks)
            total, squares = torch.zeros_like(output), torch.zeros_like(output)
            for shift in self.shifted.shifts:
                head = (theta + shift)[None].to(at.passed.phi)
                biases = head[..., width] if head.shape[-1] > width else None
                moved = add_output_axis(at.heads(head[..., :width], biases)[0]) - output
                total += moved
                squares += moved.square()
        return Moments(output, ((v - c) * squares + c * total.square()).clamp_min(0.0).sqrt())

    def export(self, b: int, *, seed: int = 0) -> nn.Module:
        """Replicate b of this seed as a plain net: its head has the weights θ_b."""
        split = self.generator.split
        theta = self.heads(b, b + 1, seed=seed)[0].to(split.head.weight)
        bias = theta[:, split.width] if split.head.bias is not None else None
        net = copy_net(self.generator.net)
        parent, _, key = split.name.rpartition(".")
        net.get_submodule(parent)._modules[key] = make_head(theta[:, : split.width].view_as(split.head.weight), bias)
        return net

    def config(self) -> dict[str, Any]:
        return {
            "method": "influence",
            "form": "head",
            "head": self.generator.split.name,
            "num_blocks": self.num_blocks,
            "law": describe_distribution(self.weight_distribution),
            "ridge": self.ridge,
            "degrees": self.degrees,
            "refit": None if self.shifted.refit is None else self.shifted.refit.config(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "HeadPredictor":
        generator = BootstrapGenerator(net, head=config["head"])
        theta = head_parameters(generator)
        shifts = torch.zeros(config["num_blocks"], *theta.shape, dtype=_precision(generator))
        refit = None if config["refit"] is None else Refit.empty(config["refit"], theta)
        shifted = ShiftedHead(generator, shifts, refit).eval()
        return cls(shifted, build_distribution(config["law"]), config["ridge"], config["degrees"])


def _precision(generator: BootstrapGenerator) -> torch.dtype:
    """Of the shifts: the net's own, but no less than single."""
    return torch.promote_types(generator.split.head.weight.dtype, torch.float32)


# -- the set-up ----------------------------------------------------------------------------------------


def build_head_predictor(
    method: "InfluenceBootstrap", net: nn.Module, data: Dataset[Any], config: TrainingConfig
) -> HeadPredictor:
    """The bootstrap of the head of a trained net, from the data it was trained on."""
    generator = check_head(method, net, data, config)
    survey = FeaturePass(generator, method.loss, data, config)
    curvature, gram, ridge, rows = _curvature(method, survey)
    blocks = _blocks(method, survey.theta.numel(), data, config)
    corrected = _Corrected(method, curvature, gram, ridge)
    if method.correction == "smooth":
        for points in survey.points():
            corrected.add(points)
    sums = survey.theta.new_zeros(blocks.num_blocks, survey.theta.numel())  # G: (S, K)
    for points in survey.points():
        add_gradients(sums, points, corrected(points), blocks(points.row))
    inverted = ridge_inverse(curvature.values, ridge)
    shifts = curvature.apply(inverted, sums).view(-1, *survey.theta.shape)
    device = generator.split.head.weight.device
    refit = build_refit(survey, blocks, sums, ridge).to(device) if method.refit else None
    shifted = ShiftedHead(generator, shifts.to(_precision(generator)).to(device), refit)
    return HeadPredictor(shifted, method.weight_distribution, ridge / rows, float((curvature.values * inverted).sum()))


def check_head(
    method: "InfluenceBootstrap", net: nn.Module, data: Dataset[Any], config: TrainingConfig
) -> BootstrapGenerator:
    """Refuse what cannot be done with this net, trained or not; else the net, split at its head."""
    example = load_example(net, data, seed=config.seed)
    generator = BootstrapGenerator(net, head=method.head, example=example)
    try:
        check_after_head(generator, example)
    except ValueError as fault:
        raise ValueError(
            f"{fault}; or move more than the head (layers=2, layers='all') of a net of classes or numbers"
        ) from None
    outputs, width = head_parameters(generator).shape
    if outputs > _MOST_OUTPUTS:
        raise ValueError(
            f"got a head of {outputs} outputs; expected at most {_MOST_OUTPUTS}: their square is needed for each point"
        )
    if method.refit:
        check_refit(method.loss, outputs, width)
    return generator


def _curvature(method: "InfluenceBootstrap", survey: FeaturePass) -> tuple[Curvature, Tensor, float, int]:
    """H, Σ wφ̃φ̃ᵀ, λ and the number of rows: one pass over the data."""
    theta = survey.theta
    outputs, width = theta.shape
    form = Product if survey.likelihood == "squared" or theta.numel() > _WHOLE else Whole
    curvature = form(outputs, width, theta.device)
    gram, along = theta.new_zeros(width, width), theta.new_zeros(outputs, width)
    length = residual = count = 0.0
    for points in survey.points():
        phi, root, w = points.phi, points.root, points.weight
        curvature.add(phi, root, w)
        gram += phi.T @ (w[:, None] * phi)
        target = (root.mT @ points.z[:, :, None])[:, :, 0] + points.residual  # what the linear model fits
        along += ((root @ target[:, :, None])[:, :, 0] * w[:, None]).T @ phi
        length += float(w @ target.square().sum(1))
        residual += float(w @ points.residual.square().sum(1))
        count += outputs * float(w.sum())
    if not survey.rows:
        raise ValueError("got no point that counts: all targets are ignored; expected at least one")
    curvature.settle()
    values = curvature.values
    if not float(values.max()) and float(gram.abs().max()):
        raise ValueError(
            f"got loss={method.loss!r}, which has no curvature in the outputs; expected a loss with a Hessian"
        )
    if method.ridge is not None:
        return curvature, gram, survey.rows * float(method.ridge), survey.rows
    if not survey.continuous:  # Pearson's residuals of rare classes are too long-tailed to tell of the fit
        return curvature, gram, maximize_evidence(values, float(theta.square().sum())), survey.rows
    kept = values > values.max() * 1e-12
    squares = torch.where(kept, curvature.coordinates(along.view(1, -1))[0].square() / values, 0.0)
    rest = max(0.0, length - float(squares.sum()))
    ridge = choose_ridge(values, squares, rest, max(1, round(count)), residual=residual)
    return curvature, gram, ridge, survey.rows


def _blocks(method: "InfluenceBootstrap", size: int, data: Dataset[Any], config: TrainingConfig) -> Blocks:
    """u: a row is a block while rows are no more than the numbers of the head (or 256); else rows are dealt at random.

    Blocks are not stratified by the targets: then they would have the same sum of residuals, and no spread.
    """
    n = dataset_length(data)
    most = max(_FEWEST, min(max(_ENOUGH, size), _SHIFTS // size))
    if method.num_blocks is None and n is not None and n <= most:
        return BlockTable(torch.arange(n), n)
    num_blocks = method.num_blocks or most
    if n is None:
        return HashedBlocks(num_blocks, config.seed)
    return BlockTable(assign_blocks(n, num_blocks, seed=config.seed), num_blocks)


class _Corrected:
    """ũ, the residuals corrected for leverage as the options say."""

    def __init__(self, method: "InfluenceBootstrap", curvature: Curvature, gram: Tensor, ridge: float) -> None:
        self._kind = method.correction
        self._curvature = curvature
        inverted = ridge_inverse(curvature.values, ridge)
        self._hat = inverted
        self._remainder = inverted * (curvature.values * inverted - 2.0)
        values, self._vectors = torch.linalg.eigh(gram)
        outputs = curvature.outputs
        self._noise = [NoiseLevel.along(values.clamp_min(0.0)) for _ in range(outputs)]

    def _block(self, points: HeadPoints, f: Tensor) -> Tensor:
        """LᵀJ f(H) JᵀL, with the point's weight: (M, C, C)."""
        size = max(1, _PIECE // (len(f) * self._curvature.outputs))
        found = torch.cat([self._curvature.at(some, f) for some in torch.split(points.phi, size)])
        return points.weight[:, None, None] * (points.root.mT @ found @ points.root)

    def add(self, points: HeadPoints) -> None:
        """For "smooth": these points tell of the noise around them, each output by itself."""
        left = (1.0 + self._block(points, self._remainder).diagonal(dim1=1, dim2=2)).clamp(0.02, 1.0)
        psi = points.phi @ self._vectors
        for c, noise in enumerate(self._noise):
            noise.add(psi, points.residual[:, c], left[:, c])

    def __call__(self, points: HeadPoints) -> Tensor:
        """(M, C)."""
        if self._kind == "raw":
            return points.residual
        if self._kind == "smooth":
            psi = points.phi @ self._vectors
            return torch.stack([n.correct(psi, points.residual[:, c]) for c, n in enumerate(self._noise)], 1)
        return leverage_corrected(self._block(points, self._hat), points.residual, power=POWERS[self._kind])
