"""BatchEnsemble: K members that share every weight matrix up to a rank-one factor each.

    W_k = W ∘ s_k r_kᵀ,   y_k = s_k ∘ (W (x ∘ r_k)) + b_k

All members are evaluated in one pass: the batch is tiled K times, and each layer multiplies by the factors of its
member. In training every member sees every example. Members have their own biases and BatchNorm layers and share all
other weights.

Wen, Tran and Ba, BatchEnsemble: an alternative approach to efficient ensemble and lifelong learning, ICLR 2020.
"""

from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from neuboots._validation import ArgumentError, Count, check_choice, check_types
from neuboots.head import (
    cast_inputs,
    copy_to_meta,
)
from neuboots.methods._base import ModifiedNetPredictor, register
from neuboots.methods._rank_one import (
    FactorInit,
    RankOneLayer,
    RankOneMethod,
    check_ensemble,
    draw_factors,
    export_member,
    make_ensemble,
    run_members,
)
from neuboots.prediction import SampleStream, num_bytes, stream_members
from neuboots.training import (
    FitInputs,
    prepare_net,
)

_MAX_TILED_BYTES = 1 << 20  # of inputs in one pass of a prediction, so that activations fit in the cache


@dataclass(frozen=True)
class BatchEnsemblePredictor(ModifiedNetPredictor):
    """Predictor whose replicates are K members: each run of K replicates has all, in an order drawn by the seed.

    Args:
        modified: The net with rank-one layers.
        skeleton: The net before its layers were replaced, on the meta device.
        num_members: Number of members K.
    """

    num_members: int

    @property
    def num_distinct(self) -> int | None:
        return self.num_members

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        x = cast_inputs(self.modified, x)
        input_bytes = sum(num_bytes(part) for part in tree_leaves(x) if isinstance(part, Tensor))
        size = max(1, _MAX_TILED_BYTES // input_bytes)

        def run(numbers: Tensor) -> Tensor:
            return torch.cat([run_members(self.modified, x, part.tolist()) for part in torch.split(numbers, size)])

        return stream_members(num_samples, self.num_members, run, seed=seed)

    def export(self, k: int) -> nn.Module:
        """Return member k as a plain net, whose layers have the weights W ∘ s_k r_kᵀ.

        Args:
            k: Number of the member.
        """
        if not 0 <= k < self.num_members:
            raise ArgumentError("k", k, f"the number of a member, 0 … {self.num_members - 1}")
        return export_member(self.modified, k)

    def config(self) -> dict[str, Any]:
        return {"method": "batch-ensemble", "num_members": self.num_members}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "BatchEnsemblePredictor":
        check_types("predictor", config, {"num_members": Count})
        skeleton, num_members = copy_to_meta(net), config["num_members"]
        ensemble = make_ensemble(net, num_members, lambda layer, name: RankOneLayer(layer, num_members))
        return cls(ensemble.eval(), skeleton, num_members)


@register(
    "batch-ensemble",
    predictor=BatchEnsemblePredictor,
    summary="K members of one net that differ by rank-one factors of its weights",
    members=True,
    train_cost="O(LK)",
    reference="Wen, Tran and Ba, ICLR 2020",
)
@dataclass(frozen=True)
class BatchEnsemble(RankOneMethod[BatchEnsemblePredictor]):
    """K members of one net that differ by rank-one factors of its weights.

    The factors have no weight decay, whatever the optimizer applies to other weights.

    Args:
        loss: Loss per example.
        num_members: Number of members K.
        init: Distribution of the initial factors: "normal" for N(1, ½²), "random_sign" for ±1.

    Example:
        >>> from neuboots import TrainingConfig
        >>> data = (torch.randn(8, 2), torch.arange(8) % 3)
        >>> net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> predictor = BatchEnsemble(num_members=3).fit(net, data, TrainingConfig(epochs=1, progress=False))
        >>> predictor.predict(torch.zeros(5, 2), 3).samples.shape  # (B, N, C)
        torch.Size([3, 5, 3])
    """

    init: FactorInit = "normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("init", self.init, get_args(FactorInit))

    def _fit(self, inputs: FitInputs) -> BatchEnsemblePredictor:
        num_members = self.num_members
        net, example = prepare_net(inputs, copy=True)
        skeleton = copy_to_meta(net)
        ensemble = make_ensemble(net, num_members, lambda layer, name: RankOneLayer(layer, num_members))
        draw_factors(ensemble, self.init, seed=inputs.config.seed)
        check_ensemble(ensemble, num_members, example)
        self._train_members(ensemble, inputs)
        return BatchEnsemblePredictor(ensemble.eval(), skeleton, num_members)
