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
        return self.total / check_int("count", self.count, minimum=1)


def concat_values(parts: tuple[Tensor, ...]) -> Tensor:
    """Concatenate all stored values: (N,)."""
    return torch.cat([part.to(parts[0].device) for part in parts])


# -- validation ----------------------------------------------------------------------------------------


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


def check_float_scores(name: str, scores: Tensor) -> None:
    """Check that scores are of a floating-point dtype (−s of an unsigned integer would overflow) and not NaN."""
    if not scores.is_floating_point():
        raise ArgumentError(f"{name}.dtype", scores.dtype, "floating-point numbers", hint="use .float()")
    flatten_reals(allow_infinite=True, **{name: scores})
