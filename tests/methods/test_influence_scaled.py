"""The influence bootstrap with its size set by true replicates."""

import copy
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from neuboots import Deterministic, InfluenceBootstrap, TrainingConfig, load, save
from neuboots.losses import GaussianNLL
from neuboots.methods import ScaledPredictor
from neuboots.methods.influence.scaled import (
    _squares,
    copy_initial_net,
    scale_by_replicates,
    train_with_replicates,
    with_raw_residuals,
)
from neuboots.nets import MLP
from neuboots.training import EpochReport, initialize_model
from neuboots.weights import Dirichlet


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def config(epochs: int, rate: float = 1e-2) -> TrainingConfig:
    return TrainingConfig(epochs=epochs, batch_size=50, optimizer=partial(torch.optim.Adam, lr=rate), progress=False)


@pytest.fixture(scope="module")
def data() -> TensorDataset:
    x = drawn(100, 2)
    return TensorDataset(x, x[:, 0].sin() + 0.3 * drawn(100, seed=1))


def model() -> nn.Module:
    return MLP(2, 1, widths=(16, 16))


def make_wide() -> nn.Module:
    return MLP(2, 1, widths=(64, 64))


FAR = config(5, rate=0.1)  # by so large steps the wide net goes much further than the first order says


def begun(make: Callable[[], nn.Module], method: InfluenceBootstrap, how: TrainingConfig) -> list[nn.Module]:
    return copy_initial_net(initialize_model(make, how.seed), make, method.replicates, how.seed)


def trained(method: InfluenceBootstrap, data: TensorDataset, how: TrainingConfig) -> list[nn.Module]:
    """The net and its replicates."""
    return train_with_replicates(method, begun(model, method, how), data, how, None)


def test_the_size_is_the_ratio_of_movements(data: TensorDataset) -> None:
    """Against the formula, at all rows; and the deviations are those of the unsized one, times it."""
    method = InfluenceBootstrap(nn.MSELoss(), layers="all", num_calibration_fits=2)
    found = method.fit(make_wide, data, FAR)
    assert isinstance(found, ScaledPredictor)
    plain = found.inner
    x = data.tensors[0]
    raw = InfluenceBootstrap(nn.MSELoss(), layers="all", residuals="raw", ridge=plain.ridge).from_trained(
        plain.net, data
    )  # type: ignore[attr-defined]
    _, *nets = train_with_replicates(method, begun(make_wide, method, FAR), data, FAR, None)
    with torch.no_grad():
        moved = torch.stack([(net(x) - plain.net(x)).square().mean() for net in nets]).mean()  # type: ignore[misc]
    expected = float(moved / raw.summarize(x, 2).std.square().mean())
    assert expected > 4.0
    assert found.std_scale is not None
    assert found.std_scale[0] ** 2 == pytest.approx(expected, rel=0.25)  # 64 draws stand for the variance
    torch.testing.assert_close(found.summarize(x, 2).std, found.std_scale[0] * plain.summarize(x, 2).std)
    torch.testing.assert_close(found.summarize(x, 2).mean, plain.summarize(x, 2).mean)


def test_a_ratio_below_one_is_left_alone(data: TensorDataset) -> None:
    """Replicates that hardly moved say little; those that moved by a known amount say how far."""
    net = model()
    predictor, raw = with_raw_residuals(InfluenceBootstrap(nn.MSELoss(), layers="all"), net, data, config(1))
    variance = float(raw.summarize(data.tensors[0], 2).std.square().mean())
    for shift in (0.0, 0.5, 5.0):
        other = copy.deepcopy(net)
        with torch.no_grad():
            other.head.bias += shift  # type: ignore[union-attr,operator]
        found = scale_by_replicates(nn.MSELoss(), predictor, raw, [other], data, config(1))
        expected = max(1.0, shift / math.sqrt(variance))
        assert found.std_scale == (pytest.approx(expected, rel=0.15),)  # 64 draws stand for the variance
        if shift == 0.0:
            assert found.std_scale == (1.0,)


def test_the_size_does_not_depend_on_the_law(data: TensorDataset) -> None:
    """A law of half the spread has half the band, not one that is scaled back."""
    wide, narrow = (
        InfluenceBootstrap(
            nn.MSELoss(), layers="all", num_calibration_fits=1, weight_distribution=weight_distribution
        ).fit(make_wide, data, FAR)
        for weight_distribution in (Dirichlet(), Dirichlet(4.0))
    )
    assert isinstance(wide, ScaledPredictor)
    assert isinstance(narrow, ScaledPredictor)
    assert narrow.std_scale == wide.std_scale
    assert wide.std_scale is not None
    assert wide.std_scale[0] > 2.0


def test_a_stream_is_refused_before_the_training() -> None:
    class Stream(IterableDataset[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            raise AssertionError("read")

    for options in ({"num_calibration_fits": 1}, {"layers": "all"}):
        with pytest.raises(ValueError, match="stream of unknown length"):
            InfluenceBootstrap(nn.MSELoss(), **options).fit(model, Stream(), config(1))  # type: ignore[arg-type]


def test_replicates_begin_where_the_net_began(data: TensorDataset) -> None:
    """Without a step they are the net itself; and weights of their own part them."""
    method, x = InfluenceBootstrap(nn.MSELoss(), num_calibration_fits=2), data.tensors[0]
    nets = trained(method, data, config(1, rate=0.0))
    assert torch.equal(nets[0](x), nets[1](x))
    nets = trained(method, data, config(2))
    assert all(not torch.allclose(one(x), other(x), atol=1e-4) for one, other in combinations(nets, 2))
    again = trained(replace(method, replicates=1), data, config(2))
    for one, other in zip(again, nets[:2], strict=True):  # one more replicate changes none of the others
        torch.testing.assert_close(one(x), other(x))


def test_one_start_whatever_make_net_draws_from(data: TensorDataset) -> None:
    """First weights out of a generator of the user's own, or of a net that is always the same."""
    own, same = torch.Generator().manual_seed(5), model()

    def another() -> nn.Module:
        net = model()
        for weight in net.parameters():
            nn.init.normal_(weight, generator=own)
        return net

    for make in (another, lambda: same):
        found = InfluenceBootstrap(nn.MSELoss(), layers="all", num_calibration_fits=1).fit(
            make, data, config(1, rate=0.0)
        )
        assert isinstance(found, ScaledPredictor)
        assert found.std_scale == (1.0,)  # nothing has moved


def test_together_and_in_turn_are_the_same(data: TensorDataset) -> None:
    """Small nets go together; with a norm of gradients to clip, which is far away here, they go in turn."""
    method, x = InfluenceBootstrap(nn.MSELoss(), layers="all", num_calibration_fits=1), data.tensors[0]
    together, apart = (trained(method, data, replace(config(20), clip_norm=norm)) for norm in (None, 1e9))
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one(x), other(x), rtol=1e-4, atol=1e-5)
    plain = Deterministic(nn.MSELoss()).fit(model, data, config(20)).net
    torch.testing.assert_close(together[0](x), plain(x), rtol=1e-4, atol=1e-5)
    wide, narrow = (method.fit(make_wide, data, replace(FAR, clip_norm=norm)) for norm in (None, 1e9))
    assert isinstance(wide, ScaledPredictor)
    assert isinstance(narrow, ScaledPredictor)
    assert wide.std_scale == pytest.approx(narrow.std_scale, rel=0.02)


def test_one_kernel_serves_both(data: TensorDataset) -> None:
    """With corrected residuals and with raw ones: each is what it is by itself."""
    net, x = model(), data.tensors[0]
    method = InfluenceBootstrap(nn.MSELoss(), layers="all", weight_distribution=Dirichlet(4.0))
    alone = replace(method, residuals="raw", weight_distribution=Dirichlet())
    for found, by_itself in zip(with_raw_residuals(method, net, data, config(1)), (method, alone), strict=True):
        expected = by_itself.from_trained(net, data, config(1))
        assert torch.equal(found.predict(x, 5).samples, expected.predict(x, 5).samples)


class Locked(nn.Linear):
    """A net that cannot be copied."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.lock = threading.Lock()


def test_a_net_that_cannot_be_copied_is_made_again(data: TensorDataset) -> None:
    found = InfluenceBootstrap(nn.MSELoss(), num_calibration_fits=1).fit(Locked, data, config(1, rate=0.0))
    assert isinstance(found, ScaledPredictor)
    assert found.std_scale == (1.0,)


@pytest.mark.parametrize("norm", [None, 1e9])  # together; in turn
def test_a_fit_that_was_cut_short_goes_on(norm: float | None, data: TensorDataset, tmp_path: Path) -> None:
    """In the middle of a training, then found whole: the answers are those of a fit that was not disturbed."""
    method, x = InfluenceBootstrap(nn.MSELoss(), layers="all", num_calibration_fits=1), data.tensors[0]
    how = replace(config(6), clip_norm=norm)
    expected = method.fit(model, data, how).predict(x, 3).samples
    seen: list[EpochReport] = []

    def cut(report: EpochReport) -> None:
        seen.append(report)
        if len(seen) == 8 if norm else len(seen) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        method.fit(model, data, replace(how, folder=tmp_path, on_epoch=cut))
    seen.clear()
    gone_on = method.fit(model, data, replace(how, folder=tmp_path, on_epoch=seen.append))
    assert 0 < len(seen) < 6
    assert torch.equal(gone_on.predict(x, 3).samples, expected)
    seen.clear()
    again = method.fit(model, data, replace(how, folder=tmp_path, on_epoch=seen.append))
    assert not seen
    assert torch.equal(again.predict(x, 3).samples, expected)


def test_a_linear_model_that_is_fitted_to_the_end_needs_no_size() -> None:
    """There the first order is nearly all: the ratio is 1, within what one replicate says of it."""
    x = drawn(400, 3)
    data = TensorDataset(x, x @ torch.tensor([1.0, -1.0, 0.5]) + 0.5 * drawn(400, seed=1))
    found = InfluenceBootstrap(nn.MSELoss(), layers=1, num_calibration_fits=8).fit(
        lambda: nn.Linear(3, 1), data, config(150)
    )
    assert isinstance(found, ScaledPredictor)
    assert found.std_scale is not None
    assert found.std_scale[0] < 1.5


@pytest.mark.parametrize(("loss", "outputs", "scaled"), [(nn.CrossEntropyLoss(), 3, 3), (GaussianNLL(), 2, 1)])
def test_classes_and_gaussian_heads(loss: object, outputs: int, scaled: int, tmp_path: Path) -> None:
    x = drawn(60, 2)
    y = torch.arange(60) % 3 if outputs == 3 else x[:, 0]
    method = InfluenceBootstrap(loss, layers="all", num_calibration_fits=1, max_kernel_rows=90)  # type: ignore[arg-type]
    found = method.fit(lambda: MLP(2, outputs, widths=(64, 64)), TensorDataset(x, y), FAR)
    assert isinstance(found, ScaledPredictor)
    assert found.std_scale is not None
    assert len(found.std_scale) == scaled
    assert found.std_scale[0] > 1.5
    free = found.inner.summarize(x, 2).std[:, :scaled]
    torch.testing.assert_close(found.summarize(x, 2).std[:, :scaled], found.std_scale[0] * free)
    save(found, tmp_path / "saved")
    assert torch.equal(load(tmp_path / "saved").predict(x[:3], 5).samples, found.predict(x[:3], 5).samples)


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3, 2)])
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss(), GaussianNLL()])
def test_movements_of_many_replicates_are_those_of_each(loss: object, shape: tuple[int, ...]) -> None:
    changes = drawn(7, *shape)
    each = sum(_squares(loss, change, axis=1) for change in changes)  # type: ignore[arg-type]
    assert _squares(loss, changes, axis=2) == pytest.approx(each)  # type: ignore[arg-type]


def test_what_counts_in_a_movement() -> None:
    change = torch.tensor([[1.0, 3.0]])
    assert _squares(nn.MSELoss(), change, axis=1) == 10.0
    assert _squares(nn.CrossEntropyLoss(), change, axis=1) == 2.0
    assert _squares(GaussianNLL(), change, axis=1) == 1.0


def test_around_trains_nothing_and_says_so(data: TensorDataset) -> None:
    with pytest.raises(ValueError, match="got replicates=1 around a net that is trained already; expected 0"):
        InfluenceBootstrap(nn.MSELoss(), num_calibration_fits=1).from_trained(model(), data)


def test_a_whole_number_is_asked_for() -> None:
    with pytest.raises(ValueError, match="replicates=-1"):
        InfluenceBootstrap(num_calibration_fits=-1)
