"""Heads refitted under other weights of the data: Newton's method to convergence, for each replicate.

    θ_α = argmin_θ Σᵢ α_{u(i)} ℓ̃ᵢ(θ) + ½λ|θ − θ̂|² − (θ − θ̂)ᵀ Σᵢ ∇ℓ̃ᵢ(θ̂),   ∇ℓ̃ᵢ(θ̂) = −Jᵢᵀ Lᵢ ũᵢ

ℓ̃ is the loss, tilted so that its gradients at θ̂ are the corrected ones; α = 1 gives θ̂ back. For the squared error one
step is all, and blocks need only their sums of φ̃φ̃ᵀ; other losses need the features, which are kept.
"""

from typing import Any

import torch
from torch import Tensor, nn

from neuboots._streaming import num_bytes
from neuboots.losses import Loss, as_loss, build_loss, describe_loss
from neuboots.methods._curvature import Whole, append_ones, working_residuals
from neuboots.methods.influence._passes import FeaturePass, HeadPoints, negative_gradient
from neuboots.methods.influence.leverage import ridge_inverse
from neuboots.weights import Blocks

_HELD = 1 << 28  # bytes that may be kept
_MOST = 3000  # numbers in a system that is solved for each replicate
_STEPS = 100  # of Newton
_TOLERANCE = 1e-10  # of the gradient, by the size of its terms
_PIECE = 1 << 22  # numbers held at once


class BlockGrams(nn.Module):
    """Of a squared error: Σ_{i ∈ block s} wᵢ φ̃ᵢφ̃ᵢᵀ for each block."""

    grams: Tensor  # (S, D̃, D̃)

    def __init__(self, grams: Tensor) -> None:
        super().__init__()
        self.register_buffer("grams", grams)

    def gram(self, alpha: Tensor) -> Tensor:
        return torch.einsum("s,sde->de", alpha, self.grams.to(alpha))


class StoredPoints(nn.Module):
    """All points: features, targets, weights and blocks."""

    phi: Tensor  # in the net's precision: (M, D)
    y: Tensor  # (M,) or (M, ·)
    weight: Tensor  # (M,)
    block: Tensor  # (M,)

    def __init__(self, phi: Tensor, y: Tensor, weight: Tensor, block: Tensor) -> None:
        super().__init__()
        for name, tensor in (("phi", phi), ("y", y), ("weight", weight), ("block", block)):
            self.register_buffer(name, tensor)


class Refit(nn.Module):
    """What refitting needs beside θ̂: the data as Grams or Kept, corrected gradients and their tilts, by block."""

    sums: Tensor  # G̃, the corrected gradients: (S, C, D̃)
    tilts: Tensor  # G̃ − G, what the correction added: (S, C, D̃)

    def __init__(
        self, data: BlockGrams | StoredPoints, sums: Tensor, tilts: Tensor, penalty: float, loss: Loss | None
    ) -> None:
        super().__init__()
        self.data, self.penalty, self.loss = data, penalty, loss  # no loss: the squared error
        self.register_buffer("sums", sums)
        self.register_buffer("tilts", tilts)

    def heads(self, theta: Tensor, alphas: Tensor, first: Tensor) -> Tensor:
        """θ_α around θ̂ (C, D̃) for each row of alphas (B, S), from the one step `first` (B, C, D̃): (B, C, D̃)."""
        alphas, first = alphas.to(theta), first.to(theta)
        if self.loss is None:
            return torch.stack([self._squared(theta, alpha) for alpha in alphas])
        return torch.stack([self._newton(theta, alpha, at) for alpha, at in zip(alphas, first, strict=True)])

    def _squared(self, theta: Tensor, alpha: Tensor) -> Tensor:
        if isinstance(self.data, BlockGrams):
            gram = self.data.gram(alpha)
        else:
            phi, w = self._features(theta), self.data.weight.to(theta) * alpha[self.data.block]
            gram = phi.T @ (w[:, None] * phi)
        slope = torch.einsum("s,scd->cd", alpha - 1.0, self.sums.to(theta))
        return theta + _solved(gram, self.penalty, slope)

    def _features(self, theta: Tensor) -> Tensor:
        assert isinstance(self.data, StoredPoints)
        return append_ones(self.data.phi, theta.shape[1] > self.data.phi.shape[1]).to(theta.device)

    def _newton(self, theta: Tensor, alpha: Tensor, at: Tensor) -> Tensor:
        data, loss = self.data, self.loss
        assert isinstance(data, StoredPoints)
        assert loss is not None
        phi, w = self._features(theta), data.weight.to(theta) * alpha[data.block]
        offset = self.sums.to(theta).sum(0) - torch.einsum("s,scd->cd", alpha, self.tilts.to(theta))

        def slope(at: Tensor) -> tuple[Tensor, float]:
            """The gradient at a head, and the size of its terms."""
            total, size = self.penalty * (at - theta) + offset, offset.abs()
            for some, y, v in self._pieces(theta, phi, w):
                z = some @ at.T
                minus = v[:, None] * negative_gradient(loss, z, y, working_residuals(loss, z, y))
                total, size = total - minus.T @ some, size + minus.abs().T @ some.abs()
            return total, float(size.max())

        gradient, size = slope(at)
        for _ in range(_STEPS):
            if float(gradient.abs().max()) <= _TOLERANCE * size:
                return at
            curvature = Whole(len(theta), theta.shape[1], theta.device)
            for some, y, v in self._pieces(theta, phi, w):
                curvature.add(some, working_residuals(loss, some @ at.T, y).root, v)
            step = -_solved(curvature.matrix, self.penalty, gradient.view(1, -1)).view_as(theta)
            downhill = -float((gradient * step).sum())
            for halvings in range(60):
                following, size = slope(at + 0.5**halvings * step)
                if abs(float((following * step).sum())) < downhill:  # convex along the step: nearer to its bottom
                    break
            else:
                return at  # the gradient is rounding
            at, gradient = at + 0.5**halvings * step, following
        raise ValueError(
            f"the refit of a replicate did not converge in {_STEPS} steps of Newton; expected a loss that is convex in "
            "the outputs: give a larger ridge, or take refit=False"
        )

    def _pieces(self, theta: Tensor, phi: Tensor, w: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        assert isinstance(self.data, StoredPoints)
        size = max(1, _PIECE // (len(theta) * max(theta.shape)))
        y = self.data.y.to(theta.device)
        return list(zip(torch.split(phi, size), torch.split(y, size), torch.split(w, size), strict=True))

    def config(self) -> dict[str, Any]:
        """As JSON, for `empty`."""
        data: dict[str, Any] = {"blocks": len(self.sums)}
        if isinstance(self.data, StoredPoints):
            kinds = {"phi": self.data.phi, "y": self.data.y, "weight": self.data.weight, "block": self.data.block}
            data = {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in kinds.items()}
        loss = None if self.loss is None else describe_loss(self.loss)
        return {"data": data, "blocks": len(self.sums), "penalty": self.penalty, "loss": loss}

    @classmethod
    def empty(cls, config: dict[str, Any], theta: Tensor) -> "Refit":
        """One whose tensors are still to be filled in."""
        options, zeros = config["data"], theta.new_zeros(config["blocks"], *theta.shape)
        data: BlockGrams | StoredPoints = BlockGrams(theta.new_zeros(config["blocks"], theta.shape[1], theta.shape[1]))
        if "phi" in options:
            data = StoredPoints(
                **{k: torch.zeros(shape, dtype=getattr(torch, kind)) for k, (kind, *shape) in options.items()}
            )
        loss = None if config["loss"] is None else build_loss(config["loss"])
        return cls(data, zeros, zeros.clone(), config["penalty"], loss)


def _solved(matrix: Tensor, penalty: float, vectors: Tensor) -> Tensor:
    """(M + λ)⁻¹ v of each row v, for a matrix given by its lower triangle; zero where there is no curvature."""
    shifted = matrix + penalty * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    factor, failed = torch.linalg.cholesky_ex(shifted)
    pivots = factor.diagonal()
    if not int(failed) and float(pivots.min()) > 1e-6 * float(pivots.max()):
        return torch.cholesky_solve(vectors.T, factor).T
    values, basis = torch.linalg.eigh(matrix)
    solved: Tensor = ((vectors @ basis) * ridge_inverse(values.clamp_min(0.0), penalty)) @ basis.T
    return solved


def add_gradients(sums: Tensor, points: HeadPoints, residual: Tensor, blocks: Tensor) -> None:
    """Add wᵢ Jᵢᵀ Lᵢ ũᵢ of these points and residuals ũ (M, C) to the sums of their blocks (S, K)."""
    added = points.root @ (residual - points.residual)[:, :, None]  # what the correction does: (M, C, 1)
    slope = points.weight[:, None] * (points.slope + added[:, :, 0])
    gradient = (slope[:, :, None] * points.phi[:, None]).flatten(1)  # (M, K)
    sums.index_add_(0, blocks.to(sums.device), gradient)


def check_refit(loss: Loss, outputs: int, width: int) -> None:
    """Refuse a head whose system of equations is too large to solve for each replicate."""
    size = width if isinstance(loss, nn.MSELoss) else outputs * width
    if size > _MOST:
        raise ValueError(
            f"got a head of {outputs} × {width} numbers to refit; expected systems of at most {_MOST}: take refit=False"
        )


def build_refit(survey: FeaturePass, blocks: Blocks, sums: Tensor, penalty: float) -> Refit:
    """One more pass, for what refitting keeps; sums are the corrected gradients of the blocks (S, K)."""
    (outputs, width), squared = survey.theta.shape, survey.likelihood == "squared"
    if survey.upsampled and survey.likelihood == "gaussian":
        raise ValueError("got a net that upsamples means and variances; expected one that ends there: take refit=False")
    raw = torch.zeros_like(sums)
    kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    needed, grams = 0, survey.theta.new_zeros(0, width, width)
    small = squared and 8 * blocks.num_blocks * width**2 <= _HELD and blocks.num_blocks * width <= survey.count
    if small:
        grams = survey.theta.new_zeros(blocks.num_blocks, width, width)
    for points in survey.points():
        block = blocks(points.row).to(sums.device)
        add_gradients(raw, points, points.residual, block)
        if small:
            for s in sorted(set(block.tolist())):
                some = points.phi[block == s]
                grams[s] += some.T @ (points.weight[block == s, None] * some)
            continue
        phi = points.phi[:, : survey.generator.split.width].to(survey.generator.split.head.weight.dtype)
        kept.append((phi, points.y, points.weight, block))
        needed += sum(num_bytes(part) for part in kept[-1])
        if needed > _HELD:
            raise ValueError(
                f"refitting has to keep the features of all rows, which need more than {_HELD >> 20} MB; expected "
                "less: take refit=False, give a part of the rows, or fewer blocks for the squared error"
            )
    data = BlockGrams(grams) if small else StoredPoints(*(torch.cat(parts) for parts in zip(*kept, strict=True)))
    shape = (-1, outputs, width)
    # targets at the resolution of the head have been smoothed already
    loss = as_loss(nn.CrossEntropyLoss()) if survey.upsampled and survey.likelihood == "softmax" else survey.loss
    return Refit(data, sums.view(shape), (sums - raw).view(shape), penalty, None if squared else loss)
