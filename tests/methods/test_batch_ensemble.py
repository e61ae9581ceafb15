"""BatchEnsemble against K explicit nets, each with the weights W ∘ s_k r_kᵀ."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _nets import QUICK, ZOO, Case, CenteredInTraining, ListedLayers, TwoBranches, class_data, make, noise
from _reference import standard_errors
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import BatchEnsemble
from neuboots._validation import ArgumentError
from neuboots.head import tile_rows
from neuboots.methods import batch_ensemble
from neuboots.methods._rank_one import (
    MemberBatchNorm,
    RankOneLayer,
    draw_factors,
    export_member,
    make_ensemble,
    run_members,
)
from neuboots.methods.batch_ensemble import BatchEnsemblePredictor
from neuboots.training import TrainingConfig, constant_schedule

K = 3


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def ensemble_of(net: nn.Module, num_members: int = K, init: Any = "normal", seed: int = 7) -> nn.Module:
    ensemble = make_ensemble(net, num_members, lambda layer, name: RankOneLayer(layer, num_members))
    draw_factors(ensemble, init, seed=seed)
    return ensemble


def member_weight(weight: Tensor, r: Tensor, s: Tensor, groups: int = 1) -> Tensor:
    """W ∘ s rᵀ, entry by entry: output o of group g reads the inputs of that group only."""
    outputs, inputs = weight.shape[:2]
    rows = []
    for o in range(outputs):
        first = (o // (outputs // groups)) * inputs
        rows.append(torch.stack([weight[o, i] * s[o] * r[first + i] for i in range(inputs)]))
    return torch.stack(rows)


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 4), (5, 6)),
    "linear on a sequence": (lambda: nn.Linear(6, 4), (5, 3, 6)),
    "linear without a bias": (lambda: nn.Linear(6, 4, bias=False), (5, 6)),
    "conv1d": (lambda: nn.Conv1d(6, 4, 3, padding=1), (5, 6, 7)),
    "conv2d": (lambda: nn.Conv2d(6, 4, 3, stride=2, padding=1), (5, 6, 7, 6)),
    "conv2d, circular": (lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"), (5, 6, 5, 6)),
    "conv2d, two groups": (lambda: nn.Conv2d(6, 4, (3, 1), groups=2, dilation=2), (5, 6, 7, 6)),
    "conv2d, depthwise": (lambda: nn.Conv2d(6, 12, 3, groups=6, bias=False), (5, 6, 7, 6)),
    "conv3d": (lambda: nn.Conv3d(6, 4, 2, groups=2), (5, 6, 3, 4, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rank_one_layer_equals_k_layers(name: str) -> None:
    """Outputs, gradients of W, r, s, b and x, and merged layers."""
    make_layer, shape = LAYERS[name]
    layer = make_layer()
    groups = getattr(layer, "groups", 1)
    plain = copy.deepcopy(layer)
    net = nn.Sequential(RankOneLayer(layer, K))
    member = net[0]
    with torch.no_grad():
        for parameter in (member.r, member.s, *([] if member.biases is None else [member.biases])):
            parameter.copy_(noise(*parameter.shape, seed=parameter.shape[1]))
    x = noise(*shape).requires_grad_()
    out = member(tile_rows(x, K))
    weights = [torch.cos(torch.arange(out[0].numel()) + k).view(out[0].shape) for k in range(K)]  # any function of y
    parts = out.view(K, len(x), *out.shape[1:])
    sum((parts[k] * weights[k]).sum() for k in range(K)).backward()

    W, r, s = (t.detach().clone().requires_grad_() for t in (plain.weight, member.r, member.s))
    b = None if member.biases is None else member.biases.detach().clone().requires_grad_()
    x_slow = x.detach().clone().requires_grad_()
    total = torch.zeros(())
    for k in range(K):
        W_k, b_k = member_weight(W, r[k], s[k], groups), None if b is None else b[k]
        y = F.linear(x_slow, W_k, b_k) if isinstance(plain, nn.Linear) else plain._conv_forward(x_slow, W_k, b_k)
        torch.testing.assert_close(parts[k], y, rtol=1e-4, atol=1e-5)
        total = total + (y * weights[k]).sum()
        merged = export_member(net, k)[0]
        assert type(merged) is type(plain)
        torch.testing.assert_close(merged.weight, W_k)
        torch.testing.assert_close(merged(x), y, rtol=1e-4, atol=1e-5)
    total.backward()
    pairs = [(layer.weight, W), (member.r, r), (member.s, s), (x, x_slow)]
    for mine, theirs in [*pairs, *([] if b is None else [(member.biases, b)])]:
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler hides it if it is an error
@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_members_equal_explicit_nets(case: Case) -> None:
    """Selected members in any order; a tile in evaluation and in training."""
    net = make(case)
    ensemble = ensemble_of(getattr(net, "module", getattr(net, "_orig_mod", net))).eval()
    separate = [export_member(ensemble, k) for k in range(K)]
    assert not any(isinstance(module, RankOneLayer) for module in separate[0].modules())
    with torch.no_grad():
        outputs = run_members(ensemble, case.x, [2, 0])
        for mine, k in zip(outputs, (2, 0), strict=True):
            torch.testing.assert_close(mine, run_members(separate[k], case.x, [k])[0], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(outputs[0], outputs[1])
    outputs = run_members(ensemble.train(), case.x, range(K))
    for k, net in enumerate(separate):
        torch.testing.assert_close(outputs[k], run_members(net.train(), case.x, [k])[0], rtol=1e-4, atol=1e-4)
    norms = {name: norm for name, norm in ensemble.named_modules() if isinstance(norm, MemberBatchNorm)}
    for name, norm in norms.items():
        for k, net in enumerate(separate):
            torch.testing.assert_close(norm.norms[k].running_var, net.get_submodule(name).running_var)
    assert bool(norms) == (case.name in ("sequential", "two branches", "data parallel", "compiled"))


def test_training_averages_the_losses_of_members_over_all_examples() -> None:
    """Two steps of gradient descent against explicit nets."""
    x, y = noise(10, 4), torch.arange(10) % 3
    sgd = partial(torch.optim.SGD, lr=0.3)
    config = TrainingConfig(epochs=2, batch_size=10, optimizer=sgd, lr_scheduler=constant_schedule, progress=False)
    start = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    predictor = BatchEnsemble(num_members=K).fit(lambda: copy.deepcopy(start), TensorDataset(x, y), config)

    initial = ensemble_of(copy.deepcopy(start), seed=0).state_dict()
    state = {name: value.detach().clone().requires_grad_() for name, value in initial.items()}
    for _ in range(2):
        total = torch.zeros(())
        for k in range(K):
            h = x
            for name in ("0", "2"):
                W = member_weight(state[f"{name}.layer.weight"], state[f"{name}.r"][k], state[f"{name}.s"][k])
                h = h @ W.T + state[f"{name}.biases"][k]
                h = h.tanh() if name == "0" else h
            total = total + F.cross_entropy(h, y) / K
        grads = torch.autograd.grad(total, list(state.values()))
        state = {
            name: (value - 0.3 * grad).detach().requires_grad_()
            for (name, value), grad in zip(state.items(), grads, strict=True)
        }
    for name, value in predictor.state_dict().items():
        torch.testing.assert_close(value, state[name].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_factors_have_no_weight_decay(optimizer: Any) -> None:
    config = replace(QUICK, optimizer=partial(optimizer, lr=0.1, weight_decay=0.1))
    start = TwoBranches()
    method = BatchEnsemble(loss=lambda outputs, y: 0.0 * outputs.sum(1))
    predictor = method.fit(lambda: copy.deepcopy(start), class_data(), config)
    initial = ensemble_of(copy.deepcopy(start), 4, seed=0).state_dict()
    for name, value in predictor.state_dict().items():
        if name.endswith((".r", ".s")):
            assert torch.equal(value, initial[name]), name
        elif name.endswith((".layer.weight", ".biases")):
            assert bool((value.abs() < initial[name].abs()).all()), name


def test_initial_factors_have_their_distribution() -> None:
    net = ensemble_of(nn.Linear(300, 200), 4, "random_sign")
    signs = torch.cat([net[0].r.flatten(), net[0].s.flatten()]).detach()
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < standard_errors(1) / len(signs) ** 0.5
    assert not torch.equal(net[0].r[0], net[0].r[1])
    draw_factors(net, "normal", seed=7)
    normal = torch.cat([net[0].r.flatten(), net[0].s.flatten()]).detach()
    assert abs(float(normal.mean()) - 1) < standard_errors(2) * 0.5 / len(normal) ** 0.5
    assert abs(float(normal.std()) - 0.5) < standard_errors(2) * 0.5 / (2 * len(normal)) ** 0.5


def test_replicates_are_exported_members_and_validation_is_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[Any] = []
    x, y = noise(9, 4, seed=5), torch.arange(9) % 3
    config = replace(QUICK, epochs=1, on_epoch=reports.append)
    predictor = BatchEnsemble().fit(TwoBranches, class_data(), config, val_data=TensorDataset(x, y))
    members = torch.stack([predictor.export(k)(x).detach() for k in range(4)])
    assert reports[0].val_metrics["loss"] == pytest.approx(
        sum(float(F.cross_entropy(z, y)) for z in members) / 4, rel=1e-4
    )
    samples = predictor.predict(x, 8, seed=2).samples
    for half in (samples[:4], samples[4:]):  # all four, in some order
        order = torch.cdist(half.flatten(1), members.flatten(1)).argmin(1)
        assert sorted(order.tolist()) == [0, 1, 2, 3]
        torch.testing.assert_close(half, members[order], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(predictor.predict(x, 100).mean, members.mean(0), rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentError):
        predictor.export(4)
    sizes: list[int] = []  # of the groups of members that are evaluated together
    run = batch_ensemble.run_members
    monkeypatch.setattr(batch_ensemble, "run_members", lambda e, x, m: sizes.append(len(m)) or run(e, x, m))
    for limit, expected in ((3 * x.numel() * 4, [3, 1]), (1, [1, 1, 1, 1])):
        sizes.clear()
        monkeypatch.setattr(batch_ensemble, "_MAX_TILED_BYTES", limit)
        torch.testing.assert_close(predictor.predict(x, 4, seed=2).samples, samples[:4])
        assert sizes == expected


# -- nets that cannot be tiled -------------------------------------------------------------------------


class TimeFirst(nn.Module):
    """Has time on the first axis, where the tiles are expected."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return 1e-3 * self.head(self.body(x.transpose(0, 1)).relu().mean(0))


class ReadsWeights(ListedLayers):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x).relu(), self.last.weight, self.last.bias)


class HalfListed(ListedLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.steps[0](x).relu())


class NormByReference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.steps = [self.norm]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.steps[0](self.first(x)))


class Functional(nn.Module):
    """Calls a norm but no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.fc.weight)


def fit(factory: Any, x: Tensor) -> BatchEnsemblePredictor:
    return BatchEnsemble().fit(factory, TensorDataset(x, torch.arange(len(x)) % 3), QUICK)


@pytest.mark.parametrize(
    ("factory", "shape"),
    [
        (nn.Flatten, (9, 3)),
        (TimeFirst, (9, 8, 2)),
        (TimeFirst, (9, 7, 2)),
        (ReadsWeights, (9, 4)),
        (CenteredInTraining, (9, 4)),
        (ListedLayers, (9, 4)),
        (HalfListed, (9, 4)),
        (NormByReference, (9, 4)),
        (Functional, (9, 4)),
    ],
)
def test_nets_whose_members_cannot_be_tiled_raise(factory: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        fit(factory, noise(*shape))


class CalledByName(ListedLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last.forward(self.first.forward(x).relu())


class TinyWithDropout(ListedLayers):
    def forward(self, x: Tensor) -> Tensor:
        return 1e-6 * self.last(F.dropout(self.first(x), 0.5, self.training))


class AttentionOfTwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        assert self.head.in_features == 4
        return self.head(self.attention(x[:, None] * x[:, None]))[:, 0]


@pytest.mark.parametrize(
    "factory",
    [
        CalledByName,
        TinyWithDropout,
        AttentionOfTwoInputs,
        lambda: nn.DataParallel(nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))),
    ],
)
def test_unusual_nets_are_trained(factory: Any) -> None:
    state = torch.get_rng_state()
    predictor = fit(factory, noise(9, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert bool((predictor.predict(noise(5, 4), 4).std > 0).all())
    assert all("forward" not in vars(module) for module in predictor.module.modules())


class ScaledNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


def test_members_have_their_own_norms_of_any_class() -> None:
    def factory() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), ScaledNorm(8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    predictor = fit(factory, noise(40, 4))
    scaled, plain = predictor.module[1], predictor.module[2]
    assert isinstance(scaled, MemberBatchNorm)
    assert isinstance(plain, MemberBatchNorm)
    assert all(type(norm) is ScaledNorm for norm in scaled.norms)
    assert not torch.allclose(scaled.norms[0].running_mean, scaled.norms[1].running_mean)


def test_tiling_skips_parts_that_are_not_per_example() -> None:
    x = {"a": torch.arange(2.0)[:, None], "scale": torch.tensor(3.0), "table": torch.ones(5, 2), "name": "b"}
    tiled = tile_rows(x, 3)
    assert tiled["a"][:, 0].tolist() == [0, 1, 0, 1, 0, 1]
    assert all(tiled[key] is x[key] for key in ("scale", "table", "name"))
