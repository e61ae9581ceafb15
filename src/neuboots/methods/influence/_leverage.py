"""Hat matrix of a ridge regression in its eigenbasis: leverage, choice of the ridge, noise level.

    H = Ψ (W + λ)⁻¹ Ψᵀ,   Ψ = rows of the (whitened) Jacobian in the eigenbasis,   ΨᵀΨ = W = diag(w)
    hᵢ = Hᵢᵢ,   mᵢ = [(I − H)²]ᵢᵢ = 1 − 2hᵢ + Σ_k ψᵢₖ² wₖ/(wₖ + λ)²

In-sample residuals are too small: E rᵢ² = σ² mᵢ where the noise is the same around row i. Everything here needs one row
at a time, so that rows can be streamed.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from neuboots.methods._curvature import bisect_decreasing
from neuboots.weights import WeightDistribution

POWERS = {"hc3": 1.0, "hc2": 0.5}  # p of (I − Hᵢᵢ)⁻ᵖ
_NOISE_DF = 3.0  # degrees of freedom of the noise level as a function of x
_NOISE_DIRECTIONS = 16  # leading eigenvectors that carry it
_MIN_RIDGE, _MAX_RIDGE = 1e-9, 1e4  # relative to the mean eigenvalue
_MAX_DF_PER_ROW = 0.5
_MAX_LEVERAGE = 0.9  # of a row that is corrected by itself
_MIN_VARIANCE_FACTOR = 0.02  # of mᵢ: a row that the net reproduces anyway says nothing about the noise


def degrees_of_freedom(values: Tensor, ridge: float) -> float:
    """tr H = Σ_k w_k / (w_k + λ)."""
    return float((values / (values + ridge)).sum())


def ridge_for_degrees_of_freedom(values: Tensor, df: float) -> float:
    """The λ with tr H = df, for a df below the number of positive eigenvalues."""
    largest = float(values.max())
    return bisect_decreasing(lambda ridge: degrees_of_freedom(values, ridge) - df, largest * 1e-12, largest * 1e6)


def choose_ridge(values: Tensor, squares: Tensor, rest: float, rows: int, *, residual: float) -> float:
    """The λ with Σ_k (λ/(w_k + λ))² t_k² + rest = Σᵢ uᵢ²: the linear model fits its targets as closely as the net did.

    A net that was stopped early has large residuals and so a large ridge. λ leaves at least one degree of freedom and
    at most half of the rows.

    Args:
        values: Eigenvalues w: (K,).
        squares: t_k², squared coordinates along the eigenvectors of the targets t = Jθ̂ + u (whitened): (K,).
        rest: Squared norm of t outside of the eigenvectors.
        rows: Number of rows.
        residual: Σ uᵢ² of the net itself.

    Example:
        >>> values, squares = torch.tensor([4.0, 1.0]), torch.tensor([16.0, 4.0])
        >>> round(choose_ridge(values, squares, 1.0, 10, residual=2.64), 3)  # 16 (1/5)² + 4 (1/2)² + 1
        1.0
    """
    scale = float(values.mean())
    if scale <= 0:
        return 1.0  # the outputs do not depend on these weights

    def excess(ridge: float) -> float:
        return residual - rest - float(((ridge / (values + ridge)).square() * squares).sum())

    ridge = bisect_decreasing(excess, _MIN_RIDGE * scale, _MAX_RIDGE * scale)
    df = degrees_of_freedom(values, ridge)
    clipped = min(max(df, min(1.0, 0.5 * rows)), _MAX_DF_PER_ROW * rows)
    return ridge if clipped == df else ridge_for_degrees_of_freedom(values, clipped)


def ridge_inverse(values: Tensor, ridge: float) -> Tensor:
    """(W + λ)⁻¹, and zero along directions without information: (K,)."""
    total = values + ridge
    smallest = total.max() * torch.finfo(total.dtype).eps * len(total)
    return torch.where(total > smallest, total.reciprocal(), 0.0)


def residual_variance_factor(values: Tensor, ridge: float) -> Tensor:
    """f with mᵢ = 1 + Σ_k ψᵢₖ² f_k, the fraction of the noise variance that is left in a residual: (K,)."""
    inverted = ridge_inverse(values, ridge)
    return inverted * (values * inverted - 2.0)


def covariance_root(distribution: WeightDistribution, moved: Tensor) -> Tensor:
    """Cov(α)^½ M for M (S, *).

    Cov α = (v − c) I + c 11ᵀ is the square of a I + (b − a) 11ᵀ/S with a² = v − c and b² = v + (S − 1) c.
    """
    v, c = distribution.covariance(len(moved))
    across, along = math.sqrt(v - c), math.sqrt(max(0.0, v + (len(moved) - 1) * c))
    return across * moved + (along - across) * moved.mean(0)


def leverage_corrected(hat: Tensor, residuals: Tensor, *, power: float = 1.0) -> Tensor:
    """(I − Hᵢᵢ)⁻ᵖ uᵢ for blocks of the hat matrix (M, C, C) and residuals (M, C): (M, C).

    p = 1 gives leave-one-out residuals (HC3), p = ½ residuals of the right variance (HC2). Eigenvalues of a block are
    clipped at 0.9, so that no single row determines the band.

    >>> leverage_corrected(torch.tensor([[[0.75]], [[1.0]]]), torch.ones(2, 1)).flatten()
    tensor([ 4.0000, 10.0000])
    >>> leverage_corrected(torch.tensor([[[0.75]]]), torch.ones(1, 1), power=0.5)
    tensor([[2.]])
    """
    # no eigenvalue is larger than the largest row sum: below the limit one linear solve is exact, and faster
    exact = hat.abs().sum(2).amax(1) <= _MAX_LEVERAGE if power == 1.0 else hat.new_zeros(len(hat), dtype=torch.bool)
    left = torch.eye(hat.shape[1], dtype=hat.dtype, device=hat.device) - hat
    if not bool(exact.all()):
        values, vectors = torch.linalg.eigh(hat[~exact])
        powers = (1.0 - values.clamp(0.0, _MAX_LEVERAGE)) ** power
        left[~exact] = vectors @ torch.diag_embed(powers) @ vectors.mT
    corrected: Tensor = torch.linalg.solve(left, residuals)
    return corrected


@dataclass
class NoiseLevel:
    """ũᵢ² = ½ (r²ᵢ + Σ_j gᵢⱼ rⱼ²) / Σ_j gᵢⱼ mⱼ, gᵢⱼ ∝ Gᵢⱼ², where G is the hat matrix of three degrees of freedom.

    Half of a row's own squared residual, as in a bootstrap, and half of the local mean, which has less variance: a band
    that follows each residual is too narrow wherever they happen to be small. The factors mⱼ are averaged in the same
    way, so that no single row of leverage near 1 dominates; under constant noise the mean of ũᵢ² is unbiased. Only the
    leading eigenvectors enter, so that the sums have a fixed size.

    Attributes:
        scale: Factors of the leading columns of Ψ: (k,).
        counts: Σ_j gⱼgⱼᵀ, gⱼ the leading coordinates of row j: (k, k).
        squares: Σ_j gⱼgⱼᵀ rⱼ²: (k, k).
        factors: Σ_j gⱼgⱼᵀ mⱼ: (k, k).
    """

    scale: Tensor
    counts: Tensor
    squares: Tensor
    factors: Tensor

    @classmethod
    def from_eigenvalues(cls, values: Tensor) -> "NoiseLevel":
        """Create an estimate without rows, for eigenvalues in ascending order."""
        count = min(_NOISE_DIRECTIONS, len(values))
        positive = int((values > values[-1] * 1e-10).sum())
        ridge = ridge_for_degrees_of_freedom(values, min(_NOISE_DF, 0.9 * max(1, positive)))
        zeros = values.new_zeros(count, count)
        total = values[-count:] + ridge  # zero where rows have no features at all
        return cls(torch.where(total > 0, total.rsqrt(), 0.0), zeros, zeros.clone(), zeros.clone())

    def _directions(self, psi: Tensor) -> Tensor:
        return psi[:, -len(self.scale) :] * self.scale  # g: (M, k)

    def add(self, psi: Tensor, residuals: Tensor, factors: Tensor) -> None:
        """Add rows: ψ (M, K), residuals r and variance factors m (M,)."""
        g, factors = self._directions(psi), factors.clamp(_MIN_VARIANCE_FACTOR, 1.0)
        self.counts += g.T @ g
        self.squares += g.T @ (residuals.square()[:, None] * g)
        self.factors += g.T @ (factors[:, None] * g)

    def correct(self, psi: Tensor, residuals: Tensor) -> Tensor:
        """ũ of rows ψ (M, K) with residuals r (M,), each with the sign of its residual: (M,)."""
        g = self._directions(psi)
        counts, squares, factors = (((g @ part) * g).sum(1) for part in (self.counts, self.squares, self.factors))
        own = residuals.square() * counts
        level = 0.5 * (own + squares).clamp_min(0.0) / factors.clamp_min(torch.finfo(factors.dtype).tiny)
        return torch.where(residuals < 0, -1.0, 1.0) * level.sqrt()
