"""Diversity of the replicates of a predictor: means over pairs b < b′ of statistics of their predictions.

Ratio-error, Q-statistic, correlation and disagreement (paper, section 3.2, table 3.3) and the Kullback–Leibler
divergence of the probabilities, as defined in `neuboots.metrics.diversity`. Data are read batch by batch; only the
samples of one batch, (B, N, C, *), are in memory.

Aksela, Comparison of classifier selection methods for improving committee performance, MCS 2003; Kuncheva and Whitaker,
Measures of diversity in classifier ensembles and their relationship with the ensemble accuracy, Machine Learning 2003;
Fort, Hu and Lakshminarayanan, Deep ensembles: a loss landscape perspective, arXiv:1912.02757, 2019.
"""

from dataclasses import dataclass

from neuboots._validation import ArgumentError, check_int, check_memory
from neuboots.evaluation._batching import (
    LabeledData,
    align_labels,
    check_any_counted,
    check_predictor,
    format_metrics,
    is_counted,
    iter_batches,
)
from neuboots.metrics import DiversityMetrics
from neuboots.prediction import Predictor, class_logits, class_probabilities

_DEFAULT_SAMPLES = 20  # for a method with infinitely many replicates


@dataclass(frozen=True, eq=False)
class DiversityReport:
    """Result of `evaluate_diversity`.

    Args:
        state: State of all metrics; states of parts of a data set add.
        num_samples: Number of replicates B that were compared.
        seed: Seed of the replicates.
    """

    state: DiversityMetrics
    num_samples: int
    seed: int

    @property
    def num_pairs(self) -> int:
        """Number of pairs of replicates."""
        return self.num_samples * (self.num_samples - 1) // 2

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics by name, means over pairs; the divergence in nats."""
        names = ("ratio_error", "q_statistic", "correlation", "disagreement", "pairwise_kl")
        return {name: float(getattr(self.state, name)) for name in names}

    def __str__(self) -> str:
        header = f"N = {int(self.state.count):,}, B = {self.num_samples} ({self.num_pairs} pairs), seed {self.seed}"
        return f"{header}\n{format_metrics(self.metrics)}"


def evaluate_diversity(
    predictor: Predictor,
    data: LabeledData,
    *,
    num_samples: int | None = None,
    seed: int = 0,
    ignore_index: int | None = -100,
    batch_size: int = 256,
    progress: bool = True,
) -> DiversityReport:
    """Compute ratio-error, Q-statistic, correlation, disagreement and pairwise KL over pairs of replicates.

    Args:
        predictor: Predictor of a classifier; pixels count as inputs of their own.
        data: Data set of examples (x, y), or a loader of batches.
        num_samples: Number of replicates B. A method of K members uses each once, so B is at most K, its default; the
            default of other methods is 20.
        seed: Seed of the replicates.
        ignore_index: Label of inputs that do not count; None if all do.
        batch_size: Number of inputs at a time, for a data set.
        progress: Whether to show a progress bar.

    Returns:
        The report, which prints as a table.

    Raises:
        ArgumentError: If there are fewer than two replicates, or no label counts.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots import DeepEnsemble, TrainingConfig
        >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
        >>> data, config = TensorDataset(x, x.argmax(1)), TrainingConfig(epochs=1, progress=False)
        >>> predictor = DeepEnsemble(num_members=4).fit(lambda: torch.nn.Linear(3, 3), data, config)
        >>> report = evaluate_diversity(predictor, data, progress=False)
        >>> report.num_pairs, 0 < report.metrics["disagreement"] < 1
        (6, True)
    """
    check_predictor(predictor)
    seed, distinct = check_int("seed", seed), predictor.num_distinct
    requested = distinct or _DEFAULT_SAMPLES if num_samples is None else check_int("num_samples", num_samples)
    B = requested if distinct is None else min(requested, distinct)
    if B < 2:
        raise ArgumentError("num_samples", B, "at least two replicates")
    check_memory("num_samples", B, 8 * 8 * B**2, hint="use fewer replicates; all pairs of them are compared")
    total: DiversityMetrics | int = 0
    for x, y in iter_batches(data, batch_size, title="diversity", progress=progress):
        prediction = predictor.predict(x, B, seed=seed)
        logits = class_logits(prediction.samples, 2, independent=prediction.independent)
        samples = class_probabilities(logits, 2)  # (B, N, C, *)
        labels = align_labels(samples[0], y, ignore_index=ignore_index)
        counted = is_counted(labels, ignore_index)
        total = total + DiversityMetrics.from_batch(samples.movedim(2, -1)[:, counted], labels[counted])
    assert isinstance(total, DiversityMetrics), "iter_batches yields at least one batch"
    check_any_counted(int(total.count), ignore_index)
    return DiversityReport(total, B, seed)
