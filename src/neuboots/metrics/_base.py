"""Metric states that add up over batches, and the checks of their inputs.

    T(a ∪ b) = T(a) + T(b),   metric(a ∪ b) = metric(T(a) + T(b))

Every metric of this package is a function of such a state, so that a data set need not fit in memory. Sums and counts
take memory that does not grow with the data; metrics of ranks (AUROC, AURC, adaptive ECE) store one score per input. A
batch may be empty; the metric of an empty data set is an error.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from neuboots._validation import ArgumentError, check_int

MAX_CHUNK_ELEMENTS = 1 << 20  # elements of intermediate results that are held at a time
_HALF_STEP = 2.0**-25  # half the spacing of the smallest float16 numbers


@dataclass(frozen=True, eq=False)
class MetricState:
    """Base class of states that add up over batches.

    Fields that are tensors or states are added, tuples of tensors are concatenated; any other field is an option and
    must be equal on both sides.

    Example:
        >>> @dataclass(frozen=True, eq=False)
        ... class MeanState(MetricState):
        ...     total: Tensor
        ...     count: Tensor
        >>> a, b = MeanState(torch.tensor(2.0), torch.tensor(1)), MeanState(torch.tensor(4.0), torch.tensor(2))
        >>> both = sum([a, b])  # as over the batches of a loader
        >>> both.total / both.count
        tensor(2.)
    """

    def __add__(self, other: Self) -> Self:
        if type(other) is not type(self):
            return NotImplemented
        return type(self)(*(_add_field(part.name, self, other) for part in fields(self)))

    def __radd__(self, other: int) -> Self:
        """Make `sum` work, which starts from 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented


def _add_field(name: str, a: MetricState, b: MetricState) -> Any:
    left, right = getattr(a, name), getattr(b, name)
    if isinstance(left, tuple | MetricState):
        return left + right
    if isinstance(left, Tensor):
        check_same_shape(**{f"{name} of the first state": left, f"{name} of the second state": right})
        return left + right.to(left.device)
    if left != right:
        raise ArgumentError(name, right, f"{left!r}, the option of the other state")
    return left


@dataclass(frozen=True, eq=False)
class RunningMean(MetricState):
    """1/N Σᵢ vᵢ of values vᵢ that come in batches, summed in float64.

    Example:
        >>> (RunningMean.from_batch(torch.tensor([1.0, 2.0])) + RunningMean.from_batch(torch.tensor([6.0]))).value
        tensor(3., dtype=torch.float64)
    """

    total: Tensor  # ()
    count: Tensor  # ()

    @classmethod
    def from_batch(cls, values: Tensor) -> Self:
        """Return the sum and the count of values of any shape, possibly none.

        Args:
            values: Real numbers or booleans.

        Raises:
            ArgumentError: If a value is NaN or complex.
        """
        if values.is_complex() or values.isnan().any():
            raise ArgumentError("values", f"NaN or {values.dtype}", "real numbers", hint="check the outputs of the net")
        return cls(values.detach().sum(dtype=torch.float64), torch.tensor(values.numel(), device=values.device))

    @property
    def value(self) -> Tensor:
        """The mean."""
        return self.total / check_nonempty(self.count)


def concat_values(parts: tuple[Tensor, ...]) -> Tensor:
    """Concatenate all stored values: (N,)."""
    return torch.cat([part.to(parts[0].device) for part in parts])


def check_nonempty(count: Tensor) -> Tensor:
    """Return `count`; raise ArgumentError if it is zero (a batch may be empty, the data set may not)."""
    if count == 0:
        raise ArgumentError("count", 0, "at least one input", hint="check that the data set is not empty")
    return count


def run_ends(sorted_values: Tensor) -> Tensor:
    """Return the number of values up to the end of each run of equal ones: (K,), the last is N.

    >>> run_ends(torch.tensor([0.9, 0.5, 0.5, 0.1]))
    tensor([1, 3, 4])
    """
    last = torch.ones(len(sorted_values), dtype=torch.bool, device=sorted_values.device)
    last[:-1] = sorted_values[1:] != sorted_values[:-1]  # a difference would not see that ∞ and ∞ tie
    return last.nonzero()[:, 0] + 1


# -- validation ----------------------------------------------------------------------------------------


def flatten_probs(probs: Tensor, labels: Tensor, *, ignore_index: int | None = None) -> tuple[Tensor, Tensor]:
    """Check (N, C, *) and (N, *), and flatten them to (N, C) and (N,) without the labels equal to `ignore_index`."""
    flat, y = flatten_outputs("probs", probs, labels)
    if ignore_index is not None and bool((y == check_int("ignore_index", ignore_index)).any()):
        flat, y = flat[y != ignore_index], y[y != ignore_index]
    if len(y) == 0:
        return flat, y
    if flat.isnan().any():
        raise ArgumentError("probs", "NaN", "probabilities", hint="check the outputs of the net")
    # Rounding moves an entry by half of eps of itself, a row's sum by half of eps, and each of the smallest entries by
    # half the spacing there. Rows of a wide dtype may come from half precision, so its tolerance holds for all.
    deviation = (flat.sum(1, dtype=torch.float64) - 1).abs().max()
    if flat.min() < 0 or deviation > max(1e-3, torch.finfo(flat.dtype).eps) + flat.shape[1] * _HALF_STEP:
        found = f"entries ≥ {flat.min():.3g} with sums up to {deviation:.3g} from 1"
        raise ArgumentError("probs", found, "probabilities", hint="pass logits through softmax(1) first")
    check_label_range("labels", y, flat.shape[1])
    return flat, y


def flatten_outputs(name: str, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Check outputs (N, C, *) and integer labels (N, *), and flatten them to (N, C) and (N,)."""
    if values.dim() < 2 or values.shape[1] == 0:
        raise ArgumentError(f"{name}.shape", tuple(values.shape), "(N, C, *) with at least one class")
    expected = (values.shape[0], *values.shape[2:])
    if labels.shape != expected:
        hint = f"reshape them, or {name} of shape {tuple(values.shape)}"
        raise ArgumentError("labels.shape", tuple(labels.shape), f"{expected}", hint=hint)
    if not values.is_floating_point():
        raise ArgumentError(f"{name}.dtype", values.dtype, "floating-point numbers", hint="use .float()")
    check_integers(labels=labels)
    flat = values.detach().movedim(1, -1).reshape(-1, values.shape[1])  # (N, C)
    return flat, labels.reshape(-1).to(flat.device).long()


def check_label_range(name: str, labels: Tensor, num_classes: int) -> None:
    """Check that labels are 0 … C − 1."""
    if labels.numel() and (labels.min() < 0 or labels.max() >= num_classes):
        found, expected = f"{labels.min()} to {labels.max()}", f"0 to {num_classes - 1} for {num_classes} classes"
        raise ArgumentError(name, found, expected, hint="renumber the labels, or drop the inputs without a label")


def check_integers(**values: Tensor) -> None:
    """Check that tensors are of one shape and of an integer dtype."""
    check_same_shape(**values)
    for name, value in values.items():
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise ArgumentError(f"{name}.dtype", value.dtype, "integers", hint="use .long()")


def check_same_shape(**values: Tensor) -> None:
    """Check that tensors have one shape, since (N,) and (N, 1) would broadcast."""
    first = next(iter(values.values())).shape
    for name, value in values.items():
        if value.shape != first:
            raise ArgumentError(f"{name}.shape", tuple(value.shape), f"{tuple(first)}, that of {next(iter(values))}")


def flatten_reals(*, allow_infinite: bool = False, **values: Tensor) -> list[Tensor]:
    """Check values of one shape, and flatten them to (N,) on one device in float64; there may be none."""
    check_same_shape(**values)
    device = next(iter(values.values())).device
    for name, value in values.items():
        if value.is_complex() or value.dtype == torch.bool:
            raise ArgumentError(f"{name}.dtype", value.dtype, "real numbers", hint="use .float()")
        if (value.isnan() if allow_infinite else ~value.isfinite()).any():
            found = "NaN" if allow_infinite else "NaN or infinite values"
            raise ArgumentError(name, found, "numbers", hint="check the outputs of the net and the data")
    return [value.detach().to(device).double().flatten() for value in values.values()]
