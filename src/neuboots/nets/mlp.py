"""The multilayer perceptron, and the argument checks that the nets share."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


class MLP(nn.Module):
    """h ← activation(W h + b), once per width, and a linear head; the paper's net is 3 × 500.

    Inputs (N, *) are flattened to (N, in_features). No widths at all is a linear model.

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
        check_size("in_features", in_features)
        check_size("out_features", out_features)
        check_sizes("widths", widths)
        check_choice("activation", activation, ACTIVATIONS)
        check_choice("batch_norm", batch_norm, (False, True))
        self.options: dict[str, Any] = {
            "in_features": in_features,
            "out_features": out_features,
            "widths": list(widths),
            "activation": activation,
            "batch_norm": batch_norm,
        }
        layers: list[nn.Module] = []
        fan_in = in_features
        for width in widths:
            layers.append(nn.Linear(fan_in, width, bias=not batch_norm))
            if batch_norm:
                layers.append(nn.BatchNorm1d(width))
            layers.append(ACTIVATIONS[activation]())
            fan_in = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(fan_in, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (N, *) to outputs (N, out_features)."""
        expected = self.options["in_features"]
        if x.dim() < 2 or math.prod(x.shape[1:]) != expected:
            raise ValueError(
                f"the net got an input of shape {tuple(x.shape)}; expected (N, *) with {expected} "
                "values per row: reshape the input, or build the net with its in_features"
            )
        phi = self.features(x.flatten(1))  # (N, D)
        out: Tensor = self.head(phi)  # (N, C)
        return out


def check_size(name: str, size: object) -> None:
    """Refuse anything but a whole number of at least 1."""
    if type(size) is not int or size < 1:
        raise ValueError(f"{name} is {size!r}; expected an int of at least 1: pass such a number")


def check_sizes(name: str, sizes: object) -> None:
    """Refuse anything but a sequence of whole numbers of at least 1; it may be empty."""
    if not isinstance(sizes, Sequence) or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(
            f"{name} is {sizes!r}; expected a sequence of ints of at least 1: pass a tuple such as (64, 64)"
        )


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Refuse a value that is not among the choices."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        known = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} is {value!r}; expected one of {known}: pass one of these")
