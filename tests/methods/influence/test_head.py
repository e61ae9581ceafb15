"""Tests of the influence bootstrap of a head against weighted regressions, sandwich estimators and explicit sums."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _influence import (
    CLASSES,
    CONFIG,
    LABELS,
    NEW,
    NEW_PHI,
    PHI,
    PIXELS,
    THETA,
    X,
    bootstrap,
    least_squares,
    linear,
    logistic,
    make_net,
    randn,
    weighted_least_squares,
    with_ones,
)
from _nets import Composed, Stream, Upsampling
from _reference import standard_errors
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import InfluenceBootstrap, TrainingConfig, _validation, load, save
from neuboots.losses import GaussianNLL, as_loss
from neuboots.methods import _curvature
from neuboots.methods._curvature import FullGGN
from neuboots.methods.influence import HeadPredictor, InfluencePredictor, _head
from neuboots.methods.neuboots import draw_replicate_weights
from neuboots.nets import MLP
from neuboots.training import resolve_fit
from neuboots.weights import SPARE_BLOCKS, Constant, Dirichlet, Exponential, assign_blocks

HUGE = 1e15  # a ridge that dominates H: shifts are gradients, divided by it


@pytest.mark.parametrize("outputs", [1, 2])
def test_linear_model_matches_weighted_least_squares_to_first_order(outputs: int) -> None:
    """As the weights go to 1 the error goes with the square of their distance."""
    net, y = least_squares(outputs)
    predictor = bootstrap(net, X, y, loss=nn.MSELoss(), ridge=0.0, residuals="raw")
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


def test_softmax_regression_matches_dense_jacobians() -> None:
    """Written out with dense Jacobians: three classes, a ridge, corrected by blocks of the hat matrix."""
    y, net = torch.arange(40) % 3, make_net(lambda: nn.Linear(3, 3))
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
        found = bootstrap(net, X, y, ridge=0.5, residuals=kind).shifted.shifts.flatten(1).numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-9)


def test_smoothed_residuals_follow_the_noise_of_each_output() -> None:
    """Of three outputs with noise 0.1, 1 and 3 the levels are those, whatever the order of magnitude of the others."""
    x, noise = randn(600, 3), torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)
    y = x @ randn(3, 3, seed=2) + noise * randn(600, 3, seed=3)
    theta = np.linalg.lstsq(with_ones(x), y.numpy(), rcond=None)[0].T
    predictor = bootstrap(linear(theta), x, y, loss=nn.MSELoss(), ridge=0.0)
    exact = np.sqrt(np.einsum("md,de,me->m", NEW_PHI, np.linalg.inv(with_ones(x).T @ with_ones(x)), NEW_PHI))
    ratio = predictor.predict(NEW, 2).std.numpy() / (exact[:, None] * noise.numpy())
    assert np.all((ratio > 0.8) & (ratio < 1.25))


@pytest.mark.parametrize(
    ("loss", "outputs", "y", "factor"),
    [
        (nn.CrossEntropyLoss(label_smoothing=0.2), 3, torch.arange(12) % 3, 1.0),
        (nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]).double(), reduction="none"), 3, torch.arange(12) % 3, 1.0),
        (nn.CrossEntropyLoss(reduction="none"), 3, randn(12, 3, seed=4).softmax(1), 1.0),
        (nn.MSELoss(), 2, randn(12, 2, seed=4), 0.5),
        (GaussianNLL(beta=0.5), 4, randn(12, 2, seed=4), 1.0),
        (nn.HuberLoss(reduction="none", delta=0.02), 1, 5 * randn(12, 1, seed=4), 1.0),
        (nn.PoissonNLLLoss(reduction="none"), 1, randn(12, 1, seed=4).abs(), 1.0),
    ],
)
def test_block_sums_are_gradients_of_the_loss(loss: Any, outputs: int, y: Tensor, factor: float) -> None:
    net, x = make_net(lambda: nn.Linear(4, outputs)), randn(12, 4)
    if isinstance(loss, nn.HuberLoss):
        y = torch.cat([net(x).detach()[:1], y[1:]])  # of all rows but one nothing but the slope is known
    config = TrainingConfig(batch_size=5, progress=False)
    found = HUGE * 12 * bootstrap(net, x, y, config, loss=loss, ridge=HUGE, residuals="raw").shifted.shifts
    for i in range(12):
        g = torch.autograd.grad(as_loss(loss)(net(x[i : i + 1]), y[i : i + 1]).sum(), [net.weight, net.bias])
        wanted = -factor * torch.cat([g[0], g[1][:, None]], 1)
        torch.testing.assert_close(found[i], wanted, rtol=1e-5, atol=1e-9)


def test_gradients_pass_through_an_upsampling_without_ignored_pixels() -> None:
    net, x = make_net(Upsampling), randn(3, 2, 8, 8)
    y = torch.arange(3 * 64).view(3, 8, 8) % 4
    y[:, :3] = -100
    y[2] = -100
    predictor = bootstrap(net, x, y, ridge=HUGE, residuals="raw", num_blocks=None)
    assert predictor.num_blocks == 3
    for i in range(3):
        total = nn.CrossEntropyLoss(reduction="sum")(net(x[i : i + 1]), y[i : i + 1])
        g = torch.autograd.grad(total, [net.classifier.weight, net.classifier.bias])
        wanted = -torch.cat([g[0].flatten(1), g[1][:, None]], 1)
        torch.testing.assert_close(HUGE * 2 * predictor.shifted.shifts[i], wanted, rtol=1e-4, atol=1e-8)
    assert float(predictor.shifted.shifts[2].abs().max()) == 0.0  # two rows count: λ = 2 · ridge


def test_large_heads_use_the_kronecker_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the squared error it is the same; for classes nearly so."""
    y = {"squared": randn(40, 2, seed=1), "classes": CLASSES}
    for kind, loss in (("squared", nn.MSELoss()), ("classes", nn.CrossEntropyLoss())):
        net = make_net(lambda: nn.Linear(3, 2))
        whole = bootstrap(net, X, y[kind], loss=loss, ridge=0.1).predict(NEW, 2).std
        with monkeypatch.context() as patch:
            patch.setattr(_head, "MAX_FULL_SIZE", 0)
            product = bootstrap(net, X, y[kind], loss=loss, ridge=0.1).predict(NEW, 2).std
            patch.setattr(_head, "MAX_FULL_SIZE", 8)
            assert torch.equal(whole, bootstrap(net, X, y[kind], loss=loss, ridge=0.1).predict(NEW, 2).std)
        assert torch.equal(whole, product) == (kind == "squared")
        assert bool(((product / whole - 1).abs() < 0.3).all())


def test_block_shifts_are_sums_of_row_shifts() -> None:
    net, y = make_net(lambda: MLP(3, 2, widths=(5,))), CLASSES
    alone, blocked = bootstrap(net, X, y), bootstrap(net, X, y, num_blocks=7)
    u = assign_blocks(40, 7, seed=CONFIG.seed)
    wanted = torch.zeros(7, 2, 6, dtype=torch.float64).index_add_(0, u, alone.shifted.shifts)
    torch.testing.assert_close(blocked.shifted.shifts, wanted)


def test_blocks_of_many_rows_keep_the_variance() -> None:
    """Were blocks stratified by the targets, an intercept would have no variance at all."""
    y = randn(2000, 1)
    net = linear(np.array([[0.0, float(y.mean())]]))
    x = torch.zeros(2000, 1, dtype=torch.float64)
    predictor = bootstrap(net, x, y, loss=nn.MSELoss(), residuals="raw", ridge=0.0)
    assert predictor.num_blocks == 256
    ratio = float(predictor.predict(x[:1], 2).std) ** 2 / (float(y.var()) / 2000)
    assert abs(ratio - 1) < standard_errors(1) * (2 / 256) ** 0.5


def test_number_of_blocks_by_head_size() -> None:
    """n ≤ S rows have blocks of their own; S is 256, the numbers K of the head, or fewer where S·K would be large."""
    sizes = [
        _head._make_blocks(
            InfluenceBootstrap(), size, resolve_fit(nn.Identity(), (torch.zeros(n, 1), torch.zeros(n)), CONFIG)
        ).num_blocks
        for size, n in ((10, 200), (10, 300), (1000, 900), (1000, 5000), (6500, 50_000), (2_000_000, 50_000))
    ]
    assert sizes == [200, 256, 900, 1000, 10_000_000 // 6500, 64]
    every = resolve_fit(nn.Identity(), (torch.zeros(256, 1), torch.zeros(256)), CONFIG)
    rows = torch.arange(256)
    assert torch.equal(_head._make_blocks(InfluenceBootstrap(), 10, every)(rows), rows)


@pytest.mark.parametrize(("residuals", "passes"), [("raw", 2), ("hc3", 2), ("smooth", 3)])
def test_net_runs_again_when_features_are_not_stored(
    residuals: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same to the bit; and so it is with points some at a time, within rounding."""
    net, y = make_net(lambda: MLP(3, 2, widths=(5,))), CLASSES
    stored = bootstrap(net, X, y, residuals=residuals).shifted.shifts
    calls: list[int] = []
    hook = net.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    bootstrap(net, X, y, residuals=residuals)
    once = sum(calls)
    calls.clear()
    monkeypatch.setattr(_curvature, "_MAX_STORED_BYTES", 100)
    again = bootstrap(net, X, y, residuals=residuals).shifted.shifts
    hook.remove()
    assert sum(calls) - once == 40 * (passes - 1)
    assert torch.equal(again, stored)
    monkeypatch.setattr(_curvature, "_CHUNK_ELEMENTS", 40)
    monkeypatch.setattr(_head, "_CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(bootstrap(net, X, y, residuals=residuals).shifted.shifts, stored)


def test_stream_has_hashed_blocks() -> None:
    net, y = make_net(lambda: nn.Linear(3, 2)), CLASSES
    config = TrainingConfig(batch_size=10, steps_per_epoch=4, progress=False)
    found = InfluenceBootstrap(num_blocks=4).make_predictor(net, Stream(X, y), config)
    assert isinstance(found, HeadPredictor)
    torch.testing.assert_close(found.shifted.shifts.sum(0), bootstrap(net, X, y).shifted.shifts.sum(0))
    assert bool((found.predict(NEW, 3).std > 0).all())


def test_moments_pass_through_an_upsampling() -> None:
    net, x = make_net(Upsampling), randn(5, 2, 8, 8)
    predictor = bootstrap(net, x, torch.arange(5 * 64).view(5, 8, 8) % 4, weight_distribution=Exponential())
    assert predictor.predict(x, 2).moments is None
    samples, moments = predictor.predict(x, 500).samples, predictor.moments(x)
    torch.testing.assert_close(moments.mean, net(x).detach())
    ratio = (samples.var(0) / moments.std.square()).mean()
    assert abs(float(ratio) - 1) < standard_errors(1) * (2 / 500) ** 0.5


def test_moments_after_an_upsampling_have_the_covariance_of_the_weights() -> None:
    """With three blocks of several rows, whose covariance is half of their variance: with dense matrices."""
    net, x = make_net(Upsampling), randn(5, 2, 8, 8)
    predictor = bootstrap(net, x, torch.arange(5 * 64).view(5, 8, 8) % 4, num_blocks=3)
    moved, output = [], net(x).detach()
    for shift in predictor.shifted.shifts:
        other = copy.deepcopy(net)
        with torch.no_grad():
            other.classifier.weight += shift[:, :-1, None, None]
            other.classifier.bias += shift[:, -1]
        moved.append(other(x).detach() - output)
    m = torch.stack(moved)
    v, c = predictor.weight_distribution.covariance(3)
    covariance = torch.full((3, 3), c).fill_diagonal_(v).double()
    assert float(m.sum(0).square().sum()) > 1e-3 * float(m.square().sum())
    expected = torch.einsum("sncij,st,tncij->ncij", m, covariance, m).sqrt()
    torch.testing.assert_close(predictor.moments(x).std, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_and_replicates_have_the_precision_of_the_net(dtype: torch.dtype, tmp_path: Path) -> None:
    predictor = bootstrap(make_net(lambda: MLP(3, 2, widths=(5,))).to(dtype), X.to(dtype), CLASSES)
    new = NEW.to(dtype)
    found, moments = predictor.predict(new, 3), predictor.moments(new)
    torch.testing.assert_close(moments.mean, found.mean)
    torch.testing.assert_close(moments.std, found.std)
    save(predictor, tmp_path / "model")
    loaded: Any = load(tmp_path / "model")
    assert torch.equal(loaded.predict(new, 3).samples, found.samples)
    refitted = bootstrap(predictor.net, X.to(dtype), CLASSES, refit=True)
    tensors = (moments.mean, moments.std, found.samples, loaded.predict(new, 3).samples)
    weights = (predictor.heads(0, 1, seed=0), refitted.heads(0, 1, seed=0), *predictor.export(0).state_dict().values())
    assert {tensor.dtype for tensor in (*tensors, *weights)} == {dtype}
    with pytest.raises(ValueError, match="NaN"):
        predictor.moments(torch.nan * new)


@pytest.mark.parametrize("least", [1, 64])
def test_fewer_rows_than_features_match_the_normal_equations(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the curvature of five rows with 20 features is computed in the span of the rows."""
    monkeypatch.setattr(_curvature, "_MIN_REDUCED_WIDTH", least)
    x, new = randn(5, 20), randn(4, 20, seed=1)
    net, y = make_net(lambda: nn.Linear(20, 1)), randn(5, 1, seed=2)
    phi, new_phi = with_ones(x), with_ones(new)
    shifts = np.linalg.inv(phi.T @ phi + 5 * 0.1 * np.eye(21)) @ phi.T * (y - net(x)).detach().numpy().T  # (D̃, n)
    found = bootstrap(net, x, y, loss=nn.MSELoss(), ridge=0.1, residuals="raw")
    np.testing.assert_allclose(found.shifted.shifts[:, 0].T.numpy(), shifts, rtol=1e-6, atol=1e-9)
    v, c = found.weight_distribution.covariance(5)
    moved = new_phi @ shifts
    variance = (v - c) * (moved**2).sum(1) + c * moved.sum(1) ** 2
    np.testing.assert_allclose(found.moments(new).std[:, 0].numpy(), np.sqrt(variance), rtol=1e-6)
    free = bootstrap(net, x, y, loss=nn.MSELoss())  # a ridge of its own
    assert 0 < free.degrees_of_freedom <= 2.5 + 1e-6


@pytest.mark.parametrize("outputs", [1, 2])
def test_ridge_of_fewer_rows_than_features_is_found(outputs: int) -> None:
    """Every target can be reproduced: then half of the degrees of freedom are left."""
    x, y = randn(5, 20), randn(5, outputs, seed=1)
    phi = with_ones(x)
    theta = np.linalg.solve(phi.T @ phi + 60.0 * np.eye(21), phi.T @ y.numpy()).T
    found = bootstrap(linear(theta), x, y, loss=nn.MSELoss())
    assert found.ridge == pytest.approx(60.0 / 5, rel=1e-6)
    net = make_net(lambda: nn.Linear(20, outputs))
    assert bootstrap(net, x, net(x).detach(), loss=nn.MSELoss()).degrees_of_freedom == pytest.approx(2.5 * outputs)


def test_ridge_is_the_same_in_the_span_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three rows, several times each, which a net reproduces."""
    x, net = randn(3, 20).repeat(3, 1), make_net(lambda: nn.Linear(20, 1))
    whole = bootstrap(net, x, net(x).detach(), loss=nn.MSELoss())
    monkeypatch.setattr(_curvature, "_MIN_REDUCED_WIDTH", 1)
    assert bootstrap(net, x, net(x).detach(), loss=nn.MSELoss()).ridge == pytest.approx(whole.ridge, rel=1e-6)


def test_ridge_counts_every_output_that_a_point_is_upsampled_to() -> None:
    """Of pixels that are each repeated twice by twice, with their targets: the same fit, four times."""
    low = make_net(lambda: nn.Conv2d(3, 2, 1))
    high = nn.Sequential(low, nn.Upsample(scale_factor=2, mode="nearest"))
    y = low(PIXELS).detach() + 0.2 * randn(4, 2, 2, 2, seed=6)
    repeated = y.repeat_interleave(2, 2).repeat_interleave(2, 3)
    once, four = (
        bootstrap(net, PIXELS, t, loss=nn.MSELoss(), residuals="raw") for net, t in ((low, y), (high, repeated))
    )
    assert 1.1 < once.degrees_of_freedom < 7.9  # of eight parameters
    assert four.ridge == pytest.approx(4 * once.ridge, rel=1e-6)


def test_blocks_depend_on_the_seed() -> None:
    streams = [TrainingConfig(batch_size=10, steps_per_epoch=4, progress=False, seed=seed) for seed in (0, 1)]
    found = [
        InfluenceBootstrap(num_blocks=4).make_predictor(make_net(lambda: nn.Linear(3, 2)), data, config)
        for data in (TensorDataset(X, CLASSES), Stream(X, CLASSES))
        for config in streams
    ]
    shifts = [each.shifted.shifts for each in found]  # type: ignore[attr-defined]
    assert not torch.allclose(shifts[0], shifts[1])
    assert not torch.allclose(shifts[2], shifts[3])


@pytest.mark.parametrize("residuals", ["raw", "hc3", "smooth"])
def test_convolution_is_a_linear_head_at_every_pixel(residuals: str) -> None:
    """Its blocks are images; a Linear head that sees the pixels as rows has blocks of pixels."""
    net = make_net(lambda: nn.Conv2d(3, 2, 1))
    y = randn(4, 2, 2, 2, seed=6)
    flat = nn.Linear(3, 2).double()
    with torch.no_grad():
        flat.weight.copy_(net.weight[:, :, 0, 0])
        flat.bias.copy_(net.bias)
    options = {"loss": nn.MSELoss(), "residuals": residuals}
    conv = bootstrap(net, PIXELS, y, ridge=0.1, **options)
    unfolded = bootstrap(
        flat, PIXELS.movedim(1, -1).flatten(0, 2), y.movedim(1, -1).flatten(0, 2), ridge=0.1 / 4, **options
    )
    wanted = unfolded.shifted.shifts.view(4, 4, 2, 4).sum(1)
    torch.testing.assert_close(conv.shifted.shifts, wanted)
    new = randn(1, 3, 2, 2, seed=9)
    torch.testing.assert_close(
        conv.predict(new, 3).std[0].flatten(1).T, expected_std(conv, new.movedim(1, -1).flatten(0, 2))
    )


def expected_std(predictor: HeadPredictor, phi: Tensor) -> Tensor:
    """By the sum over blocks: (M, C)."""
    moved = torch.einsum("scd,md->smc", predictor.shifted.shifts, torch.from_numpy(with_ones(phi)))
    v, c = predictor.weight_distribution.covariance(predictor.num_blocks)
    return ((v - c) * moved.square().sum(0) + c * moved.sum(0).square()).sqrt()


def test_ignored_pixels_change_nothing() -> None:
    net, y = make_net(lambda: nn.Conv2d(3, 2, 1)), torch.arange(16).view(4, 2, 2) % 2
    wide = torch.cat([PIXELS, 100 * randn(4, 3, 1, 2)], 2)
    ignore_index = torch.cat([y, torch.full((4, 1, 2), 255)], 1)
    for residuals in ("hc3", "smooth"):
        clean, padded = (
            bootstrap(net, a, b, loss=nn.CrossEntropyLoss(ignore_index=255), residuals=residuals)
            for a, b in ((PIXELS, y), (wide, ignore_index))
        )
        torch.testing.assert_close(clean.shifted.shifts, padded.shifted.shifts)


def test_squeezed_outputs_without_a_bias() -> None:
    net = make_net(lambda: Composed(lambda net, x: net.head(x)[:, 0], head=nn.Linear(3, 1, bias=False)))
    y = randn(40, seed=1)
    squeezed, plain = bootstrap(net, X, y, loss=nn.MSELoss()), bootstrap(net.head, X, y, loss=nn.MSELoss())
    torch.testing.assert_close(squeezed.predict(NEW, 3).samples, plain.predict(NEW, 3).samples)
    torch.testing.assert_close(squeezed.predict(NEW, 3).std, plain.predict(NEW, 3).std)


def test_export_matches_samples() -> None:
    for net in (make_net(lambda: MLP(3, 2, widths=(5,))), make_net(lambda: nn.Sequential(MLP(3, 2, widths=(5,))))):
        predictor = bootstrap(net, X, CLASSES)
        samples = predictor.predict(NEW, 5, seed=4).samples
        for b in (0, 3):
            single = predictor.export(b, seed=4)
            assert type(single) is type(net)
            torch.testing.assert_close(single(NEW).detach(), samples[b])
    conv = make_net(Upsampling)
    images = randn(4, 2, 8, 8)
    segmenting = bootstrap(conv, images, torch.arange(256).view(4, 8, 8) % 4)
    torch.testing.assert_close(segmenting.export(2)(images).detach(), segmenting.predict(images, 3).samples[2])


# -- ill-posed data ------------------------------------------------------------------------------------


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
        x = randn(n, 20, seed=seed)
        x[:, 3], x[:, 4], x[:, 5] = 7.0, 0.0, x[:, 6]
        net = make_net(lambda: nn.Linear(20, 3))
        y = torch.arange(n) % 2 if classes else randn(n, 3, seed=seed + 1)
        std = finite(bootstrap(net, x, y, loss=loss, ridge=ridge, residuals=residuals), x)
        assert bool((std > 0).any())


def test_hugging_face_net_is_not_changed() -> None:
    """A net in training mode with frozen parts and a gradient: all of it stays bit for bit as it was."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    net = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=20, num_labels=3))
    net.bert.requires_grad_(False)
    net.classifier.weight.grad = torch.ones_like(net.classifier.weight)

    def state() -> list[Any]:
        gradients = [(p.requires_grad, p.grad is None or p.grad.tolist()) for p in net.parameters()]
        return [gradients, [m.training for m in net.modules()]]

    before, tensors = state(), copy.deepcopy(net.state_dict())
    words = torch.randint(1, 20, (30, 6))
    data = [({"input_ids": w, "attention_mask": torch.ones(6, dtype=torch.int64)}, i % 3) for i, w in enumerate(words)]
    predictor = InfluenceBootstrap().from_trained(net, data)  # type: ignore[arg-type]
    prediction = predictor.predict({"input_ids": words[:5], "attention_mask": torch.ones(5, 6, dtype=torch.int64)}, 100)
    assert prediction.samples.shape == (100, 5, 3)
    assert bool((prediction.std > 0).all())
    assert state() == before
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in tensors.items())


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4])
def test_separable_classes_give_finite_bands(scale: float) -> None:
    x = randn(60, 2)
    theta = scale * np.array([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    y = (x[:, 0] > 0).long()
    for residuals in ("raw", "hc3", "smooth"):
        std = finite(bootstrap(linear(theta), x, y, residuals=residuals), x)
        assert float(std.max()) < 100 * max(1.0, scale)


def test_dead_features_without_a_bias_give_no_band() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1, bias=False)).double()
    nn.init.constant_(net[0].bias, -100.0)
    assert not bool(finite(bootstrap(net, X, randn(40, 1), loss=nn.MSELoss()), X).any())


# -- refitted heads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("blocks", [None, 5])
def test_refitted_linear_model_is_weighted_least_squares(outputs: int, blocks: int | None) -> None:
    net, y = least_squares(outputs)
    options = {"loss": nn.MSELoss(), "ridge": 0.0, "residuals": "raw", "num_blocks": blocks}
    predictor = bootstrap(net, X, y, refit=True, **options)
    assert predictor.shifted.refit is not None
    alphas = draw_replicate_weights(predictor.weight_distribution, predictor.num_blocks, 0, 4, 3)
    places = torch.arange(40) if blocks is None else assign_blocks(40, blocks, seed=CONFIG.seed)
    samples = predictor.predict(NEW, 4, seed=3)
    assert samples.moments is None
    for b, alpha in enumerate(alphas):
        exact = weighted_least_squares(y.numpy(), alpha[places].numpy())
        np.testing.assert_allclose(predictor.heads(b, b + 1, seed=3)[0].numpy(), exact, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(samples.samples[b].numpy(), NEW_PHI @ exact.T, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("unit", [1e-8, 1e8])
def test_refit_does_not_depend_on_the_unit_of_the_targets(unit: float) -> None:
    net, y = least_squares(1)
    scaled = linear(unit * torch.cat([net.weight, net.bias[:, None]], 1).detach().numpy())
    options = {"loss": nn.MSELoss(), "ridge": 0.0, "residuals": "raw", "refit": True}
    wanted, found = (bootstrap(*each, **options).heads(0, 3, seed=0) for each in ((net, X, y), (scaled, X, unit * y)))
    torch.testing.assert_close(found / unit, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-10, 1.0, 1e10])
def test_directions_without_curvature_stay(scale: float) -> None:
    """What is rounding beside the largest curvature counts as none, as in a pseudo-inverse."""
    for small, expected in ((1e-3, 1e3), (1e-16, 0.0), (0.0, 0.0)):
        curvature = FullGGN(1, 2)
        curvature.vectors.copy_(scale * torch.diag(torch.tensor([1.0, small], dtype=torch.float64)))
        found = scale * _head._solve(curvature, 0.0, torch.ones(1, 2).double())
        torch.testing.assert_close(found, torch.tensor([[1.0, expected]]).double())


def test_refitted_linear_model_with_a_column_twice_is_weighted_least_squares() -> None:
    """H has no inverse: directions without information stay."""
    net, y = least_squares(1)
    twice = nn.Linear(4, 1).double()
    with torch.no_grad():
        twice.weight.copy_(torch.cat([net.weight, torch.zeros(1, 1)], 1))
        twice.bias.copy_(net.bias)
    options = {"loss": nn.MSELoss(), "ridge": 0.0, "residuals": "raw"}
    predictor = bootstrap(twice, torch.cat([X, X[:, 2:]], 1), y, refit=True, **options)
    alphas = draw_replicate_weights(predictor.weight_distribution, 40, 0, 3, 3)
    samples = predictor.predict(torch.cat([NEW, NEW[:, 2:]], 1), 3, seed=3).samples
    for b, alpha in enumerate(alphas):
        exact = weighted_least_squares(y.numpy(), alpha.numpy())
        np.testing.assert_allclose(samples[b].numpy(), NEW_PHI @ exact.T, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("num_blocks", [10_001, 10**12])
@pytest.mark.parametrize("layers", [1, "all"])
def test_blocks_that_no_data_fill_are_rejected(layers: Any, num_blocks: int) -> None:
    net, y = least_squares(1)
    method = InfluenceBootstrap(nn.MSELoss(), layers=layers, num_blocks=num_blocks)
    with pytest.raises(ValueError, match="got num_blocks="):
        method.fit(net, TensorDataset(X, y), CONFIG)


def test_refit_under_equal_weights_returns_the_net() -> None:
    """Also where the net is at no minimum, and with a ridge and corrected residuals."""
    for loss, y in ((nn.MSELoss(), randn(40, 2, seed=1)), (nn.CrossEntropyLoss(), CLASSES)):
        net = make_net(lambda: nn.Linear(3, 2))
        predictor = bootstrap(net, X, y, loss=loss, refit=True, weight_distribution=Constant(), residuals="hc3")
        torch.testing.assert_close(predictor.predict(NEW, 2).samples[1], net(NEW).detach())


def test_refitted_logistic_regression_is_weighted_logistic_regression() -> None:
    net = linear(THETA[None])
    predictor = bootstrap(
        net, X, LABELS.double()[:, None], loss=nn.BCEWithLogitsLoss(), ridge=1.0 / 40, residuals="raw", refit=True
    )
    alphas = draw_replicate_weights(predictor.weight_distribution, 40, 0, 3, 0).numpy()
    for b in range(3):
        exact = logistic(LABELS.numpy(), alphas[b], ridge=1.0, center=THETA)
        np.testing.assert_allclose(predictor.heads(b, b + 1, seed=0)[0, 0].numpy(), exact, rtol=1e-7, atol=1e-9)


def test_refit_reaches_the_minimum_under_extreme_weights() -> None:
    """A full Newton step would leave the region where the loss is curved."""
    options = {"ridge": 0.01 / 40, "residuals": "raw", "weight_distribution": Dirichlet(0.05)}
    y = LABELS.double()
    predictor = bootstrap(linear(THETA[None]), X, y[:, None], loss=nn.BCEWithLogitsLoss(), refit=True, **options)
    alphas = draw_replicate_weights(predictor.weight_distribution, 40, 0, 8, 0).numpy()
    for alpha, theta in zip(alphas, predictor.heads(0, 8, seed=0)[:, 0].numpy(), strict=True):
        slope = alpha * (1 / (1 + np.exp(-PHI @ theta)) - LABELS.numpy())
        np.testing.assert_allclose(PHI.T @ slope + 0.01 * (theta - THETA), 0.0, atol=1e-8)


def test_refitted_head_without_a_bias_is_weighted_least_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with rows that are read one by one."""
    y = randn(40, 1, seed=1)
    net = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.linalg.lstsq(X, y).solution.T)
    predictor = bootstrap(net, X, y, loss=nn.MSELoss(), ridge=0.0, residuals="raw", refit=True)
    root = draw_replicate_weights(predictor.weight_distribution, 40, 0, 1, 0).T.sqrt()
    exact = torch.linalg.lstsq(root * X, root * y).solution.T
    for size in (1 << 20, 1):
        monkeypatch.setattr(_head, "_CHUNK_ELEMENTS", size)
        torch.testing.assert_close(predictor.heads(0, 1, seed=0)[0], exact)


@pytest.mark.parametrize("smooth", [0.0, 0.2])
def test_refit_after_upsampling_is_refit_at_the_head(smooth: float) -> None:
    """Of pixels that are each repeated twice by twice, with their labels: the same problem, four times."""
    low = make_net(lambda: nn.Conv2d(3, 2, 1))
    high = nn.Sequential(low, nn.Upsample(scale_factor=2, mode="nearest"))
    y = torch.arange(16).view(4, 2, 2) % 2
    loss = nn.CrossEntropyLoss(label_smoothing=smooth)
    options = {"loss": loss, "refit": True, "residuals": "hc3"}
    wanted = bootstrap(low, PIXELS, y, ridge=0.1, **options).heads(0, 3, seed=0)
    found = bootstrap(high, PIXELS, y.repeat_interleave(2, 1).repeat_interleave(2, 2), ridge=0.4, **options)
    torch.testing.assert_close(found.heads(0, 3, seed=0), wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("loss", "y", "outputs"),
    [
        (nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES, 2),
        (GaussianNLL(), randn(40, 1), 2),
    ],
)
def test_refitted_heads_are_saved(loss: Any, y: Tensor, outputs: int, tmp_path: Path) -> None:
    net = make_net(lambda: MLP(3, outputs, widths=(4,))).float()
    predictor = bootstrap(net, X.float(), y, loss=loss, refit=True)
    save(predictor, tmp_path / "model")
    again = load(tmp_path / "model")
    assert torch.equal(again.predict(NEW.float(), 3).samples, predictor.predict(NEW.float(), 3).samples)


def test_size_of_the_curvature_is_checked_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are as many rows as features; with fewer the size of the span counts, afterwards."""
    seen: list[object] = []
    config = TrainingConfig(epochs=1, progress=False, on_epoch=seen.append)
    monkeypatch.setattr(_curvature, "MAX_EIGEN_SIZE", 3)
    for n in (4, 40):
        with pytest.raises(ValueError, match="curvature of at most 3"):
            InfluenceBootstrap().fit(make_net(lambda: nn.Linear(3, 2)), (X[:n], CLASSES[:n]), config)
    assert not seen
    with pytest.raises(ValueError, match=r"curvature of at most 3.* this one has 8"):
        bootstrap(make_net(lambda: nn.Linear(3, 2)), X[:3], CLASSES[:3])
    monkeypatch.setattr(_curvature, "MAX_EIGEN_SIZE", 4)
    monkeypatch.setattr(_head, "MAX_FULL_SIZE", 0)
    InfluenceBootstrap().fit(make_net(lambda: nn.Linear(3, 2)), (X, CLASSES), config)
    assert len(seen) == 1


def test_as_many_blocks_as_are_spare_are_accepted() -> None:
    for num_blocks, n in ((SPARE_BLOCKS, 8), (SPARE_BLOCKS + 5, SPARE_BLOCKS + 5), (SPARE_BLOCKS + 5, None)):
        _head.check_num_blocks(num_blocks, n, 10)
    with pytest.raises(ValueError, match="got num_blocks="):
        _head.check_num_blocks(SPARE_BLOCKS + 1, 8, 10)


def test_memory_of_the_blocks_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their gradients by all parameters of the head, in double precision, and work space."""
    monkeypatch.setattr(_validation, "_UNCHECKED_BYTES", 0)
    monkeypatch.setattr(_validation, "available_memory", lambda: 1_000_000)
    net = make_net(lambda: nn.Linear(3, 2))
    bootstrap(net, X, CLASSES, num_blocks=1000)
    with pytest.raises(ValueError, match=r"got num_blocks=.* memory"):
        bootstrap(net, X, CLASSES, num_blocks=9000)


def test_named_head_is_that_of_a_loaded_predictor(tmp_path: Path) -> None:
    def make() -> nn.Module:
        layers = {"first": nn.Linear(3, 4), "score": nn.Linear(4, 2), "unused": nn.Linear(4, 2)}
        return make_net(lambda: Composed(lambda net, x: net.score(torch.tanh(net.first(x))), **layers))

    predictor = bootstrap(make(), X, CLASSES, head="score")
    save(predictor, tmp_path / "model")
    assert torch.equal(
        load(tmp_path / "model", model=make()).predict(NEW, 3).samples, predictor.predict(NEW, 3).samples
    )


def test_configuration_of_the_head_is_checked() -> None:
    net = make_net(lambda: nn.Linear(3, 2))
    predictor = bootstrap(net, X, CLASSES, refit=True)
    config = predictor.config()
    assert config["form"] == "head"
    assert InfluencePredictor.from_config(config, copy.deepcopy(net)).config() == config
    for changed, match in (
        ({"head": 3}, r"\bpredictor.*head"),
        ({"num_blocks": "40"}, r"\bpredictor.*num_blocks"),
        ({"refit": {**config["refit"], "penalty": "x"}}, r"\brefit.*penalty"),
    ):
        with pytest.raises(ValueError, match=match):
            InfluencePredictor.from_config({**config, **changed}, copy.deepcopy(net))


def test_refit_rejects_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    net = make_net(lambda: nn.Linear(3, 2))
    with pytest.raises(ValueError, match="got refit="):
        bootstrap(make_net(Upsampling), randn(3, 2, 8, 8), randn(3, 2, 8, 8, seed=1), loss=GaussianNLL(), refit=True)
    with pytest.raises(ValueError, match="moments"):
        bootstrap(net, X, CLASSES, refit=True).moments(NEW)
    own_loss = bootstrap(net, X, randn(40, 2), loss=lambda z, y: (z - y).square(), refit=True)
    with pytest.raises(ValueError, match="loss"):
        save(own_loss, tmp_path / "model")
    features = 40 * (3 + 1 + 1 + 1) * 8  # of all rows, with targets, weights and blocks
    for limit, value in (("_MAX_STORED_BYTES", features), ("_MAX_SYSTEM_SIZE", 8)):
        monkeypatch.setattr(_head, limit, value)
        bootstrap(net, X, CLASSES, refit=True)
        monkeypatch.setattr(_head, limit, value - 1)
        with pytest.raises(ValueError, match="got refit="):
            bootstrap(net, X, CLASSES, refit=True)
        monkeypatch.undo()
    monkeypatch.setattr(_head, "_MAX_STEPS", 0)
    with pytest.raises(ValueError, match="0 steps"):
        bootstrap(net, X, CLASSES, refit=True).heads(0, 1, seed=0)


def test_replicates_move_as_refitted_ones_do() -> None:
    """Both have the same weights: a sign or another order of the weights would leave no correlation."""
    net, data = make_net(lambda: MLP(3, 1, widths=(8,))), (X, randn(len(X), 1, seed=8))
    methods = [InfluenceBootstrap(nn.MSELoss(), refit=refit, residuals="raw") for refit in (False, True)]
    first, refitted = (method.from_trained(net, data) for method in methods)
    moved = [predictor.predict(X, 20).samples - net(X).detach() for predictor in (first, refitted)]
    assert float(torch.corrcoef(torch.stack([part.flatten() for part in moved]))[0, 1]) > 0.9


@pytest.mark.parametrize("layers", [1, "all"])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("ridge", [3.0, 30.0])
def test_ridge_of_a_ridge_regression_is_found(ridge: float, outputs: int, layers: Any) -> None:
    """The net fits as closely as ridge regression does: that has the same λ."""
    y = (X[:, :outputs] + 0.5 * randn(40, outputs, seed=1)).numpy()
    theta = np.linalg.solve(PHI.T @ PHI + ridge * np.eye(4), PHI.T @ y).T
    method = InfluenceBootstrap(nn.MSELoss(), layers=layers)
    predictor = method.make_predictor(linear(theta), TensorDataset(X, torch.from_numpy(y)), CONFIG)
    assert predictor.ridge == pytest.approx(ridge / 40, rel=1e-6)
    eigenvalues = np.linalg.eigvalsh(PHI.T @ PHI)
    df = outputs * (eigenvalues / (eigenvalues + ridge)).sum()
    assert predictor.degrees_of_freedom == pytest.approx(df, rel=1e-6)


@pytest.mark.parametrize(
    ("layers", "n", "num_blocks"),
    [(1, 40, None), ("all", 40, None), (1, 40, 8), ("all", 40, 8), (1, 40, 40), ("all", 40, 40), (1, 300, None)],
)
def test_replicates_are_linear_in_the_weights_of_the_rows(layers: Any, n: int, num_blocks: int | None) -> None:
    """θ̂ + (ΦᵀΦ + λ)⁻¹ Φᵀ((w − 1) ⊙ u), also where rows share a block, or have one each in another order."""
    x, y, net = randn(n, 3), randn(n, 1, seed=1), make_net(lambda: nn.Linear(3, 1))
    method = InfluenceBootstrap(nn.MSELoss(), layers=layers, ridge=0.1, residuals="raw", num_blocks=num_blocks)
    predictor = method.from_trained(net, TensorDataset(x, y), seed=3)
    weights = method.row_weights(predictor, (x, y), 4, seed=5, fit_seed=3)
    assert weights is not None
    assert weights.shape == (4, n)
    phi, u = with_ones(x), (y - net(x)).detach().numpy()[:, 0]
    moved = np.linalg.solve(phi.T @ phi + 0.1 * n * np.eye(4), phi.T @ ((weights.numpy() - 1) * u).T)  # (D̃, B)
    expected = net(NEW).detach().numpy()[:, 0] + (NEW_PHI @ moved).T
    found = predictor.predict(NEW, 4, seed=5).samples[..., 0]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-7)


def test_row_weights_need_all_rows_in_the_kernel() -> None:
    net, y = least_squares(1)
    method = InfluenceBootstrap(nn.MSELoss(), layers="all", max_kernel_rows=39)
    with pytest.raises(ValueError, match="got data='40 rows'; expected the 39 rows of the kernel"):
        method.row_weights(method.from_trained(net, TensorDataset(X, y)), (X, y), 2)


@pytest.mark.parametrize("layers", [1, "all"])
def test_loss_without_curvature_is_rejected(layers: Any) -> None:
    method = InfluenceBootstrap(lambda z, y: (z - y).abs()[:, 0], layers=layers)
    with pytest.raises(ValueError, match=r"got loss=.* positive second derivative"):
        method.from_trained(linear(THETA[None]), TensorDataset(X, randn(40, 1)))
