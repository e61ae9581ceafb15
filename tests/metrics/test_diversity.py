"""Diversity metrics against scipy and scikit-learn, and edge cases."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.special
import scipy.stats
import sklearn.metrics
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from neuboots._validation import ArgumentError
from neuboots.metrics import DiversityMetrics, correlation, disagreement, pairwise_kl, q_statistic, ratio_error

LABELS = [disagreement, q_statistic, correlation, ratio_error]
many = settings(deadline=None, max_examples=40, derandomize=True)


def random_case(seed: int, B: int, num: int, classes: int) -> tuple[Tensor, Tensor]:
    """Probabilities (B, num, classes) around a common logit that leans to the truth, and the truth (num,)."""
    rng = torch.Generator().manual_seed(seed)
    truth = torch.randint(classes, (num,), generator=rng)
    common = torch.randn(num, classes, generator=rng, dtype=torch.float64)
    own = torch.randn(B, num, classes, generator=rng, dtype=torch.float64)
    return (common + own + torch.nn.functional.one_hot(truth, classes)).softmax(2), truth


cases = st.builds(random_case, st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 40), st.integers(2, 4))

# -- other libraries -----------------------------------------------------------------------------------


@many
@given(cases)
def test_metrics_agree_with_scipy_and_scikit_learn(case: tuple[Tensor, Tensor]) -> None:
    """Correlation of two yes-or-no answers is Matthews' coefficient; Q is (ω − 1)/(ω + 1), ω the odds ratio."""
    samples, truth = case
    preds = samples.argmax(2)
    right = (preds == truth).numpy()
    # With a row or column of zeros Q and correlation are 0/0: decided below.
    pairs = list(itertools.combinations(range(len(samples)), 2))
    assume(all(0 < row.sum() < len(row) for row in right))
    differ, matthews, yule = [], [], []
    for a, b in pairs:
        differ.append(sklearn.metrics.zero_one_loss(preds[a].numpy(), preds[b].numpy()))
        matthews.append(sklearn.metrics.matthews_corrcoef(right[a], right[b]))
        table = sklearn.metrics.confusion_matrix(right[a], right[b])
        odds = scipy.stats.contingency.odds_ratio(table, kind="sample").statistic
        yule.append(1.0 if math.isinf(odds) else (odds - 1) / (odds + 1))
    assert disagreement(preds, truth).item() == pytest.approx(np.mean(differ))
    assert correlation(preds, truth).item() == pytest.approx(np.mean(matthews), abs=1e-12)
    assert q_statistic(preds, truth).item() == pytest.approx(np.mean(yule), abs=1e-12)


@many
@given(cases)
def test_ratio_error_matches_definition(case: tuple[Tensor, Tensor]) -> None:
    samples, truth = case
    preds = samples.argmax(2)
    ratios = []
    for a, b in itertools.combinations(preds.tolist(), 2):
        wrong = [(g, h) for g, h, y in zip(a, b, truth.tolist(), strict=True) if g != y and h != y]
        same = sum(g == h for g, h in wrong)
        different = len(wrong) - same
        ratios.append(0.0 if different == 0 else different / same if same else math.inf)
    assert ratio_error(preds, truth).item() == pytest.approx(np.mean(ratios))


@many
@given(cases)
def test_pairwise_kl_agrees_with_scipy(case: tuple[Tensor, Tensor]) -> None:
    samples = case[0].numpy()
    theirs = [scipy.special.rel_entr(p, q).sum(1).mean() for p, q in itertools.permutations(samples, 2)]
    assert pairwise_kl(case[0]).item() == pytest.approx(np.mean(theirs))


# -- edges ---------------------------------------------------------------------------------------------

TRUTH = torch.tensor([0, 0, 0, 0])
RIGHT, WRONG, HALF = torch.tensor([0, 0, 0, 0]), torch.tensor([1, 1, 1, 1]), torch.tensor([0, 0, 1, 1])
OTHER = torch.tensor([2, 2, 2, 2])


@pytest.mark.parametrize(
    ("pair", "q", "rho", "ratio"),
    [
        ((RIGHT, RIGHT), 1, 1, 0),  # no errors
        ((WRONG, WRONG), 1, 1, 0),
        ((WRONG, OTHER), 1, 1, math.inf),  # both incorrect everywhere, never with the same prediction
        ((RIGHT, WRONG), 0, 0, 0),  # 0/0, and not equal
        ((RIGHT, HALF), 0, 0, 0),  # always correct: independent of any other
        ((WRONG, HALF), 0, 0, 0),
        ((HALF, HALF), 1, 1, 0),
        ((HALF, 1 - HALF), -1, -1, 0),
    ],
)
def test_degenerate_pairs(pair: tuple[Tensor, Tensor], q: float, rho: float, ratio: float) -> None:
    preds = torch.stack(pair)
    assert q_statistic(preds, TRUTH) == q
    assert correlation(preds, TRUTH).item() == pytest.approx(rho)
    assert ratio_error(preds, TRUTH) == ratio


def test_kl_of_zero_probability_is_finite() -> None:
    """As in `nll`, zero counts as the smallest normal number."""
    value = pairwise_kl(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    assert value.item() == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))


def test_kl_of_similar_replicates_is_precise() -> None:
    """KL is δ² / (2 p (1 − p)) to leading order: 2δ² at p = ½. A logarithm is known to 10⁻¹⁶, of 10⁻⁷."""
    delta = 1e-7
    p = torch.tensor([[[0.5, 0.5]], [[0.5 + delta, 0.5 - delta]]], dtype=torch.float64)
    assert pairwise_kl(p).item() == pytest.approx(2 * delta**2, rel=1e-7, abs=0)
    assert pairwise_kl(p[:1].expand(5, 1, 2)) == 0


def test_kl_is_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, _ = random_case(0, 3, 20, 4)
    whole = pairwise_kl(samples).item()
    monkeypatch.setattr("neuboots.metrics.classification.MAX_CHUNK_ELEMENTS", 100)  # eight inputs at a time
    assert pairwise_kl(samples).item() == pytest.approx(whole, rel=1e-14)


def test_pixels_count_as_inputs() -> None:
    samples, truth = random_case(0, 3, 24, 4)
    images = samples.view(3, 2, 3, 4, 4).movedim(-1, 2)  # (B, N, C, H, W)
    state, flat = DiversityMetrics.from_batch(images, truth.view(2, 3, 4)), DiversityMetrics.from_batch(samples, truth)
    for name in ("disagreement", "q_statistic", "correlation", "ratio_error", "pairwise_kl"):
        assert getattr(state, name).item() == pytest.approx(getattr(flat, name).item(), rel=1e-12)


# -- invalid arguments ---------------------------------------------------------------------------------

LONGS = torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: disagreement(torch.zeros(2, 3, dtype=torch.long), LONGS[:2]), "preds.shape"),
        (lambda: disagreement(torch.zeros(2, 3), LONGS), "preds.dtype"),
        (lambda: disagreement(LONGS[None], LONGS), "preds.shape"),
        (lambda: pairwise_kl(torch.full((1, 3, 2), 0.5)), "samples.shape"),
        (lambda: pairwise_kl(torch.full((3, 2), 0.5)), "samples.shape"),
        (lambda: pairwise_kl(torch.tensor([[[0.5, 0.5]], [[0.5, 0.75]]])), "probs"),
        (lambda: DiversityMetrics.from_batch(torch.full((2, 3, 2), 0.5), torch.tensor([0, 1, 2])), "labels"),
    ],
)
def test_invalid_arguments_are_errors(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.name == name
