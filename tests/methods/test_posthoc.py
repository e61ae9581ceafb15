"""Temperature and scale: against a direct search, in closed form, and around every kind of predictor."""

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from neuboots import Deterministic, NeuBoots, TrainingConfig, load, save, split_gaussian
from neuboots.losses import GaussianNLL
from neuboots.methods import DeterministicPredictor, MethodInfo, find_method
from neuboots.nets import MLP
from neuboots.posthoc import ScaledPredictor, scale_std, scale_temperature
from neuboots.testing import CHECKS, MethodUnderTest, TwoBranches, check_single_member, check_unsupported_tasks

RECIPE = TrainingConfig(epochs=2, batch_size=16, progress=False)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(n: int = 60, seed: int = 0) -> TensorDataset:
    x = rows(n, 4, seed=seed)
    return TensorDataset(x, (x[:, 0] + 0.7 * rows(n, seed=seed + 1) > 0).long() + (x[:, 1] > 1).long())


def numbers(n: int = 60, seed: int = 0) -> TensorDataset:
    x = rows(n, 4, seed=seed)
    return TensorDataset(x, x.sum(1) + 0.5 * rows(n, seed=seed + 1))


def fitted(loss: Any = None, outputs: int = 3, data: Any = None) -> Any:
    options = {} if loss is None else {"loss": loss}
    return NeuBoots(**options).fit(lambda: TwoBranches(outputs), data or classes(), RECIPE)


# -- temperature ---------------------------------------------------------------------------------------


def test_the_temperature_is_the_one_a_direct_search_finds() -> None:
    config = TrainingConfig(epochs=60, batch_size=16, progress=False)  # until it is surer than it should be
    predictor = NeuBoots().fit(lambda: TwoBranches(3), classes(), config)
    held_out = classes(200, seed=7)
    scaled = scale_temperature(predictor, held_out, num_samples=20, batch_size=64)
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
    predictor, x = fitted(), rows(5, 4, seed=3)
    scaled = ScaledPredictor(predictor, temperature=2.0)
    mine, theirs = scaled.predict(x, 6, seed=1), predictor.predict(x, 6, seed=1)
    torch.testing.assert_close(mine.samples, theirs.samples / 2)
    torch.testing.assert_close(mine.mean, theirs.mean / 2)
    torch.testing.assert_close(mine.std, theirs.std / 2)
    plain = ScaledPredictor(DeterministicPredictor(TwoBranches(3)), temperature=0.1)
    assert torch.equal(plain.predict(x, 1).labels, plain.inner.predict(x, 1).labels)


def test_void_labels_do_not_count_and_maps_work() -> None:
    net = nn.Conv2d(2, 3, 1)
    x, y = 10 * rows(8, 2, 6, 6), torch.randint(3, (8, 6, 6), generator=torch.Generator().manual_seed(0))
    spoilt = y.clone()
    spoilt[:, :3] = 255
    upper = scale_temperature(DeterministicPredictor(net), TensorDataset(x[:, :, 3:], y[:, 3:]), num_samples=1)
    masked = scale_temperature(DeterministicPredictor(net), TensorDataset(x, spoilt), num_samples=1, ignore_index=255)
    assert masked.temperature == pytest.approx(upper.temperature)
    with pytest.raises(ValueError, match="got labels outside 0 … 2; expected classes of the net"):
        scale_temperature(DeterministicPredictor(net), TensorDataset(x, spoilt), num_samples=1)


def test_one_logit_of_two_classes() -> None:
    x = rows(300, 4)
    y = (x[:, 0] + rows(300, seed=1) > 0).float()
    net = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[20.0, 0.0, 0.0, 0.0]]))
    scaled = scale_temperature(DeterministicPredictor(net), TensorDataset(x, y), num_samples=1)
    assert 5 < scaled.temperature < 20  # the truth is Φ(x₁), about logistic with slope 1.7


# -- scale ---------------------------------------------------------------------------------------------


def test_the_scale_is_the_root_mean_square_of_standardised_residuals() -> None:
    predictor = fitted(nn.MSELoss(), 1, numbers())
    held_out = numbers(150, seed=9)
    scaled = scale_std(predictor, held_out, num_samples=30, batch_size=64)
    x, y = held_out.tensors
    band = predictor.predict(x, 30)
    expected = ((y - band.mean[:, 0]) / band.std[:, 0]).double().square().mean().sqrt()
    assert scaled.std_scale == pytest.approx((float(expected),), rel=1e-5)
    after = scaled.predict(x, 30)
    torch.testing.assert_close(after.mean, band.mean)
    torch.testing.assert_close(after.std, band.std * expected.float())
    assert float(((y - after.mean[:, 0]) / after.std[:, 0]).square().mean()) == pytest.approx(1.0, rel=1e-4)


def test_the_scale_of_a_gaussian_head_widens_band_and_noise_alike() -> None:
    predictor = fitted(GaussianNLL(), 2, numbers())
    held_out = numbers(150, seed=9)
    scaled = scale_std(predictor, held_out, num_samples=30)
    x, y = held_out.tensors
    before, noise_before = split_gaussian(predictor.predict(x, 30))
    after, noise_after = split_gaussian(scaled.predict(x, 30))
    (s,) = scaled.std_scale or ()
    torch.testing.assert_close(after.mean, before.mean)
    torch.testing.assert_close(after.std, s * before.std)
    torch.testing.assert_close(noise_after, s * noise_before)
    total = after.std.square() + noise_after.square()
    assert float(((y[:, None] - after.mean).square() / total).mean()) == pytest.approx(1.0, rel=1e-3)


def test_each_output_has_its_own_scale() -> None:
    x = rows(80, 4)
    data = TensorDataset(x, torch.stack([x[:, 0], 10 * x[:, 1] + 5 * rows(80, seed=2)], 1))
    predictor = fitted(nn.MSELoss(), 2, data)
    scaled = scale_std(predictor, data)
    assert len(scaled.std_scale or ()) == 2
    band = scaled.predict(x, 100)
    ratio = ((data.tensors[1] - band.mean) / band.std).square().mean(0)
    torch.testing.assert_close(ratio, torch.ones(2), rtol=1e-3, atol=0)


def test_where_the_mean_is_not_known_a_replicate_still_does_not_know_b() -> None:
    predictor = find_method("gbs").make(loss=nn.MSELoss()).fit(lambda: MLP(4, 1, widths=(8, 8)), numbers(), RECIPE)
    assert predictor.predict(rows(3, 4), 2).moments is None
    scaled = scale_std(predictor, numbers(50, seed=9))
    x = rows(5, 4, seed=3)
    torch.testing.assert_close(scaled.predict(x, 9).samples[:4], scaled.predict(x, 4).samples)


def test_the_centre_of_many_members_does_not_depend_on_b() -> None:
    method = find_method("deep-ensemble").make(loss=nn.MSELoss(), num_members=120)
    scaled = scale_std(
        method.fit(lambda: nn.Linear(4, 1), numbers(), TrainingConfig(epochs=1, progress=False)), numbers()
    )
    x = rows(5, 4, seed=3)
    torch.testing.assert_close(scaled.predict(x, 120).samples[:4], scaled.predict(x, 4).samples)


# -- what is refused -----------------------------------------------------------------------------------


def test_bad_calls() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield rows(4), 0

    predictor = fitted()
    with pytest.raises(ValueError, match="got a stream of unknown length; expected held-out rows"):
        scale_temperature(predictor, Stream())
    with pytest.raises(ValueError, match="n = 0 rows"):
        scale_temperature(predictor, TensorDataset(rows(0, 4), rows(0)))
    with pytest.raises(ValueError, match=r"got targets \(60,\) for outputs \(60, 3\); expected the same shape"):
        scale_std(predictor, numbers())
    with pytest.raises(ValueError, match="none of the held-out labels counts"):
        scale_temperature(predictor, TensorDataset(rows(9, 4), torch.full((9,), -100)))
    for scale in (scale_temperature, scale_std):
        with pytest.raises(ValueError, match="got a NoneType; expected a predictor, as fit gives one"):
            scale(None, classes())  # type: ignore[arg-type]
    plain = Deterministic(nn.MSELoss()).fit(lambda: TwoBranches(1), numbers(), RECIPE)
    with pytest.raises(ValueError, match="the replicates are all the same at some held-out rows"):
        scale_std(plain, numbers())


# -- the contract --------------------------------------------------------------------------------------


class _Scaled:
    """A method whose predictor is scaled on its own training rows: enough to hold it to the contract."""

    def __init__(self, method: Any, scale: Any) -> None:
        self.method, self.scale = method, scale

    def fit(self, model: Any, data: Any, config: Any) -> Any:
        return self.scale(self.method.fit(model, data, config), data, num_samples=5)


def _subject(name: str, scale: Any, *tasks: Any) -> MethodUnderTest:
    inner = find_method(name)
    entry = MethodInfo(
        "scaled",
        lambda **options: _Scaled(inner.make(**options), scale),
        ScaledPredictor,
        "",
        tasks=tasks,
        random=inner.random,
    )
    return MethodUnderTest(entry)


SUBJECTS = {
    "temperature of neuboots": _subject("neuboots", scale_temperature, "classification"),
    "temperature of a plain net": _subject("deterministic", scale_temperature, "classification"),
    "temperature of an ensemble": _subject("deep-ensemble", scale_temperature, "classification"),
    "scale of neuboots": _subject("neuboots", scale_std, "regression"),
    "scale of a bootstrap": _subject("standard-bootstrap", scale_std, "regression"),
}


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("check", [c for c in CHECKS if c not in (check_unsupported_tasks, check_single_member)])
def test_contract(check: Any, name: str) -> None:
    check(SUBJECTS[name])


def test_a_damaged_wrapper_gets_one_sentence(tmp_path: Any) -> None:
    save(ScaledPredictor(DeterministicPredictor(MLP(4, 2, widths=(8,))), temperature=2.0), tmp_path / "model")
    assert load(tmp_path / "model").predict(rows(2, 4), 1).samples.shape == (1, 2, 2)
    path = tmp_path / "model" / "config.json"
    path.write_text(path.read_text().replace('"inner"', '"outer"'))
    with pytest.raises(ValueError, match="names the method 'scaled'; expected one of plain"):
        load(tmp_path / "model")


def test_a_prior_keeps_the_temperature_where_few_rows_are_all_right() -> None:
    """Separable rows want T → 0; with a prior T is what the few rows can tell against it."""
    x = torch.tensor([[4.0, 0.0], [0.0, 4.0]]).repeat(20, 1)
    rows = TensorDataset(x, torch.arange(2).repeat(20))
    predictor = DeterministicPredictor(nn.Identity())
    assert scale_temperature(predictor, rows).temperature < 0.2
    assert 0.7 < scale_temperature(predictor, rows, prior_std=0.5).temperature < 1.0
    certain = TensorDataset(400 * x, torch.arange(2).repeat(20))  # of likelihood 1 to the last digit
    assert abs(scale_temperature(predictor, certain, prior_std=0.5).temperature - 1) < 0.01
    with pytest.raises(ValueError, match="got prior_std=0; expected a positive number"):
        scale_temperature(predictor, rows, prior_std=0)
