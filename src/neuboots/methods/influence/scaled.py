"""The size of the deviations, set by a few true replicates.

    s² = max(1, Σ_k Σ_x |f_k(x) − f̂(x)|² / K Σ_x Var f_w(x)),   f_k trained like f̂, from the same start, on weights w_k

To first order a net moves by J Δθ; a real one may move further, the wider it is. The variance that is compared is that
of raw residuals, which a true replicate has as well. Few replicates give a noisy ratio, and the first order is seldom
too large: below 1 it is left alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from neuboots._prng import derive_keys
from neuboots.head import copy_net, eval_mode
from neuboots.loading import EpochLoader, check_length, preserve_rng_state
from neuboots.losses import GaussianNLL, Loss
from neuboots.methods._base import add_output_axis, compute_output
from neuboots.methods._vmap import StackedNets
from neuboots.methods.ensembles import fit_members
from neuboots.methods.influence.predictor import InfluencePredictor
from neuboots.posthoc import ScaledPredictor
from neuboots.training import TrainingConfig, describe_method, initialize_model
from neuboots.weights import Dirichlet

if TYPE_CHECKING:
    from neuboots.methods.influence.method import InfluenceBootstrap

_ROWS = 512  # training inputs at which movements are compared
_DRAWN = 64  # replicates to first order, at each


def fit_scaled(
    method: "InfluenceBootstrap",
    starts: Sequence[nn.Module],
    data: Dataset[Any],
    config: TrainingConfig,
    val_data: Dataset[Any] | None,
) -> ScaledPredictor:
    """The predictor around the first net, once it is trained, its deviations times s, from the others as replicates.

    Small nets are trained together, which takes less long than one after another.
    """
    net, *replicates = train_with_replicates(method, starts, data, config, val_data)
    predictor, raw = with_raw_residuals(method, net, data, config)
    return scale_by_replicates(method.loss, predictor, raw, replicates, data, config)


def copy_initial_net(net: nn.Module, model: Callable[[], nn.Module], replicates: int, seed: int) -> list[nn.Module]:
    """The net, and so many that begin as it does: copies, or made anew where a net cannot be copied."""
    try:
        return [net, *(copy_net(net) for _ in range(replicates))]
    except (TypeError, RuntimeError):  # it holds a lock, a file, a tensor with a graph
        return [net, *(initialize_model(model, seed) for _ in range(replicates))]


def train_with_replicates(
    method: "InfluenceBootstrap",
    starts: Sequence[nn.Module],
    data: Dataset[Any],
    config: TrainingConfig,
    val_data: Dataset[Any] | None,
) -> list[nn.Module]:
    """The first net as it is, the others on Dirichlet weights of the rows; all with rows in one order."""
    n, count = check_length(data), len(starts) - 1
    keys = derive_keys(torch.arange(count), config.seed, "true replicate")
    members = fit_members(
        starts,
        data,
        config,
        loss=method.loss,
        seeds=[config.seed] * (1 + count),
        weights=torch.cat([torch.ones(1, n), Dirichlet().sample(keys, n).float()]),  # (1 + K, n)
        identity=describe_method(replace(method, num_calibration_fits=0)),
        val_data=val_data,
    )
    return [net.eval() for net in (members.nets() if isinstance(members, StackedNets) else members)]


def with_raw_residuals(
    method: "InfluenceBootstrap", net: nn.Module, data: Dataset[Any], config: TrainingConfig
) -> tuple[InfluencePredictor, InfluencePredictor]:
    """The predictor around a trained net, and one with raw residuals and Dirichlet weights, as true replicates have.

    Several layers need one kernel for both.
    """
    method = replace(method, num_calibration_fits=0)
    raw = replace(method, residuals="raw", weight_distribution=Dirichlet())
    if method.layers == 1:
        predictor = method.from_trained(net, data, config)
        return predictor, replace(raw, ridge=predictor.ridge).from_trained(net, data, config)
    from neuboots.methods.influence.tangent import build_tangent_predictors

    first, second = build_tangent_predictors((method, raw), net, data, config)
    return first, second


def scale_by_replicates(
    loss: Loss,
    predictor: InfluencePredictor,
    raw: InfluencePredictor,
    replicates: Sequence[nn.Module],
    data: Dataset[Any],
    config: TrainingConfig,
) -> ScaledPredictor:
    """The predictor with its deviations times s, from replicates that are trained already."""
    net = predictor.net
    assert net is not None
    n = check_length(data)
    places = derive_keys(torch.arange(n), config.seed, "compared").argsort()[:_ROWS].sort().values
    loader = EpochLoader(Subset(data, places.tolist()), batch_size=config.batch_size, seed=config.seed, shuffle=False)
    moved = expected = 0.0
    with preserve_rng_state(), torch.no_grad():
        for _, batch, _ in loader.epoch(0):
            centre, *others = (_outputs(each, batch.x) for each in (net, *replicates))
            drawn = raw.predict(batch.x, _DRAWN, seed=config.seed).samples - centre
            moved += sum(_squares(loss, other - centre, axis=1) for other in others) / len(replicates)
            expected += _squares(loss, drawn, axis=2) / _DRAWN
    scale = math.sqrt(max(1.0, moved / expected)) if expected > 0 else 1.0
    outputs = centre.shape[1] // 2 if isinstance(loss, GaussianNLL) else centre.shape[1]
    return ScaledPredictor(predictor, std_scale=(scale,) * outputs)


def _outputs(net: nn.Module, x: Any) -> Tensor:
    with eval_mode(net):
        return add_output_axis(compute_output(net, x))


def _squares(loss: Loss, change: Tensor, *, axis: int) -> float:
    """Σ change², of what counts in outputs along the axis: means of a Gaussian head, differences between logits."""
    if isinstance(loss, GaussianNLL):
        change = change.chunk(2, axis)[0]
    if isinstance(loss, nn.CrossEntropyLoss):
        change = change - change.mean(axis, keepdim=True)  # a shift of all logits means nothing
    return float(change.double().square().sum())
