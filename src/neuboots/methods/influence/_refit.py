"""Heads refitted under other weights of the data: Newton's method to convergence for each replicate.

    θ_α = argmin_θ Σᵢ α_{u(i)} ℓ̃ᵢ(θ) + ½λ|θ − θ̂|² − (θ − θ̂)ᵀ Σᵢ ∇ℓ̃ᵢ(θ̂),   ∇ℓ̃ᵢ(θ̂) = −Jᵢᵀ Lᵢ ũᵢ

ℓ̃ is the loss, tilted so that its gradients at θ̂ are the corrected ones; α = 1 gives θ̂ back. The features are stored.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from neuboots._validation import ArgumentError
from neuboots.losses import Loss, as_loss, build_loss, describe_loss
from neuboots.methods._base import describe_tensors, make_tensors
from neuboots.methods._curvature import FullGGN, append_ones, working_residuals
from neuboots.methods._head_points import FeaturePass, HeadPoints
from neuboots.methods.influence._leverage import ridge_inverse
from neuboots.prediction import num_bytes
from neuboots.weights import Blocks

_MAX_STORED_BYTES = 1 << 28
MAX_SYSTEM_SIZE = 3000  # unknowns of the linear system that is solved for each replicate
_MAX_STEPS = 100
_TOLERANCE = 1e-10  # of the gradient, relative to the size of its terms
_CHUNK_ELEMENTS = 1 << 22


class Refit(nn.Module):
    """What refitting needs besides θ̂.

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

        def gradient_at(at: Tensor) -> tuple[Tensor, float]:
            """The gradient at a head, and the size of its terms."""
            total, size = self.penalty * (at - theta) + offset, offset.abs()
            for phi, y, w in chunks:
                z = phi @ at.T
                slope = w[:, None] * working_residuals(loss, z, y).slope
                total, size = total - slope.T @ phi, size + slope.abs().T @ phi.abs()
            return total, float(size.max())

        gradient, scale = gradient_at(at)
        for _ in range(_MAX_STEPS):
            if float(gradient.abs().max()) <= _TOLERANCE * scale:
                return at
            curvature = FullGGN(*theta.shape).to(theta.device)
            for phi, y, w in chunks:
                curvature.add_roots(phi, working_residuals(loss, phi @ at.T, y).root, w)
            step = -_solve(curvature, self.penalty, gradient.view(1, -1)).view_as(theta)
            downhill = -float((gradient * step).sum())
            for halvings in range(60):
                following, scale = gradient_at(at + 0.5**halvings * step)
                if abs(float((following * step).sum())) < downhill:  # convex along the step: closer to the minimum
                    break
            else:
                return at  # the gradient is rounding error
            at, gradient = at + 0.5**halvings * step, following
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


def add_gradients(sums: Tensor, points: HeadPoints, residual: Tensor, blocks: Tensor) -> None:
    """Add wᵢ Jᵢᵀ Lᵢ ũᵢ of these points and residuals ũ (M, C) to the sums of their blocks (S, K)."""
    added = points.root @ (residual - points.residual)[:, :, None]  # by the correction: (M, C, 1)
    slope = points.weight[:, None] * (points.slope + added[:, :, 0])
    gradient = (slope[:, :, None] * points.phi[:, None]).flatten(1)  # (M, K)
    sums.index_add_(0, blocks.to(sums.device), gradient)


def build_refit(passes: FeaturePass, blocks: Blocks, sums: Tensor, penalty: float) -> Refit:
    """Store what refitting needs, in one more pass; `sums` are the corrected gradients of the blocks (S, K)."""
    if passes.upsampled and passes.likelihood == "gaussian":
        raise ArgumentError("refit", True, "False for a net that upsamples means and variances")
    raw = torch.zeros_like(sums)
    stored: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    stored_bytes, split = 0, passes.generator.split
    for points in passes.points():
        block = blocks(points.row).to(sums.device)
        add_gradients(raw, points, points.residual, block)
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
