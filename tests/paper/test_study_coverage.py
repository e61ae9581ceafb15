"""Coverage at each x: the shares, the chance they are judged by, and verdicts that follow the rows."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from neuboots import NeuBoots
from neuboots.evaluation.coverage import SYNTHETIC_REGRESSIONS, simulate_coverage
from neuboots_paper.studies.coverage import PAPER_LAW, PAPER_LAW_EXP, CoverageStudy, curve_net, rates, regressor
from neuboots_paper.study import Rows, RunContext

STUDY = CoverageStudy(
    functions=("sine",),
    arms=(
        (PAPER_LAW, 8),
        (PAPER_LAW, 16),
        (PAPER_LAW_EXP, 16),
        ("standard-bootstrap", 8),
        ("gp", 0),
        ("mc-dropout", 8),
    ),
    num_sets=10,
    seeds=(0, 1, 2),
)


def made(held: int = 10, **others: int) -> Rows:
    """Rows in which each band holds the curve in so many of ten data sets; `others` by method."""
    rows: Rows = {"scores": [], "places": [], "bands": []}
    for job in STUDY.jobs():
        count = others.get(job["method"].replace("-", "_"), held)
        score = {"coverage": count / 10 + job["seed"] / 1000, "band_std": 0.1, "curve_std": 0.2, "rmse": 0.1}
        rows["scores"].append({**job, **score})
        rows["places"] += [{**job, "x": x, "held": count} for x in (-1.0, 0.0, 1.0)]
    return rows


def held(rows: Rows) -> list[bool | None]:
    return [verdict.holds for verdict in STUDY.checks(rows)]


def test_verdicts_follow_the_rows() -> None:
    assert held(made(10, mc_dropout=4)) == [True] * 6
    assert held(made(10, neuboots_paper=6)) == [False, True, True, False, False, False]
    assert held(made(10, standard_bootstrap=6, mc_dropout=4)) == [True, True, False, False, False, True]
    chance = made(10, neuboots_paper_exp=6, mc_dropout=6)  # 18 of 30 may come of 70 %
    assert held(chance) == [True, False, True, True, True, None]


def test_few_data_sets_leave_things_open() -> None:
    low = made(10, mc_dropout=4)
    for row in low["scores"]:
        row["coverage"] -= 0.12  # 88 % over all x, though none of those kept is refuted
    assert held(low)[:3] == [None] * 3
    assert held(made(10, mc_dropout=7))[-1] is None  # 21 of 30: neither below 70 % nor above, for sure
    assert held(made(10, mc_dropout=9))[-1] is False


def test_one_bad_x_is_enough() -> None:
    rows = made(10)
    for row in rows["places"]:
        if row["method"] == PAPER_LAW and row["width"] == 16 and row["x"] == 1.0:
            row["held"] = 7
    verdict = STUDY.checks(rows)[0]
    assert verdict.holds is False
    assert "70% at x = 1" in verdict.evidence


def test_what_chance_leaves_is_bonferronis_limit() -> None:
    """Of 30 data sets at 3 places: the least count that is not below chance is 24, by the binomial law itself."""
    from math import comb

    tail = [sum(comb(30, k) * 0.95**k * 0.05 ** (30 - k) for k in range(count + 1)) for count in range(31)]
    least = next(count for count in range(31) if 3 * tail[count] > 0.05)
    rows = made(10)
    assert f"chance leaves {least / 30:.0%} or more" in STUDY.checks(rows)[0].evidence
    for low, expected in ((least, True), (least - 1, False)):
        changed = copy.deepcopy(rows)
        mine = [row for row in changed["places"] if row["method"] == PAPER_LAW and row["width"] == 16]
        at_zero = [row for row in mine if row["x"] == 0.0]
        for row, count in zip(at_zero, (10, 10, low - 20), strict=True):
            row["held"] = count
        assert STUDY.checks(changed)[0].holds is expected


def test_rates_are_those_of_one_long_check() -> None:
    """Two seeds of two data sets are four data sets; the places kept are every third of the grid."""
    study = replace(CoverageStudy.from_preset("smoke"), functions=("sine",), every=3)
    places: list[dict[str, Any]] = []
    counts = torch.zeros(41)
    for seed in (0, 1):
        job = {"function": "sine", "method": PAPER_LAW, "width": 8, "seed": seed}
        rows = study.measure(job, RunContext())
        places += [{**job, **row} for row in rows["places"]]
        config = RunContext().config(
            epochs=study.steps,
            batch_size=study.n,
            optimizer=lambda learned: torch.optim.Adam(learned, lr=study.learning_rate),
        )
        found = simulate_coverage(
            regressor(PAPER_LAW, 3),
            curve_net(PAPER_LAW, 8),
            SYNTHETIC_REGRESSIONS["sine"],
            config,
            num_datasets=2,
            n=study.n,
            num_samples=study.num_samples,
            seed=seed,
            progress=False,
        )
        counts += found.covered.sum(0)
        assert rows["scores"][0]["coverage"] == pytest.approx(found.mean, abs=1e-5)
        squares = (found.bias.square() + found.estimator_std.square() / 2).mean()  # of two data sets
        assert rows["scores"][0]["rmse"] == pytest.approx(float(squares.sqrt()), abs=1e-5)
    shares = rates(places, "sine", PAPER_LAW, 8, num_sets=2)
    assert [*shares.values()] == pytest.approx((counts[::3] / 4).tolist())


def test_the_table_sets_the_band_beside_the_curve() -> None:
    table = STUDY.tables(made(9))[0]
    sizes = {line[2].text: line[table.columns.index("band / curve")].text for line in table.rows}
    assert {*sizes.values()} == {"0.50"}
    assert "3 × 16" in sizes
    assert "none" in sizes  # a Gaussian process has no net


def test_methods_are_the_papers() -> None:
    exp, identity = regressor(PAPER_LAW_EXP, 5), regressor(PAPER_LAW, 5)
    assert isinstance(exp, NeuBoots)
    assert isinstance(identity, NeuBoots)
    assert (exp.link, identity.link) == ("exp", "identity")
    assert replace(exp, link="identity") == identity == NeuBoots.paper(identity.loss)
    net = curve_net(PAPER_LAW, 500)
    assert net is not None
    assert net().options["widths"] == [500, 500, 500]  # type: ignore[index]
    assert (PAPER_LAW, 500) in CoverageStudy.from_preset("cpu").arms
    assert (PAPER_LAW_EXP, 500) in CoverageStudy.from_preset("cpu").arms
    assert curve_net("gp", 0) is None
