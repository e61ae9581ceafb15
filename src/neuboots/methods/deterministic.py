"""The net itself: one training run, no bootstrap.

    f_b(x) = f(x) for every b

The baseline of every table: B equal samples, no spread.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots._streaming import num_bytes
from neuboots.head import eval_mode, unwrap_model
from neuboots.losses import CrossEntropy, Loss, check_loss
from neuboots.methods._base import add_output_axis, compute_output, fit_net, register
from neuboots.prediction import Moments, Predictor, SampleStream
from neuboots.training import TrainingConfig, describe_method, initialize_model


@dataclass(frozen=True)
class DeterministicPredictor(Predictor):
    """B equal samples of one net."""

    fitted: nn.Module

    @property
    def net(self) -> nn.Module:
        return self.fitted

    @property
    def num_distinct(self) -> int:
        return 1

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        with eval_mode(self.net):
            output = add_output_axis(compute_output(self.net, x))

        def chunks(size: int) -> Iterator[Tensor]:
            for start in range(0, num_samples, size):
                count = min(size, num_samples - start)
                yield output.expand(count, *output.shape)

        return SampleStream(num_samples, num_bytes(output), chunks, Moments(output, torch.zeros_like(output)))

    def config(self) -> dict[str, Any]:
        return {"method": "deterministic"}

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "DeterministicPredictor":
        return cls(net)


@register(
    "deterministic",
    predictor=DeterministicPredictor,
    summary="the net itself: B equal samples",
    random=False,
    predict_cost="O(L)",
)
@dataclass(frozen=True)
class Deterministic:
    """One net, trained with the mean loss (eq. 2.1).

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.zeros(8, 2), torch.arange(8) % 3)
    >>> predictor = Deterministic().fit(lambda: nn.Linear(2, 3), data, TrainingConfig(epochs=1, progress=False))
    >>> float(predictor.predict(torch.zeros(1, 2), 5).std.max())  # five equal samples
    0.0
    """

    loss: Loss = field(default_factory=CrossEntropy)

    def __post_init__(self) -> None:
        check_loss(self.loss)

    def fit(
        self,
        model: Callable[[], nn.Module],
        data: Dataset[Any],
        config: TrainingConfig,
        *,
        val_data: Dataset[Any] | None = None,
    ) -> DeterministicPredictor:
        """Train the net that `model()` gives, on (x, y) rows, as the recipe says."""
        net = initialize_model(model, config.seed)
        fit_net(net, data, self.loss, config, val_data=val_data, identity=describe_method(self))
        return DeterministicPredictor(unwrap_model(net).eval())
