"""Base class and building blocks of the methods, and the registry that finds a method by its name."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import Dataset

from neuboots._validation import ArgumentError, check_choice
from neuboots.head import (
    compute_output,
    copy_net,
    extract_output,
    has_lazy_layers,
    load_example,
    unwrap_model,
)
from neuboots.loading import (
    Batch,
    EpochLoader,
    FitData,
    preserve_rng_state,
)
from neuboots.losses import BrierLoss, Loss, as_loss, valid_mask, weighted_mean
from neuboots.prediction import Method, Predictor, class_probabilities
from neuboots.training import (
    FitInputs,
    ModelFactory,
    Objective,
    TrainingConfig,
    ValidationStep,
    describe_method,
    initialize_model,
    progress_bar,
    resolve_fit,
    train,
)

T = TypeVar("T")
P = TypeVar("P", bound=Predictor)


# -- outputs of a net ----------------------------------------------------------------------------------


def functional_output(net: nn.Module, tensors: dict[str, Tensor], x: Any) -> Tensor:
    """Return net(x) with these parameters and buffers instead of the net's own, which stay unchanged."""
    args, kwargs = ((), dict(x)) if isinstance(x, Mapping) else (tuple(x) if isinstance(x, tuple | list) else (x,), {})
    return extract_output(functional_call(net, tensors, args, kwargs), x)


def iterate_batches(data: Dataset[Any], config: TrainingConfig, *, title: str = "") -> Iterator[Batch]:
    """Read the data once, in order and in batches as in training, under a progress bar if it has a title."""
    loader = EpochLoader(
        data,
        batch_size=config.batch_size,
        seed=config.seed,
        shuffle=False,
        num_workers=config.num_workers,
        steps_per_epoch=config.steps_per_epoch,
    )
    shown = config.progress and bool(title)
    with preserve_rng_state(), progress_bar(title, loader.steps, enabled=shown) as advance:
        for _, batch, _ in loader.epoch(0):
            yield batch
            advance(title)


def prepare_net(inputs: FitInputs, *, copy: bool = False) -> tuple[nn.Module, Any]:
    """Return the net with its initial weights, without wrappers such as `DataParallel`, and an example of its inputs.

    A method that replaces layers takes a copy, so that a module of the user keeps its layers.
    """
    net = initialize_model(inputs.factory, inputs.config.seed)
    example = load_example(net, inputs.data, seed=inputs.config.seed)
    net = unwrap_model(net)
    return copy_net(net) if copy else net, example


# -- training ------------------------------------------------------------------------------------------


def mean_loss(loss: Loss, output: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss over the targets that are not ignored (eq. 2.1)."""
    losses = loss(output, y)
    return weighted_mean(losses, losses.new_ones(len(y)), valid_mask(loss, y))


def validation_metrics(loss: Loss, output: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the mean loss of one batch and, for class labels, the error rate."""
    metrics = {"loss": mean_loss(loss, output, y)}
    one_logit = isinstance(loss, nn.BCEWithLogitsLoss) and output.shape[1:2] == (1,)
    classes = isinstance(loss, nn.CrossEntropyLoss | BrierLoss) and not y.is_floating_point()
    if classes or one_logit:
        labels = class_probabilities(output, 1).argmax(1)
        wrong = (labels != y.reshape(labels.shape)).float()
        metrics["error"] = weighted_mean(wrong, wrong.new_ones(len(wrong)), valid_mask(loss, y))
    return metrics


def mean_validation_metrics(loss: Loss, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the means over K members of their validation metrics; outputs are (K, N, C, *)."""
    metrics = [validation_metrics(loss, output, y) for output in outputs]
    return {name: torch.stack([each[name] for each in metrics]).mean() for name in metrics[0]}


def fit_net(
    net: nn.Module,
    data: Dataset[Any],
    loss: Loss,
    config: TrainingConfig,
    *,
    val_data: Dataset[Any] | None = None,
    identity: str = "",
) -> None:
    """Train a net in place with the mean loss (eq. 2.1)."""
    if has_lazy_layers(net):
        load_example(net, data, seed=config.seed)

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        return mean_loss(loss, compute_output(model, batch.x), batch.y)

    def validate(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return validation_metrics(loss, compute_output(model, batch.x), batch.y)

    train(net, data, lambda epoch: objective, config, val_data=val_data, validate=validate, identity=identity)


# -- stored tensors ------------------------------------------------------------------------------------


def fingerprint_tensors(tensors: Iterable[Tensor]) -> bytes:
    """Hash the values, types, shapes and devices of tensors, to recognize that one of them has changed."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(repr((tensor.dtype, tensor.device, tensor.shape)).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Describe type and shape of each tensor as JSON, for `make_tensors`."""
    return {name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape] for name, tensor in tensors.items()}


def make_tensors(description: Mapping[str, list[Any]]) -> dict[str, Tensor]:
    """Create tensors of the described types and shapes, whose values `load` fills in."""
    return {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (dtype, *shape) in description.items()}


# -- modules that replace layers -----------------------------------------------------------------------


@contextmanager
def set_context(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable inside a `with` block, for the current thread only."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class LayerWrapper(nn.Module):
    """A module that replaces a layer of a net and holds it as `layer`.

    Attributes that the wrapper does not have are those of the layer, so that a net can still read `in_features`.
    """

    layer: Any

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # such as __deepcopy__
                raise
            return getattr(super().__getattr__("layer"), name)


# -- the registry --------------------------------------------------------------------------------------


Task = Literal["classification", "regression", "segmentation"]
TASKS: tuple[Task, ...] = get_args(Task)


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
        >>> from neuboots.methods import find_method
        >>> find_method("deep-ensemble").train_cost
        'O(LK)'
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
        >>> from neuboots.methods import create_method
        >>> create_method("deep-ensemble", num_members=3).num_members
        3
    """
    return find_method(name).make(**options)


def list_methods(task: Task | None = None) -> list[str]:
    """Return the sorted names of the registered methods.

    Args:
        task: "classification", "regression" or "segmentation" for the methods that support it; None for all.

    Example:
        >>> from neuboots.methods import list_methods
        >>> sorted(set(list_methods()) - set(list_methods("segmentation")))
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


# -- the base class ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BaseMethod(ABC, Generic[P]):
    """Base class of the methods that train a net with a loss.

    A subclass is a frozen dataclass of options and implements `_fit`.

    Args:
        loss: Loss per example: a torch loss, or a function of (outputs, targets).
    """

    info: ClassVar[MethodInfo]

    loss: Loss = field(default_factory=nn.CrossEntropyLoss)

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", as_loss(self.loss))

    def fit(
        self,
        model: nn.Module | ModelFactory,
        data: FitData,
        config: TrainingConfig | None = None,
        *,
        val_data: FitData | None = None,
    ) -> P:
        """Train the method.

        Args:
            model: Net to train, or a function without arguments that returns one. A method with several nets calls the
                function once per net; it copies a module and re-initialises each copy.
            data: Training data: a data set of (x, y), a pair of tensors or arrays, or a `DataLoader`.
            config: Training options; None for the defaults.
            val_data: Validation data, for the metrics of each epoch and for early stopping.

        Returns:
            The fitted predictor.

        Raises:
            ArgumentError: If an argument is wrong.
            ValueError: If the method cannot be applied to the net, or the data do not fit the net or the loss.
        """
        return self._fit(resolve_fit(model, data, config, val_data))

    @abstractmethod
    def _fit(self, inputs: FitInputs) -> P:
        """Train the method on validated inputs."""

    def _train(
        self, net: nn.Module, inputs: FitInputs, objective_at: Callable[[int], Objective], validate: ValidationStep
    ) -> None:
        """Run the training loop on a net, in place."""
        train(
            net,
            inputs.data,
            objective_at,
            inputs.config,
            val_data=inputs.val_data,
            validate=validate,
            identity=describe_method(self),
        )

    def _train_net(self, net: nn.Module, inputs: FitInputs) -> None:
        """Train a single net with the mean loss, in place."""
        identity = describe_method(self)
        fit_net(net, inputs.data, self.loss, inputs.config, val_data=inputs.val_data, identity=identity)
