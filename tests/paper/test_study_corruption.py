"""Tests of the corruption study: counted wins, corrupted images and checks."""

from typing import Any

import pytest
import torch

from neuboots.data import load_dataset
from neuboots_paper.studies.corruption import METHODS, CorruptionStudy, count_wins, load_raw_images
from neuboots_paper.study import Rows

STUDY = CorruptionStudy.from_settings({**CorruptionStudy.from_preset("smoke").settings, "seeds": (0, 1, 2)})


def make_rows(**accuracy: float) -> Rows:
    """Rows of every case; a method has this accuracy (else 0.5), falling with severity, and an ECE that mirrors it."""
    found = []
    for job in STUDY.jobs():
        value = accuracy.get(job["method"].replace("-", "_"), 0.5) + 0.001 * job["seed"]
        cases = [("clean", 0), *((name, level) for name in STUDY.corruptions for level in STUDY.severities)]
        for name, level in cases:
            right = value - 0.02 * level
            figures = {"accuracy": right, "ece": 1 - right, "nll": 1.0, "brier": 1.0}
            found.append({**job, "corruption": name, "severity": level, **figures})
    return {"shift": found}


def holds(rows: Rows) -> list[bool | None]:
    *found, of_algorithm_1 = STUDY.checks(rows)
    assert "by Algorithm 1" in of_algorithm_1.claim
    return [verdict.holds for verdict in found]


def test_checks_follow_the_rows() -> None:
    assert holds(make_rows(deep_ensemble=0.7, neuboots=0.6)) == [True, True, True]
    assert holds(make_rows(deep_ensemble=0.7, neuboots=0.4)) == [True, True, False]
    assert holds(make_rows(deep_ensemble=0.4, neuboots=0.6)) == [False, False, True]


def test_clean_images_are_not_corrupted_cases() -> None:
    rows = make_rows(neuboots=0.6)
    for row in rows["shift"]:
        if row["severity"] > 0 and row["method"] == "neuboots":
            row["accuracy"] -= 0.2
    assert holds(rows)[2] is False


def test_wins_are_counted_by_seed() -> None:
    def row(seed: int, severity: int, method: str, ece: float) -> dict[str, Any]:
        return {"seed": seed, "corruption": "blur", "severity": severity, "method": method, "ece": ece}

    rows = [row(s, level, method, 0.2) for s in (0, 1) for level in (1, 2, 3, 4) for method in METHODS[:2]]
    rows += [row(0, level, "deep-ensemble", 0.1 * level) for level in (1, 2, 3, 4)]  # 0.1, a tie, and two lost
    rows += [row(1, level, "deep-ensemble", 0.3) for level in (1, 2, 3, 4)]
    found = {each["seed"]: each["fraction"] for each in count_wins(rows, "ece") if each["method"] == "deep-ensemble"}
    assert found == {0: 0.5, 1: 0.0}


def test_images_are_corrupted_before_standardization() -> None:
    data = load_dataset("digits", val_fraction=0.0)
    x, y = load_raw_images(data, 50).tensors
    assert float(x.min()) == 0.0
    assert float(x.max()) == pytest.approx(1.0)
    assert len(x) == 50
    assert torch.allclose(16 * x, (16 * x).round(), atol=1e-4)  # the sixteen greys of the set
    assert y.shape == (50,)
