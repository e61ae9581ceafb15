"""Report sections with every feature of a page, for tests of the report."""

from dataclasses import replace
from functools import cache

import torch
from matplotlib.figure import Figure

from neuboots import metrics
from neuboots.report import plots
from neuboots.report.checks import Check
from neuboots.report.html import to_svg
from neuboots.report.section import Section
from neuboots_paper import plots as paper_plots
from neuboots_paper.tables import MetricColumn, tabulate

TITLE, INTRODUCTION = "The paper, <reproduced>", "Figures marked *paper* are the paper's; 2 * 3 * 4 & `code`."
EVIL = "<script>alert(\"x\")</script> & 'y'"

# Sorted as words these would stand in another order; two are equal, and one was not measured.
ERRORS = {"plain": 0.0953, "mc-dropout": 1.002, "deep-ensemble": None, "neuboots": 0.0212, "gp": 0.0953}


@cache
def sections() -> tuple[Section, ...]:
    """A study with reliability diagrams at two scales, one with wide figures and tables, one with hostile names."""
    small = _diagrams()
    large = replace(small, scale="cpu", checks=small.checks[:1], settings={"seeds": (0,)}, note="")
    return small, large, _wide(), _hostile()


def _about(name: str) -> dict[str, object]:
    return {
        "command": f"neuboots reproduce {name} --scale smoke",
        "neuboots": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.7",
        "cores": 2,
        "units": 8,
        "core_seconds": 90.0,
    }


def _diagrams() -> Section:
    rows = [
        {"B": size, "method": method, "seed": seed, "error": None if error is None else error + seed / 1e4, "ece": 0.1}
        for size in (1, 25)
        for method, error in ERRORS.items()
        for seed in (0, 1)
    ]
    table = tabulate(
        "Digits, mean ± standard deviation over 2 seeds.",
        rows,
        by=("B", "method"),
        columns=(MetricColumn("error", "error, %", 100, better="lower"), MetricColumn("ece", "ECE, %", 100)),
        paper={(1, "plain"): {"error": "22.57"}, (25, "neuboots"): {"error": "14.45 ± 0.31"}},
        link="reliability-{B}-{method}",
        note="A note < the table.",
    )
    probs = torch.rand(200, 4, generator=torch.Generator().manual_seed(0)).softmax(1)
    curve = metrics.reliability_curve(probs, torch.arange(200) % 4)
    drawn = {}
    for name in dict.fromkeys(table.links[:-1]):  # the last line leads nowhere
        figure = Figure(figsize=(4.2, 3.8), layout="constrained")
        plots.plot_reliability(figure.subplots(), {"a net": curve})
        drawn[str(name)] = to_svg(figure, f"digits-{name}")
    checks = (
        Check("NeuBoots makes fewer errors", True, "1 < 2"),
        Check("its ECE is lower", False, "2 > 1"),
        Check("it is as fast", None, "1 ≈ 1"),
    )
    settings = {
        "seeds": (0, 1),
        "net": "mlp-32",
        "sizes": ((1, 25), (2, 3)),
        "lr": 0.1,
        "augment": False,
        "limit": None,
    }
    return Section(
        name="digits",
        source="table 3.1",
        claim="Bagged NeuBoots makes fewer errors.",
        scale="smoke",
        tables=(table,),
        checks=checks,
        plots=drawn,
        settings=settings,
        about=_about("digits"),
        note="3 epochs on `digits`.",
    )


def _wide() -> Section:
    grid, third = torch.linspace(-1, 1, 20), torch.full((3,), 1 / 3)
    wide = Figure(figsize=(12, 3.6), layout="constrained")
    left, middle, right = wide.subplots(1, 3)
    plots.plot_regression_band(left, grid, grid**2, grid**2 - 1, grid**2 + 1, label="band", truth=grid)
    paper_plots.plot_class_intervals(middle, ["a", "b", "c"], third, third - 0.1, third + 0.1, deterministic=third)
    paper_plots.plot_image(right, torch.rand(8, 8))
    for k, color in enumerate((plots.GREY, plots.BLUE, plots.GREEN, plots.ORANGE, plots.PURPLE)):
        left.text(-0.9, 1 - k / 5, "coloured letters", color=color)
    small = Figure(figsize=(5, 3.4), layout="constrained")
    paper_plots.plot_runtime(small.subplots(), {"a net": {1: 0.01, 100: 0.02}}, single=0.008)
    keys = [f"figure{k}" for k in range(12)]
    table = tabulate(
        "As wide as tables are.",
        [{"method": method, "seed": 0} | dict.fromkeys(keys, 0.5) for method in ("plain", "deep-ensemble-original")],
        by=("method",),
        columns=[MetricColumn(key, f"a figure, {key}") for key in keys],
    )
    return Section(
        name="curves",
        source="figures 2 and B.1",
        claim="Bands hold what they promise.",
        scale="smoke",
        tables=(table,),
        checks=(),
        plots={"bands-of-all": to_svg(wide, "curves-bands"), "times": to_svg(small, "curves-times")},
        settings={"seeds": (0,)},
        about=_about("curves"),
    )


def _hostile() -> Section:
    figure = Figure()
    figure.subplots().set(title=EVIL, xlabel=EVIL)
    rows = [{EVIL: EVIL, "value": float(k)} for k in range(2)]
    table = tabulate(EVIL, rows, by=(EVIL,), columns=(MetricColumn("value", EVIL),), link="x {" + EVIL + "}", note=EVIL)
    return Section(
        name=EVIL,
        source=EVIL,
        claim=EVIL,
        scale=EVIL,
        tables=(table,),
        checks=(Check(EVIL, None, EVIL),),
        plots={f"x {EVIL}": to_svg(figure, EVIL), "x --- script": to_svg(figure, "x")},
        settings={"seeds": (0,), EVIL: EVIL},
        about=_about(EVIL),
        note=EVIL,
    )
