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
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._prng import derive_keys
from neuboots._validation import ArgumentError, check_choice, check_int, check_memory
from neuboots.head import copy_net
from neuboots.loading import check_length, select_examples
from neuboots.losses import GaussianNLL
from neuboots.methods._base import PostHocMethod, count_net_bytes, register
from neuboots.methods._least_squares import InfluencePredictor, infer_likelihood
from neuboots.methods.influence._head import HeadPredictor, build_head_predictor, check_head
from neuboots.methods.influence._tangent import HeldOut, TangentPredictor, build_tangent_predictors, check_tangent
from neuboots.methods.neuboots import draw_row_weights
from neuboots.training import FitInputs, initialize_model
from neuboots.weights import BlockTable, Dirichlet, WeightDistribution, assign_blocks, check_weight_distribution

MAX_KERNEL_ROWS = 3000  # rows × outputs of a kernel matrix: quadratic memory, cubic time
_MIN_FOLD_ROWS = 4  # with fewer rows in a fold the training residuals decide
_MIN_HELD_OUT = 20  # rows whose errors tell the size of the band
_MAX_RELIABLE_DF = 0.45  # per target: half of the targets is the limit of the ridge
Residuals = Literal["smooth", "hc3", "hc2", "raw"]


@register(
    "influence",
    predictor=InfluencePredictor,
    summary="first-order replicates of one net under other weights of its data: B nets from one pass",
    predict_cost="O(L + K)",
    reference="Jaeckel, Bell Laboratories 1972; Giordano, Stephenson, Liu, Jordan and Broderick, AISTATS 2019",
)
@dataclass(frozen=True)
class InfluenceBootstrap(PostHocMethod[InfluencePredictor]):
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
        num_folds: Number K of folds of the training data, of four rows at least. With several layers and no validation
            data, `fit` also trains a net without each fold. Their errors at the rows of the folds set the level of the
            noise, and the width of the band where the data do not determine the net. That costs K − 1 trainings. 0:
            training residuals, which are too small if the net nearly interpolates. Validation data replace the folds.
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
    num_folds: int = 2
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
        if check_int("num_folds", self.num_folds, minimum=0) == 1:
            raise ArgumentError("num_folds", 1, "0, or at least 2")
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

    def _fit(self, inputs: FitInputs) -> InfluencePredictor:
        net = initialize_model(inputs.factory, inputs.config.seed)
        self._check(net, inputs)
        folds = self._make_folds(net, inputs)
        self._train_net(net, inputs)
        for k, (fold, data, _, _) in enumerate(folds):
            folder = None if inputs.config.folder is None else Path(inputs.config.folder) / f"fold-{k}"
            part = replace(inputs, data=data, config=replace(inputs.config, folder=folder))
            self._train_net(fold, part, title=f"fold {k + 1}/{len(folds)}")
        held_out = [HeldOut(net, inputs.data, inputs.val_data)] if inputs.val_data is not None else folds
        if self.layers != 1 and self.num_folds and not held_out:
            warnings.warn(
                f"{check_length(inputs.data)} rows are too few to hold any out: the noise is that of training "
                f"residuals, and the band may be too narrow; fit {_MIN_HELD_OUT} rows or more",
                stacklevel=3,
            )
        return self._make_with_held_out(net.eval(), inputs, held_out)

    def _make_folds(self, net: nn.Module, inputs: FitInputs) -> list[HeldOut]:
        """Copies of the net before its training, each with a part of the data for the training, and the rest."""
        n = check_length(inputs.data)
        count = min(self.num_folds, n // _MIN_FOLD_ROWS)
        if self.layers == 1 or inputs.val_data is not None or count < 2:
            return []
        check_memory("num_folds", count, count * count_net_bytes(net), hint="use fewer")
        order = derive_keys(torch.arange(n), inputs.config.seed, "folds").argsort()
        folds = []
        for k in range(count):
            held = order[k::count].sort().values
            rest = order[torch.arange(n) % count != k].sort().values
            data, held_out = (select_examples(inputs.data, rows.tolist()) for rows in (rest, held))
            try:
                copy = copy_net(net)
            except (TypeError, RuntimeError):  # it holds a lock, a file, a tensor with a graph
                copy = initialize_model(inputs.member_factory, inputs.config.seed)
            folds.append(HeldOut(copy, data, held_out, held))
        return folds

    def _row_weights(
        self, predictor: InfluencePredictor, data: Dataset[Any], num_samples: int, seed: int, fit_seed: int
    ) -> Tensor:
        n, num_blocks = check_length(data), predictor.num_blocks
        if isinstance(predictor, TangentPredictor) and predictor.num_rows != n:
            raise ArgumentError("data", f"{n} rows", f"the {predictor.num_rows} rows of the kernel")
        if self.num_blocks is None and num_blocks > n:
            raise ArgumentError("data", f"{n} rows", f"the rows of the training, at least {num_blocks}")
        own = self.num_blocks is None and num_blocks == n  # a block for each row
        blocks = BlockTable(torch.arange(n) if own else assign_blocks(n, num_blocks, seed=fit_seed), num_blocks)
        return draw_row_weights(predictor.weight_distribution, blocks, n, num_samples, seed)

    def _make_predictor(self, net: nn.Module, inputs: FitInputs) -> InfluencePredictor:
        held_out = [] if inputs.val_data is None else [HeldOut(net, inputs.data, inputs.val_data)]
        return self._make_with_held_out(net, inputs, held_out)

    def _make_with_held_out(self, net: nn.Module, inputs: FitInputs, held_out: Sequence[HeldOut]) -> InfluencePredictor:
        if self.layers == 1:
            return build_head_predictor(self, net, inputs)
        (predictor,) = build_tangent_predictors([self], net, inputs, held_out=held_out)
        targets, df = len(predictor.tangent.basis), predictor.degrees_of_freedom
        if not held_out and self.ridge is None and df > _MAX_RELIABLE_DF * targets:
            warnings.warn(
                f"the net fits {targets} targets with {df:.0f} degrees of freedom: its training residuals are smaller "
                "than the noise, and the band may be too narrow. Pass val_data with rows that it has not seen, or use "
                f"fit with num_folds=2 and at least {2 * _MIN_FOLD_ROWS} rows",
                stacklevel=2,
            )
        rows = sum(check_length(each.held_out) for each in held_out)
        if held_out and rows < _MIN_HELD_OUT:
            warnings.warn(
                f"errors at only {rows} rows size the band, which may be much too wide or too narrow: pass val_data of "
                f"{_MIN_HELD_OUT} rows or more, or fit more rows",
                stacklevel=2,
            )
        return predictor


__all__ = ["MAX_KERNEL_ROWS", "HeadPredictor", "InfluenceBootstrap", "InfluencePredictor", "TangentPredictor"]
