"""Regressor with the interface of scikit-learn: mean, prediction interval of a new y, and confidence band of the mean.

    s(x) = e^a √(τ²(x) + σ²(x))^b,   b = ½;   prediction interval [m(x) − q s(x), m(x) + q s(x)]

τ is the standard deviation over replicates, σ the noise of a Gaussian head (absent: a constant). A net fits its
training rows more closely than new ones, and the more closely it fits, the less reliable its σ(x): log s is half way
between what the net predicts and a constant (b), and its level (a) maximizes the likelihood of held-out rows. q is the
conformal quantile of |y − m(x)| / s(x) over rows that the net was not fitted to, so that the interval keeps its level
for any predictor (Lei et al. 2018; see `neuboots.evaluation.conformal`).
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch
from scipy.special import ndtri
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from neuboots._validation import check_choice, check_fraction, check_int
from neuboots.estimators._base import (
    CALIBRATION,
    TRAIN,
    VALIDATION,
    Array,
    NeuBootsEstimator,
    TrainingRows,
    append_weights,
    mean_and_std,
)
from neuboots.evaluation.conformal import conformal_quantile
from neuboots.losses import GaussianNLL, Loss
from neuboots.methods import find_method
from neuboots.serialization import Artifact
from neuboots.weights import Dirichlet

if TYPE_CHECKING:
    from neuboots.estimators._confidence_band import ConfidenceBand

SCALE_EXPONENT = 0.5  # b
_MIN_STD = 1e-6  # in units of the targets' standard deviation: 0 would make intervals infinite or empty
_MAX_BATCH = 1 << 16


@dataclass(frozen=True, eq=False)
class Forecast:
    """Predictions for N rows in the units of y: (N,) each, or (N, k) for k targets.

    Args:
        mean: Mean of y.
        std: Standard deviation of a new y.
        low: Lower bound of the prediction interval of a new y.
        high: Upper bound of the prediction interval.
        confidence_low: Lower bound of the confidence band of the mean.
        confidence_high: Upper bound of the confidence band.
    """

    mean: Array
    std: Array
    low: Array
    high: Array
    confidence_low: Array
    confidence_high: Array


@dataclass(eq=False, repr=False)
class NeuBootsRegressor(RegressorMixin, NeuBootsEstimator):  # type: ignore[misc]
    """Regressor for y = f(x) + ε: B bootstrapped nets for f from one training, held-out rows for ε.

    X and y are standardized. A fraction of the rows is held out: one half for early stopping, the other calibrates the
    prediction interval, which contains a new y with at least the probability `level` for rows from the same
    distribution. Integer sample weights are frequencies, others multiply the loss.

    The confidence band of f is that of the influence bootstrap around the trained net (see docs/validity.md). A method
    without a single net behind its mean (ensembles, "mc-dropout", "swag", Gaussian processes), or with a loss other
    than the squared error and `GaussianNLL`, has the standard deviation over its replicates instead; `band_` is then
    None.

    Args:
        method: Name of a method (see `neuboots.list_methods`), or a method with options.
        net: Function of the numbers of inputs and outputs that makes a net; None for an MLP. It is called for 2k
            outputs (means and log-variances of k targets), and its net may have k alone.
        widths: Hidden widths of the MLP.
        epochs: Maximum number of epochs.
        batch_size: Batch size; "auto" for about a twentieth of the rows.
        learning_rate: Initial learning rate of AdamW, with cosine annealing.
        weight_decay: Weight decay of AdamW.
        early_stopping: Whether to stop after `patience` epochs without a lower validation loss.
        patience: Number of epochs.
        validation_fraction: Fraction of the rows that is held out.
        num_samples: Number of replicates B of a prediction.
        random_state: Seed, or random state, as in scikit-learn.
        verbose: Whether to show a progress bar.
        band: Confidence band: "influence", or "method" for the standard deviation over replicates.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> regressor = NeuBootsRegressor(epochs=20, random_state=0).fit(X[:400], y[:400])
        >>> mean, std = regressor.predict(X[400:], return_std=True)
        >>> low, high = regressor.predict_interval(X[400:], level=0.9)
        >>> bool(((low < mean) & (mean < high)).all()), regressor.sample(X[400:], 7).shape
        (True, (7, 42))
    """

    _: KW_ONLY
    band: Literal["influence", "method"] = "influence"

    task = "regression"
    _method_options: ClassVar[Mapping[str, Any]] = {
        "neuboots": {"weight_distribution": Dirichlet(concentration=20.0), "resample": "pool"}
    }

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the regressor.

        Args:
            X: Rows (n, features).
            y: Targets (n,) or (n, k).
            sample_weight: Weight of each row (n,).

        Returns:
            The estimator itself.

        Raises:
            ValueError: If an option is not valid.
        """
        self._check_options()
        check_choice("band", self.band, ("influence", "method"))
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        self.one_column_ = y.ndim == 1
        y = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
        self.n_outputs_ = y.shape[1]
        rows = self._prepare_rows(X, y, sample_weight)
        self.y_mean_, std = mean_and_std(y[rows.index[(rows.split == TRAIN).numpy()]])
        tiny = 1e-9 * np.where(self.y_mean_ == 0, 1.0, np.abs(self.y_mean_))
        self.y_scale_ = np.where(std > 0, std, np.where(np.ptp(y, 0) > 0, 1.0, tiny))  # a constant predicts itself
        target = torch.from_numpy((y[rows.index] - self.y_mean_) / self.y_scale_)
        loss, outputs = self._choose_loss()
        self.predictor_ = self._fit_predictor(rows, target, loss, outputs)
        self._fit_noise(rows, target)
        self.band_ = self._fit_band(rows, target, loss) if self.band == "influence" else None
        self.band_error_ = None if self.band_ is None else self.band_.error
        return self

    def _choose_loss(self) -> tuple[Loss, int]:
        """Loss and number of outputs: a Gaussian head, if the method accepts its loss and the net has one."""
        k = self.n_outputs_
        if not isinstance(self.method, str):
            loss = getattr(self.method, "loss", nn.MSELoss())
            return loss, 2 * k if isinstance(loss, GaussianNLL) else k
        gaussian = [GaussianNLL(beta=0.5), GaussianNLL()] if find_method(self.method).needs_net else []
        for candidate in gaussian:
            try:
                self._create_method(candidate)
            except ValueError:
                continue
            if self._count_outputs(2 * k) == 2 * k:
                return candidate, 2 * k
        self._check_outputs(k)
        return nn.MSELoss(), k

    def _fit_noise(self, rows: TrainingRows, target: Tensor) -> None:
        """Fit a and b of s(x) to the held-out rows; compute the scores |y − m(x)| / s(x) of the calibration rows."""
        self.gaussian_ = self.predictor_.summarize(rows.x[:1], 1).mean.shape[1] > self.n_outputs_
        calibration = rows.split == CALIBRATION
        index = torch.cat([split.nonzero()[:, 0] for split in (rows.split == VALIDATION, calibration)])
        index = index if len(index) else torch.arange(len(target))  # without held-out rows, the training rows
        mean, std, raw_std = self._predict_moments(rows.x[index], self.num_samples)
        error = target[index].numpy() - mean
        self.noise_exponent_ = SCALE_EXPONENT if self.gaussian_ or std.any() else 0.0
        shape = np.maximum(raw_std, _MIN_STD) ** self.noise_exponent_
        self.noise_offset_ = np.log(np.maximum(np.sqrt(np.mean((error / shape) ** 2, 0)), _MIN_STD))  # (k,)
        # copies of a calibration row come one after another
        self.score_counts_ = np.unique(rows.group[calibration.numpy()], return_counts=True)[1]
        start = len(error) - int(self.score_counts_.sum())
        self.scores_ = np.abs(error[start:]) / self._noise_std(raw_std[start:])  # (m, k)

    def _noise_std(self, raw_std: Array) -> Array:
        """Standard deviation s(x) of a new y, in units of the standardized targets: (N, k)."""
        return np.asarray(np.exp(self.noise_offset_) * np.maximum(raw_std, _MIN_STD) ** float(self.noise_exponent_))

    def _score_quantile(self, level: float) -> Array:
        """Quantile q of each output (k,); a normal one, with a warning, if there are too few calibration rows."""
        counts = torch.from_numpy(self.score_counts_)
        found = np.array([conformal_quantile(torch.from_numpy(scores), counts, level) for scores in self.scores_.T])
        if np.isfinite(found).all():
            return found
        warnings.warn(
            f"{len(counts)} rows were held out for calibration, and level {level:g} needs "
            f"{math.ceil(level / (1 - level) - 1e-9)}: the interval is a normal one, without a guarantee; use more "
            "rows, a larger validation_fraction, or a lower level",
            UserWarning,
            stacklevel=4,
        )
        # not below those of lower levels
        return np.asarray(np.maximum(self.scores_.max(0, initial=0.0), -ndtri((1 - level) / 2)))

    def _fit_band(self, rows: TrainingRows, target: Tensor, loss: Loss) -> "ConfidenceBand | None":
        """Band of the single net behind the mean; None if there is none, or the loss is another one."""
        from neuboots.estimators._confidence_band import find_mean_net, fit_confidence_band

        train = rows.split == TRAIN
        some = torch.nonzero(train)[:1000, 0]  # enough to see whether a net gives the mean
        mean = self._predict_moments(rows.x[some], self.num_samples)[0]
        residual_std = float(np.sqrt(np.mean((target[some].numpy() - mean) ** 2)))
        net = find_mean_net(self.predictor_, rows.x[some], mean, residual_std)
        if net is None or not isinstance(loss, GaussianNLL | nn.MSELoss):
            return None
        y, weighted = append_weights(target, rows.weights), rows.weights is not None
        try:
            x, others = rows.x[train], rows.x[~train]
            return fit_confidence_band(net, loss, x, y[train], others, weighted=weighted, seed=self.seed_)
        except (ValueError, RuntimeError) as error:  # of a net that torch cannot differentiate twice, or not finite
            warnings.warn(
                f"The net has no influence bootstrap ({error}): the confidence band is that of the method, as with "
                "band='method'.",
                UserWarning,
                stacklevel=3,
            )
            return None

    def _predict_moments(self, x: Tensor, num_samples: int) -> tuple[Array, Array, Array]:
        """m, τ and √(τ² + σ²) in units of the standardized targets: (N, k) each."""
        k = self.n_outputs_
        means, stds = [], []
        for batch in torch.split(x, _MAX_BATCH):
            with torch.no_grad():
                stream = self.predictor_.stream(batch, int(num_samples), seed=self.seed_)
            # exact moments need no replicate, nor the probabilities of a summary
            summary = stream.moments or self.predictor_.summarize(batch, int(num_samples), seed=self.seed_)
            means.append(summary.mean.double().numpy())
            stds.append(summary.std.double().numpy())
        outputs, std = np.concatenate(means), np.concatenate(stds)[:, :k]
        if not self.gaussian_:
            return outputs[:, :k], std, std
        return outputs[:, :k], std, np.sqrt(std**2 + np.exp(np.clip(outputs[:, k:], -12.0, 12.0)))

    def forecast(self, X: Any, *, level: float = 0.95, num_samples: int | None = None) -> Forecast:
        """Predict mean, standard deviation and both intervals.

        Args:
            X: Rows (N, features).
            level: Level of the intervals.
            num_samples: Number of replicates; None for that of the estimator.

        Returns:
            The predictions.
        """
        level, x = check_fraction("level", level), self.inputs(X)
        mean, std, raw_std = self._predict_moments(x, self.num_samples if num_samples is None else num_samples)
        prediction = self._bounds(mean, self._score_quantile(level) * self._noise_std(raw_std))
        confidence = self._bounds(mean, -ndtri((1 - level) / 2) * self._mean_std(x, std))
        noise_std = self._squeeze(self._noise_std(raw_std) * self.y_scale_)
        return Forecast(self._to_units(mean), noise_std, *prediction, *confidence)

    def _bounds(self, mean: Array, half: Array) -> tuple[Array, Array]:
        return self._to_units(mean - half), self._to_units(mean + half)

    def _mean_std(self, x: Tensor, std: Array) -> Array:
        """Standard deviation of the mean (N, k), in units of the standardized targets."""
        return std if self.band_ is None else self.band_.std(x).double().numpy()

    def _to_units(self, values: Array) -> Array:
        return self._squeeze(values * self.y_scale_ + self.y_mean_)

    def _squeeze(self, values: Array) -> Array:
        return values[..., 0] if self.one_column_ else values

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predict the mean.

        Args:
            X: Rows (N, features).
            return_std: Whether to return the standard deviation of a new y, too.

        Returns:
            Mean (N,) or (N, k), or mean and standard deviation.
        """
        mean, _, raw_std = self._predict_moments(self.inputs(X), self.num_samples)
        if not return_std:
            return self._to_units(mean)
        return self._to_units(mean), self._squeeze(self._noise_std(raw_std) * self.y_scale_)

    def predict_interval(
        self, X: Any, level: float = 0.95, interval: Literal["prediction", "confidence"] = "prediction"
    ) -> tuple[Array, Array]:
        """Predict an interval.

        Args:
            X: Rows (N, features).
            level: Level of the interval.
            interval: "prediction" for the conformal interval of a new y, "confidence" for the band of the mean.

        Returns:
            Lower and upper bounds, (N,) or (N, k) each.
        """
        check_choice("interval", interval, ("prediction", "confidence"))
        level, x = check_fraction("level", level), self.inputs(X)
        mean, std, raw_std = self._predict_moments(x, self.num_samples)
        if interval == "prediction":
            return self._bounds(mean, self._score_quantile(level) * self._noise_std(raw_std))
        return self._bounds(mean, -ndtri((1 - level) / 2) * self._mean_std(x, std))

    def sample(self, X: Any, n: int = 1, *, observation_noise: bool = False) -> Array:
        """Draw replicates of the regression function.

        Args:
            X: Rows (N, features).
            n: Number of replicates.
            observation_noise: Whether to draw new targets instead, with noise.

        Returns:
            Replicates (n, N) or (n, N, k).
        """
        x, n = self.inputs(X), check_int("n", n, minimum=1)
        mean, std, raw_std = self._predict_moments(x, self.num_samples)
        if self.band_ is not None and not observation_noise:
            return self._to_units(mean + self.band_.sample(x, n, seed=self.seed_).double().numpy())
        samples = self.predictor_.predict(x, n, seed=self.seed_).samples[:, :, : self.n_outputs_].double().numpy()
        if observation_noise:
            noise_std = np.sqrt(np.maximum(self._noise_std(raw_std) ** 2 - std**2, 0.0))
            samples = samples + noise_std * np.random.default_rng(self.seed_).standard_normal(samples.shape)
        return self._to_units(samples)

    def to_artifact(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config, tensors = super().to_artifact()
        if self.band_ is not None:
            tensors |= {f"band.{name}": tensor for name, tensor in self.band_.state_dict().items()}
        return config, tensors

    def _restore(self, artifact: Artifact) -> None:
        self.band_ = None
        if self.band_error_ is not None:
            from neuboots.estimators._confidence_band import ConfidenceBand

            net, state = self.predictor_.net, artifact.select("band.")
            assert net is not None, "a band has a net"
            self.band_ = ConfidenceBand.from_state_dict(net, self.n_outputs_, state, self.band_error_)
        x = torch.zeros(1, self.n_features_in_, dtype=torch.float64)
        mean, std, raw_std = self._predict_moments(x, 1)  # raises if the parts do not fit
        self._to_units(mean + self._noise_std(raw_std) + self._mean_std(x, std) + self.scores_[:1])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
