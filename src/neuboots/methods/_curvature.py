"""Generalized Gauss–Newton (GGN) matrix of a net's head, and the training data as points of the head.

    f(x) = θ̂ φ̃(x),   φ̃ = (φ, 1),   GGN = Σᵢ wᵢ Jᵢᵀ Λᵢ Jᵢ,   Jᵢ = I ⊗ φ̃ᵢᵀ,   Λᵢ = ∂²ℓᵢ/∂z²

θ̂ are the weights and bias of the head, φ its input, z its output and ℓ the loss. A point is one position of the head's
output: an example, a pixel or a token. Everything is computed in double precision, some points at a time. `Laplace` and
the head form of `InfluenceBootstrap` share this module.
"""

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from neuboots._validation import ArgumentError, check_memory
from neuboots.head import add_output_axis, cast_inputs, check_inputs, eval_mode, load_example
from neuboots.loading import Batch, dataset_length
from neuboots.losses import GaussianNLL, Loss, valid_mask, weighted_mean
from neuboots.methods._base import iterate_batches
from neuboots.methods._least_squares import (
    MIN_LOG_VARIANCE,
    Likelihood,
    bisect_decreasing,
    infer_likelihood,
    working_residuals,
)
from neuboots.methods.neuboots import BootstrapGenerator, GeneratorAtInput
from neuboots.prediction import Moments, Predictor, SampleStream, num_bytes
from neuboots.training import FitInputs

MAX_FULL_SIZE = 3000  # parameters of the head up to which the GGN is stored whole: quadratic memory, cubic time
MAX_EIGEN_SIZE = 10_000  # of a matrix that is decomposed: some ten minutes of one core
_SLOW_EIGEN_SIZE = 5_000  # from here on it takes minutes
_MIN_REDUCED_WIDTH = 512  # narrower features are cheap to decompose
_MAX_LOG_PRECISION = 30.0
_MAX_STORED_BYTES = 1 << 28  # of features; beyond that the net is run again in each pass
_CHUNK_ELEMENTS = 1 << 22


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
    def generator(self) -> BootstrapGenerator:
        """The net, split at its head, a part of `module`."""
        return cast(BootstrapGenerator, self.module.generator)

    @property
    def net(self) -> nn.Module:
        return self.generator.net

    @abstractmethod
    def heads(self, start: int, stop: int, *, seed: int) -> Tensor:
        """Draw the heads θ_b, b = start … stop − 1, each a function of (seed, b) alone.

        Returns:
            Weights, and the bias as last column: (stop − start, C, D̃).
        """

    @property
    def _num_drawn(self) -> int:
        """How many weights of the data are drawn for a replicate."""
        return 0

    @abstractmethod
    def _std(self, at: GeneratorAtInput) -> Tensor | None:
        """The exact standard deviation of the outputs, (N, C, *), where it has a closed form."""

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        generator = self.generator
        at = generator.at(cast_inputs(generator, x))
        output, std = add_output_axis(at.output), self._std(at)

        def chunks(size: int) -> Iterator[Tensor]:
            for start in range(0, num_samples, size):
                yield apply_heads(at, self.heads(start, min(start + size, num_samples), seed=seed))

        # a draw and its intermediate results
        head_bytes = 8 * (num_bytes(head_parameters(generator)) + self._num_drawn)
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
        weights, biases = torch.stack([0 * weight, weight, -weight]), torch.stack([constant, bias, constant - bias])
        found = apply_heads(at, torch.cat([weights, biases[..., None]], 2)).to(weight.dtype)  # (3, N, C, *)
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


# -- the GGN -------------------------------------------------------------------------------------------


def output_hessian(likelihood: Likelihood, z: Tensor) -> Tensor:
    """Λ at outputs z (M, C): (M, C, C).

    Softmax: diag(p) − ppᵀ. Bernoulli: p (1 − p). Squared error (halved): 1, to be divided by σ². Gaussian: the Fisher
    information (1/σ², ½) of (μ, log σ²), and zero for a log σ² below the floor of the loss.
    """
    if likelihood == "softmax":
        p = z.softmax(1)
        return torch.diag_embed(p) - p[:, :, None] * p[:, None]
    if likelihood == "bernoulli":
        p = z.sigmoid()
        return torch.diag_embed(p * (1.0 - p))
    if likelihood == "squared":
        return torch.diag_embed(torch.ones_like(z))
    log_variance = z.chunk(2, 1)[1]
    floored = log_variance.clamp_min(MIN_LOG_VARIANCE)
    return torch.diag_embed(torch.cat([(-floored).exp(), 0.5 * (log_variance >= floored)], 1))


class FullGGN(nn.Module):
    """H = Σᵢ wᵢ Jᵢᵀ Λᵢ Jᵢ = U diag(h) Uᵀ, stored whole, with parameters ordered output by output: K = C·D̃."""

    values: Tensor  # h: (K,)
    vectors: Tensor  # U: (K, K); the lower triangle of the sum until `decompose`

    def __init__(self, outputs: int, width: int) -> None:
        super().__init__()
        self.outputs, self.width = outputs, width
        self.register_buffer("values", torch.zeros(outputs * width, dtype=torch.float64))
        self.register_buffer("vectors", torch.zeros(outputs * width, outputs * width, dtype=torch.float64))

    def add(self, phi: Tensor, hessian: Tensor, w: Tensor) -> None:
        """Add points: features φ̃ (M, D̃), Λ (M, C, C), weights (M,)."""
        hessian = w[:, None, None] * hessian
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

    def add(self, phi: Tensor, hessian: Tensor, w: Tensor) -> None:
        """Add points: features φ̃ (M, D̃), Λ (M, C, C), weights (M,)."""
        trace = hessian.diagonal(dim1=1, dim2=2).sum(1)
        self.inner_vectors += phi.T @ ((w * trace)[:, None] * phi)
        self.outer_vectors += torch.einsum("m,mce->ce", w * phi.square().sum(1), hessian)

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


# -- training data as points of the head ----------------------------------------------------------------


class HeadPoints(NamedTuple):
    """M points of the head, in double precision."""

    phi: Tensor  # φ̃ = (φ, 1): (M, D̃)
    z: Tensor  # outputs: (M, C)
    root: Tensor  # L: (M, C, C)
    residual: Tensor  # u: (M, C)
    slope: Tensor  # −∂ℓ/∂z = L u, except for a loss without curvature there: (M, C)
    weight: Tensor  # (M,)
    row: Tensor  # index of its example in the data set: (M,)
    y: Tensor  # its target; where the net upsamples the head's output, the one that has this slope at the head


class BatchFeatures(NamedTuple):
    """Points of one batch as they reach the head."""

    phi: Tensor  # (M, D)
    z: Tensor  # outputs of the head, in the net's precision: (M, C)
    y: Tensor | None  # (M,) or (M, ·); None where the net upsamples the head's output
    slope: Tensor | None  # −∂ℓ/∂z at the head where the net upsamples its output: (M, C)
    weight: Tensor  # zero for an ignored point: (M,)
    row: Tensor  # (M,)

    def take(self, which: Tensor | slice) -> "BatchFeatures":
        """Select points."""
        return BatchFeatures(*(None if part is None else part[which] for part in self))  # type: ignore[arg-type]


def output_is_head(at: GeneratorAtInput) -> bool:
    """Whether the net's output is its head's, up to squeezed axes of length one."""
    if at.trace.ends_at_head:
        return True
    phi, output = at.trace.phi, at.trace.output
    return phi.ndim <= 2 and output.ndim <= 2 and torch.equal(output.flatten(), at.generator.split.head(phi).flatten())


class FeaturePass:
    """Passes over the training data of a net as points of its head; small features are kept after the first pass."""

    def __init__(self, generator: BootstrapGenerator, loss: Loss, inputs: FitInputs) -> None:
        self.generator, self.loss, self.inputs = generator, loss, inputs
        self.likelihood = infer_likelihood(loss)
        self.theta = head_parameters(generator)  # θ̂: (C, D̃)
        self.num_parameters, self.squared_norm = self.theta.numel(), float(self.theta.square().sum())  # of the head
        self.basis: Tensor | None = None  # Q, in whose coordinates features and θ̂ are, after `reduce`: (D̃, r)
        self.continuous = False  # whether the targets are continuous; known after the first batch
        self.upsampled = False  # whether anything follows the head; known after the first batch
        self.num_rows = 0  # examples with points that count; known after the first pass
        self.total_loss, self.num_losses = 0.0, 0
        self._stored: list[BatchFeatures] | None = None

    def reduce(self) -> None:
        """Replace φ̃ and θ̂ by QᵀΦ̃ and θ̂Q if there are fewer points than features; Q is a basis of the points' span.

        The GGN and all gradients live in this span, so that what is computed from them is the same.
        """
        n, width = dataset_length(self.inputs.data), self.theta.shape[1]
        if width < _MIN_REDUCED_WIDTH or (n is not None and n >= width):
            return
        rows, count = [], 0
        for phi, _ in self.features():
            rows.append(phi)
            if (count := count + len(phi)) >= width:
                return
        if rows:
            self.basis = torch.linalg.qr(torch.cat(rows).T).Q.contiguous()  # as in a loaded predictor
            self.theta = self.theta @ self.basis

    def check_cost(self, *, full: bool) -> None:
        """Raise ArgumentError if the GGN, whole or as a Kronecker product, is too large to decompose."""
        outputs, width = self.theta.shape
        size = outputs * width if full else max(outputs, width)
        hint = "use a narrower last layer, or fewer training rows than features" + (" or structure='kron'" * full)
        if size > MAX_EIGEN_SIZE:
            expected = f"a curvature of at most {MAX_EIGEN_SIZE:,}² to decompose; this one has {size:,}²"
            raise ArgumentError("head", self.generator.split.name, expected, hint=hint)
        check_memory("head", self.generator.split.name, 8 * 8 * size**2, hint=hint)  # matrices and work space
        if size > _SLOW_EIGEN_SIZE:
            warnings.warn(
                f"the curvature at the head {self.generator.split.name!r} is {size:,}²; decomposing it takes minutes: "
                f"{hint}",
                stacklevel=3,
            )

    def features(self) -> Iterator[tuple[Tensor, BatchFeatures]]:
        """φ̃ (M, D̃) of all points, some at a time, and what they are made from."""
        (outputs, width), biased = self.theta.shape, self.generator.split.head.bias is not None
        size = max(1, _CHUNK_ELEMENTS // (outputs * max(outputs, width)))
        for batch in self._batches():
            for start in range(0, len(batch.phi), size):
                part = batch.take(slice(start, start + size))
                phi = append_ones(part.phi, biased).to(self.theta.device)
                if not (bool(torch.isfinite(phi).all()) and bool(torch.isfinite(part.z).all())):
                    raise ValueError(
                        "the trained net has NaN or infinite features or outputs on its training data; expected finite "
                        "numbers: drop such examples, or train the net again"
                    )
                yield phi if self.basis is None else phi @ self.basis, part

    def points(self) -> Iterator[HeadPoints]:
        """All points that count, some at a time, with their working residuals."""
        for phi, part in self.features():
            counted = part.weight > 0
            phi, part = phi[counted.to(phi.device)], part.take(counted)
            z, weight = phi @ self.theta.T, part.weight.to(phi)
            if part.slope is None:
                assert part.y is not None
                y = part.y.to(z.device)
                root, residual, slope = working_residuals(self.loss, z, y)
            else:
                mean = {"softmax": z.softmax(1), "bernoulli": z.sigmoid()}.get(str(self.likelihood), z)
                # L does not depend on the targets
                root = working_residuals(self.loss, z, z.chunk(2, 1)[0] if self.likelihood == "gaussian" else mean).root
                # L⁺ = Lᵀ (LLᵀ)⁺; the slope of a point is divided by its weight
                inverse = torch.linalg.pinv(root @ root.mT, rtol=1e-10, hermitian=True)
                slope = part.slope / weight[:, None]
                y = mean + slope
                residual = (root.mT @ (inverse @ slope[:, :, None]))[:, :, 0]
            if not bool(torch.isfinite(residual).all()):
                raise ValueError("the loss is NaN or infinite on the training data; expected finite targets and losses")
            yield HeadPoints(phi, z, root, residual, slope, weight, part.row, y)

    def _batches(self) -> Iterator[BatchFeatures]:
        if self._stored is not None:
            yield from self._stored
            return
        stored: list[BatchFeatures] | None = []
        size = self.num_rows = self.num_losses = 0
        self.total_loss = 0.0
        with eval_mode(self.generator), torch.no_grad():
            for batch in iterate_batches(self.inputs.data, self.inputs.config, title="curvature"):
                found = self._read(batch)
                self.num_rows += len(set(found.row[found.weight > 0].tolist()))
                if stored is not None:
                    stored.append(found)
                    size += sum(num_bytes(part) for part in found if part is not None)
                    stored = stored if size <= _MAX_STORED_BYTES else None
                yield found
        self._stored = stored

    def _read(self, batch: Batch) -> BatchFeatures:
        check_inputs(batch.x)
        generator = self.generator
        at = generator.at(cast_inputs(generator, batch.x))
        y = batch.y.to(at.output.device)
        if y.is_floating_point() and not bool(torch.isfinite(y).all()):
            raise ValueError("the targets have NaN or infinite values; expected finite numbers: fill or drop such rows")
        known = self.likelihood in ("squared", "gaussian")
        other = y.is_floating_point() or isinstance(self.loss, GaussianNLL | nn.PoissonNLLLoss)  # counts are integers
        self.continuous = known or (self.likelihood is None and other)
        losses = self.loss(at.output, y)  # raises where targets do not fit; zero where they are ignored
        weighted_mean(losses, losses.new_ones(len(batch.index)))  # raises for a loss that reduces
        self.total_loss += float(to_double(losses).sum())
        self.num_losses += losses.numel()
        flat = at.trace.phi.movedim(generator.split.axis, -1)
        phi, per_row = flat.flatten(0, -2), flat[0].numel() // flat.shape[-1]
        z = generator.split.head(at.trace.phi).movedim(generator.split.axis, -1).reshape(len(phi), -1)
        mask = valid_mask(self.loss, y)
        if at.trace.ends_at_head:
            weight = torch.ones(len(phi)) if mask is None else mask.flatten()
        else:  # the fraction of the outputs that a point is upsampled to
            counted = torch.full((len(flat),), at.output.shape[2:].numel()) if mask is None else mask.flatten(1).sum(1)
            weight = (counted / per_row).repeat_interleave(per_row)
        weight = weight.to(phi.device, self.theta.dtype)
        row = batch.index.repeat_interleave(per_row).to(phi.device)
        targets, slope = None, None
        if output_is_head(at):
            same_axes = y.ndim == at.output.ndim > 1
            targets = y.movedim(1, -1).flatten(0, -2) if same_axes else y.reshape(len(phi), *y.shape[flat.ndim - 1 :])
        else:
            slope, self.upsampled = self._slope(at, y), True
        return BatchFeatures(phi, z, targets, slope, weight, row)

    def _slope(self, at: GeneratorAtInput, y: Tensor) -> Tensor:
        """−∂ℓ/∂z at the head of a net that upsamples its output, scaled as in `working_residuals`: (M, C)."""
        if self.likelihood is None:
            expected = "nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.MSELoss or GaussianNLL, since the net upsamples"
            raise ArgumentError("loss", self.loss, expected)
        half = 0.5 if self.likelihood == "squared" else 1.0
        split = self.generator.split
        with torch.inference_mode(False), torch.enable_grad():
            z = split.head(at.trace.phi.detach()).detach().clone().requires_grad_()
            total = self.loss(at.arrange(at.trace.finish(z)), y.clone()).sum()  # y may be made in inference mode
            (slope,) = torch.autograd.grad(total, z)
        return -half * to_double(slope.movedim(split.axis, -1).flatten(0, -2))
