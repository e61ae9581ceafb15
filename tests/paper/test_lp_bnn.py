"""LP-BNN: the law of its factors, its ELBO, and its members written out as nets."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from _nets import ZOO, Case, TwoBranches, make
from _reference import standard_errors
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.utils.data import TensorDataset

from neuboots import TrainingConfig, load, save
from neuboots.head import copy_to_meta
from neuboots.methods.batch_ensemble import (
    MemberBatchNorm,
    RankOneLayer,
    draw_factors,
    make_ensemble,
    run_members,
    select_members,
)
from neuboots.nets import SmallCNN
from neuboots.prediction import draw_member_order
from neuboots_paper.baselines.lp_bnn import LPBNN, LatentRankOne, LPBNNPredictor, _make, _mean_negative_elbo, _replicate

RECIPE = TrainingConfig(epochs=2, batch_size=16, progress=False)
K = 3


@pytest.fixture(autouse=True)
def _first_weights() -> None:
    torch.manual_seed(0)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes() -> TensorDataset:
    return TensorDataset(rows(50, 4), torch.arange(50) % 3)


def layer_of(inputs: int = 4, latent: int = 3, seed: int = 0) -> LatentRankOne:
    """A layer whose variances differ and are not near 1."""
    torch.manual_seed(seed)
    layer = LatentRankOne(nn.Linear(inputs, 2), "layer", num_members=K, latent=latent)
    draw_factors(nn.Sequential(layer), "normal", seed=0)
    nn.init.normal_(layer.log_variance.bias)
    nn.init.normal_(layer.mean.bias)
    return layer.eval()


def close(found: Tensor, expected: Tensor, error: Tensor) -> None:
    """Within standard errors, all entries together."""
    gap = ((found - expected) / error).abs().max()
    assert float(gap) < standard_errors(found.numel())


@pytest.mark.parametrize("training", [False, True], ids=["prediction", "training"])
def test_factors_have_the_moments_of_encoder_and_decoder(training: bool) -> None:
    """r̂ = A z + a with z ~ N(μ, diag σ²): mean A μ + a, covariance A diag σ² Aᵀ."""
    layer, draws, k = layer_of(), 4000, 1
    with torch.no_grad():
        hidden = torch.relu(layer.r[k] @ layer.encoder[0].weight.T + layer.encoder[0].bias)
        mean = layer.mean.weight @ hidden + layer.mean.bias
        variance = (layer.log_variance.weight @ hidden + layer.log_variance.bias).exp()
        A = layer.decoder.weight
        expected, covariance = A @ mean + layer.decoder.bias, A @ variance.diag() @ A.T
        if training:
            layer.train()
            samples = torch.stack([layer.factors()[0][k] for _ in range(draws)])
        else:
            samples = torch.empty(draws, 4)
            with select_members([k]):
                for b in range(draws):
                    with _replicate(5, b):
                        samples[b] = layer.factors()[0][0]
    close(samples.mean(0), expected, (covariance.diag() / draws).sqrt())
    spread = covariance.diag()
    error = ((spread[:, None] * spread + covariance.square()) / draws).sqrt()  # of a normal sample's covariance
    close(samples.T.cov(), covariance, error)


def test_draws_are_named_by_seed_replicate_and_layer() -> None:
    first, second = layer_of(latent=8), layer_of(latent=8)
    second.name = "another"

    def noise(layer: LatentRankOne, seed: int, b: int) -> Tensor:
        with _replicate(seed, b):
            return layer._noise(torch.zeros(1, 8))[0]

    assert torch.equal(noise(first, 0, 3), noise(layer_of(latent=8), 0, 3))
    draws = {
        "layer": torch.stack([noise(first, 0, b) for b in range(500)]),
        "another layer": torch.stack([noise(second, 0, b) for b in range(500)]),
        "another seed": torch.stack([noise(first, 1, b) for b in range(500)]),
        "the next replicate": torch.stack([noise(first, 0, b + 1) for b in range(500)]),
    }
    names = list(draws)
    for i, mine in enumerate(names):
        for theirs in names[:i]:
            correlation = float((draws[mine] * draws[theirs]).mean())
            assert abs(correlation) < standard_errors(6) / 4000**0.5, (mine, theirs)


def test_elbo_is_the_divergence_and_the_mean_error() -> None:
    layer = layer_of()
    with torch.no_grad():
        mean, log_variance = layer.encode()
        posterior = Normal(mean, (0.5 * log_variance).exp())
        divergence = kl_divergence(posterior, Normal(0.0, 1.0)).sum()
        torch.manual_seed(0)
        errors = (layer.decoder(posterior.sample((5000,))) - layer.r).square().mean((1, 2))  # one for each draw
        found = layer.negative_elbo() - divergence
    assert abs(float(found - errors.mean())) < standard_errors(1) * float(errors.std()) / 5000**0.5


def net_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 6, 3, groups=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))


def test_without_noise_it_is_a_batch_ensemble_of_decoded_means() -> None:
    ensemble = _make(net_of(), K, 5, seed=1)
    draw_factors(ensemble, "normal", seed=1)
    plain = make_ensemble(net_of(), K, lambda layer, name: RankOneLayer(layer, K))
    with torch.no_grad():
        for name, layer in ensemble.named_modules():
            if isinstance(layer, LatentRankOne):
                other = plain.get_submodule(name)
                other.r.copy_(layer.decoder(layer.encode()[0]))
                other.s.copy_(layer.s)
    x = rows(5, 2, 4, 4)
    torch.testing.assert_close(run_members(ensemble.eval(), x, range(K)), run_members(plain.eval(), x, range(K)))
    quiet = copy.deepcopy(ensemble).train()
    for module in quiet.modules():
        if isinstance(module, LatentRankOne):
            nn.init.zeros_(module.log_variance.weight)
            nn.init.constant_(module.log_variance.bias, -1e3)  # σ = 0
    torch.testing.assert_close(run_members(quiet, x, range(K)), run_members(plain.train(), x, range(K)))
    loud = run_members(ensemble.train(), x, range(K))
    assert not torch.allclose(loud, run_members(plain, x, range(K)), rtol=1e-2)


@pytest.mark.parametrize("case", [case for case in ZOO if "compiled" not in case.name], ids=lambda case: case.name)
def test_replicates_of_any_net_are_those_of_exported_nets(case: Case) -> None:
    """Replicate b is member k(b) with factors drawn by (seed, b)."""
    net = make(case)
    net = getattr(net, "module", net)
    skeleton = copy_to_meta(net)
    ensemble = _make(net, K, 4)
    draw_factors(ensemble, "normal", seed=1)
    predictor = LPBNNPredictor(ensemble.eval(), skeleton, K, 4)
    samples = predictor.predict(case.x, 5, seed=3).samples
    order = draw_member_order(K, 5, seed=3).tolist()
    assert set(order) == {0, 1, 2}
    for b in range(5):
        plain = predictor.export(b, seed=3)
        assert not any(isinstance(module, RankOneLayer | MemberBatchNorm) for module in plain.modules())
        with torch.no_grad():
            torch.testing.assert_close(run_members(plain, case.x, [0])[0], samples[b], rtol=1e-4, atol=1e-5)
            with select_members([order[b]]), _replicate(3, b):
                again = run_members(ensemble, case.x, [order[b]])[0]
        torch.testing.assert_close(again, samples[b])
    distances = torch.cdist(samples.flatten(1), samples.flatten(1)) + torch.eye(5)
    assert bool((distances > 0).all())  # five draws of three members are five functions


def zero_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return 0.0 * outputs.sum(1)


def test_the_elbo_is_added_with_its_weight() -> None:
    """With no other loss, one step of gradient descent is one down the mean of the layers' ELBO."""
    config = TrainingConfig(epochs=1, batch_size=50, optimizer=partial(torch.optim.SGD, lr=0.1), progress=False)
    start = TwoBranches()
    method = LPBNN(zero_loss, num_members=K, latent=4, elbo_weight=0.7)
    predictor = method.fit(lambda: copy.deepcopy(start), classes(), config)
    first = _make(copy.deepcopy(start), K, 4, seed=0)
    draw_factors(first, "normal", seed=0)
    layers = [layer for layer in first.modules() if isinstance(layer, LatentRankOne)]
    assert len(layers) == 3
    total = 0.7 * sum(layer.negative_elbo() for layer in layers) / 3
    torch.testing.assert_close(_mean_negative_elbo(first, 0.7), total)
    total.backward()
    for name, parameter in first.named_parameters():
        step = 0 if parameter.grad is None else 0.1 * parameter.grad
        torch.testing.assert_close(predictor.module.get_parameter(name), parameter - step)


def test_codes_stay_and_all_else_is_learned() -> None:
    start = TwoBranches()
    predictor = LPBNN(num_members=2, latent=4).fit(lambda: copy.deepcopy(start), classes(), RECIPE)
    first = _make(copy.deepcopy(start), 2, 4, seed=0)
    draw_factors(first, "normal", seed=0)
    after = predictor.state_dict()
    for name, value in first.state_dict().items():
        if "num_batches" not in name:
            assert torch.equal(value, after[name]) == name.endswith(".r"), name


def test_a_net_of_this_library_is_rebuilt_when_loaded(tmp_path: Any) -> None:
    x = rows(9, 2, 8, 8)
    data = TensorDataset(x, torch.arange(9) % 3)
    predictor = LPBNN(latent=4).fit(lambda: SmallCNN(2, 3, widths=(4, 4)), data, RECIPE)
    save(predictor, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").predict(x, 3).samples, predictor.predict(x, 3).samples)


def test_one_member_has_as_many_replicates_as_one_likes() -> None:
    predictor = LPBNN(num_members=1, latent=4).fit(TwoBranches, classes(), RECIPE)
    samples = predictor.predict(rows(3, 4), 20).samples
    assert len({tuple(sample.flatten().tolist()) for sample in samples}) == 20


def test_a_fit_that_was_cut_short_goes_on_where_it_stopped(tmp_path: Any) -> None:
    def stop(report: Any) -> None:
        raise RuntimeError("cut short")

    x = rows(6, 4, seed=5)
    whole = LPBNN().fit(TwoBranches, classes(), RECIPE).predict(x, 3).samples
    config = replace(RECIPE, folder=tmp_path)
    with pytest.raises(RuntimeError, match="cut short"):
        LPBNN().fit(TwoBranches, classes(), replace(config, on_epoch=stop))
    assert torch.equal(LPBNN().fit(TwoBranches, classes(), config).predict(x, 3).samples, whole)


class Listed(nn.Module):
    """Calls its layers by a plain list beside its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.steps = [self.first, nn.ReLU(), self.last]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class Centred(Listed):
    """Statistics of the batch that are of one's own making, in training only."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last((h - h.mean(0) if self.training else h).relu())


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: LPBNN(num_members=0), "got num_members=0; expected K ≥ 1"),
        (lambda: LPBNN(latent=0), "got latent=0; expected at least 1, and a whole number"),
        (lambda: LPBNN(latent=2.5), "got latent=2.5; expected at least 1, and a whole number"),
        (lambda: LPBNN(elbo_weight=-1), "got elbo_weight=-1; expected a finite number ≥ 0"),
        (lambda: LPBNN(elbo_weight=float("nan")), "got elbo_weight=nan; expected a finite number ≥ 0"),
        (lambda: LPBNN().fit(nn.Flatten, classes(), RECIPE), "the net has no Linear or convolution"),
        (lambda: LPBNN().fit(Listed, classes(), RECIPE), "calls its layers by other ways than its attributes"),
        (lambda: LPBNN().fit(Centred, classes(), RECIPE), "outputs in a tiled batch are not those it has alone"),
    ],
)
def test_bad_options_and_nets_get_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()
