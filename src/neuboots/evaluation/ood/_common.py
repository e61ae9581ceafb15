"""Shared parts of the detectors: the selection of candidates on validation data, and gradients in the inputs."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuboots._prng import derive_seed
from neuboots._pytree import float_tensors, map_float_tensors
from neuboots._validation import ArgumentError
from neuboots.evaluation._batching import hash_rows
from neuboots.metrics import DetectionMetrics


def to_double(tensor: Tensor) -> Tensor:
    """Convert to double precision, on the CPU if the device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def hash_batch(x: Any) -> Tensor:
    """Hash of each row of a batch of inputs: (N,)."""
    return torch.frombuffer(bytearray(b"".join(hash_rows(x))), dtype=torch.int64)


# -- selection on validation data ----------------------------------------------------------------------


def select_best_candidate(id_scores: Tensor, ood_scores: Tensor) -> int:
    """Candidate of G with the largest TNR at 95 % TPR, in distribution positive, as in Lee et al. 2018; then by AUROC.

    Scores are (G, n) and (G, m); the first of equal candidates wins.
    """
    metrics = [DetectionMetrics.from_batch(a, b, positive="in") for a, b in zip(id_scores, ood_scores, strict=True)]
    return max(range(len(metrics)), key=lambda g: (float(metrics[g].tnr_at_tpr), float(metrics[g].auroc), -g))


@dataclass(frozen=True, eq=False)
class LogisticRule:
    """Log-odds of being out of distribution: w · (t − center) / scale + intercept, of K statistics t.

    Attributes:
        weights: w: (K,).
        intercept: Intercept.
        center: Means of the statistics: (K,).
        scale: Standard deviations of the statistics: (K,).
    """

    weights: Tensor
    intercept: float
    center: Tensor
    scale: Tensor

    @classmethod
    def fit(cls, id_statistics: Tensor, ood_statistics: Tensor) -> "LogisticRule":
        """Fit a logistic regression on standardized statistics, with scikit-learn's ridge penalty.

        Args:
            id_statistics: Statistics of inputs in distribution: (n, K).
            ood_statistics: Statistics of inputs out of distribution: (m, K).

        Returns:
            The fitted rule.

        Raises:
            ArgumentError: If a statistic is NaN or infinite.

        Example:
            >>> rule = LogisticRule.fit(torch.tensor([[0.0], [1.0]]), torch.tensor([[4.0], [5.0]]))
            >>> rule(torch.tensor([[1.0], [4.0]])) > 0
            tensor([False,  True])
        """
        from sklearn.linear_model import LogisticRegression

        both = to_double(torch.cat([id_statistics, ood_statistics])).cpu()
        if not bool(both.isfinite().all()):
            raise ArgumentError("data", f"{int((~both.isfinite()).sum())} NaN or infinite statistics", "finite outputs")
        center, scale = both.mean(0), both.std(0, correction=0)
        scale = scale.where(scale > 1e-12 * both.abs().amax(0), 1.0)  # a constant statistic
        is_ood = torch.arange(len(both)) >= len(id_statistics)
        model = LogisticRegression(max_iter=1000).fit(((both - center) / scale).numpy(), is_ood.numpy())
        return cls(torch.from_numpy(model.coef_[0]), float(model.intercept_[0]), center, scale)

    def __call__(self, statistics: Tensor) -> Tensor:
        """Return the log-odds that each input is out of distribution: (N, K) → (N,)."""
        weights, center, scale = (part.to(statistics.device) for part in (self.weights, self.center, self.scale))
        return ((to_double(statistics) - center) / scale) @ weights + self.intercept


def select_logistic_rule(id_statistics: Tensor, ood_statistics: Tensor, *, seed: int) -> tuple[int, LogisticRule]:
    """Best of G candidates and its rule, from statistics (G, n, K) and (G, m, K).

    Each candidate's rule is fitted on one half and judged on the other; the best one's is then fitted on both.
    """
    best = 0
    if len(id_statistics) > 1:
        if min(id_statistics.shape[1], ood_statistics.shape[1]) < 2:
            raise ArgumentError("id_data", "one row", "at least 2 validation rows of each kind, to select ε")
        halves = []
        for part in (id_statistics, ood_statistics):
            rng = torch.Generator().manual_seed(derive_seed(seed, "halves"))
            order = torch.randperm(part.shape[1], generator=rng)
            halves.append((part[:, order[: len(order) // 2]], part[:, order[len(order) // 2 :]]))
        judged = []
        for g in range(len(id_statistics)):
            rule = LogisticRule.fit(halves[0][0][g], halves[1][0][g])
            judged.append([rule(half[1][g]) for half in halves])
        best = select_best_candidate(torch.stack([a for a, _ in judged]), torch.stack([b for _, b in judged]))
    return best, LogisticRule.fit(id_statistics[best], ood_statistics[best])


# -- gradients in the inputs ---------------------------------------------------------------------------


def make_leaves(x: Any) -> list[Tensor]:
    """Copy the floating-point inputs as leaves that require gradients."""
    leaves = [part.detach().clone().requires_grad_() for part in float_tensors(x)]
    if not leaves:
        raise ArgumentError("x", "integer inputs", "floating-point inputs", hint="use ε = 0 or another detector")
    return leaves


def replace_float_tensors(x: Any, others: list[Tensor]) -> Any:
    """Return the inputs with other tensors in place of the floating-point ones."""
    rest = iter(others)
    return map_float_tensors(lambda part: next(rest), x)


def input_gradients(objectives: list[Tensor], leaves: list[Tensor]) -> list[list[Tensor]]:
    """Gradient of each objective in each leaf, zero if it does not depend on it; the graph is retained."""
    found: list[tuple[Tensor | None, ...]] = []
    for objective in objectives:
        gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if objective.requires_grad:
            gradients = torch.autograd.grad(objective, leaves, retain_graph=True, allow_unused=True)
        found.append(gradients)
    if all(gradient is None for gradients in found for gradient in gradients):
        raise ArgumentError("predictor", "no gradient in the inputs", "a differentiable predictor", hint="use ε = 0")
    return [
        [torch.zeros_like(leaf) if slope is None else slope for slope, leaf in zip(gradients, leaves, strict=True)]
        for gradients in found
    ]


def perturb(x: Any, directions: list[Tensor], epsilon: float) -> Any:
    """Return x + ε · direction, for the floating-point inputs."""
    rest = iter(directions)
    return map_float_tensors(lambda part: part + epsilon * next(rest).to(part), x)
