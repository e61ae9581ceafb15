"""The scores of `neuboots.metrics.regression` for one number at a time, and the calibration curve.

    r = y − μ,   z = r / σ,   z = 0 where r = σ = 0

Every function takes r and σ, (N,) each, and has its limit at σ = 0, but the likelihood, which has none there.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_PERCENT = 99  # the levels 0.01, 0.02, …, 0.99 of check score and interval score


@dataclass(frozen=True, eq=False)
class CalibrationCurve:
    """The share of y that should fall, and that falls, in the central interval of each level."""

    expected: Tensor  # (num_levels,)
    observed: Tensor  # (num_levels,)

    @property
    def mean_absolute_error(self) -> Tensor:
        return (self.expected - self.observed).abs().mean()

    @property
    def rms_error(self) -> Tensor:
        return (self.expected - self.observed).square().mean().sqrt()

    @property
    def area(self) -> Tensor:
        """∫ |observed − expected| between the levels, both lines straight: where they cross, two triangles."""
        gap = self.observed - self.expected
        left, right = gap[:-1], gap[1:]
        total = left.abs() + right.abs()
        crossing = (left.square() + right.square()) / total.where(total > 0, 1.0)
        return (self.expected.diff() * torch.where(left * right < 0, crossing, total) / 2).sum()


def quantiles(levels: Tensor) -> Tensor:
    """Φ⁻¹ of each level."""
    found: Tensor = torch.special.ndtri(levels)
    return found


def _standardized(r: Tensor, sigma: Tensor) -> Tensor:
    """z = r / σ; ±∞ where only σ is 0, and 0 where both are."""
    return torch.where(r == 0, 0.0, r / sigma)


def surprise(r: Tensor, sigma: Tensor) -> Tensor:
    return (r / sigma).square() / 2 + sigma.log() + math.log(2 * math.pi) / 2


def ranked(r: Tensor, sigma: Tensor) -> Tensor:
    z = _standardized(r, sigma)
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    return r * torch.erf(z / math.sqrt(2)) + sigma * (2 * density - 1 / math.sqrt(math.pi))


def check_scores(r: Tensor, sigma: Tensor) -> Tensor:
    """Mean over the levels q of the pinball loss at μ + z_q σ.

    Σ_q (1[z_q ≥ z] − q)(z_q σ − r) needs, at each input, only sums over the levels above z: two look-ups.
    """
    q = torch.arange(1, _PERCENT + 1, dtype=torch.float64, device=r.device) / (_PERCENT + 1)
    at = quantiles(q)
    below = torch.bucketize(_standardized(r, sigma), at)  # (N,) how many z_q < z
    above = at.sum() - torch.cat([at.new_zeros(1), at.cumsum(0)])[below]  # (N,) Σ z_q over the others
    weighted = above - (q * at).sum()
    return (sigma * weighted - r * (_PERCENT - below - q.sum())) / _PERCENT


def interval_scores(r: Tensor, sigma: Tensor) -> Tensor:
    """Mean over the levels p of 2 w_p σ + 2/(1 − p) · max(0, |r| − w_p σ), the interval being μ ± w_p σ."""
    p = torch.arange(1, _PERCENT + 1, dtype=torch.float64, device=r.device) / (_PERCENT + 1)
    at, price = quantiles(0.5 + p / 2), 2 / (1 - p)
    missed = torch.bucketize(_standardized(r, sigma).abs(), at)  # (N,) how many w_p < |z|
    prices = torch.cat([at.new_zeros(1), price.cumsum(0)])[missed]
    priced = torch.cat([at.new_zeros(1), (price * at).cumsum(0)])[missed]
    return (sigma * (2 * at.sum() - priced) + r.abs() * prices) / _PERCENT


def inside(r: Tensor, sigma: Tensor, num_levels: int) -> Tensor:
    """How many inputs have |z| ≤ w_p, for each level p = 0, …, 1: (num_levels,)."""
    p = torch.linspace(0, 1, num_levels, dtype=torch.float64, device=r.device)
    first = torch.bucketize(_standardized(r, sigma).abs(), quantiles(0.5 + p / 2))
    return torch.bincount(first, minlength=num_levels).cumsum(0)
