"""When to say "I don't know".

    classes:   confidence(x) < t,   t such that P(wrong | answered) ≤ r, with probability 1 − δ, for new rows
    numbers:   std(x) > σ_y, or high(x) − low(x) > w
    both:      the row is unlike the training rows, s(x) > 1

t is found on held-out rows (`tasks.selective`). σ_y is the standard deviation of the training targets themselves, which
knows nothing of x; a user who gives a width w of the 95 % interval is answered by that instead.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from neuboots.models.model import Column

DELTA = 0.1


@dataclass(frozen=True)
class Abstain:
    """The rule of one model; its numbers are in the user's units.

    >>> rule = Abstain(confidence=0.8)
    >>> rule(ood_score=np.array([0.5, 0.5, 3.0]), confidence=np.array([0.9, 0.6, 0.9])).tolist()
    [False, True, True]
    """

    confidence: float = 0.0  # the least that is answered; above 1: none is, as no risk so low could be shown
    width: float = math.inf  # the widest 95 % interval that is answered
    std: float = math.inf  # the largest standard deviation that is answered
    risk: float | None = None  # r, where t was found for it

    def __call__(
        self,
        *,
        ood_score: Column,
        confidence: Column | None = None,
        width: Column | None = None,
        std: Column | None = None,
    ) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        unsure = np.asarray(ood_score) > 1
        if confidence is not None:
            unsure = unsure | (confidence < self.confidence)
        if width is not None:
            unsure = unsure | (width > self.width)
        if std is not None:
            unsure = unsure | (std > self.std)
        return unsure

    def config(self) -> dict[str, Any]:
        """For JSON, which has no infinities: they are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None and math.isfinite(value)}

    @classmethod
    def restore(cls, config: dict[str, Any]) -> "Abstain":
        if not all(isinstance(value, int | float) for value in config.values()):
            raise ValueError(f"got {config} for when to abstain; expected numbers")
        return cls(**config)
