"""The influence bootstrap of several layers: the tangent kernel, and what it says of the band."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from neuboots import InfluenceBootstrap, TrainingConfig, load, save
from neuboots.losses import BrierLoss, GaussianNLL
from neuboots.methods._curvature import working_residuals
from neuboots.methods.influence.jacobian import Jacobian
from neuboots.methods.influence.leverage import (
    NoiseLevel,
    choose_ridge,
    degrees_of_freedom,
    leverage_corrected,
    residual_variance_factor,
    ridge_for_degrees_of_freedom,
)
from neuboots.methods.influence.tangent import TangentPredictor, build_tangent_predictor
from neuboots.nets import MLP
from neuboots.weights import Dirichlet, Exponential


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slopes(net: nn.Module, x: Tensor, names: list[str] | None = None) -> Tensor:
    """J, an output of a row at a time, by torch's own differentiation: (N, C, P)."""
    weights = [p for name, p in net.named_parameters() if names is None or name in names]
    rows = []
    for row in x:
        slopes = [torch.autograd.grad(z, weights, retain_graph=True) for z in net(row[None])[0]]
        rows.append(torch.stack([torch.cat([part.flatten() for part in slope]) for slope in slopes]))
    return torch.stack(rows).double()


class Odd(nn.Module):
    """A net with layers of every kind: convolution, norm, a layer used twice, attention, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.twice = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(4))
        self.hidden = nn.Linear(24, 5, bias=False)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x[:, None])).tanh()
        h = self.twice(self.twice(h).tanh())
        h = h.transpose(1, 2)
        h = self.attention(h, h, h, need_weights=False)[0] * self.scale
        return self.head(self.hidden(h.flatten(1)).tanh())


@pytest.fixture
def odd() -> nn.Module:
    torch.manual_seed(3)
    net = Odd()
    net(drawn(20, 6))  # its running statistics are not those of nothing
    return net.eval()


# -- the Jacobian --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", ["all", 1, 2, 3])
def test_kernel_is_that_of_differentiation(layers: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 6, bias=False), nn.Tanh(), nn.Linear(6, 2)).eval()
    x, other = drawn(5, 3), drawn(4, 3, seed=1)
    names = {"all": None, 1: ["4.weight", "4.bias"], 2: ["2.weight", "4.weight", "4.bias"], 3: None}[layers]
    J, J2 = slopes(net, x, names), slopes(net, other, names)
    jacobian = Jacobian(net, layers, x[:2])
    rows = jacobian.rows(x)
    torch.testing.assert_close(
        jacobian.kernel(rows, jacobian.rows(other)), J.flatten(0, 1) @ J2.flatten(0, 1).T, rtol=1e-5, atol=1e-5
    )
    weights = dict(net.named_parameters())
    theta = torch.cat([weights[n].detach().flatten() for n in (names or weights)]).double()
    torch.testing.assert_close(jacobian.along(rows), J @ theta, rtol=1e-5, atol=1e-5)


def test_layers_of_every_kind(odd: nn.Module) -> None:
    x = drawn(4, 6)
    J = slopes(odd, x)
    jacobian = Jacobian(odd, "all", x[:2])
    rows = jacobian.rows(x)
    torch.testing.assert_close(jacobian.kernel(rows, rows), J.flatten(0, 1) @ J.flatten(0, 1).T, rtol=1e-4, atol=1e-5)
    part = Jacobian(odd, 3, x[:2])  # attention with its unseen projection, hidden, head; not the net's own
    own = [n for n, _ in odd.named_parameters() if n.split(".")[0] in ("hidden", "head", "attention")]
    J = slopes(odd, x, own)
    rows = part.rows(x)
    torch.testing.assert_close(part.kernel(rows, rows), J.flatten(0, 1) @ J.flatten(0, 1).T, rtol=1e-4, atol=1e-5)


def test_rows_that_are_not_held_are_computed_again(odd: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from neuboots.methods.influence import jacobian as module

    x = drawn(7, 6)
    jacobian = Jacobian(odd, "all", x[:2])
    rows = jacobian.rows(x)
    whole, along = jacobian.kernel(rows, rows), jacobian.along(rows)
    assert len(rows.held) == 1  # all of them, which nobody computes again
    monkeypatch.setattr(module, "_HELD", 700)  # a row or two at a time
    monkeypatch.setattr(module, "_ROWS", 3)
    rows = jacobian.rows(x)
    torch.testing.assert_close(jacobian.kernel(rows, rows), whole, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(jacobian.along(rows), along, rtol=1e-6, atol=1e-8)


def test_rows_that_are_held_are_differentiated_once(odd: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training rows of a predictor, whatever is asked of it."""
    seen = []
    row = Jacobian._row

    def counted(jacobian: Jacobian, x: Any) -> Tensor:
        seen.append(x)
        return row(jacobian, x)

    monkeypatch.setattr(Jacobian, "_row", counted)
    predictor = InfluenceBootstrap(layers="all").from_trained(odd, TensorDataset(drawn(12, 6), torch.arange(12) % 2))
    assert len(seen) == 12
    predictor.summarize(drawn(3, 6))
    assert len(seen) == 12 + 12 + 3
    predictor.summarize(drawn(3, 6))
    assert len(seen) == 12 + 12 + 3 + 3


def test_very_many_passes_are_announced(odd: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from neuboots.methods.influence import jacobian as module

    data = TensorDataset(drawn(12, 6), torch.arange(12) % 2)
    monkeypatch.setattr(module, "_MANY", 20)
    with pytest.warns(UserWarning, match="about 24 backward passes for 12 rows of 2 outputs; a smaller most_rows"):
        InfluenceBootstrap(layers="all").from_trained(odd, data)
    monkeypatch.setattr(module, "_HELD", 700)
    with pytest.warns(UserWarning, match=r"about \d{3} backward passes"):
        InfluenceBootstrap(layers="all").from_trained(odd, data)


@pytest.mark.parametrize("layers", [1, "all"])
def test_a_single_row_is_refused(layers: Any) -> None:
    with pytest.raises(ValueError, match="got a single row, which has no spread"):
        InfluenceBootstrap(nn.MSELoss(), layers=layers).from_trained(
            nn.Linear(2, 1), TensorDataset(drawn(1, 2), drawn(1))
        )


def test_something_else_than_a_net_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got a net of type str; expected a torch\.nn\.Module"):
        InfluenceBootstrap().from_trained("resnet", TensorDataset(drawn(4, 2), torch.arange(4) % 2))  # type: ignore[arg-type]


def test_the_net_stays_as_it_is(odd: nn.Module) -> None:
    for parameter in odd.parameters():
        parameter.requires_grad_(False)
    odd.train()
    before = copy.deepcopy(odd.state_dict())
    data = TensorDataset(drawn(12, 6), torch.arange(12) % 2)
    InfluenceBootstrap(layers="all").from_trained(odd, data).summarize(drawn(3, 6))
    assert all(torch.equal(before[key], value) for key, value in odd.state_dict().items())
    assert odd.training
    assert odd.norm.training
    assert not any(p.requires_grad or p.grad is not None for p in odd.parameters())
    assert not any(m._forward_hooks for m in odd.modules())


# -- the loss as least squares -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "outputs", "target"),
    [
        (nn.CrossEntropyLoss(), 3, torch.tensor([0, 2, 1, 1, 0])),
        (nn.CrossEntropyLoss(label_smoothing=0.1), 3, torch.tensor([0, 2, 1, 1, 0])),
        (nn.CrossEntropyLoss(reduction="none"), 3, torch.tensor([0, 2, 1, 1, 0])),
        (nn.BCEWithLogitsLoss(), 1, torch.tensor([0.0, 1, 1, 0, 1])),
        (lambda z, y: nn.functional.huber_loss(z, y, reduction="none"), 2, drawn(5, 2, seed=4)),
        (nn.SoftMarginLoss(reduction="none"), 2, drawn(5, 2, seed=4).sign()),
    ],
)
def test_working_is_the_loss_to_second_order(loss: Any, outputs: int, target: Tensor) -> None:
    z = drawn(5, outputs).double()
    root, residual = working_residuals(loss, z, target)
    for i in range(5):

        def of_row(one, i=i):
            return loss(
                one[None], target[i : i + 1].double() if target.is_floating_point() else target[i : i + 1]
            ).sum()

        gradient = torch.autograd.functional.jacobian(of_row, z[i])
        curvature = torch.autograd.functional.hessian(of_row, z[i])
        torch.testing.assert_close(root[i] @ residual[i], -gradient, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(root[i] @ root[i].T, curvature, rtol=1e-5, atol=2e-6)


def test_working_of_a_gaussian_head_is_fishers() -> None:
    z, y = drawn(6, 4).double(), drawn(6, 2, seed=1).double()
    for beta in (0.0, 0.5):
        root, residual = working_residuals(GaussianNLL(beta=beta), z, y)
        mean, log_variance = z.chunk(2, 1)
        weight = (beta * log_variance).exp()
        expected = torch.cat(
            [weight * (y - mean) * (-log_variance).exp(), weight * 0.5 * ((y - mean) ** 2 * (-log_variance).exp() - 1)],
            1,
        )
        torch.testing.assert_close(torch.einsum("mcd,md->mc", root, residual), expected)
        information = torch.cat([weight * (-log_variance).exp(), 0.5 * weight], 1)
        torch.testing.assert_close((root @ root.mT).diagonal(dim1=1, dim2=2), information)


def test_a_loss_that_is_not_convex_counts_where_it_is() -> None:
    z = drawn(8, 3).double()
    root, residual = working_residuals(BrierLoss(), z, torch.arange(8) % 3)
    assert bool(torch.isfinite(root).all() and torch.isfinite(residual).all())
    z.requires_grad_()
    (slope,) = torch.autograd.grad(BrierLoss()(z, torch.arange(8) % 3).sum(), z)
    torch.testing.assert_close(torch.einsum("mcd,md->mc", root, residual), -slope)
    with pytest.raises(ValueError, match="curvature"):
        working_residuals(nn.L1Loss(reduction="none"), z, torch.zeros(8, 3))


# -- the spectrum --------------------------------------------------------------------------------------


def ridge_problem(n: int = 30, k: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Rows X, and their eigenvalues and coordinates."""
    x = drawn(n, k).double() * torch.linspace(0.1, 2.0, k).double()
    values, vectors = torch.linalg.eigh(x.T @ x)
    return x, values, x @ vectors


def test_remainder_and_left_out_against_the_hat_matrix() -> None:
    x, values, psi = ridge_problem()
    hat = x @ torch.linalg.inv(x.T @ x + 2.0 * torch.eye(8)) @ x.T
    left = torch.eye(30) - hat
    torch.testing.assert_close(residual_variance_factor(psi, values, 2.0), (left @ left).diagonal())
    u = drawn(15, 2, seed=5).double()
    blocks = torch.stack([hat[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] for i in range(15)])
    expected = torch.linalg.solve(torch.eye(2) - blocks, u[..., None])[..., 0]
    torch.testing.assert_close(leverage_corrected(blocks, u), expected)
    torch.testing.assert_close(
        leverage_corrected(blocks, leverage_corrected(blocks, u, power=0.5), power=0.5), expected
    )


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_a_row_that_decides_alone_is_held(power: float) -> None:
    hat = torch.tensor([1.0 - 1e-12, 0.5, 0.5], dtype=torch.float64)[:, None, None]
    found = leverage_corrected(hat, torch.ones(3, 1, dtype=torch.float64), power=power)
    torch.testing.assert_close(found.flatten(), torch.tensor([10.0, 2.0, 2.0], dtype=torch.float64) ** power)


def test_hc2_is_unbiased_for_a_linear_model() -> None:
    """E (rᵢ/√(1 − hᵢ))² = σ² where least squares has fitted all that there is: its variance is the true one."""
    x = drawn(40, 5).double()
    hat = x @ torch.linalg.inv(x.T @ x) @ x.T
    noise = drawn(4000, 40, seed=7).double()
    fitted = (noise @ (torch.eye(40) - hat)).T  # residuals, by data set: (40, 4000)
    found = leverage_corrected(hat.diagonal()[:, None, None].expand(40, 1, 1), fitted[:, :1], power=0.5)
    torch.testing.assert_close(found[:, 0], fitted[:, 0] / (1 - hat.diagonal()).sqrt())
    level = (fitted / (1 - hat.diagonal()).sqrt()[:, None]).square().mean(1)
    assert float((level - 1).abs().max()) < 4.5 * (2 / 4000) ** 0.5  # of 40 rows


@pytest.mark.parametrize(("layers", "kind"), [(1, "hc3"), (2, "hc2"), ("all", "hc2")])
def test_how_residuals_of_classes_are_corrected_if_nothing_is_said(layers: Any, kind: str) -> None:
    assert InfluenceBootstrap(layers=layers).correction == kind
    assert InfluenceBootstrap(nn.MSELoss(), layers=layers).correction == "smooth"


def test_ridge_matches_the_residuals_of_a_ridge_fit() -> None:
    """Targets of a linear model that was fitted with λ₀ give λ₀ back: dual and primal."""
    x, values, _ = ridge_problem(40, 8)
    y = x @ drawn(8, seed=2).double() + drawn(40, seed=3).double()
    for ridge in (0.5, 5.0, 50.0):
        theta = torch.linalg.solve(x.T @ x + ridge * torch.eye(8), x.T @ y)
        size = float((y - x @ theta).square().sum())
        kernel, vectors = torch.linalg.eigh(x @ x.T)
        kernel = kernel.clamp_min(0.0)
        found = choose_ridge(kernel, (vectors.T @ y).square(), 0.0, 40, residual=size)
        assert found == pytest.approx(ridge, rel=1e-6)
        squares = (torch.linalg.eigh(x.T @ x).eigenvectors.T @ x.T @ y).square() / values
        rest = float(y.square().sum() - squares.sum())
        assert choose_ridge(values, squares, rest, 40, residual=size) == pytest.approx(ridge, rel=1e-6)


def test_ridge_leaves_half_of_the_rows_free_and_one_degree_at_least() -> None:
    values = torch.logspace(-6, 0, 20, dtype=torch.float64)
    squares = torch.ones(20, dtype=torch.float64)
    assert degrees_of_freedom(values, choose_ridge(values, squares, 0.0, 20, residual=0.0)) == pytest.approx(10.0)
    assert degrees_of_freedom(values, choose_ridge(values, squares, 0.0, 20, residual=1e9)) == pytest.approx(1.0)
    assert degrees_of_freedom(values, ridge_for_degrees_of_freedom(values, 3.0)) == pytest.approx(3.0)


def test_noise_level_is_unbiased_where_it_is_the_same() -> None:
    """The mean over draws is σ², within four standard errors, although a third of the noise is fitted."""
    x, values, psi = ridge_problem(24, 8)
    hat = x @ torch.linalg.inv(x.T @ x + 0.1 * torch.eye(8)) @ x.T
    left = residual_variance_factor(psi, values, 0.1)
    means = []
    for seed in range(400):
        residuals = (torch.eye(24) - hat) @ (1.5 * drawn(24, seed=seed).double())
        noise = NoiseLevel.along(values)
        noise.add(psi, residuals, left)
        means.append(float(noise.correct(psi, residuals).square().mean()))
    found = torch.tensor(means)
    assert abs(float(found.mean()) - 2.25) < 4.0 * float(found.std()) / 20.0
    assert float(residuals.square().mean()) < 0.8 * float(noise.correct(psi, residuals).square().mean())


def test_noise_level_against_its_formula() -> None:
    """All pairs of rows, weighted by the squares of the smoother; and rows that come in parts."""
    x, values, psi = ridge_problem(24, 8)
    residuals, left = drawn(24, seed=7).double(), residual_variance_factor(psi, values, 0.1)
    smoother = x @ torch.linalg.inv(x.T @ x + ridge_for_degrees_of_freedom(values, 3.0) * torch.eye(8)) @ x.T
    weights = smoother.square() / smoother.square().sum(1, keepdim=True)
    expected = 0.5 * (residuals.square() + weights @ residuals.square()) / (weights @ left)
    noise = NoiseLevel.along(values)
    noise.add(psi[:10], residuals[:10], left[:10])
    noise.add(psi[10:], residuals[10:], left[10:])
    found = noise.correct(psi, residuals)
    torch.testing.assert_close(found.square(), expected)
    assert bool((found.sign() == residuals.sign()).all())


# -- the bootstrap -------------------------------------------------------------------------------------


def linear_data(n: int = 40) -> tuple[TensorDataset, nn.Linear]:
    """Data, and the least-squares fit as a net."""
    x = drawn(n, 3)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3 + 0.5 * drawn(n, seed=1)
    design = torch.cat([x, torch.ones(n, 1)], 1).double()
    theta = torch.linalg.lstsq(design, y.double()[:, None]).solution[:, 0]
    net = nn.Linear(3, 1).double()
    with torch.no_grad():
        net.weight[0], net.bias[0] = theta[:3], theta[3]
    return TensorDataset(x.double(), y.double()), net


def weighted_fit(data: TensorDataset, w: Tensor) -> Tensor:
    design = torch.cat([data.tensors[0], torch.ones(len(w), 1)], 1)
    return torch.linalg.solve(design.T @ (w[:, None] * design), design.T @ (w * data.tensors[1]))


def test_linear_model_is_the_weighted_fit_to_first_order() -> None:
    """The error falls with the square of the weights' distance from 1."""
    data, net = linear_data()
    x = drawn(6, 3, seed=9).double()
    predictor = InfluenceBootstrap(nn.MSELoss(), layers="all", ridge=0.0, residuals="raw").from_trained(net, data)
    assert isinstance(predictor, TangentPredictor)
    output, moved = predictor.deviations(x)
    change = Dirichlet().sample(torch.tensor([5]), 40)[0] - 1.0
    errors = []
    for size in (0.1, 0.01):
        theta = weighted_fit(data, 1.0 + size * change)
        exact = x @ theta[:3] + theta[3]
        errors.append(float((output[:, 0] + moved[:, 0] @ (size * change) - exact).abs().max()))
    assert errors[0] > 1e-6
    assert errors[1] < 0.02 * errors[0]


def test_moments_are_those_of_the_samples_and_of_the_law() -> None:
    data, net = linear_data()
    x = drawn(5, 3, seed=9).double()
    for weight_distribution in (Dirichlet(), Exponential(4.0)):
        predictor = InfluenceBootstrap(
            nn.MSELoss(), layers="all", weight_distribution=weight_distribution
        ).from_trained(net, data)
        found = predictor.predict(x, 4000, seed=3)
        summary = predictor.summarize(x, 2)
        error = (found.samples.mean(0) - summary.mean).abs() / (summary.std / 4000**0.5)
        assert float(error.max()) < 4.5
        torch.testing.assert_close(found.samples.std(0), summary.std, rtol=0.06, atol=0.0)
    few = predictor.predict(x, 10, seed=3).samples
    torch.testing.assert_close(few, found.samples[:10], rtol=1e-9, atol=1e-9)  # products of other shapes round apart


def test_blocks_are_sums_of_rows() -> None:
    data, net = linear_data()
    x = drawn(5, 3, seed=9).double()
    each = InfluenceBootstrap(nn.MSELoss(), layers="all").from_trained(net, data).deviations(x)[1]
    few = InfluenceBootstrap(nn.MSELoss(), layers="all", num_blocks=8).from_trained(net, data).deviations(x)[1]
    assert few.shape == (5, 1, 8)
    torch.testing.assert_close(few.sum(-1), each.sum(-1))


def test_several_outputs_and_every_loss() -> None:
    torch.manual_seed(1)
    x = drawn(30, 2)
    cases: list[tuple[Any, int, Tensor]] = [
        (nn.CrossEntropyLoss(), 3, torch.arange(30) % 3),
        (nn.BCEWithLogitsLoss(), 1, (x[:, :1] > 0).float()),
        (nn.MSELoss(), 2, drawn(30, 2, seed=4)),
        (GaussianNLL(), 4, drawn(30, 2, seed=4)),
        (BrierLoss(), 3, torch.arange(30) % 3),
    ]
    for loss, outputs, y in cases:
        predictor = InfluenceBootstrap(loss, layers="all").from_trained(
            MLP(2, outputs, widths=(8,)).eval(), TensorDataset(x, y)
        )
        found = predictor.predict(x[:4], 6)
        assert found.samples.shape == (6, 4, outputs)
        assert bool(torch.isfinite(found.samples).all())
        moved = found.samples.std(0) > 0
        held = outputs // 2 if isinstance(loss, GaussianNLL) else outputs  # log σ² is held
        assert bool(moved[:, :held].all())
        assert not bool(moved[:, held:].any())


def test_a_part_of_the_rows_stands_for_all() -> None:
    """With an eighth of the rows, as with half of them, the band is the same, within what drawing them does to it."""
    x = drawn(2000, 2)
    y = x[:, 0].sin() + 0.3 * drawn(2000, seed=1)
    data = TensorDataset(x, y)
    config = TrainingConfig(epochs=4, batch_size=50, optimizer=partial(torch.optim.Adam, lr=1e-2), progress=False)
    net = (
        InfluenceBootstrap(nn.MSELoss(), layers="all", max_kernel_rows=100)
        .fit(lambda: MLP(2, 1, widths=(16,)), data, config)
        .net
    )
    few = (
        InfluenceBootstrap(nn.MSELoss(), layers="all", max_kernel_rows=250)
        .from_trained(net, data)
        .summarize(x[:50], 2)
        .std
    )
    more = (
        InfluenceBootstrap(nn.MSELoss(), layers="all", max_kernel_rows=1000)
        .from_trained(net, data)
        .summarize(x[:50], 2)
        .std
    )
    ratio = (few / more).log()
    assert abs(float(ratio.mean())) < 0.25
    assert float(ratio.std()) < 0.3


def test_save_and_load(tmp_path: Any, odd: nn.Module) -> None:
    data = TensorDataset(drawn(12, 6), torch.arange(12) % 2)
    predictor = InfluenceBootstrap(layers=3, num_blocks=5).from_trained(odd, data)
    save(predictor, tmp_path / "saved")
    again = load(tmp_path / "saved", model=Odd())
    x = drawn(3, 6, seed=8)
    assert torch.equal(again.predict(x, 7).samples, predictor.predict(x, 7).samples)


class Pairs(Dataset[Any]):
    """Rows for a net of keywords."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Any:
        return {"a": drawn(2, seed=i), "b": drawn(2, seed=100 + i)}, torch.tensor(float(i))


class OfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Linear(2, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head((self.left(a) + self.right(b)).tanh())


def test_inputs_by_name(tmp_path: Any) -> None:
    torch.manual_seed(0)
    predictor = InfluenceBootstrap(nn.MSELoss(), layers="all").from_trained(OfTwo().eval(), Pairs())
    x = {"a": drawn(4, 2), "b": drawn(4, 2, seed=1)}
    assert predictor.predict(x, 5).samples.shape == (5, 4, 1)
    save(predictor, tmp_path / "saved")
    assert torch.equal(load(tmp_path / "saved", model=OfTwo()).predict(x, 5).samples, predictor.predict(x, 5).samples)


def test_what_it_cannot_do_it_says() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.zeros(2), torch.tensor(0))] * 4)

    net = MLP(2, 2, widths=(4,))
    with pytest.raises(ValueError, match="stream of unknown length"):
        InfluenceBootstrap(layers="all").from_trained(net, Stream())
    pixels = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1))
    with pytest.raises(ValueError, match=r"layers=1"):
        InfluenceBootstrap(layers=2).from_trained(pixels, TensorDataset(drawn(4, 1, 2, 2), torch.zeros(4, 2, 2).long()))
    for options in ({"layers": 0}, {"layers": "head"}, {"ridge": -1.0}, {"residuals": "hc9"}, {"max_kernel_rows": 1}):
        with pytest.raises(ValueError, match="expected"):
            InfluenceBootstrap(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only a head"):
        InfluenceBootstrap(layers=2, refit=True)
    bad = TensorDataset(drawn(4, 2), torch.tensor([0.0, 1.0, float("nan"), 1.0]))
    with pytest.raises(ValueError, match="NaN"):
        InfluenceBootstrap(nn.MSELoss(), layers="all").from_trained(MLP(2, 1, widths=(4,)), bad)


@pytest.mark.parametrize(
    ("loss", "outputs", "y", "said"),
    [
        (nn.MSELoss(), 2, drawn(6), "expected the same shape"),
        (nn.CrossEntropyLoss(), 2, torch.arange(6) % 3, "got label 2 for a net with 2 outputs"),
        (nn.CrossEntropyLoss(), 2, torch.zeros(6, 1).long(), "one class label for each output"),
        (nn.CrossEntropyLoss(), 2, torch.full((6,), -100), "all targets are ignored"),
        (nn.BCEWithLogitsLoss(), 1, torch.arange(6.0), r"outside \[0, 1\]"),
        (GaussianNLL(), 3, drawn(6), "k means, then k values"),
        (nn.MSELoss(), 1, drawn(6, 1), 'use a loss with reduction="none"'),
        (lambda z, y: (z - y).square().mean(), 1, drawn(6, 1), 'use a loss with reduction="none"'),
    ],
)
def test_targets_that_do_not_fit_are_refused_as_in_training(loss: Any, outputs: int, y: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        InfluenceBootstrap(loss, layers="all").from_trained(MLP(2, outputs, widths=(4,)), TensorDataset(drawn(6, 2), y))


def test_room_for_a_single_row_is_too_little() -> None:
    data = TensorDataset(drawn(6, 2), torch.arange(6) % 3)
    with pytest.raises(ValueError, match="two rows at least, 6"):
        InfluenceBootstrap(layers="all", max_kernel_rows=5).from_trained(MLP(2, 3, widths=(4,)), data)


WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize("layers", [1, "all"])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none"),
        lambda z, y: F.cross_entropy(z, y, weight=WEIGHTS, reduction="none"),
    ],
)
def test_losses_with_numbers_in_single_precision(loss: Any, layers: Any) -> None:
    """Weights of classes are repetitions of rows: without a correction for leverage the sums are the same."""
    torch.manual_seed(0)
    net, x, y = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), drawn(9, 2), torch.arange(9) % 3
    new, options = drawn(5, 2, seed=1), {"layers": layers, "residuals": "raw"}
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
    x, y = drawn(12, 2), (drawn(12, seed=1) > 0).float()
    net = MLP(2, 1, widths=(4,))
    flat = nn.Sequential(net, nn.Flatten(0))
    method = InfluenceBootstrap(loss, layers=layers)
    expected = method.from_trained(net, TensorDataset(x, y[:, None])).predict(x, 3).samples
    torch.testing.assert_close(method.from_trained(flat, TensorDataset(x, y)).predict(x, 3).samples, expected)


def test_the_band_follows_the_data() -> None:
    """Wider where the noise is, and where no data are."""
    x = torch.cat([-1 - drawn(100).abs(), 1 + drawn(100, seed=1).abs()]).clamp(-2, 2)[:, None]
    y = x[:, 0].sin() + (0.05 + 0.4 * (x[:, 0] > 0)) * drawn(200, seed=2)
    config = TrainingConfig(epochs=100, batch_size=50, optimizer=partial(torch.optim.Adam, lr=1e-2), progress=False)
    predictor = InfluenceBootstrap(nn.MSELoss(), layers="all").fit(
        lambda: MLP(1, 1, widths=(32, 32)), TensorDataset(x, y), config
    )
    left, right = (predictor.summarize(torch.linspace(a, b, 9)[:, None], 2).std.mean() for a, b in ((-2, -1), (1, 2)))
    middle = predictor.summarize(torch.linspace(-0.2, 0.2, 5)[:, None], 2).std.mean()
    assert float(right / left) > 2.0
    assert float(middle / left) > 2.0


def test_no_rows_and_one_row() -> None:
    data, net = linear_data()
    predictor = InfluenceBootstrap(nn.MSELoss(), layers="all").from_trained(net, data)
    assert predictor.predict(torch.zeros(0, 3).double(), 3).samples.shape == (3, 0, 1)
    x = drawn(2, 3, seed=4).double()
    both = predictor.predict(x, 3).samples
    torch.testing.assert_close(predictor.predict(x[:1], 3).samples, both[:, :1])


@pytest.mark.parametrize("layers", [2, "all"])
@pytest.mark.parametrize("ridge", [None, 1e-6])
@pytest.mark.parametrize("shift", [0.0, 2000.0])
def test_single_precision_gives_the_band_of_double(shift: float, ridge: float | None, layers: Any) -> None:
    """Inputs far from zero (a year, say) make λ small beside the largest eigenvalue, whose rounding it divides."""
    torch.manual_seed(0)
    net = MLP(2, 1, widths=(16, 16)).eval()
    x, y = drawn(60, 2) + shift, drawn(60, 1, seed=1)
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
    ("loss", "outputs"), [(nn.MSELoss(), 1), (nn.MSELoss(), 2), (nn.CrossEntropyLoss(), 3), (nn.BCEWithLogitsLoss(), 1)]
)
def test_the_head_in_both_forms(loss: Any, outputs: int, residuals: Any) -> None:
    """Primal and kernel form of the last layer are one and the same, replicate by replicate."""
    torch.manual_seed(2)
    net = MLP(2, outputs, widths=(6,)).double().eval()
    x = drawn(25, 2).double()
    targets = {
        "nn.MSELoss": drawn(25, outputs, seed=1).double(),
        "nn.CrossEntropyLoss": torch.arange(25) % 3,
        "nn.BCEWithLogitsLoss": (x[:, :1] > 0).double(),
    }
    data = TensorDataset(x, targets[type(loss).__name__])
    method = InfluenceBootstrap(loss, ridge=0.02, residuals=residuals)
    primal = method.from_trained(net, data).predict(x[:5], 8).samples
    kernel = build_tangent_predictor(method, net, data, TrainingConfig(epochs=1)).predict(x[:5], 8).samples
    torch.testing.assert_close(primal, kernel, rtol=1e-6, atol=1e-8)
