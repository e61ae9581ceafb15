"""Weight distributions against exact moments, blocks u: [n] → [S], and the schedule of draws."""

import itertools
import json
import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from _reference import p_value, standard_errors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neuboots import ArgumentError
from neuboots._prng import derive_keys
from neuboots.weights import (
    BlockTable,
    Constant,
    Dirichlet,
    Exponential,
    HashedBlocks,
    Multinomial,
    WeightDistribution,
    WeightSchedule,
    apply_link,
    assign_blocks,
    build_distribution,
    check_weight_distribution,
    compute_strata,
    describe_distribution,
    link_moments,
)

DISTRIBUTIONS = [
    Dirichlet(),
    Dirichlet(0.3),
    Dirichlet(5.0),
    Exponential(),
    Exponential(0.5),
    Exponential(4.0),
    Multinomial(),
    Constant(),
]
SIZES = [1, 2, 7, 64]
NUM = 10_000
many = settings(deadline=None, max_examples=60, derandomize=True)
distribution_and_size = [
    pytest.param(weight_distribution, size, id=f"{weight_distribution}-{size}")
    for weight_distribution in DISTRIBUTIONS
    for size in SIZES
]


def sample(weight_distribution: WeightDistribution, num: int, size: int, *name: int | str) -> Tensor:
    return weight_distribution.sample(derive_keys(torch.arange(num), *name), size)


def near(estimate: np.ndarray, exact: np.ndarray | float, error: np.ndarray, comparisons: int) -> bool:
    """Within k standard errors, k by Bonferroni; a standard error of 0 leaves 10⁻¹² for rounding."""
    return bool((np.abs(estimate - exact) <= standard_errors(comparisons) * error + 1e-12).all())


# -- distributions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weight_distribution", "size"), distribution_and_size)
def test_moments_match_samples(weight_distribution: WeightDistribution, size: int) -> None:
    """Every mean and every entry of the covariance matrix, with the standard errors of these very samples."""
    deviation = sample(weight_distribution, NUM, size, 1, "moments").numpy() - 1.0  # the exact mean is 1
    comparisons = len(distribution_and_size) * (size + size * size)
    assert near(deviation.mean(0), 0.0, deviation.std(0) / math.sqrt(NUM), comparisons)

    v, c = weight_distribution.covariance(size)
    exact = (v - c) * np.eye(size) + c
    products = deviation.T @ deviation / NUM
    squares = (deviation**2).T @ (deviation**2) / NUM
    error = np.sqrt(np.maximum(squares - products**2, 0.0) / NUM)
    assert near(products, exact, error, comparisons)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weight_distribution", [Dirichlet(0.3), Dirichlet(), Dirichlet(5.0), Multinomial()], ids=str)
def test_rows_are_nonnegative_and_sum_to_S(weight_distribution: WeightDistribution, size: int) -> None:
    alpha = sample(weight_distribution, 1000, size, 0)
    assert alpha.shape == (1000, size)
    # a sum of S rounded terms, each off by a few units in the last place
    assert ((alpha.sum(1) - size).abs() <= 4 * size * torch.finfo(torch.float64).eps).all()
    if isinstance(weight_distribution, Multinomial):
        assert torch.equal(alpha, alpha.round().clamp_min(0))
    else:
        assert (alpha > 0).all()


def test_marginal_distributions() -> None:
    """S × Beta, Gamma and Binomial; Kolmogorov–Smirnov and χ² over 7 marginals."""
    for c in (0.3, 1.0, 5.0):
        alpha = sample(Dirichlet(c), NUM, 7, 2)[:, 3].numpy() / 7
        assert scipy.stats.kstest(alpha, scipy.stats.beta(c, 6 * c).cdf).pvalue > p_value(7)
    for c in (0.5, 1.0, 4.0):
        alpha = sample(Exponential(c), NUM, 7, 2)[:, 3].numpy()
        assert scipy.stats.kstest(alpha, scipy.stats.gamma(c, scale=1 / c).cdf).pvalue > p_value(7)
    counts = torch.bincount(sample(Multinomial(), NUM, 7, 2)[:, 3].long(), minlength=8).numpy()
    expected = scipy.stats.binom(7, 1 / 7).pmf(np.arange(8)) * NUM
    observed, expected = ([*x[:4], x[4:].sum()] for x in (counts, expected))  # five cells that are well filled
    assert scipy.stats.chisquare(observed, expected).pvalue > p_value(7)


@pytest.mark.parametrize("weight_distribution", DISTRIBUTIONS, ids=str)
def test_sample_row_depends_on_its_key_only(weight_distribution: WeightDistribution) -> None:
    rows = torch.tensor([5, 0, 5, 3])
    alpha = weight_distribution.sample(derive_keys(rows, 9), 6)
    assert torch.equal(alpha, sample(weight_distribution, 8, 6, 9)[rows])
    assert alpha.dtype == torch.float64


def test_weights_of_a_tiny_concentration_are_finite() -> None:
    """Every draw of a Gamma(10⁻⁴) may be rounded to zero."""
    alpha = sample(Dirichlet(1e-4), 20, 2, 0)
    torch.testing.assert_close(alpha.sum(1), torch.full((20,), 2.0, dtype=torch.float64))


def test_a_single_weight_has_no_covariance() -> None:
    assert [weight_distribution.covariance(1) for weight_distribution in (Dirichlet(3.0), Multinomial())] == [
        (0.0, 0.0)
    ] * 2


@pytest.mark.parametrize("weight_distribution", DISTRIBUTIONS, ids=str)
def test_description_gives_the_distribution_back(weight_distribution: WeightDistribution) -> None:
    description = json.loads(json.dumps(describe_distribution(weight_distribution)))
    assert build_distribution(description) == weight_distribution
    assert description["name"] == type(weight_distribution).__name__.lower()  # files of models hold these names
    check_weight_distribution(weight_distribution)


# -- links ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("c", "size"), [*itertools.product([0.3, 1.0, 5.0], [2, 7, 64]), (1.0, 2048)])
@pytest.mark.parametrize("t", [1.0, 2.0])
def test_dirichlet_laplace_transform_matches_series(c: float, size: int, t: float) -> None:
    """₁F₁ in extended precision; logarithms of about S c cost some digits of the double."""
    for parts in (1, 2, size - 1):
        with mpmath.workdps(40):
            exact = float(mpmath.hyp1f1(parts * c, size * c, -t * size, maxprec=10**5))
        rounding = 10 * (1 + math.lgamma(size * c + t * size)) * torch.finfo(torch.float64).eps
        assert Dirichlet(c).laplace_transform(t, parts, size) == pytest.approx(exact, rel=rounding)
    assert Dirichlet(c).laplace_transform(t, size, size) == math.exp(-t * size)


@pytest.mark.parametrize(("weight_distribution", "size"), distribution_and_size)
@pytest.mark.parametrize("link", ["identity", "exp"])
def test_link_moments_match_samples(weight_distribution: WeightDistribution, size: int, link: str) -> None:
    """Averages over the exchangeable entries of each row, which are independent between rows."""
    mean, variance, covariance = link_moments(weight_distribution, link, size)
    factor = apply_link(sample(weight_distribution, NUM, size, 3, "link"), link).numpy()
    deviation = factor - mean
    rows = [factor.mean(1) - mean, (deviation**2).mean(1) - variance]
    if size > 1:
        pairs = (deviation.sum(1) ** 2 - (deviation**2).sum(1)) / (size * (size - 1))
        rows.append(pairs - covariance)
    for row in rows:
        assert near(row.mean(), 0.0, row.std() / math.sqrt(NUM), comparisons=6 * len(distribution_and_size))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_link_moments_of_multinomial_by_enumeration(size: int) -> None:
    """Over all S^S outcomes of S draws, which are equally probable."""
    outcomes = np.array([np.bincount(draws, minlength=size) for draws in itertools.product(range(size), repeat=size)])
    factors = np.exp(-outcomes[:, [0, -1]])  # (S^S, 2)
    exact = np.cov(factors.T, bias=True)
    covariance = exact[0, 1] if size > 1 else 0.0
    found = link_moments(Multinomial(), "exp", size)
    assert found == pytest.approx((factors[:, 0].mean(), exact[0, 0], covariance), abs=1e-14)


# -- blocks --------------------------------------------------------------------------------------------


def spread(blocks: Tensor, size: int) -> int:
    counts = torch.bincount(blocks, minlength=size)
    assert len(counts) == size  # no block beyond S − 1
    return int(counts.max() - counts.min())


@many
@given(
    st.lists(st.integers(-3, 4), min_size=1, max_size=120),
    st.integers(1, 150),
    st.integers(0, 2**63),
    st.booleans(),
)
def test_block_sizes_differ_by_at_most_one(labels: list[int], size: int, seed: int, stratify: bool) -> None:
    n, strata = len(labels), torch.tensor(labels)
    u = assign_blocks(n, size, strata=strata if stratify else None, seed=seed)
    assert u.shape == (n,)
    assert u.dtype == torch.int64
    assert spread(u, size) <= 1
    if stratify:
        assert all(spread(u[strata == label], size) <= 1 for label in set(labels))
    if size >= n:
        assert len(u.unique()) == n  # every point has its own block, and S = n is a permutation
    assert torch.equal(u, assign_blocks(n, size, strata=strata if stratify else None, seed=seed))


@pytest.mark.parametrize("size", [0, 10**13])
@pytest.mark.parametrize("weight_distribution", [Dirichlet(), Exponential(), Multinomial()], ids=str)
def test_numbers_of_weights_are_checked(weight_distribution: WeightDistribution, size: int) -> None:
    with pytest.raises(ArgumentError) as caught:
        sample(weight_distribution, 2, size, 0)
    assert caught.value.name == "size"


def test_one_example_has_one_block() -> None:
    assert assign_blocks(1, 1).tolist() == [0]


def test_blocks_are_uniform() -> None:
    """χ² over 2,000 seeds: u(0) is uniform, so is the block that holds one point more than the others, and
    points 0 and 1 share a block as often as in a deal of 13 cards to 4 players: 3 · 3 · 2 + 4 · 3 pairs of 13 · 12."""
    tables = torch.stack([assign_blocks(13, 4, seed=seed) for seed in range(2000)])
    largest = torch.nn.functional.one_hot(tables, 4).sum(1).argmax(1)
    for places in (tables[:, 0], largest):
        assert scipy.stats.chisquare(torch.bincount(places, minlength=4).numpy()).pvalue > p_value(3)
    together = int((tables[:, 0] == tables[:, 1]).sum())
    assert scipy.stats.binomtest(together, 2000, 30 / 156).pvalue > p_value(3)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("size", lambda: link_moments(Dirichlet(), "exp", 0)),
        ("num_blocks", lambda: assign_blocks(5, 0)),
        ("num_blocks", lambda: assign_blocks(5, 10**13)),  # 400 TB
        ("n", lambda: assign_blocks(0, 3)),
        ("strata", lambda: assign_blocks(5, 3, strata=torch.zeros(4))),
        ("strata", lambda: assign_blocks(5, 3, strata=torch.zeros(5, 1))),
        ("concentration", lambda: Dirichlet(0.0)),
        ("concentration", lambda: Dirichlet(math.nan)),
        ("concentration", lambda: Exponential(math.inf)),
        ("weight_distribution", lambda: check_weight_distribution(Dirichlet)),
        ("weight_distribution", lambda: check_weight_distribution("dirichlet")),
        ("weight_distribution", lambda: describe_distribution(object())),
        ("n", lambda: compute_strata(torch.zeros(0))),
        ("num_blocks", lambda: HashedBlocks(0)),
        ("resample", lambda: WeightSchedule(Dirichlet(), HashedBlocks(5), resample="day")),
        ("warmup", lambda: WeightSchedule(Dirichlet(), HashedBlocks(5), warmup=-1)),
        ("step", lambda: WeightSchedule(Dirichlet(), HashedBlocks(5), resample="step").at_epoch(0)(INDEX)),
    ],
)
def test_wrong_argument_raises(name: str, make: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()
    assert caught.value.name == name


# -- strata --------------------------------------------------------------------------------------------


def test_strata_of_labels() -> None:
    assert compute_strata(torch.tensor([2, 0, 2, -100])).tolist() == [2, 0, 2, -100]
    assert compute_strata(torch.tensor([[2], [0]], dtype=torch.uint8)).tolist() == [2, 0]
    assert compute_strata(torch.tensor([True, False])).tolist() == [1, 0]


@many
@given(st.lists(st.integers(0, 20), min_size=1, max_size=80), st.integers(1, 12))
def test_strata_of_continuous_targets_are_quantile_bins(values: list[int], num_bins: int) -> None:
    """Whole numbers make many ties: the bins are in the order of the targets all the same."""
    y = torch.tensor(values, dtype=torch.float32)
    bins = compute_strata(y, num_bins=num_bins)
    used = min(num_bins, len(values))
    assert spread(bins, used) <= 1
    for low in range(used - 1):
        assert y[bins == low].max() <= y[bins == low + 1].min()


def test_strata_of_several_columns() -> None:
    """A column on a scale 10⁶ times larger counts no more than the other; a constant one counts nothing."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=(60, 2)) * [1.0, 1e6] + [5.0, -3e6]
    score = scipy.stats.zscore(y).sum(1)
    order = scipy.stats.rankdata(score).astype(int) - 1
    columns = torch.from_numpy(np.column_stack([y, np.full(60, 7.0)]))
    assert compute_strata(columns, num_bins=6).tolist() == (order // 10).tolist()


def test_strata_of_masks_are_majority_classes() -> None:
    masks = torch.tensor([[[0, 1], [1, 2]], [[3, 3], [3, 0]], [[255, 255], [255, 4]], [[255, 255], [255, 255]]])
    assert compute_strata(masks, ignore_index=255).tolist() == [1, 3, 4, -1]
    assert compute_strata(masks.to(torch.uint8), ignore_index=255).tolist() == [1, 3, 4, -1]
    unsigned = torch.tensor([[[156, 156], [156, 1]]], dtype=torch.uint8)  # 156 is −100 modulo 256
    assert compute_strata(unsigned).tolist() == [156]
    assert compute_strata(torch.tensor([[[-100, -100], [-100, 1]], [[-101, -101], [99, 1]]])).tolist() == [1, -101]
    assert len(compute_strata(torch.arange(40.0)).unique()) == 10


# -- streams -------------------------------------------------------------------------------------------


def test_hashed_blocks_are_stateless_and_balanced() -> None:
    u = HashedBlocks(num_blocks=16, seed=3)
    whole = u(torch.arange(20_000))
    rows = torch.tensor([19_999, 0, 7, 7])
    assert torch.equal(u(rows), whole[rows])
    assert torch.equal(HashedBlocks(16, 3)(rows), u(rows))
    assert HashedBlocks(1)(rows).tolist() == [0] * 4
    assert scipy.stats.chisquare(torch.bincount(whole, minlength=16).numpy()).pvalue > p_value(2)
    # another seed agrees on one point in 16, as chance has it
    same = int((HashedBlocks(16, 4)(torch.arange(20_000)) == whole).sum())
    assert scipy.stats.binomtest(same, 20_000, 1 / 16).pvalue > p_value(2)


# -- the schedule --------------------------------------------------------------------------------------

PLAN_BLOCKS = [BlockTable(assign_blocks(30, 5), 5), HashedBlocks(5)]
both_kinds = pytest.mark.parametrize("blocks", PLAN_BLOCKS, ids=["table", "hash"])
INDEX = torch.tensor([7, 29, 0, 7])


@both_kinds
def test_resample_epoch(blocks: BlockTable | HashedBlocks) -> None:
    plan = WeightSchedule(Dirichlet(), blocks, seed=0)
    first, second = plan.at_epoch(0), plan.at_epoch(1)
    for epoch in range(50):
        alpha, w = plan.at_epoch(epoch)(INDEX)
        assert torch.equal(w, alpha[blocks(INDEX)])
    alpha, _ = first(INDEX, step=0)
    again, others = first(torch.arange(30), step=11)
    assert torch.equal(again, alpha)
    assert torch.equal(others, alpha[blocks(torch.arange(30))])
    assert not torch.equal(second(INDEX)[0], alpha)
    assert torch.equal(WeightSchedule(Dirichlet(), blocks, seed=0).at_epoch(1)(INDEX)[0], second(INDEX)[0])
    assert not torch.equal(WeightSchedule(Dirichlet(), blocks, seed=1).at_epoch(0)(INDEX)[0], alpha)


@both_kinds
def test_resample_step(blocks: BlockTable | HashedBlocks) -> None:
    weights = WeightSchedule(Dirichlet(), blocks, resample="step").at_epoch(0)
    alpha, w = weights(INDEX, step=3)
    assert alpha.shape == (5,)
    assert torch.equal(w, alpha[blocks(INDEX)])
    assert torch.equal(weights(torch.tensor([1]), step=3)[0], alpha)
    assert not torch.equal(weights(INDEX, step=4)[0], alpha)


@both_kinds
def test_resample_sample(blocks: BlockTable | HashedBlocks) -> None:
    """α_i is a function of (seed, epoch, i) alone: order, batch and step do not matter."""
    plan = WeightSchedule(Dirichlet(), blocks, seed=0, resample="sample")
    weights = plan.at_epoch(2)
    alphas, w = weights(torch.arange(30))
    assert alphas.shape == (30, 5)
    assert len(alphas.unique(dim=0)) == 30
    assert w.tolist() == [alphas[i, blocks(torch.tensor([i]))[0]].item() for i in range(30)]
    some, some_w = weights(INDEX, step=99)
    assert torch.equal(some, alphas[INDEX])
    assert torch.equal(some_w, w[INDEX])
    for other in (plan.at_epoch(3), WeightSchedule(Dirichlet(), blocks, seed=1, resample="sample").at_epoch(2)):
        assert not (other(torch.arange(30))[0] == alphas).any()


@pytest.mark.parametrize("resample", ["epoch", "step", "sample"])
def test_warmup_weights_are_one(resample: str) -> None:
    plan = WeightSchedule(Dirichlet(), PLAN_BLOCKS[0], resample=resample, warmup=2)
    for epoch in (0, 1):
        alpha, w = plan.at_epoch(epoch)(INDEX, step=0)
        assert alpha.tolist() == [1.0] * 5
        assert w.tolist() == [1.0] * 4
        assert alpha.dtype == w.dtype == torch.float64
    alpha, w = plan.at_epoch(2)(INDEX, step=0)
    unwarmed = WeightSchedule(Dirichlet(), PLAN_BLOCKS[0], resample=resample).at_epoch(2)(INDEX, step=0)
    assert not (w == 1).any()
    assert torch.equal(alpha, unwarmed[0])
    assert torch.equal(w, unwarmed[1])


@pytest.mark.parametrize("resample", ["epoch", "step", "sample"])
def test_weights_follow_the_distribution(resample: str) -> None:
    """Over 600 epochs or steps, wᵢ/S is Beta(1, S − 1), for each of the three schedules."""
    plan = WeightSchedule(Dirichlet(), PLAN_BLOCKS[0], seed=5, resample=resample)
    point = torch.tensor([17])
    drawn = [float(plan.at_epoch(t)(point, step=t)[1][0]) / 5 for t in range(600)]
    assert scipy.stats.kstest(drawn, scipy.stats.beta(1, 4).cdf).pvalue > p_value(3)


@both_kinds
def test_resample_pool(blocks: BlockTable | HashedBlocks) -> None:
    """256 draws serve an epoch, others the next one; which of them an example has is a function of its index."""
    many = torch.arange(2000) if isinstance(blocks, HashedBlocks) else torch.arange(30)
    plan = WeightSchedule(Dirichlet(), blocks, seed=0, resample="pool")
    alphas, w = plan.at_epoch(2)(many)
    assert torch.equal(plan.at_epoch(2)(INDEX)[0], alphas[INDEX])
    assert torch.equal(w, alphas.gather(1, blocks(many)[:, None])[:, 0])
    assert min(200, 0.8 * len(many)) < len(alphas.unique(dim=0)) <= 256
    for other in (plan.at_epoch(3), WeightSchedule(Dirichlet(), blocks, seed=1, resample="pool").at_epoch(2)):
        assert not torch.isin(other(many)[0], alphas).any()


def test_examples_share_draws_of_a_pool_with_others_in_each_epoch() -> None:
    index, plan = torch.arange(1000), WeightSchedule(Dirichlet(), HashedBlocks(5), resample="pool")
    draws = [plan.at_epoch(epoch)(index)[0].unique(dim=0, return_inverse=True)[1] for epoch in (0, 1)]
    first, second = (draw[:, None] == draw for draw in draws)
    both = int((first & second).sum()) - len(index)  # of 10⁶ pairs one in 256² by chance
    assert both < 100


def test_seeds_are_zero_by_default() -> None:
    assert torch.equal(assign_blocks(30, 5), assign_blocks(30, 5, seed=0))
    assert (HashedBlocks(5), WeightSchedule(Dirichlet(), HashedBlocks(5))) == (
        HashedBlocks(5, seed=0),
        WeightSchedule(Dirichlet(), HashedBlocks(5), seed=0),
    )


@pytest.mark.parametrize("weight_distribution", [Dirichlet(), Exponential(), Multinomial(), Constant()])
def test_wrong_keys_and_sizes_are_rejected_by_name(weight_distribution: WeightDistribution) -> None:
    keys = derive_keys(torch.arange(3), 0)
    for name, arguments in (
        ("keys", (None, 4)),
        ("keys", (torch.rand(3), 4)),
        ("keys", (keys[None], 4)),
        ("size", (keys, 0)),
        ("size", (keys, -1)),
        ("size", (keys, 2.5)),
        ("size", (keys, 10**15)),
    ):
        with pytest.raises(ArgumentError) as raised:
            weight_distribution.sample(*arguments)
        assert raised.value.name == name


def test_moments_of_no_blocks_or_an_unknown_link_are_rejected() -> None:
    for name, link, size in (("size", "exp", 0), ("size", "exp", -(10**20)), ("link", "log", 4)):
        with pytest.raises(ArgumentError) as raised:
            link_moments(Dirichlet(), link, size)  # type: ignore[arg-type]
        assert raised.value.name == name


@pytest.mark.parametrize("index", [torch.tensor([0, 9]), torch.tensor([-1]), torch.rand(2), None])
def test_examples_that_a_table_does_not_have_are_rejected(index: Tensor | None) -> None:
    with pytest.raises(ArgumentError) as raised:
        BlockTable(torch.tensor([0, 1, 0]), 2)(index)  # type: ignore[arg-type]
    assert raised.value.name == "index"


@pytest.mark.parametrize("distribution", [Dirichlet, Exponential])
def test_huge_concentrations_are_rejected(distribution: type[Dirichlet | Exponential]) -> None:
    weights = distribution(1e100).sample(derive_keys(torch.arange(3), 0), 5)
    torch.testing.assert_close(weights, torch.ones(3, 5).double())
    with pytest.raises(ArgumentError, match="concentration"):
        distribution(1.1e100)
