"""Known functions, and data sets drawn from them.

    y = f(x) + ε,   x ~ design

Friedman, Multivariate adaptive regression splines, Annals of Statistics 1991 (the function of five inputs).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from neuboots.keys import seed_named

Design = Callable[[int, torch.Generator], Tensor]  # n inputs: (n, d)
Noise = Callable[[Tensor, torch.Generator], Tensor]  # what is added to f at x (n, d): (n,)


@dataclass(frozen=True, eq=False)
class Truth:
    """y = f(x) + ε with x ~ design: all that a data set is drawn from, and the inputs at which bands are judged.

    Nothing is standardised on the way: let f and ε be of the order of 1, as nets like them.

    >>> truth = Truth(lambda x: x[:, 0].square(), uniform(-1, 1), gaussian(0.1), torch.linspace(-1, 1, 5)[:, None])
    >>> truth.draw(100, seed=0, number=3).tensors[0].shape
    torch.Size([100, 1])
    """

    function: Callable[[Tensor], Tensor]  # (N, d) → (N,)
    design: Design
    noise: Noise
    grid: Tensor  # (N, d)
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.grid, Tensor) or self.grid.requires_grad:
            got = "a grid that asks for gradients" if isinstance(self.grid, Tensor) else f"a {type(self.grid).__name__}"
            raise ValueError(f"got {got}; expected a grid of numbers: torch.as_tensor(grid).detach()")
        if self.grid.ndim != 2 or not len(self.grid) or not self.grid.is_floating_point():
            raise ValueError(
                f"got a grid of shape {tuple(self.grid.shape)} and type {self.grid.dtype}; expected floating-point "
                "numbers (N, d): with one input use grid[:, None]"
            )
        _check_values("function(grid)", self.values, len(self.grid))

    @property
    def values(self) -> Tensor:
        """f on the grid: (N,)."""
        return self.function(self.grid)

    def draw(self, n: int, *, seed: int, number: int) -> TensorDataset:
        """Data set `number` of a seed: n rows (x, y), (n, d) and (n,); a function of these three alone."""
        rng = torch.Generator().manual_seed(seed_named(seed, "data set", number))
        x = self.design(n, rng)
        if not isinstance(x, Tensor):
            raise ValueError(f"design(n, rng) gave a {type(x).__name__}; expected a tensor: torch.as_tensor(x)")
        x = x.to(self.grid)
        if x.shape != (n, self.grid.shape[1]):
            raise ValueError(f"design(n, rng) gave {tuple(x.shape)}; expected {(n, self.grid.shape[1])}, as the grid")
        y = self.function(x) + self.noise(x, rng)
        _check_values("function(x) + noise(x, rng)", y, n)
        return TensorDataset(x, y.to(x))


def _check_values(what: str, values: Any, count: int) -> None:
    if not isinstance(values, Tensor):
        raise ValueError(f"{what} gave a {type(values).__name__}; expected a tensor: compute with torch, not NumPy")
    if values.shape != (count,):
        raise ValueError(f"{what} gave shape {tuple(values.shape)}; expected ({count},), one number for each input")
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{what} gave NaN or infinite values; expected finite numbers")


def uniform(low: float, high: float, *, inputs: int = 1) -> Design:
    """x ~ U(low, high), independent: (n, d)."""
    return lambda n, rng: low + (high - low) * torch.rand(n, inputs, generator=rng)


def normal(std: float = 1.0, *, inputs: int = 1) -> Design:
    """x ~ N(0, std²), independent: (n, d)."""
    return lambda n, rng: std * torch.randn(n, inputs, generator=rng)


def gaussian(std: float) -> Noise:
    """ε ~ N(0, std²): (n,)."""
    return lambda x, rng: std * torch.randn(len(x), generator=rng)


def _friedman(x: Tensor) -> Tensor:
    """Friedman's function of five inputs, less its mean 14.4 and over its standard deviation 4.9."""
    a, b, c, d, e = x.unbind(1)
    return (10 * torch.sin(math.pi * a * b) + 20 * (c - 0.5).square() + 10 * d + 5 * e - 14.4) / 4.9


def _growing(x: Tensor, rng: torch.Generator) -> Tensor:
    return (0.4 + 0.15 * x[:, 0]) * torch.randn(len(x), generator=rng)


def _line(low: float, high: float) -> Tensor:
    return (low + (high - low) * torch.arange(41) / 40)[:, None]  # (41, 1)


# The paper does not name the functions of figure 2. "sine" is that of the authors' early script for this experiment:
# sin(π x / 2) with x ~ N(0, 1), noise of variance 0.2 and n = 300.
FUNCTIONS: dict[str, Truth] = {
    truth.name: truth
    for truth in [
        Truth(lambda x: (0.5 * math.pi * x[:, 0]).sin(), normal(), gaussian(math.sqrt(0.2)), _line(-2, 2), "sine"),
        # least squares has an exact band here: the case to try a method's options on
        Truth(lambda x: x[:, 0], uniform(-1, 1), gaussian(0.5), _line(-1, 1), "line"),
        # no smooth estimator is unbiased at a jump
        Truth(lambda x: x[:, 0].sign(), uniform(-2, 2), gaussian(0.3), _line(-1.9, 1.9), "jump"),
        # noise from 0.1 on the left to 0.7 on the right: a band of one width cannot be right on both sides
        Truth(lambda x: (2 * x[:, 0]).sin(), uniform(-2, 2), _growing, _line(-2, 2), "uneven"),
        # five inputs, judged at 50 random ones
        Truth(
            _friedman,
            uniform(0, 1, inputs=5),
            gaussian(0.2),
            torch.rand(50, 5, generator=torch.Generator().manual_seed(0)),
            "friedman",
        ),
    ]
}
