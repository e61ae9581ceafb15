"""The paper's detector: logistic regression on four statistics of the replicates (section 4.3, table 4.1).

    log P(out) / P(in) = w · (max_c p_c, mean_c std_b f_b,c, 1/B Σ_b H(p_b), H(p)) + w₀,   p = 1/B Σ_b p_b

It is trained on a validation part of inputs in and out of distribution. "+ Calibration" takes the statistics at ODIN's
x̃ = x + ε sign ∇_x log S(x; T), with ε chosen on the same part.

Shin, Cho, Min and Lim, Neural Bootstrapper, NeurIPS 2021. The "predictive mean" is that of the probabilities, as in the
authors' code. Decided here, since neither text nor code says it: the standard deviation of a logit vector is the mean
of those of its C logits, and the statistics are taken at T = 1; their code's T = 1000 is that of the gradient. All
replicates share the step of their mean probability, where their code takes one for each, at B times the passes.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from neuboots.tasks.common import Rows
from neuboots.tasks.inputs import Inputs, per_input
from neuboots.tasks.ood.detector import Detector, LogisticRule, check_step, choose_rule, precise
from neuboots.tasks.ood.odin import EPSILONS, moved, towards_confidence
from neuboots.tasks.ood.scores import check_temperature

STATISTICS = ("max probability", "std of logits", "expected entropy", "predictive entropy")


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplicateDetector(Detector):
    """s = the log-odds of being out of distribution, from four statistics. `preprocess=True` is "+ Calibration".

    >>> from neuboots import PlainPredictor
    >>> inside, outside = 3 * torch.eye(8), torch.zeros(8, 8)
    >>> detector = ReplicateDetector(PlainPredictor(torch.nn.Identity()))
    >>> detector = detector.fit(inside[:4], outside[:4] + 0.1, progress=False)
    >>> float(detector.evaluate(inside[4:], outside[4:], progress=False).auroc)
    1.0
    """

    preprocess: bool = False
    temperature: float = 1000.0  # of the gradient
    epsilons: tuple[float, ...] = EPSILONS  # to choose from
    epsilon: float = 0.0  # the one chosen
    rule: LogisticRule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature(self.temperature)
        check_step(self.epsilons)
        check_step((self.epsilon,))

    def scores(self, x: Any) -> Tensor:
        if self.rule is None:
            raise ValueError("the detector is not fitted; expected detector.fit(inside, outside) first")
        return self.rule(self._statistics_at(x, (self.epsilon,))[0])

    def statistics(self, x: Any) -> Tensor:
        """The four, in the order of STATISTICS, in double precision: (N, 4)."""
        found = self._summary(x)
        figures = (found.confidence, found.std.mean(1), found.expected_entropy, found.entropy)
        return torch.stack([per_input(precise(figure)) for figure in figures], 1)

    def fit(
        self,
        inside: Inputs | None = None,
        outside: Inputs | None = None,
        *,
        train: Rows | None = None,
        batch_size: int = 256,
        progress: bool = True,
    ) -> Self:
        """The regression on a validation part of both kinds. With `preprocess`, ε is the one whose regression, fitted
        on half of it, has the largest TNR at 95 % TPR on the other half."""
        epsilons = self.epsilons if self.preprocess else (0.0,)

        def measure(x: Any) -> Tensor:
            return self._statistics_at(x, epsilons)

        ours, theirs, names = self._measured(inside, outside, measure, batch_size, progress)
        best, rule = choose_rule(ours, theirs, seed=self.seed)
        return replace(self, epsilon=epsilons[best], rule=rule, fitted_on=names)

    def _statistics_at(self, x: Any, epsilons: tuple[float, ...]) -> Tensor:
        """With one gradient for all ε: (len(epsilons), N, 4)."""
        directions: list[Tensor] = []
        if any(epsilons):
            directions = towards_confidence(
                self.predictor, x, temperature=self.temperature, num_samples=self.num_samples, seed=self.seed
            )
        return torch.stack([self.statistics(moved(x, directions, e) if e else x) for e in epsilons])
