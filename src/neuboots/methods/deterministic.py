"""Deterministic baseline: one net, one training run, no bootstrap.

    f_b(x) = f(x) for every b

All B samples are equal.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from neuboots.head import add_output_axis, compute_output, unwrap_model
from neuboots.methods._base import register
from neuboots.prediction import Predictor, SampleStream, stream_members
from neuboots.training import BaseMethod, FitInputs, initialize_model


@dataclass(frozen=True)
class DeterministicPredictor(Predictor):
    """Predictor with B equal samples.

    Args:
        fitted: The trained net.
    """

    fitted: nn.Module

    @property
    def net(self) -> nn.Module:
        return self.fitted

    @property
    def num_distinct(self) -> int:
        return 1

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        output = add_output_axis(compute_output(self.net, x))
        return stream_members(num_samples, 1, lambda numbers: output[None], seed=seed)

    def config(self) -> dict[str, Any]:
        return {"method": "deterministic"}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "DeterministicPredictor":
        return cls(net)


@register(
    "deterministic",
    predictor=DeterministicPredictor,
    summary="one net without uncertainty: B equal samples",
    random=False,
    predict_cost="O(L)",
)
@dataclass(frozen=True)
class Deterministic(BaseMethod[DeterministicPredictor]):
    """One net, trained with the mean loss (eq. 2.1).

    Args:
        loss: Loss per example.

    Example:
        >>> import torch
        >>> from neuboots import TrainingConfig
        >>> data = (torch.zeros(8, 2), torch.arange(8) % 3)
        >>> predictor = Deterministic().fit(nn.Linear(2, 3), data, TrainingConfig(epochs=1, progress=False))
        >>> float(predictor.predict(torch.zeros(1, 2), 5).std.max())
        0.0
    """

    def _fit(self, inputs: FitInputs) -> DeterministicPredictor:
        net = initialize_model(inputs.factory, inputs.config.seed)
        self._train_net(net, inputs)
        return DeterministicPredictor(unwrap_model(net).eval())
