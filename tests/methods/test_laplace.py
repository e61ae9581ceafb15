"""Tests of last-layer Laplace against Bayesian linear regression, autograd's Hessian and explicit sums."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from _nets import ZOO, Composed, Stream, Tokens, Upsampling, make, noise
from _reference import standard_errors
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.utils.data import TensorDataset

import neuboots.methods.laplace as laplace_module
from neuboots import Deterministic, Laplace, TrainingConfig
from neuboots.losses import BrierLoss, GaussianNLL, as_loss
from neuboots.methods import _curvature
from neuboots.methods.laplace import LaplacePredictor
from neuboots.nets import MLP

CONFIG = TrainingConfig(epochs=2, batch_size=16, progress=False)
LABELS = torch.arange(40) % 3
DATA = TensorDataset(noise(40, 4), LABELS)
SMALL = partial(MLP, 4, 3, widths=(8,))
STRUCTURES = pytest.mark.parametrize("structure", ["full", "kron"])


def seeded(model: Callable[[], nn.Module]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return model().double().eval()


def laplace(net: nn.Module, x: Any, y: Tensor, *, batch_size: int = 16, **options: Any) -> LaplacePredictor:
    """The predictor around this net as it is, with τ = 0.5 unless given."""
    method = Laplace(**{"prior_precision": 0.5, **options})
    return method.from_trained(net, TensorDataset(x, y), batch_size=batch_size)


def covariance(predictor: LaplacePredictor) -> Tensor:
    """P⁻¹, from the root of P⁻¹ applied to every unit vector: (K, K)."""
    curvature = predictor.posterior.curvature
    root = (curvature.eigenvalues() + predictor.prior_precision).rsqrt()
    rows = curvature.lift(torch.diag(root))
    return rows.T @ rows


def precision(predictor: LaplacePredictor) -> Tensor:
    return torch.linalg.inv(covariance(predictor))


def with_ones(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[:, :1])], 1)


# -- Bayesian linear regression ------------------------------------------------------------------------


def linear_regression(tau: float) -> tuple[nn.Linear, Tensor, Tensor, float, Tensor]:
    """A linear net at its posterior mean, for the σ² of its own residuals: net, x, y, σ², Σ."""
    x, y = noise(30, 3).double(), noise(30, 1, seed=1).double()
    phi, variance = with_ones(x), 1.0
    for _ in range(100):  # σ² is that of the residuals at the mean, which depends on σ²
        theta = torch.linalg.solve(phi.T @ phi / variance + tau * torch.eye(4), phi.T @ y / variance)
        variance = float((y - phi @ theta).square().mean())
    net = nn.Linear(3, 1).double()
    with torch.no_grad():
        net.weight.copy_(theta[:3].T)
        net.bias.copy_(theta[3])
    return net, x, y, variance, torch.linalg.inv(phi.T @ phi / variance + tau * torch.eye(4))


@STRUCTURES
def test_linear_net_is_bayesian_linear_regression(structure: str) -> None:
    tau, B = 2.5, 4000
    net, x, y, _, sigma = linear_regression(tau)
    predictor = laplace(net, x, y, loss=nn.MSELoss(), structure=structure, prior_precision=tau)
    torch.testing.assert_close(covariance(predictor), sigma)
    new = noise(5, 3, seed=2).double()
    variance = ((with_ones(new) @ sigma) * with_ones(new)).sum(1)
    prediction = predictor.predict(new, B)
    torch.testing.assert_close(prediction.mean, net(new).detach())
    torch.testing.assert_close(prediction.std[:, 0].square(), variance)
    k = standard_errors(4 + 16 + 10)
    centered = predictor.heads(0, B, seed=0)[:, 0] - torch.cat([net.weight[0], net.bias]).detach()  # (B, D̃)
    assert bool((centered.mean(0).abs() <= k * (sigma.diagonal() / B).sqrt()).all())
    spread = ((sigma.square() + sigma.diagonal()[:, None] * sigma.diagonal()) / B).sqrt()
    assert bool(((centered.T @ centered / B - sigma).abs() <= k * spread).all())
    samples = prediction.samples[..., 0]
    assert bool(((samples.mean(0) - net(new)[:, 0]).abs() <= k * (variance / B).sqrt()).all())
    assert bool(((samples.var(0) - variance).abs() <= k * variance * math.sqrt(2 / B)).all())


@STRUCTURES
def test_evidence_of_linear_net_is_its_marginal_likelihood(structure: str) -> None:
    """log N(y; 0, σ² I + Φ Φᵀ / τ), in closed form."""
    tau = 0.7
    net, x, y, variance, _ = linear_regression(tau)
    phi = with_ones(x)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(30, dtype=torch.float64), variance * torch.eye(30, dtype=torch.float64) + phi @ phi.T / tau
    )
    predictor = laplace(net, x, y, loss=nn.MSELoss(), structure=structure)
    assert predictor.log_evidence(tau) == pytest.approx(float(marginal.log_prob(y[:, 0])), rel=1e-9)


@STRUCTURES
def test_default_prior_precision_maximizes_the_evidence(structure: str) -> None:
    predictor = laplace(seeded(SMALL), noise(40, 4).double(), LABELS, structure=structure, prior_precision=None)
    best = predictor.log_evidence()
    assert predictor.log_evidence(predictor.prior_precision) == best
    others = [predictor.log_evidence(predictor.prior_precision * c) for c in (1e-3, 0.5, 0.99, 1.01, 2.0, 1e3)]
    assert max(others) < best
    assert others[2] == pytest.approx(best, abs=1e-2)


def test_prior_precision_without_information_is_one() -> None:
    ignored = torch.full((6,), -100)
    assert laplace(seeded(SMALL), noise(6, 4).double(), ignored, prior_precision=None).prior_precision == 1.0


# -- the curvature -------------------------------------------------------------------------------------


def total_loss(loss: Any, phi: Tensor, y: Tensor, theta: Tensor) -> Tensor:
    return as_loss(loss)(phi @ theta.T, y).sum()


@pytest.mark.parametrize(
    ("loss", "y"),
    [
        (nn.CrossEntropyLoss(), torch.arange(12) % 3),
        (nn.CrossEntropyLoss(label_smoothing=0.1), torch.arange(12) % 3),
        (nn.BCEWithLogitsLoss(), (noise(12, 3, seed=4) > 0).double()),
        (nn.MSELoss(), noise(12, 3, seed=4).double()),
    ],
)
def test_curvature_is_the_hessian_of_the_loss(loss: Any, y: Tensor) -> None:
    """A head is linear in its weights, so that GGN and Hessian agree; ½ / σ² for the squared error."""
    x, net = noise(12, 4).double(), seeded(lambda: nn.Linear(4, 3))
    predictor = laplace(net, x, y, batch_size=5, loss=loss, structure="full")
    theta = torch.cat([net.weight, net.bias[:, None]], 1).detach()
    found = hessian(partial(total_loss, loss, with_ones(x), y), theta).reshape(15, 15)
    scale = 0.5 / float(as_loss(loss)(net(x), y).mean().detach()) if isinstance(loss, nn.MSELoss) else 1.0
    torch.testing.assert_close(precision(predictor), scale * found + 0.5 * torch.eye(15))


def test_curvature_and_likelihood_of_a_gaussian_head() -> None:
    """The expected Hessian: of targets μ ± σ with weight ½ the residual has mean 0 and square σ²."""
    x, net = noise(12, 4).double(), seeded(lambda: nn.Linear(4, 2))
    mean, log_variance = net(x).detach().chunk(2, 1)
    theta = torch.cat([net.weight, net.bias[:, None]], 1).detach()
    total = torch.zeros(10, 10, dtype=torch.float64)
    for sign in (-1, 1):
        y = mean + sign * (0.5 * log_variance).exp()
        total += 0.5 * hessian(partial(total_loss, GaussianNLL(), with_ones(x), y), theta).reshape(10, 10)
    predictor = laplace(net, x, y, loss=GaussianNLL(), structure="full")
    torch.testing.assert_close(precision(predictor), total + 0.5 * torch.eye(10))
    expected = torch.distributions.Normal(mean, (0.5 * log_variance).exp()).log_prob(y).sum()
    assert float(predictor.posterior.log_likelihood) == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("loss", "outputs", "x", "y"),
    [
        (nn.BCEWithLogitsLoss(), 1, noise(20, 4), (noise(20, 1) > 0).double()),
        (nn.MSELoss(), 3, noise(20, 4), noise(20, 3, seed=1).double()),
        (nn.CrossEntropyLoss(), 3, noise(1, 4).expand(20, 4), torch.arange(20) % 3),
    ],
    ids=["one output", "the same Λ", "the same φ"],
)
def test_kronecker_factors_are_exact_where_possible(loss: Any, outputs: int, x: Tensor, y: Tensor) -> None:
    net = seeded(lambda: MLP(4, outputs, widths=(6,)))
    full, kron = (laplace(net, x.double(), y, loss=loss, structure=s) for s in ("full", "kron"))
    torch.testing.assert_close(covariance(kron), covariance(full))
    new = noise(30, 4, seed=8).double()
    torch.testing.assert_close(kron.predict(new, 2).std, full.predict(new, 2).std)


# -- pixels, tokens, streams ---------------------------------------------------------------------------


def pixels(after: Callable[[Tensor], Tensor] = lambda z: z) -> nn.Module:
    """A net with outputs at the resolution of the input, and then `after`."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return after(net.head(net.stem(x).relu()))

    return Composed(forward, stem=nn.Conv2d(2, 5, 3, padding=1), head=nn.Conv2d(5, 3, 1))


def explicit_precision(phi: Tensor, z: Tensor, weights: Tensor) -> Tensor:
    """P with τ = 0.5, point by point: φ (M, D), z (M, C), weights (M,)."""
    P = 0.5 * torch.eye(z.shape[1] * (phi.shape[1] + 1), dtype=torch.float64)
    for f, out, w in zip(with_ones(phi), z, weights, strict=True):
        p = out.softmax(0)
        P += w * torch.kron(torch.diag(p) - torch.outer(p, p), torch.outer(f, f))
    return P


@pytest.mark.parametrize("elements", [1 << 24, 40])
def test_pixels_are_points_except_ignored_ones(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (laplace_module, _curvature):
        monkeypatch.setattr(module, "_CHUNK_ELEMENTS", elements)
    net, x = seeded(pixels), noise(5, 2, 4, 4).double()
    y = (x[:, 0] > 0).long()
    y[1, :2] = 255
    predictor = laplace(net, x, y, batch_size=2, loss=nn.CrossEntropyLoss(ignore_index=255), structure="full")
    with torch.no_grad():
        phi = net.stem(x).relu().movedim(1, -1).reshape(-1, 5)
        z = net(x).movedim(1, -1).reshape(-1, 3)
    P = explicit_precision(phi, z, (y != 255).flatten().double())
    torch.testing.assert_close(precision(predictor), P)
    losses = nn.CrossEntropyLoss(ignore_index=255, reduction="sum")(net(x), y)
    assert float(predictor.posterior.log_likelihood) == pytest.approx(-float(losses.detach()))
    blocks = torch.linalg.inv(P).view(3, 6, 3, 6)
    expected = torch.einsum("nd,cdce,ne->nc", with_ones(phi), blocks, with_ones(phi))
    torch.testing.assert_close(predictor.predict(x, 3).std.square().movedim(1, -1).reshape(-1, 3), expected)


def test_pixels_are_divided_among_the_points_of_an_upsampling() -> None:
    net, x = seeded(Upsampling), noise(3, 2, 8, 8).double()
    y = (x[:, 0] > 0).long()
    y[1] = -100
    y[2, :3] = -100
    predictor = laplace(net, x, y, structure="full")
    with torch.no_grad():
        phi = net.stem(x).relu()
        z = net.classifier(phi)
    weights = (torch.tensor([64.0, 0.0, 40.0], dtype=torch.float64) / 16).repeat_interleave(16)
    phi, z = (part.movedim(1, -1).flatten(0, -2) for part in (phi, z))
    torch.testing.assert_close(precision(predictor), explicit_precision(phi, z, weights))
    assert predictor.predict(x, 3).moments is None


def test_tokens_are_points() -> None:
    net, words, y = seeded(Tokens), torch.arange(10).view(5, 2), torch.arange(10).view(5, 2) % 3
    y[1, 1] = -100
    data: Any = [({"input_ids": w, "scale": torch.full((2, 6), 2.0)}, t) for w, t in zip(words, y, strict=True)]
    predictor = Laplace(prior_precision=0.5, structure="full").from_trained(net, data)
    x = {"input_ids": words, "scale": torch.full((5, 2, 6), 2.0, dtype=torch.float64)}
    with torch.no_grad():
        phi, z = net.embed(words) * 2, net(**x).logits
    P = explicit_precision(phi.flatten(0, 1), z.flatten(0, 1), (y != -100).flatten().double())
    torch.testing.assert_close(precision(predictor), P)
    prediction = predictor.predict(x, 3000)
    assert prediction.std.shape == (5, 3, 2)
    gap = (prediction.samples.std(0) - prediction.std).abs()
    assert bool((gap <= standard_errors(30) * prediction.std / math.sqrt(2 * 3000)).all())


def test_stream_is_read_for_one_epoch() -> None:
    x = noise(40, 4)
    config = TrainingConfig(epochs=1, batch_size=10, steps_per_epoch=3, progress=False)
    net = seeded(SMALL)
    streamed = Laplace().make_predictor(net, Stream(x, LABELS), config)
    stored = laplace(net, x[:30], LABELS[:30], prior_precision=streamed.prior_precision)
    torch.testing.assert_close(covariance(streamed), covariance(stored))


# -- fit and from_trained ------------------------------------------------------------------------------


def test_fit_trains_the_net_and_its_output_is_the_mean() -> None:
    y = LABELS.clone()
    y[::7] = -100
    data = TensorDataset(noise(40, 4), y)
    model = partial(SMALL, batch_norm=True)
    fitted, plain = Laplace().fit(model, data, CONFIG), Deterministic().fit(model, data, CONFIG)
    x = noise(5, 4, seed=5)
    assert torch.equal(fitted.predict(x, 3).mean, plain.predict(x, 1).samples[0])


@STRUCTURES
def test_predictor_can_be_cast(structure: str) -> None:
    predictor = Laplace(structure=structure).fit(SMALL, DATA, CONFIG)  # type: ignore[arg-type]
    x = noise(20, 4, seed=5)
    before, evidence = predictor.predict(x, 4), predictor.log_evidence()
    predictor.module.double().float()
    after = predictor.predict(x, 4)
    torch.testing.assert_close(after.samples, before.samples, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(after.std, before.std, rtol=1e-3, atol=1e-4)
    assert predictor.log_evidence() == pytest.approx(evidence, rel=1e-4)
    assert predictor.heads(0, 2, seed=0).dtype == torch.float64


def test_structure_of_large_heads_is_kron() -> None:
    for width, structure in ((10, "full"), (1000, "kron")):
        predictor = Laplace().fit(partial(MLP, 4, 3, widths=(width,)), DATA, replace(CONFIG, epochs=1))
        assert predictor.config()["structure"] == structure
        assert predictor.predict(noise(3, 4), 5).samples.shape == (5, 3, 3)


@pytest.mark.parametrize("case", [case for case in ZOO if not isinstance(case.x, dict)], ids=lambda case: case.name)
def test_nets_of_the_zoo(case: Any) -> None:
    """Nets that end at their head, squeeze or upsample are accepted; the others are rejected."""
    net, n, pixels = make(case), len(case.x), case.shape[2:]
    scalar = len(case.shape) == 1
    loss = nn.MSELoss() if scalar else nn.CrossEntropyLoss()
    data = TensorDataset(case.x, noise(n) if scalar else torch.zeros(n, *pixels, dtype=torch.long))
    if case.name in ("skipped", "written", "written through a view", "scaled"):
        with pytest.raises(ValueError, match="upsample"):
            Laplace(loss).fit(net, data, CONFIG)
        return
    prediction = Laplace(loss).fit(net, data, CONFIG).predict(case.x, 4)
    assert prediction.samples.shape == (4, n, 1 if scalar else case.shape[1], *pixels)
    assert bool((prediction.std > 0).all())


def test_gradients_reach_the_input() -> None:
    x = noise(3, 4).requires_grad_()
    prediction = Laplace().fit(SMALL, DATA, CONFIG).predict(x, 5)
    (prediction.samples.sum() + prediction.std.sum()).backward()
    assert x.grad is not None
    assert bool((x.grad != 0).any())


# -- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prior_precision", 0.0),
        ("prior_precision", math.inf),
        ("structure", "diag"),
        ("loss", BrierLoss()),
        ("loss", nn.CrossEntropyLoss(torch.ones(3))),
        ("loss", nn.BCEWithLogitsLoss(pos_weight=torch.ones(1))),
    ],
)
def test_options_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"got {name}="):
        Laplace(**{name: value})


def upsample(z: Tensor) -> Tensor:
    return nn.functional.interpolate(z, size=(12, 12), mode="bicubic")


@pytest.mark.parametrize(
    "after",
    [
        lambda z: nn.functional.max_pool2d(z, 3, 1, 1),  # preserves constants, but is not linear
        lambda z: z.mean((2, 3)),
        lambda z: z[:, :, -1, 0],
        lambda z: z[:, :, 1:-1, 1:-1],
        lambda z: nn.functional.avg_pool2d(z, 2),
        lambda z: upsample(z[:, :, 1:-1]),
        lambda z: torch.cat([z[:, :, :1]] * 4, 2),  # as many points as before, but all the same
    ],
    ids=["max", "mean", "select", "crop", "pool", "crop, then upsample", "repeat one"],
)
def test_only_upsampling_may_follow_the_head(after: Callable[[Tensor], Tensor]) -> None:
    net = pixels(after)
    y = torch.zeros(6, *net(noise(1, 2, 4, 4)).shape[2:], dtype=torch.long)
    with pytest.raises(ValueError, match="upsample"):
        Laplace().from_trained(net, TensorDataset(noise(6, 2, 4, 4), y))


@pytest.mark.parametrize("inference", [True, False])
def test_any_upsampling_may_follow_the_head(inference: bool) -> None:
    data = TensorDataset(noise(6, 2, 4, 4), torch.zeros(6, 12, 12, dtype=torch.long))
    with torch.inference_mode(inference):
        predictor = Laplace(prior_precision=1.0).from_trained(pixels(upsample), data)
        assert predictor.predict(noise(2, 2, 4, 4), 3).samples.shape == (3, 2, 3, 12, 12)


def test_batch_must_be_the_first_axis_of_the_features() -> None:
    def folded(net: Any, x: Tensor) -> Tensor:
        """Moves tokens into the batch before its head."""
        return net.head(x.flatten(0, 1)).view(*x.shape[:2], 3).mean(1)

    net = Composed(folded, head=nn.Linear(4, 3))
    with pytest.raises(ValueError, match="first axis"):
        Laplace().fit(net, TensorDataset(noise(6, 5, 4), torch.arange(6) % 3), CONFIG)
