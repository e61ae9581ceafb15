"""Amortized bootstrap: an implicit model of the net's parameters, trained on resampled data.

    θ = f_φ(ξ),  ξ ~ N(0, I);   φ̂ = argmin_φ 1/K Σ_k 1/n Σᵢ w_{ki} ℓ(net(Xᵢ; f_φ(ξ_k)), yᵢ),   w_k ~ Multinomial(n; 1/n)

Algorithm 1 of the paper: K resampled data sets w_1 … w_K, drawn again every few epochs; K noise vectors ξ_1 … ξ_K,
drawn again at every step; θ_k is trained on data set k. At prediction each noise vector gives a net.

ξ_k is independent of w_k, and E w_{ki} = 1: the objective is the mean over ξ of the ordinary training loss at f_φ(ξ).
It is minimal where every f_φ(ξ) minimises that loss, so that a model with a single minimum loses all variance. The
variance that remains after training comes from the initial φ, from several minima and from the noise of the steps; it
is not that of a bootstrap distribution, and shrinks during training.

Here f_φ has one hidden layer, θ = θ₀ + A tanh(W ξ + b), with a dense A and the net's initial parameters as θ₀: H + 1
numbers for each parameter of the net, feasible for a net with a million parameters.

Nalisnick and Smyth, The amortized bootstrap, ICML workshop on implicit models, 2017.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuboots._prng import derive_keys, draw_normal, stable_hash
from neuboots._validation import ArgumentError, Count, check_int, check_positive, check_types
from neuboots.head import add_output_axis, cast_inputs, channels_first
from neuboots.loading import Batch, dataset_length
from neuboots.losses import valid_mask, weighted_mean
from neuboots.methods._base import functional_output, register
from neuboots.prediction import Predictor, SampleStream, stream_forward_passes
from neuboots.training import BaseMethod, FitInputs, Objective, prepare_net, validation_metrics
from neuboots.weights import Multinomial
from neuboots_paper.baselines.gbs import check_uncompiled


def draw_noise(ids: Tensor, size: int, *name: int | str) -> Tensor:
    """Draw ξ for each id under a name: (num, d)."""
    return draw_normal(derive_keys(ids, *name), size)


class ImplicitModel(nn.Module):
    """A net with parameters θ₀ + A tanh(W ξ + b), where θ₀ are its own; frozen parameters and buffers are shared.

    Args:
        net: The net.
        latent: Dimension of ξ.
        hidden: Number of hidden units.
        spread: Initial standard deviation of a parameter, relative to the size of its tensor.
        frozen: Names of further parameters that do not depend on ξ.
        seed: Seed of the initial W and A.

    Example:
        >>> model = ImplicitModel(nn.Linear(4, 3), latent=2, hidden=8)
        >>> model(torch.zeros(5, 4), torch.ones(2)).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        latent: int,
        hidden: int,
        spread: float = 0.1,
        frozen: Iterable[str] = (),
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_uncompiled(net)
        self.net = net
        self.latent = latent
        self.frozen = sorted({name for name, p in net.named_parameters() if not p.requires_grad} | set(frozen))
        generated = {name: p for name, p in net.named_parameters() if name not in self.frozen}
        if not generated:
            raise ArgumentError("net", type(net), "a net with parameters that require gradients")
        rng = torch.Generator().manual_seed(stable_hash(seed, "implicit"))

        def draw(*shape: int, reference: Tensor, scale: float) -> nn.Parameter:
            return nn.Parameter((scale * torch.randn(*shape, generator=rng)).to(reference))

        first = next(iter(generated.values()))
        self.W = draw(hidden, latent, reference=first, scale=1 / math.sqrt(latent))
        self.b = nn.Parameter(torch.zeros_like(self.W[:, 0]))
        self.A = nn.ParameterList(
            draw(hidden, *p.shape, reference=p, scale=spread * _root_mean_square(p) / math.sqrt(hidden))
            for p in generated.values()
        )
        self.names = list(generated)

    def generate_parameters(self, xi: Tensor) -> dict[str, Tensor]:
        """Compute θ = f_φ(ξ), by the names of the net's parameters; ξ is (d,)."""
        h = torch.tanh(self.W @ xi.to(self.W) + self.b)  # (H,)
        theta = dict(self.net.named_parameters())
        return {name: theta[name] + torch.tensordot(h.to(A), A, 1) for name, A in zip(self.names, self.A, strict=True)}

    def forward(self, x: Any, xi: Tensor) -> Tensor:
        """Compute net(x; f_φ(ξ))."""
        return channels_first(self.net, x, functional_output(self.net, self.generate_parameters(xi), x))


def _root_mean_square(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt()) if tensor.numel() else 0.0


@dataclass(frozen=True)
class AmortizedBootstrapPredictor(Predictor):
    """Predictor whose replicate b is the net with the parameters f_φ(ξ_b).

    Args:
        model: The implicit model.
    """

    model: ImplicitModel

    @property
    def net(self) -> nn.Module:
        return self.model.net

    @property
    def module(self) -> nn.Module:
        return self.model

    def noise(self, b: int, *, seed: int = 0) -> Tensor:
        """Return ξ_b of a seed: (d,).

        Args:
            b: Number of the replicate.
            seed: Seed of the replicates.
        """
        return draw_noise(torch.tensor([b]), self.model.latent, seed, "replicate")[0]

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        model = self.model
        x = cast_inputs(model, x)

        def run(b: int) -> Tensor:
            return add_output_axis(model(x, self.noise(b, seed=seed)))

        return stream_forward_passes(num_samples, run)

    def config(self) -> dict[str, Any]:
        hidden, latent = self.model.W.shape
        return {"method": "amortized-bootstrap", "latent": latent, "hidden": hidden, "frozen": self.model.frozen}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "AmortizedBootstrapPredictor":
        check_types("predictor", config, {"latent": Count, "hidden": Count, "frozen": list[str]})
        model = ImplicitModel(net, latent=config["latent"], hidden=config["hidden"], frozen=config["frozen"])
        return cls(model.eval())


@register(
    "amortized-bootstrap",
    predictor=AmortizedBootstrapPredictor,
    summary="a net that generates the parameters of nets, trained on K resampled data sets",
    train_cost="O(LK)",
    reference="Nalisnick and Smyth, ICML workshop on implicit models, 2017",
)
@dataclass(frozen=True)
class AmortizedBootstrap(BaseMethod[AmortizedBootstrapPredictor]):
    """An implicit model of the parameters; a step has K passes.

    Args:
        loss: Loss per example.
        num_resamples: Number of resampled data sets K.
        resample_every: Number of epochs for which they are used (the paper: 3 to 5 work well).
        latent: Dimension of ξ.
        hidden: Number of hidden units of f_φ.
        spread: Initial standard deviation of a parameter, relative to the size of its tensor.

    Example:
        >>> from neuboots import TrainingConfig
        >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> config = TrainingConfig(epochs=2, progress=False)
        >>> predictor = AmortizedBootstrap(num_resamples=2).fit(net, (x, (x[:, 0] > 0).long()), config)
        >>> predictor.predict(x[:5], 20).samples.shape  # (B, N, C)
        torch.Size([20, 5, 2])
    """

    num_resamples: int = 5
    resample_every: int = 3
    latent: int = 10
    hidden: int = 10
    spread: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_resamples", "resample_every", "latent", "hidden"):
            check_int(name, getattr(self, name), minimum=1)
        check_positive("spread", self.spread)

    def _fit(self, inputs: FitInputs) -> AmortizedBootstrapPredictor:
        n, seed = dataset_length(inputs.data), inputs.config.seed
        if n is None:
            raise ArgumentError("data", inputs.data, "a data set with a length, from which points are drawn")
        net, _ = prepare_net(inputs)
        model = ImplicitModel(net, latent=self.latent, hidden=self.hidden, spread=self.spread, seed=seed)

        def objective_at(epoch: int) -> Objective:
            counts = self.draw_resamples(epoch // self.resample_every, n, seed=seed)  # (K, n)
            return lambda g, batch: self.compute_objective(g, batch, counts, seed=seed)

        def validate(g: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return validation_metrics(self.loss, g(cast_inputs(g, batch.x), torch.zeros(self.latent)), batch.y)

        self._train(model, inputs, objective_at, validate)
        return AmortizedBootstrapPredictor(model.eval())

    def draw_resamples(self, number: int, n: int, *, seed: int) -> Tensor:
        """Draw how often each of the n points is in each of the K data sets: (K, n).

        Args:
            number: Number of the round of data sets.
            n: Number of points.
            seed: Seed of the draws.
        """
        return Multinomial().sample(derive_keys(torch.arange(self.num_resamples), seed, "resample", number), n)

    def compute_objective(self, model: nn.Module, batch: Batch, counts: Tensor, *, seed: int) -> Tensor:
        """Compute 1/K Σ_k of the weighted mean losses of the data sets with the parameters f_φ(ξ_k) of this step.

        Args:
            model: The implicit model.
            batch: A batch of examples.
            counts: How often each point is in each data set, (K, n).
            seed: Seed of the noise.
        """
        x, mask = cast_inputs(model, batch.x), valid_mask(self.loss, batch.y)
        noise = draw_noise(torch.arange(len(counts)), self.latent, seed, "step", batch.step)  # (K, d)
        pairs = zip(noise, counts[:, batch.index.cpu()], strict=True)
        return torch.stack([weighted_mean(self.loss(model(x, xi), batch.y), w, mask) for xi, w in pairs]).mean()
