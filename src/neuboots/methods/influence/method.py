"""Options of the influence bootstrap, and the pass that sets it up."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import nn
from torch.utils.data import Dataset

from neuboots._validation import check_int
from neuboots.loading import check_length, dataset_length
from neuboots.losses import GaussianNLL, Loss, as_loss
from neuboots.methods._base import fit_net, register
from neuboots.methods.influence.predictor import MAX_KERNEL_ROWS, InfluencePredictor
from neuboots.prediction import Predictor
from neuboots.training import TrainingConfig, describe_method, initialize_model
from neuboots.weights import Dirichlet, WeightDistribution, check_blocks, check_weight_distribution

Residuals = Literal["smooth", "hc3", "hc2", "raw"]


@register(
    "influence",
    predictor=InfluencePredictor,
    summary="one net, and how other weights of its data would have moved it, to first order: B nets from one pass",
    predict_cost="O(L + K)",
    reference="Jaeckel, Bell Laboratories 1972; Giordano, Stephenson, Liu, Jordan and Broderick, AISTATS 2019",
)
@dataclass(frozen=True)
class InfluenceBootstrap:
    """Options of the influence bootstrap.

    The net is trained as ever, or is trained already (`around`), and stays as it is. `layers` says how much of it the
    weights of the data may move: 1 its head, k its last k layers with weights, "all" the whole net, whose band
    follows the data best (docs/validity.md); the head alone is cheaper, and serves pixels and streams as well. Weights
    that were frozen in training are moved like the others: choose the layers that were trained.

    `ridge` is λ/n; None takes the one at which the linear model fits as closely as the net did (see `choose_ridge`),
    and for the head of a net of classes the one of the largest evidence, as `Laplace` does.
    `residuals` says how in-sample residuals are corrected for leverage: "smooth" by the noise level around them, "hc3"
    each by itself, rᵢ/(1 − hᵢ) with hᵢ held below 0.9, "hc2" likewise by rᵢ/√(1 − hᵢ), "raw" not at all; None is
    "smooth" for the squared error and a Gaussian head, and for classes and all other losses "hc2" of several layers,
    "hc3" of a head, whose leverage is but a part of the net's.
    `refit=True` goes from the one step of Newton to convergence, for a head. `num_blocks` is S (None: a row is a
    block, while they are no more than the numbers of the head). Several layers need a matrix of rows × outputs squared:
    of more than `most_rows` a part is drawn, and its deviations are scaled to all of them.

    `replicates` is how many true replicates `fit` trains from the same start, by which the size of the deviations is
    set where the net moves further than to first order; each costs a training, or a part of one where the net is small
    and all are trained together.
    """

    loss: Loss = field(default_factory=nn.CrossEntropyLoss)
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
        object.__setattr__(self, "loss", as_loss(self.loss))
        if isinstance(self.loss, nn.L1Loss | nn.NLLLoss):
            raise ValueError(
                f"got loss={self.loss!r}, which has no curvature in the outputs; expected a loss with a Hessian, such "
                "as nn.MSELoss, nn.HuberLoss, or nn.CrossEntropyLoss, which is the same for logarithms of "
                "probabilities (with layers='all', or 1 if the net ends at its logits)"
            )
        check_weight_distribution(self.weight_distribution)
        layers = isinstance(self.layers, int) and not isinstance(self.layers, bool) and self.layers >= 1
        if not layers and self.layers != "all":
            raise ValueError(f"got layers={self.layers!r}; expected a whole number from 1 (the head), or 'all'")
        number = isinstance(self.ridge, int | float) and not isinstance(self.ridge, bool)
        if self.ridge is not None and not (number and 0.0 <= self.ridge < math.inf):
            raise ValueError(f"got ridge={self.ridge!r}; expected λ/n, a number from 0, or None to choose it")
        if self.residuals not in (None, *get_args(Residuals)):
            kinds = ", ".join(map(repr, get_args(Residuals)))
            raise ValueError(f"got residuals={self.residuals!r}; expected {kinds}, or None to choose")
        check_int("replicates", self.num_calibration_fits, minimum=0)
        if self.num_blocks is not None:
            check_blocks(self.num_blocks)
            if self.num_blocks == 1:
                raise ValueError(
                    "got num_blocks=1, all rows under one weight, which has no spread; expected two or more"
                )
        if (
            isinstance(self.max_kernel_rows, bool)
            or not isinstance(self.max_kernel_rows, int)
            or self.max_kernel_rows < 2
        ):
            raise ValueError(
                f"got most_rows={self.max_kernel_rows!r}; expected a whole number of rows × outputs, from 2"
            )
        if self.head is not None and not isinstance(self.head, str):
            raise ValueError(f"got head={self.head!r}; expected the name of a layer")
        if self.layers != 1 and (self.refit or self.head is not None):
            raise ValueError(
                f"got layers={self.layers!r} with refit or head; expected layers=1: only a head is refitted or named"
            )

    @property
    def correction(self) -> Residuals:
        """How residuals are corrected: by the noise level around them where targets are continuous, else each alone."""
        continuous = isinstance(self.loss, nn.MSELoss | GaussianNLL)
        return self.residuals or ("smooth" if continuous else "hc3" if self.layers == 1 else "hc2")

    def fit(
        self,
        model: Callable[[], nn.Module],
        data: Dataset[Any],
        config: TrainingConfig,
        *,
        val_data: Dataset[Any] | None = None,
    ) -> Predictor:
        """Train the net that `model()` gives, on (x, y) rows, as the recipe says; then go around it."""
        if self.num_calibration_fits or self.layers != 1:
            check_length(data)  # before the training, not after it
        net = initialize_model(model, config.seed)
        if self.num_calibration_fits:
            from neuboots.methods.influence.scaled import copy_initial_net, fit_scaled

            starts = copy_initial_net(net, model, self.num_calibration_fits, config.seed)
            self._check(net, data, config)
            return fit_scaled(self, starts, data, config, val_data)
        self._check(net, data, config)
        fit_net(net, data, self.loss, config, val_data=val_data, identity=describe_method(self))
        return self.from_trained(net.eval(), data, config)

    def _check(self, net: nn.Module, data: Dataset[Any], config: TrainingConfig) -> None:
        """Refuse what could not be done with the net once it is trained."""
        _check_size(data)
        if self.layers == 1:
            from neuboots.methods.influence.head import check_head

            check_head(self, net, data, config)
        else:
            from neuboots.methods.influence.tangent import check_tangent

            check_tangent(self, net, data, config)

    def from_trained(
        self, net: nn.Module, data: Dataset[Any], config: TrainingConfig | None = None
    ) -> InfluencePredictor:
        """The bootstrap of a net that is trained already, from the data it was trained on; the net stays as it is.

        Of the recipe only the batch size, the workers, the seed and the bar count.
        """
        if not isinstance(net, nn.Module):
            raise TypeError(f"got a net of type {type(net).__name__}; expected a torch.nn.Module, trained already")
        _check_size(data)
        if self.num_calibration_fits:
            raise ValueError(
                f"got num_calibration_fits={self.num_calibration_fits} around a net that is trained already; expected 0: replicates are "
                "trained like the net, which fit does"
            )
        config = config or TrainingConfig(epochs=1)
        if self.layers == 1:
            from neuboots.methods.influence.head import build_head_predictor

            return build_head_predictor(self, net, data, config)
        from neuboots.methods.influence.tangent import build_tangent_predictor

        return build_tangent_predictor(self, net, data, config)


def _check_size(data: Dataset[Any]) -> None:
    if dataset_length(data) == 1:
        raise ValueError("got a single row, which has no spread; expected two at least")
