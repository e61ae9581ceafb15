"""Exact Gaussian process regression: no net, but a kernel whose parameters maximise the marginal likelihood.

    f ~ GP(0, k),  y = f(X) + ε,  ε ~ N(0, σ²I);   log p(y) = log N(y | 0, K + σ²I)
    f | y:  mean k(x, X)(K + σ²I)⁻¹y,   variance k(x, x) − k(x, X)(K + σ²I)⁻¹k(X, x)

A sample of the posterior is one function of x, by Matheron's rule (Wilson et al. 2020): a path g of the prior that is
corrected where the data say otherwise,

    f_b(x) = g_b(x) + k(x, X)(K + σ²I)⁻¹(y − g_b(X) − ε_b),   g_b(x) = Σ_j a_j cos(ω_jᵀx) + c_j sin(ω_jᵀx)

so no covariance of the N test inputs is ever built. The frequencies ω_j follow the kernel's spectral density (Rahimi
and Recht 2007) and are drawn anew for each replicate: mean and covariance over the replicates are then those of the
exact posterior, whatever the number of frequencies; many of them make a single path more nearly Gaussian.

Rasmussen and Williams, Gaussian Processes for Machine Learning, MIT Press, 2006. Wilson, Borovitskiy, Terenin,
Mostowsky and Deisenroth, Efficiently sampling functions from Gaussian process posteriors, ICML 2020. Rahimi and Recht,
Random features for large-scale kernel machines, NeurIPS 2007. The kernels are gpytorch's (Gardner et al., 2018).

Sparse Gaussian process regression by pseudo-inputs (FITC): m learned points stand for n.

    y ~ N(0, Q + Λ),   Q = K_nm K_mm⁻¹ K_mn,   Λ = diag(K − Q) + σ²I
    f | y:  mean k_m(x)ᵀΣ⁻¹K_mnΛ⁻¹y,   variance k(x, x) − k_m(x)ᵀ(K_mm⁻¹ − Σ⁻¹)k_m(x),   Σ = K_mm + K_mnΛ⁻¹K_nm

Kernel, noise and the m inputs maximise that likelihood in O(nm²) time and O(nm) memory. This is the approximation of
Snelson and Ghahramani, in which training points keep their exact variances (Λ); gpytorch's InducingPointKernel trains
another one, the variational bound of Titsias (2009), so here only gpytorch's kernels are used. What prediction needs of
the data are m + m² numbers for each output: the points themselves are not kept. With m = n points at the inputs it is
the exact process, so there they stay. With fewer, Λ can pass for noise: FITC's own estimate of σ tends to be too small
(Bauer, van der Wilk and Rasmussen 2016), and `noise_std` with it.

A sample is one function of x: u, the values at the m points, is drawn from its posterior, and a path of the prior is
corrected to go through it, f_b(x) = g_b(x) + k_m(x)ᵀK_mm⁻¹(u_b − g_b(Z)).

Snelson and Ghahramani, Sparse Gaussian processes using pseudo-inputs, NeurIPS 18, 2006. The samples: Wilson,
Borovitskiy, Terenin, Mostowsky and Deisenroth, Efficiently sampling functions from Gaussian process posteriors, ICML
2020. The noise: Bauer, van der Wilk and Rasmussen, Understanding probabilistic sparse Gaussian process approximations,
NeurIPS 29, 2016.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from neuboots._prng import derive_keys, draw_gamma, draw_normal
from neuboots._streaming import num_bytes
from neuboots.head import cast_inputs
from neuboots.loading import Batch, EpochLoader, dataset_length, preserve_rng_state
from neuboots.losses import Loss
from neuboots.methods._base import register, validation_metrics
from neuboots.prediction import Moments, Predictor, SampleStream, check_inputs
from neuboots.training import TrainingConfig, constant_schedule, describe_method, train

KernelName = Literal["rbf", "matern52"]

MAX_POINTS = 5_000  # K has n² numbers, and its Cholesky factor costs n³/3
_FREQUENCIES = 512  # of one path of the prior
_PIECE = 1 << 22  # numbers held at once by a product over many inputs
_LEAST_NOISE = 1e-6  # σ² of standardised targets: keeps K + σ²I away from singular
_LENGTHS = (1.0, 1 / 4, 1 / 16)  # starts of the length-scale, in units of the usual distance of two inputs
_NOISES = (0.1, 1.0)  # σ² of standardised targets at which starts are compared; the ascent begins at the first
_ROUNDING = 0.01  # of the targets' spread: what single precision may lose


# -- data ----------------------------------------------------------------------------------------------


def flatten_inputs(x: Any) -> Tensor:
    """All inputs of a row side by side, in double precision: (N, D)."""
    if isinstance(x, Mapping):
        x = [x[key] for key in sorted(x)]
    parts = x if isinstance(x, tuple | list) else [x]
    return torch.cat([part.reshape(len(part), math.prod(part.shape[1:])).double() for part in parts], 1)


def output_dtype(x: Any) -> torch.dtype:
    """Double precision where an input has it, else single."""
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else [x]
    return torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32


def read_training_data(data: Dataset[Any], config: TrainingConfig, *, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Every row of the data set, or `steps_per_epoch` batches of a stream: inputs (n, D) and targets (n, k)."""
    _check_count(dataset_length(data), most)
    loader = EpochLoader(
        data,
        batch_size=config.batch_size,
        seed=config.seed,
        shuffle=False,
        num_workers=config.num_workers,
        steps_per_epoch=config.steps_per_epoch,
    )
    with preserve_rng_state():
        batches = [batch for _, batch, _ in loader.epoch(0)]
    for batch in batches:
        check_inputs(batch.x)
    x, y = torch.cat([flatten_inputs(batch.x) for batch in batches]), torch.cat([batch.y for batch in batches])
    _check_count(len(x), most)
    if len(x) < 2:
        raise ValueError("got a single row; expected at least 2, since one target has no spread to learn from")
    if x.shape[1] == 0:
        raise ValueError("got inputs without a number in them (0 columns); expected at least one column")
    if not y.is_floating_point():
        raise ValueError(
            f"got targets of type {y.dtype}; a Gaussian process is for regression: expected floating-point numbers, "
            "as y.float() makes them"
        )
    if y.ndim not in (1, 2):
        raise ValueError(f"got targets of shape {tuple(y.shape)}; expected (n,), or (n, k) for k outputs")
    if not bool(torch.isfinite(y).all()):
        raise ValueError("got NaN or infinite targets; expected finite numbers: drop those rows")
    return x, y.reshape(len(y), -1).double()


def _check_count(n: int | None, most: int | None) -> None:
    if n is not None and most is not None and n > most:
        raise ValueError(
            f"got n = {n} points; expected at most {most}, since an exact Gaussian process costs n³: take SparseGP "
            "('sparse-gp'), or fewer points"
        )


def check_squared_error(loss: Loss) -> None:
    """The likelihood is Gaussian, so that the squared error is the only loss it can honour."""
    if not isinstance(loss, nn.MSELoss):
        raise ValueError(
            f"got loss={loss!r}; a Gaussian process is for regression under Gaussian noise: expected nn.MSELoss()"
        )


def check_kernel(kernel: str) -> None:
    if kernel not in get_args(KernelName):
        raise ValueError(f"got kernel={kernel!r}; expected 'rbf' or 'matern52'")


def check_ascent(steps: int, learning_rate: float) -> None:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"got steps={steps!r}; expected a whole number ≥ 1")
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"got learning_rate={learning_rate!r}; expected a positive number")


def adam_config(config: TrainingConfig, n: int, steps: int, learning_rate: float) -> TrainingConfig:
    """Adam on all n points at once. Of the recipe stay its seed, its folder, its reports and its device.

    The process is in double precision by itself; the recipe's "32-true" converts nothing.
    """
    mps = torch.backends.mps.is_available()  # it has no double precision
    return TrainingConfig(
        epochs=steps,
        batch_size=n,
        optimizer=partial(torch.optim.Adam, lr=learning_rate),
        lr_scheduler=constant_schedule,
        seed=config.seed,
        folder=config.folder,
        on_epoch=config.on_epoch,
        progress=config.progress,
        accelerator="cpu" if mps else config.accelerator,
    )


# -- the process ---------------------------------------------------------------------------------------


def cholesky(covariance: Tensor) -> Tensor:
    """L with LLᵀ = covariance; where rounding made it indefinite, a little is added to its diagonal."""
    diagonal = covariance.detach().diagonal(dim1=-2, dim2=-1)
    size = diagonal.mean(-1, keepdim=True).expand_as(diagonal)
    for little in (0.0, 1e-10, 1e-8, 1e-6, 1e-4):
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(covariance + torch.diag_embed(little * size) if little else covariance)
        if not bool(info.any()):
            return factor
    raise ValueError(
        "the covariance of the points is not positive definite; expected a kernel that fits them: lower learning_rate, "
        "or drop points that repeat others"
    )


def solve_lower(root: Tensor, values: Tensor) -> Tensor:
    """L⁻¹ values, for a lower triangular L."""
    white: Tensor = torch.linalg.solve_triangular(root, values, upper=False)
    return white


def map_chunks(function: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
    """function(x), (…, N), over some rows of x at a time: each takes `width` numbers."""
    return torch.cat([function(part) for part in torch.split(x, max(1, _PIECE // width))], -1)


def _import_gpytorch() -> Any:
    """gpytorch, which scripts functions as it is imported: torch's complaint about that is not for our callers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        import gpytorch
    return gpytorch


class Process(nn.Module, ABC):
    """k independent Gaussian processes of D inputs, one for each output, in the units of the data.

    Inputs and targets are standardised inside. `posterior` and `correction` are what an exact and a sparse process do
    in different ways; both are functions of x through k(x, basis).
    """

    x_mean: Tensor
    x_std: Tensor
    y_mean: Tensor
    y_std: Tensor

    def __init__(self, inputs: int, outputs: int, kernel: KernelName, ard: bool) -> None:
        super().__init__()
        gpytorch = _import_gpytorch()
        self.inputs, self.outputs, self.kind, self.ard = inputs, outputs, kernel, ard
        batch = torch.Size([outputs])
        logs = {"transform": torch.exp, "inv_transform": torch.log}  # steps by factors: an input may matter not at all
        positive = gpytorch.constraints.Positive(**logs)
        shape = {"ard_num_dims": inputs if ard else None, "batch_shape": batch, "lengthscale_constraint": positive}
        kernels = gpytorch.kernels
        base = kernels.RBFKernel(**shape) if kernel == "rbf" else kernels.MaternKernel(nu=2.5, **shape)
        self.kernel = kernels.ScaleKernel(base, batch_shape=batch, outputscale_constraint=positive)
        noisy = gpytorch.constraints.GreaterThan(_LEAST_NOISE, **logs)
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=batch, noise_constraint=noisy)
        self.double()
        base.lengthscale = math.sqrt(inputs)  # about the distance of two standardised inputs
        self.kernel.outputscale = 1.0
        self.likelihood.noise = _NOISES[0]
        for name, size in (("x", inputs), ("y", outputs)):
            self.register_buffer(f"{name}_mean", torch.zeros(size, dtype=torch.float64))
            self.register_buffer(f"{name}_std", torch.ones(size, dtype=torch.float64))

    # -- units

    def set_units(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Take the units of these data, (n, D) and (n, k); gives the data in standard units."""
        for values, mean, std in ((x, self.x_mean, self.x_std), (y, self.y_mean, self.y_std)):
            mean.copy_(values.mean(0))
            spread = values.std(0, correction=0)
            least = 1e-12 * values.abs().amax(0)  # what rounding makes of numbers that are all the same
            std.copy_(spread.where(spread > least, 1.0))
        return self.standardised(x), (y - self.y_mean) / self.y_std

    def standardised(self, x: Any) -> Tensor:
        """Any inputs as the kernel sees them: (N, D)."""
        rows = flatten_inputs(x)
        if rows.shape[1] != self.inputs:
            raise ValueError(f"got {rows.shape[1]} numbers for each input; expected {self.inputs}, as in training")
        return (rows - self.x_mean) / self.x_std

    def in_units(self, f: Tensor) -> Tensor:
        """(…, k, N) in standard units as (…, N, k) in those of the targets."""
        return f.mT * self.y_std + self.y_mean

    def check_precision(self, dtype: torch.dtype) -> None:
        """Targets whose spread is lost when they are rounded to this precision are not to be predicted in it."""
        lost = self.y_mean.abs() * (torch.finfo(dtype).eps / 2) > _ROUNDING * self.y_std
        if bool(lost.any()):
            mean, std = (float(values[lost][0]) for values in (self.y_mean, self.y_std))
            raise ValueError(
                f"got inputs in single precision for targets around {mean:g} that spread by {std:g}, which it would "
                "round away; expected double precision: give x.double(), or fit with the targets' mean subtracted"
            )

    @property
    def noise(self) -> Tensor:
        """σ² in standard units: (k, 1)."""
        noise: Tensor = self.likelihood.noise
        return noise

    @property
    def scale(self) -> Tensor:
        """k(x, x), the same at every x: (k, 1)."""
        scale: Tensor = self.kernel.outputscale[:, None]
        return scale

    @torch.no_grad()
    def choose_start(self, objectives: Callable[[], Tensor], n: int) -> None:
        """Begin at the length-scale of the greatest likelihood. `objectives()` is −log p(y) / n of each output: (k,).

        From a long one the ascent may end where all is noise, though a short one would follow the data. At its best
        noise, a shorter one must win by a tenth for each point and three besides: noise, too, can be followed.
        """
        base = self.kernel.base_kernel
        first: Tensor = base.lengthscale.clone()
        chosen, best = first.clone(), None
        for length in _LENGTHS:
            base.lengthscale = first * length
            tried = []
            for noise in _NOISES:
                self.likelihood.noise = noise
                tried.append(objectives())
            value = torch.stack(tried).amin(0)  # (k,)
            better = torch.ones_like(value).bool() if best is None else value < best - (0.1 + 3 / n)
            chosen[better] = base.lengthscale[better]
            best = value if best is None else value.where(better, best)
        base.lengthscale = chosen
        self.likelihood.noise = _NOISES[0]

    def covariance(self, x: Tensor, other: Tensor) -> Tensor:
        """k(x, x'): (k, N, M)."""
        dense: Tensor = self.kernel(x, other).to_dense()
        return dense

    # -- what an exact and a sparse process do in different ways

    @property
    @abstractmethod
    def basis(self) -> Tensor:
        """The points through which the data speak: (M, D), or (k, M, D)."""

    @abstractmethod
    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f(x) given the data, in standard units: (k, N) each."""

    @abstractmethod
    def correction(self, prior: Callable[[Tensor], Tensor], *name: int | str) -> Tensor:
        """v such that prior(x) + k(x, basis) v is a path of the posterior: (k, M)."""

    # -- samples

    def prior_path(self, *name: int | str) -> Callable[[Tensor], Tensor]:
        """g, one function drawn from the prior under this name: (N, D) or (k, N, D) → (k, N)."""
        count = self.outputs * _FREQUENCIES
        where = self.x_mean.device
        keys = derive_keys(torch.arange(1), *name, "prior")
        drawn = draw_normal(keys, count * (self.inputs + 2)).to(where)[0]
        omega = drawn[: count * self.inputs].view(self.outputs, self.inputs, _FREQUENCIES)
        if self.kind == "matern52":  # its spectral density is Student's t with 2ν = 5 degrees of freedom
            chi2 = 2.0 * draw_gamma(derive_keys(torch.arange(1), *name, "t"), count, 2.5).to(where)
            omega = omega * (5.0 / chi2.view(self.outputs, 1, _FREQUENCIES)).sqrt()
        lengthscale: Tensor = self.kernel.base_kernel.lengthscale  # (k, 1, D)
        omega = omega / lengthscale.mT  # (k, D, F)
        a, c = drawn[count * self.inputs :].view(2, self.outputs, _FREQUENCIES, 1)
        height = (self.scale / _FREQUENCIES).sqrt()

        def path(x: Tensor) -> Tensor:
            angle = x @ omega  # (k, N, F)
            heights: Tensor = height * (angle.cos() @ a + angle.sin() @ c)[..., 0]
            return heights

        return path

    def paths(self, x: Tensor, start: int, stop: int, seed: int) -> Tensor:
        """Replicates start … stop−1 of this seed at x, in standard units: (stop − start, k, N)."""
        priors, weights = [], []
        for b in range(start, stop):
            prior = self.prior_path(seed, "replicate", b)
            with torch.no_grad():
                weights.append(self.correction(prior, seed, "replicate", b))
            priors.append(map_chunks(prior, x, self.outputs * _FREQUENCIES))
        v = torch.stack(weights, -1)  # (k, M, B)
        basis = self.basis

        def corrections(part: Tensor) -> Tensor:
            return (self.covariance(part, basis) @ v).movedim(-1, 0)  # (B, k, N)

        return torch.stack(priors) + map_chunks(corrections, x, self.outputs * basis.shape[-2])

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of f(x) given the data, in standard units: (k, N) each."""

        def both(part: Tensor) -> Tensor:
            mean, variance = self.posterior(part)
            return torch.stack([mean, variance.clamp_min(0.0).sqrt()])

        mean, std = map_chunks(both, x, self.outputs * self.basis.shape[-2])
        return mean, std


class ExactProcess(Process):
    """A Gaussian process that keeps its n training points."""

    x: Tensor
    y: Tensor

    def __init__(self, points: int, inputs: int, outputs: int, kernel: KernelName, ard: bool) -> None:
        super().__init__(inputs, outputs, kernel, ard)
        self.register_buffer("x", torch.zeros(points, inputs, dtype=torch.float64))
        self.register_buffer("y", torch.zeros(outputs, points, dtype=torch.float64))
        self._solved: tuple[Any, Tensor, Tensor] | None = None

    def take(self, x: Tensor, y: Tensor) -> None:
        """Keep these training data, (n, D) and (n, k)."""
        standard_x, standard_y = self.set_units(x, y)
        self.x.copy_(standard_x)
        self.y.copy_(standard_y.T)

    def _factor(self) -> Tensor:
        """L with LLᵀ = K + σ²I: (k, n, n)."""
        noise = self.noise[..., None] * torch.eye(len(self.x)).to(self.x)
        return cholesky(self.covariance(self.x, self.x) + noise)

    def objectives(self) -> Tensor:
        """−log p(y) / n of each output: (k,)."""
        factor = self._factor()
        white = solve_lower(factor, self.y[..., None])
        logdet = 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return 0.5 * (white.square().sum((-2, -1)) + logdet) / len(self.x) + 0.5 * math.log(2.0 * math.pi)

    def forward(self) -> Tensor:
        """−log p(y) / n, summed over the outputs: what training minimises."""
        return self.objectives().sum()

    def _solve(self) -> tuple[Tensor, Tensor]:
        """L and (K + σ²I)⁻¹y, computed once for as long as nothing they depend on changes."""
        state = [*self.parameters(), *self.buffers()]
        if any(tensor.is_inference() for tensor in state):  # nobody counts their changes
            return self._solve_anew()
        made_of = [(tensor.data_ptr(), tensor._version) for tensor in state]
        if self._solved is None or self._solved[0] != made_of:
            self._solved = (made_of, *self._solve_anew())
        return self._solved[1:]

    def _solve_anew(self) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.no_grad():  # else it could be of no use to gradients later
            factor = self._factor()
            return factor, torch.cholesky_solve(self.y[..., None], factor)

    @property
    def basis(self) -> Tensor:
        return self.x

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        factor, weights = self._solve()
        cross = self.covariance(x, self.x)  # (k, N, n)
        white = solve_lower(factor, cross.mT)  # (k, n, N)
        return (cross @ weights)[..., 0], self.scale - white.square().sum(1)

    def correction(self, prior: Callable[[Tensor], Tensor], *name: int | str) -> Tensor:
        factor, _ = self._solve()
        drawn = draw_normal(derive_keys(torch.arange(1), *name, "noise"), self.y.numel()).view_as(self.y)
        noise = self.noise.sqrt() * drawn.to(self.y)
        residual = self.y - map_chunks(prior, self.x, self.outputs * _FREQUENCIES) - noise  # (k, n)
        return torch.cholesky_solve(residual[..., None], factor)[..., 0]


# -- the method ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GaussianProcessPredictor(Predictor):
    """Exact posterior mean and standard deviation of the function, and sampled functions."""

    process: Process

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
        dtype = output_dtype(x)
        process.check_precision(dtype)
        rows = process.standardised(cast_inputs(process, x))
        mean, std = process.moments(rows)

        def chunks(size: int) -> Iterator[Tensor]:
            for start in range(0, num_samples, size):
                yield process.in_units(process.paths(rows, start, min(start + size, num_samples), seed)).to(dtype)

        moments = Moments(process.in_units(mean).to(dtype), (std.T * process.y_std).to(dtype))
        weights = mean.element_size() * process.outputs * process.basis.shape[-2]  # a path holds v beside its values
        return SampleStream(num_samples, num_bytes(mean) + weights, chunks, moments)

    def config(self) -> dict[str, Any]:
        process = self.process
        return {
            "method": "gp",
            "points": len(process.basis),
            "inputs": process.inputs,
            "outputs": process.outputs,
            "kernel": process.kind,
            "ard": process.ard,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "GaussianProcessPredictor":
        options = {name: config[name] for name in ("points", "inputs", "outputs", "kernel", "ard")}
        with torch.inference_mode(False):  # tensors whose changes are counted, wherever it is loaded
            return cls(ExactProcess(**options).eval())


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
class GaussianProcess:
    """Options of an exact Gaussian process, for at most 5,000 points: each of its `steps` steps of Adam costs n³.

    `kernel` is "rbf" (squared exponential) or "matern52"; with `ard` each input has its own length-scale. Inputs are
    flattened; of the recipe only seed, folder, reports and device count. Several outputs are independent processes.

    >>> x = torch.linspace(-3, 3, 40)[:, None]
    >>> predictor = GaussianProcess(steps=50).fit(None, TensorDataset(x, x.sin()), TrainingConfig(progress=False))
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
        check_squared_error(self.loss)
        check_kernel(self.kernel)
        check_ascent(self.steps, self.learning_rate)

    def fit(
        self,
        model: Callable[[], nn.Module] | None,
        data: Dataset[Any],
        config: TrainingConfig,
        *,
        val_data: Dataset[Any] | None = None,
    ) -> GaussianProcessPredictor:
        """Maximise the marginal likelihood on (x, y) rows. `model` is not called."""
        x, y = read_training_data(data, config, most=MAX_POINTS)
        process = ExactProcess(len(x), x.shape[1], y.shape[1], self.kernel, self.ard)
        process.take(x, y)
        process.choose_start(process.objectives, len(x))

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            value: Tensor = model()
            return value

        train(
            process,
            TensorDataset(x, y),
            lambda epoch: objective,
            adam_config(config, len(x), self.steps, self.learning_rate),
            val_data=val_data,
            validate=partial(validate_mean, process, self.loss),
            identity=describe_method(self),
        )
        return GaussianProcessPredictor(process.eval())


def validate_mean(process: Process, loss: Loss, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The loss of the posterior mean."""
    mean, _ = process.moments(process.standardised(batch.x))
    return validation_metrics(loss, process.in_units(mean), batch.y)


_JITTER = 1e-8  # of k(x, x): two inducing points may come to lie on one another


class SparseProcess(Process):
    """A Gaussian process that knows its data through m inducing points Z, for each output its own.

    In white coordinates v = L⁻¹u with LLᵀ = K_mm: v ~ N(0, I) before the data and N(B⁻¹c, B⁻¹) after them, where
    B = I + AΛ⁻¹Aᵀ, c = AΛ⁻¹y and A = L⁻¹K_mn.
    """

    gram: Tensor
    moment: Tensor

    def __init__(self, points: int, inputs: int, outputs: int, kernel: KernelName, ard: bool) -> None:
        super().__init__(inputs, outputs, kernel, ard)
        self.Z = nn.Parameter(torch.zeros(outputs, points, inputs, dtype=torch.float64))
        self.register_buffer("gram", torch.zeros(outputs, points, points, dtype=torch.float64))  # AΛ⁻¹Aᵀ
        self.register_buffer("moment", torch.zeros(outputs, points, 1, dtype=torch.float64))  # AΛ⁻¹y

    @property
    def basis(self) -> Tensor:
        return self.Z

    def _root(self) -> Tensor:
        """L with LLᵀ = K_mm: (k, m, m)."""
        little = _JITTER * self.scale.expand(self.Z.shape[:2])
        return cholesky(self.covariance(self.Z, self.Z) + torch.diag_embed(little))

    def _white(self, x: Tensor, root: Tensor) -> Tensor:
        """L⁻¹k_m(x): (k, m, N)."""
        return solve_lower(root, self.covariance(x, self.Z).mT)

    def _seen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A and the diagonal of Λ at the training inputs: (k, m, n), (k, n)."""
        A = self._white(x, self._root())
        rest = (self.scale - A.square().sum(1)).clamp_min(0.0)  # rounding may make it negative at an inducing point
        return A, rest + self.noise

    def objectives(self, x: Tensor, y: Tensor) -> Tensor:
        """−log N(y | 0, Q + Λ) / n of each output in standard units: (k,). x is (n, D) and y (n, k)."""
        A, lam = self._seen(x)
        scaled = A / lam.sqrt()[:, None]  # AΛ^{−1/2}
        white = y.T / lam.sqrt()  # Λ^{−1/2}y
        factor = cholesky(torch.eye(A.shape[1]).to(A) + scaled @ scaled.mT)
        fitted = solve_lower(factor, scaled @ white[..., None])
        logdet = 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + lam.log().sum(-1)
        quadratic = white.square().sum(-1) - fitted.square().sum((-2, -1))
        return 0.5 * (quadratic + logdet) / len(x) + 0.5 * math.log(2.0 * math.pi)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Their sum over the outputs: what training minimises."""
        return self.objectives(x, y).sum()

    @torch.no_grad()
    def absorb(self, x: Tensor, y: Tensor) -> None:
        """Keep of these data, in standard units, what the posterior needs."""
        A, lam = self._seen(x)
        scaled = A / lam[:, None]  # AΛ⁻¹
        self.gram.copy_(scaled @ A.mT)
        self.moment.copy_(scaled @ y.T[..., None])

    def _posterior_root(self) -> Tensor:
        """The Cholesky factor of B: (k, m, m)."""
        return cholesky(torch.eye(self.gram.shape[-1]).to(self.gram) + self.gram)

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        factor = self._posterior_root()
        A = self._white(x, self._root())  # (k, m, N)
        mean = (A.mT @ torch.cholesky_solve(self.moment, factor))[..., 0]
        left = solve_lower(factor, A)
        return mean, self.scale - A.square().sum(1) + left.square().sum(1)

    def correction(self, prior: Callable[[Tensor], Tensor], *name: int | str) -> Tensor:
        root, factor = self._root(), self._posterior_root()
        drawn = draw_normal(derive_keys(torch.arange(1), *name, "inducing"), self.moment.numel()).view_as(self.moment)
        noise = torch.linalg.solve_triangular(factor.mT, drawn.to(factor), upper=True)  # covariance B⁻¹
        v = torch.cholesky_solve(self.moment, factor) + noise
        v = v - solve_lower(root, prior(self.Z)[..., None])
        weights: Tensor = torch.linalg.solve_triangular(root.mT, v, upper=True)[..., 0]  # L⁻ᵀ(v − L⁻¹g(Z))
        return weights


@dataclass(frozen=True)
class SparseGPPredictor(GaussianProcessPredictor):
    """Posterior mean and standard deviation of the function under FITC, and sampled functions."""

    def config(self) -> dict[str, Any]:
        return {**super().config(), "method": "sparse-gp", "points": self.process.basis.shape[1]}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "SparseGPPredictor":
        options = {name: config[name] for name in ("points", "inputs", "outputs", "kernel", "ard")}
        with torch.inference_mode(False):  # as tensors that gradients may pass, wherever it is loaded
            return cls(SparseProcess(**options).eval())


@register(
    "sparse-gp",
    predictor=SparseGPPredictor,
    summary="Gaussian process regression through m learned points (FITC)",
    tasks=("regression",),
    needs_net=False,
    train_cost="O(nm²)",
    predict_cost="O(m²)",
    reference="Snelson and Ghahramani, NeurIPS 18, 2006",
)
@dataclass(frozen=True)
class SparseGP:
    """Options of a sparse Gaussian process with m = `num_inducing` points (all n where that is less), learned together
    with the kernel by `steps` steps of Adam that cost O(nm²); they begin as a random subset of the training inputs, and
    stay there where m = n. With m < n `noise_std` tends to be too small.

    `kernel` is "rbf" (squared exponential) or "matern52"; with `ard` each input has its own length-scale. Inputs are
    flattened; of the recipe only seed, folder, reports and device count. Several outputs are independent processes.

    >>> x = torch.linspace(-3, 3, 200)[:, None]
    >>> method = SparseGP(num_inducing=10, steps=50)
    >>> predictor = method.fit(None, TensorDataset(x, x.sin()), TrainingConfig(progress=False))
    >>> prediction = predictor.predict(x[:5], 20)
    >>> prediction.samples.shape, bool((prediction.mean - x[:5].sin()).abs().max() < 0.1)
    (torch.Size([20, 5, 1]), True)
    """

    loss: Loss = field(default_factory=nn.MSELoss)
    num_inducing: int = 100
    kernel: KernelName = "rbf"
    ard: bool = True
    steps: int = 200
    learning_rate: float = 0.05

    def __post_init__(self) -> None:
        check_squared_error(self.loss)
        check_kernel(self.kernel)
        check_ascent(self.steps, self.learning_rate)
        if not isinstance(self.num_inducing, int) or self.num_inducing < 1:
            raise ValueError(f"got num_inducing={self.num_inducing!r}; expected a whole number ≥ 1")

    def fit(
        self,
        model: Callable[[], nn.Module] | None,
        data: Dataset[Any],
        config: TrainingConfig,
        *,
        val_data: Dataset[Any] | None = None,
    ) -> SparseGPPredictor:
        """Maximise the FITC likelihood on (x, y) rows. `model` is not called."""
        x, y = read_training_data(data, config)
        process = SparseProcess(min(self.num_inducing, len(x)), x.shape[1], y.shape[1], self.kernel, self.ard)
        x, y = process.set_units(x, y)
        chosen = derive_keys(torch.arange(len(x)), config.seed, "inducing").argsort()[: process.Z.shape[1]]
        process.Z.data.copy_(x[chosen])
        process.Z.requires_grad_(len(chosen) < len(x))  # all n at the inputs are the exact process: moved, they overfit
        process.choose_start(lambda: process.objectives(x, y), len(x))

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            value: Tensor = model(batch.x, batch.y)  # the batch is all the data
            return value

        def check(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            process.absorb(x.to(process.Z), y.to(process.Z))
            return validate_mean(process, self.loss, model, batch)

        train(
            process,
            TensorDataset(x, y),
            lambda epoch: objective,
            adam_config(config, len(x), self.steps, self.learning_rate),
            val_data=val_data,
            validate=check,
            identity=describe_method(self),
        )
        process.absorb(x.to(process.Z), y.to(process.Z))
        return SparseGPPredictor(process.eval())
