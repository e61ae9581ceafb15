"""What metrics ask of their arguments: shapes, kinds and ranges, each refusal one sentence."""

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

_HALF_STEP = 2.0**-25  # half the spacing of the smallest numbers in half precision


def rows(probs: Tensor, labels: Tensor, *, void: int | None = None) -> tuple[Tensor, Tensor]:
    """Check (N, C, *) and (N, *), and flatten them to rows (N, C) and (N,), without those labelled `void`."""
    flat, truth = _flattened("probs", probs, labels)
    classes = probs.shape[1]
    if void is not None:
        at_least("void", void, None)
        if bool((truth == void).any()):
            flat, truth = flat[truth != void], truth[truth != void]
    if len(truth) == 0:  # a part of the data may be empty or all void; its figure is refused
        return flat, truth
    if flat.isnan().any():
        raise ValueError(
            f"probs has NaN in {int(flat.isnan().any(1).sum())} of {len(flat)} rows; "
            "expected numbers: check the net's outputs"
        )
    # Rounding moves an entry by half of eps of itself, a row's sum by half of eps, and each of the smallest entries by
    # half the spacing there. Rows of a wide dtype may come from half precision, so its own figures hold for all.
    miss = (flat.sum(1, dtype=torch.float64) - 1).abs().max()
    if flat.min() < 0 or miss > max(1e-3, torch.finfo(flat.dtype).eps) + classes * _HALF_STEP:
        raise ValueError(
            f"probs has a smallest entry of {flat.min():.3g} and a row whose sum misses 1 by "
            f"{miss:.3g}; expected probabilities: pass logits through softmax(1) first"
        )
    in_range("labels", truth, classes)
    return flat, truth


def logit_rows(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Check logits (N, C, *) of at least two classes and labels (N, *), and flatten them to (N, C) and (N,)."""
    flat, truth = _flattened("logits", logits, labels)
    if logits.shape[1] == 1:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)}; expected at least two classes: a single logit z of the "
            "second of two classes is torch.cat([0 * z, z], 1)"
        )
    if not flat.isfinite().all():
        raise ValueError(
            f"logits has {int((~flat.isfinite()).sum())} NaN or infinite value(s) among {flat.numel()}; "
            "expected numbers: check the net's outputs"
        )
    in_range("labels", truth, logits.shape[1])
    return flat, truth


def _flattened(name: str, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    tensors(**{name: values, "labels": labels})
    if values.dim() < 2 or labels.shape != (values.shape[0], *values.shape[2:]):
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} and labels {tuple(labels.shape)}; "
            "expected (N, C, *) and (N, *): reshape one of them"
        )
    if not values.is_floating_point() or not _whole(labels):
        raise ValueError(
            f"{name} is {values.dtype} and labels {labels.dtype}; expected floats and integers: "
            "convert them with .float() and .long()"
        )
    if values.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(values.shape)}, of no class; expected at least one: check the net")
    flat = values.detach().movedim(1, -1).reshape(-1, values.shape[1])  # (N, C)
    return flat, labels.reshape(-1).to(flat.device).long()


def in_range(name: str, found: Tensor, classes: int) -> None:
    """Refuse what is no class 0 … C − 1."""
    if found.numel() and (found.min() < 0 or found.max() >= classes):
        raise ValueError(
            f"{name} run from {found.min()} to {found.max()}; expected 0 to {classes - 1} for "
            f"{classes} classes: renumber the labels, or drop the inputs without one"
        )


def _whole(values: Tensor) -> bool:
    return not values.is_floating_point() and not values.is_complex() and values.dtype != torch.bool


def whole_numbers(**values: Tensor) -> None:
    """Refuse what is not integers of one shape."""
    tensors(**values)
    one_shape(**values)
    for name, value in values.items():
        if not _whole(value):
            raise ValueError(f"got {name} of {value.dtype}; expected integers: convert it with .long()")


def tensors(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"got {name} of type {type(value).__name__}; expected a tensor: torch.as_tensor(x) makes one"
            )


def one_shape(**values: Tensor) -> None:
    if len({value.shape for value in values.values()}) > 1:
        got = " and ".join(f"{name} {tuple(value.shape)}" for name, value in values.items())
        raise ValueError(f"got shapes {got}; expected one shape: reshape them, since (N,) and (N, 1) do not pair up")


def at_least(name: str, number: Any, least: int | None) -> None:
    """Refuse what is no whole number, or below the least."""
    if isinstance(number, bool) or not isinstance(number, Integral) or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} is {number!r}; expected a whole number{bound}: pass such a number")


def between(name: str, number: Any) -> None:
    """Refuse what is not strictly inside (0, 1)."""
    if isinstance(number, bool) or not isinstance(number, Real) or not 0.0 < float(number) < 1.0:
        raise ValueError(f"{name} is {number!r}; expected a number between 0 and 1: pass such as 0.95")


def numbers(*, infinite: bool = False, **values: Tensor) -> list[Tensor]:
    """Values of one shape, flattened, on one device and in float64: (N,) each; finite unless said otherwise.

    There may be none: a part of the data may be empty.
    """
    tensors(**values)
    one_shape(**values)
    device = next(iter(values.values())).device
    for name, value in values.items():
        if value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"got {name} of {value.dtype}; expected real numbers: convert it with .float()")
        bad = int((value.isnan() if infinite else ~value.isfinite()).sum())
        if bad:
            kind = "NaN" if infinite else "NaN or infinite"
            raise ValueError(
                f"got {bad} {kind} value(s) among {value.numel()} of {name}; expected numbers: check the net's "
                "outputs and the data"
            )
    return [value.detach().to(device).double().flatten() for value in values.values()]


def non_negative(name: str, values: Tensor) -> None:
    if values.numel() and values.min() < 0:
        raise ValueError(f"{name} has a smallest entry of {values.min():.3g}; expected standard deviations ≥ 0")
