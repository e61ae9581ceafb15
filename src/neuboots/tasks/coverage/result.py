"""What the check found: coverage by x, and why a band misses.

A band misses for one of two reasons, and both are measured: the estimator lies beside f on average (bias), or the band
is of another size than the estimator's own scatter over data sets (size = band's standard deviation / estimator's, 1 is
right).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from neuboots.prediction import IntervalKind
from neuboots.tasks.common import table

_SHOWN = 9  # inputs in the printed table


@dataclass(frozen=True, eq=False)
class Band:
    """The band of one data set on the grid, (N,) each, and that data set: (n, d), (n,)."""

    mean: Tensor
    low: Tensor
    high: Tensor
    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class Coverage:
    """What `coverage` found at the N inputs of the grid, over R data sets; `print` shows it as a table."""

    x: Tensor  # (N, d)
    truth: Tensor  # f(x): (N,)
    covered: Tensor  # whether band r holds f(x): (R, N)
    width: Tensor  # mean width of the band: (N,)
    bias: Tensor  # mean of the estimator less f: (N,)
    estimator_std: Tensor  # of the estimator, the mean of the replicates, over data sets: (N,)
    band_std: Tensor  # of the replicates, root mean square over data sets: (N,)
    fit_seconds: Tensor  # (R,)
    predict_seconds: Tensor  # (R,)
    bands: tuple[Band, ...]  # of the first few data sets
    name: str  # of the function
    level: float
    kind: IntervalKind
    n: int
    num_samples: int  # B, or the number of different replicates where that is smaller
    seed: int

    @property
    def num_sets(self) -> int:
        return len(self.covered)

    @property
    def rate(self) -> Tensor:
        """The share of data sets whose band holds f(x): (N,)."""
        return self.covered.double().mean(0)

    @property
    def standard_error(self) -> float:
        """√(level (1 − level) / R): how far the rate at one x strays by chance, where the level is kept."""
        return math.sqrt(self.level * (1 - self.level) / self.num_sets)

    @property
    def mean(self) -> float:
        """The mean over x of the rate."""
        return float(self.rate.mean())

    @property
    def mean_standard_error(self) -> float:
        """Of the mean over x, from its scatter over data sets: neighbouring x are missed together."""
        return float(self.covered.double().mean(1).std()) / math.sqrt(self.num_sets)

    @property
    def worst(self) -> float:
        """The least rate over x."""
        return float(self.rate.min())

    @property
    def worst_by_chance(self) -> float:
        """The lowest rate that the worst of N inputs shows in 95 % of such checks or more, if the level is kept.

        The largest c/R with N · P(Binomial(R, level) < c) ≤ 0.05 (Bonferroni).
        """
        sets, tail = self.num_sets, 0.0
        for count in range(sets + 1):
            ways = math.lgamma(sets + 1) - math.lgamma(count + 1) - math.lgamma(sets - count + 1)
            tail += math.exp(ways + count * math.log(self.level) + (sets - count) * math.log1p(-self.level))
            if len(self.x) * tail > 0.05:
                return count / sets
        return 1.0

    @property
    def size(self) -> Tensor:
        """Standard deviation of the band over that of the estimator; 1 is right, less is too narrow: (N,).

        Infinite where the estimator is the same for all data sets.
        """
        return (self.band_std / self.estimator_std).where(self.estimator_std > 0, math.inf)

    @property
    def mean_size(self) -> float:
        """The same of the mean variances over x."""
        band, estimator = float(self.band_std.square().mean()), float(self.estimator_std.square().mean())
        return math.sqrt(band / estimator) if estimator > 0 else math.inf

    @property
    def figures(self) -> dict[str, float]:
        """The overall figures by name; the bias is root mean square over x, times are medians over data sets."""
        return {
            "coverage": self.mean,
            "standard error": self.mean_standard_error,
            "worst x": self.worst,
            "worst x by chance": self.worst_by_chance,
            "width": float(self.width.mean()),
            "rms bias": float(self.bias.square().mean().sqrt()),
            "size of band": self.mean_size,
            "seconds to fit": float(self.fit_seconds.median()),
            "seconds to predict": float(self.predict_seconds.median()),
        }

    def __str__(self) -> str:
        header = (
            f"{self.name or 'function'}: {self.num_sets} data sets of n = {self.n}, {100 * self.level:g} % bands "
            f"({self.kind}) of B = {self.num_samples} replicates at {len(self.x)} inputs, seed {self.seed}"
        )
        overall = table([{"figure": name, "value": value} for name, value in self.figures.items()])
        shown = torch.linspace(0, len(self.x) - 1, min(_SHOWN, len(self.x))).round().int()
        rows = [
            {
                "x": " ".join(f"{value:.3g}" for value in self.x[i].tolist()),
                "f(x)": float(self.truth[i]),
                "coverage": float(self.rate[i]),
                "width": float(self.width[i]),
                "bias": float(self.bias[i]),
                "size of band": float(self.size[i]),
            }
            for i in shown.tolist()
        ]
        note = f"at one x the coverage has a standard error of {self.standard_error:.2g}"
        return f"{header}\n{overall}\n\n{table(rows)}\n{note}"
