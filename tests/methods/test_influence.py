"""The influence bootstrap of a head against weighted least squares, the sandwich estimator and sums written out."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _nets import Tokens, Upsampling
from _reference import standard_errors
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import neuboots.methods._head_points as survey_room
import neuboots.methods.influence.head as room
import neuboots.methods.influence.refit as refit_room
from neuboots import InfluenceBootstrap, TrainingConfig, load, save
from neuboots.losses import BrierLoss, GaussianNLL
from neuboots.methods._curvature import FullGGN, KronGGN
from neuboots.methods.influence.head import HeadPredictor
from neuboots.methods.neuboots import draw_replicate_weights
from neuboots.nets import MLP
from neuboots.testing import check_method
from neuboots.weights import Dirichlet, Exponential, assign_blocks

RECIPE = TrainingConfig(epochs=2, batch_size=16, progress=False)
HUGE = 1e15  # a ridge beside which H is nothing: then shifts are gradients, divided by it


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def around(net: nn.Module, x: Any, y: Tensor, config: TrainingConfig = RECIPE, **options: Any) -> HeadPredictor:
    predictor = InfluenceBootstrap(**options).from_trained(net, TensorDataset(x, y), config)
    assert isinstance(predictor, HeadPredictor)
    return predictor


def linear(theta: np.ndarray) -> nn.Linear:
    """A Linear layer with these weights (C, D̃), the last column its bias."""
    net = nn.Linear(theta.shape[1] - 1, len(theta)).double()
    with torch.no_grad():
        net.weight.copy_(torch.from_numpy(theta[:, :-1].copy()))
        net.bias.copy_(torch.from_numpy(theta[:, -1].copy()))
    return net


def seeded(make: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make().double().eval()


def extended(x: Tensor) -> np.ndarray:
    return np.concatenate([x.numpy(), np.ones((len(x), 1))], 1)


# -- a linear model ------------------------------------------------------------------------------------

X, NEW = rows(40, 3), rows(6, 3, seed=7)
PHI = extended(X)


def weighted_least_squares(y: np.ndarray, w: np.ndarray) -> np.ndarray:
    """argmin Σ wᵢ |yᵢ − θφ̃ᵢ|²: (C, D̃)."""
    return np.linalg.lstsq(PHI * np.sqrt(w)[:, None], y * np.sqrt(w)[:, None], rcond=None)[0].T


def least_squares(outputs: int) -> tuple[nn.Linear, Tensor]:
    y = rows(40, outputs, seed=1) * (1 + X[:, :1].abs()) + X[:, 1:2]
    return linear(weighted_least_squares(y.numpy(), np.ones(40))), y


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_linear_model_is_the_weighted_least_squares_bootstrap_to_first_order(outputs: int) -> None:
    """As the weights go to 1 the error goes with the square of their distance."""
    net, y = least_squares(outputs)
    predictor = around(net, X, y, loss=nn.MSELoss(), ridge=0.0, residuals="raw")
    assert predictor.num_blocks == 40
    away = Dirichlet().sample(torch.tensor([5]), 40)[0] - 1.0
    hat = weighted_least_squares(y.numpy(), np.ones(40))
    errors, moves = [], []
    for step in (0.08, 0.04, 0.02, 0.01):
        found = hat + step * torch.einsum("s,scd->cd", away, predictor.shifted.shifts).numpy()
        exact = weighted_least_squares(y.numpy(), 1.0 + step * away.numpy())
        errors.append(np.abs(found - exact).max())
        moves.append(np.abs(exact - hat).max())
    ratios = np.array(errors[:-1]) / np.array(errors[1:])
    assert np.all((ratios > 3.6) & (ratios < 4.4))
    assert errors[-1] < 0.02 * moves[-1]


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("blocks", [None, 5])
def test_a_refitted_linear_model_is_weighted_least_squares(outputs: int, blocks: int | None) -> None:
    net, y = least_squares(outputs)
    options = {"loss": nn.MSELoss(), "ridge": 0.0, "residuals": "raw", "num_blocks": blocks}
    predictor = around(net, X, y, refit=True, **options)
    assert predictor.shifted.refit is not None
    assert ("grams" in predictor.shifted.refit.names) == (blocks is not None)
    alphas = draw_replicate_weights(predictor.weight_distribution, predictor.num_blocks, 0, 4, 3)
    places = torch.arange(40) if blocks is None else assign_blocks(40, blocks, seed=RECIPE.seed)
    samples = predictor.predict(NEW, 4, seed=3)
    assert samples.moments is None
    for b, alpha in enumerate(alphas):
        exact = weighted_least_squares(y.numpy(), alpha[places].numpy())
        np.testing.assert_allclose(predictor.heads(b, b + 1, seed=3)[0].numpy(), exact, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(samples.samples[b].numpy(), extended(NEW) @ exact.T, rtol=1e-9, atol=1e-10)


def test_refitting_under_equal_weights_gives_the_net_back() -> None:
    """Also where the net is at no minimum, and with a ridge and corrected residuals."""
    from neuboots.weights import Constant

    for loss, y in ((nn.MSELoss(), rows(40, 2, seed=1)), (nn.CrossEntropyLoss(), torch.arange(40) % 2)):
        net = seeded(lambda: nn.Linear(3, 2))
        predictor = around(net, X, y, loss=loss, refit=True, weight_distribution=Constant(), residuals="hc3")
        torch.testing.assert_close(predictor.predict(NEW, 2).samples[1], net(NEW).detach())


# -- generalised linear models -------------------------------------------------------------------------


def logistic(y: np.ndarray, w: np.ndarray, ridge: float = 0.0, centre: np.ndarray | None = None) -> np.ndarray:
    """Weighted logistic regression by Newton, ridge around a centre: (D̃,)."""
    theta = np.zeros(4)
    centre = np.zeros(4) if centre is None else centre
    for _ in range(60):
        p = 1 / (1 + np.exp(-PHI @ theta))
        H = (PHI * (w * p * (1 - p))[:, None]).T @ PHI + ridge * np.eye(4)
        theta = theta - np.linalg.solve(H, PHI.T @ (w * (p - y)) + ridge * (theta - centre))
    return theta


LABELS = (X[:, 0] + 0.8 * rows(40, seed=4) > 0.2).long()
THETA = logistic(LABELS.numpy(), np.ones(40))
P = 1 / (1 + np.exp(-PHI @ THETA))
HESSIAN = (PHI * (P * (1 - P))[:, None]).T @ PHI
AT = extended(NEW)


def sandwich(residual: np.ndarray) -> np.ndarray:
    """φ̃ᵀ H⁻¹ (Σ gᵢgᵢᵀ) H⁻¹ φ̃ at the new inputs, and as S weights of a Dirichlet have it, without the mean gradient."""
    g = PHI * residual[:, None]
    n = len(g)
    meat = n / (n + 1) * (g.T @ g - np.outer(g.sum(0), g.sum(0)) / n)
    bread = np.linalg.inv(HESSIAN)
    return np.einsum("md,de,me->m", AT, bread @ meat @ bread, AT)


@pytest.mark.parametrize("kind", ["raw", "hc3"])
def test_logistic_regression_has_the_variance_of_the_sandwich(kind: str) -> None:
    y = LABELS.numpy()
    leverage = np.einsum("md,de,me->m", PHI, np.linalg.inv(HESSIAN), PHI) * P * (1 - P)
    assert leverage.max() < 0.9
    wanted = sandwich((y - P) / (1 - leverage) if kind == "hc3" else y - P)
    options = {"ridge": 0.0, "residuals": kind}
    net = linear(THETA[None])
    one = around(net, X, LABELS.double()[:, None], loss=nn.BCEWithLogitsLoss(), **options)
    np.testing.assert_allclose(one.predict(NEW, 2).std[:, 0].numpy() ** 2, wanted, rtol=1e-7)
    if kind == "raw":
        plain = np.einsum(
            "md,de,me->m",
            AT,
            np.linalg.inv(HESSIAN) @ (PHI * (y - P)[:, None] ** 2).T @ PHI,
            AT @ np.linalg.inv(HESSIAN),
        )
        np.testing.assert_allclose(wanted, plain * 40 / 41, rtol=1e-6)  # at the minimum gradients sum to zero
    # two outputs of a softmax whose difference is that logit
    two = around(linear(np.stack([0 * THETA, THETA])), X, LABELS, **options)
    difference = two.heads(0, 400, seed=0)[:, 1] - two.heads(0, 400, seed=0)[:, 0]
    torch.testing.assert_close(difference, one.heads(0, 400, seed=0)[:, 0], rtol=1e-6, atol=1e-8)


def test_refitted_logistic_regression_is_weighted_logistic_regression() -> None:
    net = linear(THETA[None])
    predictor = around(
        net, X, LABELS.double()[:, None], loss=nn.BCEWithLogitsLoss(), ridge=1.0 / 40, residuals="raw", refit=True
    )
    alphas = draw_replicate_weights(predictor.weight_distribution, 40, 0, 3, 0).numpy()
    for b in range(3):
        exact = logistic(LABELS.numpy(), alphas[b], ridge=1.0, centre=THETA)
        np.testing.assert_allclose(predictor.heads(b, b + 1, seed=0)[0, 0].numpy(), exact, rtol=1e-7, atol=1e-9)


def test_softmax_regression_has_the_sandwich_of_all_its_gradients() -> None:
    """Written out with dense Jacobians: three classes, a ridge, corrected by blocks of the hat matrix."""
    y, net = torch.arange(40) % 3, seeded(lambda: nn.Linear(3, 3))
    z = net(X).detach().numpy()
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    J = np.stack([np.kron(np.eye(3), phi) for phi in PHI])  # (n, C, K)
    L = np.linalg.cholesky(np.einsum("ni,ij->nij", p, np.eye(3)) - np.einsum("ni,nj->nij", p, p) + 1e-14 * np.eye(3))
    H = np.einsum("nck,ncd,ned,nel->kl", J, L, L, J) + 0.5 * 40 * np.eye(12)
    bread = np.linalg.inv(H)
    slope = np.eye(3)[y.numpy()] - p
    curvature = L @ L.transpose(0, 2, 1)
    hat = np.einsum("nck,kl,nel->nce", J, bread, J)
    # L (I − LᵀBL)⁻¹ L⁻¹ = (I − ΛB)⁻¹
    corrected = np.linalg.solve(np.eye(3) - curvature @ hat, slope[:, :, None])[:, :, 0]
    for kind, used in (("raw", slope), ("hc3", corrected)):
        wanted = np.einsum("nck,nc->nk", J, used) @ bread
        found = around(net, X, y, ridge=0.5, residuals=kind).shifted.shifts.flatten(1).numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-9)


def test_a_row_of_leverage_near_one_is_held() -> None:
    """A row that alone decides a weight: its residual is multiplied by ten at most."""
    x = torch.cat([rows(30, 2), torch.zeros(30, 1, dtype=torch.float64)], 1)
    x[0, 2] = 50.0
    net, y = seeded(lambda: nn.Linear(3, 1)), rows(30, 1, seed=2)
    raw, held = (
        around(net, x, y, loss=nn.MSELoss(), ridge=1e-6, residuals=kind).shifted.shifts for kind in ("raw", "hc3")
    )
    torch.testing.assert_close(held[0], 10.0 * raw[0], rtol=1e-6, atol=1e-9)


# -- the noise level -----------------------------------------------------------------------------------


def test_smoothed_residuals_know_the_noise_of_each_output() -> None:
    """Of three outputs with noise 0.1, 1 and 3 the levels are those, whatever the order of magnitude of the others."""
    x, noise = rows(600, 3), torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)
    y = x @ rows(3, 3, seed=2) + noise * rows(600, 3, seed=3)
    theta = np.linalg.lstsq(extended(x), y.numpy(), rcond=None)[0].T
    predictor = around(linear(theta), x, y, loss=nn.MSELoss(), ridge=0.0)
    exact = np.sqrt(np.einsum("md,de,me->m", AT, np.linalg.inv(extended(x).T @ extended(x)), AT))
    ratio = predictor.predict(NEW, 2).std.numpy() / (exact[:, None] * noise.numpy())
    assert np.all((ratio > 0.8) & (ratio < 1.25))


# -- gradients and curvature of any loss ---------------------------------------------------------------

PIXELS = rows(4, 3, 2, 2, seed=5)


@pytest.mark.parametrize(
    ("loss", "outputs", "y", "factor"),
    [
        (nn.CrossEntropyLoss(), 3, torch.arange(12) % 3, 1.0),
        (nn.CrossEntropyLoss(label_smoothing=0.2), 3, torch.arange(12) % 3, 1.0),
        (nn.CrossEntropyLoss(reduction="none"), 3, torch.arange(12) % 3, 1.0),
        (nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]).double(), reduction="none"), 3, torch.arange(12) % 3, 1.0),
        (nn.CrossEntropyLoss(reduction="none"), 3, rows(12, 3, seed=4).softmax(1), 1.0),
        (BrierLoss(), 3, torch.arange(12) % 3, 1.0),
        (nn.BCEWithLogitsLoss(), 2, (rows(12, 2, seed=4) > 0).double(), 1.0),
        (nn.MSELoss(), 2, rows(12, 2, seed=4), 0.5),
        (GaussianNLL(), 2, rows(12, 1, seed=4), 1.0),
        (GaussianNLL(beta=0.5), 4, rows(12, 2, seed=4), 1.0),
        (nn.SmoothL1Loss(reduction="none"), 1, rows(12, 1, seed=4), 1.0),
        (nn.HuberLoss(reduction="none", delta=0.02), 1, 5 * rows(12, 1, seed=4), 1.0),
        (nn.PoissonNLLLoss(reduction="none"), 1, rows(12, 1, seed=4).abs(), 1.0),
    ],
)
def test_block_sums_are_the_gradients_of_the_loss(loss: Any, outputs: int, y: Tensor, factor: float) -> None:
    net, x = seeded(lambda: nn.Linear(4, outputs)), rows(12, 4)
    if isinstance(loss, nn.HuberLoss):
        y = torch.cat([net(x).detach()[:1], y[1:]])  # of all rows but one nothing but the slope is known
    config = TrainingConfig(batch_size=5, progress=False)
    found = HUGE * 12 * around(net, x, y, config, loss=loss, ridge=HUGE, residuals="raw").shifted.shifts
    for i in range(12):
        g = torch.autograd.grad(loss(net(x[i : i + 1]), y[i : i + 1]).sum(), [net.weight, net.bias])
        wanted = -factor * torch.cat([g[0], g[1][:, None]], 1)
        torch.testing.assert_close(found[i], wanted, rtol=1e-5, atol=1e-9)


def test_gradients_pass_through_an_upsampling_and_leave_void_pixels_out() -> None:
    net, x = seeded(Upsampling), rows(3, 2, 8, 8)
    y = torch.arange(3 * 64).view(3, 8, 8) % 4
    y[:, :3] = -100
    y[2] = -100
    predictor = around(net, x, y, ridge=HUGE, residuals="raw", num_blocks=None)
    assert predictor.num_blocks == 3
    for i in range(3):
        total = nn.CrossEntropyLoss()(net(x[i : i + 1]), y[i : i + 1]).sum()
        g = torch.autograd.grad(total, [net.classifier.weight, net.classifier.bias])
        wanted = -torch.cat([g[0].flatten(1), g[1][:, None]], 1)
        torch.testing.assert_close(HUGE * 2 * predictor.shifted.shifts[i], wanted, rtol=1e-4, atol=1e-8)
    assert float(predictor.shifted.shifts[2].abs().max()) == 0.0  # two rows count: λ = 2 · ridge


@pytest.mark.parametrize("kind", [FullGGN, KronGGN])
def test_ggn_functions_match_dense_matrix(kind: type) -> None:
    phi, root, w = rows(9, 3), rows(9, 2, 2, seed=1), rows(9, seed=2).abs()
    ggn: Any = kind(2, 3)
    for part in (slice(0, 4), slice(4, 9)):
        ggn.add_roots(phi[part], root[part], w[part])
    ggn.decompose()
    J = torch.stack([torch.kron(torch.eye(2, dtype=torch.float64), p[None]) for p in phi])  # (M, 2, 6)
    curvature = root @ root.mT
    H = torch.einsum("m,mck,mce,mel->kl", w, J, curvature, J)
    if kind is KronGGN:
        inner = torch.einsum("m,md,me->de", w * curvature.diagonal(dim1=1, dim2=2).sum(1), phi, phi)
        outer = torch.einsum("m,mce->ce", w * phi.square().sum(1), curvature)
        H = torch.kron(outer, inner) / inner.trace()
    f = (ggn.eigenvalues() + 0.3).reciprocal()
    inverse, v = torch.linalg.inv(H + 0.3 * torch.eye(6)), rows(5, 6, seed=3)
    torch.testing.assert_close(ggn.eigenvalues().sort().values, torch.linalg.eigvalsh(H))
    torch.testing.assert_close(ggn.lift(ggn.project(v) * f), v @ inverse)
    torch.testing.assert_close(ggn.at(phi, f), J @ inverse @ J.mT)
    for points in (phi, phi[:2]):
        expected = (J @ inverse @ J.mT)[: len(points)].diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(ggn.diagonal_at(points, f), expected)


def test_large_heads_take_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the squared error it is the same; for classes nearly so."""
    y = {"squared": rows(40, 2, seed=1), "classes": torch.arange(40) % 2}
    for kind, loss in (("squared", nn.MSELoss()), ("classes", nn.CrossEntropyLoss())):
        net = seeded(lambda: nn.Linear(3, 2))
        whole = around(net, X, y[kind], loss=loss, ridge=0.1).predict(NEW, 2).std
        with monkeypatch.context() as patch:
            patch.setattr(room, "_WHOLE", 0)
            product = around(net, X, y[kind], loss=loss, ridge=0.1).predict(NEW, 2).std
        assert torch.equal(whole, product) == (kind == "squared")
        assert bool(((product / whole - 1).abs() < 0.3).all())


# -- blocks, passes, laws ------------------------------------------------------------------------------


def test_blocks_add_up_the_shifts_of_their_rows() -> None:
    net, y = seeded(lambda: MLP(3, 2, widths=(5,))), torch.arange(40) % 2
    alone, blocked = around(net, X, y), around(net, X, y, num_blocks=7)
    u = assign_blocks(40, 7, seed=RECIPE.seed)
    wanted = torch.zeros(7, 2, 6, dtype=torch.float64).index_add_(0, u, alone.shifted.shifts)
    torch.testing.assert_close(blocked.shifted.shifts, wanted)


def test_blocks_of_many_rows_keep_the_variance() -> None:
    """Were blocks stratified by the targets, an intercept would have no variance at all."""
    y = rows(2000, 1)
    net = linear(np.array([[0.0, float(y.mean())]]))
    x = torch.zeros(2000, 1, dtype=torch.float64)
    predictor = around(net, x, y, loss=nn.MSELoss(), residuals="raw", ridge=0.0)
    assert predictor.num_blocks == 256
    ratio = float(predictor.predict(x[:1], 2).std) ** 2 / (float(y.var()) / 2000)
    assert abs(ratio - 1) < standard_errors(1) * (2 / 256) ** 0.5


def test_few_numbers_are_kept_for_a_huge_head() -> None:
    """n ≤ S rows have blocks of their own; S is 256, the numbers K of the head, or fewer where S·K would be large."""
    sizes = [
        room._blocks(InfluenceBootstrap(), size, TensorDataset(torch.zeros(n, 1)), RECIPE).num_blocks
        for size, n in ((10, 200), (10, 300), (1000, 900), (1000, 5000), (6500, 50_000), (2_000_000, 50_000))
    ]
    assert sizes == [200, 256, 900, 1000, 10_000_000 // 6500, 64]


@pytest.mark.parametrize(("residuals", "passes"), [("raw", 2), ("hc3", 2), ("smooth", 3)])
def test_without_room_for_features_the_net_is_run_again(
    residuals: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same to the bit; and so it is with points some at a time, within rounding."""
    net, y = seeded(lambda: MLP(3, 2, widths=(5,))), torch.arange(40) % 2
    held = around(net, X, y, residuals=residuals).shifted.shifts
    calls: list[int] = []
    hook = net.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    around(net, X, y, residuals=residuals)
    once = sum(calls)
    calls.clear()
    monkeypatch.setattr(survey_room, "_HELD", 100)
    again = around(net, X, y, residuals=residuals).shifted.shifts
    hook.remove()
    assert sum(calls) - once == 40 * (passes - 1)
    assert torch.equal(again, held)
    monkeypatch.setattr(survey_room, "_PIECE", 40)
    monkeypatch.setattr(room, "_PIECE", 1)
    torch.testing.assert_close(around(net, X, y, residuals=residuals).shifted.shifts, held)


class Stream(IterableDataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(self.x, self.y, strict=True))


def test_a_stream_has_hashed_blocks() -> None:
    net, y = seeded(lambda: nn.Linear(3, 2)), torch.arange(40) % 2
    config = TrainingConfig(batch_size=10, steps_per_epoch=4, progress=False)
    found = InfluenceBootstrap(num_blocks=4).from_trained(net, Stream(X, y), config)
    assert isinstance(found, HeadPredictor)
    torch.testing.assert_close(found.shifted.shifts.sum(0), around(net, X, y).shifted.shifts.sum(0))
    assert bool((found.predict(NEW, 3).std > 0).all())


@pytest.mark.parametrize("weight_distribution", [Dirichlet(), Dirichlet(5.0), Exponential()])
@pytest.mark.parametrize("blocks", [None, 3])
def test_moments_are_those_of_many_replicates(weight_distribution: Any, blocks: int | None) -> None:
    net, y, B = seeded(lambda: MLP(3, 2, widths=(5,))), torch.arange(40) % 2, 20_000
    predictor = around(net, X, y, weight_distribution=weight_distribution, num_blocks=blocks)
    found = predictor.predict(NEW, B)
    mean, std = predictor.moments(NEW).mean, predictor.moments(NEW).std
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.std, std)
    k = standard_errors(2 * mean.numel())
    assert bool(((found.samples.mean(0) - mean).abs() <= k * std / B**0.5).all())
    # no weight has a longer tail than an exponential one, whose fourth moment is 9 σ⁴
    assert bool(((found.samples.var(0) / std.square() - 1).abs() <= k * (8 / B) ** 0.5).all())


@pytest.mark.parametrize("smooth", [0.0, 0.2])
def test_refitting_past_an_upsampling_is_refitting_at_the_head(smooth: float) -> None:
    """Of pixels that are each repeated twice by twice, with their labels: the same problem, four times."""
    low = seeded(lambda: nn.Conv2d(3, 2, 1))
    high = nn.Sequential(low, nn.Upsample(scale_factor=2, mode="nearest"))
    y = torch.arange(16).view(4, 2, 2) % 2
    loss = nn.CrossEntropyLoss(label_smoothing=smooth)
    options = {"loss": loss, "refit": True, "residuals": "hc3"}
    wanted = around(low, PIXELS, y, ridge=0.1, **options).heads(0, 3, seed=0)
    found = around(high, PIXELS, y.repeat_interleave(2, 1).repeat_interleave(2, 2), ridge=0.4, **options)
    torch.testing.assert_close(found.heads(0, 3, seed=0), wanted, rtol=1e-6, atol=1e-8)


def test_moments_pass_through_an_upsampling() -> None:
    net, x = seeded(Upsampling), rows(5, 2, 8, 8)
    predictor = around(net, x, torch.arange(5 * 64).view(5, 8, 8) % 4)
    assert predictor.predict(x, 2).moments is None
    samples, std = predictor.predict(x, 2000).samples, predictor.moments(x).std
    ratio = samples.std(0) / std
    assert 0.85 < float(ratio.min()) <= float(ratio.max()) < 1.2


# -- other shapes of heads -----------------------------------------------------------------------------


@pytest.mark.parametrize("residuals", ["raw", "hc3", "smooth"])
def test_a_convolution_is_a_linear_head_at_every_pixel(residuals: str) -> None:
    """Its blocks are images; a Linear head that sees the pixels as rows has blocks of pixels."""
    net = seeded(lambda: nn.Conv2d(3, 2, 1))
    y = rows(4, 2, 2, 2, seed=6)
    flat = nn.Linear(3, 2).double()
    with torch.no_grad():
        flat.weight.copy_(net.weight[:, :, 0, 0])
        flat.bias.copy_(net.bias)
    options = {"loss": nn.MSELoss(), "residuals": residuals}
    conv = around(net, PIXELS, y, ridge=0.1, **options)
    unfolded = around(
        flat, PIXELS.movedim(1, -1).flatten(0, 2), y.movedim(1, -1).flatten(0, 2), ridge=0.1 / 4, **options
    )
    wanted = unfolded.shifted.shifts.view(4, 4, 2, 4).sum(1)
    torch.testing.assert_close(conv.shifted.shifts, wanted)
    new = rows(1, 3, 2, 2, seed=9)
    torch.testing.assert_close(
        conv.predict(new, 3).std[0].flatten(1).T, _std_of(conv, new.movedim(1, -1).flatten(0, 2))
    )


def _std_of(predictor: HeadPredictor, phi: Tensor) -> Tensor:
    """By the sum over blocks, for a Dirichlet law: (M, C)."""
    moved = torch.einsum("scd,md->smc", predictor.shifted.shifts, torch.from_numpy(extended(phi)))
    v, c = predictor.weight_distribution.covariance(predictor.num_blocks)
    return ((v - c) * moved.square().sum(0) + c * moved.sum(0).square()).sqrt()


def test_void_pixels_change_nothing() -> None:
    net, y = seeded(lambda: nn.Conv2d(3, 2, 1)), torch.arange(16).view(4, 2, 2) % 2
    wide = torch.cat([PIXELS, 100 * rows(4, 3, 1, 2)], 2)
    ignore_index = torch.cat([y, torch.full((4, 1, 2), 255)], 1)
    for residuals in ("hc3", "smooth"):
        clean, padded = (
            around(net, a, b, loss=nn.CrossEntropyLoss(ignore_index=255), residuals=residuals)
            for a, b in ((PIXELS, y), (wide, ignore_index))
        )
        torch.testing.assert_close(clean.shifted.shifts, padded.shifted.shifts)


def test_tokens_without_bias_and_squeezed_outputs() -> None:
    words = torch.randint(0, 11, (6, 5), generator=torch.Generator().manual_seed(0))
    data = [({"input_ids": w, "scale": torch.ones(5, 6)}, torch.arange(5) % 3) for w in words]
    tokens = InfluenceBootstrap().from_trained(seeded(Tokens), data, RECIPE)  # type: ignore[arg-type]
    found = tokens.predict({"input_ids": words[:2], "scale": torch.ones(2, 5, 6)}, 4)
    assert found.samples.shape == (4, 2, 3, 5)
    assert bool((found.std > 0).all())

    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)[:, 0]

    net = seeded(Squeezed)
    y = rows(40, seed=1)
    squeezed, plain = around(net, X, y, loss=nn.MSELoss()), around(net.head, X, y, loss=nn.MSELoss())
    torch.testing.assert_close(squeezed.predict(NEW, 3).samples, plain.predict(NEW, 3).samples)
    torch.testing.assert_close(squeezed.predict(NEW, 3).std, plain.predict(NEW, 3).std)


def test_replicates_as_plain_nets_and_by_seed() -> None:
    net, y = seeded(lambda: MLP(3, 2, widths=(5,))), torch.arange(40) % 2
    predictor = around(net, X, y)
    samples = predictor.predict(NEW, 5, seed=4).samples
    for b in (0, 3):
        single = predictor.export(b, seed=4)
        assert type(single) is MLP
        torch.testing.assert_close(single(NEW).detach(), samples[b])
    conv = seeded(Upsampling)
    images = rows(4, 2, 8, 8)
    segmenting = around(conv, images, torch.arange(256).view(4, 8, 8) % 4)
    torch.testing.assert_close(segmenting.export(2)(images).detach(), segmenting.predict(images, 3).samples[2])


# -- the contract, saving, foreign nets ------------------------------------------------------------------


def test_options_that_take_another_path_keep_the_contract() -> None:
    check_method("influence", num_blocks=3, residuals="smooth", weight_distribution=Exponential())


@pytest.mark.parametrize(
    ("loss", "y", "outputs"),
    [
        (nn.CrossEntropyLoss(label_smoothing=0.1), torch.arange(40) % 2, 2),
        (nn.MSELoss(), rows(40, 1), 1),
        (GaussianNLL(), rows(40, 1), 2),
    ],
)
def test_a_refitted_predictor_is_saved(loss: Any, y: Tensor, outputs: int, tmp_path: Path) -> None:
    net = seeded(lambda: MLP(3, outputs, widths=(4,))).float()
    predictor = around(net, X.float(), y, loss=loss, refit=True)
    save(predictor, tmp_path / "model")
    again = load(tmp_path / "model")
    assert torch.equal(again.predict(NEW.float(), 3).samples, predictor.predict(NEW.float(), 3).samples)


def test_a_pretrained_net_in_five_lines() -> None:
    """A net that nobody here wrote, in training mode, half of it frozen: it stays as it is to the bit."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20, num_labels=3
    )
    net = transformers.BertForSequenceClassification(config)
    net.bert.requires_grad_(False)
    net.classifier.weight.grad = torch.ones_like(net.classifier.weight)
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    words = torch.randint(1, 20, (30, 6), generator=torch.Generator().manual_seed(0))
    data = [({"input_ids": w, "attention_mask": torch.ones(6, dtype=torch.int64)}, i % 3) for i, w in enumerate(words)]

    predictor = InfluenceBootstrap().from_trained(net, data)  # type: ignore[arg-type]
    prediction = predictor.predict({"input_ids": words[:5], "attention_mask": torch.ones(5, 6, dtype=torch.int64)}, 100)

    assert prediction.samples.shape == (100, 5, 3)
    assert bool((prediction.std > 0).all())
    after = net.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert [m.training for m in net.modules()] == modes
    assert torch.equal(net.classifier.weight.grad, torch.ones_like(net.classifier.weight))
    assert not any(p.requires_grad for p in net.bert.parameters())
    assert all(p.grad is None for p in net.parameters() if p is not net.classifier.weight)


def test_frozen_batch_norm_keeps_its_statistics() -> None:
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2)).train()
    before = copy.deepcopy(net.state_dict())
    first, second = (around(net, X.float(), torch.arange(40) % 2).predict(NEW.float(), 3).samples for _ in range(2))
    assert torch.equal(first, second)  # dropout is off
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
    assert all(module.training for module in net.modules())


# -- ill-posed cases -------------------------------------------------------------------------------------


def finite(predictor: HeadPredictor, x: Tensor) -> Tensor:
    found = predictor.predict(x, 50)
    assert bool(torch.isfinite(found.samples).all())
    assert bool(torch.isfinite(found.std).all())
    return found.std


@pytest.mark.parametrize("residuals", ["raw", "hc3", "smooth"])
@pytest.mark.parametrize("ridge", [None, 0.0])
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss()])
def test_ill_posed_data_give_finite_bands(loss: Any, ridge: float | None, residuals: str) -> None:
    """Fewer rows than weights; constant and dead features; two rows; a class that no row has; rows twice."""
    classes = isinstance(loss, nn.CrossEntropyLoss)
    for n, seed in ((5, 0), (2, 1), (40, 2)):
        x = rows(n, 20, seed=seed)
        x[:, 3], x[:, 4], x[:, 5] = 7.0, 0.0, x[:, 6]
        net = seeded(lambda: nn.Linear(20, 3))
        y = torch.arange(n) % 2 if classes else rows(n, 3, seed=seed + 1)
        std = finite(around(net, x, y, loss=loss, ridge=ridge, residuals=residuals), x)
        assert bool((std > 0).any())


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_separable_classes_give_finite_bands(scale: float) -> None:
    x = rows(60, 2)
    theta = scale * np.array([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    y = (x[:, 0] > 0).long()
    for residuals in ("raw", "hc3", "smooth"):
        std = finite(around(linear(theta), x, y, residuals=residuals), x)
        assert float(std.max()) < 100 * max(1.0, scale)


def test_a_head_of_zeros_gives_a_finite_band() -> None:
    finite(around(linear(np.zeros((2, 4))), X, torch.arange(40) % 2), X)


def test_dead_features_without_a_bias_give_no_band() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1, bias=False)).double()
    nn.init.constant_(net[0].bias, -100.0)
    assert not bool(finite(around(net, X, rows(40, 1), loss=nn.MSELoss()), X).any())


@pytest.mark.parametrize(
    ("options", "x", "y", "said"),
    [
        ({"loss": nn.MSELoss()}, X * torch.nan, rows(40, 2), "NaN or infinite"),
        ({"loss": nn.MSELoss()}, X, rows(40, 2) * torch.nan, "got NaN or infinite targets"),
        ({"loss": nn.MSELoss()}, X, rows(40), "expected the same shape"),
        ({}, X, torch.full((40,), -100), "all targets are ignored"),
        ({}, X, torch.arange(40) % 3, "got label 2 for a net with 2 outputs"),
        ({"loss": nn.L1Loss(reduction="none")}, X, rows(40, 2), "which has no curvature in the outputs"),
        ({"loss": nn.CrossEntropyLoss()}, X, torch.arange(40) % 2, 'use a loss with reduction="none"'),
    ],
)
def test_what_cannot_be_done_is_said(options: dict[str, Any], x: Tensor, y: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        around(seeded(lambda: nn.Linear(3, 2)), x, y, **options)


def test_a_net_with_nan_weights_is_refused() -> None:
    net = linear(np.full((2, 4), np.nan))
    with pytest.raises(ValueError, match="got NaN or infinite features, outputs or losses"):
        around(net, X, torch.arange(40) % 2)


def test_options_are_checked() -> None:
    for options, said in (
        ({"ridge": -1.0}, "got ridge=-1.0"),
        ({"residuals": "hc9"}, "got residuals='hc9'"),
        ({"layers": 0}, "got layers=0"),
        ({"num_blocks": 0}, "num_blocks ≥ 1"),
        ({"layers": 2, "refit": True}, "only a head is refitted"),
    ):
        with pytest.raises(ValueError, match=said):
            InfluenceBootstrap(**options)  # type: ignore[arg-type]


def test_refitting_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    net, y = seeded(lambda: nn.Linear(3, 2)), torch.arange(40) % 2
    with pytest.raises(ValueError, match="got a net that upsamples means and variances"):
        around(seeded(Upsampling), rows(3, 2, 8, 8), rows(3, 2, 8, 8, seed=1), loss=GaussianNLL(), refit=True)
    with pytest.raises(ValueError, match="got refitted heads, whose moments are not known"):
        around(net, X, y, refit=True).moments(NEW)
    monkeypatch.setattr(refit_room, "_HELD", 100)
    with pytest.raises(ValueError, match="refitting has to keep the features of all rows"):
        around(net, X, y, refit=True)
    monkeypatch.setattr(refit_room, "_MOST", 5)
    with pytest.raises(ValueError, match="got a head of 2 × 4 numbers to refit; expected systems of at most 5"):
        around(net, X, y, refit=True)


def test_a_loss_of_ones_own_is_not_saved_with_refitting(tmp_path: Path) -> None:
    net, y = seeded(lambda: nn.Linear(3, 2)), torch.arange(40) % 2
    predictor = around(net, X, y, loss=nn.CrossEntropyLoss(reduction="none"), refit=True)
    with pytest.raises(ValueError, match="only these can be saved"):
        save(predictor, tmp_path / "model")


def test_a_head_of_too_many_outputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_MOST_OUTPUTS", 1)
    with pytest.raises(ValueError, match="got a head of 2 outputs; expected at most 1"):
        around(seeded(lambda: nn.Linear(3, 2)), X, torch.arange(40) % 2)
