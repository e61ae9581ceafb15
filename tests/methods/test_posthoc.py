"""Tests of temperature and standard-deviation scaling against a direct search and closed forms."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from _artifacts import rewrite_artifact
from _nets import Stream, noise
from torch import nn
from torch.utils.data import TensorDataset

from neuboots import (
    ArgumentError,
    DeepEnsemble,
    Deterministic,
    MCDropout,
    NeuBoots,
    TrainingConfig,
    load,
    save,
    split_gaussian,
)
from neuboots.losses import GaussianNLL
from neuboots.methods import DeterministicPredictor, MethodInfo, find_method
from neuboots.nets import MLP
from neuboots.posthoc import ScaledPredictor, StdScaling, TemperatureScaling
from neuboots.testing import CHECKS, MethodUnderTest, check_single_member, check_unsupported_tasks

CONFIG = TrainingConfig(epochs=2, batch_size=16, progress=False)


def classes(n: int = 60, seed: int = 0) -> TensorDataset:
    x = noise(n, 4, seed=seed)
    return TensorDataset(x, (x[:, 0] + 0.7 * noise(n, seed=seed + 1) > 0).long() + (x[:, 1] > 1).long())


def numbers(n: int = 60, seed: int = 0) -> TensorDataset:
    x = noise(n, 4, seed=seed)
    return TensorDataset(x, x.sum(1) + 0.5 * noise(n, seed=seed + 1))


def fitted(loss: Any = None, outputs: int = 3, data: Any = None) -> Any:
    options = {} if loss is None else {"loss": loss}
    return NeuBoots(**options).fit(lambda: MLP(4, outputs), data or classes(), CONFIG)


# -- temperature ---------------------------------------------------------------------------------------


def test_temperature_matches_a_direct_search() -> None:
    adam = partial(torch.optim.Adam, lr=0.02)
    config = TrainingConfig(epochs=15, batch_size=16, optimizer=adam, progress=False)  # until it is overconfident
    predictor = NeuBoots().fit(lambda: MLP(4, 3, widths=(64, 64)), classes(), config)
    held_out = classes(200, seed=7)
    scaled = TemperatureScaling(num_samples=20, batch_size=64).fit(predictor, held_out)
    x, y = held_out.tensors
    samples = predictor.predict(x, 20).samples.double().numpy()

    def nll(log_t: float) -> float:
        z = samples / np.exp(log_t)
        p = np.exp(z - z.max(2, keepdims=True))
        p = (p / p.sum(2, keepdims=True)).mean(0)
        return -np.log(p[np.arange(200), y.numpy()]).mean()

    found = scipy.optimize.minimize_scalar(nll, bounds=(-4, 4), method="bounded", options={"xatol": 1e-6})
    assert np.log(scaled.temperature) == pytest.approx(found.x, abs=1e-3)  # the last grid's step is 3e-4
    assert nll(np.log(scaled.temperature)) < nll(0.0) - 1e-3


def test_samples_and_moments_are_divided_by_the_temperature() -> None:
    predictor, x = fitted(), noise(5, 4, seed=3)
    scaled = ScaledPredictor(predictor, temperature=2.0)
    mine, theirs = scaled.predict(x, 6, seed=1), predictor.predict(x, 6, seed=1)
    torch.testing.assert_close(mine.samples, theirs.samples / 2)
    torch.testing.assert_close(mine.mean, theirs.mean / 2)
    torch.testing.assert_close(mine.std, theirs.std / 2)
    plain = ScaledPredictor(DeterministicPredictor(MLP(4, 3)), temperature=0.1)
    assert torch.equal(plain.predict(x, 1).labels, plain.inner.predict(x, 1).labels)


def test_ignored_pixels_do_not_count() -> None:
    net = nn.Conv2d(2, 3, 1)
    x, y = 10 * noise(8, 2, 6, 6), torch.randint(3, (8, 6, 6), generator=torch.Generator().manual_seed(0))
    masked = y.clone()
    masked[:, :3] = 255
    upper = TemperatureScaling(num_samples=1).fit(DeterministicPredictor(net), TensorDataset(x[:, :, 3:], y[:, 3:]))
    scaled = TemperatureScaling(num_samples=1, ignore_index=255).fit(
        DeterministicPredictor(net), TensorDataset(x, masked)
    )
    assert scaled.temperature == pytest.approx(upper.temperature)
    with pytest.raises(ValueError, match="data"):
        TemperatureScaling(num_samples=1).fit(DeterministicPredictor(net), TensorDataset(x, masked))


def test_one_logit() -> None:
    x = noise(300, 4)
    y = (x[:, 0] + noise(300, seed=1) > 0).float()
    net = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[20.0, 0.0, 0.0, 0.0]]))
    scaled = TemperatureScaling(num_samples=1).fit(DeterministicPredictor(net), TensorDataset(x, y))
    assert 5 < scaled.temperature < 20  # the truth is Φ(x₁), about logistic with slope 1.7


# -- scale ---------------------------------------------------------------------------------------------


def test_scale_is_the_root_mean_square_of_standardized_residuals_of_each_output() -> None:
    data, held_out = (
        TensorDataset(x, torch.stack([y, 10 * x[:, 1]], 1)) for x, y in (numbers()[:], numbers(150, seed=9)[:])
    )
    predictor = fitted(nn.MSELoss(), 2, data)
    scaled = StdScaling(num_samples=30, batch_size=64).fit(predictor, held_out)
    x, y = held_out.tensors
    band = predictor.predict(x, 30)
    expected = ((y - band.mean) / band.std).double().square().mean(0).sqrt()
    assert scaled.std_scale == pytest.approx(tuple(expected.tolist()), rel=1e-5)
    after = scaled.predict(x, 30)
    torch.testing.assert_close(after.mean, band.mean)
    torch.testing.assert_close(after.std, band.std * expected.float())


def test_scale_of_a_gaussian_head_applies_to_band_and_noise() -> None:
    predictor = fitted(GaussianNLL(), 2, numbers())
    held_out = numbers(150, seed=9)
    scaled = StdScaling(num_samples=30).fit(predictor, held_out)
    x, y = held_out.tensors
    before, noise_before = split_gaussian(predictor.predict(x, 30))
    after, noise_after = split_gaussian(scaled.predict(x, 30))
    (s,) = scaled.std_scale or ()
    torch.testing.assert_close(after.mean, before.mean)
    torch.testing.assert_close(after.std, s * before.std)
    torch.testing.assert_close(noise_after, s * noise_before)
    total = after.std.square() + noise_after.square()
    assert float(((y[:, None] - after.mean).square() / total).mean()) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("method", [MCDropout(nn.MSELoss()), DeepEnsemble(nn.MSELoss(), num_members=12)])
def test_center_does_not_depend_on_the_number_of_samples(method: Any) -> None:
    """Without an exact mean, and with more members than samples."""
    predictor = method.fit(lambda: MLP(4, 1, widths=(8, 8)), numbers(), TrainingConfig(epochs=1, progress=False))
    scaled = StdScaling(num_samples=10).fit(predictor, numbers(50, seed=9))
    x = noise(5, 4, seed=3)
    torch.testing.assert_close(scaled.predict(x, 120).samples[:4], scaled.predict(x, 4).samples)


# -- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaling", "data", "match"),
    [
        (TemperatureScaling(), Stream(noise(4, 4), noise(4)), "data"),
        (TemperatureScaling(), (noise(0, 4), noise(0)), "data"),
        (TemperatureScaling(), (noise(9, 4), torch.full((9,), -100)), "data"),
        (TemperatureScaling(), (noise(9, 4), torch.full((9,), 3)), "data"),
        (StdScaling(), (noise(9, 4), noise(9)), "data"),
    ],
)
def test_data_are_checked(scaling: Any, data: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        scaling.fit(fitted(), data)


def test_predictor_and_prior_are_checked() -> None:
    for scaling in (TemperatureScaling(), StdScaling()):
        with pytest.raises(ValueError, match="predictor"):
            scaling.fit(None, classes())  # type: ignore[arg-type]
    plain = Deterministic(nn.MSELoss()).fit(lambda: MLP(4, 1), numbers(), CONFIG)
    with pytest.raises(ValueError, match="variance is zero"):
        StdScaling().fit(plain, numbers())
    with pytest.raises(ValueError, match="prior_std"):
        TemperatureScaling(prior_std=0)


# -- the contract --------------------------------------------------------------------------------------


class ScaledMethod:
    """A method whose predictor is scaled on its own training data."""

    def __init__(self, method: Any, scaling: Any) -> None:
        self.method, self.scaling = method, scaling

    def fit(self, model: Any, data: Any, config: Any) -> Any:
        return self.scaling.fit(self.method.fit(model, data, config), data)


def make_subject(name: str, scaling: Any, task: Any, **options: Any) -> MethodUnderTest:
    inner = find_method(name)

    def make(**options: Any) -> Any:
        return ScaledMethod(inner.make(**options), scaling)

    info = MethodInfo("scaled", make, ScaledPredictor, "", tasks=(task,), random=inner.random)
    return MethodUnderTest(info, options)


TEMPERATURE, STD = TemperatureScaling(num_samples=5), StdScaling(num_samples=5)
SUBJECTS = {
    "temperature of neuboots": make_subject("neuboots", TEMPERATURE, "classification"),
    "temperature of an ensemble": make_subject("deep-ensemble", TEMPERATURE, "classification"),
    "scale of a bootstrap": make_subject("standard-bootstrap", STD, "regression", num_members=4),
}


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("check", [c for c in CHECKS if c not in (check_unsupported_tasks, check_single_member)])
def test_contract(check: Any, name: str) -> None:
    check(SUBJECTS[name])


def test_damaged_config_is_rejected(tmp_path: Path) -> None:
    save(ScaledPredictor(DeterministicPredictor(MLP(4, 2, widths=(8,))), temperature=2.0), tmp_path / "model")
    assert load(tmp_path / "model").predict(noise(2, 4), 1).samples.shape == (1, 2, 2)
    rewrite_artifact(tmp_path / "model", lambda config, tensors: config.update(outer=config.pop("inner")))
    with pytest.raises(ValueError, match="cannot load"):
        load(tmp_path / "model")


def test_prior_limits_the_temperature_of_few_correct_rows() -> None:
    """Separable rows want T → 0."""
    x = torch.tensor([[4.0, 0.0], [0.0, 4.0]]).repeat(20, 1)
    y, predictor = torch.arange(2).repeat(20), DeterministicPredictor(nn.Identity())
    prior = TemperatureScaling(prior_std=0.5)
    assert TemperatureScaling().fit(predictor, (x, y)).temperature < 0.2
    assert 0.7 < prior.fit(predictor, (x, y)).temperature < 1.0
    assert abs(prior.fit(predictor, (400 * x, y)).temperature - 1) < 0.01  # a likelihood of 1 for every T


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("std_scale", [(), (2.0,), (2.0, 2.0, 2.0)], ids=len)
def test_factors_of_another_number_of_outputs_raise(std_scale: tuple[float, ...], gaussian: bool) -> None:
    predictor = ScaledPredictor(DeterministicPredictor(nn.Identity()), std_scale=std_scale, gaussian=gaussian)
    with pytest.raises(ArgumentError, match="std_scale"):
        predictor.predict(torch.zeros(3, 4), 2)
