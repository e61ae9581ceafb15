"""Size of the deviations of the influence bootstrap, set by a few replicates that are trained.

    s² = max(1, Σ_k Σ_x |f_k(x) − f̂(x)|² / K Σ_x Var f_w(x)),   f_k trained like f̂, from the same start, on weights w_k

To first order a net moves by J Δθ; a real one may move further, the wider it is. The variance in the denominator is
that of raw residuals, which a trained replicate has as well. Few replicates give a noisy ratio, and the first order is
seldom too large: a ratio below 1 is ignored.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from neuboots._prng import derive_keys
from neuboots.head import add_output_axis, compute_output, copy_net, eval_mode
from neuboots.loading import check_length, select_examples
from neuboots.losses import GaussianNLL, Loss
from neuboots.methods._base import iterate_batches
from neuboots.methods._vmap import StackedNets
from neuboots.methods.ensembles import fit_members
from neuboots.methods.influence._head import InfluencePredictor, build_head_predictor
from neuboots.methods.influence._tangent import build_tangent_predictors
from neuboots.posthoc import ScaledPredictor
from neuboots.training import FitInputs, describe_method, initialize_model
from neuboots.weights import Dirichlet

if TYPE_CHECKING:
    from neuboots.methods.influence import InfluenceBootstrap

_MAX_ROWS = 512  # training inputs at which deviations are compared
_NUM_SAMPLES = 64  # first-order replicates at each


def fit_scaled(method: "InfluenceBootstrap", net: nn.Module, inputs: FitInputs) -> ScaledPredictor:
    """Train the net and its replicates, vectorized if they are small; scale the net's predictor by the replicates."""
    num = method.num_calibration_fits
    try:
        replicates = [copy_net(net) for _ in range(num)]
    except (TypeError, RuntimeError):  # it holds a lock, a file, a tensor with a graph
        replicates = [initialize_model(inputs.member_factory, inputs.config.seed) for _ in range(num)]
    net, *replicates = train_with_replicates(method, [net, *replicates], inputs)
    return scale_by_replicates(method, net, replicates, inputs)


def train_with_replicates(
    method: "InfluenceBootstrap", nets: Sequence[nn.Module], inputs: FitInputs
) -> list[nn.Module]:
    """Train the first net as it is, the others on Dirichlet weights of the rows, all with rows in the same order."""
    n, count, config = check_length(inputs.data), len(nets) - 1, inputs.config
    keys = derive_keys(torch.arange(count), config.seed, "true replicate")
    members = fit_members(
        nets,
        inputs.data,
        config,
        loss=method.loss,
        seeds=[config.seed] * (1 + count),
        weights=torch.cat([torch.ones(1, n), Dirichlet().sample(keys, n).float()]),  # (1 + K, n)
        identity=describe_method(replace(method, num_calibration_fits=0)),
        val_data=inputs.val_data,
    )
    return [net.eval() for net in (members.nets() if isinstance(members, StackedNets) else members)]


def scale_by_replicates(
    method: "InfluenceBootstrap", net: nn.Module, replicates: Sequence[nn.Module], inputs: FitInputs
) -> ScaledPredictor:
    """The predictor around a trained net with its deviations times s, from trained replicates."""
    method = replace(method, num_calibration_fits=0)
    raw_method = replace(method, residuals="raw", weight_distribution=Dirichlet())  # as the replicates are trained
    predictor: InfluencePredictor
    raw: InfluencePredictor
    if method.layers == 1:
        predictor = build_head_predictor(method, net, inputs)
        raw = build_head_predictor(replace(raw_method, ridge=predictor.ridge), net, inputs)
    else:
        predictor, raw = build_tangent_predictors([method, raw_method], net, inputs)
    loss, data, config = method.loss, inputs.data, inputs.config
    rows = derive_keys(torch.arange(check_length(data)), config.seed, "compared").argsort()[:_MAX_ROWS].sort().values
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
