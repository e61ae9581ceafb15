"""What B sampled outputs say: from samples in memory (`Prediction`), or gathered over a stream of them (`Summary`)."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from neuboots.prediction.probabilities import bytes_of, class_sums, entropy_of, in_parts, summary_chunk

IntervalKind = Literal["percentile", "normal"]


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and standard deviation of the outputs over infinitely many replicates: (N, C, *) each."""

    mean: Tensor
    std: Tensor


def std_of(samples: Tensor) -> Tensor:
    """Over the first axis, with B − 1 in the denominator; zero for a single one, and for none at all."""
    return samples.std(0) if len(samples) > 1 and samples.numel() else torch.zeros_like(samples[0])


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise ValueError(f"got level {level}; expected a number between 0 and 1, such as 0.95")


def _normal_interval(mean: Tensor, std: Tensor, level: float) -> tuple[Tensor, Tensor]:
    half = math.sqrt(2.0) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64))) * std
    return mean - half, mean + half


class _Figures:
    """What follows from mean, std, probs and expected entropy, by one formula for both holders."""

    if TYPE_CHECKING:  # each holder has these, as fields or as properties

        @property
        def mean(self) -> Tensor: ...
        @property
        def std(self) -> Tensor: ...
        @property
        def probs(self) -> Tensor: ...
        @property
        def expected_entropy(self) -> Tensor: ...
        def quantile(self, q: float) -> Tensor: ...

    @property
    def labels(self) -> Tensor:
        """argmax of the predictive probabilities: (N, *)."""
        return self.probs.argmax(1)

    @property
    def confidence(self) -> Tensor:
        """The largest predictive probability: (N, *)."""
        return self.probs.amax(1)

    @property
    def entropy(self) -> Tensor:
        """H(1/B Σ_b p_b): the total uncertainty, in nats: (N, *)."""
        return entropy_of(self.probs, 1)

    @property
    def mutual_information(self) -> Tensor:
        """H(1/B Σ_b p_b) − 1/B Σ_b H(p_b): how far the replicates disagree, in nats: (N, *)."""
        gap = self.entropy - self.expected_entropy
        rounding = 16 * torch.finfo(gap.dtype).eps * self.entropy.clamp_min(1)  # and not disagreement; NaN stays NaN
        return gap.masked_fill(gap <= rounding, 0.0)

    def interval(self, level: float = 0.95, *, kind: IntervalKind = "normal") -> tuple[Tensor, Tensor]:
        """The confidence band of the regression function: mean ± z·std, or percentiles of the replicates."""
        _check_level(level)
        if kind == "normal":
            return _normal_interval(self.mean, self.std, level)
        if kind != "percentile":
            raise ValueError(f"got kind={kind!r}; expected 'normal' or 'percentile'")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def prediction_interval(self, level: float = 0.95, *, noise_std: Tensor | float) -> tuple[Tensor, Tensor]:
        """Where a new y falls: mean ± z √(std² + σ²), with σ the standard deviation of the noise.

        `interval` is the band of the regression function; this one also holds the noise around it.
        `residual_std` estimates σ on held-out data; `split_gaussian` reads it off a Gaussian head.
        """
        _check_level(level)
        return _normal_interval(self.mean, self.predictive_std(noise_std), level)

    def predictive_std(self, noise_std: Tensor | float) -> Tensor:
        """√(std² + σ²): the standard deviation of a new y: (N, C, *). σ is one number, (C,), or one an element."""
        noise_std = torch.as_tensor(noise_std)
        if not bool((noise_std >= 0).all()):
            raise ValueError("got a negative or NaN noise_std; expected standard deviations ≥ 0")
        shape = self.mean.shape
        noise = noise_std.view(-1, *[1] * (len(shape) - 2)) if noise_std.ndim == 1 else noise_std  # (C,): per output
        axes = zip(reversed(noise.shape), reversed(shape), strict=False)
        if noise.ndim > len(shape) or any(got not in (1, expected) for got, expected in axes):
            raise ValueError(
                f"got noise_std of shape {tuple(noise_std.shape)} for outputs {tuple(shape)}; expected (C,), one "
                "number for each output, or one for each element"
            )
        return (self.std**2 + noise.to(self.std) ** 2).sqrt()


@dataclass(frozen=True, eq=False)
class Prediction(_Figures):
    """B sampled outputs, (B, N, C, *), and every figure of them; exact moments where the method knows them.

    >>> p = Prediction(torch.tensor([[[0.0, 1.0]], [[0.0, 3.0]]]))  # B = 2, N = 1, C = 2
    >>> p.mean.tolist(), p.labels.tolist()
    ([[0.0, 2.0]], [1])
    """

    samples: Tensor
    moments: Moments | None = None

    def __post_init__(self) -> None:
        if self.samples.ndim < 3 or self.samples.shape[0] < 1:
            raise ValueError(f"got samples of shape {tuple(self.samples.shape)}; expected (B, N, C, *) with B ≥ 1")

    @property
    def num_samples(self) -> int:
        return self.samples.shape[0]

    @property
    def mean(self) -> Tensor:
        """E f(x): exact where known, else the mean of the samples: (N, C, *)."""
        return self.samples.mean(0) if self.moments is None else self.moments.mean

    @property
    def std(self) -> Tensor:
        """The standard deviation of f(x) over replicates: (N, C, *); zero for a single sample."""
        if self.moments is not None:
            return self.moments.std
        return std_of(self.samples)

    @cached_property
    def _class_figures(self) -> tuple[Tensor, Tensor]:
        chunks = torch.split(self.samples, summary_chunk(bytes_of(self.samples[0])))
        parts = [part for chunk in chunks for part in in_parts(chunk)]  # views
        probs, entropy = class_sums(parts[0])
        for part in parts[1:]:
            more_probs, more_entropy = class_sums(part)
            probs, entropy = probs + more_probs, entropy + more_entropy
        return probs / self.num_samples, entropy / self.num_samples

    @property
    def probs(self) -> Tensor:
        """1/B Σ_b softmax f_b(x): (N, C, *)."""
        return self._class_figures[0]

    @property
    def expected_entropy(self) -> Tensor:
        """1/B Σ_b H(softmax f_b(x)): the part that more data would not remove, in nats: (N, *)."""
        return self._class_figures[1]

    def quantile(self, q: float) -> Tensor:
        """The q-quantile of the replicates, linear between order statistics: (N, C, *)."""
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"got q = {q}; expected a number from 0 to 1")
        return _quantile(self.samples, q)


@dataclass(frozen=True, eq=False)
class Summary(_Figures):
    """The figures of a Prediction, gathered over chunks of B: memory does not grow with B."""

    num_samples: int
    mean: Tensor
    std: Tensor
    probs: Tensor
    expected_entropy: Tensor
    quantiles: dict[float, Tensor] = field(default_factory=dict)

    def quantile(self, q: float) -> Tensor:
        """The q-quantile of the replicates, if it was asked for: (N, C, *)."""
        for level, value in self.quantiles.items():
            if math.isclose(level, q, abs_tol=1e-9):
                return value
        raise ValueError(
            f"quantile {q:g} was not gathered (gathered: {sorted(self.quantiles) or 'none'}): ask for it with "
            f"summarize(x, B, quantiles=({q:g},)), or take interval(kind='normal')"
        )


def _quantile(samples: Tensor, q: float) -> Tensor:
    """torch.quantile has a size limit; two order statistics have none."""
    rank = q * (samples.shape[0] - 1)
    low = math.floor(rank)
    lower = samples.kthvalue(low + 1, dim=0).values
    if rank == low:
        return lower
    return lower.lerp(samples.kthvalue(low + 2, dim=0).values, rank - low)
