"""Confidence band of a trained net from a low-rank approximation of the covariance of its weights.

    s²(x) = J(x) (Σ + vvᵀ) J(x)ᵀ,   Σ + vvᵀ ≈ Σ_k u_k u_kᵀ + diag(β)

Σ is the covariance of the influence bootstrap of all weights (`neuboots.methods.influence`): how far another sample of
training rows would have moved them. v is the Newton step from the net's weights to the minimum of its loss, which
mini-batches and early stopping do not reach: another seed ends elsewhere, and where J(x)v is large, the mean is off by
about as much.

The exact form stores the training rows and a matrix of rows × rows. The approximation stores the directions u_k that
explain most of s² at training rows, and one variance β for the weights of each input unit of a layer, fitted to the
exact s² at other rows. A saved estimator thus contains no training row, and a prediction costs a few passes through the
net, whatever the number of training rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from neuboots.head import compute_output
from neuboots.losses import Loss
from neuboots.methods import InfluenceBootstrap
from neuboots.methods._least_squares import covariance_root, working_residuals
from neuboots.methods.influence._tangent import Jacobian, TangentPredictor, build_tangent_predictors
from neuboots.training import TrainingConfig, resolve_fit

MAX_EXACT_ROWS = 1500  # rows × targets of the exact form; of more, a random subset is taken
RANKS = (4, 8, 16, 32, 64, 128)  # numbers of directions that are tried
ERROR_TOLERANCE = 0.05  # relative error of s(x) at which no more directions are tried
_MAX_DIRECTION_VALUES = 1 << 22  # values of all directions together
_SAMPLE_ROWS = 256  # rows that directions, β and the error are computed from
_MAX_BATCH = 1024
_MAX_PRODUCT_VALUES = 1 << 25  # rows × directions × outputs of a layer in memory
_REPLICATE_BATCH = 64


@dataclass(frozen=True, eq=False)
class ConfidenceBand:
    """Standard deviation s(x) of the first k outputs of a net by the covariance of its weights."""

    net: nn.Module  # net of the predictor
    outputs: int  # k
    directions: tuple[Tensor, ...]  # u of each layer, as `Jacobian.pull` returns them: (K, *)
    variances: Tensor  # β, layer after layer: (Q,)
    error: float  # relative RMS error of s(x) at rows that it was not fitted to

    def std(self, x: Tensor) -> Tensor:
        """s(x): (N, k)."""
        jacobian, x = self._jacobian(x)
        directions, variances = [part.to(x) for part in self.directions], self.variances.to(x)
        parts = []
        for some in torch.split(x, min(_MAX_BATCH, _max_rows(directions, len(directions[0])))):
            rows = jacobian.rows(some, batch_rows=_MAX_BATCH)
            parts.append(jacobian.push(rows, directions).square().sum(-1) + jacobian.squares(rows) @ variances)
        return torch.cat(parts).sqrt()

    def _jacobian(self, x: Tensor) -> tuple[Jacobian, Tensor]:
        """J, and x in the net's precision."""
        x = x.to(next(self.net.parameters()).dtype)
        return Jacobian(self.net, "all", x[:2], outputs=self.outputs), x

    def sample(self, x: Tensor, num: int, *, seed: int) -> Tensor:
        """J(x) (θ_b − θ̂) with θ_b ~ N(θ̂, Σ), one function of x for each b: (num, N, k)."""
        jacobian, x = self._jacobian(x)
        generator = torch.Generator().manual_seed(seed)
        found = x.new_empty(num, len(x), self.outputs)
        for start in range(0, num, _REPLICATE_BATCH):
            moves = [self._draw_move(generator) for _ in range(min(_REPLICATE_BATCH, num - start))]
            moved = [torch.stack(part) for part in zip(*moves, strict=True)]
            step = min(_MAX_BATCH, _max_rows(moved, len(moves)))
            for first in range(0, len(x), step):
                rows = jacobian.rows(x[first : first + step], batch_rows=step)
                pushed = jacobian.push(rows, moved).movedim(-1, 0)
                found[start : start + len(moves), first : first + step] = pushed
        return found

    def _draw_move(self, generator: torch.Generator) -> list[Tensor]:
        """θ_b − θ̂ for each layer."""
        z = torch.randn(len(self.directions[0]), generator=generator, dtype=torch.float32)
        moves = [torch.tensordot(z, part, 1) for part in self.directions]
        left = self.variances.sqrt()
        for move in moves:  # those of Linear layers come first
            if not len(left):
                break
            scale, left = left[: move.shape[-1]], left[move.shape[-1] :]
            move += scale * torch.randn(move.shape, generator=generator, dtype=torch.float32)
        return moves

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors to save beside the net."""
        parts = {f"direction.{k}": part.contiguous() for k, part in enumerate(self.directions)}
        return {**parts, "variances": self.variances}

    @classmethod
    def from_state_dict(cls, net: nn.Module, outputs: int, state: dict[str, Tensor], error: float) -> "ConfidenceBand":
        """Band from the tensors of `state_dict`."""
        parts = tuple(state[f"direction.{k}"] for k in range(len(state) - 1))
        return cls(net, outputs, parts, state["variances"], float(error))


def fit_confidence_band(
    net: nn.Module, loss: Loss, x: Tensor, y: Tensor, others: Tensor, *, weighted: bool = False, seed: int = 0
) -> ConfidenceBand:
    """Fit the band of a net that was trained on rows x (n, D) and y; `others` are rows that it was not trained on.

    With `weighted`, the last column of y is the weight of the row's loss.

    >>> x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    >>> net, y = nn.Linear(1, 1).double(), 2 * x + 0.1 * torch.cos(99 * x)
    >>> _ = nn.init.constant_(net.weight, 2.0), nn.init.zeros_(net.bias)
    >>> low, middle = fit_confidence_band(net, nn.MSELoss(), x, y, x).std(torch.tensor([[-1.0], [0.0]]))[:, 0].tolist()
    >>> 0.005 < middle < low < 0.05  # a line is least certain at its ends
    True
    """
    x, others = (rows.to(next(net.parameters()).dtype) for rows in (x, others))
    config = TrainingConfig(epochs=1, batch_size=1024, seed=seed, accelerator="cpu", progress=False)
    method = InfluenceBootstrap(loss=loss, layers="all", max_kernel_rows=MAX_EXACT_ROWS)
    exact = build_tangent_predictors([method], net, resolve_fit(net, (x, y), config), weighted=weighted)[0]
    jacobian, train = exact.tangent.jacobian()
    newton = _newton_step(exact, _gradient(jacobian, loss, x, y, weighted), len(x))
    generator = torch.Generator().manual_seed(seed)
    samples = [_relative(exact, newton, rows) for rows in _sample_rows(x, others, generator)]
    (basis, _), (fit, fit_squares), (check, check_squares) = samples

    directions = torch.linalg.svd(basis, full_matrices=False).Vh  # (≤ rows, S + 1)
    most = max(RANKS[0], _MAX_DIRECTION_VALUES // sum(p.numel() for p in net.parameters()))
    directions = directions[: min(RANKS[-1], most)].T
    if not directions.shape[1]:  # nothing moves the net, which reproduces every row: one direction, of no length
        directions = directions.new_zeros(len(directions), 1)
    tried = []
    for rank in dict.fromkeys(min(rank, directions.shape[1]) for rank in RANKS):
        left = 1.0 - (fit @ directions[:, :rank]).square().sum(1)
        rest = left.new_zeros(fit_squares.shape[1])
        if fit_squares.numel():
            rest = torch.from_numpy(nnls(fit_squares.numpy(), left.numpy())[0])
        ratio = ((check @ directions[:, :rank]).square().sum(1) + check_squares @ rest).sqrt()
        tried.append((float((ratio - 1.0).square().mean().sqrt()) if len(ratio) else 0.0, rank, rest))
        if tried[-1][0] <= ERROR_TOLERANCE:
            break
    best = min(error for error, _, _ in tried)
    error, rank, rest = next(each for each in tried if each[0] <= max(ERROR_TOLERANCE, 1.25 * best))
    by_rows, by_step = directions[:-1, :rank], directions[-1, :rank]
    coefficients = exact.tangent.basis @ (exact.tangent.influence @ covariance_root(exact.weight_distribution, by_rows))
    coefficients = coefficients.view(len(train.z), train.outputs, rank)
    some = [jacobian.pull(train, part) for part in torch.split(coefficients, _max_rows(newton, len(train.z)), -1)]
    pulled = [torch.cat(parts) for parts in zip(*some, strict=True)]
    pulled = [part + torch.tensordot(by_step[:, None].to(v), v, 1) for part, v in zip(pulled, newton, strict=True)]
    return ConfidenceBand(net, train.outputs, tuple(part.float() for part in pulled), rest.float(), error)


def _max_rows(parts: Sequence[Tensor], others: int) -> int:
    """Number of rows for so many directions, or of directions for so many rows: products have the width of a layer."""
    widest = max(part.shape[1] if part.ndim == 3 else 1 for part in parts)
    return max(1, _MAX_PRODUCT_VALUES // (others * widest))


def _gradient(jacobian: Jacobian, loss: Loss, x: Tensor, y: Tensor, weighted: bool) -> list[Tensor]:
    """−∂/∂θ of the sum of all losses through the outputs that are bootstrapped: (1, *) each."""
    total: list[Tensor] = []
    for start in range(0, len(x), _MAX_BATCH):
        batch = slice(start, start + _MAX_BATCH)
        rows, target = jacobian.rows(x[batch], batch_rows=_MAX_BATCH), y[batch]
        weight = target[:, -1:] if weighted else torch.ones_like(target[:, :1])
        slope = working_residuals(loss, rows.z, target[:, :-1] if weighted else target).slope
        parts = jacobian.pull(rows, (weight * slope)[:, : rows.outputs, None])
        total = [mine + part for mine, part in zip(total, parts, strict=True)] if total else parts
    return total


def _newton_step(exact: TangentPredictor, gradient: list[Tensor], n: int) -> list[Tensor]:
    """Newton step v = H⁻¹ g: (1, *) each.

    H is that of the m rows of the exact form, n/m times as large for n rows; g is projected on their Jacobian.
    """
    jacobian, train = exact.tangent.jacobian()
    basis, m = exact.tangent.basis, len(train.z)  # L V
    values = (basis * (jacobian.kernel(train, train) @ basis)).sum(0)  # VᵀLᵀKLV = W
    along = basis.T @ jacobian.push(train, gradient).double().flatten()
    step = m / n * along / (values * (values + exact.ridge * m)).clamp_min(torch.finfo(values.dtype).tiny)
    return jacobian.pull(train, (basis @ step).view(m, train.outputs, 1))


def _relative(exact: TangentPredictor, newton: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Contributions to the exact s² of M outputs at rows x, relative to it, without outputs of zero variance.

    Those of independent weights, rows of norm 1 whose last column is J(x)v: (M, S + 1); and of units of β: (M, Q).
    """
    jacobian, _ = exact.tangent.jacobian()
    rows = jacobian.rows(x)
    drawn = covariance_root(exact.weight_distribution, exact.deviations(x)[1].double().flatten(0, 1).T).T
    moved = torch.cat([drawn, jacobian.push(rows, newton).double().flatten(0, 1)], 1)
    squares = jacobian.squares(rows).double().flatten(0, 1)
    variance = moved.square().sum(1, keepdim=True)
    if not bool(torch.isfinite(variance).all()):
        raise ValueError("its variance is not finite")
    seen = variance[:, 0] > 0
    return (moved / variance.sqrt())[seen], (squares / variance)[seen]


def _sample_rows(x: Tensor, others: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Rows for the directions, for β, and for the error; the last ones are not training rows, if there are enough.

    New rows may be further out and combine values that no training row does: some rows are resampled by column.
    """

    def draw(pool: Tensor) -> Tensor:
        return pool[torch.randperm(len(pool), generator=generator)[:_SAMPLE_ROWS]]

    def perturb() -> Tensor:
        rows = draw(x)
        return rows + 0.2 * torch.randn(rows.shape, generator=generator, dtype=x.dtype)

    def resample_columns() -> Tensor:
        picks = torch.randint(len(x), (_SAMPLE_ROWS // 2, x.shape[1]), generator=generator)
        return x.gather(0, picks) * (1.0 + torch.rand(len(picks), 1, generator=generator, dtype=x.dtype))

    learn = torch.cat([draw(x), resample_columns()])
    fit = torch.cat([perturb(), resample_columns(), resample_columns()])
    return learn, fit, draw(others) if len(others) >= 20 else perturb()


def find_mean_net(predictor: Any, x: Tensor, mean: np.ndarray[Any, Any], noise: float) -> nn.Module | None:
    """Net whose outputs at x are the means (N, k) within 5 % of the noise; None if there is none, as for ensembles."""
    net: nn.Module | None = predictor.net
    if net is None or any(p.is_meta for p in net.parameters()) or (predictor.num_distinct or 1) > 1:
        return None
    try:
        with torch.no_grad():
            z = compute_output(net.eval(), x.to(next(net.parameters()).dtype)).reshape(len(x), -1)
    except (RuntimeError, ValueError, StopIteration):
        return None
    gap = z[:, : mean.shape[1]].double().numpy() - mean
    return net if gap.shape == mean.shape and float(np.sqrt(np.mean(gap**2))) <= 0.05 * noise + 1e-9 else None
