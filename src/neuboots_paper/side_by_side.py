"""Nets of one architecture trained side by side, each on a data set of its own.

    θ_r = argmin 1/n Σᵢ w_ri ℓ(f(X_ri; θ), y_ri),   r = 1 … R, all of them in one loop

Hundreds of small nets take as long one by one as their operations are many; R in one operation take little more than
one. Row i of all R data sets comes in the same step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots.loading import Batch
from neuboots.losses import as_loss
from neuboots.training import Objective, TrainingConfig, initialize_model, train


def train_side_by_side(
    model: Callable[[], nn.Module],
    sets: Sequence[TensorDataset],
    config: TrainingConfig,
    *,
    seeds: Sequence[int],
    weights: Tensor | None = None,
) -> list[nn.Module]:
    """One net for each data set (n, d), (n,), with the squared error; its first numbers are drawn by its seed.

    A net is a row of Linear layers and activations. `weights` (R, n) weigh the rows of each. All take the rows in the
    order of the recipe.

    >>> from functools import partial
    >>> sets = [TensorDataset(torch.ones(4, 1), torch.full((4,), y)) for y in (1.0, 2.0)]
    >>> config = TrainingConfig(epochs=200, batch_size=4, optimizer=partial(torch.optim.SGD, lr=0.2), progress=False)
    >>> nets = train_side_by_side(lambda: nn.Linear(1, 1), sets, config, seeds=(0, 1))
    >>> [round(float(net(torch.ones(1, 1)).detach()), 1) for net in nets]
    [1.0, 2.0]
    """
    nets = [initialize_model(model, seed) for seed in seeds]
    together = _Together(nets)
    x, y = (torch.stack([data.tensors[k] for data in sets], 1) for k in (0, 1))  # (n, R, d), (n, R)
    loss = as_loss(nn.MSELoss())

    def objective(net: nn.Module, batch: Batch) -> Tensor:
        losses = loss(net(batch.x.movedim(1, 0))[..., 0], batch.y.T)  # (R, N)
        if weights is not None:
            losses = losses * weights[:, batch.index].to(losses)
        return losses.mean(1).sum()  # of all nets: each has the gradient of its own mean

    def objective_at(epoch: int) -> Objective:
        return objective

    train(together, TensorDataset(x, y), objective_at, config)
    together.hand_back(nets)
    return [net.eval() for net in nets]


class _Together(nn.Module):
    """R nets as one, h ← h W + b, with weights (R, D, O).

    They lie transposed: as (R, O, D) their gradients would be copied in every step, which takes a quarter of the time.
    """

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        super().__init__()
        self.activations = _layers_of(nets[0])
        linear = [_linear_of(net) for net in nets]
        self.weights = nn.ParameterList(
            torch.stack([layer.weight.detach().T for layer in layers]) for layers in zip(*linear, strict=True)
        )
        self.biases = nn.ParameterList(
            torch.stack([layer.bias.detach()[None] for layer in layers]) for layers in zip(*linear, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Each net at its own inputs (R, N, d): (R, N, C)."""
        steps = zip(self.weights, self.biases, strict=True)
        for layer in self.activations:
            if isinstance(layer, nn.Linear):
                weight, bias = next(steps)
                x = torch.baddbmm(bias, x, weight)
            else:
                x = layer(x)
        return x

    def hand_back(self, nets: Sequence[nn.Module]) -> None:
        """The trained numbers go into the nets they came from."""
        with torch.no_grad():
            for r, net in enumerate(nets):
                for layer, weight, bias in zip(_linear_of(net), self.weights, self.biases, strict=True):
                    layer.weight.copy_(weight[r].T)
                    layer.bias.copy_(bias[r, 0])


def _layers_of(net: nn.Module) -> list[nn.Module]:
    layers = [module for _, module in net.named_modules(remove_duplicate=False) if not [*module.children()]]
    fits = [(isinstance(layer, nn.Linear) and layer.bias is not None) or not [*layer.parameters()] for layer in layers]
    if not all(fits):
        raise TypeError(f"got a net with {layers[fits.index(False)]}; expected a row of Linear layers and activations")
    return layers


def _linear_of(net: nn.Module) -> list[nn.Linear]:
    return [layer for layer in _layers_of(net) if isinstance(layer, nn.Linear)]
