"""K nets: together as in turn, the weights as the resampled data, adversarial inputs, and a run cut short."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _nets import ZOO, Case, make
from _reference import standard_errors
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from neuboots import Deterministic, TrainingConfig, load, save
from neuboots.head import compute_output, unwrap_model
from neuboots.loading import Batch
from neuboots.losses import BrierLoss, GaussianNLL
from neuboots.methods import BayesianBootstrap, DeepEnsemble, StandardBootstrap
from neuboots.methods._vmap import StackedNets, find_vmap_obstacle
from neuboots.methods.ensembles import EnsemblePredictor, _EnsembleObjective, derive_member_seed, draw_point_weights
from neuboots.nets import MLP
from neuboots.testing import TwoBranches, Upsampling
from neuboots.training import EpochReport, constant_schedule
from neuboots.weights import Dirichlet, Multinomial
from neuboots_paper.baselines.adversarial_ensemble import AdversarialDeepEnsemble, apply_fgsm, compute_input_ranges

METHODS: list[Callable[..., Any]] = [StandardBootstrap, BayesianBootstrap, DeepEnsemble, AdversarialDeepEnsemble]
RECIPE = TrainingConfig(epochs=3, batch_size=16, progress=False)
# Not Adam: a bias under BatchNorm has a gradient of rounding alone, which Adam would blow up to whole steps.
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
EXACT = TrainingConfig(epochs=3, batch_size=16, optimizer=SGD, precision="64-true", progress=False)


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def table(n: int = 50, dtype: torch.dtype = torch.float32) -> TensorDataset:
    return TensorDataset(rows(n, 4, dtype=dtype), torch.arange(n) % 3)


class Rows(Dataset[Any]):
    """The same rows, read one by one, with noise that each reading draws anew."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[i]
        return x + 0.1 * torch.randn_like(x), y


# -- together as in turn -------------------------------------------------------------------------------


def both_ways(method: Callable[..., Any], model: Any, data: Any, x: Any, **options: Any) -> tuple[Tensor, Tensor]:
    together, in_turn = (
        method(num_members=4, vectorized=way, **options).fit(model, data, EXACT) for way in (True, False)
    )
    assert (together.vectorized, in_turn.vectorized) == (True, False)
    for mine, theirs in zip(together.nets, in_turn.nets, strict=True):  # double precision: rounding alone
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-11)
    return together.predict(x, 4).samples, in_turn.predict(x, 4).samples


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("wrap", [lambda data: data, Rows], ids=["in memory", "read"])
def test_together_is_in_turn(method: Callable[..., Any], wrap: Callable[[Any], Any]) -> None:
    """Weights, BatchNorm statistics, orders and augmentations of every member, within the rounding of doubles."""
    x = rows(7, 4, seed=1, dtype=torch.float64)
    data = wrap(table(dtype=torch.float64))
    torch.testing.assert_close(*both_ways(method, lambda: TwoBranches(3).double(), data, x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
def test_together_is_in_turn_on_maps_with_void_pixels(method: Callable[..., Any]) -> None:
    x = rows(20, 2, 8, 8, dtype=torch.float64)
    y = (x[:, 0] > 0).long()
    y[::3, :5] = 255  # batches differ in how many pixels count
    loss = BrierLoss(ignore_index=255) if method is AdversarialDeepEnsemble else nn.CrossEntropyLoss(ignore_index=255)
    mine, theirs = both_ways(method, lambda: Upsampling().double(), TensorDataset(x, y), x[:3], loss=loss)
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_together_is_in_turn_for_squeezed_outputs_and_several_inputs() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.net(a + b).squeeze(-1)

    a, b = rows(50, 4, dtype=torch.float64), rows(50, 4, seed=1, dtype=torch.float64)
    data = TensorDataset(a, b, (a * b).sum(1))
    mine, theirs = both_ways(StandardBootstrap, Sum, data, (a[:5], b[:5]), loss=nn.MSELoss())
    assert mine.shape == (4, 5, 1)
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_stacked_nets_give_each_nets_own_output(case: Case) -> None:
    nets = [unwrap_model(make(case)) for _ in range(3)]
    for k, net in enumerate(nets):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += 0.1 * k
    if find_vmap_obstacle(nets, compute_output, case.x) is not None:
        assert case.name in ("written", "weight normed")  # a mask as index, and a slow path of torch's
        return
    with torch.no_grad():
        outputs = StackedNets(nets)(case.x, alike=True)
        torch.testing.assert_close(outputs, torch.stack([compute_output(net, case.x) for net in nets]))


def test_tied_and_frozen_weights_stay_so() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.a.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu())[:, :3]

    in_turn, together = (
        DeepEnsemble(num_members=3, vectorized=way).fit(Tied, table(), RECIPE) for way in (False, True)
    )
    for mine, theirs in zip(in_turn.nets, together.nets, strict=True):
        assert theirs.b.weight is theirs.a.weight
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)
    first = Tied()
    assert not torch.equal(in_turn.nets[0].a.weight, first.a.weight)


@pytest.mark.parametrize(
    ("net", "options", "why"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3)), {}, "torch.func cannot map the net"),
        (lambda: TwoBranches(3), {"clip_norm": 1.0}, "clip_norm looks at the gradients of one net"),
        (lambda: TwoBranches(3), {"num_workers": 1}, "workers read rows for one net at a time"),
        (lambda: TwoBranches(3), {"optimizer": torch.optim.LBFGS}, "optimizer LBFGS is not known"),
        (
            lambda: TwoBranches(3),
            {"optimizer": lambda ps: torch.optim.SGD([p for p in ps if p.ndim > 1], lr=0.1)},
            "is not known to update each element",
        ),
    ],
)
def test_what_cannot_be_trained_together_is_trained_in_turn_and_says_why(net: Any, options: Any, why: str) -> None:
    config = TrainingConfig(epochs=1, batch_size=16, progress=False, **options)
    with pytest.raises(ValueError, match=f"got together=True, but .*{why}.*; expected together=False"):
        DeepEnsemble(num_members=2, vectorized=True).fit(net, table(), config)
    if "num_workers" not in options:
        predictor = DeepEnsemble(num_members=2).fit(net, table(), config)
        assert not predictor.vectorized
        assert predictor.predict(rows(3, 4), 2).samples.shape == (2, 3, 3)


def test_small_nets_go_together_by_themselves_and_large_ones_do_not() -> None:
    small = DeepEnsemble(num_members=2).fit(lambda: MLP(4, 3, widths=(8,)), table(), RECIPE)
    large = DeepEnsemble(num_members=2).fit(lambda: MLP(4, 3, widths=(600, 600)), table(), RECIPE)
    assert (small.vectorized, large.vectorized) == (True, False)


def test_nets_trained_side_by_side_predict_side_by_side() -> None:
    predictor = DeepEnsemble(num_members=5).fit(lambda: TwoBranches(3), table(), RECIPE)
    assert predictor.vectorized
    in_turn = EnsemblePredictor(nn.ModuleList(predictor.nets).eval(), predictor.name)
    for n in (0, 1, 5, 300):  # 300 rows go through in three parts
        x = rows(n, 4, seed=1)
        torch.testing.assert_close(predictor.predict(x, 5).samples, in_turn.predict(x, 5).samples)
        torch.testing.assert_close(predictor.predict(x, 3).samples, predictor.predict(x, 5).samples[:3])
    before = predictor.predict(rows(4, 4), 5).samples
    predictor.module.stacked.fc.weight.data.mul_(3.0)
    assert not torch.allclose(predictor.predict(rows(4, 4), 5).samples, before)  # nothing is out of date
    with torch.inference_mode():
        assert predictor.predict(rows(4, 4), 5).samples.shape == (5, 4, 3)
    predictor.module.double()
    assert predictor.predict(rows(4, 4), 5).samples.dtype == torch.float64


class Counting(nn.Module):
    """Keeps a number from one pass to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.passes = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return self.head(x) * (1 + 0.01 * self.passes)


class FixedFeatures(nn.Module):
    """Random features that no state holds, under a head that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = torch.randn(4, 8), nn.Linear(8, 3)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x @ self.w).relu())


def sometimes_tanh() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), [nn.ReLU(), nn.Tanh()][int(torch.randint(0, 2, ()))], nn.Linear(8, 3))


def other_widths() -> nn.Module:
    width = int(torch.randint(4, 20, ()))
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # deprecated, and still found
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("model", [Counting, FixedFeatures, sometimes_tanh, other_widths, old_weight_norm])
def test_nets_that_only_seem_alike_are_trained_in_turn(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    config = replace(RECIPE, optimizer=SGD, seed=1)
    found, in_turn = (DeepEnsemble(num_members=4, vectorized=way).fit(model, table(), config) for way in (None, False))
    assert not found.vectorized
    if model is sometimes_tanh:
        assert {type(net[1]) for net in found.nets} == {nn.ReLU, nn.Tanh}
    x = rows(5, 4, seed=1)
    torch.testing.assert_close(found.predict(x, 4).samples, in_turn.predict(x, 4).samples)
    if model is old_weight_norm:
        save(found, tmp_path / "model")
        again = load(tmp_path / "model", model=model())
        torch.testing.assert_close(again.predict(x, 4).samples, found.predict(x, 4).samples)


@pytest.mark.parametrize("options", [{"padding_idx": 0}, {"sparse": True}])
def test_embeddings_that_torch_maps_wrongly_are_trained_in_turn(options: Any) -> None:
    ids = torch.arange(150).view(50, 3) % 10
    config = replace(RECIPE, optimizer=partial(torch.optim.SGD, lr=0.1))
    predictor = DeepEnsemble(num_members=2).fit(
        lambda: nn.Sequential(nn.Embedding(10, 6, **options), nn.Flatten(), nn.Linear(18, 3)),
        TensorDataset(ids, torch.arange(50) % 3),
        config,
    )
    assert not predictor.vectorized
    if "padding_idx" in options:
        assert all(not net[0].weight[0].any() for net in predictor.nets)


def test_nets_that_share_a_layer_are_refused() -> None:
    backbone = nn.Linear(4, 8)
    with pytest.raises(ValueError, match=r"gave nets that share weights.*copy.deepcopy what is pretrained"):
        DeepEnsemble(num_members=3).fit(lambda: nn.Sequential(backbone, nn.Linear(8, 3)), table(), RECIPE)


# -- members are named by (seed, k) --------------------------------------------------------------------


def test_member_0_is_the_plain_net_of_the_same_seed() -> None:
    config = replace(RECIPE, optimizer=SGD)
    plain = Deterministic().fit(lambda: TwoBranches(3), table(), config)
    for together in (False, True):
        predictor = DeepEnsemble(num_members=3, vectorized=together).fit(lambda: TwoBranches(3), table(), config)
        torch.testing.assert_close(predictor.nets[0].state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)
    one = DeepEnsemble(num_members=1).fit(lambda: TwoBranches(3), table(), config)
    assert all(torch.equal(mine, plain.state_dict()[key]) for key, mine in one.nets[0].state_dict().items())


def test_more_members_begin_with_the_fewer() -> None:
    few, more = (
        StandardBootstrap(num_members=k, vectorized=False).fit(lambda: TwoBranches(3), table(), RECIPE) for k in (2, 3)
    )
    for mine, theirs in zip(few.nets, more.nets, strict=False):
        assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in mine.state_dict().items())


def test_members_differ_in_first_weights_and_in_the_order_of_their_data() -> None:
    seen: dict[int, list[Tensor]] = {}

    class Spy(MLP):
        def __init__(self) -> None:
            super().__init__(4, 3, widths=(8,))
            self.first = [p.detach().clone() for p in self.parameters()]

        def forward(self, x: Tensor) -> Tensor:
            seen.setdefault(id(self), []).append(x.detach().clone())
            return super().forward(x)

    predictor = DeepEnsemble(num_members=2, vectorized=False).fit(Spy, table(), RECIPE)
    one, two = predictor.nets
    assert not torch.equal(one.first[0], two.first[0])
    batches = [[x for x in seen[id(net)] if len(x) == 16] for net in (one, two)]
    assert not torch.equal(batches[0][0], batches[1][0])


def test_a_net_made_once_is_refused() -> None:
    net = TwoBranches(3)
    with pytest.raises(ValueError, match="gave nets that share weights.*expected a new net at each call"):
        DeepEnsemble(num_members=2).fit(lambda: net, table(), RECIPE)


def test_a_stream_has_no_points_to_resample() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            for i in range(40):
                yield rows(4, seed=i), i % 3

    config = TrainingConfig(epochs=1, batch_size=8, steps_per_epoch=5, progress=False)
    with pytest.raises(ValueError, match="got a stream of unknown length; expected a data set with a length"):
        StandardBootstrap(num_members=2).fit(lambda: TwoBranches(3), Stream(), config)
    predictor = DeepEnsemble(num_members=2).fit(lambda: TwoBranches(3), Stream(), config)
    assert not predictor.vectorized


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_members": 0}, "got num_members=0; expected K ≥ 1"),
        ({"num_members": 2.5}, "got num_members=2.5"),
        ({"num_members": True}, "got num_members=True"),
        ({"vectorized": "no"}, "vectorized"),
    ],
)
def test_bad_options(method: Callable[..., Any], options: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        method(**options)


# -- the bootstrap -------------------------------------------------------------------------------------


def test_multinomial_weights_are_the_resampled_data_set_in_loss_and_gradient() -> None:
    x, y = rows(30, 4, dtype=torch.float64), torch.arange(30) % 3
    w = draw_point_weights(Multinomial(), 30, 1, seed=0)
    drawn = torch.repeat_interleave(torch.arange(30), w.long())
    assert len(drawn) == 30
    net = MLP(4, 3, widths=(8,)).double()
    weighted = _EnsembleObjective(nn.CrossEntropyLoss(), w, None, stacked=False)(net, Batch(x, y, torch.arange(30)))
    resampled = nn.functional.cross_entropy(net(x[drawn]), y[drawn])
    torch.testing.assert_close(weighted, resampled)
    for mine, theirs in zip(
        torch.autograd.grad(weighted, list(net.parameters())),
        torch.autograd.grad(resampled, list(net.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_every_member_has_weights_over_all_points_and_keeps_them() -> None:
    for weight_distribution in (Multinomial(), Dirichlet()):
        drawn = torch.stack([draw_point_weights(weight_distribution, 40, k, seed=3) for k in range(5)])
        torch.testing.assert_close(drawn.sum(1), torch.full((5,), 40.0))
        assert len({tuple(row.tolist()) for row in drawn}) == 5
        torch.testing.assert_close(drawn[2], draw_point_weights(weight_distribution, 40, 2, seed=3))


def linear_data(n: int = 400) -> tuple[Tensor, Tensor, np.ndarray, np.ndarray]:
    x = rows(n, 2, dtype=torch.float64)
    y = (
        x @ torch.tensor([1.0, -2.0], dtype=torch.float64)
        + 0.5
        + (0.3 + x[:, 0].abs()) * rows(n, seed=1, dtype=torch.float64)
    )
    design = np.column_stack([x.numpy(), np.ones(n)])
    return x, y, design, y.numpy()


# Full batches and many steps of momentum: converged to the minimum of each member's own loss.
CONVERGED = TrainingConfig(
    epochs=300,
    batch_size=400,
    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    lr_scheduler=constant_schedule,
    precision="64-true",
    progress=False,
)


@pytest.mark.parametrize(
    ("method", "weight_distribution"), [(StandardBootstrap, Multinomial()), (BayesianBootstrap, Dirichlet())]
)
def test_on_a_linear_model_members_are_weighted_least_squares_and_their_spread_the_closed_form(
    method: Callable[..., Any], weight_distribution: Any
) -> None:
    x, y, design, target = linear_data()
    K = 400
    predictor = method(loss=nn.MSELoss(), num_members=K).fit(
        lambda: nn.Linear(2, 1).double(), TensorDataset(x, y), CONVERGED
    )
    fitted = np.stack([np.append(net.weight.detach().numpy()[0], net.bias.detach().numpy()) for net in predictor.nets])
    for k in (0, 1, K - 1):  # exactly the refit on its weights
        w = draw_point_weights(weight_distribution, 400, k, seed=0).numpy().astype(float)
        refit = np.linalg.solve(design.T @ (w[:, None] * design), design.T @ (w * target))
        np.testing.assert_allclose(fitted[k], refit, rtol=1e-5, atol=1e-6)  # weights are kept in single precision
    # To first order the bootstrap's covariance is the sandwich (XᵀX)⁻¹ Xᵀ diag(r²) X (XᵀX)⁻¹; the rest is O(1/n).
    bread = np.linalg.inv(design.T @ design)
    residual = target - design @ (bread @ design.T @ target)
    closed = np.sqrt(np.diag(bread @ design.T @ (residual[:, None] ** 2 * design) @ bread))
    spread = fitted.std(0, ddof=1)
    # a standard deviation of K draws has relative standard error 1/√(2K); 2 % more for the O(1/n) part
    assert np.all(np.abs(spread / closed - 1) < standard_errors(3) / np.sqrt(2 * K) + 0.02)
    prediction = predictor.predict(x[:5], K)
    torch.testing.assert_close(prediction.std[:, 0].numpy(), (design[:5] @ fitted.T).std(1, ddof=1), rtol=1e-6, atol=0)


# -- adversarial training ------------------------------------------------------------------------------


def test_adversarial_training_moves_the_input_in_the_sign_of_the_gradient_on_its_own_scale() -> None:
    net = MLP(4, 3, widths=(8,))
    x, y = rows(10, 4) * torch.tensor([1.0, 10.0, 100.0, 0.1]), torch.arange(10) % 3
    ranges = compute_input_ranges(TensorDataset(x, y), RECIPE)
    torch.testing.assert_close(ranges[0], x.amax(0) - x.amin(0))
    x.requires_grad_()
    value = nn.CrossEntropyLoss()(net(x), y).mean()
    (gradient,) = torch.autograd.grad(value, x, retain_graph=True)
    moved = apply_fgsm(value, x, step=[0.01 * ranges[0]])
    torch.testing.assert_close(moved, (x + 0.01 * ranges[0] * gradient.sign()).detach())
    assert not moved.requires_grad
    assert bool(nn.CrossEntropyLoss()(net(moved), y).mean() > value)


def test_the_range_of_images_is_taken_channel_by_channel_over_all_batches() -> None:
    x = rows(40, 2, 3, 3) * torch.tensor([1.0, 5.0]).view(2, 1, 1)
    x[33, 1, 2, 2] = 900.0
    (found,) = compute_input_ranges(TensorDataset(x, torch.zeros(40)), RECIPE)
    expected = x.amax((0, 2, 3)) - x.amin((0, 2, 3))
    torch.testing.assert_close(found, expected.view(2, 1, 1))


def test_the_original_ensembles_objective_is_the_score_at_x_and_at_its_adversarial_twin() -> None:
    net, x, y = MLP(4, 3, widths=(8,)), rows(10, 4), torch.arange(10) % 3
    step = [torch.tensor(0.5)]
    batch = Batch(x, y, torch.arange(10))
    found = _EnsembleObjective(BrierLoss(), None, partial(apply_fgsm, step=step), stacked=False)(net, batch)
    inputs = x.clone().requires_grad_()
    value = BrierLoss()(net(inputs), y).mean()
    twin = x + 0.5 * torch.autograd.grad(value, inputs)[0].sign()
    torch.testing.assert_close(found, (BrierLoss()(net(x), y).mean() + BrierLoss()(net(twin), y).mean()))


def test_the_original_ensemble_in_regression_gives_mean_and_noise() -> None:
    x = rows(40, 4)
    method = AdversarialDeepEnsemble.regression(num_members=2)
    assert method.loss == GaussianNLL()
    predictor = method.fit(lambda: MLP(4, 2, widths=(8,)), TensorDataset(x, x.sum(1)), RECIPE)
    assert predictor.predict(x, 2).samples.shape == (2, 40, 2)


def test_an_input_without_a_gradient_is_not_moved() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.head(x) * (mask > 0)

    data = TensorDataset(rows(50, 4), torch.ones(50, 1), torch.arange(50) % 3)
    predictor = AdversarialDeepEnsemble(num_members=2).fit(Masked, data, RECIPE)
    assert predictor.predict((rows(5, 4), torch.ones(5, 1)), 2).samples.shape == (2, 5, 3)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), "a", True])
def test_a_step_of_no_size_is_refused(epsilon: Any) -> None:
    with pytest.raises(ValueError, match="got epsilon=.*; expected a positive fraction of the inputs' range"):
        AdversarialDeepEnsemble(epsilon=epsilon)


def test_inputs_that_cannot_be_moved_are_refused() -> None:
    data = TensorDataset(torch.zeros(8, 3, dtype=torch.long), torch.zeros(8, dtype=torch.long))
    with pytest.raises(ValueError, match="got inputs without a floating-point tensor; expected numbers"):
        AdversarialDeepEnsemble(num_members=2).fit(lambda: nn.Embedding(2, 3), data, RECIPE)


# -- a run cut short -----------------------------------------------------------------------------------


class Cut(Exception):
    pass


@pytest.mark.parametrize("together", [False, True])
def test_a_run_cut_short_goes_on_at_the_member_that_was_under_way(together: bool, tmp_path: Path) -> None:
    reports: list[EpochReport] = []

    def cut(report: EpochReport) -> None:
        reports.append(report)
        if report.epoch == 1 and (together or report.title == "member 2/3"):
            raise Cut

    method = StandardBootstrap(num_members=3, vectorized=together)
    whole = method.fit(lambda: TwoBranches(3), table(), RECIPE)
    options = {"epochs": 3, "batch_size": 16, "progress": False, "folder": tmp_path}
    with pytest.raises(Cut):
        method.fit(lambda: TwoBranches(3), table(), TrainingConfig(**options, on_epoch=cut))
    again: list[EpochReport] = []
    resumed = method.fit(lambda: TwoBranches(3), table(), TrainingConfig(**options, on_epoch=again.append))
    done = [(report.title, report.epoch) for report in again]
    rest = [("", 2)] if together else [("member 2/3", 2), *(("member 3/3", epoch) for epoch in range(3))]
    assert done == rest
    assert all(torch.equal(value, whole.state_dict()[key]) for key, value in resumed.state_dict().items())


def test_a_folder_of_other_members_is_refused(tmp_path: Path) -> None:
    config = TrainingConfig(epochs=1, batch_size=16, progress=False, folder=tmp_path)
    StandardBootstrap(num_members=2).fit(lambda: TwoBranches(3), table(), config)
    with pytest.raises(ValueError, match="was made by another run"):
        BayesianBootstrap(num_members=2).fit(lambda: TwoBranches(3), table(), config)


def test_a_folder_of_fewer_members_is_continued(tmp_path: Path) -> None:
    config = TrainingConfig(epochs=1, batch_size=16, progress=False, folder=tmp_path)
    few = StandardBootstrap(num_members=2, vectorized=False).fit(lambda: TwoBranches(3), table(), config)
    reports: list[EpochReport] = []
    method = StandardBootstrap(num_members=3, vectorized=False)
    more = method.fit(lambda: TwoBranches(3), table(), replace(config, on_epoch=reports.append))
    assert [report.title for report in reports] == ["member 3/3"]
    assert torch.equal(more.nets[1].fc.weight, few.nets[1].fc.weight)


def test_validation_figures_together_are_the_mean_of_those_in_turn() -> None:
    found: dict[bool, list[dict[str, float]]] = {}
    for together in (True, False):
        reports: list[EpochReport] = []
        config = TrainingConfig(epochs=1, batch_size=16, progress=False, on_epoch=reports.append)
        method = DeepEnsemble(num_members=3, vectorized=together)
        method.fit(lambda: TwoBranches(3), table(), config, val_data=table(20))
        found[together] = [report.val_metrics | {"train": report.loss} for report in reports]
    assert len(found[True]) == 1
    for name, value in found[True][0].items():
        assert value == pytest.approx(sum(figures[name] for figures in found[False]) / 3, rel=1e-4)


def test_seeds_of_members_are_whole_numbers_apart() -> None:
    seeds = [derive_member_seed(0, k) for k in range(1000)]
    assert seeds[0] == 0
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


DDP = """
import sys, torch
from pathlib import Path
from torch.utils.data import TensorDataset
from neuboots import Recipe
from neuboots.methods import AdversarialEnsemble, StandardBootstrap
from neuboots.nets import MLP
if __name__ == "__main__":
    devices, strategy, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, torch.arange(50) % 3)
    states = []
    for i, method in enumerate((StandardBootstrap(num_members=2), AdversarialEnsemble(num_members=2))):
        recipe = Recipe(
            epochs=2, batch_size=10, accelerator="cpu", devices=devices, strategy=strategy, progress=False,
            folder=folder / str(i),
        )
        predictor = method.fit(lambda: MLP(4, 3, widths=(8,)), data, recipe)
        states.append([net.state_dict() for net in predictor.nets])
    import os
    if os.environ.get("LOCAL_RANK", "0") == "0":
        torch.save(states, folder / "out.pt")
"""


@pytest.mark.slow
def test_members_on_two_processes_follow_those_on_one(tmp_path: Path) -> None:
    """Each member in turn on two CPU processes with the same global batch; in one process, side by side."""
    script = tmp_path / "ddp.py"
    script.write_text(DDP)
    found = []
    for devices, strategy in ((1, "auto"), (2, "ddp")):
        folder = tmp_path / strategy
        folder.mkdir()
        subprocess.run([sys.executable, str(script), str(devices), strategy, str(folder)], check=True, timeout=300)
        found.append(torch.load(folder / "out.pt"))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)  # 10 steps of rounding in another order of sums
