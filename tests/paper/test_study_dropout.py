"""Tests of the dropout study."""

from typing import Any

import pytest

from neuboots_paper.studies.dropout import SAME, Dropout
from neuboots_paper.study import Rows

STUDY = Dropout.from_preset("smoke")
BETTER = {"accuracy": 0.98, "ece": 0.01, "nll": 0.05, "brier": 0.02}
WORSE = {"accuracy": 0.98, "ece": 0.02, "nll": 0.09, "brier": 0.04}


def make_rows(ours: dict[str, float], dropout: dict[str, float]) -> Rows:
    def row(job: dict[str, Any]) -> dict[str, Any]:
        values = dropout if job["method"] == "mc-dropout" else ours
        return {**job, **{key: value + 1e-5 * job["seed"] for key, value in values.items()}}

    return {"scores": [row(job) for job in STUDY.jobs()]}


@pytest.mark.parametrize(
    ("ours", "other", "holds"),
    [
        (BETTER, WORSE, [True, True, True, True]),
        (WORSE, BETTER, [True, False, False, False]),
        ({**BETTER, "accuracy": 0.98 - (SAME + 0.1) / 100}, WORSE, [False, True, True, True]),
        ({**BETTER, "nll": 0.2}, WORSE, [True, True, False, True]),
    ],
)
def test_checks_follow_the_rows(ours: dict[str, float], other: dict[str, float], holds: list[bool]) -> None:
    found = STUDY.checks(make_rows(ours, other))
    assert [verdict.holds for verdict in found] == 2 * holds  # neuboots, then neuboots-paper
