"""Sparse Gaussian process regression by pseudo-inputs (FITC): m learned points stand for n.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from neuboots.batches import Batch
from neuboots.checkpoints import identity_of
from neuboots.keys import draw_keys, normals
from neuboots.losses import Loss, SquaredError
from neuboots.methods.gaussian_process import (
    GaussianProcessPredictor,
    Kernel,
    Process,
    ascent,
    check_ascent,
    check_kernel,
    check_regression,
    cholesky,
    read_points,
    validate,
    whiten,
)
from neuboots.training import Recipe, train

_JITTER = 1e-8  # of k(x, x): two inducing points may come to lie on one another


class SparseProcess(Process):
    """A Gaussian process that knows its data through m inducing points Z, for each output its own.

    In white coordinates v = L⁻¹u with LLᵀ = K_mm: v ~ N(0, I) before the data and N(B⁻¹c, B⁻¹) after them, where
    B = I + AΛ⁻¹Aᵀ, c = AΛ⁻¹y and A = L⁻¹K_mn.
    """

    gram: Tensor
    moment: Tensor

    def __init__(self, points: int, inputs: int, outputs: int, kernel: Kernel, ard: bool) -> None:
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
        return whiten(root, self.covariance(x, self.Z).mT)

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
        fitted = whiten(factor, scaled @ white[..., None])
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
        left = whiten(factor, A)
        return mean, self.scale - A.square().sum(1) + left.square().sum(1)

    def correction(self, prior: Callable[[Tensor], Tensor], *name: int | str) -> Tensor:
        root, factor = self._root(), self._posterior_root()
        drawn = normals(draw_keys(torch.arange(1), *name, "inducing"), self.moment.numel()).view_as(self.moment)
        noise = torch.linalg.solve_triangular(factor.mT, drawn.to(factor), upper=True)  # covariance B⁻¹
        v = torch.cholesky_solve(self.moment, factor) + noise
        v = v - whiten(root, prior(self.Z)[..., None])
        weights: Tensor = torch.linalg.solve_triangular(root.mT, v, upper=True)[..., 0]  # L⁻ᵀ(v − L⁻¹g(Z))
        return weights


@dataclass(frozen=True)
class SparseGPPredictor(GaussianProcessPredictor):
    """Posterior mean and standard deviation of the function under FITC, and sampled functions."""

    def config(self) -> dict[str, Any]:
        return {**super().config(), "method": "sparse-gp", "points": self.process.basis.shape[1]}

    @classmethod
    def restore(cls, config: dict[str, Any], net: nn.Module) -> "SparseGPPredictor":
        options = {name: config[name] for name in ("points", "inputs", "outputs", "kernel", "ard")}
        with torch.inference_mode(False):  # as tensors that gradients may pass, wherever it is loaded
            return cls(SparseProcess(**options).eval())


@dataclass(frozen=True)
class SparseGP:
    """Options of a sparse Gaussian process with m = `num_inducing` points (all n where that is less), learned together
    with the kernel by `steps` steps of Adam that cost O(nm²); they begin as a random subset of the training inputs, and
    stay there where m = n. With m < n `noise_std` tends to be too small.

    `kernel` is "rbf" (squared exponential) or "matern52"; with `ard` each input has its own length-scale. Inputs are
    flattened; of the recipe only seed, folder, reports and device count. Several outputs are independent processes.

    >>> x = torch.linspace(-3, 3, 200)[:, None]
    >>> method = SparseGP(num_inducing=10, steps=50)
    >>> predictor = method.fit(None, TensorDataset(x, x.sin()), Recipe(progress=False))
    >>> prediction = predictor.predict(x[:5], 20)
    >>> prediction.samples.shape, bool((prediction.mean - x[:5].sin()).abs().max() < 0.1)
    (torch.Size([20, 5, 1]), True)
    """

    loss: Loss = field(default_factory=SquaredError)
    num_inducing: int = 100
    kernel: Kernel = "rbf"
    ard: bool = True
    steps: int = 200
    learning_rate: float = 0.05

    def __post_init__(self) -> None:
        check_regression(self.loss)
        check_kernel(self.kernel)
        check_ascent(self.steps, self.learning_rate)
        if not isinstance(self.num_inducing, int) or self.num_inducing < 1:
            raise ValueError(f"got num_inducing={self.num_inducing!r}; expected a whole number ≥ 1")

    def fit(
        self,
        make_net: Callable[[], nn.Module] | None,
        data: Dataset[Any],
        recipe: Recipe,
        *,
        validation: Dataset[Any] | None = None,
    ) -> SparseGPPredictor:
        """Maximise the FITC likelihood on (x, y) rows. `make_net` is not called."""
        x, y = read_points(data, recipe)
        process = SparseProcess(min(self.num_inducing, len(x)), x.shape[1], y.shape[1], self.kernel, self.ard)
        x, y = process.set_units(x, y)
        chosen = draw_keys(torch.arange(len(x)), recipe.seed, "inducing").argsort()[: process.Z.shape[1]]
        process.Z.data.copy_(x[chosen])
        process.Z.requires_grad_(len(chosen) < len(x))  # all n at the inputs are the exact process: moved, they overfit
        process.choose_start(lambda: process.objectives(x, y), len(x))

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            value: Tensor = model(batch.x, batch.y)  # the batch is all the data
            return value

        def check(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            process.absorb(x.to(process.Z), y.to(process.Z))
            return validate(process, self.loss, model, batch)

        train(
            process,
            TensorDataset(x, y),
            lambda epoch: objective,
            ascent(recipe, len(x), self.steps, self.learning_rate),
            validation=validation,
            validate=check,
            identity=identity_of(self),
        )
        process.absorb(x.to(process.Z), y.to(process.Z))
        return SparseGPPredictor(process.eval())
