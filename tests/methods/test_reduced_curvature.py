"""Fewer points than features: curvature in the span of the points, against the form over all features."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import InfluenceBootstrap, Laplace, TrainingConfig, load, save
from neuboots._validation import ArgumentError
from neuboots.losses import GaussianNLL
from neuboots.methods import _curvature
from neuboots.prediction import Predictor

RNG = torch.Generator().manual_seed(0)
ROWS, WIDTH = 14, 30
X = torch.randn(ROWS, 5, generator=RNG, dtype=torch.float64)
NEW = torch.randn(6, 5, generator=RNG, dtype=torch.float64)
TARGETS: dict[str, tuple[nn.Module, Tensor, int]] = {
    "softmax": (nn.CrossEntropyLoss(), torch.arange(ROWS) % 3, 3),
    "bernoulli": (nn.BCEWithLogitsLoss(), (torch.arange(ROWS) % 2)[:, None].double(), 1),
    "squared": (nn.MSELoss(), X[:, :2].sin() + 0.1 * torch.randn(ROWS, 2, generator=RNG), 2),
    "gaussian": (GaussianNLL(), X[:, :1].cos(), 2),
}


def make_net(outputs: int, *, width: int = WIDTH, inputs: int = 5) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs)).double()


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["kron", "full"])
def structure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(_curvature, "MAX_FULL_SIZE", 1 if request.param else 3000)
    monkeypatch.setattr("neuboots.methods.influence._head.MAX_FULL_SIZE", 1 if request.param else 3000)
    monkeypatch.setattr("neuboots.methods.laplace.MAX_FULL_SIZE", 1 if request.param else 3000)
    return "kron" if request.param else "full"


def fit_both(method: Any, net: nn.Module, data: TensorDataset, monkeypatch: pytest.MonkeyPatch) -> list[Predictor]:
    """The predictors in the span of the points, and over all features."""
    predictors = []
    for width in (1, 10**9):
        monkeypatch.setattr(_curvature, "_MIN_REDUCED_WIDTH", width)
        predictors.append(method.from_trained(net, data))
    return predictors


def check_equal(predictors: list[Predictor], x: Tensor) -> None:
    (mine, mine_std), (exact, exact_std) = (
        (p.samples, p.std) for p in (predictor.predict(x, 7) for predictor in predictors)
    )
    torch.testing.assert_close(mine, exact, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(mine_std, exact_std, rtol=1e-6, atol=1e-7)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"ridge": 0.0, "residuals": "hc3"}, marks=SLOW),
        pytest.param({"ridge": 0.1, "residuals": "smooth"}, marks=SLOW),
    ],
    ids=str,
)
def test_influence_in_the_span_of_few_points(
    name: str, options: dict[str, Any], structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, y, outputs = TARGETS[name]
    method = InfluenceBootstrap(loss, **options)
    predictors: Any = fit_both(method, make_net(outputs), TensorDataset(X, y), monkeypatch)
    assert predictors[0].ridge == pytest.approx(predictors[1].ridge, rel=1e-6)
    assert predictors[0].degrees_of_freedom == pytest.approx(predictors[1].degrees_of_freedom, rel=1e-6)
    check_equal(predictors, NEW)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("tau", [None, pytest.param(0.3, marks=SLOW)])
def test_laplace_in_the_span_of_few_points(
    name: str, tau: float | None, structure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    loss, y, outputs = TARGETS[name]
    predictors: Any = fit_both(Laplace(loss, tau), make_net(outputs), TensorDataset(X, y), monkeypatch)
    assert predictors[0].config()["rank"] == ROWS
    assert predictors[1].config()["rank"] is None
    assert predictors[0].config()["structure"] == structure
    assert predictors[0].prior_precision == pytest.approx(predictors[1].prior_precision, rel=1e-6)
    assert predictors[0].log_evidence() == pytest.approx(predictors[1].log_evidence(), rel=1e-6)
    check_equal(predictors, NEW)
    save(predictors[0], tmp_path)
    loaded = load(tmp_path, model=make_net(outputs))
    assert torch.equal(loaded.predict(NEW, 5).samples, predictors[0].predict(NEW, 5).samples)


@pytest.mark.parametrize("method", [InfluenceBootstrap(nn.CrossEntropyLoss()), Laplace(nn.CrossEntropyLoss())])
def test_pixels_count_as_points(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three images have fewer rows than the head has features, but more points."""
    net = nn.Sequential(nn.Conv2d(1, 8, 1), nn.Tanh(), nn.Conv2d(8, 2, 1)).double()
    x = torch.randn(3, 1, 4, 4, generator=RNG, dtype=torch.float64)
    predictors = fit_both(method, net, TensorDataset(x, (x[:, 0] > 0).long()), monkeypatch)
    assert all(
        torch.equal(mine, exact) for mine, exact in zip(*(p.state_dict().values() for p in predictors), strict=True)
    )
    check_equal(predictors, x)


@pytest.mark.parametrize(
    "method",
    [InfluenceBootstrap(nn.CrossEntropyLoss()), InfluenceBootstrap(nn.MSELoss()), Laplace(nn.CrossEntropyLoss())],
    ids=["softmax", "squared", "laplace"],
)
def test_wide_features_of_few_rows_need_no_large_matrix(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: sizes.append(len(matrix)) or eigh(matrix))
    net, n = nn.Sequential(nn.Linear(4, 8192), nn.ReLU(), nn.Linear(8192, 2)), 64
    x = torch.randn(n, 4, generator=RNG)
    y: Tensor = x[:, :2] if isinstance(method.loss, nn.MSELoss) else torch.arange(n) % 2
    predictor = method.from_trained(net, TensorDataset(x, y))
    assert bool((predictor.summarize(x[:3], 5).std > 0).all())
    assert max(sizes) <= 2 * n


@pytest.mark.parametrize("method", [InfluenceBootstrap(nn.CrossEntropyLoss()), Laplace(nn.CrossEntropyLoss())])
def test_curvature_that_cannot_be_decomposed_is_refused(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_curvature, "MAX_EIGEN_SIZE", 40)
    data = TensorDataset(torch.cat([X, X, X]), torch.arange(3 * ROWS) % 2)
    with pytest.raises(ArgumentError, match="62") as raised:  # 2 × 31 parameters
        method.from_trained(make_net(2), data)
    assert raised.value.name == "head"
    monkeypatch.setattr(_curvature, "MAX_EIGEN_SIZE", 100)
    monkeypatch.setattr(_curvature, "_SLOW_EIGEN_SIZE", 40)
    with pytest.warns(UserWarning, match="62"):
        method.from_trained(make_net(2), data)


@pytest.mark.parametrize("method", [InfluenceBootstrap(nn.MSELoss()), Laplace(nn.MSELoss(), structure="full")])
def test_curvature_is_refused_before_training(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_curvature, "MAX_EIGEN_SIZE", 20)
    monkeypatch.setattr(type(method), "_train_net", lambda *args: pytest.fail("it was trained"))
    x = torch.cat([X, X, X])
    with pytest.raises(ArgumentError) as raised:
        method.fit(make_net(1), TensorDataset(x, x[:, :1]), TrainingConfig(epochs=1, progress=False))
    assert raised.value.name == "head"


@pytest.mark.parametrize("layers", [1, "all"])
def test_more_blocks_than_rows_are_refused(layers: Any) -> None:
    data = TensorDataset(X, torch.arange(ROWS) % 2)
    for num_blocks in (10_001, 10**7):
        with pytest.raises(ArgumentError) as raised:
            InfluenceBootstrap(layers=layers, num_blocks=num_blocks).from_trained(make_net(2), data)
        assert raised.value.name == "num_blocks"
