"""Tests of exact and sparse Gaussian processes against scikit-learn and dense formulas."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _nets import Stream, noise
from _reference import standard_errors
from scipy.stats import multivariate_normal
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

import neuboots.methods.gaussian_process as module
from neuboots import GaussianProcess, SparseGP, TrainingConfig, load, save
from neuboots.training import EpochReport

CONFIG = TrainingConfig(progress=False)
KERNELS = pytest.mark.parametrize("kernel", ["rbf", "matern52"])
METHODS = pytest.mark.parametrize(
    "make", [GaussianProcess, lambda **o: SparseGP(num_inducing=8, **o)], ids=["gp", "sparse"]
)


def curve(n: int = 40) -> tuple[Tensor, Tensor]:
    """Inputs and targets far from standard units."""
    x = 3.0 + 2.0 * noise(n, 2)
    return x, 100.0 + 20.0 * (x[:, 0].sin() + 0.3 * x[:, -1] + 0.2 * noise(n, seed=1))


def fit(method: Any, x: Any = None, y: Any = None, **options: Any) -> Any:
    x, y = curve() if x is None else (x, y)
    return method.fit(None, TensorDataset(x, y), TrainingConfig(progress=False, **options))


def sklearn_kernel(process: Any) -> Any:
    """The same kernel, without the noise."""
    lengths = process.kernel.base_kernel.lengthscale.detach()[0, 0].numpy()
    base = RBF(lengths) if process.kernel_name == "rbf" else Matern(lengths, nu=2.5)
    return ConstantKernel(float(process.scale.detach()[0])) * base


def dense_exact(process: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of f(x), by inversion."""
    kernel, X = sklearn_kernel(process), process.x.numpy()
    inverse = np.linalg.inv(kernel(X) + float(process.noise.detach()) * np.eye(len(X)))
    cross = kernel(x, X)
    return cross @ inverse @ process.y[0].numpy(), kernel(x) - cross @ inverse @ cross.T


def dense_fitc(process: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """q(·, X), X, y and Q + Λ."""
    kernel, Z = sklearn_kernel(process), process.Z.detach()[0].numpy()
    x, y = (tensor.double().numpy() for tensor in curve())
    X, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    inverse = np.linalg.inv(kernel(Z) + 1e-8 * float(process.scale.detach()) * np.eye(len(Z)))

    def q(x: np.ndarray) -> np.ndarray:
        return kernel(x, Z) @ inverse @ kernel(Z, X)

    Q = q(X)
    return q, X, y, Q + np.diag(np.diag(kernel(X) - Q)) + float(process.noise.detach()) * np.eye(len(X))


def dense_sparse(process: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of f(x): q(x, X)(Q + Λ)⁻¹y and k(x, x) − q(x, X)(Q + Λ)⁻¹q(X, x)."""
    q, _, y, total = dense_fitc(process)
    weights = q(x) @ np.linalg.inv(total)
    return weights @ y, sklearn_kernel(process)(x) - weights @ q(x).T


# -- posterior and likelihood --------------------------------------------------------------------------


@pytest.mark.parametrize("ard", [True, False])
@KERNELS
def test_posterior_matches_scikit_learn(kernel: Any, ard: bool) -> None:
    predictor = fit(GaussianProcess(kernel=kernel, ard=ard, steps=30))
    process = predictor.process
    theirs = GaussianProcessRegressor(
        sklearn_kernel(process), alpha=float(process.noise.detach()), optimizer=None, normalize_y=True
    )
    (x, y), new = curve(), 3.0 + 2.0 * noise(7, 2, seed=5)
    center, spread = x.mean(0).double(), x.double().std(0, correction=0)
    theirs.fit(((x - center) / spread).numpy(), y.double().numpy())
    mean, std = theirs.predict(((new - center) / spread).numpy(), return_std=True)
    prediction = predictor.predict(new, 2)
    np.testing.assert_allclose(prediction.mean[:, 0], mean, rtol=1e-5)
    np.testing.assert_allclose(prediction.std[:, 0], std, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["rbf", pytest.param("matern52", marks=pytest.mark.slow)])
def test_marginal_likelihood_reaches_that_of_scikit_learn(kernel: Any) -> None:
    process = fit(GaussianProcess(kernel=kernel)).process
    X, y = process.x.numpy(), process.y[0].numpy()
    reached = -len(X) * float(process(process.x, process.y.T).detach())
    alpha = float(process.noise.detach())
    own = GaussianProcessRegressor(sklearn_kernel(process), alpha=alpha, optimizer=None).fit(X, y)
    assert reached == pytest.approx(own.log_marginal_likelihood_value_, rel=1e-6)
    base = RBF([1.0, 1.0], (1e-3, 1e4)) if kernel == "rbf" else Matern([1.0, 1.0], (1e-3, 1e4), nu=2.5)
    best = GaussianProcessRegressor(
        ConstantKernel(1.0) * base + WhiteKernel(0.1, (1e-6, 10.0)), n_restarts_optimizer=3, random_state=0
    )
    assert reached > best.fit(X, y).log_marginal_likelihood_value_ - 0.05


@KERNELS
def test_likelihood_and_posterior_match_dense_fitc(kernel: Any) -> None:
    predictor = fit(SparseGP(num_inducing=8, kernel=kernel, steps=20))
    process = predictor.process
    _, X, y, total = dense_fitc(process)
    with torch.no_grad():
        value = process(torch.tensor(X), torch.tensor(y)[:, None])
    expected = multivariate_normal(np.zeros(len(y)), total).logpdf(y)
    assert -len(y) * float(value) == pytest.approx(float(expected), rel=1e-6)
    new = 3.0 + 2.0 * noise(7, 2, seed=5)
    mean, covariance = dense_sparse(process, process.standardize(new).numpy())
    prediction, (center, spread) = predictor.predict(new, 2), (float(process.y_mean), float(process.y_std))
    np.testing.assert_allclose(prediction.mean[:, 0], mean * spread + center, rtol=1e-5)
    np.testing.assert_allclose(prediction.std[:, 0], np.sqrt(np.diag(covariance)) * spread, rtol=1e-4)


def test_noise_is_estimated() -> None:
    """σ̂ against its standard error σ/√2n."""
    x = torch.linspace(-3, 3, 200)[:, None]
    y = 10 * (x[:, 0].sin() + 0.3 * noise(200, seed=2))
    predictor = fit(GaussianProcess(steps=100), x, y)
    assert predictor.noise_std.shape == (1,)
    assert abs(float(predictor.noise_std) - 3.0) < standard_errors(1) * 3.0 / np.sqrt(400)
    low, high = predictor.predict(x, 2).prediction_interval(0.95, noise_std=predictor.noise_std)
    covered = float(((low[:, 0] < y) & (y < high[:, 0])).float().mean())
    assert abs(covered - 0.95) < standard_errors(1) * np.sqrt(0.95 * 0.05 / 200)


def test_units_do_not_matter() -> None:
    x, y = curve()
    new, method = 3.0 + 2.0 * noise(7, 2, seed=5), GaussianProcess(steps=20)
    plain = fit(method).predict(new.double(), 3)
    other = fit(method, 1e3 * x.double() - 7, -5 * y.double() + 2).predict(1e3 * new.double() - 7, 3)
    torch.testing.assert_close(other.mean, -5 * plain.mean + 2, rtol=1e-5, atol=0)
    torch.testing.assert_close(other.std, 5 * plain.std, rtol=1e-4, atol=0)


@METHODS
def test_outputs_are_independent_processes(make: Callable[..., Any]) -> None:
    x, y = curve()
    other = x[:, 1].cos() + 0.1 * noise(40, seed=3)
    both = fit(make(steps=20), x, torch.stack([y, other], 1))
    assert both.noise_std.shape == (2,)
    prediction = both.predict(x[:5], 4)
    assert prediction.samples.shape == (4, 5, 2)
    for j, target in enumerate((y, other)):
        alone = fit(make(steps=20), x, target).predict(x[:5], 2)
        torch.testing.assert_close(prediction.mean[:, j], alone.mean[:, 0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(prediction.std[:, j], alone.std[:, 0], rtol=1e-3, atol=1e-4)


# -- sampled functions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "frequencies", "dense"),
    [
        pytest.param(GaussianProcess(steps=20), 512, dense_exact, marks=pytest.mark.slow),
        (GaussianProcess(kernel="matern52", steps=20), 32, dense_exact),
        (SparseGP(kernel="matern52", num_inducing=8, steps=20), 64, dense_sparse),
    ],
)
def test_samples_have_the_mean_and_covariance_of_the_posterior(
    method: Any, frequencies: int, dense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At five points near the data and far from them; few frequencies are as right as many."""
    monkeypatch.setattr(module, "_NUM_FREQUENCIES", frequencies)
    process, x, B = fit(method).process, 1.5 * noise(5, 2, seed=5).double(), 400
    with torch.no_grad():
        samples = process.paths(x, 0, B, seed=0)[:, 0].numpy()  # (B, 5)
    mean, covariance = dense(process, x.numpy())
    variance = np.diag(covariance)
    k = standard_errors(5 + 15)
    assert bool((np.abs(samples.mean(0) - mean) < k * np.sqrt(variance / B)).all())
    # of a sample covariance of normal draws; a path of F frequencies has the fourth moment 3 + 3/(2F)
    error = np.sqrt((np.outer(variance, variance) + covariance**2) * (1 + 1 / frequencies) / B)
    assert bool((np.abs(np.cov(samples.T) - covariance) < k * error).all())


@KERNELS
def test_prior_paths_have_the_covariance_of_the_kernel(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path of F random frequencies has the fourth moment 3 + 3/(2F) of its variance."""
    monkeypatch.setattr(module, "_NUM_FREQUENCIES", 64)
    process, x, B = fit(GaussianProcess(kernel=kernel, steps=20)).process, 1.5 * noise(5, 2, seed=5).double(), 400
    with torch.no_grad():
        paths = torch.stack([process.prior_path(0, "test", b)(x)[0] for b in range(B)]).numpy()  # (B, 5)
    covariance = sklearn_kernel(process)(x.numpy())
    variance, k = np.diag(covariance), standard_errors(2 * (5 + 15))
    assert bool((np.abs(paths.mean(0)) < k * np.sqrt(variance / B)).all())
    error = np.sqrt((np.outer(variance, variance) + covariance**2) * (1 + 1 / module._NUM_FREQUENCIES) / B)
    assert bool((np.abs(paths.T @ paths / B - covariance) < k * error).all())


def test_samples_are_differentiable_in_x() -> None:
    process = fit(GaussianProcess(steps=5)).process.requires_grad_(False)
    x = noise(3, 2, seed=5).double().requires_grad_()
    torch.autograd.gradcheck(lambda z: process.paths(z, 0, 2, seed=0), x)
    torch.autograd.gradcheck(lambda z: process.moments(z)[1], x)


def test_inputs_in_chunks_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor, x = fit(GaussianProcess(steps=5)), noise(30, 2)
    whole = predictor.predict(x, 3)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 7 * 40)
    chunks = predictor.predict(x, 3)
    torch.testing.assert_close(chunks.samples, whole.samples)
    torch.testing.assert_close(chunks.std, whole.std)


def test_changed_parameters_invalidate_the_cache() -> None:
    predictor, x = fit(GaussianProcess(steps=5)), noise(3, 2)
    process = predictor.process
    before = predictor.predict(x, 2)
    with torch.no_grad():
        process.kernel.base_kernel.raw_lengthscale += 1.0
    after = predictor.predict(x, 2)
    assert not torch.allclose(before.std, after.std)
    mean, covariance = dense_exact(process, process.standardize(x).numpy())
    np.testing.assert_allclose(process.in_units(torch.tensor(mean)[None])[:, 0], after.mean[:, 0], rtol=1e-5)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)) * float(process.y_std), after.std[:, 0], rtol=1e-4)


def test_number_of_stored_paths_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    n, sizes = 1000, []
    predictor = fit(GaussianProcess(steps=1), noise(n, 1), noise(n, seed=1))

    def paths(x: Tensor, start: int, stop: int, seed: int) -> Tensor:
        sizes.append(stop - start)
        return torch.zeros(stop - start, 1, len(x), dtype=torch.float64)

    monkeypatch.setattr(predictor.process, "paths", paths)
    predictor.summarize(noise(1, 1), 500)
    assert sum(sizes) == 500
    assert max(sizes) * n * 8 <= 1 << 18  # a path has n weights


# -- data ----------------------------------------------------------------------------------------------


def test_inputs_are_flattened() -> None:
    method = GaussianProcess(steps=5)
    data: Any = [((noise(2, 2, seed=i), float(i % 5)), float(i)) for i in range(30)]
    predictor = method.fit(None, data, CONFIG)
    assert predictor.predict((noise(3, 2, 2), torch.arange(3.0)), 2).samples.shape == (2, 3, 1)
    named, x = fit(method), curve()[0][:4]
    torch.testing.assert_close(named.predict({"b": x[:, 1], "a": x[:, 0]}, 2).samples, named.predict(x, 2).samples)
    with pytest.raises(ValueError, match="2 numbers"):
        named.predict(noise(4, 3), 2)


def test_stream_gives_one_epoch() -> None:
    config = TrainingConfig(batch_size=10, steps_per_epoch=3, progress=False)
    assert GaussianProcess(steps=2).fit(None, Stream(*curve()), config).process.basis.shape == (30, 2)
    with pytest.raises(ValueError, match="steps_per_epoch"):
        GaussianProcess().fit(None, Stream(*curve()), CONFIG)


@pytest.mark.parametrize("constant", [4.0, 0.1, 1 / 3])
def test_constant_inputs_and_targets(constant: float) -> None:
    """The standard deviation of constant values is rounding error."""
    same = torch.full((37, 1), constant, dtype=torch.float64)
    x = torch.cat([noise(37, 1).double(), same], 1)
    torch.testing.assert_close(fit(GaussianProcess(steps=5), x, same).predict(x, 3).mean, same)
    predictor = fit(GaussianProcess(steps=5), x, x[:, 0].sin())
    assert predictor.process.x_std[1] == 1
    torch.testing.assert_close(predictor.predict(x + torch.tensor([0, 1e-9]), 3).mean, predictor.predict(x, 3).mean)


@METHODS
def test_outputs_have_the_precision_of_the_input(make: Callable[..., Any]) -> None:
    x = torch.linspace(0, 6, 30, dtype=torch.float64)[:, None]
    y = x[:, 0].sin()
    predictor = fit(make(steps=20), x, 1e8 + y)
    prediction = predictor.predict(x, 100)
    assert {prediction.samples.dtype, prediction.mean.dtype, prediction.std.dtype} == {torch.float64}
    torch.testing.assert_close(prediction.samples.std(0), prediction.std, rtol=standard_errors(30) / 200**0.5, atol=0)
    with pytest.raises(ValueError, match="double"):
        predictor.predict(x.float(), 2)
    predictor = fit(make(steps=2), x, 1e4 + y)
    prediction = predictor.predict(x.float(), 2)
    assert {prediction.samples.dtype, prediction.mean.dtype, prediction.std.dtype} == {torch.float32}
    assert predictor.predict(torch.ones(3, 1).long(), 2).samples.dtype == torch.float32
    assert predictor.predict(x[:0], 3).samples.shape == (3, 0, 1)


@METHODS
def test_inference_mode(make: Callable[..., Any], tmp_path: Path) -> None:
    """Gradients are still possible after prediction and loading in inference mode."""
    predictor, x = fit(make(steps=2)), noise(3, 2)
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
        assert inputs.grad is not None
        assert bool((inputs.grad != 0).any())


# -- training ------------------------------------------------------------------------------------------


@KERNELS
def test_short_length_scale_is_found_and_noise_is_not_fitted(kernel: Any) -> None:
    """From a long length-scale the training would end where all is noise; for pure noise it starts there."""
    x = torch.linspace(0, 10, 100)[:, None]
    waves = (6 * x[:, 0]).sin()
    y = torch.stack([waves, noise(100, seed=1)], 1)
    predictor = fit(GaussianProcess(kernel=kernel, steps=100), x, y)
    assert float((predictor.predict(x, 1).mean[:, 0] - waves).abs().max()) < 0.1
    assert float(predictor.noise_std[0]) < 0.05
    process = fit(GaussianProcess(kernel=kernel, steps=1, learning_rate=1e-12), x, y).process
    lengths = process.kernel.base_kernel.lengthscale.detach().flatten()
    assert float(lengths[0]) < 0.5
    assert float(lengths[1]) == pytest.approx(1.0)
    assert float(process.noise[0].detach()) == pytest.approx(0.1, rel=1e-4)


def test_repeated_points() -> None:
    x, y = noise(1, 2).expand(30, 2).contiguous(), noise(30, seed=1)
    prediction = fit(SparseGP(num_inducing=10, steps=5), x, y).predict(x[:3], 2)
    assert bool(torch.isfinite(prediction.samples).all())
    torch.testing.assert_close(prediction.mean, y.mean().expand(3, 1), rtol=0, atol=0.3)


@METHODS
def test_reports_and_validation(make: Callable[..., Any]) -> None:
    reports: list[EpochReport] = []
    x, y = curve()
    config = TrainingConfig(epochs=30, progress=False, on_epoch=reports.append)
    predictor = make(steps=4).fit(None, (x, y), config, val_data=(x, y))
    assert [report.epochs for report in reports] == [4] * 4
    assert reports[-1].loss < reports[0].loss
    error = (predictor.predict(x, 1).mean[:, 0] - y).square().mean()
    assert reports[-1].val_metrics["loss"] == pytest.approx(float(error), rel=1e-4)


def test_inducing_points_start_at_the_data_and_are_learned() -> None:
    x = curve()[0].double()
    X = (x - x.mean(0)) / x.std(0, correction=0)
    start = SparseGP(num_inducing=8, steps=1, learning_rate=1e-12)
    first, again, other = (fit(start, seed=seed).process.basis[0].detach() for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert bool((torch.cdist(first, X).amin(1) < 1e-6).all())
    reports: list[EpochReport] = []
    learned = fit(SparseGP(num_inducing=8, steps=60), on_epoch=reports.append)
    assert float((learned.process.basis[0].detach() - first).abs().mean()) > 0.1
    assert reports[-1].loss < reports[0].loss - 0.3
    assert all(40 not in tensor.shape for tensor in learned.state_dict().values())  # no training points are stored
    every = fit(SparseGP(steps=2), noise(5, 2), noise(5, seed=1)).process  # at most n, which stay where they are
    torch.testing.assert_close(every.Z[0].sort(0).values, every.standardize(noise(5, 2)).sort(0).values)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any result."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.size = max([self.size, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


def test_sparse_process_builds_no_matrix_of_all_points() -> None:
    """n = 5,000 and m = 50: nothing is larger than the n × m (× D) elements of the kernel."""
    n, m = 5_000, 50
    x = noise(n, 2)
    with LargestTensor() as watched:
        predictor = fit(SparseGP(num_inducing=m, steps=1), x, x.sum(1))
        training = watched.size
        predictor.predict(x, 2)
    assert n * m <= training <= 2 * n * m
    assert watched.size < n * n / 8


# -- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y", "match"),
    [
        (noise(9, 2), torch.arange(9), "targets"),
        (noise(9, 2), noise(9, 2, 2), "targets"),
        (noise(9, 2), noise(9) / 0, "targets"),
        (noise(9, 2) * torch.nan, noise(9), "NaN"),
        (noise(1, 2), noise(1), "data"),
        (noise(9, 0), noise(9), "data"),
        (torch.zeros(5001, 1), torch.zeros(5001), "SparseGP"),
    ],
    ids=["classes", "shape", "infinite targets", "NaN", "one row", "no columns", "too many"],
)
def test_data_are_checked(x: Tensor, y: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fit(GaussianProcess(steps=1), x, y)
