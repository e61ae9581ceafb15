"""Gaussian process regression: exact, and sparse with m learned inducing points (FITC). No net is involved.

    f ~ GP(0, k),  y = f(X) + ε,  ε ~ N(0, σ²I);   log p(y) = log N(y | 0, K + σ²I)
    f | y:  mean k(x, X)(K + σ²I)⁻¹y,   variance k(x, x) − k(x, X)(K + σ²I)⁻¹k(X, x)

The parameters of the kernel and σ² maximize the marginal likelihood. A sample of the posterior is one function of x, by
Matheron's rule (Wilson et al. 2020): a path g of the prior, corrected at the data,

    f_b(x) = g_b(x) + k(x, X)(K + σ²I)⁻¹(y − g_b(X) − ε_b),   g_b(x) = Σ_j a_j cos(ω_jᵀx) + c_j sin(ω_jᵀx)

so that no covariance of the N test inputs is built. The frequencies ω_j follow the kernel's spectral density (Rahimi
and Recht 2007) and are drawn for each replicate: mean and covariance over the replicates are those of the exact
posterior for any number of frequencies; many of them make a single path more nearly Gaussian.

The sparse process is that of Snelson and Ghahramani, with m inducing inputs Z that are learned as well:

    y ~ N(0, Q + Λ),   Q = K_nm K_mm⁻¹ K_mn,   Λ = diag(K − Q) + σ²I
    f | y:  mean k_m(x)ᵀΣ⁻¹K_mnΛ⁻¹y,   variance k(x, x) − k_m(x)ᵀ(K_mm⁻¹ − Σ⁻¹)k_m(x),   Σ = K_mm + K_mnΛ⁻¹K_nm

Training takes O(nm²) time and O(nm) memory; prediction needs m + m² numbers for each output, and no training data.
Training points keep their exact variances (Λ); gpytorch's InducingPointKernel trains the variational bound of Titsias
(2009) instead, so only gpytorch's kernels are used here. With m = n inducing points at the inputs it is the exact
process. With fewer, FITC's estimate of σ tends to be too small (Bauer, van der Wilk and Rasmussen 2016).

Rasmussen and Williams, Gaussian processes for machine learning, MIT Press 2006. Snelson and Ghahramani, Sparse Gaussian
processes using pseudo-inputs, NeurIPS 18, 2006. Wilson, Borovitskiy, Terenin, Mostowsky and Deisenroth, Efficiently
sampling functions from Gaussian process posteriors, ICML 2020. Rahimi and Recht, Random features for large-scale kernel
machines, NeurIPS 2007. Bauer, van der Wilk and Rasmussen, Understanding probabilistic sparse Gaussian process
approximations, NeurIPS 29, 2016. The kernels are gpytorch's (Gardner et al. 2018).
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal
from torch.utils.data import TensorDataset

from neuboots._prng import derive_keys, draw_gamma, draw_normal
from neuboots._validation import (
    ArgumentError,
    Count,
    check_choice,
    check_int,
    check_memory,
    check_positive,
    check_types,
)
from neuboots.head import cast_inputs, check_inputs
from neuboots.loading import Batch
from neuboots.losses import Loss
from neuboots.methods._base import fingerprint_tensors, iterate_batches, register
from neuboots.prediction import Moments, Predictor, SampleStream, num_bytes
from neuboots.training import BaseMethod, FitInputs, TrainingConfig, constant_schedule, validation_metrics

KernelName = Literal["rbf", "matern52"]

MAX_POINTS = 5_000  # of an exact process: K has n² elements, and its Cholesky factor costs n³/3
_NUM_FREQUENCIES = 512  # of one path of the prior
_CHUNK_ELEMENTS = 1 << 22
_MIN_NOISE = 1e-6  # σ² of standardized targets: keeps K + σ²I away from singular
_START_LENGTHS = (1.0, 1 / 4, 1 / 16)  # initial length-scales, in units of the typical distance of two inputs
_START_NOISES = (0.1, 1.0)  # initial σ² at which they are compared; training starts at the first
_MAX_ROUNDING = 0.01  # of the targets' standard deviation, by single precision
_JITTER = 1e-8  # of k(x, x): two inducing points may coincide


def _flatten_inputs(x: Any) -> Tensor:
    """All inputs of a row next to each other, in double precision: (N, D)."""
    parts = _input_tensors(x)
    return torch.cat([part.reshape(len(part), math.prod(part.shape[1:])).double() for part in parts], 1)


def _input_tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Mapping):
        return [x[key] for key in sorted(x)]
    return list(x) if isinstance(x, tuple | list) else [x]


def _read_data(inputs: FitInputs) -> tuple[Tensor, Tensor]:
    """All training data, or `steps_per_epoch` batches of a stream: inputs (n, D) and targets (n, k)."""
    batches = list(iterate_batches(inputs.data, inputs.config))
    for batch in batches:
        check_inputs(batch.x)
    x, y = torch.cat([_flatten_inputs(batch.x) for batch in batches]), torch.cat([batch.y for batch in batches])
    if len(x) < 2 or x.shape[1] == 0:
        raise ArgumentError("data", tuple(x.shape), "inputs of at least two rows and one column")
    if not y.is_floating_point() or y.ndim not in (1, 2):
        got, expected = f"{y.dtype} {tuple(y.shape)}", "floating-point targets (n,) or (n, k) of a regression"
        raise ArgumentError("targets", got, expected, hint="use y.float()")
    if not bool(torch.isfinite(y).all()):
        raise ArgumentError("targets", "NaN or infinite values", "finite numbers", hint="drop those rows")
    return x, y.reshape(len(y), -1).double()


def _map_chunks(function: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
    """function(x), (…, N), over some rows of x at a time: each takes `width` elements."""
    return torch.cat([function(part) for part in torch.split(x, max(1, _CHUNK_ELEMENTS // width))], -1)


def _cholesky(covariance: Tensor) -> Tensor:
    """L with LLᵀ = covariance; where rounding made it indefinite, a small multiple of the identity is added."""
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(covariance)
    jitter = torch.zeros_like(failed, dtype=covariance.dtype)
    for size in (1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4):
        if not bool(failed.any()):
            return root
        jitter[failed > 0] = size
        shift = torch.diag_embed(jitter[..., None].expand(covariance.shape[:-1]))
        root, failed = torch.linalg.cholesky_ex(covariance + shift)
    if bool(failed.any()) or not bool(torch.isfinite(root).all()):
        raise FloatingPointError("the covariance of the Gaussian process is not positive definite, or not finite")
    return root


def _solve_lower(root: Tensor, values: Tensor) -> Tensor:
    """L⁻¹ values, for a lower triangular L."""
    return cast(Tensor, torch.linalg.solve_triangular(root, values, upper=False))


# -- the processes -------------------------------------------------------------------------------------


class _Process(nn.Module):
    """k independent Gaussian processes of D inputs, one for each output, in the units of the data.

    Inputs and targets are standardized inside. This process stores its n training points, that of the subclass inducing
    points; both are functions of x through k(x, basis).
    """

    x_mean: Tensor
    x_std: Tensor
    y_mean: Tensor
    y_std: Tensor
    x: Tensor  # (n, D)
    y: Tensor  # (k, n)

    def __init__(self, points: int, inputs: int, outputs: int, kernel: KernelName, ard: bool) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
            import gpytorch
        self.inputs, self.outputs, self.kernel_name, self.ard = inputs, outputs, kernel, ard
        batch = torch.Size([outputs])
        log = {"transform": torch.exp, "inv_transform": torch.log}  # multiplicative steps: an input may be irrelevant
        positive = gpytorch.constraints.Positive(**log)
        shape = {"ard_num_dims": inputs if ard else None, "batch_shape": batch, "lengthscale_constraint": positive}
        kernels = gpytorch.kernels
        base = kernels.RBFKernel(**shape) if kernel == "rbf" else kernels.MaternKernel(nu=2.5, **shape)
        self.kernel = kernels.ScaleKernel(base, batch_shape=batch, outputscale_constraint=positive)
        above = gpytorch.constraints.GreaterThan(_MIN_NOISE, **log)
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=batch, noise_constraint=above)
        self.double()
        base.lengthscale = math.sqrt(inputs)  # about the distance of two standardized inputs
        self.kernel.outputscale = 1.0
        self.likelihood.noise = _START_NOISES[0]
        for name, size in (("x", inputs), ("y", outputs)):
            self.register_buffer(f"{name}_mean", torch.zeros(size, dtype=torch.float64))
            self.register_buffer(f"{name}_std", torch.ones(size, dtype=torch.float64))
        self._cache: tuple[bytes, Tensor, Tensor] | None = None
        self.add_data_tensors(points)

    # -- units

    def set_units(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Take mean and standard deviation from these data, (n, D) and (n, k), and return them standardized."""
        for values, mean, std in ((x, self.x_mean, self.x_std), (y, self.y_mean, self.y_std)):
            mean.copy_(values.mean(0))
            spread = values.std(0, correction=0)
            rounding = 1e-12 * values.abs().amax(0)  # of constant columns
            std.copy_(spread.where(spread > rounding, 1.0))
        return self.standardize(x), (y - self.y_mean) / self.y_std

    def standardize(self, x: Any) -> Tensor:
        """Inputs as the kernel takes them: (N, D)."""
        rows = _flatten_inputs(x)
        if rows.shape[1] != self.inputs:
            raise ArgumentError("x", tuple(rows.shape), f"{self.inputs} numbers per row, as in training")
        return (rows - self.x_mean) / self.x_std

    def in_units(self, f: Tensor) -> Tensor:
        """(…, k, N) in standard units as (…, N, k) in those of the targets."""
        return f.mT * self.y_std + self.y_mean

    def check_precision(self, dtype: torch.dtype) -> None:
        """Raise if the spread of the targets is lost when they are rounded to this precision."""
        lost = self.y_mean.abs() * (torch.finfo(dtype).eps / 2) > _MAX_ROUNDING * self.y_std
        if bool(lost.any()):
            mean, std = (float(values[lost][0]) for values in (self.y_mean, self.y_std))
            raise ArgumentError("x", dtype, f"double precision for targets {mean:g} ± {std:g}", hint="use x.double()")

    @property
    def noise(self) -> Tensor:
        """σ² in standard units: (k, 1)."""
        return cast(Tensor, self.likelihood.noise)

    @property
    def scale(self) -> Tensor:
        """k(x, x), the same at every x: (k, 1)."""
        return cast(Tensor, self.kernel.outputscale[:, None])

    def covariance(self, x: Tensor, other: Tensor) -> Tensor:
        """k(x, x'): (k, N, M)."""
        return cast(Tensor, self.kernel.forward(x, other))  # a call would change gpytorch's settings for all threads

    # -- the data, standardized: x (n, D) and y (n, k)

    def add_data_tensors(self, points: int) -> None:
        """Register the tensors that hold the data."""
        self.register_buffer("x", torch.zeros(points, self.inputs, dtype=torch.float64))
        self.register_buffer("y", torch.zeros(self.outputs, points, dtype=torch.float64))

    def place(self, x: Tensor, seed: int) -> None:
        """Choose the initial inducing points, if there are any."""

    @property
    def basis(self) -> Tensor:
        """The points through which the data enter: (M, D), or (k, M, D)."""
        return self.x

    def absorb(self, x: Tensor, y: Tensor) -> None:
        """Store what the posterior needs of the data."""
        self.x.copy_(x)
        self.y.copy_(y.T)

    def marginal(self, x: Tensor) -> Any:
        """The distribution p(y) at these inputs."""
        return MultivariateNormal(x.new_zeros(len(x)), scale_tril=self._factor(x), validate_args=False)

    def _factor(self, x: Tensor) -> Tensor:
        """L with LLᵀ = K + σ²I: (k, n, n)."""
        noise = self.noise[..., None] * torch.eye(len(x)).to(x)
        return _cholesky(self.covariance(x, x) + noise)

    def _solve(self) -> tuple[Tensor, Tensor]:
        """L and (K + σ²I)⁻¹y, cached until a parameter or the data change."""
        key = fingerprint_tensors([*self.parameters(), *self.buffers()])
        if self._cache is None or self._cache[0] != key:
            with torch.inference_mode(False), torch.no_grad():  # usable with gradients later
                factor = self._factor(self.x)
                self._cache = key, factor, torch.cholesky_solve(self.y[..., None], factor)
        return self._cache[1:]

    def posterior(self, x: Tensor) -> Tensor:
        """Mean and variance of f(x) given the data, in standard units: (2, k, N)."""
        factor, weights = self._solve()
        cross = self.covariance(x, self.x)  # (k, N, n)
        white = _solve_lower(factor, cross.mT)  # (k, n, N)
        return torch.stack([(cross @ weights)[..., 0], self.scale - white.square().sum(1)])

    def correction(self, prior: Callable[[Tensor], Tensor], *name: int | str) -> Tensor:
        """v such that prior(x) + k(x, basis) v is a path of the posterior: (k, M)."""
        factor, _ = self._solve()
        drawn = draw_normal(derive_keys(torch.arange(1), *name, "noise"), self.y.numel()).view_as(self.y)
        noise = self.noise.sqrt() * drawn.to(self.y)
        residual = self.y - _map_chunks(prior, self.x, self.outputs * _NUM_FREQUENCIES) - noise  # (k, n)
        return torch.cholesky_solve(residual[..., None], factor)[..., 0]

    # -- training

    def objectives(self, x: Tensor, y: Tensor) -> Tensor:
        """−log p(y) / n of each output: (k,)."""
        return cast(Tensor, -self.marginal(x).log_prob(y.T) / len(x))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The objective of the training, a sum over outputs."""
        return self.objectives(x, y).sum()

    @torch.no_grad()
    def choose_start(self, x: Tensor, y: Tensor) -> None:
        """Set the initial length-scale to that of the greatest likelihood.

        From a long one the training may end where all is noise, though a short one would fit the data. At its best
        noise, a shorter one must win by 0.1 + 3/n per point: noise can be fitted, too.
        """
        base = self.kernel.base_kernel
        first: Tensor = base.lengthscale.clone()
        chosen, best = first.clone(), x.new_full((self.outputs,), math.inf)
        for length in _START_LENGTHS:
            base.lengthscale = first * length
            tried = []
            for noise in _START_NOISES:
                self.likelihood.noise = noise
                tried.append(self.objectives(x, y))
            value = torch.stack(tried).amin(0)  # (k,)
            better = value < best - (0.1 + 3 / len(x))
            chosen[better] = base.lengthscale[better]
            best = value.where(better, best)
        base.lengthscale = chosen
        self.likelihood.noise = _START_NOISES[0]

    # -- prediction

    def prior_path(self, *name: int | str) -> Callable[[Tensor], Tensor]:
        """g, one function drawn from the prior under this name: (N, D) or (k, N, D) → (k, N)."""
        count = self.outputs * _NUM_FREQUENCIES
        device = self.x_mean.device
        keys = derive_keys(torch.arange(1), *name, "prior")
        drawn = draw_normal(keys, count * (self.inputs + 2)).to(device)[0]
        omega = drawn[: count * self.inputs].view(self.outputs, self.inputs, _NUM_FREQUENCIES)
        if self.kernel_name == "matern52":  # its spectral density is Student's t with 2ν = 5 degrees of freedom
            chi2 = 2.0 * draw_gamma(derive_keys(torch.arange(1), *name, "t"), count, 2.5).to(device)
            omega = omega * (5.0 / chi2.view(self.outputs, 1, _NUM_FREQUENCIES)).sqrt()
        lengthscale: Tensor = self.kernel.base_kernel.lengthscale  # (k, 1, D)
        omega = omega / lengthscale.mT  # (k, D, F)
        a, c = drawn[count * self.inputs :].view(2, self.outputs, _NUM_FREQUENCIES, 1)
        height = (self.scale / _NUM_FREQUENCIES).sqrt()

        def path(x: Tensor) -> Tensor:
            angle = x @ omega  # (k, N, F)
            return cast(Tensor, height * (angle.cos() @ a + angle.sin() @ c)[..., 0])

        return path

    def paths(self, x: Tensor, start: int, stop: int, seed: int) -> Tensor:
        """Replicates start … stop − 1 of this seed at x, in standard units: (stop − start, k, N)."""
        priors, weights = [], []
        for b in range(start, stop):
            prior = self.prior_path(seed, "replicate", b)
            with torch.no_grad():
                weights.append(self.correction(prior, seed, "replicate", b))
            priors.append(_map_chunks(prior, x, self.outputs * _NUM_FREQUENCIES))
        v, basis = torch.stack(weights, -1), self.basis  # (k, M, B)
        width = self.outputs * basis.shape[-2]
        moved = _map_chunks(lambda part: (self.covariance(part, basis) @ v).movedim(-1, 0), x, width)  # (B, k, N)
        return torch.stack(priors) + moved

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of f(x) given the data, in standard units: (k, N) each."""
        mean, variance = _map_chunks(self.posterior, x, self.outputs * self.basis.shape[-2])
        return mean, variance.clamp_min(0.0).sqrt()


class _SparseProcess(_Process):
    """A Gaussian process that knows its data through m inducing points Z, for each output its own.

    In white coordinates v = L⁻¹u with LLᵀ = K_mm: v ~ N(0, I) before the data and N(B⁻¹c, B⁻¹) after them, where
    B = I + AΛ⁻¹Aᵀ, c = AΛ⁻¹y and A = L⁻¹K_mn. For a sample u is drawn from its posterior, and a path of the prior is
    corrected to pass through it: f_b(x) = g_b(x) + k_m(x)ᵀK_mm⁻¹(u_b − g_b(Z)).
    """

    gram: Tensor  # AΛ⁻¹Aᵀ: (k, m, m)
    moment: Tensor  # AΛ⁻¹y: (k, m, 1)

    def add_data_tensors(self, points: int) -> None:
        self.Z = nn.Parameter(torch.zeros(self.outputs, points, self.inputs, dtype=torch.float64))
        self.register_buffer("gram", torch.zeros(self.outputs, points, points, dtype=torch.float64))
        self.register_buffer("moment", torch.zeros(self.outputs, points, 1, dtype=torch.float64))

    @property
    def basis(self) -> Tensor:
        return self.Z

    def place(self, x: Tensor, seed: int) -> None:
        """Start the inducing points at a random subset of the inputs; if it is all of them, they are not trained."""
        chosen = derive_keys(torch.arange(len(x)), seed, "inducing").argsort()[: self.Z.shape[1]]
        self.Z.data.copy_(x[chosen])
        self.Z.requires_grad_(len(chosen) < len(x))

    def _root(self) -> Tensor:
        """L with LLᵀ = K_mm: (k, m, m)."""
        jitter = _JITTER * self.scale.expand(self.Z.shape[:2])
        return _cholesky(self.covariance(self.Z, self.Z) + torch.diag_embed(jitter))

    def _white(self, x: Tensor, root: Tensor) -> Tensor:
        """L⁻¹k_m(x): (k, m, N)."""
        return _solve_lower(root, self.covariance(x, self.Z).mT)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A and the diagonal of Λ at the training inputs: (k, m, n), (k, n)."""
        A = self._white(x, self._root())
        rest = (self.scale - A.square().sum(1)).clamp_min(0.0)  # rounding may make it negative at an inducing point
        return A, rest + self.noise

    def marginal(self, x: Tensor) -> Any:
        A, lam = self._project(x)
        return LowRankMultivariateNormal(x.new_zeros(len(x)), A.mT, lam, validate_args=False)

    @torch.no_grad()
    def absorb(self, x: Tensor, y: Tensor) -> None:
        A, lam = self._project(x)
        scaled = A / lam[:, None]  # AΛ⁻¹
        self.gram.copy_(scaled @ A.mT)
        self.moment.copy_(scaled @ y.T[..., None])

    def _posterior_root(self) -> Tensor:
        """The Cholesky factor of B: (k, m, m)."""
        return _cholesky(torch.eye(self.gram.shape[-1]).to(self.gram) + self.gram)

    def posterior(self, x: Tensor) -> Tensor:
        factor = self._posterior_root()
        A = self._white(x, self._root())  # (k, m, N)
        mean = (A.mT @ torch.cholesky_solve(self.moment, factor))[..., 0]
        left = _solve_lower(factor, A)
        return torch.stack([mean, self.scale - A.square().sum(1) + left.square().sum(1)])

    def correction(self, prior: Callable[[Tensor], Tensor], *name: int | str) -> Tensor:
        root, factor = self._root(), self._posterior_root()
        drawn = draw_normal(derive_keys(torch.arange(1), *name, "inducing"), self.moment.numel()).view_as(self.moment)
        noise = torch.linalg.solve_triangular(factor.mT, drawn.to(factor), upper=True)  # covariance B⁻¹
        v = torch.cholesky_solve(self.moment, factor) + noise
        v = v - _solve_lower(root, prior(self.Z)[..., None])
        return cast(Tensor, torch.linalg.solve_triangular(root.mT, v, upper=True)[..., 0])  # L⁻ᵀ(v − L⁻¹g(Z))


# -- the methods ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GaussianProcessPredictor(Predictor):
    """Posterior mean and standard deviation of the function in closed form, and sampled functions.

    Attributes:
        process: The fitted process.
    """

    process: _Process

    @property
    def net(self) -> None:
        return None

    @property
    def module(self) -> nn.Module:
        return self.process

    @property
    def noise_std(self) -> Tensor:
        """σ of the noise around the function, for `prediction_interval`: (C,)."""
        process = self.process
        return (process.noise[:, 0].sqrt() * process.y_std).float().detach()

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        process = self.process
        double = any(part.dtype == torch.float64 for part in _input_tensors(x))
        dtype = torch.float64 if double else torch.float32
        process.check_precision(dtype)
        rows = process.standardize(cast_inputs(process, x))
        mean, std = process.moments(rows)

        def chunks(size: int) -> Iterator[Tensor]:
            for start in range(0, num_samples, size):
                yield process.in_units(process.paths(rows, start, min(start + size, num_samples), seed)).to(dtype)

        moments = Moments(process.in_units(mean).to(dtype), (std.T * process.y_std).to(dtype))
        weights = mean.element_size() * process.outputs * process.basis.shape[-2]  # v of a path
        return SampleStream(num_samples, num_bytes(mean) + weights, chunks, moments)

    def config(self) -> dict[str, Any]:
        process = self.process
        return {
            "method": "sparse-gp" if isinstance(process, _SparseProcess) else "gp",
            "points": process.basis.shape[-2],
            "inputs": process.inputs,
            "outputs": process.outputs,
            "kernel": process.kernel_name,
            "ard": process.ard,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "GaussianProcessPredictor":
        check_types(
            "predictor",
            config,
            {"points": Count, "inputs": Count, "outputs": Count, "kernel": Literal["rbf", "matern52"], "ard": bool},
        )
        options = {name: config[name] for name in ("points", "inputs", "outputs", "kernel", "ard")}
        make = _SparseProcess if config["method"] == "sparse-gp" else _Process
        with torch.inference_mode(False):  # tensors that gradients may pass, wherever it is loaded
            return cls(make(**options).eval())


@register(
    "gp",
    predictor=GaussianProcessPredictor,
    summary="exact Gaussian process regression, for n up to 5,000",
    tasks=("regression",),
    needs_net=False,
    train_cost="O(n³)",
    predict_cost="O(n²)",
    reference="Rasmussen and Williams, MIT Press 2006; samples: Wilson et al., ICML 2020",
)
@dataclass(frozen=True)
class GaussianProcess(BaseMethod[GaussianProcessPredictor]):
    """Exact Gaussian process regression, for at most 5,000 training rows.

    Inputs are flattened; several outputs are independent processes. Of the training options only seed, folder, reports
    and device are used. The `model` of `fit` is not used and may be None.

    Args:
        loss: The squared error, the only loss that fits Gaussian noise.
        kernel: "rbf" (squared exponential) or "matern52".
        ard: Whether each input has its own length-scale.
        steps: Steps of Adam, each of which costs O(n³).
        learning_rate: Step size of Adam.

    Example:
        >>> x = torch.linspace(-3, 3, 40)[:, None]
        >>> predictor = GaussianProcess(steps=50).fit(None, (x, x.sin()), TrainingConfig(progress=False))
        >>> prediction = predictor.predict(x[:5], 20)
        >>> prediction.samples.shape, bool((prediction.mean - x[:5].sin()).abs().max() < 0.1)
        (torch.Size([20, 5, 1]), True)
    """

    loss: Loss = field(default_factory=nn.MSELoss)
    kernel: KernelName = "rbf"
    ard: bool = True
    steps: int = 200
    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.loss, nn.MSELoss):
            raise ArgumentError("loss", self.loss, "nn.MSELoss(): a Gaussian process is for regression")
        check_choice("kernel", self.kernel, get_args(KernelName))
        check_int("steps", self.steps, minimum=1)
        check_positive("learning_rate", self.learning_rate)

    def _make_process(self, n: int, inputs: int, outputs: int) -> _Process:
        if n > MAX_POINTS:
            expected = f"at most {MAX_POINTS} rows, since an exact Gaussian process costs n³"
            raise ArgumentError("data", f"{n} rows", expected, hint="use SparseGP, or fewer rows")
        return _Process(n, inputs, outputs, self.kernel, self.ard)

    def _fit(self, inputs: FitInputs) -> GaussianProcessPredictor:
        """Maximize the likelihood by Adam on all points at once."""
        x, y = _read_data(inputs)  # (n, D), (n, k)
        process = self._make_process(len(x), x.shape[1], y.shape[1])
        x, y = process.set_units(x, y)
        process.place(x, inputs.config.seed)
        process.choose_start(x, y)

        def on_device() -> tuple[Tensor, Tensor]:
            return x.to(process.x_mean), y.to(process.x_mean)

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            return cast(Tensor, model(*on_device()))  # the rows of the batch, in a fixed order

        def validate(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            process.absorb(*on_device())
            mean, _ = process.moments(process.standardize(batch.x))
            return validation_metrics(self.loss, process.in_units(mean), batch.y)

        names = ("seed", "folder", "on_epoch", "progress", "accelerator")
        options: dict[str, Any] = {name: getattr(inputs.config, name) for name in names}
        if torch.backends.mps.is_available():
            options["accelerator"] = "cpu"  # MPS has no double precision
        adam = partial(torch.optim.Adam, lr=self.learning_rate)
        config = TrainingConfig(self.steps, len(x), optimizer=adam, lr_scheduler=constant_schedule, **options)
        inputs = replace(inputs, data=TensorDataset(x, y), config=config)
        self._train(process, inputs, lambda epoch: objective, validate)
        process.absorb(*on_device())
        return GaussianProcessPredictor(process.eval())


@register(
    "sparse-gp",
    predictor=GaussianProcessPredictor,
    summary="Gaussian process regression through m learned points (FITC)",
    tasks=("regression",),
    needs_net=False,
    train_cost="O(nm²)",
    predict_cost="O(m²)",
    reference="Snelson and Ghahramani, NeurIPS 18, 2006",
)
@dataclass(frozen=True)
class SparseGP(GaussianProcess):
    """Sparse Gaussian process regression with inducing points (FITC).

    The inducing points start as a random subset of the training inputs and are learned together with the kernel; if
    they are all n inputs, they stay there. With fewer, `noise_std` tends to be too small.

    Args:
        loss: The squared error, the only loss that fits Gaussian noise.
        kernel: "rbf" (squared exponential) or "matern52".
        ard: Whether each input has its own length-scale.
        steps: Steps of Adam, each of which costs O(nm²).
        learning_rate: Step size of Adam.
        num_inducing: Number m of inducing points, at most n.

    Example:
        >>> x = torch.linspace(-3, 3, 200)[:, None]
        >>> method = SparseGP(num_inducing=10, steps=50)
        >>> predictor = method.fit(None, (x, x.sin()), TrainingConfig(progress=False))
        >>> prediction = predictor.predict(x[:5], 20)
        >>> prediction.samples.shape, bool((prediction.mean - x[:5].sin()).abs().max() < 0.1)
        (torch.Size([20, 5, 1]), True)
    """

    learning_rate: float = 0.05
    num_inducing: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("num_inducing", self.num_inducing, minimum=1)

    def _make_process(self, n: int, inputs: int, outputs: int) -> _Process:
        m = min(self.num_inducing, n)
        needed = 8 * outputs * m * (8 * m + 4 * n)  # K_mm, K_mn and their factors
        check_memory("num_inducing", self.num_inducing, needed, hint="use fewer inducing points, or fewer rows")
        return _SparseProcess(m, inputs, outputs, self.kernel, self.ard)
