"""Tests of the cost study: ratios, growth and checks."""

from typing import Any

import pytest

from neuboots_paper._common import make_method
from neuboots_paper.studies.cost import (
    CostStudy,
    growth_rows,
    many_rows,
    mlp_rows,
)
from neuboots_paper.study import Rows

STUDY = CostStudy.from_preset("cpu")


def make_rows(ours: float = 1.0, theirs: float = 5.0, mimo: float = 1.3) -> Rows:
    """Rows of a run in which NeuBoots costs `ours`, other methods `theirs`, and MIMO's memory grows by `mimo`."""

    def row(method: str, K: int, seed: int, **more: Any) -> dict[str, Any]:
        ratio = {"deterministic": 1.0, "neuboots": ours}.get(method, theirs) + seed / 1000
        times = {"fit_ratio": ratio, "fit_seconds": 2 * ratio, "predict_ratio": ratio, "predict_seconds": ratio}
        grown = mimo if method == "mimo" and K in STUDY.counts[-1:] else 1.0
        memory = {"memory_mb": 10 * grown if seed == 0 else None, "fit_mb_ratio": 1.0, "size_mb": 1.0}
        return {"method": method, "members": K, "seed": seed, **times, **memory, **more}

    cases = STUDY._cases()
    return {
        case: [row(method, K, seed) for seed in STUDY.seeds for method in ("deterministic", *methods) for K in counts]
        for case, (_, _, methods, counts, *_) in cases.items()
    }


def test_growth_is_relative_to_the_smallest_k_of_the_run() -> None:
    rows = [
        {"method": "mimo", "seed": s, "members": K, "fit_ratio": (1 + s) * K, "predict_ratio": 2.0, "memory_mb": m}
        for s, K, m in ((0, 1, 8.0), (0, 5, 10.0), (1, 1, None), (1, 5, None))
    ]
    found = growth_rows(rows, (5,))
    assert [row["fit"] for row in found] == [5.0, 5.0]  # the second run is twice as slow, which plays no role
    assert [row["memory"] for row in found] == [1.25, None]


def test_times_are_relative_to_neuboots_in_the_same_run() -> None:
    rows = make_rows(ours=2.0, theirs=6.0)
    assert [row["mimo_by_neuboots"] for row in mlp_rows(rows["mlp"]) if row["seed"] == 0] == [3.0, 3.0]
    found = {(row["method"], row["seed"]): row["slower"] for row in many_rows(rows["many"])}
    assert found["mc-dropout", 0] == 3.0
    assert found["neuboots", 2] == 1.0


@pytest.mark.parametrize(
    "name", ["deep-ensemble", "adversarial-deep-ensemble", "batch-ensemble", "mimo", "lp-bnn", "standard-bootstrap"]
)
def test_make_method_sets_the_number_of_members(name: str) -> None:
    assert make_method(name, members=3).num_members == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["deterministic", "mc-dropout", "neuboots", "neuboots-paper"])
def test_make_method_ignores_members_of_a_single_net(name: str) -> None:
    assert not hasattr(make_method(name, members=3), "num_members")


def test_checks_follow_the_rows() -> None:
    good = STUDY.checks(make_rows())
    assert [verdict.holds for verdict in good if "gap" not in verdict.claim] == [True] * (len(good) - 1)
    slow = {verdict.claim: verdict.holds for verdict in STUDY.checks(make_rows(ours=5.0, theirs=1.0))}
    assert [holds for claim, holds in slow.items() if "faster" in claim or "in the time" in claim] == [False] * 6
    flat = [verdict for verdict in STUDY.checks(make_rows(mimo=1.0)) if "MIMO needs" in verdict.claim]
    assert [verdict.holds for verdict in flat] == [False]


def test_memory_is_not_checked_without_measurements() -> None:
    rows = make_rows()
    for row in rows["growth"]:
        row["memory_mb"] = None
    memory = [verdict for verdict in STUDY.checks(rows) if "memory" in verdict.claim]
    assert [verdict.holds for verdict in memory] == [None, None]
    assert len(STUDY.plots(rows)["growth"].axes) == 2
    assert len(STUDY.plots(make_rows())["growth"].axes) == 3
