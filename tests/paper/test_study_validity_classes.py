"""Tests of the validity study for classification: energy distance and checks."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from neuboots_paper.energy_distance import compare_replicates, energy_distance, variance_correlation
from neuboots_paper.studies import validity_classes as study
from neuboots_paper.studies.validity_classes import ENSEMBLE, ONE_TRAINING, SECOND_BOOTSTRAPS


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- distances -----------------------------------------------------------------------------------------


def mean_distance(shift: float, std: float) -> float:
    """E|Z| of Z ~ N(shift, std²), in closed form."""
    return std * math.sqrt(2 / math.pi) * math.exp(-((shift / std) ** 2) / 2) + shift * math.erf(
        shift / std / math.sqrt(2)
    )


@pytest.mark.parametrize(("shift", "std"), [(0.0, 1.0), (1.0, 1.0), (0.0, 2.0), (0.7, 0.4)])
def test_energy_distance_of_gaussians_matches_the_formula(shift: float, std: float) -> None:
    true, samples = normals(12, 4000, 1), shift + std * normals(30, 4000, 1, seed=1)
    two = mean_distance(0.0, math.sqrt(2))
    exact = (2 * mean_distance(shift, math.hypot(1, std)) - two - std * two) / two
    assert energy_distance(true, samples) == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize("size", [2, 3, 50])
def test_energy_distance_is_unbiased_for_few_replicates(size: int) -> None:
    found = [energy_distance(normals(size, 200, 3, seed=s), normals(5, 200, 3, seed=1000 + s)) for s in range(30)]
    error = float(torch.tensor(found).std()) / math.sqrt(30)
    assert abs(sum(found) / 30) < 4 * error + 1e-3


def test_energy_distance_is_scale_free_and_joint() -> None:
    true, samples = normals(20, 300, 2), normals(20, 300, 2, seed=1)
    assert energy_distance(10 * true, 10 * samples) == pytest.approx(energy_distance(true, samples))
    together = samples[..., :1].expand(-1, -1, 2)  # each output as it should be, but both the same
    assert energy_distance(true, together) > 0.03 > abs(energy_distance(true, samples))


# -- the corrected correlation -------------------------------------------------------------------------


def replicates(variances: Tensor, size: int, *, seed: int) -> Tensor:
    """(size, N, 2) with Σ_c of the variance over replicates as given, (N,)."""
    return (variances / 2).sqrt()[:, None] * normals(size, len(variances), 2, seed=seed)


@pytest.mark.parametrize("rho", [0.0, 0.6, 1.0])
def test_variance_correlation_is_corrected_for_few_replicates(rho: float) -> None:
    base, own = (normals(3000, seed=s).abs() for s in (0, 1))
    v, w = 0.2 + base, 0.2 + rho * base + math.sqrt(1 - rho**2) * own
    exact = float(torch.corrcoef(torch.stack([v, w]))[0, 1])
    true, samples = replicates(v, 8, seed=2), replicates(w, 8, seed=3)
    found = variance_correlation(true, samples)
    raw = float(torch.corrcoef(torch.stack([each.var(0).sum(-1) for each in (true, samples)]))[0, 1])
    assert found == pytest.approx(exact, abs=0.08)
    assert rho == 0 or raw < exact - 0.15  # which is what there is to correct


def test_undetermined_correlation_is_none() -> None:
    assert (
        variance_correlation(normals(3, 50, 2), normals(20, 50, 2, seed=1)) is None
    )  # halves of three have no variance
    assert variance_correlation(normals(8, 50, 2), torch.zeros(8, 50, 2)) is None  # no spread


# -- the figures of a method ---------------------------------------------------------------------------


def test_compare_replicates_finds_scale_and_shift() -> None:
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


# -- checks of the committed rows, in which one method is changed --------------------------------------

ROWS = json.loads((Path(__file__).resolve().parents[2] / "results/cpu/validity/rows/classes.json").read_text())
NEAREST = "nearest method that trains one net"
NEARER = "influence, head are nearer to a true bootstrap than those of neuboots-paper"
SPREAD = "spread of influence, head is that"
INITIAL_WEIGHTS = "initial weights and the order"


@pytest.mark.parametrize(
    ("methods", "key", "value", "claim", "holds"),
    [
        (("neuboots", *SECOND_BOOTSTRAPS), "distance", 0.0, NEAREST, True),
        (ONE_TRAINING, "distance", 9.0, NEAREST, False),
        (("influence, head",), "distance", 0.0, NEARER, True),
        (("influence, head",), "distance", 9.0, NEARER, False),
        (("influence, head",), "ratio", 1.0, SPREAD, True),
        (("influence, head",), "ratio", 1.3, SPREAD, False),
        ((ENSEMBLE,), "ratio", 0.9, INITIAL_WEIGHTS, True),
        ((ENSEMBLE,), "ratio", 0.7, INITIAL_WEIGHTS, False),  # of the variance, 49 %
    ],
)
def test_checks_follow_the_rows(methods: tuple[str, ...], key: str, value: float, claim: str, holds: bool) -> None:
    rows = [{**row, key: value} if row["method"] in methods else row for row in ROWS]
    assert [verdict.holds for verdict in study.checks(rows) if claim in verdict.claim] == [holds]


def test_methods_without_rows_are_not_checked() -> None:
    rows = [row for row in ROWS if "influence" not in row["method"]]
    assert all("influence" not in verdict.claim for verdict in study.checks(rows))
