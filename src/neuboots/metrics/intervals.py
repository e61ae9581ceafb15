"""How good are intervals, quantiles and samples as predictions of a number y?

    pinball_q(a, y) = (1[y ≤ a] − q)(a − y)
    interval score_p([l, u], y) = u − l + 2/(1 − p) · (max(0, l − y) + max(0, y − u))
    CRPS(x_1 … x_B, y) = 1/B Σ_b |x_b − y| − 1/(2B²) Σ_b Σ_b′ |x_b − x_b′|

T. Gneiting, A. Raftery, Strictly proper scoring rules, prediction, and estimation, JASA 2007.
R. Koenker, G. Bassett, Regression quantiles, Econometrica 1978.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neuboots.metrics.checks import between, numbers, tensors
from neuboots.metrics.tally import HELD, Mean, Tally


@dataclass(frozen=True, eq=False)
class Intervals(Tally):
    """How often intervals [low, high] hold y, and how wide they are, of data that come in parts.

    >>> tally = Intervals.of(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 3.0]), torch.tensor([0.5, 4.0]), level=0.5)
    >>> tally.coverage, tally.mean_width, tally.interval_score
    (tensor(0.5000, dtype=torch.float64), tensor(2., dtype=torch.float64), tensor(4., dtype=torch.float64))
    """

    holds: Mean
    width: Mean
    miss: Mean  # how far outside y lies
    level: float

    @classmethod
    def of(cls, low: Tensor, high: Tensor, y: Tensor, *, level: float = 0.95) -> Self:
        """Of ends and targets of one shape; an end may be infinite. Only `interval_score` asks for the level."""
        between("level", level)
        width = _widths(low, high)
        lower, upper, target = numbers(infinite=True, low=low, high=high, y=y)
        numbers(y=y)
        return cls(
            holds=Mean.of((lower <= target) & (target <= upper)),
            width=Mean.of(width),
            miss=Mean.of((lower - target).clamp_min(0) + (target - upper).clamp_min(0)),
            level=level,
        )

    @property
    def count(self) -> int:
        return int(self.holds.count)

    @property
    def coverage(self) -> Tensor:
        return self.holds.value

    @property
    def mean_width(self) -> Tensor:
        return self.width.value

    @property
    def interval_score(self) -> Tensor:
        return self.width.value + 2 / (1 - self.level) * self.miss.value


@dataclass(frozen=True, eq=False)
class Widths(Tally):
    """How wide intervals are, whatever y, of data that come in parts.

    >>> (Widths.of(torch.tensor([0.0]), torch.tensor([1.0])) + Widths.of(torch.zeros(1), torch.ones(1) * 3)).mean_width
    tensor(2., dtype=torch.float64)
    """

    width: Mean

    @classmethod
    def of(cls, low: Tensor, high: Tensor) -> Self:
        """Of ends of one shape; an end may be infinite."""
        return cls(Mean.of(_widths(low, high)))

    @property
    def count(self) -> int:
        return int(self.width.count)

    @property
    def mean_width(self) -> Tensor:
        return self.width.value


@dataclass(frozen=True, eq=False)
class Quantiles(Tally):
    """The pinball loss of a predicted quantile, of data that come in parts.

    >>> Quantiles.of(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 3.0]), q=0.9).pinball
    tensor(0.9500, dtype=torch.float64)
    """

    loss: Mean
    q: float

    @classmethod
    def of(cls, quantile: Tensor, y: Tensor, *, q: float) -> Self:
        """Of the predicted q-quantile and targets of one shape."""
        between("q", q)
        at, target = numbers(quantile=quantile, y=y)
        gap = at - target
        return cls(Mean.of(torch.where(gap >= 0, (1 - q) * gap, -q * gap)), q)

    @property
    def count(self) -> int:
        return int(self.loss.count)

    @property
    def pinball(self) -> Tensor:
        return self.loss.value


@dataclass(frozen=True, eq=False)
class SampleScores(Tally):
    """The CRPS of samples, of data that come in parts.

    >>> SampleScores.of(torch.tensor([[0.0], [1.0]]), torch.tensor([0.0])).crps
    tensor(0.2500, dtype=torch.float64)
    """

    ranked: Mean

    @classmethod
    def of(cls, samples: Tensor, y: Tensor) -> Self:
        """Of samples (B, *) and targets (*): the law of y is that of the B samples, each with weight 1/B."""
        tensors(samples=samples, y=y)
        if samples.shape[1:] != y.shape or samples.dim() == 0:
            raise ValueError(
                f"samples has shape {tuple(samples.shape)} and y {tuple(y.shape)}; expected (B, *) and (*): reshape "
                "one of them, since (N,) and (N, 1) do not pair up"
            )
        if len(samples) == 0:
            raise ValueError(f"samples has shape {tuple(samples.shape)}; expected at least one replicate")
        (drawn,), (target,) = numbers(samples=samples), numbers(y=y)
        drawn, target = drawn.view(len(samples), len(target)), target.to(drawn.device)  # (B, N), (N,)
        width = max(1, HELD // len(drawn))
        parts = zip(torch.split(drawn, width, dim=1), torch.split(target, width), strict=True)
        return cls(Mean.of(torch.cat([_ranked(x, to) for x, to in parts])))

    @property
    def count(self) -> int:
        return int(self.ranked.count)

    @property
    def crps(self) -> Tensor:
        return self.ranked.value


def coverage(low: Tensor, high: Tensor, y: Tensor) -> Tensor:
    """mean of 1[low ≤ y ≤ high].

    >>> coverage(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0]))
    tensor(0.5000, dtype=torch.float64)
    """
    return Intervals.of(low, high, y).coverage


def mean_width(low: Tensor, high: Tensor) -> Tensor:
    """mean of high − low.

    >>> mean_width(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 3.0]))
    tensor(2., dtype=torch.float64)
    """
    return Widths.of(low, high).mean_width


def pinball(quantile: Tensor, y: Tensor, *, q: float) -> Tensor:
    """mean of (1[y ≤ a] − q)(a − y): the loss whose minimum is the q-quantile a.

    >>> pinball(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 3.0]), q=0.9)
    tensor(0.9500, dtype=torch.float64)
    """
    return Quantiles.of(quantile, y, q=q).pinball


def interval_score(low: Tensor, high: Tensor, y: Tensor, *, level: float) -> Tensor:
    """mean of u − l + 2/(1 − p) · (max(0, l − y) + max(0, y − u)), for central intervals [l, u] of level p.

    >>> interval_score(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([2.0]), level=0.5)
    tensor(5., dtype=torch.float64)
    """
    return Intervals.of(low, high, y, level=level).interval_score


def crps_samples(samples: Tensor, y: Tensor) -> Tensor:
    """mean of 1/B Σ_b |x_b − y| − 1/(2B²) Σ_b Σ_b′ |x_b − x_b′|: samples (B, *), y (*).

    >>> crps_samples(torch.tensor([[0.0], [1.0]]), torch.tensor([0.0]))
    tensor(0.2500, dtype=torch.float64)
    """
    return SampleScores.of(samples, y).crps


def _ranked(samples: Tensor, y: Tensor) -> Tensor:
    """CRPS of samples (B, N) at y (N,): 2/B² Σ_b (x_(b) − y)(B 1[y < x_(b)] − b + ½) over sorted samples: (N,).

    No sum over pairs, and no cancellation.
    """
    B = len(samples)
    gap = (samples - y).sort(0).values
    rank = torch.arange(B, device=gap.device, dtype=torch.float64) + 0.5
    weight = torch.where(gap > 0, B, 0.0) - rank[:, None]
    return 2 / B**2 * (weight * gap).sum(0)


def _widths(low: Tensor, high: Tensor) -> Tensor:
    """u − l ≥ 0: (N,)."""
    lower, upper = numbers(infinite=True, low=low, high=high)
    width = upper - lower
    wrong = int((~(width >= 0)).sum())
    if wrong:
        raise ValueError(
            f"low is above high, or both are the same infinity, for {wrong} of {len(width)} inputs; expected "
            "low ≤ high: swap them"
        )
    return width
