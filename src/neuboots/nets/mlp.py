"""Multilayer perceptron."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from neuboots._validation import check_choice
from neuboots.serialization import configurable

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU, "gelu": nn.GELU}


@configurable
class MLP(nn.Module):
    """Multilayer perceptron: h ← activation(W h + b), once per width, and a linear head; the paper's net is 3 × 500.

    Args:
        in_features: Number of inputs; inputs (N, *) are flattened to (N, in_features).
        out_features: Number of outputs.
        widths: Widths of the hidden layers; empty for a linear model.
        activation: "relu", "tanh", "silu" or "gelu".
        batch_norm: Whether BatchNorm precedes each activation.

    Example:
        >>> import torch
        >>> net = MLP(8, 3, widths=(64, 64), activation="tanh")
        >>> net(torch.zeros(5, 2, 4)).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        widths: Sequence[int] = (500, 500, 500),
        activation: str = "relu",
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        check_choice("activation", activation, ACTIVATIONS)
        layers: list[nn.Module] = []
        for before, width in pairwise((in_features, *widths)):
            norms = [nn.BatchNorm1d(width)] if batch_norm else []
            layers += [nn.Linear(before, width, bias=not batch_norm), *norms, ACTIVATIONS[activation]()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1] if widths else in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (N, *) to outputs (N, out_features)."""
        phi = self.features(x.flatten(1))  # (N, D)
        out: Tensor = self.head(phi)  # (N, C)
        return out
