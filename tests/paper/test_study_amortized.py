"""Tests of the studies of the amortized bootstrap, and of helpers for curves."""

import math
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from neuboots_paper._common import compare_everywhere, epochs_for, load_rows, plot_curves, round_rows
from neuboots_paper.studies.amortized_regression import AmortizedRegression
from neuboots_paper.study import RunContext


@pytest.mark.parametrize("n", [1, 100, 127, 128, 129, 3_000])
def test_epochs_for_is_minimal(n: int) -> None:
    a_pass = math.ceil(n / 128)
    assert 0 <= epochs_for(500, n, 128) * a_pass - 500 < a_pass


def test_round_rows_rounds_floats_only() -> None:
    assert round_rows({"a": [{"x": 1 / 3, "n": 7, "method": "deterministic"}]}, 3) == {
        "a": [{"x": 0.333, "n": 7, "method": "deterministic"}]
    }


def test_compare_everywhere_checks_each_place() -> None:
    rows = [
        {"method": m, "n": n, "seed": s, "e": e + s / 9}
        for m, e in (("a", 1), ("b", 2))
        for n in (5, 9)
        for s in (0, 1)
    ]
    verdict = compare_everywhere(
        "a < b", rows, "e", {"method": "a"}, {"method": "b"}, [{"n": 5}, {"n": 9}], expect="lower"
    )
    assert verdict.holds
    assert "a 5 1.06 against b 5 2.06" in verdict.evidence
    assert "a 9 1.06 against b 9 2.06" in verdict.evidence


def test_plot_curves_shows_means_over_seeds() -> None:
    rows = [{"method": "a", "n": n, "seed": seed, "e": n + seed} for n in (30, 10) for seed in (1, 0)]
    ax = Figure().subplots()
    plot_curves(ax, rows, "n", "e", xlabel="points", label="error", scale=10)
    assert torch.tensor(ax.lines[0].get_xydata()).tolist() == [[10, 105], [30, 305]]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["10", "30"]
    assert ax.get_xlabel() == "points"
    assert ax.get_ylim()[0] >= 0


def test_regression_errors_have_the_units_of_the_target() -> None:
    """An untrained net predicts about the mean of y, whose RMSE is the spread of the test targets."""
    study = AmortizedRegression(data=("diabetes",), widths=(4,), sizes=(50,), steps=1)
    row = study.measure({"data": "diabetes", "n": 50, "method": "neuboots", "seed": 0}, RunContext())["scores"][0]
    data = RunContext().load_data("diabetes", seed=0)
    assert data.target_standardizer is not None
    y = data.target_standardizer.inverse(load_rows(data.test).tensors[1])
    spread = float((y - data.target_standardizer.mean[0]).square().mean().sqrt())
    assert row["rmse"] == pytest.approx(spread, rel=0.35)
    assert row["nll"] == pytest.approx(0.5 * math.log(2 * math.pi * spread**2) + 0.5, rel=0.05)


def test_each_seed_has_its_own_test_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(RunContext, "load_data", lambda self, name, **options: asked.append(options))
    for seed in (0, 7, 23):
        AmortizedRegression()._data("uci/energy", seed, RunContext())
    assert [options["split"] for options in asked] == [0, 7, 3]
