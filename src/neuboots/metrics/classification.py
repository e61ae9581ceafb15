"""Metrics of class probabilities p given true labels y, and the states that every metric of this package is made of.

    error = mean 1[argmax p ≠ y],   NLL = mean −log p_y,   Brier = mean Σ_c (p_c − 1[y = c])²
    ECE = Σ_k (n_k / n) |accuracy_k − confidence_k|,   MCE = max_k |accuracy_k − confidence_k|
    risk(c) = error among the fraction c of inputs with the highest confidence,   AURC = ∫ risk(c) dc
    precision_c = n_cc / Σ_t n_tc,   recall_c = n_cc / Σ_g n_cg,   F1_c = 2 n_cc / (Σ_t n_tc + Σ_g n_cg)
    IoU_c = n_cc / (Σ_t n_tc + Σ_g n_cg − n_cc),   Dice_c = F1_c

Everywhere `probs` is (N, C, *), probabilities along the class axis, and `labels` the integers (N, *) in 0 … C − 1;
pixels count as inputs of their own. The bins k of the confidence max p are (a, b], so that confidence 1 falls in the
last one and confidence 0 in the first. n_tg is the number of inputs of class t that are predicted as g; a ratio of
counts that is 0 / 0, as for a class that occurs nowhere, is 0 (scikit-learn's `zero_division=0`). Sums are in float64.
Inputs of equal confidence have no order among themselves: for risk and AURC each counts with the mean accuracy of its
tie, which is the expectation over their orders; in adaptive bins, a tie that spans two bins is divided in proportion.

A metric is a function of a state that adds up over batches, T(a ∪ b) = T(a) + T(b), so that a data set need not fit in
memory. Sums and counts take memory that does not grow with the data; metrics of ranks (AUROC, AURC, adaptive ECE) store
one score per input. A batch may be empty; the metric of an empty data set is an error.

C. Guo, G. Pleiss, Y. Sun, K. Weinberger, On calibration of modern neural networks, ICML 2017.
M. Pakdaman Naeini, G. Cooper, M. Hauskrecht, Obtaining well calibrated probabilities using Bayesian binning, AAAI 2015.
Y. Geifman, G. Uziel, R. El-Yaniv, Bias-reduced uncertainty estimation for deep neural classifiers, ICLR 2019.
J. Nixon, M. Dusenberry, L. Zhang, G. Jerfel, D. Tran, Measuring calibration in deep learning, CVPR Workshops 2019.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from neuboots._validation import ArgumentError, check_int, check_memory

MAX_CHUNK_ELEMENTS = 1 << 20  # elements of intermediate results that are held at a time
_HALF_STEP = 2.0**-25  # half the spacing of the smallest float16 numbers

# -- states --------------------------------------------------------------------------------------------


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

    Attributes:
        total: Sum of the values: ().
        count: Number of the values: ().

    Example:
        >>> (RunningMean.from_batch(torch.tensor([1.0, 2.0])) + RunningMean.from_batch(torch.tensor([6.0]))).value
        tensor(3., dtype=torch.float64)
    """

    total: Tensor
    count: Tensor

    @classmethod
    def from_batch(cls, values: Tensor) -> Self:
        """Return the sum and the count of values of any shape, possibly none.

        Args:
            values: Real numbers or booleans.

        Raises:
            ArgumentError: If a value is NaN or complex.
        """
        check_tensors(values=values)
        if values.is_complex() or values.isnan().any():
            raise ArgumentError("values", f"NaN or {values.dtype}", "real numbers", hint="check the outputs of the net")
        return cls(values.detach().sum(dtype=torch.float64), torch.tensor(values.numel(), device=values.device))

    @property
    def value(self) -> Tensor:
        """The mean."""
        return self.total / check_int("count", self.count, minimum=1)


def concat_values(parts: tuple[Tensor, ...]) -> Tensor:
    """Concatenate all stored values.

    Args:
        parts: Values of each batch, (Nᵢ,).

    Returns:
        All values on the device of the first ones, (N,).
    """
    return torch.cat([part.to(parts[0].device) for part in parts])


# -- validation ----------------------------------------------------------------------------------------


def check_tensors(**values: Tensor) -> None:
    """Check that arguments are dense tensors with values.

    Args:
        **values: Arguments by name.

    Raises:
        ArgumentError: If an argument is something else, such as an array of NumPy or a sparse tensor.
    """
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(name, type(value), "a tensor", hint="use torch.as_tensor")
        if value.layout != torch.strided or value.is_meta:
            raise ArgumentError(name, f"{value.layout} on {value.device}", "a dense tensor with values")


def check_same_shape(**values: Tensor) -> None:
    """Check that tensors have one shape, since (N,) and (N, 1) would broadcast.

    Args:
        **values: Tensors by name.

    Raises:
        ArgumentError: If an argument is no tensor, or has another shape than the first one.
    """
    check_tensors(**values)
    first = next(iter(values.values())).shape
    for name, value in values.items():
        if value.shape != first:
            raise ArgumentError(f"{name}.shape", tuple(value.shape), f"{tuple(first)}, that of {next(iter(values))}")


def flatten_reals(*, allow_infinite: bool = False, **values: Tensor) -> list[Tensor]:
    """Check values of one shape, and flatten them on one device in float64.

    Args:
        allow_infinite: Whether infinite values are accepted.
        **values: Tensors by name, possibly empty.

    Returns:
        The values of each tensor, (N,).

    Raises:
        ArgumentError: If shapes differ, or values are not real numbers.
    """
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
    """Check that scores are of a floating-point dtype (−s of an unsigned integer would overflow) and not NaN.

    Args:
        name: Name of the argument.
        scores: Scores.

    Raises:
        ArgumentError: If they are not.
    """
    check_tensors(**{name: scores})
    if not scores.is_floating_point():
        raise ArgumentError(f"{name}.dtype", scores.dtype, "floating-point numbers", hint="use .float()")
    flatten_reals(allow_infinite=True, **{name: scores})


def flatten_probs(probs: Tensor, labels: Tensor, *, ignore_index: int | None = None) -> tuple[Tensor, Tensor]:
    """Check probabilities and labels, and flatten pixels to inputs.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).
        ignore_index: Label of inputs that are removed.

    Returns:
        Probabilities (N, C) and labels (N,).

    Raises:
        ArgumentError: If shapes do not fit, rows are no probabilities, or a label is out of range.
    """
    flat, y = _flatten_outputs("probs", probs, labels)
    if ignore_index is not None and bool((y == check_int("ignore_index", ignore_index)).any()):
        flat, y = flat[y != ignore_index], y[y != ignore_index]
    if len(y) == 0:
        return flat, y
    # Rounding moves an entry by half of eps of itself, a row's sum by half of eps, and each of the smallest entries by
    # half the spacing there. Rows of a wide dtype may come from half precision, so its tolerance holds for all.
    deviation = (flat.sum(1, dtype=torch.float64) - 1).abs().max()
    tolerance = max(1e-3, torch.finfo(flat.dtype).eps) + flat.shape[1] * _HALF_STEP
    if not (flat.min() >= 0 and deviation <= tolerance):  # so that NaN is an error too
        found = f"minimum {flat.min():.3g}, sums up to {deviation:.3g} from 1"
        raise ArgumentError("probs", found, "probabilities", hint="apply softmax(1) to logits; check the net if NaN")
    _check_label_range("labels", y, flat.shape[1])
    return flat, y


def _flatten_outputs(name: str, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Check outputs (N, C, *) and integer labels (N, *), and flatten them to (N, C) and (N,)."""
    check_tensors(**{name: values, "labels": labels})
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


def _check_label_range(name: str, labels: Tensor, num_classes: int) -> None:
    """Check that labels are 0 … C − 1."""
    if labels.numel() and (labels.min() < 0 or labels.max() >= num_classes):
        found, expected = f"{labels.min()} to {labels.max()}", f"0 to {num_classes - 1} for {num_classes} classes"
        raise ArgumentError(name, found, expected, hint="renumber the labels, or drop the inputs without a label")


def check_integers(**values: Tensor) -> None:
    """Check that tensors are of an integer dtype."""
    for name, value in values.items():
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise ArgumentError(f"{name}.dtype", value.dtype, "integers", hint="use .long()")


# -- states --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ReliabilityCurve:
    """Accuracy by bins of the confidence; an empty bin has NaN means.

    Args:
        confidence: Mean confidence of each bin, (num_bins,).
        accuracy: Accuracy of each bin, (num_bins,).
        count: Number of inputs of each bin, (num_bins,).
    """

    confidence: Tensor
    accuracy: Tensor
    count: Tensor


@dataclass(frozen=True, eq=False)
class ReliabilityBins(MetricState):
    """Sums over inputs, and by bins ((k − 1)/K, k/K] of the confidence; their size does not grow with C.

    Args:
        bin_confidence: Sum of the confidences, (num_bins,).
        bin_correct: Number of correct predictions, (num_bins,).
        bin_count: Number of inputs, (num_bins,).
        log_losses: Mean of −log p_y.
        brier_scores: Mean of Σ_c (p_c − 1[y = c])².
    """

    bin_confidence: Tensor
    bin_correct: Tensor
    bin_count: Tensor
    log_losses: RunningMean
    brier_scores: RunningMean

    @classmethod
    def from_batch(cls, probs: Tensor, labels: Tensor, *, num_bins: int = 15) -> Self:
        """Return the sums of one batch.

        Args:
            probs: Probabilities (N, C, *).
            labels: Labels (N, *).
            num_bins: Number of bins K.
        """
        return cls._from_rows(*flatten_probs(probs, labels), num_bins)

    @classmethod
    def _from_rows(cls, p: Tensor, y: Tensor, num_bins: int, **others: Any) -> Self:
        """Sums of checked rows, and the fields of a subclass."""
        num_bins = check_int("num_bins", num_bins, minimum=1)
        check_memory("num_bins", num_bins, 32 * num_bins, hint="use fewer bins")
        confidence, preds = p.max(1)  # (N,), (N,)
        # The inner edges k/K, rounded as the probabilities are: 0.6 in float32 lies on 3/5, not above.
        edges = (torch.arange(1, num_bins, device=p.device).double() / num_bins).to(p.dtype)
        bins = torch.bucketize(confidence, edges)  # (N,)
        log_probs = p.gather(1, y[:, None])[:, 0].clamp_min(torch.finfo(p.dtype).tiny).double().log()  # (N,)
        difference = p.to(torch.float64, copy=True)  # (N, C)
        difference[torch.arange(len(y), device=y.device), y] -= 1
        return cls(
            bin_confidence=torch.bincount(bins, confidence.double(), minlength=num_bins).double(),
            bin_correct=torch.bincount(bins[preds == y], minlength=num_bins),
            bin_count=torch.bincount(bins, minlength=num_bins),
            log_losses=RunningMean.from_batch(-log_probs),
            brier_scores=RunningMean.from_batch(difference.square_().sum(1)),
            **others,
        )

    @property
    def nll(self) -> Tensor:
        """Negative log-likelihood, in nats."""
        return self.log_losses.value

    @property
    def brier(self) -> Tensor:
        """Brier score, summed over classes."""
        return self.brier_scores.value

    @property
    def reliability_curve(self) -> ReliabilityCurve:
        """Mean confidence and accuracy of each bin."""
        check_int("count", self.bin_count.sum(), minimum=1)
        confidence, accuracy = self.bin_confidence / self.bin_count, self.bin_correct.double() / self.bin_count
        return ReliabilityCurve(confidence, accuracy, self.bin_count)

    @property
    def ece(self) -> Tensor:
        """Expected calibration error."""
        gap = (self.bin_correct - self.bin_confidence).abs().sum()
        return gap / check_int("count", self.bin_count.sum(), minimum=1)

    @property
    def mce(self) -> Tensor:
        """Maximum calibration error."""
        check_int("count", self.bin_count.sum(), minimum=1)
        return ((self.bin_correct - self.bin_confidence).abs() / self.bin_count.clamp_min(1)).max()


@dataclass(frozen=True, eq=False)
class ConfusionMatrix(MetricState):
    """Counts n_tg: a row for each true class, a column for each predicted class.

    Args:
        matrix: The counts, (C, C).

    Example:
        >>> labels, preds = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])
        >>> state = ConfusionMatrix.from_preds(preds, labels, num_classes=2)
        >>> state.confusion_matrix.tolist(), state.recall
        ([[1, 0], [1, 1]], tensor([1.0000, 0.5000], dtype=torch.float64))
    """

    matrix: Tensor

    @classmethod
    def from_preds(cls, preds: Tensor, labels: Tensor, *, num_classes: int) -> Self:
        """Return the counts of one batch.

        Args:
            preds: Predicted classes (N,), integers in 0 … C − 1.
            labels: True classes (N,), integers in 0 … C − 1.
            num_classes: Number of classes C.

        Raises:
            ArgumentError: If shapes differ, or a class is out of range.
        """
        num_classes = check_int("num_classes", num_classes, minimum=1)
        check_memory("num_classes", num_classes, 16 * num_classes**2, hint="use fewer classes")
        check_same_shape(preds=preds, labels=labels)
        check_integers(preds=preds, labels=labels)
        _check_label_range("preds", preds, num_classes)
        _check_label_range("labels", labels, num_classes)
        cells = labels.flatten().to(preds.device).long() * num_classes + preds.flatten().long()
        return cls(torch.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes))

    @property
    def count(self) -> int:
        """Number of inputs."""
        return int(self.matrix.sum())

    @property
    def confusion_matrix(self) -> Tensor:
        """The matrix, of at least one input: (C, C)."""
        check_int("count", self.matrix.sum(), minimum=1)
        return self.matrix

    @property
    def error(self) -> Tensor:
        """Fraction of incorrect predictions."""
        total = self.confusion_matrix.sum()
        return (total - self.matrix.diagonal().sum()).double() / total

    @property
    def accuracy(self) -> Tensor:
        """Fraction of correct predictions."""
        return 1 - self.error

    @property
    def occurs(self) -> Tensor:
        """Whether class c is the label or the prediction of any input: (C,)."""
        return self._sizes > 0

    @property
    def precision(self) -> Tensor:
        """Fraction of the inputs predicted as c that are of class c: (C,)."""
        return self._hits / self.matrix.sum(0).clamp_min(1)

    @property
    def recall(self) -> Tensor:
        """Fraction of the inputs of class c that are predicted as c: (C,)."""
        return self._hits / self.matrix.sum(1).clamp_min(1)

    @property
    def f1(self) -> Tensor:
        """Harmonic mean of precision and recall, the Dice coefficient: (C,)."""
        return 2 * self._hits / self._sizes.clamp_min(1)

    @property
    def iou(self) -> Tensor:
        """Intersection over union: (C,)."""
        return self._hits / (self._sizes - self._hits).clamp_min(1)

    @property
    def mean_iou(self) -> Tensor:
        """Mean intersection over union of the classes that occur."""
        return self.iou[self.occurs].mean()

    @property
    def _hits(self) -> Tensor:
        """n_cc: (C,); the denominators above are at least 1, so that 0 / 0 is 0."""
        return self.confusion_matrix.diagonal().double()

    @property
    def _sizes(self) -> Tensor:
        return self.matrix.sum(0) + self.matrix.sum(1)


@dataclass(frozen=True, eq=False)
class RiskCoverageCurve:
    """Error among the most confident inputs, by their fraction.

    Args:
        coverage: Fraction of inputs with confidence ≥ threshold, (K,).
        risk: Error among them, (K,).
        threshold: The confidences that occur, falling, (K,).
    """

    coverage: Tensor
    risk: Tensor
    threshold: Tensor


@dataclass(frozen=True, eq=False)
class ConfidenceRanking(MetricState):
    """State of metrics that rank inputs by confidence; it stores the confidence of each input.

    Args:
        confidence: Confidences by batch, (N,) each.
        correct: Whether predictions are correct, by batch, (N,) each.

    Example:
        >>> first = ConfidenceRanking.from_confidence(torch.tensor([0.9, 0.6]), torch.tensor([True, False]))
        >>> state = first + ConfidenceRanking.from_confidence(torch.tensor([0.8]), torch.tensor([True]))
        >>> state.risk_coverage_curve.risk.tolist(), state.aurc
        ([0.0, 0.0, 0.3333333333333333], tensor(0.0833, dtype=torch.float64))
    """

    confidence: tuple[Tensor, ...]
    correct: tuple[Tensor, ...]

    @classmethod
    def from_confidence(cls, confidence: Tensor, correct: Tensor) -> Self:
        """Return the state of one batch.

        Args:
            confidence: Floating-point scores (N,), larger for inputs to trust first.
            correct: Whether each prediction is correct, (N,) booleans.

        Raises:
            ArgumentError: If shapes or dtypes do not fit, or a confidence is NaN.
        """
        check_same_shape(confidence=confidence, correct=correct)
        if correct.dtype != torch.bool:
            raise ArgumentError("correct.dtype", correct.dtype, "torch.bool", hint="pass preds == labels")
        check_float_scores("confidence", confidence)
        return cls((confidence.detach().flatten().clone(),), (correct.detach().flatten().clone(),))

    @classmethod
    def from_probs(cls, probs: Tensor, labels: Tensor) -> Self:
        """Return the state of one batch with the confidence max p.

        Args:
            probs: Probabilities (N, C, *).
            labels: Labels (N, *).
        """
        p, y = flatten_probs(probs, labels)
        confidence, preds = p.max(1)
        return cls.from_confidence(confidence, preds == y)

    @property
    def count(self) -> int:
        """Number of inputs."""
        return sum(map(len, self.correct))

    def _ties(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each distinct confidence, falling; number of inputs that have it; number of correct ones: (K,)."""
        confidence, order = concat_values(self.confidence).sort(descending=True)
        check_int("count", len(confidence), minimum=1)
        values, place, count = torch.unique_consecutive(confidence, return_inverse=True, return_counts=True)
        correct = torch.zeros_like(count).index_add(0, place, concat_values(self.correct)[order].long())
        return values, count, correct

    @property
    def risk_coverage_curve(self) -> RiskCoverageCurve:
        """Risk by coverage, one point per distinct confidence."""
        threshold, count, correct = self._ties()
        accepted = count.cumsum(0)
        return RiskCoverageCurve(
            accepted.double() / accepted[-1], (count - correct).cumsum(0).double() / accepted, threshold
        )

    @property
    def aurc(self) -> Tensor:
        """Area under the risk–coverage curve."""
        _, count, correct = self._ties()
        errors = (1 - correct.double() / count).repeat_interleave(count)  # (N,) in expectation over ties
        risk = errors.cumsum(0) / torch.arange(1, len(errors) + 1, device=errors.device)
        if len(risk) == 1:
            return risk[0]
        # The trapezoidal rule from coverage 1/N to 1, over that length: there is no risk at coverage 0.
        return (risk.sum() - (risk[0] + risk[-1]) / 2) / (len(risk) - 1)

    def compute_adaptive_ece(self, num_bins: int) -> Tensor:
        """Expected calibration error over bins of equally many inputs.

        Args:
            num_bins: Number of bins.
        """
        confidence, count, correct = self._ties()
        gap = correct.double() / count - confidence.double()
        gap = gap.repeat_interleave(count).flip(0)  # (N,) confidence rising
        parts = gap.tensor_split(min(check_int("num_bins", num_bins, minimum=1), len(gap)))  # others would be empty
        return torch.stack([part.sum().abs() for part in parts]).sum() / len(gap)


@dataclass(frozen=True, eq=False)
class ProbabilityMetrics(ReliabilityBins, ConfusionMatrix):
    """Metrics of class probabilities that store nothing per input, for data that come in batches.

    Example:
        >>> probs, labels = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]]), torch.tensor([0, 1, 0])
        >>> state = sum(ProbabilityMetrics.from_batch(p, y) for p, y in zip(probs.split(2), labels.split(2)))
        >>> state.count, state.error
        (3, tensor(0.3333, dtype=torch.float64))
    """

    @classmethod
    def from_batch(cls, probs: Tensor, labels: Tensor, *, num_bins: int = 15, ignore_index: int | None = None) -> Self:
        """Return the sums of one batch.

        Args:
            probs: Probabilities (N, C, *).
            labels: Labels (N, *).
            num_bins: Number of bins of ECE, MCE and the reliability curve.
            ignore_index: Label of inputs that do not count.

        Raises:
            ArgumentError: If shapes do not fit, rows are no probabilities, or a label is out of range.
        """
        p, y = flatten_probs(probs, labels, ignore_index=ignore_index)
        confusion = ConfusionMatrix.from_preds(p.argmax(1), y, num_classes=p.shape[1])
        return cls._from_rows(p, y, num_bins, **vars(confusion))


@dataclass(frozen=True, eq=False)
class ClassificationMetrics(ProbabilityMetrics, ConfidenceRanking):
    """All metrics of class probabilities for data that come in batches; it stores one confidence per input.

    Example:
        >>> probs, labels = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]]), torch.tensor([0, 1, 0])
        >>> state = sum(ClassificationMetrics.from_batch(p, y) for p, y in zip(probs.split(2), labels.split(2)))
        >>> state.aurc, state.f1
        (tensor(0.0833, dtype=torch.float64), tensor([0.6667, 0.6667], dtype=torch.float64))
    """

    @classmethod
    def from_batch(cls, probs: Tensor, labels: Tensor, *, num_bins: int = 15, ignore_index: int | None = None) -> Self:
        """Return the state of one batch.

        Args:
            probs: Probabilities (N, C, *).
            labels: Labels (N, *).
            num_bins: Number of bins of ECE, adaptive ECE, MCE and the reliability curve.
            ignore_index: Label of inputs that do not count.

        Raises:
            ArgumentError: If shapes do not fit, rows are no probabilities, or a label is out of range.
        """
        p, y = flatten_probs(probs, labels, ignore_index=ignore_index)
        confidence, preds = p.max(1)
        confusion = ConfusionMatrix.from_preds(preds, y, num_classes=p.shape[1])
        ranking = ConfidenceRanking.from_confidence(confidence, preds == y)
        return cls._from_rows(p, y, num_bins, **vars(confusion), **vars(ranking))

    @property
    def adaptive_ece(self) -> Tensor:
        """Expected calibration error over bins of equally many inputs."""
        return self.compute_adaptive_ece(len(self.bin_count))


# -- functions -----------------------------------------------------------------------------------------


def error(probs: Tensor, labels: Tensor) -> Tensor:
    """Mean of 1[argmax p ≠ y]; a tie goes to the first class.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).

    Returns:
        The error, a 0-dim float64 tensor.

    Example:
        >>> error(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
        tensor(0.5000, dtype=torch.float64)
    """
    return ProbabilityMetrics.from_batch(probs, labels).error


def accuracy(probs: Tensor, labels: Tensor) -> Tensor:
    """Mean of 1[argmax p = y] = 1 − error.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).

    Returns:
        The accuracy, a 0-dim float64 tensor.

    Example:
        >>> accuracy(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
        tensor(0.5000, dtype=torch.float64)
    """
    return ProbabilityMetrics.from_batch(probs, labels).accuracy


def nll(probs: Tensor, labels: Tensor) -> Tensor:
    """Mean of −log p_y, in nats; p is the predictive (mean) probability.

    A probability below the smallest normal number of its dtype (`torch.finfo(dtype).tiny`), such as zero, counts as
    that number, so an incorrect prediction of probability 1 costs 87.3 nats in float32, not infinity.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).

    Returns:
        The negative log-likelihood, a 0-dim float64 tensor.

    Example:
        >>> nll(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
        tensor(0.6931, dtype=torch.float64)
    """
    return ReliabilityBins.from_batch(probs, labels).nll


def brier(probs: Tensor, labels: Tensor) -> Tensor:
    """Mean of Σ_c (p_c − 1[y = c])², summed over classes: 0 is perfect, 2 the maximum.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).

    Returns:
        The Brier score, a 0-dim float64 tensor.

    Example:
        >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
        tensor(0.5000, dtype=torch.float64)
    """
    return ReliabilityBins.from_batch(probs, labels).brier


def nll_at_mean_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of −log softmax(z)_y at the mean z of the replicates' logits.

    By convexity of −log softmax it is at most the mean NLL of the replicates, as `nll` is, but it is no likelihood of
    the predictive probability: compare it only with itself.

    Args:
        logits: Mean logits (N, C, *) of at least two classes.
        labels: Labels (N, *).

    Returns:
        The value in nats, a 0-dim float64 tensor.

    Example:
        >>> nll_at_mean_logit(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        tensor(0.6931, dtype=torch.float64)
    """
    z, y = _flatten_outputs("logits", logits, labels)
    if z.shape[1] == 1:
        hint = "a single logit z of the second of two classes is torch.cat([0 * z, z], 1)"
        raise ArgumentError("logits.shape", tuple(logits.shape), "at least two classes", hint=hint)
    flatten_reals(logits=z)
    _check_label_range("labels", y, z.shape[1])
    return RunningMean.from_batch(cross_entropy(z.double(), y, reduction="none")).value


def paper_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """10 × `nll_at_mean_logit`: the column NLL of the paper's tables.

    Args:
        logits: Mean logits (N, C, *) of at least two classes.
        labels: Labels (N, *).

    Returns:
        The value, a 0-dim float64 tensor.

    Example:
        >>> paper_nll(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        tensor(6.9315, dtype=torch.float64)
    """
    return 10 * nll_at_mean_logit(logits, labels)


def reliability_curve(probs: Tensor, labels: Tensor, *, num_bins: int = 15) -> ReliabilityCurve:
    """Means of max p and of 1[argmax p = y] over the inputs with max p in ((k − 1)/K, k/K].

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).
        num_bins: Number of bins K.

    Returns:
        The curve; empty bins have NaN means.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [1.0, 0.0]])
        >>> curve = reliability_curve(probs, torch.tensor([0, 0, 0]), num_bins=2)
        >>> curve.count, curve.accuracy
        (tensor([0, 3]), tensor([   nan, 0.6667], dtype=torch.float64))
    """
    return ReliabilityBins.from_batch(probs, labels, num_bins=num_bins).reliability_curve


def ece(probs: Tensor, labels: Tensor, *, num_bins: int = 15) -> Tensor:
    """Expected calibration error Σ_k (n_k / n) |accuracy_k − confidence_k| over the bins of `reliability_curve`.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).
        num_bins: Number of bins.

    Returns:
        The error, a 0-dim float64 tensor.

    Example:
        >>> ece(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 1]))
        tensor(0.2000, dtype=torch.float64)
    """
    return ReliabilityBins.from_batch(probs, labels, num_bins=num_bins).ece


def mce(probs: Tensor, labels: Tensor, *, num_bins: int = 15) -> Tensor:
    """Maximum calibration error max_k |accuracy_k − confidence_k| over the bins of `reliability_curve`.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).
        num_bins: Number of bins.

    Returns:
        The error, a 0-dim float64 tensor.

    Example:
        >>> mce(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 1]))
        tensor(0.3000, dtype=torch.float64)
    """
    return ReliabilityBins.from_batch(probs, labels, num_bins=num_bins).mce


def adaptive_ece(probs: Tensor, labels: Tensor, *, num_bins: int = 15) -> Tensor:
    """Σ_k (n_k / n) |accuracy_k − confidence_k| over bins of equally many inputs, sorted by confidence.

    Of n inputs, the n mod K bins of least confidence have one more than the others.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).
        num_bins: Number of bins K.

    Returns:
        The error, a 0-dim float64 tensor.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]])
        >>> adaptive_ece(probs, torch.tensor([0, 1, 1, 1]), num_bins=2)
        tensor(0.3500, dtype=torch.float64)
    """
    return ConfidenceRanking.from_probs(probs, labels).compute_adaptive_ece(num_bins)


def risk_coverage_curve(probs: Tensor, labels: Tensor) -> RiskCoverageCurve:
    """Error among the inputs with max p ≥ t, and their fraction, for each t that occurs.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).

    Returns:
        The curve, thresholds falling.

    Example:
        >>> curve = risk_coverage_curve(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
        >>> curve.coverage.tolist(), curve.risk.tolist()
        ([0.5, 1.0], [0.0, 0.5])
    """
    return ConfidenceRanking.from_probs(probs, labels).risk_coverage_curve


def aurc(probs: Tensor, labels: Tensor) -> Tensor:
    """Mean risk over coverage from 1/N to 1 by the trapezoidal rule; for a single input, its error.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).

    Returns:
        The area, a 0-dim float64 tensor.

    Example:
        >>> aurc(torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.8, 0.2]]), torch.tensor([0, 1, 0]))
        tensor(0.0833, dtype=torch.float64)
    """
    return ConfidenceRanking.from_probs(probs, labels).aurc


def confusion_matrix(probs: Tensor, labels: Tensor) -> Tensor:
    """Number n_tg of inputs with y = t and argmax p = g.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).

    Returns:
        Integers (C, C), a row for each true class.

    Example:
        >>> confusion_matrix(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
        tensor([[1, 0],
                [1, 1]])
    """
    return ProbabilityMetrics.from_batch(probs, labels).confusion_matrix


def precision(probs: Tensor, labels: Tensor) -> Tensor:
    """n_cc / Σ_t n_tc: the fraction of the inputs predicted as c that are of class c.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).

    Returns:
        Precision of each class (C,); 0 for a class that is never predicted.

    Example:
        >>> precision(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    return ProbabilityMetrics.from_batch(probs, labels).precision


def recall(probs: Tensor, labels: Tensor) -> Tensor:
    """n_cc / Σ_g n_cg: the fraction of the inputs of class c that are predicted as c.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).

    Returns:
        Recall of each class (C,); 0 for a class without inputs.

    Example:
        >>> recall(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
        tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    return ProbabilityMetrics.from_batch(probs, labels).recall


def f1(probs: Tensor, labels: Tensor) -> Tensor:
    """2 n_cc / (Σ_t n_tc + Σ_g n_cg), the harmonic mean of precision and recall.

    Args:
        probs: Probabilities (N, C, *).
        labels: Labels (N, *).

    Returns:
        F1 of each class (C,); 0 for a class that occurs nowhere.

    Example:
        >>> f1(torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]), torch.tensor([0, 1, 1]))
        tensor([0.6667, 0.6667], dtype=torch.float64)
    """
    return ProbabilityMetrics.from_batch(probs, labels).f1
