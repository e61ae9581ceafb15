"""Accuracy and calibration on corrupted images, by corruption and severity.

    metrics(corruption, severity) of p(y | preprocess(corrupt(x, severity))),   x ∈ [0, 1]

Paper, appendix B (calibration under distributional shift); Ovadia, Fertig, Ren, Nado, Sculley, Nowozin, Dillon,
Lakshminarayanan and Snoek, Can you trust your model's uncertainty? NeurIPS 2019. Data are read once, batch by batch,
and every batch is corrupted in every way; `neuboots.data.corruptions` has the ten of CIFAR-C, and rotation.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from neuboots._validation import ArgumentError, check_int
from neuboots.evaluation._batching import (
    LabeledData,
    align_labels,
    check_predictor,
    format_table,
    iter_batches,
)
from neuboots.metrics import ProbabilityMetrics
from neuboots.prediction import Predictor

CORRUPTION_METRICS = ("accuracy", "ece", "nll", "brier")


class CorruptionFunction(Protocol):
    """A corruption of images."""

    def __call__(self, images: Tensor, severity: int, *, seed: int, index: Tensor) -> Tensor:
        """Return corrupted images.

        Args:
            images: Images (N, C, H, W) in [0, 1].
            severity: Severity, 1 or more.
            seed: Seed of the corruption.
            index: Row numbers (N,) that, with the seed, determine random draws.
        """


@dataclass(frozen=True, eq=False)
class CorruptionReport:
    """Result of `evaluate_corruptions`: each metric by corruption and severity, (K, S), and on clean data.

    Args:
        corruptions: Names of the K corruptions.
        severities: The S severities.
        clean: Metrics of the clean data by name.
        accuracy: Fraction of correct predictions, (K, S).
        ece: Expected calibration error, (K, S).
        nll: Negative log-likelihood in nats, (K, S).
        brier: Brier score, (K, S).
        count: Number of inputs.
        num_samples: Number of replicates B.
        seed: Seed of the replicates and the corruptions.
    """

    corruptions: tuple[str, ...]
    severities: tuple[int, ...]
    clean: dict[str, float]
    accuracy: Tensor
    ece: Tensor
    nll: Tensor
    brier: Tensor
    count: int
    num_samples: int
    seed: int

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row for the clean data and one for each corruption and severity."""
        cases = product(enumerate(self.corruptions), enumerate(self.severities))
        rows = [{"corruption": name, "severity": level, **self._mean(k, s)} for (k, name), (s, level) in cases]
        return [{"corruption": "clean", "severity": 0, **self.clean}, *rows]

    @property
    def by_severity(self) -> list[dict[str, Any]]:
        """Means over corruptions, one row for each severity; severity 0 is the clean data."""
        rows = [{"severity": level, **self._mean(slice(None), s)} for s, level in enumerate(self.severities)]
        return [{"severity": 0, **self.clean}, *rows]

    def _mean(self, *place: Any) -> dict[str, float]:
        return {metric: float(getattr(self, metric)[place].mean()) for metric in CORRUPTION_METRICS}

    def __str__(self) -> str:
        what = f"mean over {len(self.corruptions)} corruptions" if len(self.corruptions) > 1 else self.corruptions[0]
        header = f"N = {self.count:,}, B = {self.num_samples}, seed {self.seed}; {what}, severity 0 is clean"
        return f"{header}\n{format_table(self.by_severity)}"


def evaluate_corruptions(
    predictor: Predictor,
    data: LabeledData,
    corruptions: Mapping[str, CorruptionFunction],
    *,
    severities: Sequence[int] = (1, 2, 3, 4, 5),
    preprocess: Callable[[Tensor], Tensor] = lambda x: x,
    num_samples: int = 100,
    seed: int = 0,
    num_bins: int = 15,
    ignore_index: int | None = -100,
    batch_size: int = 256,
    progress: bool = True,
) -> CorruptionReport:
    """Compute accuracy, ECE, NLL and Brier score on clean and corrupted images.

    Args:
        predictor: Predictor of a classifier; pixels count as inputs of their own.
        data: Data set of examples (x, y) with x in [0, 1], or a loader of batches in a fixed order, so that an image
            gets the same noise in every call.
        corruptions: Functions (images, severity, seed=…, index=…) by name, such as
            `neuboots.data.corruptions.CORRUPTIONS`.
        severities: Severities.
        preprocess: What images go through after the corruption, such as normalization.
        num_samples: Number of replicates B.
        seed: Seed of the replicates and the corruptions.
        num_bins: Number of bins of the ECE.
        ignore_index: Label of inputs that do not count; None if all do.
        batch_size: Number of inputs at a time, for a data set.
        progress: Whether to show a progress bar.

    Returns:
        The report, which prints as a table.

    Raises:
        ArgumentError: If there is no corruption, or a corruption changes the shape of the images.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> x = torch.rand(100, 1, 1, 2, generator=torch.Generator().manual_seed(0))
        >>> data = TensorDataset(x, x.flatten(1).argmax(1))  # which pixel is brighter?
        >>> corruptions = {"fade": lambda images, severity, seed, index: images * (1 - severity / 5)}
        >>> predictor = DeterministicPredictor(torch.nn.Flatten())
        >>> options = {"severities": (1, 4), "num_samples": 1, "progress": False}
        >>> print(evaluate_corruptions(predictor, data, corruptions, **options))
        N = 100, B = 1, seed 0; fade, severity 0 is clean
        severity  accuracy     ece     nll   brier
               0         1  0.4306  0.5678  0.3772
               1         1   0.444  0.5902  0.3985
               4         1  0.4858  0.6654  0.4723
    """
    check_predictor(predictor)
    levels = tuple(check_int("severities", severity) for severity in severities)
    if not isinstance(corruptions, Mapping) or not corruptions:
        raise ArgumentError("corruptions", corruptions, "a dict of functions by name, such as CORRUPTIONS")
    cases = [(None, 0), *product(corruptions, levels)]
    states: dict[tuple[str | None, int], Any] = defaultdict(int)
    count = 0
    for x, y in iter_batches(data, batch_size, title="corruptions", progress=progress):
        index = torch.arange(count, count + len(x))
        count += len(x)
        for name, severity in cases:
            images = x if name is None else corruptions[name](x, severity, seed=seed, index=index)
            if not isinstance(images, Tensor) or images.shape != x.shape:
                found = f"{name!r}, which does not return images of the same shape"
                raise ArgumentError("corruptions", found, f"images of shape {tuple(x.shape)}")
            probs = predictor.summarize(preprocess(images), num_samples, seed=seed).class_probs
            labels = align_labels(probs, y, ignore_index=ignore_index)
            state = ProbabilityMetrics.from_batch(probs, labels, num_bins=num_bins, ignore_index=ignore_index)
            states[name, severity] += state
    clean, *others = ({metric: float(getattr(states[case], metric)) for metric in CORRUPTION_METRICS} for case in cases)
    shape = len(corruptions), len(levels)
    return CorruptionReport(
        corruptions=tuple(corruptions),
        severities=levels,
        clean=clean,
        count=count,
        num_samples=num_samples,
        seed=seed,
        **{
            metric: torch.tensor([row[metric] for row in others], dtype=torch.float64).view(shape)
            for metric in CORRUPTION_METRICS
        },
    )
