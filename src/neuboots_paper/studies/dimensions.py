"""Beyond the paper: coverage of confidence bands with one to twenty inputs, however long the net was trained.

    y = f(x) + ε,   band: m(x) ± z s(x),   ideal half-width at x: the 0.95 quantile of |m(x) − f(x)| over data sets

The functions, and the data sets, are others than those on which the rule of the influence bootstrap was chosen
(docs/decisions/0013).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots._prng import derive_keys, derive_seed
from neuboots._validation import ArgumentError
from neuboots.data.tabular import read_uci
from neuboots.evaluation.coverage import SyntheticRegression, uniform_design
from neuboots.loading import Batch
from neuboots.methods import GaussianProcess, InfluenceBootstrap, Laplace, MCDropout
from neuboots.methods._vmap import StackedNets
from neuboots.methods.influence._tangent import HeldOut, build_tangent_predictors
from neuboots.nets import MLP
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots.training import Objective, TrainingConfig, initialize_model, resolve_fit, train
from neuboots.weights import Dirichlet
from neuboots_paper._common import plot_curves, round_rows
from neuboots_paper.study import BEYOND_PAPER, Job, Rows, RunContext, Study
from neuboots_paper.tables import MetricColumn, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVEL, Z = 0.95, 1.959963984540054
OURS, TRAINING_RESIDUALS = "influence, 2 folds", "influence, training residuals"
BOOTSTRAP, ENSEMBLE = "true bootstrap", "deep ensemble"
_NOISE = 0.4
_MAX_TOGETHER = 100  # nets
_GOOD_BOOTSTRAP = 0.88  # coverage of a true bootstrap from which on a cell has a valid band
_MIN_COVERAGE, _MAX_COVERAGE, _MARGIN, _MAX_WIDTH = 0.90, 0.98, 0.03, 1.3


def _teacher(x: Tensor) -> Tensor:
    """A random net of one hidden layer, of standard deviation one."""
    generator = torch.Generator().manual_seed(derive_seed(0, "teacher", x.shape[1]))
    w = 2.0 * torch.randn(x.shape[1], 30, generator=generator) / math.sqrt(x.shape[1])
    v = torch.randn(30, generator=generator) / math.sqrt(30)
    hidden = torch.tanh(x @ w + torch.randn(30, generator=generator))
    return 1.7 * (hidden @ v)


_FUNCTIONS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {  # of inputs that are uniform with variance one
    "wave": (1, lambda x: torch.sin(2.5 * x[:, 0]) + 0.3 * x[:, 0]),
    "saddle": (2, lambda x: torch.cos(1.5 * x[:, 0]) + 0.6 * x[:, 0] * x[:, 1]),
    "additive": (5, lambda x: torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1].square() + x[:, 2:4].sum(1) / 2),
    "teacher": (5, _teacher),
    "sparse": (10, lambda x: 1.4 * torch.sin(x[:, 0] + x[:, 1])),
    "linear": (20, lambda x: x @ torch.linspace(1.0, -1.0, 20) / 2.7),
}
_TABLES = {"uci/power": 4, "uci/wine_red": 11}  # whose inputs are those of a teacher
_HALF_WIDTH, _NUM_NEW = math.sqrt(3.0), 60


def make_problem(function: str, noise: str, root: Path | None = None) -> SyntheticRegression:
    """Synthetic regression of these names, and 60 new inputs; a UCI data set gives the inputs of a teacher."""
    generator = torch.Generator().manual_seed(derive_seed(0, "dimensions", function))
    inputs, f = _FUNCTIONS.get(function, (1, _teacher))
    design = uniform_design(-_HALF_WIDTH, _HALF_WIDTH, inputs=inputs)
    if function in _TABLES:
        rows = read_uci(function.removeprefix("uci/"), root)[0].float()
        rows = ((rows - rows.mean(0)) / rows.std(0))[torch.randperm(len(rows), generator=generator)]
        design, grid = partial(_draw_rows, rows[_NUM_NEW:]), rows[:_NUM_NEW]
    else:
        grid = design(_NUM_NEW, generator)

    def draw_noise(x: Tensor, rng: torch.Generator) -> Tensor:
        varying = 0.5 + torch.sigmoid(2.0 * x[:, 0])
        return _NOISE * (varying if noise == "varying" else 1.0) * torch.randn(len(x), generator=rng)

    return SyntheticRegression(f, design, draw_noise, grid, name=function)


def _draw_rows(rows: Tensor, n: int, rng: torch.Generator) -> Tensor:
    """n different rows."""
    if n > len(rows):
        raise ArgumentError("n", n, f"at most {len(rows)} rows of the data set")
    return rows[torch.randperm(len(rows), generator=rng)[:n]]


def train_together(
    datasets: Sequence[tuple[Tensor, Tensor]],
    config: TrainingConfig,
    seeds: Sequence[int],
    weights: Tensor | None = None,
) -> list[nn.Module]:
    """Train one MLP of 64 × 64 on each data set of n rows with the squared error, all together.

    Args:
        datasets: Rows (n, d), (n, 1) of each net.
        config: Training options; all nets take the rows in its order.
        seeds: Seed of the initial weights of each net.
        weights: Weights of the rows of each data set: (R, n).

    Returns:
        The trained nets.
    """
    trained: list[nn.Module] = []
    for start in range(0, len(datasets), _MAX_TOGETHER):
        group = slice(start, start + _MAX_TOGETHER)
        x, y = (torch.stack(parts, 1) for parts in zip(*datasets[group], strict=True))  # (n, R, d), (n, R, 1)
        w = torch.ones(y.shape[:2]) if weights is None else weights[group].T.to(y)  # (n, R)

        def objective(net: nn.Module, batch: Batch, w: Tensor = w) -> Tensor:
            squares: Tensor = (net(batch.x.movedim(1, 0)) - batch.y.movedim(1, 0)).square()[..., 0]  # (R, N)
            return (w[batch.index].T * squares).mean(1).sum()  # each net has the gradient of its own mean

        def objective_at(epoch: int, objective: Objective = objective) -> Objective:
            return objective

        nets = StackedNets([initialize_model(partial(_make_net, x.shape[2]), seed) for seed in seeds[group]])
        train(nets, TensorDataset(x, y), objective_at, config)
        trained += nets.eval().nets()
    return trained


def _make_net(inputs: int) -> nn.Module:
    return MLP(inputs, 1, widths=(64, 64))


@dataclass(frozen=True)
class Dimensions(Study):
    """Coverage and width of the band of the influence bootstrap and others, by the number of inputs."""

    name = "dimensions"
    source = BEYOND_PAPER
    requires = ("gpytorch",)
    claim = (
        "A 95 % confidence band that costs two trainings covers the regression function as often with twenty inputs "
        "as with one, for nets that are stopped early and for nets that interpolate."
    )

    functions: tuple[str, ...] = (*_FUNCTIONS, *_TABLES)
    noises: tuple[str, ...] = ("constant",)
    varying: tuple[str, ...] = ("wave", "additive")  # functions that also have varying noise
    sizes: tuple[int, ...] = (100, 200, 900)  # n
    steps: tuple[int, ...] = (100, 500, 2000)
    num_datasets: int = 19  # of a seed
    bootstrap_sets: int = 2  # of a seed, with a true bootstrap and a deep ensemble
    bootstrap_members: int = 20
    ensemble_members: int = 5
    others: tuple[str, ...] = ("laplace", "mc-dropout", "gp")
    other_sets: int = 1  # of a seed
    others_at: tuple[int, int] = (200, 500)  # n and steps
    batch_size: int = 50
    learning_rate: float = 1e-2
    seeds: tuple[int, ...] = (0, 1, 2)

    def jobs(self) -> list[Job]:
        cells = [(function, noise) for noise in self.noises for function in self.functions]
        cells += [(function, "varying") for function in self.functions if function in self.varying]
        return [
            {"function": function, "noise": noise, "n": n, "steps": steps, "seed": seed}
            for seed in self.seeds
            for n in self.sizes
            for steps in self.steps
            for function, noise in cells
        ]

    @property
    def dataset_names(self) -> Sequence[str]:
        return [name for name in self.functions if name in _TABLES]

    def config(self, n: int, steps: int) -> TrainingConfig:
        """Training options for n rows; half of the rows are trained for half of the steps."""
        epochs = max(1, round(steps * min(self.batch_size, n) / n))
        optimizer = partial(torch.optim.Adam, lr=self.learning_rate, fused=True)
        return TrainingConfig(epochs=epochs, batch_size=self.batch_size, optimizer=optimizer, progress=False)

    def measure(self, job: Job, context: RunContext) -> Rows:
        problem, n = make_problem(job["function"], job["noise"], context.root), job["n"]
        drawn = [problem.draw(n, seed=job["seed"], number=k).tensors for k in range(self.num_datasets)]
        sets = [(x, y[:, None]) for x, y in drawn]
        config, half = self.config(n, job["steps"]), self.config(n // 2, job["steps"] // 2)
        seeds = [derive_seed(job["seed"], "net", k) for k in range(len(sets))]
        nets = train_together(sets, config, seeds)
        bands: dict[str, list[tuple[Tensor, Tensor]]] = {OURS: [], TRAINING_RESIDUALS: []}
        order = derive_keys(torch.arange(n), job["seed"], "folds").argsort()
        parts = order[: n // 2], order[n // 2 : 2 * (n // 2)]
        folds = [train_together([(x[part], y[part]) for x, y in sets], half, seeds) for part in parts]
        method = InfluenceBootstrap(nn.MSELoss(), layers="all")
        for k, ((x, y), net) in enumerate(zip(sets, nets, strict=True)):
            held_out = [
                HeldOut(fold[k], TensorDataset(x[mine], y[mine]), TensorDataset(x[other], y[other]), other)
                for fold, mine, other in zip(folds, parts, reversed(parts), strict=True)
            ]
            inputs = resolve_fit(net, (x, y), config)
            for name, rows in ((OURS, held_out), (TRAINING_RESIDUALS, [])):
                (predictor,) = build_tangent_predictors([method], net, inputs, held_out=rows)
                bands[name].append(_moments(predictor, problem.grid))
        means = torch.stack([mean for mean, _ in bands[OURS]])
        errors = (means - problem.values.double()).abs().sort(0).values
        # the order statistic that covers a further data set with this probability
        ideal = errors[min(math.ceil(LEVEL * (len(errors) + 1)), len(errors)) - 1]  # (N,)
        for name, count, weighted in (
            (BOOTSTRAP, self.bootstrap_members, True),
            (ENSEMBLE, self.ensemble_members, False),
        ):
            chosen = sets[: self.bootstrap_sets]
            keys = derive_keys(torch.arange(count * len(chosen)), job["seed"], name)
            members = train_together(
                [each for each in chosen for _ in range(count)],
                config,
                [derive_seed(job["seed"], name, k) for k in range(len(keys))],
                Dirichlet().sample(keys, n).float() if weighted else None,
            )
            with torch.no_grad():
                outputs = torch.stack([net(problem.grid)[:, 0] for net in members]).double()
            outputs = outputs.view(len(chosen), count, -1)
            bands[name] = list(zip(outputs.mean(1), outputs.std(1), strict=True))
        if (n, job["steps"]) == self.others_at:
            bands |= {name: self._other_bands(name, sets, nets, config, problem.grid) for name in self.others}
        return round_rows({"bands": [_band_row(name, found, problem, ideal) for name, found in bands.items()]})

    def _other_bands(
        self,
        name: str,
        sets: Sequence[tuple[Tensor, Tensor]],
        nets: Sequence[nn.Module],
        config: TrainingConfig,
        grid: Tensor,
    ) -> list[tuple[Tensor, Tensor]]:
        """Bands of another method on the first data sets, from the same nets if it needs a trained one."""
        found = []
        for data, net in list(zip(sets, nets, strict=True))[: self.other_sets]:
            predictor: Any
            if name == "laplace":
                predictor = Laplace(nn.MSELoss()).from_trained(net, data)
            elif name == "gp":
                predictor = GaussianProcess().fit(None, data, config)
            else:
                predictor = MCDropout(nn.MSELoss(), rate=0.1).fit(partial(_make_net, grid.shape[1]), data, config)
            found.append(_moments(predictor, grid))
        return found

    def tables(self, rows: Rows) -> list[Table]:
        columns = (
            MetricColumn("coverage", "coverage, %", 100, 1),
            MetricColumn("width", "width / ideal", 1, 2),
            MetricColumn("rmse", "RMSE of the net", 1, 3),
        )
        bands = with_inputs(rows["bands"])
        main = [row for row in bands if row["method"] in (OURS, TRAINING_RESIDUALS, BOOTSTRAP, ENSEMBLE)]
        others = [row for row in bands if (row["n"], row["steps"]) == self.others_at]
        cells = [row for row in bands if row["method"] in (OURS, BOOTSTRAP)]
        n, steps = self.others_at
        parts = (
            ("By the number of inputs.", sorted(main, key=lambda row: row["inputs"]), ("inputs", "method")),
            ("By the number of rows and the length of the training.", main, ("n", "steps", "method")),
            (f"All methods, n = {n}, {steps} steps.", others, ("method",)),
            ("Each cell.", cells, ("function", "noise", "n", "steps", "method")),
        )
        return [tabulate(title, chosen, by=by, columns=columns) for title, chosen, by in parts]

    def checks(self, rows: Rows) -> list[Check]:
        cells: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
        for row in rows["bands"]:
            key = tuple(row[name] for name in ("function", "noise", "n", "steps"))
            cells.setdefault(key, {}).setdefault(row["method"], []).append(row)
        valid, below, wide = [], [], []
        for key, methods in cells.items():
            ours, bootstrap = (_pool(methods[name]) for name in (OURS, BOOTSTRAP))
            title = f"{key[0]}, {key[1]} noise, n = {key[2]}, {key[3]} steps: {100 * ours[0]:.1f}%"
            slack = 2.0 * math.hypot(ours[1], bootstrap[1])
            if bootstrap[0] >= _GOOD_BOOTSTRAP:
                low, high = _MIN_COVERAGE - 2.0 * ours[1], _MAX_COVERAGE + 2.0 * ours[1]
                valid.append((low <= ours[0] <= high, title))
                wide.append((ours[2] <= _MAX_WIDTH, f"{title}, {ours[2]:.2f} × as wide"))
            below.append((ours[0] >= bootstrap[0] - _MARGIN - slack, f"{title} against {100 * bootstrap[0]:.1f}%"))
        where = f"where a true bootstrap of {self.bootstrap_members} nets reaches {100 * _GOOD_BOOTSTRAP:.0f}%"
        return [
            _summarize(f"its coverage is {100 * _MIN_COVERAGE:.0f}% to {100 * _MAX_COVERAGE:.0f}%, {where}", valid),
            _summarize(f"it is at most {100 * _MARGIN:.0f} points below a true bootstrap in every cell", below),
            _summarize(f"it is at most {_MAX_WIDTH:g} × as wide as the ideal band, {where}", wide),
        ]

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.6), layout="constrained")
        names = (OURS, TRAINING_RESIDUALS, BOOTSTRAP, ENSEMBLE)
        shown = [row for row in with_inputs(rows["bands"]) if row["method"] in names]
        coverage, width = figure.subplots(1, 2)
        plot_curves(coverage, shown, "inputs", "coverage", xlabel="inputs", label="coverage, %", scale=100)
        coverage.axhline(100 * LEVEL, color="gray", linestyle=":")
        plot_curves(width, shown, "inputs", "width", xlabel="inputs", label="width / ideal", scale=1)
        handles, labels = coverage.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
        for ax in (coverage, width):
            ax.get_legend().remove()
            ax.set_xticks(ticks := sorted({1, 2, 5, 10, 20} & {row["inputs"] for row in shown}), map(str, ticks))
        return {"coverage": figure}

    @property
    def note(self) -> str:
        return (
            "Inputs are uniform with variance one, or rows of a UCI data set, standardized; the functions have a "
            "standard deviation of about one, and the random net that is the teacher one of one to two. The noise is "
            f"{_NOISE:g}, or {_NOISE:g} (½ + sigmoid 2x₁). Nets of two hidden ReLU layers of 64 units; Adam on batches "
            f"of {self.batch_size} with cosine annealing from {self.learning_rate:g}. {self.num_datasets} data sets of "
            f"a seed, {self.bootstrap_sets} with a true bootstrap of {self.bootstrap_members} nets (Dirichlet weights, "
            f"other initial weights) and a deep ensemble of {self.ensemble_members}; 60 new inputs. The ideal band is "
            "around each net, as wide at x as the largest error over the data sets of the seed, which covers a further "
            "one with a probability of 95 %. "
            f"“{OURS}” trains a net on each half of the rows for half of the steps."
        )


def _moments(predictor: Any, grid: Tensor) -> tuple[Tensor, Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "some inputs are outside")
        summary = predictor.summarize(grid, 200)
    return summary.mean[:, 0].double(), summary.std[:, 0].double()


def _band_row(
    name: str, found: Sequence[tuple[Tensor, Tensor]], problem: SyntheticRegression, ideal: Tensor
) -> dict[str, Any]:
    """Row of the bands of several data sets: coverage with its standard error over data sets, and width."""
    mean, std = (torch.stack(values) for values in zip(*found, strict=True))  # (R, N)
    error = (mean - problem.values.double()).abs()
    inside = (error <= Z * std).double().mean(1)
    return {
        "method": name,
        "coverage": float(inside.mean()),
        "coverage_error": float(inside.std() / math.sqrt(len(inside))) if len(inside) > 1 else 0.0,
        "width": float(Z * std.mean() / ideal.mean()),
        "rmse": float(error.square().mean().sqrt()),
    }


def _pool(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Coverage, its standard error, and width, over seeds."""
    count = len(rows)
    error = math.sqrt(sum(row["coverage_error"] ** 2 for row in rows)) / count
    return sum(row["coverage"] for row in rows) / count, error, sum(row["width"] for row in rows) / count


def with_inputs(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the number of inputs of their function."""
    inputs = {**{name: count for name, (count, _) in _FUNCTIONS.items()}, **_TABLES}
    return [{**row, "inputs": inputs[row["function"]]} for row in rows]


def _summarize(claim: str, cells: Sequence[tuple[bool, str]]) -> Check:
    """A claim about every cell: the fraction of cells where it holds, and the others."""
    missed = [title for holds, title in cells if not holds]
    evidence = f"{len(cells) - len(missed)} of {len(cells)} cells" + (f"; not in {'; '.join(missed)}" if missed else "")
    return Check(f"the band of {OURS}: {claim}", not missed if cells else None, evidence)
