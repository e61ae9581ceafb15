"""MC dropout against the enumeration of all masks, and against whole passes."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _nets import QUICK, ZOO, Composed, TwoBranches, make, noise
from _reference import standard_errors
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import MCDropout, load, save
from neuboots.head import add_output_axis, compute_output, eval_mode
from neuboots.methods._base import set_context
from neuboots.methods.mc_dropout import _REPLICATE, Bernoulli, MCDropoutPredictor, _insert_dropout, _Replicate
from neuboots.nets import MLP, resnet8

P = 0.3


def fit(factory: Callable[[], nn.Module], x: Tensor, **options: Any) -> MCDropoutPredictor:
    """Fit for one epoch on these inputs, with three classes."""
    data = TensorDataset(x, torch.arange(len(x)) % 3)
    return MCDropout(**options).fit(factory, data, replace(QUICK, epochs=1))


def identity(*widths: int) -> nn.Sequential:
    """Linear layers that return their input."""
    net = nn.Sequential(*[nn.Linear(width, width, bias=False) for width in widths])
    for layer in net:
        nn.init.eye_(layer.weight)
    return net


def with_dropout(net: nn.Module, *names: str, granularity: Any = "element") -> MCDropoutPredictor:
    """The net as it is, with dropout inserted."""
    dropout_net = _insert_dropout(net, names, P, granularity).eval()
    return MCDropoutPredictor(dropout_net, net, P, granularity, names, names[0], None)


def run_whole_passes(predictor: MCDropoutPredictor, x: Any, num_samples: int, seed: int = 0) -> Tensor:
    """The replicates by a whole pass each, without a recording."""
    samples = []
    for b in range(num_samples):
        with eval_mode(predictor.module), set_context(_REPLICATE, _Replicate(seed, b)), torch.no_grad():
            samples.append(add_output_axis(compute_output(predictor.module, x)))
    return torch.stack(samples)


# -- the distribution of replicates --------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.middle = nn.ModuleList([nn.Linear(3, 3) for _ in range(depth)])
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        for layer in self.middle:
            h = layer(h).tanh()
        return self.head(h)


def enumerate_masks(net: Tiny, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output for every choice of masks, and its probability: (masks, N, C), (masks,)."""
    layers = [*net.middle, net.head]
    outputs, weights = [], []
    for bits in itertools.product([0.0, 1.0], repeat=3 * len(layers)):
        masks = torch.tensor(bits, dtype=torch.float64).view(len(layers), 3)
        h = F.linear(x.double(), net.body.weight.double(), net.body.bias.double()).tanh()
        for layer, mask in zip(layers, masks, strict=True):
            z = F.linear(h * mask / (1 - P), layer.weight.double(), layer.bias.double())
            h = z.tanh()
        outputs.append(z)
        kept = int(masks.sum())
        weights.append((1 - P) ** kept * P ** (masks.numel() - kept))
    return torch.stack(outputs).detach(), torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize("depth", [0, 1])
def test_samples_have_the_mean_and_variance_of_all_masks(depth: int) -> None:
    x, B = noise(4, 2, seed=3), 1000
    predictor = fit(lambda: Tiny(depth), noise(12, 2), rate=P)
    net = Tiny(depth)
    net.load_state_dict({name.replace(".layer", ""): value for name, value in predictor.state_dict().items()})
    outputs, weights = enumerate_masks(net, x)
    mean = torch.einsum("m,mnc->nc", weights, outputs)
    central = [torch.einsum("m,mnc->nc", weights, (outputs - mean) ** power) for power in (2, 4)]
    assert (predictor.head is None) == (depth == 1)
    prediction = predictor.predict(x, B)
    k = standard_errors(2 * mean.numel())
    samples = prediction.samples.double()
    assert bool(((samples.mean(0) - mean).abs() <= k * (central[0] / B).sqrt()).all())
    variance_error = ((central[1] - central[0] ** 2) / B).sqrt()  # of a sample variance, for large B
    assert bool(((samples.var(0) - central[0]).abs() <= k * variance_error).all())
    if depth == 0:
        torch.testing.assert_close(prediction.mean.double(), mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(prediction.std.double(), central[0].sqrt(), rtol=1e-5, atol=1e-6)
    else:
        assert prediction.moments is None


def test_bernoulli_weights_have_the_moments_of_all_masks() -> None:
    distribution, t = Bernoulli(P), 0.7
    masks = [torch.tensor(bits) / (1 - P) for bits in itertools.product([0.0, 1.0], repeat=3)]
    weights = [math.prod(P if value == 0 else 1 - P for value in mask.tolist()) for mask in masks]
    assert float(sum(w * mask[0] for w, mask in zip(weights, masks, strict=True))) == pytest.approx(1.0)
    for parts in (1, 2):
        found = sum(w * math.exp(-t * float(mask[:parts].sum())) for w, mask in zip(weights, masks, strict=True))
        assert distribution.laplace_transform(t, parts, 3) == pytest.approx(found)


@pytest.mark.parametrize("shared", [False, True])
def test_each_use_of_a_layer_has_its_own_mask(shared: bool) -> None:
    B, D = 200, 50
    net = identity(D, D, D)
    predictor = with_dropout(nn.Sequential(net[0], net[1], net[1]), "1") if shared else with_dropout(net, "1", "2")
    samples = predictor.predict(torch.ones(1, D), B).samples
    left = (1 - P) ** 2
    gap = abs(float((samples != 0).double().mean()) - left)
    assert gap <= standard_errors(1) * math.sqrt(left * (1 - left) / (B * D))
    assert set(samples.unique().tolist()) == {0.0, float(torch.tensor(1 / (1 - P)) ** 2)}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("granularity", "shape"),
    [("element", (3, 40, 5, 5)), ("channel", (3, 40, 5, 5)), ("element", (3, 40)), ("channel", (3, 4, 40))],
)
def test_channels_are_dropped_as_a_whole(granularity: str, shape: tuple[int, ...], training: bool) -> None:
    maps = len(shape) == 4
    layer = nn.Conv2d(40, 40, 1, bias=False) if maps else identity(40)[0]
    if maps:
        nn.init.dirac_(layer.weight)
    predictor = with_dropout(nn.Sequential(nn.Identity(), layer), "1", granularity=granularity)
    if training:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            kept = predictor.module.train()(torch.ones(shape))[None] != 0
        assert not torch.equal(kept[0, 0], kept[0, 1])  # a mask for each example
    else:
        kept = predictor.predict(torch.ones(shape), 2).samples != 0
        assert torch.equal(kept[:, 0], kept[:, 1])
    assert 0.5 < float(kept.double().mean()) < 0.9
    if maps:
        assert bool((kept == kept[..., :1, :1]).all()) == (granularity == "channel")
    if len(shape) == 3:  # channels of tokens are their features
        by_token = kept if training else kept.mT  # (·, N, T, C)
        assert bool((by_token == by_token[:, :, :1]).all())


def test_training_drops_each_example_separately_and_validation_does_not() -> None:
    seen: list[tuple[bool, Tensor]] = []

    def factory() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 3))
        net[2].register_forward_pre_hook(lambda layer, args: seen.append((layer.training, args[0].detach())))
        return net

    data = TensorDataset(noise(32, 4), torch.arange(32) % 3)
    MCDropout(rate=P).fit(factory, data, replace(QUICK, epochs=1), val_data=data)
    trained = torch.cat([h for training, h in seen if training])
    validated = torch.cat([h for training, h in seen[3:] if not training])
    assert trained.shape == (32, 50)
    gap = abs(float((trained == 0).double().mean()) - P)
    assert gap <= standard_errors(1) * math.sqrt(P * (1 - P) / trained.numel())
    assert len(torch.unique(trained == 0, dim=0)) == 32
    assert len(validated) > 0
    assert not bool((validated == 0).any())


# -- existing dropout layers ---------------------------------------------------------------------------


@pytest.mark.parametrize("make_layer", [nn.Dropout, nn.AlphaDropout, nn.Dropout1d, nn.FeatureAlphaDropout])
def test_existing_dropout_has_the_values_and_rate_of_torch(make_layer: Any) -> None:
    predictor = with_dropout(nn.Sequential(nn.Identity(), make_layer(0.4)), "1")
    x = torch.ones(1, 60, 7)
    samples = predictor.predict(x, 60).samples
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = make_layer(0.4)(x)
    torch.testing.assert_close(samples.unique(), theirs.unique())
    high = samples == samples.max()
    channels = make_layer in (nn.Dropout1d, nn.FeatureAlphaDropout)
    assert bool((high == high[..., :1]).all()) == channels
    draws = 60 * 60 * (1 if channels else 7)
    assert abs(float(high.double().mean()) - 0.6) <= standard_errors(1) * math.sqrt(0.24 / draws)


def test_existing_dropout_with_rate_0_or_1() -> None:
    predictor = with_dropout(nn.Sequential(nn.Dropout(0.0), nn.Dropout(1.0)), "1")
    assert torch.equal(predictor.predict(torch.ones(2, 3), 2).samples, torch.zeros(2, 2, 3))


# -- placement -----------------------------------------------------------------------------------------


def test_all_places_dropout_before_every_layer_that_does_not_read_the_input() -> None:
    stages = [f"features.{block}.residual.{layer}" for block in (3, 4, 5) for layer in (0, 3)]
    predictor = fit(lambda: resnet8(3), noise(6, 3, 8, 8))
    assert (predictor.layer_names, predictor.first) == ((*stages, "head"), "features.3.residual.0")
    assert fit(TwoBranches, noise(12, 4)).layer_names == ("fc",)  # both branches read the input
    assert fit(lambda: MLP(4, 3, widths=(8, 8)), noise(12, 4)).layer_names == ("features.2", "head")
    normed = fit(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Linear(8, 3)), noise(12, 4))
    assert normed.layer_names == ("2",)


def test_head_places_dropout_before_the_last_or_the_named_layer() -> None:
    x = noise(12, 4)
    last, named = (fit(lambda: MLP(4, 3, widths=(8, 8)), x, where="head", head=h) for h in (None, "features.2"))
    assert (last.layer_names, named.layer_names) == (("head",), ("features.2",))
    assert last.predict(x, 2).moments is not None
    assert named.predict(x, 2).moments is None  # further layers follow
    for predictor in (last, named):
        torch.testing.assert_close(predictor.predict(x, 3).samples, run_whole_passes(predictor, x, 3))
    assert MCDropout.paper_mlp() == MCDropout(rate=0.1, where="head")


# -- replay --------------------------------------------------------------------------------------------


class Parallel(nn.Module):
    """Two parallel dropouts: the second does not depend on the first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).relu()
        return self.head(torch.cat([self.left(h), self.right(h)], 1))


class Branching(Parallel):
    """Branches on values after the first dropout, which cannot be replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.left(self.body(x).relu())
        return self.head(torch.cat([h, -h], 1)) * (1.0 if bool((h.detach() > 0).any()) else 2.0)


class Reordered(Parallel):
    """Runs its branches in another order after dropout was inserted."""

    late = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).relu()
        right = self.right(h) if self.late else None
        left = self.left(h)
        return self.head(torch.cat([left, self.right(h) if right is None else right], 1))


def transformer() -> nn.Module:
    layers = {"embed": nn.Linear(4, 8), "layer": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)}
    return Composed(lambda net, x: net.head(net.layer(net.embed(x)).mean(1)), **layers, head=nn.Linear(8, 3))


def reads_attributes() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        assert net.dropout.p == 0.25
        return net.head(net.dropout(net.body(x.to(net.body.weight.dtype)))) / net.head.in_features

    return Composed(forward, body=nn.Linear(4, 8), dropout=nn.Dropout(0.25), head=nn.Linear(8, 3))


UNUSUAL: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "parallel": (Parallel, noise(12, 4)),
    "branching": (Branching, noise(12, 4)),
    "reordered": (Reordered, noise(12, 4)),
    "transformer": (transformer, noise(12, 5, 4)),
    "attributes": (reads_attributes, noise(12, 4)),
    "resnet": (lambda: resnet8(3), noise(6, 3, 8, 8)),
    "in place": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), *identity(8, 8)), noise(12, 4)),
    "transposed": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.ConvTranspose1d(4, 4, 3), nn.Flatten(), nn.Linear(24, 3)),
        noise(6, 2, 6),
    ),
}


@pytest.mark.parametrize("granularity", ["element", "channel"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_replay_equals_whole_passes(name: str, granularity: str) -> None:
    factory, x = UNUSUAL[name]
    predictor = fit(factory, x, rate=P, granularity=granularity)
    if name == "reordered":
        predictor.module.late = True
    samples = predictor.predict(x, 4, seed=2).samples
    torch.testing.assert_close(samples, run_whole_passes(predictor, x, 4, seed=2), rtol=1e-4, atol=1e-5)
    assert bool((samples.std(0) > 0).any())
    torch.testing.assert_close(predictor.predict(x[:2], 4, seed=2).samples, samples[:, :2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
@pytest.mark.parametrize("granularity", ["element", "channel"])
def test_dropout_merged_into_any_head_equals_whole_passes(case: Any, granularity: Any) -> None:
    net = make(case)
    net = getattr(net, "module", getattr(net, "_orig_mod", net))
    predictor = MCDropout(where="head", granularity=granularity)._insert(net, case.x)
    samples = predictor.predict(case.x, 3).samples
    torch.testing.assert_close(samples, run_whole_passes(predictor, case.x, 3))
    assert bool((samples.std(0) > 0).any())
    torch.testing.assert_close(replace(predictor, head=None).predict(case.x, 3).samples, samples)


@pytest.mark.parametrize("where", ["all", "head"])
def test_layers_before_the_first_dropout_run_once(where: str) -> None:
    x = noise(12, 4)
    predictor = fit(lambda: MLP(4, 3, widths=(8, 8), batch_norm=True), x, where=where)
    calls: list[int] = []
    predictor.module.features[0].register_forward_hook(lambda layer, args, out: calls.append(1))
    for num_samples in (1, 7, 40):
        for predict in (predictor.predict, lambda x, n: predictor.summarize(x, n, quantiles=(0.5,))):
            calls.clear()
            predict(x, num_samples)
            assert len(calls) == 1


# -- the batch on another axis -------------------------------------------------------------------------


class SequenceFirst(nn.Module):
    """Tokens before examples, with existing dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x).transpose(0, 1)).mean(0))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Linear(4, 8), nn.LSTM(8, 8)
        self.middle, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.rnn(self.embed(x).transpose(0, 1))[0]).relu()[-1])


class SharedTable(nn.Module):
    """A small net computes a table that all examples share, as for relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", noise(5, 2))
        self.table = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8))
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.embed(x) + self.table(self.positions)).tanh().mean(1))


BATCH_AXES = {
    (SequenceFirst, "all"): {f"layer.{name}": 1 for name in ("linear1", "linear2", "dropout", "dropout1", "dropout2")},
    (SequenceFirst, "existing"): {f"layer.{name}": 1 for name in ("dropout", "dropout1", "dropout2")},
    (Recurrent, "all"): {"middle": 1},
    (Recurrent, "head"): {},
    (SharedTable, "all"): {"table.2": None},
}


@pytest.mark.parametrize("granularity", ["element", "channel"])
@pytest.mark.parametrize(("factory", "where"), BATCH_AXES)
def test_masks_do_not_depend_on_the_position_in_the_batch(
    factory: Any, where: str, granularity: str, tmp_path: Any
) -> None:
    x = noise(12, 5, 4)
    predictor = fit(factory, x, rate=P, where=where, granularity=granularity)
    assert predictor.config()["batch_axes"] == BATCH_AXES[factory, where]
    samples = predictor.predict(x, 4).samples
    torch.testing.assert_close(samples, run_whole_passes(predictor, x, 4), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(predictor.predict(x[3:6], 4).samples, samples[:, 3:6], rtol=1e-4, atol=1e-5)
    copies = predictor.predict(x[[0, 0]], 4).samples
    torch.testing.assert_close(copies[:, 0], copies[:, 1], rtol=1e-4, atol=1e-5)
    assert bool((samples.std(0) > 0).all())
    save(predictor, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model", model=factory()).predict(x, 4).samples, samples)


class Misplaced(nn.Module):
    """Has the batch on the axis that `place` describes."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.body, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.conv, self.channels, self.drop = nn.Conv1d(5, 5, 1), nn.Dropout1d(0.5), nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # (N, 5, 4)
        h = self.body(x)
        if self.place == "pairs":
            self.drop(h[:, 0] @ h[:, 0].T)
        if self.place == "loop":
            h = torch.stack([self.layer(row) for row in h])
        if self.place == "two axes":
            h = self.drop(h) + self.drop(h.transpose(0, 1)).transpose(0, 1)
        if self.place == "maps":
            h = h + self.conv(h.permute(2, 1, 0)).permute(2, 1, 0)
        if self.place == "existing maps":
            h = self.channels(h.transpose(0, 1)).transpose(0, 1)
        return self.head(h.mean(1))


@pytest.mark.parametrize(
    ("place", "granularity", "layer"),
    [
        ("pairs", "element", "drop"),
        ("loop", "element", "layer"),
        ("two axes", "element", "drop"),
        ("maps", "channel", "conv"),
        ("existing maps", "element", "channels"),
    ],
)
def test_batches_that_cannot_share_a_mask_raise(place: str, granularity: str, layer: str) -> None:
    with pytest.raises(ValueError, match=f"'{layer}'"):
        fit(lambda: Misplaced(place), noise(12, 5, 4), granularity=granularity)


def test_elements_are_dropped_with_the_batch_on_any_axis() -> None:
    x = noise(12, 5, 4)
    predictor = fit(lambda: Misplaced("maps"), x)
    assert predictor.config()["batch_axes"] == {"conv": 2}
    samples = predictor.predict(x, 4).samples
    torch.testing.assert_close(predictor.predict(x[3:6], 4).samples, samples[:, 3:6], rtol=1e-4, atol=1e-5)


# -- trained nets --------------------------------------------------------------------------------------


class FrozenBody(nn.Module):
    """A body behind torch.no_grad()."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.body(x)
        return self.head(self.middle(h).relu())


class FastPath(nn.Module):
    """A frozen transformer, which torch would run on its fast path."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1).requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=x[..., 0] > 1.5)[:, 0])


@pytest.mark.parametrize(
    ("factory", "x", "names"),
    [
        (FrozenBody, noise(12, 4), ("body.2", "middle", "head")),
        (FastPath, noise(12, 5, 4), ("encoder.layers.0.linear2", "head")),
    ],
)
def test_layers_are_found_without_gradients(factory: Any, x: Tensor, names: tuple[str, ...]) -> None:
    net = factory()
    trainable = [parameter.requires_grad for parameter in net.parameters()]
    predictor = MCDropout(rate=P).from_trained(net, (x, torch.zeros(len(x))))
    assert predictor.layer_names == names
    assert [parameter.requires_grad for parameter in predictor.module.parameters()] == trainable
    assert torch.backends.mha.get_fastpath_enabled()
    torch.testing.assert_close(predictor.predict(x, 3).samples, run_whole_passes(predictor, x, 3), rtol=1e-4, atol=1e-5)


def test_from_trained_keeps_the_mean_and_does_not_change_the_net() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)).eval()
    x = noise(5, 4)
    with torch.no_grad():
        output = net(x)
        samples = MCDropout(where="existing").from_trained(net, (x[:1], torch.zeros(1))).predict(x, 1000).samples
        assert torch.equal(net(x), output)
    assert type(net[2]) is nn.Dropout
    # dropout before a linear layer keeps the mean: 15 outputs within standard errors of 1,000 draws
    assert bool(((samples.mean(0) - output).abs() <= 4.5 * samples.std(0) / 1000**0.5).all())


# -- errors --------------------------------------------------------------------------------------------


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.unused = nn.Linear(4, 8), nn.Linear(8, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.body(x), 0.5, self.training))


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (lambda: nn.Linear(4, 3), {}),
        (lambda: MLP(4, 3), {"where": "existing"}),
        (lambda: nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 3)), {"where": "existing"}),
        (FunctionalDropout, {"where": "existing"}),
        (lambda: MLP(4, 3), {"where": "head", "head": "tail"}),
        (lambda: nn.Sequential(nn.LSTM(4, 3)), {"where": "head"}),
    ],
)
def test_nets_without_a_layer_for_dropout_raise(factory: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        fit(factory, noise(12, 4), **options)
