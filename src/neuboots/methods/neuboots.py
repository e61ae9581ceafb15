"""NeuBoots: one training run, B bootstrapped networks (paper, section 3; Algorithms 1 and 2).

    g(x, α) = M(F(x) ⊙ h(α)) = (W diag h(α)) F(x) + b                 (eq. 3.1; the paper's link is h(α) = α)
    ĝ = argmin_g E_α [ 1/n Σᵢ α_{u(i)} ℓ(g(Xᵢ, α), yᵢ) ]              (eq. 2.6)

The generator g is any net, re-weighted at its last layer M. The features F(x) are computed once, and the B heads are
one matrix product. The output is linear in h(α), so that its mean and variance over α are known in closed form.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from neuboots._prng import derive_keys
from neuboots._validation import ArgumentError, Count, check_choice, check_int, check_memory, check_types
from neuboots.head import (
    ForwardTrace,
    Head,
    add_output_axis,
    cast_inputs,
    channels_first,
    check_inputs,
    copy_net,
    eval_mode,
    extract_output,
    find_output_axis,
    make_head,
    split_head,
)
from neuboots.loading import Batch, check_length, dataset_length, load_targets
from neuboots.losses import Loss, valid_mask, weighted_mean
from neuboots.methods._base import register
from neuboots.prediction import Moments, Predictor, SampleStream, num_bytes
from neuboots.training import BaseMethod, FitInputs, Objective, prepare_net, validation_metrics
from neuboots.weights import (
    DRAW_BYTES,
    POOL_SIZE,
    SPARE_BLOCKS,
    Blocks,
    BlockTable,
    Constant,
    Dirichlet,
    HashedBlocks,
    Link,
    ResampleSchedule,
    WeightDistribution,
    WeightSchedule,
    apply_link,
    assign_blocks,
    build_distribution,
    check_weight_distribution,
    compute_strata,
    describe_distribution,
    link_moments,
)

_PIXELS_AT_ONCE = 1 << 15  # whose squared features are held
_AFFINE_TOLERANCE = 1e-3  # relative to the outputs: rounding is far below, a softmax far above

# -- the generator -------------------------------------------------------------------------------------


class BootstrapGenerator(nn.Module):
    """g(x, α) around any net that ends in a Linear or 1×1 convolution, without parameters of its own.

    Outputs are (N, C, *). With S ≠ D blocks, feature d belongs to block d mod S.

    Args:
        net: The net.
        head: Name of its head; None: it is found.
        num_blocks: Number of blocks S; None: S = D.
        link: "identity" or "exp".
        example: Input, with which the head is found by running the net.

    Raises:
        ArgumentError: If the head cannot be found, or an option has another value.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> g, x = BootstrapGenerator(net), torch.zeros(2, 4)
        >>> bool((g(x, torch.ones(8)) == net(x)).all())
        True
    """

    feature_blocks: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        head: str | None = None,
        num_blocks: int | None = None,
        link: Link = "identity",
        example: Any = None,
    ) -> None:
        super().__init__()
        check_choice("link", link, get_args(Link))
        self.split = split_head(net, head, example=example)
        self.net = self.split.net
        self.link = link
        self.num_blocks = self.split.width if num_blocks is None else check_int("num_blocks", num_blocks, minimum=1)
        blocks = torch.arange(self.split.width) % min(self.num_blocks, self.split.width)  # (D,)
        self.register_buffer("feature_blocks", blocks, persistent=False)
        self.features_frozen = False

    def forward(self, x: Any, alpha: Tensor | None = None) -> Tensor:
        """Return g(x, α), (N, C, *).

        Args:
            x: Inputs.
            alpha: α, (S,), or (N, S) with a row per example; None: the net itself.
        """

        def scaled(head: Head, phi: Tensor) -> Tensor:
            z: Tensor = head(phi if alpha is None else phi * self._factor(alpha, phi))
            return z

        output = extract_output(self.split.run(x, scaled), x)
        return channels_first(self.net, x, output, head=self.split.head)

    def _factor(self, alpha: Tensor, phi: Tensor) -> Tensor:
        """h(α) per feature, shaped to multiply φ."""
        rows = alpha.ndim == 2
        if alpha.shape[-1:] != (self.num_blocks,) or alpha.ndim > 2 or (rows and len(alpha) != len(phi)):
            expected = f"({self.num_blocks},), or ({len(phi)}, {self.num_blocks}) with a row per example"
            raise ArgumentError("alpha", tuple(alpha.shape), expected)
        factor = apply_link(alpha.to(phi), self.link)[..., self.feature_blocks]  # (D,) or (N, D)
        shape = [len(factor) if rows else 1] + [1] * (phi.ndim - 1)
        shape[self.split.axis] = factor.shape[-1]
        return factor.view(shape)

    def at(self, x: Any) -> "GeneratorAtInput":
        """Compute the features of x and return ĝ(x, ·) (Algorithm 2, line 1)."""
        x = cast_inputs(self.net, x)
        trace = self.split.trace(x)
        several = trace.output.ndim > 2
        axis = find_output_axis(self.net, x, trace.output, head=self.split.head) if several else None
        return GeneratorAtInput(self, trace, axis)

    def replicates(self, x: Any, alphas: Tensor) -> Tensor:
        """Return g(x, α_b) for every row of alphas (B, S), from one forward pass: (B, N, C, *)."""
        return self.at(x)(alphas)

    def moments(self, x: Any, weight_distribution: WeightDistribution) -> Moments:
        """Return the exact mean and standard deviation of g(x, α) over α (B = ∞), from one forward pass."""
        return self.at(x).moments(weight_distribution)

    def export(self, alpha: Tensor | None = None) -> nn.Module:
        """Return the replicate g(·, α) as a plain net: a copy whose head has the weights W diag h(α)."""
        net = copy_net(self.net)
        if alpha is None:
            return net
        with torch.no_grad():
            weight = self.split.head.weight
            factor = apply_link(alpha.to(weight), self.link)[self.feature_blocks]
            weight = weight * factor.view(-1, *[1] * (weight.ndim - 2))
        parent, _, key = self.split.name.rpartition(".")
        net.get_submodule(parent)._modules[key] = make_head(weight, self.split.head.bias)
        return net

    def freeze_features(self) -> None:
        """Train the head only: the other parameters and the BatchNorm statistics stay.

        Raises:
            ArgumentError: If the head shares its weights with another layer.
        """
        head = self.split.head
        trainable = set(head.parameters())
        others = (module for module in self.net.modules() if module not in set(head.modules()))
        if any(parameter in trainable for module in others for parameter in module.parameters(recurse=False)):
            hint = "train the whole net, or untie the weights"
            raise ArgumentError("head", self.split.name, "a layer that shares its weights with no other", hint=hint)
        self.features_frozen = True
        for parameter in self.parameters():
            parameter.requires_grad_(parameter in trainable)
        self.train(self.training)

    def train(self, mode: bool = True) -> "BootstrapGenerator":
        """Set training mode; frozen features stay in evaluation mode."""
        super().train(mode)
        if self.features_frozen:
            self.net.eval()
            self.split.head.train(mode)
        return self


@dataclass(frozen=True)
class GeneratorAtInput:
    """ĝ(x, ·), the generator at fixed inputs: a function of α.

    Attributes:
        generator: The generator.
        trace: The forward pass at x.
        output_axis: Axis of the outputs C in the net's output; None for an output (N, C) or (N,).
    """

    generator: BootstrapGenerator
    trace: ForwardTrace
    output_axis: int | None

    @property
    def output(self) -> Tensor:
        """Output of the net itself, (N, C, *)."""
        return self.arrange(self.trace.output)

    def arrange(self, output: Tensor) -> Tensor:
        """Return an output of the net with its channels on axis 1, (N, C, *)."""
        return output if self.output_axis is None else output.movedim(self.output_axis, 1)

    def __call__(self, alphas: Tensor) -> Tensor:
        """Return g(x, α_b) for every row of alphas: (B, S) → (B, N, C, *)."""
        generator = self.generator
        if alphas.ndim != 2 or alphas.shape[1] != generator.num_blocks or len(alphas) < 1:
            raise ArgumentError("alphas", tuple(alphas.shape), f"(B, {generator.num_blocks}) with B ≥ 1")
        factors = apply_link(alphas.to(self.trace.phi), generator.link)[:, generator.feature_blocks]  # (B, D)
        weight, bias = self._weight_and_bias()
        return self.apply_heads(factors[:, None] * weight, bias)

    def apply_heads(self, weights: Tensor, biases: Tensor | None) -> Tensor:
        """Return the net's outputs with other heads, (B, N, C, *).

        Args:
            weights: Weights of the heads, (B, C, D).
            biases: Biases, (C,) or (B, C); None: zero.
        """
        z = self._multiply(weights, biases)  # (B, N, …)
        if self.trace.ends_at_head:
            return z.movedim(-1, 2) if self.generator.split.axis == -1 and z.ndim > 3 else z
        first = self.arrange(self.trace.finish(z[0]))
        finished = first.new_empty(len(z), *first.shape)  # filled one by one: a stack would need twice the memory
        finished[0] = first
        for b in range(1, len(z)):
            finished[b] = self.arrange(self.trace.finish(z[b]))
        return finished

    def _weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        head = self.generator.split.head
        return head.weight.flatten(1), head.bias  # (C, D), (C,)

    def _multiply(self, weights: Tensor, bias: Tensor | None) -> Tensor:
        """All heads in one product: weights (B, C, D) on φ, in the head's layout with B first."""
        phi = self.trace.phi
        num, outputs, width = weights.shape
        stacked = weights.reshape(num * outputs, width)
        if bias is not None:
            bias = bias.expand(num, outputs).reshape(-1)  # (B·C,)
        if self.generator.split.axis == -1:
            rows = phi.reshape(-1, width)  # (M, D)
            z = rows @ stacked.T if bias is None else torch.addmm(bias, rows, stacked.T)  # (M, B·C)
            return z.view(*phi.shape[:-1], num, outputs).movedim(-2, 0)
        z = stacked @ phi.flatten(2)  # (N, B·C, P)
        if bias is not None:
            z += bias[:, None]
        return z.view(len(phi), num, outputs, *phi.shape[2:]).movedim(1, 0)

    def moments(self, weight_distribution: WeightDistribution) -> Moments:
        """Return the exact moments: mean m Wφ + b, variance (v − c) Σ_s A_s² + c (Σ_s A_s)².

        A_s is the contribution of block s to Wφ, and (m, v, c) are the moments of h(α). An affine function after the
        head (upsampling) is applied block by block.

        Raises:
            ArgumentError: If what follows the head is not affine.
        """
        generator = self.generator
        mean, v, c = link_moments(weight_distribution, generator.link, generator.num_blocks)
        weight, bias = self._weight_and_bias()
        if self.trace.ends_at_head and generator.num_blocks >= generator.split.width:
            total = self.arrange(self._multiply(weight[None], None)[0])  # Wφ
            squares = self.arrange(self._sum_squares(weight))
            offset = 0.0 if bias is None else bias.view(-1, *[1] * (total.ndim - 2))
        else:
            offset, total, squares = self._sum_blocks(weight_distribution)
        variance = (v - c) * squares + c * total.square()
        return Moments(offset + mean * total, variance.clamp_min(0.0).sqrt())

    def _sum_squares(self, weight: Tensor) -> Tensor:
        """Σ_d W_cd² φ_d², in the head's layout; pixels in pieces, so that φ² needs less memory than φ."""
        phi = self.trace.phi
        if self.generator.split.axis == -1:
            return phi.square() @ weight.square().T
        pieces = torch.split(phi.flatten(2), _PIXELS_AT_ONCE, 2)
        sums = torch.cat([weight.square() @ piece.square() for piece in pieces], 2)  # (N, C, P)
        return sums.view(len(phi), len(weight), *phi.shape[2:])

    def _sum_blocks(self, weight_distribution: WeightDistribution) -> tuple[Tensor, Tensor, Tensor]:
        """(finish(b), Σ_s A_s, Σ_s A_s²); two weightings, larger than most, test that finish is affine."""
        generator = self.generator
        weight, bias = self._weight_and_bias()
        alphas = weight_distribution.sample(derive_keys(torch.arange(2), "affine"), generator.num_blocks)
        tests = 3 * apply_link(alphas, generator.link).to(weight)  # (2, S)
        offset = self._finish_one(torch.zeros_like(weight), bias)
        total, squares = torch.zeros_like(offset), torch.zeros_like(offset)
        sums = offset.new_zeros(len(tests), *offset.shape)
        for block in range(min(generator.num_blocks, generator.split.width)):
            part = self._finish_one(weight * (generator.feature_blocks == block), bias) - offset  # A_s, finished
            total += part
            squares += part.square()
            sums += tests[:, block].view(-1, *[1] * part.ndim) * part
        if not offset.numel():
            return offset, total, squares
        others = [axis for axis in range(offset.ndim) if axis != 1]  # each output relative to its own size
        size = (offset.abs() + squares.sqrt()).amax(others, keepdim=True)
        for factor, linear in zip(tests, sums, strict=True):
            gap = (offset + linear - self._finish_one(weight * factor[generator.feature_blocks], bias)).abs()
            if bool((gap > _AFFINE_TOLERANCE * size).any()):
                hint = "use the moments of samples (predict or summarize)"
                raise ArgumentError("model", "a nonlinear function after its head", "an affine one", hint=hint)
        return offset, total, squares

    def _finish_one(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Output of the net with this head, (N, C, *)."""
        return self.arrange(self.trace.finish(self._multiply(weight[None], bias)[0]))


# -- the method ----------------------------------------------------------------------------------------


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


def draw_row_weights(
    weight_distribution: WeightDistribution, blocks: Blocks, n: int, num_samples: int, seed: int
) -> Tensor:
    """Draw the weights α_{u(i)} of all rows for the first replicates.

    Args:
        weight_distribution: Distribution of α.
        blocks: Block u(i) of each row.
        n: Number of rows.
        num_samples: Number of replicates B.
        seed: Seed of the replicates.

    Returns:
        The weights, (B, n).
    """
    alphas = draw_replicate_weights(weight_distribution, blocks.num_blocks, 0, num_samples, seed)
    return alphas[:, blocks(torch.arange(n))]


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
        x: Inputs.
        num_samples: Number of replicates B.
        weight_distribution: Distribution of α.
        derive: Function of numbers of replicates that returns their keys.

    Returns:
        The stream.
    """
    at = generator.at(x)
    output = add_output_axis(at.output)
    # after further layers the exact moments may cost D passes through them, so that only `moments` computes them
    moments = at.moments(weight_distribution) if at.trace.ends_at_head else None

    def chunks(size: int) -> Iterator[Tensor]:
        for start in range(0, num_samples, size):
            keys = derive(torch.arange(start, min(start + size, num_samples)))
            # not assigned to a name, which would keep the chunk alive while the next one is computed
            yield add_output_axis(at(weight_distribution.sample(keys, generator.num_blocks)), ndim=3)

    # a replicate's outputs, its head and its weights
    replicate_bytes = num_bytes(output) + num_bytes(generator.split.head.weight) + 8 * generator.num_blocks
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

        return stream_head_weights(self.generator, x, num_samples, self.weight_distribution, derive)

    def moments(self, x: Any) -> Moments:
        """Compute the exact mean and standard deviation over all replicates (B = ∞), without sampling.

        Args:
            x: Inputs.

        Returns:
            Mean and standard deviation of the outputs, (N, C, *) each.
        """
        check_inputs(x)
        generator = self.copy_for_thread().generator
        with torch.no_grad():
            moments = generator.moments(x, self.weight_distribution)
        return Moments(add_output_axis(moments.mean), add_output_axis(moments.std))

    def export(self, b: int, *, seed: int = 0) -> nn.Module:
        """Return one replicate as a plain net, whose head has the weights W diag h(α_b).

        Args:
            b: Number of the replicate.
            seed: Seed of the replicates, as in `predict`.
        """
        (alpha,) = draw_replicate_weights(self.weight_distribution, self.generator.num_blocks, b, b + 1, seed)
        return self.generator.export(alpha)

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
        check_types("predictor", config, {"head": str, "num_blocks": Count, "link": str, "weight_distribution": dict})
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
        num_blocks: Number of blocks S that share a weight, at most 10,000, n or D, whichever is largest; None for
            the number of features D.
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
        self._check_num_blocks(generator, inputs)
        self._check_replicates(generator, example)
        schedule = self.make_schedule(generator, inputs.data, seed=inputs.config.seed)

        def validate(g: nn.Module, batch: Batch) -> dict[str, Tensor]:
            alpha = compute_mean_weights(self.weight_distribution, self.link, generator.num_blocks)
            return validation_metrics(self.loss, g(cast_inputs(g, batch.x), alpha), batch.y)

        self._train(generator, inputs, make_weighted_objective(schedule, self.loss), validate)
        return NeuBootsPredictor(generator.eval(), self.weight_distribution)

    def _row_weights(
        self, predictor: NeuBootsPredictor, data: Dataset[Any], num_samples: int, seed: int, fit_seed: int
    ) -> Tensor:
        blocks = make_blocks(data, predictor.generator.num_blocks, loss=self.loss, seed=fit_seed)
        return draw_row_weights(predictor.weight_distribution, blocks, check_length(data), num_samples, seed)

    def _check_num_blocks(self, generator: BootstrapGenerator, inputs: FitInputs) -> None:
        """Raise before training if too many blocks would be empty, or weights do not fit into memory."""
        num_blocks, n = generator.num_blocks, dataset_length(inputs.data)
        if not any(self.weight_distribution.covariance(num_blocks)) and self.weight_distribution != Constant():
            warnings.warn(
                f"with {num_blocks} block of features the weights α are constant, and all replicates are equal: use a "
                "last layer with more inputs, or InfluenceBootstrap",
                stacklevel=4,
            )
        if n is not None and num_blocks > max(n, generator.split.width, SPARE_BLOCKS):
            expected = f"at most {SPARE_BLOCKS:,}, or the number of rows {n:,} or features {generator.split.width:,}"
            raise ArgumentError("num_blocks", num_blocks, expected)
        batch_size = inputs.config.batch_size if n is None else min(inputs.config.batch_size, n)
        rows = {"sample": batch_size, "pool": POOL_SIZE}.get(self.resample, 1)
        hint = "use fewer blocks, smaller batches or resample='epoch'"
        check_memory("num_blocks", num_blocks, DRAW_BYTES * rows * num_blocks, hint=hint)

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

    strata = compute_strata(load_targets(data, reduce=reduce), ignore_index=ignore_index)
    return BlockTable(assign_blocks(n, num_blocks, strata=strata, seed=seed), num_blocks)
