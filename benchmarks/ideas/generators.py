"""Generators g(x, α) that are trained on the weighted loss of eq. 2.6, and what might make them follow the data.

    min_g E_α 1/n Σᵢ α_{u(i)} (g(xᵢ, α) − yᵢ)²

The paper's is g = W (φ(x) ⊙ α) + b. The others change the blocks, the layers that see α, the schedule of α, or the way
in which α enters.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.ideas.world import (
    BATCH,
    HIDDEN,
    Generator,
    Params,
    World,
    batches,
    descend,
    features,
    fit_weighted,
    linear,
    net,
    random_weights,
    uniform,
)

DRAWN = 200  # replicates of a band
RANK = 8  # of a learned map from α to the units of a layer
NEIGHBOURHOODS = 16  # blocks, where they are neighbourhoods


class Band(NamedTuple):
    """Curves and standard deviations on the grid, (R, G); of how many replicates, where few."""

    curve: Tensor
    sd: Tensor
    replicates: int | None = None


@dataclass(frozen=True)
class Draws:
    """α of each step. `concentration` is a function of the share of the training that is over."""

    concentration: Callable[[float], float] = lambda share: 1.0
    resample: Literal["epoch", "step", "sample"] = "sample"
    warmup: float = 0.0  # share of the steps with α = 1
    antithetic: bool = False  # the second half of a batch has the first half's rows, and mirrored α

    def at(self, step: int, steps: int, rows: int, n: int, blocks: int) -> Tensor:
        """(1, rows or 1, S)."""
        if step < self.warmup * steps:
            return torch.ones(1, 1, blocks)
        held = step % max(1, n // BATCH) if self.resample == "epoch" else 0
        torch.manual_seed(step - held)
        drawn = dirichlet(self.concentration((step - held) / steps), rows if self.resample == "sample" else 1, blocks)
        if self.antithetic:
            drawn = drawn[: rows // 2]
            mirrored = -torch.log(-torch.expm1(-drawn.clamp_min(1e-6)))  # 1 − F(α) of the exponential law
            drawn = torch.cat([drawn, mirrored / mirrored.mean(1, keepdim=True)])
        return drawn[None]


def annealed(first: float, last: float) -> Draws:
    """The concentration goes from the one to the other, geometrically."""
    return Draws(concentration=lambda share: first * (last / first) ** share)


def dirichlet(concentration: float, rows: int, size: int) -> Tensor:
    """S × Dirichlet(c, …, c), by torch's own generator, which is quicker than named draws: (rows, S)."""
    return size * torch.distributions.Dirichlet(torch.full((size,), concentration)).sample((rows,))


def fit_generator(
    world: World, g: Generator, start: Params, draws: Draws, blocks: Tensor, size: int, steps: int
) -> Params:
    """Eq. 2.6 for all data sets; `blocks` is u(i) of each, (R, n), with `size` blocks."""
    x, y = world.x, world.y

    def losses() -> Iterator[Callable[[Params], Tensor]]:
        for step, i in enumerate(batches(x.shape[1], steps, 7)):
            i = i[: len(i) // 2].repeat(2) if draws.antithetic else i
            alpha = draws.at(step, steps, len(i), x.shape[1], size)

            def loss(params: Params, i: Tensor = i, alpha: Tensor = alpha) -> Tensor:
                weight = alpha.expand(len(x), len(i), -1).gather(-1, blocks[:, i, None])
                return (weight * (g(params, x[:, i], alpha) - y[:, i]).square()).mean((1, 2)).sum()

            yield loss

    return descend(start, losses(), steps)


def band_of(world: World, g: Generator, params: Params, size: int, concentration: float = 1.0) -> Band:
    """Mean and standard deviation of g(x, α) over draws of α that all data sets share."""
    torch.manual_seed(10**6)
    alphas = dirichlet(concentration, DRAWN, size)
    with torch.no_grad():
        replicates = torch.stack([g(params, world.grid, alpha[None, None])[..., 0] for alpha in alphas])
    return Band(replicates.mean(0), replicates.std(0))


def in_turn(world: World, size: int) -> Tensor:
    """Rows dealt to the blocks in turn: (R, n). They are in random order, so this is as good as a shuffle."""
    return (torch.arange(world.setting.n) % size).expand(world.setting.sets, -1)


def generator(
    world: World,
    *,
    form: Generator,
    extra: Callable[[World], Params] | None = None,
    draws: Draws = Draws(),  # noqa: B008  (frozen)
    predict: float = 1.0,
    longer: int = 1,
) -> Band:
    """Train a form from the beginning, with S = D random blocks, and draw its band with concentration `predict`.

    `extra` gives the parameters that the form has beside those of the net; it may replace theirs.
    """
    size = world.setting.width
    start = {**world.start, **(extra(world) if extra else {})}
    params = fit_generator(world, form, start, draws, in_turn(world, size), size, longer * world.setting.steps)
    return band_of(world, form, params, size, predict)


def paper(params: Params, x: Tensor, alpha: Tensor) -> Tensor:
    """W (φ ⊙ α) + b."""
    return linear(params, HIDDEN, features(params, x) * alpha)


# -- 1. feature blocks and data blocks that belong together ------------------------------------------------


def neighbours(world: World) -> Tensor:
    """u(i): blocks of equally many rows along x, (R, n)."""
    return world.x[..., 0].argsort(1).argsort(1) * NEIGHBOURHOODS // world.setting.n


def clusters(world: World, phi: Tensor) -> Tensor:
    """u(i): k-means of the features, begun from the neighbours in x."""
    found = neighbours(world)
    for _ in range(10):
        found = torch.cdist(phi, block_means(phi, found)).argmin(-1)
    return found


def block_means(phi: Tensor, blocks: Tensor) -> Tensor:
    """(R, S, D)."""
    member = torch.nn.functional.one_hot(blocks, NEIGHBOURHOODS).to(phi)
    return member.mT @ phi / member.sum(1).clamp_min(1.0)[..., None]


def aligned(world: World, by: Literal["x", "features"], deal: Literal["turn", "activation"]) -> Band:
    """Half the steps plain; then blocks are neighbourhoods, and a feature goes to the one that excites it most."""
    half = world.setting.steps // 2
    plain = fit_weighted(world.start, world.x, world.y, steps=half)
    with torch.no_grad():
        phi = features(plain, world.x)
    blocks = neighbours(world) if by == "x" else clusters(world, phi)
    if deal == "turn":
        dealt = (torch.arange(world.setting.width) % NEIGHBOURHOODS).expand(len(phi), -1)
    else:
        dealt = block_means(phi, blocks).argmax(1)  # (R, D)

    def g(params: Params, x: Tensor, alpha: Tensor) -> Tensor:
        h = features(params, x)
        return linear(params, HIDDEN, h * alpha.expand(*h.shape[:2], -1).gather(-1, dealt[:, None].expand(h.shape)))

    return band_of(world, g, fit_generator(world, g, plain, Draws(), blocks, NEIGHBOURHOODS, half), NEIGHBOURHOODS)


# -- 2. α in deeper layers -------------------------------------------------------------------------------


def every_layer(params: Params, x: Tensor, alpha: Tensor) -> Tensor:
    """Each hidden layer is multiplied by its own dealing of α."""
    for layer in range(HIDDEN):
        x = linear(params, layer, x).relu() * alpha.roll(layer * 17, -1)
    return linear(params, HIDDEN, x)


def low_rank(params: Params, x: Tensor, alpha: Tensor) -> Tensor:
    """Each hidden layer is multiplied by 1 + U D (α − 1), a learned map of low rank."""
    centred = (alpha - 1.0).expand(*x.shape[:2], -1)
    for layer in range(HIDDEN):
        x = linear(params, layer, x).relu() * (1.0 + centred @ params[f"down{layer}"] @ params[f"up{layer}"])
    return linear(params, HIDDEN, x)


def gbs(params: Params, x: Tensor, alpha: Tensor) -> Tensor:
    """Each layer is given α as further inputs."""
    wide = alpha.expand(*x.shape[:2], -1)
    for layer in range(HIDDEN):
        x = (linear(params, layer, x) + wide @ params[f"columns{layer}"]).relu()
    return linear(params, HIDDEN, x) + wide @ params[f"columns{HIDDEN}"]


def learned_maps(world: World) -> Params:
    random = torch.Generator().manual_seed(1)
    sets, width = world.setting.sets, world.setting.width
    found = {}
    for layer in range(HIDDEN):
        found[f"down{layer}"] = uniform((sets, width, RANK), (3.0 / width) ** 0.5, random)
        found[f"up{layer}"] = uniform((sets, RANK, width), 0.3, random)
    return found


def columns(world: World) -> Params:
    random = torch.Generator().manual_seed(1)
    sets, width = world.setting.sets, world.setting.width
    bound = (2 * width) ** -0.5
    return {
        f"columns{layer}": uniform((sets, width, width if layer < HIDDEN else 1), bound, random)
        for layer in range(HIDDEN + 1)
    }


# -- 5. centred α ----------------------------------------------------------------------------------------


def scaled(params: Params, x: Tensor, alpha: Tensor) -> Tensor:
    """W (φ ⊙ (1 + s(α − 1))) + b, s one number or one for each feature."""
    return linear(params, HIDDEN, features(params, x) * (1.0 + params["scale"] * (alpha - 1.0)))


def bilinear(params: Params, x: Tensor, alpha: Tensor) -> Tensor:
    """f(x) + φ(x)ᵀ M (α − 1): any first-order answer of the head to the weights."""
    phi = features(params, x)
    return linear(params, HIDDEN, phi) + (phi @ params["answer"] * (alpha - 1.0)).sum(-1, keepdim=True)


def one_scale(world: World) -> Params:
    return {"scale": torch.ones(world.setting.sets, 1, 1)}


def scales(world: World) -> Params:
    return {"scale": torch.ones(world.setting.sets, 1, world.setting.width)}


def answer(world: World) -> Params:
    return {"answer": torch.zeros(world.setting.sets, world.setting.width, world.setting.width)}


def answer_after(world: World) -> Params:
    """Begun from the trained net."""
    return {**world.plain, **answer(world)}


# -- 6. short replicates -----------------------------------------------------------------------------------


def short(world: World, count: int, lr: float) -> Band:
    """`count_rows` replicates that go on from the trained net with other weights, each for 1/count of a training."""
    found = []
    for k in range(count):
        weights = random_weights(world.x.shape, 500 + k)  # not those of the true bootstrap, which judges it
        params = fit_weighted(world.plain, world.x, world.y, weights, steps=world.setting.steps // count, lr=lr)
        found.append(net(params, world.grid)[..., 0])
    return Band(world.curve, torch.stack(found).std(0), count)
