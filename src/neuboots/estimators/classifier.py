"""A classifier: probabilities of the classes, averaged over B bootstrapped nets from one training."""

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots.estimators._base import CALIBRATION, TRAIN, VALIDATION, Array, NeuBootsEstimator
from neuboots.losses import Loss
from neuboots.methods import NeuBoots, find_method
from neuboots.posthoc import TemperatureScaling
from neuboots.prediction import Method, class_probabilities

_ROWS = 1 << 16  # that are predicted at once
MIN_TEMPERATURE_ROWS = 30  # rows that a temperature is fitted to
LOG_TEMPERATURE_PRIOR_STD = 0.5  # of log T: few rows may all be right by luck, for which no temperature is low enough


class NeuBootsClassifier(ClassifierMixin, NeuBootsEstimator):  # type: ignore[misc]
    """p(x) = 1/B Σ_b softmax f_b(x) / T: B bootstrapped nets from one training, and a temperature from held-out rows.

    X is standardised inside; labels are numbers or texts of any kind. A fifth of the rows is held out
    (`validation_fraction`): one half stops the training (`early_stopping`) and sets the temperature, the other
    (`held_out_`) is touched by nothing, for thresholds of your own. `method` is a name (`neuboots methods` lists them)
    or a method with options; `net` makes a net from the numbers of inputs and outputs. Whole sample weights are
    frequencies, others multiply the loss.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> classifier = NeuBootsClassifier(epochs=30, random_state=0).fit(X[::2], y[::2])
    >>> classifier.predict_proba(X[1::2]).shape, classifier.score(X[1::2], y[1::2]) > 0.85
    ((75, 3), True)
    """

    fitted = (
        "n_features_in_", "feature_names_in_", "x_mean_", "x_scale_", "classes_", "held_out_", "loss_curve_",
        "validation_curve_",
    )  # fmt: skip
    tunes = True

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows X (n, features) and their classes y (n,)."""
        self._check_options()
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            only = self.classes_.tolist()[0]
            raise ValueError(f"got one class, {only!r}, in every row; expected at least 2 classes to tell apart")
        self._set_seed()
        rows, weights = self._rows(X, codes.astype(np.float64), sample_weight)
        labels = torch.from_numpy(codes[rows]).long()
        part, _ = self._parts(X[rows], codes[rows], labels)
        self._scale_inputs(X[rows[(part == TRAIN).numpy()]])
        x = self._standardised(X[rows])
        loss = (
            nn.CrossEntropyLoss()
            if isinstance(self.method, str)
            else getattr(self.method, "loss", nn.CrossEntropyLoss())
        )
        if isinstance(self.method, str) and "classification" not in find_method(self.method).tasks:
            raise ValueError(f"got the method {self.method!r}, which is not for classification; expected another")
        if (outputs := self._outputs_of_net(len(self.classes_))) != len(self.classes_):
            raise ValueError(
                f"the net gives {outputs} outputs for {len(self.classes_)} classes; expected one for each: make it "
                "with the numbers that net(inputs, outputs) is given"
            )
        self.predictor_ = self._fit_predictor(x, labels, part, loss, len(self.classes_), weights)
        if int((part == VALIDATION).sum()) >= MIN_TEMPERATURE_ROWS:
            held_out = TensorDataset(x[part == VALIDATION], labels[part == VALIDATION])
            options = {"num_samples": int(self.num_samples), "seed": self.seed_, "batch_size": 1024}
            scaling = TemperatureScaling(**options, prior_std=LOG_TEMPERATURE_PRIOR_STD)
            self.predictor_ = scaling.fit(self.predictor_, held_out)
        self.held_out_ = np.zeros(len(X), dtype=bool)
        self.held_out_[rows[(part == CALIBRATION).numpy()]] = True
        self.held_out_[rows[(part != CALIBRATION).numpy()]] = False  # of several copies some were trained on
        return self

    def _neuboots(self, loss: Loss) -> Method:
        return NeuBoots(loss=loss, resample="pool")

    def _probabilities(self, x: Tensor) -> Array:
        """(N, C), in double precision, rows adding to 1."""
        parts = [
            self.predictor_.summarize(some, int(self.num_samples), seed=self.seed_).probs.double()
            for some in torch.split(x, _ROWS)
        ]
        probs = torch.cat(parts).numpy()
        return np.asarray(probs / probs.sum(1, keepdims=True))

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class, in the order of `classes_`: (N, C)."""
        return self._probabilities(self.inputs(X))

    def predict(self, X: Any) -> Array:
        """The likeliest class of each row: (N,)."""
        probs = self._probabilities(self.inputs(X))
        return np.asarray(self.classes_[probs.argmax(1)])

    def sample(self, X: Any, n: int = 1) -> Array:
        """The probabilities that n replicates give: (n, N, C)."""
        samples = self.predictor_.predict(self.inputs(X), n, seed=self.seed_).samples
        return np.asarray(class_probabilities(samples, 2).double())

    def _num_outputs(self) -> int:
        return len(self.classes_)

    def _restored(self, name: str, value: Any) -> Any:
        return np.array(value) if name == "classes_" else super()._restored(name, value)
