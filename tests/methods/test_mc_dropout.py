"""MC dropout against the enumeration of all masks, and against whole passes."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _nets import ZOO, TwoBranches, make
from _reference import standard_errors
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import neuboots.methods.mc_dropout as room
from neuboots import TrainingConfig, load, save
from neuboots._prng import derive_keys, draw_uniform
from neuboots.head import add_output_axis, compute_output, eval_mode
from neuboots.methods.mc_dropout import Bernoulli, MCDropout, MCDropoutPredictor, _Draw, _drawing, insert_dropout
from neuboots.nets import MLP, resnet8

RECIPE = TrainingConfig(epochs=1, batch_size=16, progress=False)
P = 0.3


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fit(model: Callable[[], nn.Module], x: Tensor, **options: Any) -> MCDropoutPredictor:
    """Fitted for one epoch on these inputs, with three classes."""
    return MCDropout(**options).fit(model, TensorDataset(x, torch.arange(len(x)) % 3), RECIPE)


def identity(*widths: int) -> nn.Module:
    """Linear layers that give back what they get."""
    net = nn.Sequential(*[nn.Linear(width, width, bias=False) for width in widths])
    for layer in net:
        nn.init.eye_(layer.weight)
    return net


def dropping(
    net: nn.Module, places: tuple[str, ...], *, rate: float = P, granularity: Any = "element"
) -> MCDropoutPredictor:
    """The net as it is, with dropout put in."""
    return MCDropoutPredictor(
        insert_dropout(net, places, rate, granularity).eval(), net, rate, granularity, places, places[0], None
    )


def whole_passes(predictor: MCDropoutPredictor, x: Any, num_samples: int, seed: int = 0) -> Tensor:
    """The replicates by a whole pass each, with nothing recorded."""
    samples = []
    for b in range(num_samples):
        with eval_mode(predictor.module), _drawing(_Draw(seed, b)), torch.no_grad():
            samples.append(add_output_axis(compute_output(predictor.module, x)))
    return torch.stack(samples)


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


def enumerated(net: Tiny, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output under every choice of masks, and its probability: (masks, N, C), (masks,)."""
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


# -- the law -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_samples_have_the_mean_and_variance_of_all_masks(depth: int) -> None:
    x, B = rows(4, 2, seed=3), 3000
    predictor = fit(lambda: Tiny(depth), rows(12, 2), rate=P)
    net = Tiny(depth)
    net.load_state_dict({name.replace(".layer", ""): value for name, value in predictor.state_dict().items()})
    outputs, weights = enumerated(net, x)
    mean = torch.einsum("m,mnc->nc", weights, outputs)
    central = [torch.einsum("m,mnc->nc", weights, (outputs - mean) ** power) for power in (2, 4)]
    assert (predictor.head is None) == (depth == 1)
    prediction = predictor.predict(x, B)
    k = standard_errors(2 * mean.numel())
    samples = prediction.samples.double()
    assert bool(((samples.mean(0) - mean).abs() <= k * (central[0] / B).sqrt()).all())
    spread = ((central[1] - central[0] ** 2) / B).sqrt()  # of a sample variance, for large B
    assert bool(((samples.var(0) - central[0]).abs() <= k * spread).all())
    if depth == 0:
        torch.testing.assert_close(prediction.mean.double(), mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(prediction.std.double(), central[0].sqrt(), rtol=1e-5, atol=1e-6)
    else:
        assert prediction.moments is None


def test_the_law_is_that_of_all_masks() -> None:
    """Mean 1, and what the exp link needs, over the 2³ masks of three features."""
    weight_distribution, t = Bernoulli(P), 0.7
    masks = [torch.tensor(bits) / (1 - P) for bits in itertools.product([0.0, 1.0], repeat=3)]
    weights = [math.prod(P if value == 0 else 1 - P for value in mask.tolist()) for mask in masks]
    mean = sum(w * mask[0] for w, mask in zip(weights, masks, strict=True))
    assert float(mean) == pytest.approx(1.0)
    for parts in (1, 2):
        found = sum(w * math.exp(-t * float(mask[:parts].sum())) for w, mask in zip(weights, masks, strict=True))
        assert weight_distribution.laplace_transform(t, parts, 3) == pytest.approx(found)


def test_an_element_is_dropped_at_the_rate_and_scaled() -> None:
    B, D = 200, 50
    predictor = dropping(identity(D, D), ("1",))
    samples = predictor.predict(torch.ones(3, D), B).samples
    kept = samples != 0
    torch.testing.assert_close(samples[kept], torch.full_like(samples[kept], 1 / (1 - P)))
    assert torch.equal(samples[:, 0], samples[:, 1])  # one mask for all rows
    gap = abs(float(kept[:, 0].double().mean()) - (1 - P))
    assert gap <= standard_errors(1) * math.sqrt(P * (1 - P) / (B * D))
    assert len(torch.unique(kept[:, 0], dim=0)) == B  # a mask of its own for each replicate


@pytest.mark.parametrize("shared", [False, True])
def test_two_dropouts_have_two_masks(shared: bool) -> None:
    """Also two uses of one layer: then (1 − p)² of the elements are left."""
    B, D = 200, 50
    net = identity(D, D, D)
    if shared:
        net = nn.Sequential(net[0], net[1], net[1])
    predictor = dropping(net, ("1",) if shared else ("1", "2"))
    samples = predictor.predict(torch.ones(1, D), B).samples
    left = (1 - P) ** 2
    gap = abs(float((samples != 0).double().mean()) - left)
    assert gap <= standard_errors(1) * math.sqrt(left * (1 - left) / (B * D))
    assert set(samples.unique().tolist()) == {0.0, float(torch.tensor(1 / (1 - P)) ** 2)}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("kind", "maps"), [("element", True), ("channel", True), ("element", False)])
def test_channels_are_dropped_whole(kind: str, maps: bool, training: bool) -> None:
    layer = nn.Conv2d(40, 40, 1, bias=False) if maps else nn.Linear(40, 40, bias=False)
    nn.init.dirac_(layer.weight) if maps else nn.init.eye_(layer.weight)
    predictor = dropping(nn.Sequential(nn.Identity(), layer), ("1",), granularity=kind)
    x = torch.ones(3, 40, 5, 5) if maps else torch.ones(3, 40)
    if training:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            kept = predictor.module.train()(x)[None] != 0
        assert not torch.equal(kept[0, 0], kept[0, 1])  # a mask for each row
    else:
        kept = predictor.predict(x, 2).samples != 0
        assert torch.equal(kept[:, 0], kept[:, 1])
    assert 0.5 < float(kept.double().mean()) < 0.9
    if maps:
        whole = (kept == kept[..., :1, :1]).all()
        assert bool(whole) == (kind == "channel")


def test_channels_of_tokens_are_their_features() -> None:
    predictor = dropping(nn.Sequential(nn.Identity(), identity(30)[0]), ("1",), granularity="channel")
    kept = predictor.predict(torch.ones(2, 4, 30), 3).samples != 0  # (B, N, T, D)
    assert bool((kept == kept[:, :1, :1]).all())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kept = predictor.module.train()(torch.ones(2, 4, 30)) != 0
    assert bool((kept == kept[:, :1]).all())
    assert not torch.equal(kept[0], kept[1])


def test_training_drops_each_row_anew_and_validation_does_not() -> None:
    seen: list[tuple[bool, Tensor]] = []

    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 3))
        net[2].register_forward_pre_hook(lambda layer, args: seen.append((layer.training, args[0].detach())))
        return net

    data = TensorDataset(rows(32, 4), torch.arange(32) % 3)
    MCDropout(rate=P).fit(model, data, RECIPE, val_data=data)
    trained = torch.cat([h for training, h in seen if training])
    validated = torch.cat([h for training, h in seen[3:] if not training])
    assert trained.shape == (32, 50)
    gap = abs(float((trained == 0).double().mean()) - P)
    assert gap <= standard_errors(1) * math.sqrt(P * (1 - P) / trained.numel())
    assert len(torch.unique(trained == 0, dim=0)) == 32
    assert len(validated) > 0
    assert not bool((validated == 0).any())


# -- the net's own dropout -----------------------------------------------------------------------------


@pytest.mark.parametrize("make_layer", [nn.Dropout, nn.AlphaDropout, nn.Dropout1d, nn.FeatureAlphaDropout])
def test_own_dropout_does_what_torch_does_in_training(make_layer: Any) -> None:
    """The same two values at the same rate; whole channels where torch drops whole channels."""
    predictor = dropping(nn.Sequential(nn.Identity(), make_layer(0.4)), ("1",))
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


def test_own_dropout_that_drops_all_or_nothing() -> None:
    predictor = dropping(nn.Sequential(nn.Dropout(0.0), nn.Dropout(1.0)), ("1",))
    assert torch.equal(predictor.predict(torch.ones(2, 3), 2).samples, torch.zeros(2, 2, 3))


def test_own_dropout_is_on_wherever_else_dropout_is_put() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    x = rows(12, 4)
    for where, places in {"own": (), "head": ("5",), "all": ("3", "5")}.items():
        predictor = fit(model, x, where=where)
        assert (predictor.places, predictor.first, predictor.head) == (places, "1", None)
        hidden: list[Tensor] = []
        predictor.module[2].register_forward_hook(lambda layer, args, out: hidden.append(out))  # noqa: B023
        whole_passes(predictor, x, 3)
        assert len({tuple((h == 0).all(0).tolist()) for h in hidden}) > 1


# -- where it is put -----------------------------------------------------------------------------------


def test_all_means_every_layer_but_those_that_see_the_input() -> None:
    stages = [f"features.{block}.residual.{layer}" for block in (3, 4, 5) for layer in (0, 3)]
    predictor = fit(lambda: resnet8(3), rows(6, 3, 8, 8))
    assert predictor.places == (*stages, "head")
    assert predictor.first == "features.3.residual.0"
    assert fit(TwoBranches, rows(12, 4)).places == ("fc",)  # both branches see the input
    assert fit(lambda: MLP(4, 3, widths=(8, 8)), rows(12, 4)).places == ("features.2", "head")
    normed = fit(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Linear(8, 3)), rows(12, 4))
    assert normed.places == ("2",)


def test_head_means_the_last_layer_or_the_one_named() -> None:
    def model() -> nn.Module:
        return MLP(4, 3, widths=(8, 8))

    x = rows(12, 4)
    last, named = fit(model, x, where="head"), fit(model, x, where="head", head="features.2")
    assert (last.places, named.places) == (("head",), ("features.2",))
    assert last.predict(x, 2).moments is not None
    assert named.predict(x, 2).moments is None  # learned layers follow
    for predictor in (last, named):
        torch.testing.assert_close(predictor.predict(x, 3).samples, whole_passes(predictor, x, 3))


def test_the_paper_drops_a_tenth_before_the_last_layer() -> None:
    assert MCDropout.paper_mlp() == MCDropout(rate=0.1, where="head")


# -- recording and repeating ---------------------------------------------------------------------------


class Parallel(nn.Module):
    """Two dropouts side by side: the second does not come from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).relu()
        return self.head(torch.cat([self.left(h), self.right(h)], 1))


class Reads(Parallel):
    """Reads values after the first dropout, which no tape can repeat."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.left(self.body(x).relu())
        return self.head(torch.cat([h, -h], 1)) * (1.0 if bool((h.detach() > 0).any()) else 2.0)


class Swapped(Parallel):
    """Later its branches run in another order than when dropout was put in."""

    late = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).relu()
        right = self.right(h) if self.late else None
        left = self.left(h)
        return self.head(torch.cat([left, self.right(h) if right is None else right], 1))


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)).mean(1))


class Asking(Parallel):
    """Asks its layers for what they are."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.left(self.body(x).to(self.left.weight.dtype))
        return self.head(torch.cat([h, h], 1)) / self.head.in_features


ODD: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "parallel": (Parallel, rows(12, 4)),
    "reads": (Reads, rows(12, 4)),
    "swapped": (Swapped, rows(12, 4)),
    "transformer": (Attentive, rows(12, 5, 4)),
    "asking": (Asking, rows(12, 4)),
    "resnet": (lambda: resnet8(3), rows(6, 3, 8, 8)),
    "in place": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), *identity(8, 8)), rows(12, 4)),
    "transposed": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.ConvTranspose1d(4, 4, 3), nn.Flatten(), nn.Linear(24, 3)),
        rows(6, 2, 6),
    ),
}


@pytest.mark.parametrize("kind", ["element", "channel"])
@pytest.mark.parametrize("name", ODD)
def test_repeating_gives_what_whole_passes_give(name: str, kind: str) -> None:
    model, x = ODD[name]
    predictor = fit(model, x, rate=P, granularity=kind)
    if name == "swapped":
        predictor.module.late = True
    samples = predictor.predict(x, 4, seed=2).samples
    torch.testing.assert_close(samples, whole_passes(predictor, x, 4, seed=2), rtol=1e-4, atol=1e-5)
    assert bool((samples.std(0) > 0).all())
    torch.testing.assert_close(predictor.predict(x[:2], 4, seed=2).samples, samples[:, :2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", ["element", "channel"])
def test_nets_never_seen_before(case: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout before the head, folded into its weights or not."""
    monkeypatch.setattr(room, "example_of", lambda net, data, seed: data)
    monkeypatch.setattr(room, "fit_net", lambda *args, **options: None)
    predictor = MCDropout(where="head", granularity=kind).fit(lambda: make(case), case.x, RECIPE)
    samples = predictor.predict(case.x, 3).samples
    torch.testing.assert_close(samples, whole_passes(predictor, case.x, 3))
    assert bool((samples.std(0) > 0).any())
    plain = replace(predictor, head=None).predict(case.x, 3)
    torch.testing.assert_close(plain.samples, samples)


@pytest.mark.parametrize("where", ["all", "head"])
def test_what_lies_before_the_first_dropout_runs_once(where: str) -> None:
    x = rows(12, 4)
    predictor = fit(lambda: MLP(4, 3, widths=(8, 8), batch_norm=True), x, where=where)
    calls: list[int] = []
    predictor.module.features[0].register_forward_hook(lambda layer, args, out: calls.append(1))
    for num_samples in (1, 7, 40):
        calls.clear()
        predictor.predict(x, num_samples)
        assert len(calls) == 1
        calls.clear()
        predictor.summarize(x, num_samples, quantiles=(0.5,))
        assert len(calls) == 1


class ReadsNormed(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))


@pytest.mark.parametrize("where", ["all", "head"])
@pytest.mark.parametrize("model", [lambda: MLP(4, 3, widths=(8, 8), batch_norm=True), ReadsNormed])
def test_all_but_dropout_is_in_evaluation_mode(where: str, model: Callable[[], nn.Module]) -> None:
    """BatchNorm uses its running statistics, and leaves them: another batch gives the same outputs."""
    x = 5 * rows(12, 4)
    predictor = fit(model, x, where=where)
    before = {name: value.clone() for name, value in predictor.state_dict().items()}
    predictor.module.train()
    one, all_rows = predictor.predict(x[:1], 4).samples, predictor.predict(x, 4).samples
    torch.testing.assert_close(one, all_rows[:, :1], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in predictor.state_dict().items())
    assert all(module.training for module in predictor.module.modules())


def test_gradients_reach_the_input() -> None:
    predictor = fit(lambda: MLP(4, 3, widths=(8, 8)), rows(12, 4))
    x = rows(3, 4).requires_grad_()
    predictor.predict(x, 5).samples.sum().backward()
    assert x.grad is not None
    assert bool((x.grad != 0).any())


# -- the batch on another axis -------------------------------------------------------------------------


class SequenceFirst(nn.Module):
    """Tokens before rows, with dropout of its own."""

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


class Table(nn.Module):
    """A small net makes a table that all rows share, as for relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", rows(5, 2))
        self.table = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8))
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.embed(x) + self.table(self.places)).tanh().mean(1))


ELSEWHERE = {
    (SequenceFirst, "all"): {f"layer.{name}": 1 for name in ("linear1", "linear2", "dropout", "dropout1", "dropout2")},
    (SequenceFirst, "own"): {f"layer.{name}": 1 for name in ("dropout", "dropout1", "dropout2")},
    (Recurrent, "all"): {"middle": 1},
    (Recurrent, "head"): {},
    (Table, "all"): {"table.2": None},
}


@pytest.mark.parametrize("kind", ["element", "channel"])
@pytest.mark.parametrize(("model", "where"), ELSEWHERE)
def test_a_mask_does_not_depend_on_the_place_in_the_batch(model: Any, where: str, kind: str, tmp_path: Any) -> None:
    x = rows(12, 5, 4)
    predictor = fit(model, x, rate=P, where=where, granularity=kind)
    assert predictor.config()["axes"] == ELSEWHERE[model, where]
    samples = predictor.predict(x, 4).samples
    torch.testing.assert_close(samples, whole_passes(predictor, x, 4), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(predictor.predict(x[3:6], 4).samples, samples[:, 3:6], rtol=1e-4, atol=1e-5)
    twins = predictor.predict(x[[0, 0]], 4).samples
    torch.testing.assert_close(twins[:, 0], twins[:, 1], rtol=1e-4, atol=1e-5)
    assert bool((samples.std(0) > 0).all())
    save(predictor, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model", model=model()).predict(x, 4).samples, samples)


@pytest.mark.parametrize("rows_given", [1, 2])
def test_tokens_have_masks_of_their_own_and_rows_share_them(rows_given: int) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = identity(30, 30)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.body(x.transpose(0, 1))).transpose(0, 1)

    kept = {}
    for kind in ("element", "channel"):
        predictor = MCDropout(granularity=kind, rate=P).from_trained(Turned(), torch.ones(rows_given, 4, 30))
        kept[kind] = predictor.predict(torch.ones(5, 4, 30), 3).samples != 0  # (B, N, T, D)
        assert bool((kept[kind] == kept[kind][:, :1]).all())
    assert not bool((kept["element"] == kept["element"][:, :, :1]).all())
    assert bool((kept["channel"] == kept["channel"][:, :, :1]).all())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        trained = predictor.module.train()(torch.ones(5, 4, 30)) != 0
    assert bool((trained == trained[:, :1]).all())  # channels, whole
    assert len(torch.unique(trained[:, 0], dim=0)) == 5  # a mask for each row


def test_the_draws_of_a_mask_are_written_down() -> None:
    """So that they stay as they are, on the first axis and on another."""
    keys = derive_keys(torch.arange(2), 7, "dropout", "1", 0)
    kept = draw_uniform(keys[:, None], torch.arange(12)) >= P
    predictor = dropping(nn.Sequential(nn.Identity(), identity(4)[0]), ("1",))
    found = predictor.predict(torch.ones(5, 3, 4), 2, seed=7).samples != 0
    assert torch.equal(found, kept.view(2, 1, 3, 4).expand(2, 5, 3, 4))


class Misplaced(nn.Module):
    """Puts its batch where the name says."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.body, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.conv, self.whole, self.drop = nn.Conv1d(5, 5, 1), nn.Dropout1d(0.5), nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # (N, 5, 4)
        h = self.body(x)
        if self.place == "pairs":
            self.drop(h[:, 0] @ h[:, 0].T)
        if self.place == "loop":
            h = torch.stack([self.layer(row) for row in h])
        if self.place == "shared":
            h = self.drop(h) + self.drop(h.transpose(0, 1)).transpose(0, 1)
        if self.place == "maps":
            h = h + self.conv(h.permute(2, 1, 0)).permute(2, 1, 0)
        if self.place == "own maps":
            h = self.whole(h.transpose(0, 1)).transpose(0, 1)
        return self.head(h.mean(1))


@pytest.mark.parametrize(
    ("place", "options", "sentence"),
    [
        ("pairs", {}, r"the layer 'drop' is given \(2, 2\), and \(4, 4\) for twice as many rows; expected one axis"),
        ("loop", {}, "the layer 'layer' is used 2 times, and 4 times for twice as many rows; expected all rows"),
        ("shared", {}, "the layer 'drop' is used with the batch on different axes; expected the same one"),
        (
            "maps",
            {"granularity": "channel"},
            "the layer 'conv' is given the batch on axis 2, and is to drop whole channels",
        ),
        ("own maps", {}, "the layer 'whole' is given the batch on axis 1, and is to drop whole channels"),
    ],
)
def test_a_batch_that_cannot_share_a_mask_is_refused(place: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fit(lambda: Misplaced(place), rows(12, 5, 4), **options)


def test_single_elements_are_dropped_wherever_the_batch_is() -> None:
    x = rows(12, 5, 4)
    predictor = fit(lambda: Misplaced("maps"), x)
    assert predictor.config()["axes"] == {"conv": 2}
    samples = predictor.predict(x, 4).samples
    torch.testing.assert_close(predictor.predict(x[3:6], 4).samples, samples[:, 3:6], rtol=1e-4, atol=1e-5)


# -- what follows another layer ------------------------------------------------------------------------


class WithoutGradients(nn.Module):
    """A body that does not learn, behind torch.no_grad()."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
        self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.body(x)
        return self.head(self.middle(h).relu())


class Embedded(nn.Module):
    """A transformer that torch would run on its fast path, since nothing in it learns."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1).requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=x[..., 0] > 1.5)[:, 0])


class PartlyCompiled(WithoutGradients):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(self.body, backend="eager")


@pytest.mark.parametrize(
    ("model", "x", "places"),
    [
        (WithoutGradients, rows(12, 4), ("body.2", "middle", "head")),
        (PartlyCompiled, rows(12, 4), ("body._orig_mod.2", "middle", "head")),
        (Embedded, rows(12, 5, 4), ("encoder.layers.0.linear2", "head")),
    ],
)
def test_layers_that_follow_are_found_without_gradients(model: Any, x: Tensor, places: tuple[str, ...]) -> None:
    net = model()
    learned = [parameter.requires_grad for parameter in net.parameters()]
    predictor = MCDropout(rate=P).from_trained(net, x[:2])
    assert predictor.places == places
    assert [parameter.requires_grad for parameter in predictor.module.parameters()] == learned
    assert torch.backends.mha.get_fastpath_enabled()
    torch.testing.assert_close(predictor.predict(x, 3).samples, whole_passes(predictor, x, 3), rtol=1e-4, atol=1e-5)


# -- saving, resuming, refusing ------------------------------------------------------------------------


def test_a_net_of_ours_is_rebuilt_from_the_file(tmp_path: Any) -> None:
    x = rows(6, 3, 8, 8)
    predictor = fit(lambda: resnet8(3), x, granularity="channel")
    save(predictor, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").predict(x, 3).samples, predictor.predict(x, 3).samples)


def test_a_fit_cut_short_goes_on(tmp_path: Any) -> None:
    class Cut(Exception):
        pass

    def cut(report: Any) -> None:
        if report.epoch == 0:
            raise Cut

    data = TensorDataset(rows(40, 4), torch.arange(40) % 3)
    model = partial(MLP, 4, 3, widths=(8, 8))
    config = TrainingConfig(epochs=3, batch_size=16, progress=False)
    with pytest.raises(Cut):
        MCDropout().fit(model, data, replace(config, folder=tmp_path, on_epoch=cut))
    resumed = MCDropout().fit(model, data, replace(config, folder=tmp_path))
    whole = MCDropout().fit(model, data, config)
    assert torch.equal(resumed.predict(rows(5, 4), 4).samples, whole.predict(rows(5, 4), 4).samples)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rate": 0.0}, "got rate=0.0; expected a number between 0 and 1"),
        ({"rate": 1}, "got rate=1; expected"),
        ({"rate": True}, "got rate=True; expected"),
        ({"rate": float("nan")}, "got rate=nan; expected"),
        ({"where": "tail"}, "got where='tail'; expected 'all', 'head' or 'own'"),
        ({"granularity": "row"}, "granularity; expected 'element' or 'channel'"),
        ({"head": 3}, "got head=3; expected the name of a layer"),
        ({"where": "head", "head": 3}, "got head=3; expected the name of a layer"),
        ({"head": "fc"}, "got head='fc' with where='all'; expected where='head'"),
        ({"loss": nn.CrossEntropyLoss}, "expected a function of"),
    ],
)
def test_bad_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        MCDropout(**options)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.idle = nn.Linear(4, 8), nn.Linear(8, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.body(x), 0.5, self.training))


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        (lambda: nn.Linear(4, 3), {}, "no Linear or convolution after its first one"),
        (lambda: MLP(4, 3), {"where": "own"}, "no dropout layer of its own"),
        (lambda: nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 3)), {"where": "own"}, "no dropout layer of its own"),
        (Functional, {"where": "own"}, "a call of F.dropout inside forward cannot be reached"),
        (lambda: MLP(4, 3), {"where": "head", "head": "tail"}, "got head='tail'; expected a Linear or convolution"),
        (lambda: nn.Sequential(nn.LSTM(4, 3)), {"where": "head"}, "no Linear or 1×1 convolution"),
    ],
)
def test_nets_in_which_nothing_could_drop(model: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fit(model, rows(12, 4), **options)


def test_a_trained_net_is_wrapped_without_training() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)).eval()
    x = torch.randn(5, 4)
    with torch.no_grad():
        plain = net(x)
        mean = MCDropout(where="own").from_trained(net, x[:2]).predict(x, 4000).samples
    # dropout before a linear layer keeps the mean: 15 outputs within standard errors of 4,000 draws
    assert bool(((mean.mean(0) - plain).abs() <= 4.5 * mean.std(0) / 4000**0.5).all())


def test_a_net_that_asks_its_dropout_for_its_rate_gets_it() -> None:
    """transformers' models read `self.dropout.p` where they attend."""

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.25)
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            assert self.dropout.p == 0.25
            return self.fc(self.dropout(x))

    x = torch.randn(8, 4)
    predictor = MCDropout().fit(Asking, TensorDataset(x, torch.arange(8) % 2), TrainingConfig(epochs=1, progress=False))
    assert predictor.predict(x, 3).samples.shape == (3, 8, 2)
