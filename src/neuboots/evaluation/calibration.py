"""Is a predictor as often right as it says? All figures of its class probabilities over labelled data.

    p(y | x) = 1/B Σ_b softmax f_b(x),   of the inputs with max p ≈ 0.8, are 80 % right?

Paper, section 4.1 and tables B.3 and B.4. Data are read batch by batch and replicates chunk by chunk: memory grows with
neither, but for a few bytes an input that the figures of ranks (AURC, adaptive bins) need.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neuboots.evaluation._batching import LabeledData, align_labels, check_predictor, format_table, iter_batches
from neuboots.metrics import ClassificationMetrics, LogitMetrics, MetricState, ReliabilityCurve, RunningMean
from neuboots.prediction import Prediction, Predictor, Summary


@dataclass(frozen=True, eq=False)
class CalibrationReport(MetricState):
    """What `evaluate_calibration` found. Parts of a data set add: `Calibration.of(a, y_a) + Calibration.of(b, y_b)`."""

    classes: ClassificationMetrics
    logits: LogitMetrics
    entropy: RunningMean
    expected_entropy: RunningMean
    mutual_information: RunningMean
    num_samples: int

    @classmethod
    def of(
        cls, prediction: Prediction | Summary, labels: Tensor, *, num_bins: int = 15, ignore_index: int | None = None
    ) -> Self:
        """The figures of one batch: a Prediction or Summary of N inputs and their labels (N, *), `ignore_index` ones apart."""
        labels = align_labels(prediction.probs, labels, ignore_index=ignore_index)
        logits = prediction.mean
        if logits.shape[1] == 1:  # one logit of the second of two classes
            logits = torch.cat([torch.zeros_like(logits), logits], 1)
        counted = (
            torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
        )  # (N, *)
        probs, z = (values.movedim(1, -1)[counted] for values in (prediction.probs, logits))  # (rows, C)
        return cls(
            classes=ClassificationMetrics.of(probs, labels[counted], num_bins=num_bins),
            logits=LogitMetrics.of(z, labels[counted]),
            entropy=RunningMean.of(prediction.entropy[counted]),
            expected_entropy=RunningMean.of(prediction.expected_entropy[counted]),
            mutual_information=RunningMean.of(prediction.mutual_information[counted]),
            num_samples=prediction.num_samples,
        )

    @property
    def count(self) -> int:
        return int(self.classes.count)

    @property
    def error(self) -> float:
        return float(self.classes.error)

    @property
    def ece(self) -> float:
        return float(self.classes.ece)

    @property
    def nll(self) -> float:
        """−log of the mean probability of the true class, in nats."""
        return float(self.classes.nll)

    @property
    def brier(self) -> float:
        """Summed over classes."""
        return float(self.classes.brier)

    @property
    def reliability_curve(self) -> ReliabilityCurve:
        return self.classes.reliability_curve

    @property
    def figures(self) -> dict[str, float]:
        """Every figure by name; entropies are means over the inputs, in nats."""
        names = ("error", "accuracy", "ece", "adaptive_ece", "mce", "nll", "brier", "aurc")
        figures = {name: getattr(self.classes, name) for name in names}
        figures |= {name: getattr(self.logits, name) for name in ("nll_at_mean_logit", "paper_nll")}
        figures |= {name: getattr(self, name).value for name in ("entropy", "expected_entropy", "mutual_information")}
        return {name: float(value) for name, value in figures.items()}

    def __str__(self) -> str:
        rows = [{"figure": name, "value": value} for name, value in self.figures.items()]
        return f"N = {self.count:,}, B = {self.num_samples}\n{format_table(rows)}"


def evaluate_calibration(
    predictor: Predictor,
    data: LabeledData,
    *,
    num_samples: int = 100,
    seed: int = 0,
    num_bins: int = 15,
    ignore_index: int | None = None,
    batch_size: int = 256,
    progress: bool = True,
) -> CalibrationReport:
    """Error, ECE, NLL, Brier and the rest over a data set of rows (x, y), or over a loader that gives batches of them.

    Pixels count as inputs of their own; those labelled `ignore_index` are passed over.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import DeterministicPredictor
    >>> net = torch.nn.Linear(2, 2)
    >>> _ = net.load_state_dict({"weight": 50 * torch.eye(2), "bias": torch.zeros(2)})  # the larger coordinate wins
    >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> found = evaluate_calibration(
    ...     DeterministicPredictor(net), TensorDataset(x, x.argmax(1)), num_samples=1, progress=False
    ... )
    >>> found.error, found.ece < 0.03
    (0.0, True)
    """
    check_predictor(predictor)
    total: CalibrationReport | int = 0
    for x, y in iter_batches(data, batch_size, title="calibration", progress=progress):
        summary = predictor.summarize(x, num_samples, seed=seed)
        total = total + CalibrationReport.of(summary, y, num_bins=num_bins, ignore_index=ignore_index)
    assert isinstance(total, CalibrationReport), "batches_of gives at least one batch"
    if total.count == 0:
        raise ValueError(f"got data whose labels are all void ({ignore_index}); expected some that count")
    return total
