"""SWAG against its iterates written down, sample covariances, and torch's own BatchNorm update."""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from _nets import ZOO, make
from _reference import standard_errors
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import update_bn
from torch.utils.data import IterableDataset, Subset, TensorDataset

import neuboots.methods.swag as room
from neuboots import Deterministic, TrainingConfig, load, save
from neuboots.head import add_output_axis, compute_output
from neuboots.methods.swag import SWAG, IterateMoments
from neuboots.nets import MLP, resnet8, small_deeplab
from neuboots.training import constant_schedule, cosine_schedule

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
RECIPE = TrainingConfig(epochs=4, batch_size=16, optimizer=SGD, progress=False)  # 12 steps for 48 rows


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = rows(48, 4)
DATA = TensorDataset(X, torch.arange(48) % 3)
plain_net = partial(MLP, 4, 3, widths=(6,))
normed_net = partial(MLP, 4, 3, widths=(6, 5), batch_norm=True)


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()]).double()


# -- what is collected ---------------------------------------------------------------------------------


def test_the_moments_are_those_of_the_iterates_at_the_ends_of_epochs() -> None:
    nets: list[nn.Module] = []
    ends: list[Tensor] = []

    def model() -> nn.Module:
        nets.append(plain_net())
        return nets[0]

    config = replace(RECIPE, epochs=40, on_epoch=lambda report: ends.append(flat(nets[0])))
    predictor = SWAG(start=0.5, rank=5).fit(model, DATA, config)
    theta = torch.stack(ends[19:])  # after epochs 20 … 40: (21, P)
    iterates = predictor.iterates
    assert int(iterates.count) == 21
    torch.testing.assert_close(iterates.mean.double(), theta.mean(0), rtol=1e-5, atol=1e-6)
    variance = (iterates.squares / iterates.count).double()
    torch.testing.assert_close(variance, theta.var(0, correction=0), rtol=1e-3, atol=1e-8)
    for k in range(16, 21):  # the last five, each from the mean so far
        expected = theta[k] - theta[: k + 1].mean(0)
        torch.testing.assert_close(iterates.deviations[k % 5].double(), expected, rtol=1e-4, atol=1e-6)


def test_few_epochs_are_collected_from_more_often() -> None:
    assert SWAG().steps(DATA, RECIPE) == (9, range(9, 13))
    start, steps = SWAG().steps(DATA, replace(RECIPE, epochs=20))  # 15 steps left: one by one, for at least ten
    assert (start, list(steps)) == (45, list(range(45, 61)))
    assert SWAG().steps(DATA, replace(RECIPE, epochs=400))[1] == range(900, 1201, 3)  # once an epoch
    assert list(SWAG(every=5).steps(DATA, replace(RECIPE, epochs=20))[1]) == [45, 50, 55, 60]


@pytest.mark.parametrize(
    ("options", "config"),
    [({}, replace(RECIPE, epochs=1, batch_size=48)), ({"every": 4}, RECIPE), ({"start": 0.99}, RECIPE)],
)
def test_a_recipe_that_is_too_short_is_refused(options: dict[str, Any], config: TrainingConfig) -> None:
    if options == {"start": 0.99}:  # the step before the last is still there
        assert len(SWAG(**options).steps(DATA, config)[1]) == 2
        return
    with pytest.raises(ValueError, match="which gives 1 iterate; expected at least 2: train for more epochs"):
        SWAG(**options).fit(plain_net, DATA, config)


def test_a_training_that_stopped_early_has_no_iterates() -> None:
    """Labels that contradict the training's: the first epoch is the best."""
    against = TensorDataset(X, (DATA.tensors[1] + 1) % 3)
    config = replace(RECIPE, epochs=20, patience=1)
    with pytest.raises(ValueError, match="stopped with 1 iterate collected; expected at least 2: leave patience away"):
        SWAG().fit(plain_net, DATA, config, val_data=against)


def test_patience_is_fine_where_the_training_goes_on() -> None:
    config = replace(RECIPE, epochs=8, patience=8)
    assert int(SWAG(start=0.5).fit(plain_net, DATA, config, val_data=DATA).iterates.count) >= 2


def test_a_net_that_does_not_learn_is_refused() -> None:
    with pytest.raises(
        ValueError, match="the net has no parameters to train; expected at least one with requires_grad"
    ):
        SWAG().fit(lambda: plain_net().requires_grad_(False), DATA, RECIPE)


def test_an_optimiser_that_asks_twice_gives_one_iterate() -> None:
    config = replace(RECIPE, optimizer=partial(torch.optim.LBFGS, lr=0.1, max_iter=3), lr_scheduler=constant_schedule)
    assert int(SWAG().fit(plain_net, DATA, config).iterates.count) == 4


def collected(num: int, columns: int) -> IterateMoments:
    """A net of four weights and iterates made up by hand."""
    iterates = IterateMoments(nn.Linear(3, 1).double(), columns)
    for step, theta in enumerate(rows(num, 4, seed=3).double().cumsum(0)):
        with torch.no_grad():
            iterates.net.weight.copy_(theta[:3])
            iterates.net.bias.copy_(theta[3])
        iterates.collect(step)
    return iterates


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(("num", "columns"), [(3, 5), (7, 4)])
def test_weights_have_the_covariance_of_the_paper(num: int, columns: int, scale: float) -> None:
    """½ Σ_diag + D̂ D̂ᵀ / (2 (K − 1)), with as many columns as there are iterates, K at most."""
    iterates, B = collected(num, columns), 4000
    theta = rows(num, 4, seed=3).double().cumsum(0)
    running = theta.cumsum(0) / torch.arange(1, num + 1)[:, None]
    D = (theta - running)[-columns:]
    expected = 0.5 * torch.diag(theta.var(0, correction=0)) + D.T @ D / (2 * (len(D) - 1))
    sigma = scale * expected
    draws = [iterates.weights(5, b, scale) for b in range(B)]
    samples = torch.stack([torch.cat([d["weight"][0], d["bias"]]) for d in draws])
    k = standard_errors(4 + 16)
    assert bool(((samples.mean(0) - theta.mean(0)).abs() <= k * (sigma.diagonal() / B).sqrt()).all())
    centred = samples - theta.mean(0)
    spread = ((sigma.square() + sigma.diagonal()[:, None] * sigma.diagonal()) / B).sqrt()
    assert bool(((centred.T @ centred / B - sigma).abs() <= k * spread).all())
    again = iterates.weights(5, 17, scale)
    assert torch.equal(again["weight"], draws[17]["weight"])
    assert not torch.equal(iterates.weights(6, 17, scale)["weight"], again["weight"])


def test_what_does_not_learn_is_not_drawn(tmp_path: Any) -> None:
    def model() -> nn.Module:
        net = plain_net()
        net.features[0].weight.requires_grad_(False)
        return net

    predictor = SWAG().fit(model, DATA, RECIPE)
    assert "features.0.weight" not in predictor.tensors(0)
    assert set(predictor.tensors(0)) == {"features.0.bias", "head.weight", "head.bias"}
    save(predictor, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").predict(X, 3).samples, predictor.predict(X, 3).samples)


# -- the learning rate ---------------------------------------------------------------------------------


class Recording(torch.optim.SGD):
    """Writes down the learning rates of its steps."""

    rates: list[list[float]]

    def step(self, closure: Any = None) -> Any:
        self.rates.append([group["lr"] for group in self.param_groups])
        return super().step(closure)


def rates_of(schedule: Any, **options: Any) -> list[list[float]]:
    found: list[list[float]] = []

    def optimizer(parameters: list[nn.Parameter]) -> Recording:
        groups = [{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:], "lr": 0.1}]
        made = Recording(groups)
        made.rates = found
        return made

    SWAG(**options).fit(plain_net, DATA, replace(RECIPE, optimizer=optimizer, lr_scheduler=schedule))
    return found


@pytest.mark.parametrize("learning_rate", [None, 0.03])
@pytest.mark.parametrize("start", [0.0, 0.5])
def test_the_learning_rate_is_constant_while_iterates_are_collected(start: float, learning_rate: float | None) -> None:
    rates = rates_of(cosine_schedule, start=start, learning_rate=learning_rate)
    first = max(1, int(12 * start))
    assert len(rates) == 12
    for group, base in enumerate((0.2, 0.1)):
        before = [base * (1 + math.cos(math.pi * step / 12)) / 2 for step in range(first)]
        after = [0.5 * base if learning_rate is None else learning_rate] * (12 - first)
        assert [rate[group] for rate in rates] == pytest.approx([*before, *after])


def test_any_schedule_by_steps_may_come_first() -> None:
    rates = rates_of(lambda optimizer, total: OneCycleLR(optimizer, [0.4, 0.2], total_steps=total), start=0.5)
    assert rates[0] == pytest.approx([0.016, 0.008])
    assert rates[6:] == [pytest.approx([0.1, 0.05])] * 6  # half of what the optimiser was made with
    with pytest.raises(ValueError, match="got ReduceLROnPlateau"):
        rates_of(lambda optimizer, total: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


# -- BatchNorm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [normed_net, lambda: resnet8(3)])
def test_statistics_are_those_of_the_drawn_net_on_the_kept_rows(model: Any) -> None:
    """As torch's update_bn computes them, which resets them and takes the mean over batches."""
    x = X if model is normed_net else rows(48, 3, 8, 8)
    data = TensorDataset(x, DATA.tensors[1])
    predictor = SWAG(refresh_rows=40).fit(model, data, RECIPE)
    assert predictor.iterates.inputs is not None
    kept = predictor.iterates.inputs.part0
    assert len(kept) == 40
    assert all(any(torch.equal(row, other) for other in x) for row in kept)
    for b in range(2):
        tensors = predictor.tensors(b, seed=4)
        twin = copy.deepcopy(predictor.net)
        twin.load_state_dict({**twin.state_dict(), **tensors})
        update_bn([kept[:20], kept[20:]], twin)
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(tensors[name], value)
        assert any("running_var" in name for name in tensors)
        with torch.no_grad():
            torch.testing.assert_close(predictor.predict(x[:5], 2, seed=4).samples[b], twin.eval()(x[:5]))


def test_dropout_is_off_while_statistics_are_computed() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3))

    predictor = SWAG(refresh_rows=48).fit(model, DATA, replace(RECIPE, batch_size=48, epochs=12))
    samples = predictor.predict(X, 2).samples
    predictor.net.train()
    predictor._statistics.clear()
    tensors = predictor.tensors(0)
    assert torch.equal(predictor.predict(X, 2).samples, samples)
    h = X @ tensors["0.weight"].T + tensors["0.bias"]
    torch.testing.assert_close(tensors["2.running_mean"], h.mean(0))
    torch.testing.assert_close(tensors["2.running_var"], h.var(0))
    assert all(module.training for module in predictor.net.modules())
    assert predictor.net[2].momentum == 0.1


def test_statistics_are_computed_once_for_a_replicate(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = SWAG(refresh_rows=16).fit(normed_net, DATA, RECIPE)
    calls: list[int] = []
    predictor.net.features[0].register_forward_hook(lambda layer, args, out: calls.append(len(out)))
    first = predictor.predict(X[:3], 4).samples
    assert sorted(calls) == [3] * 4 + [16] * 4
    calls.clear()
    torch.testing.assert_close(predictor.predict(X[:9], 4).samples[:, :3], first)
    assert calls == [9] * 4
    with torch.no_grad():
        predictor.iterates.mean *= 2.0  # other weights
    calls.clear()
    predictor.predict(X[:3], 4)
    assert 16 in calls
    assert not replace(predictor, scale=2.0)._statistics
    monkeypatch.setattr(room, "_MAX_CACHE_BYTES", 1)  # room for one replicate
    assert torch.equal(predictor.predict(X[:3], 4, seed=1).samples, predictor.predict(X[:3], 4, seed=1).samples)
    assert len(predictor._statistics) == 1


class Frozen(nn.Module):
    """Holds one BatchNorm layer in evaluation mode while it trains."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        self.body, self.frozen, self.norm, self.head = (
            nn.Linear(4, 6),
            *[nn.BatchNorm1d(6) for _ in "ab"],
            nn.Linear(6, 3),
        )
        self.both = both
        self.frozen.running_mean.fill_(1.0)
        self.frozen.running_var.fill_(4.0)

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.frozen.eval()
        self.norm.train(mode and not self.both)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.frozen(self.body(x))).relu())


@pytest.mark.parametrize("both", [False, True])
def test_frozen_statistics_stay(both: bool, tmp_path: Any) -> None:
    predictor = SWAG(refresh_rows=48).fit(partial(Frozen, both), DATA, replace(RECIPE, batch_size=48, epochs=12))
    assert predictor.config()["norms"] == ([] if both else ["norm"])
    assert (predictor.iterates.inputs is None) == both
    assert not any(module.training for module in predictor.net.modules())
    tensors = predictor.tensors(0)
    assert not any(name.startswith("frozen.running") for name in tensors)
    assert ("norm.running_mean" in tensors) != both
    if not both:
        h = (X @ tensors["body.weight"].T + tensors["body.bias"] - 1.0) / math.sqrt(4.0 + predictor.net.frozen.eps)
        h = h * tensors["frozen.weight"] + tensors["frozen.bias"]
        torch.testing.assert_close(tensors["norm.running_mean"], h.mean(0))
    assert bool((predictor.net.frozen.running_mean == 1.0).all())
    samples = predictor.predict(X, 3).samples
    save(predictor, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model", model=Frozen(both)).predict(X, 3).samples, samples)


@pytest.mark.parametrize("change", ["frozen weight", "input", "dtype"])
def test_statistics_are_forgotten_when_anything_changes(change: str) -> None:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        net[0].weight.requires_grad_(False)
        return net

    predictor = SWAG().fit(model, DATA, RECIPE)
    predictor.predict(X, 3)
    with torch.no_grad():
        if change == "frozen weight":
            predictor.net[0].weight *= 10.0
        elif change == "input":
            predictor.iterates.inputs.part0 += 1.0
        else:
            predictor.module.double()
    found = predictor.predict(X, 3).samples
    assert len(predictor._statistics) == 3
    predictor._statistics.clear()
    assert torch.equal(predictor.predict(X, 3).samples, found)
    assert predictor.tensors(0)["1.running_mean"].dtype == found.dtype


def test_a_net_without_batch_norm_keeps_no_rows() -> None:
    predictor = SWAG().fit(plain_net, DATA, RECIPE)
    assert predictor.iterates.inputs is None
    assert set(predictor.state_dict()) == {
        *(f"net.{name}" for name in predictor.net.state_dict()),
        *("mean", "squares", "deviations", "count", "seen"),
    }


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Linear(2, 6)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, a: Tensor, c: Tensor) -> Tensor:
        return self.head(self.norm(self.left(a) + self.right(c)).relu())


class Dicts(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> Any:
        return {"a": X[i], "c": X[i, :2]}, i % 3


@pytest.mark.parametrize("kind", ["tuple", "dict", "subset"])
def test_nets_of_several_inputs(kind: str, tmp_path: Any) -> None:
    stored = TensorDataset(X, X[:, :2], DATA.tensors[1])
    data = {"tuple": stored, "dict": Dicts(), "subset": Subset(stored, list(range(40, 8, -1)))}[kind]
    random = torch.get_rng_state()
    predictor = SWAG(refresh_rows=20).fit(TwoInputs, data, RECIPE)
    assert torch.equal(torch.get_rng_state(), random)
    assert predictor.iterates.inputs is not None
    a, c = predictor.iterates.inputs.buffers()
    assert a.shape == (20, 4)
    assert torch.equal(c, a[:, :2])
    x = {"a": X[:5], "c": X[:5, :2]} if kind == "dict" else (X[:5], X[:5, :2])
    samples = predictor.predict(x, 3).samples
    save(predictor, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model", model=TwoInputs()).predict(x, 3).samples, samples)


def test_rows_of_a_stream_are_its_first() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(X, DATA.tensors[1], strict=True))

    predictor = SWAG(refresh_rows=20).fit(normed_net, Stream(), replace(RECIPE, steps_per_epoch=3))
    assert predictor.iterates.inputs is not None
    assert torch.equal(predictor.iterates.inputs.part0, X[:20])


def test_a_net_in_double_precision_is_loaded_as_it_was(tmp_path: Any) -> None:
    predictor = SWAG().fit(lambda: normed_net().double(), DATA, RECIPE)
    save(predictor, tmp_path / "model")
    samples = predictor.predict(X, 3).samples
    assert samples.dtype == torch.float64
    assert torch.equal(load(tmp_path / "model").predict(X, 3).samples, samples)


# -- the fit -------------------------------------------------------------------------------------------


class Breaking:
    """Breaks off the training at its n-th call."""

    def __init__(self, at: int | None = None) -> None:
        self.left = at

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise InterruptedError
        return nn.CrossEntropyLoss()(outputs, targets)


@pytest.mark.parametrize("at", [3, 7, 9, 11])
def test_a_fit_cut_short_goes_on_to_the_same_bits(at: int, tmp_path: Any) -> None:
    """Before, at the beginning of, and while iterates are collected; in the middle of an epoch too."""
    config = replace(RECIPE, folder=tmp_path, checkpoint_steps=2)
    with pytest.raises(InterruptedError):
        SWAG(Breaking(at), start=0.5).fit(normed_net, DATA, config)
    resumed = SWAG(Breaking(), start=0.5).fit(normed_net, DATA, config)
    whole = SWAG(Breaking(), start=0.5).fit(normed_net, DATA, RECIPE)
    assert int(whole.iterates.count) == 7
    state, expected = resumed.state_dict(), whole.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert torch.equal(resumed.predict(X, 3).samples, whole.predict(X, 3).samples)


def test_until_iterates_are_collected_the_training_is_the_plain_one() -> None:
    """With void labels, which count for nothing."""
    y = DATA.tensors[1].clone()
    y[::2] = -100
    losses: dict[str, list[float]] = {}
    for name, method in {"swag": SWAG(start=0.5), "plain": Deterministic()}.items():
        found = losses.setdefault(name, [])
        config = replace(RECIPE, on_epoch=lambda report, found=found: found.append(report.loss))
        method.fit(plain_net, TensorDataset(X, y), config)
    assert losses["swag"][:2] == losses["plain"][:2]
    assert losses["swag"][3] != losses["plain"][3]


def test_a_checkpoint_of_another_schedule_is_refused(tmp_path: Any) -> None:
    SWAG().fit(plain_net, DATA, replace(RECIPE, folder=tmp_path))
    with pytest.raises(ValueError, match="schedule was cosine, then constant, is constant, then constant"):
        SWAG().fit(plain_net, DATA, replace(RECIPE, folder=tmp_path, lr_scheduler=constant_schedule))


@pytest.mark.parametrize("case", [case for case in ZOO if not isinstance(case.x, dict)], ids=lambda case: case.name)
def test_nets_never_seen_before(case: Any) -> None:
    n, pixels = len(case.x), case.shape[2:]
    loss = nn.MSELoss() if len(case.shape) == 1 else nn.CrossEntropyLoss()
    y = rows(n) if len(case.shape) == 1 else torch.zeros(n, *pixels, dtype=torch.long)
    predictor = SWAG(loss=loss).fit(lambda: make(case), TensorDataset(case.x, y), replace(RECIPE, optimizer=ADAM))
    prediction = predictor.predict(case.x, 3)
    assert prediction.samples.shape == (3, n, case.shape[1] if len(case.shape) > 1 else 1, *pixels)
    assert bool((prediction.std > 0).any())
    twin = copy.deepcopy(predictor.net)
    twin.load_state_dict({**twin.state_dict(), **predictor.tensors(1)})
    with torch.no_grad():
        torch.testing.assert_close(add_output_axis(compute_output(twin.eval(), case.x)), prediction.samples[1])


ADAM = partial(torch.optim.Adam, lr=1e-2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"start": 1.0}, "got start=1.0; expected the part of the training before"),
        ({"start": -0.1}, "got start=-0.1; expected"),
        ({"start": True}, "got start=True; expected"),
        ({"rank": 1}, "got rank=1; expected at least 2, and a whole number"),
        ({"rank": 2.5}, "got rank=2.5; expected"),
        ({"scale": 0.0}, "got scale=0.0; expected a positive number"),
        ({"scale": "1"}, "got scale='1'; expected"),
        ({"every": 0}, "got every=0; expected at least 1"),
        ({"every": True}, "got every=True; expected"),
        ({"learning_rate": 0}, "got learning_rate=0; expected a positive number, or None"),
        ({"learning_rate": math.inf}, "got learning_rate=inf; expected"),
        ({"refresh_rows": 1}, "got refresh_rows=1; expected at least 2"),
        ({"refresh_rows": None}, "got refresh_rows=None; expected"),
        ({"loss": nn.CrossEntropyLoss}, "expected a function of"),
    ],
)
def test_bad_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SWAG(**options)


def test_a_layer_that_does_not_gather_keeps_its_statistics() -> None:
    """DeepLab's pooling branch has one value a channel in a batch of one image, and takes its running statistics."""
    x = torch.randn(4, 3, 17, 22, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, 0] > 0).long())
    config = TrainingConfig(epochs=2, batch_size=1, progress=False)
    predictor = SWAG().fit(lambda: small_deeplab(2), data, config)
    plain = Deterministic().fit(lambda: small_deeplab(2), data, config)
    spread = predictor.predict(x, 4).samples.abs().amax() / plain.predict(x, 1).samples.abs().amax()
    assert spread < 10  # statistics from zero would divide by the square root of eps
