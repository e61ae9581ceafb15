"""What several methods share: the outputs of a net, the figures of its validation, the plain fit.

The one table of methods: by name, with what each can do.

The command line, `load_dataset` and the tests read it. A method of your own joins with one line:

    register(Entry("mine", MyMethod, MyPredictor, "what it is, in a sentence"))

and `neuboots.testing.check_method("mine")` puts it through the same contract as the rest.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import Dataset, default_collate

from neuboots._streaming import class_probabilities
from neuboots.head import call_net, cast_inputs, extract_output, has_lazy_layers, initialize_lazy_layers, unwrap_model
from neuboots.loading import Batch, dataset_length, get_tensors, preserve_rng_state, seed_everything, unpack_example
from neuboots.losses import BinaryCrossEntropy, BrierLoss, CrossEntropy, Loss, valid_mask, weighted_mean
from neuboots.prediction import Method, Predictor, check_inputs
from neuboots.training import TrainingConfig, train


def add_output_axis(output: Tensor) -> Tensor:
    """(N,) as (N, 1): samples always have an axis of outputs."""
    return output[:, None] if output.ndim == 1 else output


def validation_metrics(loss: Loss, output: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The validation figures of one batch: the mean loss, and the error rate where targets are classes."""
    losses = loss(output, y)
    mask = valid_mask(loss, y)
    figures = {"loss": weighted_mean(losses, losses.new_ones(len(losses)), mask)}
    one_logit = isinstance(loss, BinaryCrossEntropy | nn.BCEWithLogitsLoss) and output.shape[1:2] == (1,)
    classes = isinstance(loss, CrossEntropy | BrierLoss | nn.CrossEntropyLoss) and not y.is_floating_point()
    if classes or one_logit:
        labels = class_probabilities(output, 1).argmax(1)
        wrong = (labels != y.reshape(labels.shape)).float()
        figures["error"] = weighted_mean(wrong, wrong.new_ones(len(wrong)), mask)
    return figures


def load_example(net: nn.Module, data: Dataset[Any], *, seed: int) -> Any:
    """Two inputs (or the only one) as the net will see them; lazy layers of the net take their shapes from them."""
    n = dataset_length(data)
    with preserve_rng_state():
        rows = list(itertools.islice(iter(data), 2)) if n is None else [data[i] for i in range(min(2, n))]
        if not rows:
            raise ValueError("got a stream that gives no row; expected at least one")
        if get_tensors(data)[0] is not None:
            rows = [((row[0] if len(row) == 2 else tuple(row[:-1])), row[-1]) for row in rows]
        example = cast_inputs(net, _together([unpack_example(row)[0] for row in rows]))
        check_inputs(example)
        seed_everything(seed, "lazy")
        initialize_lazy_layers(unwrap_model(net), example)
    return example


def _together(inputs: list[Any]) -> Any:
    """A batch of these inputs; of the first one twice, where they are of several sizes and train one by one."""
    try:
        return default_collate(inputs)
    except RuntimeError:
        return default_collate(inputs[:1] * 2)


def compute_output(net: nn.Module, x: Any) -> Tensor:
    """The outputs of the net at x, on its device and in its precision: (N, C, *), or (N,)."""
    x = cast_inputs(net, x)
    return extract_output(call_net(net, x), x)


def functional_output(net: nn.Module, tensors: dict[str, Tensor], x: Any) -> Tensor:
    """The outputs of the net at x with these tensors in the place of its own; the net is left as it is."""
    args, kwargs = ((), dict(x)) if isinstance(x, Mapping) else (tuple(x) if isinstance(x, tuple | list) else (x,), {})
    return extract_output(functional_call(net, tensors, args, kwargs), x)


def fit_net(
    net: nn.Module,
    data: Dataset[Any],
    loss: Loss,
    config: TrainingConfig,
    *,
    val_data: Dataset[Any] | None = None,
    identity: str = "",
) -> None:
    """Train the net in place with the mean loss (eq. 2.1), as the recipe says."""
    if has_lazy_layers(net):
        load_example(net, data, seed=config.seed)

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        losses = loss(compute_output(model, batch.x), batch.y)
        return weighted_mean(losses, losses.new_ones(len(batch.index)), valid_mask(loss, batch.y))

    def validate(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return validation_metrics(loss, compute_output(model, batch.x), batch.y)

    train(net, data, lambda epoch: objective, config, val_data=val_data, validate=validate, identity=identity)


Task = Literal["classification", "regression", "segmentation"]
TASKS: tuple[Task, ...] = get_args(Task)


@dataclass(frozen=True)
class MethodEntry:
    """One method: how it is made, how it is restored, and what it can do.

    `train_cost` and `predict_cost` are orders in the cost L of one pass and the number K of members or replicates.
    """

    name: str
    make: Callable[..., Method]
    predictor: type[Predictor]
    summary: str
    tasks: tuple[Task, ...] = TASKS
    random: bool = True  # another seed gives other replicates, or the same in another order
    coherent: bool = True  # a replicate is one function of x, whatever the batch around x
    members: bool = False  # has num_members = K, and for K = 1 is a single net
    needs_net: bool = True  # False: model is not called, and may be None
    train_cost: str = "O(L)"
    predict_cost: str = "O(LK)"
    reference: str = ""

    def __post_init__(self) -> None:
        unknown = set(self.tasks) - set(TASKS)
        if unknown or not self.tasks:
            raise ValueError(f"got tasks={self.tasks!r}; expected some of {list(TASKS)}")
        if not (isinstance(self.predictor, type) and issubclass(self.predictor, Predictor)):
            raise ValueError(f"got predictor={self.predictor!r}; expected a class derived from Predictor")
        if not callable(self.make):
            raise ValueError(f"got make={self.make!r}; expected a class or function that makes the method")


METHODS: dict[str, MethodEntry] = {}
WRAPPERS: dict[str, type[Predictor]] = {}  # predictors around another one, whose config has theirs under "inner"


def register(entry: MethodEntry) -> MethodEntry:
    """Add a method to the table, for `load_dataset`, the command line and `check_method`."""
    if METHODS.get(entry.name, entry) != entry or entry.name in WRAPPERS:
        raise ValueError(f"got the name {entry.name!r}, which another method has; expected a new one")
    METHODS[entry.name] = entry
    return entry


def find_method(name: str) -> MethodEntry:
    """The method of this name, or a sentence that lists the names."""
    if name not in METHODS:
        raise ValueError(f"got the method {name!r}; expected one of {', '.join(METHODS)}")
    return METHODS[name]


def find_saved_method(config: dict[str, Any]) -> MethodEntry:
    """The method that made the predictor with this config, inside any wrappers."""
    while config["method"] in WRAPPERS:
        config = config["inner"]
    return find_method(config["method"])


def find_predictor_class(config: dict[str, Any]) -> type[Predictor]:
    """The class whose `restore` reads this config."""
    return WRAPPERS[config["method"]] if config["method"] in WRAPPERS else find_method(config["method"]).predictor
