"""Tests of the GGN against dense matrices."""

import math
from typing import Any

import pytest
import torch
from _nets import noise
from torch import nn

from neuboots.methods._curvature import FullGGN, KronGGN, output_hessian
from neuboots.methods._least_squares import working_residuals


@pytest.mark.parametrize("kind", [FullGGN, KronGGN])
def test_ggn_functions_match_the_dense_matrix(kind: type) -> None:
    phi, root, w = noise(9, 3).double(), noise(9, 2, 2, seed=1).double(), noise(9, seed=2).abs().double()
    ggn: Any = kind(2, 3)
    for part in (slice(0, 4), slice(4, 9)):
        ggn.add(phi[part], (root @ root.mT)[part], w[part])
    ggn.decompose()
    J = torch.stack([torch.kron(torch.eye(2, dtype=torch.float64), p[None]) for p in phi])  # (M, 2, 6)
    curvature = root @ root.mT
    H = torch.einsum("m,mck,mce,mel->kl", w, J, curvature, J)
    if kind is KronGGN:
        inner = torch.einsum("m,md,me->de", w * curvature.diagonal(dim1=1, dim2=2).sum(1), phi, phi)
        outer = torch.einsum("m,mce->ce", w * phi.square().sum(1), curvature)
        H = torch.kron(outer, inner) / inner.trace()
    f = (ggn.eigenvalues() + 0.3).reciprocal()
    inverse, v = torch.linalg.inv(H + 0.3 * torch.eye(6)), noise(5, 6, seed=3).double()
    torch.testing.assert_close(ggn.eigenvalues().sort().values, torch.linalg.eigvalsh(H))
    torch.testing.assert_close(ggn.lift(ggn.project(v) * f), v @ inverse)
    torch.testing.assert_close(ggn.at(phi, f), J @ inverse @ J.mT)
    for points in (phi, phi[:2]):
        expected = (J @ inverse @ J.mT)[: len(points)].diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(ggn.diagonal_at(points, f), expected)


@pytest.mark.parametrize(
    ("likelihood", "loss"),
    [("softmax", nn.CrossEntropyLoss()), ("bernoulli", nn.BCEWithLogitsLoss()), ("squared", nn.MSELoss())],
)
def test_output_hessian_matches_working_residuals(likelihood: Any, loss: Any) -> None:
    z = noise(5, 3).double()
    y = torch.arange(5) % 3 if likelihood == "softmax" else (noise(5, 3) > 0).double()
    root = working_residuals(loss, z, y).root
    torch.testing.assert_close(output_hessian(likelihood, z), root @ root.mT)


def test_variance_below_its_floor_has_no_curvature() -> None:
    found = output_hessian("gaussian", torch.tensor([[0.0, -13.0], [0.0, -12.0]], dtype=torch.float64))
    expected = torch.tensor([[math.exp(12), 0.0], [math.exp(12), 0.5]], dtype=torch.float64)
    torch.testing.assert_close(found, torch.diag_embed(expected))
