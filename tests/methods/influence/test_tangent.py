"""Tests of the influence bootstrap of several layers."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _influence import make_mlp
from _nets import Composed, MixedInputs, noise
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import Deterministic, InfluenceBootstrap, TrainingConfig, load, save
from neuboots.losses import GaussianNLL
from neuboots.methods.influence import TangentPredictor, _tangent
from neuboots.methods.influence._tangent import build_tangent_predictors
from neuboots.nets import MLP
from neuboots.training import resolve_fit
from neuboots.weights import Exponential

WHOLE = InfluenceBootstrap(nn.MSELoss(), layers="all")


def test_blocks_are_sums_of_rows() -> None:
    net, x = nn.Linear(3, 1), noise(5, 3, seed=9)
    data = TensorDataset(noise(40, 3), noise(40, 1, seed=1))
    methods = (WHOLE, InfluenceBootstrap(nn.MSELoss(), layers="all", num_blocks=8))
    rows, blocks = (method.from_trained(net, data).deviations(x)[1] for method in methods)  # type: ignore[attr-defined]
    assert blocks.shape == (5, 1, 8)
    torch.testing.assert_close(blocks.sum(-1), rows.sum(-1))


# -- losses --------------------------------------------------------------------------------------------


def test_log_variance_of_a_gaussian_head_is_fixed() -> None:
    torch.manual_seed(1)
    x = noise(30, 2)
    method, data = InfluenceBootstrap(GaussianNLL(), layers="all"), TensorDataset(x, noise(30, 2, seed=4))
    moved = method.from_trained(MLP(2, 4, widths=(8,)), data).predict(x[:4], 6).samples.std(0) > 0
    assert moved.tolist() == [[True, True, False, False]] * 4


WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize("layers", [1, "all"])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none"),
        lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS, reduction="none"),
    ],
)
def test_class_weights_are_repetitions_of_rows(loss: Any, layers: Any) -> None:
    """Weights of classes are repetitions of rows: without a correction for leverage the sums are the same."""
    torch.manual_seed(0)
    net, x, y = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), noise(9, 2), torch.arange(9) % 3
    new, options = noise(5, 2, seed=1), {"layers": layers, "residuals": "raw"}
    repeated = torch.repeat_interleave(torch.arange(9), WEIGHTS.long()[y])
    weighted = InfluenceBootstrap(loss, ridge=0.2, **options).from_trained(net, TensorDataset(x, y))
    many = InfluenceBootstrap(nn.CrossEntropyLoss(), ridge=0.1, **options).from_trained(
        net, TensorDataset(x[repeated], y[repeated])
    )
    found, each = (influences(predictor, new) for predictor in (weighted, many))
    expected = torch.zeros_like(found).index_add_(-1, repeated, each)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def influences(predictor: Any, x: Tensor) -> Tensor:
    """By how much a unit of each block's weight moves the outputs: (N, C, S)."""
    if isinstance(predictor, TangentPredictor):
        return predictor.deviations(x)[1]
    with torch.no_grad():
        extended = torch.cat([predictor.net[:-1](x), torch.ones(len(x), 1)], 1)
    return torch.einsum("scd,nd->ncs", predictor.shifted.shifts, extended)


@pytest.mark.parametrize("layers", [1, "all"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: (z - y).square(),
        nn.HuberLoss(reduction="none"),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0]), reduction="none"),
    ],
)
def test_outputs_without_an_axis_are_not_broadcast(loss: Any, layers: Any) -> None:
    """A net that gives (N,), with targets (N,), is the same net that gives (N, 1), with targets (N, 1)."""
    x, y = noise(12, 2), (noise(12, seed=1) > 0).float()
    net = MLP(2, 1, widths=(4,))
    flat = nn.Sequential(net, nn.Flatten(0))
    method = InfluenceBootstrap(loss, layers=layers)
    expected = method.from_trained(net, TensorDataset(x, y[:, None])).predict(x, 3).samples
    torch.testing.assert_close(method.from_trained(flat, TensorDataset(x, y)).predict(x, 3).samples, expected)


@pytest.mark.parametrize("layers", [2, "all"])
@pytest.mark.parametrize("ridge", [None, 1e-6])
@pytest.mark.parametrize("shift", [0.0, 2000.0])
def test_single_precision_matches_double(shift: float, ridge: float | None, layers: Any) -> None:
    """Inputs far from zero (a year, say) make λ small beside the largest eigenvalue, whose rounding it divides."""
    torch.manual_seed(0)
    net = MLP(2, 1, widths=(16, 16)).eval()
    x, y = noise(60, 2) + shift, noise(60, 1, seed=1)
    single, double = (
        InfluenceBootstrap(nn.MSELoss(), layers=layers, ridge=ridge, residuals="raw")
        .from_trained(copy.deepcopy(net).to(dtype), TensorDataset(x.to(dtype), y.to(dtype)))
        .predict(x[:20].to(dtype), 2)
        .std.double()
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(single, double, rtol=0.1, atol=1e-6)  # features are rounded too


@pytest.mark.parametrize("residuals", ["raw", "hc3", "hc2"])
@pytest.mark.parametrize(
    ("loss", "outputs", "y"),
    [
        (nn.MSELoss(), 1, noise(25, 1, seed=1)),
        (nn.MSELoss(), 2, noise(25, 2, seed=1)),
        (nn.CrossEntropyLoss(), 3, torch.arange(25) % 3),
        (nn.BCEWithLogitsLoss(), 1, (noise(25, 1) > 0).float()),
    ],
)
def test_kernel_form_of_the_head_matches_the_primal_form(loss: Any, outputs: int, y: Tensor, residuals: Any) -> None:
    """Primal and kernel form of the last layer are one and the same, replicate by replicate."""
    torch.manual_seed(2)
    net = MLP(2, outputs, widths=(6,)).double().eval()
    x = noise(25, 2).double()
    data = TensorDataset(x, y.double() if y.is_floating_point() else y)
    method = InfluenceBootstrap(loss, ridge=0.02, residuals=residuals)
    primal = method.from_trained(net, data).predict(x[:5], 8).samples
    kernel = build_tangent_predictors([method], net, resolve_fit(net, data))[0].predict(x[:5], 8).samples
    torch.testing.assert_close(primal, kernel, rtol=1e-6, atol=1e-8)


def test_small_scale_output_keeps_its_noise_level() -> None:
    """Two nets in one, the first a thousand times as large: the second has the band that it has by itself."""
    x, small = noise(80, 4).double(), make_mlp(nn.Tanh, 1).double()
    large = make_mlp(nn.Tanh, 1).double()
    y = torch.cat([1000 * large(x), small(x)], 1).detach() + torch.tensor([300.0, 0.3]) * noise(80, 2, seed=1).double()
    method = InfluenceBootstrap(nn.MSELoss(), layers="all", ridge=0.05)

    def join(net: Any, x: Tensor) -> Tensor:
        return torch.cat([1000 * net.large(x), net.small(x)], 1)

    joined = Composed(join, large=large, small=small)
    both = method.from_trained(joined, TensorDataset(x, y)).summarize(x, 2).std[:, 1:]
    alone = method.from_trained(small, TensorDataset(x, y[:, 1:])).summarize(x, 2).std
    torch.testing.assert_close(both, alone, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("ridge", [0.05, None])
@pytest.mark.parametrize("layers", [1, 2, "all"])
def test_ignored_rows_do_not_count(layers: Any, ridge: float | None) -> None:
    """Marked as ignored, or excluded: the ridge is the same, and with independent weights so is the band."""
    x, y = noise(60, 3), torch.arange(60) % 3
    kept = torch.arange(60) % 2 == 0
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
    method = InfluenceBootstrap(nn.CrossEntropyLoss(), layers=layers, ridge=ridge, weight_distribution=Exponential())
    marked = method.from_trained(net, TensorDataset(x, torch.where(kept, y, -100)))
    excluded = method.from_trained(net, TensorDataset(x[kept], y[kept]))
    assert marked.ridge == pytest.approx(excluded.ridge, rel=1e-4)
    torch.testing.assert_close(marked.summarize(x, 2).std, excluded.summarize(x, 2).std, rtol=1e-3, atol=1e-5)


def test_integer_targets_are_continuous_by_their_loss() -> None:
    """The ridge goes by the loss: counts and ratings are no classes, whatever their type."""
    x, y = noise(40, 4), torch.arange(40)[:, None] % 5
    net = make_mlp(nn.Tanh, outputs=1)
    for loss in (nn.MSELoss(), nn.PoissonNLLLoss(reduction="none")):
        integer, real = (InfluenceBootstrap(loss).from_trained(net, TensorDataset(x, t)) for t in (y, y.float()))
        assert integer.ridge == real.ridge
        torch.testing.assert_close(integer.predict(x, 5).samples, real.predict(x, 5).samples)


# -- data ----------------------------------------------------------------------------------------------


def test_subset_of_rows_gives_the_same_band() -> None:
    """With an eighth of the rows, as with half of them, the band is the same, within what drawing them does to it."""
    x = noise(2000, 2)
    y = x[:, 0].sin() + 0.3 * noise(2000, seed=1)
    data = TensorDataset(x, y)
    config = TrainingConfig(epochs=4, batch_size=50, optimizer=partial(torch.optim.Adam, lr=1e-2), progress=False)
    net = Deterministic(nn.MSELoss()).fit(lambda: MLP(2, 1, widths=(16,)), data, config).net
    few, more = (
        replace(WHOLE, max_kernel_rows=rows).from_trained(net, data).summarize(x[:50], 2).std for rows in (250, 1000)
    )
    ratio = (few / more).log()
    assert abs(float(ratio.mean())) < 0.25
    assert float(ratio.std()) < 0.3


def test_band_is_wide_under_noise_and_far_from_data() -> None:
    """Wider where the noise is, and where no data are."""
    x = torch.cat([-1 - noise(100).abs(), 1 + noise(100, seed=1).abs()]).clamp(-2, 2)[:, None]
    y = x[:, 0].sin() + (0.05 + 0.4 * (x[:, 0] > 0)) * noise(200, seed=2)
    config = TrainingConfig(epochs=100, batch_size=50, optimizer=partial(torch.optim.Adam, lr=1e-2), progress=False)
    predictor = WHOLE.fit(lambda: MLP(1, 1, widths=(32, 32)), TensorDataset(x, y), config)
    left, right = (predictor.summarize(torch.linspace(a, b, 9)[:, None], 2).std.mean() for a, b in ((-2, -1), (1, 2)))
    middle = predictor.summarize(torch.linspace(-0.2, 0.2, 5)[:, None], 2).std.mean()
    assert float(right / left) > 2.0
    assert float(middle / left) > 2.0


def test_deviations_that_are_not_stored_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many inputs the deviations N × C × S are not kept; samples and moments are the same."""
    x, net = noise(40, 4), make_mlp(nn.Tanh)
    predictor = WHOLE.from_trained(net, TensorDataset(x, x[:, :2]))
    whole = predictor.predict(x, 7)
    monkeypatch.setattr(_tangent, "_MAX_STORED_ELEMENTS", 10)
    monkeypatch.setattr(_tangent, "_CHUNK_ELEMENTS", 40 * 4 * 9)  # nine inputs at a time
    again = predictor.predict(x, 7)
    torch.testing.assert_close(again.samples, whole.samples)
    stream = predictor.stream(x, 7, seed=0)
    assert [len(chunk) for chunk in stream.chunks(3)] == [3, 3, 1]
    monkeypatch.setattr(_tangent, "_MAX_STORED_ELEMENTS", 2 * 6 * 80)  # six replicates at a time
    assert [len(chunk) for chunk in predictor.stream(x, 13, seed=0).chunks(3)] == [3, 3, 3, 3, 1]
    torch.testing.assert_close(torch.cat([*stream.chunks(3)]), whole.samples)
    torch.testing.assert_close(again.std, whole.std)


def test_inputs_by_name(tmp_path: Path) -> None:
    data: Any = [({"a": noise(4, seed=i), "kind": torch.tensor(i % 5)}, i % 2) for i in range(10)]
    predictor = InfluenceBootstrap(layers="all").from_trained(MixedInputs(), data)
    x = {"a": noise(4, 4), "kind": torch.arange(4)}
    samples = predictor.predict(x, 5).samples
    assert samples.shape == (5, 4, 2)
    save(predictor, tmp_path / "saved")
    assert torch.equal(load(tmp_path / "saved", model=MixedInputs()).predict(x, 5).samples, samples)


@pytest.mark.parametrize("layers", [1, "all"])
def test_input_of_one_row_serves_all_rows(layers: Any) -> None:
    def placed(net: Any, place: Tensor, x: Tensor) -> Tensor:
        return net.head(torch.tanh(net.first(x) + place))

    torch.manual_seed(0)
    net = Composed(placed, first=nn.Linear(4, 8), head=nn.Linear(8, 2))
    x, place = noise(20, 4), noise(1, 8, seed=1)
    data = [((place[0], row), k % 2) for k, row in enumerate(x)]
    predictor = InfluenceBootstrap(layers=layers).from_trained(net, data)  # type: ignore[arg-type]
    once = predictor.predict((place, x[:5]), 3).samples
    torch.testing.assert_close(once, predictor.predict((place.expand(5, -1), x[:5]), 3).samples)
    torch.testing.assert_close(predictor.predict((place, x[:1]), 3).samples, once[:, :1])


# -- nets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [False, True])
def test_compiled_nets(part: bool) -> None:
    net, x = make_mlp(nn.Tanh, 1), noise(30, 4)
    data = TensorDataset(x, x[:, :1].sin())
    expected = WHOLE.from_trained(net, data).summarize(x, 2).std
    compiled = (
        nn.Sequential(torch.compile(net[:4], backend="eager"), net[4]) if part else torch.compile(net, backend="eager")
    )
    torch.testing.assert_close(WHOLE.from_trained(compiled, data).summarize(x, 2).std, expected)  # type: ignore[arg-type]


def test_inputs_are_not_changed_by_a_net_that_writes_into_them() -> None:
    x, net = noise(30, 4), Composed(lambda net, x: net.head(x.sub_(1.0)), head=nn.Linear(4, 1))
    predictor = WHOLE.from_trained(net, TensorDataset(x.clone(), x[:, :1]))
    first = predictor.predict(x.clone(), 5).samples
    assert torch.equal(predictor.predict(x.clone(), 5).samples, first)


class Stateful(nn.Linear):
    """With a state beside its tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_extra_state_that_is_not_a_tensor() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Stateful(4, 1)), noise(20, 4)
    predictor = WHOLE.from_trained(net, TensorDataset(x, x[:, :1]))
    assert bool((predictor.predict(x, 3).std > 0).all())


@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm1d(8)])
def test_net_and_data_from_inference_mode(norm: Callable[[], nn.Module]) -> None:
    """Their tensors cannot stand in a graph; copies of them can."""
    x, y = noise(20, 4), noise(20, 1, seed=1)

    def deviations() -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), norm(), nn.ReLU(), nn.Linear(8, 1))
        predictor = WHOLE.from_trained(net, TensorDataset(x.clone(), y.clone()))
        return predictor.predict(x[:5].clone(), 8).samples

    expected = deviations()
    with torch.inference_mode():
        torch.testing.assert_close(deviations(), expected)
