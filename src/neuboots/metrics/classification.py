"""How good are the probabilities p of C classes, given the true labels y?

Everywhere `probs` is (N, C, *), rows of probabilities along the class axis, and `labels` the whole
numbers (N, *) in 0 … C − 1; pixels count as inputs of their own. Sums run in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


def error(probs: Tensor, labels: Tensor) -> Tensor:
    """mean of 1[argmax p ≠ y], a tie going to the first class.

    >>> error(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
    tensor(0.5000, dtype=torch.float64)
    """
    probs, labels = _rows(probs, labels)
    return (probs.argmax(1) != labels).double().mean()


def nll(probs: Tensor, labels: Tensor) -> Tensor:
    """mean of −log p_y, in nats; p is the predictive (mean) probability.

    A probability below the smallest normal number of its dtype (`torch.finfo(dtype).tiny`, zero
    included) counts as that number, so a certain mistake costs 87.3 nats in float32, not infinity.

    >>> nll(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    tensor(0.6931, dtype=torch.float64)
    """
    probs, labels = _rows(probs, labels)
    of_truth = probs.gather(1, labels[:, None])  # (N, 1)
    return -of_truth.clamp_min(torch.finfo(probs.dtype).tiny).double().log().mean()


def brier(probs: Tensor, labels: Tensor) -> Tensor:
    """mean of Σ_c (p_c − 1[y = c])², summed over classes: 0 is perfect and 2 the worst.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    tensor(0.5000, dtype=torch.float64)
    """
    probs, labels = _rows(probs, labels)
    truth = functional.one_hot(labels, probs.shape[1])  # (N, C)
    return (probs.double() - truth).square().sum(1).mean()


@dataclass(frozen=True, eq=False)
class ReliabilityCurve:
    """Mean confidence, accuracy and number of inputs in each bin; an empty bin has NaN means."""

    confidence: Tensor  # (num_bins,)
    accuracy: Tensor  # (num_bins,)
    count: Tensor  # (num_bins,)


def reliability_curve(probs: Tensor, labels: Tensor, *, num_bins: int = 15) -> ReliabilityCurve:
    """Means of max p and of 1[argmax p = y] over the inputs with max p in ((k − 1)/K, k/K].

    >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [1.0, 0.0]])
    >>> curve = reliability_curve(probs, torch.tensor([0, 0, 0]), num_bins=2)
    >>> curve.count, curve.accuracy
    (tensor([0, 3]), tensor([   nan, 0.6667], dtype=torch.float64))
    """
    if num_bins < 1:
        raise ValueError(f"num_bins is {num_bins}; expected at least 1: pass such a number")
    probs, labels = _rows(probs, labels)
    confidence, guess = probs.max(1)  # (N,), (N,)
    # The inner edges k/K, rounded as the probabilities are: 0.6 in float32 lies on 3/5, not above.
    edges = (torch.arange(1, num_bins, device=probs.device).double() / num_bins).to(probs.dtype)
    bins = torch.bucketize(confidence, edges)  # (N,)
    zeros = torch.zeros(num_bins, dtype=torch.float64, device=probs.device)
    count = torch.bincount(bins, minlength=num_bins)
    return ReliabilityCurve(
        confidence=zeros.index_add(0, bins, confidence.double()) / count,
        accuracy=zeros.index_add(0, bins, (guess == labels).double()) / count,
        count=count,
    )


def ece(probs: Tensor, labels: Tensor, *, num_bins: int = 15) -> Tensor:
    """Σ_k (n_k / n) |accuracy_k − confidence_k|, over the bins of `reliability_curve` not empty.

    >>> ece(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 1]))
    tensor(0.2000, dtype=torch.float64)
    """
    curve = reliability_curve(probs, labels, num_bins=num_bins)
    gap = (curve.accuracy - curve.confidence).abs()  # (num_bins,)
    return (curve.count * gap)[curve.count > 0].sum() / curve.count.sum()


def _rows(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Check (N, C, *) and (N, *), and flatten them to rows (N, C) and (N,)."""
    if probs.dim() < 2 or labels.shape != (probs.shape[0], *probs.shape[2:]):
        raise ValueError(
            f"probs has shape {tuple(probs.shape)} and labels {tuple(labels.shape)}; "
            "expected (N, C, *) and (N, *): reshape one of them"
        )
    if not probs.is_floating_point() or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"probs is {probs.dtype} and labels {labels.dtype}; expected floats and integers: "
            "convert them with .float() and .long()"
        )
    if probs.numel() == 0:
        raise ValueError(
            f"probs has shape {tuple(probs.shape)}, which is empty; expected at least one input "
            "and one class: check the data set"
        )
    classes = probs.shape[1]
    rows = probs.movedim(1, -1).reshape(-1, classes)  # (N, C)
    truth = labels.reshape(-1).to(rows.device).long()  # (N,)
    if rows.isnan().any():
        raise ValueError(
            f"probs has NaN in {int(rows.isnan().any(1).sum())} of {len(rows)} rows; "
            "expected numbers: check the net's outputs"
        )
    # Rounding each entry moves a row's sum by less than eps; float64 rows may come from float32.
    miss = (rows.double().sum(1) - 1).abs().max()
    if rows.min() < 0 or miss > max(1e-3, torch.finfo(rows.dtype).eps):
        raise ValueError(
            f"probs has a smallest entry of {rows.min():.3g} and a row whose sum misses 1 by "
            f"{miss:.3g}; expected probabilities: pass logits through softmax(1) first"
        )
    if truth.min() < 0 or truth.max() >= classes:
        raise ValueError(
            f"labels run from {truth.min()} to {truth.max()}; expected 0 to {classes - 1} for "
            f"{classes} classes: renumber the labels, or drop the inputs without one"
        )
    return rows, truth
