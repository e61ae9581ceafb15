"""A threshold whose risk is promised for new inputs.

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
from dataclasses import dataclass

import torch
from torch import Tensor

from neuboots.metrics import Ranking
from neuboots.prediction import Predictor
from neuboots.tasks.common import Rows, batches_of, table
from neuboots.tasks.selective.answers import Abstaining, Score, check_score, cut_at, is_right, name_of_score, scores_of

ROUNDING = 4 * torch.finfo(torch.float32).eps  # of scores, in their mean size


@dataclass(frozen=True)
class ControlledThreshold:
    """What `risk_controlled_threshold` found. A threshold of ∞ abstains always: no risk so low could be shown."""

    threshold: float
    risk: float  # r, as asked for
    delta: float
    bound: float  # Clopper and Pearson's upper bound of the risk at the threshold, at confidence 1 − δ/J
    kept_risk: float  # share of wrong answers among the calibration rows that are kept; 0 where none is
    coverage: float  # share of calibration rows that are kept
    count: int
    score: Score
    tolerance: float | None  # None: answers are labels
    num_samples: int
    seed: int

    def abstaining(self, predictor: Predictor) -> Abstaining:
        """The predictor with this threshold, and the score, B and seed it was found with."""
        return Abstaining(
            predictor, self.threshold, self.score, self.tolerance is not None, self.num_samples, self.seed
        )

    def __str__(self) -> str:
        names = ("threshold", "coverage", "kept_risk", "bound")
        promise = f"risk ≤ {self.risk:g} with probability {1 - self.delta:g}"
        if math.isinf(self.threshold) and self.threshold > 0:
            promise += ": not shown for any threshold, abstain always"
        header = f"N = {self.count:,}, B = {self.num_samples}, seed {self.seed}, score {name_of_score(self.score)}"
        return f"{promise}\n{header}\n{table([{name: getattr(self, name) for name in names}])}"


def risk_controlled_threshold(
    predictor: Predictor,
    calibration: Rows,
    *,
    risk: float = 0.05,
    delta: float = 0.1,
    score: Score = "confidence",
    tolerance: float | None = None,
    num_samples: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = True,
) -> ControlledThreshold:
    """t̂ with P(risk(t̂) ≤ r) ≥ 1 − δ: the score below which to abstain, from labelled rows that were not trained on.

    The rows must be independent draws of what is to come; scores and `tolerance` are as in `selective`. The promise is
    about the error among all new inputs that are kept, not about the few of one batch.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import PlainPredictor
    >>> rng = torch.Generator().manual_seed(0)
    >>> logits = 2 * torch.randn(2000, 3, generator=rng)
    >>> labels = torch.multinomial(logits.softmax(1), 1, generator=rng)[:, 0]
    >>> net = PlainPredictor(torch.nn.Identity())  # a net whose probabilities are right
    >>> found = risk_controlled_threshold(net, TensorDataset(logits, labels), risk=0.1, num_samples=1, progress=False)
    >>> found.kept_risk < found.bound <= 0.1, found.coverage > 0.3
    (True, True)
    """
    for name, value in (("risk", risk), ("delta", delta)):
        if not (isinstance(value, float | int) and 0 < value < 1):
            raise ValueError(f"got {name} {value!r}; expected a number between 0 and 1, such as 0.05")
    check_score(predictor, score, tolerance)
    ranking: Ranking | int = 0
    count = 0
    for x, y in batches_of(calibration, batch_size, title="controlling risk", progress=progress):
        summary = predictor.summarize(x, num_samples, seed=seed)
        right, _ = is_right(summary, y, tolerance)
        if right.ndim > 1:
            raise ValueError("got pixels, which depend on each other; expected one label for each input")
        ranking, count = ranking + Ranking.of(scores_of(summary, score), right), count + len(right)
    assert isinstance(ranking, Ranking), "batches_of gives at least one batch"
    curve = ranking.risk_coverage
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
            wrong[place] == harmless or binomial_cdf(wrong[place], kept[place], risk) <= share
        ):
            best, place, harmless = place, place + 1, wrong[place]
    shown = best >= 0
    return ControlledThreshold(
        threshold=cut_at(curve.threshold, int(places[best])) if shown else math.inf,
        risk=risk,
        delta=delta,
        bound=clopper_pearson(wrong[best], kept[best], share) if shown else 1.0,
        kept_risk=float(curve.risk[places[best]]) if shown else 0.0,
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
    far = scores[:-1] - scores[1:] > ROUNDING * scores[scores.isfinite()].abs().sum().div(len(scores))
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


def binomial_cdf(wrong: int, count: int, rate: float) -> float:
    """P(Bin(n, r) ≤ k), by its sum.

    >>> round(binomial_cdf(1, 2, 0.5), 9)
    0.75
    """
    k = torch.arange(wrong + 1, dtype=torch.float64)
    ways = math.lgamma(count + 1) - torch.lgamma(k + 1) - torch.lgamma(count - k + 1)
    terms = ways + k * math.log(rate) + (count - k) * math.log1p(-rate)
    return float(terms.logsumexp(0).exp())


def clopper_pearson(wrong: int, count: int, delta: float) -> float:
    """The largest rate r with P(Bin(n, r) ≤ k) ≥ δ: an upper bound of the rate at confidence 1 − δ.

    >>> round(clopper_pearson(0, 45, 0.1), 4)  # 1 − 0.1^(1/45)
    0.0499
    """
    low, high = wrong / count, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if binomial_cdf(wrong, count, middle) >= delta else (low, middle)
    return high
