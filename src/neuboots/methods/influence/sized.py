"""The size of the deviations, set by a few true replicates.

    s² = max(1, Σ_k Σ_x |f_k(x) − f̂(x)|² / K Σ_x Var f_w(x)),   f_k trained like f̂, from the same start, on weights w_k

To first order a net moves by J Δθ; a real one may move further, the wider it is. The variance that is compared is that
of raw residuals, which a true replicate has as well. Few replicates give a noisy ratio, and the first order is seldom
too large: below 1 it is left alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from neuboots.batches import Batch, Loader, check_rows, own_randomness
from neuboots.checkpoints import identity_of
from neuboots.keys import draw_keys
from neuboots.losses import CrossEntropy, GaussianNLL, Loss, unmasked, weighted_loss
from neuboots.methods.common import loss_figures, output_of, with_outputs
from neuboots.methods.influence.predictor import InfluencePredictor
from neuboots.methods.scaling import ScaledPredictor
from neuboots.surgery import eval_mode
from neuboots.training import Objective, Recipe, make_seeded, train
from neuboots.weights import Dirichlet

if TYPE_CHECKING:
    from neuboots.methods.influence.method import InfluenceBootstrap

_ROWS = 512  # training inputs at which movements are compared
_DRAWN = 64  # replicates to first order, at each


def sized(
    method: "InfluenceBootstrap",
    predictor: InfluencePredictor,
    make_net: Callable[[], nn.Module],
    data: Dataset[Any],
    recipe: Recipe,
    validation: Dataset[Any] | None,
) -> ScaledPredictor:
    """The predictor with its deviations times s, from `method.replicates` more trainings."""
    nets = [replicate_net(method, make_net, data, recipe, validation, k) for k in range(method.replicates)]
    return sized_by(method, predictor, nets, data, recipe)


def sized_by(
    method: "InfluenceBootstrap",
    predictor: InfluencePredictor,
    nets: Sequence[nn.Module],
    data: Dataset[Any],
    recipe: Recipe,
) -> ScaledPredictor:
    """The same with replicates that are trained already."""
    net = predictor.net
    assert net is not None
    plain = replace(method, residuals="raw", ridge=predictor.ridge, replicates=0, law=Dirichlet())  # as replicates have
    raw = plain.around(net, data, recipe)
    n = check_rows(data)
    places = draw_keys(torch.arange(n), recipe.seed, "compared").argsort()[:_ROWS].sort().values
    loader = Loader(Subset(data, places.tolist()), batch_size=recipe.batch_size, seed=recipe.seed, shuffle=False)
    moved = expected = 0.0
    with own_randomness(), torch.no_grad():
        for _, batch, _ in loader.epoch(0):
            centre, *others = (_outputs(each, batch.x) for each in (net, *nets))
            drawn = raw.predict(batch.x, _DRAWN, seed=recipe.seed).samples - centre
            moved += sum(_squares(method.loss, other - centre, axis=1) for other in others) / len(nets)
            expected += _squares(method.loss, drawn, axis=2) / _DRAWN
    scale = math.sqrt(max(1.0, moved / expected)) if expected > 0 else 1.0
    outputs = centre.shape[1] // 2 if isinstance(method.loss, GaussianNLL) else centre.shape[1]
    return ScaledPredictor(predictor, std_scale=(scale,) * outputs)


def _outputs(net: nn.Module, x: Any) -> Tensor:
    with eval_mode(net):
        return with_outputs(output_of(net, x))


def _squares(loss: Loss, change: Tensor, *, axis: int) -> float:
    """Σ change², of what counts in outputs along the axis: means of a Gaussian head, differences between logits."""
    if isinstance(loss, GaussianNLL):
        change = change.chunk(2, axis)[0]
    if isinstance(loss, CrossEntropy | nn.CrossEntropyLoss):
        change = change - change.mean(axis, keepdim=True)  # a shift of all logits means nothing
    return float(change.double().square().sum())


def replicate_net(
    method: "InfluenceBootstrap",
    make_net: Callable[[], nn.Module],
    data: Dataset[Any],
    recipe: Recipe,
    validation: Dataset[Any] | None,
    number: int,
) -> nn.Module:
    """A net trained from the start that the recipe's seed names, on Dirichlet weights of the rows."""
    loss = method.loss
    keys = draw_keys(torch.tensor([number]), recipe.seed, "true replicate")
    weights = Dirichlet().sample(keys, check_rows(data))[0]
    net = make_seeded(make_net, recipe.seed)

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        losses = loss(output_of(model, batch.x), batch.y)
        return weighted_loss(losses, weights[batch.index.cpu()], unmasked(loss, batch.y))

    def objective_at(epoch: int) -> Objective:
        return objective

    def validate(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return loss_figures(loss, output_of(model, batch.x), batch.y)

    train(
        net,
        data,
        objective_at,
        replace(recipe, folder=None if recipe.folder is None else Path(recipe.folder) / f"replicate-{number}"),
        validation=validation,
        validate=validate,
        identity=f"{identity_of(method)}, replicate {number}",
    )
    return net.eval()
