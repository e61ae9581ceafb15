"""Beyond the paper: are the replicates of a method the nets that their bootstrap weights would give?

    corr over b and x:   g(x, α_b) − mean_b   with   f_{w_b}(x) − mean_b,   w_bi = α_b of the block of row i

f_w minimizes Σᵢ wᵢ ℓ(f(Xᵢ), yᵢ): in closed form for a linear net, by further training of the plain net for others.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots._prng import derive_keys
from neuboots.evaluation.bootstrap_audit import WeightAudit, refit_with_weights
from neuboots.methods import Deterministic, InfluenceBootstrap, NeuBoots, find_method
from neuboots.nets import MLP
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots.training import TrainingConfig
from neuboots.weights import Dirichlet, WeightSchedule
from neuboots_paper._common import make_method, plot_curves, round_rows
from neuboots_paper.studies.dimensions import make_problem
from neuboots_paper.study import BEYOND_PAPER, Job, Rows, RunContext, Study
from neuboots_paper.tables import MetricColumn, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER, UNWEIGHTED = "neuboots-paper", "neuboots-paper, loss without weights"
HEAD, REFITTED, WHOLE, TRAINING_RESIDUALS = (
    "influence, head",
    "influence, refitted head",
    "influence, whole net",
    "influence, whole net, training residuals",
)
BOOTSTRAP = "bayesian-bootstrap"
_NOISE, _LINEAR_INPUTS, _NUM_TEST = 1.0, 20, 200
_GOOD, _NONE, _SAME = 0.9, 0.2, 0.99  # correlations


@dataclass(frozen=True)
class _WithoutLossWeights(NeuBoots):
    """The paper's method with α on the features alone: the loss of each row has the weight 1."""

    def make_schedule(self, *args: Any, **options: Any) -> WeightSchedule:
        return _FeaturesOnly(**vars(super().make_schedule(*args, **options)))


@dataclass(frozen=True)
class _FeaturesOnly(WeightSchedule):
    def at_epoch(self, epoch: int) -> Any:
        weights = super().at_epoch(epoch)

        def without(index: Tensor, *, step: int | None = None) -> tuple[Tensor, Tensor]:
            alpha, w = weights(index, step=step)
            return alpha, torch.ones_like(w)

        return without


def _make(name: str, loss: nn.Module, members: int) -> Any:
    """Method of this name."""
    made: dict[str, Callable[[], Any]] = {
        UNWEIGHTED: lambda: _WithoutLossWeights(loss, Dirichlet(), resample="epoch"),
        HEAD: lambda: InfluenceBootstrap(loss),
        REFITTED: lambda: InfluenceBootstrap(loss, refit=True),
        WHOLE: lambda: InfluenceBootstrap(loss, layers="all"),
        TRAINING_RESIDUALS: lambda: InfluenceBootstrap(loss, layers="all", num_folds=0),
    }
    if name in made:
        return made[name]()
    if name == "neuboots" and isinstance(loss, nn.MSELoss):
        return NeuBoots.regression(loss)
    options = {} if not find_method(name.removesuffix("-paper")).needs_net else {"loss": loss}
    return make_method(name, members=members, **options)


@dataclass(frozen=True)
class SameWeights(Study):
    """Correlation of replicates with refits under the same weights, of every method."""

    name = "same-weights"
    source = BEYOND_PAPER
    requires = ("gpytorch", "sklearn")
    claim = (
        "A replicate g(·, α) of NeuBoots is the net that minimizes the loss whose rows have the weights α, as eq. 2.6 "
        "and algorithm 1 intend."
    )

    linear_sizes: tuple[int, ...] = (100, 300, 1000, 3000)  # n
    linear_methods: tuple[str, ...] = (PAPER, UNWEIGHTED, "neuboots", HEAD, REFITTED, WHOLE, BOOTSTRAP)
    problems: tuple[str, ...] = ("wave", "saddle", "teacher", "digits")
    methods: tuple[str, ...] = (
        *(PAPER, UNWEIGHTED, "neuboots", "calibrated-neuboots", HEAD, REFITTED, WHOLE, TRAINING_RESIDUALS),
        *("standard-bootstrap", BOOTSTRAP, "deep-ensemble", "adversarial-deep-ensemble", "gbs"),
        *("amortized-bootstrap", "batch-ensemble", "lp-bnn", "mimo", "mc-dropout", "swag", "laplace", "gp"),
        *("sparse-gp", "deterministic"),
    )
    rows: int = 300  # n of the other problems
    steps: int = 500
    batch_size: int = 50
    learning_rate: float = 1e-2
    num_samples: int = 50  # B
    members: int = 20  # of ensembles
    seeds: tuple[int, ...] = (0, 1, 2)

    def jobs(self) -> list[Job]:
        linear = [{"part": "linear", "n": n} for n in self.linear_sizes]
        nets = [{"part": "nets", "problem": problem} for problem in self.problems]
        return [{**job, "seed": seed} for seed in self.seeds for job in linear + nets]

    def config(self, n: int, seed: int, *, passes: int = 1) -> TrainingConfig:
        """Training options for n rows."""
        epochs = max(1, passes * round(self.steps * min(self.batch_size, n) / n))
        optimizer = partial(torch.optim.Adam, lr=self.learning_rate)
        return TrainingConfig(epochs=epochs, batch_size=self.batch_size, optimizer=optimizer, seed=seed, progress=False)

    def measure(self, job: Job, context: RunContext) -> Rows:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the net fits|some inputs are outside|errors at only")  # of bands
            found = self._measure_linear(job) if job["part"] == "linear" else self._measure_nets(job)
        return round_rows({job["part"]: found})

    def _measure_linear(self, job: Job) -> list[dict[str, Any]]:
        """A linear net, whose refits are weighted least squares."""
        n, seed = job["n"], job["seed"]
        generator = torch.Generator().manual_seed(int(derive_keys(torch.tensor(seed), "linear", n) % (1 << 31)))
        slopes = torch.randn(_LINEAR_INPUTS, generator=generator) / _LINEAR_INPUTS**0.5
        x = torch.randn(n + _NUM_TEST, _LINEAR_INPUTS, generator=generator)
        y = (x @ slopes + _NOISE * torch.randn(len(x), generator=generator))[:, None]
        data, test = TensorDataset(x[:n], y[:n]), x[n:]
        ones = torch.ones(1, n)
        plain = nn.Linear(_LINEAR_INPUTS, 1)
        with torch.no_grad():
            solution = _least_squares(x[:n], y[:n], ones)[0]
            plain.weight.copy_(solution[:-1].T)
            plain.bias.copy_(solution[-1])
        rows, draws = [], {}
        for name in self.linear_methods:
            method = _make(name, nn.MSELoss(), self.members)
            if isinstance(method, InfluenceBootstrap):
                predictor = method.from_trained(plain, data, seed=seed)
            else:
                config = self.config(n, seed, passes=4)
                predictor = method.fit(partial(nn.Linear, _LINEAR_INPUTS, 1), data, config)
            count = min(self.num_samples, predictor.num_distinct or self.num_samples)
            weights = method.row_weights(predictor, data, count, seed=seed, fit_seed=seed)
            refits = _append_one(test).double() @ _least_squares(x[:n], y[:n], weights)  # (B, N, 1)
            draws[name] = predictor.predict(test, count, seed=seed).samples
            rows.append(_row(name, WeightAudit.from_samples(draws[name], refits), weighted=True))
        if {PAPER, UNWEIGHTED} <= draws.keys():
            same = WeightAudit.from_samples(draws[UNWEIGHTED], draws[PAPER]).correlation
            rows[self.linear_methods.index(UNWEIGHTED)]["same"] = same
        return rows

    def _measure_nets(self, job: Job) -> list[dict[str, Any]]:
        """Nets, whose refits are the plain net, trained further."""
        problem, seed = job["problem"], job["seed"]
        data, test, make, loss = _load_problem(problem, self.rows, seed)
        config = self.config(self.rows, seed)
        plain = Deterministic(loss).fit(make, data, config).net
        independent = Dirichlet().sample(derive_keys(torch.arange(self.num_samples), seed, "independent"), self.rows)
        known: dict[bytes, Tensor] = {}

        def refit(weights: Tensor) -> Tensor:
            key = weights.numpy().tobytes()
            if key not in known:
                known[key] = refit_with_weights(plain, data, config, weights, loss=loss)(test)
            return known[key]

        rows = []
        for name in self.methods:
            method = _make(name, loss, self.members)
            if not method.info.needs_net and problem == "digits":  # regression only
                continue
            predictor = method.fit(make, data, config)
            count = min(self.num_samples, predictor.num_distinct or self.num_samples)
            weights = method.row_weights(predictor, data, count, seed=seed, fit_seed=seed) if count >= 3 else None
            refits = refit(independent)[: max(3, count)] if weights is None else refit(weights.float())
            samples = predictor.predict(test, len(refits), seed=seed).samples
            if problem == "digits":  # logits: softmax is invariant to their mean
                samples, refits = (values - values.mean(2, keepdim=True) for values in (samples, refits))
            rows.append(_row(name, WeightAudit.from_samples(samples, refits), weighted=weights is not None))
        return rows

    def tables(self, rows: Rows) -> list[Table]:
        columns = (
            MetricColumn("correlation", "correlation", digits=2),
            MetricColumn("ratio", "spread / that of refits", digits=2),
        )
        same = [row for row in rows.get("linear", []) if "same" in row]
        nets = rows.get("nets", [])
        tables = [
            tabulate("Nets, all problems.", nets, by=("weights", "method"), columns=columns),
            tabulate("A linear net.", rows.get("linear", []), by=("n", "method"), columns=columns),
            tabulate("Each problem.", nets, by=("problem", "method"), columns=columns),
        ]
        if same:
            column = MetricColumn("same", "correlation with neuboots-paper, same α", digits=3)
            tables.append(tabulate("Without weights of the loss.", same, by=("n", "method"), columns=(column,)))
        return tables

    def checks(self, rows: Rows) -> list[Check]:
        linear, nets = rows.get("linear", []), rows.get("nets", [])
        grown = {n: _mean(linear, PAPER, "ratio", n=n) for n in self.linear_sizes}
        spread = ", ".join(f"{ratio:.1f} × at n = {n:,}" for n, ratio in grown.items() if ratio is not None)
        ratios = [ratio for ratio in grown.values() if ratio is not None]
        return [
            _check_level(f"replicates of {PAPER} on a linear net correlate with refits", linear, PAPER, _GOOD),
            _check_level(f"replicates of {PAPER} on nets correlate with refits", nets, PAPER, _GOOD),
            _check_level(f"replicates of {HEAD} on a linear net correlate with refits", linear, HEAD, _GOOD),
            _check_level(f"replicates of {WHOLE} on nets correlate with refits", nets, WHOLE, 0.5),
            Check(
                f"the spread of {PAPER} on a linear net is that of refits within a factor 1.25, at every n",
                all(0.8 <= ratio <= 1.25 for ratio in ratios) if ratios else None,
                spread or "not measured",
            ),
            _check_same(linear),
        ]

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.6), layout="constrained")
        linear = [row for row in rows.get("linear", []) if row["method"] in (PAPER, "neuboots", HEAD, BOOTSTRAP)]
        if not linear:
            return {}
        left, right = figure.subplots(1, 2)
        plot_curves(left, linear, "n", "correlation", xlabel="n", label="correlation with refits")
        plot_curves(right, linear, "n", "ratio", xlabel="n", label="spread / that of refits")
        return {"linear": figure}

    @property
    def note(self) -> str:
        return (
            f"Linear net: {_LINEAR_INPUTS} normal inputs, noise of standard deviation {_NOISE:g}; refits are weighted "
            f"least squares. Nets: two hidden ReLU layers of 64 units, {self.rows} rows, {self.steps} steps of Adam "
            f"from {self.learning_rate:g} with cosine annealing, on functions of 1, 2 and 5 inputs of the study "
            "`dimensions` and on digits of 8 × 8 pixels; refits are the plain net, trained once more under the weights "
            f"of each of {self.num_samples} replicates ({self.members} for ensembles) in the same order of rows. "
            "Negative weights, of calibrated-neuboots, count as zero. Methods without weights are compared with refits "
            "under independent weights, so that their correlation is 0 but for chance. Refits of one net differ less "
            "than nets from other initial weights: the ratio of ensembles includes these."
        )


def _load_problem(name: str, n: int, seed: int) -> tuple[TensorDataset, Tensor, Callable[[], nn.Module], nn.Module]:
    """n training rows, test inputs, a function that makes a net, and the loss."""
    if name != "digits":
        problem = make_problem(name, "constant")
        x, y = problem.draw(n, seed=seed, number=0).tensors
        make = partial(MLP, x.shape[1], 1, widths=(64, 64))
        return TensorDataset(x, y[:, None]), problem.grid, make, nn.MSELoss()
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    order = derive_keys(torch.arange(len(images)), seed, "digits").argsort()
    x = (images / 16.0).float()[order]
    data = TensorDataset(x[:n], labels[order[:n]])
    return data, x[n : n + _NUM_TEST], partial(MLP, 64, 10, widths=(64, 64)), nn.CrossEntropyLoss()


def _append_one(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(len(x), 1)], 1)


def _least_squares(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Solutions under each row of weights (B, n): (B, D + 1, 1), in double precision."""
    design, y, weights = _append_one(x).double(), y.double(), weights.double()
    gram = torch.einsum("bn,ni,nj->bij", weights, design, design)
    solution: Tensor = torch.linalg.solve(gram, torch.einsum("bn,ni,nj->bij", weights, design, y))
    return solution


def _row(name: str, audit: WeightAudit, *, weighted: bool) -> dict[str, Any]:
    return {
        "method": name,
        "weights": "weights of rows" if weighted else "no weights",
        "correlation": audit.correlation,
        "error": audit.error,
        "ratio": audit.ratio,
    }


def _mean(rows: Sequence[dict[str, Any]], method: str, key: str, **where: Any) -> float | None:
    values = [
        row[key] for row in rows if row["method"] == method and all(row[name] == value for name, value in where.items())
    ]
    return sum(values) / len(values) if values else None


def _check_level(claim: str, rows: Sequence[dict[str, Any]], method: str, level: float) -> Check:
    """Whether the mean correlation of a method in each setting reaches a level."""
    settings = dict.fromkeys(row.get("problem", row.get("n")) for row in rows if row["method"] == method)
    key = "problem" if rows and "problem" in rows[0] else "n"
    means = {setting: _mean(rows, method, "correlation", **{key: setting}) or 0.0 for setting in settings}
    evidence = ", ".join(f"{'' if key == 'problem' else 'n = '}{name}: {mean:.2f}" for name, mean in means.items())
    holds = min(means.values()) >= level if means else None
    return Check(f"{claim} by {level:g} or more in every setting", holds, evidence or "not measured")


def _check_same(rows: Sequence[dict[str, Any]]) -> Check:
    same = [row["same"] for row in rows if "same" in row]
    return Check(
        f"the weights of the loss change the replicates of {PAPER}: with and without them, for the same α, they "
        f"correlate by less than {_SAME:g}",
        max(same) < _SAME if same else None,
        f"{min(same):.3f} to {max(same):.3f}" if same else "not measured",
    )
