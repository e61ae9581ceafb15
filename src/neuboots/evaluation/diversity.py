"""Diversity: how far do the replicates of a predictor differ from each other?

    figure = mean over pairs b < b' of figure(replicate b, replicate b')

over labelled data, for the figures of `neuboots.metrics.diversity`: ratio-error, Q-statistic, correlation, disagreement
(paper, section 3.2, table 3.3) and the Kullback–Leibler divergence of the probabilities. The data are read batch by
batch; the samples of one batch, (B, N, C), are held at a time.

Aksela, Comparison of classifier selection methods for improving committee performance, MCS 2003; Kuncheva and Whitaker,
Measures of diversity in classifier ensembles and their relationship with the ensemble accuracy, Machine Learning 2003;
Fort, Hu and Lakshminarayanan, Deep ensembles: a loss landscape perspective, arXiv:1912.02757, 2019.
"""

from dataclasses import dataclass

from neuboots._validation import check_int
from neuboots.evaluation._batching import LabeledData, align_labels, check_predictor, format_table, iter_batches
from neuboots.metrics import DiversityMetrics
from neuboots.prediction import Predictor, class_probabilities

_REPLICATES = 20  # of a method that has infinitely many


@dataclass(frozen=True, eq=False)
class DiversityReport:
    """What `evaluate_diversity` found; `count_outcomes` has every figure, and its parts add."""

    tally: DiversityMetrics
    num_samples: int  # B, the replicates compared
    asked: int  # as the caller wished
    num_distinct: int | None  # K, for a method of K members
    seed: int

    @property
    def num_pairs(self) -> int:
        return self.num_samples * (self.num_samples - 1) // 2

    @property
    def figures(self) -> dict[str, float]:
        """Every figure by name: means over pairs; the divergence in nats."""
        names = ("ratio_error", "q_statistic", "correlation", "disagreement", "pairwise_kl")
        return {name: float(getattr(self.tally, name)) for name in names}

    def __str__(self) -> str:
        header = f"N = {self.tally.count:,}, B = {self.num_samples} ({self.num_pairs} pairs), seed {self.seed}"
        if self.asked > self.num_samples:
            header += f"; {self.asked} were asked for, but the method has {self.num_distinct} members"
        return f"{header}\n{format_table([{'figure': name, 'value': value} for name, value in self.figures.items()])}"


def evaluate_diversity(
    predictor: Predictor,
    data: LabeledData,
    *,
    num_samples: int | None = None,
    seed: int = 0,
    ignore_index: int | None = None,
    batch_size: int = 256,
    progress: bool = True,
) -> DiversityReport:
    """Ratio-error, Q-statistic, correlation, disagreement and pairwise KL over pairs of B replicates, on rows (x, y).

    Of a method of K members each is taken once: B is K if it is not given, and at most K. Others have 20 if it is not.
    Pixels count as rows of their own; those labelled `ignore_index` are passed over. A batch of samples, (B, N, C, *), is held
    at a time.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import DeepEnsemble, TrainingConfig
    >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    >>> rows, config = TensorDataset(x, x.argmax(1)), TrainingConfig(epochs=1, progress=False)
    >>> predictor = DeepEnsemble(num_members=4).fit(lambda: torch.nn.Linear(3, 3), rows, config)
    >>> found = evaluate_diversity(predictor, rows, progress=False)
    >>> found.num_pairs, 0 < found.figures["disagreement"] < 1
    (6, True)
    """
    check_predictor(predictor)
    seed, distinct = check_int("seed", seed), predictor.num_distinct
    asked = check_int("num_samples", num_samples) if num_samples is not None else distinct or _REPLICATES
    B = asked if distinct is None else min(asked, distinct)
    if B < 2:
        raise ValueError(f"got B = {B} replicate(s) to compare; expected at least two, which make a pair")
    total: DiversityMetrics | int = 0
    for x, y in iter_batches(data, batch_size, title="diversity", progress=progress):
        samples = class_probabilities(predictor.predict(x, B, seed=seed).samples, 2)  # (B, N, C, *)
        labels = align_labels(samples[0], y, ignore_index=ignore_index)
        if ignore_index is not None:
            counted = labels != ignore_index  # (N, *)
            samples, labels = samples.movedim(2, -1)[:, counted], labels[counted]  # (B, M, C), (M,)
        if len(labels):
            total = total + DiversityMetrics.of(samples, labels)
    if not isinstance(total, DiversityMetrics):
        raise ValueError(f"got data whose labels are all void ({ignore_index}); expected some that count")
    return DiversityReport(total, B, asked, distinct, seed)
