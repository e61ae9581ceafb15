"""Write docs/validity.md and its figure from the committed rows: `python docs/make_validity.py`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from neuboots_paper.runner import read_run
from neuboots_paper.studies.dimensions import BOOTSTRAP, ENSEMBLE, LEVEL, OURS, TRAINING_RESIDUALS, with_inputs
from neuboots_paper.studies.same_weights import PAPER

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "results" / "cpu"
SHOWN = (OURS, BOOTSTRAP, ENSEMBLE, TRAINING_RESIDUALS)
TRAININGS = {OURS: "2", TRAINING_RESIDUALS: "1", BOOTSTRAP: "20", ENSEMBLE: "5", "laplace": "1", "mc-dropout": "1"}

PAGE = """\
# Are the bands right?

**For a confidence band of a regression function use `InfluenceBootstrap(loss, layers="all")`, and let it hold rows
out**: `fit` trains two more nets on half of the rows each, which costs one more training; `from_trained(net, data,
val_data=…)` costs none. Its {level} band covered the function at {ours} of all new inputs, over {cells} settings of
function, n, training length and noise. A bootstrap of 20 nets covered {bootstrap}, a deep ensemble of 5 nets
{ensemble}. `NeuBoots` is fast and useful for classes, but its replicates are not those of a bootstrap.

## Coverage, by the number of inputs and of rows

Coverage in % of {level} bands at new inputs: {legend}. Means over functions and training lengths; each setting has
{sets} data sets, of which {bootstrap_sets} have a true bootstrap.

{by_inputs}

![Coverage and width of the bands by the number of inputs](images/validity.png)

Width is relative to the ideal band, which is around the same net and has the errors of many data sets; nobody can
compute it from one.

## However long the net was trained

{by_steps}

Errors at held-out rows tell the size of the band; training residuals do not, if the net has learned the noise. Where
the true bootstrap covers 88 % or more, the recommended band covers 90 % to 98 % in {valid}, and is at most 1.3 times as
wide as the ideal band in {wide}. It covers at least as often as the true bootstrap, less 3 points, in {below}. The
other cells are named in [dimensions](dimensions.md).

## All methods, n = 200, 500 steps

{methods}

## Is it a bootstrap?

A replicate of a bootstrap is the net that other weights of the rows would give. Correlation of replicates with nets
that are trained further under the same weights, over replicates and inputs, and their spread relative to that of
these nets:

{weights}

{verdict}

## What this page does not say

- Nets are MLPs and data are synthetic: functions of uniform inputs, and random nets of inputs of UCI data sets. Where
  the function is unlike anything that the net can learn from the rows, no band of the net covers it.
- A band that covers 95 % of the inputs on average may cover less at some of them: [curves](validity-details.md) at
  every x.
- Bands are for the function. For new y use the prediction interval of `NeuBootsRegressor` or a conformal interval
  ([estimators](estimators.md), [evaluation](evaluation.md)).

Details, with every setting: [dimensions](dimensions.md), [same weights](same-weights.md), [curves and
classes](validity-details.md). Measured by `neuboots reproduce dimensions`, `same-weights` and `validity`; this page is
generated from the rows in `results/`.
"""


def render(results: Path = RESULTS) -> str:
    """The page, from the rows in a results folder."""
    dimensions, weights = (read_run(results / name) for name in ("dimensions", "same-weights"))
    bands = with_inputs(dimensions.rows["bands"])
    study: Any = dimensions.study
    checks = [check.evidence.partition(";")[0] for check in study.checks(dimensions.rows)]
    n, steps = study.others_at
    nets, linear = weights.rows["nets"], weights.rows["linear"]
    settings = {tuple(row[name] for name in ("function", "noise", "n", "steps")) for row in bands}
    paper = [row for row in linear if row["method"] == PAPER]
    sizes = sorted({row["n"] for row in paper})
    first, last = (fmean(row["ratio"] for row in paper if row["n"] == size) for size in (sizes[0], sizes[-1]))
    same = [row["same"] for row in linear if "same" in row]
    verdict = (
        f"On a linear net `NeuBoots.paper()` has a correlation of {_mean(paper, 'correlation'):.2f}: α multiplies "
        f"features, and that is what its replicates show. With and without the weights in the loss, the same α gives "
        f"replicates that correlate by {min(same):.3f} or more. Their spread is {first:.1f} times that of a bootstrap "
        f"at n = {sizes[0]:,} and {last:.1f} times at n = {sizes[-1]:,}, since it does not shrink with n."
    )
    return PAGE.format(
        level=f"{100 * LEVEL:.0f} %",
        cells=len(settings),
        sets=len(study.seeds) * study.num_datasets,
        bootstrap_sets=len(study.seeds) * study.bootstrap_sets,
        legend=", ".join((f"**{OURS}**", *SHOWN[1:])),
        valid=checks[0],
        below=checks[1],
        wide=checks[2],
        verdict=verdict,
        by_inputs=_table(
            ("inputs", *(f"n = {size}" for size in study.sizes), "width"),
            [
                (
                    str(count),
                    *(
                        _rates(row for row in bands if (row["inputs"], row["n"]) == (count, size))
                        for size in study.sizes
                    ),
                    _rates((row for row in bands if row["inputs"] == count), "width", "{:.2f}", 1),
                )
                for count in sorted({row["inputs"] for row in bands})
            ],
        ),
        by_steps=_table(
            ("steps", "coverage, %", "width / ideal"),
            [
                (str(count), _rates(mine), _rates(mine, "width", "{:.2f}", 1))
                for count in study.steps
                for mine in [[row for row in bands if row["steps"] == count]]
            ],
        ),
        methods=_table(
            ("method", "trainings", "coverage, %", "width / ideal"),
            [
                (name, TRAININGS.get(name, "–"), f"{100 * _mean(mine, 'coverage'):.0f}", f"{_mean(mine, 'width'):.2f}")
                for name, mine in _by_method(row for row in bands if (row["n"], row["steps"]) == (n, steps)).items()
            ],
        ),
        weights=_table(
            ("method", "correlation, nets", "spread, nets", "correlation, linear net"),
            [
                (
                    name if mine[0]["weights"] == "weights of rows" else f"{name} (no weights)",
                    f"{_mean(mine, 'correlation'):.2f}",
                    f"{_mean(mine, 'ratio'):.2f}",
                    f"{_mean(also, 'correlation'):.2f}" if also else "–",
                )
                for name, mine in _by_method(nets).items()
                for also in [[row for row in linear if row["method"] == name]]
            ],
        ),
        **{
            key: f"{100 * _mean([row for row in bands if row['method'] == name], 'coverage'):.0f} %"
            for key, name in (("ours", OURS), ("bootstrap", BOOTSTRAP), ("ensemble", ENSEMBLE))
        },
    )


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return fmean(row[key] for row in rows)


def _by_method(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return found


def _rates(
    rows: Iterable[Mapping[str, Any]], key: str = "coverage", style: str = "{:.0f}", scale: float = 100.0
) -> str:
    """Means of the methods that are shown, the first in bold."""
    found = _by_method(rows)
    first, *others = (style.format(scale * _mean(found[name], key)) for name in SHOWN)
    return " · ".join((f"**{first}**", *others))


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Write the page and its figure."""
    run = read_run(RESULTS / "dimensions")
    plots: Callable[[Any], Any] = run.study.plots
    plots(run.rows)["coverage"].savefig(DOCS / "images" / "validity.png", dpi=120)
    (DOCS / "validity.md").write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
