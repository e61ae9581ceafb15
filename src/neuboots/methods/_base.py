"""Base class and building blocks of the methods, and the registry that finds a method by its name."""

import hashlib
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

from neuboots._validation import ArgumentError, check_choice
from neuboots.head import StructureCopier, check_module, extract_output, unwrap_model
from neuboots.loading import Batch, FitData, preserve_rng_state
from neuboots.prediction import Method, Predictor
from neuboots.training import (
    BaseMethod,
    FitInputs,
    TrainingConfig,
    initialize_model,
    make_loader,
    progress_bar,
    resolve_fit,
)

P = TypeVar("P", bound=Predictor)
T = TypeVar("T")


# -- outputs of a net ----------------------------------------------------------------------------------


def functional_output(net: nn.Module, tensors: dict[str, Tensor], x: Any) -> Tensor:
    """Return net(x) with these parameters and buffers instead of the net's own, which stay unchanged."""
    args, kwargs = ((), dict(x)) if isinstance(x, Mapping) else (tuple(x) if isinstance(x, tuple | list) else (x,), {})
    return extract_output(functional_call(net, tensors, args, kwargs), x)


def iterate_batches(data: Dataset[Any], config: TrainingConfig, *, title: str = "") -> Iterator[Batch]:
    """Read the data once, in order and in batches as in training, under a progress bar if it has a title."""
    loader = make_loader(data, config, shuffle=False)
    shown = config.progress and bool(title)
    with preserve_rng_state(), progress_bar(title, loader.steps, enabled=shown) as advance:
        for _, batch, _ in loader.epoch(0):
            yield batch
            advance(title)


_MODULE_BYTES = 5_000  # of a module without its tensors


def count_net_bytes(net: nn.Module) -> int:
    """Return the memory that a copy of a net needs."""
    tensors = (*net.parameters(), *net.buffers())
    sizes = (tensor.numel() * tensor.element_size() for tensor in tensors if not is_lazy(tensor))
    return sum(sizes) + _MODULE_BYTES * sum(1 for _ in net.modules())


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


# -- methods for trained nets --------------------------------------------------------------------------


class PostHocMethod(BaseMethod[P]):
    """Base class of the methods that train a net as usual, and then compute what its predictor needs from the data."""

    @abstractmethod
    def _check(self, net: nn.Module, inputs: FitInputs) -> object:
        """Raise if the method cannot be applied to this net, trained or not."""

    @abstractmethod
    def _make_predictor(self, net: nn.Module, inputs: FitInputs) -> P:
        """Compute the predictor around a trained net, which is not changed."""

    def _fit(self, inputs: FitInputs) -> P:
        net = initialize_model(inputs.factory, inputs.config.seed)
        self._check(net, inputs)
        self._train_net(net, inputs)
        return self.make_predictor(net.eval(), inputs.data, inputs.config)

    def from_trained(
        self,
        model: nn.Module,
        data: FitData,
        *,
        val_data: FitData | None = None,
        batch_size: int = 128,
        seed: int = 0,
    ) -> P:
        """Create a predictor from a trained net, which is not changed.

        Args:
            model: The trained net; the predictor shares its weights. Pass a copy if the net is trained further, or
                moved to another device or precision.
            data: The data it was trained on, as in `fit`.
            val_data: Data that it was not trained on, for methods that use them, as `InfluenceBootstrap` does.
            batch_size: Examples that pass through the net at once.
            seed: Seed of random augmentations, and of random subsets and blocks of rows.

        Returns:
            The predictor around this net.
        """
        check_module(model)
        config = TrainingConfig(epochs=1, batch_size=batch_size, seed=seed)
        predictor = self.make_predictor(StructureCopier().copy(unwrap_model(model)), data, config, val_data)
        if (name := cast(Any, predictor).find_not_finite()) is not None:
            raise FloatingPointError(f"{name!r} became NaN or infinite: check the outputs of the net on these data")
        return predictor

    def make_predictor(
        self, net: nn.Module, data: FitData, config: TrainingConfig, val_data: FitData | None = None
    ) -> P:
        """Create a predictor from a trained net, with the batches of a training config.

        For a stream `steps_per_epoch` of the config is the number of batches.
        """
        return self._declare(self._make_predictor(net, resolve_fit(net, data, config, val_data)))


# -- modules that replace layers -----------------------------------------------------------------------


@contextmanager
def set_context(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable inside a `with` block, for the current thread only."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@dataclass(frozen=True)
class ModifiedNetPredictor(Predictor):
    """Base class of the predictors around a net whose layers were replaced.

    Args:
        modified: The net with its new layers.
        skeleton: The net before, on the meta device.
    """

    modified: Any
    skeleton: nn.Module

    @property
    def net(self) -> nn.Module:
        return self.skeleton

    @property
    def module(self) -> nn.Module:
        return cast(nn.Module, self.modified)


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


METHODS: dict[str, MethodInfo] = {}  # registered so far; `list_methods` imports the others
WRAPPERS: dict[str, type[Predictor]] = {}  # predictors around another one, whose config is under "inner"

MODULES = {  # public names by module; a module registers its methods when it is imported
    "batch_ensemble": ("BatchEnsemble",),
    "calibrated_neuboots": ("CalibratedNeuBoots", "calibrate_dispersion"),
    "deterministic": ("Deterministic", "DeterministicPredictor"),
    "ensembles": ("BayesianBootstrap", "DeepEnsemble", "StandardBootstrap"),
    "gaussian_process": ("GaussianProcess", "SparseGP"),
    "influence": ("InfluenceBootstrap",),
    "laplace": ("Laplace",),
    "mc_dropout": ("MCDropout",),
    "mimo": ("MIMO",),
    "neuboots": ("NeuBoots", "NeuBootsPredictor"),
    "swag": ("SWAG",),
}


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
        ArgumentError: If another method has the name.

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
        ours = cls.__module__.startswith("neuboots.methods.")
        if name in METHODS or name in WRAPPERS or (not ours and name in list_methods()):
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
    module = str(name).replace("-", "_")
    if module in MODULES:
        import_module(f"neuboots.methods.{module}")
    if not isinstance(name, str) or name not in METHODS:
        check_choice("method", name, list_methods())
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
    method = find_method(name)
    try:
        return method.make(**options)
    except TypeError as error:
        unknown = sorted(options.keys() - inspect.signature(method.make).parameters.keys())
        if not unknown:
            raise
        names = ", ".join(inspect.signature(method.make).parameters)
        raise ArgumentError("options", unknown, f"options of {name!r}: {names}") from error


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
    for module in MODULES:
        import_module(f"neuboots.methods.{module}")
    return sorted(name for name, info in METHODS.items() if task is None or task in info.tasks)


def find_saved_method(config: dict[str, Any]) -> MethodInfo:
    """Return the facts about the method that made the predictor with this config, inside any wrappers."""
    while "inner" in config:
        config = config["inner"]
    return find_method(config["method"])


def find_predictor_class(config: dict[str, Any]) -> type[Predictor]:
    """Return the class whose `from_config` reads this config."""
    name = config["method"]
    if name == "scaled":
        import_module("neuboots.posthoc")  # registers the wrapper
    return WRAPPERS[name] if name in WRAPPERS else find_method(name).predictor
