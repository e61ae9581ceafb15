"""Losses with one value per example, and their weighted mean (paper, eqs. 2.3 and 2.6).

    L(f, w, D) = 1/n Σᵢ wᵢ ℓ(f(Xᵢ), yᵢ)

A loss is one of torch's, with any reduction, or a callable (outputs, targets) → (N, *) that does not reduce.
If it has an `ignore_index`, targets with that label do not contribute.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuboots._validation import ArgumentError, check_fraction

Loss = Callable[[Tensor, Tensor], Tensor]
_SUM_TOLERANCE = 1e-2  # of class probabilities, possibly in half precision
_REGRESSION_HINT = "for regression use loss=nn.MSELoss()"


def weighted_mean(losses: Tensor, weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of wᵢ ℓᵢ over all elements, divided by their number and not by the sum of the weights.

    Args:
        losses: One value per example or pixel, (N, *).
        weights: Weights of the examples, (N,).
        mask: Elements that count, (N, *); None: all.

    Returns:
        The mean, a scalar; 0 if no element counts.

    Raises:
        ArgumentError: If there is not one loss per example.

    Example:
        >>> float(weighted_mean(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 0.0])))
        1.0
    """
    check_per_example(losses, len(weights))
    weighted = losses * weights.to(losses).view(-1, *[1] * (losses.ndim - 1))
    if mask is None:
        return weighted.mean()
    return torch.where(mask, weighted, 0.0).sum() / mask.sum().clamp_min(1)


def check_per_example(losses: Tensor, count: int) -> None:
    """Raise ArgumentError unless there is one loss for each of `count` examples.

    Args:
        losses: Result of a loss.
        count: Number of examples.
    """
    if losses.ndim == 0 or len(losses) != count:
        raise ArgumentError(
            "loss", tuple(losses.shape), f"one value per example, ({count}, *)", hint="do not reduce the losses"
        )


def valid_mask(loss: Loss, targets: Tensor) -> Tensor | None:
    """Return where the targets differ from the loss's `ignore_index`; None if they all do, or if it has none.

    Args:
        loss: A loss.
        targets: Targets, (N, *).

    Returns:
        The mask, in the shape of the targets, or None.
    """
    ignore_index = getattr(loss, "ignore_index", None)
    if ignore_index is None or targets.is_floating_point():
        return None
    mask = targets.long() != ignore_index  # in uint8, label 156 and −100 are the same byte
    return None if bool(mask.all()) else mask


_INDEPENDENT = nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss, nn.SoftMarginLoss


def has_independent_outputs(loss: Loss) -> bool:
    """Return whether each output is the logit of a label of its own, not of one of several exclusive classes.

    That is so for the binary cross-entropy and the soft margin losses of torch, with targets 0 and 1 or probabilities;
    another loss says so by an attribute `independent`.

    Args:
        loss: A loss.

    Returns:
        Whether probabilities are sigmoids; if not, they are a softmax.

    Example:
        >>> has_independent_outputs(nn.BCEWithLogitsLoss()), has_independent_outputs(nn.CrossEntropyLoss())
        (True, False)
    """
    return bool(getattr(loss, "independent", isinstance(loss, _INDEPENDENT)))


# -- torch's losses ------------------------------------------------------------------------------------


class _PerExample(nn.Module):
    """A torch loss that does not reduce and checks shapes; equal to another one with the same options."""

    def extra_repr(self) -> str:
        options = {**vars(self), **self._buffers}
        hidden = ("training", "reduction")
        return ", ".join(f"{k}={v}" for k, v in options.items() if k not in hidden and not k.startswith("_"))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


class _SameShape(_PerExample):
    """A loss of outputs and targets of one shape."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        losses: Tensor = super().forward(input, _match_shape(input, target))
        return losses


class CheckedMSELoss(_SameShape, nn.MSELoss):
    """`nn.MSELoss` with one value per output."""


class CheckedL1Loss(_SameShape, nn.L1Loss):
    """`nn.L1Loss` with one value per output."""


class CheckedSmoothL1Loss(_SameShape, nn.SmoothL1Loss):
    """`nn.SmoothL1Loss` with one value per output."""


class CheckedHuberLoss(_SameShape, nn.HuberLoss):
    """`nn.HuberLoss` with one value per output."""


class CheckedPoissonNLLLoss(_SameShape, nn.PoissonNLLLoss):
    """`nn.PoissonNLLLoss` with one value per output."""


class CheckedSoftMarginLoss(_SameShape, nn.SoftMarginLoss):
    """`nn.SoftMarginLoss` with one value per output."""


class CheckedBCEWithLogitsLoss(_SameShape, nn.BCEWithLogitsLoss):
    """`nn.BCEWithLogitsLoss` with one value per output."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the losses; raise ArgumentError if a target lies outside [0, 1]."""
        if bool(((target < 0) | (target > 1)).any()):
            raise ArgumentError("targets", [float(target.min()), float(target.max())], "numbers in [0, 1]")
        return super().forward(input, target)


class CheckedCrossEntropyLoss(_PerExample, nn.CrossEntropyLoss):
    """`nn.CrossEntropyLoss` with one value per example or pixel."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the losses of labels (N, *), or of class probabilities in the shape of the outputs."""
        if not target.is_floating_point() or target.shape != input.shape or input.ndim < 2 or input.shape[1] == 1:
            target = _check_labels(input, target, self.ignore_index)
        elif bool((target < 0).any() | ((target.sum(1) - 1).abs() > _SUM_TOLERANCE).any()):
            expected = "integer labels (N, *), or class probabilities that are nonnegative and sum to 1"
            raise ArgumentError("targets", f"{target.dtype} numbers", expected, hint=_REGRESSION_HINT)
        return F.cross_entropy(
            input,
            target,
            weight=None if self.weight is None else self.weight.to(input),
            ignore_index=self.ignore_index,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )


_CHECKED: dict[type[nn.Module], type[_PerExample]] = {
    nn.MSELoss: CheckedMSELoss,
    nn.L1Loss: CheckedL1Loss,
    nn.SmoothL1Loss: CheckedSmoothL1Loss,
    nn.HuberLoss: CheckedHuberLoss,
    nn.PoissonNLLLoss: CheckedPoissonNLLLoss,
    nn.SoftMarginLoss: CheckedSoftMarginLoss,
    nn.BCEWithLogitsLoss: CheckedBCEWithLogitsLoss,
    nn.CrossEntropyLoss: CheckedCrossEntropyLoss,
}


def as_loss(loss: Loss) -> Loss:
    """Return a loss with one value per example.

    Torch's own losses are copied with `reduction="none"` and keep their options (`weight`, `ignore_index`,
    `label_smoothing`, …); the common ones also reject shapes that would be broadcast. Another callable is returned as
    it is.

    Args:
        loss: Torch loss, or a function of (outputs, targets).

    Returns:
        A function of outputs (N, C, *) and targets that returns (N, *).

    Raises:
        ArgumentError: If the loss cannot be called, or is a class.

    Example:
        >>> as_loss(nn.CrossEntropyLoss())(torch.zeros(2, 2), torch.tensor([1, 0])).round(decimals=4)
        tensor([0.6931, 0.6931])
    """
    if isinstance(loss, type) or not callable(loss):
        raise ArgumentError("loss", loss, "a loss such as nn.CrossEntropyLoss(), or a function of (outputs, targets)")
    if (isinstance(loss, nn.Module) and getattr(loss, "reduction", "none") != "none") or type(loss) in _CHECKED:
        unreduced: Any = copy.copy(loss)
        unreduced.__class__ = _CHECKED.get(type(loss), type(loss))  # type: ignore[arg-type]
        unreduced.reduction = "none"
        return unreduced  # type: ignore[no-any-return]
    return loss


def _check_labels(outputs: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Return labels (N, *) for outputs (N, C, *) as int64; raise ArgumentError if they do not fit."""
    if targets.is_floating_point():
        hint = f"use labels.long(); {_REGRESSION_HINT}"
        raise ArgumentError("targets", targets.dtype, "integer labels 0 … C − 1", hint=hint)
    if outputs.ndim < 2 or targets.shape != (outputs.shape[0], *outputs.shape[2:]):
        expected = f"labels (N, *) for outputs (N, C, *), here {tuple(outputs.shape)}"
        raise ArgumentError("targets", tuple(targets.shape), expected)
    targets, classes = targets.long(), outputs.shape[1]
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= classes))
    if bool(wrong.any()):
        expected = f"labels 0 … {classes - 1}, since the net has {classes} outputs, or ignore_index={ignore_index}"
        raise ArgumentError("targets", int(targets[wrong][0]), expected)
    return targets


def _match_shape(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the targets in the outputs' shape; only axes of length 1 may be added or removed."""
    got, expected = ([d for d in shape[1:] if d != 1] for shape in (targets.shape, outputs.shape))
    if targets.shape[:1] != outputs.shape[:1] or got != expected:
        hint = "broadcasting would silently give a wrong loss"
        if outputs.ndim > 2:
            hint = "the layout is (N, C, *); outputs (N, T, C) of a Linear head are moved to (N, C, T)"
        raise ArgumentError("targets", tuple(targets.shape), f"the outputs' shape {tuple(outputs.shape)}", hint=hint)
    return targets.reshape(outputs.shape).to(outputs)


# -- further losses ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BrierLoss:
    """Brier score, ℓ = Σ_c (softmax(z)_c − 1[y = c])², for outputs (N, C, *) and labels (N, *).

    Args:
        ignore_index: Label of elements that do not count.

    Example:
        >>> BrierLoss()(torch.zeros(1, 2), torch.tensor([1]))
        tensor([0.5000])
    """

    ignore_index: int = -100

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses, (N, *)."""
        labels = _check_labels(outputs, targets, self.ignore_index)
        valid = labels != self.ignore_index
        probs = outputs.softmax(1)
        label_probs = probs.gather(1, labels.where(valid, 0)[:, None])[:, 0]
        return (probs.square().sum(1) - 2 * label_probs + 1).where(valid, 0.0)  # (N, *)


@dataclass(frozen=True)
class GaussianNLL:
    """Gaussian likelihood ℓ = ½ σ^(2β) (log σ² + (y − μ)²/σ²) of outputs (N, 2k, *): k means, then k values of log σ².

    β = 0 is the likelihood. β = ½ gives examples of large σ² more weight, and means are learned as well as by the
    squared error (β = 1). The factor σ^(2β) has no gradient; it is not applied where no gradient is computed, so that
    validation uses the likelihood. Seitzer, Tavakoli, Antic and Martius, On the pitfalls of heteroscedastic
    uncertainty estimation with probabilistic neural networks, ICLR 2022.

    Args:
        beta: β, from 0 to 1.

    Raises:
        ArgumentError: If β lies outside [0, 1].

    Example:
        >>> GaussianNLL()(torch.zeros(1, 2), torch.ones(1))
        tensor([[0.5000]])
    """

    beta: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("beta", self.beta, zero=True, one=True)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses, (N, k, *)."""
        if outputs.ndim < 2 or outputs.shape[1] % 2:
            raise ArgumentError("outputs", tuple(outputs.shape), "(N, 2k, *): k means, then k values of log σ²")
        mean, log_variance = outputs.chunk(2, dim=1)
        log_variance = log_variance.clamp_min(-12.0)  # or one confident error outweighs the batch
        residual = _match_shape(mean, targets) - mean
        losses = 0.5 * (log_variance + residual.square() * (-log_variance).exp())
        return losses * (self.beta * log_variance.detach()).exp() if self.beta and torch.is_grad_enabled() else losses


# -- saving --------------------------------------------------------------------------------------------

_SAVED = (BrierLoss, GaussianNLL, CheckedMSELoss, CheckedBCEWithLogitsLoss, CheckedCrossEntropyLoss)


def describe_loss(loss: Loss) -> dict[str, Any]:
    """Return the loss as JSON; raise ArgumentError if it cannot be rebuilt from that.

    Args:
        loss: A loss.

    Returns:
        Its name and options.

    Example:
        >>> describe_loss(nn.CrossEntropyLoss(ignore_index=255))
        {'name': 'CrossEntropyLoss', 'ignore_index': 255, 'label_smoothing': 0.0}
    """
    loss = as_loss(loss)
    name = type(loss).__name__.removeprefix("Checked")
    weighted = any(getattr(loss, key, None) is not None for key in ("weight", "pos_weight"))
    if type(loss) not in _SAVED or weighted:
        raise ArgumentError("loss", loss, "CrossEntropyLoss, BCEWithLogitsLoss, MSELoss, GaussianNLL or BrierLoss")
    if isinstance(loss, BrierLoss | GaussianNLL):
        return {"name": name, **asdict(loss)}
    options = {key: getattr(loss, key) for key in ("ignore_index", "label_smoothing") if hasattr(loss, key)}
    return {"name": name, **options}


def build_loss(description: dict[str, Any]) -> Loss:
    """Return the loss that `describe_loss` described.

    Args:
        description: What the corresponding `describe` function returned.

    Returns:
        The loss.
    """
    options = dict(description)
    name = options.pop("name")
    if name not in {kind.__name__.removeprefix("Checked") for kind in _SAVED}:
        raise ArgumentError("name", name, "the name of a loss")
    own: dict[str, Callable[..., Loss]] = {"BrierLoss": BrierLoss, "GaussianNLL": GaussianNLL}
    return as_loss(own[name](**options) if name in own else getattr(nn, name)(**options))
