"""What is promised of new rows, and what was found on rows that were neither trained nor calibrated on.

    P( error among the answered ≤ r ) ≥ 1 − δ,   answered: confidence(x) ≥ t

t is found on held-out rows, if there are enough of them: fewer than log δ / log(1 − r) show nothing, even without an
error among them.
"""

import math
from typing import Any

import numpy as np
from torch import Tensor

from neuboots.metrics import Classification
from neuboots.models.abstain import DELTA, Abstain
from neuboots.models.model import Answers
from neuboots.prediction import Predictor
from neuboots.tasks.selective import risk_controlled_threshold

NEVER = 2.0  # a confidence that none has


def check_max_error(max_error: Any) -> None:
    if isinstance(max_error, bool) or not isinstance(max_error, int | float) or not 0 < max_error < 1:
        raise ValueError(
            f"got max_error={max_error!r}; expected a share of wrong answers between 0 and 1, such as 0.05"
        )


def careful(
    predictor: Predictor, held_out: Any, *, max_error: float, num_samples: int, seed: int
) -> tuple[Abstain, str]:
    """The rule that keeps the error among the answered below `max_error`, and what it promises, in words.

    `held_out` are rows (x, y) that were not trained on. With too few of them all rows are answered, and nothing is
    promised; where they show that the risk cannot be kept, none is.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import PlainPredictor
    >>> rows = TensorDataset(torch.tensor([[9.0, 0.0]]).expand(50, 2), torch.zeros(50, dtype=torch.int64))
    >>> rule, words = careful(PlainPredictor(torch.nn.Identity()), rows, max_error=0.1, num_samples=1, seed=0)
    >>> rule, words[:43]
    (Abstain(confidence=0.0, width=inf, std=inf, risk=0.1), 'the model answers all rows but unusual ones')
    """
    needed, count = math.ceil(math.log(DELTA) / math.log1p(-max_error)), len(held_out)
    if count < needed:
        return Abstain(), (
            f"{count:,} held-out rows are too few for an error of at most {max_error:.1%}; that takes {needed:,}: "
            "the model abstains from unusual rows alone, and nothing is promised of the others"
        )
    found = risk_controlled_threshold(
        predictor, held_out, risk=max_error, delta=DELTA, num_samples=num_samples, seed=seed, progress=False
    )
    if found.threshold == math.inf:
        return Abstain(NEVER, risk=max_error), (
            f"no confidence was found above which at most {max_error:.1%} of the answers are wrong: the model abstains "
            "ALWAYS; allow more errors, or train on more rows"
        )
    least = max(0.0, found.threshold)
    where = f"where its confidence is at least {least:.1%}" if least else "all rows but unusual ones"
    return Abstain(least, risk=max_error), (
        f"the model answers {where}: of the answers to rows like these at most {max_error:.1%} are wrong, with "
        f"probability {1 - DELTA:.0%}"
    )


def class_figures(answers: Answers, y: Tensor, commonest: int) -> dict[str, Any]:
    """Figures of labelled rows; `commonest` is the class that is the most frequent one in training."""
    assert answers.probs is not None, "these are answers of classes"
    tally = Classification.of(answers.probs, y)
    answered = ~answers.columns["abstain"]
    wrong = (answers.probs.argmax(1) != y).cpu().numpy()
    return {
        **{name: float(getattr(tally, name)) for name in ("error", "nll", "brier", "ece")},
        "answered": float(answered.mean()),
        "error_answered": float(wrong[answered].mean()) if answered.any() else None,
        "error_of_commonest": float((y != commonest).double().mean()),
    }


def number_figures(answers: Answers, y: Tensor, constant: float, level: float) -> dict[str, Any]:
    """Figures of rows with numbers y (N, 1), in their units; `constant` is the mean of the training rows."""
    columns, truth = answers.columns, y.double().numpy()[:, 0]
    away, answered = columns["prediction"] - truth, ~columns["abstain"]
    spread = np.square(truth - truth.mean()).sum()
    return {
        "rmse": _rms(away),
        "mae": float(np.abs(away).mean()),
        "r2": float(1 - np.square(away).sum() / spread) if spread > 0 else None,
        "level": level,
        "coverage": float(((columns["low"] <= truth) & (truth <= columns["high"])).mean()),
        "mean_width": float((columns["high"] - columns["low"]).mean()),
        "answered": float(answered.mean()),
        "rmse_answered": _rms(away[answered]) if answered.any() else None,
        "rmse_of_constant": _rms(constant - truth),
    }


def _rms(values: "np.ndarray[Any, np.dtype[np.float64]]") -> float:
    return float(np.sqrt(np.square(values).mean()))
