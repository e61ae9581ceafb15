"""Intervals that hold a new y at least as often as they say.

    absolute      s(x, y) = |y − m(x)|
    normalised    s(x, y) = |y − m(x)| / s(x),   s² the variance over replicates (and the noise of a Gaussian head)
    quantile      s(x, y) = max(l(x) − y, y − h(x)),   l and h the (1 ± level)/2 quantiles of the replicates

Lei, G'Sell, Rinaldo, Tibshirani and Wasserman, Distribution-free predictive inference for regression, JASA 2018
(absolute, normalised); Romano, Patterson and Candès, Conformalized quantile regression, NeurIPS 2019 (quantile).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from neuboots.metrics import Intervals
from neuboots.prediction import Predictor
from neuboots.regression import split_gaussian
from neuboots.tasks.common import Rows, batches_of, inputs_of, part_of, table, targets_for
from neuboots.tasks.conformal.quantile import check_enough, check_options, config_of, quantile, restored

IntervalKind = Literal["absolute", "normalised", "quantile"]


class _Base(NamedTuple):
    """A band before calibration: [low − q · scale, high + q · scale] is the one after it; (N, C, *) each, float64."""

    low: Tensor
    high: Tensor
    scale: Tensor
    spread: Tensor  # the predicted standard deviation, whatever the kind

    def scores(self, y: Tensor) -> Tensor:
        """The q at which the band begins to hold y."""
        return torch.maximum(self.low - y, y - self.high) / self.scale

    def widened(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The band at q. Rounding goes outwards: a y whose score is q itself stays inside."""
        reach = q * self.scale
        slack = 4 * torch.finfo(reach.dtype).eps
        low = self.low - reach - slack * (self.low.abs() + reach.abs())
        high = self.high + reach + slack * (self.high.abs() + reach.abs())
        middle = (low + high) / 2  # a negative q may empty the band: its middle remains
        return torch.minimum(low, middle), torch.maximum(high, middle)


@dataclass(frozen=True, eq=False)
class IntervalsReport:
    """How intervals did on labelled data, for each of the C outputs, in the units of y.

    Bins hold about equally many rows, from the least to the largest predicted standard deviation; rows of the same one
    share a bin, and a bin may be empty (NaN).
    """

    level: float
    count: int
    coverage: Tensor  # (C,)
    mean_width: Tensor  # (C,)
    interval_score: Tensor  # (C,)
    bin_std: Tensor  # (C, num_bins), the mean predicted standard deviation
    bin_coverage: Tensor  # (C, num_bins)
    bin_count: Tensor  # (C, num_bins)

    def __str__(self) -> str:
        names = ("coverage", "mean_width", "interval_score")
        figures = [
            {"output": c} | {name: float(getattr(self, name)[c]) for name in names} for c in range(len(self.coverage))
        ]
        bins = [
            {"output": c, "predicted std": float(std), "coverage": float(share), "N": int(rows)}
            for c, columns in enumerate(zip(self.bin_std, self.bin_coverage, self.bin_count, strict=True))
            for std, share, rows in zip(*columns, strict=True)
            if rows
        ]
        return f"N = {self.count:,}, level {self.level:g}\n{table(figures)}\n\n{table(bins)}"


@dataclass(frozen=True)
class ConformalIntervals:
    """A predictor that answers with intervals; `conformal_intervals` makes one. But for the predictor, a few numbers.

    `config()` gives them for a JSON file, `restore(config, predictor)` takes them back.
    """

    predictor: Predictor
    quantiles: tuple[float, ...]  # one for each output
    level: float
    kind: IntervalKind
    noise_std: tuple[float, ...]  # σ, or one for each output
    gaussian: bool  # the net's outputs are k means, then k values of log σ²
    num_samples: int
    seed: int
    count: int  # calibration rows

    def predict(self, x: Any, *, batch_size: int = 256, progress: bool = True) -> tuple[Tensor, Tensor]:
        """(low, high), (N, C, *) each, in float64 and in the units of y."""
        parts = inputs_of(x, batch_size, title="intervals", progress=progress)
        bands = [self._band(self._base(part)) for part in parts] or [self._band(self._base(x))]
        lows, highs = zip(*bands, strict=True)
        return torch.cat(lows), torch.cat(highs)

    def evaluate(
        self, data: Rows, *, num_bins: int = 5, batch_size: int = 256, progress: bool = True
    ) -> IntervalsReport:
        """Coverage, width and interval score over labelled rows that were not used for calibration."""
        if num_bins < 1:
            raise ValueError(f"got num_bins={num_bins}; expected at least 1")
        tallies: list[Intervals] = []  # one for each output
        rows, kept = 0, []
        for x, y in batches_of(data, batch_size, title="evaluating intervals", progress=progress):
            base = self._base(x)
            target = _targets(base.low, y)
            low, high = self._band(base)
            columns = zip(_columns(low), _columns(high), _columns(target), strict=True)
            here = [Intervals.of(*column, level=self.level) for column in columns]
            tallies = [a + b for a, b in zip(tallies, here, strict=True)] if tallies else here
            inside = (low <= target) & (target <= high)
            kept.append(torch.stack([_columns(base.spread), _columns(inside).double()]).cpu())  # (2, C, rows)
            rows += len(target)
        bins = [_binned(spread, inside, num_bins) for spread, inside in torch.cat(kept, 2).movedim(1, 0)]
        bin_std, bin_coverage, bin_count = (torch.stack(parts) for parts in zip(*bins, strict=True))
        return IntervalsReport(
            level=self.level,
            count=rows,
            coverage=torch.stack([tally.coverage for tally in tallies]).cpu(),
            mean_width=torch.stack([tally.mean_width for tally in tallies]).cpu(),
            interval_score=torch.stack([tally.interval_score for tally in tallies]).cpu(),
            bin_std=bin_std,
            bin_coverage=bin_coverage,
            bin_count=bin_count,
        )

    def config(self) -> dict[str, Any]:
        """Everything but the predictor, as JSON."""
        return config_of(self)

    @classmethod
    def restore(cls, config: dict[str, Any], predictor: Predictor) -> "ConformalIntervals":
        """The intervals that `config` describes, around their predictor."""
        return cls(predictor, **restored(config))

    def _base(self, x: Any) -> _Base:
        mean, spread, low, high = self._figures(x)
        if not bool(torch.isfinite(mean).all() & torch.isfinite(spread).all()):
            raise ValueError("the predictor gives NaN or infinite outputs; expected finite numbers: check the net")
        if self.kind != "normalised":
            return _Base(low, high, torch.ones_like(mean), spread)
        if not bool((spread > 0).all()):
            raise ValueError(
                "the replicates are all the same at some inputs, and nothing can be divided by a spread of none; "
                "expected a method whose replicates differ: give noise_std, or use kind='absolute'"
            )
        return _Base(low, high, spread, spread)

    def _figures(self, x: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean, predicted standard deviation, and both ends before calibration."""
        sigma = torch.tensor(self.noise_std)
        if self.gaussian:  # the mean of exp(log σ²) over replicates is not among the figures of a Summary
            band, noise = split_gaussian(self.predictor.predict(x, self.num_samples, seed=self.seed))
            mean, spread = band.mean.double(), torch.hypot(band.predictive_std(sigma), noise).double()
            return mean, spread, mean, mean
        ends = ((1 - self.level) / 2, (1 + self.level) / 2) if self.kind == "quantile" else ()
        summary = self.predictor.summarize(x, self.num_samples, seed=self.seed, quantiles=ends)
        mean, spread = summary.mean.double(), summary.predictive_std(sigma).double()
        low, high = [summary.quantile(q).double() for q in ends] if ends else [mean, mean]
        return mean, spread, low, high

    def _band(self, base: _Base) -> tuple[Tensor, Tensor]:
        q = torch.tensor(self.quantiles, dtype=torch.float64, device=base.low.device)
        if len(q) != base.low.shape[1]:
            raise ValueError(f"got {base.low.shape[1]} outputs; expected {len(q)}, as in calibration")
        return base.widened(q.view(-1, *[1] * (base.low.ndim - 2)))

    def __str__(self) -> str:
        lines = [{"output": c, "quantile": q} for c, q in enumerate(self.quantiles)]
        header = (
            f"{self.kind} intervals at level {self.level:g} from {self.count:,} calibration rows, "
            f"B = {self.num_samples}, seed {self.seed}"
        )
        return f"{header}\n{table(lines)}"


def conformal_intervals(
    predictor: Predictor,
    calibration: Rows,
    *,
    level: float = 0.9,
    kind: IntervalKind = "absolute",
    noise_std: Tensor | float = 0.0,
    num_samples: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = True,
) -> ConformalIntervals:
    """Intervals that hold a new y with probability ≥ `level`, from labelled rows that were not trained on.

    `absolute` intervals have one width everywhere. `normalised` ones are as wide as the predicted standard deviation
    says, times one factor: √(s² + σ²), with s that of the replicates and σ the noise, from a Gaussian head (twice as
    many outputs as targets) or given as `noise_std`, one number or one for each output; estimate it on other rows than
    these. Without any σ they are far too wide where the replicates differ most. `quantile` ones are the percentile band
    of the replicates, moved out (or in) by one number.

    Targets are (N,) or (N, C); each of several outputs has a quantile, and a guarantee, of its own.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import PlainPredictor
    >>> rng = torch.Generator().manual_seed(0)
    >>> x = torch.randn(2000, 1, generator=rng)
    >>> y = x + 0.5 * torch.randn(2000, 1, generator=rng)
    >>> net = PlainPredictor(torch.nn.Identity())  # the regression function itself, without replicates
    >>> rows = TensorDataset(x[:1000], y[:1000])
    >>> rule = conformal_intervals(net, rows, level=0.9, kind="absolute", num_samples=1, progress=False)
    >>> low, high = rule.predict(torch.zeros(1, 1), progress=False)
    >>> round(low.item(), 1), round(high.item(), 1)  # 0.5 · 1.645 on either side
    (-0.8, 0.8)
    >>> abs(rule.evaluate(TensorDataset(x[1000:], y[1000:]), progress=False).coverage.item() - 0.9) < 0.03
    True
    """
    check_options(predictor, level, kind, get_args(IntervalKind))
    sigma = torch.as_tensor(noise_std, dtype=torch.float64).flatten()
    if not bool(((sigma >= 0) & (sigma < math.inf)).all()):
        raise ValueError(f"got noise_std={noise_std}; expected standard deviations ≥ 0, in the units of y")
    rule = ConformalIntervals(predictor, (), level, kind, tuple(sigma.tolist()), False, num_samples, seed, 0)
    kept: list[Tensor] = []
    rows, pixels = 0, 0
    for x, y in batches_of(calibration, batch_size, title="calibrating intervals", progress=progress):
        if not kept:
            rule = replace(rule, gaussian=_is_gaussian(predictor, x, y, kind, seed))
        base = rule._base(x)
        scores = base.scores(_targets(base.low, y))
        if pixels not in (0, scores[0, 0].numel()):
            raise ValueError("got images of several sizes; expected one size, so that every image counts the same")
        rows, pixels = rows + len(scores), scores[0, 0].numel()
        kept.append(_columns(scores).cpu())  # (C, rows)
    check_enough(level, rows, pixels)
    return replace(rule, quantiles=tuple(quantile(column, level, rows) for column in torch.cat(kept, 1)), count=rows)


def _is_gaussian(predictor: Predictor, x: Any, y: Tensor, kind: IntervalKind, seed: int) -> bool:
    """Has the net twice as many outputs as there are targets?"""
    outputs = predictor.summarize(part_of(x, slice(0, 1)), 1, seed=seed).mean
    if outputs.numel() != 2 * y[:1].numel():
        return False
    if kind == "quantile":
        raise ValueError(
            "got kind='quantile' for a net with a Gaussian head; expected replicates of y's own units alone: use "
            "kind='normalised', which takes the head's noise in"
        )
    return True


def _targets(like: Tensor, y: Tensor) -> Tensor:
    y = targets_for(like, y)
    if not bool(torch.isfinite(y).all()):
        raise ValueError("got NaN or infinite targets; expected finite numbers: drop those rows")
    return y


def _columns(values: Tensor) -> Tensor:
    """(N, C, *) as (C, rows): pixels are rows of their own."""
    return values.movedim(1, 0).flatten(1)


def _binned(spread: Tensor, inside: Tensor, num_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean spread, coverage and rows in bins of about equally many rows: (num_bins,) each."""
    ranks = [math.ceil(len(spread) * k / num_bins) - 1 for k in range(1, num_bins)]
    edges = spread.sort().values[torch.tensor(ranks, dtype=torch.int64).clamp_min(0)]
    bins = torch.bucketize(spread, edges)  # ties share the first bin that takes them
    count = torch.bincount(bins, minlength=num_bins)
    sums = [torch.bincount(bins, weights=part, minlength=num_bins) for part in (spread, inside)]
    return sums[0] / count, sums[1] / count, count
