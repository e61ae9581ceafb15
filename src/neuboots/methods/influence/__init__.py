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
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import nn

from neuboots._validation import ArgumentError, check_choice, check_int
from neuboots.head import check_module
from neuboots.loading import FitData
from neuboots.losses import GaussianNLL
from neuboots.methods._base import register
from neuboots.methods._curvature import infer_likelihood
from neuboots.methods.influence._head import HeadPredictor, InfluencePredictor, build_head_predictor, check_head
from neuboots.methods.influence._scaled import fit_scaled
from neuboots.methods.influence._tangent import TangentPredictor, build_tangent_predictors, check_tangent
from neuboots.prediction import Predictor
from neuboots.training import BaseMethod, FitInputs, TrainingConfig, initialize_model, resolve_fit
from neuboots.weights import Dirichlet, WeightDistribution, check_weight_distribution

MAX_KERNEL_ROWS = 3000  # rows × outputs of a kernel matrix: quadratic memory, cubic time
Residuals = Literal["smooth", "hc3", "hc2", "raw"]


@register(
    "influence",
    predictor=InfluencePredictor,
    summary="first-order replicates of one net under other weights of its data: B nets from one pass",
    predict_cost="O(L + K)",
    reference="Jaeckel, Bell Laboratories 1972; Giordano, Stephenson, Liu, Jordan and Broderick, AISTATS 2019",
)
@dataclass(frozen=True)
class InfluenceBootstrap(BaseMethod[Predictor]):
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
        num_blocks: S, the number of blocks of rows that share a weight. None is one row per block, up to the number of
            parameters of the head.
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
        if self.ridge is not None and not 0.0 <= self.ridge < math.inf:
            raise ArgumentError("ridge", self.ridge, "λ/n, a number ≥ 0, or None")
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

    def _fit(self, inputs: FitInputs) -> Predictor:
        net = initialize_model(inputs.factory, inputs.config.seed)
        (check_head if self.layers == 1 else check_tangent)(self, net, inputs)
        if self.num_calibration_fits:
            return fit_scaled(self, net, inputs)
        self._train_net(net, inputs)
        return self.make_predictor(net.eval(), inputs.data, inputs.config)

    def from_trained(
        self, model: nn.Module, data: FitData, *, batch_size: int = 128, seed: int = 0
    ) -> InfluencePredictor:
        """Compute the influence of the data on a trained net, which is not changed.

        Args:
            model: The trained net; the predictor keeps a reference to it.
            data: The data it was trained on, as in `fit`.
            batch_size: Examples that pass through the net at once.
            seed: Seed of random subsets and blocks of rows.

        Returns:
            The predictor around this net.
        """
        if self.num_calibration_fits:
            raise ArgumentError("num_calibration_fits", self.num_calibration_fits, "0 with from_trained; use fit")
        check_module(model)
        return self.make_predictor(model, data, TrainingConfig(epochs=1, batch_size=batch_size, seed=seed))

    def make_predictor(self, net: nn.Module, data: FitData, config: TrainingConfig) -> InfluencePredictor:
        """Compute the influence of the data on a trained net, with the batches of a training config.

        For a stream `steps_per_epoch` of the config is the number of batches.
        """
        inputs = resolve_fit(net, data, config)
        if self.layers == 1:
            return build_head_predictor(self, net, inputs)
        return build_tangent_predictors([self], net, inputs)[0]


__all__ = ["MAX_KERNEL_ROWS", "HeadPredictor", "InfluenceBootstrap", "InfluencePredictor", "TangentPredictor"]
