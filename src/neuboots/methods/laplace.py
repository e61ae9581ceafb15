"""Last-layer Laplace: a Gaussian over the head of a trained net, as wide as the loss is flat.

    θ ~ N(θ̂, P⁻¹),   P = Σᵢ Jᵢᵀ Λᵢ Jᵢ + τ I,   Jᵢ = I ⊗ φ̃ᵢᵀ,   φ̃ = (φ, 1)
    f_b(x) = θ_b φ̃(x),   Var f(x) = φ̃ᵀ P⁻¹ φ̃   (for each output)

θ̂ are the head's weights and bias, φ its input, Λ the Hessian of the loss in the outputs (the generalised
Gauss–Newton matrix, which no label enters) and τ the prior precision. P is held whole, or as a Kronecker product.

MacKay, A Practical Bayesian Framework for Backpropagation Networks, Neural Computation 1992. Kristiadi, Hein and
Hennig, Being Bayesian, Even Just a Bit, Fixes Overconfidence in ReLU Networks, ICML 2020. Daxberger et al., Laplace
Redux – Effortless Bayesian Deep Learning, NeurIPS 2021. Kronecker factors: Ritter, Botev and Barber, A Scalable
Laplace Approximation for Neural Networks, ICLR 2018.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots.batches import Batch, Loader, own_randomness
from neuboots.checkpoints import identity_of
from neuboots.generator import BootstrapGenerator, GeneratorAt
from neuboots.keys import draw_keys, normals
from neuboots.losses import (
    CrossEntropy,
    Loss,
    check_loss,
    unmasked,
    weighted_loss,
)
from neuboots.methods.common import example_of, loss_figures
from neuboots.methods.last_layer import (
    Likelihood,
    best_precision,
    check_finish,
    double,
    extended,
    head_of,
    likelihood_of,
    point_weights,
    shown,
)
from neuboots.prediction import Moments, Predictor, Stream, bytes_of
from neuboots.surgery import eval_mode, to_net
from neuboots.training import Objective, Recipe, make_seeded, train

Structure = Literal["auto", "full", "kron"]

_FULL = 3000  # numbers in the head up to which P is held whole: its square in memory, its cube in time, once
_PIECE = 1 << 24  # numbers held at once while points are gone through


# -- the curvature of the loss -------------------------------------------------------------------------


def hessian(likelihood: Likelihood, z: Tensor) -> tuple[Tensor, Tensor | None]:
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


class Full(nn.Module):
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
        return double(self.values)

    def _root(self, precision: float) -> tuple[Tensor, Tensor]:
        """P^{−1/2}, as U and the diagonal, in double precision whatever the net was cast to."""
        return double(self.vectors), (self.eigenvalues() + precision).rsqrt()

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


class Kron(nn.Module):
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
        return double(self.outer)[:, None] * double(self.inner)  # (C, D̃)

    def eigenvalues(self) -> Tensor:
        return self._grid().flatten()

    def deviations(self, noise: Tensor, precision: float) -> Tensor:
        """P^{−1/2} on noise (B, K): (B, C, D̃)."""
        scaled = noise.view(-1, len(self.outer), len(self.inner)) * (self._grid() + precision).rsqrt()
        return double(self.outer_vectors) @ scaled @ double(self.inner_vectors).T

    def variance(self, phi: Tensor, precision: float) -> Tensor:
        """φ̃ᵀ P⁻¹ φ̃ for each point and output: (M, C)."""
        along = (phi @ double(self.inner_vectors)).square() @ (self._grid() + precision).reciprocal().T  # (M, C)
        return along @ double(self.outer_vectors).square().T


class Posterior(nn.Module):
    """N(θ̂, P⁻¹) over the head of a generator; θ̂ itself stays in the net."""

    log_likelihood: Tensor  # of the training data at θ̂

    def __init__(self, generator: BootstrapGenerator, structure: Literal["full", "kron"]) -> None:
        super().__init__()
        self.generator = generator
        head = generator.split.head
        self.biased = head.bias is not None
        self.outputs, self.width = len(head.weight), generator.split.width + self.biased  # C, D̃
        make = Full if structure == "full" else Kron
        self.curvature = make(self.outputs, self.width).to(double(head.weight).device)
        self.register_buffer("log_likelihood", torch.zeros((), dtype=torch.float64))

    @property
    def _piece(self) -> int:
        return max(1, _PIECE // (self.outputs * self.width))

    def mean(self) -> Tensor:
        """θ̂, double precision: (C, D̃)."""
        return head_of(self.generator)

    def points(self, phi: Tensor) -> Tensor:
        """φ̃ of every point of φ, double precision: (M, D̃)."""
        return extended(phi.movedim(self.generator.split.axis, -1).flatten(0, -2), self.biased)

    def gather(self, at: GeneratorAt, likelihood: Likelihood, mask: Tensor | None) -> None:
        """The curvature at one batch; `mask` (N, *) says which of its outputs count."""
        phi, z = self.points(at.passed.phi), double(self.generator.split.head(at.passed.phi))
        z = z.movedim(self.generator.split.axis, -1).flatten(0, -2)  # (M, C)
        w = point_weights(at, mask).to(phi)
        pieces = (torch.split(part, self._piece) for part in (phi, z, w))
        for phi_part, z_part, w_part in zip(*pieces, strict=True):
            self.curvature.add(phi_part, *hessian(likelihood, z_part), w_part)

    def variance(self, phi: Tensor, precision: float) -> Tensor:
        """Of every output of the head at φ: (N, C, *)."""
        pieces = torch.split(self.points(phi), self._piece)
        variance = torch.cat([self.curvature.variance(piece, precision) for piece in pieces])  # (M, C)
        shape = phi.movedim(self.generator.split.axis, -1).shape[:-1]
        return variance.view(*shape, self.outputs).movedim(-1, 1)

    def log_evidence(self, precision: float) -> float:
        """log p(D | θ̂) + log p(θ̂ | τ) + ½ K log 2π − ½ log det P: Laplace's log marginal likelihood."""
        h, size = self.curvature.eigenvalues(), float(self.mean().square().sum())
        prior = 0.5 * len(h) * math.log(precision) - 0.5 * precision * size
        return float(self.log_likelihood) + prior - 0.5 * float((h + precision).log().sum())

    def best_precision(self) -> float:
        """The τ of the largest evidence: where τ |θ̂|² = Σ_k h_k / (h_k + τ), whose sides cross once (MacKay)."""
        return best_precision(self.curvature.eigenvalues(), float(self.mean().square().sum()))


# -- the method ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaplacePredictor(Predictor):
    """B heads drawn around the trained one, from one pass through the features."""

    posterior: Posterior
    prior_precision: float

    @property
    def net(self) -> nn.Module:
        return self.posterior.generator.net

    @property
    def module(self) -> nn.Module:
        return self.posterior

    def heads(self, start: int, stop: int, *, seed: int) -> Tensor:
        """θ_b for b in start … stop−1, each a function of (seed, b) alone, double precision: (stop − start, C, D̃)."""
        posterior = self.posterior
        keys = draw_keys(torch.arange(start, stop), seed, "laplace")
        mean = posterior.mean()
        noise = normals(keys, mean.numel()).to(mean.device)
        return mean + posterior.curvature.deviations(noise, self.prior_precision)

    def stream(self, x: Any, num_samples: int, *, seed: int) -> Stream:
        posterior = self.posterior
        generator = posterior.generator
        with eval_mode(generator):
            at = generator.at(to_net(generator, x))
        width = generator.split.width
        output = at.output if at.output.ndim > 1 else at.output[:, None]
        moments = None
        if at.passed.ends_at_head:
            variance = posterior.variance(at.passed.phi, self.prior_precision)
            moments = Moments(output, variance.sqrt().to(output))

        def chunks(size: int) -> Iterator[Tensor]:
            for start in range(0, num_samples, size):
                theta = self.heads(start, min(start + size, num_samples), seed=seed).to(at.passed.phi)
                samples = at.heads(theta[..., :width], theta[..., width] if posterior.biased else None)
                yield samples if samples.ndim > 2 else samples[..., None]
                del samples  # the next chunk finds the memory as this one did

        each = bytes_of(output) + 8 * bytes_of(posterior.mean())  # outputs, and what a draw of the head goes through
        return Stream(num_samples, each, chunks, moments)

    def log_evidence(self, prior_precision: float | None = None) -> float:
        """The log marginal likelihood of the training data, by Laplace's formula, at this prior precision."""
        return self.posterior.log_evidence(self.prior_precision if prior_precision is None else prior_precision)

    def config(self) -> dict[str, Any]:
        return {
            "method": "laplace",
            "head": self.posterior.generator.split.name,
            "structure": "full" if isinstance(self.posterior.curvature, Full) else "kron",
            "prior_precision": self.prior_precision,
        }

    @classmethod
    def restore(cls, config: dict[str, Any], net: nn.Module) -> "LaplacePredictor":
        generator = BootstrapGenerator(net, head=config["head"])
        return cls(Posterior(generator, config["structure"]).eval(), config["prior_precision"])


@dataclass(frozen=True)
class Laplace:
    """Options of the last-layer Laplace approximation.

    The net is trained as ever; one more pass over the training data gathers the curvature at its head (`around` does
    that alone, for a net that is trained already). `prior_precision` is τ; None takes the one of the largest marginal
    likelihood. `structure="full"` holds the whole precision matrix of the head, `"kron"` its Kronecker factors,
    `"auto"` the whole one for heads of up to 3000 numbers.

    For the squared error σ² is the mean squared residual of the trained net over all training points and outputs.
    Every pixel is a point; void ones count for nothing. Where the net upsamples its head's output, Λ is taken at the
    head's own resolution, and the outputs of a row that count are shared equally by its points there; a net that does
    anything else after its head (pooling, selecting, cropping) is refused. Of a stream one epoch's rows are seen.

    >>> from torch.utils.data import TensorDataset
    >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    >>> make_net = lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> data = TensorDataset(x, (x[:, 0] > 0).long())
    >>> predictor = Laplace(prior_precision=1.0).fit(make_net, data, Recipe(epochs=2, progress=False))
    >>> p = predictor.predict(torch.stack([x[0], 100 * x[0]]), 50)
    >>> bool(p.std[1, 0] > p.std[0, 0]), p.samples.shape  # less sure far from the data
    (True, torch.Size([50, 2, 2]))
    """

    loss: Loss = field(default_factory=CrossEntropy)
    prior_precision: float | None = None
    structure: Structure = "auto"
    head: str | None = None

    def __post_init__(self) -> None:
        check_loss(self.loss)
        likelihood_of(self.loss)
        tau = self.prior_precision
        number = isinstance(tau, int | float) and not isinstance(tau, bool)
        if tau is not None and not (number and 0.0 < tau < math.inf):
            raise ValueError(f"got prior_precision={tau!r}; expected a positive number, or None to choose it")
        if self.structure not in ("auto", "full", "kron"):
            raise ValueError(f"got structure={self.structure!r}; expected 'auto', 'full' or 'kron'")
        if self.head is not None and not isinstance(self.head, str):
            raise ValueError(f"got head={self.head!r}; expected the name of a layer")

    def fit(
        self,
        make_net: Callable[[], nn.Module],
        data: Dataset[Any],
        recipe: Recipe,
        *,
        validation: Dataset[Any] | None = None,
    ) -> LaplacePredictor:
        """Train the net that `make_net()` gives, on (x, y) rows, as the recipe says; then measure the curvature."""
        generator = self._generator(make_seeded(make_net, recipe.seed), data, recipe)

        def objective(g: nn.Module, batch: Batch) -> Tensor:
            losses = self.loss(g(to_net(g, batch.x)), batch.y)
            return weighted_loss(losses, losses.new_ones(len(batch.index)), unmasked(self.loss, batch.y))

        def objective_at(epoch: int) -> Objective:
            return objective

        def validate(g: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return loss_figures(self.loss, g(to_net(g, batch.x)), batch.y)

        train(
            generator,
            data,
            objective_at,
            recipe,
            validation=validation,
            validate=validate,
            identity=identity_of(self),
        )
        return self._predictor(generator.eval(), data, recipe)

    def around(self, net: nn.Module, data: Dataset[Any], recipe: Recipe) -> LaplacePredictor:
        """The predictor around a net that is trained already, on the data it was trained on; the net stays as it is."""
        return self._predictor(self._generator(net, data, recipe), data, recipe)

    def _generator(self, net: nn.Module, data: Dataset[Any], recipe: Recipe) -> BootstrapGenerator:
        example = example_of(net, data, seed=recipe.seed)
        generator = BootstrapGenerator(net, head=self.head, example=example)
        check_finish(generator, example)
        return generator

    def _predictor(self, generator: BootstrapGenerator, data: Dataset[Any], recipe: Recipe) -> LaplacePredictor:
        posterior = self.posterior(generator, data, recipe)
        tau = posterior.best_precision() if self.prior_precision is None else float(self.prior_precision)
        return LaplacePredictor(posterior, tau)

    def posterior(self, generator: BootstrapGenerator, data: Dataset[Any], recipe: Recipe) -> Posterior:
        """The Gaussian around a trained net: one pass over the data, held a batch at a time."""
        head = generator.split.head
        size = len(head.weight) * (generator.split.width + (head.bias is not None))
        posterior = Posterior(generator, "full" if self.structure == "full" or self._whole(size) else "kron")
        likelihood = likelihood_of(self.loss)
        total, count = 0.0, 0
        loader = Loader(
            data,
            batch_size=recipe.batch_size,
            seed=recipe.seed,
            shuffle=False,
            num_workers=recipe.num_workers,
            steps_per_epoch=recipe.steps_per_epoch,
        )
        with own_randomness(), eval_mode(generator), torch.no_grad():
            for _, batch, _ in shown(loader.epoch(0), loader.steps, recipe):
                at, y = generator.at(to_net(generator, batch.x)), batch.y.to(head.weight.device)
                losses = self.loss(at.output, y)  # zero where the label is void
                weighted_loss(losses, losses.new_ones(len(batch.index)))  # refuses a loss that reduces
                posterior.gather(at, likelihood, unmasked(self.loss, y))
                total, count = total + float(double(losses).sum()), count + losses.numel()
        scale, log_likelihood = _noise(likelihood, total, count)
        posterior.curvature.settle(scale)
        posterior.log_likelihood.fill_(log_likelihood)
        return posterior

    def _whole(self, size: int) -> bool:
        return self.structure == "auto" and size <= _FULL


def _noise(likelihood: Likelihood, total: float, count: int) -> tuple[float, float]:
    """(1/σ², log p(D | θ̂)) from the sum of `count` losses; σ² = 1 for all but the squared error."""
    if likelihood == "squared":
        variance = max(total / max(1, count), torch.finfo(torch.float32).tiny)
        return 1.0 / variance, -0.5 * count * math.log(2.0 * math.pi * variance) - 0.5 * total / variance
    if likelihood == "gaussian":
        return 1.0, -total - 0.5 * count * math.log(2.0 * math.pi)
    return 1.0, -total
