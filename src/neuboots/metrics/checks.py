"""What metrics ask of their arguments: shapes, kinds and ranges, each refusal one sentence."""

import torch
from torch import Tensor


def rows(probs: Tensor, labels: Tensor, *, void: int | None = None) -> tuple[Tensor, Tensor]:
    """Check (N, C, *) and (N, *), and flatten them to rows (N, C) and (N,), without those labelled `void`."""
    flat, truth = _flattened("probs", probs, labels)
    classes = probs.shape[1]
    if void is not None and bool((truth == void).any()):
        flat, truth = flat[truth != void], truth[truth != void]
        if len(truth) == 0:  # a part of the data may be all void
            return flat, truth
    if flat.isnan().any():
        raise ValueError(
            f"probs has NaN in {int(flat.isnan().any(1).sum())} of {len(flat)} rows; "
            "expected numbers: check the net's outputs"
        )
    # Rounding each entry moves a row's sum by less than eps; float64 rows may come from float32.
    miss = (flat.sum(1, dtype=torch.float64) - 1).abs().max()
    if flat.min() < 0 or miss > max(1e-3, torch.finfo(flat.dtype).eps):
        raise ValueError(
            f"probs has a smallest entry of {flat.min():.3g} and a row whose sum misses 1 by "
            f"{miss:.3g}; expected probabilities: pass logits through softmax(1) first"
        )
    _in_range(truth, classes)
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
    _in_range(truth, logits.shape[1])
    return flat, truth


def _flattened(name: str, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if values.dim() < 2 or labels.shape != (values.shape[0], *values.shape[2:]):
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} and labels {tuple(labels.shape)}; "
            "expected (N, C, *) and (N, *): reshape one of them"
        )
    if not values.is_floating_point() or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"{name} is {values.dtype} and labels {labels.dtype}; expected floats and integers: "
            "convert them with .float() and .long()"
        )
    if values.numel() == 0:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, which is empty; expected at least one input "
            "and one class: check the data set"
        )
    flat = values.detach().movedim(1, -1).reshape(-1, values.shape[1])  # (N, C)
    return flat, labels.reshape(-1).to(flat.device).long()


def _in_range(truth: Tensor, classes: int) -> None:
    if truth.min() < 0 or truth.max() >= classes:
        raise ValueError(
            f"labels run from {truth.min()} to {truth.max()}; expected 0 to {classes - 1} for "
            f"{classes} classes: renumber the labels, or drop the inputs without one"
        )


def at_least(name: str, number: int, least: int) -> None:
    if number < least:
        raise ValueError(f"{name} is {number}; expected at least {least}: pass such a number")


def between(name: str, number: float) -> None:
    """Refuse what is not strictly inside (0, 1)."""
    if not 0.0 < number < 1.0:
        raise ValueError(f"{name} is {number}; expected a number between 0 and 1: pass such as 0.95")


def numbers(*, infinite: bool = False, **values: Tensor) -> list[Tensor]:
    """Values of one shape, flattened, on one device and in float64: (N,) each; finite unless said otherwise."""
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    if len(set(shapes.values())) > 1:
        got = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"got shapes {got}; expected one shape: reshape them, since (N,) and (N, 1) do not pair up")
    device = next(iter(values.values())).device
    for name, value in values.items():
        if value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"got {name} of {value.dtype}; expected real numbers: convert it with .float()")
        if value.numel() == 0:
            raise ValueError(f"got {name} of shape {tuple(value.shape)}, which is empty; expected at least one input")
        bad = int((value.isnan() if infinite else ~value.isfinite()).sum())
        if bad:
            kind = "NaN" if infinite else "NaN or infinite"
            raise ValueError(
                f"got {bad} {kind} value(s) among {value.numel()} of {name}; expected numbers: check the net's "
                "outputs and the data"
            )
    return [value.detach().to(device).double().flatten() for value in values.values()]


def non_negative(name: str, values: Tensor) -> None:
    if values.min() < 0:
        raise ValueError(f"{name} has a smallest entry of {values.min():.3g}; expected standard deviations ≥ 0")
