"""Passes over the training data through the features of a trained net: every point of its head with its L and u.

A point is one position of the head's output: an example, a pixel or a token. Features are kept after the first pass
while they need at most 256 MB; beyond that the net is run again, so that memory does not grow with n.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from neuboots._validation import ArgumentError
from neuboots.generator import BootstrapGenerator, GeneratorAtInput
from neuboots.head import cast_inputs, check_inputs, eval_mode
from neuboots.loading import Batch
from neuboots.losses import GaussianNLL, Loss, valid_mask, weighted_mean
from neuboots.methods._base import iterate_batches
from neuboots.methods._curvature import (
    append_ones,
    head_parameters,
    infer_likelihood,
    to_double,
    working_residuals,
)
from neuboots.prediction import num_bytes
from neuboots.training import FitInputs

_MAX_STORED_BYTES = 1 << 28
_CHUNK_ELEMENTS = 1 << 22


class HeadPoints(NamedTuple):
    """M points of the head, in double precision."""

    phi: Tensor  # φ̃ = (φ, 1): (M, D̃)
    z: Tensor  # outputs: (M, C)
    root: Tensor  # L: (M, C, C)
    residual: Tensor  # u: (M, C)
    slope: Tensor  # −∂ℓ/∂z = L u, except for a loss without curvature there: (M, C)
    weight: Tensor  # (M,)
    row: Tensor  # index of its example in the data set: (M,)
    y: Tensor  # its target; where the net upsamples the head's output, the one that has this slope at the head


class BatchFeatures(NamedTuple):
    """Points of one batch as they reach the head."""

    phi: Tensor  # (M, D)
    z: Tensor  # outputs of the head, in the net's precision: (M, C)
    y: Tensor | None  # (M,) or (M, ·); None where the net upsamples the head's output
    slope: Tensor | None  # −∂ℓ/∂z at the head where the net upsamples its output: (M, C)
    weight: Tensor  # zero for an ignored point: (M,)
    row: Tensor  # (M,)

    def take(self, which: Tensor | slice) -> "BatchFeatures":
        """Select points."""
        return BatchFeatures(*(None if part is None else part[which] for part in self))  # type: ignore[arg-type]


def output_is_head(at: GeneratorAtInput) -> bool:
    """Whether the net's output is its head's, up to squeezed axes of length one."""
    if at.trace.ends_at_head:
        return True
    phi, output = at.trace.phi, at.trace.output
    return phi.ndim <= 2 and output.ndim <= 2 and torch.equal(output.flatten(), at.generator.split.head(phi).flatten())


class FeaturePass:
    """The training data of a net as points of its head."""

    def __init__(self, generator: BootstrapGenerator, loss: Loss, inputs: FitInputs) -> None:
        self.generator, self.loss, self.inputs = generator, loss, inputs
        self.likelihood = infer_likelihood(loss)
        self.theta = head_parameters(generator)  # θ̂: (C, D̃)
        self.continuous = False  # whether the targets are continuous; known after the first batch
        self.upsampled = False  # whether anything follows the head; known after the first batch
        self.num_rows = 0  # examples with points that count; known after the first pass
        self.total_loss, self.num_losses = 0.0, 0
        self._stored: list[BatchFeatures] | None = None

    def features(self) -> Iterator[tuple[Tensor, BatchFeatures]]:
        """φ̃ (M, D̃) of all points, some at a time, and what they are made from."""
        (outputs, width), biased = self.theta.shape, self.generator.split.head.bias is not None
        size = max(1, _CHUNK_ELEMENTS // (outputs * max(outputs, width)))
        for batch in self._batches():
            for start in range(0, len(batch.phi), size):
                part = batch.take(slice(start, start + size))
                phi = append_ones(part.phi, biased).to(self.theta.device)
                if not (bool(torch.isfinite(phi).all()) and bool(torch.isfinite(part.z).all())):
                    raise ValueError(
                        "the trained net has NaN or infinite features or outputs on its training data; expected finite "
                        "numbers: drop such examples, or train the net again"
                    )
                yield phi, part

    def points(self) -> Iterator[HeadPoints]:
        """All points that count, some at a time, with their working residuals."""
        for phi, part in self.features():
            counted = part.weight > 0
            phi, part = phi[counted.to(phi.device)], part.take(counted)
            z, weight = phi @ self.theta.T, part.weight.to(phi)
            if part.slope is None:
                assert part.y is not None
                y = part.y.to(z.device)
                root, residual, slope = working_residuals(self.loss, z, y)
            else:
                mean = {"softmax": z.softmax(1), "bernoulli": z.sigmoid()}.get(str(self.likelihood), z)
                # L does not depend on the targets
                root = working_residuals(self.loss, z, z.chunk(2, 1)[0] if self.likelihood == "gaussian" else mean).root
                # L⁺ = Lᵀ (LLᵀ)⁺; the slope of a point is divided by its weight
                inverse = torch.linalg.pinv(root @ root.mT, rtol=1e-10, hermitian=True)
                slope = part.slope / weight[:, None]
                y = mean + slope
                residual = (root.mT @ (inverse @ slope[:, :, None]))[:, :, 0]
            if not bool(torch.isfinite(residual).all()):
                raise ValueError("the loss is NaN or infinite on the training data; expected finite targets and losses")
            yield HeadPoints(phi, z, root, residual, slope, weight, part.row, y)

    def _batches(self) -> Iterator[BatchFeatures]:
        if self._stored is not None:
            yield from self._stored
            return
        stored: list[BatchFeatures] | None = []
        size = self.num_rows = 0
        with eval_mode(self.generator), torch.no_grad():
            for batch in iterate_batches(self.inputs.data, self.inputs.config, title="curvature"):
                found = self._read(batch)
                self.num_rows += len(set(found.row[found.weight > 0].tolist()))
                if stored is not None:
                    stored.append(found)
                    size += sum(num_bytes(part) for part in found if part is not None)
                    stored = stored if size <= _MAX_STORED_BYTES else None
                yield found
        self._stored = stored

    def _read(self, batch: Batch) -> BatchFeatures:
        check_inputs(batch.x)
        generator = self.generator
        at = generator.at(cast_inputs(generator, batch.x))
        y = batch.y.to(at.output.device)
        if y.is_floating_point() and not bool(torch.isfinite(y).all()):
            raise ValueError("the targets have NaN or infinite values; expected finite numbers: fill or drop such rows")
        known = self.likelihood in ("squared", "gaussian")
        other = y.is_floating_point() or isinstance(self.loss, GaussianNLL | nn.PoissonNLLLoss)  # counts are integers
        self.continuous = known or (self.likelihood is None and other)
        losses = self.loss(at.output, y)  # raises where targets do not fit; zero where they are ignored
        weighted_mean(losses, losses.new_ones(len(batch.index)))  # raises for a loss that reduces
        self.total_loss += float(to_double(losses).sum())
        self.num_losses += losses.numel()
        flat = at.trace.phi.movedim(generator.split.axis, -1)
        phi, per_row = flat.flatten(0, -2), flat[0].numel() // flat.shape[-1]
        z = generator.split.head(at.trace.phi).movedim(generator.split.axis, -1).reshape(len(phi), -1)
        mask = valid_mask(self.loss, y)
        if at.trace.ends_at_head:
            weight = torch.ones(len(phi)) if mask is None else mask.flatten()
        else:  # the fraction of the outputs that a point is upsampled to
            counted = torch.full((len(flat),), at.output.shape[2:].numel()) if mask is None else mask.flatten(1).sum(1)
            weight = (counted / per_row).repeat_interleave(per_row)
        weight = weight.to(phi.device, self.theta.dtype)
        row = batch.index.repeat_interleave(per_row).to(phi.device)
        targets, slope = None, None
        if output_is_head(at):
            same_axes = y.ndim == at.output.ndim > 1
            targets = y.movedim(1, -1).flatten(0, -2) if same_axes else y.reshape(len(phi), *y.shape[flat.ndim - 1 :])
        else:
            slope, self.upsampled = self._slope(at, y), True
        return BatchFeatures(phi, z, targets, slope, weight, row)

    def _slope(self, at: GeneratorAtInput, y: Tensor) -> Tensor:
        """−∂ℓ/∂z at the head of a net that upsamples its output, scaled as in `working_residuals`: (M, C)."""
        if self.likelihood is None:
            expected = "nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.MSELoss or GaussianNLL, since the net upsamples"
            raise ArgumentError("loss", self.loss, expected)
        half = 0.5 if self.likelihood == "squared" else 1.0
        split = self.generator.split
        with torch.inference_mode(False), torch.enable_grad():
            z = split.head(at.trace.phi.detach()).detach().clone().requires_grad_()
            total = self.loss(at.arrange(at.trace.finish(z)), y.clone()).sum()  # y may be made in inference mode
            (slope,) = torch.autograd.grad(total, z)
        return -half * to_double(slope.movedim(split.axis, -1).flatten(0, -2))
