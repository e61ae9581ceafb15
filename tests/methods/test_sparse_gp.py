"""Sparse Gaussian processes, against dense FITC formulas and against the exact process."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _reference import standard_errors
from scipy.stats import multivariate_normal
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from neuboots.methods.gaussian_process import GaussianProcess, SparseGP, SparseGPPredictor, SparseProcess
from neuboots.serialization import load, save
from neuboots.training import EpochReport, TrainingConfig

RECIPE = TrainingConfig(progress=False)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def curve(n: int = 60) -> tuple[Tensor, Tensor]:
    """Inputs and targets far from standard units."""
    x = 3.0 + 2.0 * rows(n, 2)
    return x, 100.0 + 20.0 * (x[:, 0].sin() + 0.3 * x[:, -1] + 0.2 * rows(n, seed=1))


def fitted(kernel: Any = "rbf", **options: Any) -> SparseGPPredictor:
    options = {"num_inducing": 8, "steps": 20, **options}
    return SparseGP(kernel=kernel, **options).fit(None, TensorDataset(*curve()), RECIPE)


def kernel_of(process: Any) -> Any:
    """The same kernel, for scikit-learn; without the noise."""
    lengths = process.kernel.base_kernel.lengthscale.detach()[0, 0].numpy()
    base = RBF(lengths) if process.kind == "rbf" else Matern(lengths, nu=2.5)
    return ConstantKernel(float(process.scale.detach())) * base


def standard() -> tuple[np.ndarray, np.ndarray]:
    """The training data in standard units, by NumPy."""
    x, y = (tensor.double().numpy() for tensor in curve())
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()


def dense(process: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """q(·, X), X, y and Q + Λ, with nothing spared."""
    kernel, Z = kernel_of(process), process.Z.detach()[0].numpy()
    X, y = standard()
    inverse = np.linalg.inv(kernel(Z) + 1e-8 * float(process.scale.detach()) * np.eye(len(Z)))

    def q(x: np.ndarray) -> np.ndarray:
        return kernel(x, Z) @ inverse @ kernel(Z, X)

    Q = q(X)
    return q, X, y, Q + np.diag(np.diag(kernel(X) - Q)) + float(process.noise.detach()) * np.eye(len(X))


def dense_posterior(process: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of f(x): q(x, X)(Q + Λ)⁻¹y and k(x, x) − q(x, X)(Q + Λ)⁻¹q(X, x)."""
    q, _, y, total = dense(process)
    weights = q(x) @ np.linalg.inv(total)
    return weights @ y, kernel_of(process)(x) - weights @ q(x).T


# -- FITC ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["rbf", "matern52"])
def test_the_likelihood_is_that_of_fitc(kernel: Any) -> None:
    process = fitted(kernel).process
    assert isinstance(process, SparseProcess)
    _, X, y, total = dense(process)
    expected = multivariate_normal(np.zeros(len(y)), total).logpdf(y)
    with torch.no_grad():
        value = process(torch.tensor(X), torch.tensor(y)[:, None])
    assert -len(y) * float(value) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("kernel", ["rbf", "matern52"])
def test_the_posterior_is_that_of_fitc(kernel: Any) -> None:
    predictor = fitted(kernel)
    process = predictor.process
    new = 3.0 + 2.0 * rows(7, 2, seed=5)
    mean, covariance = dense_posterior(process, process.standardised(new).numpy())
    prediction = predictor.predict(new, 2)
    y = curve()[1].double()
    np.testing.assert_allclose(prediction.mean[:, 0], mean * float(y.std(correction=0)) + float(y.mean()), rtol=1e-5)
    std = np.sqrt(np.diag(covariance)) * float(y.std(correction=0))
    np.testing.assert_allclose(prediction.std[:, 0], std, rtol=1e-4)


@pytest.mark.parametrize("kernel", ["rbf", "matern52"])
def test_with_all_points_inducing_it_is_the_exact_process(kernel: Any) -> None:
    process = SparseProcess(60, 2, 1, kernel, True)
    x, y = process.set_units(*(tensor.double().view(60, -1) for tensor in curve()))
    process.Z.data.copy_(x)
    process.absorb(x, y)
    theirs = GaussianProcessRegressor(kernel_of(process), alpha=float(process.noise.detach()), optimizer=None)
    theirs.fit(x.numpy(), y[:, 0].numpy())
    new = rows(7, 2, seed=5).double()
    mean, std = theirs.predict(new.numpy(), return_std=True)
    with torch.no_grad():
        ours = process.moments(new)
        value = process(x, y)
    np.testing.assert_allclose(ours[0][0], mean, rtol=1e-5)
    np.testing.assert_allclose(ours[1][0], std, rtol=1e-5)
    assert -60 * float(value) == pytest.approx(theirs.log_marginal_likelihood_value_, rel=1e-5)


def test_sampled_functions_have_the_mean_and_covariance_of_the_posterior() -> None:
    process = fitted("matern52").process
    x = 1.5 * rows(5, 2, seed=5).double()
    B = 400
    with torch.no_grad():
        samples = process.paths(x, 0, B, seed=0)[:, 0].numpy()  # (B, 5)
    mean, covariance = dense_posterior(process, x.numpy())
    variance = np.diag(covariance)
    k = standard_errors(5 + 15)
    assert bool((np.abs(samples.mean(0) - mean) < k * np.sqrt(variance / B)).all())
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / B)
    assert bool((np.abs(np.cov(samples.T) - covariance) < k * error).all())


def test_several_outputs_are_processes_of_their_own() -> None:
    x, y = curve()
    other = x[:, 1].cos() + 0.1 * rows(60, seed=3)
    method = SparseGP(num_inducing=8, steps=20)
    both = method.fit(None, TensorDataset(x, torch.stack([y, other], 1)), RECIPE)
    prediction = both.predict(x[:5], 4)
    assert prediction.samples.shape == (4, 5, 2)
    for j, target in enumerate((y, other)):
        alone = method.fit(None, TensorDataset(x, target), RECIPE).predict(x[:5], 2)
        torch.testing.assert_close(prediction.mean[:, j], alone.mean[:, 0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(prediction.std[:, j], alone.std[:, 0], rtol=1e-3, atol=1e-4)


# -- training ------------------------------------------------------------------------------------------


def test_inducing_inputs_begin_on_the_data_and_are_learned() -> None:
    X = torch.tensor(standard()[0])
    starts = [fitted(steps=1, learning_rate=1e-12, num_inducing=8).process.basis[0].detach() for _ in range(2)]
    assert torch.equal(*starts)
    assert bool((torch.cdist(starts[0], X).amin(1) < 1e-6).all())
    config = TrainingConfig(progress=False, seed=1)
    other = SparseGP(num_inducing=8, steps=1, learning_rate=1e-12).fit(None, TensorDataset(*curve()), config)
    assert not torch.allclose(other.process.basis[0], starts[0])
    reports: list[EpochReport] = []
    config = TrainingConfig(progress=False, on_epoch=reports.append)
    learned = SparseGP(num_inducing=8, steps=60).fit(None, TensorDataset(*curve()), config)
    assert float((learned.process.basis[0].detach() - starts[0]).abs().mean()) > 0.1
    assert reports[-1].loss < reports[0].loss - 0.3


class Largest(TorchDispatchMode):
    """The most numbers that any tensor of any operation had."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.size = max([self.size, *sizes])
        return out


def test_no_matrix_of_all_points_is_built() -> None:
    """n = 10,000 and m = 100: nothing is larger than the n × m (× D) numbers of the kernel."""
    n, m = 10_000, 100
    x = rows(n, 2)
    data = TensorDataset(x, x.sum(1))
    with Largest() as watched:
        predictor = SparseGP(num_inducing=m, steps=1).fit(None, data, RECIPE)
        training = watched.size
        predictor.predict(x, 2)
    assert n * m <= training <= 2 * n * m
    assert watched.size < n * n / 10


def test_validation_reports_the_posterior_mean() -> None:
    reports: list[EpochReport] = []
    x, y = curve()
    data = TensorDataset(x, y)
    predictor = SparseGP(num_inducing=8, steps=3).fit(
        None, data, TrainingConfig(progress=False, on_epoch=reports.append), val_data=data
    )
    error = (predictor.predict(x, 1).mean[:, 0] - y).square().mean()
    assert reports[-1].val_metrics["loss"] == pytest.approx(float(error), rel=1e-4)


def test_a_fit_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    def stop(report: EpochReport) -> None:
        if report.epoch == 5:
            raise RuntimeError("cut short")

    fit = partial(SparseGP(num_inducing=8, steps=12).fit, None, TensorDataset(*curve()))
    whole = fit(RECIPE)
    with pytest.raises(RuntimeError, match="cut short"):
        fit(TrainingConfig(progress=False, folder=tmp_path, on_epoch=stop))
    resumed = fit(TrainingConfig(progress=False, folder=tmp_path))
    x = rows(6, 2, seed=3)
    assert torch.equal(whole.predict(x, 3).samples, resumed.predict(x, 3).samples)


def test_save_and_load_without_the_data(tmp_path: Path) -> None:
    predictor = fitted(ard=False)
    save(predictor, tmp_path / "model")
    again = load(tmp_path / "model")
    assert isinstance(again, SparseGPPredictor)
    x = rows(6, 2, seed=3)
    assert torch.equal(again.predict(x, 3).samples, predictor.predict(x, 3).samples)
    assert torch.equal(again.noise_std, predictor.noise_std)
    assert all(60 not in tensor.shape for tensor in predictor.state_dict().values())  # n points are not kept


def test_more_inducing_points_than_points() -> None:
    data = TensorDataset(rows(5, 2), rows(5, seed=1))
    predictor = SparseGP(num_inducing=100, steps=2).fit(None, data, RECIPE)
    assert predictor.process.basis.shape == (1, 5, 2)


@pytest.mark.parametrize("kernel", ["rbf", "matern52"])
def test_with_all_points_inducing_they_stay_and_the_noise_is_found(kernel: Any) -> None:
    x = rows(80, 2)
    y = 10.0 * (3 * x[:, 0]).sin() + x[:, 1] + rows(80, seed=1)
    data = TensorDataset(x, y)
    predictor = SparseGP(num_inducing=500, kernel=kernel, steps=200).fit(None, data, RECIPE)
    exact = GaussianProcess(kernel=kernel).fit(None, data, RECIPE)
    Z, inputs = predictor.process.basis[0].detach(), predictor.process.standardised(x)
    assert float(torch.cdist(Z, inputs).amin(0).max()) < 1e-6
    assert float(predictor.noise_std) == pytest.approx(float(exact.noise_std), rel=0.05)
    torch.testing.assert_close(predictor.predict(x, 1).mean, exact.predict(x, 1).mean, rtol=0, atol=0.3)


def test_a_function_of_many_waves_is_found() -> None:
    x = torch.linspace(0, 10, 100)[:, None]
    y = (6 * x[:, 0]).sin()
    predictor = SparseGP(num_inducing=60).fit(None, TensorDataset(x, y), RECIPE)
    assert float((predictor.predict(x, 1).mean[:, 0] - y).abs().max()) < 0.1
    assert float(predictor.noise_std) < 0.05


def test_no_inputs_and_double_precision() -> None:
    x = torch.linspace(0, 6, 30, dtype=torch.float64)[:, None]
    predictor = SparseGP(num_inducing=10, steps=20).fit(None, TensorDataset(x, 1e8 + x[:, 0].sin()), RECIPE)
    assert predictor.predict(x[:0], 3).samples.shape == (3, 0, 1)
    prediction = predictor.predict(x, 400)
    torch.testing.assert_close(prediction.samples.std(0), prediction.std, rtol=standard_errors(1) / 800**0.5, atol=0)


def test_it_is_loaded_and_asked_in_inference_mode(tmp_path: Path) -> None:
    predictor, x = fitted(steps=2), rows(3, 2)
    samples = predictor.predict(x, 2).samples
    save(predictor, tmp_path / "model")
    with torch.inference_mode():
        loaded = load(tmp_path / "model")
        assert torch.equal(loaded.predict(x, 2).samples, samples)
    x.requires_grad_()
    loaded.predict(x, 2).std.sum().backward()
    assert bool((x.grad != 0).any())


def test_inducing_points_on_one_another() -> None:
    x, y = rows(1, 2).expand(30, 2).contiguous(), rows(30, seed=1)
    prediction = SparseGP(num_inducing=10, steps=5).fit(None, TensorDataset(x, y), RECIPE).predict(x[:3], 2)
    assert bool(torch.isfinite(prediction.samples).all())
    torch.testing.assert_close(prediction.mean, y.mean().expand(3, 1), rtol=0, atol=0.3)


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_inducing": 0}, "got num_inducing=0; expected a whole number ≥ 1"),
        ({"kernel": "linear"}, "got kernel='linear'; expected 'rbf' or 'matern52'"),
        ({"steps": 1.5}, "got steps=1.5; expected a whole number ≥ 1"),
        ({"learning_rate": 0.0}, "got learning_rate=0.0; expected a positive number"),
        (
            {"loss": nn.CrossEntropyLoss()},
            "a Gaussian process is for regression under Gaussian noise: expected nn.MSELoss",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SparseGP(**options)


def test_classes_as_targets() -> None:
    with pytest.raises(
        ValueError, match="got targets of type torch.int64; a Gaussian process is for regression: expected"
    ):
        SparseGP().fit(None, TensorDataset(rows(9, 2), torch.arange(9)), RECIPE)
