"""Tests of the corruption study: counted wins, corrupted images and checks."""

from typing import Any

import pytest
import torch

from neuboots.data import load_dataset
from neuboots_paper.studies.corruption import METHODS, count_wins, load_raw_images


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
