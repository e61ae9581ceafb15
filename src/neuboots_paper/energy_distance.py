"""Energy distance between the replicates of a method and those of a true bootstrap, for classification.

    distance = (2 E|P − Q| − E|P − P′| − E|Q − Q′|) / E|P − P′|,   P, P′ true, Q, Q′ of a method, at the same input

P and Q are vectors of class probabilities, |·| is the Euclidean distance, and numerator and denominator are means over
inputs. 0 is the same distribution; 1 is the average of a single true replicate, which has no spread.

Székely and Rizzo, Testing for equal distributions in high dimension, InterStat 2004 (the energy distance).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from neuboots._prng import derive_seed
from neuboots.evaluation.bootstrap_audit import compare_with_bootstrap
from neuboots.evaluation.calibration import evaluate_calibration
from neuboots.prediction import Predictor, SampleStream, num_bytes
from neuboots_paper._common import NUM_BINS


@dataclass(frozen=True)
class StoredPredictor(Predictor):
    """Predictor with stored replicates; its inputs x are the indices of rows, (N,)."""

    samples: Tensor  # (B, all rows, C)

    @property
    def net(self) -> None:
        return None

    @property
    def num_distinct(self) -> int:
        return len(self.samples)

    def stream(self, x: Tensor, num_samples: int, *, seed: int) -> SampleStream:
        def chunks(size: int) -> Iterator[Tensor]:
            for start in range(0, num_samples, size):
                yield self.samples[start : min(start + size, num_samples)][:, x]

        return SampleStream(num_samples, num_bytes(self.samples[0]), chunks)

    def config(self) -> dict[str, Any]:
        raise ValueError("stored replicates cannot be saved; save the predictor that drew them")


def compare_replicates(true: Tensor, samples: Tensor, labels: Tensor, *, seed: int = 0) -> dict[str, Any]:
    """Compare replicates of logits (B, N, C) with true ones (K, N, C), and compute metrics of their mean."""
    rows = torch.arange(len(labels))
    found = compare_with_bootstrap(
        StoredPredictor(samples),
        StoredPredictor(true),
        rows,
        num_samples=len(samples),
        seed=seed,
        logits=True,
        progress=False,
    )
    scores = evaluate_calibration(
        StoredPredictor(samples),
        TensorDataset(rows, labels),
        num_samples=len(samples),
        num_bins=NUM_BINS,
        progress=False,
    ).metrics
    p, q = (logits.double().softmax(2) for logits in (true, samples))
    is_constant = math.isnan(found.std_ratio.value)
    return {
        "distance": energy_distance(p, q),
        "ratio": found.ratio,
        "low": None if is_constant else found.std_ratio.low,
        "high": None if is_constant else found.std_ratio.high,
        "off": None if is_constant else found.agreement.factor,
        "correlation": found.correlation,
        "shift": found.shift,
        "shape": None if is_constant else found.wasserstein,
        "shape_by_chance": None if is_constant else found.null.wasserstein,
        "finding": found.finding,
        "probability_ratio": math.sqrt(float(_variances(q).mean() / _variances(p).mean())),
        "probability_correlation": variance_correlation(p, q, seed=seed),
        **{name: scores[name] for name in ("error", "nll", "ece")},
    }


def energy_distance(true: Tensor, samples: Tensor) -> float:
    """Energy distance of vectors (K, N, C) and (B, N, C), over the mean distance of two true ones.

    Means are over pairs of different replicates, so that the number of replicates causes no bias.

    Example:
        >>> true, others = torch.randn(2, 50, 400, 1, generator=torch.Generator().manual_seed(0))  # K = B = 50
        >>> [round(energy_distance(true, some), 1) for some in (others, others[:1].expand(2, -1, -1), 0 * others)]
        [0.0, 1.0, 0.4]
    """
    p, q = true.movedim(1, 0), samples.movedim(1, 0)  # (N, K, C), (N, B, C)
    between = torch.cdist(p, q).mean()
    among = [torch.cdist(each, each).sum() / (len(each) * each.shape[1] * (each.shape[1] - 1)) for each in (p, q)]
    return float((2 * between - among[0] - among[1]) / among[0])


def variance_correlation(true: Tensor, samples: Tensor, *, seed: int = 0, splits: int = 64) -> float | None:
    """Correlation over inputs of the variances of vectors (K, N, C) and (B, N, C), corrected for few replicates.

        cov(v_P, v_Q) / √(var₀ v_P · var₀ v_Q),   var₀ = cov of the variances of two random halves of the replicates

    The variance of few replicates is unbiased but noisy; the noise of two halves is independent. None if the variances
    of two halves are not positively correlated.
    """
    both = float(_covariance(_variances(true), _variances(samples)))
    alone = [_halves_covariance(each, seed, splits) for each in (true, samples)]
    if min(alone) <= 0:
        return None
    return max(-1.0, min(1.0, both / math.sqrt(alone[0] * alone[1])))


def _variances(samples: Tensor) -> Tensor:
    """Σ_c of the variance over replicates: (N,) of (B, N, C)."""
    return samples.var(0).sum(-1)


def _halves_covariance(samples: Tensor, seed: int, splits: int) -> float:
    if len(samples) < 4:
        return 0.0
    rng = torch.Generator().manual_seed(derive_seed(seed, "halves of replicates", len(samples)))
    total = 0.0
    for _ in range(splits):
        order = torch.randperm(len(samples), generator=rng)
        one, other = (_variances(samples[half]) for half in order.chunk(2))
        total += float(_covariance(one, other))
    return total / splits


def _covariance(a: Tensor, b: Tensor) -> Tensor:
    return ((a - a.mean()) * (b - b.mean())).sum() / (len(a) - 1)
