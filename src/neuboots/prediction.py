"""Predictions: B sampled outputs at x and their statistics, the core abstraction of the library.

    samples[b] = f_b(x),   p(y | x) ≈ 1/B Σ_b softmax f_b(x)

Independent outputs are logits of labels of which any number may apply: p_c ≈ 1/B Σ_b sigmoid f_b(x)_c, and entropies
are sums over labels. Every method returns a `Predictor`; every evaluation uses only that, its `Prediction` and its
`Summary`. Samples are (B, N, C, *): replicate, example, output, and pixels, voxels or tokens if there are any.
Statistics of many replicates are accumulated over chunks: mean and Σ_b (z_b − mean)² by Chan's rule, Σ_b p_b and
Σ_b H(p_b) by running sums.
"""

import copy
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from neuboots._prng import derive_keys, draw_uniform
from neuboots._validation import ArgumentError, check_choice, check_fraction, check_int, check_memory
from neuboots.head import StructureCopier, check_inputs, find_not_finite

if TYPE_CHECKING:
    from neuboots.loading import FitData
    from neuboots.training import TrainingConfig

IntervalMethod = Literal["percentile", "normal"]

# Replicates held at once while statistics are accumulated. A constant that B = 10 fills twice: from then on no chunk
# needs more memory than the one before.
_CHUNK_SAMPLES = 5
_SMALL_BYTES = 1 << 18  # below this more replicates at once cost no memory worth saving
_MAX_BYTES = 1 << 26  # of replicates in flight while predicting
_QUANTILE_SAMPLES = 32  # replicates' worth of values held for quantiles; B / 32 passes over the replicates
MAX_SUMMARIZED = 1 << 24  # replicates: sums in single precision do not count further
MAX_SUMMARIZED_VALUES = 1 << 40  # of all replicates and passes, some hours of one core
_SILENT_SECONDS = 5.0  # before progress is shown


# -- class probabilities -------------------------------------------------------------------------------


def class_probabilities(outputs: Tensor, dim: int, *, independent: bool = False, out: Tensor | None = None) -> Tensor:
    """Return softmax over the class axis, in single precision at least; one output is the logit of class 1 of two.

    Args:
        outputs: Outputs of a net.
        dim: Class axis.
        independent: Whether each of several outputs is the logit of a label of its own: then their sigmoid.
        out: Tensor for the result.

    Returns:
        The probabilities.
    """
    dtype = _at_least_float32(outputs.dtype)  # replicates differ by less than half precision resolves
    if outputs.shape[dim] == 1:
        outputs = outputs.to(dtype)
        return torch.cat([(-outputs).sigmoid(), outputs.sigmoid()], dim, out=out)
    if independent:
        return torch.sigmoid(outputs.to(dtype), out=out)
    return torch.softmax(outputs, dim, dtype=dtype, out=out)


def class_logits(outputs: Tensor, dim: int, *, independent: bool) -> Tensor:
    """Return outputs as logits of exclusive classes: of independent outputs each is one logit, on an axis of its own.

    Args:
        outputs: Outputs of a net.
        dim: Class axis.
        independent: Whether each of several outputs is the logit of a label of its own.

    Returns:
        The outputs, (…, C, *), or (…, 1, C, *) of independent outputs, whose `class_probabilities` are (…, 2, C, *).
    """
    return outputs.unsqueeze(dim) if independent and outputs.shape[dim] > 1 else outputs


def categorical_entropy(probs: Tensor, dim: int, *, independent: bool = False, scratch: Tensor | None = None) -> Tensor:
    """Return H(p) = −Σ_c p_c log p_c along an axis, in nats.

    Args:
        probs: Probabilities.
        dim: Class axis.
        independent: Whether these are probabilities of independent labels: then Σ_c H(p_c, 1 − p_c).
        scratch: Tensor for intermediate results.

    Returns:
        The entropy.
    """
    tiny = torch.finfo(probs.dtype).tiny  # p = 0 adds 0, not NaN
    entropy = -torch.clamp_min(probs, tiny, out=scratch).log_().mul_(probs).sum(dim)
    return entropy + categorical_entropy(1 - probs, dim) if independent else entropy


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """A sum of many replicates in half precision stops growing."""
    return torch.promote_types(dtype, torch.float32)


def _sum_probs_and_entropy(samples: Tensor, *, independent: bool) -> tuple[Tensor, Tensor]:
    """Σ_b p_b and Σ_b H(p_b) over some replicates: (N, C, *), (N, *)."""
    p = class_probabilities(samples, 2, independent=independent)
    return p.sum(0), categorical_entropy(p, 2, independent=independent).sum(0)


def _split_samples(samples: Tensor) -> tuple[Tensor, ...]:
    """Parts of several small replicates, or single ones: each step makes several copies of its part."""
    return torch.split(samples, max(1, _SMALL_BYTES // num_bytes(samples[0])))


def _summary_chunk_size(replicate_bytes: int) -> int:
    few = min(_CHUNK_SAMPLES, max(1, _MAX_BYTES // (2 * replicate_bytes)))
    return max(few, _SMALL_BYTES // replicate_bytes)


def num_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor in bytes, at least 1.

    Args:
        tensor: The tensor.

    Returns:
        The size.
    """
    return max(1, tensor.numel() * tensor.element_size())


# -- statistics ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and standard deviation of the outputs over infinitely many replicates.

    Attributes:
        mean: (N, C, *).
        std: (N, C, *).
    """

    mean: Tensor
    std: Tensor


def _sample_std(samples: Tensor) -> Tensor:
    """Standard deviation over the first axis, with B − 1 in the denominator; zero for a single sample or no element."""
    return samples.std(0) if len(samples) > 1 and samples.numel() else torch.zeros_like(samples[0])


def _normal_interval(mean: Tensor, std: Tensor, level: float) -> tuple[Tensor, Tensor]:
    half = math.sqrt(2.0) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64))) * std
    return mean - half, mean + half


class _Statistics:
    """Statistics that follow from mean, std, probs and expected entropy."""

    if TYPE_CHECKING:  # fields or properties of the subclasses
        independent: bool

        @property
        def mean(self) -> Tensor: ...
        @property
        def std(self) -> Tensor: ...
        @property
        def probs(self) -> Tensor: ...
        @property
        def expected_entropy(self) -> Tensor: ...
        def quantile(self, q: float) -> Tensor: ...

    @property
    def variance(self) -> Tensor:
        """Variance of f(x) over replicates, (N, C, *)."""
        return self.std.square()

    @property
    def class_probs(self) -> Tensor:
        """Probabilities of exclusive classes: `probs`, or of independent outputs 1 − p and p, (N, 2, C, *)."""
        return torch.stack([1 - self.probs, self.probs], 1) if self.independent else self.probs

    @property
    def labels(self) -> Tensor:
        """Class with the largest predictive probability, (N, *); −1 where probabilities are NaN.

        Of independent outputs 1 where the probability is above ½, else 0, (N, C, *).
        """
        return self.class_probs.argmax(1).masked_fill(self.confidence.isnan(), -1)

    @property
    def confidence(self) -> Tensor:
        """Probability of `labels`, (N, *), or of independent outputs (N, C, *)."""
        return self.class_probs.amax(1)

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty H(1/B Σ_b p_b) in nats, (N, *); of independent outputs the sum over labels."""
        return categorical_entropy(self.probs, 1, independent=self.independent)

    @property
    def mutual_information(self) -> Tensor:
        """Disagreement of the replicates H(1/B Σ_b p_b) − 1/B Σ_b H(p_b) in nats, (N, *)."""
        gap = self.entropy - self.expected_entropy
        rounding = 16 * torch.finfo(gap.dtype).eps * self.entropy.clamp_min(1)  # not disagreement; NaN stays NaN
        return gap.masked_fill(gap <= rounding, 0.0)

    def interval(self, level: float = 0.95, *, method: IntervalMethod = "normal") -> tuple[Tensor, Tensor]:
        """Confidence band of the regression function.

        Args:
            level: Confidence level.
            method: "normal" for mean ± z·std, "percentile" for quantiles of the replicates.

        Returns:
            Lower and upper ends, (N, C, *) each.
        """
        check_fraction("level", level)
        if check_choice("method", method, ("normal", "percentile")) == "normal":
            return _normal_interval(self.mean, self.std, level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def prediction_interval(self, level: float = 0.95, *, noise_std: Tensor | float) -> tuple[Tensor, Tensor]:
        """Interval for a new observation, mean ± z √(std² + σ²); `interval` does not include the noise.

        Args:
            level: Coverage.
            noise_std: Standard deviation σ of the noise, as for `predictive_std`.

        Returns:
            Lower and upper ends, (N, C, *) each.
        """
        check_fraction("level", level)
        return _normal_interval(self.mean, self.predictive_std(noise_std), level)

    def predictive_std(self, noise_std: Tensor | float) -> Tensor:
        """Standard deviation of a new observation, √(std² + σ²), (N, C, *).

        Args:
            noise_std: σ, one number, (C,), or one per element; `residual_std` estimates it on held-out data, and
                `split_gaussian` returns it for a Gaussian head.

        Raises:
            ArgumentError: If σ is negative or NaN, or would be broadcast.
        """
        noise_std = torch.as_tensor(noise_std)
        if not bool((noise_std >= 0).all()):
            raise ArgumentError("noise_std", float(noise_std.min()), "standard deviations ≥ 0")
        shape = self.mean.shape
        noise = noise_std.view(-1, *[1] * (len(shape) - 2)) if noise_std.ndim == 1 else noise_std  # (C,): per output
        axes = zip(reversed(noise.shape), reversed(shape), strict=False)
        if noise.ndim > len(shape) or any(got not in (1, expected) for got, expected in axes):
            expected = f"a number, (C,), or one per element of the outputs {tuple(shape)}"
            raise ArgumentError("noise_std", tuple(noise_std.shape), expected)
        return (self.std**2 + noise.to(self.std) ** 2).sqrt()


@dataclass(frozen=True, eq=False)
class Prediction(_Statistics):
    """B sampled outputs and their statistics.

    For classification the outputs are logits, and `probs`, `labels`, `confidence` and the entropies apply; for
    regression `mean`, `std`, `quantile` and the intervals.

    Args:
        samples: Sampled outputs, (B, N, C, *).
        moments: Exact mean and standard deviation, if the method knows them.
        independent: Whether several outputs are logits of independent labels, not of exclusive classes.

    Raises:
        ArgumentError: If `samples` has another number of axes or integers, or B = 0.

    Example:
        >>> p = Prediction(torch.tensor([[[0.0, 1.0]], [[0.0, 3.0]]]))  # B = 2, N = 1, C = 2
        >>> p.mean.tolist(), p.labels.tolist()
        ([[0.0, 2.0]], [1])
    """

    samples: Tensor
    moments: Moments | None = None
    independent: bool = False

    def __post_init__(self) -> None:
        if not self.samples.is_floating_point():
            raise ArgumentError("samples.dtype", self.samples.dtype, "floating-point numbers", hint="use .float()")
        if self.samples.ndim < 3 or self.samples.shape[0] < 1:
            raise ArgumentError("samples", tuple(self.samples.shape), "(B, N, C, *) with B ≥ 1")
        object.__setattr__(self, "independent", self.independent and self.samples.shape[2] > 1)

    @property
    def num_samples(self) -> int:
        """Number of samples B."""
        return self.samples.shape[0]

    @property
    def mean(self) -> Tensor:
        """Mean of f(x) over replicates, exact if the method knows it, (N, C, *)."""
        return self.samples.mean(0) if self.moments is None else self.moments.mean

    @property
    def std(self) -> Tensor:
        """Standard deviation of f(x) over replicates, exact if the method knows it, (N, C, *)."""
        return _sample_std(self.samples) if self.moments is None else self.moments.std

    @cached_property
    def _probs_and_entropy(self) -> tuple[Tensor, Tensor]:
        first, *others = _split_samples(self.samples)  # views
        probs, entropy = _sum_probs_and_entropy(first, independent=self.independent)
        for part in others:
            more_probs, more_entropy = _sum_probs_and_entropy(part, independent=self.independent)
            probs, entropy = probs + more_probs, entropy + more_entropy
        return probs / self.num_samples, entropy / self.num_samples

    @property
    def probs(self) -> Tensor:
        """Predictive probabilities 1/B Σ_b softmax f_b(x), of independent outputs 1/B Σ_b sigmoid f_b(x), (N, C, *)."""
        return self._probs_and_entropy[0]

    @property
    def expected_entropy(self) -> Tensor:
        """Aleatoric uncertainty 1/B Σ_b H(p_b) in nats, (N, *); of independent outputs the sum over labels."""
        return self._probs_and_entropy[1]

    def quantile(self, q: float) -> Tensor:
        """Quantile of the replicates, linear between order statistics, (N, C, *)."""
        check_fraction("q", q, zero=True, one=True)
        rank = q * (self.num_samples - 1)  # torch.quantile has a size limit; two order statistics have none
        low = math.floor(rank)
        value = self.samples.kthvalue(low + 1, dim=0).values  # which takes NaN for the largest
        if rank != low:
            value = value.lerp(self.samples.kthvalue(low + 2, dim=0).values, rank - low)
        return value.masked_fill(self.samples.isnan().any(0), torch.nan)


@dataclass(frozen=True, eq=False)
class Summary(_Statistics):
    """Statistics of B replicates, accumulated over chunks in memory that does not grow with B.

    Attributes:
        num_samples: Number of samples B.
        mean: Mean of f(x), (N, C, *).
        std: Standard deviation of f(x), (N, C, *).
        probs: Predictive probabilities, (N, C, *).
        expected_entropy: Mean entropy of the replicates in nats, (N, *).
        quantiles: Quantiles by level, those that were requested.
        independent: Whether several outputs are logits of independent labels, not of exclusive classes.

    Example:
        >>> from neuboots.methods import DeterministicPredictor
        >>> summary = DeterministicPredictor(nn.Linear(2, 3)).summarize(torch.zeros(4, 2), 10, quantiles=(0.5,))
        >>> summary.quantile(0.5).shape
        torch.Size([4, 3])
    """

    num_samples: int
    mean: Tensor
    std: Tensor
    probs: Tensor
    expected_entropy: Tensor
    quantiles: dict[float, Tensor] = field(default_factory=dict)
    independent: bool = False

    def quantile(self, q: float) -> Tensor:
        """Quantile of the replicates, (N, C, *); raise ArgumentError if it was not requested."""
        for level, value in self.quantiles.items():
            if math.isclose(level, q):
                return value
        hint = f"request it with summarize(x, B, quantiles=({q:g},)), or use interval(method='normal')"
        raise ArgumentError("q", q, f"one of the requested quantiles {sorted(self.quantiles)}", hint=hint)


# -- streams of replicates -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleStream:
    """B replicates at one x, generated in chunks.

    Attributes:
        num_samples: Number of samples B.
        replicate_bytes: Memory of one replicate.
        chunks: Function of a size that yields the replicates in order, `size` at a time, (size, N, C, *); it can be
            called several times.
        moments: Exact mean and standard deviation, if known.
        independent: Whether several outputs are logits of independent labels; `predict` and `summarize` set it.
    """

    num_samples: int
    replicate_bytes: int
    chunks: Callable[[int], Iterator[Tensor]]
    moments: Moments | None = None
    independent: bool = False


def stream_forward_passes(num_samples: int, run: Callable[[int], Tensor]) -> SampleStream:
    """Return a stream whose replicate b is the output run(b), (N, C, *), of a forward pass.

    Args:
        num_samples: Number of samples B.
        run: Function of b that returns the output of replicate b, (N, C, *).

    Returns:
        The stream.
    """
    first = run(0)

    def chunks(size: int) -> Iterator[Tensor]:
        for start in range(0, num_samples, size):
            out = first.new_empty(min(size, num_samples - start), *first.shape)
            for b in range(start, start + len(out)):
                out[b - start] = run(b) if b else first
            yield out
            del out  # free the memory before the next chunk

    return SampleStream(num_samples, num_bytes(first), chunks)


def draw_member_order(num_members: int, num_samples: int, *, seed: int, start: int = 0) -> Tensor:
    """Draw which of K members each replicate is, (B,): every K replicates are a permutation of the members.

    Args:
        num_members: Number of members K.
        num_samples: Number of samples B.
        seed: Seed of what is drawn.
        start: First replicate that is returned.

    Returns:
        The numbers of the members, (B − start,).
    """
    first, last = start // num_members, -(-num_samples // num_members)
    keys = derive_keys(torch.arange(first, last), seed, "members")
    order = draw_uniform(keys[:, None], torch.arange(num_members)).argsort().flatten()
    return order[start - first * num_members : num_samples - first * num_members]


def stream_members(num_samples: int, num_members: int, run: Callable[[Tensor], Tensor], *, seed: int) -> SampleStream:
    """Return a stream whose replicates are K members, each run once.

    If all K are run, mean and standard deviation are those of the K members (with K − 1 in the denominator).

    Args:
        num_samples: Number of samples B.
        num_members: Number of members K.
        run: Function of member numbers that returns their outputs, (len(numbers), N, C, *).
        seed: Seed of the order of the members.

    Returns:
        The stream.
    """
    members = torch.unique(draw_member_order(num_members, min(num_samples, num_members), seed=seed))  # sorted
    outputs = run(members)

    def chunks(size: int) -> Iterator[Tensor]:
        for start in range(0, num_samples, size):
            order = draw_member_order(num_members, min(start + size, num_samples), seed=seed, start=start)
            yield outputs[torch.searchsorted(members, order)]

    moments = Moments(outputs.mean(0), _sample_std(outputs)) if len(members) == num_members else None
    return SampleStream(num_samples, num_bytes(outputs[0]), chunks, moments)


def collect_samples(stream: SampleStream) -> Prediction:
    """Compute all replicates of a stream, in one tensor.

    Args:
        stream: A stream of replicates.

    Returns:
        The samples.

    Raises:
        ArgumentError: If they need more memory than there is.
    """
    size, num_samples = max(1, _MAX_BYTES // stream.replicate_bytes), stream.num_samples
    if num_samples > size and (one := next(stream.chunks(1))).device.type == "cpu":  # others raise a clear error
        hint = "use summarize, whose memory does not grow with num_samples, or fewer inputs at once"
        check_memory("num_samples", num_samples, num_samples * num_bytes(one), hint=hint)
    chunks = _show_progress(stream.chunks(min(size, num_samples)), num_samples)
    first = next(chunks)
    if len(first) == num_samples:
        return Prediction(first, stream.moments, stream.independent)
    samples = first.new_empty(num_samples, *first.shape[1:])
    samples[: (done := len(first))] = first
    for chunk in chunks:
        samples[done : done + len(chunk)] = chunk
        done += len(chunk)
    return Prediction(samples, stream.moments, stream.independent)


def summarize_stream(stream: SampleStream, quantiles: tuple[float, ...] = ()) -> Summary:
    """Accumulate the statistics of a stream, and these quantiles, in memory that does not grow with B.

    Args:
        stream: A stream of replicates.
        quantiles: Levels of the quantiles.

    Returns:
        The statistics.

    Raises:
        ArgumentError: If there are more than `MAX_SUMMARIZED` replicates, or `MAX_SUMMARIZED_VALUES` values of all of
            them in all passes, of which quantiles need many.
    """
    sums: _RunningSums | None = None
    num_samples, size = stream.num_samples, _summary_chunk_size(stream.replicate_bytes)
    check_summarized(num_samples)
    for chunk in _show_progress(stream.chunks(min(size, num_samples)), num_samples):
        if sums is None:
            values = num_samples * chunk[0].numel()
            passes = 1 + (-(-chunk[0].numel() // _quantile_width(stream, chunk[0].numel())) if quantiles else 0)
            if values * passes > MAX_SUMMARIZED_VALUES:
                expected = f"at most {MAX_SUMMARIZED_VALUES:.1e} values; this takes {passes:,} passes over {values:.1e}"
                raise ArgumentError("num_samples", num_samples, expected, hint="use fewer replicates, or fewer inputs")
            independent = stream.independent and chunk.shape[2] > 1
            sums = _RunningSums.zeros_for(chunk, with_moments=stream.moments is None, independent=independent)
            shape, dtype = chunk.shape[1:], chunk.dtype  # (N, C, *)
        sums.add(chunk)
        del chunk  # free the memory before the next chunk
    assert sums is not None, "a stream has at least one replicate"
    if sums.moments is None:
        assert stream.moments is not None, "moments that are not known are accumulated"
        mean, std = stream.moments.mean, stream.moments.std
    else:
        mean, squares = sums.moments
        std = squares.div_(max(1, sums.count - 1)).sqrt_().to(dtype)
        mean = mean.to(dtype)
    probs, entropy = sums.probs.div_(sums.count), sums.entropy.div_(sums.count)
    found = _stream_quantiles(stream, quantiles, shape)
    return Summary(sums.count, mean, std, probs, entropy, found, sums.independent)


@dataclass
class _RunningSums:
    """Running Σ_b p_b (N, C, *), Σ_b H(p_b) (N, *) and, unless exact moments are known, mean and Σ_b (z_b − mean)²."""

    probs: Tensor
    entropy: Tensor
    moments: tuple[Tensor, Tensor] | None
    independent: bool
    count: int = 0
    # Intermediate results of a large replicate reuse this memory: allocating it anew takes longer than the sums.
    scratch: tuple[Tensor, Tensor] | None = None

    @classmethod
    def zeros_for(cls, chunk: Tensor, *, with_moments: bool, independent: bool) -> "_RunningSums":
        """Sums of no replicate, for chunks (b, N, C, *) like this one."""
        rows, outputs, *pixels = shape = chunk.shape[1:]
        zeros = partial(chunk.new_zeros, dtype=_at_least_float32(chunk.dtype))
        probs = zeros((rows, max(2, outputs), *pixels))  # one output is one logit of two classes
        return cls(probs, zeros((rows, *pixels)), (zeros(shape), zeros(shape)) if with_moments else None, independent)

    def add(self, chunk: Tensor) -> None:
        """Add a chunk (b, N, C, *), at once if it is small."""
        for part in _split_samples(chunk):
            if len(part) == 1:
                self._add_one(part[0])
            else:
                probs, entropy = _sum_probs_and_entropy(part, independent=self.independent)
                self.probs += probs
                self.entropy += entropy
                if self.moments is not None:
                    part = part.to(self.probs.dtype)
                    mean = part.mean(0)
                    self._merge(mean - self.moments[0], len(part))
                    self.moments[1].add_((part - mean).square_().sum(0))
            self.count += len(part)

    def _add_one(self, z: Tensor) -> None:
        """Add one replicate (N, C, *)."""
        if self.scratch is None:
            self.scratch = torch.empty_like(self.probs), torch.empty_like(self.probs)
        p, scratch = self.scratch
        self.probs += class_probabilities(z, 1, independent=self.independent, out=p)
        self.entropy += categorical_entropy(p, 1, independent=self.independent, scratch=scratch)
        if self.moments is not None:
            self._merge(torch.sub(z, self.moments[0], out=scratch[:, : z.shape[1]]), 1)

    def _merge(self, shift: Tensor, more: int) -> None:
        """Merge replicates whose mean differs from the running mean by `shift` (Chan's rule)."""
        assert self.moments is not None
        mean, squares = self.moments
        total = self.count + more
        mean.add_(shift, alpha=more / total)
        squares.addcmul_(shift, shift, value=self.count * more / total)


def _quantile_width(stream: SampleStream, total: int) -> int:
    """How many of the outputs have their quantiles computed in one pass over all replicates."""
    held = max(_summary_chunk_size(stream.replicate_bytes), _QUANTILE_SAMPLES)  # replicates' worth of values
    return max(1, min(total, total * held // stream.num_samples))


def check_summarized(num_samples: int) -> None:
    """Raise ArgumentError if the replicates are more than sums in single precision can count.

    Args:
        num_samples: Number of samples B.
    """
    if num_samples > MAX_SUMMARIZED:
        expected = f"at most {MAX_SUMMARIZED:,} replicates"
        raise ArgumentError("num_samples", num_samples, expected, hint="use fewer, whose mean is as accurate")


def _show_progress(chunks: Iterator[Tensor], num_samples: int, title: str = "") -> Iterator[Tensor]:
    """The chunks (b, N, C, *); on a terminal, with the replicates done and the time left if they take long."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    terminal = terminal and not hasattr(sys.stderr, "rich_proxied_file")  # below a progress bar
    if not terminal or threading.current_thread() is not threading.main_thread():
        yield from chunks
        return
    started, shown, done = time.monotonic(), 0.0, 0
    try:
        for chunk in chunks:
            done += len(chunk)
            yield chunk
            del chunk  # free the memory before the next one
            elapsed = time.monotonic() - started
            if elapsed > _SILENT_SECONDS and elapsed > shown + 1.0 and done < num_samples:
                shown, left = elapsed, elapsed * (num_samples / done - 1.0)
                text = f"{title}replicate {done:,} of {num_samples:,}, {left:,.0f} s left"
                print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _stream_quantiles(stream: SampleStream, levels: tuple[float, ...], shape: torch.Size) -> dict[float, Tensor]:
    """Exact quantiles in bounded memory: all B replicates of one slice of the outputs after another."""
    if not levels:
        return {}
    total = shape.numel()
    if total == 0:
        return {q: torch.empty(shape) for q in levels}
    chunk, width = _summary_chunk_size(stream.replicate_bytes), _quantile_width(stream, total)
    pieces: dict[float, list[Tensor]] = {q: [] for q in levels}
    for start in range(0, total, width):
        title = f"outputs {start + 1}–{min(start + width, total)}, "
        parts = _show_progress(stream.chunks(chunk), stream.num_samples, title)
        slices = [part.flatten(1)[:, start : start + width].clone() for part in parts]
        column = Prediction(torch.cat(slices)[:, None])  # (B, 1, width)
        for q in levels:
            pieces[q].append(column.quantile(q)[0])
    return {q: torch.cat(parts).reshape(shape) for q, parts in pieces.items()}


# -- predictors and methods ----------------------------------------------------------------------------


class Predictor(ABC):
    """A fitted model that returns B sampled outputs at x.

    Replicate b of a seed is one function of x: the same on any batch, order, device and process. A subclass implements
    `net`, `stream`, `config` and `from_config`; `predict` and `summarize` follow.

    Example:
        >>> from neuboots.methods import DeterministicPredictor
        >>> predictor = DeterministicPredictor(nn.Linear(2, 3))
        >>> predictor.predict(torch.zeros(4, 2), 10).samples.shape  # (B, N, C)
        torch.Size([10, 4, 3])

    Attributes:
        independent: Whether several outputs are logits of independent labels; `fit` takes it from the loss.
    """

    independent: bool = False

    def as_independent(self) -> Self:
        """Return this predictor for independent labels: `probs` is the sigmoid of each output, not their softmax."""
        new = copy.copy(self)
        vars(new)["independent"] = True
        return new

    @property
    @abstractmethod
    def net(self) -> nn.Module | None:
        """The user's net, whose architecture `save` describes; None for a method without one."""

    @property
    def module(self) -> nn.Module:
        """Module whose state dict holds everything that was learned."""
        assert self.net is not None, "a predictor without a net has its own module"
        return self.net

    @property
    def num_distinct(self) -> int | None:
        """Number of distinct replicates K of an ensemble; None if there are infinitely many."""
        return None

    @abstractmethod
    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        """Return the B replicates at x; call it on `copy_for_thread()`, which is in evaluation mode."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the method's name and options, as JSON."""

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "Predictor":
        """Return the predictor that `config` describes around a net of the saved architecture, without its weights."""
        raise NotImplementedError(f"{cls.__name__} does not implement from_config(config, net)")

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that `save` writes."""
        return self.module.state_dict()

    @final
    def find_not_finite(self) -> str | None:
        """Return the name of a weight or statistic that is NaN or infinite, or None; see `head.find_not_finite`."""
        return find_not_finite(self.state_dict(), dict(self.module.named_parameters()))

    @final
    def predict(self, x: Any, num_samples: int = 100, *, seed: int = 0) -> Prediction:
        """Sample B outputs at x, in one tensor.

        Args:
            x: Inputs: a tensor, or a dict or tuple of tensors.
            num_samples: Number of samples B.
            seed: Seed of the replicates.

        Returns:
            The samples, (B, N, C, *), and their statistics. Gradients are kept only if x requires them.

        Raises:
            ArgumentError: If x holds NaN or infinite values or no tensor, if it is one example without a batch axis, if
                B < 1, or if the samples need more memory than there is.
        """
        wants_grad = any(isinstance(part, Tensor) and part.requires_grad for part in tree_leaves(x))
        with torch.set_grad_enabled(torch.is_grad_enabled() and wants_grad):
            prediction = collect_samples(self._checked_stream(x, num_samples, seed))
        _check_batch_axis(x, prediction.samples.shape[1])
        return prediction

    @final
    def summarize(self, x: Any, num_samples: int = 100, *, seed: int = 0, quantiles: tuple[float, ...] = ()) -> Summary:
        """Compute the statistics of B sampled outputs at x in memory that does not grow with B.

        Args:
            x: Inputs, as for `predict`.
            num_samples: Number of samples B.
            seed: Seed of the replicates.
            quantiles: Levels of the quantiles to compute.

        Returns:
            The statistics.

        Raises:
            ArgumentError: As `predict`, and if B is more than 2²⁴, or all passes together have more than 2⁴⁰ values;
                quantiles need up to B / 32 passes.
        """
        with torch.no_grad():
            summary = summarize_stream(self._checked_stream(x, num_samples, seed), quantiles)
        _check_batch_axis(x, len(summary.mean))
        return summary

    @final
    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the predictor to a folder, from which `neuboots.load` reads it."""
        from neuboots.serialization import save

        save(self, folder)

    def _checked_stream(self, x: Any, num_samples: int, seed: int) -> SampleStream:
        if isinstance(x, np.ndarray):
            x = torch.as_tensor(x)
        check_inputs(x)
        num_samples = check_int("num_samples", num_samples, minimum=1)
        stream = self.copy_for_thread().stream(x, num_samples, seed=check_int("seed", seed))
        return replace(stream, independent=self.independent)

    def copy_for_thread(self) -> Self:
        """Return the current thread's copy, in evaluation mode, which shares all tensors with this predictor.

        `stream` may replace layers of a net for the duration of a call; on the copy nobody else sees that.
        """
        local, now = self.__dict__.setdefault("_local", threading.local()), Predictor.__getstate__(self)
        copier, before, new = getattr(local, "latest", (None, {}, None))
        same = before.keys() == now.keys() and all(now[name] is value for name, value in before.items())
        if copier is None or not same or not copier.is_current():
            copier, new = StructureCopier(), object.__new__(type(self))  # without a reference to self: no cycle
            vars(new).update(copier.copy(now))
            local.latest = copier, now, new
        return cast(Self, new)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()  # at once: another thread may add `_local`
        state.pop("_local", None)
        return state


def _check_batch_axis(x: Any, num_outputs: int) -> None:
    """Raise ArgumentError if the net gives more or fewer outputs than inputs, as it may for x[0] instead of x[:1]."""
    if isinstance(x, Tensor | np.ndarray) and x.shape[:1] != (num_outputs,):
        expected = f"a batch (N, *) of as many inputs as the net gives outputs, here {num_outputs}"
        raise ArgumentError("x", tuple(x.shape), expected)


class Method(Protocol):
    """A frozen dataclass of options whose `fit` turns a net and data into a `Predictor`.

    Example:
        >>> from neuboots import Deterministic
        >>> method: Method = Deterministic()
    """

    def fit(
        self,
        model: nn.Module | Callable[[], nn.Module],
        data: "FitData",
        config: "TrainingConfig | None" = None,
        *,
        val_data: "FitData | None" = None,
    ) -> Predictor:
        """Train a predictor.

        Args:
            model: Module, or a function without arguments that returns one.
            data: Data set of pairs (x, y), pair (inputs, targets) of arrays, or `DataLoader`.
            config: Training options; None: the defaults of `TrainingConfig`.
            val_data: Validation data, as `data`.

        Returns:
            The fitted predictor.
        """


# -- noise of a regression -----------------------------------------------------------------------------


def split_gaussian(prediction: Prediction) -> tuple[Prediction, Tensor]:
    """Split the outputs of a Gaussian head (μ₁…μ_k, log σ²₁…log σ²_k) into means and noise.

    Args:
        prediction: Prediction with 2k outputs.

    Returns:
        The prediction of the means, and the noise std σ, (N, k, *), with σ² the mean over replicates of exp(log σ²).

    Raises:
        ArgumentError: If the number of outputs is odd.

    Example:
        >>> mean, noise = split_gaussian(Prediction(torch.zeros(3, 5, 2)))
        >>> mean.samples.shape, noise[0].tolist()
        (torch.Size([3, 5, 1]), [1.0])
    """
    outputs = prediction.samples.shape[2]
    if outputs % 2:
        raise ArgumentError("prediction", f"{outputs} outputs", "2k outputs: k means, then k values of log σ²")
    k = outputs // 2
    means, log_variances = torch.split(prediction.samples, k, dim=2)
    moments = prediction.moments
    if moments is not None:
        moments = Moments(moments.mean[:, :k], moments.std[:, :k])
    return Prediction(means, moments), log_variances.exp().mean(0).sqrt()


def residual_std(predictor: Predictor, x: Any, y: Tensor) -> Tensor:
    """Estimate the noise standard deviation σ̂ = √(mean (y − E f(x))²) of each output.

    Args:
        predictor: Predictor of a regression.
        x: Held-out inputs.
        y: Their targets.

    Returns:
        σ̂, (C,).

    Raises:
        ArgumentError: If y has another shape than the outputs, or is empty.

    Example:
        >>> from neuboots.methods import DeterministicPredictor
        >>> residual_std(DeterministicPredictor(nn.Identity()), torch.zeros(4, 1), torch.full((4,), 2.0))
        tensor([2.])
    """
    mean = predictor.summarize(x).mean
    if y.numel() == 0 or y.shape[:1] != mean.shape[:1] or y.squeeze().shape != mean.squeeze().shape:
        raise ArgumentError("y", tuple(y.shape), f"targets of the outputs' shape {tuple(mean.shape)}, at least one")
    squares = (y.reshape(mean.shape).to(mean) - mean).square()
    return squares.movedim(1, -1).flatten(0, -2).mean(0).sqrt()


def conformal_quantile(scores: Tensor, counts: Tensor, level: float) -> float:
    """Return the score that a new example stays below with this probability.

    Args:
        scores: Scores of all examples, those of one after those of the other: (S,).
        counts: Number of scores of each example, (n,); examples without any do not count.
        level: Coverage of the sets.

    Returns:
        The quantile; ∞ where there are too few examples.

    Raises:
        ArgumentError: If a score is NaN: it would count as the largest, and others would seem to cover.

    Example:
        >>> conformal_quantile(torch.tensor([3.0, 1.0, 2.0]), torch.ones(3), 0.5)
        2.0
    """
    if bool(scores.isnan().any()):
        raise ArgumentError("scores", "NaN", "numbers", hint="check the outputs of the net")
    counts = counts[counts > 0].long()
    n = len(counts)
    rank = Fraction(str(float(level))) * (n + 1)  # of the level as it was typed: 0.07 · 100 is 7, not 7.000000000000001
    if rank > n:
        return math.inf
    unit, wanted = math.lcm(*set(counts.tolist())), float(rank)
    if unit * n < 1 << 62:  # fractions in integers
        weights, wanted = unit // counts, math.ceil(rank * unit)
    else:
        weights, wanted = 1 / counts.double(), wanted * (1 + 1e-9)  # outwards, by more than sums are off
    ordered, order = scores.sort()
    reached = weights.repeat_interleave(counts)[order].cumsum(0)
    return float(ordered[min(int((reached < wanted).sum()), len(ordered) - 1)])
