"""Tests of neuboots_paper.checks; order is compared with scipy's paired t-test."""

import pytest
from scipy.stats import ttest_rel

from neuboots.report.checks import Check
from neuboots_paper.checks import combine_checks, compare_groups

A, B = {"method": "a"}, {"method": "b"}


def rows(a: list[float], b: list[float]) -> list[dict[str, object]]:
    sides = (("a", a), ("b", b))
    return [{"method": name, "seed": seed, "ece": value} for name, side in sides for seed, value in enumerate(side)]


@pytest.mark.parametrize("seed", range(20))
def test_order_agrees_with_the_paired_t_test(seed: int) -> None:
    import numpy as np

    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=5), rng.normal(size=5) + rng.choice([-2.0, 0.0, 2.0])
    found = compare_groups("c", rows([*a], [*b]), "ece", A, B, expect="lower")
    p, below = float(ttest_rel(a, b).pvalue), bool(a.mean() < b.mean())
    assert found.holds is (None if p > 0.05 else below)
    assert compare_groups("c", rows([*a], [*b]), "ece", A, B, expect="higher").holds is (
        None if p > 0.05 else not below
    )


def test_equality_holds_if_the_interval_is_within_the_margin() -> None:
    near = rows([0.10, 0.11, 0.12], [0.101, 0.111, 0.121])
    assert compare_groups("c", near, "ece", A, B, expect="equal", scale=100, margin=0.5).holds is True
    assert compare_groups("c", near, "ece", A, B, expect="equal", scale=100, margin=0.05).holds is False
    wide = rows([0.10, 0.20, 0.00], [0.0, 0.1, 0.2])
    assert compare_groups("c", wide, "ece", A, B, expect="equal", scale=100, margin=0.5).holds is None


def test_unpaired_rows_are_ignored() -> None:
    found = compare_groups("c", [*rows([1.0, 1.1, 5.0], [2.0, 2.15])], "ece", A, B, expect="lower")
    assert found.holds is True
    assert "over 2 pairs" in found.evidence


def test_fewer_than_two_pairs_leave_the_claim_open() -> None:
    one = compare_groups("c", rows([1.0], [2.0]), "ece", A, B, expect="lower")
    assert one.holds is None
    assert "in a single pair" in one.evidence
    assert compare_groups("c", rows([1.0], []), "ece", A, B, expect="lower").holds is None
    missing = [*rows([1.0, 1.0], [2.0, 2.0]), {"method": "a", "seed": 2, "ece": None}]
    assert "over 2 pairs" in compare_groups("c", missing, "ece", A, B, expect="lower").evidence


def test_repeated_rows_of_a_pair_are_averaged() -> None:
    twice = [row | {"corruption": c} for c in ("blur", "noise") for row in rows([1.0, 1.2, 1.1], [2.0, 2.3, 2.1])]
    assert "over 3 pairs" in compare_groups("c", twice, "ece", A, B, expect="lower").evidence


def test_combine_checks_takes_the_worst_outcome() -> None:
    yes, no, undecided = (Check("c", holds, "f") for holds in (True, False, None))
    assert combine_checks("c", [yes, yes]).holds is True
    assert combine_checks("c", [yes, undecided]).holds is None
    assert combine_checks("c", [yes, undecided, no]).holds is False
    assert combine_checks("c", []).holds is None
    assert str(no) == "does NOT hold: c (f)"


def test_negative_zero_is_printed_as_zero() -> None:
    found = compare_groups("c", rows([0.1, 0.2], [0.1 + 1e-9, 0.2]), "ece", A, B, expect="lower").evidence
    assert "difference +0.00 ± 0.00" in found
