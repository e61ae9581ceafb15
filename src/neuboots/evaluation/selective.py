"""Selective prediction: predict where a confidence score is high, abstain elsewhere.

    accept x if g(x) ≥ t,   coverage(t) = P(g ≥ t),   risk(t) = P(incorrect | g ≥ t)
    AURC = ∫ risk(c) dc,   E-AURC = AURC − that of a score that ranks every correct prediction above every incorrect one

`evaluate_selective_prediction` measures the risk–coverage curve. `fit_risk_controlled_threshold` finds a threshold t̂
with a guarantee for new inputs, P(risk(t̂) ≤ r) ≥ 1 − δ over the draw of the calibration data: "risk(t) > r" is tested
for falling t by the exact binomial p-value P(Bin(n_t, r) ≤ errors_t), and the search stops at the first t where it is
above δ/J, which is where the Clopper–Pearson upper bound of the risk exceeds r. The order is fixed in advance, so no
correction for many tests is needed, except for the J ≤ 4 starting points: after m, 2m, 4m and 8m inputs, m the fewest
that can show anything. The guarantee holds for independent inputs and any score without ties; with ties, if accepting
more inputs never lowers the risk.

Geifman and El-Yaniv, Selective classification for deep neural networks, NeurIPS 2017; Geifman, Uziel and El-Yaniv,
Bias-reduced uncertainty estimation for deep neural classifiers, ICLR 2019 (AURC, E-AURC); Angelopoulos, Bates, Candès,
Jordan and Lei, Learn then test: calibrating predictive algorithms to achieve risk control, arXiv:2110.01052, 2021
(tests in a fixed order); Clopper and Pearson, The use of confidence or fiducial limits, Biometrika 1934.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from neuboots._validation import ArgumentError, check_fraction
from neuboots.evaluation._batching import (
    InputData,
    LabeledData,
    align_labels,
    align_targets,
    check_any_counted,
    check_predictor,
    exclusive_probs,
    format_table,
    is_counted,
    iter_batches,
    predict_batches,
)
from neuboots.metrics import ConfidenceRanking, RiskCoverageCurve
from neuboots.prediction import Predictor, Summary

ConfidenceScoreName = Literal["confidence", "entropy", "mutual_information", "std"]
ConfidenceScore = ConfidenceScoreName | Callable[[Summary], Any]  # a function returns a tensor or an array, (N, *)

_SCORES: dict[str, Callable[[Summary], Tensor]] = {
    "confidence": lambda summary: summary.confidence,
    "entropy": lambda summary: -summary.entropy,
    "mutual_information": lambda summary: -summary.mutual_information,
    "std": lambda summary: -summary.std.mean(1),
}
_TABLE_COVERAGES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)
_ROUNDING = 4 * torch.finfo(torch.float32).eps  # of scores, relative to their mean magnitude

# -- scores --------------------------------------------------------------------------------------------


def _check_score(predictor: Any, score: ConfidenceScore, *, regression: bool) -> None:
    check_predictor(predictor)
    if not callable(score) and score not in _SCORES:
        raise ArgumentError("score", score, f"one of {', '.join(_SCORES)}, or a function of a Summary")
    if regression and not callable(score) and score != "std":
        raise ArgumentError("score", score, "'std' or a function of a Summary for a regression")


def _compute_scores(summary: Summary, score: ConfidenceScore) -> Tensor:
    """Scores in float64: (N, *)."""
    exclusive_probs(summary)
    values = score(summary) if callable(score) else _SCORES[score](summary)
    values = torch.as_tensor(values, dtype=torch.float64, device=summary.mean.device)
    shape = (summary.mean.shape[0], *summary.mean.shape[2:])
    if values.shape != shape:
        raise ArgumentError("score", f"shape {tuple(values.shape)}", f"{shape}, one score per input (and pixel)")
    if not bool(torch.isfinite(values).all()):
        raise ArgumentError("score", "NaN or infinite values", "finite numbers", hint="check the outputs of the net")
    return values


def _is_correct(
    summary: Summary, y: Tensor, tolerance: float | None, ignore_index: int | None
) -> tuple[Tensor, Tensor]:
    """Whether each prediction is correct, and whether it counts: (N, *) each."""
    if tolerance is None:
        labels = align_labels(exclusive_probs(summary), y, ignore_index=ignore_index)
        return summary.labels == labels, is_counted(labels, ignore_index)
    mean = summary.mean.double()
    targets = align_targets(mean, y)
    if bool(targets.isnan().any()):
        raise ArgumentError("data", "NaN targets", "numbers", hint="drop those rows")
    correct = ((mean - targets).abs() <= tolerance).all(1)
    return correct, torch.ones_like(correct)


def _threshold_after(scores: Tensor, place: int) -> float:
    """Midpoint of falling scores at `place` and after it, so that rounding moves no input across."""
    if place == len(scores) - 1:
        return -math.inf
    upper, lower = scores[place].item(), scores[place + 1].item()
    middle = lower + (upper - lower) / 2
    return middle if middle > lower else upper


# -- predictor -----------------------------------------------------------------------------------------


class SelectivePrediction(NamedTuple):
    """Predictions of N inputs and where to abstain.

    Attributes:
        labels: Labels (N, *), or means (N, C, *) in regression.
        abstain: True where the score is below the threshold, (N, *).
    """

    labels: Tensor
    abstain: Tensor


@dataclass(frozen=True)
class SelectivePredictor:
    """A predictor that abstains where its score is below a threshold.

    `SelectivePredictionReport.wrap` and `RiskControlledThreshold.wrap` make one with matching options.

    Args:
        predictor: The predictor.
        threshold: Minimum score.
        score: Score that the threshold refers to.
        regression: Whether predictions are means, not labels.
        num_samples: Number of replicates B with which the threshold was found.
        seed: Seed of the replicates with which the threshold was found.

    Example:
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> selective = SelectivePredictor(DeterministicPredictor(torch.nn.Identity()), 0.9, num_samples=1)
        >>> labels, abstain = selective.predict(torch.tensor([[5.0, 0.0], [0.0, 0.1]]), progress=False)
        >>> labels.tolist(), abstain.tolist()
        ([0, 1], [False, True])
    """

    predictor: Predictor
    threshold: float
    score: ConfidenceScore = "confidence"
    regression: bool = False
    num_samples: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        _check_score(self.predictor, self.score, regression=self.regression)
        if not isinstance(self.threshold, float | int) or math.isnan(self.threshold):
            raise ArgumentError("threshold", self.threshold, "a number")

    def predict(self, x: InputData, *, batch_size: int = 256, progress: bool = True) -> SelectivePrediction:
        """Predict labels (or means) and where to abstain.

        Args:
            x: A tensor of inputs (or a tuple or dict of them), a data set, or a loader.
            batch_size: Number of inputs at a time.
            progress: Whether to show a progress bar.

        Returns:
            Predictions, and True where the score is below the threshold.
        """
        labels, abstain = predict_batches(self._predict_batch, x, batch_size, title="predicting", progress=progress)
        return SelectivePrediction(labels, abstain)

    def _predict_batch(self, x: Any) -> SelectivePrediction:
        summary = self.predictor.summarize(x, self.num_samples, seed=self.seed)
        abstain = _compute_scores(summary, self.score) < self.threshold
        return SelectivePrediction(summary.mean if self.regression else summary.labels, abstain)


# -- risk–coverage curve -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SelectivePredictionReport:
    """Result of `evaluate_selective_prediction`: risk by coverage.

    Args:
        ranking: State of the ranking metrics.
        score: Score by which inputs are ranked, larger where more confident; entropies and stds are negative.
        tolerance: Largest error of a correct prediction in regression; None for labels.
        num_samples: Number of replicates B.
        seed: Seed of the replicates.
        pixels: Whether pixels count as inputs of their own.
    """

    ranking: ConfidenceRanking
    score: ConfidenceScore
    tolerance: float | None
    num_samples: int
    seed: int
    pixels: bool

    @property
    def curve(self) -> RiskCoverageCurve:
        """Coverage, risk and threshold, one point for each score that occurs."""
        return self.ranking.risk_coverage_curve

    @property
    def count(self) -> int:
        """Number of inputs (or pixels)."""
        return self.ranking.count

    @property
    def risk(self) -> float:
        """Risk at coverage 1."""
        return float(self.curve.risk[-1])

    @property
    def aurc(self) -> float:
        """Area under the risk–coverage curve."""
        return float(self.ranking.aurc)

    @property
    def excess_aurc(self) -> float:
        """AURC minus that of the best possible score, which is 1 for correct and 0 for incorrect predictions."""
        best = [ConfidenceRanking.from_confidence(correct.double(), correct) for correct in self.ranking.correct]
        return self.aurc - float(sum(best[1:], best[0]).aurc)

    def risk_at(self, coverage: float) -> float:
        """Return the risk among the most confident inputs of this fraction; inputs of one score are accepted together.

        Args:
            coverage: Fraction of the inputs, above 0 and at most 1.
        """
        return float(self.curve.risk[self._place(coverage)])

    def threshold_for(self, *, risk: float | None = None, coverage: float | None = None) -> float:
        """Return the score below which to abstain, for a maximum risk or a minimum coverage on these data.

        For a guarantee about new inputs use `fit_risk_controlled_threshold`.

        Args:
            risk: Maximum risk; as many inputs as possible are accepted.
            coverage: Minimum fraction of accepted inputs.

        Returns:
            The midpoint between two scores that occur; −∞ accepts all inputs, ∞ none, as no fraction has so low a risk.

        Raises:
            ArgumentError: If not exactly one of the two is given.
        """
        if (risk is None) == (coverage is None):
            raise ArgumentError("risk", risk, "either risk or coverage, not both")
        if coverage is not None:
            return _threshold_after(self.curve.threshold, self._place(coverage))
        allowed = (self.curve.risk <= check_fraction("risk", risk, zero=True, one=True)).nonzero()
        return _threshold_after(self.curve.threshold, int(allowed[-1])) if len(allowed) else math.inf

    def control_risk(self, *, risk: float = 0.05, delta: float = 0.1) -> "RiskControlledThreshold":
        """Find the threshold of `fit_risk_controlled_threshold`, for a report of calibration data.

        Args:
            risk: Maximum risk r.
            delta: Probability δ that the guarantee fails.

        Returns:
            The threshold and its guarantee.

        Raises:
            ArgumentError: If there are too few calibration examples for this risk and delta.
        """
        from scipy.stats import beta, binom

        risk, delta = check_fraction("risk", risk), check_fraction("delta", delta)
        if self.pixels:
            raise ArgumentError("calibration_data", "labels of pixels", "one label per input: pixels are dependent")
        curve, count = self.curve, self.count
        places = _separated_places(curve.threshold)
        accepted = (curve.coverage[places] * count).round().long().numpy()
        errors = (curve.risk[places] * curve.coverage[places] * count).round().long().numpy()
        starts = _start_counts(count, risk, delta)
        level = delta / len(starts)
        p_values = binom.cdf(errors, accepted, risk)
        best = -1
        for start in starts:
            first = int(np.searchsorted(accepted, start))
            # hypotheses "risk(t) > r", up to the first that stands
            rejected = np.append(p_values[first:] <= level, False)
            best = max(best, first + int(rejected.argmin()) - 1) if rejected[0] else best
        found = best >= 0
        k, n = (int(errors[best]), int(accepted[best])) if found else (1, 1)
        return RiskControlledThreshold(
            threshold=_threshold_after(curve.threshold, int(places[best])) if found else math.inf,
            risk=risk,
            delta=delta,
            bound=float(beta.ppf(1 - level, k + 1, n - k)) if k < n else 1.0,
            selective_risk=float(curve.risk[places[best]]) if found else 0.0,
            coverage=float(curve.coverage[places[best]]) if found else 0.0,
            report=self,
        )

    def wrap(
        self, predictor: Predictor, *, risk: float | None = None, coverage: float | None = None
    ) -> SelectivePredictor:
        """Return the predictor with the threshold for this risk or coverage, and the score, B and seed of the report.

        Args:
            predictor: The predictor that was evaluated.
            risk: Maximum risk on these data.
            coverage: Minimum coverage on these data.
        """
        return self._wrap(predictor, self.threshold_for(risk=risk, coverage=coverage))

    def _wrap(self, predictor: Predictor, threshold: float) -> SelectivePredictor:
        regression = self.tolerance is not None
        return SelectivePredictor(predictor, threshold, self.score, regression, self.num_samples, self.seed)

    @property
    def _header(self) -> str:
        name = getattr(self.score, "__name__", type(self.score).__name__) if callable(self.score) else self.score
        return f"N = {self.count:,}, B = {self.num_samples}, seed {self.seed}, score {name}"

    def _place(self, coverage: float) -> int:
        """First point of the curve with this coverage."""
        coverage = check_fraction("coverage", coverage, one=True)
        return int((self.curve.coverage < coverage * (1 - 1e-12)).sum())  # 0.1 + 0.2 of 100 inputs is 30

    def __str__(self) -> str:
        rows = [
            {"coverage ≥": c, "risk": self.risk_at(c), "threshold": self.threshold_for(coverage=c)}
            for c in _TABLE_COVERAGES
        ]
        areas = f"AURC {self.aurc:.4g}, E-AURC {self.excess_aurc:.4g}"
        return f"{self._header}\n{areas}\n{format_table(rows)}"


def evaluate_selective_prediction(
    predictor: Predictor,
    data: LabeledData,
    *,
    score: ConfidenceScore = "confidence",
    tolerance: float | None = None,
    ignore_index: int | None = -100,
    num_samples: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = True,
) -> SelectivePredictionReport:
    """Measure risk by coverage over labeled data.

    Args:
        predictor: The predictor; pixels count as inputs of their own.
        data: Data set of examples (x, y), or a loader of batches.
        score: "confidence" is max p; "entropy", "mutual_information" and "std" (the mean over outputs) are negated; or
            a function of a `Summary` that returns (N, *), larger where more confident. The std of logits grows with the
            confidence, so it ranks classes badly.
        tolerance: For a regression with score "std": a prediction is incorrect where any output is further than this
            from y.
        ignore_index: Label of inputs that do not count; None if all do.
        num_samples: Number of replicates B.
        seed: Seed of the replicates.
        batch_size: Number of inputs at a time, for a data set.
        progress: Whether to show a progress bar.

    Returns:
        The report, which prints as a table.

    Raises:
        ArgumentError: If the score does not fit the task, or no label counts.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> logits = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 0.0], [0.0, 0.5]])
        >>> data = TensorDataset(logits, torch.tensor([0, 1, 0, 0]))  # incorrect where least confident
        >>> predictor = DeterministicPredictor(torch.nn.Identity())
        >>> report = evaluate_selective_prediction(predictor, data, num_samples=1, progress=False)
        >>> report.risk, report.risk_at(0.75), round(report.threshold_for(risk=0.1), 2), report.excess_aurc
        (0.25, 0.0, 0.68, 0.0)
        >>> report.wrap(predictor, risk=0.1).predict(logits, progress=False).abstain.tolist()
        [False, False, False, True]
    """
    _check_score(predictor, score, regression=tolerance is not None)
    if ignore_index not in (None, -100) and tolerance is not None:
        raise ArgumentError("ignore_index", ignore_index, "None for a regression", hint="drop those rows")
    if tolerance is not None and not (isinstance(tolerance, float | int) and tolerance >= 0):
        raise ArgumentError("tolerance", tolerance, "a number ≥ 0, in the units of y")
    ranking: Any = 0
    for x, y in iter_batches(data, batch_size, title="selective prediction", progress=progress):
        summary = predictor.summarize(x, num_samples, seed=seed)
        correct, counted = _is_correct(summary, y, tolerance, ignore_index)
        scores = _compute_scores(summary, score)
        ranking = ranking + ConfidenceRanking.from_confidence(scores[counted], correct[counted])
    check_any_counted(ranking.count, ignore_index)
    return SelectivePredictionReport(ranking, score, tolerance, num_samples, seed, pixels=correct.ndim > 1)


# -- risk control --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RiskControlledThreshold:
    """Result of `fit_risk_controlled_threshold`.

    Args:
        threshold: Minimum score; ∞ abstains always, as the risk could not be guaranteed for any threshold.
        risk: Maximum risk r.
        delta: Probability δ that the guarantee fails.
        bound: Clopper–Pearson upper bound of the risk at the threshold, at confidence 1 − δ/J.
        selective_risk: Error among the accepted calibration inputs; 0 if there are none.
        coverage: Fraction of calibration inputs that are accepted.
        report: Risk by coverage on the calibration data, with the score, B and seed that the threshold refers to.
    """

    threshold: float
    risk: float
    delta: float
    bound: float
    selective_risk: float
    coverage: float
    report: SelectivePredictionReport

    def wrap(self, predictor: Predictor) -> SelectivePredictor:
        """Return the predictor with this threshold, and the score, B and seed it was found with.

        Args:
            predictor: The predictor that was calibrated.
        """
        return self.report._wrap(predictor, self.threshold)

    def __str__(self) -> str:
        names = ("threshold", "coverage", "selective_risk", "bound")
        guarantee = f"risk ≤ {self.risk:g} with probability {1 - self.delta:g}"
        if self.threshold == math.inf:
            guarantee += ": not shown for any threshold, abstain always"
        return f"{guarantee}\n{self.report._header}\n{format_table([{name: getattr(self, name) for name in names}])}"


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
    """Find the score t̂ below which to abstain so that P(risk(t̂) ≤ r) ≥ 1 − δ.

    The guarantee is about the error among all new inputs that are accepted, not about the few of one batch.

    Args:
        predictor: The predictor, with one label or target per input.
        calibration_data: Held-out examples (x, y), independent draws from the distribution of new inputs.
        risk: Maximum risk r.
        delta: Probability δ that the guarantee fails.
        score: As in `evaluate_selective_prediction`.
        tolerance: As in `evaluate_selective_prediction`.
        num_samples: Number of replicates B.
        seed: Seed of the replicates.
        batch_size: Number of inputs at a time, for a data set.
        progress: Whether to show a progress bar.

    Returns:
        The threshold and its guarantee.

    Raises:
        ArgumentError: If there are too few calibration examples for this risk and delta.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> rng = torch.Generator().manual_seed(0)
        >>> logits = 2 * torch.randn(2000, 3, generator=rng)
        >>> data = TensorDataset(logits, torch.multinomial(logits.softmax(1), 1, generator=rng)[:, 0])
        >>> predictor = DeterministicPredictor(torch.nn.Identity())  # its probabilities are calibrated
        >>> found = fit_risk_controlled_threshold(predictor, data, risk=0.1, num_samples=1, progress=False)
        >>> found.selective_risk < found.bound <= 0.1, found.coverage > 0.3
        (True, True)
    """
    risk, delta = check_fraction("risk", risk), check_fraction("delta", delta)  # before the predictions
    report = evaluate_selective_prediction(
        predictor,
        calibration_data,
        score=score,
        tolerance=tolerance,
        num_samples=num_samples,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
    )
    return report.control_risk(risk=risk, delta=delta)


def _separated_places(scores: Tensor) -> Tensor:
    """Places of falling scores after which the score drops by more than rounding, and the last place.

    The scores of equal inputs differ in their last digits from batch to batch: a threshold between those would accept
    some of the calibration inputs and all of the new ones.
    """
    separated = scores[:-1] - scores[1:] > _ROUNDING * scores[scores.isfinite()].abs().sum().div(len(scores))
    return torch.cat([separated, separated.new_ones(1)]).nonzero()[:, 0].cpu()


def _start_counts(count: int, risk: float, delta: float) -> list[int]:
    """Number of inputs that the first tests of J searches accept: m, 2m, 4m, 8m; m without an error show r at δ/J.

    The first finds a threshold where only the most confident are correct; the others allow a few errors among those.
    """
    for searches in (4, 3, 2, 1):
        fewest = (math.log(delta) - math.log(searches)) / math.log1p(-risk)  # not an integer, and perhaps infinite
        if fewest <= count and math.ceil(fewest) << (searches - 1) <= count:
            return [math.ceil(fewest) << k for k in range(searches)]
    needed = f"{math.ceil(fewest):,}" if fewest < 1e9 else f"{fewest:.1e}"
    raise ArgumentError("calibration_data", f"{count} examples", f"at least {needed} for this risk and delta")
