"""Metrics that rank inputs by confidence: their definitions, their ties and their edges."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neuboots.metrics import ClassificationMetrics, ConfidenceRanking, adaptive_ece, aurc, risk_coverage_curve

many = settings(deadline=None, max_examples=50, derandomize=True)


def random_case(seed: int, num: int, classes: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num, classes, generator=rng, dtype=torch.float64)
    return logits.softmax(1), torch.randint(classes, (num,), generator=rng)


cases = st.builds(random_case, st.integers(0, 10**6), st.integers(1, 60), st.integers(2, 6))

# -- definitions ---------------------------------------------------------------------------------------


@many
@given(cases, st.integers(1, 20))
def test_adaptive_ece_is_its_definition(case: tuple[Tensor, Tensor], num_bins: int) -> None:
    """NumPy cuts the sorted inputs into parts whose sizes differ by at most one; a part may be empty."""
    probs, labels = case
    confidence, guess = (part.numpy() for part in probs.max(1))
    order = np.argsort(confidence)
    right = guess == labels.numpy()
    parts = [part for part in np.array_split(order, num_bins) if len(part)]
    gaps = [len(part) * abs(right[part].mean() - confidence[part].mean()) for part in parts]
    value = adaptive_ece(probs, labels, num_bins=num_bins).item()
    assert value == pytest.approx(sum(gaps) / len(labels))


@many
@given(cases)
def test_risk_and_coverage_are_their_definition(case: tuple[Tensor, Tensor]) -> None:
    probs, labels = case
    curve = risk_coverage_curve(probs, labels)
    confidence, guess = probs.max(1)
    assert curve.threshold.tolist() == sorted(set(confidence.tolist()), reverse=True)
    for coverage, risk, threshold in zip(curve.coverage, curve.risk, curve.threshold, strict=True):
        accepted = confidence >= threshold
        assert coverage.item() == pytest.approx(accepted.double().mean().item())
        theirs = sklearn.metrics.zero_one_loss(labels[accepted].numpy(), guess[accepted].numpy())
        assert risk.item() == pytest.approx(theirs)


# -- ties: few inputs, whose confidences are tenths ----------------------------------------------------

tenths = st.lists(st.tuples(st.integers(6, 8), st.booleans()), min_size=1, max_size=6)


def of_tenths(rows: list[tuple[int, bool]]) -> tuple[Tensor, Tensor]:
    probs = torch.tensor([[k / 10, 1 - k / 10] for k, _ in rows], dtype=torch.float64)
    return probs, torch.tensor([0 if right else 1 for _, right in rows])


@many
@given(tenths)
def test_aurc_is_the_expectation_over_the_orders_of_ties(rows: list[tuple[int, bool]]) -> None:
    found = []
    for order in itertools.permutations(rows):
        if [k for k, _ in order] != sorted((k for k, _ in rows), reverse=True):
            continue
        wrong = np.cumsum([not right for _, right in order])
        risk = wrong / np.arange(1, len(rows) + 1)
        area = np.trapezoid(risk, np.arange(1, len(rows) + 1) / len(rows)) / (1 - 1 / max(2, len(rows)))
        found.append(area if len(rows) > 1 else risk[0])
    assert aurc(*of_tenths(rows)).item() == pytest.approx(np.mean(found))


@many
@given(tenths, st.integers(1, 4))
def test_bins_of_equal_size_share_a_tie_in_proportion(rows: list[tuple[int, bool]], num_bins: int) -> None:
    """Whole numbers and fractions: each input counts with the accuracy of all that have its confidence."""
    accuracy = {}
    for k, _ in rows:
        tied = [right for other, right in rows if other == k]
        accuracy[k] = Fraction(sum(tied), len(tied))
    rising = sorted(k for k, _ in rows)
    parts = np.array_split(np.array(rising), num_bins)
    total = sum(abs(sum(accuracy[int(k)] - Fraction(int(k), 10) for k in part)) for part in parts)
    value = adaptive_ece(*of_tenths(rows), num_bins=num_bins).item()
    assert value == pytest.approx(float(total) / len(rows), abs=1e-15)


# -- edges ---------------------------------------------------------------------------------------------


def test_a_bin_of_its_own_for_each_of_few_inputs() -> None:
    probs, labels = torch.tensor([[0.6, 0.4], [0.9, 0.1]]), torch.tensor([0, 1])
    assert adaptive_ece(probs, labels, num_bins=15).item() == pytest.approx((0.4 + 0.9) / 2)


def test_right_only_where_confident_has_the_least_area() -> None:
    """Errors come last: risk is 0 up to coverage 1/2, then 1/3 and 1/2."""
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    assert aurc(probs, torch.tensor([0, 0, 1, 1])).item() == pytest.approx((1 / 3 + 1 / 4) / 3)
    assert aurc(probs, torch.tensor([0, 0, 0, 0])) == 0
    assert aurc(probs, torch.tensor([1, 1, 1, 1])) == 1


def test_a_tally_of_many_parts_joins_them_all() -> None:
    probs, labels = random_case(0, 1000, 3)
    tally = sum(ClassificationMetrics.from_batch(p[None], y[None]) for p, y in zip(probs, labels, strict=True))
    assert tally.count == 1000
    assert tally.aurc.item() == pytest.approx(aurc(probs, labels).item(), rel=1e-12)


def test_adaptive_ece_needs_a_bin() -> None:
    with pytest.raises(ValueError, match=r"^num_bins is 0; expected a whole number of at least 1: pass such a number$"):
        adaptive_ece(torch.full((2, 2), 0.5), torch.tensor([0, 0]), num_bins=0)


@pytest.mark.parametrize(
    ("confidence", "right", "sentence"),
    [
        (torch.rand(3), torch.ones(2) > 0, r"got shapes confidence \(3,\) and right \(2,\); expected one shape"),
        (torch.tensor([0.5, torch.nan]), torch.ones(2) > 0, "got 1 NaN among 2 of confidence; expected numbers"),
        (torch.rand(2), torch.ones(2), "right of torch.float32; expected floats and torch.bool"),
        (torch.arange(2), torch.ones(2) > 0, "got confidence of torch.int64 and right of torch.bool; expected floats"),
        (np.ones(2), torch.ones(2) > 0, "got confidence of type ndarray; expected a tensor"),
    ],
)
def test_a_ranking_refuses_what_has_no_rank(confidence: Tensor, right: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ConfidenceRanking.from_confidence(confidence, right)
