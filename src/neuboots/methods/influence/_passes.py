"""Passes over the data through the features: every point of the head with its L, u, weight and row.

Features are held after the first pass while they need no more than 256 MB; beyond that the net is run again, so that
memory never grows with n.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._streaming import num_bytes
from neuboots.generator import BootstrapGenerator, GeneratorAtInput
from neuboots.head import cast_inputs, eval_mode
from neuboots.loading import Batch, EpochLoader, preserve_rng_state
from neuboots.losses import GaussianNLL, Loss, valid_mask, weighted_mean
from neuboots.methods._curvature import (
    Likelihood,
    WorkingModel,
    append_ones,
    head_parameters,
    infer_likelihood,
    loss_gradient,
    point_weights,
    to_double,
    track_progress,
    working_residuals,
)
from neuboots.prediction import check_inputs
from neuboots.training import TrainingConfig

_OF_NUMBERS = (GaussianNLL, nn.PoissonNLLLoss)  # which may be whole ones, such as counts
_HELD = 1 << 28  # bytes of features that are kept from the first pass to the last
_PIECE = 1 << 22  # numbers held at once for some of the points


class HeadPoints(NamedTuple):
    """M points of the head, in double precision."""

    phi: Tensor  # φ̃ = (φ, 1): (M, D̃)
    z: Tensor  # outputs: (M, C)
    root: Tensor  # L: (M, C, C)
    residual: Tensor  # u: (M, C)
    slope: Tensor  # −∂ℓ/∂z = L u, but for a loss without curvature there: (M, C)
    weight: Tensor  # how much each counts: (M,)
    row: Tensor  # the number of its row in the data set: (M,)
    y: Tensor  # its target; where the net upsamples its head's output, the one that has this slope at the head


class BatchFeatures(NamedTuple):
    """What one batch has: features, targets, weights and rows of its points; slopes of the loss past an upsampling."""

    phi: Tensor  # as it reaches the head: (M, D)
    y: Tensor | None  # (M,) or (M, ·)
    slope: Tensor | None  # −∂ℓ/∂z, pulled back to the head where the net upsamples: (M, C)
    weight: Tensor
    row: Tensor

    def take(self, which: Tensor | slice) -> "BatchFeatures":
        """Some of the points."""
        y, slope = (None if part is None else part[which] for part in (self.y, self.slope))
        return BatchFeatures(self.phi[which], y, slope, self.weight[which], self.row[which])


def negative_gradient(loss: Loss, z: Tensor, y: Tensor, found: WorkingModel) -> Tensor:
    """−∂ℓ/∂z = L u at outputs z (M, C); of other losses by differentiation, since L may be zero."""
    try:
        infer_likelihood(loss)
    except ValueError:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = z.detach().clone().requires_grad_()
            return -loss_gradient(loss, leaf, y)
    return (found.root @ found.residual[:, :, None])[:, :, 0]


def _mean_of(likelihood: Likelihood | None, z: Tensor) -> Tensor:
    """E y at outputs z, for a loss whose slope is y − E y."""
    return z.softmax(1) if likelihood == "softmax" else z.sigmoid() if likelihood == "bernoulli" else z


def output_is_head(at: GeneratorAtInput) -> bool:
    """Whether the net's output is its head's, up to axes of one row or one output that were taken away."""
    if at.passed.ends_at_head:
        return True
    phi, output = at.passed.phi, at.passed.output
    return phi.ndim <= 2 and output.ndim <= 2 and torch.equal(output.flatten(), at.generator.split.head(phi).flatten())


@dataclass
class FeaturePass:
    """The data of a trained net, seen from its head."""

    generator: BootstrapGenerator
    loss: Loss
    data: Dataset[Any]
    config: TrainingConfig

    def __post_init__(self) -> None:
        self._held: list[BatchFeatures] | None = None
        self._loader = EpochLoader(
            self.data,
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            shuffle=False,
            num_workers=self.config.num_workers,
            steps_per_epoch=self.config.steps_per_epoch,
        )
        self.theta = head_parameters(self.generator)  # θ̂: (C, D̃)
        self.biased = self.generator.split.head.bias is not None
        self.continuous = False  # whether targets are numbers; known after the first batch
        self.upsampled = False  # whether the net goes on after its head; known after the first batch
        self.count = self.rows = 0  # points that count, and their rows; known after the first pass

    @property
    def likelihood(self) -> Likelihood | None:
        """What the loss is the negative logarithm of, if it is known."""
        try:
            return infer_likelihood(self.loss)
        except ValueError:
            return None

    def points(self) -> Iterator[HeadPoints]:
        """All points that count, some at a time."""
        outputs, width = self.theta.shape
        size = max(1, _PIECE // (outputs * max(outputs, width)))
        for found in self._batches():
            for start in range(0, len(found.phi), size):
                yield self._worked(found.take(slice(start, start + size)))

    def _worked(self, some: BatchFeatures) -> HeadPoints:
        phi = append_ones(some.phi, self.biased).to(self.theta.device)
        z, weight = phi @ self.theta.T, some.weight.to(phi)
        if some.slope is None:
            assert some.y is not None
            y = some.y.to(z.device)
            root, residual = found = self._working(z, y)
            slope = negative_gradient(self.loss, z, y, found)
        else:
            root = working_residuals(self.loss, z, self._any_targets(z)).root
            # L⁺ = Lᵀ (LLᵀ)⁺; a point counts for its weight
            inverse = torch.linalg.pinv(root @ root.mT, rtol=1e-10, hermitian=True)
            slope = some.slope / weight[:, None]
            y = _mean_of(self.likelihood, z) + slope
            residual = (root.mT @ (inverse @ slope[:, :, None]))[:, :, 0]
        points = HeadPoints(phi, z, root, residual, slope, weight, some.row, y)
        if not all(bool(torch.isfinite(part).all()) for part in points[:5]):
            raise ValueError(
                "got NaN or infinite features, outputs or losses of the trained net on its data; expected finite "
                "numbers: fill or drop such rows, or train the net anew"
            )
        return points

    def _working(self, z: Tensor, y: Tensor) -> WorkingModel:
        try:
            return working_residuals(self.loss, z, y)
        except ValueError:
            if self.likelihood is not None:
                raise
            # none of these points has curvature; others may, as those of Huber's loss near its middle
            return WorkingModel(torch.zeros(*z.shape, z.shape[1]).to(z), torch.zeros_like(z))

    def _is_continuous(self, y: Tensor) -> bool:
        """Whether targets are numbers, by the loss; by what they are where it may be one of classes."""
        if self.likelihood is not None:
            return self.likelihood in ("squared", "gaussian")
        return y.is_floating_point() or isinstance(self.loss, _OF_NUMBERS)

    def _any_targets(self, z: Tensor) -> Tensor:
        """Targets of the right kind: L does not depend on them."""
        if self.likelihood == "softmax":
            return torch.zeros(len(z), dtype=torch.int64, device=z.device)
        return torch.zeros_like(z.chunk(2, 1)[0] if self.likelihood == "gaussian" else z)

    def _batches(self) -> Iterator[BatchFeatures]:
        if self._held is not None:
            yield from self._held
            return
        held: list[BatchFeatures] | None = []
        size = self.count = self.rows = 0
        generator = self.generator
        with preserve_rng_state(), eval_mode(generator), torch.no_grad():
            for _, batch, _ in track_progress(self._loader.epoch(0), self._loader.steps, self.config, "influence"):
                found = self._found(batch)
                self.count += len(found.phi)
                self.rows += len(set(found.row.tolist()))
                if held is not None:
                    held.append(found)
                    size += sum(num_bytes(part) for part in found if part is not None)
                    held = held if size <= _HELD else None
                yield found
        self._held = held

    def _found(self, batch: Batch) -> BatchFeatures:
        check_inputs(batch.x)
        generator = self.generator
        at = generator.at(cast_inputs(generator, batch.x))
        y = batch.y.to(at.output.device)
        if y.is_floating_point() and not bool(torch.isfinite(y).all()):
            raise ValueError("got NaN or infinite targets; expected finite numbers: fill or drop such rows")
        self.continuous = self._is_continuous(y)
        losses = self.loss(at.output, y)  # says what does not fit
        weighted_mean(losses, losses.new_ones(len(batch.index)))  # refuses a loss that reduces
        mask = valid_mask(self.loss, y)
        flat = at.passed.phi.movedim(generator.split.axis, -1)
        phi, per_row = flat.flatten(0, -2), flat[0].numel() // flat.shape[-1]
        weight = point_weights(at, mask).to(self.theta.dtype)
        row = batch.index.repeat_interleave(per_row)
        targets, slope = None, None
        if output_is_head(at):
            same_axes = y.ndim == at.output.ndim > 1
            targets = y.movedim(1, -1).flatten(0, -2) if same_axes else y.reshape(len(phi), *y.shape[flat.ndim - 1 :])
        else:
            slope, self.upsampled = self._slope(at, y), True
        some = BatchFeatures(phi, targets, slope, weight.to(phi.device), row.to(phi.device))
        counted = some.weight > 0
        return some if bool(counted.all()) else some.take(counted)

    def _slope(self, at: GeneratorAtInput, y: Tensor) -> Tensor:
        """−∂ℓ/∂z at the head of a net that upsamples what it gives, as `working_residuals` counts the loss: (M, C)."""
        if self.likelihood is None:
            raise ValueError(
                f"got loss={self.loss!r} and a net that upsamples its head's output; expected nn.CrossEntropyLoss, "
                "nn.BCEWithLogitsLoss, nn.MSELoss or GaussianNLL, or outputs as the head gives them"
            )
        half = 0.5 if self.likelihood == "squared" else 1.0
        split = self.generator.split
        with torch.inference_mode(False), torch.enable_grad():
            z = split.head(at.passed.phi.detach()).detach().clone().requires_grad_()
            total = self.loss(at._finished(at.passed.finish(z)), y).sum()
            (slope,) = torch.autograd.grad(total, z)
        return -half * to_double(slope.movedim(split.axis, -1).flatten(0, -2))
