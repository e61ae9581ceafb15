"""LP-BNN: BatchEnsemble whose input factors are decoded from a variational autoencoder in each layer.

    z ~ N(μ(r_k), σ²(r_k)),   r̂ = decoder(z),   y = s_k ∘ (W (x ∘ r̂)) + b_k
    loss = ℓ + β · mean over layers of [ E ‖r̂ − r‖² / (K·in) + Σ_k KL(N(μ_k, σ²_k) ‖ N(0, 1)) ]

r_k is drawn once and is the code of the member; the encoder (a ReLU layer, then one layer each for μ and log σ²), the
linear decoder, s_k and b_k are trained. The latent z is drawn in training and at prediction, so that the number of
replicates is unlimited: replicate b is a member with its own draw.

Franchi, Bursuc, Aldea, Dubuisson and Bloch, Encoding the latent posterior of Bayesian neural networks for uncertainty
quantification, arXiv:2012.02818, 2020 (IEEE TPAMI 2024).
"""

from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from neuboots._prng import derive_keys, draw_normal
from neuboots._validation import ArgumentError, Count, check_int, check_types
from neuboots.head import cast_inputs, copy_to_meta
from neuboots.loading import preserve_rng_state, seed_everything
from neuboots.methods._base import register, set_context
from neuboots.methods._rank_one import (
    RankOneLayer,
    RankOneMethod,
    check_ensemble,
    draw_factors,
    export_member,
    make_ensemble,
    run_members,
    selected_members,
)
from neuboots.methods.batch_ensemble import BatchEnsemblePredictor
from neuboots.prediction import SampleStream, draw_member_order, stream_forward_passes
from neuboots.training import FitInputs, prepare_net

# (seed, b) of the replicate whose latents are drawn; None: a new draw in training, the mean μ in evaluation.
_REPLICATE: ContextVar[tuple[int, int] | None] = ContextVar("replicate", default=None)


class LatentRankOneLayer(RankOneLayer):
    """A rank-one layer with r̂ = decoder(μ + σ ε) instead of r.

    Args:
        layer: The Linear or convolution.
        name: Name of the layer, which names its draws.
        num_members: Number of members K.
        latent: Dimension of z.
    """

    def __init__(self, layer: nn.Module, name: str, *, num_members: int, latent: int) -> None:
        super().__init__(layer, num_members)
        self.name = name
        self.r.requires_grad_(False)
        width = self.r.shape[1]
        self.encoder = nn.Sequential(nn.Linear(width, latent), nn.ReLU())
        self.mean = nn.Linear(latent, latent)
        self.log_variance = nn.Linear(latent, latent)
        self.decoder = nn.Linear(latent, width)
        nn.init.ones_(self.decoder.bias)  # the mean of r: factors around 0 would pass no signal
        self.to(self.r)

    def encode(self) -> tuple[Tensor, Tensor]:
        """Compute μ and log σ² of every member: (K, latent) each."""
        hidden = self.encoder(self.r)
        return self.mean(hidden), self.log_variance(hidden)

    def factors(self) -> tuple[Tensor, Tensor]:
        members = selected_members(self.num_members)
        mean, log_variance = (part[members] for part in self.encode())  # (R, latent)
        return self.decoder(mean + (0.5 * log_variance).exp() * self._draw_noise(mean)), self.s[members]

    def _draw_noise(self, reference: Tensor) -> Tensor:
        replicate = _REPLICATE.get()
        if replicate is None:
            return torch.randn_like(reference) if self.training else torch.zeros_like(reference)
        seed, b = replicate
        keys = derive_keys(torch.tensor([b]), seed, "latent", self.name)
        return draw_normal(keys, reference.shape[1]).to(reference)  # (1, latent)

    def negative_elbo(self) -> Tensor:
        """Compute the reconstruction error, exact since the decoder is linear, and the divergence from N(0, 1)."""
        mean, log_variance = self.encode()
        variance = log_variance.exp()
        gap: Tensor = self.decoder(mean) - self.r  # (K, in)
        error = gap.square() + variance @ self.decoder.weight.square().T
        divergence = 0.5 * (mean.square() + variance - 1 - log_variance).sum()
        return error.mean() + divergence


def _mean_negative_elbo(ensemble: nn.Module, weight: float) -> Tensor:
    layers = [layer for layer in ensemble.modules() if isinstance(layer, LatentRankOneLayer)]
    return weight * torch.stack([layer.negative_elbo() for layer in layers]).mean()


def _make_latent_ensemble(net: nn.Module, num_members: int, latent: int, *, seed: int = 0) -> nn.Module:
    """Replace the layers of a net by latent rank-one layers, in place."""

    def make_layer(layer: nn.Module, name: str) -> LatentRankOneLayer:
        seed_everything(seed, "autoencoder", name)
        return LatentRankOneLayer(layer, name, num_members=num_members, latent=latent)

    with preserve_rng_state():
        return make_ensemble(net, num_members, make_layer)


@dataclass(frozen=True)
class LPBNNPredictor(BatchEnsemblePredictor):
    """Predictor whose replicate b is member k(b), as in a BatchEnsemble, with latents drawn by (seed, b, layer).

    Args:
        modified: The net with latent rank-one layers.
        skeleton: The net before its layers were replaced, on the meta device.
        num_members: Number of members K.
        latent: Dimension of z.
    """

    latent: int

    @property
    def num_distinct(self) -> None:
        return None  # every replicate draws its own latents

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        x = cast_inputs(self.modified, x)

        def run(b: int) -> Tensor:
            member = int(draw_member_order(self.num_members, b + 1, seed=seed, start=b))
            with set_context(_REPLICATE, (seed, b)):
                return run_members(self.modified, x, [member])[0]

        return stream_forward_passes(num_samples, run)

    def export(self, b: int, *, seed: int = 0) -> nn.Module:
        """Return one replicate as a plain net.

        Args:
            b: Number of the replicate.
            seed: Seed of the replicates, as in `predict`.
        """
        member = int(draw_member_order(self.num_members, b + 1, seed=seed, start=b))
        with set_context(_REPLICATE, (seed, b)):
            return export_member(self.modified, member)

    def config(self) -> dict[str, Any]:
        return {"method": "lp-bnn", "num_members": self.num_members, "latent": self.latent}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "LPBNNPredictor":
        check_types("predictor", config, {"num_members": Count, "latent": Count})
        skeleton, num_members, latent = copy_to_meta(net), config["num_members"], config["latent"]
        return cls(_make_latent_ensemble(net, num_members, latent).eval(), skeleton, num_members, latent)


@register(
    "lp-bnn",
    predictor=LPBNNPredictor,
    summary="BatchEnsemble with factors drawn from a variational autoencoder in each layer",
    train_cost="O(LK)",
    reference="Franchi, Bursuc, Aldea, Dubuisson and Bloch, arXiv:2012.02818, 2020",
)
@dataclass(frozen=True)
class LPBNN(RankOneMethod[LPBNNPredictor]):
    """BatchEnsemble with factors drawn from a variational autoencoder in each layer.

    Args:
        loss: Loss per example.
        num_members: Number of members K.
        latent: Dimension of z.
        elbo_weight: Weight β of the autoencoders' loss.

    Example:
        >>> from neuboots import TrainingConfig
        >>> data = (torch.randn(8, 2), torch.arange(8) % 3)
        >>> net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> predictor = LPBNN(num_members=2, latent=4).fit(net, data, TrainingConfig(epochs=1, progress=False))
        >>> predictor.predict(torch.zeros(5, 2), 9).samples.shape  # (B, N, C)
        torch.Size([9, 5, 3])
    """

    latent: int = 32
    elbo_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("latent", self.latent, minimum=1)
        if not 0 <= self.elbo_weight < float("inf"):
            raise ArgumentError("elbo_weight", self.elbo_weight, "a finite number, at least 0")

    def _fit(self, inputs: FitInputs) -> LPBNNPredictor:
        net, example = prepare_net(inputs, copy=True)
        skeleton, seed = copy_to_meta(net), inputs.config.seed
        ensemble = _make_latent_ensemble(net, self.num_members, self.latent, seed=seed)
        draw_factors(ensemble, "normal", seed=seed)
        with set_context(_REPLICATE, (seed, 0)):  # one draw of the latents in all passes that are compared
            check_ensemble(ensemble, self.num_members, example)
        self._train_members(ensemble, inputs, partial(_mean_negative_elbo, weight=self.elbo_weight))
        return LPBNNPredictor(ensemble.eval(), skeleton, self.num_members, self.latent)
