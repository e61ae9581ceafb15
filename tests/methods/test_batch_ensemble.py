"""BatchEnsemble against K nets written out one by one, each with the weights W ∘ s_k r_kᵀ."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _nets import ZOO, Case, TwoBranches, make
from _reference import standard_errors
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import TrainingConfig, load, save
from neuboots._pytree import tile_rows
from neuboots.methods import batch_ensemble
from neuboots.methods.batch_ensemble import (
    BatchEnsemble,
    BatchEnsemblePredictor,
    MemberBatchNorm,
    RankOneLayer,
    draw_factors,
    export_member,
    find_rank_one_layers,
    make_ensemble,
    run_members,
)
from neuboots.nets import MLP
from neuboots.training import constant_schedule

RECIPE = TrainingConfig(epochs=2, batch_size=16, progress=False)
K = 3


@pytest.fixture(autouse=True)
def _first_weights() -> None:
    torch.manual_seed(0)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes() -> TensorDataset:
    return TensorDataset(rows(50, 4), torch.arange(50) % 3)


def ensemble_of(net: nn.Module, num_members: int = K, init: Any = "normal") -> nn.Module:
    ensemble = make_ensemble(net, num_members, lambda layer, name: RankOneLayer(layer, num_members))
    draw_factors(ensemble, init, seed=7)
    return ensemble


def member_weight(weight: Tensor, r: Tensor, s: Tensor, groups: int = 1) -> Tensor:
    """W ∘ s rᵀ, entry by entry: output o of group g reads the inputs of that group alone."""
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
def test_a_layer_is_k_layers_of_weights_w_times_s_r(name: str) -> None:
    """Outputs, and the gradients of W, r, s, b and x."""
    make_layer, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make_layer()
    groups = getattr(layer, "groups", 1)
    plain = copy.deepcopy(layer)
    member = RankOneLayer(layer, K)
    with torch.no_grad():
        for parameter in (member.r, member.s, *([] if member.biases is None else [member.biases])):
            parameter.copy_(rows(*parameter.shape, seed=parameter.shape[1]))
    x = rows(*shape).requires_grad_()
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
    total.backward()
    pairs = [(layer.weight, W), (member.r, r), (member.s, s), (x, x_slow)]
    pairs += [] if b is None else [(member.biases, b)]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_a_folded_layer_has_the_weights_w_times_s_r(name: str) -> None:
    layer, shape = LAYERS[name]
    net = ensemble_of(nn.Sequential(layer()))
    member = net[0]
    plain = export_member(net, 1)[0]
    groups = getattr(plain, "groups", 1)
    assert type(plain) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    torch.testing.assert_close(plain.weight, member_weight(member.layer.weight, member.r[1], member.s[1], groups))
    x = rows(*shape)
    torch.testing.assert_close(plain(x), run_members(net, x, [1])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler hides it, which an error cannot be
@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_members_of_any_net_are_those_of_explicit_nets(case: Case) -> None:
    """Some of the members, in any order; a tile in evaluation and in training."""
    net = make(case)
    ensemble = ensemble_of(getattr(net, "module", getattr(net, "_orig_mod", net))).eval()
    apart = [export_member(ensemble, k) for k in range(K)]
    assert not any(isinstance(module, RankOneLayer) for module in apart[0].modules())
    with torch.no_grad():
        together = run_members(ensemble, case.x, [2, 0])
        for mine, k in zip(together, (2, 0), strict=True):
            torch.testing.assert_close(mine, run_members(apart[k], case.x, [k])[0], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(together[0], together[1])
    ensemble.train()
    together = run_members(ensemble, case.x, range(K))
    for k, net in enumerate(apart):
        torch.testing.assert_close(together[k], run_members(net.train(), case.x, [k])[0], rtol=1e-4, atol=1e-4)
    norms = {name: norm for name, norm in ensemble.named_modules() if isinstance(norm, batch_ensemble.MemberBatchNorm)}
    for name, norm in norms.items():
        for k, net in enumerate(apart):
            torch.testing.assert_close(norm.norms[k].running_var, net.get_submodule(name).running_var)
    assert bool(norms) == (case.name in ("sequential", "two branches", "data parallel", "compiled"))


def test_every_member_sees_every_row_and_their_losses_are_averaged() -> None:
    """Two steps of gradient descent, against nets written out."""
    x, y = rows(10, 4), torch.arange(10) % 3
    sgd = partial(torch.optim.SGD, lr=0.3)
    config = TrainingConfig(epochs=2, batch_size=10, optimizer=sgd, lr_scheduler=constant_schedule, progress=False)
    torch.manual_seed(1)
    start = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    predictor = BatchEnsemble(num_members=K).fit(lambda: copy.deepcopy(start), TensorDataset(x, y), config)

    first = ensemble_of(copy.deepcopy(start))
    draw_factors(first, "normal", seed=0)
    state = {name: value.detach().clone().requires_grad_() for name, value in first.state_dict().items()}
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


def zero_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return 0.0 * outputs.sum(1)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_factors_get_no_weight_decay(optimizer: Any) -> None:
    config = replace(RECIPE, optimizer=partial(optimizer, lr=0.1, weight_decay=0.1))
    torch.manual_seed(1)
    start = TwoBranches()
    predictor = BatchEnsemble(loss=zero_loss).fit(lambda: copy.deepcopy(start), classes(), config)
    first = ensemble_of(copy.deepcopy(start), 4)
    draw_factors(first, "normal", seed=0)
    was = first.state_dict()
    for name, value in predictor.state_dict().items():
        if name.endswith((".r", ".s")):
            assert torch.equal(value, was[name]), name
        elif name.endswith((".layer.weight", ".biases")):
            assert bool((value.abs() < was[name].abs()).all()), name


class OneUnlessVoid:
    """A loss of 1 for any output, and of 0 where the target is void."""

    ignore_index = 7

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return 0 * outputs[:, 0] + (y != 7).float()


def test_void_targets_do_not_count() -> None:
    reports: list[Any] = []
    y = torch.ones(20).long()
    y[::3] = 7
    config = replace(RECIPE, on_epoch=reports.append)
    BatchEnsemble(OneUnlessVoid()).fit(TwoBranches, TensorDataset(rows(20, 4), y), config)
    assert reports[0].loss == pytest.approx(1)


def test_an_optimiser_without_weight_decay_is_left_alone() -> None:
    config = replace(RECIPE, epochs=1, optimizer=torch.optim.LBFGS)
    assert BatchEnsemble().fit(TwoBranches, classes(), config).predict(rows(2, 4), 4).samples.shape == (4, 2, 3)


def test_first_factors() -> None:
    net = ensemble_of(nn.Linear(300, 200), 4, "random_sign")
    signs = torch.cat([net[0].r.flatten(), net[0].s.flatten()]).detach()
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < standard_errors(1) / len(signs) ** 0.5
    assert not torch.equal(net[0].r[0], net[0].r[1])
    draw_factors(net, "normal", seed=7)
    normal = torch.cat([net[0].r.flatten(), net[0].s.flatten()]).detach()
    assert abs(float(normal.mean()) - 1) < standard_errors(2) * 0.5 / len(normal) ** 0.5
    assert abs(float(normal.std()) - 0.5) < standard_errors(2) * 0.5 / (2 * len(normal)) ** 0.5


def test_replicates_are_members_and_exported_nets() -> None:
    x = rows(6, 4, seed=5)
    predictor = BatchEnsemble().fit(TwoBranches, classes(), RECIPE)
    members = torch.stack([net(x).detach() for net in map(predictor.export, range(4))])
    samples = predictor.predict(x, 8, seed=2).samples
    for half in (samples[:4], samples[4:]):  # all four, in some order
        order = torch.cdist(half.flatten(1), members.flatten(1)).argmin(1)
        assert sorted(order.tolist()) == [0, 1, 2, 3]
        torch.testing.assert_close(half, members[order], rtol=1e-4, atol=1e-5)
    prediction = predictor.predict(x, 100)
    torch.testing.assert_close(prediction.mean, members.mean(0), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="got member 4; expected 0 … 3"):
        predictor.export(4)


def test_members_run_a_few_at_a_time_where_inputs_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows(6, 4, seed=5)
    predictor = BatchEnsemble().fit(TwoBranches, classes(), RECIPE)
    whole = predictor.predict(x, 4).samples
    sizes = []
    run = batch_ensemble.run_members
    monkeypatch.setattr(batch_ensemble, "run_members", lambda e, x, m: sizes.append(len(m)) or run(e, x, m))
    for held, expected in ((3 * x.numel() * 4, [3, 1]), (1, [1, 1, 1, 1])):
        sizes.clear()
        monkeypatch.setattr(batch_ensemble, "_MAX_TILED_BYTES", held)
        torch.testing.assert_close(predictor.predict(x, 4).samples, whole)
        assert sizes == expected


def test_gradients_flow_to_the_input_when_asked() -> None:
    x = rows(3, 4).requires_grad_()
    BatchEnsemble().fit(TwoBranches, classes(), RECIPE).predict(x, 4).probs.amax(1).sum().backward()
    assert bool((x.grad != 0).any())


def test_a_fit_that_was_cut_short_goes_on_where_it_stopped(tmp_path: Any) -> None:
    def stop(report: Any) -> None:
        raise RuntimeError("cut short")

    x = rows(6, 4, seed=5)
    whole = BatchEnsemble().fit(TwoBranches, classes(), RECIPE).predict(x, 4).samples
    config = replace(RECIPE, folder=tmp_path)
    with pytest.raises(RuntimeError, match="cut short"):
        BatchEnsemble().fit(TwoBranches, classes(), replace(config, on_epoch=stop))
    assert torch.equal(BatchEnsemble().fit(TwoBranches, classes(), config).predict(x, 4).samples, whole)
    with pytest.raises(ValueError, match="made by another run.*optimizer was"):
        BatchEnsemble().fit(TwoBranches, classes(), replace(config, optimizer=torch.optim.SGD))
    with pytest.raises(ValueError, match="made by another run.*init"):
        BatchEnsemble(init="random_sign").fit(TwoBranches, classes(), config)


def test_a_net_of_this_library_is_rebuilt_when_loaded(tmp_path: Any) -> None:
    predictor = BatchEnsemble().fit(lambda: MLP(4, 3, widths=(8,)), classes(), RECIPE)
    save(predictor, tmp_path / "model")
    x = rows(6, 4, seed=5)
    assert torch.equal(load(tmp_path / "model").predict(x, 4).samples, predictor.predict(x, 4).samples)


def test_validation_is_the_mean_over_members() -> None:
    reports: list[Any] = []
    config = replace(RECIPE, epochs=1, on_epoch=reports.append)
    x, y = rows(9, 4, seed=5), torch.arange(9) % 3
    predictor = BatchEnsemble().fit(TwoBranches, classes(), config, val_data=TensorDataset(x, y))
    members = [predictor.export(k)(x).detach() for k in range(4)]
    expected = sum(float(F.cross_entropy(z, y)) for z in members) / 4
    assert reports[0].val_metrics["loss"] == pytest.approx(expected, rel=1e-4)


class TimeFirst(nn.Module):
    """Puts time on the first axis, where the tile is looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.transpose(0, 1)).relu().mean(0))


class Reads(nn.Module):
    """Uses the weights of a layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(x).relu(), self.head.weight, self.head.bias)


class Listed(nn.Module):
    """Calls its layers by a plain list beside its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.steps = [self.first, nn.ReLU(), self.last]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class HalfListed(Listed):
    """Calls one of its layers by a plain list, the other by its attribute."""

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
    """Calls no layer, but a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.fc.weight)


class Small(TimeFirst):
    def forward(self, x: Tensor) -> Tensor:
        return 1e-3 * super().forward(x)


class Centred(nn.Module):
    """Statistics of the batch that are of one's own making, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head((h - h.mean(0) if self.training else h).relu())


class MyNorm(nn.BatchNorm1d):
    """A forward of one's own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


class TwoInputNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x) + shift


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = TwoInputNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(x, x))


def fit(model: Any, x: Tensor, **options: Any) -> BatchEnsemblePredictor:
    return BatchEnsemble(**options).fit(model, TensorDataset(x, torch.arange(len(x)) % 3), RECIPE)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: BatchEnsemble(num_members=0), "got num_members=0; expected K ≥ 1"),
        (lambda: BatchEnsemble(init="ones"), "got init='ones'; expected 'normal' or 'random_sign'"),
        (lambda: fit(nn.Flatten, rows(9, 3)), "the net has no Linear or convolution"),
        (lambda: fit(TimeFirst, rows(9, 8, 2)), "outputs in a tiled batch are not those it has alone"),
        (lambda: fit(TimeFirst, rows(9, 7, 2)), r"got a tensor of shape \(7, 8, 2\) for 4 members; expected the batch"),
        (lambda: fit(Reads, rows(9, 4)), "outputs in a tiled batch are not those it has alone"),
        (lambda: fit(Small, rows(9, 8, 2)), "outputs in a tiled batch are not those it has alone"),
        (lambda: fit(Centred, rows(9, 4)), "outputs in a tiled batch are not those it has alone"),
        (
            lambda: fit(Conditional, rows(9, 4)),
            "BatchNorm of the net is given more than its input.*expected one tensor",
        ),
        (lambda: fit(Listed, rows(9, 4)), "calls its layers by other ways than its attributes"),
        (lambda: fit(HalfListed, rows(9, 4)), "calls its layers by other ways than its attributes"),
        (lambda: fit(NormByReference, rows(9, 4)), "calls its layers by other ways than its attributes"),
        (lambda: fit(Functional, rows(9, 4)), "calls its layers by other ways than its attributes"),
    ],
)
def test_bad_options_and_nets_get_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


def test_odd_nets_are_trained() -> None:
    """Lazy layers, weights that are computed, several inputs, attention, a wrapper."""

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 1))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            assert self.head.in_features == 4
            return self.head(self.attention(a[:, None] * b[:, None]))[:, 0, 0]

    data = TensorDataset(rows(20, 4), rows(20, 4, seed=1), rows(20, seed=2))
    predictor = BatchEnsemble(nn.MSELoss(), num_members=2).fit(Several, data, RECIPE)
    x = (rows(3, 4), rows(3, 4, seed=1))
    samples = predictor.predict(x, 2).samples
    assert samples.shape == (2, 3, 1)
    assert not torch.allclose(samples[0], samples[1])

    def lazy() -> nn.Module:
        return nn.DataParallel(nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)))

    assert fit(lazy, rows(9, 4)).predict(rows(2, 4), 3).samples.shape == (3, 2, 3)


def test_layers_whose_forward_is_called_by_name_are_trained() -> None:
    class ByName(Listed):
        def forward(self, x: Tensor) -> Tensor:
            return self.last.forward(self.first.forward(x).relu())

    predictor = fit(ByName, rows(9, 4))
    assert bool((predictor.predict(rows(5, 4), 4).std > 0).all())
    assert all("forward" not in vars(module) for module in predictor.ensemble.modules())  # the watch is over


def test_small_outputs_and_random_passes_are_no_reason_to_refuse() -> None:
    class Tiny(Listed):
        def forward(self, x: Tensor) -> Tensor:
            return 1e-6 * self.last(F.dropout(self.first(x), 0.5, self.training))

    state = torch.get_rng_state()
    for _ in range(5):
        fit(Tiny, rows(9, 4))
    assert torch.equal(torch.get_rng_state(), state)


def test_norms_with_a_forward_of_their_own_belong_to_the_member() -> None:
    predictor = fit(lambda: nn.Sequential(nn.Linear(4, 8), MyNorm(8), nn.BatchNorm1d(8), nn.Linear(8, 3)), rows(40, 4))
    mine, plain = predictor.ensemble[1], predictor.ensemble[2]
    assert isinstance(mine, MemberBatchNorm)
    assert isinstance(plain, MemberBatchNorm)
    assert all(type(norm) is MyNorm for norm in mine.norms)
    assert not torch.allclose(mine.norms[0].running_mean, mine.norms[1].running_mean)
    x = rows(6, 4, seed=5)
    members = torch.stack([predictor.export(k)(x).detach() for k in range(4)])
    torch.testing.assert_close(predictor.predict(x, 4).mean, members.mean(0), rtol=1e-4, atol=1e-5)


def test_what_is_no_row_of_the_batch_is_not_tiled() -> None:
    x = {"a": torch.arange(2.0)[:, None], "scale": torch.tensor(3.0), "table": torch.ones(5, 2), "name": "b"}
    tiled = tile_rows(x, 3)
    assert tiled["a"][:, 0].tolist() == [0, 1, 0, 1, 0, 1]
    assert tiled["scale"] is x["scale"]
    assert tiled["table"] is x["table"]
    assert tiled["name"] == "b"


def test_layers_are_found_by_name() -> None:
    assert list(find_rank_one_layers(ensemble_of(TwoBranches()))) == ["left.0", "right", "fc"]
