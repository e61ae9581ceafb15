"""The waist of the library: B sampled outputs at x, and what they say.

    samples[b] = f_b(x),   p(y | x) ≈ 1/B Σ_b softmax f_b(x)

Every method ends in a `Predictor`; every task knows only that, its `Prediction` and its `Summary`.
Samples are (B, N, C, *): replicate first, then input, output, and pixels or voxels if there are any.

What B sampled outputs say: from samples in memory (`Prediction`), or gathered over a stream of them (`Summary`).

Replicates in chunks: what every method gives, and what `predict` gathers.

The figures of a stream of replicates, in memory that does not grow with B.

mean and Σ_b (z_b − mean)² by Chan's rule,  Σ_b p_b and Σ_b H(p_b) as they come

The contract of every method: a `Predictor` gives B sampled outputs at x.

Regression: the noise around the regression function, which no number of replicates removes.

y = f(x) + ε,   ε ~ (0, σ²)
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

import torch
from torch import Tensor, nn

from neuboots._prng import derive_keys, draw_uniform
from neuboots._streaming import (
    MAX_BYTES_IN_FLIGHT,
    at_least_float32,
    categorical_entropy,
    class_probabilities,
    num_bytes,
    sample_std,
    split_samples,
    sum_probs_and_entropy,
    summary_chunk_size,
)

IntervalMethod = Literal["percentile", "normal"]


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and standard deviation of the outputs over infinitely many replicates: (N, C, *) each."""

    mean: Tensor
    std: Tensor


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise ValueError(f"got level {level}; expected a number between 0 and 1, such as 0.95")


def _normal_interval(mean: Tensor, std: Tensor, level: float) -> tuple[Tensor, Tensor]:
    half = math.sqrt(2.0) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64))) * std
    return mean - half, mean + half


class _Statistics:
    """What follows from mean, std, probs and expected entropy, by one formula for both holders."""

    if TYPE_CHECKING:  # each holder has these, as fields or as properties

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
    def labels(self) -> Tensor:
        """argmax of the predictive probabilities: (N, *)."""
        return self.probs.argmax(1)

    @property
    def confidence(self) -> Tensor:
        """The largest predictive probability: (N, *)."""
        return self.probs.amax(1)

    @property
    def entropy(self) -> Tensor:
        """H(1/B Σ_b p_b): the total uncertainty, in nats: (N, *)."""
        return categorical_entropy(self.probs, 1)

    @property
    def mutual_information(self) -> Tensor:
        """H(1/B Σ_b p_b) − 1/B Σ_b H(p_b): how far the replicates disagree, in nats: (N, *)."""
        gap = self.entropy - self.expected_entropy
        rounding = 16 * torch.finfo(gap.dtype).eps * self.entropy.clamp_min(1)  # and not disagreement; NaN stays NaN
        return gap.masked_fill(gap <= rounding, 0.0)

    def interval(self, level: float = 0.95, *, method: IntervalMethod = "normal") -> tuple[Tensor, Tensor]:
        """The confidence band of the regression function: mean ± z·std, or percentiles of the replicates."""
        _check_level(level)
        if method == "normal":
            return _normal_interval(self.mean, self.std, level)
        if method != "percentile":
            raise ValueError(f"got kind={method!r}; expected 'normal' or 'percentile'")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def prediction_interval(self, level: float = 0.95, *, noise_std: Tensor | float) -> tuple[Tensor, Tensor]:
        """Where a new y falls: mean ± z √(std² + σ²), with σ the standard deviation of the noise.

        `interval` is the band of the regression function; this one also holds the noise around it.
        `residual_std` estimates σ on held-out data; `split_gaussian` reads it off a Gaussian head.
        """
        _check_level(level)
        return _normal_interval(self.mean, self.predictive_std(noise_std), level)

    def predictive_std(self, noise_std: Tensor | float) -> Tensor:
        """√(std² + σ²): the standard deviation of a new y: (N, C, *). σ is one number, (C,), or one an element."""
        noise_std = torch.as_tensor(noise_std)
        if not bool((noise_std >= 0).all()):
            raise ValueError("got a negative or NaN noise_std; expected standard deviations ≥ 0")
        shape = self.mean.shape
        noise = noise_std.view(-1, *[1] * (len(shape) - 2)) if noise_std.ndim == 1 else noise_std  # (C,): per output
        axes = zip(reversed(noise.shape), reversed(shape), strict=False)
        if noise.ndim > len(shape) or any(got not in (1, expected) for got, expected in axes):
            raise ValueError(
                f"got noise_std of shape {tuple(noise_std.shape)} for outputs {tuple(shape)}; expected (C,), one "
                "number for each output, or one for each element"
            )
        return (self.std**2 + noise.to(self.std) ** 2).sqrt()


@dataclass(frozen=True, eq=False)
class Prediction(_Statistics):
    """B sampled outputs, (B, N, C, *), and every figure of them; exact moments where the method knows them.

    >>> p = Prediction(torch.tensor([[[0.0, 1.0]], [[0.0, 3.0]]]))  # B = 2, N = 1, C = 2
    >>> p.mean.tolist(), p.labels.tolist()
    ([[0.0, 2.0]], [1])
    """

    samples: Tensor
    moments: Moments | None = None

    def __post_init__(self) -> None:
        if self.samples.ndim < 3 or self.samples.shape[0] < 1:
            raise ValueError(f"got samples of shape {tuple(self.samples.shape)}; expected (B, N, C, *) with B ≥ 1")

    @property
    def num_samples(self) -> int:
        return self.samples.shape[0]

    @property
    def mean(self) -> Tensor:
        """E f(x): exact where known, else the mean of the samples: (N, C, *)."""
        return self.samples.mean(0) if self.moments is None else self.moments.mean

    @property
    def std(self) -> Tensor:
        """The standard deviation of f(x) over replicates: (N, C, *); zero for a single sample."""
        if self.moments is not None:
            return self.moments.std
        return sample_std(self.samples)

    @cached_property
    def _probs_and_entropy(self) -> tuple[Tensor, Tensor]:
        chunks = torch.split(self.samples, summary_chunk_size(num_bytes(self.samples[0])))
        parts = [part for chunk in chunks for part in split_samples(chunk)]  # views
        probs, entropy = sum_probs_and_entropy(parts[0])
        for part in parts[1:]:
            more_probs, more_entropy = sum_probs_and_entropy(part)
            probs, entropy = probs + more_probs, entropy + more_entropy
        return probs / self.num_samples, entropy / self.num_samples

    @property
    def probs(self) -> Tensor:
        """1/B Σ_b softmax f_b(x): (N, C, *)."""
        return self._probs_and_entropy[0]

    @property
    def expected_entropy(self) -> Tensor:
        """1/B Σ_b H(softmax f_b(x)): the part that more data would not remove, in nats: (N, *)."""
        return self._probs_and_entropy[1]

    def quantile(self, q: float) -> Tensor:
        """The q-quantile of the replicates, linear between order statistics: (N, C, *)."""
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"got q = {q}; expected a number from 0 to 1")
        return _quantile(self.samples, q)


@dataclass(frozen=True, eq=False)
class Summary(_Statistics):
    """The figures of a Prediction, gathered over chunks of B: memory does not grow with B."""

    num_samples: int
    mean: Tensor
    std: Tensor
    probs: Tensor
    expected_entropy: Tensor
    quantiles: dict[float, Tensor] = field(default_factory=dict)

    def quantile(self, q: float) -> Tensor:
        """The q-quantile of the replicates, if it was asked for: (N, C, *)."""
        for level, value in self.quantiles.items():
            if math.isclose(level, q, abs_tol=1e-9):
                return value
        raise ValueError(
            f"quantile {q:g} was not gathered (gathered: {sorted(self.quantiles) or 'none'}): ask for it with "
            f"summarize(x, B, quantiles=({q:g},)), or take interval(kind='normal')"
        )


def _quantile(samples: Tensor, q: float) -> Tensor:
    """torch.quantile has a size limit; two order statistics have none."""
    rank = q * (samples.shape[0] - 1)
    low = math.floor(rank)
    lower = samples.kthvalue(low + 1, dim=0).values
    if rank == low:
        return lower
    return lower.lerp(samples.kthvalue(low + 2, dim=0).values, rank - low)


@dataclass(frozen=True)
class SampleStream:
    """B replicates at one x: `chunks(size)` gives them in order, `size` at a time, anew at each call."""

    num_samples: int
    replicate_bytes: int
    chunks: Callable[[int], Iterator[Tensor]]
    moments: Moments | None = None


def stream_forward_passes(num_samples: int, run: Callable[[int], Tensor]) -> SampleStream:
    """A stream whose replicate b is the output of a pass of its own, run(b): (N, C, *)."""
    first = run(0)

    def chunks(size: int) -> Iterator[Tensor]:
        for start in range(0, num_samples, size):
            out = first.new_empty(min(size, num_samples - start), *first.shape)
            for i in range(len(out)):
                out[i] = first if start + i == 0 else run(start + i)
            yield out
            del out  # the next chunk finds the memory as this one did

    return SampleStream(num_samples, num_bytes(first), chunks)


def draw_member_order(num_members: int, num_samples: int, *, seed: int) -> Tensor:
    """Which of K members each replicate is: every K replicates are all of them, in an order drawn by the seed: (B,)."""
    rounds = -(-num_samples // num_members)
    drawn = draw_uniform(derive_keys(torch.arange(rounds), seed, "members")[:, None], torch.arange(num_members))
    return drawn.argsort(1).flatten()[:num_samples]


def stream_members(num_samples: int, num_members: int, run: Callable[[Tensor], Tensor], *, seed: int) -> SampleStream:
    """A stream over K members: replicates are members, each run once: run(numbers) gives (len(numbers), N, C, *).

    Where all K are run, mean and standard deviation are those of the K members (with K − 1 in the denominator),
    however often B counts each.
    """
    order = draw_member_order(num_members, num_samples, seed=seed)
    wanted = torch.unique(order)  # sorted
    outputs = run(wanted)
    place = torch.searchsorted(wanted, order)

    def chunks(size: int) -> Iterator[Tensor]:
        for start in range(0, num_samples, size):
            yield outputs[place[start : start + size].to(outputs.device)]

    moments = None
    if len(wanted) == num_members:
        moments = Moments(outputs.mean(0), sample_std(outputs))
    return SampleStream(num_samples, num_bytes(outputs[0]), chunks, moments)


def collect_samples(stream: SampleStream) -> Prediction:
    """All replicates in one tensor."""
    size = max(1, MAX_BYTES_IN_FLIGHT // stream.replicate_bytes)
    chunks = stream.chunks(min(size, stream.num_samples))
    first = next(chunks)
    if len(first) == stream.num_samples:
        return Prediction(first, stream.moments)
    samples = first.new_empty(stream.num_samples, *first.shape[1:])
    samples[: (done := len(first))] = first
    for chunk in chunks:
        samples[done : done + len(chunk)] = chunk
        done += len(chunk)
    return Prediction(samples, stream.moments)


MAX_QUANTILE_SAMPLES = 32  # replicates' worth of values held for quantiles; B / 32 passes over the replicates


def summarize_stream(stream: SampleStream, quantiles: tuple[float, ...] = ()) -> Summary:
    """Mean and variance by Chan's merging rule, probabilities and entropies by running sums."""
    running: _RunningSums | None = None
    for chunk in stream.chunks(min(summary_chunk_size(stream.replicate_bytes), stream.num_samples)):
        if running is None:
            running = _RunningSums.nothing(chunk, spread=stream.moments is None)
            shape, dtype = chunk.shape[1:], chunk.dtype  # (N, C, *)
        running.add(chunk)
        del chunk  # before the next one is made: every chunk finds the memory as the last one did
    assert running is not None, "a stream has at least one replicate"
    if running.spread is None:
        assert stream.moments is not None, "a spread that is not gathered is known"
        mean, std = stream.moments.mean, stream.moments.std
    else:
        mean = running.spread.mean.to(dtype)
        std = running.spread.squares.div_(max(1, running.count - 1)).sqrt_().to(dtype)
    probs, entropy = running.probs.div_(running.count), running.entropy.div_(running.count)
    return Summary(running.count, mean, std, probs, entropy, _stream_quantiles(stream, quantiles, shape))


@dataclass
class _RunningVariance:
    """The mean and Σ_b (z_b − mean)² of the replicates seen so far: (N, C, *)."""

    mean: Tensor
    squares: Tensor

    def add(self, part: Tensor, before: int) -> None:
        """Some replicates (b, N, C, *), in place (Chan's rule)."""
        more, part = len(part), part.to(self.mean.dtype)
        mean = part.mean(0)
        self._move(mean - self.mean, before, more)
        self.squares += (part - mean).square_().sum(0)

    def add_one(self, z: Tensor, before: int, scratch: Tensor) -> None:
        """The same for one replicate (N, C, *), which has no spread of its own."""
        self._move(torch.sub(z, self.mean, out=scratch[:, : z.shape[1]]), before, 1)

    def _move(self, shift: Tensor, before: int, more: int) -> None:
        self.mean.add_(shift, alpha=more / (before + more))
        self.squares.addcmul_(shift, shift, value=before * more / (before + more))


@dataclass
class _RunningSums:
    """Σ_b p_b: (N, C, *) and Σ_b H(p_b): (N, *) over the replicates seen so far; their spread, if it is not known."""

    probs: Tensor
    entropy: Tensor
    spread: _RunningVariance | None
    count: int = 0
    # What is made of a big replicate on the way lies in memory that is kept: to ask the system for as much anew for
    # each one takes longer than the sums.
    scratch: tuple[Tensor, Tensor] | None = None

    @classmethod
    def nothing(cls, chunk: Tensor, *, spread: bool) -> "_RunningSums":
        """Of no replicate, for chunks (b, N, C, *) like this one."""
        rows, outputs, *pixels = chunk.shape[1:]
        zeros = partial(chunk.new_zeros, dtype=at_least_float32(chunk.dtype))
        probs = zeros((rows, max(2, outputs), *pixels))  # one output is one logit of two classes
        around = [zeros((rows, outputs, *pixels)) for _ in range(2 * spread)]
        return cls(probs, zeros((rows, *pixels)), _RunningVariance(*around) if spread else None)

    def add(self, chunk: Tensor) -> None:
        """A chunk (b, N, C, *), in place: at once where it is small."""
        for part in split_samples(chunk):
            if len(part) == 1:
                self._add_one(part[0])
            else:
                probs, entropy = sum_probs_and_entropy(part)
                self.probs += probs
                self.entropy += entropy
                if self.spread is not None:
                    self.spread.add(part, self.count)
            self.count += len(part)

    def _add_one(self, z: Tensor) -> None:
        """One replicate (N, C, *)."""
        if self.scratch is None:
            self.scratch = torch.empty_like(self.probs), torch.empty_like(self.probs)
        p, scratch = self.scratch
        self.probs += class_probabilities(z, 1, out=p)
        self.entropy += categorical_entropy(p, 1, scratch=scratch)
        if self.spread is not None:
            self.spread.add_one(z, self.count, scratch)


def _stream_quantiles(stream: SampleStream, levels: tuple[float, ...], shape: torch.Size) -> dict[float, Tensor]:
    """Exact quantiles in bounded memory: all B replicates of one slice of the outputs after another."""
    if not levels:
        return {}
    total = shape.numel()
    if total == 0:
        return {q: torch.empty(shape) for q in levels}
    chunk = summary_chunk_size(stream.replicate_bytes)
    held = max(chunk, MAX_QUANTILE_SAMPLES)
    width = max(1, min(total, total * held // stream.num_samples))
    pieces: dict[float, list[Tensor]] = {q: [] for q in levels}
    for start in range(0, total, width):
        slices = [part.flatten(1)[:, start : start + width].clone() for part in stream.chunks(chunk)]
        column = Prediction(torch.cat(slices)[:, None])  # (B, 1, width)
        for q in levels:
            pieces[q].append(column.quantile(q)[0])
    return {q: torch.cat(parts).reshape(shape) for q, parts in pieces.items()}


class Predictor(ABC):
    """Gives B sampled outputs at x. A replicate is named by (seed, b) and is one function of x:
    the same seed gives the same B functions on any batch, order, device and process.

    `save` writes the state of `module` and describes the architecture of `net`; a class method
    `restore(config, net)` makes of that description a predictor whose module the saved tensors fit.
    """

    @property
    @abstractmethod
    def net(self) -> nn.Module | None:
        """The net as its maker built it, before any surgery; None for a method that has none."""

    @property
    def module(self) -> nn.Module:
        """All that was learned: whatever prediction needs is in its state."""
        assert self.net is not None, "a predictor without a net has a module of its own"
        return self.net

    @property
    def num_distinct(self) -> int | None:
        """K, where the replicates are K members and no more; None where there are infinitely many."""
        return None

    @abstractmethod
    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        """The B replicates at x."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """What `save` writes beside the tensors: the method's name and options, as JSON."""

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "Predictor":
        """The predictor that `config` describes around a net of the right architecture; `load_dataset` fills in the tensors."""
        raise ValueError(f"{cls.__name__} cannot be loaded; expected a class method restore(config, net)")

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors that `save` writes."""
        return self.module.state_dict()

    @final
    def predict(self, x: Any, num_samples: int = 100, *, seed: int = 0) -> Prediction:
        """B replicates in one tensor, (B, N, C, *). Gradients are kept only if x itself asks for them."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and _wants_grad(x)):
            return collect_samples(self._checked(x, num_samples, seed))

    @final
    def summarize(self, x: Any, num_samples: int = 100, *, seed: int = 0, quantiles: tuple[float, ...] = ()) -> Summary:
        """The figures of B replicates, in memory that does not grow with B."""
        with torch.no_grad():
            return summarize_stream(self._checked(x, num_samples, seed), quantiles)

    def _checked(self, x: Any, num_samples: int, seed: int) -> SampleStream:
        if not isinstance(num_samples, int) or num_samples < 1:
            raise ValueError(f"got B = {num_samples!r} replicates; expected num_samples ≥ 1, a whole number")
        if not isinstance(seed, int):
            raise ValueError(f"got seed={seed!r}; expected a whole number")
        check_inputs(x)
        return self.stream(x, num_samples, seed=seed)


class Method(Protocol):
    """A frozen dataclass of options that turns a net and data into a Predictor."""

    def fit(self, model: Any, data: Any, config: Any) -> Predictor: ...


def check_inputs(x: Any) -> None:
    """Refuse what is not tensors, and NaN and infinite values: they would come out as silent NaNs."""
    tensors = _tensors(x)
    if not tensors:
        raise ValueError(
            f"got inputs of type {type(x).__name__}; expected a tensor (torch.as_tensor(x) makes one of an array), "
            "a dict of tensors, or a tuple of them"
        )
    for tensor in tensors:
        if tensor.dtype == torch.uint8:
            raise ValueError("got uint8 inputs; expected floating-point numbers: use x.float() / 255")
        # A sum of finite numbers may overflow, but a finite sum has no NaN and no infinity in it: one cheap read.
        if tensor.is_floating_point() and not torch.isfinite(tensor.detach().sum()):
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                raise ValueError(
                    f"the input has {bad} NaN or infinite value(s) of {tensor.numel()}; expected finite "
                    "numbers: fill or drop them before predicting"
                )


def _tensors(x: Any) -> list[Tensor]:
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else [x]
    return [part for part in parts if isinstance(part, Tensor)]


def _wants_grad(x: Any) -> bool:
    return any(tensor.requires_grad for tensor in _tensors(x))


def split_gaussian(prediction: Prediction) -> tuple[Prediction, Tensor]:
    """A Gaussian head's outputs (μ₁…μ_k, log σ²₁…log σ²_k) as a Prediction of μ and the noise std σ: (N, k, *).

    σ² is the mean over replicates of exp(log σ²).

    >>> mean, noise = split_gaussian(Prediction(torch.zeros(3, 5, 2)))
    >>> mean.samples.shape, noise[0].tolist()
    (torch.Size([3, 5, 1]), [1.0])
    """
    outputs = prediction.samples.shape[2]
    if outputs % 2:
        raise ValueError(f"got {outputs} outputs; expected an even number: k means, then k logarithms of variances")
    k = outputs // 2
    means, log_variances = torch.split(prediction.samples, k, dim=2)
    moments = prediction.moments
    if moments is not None:
        moments = Moments(moments.mean[:, :k], moments.std[:, :k])
    return Prediction(means, moments), log_variances.exp().mean(0).sqrt()


def residual_std(predictor: Predictor, x: Any, y: Tensor) -> Tensor:
    """σ̂ = √(mean (y − E f(x))²), one for each output: (C,). Use data that the net was not trained on."""
    if y.numel() == 0:
        raise ValueError("got no targets; expected at least one held-out point")
    mean = predictor.summarize(x, 100).mean
    if y.shape[:1] != mean.shape[:1] or y.squeeze().shape != mean.squeeze().shape:
        raise ValueError(f"got targets of shape {tuple(y.shape)}; expected {tuple(mean.shape)}, as the net's outputs")
    squares = (y.reshape(mean.shape).to(mean) - mean).square()
    return squares.movedim(1, -1).flatten(0, -2).mean(0).sqrt()
