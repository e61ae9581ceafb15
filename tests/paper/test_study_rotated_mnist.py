"""Tests of the study of rotated digits."""

import pytest

from neuboots_paper._common import neuboots_variants
from neuboots_paper.studies.rotated_mnist import RotatedMnist
from neuboots_paper.study import Rows

STUDY = RotatedMnist.from_preset("cpu")


def make_rows(ours: float, first: float) -> Rows:
    """Both forms of NeuBoots have `ours` with the largest B and `first` with one replicate; all others have 0.5."""
    values = {25: ours, 1: first}
    return {
        "scores": [
            {**job, "B": B, "error": value, "ece": value}
            for job in STUDY.jobs()
            for B in STUDY.sizes
            for value in [
                (values.get(B, 0.5) if job["method"] in neuboots_variants(STUDY.methods) else 0.5) + job["seed"] / 99
            ]
        ]
    }


@pytest.mark.parametrize(
    ("ours", "first", "holds"),
    [
        (0.3, 0.4, [True, True, True, True]),
        (0.6, 0.55, [False, False, False, False]),
        (0.3, 0.2, [True, True, False, False]),
        (0.6, 0.7, [False, False, True, True]),
    ],
)
def test_checks_follow_the_rows(ours: float, first: float, holds: list[bool]) -> None:
    rows = make_rows(ours, first)
    assert [verdict.holds for verdict in STUDY.checks(rows)] == 2 * holds
    others = [row for row in rows["scores"] if row["method"] != "neuboots-paper"]
    assert [verdict.holds for verdict in STUDY.checks({"scores": others})] == holds + [None] * 4
