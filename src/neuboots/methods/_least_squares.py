"""A loss as a least-squares problem, and the ridge regression that one Newton step for it is.

    Λᵢ = ∂²ℓᵢ/∂z² = Lᵢ Lᵢᵀ,   −∂ℓᵢ/∂z = Lᵢ uᵢ
    H = Ψ (W + λ)⁻¹ Ψᵀ,   Ψ = rows LᵢᵀJᵢ in the eigenbasis of their Gram matrix,   ΨᵀΨ = W = diag(w)
    hᵢ = Hᵢᵢ,   mᵢ = [(I − H)²]ᵢᵢ = 1 − 2hᵢ + Σ_k ψᵢₖ² wₖ/(wₖ + λ)²

z are the outputs of a net, J their Jacobian, ℓ the loss and u its working residuals; H is the hat matrix and h the
leverage. In-sample residuals are too small: E rᵢ² = σ² mᵢ where the noise is the same around row i. Everything is
computed in double precision, one row at a time, so that rows can be streamed.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from neuboots._validation import ArgumentError, check_types
from neuboots.losses import GaussianNLL, Loss, as_loss
from neuboots.prediction import Predictor
from neuboots.weights import WeightDistribution, build_distribution, describe_distribution

Likelihood = Literal["softmax", "bernoulli", "squared", "gaussian"]
MIN_LOG_VARIANCE = -12.0  # the floor of GaussianNLL
_MIN_PROBABILITY = 1e-7  # in a working residual
_MIN_RELATIVE_CURVATURE = 1e-6  # of the largest: where a loss is linear (Huber's), its gradient still counts
POWERS = {"hc3": 1.0, "hc2": 0.5}  # p of (I − Hᵢᵢ)⁻ᵖ
_NOISE_DF = 3.0  # degrees of freedom of the noise level as a function of x
_NOISE_DIRECTIONS = 16  # leading eigenvectors that carry it
_MIN_RIDGE, _MAX_RIDGE = 1e-9, 1e4  # relative to the mean eigenvalue
_MAX_DF_PER_ROW = 0.5
_MAX_LEVERAGE = 0.9  # of a row that is corrected by itself
_MIN_VARIANCE_FACTOR = 0.02  # of mᵢ: a row that the net reproduces anyway says nothing about the noise


# -- the loss ------------------------------------------------------------------------------------------


def infer_likelihood(loss: Loss) -> Likelihood | None:
    """The likelihood whose negative logarithm the loss is; None if its Hessian has no closed form here."""
    weighted = getattr(loss, "weight", None) is not None or getattr(loss, "pos_weight", None) is not None
    if isinstance(loss, nn.CrossEntropyLoss) and not weighted:
        return "softmax"
    if isinstance(loss, nn.BCEWithLogitsLoss) and not weighted:
        return "bernoulli"
    if isinstance(loss, nn.MSELoss):
        return "squared"
    return "gaussian" if isinstance(loss, GaussianNLL) and not loss.beta else None


class WorkingModel(NamedTuple):
    """L, u and −∂ℓ/∂z at M points of C outputs."""

    root: Tensor  # L: (M, C, C)
    residual: Tensor  # u: (M, C)
    slope: Tensor  # −∂ℓ/∂z = L u, except where a loss has no curvature: (M, C)


def working_residuals(loss: Loss, z: Tensor, y: Tensor) -> WorkingModel:
    """L, u and −∂ℓ/∂z of a loss at outputs z (M, C) and targets y, one for each point, in double precision.

    A loss without a closed form is differentiated twice; where it is not convex in the outputs, its curvature is
    replaced by a small positive one. For the squared error (halved) L = I and u = y − z; for classes u are Pearson's
    residuals.
    """
    z = z.double()
    likelihood = infer_likelihood(loss)
    if isinstance(loss, GaussianNLL):
        root, residual = _gaussian(loss.beta, z, y)
    elif likelihood is None:
        return _differentiate_twice(loss, z, y)
    elif likelihood == "squared":
        root = torch.eye(z.shape[1], dtype=z.dtype, device=z.device).expand(len(z), -1, -1)
        residual = y.reshape(z.shape).to(z) - z
    elif likelihood == "softmax":
        p = z.softmax(1).clamp_min(_MIN_PROBABILITY)
        smoothing = getattr(loss, "label_smoothing", 0.0)
        hard = y if y.is_floating_point() else torch.nn.functional.one_hot(y.long(), z.shape[1])  # torch takes both
        target = hard.to(z) * (1 - smoothing) + smoothing / z.shape[1]
        q = p.sqrt()
        # diag(p) − ppᵀ = L Lᵀ with L = diag(q)(I − qqᵀ); −∂ℓ/∂z = target − p sums to zero, so u = (target − p)/q
        root, residual = torch.diag_embed(q) - p[:, :, None] * q[:, None], (target - z.softmax(1)) / q
    else:
        p = z.sigmoid()
        scale = (p * (1.0 - p)).clamp_min(_MIN_PROBABILITY).sqrt()
        root, residual = torch.diag_embed(scale), (y.reshape(z.shape).to(z) - p) / scale
    return WorkingModel(root, residual, (root @ residual[:, :, None])[:, :, 0])


def _gaussian(beta: float, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of k means and k values of log σ², by the Fisher information (1/σ², ½); β weights a point by σ^(2β)."""
    mean, raw = z.chunk(2, 1)
    log_variance = raw.clamp_min(MIN_LOG_VARIANCE)
    standardized = (y.reshape(mean.shape).to(z) - mean) * (-0.5 * log_variance).exp()
    half = 0.5**0.5 * (raw >= MIN_LOG_VARIANCE).to(z)
    root = torch.cat([(-0.5 * log_variance).exp(), half], 1)
    residual = torch.cat([standardized, half * (standardized.square() - 1.0)], 1)
    weight = (0.5 * beta * log_variance).exp().repeat(1, 2)
    return torch.diag_embed(weight * root), weight * residual


def pointwise_losses(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    """ℓ of each point at outputs z (M, C), in the shape and precision that the loss accepts.

    A net may give (N,) and its loss expect that: against targets (M,) outputs (M, 1) would be broadcast. A loss may
    also hold single-precision tensors, such as class weights, which torch does not mix with double.
    """
    loss = as_loss(loss)
    single = z.shape[1] == 1 and y.shape == z.shape[:1]
    shapes = [z, z[:, 0]] if single else [z]
    first_error: Exception | None = None
    for outputs in [*shapes, *(shape.float() for shape in shapes if shape.dtype == torch.float64)]:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Using a target size")  # of a shape that is only tried
                losses = loss(outputs, y.to(outputs) if y.is_floating_point() else y)
        except (RuntimeError, ValueError) as error:
            first_error = first_error or error
            continue
        if not single or losses.numel() == len(z) or outputs.ndim == 1:
            return losses
    assert first_error is not None, "the last shape is returned unless the loss raises"
    raise first_error


def _differentiate_twice(loss: Loss, z: Tensor, y: Tensor) -> WorkingModel:
    """L, u and −∂ℓ/∂z by differentiation; L and u are zero if the second derivative is nowhere positive."""
    with torch.inference_mode(False), torch.enable_grad():
        z = z.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(pointwise_losses(loss, z, y).sum(), z, create_graph=True)
        try:
            columns = [
                torch.autograd.grad(part.sum(), z, retain_graph=True, materialize_grads=True)[0]
                for part in (gradient.unbind(1) if gradient.requires_grad else ())
            ]
        except RuntimeError as error:
            raise ArgumentError("loss", loss, f"a loss that can be differentiated twice ({error})") from None
    gradient = gradient.detach()
    curvature = torch.stack(columns, 2) if columns else torch.diag_embed(torch.zeros_like(gradient))  # (M, C, C)
    values, vectors = torch.linalg.eigh(curvature)
    largest = float(values.max()) if len(values) else 1.0
    if not largest > 0.0:
        return WorkingModel(torch.zeros_like(curvature), torch.zeros_like(gradient), -gradient)
    root = values.clamp_min(_MIN_RELATIVE_CURVATURE * largest).sqrt()
    residual = torch.einsum("mck,mc->mk", vectors, -gradient) / root
    return WorkingModel(vectors * root[:, None], residual, -gradient)


# -- the ridge regression ------------------------------------------------------------------------------


def bisect_decreasing(excess: Callable[[float], float], low: float, high: float) -> float:
    """The t between two positive numbers at which a decreasing function changes its sign, by bisection of log t."""
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return math.sqrt(low * high)


def degrees_of_freedom(values: Tensor, ridge: float) -> float:
    """tr H = Σ_k w_k / (w_k + λ)."""
    return float((values / (values + ridge)).sum())


def ridge_for_degrees_of_freedom(values: Tensor, df: float) -> float:
    """The λ with tr H = df, for a df below the number of positive eigenvalues."""
    largest = float(values.max())
    return bisect_decreasing(lambda ridge: degrees_of_freedom(values, ridge) - df, largest * 1e-12, largest * 1e6)


def choose_ridge(values: Tensor, squares: Tensor, rest: float, rows: int, *, residual: float) -> float:
    """The λ with Σ_k (λ/(w_k + λ))² t_k² + rest = Σᵢ uᵢ²: the linear model fits its targets as closely as the net did.

    A net that was stopped early has large residuals and so a large ridge. λ leaves at least one degree of freedom and
    at most half of the rows.

    Args:
        values: Eigenvalues w: (K,).
        squares: t_k², squared coordinates along the eigenvectors of the targets t = Jθ̂ + u (whitened): (K,).
        rest: Squared norm of t outside of the eigenvectors.
        rows: Number of rows.
        residual: Σ uᵢ² of the net itself.

    Example:
        >>> values, squares = torch.tensor([4.0, 1.0]), torch.tensor([16.0, 4.0])
        >>> round(choose_ridge(values, squares, 1.0, 10, residual=2.64), 3)  # 16 (1/5)² + 4 (1/2)² + 1
        1.0
    """
    scale = float(values.mean())
    if scale <= 0:
        return 1.0  # the outputs do not depend on these weights

    def excess(ridge: float) -> float:
        return residual - rest - float(((ridge / (values + ridge)).square() * squares).sum())

    ridge = bisect_decreasing(excess, _MIN_RIDGE * scale, _MAX_RIDGE * scale)
    df = degrees_of_freedom(values, ridge)
    clipped = min(max(df, min(1.0, 0.5 * rows)), _MAX_DF_PER_ROW * rows)
    return ridge if clipped == df else ridge_for_degrees_of_freedom(values, clipped)


def ridge_inverse(values: Tensor, ridge: float) -> Tensor:
    """(W + λ)⁻¹, and zero along directions without information: (K,)."""
    total = values + ridge
    smallest = total.max() * torch.finfo(total.dtype).eps * len(total)
    return torch.where(total > smallest, total.reciprocal(), 0.0)


def residual_variance_factor(values: Tensor, ridge: float) -> Tensor:
    """f with mᵢ = 1 + Σ_k ψᵢₖ² f_k, the fraction of the noise variance that is left in a residual: (K,)."""
    inverted = ridge_inverse(values, ridge)
    return inverted * (values * inverted - 2.0)


def covariance_root(distribution: WeightDistribution, moved: Tensor) -> Tensor:
    """Cov(α)^½ M for M (S, *).

    Cov α = (v − c) I + c 11ᵀ is the square of a I + (b − a) 11ᵀ/S with a² = v − c and b² = v + (S − 1) c.
    """
    v, c = distribution.covariance(len(moved))
    across, along = math.sqrt(v - c), math.sqrt(max(0.0, v + (len(moved) - 1) * c))
    return across * moved + (along - across) * moved.mean(0)


def leverage_corrected(hat: Tensor, residuals: Tensor, *, power: float = 1.0) -> Tensor:
    """(I − Hᵢᵢ)⁻ᵖ uᵢ for blocks of the hat matrix (M, C, C) and residuals (M, C): (M, C).

    p = 1 gives leave-one-out residuals (HC3), p = ½ residuals of the right variance (HC2). Eigenvalues of a block are
    clipped at 0.9, so that no single row determines the band.

    >>> leverage_corrected(torch.tensor([[[0.75]], [[1.0]]]), torch.ones(2, 1)).flatten()
    tensor([ 4.0000, 10.0000])
    >>> leverage_corrected(torch.tensor([[[0.75]]]), torch.ones(1, 1), power=0.5)
    tensor([[2.]])
    """
    # no eigenvalue is larger than the largest row sum: below the limit one linear solve is exact, and faster
    exact = hat.abs().sum(2).amax(1) <= _MAX_LEVERAGE if power == 1.0 else hat.new_zeros(len(hat), dtype=torch.bool)
    left = torch.eye(hat.shape[1], dtype=hat.dtype, device=hat.device) - hat
    if not bool(exact.all()):
        values, vectors = torch.linalg.eigh(hat[~exact])
        powers = (1.0 - values.clamp(0.0, _MAX_LEVERAGE)) ** power
        left[~exact] = vectors @ torch.diag_embed(powers) @ vectors.mT
    corrected: Tensor = torch.linalg.solve(left, residuals)
    return corrected


class NoiseLevel:
    """ũᵢ² = ½ (r²ᵢ + Σ_j gᵢⱼ rⱼ²) / Σ_j gᵢⱼ mⱼ, gᵢⱼ ∝ Gᵢⱼ², where G is the hat matrix of three degrees of freedom.

    Half of a row's own squared residual, as in a bootstrap, and half of the local mean, which has less variance: a band
    that follows each residual is too narrow wherever they happen to be small. The factors mⱼ are averaged in the same
    way, so that no single row of leverage near 1 dominates; under constant noise the mean of ũᵢ² is unbiased. Only the
    leading eigenvectors enter, so that the sums have a fixed size.

    Args:
        values: Eigenvalues w in ascending order: (K,).

    Attributes:
        scale: Factors of the leading columns of Ψ: (k,).
        counts: Σ_j gⱼgⱼᵀ, gⱼ the leading coordinates of row j: (k, k).
        squares: Σ_j gⱼgⱼᵀ rⱼ²: (k, k).
        factors: Σ_j gⱼgⱼᵀ mⱼ: (k, k).
    """

    def __init__(self, values: Tensor) -> None:
        count = min(_NOISE_DIRECTIONS, len(values))
        positive = int((values > values[-1] * 1e-10).sum())
        ridge = ridge_for_degrees_of_freedom(values, min(_NOISE_DF, 0.9 * max(1, positive)))
        total = values[-count:] + ridge  # zero where rows have no features at all
        self.scale = torch.where(total > 0, total.rsqrt(), 0.0)
        self.counts, self.squares, self.factors = values.new_zeros(3, count, count).unbind()

    def _directions(self, psi: Tensor) -> Tensor:
        return psi[:, -len(self.scale) :] * self.scale  # g: (M, k)

    def add(self, psi: Tensor, residuals: Tensor, factors: Tensor) -> None:
        """Add rows: ψ (M, K), residuals r and variance factors m (M,)."""
        g, factors = self._directions(psi), factors.clamp(_MIN_VARIANCE_FACTOR, 1.0)
        self.counts += g.T @ g
        self.squares += g.T @ (residuals.square()[:, None] * g)
        self.factors += g.T @ (factors[:, None] * g)

    def correct(self, psi: Tensor, residuals: Tensor) -> Tensor:
        """ũ of rows ψ (M, K) with residuals r (M,), each with the sign of its residual: (M,)."""
        g = self._directions(psi)
        counts, squares, factors = (((g @ part) * g).sum(1) for part in (self.counts, self.squares, self.factors))
        own = residuals.square() * counts
        level = 0.5 * (own + squares).clamp_min(0.0) / factors.clamp_min(torch.finfo(factors.dtype).tiny)
        return torch.where(residuals < 0, -1.0, 1.0) * level.sqrt()


# -- replicates ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InfluencePredictor(Predictor):
    """Replicates around a trained net that are linear in the weights of its data.

    Attributes:
        weight_distribution: Distribution of the block weights α.
        ridge: λ/n.
        degrees_of_freedom: tr H(H + λ)⁻¹.
    """

    weight_distribution: WeightDistribution
    ridge: float
    degrees_of_freedom: float
    form: ClassVar[str]  # of the stored configuration: "head" or "tangent"

    @property
    def num_blocks(self) -> int:
        """S, the number of blocks that rows are assigned to."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        return {
            "method": "influence",
            "form": self.form,
            "weight_distribution": describe_distribution(self.weight_distribution),
            "ridge": self.ridge,
            "degrees_of_freedom": self.degrees_of_freedom,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "InfluencePredictor":
        check_types("predictor", config, {"weight_distribution": dict, "ridge": float, "degrees_of_freedom": float})
        if not (config["ridge"] >= 0.0 and config["degrees_of_freedom"] >= 0.0):
            raise ValueError("its ridge or degrees of freedom are negative")
        form: Any = next(each for each in cls.__subclasses__() if each.form == config["form"])
        distribution = build_distribution(config["weight_distribution"])
        facts = distribution, config["ridge"], config["degrees_of_freedom"]
        predictor: InfluencePredictor = form(*facts, form._rebuild(config, net).eval())
        return predictor

    @classmethod
    def _rebuild(cls, config: dict[str, Any], net: nn.Module) -> nn.Module:
        """The module that `config` describes around a net, without its weights."""
        raise NotImplementedError
