"""Bootstrap weights α and the blocks of examples that share a weight (paper, section 2 and appendix A).

    α ~ S × Dirichlet(1, …, 1),   wᵢ = α_{u(i)},   u: [n] → [S]

Every draw has a key: row k of `distribution.sample(keys, S)` is a function of `keys[k]`. The same (seed, epoch),
(seed, step) or (seed, b) therefore gives the same α in any chunk, batch, process and machine, and data-parallel ranks
agree without communication.
"""

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from neuboots._prng import derive_keys, draw_gamma, draw_uniform, hash_to_range
from neuboots._validation import ArgumentError, check_choice, check_int, check_memory, check_positive, check_types

Link = Literal["identity", "exp"]
ResampleSchedule = Literal["epoch", "step", "sample", "pool"]
POOL_SIZE = 256
SPARE_BLOCKS = 10_000  # that any data may leave empty
_MAX_CONCENTRATION = 1e100  # sums of such numbers are finite
DRAW_BYTES = 120  # of memory for each weight while it is drawn

# -- distributions -------------------------------------------------------------------------------------


class WeightDistribution(Protocol):
    """A distribution of exchangeable weights with mean 1 and covariance (v − c) I + c 11ᵀ."""

    @property
    def name(self) -> str:
        """Name in saved configs."""

    def sample(self, keys: Tensor, size: int) -> Tensor:
        """Draw α for each key, (num, size), in double precision."""

    def covariance(self, size: int) -> tuple[float, float]:
        """Return (v, c): the variance of one weight and the covariance of two."""

    def laplace_transform(self, t: float, parts: int, size: int) -> float:
        """Return E exp(−t (α₁ + … + α_parts)), which the exp link needs."""


def check_weight_distribution(weight_distribution: WeightDistribution) -> None:
    """Raise ArgumentError unless the argument is an instance with a `sample` method.

    Args:
        weight_distribution: Distribution of α.
    """
    if isinstance(weight_distribution, type) or not hasattr(weight_distribution, "sample"):
        raise ArgumentError("weight_distribution", weight_distribution, "a distribution such as Dirichlet()")


def _check_draws(keys: Tensor, size: int) -> None:
    """Raise ArgumentError unless keys are integers (num,) and the number of blocks S is one that fits into memory."""
    if not isinstance(keys, Tensor) or keys.dtype != torch.int64 or keys.ndim != 1 or keys.layout != torch.strided:
        found = (keys.dtype, tuple(keys.shape)) if isinstance(keys, Tensor) else type(keys)
        raise ArgumentError("keys", found, "int64 keys (num,)", hint="use derive_keys")
    check_memory("size", size, DRAW_BYTES * len(keys) * check_int("size", size, minimum=1), hint="use fewer blocks")


def _check_concentration(value: Any) -> None:
    if check_positive("concentration", value) > _MAX_CONCENTRATION:
        raise ArgumentError("concentration", value, f"at most {_MAX_CONCENTRATION:g}", hint="use Constant()")


@dataclass(frozen=True)
class Dirichlet:
    """α ~ S × Dirichlet(c, …, c): positive weights with sum S; the paper's distribution is c = 1.

    Args:
        concentration: c; larger values give weights closer to 1.

    Example:
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
        """Draw α for each key, (num, S)."""
        _check_draws(keys, size)
        draws = draw_gamma(keys, size, self.concentration).clamp_min(1e-300)
        return size * draws / draws.sum(1, keepdim=True)  # (num, S)

    def covariance(self, size: int) -> tuple[float, float]:
        """Return the variance of one weight and the covariance of two."""
        total = size * self.concentration + 1.0
        return (size - 1) / total, -1.0 / total if size > 1 else 0.0

    def laplace_transform(self, t: float, parts: int, size: int) -> float:
        """Return E exp(−t (α₁ + … + α_parts))."""
        if parts >= size:
            return math.exp(-t * size)
        # α₁ + … + α_k = S × Beta(kc, (S − k)c), whose moment generating function is Kummer's 1F1
        return _kummer(parts * self.concentration, size * self.concentration, t * size)


@dataclass(frozen=True)
class Exponential:
    """α_s ~ Gamma(c, 1/c), independent; c = 1 is Exp(1), the approximation of appendix A.

    Args:
        concentration: c; larger values give weights closer to 1.

    Example:
        >>> Exponential(concentration=4.0).covariance(10)
        (0.25, 0.0)
    """

    concentration: float = 1.0
    name = "exponential"

    def __post_init__(self) -> None:
        _check_concentration(self.concentration)

    def sample(self, keys: Tensor, size: int) -> Tensor:
        """Draw α for each key, (num, S)."""
        _check_draws(keys, size)
        return draw_gamma(keys, size, self.concentration) / self.concentration

    def covariance(self, size: int) -> tuple[float, float]:
        """Return the variance of one weight and the covariance of two."""
        return 1.0 / self.concentration, 0.0

    def laplace_transform(self, t: float, parts: int, size: int) -> float:
        """Return E exp(−t (α₁ + … + α_parts))."""
        return math.pow(1.0 + t / self.concentration, -self.concentration * parts)


@dataclass(frozen=True)
class Multinomial:
    """α ~ Multinomial(S; 1/S, …, 1/S): how often each block is drawn in S draws with replacement.

    Example:
        >>> Multinomial().covariance(4)  # 1 − 1/S, −1/S
        (0.75, -0.25)
    """

    name = "multinomial"

    def sample(self, keys: Tensor, size: int) -> Tensor:
        """Draw α for each key, (num, S)."""
        _check_draws(keys, size)
        u = draw_uniform(keys[:, None], torch.arange(size, device=keys.device))
        picks = (u * size).long()  # (num, S), below S as u < 1
        counts = torch.zeros(len(keys), size, dtype=torch.float64, device=keys.device)
        return counts.scatter_add_(1, picks, torch.ones_like(counts))

    def covariance(self, size: int) -> tuple[float, float]:
        """Return the variance of one weight and the covariance of two."""
        return 1.0 - 1.0 / size, -1.0 / size if size > 1 else 0.0

    def laplace_transform(self, t: float, parts: int, size: int) -> float:
        """Return E exp(−t (α₁ + … + α_parts))."""
        return math.pow(1.0 + min(parts, size) * math.expm1(-t) / size, size)


@dataclass(frozen=True)
class Constant:
    """α = 1: no bootstrap.

    Example:
        >>> Constant().covariance(4)
        (0.0, 0.0)
    """

    name = "constant"

    def sample(self, keys: Tensor, size: int) -> Tensor:
        """Return ones, (num, S)."""
        _check_draws(keys, size)
        return torch.ones(len(keys), size, dtype=torch.float64, device=keys.device)

    def covariance(self, size: int) -> tuple[float, float]:
        """Return zeros."""
        return 0.0, 0.0

    def laplace_transform(self, t: float, parts: int, size: int) -> float:
        """Return exp(−t · parts)."""
        return math.exp(-t * parts)


WEIGHT_DISTRIBUTIONS: dict[str, type[Dirichlet | Exponential | Multinomial | Constant]] = {
    cls.name: cls for cls in (Dirichlet, Exponential, Multinomial, Constant)
}


def describe_distribution(weight_distribution: WeightDistribution) -> dict[str, Any]:
    """Return the distribution as JSON, its name and options; raise ArgumentError if it is not one of this module.

    Args:
        weight_distribution: Distribution of α.

    Returns:
        Its name and options.

    Example:
        >>> describe_distribution(Dirichlet(5.0))
        {'name': 'dirichlet', 'concentration': 5.0}
    """
    if type(weight_distribution) not in WEIGHT_DISTRIBUTIONS.values():
        expected = f"one of {', '.join(WEIGHT_DISTRIBUTIONS)}, since others cannot be saved"
        raise ArgumentError("weight_distribution", weight_distribution, expected)
    return {"name": weight_distribution.name, **asdict(weight_distribution)}  # type: ignore[call-overload]


def build_distribution(description: dict[str, Any]) -> WeightDistribution:
    """Return the distribution that `describe_distribution` described.

    Args:
        description: What the corresponding `describe` function returned.

    Returns:
        The distribution.
    """
    options = dict(description)
    kind = WEIGHT_DISTRIBUTIONS[options.pop("name")]
    return kind(**check_types("weight_distribution", options, kind))


def _kummer(a: float, b: float, z: float) -> float:
    """₁F₁(a; b; −z) = e^{−z} Σ_k (b − a)_k / (b)_k · z^k / k!: all terms positive, summed as logarithms."""
    count = int(z + 12.0 * math.sqrt(z + 1.0)) + 60
    k = torch.arange(count, dtype=torch.float64)
    ratios = torch.log1p(-a / (b + k[:-1]))  # of (b − a)_k to (b)_k: differences of lgamma would lose all digits
    logs = torch.cat([ratios.new_zeros(1), ratios.cumsum(0)]) + k * math.log(z) - torch.lgamma(k + 1.0)
    return math.exp(float(torch.logsumexp(logs, 0)) - z)


# -- links ---------------------------------------------------------------------------------------------


def apply_link(alpha: Tensor, link: Link) -> Tensor:
    """Return the factor h(α) of the features: α (eq. 3.1), or exp(−α).

    Args:
        alpha: Bootstrap weights α.
        link: "identity" or "exp".

    Returns:
        h(α), in the shape of α.
    """
    return alpha if link == "identity" else torch.exp(-alpha)


def link_moments(weight_distribution: WeightDistribution, link: Link, size: int) -> tuple[float, float, float]:
    """Return (E h(α_s), Var h(α_s), Cov(h(α_s), h(α_t))), exactly.

    Args:
        weight_distribution: Distribution of α.
        link: "identity" or "exp".
        size: Number of blocks S.

    Returns:
        Mean, variance and covariance.

    Example:
        >>> link_moments(Exponential(), "exp", 10)[0]  # E exp(−Exp(1)) = 1/2
        0.5
    """
    check_int("size", size, minimum=1)
    if check_choice("link", link, ("identity", "exp")) == "identity":
        return 1.0, *weight_distribution.covariance(size)
    mean = weight_distribution.laplace_transform(1.0, 1, size)
    covariance = weight_distribution.laplace_transform(1.0, 2, size) - mean**2 if size > 1 else 0.0
    return mean, weight_distribution.laplace_transform(2.0, 1, size) - mean**2, covariance


# -- blocks --------------------------------------------------------------------------------------------


def assign_blocks(n: int, num_blocks: int, *, strata: Tensor | None = None, seed: int = 0) -> Tensor:
    """Assign examples to blocks, u: [n] → [S], stratified: sizes differ by at most 1, overall and in each stratum.

    Args:
        n: Number of examples.
        num_blocks: Number of blocks S.
        strata: Stratum of each example, (n,); None: one stratum.
        seed: Seed of the assignment.

    Returns:
        The block of each example, (n,).

    Raises:
        ArgumentError: If n or S is less than 1, S does not fit into memory, or `strata` has another shape.

    Example:
        >>> u = assign_blocks(10, 3, strata=torch.tensor([0] * 6 + [1] * 4))
        >>> torch.bincount(u[:6]).tolist()
        [2, 2, 2]
    """
    check_int("num_blocks", num_blocks, minimum=1)
    check_int("n", n, minimum=1)
    check_memory("num_blocks", num_blocks, 5 * 8 * num_blocks, hint="use fewer blocks")
    if strata is None:
        strata = torch.zeros(n)
    if strata.shape != (n,):
        raise ArgumentError("strata", tuple(strata.shape), f"({n},), one label per example")
    shuffled = derive_keys(torch.arange(n), seed, "points").argsort()
    order = shuffled[strata.cpu()[shuffled].argsort(stable=True)]  # by stratum, shuffled inside
    names = derive_keys(torch.arange(num_blocks), seed, "blocks").argsort()
    blocks = torch.empty(n, dtype=torch.int64)
    blocks[order] = names[torch.arange(n) % num_blocks]
    return blocks


def compute_strata(targets: Tensor, *, num_bins: int = 10, ignore_index: int = -100) -> Tensor:
    """Return the stratum of each example: its class, its quantile bin, or the majority class of its pixels.

    Args:
        targets: Targets, (n, *). Integers are classes; floating-point targets are binned by their quantiles, several
            columns by the sum of the standardised columns.
        num_bins: Number of quantile bins.
        ignore_index: Label of pixels that do not count.

    Returns:
        The strata, (n,).

    Example:
        >>> compute_strata(torch.tensor([0.1, 0.2, 0.9, 0.8]), num_bins=2).tolist()
        [0, 0, 1, 1]
    """
    n = check_int("n", len(targets), minimum=1)
    flat = targets.detach().cpu().reshape(n, -1)
    if flat.is_floating_point():
        std = flat.std(0, correction=0)
        score = ((flat - flat.mean(0)) / std.where(std > 0, 1)).sum(1)
        ranks = torch.empty(n, dtype=torch.int64)
        ranks[score.argsort(stable=True)] = torch.arange(n)
        return ranks * min(num_bins, n) // n
    flat = flat.to(torch.int64)  # in uint8, label 156 and −100 are the same byte
    if flat.shape[1] == 1:
        return flat[:, 0]
    valid = (row[row != ignore_index] for row in flat)
    return torch.stack([labels.mode().values if len(labels) else torch.tensor(-1) for labels in valid])


@dataclass(frozen=True)
class BlockTable:
    """Block assignment u as a table, for data of known length.

    Args:
        blocks: Block of each example, (n,).
        num_blocks: Number of blocks S.
    """

    blocks: Tensor
    num_blocks: int

    def __call__(self, index: Tensor) -> Tensor:
        """Return the blocks of these examples."""
        try:
            return self.blocks.index_select(0, index.cpu())  # several times faster than self.blocks[index]
        except (IndexError, RuntimeError, AttributeError, TypeError):
            expected = f"numbers (N,) from 0 to {len(self.blocks) - 1}"
            raise ArgumentError("index", index, expected) from None


@dataclass(frozen=True)
class HashedBlocks:
    """Block assignment u as a hash of the example's number, for iterable data sets of unknown length.

    Args:
        num_blocks: Number of blocks S.
        seed: Seed of the hash.

    Example:
        >>> u = HashedBlocks(num_blocks=8)
        >>> bool((u(torch.arange(100))[50] == u(torch.tensor([50]))[0]))
        True
    """

    num_blocks: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("num_blocks", self.num_blocks, minimum=1)

    def __call__(self, index: Tensor) -> Tensor:
        """Return the blocks of these examples."""
        return hash_to_range(index.cpu(), self.num_blocks, self.seed, "stream")


Blocks = BlockTable | HashedBlocks


# -- the schedule of draws -----------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightSchedule:
    """When α is drawn during training; Algorithm 1 draws once per epoch, and every schedule estimates eq. 2.6.

    Args:
        weight_distribution: Distribution of α.
        blocks: Block of each example.
        seed: Seed of the draws.
        resample: "epoch" (one α per epoch), "step" (one per step), "sample" (one per example) or "pool" (each example
            gets one of 256 draws per epoch: for small nets, where the draws of "sample" take longer than the step).
        warmup: Number of first epochs with α = 1.

    Raises:
        ArgumentError: If `resample` or `warmup` has another value.

    Example:
        >>> schedule = WeightSchedule(Dirichlet(), BlockTable(assign_blocks(6, 3), 3), seed=0)
        >>> alpha, w = schedule.at_epoch(2)(torch.tensor([0, 5]))
        >>> alpha.shape, w.shape
        (torch.Size([3]), torch.Size([2]))
    """

    weight_distribution: WeightDistribution
    blocks: Blocks
    seed: int = 0
    resample: ResampleSchedule = "epoch"
    warmup: int = 0

    def __post_init__(self) -> None:
        check_choice("resample", self.resample, get_args(ResampleSchedule))
        check_int("warmup", self.warmup, minimum=0)

    def at_epoch(self, epoch: int) -> "EpochWeights":
        """Return the weights of an epoch, a function of (seed, epoch) (Algorithm 1, line 3)."""
        return EpochWeights(self, epoch)


@dataclass(frozen=True)
class EpochWeights:
    """The weights of one epoch: a function of the indices of a batch that returns (α, w) with wᵢ = α_{u(i)}.

    Args:
        schedule: The schedule.
        epoch: Number of the epoch.
    """

    schedule: WeightSchedule
    epoch: int

    def __call__(self, index: Tensor, *, step: int | None = None) -> tuple[Tensor, Tensor]:
        """Return α, (S,) or one row per example (N, S), and the loss weights w, (N,).

        Args:
            index: Indices of the examples, (N,).
            step: Number of the optimizer step, for `resample="step"`.
        """
        schedule, blocks = self.schedule, self.schedule.blocks(index)
        size = schedule.blocks.num_blocks
        if self.epoch < schedule.warmup:
            return torch.ones(size, dtype=torch.float64), torch.ones(len(index), dtype=torch.float64)
        if schedule.resample in ("sample", "pool"):
            if schedule.resample == "sample":
                keys = derive_keys(index.cpu(), schedule.seed, "sample", self.epoch)
                alphas = schedule.weight_distribution.sample(keys, size)  # (N, S)
            else:
                alphas = self._pool[hash_to_range(index.cpu(), POOL_SIZE, schedule.seed, "pool", self.epoch)]
            return alphas, alphas.gather(1, blocks[:, None])[:, 0]
        number = self.epoch if schedule.resample == "epoch" else check_int("step", step)
        keys = derive_keys(torch.tensor([number]), schedule.seed, schedule.resample)
        alpha = schedule.weight_distribution.sample(keys, size)[0]  # (S,)
        return alpha, alpha[blocks]

    @cached_property
    def _pool(self) -> Tensor:
        """The draws that the examples of the epoch share, (256, S)."""
        keys = derive_keys(torch.arange(POOL_SIZE), self.schedule.seed, "pool draw", self.epoch)
        return self.schedule.weight_distribution.sample(keys, self.schedule.blocks.num_blocks)
