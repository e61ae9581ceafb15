"""What the rows of many bands say of a method in a cell: coverage, width, and likeness to a true bootstrap.

    r = Σ cov(s, t) / √(Σ var(s) · Σ cov(t₁, t₂)),   s the band's standard deviation over x, t the true bootstrap's

with sums over data sets; t₁ and t₂ come from two halves of the true bootstrap's nets, whose noise is independent, so
that r is not lowered by there being few of them. The true bootstrap's band is also scaled, by the quantile of
|m(x) − f(x)|/t(x), to the coverage that the method has: a fair comparison of widths. A t of K nets is noisy and, in the
mean, c₄(K) times too small: Student's quantile and c₄ make up for that, as if there were very many.

What can be asked of a band at all is said by the ideal one, m(x) ± z σ(x) with σ the standard deviation of the fitted
curve over data sets, which nobody knows who has but one. It is the same for all data sets, and then

    r ≤ √(mean of cov(t, t′) over pairs of data sets / mean of cov(t₁, t₂) over data sets)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from neuboots.experiments.study import Rows
from neuboots.experiments.validity_curves import LEVEL, Z, inside

Row = Mapping[str, Any]
CELL = ("function", "noise", "width", "n")
IDEAL = "ideal: the curve's own std over data sets"


@dataclass(frozen=True, eq=False)
class Found:
    """A method in a cell, over all its data sets."""

    method: str
    rows: Sequence[Row]  # of its parts
    true: Row | None  # of the true bootstrap in the same cell

    @property
    def function(self) -> str:
        return str(self.rows[0]["function"])

    @property
    def cell(self) -> tuple[Any, ...]:
        return tuple(self.rows[0][key] for key in CELL)

    @property
    def sets(self) -> int:
        return sum(row["sets"] for row in self.rows)

    @cached_property
    def x(self) -> Tensor:
        return torch.linspace(-1.9, 1.9, len(self.rows[0]["held"]))

    @cached_property
    def inside(self) -> Tensor:
        return inside(self.function, self.x)

    @cached_property
    def rate(self) -> Tensor:
        """The share of data sets whose band holds f(x): (N,)."""
        return torch.tensor([row["held"] for row in self.rows], dtype=torch.float64).sum(0) / self.sets

    def _mean(self, key: str) -> Tensor:
        """The mean over data sets of a figure that parts have the mean of: (N,)."""
        weights = torch.tensor([row["sets"] for row in self.rows], dtype=torch.float64) / self.sets
        return weights @ torch.tensor([row[key] for row in self.rows], dtype=torch.float64)

    @property
    def coverage(self) -> float:
        return float(self.rate[self.inside].mean())

    @property
    def coverage_error(self) -> float:
        """From the scatter over parts where there are several, else as if a curve missed at all x or at none."""
        parts = [float(torch.tensor(row["held"])[self.inside].double().mean()) / row["sets"] for row in self.rows]
        if len(parts) > 1:
            return float(torch.tensor(parts).std()) / math.sqrt(len(parts))
        return binomial_error(self.coverage, self.sets)

    @property
    def worst(self) -> tuple[float, float]:
        """(least rate inside the data, its x)."""
        place = int(self.rate.where(self.inside, 2.0).argmin())
        return float(self.rate[place]), float(self.x[place])

    @property
    def in_gap(self) -> float | None:
        return float(self.rate[~self.inside].mean()) if bool((~self.inside).any()) else None

    @property
    def std(self) -> float:
        """The mean standard deviation of the band inside the data."""
        return float(self._mean("std")[self.inside].mean())

    @cached_property
    def curve_std(self) -> Tensor:
        """The standard deviation of the fitted curve over data sets: (N,)."""
        return (self._mean("square") - self._mean("error").square()).clamp_min(1e-12).sqrt()

    @cached_property
    def curve_bias(self) -> Tensor:
        """The mean error of the fitted curve, in its standard deviations: (N,)."""
        return self._mean("error") / self.curve_std

    @property
    def size(self) -> float:
        """The mean standard deviation of the band against that of the curve."""
        return self.std / float(self.curve_std[self.inside].mean())

    @property
    def bias(self) -> float:
        """The largest bias of the curve inside the data, in its standard deviations."""
        return float(self.curve_bias[self.inside].abs().max())

    @property
    def ideal(self) -> "Found":
        """The band of the curve's own standard deviation, which a Gaussian error of this bias leaves now and then."""
        upper, lower = (torch.special.ndtr(side * Z - self.curve_bias) for side in (1.0, -1.0))
        row = {key: self.rows[0][key] for key in ("function", "noise", "width", "n", "seed")} | {
            "sets": self.sets,
            "held": ((upper - lower) * self.sets).tolist(),
            "error": self._mean("error").tolist(),
            "square": self._mean("square").tolist(),
            "std": self.curve_std.tolist(),
            "stds": [],
        }
        return Found(IDEAL, [row], self.true)

    # -- beside the true bootstrap -------------------------------------------------------------------

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Standard deviations of the band, of the true bootstrap and of its halves, by data set: (R, N) each."""
        kept = [line for row in sorted(self.rows, key=lambda row: row["seed"]) for line in row["stds"]]
        if self._of_true is None or not kept:
            return None
        count = min(len(kept), len(self._of_true[0]))
        band = torch.tensor(kept[:count], dtype=torch.float64)[:, self.inside]
        whole, even, odd = (part[:count] for part in self._of_true)
        return band, whole, even, odd

    @cached_property
    def _of_true(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Standard deviations of the true bootstrap and of its halves, as of very many nets: (R, N) each."""
        if self.true is None:
            return None
        nets = self.true["members"]
        found = (
            (self.true["stds"], nets),
            (self.true["halves"][0], (nets + 1) // 2),
            (self.true["halves"][1], nets // 2),
        )
        whole, *halves = (torch.tensor(s, dtype=torch.float64)[:, self.inside] / c4(count) for s, count in found)
        return whole, halves[0], halves[1]

    @property
    def likeness(self) -> tuple[float, float] | None:
        """(r, its standard error over data sets by the jackknife); None where halves of the true nets do not agree on
        how their spread varies with x."""
        if self._pairs is None:
            return None
        return jackknife(_correlation, *self._pairs)

    @property
    def most_alike(self) -> tuple[float, float] | None:
        """(the largest r of a band that is the same for all data sets, its standard error)."""
        return None if self._of_true is None else jackknife(_shared, *self._of_true)

    @property
    def relative_width(self) -> tuple[float, float] | None:
        """(mean width / that of the true bootstrap's band scaled to the same coverage, its standard error)."""
        if self.true is None:
            return None
        assert self._of_true is not None
        away = torch.tensor(self.true["away"], dtype=torch.float64)[:, self.inside]
        level = min(self.coverage, 1.0 - 0.5 / away.numel())  # where all is held, so many more would be needed
        noise = student(level, self.true["members"]) / student(level)

        def ratio(away: Tensor, spread: Tensor) -> float:
            scale = float(away.flatten().quantile(level)) / (noise * Z)
            return self.std / (scale * float(spread.mean()))

        return jackknife(ratio, away, self._of_true[0])


def _centred(*parts: Tensor) -> list[Tensor]:
    """Less their means over x; what does not vary beyond rounding is zero."""
    found = [part - part.mean(1, keepdim=True) for part in parts]
    return [part.where(part.abs() > 1e-12 * whole.abs().max(), 0.0) for part, whole in zip(found, parts, strict=True)]


def _correlation(band: Tensor, true: Tensor, even: Tensor, odd: Tensor) -> float:
    band, true, even, odd = _centred(band, true, even, odd)
    size = float(band.square().sum()) * float((even * odd).sum())
    return float((band * true).sum()) / math.sqrt(size) if size > 0 else math.nan


def _shared(true: Tensor, even: Tensor, odd: Tensor) -> float:
    """√(covariance over x between data sets / the variance over x within one): 1 if all have one shape.

    With its sign, since a share that is nothing comes out below it as often as above.
    """
    true, even, odd = _centred(true, even, odd)
    sets, within = len(true), float((even * odd).sum()) / len(true)
    between = float(true.sum(0).square().sum() - true.square().sum()) / (sets * max(1, sets - 1))
    return math.copysign(math.sqrt(abs(between) / within), between) if within > 0 else math.nan


def c4(count: int) -> float:
    """E s / σ of the standard deviation s of so many Gaussian numbers.

    >>> round(c4(2), 4), round(c4(10), 4)
    (0.7979, 0.9727)
    """
    return math.sqrt(2 / (count - 1)) * math.exp(math.lgamma(count / 2) - math.lgamma((count - 1) / 2))


def student(level: float, count: int | None = None) -> float:
    """The half-width of a band of this level in standard deviations of so many numbers; None: of very many.

    >>> round(student(0.95), 2), round(student(0.95, 10), 2)
    (1.96, 2.26)
    """
    from scipy import stats

    law = stats.norm if count is None else stats.t(count - 1)
    return float(law.ppf((1 + level) / 2))


def jackknife(figure: Callable[..., float], *parts: Tensor) -> tuple[float, float] | None:
    """(figure, √((R − 1)/R Σ_r (figure without row r − mean)²)), over the R rows of all parts; None if it is no number.

    >>> jackknife(lambda values: float(values.mean()), torch.tensor([1.0, 2.0, 3.0]))
    (2.0, 0.5773502691896257)
    """
    whole, count = figure(*parts), len(parts[0])
    if not math.isfinite(whole):
        return None
    if count < 2:
        return whole, math.nan
    each = [figure(*(torch.cat([part[:r], part[r + 1 :]]) for part in parts)) for r in range(count)]
    values = torch.tensor(each, dtype=torch.float64)
    return whole, math.sqrt((count - 1) / count * float((values - values.mean()).square().sum()))


def binomial_error(rate: float, sets: int) -> float:
    return math.sqrt(max(0.0, rate * (1.0 - rate)) / sets)


def summaries(rows: Rows) -> dict[tuple[Any, ...], dict[str, Found]]:
    """By cell, then by method; the true bootstrap among them."""
    true = {tuple(row[key] for key in CELL): _by_student(row) for row in rows.get("true", [])}
    parts: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in [*rows["bands"], *true.values()]:
        parts.setdefault(tuple(row[key] for key in CELL), {}).setdefault(row["method"], []).append(row)
    return {
        cell: {method: Found(method, found, true.get(cell)) for method, found in methods.items()}
        for cell, methods in parts.items()
    }


def _by_student(row: Row) -> Row:
    """The row of a true bootstrap, its band with the quantile that its number of nets asks for."""
    held = torch.tensor(row["away"], dtype=torch.float64) <= student(LEVEL, row["members"])
    return {**row, "held": held.sum(0).tolist()}
