"""GBS, the generative bootstrap sampler: the bootstrap weights are an input of every layer.

    h_{l+1} = act(W_l h_l + V_l α + b_l),   ĝ = argmin_g E_α [ 1/n Σᵢ α_{u(i)} ℓ(g(Xᵢ, α), yᵢ) ]     (eq. 2.6)

Concatenating α ∈ R^S to the input of a linear layer adds V α to its output, V being the S new columns of the widened
layer. For a convolution α stands in S constant planes; each then adds a number to every output channel, the same at
every pixel (also at the border, where padded planes would not be constant). Prediction is one pass for each replicate.

Shin, Wang and Liu, Scalable uncertainty quantification via generative bootstrap sampler, arXiv 2006.00767, 2020; its
use on networks is described in Shin, Cho, Min and Lim, Neural Bootstrapper, NeurIPS 2021, section 3, which also reports
that it degrades as networks get deeper: the weights that enter early are lost on the way.
"""

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset

from neuboots._prng import derive_keys, draw_uniform
from neuboots.head import (
    Head,
    call_net,
    cast_inputs,
    copy_to_meta,
    eval_mode,
    extract_output,
    replace_layers,
    unwrap_model,
)
from neuboots.loading import Batch, dataset_length, preserve_rng_state, seed_everything
from neuboots.losses import CrossEntropy, Loss, check_loss
from neuboots.methods._base import add_output_axis, load_example, register, validation_metrics
from neuboots.methods.batch_ensemble import check_replacements, outputs_match
from neuboots.methods.neuboots import draw_replicate_weights, make_blocks, make_weighted_objective
from neuboots.prediction import Predictor, SampleStream, stream_forward_passes
from neuboots.training import TrainingConfig, describe_method, initialize_model, train
from neuboots.weights import (
    Dirichlet,
    ResampleSchedule,
    WeightDistribution,
    WeightSchedule,
    build_distribution,
    check_blocks,
    check_schedule,
    check_weight_distribution,
    describe_distribution,
)

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MAX_BLOCKS = 100  # S of the authors' own package; every layer gets S columns, so S = n would outgrow the net itself

_ALPHA: ContextVar[Tensor | None] = ContextVar("alpha", default=None)  # what the layers of this pass are given


class WidenedLayer(nn.Module):
    """A layer with the input (x, α): W x + V α + b. Without α it is the layer itself."""

    def __init__(self, layer: Head, num_blocks: int, *name: int | str) -> None:
        super().__init__()
        self.layer = layer
        self.V = nn.Parameter(_new_columns(layer.weight, num_blocks, *name))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        alpha = _ALPHA.get()
        if alpha is None:
            return out
        added = nn.functional.linear(alpha.to(self.V), self.V).to(out.dtype)  # (C,) or (N, C)
        return out + self._shaped(added, out)

    def _shaped(self, added: Tensor, out: Tensor) -> Tensor:
        axis = out.ndim - 1 if isinstance(self.layer, nn.Linear) else out.ndim - self.layer.weight.ndim + 1
        shape = [1] * out.ndim
        shape[axis] = added.shape[-1]
        if added.ndim == 2:
            if len(added) != len(out) or axis == 0:
                raise ValueError(
                    f"a layer sees {len(out)} rows of {len(added)} inputs, so α cannot be drawn for each sample; "
                    "expected the batch on the first axis: choose redraw='step' or 'epoch'"
                )
            shape[0] = len(added)
        return added.view(shape)

    def __getattr__(self, name: str) -> Any:
        """What the net asks of the layer (its weight, its width), the layer answers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def _new_columns(weight: Tensor, num_blocks: int, *name: int | str) -> Tensor:
    """V as torch would begin the columns for α of the widened layer: uniform within 1/√fan-in, where the fan-in counts
    α too. Over a constant plane the columns at the k places of a kernel add up; their sum has the variance, k times a
    k-th, of a column of a 1×1 kernel, which is drawn in their place: (C, S)."""
    outputs, width = weight.shape[:2]
    bound = 1.0 / math.sqrt(width + num_blocks)
    drawn = draw_uniform(derive_keys(torch.arange(outputs), *name)[:, None], torch.arange(num_blocks))
    return (bound * (2.0 * drawn - 1.0)).to(weight)


def check_uncompiled(net: nn.Module) -> None:
    """Compiled code has its layers' inputs and parameters built in."""
    if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in net.modules()):
        raise ValueError(
            "parts of the net are compiled, and their layers cannot be given other inputs or parameters; expected a "
            "net that is not: compile none of it"
        )


class GBSGenerator(nn.Module):
    """g(x, α): the net, changed in place so that every Linear layer and convolution is given α.

    Attention projections, recurrent layers and transposed convolutions keep the inputs they have.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> g = GBSGenerator(net, num_blocks=5)
    >>> g(torch.zeros(2, 4), torch.ones(5)).shape, [tuple(layer.V.shape) for layer in (net[0], net[2])]
    (torch.Size([2, 3]), [(8, 5), (3, 5)])
    """

    def __init__(self, net: nn.Module, num_blocks: int, *, seed: int = 0) -> None:
        super().__init__()
        check_blocks(num_blocks)
        check_uncompiled(net)
        self.net = nn.Sequential(net) if isinstance(net, LAYERS) else net
        self.num_blocks = num_blocks

        def widen(layer: nn.Module, name: str) -> nn.Module:
            return WidenedLayer(cast(Head, layer), num_blocks, seed, "widened", name)

        if not replace_layers(self.net, LAYERS, widen):
            raise ValueError("the net has no Linear layer and no convolution to widen; expected at least one")

    def forward(self, x: Any, alpha: Tensor | None = None) -> Tensor:
        """g(x, α). α is (S,), or (N, S) with a row for each input; None is the net without its columns V."""
        if alpha is not None and (alpha.ndim not in (1, 2) or alpha.shape[-1] != self.num_blocks):
            raise ValueError(
                f"got α of shape {tuple(alpha.shape)}; expected ({self.num_blocks},), or (N, {self.num_blocks}) with a "
                "row for each input"
            )
        before = _ALPHA.set(alpha)
        try:
            return extract_output(call_net(self.net, x), x)
        finally:
            _ALPHA.reset(before)


def _outputs_at(net: nn.Module, example: Any, seed: int) -> Tensor:
    """The outputs in evaluation mode, with the same random numbers each time; a net may write into its inputs."""
    example = tree_map_only(Tensor, Tensor.clone, example)
    with eval_mode(net), torch.no_grad(), preserve_rng_state():
        seed_everything(seed, "example")
        return extract_output(call_net(net, example))


def _check_surgery(generator: GBSGenerator, example: Any, before: Tensor, seed: int) -> None:
    """A net that is another one with other layers in it is refused now, not after the training."""
    layers = [layer for layer in generator.modules() if isinstance(layer, WidenedLayer)]
    with check_replacements((layer, layer.layer) for layer in layers):
        after = _outputs_at(generator.net, example, seed)
    if not outputs_match(after, before):
        raise ValueError(
            "without α the widened net has other outputs than the net had; expected a net whose forward does not ask "
            "what its layers are (isinstance): take a method that leaves the layers as they are"
        )


@dataclass(frozen=True)
class GBSPredictor(Predictor):
    """Replicate b is a pass with α_b in every layer."""

    generator: GBSGenerator
    skeleton: nn.Module
    weight_distribution: WeightDistribution  # the one it was trained with

    @property
    def net(self) -> nn.Module:
        return self.skeleton

    @property
    def module(self) -> nn.Module:
        return self.generator

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        generator = self.generator
        x = cast_inputs(generator, x)

        def run(b: int) -> Tensor:
            alpha = draw_replicate_weights(self.weight_distribution, generator.num_blocks, b, b + 1, seed)[0]
            with eval_mode(generator):
                return add_output_axis(generator(x, alpha))

        return stream_forward_passes(num_samples, run)

    def config(self) -> dict[str, Any]:
        return {
            "method": "gbs",
            "num_blocks": self.generator.num_blocks,
            "law": describe_distribution(self.weight_distribution),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "GBSPredictor":
        skeleton = copy_to_meta(net)
        return cls(GBSGenerator(net, config["num_blocks"]).eval(), skeleton, build_distribution(config["law"]))


@register(
    "gbs",
    predictor=GBSPredictor,
    summary="one net with the bootstrap weights as an input of every layer",
    reference="Shin, Wang and Liu, arXiv 2006.00767, 2020",
)
@dataclass(frozen=True)
class GBS:
    """Options of GBS. `num_blocks` is S (None: 100, or n if that is less); `weight_distribution` is the paper's Dirichlet(1).

    `resample` says how long one α is held. Drawn for each sample (the default), α differs inside a batch; held for a step
    or an epoch it does not, and a BatchNorm after a widened layer subtracts V α together with the batch's mean: such a
    net learns nothing of α. Accuracy suffers in deep nets, as the paper says.

    >>> from torch.utils.data import TensorDataset
    >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    >>> data = TensorDataset(x, (x[:, 0] > 0).long())
    >>> model = lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> predictor = GBS(num_blocks=10).fit(model, data, TrainingConfig(epochs=2, progress=False))
    >>> predictor.predict(x[:5], 20).samples.shape  # (B, N, C)
    torch.Size([20, 5, 2])
    """

    loss: Loss = field(default_factory=CrossEntropy)
    weight_distribution: WeightDistribution = field(default_factory=Dirichlet)
    num_blocks: int | None = None
    resample: ResampleSchedule = "sample"

    def __post_init__(self) -> None:
        check_loss(self.loss)
        check_weight_distribution(self.weight_distribution)
        check_schedule(self.resample, 0)
        if self.num_blocks is not None:
            check_blocks(self.num_blocks)

    def fit(
        self,
        model: Callable[[], nn.Module],
        data: Dataset[Any],
        config: TrainingConfig,
        *,
        val_data: Dataset[Any] | None = None,
    ) -> GBSPredictor:
        """Train the net that `model()` gives, widened by α, with the weighted loss (eq. 2.6)."""
        net = unwrap_model(initialize_model(model, config.seed))
        example = load_example(net, data, seed=config.seed)
        skeleton = copy_to_meta(net)
        before = _outputs_at(net, example, config.seed)
        num_blocks = self.num_blocks or min(MAX_BLOCKS, dataset_length(data) or MAX_BLOCKS)
        generator = GBSGenerator(net, num_blocks, seed=config.seed)
        _check_surgery(generator, example, before, config.seed)
        self._check_rows(generator, example)
        blocks = make_blocks(data, num_blocks, loss=self.loss, seed=config.seed)
        plan = WeightSchedule(self.weight_distribution, blocks, config.seed, self.resample)

        def validate(g: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return validation_metrics(self.loss, g(cast_inputs(g, batch.x), torch.ones(num_blocks)), batch.y)  # at E α

        train(
            generator,
            data,
            make_weighted_objective(plan, self.loss),
            config,
            val_data=val_data,
            validate=validate,
            identity=describe_method(self),
        )
        return GBSPredictor(generator.eval(), skeleton, self.weight_distribution)

    def _check_rows(self, generator: GBSGenerator, example: Any) -> None:
        """A net whose layers see other rows than the inputs is refused now, not at the first step."""
        if self.resample not in ("sample", "pool"):
            return
        with eval_mode(generator), torch.no_grad():
            rows = len(generator(example))
            generator(example, torch.ones(rows, generator.num_blocks))
