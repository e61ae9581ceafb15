"""Tests of the imbalance study: summaries and checks."""

from typing import Any

import pytest

from neuboots_paper.studies.imbalance import ImbalanceStudy, summarize_trainings
from neuboots_paper.study import Rows

STUDY = ImbalanceStudy.from_settings({**ImbalanceStudy.from_preset("smoke").settings, "seeds": (0, 1, 2, 3, 4)})
CELLS = ImbalanceStudy.from_settings({**STUDY.settings, "cases": (("wbc_cells", "mlp-8", 1, 8),)})
ROLES = {"monocyte": "minor", "eosinophil": "", "neutrophil": "major"}


def make_rows(study: ImbalanceStudy, ours: dict[str, float], spread: float = 1.0) -> Rows:
    """F1 of 0.5, a little more for each seed; NeuBoots has `ours` in some classes and seeds that differ by `spread`."""
    found = []
    for job in study.jobs():
        mine = job["method"].startswith("neuboots")
        for name, role in ROLES.items():
            f1 = ours.get(name, 0.5) if mine else 0.5
            f1 += 0.001 * (job["seed"] - 2) * (spread if mine else 1.0)
            found.append({**job, "class": name, "role": role, "train rows": 5, "test rows": 5, "f1": f1})
    return {"classes": found}


def holds(ours: dict[str, float], spread: float = 1.0) -> dict[str, Any]:
    verdicts = CELLS.checks(make_rows(CELLS, ours, spread))
    found, same = ([v.holds for v in verdicts if ("by Algorithm 1" in v.claim) == paper] for paper in (False, True))
    assert same == found  # of rows that are the same for both forms of NeuBoots
    return dict(zip(("deterministic", "mc-dropout", "deep-ensemble", "minor", "named", "steady"), found, strict=True))


@pytest.mark.parametrize(("spread", "expected"), [(0.1, True), (1.0, None), (10.0, False)])
def test_variance_check_uses_the_ratio_of_variances(spread: float, expected: bool | None) -> None:
    assert holds({}, spread)["steady"] is expected


@pytest.mark.parametrize("lost", ["neuboots", "mc-dropout"])
def test_class_without_hits_has_no_variance_check(lost: str) -> None:
    rows = make_rows(CELLS, {}, 10.0 if lost == "mc-dropout" else 0.1)
    for row in rows["classes"]:
        if row["role"] == "minor" and row["method"] == lost:
            row["f1"] = 0.0
    (steady,) = [v for v in CELLS.checks(rows) if "varies less with NeuBoots than" in v.claim]
    assert f"{lost} never found the class" in steady.evidence
    assert steady.holds is (None if lost == "neuboots" else False)  # the others still count


def test_summarize_trainings() -> None:
    rows = make_rows(CELLS, {"monocyte": 0.2, "eosinophil": 0.6, "neutrophil": 1.0})["classes"]
    found = next(row for row in summarize_trainings(rows) if row["method"] == "neuboots" and row["seed"] == 2)
    assert (found["minor"], found["major"], found["mean"]) == pytest.approx((0.2, 1.0, 0.6))
