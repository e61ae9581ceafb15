"""Losses, one value for each point, and their weighted mean (paper, eqs. 2.3 and 2.6).

    L(f, w, D) = 1/n Σᵢ wᵢ ℓ(f(Xᵢ), yᵢ)

A loss is any callable (outputs, targets) → (N, *) that does not reduce, torch's own with `reduction="none"`
among them. If it has an `ignore_index`, points with that label count for nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def weighted_mean(losses: Tensor, weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of wᵢ ℓᵢ: losses (N, *), weights (N,), over the elements where the mask is true.

    >>> float(weighted_mean(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 0.0])))
    1.0
    """
    if losses.ndim == 0 or len(losses) != len(weights):
        got = "a single number" if losses.ndim == 0 else f"{len(losses)} losses"
        raise ValueError(
            f'got {got} for {len(weights)} weights; expected one loss for each point: use a loss with reduction="none"'
        )
    weighted = losses * weights.to(losses).view(-1, *[1] * (losses.ndim - 1))
    if mask is None:
        return weighted.mean()
    return torch.where(mask, weighted, 0.0).sum() / mask.sum().clamp_min(1)


def check_loss(loss: Loss) -> None:
    if isinstance(loss, type) or not callable(loss):
        raise ValueError(f"got loss={loss!r}; expected a function of (outputs, targets), such as CrossEntropy()")


def valid_mask(loss: Loss, targets: Tensor) -> Tensor | None:
    """Where the targets count, for a loss with an ignore_index; None where all do."""
    ignore_index = getattr(loss, "ignore_index", None)
    if ignore_index is None or targets.is_floating_point():
        return None
    mask = targets.long() != ignore_index  # in uint8, label 156 and −100 are the same byte
    return None if bool(mask.all()) else mask


def _check_labels(outputs: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Labels (N, *) that fit outputs (N, C, *), as whole numbers, or a sentence."""
    if outputs.ndim < 2 or targets.shape != (outputs.shape[0], *outputs.shape[2:]):
        raise ValueError(
            f"got outputs {tuple(outputs.shape)} and labels {tuple(targets.shape)}; expected (N, C, *) "
            "and (N, *), one class label for each output"
        )
    if targets.is_floating_point():
        raise ValueError("got floating-point labels; expected integers 0 … C − 1: use labels.long()")
    targets, classes = targets.long(), outputs.shape[1]
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= classes))
    if bool(wrong.any()):
        raise ValueError(
            f"got label {int(targets[wrong][0])} for a net with {classes} outputs; expected 0 … "
            f"{classes - 1} (or {ignore_index}, which is ignored)"
        )
    return targets


@dataclass(frozen=True)
class CrossEntropy:
    """ℓ = −log softmax(z)_y for outputs (N, C, *) and labels (N, *); `ignore_index` marks void pixels.

    >>> CrossEntropy()(torch.zeros(1, 2), torch.tensor([1])).round(decimals=4)
    tensor([0.6931])
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            outputs,
            _check_labels(outputs, targets, self.ignore_index),
            reduction="none",
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )


@dataclass(frozen=True)
class BrierLoss:
    """ℓ = Σ_c (softmax(z)_c − 1[y = c])² for outputs (N, C, *) and labels (N, *): a proper scoring rule.

    >>> BrierLoss()(torch.zeros(1, 2), torch.tensor([1]))
    tensor([0.5000])
    """

    ignore_index: int = -100

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        labels = _check_labels(outputs, targets, self.ignore_index)
        counted = labels != self.ignore_index
        probs = outputs.softmax(1)
        of_label = probs.gather(1, labels.where(counted, 0)[:, None])[:, 0]
        return (probs.square().sum(1) - 2 * of_label + 1).where(counted, 0.0)  # (N, *)


def _match_shape(outputs: Tensor, targets: Tensor) -> Tensor:
    """The targets in the outputs' shape; axes of length 1 may be missing, no other may differ."""
    got, expected = ([d for d in shape[1:] if d != 1] for shape in (targets.shape, outputs.shape))
    if targets.shape[:1] != outputs.shape[:1] or got != expected:
        raise ValueError(
            f"got targets {tuple(targets.shape)} for outputs {tuple(outputs.shape)}; expected the same shape: "
            "broadcasting one against the other would give a wrong loss without a word"
        )
    return targets.reshape(outputs.shape).to(outputs)


@dataclass(frozen=True)
class SquaredError:
    """ℓ = (z − y)² for outputs and targets of one shape ((N,) and (N, 1) are taken as one)."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - _match_shape(outputs, targets)).square()


@dataclass(frozen=True)
class GaussianNLL:
    """ℓ = ½ σ^(2β) (log σ² + (y − μ)²/σ²) for outputs (N, 2k, *) holding k means, then k values of log σ².

    β = 0 is the likelihood. With β = ½ points of large σ² count more than their likelihood has it, and means are
    learned as well as by the squared error, which β = 1 comes to; σ^(2β) is a weight without gradient, and is left out
    where none is computed, so that validation is by the likelihood. Seitzer, Tavakoli, Antic and Martius, On the
    pitfalls of heteroscedastic uncertainty estimation with probabilistic neural networks, ICLR 2022.
    """

    beta: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ValueError(f"got beta={self.beta}; expected a number from 0 to 1")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.ndim < 2 or outputs.shape[1] % 2:
            raise ValueError(
                f"got outputs {tuple(outputs.shape)}; expected (N, 2k, *): k means, then k values of log σ²"
            )
        mean, log_variance = outputs.chunk(2, dim=1)
        # a floor on σ² keeps one confident error from outweighing the batch
        log_variance = log_variance.clamp_min(-12.0)
        residual = _match_shape(mean, targets) - mean
        losses = 0.5 * (log_variance + residual.square() * (-log_variance).exp())
        return losses * (self.beta * log_variance.detach()).exp() if self.beta and torch.is_grad_enabled() else losses


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """ℓ = −y log σ(z) − (1 − y) log(1 − σ(z)) for logits and targets in [0, 1] of one shape."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets = _match_shape(outputs, targets)
        if bool(((targets < 0) | (targets > 1)).any()):
            raise ValueError("got targets outside [0, 1]; expected probabilities or 0/1 labels")
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
