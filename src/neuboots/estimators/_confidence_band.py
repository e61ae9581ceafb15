"""The confidence band of a trained net, small enough to keep: the covariance of its weights, in a few directions.

    s²(x) = J(x) (Σ + vvᵀ) J(x)ᵀ,   Σ + vvᵀ ≈ Σ_k u_k u_kᵀ + diag(β)

Σ is that of the influence bootstrap of the whole net (`neuboots.methods.influence`): how far other draws of the
training rows would have moved its weights. v is what the training has left undone, the step of Newton from the net's
weights to the minimum of its loss: mini-batches and early stopping leave a net somewhere around it, and another seed
elsewhere. Where J(x)v is large, the net's own mean lies off by about as much.

The exact form keeps the training rows and a matrix of rows × rows. Here are the directions u_k that explain most of s²
at training rows, and for the rest one variance β for the weights of each unit that enters a layer, fitted to the exact
s² at other rows: a saved estimator holds no row that it was trained on, and an answer costs a few passes through the
net, however many rows there were.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots.losses import Loss
from neuboots.methods import InfluenceBootstrap
from neuboots.methods._curvature import working_residuals
from neuboots.methods.influence._jacobian import Jacobian
from neuboots.methods.influence._tangent import TangentPredictor, build_tangent_predictor
from neuboots.training import TrainingConfig

MAX_EXACT_ROWS = 1500  # × targets, of the exact form: beyond, some are drawn
RANKS = (4, 8, 16, 32, 64, 128)  # numbers of directions
ERROR_TOLERANCE = 0.05  # an error of s(x) that asks for no further directions
_NUMBERS = 1 << 22  # in all directions together: of nets with many weights fewer are kept
_ROWS = 256  # that show the directions, the rest, and the error, each
_CHUNK = 1024  # rows that are answered at once, where layers are not very wide
_HELD = 1 << 25  # numbers, rows × directions × a layer's outputs, that are held at once
_REPLICATES = 64  # that are drawn at once


@dataclass(frozen=True, eq=False)
class ConfidenceBand:
    """s(x) of the first k outputs of a net, by the covariance of its weights."""

    net: nn.Module  # that of the predictor
    outputs: int  # k
    directions: tuple[Tensor, ...]  # u, a part for each layer, as `Jacobian.pull` gives them: (K, *)
    rest: Tensor  # β, layer after layer: (Q,)
    error: float  # of s(x), relative: its root mean square over rows that it was not made from

    def std(self, x: Tensor) -> Tensor:
        """s(x): (N, k)."""
        jacobian, x = self._jacobian(x)
        directions, rest = [part.to(x) for part in self.directions], self.rest.to(x)
        parts = []
        for some in torch.split(x, min(_CHUNK, _at_once(directions, len(directions[0])))):
            rows = jacobian.rows(some, batch_rows=_CHUNK)
            parts.append(jacobian.push(rows, directions).square().sum(-1) + jacobian.squares(rows) @ rest)
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
        for start in range(0, num, _REPLICATES):
            moves = [self._move(generator) for _ in range(min(_REPLICATES, num - start))]
            moved = [torch.stack(part) for part in zip(*moves, strict=True)]
            step = min(_CHUNK, _at_once(moved, len(moves)))
            for first in range(0, len(x), step):
                rows = jacobian.rows(x[first : first + step], batch_rows=step)
                pushed = jacobian.push(rows, moved).movedim(-1, 0)
                found[start : start + len(moves), first : first + step] = pushed
        return found

    def _move(self, generator: torch.Generator) -> list[Tensor]:
        """θ_b − θ̂, in parts."""
        z = torch.randn(len(self.directions[0]), generator=generator, dtype=torch.float32)
        moves = [torch.tensordot(z, part, 1) for part in self.directions]
        left = self.rest.sqrt()
        for move in moves:  # those of Linear layers come first
            if not len(left):
                break
            scale, left = left[: move.shape[-1]], left[move.shape[-1] :]
            move += scale * torch.randn(move.shape, generator=generator, dtype=torch.float32)
        return moves

    def state_dict(self) -> dict[str, Tensor]:
        """What is saved beside the net."""
        parts = {f"direction.{k}": part.contiguous() for k, part in enumerate(self.directions)}
        return {**parts, "rest": self.rest}

    @classmethod
    def from_config(cls, net: nn.Module, outputs: int, state: dict[str, Tensor], error: float) -> "ConfidenceBand":
        parts = tuple(state[f"direction.{k}"] for k in range(len(state) - 1))
        return cls(net, outputs, parts, state["rest"], float(error))


def fit_confidence_band(
    net: nn.Module, loss: Loss, x: Tensor, y: Tensor, others: Tensor, *, weighted: bool = False, seed: int = 0
) -> ConfidenceBand:
    """The band of a net that was trained on rows x (n, D) and y; `others` are rows that it has not seen.

    With `weighted` the last column of y is what the loss of the row was multiplied by.

    >>> x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    >>> net, y = nn.Linear(1, 1).double(), 2 * x + 0.1 * torch.cos(99 * x)
    >>> _ = nn.init.constant_(net.weight, 2.0), nn.init.zeros_(net.bias)
    >>> low, middle = fit_confidence_band(net, nn.MSELoss(), x, y, x).std(torch.tensor([[-1.0], [0.0]]))[:, 0].tolist()
    >>> 0.005 < middle < low < 0.05  # a line is least sure at its ends
    True
    """
    x, others = (rows.to(next(net.parameters()).dtype) for rows in (x, others))
    config = TrainingConfig(epochs=1, batch_size=1024, seed=seed, accelerator="cpu", progress=False)
    method = InfluenceBootstrap(loss=loss, layers="all", max_kernel_rows=MAX_EXACT_ROWS)
    exact = build_tangent_predictor(method, net, TensorDataset(x, y), config, weighted=weighted)
    jacobian, train = exact.tangent.jacobian()
    undone = _undone(exact, _gradient(jacobian, loss, x, y, weighted), len(x))
    generator = torch.Generator().manual_seed(seed)
    learn, fit, check = (_relative(exact, undone, rows) for rows in _shown(x, others, generator))

    directions = torch.linalg.svd(learn.moved, full_matrices=False).Vh  # (≤ rows, S + 1)
    most = max(RANKS[0], _NUMBERS // sum(p.numel() for p in net.parameters()))
    directions = directions[: min(RANKS[-1], most)].T
    if not directions.shape[1]:  # nothing moves the net, which reproduces every row: one direction, of no length
        directions = directions.new_zeros(len(directions), 1)
    tried = []
    for rank in dict.fromkeys(min(rank, directions.shape[1]) for rank in RANKS):
        left = 1.0 - (fit.moved @ directions[:, :rank]).square().sum(1)
        rest = left.new_zeros(fit.squares.shape[1])
        if fit.squares.numel():
            rest = torch.from_numpy(nnls(fit.squares.numpy(), left.numpy())[0])
        ratio = ((check.moved @ directions[:, :rank]).square().sum(1) + check.squares @ rest).sqrt()
        tried.append((float((ratio - 1.0).square().mean().sqrt()) if len(ratio) else 0.0, rank, rest))
        if tried[-1][0] <= ERROR_TOLERANCE:
            break
    best = min(error for error, _, _ in tried)
    error, rank, rest = next(each for each in tried if each[0] <= max(ERROR_TOLERANCE, 1.25 * best))
    by_rows, by_step = directions[:-1, :rank], directions[-1, :rank]
    coefficients = exact.tangent.basis @ (exact.tangent.influence @ _spread(exact, by_rows.T).T)
    coefficients = coefficients.view(len(train.z), train.outputs, rank)
    some = [jacobian.pull(train, part) for part in torch.split(coefficients, _at_once(undone, len(train.z)), -1)]
    pulled = [torch.cat(parts) for parts in zip(*some, strict=True)]
    pulled = [part + torch.tensordot(by_step[:, None].to(v), v, 1) for part, v in zip(pulled, undone, strict=True)]
    state = {f"direction.{k}": part.float() for k, part in enumerate(pulled)}
    return ConfidenceBand.from_config(net, train.outputs, {**state, "rest": rest.float()}, error)


def _at_once(parts: Sequence[Tensor], others: int) -> int:
    """How many rows, if there are so many directions, or directions, if so many rows: products have a layer's width."""
    widest = max(part.shape[1] if part.ndim == 3 else 1 for part in parts)
    return max(1, _HELD // (others * widest))


def _gradient(jacobian: Jacobian, loss: Loss, x: Tensor, y: Tensor, weighted: bool) -> list[Tensor]:
    """−∂/∂θ of the sum of all losses, as far as it goes through the outputs that are bootstrapped: (1, *) each."""
    total: list[Tensor] = []
    for start in range(0, len(x), _CHUNK):
        rows, target = jacobian.rows(x[start : start + _CHUNK], batch_rows=_CHUNK), y[start : start + _CHUNK]
        weight = target[:, -1:] if weighted else torch.ones_like(target[:, :1])
        root, residual = working_residuals(loss, rows.z, target[:, :-1] if weighted else target)
        slopes = (weight[:, :, None] * root @ residual[:, :, None])[:, : rows.outputs]
        parts = jacobian.pull(rows, slopes)
        total = [mine + part for mine, part in zip(total, parts, strict=True)] if total else parts
    return total


def _undone(exact: TangentPredictor, gradient: list[Tensor], n: int) -> list[Tensor]:
    """v = H⁻¹ g, the step of Newton: (1, *) each.

    H is the exact form's, of m rows, and n/m times as large for n; g is taken along the slopes of these rows.
    """
    jacobian, train = exact.tangent.jacobian()
    basis, m = exact.tangent.basis, len(train.z)  # L V
    values = (basis * (jacobian.kernel(train, train) @ basis)).sum(0)  # VᵀLᵀKLV = W
    along = basis.T @ jacobian.push(train, gradient).double().flatten()
    step = m / n * along / (values * (values + exact.ridge * m)).clamp_min(torch.finfo(values.dtype).tiny)
    return jacobian.pull(train, (basis @ step).view(m, train.outputs, 1))


@dataclass(frozen=True)
class _Relative:
    """Of M outputs, as shares of the exact s² there: what independent units of the law add, and what units of β do."""

    moved: Tensor  # (M, S + 1), rows of length 1; the last is J(x)v
    squares: Tensor  # (M, Q)


def _relative(exact: TangentPredictor, undone: list[Tensor], x: Tensor) -> _Relative:
    """At rows x; outputs that nothing moves are left out."""
    jacobian, _ = exact.tangent.jacobian()
    rows = jacobian.rows(x)
    drawn = _spread(exact, exact.deviations(x)[1].double().flatten(0, 1))
    moved = torch.cat([drawn, jacobian.push(rows, undone).double().flatten(0, 1)], 1)
    squares = jacobian.squares(rows).double().flatten(0, 1)
    variance = moved.square().sum(1, keepdim=True)
    if not bool(torch.isfinite(variance).all()):
        raise ValueError("got slopes or weights of rows that are too large or too small for its numbers")
    seen = variance[:, 0] > 0
    return _Relative((moved / variance.sqrt())[seen], (squares / variance)[seen])


def _spread(exact: TangentPredictor, moved: Tensor) -> Tensor:
    """M Cov(w)^½ for M (·, S): the law's weights have the variance v and the covariance c."""
    blocks = moved.shape[1]
    v, c = exact.weight_distribution.covariance(blocks)
    together = (max(0.0, v - c + c * blocks) / (v - c)) ** 0.5 if v > c else 1.0
    found: Tensor = (v - c) ** 0.5 * (moved + (together - 1.0) * moved.mean(1, keepdim=True))
    return found


def _shown(x: Tensor, others: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that show the directions, others for the rest, and for the error some that the net was not trained on.

    New rows may combine what no training row did, and lie further out: some of these are made up, column by column.
    """

    def drawn(pool: Tensor) -> Tensor:
        return pool[torch.randperm(len(pool), generator=generator)[:_ROWS]]

    def near() -> Tensor:
        rows = drawn(x)
        return rows + 0.2 * torch.randn(rows.shape, generator=generator, dtype=x.dtype)

    def mixed() -> Tensor:
        picks = torch.randint(len(x), (_ROWS // 2, x.shape[1]), generator=generator)
        return x.gather(0, picks) * (1.0 + torch.rand(len(picks), 1, generator=generator, dtype=x.dtype))

    learn = torch.cat([drawn(x), mixed()])
    fit = torch.cat([near(), mixed(), mixed()])
    return learn, fit, drawn(others) if len(others) >= 20 else near()


def find_mean_net(predictor: Any, x: Tensor, mean: np.ndarray[Any, Any], noise: float) -> nn.Module | None:
    """The one net whose outputs at x are the given means (N, k), within 5 % of the noise; None if there is none.

    An ensemble's mean is that of no net among its own, and other methods keep only the shape of one.
    """
    net: nn.Module | None = predictor.net
    if net is None or any(p.is_meta for p in net.parameters()) or (predictor.num_distinct or 1) > 1:
        return None
    try:
        with torch.no_grad():
            z = net.eval()(x.to(next(net.parameters()).dtype))
    except (RuntimeError, StopIteration):
        return None
    if not isinstance(z, Tensor) or z.ndim > 2:
        return None
    gap = z.reshape(len(x), -1)[:, : mean.shape[1]].double().numpy() - mean
    return net if gap.shape == mean.shape and float(np.sqrt(np.mean(gap**2))) <= 0.05 * noise + 1e-9 else None
