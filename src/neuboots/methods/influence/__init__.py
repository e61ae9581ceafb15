"""Influence bootstrap: replicates of a trained net under other weights of its data, to first order.

    θ(w) − θ̂ ≈ H⁻¹ Σᵢ (wᵢ − 1) Jᵢᵀ(−∂ℓᵢ/∂z),   H = Σᵢ Jᵢᵀ Λᵢ Jᵢ + λI
    f_w(x) = f̂(x) + J(x) (θ(w) − θ̂)

It needs one ordinary training (or a pretrained net) and a pass over the data; replicates are then linear in the
weights, as in eq. 3.1, but follow the data. Λ is the Hessian of the loss in the outputs.

Jaeckel, The infinitesimal jackknife, Bell Laboratories 1972; Giordano, Stephenson, Liu, Jordan and Broderick, A Swiss
army infinitesimal jackknife, AISTATS 2019. Leverage: MacKinnon and White, Some heteroskedasticity-consistent covariance
matrix estimators with improved finite sample properties, Journal of Econometrics 1985 (HC3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from neuboots._prng import derive_keys
from neuboots._validation import ArgumentError, check_choice, check_int, check_memory
from neuboots.head import add_output_axis, compute_output, copy_net, eval_mode
from neuboots.loading import check_length, select_examples
from neuboots.losses import GaussianNLL, Loss
from neuboots.methods._base import PostHocMethod, count_net_bytes, iterate_batches, register
from neuboots.methods._least_squares import InfluencePredictor, infer_likelihood
from neuboots.methods._vmap import StackedNets
from neuboots.methods.ensembles import fit_members
from neuboots.methods.influence._head import HeadPredictor, build_head_predictor, check_head
from neuboots.methods.influence._tangent import TangentPredictor, build_tangent_predictors, check_tangent
from neuboots.posthoc import ScaledPredictor
from neuboots.prediction import Predictor
from neuboots.training import FitInputs, initialize_model
from neuboots.weights import Dirichlet, WeightDistribution, check_weight_distribution

MAX_KERNEL_ROWS = 3000  # rows × outputs of a kernel matrix: quadratic memory, cubic time
_MAX_COMPARED_ROWS = 512  # training inputs at which deviations are compared
_NUM_SAMPLES = 64  # first-order replicates at each
Residuals = Literal["smooth", "hc3", "hc2", "raw"]


@register(
    "influence",
    predictor=InfluencePredictor,
    summary="first-order replicates of one net under other weights of its data: B nets from one pass",
    predict_cost="O(L + K)",
    reference="Jaeckel, Bell Laboratories 1972; Giordano, Stephenson, Liu, Jordan and Broderick, AISTATS 2019",
)
@dataclass(frozen=True)
class InfluenceBootstrap(PostHocMethod[Predictor]):
    """Influence bootstrap of a net.

    Weights that were frozen in training are moved like the others: choose the layers that were trained.

    Args:
        loss: Loss of the training; it needs a positive second derivative in the outputs.
        layers: Which weights the data move: 1 the head, k the last k layers, "all" the whole net, whose band follows
            the data best (docs/validity.md). The head alone is cheaper, and also works for pixels and streams.
        ridge: λ/n. None chooses the one at which the linear model fits as closely as the net did; for the head of a
            classifier the one that maximizes the evidence, as in `Laplace`.
        residuals: Correction of in-sample residuals for leverage: "smooth" by the local noise level, "hc3" by
            rᵢ/(1 − hᵢ) with hᵢ ≤ 0.9, "hc2" by rᵢ/√(1 − hᵢ), "raw" none. None is "smooth" for the squared error and a
            Gaussian head; for other losses "hc3" for the head, "hc2" for several layers.
        refit: Run Newton's method to convergence for each replicate instead of one step; only with `layers=1`.
        weight_distribution: Distribution of the weights.
        num_blocks: S, the number of blocks of rows that share a weight, at most n or 10,000. None is one row per block,
            up to the number of parameters of the head.
        max_kernel_rows: Maximum of rows × outputs of the kernel matrix of several layers; beyond it a random subset of
            the rows is used, and deviations are scaled accordingly.
        num_calibration_fits: Number of replicates that `fit` trains from the same initial weights to set the size of
            the deviations, where the net moves further than to first order. Each costs a training.
        head: Name of the last layer; None finds it. Only with `layers=1`.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> data, net = TensorDataset(x, x.sin()), nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> predictor = InfluenceBootstrap(nn.MSELoss(), layers="all").from_trained(net, data)
        >>> predictor.predict(x[:5], 20).samples.shape
        torch.Size([20, 5, 1])
    """

    layers: int | Literal["all"] = 1
    ridge: float | None = None
    residuals: Residuals | None = None
    refit: bool = False
    weight_distribution: WeightDistribution = field(default_factory=Dirichlet)
    num_blocks: int | None = None
    max_kernel_rows: int = MAX_KERNEL_ROWS
    num_calibration_fits: int = 0
    head: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.loss, nn.L1Loss | nn.NLLLoss):
            hint = "use the cross-entropy, which equals nn.NLLLoss for log-probabilities"
            raise ArgumentError("loss", self.loss, "a loss with a positive second derivative in the outputs", hint=hint)
        check_weight_distribution(self.weight_distribution)
        if self.layers != "all":
            check_int("layers", self.layers, minimum=1)
        ridge: Any = self.ridge
        if ridge is not None and not (isinstance(ridge, Real) and 0.0 <= float(ridge) < math.inf):
            raise ArgumentError("ridge", ridge, "λ/n, a number ≥ 0, or None")
        if self.residuals is not None:
            check_choice("residuals", self.residuals, get_args(Residuals))
        check_int("num_calibration_fits", self.num_calibration_fits, minimum=0)
        if self.num_blocks is not None:
            check_int("num_blocks", self.num_blocks, minimum=2)  # a single block has no spread
        check_int("max_kernel_rows", self.max_kernel_rows, minimum=2)
        if self.layers != 1 and (self.refit or self.head is not None):
            raise ArgumentError("layers", self.layers, "1 with refit or head")

    @property
    def correction(self) -> Residuals:
        """The correction of residuals, with its default resolved."""
        continuous = infer_likelihood(self.loss) == "squared" or isinstance(self.loss, GaussianNLL)
        return self.residuals or ("smooth" if continuous else "hc3" if self.layers == 1 else "hc2")

    def _check(self, net: nn.Module, inputs: FitInputs) -> object:
        return (check_head if self.layers == 1 else check_tangent)(self, net, inputs)

    def _fit(self, inputs: FitInputs) -> Predictor:
        if not self.num_calibration_fits:
            return super()._fit(inputs)
        net = initialize_model(inputs.factory, inputs.config.seed)
        self._check(net, inputs)
        fit_bytes = count_net_bytes(net) + 4 * check_length(inputs.data)
        hint = "use fewer; 10 are enough"
        check_memory(
            "num_calibration_fits", self.num_calibration_fits, self.num_calibration_fits * fit_bytes, hint=hint
        )
        numbers = range(self.num_calibration_fits)
        try:
            replicates = [copy_net(net) for _ in numbers]
        except (TypeError, RuntimeError):  # it holds a lock, a file, a tensor with a graph
            replicates = [initialize_model(inputs.member_factory, inputs.config.seed) for _ in numbers]
        net, *replicates = self._train_with_replicates([net, *replicates], inputs)
        return self._scale_by_replicates(net, replicates, inputs)

    def _make_predictor(self, net: nn.Module, inputs: FitInputs) -> InfluencePredictor:
        if self.num_calibration_fits:
            raise ArgumentError("num_calibration_fits", self.num_calibration_fits, "0 with from_trained; use fit")
        return self._make_predictors([self], net, inputs)[0]

    def _make_predictors(
        self, methods: Sequence["InfluenceBootstrap"], net: nn.Module, inputs: FitInputs
    ) -> Sequence[InfluencePredictor]:
        """Predictors of methods that differ in residuals, weight distribution and blocks only."""
        if self.layers == 1:
            return [build_head_predictor(method, net, inputs) for method in methods]
        return build_tangent_predictors(methods, net, inputs)

    def _train_with_replicates(self, nets: Sequence[nn.Module], inputs: FitInputs) -> list[nn.Module]:
        """Train the first net as it is, the others on Dirichlet weights, all with rows in the same order."""
        n, count, config = check_length(inputs.data), len(nets) - 1, inputs.config
        keys = derive_keys(torch.arange(count), config.seed, "true replicate")
        members = fit_members(
            nets,
            inputs.data,
            config,
            loss=self.loss,
            seeds=[config.seed] * (1 + count),
            weights=torch.cat([torch.ones(1, n), Dirichlet().sample(keys, n).float()]),  # (1 + K, n)
            identity=replace(self, num_calibration_fits=0),
            val_data=inputs.val_data,
        )
        return [net.eval() for net in (members.nets() if isinstance(members, StackedNets) else members)]

    def _scale_by_replicates(
        self, net: nn.Module, replicates: Sequence[nn.Module], inputs: FitInputs
    ) -> ScaledPredictor:
        """The predictor around a trained net with its deviations times s, from K replicates f_k trained on weights w_k.

            s² = max(1, Σ_k Σ_x |f_k(x) − f̂(x)|² / K Σ_x Var f_w(x))

        To first order a net moves by J Δθ; a real one may move further, the wider it is. The variance in the
        denominator is that of raw residuals, which a trained replicate has as well. Few replicates give a noisy ratio,
        and the first order is seldom too large: a ratio below 1 is ignored.
        """
        raw_method = replace(self, residuals="raw", weight_distribution=Dirichlet())  # as the replicates are trained
        predictor, raw = self._make_predictors([self, raw_method], net, inputs)
        loss, data, config = self.loss, inputs.data, inputs.config
        keys = derive_keys(torch.arange(check_length(data)), config.seed, "compared")
        rows = keys.argsort()[:_MAX_COMPARED_ROWS].sort().values
        moved = expected = 0.0
        with torch.no_grad(), eval_mode(nn.ModuleList([net, *replicates])):
            for batch in iterate_batches(select_examples(data, rows.tolist()), config):
                center, *others = (add_output_axis(compute_output(each, batch.x)) for each in (net, *replicates))
                drawn = raw.predict(batch.x, _NUM_SAMPLES, seed=config.seed).samples - center
                moved += sum(_sum_squares(loss, other - center, dim=1) for other in others) / len(replicates)
                expected += _sum_squares(loss, drawn, dim=2) / _NUM_SAMPLES
        scale = math.sqrt(max(1.0, moved / expected)) if expected > 0 else 1.0
        outputs = center.shape[1] // 2 if isinstance(loss, GaussianNLL) else center.shape[1]
        return ScaledPredictor(predictor, std_scale=(scale,) * outputs)


def _sum_squares(loss: Loss, change: Tensor, *, dim: int) -> float:
    """Σ change² of the means of a Gaussian head, of differences between logits, or of the outputs along `dim`."""
    if isinstance(loss, GaussianNLL):
        change = change.chunk(2, dim)[0]
    if isinstance(loss, nn.CrossEntropyLoss):
        change = change - change.mean(dim, keepdim=True)  # adding a constant to all logits changes nothing
    return float(change.double().square().sum())


__all__ = ["MAX_KERNEL_ROWS", "HeadPredictor", "InfluenceBootstrap", "InfluencePredictor", "TangentPredictor"]
