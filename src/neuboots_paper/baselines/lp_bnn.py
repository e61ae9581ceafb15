"""LP-BNN: BatchEnsemble whose input factors come out of a small variational autoencoder in each layer.

    z ~ N(μ(r_k), σ²(r_k)),   r̂ = decoder(z),   y = s_k ∘ (W (x ∘ r̂)) + b_k
    loss = ℓ + β · mean over layers of [ E ‖r̂ − r‖² / (K·in) + Σ_k KL(N(μ_k, σ²_k) ‖ N(0, 1)) ]

r_k is drawn once and is the member's code; the encoder (a ReLU layer, then one layer each for μ and log σ²), the
linear decoder, s_k and b_k are learned. The latent z is drawn in training and at prediction, so there are as many
replicates as one likes: replicate b is a member with a draw of its own.

Franchi, Bursuc, Aldea, Dubuisson and Bloch, Encoding the latent posterior of Bayesian neural networks for uncertainty
quantification, arXiv:2012.02818, 2020 (IEEE TPAMI 2024).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._prng import derive_keys, draw_normal
from neuboots.head import cast_inputs, copy_to_meta, eval_mode, unwrap_model
from neuboots.loading import preserve_rng_state, seed_everything
from neuboots.losses import CrossEntropy, Loss, check_loss
from neuboots.methods._base import load_example, register
from neuboots.methods.batch_ensemble import (
    BatchEnsemblePredictor,
    RankOneLayer,
    check_ensemble,
    draw_factors,
    export_member,
    fit_ensemble,
    make_ensemble,
    run_members,
    selected_members,
)
from neuboots.methods.ensembles import check_members
from neuboots.prediction import SampleStream, draw_member_order, stream_forward_passes
from neuboots.training import TrainingConfig, describe_method, initialize_model

# (seed, b) of the replicate whose latents are drawn; None: a fresh draw in training, the mean μ in evaluation.
_REPLICATE: ContextVar[tuple[int, int] | None] = ContextVar("replicate", default=None)


@contextmanager
def _replicate(seed: int, b: int) -> Iterator[None]:
    token = _REPLICATE.set((seed, b))
    try:
        yield
    finally:
        _REPLICATE.reset(token)


class LatentRankOne(RankOneLayer):
    """A rank-one layer with r̂ = decoder(μ + σ ε) in the place of r."""

    def __init__(self, layer: nn.Module, name: str, *, num_members: int, latent: int) -> None:
        super().__init__(layer, num_members)
        self.name = name  # of its draws
        self.r.requires_grad_(False)
        width = self.r.shape[1]
        self.encoder = nn.Sequential(nn.Linear(width, latent), nn.ReLU())
        self.mean = nn.Linear(latent, latent)
        self.log_variance = nn.Linear(latent, latent)
        self.decoder = nn.Linear(latent, width)
        nn.init.ones_(self.decoder.bias)  # the mean of r: factors around 0 let no signal through to learn from
        self.to(self.r)

    def encode(self) -> tuple[Tensor, Tensor]:
        """μ and log σ² of every member: (K, latent) each."""
        hidden = self.encoder(self.r)
        return self.mean(hidden), self.log_variance(hidden)

    def factors(self) -> tuple[Tensor, Tensor]:
        members = selected_members(self.num_members)
        mean, log_variance = (part[members] for part in self.encode())  # (R, latent)
        return self.decoder(mean + (0.5 * log_variance).exp() * self._noise(mean)), self.s[members]

    def _noise(self, like: Tensor) -> Tensor:
        replicate = _REPLICATE.get()
        if replicate is None:
            return torch.randn_like(like) if self.training else torch.zeros_like(like)
        seed, b = replicate
        keys = derive_keys(torch.tensor([b]), seed, "latent", self.name)
        return draw_normal(keys, like.shape[1]).to(like)  # (1, latent)

    def negative_elbo(self) -> Tensor:
        """The reconstruction error, exact since the decoder is linear, and the divergence from N(0, 1)."""
        mean, log_variance = self.encode()
        variance = log_variance.exp()
        gap: Tensor = self.decoder(mean) - self.r  # (K, in)
        error = gap.square() + variance @ self.decoder.weight.square().T
        divergence = 0.5 * (mean.square() + variance - 1 - log_variance).sum()
        return error.mean() + divergence


def _mean_negative_elbo(ensemble: nn.Module, weight: float) -> Tensor:
    layers = [layer for layer in ensemble.modules() if isinstance(layer, LatentRankOne)]
    return weight * torch.stack([layer.negative_elbo() for layer in layers]).mean()


def _make(net: nn.Module, num_members: int, latent: int, *, seed: int = 0) -> nn.Module:
    """The net with latent layers; what their first weights draw is named by the seed."""

    def make_layer(layer: nn.Module, name: str) -> LatentRankOne:
        seed_everything(seed, "autoencoder", name)
        return LatentRankOne(layer, name, num_members=num_members, latent=latent)

    with preserve_rng_state():
        return make_ensemble(net, num_members, make_layer)


@dataclass(frozen=True)
class LPBNNPredictor(BatchEnsemblePredictor):
    """Replicate b is member k(b), as in a BatchEnsemble, with latents drawn by the names (seed, b, layer)."""

    latent: int

    @property
    def num_distinct(self) -> None:
        return None  # every replicate draws its own latents

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        x = cast_inputs(self.ensemble, x)
        order = draw_member_order(self.num_members, num_samples, seed=seed).tolist()

        def run(b: int) -> Tensor:
            with eval_mode(self.ensemble), _replicate(seed, b):
                return run_members(self.ensemble, x, [order[b]])[0]

        return stream_forward_passes(num_samples, run)

    def export(self, b: int, *, seed: int = 0) -> nn.Module:
        """Replicate b of this seed as a plain net."""
        member = int(draw_member_order(self.num_members, b + 1, seed=seed)[b])
        with _replicate(seed, b):
            return export_member(self.ensemble, member)

    def config(self) -> dict[str, Any]:
        return {"method": "lp-bnn", "num_members": self.num_members, "latent": self.latent}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "LPBNNPredictor":
        skeleton, num_members, latent = copy_to_meta(net), config["num_members"], config["latent"]
        return cls(_make(net, num_members, latent).eval(), skeleton, num_members, latent)


@register(
    "lp-bnn",
    predictor=LPBNNPredictor,
    summary="BatchEnsemble with factors drawn from a variational autoencoder in each layer",
    train_cost="O(LK)",
    reference="Franchi, Bursuc, Aldea, Dubuisson and Bloch, arXiv:2012.02818, 2020",
)
@dataclass(frozen=True)
class LPBNN:
    """K members with latents of dimension `latent`; `elbo_weight` is β.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(8, 2), torch.arange(8) % 3)
    >>> model = lambda: nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> predictor = LPBNN(num_members=2, latent=4).fit(model, data, TrainingConfig(epochs=1, progress=False))
    >>> predictor.predict(torch.zeros(5, 2), 9).samples.shape  # (B, N, C)
    torch.Size([9, 5, 3])
    """

    loss: Loss = field(default_factory=CrossEntropy)
    num_members: int = 4
    latent: int = 32
    elbo_weight: float = 1.0

    def __post_init__(self) -> None:
        check_loss(self.loss)
        check_members(self.num_members)
        if not isinstance(self.latent, int) or self.latent < 1:
            raise ValueError(f"got latent={self.latent!r}; expected at least 1, and a whole number")
        if not 0 <= self.elbo_weight < float("inf"):
            raise ValueError(f"got elbo_weight={self.elbo_weight!r}; expected a finite number ≥ 0")

    def fit(
        self,
        model: Callable[[], nn.Module],
        data: Dataset[Any],
        config: TrainingConfig,
        *,
        val_data: Dataset[Any] | None = None,
    ) -> LPBNNPredictor:
        """Train the K members of the net that `model()` gives, on (x, y) rows, as the recipe says."""
        net = initialize_model(model, config.seed)
        example = load_example(net, data, seed=config.seed)
        net = unwrap_model(net)
        skeleton = copy_to_meta(net)
        ensemble = _make(net, self.num_members, self.latent, seed=config.seed)
        draw_factors(ensemble, "normal", seed=config.seed)
        with _replicate(config.seed, 0):  # one draw of the latents for all passes that are compared
            check_ensemble(ensemble, self.num_members, example)
        fit_ensemble(
            ensemble,
            data,
            self.loss,
            config,
            num_members=self.num_members,
            penalty=partial(_mean_negative_elbo, weight=self.elbo_weight),
            val_data=val_data,
            identity=describe_method(self),
        )
        return LPBNNPredictor(ensemble.eval(), skeleton, self.num_members, self.latent)
