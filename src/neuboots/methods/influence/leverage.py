"""The hat matrix of a ridge regression in its eigenbasis: leverage, the choice of the ridge, the level of the noise.

    H = Ψ (W + λ)⁻¹ Ψᵀ,   Ψ = rows of the (whitened) Jacobian in the eigenbasis,   ΨᵀΨ = W = diag(w)
    hᵢ = Hᵢᵢ,   mᵢ = [(I − H)²]ᵢᵢ = 1 − 2hᵢ + Σ_k ψᵢₖ² wₖ/(wₖ + λ)²

Residuals of a net that was fitted to these very rows are too small: E rᵢ² = σ² mᵢ where the noise is the same around
row i. Everything here needs one row at a time, so that rows may be streamed.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_NOISE_DF = 3.0  # degrees of freedom of the noise level as a function of x
_DIRECTIONS = 16  # eigenvectors that carry it
_LEAST, _MOST = 1e-9, 1e4  # ridges, of the mean eigenvalue
_MOST_DF = 0.5  # degrees of freedom for each row
_MOST_LEVERAGE = 0.9  # of a row that is corrected by itself
POWERS = {"hc3": 1.0, "hc2": 0.5}  # of (I − Hᵢᵢ)⁻¹
_LEAST_REMAINDER = 0.02  # of mᵢ: a row that the net reproduces whatever it is says nothing of the noise


def degrees_of_freedom(values: Tensor, ridge: float) -> float:
    """tr H = Σ_k w_k / (w_k + λ)."""
    return float((values / (values + ridge)).sum())


def ridge_for_degrees_of_freedom(values: Tensor, df: float) -> float:
    """The λ with tr H = df, for a df below the number of positive eigenvalues."""
    low, high = float(values.max()) * 1e-12, float(values.max()) * 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if degrees_of_freedom(values, middle) > df else (low, middle)
    return math.sqrt(low * high)


def choose_ridge(values: Tensor, squares: Tensor, rest: float, rows: int, *, residual: float) -> float:
    """The λ with Σ_k (λ/(w_k + λ))² t_k² + rest = Σᵢ uᵢ²: the linear model fits its targets as closely as the net did.

    Targets are t = Jθ̂ + u (whitened), what a linear model with the net's slopes would be given; `squares` are their
    squared coordinates t_k² along the eigenvectors, `rest` the squared length of what lies outside, and `residual` is
    Σ uᵢ² of the net itself. A net that was stopped early has large residuals, and so a large ridge; one that was driven
    to the bottom of its loss has none. λ is held where it leaves one degree of freedom at least, and half of the N rows
    at most: of a net that reproduces every row nothing can be learned.

    >>> values, squares = torch.tensor([4.0, 1.0]), torch.tensor([16.0, 4.0])
    >>> round(choose_ridge(values, squares, 1.0, 10, residual=2.64), 3)  # 16 (1/5)² + 4 (1/2)² + 1
    1.0
    """
    scale = float(values.mean())
    if scale <= 0:
        return 1.0  # the outputs do not depend on these weights
    low, high = _LEAST * scale, _MOST * scale
    for _ in range(80):
        middle = math.sqrt(low * high)
        fit = rest + float(((middle / (values + middle)).square() * squares).sum())
        low, high = (middle, high) if fit < residual else (low, middle)
    found = math.sqrt(low * high)
    df = degrees_of_freedom(values, found)
    held = min(max(df, min(1.0, 0.5 * rows)), _MOST_DF * rows)
    return found if held == df else ridge_for_degrees_of_freedom(values, held)


def ridge_inverse(values: Tensor, ridge: float) -> Tensor:
    """(W + λ)⁻¹, and zero along directions that the rows say nothing of: (K,)."""
    total = values + ridge
    least = total.max() * torch.finfo(total.dtype).eps * len(total)
    return torch.where(total > least, total.reciprocal(), 0.0)


def residual_variance_factor(psi: Tensor, values: Tensor, ridge: float, *, share: float = 1.0) -> Tensor:
    """mᵢ = 1 − 2hᵢ + Σ_k ψᵢₖ² w_k / (w_k + λ)², what is left of the noise in a residual: (M,).

    Where the spectrum is that of a `share` of the rows the net was trained on, their leverage was less by as much.
    """
    inverted = ridge_inverse(values, ridge)
    return (1.0 + share * (psi.square() @ (inverted * (values * inverted - 2.0)))).clamp(_LEAST_REMAINDER, 1.0)


def leverage_corrected(hat: Tensor, residuals: Tensor, *, power: float = 1.0) -> Tensor:
    """(I − Hᵢᵢ)⁻ᵖ uᵢ for blocks of the hat matrix (M, C, C) and residuals (M, C): (M, C).

    p = 1 gives the residuals that rows would have if they had been left out (HC3); p = ½ those of the right variance
    (HC2). Eigenvalues of a block are held below 0.9, lest a row that alone decides its own fit decides the band too.

    >>> leverage_corrected(torch.tensor([[[0.75]], [[1.0]]]), torch.ones(2, 1)).flatten()
    tensor([ 4.0000, 10.0000])
    >>> leverage_corrected(torch.tensor([[[0.75]]]), torch.ones(1, 1), power=0.5)
    tensor([[2.]])
    """
    exact = hat.abs().sum(2).amax(1) <= _MOST_LEVERAGE if power == 1.0 else hat.new_zeros(len(hat), dtype=torch.bool)
    left = torch.eye(hat.shape[1], dtype=hat.dtype, device=hat.device) - hat  # no eigenvalue is larger than that sum
    if not bool(exact.all()):  # eigenvectors take several times as long
        values, vectors = torch.linalg.eigh(hat[~exact])
        powers = (1.0 - values.clamp(0.0, _MOST_LEVERAGE)) ** power
        left[~exact] = vectors @ torch.diag_embed(powers) @ vectors.mT
    found: Tensor = torch.linalg.solve(left, residuals)
    return found


@dataclass
class NoiseLevel:
    """ũᵢ² = ½ (r²ᵢ + Σ_j gᵢⱼ rⱼ²) / Σ_j gᵢⱼ mⱼ, gᵢⱼ ∝ Gᵢⱼ², where G is the hat matrix of three degrees of freedom.

    Half of a row's own squared residual, as in a bootstrap, and half of the mean around it, which is steadier: a band
    that follows each residual is too narrow wherever they happen to be small. What leverage has left of them is
    averaged in the same way before it is divided by, so that no single row of leverage near 1 blows the band up; where
    the noise is the same everywhere, the mean of ũᵢ² is without bias. Neighbours are those of the leading eigenvectors,
    so that the sums have a fixed size.
    """

    scale: Tensor  # what the leading columns of Ψ are multiplied by: (k,)
    counts: Tensor  # Σ_j gⱼgⱼᵀ, gⱼ the leading coordinates of row j: (k, k)
    squares: Tensor  # Σ_j gⱼgⱼᵀ rⱼ²: (k, k)
    remainders: Tensor  # Σ_j gⱼgⱼᵀ mⱼ: (k, k)

    @classmethod
    def along(cls, values: Tensor) -> "NoiseLevel":
        """An empty one, for these eigenvalues in ascending order."""
        count = min(_DIRECTIONS, len(values))
        positive = int((values > values[-1] * 1e-10).sum())
        ridge = ridge_for_degrees_of_freedom(values, min(_NOISE_DF, 0.9 * max(1, positive)))
        zeros = values.new_zeros(count, count)
        total = values[-count:] + ridge  # zero where rows have no features at all
        return cls(torch.where(total > 0, total.rsqrt(), 0.0), zeros, zeros.clone(), zeros.clone())

    def _directions(self, psi: Tensor) -> Tensor:
        return psi[:, -len(self.scale) :] * self.scale  # g: (M, k)

    def add(self, psi: Tensor, residuals: Tensor, remainders: Tensor) -> None:
        """More rows: ψ (M, K), residuals and remainders (M,)."""
        g = self._directions(psi)
        self.counts += g.T @ g
        self.squares += g.T @ (residuals.square()[:, None] * g)
        self.remainders += g.T @ (remainders[:, None] * g)

    def correct(self, psi: Tensor, residuals: Tensor) -> Tensor:
        """ũ of rows ψ (M, K) with residuals r (M,): each keeps its sign, since weights are not symmetric: (M,)."""
        g = self._directions(psi)
        counts, squares, left = (((g @ part) * g).sum(1) for part in (self.counts, self.squares, self.remainders))
        own = residuals.square() * counts
        level = 0.5 * (own + squares).clamp_min(0.0) / left.clamp_min(torch.finfo(left.dtype).tiny)
        return torch.where(residuals < 0, -1.0, 1.0) * level.sqrt()
