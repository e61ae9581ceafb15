"""Tests of the options of the influence bootstrap, and of what it rejects."""

import copy
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from _nets import Composed, noise
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from neuboots import Deterministic, InfluenceBootstrap, Laplace, TrainingConfig
from neuboots.losses import GaussianNLL
from neuboots.methods.influence import _head, _sum_squares
from neuboots.methods.influence._tangent import build_tangent_predictors
from neuboots.nets import MLP
from neuboots.posthoc import ScaledPredictor
from neuboots.training import EpochReport, initialize_model, resolve_fit
from neuboots.weights import Dirichlet

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
        ({"num_calibration_fits": -1}, "num_calibration_fits"),
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
        ({"layers": "all", "num_calibration_fits": 1}, lambda: nn.Conv2d(1, 2, 1), PIXELS, "layers=1"),
        ({"loss": nn.MSELoss()}, lambda: nn.Sequential(nn.Linear(4, 1), nn.Softplus()), POINTS, "upsample"),
        ({"loss": nn.MSELoss(), "head": "nowhere"}, lambda: MLP(4, 1), POINTS, "nowhere"),
        ({"layers": "all", "max_kernel_rows": 5}, lambda: nn.Linear(4, 3), POINTS, "got max_kernel_rows="),
        ({"refit": True}, lambda: nn.Linear(4, 1000), POINTS, "refit"),
        ({"loss": nn.MSELoss()}, lambda: nn.Linear(4, 1), TensorDataset(*POINTS[:1]), "got data="),
        ({"loss": nn.MSELoss(), "layers": "all"}, lambda: nn.Linear(4, 1), TensorDataset(*POINTS[:1]), "got data="),
        ({"layers": "all"}, lambda: nn.Linear(4, 1), Endless(), "data"),
        ({"layers": "all"}, lambda: nn.Flatten(), POINTS, "no weights"),
        ({"num_calibration_fits": 1}, lambda: nn.Linear(4, 1), Endless(), "data"),
        (
            {"loss": nn.MSELoss(), "num_calibration_fits": 10**12},
            lambda: nn.Linear(4, 1),
            POINTS,
            f"got num_calibration_fits={10**12};",
        ),
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
    monkeypatch.undo()
    with pytest.raises(ValueError, match="got num_calibration_fits="):
        InfluenceBootstrap(num_calibration_fits=1).from_trained(net, data)
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


# -- size of the deviations ----------------------------------------------------------------------------

X = noise(100, 2)
DATA = TensorDataset(X, X[:, 0].sin() + 0.3 * noise(100, seed=1))
SMALL, WIDE = (partial(MLP, 2, 1, widths=widths) for widths in ((16, 16), (64, 64)))


def config(epochs: int, rate: float = 1e-2) -> TrainingConfig:
    return TrainingConfig(epochs=epochs, batch_size=50, optimizer=partial(torch.optim.Adam, lr=rate), progress=False)


FAR = config(5, rate=0.1)  # with such large steps the wide net moves much further than to first order


def method(**options: Any) -> InfluenceBootstrap:
    return InfluenceBootstrap(nn.MSELoss(), **{"layers": "all", "num_calibration_fits": 1, **options})


def fit(options: InfluenceBootstrap, model: Callable[[], nn.Module], how: TrainingConfig) -> ScaledPredictor:
    predictor = options.fit(model, DATA, how)
    assert isinstance(predictor, ScaledPredictor)
    return predictor


def scale(predictor: ScaledPredictor) -> float:
    assert predictor.std_scale is not None
    return predictor.std_scale[0]


def train_all(options: InfluenceBootstrap, model: Callable[[], nn.Module], how: TrainingConfig) -> list[nn.Module]:
    """The net and its replicates."""
    net = initialize_model(model, how.seed)
    nets = [net, *(copy.deepcopy(net) for _ in range(options.num_calibration_fits))]
    return options._train_with_replicates(nets, resolve_fit(net, DATA, how))


def test_scale_is_ratio_of_deviations() -> None:
    """Against the formula at all rows; the deviations are those of the unscaled predictor, times s."""
    options = method(num_calibration_fits=2)
    found = fit(options, WIDE, FAR)
    inner: Any = found.inner
    raw = method(num_calibration_fits=0, residuals="raw", ridge=inner.ridge).from_trained(inner.net, DATA)
    _, *nets = train_all(options, WIDE, FAR)
    with torch.no_grad():
        moved = torch.stack([(net(X) - inner.net(X)).square().mean() for net in nets]).mean()
    expected = float(moved / raw.summarize(X, 2).std.square().mean())
    assert expected > 4.0
    assert scale(found) ** 2 == pytest.approx(expected, rel=0.25)  # the variance is estimated from 64 draws
    torch.testing.assert_close(found.summarize(X, 2).std, scale(found) * inner.summarize(X, 2).std)
    torch.testing.assert_close(found.summarize(X, 2).mean, inner.summarize(X, 2).mean)


def test_scale_below_one_is_ignored() -> None:
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 1))  # in evaluation mode
    raw = method(num_calibration_fits=0, residuals="raw").from_trained(net, DATA)
    variance = float(raw.summarize(X, 2).std.square().mean())
    for shift in (0.0, 0.5, 5.0):
        other = copy.deepcopy(net)
        with torch.no_grad():
            other[-1].bias += shift
        found = method()._scale_by_replicates(net, [other], resolve_fit(net, DATA, config(1)))
        assert scale(found) == pytest.approx(max(1.0, shift / math.sqrt(variance)), rel=0.15)
        assert shift > 0 or scale(found) == 1.0


def test_scale_does_not_depend_on_the_weight_distribution() -> None:
    wide, narrow = (fit(method(weight_distribution=Dirichlet(c)), WIDE, FAR) for c in (1.0, 4.0))
    assert wide.std_scale == narrow.std_scale
    assert scale(wide) > 2.0


def test_replicates_start_from_the_initial_weights_of_the_net() -> None:
    options = method(num_calibration_fits=2, layers=1)
    nets = train_all(options, SMALL, config(1, rate=0.0))
    assert torch.equal(nets[0](X), nets[1](X))
    nets = train_all(options, SMALL, config(2))
    assert all(not torch.allclose(one(X), other(X), atol=1e-4) for one, other in combinations(nets, 2))
    fewer = train_all(replace(options, num_calibration_fits=1), SMALL, config(2))
    for one, other in zip(fewer, nets[:2], strict=True):  # a further replicate does not change the others
        torch.testing.assert_close(one(X), other(X))


class Locked(nn.Linear):
    """A net that cannot be copied."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.lock = threading.Lock()


def test_initial_weights_are_the_same_for_any_model() -> None:
    """With a random generator of the user, a module, and a net that cannot be copied: nothing has moved."""
    generator = torch.Generator().manual_seed(5)

    def own_generator() -> nn.Module:
        net = SMALL()
        for weight in net.parameters():
            nn.init.normal_(weight, generator=generator)
        return net

    for model, layers in ((own_generator, "all"), (SMALL(), "all"), (Locked, 1)):
        assert scale(fit(method(layers=layers), model, config(1, rate=0.0))) == 1.0  # type: ignore[arg-type]


def test_vectorized_and_sequential_training_agree() -> None:
    """Small nets are vectorized; with a (large) norm to clip gradients at they are trained sequentially."""
    vectorized, sequential = (train_all(method(), SMALL, replace(config(20), clip_norm=c)) for c in (None, 1e9))
    for one, other in zip(vectorized, sequential, strict=True):
        torch.testing.assert_close(one(X), other(X), rtol=1e-4, atol=1e-5)
    plain = Deterministic(nn.MSELoss()).fit(SMALL, DATA, config(20)).net
    torch.testing.assert_close(vectorized[0](X), plain(X), rtol=1e-4, atol=1e-5)
    scales = [scale(fit(method(), WIDE, replace(FAR, clip_norm=c))) for c in (None, 1e9)]
    assert scales[0] == pytest.approx(scales[1], rel=0.02)


def test_one_kernel_gives_both_predictors() -> None:
    net, options = SMALL(), method(num_calibration_fits=0, weight_distribution=Dirichlet(4.0))
    raw = replace(options, residuals="raw", weight_distribution=Dirichlet())
    for found, alone in zip(
        build_tangent_predictors([options, raw], net, resolve_fit(net, DATA, config(1))), (options, raw), strict=True
    ):
        expected = alone.from_trained(net, DATA, batch_size=50)
        assert torch.equal(found.predict(X, 5).samples, expected.predict(X, 5).samples)


def test_further_replicate_continues_from_the_checkpoints(tmp_path: Path) -> None:
    """The net and the first replicate are not trained again; validation data reach the training."""
    seen: list[EpochReport] = []
    how = replace(config(1), clip_norm=1e9, folder=tmp_path, on_epoch=seen.append)
    for count in (1, 2):
        method(layers=1, num_calibration_fits=count).fit(SMALL, DATA, how, val_data=DATA)
    assert [report.title for report in seen] == ["member 1/2", "member 2/2", "member 3/3"]
    assert all(report.val_metrics for report in seen)


def test_net_that_reproduces_its_targets_needs_no_scale() -> None:
    """Neither it nor a replicate moves: there is no ratio."""
    net = SMALL()
    inputs = resolve_fit(net, TensorDataset(X, net(X).detach()), config(1))
    assert scale(method()._scale_by_replicates(net, [copy.deepcopy(net)], inputs)) == 1.0


@pytest.mark.slow
def test_converged_linear_model_needs_no_scale() -> None:
    x = noise(400, 3)
    data = TensorDataset(x, x @ torch.tensor([1.0, -1.0, 0.5]) + 0.5 * noise(400, seed=1))
    found: Any = method(layers=1, num_calibration_fits=8).fit(lambda: nn.Linear(3, 1), data, config(150))
    assert scale(found) < 1.5


@pytest.mark.parametrize(("loss", "outputs", "scaled"), [(nn.CrossEntropyLoss(), 3, 3), (GaussianNLL(), 2, 1)])
def test_classes_and_gaussian_heads(loss: Any, outputs: int, scaled: int) -> None:
    x = noise(60, 2)
    y = torch.arange(60) % 3 if outputs == 3 else x[:, 0]
    options = InfluenceBootstrap(loss, layers="all", num_calibration_fits=1, max_kernel_rows=90)
    found: Any = options.fit(lambda: MLP(2, outputs, widths=(64, 64)), TensorDataset(x, y), FAR)
    assert len(found.std_scale) == scaled
    assert scale(found) > 1.5
    inner = found.inner.summarize(x, 2).std[:, :scaled]
    torch.testing.assert_close(found.summarize(x, 2).std[:, :scaled], scale(found) * inner)


@pytest.mark.parametrize(
    ("loss", "expected"), [(nn.MSELoss(), 14.0), (nn.CrossEntropyLoss(), 8.0), (GaussianNLL(), 10.0)]
)
def test_sum_of_squares_by_loss(loss: Any, expected: float) -> None:
    assert _sum_squares(loss, torch.tensor([[1.0, 0.0, 3.0, 2.0, 0.0, 0.0]]), dim=1) == expected
    changes = noise(7, 5, 4, 3, 2)
    each = sum(_sum_squares(loss, change, dim=1) for change in changes)
    assert _sum_squares(loss, changes, dim=2) == pytest.approx(each)
