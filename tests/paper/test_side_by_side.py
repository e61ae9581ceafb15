"""Nets trained side by side are the nets trained one by one."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from neuboots import Deterministic, TrainingConfig
from neuboots.nets import MLP
from neuboots.training import initialize_model, train
from neuboots_paper.side_by_side import train_side_by_side


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def config() -> TrainingConfig:
    return TrainingConfig(
        epochs=6, batch_size=7, optimizer=partial(torch.optim.Adam, lr=1e-2, fused=True), seed=5, progress=False
    )


def model() -> torch.nn.Module:
    return MLP(2, 1, widths=(8, 8))


def test_each_is_the_net_trained_alone() -> None:
    sets = [TensorDataset(drawn(20, 2, seed=k), drawn(20, seed=10 + k)) for k in range(3)]
    nets = train_side_by_side(model, sets, config(), seeds=(5, 5, 5))
    x = drawn(9, 2, seed=99)
    for data, net in zip(sets, nets, strict=True):
        alone = Deterministic(nn.MSELoss()).fit(model, data, config())
        torch.testing.assert_close(net(x), alone.net(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(nets[0](x), nets[1](x), atol=1e-3)


def test_weights_are_those_of_the_loss() -> None:
    data = TensorDataset(drawn(20, 2, seed=0), drawn(20, seed=1))
    weights = torch.rand(2, 20, generator=torch.Generator().manual_seed(2)) + 0.5
    nets = train_side_by_side(model, [data, data], config(), seeds=(1, 2), weights=weights)
    x = drawn(9, 2, seed=99)
    for seed, w, net in zip((1, 2), weights, nets, strict=True):
        alone = initialize_model(model, seed)

        def objective(model: torch.nn.Module, batch: object, w: torch.Tensor = w) -> torch.Tensor:
            losses = (model(batch.x)[:, 0] - batch.y).square()  # type: ignore[attr-defined]
            return (w[batch.index] * losses).mean()  # type: ignore[attr-defined]

        train(alone, data, lambda epoch, objective=objective: objective, config())  # type: ignore[misc]
        torch.testing.assert_close(net(x), alone(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seeds", [(0, 1), (1, 0)])
def test_first_numbers_go_by_the_seed(seeds: tuple[int, int]) -> None:
    data = TensorDataset(drawn(8, 2, seed=0), drawn(8, seed=1))
    still = TrainingConfig(epochs=1, batch_size=8, optimizer=partial(torch.optim.SGD, lr=0.0), progress=False)
    nets = train_side_by_side(model, [data, data], still, seeds=seeds)
    x = drawn(3, 2, seed=9)
    for seed, net in zip(seeds, nets, strict=True):
        torch.testing.assert_close(net(x), initialize_model(model, seed)(x))


def test_an_activation_that_stands_twice_acts_twice() -> None:
    shared = torch.nn.Tanh()

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 4), shared, torch.nn.Linear(4, 4), shared, torch.nn.Linear(4, 1))

    data = TensorDataset(drawn(20, 2, seed=0), drawn(20, seed=1))
    (net,) = train_side_by_side(make, [data], config(), seeds=(5,))
    x = drawn(9, 2, seed=99)
    torch.testing.assert_close(
        net(x), Deterministic(nn.MSELoss()).fit(make, data, config()).net(x), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("layer", [torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1, bias=False)])
def test_other_nets_are_refused(layer: torch.nn.Module) -> None:
    data = TensorDataset(drawn(8, 2, seed=0), drawn(8, seed=1))
    with pytest.raises(TypeError, match="expected a row of Linear layers and activations"):
        train_side_by_side(lambda: torch.nn.Sequential(torch.nn.Linear(2, 1), layer), [data], config(), seeds=(0,))
