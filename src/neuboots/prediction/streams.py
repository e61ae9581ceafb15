"""Replicates in chunks: what every method gives, and what `predict` gathers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from neuboots.keys import draw_keys, uniforms
from neuboots.prediction.figures import Moments, Prediction, std_of
from neuboots.prediction.probabilities import LARGE, bytes_of


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
        moments = Moments(outputs.mean(0), std_of(outputs))
    return Stream(num_samples, bytes_of(outputs[0]), chunks, moments)


def gather(stream: Stream) -> Prediction:
    """All replicates in one tensor."""
    size = max(1, LARGE // stream.replicate_bytes)
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
