"""Tests of the cost study: ratios, growth and checks."""

from pathlib import Path

import pytest

from neuboots_paper._common import make_method
from neuboots_paper.runner import read_run
from neuboots_paper.studies.cost import growth_rows, many_rows, mlp_rows


def test_growth_is_relative_to_the_smallest_k_of_the_run() -> None:
    rows = [
        {"method": "mimo", "seed": s, "members": K, "fit_ratio": (1 + s) * K, "predict_ratio": 2.0, "memory_mb": m}
        for s, K, m in ((0, 1, 8.0), (0, 5, 10.0), (1, 1, None), (1, 5, None))
    ]
    found = growth_rows(rows, (5,))
    assert [row["fit"] for row in found] == [5.0, 5.0]  # the second run is twice as slow, which plays no role
    assert [row["memory"] for row in found] == [1.25, None]


def test_times_are_relative_to_neuboots_in_the_same_run() -> None:
    rows = [
        {"method": method, "seed": seed, "members": 5, "fit_seconds": seconds, "predict_seconds": seconds}
        for seed, own in ((0, 2.0), (1, 4.0))
        for method, seconds in (("neuboots", own), ("mc-dropout", 6.0), ("mimo", 6.0))
    ]
    assert [row["mimo_by_neuboots"] for row in mlp_rows(rows)] == [3.0, 1.5]
    assert {(row["method"], row["seed"]): row["slower"] for row in many_rows(rows)}["mc-dropout", 1] == 1.5


@pytest.mark.parametrize(
    ("names", "members"),
    [
        (("deep-ensemble", "adversarial-deep-ensemble", "batch-ensemble", "mimo", "lp-bnn", "standard-bootstrap"), 3),
        (("deterministic", "mc-dropout", "neuboots", "neuboots-paper"), None),
    ],
)
def test_make_method_sets_the_number_of_members(names: tuple[str, ...], members: int | None) -> None:
    assert {getattr(make_method(name, members=3), "num_members", None) for name in names} == {members}


def test_memory_is_not_checked_without_measurements() -> None:
    run = read_run(Path(__file__).resolve().parents[2] / "results" / "cpu" / "cost")
    rows = {**run.rows, "growth": [{**row, "memory_mb": None} for row in run.rows["growth"]]}
    memory = [verdict for verdict in run.study.checks(rows) if "memory" in verdict.claim]
    assert [verdict.holds for verdict in memory] == [None, None]
    assert [len(run.study.plots(each)["growth"].axes) for each in (rows, run.rows)] == [2, 3]
