"""Two distances between the distributions of replicates at one input.

    KS = sup |F_a − F_b|,   W₁ = ∫ |F_a − F_b|

The distance of Kolmogorov and Smirnov compares the shapes: replicates less their mean, over their standard deviation.
Wasserstein's compares size and shape: replicates less their mean, over the true standard deviation. Beside both stands
what K and B numbers from one Gaussian show by chance.
"""

from functools import lru_cache

import torch
from torch import Tensor

from neuboots.keys import seed_named

_PAIRS = 1000  # Gaussian samples behind the distances by chance
_RARE = 0.01  # of these pairs are farther apart than the limit
_HELD = 1 << 21  # numbers looked at together


def distances(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """sup |F_a − F_b| (Kolmogorov–Smirnov) and ∫ |F_a − F_b| (Wasserstein-1) of each column of (K, M), (B, M): (M,).

    >>> ks, w1 = distances(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [3.0]]))
    >>> ks.tolist(), w1.tolist()
    ([0.5], [1.0])
    """
    values, order = torch.cat([a, b]).sort(0)  # (K + B, M)
    step = torch.cat([a.new_full((len(a),), 1 / len(a)), a.new_full((len(b),), -1 / len(b))])
    gap = step[order].cumsum(0)[:-1].abs()
    length = values.diff(dim=0)
    ks = gap.where(length > 0, 0.0).amax(0)  # between equal values the step is not finished
    return ks, (gap * length).sum(0)


def distances_of_replicates(true: Tensor, generated: Tensor) -> tuple[Tensor, Tensor]:
    """KS of the shapes, and Wasserstein of size and shape in true standard deviations, of (K, M) and (B, M): (M,)."""
    t, s = true - true.mean(0), generated - generated.mean(0)
    t_std, s_std = t.square().mean(0).sqrt(), s.square().mean(0).sqrt()
    ks, _ = distances(t / t_std, s / s_std.where(s_std > 0, 1.0))
    _, wasserstein = distances(t, s)
    return ks, wasserstein / true.std(0)


@lru_cache(maxsize=16)
def distances_by_chance(num_true: int, num_samples: int, *, seed: int) -> tuple[float, float, float]:
    """Mean KS, the KS that one pair in a hundred exceeds, and mean Wasserstein, of two samples of one Gaussian."""
    rng = torch.Generator().manual_seed(seed_named(seed, "chance", num_true, num_samples))
    found = []
    size = max(1, _HELD // (num_true + num_samples))
    for start in range(0, _PAIRS, size):
        width = min(size, _PAIRS - start)
        pair = [torch.randn(rows, width, generator=rng, dtype=torch.float64) for rows in (num_true, num_samples)]
        found.append(torch.stack(distances_of_replicates(*pair)))
    ks, wasserstein = torch.cat(found, 1)
    return float(ks.mean()), float(ks.quantile(1 - _RARE)), float(wasserstein.mean())
