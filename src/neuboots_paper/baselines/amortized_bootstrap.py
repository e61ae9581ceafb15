"""The amortized bootstrap: an implicit model of the net's parameters, trained on resampled data.

    θ = f_φ(ξ),  ξ ~ N(0, I);   φ̂ = argmin_φ 1/K Σ_k 1/n Σᵢ w_{ki} ℓ(net(Xᵢ; f_φ(ξ_k)), yᵢ),   w_k ~ Multinomial(n; 1/n)

Algorithm 1 of the paper: K resampled data sets w_1 … w_K, drawn anew every few epochs; K noises ξ_1 … ξ_K, drawn anew
at every step; θ_k is trained on data set k. At prediction any number of noises gives as many nets.

ξ_k is drawn independently of w_k, and E w_{ki} = 1: the objective is the mean over ξ of the ordinary training loss at
f_φ(ξ). It is least where every f_φ(ξ) minimises that loss, so a model with one minimum loses all spread. What spread is
left after training comes from the first φ, from several minima and from steps not yet averaged out; it is no bootstrap
distribution, and shrinks as training goes on.

Here f_φ has one hidden layer, θ = θ₀ + A tanh(W ξ + b), with a dense A and the net's own first parameters as θ₀: H + 1
numbers for each parameter of the net, which a net of a million parameters can still afford.

Nalisnick and Smyth, The amortized bootstrap, ICML workshop on implicit models, 2017.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._prng import derive_keys, draw_normal, stable_hash
from neuboots.head import cast_inputs, eval_mode, has_lazy_layers, unwrap_model
from neuboots.loading import Batch, dataset_length
from neuboots.losses import CrossEntropy, Loss, check_loss, valid_mask, weighted_mean
from neuboots.methods._base import add_output_axis, functional_output, load_example, register, validation_metrics
from neuboots.prediction import Predictor, SampleStream, stream_forward_passes
from neuboots.training import Objective, TrainingConfig, describe_method, initialize_model, train
from neuboots.weights import Multinomial
from neuboots_paper.baselines.gbs import check_uncompiled


def draw_noise(ids: Tensor, size: int, *name: int | str) -> Tensor:
    """ξ for each id under a name: (num, d)."""
    return draw_normal(derive_keys(ids, *name), size)


class ImplicitModel(nn.Module):
    """The net with parameters θ₀ + A tanh(W ξ + b); its own parameters are θ₀. Frozen ones are the same for all ξ.

    Buffers, such as BatchNorm's, are the net's: all ξ share them.

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
        made = {name: p for name, p in net.named_parameters() if name not in self.frozen}
        if not made:
            raise ValueError("the net has no parameters to generate; expected at least one with requires_grad")
        rng = torch.Generator().manual_seed(stable_hash(seed, "implicit"))

        def drawn(*shape: int, like: Tensor, scale: float) -> nn.Parameter:
            return nn.Parameter((scale * torch.randn(*shape, generator=rng)).to(like))

        first = next(iter(made.values()))
        self.W = drawn(hidden, latent, like=first, scale=1 / math.sqrt(latent))
        self.b = nn.Parameter(torch.zeros_like(self.W[:, 0]))
        # At first θ strays from θ₀ by `spread` times the size of each tensor: all layers by the same share.
        self.A = nn.ParameterList(
            drawn(hidden, *p.shape, like=p, scale=spread * _size(p) / math.sqrt(hidden)) for p in made.values()
        )
        self.names = list(made)

    def generate_parameters(self, xi: Tensor) -> dict[str, Tensor]:
        """θ = f_φ(ξ), by the names of the net's parameters; ξ is (d,)."""
        h = torch.tanh(self.W @ xi.to(self.W) + self.b)  # (H,)
        own = dict(self.net.named_parameters())
        return {name: own[name] + torch.tensordot(h.to(A), A, 1) for name, A in zip(self.names, self.A, strict=True)}

    def forward(self, x: Any, xi: Tensor) -> Tensor:
        """net(x; f_φ(ξ))."""
        return functional_output(self.net, self.generate_parameters(xi), x)


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt()) if tensor.numel() else 0.0


@dataclass(frozen=True)
class AmortizedBootstrapPredictor(Predictor):
    """Replicate b is the net with the parameters f_φ(ξ_b)."""

    model: ImplicitModel

    @property
    def net(self) -> nn.Module:
        return self.model.net

    @property
    def module(self) -> nn.Module:
        return self.model

    def noise(self, b: int, *, seed: int = 0) -> Tensor:
        """ξ_b of this seed: (d,)."""
        return draw_noise(torch.tensor([b]), self.model.latent, seed, "replicate")[0]

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        model = self.model
        x = cast_inputs(model, x)

        def run(b: int) -> Tensor:
            with eval_mode(model):
                return add_output_axis(model(x, self.noise(b, seed=seed)))

        return stream_forward_passes(num_samples, run)

    def config(self) -> dict[str, Any]:
        hidden, latent = self.model.W.shape
        return {"method": "amortized-bootstrap", "latent": latent, "hidden": hidden, "frozen": self.model.frozen}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "AmortizedBootstrapPredictor":
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
class AmortizedBootstrap:
    """Options of the amortized bootstrap. A step makes K = `num_resamples` passes.

    `resample_every` is the number of epochs for which the K data sets are kept (the paper: 3 to 5 work well), `latent`
    the size of ξ and `hidden` that of f_φ's hidden layer; `spread` is how far, of its own size, a parameter strays at
    first.

    >>> from torch.utils.data import TensorDataset
    >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    >>> data = TensorDataset(x, (x[:, 0] > 0).long())
    >>> model = lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> predictor = AmortizedBootstrap(num_resamples=2).fit(model, data, TrainingConfig(epochs=2, progress=False))
    >>> predictor.predict(x[:5], 20).samples.shape  # (B, N, C)
    torch.Size([20, 5, 2])
    """

    loss: Loss = field(default_factory=CrossEntropy)
    num_resamples: int = 5
    resample_every: int = 3
    latent: int = 10
    hidden: int = 10
    spread: float = 0.1

    def __post_init__(self) -> None:
        check_loss(self.loss)
        for name in ("num_resamples", "resample_every", "latent", "hidden"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"got {name}={value!r}; expected a whole number ≥ 1")
        if not 0 < self.spread < math.inf:
            raise ValueError(f"got spread={self.spread!r}; expected a positive number")

    def fit(
        self,
        model: Callable[[], nn.Module],
        data: Dataset[Any],
        config: TrainingConfig,
        *,
        val_data: Dataset[Any] | None = None,
    ) -> AmortizedBootstrapPredictor:
        """Train f_φ for the net that `model()` gives, by Algorithm 1 of the paper."""
        n = dataset_length(data)
        if n is None:
            raise ValueError(
                "got a stream; expected a data set of known length: n points are drawn with replacement from n"
            )
        net = unwrap_model(initialize_model(model, config.seed))
        if has_lazy_layers(net):
            load_example(net, data, seed=config.seed)
        model = ImplicitModel(net, latent=self.latent, hidden=self.hidden, spread=self.spread, seed=config.seed)

        def objective_at(epoch: int) -> Objective:
            resampled = self.draw_resamples(epoch // self.resample_every, n, seed=config.seed)  # (K, n)

            def objective(g: nn.Module, batch: Batch) -> Tensor:
                return self.objective(g, batch, resampled, seed=config.seed)

            return objective

        def validate(g: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return validation_metrics(
                self.loss, g(cast_inputs(g, batch.x), torch.zeros(self.latent)), batch.y
            )  # at ξ = 0

        train(model, data, objective_at, config, val_data=val_data, validate=validate, identity=describe_method(self))
        return AmortizedBootstrapPredictor(model.eval())

    def draw_resamples(self, number: int, n: int, *, seed: int) -> Tensor:
        """The K data sets of one round: how often each holds each of the n points: (K, n)."""
        return Multinomial().sample(derive_keys(torch.arange(self.num_resamples), seed, "resample", number), n)

    def objective(self, model: nn.Module, batch: Batch, resampled: Tensor, *, seed: int) -> Tensor:
        """1/K Σ_k of the weighted mean loss of data set k, (n,), under the parameters f_φ(ξ_k) of this step."""
        x, mask = cast_inputs(model, batch.x), valid_mask(self.loss, batch.y)
        xis = draw_noise(torch.arange(len(resampled)), self.latent, seed, "step", batch.step)  # (K, d)
        pairs = zip(xis, resampled[:, batch.index.cpu()], strict=True)
        return torch.stack([weighted_mean(self.loss(model(x, xi), batch.y), w, mask) for xi, w in pairs]).mean()
