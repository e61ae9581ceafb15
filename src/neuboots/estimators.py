"""Estimators with the interface of scikit-learn around any method, with calibrated probabilities and intervals.

    regressor = NeuBootsRegressor().fit(X, y)
    low, high = regressor.predict_interval(X_new, level=0.95)

An integer sample weight is a frequency: a row of weight 3 is three rows, one of weight 0 is none. Other weights
multiply the loss (eq. 2.3 with given instead of random weights). Rows are put in an order that depends on their values
alone, before a seed assigns them to splits and batches; duplicates of a row go to one split, or it would be held out
from a net that was trained on it.

Prediction interval of a new y:

    s(x) = e^a √(τ²(x) + σ²(x))^b,   b = ½;   prediction interval [m(x) − q s(x), m(x) + q s(x)]

τ is the standard deviation over replicates, σ the noise of a Gaussian head (absent: a constant). A net fits its
training rows more closely than new ones, and the more closely it fits, the less reliable its σ(x): log s is half way
between what the net predicts and a constant (b), and its level (a) maximizes the likelihood of held-out rows. q is the
conformal quantile of |y − m(x)| / s(x) over rows that the net was not fitted to, so that the interval keeps its level
for any predictor (Lei et al. 2018; see `neuboots.evaluation.conformal`).

With few rows, none is held out: the net is trained on all of them, for all epochs, and a and q come from
cross-validation, in which each row has m(x) and s(x) of a net that was trained on the other folds (Barber et al. 2021,
with the interval around one net instead of those of the folds). The prediction interval contains the confidence band.

Confidence band of the mean, from a low-rank approximation of the covariance of the net's weights:

    s²(x) = J(x) (Σ + vvᵀ) J(x)ᵀ,   Σ + vvᵀ ≈ Σ_k u_k u_kᵀ + diag(β)

Σ is the covariance of the influence bootstrap of all weights (`neuboots.methods.influence`): how far another sample of
training rows would have moved them. v is the Newton step from the net's weights to the minimum of its loss, which
mini-batches and early stopping do not reach: another seed ends elsewhere, and where J(x)v is large, the mean is off by
about as much.

The exact form stores the training rows and a matrix of rows × rows. The approximation stores the directions u_k that
explain most of s² at training rows, and one variance β for the weights of each input unit of a layer, fitted to the
exact s² at other rows. A saved estimator thus contains no training row, and a prediction costs a few passes through the
net, whatever the number of training rows.
"""

import copy
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, ClassVar, Literal, Self, get_type_hints

import numpy as np
import torch
from scipy.optimize import nnls
from scipy.special import ndtri, stdtrit
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots._prng import _GOLDEN, _mix
from neuboots._validation import ArgumentError, Count, check_choice, check_fraction, check_int, check_types
from neuboots.head import compute_output
from neuboots.loading import train_val_test_split
from neuboots.losses import GaussianNLL, Loss, as_loss
from neuboots.methods import InfluenceBootstrap, create_method, find_method
from neuboots.methods._base import find_saved_method
from neuboots.methods._least_squares import covariance_root, working_residuals
from neuboots.methods.influence._tangent import Jacobian, TangentPredictor, build_tangent_predictors
from neuboots.nets.mlp import MLP
from neuboots.posthoc import TemperatureScaling
from neuboots.prediction import Method, Predictor, check_summarized, class_probabilities, conformal_quantile
from neuboots.serialization import (
    Artifact,
    ArtifactError,
    build_predictor,
    check_restored,
    check_tensors,
    describe_predictor,
    read_artifact,
    reading,
    write_artifact,
)
from neuboots.training import EpochReport, TrainingConfig, constant_schedule, cosine_schedule, resolve_fit
from neuboots.weights import Dirichlet

__all__ = ["Forecast", "NeuBootsClassifier", "NeuBootsRegressor"]

Array = np.ndarray[Any, Any]
NetFactory = Callable[[int, int], nn.Module]

TRAIN, VALIDATION, CALIBRATION = 0, 1, 2  # splits of rows

MAX_COPIES = 20  # rows after repetition by integer weights, as a multiple of n; with more, weights multiply the loss
MIN_SPLIT_ROWS = {"classification": 20, "regression": 100}  # with fewer rows, none is held out
MIN_ROWS = 4  # of a regression
NUM_FOLDS = 5
MIN_DISTINCT_HELD_OUT = 10  # duplicates of one row are at most a tenth of the rows held out
SCALE_EXPONENT = 0.5  # b
_SAVED_APART = ("predictor_", "band_", "seed_")  # not among the fitted attributes of an artifact
_MAX_BATCH = 1 << 16  # rows of a prediction at a time
_MIN_TEMPERATURE_ROWS = 30  # with fewer validation rows, no temperature is fitted
_LOG_TEMPERATURE_PRIOR_STD = 0.5  # few rows may all be classified correctly by chance
_MIN_STD = 1e-6  # in units of the targets' standard deviation: 0 would make intervals infinite or empty

MAX_EXACT_ROWS = 1500  # rows × targets of the exact form; of more, a random subset is taken
RANKS = (4, 8, 16, 32, 64, 128)  # numbers of directions that are tried
ERROR_TOLERANCE = 0.05  # relative error of s(x) at which no more directions are tried
_MAX_DIRECTION_VALUES = 1 << 22  # values of all directions together
_SAMPLE_ROWS = 256  # rows that directions, β and the error are computed from
_MAX_BAND_BATCH = 1024
_MAX_PRODUCT_VALUES = 1 << 25  # rows × directions × outputs of a layer in memory
_REPLICATE_BATCH = 64


# -- rows ----------------------------------------------------------------------------------------------


def _canonical_order(X: Array, *others: Array) -> Array:
    """Order of rows that depends on their values alone: by a hash of X, and of the other columns where X is equal.

    >>> x = np.array([[1.0], [2.0], [1.0]])
    >>> bool((x[_canonical_order(x)] == x[::-1][_canonical_order(x[::-1])]).all())
    True
    """
    by_x = _hash_rows(torch.zeros(len(X), dtype=torch.int64), X)
    by_all = by_x
    for columns in others:
        by_all = _hash_rows(by_all, columns)
    return np.lexsort((by_all.numpy().view(np.uint64), by_x.numpy().view(np.uint64)))


def _hash_rows(words: Tensor, columns: Array) -> Tensor:
    """Hash of the words (n,) and the columns (n,) or (n, k)."""
    for values in np.atleast_2d(columns.T):
        bits = (values + 0.0).astype(np.float64).view(np.int64)  # −0 is 0
        words = _mix((words ^ torch.from_numpy(bits)) + _GOLDEN)
    return words


def _duplicate_groups(X: Array, y: Array, max_copies: float) -> Array:
    """Group of each row (n,), for rows in canonical order: duplicates have the same X and y.

    Rows are their own groups where one X has several y, which a net cannot memorize, and where there are more than
    `max_copies` duplicates, of which a split would otherwise consist.

    >>> X, y = np.array([[3.0], [3.0], [1.0], [1.0], [2.0]]), np.array([[7.0], [7.0], [7.0], [8.0], [7.0]])
    >>> _duplicate_groups(X, y, 2)
    array([0, 0, 1, 2, 3])
    """
    first = np.append(True, (X[1:] != X[:-1]).any(1))
    group = np.cumsum(first) - 1
    several = np.append(False, (y[1:] != y[:-1]).any(1)) & ~first
    single = (np.bincount(group, several) > 0) | (np.bincount(group) > max_copies)
    return np.cumsum(first | single[group]) - 1


def _mean_and_std(values: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of each column: (k,) each; 0 where the deviation is rounding error.

    >>> _mean_and_std(np.array([[1e200, 0.1], [3e200, 0.1]]))
    (array([2.e+200, 1.e-001]), array([1.e+200, 0.e+000]))
    """
    exponent = np.clip(np.frexp(np.abs(values).max(0))[1], -1000, 1000)  # the square of 1e200 would overflow
    scaled = np.ldexp(values, -exponent)
    mean, std = scaled.mean(0), scaled.std(0)
    std = np.where(std > 1e-12 * np.abs(mean), std, 0.0)
    return np.ldexp(mean, exponent), np.ldexp(std, exponent)


@dataclass(frozen=True)
class _WeightedLoss:
    """w ℓ(z, y) for targets (N, k + 1): those of the loss, and the weight of the row."""

    loss: Loss

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        y, w = targets[:, :-1], targets[:, -1]
        losses = as_loss(self.loss)(outputs, y[:, 0].long() if isinstance(self.loss, nn.CrossEntropyLoss) else y)
        return losses * w.to(losses).view(-1, *[1] * (losses.ndim - 1))


def _append_weights(y: Tensor, weights: Array | None) -> Tensor:
    """Targets for `_WeightedLoss`: (n, k + 1), with weights of mean 1; y itself without weights."""
    if weights is None:
        return y
    w = torch.from_numpy(weights / weights.mean())
    return torch.cat([y.reshape(len(y), -1).double(), w[:, None]], 1)


@dataclass(frozen=True, eq=False)
class _TrainingRows:
    """Rows after repetition by integer weights, in canonical order: (m, …) each."""

    index: Array  # of each row among the n rows that were passed to fit
    weights: Array | None  # that multiply the loss
    split: Tensor  # TRAIN, VALIDATION or CALIBRATION
    group: Array  # of duplicates
    x: Tensor  # standardized inputs


# -- the base class ------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class _NeuBootsEstimator(BaseEstimator):
    """Options of both estimators, which `fit` validates."""

    task: ClassVar[Literal["classification", "regression"]]
    _method_options: ClassVar[Mapping[str, Mapping[str, Any]]]  # of methods that are given by name
    _fitted_types: ClassVar[Mapping[str, Any]] = {}  # of further fitted attributes
    _fitted_shapes: ClassVar[Mapping[str, str]] = {}  # (d,) features, (k,) targets, or any number

    method: str | Method = "neuboots"
    _: KW_ONLY
    net: NetFactory | None = None
    widths: tuple[int, ...] = (100, 100)
    epochs: int = 200
    batch_size: int | Literal["auto"] = "auto"
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    early_stopping: bool = True
    patience: int = 40
    validation_fraction: float = 0.2
    num_samples: int = 100
    random_state: Any = None
    verbose: bool = False

    def _check_options(self) -> None:
        for name in ("epochs", "patience", "num_samples"):
            check_int(name, getattr(self, name), minimum=1)
        check_summarized(int(self.num_samples))
        for name in ("learning_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ArgumentError(name, getattr(self, name), "a number of at least 0")
        check_fraction("validation_fraction", self.validation_fraction, zero=True)
        if self.batch_size != "auto":
            check_int("batch_size", self.batch_size, minimum=1)
        for width in self.widths:
            check_int("widths", width, minimum=1)
        if isinstance(self.method, str):
            if self.task not in find_method(self.method).tasks:
                raise ArgumentError("method", self.method, f"a method for {self.task}")
        elif isinstance(self.method, type) or not hasattr(self.method, "fit"):
            raise ArgumentError("method", self.method, "a name, or a method such as MCDropout(rate=0.1)")
        state = self.random_state
        self.seed_ = int(state if isinstance(state, Integral) else check_random_state(state).randint(2**31 - 1))

    def _prepare_rows(self, X: Array, y: Array, sample_weight: Any, strata: Array | None = None) -> _TrainingRows:
        """Order, repeat, split and standardize the rows; y is (n, k)."""
        weights = None
        index = _canonical_order(X, y)
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            if (weights == np.floor(weights)).all() and weights.sum() <= MAX_COPIES * len(weights):
                index, weights = np.repeat(index, weights[index].astype(np.int64)), None
            else:
                index = _canonical_order(X, y, weights)
                index = index[weights[index] > 0]
                weights = weights[index]
        group = self._group_rows(X[index], y[index])
        split = self._split_groups(group, None if strata is None else torch.from_numpy(strata[index]))
        calibration = (split == CALIBRATION).numpy()
        self.held_out_ = np.isin(np.arange(len(X)), index[calibration])
        self.held_out_[index[~calibration]] = False  # a row is held out with all its copies
        train = X[index[(split == TRAIN).numpy()]]
        self.x_mean_, std = _mean_and_std(train)
        low, high = train.min(0), train.max(0)
        # two values are scaled by their distance: a rare flag is not an outlier
        two_values = ((low == train) | (high == train)).all(0)
        self.x_scale_ = np.where(std > 0, np.where(two_values, high - low, std), 1.0)
        return _TrainingRows(index, weights, split, group, self._standardize(X[index]))

    def _group_rows(self, X: Array, y: Array) -> Array:
        """Group of each row, which is held out or trained on with all others of its group."""
        max_copies = self.validation_fraction * len(X) / MIN_DISTINCT_HELD_OUT
        if self.task == "regression":
            if len(X) < MIN_ROWS:
                hint = "rows of weight 0 do not count; collect more rows"
                raise ArgumentError("X", f"n_samples={len(X)}", f"at least {MIN_ROWS} rows", hint=hint)
            group = _duplicate_groups(X, y, max(max_copies, MAX_COPIES))
            if MIN_ROWS <= group[-1] + 1 < MIN_SPLIT_ROWS[self.task]:  # these are cross-validated
                return group
        return _duplicate_groups(X, y, max_copies)

    def _split_groups(self, group: Array, strata: Tensor | None) -> Tensor:
        """Split of each row, the same for all rows of a group."""
        n, classes = int(group[-1]) + 1, 0 if strata is None else len(torch.unique(strata))
        # with many classes, most rows are for training
        fraction = min(self.validation_fraction, (n - classes) / (2 * n))
        if n < MIN_SPLIT_ROWS[self.task] or fraction * n < 2:
            return torch.zeros(len(group), dtype=torch.uint8)
        classifies = self.task == "classification"  # its temperature is fitted to the validation split
        validation = fraction / 2 if self.early_stopping or classifies else 0.0
        calibration = fraction - validation
        firsts = None if strata is None else strata[np.unique(group, return_index=True)[1]]
        split = train_val_test_split(n, validation / (1 - calibration), calibration, seed=self.seed_, strata=firsts)
        return split[torch.from_numpy(group)]

    def _fit_predictor(self, rows: _TrainingRows, y: Tensor, loss: Loss, outputs: int) -> Predictor:
        """Train a net with the method."""
        method = self._create_method(loss if rows.weights is None else _WeightedLoss(loss))
        train, validation = rows.split == TRAIN, rows.split == VALIDATION
        targets = _append_weights(y, rows.weights)
        targets = targets.float() if targets.is_floating_point() else targets
        info = find_method(self.method) if isinstance(self.method, str) else getattr(self.method, "info", None)
        stops = bool(self.early_stopping and validation.any()) and (info is None or info.early_stopping)
        self.net_outputs_ = outputs
        self.loss_curve_: list[float] = []
        self.validation_curve_: list[float] = []

        def record(report: EpochReport) -> None:
            self.loss_curve_.append(report.loss)
            if "loss" in report.val_metrics:
                self.validation_curve_.append(report.val_metrics["loss"])

        config = TrainingConfig(
            epochs=int(self.epochs),
            batch_size=_choose_batch_size(int(train.sum())) if self.batch_size == "auto" else int(self.batch_size),
            optimizer=partial(torch.optim.AdamW, lr=float(self.learning_rate), weight_decay=float(self.weight_decay)),
            lr_scheduler=cosine_schedule if self.learning_rate else constant_schedule,
            seed=self.seed_,
            patience=int(self.patience) if stops else None,
            accelerator="cpu",
            on_epoch=record,
            progress=bool(self.verbose),
        )
        data = TensorDataset(rows.x[train].float(), targets[train])
        val_data = TensorDataset(rows.x[validation].float(), targets[validation]) if stops else None
        predictor = method.fit(partial(self._make_net, outputs), data, config, val_data=val_data)
        predictor.module.double()  # so that the prediction of a row does not depend on its batch
        try:
            predictor.summarize(rows.x[:2].double(), 2)
        except RuntimeError:  # of a net that cannot compute in double precision
            predictor.module.float()
        return predictor

    def _make_net(self, outputs: int) -> nn.Module:
        if self.net is None:
            return MLP(self.n_features_in_, outputs, widths=tuple(map(int, self.widths)))
        net = None if isinstance(self.net, nn.Module) else self.net(self.n_features_in_, outputs)
        if not isinstance(net, nn.Module):
            hint = "lambda inputs, outputs: nn.Sequential(nn.Linear(inputs, 50), nn.ReLU(), nn.Linear(50, outputs))"
            raise ArgumentError("net", self.net, "a function of the numbers of inputs and outputs", hint=hint)
        return net

    def _count_outputs(self, outputs: int) -> int:
        """Number of outputs of a net that is made for so many."""
        if self.net is None:
            return outputs
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = self._make_net(outputs).eval()(torch.zeros(2, self.n_features_in_))
        return int(found.shape[1]) if isinstance(found, Tensor) and found.ndim > 1 else 1

    def _check_outputs(self, outputs: int) -> None:
        if (found := self._count_outputs(outputs)) != outputs:
            raise ArgumentError("net", self.net, f"a function whose net has {outputs} outputs, not {found}")

    def _create_method(self, loss: Loss) -> Method:
        hint = "use integer weights, which are frequencies, or another method by its name"
        if not isinstance(self.method, str):
            if isinstance(loss, _WeightedLoss):
                raise ArgumentError("sample_weight", "floats", "integers for a method with its own loss", hint=hint)
            return self.method
        try:
            return create_method(self.method, loss=loss, **self._method_options.get(self.method, {}))
        except ValueError:
            if not isinstance(loss, _WeightedLoss):
                raise
            raise ArgumentError("sample_weight", "floats", f"integers for method {self.method!r}", hint=hint) from None

    def inputs(self, X: Any) -> Tensor:
        """Standardize rows as the net takes them.

        Args:
            X: Rows (N, n_features_in_).

        Returns:
            Inputs (N, n_features_in_), float64.

        Raises:
            ValueError: If a value is too far from the training rows for single precision.
        """
        check_is_fitted(self)
        return self._standardize(validate_data(self, X, reset=False, dtype=np.float64))

    def _standardize(self, X: Array) -> Tensor:
        with np.errstate(over="ignore"):
            scaled = (X - self.x_mean_) / self.x_scale_
        if len(far := np.argwhere(~(np.abs(scaled) < np.finfo(np.float32).max))):
            row, column = far[0].tolist()
            raise ArgumentError("X", f"{X[row, column]:g} in row {row}, column {column}", "smaller numbers")
        return torch.from_numpy(scaled)

    # -- saving -----------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the fitted estimator in a folder of JSON and safetensors.

        Args:
            folder: Folder to write; an earlier artifact is replaced.
        """
        config, tensors = self.to_artifact()
        write_artifact(folder, config, tensors, kind="estimator")

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, net: NetFactory | nn.Module | None = None) -> Self:
        """Load an estimator.

        A method that was given with options is loaded by its name: pass it again to fit anew.

        Args:
            folder: Folder that `save` wrote.
            net: Function that makes the net, or a net, if it is not one of `neuboots.nets`.

        Returns:
            The fitted estimator.

        Raises:
            FileNotFoundError: If there is no artifact.
            ArtifactError: If it is damaged or of another class.
        """
        return cls.from_artifact(read_artifact(folder, kind="estimator"), net=net)

    def to_artifact(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Describe the fitted estimator by JSON values and tensors.

        Returns:
            Config and tensors for `from_artifact`.
        """
        check_is_fitted(self)
        values, tensors = {}, {f"predictor.{name}": value for name, value in self.predictor_.state_dict().items()}
        for name, value in vars(self).items():
            if not name.endswith("_") or name in _SAVED_APART:
                continue
            if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
                tensors[f"fitted.{name}"] = torch.from_numpy(np.array(value))
            else:
                values[name] = value.tolist() if isinstance(value, np.ndarray) else value
        options = {name: value for name, value in self.get_params(deep=False).items() if name not in ("net", "method")}
        options = {name: value.item() if isinstance(value, np.generic) else value for name, value in options.items()}
        options |= {name: bool(options[name]) for name in ("early_stopping", "verbose")}
        options |= {"random_state": self.seed_, "widths": [int(width) for width in self.widths]}
        config = {
            "estimator": type(self).__name__,
            "method": self.method if isinstance(self.method, str) else None,
            "options": options,
            "fitted": values,
            "predictor": describe_predictor(self.predictor_),
        }
        return config, tensors

    @classmethod
    def from_artifact(cls, artifact: Artifact, *, net: NetFactory | nn.Module | None = None) -> Self:
        """Rebuild an estimator.

        Args:
            artifact: Config and tensors of `to_artifact`.
            net: Function that makes the net, or a net, if it is not one of `neuboots.nets`.

        Returns:
            The fitted estimator.

        Raises:
            ArtifactError: If config and tensors are not those of such an estimator.
        """
        config = {key: value for key, value in artifact.config.items() if key not in ("format", "version", "kind")}
        if config.get("estimator") != cls.__name__:
            raise ArtifactError(artifact.folder, f"it is a {config.get('estimator')}, expected a {cls.__name__}")
        with reading(artifact.folder, argument="model"):
            cls._check_artifact(config, artifact.select("fitted."))
            estimator = cls(**{**config["options"], "widths": tuple(config["options"]["widths"])})
            estimator.seed_, estimator.net = config["options"]["random_state"], net
            for name, value in config["fitted"].items():
                is_array = isinstance(value, list) and not name.endswith("curve_")
                dtype = object if name == "feature_names_in_" else None
                setattr(estimator, name, np.array(value, dtype=dtype) if is_array else value)
            for name, tensor in artifact.select("fitted.").items():
                setattr(estimator, name, tensor.numpy())
            shape = estimator.n_features_in_, estimator.net_outputs_
            model = net if net is None or isinstance(net, nn.Module) else net(*shape)
            weights = artifact.select("predictor.")
            estimator.predictor_ = build_predictor(config["predictor"], weights, model, path=artifact.folder)
            estimator.method = config["method"] or find_saved_method(estimator.predictor_.config()).name
            estimator._restore(artifact)
            found, tensors = estimator.to_artifact()
            found["method"] = config["method"]
            if net is not None:
                found["predictor"]["net"] = config["predictor"]["net"]
            check_restored(artifact, found, tensors)
        return estimator

    @classmethod
    def _check_artifact(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Raise ValueError unless options and fitted attributes are those of this class, in type and shape."""
        check_types("estimator", config, {"method": str | None, "options": dict, "fitted": dict, "predictor": dict})
        values, floats = config["fitted"], list[float]
        hints = {key: hint for key, hint in get_type_hints(cls).items() if key in {*cls._get_param_names()}}
        types = {key: hint for key, hint in hints.items() if key not in ("net", "method")} | {"random_state": int}
        check_types("options", config["options"], types)
        types = {"n_features_in_": Count, "net_outputs_": Count, "loss_curve_": floats, "validation_curve_": floats}
        check_types("fitted", values, {**types, **cls._fitted_types})
        check_types("fitted", {"feature_names_in_": [], **values}, {"feature_names_in_": list[str]})
        sizes = {"d": values["n_features_in_"], "k": values.get("n_outputs_")}
        shapes = {"x_mean_": "d", "x_scale_": "d", **cls._fitted_shapes}
        expected = {name: (torch.float64, tuple(map(sizes.get, shape))) for name, shape in shapes.items()}
        expected["held_out_"] = torch.bool, (None,)
        if "score_counts_" in expected:
            expected["score_counts_"] = torch.int64, (None,)
        elif "classes_" not in values and "classes_" in tensors:  # numbers
            expected["classes_"] = tensors["classes_"].dtype, (values["net_outputs_"],)
        else:
            check_types("fitted", values, {"classes_": list})
        check_tensors(tensors, expected)

    def _restore(self, artifact: Artifact) -> None:
        """Restore what an estimator has besides its fitted attributes, and check that all fits together."""


def _choose_batch_size(n: int) -> int:
    """About a twentieth of the rows, a power of two from 32 to 1,024.

    >>> [_choose_batch_size(n) for n in (10, 1000, 10_000, 1_000_000)]
    [32, 64, 512, 1024]
    """
    return int(min(1024, max(32, 2 ** round(math.log2(max(1, n) / 20)))))


# -- classifier -------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class NeuBootsClassifier(ClassifierMixin, _NeuBootsEstimator):
    """Classifier with p(x) = 1/B Σ_b softmax f_b(x) / T: B bootstrapped nets from one training, and a temperature T.

    X is standardized, labels have any type. A fraction of the rows is held out: one half for early stopping and the
    temperature, the other (`held_out_`) is used for nothing and is free for thresholds of your own. Integer sample
    weights are frequencies, others multiply the loss.

    Args:
        method: Name of a method (see `neuboots.list_methods`), or a method with options.
        net: Function of the numbers of inputs and outputs that makes a net; None for an MLP.
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

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> classifier = NeuBootsClassifier(epochs=30, random_state=0).fit(X[::2], y[::2])
        >>> classifier.predict_proba(X[1::2]).shape, classifier.score(X[1::2], y[1::2]) > 0.85
        ((75, 3), True)
    """

    task = "classification"
    _method_options: ClassVar[Mapping[str, Any]] = {"neuboots": {"resample": "pool"}}

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the classifier.

        Args:
            X: Rows (n, features).
            y: Their classes (n,).
            sample_weight: Weight of each row (n,).

        Returns:
            The estimator itself.

        Raises:
            ValueError: If an option is not valid, or all rows have one class.
        """
        self._check_options()
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ArgumentError("y", f"one class {self.classes_.tolist()[0]!r}", "at least 2 classes")
        rows = self._prepare_rows(X, codes[:, None].astype(np.float64), sample_weight, codes)
        labels = torch.from_numpy(codes[rows.index]).long()
        loss = nn.CrossEntropyLoss() if isinstance(self.method, str) else getattr(self.method, "loss", None)
        self._check_outputs(len(self.classes_))
        self.predictor_ = self._fit_predictor(rows, labels, loss or nn.CrossEntropyLoss(), len(self.classes_))
        validation = rows.split == VALIDATION
        if int(validation.sum()) >= _MIN_TEMPERATURE_ROWS:
            options: dict[str, Any] = {"num_samples": int(self.num_samples), "seed": self.seed_, "batch_size": 1024}
            scaling = TemperatureScaling(**options, prior_std=_LOG_TEMPERATURE_PRIOR_STD)
            self.predictor_ = scaling.fit(self.predictor_, TensorDataset(rows.x[validation], labels[validation]))
        return self

    def predict_proba(self, X: Any) -> Array:
        """Predict class probabilities.

        Args:
            X: Rows (N, features).

        Returns:
            Probabilities (N, C), in the order of `classes_`.
        """
        batches = torch.split(self.inputs(X), _MAX_BATCH)
        summaries = [self.predictor_.summarize(x, int(self.num_samples), seed=self.seed_) for x in batches]
        probs = torch.cat([summary.probs.double() for summary in summaries]).numpy()
        return np.asarray(probs / probs.sum(1, keepdims=True))

    def predict(self, X: Any) -> Array:
        """Predict classes.

        Args:
            X: Rows (N, features).

        Returns:
            The most probable class of each row (N,).

        Raises:
            ArgumentError: If the outputs of the net for a row are not finite, where `predict_proba` gives NaN.
        """
        probs = self.predict_proba(X)
        if np.isnan(probs).any():
            got = f"{int(np.isnan(probs).any(1).sum())} rows with outputs that are not finite"
            raise ArgumentError("X", got, "rows near the training rows")
        return np.asarray(self.classes_[probs.argmax(1)])

    def sample(self, X: Any, n: int = 1) -> Array:
        """Predict class probabilities by each of n replicates.

        Args:
            X: Rows (N, features).
            n: Number of replicates.

        Returns:
            Probabilities (n, N, C).
        """
        samples = self.predictor_.predict(self.inputs(X), n, seed=self.seed_).samples
        return np.asarray(class_probabilities(samples, 2).double())


# -- regressor --------------------------------------------------------------------------------------------


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
class NeuBootsRegressor(RegressorMixin, _NeuBootsEstimator):
    """Regressor for y = f(x) + ε: B bootstrapped nets for f from one training, held-out rows for ε.

    X and y are standardized. A fraction of the rows is held out: one half for early stopping, the other calibrates the
    prediction interval, which contains a new y with at least the probability `level` for rows from the same
    distribution. With fewer than 100 rows none is held out, and there is no early stopping: the interval is calibrated
    by cross-validation. Integer sample weights are frequencies, others multiply the loss.

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
    _fitted_types: ClassVar[Mapping[str, Any]] = {
        **{"one_column_": bool, "n_outputs_": Count, "gaussian_": bool, "noise_exponent_": float},
        "band_error_": float | None,
    }
    _fitted_shapes: ClassVar[Mapping[str, str]] = {
        **{"y_mean_": "k", "y_scale_": "k", "noise_offset_": "k", "score_counts_": "m", "scores_": "mk"}
    }
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
            ValueError: If an option is not valid, or there are fewer than 4 rows.
        """
        self._check_options()
        check_choice("band", self.band, ("influence", "method"))
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        self.one_column_ = y.ndim == 1
        y = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
        self.n_outputs_ = y.shape[1]
        rows = self._prepare_rows(X, y, sample_weight)
        y = y[rows.index]
        loss, outputs = self._choose_loss()
        target = self._fit_mean(rows, y, loss, outputs)
        self.gaussian_ = self.predictor_.summarize(rows.x[:1], 1).mean.shape[1] > self.n_outputs_
        if rows.group[-1] + 1 < MIN_SPLIT_ROWS[self.task]:
            self._fit_noise(*self._cross_validate(rows, y, loss, outputs), rows.group)
        else:
            # calibration rows are the last ones; without held-out rows, the training rows
            index = torch.cat([(rows.split == split).nonzero()[:, 0] for split in (VALIDATION, CALIBRATION)])
            index = index if len(index) else torch.arange(len(target))
            mean, _, raw_std = self._predict_moments(rows.x[index], self.num_samples)
            error, group = target[index].numpy() - mean, rows.group[(rows.split == CALIBRATION).numpy()]
            self._fit_noise(error, raw_std, group)
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

    def _fit_mean(self, rows: _TrainingRows, y: Array, loss: Loss, outputs: int) -> Tensor:
        """Fit the predictor to the training rows, and return all targets in the units that it predicts: (m, k)."""
        self.y_mean_, std = _mean_and_std(y[(rows.split == TRAIN).numpy()])
        tiny = 1e-9 * np.where(self.y_mean_ == 0, 1.0, np.abs(self.y_mean_))
        self.y_scale_ = np.where(std > 0, std, np.where(np.ptp(y, 0) > 0, 1.0, tiny))  # a constant predicts itself
        target = torch.from_numpy((y - self.y_mean_) / self.y_scale_)
        self.predictor_ = self._fit_predictor(rows, target, loss, outputs)
        return target

    def _cross_validate(self, rows: _TrainingRows, y: Array, loss: Loss, outputs: int) -> tuple[Array, Array]:
        """y − m(x) and √(τ² + σ²) of each row by a predictor that was fitted to the other folds: (m, k) each.

        Both are in units of this estimator's standardized targets.
        """
        n = int(rows.group[-1]) + 1
        shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed_))
        fold = (shuffled % NUM_FOLDS)[torch.from_numpy(rows.group)]
        error, raw_std = np.empty_like(y), np.empty_like(y)
        for k in range(min(n, NUM_FOLDS)):
            out, other = fold == k, copy.copy(self)
            target = other._fit_mean(replace(rows, split=CALIBRATION * out.byte()), y, loss, outputs)
            mean, _, std = other._predict_moments(rows.x[out], self.num_samples)
            unit = other.y_scale_ / self.y_scale_
            error[out.numpy()], raw_std[out.numpy()] = unit * (target[out].numpy() - mean), unit * std
        return error, raw_std

    def _fit_noise(self, error: Array, raw_std: Array, group: Array) -> None:
        """Fit a and b of s(x) to rows that the net was not fitted to; compute the scores |y − m(x)| / s(x).

        The last rows have scores; `group` tells which of them are copies, one after another.
        """
        self.noise_exponent_ = SCALE_EXPONENT if self.gaussian_ or raw_std.any() else 0.0
        shape = np.maximum(raw_std, _MIN_STD) ** self.noise_exponent_
        self.noise_offset_ = np.log(np.maximum(np.sqrt(np.mean((error / shape) ** 2, 0)), _MIN_STD))  # (k,)
        self.score_counts_ = np.unique(group, return_counts=True)[1]
        start = len(error) - len(group)
        self.scores_ = np.abs(error[start:]) / self._noise_std(raw_std[start:])  # (m, k)

    def _noise_std(self, raw_std: Array) -> Array:
        """Standard deviation s(x) of a new y, in units of the standardized targets: (N, k)."""
        return np.asarray(np.exp(self.noise_offset_) * np.maximum(raw_std, _MIN_STD) ** float(self.noise_exponent_))

    def _score_quantile(self, level: float) -> Array:
        """Quantile q of each output (k,); Student's, with a warning, if there are too few scores."""
        counts = torch.from_numpy(self.score_counts_)
        found = np.array([conformal_quantile(torch.from_numpy(scores), counts, level) for scores in self.scores_.T])
        if np.isfinite(found).all():
            return found
        n = len(counts)
        source, hint = f"{n} rows were cross-validated", "use more rows, or a lower level"
        if self.held_out_.any() or not n:
            source = f"{n} rows were held out for calibration"
            hint = "use more rows, a larger validation_fraction, or a lower level"
        warnings.warn(
            f"{source}, and level {level:g} needs {math.ceil(level / (1 - level) - 1e-9)}: the interval is that of "
            f"normal errors, without a guarantee; {hint}",
            UserWarning,
            stacklevel=4,
        )
        quantile = stdtrit(n - 1, (1 + level) / 2) * math.sqrt(1 + 1 / n) if n > 1 else ndtri((1 + level) / 2)
        return np.asarray(np.maximum(self.scores_.max(0, initial=0.0), quantile))  # not below those of lower levels

    def _fit_band(self, rows: _TrainingRows, target: Tensor, loss: Loss) -> "_ConfidenceBand | None":
        """Band of the single net behind the mean; None if there is none, or the loss is another one."""
        train = rows.split == TRAIN
        some = torch.nonzero(train)[:1000, 0]  # enough to see whether a net gives the mean
        mean = self._predict_moments(rows.x[some], self.num_samples)[0]
        residual_std = float(np.sqrt(np.mean((target[some].numpy() - mean) ** 2)))
        net = _find_mean_net(self.predictor_, rows.x[some], mean, residual_std)
        if net is None or not isinstance(loss, GaussianNLL | nn.MSELoss):
            return None
        y, weighted = _append_weights(target, rows.weights), rows.weights is not None
        try:
            x, others = rows.x[train], rows.x[~train]
            return _fit_confidence_band(net, loss, x, y[train], others, weighted=weighted, seed=self.seed_)
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
                stream = self.predictor_.copy_for_thread().stream(batch, int(num_samples), seed=self.seed_)
            # exact moments need no replicate, nor the probabilities of a summary
            summary = stream.moments or self.predictor_.summarize(batch, int(num_samples), seed=self.seed_)
            means.append(summary.mean.double().numpy())
            stds.append(summary.std.double().numpy())
        outputs, std = np.concatenate(means), np.concatenate(stds)[:, :k]
        if not self.gaussian_:
            return outputs[:, :k], std, std
        log_variance = np.where(np.isfinite(outputs[:, k:]), np.clip(outputs[:, k:], -12.0, 12.0), np.nan)
        return outputs[:, :k], std, np.sqrt(std**2 + np.exp(log_variance))

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
        confidence = -ndtri((1 - level) / 2) * self._mean_std(x, std)
        prediction = self._prediction_half_width(raw_std, level, confidence)
        bounds = *self._bounds(mean, prediction), *self._bounds(mean, confidence)
        return Forecast(self._to_units(mean), self._squeeze(self._noise_std(raw_std) * self.y_scale_), *bounds)

    def _prediction_half_width(self, raw_std: Array, level: float, confidence: Array) -> Array:
        """Half width of the prediction interval (N, k), which contains the confidence band."""
        return np.asarray(np.maximum(self._score_quantile(level) * self._noise_std(raw_std), confidence))

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
            interval: "prediction" for the conformal interval of a new y, which contains the other, "confidence" for
                the band of the mean.

        Returns:
            Lower and upper bounds, (N,) or (N, k) each.
        """
        check_choice("interval", interval, ("prediction", "confidence"))
        level, x = check_fraction("level", level), self.inputs(X)
        mean, std, raw_std = self._predict_moments(x, self.num_samples)
        half = -ndtri((1 - level) / 2) * self._mean_std(x, std)
        if interval == "prediction":
            half = self._prediction_half_width(raw_std, level, half)
        return self._bounds(mean, half)

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
        if int(self.score_counts_.sum()) != len(self.scores_):
            raise ValueError(
                f"score_counts_ are of {int(self.score_counts_.sum())} rows, scores_ of {len(self.scores_)}"
            )
        self.band_ = None
        if self.band_error_ is not None:
            net, state = self.predictor_.net, artifact.select("band.")
            assert net is not None, "a band has a net"
            rows = torch.zeros(2, self.n_features_in_)
            self.band_ = _ConfidenceBand.from_state_dict(net, self.n_outputs_, state, self.band_error_, rows)
        x = torch.zeros(1, self.n_features_in_, dtype=torch.float64)
        mean, std, raw_std = self._predict_moments(x, 1)  # raises if the parts do not fit
        self._to_units(mean + self._noise_std(raw_std) + self._mean_std(x, std) + self.scores_[:1])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


# -- confidence band --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _ConfidenceBand:
    """Standard deviation s(x) of the first k outputs of a net by the covariance of its weights."""

    net: nn.Module  # net of the predictor
    outputs: int  # k
    directions: tuple[Tensor, ...]  # u of each layer, as `Jacobian.pull` returns them: (K, *)
    variances: Tensor  # β, layer after layer: (Q,)
    error: float  # relative RMS error of s(x) at rows that it was not fitted to

    def std(self, x: Tensor) -> Tensor:
        """s(x): (N, k)."""
        jacobian, x = self._jacobian(x)
        directions, variances = [part.to(x) for part in self.directions], self.variances.to(x)
        parts = []
        for some in torch.split(x, min(_MAX_BAND_BATCH, _max_rows(directions, len(directions[0])))):
            rows = jacobian.rows(some, batch_rows=_MAX_BAND_BATCH)
            parts.append(jacobian.push(rows, directions).square().sum(-1) + jacobian.squares(rows) @ variances)
        return torch.cat(parts).sqrt()

    def _jacobian(self, x: Tensor) -> tuple[Jacobian, Tensor]:
        """J, and x in the net's precision."""
        x = x.to(next(self.net.parameters()).dtype)
        return Jacobian(self.net, "all", x[:2], outputs=self.outputs), x

    def sample(self, x: Tensor, num: int, *, seed: int) -> Tensor:
        """J(x) (θ_b − θ̂) with θ_b ~ N(θ̂, Σ), one function of x for each b: (num, N, k)."""
        jacobian, x = self._jacobian(x)
        generator = torch.Generator().manual_seed(seed)
        found = x.new_empty(num, len(x), self.outputs)
        for start in range(0, num, _REPLICATE_BATCH):
            moves = [self._draw_move(generator) for _ in range(min(_REPLICATE_BATCH, num - start))]
            moved = [torch.stack(part) for part in zip(*moves, strict=True)]
            step = min(_MAX_BAND_BATCH, _max_rows(moved, len(moves)))
            for first in range(0, len(x), step):
                rows = jacobian.rows(x[first : first + step], batch_rows=step)
                pushed = jacobian.push(rows, moved).movedim(-1, 0)
                found[start : start + len(moves), first : first + step] = pushed
        return found

    def _draw_move(self, generator: torch.Generator) -> list[Tensor]:
        """θ_b − θ̂ for each layer."""
        z = torch.randn(len(self.directions[0]), generator=generator, dtype=torch.float32)
        moves = [torch.tensordot(z, part, 1) for part in self.directions]
        left = self.variances.sqrt()
        for move in moves:  # those of Linear layers come first
            if not len(left):
                break
            scale, left = left[: move.shape[-1]], left[move.shape[-1] :]
            move += scale * torch.randn(move.shape, generator=generator, dtype=torch.float32)
        return moves

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors to save beside the net."""
        parts = {f"direction.{k}": part.contiguous() for k, part in enumerate(self.directions)}
        return {**parts, "variances": self.variances}

    @classmethod
    def from_state_dict(
        cls, net: nn.Module, outputs: int, state: dict[str, Tensor], error: float, x: Tensor
    ) -> "_ConfidenceBand":
        """Band from the tensors of `state_dict`, which must fit the net; x are any two rows."""
        parts = tuple(state[f"direction.{k}"] for k in range(len(state) - 1))
        band = cls(net, outputs, parts, state["variances"], float(error))
        jacobian, x = band._jacobian(x)
        rows = jacobian.rows(x)
        layers = jacobian.pull(rows, torch.zeros(2, rows.outputs, 1))
        dtype = band.variances.dtype if band.variances.is_floating_point() else torch.float32
        shapes = {f"direction.{k}": (len(parts[0]), *layer.shape[1:]) for k, layer in enumerate(layers)}
        shapes["variances"] = jacobian.squares(rows).shape[-1:]
        check_tensors(state, {name: (dtype, shape) for name, shape in shapes.items()})
        return band


def _fit_confidence_band(
    net: nn.Module, loss: Loss, x: Tensor, y: Tensor, others: Tensor, *, weighted: bool = False, seed: int = 0
) -> _ConfidenceBand:
    """Fit the band of a net that was trained on rows x (n, D) and y; `others` are rows that it was not trained on.

    With `weighted`, the last column of y is the weight of the row's loss.

    >>> x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    >>> net, y = nn.Linear(1, 1).double(), 2 * x + 0.1 * torch.cos(99 * x)
    >>> _ = nn.init.constant_(net.weight, 2.0), nn.init.zeros_(net.bias)
    >>> low, middle = _fit_confidence_band(net, nn.MSELoss(), x, y, x).std(torch.tensor([[-1.0], [0.0]]))[:, 0].tolist()
    >>> 0.005 < middle < low < 0.05  # a line is least certain at its ends
    True
    """
    x, others = (rows.to(next(net.parameters()).dtype) for rows in (x, others))
    config = TrainingConfig(epochs=1, batch_size=1024, seed=seed, accelerator="cpu", progress=False)
    method = InfluenceBootstrap(loss=loss, layers="all", max_kernel_rows=MAX_EXACT_ROWS)
    exact = build_tangent_predictors([method], net, resolve_fit(net, (x, y), config), weighted=weighted)[0]
    jacobian, train = exact.tangent.jacobian()
    newton = _newton_step(exact, _gradient(jacobian, loss, x, y, weighted), len(x))
    generator = torch.Generator().manual_seed(seed)
    samples = [_relative(exact, newton, rows) for rows in _sample_rows(x, others, generator)]
    (basis, _), (fit, fit_squares), (check, check_squares) = samples

    directions = torch.linalg.svd(basis, full_matrices=False).Vh  # (≤ rows, S + 1)
    most = max(RANKS[0], _MAX_DIRECTION_VALUES // sum(p.numel() for p in net.parameters()))
    directions = directions[: min(RANKS[-1], most)].T
    if not directions.shape[1]:  # nothing moves the net, which reproduces every row: one direction, of no length
        directions = directions.new_zeros(len(directions), 1)
    tried = []
    for rank in dict.fromkeys(min(rank, directions.shape[1]) for rank in RANKS):
        left = 1.0 - (fit @ directions[:, :rank]).square().sum(1)
        rest = left.new_zeros(fit_squares.shape[1])
        if fit_squares.numel():
            rest = torch.from_numpy(nnls(fit_squares.numpy(), left.numpy())[0])
        ratio = ((check @ directions[:, :rank]).square().sum(1) + check_squares @ rest).sqrt()
        tried.append((float((ratio - 1.0).square().mean().sqrt()) if len(ratio) else 0.0, rank, rest))
        if tried[-1][0] <= ERROR_TOLERANCE:
            break
    best = min(error for error, _, _ in tried)
    error, rank, rest = next(each for each in tried if each[0] <= max(ERROR_TOLERANCE, 1.25 * best))
    by_rows, by_step = directions[:-1, :rank], directions[-1, :rank]
    coefficients = exact.tangent.basis @ (exact.tangent.influence @ covariance_root(exact.weight_distribution, by_rows))
    coefficients = coefficients.view(len(train.z), train.outputs, rank)
    some = [jacobian.pull(train, part) for part in torch.split(coefficients, _max_rows(newton, len(train.z)), -1)]
    pulled = [torch.cat(parts) for parts in zip(*some, strict=True)]
    pulled = [part + torch.tensordot(by_step[:, None].to(v), v, 1) for part, v in zip(pulled, newton, strict=True)]
    return _ConfidenceBand(net, train.outputs, tuple(part.float() for part in pulled), rest.float(), error)


def _max_rows(parts: Sequence[Tensor], others: int) -> int:
    """Number of rows for so many directions, or of directions for so many rows: products have the width of a layer."""
    widest = max(part.shape[1] if part.ndim == 3 else 1 for part in parts)
    return max(1, _MAX_PRODUCT_VALUES // (others * widest))


def _gradient(jacobian: Jacobian, loss: Loss, x: Tensor, y: Tensor, weighted: bool) -> list[Tensor]:
    """−∂/∂θ of the sum of all losses through the outputs that are bootstrapped: (1, *) each."""
    total: list[Tensor] = []
    for start in range(0, len(x), _MAX_BAND_BATCH):
        batch = slice(start, start + _MAX_BAND_BATCH)
        rows, target = jacobian.rows(x[batch], batch_rows=_MAX_BAND_BATCH), y[batch]
        weight = target[:, -1:] if weighted else torch.ones_like(target[:, :1])
        slope = working_residuals(loss, rows.z, target[:, :-1] if weighted else target).slope
        parts = jacobian.pull(rows, (weight * slope)[:, : rows.outputs, None])
        total = [mine + part for mine, part in zip(total, parts, strict=True)] if total else parts
    return total


def _newton_step(exact: TangentPredictor, gradient: list[Tensor], n: int) -> list[Tensor]:
    """Newton step v = H⁻¹ g: (1, *) each.

    H is that of the m rows of the exact form, n/m times as large for n rows; g is projected on their Jacobian.
    """
    jacobian, train = exact.tangent.jacobian()
    basis, m = exact.tangent.basis, len(train.z)  # L V
    values = (basis * (jacobian.kernel(train, train) @ basis)).sum(0)  # VᵀLᵀKLV = W
    along = basis.T @ jacobian.push(train, gradient).double().flatten()
    step = m / n * along / (values * (values + exact.ridge * m)).clamp_min(torch.finfo(values.dtype).tiny)
    return jacobian.pull(train, (basis @ step).view(m, train.outputs, 1))


def _relative(exact: TangentPredictor, newton: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Contributions to the exact s² of M outputs at rows x, relative to it, without outputs of zero variance.

    Those of independent weights, rows of norm 1 whose last column is J(x)v: (M, S + 1); and of units of β: (M, Q).
    """
    jacobian, _ = exact.tangent.jacobian()
    rows = jacobian.rows(x)
    drawn = covariance_root(exact.weight_distribution, exact.deviations(x)[1].double().flatten(0, 1).T).T
    moved = torch.cat([drawn, jacobian.push(rows, newton).double().flatten(0, 1)], 1)
    squares = jacobian.squares(rows).double().flatten(0, 1)
    variance = moved.square().sum(1, keepdim=True)
    if not bool(torch.isfinite(variance).all()):
        raise ValueError("its variance is not finite")
    seen = variance[:, 0] > 0
    return (moved / variance.sqrt())[seen], (squares / variance)[seen]


def _sample_rows(x: Tensor, others: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Rows for the directions, for β, and for the error; the last ones are not training rows, if there are enough.

    New rows may be further out and combine values that no training row does: some rows are resampled by column.
    """

    def draw(pool: Tensor) -> Tensor:
        return pool[torch.randperm(len(pool), generator=generator)[:_SAMPLE_ROWS]]

    def perturb() -> Tensor:
        rows = draw(x)
        return rows + 0.2 * torch.randn(rows.shape, generator=generator, dtype=x.dtype)

    def resample_columns() -> Tensor:
        picks = torch.randint(len(x), (_SAMPLE_ROWS // 2, x.shape[1]), generator=generator)
        return x.gather(0, picks) * (1.0 + torch.rand(len(picks), 1, generator=generator, dtype=x.dtype))

    learn = torch.cat([draw(x), resample_columns()])
    fit = torch.cat([perturb(), resample_columns(), resample_columns()])
    return learn, fit, draw(others) if len(others) >= 20 else perturb()


def _find_mean_net(predictor: Any, x: Tensor, mean: np.ndarray[Any, Any], noise: float) -> nn.Module | None:
    """Net whose outputs at x are the means (N, k) within 5 % of the noise; None if there is none, as for ensembles."""
    net: nn.Module | None = predictor.net
    if net is None or any(p.is_meta for p in net.parameters()) or (predictor.num_distinct or 1) > 1:
        return None
    try:
        with torch.no_grad():
            z = compute_output(net.eval(), x.to(next(net.parameters()).dtype)).reshape(len(x), -1)
    except (RuntimeError, ValueError, StopIteration):
        return None
    gap = z[:, : mean.shape[1]].double().numpy() - mean
    return net if gap.shape == mean.shape and float(np.sqrt(np.mean(gap**2))) <= 0.05 * noise + 1e-9 else None
