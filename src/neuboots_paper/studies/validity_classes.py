"""The study of validity, for classes: how far are a method's replicates from those of a true bootstrap?

    f_k = argmin 1/n Σᵢ w_{ki} ℓ(f(Xᵢ), yᵢ),  k = 1 … K,   against   f_b of a method, b = 1 … B

A true bootstrap draws three things anew for each net: the weights of the data, the first weights of the net, and the
order of its rows. Whatever goes around one trained net can know the first alone, so there are two truths: nets from
first weights of their own, as a bootstrap has them, and nets that all begin where the one net began.
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
from neuboots.report.checks import Check, combine_checks, compare_groups
from neuboots.report.tables import MetricColumn, Table, tabulate
from neuboots.training import TrainingConfig, initialize_model
from neuboots_paper._common import image_net, load_images, load_with_rows
from neuboots_paper.energy_distance import compare_replicates
from neuboots_paper.study import RunContext, load_preset

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
T = TypeVar("T")

TRUTHS = ("true bootstrap", "true bootstrap from one start")
AGAIN = "another " + TRUTHS[0], "another " + TRUTHS[1]
ORACLE = "true spread around one net"
ENSEMBLE, REFITTED = "deep-ensemble", "influence, refitted head"

AROUND: dict[str, Callable[[], Any]] = {  # one trained net
    "influence, head": InfluenceBootstrap,
    REFITTED: partial(InfluenceBootstrap, refit=True),
    "laplace": Laplace,
}
KERNEL: dict[str, Callable[[], Any]] = {  # the same, where a kernel matrix can hold the rows
    "influence, last 2 layers": partial(InfluenceBootstrap, layers=2),
    "influence, whole net": partial(InfluenceBootstrap, layers="all"),
    "influence, whole net, HC3": partial(InfluenceBootstrap, layers="all", residuals="hc3"),
}
FITTED: dict[str, Callable[[], Any]] = {  # with a training of their own
    "neuboots-paper": NeuBoots.paper,
    "neuboots": NeuBoots,
    "calibrated-neuboots": lambda: create_method("calibrated-neuboots"),
    "mc-dropout": MCDropout,
}
ALL = {**FITTED, **AROUND, **KERNEL}
ONE_RUN = tuple(ALL)  # each trains one net


@dataclass(frozen=True)
class ClassSettings:
    """What is measured, at the scale of a CPU; tuples go by the place in `data`. "digits-200" is a name of digits."""

    data: tuple[str, ...] = ("digits", "digits-200", "fashion_mnist", "fashion_mnist-200")
    nets: tuple[str, ...] = ("mlp-100-100",) * 4
    n: tuple[int, ...] = (1438, 200, 3000, 200)
    n_test: tuple[int, ...] = (359, 359, 1000, 500)
    epochs: tuple[int, ...] = (40, 60, 20, 60)
    members: tuple[int, ...] = (16, 16, 10, 10)  # K true nets, as many again, and so many of the ensemble
    batch_size: int = 64
    num_samples: int = 100  # B
    refits: int = 40  # B of refitted heads, each of which is a fit of its own
    kernel_rows: int = 200  # the most rows that kernels of several layers are made of
    methods: tuple[str, ...] = ONE_RUN
    seeds: tuple[int, ...] = (0, 1, 2)

    @classmethod
    def from_preset(cls, scale: str) -> "ClassSettings":
        """The settings of a scale."""
        return cls(**load_preset("validity-classes", scale))

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """The data sets that are read."""
        return tuple(dict.fromkeys(map(_set_of, self.data)))

    def case(self, data: str) -> "Case":
        k = self.data.index(data)
        return Case(_set_of(data), self.nets[k], self.n[k], self.n_test[k], self.epochs[k], self.members[k])


@dataclass(frozen=True)
class Case:
    """A data set, and what is trained on it."""

    data: str
    net: str
    n: int
    n_test: int
    epochs: int
    members: int


def _set_of(name: str) -> str:
    """
    >>> _set_of("digits-200")
    'digits'
    """
    return name.partition("-")[0]


# -- one unit ------------------------------------------------------------------------------------------


def measure(data: str, seed: int, settings: ClassSettings, context: RunContext) -> list[dict[str, Any]]:
    """A row for each method and each of the two truths; those that go around a net all go around the same one."""
    case = settings.case(data)
    source = load_with_rows(context, case.data, case.n)
    train, test = load_images(source, "train", case.n, seed), load_images(source, "test", case.n_test)
    x, labels = test.tensors
    model = image_net(case.net, source)

    def config(part: str) -> TrainingConfig:
        """The plain net has the seed itself; all others have seeds of their own."""
        named = seed if part == "deterministic" else derive_seed(seed, part)
        return context.config(part, epochs=case.epochs, batch_size=settings.batch_size, seed=named)

    def drawn(predictor: Predictor, size: int = settings.num_samples) -> Tensor:
        """Its replicates at the test inputs, or its members: (B, N, C)."""
        distinct = predictor.num_distinct
        return predictor.predict(x, size if distinct is None else max(2, distinct), seed=seed).samples.detach()

    def bootstrap(part: str, *, one_start: bool) -> Tensor:
        first = initialize_model(model, seed)
        make = (lambda: copy.deepcopy(first)) if one_start else model
        return drawn(BayesianBootstrap(num_members=case.members).fit(make, train, config(part)))

    truths = {name: bootstrap(name, one_start=k == 1) for k, name in enumerate(TRUTHS)}
    again = {name: bootstrap(name, one_start=k == 1) for k, name in enumerate(AGAIN)}
    plain, plain_seconds = _timed(lambda: Deterministic().fit(model, train, config("deterministic")))
    centre = drawn(plain)
    spread = again[AGAIN[0]] - again[AGAIN[0]].mean(0)
    arms: list[tuple[str, Row, Tensor]] = [
        *((name, {"cost": case.members}, samples) for name, samples in again.items()),
        (ORACLE, {"cost": case.members + 1}, centre[:1] + spread),
        ("deterministic", {"cost": 1, "time": 1.0}, centre),
    ]
    makers = _makers(settings, plain.fitted, model, train, config)
    ensemble = DeepEnsemble(num_members=case.members)
    makers[ENSEMBLE] = partial(ensemble.fit, model, train, config(ENSEMBLE))
    for name, make in makers.items():
        predictor, seconds = _timed(make)
        cost = case.members if name == ENSEMBLE else 1
        before = plain_seconds if name in AROUND or name in KERNEL else 0.0  # the plain net's training
        samples = drawn(predictor, settings.refits) if name == REFITTED else drawn(predictor)
        arms.append((name, {"cost": cost, "time": (before + seconds) / plain_seconds}, samples))
    return [
        {"method": name, "truth": truth, **_rounded({**about, **compare_replicates(true, samples, labels, seed=seed)})}
        for truth, true in truths.items()
        for name, about, samples in arms
        if truth == TRUTHS[0] or name not in (AGAIN[0], ORACLE, ENSEMBLE)  # which begin elsewhere
    ]


def _makers(
    settings: ClassSettings,
    net: nn.Module,
    model: Callable[[], nn.Module],
    train: TensorDataset,
    config: Callable[[str], TrainingConfig],
) -> dict[str, Callable[[], Predictor]]:
    """What makes the predictor of each method that trains one net."""
    found: dict[str, Callable[[], Predictor]] = {}
    for name in settings.methods:
        method = ALL[name]()
        if name in FITTED:
            found[name] = partial(method.fit, model, train, config(name))
        elif name in AROUND or len(train) <= settings.kernel_rows:
            found[name] = partial(method.from_trained, net, train, batch_size=config("deterministic").batch_size)
    return found


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """What it gives, and the seconds of the processor that it took."""
    began = time.process_time()
    found = work()
    return found, time.process_time() - began


def _rounded(row: Row) -> dict[str, Any]:
    """Six digits after the point; what is not finite is not known."""
    return {
        key: (round(value, 6) if math.isfinite(value) else None) if isinstance(value, float) else value
        for key, value in row.items()
    }


# -- what the rows say ---------------------------------------------------------------------------------

RIGHT_SIZE = 1.25  # the factor by which a spread may be too wide or too narrow

_COLUMNS = (
    MetricColumn("distance", "distance", digits=3),
    MetricColumn("ratio", "size of the spread"),
    MetricColumn("probability_ratio", "the same of probabilities"),
    MetricColumn("probability_correlation", "correlation over inputs"),
    MetricColumn("off", "factor off at an input"),
    MetricColumn("shift", "shift of the centre"),
)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Nearness to either truth, and how good the replicates are together; nothing of no rows."""
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
    "is the same distribution, 1 what a true replicate by itself has on average. Sizes are the standard deviation over "
    "that of the true replicates: of logits, and of probabilities. The correlation is that of the variance of the "
    "probabilities over inputs, corrected for few replicates. The factor off is by how much the standard deviation of "
    "the logits is wrong at a typical input, once its size over all inputs is right, corrected likewise. The shift "
    "of the centre is in true standard deviations. Methods that go around a net all go around the plain one, whose "
    "training their time includes; a net for 200 rows trains so fast that a kernel of all its weights takes longer. "
    f"“{ORACLE}” is no method: it has the deviations of another true bootstrap around the plain net, and shows what is "
    "missing when the spread is right but the centre is not. Kernels of several layers were measured for few rows.",
    "All true nets begin with the first weights of the plain net: what is left is what other weights of the data do, "
    "and the order of rows.",
)


def checks(rows: Sequence[Row]) -> list[Check]:
    """What the rows say for themselves: who is near to a true bootstrap, and who is not; nothing of no rows."""
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
        _as_near_as_can_be(whole, sets),
        *(nearer(*pair, whole, f"a {TRUTHS[0]}") for pair in pairs if known >= {*pair}),
        *(_right_size(start, sets, method) for method in (*AROUND, *KERNEL) if method in known),
        _mostly_first_weights(whole, sets),
    ]


def _as_near_as_can_be(rows: Sequence[Row], sets: Sequence[str]) -> Check:
    """The nearest method that trains one net, by its mean distance, against another true bootstrap."""
    parts = []
    for data in sets:
        means = {method: _mean(rows, data, method, "distance") for method in ONE_RUN}
        known = {method: mean for method, mean in means.items() if mean is not None}
        best = min(known, key=known.__getitem__)
        pair = ({"data": data, "method": best}, {"data": data, "method": AGAIN[0]})
        parts.append(compare_groups("", rows, "distance", *pair, expect="equal", margin=0.05, digits=3))
    return combine_checks(
        "the nearest method that trains one net is as near to a true bootstrap as another true bootstrap, within 0.05, "
        "on every set",
        parts,
    )


def _right_size(rows: Sequence[Row], sets: Sequence[str], method: str) -> Check:
    """Within the factor STD_RATIO_TOLERANCE, in the mean over seeds, on every set."""
    ratios = {data: _mean(rows, data, method, "ratio") for data in sets}
    known = {data: ratio for data, ratio in ratios.items() if ratio is not None}
    return Check(
        f"the spread of {method} is that of true nets from the same start, within a factor {RIGHT_SIZE}, on every set",
        all(1 / RIGHT_SIZE <= ratio <= RIGHT_SIZE for ratio in known.values()) if known else None,
        "; ".join(f"{data} {ratio:.2f}" for data, ratio in known.items()),
    )


def _mostly_first_weights(rows: Sequence[Row], sets: Sequence[str]) -> Check:
    """Variance of the ensemble's logits, whose nets differ in first weights and order alone, over the bootstrap's."""
    ratios = {data: _mean(rows, data, ENSEMBLE, "ratio") for data in sets}
    shares = {data: ratio**2 for data, ratio in ratios.items() if ratio is not None}
    return Check(
        "more than half of a true bootstrap's variance is that of first weights and the order of rows, which nothing "
        "around one net can know, on every set",
        all(share > 0.5 for share in shares.values()) if shares else None,
        "; ".join(f"{data} {share:.0%}" for data, share in shares.items()),
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
