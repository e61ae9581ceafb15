"""The variance of replicates at some points, of NeuBoots as a function of its law."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from neuboots.generator import BootstrapGenerator
from neuboots.losses import Brier, CrossEntropy, GaussianNLL, Loss
from neuboots.methods.neuboots import NeuBootsPredictor
from neuboots.prediction import Predictor, Stream, accumulate, check_inputs
from neuboots.surgery import eval_mode, to_net
from neuboots.weights import Exponential, WeightLaw, link_moments

Batches = Callable[[], Iterator[Any]]  # inputs, some rows at a time, the same at each call
Variance = Callable[[WeightLaw], Tensor]  # of the generator under a law, at M points of C outputs: (M, C)
Counted = Literal["outputs", "means", "contrasts"]


def counted_of(loss: Loss | None) -> Counted:
    """Which figures of the outputs have a meaning under this loss."""
    if isinstance(loss, CrossEntropy | Brier | nn.CrossEntropyLoss | nn.NLLLoss):
        return "contrasts"
    return "means" if isinstance(loss, GaussianNLL) else "outputs"


def _points(values: Tensor) -> Tensor:
    """(N, C, *) with pixels as further rows: (M, C), double precision."""
    return values.movedim(1, -1).reshape(-1, values.shape[1]).double()


def _means(values: Tensor, counted: Counted, axis: int) -> Tensor:
    """The means alone, of outputs that also hold values of log σ²."""
    return values.narrow(axis, 0, values.shape[axis] // 2) if counted == "means" else values


def figures(
    predictor: Predictor, batches: Batches, counted: Counted, num_samples: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Mean and variance over replicates of what counts, batch by batch: (M, C) each."""
    number = min(num_samples, predictor.num_distinct or num_samples)
    with torch.no_grad():
        for x in batches():
            check_inputs(x)
            stream = predictor.stream(x, number, seed=seed)
            if counted == "contrasts":
                stream = _centred(stream)
            figures = stream.moments or accumulate(stream)
            mean, std = (_points(_means(part, counted, 1)).cpu() for part in (figures.mean, figures.std))
            yield mean, std.square()


def _centred(stream: Stream) -> Stream:
    """Outputs less their mean over classes; exact moments, which know each output alone, are lost."""

    def chunks(size: int) -> Iterator[Tensor]:
        return (chunk - chunk.mean(2, keepdim=True) for chunk in stream.chunks(size))

    return Stream(stream.num_samples, stream.replicate_bytes, chunks)


def exact(generator: BootstrapGenerator, batches: Batches, counted: Counted) -> Variance | None:
    """The variance as a function of the law, from one pass; None where what follows the head is not affine."""
    generator = _contrasting(generator) if counted == "contrasts" else generator
    size, link = generator.num_blocks, generator.link
    unit = Exponential()  # under which no two blocks covary, so that its variance is v Σ_s A_s²
    v = link_moments(unit, link, size)[1]
    ends = torch.tensor([1.0, 0.0] if link == "identity" else [0.0, math.inf])  # whose factors are 1 and 0
    found: list[tuple[Tensor, Tensor]] = []
    with eval_mode(generator), torch.no_grad():
        for x in batches():
            at = generator.at(to_net(generator, x))
            try:
                squares = at.moments(unit).std.square() / v
            except ValueError:  # the one sentence of `moments`
                return None
            full, none = (z if z.ndim > 1 else z[:, None] for z in at(ends[:, None].expand(2, size)))
            parts = squares, (full - none).square()
            squares, whole = (_points(_means(part.reshape(full.shape), counted, 1)).cpu() for part in parts)
            found.append((squares, whole))
    squares, whole = (torch.cat(parts) for parts in zip(*found, strict=True))

    def variance(law: WeightLaw) -> Tensor:
        _, v, c = link_moments(law, link, size)
        return ((v - c) * squares + c * whole).clamp_min(0.0)

    return variance


def _contrasting(generator: BootstrapGenerator) -> BootstrapGenerator:
    """A copy whose head gives logits less their mean over classes."""
    neutral = 1.0 if generator.link == "identity" else 0.0
    net, name = generator.export(torch.full((generator.num_blocks,), neutral)), generator.split.name
    head = cast(Any, net.get_submodule(name))
    with torch.no_grad():
        for part in (head.weight, head.bias):
            if part is not None:
                part -= part.mean(0, keepdim=True)
    return BootstrapGenerator(net, head=name, num_blocks=generator.num_blocks, link=generator.link)


def sampled(predictor: NeuBootsPredictor, batches: Batches, counted: Counted, num_samples: int, seed: int) -> Variance:
    """The variance as a function of the law, from replicates: one pass for each law."""

    def variance(law: WeightLaw) -> Tensor:
        other = NeuBootsPredictor(predictor.generator, law)
        return torch.cat([part for _, part in figures(other, batches, counted, num_samples, seed)])

    return variance
