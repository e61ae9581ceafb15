"""NeuBoots: export, options and errors, beside the contract of every method."""

import copy
import itertools
import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from _nets import QUICK, Squeezed, Stream, TwoBranches, class_data, noise
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import Deterministic, NeuBoots, _validation
from neuboots._validation import ArgumentError
from neuboots.loading import Batch
from neuboots.losses import as_loss
from neuboots.methods.neuboots import (
    BootstrapGenerator,
    NeuBootsPredictor,
    compute_mean_weights,
    make_blocks,
    make_weighted_objective,
)
from neuboots.weights import (
    Constant,
    Dirichlet,
    Exponential,
    HashedBlocks,
    Link,
    Multinomial,
    WeightDistribution,
    WeightSchedule,
    apply_link,
    assign_blocks,
    compute_strata,
    link_moments,
)

X = noise(9, 4, seed=5)


@pytest.fixture(scope="module")
def predictor() -> NeuBootsPredictor:
    return NeuBoots().fit(TwoBranches, class_data(), QUICK)


def test_exported_replicate_predicts_the_same(predictor: NeuBootsPredictor) -> None:
    samples = predictor.predict(X, 3, seed=8).samples
    with torch.no_grad():
        torch.testing.assert_close(predictor.export(2, seed=8)(X), samples[2])


def test_net_that_returns_a_single_axis_gets_one_of_outputs() -> None:
    net = Squeezed().double()
    predictor = NeuBootsPredictor(BootstrapGenerator(net), Exponential())
    assert predictor.predict(X, 3).samples.shape == (3, 9, 1)
    moments = predictor.moments(X)
    assert moments.std.shape == (9, 1)
    with torch.no_grad():
        torch.testing.assert_close(moments.mean[:, 0], net(X.double()))


def test_memory_of_a_replicate_is_that_of_its_outputs_head_and_weights(predictor: NeuBootsPredictor) -> None:
    assert predictor.stream(X, 7, seed=0).replicate_bytes == 4 * 9 * 3 + 4 * 3 * 12 + 8 * 12


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
        (lambda p: NeuBootsPredictor.from_config({**p.config(), "num_blocks": 0}, p.net), r"predictor\[\"num_blocks"),
        (lambda p: BootstrapGenerator(nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))).moments(X, Dirichlet()), "affine"),
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


class Faint(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return 0.03 * super().forward(x)


@pytest.mark.parametrize("net", [Branching, Faint])
def test_net_that_cannot_be_replicated_raises_before_training(net: type[nn.Module]) -> None:
    reports: list[Any] = []
    with pytest.raises(ValueError, match="expected"):
        NeuBoots().fit(net, class_data(), replace(QUICK, on_epoch=reports.append))
    assert not reports


class Noisy(TwoBranches):
    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        return z + 0.1 * torch.randn_like(z)


def test_net_with_noise_after_its_head_is_rejected() -> None:
    with pytest.raises(ArgumentError) as error:
        NeuBoots().fit(Noisy, class_data(), QUICK)
    assert error.value.name == "head"


def test_rounding_of_bfloat16_is_accepted() -> None:
    predictor = NeuBoots().fit(lambda: TwoBranches().bfloat16(), class_data(), replace(QUICK, epochs=1))
    assert predictor.predict(X, 2).samples.dtype == torch.bfloat16


class Noted(TwoBranches):
    """Takes a tensor and texts."""

    def forward(self, x: Tensor, note: list[str]) -> Tensor:
        assert set(note) == {"text"}
        return super().forward(x)


def test_inputs_may_hold_texts() -> None:
    data = [({"x": x, "note": "text"}, i % 3) for i, x in enumerate(noise(20, 4))]
    predictor = NeuBoots().fit(Noted, data, replace(QUICK, epochs=1, batch_size=10))
    assert predictor.predict({"x": X, "note": ["text"] * 9}, 2).samples.shape == (2, 9, 3)


@pytest.mark.parametrize("weights", [Dirichlet(), Multinomial(), Exponential(), Constant()])
def test_weights_that_are_constant_by_their_number_are_reported(weights: Any) -> None:
    """One weight of sum one has no spread, whatever its distribution; constant weights are what was asked for."""
    method, net = NeuBoots(weight_distribution=weights), nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 3))
    alike = isinstance(weights, Dirichlet | Multinomial)
    with pytest.warns(UserWarning, match="with 1 block") if alike else nullcontext():
        predictor = method.fit(net, class_data(), QUICK)
    spread = float(predictor.predict(class_data().tensors[0][:5], 9).samples.std(0).max())
    assert (spread > 0) == isinstance(weights, Exponential)


@pytest.mark.filterwarnings("ignore:with 1 block")
@pytest.mark.parametrize("resample", ["sample", "pool"])
def test_features_without_one_row_per_example_need_another_schedule(resample: Any) -> None:
    def folded() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Flatten(0, 1), nn.Linear(1, 3))

    with pytest.raises(ArgumentError) as error:
        NeuBoots(resample=resample).fit(folded, class_data(), QUICK)
    assert error.value.name == "resample"


@pytest.mark.filterwarnings("ignore:with 1 block")
@pytest.mark.parametrize(
    ("width", "n", "num_blocks"), [(8, 50, 1), (8, 50, 10_000), (10_010, 50, 10_010), (8, 10_010, 10_010)]
)
def test_at_most_as_many_blocks_as_rows_or_features(width: int, n: int, num_blocks: int) -> None:
    """Or 10,000, most of which may be empty."""
    net = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))
    data, config = class_data(n), replace(QUICK, epochs=1, batch_size=n)
    method = NeuBoots(num_blocks=num_blocks, resample="epoch")
    method.fit(net, data, config)
    if num_blocks > 1:
        with pytest.raises(ArgumentError) as error:
            replace(method, num_blocks=num_blocks + 1).fit(net, data, config)
        assert (error.value.name, error.value.value) == ("num_blocks", num_blocks + 1)


@pytest.mark.parametrize(
    ("resample", "batch_size", "rows"),
    [("sample", 16, 16), ("sample", 500, 50), ("pool", 16, 256), ("step", 16, 1), ("epoch", 16, 1)],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_weights_of_a_step_must_fit_into_memory(
    resample: Any, batch_size: int, rows: int, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """120 bytes for each while they are drawn."""
    data: Any = Stream(*class_data().tensors) if streamed else class_data()
    rows = batch_size if streamed and resample == "sample" else rows
    config = replace(QUICK, epochs=1, batch_size=batch_size, steps_per_epoch=1)
    method = NeuBoots(num_blocks=20, resample=resample)
    monkeypatch.setattr(_validation, "_UNCHECKED_BYTES", 0)
    monkeypatch.setattr(_validation, "available_memory", lambda: 120 * rows * 20)
    method.fit(TwoBranches, data, config)
    monkeypatch.setattr(_validation, "available_memory", lambda: 120 * rows * 20 - 1)
    with pytest.raises(ArgumentError, match="GB") as error:
        method.fit(TwoBranches, data, config)
    assert (error.value.name, error.value.value) == ("num_blocks", 20)


def test_weights_depend_on_the_seed_of_the_training() -> None:
    """One step on all rows, whose order does not matter."""
    net, config = TwoBranches(), replace(QUICK, epochs=1, batch_size=50)
    first, again, other = (
        NeuBoots().fit(copy.deepcopy(net), class_data(), replace(config, seed=seed)).net.fc.weight.detach()
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert float((first - other).abs().max()) > 1e-4


# -- parts of the training -----------------------------------------------------------------------------


def test_recipes() -> None:
    assert NeuBoots.paper() == NeuBoots(weight_distribution=Dirichlet(1.0), resample="epoch")
    assert isinstance(NeuBoots.paper().loss, nn.CrossEntropyLoss)
    assert isinstance(NeuBoots.regression().loss, nn.MSELoss)
    assert NeuBoots.regression().weight_distribution == Dirichlet(20.0)
    assert NeuBoots().weight_distribution == Dirichlet(5.0)
    loss = nn.CrossEntropyLoss(ignore_index=7)
    for method in (NeuBoots.paper(loss), NeuBoots.regression(loss)):
        assert method.loss.ignore_index == 7


@pytest.mark.parametrize("link", ["identity", "exp"])
@pytest.mark.parametrize("weight_distribution", [Dirichlet(), Exponential(3.0)], ids=str)
def test_mean_weights_have_the_mean_factor(weight_distribution: WeightDistribution, link: Link) -> None:
    factor = apply_link(compute_mean_weights(weight_distribution, link, 4), link)
    mean = link_moments(weight_distribution, link, 4)[0]
    torch.testing.assert_close(factor, torch.full((4,), mean))


def test_blocks_are_stratified_by_the_targets() -> None:
    x, labels, masks = noise(60, 2), torch.arange(60) % 3, torch.full((60, 4, 4), 9)
    masks[:, 0, 0] = labels  # one pixel counts
    cases = [(labels, None, labels), (masks, nn.CrossEntropyLoss(ignore_index=9), labels)]
    cases += [(masks.where(masks != 9, -100), None, labels)]
    cases += [(y, nn.MSELoss(), compute_strata(y)) for y in (x, x[:, 0])]
    for (y, loss, strata), listed in itertools.product(cases, [False, True]):
        data: Any = list(zip(x, y, strict=True)) if listed else TensorDataset(x, y)
        blocks = make_blocks(data, 5, loss=loss, seed=3)
        assert torch.equal(blocks(torch.arange(60)), assign_blocks(60, 5, strata=strata, seed=3))
        assert blocks.num_blocks == 5
        method, generator = NeuBoots(loss or nn.CrossEntropyLoss()), BootstrapGenerator(nn.Linear(5, 2))
        schedule = method.make_schedule(generator, data, seed=3)
        assert torch.equal(schedule.blocks(torch.arange(60)), blocks(torch.arange(60)))
    assert make_blocks(Stream(x, labels), 5, seed=3) == HashedBlocks(5, seed=3)


def test_schedule_has_the_options_of_the_method() -> None:
    method = NeuBoots(weight_distribution=Exponential(), resample="step", warmup=2, num_blocks=3)
    generator = method.make_generator(TwoBranches())
    schedule = method.make_schedule(generator, class_data(), seed=4)
    assert (schedule.weight_distribution, schedule.seed, schedule.resample, schedule.warmup) == (
        Exponential(),
        4,
        "step",
        2,
    )
    assert schedule.blocks.num_blocks == generator.num_blocks == 3
    assert torch.equal(schedule.blocks.blocks, make_blocks(class_data(), 3, seed=4).blocks)
    assert method.make_schedule(generator, class_data()).seed == 0


@pytest.mark.parametrize("resample", ["epoch", "step", "sample"])
def test_objective_is_the_weighted_mean_loss(resample: Any) -> None:
    """1/n Σ α_{u(i)} ℓ(g(Xᵢ, α), yᵢ), over the targets that count."""
    net, x, y = nn.Linear(4, 3), X, torch.tensor([0, 1, 2, -100, 0, 1, 2, -100, 1])
    generator, loss = BootstrapGenerator(net), nn.CrossEntropyLoss(reduction="none")
    schedule = WeightSchedule(Dirichlet(), HashedBlocks(4), seed=1, resample=resample)
    index = torch.arange(10, 19)
    found = make_weighted_objective(schedule, as_loss(nn.CrossEntropyLoss()))(2)(generator, Batch(x, y, index, step=7))
    alpha, w = schedule.at_epoch(2)(index, step=7)
    losses = loss((x * alpha.float()) @ net.weight.T + net.bias, y)
    torch.testing.assert_close(found, (w.float() * losses).sum() / (y != -100).sum())


@pytest.mark.parametrize("link", ["identity", "exp"])
def test_configuration_gives_the_predictor_back(link: Any) -> None:
    net = TwoBranches()
    generator = BootstrapGenerator(net, head="fc", num_blocks=3, link=link)
    predictor = NeuBootsPredictor(generator.eval(), Exponential(2.0))
    config = json.loads(json.dumps(predictor.config()))
    assert config["method"] == "neuboots"
    again = NeuBootsPredictor.from_config(config, net)
    assert torch.equal(again.predict(X, 3, seed=2).samples, predictor.predict(X, 3, seed=2).samples)
    assert again.config() == config
    assert again.net is net
    assert not again.generator.training


@pytest.mark.parametrize(
    "options",
    [{"link": "log"}, {"resample": "day"}, {"warmup": -1}, {"num_blocks": 0}, {"weight_distribution": Dirichlet}],
    ids=str,
)
def test_wrong_option_raises(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as error:
        NeuBoots(**options)
    assert error.value.name == next(iter(options))


def test_validation_uses_the_mean_weights() -> None:
    reports: list[Any] = []
    data, config = class_data(), replace(QUICK, epochs=1, on_epoch=reports.append)
    predictor = NeuBoots(weight_distribution=Exponential(), link="exp").fit(TwoBranches, data, config, val_data=data)
    x, y = data.tensors
    with torch.no_grad():
        output = predictor.moments(x).mean  # the net ends at its head
    assert reports[0].val_metrics["loss"] == pytest.approx(float(nn.functional.cross_entropy(output, y)), rel=1e-4)
    assert reports[0].val_metrics["error"] == pytest.approx(float((output.argmax(1) != y).float().mean()))
