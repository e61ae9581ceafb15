"""A loss as a least-squares problem around the outputs of a trained net.

    Λᵢ = ∂²ℓᵢ/∂z² = Lᵢ Lᵢᵀ,   −∂ℓᵢ/∂z = Lᵢ uᵢ

With rows LᵢᵀJᵢ and residuals uᵢ, one step of Newton for a weighted loss is a ridge regression. For the squared error
(its half) L = I and u = y − z; for classes u are Pearson's residuals.
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from neuboots.losses import GaussianNLL, Loss
from neuboots.methods.last_layer import likelihood_of

_LEAST_P = 1e-7  # of a class, in its residual
_LEAST_CURVATURE = 1e-6  # of the largest: where a loss is straight (Huber's) its slope still counts


class Working(NamedTuple):
    """L and u at M points of C outputs."""

    root: Tensor  # L: (M, C, C)
    residual: Tensor  # u: (M, C)


def working(loss: Loss, z: Tensor, y: Tensor) -> Working:
    """L and u of a loss at outputs z (M, C) and targets y, one for each point, in double precision.

    A loss whose curvature is not known in closed form is differentiated twice; where it is not convex in the outputs
    its curvature counts as next to nothing.
    """
    z = z.double()
    if isinstance(loss, GaussianNLL):
        return _gaussian(loss.beta, z, y)
    try:
        likelihood = likelihood_of(loss)
    except ValueError:
        return _differentiated(loss, z, y)
    if likelihood == "squared":
        return Working(torch.eye(z.shape[1], dtype=z.dtype, device=z.device).expand(len(z), -1, -1), _like(y, z) - z)
    if likelihood == "softmax":
        p = z.softmax(1).clamp_min(_LEAST_P)
        smooth = getattr(loss, "label_smoothing", 0.0)
        hard = y if y.is_floating_point() else torch.nn.functional.one_hot(y.long(), z.shape[1])  # torch takes both
        target = hard.to(z) * (1 - smooth) + smooth / z.shape[1]
        q = p.sqrt()
        # diag(p) − ppᵀ = L Lᵀ with L = diag(q)(I − qqᵀ); −∂ℓ/∂z = target − p sums to zero, so u = (target − p)/q
        return Working(torch.diag_embed(q) - p[:, :, None] * q[:, None], (target - z.softmax(1)) / q)
    p = z.sigmoid()
    root = (p * (1.0 - p)).clamp_min(_LEAST_P).sqrt()
    return Working(torch.diag_embed(root), (_like(y, z) - p) / root)


def _gaussian(beta: float, z: Tensor, y: Tensor) -> Working:
    """Of k means and k values of log σ², by Fisher's information (1/σ², ½); β counts a point σ^(2β) times."""
    mean, raw = z.chunk(2, 1)
    log_variance = raw.clamp_min(-12.0)  # the floor of the loss, below which nothing moves
    standardised = (_like(y, mean) - mean) * (-0.5 * log_variance).exp()
    half = 0.5**0.5 * (raw >= -12.0).to(z)
    root = torch.cat([(-0.5 * log_variance).exp(), half], 1)
    residual = torch.cat([standardised, half * (standardised.square() - 1.0)], 1)
    weight = (0.5 * beta * log_variance).exp().repeat(1, 2)
    return Working(torch.diag_embed(weight * root), weight * residual)


def _like(y: Tensor, z: Tensor) -> Tensor:
    return y.reshape(z.shape).to(z)


def losses_of(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    """ℓ of each point, at outputs z (M, C), whatever shape and precision the loss asks for.

    A net may give (N,), and its loss expect that: against targets (M,) outputs (M, 1) would be broadcast. A loss may
    also hold numbers in single precision, such as weights of classes, which torch does not mix with double.
    """
    single = z.shape[1] == 1 and y.shape == z.shape[:1]
    shapes = [z, z[:, 0]] if single else [z]
    refused: Exception | None = None
    for outputs in [*shapes, *(shape.float() for shape in shapes if shape.dtype == torch.float64)]:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Using a target size")  # of the shape that is tried in vain
                losses = loss(outputs, y.to(outputs) if y.is_floating_point() else y)
        except (RuntimeError, ValueError) as error:
            refused = refused or error
            continue
        if not single or losses.numel() == len(z) or outputs.ndim == 1:
            return losses
    assert refused is not None, "the last shape is returned unless it is refused"
    raise refused


def loss_slope(loss: Loss, z: Tensor, y: Tensor, *, graph: bool = False) -> Tensor:
    """∂ℓ/∂z at outputs z that ask for gradients, by differentiation: (M, C), as points know nothing of others."""
    (found,) = torch.autograd.grad(losses_of(loss, z, y).sum(), z, create_graph=graph)
    return found


def _differentiated(loss: Loss, z: Tensor, y: Tensor) -> Working:
    with torch.inference_mode(False), torch.enable_grad():
        z = z.detach().clone().requires_grad_()
        first = loss_slope(loss, z, y, graph=True)
        try:
            columns = [
                torch.autograd.grad(part.sum(), z, retain_graph=True, materialize_grads=True)[0]
                for part in (first.unbind(1) if first.requires_grad else ())
            ]
        except RuntimeError as fault:
            raise ValueError(
                f"got loss={loss!r}, which cannot be differentiated twice ({fault}); expected a loss with a Hessian in "
                "the outputs, such as CrossEntropy or SquaredError"
            ) from None
    first = first.detach()
    curvature = torch.stack(columns, 2) if columns else torch.diag_embed(torch.zeros_like(first))  # (M, C, C)
    values, vectors = torch.linalg.eigh(curvature)
    most = float(values.max()) if len(values) else 1.0
    if not most > 0.0:
        raise ValueError(
            "got a loss whose second derivative is nowhere positive; expected one with curvature, such as the squared "
            "error: an absolute error has none"
        )
    root = values.clamp_min(_LEAST_CURVATURE * most).sqrt()
    return Working(vectors * root[:, None], torch.einsum("mck,mc->mk", vectors, -first) / root)
