"""Bands of known curves: how often they hold the curve, how wide they are, and where, beside a true bootstrap's.

    y = f(x) + ε,   x ~ U(−2, 2) (gap: none in (−½, ½)),   band: m(x) ± z s(x)

Data set k of a curve is the same for every method. Methods that go around a trained net go around one and the same.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots._prng import derive_keys, derive_seed
from neuboots.evaluation.coverage import SyntheticRegression, gaussian_noise, uniform_design
from neuboots.methods import Deterministic, InfluenceBootstrap, Laplace, MCDropout, NeuBoots, create_method
from neuboots.methods.influence.scaled import scale_by_replicates, with_raw_residuals
from neuboots.nets import MLP
from neuboots.prediction import Method, Predictor
from neuboots.training import TrainingConfig
from neuboots.weights import Dirichlet
from neuboots_paper._common import make_method
from neuboots_paper.side_by_side import train_side_by_side
from neuboots_paper.study import Job

Row = dict[str, Any]

TRUE = "bayesian-bootstrap"
LEVEL, Z = 0.95, 1.959963984540054
_TOGETHER = 2_500_000  # weights of nets that are trained side by side: their numbers stay in the cache

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "smooth": lambda x: torch.sin(2.0 * x[:, 0]),
    "wiggly": lambda x: torch.sin(3.5 * x[:, 0]),
    "gap": lambda x: torch.sin(2.0 * x[:, 0]),
    "edge": lambda x: torch.sin(4.0 * x[:, 0]) + 0.5 * x[:, 0],  # turns where the data end, which nets miss
}
_GAP = 0.5


def _beside_the_gap(n: int, rng: torch.Generator) -> Tensor:
    x = 2 * torch.rand(n, 1, generator=rng) - 1
    return torch.sign(x) * (_GAP + (2.0 - _GAP) * x.abs())


def _growing(x: Tensor, rng: torch.Generator) -> Tensor:
    return (0.1 + 0.2 * x[:, 0].abs()) * torch.randn(len(x), generator=rng)


def curve(function: str, noise: str) -> SyntheticRegression:
    """The truth of these names, on a grid from −1.9 to 1.9."""
    return SyntheticRegression(
        _FUNCTIONS[function],
        _beside_the_gap if function == "gap" else uniform_design(-2.0, 2.0),
        gaussian_noise(0.3) if noise == "constant" else _growing,
        torch.linspace(-1.9, 1.9, 39)[:, None],
        name=function,
    )


def inside(function: str, x: Tensor) -> Tensor:
    """Which inputs lie inside the data, by 0.1 at least."""
    return x.abs() >= _GAP + 0.1 - 1e-6 if function == "gap" else torch.ones_like(x, dtype=torch.bool)


# -- the arms ------------------------------------------------------------------------------------------


def _influence(**options: Any) -> Method:
    return InfluenceBootstrap(nn.MSELoss(), **options)


WHOLE = "influence, whole net"
SIZED = "influence, whole net, sized by a second training"
REGRESSOR, REPLICATES = "NeuBootsRegressor", "NeuBootsRegressor, spread of its replicates"

AROUND: dict[str, Callable[[], Any]] = {  # a trained net
    WHOLE: partial(_influence, layers="all"),
    "influence, whole net, HC3": partial(_influence, layers="all", residuals="hc3"),
    "influence, whole net, raw": partial(_influence, layers="all", residuals="raw"),
    "influence, last 2 layers": partial(_influence, layers=2),
    "influence, head": _influence,
    "influence, refitted head": partial(_influence, refit=True),
    "laplace": lambda: Laplace(nn.MSELoss()),
}

TWO_NETS: dict[str, Callable[[], Any]] = {SIZED: partial(_influence, layers="all", num_calibration_fits=1)}

FITTED: dict[str, Callable[[], Any]] = {  # with a training of their own
    "neuboots-paper": lambda: NeuBoots.paper(nn.MSELoss()),
    "neuboots-paper-exp": lambda: replace(NeuBoots.paper(nn.MSELoss()), link="exp"),
    "neuboots": NeuBoots.regression,
    "calibrated-neuboots": lambda: create_method("calibrated-neuboots", loss=nn.MSELoss()),
    "mc-dropout": lambda: MCDropout(nn.MSELoss(), rate=0.1),
}

MORE: dict[str, Callable[[], Any]] = {  # all other methods there are
    name: partial(make_method, name, loss=nn.MSELoss())
    for name in (
        *("standard-bootstrap", "deep-ensemble", "adversarial-deep-ensemble", "gbs", "amortized-bootstrap", "gp"),
        *("sparse-gp", "batch-ensemble", "mimo", "lp-bnn", "swag"),
    )
}


# -- one cell ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """How every net is trained: steps of Adam on small batches, the rate falling to zero along half a cosine."""

    steps: int = 500
    batch_size: int = 50
    learning_rate: float = 1e-2

    def config(self, n: int, seed: int) -> TrainingConfig:
        per_epoch = -(-n // self.batch_size)
        return TrainingConfig(
            epochs=-(-self.steps // per_epoch),
            batch_size=self.batch_size,
            optimizer=partial(torch.optim.Adam, lr=self.learning_rate, fused=True),
            seed=seed,
            progress=False,
        )


def net_of(width: int) -> Callable[[], nn.Module]:
    return lambda: MLP(1, 1, widths=(width,) * 3)


def _groups(numbers: Sequence[int], width: int) -> list[Sequence[int]]:
    """Numbers of nets, in groups that are trained side by side."""
    size = min(20, max(1, _TOGETHER // (2 * width**2)))
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def plain_nets(
    job: Job, numbers: Sequence[int], training: Training, seed: int
) -> list[tuple[TensorDataset, nn.Module]]:
    """The data sets of these numbers, each with a net trained on it."""
    truth, n = curve(job["function"], job["noise"]), job["n"]
    found = []
    for some in _groups(numbers, job["width"]):
        sets = [truth.draw(n, seed=seed, number=number) for number in some]
        seeds = [derive_seed(seed, "net", number) for number in some]
        nets = train_side_by_side(net_of(job["width"]), sets, training.config(n, seed), seeds=seeds)
        found += list(zip(sets, nets, strict=True))
    return found


def replicates_of(job: Job, numbers: Sequence[int], training: Training, seed: int) -> list[nn.Module]:
    """For each of these data sets a net trained like its plain one, from the same start, on random weights."""
    truth, n = curve(job["function"], job["noise"]), job["n"]
    found: list[nn.Module] = []
    for some in _groups(numbers, job["width"]):
        weights = Dirichlet().sample(derive_keys(torch.tensor([*some]), seed, "replicate"), n)  # (R, n)
        found += train_side_by_side(
            net_of(job["width"]),
            [truth.draw(n, seed=seed, number=number) for number in some],
            training.config(n, seed),
            seeds=[derive_seed(seed, "net", number) for number in some],
            weights=weights,
        )
    return found


def whole_and_sized(
    net: nn.Module, replicate: nn.Module, data: TensorDataset, config: TrainingConfig
) -> tuple[Predictor, Predictor]:
    """What `InfluenceBootstrap(layers="all")` gives with no replicate and with one, from nets trained already."""
    predictor, raw = with_raw_residuals(InfluenceBootstrap(nn.MSELoss(), layers="all"), net, data, config)
    return predictor, scale_by_replicates(nn.MSELoss(), predictor, raw, [replicate], data, config)


def true_members(job: Job, number: int, members: int, training: Training, seed: int) -> Tensor:
    """The outputs on the grid of nets trained on random weights of a data set, from other first numbers: (K, N)."""
    truth, n = curve(job["function"], job["noise"]), job["n"]
    data = truth.draw(n, seed=seed, number=number)
    weights = Dirichlet().sample(derive_keys(torch.arange(members), seed, "true bootstrap", number), n)  # (K, n)
    outputs = []
    for some in _groups(range(members), job["width"]):
        seeds = [derive_seed(seed, "true bootstrap", number, k) for k in some]
        config = training.config(n, seed)
        nets = train_side_by_side(
            net_of(job["width"]), [data] * len(some), config, seeds=seeds, weights=weights[[*some]]
        )
        with torch.no_grad():
            outputs += [net(truth.grid)[:, 0] for net in nets]
    return torch.stack(outputs).double()


def band_row(method: str, mean: Tensor, std: Tensor, truth: SyntheticRegression, kept: int) -> Row:
    """What R bands (R, N) say at each x: how often it is held, the curve's mean error and mean square error, the mean
    width; and the widths of the first few."""
    held = (mean - truth.values.double()).abs() <= Z * std
    return {
        "method": method,
        "sets": len(mean),
        "held": held.sum(0).tolist(),
        "error": _short((mean - truth.values.double()).mean(0)),
        "square": _short((mean - truth.values.double()).square().mean(0)),
        "std": _short(std.mean(0)),
        "stds": [_short(row) for row in std[:kept]],
    }


def true_row(outputs: Tensor, truth: SyntheticRegression) -> Row:
    """What K nets of a true bootstrap on R data sets (R, K, N) say.

    `away` are |m − f| / s, of which a quantile is the factor by which the band must be scaled to a given coverage;
    `halves` the standard deviations of its even and odd members, whose noise is independent.
    """
    mean, std = outputs.mean(1), outputs.std(1)
    halves = [outputs[:, k::2].std(1) for k in (0, 1)]
    return {
        **band_row(TRUE, mean, std, truth, len(mean)),
        "members": outputs.shape[1],
        "away": [_short(row) for row in (mean - truth.values.double()).abs() / std],
        "halves": [[_short(row) for row in half] for half in halves],
    }


def regressor_rows(job: Job, numbers: Sequence[int], seed: int, options: Mapping[str, Any]) -> list[Row]:
    """The confidence band of `NeuBootsRegressor` as it is, and the spread of its method's replicates beside it."""
    from neuboots.estimators import NeuBootsRegressor

    truth = curve(job["function"], job["noise"])
    grid = truth.grid.numpy()
    bands: dict[str, list[tuple[Tensor, Tensor]]] = {REGRESSOR: [], REPLICATES: []}
    for number in numbers:
        x, y = (part.numpy() for part in truth.draw(job["n"], seed=seed, number=number).tensors)
        regressor = NeuBootsRegressor(random_state=number, **options).fit(x, y)
        low, high = map(torch.from_numpy, regressor.predict_interval(grid, LEVEL, interval="confidence"))
        mean = (low + high) / 2
        bands[REGRESSOR].append((mean, (high - low) / (2 * Z)))
        _, spread = moments_of(regressor.predictor_, regressor.inputs(grid), regressor.num_samples)
        bands[REPLICATES].append((mean, spread * float(regressor.y_scale_[0])))
    return [
        band_row(name, torch.stack([mean for mean, _ in each]), torch.stack([std for _, std in each]), truth, 0)
        for name, each in bands.items()
    ]


def cost_rows(
    width: int, training: Training, num_samples: int, methods: Sequence[str], n: int = 300, turns: int = 3
) -> list[Row]:
    """Seconds of each method, training included where it has its own, and of plain trainings in turn with it.

    The least of several turns: a machine is not equally fast throughout, and the first run loads what is used first.
    Two trainings, which a mark is set for, have five times as many.
    """
    truth = curve("smooth", "constant")
    data, config, model = truth.draw(n, seed=0, number=0), training.config(n, 0), net_of(width)

    def train() -> nn.Module:
        return Deterministic(nn.MSELoss()).fit(model, data, config).net

    def answer(method: str) -> None:
        if method in AROUND:
            predictor = AROUND[method]().from_trained(net, data, batch_size=config.batch_size, seed=config.seed)
        else:
            predictor = {**TWO_NETS, **FITTED, **MORE}[method]().fit(model, data, config)
        moments_of(predictor, truth.grid, num_samples)

    net, rows = train(), []
    for method in methods:
        times = 5 * turns if method in TWO_NETS else turns
        pairs = [(_seconds(train), _seconds(partial(answer, method))) for _ in range(times)]
        plain, seconds = map(min, zip(*pairs, strict=True))
        rows.append({"method": method, "plain": plain, "seconds": seconds})
    return rows


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def moments_of(predictor: Predictor, grid: Tensor, num_samples: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the replicates on the grid, exact where the method knows them: (N,) each."""
    summary = predictor.summarize(grid, num_samples)
    return summary.mean[:, 0].double(), summary.std[:, 0].double()


def _short(values: Tensor, digits: int = 4) -> list[float]:
    """Numbers to so many significant digits."""
    return [float(f"{value:.{digits}g}") for value in values.tolist()]
