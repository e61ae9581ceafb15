"""The curve of risk over coverage, and what is read off it.

    AURC = ∫ risk(c) dc,   E-AURC = AURC − that of a score that puts every right answer before every wrong one

Geifman and El-Yaniv, Selective classification for deep neural networks, NeurIPS 2017; Geifman, Uziel and El-Yaniv,
Bias-reduced uncertainty estimation for deep neural classifiers, ICLR 2019 (AURC, E-AURC).
"""

import math
from dataclasses import dataclass

from neuboots.metrics import Ranking, RiskCoverage
from neuboots.prediction import Predictor
from neuboots.tasks.common import Rows, batches_of, table
from neuboots.tasks.selective.answers import Abstaining, Score, check_score, cut_at, is_right, name_of_score, scores_of

_SHOWN = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)  # coverages in the printed table


@dataclass(frozen=True, eq=False)
class Selective:
    """What `selective` found: risk by coverage. A score is the larger, the surer: entropies and std's are negative."""

    ranking: Ranking
    score: Score
    tolerance: float | None  # None: answers are labels
    num_samples: int
    seed: int

    @property
    def curve(self) -> RiskCoverage:
        """Share kept, risk among them, and score ≥ which they are kept: one point for each score that occurs."""
        return self.ranking.risk_coverage

    @property
    def count(self) -> int:
        return sum(map(len, self.ranking.right))

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
        best = [Ranking.of(right.double(), right) for right in self.ranking.right]
        return self.aurc - float(sum(best[1:], best[0]).aurc)

    def risk_at(self, coverage: float) -> float:
        """The risk among the surest inputs that make up this share; inputs of one score are kept together."""
        return float(self.curve.risk[self._place(coverage)])

    def threshold_for(self, *, risk: float | None = None, coverage: float | None = None) -> float:
        """The score below which to abstain: to keep as many rows as the risk allows, or at least a share of them.

        Halfway between two scores that occur; −∞ where nothing need be abstained from, ∞ where no share has so low a
        risk. It describes these rows: for a promise about new ones take `risk_controlled_threshold`.
        """
        if (risk is None) == (coverage is None):
            raise ValueError("got both or neither of risk and coverage; expected one: threshold_for(risk=0.05)")
        if coverage is not None:
            return cut_at(self.curve.threshold, self._place(coverage))
        if not (isinstance(risk, float | int) and 0 <= risk <= 1):
            raise ValueError(f"got risk {risk!r}; expected a number from 0 to 1")
        allowed = (self.curve.risk <= risk).nonzero()
        return cut_at(self.curve.threshold, int(allowed[-1])) if len(allowed) else math.inf

    def abstaining(
        self, predictor: Predictor, *, risk: float | None = None, coverage: float | None = None
    ) -> Abstaining:
        """The predictor with the threshold for this risk or coverage, and the score, B and seed it was found with."""
        return Abstaining(
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
            f"N = {self.count:,}, B = {self.num_samples}, seed {self.seed}, score {name_of_score(self.score)}\n"
            f"AURC {self.aurc:.4g}, of which {self.excess_aurc:.4g} more than the best possible\n{table(rows)}"
        )


def selective(
    predictor: Predictor,
    data: Rows,
    *,
    score: Score = "confidence",
    tolerance: float | None = None,
    void: int | None = None,
    num_samples: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    progress: bool = True,
) -> Selective:
    """Risk by coverage over labelled rows, ranked by a score of the predictor: the larger, the surer.

    `confidence` is max p; `entropy`, `mutual_information` and `std` (the mean over outputs) count as their negatives; a
    function of a `Summary` may give any other, (N, *). The standard deviation of logits grows with them, and so with
    the confidence: for classes it ranks badly. For regression give `tolerance`, and the score `std`: an answer is wrong
    where any output is further than that from y, in the units of y. Pixels are inputs of their own; those labelled
    `void` are passed over.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import PlainPredictor
    >>> logits = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 0.0], [0.0, 0.5]])
    >>> rows = TensorDataset(logits, torch.tensor([0, 1, 0, 0]))  # wrong where it is least sure
    >>> found = selective(PlainPredictor(torch.nn.Identity()), rows, num_samples=1, progress=False)
    >>> found.risk, found.risk_at(0.75), round(found.threshold_for(risk=0.1), 2)
    (0.25, 0.0, 0.68)
    >>> found.excess_aurc  # no score does better
    0.0
    >>> careful = found.abstaining(PlainPredictor(torch.nn.Identity()), risk=0.1)  # with the same score, B and seed
    >>> careful.predict(logits, progress=False).abstain.tolist()
    [False, False, False, True]
    """
    check_score(predictor, score, tolerance)
    if void is not None and tolerance is not None:
        raise ValueError(
            f"got void={void} with a tolerance; expected labels, since targets have no void: drop such rows"
        )
    ranking: Ranking | int = 0
    for x, y in batches_of(data, batch_size, title="selective", progress=progress):
        summary = predictor.summarize(x, num_samples, seed=seed)
        scores, right, counted = scores_of(summary, score), *is_right(summary, y, tolerance, void)
        if bool(counted.any()):
            ranking = ranking + Ranking.of(scores[counted], right[counted])
    if not isinstance(ranking, Ranking):
        raise ValueError(f"got data whose labels are all void ({void}); expected some that count")
    return Selective(ranking, score, tolerance, num_samples, seed)
