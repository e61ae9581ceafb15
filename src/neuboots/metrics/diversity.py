"""How differently do B replicates err? Mean over the pairs b < b′, from counts over inputs:

    n₁₁ both right, n₀₀ both wrong, n₁₀ and n₀₁ one of them;   n_same both wrong with the same guess
    Q = (n₁₁ n₀₀ − n₁₀ n₀₁) / (n₁₁ n₀₀ + n₁₀ n₀₁)
    correlation = (n₁₁ n₀₀ − n₁₀ n₀₁) / √((n₁₁ + n₁₀)(n₀₁ + n₀₀)(n₁₁ + n₀₁)(n₁₀ + n₀₀))
    ratio-error = (n₀₀ − n_same) / n_same,   disagreement = P(guess_b ≠ guess_b′)

Higher ratio-error and disagreement, lower Q and correlation mean more diverse replicates (paper, table 3.3).
Where Q or the correlation is 0 / 0, since one of the two is always right or always wrong, it is 1 if both are right on
the same inputs and 0 otherwise. A ratio-error of 0 / 0 is 0; it is infinite if errors coincide but never agree.

L. Kuncheva, C. Whitaker, Measures of diversity in classifier ensembles and their relationship with the ensemble
accuracy, Machine Learning 2003.
M. Aksela, Comparison of classifier selection methods for improving committee performance, MCS 2003.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neuboots.metrics._base import (
    MAX_CHUNK_ELEMENTS,
    MetricState,
    RunningMean,
    check_nonempty,
    check_tensors,
    flatten_probs,
)


@dataclass(frozen=True, eq=False)
class PairwiseCounts(MetricState):
    """For each pair of replicates, how often they guess the same, and how often both are right."""

    agree: Tensor  # (B, B)
    right: Tensor  # (B, B)
    count: Tensor  # ()

    @classmethod
    def of(cls, guesses: Tensor, truth: Tensor) -> Self:
        """Of the replicates' guesses (B, N) and true labels (N,), whole numbers."""
        check_tensors(guesses=guesses, truth=truth)
        if guesses.dim() < 2 or guesses.shape[1:] != truth.shape:
            raise ValueError(
                f"guesses has shape {tuple(guesses.shape)} and truth {tuple(truth.shape)}; expected (B, N) and (N,): "
                "reshape one of them"
            )
        if any(part.is_floating_point() or part.is_complex() for part in (guesses, truth)):
            raise ValueError(
                f"guesses is {guesses.dtype} and truth {truth.dtype}; expected integers: pass labels, such as "
                "samples.argmax(2)"
            )
        if len(guesses) < 2:
            raise ValueError(f"got B = {len(guesses)} replicate(s); expected at least 2, which make a pair")
        flat = guesses.detach().flatten(1)  # (B, N)
        right = flat == truth.flatten().to(flat.device)  # (B, N)
        return cls(
            agree=torch.stack([(flat == one).sum(1) for one in flat]),
            right=torch.stack([(right & one).sum(1) for one in right]),
            count=torch.tensor(truth.numel(), device=flat.device),
        )

    @property
    def disagreement(self) -> Tensor:
        return _mean(1 - self.agree.double() / check_nonempty(self.count))

    @property
    def q_statistic(self) -> Tensor:
        n11, n10, n01, n00 = self._quarters
        same, other = n11 * n00, n10 * n01
        return _mean(self._or_alike(same - other, same + other))

    @property
    def correlation(self) -> Tensor:
        n11, n10, n01, n00 = self._quarters
        squares = (n11 + n10) * (n01 + n00) * (n11 + n01) * (n10 + n00)
        return _mean(self._or_alike(n11 * n00 - n10 * n01, squares.sqrt()))

    @property
    def ratio_error(self) -> Tensor:
        n11, _, _, n00 = self._quarters
        same = self.agree - n11  # both right guess the same; the rest of the same guesses are wrong
        different = n00 - same
        return _mean(torch.where(different == 0, 0.0, different / same))

    @property
    def _quarters(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """n₁₁, n₁₀, n₀₁, n₀₀: (B, B) each, in float64."""
        check_nonempty(self.count)
        n11 = self.right.double()
        each = n11.diagonal()
        n10, n01 = each[:, None] - n11, each[None, :] - n11
        return n11, n10, n01, self.count - n11 - n10 - n01

    def _or_alike(self, above: Tensor, below: Tensor) -> Tensor:
        """above / below; of 0 / 0, whether both are right on the same inputs."""
        _, n10, n01, _ = self._quarters
        alike = ((n10 == 0) & (n01 == 0)).double()
        return torch.where(below == 0, alike, above / below.where(below != 0, 1.0))


def _mean(values: Tensor) -> Tensor:
    """Over the pairs b < b′."""
    return values[torch.ones_like(values, dtype=torch.bool).triu(1)].mean()


@dataclass(frozen=True, eq=False)
class DiversityMetrics(MetricState):
    """Every figure of this file, of data that come in parts.

    >>> probs = torch.tensor([[[0.9, 0.1], [0.6, 0.4]], [[0.8, 0.2], [0.3, 0.7]]])  # B = 2, N = 2, C = 2
    >>> tally = DiversityMetrics.of(probs, torch.tensor([0, 1]))
    >>> tally.disagreement, tally.pairwise_kl
    (tensor(0.5000, dtype=torch.float64), tensor(0.1142, dtype=torch.float64))
    """

    pairs: PairwiseCounts
    divergence: RunningMean

    @classmethod
    def of(cls, samples: Tensor, labels: Tensor) -> Self:
        """Of the replicates' probabilities (B, N, C, *) and labels (N, *)."""
        p = _replicates(samples)
        flatten_probs(samples[0], labels)
        return cls(PairwiseCounts.of(p.argmax(2), labels.flatten()), RunningMean.of(_divergence(p)))

    @property
    def count(self) -> int:
        return int(self.pairs.count)

    @property
    def disagreement(self) -> Tensor:
        return self.pairs.disagreement

    @property
    def q_statistic(self) -> Tensor:
        return self.pairs.q_statistic

    @property
    def correlation(self) -> Tensor:
        return self.pairs.correlation

    @property
    def ratio_error(self) -> Tensor:
        return self.pairs.ratio_error

    @property
    def pairwise_kl(self) -> Tensor:
        return self.divergence.value


def disagreement(guesses: Tensor, truth: Tensor) -> Tensor:
    """P(guess_b ≠ guess_b′), mean over pairs: guesses (B, N), truth (N,).

    >>> disagreement(torch.tensor([[0, 1, 2], [0, 1, 1]]), torch.tensor([0, 1, 0]))
    tensor(0.3333, dtype=torch.float64)
    """
    return PairwiseCounts.of(guesses, truth).disagreement


def q_statistic(guesses: Tensor, truth: Tensor) -> Tensor:
    """(n₁₁ n₀₀ − n₁₀ n₀₁) / (n₁₁ n₀₀ + n₁₀ n₀₁), mean over pairs: 0 if errors are independent, 1 if they coincide.

    >>> q_statistic(torch.tensor([[0, 1, 2], [0, 1, 1]]), torch.tensor([0, 1, 0]))
    tensor(1., dtype=torch.float64)
    """
    return PairwiseCounts.of(guesses, truth).q_statistic


def correlation(guesses: Tensor, truth: Tensor) -> Tensor:
    """Of 1[guess_b = y] and 1[guess_b′ = y] over inputs, mean over pairs.

    >>> correlation(torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0]]), torch.tensor([0, 1, 1, 0]))
    tensor(-0.3333, dtype=torch.float64)
    """
    return PairwiseCounts.of(guesses, truth).correlation


def ratio_error(guesses: Tensor, truth: Tensor) -> Tensor:
    """(n₀₀ − n_same) / n_same, mean over pairs: where both are wrong, different answers for each same one.

    DESlib's `ratio_errors` is another figure, (n₁₀ + n₀₁) / n₀₀: errors of one alone for each error of both.

    >>> ratio_error(torch.tensor([[1, 1, 2], [2, 1, 2]]), torch.tensor([0, 0, 0]))
    tensor(0.5000, dtype=torch.float64)
    """
    return PairwiseCounts.of(guesses, truth).ratio_error


def pairwise_kl(samples: Tensor) -> Tensor:
    """Σ_c p_b log(p_b / p_b′), mean over ordered pairs b ≠ b′ and inputs, in nats: samples (B, N, C, *).

    A probability below the smallest normal number of its dtype counts as that number inside the logarithm.

    >>> pairwise_kl(torch.tensor([[[0.5, 0.5]], [[0.25, 0.75]]]))
    tensor(0.1373, dtype=torch.float64)
    """
    return RunningMean.of(_divergence(_replicates(samples))).value


def _replicates(samples: Tensor) -> Tensor:
    """Check (B, N, C, *) and flatten to (B, N, C)."""
    check_tensors(samples=samples)
    if samples.dim() < 3 or len(samples) < 2:
        raise ValueError(
            f"samples has shape {tuple(samples.shape)}; expected (B, N, C, *) with B ≥ 2, which make a pair"
        )
    flat = samples.detach().movedim(2, -1).flatten(1, -2)  # (B, N, C)
    flatten_probs(flat.flatten(0, 1), torch.zeros(flat.shape[:2], dtype=torch.long).flatten())
    return flat


def _divergence(p: Tensor) -> Tensor:
    """Mean over ordered pairs of KL: (N,).

    Σ_{b ≠ b′} Σ_c p_b (log p_b − log p_b′) = B Σ_b Σ_c (p_b − p̄)(log p_b − mean log p): no sum over pairs, and
    replicates that are almost the same lose few digits.
    """
    B, _, C = p.shape
    found = []
    for part in torch.split(p, max(1, MAX_CHUNK_ELEMENTS // (B * C)), dim=1):
        log = part.clamp_min(torch.finfo(p.dtype).tiny).double().log()
        exact = part.double()
        found.append(((log - log.mean(0)) * (exact - exact.mean(0))).sum((0, 2)).clamp_min(0) / (B - 1))
    return torch.cat(found)
