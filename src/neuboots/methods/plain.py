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

from neuboots.batches import Batch
from neuboots.losses import BinaryCrossEntropy, CrossEntropy, Loss, check_loss, unmasked, weighted_loss
from neuboots.prediction import Moments, Predictor, Stream, bytes_of, class_probabilities
from neuboots.surgery import call_net, eval_mode, main_output, to_net, unwrap
from neuboots.training import Recipe, identity_of, make_seeded, train


def with_outputs(output: Tensor) -> Tensor:
    """(N,) as (N, 1): samples always have an axis of outputs."""
    return output[:, None] if output.ndim == 1 else output


def loss_figures(loss: Loss, output: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The validation figures of one batch: the mean loss, and the error rate where targets are classes."""
    losses = loss(output, y)
    mask = unmasked(loss, y)
    figures = {"loss": weighted_loss(losses, losses.new_ones(len(losses)), mask)}
    one_logit = isinstance(loss, BinaryCrossEntropy | nn.BCEWithLogitsLoss) and output.shape[1:2] == (1,)
    classes = isinstance(loss, CrossEntropy | nn.CrossEntropyLoss) and not y.is_floating_point()
    if classes or one_logit:
        labels = class_probabilities(output, 1).argmax(1)
        wrong = (labels != y.reshape(labels.shape)).float()
        figures["error"] = weighted_loss(wrong, wrong.new_ones(len(wrong)), mask)
    return figures


@dataclass(frozen=True)
class PlainPredictor(Predictor):
    """B equal samples of one net."""

    module: nn.Module

    @property
    def net(self) -> nn.Module:
        return self.module

    def stream(self, x: Any, num_samples: int, *, seed: int) -> Stream:
        with eval_mode(self.net):
            output = with_outputs(main_output(call_net(self.net, to_net(self.net, x))))

        def chunks(size: int) -> Iterator[Tensor]:
            for start in range(0, num_samples, size):
                count = min(size, num_samples - start)
                yield output.expand(count, *output.shape)

        return Stream(num_samples, bytes_of(output), chunks, Moments(output, torch.zeros_like(output)))

    def config(self) -> dict[str, Any]:
        return {"method": "plain"}

    def state(self) -> dict[str, Tensor]:
        return self.net.state_dict()

    @classmethod
    def restore(cls, config: dict[str, Any], net: nn.Module) -> "PlainPredictor":
        return cls(net)


@dataclass(frozen=True)
class Plain:
    """One net, trained with the mean loss (eq. 2.1)."""

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

        def output(model: nn.Module, batch: Batch) -> Tensor:
            return main_output(call_net(model, to_net(model, batch.x)))

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            losses = self.loss(output(model, batch), batch.y)
            return weighted_loss(losses, losses.new_ones(len(batch.index)), unmasked(self.loss, batch.y))

        def validate(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return loss_figures(self.loss, output(model, batch), batch.y)

        train(
            net,
            data,
            lambda epoch: objective,
            recipe,
            validation=validation,
            validate=validate,
            identity=identity_of(self),
        )
        return PlainPredictor(unwrap(net).eval())
