"""Tests of the active learning study: summaries, checks and resuming."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from neuboots.data import load_dataset
from neuboots.evaluation.active_learning import select_for_labeling
from neuboots_paper._common import image_net
from neuboots_paper.studies.active import Active, summarize_curves
from neuboots_paper.study import Rows, RunContext

STUDY = Active.from_preset("smoke")


def curves(method: str = "", accuracy: tuple[float, ...] = (0.5, 0.5, 0.5)) -> Rows:
    """A curve of every job, with a small step from trial to trial; the other methods have 0.5 throughout."""
    return {
        "curve": [
            {**job, "labels": labels, "accuracy": value + 0.001 * job["seed"], "ece": 0.1, "nll": 1.0}
            for job in STUDY.jobs()
            for labels, value in zip((20, 40, 60), accuracy if job["method"] == method else [0.5] * 3, strict=True)
        ]
    }


def test_end_and_whole_curve_are_two_claims() -> None:
    found = STUDY.checks(curves("neuboots", (0.3, 0.3, 0.6)))
    of_defaults = [verdict.holds for verdict in found if "by Algorithm 1" not in verdict.claim]
    assert of_defaults == [True, True, True, False] * 2


def test_noise_between_trials_is_not_resolved() -> None:
    rows = curves()
    for row in rows["curve"]:
        row["accuracy"] += 0.05 * (-1) ** row["seed"] * (row["method"] == "neuboots")
    assert {verdict.holds for verdict in STUDY.checks(rows)} == {None}


def test_summarize_curves() -> None:
    rows = curves("neuboots", (0.1, 0.2, 0.6))["curve"][::-1]
    found = next(r for r in summarize_curves(rows) if (r["data"], r["method"], r["seed"]) == ("digits", "neuboots", 1))
    assert (found["accuracy"], found["mean accuracy"]) == pytest.approx((0.601, 0.301))


def test_interrupted_trial_resumes(tmp_path: Path, monkeypatch: Any) -> None:
    job: dict[str, Any] = {"data": "digits", "method": "neuboots", "seed": 1}
    whole = STUDY.measure(job, RunContext())
    assert [row["labels"] for row in whole["curve"]] == [20, 40, 60]
    left = iter((True, False))

    def once(*args: Any, **options: Any) -> Any:
        if not next(left):
            raise KeyboardInterrupt
        return select_for_labeling(*args, **options)

    monkeypatch.setattr("neuboots.evaluation.active_learning.select_for_labeling", once)
    with pytest.raises(KeyboardInterrupt):
        STUDY.measure(job, RunContext(folder=tmp_path))
    done = sorted(file.name for file in tmp_path.rglob("round-*.json"))
    assert done == ["round-000.json"]
    monkeypatch.undo()
    assert STUDY.measure(job, RunContext(folder=tmp_path)) == whole


def test_coarse_net_averages_pixels() -> None:
    data = load_dataset("digits")
    net = image_net("mlp-4", data)()
    assert not any(isinstance(part, nn.AvgPool2d) for part in net.modules())
    coarse = image_net("small-cnn/2", data)()
    x = data.train[0][0][None]
    blocks = x.view(1, 1, 4, 2, 4, 2).mean((3, 5), keepdim=True).expand(1, 1, 4, 2, 4, 2).reshape(x.shape)
    coarse.eval()
    assert coarse(blocks).allclose(coarse(x), atol=1e-5)
    assert coarse(x).shape == (1, 10)
