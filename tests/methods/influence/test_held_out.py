"""Tests of the errors at held-out rows: their covariances, their likelihood, and the replicates that follow."""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _nets import noise
from _reference import standard_errors
from torch import Tensor, nn
from torch.utils.data import Subset

from neuboots import InfluenceBootstrap, TrainingConfig, _validation, load, save
from neuboots._prng import derive_keys, draw_normal
from neuboots.losses import GaussianNLL
from neuboots.methods._base import count_net_bytes
from neuboots.methods.influence import TangentPredictor, _tangent
from neuboots.methods.influence._tangent import HeldOut, Jacobian, fit_error_variances
from neuboots.nets import MLP
from neuboots.training import EpochReport, FitInputs, initialize_model, resolve_fit
from neuboots.weights import Constant

pytestmark = pytest.mark.filterwarnings("ignore:errors at only", "ignore:some inputs are outside")
CONFIG = TrainingConfig(epochs=2, batch_size=20, progress=False)
WHOLE = InfluenceBootstrap(nn.MSELoss(), layers="all")


def make_data(n: int, outputs: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    return noise(n, 3, seed=seed, dtype=torch.float64), noise(n, outputs, seed=seed + 1, dtype=torch.float64)


def make_net(outputs: int = 1, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MLP(3, outputs, widths=(6,)).double().eval()


def convolutional(outputs: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, outputs)
        return nn.Sequential(*layers).double().eval()


def rows_of_jacobian(net: nn.Module, x: Tensor, outputs: int) -> Tensor:
    """J with one row for each output of each input: (N·C, P)."""
    rows = []
    for z in net(x)[:, :outputs].flatten():
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(z, list(net.parameters()), retain_graph=True)]))
    return torch.stack(rows)


@pytest.mark.parametrize("make", [make_net, convolutional])
@pytest.mark.parametrize(("loss", "outputs"), [(nn.MSELoss(), 1), (nn.MSELoss(), 2), (GaussianNLL(), 1)])
def test_error_covariance_matches_dense_matrices(loss: Any, outputs: int, make: Callable[..., nn.Module]) -> None:
    """Of the error of f̂ + aᵀ(y − f̂) with a = (K + λΣ)⁻¹k: τ²[k − 2aᵀk + aᵀKa] + s² aᵀΣa."""
    gaussian = isinstance(loss, GaussianNLL)
    net, (x, y), new = make(outputs * (1 + gaussian)), make_data(12, outputs), make_data(4, seed=5)[0]
    model = _tangent._LinearModel(replace(WHOLE, loss=loss, ridge=0.05), net, resolve_fit(net, (x, y), CONFIG), outputs)
    J, j = rows_of_jacobian(net, x, outputs), rows_of_jacobian(net, new, outputs)
    spread = net(x)[:, outputs:].detach().exp().flatten() if gaussian else torch.ones(len(J)).double()
    K, k = J @ J.T, J @ j.T
    a = torch.linalg.solve(K + 12 * 0.05 * torch.diag(spread), k)
    free, scatter = model.error_covariance(model.jacobian.rows(new))
    torch.testing.assert_close(free, j @ j.T - a.T @ k - k.T @ a + a.T @ K @ a, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(scatter, a.T @ torch.diag(spread) @ a, rtol=1e-6, atol=1e-8)


def test_error_covariance_of_a_subset_counts_each_row_several_times() -> None:
    net, (x, y), new = make_net(), make_data(24), make_data(4, seed=5)[0]
    some = replace(WHOLE, ridge=0.05, max_kernel_rows=8)
    model = _tangent._LinearModel(some, net, resolve_fit(net, (x, y), CONFIG), 1)
    used = x[model.index].repeat(3, 1)
    three = resolve_fit(net, (used, y[model.index].repeat(3, 1)), CONFIG)
    whole = _tangent._LinearModel(replace(some, max_kernel_rows=24), net, three, 1)
    for found, expected in zip(
        model.error_covariance(model.jacobian.rows(new)), whole.error_covariance(whole.jacobian.rows(new)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


def test_error_covariance_counts_rows_by_their_factors() -> None:
    net, (x, y), new = make_net(2), make_data(12, 2), make_data(4, seed=5)[0]
    factors = 1 + torch.arange(12) % 3
    repeated, method = torch.repeat_interleave(torch.arange(12), factors), replace(WHOLE, ridge=0.0)
    weighted, many = (
        resolve_fit(net, data, CONFIG)
        for data in ((x, torch.cat([y, factors[:, None]], 1)), (x[repeated], y[repeated]))
    )
    model = _tangent._LinearModel(replace(method, ridge=0.1), net, weighted, 2, weighted=True)
    whole = _tangent._LinearModel(replace(method, ridge=0.1 * 12 / len(repeated)), net, many, 2)
    for found, expected in zip(
        model.error_covariance(model.jacobian.rows(new)), whole.error_covariance(whole.jacobian.rows(new)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


# -- likelihood ----------------------------------------------------------------------------------------


def random_errors(n: int, prior: float, level: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """r ~ N(0, τ² C + s² N) of n rows."""
    x = noise(n, 2, seed=seed, dtype=torch.float64)
    free = (-torch.cdist(x, x).square()).exp()
    scatter = torch.diag(1.0 + x[:, 0].square()) + 0.1 * free @ free / n
    root = torch.linalg.cholesky(prior * free + level * scatter)
    return root @ noise(n, seed=seed + 100, dtype=torch.float64), free, scatter


@pytest.mark.parametrize("sizes", [(12, 8), (6,)])
@pytest.mark.parametrize(("prior", "level"), [(1.0, 0.2), (0.3, 1.0), (1e-2, 3.0)])
def test_variances_are_posterior_means(prior: float, level: float, sizes: tuple[int, ...]) -> None:
    """Against sums over a grid of the fraction f and of log s²."""
    errors = [random_errors(n, prior, level, seed) for seed, n in enumerate(sizes)]
    scale = float(torch.cat([torch.linalg.eigvals(torch.linalg.solve(N, C)).real for _, C, N in errors]).mean())
    f = (np.arange(400) + 0.5) / 400
    log_s2 = np.linspace(-12.0, 12.0, 1201)
    ratio = f / (1 - f) / scale
    logs = np.zeros((len(f), len(log_s2)))
    for i, rho in enumerate(ratio):
        for r, C, N in errors:
            shape = (N + rho * C).numpy()
            quadratic = float(r.numpy() @ np.linalg.solve(shape, r.numpy()))
            logs[i] -= 0.5 * (len(r) * log_s2 + np.linalg.slogdet(shape)[1] + quadratic * np.exp(-log_s2))
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    s2 = np.exp(log_s2)[None]
    expected = (weights * ratio[:, None] * s2).sum(), (weights * s2).sum()
    np.testing.assert_allclose(fit_error_variances(errors), expected, rtol=0.03)


def test_variances_of_many_rows_are_found() -> None:
    found = torch.tensor([fit_error_variances([random_errors(400, 0.5, 0.2, seed)]) for seed in range(10)])
    mean, error = found.mean(0), found.std(0) / 10**0.5
    assert bool(((mean - torch.tensor([0.5, 0.2])).abs() < standard_errors(2) * error).all())


def test_errors_of_zero_have_no_variance() -> None:
    _, free, scatter = random_errors(5, 1.0, 1.0, 0)
    assert fit_error_variances([(torch.zeros(5).double(), free, scatter)]) == (0.0, 0.0)


def test_prior_of_classes_maximizes_the_mean_probability() -> None:
    """Against sums over the draws, one row after the other."""
    z = 4 * noise(9, 3, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, -100])
    root = noise(9, 3, 3, seed=1, dtype=torch.float64)
    free, scatter = root @ root.mT, 0.1 * torch.eye(3).double().expand(9, 3, 3)
    normal = draw_normal(derive_keys(torch.arange(32), 0, "classes"), 3)
    normal = torch.cat([normal, -normal])
    totals = {}
    for ratio in [0.0, *torch.logspace(-3.0, 3.0, 25).tolist()]:
        total = 0.0
        for i in range(8):
            values, vectors = torch.linalg.eigh(ratio * free[i] + scatter[i])
            drawn = z[i] + normal @ (vectors * values.sqrt()).T
            total += float(drawn.softmax(1)[:, y[i]].mean().log())
        totals[ratio] = total
    assert _tangent._fit_class_prior(nn.CrossEntropyLoss(), [(z, y, free, scatter)]) == max(
        totals, key=totals.__getitem__
    )
    confident = [(10 * torch.eye(3).double()[y.clamp_min(0)], y, free, scatter)]
    assert _tangent._fit_class_prior(nn.CrossEntropyLoss(), confident) < 1e-2
    logits = [(z[:, :1], (y[:, None] > 0).double(), free[:, :1, :1], scatter[:, :1, :1])]
    assert _tangent._fit_class_prior(nn.BCEWithLogitsLoss(), logits) >= 0.0


# -- replicates ----------------------------------------------------------------------------------------


def predictor_of(net: nn.Module, outputs: int = 1) -> TangentPredictor:
    x = make_data(15, seed=7)[0]
    found = WHOLE.from_trained(net, make_data(20, outputs), val_data=(x, 3 * x[:, :outputs]))  # of another function
    assert isinstance(found, TangentPredictor)
    assert found.tangent.has_prior
    return found


@pytest.mark.parametrize("make", [make_net, convolutional])
@pytest.mark.parametrize("outputs", [1, 2])
def test_moments_are_those_of_dense_matrices(outputs: int, make: Callable[..., nn.Module]) -> None:
    net, new = make(outputs), make_data(5, seed=3)[0]
    predictor = predictor_of(net, outputs)
    J, j = rows_of_jacobian(net, make_data(20)[0], outputs), rows_of_jacobian(net, new, outputs)
    a = torch.linalg.solve(J @ J.T + 20 * predictor.ridge * torch.eye(len(J)), J @ j.T)
    left = j - a.T @ J  # of z: f(x) − aᵀ f(X)
    free = left.square().sum(1).view(5, outputs) * predictor.tangent.prior.square()
    moved = predictor.deviations(new)[1]
    v, c = predictor.weight_distribution.covariance(moved.shape[2])
    expected = ((v - c) * moved.square().sum(-1) + c * moved.sum(-1).square() + free).sqrt()
    torch.testing.assert_close(predictor.predict(new, 2).std, expected, rtol=1e-5, atol=1e-8)
    assert bool((free > 1e-3 * expected.square()).any())


@pytest.mark.parametrize("make", [make_net, convolutional])
def test_replicates_have_their_moments(make: Callable[..., nn.Module]) -> None:
    predictor, new = predictor_of(make()), make_data(5, seed=3)[0]
    found = predictor.predict(new, 1500)
    ratio = found.samples.var(0) / found.std.square()
    assert bool(((ratio - 1).abs() < standard_errors(5) * (2 / 1500) ** 0.5).all())
    gap = (found.samples.mean(0) - found.mean).abs() / found.std
    assert bool((gap < standard_errors(5) / 1500**0.5).all())


def test_replicates_are_functions_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """In other batches, groups and parts they are the same; another seed gives others."""
    predictor, new = predictor_of(convolutional()), make_data(7, seed=3)[0]
    whole = predictor.predict(new, 6).samples
    torch.testing.assert_close(predictor.predict(new[2:4], 6).samples, whole[:, 2:4])
    torch.testing.assert_close(predictor.predict(new, 3).samples, whole[:3])
    assert not torch.allclose(predictor.predict(new, 6, seed=1).samples, whole)
    monkeypatch.setattr(_tangent, "_CHUNK_ELEMENTS", 40)
    torch.testing.assert_close(predictor.predict(new, 6).samples, whole)
    monkeypatch.setattr(_tangent, "_MAX_STORED_ELEMENTS", 20)
    torch.testing.assert_close(predictor.predict(new, 6).samples, whole)


def test_drawn_directions_have_the_shapes_of_the_weights() -> None:
    net, x = convolutional(), make_data(6)[0]
    jacobian = Jacobian(net, "all", x)
    rows = jacobian.rows(x)
    directions = jacobian.draw_directions(rows, torch.arange(3))
    assert [part.shape for part in directions] == [
        part.shape for part in jacobian.pull(rows, torch.ones(6, 1, 3).double())
    ]
    flat = torch.cat([part.flatten(1) for part in directions], 1)
    torch.testing.assert_close(flat, draw_normal(torch.arange(3), flat.shape[1]))
    torch.testing.assert_close(jacobian.diagonal(rows)[:, 0], jacobian.kernel(rows, rows).diagonal())
    assert jacobian.direction_elements(rows) == flat.shape[1]
    single = Jacobian(convolutional().float(), "all", x.float())
    drawn = single.draw_directions(single.rows(x.float()), torch.arange(3))
    assert {part.dtype for part in drawn} == {torch.float32}


@pytest.mark.parametrize(("n", "elements"), [(2, 4 * 6 + 7 * 2), (7, 7 * 6)])
def test_directions_need_their_weights_or_the_widest_layer(n: int, elements: int) -> None:
    net, x = make_net(2), make_data(n)[0]
    jacobian = Jacobian(net, "all", x)
    assert jacobian.direction_elements(jacobian.rows(x)) == elements


def test_memory_of_replicates_with_a_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deviations and kernels of all inputs are kept if they fit, and so many directions are drawn at once."""
    x, new = make_data(15, seed=7)[0], make_data(7, seed=3)[0]
    found = replace(WHOLE, num_blocks=4).from_trained(make_net(2), make_data(20, 2), val_data=(x, 3 * x[:, :2]))
    assert isinstance(found, TangentPredictor)
    whole, rank = found.predict(new, 7).samples, found.tangent.basis.shape[1]
    passes, drawn, draw = list[int](), list[int](), Jacobian.draw_directions
    found.net.register_forward_hook(lambda *_: passes.append(1))

    def counted(jacobian: Jacobian, rows: Any, keys: Tensor) -> list[Tensor]:
        drawn.append(len(keys))
        return draw(jacobian, rows, keys)

    monkeypatch.setattr(Jacobian, "draw_directions", counted)
    elements, directions = 7 * (4 + rank) * 2, 20 * 6
    for most, again, sizes in (
        (7 * directions, 0, [7]),
        (7 * directions - 1, 0, [6, 1]),
        (elements, 0, [4, 3]),
        (elements - 1, 1, [4, 3]),
        (3 * directions, 1, [3, 3, 1]),
        (directions, 1, [1] * 7),
        (directions - 1, 1, [1] * 7),
    ):
        monkeypatch.setattr(_tangent, "_MAX_STORED_ELEMENTS", most)
        passes.clear()
        drawn.clear()
        stream = found.stream(new, 7, seed=0)
        before = len(passes)
        torch.testing.assert_close(torch.cat([*stream.chunks(7)]), whole)
        assert (drawn, len(passes) - before) == (sizes, again * len(sizes)), most


@pytest.mark.parametrize("make", [make_net, convolutional])
def test_predictor_is_converted_to_another_precision(make: Callable[..., nn.Module]) -> None:
    predictor, new = predictor_of(make(2), 2), make_data(5, seed=3)[0]
    expected = predictor.predict(new, 4)
    predictor.module.float()
    found = predictor.predict(new, 4)
    assert {part.dtype for part in (found.samples, found.std)} == {torch.float32}
    torch.testing.assert_close(found.samples.double(), expected.samples, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.std.double(), expected.std, rtol=1e-3, atol=1e-3)


def test_rows_that_determine_the_net_there_have_no_band_without_noise() -> None:
    """What the prior leaves at the training inputs is rounding, of either sign."""
    x, y = make_data(20)
    method = replace(WHOLE, ridge=0.0, weight_distribution=Constant())
    found = method.from_trained(make_net(), (x, y), val_data=make_data(15, seed=7))
    assert isinstance(found, TangentPredictor)
    assert float(found.tangent.prior) > 0.0
    torch.testing.assert_close(found.predict(x, 2).std, torch.zeros(20, 1).double(), rtol=0, atol=1e-4)


def test_band_is_wide_where_there_are_no_data() -> None:
    x = torch.linspace(-1, 1, 60, dtype=torch.float64)[:, None]
    y = x.sin() + 0.1 * noise(60, 1, dtype=torch.float64)
    config = TrainingConfig(epochs=60, batch_size=20, optimizer=partial(torch.optim.Adam, lr=1e-2), progress=False)
    found = WHOLE.fit(lambda: MLP(1, 1, widths=(20, 20)).double(), (x, y), config)
    near, far = found.predict(torch.tensor([[0.0], [4.0]]).double(), 2).std[:, 0].tolist()
    assert far > 5 * near


def test_saved_predictor_keeps_its_prior(tmp_path: Path) -> None:
    predictor, new = predictor_of(make_net()), make_data(5, seed=3)[0]
    save(predictor, tmp_path / "model")
    again = load(tmp_path / "model", model=make_net(seed=1))
    assert torch.equal(again.predict(new, 4).samples, predictor.predict(new, 4).samples)


# -- held-out rows -------------------------------------------------------------------------------------


def test_folds_are_trained_without_their_rows(tmp_path: Path) -> None:
    """From the same initial weights, in folders of their own; the net itself is that of a plain training."""
    data, seen = make_data(30), list[EpochReport]()
    net = make_net()
    method, config = replace(WHOLE, num_folds=3), replace(CONFIG, on_epoch=seen.append, folder=tmp_path)
    found = method.fit(copy.deepcopy(net), data, config)
    assert [report.title for report in seen] == [*[""] * 2, *(f"fold {k}/3" for k in (1, 1, 2, 2, 3, 3))]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.ckpt", "fold-0", "fold-1", "fold-2"]
    method.fit(copy.deepcopy(net), data, config)
    assert len(seen) == 8
    plain = replace(method, num_folds=0).fit(copy.deepcopy(net), data, CONFIG)
    torch.testing.assert_close(found.predict(data[0], 2).mean, plain.predict(data[0], 2).mean)
    folds = method._make_folds(net, resolve_fit(net, data, CONFIG))
    rows = torch.cat([fold.numbers for fold in folds if fold.numbers is not None])
    assert rows.sort().values.tolist() == list(range(30))
    for fold in folds:
        assert fold.numbers is not None
        assert torch.equal(torch.stack([x for x, _ in fold.held_out]), data[0][fold.numbers])  # type: ignore[attr-defined]
        left = [i for i in range(30) if i not in fold.numbers.tolist()]
        assert torch.equal(torch.stack([x for x, _ in fold.data]), data[0][left])  # type: ignore[attr-defined]
        assert all(map(torch.equal, fold.net.parameters(), net.parameters()))
    assert not method._make_folds(net, resolve_fit(net, make_data(7), CONFIG))
    assert len(method._make_folds(net, resolve_fit(net, make_data(8), CONFIG))) == 2


class Locked(MLP):
    """A net that cannot be copied."""

    def __init__(self) -> None:
        super().__init__(3, 1, widths=(6,))
        self.lock = threading.Lock()


def test_folds_of_a_net_that_cannot_be_copied_are_made_by_the_function() -> None:
    """With the same initial weights."""
    inputs = resolve_fit(lambda: Locked().double(), make_data(30), replace(CONFIG, seed=3))
    net = initialize_model(inputs.factory, 3)
    folds = WHOLE._make_folds(net, inputs)
    assert len(folds) == 2
    for fold in folds:
        assert fold.net is not net
        assert all(map(torch.equal, fold.net.parameters(), net.parameters()))
    found = WHOLE.fit(lambda: Locked().double(), make_data(30), CONFIG)
    assert isinstance(found, TangentPredictor)
    assert found.tangent.has_prior


def test_memory_of_the_folds_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_validation, "_UNCHECKED_BYTES", 0)
    net, inputs = make_net(), resolve_fit(make_net(), make_data(30), CONFIG)
    needed = 5 * count_net_bytes(net)
    monkeypatch.setattr(_validation, "available_memory", lambda: needed)
    assert len(replace(WHOLE, num_folds=5)._make_folds(net, inputs)) == 5
    monkeypatch.setattr(_validation, "available_memory", lambda: needed - 1)
    with pytest.raises(ValueError, match="got num_folds=5; .* memory"):
        replace(WHOLE, num_folds=5)._make_folds(net, inputs)


def test_validation_data_replace_the_folds() -> None:
    data, held_out, seen = make_data(30), make_data(20, seed=9), list[EpochReport]()
    net = make_net()
    found = WHOLE.fit(net, data, replace(CONFIG, on_epoch=seen.append), val_data=held_out)
    assert len(seen) == CONFIG.epochs
    expected = WHOLE.from_trained(net, data, val_data=held_out, batch_size=CONFIG.batch_size)
    new = make_data(5, seed=3)[0]
    torch.testing.assert_close(found.predict(new, 3).samples, expected.predict(new, 3).samples)


def make_folds(nets: Sequence[nn.Module], inputs: FitInputs) -> list[HeldOut]:
    """Every second row, and the others."""
    parts = torch.arange(24) % 2
    folds = []
    for k in (0, 1):
        rows, rest = (parts == k).nonzero()[:, 0], (parts != k).nonzero()[:, 0]
        subsets = (Subset(inputs.data, part.tolist()) for part in (rest, rows))
        folds.append(HeldOut(nets[k], *subsets, rows))
    return folds


@pytest.mark.parametrize("outputs", [1, 2])
def test_level_of_the_noise_is_that_of_held_out_rows(outputs: int) -> None:
    """Rows of fold k have residuals of the net without them; the mean square of the corrected ones is s²."""
    nets = [make_net(outputs, seed=k) for k in range(3)]
    x, y = make_data(24, outputs)
    y *= torch.tensor([0.1, 5.0])[:outputs]
    inputs, parts = resolve_fit(nets[0], (x, y), CONFIG), torch.arange(24) % 2
    folds = make_folds(nets[1:], inputs)
    model = _tangent._LinearModel(WHOLE, nets[0], inputs, outputs)
    errors = _tangent._fit_errors(WHOLE, model, folds, inputs, weighted=False)
    expected = torch.where(parts[:, None] == 0, y - nets[1](x), y - nets[2](x)).detach()
    assert errors.residual is not None
    assert errors.noise is not None
    torch.testing.assert_close(errors.residual, expected)
    raw = replace(WHOLE, residuals="raw")
    (found,) = _tangent.build_tangent_predictors([raw], nets[0], inputs, held_out=folds)
    corrected = expected * (errors.noise / expected.square().mean(0)).sqrt()
    torch.testing.assert_close(found.tangent.influence, model.influence(corrected))
    torch.testing.assert_close(found.tangent.prior, (errors.prior / model.magnitude).sqrt())


def test_factors_of_one_change_nothing_in_folds() -> None:
    nets, (x, y) = [make_net(2, seed=k) for k in range(3)], make_data(24, 2)
    found = []
    for targets in (y, torch.cat([y, torch.ones(24, 1)], 1)):
        inputs, weighted = resolve_fit(nets[0], (x, targets), CONFIG), targets.shape[1] == 3
        folds = make_folds(nets[1:], inputs)
        found += _tangent.build_tangent_predictors([WHOLE], nets[0], inputs, held_out=folds, weighted=weighted)
    plain, weighted_rows = (predictor.predict(x[:5], 3) for predictor in found)
    torch.testing.assert_close(weighted_rows.samples, plain.samples)
    torch.testing.assert_close(weighted_rows.std, plain.std)


@pytest.mark.parametrize(("loss", "outputs"), [(nn.MSELoss(), 2), (GaussianNLL(), 1), (GaussianNLL(), 2)])
@pytest.mark.parametrize(("most", "count"), [(512, 9), (9, 9), (7, 7), (1, 2)])
def test_likelihood_is_that_of_the_errors_of_each_output(
    loss: Any, outputs: int, most: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """r = y − f̂(x), the covariance of f(x) under the prior, and that of its noise plus Σ: of so many held-out rows."""
    gaussian, seen = isinstance(loss, GaussianNLL), list[tuple[Tensor, Tensor, Tensor]]()

    def record(errors: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, float]:
        seen.extend(errors)
        return 1.0 / 3.0, 2.0 / 3.0

    monkeypatch.setattr(_tangent, "fit_error_variances", record)
    monkeypatch.setattr(_tangent, "_MAX_HELD_OUT", most * outputs + outputs - 1)
    net, data, (x, y) = make_net(outputs * (1 + gaussian)), make_data(12, outputs), make_data(9, outputs, seed=5)
    method, inputs = replace(WHOLE, loss=loss, ridge=0.05), resolve_fit(net, data, CONFIG)
    model = _tangent._LinearModel(method, net, inputs, outputs)
    held_out = resolve_fit(net, (x, y), CONFIG).data
    found = _tangent._fit_errors(method, model, [HeldOut(net, inputs.data, held_out)], inputs, weighted=False)
    free, scatter = model.error_covariance(model.jacobian.rows(x))
    error = (y - net(x)[:, :outputs]).detach()
    variance = net(x)[:, outputs:].detach().exp() if gaussian else torch.ones_like(y)
    for c, (r, C, N) in enumerate(seen):
        assert len(r) == count
        used = (error[:, c] - r[:, None]).abs().argmin(1)
        at = outputs * used + c
        torch.testing.assert_close(r, error[used, c])
        torch.testing.assert_close(C, free[at][:, at] / model.magnitude)
        torch.testing.assert_close(N, scatter[at][:, at] + torch.diag(variance[used, c]))
    assert found.noise is not None
    expected = torch.full((outputs,), 1.0 / 3.0, dtype=torch.float64)
    torch.testing.assert_close((found.prior, found.noise), (expected, 2 * expected))


def test_rows_that_determine_the_model_leave_no_prior() -> None:
    """What is left is rounding, whose scale would have no limit."""
    net, x = nn.Linear(3, 1).double(), make_data(40)[0]
    y = x.sum(1, keepdim=True) + 0.5 * noise(40, 1, seed=4, dtype=torch.float64)
    for seed in (*range(6, 20), 5):
        held_out = make_data(20, seed=seed)
        found = replace(WHOLE, ridge=0.0).from_trained(net, (x, y), val_data=held_out)
        assert isinstance(found, TangentPredictor)
        assert found.tangent.prior.tolist() == [0.0]
    spread = float((held_out[1] - net(held_out[0])).detach().square().mean().sqrt())
    band = found.predict(x, 2).std
    assert bool((band < spread).all())


def test_ignored_rows_and_classes() -> None:
    x, y = make_data(30)[0], torch.arange(30) % 3
    y[:4] = -100
    held_out = make_data(12, seed=5)[0], torch.tensor([0, 1, 2, -100] * 3)
    found = InfluenceBootstrap(layers="all").from_trained(make_net(3), (x, y), val_data=held_out)
    assert isinstance(found, TangentPredictor)
    assert found.tangent.prior.shape == (3,)
    assert {tensor.dtype for tensor in found.tangent.buffers()} == {torch.float64}
    assert len(set(found.tangent.prior.tolist())) == 1
    assert bool(torch.isfinite(found.predict(x, 5).samples).all())


def test_net_that_reproduces_its_targets_gives_a_warning() -> None:
    net, x = make_net(), make_data(20)[0]
    y = net(x).detach()
    with pytest.warns(UserWarning, match="val_data"):
        WHOLE.from_trained(net, (x, y))
    WHOLE.from_trained(net, (x, y), val_data=make_data(8, seed=3))
    WHOLE.from_trained(net, (x, y + noise(20, 1)))


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "inputs"), [(20, 10), (150, 10), (150, 4)])
def test_band_covers_in_several_dimensions(epochs: int, inputs: int) -> None:
    """A linear function, and a product; nets that are stopped early, or interpolate."""
    covered = []
    for seed in range(10):
        x, new = noise(200, inputs, seed=seed), noise(100, inputs, seed=1000 + seed)

        def f(x: Tensor) -> Tensor:
            return x[:, :1] * x[:, 1:2] if x.shape[1] == 4 else x @ torch.linspace(-1, 1, x.shape[1])[:, None] / 2

        y = f(x) + 0.4 * noise(200, 1, seed=2000 + seed)
        optimizer = partial(torch.optim.Adam, lr=1e-2)
        config = TrainingConfig(epochs=epochs, batch_size=50, optimizer=optimizer, progress=False, seed=seed)
        found = WHOLE.fit(lambda: MLP(inputs, 1, widths=(64, 64)), (x, y), config).summarize(new, 2)
        covered.append(((found.mean - f(new)).abs() <= 1.96 * found.std).float().mean())
    mean = float(torch.stack(covered).mean())
    assert 0.88 < mean < 0.995


# -- warnings ------------------------------------------------------------------------------------------


@contextmanager
def no_warnings() -> Iterator[None]:
    """Warnings are errors, also those that the other tests of this file ignore."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(("held", "n", "known"), [(19, 40, False), (20, 40, True), (None, 19, False), (None, 20, True)])
def test_few_held_out_rows_are_reported(held: int | None, n: int, known: bool) -> None:
    x, y = make_data(n)
    config = replace(CONFIG, precision="64-true")
    with no_warnings() if known else pytest.warns(UserWarning, match="errors at only 19 rows"):
        WHOLE.fit(make_net(), (x, y), config, val_data=None if held is None else make_data(held, seed=5))


def test_rows_that_are_too_few_to_hold_any_out_are_reported() -> None:
    x, y = make_data(7)
    config = replace(CONFIG, precision="64-true")
    with pytest.warns(UserWarning, match="7 rows are too few to hold any out"):
        replace(WHOLE, ridge=1.0).fit(make_net(), (x, y), config)
    with no_warnings():
        replace(WHOLE, ridge=1.0, num_folds=0).fit(make_net(), (x, y), config)


def test_inputs_far_outside_of_the_data_are_reported() -> None:
    x, y = torch.linspace(0.0, 2.0, 30, dtype=torch.float64)[:, None].repeat(1, 3), make_data(30)[1]
    x[:, 0] += 10.0
    x[:, 2] = 7.0  # a constant feature has no range
    predictor = replace(WHOLE, residuals="raw", ridge=1.0).from_trained(make_net(), (x, y))
    inside = torch.tensor([[9.0, 3.0, 100.0], [13.0, -1.0, 7.0]]).double()
    with no_warnings():
        predictor.predict(inside, 2)
        predictor.summarize(inside[:0], 2)
    for first, second in ((8.99, 1.0), (13.01, 1.0), (11.0, -1.01), (11.0, 3.01)):
        with pytest.warns(UserWarning, match="outside of the range of the training inputs, by more than 50%"):
            predictor.predict(torch.tensor([[first, second, 7.0]]).double(), 2)
