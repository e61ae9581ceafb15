"""The figures of a stream of replicates, in memory that does not grow with B.

    mean and Σ_b (z_b − mean)² by Chan's rule,  Σ_b p_b and Σ_b H(p_b) as they come

Big replicates go through all steps a piece at a time, so that what is made on the way stays in the cache.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from neuboots.prediction.figures import Prediction, Summary
from neuboots.prediction.probabilities import CHUNK, bytes_of, class_sums, in_parts, single_precision, summary_chunk
from neuboots.prediction.streams import Stream

BIG = 1 << 22  # bytes of a chunk above which it is summed in pieces
PIECE = 1 << 19  # bytes of a piece of one replicate
HELD = 32  # replicates' worth of values held for quantiles; B / 32 passes over the replicates


def accumulate(stream: Stream, quantiles: tuple[float, ...] = ()) -> Summary:
    """Mean and variance by Chan's merging rule, probabilities and entropies by running sums."""
    running: _Running | None = None
    count = 0
    size = min(summary_chunk(stream.replicate_bytes), stream.num_samples)
    chunks = iter(stream.chunks(size))
    # a few at a time, so that the sums of a piece stay in the cache as well
    while group := list(itertools.islice(chunks, max(1, CHUNK // size))):
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
        for part in in_parts(chunk) if more > 1 else ():
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
        zeros = partial(chunk.new_zeros, dtype=single_precision(chunk.dtype))
        probs = zeros((rows, max(2, outputs), pixels))  # one output is one logit of two classes
        around = [zeros((rows, outputs, pixels)) for _ in range(2 * spread)]
        return cls(probs, zeros((rows, pixels)), _Spread(*around) if spread else None)

    def at(self, rows: slice, pixels: slice) -> "_Running":
        """A view of some rows and pixels."""
        spread = None if self.spread is None else self.spread.at(rows, pixels)
        return _Running(self.probs[rows, :, pixels], self.entropy[rows, pixels], spread)

    def add(self, chunk: Tensor, before: int) -> None:
        """A chunk (b, N, C, P) after `before` replicates, in place."""
        probs, entropy = class_sums(chunk)
        self.probs += probs
        self.entropy += entropy
        if self.spread is not None:
            self.spread.add(chunk, before)

    def add_all(self, group: list[Tensor], before: int) -> None:
        """Chunks (b, N, C, *), big ones on the CPU piece by piece; here, so that no loop's name outlives the call."""
        flat = [_flat(chunk) for chunk in group]
        if flat[0].device.type != "cpu" or sum(map(bytes_of, flat)) <= BIG:
            for chunk in flat:
                self.add(chunk, before)
                before += len(chunk)
            return
        for rows, pixels in _pieces(flat[0]):
            piece = self.at(rows, pixels)
            for b, replicate in enumerate(itertools.chain.from_iterable(flat)):
                piece.add(replicate[None, rows, :, pixels], before + b)


def _flat(chunk: Tensor) -> Tensor:
    """(b, N, C, *) as (b, N, C, P), one pixel where there are none."""
    return chunk.reshape(*chunk.shape[:3], math.prod(chunk.shape[3:]))


def _pieces(chunk: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and pixels of a chunk (b, N, C, P), a piece at a time: what is made of one stays in the cache."""
    _, rows, outputs, pixels = chunk.shape
    at_once = max(1, PIECE // (outputs * chunk.element_size()))  # pixels
    row_step, pixel_step = max(1, at_once // pixels), min(pixels, at_once)
    for row in range(0, rows, row_step):
        for pixel in range(0, pixels, pixel_step):
            yield slice(row, row + row_step), slice(pixel, pixel + pixel_step)


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
