"""Ensembles: vectorized training equals sequential training, bootstrap weights equal resampled data, and resuming."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _nets import ZOO, Case, Stream, class_data, make, noise
from _reference import standard_errors
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from neuboots import BayesianBootstrap, DeepEnsemble, Deterministic, StandardBootstrap, load, save
from neuboots._validation import ArgumentError
from neuboots.head import compute_output, unwrap_model
from neuboots.loading import Batch
from neuboots.losses import BrierLoss
from neuboots.methods._vmap import StackedNets, find_vmap_obstacle
from neuboots.methods.ensembles import EnsemblePredictor, _EnsembleObjective
from neuboots.nets import MLP
from neuboots.testing import TwoBranches, Upsampling
from neuboots.training import EpochReport, TrainingConfig, constant_schedule
from neuboots_paper.baselines import AdversarialDeepEnsemble

METHODS: list[Callable[..., Any]] = [StandardBootstrap, BayesianBootstrap, DeepEnsemble, AdversarialDeepEnsemble]
CONFIG = TrainingConfig(epochs=3, batch_size=16, progress=False)
# Not Adam: a bias before BatchNorm has a gradient of rounding errors only, which Adam would scale to full steps.
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
EXACT = replace(CONFIG, optimizer=SGD, precision="64-true")


def make_net() -> nn.Module:
    return TwoBranches(3)


class Augmented(Dataset[Any]):
    """The examples of another data set, with noise drawn at each reading."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[i]
        return x + 0.1 * torch.randn_like(x), y


# -- vectorized training -------------------------------------------------------------------------------


class Product(nn.Module):
    """Two inputs and outputs (N,)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.net(a + b).squeeze(-1)


class Tied(nn.Module):
    """Tied weights and a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.a.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())[:, :3]


def make_case(name: str) -> tuple[Callable[[], nn.Module], Any, Any, dict[str, Any]]:
    """Factory of a net, data, inputs and options of the method."""
    x = noise(50, 4).double()
    data = TensorDataset(x, torch.arange(50) % 3)
    if name == "maps with ignored pixels":
        maps = noise(20, 2, 8, 8).double()
        labels = (maps[:, 0] > 0).long()
        labels[::3, :5] = 255  # batches differ in their number of pixels that count
        return Upsampling, TensorDataset(maps, labels), maps[:3], {"ignore_index": 255}
    if name == "two inputs, no output axis":
        other = noise(50, 4, seed=1).double()
        data = TensorDataset(x, other, (x * other).sum(1))
        return Product, data, (x[:5], other[:5]), {"loss": nn.MSELoss()}
    return Tied if name == "tied" else make_net, Augmented(data) if name == "augmented" else data, x[:7], {}


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *((method, name) for method in METHODS for name in ("in memory", "augmented", "maps with ignored pixels")),
        (StandardBootstrap, "two inputs, no output axis"),
        (DeepEnsemble, "tied"),
    ],
)
def test_vectorized_training_equals_sequential_training(method: Callable[..., Any], name: str) -> None:
    """Weights, BatchNorm statistics, orders and augmentations of every member, up to rounding of doubles."""
    factory, data, x, options = make_case(name)
    if "ignore_index" in options:
        adversarial = method is AdversarialDeepEnsemble
        options = {"loss": (BrierLoss if adversarial else nn.CrossEntropyLoss)(ignore_index=255)}
    vectorized, sequential = (
        method(num_members=4, vectorized=mode, **options).fit(lambda: factory().double(), data, EXACT)
        for mode in (True, False)
    )
    assert (vectorized.vectorized, sequential.vectorized) == (True, False)
    for mine, theirs in zip(vectorized.nets, sequential.nets, strict=True):
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-11)
        assert name != "tied" or mine.b.weight is mine.a.weight
    samples = [predictor.predict(x, 4).samples for predictor in (vectorized, sequential)]
    torch.testing.assert_close(*samples, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_stacked_nets_give_the_output_of_each_net(case: Case) -> None:
    nets = [unwrap_model(make(case)) for _ in range(3)]
    for k, net in enumerate(nets):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += 0.1 * k
    if find_vmap_obstacle(nets, case.x) is not None:
        # a mask as index, and a slow fallback of torch; outputs that are moved to axis 1
        assert case.name in ("written", "weight normed", "tokens", "soft-capped tokens")
        return
    with torch.no_grad():
        outputs = StackedNets(nets)(case.x, shared_input=True)
        torch.testing.assert_close(outputs, torch.stack([compute_output(net, case.x) for net in nets]))


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3)), {}),
        (make_net, {"clip_norm": 1.0}),
        (make_net, {"num_workers": 1}),
        (make_net, {"devices": 2, "strategy": "ddp"}),
        (make_net, {"patience": 1}),
        (make_net, {"optimizer": torch.optim.LBFGS}),
        (make_net, {"optimizer": lambda ps: torch.optim.SGD([p for p in ps if p.ndim > 1], lr=0.1)}),
    ],
)
def test_options_that_prevent_vectorized_training(factory: Any, options: Any) -> None:
    config = replace(CONFIG, epochs=1, **options)
    with pytest.raises(ArgumentError) as error:
        DeepEnsemble(num_members=2, vectorized=True).fit(factory, class_data(), config)
    assert error.value.name == "vectorized"
    if not {"num_workers", "devices", "patience"} & options.keys():
        assert not DeepEnsemble(num_members=2).fit(factory, class_data(), config).vectorized


@pytest.mark.parametrize("vectorized", [True, False])
def test_loss_that_reduces_raises(vectorized: bool) -> None:
    with pytest.raises(ArgumentError, match="loss"):
        DeepEnsemble(nn.functional.cross_entropy, num_members=2, vectorized=vectorized).fit(
            make_net, class_data(), CONFIG
        )


def test_size_of_the_net_decides_on_vectorized_training() -> None:
    for widths, expected in (((8,), True), ((600, 600), False)):
        factory = partial(MLP, 4, 3, widths=widths)
        assert DeepEnsemble(num_members=2).fit(factory, class_data(), CONFIG).vectorized == expected


def test_stacked_predictor_equals_separate_nets() -> None:
    predictor = DeepEnsemble(num_members=5).fit(make_net, class_data(), CONFIG)
    assert predictor.vectorized
    separate = EnsemblePredictor(nn.ModuleList(predictor.nets).eval(), predictor.name)
    for n in (0, 1, 5, 300):  # 300 rows are split in three
        x = noise(n, 4, seed=1)
        torch.testing.assert_close(predictor.predict(x, 5).samples, separate.predict(x, 5).samples)
        torch.testing.assert_close(predictor.predict(x, 3).samples, predictor.predict(x, 5).samples[:3])
    before = predictor.predict(noise(4, 4), 5).samples
    predictor.module.stacked.fc.weight.data.mul_(3.0)
    assert not torch.allclose(predictor.predict(noise(4, 4), 5).samples, before)
    with torch.inference_mode():
        assert predictor.predict(noise(4, 4), 5).samples.shape == (5, 4, 3)
    predictor.module.double()
    assert predictor.predict(noise(4, 4), 5).samples.dtype == torch.float64


class Counting(nn.Module):
    """Keeps a number from one pass to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.passes = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return self.head(x) * (1 + 0.01 * self.passes)


class FixedFeatures(nn.Module):
    """Random features that are not part of the state, before a head initialised with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = torch.randn(4, 8), nn.Linear(8, 3)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x @ self.w).relu())


def random_activation() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), [nn.ReLU(), nn.Tanh()][int(torch.randint(0, 2, ()))], nn.Linear(8, 3))


def deprecated_weight_norm() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("factory", [Counting, FixedFeatures, random_activation, deprecated_weight_norm])
def test_nets_that_differ_in_more_than_tensors_are_trained_sequentially(factory: Any, tmp_path: Path) -> None:
    config = replace(CONFIG, optimizer=SGD, seed=1)
    default, sequential = (
        DeepEnsemble(num_members=4, vectorized=mode).fit(factory, class_data(), config) for mode in (None, False)
    )
    assert not default.vectorized
    if factory is random_activation:
        assert {type(net[1]) for net in default.nets} == {nn.ReLU, nn.Tanh}
    x = noise(5, 4, seed=1)
    torch.testing.assert_close(default.predict(x, 4).samples, sequential.predict(x, 4).samples)
    if factory is deprecated_weight_norm:
        save(default, tmp_path / "model")
        loaded = load(tmp_path / "model", model=factory())
        torch.testing.assert_close(loaded.predict(x, 4).samples, default.predict(x, 4).samples)


@pytest.mark.parametrize("options", [{"padding_idx": 0}, {"sparse": True}])
def test_embeddings_that_cannot_be_mapped_are_trained_sequentially(options: Any) -> None:
    def factory() -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 6, **options), nn.Flatten(), nn.Linear(18, 3))

    data = TensorDataset(torch.arange(150).view(50, 3) % 10, torch.arange(50) % 3)
    config = replace(CONFIG, optimizer=partial(torch.optim.SGD, lr=0.1))
    predictor = DeepEnsemble(num_members=2).fit(factory, data, config)
    assert not predictor.vectorized
    assert "sparse" in options or all(not net[0].weight[0].any() for net in predictor.nets)


# -- members -------------------------------------------------------------------------------------------


def test_member_0_is_the_deterministic_net() -> None:
    config = replace(CONFIG, optimizer=SGD)
    state = Deterministic().fit(make_net, class_data(), config).state_dict()
    for vectorized in (False, True):
        predictor = DeepEnsemble(num_members=3, vectorized=vectorized).fit(make_net, class_data(), config)
        torch.testing.assert_close(predictor.nets[0].state_dict(), state, rtol=1e-4, atol=1e-5)
    one = DeepEnsemble(num_members=1).fit(make_net, class_data(), config)
    assert all(torch.equal(value, state[key]) for key, value in one.nets[0].state_dict().items())


def test_larger_ensemble_starts_with_the_members_of_a_smaller_one() -> None:
    small, large = (
        StandardBootstrap(num_members=k, vectorized=False).fit(make_net, class_data(), CONFIG) for k in (2, 3)
    )
    for mine, theirs in zip(small.nets, large.nets, strict=False):
        assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in mine.state_dict().items())


def test_module_is_copied_and_initialised_again_for_each_member() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    before = net[0].weight.detach().clone()
    nets = DeepEnsemble(num_members=2).fit(net, class_data(), CONFIG).nets
    assert torch.equal(net[0].weight, before)
    assert not torch.allclose(nets[0][0].weight, nets[1][0].weight)


@pytest.mark.parametrize("share", ["net", "layer"])
def test_factories_of_shared_weights_raise(share: str) -> None:
    net, backbone = make_net(), nn.Linear(4, 8)
    factory = (lambda: net) if share == "net" else (lambda: nn.Sequential(backbone, nn.Linear(8, 3)))
    with pytest.raises(ArgumentError) as error:
        DeepEnsemble(num_members=2).fit(factory, class_data(), CONFIG)
    assert error.value.name == "model"


def test_iterable_data_set_has_no_points_to_resample() -> None:
    data = Stream(*class_data(40).tensors)
    config = TrainingConfig(epochs=1, batch_size=8, steps_per_epoch=5, progress=False)
    with pytest.raises(ArgumentError) as error:
        StandardBootstrap(num_members=2).fit(make_net, data, config)
    assert error.value.name == "data"
    assert not DeepEnsemble(num_members=2).fit(make_net, data, config).vectorized


# -- bootstrap weights ---------------------------------------------------------------------------------


def test_multinomial_weights_equal_the_resampled_data_in_loss_and_gradient() -> None:
    x, y = noise(30, 4).double(), torch.arange(30) % 3
    w = StandardBootstrap(num_members=2)._draw_weights(TensorDataset(x, y), 0)[1]
    rows = torch.repeat_interleave(torch.arange(30), w.long())
    assert len(rows) == 30
    net = MLP(4, 3, widths=(8,)).double()
    loss = DeepEnsemble().loss
    weighted = _EnsembleObjective(loss, w, None, stacked=False)(net, Batch(x, y, torch.arange(30)))
    resampled = nn.functional.cross_entropy(net(x[rows]), y[rows])
    torch.testing.assert_close(weighted, resampled)
    gradients = [torch.autograd.grad(value, list(net.parameters())) for value in (weighted, resampled)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("method_class", [StandardBootstrap, BayesianBootstrap])
def test_linear_members_are_weighted_least_squares_with_the_sandwich_variance(method_class: Any) -> None:
    K, n = 100, 400
    x = noise(n, 2).double()
    error = (0.3 + x[:, 0].abs()) * torch.randn(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0], dtype=torch.float64) + 0.5 + error
    design, target = np.column_stack([x.numpy(), np.ones(n)]), y.numpy()
    # 40 steps on all rows with a rate near the inverse curvature: converged to the minimum of each member's objective
    sgd = partial(torch.optim.SGD, lr=0.35)
    config = replace(EXACT, epochs=40, batch_size=n, optimizer=sgd, lr_scheduler=constant_schedule)
    method, data = method_class(loss=nn.MSELoss(), num_members=K), TensorDataset(x, y)
    predictor = method.fit(lambda: nn.Linear(2, 1).double(), data, config)
    weights = method._draw_weights(data, 0).numpy().astype(float)
    fitted = np.stack([np.append(net.weight.detach().numpy()[0], net.bias.detach().numpy()) for net in predictor.nets])
    for k in (0, 1, K - 1):
        w = weights[k]
        refit = np.linalg.solve(design.T @ (w[:, None] * design), design.T @ (w * target))
        np.testing.assert_allclose(fitted[k], refit, rtol=1e-5, atol=1e-6)  # weights are in single precision
    # To first order the bootstrap's covariance is the sandwich (XᵀX)⁻¹ Xᵀ diag(r²) X (XᵀX)⁻¹; the rest is O(1/n).
    bread = np.linalg.inv(design.T @ design)
    residual = target - design @ (bread @ design.T @ target)
    sandwich = np.sqrt(np.diag(bread @ design.T @ (residual[:, None] ** 2 * design) @ bread))
    # a standard deviation of K draws has relative standard error 1/√(2K); 2 % more for the O(1/n) part
    assert np.all(np.abs(fitted.std(0, ddof=1) / sandwich - 1) < standard_errors(3) / np.sqrt(2 * K) + 0.02)
    std = predictor.predict(x[:5], K).std[:, 0].numpy()
    np.testing.assert_allclose(std, (design[:5] @ fitted.T).std(1, ddof=1), rtol=1e-6)


# -- checkpoints and validation ------------------------------------------------------------------------


class InterruptionError(Exception):
    pass


@pytest.mark.parametrize("vectorized", [False, True])
def test_interrupted_run_resumes_at_the_current_member(vectorized: bool, tmp_path: Path) -> None:
    def interrupt(report: EpochReport) -> None:
        if report.epoch == 1 and (vectorized or report.title == "member 2/3"):
            raise InterruptionError

    method = StandardBootstrap(num_members=3, vectorized=vectorized)
    expected = method.fit(make_net, class_data(), CONFIG).state_dict()
    config = replace(CONFIG, folder=tmp_path)
    with pytest.raises(InterruptionError):
        method.fit(make_net, class_data(), replace(config, on_epoch=interrupt))
    reports: list[EpochReport] = []
    resumed = method.fit(make_net, class_data(), replace(config, on_epoch=reports.append))
    rest = [("", 2)] if vectorized else [("member 2/3", 2), *(("member 3/3", epoch) for epoch in range(3))]
    assert [(report.title, report.epoch) for report in reports] == rest
    assert all(torch.equal(value, expected[key]) for key, value in resumed.state_dict().items())


def test_checkpoints_are_reused_by_a_larger_ensemble_of_the_same_method(tmp_path: Path) -> None:
    config = replace(CONFIG, epochs=1, folder=tmp_path)
    small = StandardBootstrap(num_members=2, vectorized=False).fit(make_net, class_data(), config)
    reports: list[EpochReport] = []
    method = StandardBootstrap(num_members=3, vectorized=False)
    large = method.fit(make_net, class_data(), replace(config, on_epoch=reports.append))
    assert [report.title for report in reports] == ["member 3/3"]
    assert torch.equal(large.nets[1].fc.weight, small.nets[1].fc.weight)
    with pytest.raises(ValueError, match="expected"):
        BayesianBootstrap(num_members=2, vectorized=False).fit(make_net, class_data(), config)


def test_validation_metrics_of_stacked_nets_are_means_over_members() -> None:
    metrics: dict[bool, list[dict[str, float]]] = {}
    for vectorized in (True, False):
        reports: list[EpochReport] = []
        method = DeepEnsemble(num_members=3, vectorized=vectorized)
        config = replace(CONFIG, epochs=1, on_epoch=reports.append)
        method.fit(make_net, class_data(), config, val_data=class_data(20))
        metrics[vectorized] = [report.val_metrics | {"train": report.loss} for report in reports]
    assert len(metrics[True]) == 1
    for name, value in metrics[True][0].items():
        assert value == pytest.approx(sum(each[name] for each in metrics[False]) / 3, rel=1e-4)
