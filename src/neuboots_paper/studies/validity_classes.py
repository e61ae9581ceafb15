"""The study `validity` for classification: distance of a method's replicates from those of a true bootstrap.

    f_k = argmin 1/n Σᵢ w_{ki} ℓ(f(Xᵢ), yᵢ),  k = 1 … K,   against   f_b of a method, b = 1 … B

A true bootstrap draws three things for each net: the weights of the data, the initial weights of the net, and the order
of its rows. A post-hoc method can only reproduce the first, so that there are two references: nets with different
initial weights, as in a bootstrap, and nets with the initial weights of the one net.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots._prng import derive_seed
from neuboots.methods import (
    BayesianBootstrap,
    DeepEnsemble,
    Deterministic,
    InfluenceBootstrap,
    Laplace,
    MCDropout,
    NeuBoots,
    create_method,
)
from neuboots.prediction import Predictor
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots.training import TrainingConfig, initialize_model
from neuboots_paper._common import image_net, load_images, load_with_rows
from neuboots_paper.checks import combine_checks, compare_groups
from neuboots_paper.energy_distance import compare_replicates
from neuboots_paper.study import RunContext, load_preset
from neuboots_paper.tables import MetricColumn, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
T = TypeVar("T")

TRUTHS = ("true bootstrap", "true bootstrap from one start")
SECOND_BOOTSTRAPS = "another " + TRUTHS[0], "another " + TRUTHS[1]
ORACLE = "true spread around one net"
ENSEMBLE, REFITTED = "deep-ensemble", "influence, refitted head"

POST_HOC: dict[str, Callable[[], Any]] = {  # post-hoc methods
    "influence, head": InfluenceBootstrap,
    REFITTED: partial(InfluenceBootstrap, refit=True),
    "laplace": Laplace,
}
KERNEL: dict[str, Callable[[], Any]] = {  # post-hoc methods with a kernel matrix of the rows
    "influence, last 2 layers": partial(InfluenceBootstrap, layers=2),
    "influence, whole net": partial(InfluenceBootstrap, layers="all"),
    "influence, whole net, HC3": partial(InfluenceBootstrap, layers="all", residuals="hc3"),
}
TRAINED: dict[str, Callable[[], Any]] = {  # methods with their own training
    "neuboots-paper": NeuBoots.paper,
    "neuboots": NeuBoots,
    "calibrated-neuboots": lambda: create_method("calibrated-neuboots"),
    "mc-dropout": MCDropout,
}
ALL = {**TRAINED, **POST_HOC, **KERNEL}
ONE_TRAINING = tuple(ALL)  # each trains one net


@dataclass(frozen=True)
class ClassSettings:
    """Settings, by default of the scale cpu; tuples have one value per dataset. "digits-200" is a subset of digits."""

    data: tuple[str, ...] = ("digits", "digits-200", "fashion_mnist", "fashion_mnist-200")
    nets: tuple[str, ...] = ("mlp-100-100",) * 4
    n: tuple[int, ...] = (1438, 200, 3000, 200)
    n_test: tuple[int, ...] = (359, 359, 1000, 500)
    epochs: tuple[int, ...] = (40, 60, 20, 60)
    members: tuple[int, ...] = (16, 16, 10, 10)  # K nets of each true bootstrap and of the ensemble
    batch_size: int = 64
    num_samples: int = 100  # B
    refits: int = 40  # B of refitted heads
    kernel_rows: int = 200  # maximum number of rows of a kernel
    methods: tuple[str, ...] = ONE_TRAINING
    seeds: tuple[int, ...] = (0, 1, 2)

    @classmethod
    def from_preset(cls, scale: str) -> "ClassSettings":
        """The settings of a scale."""
        return cls(**load_preset("validity-classes", scale))

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """The data sets that are read."""
        return tuple(dict.fromkeys(map(_dataset_name, self.data)))

    def case(self, data: str) -> "Case":
        k = self.data.index(data)
        return Case(_dataset_name(data), self.nets[k], self.n[k], self.n_test[k], self.epochs[k], self.members[k])


@dataclass(frozen=True)
class Case:
    """A dataset and the training on it."""

    data: str
    net: str
    n: int
    n_test: int
    epochs: int
    members: int


def _dataset_name(name: str) -> str:
    """
    >>> _dataset_name("digits-200")
    'digits'
    """
    return name.partition("-")[0]


# -- one unit ------------------------------------------------------------------------------------------


def measure(data: str, seed: int, settings: ClassSettings, context: RunContext) -> list[dict[str, Any]]:
    """One row per method and reference; post-hoc methods use the same net."""
    case = settings.case(data)
    source = load_with_rows(context, case.data, case.n)
    train, test = load_images(source, "train", case.n, seed), load_images(source, "test", case.n_test)
    x, labels = test.tensors
    model = image_net(case.net, source)

    def config(part: str) -> TrainingConfig:
        """Training options; the plain net has the seed itself, the others derived seeds."""
        named = seed if part == "deterministic" else derive_seed(seed, part)
        return context.config(part, epochs=case.epochs, batch_size=settings.batch_size, seed=named)

    def drawn(predictor: Predictor, size: int = settings.num_samples) -> Tensor:
        """Replicates or members at the test inputs: (B, N, C)."""
        distinct = predictor.num_distinct
        return predictor.predict(x, size if distinct is None else max(2, distinct), seed=seed).samples.detach()

    def bootstrap(part: str, *, one_start: bool) -> Tensor:
        first = initialize_model(model, seed)
        make = (lambda: copy.deepcopy(first)) if one_start else model
        return drawn(BayesianBootstrap(num_members=case.members).fit(make, train, config(part)))

    truths = {name: bootstrap(name, one_start=k == 1) for k, name in enumerate(TRUTHS)}
    again = {name: bootstrap(name, one_start=k == 1) for k, name in enumerate(SECOND_BOOTSTRAPS)}
    plain, plain_seconds = _time(lambda: Deterministic().fit(model, train, config("deterministic")))
    centre = drawn(plain)
    spread = again[SECOND_BOOTSTRAPS[0]] - again[SECOND_BOOTSTRAPS[0]].mean(0)
    arms: list[tuple[str, Row, Tensor]] = [
        *((name, {"cost": case.members}, samples) for name, samples in again.items()),
        (ORACLE, {"cost": case.members + 1}, centre[:1] + spread),
        ("deterministic", {"cost": 1, "time": 1.0}, centre),
    ]
    makers = _fit_functions(settings, plain.fitted, model, train, config)
    ensemble = DeepEnsemble(num_members=case.members)
    makers[ENSEMBLE] = partial(ensemble.fit, model, train, config(ENSEMBLE))
    for name, make in makers.items():
        predictor, seconds = _time(make)
        cost = case.members if name == ENSEMBLE else 1
        before = plain_seconds if name in POST_HOC or name in KERNEL else 0.0  # training of the plain net
        samples = drawn(predictor, settings.refits) if name == REFITTED else drawn(predictor)
        arms.append((name, {"cost": cost, "time": (before + seconds) / plain_seconds}, samples))
    return [
        {
            "method": name,
            "truth": truth,
            **_round_row({**about, **compare_replicates(true, samples, labels, seed=seed)}),
        }
        for truth, true in truths.items()
        for name, about, samples in arms
        if truth == TRUTHS[0] or name not in (SECOND_BOOTSTRAPS[0], ORACLE, ENSEMBLE)  # with other initial weights
    ]


def _fit_functions(
    settings: ClassSettings,
    net: nn.Module,
    model: Callable[[], nn.Module],
    train: TensorDataset,
    config: Callable[[str], TrainingConfig],
) -> dict[str, Callable[[], Predictor]]:
    """Functions that fit the predictor of each method with one training."""
    found: dict[str, Callable[[], Predictor]] = {}
    for name in settings.methods:
        method = ALL[name]()
        if name in TRAINED:
            found[name] = partial(method.fit, model, train, config(name))
        elif name in POST_HOC or len(train) <= settings.kernel_rows:
            found[name] = partial(method.from_trained, net, train, batch_size=config("deterministic").batch_size)
    return found


def _time(work: Callable[[], T]) -> tuple[T, float]:
    """Result of a function and its CPU seconds."""
    began = time.process_time()
    found = work()
    return found, time.process_time() - began


def _round_row(row: Row) -> dict[str, Any]:
    """Round to six digits; None for values that are not finite."""
    return {
        key: (round(value, 6) if math.isfinite(value) else None) if isinstance(value, float) else value
        for key, value in row.items()
    }


# -- tables, checks and plots ---------------------------------------------------------------------------------

MAX_SPREAD_FACTOR = 1.25  # accepted factor between spreads

_COLUMNS = (
    MetricColumn("distance", "distance", digits=3),
    MetricColumn("ratio", "size of the spread"),
    MetricColumn("probability_ratio", "the same of probabilities"),
    MetricColumn("probability_correlation", "correlation over inputs"),
    MetricColumn("off", "factor off at an input"),
    MetricColumn("shift", "shift of the centre"),
)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Distances from both references, and metrics of the predictive mean; none without rows."""
    if not rows:
        return []
    seeds = f"mean ± standard deviation over {len({row['seed'] for row in rows})} seeds"
    found = [
        tabulate(
            f"Replicates of class probabilities against a {truth}, {seeds}.",
            [row for row in rows if row["truth"] == truth],
            by=("data", "method"),
            columns=(
                *(
                    (MetricColumn("cost", "nets trained", digits=0), MetricColumn("time", "time in plain trainings"))
                    if k == 0
                    else ()
                ),
                *_COLUMNS,
            ),
            note=_NOTES[k],
        )
        for k, truth in enumerate(TRUTHS)
    ]
    scores = tabulate(
        f"The same replicates together, {seeds}.",
        [row for row in rows if row["truth"] == TRUTHS[0] and row["method"] != ORACLE],
        by=("data", "method"),
        columns=(
            MetricColumn("error", "error, %", 100, better="lower"),
            MetricColumn("nll", "NLL", digits=3, better="lower"),
            MetricColumn("ece", "ECE, %", 100, better="lower"),
        ),
    )
    return [*found, scores]


_NOTES = (
    "The distance is the energy distance of the replicates' probabilities, over the mean distance of two true ones: 0 "
    "is the same distribution, 1 the average of a single true replicate. Sizes are the standard deviation over "
    "that of the true replicates: of logits, and of probabilities. The correlation is that of the variance of the "
    "probabilities over inputs, corrected for few replicates. The factor off is by how much the standard deviation of "
    "the logits is wrong at a typical input, once its size over all inputs is right, corrected likewise. The shift "
    "of the centre is in true standard deviations. Post-hoc methods use the plain net, whose "
    "training their time includes; a net for 200 rows trains so fast that a kernel of all its weights takes longer. "
    f"“{ORACLE}” is no method: it has the deviations of another true bootstrap around the plain net, and shows what is "
    "missing when the spread is right but the centre is not. Kernels of several layers were measured for few rows.",
    "All true nets have the initial weights of the plain net and differ only in the weights and the order of the rows.",
)


def checks(rows: Sequence[Row]) -> list[Check]:
    """Checks of the distances from a true bootstrap; none without rows."""
    if not rows:
        return []
    sets = [*dict.fromkeys(row["data"] for row in rows)]
    whole = [row for row in rows if row["truth"] == TRUTHS[0]]
    start = [row for row in rows if row["truth"] == TRUTHS[1]]
    known = {row["method"] for row in rows}

    def nearer(first: str, second: str, some: Sequence[Row], against: str) -> Check:
        claim = f"the replicates of {first} are nearer to {against} than those of {second}, on every set"
        parts = [
            compare_groups("", some, "distance", {"data": data, "method": first}, {"data": data, "method": second},
                    expect="lower", digits=3)
            for data in sets
        ]  # fmt: skip
        return combine_checks(claim, parts)

    pairs = (
        ("influence, head", "neuboots-paper"),
        (REFITTED, "influence, head"),
        ("calibrated-neuboots", "neuboots"),
        ("influence, head", "neuboots"),
        ("influence, head", "mc-dropout"),
        ("influence, head", "laplace"),
    )
    return [
        _check_nearest(whole, sets),
        *(nearer(*pair, whole, f"a {TRUTHS[0]}") for pair in pairs if known >= {*pair}),
        *(_check_spread(start, sets, method) for method in (*POST_HOC, *KERNEL) if method in known),
        _check_initial_weights(whole, sets),
    ]


def _check_nearest(rows: Sequence[Row], sets: Sequence[str]) -> Check:
    """Check that the nearest method with one training is as near as another true bootstrap."""
    parts = []
    for data in sets:
        means = {method: _mean(rows, data, method, "distance") for method in ONE_TRAINING}
        known = {method: mean for method, mean in means.items() if mean is not None}
        best = min(known, key=known.__getitem__)
        pair = ({"data": data, "method": best}, {"data": data, "method": SECOND_BOOTSTRAPS[0]})
        parts.append(compare_groups("", rows, "distance", *pair, expect="equal", margin=0.05, digits=3))
    return combine_checks(
        "the nearest method that trains one net is as near to a true bootstrap as another true bootstrap, within 0.05, "
        "on every set",
        parts,
    )


def _check_spread(rows: Sequence[Row], sets: Sequence[str], method: str) -> Check:
    """Check that the mean ratio of spreads over seeds is within MAX_SPREAD_FACTOR, on every dataset."""
    ratios = {data: _mean(rows, data, method, "ratio") for data in sets}
    known = {data: ratio for data, ratio in ratios.items() if ratio is not None}
    return Check(
        f"the spread of {method} is that of true nets from the same start, within a factor {MAX_SPREAD_FACTOR}, "
        "on every set",
        all(1 / MAX_SPREAD_FACTOR <= ratio <= MAX_SPREAD_FACTOR for ratio in known.values()) if known else None,
        "; ".join(f"{data} {ratio:.2f}" for data, ratio in known.items()),
    )


def _check_initial_weights(rows: Sequence[Row], sets: Sequence[str]) -> Check:
    """Check the variance of the deep ensemble, which lacks the weights of the data, over the bootstrap's."""
    ratios = {data: _mean(rows, data, ENSEMBLE, "ratio") for data in sets}
    fractions = {data: ratio**2 for data, ratio in ratios.items() if ratio is not None}
    return Check(
        "more than half of a true bootstrap's variance is due to initial weights and the order of rows, which no "
        "post-hoc method can reproduce, on every set",
        all(value > 0.5 for value in fractions.values()) if fractions else None,
        "; ".join(f"{data} {value:.0%}" for data, value in fractions.items()),
    )


def _mean(rows: Sequence[Row], data: str, method: str, key: str) -> float | None:
    found = [row[key] for row in rows if (row["data"], row["method"]) == (data, method) and row[key] is not None]
    return fmean(found) if found else None


def plots(rows: Sequence[Row]) -> "dict[str, Figure]":
    """Each method's distance, size and correlation on every set: filled against one truth, hollow against the other."""
    from matplotlib.figure import Figure

    from neuboots.report.plots import BLUE, ORANGE

    sets, names = ([*dict.fromkeys(row[key] for row in rows)] for key in ("data", "method"))
    panels = {
        "distance": ("distance", (0.0, 1.0)),
        "ratio": ("size of the spread of logits", (1.0,)),
        "probability_correlation": ("correlation over inputs", (1.0,)),
    }
    figure = Figure(figsize=(11.5, 0.9 + 0.27 * len(names) * len(sets)), layout="constrained")
    axes = figure.subplots(len(sets), len(panels), squeeze=False, sharey=True, sharex="col")
    for line, data in zip(axes, sets, strict=True):
        for ax, (key, (label, marks)) in zip(line, panels.items(), strict=True):
            for truth, color, fill in zip(TRUTHS, (BLUE, ORANGE), (BLUE, "none"), strict=True):
                shown = [row for row in rows if (row["data"], row["truth"]) == (data, truth) and row[key] is not None]
                shown = [row for row in shown if key != "ratio" or row[key]]  # a single net has no spread
                at = [len(names) - 1 - names.index(row["method"]) for row in shown]
                ax.plot([row[key] for row in shown], at, "o", color=color, mfc=fill, ms=4.5, label=f"against a {truth}")
            for mark in marks:
                ax.axvline(mark, color="black", lw=0.8, ls=":")
            if key == "ratio":
                ax.set_xscale("log", base=2)
                ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            ax.set_yticks(range(len(names)), names[::-1], fontsize=8)
            ax.set_title(label if ax is not line[0] else f"{data}: {label}", fontsize=10)
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(color="#dddddd", lw=0.8)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return {"classes": figure}
