"""What methods around the head of a trained net share: θ̂ and φ̃, what its loss is, what may follow the head.

    f(x) = θ̂ φ̃(x),   φ̃ = (φ, 1)

Everything is in double precision, and some rows at a time.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from neuboots.generator import BootstrapGenerator, GeneratorAt
from neuboots.losses import BinaryCrossEntropy, CrossEntropy, GaussianNLL, Loss, SquaredError
from neuboots.surgery import eval_mode, to_net
from neuboots.training import Recipe

Likelihood = Literal["softmax", "bernoulli", "squared", "gaussian"]
_LOG_PRECISION = 30.0  # |log τ| that the search stays within


def likelihood_of(loss: Loss) -> Likelihood:
    """What the loss is the negative logarithm of, or a sentence."""
    weighted = getattr(loss, "weight", None) is not None or getattr(loss, "pos_weight", None) is not None
    if isinstance(loss, CrossEntropy | nn.CrossEntropyLoss) and not weighted:
        return "softmax"
    if isinstance(loss, BinaryCrossEntropy | nn.BCEWithLogitsLoss) and not weighted:
        return "bernoulli"
    if isinstance(loss, SquaredError | nn.MSELoss):
        return "squared"
    if isinstance(loss, GaussianNLL) and not loss.beta:
        return "gaussian"
    raise ValueError(
        f"got loss={loss!r}, whose curvature is not known here; expected CrossEntropy, BinaryCrossEntropy, "
        "SquaredError or GaussianNLL, or torch's own without class weights"
    )


def double(tensor: Tensor) -> Tensor:
    """In double precision; on the CPU where the device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def head_of(generator: BootstrapGenerator) -> Tensor:
    """θ̂, the head's weights and bias: (C, D̃)."""
    head = generator.split.head
    weight = double(head.weight.detach()).flatten(1)
    return weight if head.bias is None else torch.cat([weight, double(head.bias.detach())[:, None]], 1)


def extended(phi: Tensor, biased: bool) -> Tensor:
    """φ̃ of points φ: (M, D) → (M, D̃)."""
    phi = double(phi)
    return torch.cat([phi, torch.ones_like(phi[:, :1])], 1) if biased else phi


def best_precision(h: Tensor, size: float) -> float:
    """The τ of the largest evidence: where τ |θ̂|² = Σ_k h_k / (h_k + τ), whose sides cross once (MacKay 1992).

    h are the eigenvalues of the curvature of a negative log-likelihood, `size` is |θ̂|².

    >>> round(best_precision(torch.tensor([1.0]), 0.5), 3)
    1.0
    """
    if float(h.max()) == 0.0:
        return 1.0  # the data say nothing
    low, high = -_LOG_PRECISION, _LOG_PRECISION
    for _ in range(80):
        middle = 0.5 * (low + high)
        tau = math.exp(middle)
        low, high = (middle, high) if tau * size < float((h / (h + tau)).sum()) else (low, middle)
    return math.exp(0.5 * (low + high))


def point_weights(at: GeneratorAt, mask: Tensor | None) -> Tensor:
    """How much each point of the head counts: its own output, or its share of the outputs it is upsampled to: (M,)."""
    phi, split = at.passed.phi, at.generator.split
    points = phi.movedim(split.axis, -1).flatten(1, -2) if phi.ndim > 2 else phi[:, None]  # (N, P, D)
    if at.passed.ends_at_head:
        return torch.ones(points.shape[:2]).flatten() if mask is None else mask.flatten()
    pixels = at.output.shape[2:].numel()
    counted = torch.full((len(phi),), pixels) if mask is None else mask.flatten(1).sum(1)
    return (counted / points.shape[1]).repeat_interleave(points.shape[1])


def shown(batches: Iterable[Any], total: int, recipe: Recipe, what: str = "curvature") -> Iterable[Any]:
    """The same batches under a progress bar."""
    if not recipe.progress:
        return batches
    from rich import get_console
    from rich.progress import track

    return track(batches, what, total, transient=True, disable=not get_console().is_terminal)


def check_finish(generator: BootstrapGenerator, example: Any) -> None:
    """What follows the head must be nothing, or upsampling: then Λ at the head is that of the loss.

    Upsampling keeps what is the same everywhere, is linear, gives no fewer points than it gets, and uses all of them.
    """
    with eval_mode(generator), torch.no_grad():
        at = generator.at(to_net(generator, example))
        if len(at.passed.phi) != len(at.output):
            raise ValueError(
                f"the features of {len(at.output)} inputs have {len(at.passed.phi)} rows; expected the batch on the "
                "first axis of what reaches the head"
            )
        if at.passed.ends_at_head:
            return
        head = generator.split.head
        weight = head.weight.flatten(1)  # (C, D)
        bias = weight.new_zeros(len(weight)) if head.bias is None else head.bias
        constant = torch.arange(1.0, len(weight) + 1).to(weight)
        found = at.heads(torch.stack([0 * weight, weight, -weight]), torch.stack([constant, bias, constant - bias]))
        found = found if found.ndim > 2 else found[..., None]  # (3, N, C, *)
        z = head(at.passed.phi)
        kept = found.shape[2] == len(constant) and torch.allclose(
            found[0], constant.view(-1, *[1] * (found.ndim - 3)).expand_as(found[0]), rtol=1e-3, atol=1e-3
        )
        if not (kept and torch.allclose(found[2], found[0] - found[1], rtol=1e-3, atol=1e-3)):
            raise ValueError(
                f"the net does more than upsample after its head {generator.split.name!r}, so the curvature there is "
                "not that of the loss; expected outputs as the head gives them: move the rest into the loss, or end "
                "the net at its head"
            )
    points, pixels = z[0].numel() // len(weight), found.shape[3:].numel()
    if pixels < points or not _reaches(at, z):
        raise ValueError(
            f"the net pools, selects or crops after its head {generator.split.name!r} ({points} points of a row become "
            f"{pixels} outputs), so the curvature there is not that of the loss; expected every point of the head in "
            "the output: pool, select or crop the features, before the head"
        )


def _reaches(at: GeneratorAt, z: Tensor) -> bool:
    """Whether every number of the head's output z moves the net's output."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = z.detach().clone().requires_grad_()
        output = at.passed.finish(leaf)
        slopes = torch.linspace(1.0, 2.0, output.numel()).to(output).view_as(output)  # of one sign, none like another
        (moved,) = torch.autograd.grad((slopes * output).sum(), leaf)
    return bool((moved != 0).all())
