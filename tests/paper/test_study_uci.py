"""Tests of the UCI study: log-likelihoods, held-out rows and checks."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from neuboots.estimators import NeuBootsRegressor
from neuboots_paper.studies.uci import CONSTANT, MARGINAL, MLP, OURS, STANDARDISED, Uci, compute_metrics, held_out_rows
from neuboots_paper.study import Rows

STUDY = Uci(data=("uci/a", "uci/b", "uci/c"), seeds=(0, 1, 2, 3))


def made(
    rmse: tuple[float, ...] = (1.0, 1.0, 1.0),
    covered: tuple[float, ...] = (0.95, 0.93, 0.97),
    gain: tuple[float, ...] = (0.3, 0.2, 0.1),
) -> Rows:
    """MLPs of RMSE 2 and 1.5 on three sets; each split is harder than the last, alike for all."""
    rows = []
    for job in STUDY.jobs():
        k, hard = STUDY.data.index(job["data"]), 1 + job["seed"]
        ours = {"rmse": hard * rmse[k], "log_likelihood": gain[k] - hard - job["seed"] * 1e-3, "rows": 100 + k}
        ours |= {"coverage": covered[k], "width": 4.0, "band": 1.0, "seconds": 3.0, "epochs": 50}
        rows += [
            {**job, "method": OURS, **ours},
            {**job, "method": CONSTANT, "log_likelihood": -float(hard), "sigma": 1.0},
            {**job, "method": MARGINAL, "log_likelihood": -2.0 * hard},
            {**job, "method": MLP, "rmse": 2.0 * hard, "seconds": 1.0, "epochs": 200},
            {**job, "method": STANDARDISED, "rmse": 1.5 * hard, "seconds": 1.0, "epochs": 200},
        ]
    return {"scores": rows}


def held(rows: Rows) -> list[bool | None]:
    return [verdict.holds for verdict in STUDY.checks(rows)]


# -- verdicts ------------------------------------------------------------------------------------------


def test_checks_follow_the_rows() -> None:
    assert held(made()) == [True, True, True, True, True]
    assert held(made(rmse=(1.0, 1.0, 3.0))) == [True, True, True, True, True]  # one set may be lost
    assert held(made(rmse=(1.0, 3.0, 3.0))) == [False, True, True, True, False]
    assert held(made(rmse=(1.0, 1.7, 1.7))) == [True, True, True, True, False]  # the fairer opponent is better
    assert held(made(covered=(0.95, 0.93, 0.985))) == [True, False, True, True, True]
    assert held(made(covered=(0.95, 0.915, 0.97))) == [True, False, True, True, True]
    assert held(made(gain=(0.3, -0.2, 0.1))) == [True, True, False, False, True]
    assert held(made(gain=(0.3, 0.0016, 0.1))) == [True, True, True, None, True]  # within the spread over splits


def test_differences_are_within_a_split() -> None:
    """Splits differ by more than methods do: unpaired, nothing could be told."""
    rows = made(gain=(0.3, 0.2, 0.1))
    for row in rows["scores"]:
        if row.get("log_likelihood") is not None:
            row["log_likelihood"] += 100.0 * row["seed"]
    assert held(rows)[2:4] == [True, True]


def test_other_splits_are_checked_separately() -> None:
    """Better on the splits in view and worse on the others: the second set of verdicts says so."""
    study = Uci(data=STUDY.data, seeds=(0, 1, 6, 7, 8))
    rows = made()["scores"]
    more = [{**row, "seed": row["seed"] + 5} for row in made(rmse=(2.1, 2.1, 1.0), gain=(0.3, -0.1, 0.1))["scores"]]
    chosen = {"scores": [row for row in [*rows, *more] if row["seed"] in study.seeds]}
    found = study.checks(chosen)
    assert found[0].holds is True
    assert [verdict.holds for verdict in found[5:]] == [False, True, False, False, False]
    assert "over 5 splits" in found[0].claim
    assert "over the 3 splits that no default was chosen by" in found[5].claim
    assert study.tables(chosen)[-1].title.startswith("The 3 splits by themselves")
    assert len(STUDY.tables(made())) == 4  # all in view


# -- tables and compute_metrics --------------------------------------------------------------------------------


# -- rows ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted() -> tuple[NeuBootsRegressor, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(260, 2))
    y = 10 + 5 * x[:, 0] + np.exp(x[:, 1]) * rng.normal(size=260)
    data = {"x": x[:200], "y": y[:200], "x_test": x[200:], "y_test": y[200:]}
    return NeuBootsRegressor(epochs=10, random_state=3).fit(data["x"], data["y"]), data


def test_log_likelihood_matches_scipy(
    fitted: tuple[NeuBootsRegressor, dict[str, np.ndarray]],
) -> None:
    regressor, data = fitted
    ours, constant, marginal = compute_metrics(regressor, **data)
    mean, std = regressor.predict(data["x_test"], return_std=True)
    y, held_out = data["y_test"], held_out_rows(regressor, data["x"], data["y"])
    sigma = np.sqrt(np.mean((regressor.predict(data["x"][held_out]) - data["y"][held_out]) ** 2))
    assert ours["log_likelihood"] == pytest.approx(norm.logpdf(y, mean, std).mean())
    assert constant["sigma"] == pytest.approx(sigma)
    assert constant["log_likelihood"] == pytest.approx(norm.logpdf(y, mean, sigma).mean())
    assert marginal["log_likelihood"] == pytest.approx(norm.logpdf(y, data["y"].mean(), data["y"].std()).mean())
    assert ours["rmse"] == pytest.approx(math.sqrt(np.mean((y - mean) ** 2)))
    low, high = regressor.predict_interval(data["x_test"], level=0.95)
    assert ours["coverage"] == pytest.approx(np.mean((low <= y) & (y <= high)))
    assert ours["width"] == pytest.approx(np.mean(high - low))
    low, high = regressor.predict_interval(data["x_test"], level=0.95, interval="confidence")
    assert ours["band"] == pytest.approx(np.mean(high - low))


def test_constant_sigma_uses_all_held_out_rows(
    fitted: tuple[NeuBootsRegressor, dict[str, np.ndarray]],
) -> None:
    """The estimator's own rows for calibration are among them, and so are those that stopped the training."""
    regressor, data = fitted
    unseen = held_out_rows(regressor, data["x"], data["y"])
    assert len(unseen) == 40  # a fifth
    assert {*np.flatnonzero(regressor.held_out_)} < {*unseen}
    assert regressor.x_mean_ == pytest.approx(np.delete(data["x"], unseen, axis=0).mean(0))  # of the training rows
