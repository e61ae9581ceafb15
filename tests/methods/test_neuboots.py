"""NeuBoots: exact moments, export, options and errors, beside the contract of every method."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from _nets import QUICK, TwoBranches, class_data, noise
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset, random_split

from neuboots import Deterministic, NeuBoots
from neuboots._validation import ArgumentError
from neuboots.generator import BootstrapGenerator
from neuboots.methods.neuboots import NeuBootsPredictor
from neuboots.training import TrainingConfig
from neuboots.weights import Constant, Dirichlet

X = noise(9, 4, seed=5)


@pytest.fixture(scope="module")
def predictor() -> NeuBootsPredictor:
    return NeuBoots().fit(TwoBranches, class_data(), QUICK)


def test_exact_moments_are_those_of_many_replicates(predictor: NeuBootsPredictor) -> None:
    prediction = predictor.predict(X, 4000)
    moments = predictor.moments(X)
    assert torch.equal(prediction.mean, moments.mean)
    # 27 outputs: 5 standard errors of a mean, and 5 × 1/√(2B) of a nearly normal standard deviation
    gap = (prediction.samples.mean(0) - moments.mean).abs()
    assert bool((gap <= 5 * moments.std / 4000**0.5).all())
    torch.testing.assert_close(prediction.samples.std(0), moments.std, rtol=5 / 8000**0.5, atol=0)


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


def test_predictor_around_a_trained_net_has_gradients() -> None:
    predictor = NeuBootsPredictor(BootstrapGenerator(TwoBranches()), Dirichlet(10.0))
    x = X.clone().requires_grad_()
    predictor.predict(x, 4).probs.amax(1).sum().backward()
    assert x.grad is not None
    assert bool((x.grad != 0).any())


@pytest.mark.parametrize("link", ["identity", "exp"])
def test_other_optimizer_and_subset_of_data(link: Any) -> None:
    config = TrainingConfig(epochs=1, optimizer=torch.optim.RMSprop, clip_norm=1.0, progress=False)
    train_data, val_data = random_split(class_data(), [40, 10], generator=torch.Generator().manual_seed(0))
    predictor = NeuBoots(nn.CrossEntropyLoss(), link=link).fit(TwoBranches, train_data, config, val_data=val_data)
    assert predictor.predict(X, 2).samples.shape == (2, 9, 3)


def test_iterable_data_set_needs_steps_per_epoch() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            for i in range(40):
                yield noise(4, seed=i), i % 3

    config = replace(QUICK, batch_size=8, steps_per_epoch=5)
    assert NeuBoots().fit(TwoBranches, Stream(), config).predict(X, 2).samples.shape == (2, 9, 3)
    with pytest.raises(ValueError, match="steps_per_epoch"):
        NeuBoots().fit(TwoBranches, Stream(), QUICK)


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
