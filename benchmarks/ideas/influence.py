"""The influence form on the same world: its ridge, its residuals, its scale, and heads that are taught it.

    f_w(x) = f̂(x) + k(x, X) (K + λ)⁻¹ ((w − 1) ⊙ r̃),   Var f_w(x) = Σᵢ A(x)ᵢ² σᵢ²,   A = k(x, X)(K + λ)⁻¹

Dense and unhurried; `neuboots.InfluenceBootstrap` is the form for use.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.ideas.generators import Band, short
from benchmarks.ideas.world import Params, Tangent, World, features, fit_weighted, layers, net, tangent

MOST_LEVERAGE = 0.95
LEAST_REMAINDER = 0.02
RIDGE, NOISE = "as close as the net", "smoothed, 3 df"  # what the other forms take


# -- the ridge -------------------------------------------------------------------------------------------


def along(t: Tensor, vectors: Tensor) -> Tensor:
    """Squared coordinates of t (R, n) in the eigenbasis."""
    return (vectors.mT @ t[..., None])[..., 0].square()


def candidates(t: Tangent) -> Tensor:
    """Ridges to choose from: (grid, R, 1)."""
    return t.values.mean(1)[:, None] * torch.logspace(-7, 3, 201, dtype=torch.float64)[:, None, None]


def best(ridges: Tensor, score: Tensor) -> Tensor:
    """The ridge of the lowest score (grid, R), in each data set: (R,)."""
    return ridges[..., 0].gather(0, score.argmin(0)[None])[0]


def residual_squares(t: Tangent, ridges: Tensor) -> Tensor:
    """Σ (λ/(w + λ))² t²: (grid, R)."""
    return ((ridges / (t.values + ridges)).square() * along(t.target, t.vectors)).sum(-1)


def freedom(t: Tangent, ridges: Tensor) -> Tensor:
    return (t.values / (t.values + ridges)).sum(-1)


def gcv(t: Tangent, factor: float = 1.0) -> Tensor:
    """`factor` × the minimiser of RSS / (1 − tr H / n)²: (R,)."""
    ridges = candidates(t)
    free = 1.0 - freedom(t, ridges) / t.values.shape[1]
    return factor * best(ridges, residual_squares(t, ridges) / free.clamp_min(1e-3).square())


def evidence(t: Tangent) -> Tensor:
    """The maximiser of log N(target; 0, σ²(K/λ + I)), σ² profiled out."""
    ridges = candidates(t)
    spread = t.values / ridges + 1.0
    level = (along(t.target, t.vectors) / spread).mean(-1)
    return best(ridges, t.values.shape[1] * level.log() + spread.log().sum(-1))


def as_close(t: Tangent) -> Tensor:
    """The ridge with which the linear model fits its targets as closely as the net did."""
    ridges = candidates(t)
    return best(ridges, (residual_squares(t, ridges).log() - t.residual.square().sum(1).log()).abs())


def fixed(t: Tangent, share: float = 5e-3) -> Tensor:
    return torch.full((len(t.values),), share * t.values.shape[1], dtype=torch.float64)


def of_freedom(t: Tangent, df: float) -> Tensor:
    """The ridge with tr H = df."""
    ridges = candidates(t)
    return best(ridges, (freedom(t, ridges) - df).abs())


# -- the residuals ---------------------------------------------------------------------------------------


def remainder(hat: Tensor) -> Tensor:
    """diag (I − H)²: the share of the noise that is left in a residual."""
    return (1.0 - 2.0 * hat.diagonal(dim1=1, dim2=2) + hat.square().sum(-1)).clamp(LEAST_REMAINDER, 1.0)


def raw(t: Tangent, hat: Tensor) -> Tensor:
    return t.residual.square()


def hc3(t: Tangent, hat: Tensor) -> Tensor:
    return (t.residual / (1.0 - hat.diagonal(dim1=1, dim2=2).clamp(0.0, MOST_LEVERAGE))).square()


def smooth(t: Tangent, hat: Tensor, df: float) -> Tensor:
    """Squares and remainders averaged over the neighbours that a hat matrix of `df` degrees of freedom knows."""
    weight = t.hat(of_freedom(t, df)).square()
    return (weight @ raw(t, hat)[..., None] / (weight @ remainder(hat)[..., None]))[..., 0]


def own(t: Tangent, hat: Tensor) -> Tensor:
    """Each row's own square, over the remainder around it: shaped as raw residuals are, and of the right size."""
    weight = t.hat(of_freedom(t, 3.0)).square()
    return raw(t, hat) * weight.sum(-1) / (weight @ remainder(hat)[..., None])[..., 0]


def half_own(t: Tangent, hat: Tensor) -> Tensor:
    return 0.5 * (own(t, hat) + smooth(t, hat, 3.0))


def one_level(t: Tangent, hat: Tensor) -> Tensor:
    level = raw(t, hat).sum(1, keepdim=True) / remainder(hat).sum(1, keepdim=True)
    return level.expand_as(t.residual)


RIDGES: dict[str, Callable[[Tangent], Tensor]] = {
    RIDGE: as_close,
    "evidence": evidence,
    "GCV": gcv,
    "½ GCV": partial(gcv, factor=0.5),
    "0.005 n": fixed,
}
NOISES: dict[str, Callable[[Tangent, Tensor], Tensor]] = {
    "raw": raw,
    "HC3": hc3,
    NOISE: partial(smooth, df=3.0),
    "smoothed, 6 df": partial(smooth, df=6.0),
    "smoothed, 12 df": partial(smooth, df=12.0),
    "own square, leverage smoothed": own,
    "half own, half smoothed": half_own,
    "one σ²": one_level,
}


# -- bands -----------------------------------------------------------------------------------------------


def influence(world: World, ridge: str = RIDGE, noise: str = NOISE, *, head: bool = False) -> Band:
    t = tangent(world.plain, world.x, world.y, world.grid, head=head)
    return Band(world.curve, _deviations(t, ridge, noise).norm(dim=-1).float())


def scaled_by_one(world: World) -> Band:
    """The band times √(mean square of one true replicate's answer at the data / that of its first-order form)."""
    t = tangent(world.plain, world.x, world.y, world.grid)
    weights, outputs = world.one
    first = (t.hat(RIDGES[RIDGE](t)) @ ((weights - 1.0) * t.residual)[..., None])[..., 0]
    true = outputs.double() - net(world.plain, world.x)[..., 0].double()
    ratio = true.square().mean(1) / first.square().mean(1)
    sd = _deviations(t, RIDGE, NOISE).norm(dim=-1) * ratio.sqrt()[:, None]
    return Band(world.curve, sd.float())


def _deviations(t: Tangent, ridge: str, noise: str) -> Tensor:
    """A(x)ᵢ σᵢ: (R, m, n)."""
    chosen = RIDGES[ridge](t)
    return t.response(chosen) * NOISES[noise](t, t.hat(chosen)).sqrt()[:, None]


# -- 4. heads that are taught the answer of the whole net --------------------------------------------------


def taught(world: World, *, every: bool = False, elsewhere: bool = False) -> Band:
    """f̂(x) + φ(x)ᵀ M (w − 1): M by least squares of the whole net's answers on features.

    `every`: the features of all hidden layers. `elsewhere`: at as many uniform inputs within the range of x as well,
    which need no targets.
    """
    points = world.x
    if elsewhere:
        random = torch.Generator().manual_seed(2)
        low, high = world.x.amin(1, keepdim=True), world.x.amax(1, keepdim=True)
        points = torch.cat([points, low + (high - low) * torch.rand(world.x.shape, generator=random)], 1)
    answers = _deviations(tangent(world.plain, world.x, world.y, points), RIDGE, NOISE)
    phi, at = (_features(world.plain, x, every) for x in (points, world.grid))
    gram = phi.mT @ phi
    small = 1e-8 * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(gram.shape[1], dtype=gram.dtype)
    solved = torch.linalg.solve(gram + small, phi.mT @ answers)
    return Band(world.curve, (at @ solved).norm(dim=-1).float())


def _features(params: Params, x: Tensor, every: bool) -> Tensor:
    found = torch.cat(layers(params, x) if every else [features(params, x)], -1).double()
    return torch.cat([found, torch.ones_like(found[..., :1])], -1)


def taught_in_the_papers_form(world: World) -> Band:
    """f̂(x) + Σ_d v_d φ_d(x) (α_d − 1): one number for each feature, by least squares of the block's answer on it."""
    t = tangent(world.plain, world.x, world.y, world.x)
    width = world.setting.width
    member = torch.nn.functional.one_hot(torch.arange(world.setting.n) % width, width).double()
    signed = t.residual.sign()[:, None] * _deviations(t, RIDGE, NOISE)
    blocks = signed @ member  # answer of each input to each block: (R, n, S)
    phi, at = features(world.plain, world.x).double(), features(world.plain, world.grid).double()
    v = (phi * blocks).sum(1) / phi.square().sum(1).clamp_min(1e-12)
    return Band(world.curve, (at * v[:, None]).norm(dim=-1).float())


# -- 6. short replicates, at the size of the noise --------------------------------------------------------------------


def short_drawn(world: World, count: int, lr: float) -> Band:
    """As `short`, but towards f̂(x) + σ(x) ε: residuals that were fitted away are drawn at their full size."""
    t = tangent(world.plain, world.x, world.y, world.grid)
    sigma = NOISES[NOISE](t, t.hat(RIDGES[RIDGE](t))).sqrt().float()[..., None]
    fitted = net(world.plain, world.x)
    found = []
    for k in range(count):
        noise = torch.randn(sigma.shape, generator=torch.Generator().manual_seed(k))
        params = fit_weighted(world.plain, world.x, fitted + sigma * noise, steps=world.setting.steps // count, lr=lr)
        found.append(net(params, world.grid)[..., 0])
    return Band(world.curve, torch.stack(found).std(0), count)


def short_scaled(world: World, count: int, lr: float) -> Band:
    """`short` times √(Σ σᵢ² / Σ rᵢ²): what fitting has taken from the residuals is given back, everywhere alike."""
    t = tangent(world.plain, world.x, world.y, world.grid)
    noise = NOISES[NOISE](t, t.hat(RIDGES[RIDGE](t)))
    factor = (noise.sum(1) / raw(t, noise).sum(1)).sqrt().float()
    band = short(world, count, lr)
    return band._replace(sd=band.sd * factor[:, None])
