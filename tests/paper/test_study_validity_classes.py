"""The study of validity for classes: distances with known values, a smoke run, and verdicts that follow the rows."""

import json
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from neuboots_paper.energy_distance import StoredPredictor, compare_replicates, energy_distance, variance_correlation
from neuboots_paper.studies import validity_classes as study
from neuboots_paper.studies.validity_classes import (
    ENSEMBLE,
    ONE_TRAINING,
    ORACLE,
    POST_HOC,
    SECOND_BOOTSTRAPS,
    TRAINED,
    TRUTHS,
    ClassSettings,
)
from neuboots_paper.study import RunContext


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- distances -----------------------------------------------------------------------------------------


def mean_distance(shift: float, std: float) -> float:
    """E|Z| of Z ~ N(shift, std²), in closed form."""
    return std * math.sqrt(2 / math.pi) * math.exp(-((shift / std) ** 2) / 2) + shift * math.erf(
        shift / std / math.sqrt(2)
    )


@pytest.mark.parametrize(("shift", "std"), [(0.0, 1.0), (1.0, 1.0), (0.0, 2.0), (0.7, 0.4)])
def test_the_distance_of_two_gaussians_is_that_of_the_formula(shift: float, std: float) -> None:
    true, samples = normals(12, 4000, 1), shift + std * normals(30, 4000, 1, seed=1)
    two = mean_distance(0.0, math.sqrt(2))
    exact = (2 * mean_distance(shift, math.hypot(1, std)) - two - std * two) / two
    assert energy_distance(true, samples) == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize("size", [2, 3, 50])
def test_few_replicates_of_the_same_distribution_are_no_farther_than_many(size: int) -> None:
    found = [energy_distance(normals(size, 200, 3, seed=s), normals(5, 200, 3, seed=1000 + s)) for s in range(30)]
    error = float(torch.tensor(found).std()) / math.sqrt(30)
    assert abs(sum(found) / 30) < 4 * error + 1e-3


def test_the_distance_has_no_unit_and_sees_what_outputs_do_together() -> None:
    true, samples = normals(20, 300, 2), normals(20, 300, 2, seed=1)
    assert energy_distance(10 * true, 10 * samples) == pytest.approx(energy_distance(true, samples))
    together = samples[..., :1].expand(-1, -1, 2)  # each output as it should be, but both the same
    assert energy_distance(true, together) > 0.03 > abs(energy_distance(true, samples))


# -- the corrected correlation -------------------------------------------------------------------------


def replicates(variances: Tensor, size: int, *, seed: int) -> Tensor:
    """(size, N, 2) with Σ_c of the variance over replicates as given, (N,)."""
    return (variances / 2).sqrt()[:, None] * normals(size, len(variances), 2, seed=seed)


@pytest.mark.parametrize("rho", [0.0, 0.6, 1.0])
def test_the_correlation_is_that_of_the_variances_without_the_noise_of_few_replicates(rho: float) -> None:
    base, own = (normals(3000, seed=s).abs() for s in (0, 1))
    v, w = 0.2 + base, 0.2 + rho * base + math.sqrt(1 - rho**2) * own
    exact = float(torch.corrcoef(torch.stack([v, w]))[0, 1])
    true, samples = replicates(v, 8, seed=2), replicates(w, 8, seed=3)
    found = variance_correlation(true, samples)
    raw = float(torch.corrcoef(torch.stack([each.var(0).sum(-1) for each in (true, samples)]))[0, 1])
    assert found == pytest.approx(exact, abs=0.08)
    assert rho == 0 or raw < exact - 0.15  # which is what there is to correct


def test_a_correlation_that_cannot_be_told_is_none() -> None:
    assert (
        variance_correlation(normals(3, 50, 2), normals(20, 50, 2, seed=1)) is None
    )  # halves of three have no variance
    assert variance_correlation(normals(8, 50, 2), torch.zeros(8, 50, 2)) is None  # no spread


# -- the figures of a method ---------------------------------------------------------------------------


def test_drawn_replicates_are_those_of_the_rows_that_are_asked_for() -> None:
    samples = normals(7, 10, 3)
    found = StoredPredictor(samples).predict(torch.tensor([4, 0, 4]), 5).samples
    assert torch.equal(found, samples[:5, [4, 0, 4]])


def test_a_spread_of_twice_the_size_around_a_moved_centre_is_found() -> None:
    centre, labels = 2 * normals(150, 4), torch.arange(150) % 4
    true = (centre + normals(16, 150, 4, seed=1)).float()
    wide = (centre + 2 * normals(60, 150, 4, seed=2)).float()
    moved = (centre + 1.5 + 3 * torch.eye(4)[0] + normals(60, 150, 4, seed=2)).float()
    same = compare_replicates(true, (centre + normals(60, 150, 4, seed=3)).float(), labels)
    assert same["distance"] == pytest.approx(0.0, abs=0.02)
    assert same["ratio"] == pytest.approx(1.0, abs=0.1)
    assert same["probability_ratio"] == pytest.approx(1.0, abs=0.1)
    wide_found, moved_found = compare_replicates(true, wide, labels), compare_replicates(true, moved, labels)
    assert wide_found["ratio"] == pytest.approx(2.0, rel=0.1)
    assert wide_found["finding"] == "wide"
    assert moved_found["ratio"] == pytest.approx(1.0, abs=0.1)
    assert moved_found["shift"] > 0.5 > same["shift"]  # a shift of all logits is none, one of a single logit is
    assert min(wide_found["distance"], moved_found["distance"]) > 0.1
    probs = wide.softmax(2).mean(0)
    assert wide_found["nll"] == pytest.approx(float(-probs[torch.arange(150), labels].log().mean()), rel=1e-4)
    assert wide_found["error"] == pytest.approx(float((probs.argmax(1) != labels).double().mean()))


# -- a job at the smallest scale ----------------------------------------------------------------------


@cache
def smoke() -> list[dict[str, Any]]:
    settings = ClassSettings.from_preset("smoke")
    return [
        {"data": data, "seed": seed, **row}
        for data in settings.data
        for seed in settings.seeds
        for row in study.measure(data, seed, settings, RunContext())
    ]


def test_a_unit_has_a_row_for_every_method_and_truth_and_nothing_that_json_cannot_hold() -> None:
    rows = smoke()
    for data, methods in (("digits", [*TRAINED, *POST_HOC]), ("digits-30", ONE_TRAINING)):  # kernels are for few rows
        names = [(TRUTHS[0], name) for name in (*SECOND_BOOTSTRAPS, ORACLE, "deterministic", *methods, ENSEMBLE)]
        names += [(TRUTHS[1], name) for name in (SECOND_BOOTSTRAPS[1], "deterministic", *methods)]
        assert [(row["truth"], row["method"]) for row in rows if row["data"] == data] == names
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    members = ClassSettings.from_preset("smoke").members[0]
    costs = {row["method"]: row["cost"] for row in rows}
    assert {costs[method] for method in ONE_TRAINING} == {1}
    assert costs[ENSEMBLE] == costs[SECOND_BOOTSTRAPS[0]] == members


def test_the_net_without_spread_is_flat_and_methods_around_it_have_its_centre() -> None:
    for row in smoke():
        assert (row["ratio"] == 0) == (row["method"] == "deterministic")
        if row["method"] == "deterministic":
            beside = [other for other in smoke() if all(other[key] == row[key] for key in ("data", "truth"))]
            shifts = {other["method"]: other["shift"] for other in beside}
            assert shifts.get(ORACLE, row["shift"]) == pytest.approx(row["shift"], abs=1e-5)


# -- tables, verdicts, figures -------------------------------------------------------------------------


def made_up(**distances: float) -> list[dict[str, Any]]:
    """Rows of two sets and three seeds, all methods at a distance of 0.5 and of the right size, but for these."""
    names = {
        name.replace(" ", "_").replace(",", "").replace("-", "_"): name for name in (*ONE_TRAINING, *SECOND_BOOTSTRAPS)
    }
    given = {names[key]: value for key, value in distances.items()}
    figures = {
        **{"cost": 1, "time": 1.0, "ratio": 1.0, "probability_ratio": 1.0, "probability_correlation": 0.9, "off": 1.2},
        **{"shift": 0.6, "error": 0.1, "nll": 0.3, "ece": 0.05},
    }
    return [
        {"data": data, "seed": seed, "truth": truth, "method": method, **figures,
         "distance": given.get(method, 0.0 if method in SECOND_BOOTSTRAPS else 0.5) + 0.01 * seed}
        for data in ("a", "b")
        for seed in range(3)
        for truth in TRUTHS
        for method in (*SECOND_BOOTSTRAPS, ORACLE, "deterministic", *ONE_TRAINING, ENSEMBLE)
        if truth == TRUTHS[0] or method not in (SECOND_BOOTSTRAPS[0], ORACLE, ENSEMBLE)
    ]  # fmt: skip


def holds(rows: list[dict[str, Any]], words: str) -> bool | None:
    (found,) = [verdict.holds for verdict in study.checks(rows) if words in verdict.claim]
    return found


def test_as_near_as_another_bootstrap_goes_by_the_nearest_method() -> None:
    words = "nearest method that trains one net"
    assert holds(made_up(), words) is False
    assert holds(made_up(neuboots=0.01), words) is True


def test_nearer_goes_by_the_distance_on_every_set() -> None:
    words = "influence, head are nearer to a true bootstrap than those of neuboots-paper"
    rows = made_up(influence_head=0.2)
    assert holds(rows, words) is True
    assert holds(made_up(influence_head=0.8), words) is False
    for row in rows:
        if row["data"] == "b" and row["method"] == "neuboots-paper":
            row["distance"] = 0.1
    assert holds(rows, words) is False


def test_sizes_and_the_share_of_first_weights_go_by_the_ratio() -> None:
    rows = made_up()
    assert holds(rows, "spread of influence, head is that") is True
    for row in rows:
        if row["data"] == "b" and row["truth"] == TRUTHS[1]:
            row["ratio"] = 1.3
    assert holds(rows, "spread of influence, head is that") is False
    assert holds(rows, "initial weights and the order") is True
    for row in rows:
        if row["method"] == ENSEMBLE:
            row["ratio"] = 0.7  # of the variance, 49 %
    assert holds(rows, "initial weights and the order") is False


def test_methods_that_were_not_measured_are_not_claimed() -> None:
    rows = [row for row in made_up() if "influence" not in row["method"]]
    assert all("influence" not in verdict.claim for verdict in study.checks(rows))
