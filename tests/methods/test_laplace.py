"""Last-layer Laplace against Bayesian linear regression, autograd's Hessian, and sums written out."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from _nets import ZOO, Tokens, Upsampling, make
from _reference import standard_errors
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.utils.data import IterableDataset, TensorDataset

import neuboots.methods.laplace as room
from neuboots import Deterministic, TrainingConfig
from neuboots.generator import BootstrapGenerator
from neuboots.losses import BrierLoss, GaussianNLL
from neuboots.methods._curvature import FullGGN, KronGGN
from neuboots.methods.laplace import HeadPosterior, Laplace, LaplacePredictor
from neuboots.nets import MLP

RECIPE = TrainingConfig(epochs=2, batch_size=16, progress=False)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def double(net: nn.Module) -> nn.Module:
    return net.double().eval()


def seeded(model: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return double(model())


def posterior_of(net: nn.Module, x: Any, y: Tensor, *, batch_size: int = 16, **options: Any) -> HeadPosterior:
    """The posterior around this net as it stands, untrained."""
    example = x if isinstance(x, dict) else x[:2]
    generator = BootstrapGenerator(net, example=example)
    config = TrainingConfig(batch_size=batch_size, progress=False)
    return Laplace(**options).posterior(generator, TensorDataset(x, y), config)


def covariance(posterior: HeadPosterior, tau: float) -> Tensor:
    """P⁻¹, from what the root of P⁻¹ does to every unit vector: (K, K), weights ordered output by output."""
    size = posterior.outputs * posterior.width
    root = posterior.curvature.deviations(torch.eye(size, dtype=torch.float64), tau).flatten(1)
    return root.T @ root


def extended(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[:, :1])], 1)


# -- Bayesian linear regression ------------------------------------------------------------------------


def linear_regression(tau: float) -> tuple[nn.Linear, Tensor, Tensor, float, Tensor]:
    """A linear net at the mean of its posterior, for the σ² of its own residuals: net, x, y, σ², Σ."""
    x, y = rows(30, 3).double(), rows(30, 1, seed=1).double()
    phi, variance = extended(x), 1.0
    for _ in range(100):  # σ² is that of the residuals at the mean, which depends on σ²
        theta = torch.linalg.solve(phi.T @ phi / variance + tau * torch.eye(4), phi.T @ y / variance)
        variance = float((y - phi @ theta).square().mean())
    net = double(nn.Linear(3, 1))
    with torch.no_grad():
        net.weight.copy_(theta[:3].T)
        net.bias.copy_(theta[3])
    return net, x, y, variance, torch.linalg.inv(phi.T @ phi / variance + tau * torch.eye(4))


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_a_linear_net_is_bayesian_linear_regression(structure: str) -> None:
    tau, B = 2.5, 4000
    net, x, y, _, sigma = linear_regression(tau)
    posterior = posterior_of(net, x, y, loss=nn.MSELoss(), structure=structure)
    torch.testing.assert_close(covariance(posterior, tau), sigma)
    predictor = LaplacePredictor(posterior, tau)
    new = rows(5, 3, seed=2).double()
    variance = ((extended(new) @ sigma) * extended(new)).sum(1)
    prediction = predictor.predict(new, B)
    torch.testing.assert_close(prediction.mean, net(new).detach())
    torch.testing.assert_close(prediction.std[:, 0].square(), variance)
    k = standard_errors(4 + 16 + 10)
    theta = predictor.heads(0, B, seed=0)[:, 0]  # (B, D̃)
    centred = theta - torch.cat([net.weight[0], net.bias]).detach()
    assert bool((centred.mean(0).abs() <= k * (sigma.diagonal() / B).sqrt()).all())
    spread = ((sigma.square() + sigma.diagonal()[:, None] * sigma.diagonal()) / B).sqrt()
    assert bool(((centred.T @ centred / B - sigma).abs() <= k * spread).all())
    samples = prediction.samples[..., 0]
    assert bool(((samples.mean(0) - net(new)[:, 0]).abs() <= k * (variance / B).sqrt()).all())
    assert bool(((samples.var(0) - variance).abs() <= k * variance * math.sqrt(2 / B)).all())


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_the_evidence_of_a_linear_net_is_its_marginal_likelihood(structure: str) -> None:
    """log N(y; 0, σ² I + Φ Φᵀ / τ), in closed form."""
    tau = 0.7
    net, x, y, variance, _ = linear_regression(tau)
    posterior = posterior_of(net, x, y, loss=nn.MSELoss(), structure=structure)
    phi = extended(x)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(30, dtype=torch.float64),
        variance * torch.eye(30, dtype=torch.float64) + phi @ phi.T / tau,
    )
    assert posterior.log_evidence(tau) == pytest.approx(float(marginal.log_prob(y[:, 0])), rel=1e-9)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_the_prior_precision_has_the_largest_evidence(structure: str) -> None:
    net = seeded(lambda: MLP(4, 3, widths=(8,)))
    posterior = posterior_of(net, rows(40, 4).double(), torch.arange(40) % 3, structure=structure)
    best = posterior.best_precision()
    around = [posterior.log_evidence(best * factor) for factor in (1e-3, 0.5, 0.99, 1.01, 2.0, 1e3)]
    assert max(around) < posterior.log_evidence(best)
    assert posterior.log_evidence(0.99 * best) == pytest.approx(posterior.log_evidence(best), abs=1e-2)


def test_without_data_to_speak_the_precision_is_one() -> None:
    net = seeded(lambda: MLP(4, 3, widths=(8,)))
    y = torch.full((6,), -100)  # all void
    assert posterior_of(net, rows(6, 4).double(), y).best_precision() == 1.0


# -- the curvature -------------------------------------------------------------------------------------


def negative_log_likelihood(loss: Any, phi: Tensor, y: Tensor, theta: Tensor) -> Tensor:
    return loss(phi @ theta.T, y).sum()


@pytest.mark.parametrize(
    ("loss", "y", "factor"),
    [
        (nn.CrossEntropyLoss(), torch.arange(12) % 3, 1.0),
        (nn.CrossEntropyLoss(label_smoothing=0.1), torch.arange(12) % 3, 1.0),
        (nn.CrossEntropyLoss(reduction="none"), torch.arange(12) % 3, 1.0),
        (nn.BCEWithLogitsLoss(), (rows(12, 3, seed=4) > 0).double(), 1.0),
        (nn.BCEWithLogitsLoss(reduction="none"), (rows(12, 3, seed=4) > 0).double(), 1.0),
        (nn.MSELoss(), rows(12, 3, seed=4).double(), 0.5),
        (nn.MSELoss(reduction="none"), rows(12, 3, seed=4).double(), 0.5),
    ],
)
def test_the_curvature_is_the_hessian_of_the_loss(loss: Any, y: Tensor, factor: float) -> None:
    """A head is linear in its weights, so Gauss and Newton agree; ½ makes a log-likelihood of the squared error."""
    x, tau = rows(12, 4).double(), 0.3
    net = double(seeded(lambda: nn.Linear(4, 3)))
    posterior = posterior_of(net, x, y, batch_size=5, loss=loss, structure="full")
    theta = posterior.mean()
    found = hessian(partial(negative_log_likelihood, loss, extended(x), y), theta).reshape(15, 15)
    scale = factor / float(loss(net(x), y).mean().detach()) if factor == 0.5 else 1.0
    P = scale * found + tau * torch.eye(15)
    torch.testing.assert_close(torch.linalg.inv(covariance(posterior, tau)), P)


def test_the_curvature_of_a_gaussian_head_is_the_expected_hessian() -> None:
    """Of targets μ ± σ, each with weight ½: then the residual has mean 0 and square σ²."""
    x, tau = rows(12, 4).double(), 0.3
    net = seeded(lambda: nn.Linear(4, 2))
    with torch.no_grad():
        mean, log_variance = net(x).chunk(2, 1)
    posterior = posterior_of(net, x, mean, loss=GaussianNLL(), structure="full")
    total = torch.zeros(10, 10, dtype=torch.float64)
    for sign in (-1, 1):
        y = mean + sign * (0.5 * log_variance).exp()
        nll = partial(negative_log_likelihood, GaussianNLL(), extended(x), y)
        total += 0.5 * hessian(nll, posterior.mean()).reshape(10, 10)
    torch.testing.assert_close(torch.linalg.inv(covariance(posterior, tau)), total + tau * torch.eye(10))


def test_the_likelihood_of_a_gaussian_head_is_that_of_its_normals() -> None:
    x, y = rows(12, 4).double(), rows(12, 1, seed=2).double()
    net = seeded(lambda: nn.Linear(4, 2))
    with torch.no_grad():
        mean, log_variance = net(x).chunk(2, 1)
    expected = torch.distributions.Normal(mean, (0.5 * log_variance).exp()).log_prob(y).sum()
    assert float(posterior_of(net, x, y, loss=GaussianNLL()).log_likelihood) == pytest.approx(float(expected))


def test_below_its_floor_a_variance_has_no_curvature() -> None:
    s, q = room.hessian("gaussian", torch.tensor([[0.0, -13.0], [0.0, -12.0]], dtype=torch.float64))
    assert q is None
    torch.testing.assert_close(s, torch.tensor([[math.exp(12), 0.0], [math.exp(12), 0.5]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("loss", "outputs", "x", "y"),
    [
        (nn.BCEWithLogitsLoss(), 1, rows(20, 4), (rows(20, 1) > 0).double()),
        (nn.MSELoss(), 3, rows(20, 4), rows(20, 3, seed=1).double()),
        (nn.CrossEntropyLoss(), 3, rows(1, 4).expand(20, 4), torch.arange(20) % 3),
    ],
    ids=["one output", "the same Λ", "the same φ"],
)
def test_kronecker_factors_are_exact_where_they_can_be(loss: Any, outputs: int, x: Tensor, y: Tensor) -> None:
    net = seeded(lambda: MLP(4, outputs, widths=(6,)))
    full, kron = (posterior_of(net, x.double(), y, loss=loss, structure=s) for s in ("full", "kron"))
    assert isinstance(full.curvature, FullGGN)
    assert isinstance(kron.curvature, KronGGN)
    torch.testing.assert_close(covariance(kron, 0.5), covariance(full, 0.5))
    phi = rows(30, 6, seed=8).double()
    torch.testing.assert_close(kron.variance(phi, 0.5), full.variance(phi, 0.5))
    torch.testing.assert_close(kron.curvature.eigenvalues().sort().values, full.curvature.eigenvalues())


def test_kronecker_factors_have_the_partial_traces_of_the_whole() -> None:
    net = seeded(lambda: MLP(4, 3, widths=(6,)))
    x, y = rows(20, 4).double(), torch.arange(20) % 3
    full, kron = (posterior_of(net, x, y, structure=s) for s in ("full", "kron"))
    whole, product = (torch.linalg.inv(covariance(p, 1.0)).view(3, 7, 3, 7) for p in (full, kron))
    assert not torch.allclose(whole, product, rtol=1e-2)
    for axes in ("cdce->de", "cded->ce"):
        torch.testing.assert_close(torch.einsum(axes, product), torch.einsum(axes, whole))


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("points", [3, 40])
def test_the_variance_is_that_of_the_covariance(structure: str, points: int) -> None:
    """Also by the other way that many points take."""
    net = seeded(lambda: MLP(4, 3, widths=(6,)))
    posterior = posterior_of(net, rows(20, 4).double(), torch.arange(20) % 3, structure=structure)
    phi = rows(points, 6, seed=8).double()
    blocks = covariance(posterior, 0.5).view(3, 7, 3, 7)
    expected = torch.einsum("nd,cdce,ne->nc", extended(phi), blocks, extended(phi))
    torch.testing.assert_close(posterior.variance(phi, 0.5), expected)


# -- pixels, tokens, streams ---------------------------------------------------------------------------


class Pixels(nn.Module):
    """Outputs at the input's own resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).relu())


def written_out(phi: Tensor, z: Tensor, weights: Tensor, tau: float) -> Tensor:
    """P, point by point: φ (M, D), z (M, C), weights (M,)."""
    size = z.shape[1] * (phi.shape[1] + 1)
    P = tau * torch.eye(size, dtype=torch.float64)
    for f, out, w in zip(extended(phi), z, weights, strict=True):
        p = out.softmax(0)
        P += w * torch.kron(torch.diag(p) - torch.outer(p, p), torch.outer(f, f))
    return P


@pytest.mark.parametrize("piece", [1 << 24, 40])
def test_pixels_are_points_and_void_ones_are_none(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_PIECE", piece)
    net, x = seeded(Pixels), rows(5, 2, 4, 4).double()
    y = (x[:, 0] > 0).long()
    y[1, :2] = 255
    posterior = posterior_of(net, x, y, batch_size=2, loss=nn.CrossEntropyLoss(ignore_index=255), structure="full")
    with torch.no_grad():
        phi = net.stem(x).relu().movedim(1, -1).reshape(-1, 5)
        z = net(x).movedim(1, -1).reshape(-1, 3)
    P = written_out(phi, z, (y != 255).flatten().double(), 0.4)
    torch.testing.assert_close(torch.linalg.inv(covariance(posterior, 0.4)), P)
    losses = nn.CrossEntropyLoss(ignore_index=255)(net(x), y)[y != 255]
    assert float(posterior.log_likelihood) == pytest.approx(-float(losses.sum().detach()))
    prediction = LaplacePredictor(posterior, 0.4).predict(x, 3)
    blocks = torch.linalg.inv(P).view(3, 6, 3, 6)
    expected = torch.einsum("nd,cdce,ne->nc", extended(phi), blocks, extended(phi))
    torch.testing.assert_close(prediction.std.square().movedim(1, -1).reshape(-1, 3), expected)


def test_after_upsampling_the_pixels_that_count_are_shared_by_the_points() -> None:
    net, x = seeded(Upsampling), rows(3, 2, 8, 8).double()
    y = (x[:, 0] > 0).long()
    y[1] = -100
    y[2, :3] = -100
    posterior = posterior_of(net, x, y, structure="full")
    with torch.no_grad():
        phi = net.stem(x).relu()
        z = net.classifier(phi)
    counted = torch.tensor([64.0, 0.0, 40.0], dtype=torch.float64) / 16
    phi, z = (part.movedim(1, -1).flatten(0, -2) for part in (phi, z))
    P = written_out(phi, z, counted.repeat_interleave(16), 0.4)
    torch.testing.assert_close(torch.linalg.inv(covariance(posterior, 0.4)), P)
    assert LaplacePredictor(posterior, 0.4).predict(x, 3).moments is None


def test_tokens_are_points() -> None:
    net = seeded(Tokens)
    x = {"input_ids": torch.arange(10).view(5, 2), "scale": torch.tensor(2.0, dtype=torch.float64)}
    generator = BootstrapGenerator(net, example=x)
    with torch.no_grad():
        at = generator.at(x)
    posterior = HeadPosterior(generator, "full")
    mask = torch.arange(10).view(5, 2) != 3
    with torch.no_grad():
        posterior.gather(at, "softmax", mask)
        phi, z = net.embed(x["input_ids"]) * 2, net(**x).logits
    posterior.curvature.settle(1.0)
    P = written_out(phi.flatten(0, 1), z.flatten(0, 1), mask.flatten().double(), 0.4)
    torch.testing.assert_close(torch.linalg.inv(covariance(posterior, 0.4)), P)
    prediction = LaplacePredictor(posterior, 0.4).predict(x, 3000)
    assert prediction.std.shape == (5, 3, 2)
    k = standard_errors(30)
    gap = (prediction.samples.std(0) - prediction.std).abs()
    assert bool((gap <= k * prediction.std / math.sqrt(2 * 3000)).all())


def test_a_stream_is_read_for_one_epoch() -> None:
    x, y = rows(40, 4), torch.arange(40) % 3

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(x, y, strict=True))

    config = TrainingConfig(epochs=1, batch_size=10, steps_per_epoch=3, progress=False)
    generator = BootstrapGenerator(seeded(lambda: MLP(4, 3, widths=(6,))))
    streamed = Laplace().posterior(generator, Stream(), config)
    stored = Laplace().posterior(generator, TensorDataset(x[:30], y[:30]), config)
    torch.testing.assert_close(covariance(streamed, 1.0), covariance(stored, 1.0))


def test_the_pass_leaves_the_net_and_the_random_state_as_they_were() -> None:
    """Also for rows that are read one by one, and a net left in training mode."""
    net = seeded(lambda: MLP(4, 3, widths=(6,), batch_norm=True))
    x, y = rows(40, 4).double(), torch.arange(40) % 3
    stored = posterior_of(net, x, y)
    generator = BootstrapGenerator(net.train())
    state, random = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    read = Laplace().posterior(generator, list(zip(x, y, strict=True)), RECIPE)
    torch.testing.assert_close(covariance(read, 1.0), covariance(stored, 1.0))
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert net.training


# -- the fit -------------------------------------------------------------------------------------------


def test_the_net_is_trained_as_ever_and_the_mean_is_its_output() -> None:
    y = torch.arange(40) % 3
    y[::7] = -100
    data = TensorDataset(rows(40, 4), y)
    model = partial(MLP, 4, 3, widths=(8,), batch_norm=True)
    laplace, plain = Laplace().fit(model, data, RECIPE), Deterministic().fit(model, data, RECIPE)
    x = rows(5, 4, seed=5)
    assert torch.equal(laplace.predict(x, 3).mean, plain.predict(x, 1).samples[0])
    assert laplace.prior_precision == laplace.posterior.best_precision()
    assert laplace.log_evidence() == laplace.posterior.log_evidence(laplace.prior_precision)
    assert laplace.log_evidence() > laplace.log_evidence(10 * laplace.prior_precision)


def test_a_net_trained_elsewhere_is_left_as_it_is() -> None:
    data = TensorDataset(rows(40, 4), torch.arange(40) % 3)
    fitted = Laplace().fit(partial(MLP, 4, 3, widths=(8,), batch_norm=True), data, RECIPE)
    net = copy.deepcopy(fitted.net)
    around = Laplace().from_trained(net, data, RECIPE)
    assert around.net is net
    assert all(torch.equal(value, fitted.net.state_dict()[name]) for name, value in net.state_dict().items())
    assert torch.equal(around.predict(rows(5, 4), 3).samples, fitted.predict(rows(5, 4), 3).samples)


@pytest.mark.parametrize("training", [True, False])
def test_a_net_trained_elsewhere_keeps_its_modes(training: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)).train(training)
    net[1].eval()
    Laplace().from_trained(net, TensorDataset(rows(40, 4), torch.arange(40) % 3), RECIPE)
    assert [module.training for module in net.modules()] == [training, training, False, training, training]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_reduces_is_refused_without_training_too(reduction: str) -> None:
    method = Laplace(nn.CrossEntropyLoss(reduction=reduction))
    with pytest.raises(ValueError, match="got a single number for 16 weights; expected one loss for each point"):
        method.from_trained(nn.Linear(4, 3), TensorDataset(rows(40, 4), torch.arange(40) % 3), RECIPE)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_a_predictor_may_be_cast_to_and_fro(structure: str) -> None:
    data = TensorDataset(rows(40, 4), torch.arange(40) % 3)
    predictor = Laplace(structure=structure).fit(partial(MLP, 4, 3, widths=(8,)), data, RECIPE)
    x = rows(20, 4, seed=5)
    before, evidence = predictor.predict(x, 4), predictor.log_evidence()
    predictor.module.double().float()
    after = predictor.predict(x, 4)
    torch.testing.assert_close(after.samples, before.samples, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(after.std, before.std, rtol=1e-3, atol=1e-4)
    assert predictor.log_evidence() == pytest.approx(evidence, rel=1e-4)
    assert predictor.heads(0, 2, seed=0).dtype == torch.float64


def test_large_heads_are_held_as_factors() -> None:
    data = TensorDataset(rows(8, 4), torch.arange(8) % 3)
    fits = {width: Laplace().fit(partial(MLP, 4, 3, widths=(width,)), data, RECIPE) for width in (10, 1000)}
    assert fits[10].config()["structure"] == "full"
    assert fits[1000].config()["structure"] == "kron"
    assert fits[1000].predict(rows(3, 4), 5).samples.shape == (5, 3, 3)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_exact_moments_are_those_of_many_samples(structure: str) -> None:
    data, B = TensorDataset(rows(40, 4), torch.arange(40) % 3), 4000
    predictor = Laplace(structure=structure).fit(partial(MLP, 4, 3, widths=(8,)), data, RECIPE)
    prediction = predictor.predict(rows(6, 4, seed=5), B)
    assert prediction.moments is not None
    k = standard_errors(36)
    gap = (prediction.samples.mean(0) - prediction.mean).abs()
    assert bool((gap <= k * prediction.std / math.sqrt(B)).all())
    gap = (prediction.samples.std(0) - prediction.std).abs()
    assert bool((gap <= k * prediction.std / math.sqrt(2 * B)).all())


@pytest.mark.parametrize("case", [case for case in ZOO if not isinstance(case.x, dict)], ids=lambda case: case.name)
def test_nets_never_seen_before(case: Any) -> None:
    """Those that end at their head, squeeze or upsample; the others do more, and are told so."""
    net = make(case)
    n = len(case.x)
    pixels = case.shape[2:]
    loss = nn.MSELoss() if len(case.shape) == 1 else nn.CrossEntropyLoss()
    y = rows(n) if len(case.shape) == 1 else torch.zeros(n, *pixels, dtype=torch.long)
    method = Laplace(loss=loss)
    if case.name in ("skipped", "written", "written through a view", "scaled"):
        with pytest.raises(ValueError, match="does more than upsample after its head"):
            method.fit(lambda: net, TensorDataset(case.x, y), RECIPE)
        return
    prediction = method.fit(lambda: net, TensorDataset(case.x, y), RECIPE).predict(case.x, 4)
    assert prediction.samples.shape == (4, n, case.shape[1] if len(case.shape) > 1 else 1, *pixels)
    assert bool((prediction.std > 0).all())


def test_gradients_reach_the_input() -> None:
    data = TensorDataset(rows(40, 4), torch.arange(40) % 3)
    predictor = Laplace().fit(partial(MLP, 4, 3, widths=(8,)), data, RECIPE)
    x = rows(3, 4).requires_grad_()
    prediction = predictor.predict(x, 5)
    (prediction.samples.sum() + prediction.std.sum()).backward()
    assert x.grad is not None
    assert bool((x.grad != 0).any())


def test_a_fit_cut_short_goes_on(tmp_path: Any) -> None:
    class Cut(Exception):
        pass

    def cut(report: Any) -> None:
        if report.epoch == 0:
            raise Cut

    data = TensorDataset(rows(40, 4), torch.arange(40) % 3)
    model = partial(MLP, 4, 3, widths=(8,))
    config = replace(RECIPE, epochs=3)
    with pytest.raises(Cut):
        Laplace().fit(model, data, replace(config, folder=tmp_path, on_epoch=cut))
    resumed = Laplace().fit(model, data, replace(config, folder=tmp_path))
    whole = Laplace().fit(model, data, config)
    assert torch.equal(resumed.predict(rows(5, 4), 4).samples, whole.predict(rows(5, 4), 4).samples)


def test_the_pass_over_the_data_may_be_shown() -> None:
    data = TensorDataset(rows(40, 4), torch.arange(40) % 3)
    shown = Laplace().fit(partial(MLP, 4, 3, widths=(8,)), data, replace(RECIPE, progress=True))
    silent = Laplace().fit(partial(MLP, 4, 3, widths=(8,)), data, RECIPE)
    assert shown.prior_precision == silent.prior_precision


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"prior_precision": 0.0}, "got prior_precision=0.0; expected a positive number"),
        ({"prior_precision": math.inf}, "got prior_precision=inf; expected"),
        ({"prior_precision": "1"}, "got prior_precision='1'; expected"),
        ({"prior_precision": True}, "got prior_precision=True; expected"),
        ({"head": 3}, "got head=3; expected the name of a layer"),
        ({"structure": "diag"}, "got structure='diag'; expected 'auto', 'full' or 'kron'"),
        ({"loss": BrierLoss()}, "whose curvature is not known here; expected nn.CrossEntropyLoss"),
        ({"loss": nn.CrossEntropyLoss(torch.ones(3), reduction="none")}, "whose curvature is not known here"),
        ({"loss": nn.BCEWithLogitsLoss(pos_weight=torch.ones(1), reduction="none")}, "without class weights"),
    ],
)
def test_bad_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Laplace(**options)


class Pooled(Pixels):
    """Keeps what is the same everywhere, but is not linear."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool2d(super().forward(x), 3, 1, 1)


def test_what_follows_the_head_must_be_linear() -> None:
    data = TensorDataset(rows(6, 2, 4, 4), torch.zeros(6, 4, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="does more than upsample after its head 'head'"):
        Laplace().fit(Pooled, data, RECIPE)


class Pooling(Pixels):
    """Does less than its head's output allows, at these places after it."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(super().forward(x))


def upsampled(z: Tensor) -> Tensor:
    return nn.functional.interpolate(z, size=(12, 12), mode="bicubic")


@pytest.mark.parametrize(
    "after",
    [
        lambda z: z.mean((2, 3)),
        lambda z: z[:, :, -1, 0],
        lambda z: z[:, :, 1:-1, 1:-1],
        lambda z: nn.functional.avg_pool2d(z, 2),
        lambda z: upsampled(z[:, :, 1:-1]),
        lambda z: torch.cat([z[:, :, :1]] * 4, 2),  # as many points as before, but all the same
    ],
    ids=["mean", "select", "crop", "pool", "crop, then upsample", "repeat one"],
)
def test_what_follows_the_head_must_use_all_of_it(after: Callable[[Tensor], Tensor]) -> None:
    net = Pooling(after)
    y = torch.zeros(6, *net(rows(1, 2, 4, 4)).shape[2:], dtype=torch.long)
    with pytest.raises(ValueError, match="pools, selects or crops after its head 'head' .16 points of a row become"):
        Laplace().from_trained(net, TensorDataset(rows(6, 2, 4, 4), y), RECIPE)


def test_tokens_that_do_not_count_are_refused() -> None:
    class Last(Folded):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)[:, -1]

    with pytest.raises(ValueError, match="'head' .5 points of a row become 1 outputs., so the curvature there is not"):
        Laplace().fit(Last, TensorDataset(rows(6, 5, 4), torch.arange(6) % 3), RECIPE)


@pytest.mark.parametrize("inference", [True, False])
def test_any_upsampling_may_follow_the_head(inference: bool) -> None:
    net = Pooling(upsampled)
    data = TensorDataset(rows(6, 2, 4, 4), torch.zeros(6, 12, 12, dtype=torch.long))
    with torch.inference_mode(inference):
        predictor = Laplace(prior_precision=1.0).from_trained(net, data, RECIPE)
        assert predictor.predict(rows(2, 2, 4, 4), 3).samples.shape == (3, 2, 3, 12, 12)


class Folded(nn.Module):
    """Puts pixels into the batch before its head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(0, 1)).view(*x.shape[:2], 3).mean(1)


def test_rows_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="the features of 2 inputs have 10 rows; expected the batch on the first axis"):
        Laplace().fit(Folded, TensorDataset(rows(6, 5, 4), torch.arange(6) % 3), RECIPE)
