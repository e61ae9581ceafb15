"""Calibration of a predictor: metrics of its class probabilities over labeled data.

    p(y | x) = 1/B Σ_b softmax f_b(x),   calibrated if P(argmax p = y | max p = c) = c

Paper, section 4.1 and tables B.3 and B.4. Data are read batch by batch and replicates chunk by chunk; memory does not
grow with either, except for one confidence per input, which AURC and the adaptive ECE need.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from neuboots.evaluation._batching import (
    LabeledData,
    align_labels,
    check_any_counted,
    check_predictor,
    format_metrics,
    is_counted,
    iter_batches,
)
from neuboots.metrics import ClassificationMetrics, MetricState, ReliabilityCurve, RunningMean
from neuboots.prediction import Prediction, Predictor, Summary, class_logits


@dataclass(frozen=True, eq=False)
class CalibrationReport(MetricState):
    """Result of `evaluate_calibration`; reports of parts of a data set add.

    Args:
        classes: State of the metrics of probabilities.
        logit_nlls: −log softmax(z)_y at the mean logit z.
        entropy: Entropy of the mean probability, in nats.
        expected_entropy: Mean entropy of the replicates, in nats.
        mutual_information: Difference of the two entropies, in nats.
        num_samples: Number of replicates B.
    """

    classes: ClassificationMetrics
    logit_nlls: RunningMean
    entropy: RunningMean
    expected_entropy: RunningMean
    mutual_information: RunningMean
    num_samples: int

    @classmethod
    def from_batch(
        cls, prediction: Prediction | Summary, labels: Tensor, *, num_bins: int = 15, ignore_index: int | None = -100
    ) -> Self:
        """Return the report of one batch.

        Args:
            prediction: Prediction or Summary of N inputs.
            labels: Labels (N, *); for independent outputs 0 or 1 for each, (N, C, *), which then count as inputs.
            num_bins: Number of bins of the calibration errors.
            ignore_index: Label of inputs that do not count; None if all do.
        """
        labels = align_labels(prediction.class_probs, labels, ignore_index=ignore_index)
        logits = class_logits(prediction.mean, 1, independent=prediction.independent)
        if logits.shape[1] == 1:  # one logit of the second of two classes
            logits = torch.cat([torch.zeros_like(logits), logits], 1)
        counted = is_counted(labels, ignore_index)
        inputs = counted.any(1) if prediction.independent else counted
        probs, z = (values.movedim(1, -1)[counted] for values in (prediction.class_probs, logits))  # (rows, C)
        return cls(
            classes=ClassificationMetrics.from_batch(probs, labels[counted], num_bins=num_bins),
            logit_nlls=RunningMean.from_batch(cross_entropy(z.double(), labels[counted], reduction="none")),
            entropy=RunningMean.from_batch(prediction.entropy[inputs]),
            expected_entropy=RunningMean.from_batch(prediction.expected_entropy[inputs]),
            mutual_information=RunningMean.from_batch(prediction.mutual_information[inputs]),
            num_samples=prediction.num_samples,
        )

    @property
    def count(self) -> int:
        """Number of inputs (or pixels, or labels of independent outputs)."""
        return self.classes.count

    @property
    def reliability_curve(self) -> ReliabilityCurve:
        """Mean confidence and accuracy by bins of the confidence."""
        return self.classes.reliability_curve

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics by name; entropies are means over the inputs, in nats."""
        names = ("error", "accuracy", "ece", "adaptive_ece", "mce", "nll", "brier", "aurc")
        values = {name: float(getattr(self.classes, name)) for name in names}
        values |= {"nll_at_mean_logit": float(self.logit_nlls.value), "paper_nll": 10 * float(self.logit_nlls.value)}
        entropies = ("entropy", "expected_entropy", "mutual_information")
        return values | {name: float(getattr(self, name).value) for name in entropies}

    def __str__(self) -> str:
        return f"N = {self.count:,}, B = {self.num_samples}\n{format_metrics(self.metrics)}"


def evaluate_calibration(
    predictor: Predictor,
    data: LabeledData,
    *,
    num_samples: int = 100,
    seed: int = 0,
    num_bins: int = 15,
    ignore_index: int | None = -100,
    batch_size: int = 256,
    progress: bool = True,
) -> CalibrationReport:
    """Compute error, ECE, NLL, Brier score, AURC and entropies of a classifier.

    Args:
        predictor: Predictor of a classifier. Pixels, tokens and the labels of independent outputs count as inputs of
            their own, except for entropies, which are sums over the labels.
        data: Data set of examples (x, y), or a loader of batches.
        num_samples: Number of replicates B.
        seed: Seed of the replicates.
        num_bins: Number of bins of the calibration errors.
        ignore_index: Label of inputs that do not count; None if all do.
        batch_size: Number of inputs at a time, for a data set.
        progress: Whether to show a progress bar.

    Returns:
        The report, which prints as a table.

    Raises:
        ArgumentError: If labels do not fit the outputs, or none counts.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> net = torch.nn.Linear(2, 2)
        >>> _ = net.load_state_dict({"weight": 50 * torch.eye(2), "bias": torch.zeros(2)})  # the larger input wins
        >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
        >>> data = TensorDataset(x, x.argmax(1))
        >>> report = evaluate_calibration(DeterministicPredictor(net), data, num_samples=1, progress=False)
        >>> report.metrics["error"], report.metrics["ece"] < 0.03
        (0.0, True)
    """
    check_predictor(predictor)
    total: CalibrationReport | int = 0
    for x, y in iter_batches(data, batch_size, title="calibration", progress=progress):
        summary = predictor.summarize(x, num_samples, seed=seed)
        total = total + CalibrationReport.from_batch(summary, y, num_bins=num_bins, ignore_index=ignore_index)
    assert isinstance(total, CalibrationReport), "iter_batches yields at least one batch"
    check_any_counted(total.count, ignore_index)
    return total
