"""The UCI comparison: densities by their definition, verdicts that follow the rows, tables from the rows alone."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from neuboots.data.tabular import read_uci
from neuboots.estimators import NeuBootsRegressor
from neuboots_paper.studies.uci import CONSTANT, MARGINAL, MLP, OURS, STANDARDISED, Uci, figures, not_trained_on
from neuboots_paper.study import Rows, RunContext

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


def test_verdicts_follow_the_rows() -> None:
    assert held(made()) == [True, True, True, True, True]
    assert held(made(rmse=(1.0, 1.0, 3.0))) == [True, True, True, True, True]  # one set may be lost
    assert held(made(rmse=(1.0, 3.0, 3.0))) == [False, True, True, True, False]
    assert held(made(rmse=(1.0, 1.7, 1.7))) == [True, True, True, True, False]  # the fairer opponent is better
    assert held(made(covered=(0.95, 0.93, 0.985))) == [True, False, True, True, True]
    assert held(made(covered=(0.95, 0.915, 0.97))) == [True, False, True, True, True]
    assert held(made(gain=(0.3, -0.2, 0.1))) == [True, True, False, False, True]
    assert held(made(gain=(0.3, 0.0016, 0.1))) == [True, True, True, None, True]  # within the spread over splits


def test_a_tie_in_the_mean_is_no_worse() -> None:
    assert held(made(rmse=(2.0, 2.0, 2.0)))[0] is True


def test_differences_are_of_the_same_split() -> None:
    """Splits differ by more than methods do: unpaired, nothing could be told."""
    rows = made(gain=(0.3, 0.2, 0.1))
    for row in rows["scores"]:
        if row.get("log_likelihood") is not None:
            row["log_likelihood"] += 100.0 * row["seed"]
    assert held(rows)[2:4] == [True, True]


def test_the_rules_are_in_the_words() -> None:
    claims = [verdict.claim for verdict in STUDY.checks(made())]
    assert "on at least 2 of 3 sets" in claims[0]
    assert "at least 5 of 6" in Uci(seeds=STUDY.seeds).checks(_of_six())[0].claim
    assert "92% to 98%" in claims[1]
    assert "standardised" in claims[4]
    assert "uci/b +0.199 ± 0.001" in STUDY.checks(made())[2].evidence


def test_splits_that_no_default_was_chosen_by_are_judged_by_themselves() -> None:
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


def _of_six() -> Rows:
    rows = made()["scores"]
    names = dict(zip(STUDY.data, Uci().data, strict=False))
    more = [{**row, "data": name} for row in rows if row["data"] == "uci/a" for name in Uci().data[3:]]
    return {"scores": [{**row, "data": names[row["data"]]} for row in rows] + more}


# -- tables and figures --------------------------------------------------------------------------------


def test_tables_have_a_line_for_each_set_with_standard_errors() -> None:
    tables = STUDY.tables(made())
    assert [[line[0].text for line in table.rows] for table in tables] == [[*STUDY.data]] * 4
    errors = tables[0].rows[0]
    spread = np.std([1, 2, 3, 4], ddof=1) / 2
    assert errors[1].text == "100"  # alike in all splits
    assert errors[2].text == f"2.500 ± {spread:.3f}"
    assert errors[3].text == f"5.000 ± {2 * spread:.3f}"
    assert errors[tables[0].columns.index("difference to MLPRegressor")].value == pytest.approx(-2.5)
    assert tables[1].rows[1][1].text == "93.0"
    assert tables[2].rows[0][tables[2].columns.index("gain over one σ")].value == pytest.approx(0.2985)


def test_figures_are_made_from_the_rows() -> None:
    assert {*STUDY.plots(made())} == {"splits"}


# -- rows ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted() -> tuple[NeuBootsRegressor, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(260, 2))
    y = 10 + 5 * x[:, 0] + np.exp(x[:, 1]) * rng.normal(size=260)
    data = {"x": x[:200], "y": y[:200], "x_test": x[200:], "y_test": y[200:]}
    return NeuBootsRegressor(epochs=10, random_state=3).fit(data["x"], data["y"]), data


def test_log_likelihoods_are_those_of_the_normal_law(
    fitted: tuple[NeuBootsRegressor, dict[str, np.ndarray]],
) -> None:
    regressor, data = fitted
    ours, constant, marginal = figures(regressor, **data)
    mean, std = regressor.predict(data["x_test"], return_std=True)
    y, held_out = data["y_test"], not_trained_on(regressor, data["x"], data["y"])
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


def test_one_sigma_comes_from_all_rows_that_were_not_trained_on(
    fitted: tuple[NeuBootsRegressor, dict[str, np.ndarray]],
) -> None:
    """The estimator's own rows for calibration are among them, and so are those that stopped the training."""
    regressor, data = fitted
    unseen = not_trained_on(regressor, data["x"], data["y"])
    assert len(unseen) == 40  # a fifth
    assert {*np.flatnonzero(regressor.held_out_)} < {*unseen}
    assert regressor.x_mean_ == pytest.approx(np.delete(data["x"], unseen, axis=0).mean(0))  # of the training rows


def test_a_unit_has_what_the_tables_need() -> None:
    study = Uci.from_preset("smoke")
    rows: Rows = {"scores": []}
    for job in study.jobs():
        rows["scores"] += [{**job, **row} for row in study.measure(job, RunContext())["scores"]]
    assert [row["method"] for row in rows["scores"][:5]] == [OURS, CONSTANT, MARGINAL, MLP, STANDARDISED]
    splits = [row["rmse"] for row in rows["scores"] if row["method"] == OURS]
    assert len({*splits}) == 2
    assert all(cell.value is not None for table in study.tables(rows) for line in table.rows for cell in line[1:])
    assert len(study.checks(rows)) == 5
    again = study.measure(study.jobs()[0], RunContext())["scores"]
    assert [{**row, "seconds": 0} for row in again] == [
        {**{key: value for key, value in row.items() if key not in ("data", "seed")}, "seconds": 0}
        for row in rows["scores"][:5]
    ]


def test_rows_of_a_set_are_those_of_its_file(tmp_path: Path) -> None:
    """Raw, in the units of the file, each row once; the split says which are for the test."""
    (tmp_path / "uci").mkdir()
    lines = [f"{i},{i * 0.5},{1000 + i}" for i in range(40)]
    (tmp_path / "uci" / "yacht.csv").write_text("\n".join(["a,b,y", *lines]))
    (tmp_path / "uci" / "yacht.test_splits.json").write_text('{"0": [1, 3], "1": [0, 39]}')
    x, y, test = read_uci("yacht", tmp_path, split=1)
    assert x[:, 1].tolist() == [i * 0.5 for i in range(40)]
    assert y[:, 0].tolist() == [1000 + i for i in range(40)]
    assert test.tolist() == [0, 39]
