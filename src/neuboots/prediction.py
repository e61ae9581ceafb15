"""The waist of the library: B sampled outputs at x, and what they say.

    samples[b] = f_b(x),   p(y | x) ≈ 1/B Σ_b softmax f_b(x)

Every method ends in a `Predictor`; every task knows only that, its `Prediction` and its `Summary`.
Samples are (B, N, C, *): replicate first, then input, output, and pixels or voxels if there are any.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

import torch
from torch import Tensor, nn

from neuboots.keys import draw_keys, uniforms

IntervalKind = Literal["percentile", "normal"]

# Replicates held at once while sums are gathered. A constant, and one that B = 10 fills twice: from then on no
# chunk needs more memory than the one before.
_CHUNK = 5
_HELD = 32  # replicates' worth of values held for quantiles; B / 32 passes over the replicates
_SMALL = 1 << 18  # bytes; below this more replicates at once cost no memory worth saving
_BIG = 1 << 22  # bytes of a chunk above which it is summed in pieces
_PIECE = 1 << 19  # bytes of a piece of one replicate: what is made of it on the way to the sums stays in the cache
_LARGE = 1 << 26  # bytes of replicates in flight while predicting

# -- figures shared by Prediction and Summary ----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and standard deviation of the outputs over infinitely many replicates: (N, C, *) each."""

    mean: Tensor
    std: Tensor


def class_probabilities(outputs: Tensor, axis: int) -> Tensor:
    """softmax over the class axis, at least in single precision: what replicates disagree by is less than half
    precision tells apart. A single output is one logit of the second of two classes."""
    dtype = _single(outputs.dtype)
    if outputs.shape[axis] == 1:
        outputs = outputs.to(dtype)
        return torch.cat([(-outputs).sigmoid(), outputs.sigmoid()], axis)
    return outputs.softmax(axis, dtype=dtype)


def _single(dtype: torch.dtype) -> torch.dtype:
    """At least single precision: a sum of many replicates in half precision stops growing."""
    return torch.promote_types(dtype, torch.float32)


def entropy_of(probs: Tensor, axis: int) -> Tensor:
    """H(p) = −Σ_c p_c log p_c, in nats."""
    tiny = torch.finfo(probs.dtype).tiny  # p = 0 adds 0, not NaN
    return -probs.clamp_min(tiny).log_().mul_(probs).sum(axis)


def _class_sums(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_b p_b and Σ_b H(p_b) over a chunk of replicates: (N, C, *), (N, *)."""
    if len(samples) == 1:
        p = class_probabilities(samples[0], 1)
        return p, entropy_of(p, 1)
    parts = _in_parts(samples)
    p = class_probabilities(parts[0], 2)
    probs, entropy = p.sum(0), entropy_of(p, 2).sum(0)
    for part in parts[1:]:
        p = class_probabilities(part, 2)
        probs, entropy = probs.add_(p.sum(0)), entropy.add_(entropy_of(p, 2).sum(0))
    return probs, entropy


def _in_parts(samples: Tensor) -> tuple[Tensor, ...]:
    """A chunk at once where replicates are small, else one by one: each step makes several copies of its part."""
    return torch.split(samples, len(samples) if bytes_of(samples[0]) <= _SMALL else 1)


def _std(samples: Tensor) -> Tensor:
    """Over the first axis, with B − 1 in the denominator; zero for a single one, and for none at all."""
    return samples.std(0) if len(samples) > 1 and samples.numel() else torch.zeros_like(samples[0])


def bytes_of(tensor: Tensor) -> int:
    return max(1, tensor.numel() * tensor.element_size())


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise ValueError(f"got level {level}; expected a number between 0 and 1, such as 0.95")


def _tensors(x: Any) -> list[Tensor]:
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else [x]
    return [part for part in parts if isinstance(part, Tensor)]


def _wants_grad(x: Any) -> bool:
    return any(tensor.requires_grad for tensor in _tensors(x))


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


def _normal_interval(mean: Tensor, std: Tensor, level: float) -> tuple[Tensor, Tensor]:
    half = math.sqrt(2.0) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64))) * std
    return mean - half, mean + half


class _Figures:
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
        return entropy_of(self.probs, 1)

    @property
    def mutual_information(self) -> Tensor:
        """H(1/B Σ_b p_b) − 1/B Σ_b H(p_b): how far the replicates disagree, in nats: (N, *)."""
        gap = self.entropy - self.expected_entropy
        rounding = 16 * torch.finfo(gap.dtype).eps * self.entropy.clamp_min(1)  # and not disagreement; NaN stays NaN
        return gap.masked_fill(gap <= rounding, 0.0)

    def interval(self, level: float = 0.95, *, kind: IntervalKind = "normal") -> tuple[Tensor, Tensor]:
        """The confidence band of the regression function: mean ± z·std, or percentiles of the replicates."""
        _check_level(level)
        if kind == "normal":
            return _normal_interval(self.mean, self.std, level)
        if kind != "percentile":
            raise ValueError(f"got kind={kind!r}; expected 'normal' or 'percentile'")
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
class Prediction(_Figures):
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
        return _std(self.samples)

    @cached_property
    def _class_figures(self) -> tuple[Tensor, Tensor]:
        chunks = torch.split(self.samples, _summary_chunk(bytes_of(self.samples[0])))
        probs, entropy = _class_sums(chunks[0])
        for chunk in chunks[1:]:
            more_probs, more_entropy = _class_sums(chunk)
            probs, entropy = probs + more_probs, entropy + more_entropy
        return probs / self.num_samples, entropy / self.num_samples

    @property
    def probs(self) -> Tensor:
        """1/B Σ_b softmax f_b(x): (N, C, *)."""
        return self._class_figures[0]

    @property
    def expected_entropy(self) -> Tensor:
        """1/B Σ_b H(softmax f_b(x)): the part that more data would not remove, in nats: (N, *)."""
        return self._class_figures[1]

    def quantile(self, q: float) -> Tensor:
        """The q-quantile of the replicates, linear between order statistics: (N, C, *)."""
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"got q = {q}; expected a number from 0 to 1")
        return _quantile(self.samples, q)


@dataclass(frozen=True, eq=False)
class Summary(_Figures):
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


# -- streaming -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """B replicates at one x: `chunks(size)` gives them in order, `size` at a time, anew at each call."""

    num_samples: int
    replicate_bytes: int
    chunks: Callable[[int], Iterator[Tensor]]
    moments: Moments | None = None


def stream_passes(num_samples: int, run: Callable[[int], Tensor]) -> Stream:
    """A stream whose replicate b is the output of a pass of its own, run(b): (N, C, *)."""
    first = run(0)

    def chunks(size: int) -> Iterator[Tensor]:
        for start in range(0, num_samples, size):
            out = first.new_empty(min(size, num_samples - start), *first.shape)
            for i in range(len(out)):
                out[i] = first if start + i == 0 else run(start + i)
            yield out
            del out  # the next chunk finds the memory as this one did

    return Stream(num_samples, bytes_of(first), chunks)


def member_order(num_members: int, num_samples: int, *, seed: int) -> Tensor:
    """Which of K members each replicate is: every K replicates are all of them, in an order drawn by the seed: (B,)."""
    rounds = -(-num_samples // num_members)
    drawn = uniforms(draw_keys(torch.arange(rounds), seed, "members")[:, None], torch.arange(num_members))
    return drawn.argsort(1).flatten()[:num_samples]


def stream_members(num_samples: int, num_members: int, run: Callable[[Tensor], Tensor], *, seed: int) -> Stream:
    """A stream over K members: replicates are members, each run once: run(numbers) gives (len(numbers), N, C, *).

    Where all K are run, mean and standard deviation are those of the K members (with K − 1 in the denominator),
    however often B counts each.
    """
    order = member_order(num_members, num_samples, seed=seed)
    wanted = torch.unique(order)  # sorted
    outputs = run(wanted)
    place = torch.searchsorted(wanted, order)

    def chunks(size: int) -> Iterator[Tensor]:
        for start in range(0, num_samples, size):
            yield outputs[place[start : start + size].to(outputs.device)]

    moments = None
    if len(wanted) == num_members:
        moments = Moments(outputs.mean(0), _std(outputs))
    return Stream(num_samples, bytes_of(outputs[0]), chunks, moments)


def gather(stream: Stream) -> Prediction:
    """All replicates in one tensor."""
    size = max(1, _LARGE // stream.replicate_bytes)
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


def _summary_chunk(replicate_bytes: int) -> int:
    few = min(_CHUNK, max(1, _LARGE // (2 * replicate_bytes)))
    return max(few, _SMALL // replicate_bytes)


def _flat(chunk: Tensor) -> Tensor:
    """(b, N, C, *) as (b, N, C, P), one pixel where there are none."""
    return chunk.reshape(*chunk.shape[:3], math.prod(chunk.shape[3:]))


def _pieces(chunk: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and pixels of a chunk (b, N, C, P), a piece at a time: what is made of one stays in the cache."""
    _, rows, outputs, pixels = chunk.shape
    at_once = max(1, _PIECE // (outputs * chunk.element_size()))  # pixels
    row_step, pixel_step = max(1, at_once // pixels), min(pixels, at_once)
    for row in range(0, rows, row_step):
        for pixel in range(0, pixels, pixel_step):
            yield slice(row, row + row_step), slice(pixel, pixel + pixel_step)


@dataclass
class _Spread:
    """The mean and Σ_b (z_b − mean)² of the replicates seen so far: (N, C, P)."""

    mean: Tensor
    squares: Tensor

    def at(self, rows: slice, pixels: slice) -> "_Spread":
        return _Spread(self.mean[rows, :, pixels], self.squares[rows, :, pixels])

    def add(self, chunk: Tensor, before: int) -> None:
        """Chan's rule, in place; a single replicate has no spread of its own."""
        more, chunk = len(chunk), chunk.to(self.mean.dtype)
        mean = chunk[0] if more == 1 else chunk.mean(0)
        shift = mean - self.mean
        self.mean.add_(shift, alpha=more / (before + more))
        self.squares.addcmul_(shift, shift, value=before * more / (before + more))
        for part in _in_parts(chunk) if more > 1 else ():
            self.squares += (part - mean).square_().sum(0)


@dataclass
class _Running:
    """Σ_b p_b: (N, C, P) and Σ_b H(p_b): (N, P) over the replicates seen so far; their spread, if it is not known."""

    probs: Tensor
    entropy: Tensor
    spread: _Spread | None

    @classmethod
    def nothing(cls, chunk: Tensor, *, spread: bool) -> "_Running":
        """Of no replicate, for chunks (b, N, C, *) like this one."""
        rows, outputs, pixels = *chunk.shape[1:3], math.prod(chunk.shape[3:])
        zeros = partial(chunk.new_zeros, dtype=_single(chunk.dtype))
        probs = zeros((rows, max(2, outputs), pixels))  # one output is one logit of two classes
        around = [zeros((rows, outputs, pixels)) for _ in range(2 * spread)]
        return cls(probs, zeros((rows, pixels)), _Spread(*around) if spread else None)

    def at(self, rows: slice, pixels: slice) -> "_Running":
        """A view of some rows and pixels."""
        spread = None if self.spread is None else self.spread.at(rows, pixels)
        return _Running(self.probs[rows, :, pixels], self.entropy[rows, pixels], spread)

    def add(self, chunk: Tensor, before: int) -> None:
        """A chunk (b, N, C, P) after `before` replicates, in place."""
        probs, entropy = _class_sums(chunk)
        self.probs += probs
        self.entropy += entropy
        if self.spread is not None:
            self.spread.add(chunk, before)

    def add_all(self, group: list[Tensor], before: int) -> None:
        """Chunks (b, N, C, *), big ones on the CPU piece by piece; here, so that no loop's name outlives the call."""
        flat = [_flat(chunk) for chunk in group]
        if flat[0].device.type != "cpu" or sum(map(bytes_of, flat)) <= _BIG:
            for chunk in flat:
                self.add(chunk, before)
                before += len(chunk)
            return
        for rows, pixels in _pieces(flat[0]):
            piece = self.at(rows, pixels)
            for b, replicate in enumerate(itertools.chain.from_iterable(flat)):
                piece.add(replicate[None, rows, :, pixels], before + b)


def accumulate(stream: Stream, quantiles: tuple[float, ...] = ()) -> Summary:
    """Mean and variance by Chan's merging rule, probabilities and entropies by running sums."""
    running: _Running | None = None
    count = 0
    size = min(_summary_chunk(stream.replicate_bytes), stream.num_samples)
    chunks = iter(stream.chunks(size))
    # a few at a time, so that the sums of a piece stay in the cache as well
    while group := list(itertools.islice(chunks, max(1, _CHUNK // size))):
        shape, dtype = group[0].shape[1:], group[0].dtype  # (N, C, *)
        if running is None:
            running = _Running.nothing(group[0], spread=stream.moments is None)
        running.add_all(group, count)
        count += sum(map(len, group))
        group.clear()  # before the next ones are made: every group finds the memory as the last one did
    assert running is not None, "a stream has at least one replicate"
    if running.spread is None:
        assert stream.moments is not None, "a spread that is not gathered is known"
        mean, std = stream.moments.mean, stream.moments.std
    else:
        mean = running.spread.mean.to(dtype).reshape(shape)
        std = running.spread.squares.div_(max(1, count - 1)).sqrt_().to(dtype).reshape(shape)
    probs = running.probs.div_(count).reshape(shape[0], running.probs.shape[1], *shape[2:])
    entropy = running.entropy.div_(count).reshape(shape[0], *shape[2:])
    return Summary(count, mean, std, probs, entropy, _stream_quantiles(stream, quantiles, shape))


def _stream_quantiles(stream: Stream, levels: tuple[float, ...], shape: torch.Size) -> dict[float, Tensor]:
    """Exact quantiles in bounded memory: all B replicates of one slice of the outputs after another."""
    if not levels:
        return {}
    total = shape.numel()
    if total == 0:
        return {q: torch.empty(shape) for q in levels}
    chunk = _summary_chunk(stream.replicate_bytes)
    held = max(chunk, _HELD)
    width = max(1, min(total, total * held // stream.num_samples))
    pieces: dict[float, list[Tensor]] = {q: [] for q in levels}
    for start in range(0, total, width):
        slices = [part.flatten(1)[:, start : start + width].clone() for part in stream.chunks(chunk)]
        column = Prediction(torch.cat(slices)[:, None])  # (B, 1, width)
        for q in levels:
            pieces[q].append(column.quantile(q)[0])
    return {q: torch.cat(parts).reshape(shape) for q, parts in pieces.items()}


# -- the contract --------------------------------------------------------------------------------------


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
    def stream(self, x: Any, num_samples: int, *, seed: int) -> Stream:
        """The B replicates at x."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """What `save` writes beside the tensors: the method's name and options, as JSON."""

    @classmethod
    def restore(cls, config: dict[str, Any], net: nn.Module) -> "Predictor":
        """The predictor that `config` describes around a net of the right architecture; `load` fills in the tensors."""
        raise ValueError(f"{cls.__name__} cannot be loaded; expected a class method restore(config, net)")

    def state(self) -> dict[str, Tensor]:
        """The tensors that `save` writes."""
        return self.module.state_dict()

    @final
    def predict(self, x: Any, num_samples: int = 100, *, seed: int = 0) -> Prediction:
        """B replicates in one tensor, (B, N, C, *). Gradients are kept only if x itself asks for them."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and _wants_grad(x)):
            return gather(self._checked(x, num_samples, seed))

    @final
    def summarize(self, x: Any, num_samples: int = 100, *, seed: int = 0, quantiles: tuple[float, ...] = ()) -> Summary:
        """The figures of B replicates, in memory that does not grow with B."""
        with torch.no_grad():
            return accumulate(self._checked(x, num_samples, seed), quantiles)

    def _checked(self, x: Any, num_samples: int, seed: int) -> Stream:
        if not isinstance(num_samples, int) or num_samples < 1:
            raise ValueError(f"got B = {num_samples!r} replicates; expected num_samples ≥ 1, a whole number")
        if not isinstance(seed, int):
            raise ValueError(f"got seed={seed!r}; expected a whole number")
        check_inputs(x)
        return self.stream(x, num_samples, seed=seed)


class Method(Protocol):
    """A frozen dataclass of options that turns a net and data into a Predictor."""

    def fit(self, make_net: Any, data: Any, recipe: Any) -> Predictor: ...
