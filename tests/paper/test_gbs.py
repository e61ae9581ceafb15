"""GBS: α is concatenated to the input of every layer, and the net is trained with the weighted loss."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _nets import (
    QUICK,
    ZOO,
    Case,
    ListedLayers,
    Squeezed,
    TokenData,
    Tokens,
    WeightNormed,
    class_data,
    make,
    noise,
)
from _reference import least_squares, standard_errors
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import TrainingConfig
from neuboots._validation import ArgumentError
from neuboots.head import compute_output, unwrap_model
from neuboots.loading import Batch
from neuboots.methods.neuboots import draw_replicate_weights, make_blocks, make_weighted_objective
from neuboots.weights import Dirichlet, Exponential, WeightSchedule
from neuboots_paper.baselines.gbs import GBS, GBSGenerator, WidenedLayer

S = 5


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


# -- widened layers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [noise(S, seed=1), noise(6, S, seed=1)], ids=["one α", "α per example"])
@pytest.mark.parametrize("shape", [(6, 4), (6, 7, 4)], ids=["rows", "tokens"])
def test_linear_layer_reads_x_and_alpha(alpha: Tensor, shape: tuple[int, ...]) -> None:
    layer = nn.Linear(4, 3)
    generator = GBSGenerator(layer, S)
    widened = generator.net[0]
    assert widened.in_features == 4
    x = noise(*shape)
    wide = alpha.expand(6, S) if len(shape) == 2 else alpha.view(-1, 1, S).expand(6, 7, S)
    expected = F.linear(torch.cat([x, wide], -1), torch.cat([layer.weight, widened.V], 1), layer.bias)
    torch.testing.assert_close(generator(x, alpha), expected.movedim(-1, 1))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("alpha", [noise(S, seed=1), noise(6, S, seed=1)], ids=["one α", "α per example"])
def test_convolution_reads_alpha_as_constant_planes(dims: int, alpha: Tensor) -> None:
    convolve, kind = [(F.conv1d, nn.Conv1d), (F.conv2d, nn.Conv2d), (F.conv3d, nn.Conv3d)][dims - 1]
    layer = kind(2, 3, 3, stride=2)
    generator = GBSGenerator(layer, S)
    columns = noise(3, S, *[3] * dims, seed=2)  # of the widened layer, at every position of the kernel
    generator.net[0].V.data = columns.flatten(2).sum(2)
    x = noise(6, 2, *[7] * dims)
    planes = alpha.view(-1, S, *[1] * dims).expand(6, S, *[7] * dims)
    expected = convolve(torch.cat([x, planes], 1), torch.cat([layer.weight, columns], 1), layer.bias, stride=2)
    torch.testing.assert_close(generator(x, alpha), expected)


@pytest.mark.parametrize("case", [case for case in ZOO if case.name != "compiled body"], ids=lambda case: case.name)
def test_net_is_unchanged_without_alpha_or_with_zero_columns(case: Case) -> None:
    net = unwrap_model(make(case))
    expected = compute_output(net, case.x)
    generator = GBSGenerator(net, S)
    torch.testing.assert_close(generator(case.x), expected)
    assert not torch.allclose(generator(case.x, noise(S)), expected)
    for layer in generator.modules():
        if isinstance(layer, WidenedLayer):
            nn.init.zeros_(layer.V)
    torch.testing.assert_close(generator(case.x, noise(S)), expected)
    torch.testing.assert_close(generator(case.x, noise(len(expected), S)), expected)


def test_columns_are_initialised_as_those_of_a_wider_layer() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        linear = nn.Linear(40 + 60, 300).weight[:, 40:].detach()
        conv = nn.Conv2d(6 // 2 + 60, 300, 3).weight[:, 3:].flatten(2).sum(2).detach()
    for layer, theirs in ((nn.Linear(40, 300), linear), (nn.Conv2d(6, 300, 3, groups=2), conv)):
        mine = WidenedLayer(layer, 60).V.detach()
        assert mine.shape == theirs.shape
        error = 1 / np.sqrt(mine.numel())  # of the ratio of two standard deviations, tails no longer than normal
        assert abs(float(mine.std() / theirs.std()) - 1) < standard_errors(2) * error
        assert abs(float(mine.mean() / mine.std())) < standard_errors(2) / np.sqrt(mine.numel())
    bound = (40 + 60) ** -0.5
    assert 0.99 * bound < float(WidenedLayer(nn.Linear(40, 300), 60).V.detach().abs().max()) <= bound
    first, second, other = (GBSGenerator(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), S, seed=s) for s in (0, 0, 1))
    assert torch.equal(first.net[0].V, second.net[0].V)
    assert not torch.equal(first.net[0].V, other.net[0].V)
    assert not torch.equal(first.net[0].V, first.net[1].V)


# -- training ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resample", ["sample", "step", "epoch"])
def test_objective_is_the_weighted_loss(resample: Any) -> None:
    data, generator, loss = class_data(), GBSGenerator(small_net(), S), GBS().loss
    blocks = make_blocks(data, S, seed=0)
    schedule = WeightSchedule(Dirichlet(), blocks, 0, resample)
    index = torch.tensor([3, 10, 11, 49])
    x, y = (tensor[index] for tensor in data.tensors)
    value = make_weighted_objective(schedule, loss)(1)(generator, Batch(x, y, index, step=6)).detach()
    alpha, _ = schedule.at_epoch(1)(index, step=6)
    first, last = generator.net[0], generator.net[2]
    total = 0.0
    for i in range(4):
        a = (alpha[i] if resample == "sample" else alpha).float()
        h = F.linear(torch.cat([x[i], a]), torch.cat([first.weight, first.V], 1), first.bias).relu()
        z = F.linear(torch.cat([h, a]), torch.cat([last.weight, last.V], 1), last.bias)
        total += float(a[blocks(index)[i]] * (z.logsumexp(0) - z[y[i]]).detach())
    assert float(value) == pytest.approx(total / 4, rel=1e-5)


def test_linear_model_follows_the_refit_with_the_weights() -> None:
    """g(x, α) = wᵀx + vᵀα + b at the mean input is closer to the weighted least squares fit than its mean is."""
    x = noise(40, 2)
    y = x @ torch.tensor([1.0, -2.0]) + 0.5 + noise(40, seed=1)
    data, distribution = TensorDataset(x, y), Dirichlet(concentration=3.0)
    config = TrainingConfig(epochs=150, batch_size=40, optimizer=partial(torch.optim.Adam, lr=0.02), progress=False)
    method = GBS(loss=nn.MSELoss(), weight_distribution=distribution, num_blocks=8)
    predictor = method.fit(lambda: nn.Linear(2, 1), data, config)
    centre = x.mean(0, keepdim=True)
    samples = predictor.predict(centre, 200).samples[:, 0, 0].double().numpy()
    blocks = make_blocks(data, 8, loss=method.loss, seed=0)(torch.arange(40))
    X = np.column_stack([x, np.ones(40)])
    refits = [
        float(np.append(centre[0], 1.0) @ least_squares(X, y.double().numpy(), alpha[blocks].numpy()))
        for alpha in draw_replicate_weights(distribution, 8, 0, 200, seed=0)
    ]
    assert 1 - np.mean((samples - refits) ** 2) / np.var(refits) > 0.5


def test_batch_norm_removes_alpha_unless_it_is_drawn_per_sample() -> None:
    generator = GBSGenerator(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), S)
    alphas = Dirichlet().sample(torch.arange(20), S)
    grads = []
    for alpha in (alphas[0], alphas):
        generator.zero_grad()
        F.cross_entropy(generator(noise(20, 4), alpha), torch.arange(20) % 3).backward()
        grads.append(float(generator.net[0].V.grad.norm()))
    assert grads[0] < 1e-6 < 1e-3 < grads[1]


def test_default_number_of_blocks_is_n_up_to_100() -> None:
    for n, expected in ((50, 50), (101, 100)):
        assert GBS().fit(small_net, class_data(n), QUICK).modified.num_blocks == expected


def test_replicate_is_a_pass_with_its_alpha() -> None:
    predictor = GBS(num_blocks=S, weight_distribution=Exponential()).fit(small_net, class_data(), QUICK)
    x = noise(6, 4, seed=3)
    samples = predictor.predict(x, 4, seed=9).samples
    for b, alpha in enumerate(draw_replicate_weights(Exponential(), S, 0, 4, 9)):
        assert torch.equal(samples[b], predictor.modified(x, alpha))


@pytest.mark.parametrize(
    ("factory", "data", "loss", "shape"),
    [
        (Squeezed, TensorDataset(noise(50, 4), noise(50, seed=1)), nn.MSELoss(), (3, 1)),
        (WeightNormed, class_data(), nn.CrossEntropyLoss(), (3, 3)),
        (lambda: torch.compile(small_net(), backend="eager"), class_data(), nn.CrossEntropyLoss(), (3, 3)),
        (Tokens, TokenData(), nn.CrossEntropyLoss(), (3, 3, 7)),
    ],
    ids=["squeezed", "weight norm", "compiled", "keywords"],
)
def test_any_net_is_trained(factory: Any, data: Any, loss: Any, shape: tuple[int, ...]) -> None:
    predictor = GBS(loss=loss, num_blocks=S).fit(factory, data, QUICK, val_data=data)
    x = torch.utils.data.default_collate([data[i][0] for i in range(3)])
    assert predictor.predict(x, 2).samples.shape == (2, *shape)


# -- errors --------------------------------------------------------------------------------------------


def test_invalid_alpha_raises() -> None:
    generator = GBSGenerator(small_net(), S)
    for shape in ((S + 1,), (2, 6, S), ()):
        with pytest.raises(ArgumentError):
            generator(noise(6, 4), torch.ones(shape))


class Folded(nn.Module):
    """Reads pairs of its inputs as separate rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 6), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.reshape(-1, 2)).relu().reshape(len(x), 12))


class ReadsTypes(nn.Module):
    """Depends on the types of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x.tanh() if isinstance(layer, nn.Linear) else x
        return x


def compiled_body() -> nn.Module:
    return nn.Sequential(torch.compile(nn.Sequential(nn.Linear(4, 8)), backend="eager"), nn.Linear(8, 3))


@pytest.mark.parametrize("factory", [ListedLayers, ReadsTypes, compiled_body, lambda: nn.BatchNorm1d(4)])
@pytest.mark.parametrize("resample", ["sample", "step"])
def test_nets_that_cannot_be_widened_raise(factory: Any, resample: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        GBS(resample=resample).fit(factory, class_data(), QUICK)


class RandomInPlace(nn.Sequential):
    """Writes into its input, and draws random numbers in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        x += 0.5
        return F.dropout(super().forward(x), 0.5)


def test_random_nets_and_folded_batches() -> None:
    GBS().fit(lambda: RandomInPlace(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), class_data(), QUICK)
    with pytest.raises(ArgumentError) as error:
        GBS().fit(Folded, class_data(), QUICK)
    assert error.value.name == "resample"
    predictor = GBS(resample="epoch").fit(Folded, class_data(), QUICK)
    assert predictor.predict(noise(3, 4), 2).samples.shape == (2, 3, 3)
