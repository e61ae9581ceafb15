"""Dropout against NeuBoots: the verdicts, and the net and the rate that the paper states."""

from typing import Any

import pytest
from torch import nn

from neuboots import MCDropout
from neuboots.methods import MCDropoutPredictor
from neuboots_paper.studies import dropout
from neuboots_paper.studies.dropout import SAME, Dropout
from neuboots_paper.study import Rows, RunContext

STUDY = Dropout.from_preset("smoke")
BETTER = {"accuracy": 0.98, "ece": 0.01, "nll": 0.05, "brier": 0.02}
WORSE = {"accuracy": 0.98, "ece": 0.02, "nll": 0.09, "brier": 0.04}


def rows_of(ours: dict[str, float], dropout: dict[str, float]) -> Rows:
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
def test_the_verdicts_follow_the_rows(ours: dict[str, float], other: dict[str, float], holds: list[bool]) -> None:
    found = STUDY.checks(rows_of(ours, other))
    assert [verdict.holds for verdict in found] == 2 * holds  # neuboots, then neuboots-paper


def test_dropout_is_that_of_the_paper_on_three_layers_with_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def see(predictor: Any, *_: Any, **__: Any) -> Rows:
        seen.append(predictor)
        return {}

    monkeypatch.setattr(dropout, "class_scores", see)
    STUDY.measure({"width": 8, "method": "mc-dropout", "seed": 0}, RunContext())
    (predictor,) = seen
    assert isinstance(predictor, MCDropoutPredictor)
    assert predictor.layer_names == ("head",)
    assert MCDropout.paper_mlp().rate == 0.1
    norms = [layer.num_features for layer in predictor.module.modules() if isinstance(layer, nn.BatchNorm1d)]
    assert norms == [8, 8, 8]
