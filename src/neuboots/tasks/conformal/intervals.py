"""Intervals that hold a new y at least as often as they say.

    absolute      s(x, y) = |y − m(x)|
    normalised    s(x, y) = |y − m(x)| / s(x),   s² the variance over replicates (and the noise of a Gaussian head)
    quantile      s(x, y) = max(l(x) − y, y − h(x)),   l and h the (1 ± level)/2 quantiles of the replicates

Lei, G'Sell, Rinaldo, Tibshirani and Wasserman, Distribution-free predictive inference for regression, JASA 2018
(absolute, normalised); Romano, Patterson and Candès, Conformalized quantile regression, NeurIPS 2019 (quantile).
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from neuboots.metrics import Intervals
from neuboots.prediction import Predictor
from neuboots.regression import split_gaussian
from neuboots.tasks.common import Rows, batches_of, table, targets_for
from neuboots.tasks.conformal.quantile import (
    check_calibration_rows,
    check_options,
    config_of,
    per_row,
    quantile,
    restored,
    rounding,
)
from neuboots.tasks.inputs import Inputs, answers_to
from neuboots.tasks.regression import has_gaussian_head

BandKind = Literal["absolute", "normalised", "quantile"]


class _Base(NamedTuple):
    """A band before calibration: [low − q · scale, high + q · scale] is the one after it; (N, C, *) each, float64."""

    low: Tensor
    high: Tensor
    scale: Tensor
    spread: Tensor  # the predicted standard deviation, whatever the kind
    normalised: bool
    slack: float  # how far another batch may move outputs of size 1

    def scores(self, y: Tensor) -> Tensor:
        """The q at which the band begins to hold y."""
        return torch.maximum(self.low - y, y - self.high) / self.scale

    @property
    def size(self) -> Tensor:
        """Of the outputs that the band is made of."""
        return torch.maximum(self.low.abs(), self.high.abs()) + self.spread

    def moved(self, scores: Tensor) -> Tensor:
        """How far scores move where outputs of size 1 do: ends move by the slack, and so does a scale of replicates."""
        return self.slack * (1 + scores.abs() * self.normalised) / self.scale

    def widened(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The band at q. Rounding goes outwards: a y whose score is q itself stays inside."""
        reach = q * self.scale
        slack = 4 * torch.finfo(reach.dtype).eps
        low = self.low - reach - slack * (self.low.abs() + reach.abs())
        high = self.high + reach + slack * (self.high.abs() + reach.abs())
        middle = (low + high) / 2  # a negative q may empty the band: its middle remains
        return torch.minimum(low, middle), torch.maximum(high, middle)


class _Truth(NamedTuple):
    """Targets, and which of them count: (N, C, *) each."""

    y: Tensor
    counted: Tensor

    @classmethod
    def of(cls, like: Tensor, y: Tensor, void: float | None) -> "_Truth":
        target = targets_for(like, y)
        counted = torch.ones_like(target, dtype=torch.bool)
        if void is not None and math.isnan(void):
            counted = ~target.isnan()
        elif void is not None:
            counted = target != torch.tensor(void, dtype=y.dtype).to(target)  # as y's type rounds it
        if not bool(torch.isfinite(target[counted]).all()):
            raise ValueError(
                "got NaN or infinite targets; expected finite numbers: drop those rows, or name them (void)"
            )
        return cls(target.where(counted, 0.0), counted)

    def column(self, c: int, values: Tensor) -> Tensor:
        """What counts of (N, C, *) for output c, one row after another: (rows,)."""
        return values[:, c][self.counted[:, c]]


@dataclass(frozen=True, eq=False)
class IntervalsReport:
    """How intervals did on labelled data, for each of the C outputs, in the units of y.

    Bins hold about equally many rows, from the least to the largest predicted standard deviation; rows of the same one
    share a bin, and a bin may be empty (NaN).
    """

    level: float
    count: int
    coverage: Tensor  # (C,), of pixels the mean over images of the share of their pixels that are covered
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
    kind: BandKind
    noise_std: tuple[float, ...]  # σ, or one for each output
    gaussian: bool  # the net's outputs are k means, then k values of log σ²
    num_samples: int
    seed: int
    count: int  # calibration rows

    def predict(self, x: Inputs, *, batch_size: int = 256, progress: bool = True) -> tuple[Tensor, Tensor]:
        """(low, high), (N, C, *) each, in float64 and in the units of y.

        Inputs are a tensor (a tuple or dict of them), a data set, or a loader. An interval depends on the inputs around
        its own as far as the net rounds otherwise in another batch. The guarantee holds in batches of any size.
        """
        bands = answers_to(self._band_at, x, batch_size, title="intervals", progress=progress)
        lows, highs = zip(*bands, strict=True)
        return torch.cat(lows), torch.cat(highs)

    def evaluate(
        self,
        data: Rows,
        *,
        num_bins: int = 5,
        void: float | None = None,
        batch_size: int = 256,
        progress: bool = True,
    ) -> IntervalsReport:
        """Coverage, width and interval score over labelled rows that were not used for calibration.

        Targets that are `void` are passed over.
        """
        if num_bins < 1:
            raise ValueError(f"got num_bins={num_bins}; expected at least 1")
        tested = [_Tested(self.level) for _ in self.quantiles]
        rows = 0
        for x, y in batches_of(data, batch_size, title="evaluating intervals", progress=progress):
            base = self._base(x)
            truth = _Truth.of(base.low, y, void)
            low, high = self._band(base)
            for c, part in enumerate(tested):
                columns = [truth.column(c, values) for values in (low, high, truth.y, base.spread)]
                part.add(*columns, counts=per_row(truth.counted[:, c]))
            rows += int((per_row(truth.counted) > 0).sum())
        if not all(part.images for part in tested):
            raise ValueError(f"got an output whose targets are all void ({void}); expected some that count")
        bins = [part.bins(num_bins) for part in tested]
        bin_std, bin_coverage, bin_count = (torch.stack(parts) for parts in zip(*bins, strict=True))
        figures = [part.intervals for part in tested]
        return IntervalsReport(
            level=self.level,
            count=rows,
            coverage=torch.tensor([part.covered / part.images for part in tested], dtype=torch.float64),
            mean_width=torch.stack([tally.mean_width for tally in figures]).cpu(),
            interval_score=torch.stack([tally.interval_score for tally in figures]).cpu(),
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
        normalised, slack = self.kind == "normalised", rounding(mean.dtype)
        low, high, spread = low.double(), high.double(), spread.double()
        if normalised and not bool((spread > 0).all()):
            raise ValueError(
                "the replicates are all the same at some inputs, and nothing can be divided by a spread of none; "
                "expected a method whose replicates differ: give noise_std, or use kind='absolute'"
            )
        return _Base(low, high, spread if normalised else torch.ones_like(low), spread, normalised, slack)

    def _figures(self, x: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean, predicted standard deviation, and both ends before calibration, as the net rounds them."""
        sigma = torch.tensor(self.noise_std)
        if self.gaussian:  # the mean of exp(log σ²) over replicates is not among the figures of a Summary
            band, noise = split_gaussian(self.predictor.predict(x, self.num_samples, seed=self.seed))
            return band.mean, torch.hypot(band.predictive_std(sigma), noise), band.mean, band.mean
        ends = ((1 - self.level) / 2, (1 + self.level) / 2) if self.kind == "quantile" else ()
        summary = self.predictor.summarize(x, self.num_samples, seed=self.seed, quantiles=ends)
        low, high = [summary.quantile(q) for q in ends] if ends else [summary.mean, summary.mean]
        return summary.mean, summary.predictive_std(sigma), low, high

    def _band_at(self, x: Any) -> tuple[Tensor, Tensor]:
        return self._band(self._base(x))

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
    kind: BandKind = "absolute",
    noise_std: Tensor | float = 0.0,
    void: float | None = None,
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

    Targets are (N,) or (N, C); each of several outputs has a quantile, and a guarantee, of its own. Pixels (N, C, *)
    are covered as a share of an image: every image counts the same, whatever its size and however many of its targets
    are `void` (a number, or NaN), which are passed over; images that are all void do not count.

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
    check_options(predictor, level, kind, get_args(BandKind))
    sigma = torch.as_tensor(noise_std, dtype=torch.float64).flatten()
    if not bool(((sigma >= 0) & (sigma < math.inf)).all()):
        raise ValueError(f"got noise_std={noise_std}; expected standard deviations ≥ 0, in the units of y")
    rule = ConformalIntervals(predictor, (), level, kind, tuple(sigma.tolist()), False, num_samples, seed, 0)
    outputs: list[_Calibrated] = []
    rows = 0
    for x, y in batches_of(calibration, batch_size, title="calibrating intervals", progress=progress):
        if not outputs:
            rule = replace(rule, gaussian=_is_gaussian(predictor, x, y, kind, seed))
        base = rule._base(x)
        truth = _Truth.of(base.low, y, void)
        scores = base.scores(truth.y)
        outputs = outputs or [_Calibrated() for _ in range(scores.shape[1])]
        for c, output in enumerate(outputs):
            columns = [truth.column(c, values) for values in (scores, base.moved(scores), base.size)]
            output.add(*columns, counts=per_row(truth.counted[:, c]))
        rows += int((per_row(truth.counted) > 0).sum())
    return replace(rule, quantiles=tuple(output.quantile(level) for output in outputs), count=rows)


def _is_gaussian(predictor: Predictor, x: Any, y: Tensor, kind: BandKind, seed: int) -> bool:
    if not has_gaussian_head(predictor, x, y, seed=seed):
        return False
    if kind == "quantile":
        raise ValueError(
            "got kind='quantile' for a net with a Gaussian head; expected replicates of y's own units alone: use "
            "kind='normalised', which takes the head's noise in"
        )
    return True


@dataclass
class _Calibrated:
    """The scores of one output, batch by batch."""

    scores: list[Tensor] = field(default_factory=list)  # raised by what rounding moves an output of its own size
    moved: list[Tensor] = field(default_factory=list)  # and what it moves one of size 1
    counts: list[Tensor] = field(default_factory=list)
    size: float = 0.0
    number: int = 0

    def add(self, scores: Tensor, moved: Tensor, size: Tensor, *, counts: Tensor) -> None:
        self.scores.append((scores + moved * size).cpu())
        self.moved.append(moved.cpu())
        self.counts.append(counts)
        self.size, self.number = self.size + float(size.sum()), self.number + len(size)

    def quantile(self, level: float) -> float:
        """Of scores that are raised for the usual size too: a small output may be the difference of large numbers."""
        counts = torch.cat(self.counts)
        check_calibration_rows(level, int((counts > 0).sum()))
        return quantile(torch.cat(self.scores) + torch.cat(self.moved) * (self.size / self.number), counts, level)


@dataclass
class _Tested:
    """How the intervals of one output do, batch by batch."""

    level: float
    tallies: list[Intervals] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)  # (2, rows) each: the predicted spread, and is y inside?
    images: int = 0
    covered: float = 0.0  # Σ of the share of each image that is covered

    def add(self, low: Tensor, high: Tensor, y: Tensor, spread: Tensor, *, counts: Tensor) -> None:
        if len(y) == 0:
            return
        inside = ((low <= y) & (y <= high)).double()
        self.tallies.append(Intervals.of(low, high, y, level=self.level))
        self.kept.append(torch.stack([spread, inside]).cpu())
        self.images += int((counts > 0).sum())
        self.covered += float((inside.cpu() / counts.repeat_interleave(counts)).sum())

    @property
    def intervals(self) -> Intervals:
        return sum(self.tallies[1:], self.tallies[0])

    def bins(self, num_bins: int) -> tuple[Tensor, Tensor, Tensor]:
        spread, inside = torch.cat(self.kept, 1)
        return _binned(spread, inside, num_bins)


def _binned(spread: Tensor, inside: Tensor, num_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean spread, coverage and rows in bins of about equally many rows: (num_bins,) each."""
    ranks = [math.ceil(len(spread) * k / num_bins) - 1 for k in range(1, num_bins)]
    edges = spread.sort().values[torch.tensor(ranks, dtype=torch.int64).clamp_min(0)]
    bins = torch.bucketize(spread, edges)  # ties share the first bin that takes them
    count = torch.bincount(bins, minlength=num_bins)
    sums = [torch.bincount(bins, weights=part, minlength=num_bins) for part in (spread, inside)]
    return sums[0] / count, sums[1] / count, count
