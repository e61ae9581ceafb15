"""Diversity of B replicates: means over the pairs b < b′ of statistics of their errors.

    n₁₁ both correct, n₀₀ both incorrect, n₁₀ and n₀₁ one of them;   n_same both incorrect with the same prediction
    Q = (n₁₁ n₀₀ − n₁₀ n₀₁) / (n₁₁ n₀₀ + n₁₀ n₀₁)
    correlation = (n₁₁ n₀₀ − n₁₀ n₀₁) / √((n₁₁ + n₁₀)(n₀₁ + n₀₀)(n₁₁ + n₀₁)(n₁₀ + n₀₀))
    ratio-error = (n₀₀ − n_same) / n_same,   disagreement = P(prediction_b ≠ prediction_b′)

Higher ratio-error and disagreement, lower Q and correlation mean more diverse replicates (paper, table 3.3). Where Q or
the correlation is 0 / 0, since one of the two is always correct or always incorrect, it is 1 if both are correct on the
same inputs and 0 otherwise. A ratio-error of 0 / 0 is 0; it is infinite if errors coincide but never agree.

L. Kuncheva, C. Whitaker, Measures of diversity in classifier ensembles and their relationship with the ensemble
accuracy, Machine Learning 2003.
M. Aksela, Comparison of classifier selection methods for improving committee performance, MCS 2003.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neuboots._validation import ArgumentError, check_int
from neuboots.metrics import classification
from neuboots.metrics.classification import MetricState, RunningMean, check_integers, check_tensors, flatten_probs


@dataclass(frozen=True, eq=False)
class PairwiseCounts(MetricState):
    """Counts of equal and of correct predictions for each pair of replicates.

    Args:
        agree: Number of inputs with the same prediction, (B, B).
        both_correct: Number of inputs on which both are correct, (B, B).
        count: Number of inputs, a 0-dim tensor.
    """

    agree: Tensor
    both_correct: Tensor
    count: Tensor

    @classmethod
    def from_preds(cls, preds: Tensor, labels: Tensor) -> Self:
        """Return the counts of one batch.

        Args:
            preds: Predicted classes of the replicates, integers (B, N) with B ≥ 2.
            labels: True classes, integers (N,).

        Raises:
            ArgumentError: If shapes or dtypes do not fit.
        """
        check_tensors(preds=preds, labels=labels)
        if preds.dim() < 2 or len(preds) < 2 or preds.shape[1:] != labels.shape:
            expected = f"(B, *) with B ≥ 2 and (*) = {tuple(labels.shape)}, the shape of labels"
            raise ArgumentError("preds.shape", tuple(preds.shape), expected)
        check_integers(preds=preds, labels=labels)
        flat = preds.detach().flatten(1)  # (B, N)
        correct = flat == labels.flatten().to(flat.device)  # (B, N)
        return cls(
            agree=torch.stack([(flat == one).sum(1) for one in flat]),
            both_correct=torch.stack([(correct & one).sum(1) for one in correct]),
            count=torch.tensor(labels.numel(), device=flat.device),
        )

    @property
    def disagreement(self) -> Tensor:
        """Mean fraction of inputs with different predictions."""
        return _mean_over_pairs(1 - self.agree.double() / check_int("count", self.count, minimum=1))

    @property
    def q_statistic(self) -> Tensor:
        """Mean Q-statistic."""
        n11, n10, n01, n00 = self._contingency
        same, other = n11 * n00, n10 * n01
        return _mean_over_pairs(self._divide(same - other, same + other))

    @property
    def correlation(self) -> Tensor:
        """Mean correlation of correctness."""
        n11, n10, n01, n00 = self._contingency
        squares = (n11 + n10) * (n01 + n00) * (n11 + n01) * (n10 + n00)
        return _mean_over_pairs(self._divide(n11 * n00 - n10 * n01, squares.sqrt()))

    @property
    def ratio_error(self) -> Tensor:
        """Mean ratio of different to same errors."""
        n11, _, _, n00 = self._contingency
        same = self.agree - n11  # both correct implies the same prediction; the rest is incorrect
        different = n00 - same
        return _mean_over_pairs(torch.where(different == 0, 0.0, different / same))

    @property
    def _contingency(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """n₁₁, n₁₀, n₀₁, n₀₀: (B, B) each, in float64."""
        check_int("count", self.count, minimum=1)
        n11 = self.both_correct.double()
        correct = n11.diagonal()
        n10, n01 = correct[:, None] - n11, correct[None, :] - n11
        return n11, n10, n01, self.count - n11 - n10 - n01

    def _divide(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        """Ratio of counts; 0 / 0 is 1 if both are correct on the same inputs, else 0."""
        _, n10, n01, _ = self._contingency
        equal = ((n10 == 0) & (n01 == 0)).double()
        return torch.where(denominator == 0, equal, numerator / denominator.where(denominator != 0, 1.0))


def _mean_over_pairs(values: Tensor) -> Tensor:
    """Mean over the pairs b < b′."""
    return values[torch.ones_like(values, dtype=torch.bool).triu(1)].mean()


@dataclass(frozen=True, eq=False)
class DiversityMetrics(PairwiseCounts):
    """All metrics of diversity for data that come in batches.

    Args:
        divergences: Mean over pairs of the Kullback–Leibler divergence.

    Example:
        >>> probs = torch.tensor([[[0.9, 0.1], [0.6, 0.4]], [[0.8, 0.2], [0.3, 0.7]]])  # B = 2, N = 2, C = 2
        >>> state = DiversityMetrics.from_batch(probs, torch.tensor([0, 1]))
        >>> state.disagreement, state.pairwise_kl
        (tensor(0.5000, dtype=torch.float64), tensor(0.1142, dtype=torch.float64))
    """

    divergences: RunningMean

    @classmethod
    def from_batch(cls, samples: Tensor, labels: Tensor) -> Self:
        """Return the state of one batch.

        Args:
            samples: Probabilities of the replicates (B, N, C, *) with B ≥ 2.
            labels: Labels (N, *).

        Raises:
            ArgumentError: If shapes do not fit, rows are no probabilities, or a label is out of range.
        """
        p = _flatten_replicates(samples)
        flatten_probs(samples[0], labels)
        counts = PairwiseCounts.from_preds(p.argmax(2), labels.flatten())
        return cls(**vars(counts), divergences=RunningMean.from_batch(_divergence(p)))

    @property
    def pairwise_kl(self) -> Tensor:
        """Mean Kullback–Leibler divergence, in nats."""
        return self.divergences.value


def disagreement(preds: Tensor, labels: Tensor) -> Tensor:
    """P(prediction_b ≠ prediction_b′), mean over pairs.

    Args:
        preds: Predicted classes (B, N).
        labels: True classes (N,).

    Returns:
        The mean, a 0-dim float64 tensor.

    Example:
        >>> disagreement(torch.tensor([[0, 1, 2], [0, 1, 1]]), torch.tensor([0, 1, 0]))
        tensor(0.3333, dtype=torch.float64)
    """
    return PairwiseCounts.from_preds(preds, labels).disagreement


def q_statistic(preds: Tensor, labels: Tensor) -> Tensor:
    """(n₁₁ n₀₀ − n₁₀ n₀₁) / (n₁₁ n₀₀ + n₁₀ n₀₁), mean over pairs: 0 if errors are independent, 1 if they coincide.

    Args:
        preds: Predicted classes (B, N).
        labels: True classes (N,).

    Returns:
        The mean, a 0-dim float64 tensor.

    Example:
        >>> q_statistic(torch.tensor([[0, 1, 2], [0, 1, 1]]), torch.tensor([0, 1, 0]))
        tensor(1., dtype=torch.float64)
    """
    return PairwiseCounts.from_preds(preds, labels).q_statistic


def correlation(preds: Tensor, labels: Tensor) -> Tensor:
    """Correlation over inputs of 1[prediction_b = y] and 1[prediction_b′ = y], mean over pairs.

    Args:
        preds: Predicted classes (B, N).
        labels: True classes (N,).

    Returns:
        The mean, a 0-dim float64 tensor.

    Example:
        >>> correlation(torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0]]), torch.tensor([0, 1, 1, 0]))
        tensor(-0.3333, dtype=torch.float64)
    """
    return PairwiseCounts.from_preds(preds, labels).correlation


def ratio_error(preds: Tensor, labels: Tensor) -> Tensor:
    """(n₀₀ − n_same) / n_same, mean over pairs: where both are incorrect, different predictions per same one.

    DESlib's `ratio_errors` is another metric, (n₁₀ + n₀₁) / n₀₀: errors of one alone per error of both.

    Args:
        preds: Predicted classes (B, N).
        labels: True classes (N,).

    Returns:
        The mean, a 0-dim float64 tensor.

    Example:
        >>> ratio_error(torch.tensor([[1, 1, 2], [2, 1, 2]]), torch.tensor([0, 0, 0]))
        tensor(0.5000, dtype=torch.float64)
    """
    return PairwiseCounts.from_preds(preds, labels).ratio_error


def pairwise_kl(samples: Tensor) -> Tensor:
    """Σ_c p_b log(p_b / p_b′), mean over ordered pairs b ≠ b′ and inputs, in nats.

    A probability below the smallest normal number of its dtype counts as that number inside the logarithm.

    Args:
        samples: Probabilities of the replicates (B, N, C, *).

    Returns:
        The mean divergence, a 0-dim float64 tensor.

    Example:
        >>> pairwise_kl(torch.tensor([[[0.5, 0.5]], [[0.25, 0.75]]]))
        tensor(0.1373, dtype=torch.float64)
    """
    return RunningMean.from_batch(_divergence(_flatten_replicates(samples))).value


def _flatten_replicates(samples: Tensor) -> Tensor:
    """Check (B, N, C, *) and flatten to (B, N, C)."""
    check_tensors(samples=samples)
    if samples.dim() < 3 or len(samples) < 2:
        raise ArgumentError("samples.shape", tuple(samples.shape), "(B, N, C, *) with B ≥ 2")
    flat = samples.detach().movedim(2, -1).flatten(1, -2)  # (B, N, C)
    flatten_probs(flat.flatten(0, 1), torch.zeros(flat.shape[0] * flat.shape[1], dtype=torch.long))
    return flat


def _divergence(p: Tensor) -> Tensor:
    """Mean over ordered pairs of KL: (N,).

    Σ_{b ≠ b′} Σ_c p_b (log p_b − log p_b′) = B Σ_b Σ_c (p_b − p̄)(log p_b − mean log p): no sum over pairs, and
    replicates that are almost the same lose few digits.
    """
    B, _, C = p.shape
    parts = []
    for part in torch.split(p, max(1, classification.MAX_CHUNK_ELEMENTS // (B * C)), dim=1):
        log = part.clamp_min(torch.finfo(p.dtype).tiny).double().log()
        exact = part.double()
        parts.append(((log - log.mean(0)) * (exact - exact.mean(0))).sum((0, 2)).clamp_min(0) / (B - 1))
    return torch.cat(parts)
