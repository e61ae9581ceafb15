"""Tests of the study of time against n: ratios, growth and checks."""

import pytest

from neuboots_paper.studies.coverage import PAPER_LAW
from neuboots_paper.studies.time_vs_n import BOOTSTRAP, SPARSE, TimeVsN
from neuboots_paper.study import Rows

STUDY = TimeVsN(sizes=(100, 1000, 10_000), members=10, seeds=(0, 1))
SECONDS = {(PAPER_LAW, 64): 1.0, (PAPER_LAW, 500): 4.0, (BOOTSTRAP, 64): 8.0, (SPARSE, 0): 16.0}


def made(**slower: float) -> Rows:
    """Times that grow as √n for the nets and as n for the sparse GP; a busy machine doubles all those of seed 1."""
    rows = []
    for job in STUDY.jobs():
        for (method, width), seconds in SECONDS.items():
            power = 1.0 if method == SPARSE else 0.5
            took = (1 + job["seed"]) * seconds * (job["n"] / 100) ** power * slower.get(f"{method}-{width}", 1.0)
            counts = {"replicates": 10 if method == BOOTSTRAP else 200}
            times = {"fit_seconds": 0.9 * took, "predict_seconds": 0.1 * took, "seconds": took}
            rows.append({**job, "method": method, "width": width, **counts, **times})
    return {"times": rows}


def test_ratios_are_within_a_job_and_net() -> None:
    table = STUDY.tables(made())[0]
    at = table.columns.index(f"× {PAPER_LAW}, same net")
    first = {(line[1].text, line[2].text): line[at].text for line in table.rows if line[0].text == "100"}
    assert first == {
        (PAPER_LAW, "3 × 64"): "1.0 ± 0.0",
        (PAPER_LAW, "3 × 500"): "1.0 ± 0.0",
        (BOOTSTRAP, "3 × 64"): "8.0 ± 0.0",  # though seed 1 took twice as long
        (SPARSE, "none"): "4.0 ± 0.0",  # to the widest net
    }
    each = table.columns.index("for each replicate, s")
    of_net = {line[1].text: line[each].value for line in table.rows if line[0].text == "100"}
    assert of_net[BOOTSTRAP] == pytest.approx(1.2)  # 8 s and 16 s for 10 nets


def test_growth_is_the_exponent_of_n() -> None:
    table = STUDY.tables(made())[1]
    found = {(line[0].text, line[1].text): (line[2].value, line[3].value) for line in table.rows}
    assert found[PAPER_LAW, "3 × 64"] == pytest.approx((0.5, 0.5))
    assert found[SPARSE, "none"] == pytest.approx((1.0, 1.0))


def test_mixed_times_are_not_resolved() -> None:
    mixed = made()
    for row in mixed["times"]:
        if row["method"] == SPARSE and row["n"] == 100 and row["seed"] == 0:
            row["seconds"] = 2.0  # between the two nets
    assert [verdict.holds for verdict in STUDY.checks(mixed)] == [True, True, None]
