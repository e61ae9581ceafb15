"""What several methods share: the outputs of a net, the figures of its validation, the plain fit.

The one table of methods: by name, with what each can do.

The command line, `load_dataset` and the tests read it. A method of your own joins with one line:

    register(Entry("mine", MyMethod, MyPredictor, "what it is, in a sentence"))

and `neuboots.testing.check_method("mine")` puts it through the same contract as the rest.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import Dataset

from neuboots._streaming import class_probabilities
from neuboots._validation import ArgumentError, check_choice
from neuboots.head import call_net, cast_inputs, extract_output, has_lazy_layers, initialize_lazy_layers, unwrap_model
from neuboots.loading import (
    Batch,
    collate_examples,
    dataset_length,
    get_tensors,
    preserve_rng_state,
    seed_everything,
    unpack_example,
)
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
        example = cast_inputs(net, _collate_inputs(data, [unpack_example(row) for row in rows]))
        check_inputs(example)
        seed_everything(seed, "lazy")
        initialize_lazy_layers(unwrap_model(net), example)
    return example


def _collate_inputs(data: Dataset[Any], examples: list[tuple[Any, Any]]) -> Any:
    """Return a batch of inputs; of the first example twice if the inputs differ in size."""
    try:
        return collate_examples(data, examples)[0]
    except RuntimeError:
        return collate_examples(data, examples[:1] * 2)[0]


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

T = TypeVar("T")


@dataclass(frozen=True)
class MethodInfo:
    """Facts about a registered method.

    Costs are orders in the cost L of one forward pass and the number K of members or replicates.

    Args:
        name: Name in the registry, in configurations and on the command line.
        make: The method's class, or a function that returns a method from keyword options.
        predictor: Class of the fitted predictors; its `from_config` rebuilds a saved one.
        summary: One line that describes the method.
        tasks: Tasks that the method supports.
        random: Whether another seed gives other replicates, or the same ones in another order.
        coherent: Whether a replicate is one function of x, whatever else is in the batch.
        members: Whether the method has `num_members` = K, and is a single net for K = 1.
        needs_net: Whether `fit` uses its `model`; if not, it may be None.
        early_stopping: Whether a training that stops early still gives a valid predictor.
        train_cost: Cost of `fit`.
        predict_cost: Cost of `predict`.
        reference: Publication of the method.
    """

    name: str
    make: Callable[..., Method]
    predictor: type[Predictor]
    summary: str
    tasks: tuple[Task, ...] = TASKS
    random: bool = True
    coherent: bool = True
    members: bool = False
    needs_net: bool = True
    early_stopping: bool = True
    train_cost: str = "O(L)"
    predict_cost: str = "O(LK)"
    reference: str = ""

    def __post_init__(self) -> None:
        if not self.tasks or not set(self.tasks) <= set(TASKS):
            raise ArgumentError("tasks", self.tasks, f"one or more of {list(TASKS)}")


METHODS: dict[str, MethodInfo] = {}
WRAPPERS: dict[str, type[Predictor]] = {}  # predictors around another one, whose config is under "inner"


def register(name: str, *, predictor: Any, summary: str, **facts: Any) -> Callable[[type[T]], type[T]]:
    """Register a method under a name, as a class decorator.

    `create_method`, `load`, the command line and `neuboots.testing.check_method` then find the method. The decorator
    stores the facts as the class attribute `info`.

    Args:
        name: Name of the method; it must be new.
        predictor: Class of the fitted predictors.
        summary: One line that describes the method.
        **facts: Further fields of `MethodInfo`.

    Returns:
        A decorator that returns the class unchanged except for `info`.

    Raises:
        ArgumentError: If another method has the name, or a fact is wrong.

    Example:
        >>> from neuboots.methods.deterministic import Deterministic, DeterministicPredictor
        >>> @register("mine", predictor=DeterministicPredictor, summary="a net of my own", random=False)
        ... class Mine(Deterministic):
        ...     pass
        >>> type(create_method("mine")).__name__
        'Mine'
        >>> del METHODS["mine"]
    """

    def decorate(cls: type[T]) -> type[T]:
        if name in METHODS or name in WRAPPERS:
            raise ArgumentError("name", name, "a name that no other method has")
        info = MethodInfo(name, cast(Callable[..., Method], cls), predictor, summary, **facts)
        METHODS[name] = info
        cast(Any, cls).info = info
        return cls

    return decorate


def find_method(name: str) -> MethodInfo:
    """Return the facts about a registered method.

    Args:
        name: Name of the method.

    Raises:
        ArgumentError: If no method has the name.

    Example:
        >>> find_method("deep-ensemble").reference
        'Lakshminarayanan et al., NeurIPS 2017; Ashukha et al., ICLR 2020'
    """
    check_choice("method", name, METHODS)
    return METHODS[name]


def create_method(name: str, **options: Any) -> Method:
    """Create a method by its name.

    Args:
        name: Name of a registered method, as in `list_methods()`.
        **options: Options of the method's class.

    Returns:
        The method, ready for `fit`.

    Raises:
        ArgumentError: If no method has the name, or an option is wrong.

    Example:
        >>> create_method("deep-ensemble", num_members=3).num_members
        3
    """
    return find_method(name).make(**options)


def list_methods(task: Task | None = None) -> list[str]:
    """Return the sorted names of the registered methods.

    Args:
        task: "classification", "regression" or "segmentation" for the methods that support it; None for all.

    Example:
        >>> sorted(set(list_methods("regression")) - set(list_methods("segmentation")))
        ['gp', 'sparse-gp']
    """
    if task is not None:
        check_choice("task", task, TASKS)
    return sorted(name for name, info in METHODS.items() if task is None or task in info.tasks)


def find_saved_method(config: dict[str, Any]) -> MethodInfo:
    """Return the facts about the method that made the predictor with this config, inside any wrappers."""
    while config["method"] in WRAPPERS:
        config = config["inner"]
    return find_method(config["method"])


def find_predictor_class(config: dict[str, Any]) -> type[Predictor]:
    """Return the class whose `from_config` reads this config."""
    return WRAPPERS[config["method"]] if config["method"] in WRAPPERS else find_method(config["method"]).predictor
