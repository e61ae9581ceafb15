"""What chance alone shows where true and generated replicates have one distribution, whatever that is.

    pool = standardised true ∪ standardised generated replicates;   K of them at random against the other B

Replicates are often skewed or have heavy tails, and K of them then differ from B of them in ways that a Gaussian does
not know. So both are thrown together at a sample of places, and divided anew at random many times: the distances and
the ratio of standard deviations between the parts are what chance shows. One division serves all places, since K nets
are the same at all inputs.

Fisher, The design of experiments, 1935 (division at random of what is compared).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from neuboots.keys import draw_keys, seed_named, uniforms
from neuboots.tasks.audit.distances import distances_of_shapes, standardised
from neuboots.tasks.audit.spread import FLAT

_PLACES = 20  # at which replicates are kept
_DISTANCES = 32  # divisions whose distances are taken
_RATIOS = 400  # divisions whose standard deviations are taken, which costs little
_RARE = 3.5  # standard deviations above the mean


@dataclass(frozen=True, eq=False)
class Kept:
    """Replicates at a random sample of places: those with the lowest numbers drawn, however places are cut in parts."""

    drawn: Tensor  # (M,)
    true: Tensor  # (K, M)
    generated: Tensor  # (B, M)

    @classmethod
    def of(cls, true: Tensor, generated: Tensor, counted: Tensor, *, start: int, seed: int) -> "Kept":
        """Of replicates (K, C, L) and (B, C, L) at the places `start` … `start` + L − 1, where `counted` (C, L)."""
        outputs, places = counted.shape
        number = torch.arange(outputs)[:, None] + outputs * torch.arange(start, start + places)  # (C, L)
        drawn = uniforms(draw_keys(torch.tensor(0), seed, "places"), number).where(counted, math.inf).flatten()
        return cls(drawn, true.flatten(1), generated.flatten(1))._least()

    def _least(self) -> "Kept":
        drawn, order = self.drawn.sort()
        best = order[:_PLACES][torch.isfinite(drawn[:_PLACES])]
        return Kept(self.drawn[best], self.true[:, best], self.generated[:, best])

    def __add__(self, other: "Kept") -> "Kept":
        pairs = zip((self.drawn, self.true, self.generated), (other.drawn, other.true, other.generated), strict=True)
        return Kept(*(torch.cat(pair, -1) for pair in pairs))._least()


@dataclass(frozen=True)
class Chance:
    """Between K and B replicates of one distribution."""

    ks: float  # the mean over places, expected
    wasserstein: float
    wasserstein_limit: float  # and what it hardly ever exceeds
    away_limit: float  # share of places whose centres are far apart: what it hardly ever exceeds
    log_ratio: float  # of the standard deviation of B to that of K, expected

    @classmethod
    def of(cls, kept: Kept, *, away: float, seed: int) -> "Chance":
        """Of what is kept, at one place at least; centres more than `away` standard deviations apart are far apart."""
        num_true = len(kept.true)
        pool = torch.cat([standardised(kept.true), standardised(kept.generated)])  # (K + B, M)
        rng = torch.Generator().manual_seed(seed_named(seed, "divisions", len(pool)))
        chosen = torch.rand(_RATIOS, len(pool), generator=rng).topk(num_true, 1, sorted=False).indices
        first = torch.zeros(_RATIOS, len(pool), dtype=torch.bool).scatter_(1, chosen, True)  # (divisions, K + B)
        found = [torch.stack(distances_of_shapes(pool[part], pool[~part])) for part in first[:_DISTANCES]]
        ks, wasserstein = torch.stack(found).mean(2).unbind(1)  # means over places: (divisions,)
        (mean, std), (others, others_std) = _moments(first, pool), _moments(~first, pool)  # (divisions, M)
        apart = ((mean - others).abs() > away * std).double().mean(1)  # (divisions,)
        limits = [figure.mean() + _RARE * figure.std() for figure in (wasserstein, apart)]
        log_ratio = (others_std / std).log()
        return cls(*(float(figure) for figure in (ks.mean(), wasserstein.mean(), *limits, log_ratio.mean())))


def _moments(part: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, and standard deviation, at least FLAT, of each part of the pool: (divisions, M)."""
    weight = part.double()
    count = weight.sum(1, keepdim=True)
    mean = weight @ pool / count
    inner = weight @ pool.square() - count * mean.square()
    return mean, (inner / (count - 1).clamp_min(1)).clamp_min(FLAT**2).sqrt()
