"""GBS: α is concatenated to the input of every layer, and the net is trained with the weighted loss."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _nets import ZOO, Case, Squeezed, Tokens, WeightNormed, make
from _reference import least_squares, standard_errors
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import neuboots_paper.baselines.gbs as room
from neuboots.head import call_net, extract_output, unwrap_model
from neuboots.loading import Batch
from neuboots.methods.batch_ensemble import outputs_match
from neuboots.methods.neuboots import draw_replicate_weights, make_blocks
from neuboots.nets import MLP
from neuboots.serialization import load, save
from neuboots.training import EpochReport, TrainingConfig
from neuboots.weights import Dirichlet, Exponential, WeightSchedule
from neuboots_paper.baselines.gbs import GBS, GBSGenerator, GBSPredictor, WidenedLayer

RECIPE = TrainingConfig(epochs=2, batch_size=16, progress=False)
S = 5


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes() -> TensorDataset:
    return TensorDataset(rows(50, 4), torch.arange(50) % 3)


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


# -- surgery -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [rows(S, seed=1), rows(6, S, seed=1)], ids=["one α", "an α for each row"])
@pytest.mark.parametrize("shape", [(6, 4), (6, 7, 4)], ids=["rows", "tokens"])
def test_a_linear_layer_sees_x_and_alpha_side_by_side(alpha: Tensor, shape: tuple[int, ...]) -> None:
    layer = nn.Linear(4, 3)
    generator = GBSGenerator(layer, S)
    widened = generator.net[0]
    x = rows(*shape)
    wide = alpha.expand(6, S) if len(shape) == 2 else alpha.view(-1, 1, S).expand(6, 7, S)
    expected = F.linear(torch.cat([x, wide], -1), torch.cat([layer.weight, widened.V], 1), layer.bias)
    torch.testing.assert_close(generator(x, alpha), expected)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("alpha", [rows(S, seed=1), rows(6, S, seed=1)], ids=["one α", "an α for each row"])
def test_a_convolution_sees_alpha_as_constant_planes(dims: int, alpha: Tensor) -> None:
    convolve, kind = [(F.conv1d, nn.Conv1d), (F.conv2d, nn.Conv2d), (F.conv3d, nn.Conv3d)][dims - 1]
    layer = kind(2, 3, 3, stride=2)
    generator = GBSGenerator(layer, S)
    columns = rows(3, S, *[3] * dims, seed=2)  # the widened layer's own, at every place of the kernel
    generator.net[0].V.data = columns.flatten(2).sum(2)
    x = rows(6, 2, *[7] * dims)
    planes = alpha.view(-1, S, *[1] * dims).expand(6, S, *[7] * dims)
    expected = convolve(torch.cat([x, planes], 1), torch.cat([layer.weight, columns], 1), layer.bias, stride=2)
    torch.testing.assert_close(generator(x, alpha), expected)


@pytest.mark.parametrize("case", [case for case in ZOO if case.name != "compiled body"], ids=lambda case: case.name)
def test_without_alpha_or_without_columns_it_is_the_plain_net(case: Case) -> None:
    net = unwrap_model(make(case))
    plain = extract_output(call_net(net, case.x))
    generator = GBSGenerator(net, S)
    torch.testing.assert_close(generator(case.x), plain)
    assert not torch.allclose(generator(case.x, rows(S)), plain)
    for layer in generator.modules():
        if isinstance(layer, WidenedLayer):
            nn.init.zeros_(layer.V)
    torch.testing.assert_close(generator(case.x, rows(S)), plain)
    torch.testing.assert_close(generator(case.x, rows(len(plain), S)), plain)


def test_new_columns_begin_as_those_of_a_wider_layer() -> None:
    """The standard deviation of the columns, against torch's own layers of that width."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        linear = nn.Linear(40 + 60, 300).weight[:, 40:]
        conv = nn.Conv2d(6 // 2 + 60, 300, 3).weight[:, 3:].flatten(2).sum(2)
        linear, conv = linear.detach(), conv.detach()
    for layer, theirs in ((nn.Linear(40, 300), linear), (nn.Conv2d(6, 300, 3, groups=2), conv)):
        mine = WidenedLayer(layer, 60).V.detach()
        assert mine.shape == theirs.shape
        error = 1 / np.sqrt(mine.numel())  # of the ratio of two standard deviations, tails no longer than normal
        assert abs(float(mine.std() / theirs.std()) - 1) < standard_errors(2) * error
        assert abs(float(mine.mean() / mine.std())) < standard_errors(2) / np.sqrt(mine.numel())
    bound = (40 + 60) ** -0.5
    assert 0.99 * bound < float(WidenedLayer(nn.Linear(40, 300), 60).V.detach().abs().max()) <= bound


def test_columns_are_governed_by_the_seed_and_differ_between_layers() -> None:
    first, second, other = (GBSGenerator(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), S, seed=s) for s in (0, 0, 1))
    assert torch.equal(first.net[0].V, second.net[0].V)
    assert not torch.equal(first.net[0].V, other.net[0].V)
    assert not torch.equal(first.net[0].V, first.net[1].V)


def test_the_net_still_finds_its_layer() -> None:
    assert GBSGenerator(small_net(), S).net[0].in_features == 4


# -- training ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resample", ["sample", "step", "epoch"])
def test_the_objective_is_the_weighted_loss(resample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caught: dict[str, Any] = {}
    monkeypatch.setattr(room, "train", lambda net, data, objective_at, *rest, **more: caught.update(at=objective_at))
    data = classes()
    predictor = GBS(num_blocks=S, resample=resample).fit(small_net, data, RECIPE)
    index = torch.tensor([3, 10, 11, 49])
    x, y = (tensor[index] for tensor in data.tensors)
    value = caught["at"](1)(predictor.generator, Batch(x, y, index, step=6)).detach()

    blocks = make_blocks(data, S, loss=nn.CrossEntropyLoss(), seed=0)
    alpha, _ = WeightSchedule(Dirichlet(), blocks, 0, resample).at_epoch(1)(index, step=6)
    first, last = predictor.generator.net[0], predictor.generator.net[2]
    total = 0.0
    for i in range(4):
        a = (alpha[i] if resample == "sample" else alpha).float()
        h = F.linear(torch.cat([x[i], a]), torch.cat([first.weight, first.V], 1), first.bias).relu()
        z = F.linear(torch.cat([h, a]), torch.cat([last.weight, last.V], 1), last.bias)
        total += float(a[blocks(index)[i]] * (z.logsumexp(0) - z[y[i]]).detach())
    assert float(value) == pytest.approx(total / 4, rel=1e-5)


def test_a_linear_model_follows_the_refit_with_those_weights() -> None:
    """g(x, α) = wᵀx + vᵀα + b at the mean input: nearer to the weighted least squares fit than its mean is."""
    x = rows(40, 2)
    y = x @ torch.tensor([1.0, -2.0]) + 0.5 + rows(40, seed=1)
    data = TensorDataset(x, y)
    config = TrainingConfig(epochs=150, batch_size=40, optimizer=partial(torch.optim.Adam, lr=0.02), progress=False)
    weight_distribution = Dirichlet(concentration=3.0)
    predictor = GBS(loss=nn.MSELoss(), weight_distribution=weight_distribution, num_blocks=8).fit(
        lambda: nn.Linear(2, 1), data, config
    )
    centre = x.mean(0, keepdim=True)
    samples = predictor.predict(centre, 200).samples[:, 0, 0].double().numpy()
    blocks = make_blocks(data, 8, loss=nn.MSELoss(), seed=0)(torch.arange(40))
    X = np.column_stack([x, np.ones(40)])
    refits = [
        float(np.append(centre[0], 1.0) @ least_squares(X, y.double().numpy(), alpha[blocks].numpy()))
        for alpha in draw_replicate_weights(weight_distribution, 8, 0, 200, seed=0)
    ]
    explained = 1 - np.mean((samples - refits) ** 2) / np.var(refits)
    assert explained > 0.5


def test_batch_norm_takes_alpha_away_unless_it_is_drawn_for_each_sample() -> None:
    """The finding in the docstring: what is the same for the whole batch is subtracted with the batch's mean."""
    generator = GBSGenerator(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), S)
    alphas = Dirichlet().sample(torch.arange(20), S)
    grads = []
    for alpha in (alphas[0], alphas):
        generator.zero_grad()
        nn.CrossEntropyLoss()(generator(rows(20, 4), alpha), torch.arange(20) % 3).mean().backward()
        grads.append(float(generator.net[0].V.grad.norm()))
    assert grads[0] < 1e-6 < 1e-3 < grads[1]


def test_the_default_number_of_blocks() -> None:
    assert GBS().fit(small_net, classes(), RECIPE).generator.num_blocks == 50
    many = TensorDataset(rows(101, 4), torch.arange(101) % 3)
    assert GBS().fit(small_net, many, RECIPE).generator.num_blocks == 100


# -- prediction ----------------------------------------------------------------------------------------


def test_replicate_b_is_a_pass_with_its_own_alpha() -> None:
    predictor = GBS(num_blocks=S, weight_distribution=Exponential()).fit(small_net, classes(), RECIPE)
    x = rows(6, 4, seed=3)
    samples = predictor.predict(x, 4, seed=9).samples
    for b, alpha in enumerate(draw_replicate_weights(Exponential(), S, 0, 4, 9)):
        assert torch.equal(samples[b], predictor.generator(x, alpha))


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        ids = torch.randint(0, 11, (7,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "scale": torch.ones(1, 1)}, ids % 3


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.CrossEntropyLoss()(outputs.mT, targets)


@pytest.mark.parametrize(
    ("model", "data", "loss", "shape"),
    [
        (Squeezed, TensorDataset(rows(50, 4), rows(50, seed=1)), nn.MSELoss(), (3, 1)),
        (WeightNormed, classes(), nn.CrossEntropyLoss(), (3, 3)),
        (
            lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)),
            classes(),
            nn.CrossEntropyLoss(),
            (3, 3),
        ),
        (lambda: nn.Linear(4, 3), classes(), nn.CrossEntropyLoss(reduction="none"), (3, 3)),
        (lambda: torch.compile(small_net(), backend="eager"), classes(), nn.CrossEntropyLoss(), (3, 3)),
        (Tokens, Sentences(), token_loss, (3, 7, 3)),
    ],
    ids=["squeezed", "weight norm", "lazy", "bare", "compiled", "keywords"],
)
def test_any_net(model: Any, data: Any, loss: Any, shape: tuple[int, ...]) -> None:
    predictor = GBS(loss=loss, num_blocks=S).fit(model, data, RECIPE, val_data=data)
    x = torch.utils.data.default_collate([data[i][0] for i in range(3)])
    assert predictor.predict(x, 2).samples.shape == (2, *shape)


def test_a_net_of_the_library_is_rebuilt(tmp_path: Path) -> None:
    predictor = GBS(num_blocks=S).fit(lambda: MLP(4, 3, widths=(8,)), classes(), RECIPE)
    save(predictor, tmp_path / "model")
    again = load(tmp_path / "model")
    x = rows(6, 4, seed=3)
    assert torch.equal(again.predict(x, 4).samples, predictor.predict(x, 4).samples)


def test_a_fit_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    def stop(report: EpochReport) -> None:
        if report.epoch == 1:
            raise RuntimeError("cut short")

    fit = partial(GBS(num_blocks=S).fit, small_net, classes())
    whole = fit(TrainingConfig(epochs=4, batch_size=16, progress=False))
    with pytest.raises(RuntimeError, match="cut short"):
        fit(TrainingConfig(epochs=4, batch_size=16, progress=False, folder=tmp_path, on_epoch=stop))
    resumed = fit(TrainingConfig(epochs=4, batch_size=16, progress=False, folder=tmp_path))
    x = rows(6, 4, seed=3)
    assert torch.equal(whole.predict(x, 3).samples, resumed.predict(x, 3).samples)


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_blocks": 0}, "got S = 0 blocks; expected at least 1"),
        ({"weight_distribution": Dirichlet}, "expected a law such as Dirichlet()"),
        ({"resample": "never"}, "got redraw='never'; expected one of 'epoch', 'step', 'sample', 'pool'"),
        ({"loss": nn.CrossEntropyLoss}, "expected a function of .outputs, targets."),
    ],
)
def test_bad_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        GBS(**options)


def test_alphas_of_another_shape() -> None:
    generator = GBSGenerator(small_net(), S)
    for shape in ((S + 1,), (2, 6, S), ()):
        with pytest.raises(ValueError, match=rf"expected \({S},\), or \(N, {S}\)"):
            generator(rows(6, 4), torch.ones(shape))


def test_nets_that_cannot_be_widened() -> None:
    body = torch.compile(nn.Sequential(nn.Linear(4, 8)), backend="eager")
    with pytest.raises(ValueError, match="parts of the net are compiled.*expected a net that is not"):
        GBS().fit(lambda: nn.Sequential(body, nn.Linear(8, 3)), classes(), RECIPE)
    with pytest.raises(ValueError, match="no Linear layer and no convolution to widen; expected at least one"):
        GBSGenerator(nn.BatchNorm1d(4), S)


class Folded(nn.Module):
    """Looks at each pair of its inputs by itself, all in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 6), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.reshape(-1, 2)).relu().reshape(len(x), 12))


class Listed(nn.Module):
    """Calls its layers by a plain list beside its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.steps = [self.first, nn.ReLU(), self.last]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class Asking(nn.Module):
    """Asks what its layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x.tanh() if isinstance(layer, nn.Linear) else x
        return x


class Drawing(nn.Sequential):
    """Writes into its input, and draws random numbers in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        x += 0.5
        return F.dropout(super().forward(x), 0.5)


@pytest.mark.parametrize("resample", ["sample", "step", "epoch"])
def test_nets_that_are_others_with_other_layers(resample: Any) -> None:
    with pytest.raises(ValueError, match="calls its layers by other ways than its attributes.*expected every layer"):
        GBS(resample=resample).fit(Listed, classes(), RECIPE)
    with pytest.raises(ValueError, match="the widened net has other outputs than the net had; expected"):
        GBS(resample=resample).fit(Asking, classes(), RECIPE)
    GBS(resample=resample).fit(Drawing, classes(), RECIPE)


def test_outputs_are_compared_by_their_size() -> None:
    x = rows(5, 3)
    assert outputs_match(1e-9 * x * (1 + 1e-6), 1e-9 * x)
    assert not outputs_match(1e-9 * x * 1.1, 1e-9 * x)
    assert not outputs_match(x[:1], x)
    assert outputs_match(0 * x, 0 * x)


def test_layers_that_see_other_rows() -> None:
    with pytest.raises(ValueError, match="a layer sees 4 rows of 2 inputs.*choose redraw='step' or 'epoch'"):
        GBS().fit(Folded, classes(), RECIPE)
    predictor = GBS(resample="step").fit(Folded, classes(), RECIPE)
    assert predictor.predict(rows(5, 4), 2).samples.shape == (2, 5, 3)


def test_a_law_of_ones_own_cannot_be_saved(tmp_path: Path) -> None:
    class Mine(Exponential):
        pass

    predictor = GBSPredictor(GBSGenerator(small_net(), S), small_net(), Mine())
    with pytest.raises(ValueError, match="got a law of your own.*only these can be saved"):
        save(predictor, tmp_path / "model")
