"""SWAG against recorded iterates, the covariance of the paper, and torch's BatchNorm update."""

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from _nets import Stream, TwoInputs, noise
from _reference import standard_errors
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from neuboots import SWAG, Deterministic, TrainingConfig, load, save
from neuboots._validation import ArgumentError
from neuboots.methods import swag
from neuboots.methods.swag import IterateMoments
from neuboots.nets import MLP, resnet8, small_deeplab
from neuboots.training import constant_schedule, cosine_schedule

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CONFIG = TrainingConfig(epochs=4, batch_size=16, optimizer=SGD, progress=False)  # 12 steps for 48 examples
X = noise(48, 4)
DATA = TensorDataset(X, torch.arange(48) % 3)
mlp = partial(MLP, 4, 3, widths=(6,))
normed_mlp = partial(MLP, 4, 3, widths=(6, 5), batch_norm=True)


# -- iterates ------------------------------------------------------------------------------------------


def test_moments_are_those_of_the_iterates_at_the_ends_of_epochs() -> None:
    net = mlp()
    ends: list[Tensor] = []

    def record(report: Any) -> None:
        ends.append(torch.cat([p.detach().flatten() for p in net.parameters()]).double())

    predictor = SWAG(start=0.5, rank=5).fit(net, DATA, replace(CONFIG, epochs=40, on_epoch=record))
    theta = torch.stack(ends[19:])  # after epochs 20 … 40: (21, P)
    iterates = predictor.iterates
    assert int(iterates.count) == 21
    torch.testing.assert_close(iterates.mean.double(), theta.mean(0), rtol=1e-5, atol=1e-6)
    variance = (iterates.squares / iterates.count).double()
    torch.testing.assert_close(variance, theta.var(0, correction=0), rtol=1e-3, atol=1e-8)
    for k in range(16, 21):  # the last five, each from the running mean
        expected = theta[k] - theta[: k + 1].mean(0)
        torch.testing.assert_close(iterates.deviations[k % 5].double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "epochs", "start", "steps"),
    [
        ({}, 4, 9, range(9, 13)),
        ({}, 20, 45, range(45, 61)),  # 15 steps left: each step, for at least ten iterates
        ({}, 400, 900, range(900, 1201, 3)),  # once an epoch
        ({"every": 5}, 20, 45, range(45, 61, 5)),
        ({"start": 0.99}, 4, 11, range(11, 13)),
    ],
)
def test_steps_at_which_iterates_are_collected(options: Any, epochs: int, start: int, steps: range) -> None:
    assert SWAG(**options)._plan_steps(DATA, replace(CONFIG, epochs=epochs)) == (start, steps)


@pytest.mark.parametrize(
    ("options", "config", "argument"),
    [
        ({}, replace(CONFIG, epochs=1, batch_size=48), "start"),
        ({"every": 4}, CONFIG, "start"),
        ({"start": 0.5}, CONFIG, "model"),  # without trainable parameters
    ],
)
def test_training_without_two_iterates_raises(options: Any, config: TrainingConfig, argument: str) -> None:
    with pytest.raises(ArgumentError) as error:
        SWAG(**options).fit(lambda: mlp().requires_grad_(argument != "model"), DATA, config)
    assert error.value.name == argument


def test_early_stopping_before_two_iterates_raises() -> None:
    contradicting = TensorDataset(X, (DATA.tensors[1] + 1) % 3)  # the first epoch is the best
    with pytest.raises(ValueError, match="patience"):
        SWAG().fit(mlp, DATA, replace(CONFIG, epochs=20, patience=1), val_data=contradicting)
    predictor = SWAG(start=0.5).fit(mlp, DATA, replace(CONFIG, epochs=8, patience=8), val_data=DATA)
    assert int(predictor.iterates.count) >= 2


def test_optimizer_with_several_evaluations_per_step_gives_one_iterate() -> None:
    lbfgs = partial(torch.optim.LBFGS, lr=0.1, max_iter=3)
    predictor = SWAG().fit(mlp, DATA, replace(CONFIG, optimizer=lbfgs, lr_scheduler=constant_schedule))
    assert int(predictor.iterates.count) == 4


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(("num", "columns"), [(3, 5), (7, 4)])
def test_weights_have_the_covariance_of_the_paper(num: int, columns: int, scale: float) -> None:
    """½ Σ_diag + D̂ D̂ᵀ / (2 (K − 1)), with one column per iterate, at most K."""
    B = 1000
    theta = noise(num, 4, seed=3).double().cumsum(0)
    iterates = IterateMoments(nn.Linear(3, 1).double(), columns)
    for step, row in enumerate(theta):
        with torch.no_grad():
            iterates.net.weight.copy_(row[:3])
            iterates.net.bias.copy_(row[3])
        iterates.collect(step)
    D = (theta - theta.cumsum(0) / torch.arange(1, num + 1)[:, None])[-columns:]
    sigma = scale * (0.5 * torch.diag(theta.var(0, correction=0)) + D.T @ D / (2 * (len(D) - 1)))
    draws = [iterates.draw_weights(5, b, scale) for b in range(B)]
    samples = torch.stack([torch.cat([d["weight"][0], d["bias"]]) for d in draws])
    k = standard_errors(4 + 16)
    assert bool(((samples.mean(0) - theta.mean(0)).abs() <= k * (sigma.diagonal() / B).sqrt()).all())
    centred = samples - theta.mean(0)
    error = ((sigma.square() + sigma.diagonal()[:, None] * sigma.diagonal()) / B).sqrt()
    assert bool(((centred.T @ centred / B - sigma).abs() <= k * error).all())
    again = iterates.draw_weights(5, 17, scale)
    assert torch.equal(again["weight"], draws[17]["weight"])
    assert not torch.equal(iterates.draw_weights(6, 17, scale)["weight"], again["weight"])


def test_frozen_parameters_are_not_drawn(tmp_path: Any) -> None:
    def factory() -> nn.Module:
        net = mlp()
        net.features[0].weight.requires_grad_(False)
        return net

    predictor = SWAG().fit(factory, DATA, CONFIG)
    assert set(predictor.tensors(0)) == {"features.0.bias", "head.weight", "head.bias"}
    assert predictor.iterates.inputs is None  # no BatchNorm
    save(predictor, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").predict(X, 3).samples, predictor.predict(X, 3).samples)


# -- the learning rate ---------------------------------------------------------------------------------


class RecordingSGD(torch.optim.SGD):
    """Records the learning rates of its steps."""

    rates: list[list[float]]

    def step(self, closure: Any = None) -> Any:
        self.rates.append([group["lr"] for group in self.param_groups])
        return super().step(closure)


def record_rates(schedule: Any, **options: Any) -> list[list[float]]:
    rates: list[list[float]] = []

    def optimizer(parameters: list[nn.Parameter]) -> RecordingSGD:
        made = RecordingSGD([{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:], "lr": 0.1}])
        made.rates = rates
        return made

    SWAG(**options).fit(mlp, DATA, replace(CONFIG, optimizer=optimizer, lr_scheduler=schedule))
    return rates


@pytest.mark.parametrize("learning_rate", [None, 0.03])
@pytest.mark.parametrize("start", [0.0, 0.5])
def test_learning_rate_is_constant_while_iterates_are_collected(start: float, learning_rate: float | None) -> None:
    rates = record_rates(cosine_schedule, start=start, learning_rate=learning_rate)
    first = max(1, int(12 * start))
    assert len(rates) == 12
    for group, base in enumerate((0.2, 0.1)):
        before = [base * (1 + math.cos(math.pi * step / 12)) / 2 for step in range(first)]
        after = [0.5 * base if learning_rate is None else learning_rate] * (12 - first)
        assert [rate[group] for rate in rates] == pytest.approx([*before, *after])


def test_first_part_may_have_any_schedule_by_steps() -> None:
    rates = record_rates(lambda optimizer, total: OneCycleLR(optimizer, [0.4, 0.2], total_steps=total), start=0.5)
    assert rates[0] == pytest.approx([0.016, 0.008])
    assert rates[6:] == [pytest.approx([0.1, 0.05])] * 6  # half of the optimizer's initial rates
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        record_rates(lambda optimizer, total: ReduceLROnPlateau(optimizer))


# -- BatchNorm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", [normed_mlp, lambda: resnet8(3)])
def test_statistics_equal_those_of_update_bn(factory: Any) -> None:
    x = X if factory is normed_mlp else noise(48, 3, 8, 8)
    predictor = SWAG(refresh_rows=40).fit(factory, TensorDataset(x, DATA.tensors[1]), CONFIG)
    assert predictor.iterates.inputs is not None
    stored = predictor.iterates.inputs.part0
    assert len(stored) == 40
    assert all(any(torch.equal(row, other) for other in x) for row in stored)
    for b in range(2):
        tensors = predictor.tensors(b, seed=4)
        net = copy.deepcopy(predictor.net)
        net.load_state_dict({**net.state_dict(), **tensors})
        update_bn([stored[:20], stored[20:]], net)
        for name, value in net.state_dict().items():
            torch.testing.assert_close(tensors[name], value)
        assert any("running_var" in name for name in tensors)
        with torch.no_grad():
            torch.testing.assert_close(predictor.predict(x[:5], 2, seed=4).samples[b], net.eval()(x[:5]))


def test_dropout_is_inactive_while_statistics_are_computed() -> None:
    def factory() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3))

    predictor = SWAG(refresh_rows=48).fit(factory, DATA, replace(CONFIG, batch_size=48, epochs=12))
    samples = predictor.predict(X, 2).samples
    predictor.net.train()
    predictor._cache.clear()
    tensors = predictor.tensors(0)
    assert torch.equal(predictor.predict(X, 2).samples, samples)
    h = X @ tensors["0.weight"].T + tensors["0.bias"]
    torch.testing.assert_close(tensors["2.running_mean"], h.mean(0))
    torch.testing.assert_close(tensors["2.running_var"], h.var(0))
    assert all(module.training for module in predictor.net.modules())
    assert predictor.net[2].momentum == 0.1


def test_statistics_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = SWAG(refresh_rows=16).fit(normed_mlp, DATA, CONFIG)
    calls: list[int] = []
    predictor.net.features[0].register_forward_hook(lambda layer, args, out: calls.append(len(out)))
    first = predictor.predict(X[:3], 4).samples
    assert sorted(calls) == [3] * 4 + [16] * 4
    calls.clear()
    torch.testing.assert_close(predictor.predict(X[:9], 4).samples[:, :3], first)
    assert calls == [9] * 4
    assert not replace(predictor, scale=2.0)._cache
    monkeypatch.setattr(swag, "_MAX_CACHE_BYTES", 1)  # one replicate
    assert torch.equal(predictor.predict(X[:3], 4, seed=1).samples, predictor.predict(X[:3], 4, seed=1).samples)
    assert len(predictor._cache) == 1


@pytest.mark.parametrize("change", ["frozen weight", "input", "dtype"])
def test_cache_is_cleared_when_a_tensor_changes(change: str) -> None:
    def factory() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        net[0].weight.requires_grad_(False)
        return net

    predictor = SWAG().fit(factory, DATA, CONFIG)
    predictor.predict(X, 3)
    with torch.no_grad():
        if change == "frozen weight":
            predictor.net[0].weight *= 10.0
        elif change == "input":
            predictor.iterates.inputs.part0 += 1.0
        else:
            predictor.module.double()
    samples = predictor.predict(X, 3).samples
    assert len(predictor._cache) == 3
    predictor._cache.clear()
    assert torch.equal(predictor.predict(X, 3).samples, samples)
    assert predictor.tensors(0)["1.running_mean"].dtype == samples.dtype


class FrozenNorm(nn.Module):
    """Keeps one BatchNorm layer (or both) in evaluation mode during training."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        norms = [nn.BatchNorm1d(6) for _ in range(2)]
        self.body, self.frozen, self.norm, self.head = (nn.Linear(4, 6), *norms, nn.Linear(6, 3))
        self.both = both
        self.frozen.running_mean.fill_(1.0)
        self.frozen.running_var.fill_(4.0)

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        self.frozen.eval()
        self.norm.train(mode and not self.both)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.frozen(self.body(x))).relu())


@pytest.mark.parametrize("both", [False, True])
def test_frozen_statistics_are_kept(both: bool, tmp_path: Any) -> None:
    predictor = SWAG(refresh_rows=48).fit(partial(FrozenNorm, both), DATA, replace(CONFIG, batch_size=48, epochs=12))
    assert predictor.norms == (() if both else ("norm",))
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
    assert torch.equal(load(tmp_path / "model", model=FrozenNorm(both)).predict(X, 3).samples, samples)


class Dicts(Dataset[Any]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> Any:
        return {"a": X[i], "b": -X[i]}, i % 3


@pytest.mark.parametrize("form", ["tuple", "dict", "subset"])
def test_stored_inputs_of_nets_with_several_inputs(form: str, tmp_path: Any) -> None:
    pairs = TensorDataset(X, -X, DATA.tensors[1])
    data = {"tuple": pairs, "dict": Dicts(), "subset": Subset(pairs, list(range(40, 8, -1)))}[form]
    predictor = SWAG(refresh_rows=20).fit(TwoInputs, data, CONFIG)
    assert predictor.iterates.inputs is not None
    a, b = predictor.iterates.inputs.buffers()
    assert a.shape == (20, 4)
    assert torch.equal(b, -a)
    x = {"a": X[:5], "b": -X[:5]} if form == "dict" else (X[:5], -X[:5])
    samples = predictor.predict(x, 3).samples
    save(predictor, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model", model=TwoInputs()).predict(x, 3).samples, samples)


def test_stored_inputs_are_collated_as_in_training() -> None:
    def collate(rows: list[Any]) -> Any:
        return torch.stack([row[0] for row in rows]) + 100.0, torch.tensor([int(row[1]) for row in rows])

    predictor = SWAG(refresh_rows=20).fit(normed_mlp, DataLoader(DATA, batch_size=16, collate_fn=collate), CONFIG)
    assert predictor.iterates.inputs is not None
    assert float(predictor.iterates.inputs.part0.mean()) > 50


def test_stored_inputs_of_an_iterable_data_set_are_its_first() -> None:
    predictor = SWAG(refresh_rows=20).fit(normed_mlp, Stream(*DATA.tensors), replace(CONFIG, steps_per_epoch=3))
    assert predictor.iterates.inputs is not None
    assert torch.equal(predictor.iterates.inputs.part0, X[:20])


def test_layer_that_skips_a_batch_of_one_image_keeps_its_statistics() -> None:
    """DeepLab's pooling branch has one value per channel for a single image, and uses its running statistics."""
    x = noise(4, 3, 17, 22)
    data, config = TensorDataset(x, (x[:, 0] > 0).long()), TrainingConfig(epochs=2, batch_size=1, progress=False)
    sizes = [
        method.fit(lambda: small_deeplab(2), data, config).predict(x, 4).samples.abs().amax()
        for method in (SWAG(), Deterministic())
    ]
    assert sizes[0] < 10 * sizes[1]  # a variance of zero would divide by √eps


# -- training ------------------------------------------------------------------------------------------


class InterruptingLoss:
    """Interrupts training at its n-th call."""

    def __init__(self, at: int | None = None) -> None:
        self.left = at

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise InterruptedError
        return nn.functional.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize("at", [3, 7, 9, 11])
def test_interrupted_run_resumes_to_the_same_bits(at: int, tmp_path: Any) -> None:
    """Before, at the start of, and during the collection of iterates; also within an epoch."""
    config = replace(CONFIG, folder=tmp_path, checkpoint_steps=2)
    with pytest.raises(InterruptedError):
        SWAG(InterruptingLoss(at), start=0.5).fit(normed_mlp, DATA, config)
    resumed = SWAG(InterruptingLoss(), start=0.5).fit(normed_mlp, DATA, config)
    expected = SWAG(InterruptingLoss(), start=0.5).fit(normed_mlp, DATA, CONFIG)
    assert int(expected.iterates.count) == 7
    state = resumed.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())
    assert torch.equal(resumed.predict(X, 3).samples, expected.predict(X, 3).samples)


def test_training_before_the_start_is_the_ordinary_one_and_checkpoints_name_the_schedule(tmp_path: Any) -> None:
    y = DATA.tensors[1].clone()
    y[::2] = -100  # ignored
    losses: dict[str, list[float]] = {}
    for name, method in {"swag": SWAG(start=0.5), "deterministic": Deterministic()}.items():
        found = losses.setdefault(name, [])
        config = replace(CONFIG, on_epoch=lambda report, found=found: found.append(report.loss))
        method.fit(mlp, TensorDataset(X, y), config)
    assert losses["swag"][:2] == losses["deterministic"][:2]
    assert losses["swag"][3] != losses["deterministic"][3]
    SWAG().fit(mlp, DATA, replace(CONFIG, folder=tmp_path))
    with pytest.raises(ValueError, match="expected"):
        SWAG().fit(mlp, DATA, replace(CONFIG, folder=tmp_path, lr_scheduler=constant_schedule))
