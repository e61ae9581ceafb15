"""A small world for trying ideas: 1-D regression, and many small nets that are trained at once by batched products.

    y = f(x) + σ(x) ε;   nets of three ReLU layers, R data sets with a net each, one product for all of them

Parameters are named tensors with the data sets on the first axis, so that an idea may add its own beside those of the
net. A generator is a function g(params, x, α) of x (R, m, 1) and α (R or 1, m or 1, S).
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Params = dict[str, Tensor]
Generator = Callable[[Params, Tensor, Tensor], Tensor]

HIDDEN = 3  # layers
STEPS, BATCH, LR = 500, 50, 1e-2
REPLICATES = 12  # of the true bootstrap

FUNCTIONS = {
    "smooth": lambda x: torch.sin(2.0 * x),
    "wiggly": lambda x: torch.sin(3.5 * x),
    "gap": lambda x: torch.sin(2.0 * x),  # no x between −0.5 and 0.5
}
NOISES = {"constant": lambda x: torch.full_like(x, 0.3), "varying": lambda x: 0.1 + 0.2 * x.abs()}


# -- data ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A function, its noise, rows, width of the nets, and how many data sets are drawn."""

    function: str
    noise: str
    n: int = 300
    width: int = 64
    sets: int = 40
    steps: int = STEPS
    seed: int = 0

    @cached_property
    def grid(self) -> Tensor:
        """Where bands are judged: (G,)."""
        return torch.linspace(-1.9, 1.9, 39)

    @cached_property
    def inside(self) -> Tensor:
        """Which of the grid lie among the data: (G,)."""
        return self.grid.abs() > 0.525 if self.function == "gap" else torch.ones(39, dtype=torch.bool)

    @cached_property
    def truth(self) -> Tensor:
        return FUNCTIONS[self.function](self.grid)

    @cached_property
    def data(self) -> tuple[Tensor, Tensor]:
        """x and y of all data sets: (R, n, 1)."""
        random = torch.Generator().manual_seed(1000 + self.seed)
        u = torch.rand(self.sets, self.n, 1, generator=random)
        x = 3.0 * u - 2.0 + (u >= 0.5) if self.function == "gap" else 4.0 * u - 2.0
        noise = NOISES[self.noise](x) * torch.randn(x.shape, generator=random)
        return x, FUNCTIONS[self.function](x) + noise


# -- nets ----------------------------------------------------------------------------------------------


def beginnings(sets: int, width: int, seed: int) -> Params:
    """Initial weights as torch would draw them, of `sets` nets."""
    random = torch.Generator().manual_seed(seed)
    sizes = [1, *[width] * HIDDEN, 1]
    params = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        for name, rows in ((f"weight{layer}", inputs), (f"bias{layer}", 1)):
            params[name] = uniform((sets, rows, outputs), 1.0 / math.sqrt(inputs), random)
    return params


def uniform(shape: tuple[int, ...], bound: float, random: torch.Generator) -> Tensor:
    return bound * (2.0 * torch.rand(shape, generator=random) - 1.0)


def linear(params: Params, layer: int, h: Tensor) -> Tensor:
    return torch.baddbmm(params[f"bias{layer}"], h, params[f"weight{layer}"])


def layers(params: Params, x: Tensor) -> list[Tensor]:
    """The outputs of all hidden layers, each (R, m, width)."""
    found = []
    for layer in range(HIDDEN):
        x = linear(params, layer, x).relu()
        found.append(x)
    return found


def features(params: Params, x: Tensor) -> Tensor:
    return layers(params, x)[-1]


def net(params: Params, x: Tensor) -> Tensor:
    """The plain net: (R, m, 1)."""
    return linear(params, HIDDEN, features(params, x))


# -- training ------------------------------------------------------------------------------------------


def batches(n: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Row numbers of each step; the data sets are in random order anyway, and share them."""
    random = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < min(BATCH, n):
            order = torch.cat([order, torch.randperm(n, generator=random)])
        yield order[:BATCH]
        order = order[BATCH:]


def descend(params: Params, losses: Iterator[Callable[[Params], Tensor]], steps: int, lr: float = LR) -> Params:
    """Adam with cosine schedule; each step has a loss of its own, the sum over data sets of their means."""
    params = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    optimizer = torch.optim.Adam(params.values(), lr=lr, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for loss in losses:
        optimizer.zero_grad(set_to_none=True)
        loss(params).backward()
        optimizer.step()
        schedule.step()
    return {name: value.detach() for name, value in params.items()}


def fit_weighted(
    params: Params, x: Tensor, y: Tensor, weights: Tensor | None = None, *, steps: int = STEPS, lr: float = LR
) -> Params:
    """Plain nets, by least squares with a weight for each row (R, n, 1)."""

    def losses() -> Iterator[Callable[[Params], Tensor]]:
        for i in batches(x.shape[1], steps, 7):

            def loss(params: Params, i: Tensor = i) -> Tensor:
                squares = (net(params, x[:, i]) - y[:, i]).square()
                return (squares if weights is None else weights[:, i] * squares).mean((1, 2)).sum()

            yield loss

    return descend(params, losses(), steps, lr)


def random_weights(shape: tuple[int, ...], seed: int) -> Tensor:
    """n × Dirichlet(1, …, 1) along the second axis."""
    w = torch.empty(shape).exponential_(generator=torch.Generator().manual_seed(seed))
    return w / w.mean(1, keepdim=True)


# -- what is trained once for a setting and shared by all ideas ------------------------------------------


class World:
    """A setting with its plain nets and its true bootstrap."""

    def __init__(self, setting: Setting, replicates: int = REPLICATES) -> None:
        self.setting, self.replicates = setting, replicates
        self.x, self.y = setting.data
        self.grid = setting.grid[None, :, None].expand(setting.sets, -1, 1)
        self.start = beginnings(setting.sets, setting.width, setting.seed)

    @cached_property
    def plain(self) -> Params:
        return fit_weighted(self.start, self.x, self.y, steps=self.setting.steps)

    @cached_property
    def curve(self) -> Tensor:
        """f̂ on the grid: (R, G)."""
        return net(self.plain, self.grid)[..., 0]

    @cached_property
    def true(self) -> Tensor:
        """The random-weight bootstrap: nets of their own, with weights and a beginning of their own: (K, R, G)."""
        found = []
        for k in range(self.replicates):
            start = beginnings(self.setting.sets, self.setting.width, 100 + k)
            params = fit_weighted(start, self.x, self.y, random_weights(self.x.shape, k), steps=self.setting.steps)
            found.append(net(params, self.grid)[..., 0])
        return torch.stack(found)

    @cached_property
    def one(self) -> tuple[Tensor, Tensor]:
        """Weights (R, n) and outputs at the data (R, n) of one replicate that begins where the plain net began."""
        weights = random_weights(self.x.shape, 1000)
        params = fit_weighted(self.start, self.x, self.y, weights, steps=self.setting.steps)
        return weights[..., 0], net(params, self.x)[..., 0]


# -- the net as a linear model of its weights -------------------------------------------------------------


@dataclass(frozen=True)
class Tangent:
    """J Jᵀ among the data in its eigenbasis, and from other points to the data; all in double precision."""

    values: Tensor  # (R, n)
    vectors: Tensor  # (R, n, n)
    cross: Tensor  # k(x, X): (R, m, n)
    residual: Tensor  # y − f̂: (R, n)
    target: Tensor  # J θ̂ + residual: (R, n)

    def response(self, ridge: Tensor, cross: Tensor | None = None) -> Tensor:
        """k(x, X) (K + λ)⁻¹ for λ (R,): what a residual moves the curve by, (R, m, n)."""
        cross = self.cross if cross is None else cross
        return (cross @ self.vectors / (self.values + ridge[:, None])[:, None]) @ self.vectors.mT

    def hat(self, ridge: Tensor) -> Tensor:
        """(R, n, n)."""
        return (self.vectors * (self.values / (self.values + ridge[:, None]))[:, None]) @ self.vectors.mT


def tangent(params: Params, x: Tensor, y: Tensor, points: Tensor, *, head: bool = False) -> Tangent:
    """Of the whole net, or of its head alone."""
    first = HIDDEN if head else 0

    def parts(points: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        inputs, before = [], []
        h = points
        for layer in range(HIDDEN + 1):
            inputs.append(h)
            before.append(linear(params, layer, h).requires_grad_())
            h = before[-1].relu()
        slopes = torch.autograd.grad(before[-1].sum(), before)
        return [h.detach().double() for h in inputs], [s.double() for s in slopes], before[-1].detach().double()

    def kernel(a: tuple[list[Tensor], list[Tensor], Tensor], b: tuple[list[Tensor], list[Tensor], Tensor]) -> Tensor:
        return sum(
            (a[0][layer] @ b[0][layer].mT + 1.0) * (a[1][layer] @ b[1][layer].mT) for layer in range(first, HIDDEN + 1)
        )

    mine, other = parts(x), parts(points)
    values, vectors = torch.linalg.eigh(kernel(mine, mine))
    residual = (y - mine[2])[..., 0]
    along = sum(
        (linear({k: v.double() for k, v in params.items()}, layer, mine[0][layer]) * mine[1][layer]).sum(-1)
        for layer in range(first, HIDDEN + 1)
    )
    return Tangent(values.clamp_min(0.0), vectors, kernel(other, mine), residual, along + residual)
