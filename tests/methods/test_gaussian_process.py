"""Exact Gaussian processes, against scikit-learn and against dense formulas."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _reference import standard_errors
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import neuboots.methods.gaussian_process as room
from neuboots.losses import GaussianNLL
from neuboots.methods.gaussian_process import ExactProcess, GaussianProcess, cholesky
from neuboots.serialization import load, save
from neuboots.training import EpochReport, TrainingConfig

RECIPE = TrainingConfig(progress=False)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def curve(n: int = 40, inputs: int = 2) -> tuple[Tensor, Tensor]:
    """Inputs and targets far from standard units."""
    x = 3.0 + 2.0 * rows(n, inputs)
    return x, 100.0 + 20.0 * (x[:, 0].sin() + 0.3 * x[:, -1] + 0.2 * rows(n, seed=1))


def fitted(kernel: Any = "rbf", **options: Any) -> room.GaussianProcessPredictor:
    return GaussianProcess(kernel=kernel, **options).fit(None, TensorDataset(*curve()), RECIPE)


def kernel_of(process: Any, output: int = 0) -> Any:
    """The same kernel, for scikit-learn; without the noise."""
    scale = float(process.scale.detach()[output])
    lengths = process.kernel.base_kernel.lengthscale.detach()[output, 0].numpy()
    return ConstantKernel(scale) * (RBF(lengths) if process.kind == "rbf" else Matern(lengths, nu=2.5))


def dense_posterior(process: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of f(x), by inverting."""
    kernel, X = kernel_of(process), process.x.numpy()
    inverse = np.linalg.inv(kernel(X) + float(process.noise.detach()) * np.eye(len(X)))
    cross = kernel(x, X)
    return cross @ inverse @ process.y[0].numpy(), kernel(x) - cross @ inverse @ cross.T


# -- posterior and likelihood ------------------------------------------------------------------------


@pytest.mark.parametrize("ard", [True, False])
@pytest.mark.parametrize("kernel", ["rbf", "matern52"])
def test_the_posterior_is_that_of_scikit_learn(kernel: Any, ard: bool) -> None:
    predictor = fitted(kernel, ard=ard, steps=30)
    process = predictor.process
    theirs = GaussianProcessRegressor(
        kernel_of(process), alpha=float(process.noise.detach()), optimizer=None, normalize_y=True
    )
    (x, y), new = curve(), 3.0 + 2.0 * rows(7, 2, seed=5)
    centre, spread = x.mean(0).double(), x.double().std(0, correction=0)
    theirs.fit(((x - centre) / spread).numpy(), y.double().numpy())
    mean, std = theirs.predict(((new - centre) / spread).numpy(), return_std=True)
    prediction = predictor.predict(new, 2)
    np.testing.assert_allclose(prediction.mean[:, 0], mean, rtol=1e-5)
    np.testing.assert_allclose(prediction.std[:, 0], std, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["rbf", "matern52"])
def test_the_marginal_likelihood_reaches_that_of_scikit_learn(kernel: Any) -> None:
    process = fitted(kernel).process
    assert isinstance(process, ExactProcess)
    X, y = process.x.numpy(), process.y[0].numpy()
    reached = -len(X) * float(process().detach())
    own = GaussianProcessRegressor(kernel_of(process), alpha=float(process.noise.detach()), optimizer=None).fit(X, y)
    assert reached == pytest.approx(own.log_marginal_likelihood_value_, rel=1e-6)
    base = RBF([1.0, 1.0], (1e-3, 1e4)) if kernel == "rbf" else Matern([1.0, 1.0], (1e-3, 1e4), nu=2.5)
    best = GaussianProcessRegressor(
        ConstantKernel(1.0) * base + WhiteKernel(0.1, (1e-6, 10.0)), n_restarts_optimizer=3, random_state=0
    )
    assert reached > best.fit(X, y).log_marginal_likelihood_value_ - 0.05


def test_the_noise_is_found() -> None:
    """σ̂ against its standard error σ/√2n."""
    x = torch.linspace(-3, 3, 200)[:, None]
    y = 10 * (x[:, 0].sin() + 0.3 * rows(200, seed=2))
    predictor = GaussianProcess(steps=100).fit(None, TensorDataset(x, y), RECIPE)
    assert predictor.noise_std.shape == (1,)
    assert abs(float(predictor.noise_std) - 3.0) < standard_errors(1) * 3.0 / np.sqrt(400)
    prediction = predictor.predict(x, 2)
    low, high = prediction.prediction_interval(0.95, noise_std=predictor.noise_std)
    covered = float(((low[:, 0] < y) & (y < high[:, 0])).float().mean())
    assert abs(covered - 0.95) < standard_errors(1) * np.sqrt(0.95 * 0.05 / 200)


def test_units_do_not_matter() -> None:
    x, y = curve()
    new = 3.0 + 2.0 * rows(7, 2, seed=5)
    plain = fitted(steps=20).predict(new.double(), 3)
    data = TensorDataset(1e3 * x.double() - 7, -5 * y.double() + 2)
    other = GaussianProcess(steps=20).fit(None, data, RECIPE).predict(1e3 * new.double() - 7, 3)
    torch.testing.assert_close(other.mean, -5 * plain.mean + 2, rtol=1e-5, atol=0)
    torch.testing.assert_close(other.std, 5 * plain.std, rtol=1e-4, atol=0)


def test_several_outputs_are_processes_of_their_own() -> None:
    x, y = curve()
    other = x[:, 1].cos() + 0.1 * rows(40, seed=3)
    method = GaussianProcess(steps=20)
    both = method.fit(None, TensorDataset(x, torch.stack([y, other], 1)), RECIPE)
    assert both.noise_std.shape == (2,)
    prediction = both.predict(x[:5], 4)
    assert prediction.samples.shape == (4, 5, 2)
    for j, target in enumerate((y, other)):
        alone = method.fit(None, TensorDataset(x, target), RECIPE).predict(x[:5], 2)
        torch.testing.assert_close(prediction.mean[:, j], alone.mean[:, 0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(prediction.std[:, j], alone.std[:, 0], rtol=1e-4, atol=1e-5)


# -- sampled functions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "frequencies"), [("rbf", 512), ("matern52", 32)])
def test_sampled_functions_have_the_mean_and_covariance_of_the_posterior(
    kernel: Any, frequencies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 5 points, near the data and far from them; few frequencies are as right as many."""
    monkeypatch.setattr(room, "_FREQUENCIES", frequencies)
    process = fitted(kernel, steps=20).process
    x = 1.5 * rows(5, 2, seed=5).double()
    B = 400
    with torch.no_grad():
        samples = process.paths(x, 0, B, seed=0)[:, 0].numpy()  # (B, 5)
    mean, covariance = dense_posterior(process, x.numpy())
    variance = np.diag(covariance)
    k = standard_errors(5 + 15)
    assert bool((np.abs(samples.mean(0) - mean) < k * np.sqrt(variance / B)).all())
    # of a sample covariance of normal draws; a path of F frequencies has the fourth moment 3 + 3/(2F)
    error = np.sqrt((np.outer(variance, variance) + covariance**2) * (1 + 1 / frequencies) / B)
    assert bool((np.abs(np.cov(samples.T) - covariance) < k * error).all())


def test_a_path_of_the_prior_has_the_kernel_as_its_covariance() -> None:
    process = ExactProcess(1, 2, 1, "matern52", True)
    process.kernel.base_kernel.lengthscale = torch.tensor([[[0.5, 2.0]]])
    process.kernel.outputscale = 3.0
    x = rows(4, 2).double()
    with torch.no_grad():
        paths = np.stack([process.prior_path(0, b)(x)[0].numpy() for b in range(400)])
    kernel = kernel_of(process)(x.numpy())
    error = np.sqrt((np.outer(np.diag(kernel), np.diag(kernel)) + kernel**2) / 400)
    assert bool((np.abs(paths.T @ paths / 400 - kernel) < standard_errors(10) * error).all())


def test_samples_can_be_differentiated_by_x() -> None:
    process = fitted(steps=5).process
    for parameter in process.parameters():
        parameter.requires_grad_(False)
    x = rows(3, 2, seed=5).double().requires_grad_()
    torch.autograd.gradcheck(lambda z: process.paths(z, 0, 2, seed=0), x)
    torch.autograd.gradcheck(lambda z: process.moments(z)[1], x)
    inputs = rows(3, 2).requires_grad_()
    fitted(steps=5).predict(inputs, 2).samples.sum().backward()
    assert bool(torch.isfinite(inputs.grad).all())


def test_many_inputs_go_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = fitted(steps=5)
    x = rows(30, 2)
    whole = predictor.predict(x, 3)
    monkeypatch.setattr(room, "_PIECE", 7 * 40)
    pieces = predictor.predict(x, 3)
    torch.testing.assert_close(pieces.samples, whole.samples)
    torch.testing.assert_close(pieces.std, whole.std)


def test_changed_parameters_are_seen() -> None:
    """What was computed from the old ones is not used again."""
    predictor = fitted(steps=5)
    x = rows(3, 2)
    before = predictor.predict(x, 2)
    with torch.no_grad():
        predictor.process.kernel.base_kernel.raw_lengthscale += 1.0
    after = predictor.predict(x, 2)
    assert not torch.allclose(before.std, after.std)
    mean, covariance = dense_posterior(predictor.process, predictor.process.standardised(x).numpy())
    process = predictor.process
    np.testing.assert_allclose(process.in_units(torch.tensor(mean)[None])[:, 0], after.mean[:, 0], rtol=1e-5)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)) * float(process.y_std), after.std[:, 0], rtol=1e-4)


# -- data ----------------------------------------------------------------------------------------------


class Pairs(Dataset[Any]):
    """Rows with two inputs, an image and a number, and a Python number as their target."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> tuple[tuple[Tensor, float], float]:
        image = rows(2, 2, seed=i)
        return (image, float(i % 5)), float(image.sum()) + 1.0


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        x, y = curve()
        yield from zip(x, y, strict=True)


def test_any_data_set() -> None:
    predictor = GaussianProcess(steps=5).fit(None, Pairs(), RECIPE)
    assert predictor.process.inputs == 5
    inputs = (torch.stack([rows(2, 2, seed=i) for i in range(3)]), torch.tensor([0.0, 1.0, 2.0]))
    assert predictor.predict(inputs, 2).samples.shape == (2, 3, 1)
    named = GaussianProcess(steps=5).fit(None, TensorDataset(*curve()), RECIPE)
    x = curve()[0][:4]
    torch.testing.assert_close(named.predict({"b": x[:, 1], "a": x[:, 0]}, 2).samples, named.predict(x, 2).samples)


def test_a_stream_gives_one_epoch() -> None:
    config = TrainingConfig(batch_size=10, steps_per_epoch=3, progress=False)
    process = GaussianProcess(steps=2).fit(None, Endless(), config).process
    assert process.basis.shape == (30, 2)
    with pytest.raises(ValueError, match=r"got a stream of unknown length; expected Recipe\(steps_per_epoch=…\)"):
        GaussianProcess().fit(None, Endless(), RECIPE)


@pytest.mark.parametrize("constant", [4.0, 0.1, 1 / 3])
def test_constant_inputs_and_targets(constant: float) -> None:
    """Numbers that are all the same have a mean that is rounded, and so a spread that is rounding."""
    same = torch.full((37, 1), constant, dtype=torch.float64)
    x = torch.cat([rows(37, 1).double(), same], 1)
    prediction = GaussianProcess(steps=5).fit(None, TensorDataset(x, same), RECIPE).predict(x, 3)
    torch.testing.assert_close(prediction.mean, same)
    predictor = GaussianProcess(steps=5).fit(None, TensorDataset(x, x[:, 0].sin()), RECIPE)
    assert predictor.process.x_std[1] == 1
    torch.testing.assert_close(predictor.predict(x + torch.tensor([0, 1e-9]), 3).mean, predictor.predict(x, 3).mean)


def test_the_answer_has_the_precision_of_the_input() -> None:
    x = torch.linspace(0, 6, 30, dtype=torch.float64)[:, None]
    y = x[:, 0].sin()
    predictor = GaussianProcess(steps=20).fit(None, TensorDataset(x, 1e8 + y), RECIPE)
    prediction = predictor.predict(x, 400)
    assert {prediction.samples.dtype, prediction.mean.dtype, prediction.std.dtype} == {torch.float64}
    torch.testing.assert_close(prediction.samples.std(0), prediction.std, rtol=standard_errors(1) / 800**0.5, atol=0)
    with pytest.raises(ValueError, match=r"in single precision for targets around 1e\+08 that spread by 0.7.*x.double"):
        predictor.predict(x.float(), 2)
    predictor = GaussianProcess(steps=2).fit(None, TensorDataset(x, 1e4 + y), RECIPE)
    prediction = predictor.predict(x.float(), 2)
    assert {prediction.samples.dtype, prediction.mean.dtype, prediction.std.dtype} == {torch.float32}
    assert predictor.predict(torch.ones(3, 1).long(), 2).samples.dtype == torch.float32


def test_no_inputs() -> None:
    x, y = curve()
    predictor = GaussianProcess(steps=2).fit(None, TensorDataset(x, torch.stack([y, -y], 1)), RECIPE)
    assert predictor.predict(x[:0], 3).samples.shape == (3, 0, 2)
    assert predictor.summarize(x[:0], 3, quantiles=(0.1,)).quantile(0.1).shape == (0, 2)


def test_inference_mode(tmp_path: Path) -> None:
    """Neither what is solved there nor what is loaded there stands in the way of gradients later."""
    predictor, x = fitted(steps=2), rows(3, 2)
    save(predictor, tmp_path / "model")
    with torch.inference_mode():
        samples = predictor.predict(x, 2).samples
        loaded = load(tmp_path / "model")
        assert torch.equal(loaded.predict(x, 2).samples, samples)
        assert torch.equal(copy.deepcopy(predictor).predict(x, 2).samples, samples)
    for each in (predictor, loaded):
        inputs = x.clone().requires_grad_()
        prediction = each.predict(inputs, 2)
        assert torch.equal(prediction.samples, samples)
        (prediction.samples.sum() + prediction.std.sum()).backward()
        assert bool((inputs.grad != 0).any())


def test_paths_held_at_once_are_few_where_each_holds_much(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 1000
    predictor = GaussianProcess(steps=1).fit(None, TensorDataset(rows(n, 1), rows(n, seed=1)), RECIPE)
    sizes: list[int] = []

    def paths(x: Tensor, start: int, stop: int, seed: int) -> Tensor:
        sizes.append(stop - start)
        return torch.zeros(stop - start, 1, len(x), dtype=torch.float64)

    monkeypatch.setattr(predictor.process, "paths", paths)
    predictor.summarize(rows(1, 1), 500)
    assert sum(sizes) == 500
    assert max(sizes) * n * 8 <= 1 << 18  # the weights (K + σ²I)⁻¹(…) of each path are n numbers


@pytest.mark.parametrize("kernel", ["rbf", "matern52"])
def test_a_function_of_many_waves_is_found_and_noise_is_left_alone(kernel: Any) -> None:
    """From a long length-scale the ascent ends where all is noise; pure noise in turn begins there. Outputs differ."""
    x = torch.linspace(0, 10, 100)[:, None]
    waves = (6 * x[:, 0]).sin()
    method = GaussianProcess(kernel=kernel, steps=100)
    predictor = method.fit(None, TensorDataset(x, torch.stack([waves, rows(100, seed=1)], 1)), RECIPE)
    assert float((predictor.predict(x, 1).mean[:, 0] - waves).abs().max()) < 0.1
    assert float(predictor.noise_std[0]) < 0.05
    start = GaussianProcess(kernel=kernel, steps=1, learning_rate=1e-12)
    process = start.fit(None, TensorDataset(x, torch.stack([waves, rows(100, seed=1)], 1)), RECIPE).process
    lengths = process.kernel.base_kernel.lengthscale.detach().flatten()
    assert float(lengths[0]) < 0.5
    assert float(lengths[1]) == pytest.approx(1.0)
    assert float(process.noise[0].detach()) == pytest.approx(0.1, rel=1e-4)


def test_points_that_repeat_have_a_covariance_all_the_same() -> None:
    ones = torch.ones(2, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(cholesky(ones) @ cholesky(ones).mT, ones, rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match="not positive definite; expected a kernel that fits them"):
        cholesky(-ones)


# -- the loop ------------------------------------------------------------------------------------------


def test_reports_and_validation() -> None:
    reports: list[EpochReport] = []
    x, y = curve()
    data = TensorDataset(x, y)
    predictor = GaussianProcess(steps=4).fit(
        None, data, TrainingConfig(epochs=30, progress=False, on_epoch=reports.append), val_data=data
    )
    assert [report.epochs for report in reports] == [4] * 4
    assert reports[-1].loss < reports[0].loss
    error = (predictor.predict(x, 1).mean[:, 0] - y).square().mean()
    assert reports[-1].val_metrics["loss"] == pytest.approx(float(error), rel=1e-4)


def test_a_fit_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    def stop(report: EpochReport) -> None:
        if report.epoch == 5:
            raise RuntimeError("cut short")

    fit = partial(GaussianProcess(steps=12).fit, None, TensorDataset(*curve()))
    whole = fit(RECIPE)
    with pytest.raises(RuntimeError, match="cut short"):
        fit(TrainingConfig(progress=False, folder=tmp_path, on_epoch=stop))
    epochs: list[int] = []
    resumed = fit(TrainingConfig(progress=False, folder=tmp_path, on_epoch=lambda report: epochs.append(report.epoch)))
    assert epochs == list(range(6, 12))
    x = rows(6, 2, seed=3)
    assert torch.equal(whole.predict(x, 3).samples, resumed.predict(x, 3).samples)


def test_save_and_load(tmp_path: Path) -> None:
    x, y = curve()
    targets = torch.stack([y, -y], 1)
    predictor = GaussianProcess(kernel="matern52", ard=False, steps=3).fit(None, TensorDataset(x, targets), RECIPE)
    save(predictor, tmp_path / "model")
    again = load(tmp_path / "model")
    assert torch.equal(again.predict(x, 3).samples, predictor.predict(x, 3).samples)
    assert torch.equal(again.noise_std, predictor.noise_std)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="got a net for 'gp', which has none"):
        load(tmp_path / "model", model=nn.Linear(2, 1))


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), GaussianNLL()])
def test_other_losses(loss: Any) -> None:
    with pytest.raises(ValueError, match="a Gaussian process is for regression under Gaussian noise: expected Squared"):
        GaussianProcess(loss=loss)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kernel": "linear"}, "got kernel='linear'; expected 'rbf' or 'matern52'"),
        ({"steps": 0}, "got steps=0; expected a whole number ≥ 1"),
        ({"learning_rate": -1.0}, "got learning_rate=-1.0; expected a positive number"),
        ({"loss": "mse"}, "got loss='mse'; expected a function of .outputs, targets."),
    ],
)
def test_bad_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        GaussianProcess(**options)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            TensorDataset(rows(9, 2), torch.arange(9)),
            "targets of type torch.int64; a Gaussian process is for regr.*expec",
        ),
        (TensorDataset(rows(9, 2), rows(9, 2, 2)), r"targets of shape \(9, 2, 2\); expected \(n,\), or \(n, k\)"),
        (TensorDataset(rows(9, 2), rows(9) / 0), "NaN or infinite targets; expected finite numbers"),
        (TensorDataset(rows(9, 2) * torch.nan, rows(9)), "NaN or infinite"),
        (TensorDataset(rows(1, 2), rows(1)), "got a single row; expected at least 2"),
        (TensorDataset(rows(9, 0), rows(9)), r"without a number in them \(0 columns\); expected at least one column"),
        (
            TensorDataset(torch.zeros(5001, 1), torch.zeros(5001)),
            "got n = 5001 points; expected at most 5000.*SparseGP",
        ),
    ],
    ids=["classes", "shape", "infinite targets", "NaN", "one row", "no columns", "too many"],
)
def test_bad_data(data: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        GaussianProcess(steps=1).fit(None, data, RECIPE)


def test_inputs_of_another_size() -> None:
    with pytest.raises(ValueError, match="got 3 numbers for each input; expected 2, as in training"):
        fitted(steps=1).predict(rows(4, 3), 2)
