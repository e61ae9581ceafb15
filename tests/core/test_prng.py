"""Draws named by keys: the published sequence, the key alone, and the right distribution."""

from random import Random

import numpy as np
import pytest
import scipy.stats
import torch
from _reference import as_int64, gamma, p_value, splitmix64, standard_errors
from hypothesis import given, settings
from hypothesis import strategies as st

from neuboots._prng import derive_keys, draw_gamma, draw_normal, draw_uniform, hash_to_range, stable_hash

PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]
HASHES = [8405428280607487038, 5694367389426422167, -6023868720686207888]
KEYS = [-8275191639509082295, -6314907043946546630, 2048806985838041702]
PLACES = [11, 94, 45, 79, 95, 21, 58, 85]
GAMMAS = [2.220451177784625, 3.376233972648327]  # log and cos may differ in the last digit between machines
SHAPES = [0.3, 0.5, 1.0, 2.5, 5.0, 50.0]
many = settings(deadline=None, max_examples=50, derandomize=True)
seeds = st.integers(0, 2**64 - 1)


def top_bits(seed: int, count: int) -> list[float]:
    """(k + ½) / 2⁵² for the upper 52 bits k of the words of a seed: exact in double precision."""
    return [((word >> 12) + 0.5) / 2**52 for word in splitmix64(seed, count)]


def key(seed: int) -> torch.Tensor:
    return torch.tensor([as_int64(seed)])


# -- the sequence --------------------------------------------------------------------------------------


def test_reference_is_the_published_splitmix64() -> None:
    assert splitmix64(1234567, 5) == PUBLISHED


@many
@given(seeds)
def test_uniform_matches_splitmix64(seed: int) -> None:
    assert draw_uniform(key(seed), torch.arange(20)).tolist() == top_bits(seed, 20)


@pytest.mark.parametrize(
    ("seed", "word", "expected"),
    [(0x61C8864680B583EB, 0, 2.0**-53), (0x31628AF67B2131AB, 2**64 - 1, 1 - 2.0**-53)],
)
def test_uniform_is_never_0_or_1(seed: int, word: int, expected: float) -> None:
    """The smallest and the largest word: log u stays finite, and −log u positive."""
    assert splitmix64(seed, 1) == [word]
    assert draw_uniform(key(seed), torch.arange(1)).item() == expected


# -- names ---------------------------------------------------------------------------------------------


def test_hashes_and_keys_are_stable() -> None:
    """Saved runs and replicates are named by these numbers: a new value breaks every one of them."""
    assert stable_hash(0, "epoch", 3) == HASHES[0]
    assert stable_hash() == HASHES[1]
    assert stable_hash("α", -1, 2**70) == HASHES[2]
    assert derive_keys(torch.tensor([0, 1, 10**12]), 0, "replicate").tolist() == KEYS
    assert hash_to_range(torch.arange(8), 100, 0, "stream").tolist() == PLACES
    assert draw_gamma(derive_keys(torch.arange(1), 0), 2, 2.5).tolist() == [pytest.approx(GAMMAS, rel=1e-12)]


def test_hash_distinguishes_names() -> None:
    names = [(1, 2), (12,), ("1", 2), (1, "2"), ("1, 2",), (2, 1), ("1", "2"), (-1, 2), (), (1,), (0,)]
    assert len({stable_hash(*name) for name in names}) == len(names)


@pytest.mark.parametrize("three", [np.int64(3), np.uint8(3), torch.tensor(3)])
def test_hash_of_any_integer_type(three: int) -> None:
    assert stable_hash(0, three) == stable_hash(0, 3)


@many
@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from(SHAPES), st.randoms(use_true_random=False))
def test_draws_depend_on_the_key_only(num: int, size: int, shape: float, random: Random) -> None:
    """Any subset, in any order, with repetitions: row k is a function of keys[k], bit for bit."""
    keys = derive_keys(torch.arange(num), 7, "replicate")
    rows = torch.tensor([random.randrange(num) for _ in range(random.randint(1, 2 * num))])
    assert torch.equal(derive_keys(rows, 7, "replicate"), keys[rows])
    assert torch.equal(draw_gamma(keys[rows], size, shape), draw_gamma(keys, size, shape)[rows])
    places = hash_to_range(torch.arange(num), size, 7)
    assert torch.equal(hash_to_range(rows, size, 7), places[rows])
    counters = torch.arange(size)
    assert torch.equal(draw_uniform(keys[rows, None], counters), draw_uniform(keys[:, None], counters)[rows])
    assert torch.equal(draw_uniform(keys[:, None], counters.flip(0)), draw_uniform(keys[:, None], counters).flip(1))


def test_keys_are_distinct() -> None:
    """A collision among 2·10⁵ random 64-bit words has probability 10⁻⁹."""
    ids = torch.arange(50_000)
    keys = torch.cat([derive_keys(ids, *name) for name in [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0)]])
    assert len(keys.unique()) == 4 * len(ids)


# -- the distribution ----------------------------------------------------------------------------------


def test_uniform_distribution() -> None:
    along_counters = draw_uniform(derive_keys(torch.arange(1), 3), torch.arange(50_000))
    along_keys = draw_uniform(derive_keys(torch.arange(50_000), 3), torch.zeros(1, dtype=torch.int64))
    for drawn in (along_counters, along_keys):
        assert scipy.stats.kstest(drawn.numpy(), "uniform").pvalue > p_value(2)


@pytest.mark.parametrize("shape", SHAPES)
def test_gamma_matches_reference(shape: float) -> None:
    """Each cell with its own uniforms, none used twice; log and cos may differ in the last digits."""
    words = [stable_hash("cell", k) for k in range(200)]
    drawn = draw_gamma(torch.tensor(words), 3, shape)
    expected = torch.tensor([[gamma(word, cell, 3, shape) for cell in range(3)] for word in words], dtype=torch.float64)
    torch.testing.assert_close(drawn, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_gamma_draws_are_uncorrelated(shape: float) -> None:
    """Rank correlations of 20,000 pairs have standard error 1/√19,999 under independence."""
    ids = torch.arange(20_000)
    drawn = draw_gamma(derive_keys(ids, 0, "a"), 3, shape).numpy()
    others = {
        "next cell": drawn[:, 1],
        "cell after": drawn[:, 2],
        "next key": np.roll(drawn[:, 0], 1),
        "name": draw_gamma(derive_keys(ids, 0, "b"), 3, shape)[:, 0].numpy(),
        "seed": draw_gamma(derive_keys(ids, 1, "a"), 3, shape)[:, 0].numpy(),
    }
    allowed = standard_errors(len(SHAPES) * len(others)) / np.sqrt(len(ids) - 1)
    for what, other in others.items():
        assert abs(scipy.stats.spearmanr(drawn[:, 0], other).statistic) < allowed, what


@pytest.mark.parametrize("size", [2, 7, 64, 1000])
@pytest.mark.parametrize("stride", [1, 2, 1024])
def test_hash_to_range_is_uniform(size: int, stride: int) -> None:
    """χ² over the places, for consecutive ids and for those of one worker in 2 and in 1,024."""
    places = hash_to_range(torch.arange(50_000) * stride, size, 0, "stream")
    assert int(places.min()) >= 0
    counts = torch.bincount(places, minlength=size)
    assert len(counts) == size
    assert scipy.stats.chisquare(counts.numpy()).pvalue > p_value(12)


def test_normal_is_box_muller() -> None:
    u = draw_uniform(key(5), torch.arange(6)).numpy()
    radius, angle = np.sqrt(-2 * np.log(u[::2])), 2 * np.pi * u[1::2]
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).ravel()
    np.testing.assert_allclose(draw_normal(key(5), 6)[0].numpy(), pairs, rtol=1e-12)
    np.testing.assert_allclose(draw_normal(key(5), 5)[0].numpy(), pairs[:5], rtol=1e-12)
