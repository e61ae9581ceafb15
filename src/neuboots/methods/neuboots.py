"""NeuBoots: one training run, B bootstrapped networks (paper, section 3; Algorithms 1 and 2).

ĝ = argmin_g E_α [ 1/n Σᵢ α_{u(i)} ℓ(g(Xᵢ, α), yᵢ) ],   g(x, α) = M(F(x) ⊙ α)        (eqs. 2.6, 3.1)
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from neuboots._prng import derive_keys
from neuboots._validation import ArgumentError, check_choice, check_int
from neuboots.generator import BootstrapGenerator
from neuboots.head import add_output_axis, cast_inputs, check_inputs, eval_mode
from neuboots.loading import Batch, dataset_length, load_targets
from neuboots.losses import Loss, valid_mask, weighted_mean
from neuboots.methods._base import register
from neuboots.prediction import Moments, Predictor, SampleStream, num_bytes
from neuboots.training import BaseMethod, FitInputs, Objective, prepare_net, validation_metrics
from neuboots.weights import (
    Blocks,
    BlockTable,
    Dirichlet,
    HashedBlocks,
    Link,
    ResampleSchedule,
    WeightDistribution,
    WeightSchedule,
    assign_blocks,
    build_distribution,
    check_weight_distribution,
    compute_strata,
    describe_distribution,
    link_moments,
)


def draw_replicate_weights(
    weight_distribution: WeightDistribution, num_blocks: int, start: int, stop: int, seed: int
) -> Tensor:
    """Draw α_b for b in start … stop−1, each a function of (seed, b) alone.

    Args:
        weight_distribution: Distribution of α.
        num_blocks: Dimension S of α.
        start: First replicate.
        stop: One more than the last replicate.
        seed: Seed of the replicates.

    Returns:
        The weights, (stop − start, S).
    """
    return weight_distribution.sample(derive_keys(torch.arange(start, stop), seed, "replicate"), num_blocks)


def stream_head_weights(
    generator: BootstrapGenerator,
    x: Any,
    num_samples: int,
    weight_distribution: WeightDistribution,
    derive: Callable[[Tensor], Tensor],
) -> SampleStream:
    """Stream g(x, α_b) from one pass through the features (Algorithm 2).

    Args:
        generator: The generator g.
        x: Inputs on the device of the net.
        num_samples: Number of replicates B.
        weight_distribution: Distribution of α.
        derive: Function of numbers of replicates that returns their keys.

    Returns:
        The stream.
    """
    with eval_mode(generator):
        at = generator.at(x)
    output = add_output_axis(at.output)
    # after further layers the exact moments may cost D passes through them, so that only `moments` computes them
    moments = at.moments(weight_distribution) if at.trace.ends_at_head else None

    def chunks(size: int) -> Iterator[Tensor]:
        for start in range(0, num_samples, size):
            keys = derive(torch.arange(start, min(start + size, num_samples)))
            # not assigned to a name, which would keep the chunk alive while the next one is computed
            yield add_output_axis(at(weight_distribution.sample(keys, generator.num_blocks)), ndim=3)

    replicate_bytes = num_bytes(output) + num_bytes(generator.split.head.weight)  # a replicate's outputs and its head
    return SampleStream(num_samples, replicate_bytes, chunks, moments)


@dataclass(frozen=True)
class NeuBootsPredictor(Predictor):
    """Predictor with B replicates from one pass through the features (Algorithm 2).

    Args:
        generator: The trained generator g(x, α).
        weight_distribution: Distribution of α that it was trained with.
    """

    generator: BootstrapGenerator
    weight_distribution: WeightDistribution

    @property
    def net(self) -> nn.Module:
        return self.generator.net

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        def derive(ids: Tensor) -> Tensor:
            return derive_keys(ids, seed, "replicate")

        x = cast_inputs(self.generator, x)
        return stream_head_weights(self.generator, x, num_samples, self.weight_distribution, derive)

    def moments(self, x: Any) -> Moments:
        """Compute the exact mean and standard deviation over all replicates (B = ∞), without sampling.

        Args:
            x: Inputs.

        Returns:
            Mean and standard deviation of the outputs, (N, C, *) each.
        """
        check_inputs(x)
        with eval_mode(self.generator), torch.no_grad():
            return self.generator.moments(cast_inputs(self.generator, x), self.weight_distribution)

    def export(self, b: int, *, seed: int = 0) -> nn.Module:
        """Return one replicate as a plain net, whose head has the weights W diag h(α_b).

        Args:
            b: Number of the replicate.
            seed: Seed of the replicates, as in `predict`.
        """
        weights = draw_replicate_weights(self.weight_distribution, self.generator.num_blocks, b, b + 1, seed)
        return self.generator.export(weights[0])

    def config(self) -> dict[str, Any]:
        generator = self.generator
        return {
            "method": "neuboots",
            "head": generator.split.name,
            "num_blocks": generator.num_blocks,
            "link": generator.link,
            "weight_distribution": describe_distribution(self.weight_distribution),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "NeuBootsPredictor":
        generator = BootstrapGenerator(net, head=config["head"], num_blocks=config["num_blocks"], link=config["link"])
        return cls(generator.eval(), build_distribution(config["weight_distribution"]))


@register(
    "neuboots",
    predictor=NeuBootsPredictor,
    summary="one net with a re-weighted head: B bootstrapped nets from one pass",
    predict_cost="O(L + K)",
    reference="Shin, Cho, Min and Lim, Neural Bootstrapper, NeurIPS 2021",
)
@dataclass(frozen=True)
class NeuBoots(BaseMethod[NeuBootsPredictor]):
    """Neural bootstrapper: trains g(x, α) with random weights α on the loss and on the features of the last layer.

    The defaults were chosen by measurement on classification (decision 0002). `NeuBoots.paper()` is Algorithm 1 of
    the paper, `NeuBoots.regression()` is meant for continuous targets. A net that fits its training set perfectly is
    better calibrated with `Dirichlet()`.

    Args:
        loss: Loss per example.
        weight_distribution: Distribution of α.
        link: h, which maps α to the factors of the features: "identity", or "exp" for exp(−α).
        resample: When α is drawn in training: for each "sample", "step" or "epoch", or from a "pool" of 256 draws.
        warmup: Number of first epochs with α = 1.
        num_blocks: Number of blocks S that share a weight; None for the number of features D.
        head: Name of the last layer; None to find it by running the net.
        train_head_only: Whether to train only the last layer, on top of a pretrained net.

    Example:
        >>> from neuboots import TrainingConfig
        >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> predictor = NeuBoots().fit(net, (x, (x[:, 0] > 0).long()), TrainingConfig(epochs=2, progress=False))
        >>> predictor.predict(x[:5], 100).samples.shape  # (B, N, C)
        torch.Size([100, 5, 2])
    """

    weight_distribution: WeightDistribution = field(default_factory=lambda: Dirichlet(concentration=5.0))
    link: Link = "identity"
    resample: ResampleSchedule = "sample"
    warmup: int = 0
    num_blocks: int | None = None
    head: str | None = None
    train_head_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_weight_distribution(self.weight_distribution)
        check_choice("link", self.link, get_args(Link))
        check_choice("resample", self.resample, get_args(ResampleSchedule))
        check_int("warmup", self.warmup, minimum=0)
        if self.num_blocks is not None:
            check_int("num_blocks", self.num_blocks, minimum=1)

    @classmethod
    def paper(cls, loss: Loss | None = None) -> "NeuBoots":
        """Return Algorithm 1 of the paper: α ~ S × Dirichlet(1, …, 1) once per epoch, S = D, identity link, no warm-up.

        Args:
            loss: Loss per example; None for the cross-entropy.
        """
        return cls(loss=loss or nn.CrossEntropyLoss(), weight_distribution=Dirichlet(), resample="epoch")

    @classmethod
    def regression(cls, loss: Loss | None = None) -> "NeuBoots":
        """Return a variant with a concentrated weight distribution.

        The weights multiply the features, so that a distribution as wide as the paper's costs accuracy wherever the
        noise of the data is small beside the standard deviation of the targets.

        Args:
            loss: Loss per example; None for the squared error.
        """
        return cls(loss=loss or nn.MSELoss(), weight_distribution=Dirichlet(concentration=20.0))

    def make_generator(self, net: nn.Module, *, example: Any = None) -> BootstrapGenerator:
        """Create g(x, α) around a net, for `fit` and for a custom training loop.

        Args:
            net: The net; it is shared with the generator.
            example: A few inputs, to find the last layer by running the net.
        """
        generator = BootstrapGenerator(net, head=self.head, num_blocks=self.num_blocks, link=self.link, example=example)
        if self.train_head_only:
            generator.freeze_features()
        return generator

    def make_schedule(self, generator: BootstrapGenerator, data: Dataset[Any], *, seed: int = 0) -> WeightSchedule:
        """Create the schedule by which α is drawn over a data set, for `fit` and for a custom training loop.

        Args:
            generator: The generator g.
            data: Training data, of (x, y).
            seed: Seed of the blocks and of the draws.
        """
        blocks = make_blocks(data, generator.num_blocks, loss=self.loss, seed=seed)
        return WeightSchedule(self.weight_distribution, blocks, seed, self.resample, self.warmup)

    def _fit(self, inputs: FitInputs) -> NeuBootsPredictor:
        net, example = prepare_net(inputs)
        generator = self.make_generator(net, example=example)
        self._check_replicates(generator, example)
        schedule = self.make_schedule(generator, inputs.data, seed=inputs.config.seed)

        def validate(g: nn.Module, batch: Batch) -> dict[str, Tensor]:
            alpha = compute_mean_weights(self.weight_distribution, self.link, generator.num_blocks)
            return validation_metrics(self.loss, g(cast_inputs(g, batch.x), alpha), batch.y)

        self._train(generator, inputs, make_weighted_objective(schedule, self.loss), validate)
        return NeuBootsPredictor(generator.eval(), self.weight_distribution)

    def _check_replicates(self, generator: BootstrapGenerator, example: Any) -> None:
        """Raise before training if the net cannot be replicated by re-weighting its head."""
        with eval_mode(generator), torch.no_grad():
            at = generator.at(example)
            neutral = torch.full((2, generator.num_blocks), 1.0 if self.link == "identity" else 0.0)  # h(α) = 1
            same = torch.allclose(at(neutral)[1], at.output, rtol=1e-2, atol=1e-3)
        if not same:
            expected = "a plain last layer; re-weighting it by 1 changes the net's output"
            raise ArgumentError("head", generator.split.name, expected)
        lengths = {len(part) for part in tree_leaves(example) if isinstance(part, Tensor) and part.ndim}
        if self.resample in ("sample", "pool") and len(at.trace.phi) not in lengths:
            expected = f"'step' or 'epoch', since the features have {len(at.trace.phi)} rows for {lengths} examples"
            raise ArgumentError("resample", self.resample, expected)


def make_weighted_objective(schedule: WeightSchedule, loss: Loss) -> Callable[[int], Objective]:
    """Return the objective of each epoch: the mean over a batch of α_{u(i)} ℓ(g(Xᵢ, α), yᵢ) (eq. 2.6).

    Args:
        schedule: Schedule by which α is drawn.
        loss: Loss with one value per example.

    Returns:
        A function of the epoch that returns a function of (g, batch).
    """

    def objective_at(epoch: int) -> Objective:
        weights = schedule.at_epoch(epoch)

        def objective(g: nn.Module, batch: Batch) -> Tensor:
            alpha, w = weights(batch.index, step=batch.step)
            losses = loss(g(cast_inputs(g, batch.x), alpha), batch.y)
            return weighted_mean(losses, w, valid_mask(loss, batch.y))

        return objective

    return objective_at


def compute_mean_weights(weight_distribution: WeightDistribution, link: Link, num_blocks: int) -> Tensor:
    """Return the α with the mean factor, h(α) = E h: if the net ends at its head, this gives the mean replicate.

    Args:
        weight_distribution: Distribution of α.
        link: Link function h.
        num_blocks: Dimension S of α.

    Returns:
        The weights, (S,).
    """
    mean = link_moments(weight_distribution, link, num_blocks)[0]
    return torch.full((num_blocks,), mean if link == "identity" else -math.log(mean))


def make_blocks(data: Dataset[Any], num_blocks: int, *, loss: Loss | None = None, seed: int = 0) -> Blocks:
    """Assign the examples of a data set to blocks, u(i).

    Args:
        data: Data set of (x, y). Blocks are stratified by the targets; those of an iterable data set are hashed.
        num_blocks: Number of blocks S.
        loss: Loss, whose `ignore_index` marks targets without a class.
        seed: Seed of the assignment.

    Returns:
        A function of the indices of examples that returns their blocks.
    """
    n = dataset_length(data)
    if n is None:
        return HashedBlocks(num_blocks, seed)
    ignore_index = getattr(loss, "ignore_index", -100)

    def reduce(y: Tensor) -> Tensor:  # a label map becomes its stratum at once: all maps may not fit in memory
        return y if y.is_floating_point() or y.numel() == 1 else compute_strata(y[None], ignore_index=ignore_index)[0]

    strata = compute_strata(load_targets(data, seed=seed, reduce=reduce), ignore_index=ignore_index)
    return BlockTable(assign_blocks(n, num_blocks, strata=strata, seed=seed), num_blocks)
