"""Last-layer Laplace approximation: a Gaussian posterior over the head of a trained net.

    θ ~ N(θ̂, P⁻¹),   P = Σᵢ Jᵢᵀ Λᵢ Jᵢ + τ I,   Jᵢ = I ⊗ φ̃ᵢᵀ,   φ̃ = (φ, 1)
    f_b(x) = θ_b φ̃(x),   Var f(x) = φ̃ᵀ P⁻¹ φ̃   (for each output)

θ̂ are the head's weights and bias, φ its input, Λ the Hessian of the loss in the outputs (generalized Gauss–Newton) and
τ the prior precision. P is stored whole or as a Kronecker product.

MacKay, A practical Bayesian framework for backpropagation networks, Neural Computation 1992. Kristiadi, Hein and
Hennig, Being Bayesian, even just a bit, fixes overconfidence in ReLU networks, ICML 2020. Daxberger et al., Laplace
Redux – effortless Bayesian deep learning, NeurIPS 2021. Kronecker factors: Ritter, Botev and Barber, A scalable
Laplace approximation for neural networks, ICLR 2018.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from neuboots._prng import derive_keys, draw_normal
from neuboots._validation import ArgumentError, Positive, check_choice, check_positive, check_types
from neuboots.loading import dataset_length
from neuboots.methods._base import PostHocMethod, register
from neuboots.methods._curvature import (
    MAX_FULL_SIZE,
    FeaturePass,
    FullGGN,
    HeadReplicates,
    KronGGN,
    head_parameters,
    map_points,
    maximize_evidence,
    output_hessian,
    split_at_head,
    to_double,
)
from neuboots.methods._least_squares import Likelihood, infer_likelihood
from neuboots.methods.neuboots import BootstrapGenerator, GeneratorAtInput
from neuboots.training import FitInputs

_CHUNK_ELEMENTS = 1 << 24


class _HeadPosterior(nn.Module):
    """N(θ̂, P⁻¹) over the head of a generator; θ̂ itself stays in the net.

    With fewer points than features the curvature is that of QᵀΦ̃, and zero outside of the span of Q (D̃, r).
    """

    log_likelihood: Tensor  # of the training data at θ̂
    basis: Tensor | None  # Q

    def __init__(
        self, generator: BootstrapGenerator, structure: Literal["full", "kron"], rank: int | None = None
    ) -> None:
        super().__init__()
        theta = head_parameters(generator)
        outputs, width = theta.shape
        self.generator = generator
        self.curvature = (FullGGN if structure == "full" else KronGGN)(outputs, rank or width).to(theta.device)
        self.register_buffer("basis", None if rank is None else theta.new_zeros(width, rank))
        self.register_buffer("log_likelihood", torch.zeros((), dtype=torch.float64))


@dataclass(frozen=True)
class LaplacePredictor(HeadReplicates):
    """Replicates whose heads are drawn from the posterior, from one pass through the features.

    Attributes:
        posterior: The Gaussian over the head.
        prior_precision: τ.
    """

    posterior: _HeadPosterior
    prior_precision: float

    @property
    def module(self) -> nn.Module:
        return self.posterior

    def heads(self, start: int, stop: int, *, seed: int) -> Tensor:
        theta, curvature, basis = head_parameters(self.generator), self.posterior.curvature, self.posterior.basis
        keys = derive_keys(torch.arange(start, stop), seed, "laplace")
        noise = draw_normal(keys, theta.numel()).to(theta.device)
        root = (curvature.eigenvalues() + self.prior_precision).rsqrt()
        # the symmetric root: eigenvectors of equal eigenvalues, which no machine chooses alike, cancel
        if basis is None:
            return theta + curvature.lift(curvature.project(noise) * root).view(-1, *theta.shape)
        basis, outside = to_double(basis), self.prior_precision**-0.5  # I outside of the span, times τ^-½
        noise = noise.view(-1, *theta.shape)
        inside = curvature.lift(curvature.project((noise @ basis).flatten(1)) * (root - outside))
        heads: Tensor = theta + outside * noise + inside.view(len(noise), len(theta), -1) @ basis.T
        return heads

    def _std(self, at: GeneratorAtInput) -> Tensor | None:
        if not at.trace.ends_at_head:
            return None
        curvature = self.posterior.curvature
        covariance = (curvature.eigenvalues() + self.prior_precision).reciprocal()
        size = _CHUNK_ELEMENTS // len(covariance)

        def variance(phi: Tensor) -> Tensor:
            if self.posterior.basis is None:
                return curvature.diagonal_at(phi, covariance)
            inside = phi @ to_double(self.posterior.basis)
            outside = (phi.square().sum(1) - inside.square().sum(1)).clamp_min(0.0) / self.prior_precision
            return curvature.diagonal_at(inside, covariance) + outside[:, None]

        return map_points(at, variance, size).sqrt()

    def log_evidence(self, prior_precision: float | None = None) -> float:
        """Laplace approximation of the log marginal likelihood of the training data.

            log p(D | θ̂) + log p(θ̂ | τ) + ½ K log 2π − ½ log det P

        Args:
            prior_precision: τ; None is the one of this predictor.
        """
        tau = self.prior_precision if prior_precision is None else prior_precision
        h, squared_norm = self.posterior.curvature.eigenvalues(), float(head_parameters(self.generator).square().sum())
        prior = 0.5 * len(h) * math.log(tau) - 0.5 * tau * squared_norm  # log τ cancels where the curvature is zero
        return float(self.posterior.log_likelihood) + prior - 0.5 * float((h + tau).log().sum())

    def config(self) -> dict[str, Any]:
        return {
            "method": "laplace",
            "head": self.generator.split.name,
            "structure": "full" if isinstance(self.posterior.curvature, FullGGN) else "kron",
            "prior_precision": self.prior_precision,
            "rank": None if self.posterior.basis is None else self.posterior.basis.shape[1],
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "LaplacePredictor":
        check_types(
            "predictor", config, {"head": str, "structure": Literal["full", "kron"], "prior_precision": Positive}
        )
        generator = BootstrapGenerator(net, head=config["head"])
        posterior = _HeadPosterior(generator, config["structure"], config.get("rank"))
        return cls(posterior.eval(), config["prior_precision"])


@register(
    "laplace",
    predictor=LaplacePredictor,
    summary="one net with a Gaussian posterior over its head: B heads from one pass",
    predict_cost="O(L + K)",
    reference="MacKay, Neural Computation 1992; Daxberger et al., NeurIPS 2021",
)
@dataclass(frozen=True)
class Laplace(PostHocMethod[LaplacePredictor]):
    """Last-layer Laplace approximation.

    The net is trained with the mean loss; one more pass over the training data computes the curvature at its head. For
    the squared error σ² is the mean squared residual over all training points and outputs. Every pixel is a point;
    ignored ones count for nothing. Where the net upsamples the output of its head, Λ is taken at the head's own
    resolution, and the outputs of an example that count are divided equally among its points there. Anything else after
    the head (pooling, selecting, cropping) raises.

    Args:
        loss: Cross-entropy, binary cross-entropy, squared error or `GaussianNLL`, without class weights.
        prior_precision: τ; None maximizes the marginal likelihood.
        structure: "full" stores the whole precision matrix of the head, "kron" its Kronecker factors, "auto" is "full"
            for heads of up to 3000 parameters.
        head: Name of the last layer; None finds it.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots import TrainingConfig
        >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> data = TensorDataset(x, (x[:, 0] > 0).long())
        >>> predictor = Laplace(prior_precision=1.0).fit(lambda: net, data, TrainingConfig(epochs=2, progress=False))
        >>> p = predictor.predict(torch.stack([x[0], 100 * x[0]]), 50)
        >>> bool(p.std[1, 0] > p.std[0, 0]), p.samples.shape  # more uncertain far from the data
        (True, torch.Size([50, 2, 2]))
    """

    prior_precision: float | None = None
    structure: Literal["auto", "full", "kron"] = "auto"
    head: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._likelihood()
        if self.prior_precision is not None:
            check_positive("prior_precision", self.prior_precision)
        check_choice("structure", self.structure, ("auto", "full", "kron"))

    def _likelihood(self) -> Likelihood:
        likelihood = infer_likelihood(self.loss)
        if likelihood is None:
            expected = "cross-entropy, binary cross-entropy, squared error or GaussianNLL(), without class weights"
            raise ArgumentError("loss", self.loss, expected)
        return likelihood

    def _check(self, net: nn.Module, inputs: FitInputs) -> None:
        generator, n = split_at_head(net, self.head, inputs), dataset_length(inputs.data)
        if n is not None and n >= head_parameters(generator).shape[1]:  # known before training
            FeaturePass(generator, self.loss, inputs).check_cost(full=self.structure == "full")

    def _make_predictor(self, net: nn.Module, inputs: FitInputs) -> LaplacePredictor:
        likelihood, generator = self._likelihood(), split_at_head(net, self.head, inputs)
        points = FeaturePass(generator, self.loss, inputs)
        points.reduce()
        full = self.structure == "full" or (self.structure == "auto" and points.num_parameters <= MAX_FULL_SIZE)
        points.check_cost(full=full)
        rank = None if points.basis is None else points.basis.shape[1]
        posterior = _HeadPosterior(generator, "full" if full else "kron", rank)
        posterior.basis = points.basis
        for phi, part in points.features():
            posterior.curvature.add(phi, output_hessian(likelihood, to_double(part.z)), part.weight.to(phi))
        total, count = points.total_loss, points.num_losses
        scale, log_likelihood = 1.0, -total
        if likelihood == "squared":
            variance = max(total / max(1, count), torch.finfo(torch.float32).tiny)
            scale = 1.0 / variance
            log_likelihood = -0.5 * count * math.log(2.0 * math.pi * variance) - 0.5 * total / variance
        elif likelihood == "gaussian":
            log_likelihood -= 0.5 * count * math.log(2.0 * math.pi)
        posterior.curvature.decompose(scale)
        posterior.log_likelihood.fill_(log_likelihood)
        tau = self.prior_precision
        if tau is None:
            tau = maximize_evidence(posterior.curvature.eigenvalues(), points.squared_norm)
        return LaplacePredictor(posterior, float(tau))
