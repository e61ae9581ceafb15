"""Bootstrap weights α and the blocks they act on (paper, section 2 and appendix A).

    α ~ S × Dirichlet(1, …, 1),   wᵢ = α_{u(i)},   u: [n] → [S]

Every draw is named by a key: row k of `law.sample(keys, S)` is a function of `keys[k]` alone. The same
(seed, epoch), (seed, step) or (seed, b) therefore gives the same α in any chunk, batch, process and machine,
and data-parallel ranks agree without a message.
"""

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from neuboots._prng import derive_keys, draw_gamma, draw_uniform, hash_to_range

Link = Literal["identity", "exp"]
ResampleSchedule = Literal["epoch", "step", "sample", "pool"]
_POOL = 256  # draws that the samples of an epoch share

# -- laws ----------------------------------------------------------------------------------------------


class WeightDistribution(Protocol):
    """A law of exchangeable weights with mean 1: Cov α = (v − c) I + c 11ᵀ."""

    @property
    def name(self) -> str: ...

    def sample(self, keys: Tensor, size: int) -> Tensor:
        """α for each key, double precision: (num, size)."""

    def covariance(self, size: int) -> tuple[float, float]:
        """(v, c): the variance of one weight and the covariance of two."""

    def laplace(self, t: float, parts: int, size: int) -> float:
        """E exp(−t (α₁ + … + α_parts)), exact: what the exp link needs."""


def check_blocks(size: int) -> None:
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"got S = {size} blocks; expected at least 1: choose num_blocks ≥ 1")


def check_weight_distribution(weight_distribution: WeightDistribution) -> None:
    if isinstance(weight_distribution, type) or not hasattr(weight_distribution, "sample"):
        raise ValueError(f"got law={weight_distribution!r}; expected a law such as Dirichlet() or Exponential()")


def check_link(link: str) -> None:
    if link not in ("identity", "exp"):
        raise ValueError(f"got link={link!r}; expected 'identity' or 'exp'")


def _check_concentration(concentration: float) -> None:
    if not (math.isfinite(concentration) and concentration > 0):
        raise ValueError(f"got concentration {concentration}; expected a positive number (1 is the paper's)")


@dataclass(frozen=True)
class Dirichlet:
    """α ~ S × Dirichlet(c, …, c): positive, sums to S. The paper's law is c = 1.

    >>> Dirichlet().covariance(4)  # (S − 1)/(S + 1), −1/(S + 1)
    (0.6, -0.2)
    >>> alpha = Dirichlet().sample(derive_keys(torch.arange(2), 0), 4)
    >>> bool(torch.allclose(alpha.sum(1), torch.full((2,), 4.0, dtype=alpha.dtype)))
    True
    """

    concentration: float = 1.0
    name = "dirichlet"

    def __post_init__(self) -> None:
        _check_concentration(self.concentration)

    def sample(self, keys: Tensor, size: int) -> Tensor:
        check_blocks(size)
        draws = draw_gamma(keys, size, self.concentration).clamp_min(1e-300)
        return size * draws / draws.sum(1, keepdim=True)  # (num, S)

    def covariance(self, size: int) -> tuple[float, float]:
        total = size * self.concentration + 1.0
        return (size - 1) / total, -1.0 / total if size > 1 else 0.0

    def laplace(self, t: float, parts: int, size: int) -> float:
        if parts >= size:
            return math.exp(-t * size)
        # α₁ + … + α_k = S × Beta(kc, (S − k)c), whose moment generating function is Kummer's 1F1
        return _kummer(parts * self.concentration, size * self.concentration, t * size)


@dataclass(frozen=True)
class Exponential:
    """α_s ~ Gamma(c, 1/c), independent; c = 1 is Exp(1), the approximation of appendix A.

    >>> Exponential(concentration=4.0).covariance(10)
    (0.25, 0.0)
    """

    concentration: float = 1.0
    name = "exponential"

    def __post_init__(self) -> None:
        _check_concentration(self.concentration)

    def sample(self, keys: Tensor, size: int) -> Tensor:
        check_blocks(size)
        return draw_gamma(keys, size, self.concentration) / self.concentration

    def covariance(self, size: int) -> tuple[float, float]:
        return 1.0 / self.concentration, 0.0

    def laplace(self, t: float, parts: int, size: int) -> float:
        return math.pow(1.0 + t / self.concentration, -self.concentration * parts)


@dataclass(frozen=True)
class Multinomial:
    """α ~ Multinomial(S; 1/S, …, 1/S): how often each block is drawn in S draws with replacement.

    >>> Multinomial().covariance(4)  # 1 − 1/S, −1/S
    (0.75, -0.25)
    """

    name = "multinomial"

    def sample(self, keys: Tensor, size: int) -> Tensor:
        check_blocks(size)
        u = draw_uniform(keys[:, None], torch.arange(size, device=keys.device))
        picks = (u * size).long().clamp_max(size - 1)  # (num, S)
        counts = torch.zeros(len(keys), size, dtype=torch.float64, device=keys.device)
        return counts.scatter_add_(1, picks, torch.ones_like(counts))

    def covariance(self, size: int) -> tuple[float, float]:
        return 1.0 - 1.0 / size, -1.0 / size if size > 1 else 0.0

    def laplace(self, t: float, parts: int, size: int) -> float:
        return math.pow(1.0 + min(parts, size) * math.expm1(-t) / size, size)


@dataclass(frozen=True)
class Constant:
    """α = 1: no bootstrap at all.

    >>> Constant().covariance(4)
    (0.0, 0.0)
    """

    name = "constant"

    def sample(self, keys: Tensor, size: int) -> Tensor:
        check_blocks(size)
        return torch.ones(len(keys), size, dtype=torch.float64, device=keys.device)

    def covariance(self, size: int) -> tuple[float, float]:
        return 0.0, 0.0

    def laplace(self, t: float, parts: int, size: int) -> float:
        return math.exp(-t * parts)


WEIGHT_DISTRIBUTIONS: dict[str, type[Dirichlet | Exponential | Multinomial | Constant]] = {
    weight_distribution.name: weight_distribution
    for weight_distribution in (Dirichlet, Exponential, Multinomial, Constant)
}


def describe_distribution(weight_distribution: WeightDistribution) -> dict[str, Any]:
    """The law as JSON: its name and options.

    >>> describe_distribution(Dirichlet(5.0))
    {'name': 'dirichlet', 'concentration': 5.0}
    """
    if type(weight_distribution) not in WEIGHT_DISTRIBUTIONS.values():
        raise ValueError(
            f"got a law of your own, {weight_distribution!r}; expected one of {list(WEIGHT_DISTRIBUTIONS)}: only these can be saved"
        )
    return {"name": weight_distribution.name, **asdict(weight_distribution)}  # type: ignore[call-overload]


def build_distribution(description: dict[str, Any]) -> WeightDistribution:
    """The law that `describe_distribution` described."""
    options = dict(description)
    return WEIGHT_DISTRIBUTIONS[options.pop("name")](**options)


def _kummer(a: float, b: float, z: float) -> float:
    """₁F₁(a; b; −z) = e^{−z} Σ_k (b − a)_k / (b)_k · z^k / k!: all terms positive, summed as logarithms."""
    count = int(z + 12.0 * math.sqrt(z + 1.0)) + 60
    k = torch.arange(count, dtype=torch.float64)
    ratios = torch.log1p(-a / (b + k[:-1]))  # of (b − a)_k to (b)_k: differences of lgamma would lose all digits
    logs = torch.cat([ratios.new_zeros(1), ratios.cumsum(0)]) + k * math.log(z) - torch.lgamma(k + 1.0)
    return math.exp(float(torch.logsumexp(logs, 0)) - z)


# -- links ---------------------------------------------------------------------------------------------


def apply_link(alpha: Tensor, link: Link) -> Tensor:
    """h(α), by which the features are multiplied: α itself (eq. 3.1), or exp(−α)."""
    return alpha if link == "identity" else torch.exp(-alpha)


def link_moments(weight_distribution: WeightDistribution, link: Link, size: int) -> tuple[float, float, float]:
    """(E h(α_s), Var h(α_s), Cov(h(α_s), h(α_t))), exact for every law and both links.

    >>> link_moments(Exponential(), "exp", 10)[0]  # E exp(−Exp(1)) = 1/2
    0.5
    """
    if link == "identity":
        return 1.0, *weight_distribution.covariance(size)
    mean = weight_distribution.laplace(1.0, 1, size)
    covariance = weight_distribution.laplace(1.0, 2, size) - mean**2 if size > 1 else 0.0
    return mean, weight_distribution.laplace(2.0, 1, size) - mean**2, covariance


# -- blocks --------------------------------------------------------------------------------------------


def assign_blocks(n: int, num_blocks: int, *, strata: Tensor | None = None, seed: int = 0) -> Tensor:
    """u: [n] → [S]; block sizes differ by at most 1, over all points and inside every stratum: (n,).

    The points are dealt to the blocks like cards, stratum after stratum, in random order.

    >>> u = assign_blocks(10, 3, strata=torch.tensor([0] * 6 + [1] * 4))
    >>> torch.bincount(u[:6]).tolist()
    [2, 2, 2]
    """
    check_blocks(num_blocks)
    if n < 1:
        raise ValueError(f"got n = {n} training points; expected at least 1: the data set is empty")
    if strata is None:
        strata = torch.zeros(n, dtype=torch.int64)
    if strata.shape != (n,):
        raise ValueError(f"got strata of shape {tuple(strata.shape)}; expected ({n},): one label for each point")
    shuffled = derive_keys(torch.arange(n), seed, "points").argsort()
    order = shuffled[strata.cpu()[shuffled].argsort(stable=True)]  # by stratum, shuffled inside
    names = derive_keys(torch.arange(num_blocks), seed, "blocks").argsort()
    blocks = torch.empty(n, dtype=torch.int64)
    blocks[order] = names[torch.arange(n) % num_blocks]
    return blocks


def compute_strata(targets: Tensor, *, num_bins: int = 10, ignore_index: int = -100) -> Tensor:
    """The stratum of each point: its class, its quantile bin, or the commonest class of its pixels: (n,).

    Integer targets are classes; floating ones are cut at their quantiles (several columns: of the sum
    of the standardised columns).

    >>> compute_strata(torch.tensor([0.1, 0.2, 0.9, 0.8]), num_bins=2).tolist()
    [0, 0, 1, 1]
    """
    n = len(targets)
    if n < 1:
        raise ValueError("got no targets; expected at least 1: the data set is empty")
    flat = targets.detach().cpu().reshape(n, -1)
    if flat.is_floating_point():
        spread = flat.std(0, correction=0)
        score = ((flat - flat.mean(0)) / spread.where(spread > 0, 1)).sum(1)
        ranks = torch.empty(n, dtype=torch.int64)
        ranks[score.argsort(stable=True)] = torch.arange(n)
        return ranks * min(num_bins, n) // n
    flat = flat.to(torch.int64)  # in uint8, label 156 and −100 are the same byte
    if flat.shape[1] > 1:
        return torch.stack([_majority_label(row[row != ignore_index]) for row in flat])
    return flat[:, 0]


def _majority_label(labels: Tensor) -> Tensor:
    return labels.mode().values if len(labels) else torch.tensor(-1)


@dataclass(frozen=True)
class BlockTable:
    """u as a table, for data whose length is known: O(1) look-up for each sample."""

    blocks: Tensor
    num_blocks: int

    def __call__(self, index: Tensor) -> Tensor:
        return self.blocks.index_select(0, index.cpu())  # several times quicker than self.blocks[index]


@dataclass(frozen=True)
class HashedBlocks:
    """u as a hash of the sample's number, for streams whose length is unknown; nothing is stored.

    >>> u = HashedBlocks(num_blocks=8)
    >>> bool((u(torch.arange(100))[50] == u(torch.tensor([50]))[0]))
    True
    """

    num_blocks: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_blocks(self.num_blocks)

    def __call__(self, index: Tensor) -> Tensor:
        return hash_to_range(index.cpu(), self.num_blocks, self.seed, "stream")


Blocks = BlockTable | HashedBlocks


# -- the schedule of draws -----------------------------------------------------------------------------


def check_schedule(resample: str, warmup: int) -> None:
    if resample not in get_args(ResampleSchedule):
        raise ValueError(f"got redraw={resample!r}; expected one of {', '.join(map(repr, get_args(ResampleSchedule)))}")
    if warmup < 0:
        raise ValueError(f"got warmup={warmup}; expected a number of epochs ≥ 0")


@dataclass(frozen=True)
class EpochWeights:
    """The draws of one epoch: called with the index of a batch, gives (α, w) with wᵢ = α_{u(i)}."""

    plan: "WeightSchedule"
    epoch: int

    def __call__(self, index: Tensor, *, step: int | None = None) -> tuple[Tensor, Tensor]:
        """α, (S,) or one row for each sample (N, S), and the loss weights w, (N,)."""
        plan, blocks = self.plan, self.plan.blocks(index)
        if self.epoch < plan.warmup:
            size = plan.blocks.num_blocks
            return torch.ones(size, dtype=torch.float64), torch.ones(len(index), dtype=torch.float64)
        if plan.resample == "sample":
            keys = derive_keys(index.cpu(), plan.seed, "sample", self.epoch)
            alphas = plan.weight_distribution.sample(keys, plan.blocks.num_blocks)  # (N, S)
            return alphas, alphas.gather(1, blocks[:, None])[:, 0]
        if plan.resample == "pool":
            alphas = self._pool[hash_to_range(index.cpu(), _POOL, plan.seed, "pool", self.epoch)]  # (N, S)
            return alphas, alphas.gather(1, blocks[:, None])[:, 0]
        if plan.resample == "step" and step is None:
            raise ValueError('redraw="step" draws α anew at each step: call weights(index, step=…)')
        number = self.epoch if plan.resample == "epoch" else step
        keys = derive_keys(torch.tensor([number]), plan.seed, plan.resample)
        alpha = plan.weight_distribution.sample(keys, plan.blocks.num_blocks)[0]  # (S,)
        return alpha, alpha[blocks]

    @cached_property
    def _pool(self) -> Tensor:
        """The draws of the epoch: (256, S)."""
        keys = derive_keys(torch.arange(_POOL), self.plan.seed, "pool draw", self.epoch)
        return self.plan.weight_distribution.sample(keys, self.plan.blocks.num_blocks)


@dataclass(frozen=True)
class WeightSchedule:
    """How α is drawn during training: Algorithm 1 draws at each epoch; all of them estimate eq. 2.6.

    `resample="epoch"` holds one α through the epoch, `"step"` through one step, `"sample"` gives each sample its own, and
    `"pool"` gives each one of 256 that are drawn for the epoch: for small nets, where the draws of `"sample"` take
    longer than the step. During the first `warmup` epochs α = 1.

    >>> plan = WeightSchedule(Dirichlet(), BlockTable(assign_blocks(6, 3), 3), seed=0)
    >>> alpha, w = plan.at_epoch(epoch=2)(torch.tensor([0, 5]))
    >>> alpha.shape, w.shape
    (torch.Size([3]), torch.Size([2]))
    """

    weight_distribution: WeightDistribution
    blocks: Blocks
    seed: int = 0
    resample: ResampleSchedule = "epoch"
    warmup: int = 0

    def __post_init__(self) -> None:
        check_schedule(self.resample, self.warmup)

    def at_epoch(self, epoch: int) -> EpochWeights:
        """Line 3 of Algorithm 1: the weights of this epoch, a function of (seed, epoch) alone."""
        return EpochWeights(self, epoch)
