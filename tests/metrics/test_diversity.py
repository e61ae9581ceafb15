"""Metrics of pairs of replicates against scipy and scikit-learn, and at their edges."""

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
def test_agrees_with_scipy_and_scikit_learn(case: tuple[Tensor, Tensor]) -> None:
    """Correlation of two yes-or-no answers is Matthews' coefficient; Q is (ω − 1)/(ω + 1), ω the odds ratio."""
    samples, truth = case
    guesses = samples.argmax(2)
    right = (guesses == truth).numpy()
    # With a row or column of zeros Q and correlation are 0/0: decided below.
    pairs = list(itertools.combinations(range(len(samples)), 2))
    assume(all(0 < row.sum() < len(row) for row in right))
    differ, matthews, yule = [], [], []
    for a, b in pairs:
        differ.append(sklearn.metrics.zero_one_loss(guesses[a].numpy(), guesses[b].numpy()))
        matthews.append(sklearn.metrics.matthews_corrcoef(right[a], right[b]))
        table = sklearn.metrics.confusion_matrix(right[a], right[b])
        odds = scipy.stats.contingency.odds_ratio(table, kind="sample").statistic
        yule.append(1.0 if math.isinf(odds) else (odds - 1) / (odds + 1))
    assert disagreement(guesses, truth).item() == pytest.approx(np.mean(differ))
    assert correlation(guesses, truth).item() == pytest.approx(np.mean(matthews), abs=1e-12)
    assert q_statistic(guesses, truth).item() == pytest.approx(np.mean(yule), abs=1e-12)


@many
@given(cases)
def test_ratio_error_is_its_definition(case: tuple[Tensor, Tensor]) -> None:
    samples, truth = case
    guesses = samples.argmax(2)
    ratios = []
    for a, b in itertools.combinations(guesses.tolist(), 2):
        wrong = [(g, h) for g, h, y in zip(a, b, truth.tolist(), strict=True) if g != y and h != y]
        same = sum(g == h for g, h in wrong)
        different = len(wrong) - same
        ratios.append(0.0 if different == 0 else different / same if same else math.inf)
    assert ratio_error(guesses, truth).item() == pytest.approx(np.mean(ratios))


@many
@given(cases)
def test_pairwise_kl_agrees_with_scipy(case: tuple[Tensor, Tensor]) -> None:
    samples = case[0].numpy()
    theirs = [scipy.special.rel_entr(p, q).sum(1).mean() for p, q in itertools.permutations(samples, 2)]
    assert pairwise_kl(case[0]).item() == pytest.approx(np.mean(theirs))


@many
@given(cases)
def test_the_bundle_reads_guesses_off_the_samples(case: tuple[Tensor, Tensor]) -> None:
    samples, truth = case
    tally = DiversityMetrics.from_batch(samples, truth)
    for metric in LABELS:
        assert getattr(tally, metric.__name__) == metric(samples.argmax(2), truth)
    assert tally.pairwise_kl == pairwise_kl(samples)
    assert tally.count == len(truth)


# -- edges ---------------------------------------------------------------------------------------------

TRUTH = torch.tensor([0, 0, 0, 0])
RIGHT, WRONG, HALF = torch.tensor([0, 0, 0, 0]), torch.tensor([1, 1, 1, 1]), torch.tensor([0, 0, 1, 1])
OTHER = torch.tensor([2, 2, 2, 2])


@pytest.mark.parametrize(
    ("pair", "q", "rho", "ratio"),
    [
        ((RIGHT, RIGHT), 1, 1, 0),  # nobody errs: nothing differs
        ((WRONG, WRONG), 1, 1, 0),
        ((WRONG, OTHER), 1, 1, math.inf),  # both err everywhere, never alike
        ((RIGHT, WRONG), 0, 0, 0),  # 0/0, and not alike
        ((RIGHT, HALF), 0, 0, 0),  # who is always right is independent of anybody
        ((WRONG, HALF), 0, 0, 0),
        ((HALF, HALF), 1, 1, 0),
        ((HALF, 1 - HALF), -1, -1, 0),
    ],
)
def test_pairs_without_variety(pair: tuple[Tensor, Tensor], q: float, rho: float, ratio: float) -> None:
    guesses = torch.stack(pair)
    assert q_statistic(guesses, TRUTH) == q
    assert correlation(guesses, TRUTH).item() == pytest.approx(rho)
    assert ratio_error(guesses, TRUTH) == ratio


def test_independent_errors_have_no_correlation() -> None:
    guesses = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])
    assert q_statistic(guesses, TRUTH) == 0
    assert correlation(guesses, TRUTH) == 0


def test_a_probability_of_zero_has_a_finite_divergence() -> None:
    """As in `nll`, zero counts as the smallest normal number."""
    value = pairwise_kl(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    assert value.item() == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))


def test_replicates_that_are_almost_the_same_lose_few_digits() -> None:
    """KL is δ² / (2 p (1 − p)) to leading order: 2δ² at p = ½. A logarithm is known to 10⁻¹⁶, of 10⁻⁷."""
    delta = 1e-7
    p = torch.tensor([[[0.5, 0.5]], [[0.5 + delta, 0.5 - delta]]], dtype=torch.float64)
    assert pairwise_kl(p).item() == pytest.approx(2 * delta**2, rel=1e-7, abs=0)
    assert pairwise_kl(p[:1].expand(5, 1, 2)) == 0


def test_many_probabilities_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, _ = random_case(0, 3, 20, 4)
    whole = pairwise_kl(samples).item()
    monkeypatch.setattr("neuboots.metrics._base.MAX_CHUNK_ELEMENTS", 100)  # eight inputs at a time
    assert pairwise_kl(samples).item() == pytest.approx(whole, rel=1e-14)


def test_pixels_are_inputs_of_their_own() -> None:
    samples, truth = random_case(0, 3, 24, 4)
    images = samples.view(3, 2, 3, 4, 4).movedim(-1, 2)  # (B, N, C, H, W)
    tally, flat = DiversityMetrics.from_batch(images, truth.view(2, 3, 4)), DiversityMetrics.from_batch(samples, truth)
    for figure in ("disagreement", "q_statistic", "correlation", "ratio_error", "pairwise_kl"):
        assert getattr(tally, figure).item() == pytest.approx(getattr(flat, figure).item(), rel=1e-12)


def test_the_order_of_the_replicates_does_not_matter() -> None:
    samples, truth = random_case(0, 4, 30, 3)
    for metric in LABELS:
        value = metric(samples.argmax(2).flip(0), truth).item()
        assert value == pytest.approx(metric(samples.argmax(2), truth).item())
    assert pairwise_kl(samples.flip(0)).item() == pytest.approx(pairwise_kl(samples).item())


# -- bad arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", LABELS)
@pytest.mark.parametrize(
    ("guesses", "truth", "sentence"),
    [
        (
            torch.zeros(2, 3, dtype=torch.long),
            torch.zeros(4, dtype=torch.long),
            "guesses has shape (2, 3) and truth (4,); expected (B, N) and (N,): reshape one of them",
        ),
        (
            torch.zeros(2, 3),
            torch.zeros(3, dtype=torch.long),
            "guesses is torch.float32 and truth torch.int64; expected integers: pass labels, such as samples.argmax(2)",
        ),
        (
            torch.zeros(1, 3, dtype=torch.long),
            torch.zeros(3, dtype=torch.long),
            "got B = 1 replicate(s); expected at least 2, which make a pair",
        ),
    ],
)
def test_bad_guesses_get_one_sentence(
    metric: Callable[..., Tensor], guesses: Tensor, truth: Tensor, sentence: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole sentence is compared)
        metric(guesses, truth)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("samples", "sentence"),
    [
        (
            torch.full((1, 3, 2), 0.5),
            "samples has shape (1, 3, 2); expected (B, N, C, *) with B ≥ 2, which make a pair",
        ),
        (torch.full((3, 2), 0.5), "samples has shape (3, 2); expected (B, N, C, *) with B ≥ 2, which make a pair"),
        (
            torch.tensor([[[0.5, 0.5]], [[0.5, 0.75]]]),
            "probs has a smallest entry of 0.5 and a row whose sum misses 1 by 0.25; "
            "expected probabilities: pass logits through softmax(1) first",
        ),
    ],
)
def test_bad_samples_get_one_sentence(samples: Tensor, sentence: str) -> None:
    for call in (pairwise_kl, lambda samples: DiversityMetrics.from_batch(samples, torch.zeros(3, dtype=torch.long))):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole sentence is compared)
            call(samples)
        assert str(caught.value) == sentence


def test_labels_are_checked_too() -> None:
    samples = torch.full((2, 3, 2), 0.5)
    with pytest.raises(ValueError, match=r"^labels run from 0 to 2; expected 0 to 1 for 2 classes: "):
        DiversityMetrics.from_batch(samples, torch.tensor([0, 1, 2]))
