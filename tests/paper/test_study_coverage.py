"""Tests of the coverage study: checks and their significance."""

import copy

from neuboots_paper.studies.coverage import PAPER_LAW, PAPER_LAW_EXP, CoverageStudy
from neuboots_paper.study import Rows

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


def test_checks_follow_the_rows() -> None:
    assert held(made(10, mc_dropout=4)) == [True] * 6
    assert held(made(10, neuboots_paper=6)) == [False, True, True, False, False, False]
    assert held(made(10, standard_bootstrap=6, mc_dropout=4)) == [True, True, False, False, False, True]
    chance = made(10, neuboots_paper_exp=6, mc_dropout=6)  # 18 of 30 may come of 70 %
    assert held(chance) == [True, False, True, True, True, None]


def test_few_datasets_leave_checks_open() -> None:
    low = made(10, mc_dropout=4)
    for row in low["scores"]:
        row["coverage"] -= 0.12  # 88 % over all x, though none of those kept is refuted
    assert held(low)[:3] == [None] * 3
    assert held(made(10, mc_dropout=7))[-1] is None  # 21 of 30: neither below 70 % nor above, for sure
    assert held(made(10, mc_dropout=9))[-1] is False


def test_one_failing_x_fails_the_check() -> None:
    rows = made(10)
    for row in rows["places"]:
        if row["method"] == PAPER_LAW and row["width"] == 16 and row["x"] == 1.0:
            row["held"] = 7
    verdict = STUDY.checks(rows)[0]
    assert verdict.holds is False
    assert "70% at x = 1" in verdict.evidence


def test_minimum_coverage_is_bonferroni_corrected() -> None:
    """Of 30 data sets at 3 places: the least count that is not below chance is 24, by the binomial distribution."""
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
