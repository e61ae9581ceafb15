"""NeuBoots: one training run, B bootstrapped networks (paper, section 3; Algorithms 1 and 2).

ĝ = argmin_g E_α [ 1/n Σᵢ α_{u(i)} ℓ(g(Xᵢ, α), yᵢ) ],   g(x, α) = M(F(x) ⊙ α)        (eqs. 2.6, 3.1)
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._prng import derive_keys
from neuboots._streaming import num_bytes
from neuboots.generator import BootstrapGenerator
from neuboots.head import cast_inputs, eval_mode
from neuboots.loading import Batch, dataset_length, load_targets
from neuboots.losses import CrossEntropy, Loss, SquaredError, check_loss, valid_mask, weighted_mean
from neuboots.methods._base import add_output_axis, load_example, register, validation_metrics
from neuboots.prediction import Moments, Predictor, SampleStream, check_inputs
from neuboots.training import Objective, TrainingConfig, describe_method, initialize_model, train
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
    check_blocks,
    check_link,
    check_schedule,
    check_weight_distribution,
    compute_strata,
    describe_distribution,
    link_moments,
)


def draw_replicate_weights(
    weight_distribution: WeightDistribution, num_blocks: int, start: int, stop: int, seed: int
) -> Tensor:
    """α_b for b in start … stop−1: each a function of (seed, b) alone: (stop − start, S)."""
    return weight_distribution.sample(derive_keys(torch.arange(start, stop), seed, "replicate"), num_blocks)


def _with_output_axis(z: Tensor) -> Tensor:
    """(B, N) as (B, N, 1)."""
    return z if z.ndim > 2 else z[..., None]


@dataclass(frozen=True)
class NeuBootsPredictor(Predictor):
    """B replicates from one pass through the features (Algorithm 2)."""

    generator: BootstrapGenerator
    weight_distribution: WeightDistribution  # the one it was trained with

    @property
    def net(self) -> nn.Module:
        return self.generator.net

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        generator = self.generator
        with eval_mode(generator):
            at = generator.at(cast_inputs(generator, x))
        output = add_output_axis(at.output)
        moments = None
        if at.passed.ends_at_head:  # past the head exact moments may cost D upsamplings: ask `moments` for them
            moments = at.moments(self.weight_distribution)

        def chunks(size: int) -> Iterator[Tensor]:
            for start in range(0, num_samples, size):
                stop = min(start + size, num_samples)
                alphas = draw_replicate_weights(self.weight_distribution, generator.num_blocks, start, stop, seed)
                yield _with_output_axis(at(alphas))  # no name for it here: it would outlive its use

        each = num_bytes(output) + num_bytes(generator.split.head.weight)  # a replicate's outputs and its head
        return SampleStream(num_samples, each, chunks, moments)

    def moments(self, x: Any) -> Moments:
        """Exact mean and standard deviation over all replicates (B = ∞), without sampling."""
        check_inputs(x)
        with eval_mode(self.generator), torch.no_grad():
            return self.generator.moments(cast_inputs(self.generator, x), self.weight_distribution)

    def export(self, b: int, *, seed: int = 0) -> nn.Module:
        """Replicate b of this seed as a plain net: its head has the weights W diag h(α_b)."""
        alpha = draw_replicate_weights(self.weight_distribution, self.generator.num_blocks, b, b + 1, seed)[0]
        return self.generator.export(alpha)

    def config(self) -> dict[str, Any]:
        generator = self.generator
        return {
            "method": "neuboots",
            "head": generator.split.name,
            "num_blocks": generator.num_blocks,
            "link": generator.link,
            "law": describe_distribution(self.weight_distribution),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "NeuBootsPredictor":
        generator = BootstrapGenerator(net, head=config["head"], num_blocks=config["num_blocks"], link=config["link"])
        return cls(generator.eval(), build_distribution(config["law"]))


@register(
    "neuboots",
    predictor=NeuBootsPredictor,
    summary="one net whose head is re-weighted: B bootstrapped nets from one pass",
    predict_cost="O(L + K)",
    reference="Shin, Cho, Min and Lim, Neural Bootstrapper, NeurIPS 2021",
)
@dataclass(frozen=True)
class NeuBoots:
    """Options of NeuBoots. The defaults were found by measurement on classes (docs/decisions/0002): a law of
    concentration 5, drawn for each sample. A net that fits its training set calibrates better with `Dirichlet()`.

    `num_blocks` is S (None: S = D). `resample` says how long one α is held, `warmup` for how many epochs α = 1.
    `tune="head"` trains the last layer only, on top of a pretrained net. `NeuBoots.paper()` is the paper's
    Algorithm 1 to the letter, `NeuBoots.regression()` is for continuous targets.

    >>> from torch.utils.data import TensorDataset
    >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    >>> data = TensorDataset(x, (x[:, 0] > 0).long())
    >>> model = lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> predictor = NeuBoots().fit(model, data, TrainingConfig(epochs=2, progress=False))
    >>> predictor.predict(x[:5], 100).samples.shape  # (B, N, C)
    torch.Size([100, 5, 2])
    """

    loss: Loss = field(default_factory=CrossEntropy)
    weight_distribution: WeightDistribution = field(default_factory=lambda: Dirichlet(concentration=5.0))
    link: Link = "identity"
    resample: ResampleSchedule = "sample"
    warmup: int = 0
    num_blocks: int | None = None
    head: str | None = None
    tune: Literal["all", "head"] = "all"

    def __post_init__(self) -> None:
        if self.tune not in ("all", "head"):
            raise ValueError(f"got tune={self.tune!r}; expected 'all' or 'head'")
        check_loss(self.loss)
        check_weight_distribution(self.weight_distribution)
        check_link(self.link)
        check_schedule(self.resample, self.warmup)
        if self.num_blocks is not None:
            check_blocks(self.num_blocks)

    @classmethod
    def paper(cls, loss: Loss | None = None) -> "NeuBoots":
        """α ~ S × Dirichlet(1, …, 1) redrawn at each epoch, S = D, identity link, no warm-up."""
        return cls(loss=loss or CrossEntropy(), weight_distribution=Dirichlet(), resample="epoch")

    @classmethod
    def regression(cls, loss: Loss | None = None) -> "NeuBoots":
        """A concentrated law: the weights multiply the features, so a law as wide as the paper's costs accuracy
        wherever the noise of the data is small beside the target's spread."""
        return cls(loss=loss or SquaredError(), weight_distribution=Dirichlet(concentration=20.0))

    def generator(self, net: nn.Module, *, example: Any = None) -> BootstrapGenerator:
        """g(x, α) around this net, as the options say."""
        generator = BootstrapGenerator(net, head=self.head, num_blocks=self.num_blocks, link=self.link, example=example)
        if self.tune == "head":
            generator.freeze_features()
        return generator

    def plan(self, generator: BootstrapGenerator, data: Dataset[Any], *, seed: int = 0) -> WeightSchedule:
        """How α is drawn over this data set, as the options say: for `fit`, and for a loop of your own."""
        blocks = make_blocks(data, generator.num_blocks, loss=self.loss, seed=seed)
        return WeightSchedule(self.weight_distribution, blocks, seed, self.resample, self.warmup)

    def fit(
        self,
        model: Callable[[], nn.Module],
        data: Dataset[Any],
        config: TrainingConfig,
        *,
        val_data: Dataset[Any] | None = None,
    ) -> NeuBootsPredictor:
        """Algorithm 1: train the net that `model()` gives, on (x, y) rows, as the recipe says."""
        net = initialize_model(model, config.seed)
        example = load_example(net, data, seed=config.seed)
        generator = self.generator(net, example=example)
        self._check_replicates(generator, example)
        plan = self.plan(generator, data, seed=config.seed)

        def validate(g: nn.Module, batch: Batch) -> dict[str, Tensor]:
            output = g(
                cast_inputs(g, batch.x), compute_mean_weights(self.weight_distribution, self.link, generator.num_blocks)
            )
            return validation_metrics(self.loss, output, batch.y)

        train(
            generator,
            data,
            make_weighted_objective(plan, self.loss),
            config,
            val_data=val_data,
            validate=validate,
            identity=describe_method(self),
        )
        return NeuBootsPredictor(generator.eval(), self.weight_distribution)

    def _check_replicates(self, generator: BootstrapGenerator, example: Any) -> None:
        """A net that cannot be replicated is refused now, not after the training."""
        with eval_mode(generator), torch.no_grad():
            at = generator.at(example)
            neutral = torch.full((2, generator.num_blocks), 1.0 if self.link == "identity" else 0.0)  # h(α) = 1
            same = torch.allclose(at(neutral)[1], at.output, rtol=1e-2, atol=1e-3)
        if not same:
            raise ValueError(
                f"re-weighting the head {generator.split.name!r} does not give the net's own output where it should; "
                "expected a plain last layer: name another one (head=…)"
            )
        rows = _rows_of(example)
        if self.resample in ("sample", "pool") and len(at.passed.phi) != rows:
            raise ValueError(
                f"the features of {rows} inputs have {len(at.passed.phi)} rows, so α cannot be drawn for each sample; "
                "expected the batch on the first axis: choose redraw='step' or 'epoch'"
            )


def make_weighted_objective(plan: WeightSchedule, loss: Loss) -> Callable[[int], Objective]:
    """epoch → the mean over a batch of α_{u(i)} ℓ(g(Xᵢ, α), yᵢ), with α as the plan draws it (eq. 2.6)."""

    def objective_at(epoch: int) -> Objective:
        weights = plan.at_epoch(epoch)

        def objective(g: nn.Module, batch: Batch) -> Tensor:
            alpha, w = weights(batch.index, step=batch.step)
            losses = loss(g(cast_inputs(g, batch.x), alpha), batch.y)
            return weighted_mean(losses, w, valid_mask(loss, batch.y))

        return objective

    return objective_at


def compute_mean_weights(weight_distribution: WeightDistribution, link: Link, num_blocks: int) -> Tensor:
    """The α whose factor is the mean factor, h(α) = E h: where the net ends at its head, the mean of all replicates."""
    mean = link_moments(weight_distribution, link, num_blocks)[0]
    return torch.full((num_blocks,), mean if link == "identity" else -math.log(mean))


def make_blocks(data: Dataset[Any], num_blocks: int, *, loss: Loss | None = None, seed: int = 0) -> Blocks:
    """u for this data set: stratified by its targets, or hashed for a stream."""
    n = dataset_length(data)
    if n is None:
        return HashedBlocks(num_blocks, seed)
    ignore_index = getattr(loss, "ignore_index", -100)

    def reduce(y: Tensor) -> Tensor:  # a label map becomes its stratum at once: all of them may not fit in memory
        return y if y.is_floating_point() or y.numel() == 1 else compute_strata(y[None], ignore_index=ignore_index)[0]

    strata = compute_strata(load_targets(data, seed=seed, reduce=reduce), ignore_index=ignore_index)
    return BlockTable(assign_blocks(n, num_blocks, strata=strata, seed=seed), num_blocks)


def _rows_of(x: Any) -> int:
    first = next(iter(x.values())) if isinstance(x, Mapping) else x[0] if isinstance(x, tuple | list) else x
    return len(first) if first.ndim else 1
