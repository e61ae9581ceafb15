"""Tests of the block bootstrap study: weights, ridge regression, distances and checks."""

import pytest
import torch
from torch.utils.data import TensorDataset

from neuboots_paper.studies.blocks import (
    GROUPINGS,
    BlockBootstrap,
    assign_groups,
    block_weights,
    compute_distances,
    ridge,
)


@pytest.mark.parametrize("kind", GROUPINGS)
@pytest.mark.parametrize("size", [1, 7, 50])
def test_groups_have_equal_sizes(kind: str, size: int) -> None:
    y = torch.randn(50, generator=torch.Generator().manual_seed(0))
    blocks = assign_groups(kind, y, size, 3)
    counts = torch.bincount(blocks, minlength=size)
    assert len(counts) == size
    assert int(counts.max() - counts.min()) <= 1
    if kind == "sorted":
        assert bool((blocks[y.argsort()].diff() >= 0).all())
    if kind == "contiguous":
        assert bool((blocks.diff() >= 0).all())


def test_block_weights_are_equal_inside_a_block_and_sum_to_n() -> None:
    blocks = assign_groups("random", torch.zeros(20), 5, 0)
    weights = block_weights(blocks, 6, 0, "test")
    assert weights.shape == (6, 20)
    assert weights.sum(1).tolist() == pytest.approx([20.0] * 6)
    for block in range(5):
        inside = weights[:, blocks == block]
        assert bool((inside == inside[:, :1]).all())
    assert bool((weights != block_weights(blocks, 6, 1, "test")).all())


def test_ridge_is_weighted_least_squares() -> None:
    rng = torch.Generator().manual_seed(0)
    phi, y, at = (torch.randn(*shape, generator=rng).double() for shape in ((12, 3), (12,), (4, 3)))
    weights = torch.rand(2, 12, generator=rng).double()
    found = ridge(phi, y, weights, at, 0.1)
    for b in range(2):
        rows = torch.cat([(weights[b] / 12).sqrt()[:, None] * phi, 0.1**0.5 * torch.eye(3).double()])
        targets = torch.cat([(weights[b] / 12).sqrt() * y, torch.zeros(3).double()])
        theta = torch.linalg.lstsq(rows, targets[:, None]).solution[:, 0]
        assert found[b].tolist() == pytest.approx((at @ theta).tolist())


def test_distances_of_known_samples() -> None:
    true = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0)).double()
    same = compute_distances(true, true)
    assert same == {"ks": 0.0, "ks_worst": 0.0, "w1": 0.0, "ratio": 1.0, "ratio_error": 0.0}
    wide = compute_distances(2 * true, true)
    assert wide["ratio"] == pytest.approx(2.0)
    assert wide["ratio_error"] == pytest.approx(1.0)
    assert wide["w1"] == pytest.approx(0.8, abs=0.03)  # E|z| = √(2/π) times (2 − 1)
    assert wide["ks"] == pytest.approx(0.16, abs=0.03)  # of N(0, 4) and N(0, 1)


def test_block_bootstrap_trains_with_block_weights() -> None:
    blocks = (0, 0, 1, 1, 2, 2)
    method = BlockBootstrap(num_members=4, blocks=blocks)
    weights = method._weights(TensorDataset(torch.zeros(6, 1), torch.zeros(6)), 7)
    assert weights is not None
    assert weights.tolist() == block_weights(torch.tensor(blocks), 4, 7, "block weights").float().tolist()
    assert bool((weights[:, 0] == weights[:, 1]).all())
    assert bool((weights[:, 0] != weights[:, 2]).all())
