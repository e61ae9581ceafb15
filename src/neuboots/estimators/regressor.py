"""The standard deviation of a new y, and the interval that holds it.

    s(x) = e^a √(τ²(x) + σ²(x))^b,   b = ½;   [m(x) − q s(x), m(x) + q s(x)]

τ is the spread of the replicates, σ the noise that a Gaussian head has learned (none: one for all x). A net fits its
training rows more closely than new ones, and the more closely it fits, the less its σ(x) can be believed: log s lies
half way between what the net says and a constant (b), and its level (a) is set by the likelihood of held-out rows. q is
the conformal quantile of |y − m(x)| / s(x) over rows that the net was not fitted to, so that the interval keeps its
level whatever the predictor (Lei et al. 2018; see `neuboots.evaluation.conformal`).

A regressor: the mean of a new y, where it falls, and how sure the regression function itself is.
"""

import math
import warnings
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from scipy.special import ndtri
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from neuboots._validation import check_int
from neuboots.estimators._base import (
    CALIBRATION,
    TRAIN,
    Array,
    NetFactory,
    NeuBootsEstimator,
    append_weights,
    mean_and_std,
)
from neuboots.estimators._confidence_band import ConfidenceBand, find_mean_net, fit_confidence_band
from neuboots.evaluation.conformal import has_enough_calibration_rows
from neuboots.losses import GaussianNLL, Loss
from neuboots.methods import NeuBoots, find_method
from neuboots.prediction import Method
from neuboots.serialization import load_tensors
from neuboots.weights import Dirichlet

SCALE_EXPONENT = 0.5  # b
_LEAST = 1e-6  # of the targets' spread: a standard deviation of none would make every interval infinite or nothing


@dataclass(frozen=True, eq=False)
class NoiseScale:
    """What held-out rows say of the errors of k outputs, in the units of the standardised targets."""

    offset: Array  # (k,), a
    trust: float  # b; 0 where the net has no say
    scores: Array  # (m, k), |y − m(x)| / s(x) of the calibration rows, sorted
    rows: int | None = None  # that differ among the m; None: all

    @classmethod
    def learn(cls, error: Array, raw_std: Array, calibration: Array, *, varies: bool) -> "NoiseScale":
        """From errors y − m(x) (n, k) of held-out rows, their √(τ² + σ²), and which of them are for calibration."""
        trust = SCALE_EXPONENT if varies else 0.0
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
        if has_enough_calibration_rows(level, rows):
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


IntervalType = Literal["prediction", "confidence"]
_ROWS = 1 << 16  # that are predicted at once


@dataclass(frozen=True, eq=False)
class Forecast:
    """What is known of N rows, in the units of y: (N,) each, or (N, k) for k targets."""

    mean: Array
    std: Array  # of a new y around the mean
    low: Array  # where a new y falls
    high: Array
    confidence_low: Array  # where the regression function lies
    confidence_high: Array


class NeuBootsRegressor(RegressorMixin, NeuBootsEstimator):  # type: ignore[misc]
    """y = f(x) + ε: B bootstrapped nets for f from one training, held-out rows for ε.

    X and y are standardised inside. A fifth of the rows is held out (`validation_fraction`): one half stops the
    training (`early_stopping`), the other calibrates the prediction interval, which holds a new y with at least its
    level's probability for rows that come as these did. `method` is a name (`neuboots methods` lists them) or a method
    with options; `net` makes a net from the numbers of inputs and outputs: it is asked for 2k outputs for k targets,
    means and log-variances, and may give k alone. Whole sample weights are frequencies, others multiply the loss.

    The confidence band, where f itself lies, is that of the influence bootstrap around the trained net, the one that
    docs/validity.md recommends (`neuboots.estimators._confidence_band`); it changes nothing else. `band="method"` takes the spread
    of the method's replicates instead, as methods do behind whose mean there is no single net (ensembles, `mc-dropout`,
    `swag`, Gaussian processes), and losses other than the squared error and `GaussianNLL`: `band_` is None then.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> regressor = NeuBootsRegressor(epochs=20, random_state=0).fit(X[:400], y[:400])
    >>> mean, std = regressor.predict(X[400:], return_std=True)
    >>> low, high = regressor.predict_interval(X[400:], level=0.9)
    >>> bool(((low < mean) & (mean < high)).all()), regressor.sample(X[400:], 7).shape
    (True, (7, 42))
    """

    def __init__(
        self,
        method: str | Method = "neuboots",
        *,
        net: NetFactory | None = None,
        widths: tuple[int, ...] = (100, 100),
        epochs: int = 200,
        batch_size: int | Literal["auto"] = "auto",
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        early_stopping: bool = True,
        patience: int = 40,
        validation_fraction: float = 0.2,
        num_samples: int = 100,
        band: Literal["influence", "method"] = "influence",
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            method,
            net=net,
            widths=widths,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            early_stopping=early_stopping,
            patience=patience,
            validation_fraction=validation_fraction,
            num_samples=num_samples,
            random_state=random_state,
            verbose=verbose,
        )
        self.band = band

    fitted = (
        "n_features_in_", "feature_names_in_", "x_mean_", "x_scale_", "y_mean_", "y_scale_", "n_outputs_",
        "one_column_", "gaussian_", "noise_offset_", "noise_trust_", "scores_", "n_calibration_",
        "held_out_", "loss_curve_", "validation_curve_",
    )  # fmt: skip

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows X (n, features) and targets y (n,) or (n, k)."""
        self._check_options()
        if self.band not in ("influence", "method"):
            raise ValueError(f"got band={self.band!r}; expected 'influence' or 'method'")
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        self.one_column_ = y.ndim == 1
        y = y.reshape(len(y), -1)
        self.n_outputs_ = y.shape[1]
        self._set_seed()
        rows, weights = self._rows(X, y, sample_weight)
        part, unit = self._parts(X[rows], y[rows], None)
        train = rows[(part == TRAIN).numpy()]
        self._scale_inputs(X[train])
        self.y_mean_, spread = mean_and_std(y[train])
        still = np.where(np.ptp(y, 0) > 0, 1.0, 1e-9 * np.where(self.y_mean_ == 0, 1.0, np.abs(self.y_mean_)))
        self.y_scale_ = np.where(spread > 0, spread, still)  # a constant is answered by itself
        x, target = self._standardised(X[rows]), torch.from_numpy((y[rows] - self.y_mean_) / self.y_scale_)
        loss, outputs = self._loss()
        self.predictor_ = self._fit_predictor(x, target, part, loss, outputs, weights)
        self._learn_noise(x, target, part, unit)
        self.band_ = self._learn_band(x, target, part, loss, weights) if self.band == "influence" else None
        self.held_out_ = np.zeros(len(X), dtype=bool)
        self.held_out_[rows[(part == CALIBRATION).numpy()]] = True
        self.held_out_[rows[(part != CALIBRATION).numpy()]] = False  # of several copies some were trained on
        return self

    def _loss(self) -> tuple[Loss, int]:
        """With a Gaussian head, where the method can take one and the net has one."""
        k = self.n_outputs_
        if not isinstance(self.method, str):
            loss = getattr(self.method, "loss", nn.MSELoss())
            return loss, 2 * k if isinstance(loss, GaussianNLL) else k
        entry = find_method(self.method)
        if "regression" not in entry.tasks:
            raise ValueError(f"got the method {self.method!r}, which is not for regression; expected another")
        candidates: list[tuple[Loss, int]] = [(GaussianNLL(beta=0.5), 2 * k), (GaussianNLL(), 2 * k)]
        for loss, outputs in candidates if entry.needs_net else []:
            try:
                entry.make(loss=loss)
            except ValueError:
                continue
            if self._outputs_of_net(outputs) == outputs:
                return loss, outputs
        if (outputs := self._outputs_of_net(k)) != k:
            raise ValueError(
                f"the net gives {outputs} outputs for {k} target(s); expected {k}, or twice as many for a Gaussian "
                "head: make it with the numbers that net(inputs, outputs) is given"
            )
        return nn.MSELoss(), k

    def _neuboots(self, loss: Loss) -> Method:
        return NeuBoots(loss=loss, weight_distribution=Dirichlet(concentration=20.0), resample="pool")

    def _learn_noise(self, x: Tensor, target: Tensor, part: Tensor, unit: Array) -> None:
        held_out = part != TRAIN if bool((part != TRAIN).any()) else part == TRAIN
        outputs = self.predictor_.summarize(x[:1], 1).mean.shape[1]
        self.gaussian_ = outputs > self.n_outputs_
        mean, spread, raw_std = self._figures(x[held_out], self.num_samples)
        error = target[held_out].numpy() - mean
        calibration = (part[held_out] == CALIBRATION).numpy()
        varies = self.gaussian_ or bool(spread.any())
        noise = NoiseScale.learn(error, raw_std, calibration, varies=varies)
        self.noise_offset_, self.noise_trust_, self.scores_ = noise.offset, noise.trust, noise.scores
        self.n_calibration_ = len(np.unique(unit[(part == CALIBRATION).numpy()]))

    def _learn_band(
        self, x: Tensor, target: Tensor, part: Tensor, loss: Loss, weights: Array | None
    ) -> ConfidenceBand | None:
        """That of the one net behind the mean; None, and so the method's own, where there is none, or another loss."""
        train = part == TRAIN
        some = torch.nonzero(train)[:1000, 0]  # enough to see whether a net gives the mean
        mean = self._figures(x[some], self.num_samples)[0]
        noise = float(np.sqrt(np.mean((target[some].numpy() - mean) ** 2)))
        net = find_mean_net(self.predictor_, x[some], mean, noise)
        if net is None or not isinstance(loss, GaussianNLL | nn.MSELoss):
            return None
        y = target if weights is None else append_weights(target, weights)
        try:
            return fit_confidence_band(
                net, loss, x[train], y[train], x[~train], weighted=weights is not None, seed=self.seed_
            )
        except (ValueError, RuntimeError) as fault:  # a net that torch cannot differentiate twice over, or of no number
            warnings.warn(
                f"the net has no influence bootstrap ({fault}): the confidence band is that of the method; choose "
                "band='method' to have it so",
                UserWarning,
                stacklevel=3,
            )
            return None

    def _sure(self, x: Tensor, spread: Array) -> Array:
        """The standard deviation of the mean, in units of the standardised targets: (N, k)."""
        band: ConfidenceBand | None = getattr(self, "band_", None)
        return spread if band is None else band.std(x).double().numpy()

    @property
    def _noise(self) -> NoiseScale:
        return NoiseScale(self.noise_offset_, float(self.noise_trust_), self.scores_, self.n_calibration_)

    def _figures(self, x: Tensor, num_samples: int) -> tuple[Array, Array, Array]:
        """m, τ and √(τ² + σ²) in units of the standardised targets: (N, k) each."""
        k = self.n_outputs_
        parts = []
        for some in torch.split(x, _ROWS):
            with torch.no_grad():
                stream = self.predictor_.stream(some, int(num_samples), seed=self.seed_)
            # Exact moments, where the method knows them, need no replicate, nor the probabilities that a summary has.
            summary = stream.moments or self.predictor_.summarize(some, int(num_samples), seed=self.seed_)
            parts.append((summary.mean.double().numpy(), summary.std.double().numpy()))
        outputs, spreads = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        mean, spread = outputs[:, :k], spreads[:, :k]
        if not self.gaussian_:
            return mean, spread, spread
        return mean, spread, np.sqrt(spread**2 + np.exp(np.clip(outputs[:, k:], -12.0, 12.0)))

    def forecast(self, X: Any, *, level: float = 0.95, num_samples: int | None = None) -> Forecast:
        """Mean, standard deviation and both intervals at once."""
        level = _check_level(level)
        x = self.inputs(X)
        mean, spread, raw_std = self._figures(x, self.num_samples if num_samples is None else num_samples)
        low, high = self._new(mean, raw_std, level)
        half = -ndtri((1 - level) / 2) * self._sure(x, spread)
        sure_low, sure_high = self._in_units(mean - half), self._in_units(mean + half)
        std = self._shaped(self._noise.std(raw_std) * self.y_scale_)
        return Forecast(self._in_units(mean), std, low, high, sure_low, sure_high)

    def _new(self, mean: Array, raw_std: Array, level: float) -> tuple[Array, Array]:
        """Where a new y falls: (low, high)."""
        reach = self._noise.reach(level) * self._noise.std(raw_std)
        return self._in_units(mean - reach), self._in_units(mean + reach)

    def _in_units(self, values: Array) -> Array:
        return self._shaped(values * self.y_scale_ + self.y_mean_)

    def _shaped(self, values: Array) -> Array:
        return values[:, 0] if self.one_column_ else values

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of y at each row; with `return_std` also the standard deviation of a new y around it."""
        mean, _, raw_std = self._figures(self.inputs(X), self.num_samples)
        found = self._in_units(mean)
        return (found, self._shaped(self._noise.std(raw_std) * self.y_scale_)) if return_std else found

    def predict_interval(
        self, X: Any, level: float = 0.95, interval: IntervalType = "prediction"
    ) -> tuple[Array, Array]:
        """(low, high): where a new y falls ("prediction"), or where the regression function lies ("confidence").

        The first is conformal and keeps its level on rows like those it was fitted to; the second is the bootstrap's.
        """
        if interval not in ("prediction", "confidence"):
            raise ValueError(f"got kind={interval!r}; expected 'prediction' or 'confidence'")
        level = _check_level(level)
        x = self.inputs(X)
        mean, spread, raw_std = self._figures(x, self.num_samples)
        if interval == "prediction":
            return self._new(mean, raw_std, level)
        half = -ndtri((1 - level) / 2) * self._sure(x, spread)
        return self._in_units(mean - half), self._in_units(mean + half)

    def sample(self, X: Any, n: int = 1, *, kind: IntervalType = "confidence") -> Array:
        """n replicates of the regression function at X, or of new targets ("prediction"): (n, N), or (n, N, k)."""
        if kind not in ("prediction", "confidence"):
            raise ValueError(f"got kind={kind!r}; expected 'prediction' or 'confidence'")
        x, k, n = self.inputs(X), self.n_outputs_, check_int("n", n, minimum=1)
        band: ConfidenceBand | None = getattr(self, "band_", None)
        if kind == "confidence" and band is not None:
            mean = self._figures(x, self.num_samples)[0]
            samples = mean + band.sample(x, n, seed=self.seed_).double().numpy()
        else:
            samples = self.predictor_.predict(x, n, seed=self.seed_).samples[:, :, :k].double().numpy()
        if kind == "prediction":
            _, spread, raw_std = self._figures(x, self.num_samples)
            noise = np.sqrt(np.maximum(self._noise.std(raw_std) ** 2 - spread**2, 0.0))
            samples = samples + noise * np.random.default_rng(self.seed_).standard_normal(samples.shape)
        samples = samples * self.y_scale_ + self.y_mean_
        return np.asarray(samples[:, :, 0] if self.one_column_ else samples)

    def _num_outputs(self) -> int:
        return int(self.n_outputs_) * (2 if self.gaussian_ else 1)

    def _write_more(self, folder: Path) -> dict[str, Any]:
        from safetensors.torch import save_file

        band: ConfidenceBand | None = getattr(self, "band_", None)
        if band is None:
            return {}
        save_file(band.state_dict(), folder / "band.safetensors")
        return {"band_error_": band.error}

    def _read_more(self, folder: Path, held: dict[str, Any]) -> None:
        """A folder of an earlier release has no band: the method's own takes its place."""
        self.band_ = None
        if (error := held.get("band_error_")) is not None:
            net = self.predictor_.net
            assert net is not None, "there was one when it was saved"
            band = ConfidenceBand.from_config(net, self.n_outputs_, load_tensors(folder / "band.safetensors"), error)
            band.std(torch.zeros(1, self.n_features_in_))  # what does not fit is found now
            self.band_ = band

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags


def _check_level(level: Any) -> float:
    if not (isinstance(level, Real) and 0 < float(level) < 1):
        raise ValueError(f"got level={level!r}; expected a number between 0 and 1, such as 0.95")
    return float(level)
