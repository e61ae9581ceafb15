"""LP-BNN: the distribution of its factors, its ELBO, and its replicates as explicit nets."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from _nets import QUICK, ZOO, Case, CenteredInTraining, ListedLayers, TwoBranches, class_data, make, noise
from _reference import standard_errors
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from neuboots import TrainingConfig
from neuboots.head import copy_to_meta
from neuboots.methods._base import set_context
from neuboots.methods._rank_one import (
    MemberBatchNorm,
    RankOneLayer,
    draw_factors,
    make_ensemble,
    run_members,
    select_members,
)
from neuboots.prediction import draw_member_order
from neuboots_paper.baselines.lp_bnn import (
    _REPLICATE,
    LPBNN,
    LatentRankOneLayer,
    LPBNNPredictor,
    _make_latent_ensemble,
    _mean_negative_elbo,
)

K = 3


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_layer(latent: int = 3) -> LatentRankOneLayer:
    """A layer whose variances differ and are not near 1."""
    torch.manual_seed(0)
    layer = LatentRankOneLayer(nn.Linear(4, 2), "layer", num_members=K, latent=latent)
    draw_factors(nn.Sequential(layer), "normal", seed=0)
    nn.init.normal_(layer.log_variance.bias)
    nn.init.normal_(layer.mean.bias)
    return layer.eval()


def make_latent(net: nn.Module, num_members: int = K, seed: int = 0) -> nn.Module:
    ensemble = _make_latent_ensemble(net, num_members, 4, seed=seed)
    draw_factors(ensemble, "normal", seed=seed)
    return ensemble


def assert_within_errors(found: Tensor, expected: Tensor, error: Tensor) -> None:
    assert float(((found - expected) / error).abs().max()) < standard_errors(found.numel())


@pytest.mark.parametrize("training", [False, True], ids=["prediction", "training"])
def test_factors_have_the_moments_of_encoder_and_decoder(training: bool) -> None:
    """r̂ = A z + a with z ~ N(μ, diag σ²): mean A μ + a, covariance A diag σ² Aᵀ."""
    layer, draws, k = make_layer(), 4000, 1
    with torch.no_grad():
        hidden = torch.relu(layer.r[k] @ layer.encoder[0].weight.T + layer.encoder[0].bias)
        mean = layer.mean.weight @ hidden + layer.mean.bias
        variance = (layer.log_variance.weight @ hidden + layer.log_variance.bias).exp()
        A = layer.decoder.weight
        expected, covariance = A @ mean + layer.decoder.bias, A @ variance.diag() @ A.T
        samples = torch.empty(draws, 4)
        layer.train(training)
        with select_members([k]):
            for b in range(draws):
                with set_context(_REPLICATE, None if training else (5, b)):
                    samples[b] = layer.factors()[0][0]
    assert_within_errors(samples.mean(0), expected, (covariance.diag() / draws).sqrt())
    error = ((covariance.diag()[:, None] * covariance.diag() + covariance.square()) / draws).sqrt()
    assert_within_errors(samples.T.cov(), covariance, error)


def test_draws_are_a_function_of_seed_replicate_and_layer() -> None:
    first, second = make_layer(latent=8), make_layer(latent=8)
    second.name = "another"

    def draw(layer: LatentRankOneLayer, seed: int, b: int) -> Tensor:
        with set_context(_REPLICATE, (seed, b)):
            return layer._draw_noise(torch.zeros(1, 8))[0]

    assert torch.equal(draw(first, 0, 3), draw(make_layer(latent=8), 0, 3))
    draws = [
        torch.stack([draw(layer, seed, b + shift) for b in range(500)])
        for layer, seed, shift in ((first, 0, 0), (second, 0, 0), (first, 1, 0), (first, 0, 1))
    ]
    for i, mine in enumerate(draws):
        for theirs in draws[:i]:
            assert abs(float((mine * theirs).mean())) < standard_errors(6) / 4000**0.5


def test_elbo_is_the_divergence_and_the_mean_error() -> None:
    layer = make_layer()
    with torch.no_grad():
        mean, log_variance = layer.encode()
        posterior = Normal(mean, (0.5 * log_variance).exp())
        divergence = kl_divergence(posterior, Normal(0.0, 1.0)).sum()
        errors = (layer.decoder(posterior.sample((5000,))) - layer.r).square().mean((1, 2))  # one per draw
        found = layer.negative_elbo() - divergence
    assert abs(float(found - errors.mean())) < standard_errors(1) * float(errors.std()) / 5000**0.5


def test_without_noise_it_is_a_batch_ensemble_of_decoded_means() -> None:
    net = nn.Sequential(nn.Conv2d(2, 6, 3, groups=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
    ensemble = make_latent(copy.deepcopy(net), seed=1)
    plain = make_ensemble(net, K, lambda layer, name: RankOneLayer(layer, K))
    noiseless = copy.deepcopy(ensemble).train()
    with torch.no_grad():
        for name, layer in ensemble.named_modules():
            if isinstance(layer, LatentRankOneLayer):
                plain.get_submodule(name).r.copy_(layer.decoder(layer.encode()[0]))
                plain.get_submodule(name).s.copy_(layer.s)
                nn.init.zeros_(noiseless.get_submodule(name).log_variance.weight)
                nn.init.constant_(noiseless.get_submodule(name).log_variance.bias, -1e3)  # σ = 0
    x = noise(5, 2, 4, 4)
    torch.testing.assert_close(run_members(ensemble.eval(), x, range(K)), run_members(plain.eval(), x, range(K)))
    torch.testing.assert_close(run_members(noiseless, x, range(K)), run_members(plain.train(), x, range(K)))
    noisy = run_members(ensemble.train(), x, range(K))
    assert not torch.allclose(noisy, run_members(plain, x, range(K)), rtol=1e-2)


@pytest.mark.parametrize("case", [case for case in ZOO if "compiled" not in case.name], ids=lambda case: case.name)
def test_replicates_of_any_net_equal_exported_nets(case: Case) -> None:
    """Replicate b is member k(b) with factors drawn by (seed, b)."""
    net = make(case)
    net = getattr(net, "module", net)
    skeleton, ensemble = copy_to_meta(net), make_latent(net, seed=1).eval()
    predictor = LPBNNPredictor(ensemble, skeleton, K, 4)
    samples = predictor.predict(case.x, 5, seed=3).samples
    order = draw_member_order(K, 5, seed=3).tolist()
    assert set(order) == {0, 1, 2}
    for b in range(5):
        plain = predictor.export(b, seed=3)
        assert not any(isinstance(module, RankOneLayer | MemberBatchNorm) for module in plain.modules())
        with torch.no_grad():
            torch.testing.assert_close(run_members(plain, case.x, [0])[0], samples[b], rtol=1e-4, atol=1e-5)
            with set_context(_REPLICATE, (3, b)):
                torch.testing.assert_close(run_members(ensemble, case.x, [order[b]])[0], samples[b])
    distances = torch.cdist(samples.flatten(1), samples.flatten(1)) + torch.eye(5)
    assert bool((distances > 0).all())  # five draws of three members are five functions


def test_elbo_is_added_with_its_weight() -> None:
    """Without another loss, one step of gradient descent follows the mean ELBO of the layers."""
    config = TrainingConfig(epochs=1, batch_size=50, optimizer=partial(torch.optim.SGD, lr=0.1), progress=False)
    start = TwoBranches()
    method = LPBNN(lambda outputs, y: 0.0 * outputs.sum(1), num_members=K, latent=4, elbo_weight=0.7)
    predictor = method.fit(lambda: copy.deepcopy(start), class_data(), config)
    initial = make_latent(copy.deepcopy(start))
    layers = [layer for layer in initial.modules() if isinstance(layer, LatentRankOneLayer)]
    assert len(layers) == 3
    total = 0.7 * sum(layer.negative_elbo() for layer in layers) / 3
    torch.testing.assert_close(_mean_negative_elbo(initial, 0.7), total)
    total.backward()
    for name, parameter in initial.named_parameters():
        step = 0 if parameter.grad is None else 0.1 * parameter.grad
        torch.testing.assert_close(predictor.module.get_parameter(name), parameter - step)


def test_codes_are_constant_and_all_else_is_trained() -> None:
    start = TwoBranches()
    predictor = LPBNN(num_members=1, latent=4).fit(lambda: copy.deepcopy(start), class_data(), QUICK)
    trained = predictor.state_dict()
    for name, value in make_latent(copy.deepcopy(start), 1).state_dict().items():
        if "num_batches" not in name:
            assert torch.equal(value, trained[name]) == name.endswith(".r"), name
    samples = predictor.predict(noise(3, 4), 20).samples
    assert len({tuple(sample.flatten().tolist()) for sample in samples}) == 20  # of a single member


@pytest.mark.parametrize("factory", [nn.Flatten, ListedLayers, CenteredInTraining])
def test_nets_whose_members_cannot_be_tiled_raise(factory: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        LPBNN().fit(factory, class_data(), QUICK)
