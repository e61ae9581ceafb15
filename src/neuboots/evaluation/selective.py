"""Selective prediction: answer where the predictor is sure, abstain elsewhere.

    keep x if g(x) ≥ t,   coverage(t) = P(g ≥ t),   risk(t) = P(wrong | g ≥ t)

`evaluate_selective_prediction` measures the curve of risk over coverage; `fit_risk_controlled_threshold` finds a threshold that keeps its risk
for new inputs; both make an `SelectivePredictor` predictor.

Scores, the larger the surer, and a predictor that abstains where its score is too low.

The curve of risk over coverage, and what is read off it.

    AURC = ∫ risk(c) dc,   E-AURC = AURC − that of a score that puts every right answer before every wrong one

Geifman and El-Yaniv, Selective classification for deep neural networks, NeurIPS 2017; Geifman, Uziel and El-Yaniv,
Bias-reduced uncertainty estimation for deep neural classifiers, ICLR 2019 (AURC, E-AURC).

A threshold whose risk is promised for new inputs.

    P(risk(t̂) ≤ r) ≥ 1 − δ   over the draw of the calibration rows

"risk(t) > r" is tested for falling t, each by the exact binomial p-value P(Bin(n_t, r) ≤ wrong_t); the search stops at
the first t where that is above δ/J, which is where Clopper and Pearson's upper bound of the risk is above r. The order
is fixed beforehand, so no correction for many tests is needed, but for the J ≤ 4 places where such a search begins:
after m, 2m, 4m and 8m rows, m the fewest that can show anything. The promise holds for independent rows and any score
without ties; with ties, if keeping more never lowers the risk.

Angelopoulos, Bates, Candès, Jordan and Lei, Learn then test: calibrating predictive algorithms to achieve risk control,
arXiv:2110.01052, 2021 (tests in a fixed order); Clopper and Pearson, The use of confidence or fiducial limits,
Biometrika 1934.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from neuboots.evaluation._batching import (
    InputData,
    LabeledData,
    align_labels,
    align_targets,
    check_predictor,
    format_table,
    iter_batches,
    map_batches,
)
from neuboots.metrics import ConfidenceRanking, RiskCoverageCurve
from neuboots.prediction import Predictor, Summary

ConfidenceScoreName = Literal["confidence", "entropy", "mutual_information", "std"]
ConfidenceScore = ConfidenceScoreName | Callable[[Summary], Any]  # a function gives a tensor or an array, (N, *)

_SCORES: dict[str, Callable[[Summary], Tensor]] = {
    "confidence": lambda summary: summary.confidence,
    "entropy": lambda summary: -summary.entropy,
    "mutual_information": lambda summary: -summary.mutual_information,
    "std": lambda summary: -summary.std.mean(1),
}


def _is_correct(
    summary: Summary, y: Tensor, tolerance: float | None, ignore_index: int | None = None
) -> tuple[Tensor, Tensor]:
    """Is the answer right, and does it count? (N, *) each."""
    if tolerance is None:
        labels = align_labels(summary.probs, y, ignore_index=ignore_index)
        counted = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
        return summary.labels == labels, counted
    mean = summary.mean.double()
    target = align_targets(mean, y)
    if bool(target.isnan().any()):
        raise ValueError("got NaN targets; expected numbers: drop those rows")
    right = ((mean - target).abs() <= tolerance).all(1)
    return right, torch.ones_like(right)


def _check_confidence_score(predictor: Any, score: ConfidenceScore, tolerance: float | None = None) -> None:
    check_predictor(predictor)
    if not callable(score) and score not in _SCORES:
        raise ValueError(f"got score={score!r}; expected one of {', '.join(_SCORES)}, or a function of a Summary")
    if tolerance is None:
        return
    if not (isinstance(tolerance, float | int) and tolerance >= 0):
        raise ValueError(f"got tolerance={tolerance!r}; expected a number ≥ 0, in the units of y")
    _check_regression_score(score, f"tolerance={tolerance}")


def _check_regression_score(score: ConfidenceScore, given: str) -> None:
    """Is this a score of numbers, and not of class probabilities?"""
    if not callable(score) and score != "std":
        raise ValueError(
            f"got {given} with score={score!r}; expected score='std' or a function of a Summary for a regression: the "
            "others are of class probabilities"
        )


def _confidence_scores(summary: Summary, score: ConfidenceScore) -> Tensor:
    """(N, *), in float64."""
    given = score(summary) if callable(score) else _SCORES[score](summary)
    try:
        values = torch.as_tensor(given, dtype=torch.float64, device=summary.mean.device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"got scores of type {type(given).__name__}; expected a tensor of numbers, one for each input (and pixel)"
        ) from None
    shape = (summary.mean.shape[0], *summary.mean.shape[2:])
    if values.shape != shape:
        raise ValueError(f"got scores of shape {tuple(values.shape)}; expected {shape}, one for each input (and pixel)")
    if not bool(torch.isfinite(values).all()):
        raise ValueError("got scores that are NaN or infinite; expected finite numbers: check the net's outputs")
    return values


def _score_name(score: ConfidenceScore) -> str:
    return getattr(score, "__name__", type(score).__name__) if callable(score) else score


def _threshold_after(scores: Tensor, place: int) -> float:
    """Between the score at `place` of a falling list and the next one, so that rounding moves no row across."""
    if place == len(scores) - 1:
        return -math.inf
    upper, lower = scores[place].item(), scores[place + 1].item()
    middle = lower + (upper - lower) / 2
    return middle if middle > lower else upper


class SelectivePrediction(NamedTuple):
    """Answers to N inputs, and where to ask somebody else: abstain (N, *) is True where the score is too low."""

    labels: Tensor  # (N, *), or the mean (N, C, *) in regression
    abstain: Tensor  # (N, *)


@dataclass(frozen=True)
class SelectivePredictor:
    """A predictor that abstains below a threshold; `abstaining` of what was found makes one.

    Made by hand, its score, B and seed are to be those that the threshold was found with.

    >>> from neuboots.methods import DeterministicPredictor
    >>> careful = SelectivePredictor(DeterministicPredictor(torch.nn.Identity()), 0.9, num_samples=1)
    >>> labels, abstain = careful.predict(torch.tensor([[5.0, 0.0], [0.0, 0.1]]), progress=False)
    >>> labels.tolist(), abstain.tolist()
    ([0, 1], [False, True])
    """

    predictor: Predictor
    threshold: float
    score: ConfidenceScore = "confidence"
    regression: bool = False  # answers are means, not labels
    num_samples: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        _check_confidence_score(self.predictor, self.score)
        if self.regression:
            _check_regression_score(self.score, "regression=True")
        if not isinstance(self.threshold, float | int) or math.isnan(self.threshold):
            raise ValueError(f"got threshold {self.threshold!r}; expected a number, as threshold_for gives one")

    def predict(self, x: InputData, *, batch_size: int = 256, progress: bool = True) -> SelectivePrediction:
        """Labels (or means), and True where the answer should not be used: where score < threshold.

        Inputs are a tensor (a tuple or dict of them), a data set, or a loader.
        """
        parts = map_batches(self._answers, x, batch_size, title="answering", progress=progress)
        answers, abstain = zip(*parts, strict=True)
        return SelectivePrediction(torch.cat(answers), torch.cat(abstain))

    def _answers(self, x: Any) -> SelectivePrediction:
        summary = self.predictor.summarize(x, self.num_samples, seed=self.seed)
        abstain = _confidence_scores(summary, self.score) < self.threshold
        return SelectivePrediction(summary.mean if self.regression else summary.labels, abstain)


_SHOWN = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)  # coverages in the printed table


@dataclass(frozen=True, eq=False)
class SelectivePredictionReport:
    """What `evaluate_selective_prediction` found: risk by coverage. A score is the larger, the surer: entropies and std's are negative."""

    ranking: ConfidenceRanking
    score: ConfidenceScore
    tolerance: float | None  # None: answers are labels
    num_samples: int
    seed: int

    @property
    def curve(self) -> RiskCoverageCurve:
        """Share kept, risk among them, and score ≥ which they are kept: one point for each score that occurs."""
        return self.ranking.risk_coverage_curve

    @property
    def count(self) -> int:
        return self.ranking.count

    @property
    def risk(self) -> float:
        """The risk of answering always."""
        return float(self.curve.risk[-1])

    @property
    def aurc(self) -> float:
        return float(self.ranking.aurc)

    @property
    def excess_aurc(self) -> float:
        """AURC less that of the best possible score, which is 1 where the answer is right and 0 where it is wrong."""
        best = [ConfidenceRanking.from_confidence(right.double(), right) for right in self.ranking.correct]
        return self.aurc - float(sum(best[1:], best[0]).aurc)

    def risk_at(self, coverage: float) -> float:
        """The risk among the surest inputs that make up this share; inputs of one score are kept together."""
        return float(self.curve.risk[self._place(coverage)])

    def threshold_for(self, *, risk: float | None = None, coverage: float | None = None) -> float:
        """The score below which to abstain: to keep as many rows as the risk allows, or at least a share of them.

        Halfway between two scores that occur; −∞ where nothing need be abstained from, ∞ where no share has so low a
        risk. It describes these rows: for a promise about new ones take `fit_risk_controlled_threshold`.
        """
        if (risk is None) == (coverage is None):
            raise ValueError("got both or neither of risk and coverage; expected one: threshold_for(risk=0.05)")
        if coverage is not None:
            return _threshold_after(self.curve.threshold, self._place(coverage))
        if not (isinstance(risk, float | int) and 0 <= risk <= 1):
            raise ValueError(f"got risk {risk!r}; expected a number from 0 to 1")
        allowed = (self.curve.risk <= risk).nonzero()
        return _threshold_after(self.curve.threshold, int(allowed[-1])) if len(allowed) else math.inf

    def abstaining(
        self, predictor: Predictor, *, risk: float | None = None, coverage: float | None = None
    ) -> SelectivePredictor:
        """The predictor with the threshold for this risk or coverage, and the score, B and seed it was found with."""
        return SelectivePredictor(
            predictor,
            self.threshold_for(risk=risk, coverage=coverage),
            self.score,
            self.tolerance is not None,
            self.num_samples,
            self.seed,
        )

    def _place(self, coverage: float) -> int:
        """The first point of the curve that keeps this share."""
        if not (isinstance(coverage, float | int) and 0 < coverage <= 1):
            raise ValueError(f"got coverage {coverage!r}; expected a number above 0 and at most 1")
        return int((self.curve.coverage < coverage * (1 - 1e-12)).sum())  # 0.1 + 0.2 of 100 rows is 30

    def __str__(self) -> str:
        rows = [
            {"coverage ≥": share, "risk": self.risk_at(share), "threshold": self.threshold_for(coverage=share)}
            for share in _SHOWN
        ]
        return (
            f"N = {self.count:,}, B = {self.num_samples}, seed {self.seed}, score {_score_name(self.score)}\n"
            f"AURC {self.aurc:.4g}, of which {self.excess_aurc:.4g} more than the best possible\n{format_table(rows)}"
        )


def evaluate_selective_prediction(
    predictor: Predictor,
    data: LabeledData,
    *,
    score: ConfidenceScore = "confidence",
    tolerance: float | None = None,
    ignore_index: int | None = None,
    num_samples: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = True,
) -> SelectivePredictionReport:
    """Risk by coverage over labelled rows, ranked by a score of the predictor: the larger, the surer.

    `confidence` is max p; `entropy`, `mutual_information` and `std` (the mean over outputs) count as their negatives; a
    function of a `Summary` may give any other, (N, *). The standard deviation of logits grows with them, and so with
    the confidence: for classes it ranks badly. For regression give `tolerance`, and the score `std`: an answer is wrong
    where any output is further than that from y, in the units of y. Pixels are inputs of their own; those labelled
    `ignore_index` are passed over.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from neuboots.methods import DeterministicPredictor
    >>> logits = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 0.0], [0.0, 0.5]])
    >>> rows = TensorDataset(logits, torch.tensor([0, 1, 0, 0]))  # wrong where it is least sure
    >>> found = evaluate_selective_prediction(
    ...     DeterministicPredictor(torch.nn.Identity()), rows, num_samples=1, progress=False
    ... )
    >>> found.risk, found.risk_at(0.75), round(found.threshold_for(risk=0.1), 2)
    (0.25, 0.0, 0.68)
    >>> found.excess_aurc  # no score does better
    0.0
    >>> careful = found.abstaining(
    ...     DeterministicPredictor(torch.nn.Identity()), risk=0.1
    ... )  # with the same score, B and seed
    >>> careful.predict(logits, progress=False).abstain.tolist()
    [False, False, False, True]
    """
    _check_confidence_score(predictor, score, tolerance)
    if ignore_index is not None and tolerance is not None:
        raise ValueError(
            f"got void={ignore_index} with a tolerance; expected labels, since targets have no void: drop such rows"
        )
    ranking: ConfidenceRanking | int = 0
    for x, y in iter_batches(data, batch_size, title="selective", progress=progress):
        summary = predictor.summarize(x, num_samples, seed=seed)
        scores, right, counted = _confidence_scores(summary, score), *_is_correct(summary, y, tolerance, ignore_index)
        if bool(counted.any()):
            ranking = ranking + ConfidenceRanking.from_confidence(scores[counted], right[counted])
    if not isinstance(ranking, ConfidenceRanking):
        raise ValueError(f"got data whose labels are all void ({ignore_index}); expected some that count")
    return SelectivePredictionReport(ranking, score, tolerance, num_samples, seed)


_SCORE_ROUNDING = 4 * torch.finfo(torch.float32).eps  # of scores, in their mean size


@dataclass(frozen=True)
class RiskControlledThreshold:
    """What `fit_risk_controlled_threshold` found. A threshold of ∞ abstains always: no risk so low could be shown."""

    threshold: float
    risk: float  # r, as asked for
    delta: float
    bound: float  # Clopper and Pearson's upper bound of the risk at the threshold, at confidence 1 − δ/J
    selective_risk: float  # share of wrong answers among the calibration rows that are kept; 0 where none is
    coverage: float  # share of calibration rows that are kept
    count: int
    score: ConfidenceScore
    tolerance: float | None  # None: answers are labels
    num_samples: int
    seed: int

    def abstaining(self, predictor: Predictor) -> SelectivePredictor:
        """The predictor with this threshold, and the score, B and seed it was found with."""
        return SelectivePredictor(
            predictor, self.threshold, self.score, self.tolerance is not None, self.num_samples, self.seed
        )

    def __str__(self) -> str:
        names = ("threshold", "coverage", "kept_risk", "bound")
        promise = f"risk ≤ {self.risk:g} with probability {1 - self.delta:g}"
        if math.isinf(self.threshold) and self.threshold > 0:
            promise += ": not shown for any threshold, abstain always"
        header = f"N = {self.count:,}, B = {self.num_samples}, seed {self.seed}, score {_score_name(self.score)}"
        return f"{promise}\n{header}\n{format_table([{name: getattr(self, name) for name in names}])}"


def fit_risk_controlled_threshold(
    predictor: Predictor,
    calibration_data: LabeledData,
    *,
    risk: float = 0.05,
    delta: float = 0.1,
    score: ConfidenceScore = "confidence",
    tolerance: float | None = None,
    num_samples: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = True,
) -> RiskControlledThreshold:
    """t̂ with P(risk(t̂) ≤ r) ≥ 1 − δ: the score below which to abstain, from labelled rows that were not trained on.

    The rows must be independent draws of what is to come; scores and `tolerance` are as in `evaluate_selective_prediction`. The promise is
    about the error among all new inputs that are kept, not about the few of one batch.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots.methods import DeterministicPredictor
    >>> rng = torch.Generator().manual_seed(0)
    >>> logits = 2 * torch.randn(2000, 3, generator=rng)
    >>> labels = torch.multinomial(logits.softmax(1), 1, generator=rng)[:, 0]
    >>> net = DeterministicPredictor(torch.nn.Identity())  # a net whose probabilities are right
    >>> found = fit_risk_controlled_threshold(
    ...     net, TensorDataset(logits, labels), risk=0.1, num_samples=1, progress=False
    ... )
    >>> found.selective_risk < found.bound <= 0.1, found.coverage > 0.3
    (True, True)
    """
    for name, value in (("risk", risk), ("delta", delta)):
        if not (isinstance(value, float | int) and 0 < value < 1):
            raise ValueError(f"got {name} {value!r}; expected a number between 0 and 1, such as 0.05")
    _check_confidence_score(predictor, score, tolerance)
    ranking: ConfidenceRanking | int = 0
    count = 0
    for x, y in iter_batches(calibration_data, batch_size, title="controlling risk", progress=progress):
        summary = predictor.summarize(x, num_samples, seed=seed)
        right, _ = _is_correct(summary, y, tolerance)
        if right.ndim > 1:
            raise ValueError("got pixels, which depend on each other; expected one label for each input")
        ranking, count = (
            ranking + ConfidenceRanking.from_confidence(_confidence_scores(summary, score), right),
            count + len(right),
        )
    assert isinstance(ranking, ConfidenceRanking), "batches_of gives at least one batch"
    curve = ranking.risk_coverage_curve
    places = _apart(curve.threshold)
    kept = (curve.coverage[places] * count).round().long().tolist()
    wrong = (curve.risk[places] * curve.coverage[places] * count).round().long().tolist()
    starts = _starts(count, risk, delta)
    share = delta / len(starts)
    best = -1
    for start in starts:
        place, harmless = bisect_left(kept, start), -1
        # More rows without another error only lower the p-value: a test is due at each error.
        while best < place < len(kept) and (
            wrong[place] == harmless or _binomial_cdf(wrong[place], kept[place], risk) <= share
        ):
            best, place, harmless = place, place + 1, wrong[place]
    shown = best >= 0
    return RiskControlledThreshold(
        threshold=_threshold_after(curve.threshold, int(places[best])) if shown else math.inf,
        risk=risk,
        delta=delta,
        bound=_clopper_pearson(wrong[best], kept[best], share) if shown else 1.0,
        selective_risk=float(curve.risk[places[best]]) if shown else 0.0,
        coverage=float(curve.coverage[places[best]]) if shown else 0.0,
        count=count,
        score=score,
        tolerance=tolerance,
        num_samples=num_samples,
        seed=seed,
    )


def _apart(scores: Tensor) -> Tensor:
    """Places of a falling list after which a score is lower by more than rounding, and the last.

    The scores of equal inputs differ in their last digits from batch to batch: a threshold between those would keep
    some of the calibration rows and all of the new ones.
    """
    far = scores[:-1] - scores[1:] > _SCORE_ROUNDING * scores[scores.isfinite()].abs().sum().div(len(scores))
    return torch.cat([far, far.new_ones(1)]).nonzero()[:, 0]


def _starts(count: int, risk: float, delta: float) -> list[int]:
    """Rows that the first tests of J searches keep: m, 2m, 4m, 8m, where m rows without an error show r at δ/J.

    The first finds a threshold where only the surest are right; the others forgive a few errors among those.
    """
    for searches in (4, 3, 2, 1):
        fewest = (math.log(delta) - math.log(searches)) / math.log1p(-risk)  # not whole, and perhaps infinite
        if fewest <= count and math.ceil(fewest) << (searches - 1) <= count:
            return [math.ceil(fewest) << k for k in range(searches)]
    needed = f"{math.ceil(fewest):,}" if fewest < 1e9 else f"{fewest:.1e}"
    raise ValueError(
        f"got {count} calibration rows; expected at least {needed} to show a risk of at most {risk:g} with delta "
        f"{delta:g}, even without an error: give more rows, or a higher risk or delta"
    )


def _binomial_cdf(wrong: int, count: int, rate: float) -> float:
    """P(Bin(n, r) ≤ k), by its sum.

    >>> round(_binomial_cdf(1, 2, 0.5), 9)
    0.75
    """
    k = torch.arange(wrong + 1, dtype=torch.float64)
    ways = math.lgamma(count + 1) - torch.lgamma(k + 1) - torch.lgamma(count - k + 1)
    terms = ways + k * math.log(rate) + (count - k) * math.log1p(-rate)
    return float(terms.logsumexp(0).exp())


def _clopper_pearson(wrong: int, count: int, delta: float) -> float:
    """The largest rate r with P(Bin(n, r) ≤ k) ≥ δ: an upper bound of the rate at confidence 1 − δ.

    >>> round(_clopper_pearson(0, 45, 0.1), 4)  # 1 − 0.1^(1/45)
    0.0499
    """
    low, high = wrong / count, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _binomial_cdf(wrong, count, middle) >= delta else (low, middle)
    return high
