"""What several methods share: the outputs of a net, the figures of its validation, the plain fit."""

import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import Dataset, default_collate

from neuboots.batches import Batch, as_pair, in_memory, own_randomness, seed_everything, size_of
from neuboots.losses import BinaryCrossEntropy, Brier, CrossEntropy, Loss, unmasked, weighted_loss
from neuboots.prediction import check_inputs, class_probabilities
from neuboots.surgery import call_net, has_lazy_layers, main_output, settle_lazy_layers, to_net, unwrap
from neuboots.training import Recipe, train


def with_outputs(output: Tensor) -> Tensor:
    """(N,) as (N, 1): samples always have an axis of outputs."""
    return output[:, None] if output.ndim == 1 else output


def loss_figures(loss: Loss, output: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The validation figures of one batch: the mean loss, and the error rate where targets are classes."""
    losses = loss(output, y)
    mask = unmasked(loss, y)
    figures = {"loss": weighted_loss(losses, losses.new_ones(len(losses)), mask)}
    one_logit = isinstance(loss, BinaryCrossEntropy | nn.BCEWithLogitsLoss) and output.shape[1:2] == (1,)
    classes = isinstance(loss, CrossEntropy | Brier | nn.CrossEntropyLoss) and not y.is_floating_point()
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
        example = to_net(net, _together([as_pair(row)[0] for row in rows]))
        check_inputs(example)
        seed_everything(seed, "lazy")
        settle_lazy_layers(unwrap(net), example)
    return example


def _together(inputs: list[Any]) -> Any:
    """A batch of these inputs; of the first one twice, where they are of several sizes and train one by one."""
    try:
        return default_collate(inputs)
    except RuntimeError:
        return default_collate(inputs[:1] * 2)


def output_of(net: nn.Module, x: Any) -> Tensor:
    """The outputs of the net at x, on its device and in its precision: (N, C, *), or (N,)."""
    x = to_net(net, x)
    return main_output(call_net(net, x), x)


def output_with(net: nn.Module, tensors: dict[str, Tensor], x: Any) -> Tensor:
    """The outputs of the net at x with these tensors in the place of its own; the net is left as it is."""
    args, kwargs = ((), dict(x)) if isinstance(x, Mapping) else (tuple(x) if isinstance(x, tuple | list) else (x,), {})
    return main_output(functional_call(net, tensors, args, kwargs), x)


def fit_net(
    net: nn.Module,
    data: Dataset[Any],
    loss: Loss,
    recipe: Recipe,
    *,
    validation: Dataset[Any] | None = None,
    identity: str = "",
) -> None:
    """Train the net in place with the mean loss (eq. 2.1), as the recipe says."""
    if has_lazy_layers(net):
        example_of(net, data, seed=recipe.seed)

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        losses = loss(output_of(model, batch.x), batch.y)
        return weighted_loss(losses, losses.new_ones(len(batch.index)), unmasked(loss, batch.y))

    def validate(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return loss_figures(loss, output_of(model, batch.x), batch.y)

    train(net, data, lambda epoch: objective, recipe, validation=validation, validate=validate, identity=identity)
