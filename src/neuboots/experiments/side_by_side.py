"""Nets of one architecture trained side by side, each on a data set of its own.

    θ_r = argmin 1/n Σᵢ w_ri ℓ(f(X_ri; θ), y_ri),   r = 1 … R, all of them in one loop

Hundreds of small nets take as long one by one as their operations are many; R in one operation take little more than
one. Row i of all R data sets comes in the same step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots.batches import Batch
from neuboots.losses import SquaredError
from neuboots.methods.stacked import Stacked
from neuboots.training import Objective, Recipe, make_seeded, train


def train_side_by_side(
    make_net: Callable[[], nn.Module],
    sets: Sequence[TensorDataset],
    recipe: Recipe,
    *,
    seeds: Sequence[int],
    weights: Tensor | None = None,
) -> list[nn.Module]:
    """One net for each data set (n, d), (n,), with the squared error; its first numbers are drawn by its seed.

    `weights` (R, n) weigh the rows of each. All take the rows in the order of the recipe.

    >>> from functools import partial
    >>> sets = [TensorDataset(torch.ones(4, 1), torch.full((4,), y)) for y in (1.0, 2.0)]
    >>> recipe = Recipe(epochs=200, batch_size=4, optimizer=partial(torch.optim.SGD, lr=0.2), progress=False)
    >>> nets = train_side_by_side(lambda: nn.Linear(1, 1), sets, recipe, seeds=(0, 1))
    >>> [round(float(net(torch.ones(1, 1)).detach()), 1) for net in nets]
    [1.0, 2.0]
    """
    stacked = Stacked([make_seeded(make_net, seed) for seed in seeds])
    x, y = (torch.stack([data.tensors[k] for data in sets], 1) for k in (0, 1))  # (n, R, d), (n, R)
    loss = SquaredError()

    def objective(nets: nn.Module, batch: Batch) -> Tensor:
        losses = loss(nets(batch.x.movedim(1, 0))[..., 0], batch.y.T)  # (R, N)
        if weights is not None:
            losses = losses * weights[:, batch.index].to(losses)
        return losses.mean(1).sum()  # of all nets: each has the gradient of its own mean

    def objective_at(epoch: int) -> Objective:
        return objective

    train(stacked, TensorDataset(x, y), objective_at, recipe)
    return [net.eval() for net in stacked.nets()]
