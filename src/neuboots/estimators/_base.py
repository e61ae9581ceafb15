"""What both estimators share: sample weights, held-out rows, training, standardization and saving.

An integer sample weight is a frequency: a row of weight 3 is three rows, one of weight 0 is none. Other weights
multiply the loss (eq. 2.3 with given instead of random weights). Rows are put in an order that depends on their values
alone, before a seed assigns them to splits and batches; duplicates of a row go to one split, or it would be held out
from a net that was trained on it.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from numbers import Integral
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots._prng import _GOLDEN, _mix
from neuboots._validation import ArgumentError, check_fraction, check_int
from neuboots.loading import train_val_test_split
from neuboots.losses import Loss, as_loss
from neuboots.methods import create_method, find_method
from neuboots.methods._base import find_saved_method
from neuboots.nets.mlp import MLP
from neuboots.prediction import Method, Predictor
from neuboots.serialization import (
    Artifact,
    ArtifactError,
    build_predictor,
    describe_predictor,
    read_artifact,
    write_artifact,
)
from neuboots.training import EpochReport, TrainingConfig, constant_schedule, cosine_schedule

Array = np.ndarray[Any, Any]
NetFactory = Callable[[int, int], nn.Module]

TRAIN, VALIDATION, CALIBRATION = 0, 1, 2  # splits of rows

MAX_COPIES = 20  # rows after repetition by integer weights, as a multiple of n; with more, weights multiply the loss
MIN_SPLIT_ROWS = 20  # with fewer rows, none is held out
_SAVED_APART = ("predictor_", "band_", "seed_")  # not among the fitted attributes of an artifact
MIN_DISTINCT_HELD_OUT = 10  # duplicates of one row are at most a tenth of the rows held out


# -- rows ----------------------------------------------------------------------------------------------


def canonical_order(X: Array, *others: Array) -> Array:
    """Order of rows that depends on their values alone: by a hash of X, and of the other columns where X is equal.

    >>> x = np.array([[1.0], [2.0], [1.0]])
    >>> bool((x[canonical_order(x)] == x[::-1][canonical_order(x[::-1])]).all())
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


def duplicate_groups(X: Array, y: Array, max_copies: float) -> Array:
    """Group of each row (n,), for rows in canonical order: duplicates have the same X and y.

    Rows are their own groups where one X has several y, which a net cannot memorize, and where there are more than
    `max_copies` duplicates, of which a split would otherwise consist.

    >>> X, y = np.array([[3.0], [3.0], [1.0], [1.0], [2.0]]), np.array([[7.0], [7.0], [7.0], [8.0], [7.0]])
    >>> duplicate_groups(X, y, 2)
    array([0, 0, 1, 2, 3])
    """
    first = np.append(True, (X[1:] != X[:-1]).any(1))
    group = np.cumsum(first) - 1
    several = np.append(False, (y[1:] != y[:-1]).any(1)) & ~first
    single = (np.bincount(group, several) > 0) | (np.bincount(group) > max_copies)
    return np.cumsum(first | single[group]) - 1


def mean_and_std(values: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of each column: (k,) each; 0 where the deviation is rounding error.

    >>> mean_and_std(np.array([[1e200, 0.1], [3e200, 0.1]]))
    (array([2.e+200, 1.e-001]), array([1.e+200, 0.e+000]))
    """
    exponent = np.clip(np.frexp(np.abs(values).max(0))[1], -1000, 1000)  # the square of 1e200 would overflow
    scaled = np.ldexp(values, -exponent)
    mean, std = scaled.mean(0), scaled.std(0)
    std = np.where(std > 1e-12 * np.abs(mean), std, 0.0)
    return np.ldexp(mean, exponent), np.ldexp(std, exponent)


@dataclass(frozen=True)
class WeightedLoss:
    """w ℓ(z, y) for targets (N, k + 1): those of the loss, and the weight of the row."""

    loss: Loss

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        y, w = targets[:, :-1], targets[:, -1]
        losses = as_loss(self.loss)(outputs, y[:, 0].long() if isinstance(self.loss, nn.CrossEntropyLoss) else y)
        return losses * w.to(losses).view(-1, *[1] * (losses.ndim - 1))


def append_weights(y: Tensor, weights: Array | None) -> Tensor:
    """Targets for `WeightedLoss`: (n, k + 1), with weights of mean 1; y itself without weights."""
    if weights is None:
        return y
    w = torch.from_numpy(weights / weights.mean())
    return torch.cat([y.reshape(len(y), -1).double(), w[:, None]], 1)


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Rows after repetition by integer weights, in canonical order: (m, …) each."""

    index: Array  # of each row among the n rows that were passed to fit
    weights: Array | None  # that multiply the loss
    split: Tensor  # TRAIN, VALIDATION or CALIBRATION
    group: Array  # of duplicates
    x: Tensor  # standardized inputs


# -- the base class ------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class NeuBootsEstimator(BaseEstimator):  # type: ignore[misc]
    """Options of both estimators, which `fit` validates."""

    task: ClassVar[Literal["classification", "regression"]]
    _method_options: ClassVar[Mapping[str, Mapping[str, Any]]]  # of methods that are given by name

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

    def _prepare_rows(self, X: Array, y: Array, sample_weight: Any, strata: Array | None = None) -> TrainingRows:
        """Order, repeat, split and standardize the rows; y is (n, k)."""
        weights = None
        index = canonical_order(X, y)
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            if (weights == np.floor(weights)).all() and weights.sum() <= MAX_COPIES * len(weights):
                index, weights = np.repeat(index, weights[index].astype(np.int64)), None
            else:
                index = canonical_order(X, y, weights)
                index = index[weights[index] > 0]
                weights = weights[index]
        group = duplicate_groups(X[index], y[index], self.validation_fraction * len(index) / MIN_DISTINCT_HELD_OUT)
        split = self._split_groups(group, None if strata is None else torch.from_numpy(strata[index]))
        calibration = (split == CALIBRATION).numpy()
        self.held_out_ = np.isin(np.arange(len(X)), index[calibration])
        self.held_out_[index[~calibration]] = False  # a row is held out with all its copies
        train = X[index[(split == TRAIN).numpy()]]
        self.x_mean_, std = mean_and_std(train)
        low, high = train.min(0), train.max(0)
        # two values are scaled by their distance: a rare flag is not an outlier
        two_values = ((low == train) | (high == train)).all(0)
        self.x_scale_ = np.where(std > 0, np.where(two_values, high - low, std), 1.0)
        return TrainingRows(index, weights, split, group, self._standardize(X[index]))

    def _split_groups(self, group: Array, strata: Tensor | None) -> Tensor:
        """Split of each row, the same for all rows of a group."""
        n, classes = int(group[-1]) + 1, 0 if strata is None else len(torch.unique(strata))
        # with many classes, most rows are for training
        fraction = min(self.validation_fraction, (n - classes) / (2 * n))
        if n < MIN_SPLIT_ROWS or fraction * n < 2:
            return torch.zeros(len(group), dtype=torch.uint8)
        classifies = self.task == "classification"  # its temperature is fitted to the validation split
        validation = fraction / 2 if self.early_stopping or classifies else 0.0
        calibration = fraction - validation
        firsts = None if strata is None else strata[np.unique(group, return_index=True)[1]]
        split = train_val_test_split(n, validation / (1 - calibration), calibration, seed=self.seed_, strata=firsts)
        return split[torch.from_numpy(group)]

    def _fit_predictor(self, rows: TrainingRows, y: Tensor, loss: Loss, outputs: int) -> Predictor:
        """Train a net with the method."""
        method = self._create_method(loss if rows.weights is None else WeightedLoss(loss))
        train, validation = rows.split == TRAIN, rows.split == VALIDATION
        targets = append_weights(y, rows.weights)
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
            if isinstance(loss, WeightedLoss):
                raise ArgumentError("sample_weight", "floats", "integers for a method with its own loss", hint=hint)
            return self.method
        try:
            return create_method(self.method, loss=loss, **self._method_options.get(self.method, {}))
        except ValueError:
            if not isinstance(loss, WeightedLoss):
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
        config = artifact.config
        if config.get("estimator") != cls.__name__:
            raise ArtifactError(artifact.folder, f"it is a {config.get('estimator')}, expected a {cls.__name__}")
        try:
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
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise ArtifactError(artifact.folder, f"it is damaged ({type(error).__name__}: {error})") from error
        return estimator

    def _restore(self, artifact: Artifact) -> None:
        """Restore what an estimator has besides its fitted attributes, and check that all fits together."""


def _choose_batch_size(n: int) -> int:
    """About a twentieth of the rows, a power of two from 32 to 1,024.

    >>> [_choose_batch_size(n) for n in (10, 1000, 10_000, 1_000_000)]
    [32, 64, 512, 1024]
    """
    return int(min(1024, max(32, 2 ** round(math.log2(max(1, n) / 20)))))
