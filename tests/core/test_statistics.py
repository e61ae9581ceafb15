"""On least squares everything is known: weighted losses give weighted fits, and their spread is the exact band."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from _reference import least_squares, p_value, sandwich, standard_errors
from torch import Tensor, nn

from neuboots._prng import derive_keys
from neuboots.losses import as_loss, weighted_mean
from neuboots.weights import (
    BlockTable,
    Dirichlet,
    Exponential,
    Multinomial,
    WeightDistribution,
    WeightSchedule,
    assign_blocks,
)

DISTRIBUTIONS = [Dirichlet(), Dirichlet(5.0), Multinomial(), Exponential()]
every_distribution = pytest.mark.parametrize("weight_distribution", DISTRIBUTIONS, ids=str)
GRID = np.linspace(-2, 2, 9)


def design(x: np.ndarray) -> np.ndarray:
    return np.column_stack([np.ones_like(x), x, x**2])


def regression(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A curve that the model cannot bend to and noise that grows with |x|: the case HC0 is made for."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, n)
    return design(x), np.sin(2 * x) + (0.2 + 0.3 * np.abs(x)) * rng.normal(size=n)


def fits(X: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    """θ̂ for each row of weights (B, n): (B, p)."""
    p = X.shape[1]
    gram = (w @ (X[:, :, None] * X[:, None, :]).reshape(len(X), -1)).reshape(-1, p, p)
    return np.linalg.solve(gram, (w @ (X * y[:, None]))[..., None])[..., 0]


def weights(weight_distribution: WeightDistribution, num: int, size: int, *name: int | str) -> np.ndarray:
    return weight_distribution.sample(derive_keys(torch.arange(num), *name), size).numpy()


def influence(X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """df(x)/dwᵢ at w = 1 for x on the grid: x (XᵀX)⁻¹ xᵢ eᵢ. Its squares sum to White's variance: (9, n)."""
    residuals = y - X @ least_squares(X, y, np.ones(len(y)))
    return design(GRID) @ np.linalg.inv(X.T @ X) @ (X.T * residuals)


# -- weighted least squares ----------------------------------------------------------------------------


def linear(theta: np.ndarray) -> nn.Linear:
    net = nn.Linear(len(theta), 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.from_numpy(theta)[None])
    return net


def compute_loss(net: nn.Linear, X: np.ndarray, y: np.ndarray, w: Tensor) -> Tensor:
    return weighted_mean(as_loss(nn.MSELoss())(net(torch.from_numpy(X)), torch.from_numpy(y)), w)


@every_distribution
def test_gradient_vanishes_at_weighted_least_squares(weight_distribution: WeightDistribution) -> None:
    """50 draws; zero means rounding: 10⁻¹² of the gradient at θ = 0."""
    X, y = regression(60)
    for w in weight_distribution.sample(derive_keys(torch.arange(50), 0), 60):
        norms = []
        for theta in (least_squares(X, y, w.numpy()), np.zeros(3)):
            net = linear(theta)
            compute_loss(net, X, y, w).backward()
            norms.append(net.weight.grad.norm().item())
        assert norms[0] < 1e-12 * norms[1]


# -- the exact band ------------------------------------------------------------------------------------

B = 4_000
CASES = [(weight_distribution, n) for weight_distribution in DISTRIBUTIONS for n in (100, 400)]


def variance_ratio(f: np.ndarray, exact: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sample variance over exact variance for each column, and its standard error from the fourth moment."""
    squares = (f - f.mean(0)) ** 2
    variance = squares.mean(0)
    return variance / exact, squares.std(0) / exact / math.sqrt(len(f))


@pytest.mark.parametrize(("weight_distribution", "n"), CASES, ids=str)
def test_variance_of_weighted_fits_is_the_sandwich(weight_distribution: WeightDistribution, n: int) -> None:
    """To first order f_w(x) − f(x) = Σᵢ (wᵢ − 1) df/dwᵢ, whose variance is (v − c) times HC0, exactly: within k
    standard errors. The fits themselves add terms of relative size O(1/n), which twice the largest leverage
    (itself p/n on average) bounds here."""
    X, y = regression(n)
    w = weights(weight_distribution, B, n, 0, "band")
    v, c = weight_distribution.covariance(n)
    exact = (v - c) * np.einsum("gi,ij,gj->g", design(GRID), sandwich(X, y), design(GRID))
    k = standard_errors(2 * len(CASES) * len(GRID))

    ratio, error = variance_ratio((w - 1) @ influence(X, y).T, exact)
    assert (np.abs(ratio - 1) < k * error).all()

    leverage = np.einsum("ni,ij,nj->n", X, np.linalg.inv(X.T @ X), X).max()
    assert leverage < 10 / n
    ratio, error = variance_ratio(fits(X, y, w) @ design(GRID).T, exact)
    assert (np.abs(ratio - 1) < k * error + 2 * leverage).all()


@every_distribution
def test_mean_of_weighted_fits_is_the_fit(weight_distribution: WeightDistribution) -> None:
    """Its bias is O(1/n) where the spread is O(1/√n): below 2/√n standard deviations, and k standard errors."""
    n = 100
    X, y = regression(n)
    f = fits(X, y, weights(weight_distribution, B, n, 1, "mean")) @ design(GRID).T
    bias = (f.mean(0) - design(GRID) @ least_squares(X, y, np.ones(n))) / f.std(0)
    allowed = standard_errors(len(DISTRIBUTIONS) * len(GRID)) / math.sqrt(B)
    assert (np.abs(bias) < 2 / math.sqrt(n) + allowed).all()


def test_multinomial_fits_match_resampled_fits() -> None:
    """Weighted fits and fits to rows drawn by NumPy with replacement have one distribution at each x."""
    n, num = 100, 2000
    X, y = regression(n)
    ours = fits(X, y, weights(Multinomial(), num, n, 0, "rows")) @ design(GRID).T
    rows = np.random.default_rng(0).integers(n, size=(num, n))
    theirs = np.array([design(GRID) @ np.linalg.lstsq(X[r], y[r])[0] for r in rows])
    assert scipy.stats.ks_2samp(ours, theirs).pvalue.min() > p_value(len(GRID))


# -- blocks (theorem A.1) ------------------------------------------------------------------------------


def block_variance(z: np.ndarray, u: Tensor, size: int, weight_distribution: WeightDistribution) -> np.ndarray:
    """Var Σᵢ α_{u(i)} zᵢ, exact: the covariance of the weights on the sums of the blocks: (9,)."""
    sums = np.zeros((len(z), size))
    np.add.at(sums, (slice(None), u.numpy()), z)
    v, c = weight_distribution.covariance(size)
    return (v - c) * (sums**2).sum(1) + c * sums.sum(1) ** 2


def test_block_bootstrap_variance_is_exact() -> None:
    """1,500 epochs of a WeightSchedule with 16 blocks, on the linear statistic: within k standard errors."""
    n, size, epochs = 200, 16, 1500
    z = influence(*regression(n))
    u = assign_blocks(n, size, seed=2)
    plan = WeightSchedule(Dirichlet(), BlockTable(u, size), seed=1)
    w = torch.stack([plan.at_epoch(t)(torch.arange(n))[1] for t in range(epochs)]).numpy()
    ratio, error = variance_ratio(w @ z.T, block_variance(z, u, size, Dirichlet()))
    assert (np.abs(ratio - 1) < standard_errors(len(GRID)) * error).all()


@pytest.mark.parametrize("weight_distribution", [Dirichlet(), Multinomial()], ids=str)
@pytest.mark.parametrize("size", [4, 16, 64])
def test_random_blocks_are_unbiased(weight_distribution: WeightDistribution, size: int) -> None:
    """Over u, the block bootstrap's variance is v · n/(n − 1) · HC0: two points share one of S equal blocks with
    probability (n/S − 1)/(n − 1), and the influences sum to 0. Within k standard errors over 200 tables."""
    n, tables = 256, 200
    z = influence(*regression(n))
    exact = weight_distribution.covariance(size)[0] * n / (n - 1) * (z**2).sum(1)
    ratios = np.array(
        [block_variance(z, assign_blocks(n, size, seed=s), size, weight_distribution) / exact for s in range(tables)]
    )
    error = ratios.std(0, ddof=1) / math.sqrt(tables)
    assert (np.abs(ratios.mean(0) - 1) < standard_errors(6 * len(GRID)) * error).all()


def test_block_bootstrap_approaches_the_pointwise_one() -> None:
    """Theorem A.1 in numbers: a variance from S blocks is one of S squares, so the error of its standard error
    is about 1/√(2S). It halves whenever S grows fourfold, and is 0 at S = n."""
    n = 1024
    z = influence(*regression(n))
    unblocked = np.sqrt((z**2).sum(1) * n / (n + 1))

    def error(size: int, seed: int) -> np.ndarray:
        return np.sqrt(block_variance(z, assign_blocks(n, size, seed=seed), size, Dirichlet())) / unblocked - 1

    sizes = [8, 32, 128]
    errors = [np.sqrt(np.mean([error(size, seed) ** 2 for seed in range(100)])) for size in sizes]
    # over 100 tables an rms is known to 1/√200 = 7%, so the ratio of two to 10%: 2 ± k · 10%, k for 2 ratios
    allowed = standard_errors(2) * 0.1 * 2
    for larger, smaller in itertools.pairwise(errors):
        assert abs(larger / smaller - 2) < allowed
    for size, found in zip(sizes, errors, strict=True):
        # 7% of sampling, and O(1/√S) from (S − 1)/(S + 1), from blocks of n/S points and from the square root
        assert abs(found * math.sqrt(2 * size) - 1) < standard_errors(3) * 0.07 + 1 / math.sqrt(size)
    assert np.abs(error(n, 0)).max() < 1e-12
