"""Tests of the GGN and of working residuals against dense matrices and autograd."""

import math
from typing import Any

import pytest
import torch
from _nets import noise
from torch import Tensor, nn

from neuboots.losses import BrierLoss, GaussianNLL, as_loss
from neuboots.methods._curvature import FullGGN, KronGGN, output_hessian, working_residuals


@pytest.mark.parametrize("kind", [FullGGN, KronGGN])
def test_ggn_functions_match_the_dense_matrix(kind: type) -> None:
    phi, root, w = noise(9, 3).double(), noise(9, 2, 2, seed=1).double(), noise(9, seed=2).abs().double()
    ggn: Any = kind(2, 3)
    for part in (slice(0, 4), slice(4, 9)):
        ggn.add_roots(phi[part], root[part], w[part])
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
    s, q = output_hessian(likelihood, z)
    dense = torch.diag_embed(s) - (0 if q is None else q[:, :, None] * q[:, None])
    root = working_residuals(loss, z, y).root
    torch.testing.assert_close(dense, root @ root.mT)


def test_variance_below_its_floor_has_no_curvature() -> None:
    s, q = output_hessian("gaussian", torch.tensor([[0.0, -13.0], [0.0, -12.0]], dtype=torch.float64))
    assert q is None
    torch.testing.assert_close(s, torch.tensor([[math.exp(12), 0.0], [math.exp(12), 0.5]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("loss", "outputs", "target"),
    [
        (nn.CrossEntropyLoss(), 3, torch.tensor([0, 2, 1, 1, 0])),
        (nn.CrossEntropyLoss(label_smoothing=0.1), 3, torch.tensor([0, 2, 1, 1, 0])),
        (nn.CrossEntropyLoss(reduction="none"), 3, torch.tensor([0, 2, 1, 1, 0])),
        (nn.BCEWithLogitsLoss(), 1, torch.tensor([0.0, 1, 1, 0, 1])),
        (lambda z, y: nn.functional.huber_loss(z, y, reduction="none"), 2, noise(5, 2, seed=4)),
        (nn.SoftMarginLoss(reduction="none"), 2, noise(5, 2, seed=4).sign()),
    ],
)
def test_working_residuals_match_the_loss_to_second_order(loss: Any, outputs: int, target: Tensor) -> None:
    z = noise(5, outputs).double()
    root, residual, slope = working_residuals(loss, z, target)
    for i in range(5):

        def of_row(one, i=i):
            return as_loss(loss)(
                one[None], target[i : i + 1].double() if target.is_floating_point() else target[i : i + 1]
            ).sum()

        gradient = torch.autograd.functional.jacobian(of_row, z[i])
        curvature = torch.autograd.functional.hessian(of_row, z[i])
        torch.testing.assert_close(root[i] @ residual[i], -gradient, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(slope[i], -gradient, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(root[i] @ root[i].T, curvature, rtol=1e-5, atol=2e-6)


def test_working_residuals_of_a_gaussian_head_use_the_fisher_information() -> None:
    z, y = noise(6, 4).double(), noise(6, 2, seed=1).double()
    for beta in (0.0, 0.5):
        root, residual, _ = working_residuals(GaussianNLL(beta=beta), z, y)
        mean, log_variance = z.chunk(2, 1)
        weight = (beta * log_variance).exp()
        expected = torch.cat(
            [weight * (y - mean) * (-log_variance).exp(), weight * 0.5 * ((y - mean) ** 2 * (-log_variance).exp() - 1)],
            1,
        )
        torch.testing.assert_close(torch.einsum("mcd,md->mc", root, residual), expected)
        information = torch.cat([weight * (-log_variance).exp(), 0.5 * weight], 1)
        torch.testing.assert_close((root @ root.mT).diagonal(dim1=1, dim2=2), information)


def test_loss_that_is_not_convex_keeps_its_gradient() -> None:
    z = noise(8, 3).double()
    root, residual, _ = working_residuals(BrierLoss(), z, torch.arange(8) % 3)
    assert bool(torch.isfinite(root).all() and torch.isfinite(residual).all())
    z.requires_grad_()
    (slope,) = torch.autograd.grad(BrierLoss()(z, torch.arange(8) % 3).sum(), z)
    torch.testing.assert_close(torch.einsum("mcd,md->mc", root, residual), -slope)
    flat = working_residuals(nn.L1Loss(reduction="none"), z, torch.zeros(8, 3))
    assert not bool(flat.root.any())
    torch.testing.assert_close(flat.slope, -z.detach().sign())
