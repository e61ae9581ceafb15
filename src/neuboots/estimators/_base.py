"""Rows with weights as rows: what is learned depends on the rows alone, not on their order.

A whole weight is a frequency: a row of weight 3 is three rows, one of weight 0 is none. Other weights multiply the loss
(eq. 2.3 with weights that are given instead of drawn). Rows are put in an order of their own before a seed deals them
to parts and batches; the copies of a row go to one part, or it would be held out from a net that knows it.

What both estimators share: rows to parts, a net and a method to a predictor, and a folder without a pickle.
"""

import inspect
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots.data._common import train_val_test_split
from neuboots.losses import Loss, as_loss
from neuboots.methods import NeuBoots, find_method
from neuboots.methods._base import find_saved_method
from neuboots.nets import MLP
from neuboots.prediction import Method, Predictor
from neuboots.serialization import atomic_folder, load, save
from neuboots.training import EpochReport, TrainingConfig, constant_schedule, cosine_schedule

Array = np.ndarray[Any, Any]
MAX_COPIES = 20  # of all rows together, as a multiple of n: beyond, whole weights multiply the loss as well


def to_frequencies(weights: Array) -> Array | None:
    """The weights as numbers of copies (n,), if they are whole and not too many.

    >>> to_frequencies(np.array([1.0, 0.0, 3.0])), to_frequencies(np.array([0.5, 1.0]))
    (array([1, 0, 3]), None)
    """
    whole = bool((weights == np.floor(weights)).all()) and weights.sum() <= MAX_COPIES * len(weights)
    return weights.astype(np.int64) if whole else None


def canonical_order(X: Array, *more: Array) -> Array:
    """The places of the rows in an order that depends on what they hold alone; rows that are the same stand together.

    It is by X; what else they hold decides among rows of the same X only: targets have no say in who is held out.

    >>> x = np.array([[1.0], [2.0], [1.0]])
    >>> bool((x[canonical_order(x)] == x[::-1][canonical_order(x[::-1])]).all())
    True
    """
    by_x = _word(np.zeros(len(X), dtype=np.uint64), X)
    word = by_x
    for columns in more:
        word = _word(word, columns)
    return np.lexsort((word, by_x))


def duplicate_groups(X: Array, y: Array, max_copies: float) -> Array:
    """The number of the unit that each row belongs to (n,), for rows in their own order.

    Rows are one unit if they have one X and one y: copies. Where an X has several y a net cannot know them by heart,
    and of more than `most` rows a part would hold little else: then each row is a unit.

    >>> duplicate_groups(
    ...     np.array([[3.0], [3.0], [1.0], [1.0], [2.0]]), np.array([[7.0], [7.0], [7.0], [8.0], [7.0]]), 2
    ... )
    array([0, 0, 1, 2, 3])
    """
    first = np.append(True, (X[1:] != X[:-1]).any(1))
    group = np.cumsum(first) - 1
    several = np.append(False, (y[1:] != y[:-1]).any(1)) & ~first
    alone = (np.bincount(group, several) > 0) | (np.bincount(group) > max_copies)
    return np.cumsum(first | alone[group]) - 1


def _word(word: Array, columns: Array) -> Array:
    """A hash of the word and what the columns (n,) or (n, k) hold: (n,)."""
    with np.errstate(over="ignore"):
        for values in np.atleast_2d(columns.T):
            word = _mixed(word ^ (values + 0.0).astype(np.float64).view(np.uint64))  # −0 is 0
    return word


def _mixed(word: Array) -> Array:
    """splitmix64's finaliser: one bit of the input moves half of the output's."""
    word = (word + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(word ^ (word >> np.uint64(31)))


def mean_and_std(values: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of each column: (k,) each; the latter 0 where rounding is all that it shows.

    >>> mean_and_std(np.array([[1e200, 0.1], [3e200, 0.1]]))
    (array([2.e+200, 1.e-001]), array([1.e+200, 0.e+000]))
    """
    exponent = np.clip(np.frexp(np.abs(values).max(0))[1], -1000, 1000)  # squares of 1e200 are no numbers
    small = np.ldexp(values, -exponent)
    mean, spread = small.mean(0), small.std(0)
    spread = np.where(spread > 1e-12 * np.abs(mean), spread, 0.0)
    return np.ldexp(mean, exponent), np.ldexp(spread, exponent)


@dataclass(frozen=True)
class WeightedLoss:
    """w ℓ(z, y) for targets (N, k + 1): those of the loss, and the weight of the row."""

    loss: Loss

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", as_loss(self.loss))

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        y, w = targets[:, :-1], targets[:, -1]
        losses = self.loss(outputs, y[:, 0].long() if isinstance(self.loss, nn.CrossEntropyLoss) else y)
        return losses * w.to(losses).view(-1, *[1] * (losses.ndim - 1))


def append_weights(y: Tensor, weights: Array) -> Tensor:
    """Targets for `WeightedLoss`: (n, k + 1), weights of mean 1."""
    w = torch.from_numpy(weights / weights.mean())
    return torch.cat([y.reshape(len(y), -1).double(), w[:, None]], 1)


FORMAT = "neuboots estimator"
FILES = ("estimator.json", "arrays.safetensors", "predictor", "band.safetensors")  # the last of regressors
VERSION = 1
TRAIN, VALIDATION, CALIBRATION = 0, 1, 2
MIN_SPLIT_ROWS = 20  # rows; of fewer, none is held out
MIN_DISTINCT_HELD_OUT = 10  # copies of one row are at most a tenth of what is held out

NetFactory = Callable[[int, int], nn.Module]


class NeuBootsEstimator(BaseEstimator, ABC):  # type: ignore[misc]
    """Options of both estimators; stored as they are given, and looked at by `fit`."""

    fitted: ClassVar[tuple[str, ...]]  # attributes that `save` writes, arrays among them
    tunes: ClassVar[bool] = False  # rows are held out to fit one number more, also without early stopping

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
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.method = method
        self.net = net
        self.widths = widths
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.early_stopping = early_stopping
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.num_samples = num_samples
        self.random_state = random_state
        self.verbose = verbose

    # -- fitting ----------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        for name, least in (("epochs", 1), ("patience", 1), ("num_samples", 1)):
            value: Any = getattr(self, name)
            if not (_number(value) >= least and isinstance(value, Integral)):
                raise ValueError(f"got {name}={value!r}; expected a whole number of at least {least}")
        for name in ("learning_rate", "weight_decay"):
            if not 0 <= _number(getattr(self, name)) < math.inf:
                raise ValueError(f"got {name}={getattr(self, name)!r}; expected a number that is not negative")
        if not 0 <= _number(self.validation_fraction) < 1:
            raise ValueError(
                f"got validation_fraction={self.validation_fraction!r}; expected a share of the rows from 0 to below 1"
            )
        size: Any = self.batch_size
        if size != "auto" and not (_number(size) >= 1 and _number(size).is_integer()):
            raise ValueError(f"got batch_size={size!r}; expected 'auto' or a whole number of at least 1")
        widths: Any = self.widths
        if not (isinstance(widths, Iterable) and all(_number(w) >= 1 and isinstance(w, Integral) for w in widths)):
            raise ValueError(f"got widths={widths!r}; expected whole numbers of at least 1, such as (100, 100)")
        if self.net is not None and (isinstance(self.net, nn.Module) or not callable(self.net)):
            raise ValueError(
                f"got net={self.net!r}; expected a function of the numbers of inputs and outputs that makes a net: "
                "lambda inputs, outputs: nn.Sequential(nn.Linear(inputs, 50), nn.ReLU(), nn.Linear(50, outputs))"
            )

    def _rows(self, X: Array, y: Array, sample_weight: Any) -> tuple[Array, Array | None]:
        """Places of the rows to learn from, each as often as it counts, and the weights of their losses, if any."""
        if sample_weight is None:
            return canonical_order(X, y), None
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        copies = to_frequencies(weights)
        if copies is None:
            order = canonical_order(X, y, weights)
            order = order[weights[order] > 0]
            return order, weights[order]
        order = canonical_order(X, y)
        return np.repeat(order, copies[order]), None

    def _parts(self, X: Array, y: Array, strata: Tensor | None) -> tuple[Tensor, Array]:
        """The part of each row (training, early stopping, calibration) and the unit that was dealt: (n,) each."""
        unit = duplicate_groups(X, y.reshape(len(y), -1), self.validation_fraction * len(y) / MIN_DISTINCT_HELD_OUT)
        n, kinds = int(unit[-1]) + 1, 0 if strata is None else len(torch.unique(strata))
        share = min(self.validation_fraction, (n - kinds) / (2 * n))  # where classes are many, most rows must stay
        if n < MIN_SPLIT_ROWS or share * n < 2:
            return torch.zeros(len(y), dtype=torch.uint8), unit
        stop = share / 2 if self.early_stopping or self.tunes else 0.0
        firsts = None if strata is None else strata[np.unique(unit, return_index=True)[1]]
        part = train_val_test_split(n, stop / (1 - (share - stop)), share - stop, seed=self.seed_, strata=firsts)
        return part[torch.from_numpy(unit)], unit

    def _fit_predictor(
        self, x: Tensor, y: Tensor, part: Tensor, loss: Loss, outputs: int, weights: Array | None
    ) -> Predictor:
        """Train the net with the method; x, y and weights are of all rows, in the order of `part`."""
        method = self._make_method(loss if weights is None else WeightedLoss(loss))
        train, stop = part == TRAIN, part == VALIDATION
        targets = y if weights is None else append_weights(y, weights)
        targets = targets.float() if targets.is_floating_point() else targets
        info = getattr(method, "info", None)
        stopping = bool(self.early_stopping and stop.any()) and (info is None or info.early_stopping)
        n = int(train.sum())
        self.loss_curve_: list[float] = []
        self.validation_curve_: list[float] = []

        def note(report: EpochReport) -> None:
            self.loss_curve_.append(report.loss)
            self.validation_curve_ += [report.val_metrics["loss"]] if "loss" in report.val_metrics else []

        config = TrainingConfig(
            epochs=int(self.epochs),
            batch_size=_batch_size(n) if self.batch_size == "auto" else int(self.batch_size),
            optimizer=partial(torch.optim.AdamW, lr=float(self.learning_rate), weight_decay=float(self.weight_decay)),
            lr_scheduler=cosine_schedule if self.learning_rate else constant_schedule,
            seed=self.seed_,
            patience=int(self.patience) if stopping else None,
            accelerator="cpu",
            on_epoch=note,
            progress=bool(self.verbose),
        )
        model = partial(self._make_net, x.shape[1], outputs)
        data = TensorDataset(x[train].float(), targets[train])
        more = {"val_data": TensorDataset(x[stop].float(), targets[stop])} if stopping else {}
        predictor = method.fit(model, data, config, **more)
        return _in_double(predictor, x[:2])

    def _make_net(self, inputs: int, outputs: int) -> nn.Module:
        if self.net is None:
            return MLP(inputs, outputs, widths=tuple(map(int, self.widths)))
        net = self.net(inputs, outputs)
        if not isinstance(net, nn.Module):
            raise ValueError(f"net({inputs}, {outputs}) gave a {type(net).__name__}; expected an nn.Module")
        return net

    def _outputs_of_net(self, outputs: int) -> int:
        """How many the user's net gives when asked for so many."""
        if self.net is None:
            return outputs
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            net = self._make_net(self.n_features_in_, outputs).eval()
            found = net(torch.zeros(2, self.n_features_in_))
        return int(found.shape[1]) if isinstance(found, Tensor) and found.ndim > 1 else 1

    def _make_method(self, loss: Loss) -> Method:
        if not isinstance(self.method, str):
            if isinstance(self.method, type) or not hasattr(self.method, "fit"):
                raise ValueError(
                    f"got method={self.method!r}; expected a name, or a method such as MCDropout(rate=0.1)"
                )
            if isinstance(loss, WeightedLoss):
                raise ValueError(
                    f"got weights that are not whole numbers for {type(self.method).__name__}, a method with a loss of "
                    "its own; expected whole weights, which count as frequencies, or a method by its name"
                )
            return self.method
        entry = find_method(self.method)
        if entry.make is NeuBoots:
            return self._neuboots(loss)
        try:
            return entry.make(loss=loss)
        except ValueError:
            if not isinstance(loss, WeightedLoss):
                raise
            raise ValueError(
                f"got weights that are not whole numbers for the method {self.method!r}, which takes no weighted loss; "
                "expected whole weights, which count as frequencies, or another method"
            ) from None

    @abstractmethod
    def _neuboots(self, loss: Loss) -> Method:
        """NeuBoots with the law that suits the task."""

    def _set_seed(self) -> None:
        state = self.random_state
        drawn = not isinstance(state, Integral) or isinstance(state, bool)
        self.seed_ = int(check_random_state(state).randint(2**31 - 1)) if drawn else int(state)

    def _scale_inputs(self, X: Array) -> None:
        """x̂ = (x − mean) / std; of a column of two values, by their distance; one that does not vary is only shifted.

        A flag that is rarely set has a small standard deviation, and a row that has it would lie far from all others.
        """
        self.x_mean_, spread = mean_and_std(X)
        low, high = X.min(0), X.max(0)
        two_values = ((low == X) | (high == X)).all(0)
        self.x_scale_ = np.where(spread > 0, np.where(two_values, high - low, spread), 1.0)

    # -- prediction -------------------------------------------------------------------------------------

    def inputs(self, X: Any) -> Tensor:
        """X as the net takes it, standardised by the training rows: (N, n_features_in_)."""
        check_is_fitted(self)
        return self._standardised(validate_data(self, X, reset=False, dtype=np.float64))

    def _standardised(self, X: Array) -> Tensor:
        with np.errstate(over="ignore"):
            scaled = (X - self.x_mean_) / self.x_scale_
        if len(far := np.argwhere(~(np.abs(scaled) < np.finfo(np.float32).max))):
            row, column = far[0].tolist()
            raise ValueError(
                f"got {X[row, column]:g} in row {row}, column {column}, too far from the training rows for single "
                "precision; expected a smaller number"
            )
        return torch.from_numpy(scaled)

    # -- a folder ---------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to a folder of JSON and safetensors, which any machine can load."""
        from safetensors.numpy import save_file

        check_is_fitted(self)
        arrays, plain = {}, {}
        for name in self.fitted:
            value = getattr(self, name, None)
            if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
                arrays[name] = np.ascontiguousarray(value)
            else:
                plain[name] = value.tolist() if isinstance(value, np.ndarray) else value
        options = {name: value for name, value in self.get_params(deep=False).items() if name not in ("net", "method")}
        options = {name: value.item() if isinstance(value, np.generic) else value for name, value in options.items()}
        options |= {"random_state": self.seed_, "widths": [int(width) for width in self.widths]}
        method = self.method if isinstance(self.method, str) else None
        config = {"format": FORMAT, "version": VERSION, "estimator": type(self).__name__, "method": method}
        with atomic_folder(folder, FILES, "a saved estimator") as aside:
            save(self.predictor_, aside / "predictor")
            save_file(arrays, aside / "arrays.safetensors")
            plain |= self._write_more(aside)
            text = json.dumps({**config, "options": options, "fitted": plain}, indent=2, ensure_ascii=False)
            (aside / "estimator.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, net: NetFactory | nn.Module | None = None) -> Self:
        """The estimator that `save` wrote. One with a net of your own needs the function that made it, or a fresh net.

        A method that was given with options comes back by its name: to fit anew, give it again.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        source = Path(folder)
        try:
            config = json.loads((source / "estimator.json").read_text(encoding="utf-8"))
            written = config["format"], config["version"], config["estimator"]
            if written != (FORMAT, VERSION, cls.__name__):
                raise ValueError(f"it is a {' '.join(map(str, written))}")
            options, fitted, method = config["options"], config["fitted"], config["method"]
            arrays = load_file(source / "arrays.safetensors")
            known = inspect.signature(cls).parameters
            chosen = {name: value for name, value in options.items() if name in known}
            estimator = cls(**{**chosen, "widths": tuple(options["widths"])})
            estimator.seed_ = options["random_state"]
            for name in cls.fitted:
                value = arrays.get(name, fitted.get(name))
                if value is not None:
                    setattr(estimator, name, estimator._restored(name, value))
            estimator.net = net  # a net that is made already cannot be made anew: fit says so
            outputs = estimator._num_outputs()
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"{source} is no saved estimator; expected a folder written by save") from None
        except (ValueError, KeyError, TypeError, AttributeError, OSError, SafetensorError) as fault:
            raise ValueError(
                f"{source} cannot be read as a saved {cls.__name__} ({type(fault).__name__}: {fault}); expected what "
                "its save wrote"
            ) from None
        made = net if net is None or isinstance(net, nn.Module) else net(estimator.n_features_in_, outputs)
        estimator.predictor_ = load(source / "predictor", model=made)
        estimator.method = find_saved_method(estimator.predictor_.config()).name if method is None else method
        try:
            estimator._read_more(source, fitted)
        except (ValueError, KeyError, IndexError, TypeError, OSError, RuntimeError, SafetensorError) as fault:
            raise ValueError(
                f"{source} is damaged ({type(fault).__name__}: {fault}); expected what save wrote"
            ) from None
        return estimator

    def _write_more(self, folder: Path) -> dict[str, Any]:
        """Write what one of the estimators has besides; gives what is to stand in estimator.json."""
        return {}

    def _read_more(self, folder: Path, held: dict[str, Any]) -> None:
        """Read what `_write_more` wrote."""

    @abstractmethod
    def _num_outputs(self) -> int:
        """How many the net has, once fitted."""

    def _restored(self, name: str, value: Any) -> Any:
        return np.array(value, dtype=object) if name == "feature_names_in_" else value


def _number(value: Any) -> float:
    """The value of an option as a number; nan, which no comparison holds for, if it is none."""
    return math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)


def _in_double(predictor: Predictor, x: Tensor) -> Predictor:
    """The predictor in double precision: what it says of a row then does not depend on the rows around it.

    A net of the user's own that cannot compute so stays as it is.
    """
    predictor.module.double()
    try:
        predictor.summarize(x.double(), 2)
    except RuntimeError:
        predictor.module.float()
    return predictor


def _batch_size(n: int) -> int:
    """About a twentieth of the rows, a power of two from 32 to 1,024.

    >>> [_batch_size(n) for n in (10, 1000, 10_000, 1_000_000)]
    [32, 64, 512, 1024]
    """
    return int(min(1024, max(32, 2 ** round(math.log2(max(1, n) / 20)))))
