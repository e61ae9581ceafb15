"""Tests of working residuals against autograd, and of ridge, leverage and noise level against dense hat matrices."""

import pytest
import torch
from _nets import noise
from torch import Tensor

from neuboots.methods._least_squares import (
    NoiseLevel,
    choose_ridge,
    degrees_of_freedom,
    leverage_corrected,
    residual_variance_factor,
    ridge_for_degrees_of_freedom,
)


def ridge_problem(n: int = 30, k: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Rows X, and their eigenvalues and coordinates."""
    x = noise(n, k).double() * torch.linspace(0.1, 2.0, k).double()
    values, vectors = torch.linalg.eigh(x.T @ x)
    return x, values, x @ vectors


def variance_factors(psi: Tensor, values: Tensor, ridge: float) -> Tensor:
    return 1 + psi.square() @ residual_variance_factor(values, ridge)


def test_variance_factor_and_correction_match_the_hat_matrix() -> None:
    x, values, psi = ridge_problem()
    hat = x @ torch.linalg.inv(x.T @ x + 2.0 * torch.eye(8)) @ x.T
    left = torch.eye(30) - hat
    torch.testing.assert_close(variance_factors(psi, values, 2.0), (left @ left).diagonal())
    u = noise(15, 2, seed=5).double()
    blocks = torch.stack([hat[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] for i in range(15)])
    expected = torch.linalg.solve(torch.eye(2) - blocks, u[..., None])[..., 0]
    torch.testing.assert_close(leverage_corrected(blocks, u), expected)
    torch.testing.assert_close(
        leverage_corrected(blocks, leverage_corrected(blocks, u, power=0.5), power=0.5), expected
    )


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_leverage_near_one_is_clipped(power: float) -> None:
    hat = torch.tensor([1.0 - 1e-12, 0.5, 0.5], dtype=torch.float64)[:, None, None]
    found = leverage_corrected(hat, torch.ones(3, 1, dtype=torch.float64), power=power)
    torch.testing.assert_close(found.flatten(), torch.tensor([10.0, 2.0, 2.0], dtype=torch.float64) ** power)


def test_ridge_matches_the_residuals_of_a_ridge_fit() -> None:
    """Targets of a linear model that was fitted with λ₀ give λ₀ back: dual and primal."""
    x, values, _ = ridge_problem(40, 8)
    y = x @ noise(8, seed=2).double() + noise(40, seed=3).double()
    for ridge in (0.5, 5.0, 50.0):
        theta = torch.linalg.solve(x.T @ x + ridge * torch.eye(8), x.T @ y)
        size = float((y - x @ theta).square().sum())
        kernel, vectors = torch.linalg.eigh(x @ x.T)
        kernel = kernel.clamp_min(0.0)
        found = choose_ridge(kernel, (vectors.T @ y).square(), 0.0, 40, residual=size)
        assert found == pytest.approx(ridge, rel=1e-6)
        squares = (torch.linalg.eigh(x.T @ x).eigenvectors.T @ x.T @ y).square() / values
        rest = float(y.square().sum() - squares.sum())
        assert choose_ridge(values, squares, rest, 40, residual=size) == pytest.approx(ridge, rel=1e-6)


def test_ridge_keeps_degrees_of_freedom_in_range() -> None:
    values = torch.logspace(-6, 0, 20, dtype=torch.float64)
    squares = torch.ones(20, dtype=torch.float64)
    assert degrees_of_freedom(values, choose_ridge(values, squares, 0.0, 20, residual=0.0)) == pytest.approx(10.0)
    assert degrees_of_freedom(values, choose_ridge(values, squares, 0.0, 20, residual=1e9)) == pytest.approx(1.0)
    assert degrees_of_freedom(values, ridge_for_degrees_of_freedom(values, 3.0)) == pytest.approx(3.0)


def test_constant_noise_level_is_unbiased() -> None:
    """The mean over draws is σ², within four standard errors, although a third of the noise is fitted."""
    x, values, psi = ridge_problem(24, 8)
    hat = x @ torch.linalg.inv(x.T @ x + 0.1 * torch.eye(8)) @ x.T
    left = variance_factors(psi, values, 0.1)
    means = []
    for seed in range(400):
        residuals = (torch.eye(24) - hat) @ (1.5 * noise(24, seed=seed).double())
        level = NoiseLevel(values)
        level.add(psi, residuals, left)
        means.append(float(level.correct(psi, residuals).square().mean()))
    found = torch.tensor(means)
    assert abs(float(found.mean()) - 2.25) < 4.0 * float(found.std()) / 20.0
    assert float(residuals.square().mean()) < 0.8 * float(level.correct(psi, residuals).square().mean())


def test_noise_level_matches_its_formula() -> None:
    """All pairs of rows, weighted by the squares of the smoother; and rows that come in parts."""
    x, values, psi = ridge_problem(24, 8)
    residuals, left = noise(24, seed=7).double(), variance_factors(psi, values, 0.1)
    smoother = x @ torch.linalg.inv(x.T @ x + ridge_for_degrees_of_freedom(values, 3.0) * torch.eye(8)) @ x.T
    weights = smoother.square() / smoother.square().sum(1, keepdim=True)
    expected = 0.5 * (residuals.square() + weights @ residuals.square()) / (weights @ left)
    level = NoiseLevel(values)
    level.add(psi[:10], residuals[:10], left[:10])
    level.add(psi[10:], residuals[10:], left[10:])
    found = level.correct(psi, residuals)
    torch.testing.assert_close(found.square(), expected)
    assert bool((found.sign() == residuals.sign()).all())


def test_leverage_is_clipped_at_zero_and_below_one() -> None:
    hat = torch.diag_embed(torch.tensor([[-0.5, 0.95], [0.5, 2.0]], dtype=torch.float64))  # −0.5 is rounding error
    for power in (1.0, 0.5):
        expected = torch.tensor([[1.0, 10.0], [2.0, 10.0]], dtype=torch.float64) ** power
        torch.testing.assert_close(leverage_corrected(hat, torch.ones(2, 2).double(), power=power), expected)
