"""Summary statistics of the confidence bands of one method in one cell (function, noise, width, n) of `validity`.

    r = Σ cov(s, t) / √(Σ var(s) · Σ cov(t₁, t₂)),   s: std of the band over x,   t: std of a true bootstrap

with sums over datasets. t₁ and t₂ come from two halves of the nets of the true bootstrap, whose noise is independent,
so that few nets do not bias the likeness r. For a fair comparison of widths, the band of the true bootstrap is scaled
by a quantile of |m(x) − f(x)|/t(x) to the coverage of the method. The std of K nets is noisy and on average c₄(K) times
too small; Student's quantile and c₄ correct for that.

The ideal band m(x) ± z σ(x), with σ the std of the fitted function over datasets, is the upper limit. It is the same
for all datasets, so that

    r ≤ √(mean of cov(t, t′) over pairs of datasets / mean of cov(t₁, t₂) over datasets)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from neuboots_paper.studies.validity_curves import LEVEL, Z, is_inside
from neuboots_paper.study import Rows

Row = Mapping[str, Any]
Estimate = tuple[float, float]  # a value and its standard error
CELL = ("function", "noise", "width", "n")
IDEAL = "ideal: the curve's own std over data sets"


@dataclass(frozen=True, eq=False)
class BandSummary:
    """Bands of one method in one cell, over all datasets.

    Args:
        method: Name of the method.
        rows: Rows of its jobs.
        true: Row of the true bootstrap in the same cell.
    """

    method: str
    rows: Sequence[Row]
    true: Row | None

    @property
    def function(self) -> str:
        """Name of the regression function."""
        return str(self.rows[0]["function"])

    @property
    def cell(self) -> tuple[Any, ...]:
        """Function, noise, width and n."""
        return tuple(self.rows[0][key] for key in CELL)

    @property
    def sets(self) -> int:
        """Number of datasets."""
        return sum(row["sets"] for row in self.rows)

    @cached_property
    def x(self) -> Tensor:
        """Grid of inputs: (N,)."""
        return torch.linspace(-1.9, 1.9, len(self.rows[0]["held"]))

    @cached_property
    def inside(self) -> Tensor:
        """Whether each x is inside the data: (N,)."""
        return is_inside(self.function, self.x)

    @cached_property
    def rate(self) -> Tensor:
        """Coverage at each x: (N,)."""
        return torch.tensor([row["held"] for row in self.rows], dtype=torch.float64).sum(0) / self.sets

    def _mean(self, key: str) -> Tensor:
        """Mean of a column over datasets: (N,)."""
        weights = torch.tensor([row["sets"] for row in self.rows], dtype=torch.float64) / self.sets
        return weights @ torch.tensor([row[key] for row in self.rows], dtype=torch.float64)

    @property
    def coverage(self) -> float:
        """Mean coverage inside the data."""
        return float(self.rate[self.inside].mean())

    @property
    def coverage_error(self) -> float:
        """Standard error of the coverage over jobs; with one job, as if a band missed at all x or at none."""
        parts = [float(torch.tensor(row["held"])[self.inside].double().mean()) / row["sets"] for row in self.rows]
        if len(parts) > 1:
            return float(torch.tensor(parts).std()) / math.sqrt(len(parts))
        return binomial_error(self.coverage, self.sets)

    @property
    def worst(self) -> tuple[float, float]:
        """Minimum coverage inside the data, and its x."""
        place = int(self.rate.where(self.inside, 2.0).argmin())
        return float(self.rate[place]), float(self.x[place])

    @property
    def gap_coverage(self) -> float | None:
        """Mean coverage in the gap of the data, if there is one."""
        return float(self.rate[~self.inside].mean()) if bool((~self.inside).any()) else None

    @property
    def std(self) -> float:
        """Mean standard deviation of the band inside the data."""
        return float(self._mean("std")[self.inside].mean())

    @cached_property
    def curve_std(self) -> Tensor:
        """Standard deviation of the fitted function over datasets: (N,)."""
        return (self._mean("square") - self._mean("error").square()).clamp_min(1e-12).sqrt()

    @cached_property
    def curve_bias(self) -> Tensor:
        """Mean error of the fitted function, in its standard deviations: (N,)."""
        return self._mean("error") / self.curve_std

    @property
    def mean_curve_std(self) -> float:
        """Mean standard deviation of the fitted function inside the data."""
        return float(self.curve_std[self.inside].mean())

    @property
    def bias(self) -> float:
        """Maximum bias of the fitted function inside the data, in its standard deviations."""
        return float(self.curve_bias[self.inside].abs().max())

    @property
    def ideal(self) -> "BandSummary":
        """The band of the fitted function's own standard deviation; its coverage assumes a Gaussian error."""
        upper, lower = (torch.special.ndtr(side * Z - self.curve_bias) for side in (1.0, -1.0))
        row = {key: self.rows[0][key] for key in (*CELL, "seed")} | {
            "sets": self.sets,
            "held": ((upper - lower) * self.sets).tolist(),
            "error": self._mean("error").tolist(),
            "square": self._mean("square").tolist(),
            "std": self.curve_std.tolist(),
            "stds": [],
        }
        return BandSummary(IDEAL, [row], self.true)

    # -- comparison with the true bootstrap ----------------------------------------------------------

    @cached_property
    def _true_stds(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Standard deviations of the true bootstrap and of its halves, corrected for few nets: (R, N) each."""
        if self.true is None:
            return None
        nets, (even, odd) = self.true["members"], self.true["halves"]
        stds = ((self.true["stds"], nets), (even, (nets + 1) // 2), (odd, nets // 2))
        whole, *halves = (torch.tensor(std, dtype=torch.float64)[:, self.inside] / c4(count) for std, count in stds)
        return whole, halves[0], halves[1]

    @property
    def likeness(self) -> Estimate | None:
        """The likeness r; None where the halves of the true bootstrap do not agree on how its spread varies with x."""
        kept = [stds for row in sorted(self.rows, key=lambda row: row["seed"]) for stds in row["stds"]]
        if self._true_stds is None or not kept:
            return None
        count = min(len(kept), len(self._true_stds[0]))
        band = torch.tensor(kept[:count], dtype=torch.float64)[:, self.inside]
        return jackknife(_correlation, band, *(stds[:count] for stds in self._true_stds))

    @property
    def max_likeness(self) -> Estimate | None:
        """Maximum r of a band that is the same for all datasets."""
        return None if self._true_stds is None else jackknife(_shared_fraction, *self._true_stds)

    @property
    def relative_width(self) -> Estimate | None:
        """Mean width over that of the true bootstrap's band scaled to the same coverage."""
        if self.true is None or self._true_stds is None:
            return None
        away = torch.tensor(self.true["away"], dtype=torch.float64)[:, self.inside]
        level = min(self.coverage, 1.0 - 0.5 / away.numel())  # full coverage has no finite quantile
        noise = student_quantile(level, self.true["members"]) / student_quantile(level)

        def ratio(away: Tensor, spread: Tensor) -> float:
            scale = float(away.flatten().quantile(level)) / (noise * Z)
            return self.std / (scale * float(spread.mean()))

        return jackknife(ratio, away, self._true_stds[0])


def _center(*parts: Tensor) -> list[Tensor]:
    """Subtract the means over x; variation within rounding becomes zero."""
    centered = [part - part.mean(1, keepdim=True) for part in parts]
    return [c.where(c.abs() > 1e-12 * part.abs().max(), 0.0) for c, part in zip(centered, parts, strict=True)]


def _correlation(band: Tensor, true: Tensor, even: Tensor, odd: Tensor) -> float:
    band, true, even, odd = _center(band, true, even, odd)
    size = float(band.square().sum()) * float((even * odd).sum())
    return float((band * true).sum()) / math.sqrt(size) if size > 0 else math.nan


def _shared_fraction(true: Tensor, even: Tensor, odd: Tensor) -> float:
    """√(covariance over x between datasets / variance over x within one), signed, so that its noise has mean zero."""
    true, even, odd = _center(true, even, odd)
    sets, within = len(true), float((even * odd).sum()) / len(true)
    between = float(true.sum(0).square().sum() - true.square().sum()) / (sets * max(1, sets - 1))
    return math.copysign(math.sqrt(abs(between) / within), between) if within > 0 else math.nan


def c4(count: int) -> float:
    """E s / σ of the standard deviation s of `count` Gaussian numbers.

    Example:
        >>> round(c4(2), 4), round(c4(10), 4)
        (0.7979, 0.9727)
    """
    return math.sqrt(2 / (count - 1)) * math.exp(math.lgamma(count / 2) - math.lgamma((count - 1) / 2))


def student_quantile(level: float, count: int | None = None) -> float:
    """Half-width of an interval in standard deviations of `count` numbers; None for the normal quantile.

    Example:
        >>> round(student_quantile(0.95), 2), round(student_quantile(0.95, 10), 2)
        (1.96, 2.26)
    """
    from scipy import stats

    distribution = stats.norm if count is None else stats.t(count - 1)
    return float(distribution.ppf((1 + level) / 2))


def jackknife(statistic: Callable[..., float], *parts: Tensor) -> Estimate | None:
    """A statistic and its jackknife error √((R − 1)/R Σ_r (value without row r − mean)²); None if it is not finite.

    Example:
        >>> jackknife(lambda values: float(values.mean()), torch.tensor([1.0, 2.0, 3.0]))
        (2.0, 0.5773502691896257)
    """
    value, count = statistic(*parts), len(parts[0])
    if not math.isfinite(value):
        return None
    if count < 2:
        return value, math.nan
    each = [statistic(*(torch.cat([part[:r], part[r + 1 :]]) for part in parts)) for r in range(count)]
    values = torch.tensor(each, dtype=torch.float64)
    return value, math.sqrt((count - 1) / count * float((values - values.mean()).square().sum()))


def binomial_error(rate: float, count: int) -> float:
    """Standard error of a proportion."""
    return math.sqrt(max(0.0, rate * (1.0 - rate)) / count)


def summarize(rows: Rows) -> dict[tuple[Any, ...], dict[str, BandSummary]]:
    """Summaries by cell, then by method, including the true bootstrap."""
    true = {tuple(row[key] for key in CELL): _with_student_coverage(row) for row in rows.get("true", [])}
    groups: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in [*rows["bands"], *true.values()]:
        groups.setdefault(tuple(row[key] for key in CELL), {}).setdefault(row["method"], []).append(row)
    return {
        cell: {method: BandSummary(method, mine, true.get(cell)) for method, mine in methods.items()}
        for cell, methods in groups.items()
    }


def _with_student_coverage(row: Row) -> Row:
    """Row of a true bootstrap whose band has Student's quantile for its number of nets."""
    held = torch.tensor(row["away"], dtype=torch.float64) <= student_quantile(LEVEL, row["members"])
    return {**row, "held": held.sum(0).tolist()}


def summarize_regressor(rows: Rows) -> list[BandSummary]:
    """Summaries of the bands of the estimator, by function, noise, n and band."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows.get("regressor", []):
        groups.setdefault((row["function"], row["noise"], row["n"], row["method"]), []).append(row)
    return [BandSummary(key[-1], mine, None) for key, mine in groups.items()]
