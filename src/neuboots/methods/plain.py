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

from neuboots.checkpoints import identity_of
from neuboots.losses import CrossEntropy, Loss, check_loss
from neuboots.methods.common import fit_net, output_of, with_outputs
from neuboots.prediction import Moments, Predictor, Stream, bytes_of
from neuboots.surgery import eval_mode, unwrap
from neuboots.training import Recipe, make_seeded


@dataclass(frozen=True)
class PlainPredictor(Predictor):
    """B equal samples of one net."""

    fitted: nn.Module

    @property
    def net(self) -> nn.Module:
        return self.fitted

    @property
    def num_distinct(self) -> int:
        return 1

    def stream(self, x: Any, num_samples: int, *, seed: int) -> Stream:
        with eval_mode(self.net):
            output = with_outputs(output_of(self.net, x))

        def chunks(size: int) -> Iterator[Tensor]:
            for start in range(0, num_samples, size):
                count = min(size, num_samples - start)
                yield output.expand(count, *output.shape)

        return Stream(num_samples, bytes_of(output), chunks, Moments(output, torch.zeros_like(output)))

    def config(self) -> dict[str, Any]:
        return {"method": "plain"}

    @classmethod
    def restore(cls, config: dict[str, Any], net: nn.Module) -> "PlainPredictor":
        return cls(net)


@dataclass(frozen=True)
class Plain:
    """One net, trained with the mean loss (eq. 2.1).

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.zeros(8, 2), torch.arange(8) % 3)
    >>> predictor = Plain().fit(lambda: nn.Linear(2, 3), data, Recipe(epochs=1, progress=False))
    >>> float(predictor.predict(torch.zeros(1, 2), 5).std.max())  # five equal samples
    0.0
    """

    loss: Loss = field(default_factory=CrossEntropy)

    def __post_init__(self) -> None:
        check_loss(self.loss)

    def fit(
        self,
        make_net: Callable[[], nn.Module],
        data: Dataset[Any],
        recipe: Recipe,
        *,
        validation: Dataset[Any] | None = None,
    ) -> PlainPredictor:
        """Train the net that `make_net()` gives, on (x, y) rows, as the recipe says."""
        net = make_seeded(make_net, recipe.seed)
        fit_net(net, data, self.loss, recipe, validation=validation, identity=identity_of(self))
        return PlainPredictor(unwrap(net).eval())
