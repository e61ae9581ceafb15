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

from neuboots._prng import derive_keys, draw_normal
from neuboots._streaming import num_bytes
from neuboots.generator import BootstrapGenerator, GeneratorAtInput
from neuboots.head import cast_inputs, eval_mode
from neuboots.loading import Batch, EpochLoader, preserve_rng_state
from neuboots.losses import Loss, as_loss, valid_mask, weighted_mean
from neuboots.methods._base import load_example, register, validation_metrics
from neuboots.methods._curvature import (
    FullGGN,
    KronGGN,
    Likelihood,
    append_ones,
    check_after_head,
    head_parameters,
    infer_likelihood,
    maximize_evidence,
    output_hessian,
    point_weights,
    to_double,
    track_progress,
)
from neuboots.prediction import Moments, Predictor, SampleStream
from neuboots.training import Objective, TrainingConfig, describe_method, initialize_model, train

Structure = Literal["auto", "full", "kron"]

_FULL = 3000  # numbers in the head up to which P is held whole: its square in memory, its cube in time, once
_PIECE = 1 << 24  # numbers held at once while points are gone through


# -- the curvature of the loss -------------------------------------------------------------------------


class HeadPosterior(nn.Module):
    """N(θ̂, P⁻¹) over the head of a generator; θ̂ itself stays in the net."""

    log_likelihood: Tensor  # of the training data at θ̂

    def __init__(self, generator: BootstrapGenerator, structure: Literal["full", "kron"]) -> None:
        super().__init__()
        self.generator = generator
        head = generator.split.head
        self.biased = head.bias is not None
        self.outputs, self.width = len(head.weight), generator.split.width + self.biased  # C, D̃
        make = FullGGN if structure == "full" else KronGGN
        self.curvature = make(self.outputs, self.width).to(to_double(head.weight).device)
        self.register_buffer("log_likelihood", torch.zeros((), dtype=torch.float64))

    @property
    def _piece(self) -> int:
        return max(1, _PIECE // (self.outputs * self.width))

    def mean(self) -> Tensor:
        """θ̂, double precision: (C, D̃)."""
        return head_parameters(self.generator)

    def points(self, phi: Tensor) -> Tensor:
        """φ̃ of every point of φ, double precision: (M, D̃)."""
        return append_ones(phi.movedim(self.generator.split.axis, -1).flatten(0, -2), self.biased)

    def gather(self, at: GeneratorAtInput, likelihood: Likelihood, mask: Tensor | None) -> None:
        """The curvature at one batch; `mask` (N, *) says which of its outputs count."""
        phi, z = self.points(at.passed.phi), to_double(self.generator.split.head(at.passed.phi))
        z = z.movedim(self.generator.split.axis, -1).flatten(0, -2)  # (M, C)
        w = point_weights(at, mask).to(phi)
        pieces = (torch.split(part, self._piece) for part in (phi, z, w))
        for phi_part, z_part, w_part in zip(*pieces, strict=True):
            self.curvature.add(phi_part, *output_hessian(likelihood, z_part), w_part)

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
        return maximize_evidence(self.curvature.eigenvalues(), float(self.mean().square().sum()))


# -- the method ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaplacePredictor(Predictor):
    """B heads drawn around the trained one, from one pass through the features."""

    posterior: HeadPosterior
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
        keys = derive_keys(torch.arange(start, stop), seed, "laplace")
        mean = posterior.mean()
        noise = draw_normal(keys, mean.numel()).to(mean.device)
        return mean + posterior.curvature.deviations(noise, self.prior_precision)

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        posterior = self.posterior
        generator = posterior.generator
        with eval_mode(generator):
            at = generator.at(cast_inputs(generator, x))
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

        each = num_bytes(output) + 8 * num_bytes(posterior.mean())  # outputs, and what a draw of the head goes through
        return SampleStream(num_samples, each, chunks, moments)

    def log_evidence(self, prior_precision: float | None = None) -> float:
        """The log marginal likelihood of the training data, by Laplace's formula, at this prior precision."""
        return self.posterior.log_evidence(self.prior_precision if prior_precision is None else prior_precision)

    def config(self) -> dict[str, Any]:
        return {
            "method": "laplace",
            "head": self.posterior.generator.split.name,
            "structure": "full" if isinstance(self.posterior.curvature, FullGGN) else "kron",
            "prior_precision": self.prior_precision,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "LaplacePredictor":
        generator = BootstrapGenerator(net, head=config["head"])
        return cls(HeadPosterior(generator, config["structure"]).eval(), config["prior_precision"])


@register(
    "laplace",
    predictor=LaplacePredictor,
    summary="one net with a Gaussian over its head: B heads from one pass",
    predict_cost="O(L + K)",
    reference="MacKay, Neural Computation 1992; Daxberger et al., NeurIPS 2021",
)
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
    >>> model = lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> data = TensorDataset(x, (x[:, 0] > 0).long())
    >>> predictor = Laplace(prior_precision=1.0).fit(model, data, TrainingConfig(epochs=2, progress=False))
    >>> p = predictor.predict(torch.stack([x[0], 100 * x[0]]), 50)
    >>> bool(p.std[1, 0] > p.std[0, 0]), p.samples.shape  # less sure far from the data
    (True, torch.Size([50, 2, 2]))
    """

    loss: Loss = field(default_factory=nn.CrossEntropyLoss)
    prior_precision: float | None = None
    structure: Structure = "auto"
    head: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", as_loss(self.loss))
        infer_likelihood(self.loss)
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
        model: Callable[[], nn.Module],
        data: Dataset[Any],
        config: TrainingConfig,
        *,
        val_data: Dataset[Any] | None = None,
    ) -> LaplacePredictor:
        """Train the net that `model()` gives, on (x, y) rows, as the recipe says; then measure the curvature."""
        generator = self._generator(initialize_model(model, config.seed), data, config)

        def objective(g: nn.Module, batch: Batch) -> Tensor:
            losses = self.loss(g(cast_inputs(g, batch.x)), batch.y)
            return weighted_mean(losses, losses.new_ones(len(batch.index)), valid_mask(self.loss, batch.y))

        def objective_at(epoch: int) -> Objective:
            return objective

        def validate(g: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return validation_metrics(self.loss, g(cast_inputs(g, batch.x)), batch.y)

        train(
            generator,
            data,
            objective_at,
            config,
            val_data=val_data,
            validate=validate,
            identity=describe_method(self),
        )
        return self._predictor(generator.eval(), data, config)

    def from_trained(self, net: nn.Module, data: Dataset[Any], config: TrainingConfig) -> LaplacePredictor:
        """The predictor around a net that is trained already, on the data it was trained on; the net stays as it is."""
        return self._predictor(self._generator(net, data, config), data, config)

    def _generator(self, net: nn.Module, data: Dataset[Any], config: TrainingConfig) -> BootstrapGenerator:
        example = load_example(net, data, seed=config.seed)
        generator = BootstrapGenerator(net, head=self.head, example=example)
        check_after_head(generator, example)
        return generator

    def _predictor(self, generator: BootstrapGenerator, data: Dataset[Any], config: TrainingConfig) -> LaplacePredictor:
        posterior = self.posterior(generator, data, config)
        tau = posterior.best_precision() if self.prior_precision is None else float(self.prior_precision)
        return LaplacePredictor(posterior, tau)

    def posterior(self, generator: BootstrapGenerator, data: Dataset[Any], config: TrainingConfig) -> HeadPosterior:
        """The Gaussian around a trained net: one pass over the data, held a batch at a time."""
        head = generator.split.head
        size = len(head.weight) * (generator.split.width + (head.bias is not None))
        posterior = HeadPosterior(generator, "full" if self.structure == "full" or self._whole(size) else "kron")
        likelihood = infer_likelihood(self.loss)
        total, count = 0.0, 0
        loader = EpochLoader(
            data,
            batch_size=config.batch_size,
            seed=config.seed,
            shuffle=False,
            num_workers=config.num_workers,
            steps_per_epoch=config.steps_per_epoch,
        )
        with preserve_rng_state(), eval_mode(generator), torch.no_grad():
            for _, batch, _ in track_progress(loader.epoch(0), loader.steps, config):
                at, y = generator.at(cast_inputs(generator, batch.x)), batch.y.to(head.weight.device)
                losses = self.loss(at.output, y)  # zero where the label is void
                weighted_mean(losses, losses.new_ones(len(batch.index)))  # refuses a loss that reduces
                posterior.gather(at, likelihood, valid_mask(self.loss, y))
                total, count = total + float(to_double(losses).sum()), count + losses.numel()
        scale, log_likelihood = _noise(likelihood, total, count)
        posterior.curvature.settle(scale)
        posterior.log_likelihood.fill_(log_likelihood)
        return posterior

    def _whole(self, size: int) -> bool:
        return self.structure == "auto" and size <= _FULL


def _noise(likelihood: Likelihood, total: float, count: int) -> tuple[float, float]:
    """(1/σ², log p(D | θ̂)) from the sum of `count_rows` losses; σ² = 1 for all but the squared error."""
    if likelihood == "squared":
        variance = max(total / max(1, count), torch.finfo(torch.float32).tiny)
        return 1.0 / variance, -0.5 * count * math.log(2.0 * math.pi * variance) - 0.5 * total / variance
    if likelihood == "gaussian":
        return 1.0, -total - 0.5 * count * math.log(2.0 * math.pi)
    return 1.0, -total
