"""What metrics ask of their arguments: shapes, kinds and ranges, each refusal one sentence.

Statistics that add, so that a data set need not fit in memory.

    T(a ∪ b) = T(a) + T(b),   figure(a ∪ b) = figure(T(a) + T(b))

Every metric of this package is a figure of such a statistic; its one-shot form tallies all inputs at once. Sums and
counts take memory that does not grow with the data. Figures of ranks (AUROC, AURC, adaptive bins) need each input's
score and keep it: a few bytes an input, whatever the number of classes and replicates. A part may be empty, as the last
batch of a loader may; a figure of no inputs at all is refused.
"""

from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Self

import torch
from torch import Tensor

_HALF_STEP = 2.0**-25  # half the spacing of the smallest numbers in half precision


def flatten_probs(probs: Tensor, labels: Tensor, *, ignore_index: int | None = None) -> tuple[Tensor, Tensor]:
    """Check (N, C, *) and (N, *), and flatten them to rows (N, C) and (N,), without those labelled `ignore_index`."""
    flat, truth = _flattened("probs", probs, labels)
    classes = probs.shape[1]
    if ignore_index is not None:
        check_int_at_least("void", ignore_index, None)
        if bool((truth == ignore_index).any()):
            flat, truth = flat[truth != ignore_index], truth[truth != ignore_index]
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
    check_label_range("labels", truth, classes)
    return flat, truth


def flatten_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
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
    check_label_range("labels", truth, logits.shape[1])
    return flat, truth


def _flattened(name: str, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    check_tensors(**{name: values, "labels": labels})
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


def check_label_range(name: str, found: Tensor, classes: int) -> None:
    """Refuse what is no class 0 … C − 1."""
    if found.numel() and (found.min() < 0 or found.max() >= classes):
        raise ValueError(
            f"{name} run from {found.min()} to {found.max()}; expected 0 to {classes - 1} for "
            f"{classes} classes: renumber the labels, or drop the inputs without one"
        )


def _whole(values: Tensor) -> bool:
    return not values.is_floating_point() and not values.is_complex() and values.dtype != torch.bool


def check_integers(**values: Tensor) -> None:
    """Refuse what is not integers of one shape."""
    check_tensors(**values)
    check_same_shape(**values)
    for name, value in values.items():
        if not _whole(value):
            raise ValueError(f"got {name} of {value.dtype}; expected integers: convert it with .long()")


def check_tensors(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"got {name} of type {type(value).__name__}; expected a tensor: torch.as_tensor(x) makes one"
            )


def check_same_shape(**values: Tensor) -> None:
    if len({value.shape for value in values.values()}) > 1:
        got = " and ".join(f"{name} {tuple(value.shape)}" for name, value in values.items())
        raise ValueError(f"got shapes {got}; expected one shape: reshape them, since (N,) and (N, 1) do not pair up")


def check_int_at_least(name: str, number: Any, least: int | None) -> None:
    """Refuse what is no whole number, or below the least."""
    if isinstance(number, bool) or not isinstance(number, Integral) or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} is {number!r}; expected a whole number{bound}: pass such a number")


def check_fraction(name: str, number: Any) -> None:
    """Refuse what is not strictly inside (0, 1)."""
    if isinstance(number, bool) or not isinstance(number, Real) or not 0.0 < float(number) < 1.0:
        raise ValueError(f"{name} is {number!r}; expected a number between 0 and 1: pass such as 0.95")


def flatten_reals(*, infinite: bool = False, **values: Tensor) -> list[Tensor]:
    """Values of one shape, flattened, on one device and in float64: (N,) each; finite unless said otherwise.

    There may be none: a part of the data may be empty.
    """
    check_tensors(**values)
    check_same_shape(**values)
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


def check_non_negative(name: str, values: Tensor) -> None:
    if values.numel() and values.min() < 0:
        raise ValueError(f"{name} has a smallest entry of {values.min():.3g}; expected standard deviations ≥ 0")


MAX_CHUNK_ELEMENTS = 1 << 20  # numbers looked at together: what is computed on the way stays small beside what is kept


@dataclass(frozen=True, eq=False)
class MetricState:
    """Fields that are tensors add, tuples of tensors (values kept one by one) are joined, tallies inside add.

    Any other field is an option, and must be the same on both sides.

    >>> @dataclass(frozen=True, eq=False)
    >>> class Share(MetricState):
    ...     total: Tensor
    ...     count: Tensor
    >>> a, b = Share(torch.tensor(2.0), torch.tensor(1)), Share(torch.tensor(4.0), torch.tensor(2))
    >>> both = sum([a, b])  # as over the batches of a loader
    >>> both.total / both.count
    tensor(2.)
    """

    def __add__(self, other: Self) -> Self:
        if type(other) is not type(self):
            return NotImplemented
        return type(self)(*(_joined(part.name, self, other) for part in fields(self)))

    def __radd__(self, other: int) -> Self:
        """sum() begins with 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented


def _joined(name: str, a: MetricState, b: MetricState) -> Any:
    mine, theirs = getattr(a, name), getattr(b, name)
    if isinstance(mine, tuple | MetricState):
        return mine + theirs
    if isinstance(mine, Tensor):
        if mine.shape != theirs.shape:
            raise ValueError(
                f"got {name} of shapes {tuple(mine.shape)} and {tuple(theirs.shape)}; expected the same: both parts "
                "must have the same classes, replicates and bins"
            )
        return mine + theirs.to(mine.device)
    if mine != theirs:
        raise ValueError(f"got {name}={mine!r} and {name}={theirs!r}; expected tallies with the same options")
    return mine


@dataclass(frozen=True, eq=False)
class RunningMean(MetricState):
    """1/N Σᵢ vᵢ of numbers vᵢ that come in parts; sums run in float64.

    >>> (RunningMean.of(torch.tensor([1.0, 2.0])) + RunningMean.of(torch.tensor([6.0]))).value
    tensor(3., dtype=torch.float64)
    """

    total: Tensor  # ()
    count: Tensor  # ()

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Of any number of values, none included: a part may be empty, the whole not."""
        check_tensors(values=values)
        if values.is_complex() or values.isnan().any():
            raise ValueError(
                f"got {int(values.isnan().sum())} NaN among {values.numel()} values of {values.dtype}; expected real "
                "numbers: check the net's outputs and the data"
            )
        return cls(values.detach().sum(dtype=torch.float64), torch.tensor(values.numel(), device=values.device))

    @property
    def value(self) -> Tensor:
        return self.total / check_nonempty(self.count)


def store_values(*values: Tensor) -> tuple[Tensor, ...]:
    """Values that a tally keeps one by one, apart from the batch they came in."""
    return tuple(value.detach().flatten().clone() for value in values)


def concat_values(parts: tuple[Tensor, ...]) -> Tensor:
    """All values kept so far: (N,)."""
    return torch.cat([part.to(parts[0].device) for part in parts])


def check_nonempty(count: Tensor) -> Tensor:
    """The number of inputs, if there are any: a part of the data may have none, a figure is not drawn from none."""
    if count == 0:
        raise ValueError("got a tally of no inputs; expected at least one: check the data set")
    return count


def run_ends(sorted_values: Tensor) -> Tensor:
    """How many values come up to the end of each run of equal ones: (K,), the last being N.

    >>> run_ends(torch.tensor([0.9, 0.5, 0.5, 0.1]))
    tensor([1, 3, 4])
    """
    last = torch.ones(len(sorted_values), dtype=torch.bool, device=sorted_values.device)
    last[:-1] = sorted_values[1:] != sorted_values[:-1]  # a difference would make ∞ − ∞ no tie
    return last.nonzero()[:, 0] + 1
