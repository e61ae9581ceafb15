"""Measurements of confidence bands on synthetic regressions, for the study `validity`.

    y = f(x) + ε,   x ~ U(−2, 2) (gap: none in (−½, ½)),   band: m(x) ± z s(x)

Dataset k of a problem is the same for every method. All post-hoc methods use the same trained net.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots._prng import derive_keys
from neuboots.evaluation.coverage import SyntheticRegression, gaussian_noise, uniform_design
from neuboots.loading import Batch
from neuboots.methods import Deterministic, InfluenceBootstrap, Laplace, MCDropout, NeuBoots, create_method
from neuboots.methods._vmap import StackedNets
from neuboots.methods.influence._tangent import build_tangent_predictors
from neuboots.nets import MLP
from neuboots.posthoc import ScaledPredictor
from neuboots.prediction import Method, Predictor
from neuboots.training import Objective, TrainingConfig, initialize_model, resolve_fit, train
from neuboots_paper._common import make_method
from neuboots_paper.study import Job

Row = dict[str, Any]

BOOTSTRAP = "bayesian-bootstrap"
LEVEL, Z = 0.95, 1.959963984540054
_MAX_COMPARED_ROWS, _NUM_COMPARED = 512, 64  # training inputs and replicates at which deviations are compared
_MAX_STACKED_WEIGHTS = 2_500_000  # of nets that are trained together, so that they stay in the cache

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "smooth": lambda x: torch.sin(2.0 * x[:, 0]),
    "wiggly": lambda x: torch.sin(3.5 * x[:, 0]),
    "gap": lambda x: torch.sin(2.0 * x[:, 0]),
    "edge": lambda x: torch.sin(4.0 * x[:, 0]) + 0.5 * x[:, 0],  # nets miss the turn at the end of the data
}
_GAP = 0.5


def _gap_design(n: int, rng: torch.Generator) -> Tensor:
    x = 2 * torch.rand(n, 1, generator=rng) - 1
    return torch.sign(x) * (_GAP + (2.0 - _GAP) * x.abs())


def _varying_noise(x: Tensor, rng: torch.Generator) -> Tensor:
    return (0.1 + 0.2 * x[:, 0].abs()) * torch.randn(len(x), generator=rng)


def make_problem(function: str, noise: str) -> SyntheticRegression:
    """Synthetic regression of these names, on a grid from −1.9 to 1.9."""
    return SyntheticRegression(
        _FUNCTIONS[function],
        _gap_design if function == "gap" else uniform_design(-2.0, 2.0),
        gaussian_noise(0.3) if noise == "constant" else _varying_noise,
        torch.linspace(-1.9, 1.9, 39)[:, None],
        name=function,
    )


def is_inside(function: str, x: Tensor) -> Tensor:
    """Whether inputs are inside the data, by at least 0.1: (N,)."""
    return x.abs() >= _GAP + 0.1 - 1e-6 if function == "gap" else torch.ones_like(x, dtype=torch.bool)


# -- methods -------------------------------------------------------------------------------------------


def _influence(**options: Any) -> Method:
    return InfluenceBootstrap(nn.MSELoss(), **options)


WHOLE = "influence, whole net"
SCALED = "influence, whole net, sized by a second training"
REGRESSOR, REPLICATES = "NeuBootsRegressor", "NeuBootsRegressor, spread of its replicates"

POST_HOC: dict[str, Callable[[], Any]] = {  # need a trained net
    WHOLE: partial(_influence, layers="all"),
    "influence, whole net, HC3": partial(_influence, layers="all", residuals="hc3"),
    "influence, whole net, raw": partial(_influence, layers="all", residuals="raw"),
    "influence, last 2 layers": partial(_influence, layers=2),
    "influence, head": _influence,
    "influence, refitted head": partial(_influence, refit=True),
    "laplace": lambda: Laplace(nn.MSELoss()),
}
TRAINED: dict[str, Callable[[], Any]] = {
    "neuboots-paper": lambda: NeuBoots.paper(nn.MSELoss()),
    "neuboots-paper-exp": lambda: replace(NeuBoots.paper(nn.MSELoss()), link="exp"),
    "neuboots": NeuBoots.regression,
    "calibrated-neuboots": lambda: create_method("calibrated-neuboots", loss=nn.MSELoss()),
    "mc-dropout": lambda: MCDropout(nn.MSELoss(), rate=0.1),
}
OTHERS: dict[str, Callable[[], Any]] = {
    name: partial(make_method, name, loss=nn.MSELoss())
    for name in (
        *("standard-bootstrap", "deep-ensemble", "adversarial-deep-ensemble", "gbs", "amortized-bootstrap", "gp"),
        *("sparse-gp", "batch-ensemble", "mimo", "lp-bnn", "swag"),
    )
}


# -- training ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """Training of every net: steps of Adam on small batches, with cosine annealing to zero."""

    steps: int = 500
    batch_size: int = 50
    learning_rate: float = 1e-2

    def config(self, n: int, seed: int) -> TrainingConfig:
        """Training options for n rows."""
        per_epoch = -(-n // self.batch_size)
        return TrainingConfig(
            epochs=-(-self.steps // per_epoch),
            batch_size=self.batch_size,
            optimizer=partial(torch.optim.Adam, lr=self.learning_rate, fused=True),
            seed=seed,
            progress=False,
        )


def net_factory(width: int) -> Callable[[], nn.Module]:
    """Factory of an MLP with three hidden layers."""
    return lambda: MLP(1, 1, widths=(width,) * 3)


def train_nets(
    width: int,
    datasets: Sequence[TensorDataset],
    config: TrainingConfig,
    *,
    seeds: Sequence[int],
    weights: Tensor | None = None,
) -> list[nn.Module]:
    """Train one net on each dataset with the squared error, many nets at once; row i of all is in the same step.

    Args:
        width: Units of each hidden layer.
        datasets: Rows (n, d), (n,) of each net.
        config: Training options; all nets take the rows in its order.
        seeds: Seed of the initial weights of each net.
        weights: Weights of the rows of each dataset: (R, n).

    Returns:
        The trained nets.
    """
    size = min(20, max(1, _MAX_STACKED_WEIGHTS // (2 * width**2)))
    trained: list[nn.Module] = []
    for start in range(0, len(datasets), size):
        group = slice(start, start + size)
        x, y = (torch.stack([data.tensors[k] for data in datasets[group]], 1) for k in (0, 1))  # (n, R, d), (n, R)
        w = torch.ones_like(y) if weights is None else weights[group].T.to(y)  # (n, R)

        def objective(net: nn.Module, batch: Batch, w: Tensor = w) -> Tensor:
            squares: Tensor = (net(batch.x.movedim(1, 0))[..., 0] - batch.y.T).square()  # (R, N)
            return (w[batch.index].T * squares).mean(1).sum()  # each net has the gradient of its own mean

        def objective_at(epoch: int, objective: Objective = objective) -> Objective:
            return objective

        nets = StackedNets([initialize_model(net_factory(width), seed) for seed in seeds[group]])
        train(nets, TensorDataset(x, y), objective_at, config)
        trained += nets.eval().nets()
    return trained


def make_influence_predictors(
    net: nn.Module, replicate: nn.Module, data: TensorDataset, config: TrainingConfig
) -> tuple[Predictor, Predictor]:
    """Predictors around a trained net: from training residuals; and with deviations times s, from a second net.

        s² = max(1, Σ_x |f_w(x) − f̂(x)|² / Σ_x Var f_w(x))

    f_w is a net that was trained on Dirichlet weights w from the same initial weights. The variance is that of raw
    residuals, which f_w has as well.
    """
    method = InfluenceBootstrap(nn.MSELoss(), layers="all")
    methods = [method, replace(method, residuals="raw")]
    predictor, raw = build_tangent_predictors(methods, net, resolve_fit(net, data, config))
    keys = derive_keys(torch.arange(len(data)), config.seed, "compared")
    x = data.tensors[0][keys.argsort()[:_MAX_COMPARED_ROWS].sort().values]
    with torch.no_grad():
        center = net.eval()(x)
        moved = float((replicate.eval()(x) - center).double().square().sum())
    drawn = raw.predict(x, _NUM_COMPARED, seed=config.seed).samples - center
    expected = float(drawn.double().square().sum()) / _NUM_COMPARED
    scale = math.sqrt(max(1.0, moved / expected)) if expected > 0 else 1.0
    return predictor, ScaledPredictor(predictor, std_scale=(scale,))


# -- rows ----------------------------------------------------------------------------------------------


def band_row(method: str, mean: Tensor, std: Tensor, problem: SyntheticRegression, kept: int) -> Row:
    """Row of R bands (R, N): coverage counts, errors and mean width at each x, and the widths of the first `kept`."""
    error = mean - problem.values.double()
    return {
        "method": method,
        "sets": len(mean),
        "held": (error.abs() <= Z * std).sum(0).tolist(),
        "error": _round(error.mean(0)),
        "square": _round(error.square().mean(0)),
        "std": _round(std.mean(0)),
        "stds": [_round(row) for row in std[:kept]],
    }


def bootstrap_row(outputs: Tensor, problem: SyntheticRegression) -> Row:
    """Row of a true bootstrap with K nets on R datasets (R, K, N).

    `away` is |m − f| / s, a quantile of which is the factor that scales the band to a given coverage; `halves` are the
    standard deviations of the even and the odd members, whose noise is independent.
    """
    mean, std = outputs.mean(1), outputs.std(1)
    halves = [outputs[:, k::2].std(1) for k in (0, 1)]
    return {
        **band_row(BOOTSTRAP, mean, std, problem, len(mean)),
        "members": outputs.shape[1],
        "away": [_round(row) for row in (mean - problem.values.double()).abs() / std],
        "halves": [[_round(row) for row in half] for half in halves],
    }


def regressor_rows(job: Job, numbers: Sequence[int], seed: int, options: Mapping[str, Any]) -> list[Row]:
    """Rows of the confidence band of `NeuBootsRegressor`, and of the spread of its replicates."""
    from neuboots.estimators import NeuBootsRegressor

    problem = make_problem(job["function"], job["noise"])
    grid = problem.grid.numpy()
    bands: dict[str, list[tuple[Tensor, Tensor]]] = {REGRESSOR: [], REPLICATES: []}
    for number in numbers:
        x, y = (column.numpy() for column in problem.draw(job["n"], seed=seed, number=number).tensors)
        regressor = NeuBootsRegressor(random_state=number, **options).fit(x, y)
        low, high = map(torch.from_numpy, regressor.predict_interval(grid, LEVEL, interval="confidence"))
        mean = (low + high) / 2
        bands[REGRESSOR].append((mean, (high - low) / (2 * Z)))
        _, spread = compute_moments(regressor.predictor_, regressor.inputs(grid), regressor.num_samples)
        bands[REPLICATES].append((mean, spread * float(regressor.y_scale_[0])))
    return [
        band_row(name, torch.stack([mean for mean, _ in each]), torch.stack([std for _, std in each]), problem, 0)
        for name, each in bands.items()
    ]


def cost_rows(
    width: int, training: Training, num_samples: int, methods: Sequence[str], n: int = 300, turns: int = 3
) -> list[Row]:
    """Seconds of each method and of a plain training, measured alternately; the minimum of several turns."""
    problem = make_problem("smooth", "constant")
    data, config, model = problem.draw(n, seed=0, number=0), training.config(n, 0), net_factory(width)

    def train_plain() -> nn.Module:
        return Deterministic(nn.MSELoss()).fit(model, data, config).net

    def run(method: str) -> None:
        if method in POST_HOC:
            predictor = POST_HOC[method]().from_trained(net, data, batch_size=config.batch_size, seed=config.seed)
        else:
            predictor = {**TRAINED, **OTHERS}[method]().fit(model, data, config)
        compute_moments(predictor, problem.grid, num_samples)

    net, rows = train_plain(), []
    for method in methods:
        pairs = [(_seconds(train_plain), _seconds(partial(run, method))) for _ in range(turns)]
        plain, seconds = map(min, zip(*pairs, strict=True))
        rows.append({"method": method, "plain": plain, "seconds": seconds})
    return rows


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compute_moments(predictor: Predictor, grid: Tensor, num_samples: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the replicates on the grid, exact where the method knows them: (N,) each."""
    summary = predictor.summarize(grid, num_samples)
    return summary.mean[:, 0].double(), summary.std[:, 0].double()


def _round(values: Tensor, digits: int = 4) -> list[float]:
    """Values with this many significant digits."""
    return [float(f"{value:.{digits}g}") for value in values.tolist()]
