"""Two distances between the shapes of two distributions of replicates at one input.

    KS = sup |F_a − F_b|,   W₁ = ∫ |F_a − F_b|

The distances of Kolmogorov and Smirnov, and of Wasserstein, between replicates less their mean, over their standard
deviation. Wasserstein's decides: it changes little where replicates are moved a little, but the other one jumps where
they have few values.
"""

import torch
from torch import Tensor


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


def standardised(samples: Tensor) -> Tensor:
    """Less the mean, over the standard deviation (1/B Σ): (B, M); zeros where there is none."""
    centred = samples - samples.mean(0)
    std = centred.square().mean(0).sqrt()
    return centred / std.where(std > 0, 1.0)


def distances_of_shapes(true: Tensor, generated: Tensor) -> tuple[Tensor, Tensor]:
    """The distances between standardised replicates, (K, M) and (B, M): (M,) each."""
    return distances(standardised(true), standardised(generated))
