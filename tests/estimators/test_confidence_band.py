"""Confidence band of the regressor, compared with least squares and the exact influence bootstrap."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _nets import Composed
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots._validation import ArgumentError
from neuboots.estimators import NeuBootsRegressor, _ConfidenceBand, _fit_confidence_band
from neuboots.losses import GaussianNLL
from neuboots.methods import Deterministic, InfluenceBootstrap
from neuboots.methods.influence._tangent import build_tangent_predictors
from neuboots.nets import MLP
from neuboots.serialization import Artifact, ArtifactError
from neuboots.training import TrainingConfig, resolve_fit

QUICK: dict[str, Any] = {"epochs": 20, "random_state": 0, "widths": (30, 30)}
RECIPE = TrainingConfig(epochs=1, batch_size=1024, progress=False)


def waves(n: int, seed: int = 0, features: int = 2) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, features))
    return X, np.sin(2 * X[:, 0]) + X[:, -1] + (0.1 + 0.3 * np.abs(X[:, 0])) * rng.normal(size=n)


def width(low_and_high: Any) -> Any:
    return low_and_high[1] - low_and_high[0]


def same(one: Any, other: Any, X: Any) -> bool:
    """Have two regressors one confidence band?"""
    return np.array_equal(one.predict_interval(X, 0.9, "confidence"), other.predict_interval(X, 0.9, "confidence"))


def trained(x: Tensor, y: Tensor, widths: tuple[int, ...] = (20, 20), steps: int = 300) -> nn.Module:
    torch.manual_seed(0)
    net = MLP(x.shape[1], y.shape[1], widths=widths).double()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return net.eval()


def exact_std(net: nn.Module, x: Tensor, y: Tensor, new: Tensor) -> Tensor:
    """√(s² + δ²) by the influence bootstrap itself; δ is what all weights together move where residuals stay raw."""
    made = [
        InfluenceBootstrap(loss=nn.MSELoss(), layers="all", residuals=residuals).from_trained(net, TensorDataset(x, y))
        for residuals in ("smooth", "raw")
    ]
    std: Tensor = made[0].summarize(new, 1).std
    step: Tensor = made[1].deviations(new)[1].sum(-1)  # type: ignore[attr-defined]
    return (std.square() + step.square()).sqrt()


def line(n: int) -> tuple[Tensor, Tensor, nn.Linear, Any]:
    """Rows of a plane with noise, the net of least squares, and the classical standard deviation of its mean."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 2))
    design = np.column_stack([X, np.ones(n)])
    y = X @ [1.0, -2.0] + 0.5 * rng.normal(size=n)
    theta = np.linalg.lstsq(design, y, rcond=None)[0]
    net = nn.Linear(2, 1).double()
    net.weight.data, net.bias.data = torch.tensor(theta[None, :2]), torch.tensor(theta[2:])
    covariance = np.linalg.inv(design.T @ design) * ((y - design @ theta) ** 2).sum() / (n - 3)
    return (
        torch.from_numpy(X),
        torch.from_numpy(y[:, None]),
        net,
        np.sqrt(np.einsum("ni,ij,nj->n", design, covariance, design)),
    )


def test_linear_model_has_classical_band() -> None:
    """σ √(xᵀ(XᵀX)⁻¹x), where the noise is the same everywhere; three directions are all there are."""
    x, y, net, classical = line(400)
    band = _fit_confidence_band(net, nn.MSELoss(), x, y, x)
    assert band.error < 1e-3
    assert np.allclose(band.std(x)[:, 0].numpy(), classical, rtol=0.15)


def test_newton_step_is_part_of_the_band() -> None:
    """A plane that lies 0.3 too high everywhere: the band reaches the right one."""
    x, y, net, classical = line(400)
    net.bias.data += 0.3
    found = _fit_confidence_band(net, nn.MSELoss(), x, y, x).std(x)[:, 0].numpy()
    assert np.allclose(found, np.sqrt(classical**2 + 0.3**2), rtol=0.2)  # the ridge holds the step back a little


def test_row_subset_keeps_the_newton_step_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minimum over all rows is none over some of them."""
    monkeypatch.setattr("neuboots.estimators.MAX_EXACT_ROWS", 200)
    x, y, net, classical = line(4000)
    found = _fit_confidence_band(net, nn.MSELoss(), x, y, x).std(x)[:, 0].numpy()
    assert np.allclose(found, classical, rtol=0.3)
    assert abs(np.mean(found / classical) - 1) < 0.15


@pytest.mark.filterwarnings("ignore:some inputs are outside")
def test_band_matches_influence_bootstrap_within_stated_error() -> None:
    X, y = waves(500)
    x, target = torch.from_numpy(X), torch.from_numpy(y[:, None])
    net = trained(x, target)
    band = _fit_confidence_band(net, nn.MSELoss(), x, target, x + 0.01)
    new = torch.from_numpy(waves(300, seed=5)[0])
    ratio = (band.std(new) / exact_std(net, x, target, new))[:, 0]
    found = float((ratio - 1).square().mean().sqrt())
    assert found < 1.5 * band.error + 1e-4
    assert band.error < 0.05
    far = (band.std(3 * new) / exact_std(net, x, target, 3 * new))[:, 0]
    assert 0.7 < float(far.min()) <= float(far.max()) < 1.4


def test_replicates_have_bands_standard_deviation() -> None:
    X, y = waves(300)
    regressor = NeuBootsRegressor(**QUICK).fit(X, y)
    low, high = regressor.predict_interval(X[:50], 0.95, "confidence")
    drawn = regressor.sample(X[:50], 500)
    assert np.allclose(drawn.std(0, ddof=1), (high - low) / (2 * 1.959964), rtol=5 / np.sqrt(2 * 500))
    assert np.allclose(drawn.mean(0), regressor.predict(X[:50]), atol=float(5 * np.max(high - low) / 4 / np.sqrt(500)))
    assert np.allclose(drawn[:7], regressor.sample(X[:50], 7))  # a replicate is the same whatever their number
    assert np.allclose(drawn[:, :3], regressor.sample(X[:3], 500), rtol=1e-9)  # and whatever the rows
    for n in (0, 2.5):
        with pytest.raises(ArgumentError):
            regressor.sample(X, n)  # type: ignore[arg-type]
    for noise in (False, True):
        assert regressor.sample(X[:3], np.int64(2), observation_noise=noise).shape == (2, 3)


def test_band_option_changes_the_band_only() -> None:
    X, y = waves(300)
    ours, own = (NeuBootsRegressor(**QUICK, band=band).fit(X, y) for band in ("influence", "method"))
    one, other = ours.forecast(X, level=0.8), own.forecast(X, level=0.8)
    for name in ("mean", "std", "low", "high"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert np.array_equal(ours.sample(X, 3, observation_noise=True), own.sample(X, 3, observation_noise=True))
    assert own.band_ is None
    assert not np.allclose(one.confidence_low, other.confidence_low)
    assert np.allclose((one.confidence_low + one.confidence_high) / 2, one.mean)
    assert np.array_equal(one.confidence_high, ours.predict_interval(X, 0.8, "confidence")[1])
    summary = own.predictor_.summarize(own.inputs(X), 1)
    half = 1.2815515655 * summary.std[:, 0].numpy() * own.y_scale_[0]
    assert np.allclose(other.confidence_high - other.mean, half)


@pytest.mark.slow
def test_band_narrows_with_rows_and_widens_outside() -> None:
    """As 1/√n, where the fits are alike."""
    rng = np.random.default_rng(0)

    def fitted(n: int) -> NeuBootsRegressor:
        X = np.where(rng.random((n, 1)) < 0.5, rng.uniform(-3, -1, (n, 1)), rng.uniform(1, 3, (n, 1)))
        y = np.sin(X[:, 0]) + 0.3 * rng.normal(size=n)
        return NeuBootsRegressor("deterministic", epochs=60, random_state=0, widths=(50, 50)).fit(X, y)

    inside, outside = np.linspace(1.3, 2.7, 15)[:, None], np.array([[0.0], [9.0]])
    few, many = fitted(200), fitted(1800)
    narrow, wide = (float(np.mean(width(each.predict_interval(inside, 0.95, "confidence")))) for each in (many, few))
    assert 0.2 < narrow / wide < 0.6
    gap, far = width(many.predict_interval(outside, 0.95, "confidence"))
    assert gap > 1.1 * narrow
    assert far > 3 * narrow


def test_weights_that_multiply_loss_by_hand() -> None:
    """Var θ = (Σ wx²)⁻² Σ w²x²σ² for a line through the origin: not that of frequencies, Σ wx²σ² in the middle."""
    rng = np.random.default_rng(0)
    X, w = rng.normal(size=(1500, 1)), rng.choice([0.1, 1.9], 1500)
    y = 2 * X[:, 0] + rng.normal(size=1500)
    net = nn.Linear(1, 1, bias=False).double()
    slope = float((w * X[:, 0] * y).sum() / (w * X[:, 0] ** 2).sum())
    nn.init.constant_(net.weight, slope)
    targets = torch.from_numpy(np.column_stack([y, w]))
    x = torch.from_numpy(X)
    method = InfluenceBootstrap(loss=nn.MSELoss(), layers="all", ridge=0.0)
    exact = build_tangent_predictors([method], net, resolve_fit(net, (x, targets), RECIPE), weighted=True)[0]
    one = torch.ones(1, 1, dtype=torch.float64)
    found = float(exact.summarize(one, 1).std)
    expected = np.sqrt((w**2 * X[:, 0] ** 2).sum()) / (w * X[:, 0] ** 2).sum()  # σ = 1
    assert found == pytest.approx(expected, rel=0.06)
    assert float(_fit_confidence_band(net, nn.MSELoss(), x, targets, x, weighted=True).std(one)) == pytest.approx(
        found, 0.02
    )


@pytest.mark.parametrize(
    ("method", "ours"),
    [
        ("laplace", True),
        ("deterministic", True),
        ("deep-ensemble", False),
        ("mc-dropout", False),
        ("batch-ensemble", False),
    ],
)
def test_band_of_single_net_methods_and_of_others(method: str, ours: bool) -> None:
    X, y = waves(80)
    regressor = NeuBootsRegressor(method, **QUICK).fit(X, y)
    assert (regressor.band_ is not None) == ours
    own = NeuBootsRegressor(method, **QUICK, band="method").fit(X, y)
    assert same(regressor, own, X) == (not ours)


def test_custom_loss_uses_band_of_method() -> None:
    X, y = waves(80)
    assert (
        NeuBootsRegressor(Deterministic(loss=nn.MSELoss(reduction="none")), **QUICK).fit(X, y[:, None]).band_
        is not None
    )
    assert NeuBootsRegressor(Deterministic(loss=nn.L1Loss(reduction="none")), **QUICK).fit(X, y[:, None]).band_ is None


def make_with_norm(inputs: int, outputs: int) -> nn.Module:
    """Layers of which J has no short form: a norm, a layer used twice, and a scale of its own."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.norm(net.first(x)).tanh()
        return net.head(net.scale * (h + net.twice(net.twice(h).tanh())))

    layers = {"first": nn.Linear(inputs, 8), "norm": nn.LayerNorm(8), "twice": nn.Linear(8, 8, bias=False)}
    return Composed(forward, **layers, scale=nn.Parameter(torch.ones(8)), head=nn.Linear(8, outputs))


@pytest.mark.parametrize(
    "make", [make_with_norm, lambda i, o: nn.Sequential(nn.Linear(i, 9), nn.Tanh(), nn.Linear(9, o))]
)
def test_custom_nets_have_a_band(make: Any, tmp_path: Path) -> None:
    X, y = waves(100)
    regressor = NeuBootsRegressor(net=make, epochs=20, random_state=0).fit(X, y)
    low, high = regressor.predict_interval(X, 0.9, "confidence")
    assert regressor.band_ is not None
    assert (low < high).all()
    regressor.save(tmp_path / "model")
    again = NeuBootsRegressor.load(tmp_path / "model", net=make).predict_interval(X, 0.9, "confidence")
    assert np.array_equal(again, (low, high))


@pytest.mark.parametrize("n", [4, 25])
def test_few_rows(n: int) -> None:
    X, y = waves(n)
    low, high = NeuBootsRegressor(epochs=3, random_state=0).fit(X, y).predict_interval(X, 0.9, "confidence")
    assert np.isfinite([low, high]).all()
    assert (low <= high).all()


def test_constant_target_and_inputs_far_off() -> None:
    X, y = waves(60)
    still = NeuBootsRegressor(epochs=3, random_state=0).fit(X, np.full(60, 7.0))
    assert np.allclose(still.predict_interval(X, 0.9, "confidence"), 7.0)
    regressor = NeuBootsRegressor(epochs=3, random_state=0).fit(X, y)
    near, far = (float(width(regressor.predict_interval(s * X[:1], 0.9, "confidence"))[0]) for s in (1.0, 1e30))
    assert np.isfinite(far)
    assert far > 1e20 * near
    assert np.isfinite(regressor.sample(1e30 * X[:1], 2)).all()


def make_still(inputs: int, outputs: int) -> nn.Module:
    """A net that starts at zero, and has a scale besides that no Linear layer holds."""
    head = nn.Linear(inputs, outputs)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return Composed(lambda net, x: net.head(net.scale * x), head=head, scale=nn.Parameter(torch.tensor(1.0)))


def test_net_that_reproduces_every_row_has_no_band(tmp_path: Path) -> None:
    """Nothing moves it; it was a crash."""
    X, _ = waves(40)
    regressor = NeuBootsRegressor(net=make_still, epochs=2, random_state=0).fit(X, np.full(40, 3.0))
    assert regressor.band_ is not None
    assert (np.array(regressor.predict_interval(X, 0.9, "confidence")) == 3.0).all()
    assert (regressor.sample(X, 3) == 3.0).all()
    regressor.save(tmp_path / "model")
    assert same(NeuBootsRegressor.load(tmp_path / "model", net=make_still), regressor, X)


def test_saved_band_is_small_and_has_no_training_rows(tmp_path: Path) -> None:
    X, y = waves(300, features=4)
    regressor = NeuBootsRegressor(**QUICK).fit(X, y)
    regressor.save(tmp_path / "model")
    weights = sum(p.numel() for p in regressor.predictor_.module.parameters())
    assert sum(file.stat().st_size for file in (tmp_path / "model").iterdir()) < 4 * 132 * weights + 20_000
    band = regressor.band_
    assert isinstance(band, _ConfidenceBand)
    assert all(len(X) * 0.8 not in part.shape for part in band.directions)
    expected = regressor.forecast(X[:20])
    for other in (NeuBootsRegressor.load(tmp_path / "model"), pickle.loads(pickle.dumps(regressor))):
        assert np.array_equal(other.forecast(X[:20]).confidence_low, expected.confidence_low)
        assert np.array_equal(other.sample(X[:20], 3), regressor.sample(X[:20], 3))
        assert other.band_ is not None
        assert other.band_.error == band.error


def test_load_rejects_band_of_another_net(tmp_path: Path) -> None:
    X, y = waves(80)
    one, other = (
        NeuBootsRegressor(epochs=2, random_state=0, widths=widths).fit(X, y).to_artifact()
        for widths in ((8, 8), (9, 9))
    )
    mixed = {name: (other if name.startswith("band.") else one)[1][name] for name in one[1]}
    for tensors in (mixed, {name: tensor for name, tensor in one[1].items() if not name.startswith("band.")}):
        with pytest.raises(ArtifactError):
            NeuBootsRegressor.from_artifact(Artifact(tmp_path, one[0], tensors))


def test_gaussian_head_has_band_of_its_means_alone() -> None:
    X, y = waves(200)
    x, target = torch.from_numpy(X), torch.from_numpy(y[:, None])
    net = trained(x, torch.cat([target, torch.full_like(target, -2.0)], 1))
    band = _fit_confidence_band(net, GaussianNLL(beta=0.5), x, target, x + 0.01)
    assert band.outputs == 1
    assert band.std(x).shape == (200, 1)
