"""The net itself: one training run, no bootstrap.

    f_b(x) = f(x) for every b

The baseline of every table: B equal samples, no spread.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from neuboots.batches import Batch, as_pair, in_memory, own_randomness, seed_everything, size_of
from neuboots.checkpoints import identity_of
from neuboots.losses import BinaryCrossEntropy, CrossEntropy, Loss, check_loss, unmasked, weighted_loss
from neuboots.prediction import Moments, Predictor, Stream, bytes_of, check_inputs, class_probabilities
from neuboots.surgery import call_net, eval_mode, has_lazy_layers, main_output, settle_lazy_layers, to_net, unwrap
from neuboots.training import Recipe, make_seeded, train


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


def example_of(net: nn.Module, data: Dataset[Any], *, seed: int) -> Any:
    """Two inputs (or the only one) as the net will see them; lazy layers of the net take their shapes from them."""
    n = size_of(data)
    with own_randomness():
        rows = list(itertools.islice(iter(data), 2)) if n is None else [data[i] for i in range(min(2, n))]
        if not rows:
            raise ValueError("got a stream that gives no row; expected at least one")
        if in_memory(data)[0] is not None:
            rows = [((row[0] if len(row) == 2 else tuple(row[:-1])), row[-1]) for row in rows]
        example = to_net(net, default_collate([as_pair(row)[0] for row in rows]))
        check_inputs(example)
        seed_everything(seed, "lazy")
        settle_lazy_layers(unwrap(net), example)
    return example


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
        if has_lazy_layers(net):
            example_of(net, data, seed=recipe.seed)

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
