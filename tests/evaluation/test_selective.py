"""Selective prediction: the curve against loops, a golden area, and the frequency with which the guarantee holds."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import _reference as oracle
import numpy as np
import pytest
import scipy.stats
import torch
from _nets import Stored, numbered
from _reference import standard_errors
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from neuboots import NeuBoots, TrainingConfig
from neuboots._validation import ArgumentError
from neuboots.evaluation.selective import (
    SelectivePredictor,
    evaluate_selective_prediction,
    fit_risk_controlled_threshold,
)
from neuboots.methods import DeterministicPredictor
from neuboots.prediction import Predictor, Summary

LOGITS = DeterministicPredictor(nn.Identity())  # the input is the output
quiet: dict[str, Any] = {"progress": False}
one: dict[str, Any] = {"progress": False, "num_samples": 1}


def seeded_rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_logits(confidence: Tensor, preds: Tensor) -> Tensor:
    """Two logits whose softmax gives the prediction this probability."""
    margin = torch.logit(confidence.double())
    return torch.stack([margin.where(preds == 0, 0.0), margin.where(preds == 1, 0.0)], 1)


@pytest.fixture(scope="module")
def golden() -> tuple[Predictor, TensorDataset]:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(500, 4)) * 2
    samples = logits[None] + rng.normal(size=(8, 500, 4)) * 0.7
    weights = np.exp(logits)
    labels = np.array([rng.choice(4, p=p) for p in weights / weights.sum(1, keepdims=True)])
    return Stored(torch.tensor(samples)), numbered(torch.tensor(labels))


def test_golden_aurc(golden: tuple[Predictor, TensorDataset]) -> None:
    """As torch-uncertainty gives it."""
    found = evaluate_selective_prediction(*golden, num_samples=8, **quiet)
    assert f"{found.aurc:.7f}" == "0.1592960"
    assert f"{found.risk:.3f}" == "0.320"


# -- the curve -----------------------------------------------------------------------------------------

SCORES: dict[str, Callable[[dict[str, np.ndarray]], np.ndarray]] = {
    "confidence": lambda values: values["confidence"],
    "entropy": lambda values: -values["entropy"],
    "mutual_information": lambda values: -values["mutual_information"],
    "std": lambda values: -values["std"].mean(1),
}


@pytest.mark.parametrize("score", SCORES)
def test_score_ranks_by_definition(score: Any, golden: tuple[Predictor, TensorDataset]) -> None:
    predictor, data = golden
    assert isinstance(predictor, Stored)
    values = oracle.figures(predictor.samples[:, :60].numpy())
    labels = data.tensors[1][:60]
    rows = numbered(labels)
    found = evaluate_selective_prediction(predictor, rows, score=score, num_samples=8, **quiet)
    expected, wrong = SCORES[score](values), values["labels"] != labels.numpy()
    order = sorted(range(60), key=lambda i: -expected[i])
    for k in range(1, 61):  # no ties
        assert found.curve.coverage[k - 1].item() == pytest.approx(k / 60)
        assert found.curve.risk[k - 1].item() == pytest.approx(np.mean(wrong[order[:k]]))
        assert found.curve.threshold[k - 1].item() == pytest.approx(expected[order[k - 1]])
        assert found.risk_at(k / 60) == pytest.approx(np.mean(wrong[order[:k]]))
        kept = expected >= found.threshold_for(coverage=k / 60)
        assert kept.sum() == k
    trapezoid = scipy.integrate.trapezoid(found.curve.risk.numpy(), found.curve.coverage.numpy())
    assert found.aurc == pytest.approx(trapezoid / (1 - 1 / 60))


def margin(summary: Summary) -> Tensor:
    first, second = summary.probs.topk(2, dim=1).values.unbind(1)
    return first - second


def test_score_may_be_a_function_of_the_summary(golden: tuple[Predictor, TensorDataset]) -> None:
    named = evaluate_selective_prediction(*golden, score=margin, num_samples=8, **quiet)
    assert "score margin" in str(named)
    assert 0 < named.excess_aurc < named.aurc < named.risk
    assert evaluate_selective_prediction(
        *golden, score=lambda s: s.confidence, num_samples=8, **quiet
    ).aurc == pytest.approx(evaluate_selective_prediction(*golden, num_samples=8, **quiet).aurc)
    arrays = evaluate_selective_prediction(*golden, score=lambda s: -s.entropy.numpy(), num_samples=8, **quiet)
    assert arrays.aurc == evaluate_selective_prediction(*golden, score="entropy", num_samples=8, **quiet).aurc


def test_perfect_score_has_no_excess_aurc() -> None:
    """Confident where correct, uncertain where incorrect: no risk up to the accuracy, and no excess."""
    right = torch.arange(50) % 5 > 0  # accuracy 0.8
    rows = TensorDataset(make_logits(torch.where(right, 0.99, 0.6), torch.zeros(50)), (~right).long())
    found = evaluate_selective_prediction(LOGITS, rows, **one)
    assert found.excess_aurc == 0
    assert found.risk == pytest.approx(0.2)
    for fraction in (0.02, 0.5, 0.8):
        assert found.risk_at(fraction) == 0
    best = np.cumsum([0] * 40 + [1] * 10) / np.arange(1, 51)
    assert found.aurc == pytest.approx((best.sum() - best[-1] / 2) / 49)
    assert found.threshold_for(risk=0.0) == pytest.approx((0.99 + 0.6) / 2)
    worst = TensorDataset(make_logits(torch.where(right, 0.6, 0.99), torch.zeros(50)), (~right).long())
    assert evaluate_selective_prediction(LOGITS, worst, **one).excess_aurc > 0.3


def test_constant_score_has_constant_risk() -> None:
    """Inputs of one score are accepted together, whatever their order."""
    right = torch.arange(40) % 4 > 0
    logits = make_logits(torch.full((40,), 0.7), torch.zeros(40))
    for order in (torch.arange(40), right.long().argsort(), (~right).long().argsort()):
        found = evaluate_selective_prediction(LOGITS, TensorDataset(logits[order], (~right).long()[order]), **one)
        assert found.curve.coverage.tolist() == [1.0]
        assert [found.risk_at(fraction) for fraction in (0.1, 0.5, 1.0)] == [0.25] * 3
        assert found.aurc == pytest.approx(0.25)
        assert found.threshold_for(risk=0.24) == math.inf
        assert found.threshold_for(risk=0.25) == -math.inf


def test_result_is_independent_of_batch_size(golden: tuple[Predictor, TensorDataset]) -> None:
    predictor, data = golden
    expected = evaluate_selective_prediction(predictor, data, num_samples=8, batch_size=500, **quiet)
    found = evaluate_selective_prediction(predictor, DataLoader(data, batch_size=33), num_samples=8, **quiet)
    assert found.count == expected.count == 500
    assert (found.aurc, found.excess_aurc) == pytest.approx((expected.aurc, expected.excess_aurc), rel=1e-12)
    torch.testing.assert_close(found.curve.risk, expected.curve.risk)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("num", [1, 30])
def test_all_correct_and_all_incorrect(right: bool, num: int) -> None:
    """One class is present, and the predictor always or never names it."""
    logits = make_logits(torch.linspace(0.6, 0.9, num), torch.zeros(num))
    found = evaluate_selective_prediction(LOGITS, TensorDataset(logits, torch.full((num,), int(not right))), **one)
    risk = 0.0 if right else 1.0
    assert (found.risk, found.aurc, found.excess_aurc, found.risk_at(0.5)) == (risk, risk, 0.0, risk)
    assert found.threshold_for(risk=0.5) == (-math.inf if right else math.inf)
    assert found.threshold_for(coverage=1.0) == -math.inf
    assert f"N = {num}, B = 1, seed 0, score confidence" in str(found)


def test_threshold_for_coverage_is_exact_in_decimals() -> None:
    """0.1 + 0.2 of 100 rows is 30 of them, not 31."""
    confidence = torch.linspace(0.55, 0.95, 100)
    rows = TensorDataset(make_logits(confidence, torch.zeros(100)), torch.zeros(100).long())
    found = evaluate_selective_prediction(LOGITS, rows, **one)
    for fraction in (0.07, 0.1 + 0.2, 0.57, 1.0):
        assert (confidence.double() >= found.threshold_for(coverage=fraction)).sum() == round(100 * fraction)


def test_regression_counts_errors_beyond_tolerance() -> None:
    rng = seeded_rng(0)
    samples = torch.randn(6, 200, 2, generator=rng) * torch.rand(200, 1, generator=rng)
    y = 0.5 * torch.randn(200, 2, generator=rng)
    found = evaluate_selective_prediction(
        Stored(samples), numbered(y), score="std", tolerance=0.7, num_samples=6, **quiet
    )
    wrong = ((samples.mean(0) - y).abs() > 0.7).any(1)
    std = samples.std(0).mean(1)
    assert found.risk == pytest.approx(wrong.double().mean().item())
    assert found.risk_at(0.25) == pytest.approx(wrong[std.argsort()[:50]].double().mean().item())
    mean, abstain = found.wrap(Stored(samples), coverage=0.25).predict(torch.arange(200)[:, None], **quiet)
    torch.testing.assert_close(mean, samples.mean(0))
    assert torch.equal((~abstain).nonzero().flatten(), std.argsort()[:50].sort().values)


@pytest.mark.parametrize("ignored", [False, True])
def test_pixels_count_as_inputs(ignored: bool) -> None:
    rng = seeded_rng(0)
    logits, labels = torch.randn(6, 3, 4, 2, generator=rng), torch.randint(3, (6, 4, 2), generator=rng)
    if ignored:
        labels[:, 1], labels[2] = 255, 255
    kept = labels.flatten() != 255
    found = evaluate_selective_prediction(LOGITS, TensorDataset(logits, labels), ignore_index=255, batch_size=1, **one)
    flat = logits.movedim(1, -1).flatten(0, -2)[kept]
    alone = evaluate_selective_prediction(LOGITS, TensorDataset(flat, labels.flatten()[kept]), **one)
    assert found.count == alone.count == kept.sum()
    assert (found.risk, found.aurc) == (pytest.approx(alone.risk), pytest.approx(alone.aurc))
    torch.testing.assert_close(found.curve.threshold, alone.curve.threshold)
    chosen, abstain = found.wrap(LOGITS, coverage=0.5).predict(logits, **quiet)
    assert chosen.shape == abstain.shape == (6, 4, 2)
    assert abstain.flatten()[kept].sum() == kept.sum() // 2


# -- the guarantee -------------------------------------------------------------------------------------


def confident_rows(seed: int, num: int, *, digits: int | None, risk_of: Callable[[Tensor], Tensor]) -> TensorDataset:
    """Confidence g uniform on (½, 1), wrong with probability risk_of(g)."""
    rng = seeded_rng(seed)
    g = 0.5 + 0.4999 * torch.rand(num, generator=rng, dtype=torch.float64)
    g = g if digits is None else g.round(decimals=digits).clamp(0.51, 0.99)
    wrong = torch.rand(num, generator=rng) < risk_of(g)
    return TensorDataset(make_logits(g, torch.zeros(num)), wrong.long())


def falling(g: Tensor) -> Tensor:
    """Risk at t: the mean of 1 − g over (t, 1), which is (1 − t)/2."""
    return 1 - g


def rising_at_the_end(g: Tensor) -> Tensor:
    """The most confident hundredth is worse than the rest: the risk at t first falls, then rises."""
    return torch.where(g > 0.995, 0.2, 1 - g)


@pytest.mark.parametrize(
    ("risk_of", "digits"),
    [(rising_at_the_end, None), *(pytest.param(falling, digits, marks=pytest.mark.slow) for digits in (None, 2))],
)
def test_risk_guarantee_holds_with_probability_one_minus_delta(
    risk_of: Callable[[Tensor], Tensor], digits: int | None
) -> None:
    """Over 150 calibration sets; the true risk at a threshold is a mean over a fine grid."""
    risk, delta, draws = 0.1, 0.1, 150
    grid = 0.5 + 0.4999 * (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    rounded = grid if digits is None else grid.round(decimals=digits).clamp(0.51, 0.99)
    true = risk_of(rounded).flip(0).cumsum(0) / torch.arange(1, 20_001)  # of the k most confident
    broken, naive, coverages = 0, 0, []
    for seed in range(draws):
        rows = confident_rows(seed, 500, digits=digits, risk_of=risk_of)
        found = fit_risk_controlled_threshold(LOGITS, rows, risk=risk, delta=delta, **one)
        kept = int((rounded >= found.threshold).sum())
        broken += bool(kept and true[kept - 1] > risk)
        coverages.append(kept / len(grid))
        if seed < 60:
            kept = int((rounded >= evaluate_selective_prediction(LOGITS, rows, **one).threshold_for(risk=risk)).sum())
            naive += bool(kept and true[kept - 1] > risk)
    error = math.sqrt(delta * (1 - delta) * draws)
    assert broken < delta * draws + standard_errors(3) * error
    assert np.mean(coverages) > 0.05  # of 0.4 that could be kept: it does not simply abstain
    assert naive > 2 * delta * 60  # what the curve alone says breaks the guarantee often


def test_first_accepted_hypothesis_ends_the_search() -> None:
    """Errors first, then a hundred right answers: an order that is fixed does not look behind the failure."""
    wrong = torch.arange(200) < 40
    rows = TensorDataset(make_logits(torch.linspace(0.95, 0.6, 200), torch.zeros(200)), wrong.long())
    found = fit_risk_controlled_threshold(LOGITS, rows, risk=0.3, **one)
    assert scipy.stats.beta.ppf(0.9, 41, 160) < 0.3  # all rows together would have passed
    assert (found.threshold, found.coverage, found.bound) == (math.inf, 0.0, 1.0)
    assert "not shown for any threshold, abstain always" in str(found)
    assert SelectivePredictor(LOGITS, found.threshold, num_samples=1).predict(rows.tensors[0], **quiet).abstain.all()


def test_equal_inputs_are_on_one_side_of_threshold() -> None:
    """Their scores differ in the last digits alone: a threshold among those would keep all of them later."""
    sure, unsure = torch.full((150,), 0.99), 0.6 + 6e-8 * torch.arange(100).remainder(2)
    wrong = torch.cat([torch.zeros(150), torch.arange(100) % 2 == 0]).long()  # the unsure that score higher are right
    rows = TensorDataset(make_logits(torch.cat([sure, unsure]), torch.zeros(250)), wrong)
    found = fit_risk_controlled_threshold(LOGITS, rows, risk=0.1, **one)
    assert 0.7 < found.threshold < 0.9
    assert found.coverage == 0.6


def test_risk_bound_without_an_error() -> None:
    """45 rows without an error are the least that show a risk of at most 0.05 at δ = 0.1."""
    logits = make_logits(torch.linspace(0.6, 0.9, 45), torch.zeros(45))
    found = fit_risk_controlled_threshold(LOGITS, TensorDataset(logits, torch.zeros(45).long()), **one)
    assert (found.threshold, found.coverage, found.selective_risk, found.report.count) == (-math.inf, 1.0, 0.0, 45)
    assert found.bound == pytest.approx(1 - 0.1 ** (1 / 45))
    for num, searches in ((45, 1), (117, 1), (118, 2), (67 * 4, 3), (72 * 8, 4)):  # as many as there are rows for
        rows = TensorDataset(logits[:1].expand(num, 2), torch.zeros(num).long())
        bound = fit_risk_controlled_threshold(LOGITS, rows, **one).bound
        assert bound == pytest.approx(1 - (0.1 / searches) ** (1 / num))
    assert "risk ≤ 0.05 with probability 0.9" in str(found)
    with pytest.raises(ArgumentError, match="at least 45"):
        fit_risk_controlled_threshold(LOGITS, TensorDataset(logits[1:], torch.zeros(44).long()), **one)


# -- the predictor --------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", SCORES)
def test_threshold_for_risk_holds(golden: tuple[Predictor, TensorDataset], score: Any) -> None:
    predictor, rows = golden
    x, y = rows.tensors
    found = evaluate_selective_prediction(predictor, rows, score=score, num_samples=8, **quiet)
    for risk in (0.05, 0.2):
        selective = SelectivePredictor(predictor, found.threshold_for(risk=risk), score, num_samples=8)
        labels, abstain = selective.predict(x, batch_size=100, **quiet)
        assert abstain.all() or (labels != y)[~abstain].double().mean() <= risk
        lower = found.curve.coverage > (~abstain).double().mean() + 1e-9
        assert (found.curve.risk[lower] > risk).all()  # and keeps as many as it can


def test_threshold_of_a_trained_net_is_independent_of_batches() -> None:
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=seeded_rng(0))
    x, y = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
    config = TrainingConfig(epochs=12, batch_size=32, optimizer=partial(torch.optim.Adam, lr=0.01), progress=False)
    net = partial(nn.Sequential, nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    predictor = NeuBoots(num_blocks=20).fit(net, TensorDataset(x[:300], y[:300]), config)
    found = evaluate_selective_prediction(predictor, TensorDataset(x[300:], y[300:]), num_samples=10, **quiet)
    assert found.risk > 0.04
    selective = found.wrap(predictor, risk=0.02)
    labels, abstain = selective.predict(x[300:], **quiet)
    assert (labels != y[300:])[~abstain].double().mean() <= 0.02
    assert 0 < abstain.double().mean() < 0.5
    parts = selective.predict(x[300:], batch_size=9, **quiet)
    assert torch.equal(parts.labels, labels)
    assert torch.equal(parts.abstain, abstain)


def test_score_at_threshold_is_accepted() -> None:
    selective = SelectivePredictor(LOGITS, 0.5, num_samples=1)
    assert selective.predict(torch.tensor([[0.0, 0.0]]), **quiet).abstain.tolist() == [False]
    more = SelectivePredictor(LOGITS, 0.50001, num_samples=1)
    assert more.predict(torch.tensor([[0.0, 0.0]]), **quiet).abstain.tolist() == [True]


def test_empty_input_has_empty_prediction() -> None:
    labels, abstain = SelectivePredictor(LOGITS, 0.5, num_samples=1).predict(torch.zeros(0, 3), **quiet)
    assert labels.shape == abstain.shape == (0,)


def test_wrap_uses_options_of_the_report(golden: tuple[Predictor, TensorDataset]) -> None:
    """With the score, B and seed of the search: none is to be said again."""
    predictor, data = golden
    options: dict[str, Any] = {"score": margin, "num_samples": 8, "seed": 3}
    found = evaluate_selective_prediction(predictor, data, **options, **quiet)
    selective = found.wrap(predictor, coverage=0.4)
    assert selective == SelectivePredictor(predictor, found.threshold_for(coverage=0.4), margin, False, 8, 3)
    assert (~selective.predict(data.tensors[0], **quiet).abstain).sum() == 200
    assert found.wrap(predictor, risk=0.1).threshold == found.threshold_for(risk=0.1)
    shown = fit_risk_controlled_threshold(predictor, data, risk=0.3, **options, **quiet)
    kept = ~shown.wrap(predictor).predict(data.tensors[0], **quiet).abstain
    assert kept.double().mean().item() == pytest.approx(shown.coverage)
    assert shown.wrap(predictor) == SelectivePredictor(predictor, shown.threshold, margin, False, 8, 3)


# -- invalid arguments ---------------------------------------------------------------------------------

ROWS = TensorDataset(torch.rand(60, 3), torch.arange(60) % 3)
REPORT = evaluate_selective_prediction(LOGITS, ROWS, **one)
evaluate = partial(evaluate_selective_prediction, LOGITS, **one)
control = partial(fit_risk_controlled_threshold, LOGITS, **one)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: evaluate_selective_prediction(nn.Identity(), ROWS), "predictor"),
        (lambda: evaluate(ROWS, score="luck"), "score"),
        (lambda: evaluate(ROWS, tolerance=1.0), "score"),
        (lambda: evaluate(ROWS, score="std", tolerance=-1.0), "tolerance"),
        (lambda: evaluate(ROWS, score="std", tolerance="1"), "tolerance"),
        (lambda: evaluate(ROWS, score="std", tolerance=1.0, ignore_index=0), "ignore_index"),
        (lambda: evaluate(TensorDataset(torch.zeros(3, 2), torch.full((3,), 255)), ignore_index=255), "data"),
        (lambda: evaluate(ROWS, score=lambda s: s.mean), "score"),
        (lambda: evaluate(ROWS, score=lambda s: s.entropy / 0), "score"),
        (
            lambda: evaluate(TensorDataset(torch.zeros(2, 1), torch.full((2,), math.nan)), score="std", tolerance=1.0),
            "data",
        ),
        (lambda: REPORT.threshold_for(), "risk"),
        (lambda: REPORT.threshold_for(risk=0.1, coverage=0.5), "risk"),
        (lambda: REPORT.threshold_for(risk=-0.1), "risk"),
        (lambda: REPORT.threshold_for(coverage="a"), "coverage"),
        (lambda: REPORT.risk_at(0.0), "coverage"),
        (lambda: control(ROWS, risk=None), "risk"),
        (lambda: control(ROWS, risk=0.0), "risk"),
        (lambda: control(ROWS, delta=1.0), "delta"),
        (lambda: control(ROWS, risk=1e-300), "calibration_data"),
        (lambda: control(ROWS, risk=5e-324, delta=5e-324), "calibration_data"),
        (lambda: control(TensorDataset(torch.zeros(60, 3, 2), torch.zeros(60, 2).long())), "calibration_data"),
        (lambda: SelectivePredictor(LOGITS, math.nan), "threshold"),
        (lambda: SelectivePredictor(LOGITS, "0.5"), "threshold"),
        (lambda: SelectivePredictor(LOGITS, 0.5, regression=True), "score"),
        (lambda: SelectivePredictor(LOGITS, 0.5, "luck"), "score"),
    ],
)
def test_invalid_arguments_are_errors(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.name == name
