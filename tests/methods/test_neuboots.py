"""NeuBoots: export, options and errors, beside the contract of every method."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from _nets import QUICK, Stream, TwoBranches, class_data, noise
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import Deterministic, NeuBoots
from neuboots._validation import ArgumentError
from neuboots.methods.neuboots import NeuBootsPredictor
from neuboots.weights import Constant

X = noise(9, 4, seed=5)


@pytest.fixture(scope="module")
def predictor() -> NeuBootsPredictor:
    return NeuBoots().fit(TwoBranches, class_data(), QUICK)


def test_exported_replicate_predicts_the_same(predictor: NeuBootsPredictor) -> None:
    samples = predictor.predict(X, 3, seed=8).samples
    with torch.no_grad():
        torch.testing.assert_close(predictor.export(2, seed=8)(X), samples[2])


def test_constant_weights_give_the_deterministic_net() -> None:
    net = Deterministic().fit(TwoBranches, class_data(), QUICK)
    single = NeuBoots(weight_distribution=Constant()).fit(TwoBranches, class_data(), QUICK)
    torch.testing.assert_close(single.predict(X, 1).samples, net.predict(X, 1).samples)
    assert bool((single.predict(X, 5).std == 0).all())


def test_train_head_only_keeps_the_features() -> None:
    pretrained = TwoBranches()
    before = {key: value.clone() for key, value in pretrained.state_dict().items()}
    NeuBoots(train_head_only=True).fit(pretrained, class_data(), QUICK)
    changed = {key for key, value in pretrained.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {"fc.weight", "fc.bias"}


def test_iterable_data_set_needs_steps_per_epoch() -> None:
    data, config = Stream(*class_data(40).tensors), replace(QUICK, batch_size=8, steps_per_epoch=5)
    assert NeuBoots().fit(TwoBranches, data, config).predict(X, 2).samples.shape == (2, 9, 3)
    with pytest.raises(ValueError, match="steps_per_epoch"):
        NeuBoots().fit(TwoBranches, data, QUICK)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda p: p.moments(X * torch.nan), "NaN"),
        (lambda p: p.predict(X.to(torch.uint8), 2), "uint8"),
        (lambda p: NeuBoots(head="left").fit(TwoBranches, class_data(), QUICK), "head"),
        (lambda p: NeuBoots().fit(lambda: nn.Sequential(nn.Conv1d(4, 3, 3)), class_data(), QUICK), "Linear"),
        (lambda p: NeuBoots().fit(TwoBranches, TensorDataset(X), QUICK), "data"),
        (lambda p: NeuBoots(lambda z, y: z.sum()).fit(TwoBranches, class_data(), QUICK), "loss"),
    ],
)
def test_invalid_arguments_raise(call: Any, argument: str, predictor: NeuBootsPredictor) -> None:
    with pytest.raises(ValueError, match=argument):
        call(predictor)


class Branching(TwoBranches):
    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        return z if z.sum().item() > 0 else -z


def test_net_that_cannot_be_replicated_raises_before_training() -> None:
    reports: list[Any] = []
    with pytest.raises(ValueError, match="expected"):
        NeuBoots().fit(Branching, class_data(), replace(QUICK, on_epoch=reports.append))
    assert not reports


def test_features_without_one_row_per_example_need_another_schedule() -> None:
    def folded() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Flatten(0, 1), nn.Linear(1, 3))

    with pytest.raises(ArgumentError) as error:
        NeuBoots().fit(folded, class_data(), QUICK)
    assert error.value.name == "resample"
