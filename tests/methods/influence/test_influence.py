"""Tests of the options of the influence bootstrap, and of what it rejects."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _nets import Composed, noise
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from neuboots import InfluenceBootstrap, Laplace, TrainingConfig
from neuboots.losses import GaussianNLL
from neuboots.methods.influence import _head
from neuboots.nets import MLP
from neuboots.training import EpochReport

POINTS = TensorDataset(noise(8, 4), noise(8, 1))
PIXELS = TensorDataset(noise(8, 1, 4, 4), torch.zeros(8, 4, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"ridge": -1.0}, "ridge"),
        ({"ridge": math.inf}, "ridge"),
        ({"ridge": "none"}, "ridge"),
        ({"residuals": "hc9"}, "residuals"),
        ({"layers": 0}, "layers"),
        ({"layers": "head"}, "layers"),
        ({"num_blocks": 1}, "num_blocks"),
        ({"max_kernel_rows": 1}, "max_kernel_rows"),
        ({"num_folds": -1}, "num_folds"),
        ({"num_folds": 1}, "num_folds"),
        ({"layers": 2, "refit": True}, "layers"),
        ({"loss": nn.L1Loss()}, "loss"),
        ({"loss": nn.NLLLoss()}, "loss"),
        ({"weight_distribution": "dirichlet"}, "weight_distribution"),
    ],
)
def test_options_are_checked(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"got {name}="):
        InfluenceBootstrap(**options)


def test_limits_of_options_are_allowed() -> None:
    InfluenceBootstrap(ridge=0, num_blocks=2, max_kernel_rows=2, layers="all")


@pytest.mark.parametrize(("layers", "correction"), [(1, "hc3"), (2, "hc2"), ("all", "hc2")])
def test_default_correction(layers: Any, correction: str) -> None:
    assert InfluenceBootstrap(layers=layers).correction == correction
    assert InfluenceBootstrap(nn.MSELoss(), layers=layers).correction == "smooth"


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.zeros(4), torch.zeros(1)


@pytest.mark.parametrize(
    ("options", "model", "data", "match"),
    [
        ({"layers": "all"}, lambda: nn.Conv2d(1, 2, 1), PIXELS, "layers=1"),
        ({"loss": nn.MSELoss()}, lambda: nn.Sequential(nn.Linear(4, 1), nn.Softplus()), POINTS, "upsample"),
        ({"loss": nn.MSELoss(), "head": "nowhere"}, lambda: MLP(4, 1), POINTS, "nowhere"),
        ({"layers": "all", "max_kernel_rows": 5}, lambda: nn.Linear(4, 3), POINTS, "got max_kernel_rows="),
        ({"refit": True}, lambda: nn.Linear(4, 1000), POINTS, "refit"),
        ({"loss": nn.MSELoss()}, lambda: nn.Linear(4, 1), TensorDataset(*POINTS[:1]), "got data="),
        ({"loss": nn.MSELoss(), "layers": "all"}, lambda: nn.Linear(4, 1), TensorDataset(*POINTS[:1]), "got data="),
        ({"layers": "all"}, lambda: nn.Linear(4, 1), Endless(), "data"),
        ({"layers": "all"}, lambda: nn.Flatten(), POINTS, "no weights"),
    ],
)
def test_errors_are_raised_before_the_training(
    options: dict[str, Any], model: Callable[[], nn.Module], data: Dataset[Any], match: str
) -> None:
    seen: list[EpochReport] = []
    config = TrainingConfig(epochs=2, batch_size=4, steps_per_epoch=2, progress=False, on_epoch=seen.append)
    with pytest.raises(ValueError, match=match):
        InfluenceBootstrap(**options).fit(model, data, config)
    assert not seen


@pytest.mark.parametrize("layers", [1, "all"])
@pytest.mark.parametrize(
    ("loss", "outputs", "x", "y", "match"),
    [
        (nn.MSELoss(), 2, noise(6, 2) * torch.nan, noise(6, 2), "NaN"),
        (nn.MSELoss(), 2, noise(6, 2), noise(6, 2) * torch.nan, "NaN"),
        (nn.MSELoss(), 2, noise(6, 2), noise(6), "targets"),
        (nn.CrossEntropyLoss(), 2, noise(6, 2), torch.arange(6) % 3, "targets"),
        (nn.CrossEntropyLoss(), 2, noise(6, 2), torch.zeros(6, 1).long(), "targets"),
        (nn.CrossEntropyLoss(), 2, noise(6, 2), torch.full((6,), -100), "ignored"),
        (nn.BCEWithLogitsLoss(), 1, noise(6, 2), torch.arange(6.0), "targets"),
        (GaussianNLL(), 3, noise(6, 2), noise(6), "outputs"),
        (nn.MultiMarginLoss(), 2, noise(6, 2), torch.arange(6) % 2, "got loss="),
        (lambda z, y: (z - y).square().mean(), 1, noise(6, 2), noise(6, 1), "loss"),
    ],
)
def test_data_that_do_not_fit_are_rejected(
    loss: Any, outputs: int, x: Tensor, y: Tensor, match: str, layers: Any
) -> None:
    with pytest.raises(ValueError, match=match):
        InfluenceBootstrap(loss, layers=layers).from_trained(MLP(2, outputs, widths=(4,)), TensorDataset(x, y))


def test_from_trained_rejects_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    net, data = nn.Linear(4, 2), TensorDataset(noise(8, 4), torch.arange(8) % 2)
    monkeypatch.setattr(_head, "_MAX_OUTPUTS", 1)
    with pytest.raises(ValueError, match="2 outputs"):
        InfluenceBootstrap().from_trained(net, data)
    monkeypatch.setattr(_head, "_MAX_OUTPUTS", 2)
    InfluenceBootstrap().from_trained(net, data)
    monkeypatch.undo()
    nn.init.constant_(net.weight, torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        InfluenceBootstrap().from_trained(net, data)


def test_inputs_of_several_sizes_need_the_head() -> None:
    data: Any = [(torch.ones(2 + i % 2, 4), torch.ones(1)) for i in range(4)]
    pooled = Composed(lambda net, x: net.head(x.mean(1)), head=nn.Linear(4, 1))
    InfluenceBootstrap(nn.MSELoss()).from_trained(pooled, data, batch_size=1)
    with pytest.raises(ValueError, match=r"got data=.* layers=1"):
        InfluenceBootstrap(nn.MSELoss(), layers="all").from_trained(pooled, data, batch_size=1)


def test_net_that_selects_after_its_head_needs_all_layers() -> None:
    """As classifiers on language models do, which score every token and select the last one."""
    x = torch.arange(40).view(20, 2) % 10
    net = Composed(lambda net, x: net.score(net.words(x))[:, -1], words=nn.Embedding(10, 6), score=nn.Linear(6, 2))
    data = TensorDataset(x, torch.arange(20) % 2)
    with pytest.raises(ValueError, match="layers='all'"):
        InfluenceBootstrap().from_trained(net, data)
    assert InfluenceBootstrap(layers="all").from_trained(net, data).predict(x[:1], 3).samples.shape == (3, 1, 2)


@pytest.mark.parametrize("method", [Laplace(), InfluenceBootstrap(), InfluenceBootstrap(layers="all")])
def test_from_trained_does_not_change_the_net(method: Any) -> None:
    """Also for rows that are read one by one."""
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2)).requires_grad_(False)
    net[1].eval()
    before, random = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    x, y = noise(40, 4), torch.arange(40) % 2
    data: Any = [*zip(x, y, strict=True)], TensorDataset(x, y)
    read, stored = (method.from_trained(net, each, batch_size=16).predict(x[:5], 3) for each in data)
    assert torch.equal(read.samples, stored.samples)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert [part.training for part in net.modules()] == [True, True, False, True, True]
    assert not any(module._forward_hooks for module in net.modules())
    assert not any(p.requires_grad or p.grad is not None for p in net.parameters())
