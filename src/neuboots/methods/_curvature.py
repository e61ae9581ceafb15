"""Generalized Gauss–Newton (GGN) matrix of a net's last layer, and a loss as a least-squares problem.

    f(x) = θ̂ φ̃(x),   φ̃ = (φ, 1),   GGN = Σᵢ wᵢ Jᵢᵀ Λᵢ Jᵢ,   Jᵢ = I ⊗ φ̃ᵢᵀ
    Λᵢ = ∂²ℓᵢ/∂z² = Lᵢ Lᵢᵀ,   −∂ℓᵢ/∂z = Lᵢ uᵢ

θ̂ are the weights and bias of the head, φ its input, z its output and ℓ the loss. With rows LᵢᵀJᵢ and working residuals
uᵢ one Newton step for a weighted loss is a ridge regression. `Laplace` and `InfluenceBootstrap` share this module.
Everything is computed in double precision, some points at a time.
"""

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from neuboots._validation import ArgumentError
from neuboots.generator import BootstrapGenerator, GeneratorAtInput
from neuboots.head import add_output_axis, cast_inputs, eval_mode, load_example
from neuboots.losses import GaussianNLL, Loss, as_loss
from neuboots.prediction import Moments, Predictor, SampleStream, num_bytes
from neuboots.training import FitInputs

Likelihood = Literal["softmax", "bernoulli", "squared", "gaussian"]
MAX_FULL_SIZE = 3000  # parameters of the head up to which the GGN is stored whole: quadratic memory, cubic time
_MAX_LOG_PRECISION = 30.0
_MIN_LOG_VARIANCE = -12.0  # the floor of GaussianNLL
_MIN_PROBABILITY = 1e-7  # in a working residual
_MIN_RELATIVE_CURVATURE = 1e-6  # of the largest: where a loss is linear (Huber's), its gradient still counts


# -- the head ------------------------------------------------------------------------------------------


def to_double(tensor: Tensor) -> Tensor:
    """Convert to double precision, on the CPU where the device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def head_parameters(generator: BootstrapGenerator) -> Tensor:
    """θ̂, the weights and bias of the head: (C, D̃)."""
    head = generator.split.head
    weight = to_double(head.weight.detach()).flatten(1)
    return weight if head.bias is None else torch.cat([weight, to_double(head.bias.detach())[:, None]], 1)


def append_ones(phi: Tensor, biased: bool) -> Tensor:
    """φ̃ of points φ: (M, D) → (M, D̃)."""
    phi = to_double(phi)
    return torch.cat([phi, torch.ones_like(phi[:, :1])], 1) if biased else phi


def map_points(at: GeneratorAtInput, function: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """Apply a function of points (M, D̃) → (M, C) to every point that reaches the head, `size` at a time: (N, C, *)."""
    split = at.generator.split
    phi = at.trace.phi.movedim(split.axis, -1)
    phi = phi if phi.ndim > 1 else phi[None]  # a single row whose axis the net squeezed away
    points = append_ones(phi.flatten(0, -2), split.head.bias is not None)
    values = torch.cat([function(part) for part in torch.split(points, max(1, size))])
    return values.view(*phi.shape[:-1], values.shape[1]).movedim(-1, 1)


def apply_heads(at: GeneratorAtInput, theta: Tensor) -> Tensor:
    """Outputs of the net with other heads θ (B, C, D̃): (B, N, C, *)."""
    width, theta = at.generator.split.width, theta.to(at.trace.phi)
    samples = at.apply_heads(theta[..., :width], theta[..., width] if theta.shape[-1] > width else None)
    return samples if samples.ndim > 2 else samples[..., None]


class HeadReplicates(Predictor):
    """Base of predictors whose replicates differ in their heads, from one pass through the features."""

    @property
    @abstractmethod
    def generator(self) -> BootstrapGenerator:
        """The net, split at its head."""

    @property
    def net(self) -> nn.Module:
        return self.generator.net

    @abstractmethod
    def heads(self, start: int, stop: int, *, seed: int) -> Tensor:
        """Draw the heads θ_b, b = start … stop − 1, each a function of (seed, b) alone.

        Returns:
            Weights, and the bias as last column: (stop − start, C, D̃).
        """

    @abstractmethod
    def _std(self, at: GeneratorAtInput) -> Tensor | None:
        """The exact standard deviation of the outputs, (N, C, *), where it has a closed form."""

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        generator = self.generator
        with eval_mode(generator):
            at = generator.at(cast_inputs(generator, x))
        output, std = add_output_axis(at.output), self._std(at)

        def chunks(size: int) -> Iterator[Tensor]:
            for start in range(0, num_samples, size):
                yield apply_heads(at, self.heads(start, min(start + size, num_samples), seed=seed))

        head_bytes = 8 * num_bytes(head_parameters(generator))  # a draw and its intermediate results
        moments = None if std is None else Moments(output, std.to(output))
        return SampleStream(num_samples, num_bytes(output) + head_bytes, chunks, moments)


def split_at_head(net: nn.Module, head: str | None, inputs: FitInputs) -> BootstrapGenerator:
    """Split a net, trained or not; raise if anything but upsampling follows its head.

    Only then is Λ at the head that of the loss. Upsampling is linear, preserves constants, gives at least as many
    points as it gets, and uses all of them.
    """
    example = load_example(net, inputs.data, seed=inputs.config.seed)
    generator = BootstrapGenerator(net, head=head, example=example)
    with eval_mode(generator), torch.no_grad():
        at = generator.at(cast_inputs(generator, example))
        if len(at.trace.phi) != len(at.output):
            raise ValueError(
                f"the features of {len(at.output)} inputs have {len(at.trace.phi)} rows; expected the batch on the "
                "first axis of the head's input"
            )
        if at.trace.ends_at_head:
            return generator
        layer = generator.split.head
        weight = layer.weight.flatten(1)  # (C, D)
        bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias
        constant = torch.arange(1.0, len(weight) + 1).to(weight)
        found = at.apply_heads(
            torch.stack([0 * weight, weight, -weight]), torch.stack([constant, bias, constant - bias])
        )
        found = found if found.ndim > 2 else found[..., None]  # (3, N, C, *)
        z = layer(at.trace.phi)
        wanted = constant.view(-1, *[1] * (found.ndim - 3))
        upsamples = found.shape[2] == len(constant) and all(
            torch.allclose(output, wanted.expand_as(output), rtol=1e-3, atol=1e-3)
            for output in (found[0], found[1] + found[2])
        )
    points, pixels = z[0].numel() // len(weight), found.shape[3:].numel()
    if not upsamples or pixels < points or not _uses_all(at, z):
        raise ValueError(
            f"the net does more than upsample after its head {generator.split.name!r} ({points} points of an example "
            f"become {pixels} outputs), so the curvature there is not that of the loss; expected every point of the "
            "head in the output: pool, select or crop the features before the head, move other operations into the "
            "loss, or use InfluenceBootstrap(layers='all')"
        )
    return generator


def _uses_all(at: GeneratorAtInput, z: Tensor) -> bool:
    """Whether every element of the head's output z affects the net's output."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = z.detach().clone().requires_grad_()
        output = at.trace.finish(leaf)
        slopes = torch.linspace(1.0, 2.0, output.numel()).to(output).view_as(output)  # positive and distinct
        (gradient,) = torch.autograd.grad((slopes * output).sum(), leaf)
    return bool((gradient != 0).all())


# -- the loss ------------------------------------------------------------------------------------------


def infer_likelihood(loss: Loss) -> Likelihood | None:
    """The likelihood whose negative logarithm the loss is; None if its Hessian has no closed form here."""
    weighted = getattr(loss, "weight", None) is not None or getattr(loss, "pos_weight", None) is not None
    if isinstance(loss, nn.CrossEntropyLoss) and not weighted:
        return "softmax"
    if isinstance(loss, nn.BCEWithLogitsLoss) and not weighted:
        return "bernoulli"
    if isinstance(loss, nn.MSELoss):
        return "squared"
    return "gaussian" if isinstance(loss, GaussianNLL) and not loss.beta else None


def output_hessian(likelihood: Likelihood, z: Tensor) -> tuple[Tensor, Tensor | None]:
    """Λ = diag(s) − q qᵀ at outputs z, as s and q, (M, C) each; q is None where Λ is diagonal.

    Softmax: s = q = p. Bernoulli: s = p (1 − p). Squared error (halved): s = 1, to be divided by σ². Gaussian: the
    Fisher information of (μ, log σ²), s = (1/σ², ½), and zero for a log σ² below the floor of the loss.
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
    floored = log_variance.clamp_min(_MIN_LOG_VARIANCE)
    return torch.cat([(-floored).exp(), 0.5 * (log_variance >= floored)], 1), None


class WorkingModel(NamedTuple):
    """L, u and −∂ℓ/∂z at M points of C outputs."""

    root: Tensor  # L: (M, C, C)
    residual: Tensor  # u: (M, C)
    slope: Tensor  # −∂ℓ/∂z = L u, except where a loss has no curvature: (M, C)


def working_residuals(loss: Loss, z: Tensor, y: Tensor) -> WorkingModel:
    """L, u and −∂ℓ/∂z of a loss at outputs z (M, C) and targets y, one for each point, in double precision.

    A loss without a closed form is differentiated twice; where it is not convex in the outputs, its curvature is
    replaced by a small positive one. For the squared error (halved) L = I and u = y − z; for classes u are Pearson's
    residuals.
    """
    z = z.double()
    likelihood = infer_likelihood(loss)
    if isinstance(loss, GaussianNLL):
        root, residual = _gaussian(loss.beta, z, y)
    elif likelihood is None:
        return _differentiate_twice(loss, z, y)
    elif likelihood == "squared":
        root = torch.eye(z.shape[1], dtype=z.dtype, device=z.device).expand(len(z), -1, -1)
        residual = y.reshape(z.shape).to(z) - z
    elif likelihood == "softmax":
        p = z.softmax(1).clamp_min(_MIN_PROBABILITY)
        smoothing = getattr(loss, "label_smoothing", 0.0)
        hard = y if y.is_floating_point() else torch.nn.functional.one_hot(y.long(), z.shape[1])  # torch takes both
        target = hard.to(z) * (1 - smoothing) + smoothing / z.shape[1]
        q = p.sqrt()
        # diag(p) − ppᵀ = L Lᵀ with L = diag(q)(I − qqᵀ); −∂ℓ/∂z = target − p sums to zero, so u = (target − p)/q
        root, residual = torch.diag_embed(q) - p[:, :, None] * q[:, None], (target - z.softmax(1)) / q
    else:
        p = z.sigmoid()
        scale = (p * (1.0 - p)).clamp_min(_MIN_PROBABILITY).sqrt()
        root, residual = torch.diag_embed(scale), (y.reshape(z.shape).to(z) - p) / scale
    return WorkingModel(root, residual, (root @ residual[:, :, None])[:, :, 0])


def _gaussian(beta: float, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of k means and k values of log σ², by the Fisher information (1/σ², ½); β weights a point by σ^(2β)."""
    mean, raw = z.chunk(2, 1)
    log_variance = raw.clamp_min(_MIN_LOG_VARIANCE)
    standardized = (y.reshape(mean.shape).to(z) - mean) * (-0.5 * log_variance).exp()
    half = 0.5**0.5 * (raw >= _MIN_LOG_VARIANCE).to(z)
    root = torch.cat([(-0.5 * log_variance).exp(), half], 1)
    residual = torch.cat([standardized, half * (standardized.square() - 1.0)], 1)
    weight = (0.5 * beta * log_variance).exp().repeat(1, 2)
    return torch.diag_embed(weight * root), weight * residual


def pointwise_losses(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    """ℓ of each point at outputs z (M, C), in the shape and precision that the loss accepts.

    A net may give (N,) and its loss expect that: against targets (M,) outputs (M, 1) would be broadcast. A loss may
    also hold single-precision tensors, such as class weights, which torch does not mix with double.
    """
    loss = as_loss(loss)
    single = z.shape[1] == 1 and y.shape == z.shape[:1]
    shapes = [z, z[:, 0]] if single else [z]
    first_error: Exception | None = None
    for outputs in [*shapes, *(shape.float() for shape in shapes if shape.dtype == torch.float64)]:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Using a target size")  # of a shape that is only tried
                losses = loss(outputs, y.to(outputs) if y.is_floating_point() else y)
        except (RuntimeError, ValueError) as error:
            first_error = first_error or error
            continue
        if not single or losses.numel() == len(z) or outputs.ndim == 1:
            return losses
    assert first_error is not None, "the last shape is returned unless the loss raises"
    raise first_error


def _differentiate_twice(loss: Loss, z: Tensor, y: Tensor) -> WorkingModel:
    """L, u and −∂ℓ/∂z by differentiation; L and u are zero if the second derivative is nowhere positive."""
    with torch.inference_mode(False), torch.enable_grad():
        z = z.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(pointwise_losses(loss, z, y).sum(), z, create_graph=True)
        try:
            columns = [
                torch.autograd.grad(part.sum(), z, retain_graph=True, materialize_grads=True)[0]
                for part in (gradient.unbind(1) if gradient.requires_grad else ())
            ]
        except RuntimeError as error:
            raise ArgumentError("loss", loss, f"a loss that can be differentiated twice ({error})") from None
    gradient = gradient.detach()
    curvature = torch.stack(columns, 2) if columns else torch.diag_embed(torch.zeros_like(gradient))  # (M, C, C)
    values, vectors = torch.linalg.eigh(curvature)
    largest = float(values.max()) if len(values) else 1.0
    if not largest > 0.0:
        return WorkingModel(torch.zeros_like(curvature), torch.zeros_like(gradient), -gradient)
    root = values.clamp_min(_MIN_RELATIVE_CURVATURE * largest).sqrt()
    residual = torch.einsum("mck,mc->mk", vectors, -gradient) / root
    return WorkingModel(vectors * root[:, None], residual, -gradient)


# -- the GGN -------------------------------------------------------------------------------------------


class FullGGN(nn.Module):
    """H = Σᵢ wᵢ Jᵢᵀ Λᵢ Jᵢ = U diag(h) Uᵀ, stored whole, with parameters ordered output by output: K = C·D̃."""

    values: Tensor  # h: (K,)
    vectors: Tensor  # U: (K, K); the lower triangle of the sum until `decompose`

    def __init__(self, outputs: int, width: int) -> None:
        super().__init__()
        self.outputs, self.width = outputs, width
        self.register_buffer("values", torch.zeros(outputs * width, dtype=torch.float64))
        self.register_buffer("vectors", torch.zeros(outputs * width, outputs * width, dtype=torch.float64))

    def add(self, phi: Tensor, s: Tensor, q: Tensor | None, w: Tensor) -> None:
        """Add points: features φ̃ (M, D̃), Λ = diag(s) − q qᵀ as s and q (M, C), weights (M,)."""
        blocks = self.vectors.view(self.outputs, self.width, self.outputs, self.width).diagonal(dim1=0, dim2=2)
        blocks += torch.einsum("md,mc,me->dec", phi, w[:, None] * s, phi)  # (D̃, D̃, C)
        if q is not None:
            J = ((w.sqrt()[:, None] * q)[:, :, None] * phi[:, None]).flatten(1)  # (M, K)
            self.vectors -= J.T @ J

    def add_roots(self, phi: Tensor, root: Tensor, w: Tensor) -> None:
        """Add points: features φ̃ (M, D̃), roots L of Λ (M, C, C), weights (M,)."""
        hessian = w[:, None, None] * (root @ root.mT)
        blocks = self.vectors.view(self.outputs, self.width, self.outputs, self.width)
        for c in range(self.outputs):
            scaled = (hessian[:, c, : c + 1, None] * phi[:, None]).flatten(1)  # (M, (c + 1)·D̃)
            blocks[c, :, : c + 1] += (phi.T @ scaled).view(self.width, c + 1, self.width)

    def decompose(self, scale: float = 1.0) -> None:
        """Replace the sum, times `scale`, by its eigenvalues and eigenvectors."""
        values, vectors = torch.linalg.eigh(self.vectors)
        # contiguous, as in a predictor that was loaded from a file: then products round alike
        self.values, self.vectors = (scale * values).clamp_min(0.0), vectors.contiguous()

    def eigenvalues(self) -> Tensor:
        """h, in double precision whatever the net was cast to: (K,)."""
        return to_double(self.values)

    def project(self, vectors: Tensor) -> Tensor:
        """Uᵀ v of each row v: (·, K) → (·, K)."""
        return vectors @ to_double(self.vectors)

    def lift(self, coordinates: Tensor) -> Tensor:
        """U c of each row c: (·, K) → (·, K)."""
        return coordinates @ to_double(self.vectors).T

    def at(self, phi: Tensor, f: Tensor) -> Tensor:
        """J f(H) Jᵀ at each point, for the values f (K,) of a function at h: (M, C, C)."""
        along = (phi @ self.vectors.view(self.outputs, self.width, -1)).movedim(0, 1)  # J U: (M, C, K)
        return (along * f) @ along.mT

    def diagonal_at(self, phi: Tensor, f: Tensor) -> Tensor:
        """The diagonal of J f(H) Jᵀ at each point, for f ≥ 0: (M, C)."""
        root = (to_double(self.vectors) * f.sqrt()).view(self.outputs, self.width, -1)  # (C, D̃, K)
        if len(phi) <= self.width:
            return (phi @ root).square().sum(2).T
        return ((phi @ (root @ root.mT)) * phi).sum(2).T.clamp_min(0.0)


class KronGGN(nn.Module):
    """H ≈ G ⊗ A, the Kronecker product with the same partial traces as H.

        A = Σᵢ wᵢ tr(Λᵢ) φ̃ᵢφ̃ᵢᵀ,   G = Σᵢ wᵢ |φ̃ᵢ|² Λᵢ / tr A

    It is exact where H is a Kronecker product: one output, the same Λᵢ everywhere (squared error), or the same φ̃ᵢ.
    Ritter, Botev and Barber, A scalable Laplace approximation for neural networks, ICLR 2018.
    """

    inner: Tensor  # eigenvalues of A: (D̃,)
    inner_vectors: Tensor  # (D̃, D̃); A itself until `decompose`
    outer: Tensor  # eigenvalues of G: (C,)
    outer_vectors: Tensor  # (C, C); G tr A until `decompose`

    def __init__(self, outputs: int, width: int) -> None:
        super().__init__()
        self.outputs, self.width = outputs, width
        for name, size in (("inner", width), ("outer", outputs)):
            self.register_buffer(name, torch.zeros(size, dtype=torch.float64))
            self.register_buffer(f"{name}_vectors", torch.zeros(size, size, dtype=torch.float64))

    def add(self, phi: Tensor, s: Tensor, q: Tensor | None, w: Tensor) -> None:
        """Add points: features φ̃ (M, D̃), Λ = diag(s) − q qᵀ as s and q (M, C), weights (M,)."""
        q = torch.zeros_like(s) if q is None else q
        trace, v = s.sum(1) - q.square().sum(1), w * phi.square().sum(1)
        self.inner_vectors += phi.T @ ((w * trace)[:, None] * phi)
        self.outer_vectors += torch.diag(v @ s) - q.T @ (v[:, None] * q)

    def add_roots(self, phi: Tensor, root: Tensor, w: Tensor) -> None:
        """Add points: features φ̃ (M, D̃), roots L of Λ (M, C, C), weights (M,)."""
        self.inner_vectors += phi.T @ ((w * root.square().sum((1, 2)))[:, None] * phi)
        scaled = ((w * phi.square().sum(1)).sqrt()[:, None, None] * root).movedim(1, 0).flatten(1)  # (C, M·C)
        self.outer_vectors += scaled @ scaled.T

    def decompose(self, scale: float = 1.0) -> None:
        """Replace the sums by their eigenvalues, times `scale`, and eigenvectors."""
        total = self.inner_vectors.trace().clamp_min(torch.finfo(torch.float64).tiny)
        inner, inner_vectors = torch.linalg.eigh(self.inner_vectors)
        outer, outer_vectors = torch.linalg.eigh(self.outer_vectors)
        self.inner_vectors, self.outer_vectors = inner_vectors.contiguous(), outer_vectors.contiguous()
        self.inner, self.outer = (scale * inner).clamp_min(0.0), (outer / total).clamp_min(0.0)

    def eigenvalues(self) -> Tensor:
        """h, in double precision whatever the net was cast to: (K,)."""
        return (to_double(self.outer)[:, None] * to_double(self.inner)).flatten()

    def project(self, vectors: Tensor) -> Tensor:
        """Uᵀ v of each row v: (·, K) → (·, K)."""
        grid = vectors.view(-1, self.outputs, self.width)
        return (to_double(self.outer_vectors).T @ grid @ to_double(self.inner_vectors)).flatten(1)

    def lift(self, coordinates: Tensor) -> Tensor:
        """U c of each row c: (·, K) → (·, K)."""
        grid = coordinates.view(-1, self.outputs, self.width)
        return (to_double(self.outer_vectors) @ grid @ to_double(self.inner_vectors).T).flatten(1)

    def _along(self, phi: Tensor, f: Tensor) -> Tensor:
        """J f(H) Jᵀ in the basis of G, where it is diagonal: (M, C)."""
        return (phi @ to_double(self.inner_vectors)).square() @ f.view(self.outputs, self.width).T

    def at(self, phi: Tensor, f: Tensor) -> Tensor:
        """J f(H) Jᵀ at each point, for the values f (K,) of a function at h: (M, C, C)."""
        return (self.outer_vectors * self._along(phi, f)[:, None]) @ self.outer_vectors.T

    def diagonal_at(self, phi: Tensor, f: Tensor) -> Tensor:
        """The diagonal of J f(H) Jᵀ at each point, for f ≥ 0: (M, C)."""
        return self._along(phi, f) @ to_double(self.outer_vectors).square().T


def bisect_decreasing(excess: Callable[[float], float], low: float, high: float) -> float:
    """The t between two positive numbers at which a decreasing function changes its sign, by bisection of log t."""
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return math.sqrt(low * high)


def maximize_evidence(h: Tensor, squared_norm: float) -> float:
    """The prior precision τ of the largest evidence: where τ |θ̂|² = Σ_k h_k / (h_k + τ), whose sides cross once.

    h are the eigenvalues of the GGN of a negative log-likelihood, `squared_norm` is |θ̂|². MacKay, A practical Bayesian
    framework for backpropagation networks, Neural Computation 1992.

    >>> round(maximize_evidence(torch.tensor([1.0]), 0.5), 3)
    1.0
    """
    if float(h.max()) == 0.0:
        return 1.0  # the data carry no information
    low, high = math.exp(-_MAX_LOG_PRECISION), math.exp(_MAX_LOG_PRECISION)
    return bisect_decreasing(lambda tau: float((h / (h + tau)).sum()) - tau * squared_norm, low, high)
