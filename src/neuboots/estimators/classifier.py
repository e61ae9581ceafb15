"""Classifier with the interface of scikit-learn: class probabilities averaged over bootstrapped nets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import nn
from torch.utils.data import TensorDataset

from neuboots._validation import ArgumentError
from neuboots.estimators._base import VALIDATION, Array, NeuBootsEstimator
from neuboots.posthoc import TemperatureScaling
from neuboots.prediction import class_probabilities

_MAX_BATCH = 1 << 16
_MIN_TEMPERATURE_ROWS = 30  # with fewer validation rows, no temperature is fitted
_LOG_TEMPERATURE_PRIOR_STD = 0.5  # few rows may all be classified correctly by chance


@dataclass(eq=False, repr=False)
class NeuBootsClassifier(ClassifierMixin, NeuBootsEstimator):  # type: ignore[misc]
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
        """
        probs = self.predict_proba(X)
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
