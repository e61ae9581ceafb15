"""GBS, the generative bootstrap sampler: the bootstrap weights are an input of every layer.

    h_{l+1} = act(W_l h_l + V_l α + b_l),   ĝ = argmin_g E_α [ 1/n Σᵢ α_{u(i)} ℓ(g(Xᵢ, α), yᵢ) ]     (eq. 2.6)

Concatenating α ∈ R^S to the input of a linear layer adds V α to its output, where V are the S new columns of the
widened layer. For a convolution, α is given as S constant planes; each adds a constant to every output channel, the
same at every pixel (also at the border, where padded planes would not be constant). A replicate costs one pass.

Shin, Wang and Liu, Scalable uncertainty quantification via generative bootstrap sampler, arXiv 2006.00767, 2020; its
use on networks is described in Shin, Cho, Min and Lim, Neural Bootstrapper, NeurIPS 2021, section 3, which also reports
that it degrades as networks get deeper.
"""

import math
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset

from neuboots._prng import derive_keys, draw_uniform
from neuboots._validation import ArgumentError, Count, check_choice, check_int, check_types
from neuboots.head import (
    Head,
    LayerWrapper,
    add_output_axis,
    call_net,
    cast_inputs,
    channels_first,
    copy_to_meta,
    eval_mode,
    extract_output,
    replace_layers,
)
from neuboots.loading import Batch, check_length, dataset_length, preserve_rng_state, seed_everything
from neuboots.methods._base import ModifiedNetPredictor, register, set_context
from neuboots.methods._rank_one import LAYER_TYPES, check_replacements, outputs_match
from neuboots.methods.neuboots import draw_replicate_weights, draw_row_weights, make_blocks, make_weighted_objective
from neuboots.prediction import SampleStream, stream_forward_passes
from neuboots.training import BaseMethod, FitInputs, prepare_net, validation_metrics
from neuboots.weights import (
    Dirichlet,
    ResampleSchedule,
    WeightDistribution,
    WeightSchedule,
    build_distribution,
    check_weight_distribution,
    describe_distribution,
)

MAX_BLOCKS = 100  # S in the authors' package; every layer has S further columns, so that S = n would outgrow the net

_ALPHA: ContextVar[Tensor | None] = ContextVar("alpha", default=None)  # of the current pass


class WidenedLayer(LayerWrapper):
    """A layer with the input (x, α): W x + V α + b; without α, the layer itself.

    Args:
        layer: The layer.
        num_blocks: Dimension S of α.
        *name: Name of the random numbers of the initial V.
    """

    def __init__(self, layer: Head, num_blocks: int, *name: int | str) -> None:
        super().__init__(layer)
        # As torch initialises the columns of α in the widened layer: uniform within 1/√fan-in, where the fan-in counts
        # α. Over a constant plane the k weights of a kernel add up, with the variance of one weight of a 1×1 kernel.
        outputs, width = layer.weight.shape[:2]
        uniform = draw_uniform(derive_keys(torch.arange(outputs), *name)[:, None], torch.arange(num_blocks))
        self.V = nn.Parameter(
            ((2.0 * uniform - 1.0) * (1.0 / math.sqrt(width + num_blocks))).to(layer.weight)
        )  # (C, S)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        alpha = _ALPHA.get()
        if alpha is None:
            return out
        shift = nn.functional.linear(alpha.to(self.V), self.V).to(out.dtype)  # (C,) or (N, C)
        axis = out.ndim - 1 if isinstance(self.layer, nn.Linear) else out.ndim - self.layer.weight.ndim + 1
        shape = [1] * out.ndim
        shape[axis] = shift.shape[-1]
        if shift.ndim == 2:
            if len(shift) != len(out) or axis == 0:
                expected = f"'step' or 'epoch', since a layer sees {len(out)} rows of {len(shift)} examples"
                raise ArgumentError("resample", "sample", expected)
            shape[0] = len(shift)
        return out + shift.view(shape)


def check_uncompiled(net: nn.Module) -> None:
    """Raise if parts of the net are compiled, whose layers cannot be given other inputs or parameters."""
    if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in net.modules()):
        raise ArgumentError("model", type(net), "a net without compiled parts")


class GBSGenerator(nn.Module):
    """g(x, α): a net whose Linear layers and convolutions are given α; it is changed in place.

    Attention projections, recurrent layers and transposed convolutions are unchanged.

    Args:
        net: The net.
        num_blocks: Dimension S of α.
        seed: Seed of the initial V.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> g = GBSGenerator(net, num_blocks=5)
        >>> g(torch.zeros(2, 4), torch.ones(5)).shape, [tuple(layer.V.shape) for layer in (net[0], net[2])]
        (torch.Size([2, 3]), [(8, 5), (3, 5)])
    """

    def __init__(self, net: nn.Module, num_blocks: int, *, seed: int = 0) -> None:
        super().__init__()
        check_int("num_blocks", num_blocks, minimum=1)
        check_uncompiled(net)
        self.net = nn.Sequential(net) if isinstance(net, LAYER_TYPES) else net
        self.num_blocks = num_blocks

        def widen(layer: nn.Module, name: str) -> nn.Module:
            return WidenedLayer(cast(Head, layer), num_blocks, seed, "widened", name)

        if not replace_layers(self.net, LAYER_TYPES, widen):
            raise ArgumentError("model", type(net), "a net with a Linear layer or a convolution")

    def forward(self, x: Any, alpha: Tensor | None = None) -> Tensor:
        """Compute g(x, α); α is (S,) or (N, S), and None gives the net without V."""
        if alpha is not None and (alpha.ndim not in (1, 2) or alpha.shape[-1] != self.num_blocks):
            raise ArgumentError("alpha", alpha, f"a tensor of shape ({self.num_blocks},) or (N, {self.num_blocks})")
        with set_context(_ALPHA, alpha):
            output = extract_output(call_net(self.net, x), x)
        return channels_first(self.net, x, output)


def _run_example(net: nn.Module, example: Any, seed: int) -> Tensor:
    """Return the outputs in evaluation mode, with the same random numbers each time; a net may write into inputs."""
    example = tree_map_only(Tensor, Tensor.clone, example)
    with eval_mode(net), torch.no_grad(), preserve_rng_state():
        seed_everything(seed, "example")
        return extract_output(call_net(net, example))


@dataclass(frozen=True)
class GBSPredictor(ModifiedNetPredictor):
    """Predictor whose replicate b is a pass with α_b in every layer.

    Args:
        modified: The trained generator.
        skeleton: The net before it was widened, on the meta device.
        weight_distribution: Distribution of α that it was trained with.
    """

    modified: GBSGenerator
    weight_distribution: WeightDistribution

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        generator = self.modified
        x = cast_inputs(generator, x)

        def run(b: int) -> Tensor:
            alpha = draw_replicate_weights(self.weight_distribution, generator.num_blocks, b, b + 1, seed)[0]
            return add_output_axis(generator(x, alpha))

        return stream_forward_passes(num_samples, run)

    def config(self) -> dict[str, Any]:
        distribution = describe_distribution(self.weight_distribution)
        return {"method": "gbs", "num_blocks": self.modified.num_blocks, "weight_distribution": distribution}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "GBSPredictor":
        check_types("predictor", config, {"num_blocks": Count, "weight_distribution": dict})
        skeleton, distribution = copy_to_meta(net), build_distribution(config["weight_distribution"])
        return cls(GBSGenerator(net, config["num_blocks"]).eval(), skeleton, distribution)


@register(
    "gbs",
    predictor=GBSPredictor,
    summary="one net with the bootstrap weights as an input of every layer",
    reference="Shin, Wang and Liu, arXiv 2006.00767, 2020",
)
@dataclass(frozen=True)
class GBS(BaseMethod[GBSPredictor]):
    """One net with the bootstrap weights as an input of every layer.

    If α is constant within a batch (`resample` of "step" or "epoch"), a BatchNorm after a widened layer subtracts V α
    together with the batch mean, and the net cannot learn from α.

    Args:
        loss: Loss per example.
        weight_distribution: Distribution of α; the paper's is Dirichlet(1).
        num_blocks: Number of blocks S; None for 100, or n if that is smaller.
        resample: When α is drawn in training: for each "sample", "step" or "epoch", or from a "pool" of 256 draws.

    Example:
        >>> from neuboots import TrainingConfig
        >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> config = TrainingConfig(epochs=2, progress=False)
        >>> predictor = GBS(num_blocks=10).fit(net, (x, (x[:, 0] > 0).long()), config)
        >>> predictor.predict(x[:5], 20).samples.shape  # (B, N, C)
        torch.Size([20, 5, 2])
    """

    weight_distribution: WeightDistribution = field(default_factory=Dirichlet)
    num_blocks: int | None = None
    resample: ResampleSchedule = "sample"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_weight_distribution(self.weight_distribution)
        check_choice("resample", self.resample, get_args(ResampleSchedule))
        if self.num_blocks is not None:
            check_int("num_blocks", self.num_blocks, minimum=1)

    def _row_weights(
        self, predictor: GBSPredictor, data: Dataset[Any], num_samples: int, seed: int, fit_seed: int
    ) -> Tensor:
        blocks = make_blocks(data, predictor.modified.num_blocks, loss=self.loss, seed=fit_seed)
        return draw_row_weights(predictor.weight_distribution, blocks, check_length(data), num_samples, seed)

    def _fit(self, inputs: FitInputs) -> GBSPredictor:
        seed = inputs.config.seed
        net, example = prepare_net(inputs, copy=True)
        skeleton = copy_to_meta(net)
        expected = _run_example(net, example, seed)
        num_blocks = self.num_blocks or min(MAX_BLOCKS, dataset_length(inputs.data) or MAX_BLOCKS)
        generator = GBSGenerator(net, num_blocks, seed=seed)
        layers = [layer for layer in generator.modules() if isinstance(layer, WidenedLayer)]
        with check_replacements((layer, layer.layer) for layer in layers):
            outputs = _run_example(generator.net, example, seed)
        if not outputs_match(outputs, expected):
            raise ValueError(
                "without α the widened net has other outputs than before; expected a net whose forward does not depend "
                "on the types of its layers: use a method that keeps the layers"
            )
        if self.resample in ("sample", "pool"):  # raises now if the layers see other rows than the examples
            with eval_mode(generator), torch.no_grad():
                generator(example, torch.ones(len(generator(example)), num_blocks))
        blocks = make_blocks(inputs.data, num_blocks, loss=self.loss, seed=seed)
        schedule = WeightSchedule(self.weight_distribution, blocks, seed, self.resample)

        def validate(g: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return validation_metrics(self.loss, g(cast_inputs(g, batch.x), torch.ones(num_blocks)), batch.y)  # at E α

        self._train(generator, inputs, make_weighted_objective(schedule, self.loss), validate)
        return GBSPredictor(generator.eval(), skeleton, self.weight_distribution)
