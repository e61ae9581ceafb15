"""The standard deviation of a new y, and the interval that holds it.

    s(x) = e^a √(τ²(x) + σ²(x))^b,   b = ½;   [m(x) − q s(x), m(x) + q s(x)]

τ is the spread of the replicates, σ the noise that a Gaussian head has learned (none: one for all x). A net fits its
training rows more closely than new ones, and the more closely it fits, the less its σ(x) can be believed: log s lies
half way between what the net says and a constant (b), and its level (a) is set by the likelihood of held-out rows. q is
the conformal quantile of |y − m(x)| / s(x) over rows that the net was not fitted to, so that the interval keeps its
level whatever the predictor (Lei et al. 2018; see `neuboots.tasks.conformal`).
"""

import math
import warnings
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from neuboots.tasks.conformal.quantile import enough

Array = np.ndarray[Any, np.dtype[np.float64]]
TRUST = 0.5  # b
_LEAST = 1e-6  # of the targets' spread: a standard deviation of none would make every interval infinite or nothing


@dataclass(frozen=True, eq=False)
class Noise:
    """What held-out rows say of the errors of k outputs, in the units of the standardised targets."""

    offset: Array  # (k,), a
    trust: float  # b; 0 where the net has no say
    scores: Array  # (m, k), |y − m(x)| / s(x) of the calibration rows, sorted
    rows: int | None = None  # that differ among the m; None: all

    @classmethod
    def learn(cls, error: Array, raw_std: Array, calibration: Array, *, varies: bool) -> "Noise":
        """From errors y − m(x) (n, k) of held-out rows, their √(τ² + σ²), and which of them are for calibration."""
        trust = TRUST if varies else 0.0
        shape = np.maximum(raw_std, _LEAST) ** trust
        offset = np.log(np.maximum(np.sqrt(np.mean((error / shape) ** 2, 0)), _LEAST))  # (k,), of highest likelihood
        found = cls(offset, trust, np.empty((0, error.shape[1])))
        scores = np.abs(error[calibration]) / found.std(raw_std[calibration])
        return cls(offset, trust, np.sort(scores, 0))

    def std(self, raw_std: Array) -> Array:
        """s(x): (N, k)."""
        return np.asarray(np.exp(self.offset) * np.maximum(raw_std, _LEAST) ** self.trust)

    def reach(self, level: float) -> Array:
        """q for each output: (k,); the normal quantile, with a warning, where there are too few rows for the level."""
        copies, rows = len(self.scores), len(self.scores) if self.rows is None else self.rows
        if enough(level, rows):
            rank = math.ceil(Fraction(str(float(level))) * (rows + 1) * copies / rows)  # of rows, each in its copies
            return np.asarray(self.scores[min(rank, copies) - 1])
        share = 1 - level
        warnings.warn(
            f"{rows} rows were held out for calibration, and level {level:g} needs {math.ceil(level / share - 1e-9)}: "
            "the interval is a normal one, without a guarantee; give more rows, a larger validation_fraction, or a "
            "lower level",
            UserWarning,
            stacklevel=4,
        )
        half = math.sqrt(2.0) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))
        return np.maximum(self.scores[-1], half) if rows else np.full(self.scores.shape[1], half)  # as at lower levels
