"""Tests of the influence bootstrap of several layers."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _influence import make_mlp
from _nets import Composed, MixedInputs, noise
from _reference import standard_errors
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import TensorDataset

from neuboots import Deterministic, InfluenceBootstrap, TrainingConfig, _validation, load, save
from neuboots._validation import ArgumentError
from neuboots.losses import GaussianNLL
from neuboots.methods._least_squares import NoiseLevel, leverage_corrected
from neuboots.methods.influence import InfluencePredictor, TangentPredictor, _head, _tangent
from neuboots.methods.influence._tangent import Jacobian, build_tangent_predictors
from neuboots.methods.neuboots import draw_replicate_weights
from neuboots.nets import MLP
from neuboots.training import resolve_fit
from neuboots.weights import Dirichlet, Exponential, assign_blocks

WHOLE = InfluenceBootstrap(nn.MSELoss(), layers="all")


def make_data(n: int, outputs: int = 1) -> tuple[Tensor, Tensor]:
    return noise(n, 3, dtype=torch.float64), noise(n, outputs, seed=1, dtype=torch.float64)


def build(method: InfluenceBootstrap, net: nn.Module, x: Any, y: Tensor, **options: Any) -> TangentPredictor:
    predictor = method.from_trained(net, TensorDataset(x, y), **options)
    assert isinstance(predictor, TangentPredictor)
    return predictor


def test_blocks_are_sums_of_rows() -> None:
    net, x = nn.Linear(3, 1).double(), make_data(5)[0]
    data = make_data(40)
    rows, blocks = (
        build(method, net, *data, seed=4).deviations(x)[1] for method in (WHOLE, replace(WHOLE, num_blocks=8))
    )
    expected = torch.zeros(5, 1, 8, dtype=torch.float64)
    expected.index_add_(2, assign_blocks(40, 8, seed=4), rows)
    torch.testing.assert_close(blocks, expected)


@pytest.mark.parametrize("residuals", ["raw", "hc2", "hc3", "smooth"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_deviations_match_dense_matrices(outputs: int, residuals: Any) -> None:
    """From a random subset of the rows, written out with the Jacobian of the net."""
    torch.manual_seed(0)
    net, (x, y), new = MLP(3, outputs, widths=(5,)).double().eval(), make_data(40, outputs), make_data(4)[0]
    method = replace(WHOLE, ridge=0.05, residuals=residuals, max_kernel_rows=31 * outputs - outputs // 2)
    predictor = build(method, net, x, y)
    m, fraction = (31, 31 / 40) if outputs == 1 else (30, 30 / 40)
    used = predictor.tangent.get_buffer("input_0")
    index = (x[:, None] == used).all(2).nonzero()
    assert index[:, 1].tolist() == list(range(m))  # in order
    J = exact_rows(net, used)
    u = (y[index[:, 0]] - net(used)).detach()
    inverted = torch.linalg.inv(J @ J.T + 0.05 * m * torch.eye(m * outputs))
    H = J @ J.T @ inverted
    corrected = u.clone()
    if residuals in ("hc2", "hc3"):
        blocks = torch.stack([H.view(m, outputs, m, outputs)[i, :, i] for i in range(m)]) * fraction
        corrected = leverage_corrected(blocks, u, power=1.0 if residuals == "hc3" else 0.5)
    if residuals == "smooth":  # each output by its own block of the kernel
        left = torch.eye(m * outputs) - H
        factors = (1 + fraction * ((left @ left).diagonal() - 1)).view(m, outputs)
        for c in range(outputs):
            values, vectors = torch.linalg.eigh(J[c::outputs] @ J[c::outputs].T)
            level = NoiseLevel(values.clamp_min(0))
            psi = vectors * values.clamp_min(0).sqrt()
            level.add(psi, u[:, c], factors[:, c])
            corrected[:, c] = level.correct(psi, u[:, c])
    along = (exact_rows(net, new) @ J.T @ inverted).view(4, outputs, m, outputs)
    expected = fraction**0.5 * (along * corrected).sum(-1)
    mean, found = predictor.deviations(new)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(mean, net(new).detach())
    assert predictor.num_rows == m
    assert predictor.ridge == pytest.approx(0.05)
    assert predictor.degrees_of_freedom == pytest.approx(float(H.trace()))


def test_replicates_and_moments_are_linear_in_the_weights() -> None:
    net, new = MLP(3, 2, widths=(5,)).double(), make_data(4)[0]
    predictor = build(replace(WHOLE, num_blocks=6, weight_distribution=Dirichlet(2.0)), net, *make_data(20, 2))
    mean, moved = predictor.deviations(new)
    alphas = draw_replicate_weights(Dirichlet(2.0), 6, 0, 5, 3)
    prediction = predictor.predict(new, 5, seed=3)
    expected = mean + torch.einsum("ncs,bs->bnc", moved, alphas.double() - 1.0)
    torch.testing.assert_close(prediction.samples, expected)
    v, c = Dirichlet(2.0).covariance(6)
    covariance = torch.full((6, 6), c).fill_diagonal_(v).double()
    torch.testing.assert_close(prediction.std.square(), torch.einsum("ncs,st,nct->nc", moved, covariance, moved))
    torch.testing.assert_close(prediction.mean, mean)
    assert predictor.config()["form"] == "tangent"  # of files


def test_factors_of_rows_are_repetitions() -> None:
    """The same eigenvalues, ridge and influence, of two outputs and with a ridge of its own."""
    torch.manual_seed(0)
    net, (x, y), new = MLP(3, 2, widths=(5,)).double(), make_data(20, 2), make_data(4)[0]
    y, factors = net(x).detach() + 0.2 * y, 1 + torch.arange(20) % 3
    repeated = torch.repeat_interleave(torch.arange(20), factors)
    method, weighted = replace(WHOLE, residuals="raw"), torch.cat([y, factors[:, None]], 1)
    (found,) = build_tangent_predictors([method], net, resolve_fit(net, (x, weighted)), weighted=True)
    many = build(method, net, x[repeated], y[repeated])
    assert 20 * found.ridge == pytest.approx(len(repeated) * many.ridge, rel=1e-6)
    assert found.degrees_of_freedom == pytest.approx(many.degrees_of_freedom, rel=1e-6)
    assert 1.1 < found.degrees_of_freedom < 19.9  # of 40 targets
    expected = torch.zeros(4, 2, 20, dtype=torch.float64).index_add_(2, repeated, many.deviations(new)[1])
    torch.testing.assert_close(found.deviations(new)[1], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("residuals", ["raw", "smooth"])
def test_factors_of_rows_are_those_of_their_losses(residuals: Any) -> None:
    """Factor 4 of a row: twice the kernel and twice the residual; the noise level is that of the targets."""
    net, (x, y), new = nn.Linear(3, 1).double(), make_data(20), make_data(4)[0]
    factors = 1.0 + (torch.arange(20.0, dtype=torch.float64) % 3)[:, None]
    method = replace(WHOLE, ridge=0.1, residuals=residuals)
    inputs = resolve_fit(net, TensorDataset(x, torch.cat([y, factors], 1)))
    (predictor,) = build_tangent_predictors([method], net, inputs, weighted=True)
    u = (y - net(x)).detach()
    root, J = factors.sqrt(), exact_rows(net, x)
    psi = root * J
    inverted = torch.linalg.inv(psi.T @ psi + 2.0 * torch.eye(4))
    if residuals == "smooth":
        values, vectors = torch.linalg.eigh(psi @ psi.T)
        coordinates, left = vectors * values.clamp_min(0).sqrt(), torch.eye(20) - psi @ inverted @ psi.T
        level = NoiseLevel(values.clamp_min(0))
        level.add(coordinates, u[:, 0], (left @ left).diagonal())
        u = level.correct(coordinates, u[:, 0])[:, None]
    expected = exact_rows(net, new) @ inverted @ (factors * J * u).T
    torch.testing.assert_close(predictor.deviations(new)[1][:, 0], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("loss", "outputs"), [(nn.MSELoss(), 2), (nn.CrossEntropyLoss(), 3)])
@pytest.mark.filterwarnings("ignore:the net fits")
def test_net_that_reproduces_its_targets_has_half_of_the_degrees_of_freedom(loss: Any, outputs: int) -> None:
    """Probabilities of classes have one less for each row."""
    torch.manual_seed(0)
    net, x = MLP(3, outputs, widths=(40,)).double().eval(), make_data(20)[0]
    z = net(x).detach()
    predictor = build(InfluenceBootstrap(loss, layers="all"), net, x, z.softmax(1) if outputs == 3 else z)
    assert predictor.degrees_of_freedom == pytest.approx(0.5 * 20 * 2)


@pytest.mark.parametrize(("n", "shift"), [(20, 0.0), (200, 0.0), (200, 1000.0)])
def test_basis_has_the_rank_of_the_weights(n: int, shift: float) -> None:
    """Eigenvalues of the n × n kernel that are rounding are left out, also beside a very large one."""
    x, y = make_data(n)
    predictor = build(replace(WHOLE, ridge=0.1), nn.Linear(3, 1).double(), x + shift, y)
    assert predictor.tangent.basis.shape == (n, 4)


def test_weights_without_effect_have_no_band() -> None:
    net, x = Composed(no_grad_at_all, first=nn.Conv1d(1, 2, 4), head=nn.Linear(2, 2)), noise(12, 4)
    predictor = build(WHOLE, net, x, noise(12, 2, seed=1))
    assert predictor.tangent.basis.shape == (24, 0)
    assert not bool(predictor.predict(x, 3).std.any())


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
    assert float(right / left) > 1.3
    assert float(middle / left) > 1.8


def test_deviations_that_are_not_stored_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many inputs the deviations N × C × S are not kept; samples and moments are the same."""
    x, net = noise(40, 4), make_mlp(nn.Tanh, 3)
    predictor = WHOLE.from_trained(net, TensorDataset(x, x[:, :3]))
    whole = predictor.predict(x, 7)
    assert isinstance(predictor, TangentPredictor)
    predictor.tangent.jacobian()  # of the training inputs, which is kept
    calls: list[int] = []
    predictor.net.register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(_tangent, "_CHUNK_ELEMENTS", 40 * 3**2 * 9)  # nine inputs at a time
    for most, size, passes in ((40 * 3 * 40, 3, 0), (40 * 3 * 40 - 1, 40, 1), (2 * 40 * 3 * 2, 1, 4), (10, 3, 3)):
        monkeypatch.setattr(_tangent, "_MAX_STORED_ELEMENTS", most)
        calls.clear()
        stream = predictor.stream(x, 7, seed=0)
        assert len(calls) == 5  # for the moments
        chunks = [*stream.chunks(size)]
        assert [len(chunk) for chunk in chunks] == [len(part) for part in torch.arange(7).split(size)]
        assert len(calls) == 5 + 5 * passes  # as many replicates in a pass as memory allows
        torch.testing.assert_close(torch.cat(chunks), whole.samples)
        assert stream.moments is not None
        torch.testing.assert_close(stream.moments.std, whole.std)


def test_inputs_by_name(tmp_path: Path) -> None:
    data: Any = [({"a": noise(4, seed=i), "kind": torch.tensor(i % 5)}, i % 2) for i in range(10)]
    predictor = InfluenceBootstrap(layers="all").from_trained(MixedInputs(), data)
    x = {"a": noise(4, 4), "kind": torch.arange(4)}
    samples = predictor.predict(x, 5).samples
    assert samples.shape == (5, 4, 2)
    save(predictor, tmp_path / "saved")
    assert torch.equal(load(tmp_path / "saved", model=MixedInputs()).predict(x, 5).samples, samples)
    assert torch.equal(pickle.loads(pickle.dumps(predictor)).predict(x, 5).samples, samples)
    config = predictor.config()
    for name in ("layers", "outputs", "inputs", "tensors"):
        with pytest.raises(ValueError, match=rf"\bpredictor.*{name}"):
            InfluencePredictor.from_config({**config, name: [0.5]}, predictor.net)  # type: ignore[attr-defined]


def test_cached_rows_are_not_pickled() -> None:
    predictor = build(WHOLE, MLP(3, 1, widths=(5,)).double(), *make_data(20))
    size, x = len(pickle.dumps(predictor)), make_data(4)[0]
    expected = predictor.deviations(x)[1]
    packed = pickle.dumps(predictor)
    assert len(packed) == size
    assert torch.equal(pickle.loads(packed).deviations(x)[1], expected)


def test_inputs_are_converted_to_the_precision_of_the_net() -> None:
    """Deviations have that precision, too."""
    x, y = make_data(20)
    predictor = build(WHOLE, MLP(3, 1, widths=(5,)), x.float(), y.float())
    found, expected = (predictor.predict(each, 3) for each in (x, x.float()))
    assert torch.equal(found.samples, expected.samples)
    assert torch.equal(found.std, expected.std)
    assert [part.dtype for part in predictor.deviations(x.float())] == [torch.float32] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_replicates_have_the_precision_of_the_net(dtype: torch.dtype, tmp_path: Path) -> None:
    """Statistics of normalization layers are those of the net that is passed to `load`."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    x, y = (part.to(dtype) for part in make_data(20))
    predictor = build(WHOLE, net, x, y)
    found = predictor.predict(x, 3)
    save(predictor, tmp_path / "model")
    again = load(tmp_path / "model", model=copy.deepcopy(net)).predict(x, 3)
    assert {part.dtype for part in (found.samples, found.std, again.samples, again.std)} == {dtype}
    assert torch.equal(again.samples, found.samples)
    assert torch.equal(again.std, found.std)


def test_predictions_follow_the_weights_of_the_net() -> None:
    net, (x, y) = MLP(3, 1, widths=(5,)).double(), make_data(20)
    predictor = build(WHOLE, net, x, y)
    assert predictor.tangent.jacobian()[1] is predictor.tangent.jacobian()[1]
    for tensor in (*predictor.net.parameters(), predictor.tangent.get_buffer("input_0")):
        with torch.no_grad():
            tensor += 0.5
        rows = predictor.tangent.jacobian()[1]
        torch.testing.assert_close(rows.z, predictor.net(predictor.tangent.get_buffer("input_0")).detach())


def test_progress_bar_counts_the_rows_that_are_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tuple[Any, ...]] = []

    @contextmanager
    def progress_bar(title: str, total: int, *, enabled: bool) -> Iterator[Any]:
        steps: list[str] = []
        bars.append((title, total, enabled, steps))
        yield steps.append

    monkeypatch.setattr(_tangent, "progress_bar", progress_bar)
    x, y = noise(12, 4), torch.arange(12) % 2
    for net, progress in ((explicit_net(), True), (explicit_net(), False), (make_mlp(nn.Tanh), True)):
        inputs = resolve_fit(net, TensorDataset(x, y), TrainingConfig(epochs=1, progress=progress))
        build_tangent_predictors([InfluenceBootstrap(layers="all")], net, inputs)
    expected = [("Jacobian", 12, True, 12), ("Jacobian", 12, False, 12), ("Jacobian", 0, False, 0)]
    assert [(title, total, enabled, len(steps)) for title, total, enabled, steps in bars] == expected
    assert all(step == title for title, _, _, steps in bars for step in steps)


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


# -- the Jacobian -------------------------------------------------------------------------------------


def layers_of_every_kind(net: Any, x: Tensor) -> Tensor:
    h = net.norm(net.conv(x[:, None])).tanh()
    h = net.twice(net.twice(h).tanh()).transpose(1, 2)
    h = net.attention(h, h, h, need_weights=False)[0] * net.scale
    return net.head(net.hidden(h.flatten(1)).tanh())


@pytest.fixture
def odd() -> nn.Module:
    torch.manual_seed(3)
    net = Composed(
        layers_of_every_kind,
        conv=nn.Conv1d(1, 4, 3, padding=1),
        norm=nn.BatchNorm1d(4),
        twice=nn.Linear(6, 6),
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        scale=nn.Parameter(torch.ones(4)),
        hidden=nn.Linear(24, 5, bias=False),
        head=nn.Linear(5, 2),
    )
    net(noise(20, 6))  # sets its running statistics
    return net.eval()


def in_place_sums(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    k = net.second(h)
    k += h
    k.mul_(2.0)
    return net.head(torch.tanh(k))


def tied_autoencoder(net: Any, x: Tensor) -> Tensor:
    """Uses a weight a second time, without calling its layer."""
    return net.head(nn.functional.linear(torch.tanh(net.first(x)), net.first.weight.T))


def small_autoencoder(net: Any, x: Tensor) -> Tensor:
    return 1e-4 * tied_autoencoder(net, x)


def layer_twice(net: Any, x: Tensor) -> Tensor:
    return 0.01 * net.head(torch.tanh(net.second(torch.tanh(net.second(net.first(x))))))


def layer_again(net: Any, x: Tensor) -> Tensor:
    """Calls a layer a second time, which matters for some inputs only."""
    h = torch.tanh(net.first(x))
    return (x[:, :1] > 0.9) * net.head(h.square()) + net.head(h)


def weight_again(net: Any, x: Tensor) -> Tensor:
    h = torch.tanh(net.first(x))
    return net.head(torch.tanh((x[:, :1] > 0.9) * net.second(h.square()) + net.third(h)))


def bias_twice(net: Any, x: Tensor) -> Tensor:
    """And one of a layer that is never called."""
    return net.head(torch.tanh(net.first(x) + net.first.bias + net.second.bias))


def two_tokens(net: Any, x: Tensor) -> Tensor:
    """A Linear that sees two tokens, however many inputs there are."""
    return net.head(x @ net.first(net.tokens).T)


def no_grad_inside(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.first(x).relu()
    return net.head(h)


def dropped(net: Any, x: Tensor) -> Tensor:
    """Calls a layer in vain."""
    net.second(net.first(x))
    return net.head(net.first(x).tanh())


def no_grad_convolution(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.first(x[:, None]).flatten(1)
    return net.head(torch.cat([h, net.scale * net.second(x[:, None]).flatten(1)], 1))


def no_grad_at_all(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net.head(net.first(x[:, None]).flatten(1))


def two_layers(function: Callable[[Any, Tensor], Tensor], width: int = 8) -> nn.Module:
    return Composed(function, first=nn.Linear(4, 8), second=nn.Linear(8, 8), head=nn.Linear(width, 1))


def shared_weight() -> nn.Module:
    layers = {name: nn.Linear(8, 8) for name in ("second", "third", "head")}
    layers["second"].weight = layers["third"].weight
    return Composed(weight_again, first=nn.Linear(4, 8), **layers)


def pruned() -> nn.Module:
    net = make_mlp(nn.ReLU)
    prune.random_unstructured(net[2], "weight", amount=0.5)
    return net


def normed(norm: Any, factor: float = 1.0) -> nn.Module:
    net = make_mlp(nn.Tanh)
    norm(net[2])
    with torch.no_grad():
        next(net[2].parametrizations.weight.parameters()).mul_(factor)  # type: ignore[union-attr,operator]
    return net


def explicit_net() -> nn.Module:
    """A net of 10 weights outside of Linear layers and 2 outputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(2, 2)).eval()


NETS: dict[str, Callable[[], nn.Module]] = {
    "in-place ReLU": lambda: make_mlp(lambda: nn.ReLU(inplace=True)),
    "in-place ELU": lambda: make_mlp(lambda: nn.ELU(inplace=True)),
    "in-place sums": lambda: two_layers(in_place_sums),
    "tied weights": lambda: two_layers(tied_autoencoder, 4),
    "tied weights of a small output": lambda: two_layers(small_autoencoder, 4),
    "a layer used twice": lambda: two_layers(layer_twice),
    "a layer used again": lambda: two_layers(layer_again),
    "a weight used again": shared_weight,
    "a bias used twice": lambda: two_layers(bias_twice),
    "two tokens": lambda: Composed(
        two_tokens, tokens=nn.Parameter(noise(2, 3)), first=nn.Linear(3, 4), head=nn.Linear(2, 1)
    ),
    "no_grad inside": lambda: Composed(no_grad_inside, first=nn.Linear(4, 8), head=nn.Linear(8, 1)),
    "pruned": pruned,
    "spectral norm": lambda: normed(parametrizations.spectral_norm),
    "weight norm": lambda: normed(parametrizations.weight_norm, 2.0),
    "a layer by itself": lambda: nn.Linear(4, 2),
    "a layer called in vain": lambda: two_layers(dropped),
    "convolution": explicit_net,
    "convolution alone": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 4), nn.Flatten()),
    "convolution under no_grad": lambda: Composed(
        no_grad_convolution,
        first=nn.Conv1d(1, 2, 4),
        second=nn.Conv1d(1, 2, 4),
        scale=nn.Parameter(torch.tensor(2.0)),
        head=nn.Linear(4, 2),
    ),
    "all under no_grad": lambda: Composed(no_grad_at_all, first=nn.Conv1d(1, 2, 4), head=nn.Linear(2, 2)),
}
FACTORED = {"in-place ReLU", "in-place ELU", "in-place sums", "no_grad inside", "a layer by itself"}


def exact_rows(net: nn.Module, x: Tensor, names: list[str] | None = None) -> Tensor:
    """J by differentiation, one output of one input at a time: (N·C, P)."""
    weights = [p for name, p in net.named_parameters() if names is None or name in names]
    rows = []
    for i in range(len(x)):
        for output in net(x[i : i + 1]).reshape(-1):
            output.requires_grad_()  # also under no_grad
            slopes = torch.autograd.grad(output, weights, retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([slope.flatten() for slope in slopes]))
    return torch.stack(rows).double()


def check(jacobian: Jacobian, net: nn.Module, x: Tensor, names: list[str] | None = None) -> None:
    """K = J Jᵀ, and J θ̂."""
    J, rows = exact_rows(net, x, names), jacobian.rows(x)
    theta = torch.cat([p.detach().flatten() for name, p in net.named_parameters() if names is None or name in names])
    torch.testing.assert_close(jacobian.kernel(rows, rows), J @ J.T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(jacobian.along(rows).flatten(), J @ theta.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_kernel_matches_differentiation(name: str) -> None:
    net, x, state = NETS[name]().eval(), noise(6, 4), torch.get_rng_state()
    jacobian = Jacobian(net, "all", x[:2])
    assert torch.equal(torch.get_rng_state(), state)
    assert (jacobian.count_passes(6, 1) == 0) == (name in FACTORED)
    check(jacobian, net, x)
    expected, frozen = (
        jacobian.kernel(jacobian.rows(x), jacobian.rows(x)),
        Jacobian(net.requires_grad_(False), "all", x),
    )
    torch.testing.assert_close(frozen.kernel(frozen.rows(x), frozen.rows(x)), expected)


@pytest.mark.parametrize(
    "name", ["a layer by itself", "in-place ReLU", "all under no_grad", *(name for name in NETS if "conv" in name)]
)
@pytest.mark.parametrize("outputs", [None, 1])
def test_products_with_directions_of_the_weights(name: str, outputs: int | None) -> None:
    """J (Jᵀ c), in double precision or not, and the squares of the parts of J."""
    net, x = NETS[name]().eval(), noise(6, 4)
    count = outputs or net(x).shape[1]
    jacobian = Jacobian(net, "all", x[:2], outputs=outputs)
    rows, J = jacobian.rows(x), exact_rows(net, x).view(6, net(x).shape[1], -1)[:, :count].flatten(0, 1)
    units = torch.eye(6 * count).view(6, count, -1)
    pulled = jacobian.pull(rows, units.double())
    torch.testing.assert_close(
        sum(part.double().square().sum() for part in pulled), J.square().sum(), rtol=1e-4, atol=0
    )
    found = jacobian.push(rows, [part.double() for part in pulled])
    torch.testing.assert_close(found.flatten(0, 1).double(), J @ J.T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(jacobian.kernel(rows, rows), J @ J.T, rtol=1e-4, atol=1e-5)
    expected = [part.square().sum(1).view(6, count, -1) for part in pulled[: len(rows.factors)]]
    squares = jacobian.squares(rows)
    torch.testing.assert_close(squares, torch.cat([torch.zeros(6, count, 0), *expected], 2))


def test_attention_and_squeezed_rows_have_products(odd: nn.Module) -> None:
    for net, x in ((odd, noise(4, 6)), (squeezing_net(), noise(4, 4))):
        jacobian = Jacobian(net.eval(), "all", x[:2])
        rows = jacobian.rows(x)
        found = jacobian.push(rows, jacobian.pull(rows, torch.eye(8).view(4, 2, 8)))
        torch.testing.assert_close(found.flatten(0, 1).double(), jacobian.kernel(rows, rows), rtol=1e-4, atol=1e-5)


def test_half_precision_needs_no_explicit_rows() -> None:
    """Rounding is larger, as it is in several nets."""
    for seed in range(8):
        torch.manual_seed(seed)
        net, x = make_mlp(nn.Tanh).bfloat16(), noise(6, 4, seed=seed).bfloat16()
        assert Jacobian(net, "all", x).count_passes(6, 2) == 0


@pytest.mark.parametrize("layers", ["all", 1, 2, 3])
def test_kernel_of_last_layers_matches_differentiation(layers: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 6, bias=False), nn.Tanh(), nn.Linear(6, 2)).eval()
    x, other = noise(5, 3), noise(4, 3, seed=1)
    names = {"all": None, 1: ["4.weight", "4.bias"], 2: ["2.weight", "4.weight", "4.bias"], 3: None}[layers]
    jacobian = Jacobian(net, layers, x[:2])
    check(jacobian, net, x, names)
    expected = exact_rows(net, x, names) @ exact_rows(net, other, names).T
    torch.testing.assert_close(jacobian.kernel(jacobian.rows(x), jacobian.rows(other)), expected, rtol=1e-5, atol=1e-5)


def test_layers_of_every_type(odd: nn.Module) -> None:
    x = noise(4, 6)
    check(Jacobian(odd, "all", x[:2]), odd, x)
    names = [n for n, _ in odd.named_parameters() if n.split(".")[0] in ("hidden", "head", "attention")]
    inner = [n for n, _ in odd.named_parameters() if n != "scale"]
    check(Jacobian(odd, 6, x[:2]), odd, x, inner)
    check(Jacobian(odd, 3, x[:2]), odd, x, names)  # attention with its uncalled projection, but not the net's own scale


def test_layers_count_from_their_last_use() -> None:
    def again(net: Any, x: Tensor) -> Tensor:
        return net.head(net.first(net.second(net.first(x).tanh()).tanh()))

    net, x = Composed(again, first=nn.Linear(4, 4), second=nn.Linear(4, 4), head=nn.Linear(4, 1)), noise(6, 4)
    check(Jacobian(net, 2, x[:2]), net, x, ["first.weight", "first.bias", "head.weight", "head.bias"])


def test_weights_that_a_module_holds_beside_its_layers_count_from_their_last_use() -> None:
    def scaled(part: Any, x: Tensor) -> Tensor:
        return part.inner(x).tanh() * part.scale

    def again(net: Any, x: Tensor) -> Tensor:
        return net.head(net.part(net.first(net.part(x)).tanh()))

    part = Composed(scaled, inner=nn.Linear(4, 4), scale=nn.Parameter(torch.full((4,), 2.0)))
    net, x = Composed(again, part=part, first=nn.Linear(4, 4), head=nn.Linear(4, 1)), noise(6, 4)
    names = ["part.inner.weight", "part.inner.bias", "part.scale", "head.weight", "head.bias"]
    check(Jacobian(net, 3, x[:2]), net, x, names)


def test_groups_of_layers_are_no_layers() -> None:
    """Nor are the parts that compute the weights of a layer."""
    x = noise(6, 4)
    nested = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 1))
    for net in (nested, normed(parametrizations.weight_norm), normed(parametrizations.spectral_norm)):
        check(Jacobian(net.eval(), 3, x[:2]), net, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_explicit_rows_are_multiplied_in_double_precision(dtype: torch.dtype) -> None:
    left, right = noise(5, 2, 30).to(dtype) + 100, noise(4, 30, seed=1).to(dtype)
    torch.testing.assert_close(
        _tangent._multiply(left, right), left.double() @ right.double().T, rtol=1e-13, atol=1e-13
    )


def test_computed_weights_belong_to_the_layer_that_uses_them() -> None:
    x, net = noise(6, 4), normed(parametrizations.weight_norm, 2.0)
    jacobian = Jacobian(net, 2, x[:2])
    J = exact_rows(net[2:], net[:2](x).detach())  # type: ignore[index]
    rows = jacobian.rows(x)
    torch.testing.assert_close(jacobian.kernel(rows, rows), J @ J.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 12])
def test_explicit_rows_that_are_not_held_are_computed_again(tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row once and, if not all of them are held, again for the rows before; which the cost and the bar count."""
    net, x, other = explicit_net(), noise(12, 4), noise(5, 4, seed=1)
    monkeypatch.setattr(_tangent, "_MAX_TILE_ELEMENTS", 12 // tiles * 2 * 10 + 1)
    monkeypatch.setattr(_tangent, "_COLUMNS", 3)
    jacobian, seen = Jacobian(net, "all", x[:2]), list[int]()
    rows = jacobian.rows(x, batch_rows=3)
    jacobian.on_row = partial(seen.append, 1)
    J, theta = exact_rows(net, x), torch.cat([p.detach().flatten() for p in net.parameters()]).double()
    torch.testing.assert_close(jacobian.kernel(rows, rows), J @ J.T, rtol=1e-4, atol=1e-5)
    assert len(seen) == jacobian.count_passes(12, 2) == 12 * (tiles + 1) / 2
    torch.testing.assert_close(jacobian.along(rows).flatten(), J @ theta, rtol=1e-4, atol=1e-5)
    found = jacobian.kernel(rows, jacobian.rows(other))
    torch.testing.assert_close(found, J @ exact_rows(net, other).T, rtol=1e-4, atol=1e-5)


def test_stored_rows_are_differentiated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training rows of a predictor, at the first prediction only."""
    seen = []
    pull = Jacobian._pull_explicit

    def counted(jacobian: Jacobian, x: Tensor, *options: Any) -> list[Tensor]:
        seen.extend([x] if len(x) == 1 else [])
        return pull(jacobian, x, *options)

    monkeypatch.setattr(Jacobian, "_pull_explicit", counted)
    predictor = InfluenceBootstrap(layers="all").from_trained(
        explicit_net(), TensorDataset(noise(12, 4), torch.arange(12) % 2)
    )
    assert len(seen) == 12
    for expected in (12 + 12 + 3, 12 + 12 + 3 + 3):
        predictor.summarize(noise(3, 4))
        assert len(seen) == expected


def test_many_backward_passes_give_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for held, passes in ((12, 24), (6, 36), (5, 2 * (12 + 7 + 2)), (1, 12 * 13)):
        monkeypatch.setattr(_tangent, "_MAX_TILE_ELEMENTS", held * 2 * 10)
        monkeypatch.setattr(_tangent, "_MANY_PASSES", passes)
        jacobian = Jacobian(explicit_net(), "all", noise(2, 4))
        jacobian.check_cost("all", 12, 2)
        monkeypatch.setattr(_tangent, "_MANY_PASSES", passes - 1)
        with pytest.warns(UserWarning, match=f"10 weights .* about {passes} backward passes for 12 rows of 2 outputs"):
            jacobian.check_cost("all", 12, 2)
    monkeypatch.setattr(_tangent, "_MAX_PASSES", 156)
    with pytest.warns(UserWarning, match="about 156"):
        jacobian.check_cost("all", 12, 2)
    monkeypatch.setattr(_tangent, "_MAX_PASSES", 155)
    with pytest.raises(ArgumentError, match="at most 155 backward passes; .* about 156") as raised:
        jacobian.check_cost("all", 12, 2)
    assert raised.value.name == "layers"


@pytest.mark.parametrize(("most", "rows"), [(11, 5), (4, 2), (30, 12)])
def test_cost_is_that_of_the_rows_that_are_used(most: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tangent, "_MANY_PASSES", 3)
    data = TensorDataset(noise(12, 4), torch.arange(12) % 2)
    with pytest.warns(UserWarning, match=f"for {rows} rows of 2 outputs"):
        InfluenceBootstrap(layers="all", max_kernel_rows=most).from_trained(explicit_net(), data)


def test_memory_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_validation, "_UNCHECKED_BYTES", 0)
    monkeypatch.setattr(_validation, "available_memory", lambda: 20_000)
    data, method = TensorDataset(noise(12, 4), torch.arange(12) % 2), InfluenceBootstrap(layers="all")
    for options, name in (({}, "max_kernel_rows"), ({"max_kernel_rows": 10, "num_blocks": 100}, "num_blocks")):
        with pytest.raises(ArgumentError, match="memory") as raised:
            replace(method, **options).from_trained(explicit_net(), data)  # type: ignore[arg-type]
        assert raised.value.name == name
    replace(method, max_kernel_rows=10).from_trained(explicit_net(), data)
    monkeypatch.setattr(_validation, "available_memory", lambda: 10_000)
    jacobian = Jacobian(Composed(lambda net, x: x * net.scale, scale=nn.Parameter(torch.ones(60))), "all", noise(2, 60))
    with pytest.raises(ArgumentError, match="memory") as raised:  # even for a single row
        jacobian.check_cost("all", 1, 60)
    assert raised.value.name == "layers"


def test_number_of_blocks_is_that_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of those that the kernel has."""
    monkeypatch.setattr(_head, "SPARE_BLOCKS", 5)
    method, (x, y) = replace(WHOLE, max_kernel_rows=4, num_blocks=12), make_data(12)
    assert build(method, nn.Linear(3, 1).double(), x, y).num_blocks == 12
    with pytest.raises(ArgumentError, match="got num_blocks="):
        build(replace(method, num_blocks=13), nn.Linear(3, 1).double(), x, y)


def squeezed_before(net: Any, x: Tensor) -> Tensor:
    """Squeezes before a layer that needs the axis of rows."""
    pooled = torch.tanh(net.first(x[:, None])).mean(2, keepdim=True)
    return net.head(net.norm(pooled.squeeze())).log_softmax(dim=1)


def squeezing_net() -> nn.Module:
    return Composed(squeezed_before, first=nn.Conv1d(1, 3, 2), norm=nn.BatchNorm1d(3), head=nn.Linear(3, 2))


def squeezed_without_error(net: Any, x: Tensor) -> Tensor:
    return net.head(torch.tanh(net.first(x)).squeeze())


@pytest.mark.parametrize(
    "make",
    [squeezing_net, lambda: Composed(squeezed_without_error, first=nn.Linear(4, 3), head=nn.Linear(3, 2))],
)
def test_rows_pass_in_pairs_where_the_net_squeezes(make: Callable[[], nn.Module]) -> None:
    x, net = noise(20, 4), make()
    predictor = InfluenceBootstrap(layers="all").from_trained(net, TensorDataset(x, torch.arange(20) % 2))
    torch.testing.assert_close(predictor.predict(x[:1], 3).samples, predictor.predict(x, 3).samples[:, :1])
    jacobian = Jacobian(net, "all", x[:2])

    def outputs(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net.eval(), weights, (x,))

    parts = torch.func.jacrev(outputs)(dict(net.named_parameters())).values()
    J = torch.cat([part.flatten(2) for part in parts], 2).flatten(0, 1)
    kernel = jacobian.kernel(jacobian.rows(x), jacobian.rows(x))
    torch.testing.assert_close(kernel, (J @ J.T).double(), rtol=1e-4, atol=1e-5)


def gated(net: Any, x: Tensor) -> Tensor:
    """Uses a weight a second time, for some rows alone."""
    again = nn.functional.linear(x, net.first.weight) * (x[:, :1] > 0)
    return net.head(torch.tanh(net.first(x)) + again)


def test_layers_are_verified_on_rows_from_the_whole_data_set() -> None:
    """The gate is closed for the first rows."""
    torch.manual_seed(0)
    x = noise(40, 4)
    x = x[x[:, 0].argsort()]
    net = Composed(gated, first=nn.Linear(4, 4), head=nn.Linear(4, 1))
    data = TensorDataset(x, noise(40, 1, seed=1))
    predictor: Any = InfluenceBootstrap(nn.MSELoss(), layers="all", ridge=0.1).from_trained(net, data)
    jacobian = Jacobian(net, "all", x)
    assert "first.weight" in jacobian._explicit
    assert predictor.tangent.jacobian()[0]._explicit == jacobian._explicit


def test_std_has_the_covariance_of_the_weights() -> None:
    """With three blocks the covariance of Dirichlet weights is half of their variance."""
    x, B = noise(30, 2), 4000
    net = MLP(2, 1, widths=(8,))  # not trained: the gradients of the blocks do not cancel
    predictor = replace(WHOLE, num_blocks=3).from_trained(net, TensorDataset(x, x.sum(1, keepdim=True) + 1))
    prediction = predictor.predict(x[:4], B)
    rtol = standard_errors(4) / (2 * B) ** 0.5
    torch.testing.assert_close(prediction.std, prediction.samples.std(0), rtol=rtol, atol=0)
