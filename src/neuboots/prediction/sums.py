"""The figures of a stream of replicates, in memory that does not grow with B.

mean and Σ_b (z_b − mean)² by Chan's rule,  Σ_b p_b and Σ_b H(p_b) as they come
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from neuboots.prediction.figures import Prediction, Summary
from neuboots.prediction.probabilities import (
    class_probabilities,
    class_sums,
    entropy_of,
    in_parts,
    single_precision,
    summary_chunk,
)
from neuboots.prediction.streams import Stream

HELD = 32  # replicates' worth of values held for quantiles; B / 32 passes over the replicates


def accumulate(stream: Stream, quantiles: tuple[float, ...] = ()) -> Summary:
    """Mean and variance by Chan's merging rule, probabilities and entropies by running sums."""
    running: _Running | None = None
    for chunk in stream.chunks(min(summary_chunk(stream.replicate_bytes), stream.num_samples)):
        if running is None:
            running = _Running.nothing(chunk, spread=stream.moments is None)
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
class _Spread:
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
class _Running:
    """Σ_b p_b: (N, C, *) and Σ_b H(p_b): (N, *) over the replicates seen so far; their spread, if it is not known."""

    probs: Tensor
    entropy: Tensor
    spread: _Spread | None
    count: int = 0
    # What is made of a big replicate on the way lies in memory that is kept: to ask the system for as much anew for
    # each one takes longer than the sums.
    scratch: tuple[Tensor, Tensor] | None = None

    @classmethod
    def nothing(cls, chunk: Tensor, *, spread: bool) -> "_Running":
        """Of no replicate, for chunks (b, N, C, *) like this one."""
        rows, outputs, *pixels = chunk.shape[1:]
        zeros = partial(chunk.new_zeros, dtype=single_precision(chunk.dtype))
        probs = zeros((rows, max(2, outputs), *pixels))  # one output is one logit of two classes
        around = [zeros((rows, outputs, *pixels)) for _ in range(2 * spread)]
        return cls(probs, zeros((rows, *pixels)), _Spread(*around) if spread else None)

    def add(self, chunk: Tensor) -> None:
        """A chunk (b, N, C, *), in place: at once where it is small."""
        for part in in_parts(chunk):
            if len(part) == 1:
                self._add_one(part[0])
            else:
                probs, entropy = class_sums(part)
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
        self.entropy += entropy_of(p, 1, scratch=scratch)
        if self.spread is not None:
            self.spread.add_one(z, self.count, scratch)


def _stream_quantiles(stream: Stream, levels: tuple[float, ...], shape: torch.Size) -> dict[float, Tensor]:
    """Exact quantiles in bounded memory: all B replicates of one slice of the outputs after another."""
    if not levels:
        return {}
    total = shape.numel()
    if total == 0:
        return {q: torch.empty(shape) for q in levels}
    chunk = summary_chunk(stream.replicate_bytes)
    held = max(chunk, HELD)
    width = max(1, min(total, total * held // stream.num_samples))
    pieces: dict[float, list[Tensor]] = {q: [] for q in levels}
    for start in range(0, total, width):
        slices = [part.flatten(1)[:, start : start + width].clone() for part in stream.chunks(chunk)]
        column = Prediction(torch.cat(slices)[:, None])  # (B, 1, width)
        for q in levels:
            pieces[q].append(column.quantile(q)[0])
    return {q: torch.cat(parts).reshape(shape) for q, parts in pieces.items()}
