"""What methods around the head of a trained net share: θ̂ and φ̃, what its loss is, what may follow the head.

    f(x) = θ̂ φ̃(x),   φ̃ = (φ, 1)

Everything is in double precision, and some rows at a time.

A loss as a least-squares problem around the outputs of a trained net.

    Λᵢ = ∂²ℓᵢ/∂z² = Lᵢ Lᵢᵀ,   −∂ℓᵢ/∂z = Lᵢ uᵢ

With rows LᵢᵀJᵢ and residuals uᵢ, one step of Newton for a weighted loss is a ridge regression. For the squared error
(its half) L = I and u = y − z; for classes u are Pearson's residuals.

The Gauss–Newton matrix of a head, Σᵢ wᵢ Jᵢᵀ Λᵢ Jᵢ with Jᵢ = I ⊗ φ̃ᵢᵀ: whole, or as a Kronecker product.

Each form gives its eigenvalues and, for a function f of them, what f(H) does to vectors and at points. Weights of the
head are ordered output by output: K = C·D̃.
"""

import math
import warnings
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from neuboots.generator import BootstrapGenerator, GeneratorAtInput
from neuboots.head import cast_inputs, eval_mode
from neuboots.losses import GaussianNLL, Loss, as_loss
from neuboots.training import TrainingConfig

Likelihood = Literal["softmax", "bernoulli", "squared", "gaussian"]
_LOG_PRECISION = 30.0  # |log τ| that the search stays within


def infer_likelihood(loss: Loss) -> Likelihood:
    """What the loss is the negative logarithm of, or a sentence."""
    weighted = getattr(loss, "weight", None) is not None or getattr(loss, "pos_weight", None) is not None
    if isinstance(loss, nn.CrossEntropyLoss) and not weighted:
        return "softmax"
    if isinstance(loss, nn.BCEWithLogitsLoss) and not weighted:
        return "bernoulli"
    if isinstance(loss, nn.MSELoss):
        return "squared"
    if isinstance(loss, GaussianNLL) and not loss.beta:
        return "gaussian"
    raise ValueError(
        f"got loss={loss!r}, whose curvature is not known here; expected nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, "
        "nn.MSELoss or GaussianNLL without class weights"
    )


def to_double(tensor: Tensor) -> Tensor:
    """In double precision; on the CPU where the device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def head_parameters(generator: BootstrapGenerator) -> Tensor:
    """θ̂, the head's weights and bias: (C, D̃)."""
    head = generator.split.head
    weight = to_double(head.weight.detach()).flatten(1)
    return weight if head.bias is None else torch.cat([weight, to_double(head.bias.detach())[:, None]], 1)


def append_ones(phi: Tensor, biased: bool) -> Tensor:
    """φ̃ of points φ: (M, D) → (M, D̃)."""
    phi = to_double(phi)
    return torch.cat([phi, torch.ones_like(phi[:, :1])], 1) if biased else phi


def maximize_evidence(h: Tensor, size: float) -> float:
    """The τ of the largest evidence: where τ |θ̂|² = Σ_k h_k / (h_k + τ), whose sides cross once (MacKay 1992).

    h are the eigenvalues of the curvature of a negative log-likelihood, `size` is |θ̂|².

    >>> round(maximize_evidence(torch.tensor([1.0]), 0.5), 3)
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


def point_weights(at: GeneratorAtInput, mask: Tensor | None) -> Tensor:
    """How much each point of the head counts: its own output, or its share of the outputs it is upsampled to: (M,)."""
    phi, split = at.passed.phi, at.generator.split
    points = phi.movedim(split.axis, -1).flatten(1, -2) if phi.ndim > 2 else phi[:, None]  # (N, P, D)
    if at.passed.ends_at_head:
        return torch.ones(points.shape[:2]).flatten() if mask is None else mask.flatten()
    pixels = at.output.shape[2:].numel()
    counted = torch.full((len(phi),), pixels) if mask is None else mask.flatten(1).sum(1)
    return (counted / points.shape[1]).repeat_interleave(points.shape[1])


def track_progress(
    batches: Iterable[Any], total: int, config: TrainingConfig, what: str = "curvature"
) -> Iterable[Any]:
    """The same batches under a progress bar."""
    if not config.progress:
        return batches
    from rich import get_console
    from rich.progress import track

    return track(batches, what, total, transient=True, disable=not get_console().is_terminal)


def check_after_head(generator: BootstrapGenerator, example: Any) -> None:
    """What follows the head must be nothing, or upsampling: then Λ at the head is that of the loss.

    Upsampling keeps what is the same everywhere, is linear, gives no fewer points than it gets, and uses all of them.
    """
    with eval_mode(generator), torch.no_grad():
        at = generator.at(cast_inputs(generator, example))
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


def _reaches(at: GeneratorAtInput, z: Tensor) -> bool:
    """Whether every number of the head's output z moves the net's output."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = z.detach().clone().requires_grad_()
        output = at.passed.finish(leaf)
        slopes = torch.linspace(1.0, 2.0, output.numel()).to(output).view_as(output)  # of one sign, none like another
        (moved,) = torch.autograd.grad((slopes * output).sum(), leaf)
    return bool((moved != 0).all())


def output_hessian(likelihood: Likelihood, z: Tensor) -> tuple[Tensor, Tensor | None]:
    """Λ = diag(s) − q qᵀ at outputs z, as s and q: (M, C) each; no q where Λ is diagonal.

    Softmax: s = q = p. Bernoulli: s = p (1 − p). Squared error: s = 1, to be divided by σ². Gaussian: the Fisher
    information of (μ, log σ²), s = (1/σ², ½), and none for a log σ² below the floor of its loss.
    """
    if likelihood == "softmax":
        p = z.softmax(1)
        return p, p
    if likelihood == "bernoulli":
        p = z.sigmoid()
        return p * (1.0 - p), None
    if likelihood == "squared":
        return torch.ones_like(z), None
    log_variance = z.chunk(2, 1)[1]
    floored = log_variance.clamp_min(-12.0)
    return torch.cat([(-floored).exp(), 0.5 * (log_variance >= floored)], 1), None


class FullGGN(nn.Module):
    """Σᵢ wᵢ Jᵢᵀ Λᵢ Jᵢ = U diag(h) Uᵀ, whole, with the weights ordered output by output."""

    values: Tensor  # h: (K,), K = C·D̃
    vectors: Tensor  # U: (K, K); the sum itself until `settle`

    def __init__(self, outputs: int, width: int) -> None:
        super().__init__()
        self.outputs, self.width = outputs, width
        self.register_buffer("values", torch.zeros(outputs * width, dtype=torch.float64))
        self.register_buffer("vectors", torch.zeros(outputs * width, outputs * width, dtype=torch.float64))

    def add(self, phi: Tensor, s: Tensor, q: Tensor | None, w: Tensor) -> None:
        """More points: features φ̃ (M, D̃), the parts of Λ (M, C), weights (M,)."""
        blocks = self.vectors.view(self.outputs, self.width, self.outputs, self.width).diagonal(dim1=0, dim2=2)
        blocks += torch.einsum("md,mc,me->dec", phi, w[:, None] * s, phi)  # (D̃, D̃, C)
        if q is not None:
            J = ((w.sqrt()[:, None] * q)[:, :, None] * phi[:, None]).flatten(1)  # (M, K)
            self.vectors -= J.T @ J

    def settle(self, scale: float) -> None:
        """Nothing more to add: the sum, times `scale`, becomes its eigenvalues and eigenvectors."""
        values, vectors = torch.linalg.eigh(self.vectors)
        # laid out as in a predictor that was read from a file, whose products then round alike
        self.values, self.vectors = (scale * values).clamp_min(0.0), vectors.contiguous()

    def eigenvalues(self) -> Tensor:
        return to_double(self.values)

    def _root(self, precision: float) -> tuple[Tensor, Tensor]:
        """P^{−1/2}, as U and the diagonal, in double precision whatever the net was cast to."""
        return to_double(self.vectors), (self.eigenvalues() + precision).rsqrt()

    def deviations(self, noise: Tensor, precision: float) -> Tensor:
        """P^{−1/2} on noise (B, K): (B, C, D̃)."""
        vectors, root = self._root(precision)
        return ((noise * root) @ vectors.T).view(-1, self.outputs, self.width)

    def variance(self, phi: Tensor, precision: float) -> Tensor:
        """φ̃ᵀ P⁻¹ φ̃ for each point and output: (M, C)."""
        vectors, diagonal = self._root(precision)
        root = (vectors * diagonal).view(self.outputs, self.width, -1)  # (C, D̃, K)
        if len(phi) <= self.width:
            return (phi @ root).square().sum(2).T
        return ((phi @ (root @ root.mT)) * phi).sum(2).T.clamp_min(0.0)


class KronGGN(nn.Module):
    """Σᵢ wᵢ Jᵢᵀ Λᵢ Jᵢ ≈ G ⊗ A: the Kronecker product with the same partial traces.

        A = Σᵢ wᵢ tr(Λᵢ) φ̃ᵢφ̃ᵢᵀ,   G = Σᵢ wᵢ |φ̃ᵢ|² Λᵢ / tr A

    It is exact wherever the sum is a Kronecker product: one output, the same Λᵢ everywhere, or the same φ̃ᵢ.
    """

    inner: Tensor  # eigenvalues of A: (D̃,)
    inner_vectors: Tensor  # (D̃, D̃); A itself until `settle`
    outer: Tensor  # eigenvalues of G: (C,)
    outer_vectors: Tensor  # (C, C); G tr A until `settle`

    def __init__(self, outputs: int, width: int) -> None:
        super().__init__()
        for name, size in (("inner", width), ("outer", outputs)):
            self.register_buffer(name, torch.zeros(size, dtype=torch.float64))
            self.register_buffer(f"{name}_vectors", torch.zeros(size, size, dtype=torch.float64))

    def add(self, phi: Tensor, s: Tensor, q: Tensor | None, w: Tensor) -> None:
        """More points: features φ̃ (M, D̃), the parts of Λ (M, C), weights (M,)."""
        trace = s.sum(1) if q is None else s.sum(1) - q.square().sum(1)
        self.inner_vectors += phi.T @ ((w * trace)[:, None] * phi)
        v = w * phi.square().sum(1)
        self.outer_vectors += torch.diag(v @ s)
        if q is not None:
            self.outer_vectors -= q.T @ (v[:, None] * q)

    def settle(self, scale: float) -> None:
        """Nothing more to add: the sums become their eigenvalues and eigenvectors."""
        total = self.inner_vectors.trace().clamp_min(torch.finfo(torch.float64).tiny)
        inner, inner_vectors = torch.linalg.eigh(self.inner_vectors)
        outer, outer_vectors = torch.linalg.eigh(self.outer_vectors)
        self.inner_vectors, self.outer_vectors = inner_vectors.contiguous(), outer_vectors.contiguous()  # as in a file
        self.inner, self.outer = (scale * inner).clamp_min(0.0), (outer / total).clamp_min(0.0)

    def _grid(self) -> Tensor:
        """In double precision, whatever the net was cast to."""
        return to_double(self.outer)[:, None] * to_double(self.inner)  # (C, D̃)

    def eigenvalues(self) -> Tensor:
        return self._grid().flatten()

    def deviations(self, noise: Tensor, precision: float) -> Tensor:
        """P^{−1/2} on noise (B, K): (B, C, D̃)."""
        scaled = noise.view(-1, len(self.outer), len(self.inner)) * (self._grid() + precision).rsqrt()
        return to_double(self.outer_vectors) @ scaled @ to_double(self.inner_vectors).T

    def variance(self, phi: Tensor, precision: float) -> Tensor:
        """φ̃ᵀ P⁻¹ φ̃ for each point and output: (M, C)."""
        along = (phi @ to_double(self.inner_vectors)).square() @ (self._grid() + precision).reciprocal().T  # (M, C)
        return along @ to_double(self.outer_vectors).square().T


_LEAST_P = 1e-7  # of a class, in its residual
_LEAST_CURVATURE = 1e-6  # of the largest: where a loss is straight (Huber's) its slope still counts


class WorkingModel(NamedTuple):
    """L and u at M points of C outputs."""

    root: Tensor  # L: (M, C, C)
    residual: Tensor  # u: (M, C)


def working_residuals(loss: Loss, z: Tensor, y: Tensor) -> WorkingModel:
    """L and u of a loss at outputs z (M, C) and targets y, one for each point, in double precision.

    A loss whose curvature is not known in closed form is differentiated twice; where it is not convex in the outputs
    its curvature counts as next to nothing.
    """
    z = z.double()
    if isinstance(loss, GaussianNLL):
        return _gaussian(loss.beta, z, y)
    try:
        likelihood = infer_likelihood(loss)
    except ValueError:
        return _differentiated(loss, z, y)
    if likelihood == "squared":
        return WorkingModel(
            torch.eye(z.shape[1], dtype=z.dtype, device=z.device).expand(len(z), -1, -1), _like(y, z) - z
        )
    if likelihood == "softmax":
        p = z.softmax(1).clamp_min(_LEAST_P)
        smooth = getattr(loss, "label_smoothing", 0.0)
        hard = y if y.is_floating_point() else torch.nn.functional.one_hot(y.long(), z.shape[1])  # torch takes both
        target = hard.to(z) * (1 - smooth) + smooth / z.shape[1]
        q = p.sqrt()
        # diag(p) − ppᵀ = L Lᵀ with L = diag(q)(I − qqᵀ); −∂ℓ/∂z = target − p sums to zero, so u = (target − p)/q
        return WorkingModel(torch.diag_embed(q) - p[:, :, None] * q[:, None], (target - z.softmax(1)) / q)
    p = z.sigmoid()
    root = (p * (1.0 - p)).clamp_min(_LEAST_P).sqrt()
    return WorkingModel(torch.diag_embed(root), (_like(y, z) - p) / root)


def _gaussian(beta: float, z: Tensor, y: Tensor) -> WorkingModel:
    """Of k means and k values of log σ², by Fisher's information (1/σ², ½); β counts a point σ^(2β) times."""
    mean, raw = z.chunk(2, 1)
    log_variance = raw.clamp_min(-12.0)  # the floor of the loss, below which nothing moves
    standardised = (_like(y, mean) - mean) * (-0.5 * log_variance).exp()
    half = 0.5**0.5 * (raw >= -12.0).to(z)
    root = torch.cat([(-0.5 * log_variance).exp(), half], 1)
    residual = torch.cat([standardised, half * (standardised.square() - 1.0)], 1)
    weight = (0.5 * beta * log_variance).exp().repeat(1, 2)
    return WorkingModel(torch.diag_embed(weight * root), weight * residual)


def _like(y: Tensor, z: Tensor) -> Tensor:
    return y.reshape(z.shape).to(z)


def pointwise_losses(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    """ℓ of each point, at outputs z (M, C), whatever shape and precision the loss asks for.

    A net may give (N,), and its loss expect that: against targets (M,) outputs (M, 1) would be broadcast. A loss may
    also hold numbers in single precision, such as weights of classes, which torch does not mix with double.
    """
    loss = as_loss(loss)
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


def loss_gradient(loss: Loss, z: Tensor, y: Tensor, *, graph: bool = False) -> Tensor:
    """∂ℓ/∂z at outputs z that ask for gradients, by differentiation: (M, C), as points know nothing of others."""
    (found,) = torch.autograd.grad(pointwise_losses(loss, z, y).sum(), z, create_graph=graph)
    return found


def _differentiated(loss: Loss, z: Tensor, y: Tensor) -> WorkingModel:
    with torch.inference_mode(False), torch.enable_grad():
        z = z.detach().clone().requires_grad_()
        first = loss_gradient(loss, z, y, graph=True)
        try:
            columns = [
                torch.autograd.grad(part.sum(), z, retain_graph=True, materialize_grads=True)[0]
                for part in (first.unbind(1) if first.requires_grad else ())
            ]
        except RuntimeError as fault:
            raise ValueError(
                f"got loss={loss!r}, which cannot be differentiated twice ({fault}); expected a loss with a Hessian in "
                "the outputs, such as nn.CrossEntropyLoss or nn.MSELoss"
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
    return WorkingModel(vectors * root[:, None], torch.einsum("mck,mc->mk", vectors, -first) / root)


class Whole:
    """H = U diag(h) Uᵀ, held whole: K² numbers, and K² products for each point."""

    def __init__(self, outputs: int, width: int, device: torch.device) -> None:
        self.outputs, self.width = outputs, width
        self._sum = torch.zeros(outputs * width, outputs * width, dtype=torch.float64, device=device)
        self.values = self._sum[0]
        self._vectors = self._sum

    def add(self, phi: Tensor, root: Tensor, w: Tensor) -> None:
        """More points: features φ̃ (M, D̃), roots L of Λ (M, C, C), weights (M,)."""
        curvature = w[:, None, None] * (root @ root.mT)
        places = self._sum.view(self.outputs, self.width, self.outputs, self.width)
        for c in range(self.outputs):  # the lower triangle, which is all that `eigh` reads
            some = (curvature[:, c, : c + 1, None] * phi[:, None]).flatten(1)  # (M, (c + 1)·D̃)
            places[c, :, : c + 1] += (phi.T @ some).view(self.width, c + 1, self.width)

    @property
    def matrix(self) -> Tensor:
        """The sum so far, of which the lower triangle counts: (K, K)."""
        return self._sum

    def settle(self) -> None:
        """Nothing more to add: the sum becomes its eigenvalues and eigenvectors."""
        values, self._vectors = torch.linalg.eigh(self._sum)
        self.values = values.clamp_min(0.0)

    def coordinates(self, vectors: Tensor) -> Tensor:
        """Uᵀ v of each row v: (·, K) → (·, K)."""
        return vectors @ self._vectors

    def apply(self, f: Tensor, vectors: Tensor) -> Tensor:
        """f(H) v of each row v: (·, K) → (·, K)."""
        return (self.coordinates(vectors) * f) @ self._vectors.T

    def at(self, phi: Tensor, f: Tensor) -> Tensor:
        """J f(H) Jᵀ at each point: (M, C, C)."""
        along = (phi @ self._vectors.view(self.outputs, self.width, -1)).movedim(0, 1)  # J U: (M, C, K)
        return (along * f) @ along.mT


class Product:
    """H ≈ G ⊗ A, the Kronecker product with the same partial traces: C² + D̃² numbers.

        A = Σᵢ wᵢ tr(Λᵢ) φ̃ᵢφ̃ᵢᵀ,   G = Σᵢ wᵢ |φ̃ᵢ|² Λᵢ / tr A

    It is exact where all Λᵢ are the same, as for the squared error. Ritter, Botev and Barber, A scalable Laplace
    approximation for neural networks, ICLR 2018.
    """

    def __init__(self, outputs: int, width: int, device: torch.device) -> None:
        self.outputs, self.width = outputs, width
        self._inner = torch.zeros(width, width, dtype=torch.float64, device=device)
        self._outer = torch.zeros(outputs, outputs, dtype=torch.float64, device=device)
        self.values = self._inner[0]

    def add(self, phi: Tensor, root: Tensor, w: Tensor) -> None:
        """More points: features φ̃ (M, D̃), roots L of Λ (M, C, C), weights (M,)."""
        self._inner += phi.T @ ((w * root.square().sum((1, 2)))[:, None] * phi)
        scaled = ((w * phi.square().sum(1)).sqrt()[:, None, None] * root).movedim(1, 0).flatten(1)  # (C, M·C)
        self._outer += scaled @ scaled.T

    def settle(self) -> None:
        """Nothing more to add: the factors become their eigenvalues and eigenvectors."""
        total = self._inner.trace().clamp_min(torch.finfo(torch.float64).tiny)
        inner, self._inner = torch.linalg.eigh(self._inner)
        outer, self._outer = torch.linalg.eigh(self._outer)
        self.values = ((outer / total).clamp_min(0.0)[:, None] * inner.clamp_min(0.0)).flatten()

    def coordinates(self, vectors: Tensor) -> Tensor:
        """Uᵀ v of each row v: (·, K) → (·, K)."""
        return (self._outer.T @ vectors.view(-1, self.outputs, self.width) @ self._inner).flatten(1)

    def apply(self, f: Tensor, vectors: Tensor) -> Tensor:
        """f(H) v of each row v: (·, K) → (·, K)."""
        scaled = (self.coordinates(vectors) * f).view(-1, self.outputs, self.width)
        return (self._outer @ scaled @ self._inner.T).flatten(1)

    def at(self, phi: Tensor, f: Tensor) -> Tensor:
        """J f(H) Jᵀ at each point: (M, C, C)."""
        along = (phi @ self._inner).square() @ f.view(self.outputs, self.width).T  # (M, C)
        return (self._outer * along[:, None]) @ self._outer.T


Curvature = Whole | Product
