"""When to say "I don't know".

    classes:   confidence(x) < t,   t such that P(wrong | answered) ≤ r, with probability 1 − δ, for new rows
    numbers:   std(x) > σ_y, or high(x) − low(x) > w
    both:      the row is unlike the training rows, s(x) > 1

t is found on held-out rows (`tasks.selective`). σ_y is the standard deviation of the training targets themselves, which
knows nothing of x; a user who gives a width w of the 95 % interval is answered by that instead.

What B replicates say of the class of each row, in memory that is bounded whatever N, B and C are.

p(x) = 1/B Σ_b softmax f_b(x);   std: of softmax f_b(x) at the likeliest class, over b

What is promised of new rows, and what was found on rows that were neither trained nor calibrated on.

    P( error among the answered ≤ r ) ≥ 1 − δ,   answered: confidence(x) ≥ t

t is found on held-out rows, if there are enough of them: fewer than log δ / log(1 − r) show nothing, even without an
error among them.

How unlike the training rows is a new one?

    s(x) = √((φ(x) − μ)ᵀ Σ⁻¹ (φ(x) − μ)) / q,   q the distance that 99 % of the held-out rows stay below

The score does not ask the predictor: a net may be sure of an answer far away from all it has seen. Σ is the covariance
of the training rows' φ, shrunk towards a multiple of the identity (Ledoit and Wolf, A well-conditioned estimator for
large-dimensional covariance matrices, 2004); of many features only the variances are kept. Above 1 a row is unusual.
"""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuboots.app.model import Array, PredictionTable
from neuboots.evaluation.selective import fit_risk_controlled_threshold
from neuboots.metrics import ClassificationMetrics
from neuboots.prediction import Predictor, categorical_entropy

DELTA = 0.1


@dataclass(frozen=True)
class RejectRule:
    """The rule of one model; its numbers are in the user's units.

    >>> rule = RejectRule(confidence=0.8)
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
        ood_score: Array,
        confidence: Array | None = None,
        width: Array | None = None,
        std: Array | None = None,
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
    def from_config(cls, config: dict[str, Any]) -> "RejectRule":
        if not all(isinstance(value, int | float) for value in config.values()):
            raise ValueError(f"got {config} for when to abstain; expected numbers")
        return cls(**config)


MAX_SAMPLE_VALUES = 1 << 20  # of the samples that are held at once


@dataclass(frozen=True, eq=False)
class ClassPrediction:
    """Figures of N rows; entropies in nats."""

    probs: Tensor  # (N, C)
    std: Tensor  # (N,), of the likeliest class's probability over replicates
    entropy: Tensor  # (N,)
    mutual_information: Tensor  # (N,)

    @property
    def labels(self) -> Tensor:
        return self.probs.argmax(1)

    @property
    def confidence(self) -> Tensor:
        return self.probs.amax(1)


def predict_classes(predictor: Predictor, x: Tensor, num_samples: int, *, seed: int = 0) -> ClassPrediction:
    """What the replicates say of each row of x, some rows at a time.

    >>> from neuboots.methods import DeterministicPredictor
    >>> said = predict_classes(DeterministicPredictor(torch.nn.Identity()), torch.tensor([[0.0, 0.0], [9.0, 0.0]]), 5)
    >>> said.labels.tolist(), [round(p, 3) for p in said.confidence.tolist()], said.std.tolist()
    ([0, 0], [0.5, 1.0], [0.0, 0.0])
    """
    outputs = predictor.summarize(x[:1], 1, seed=seed).mean.shape[1]
    size = max(1, MAX_SAMPLE_VALUES // (num_samples * outputs))
    parts = [_of_some(predictor, some, num_samples, seed) for some in torch.split(x, size)]
    return ClassPrediction(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(ClassPrediction)))


def _of_some(predictor: Predictor, x: Any, num_samples: int, seed: int) -> ClassPrediction:
    """softmax f = e^(f − m) / Σ e^(f − m) and H = log Σ e^(f − m) − Σ p (f − m), m = max f: one exponential a number.

    In single precision, and classes first, since torch is slow along a short last axis: this is what prediction spends
    its time on.
    """
    with torch.no_grad():
        samples = predictor.predict(x, num_samples, seed=seed).samples  # (B, N, C)
        if samples.shape[2] == 1:  # one logit, of the second of two classes
            samples = torch.cat([torch.zeros_like(samples), samples], 2)
        z = samples.float().permute(2, 0, 1).contiguous()  # (C, B, N)
        z -= z.amax(0)
        drawn = z.exp()
        total = drawn.sum(0)  # (B, N)
        drawn /= total
        expected = (total.log_() - (drawn * z).sum(0)).mean(0)  # (N,)
        probs = drawn.mean(1).T  # (N, C)
        chosen = drawn.gather(0, probs.argmax(1)[None, None].expand(1, drawn.shape[1], -1))[0]  # (B, N)
        entropy = categorical_entropy(probs, 1) + 0.0  # −0 is 0
        gap = entropy - expected
        rounding = 16 * torch.finfo(gap.dtype).eps * entropy.clamp_min(1)  # and not disagreement
        std = ((chosen - chosen.mean(0)).square_().sum(0) / max(1, len(chosen) - 1)).sqrt_()
        return ClassPrediction(probs, std, entropy, gap.masked_fill(gap <= rounding, 0.0))


NEVER = 2.0  # a confidence that none has


def check_max_error(max_error: Any) -> None:
    if isinstance(max_error, bool) or not isinstance(max_error, int | float) or not 0 < max_error < 1:
        raise ValueError(
            f"got max_error={max_error!r}; expected a share of wrong answers between 0 and 1, such as 0.05"
        )


def fit_reject_rule(
    predictor: Predictor, held_out: Any, *, max_error: float, num_samples: int, seed: int
) -> tuple[RejectRule, str]:
    """The rule that keeps the error among the answered below `max_error`, and what it promises, in words.

    `held_out` are rows (x, y) that were not trained on. With too few of them all rows are answered, and nothing is
    promised; where they show that the risk cannot be kept, none is.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from neuboots.methods import DeterministicPredictor
    >>> rows = TensorDataset(torch.tensor([[9.0, 0.0]]).expand(50, 2), torch.zeros(50, dtype=torch.int64))
    >>> rule, words = fit_reject_rule(
    ...     DeterministicPredictor(torch.nn.Identity()), rows, max_error=0.1, num_samples=1, seed=0
    ... )
    >>> rule, words[:43]
    (Abstain(confidence=0.0, width=inf, std=inf, risk=0.1), 'the model answers all rows but unusual ones')
    """
    needed, count = math.ceil(math.log(DELTA) / math.log1p(-max_error)), len(held_out)
    if count < needed:
        return RejectRule(), (
            f"{count:,} held-out rows are too few for an error of at most {max_error:.1%}; that takes {needed:,}: "
            "the model abstains from unusual rows alone, and nothing is promised of the others"
        )
    found = fit_risk_controlled_threshold(
        predictor, held_out, risk=max_error, delta=DELTA, num_samples=num_samples, seed=seed, progress=False
    )
    if found.threshold == math.inf:
        return RejectRule(NEVER, risk=max_error), (
            f"no confidence was found above which at most {max_error:.1%} of the answers are wrong: the model abstains "
            "ALWAYS; allow more errors, or train on more rows"
        )
    least = max(0.0, found.threshold)
    where = f"where its confidence is at least {least:.1%}" if least else "all rows but unusual ones"
    return RejectRule(least, risk=max_error), (
        f"the model answers {where}: of the answers to rows like these at most {max_error:.1%} are wrong, with "
        f"probability {1 - DELTA:.0%}"
    )


def compute_classification_metrics(answers: PredictionTable, y: Tensor, commonest: int) -> dict[str, Any]:
    """Figures of labelled rows; `commonest` is the class that is the most frequent one in training."""
    assert answers.probs is not None, "these are answers of classes"
    tally = ClassificationMetrics.from_batch(answers.probs, y)
    answered = ~answers.columns["abstain"]
    wrong = (answers.probs.argmax(1) != y).cpu().numpy()
    return {
        **{name: float(getattr(tally, name)) for name in ("error", "nll", "brier", "ece")},
        "answered": float(answered.mean()),
        "error_answered": float(wrong[answered].mean()) if answered.any() else None,
        "error_of_commonest": float((y != commonest).double().mean()),
    }


def compute_regression_metrics(answers: PredictionTable, y: Tensor, constant: float, level: float) -> dict[str, Any]:
    """Figures of rows with numbers y (N, 1), in their units; `constant_schedule` is the mean of the training rows."""
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


MAX_COV_FEATURES = 512  # features whose covariances are kept
MAX_COV_ROWS = 20_000  # of the training rows that the covariance is learned from
QUANTILE = 0.99


@dataclass(frozen=True, eq=False)
class MahalanobisScore:
    """μ, a factor L with L Lᵀ = Σ⁻¹ (a vector where Σ is diagonal), and q.

    >>> rows = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    >>> unusual = MahalanobisScore.learn(rows[:300], rows[300:])
    >>> near, far = unusual.score(torch.tensor([[0.5, 0.0], [20.0, 0.0]]))
    >>> bool(near < 1 < far)
    True
    """

    mean: Tensor  # (D,)
    factor: Tensor  # (D, D), or (D,)
    limit: float

    @classmethod
    def learn(cls, train: Tensor, held_out: Tensor) -> "MahalanobisScore":
        """From features of training rows (n, D), and of rows (m, D) that the features were not learned from."""
        from sklearn.covariance import ledoit_wolf

        rows = train[:: math.ceil(len(train) / MAX_COV_ROWS)].double()
        mean = rows.mean(0)
        if rows.shape[1] > MAX_COV_FEATURES or len(rows) < 3:
            variance = rows.var(0, correction=0)
            factor = (variance + 1e-3 * variance.mean() + 1e-12).rsqrt()
        else:
            covariance = torch.from_numpy(ledoit_wolf(np.asarray(rows))[0])
            ridge = 1e-6 * covariance.diagonal().mean() + 1e-12  # constant features
            inverse = torch.linalg.inv(covariance + ridge * torch.eye(len(covariance), dtype=torch.float64))
            factor = torch.linalg.cholesky((inverse + inverse.T) / 2)
        found = cls(mean.float(), factor.float().contiguous(), 1.0)  # in the layout that a file gives back
        distances = found.distance(held_out if len(held_out) else train)
        limit = float(np.quantile(distances, QUANTILE, method="higher"))
        return cls(found.mean, found.factor, limit if limit > 0 else 1.0)

    def distance(self, features: Tensor) -> "np.ndarray[Any, np.dtype[np.float64]]":
        away = features.float() - self.mean  # (N, D)
        scaled = away * self.factor if self.factor.ndim == 1 else away @ self.factor
        return np.asarray(scaled.norm(dim=1).double())

    def score(self, features: Tensor) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """s for features (N, D): (N,). Above 1: further out than 99 % of the held-out rows."""
        return self.distance(features) / self.limit

    def state_dict(self) -> dict[str, Tensor]:
        """As tensors, for a file."""
        return {"mean": self.mean, "factor": self.factor, "limit": torch.tensor(self.limit, dtype=torch.float64)}

    @classmethod
    def from_config(cls, state: dict[str, Tensor]) -> "MahalanobisScore":
        return cls(state["mean"], state["factor"], float(state["limit"]))
