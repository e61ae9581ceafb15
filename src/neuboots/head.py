"""Split a net at its head, for any forward method: net = finish ∘ M ∘ F (paper, section 3.1).

    F(x) = input of the last layer M,   finish = what the net does with M's output

The net is not changed. For one call a substitute replaces the head: it sees F(x) and may scale it or stop there. The
operations after the head (upsampling, wrapping in a dict) are recorded by torch's override protocol
(`__torch_function__`) as they run, and replayed on other outputs of the head, so that B replicates upsample B·C outputs
and never the D features. The module also calls nets and handles their inputs and outputs.
"""

import copy
import operator
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.data import Dataset

from neuboots._validation import ArgumentError
from neuboots.loading import EpochLoader, preserve_rng_state, seed_everything

Head = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d

_HEAD_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PROBE_ROWS = 16
_CONTAINERS = (dict, list, set, deque)  # where nets keep intermediate results


# -- rows and tensors of an input ----------------------------------------------------------------------


def as_tree(x: Any) -> Any:
    """Return any mapping as a dict, the only mapping that torch's pytree functions traverse.

    Args:
        x: Inputs: a tensor, or a dict or tuple of tensors.

    Returns:
        The inputs.
    """
    return dict(x) if isinstance(x, Mapping) else x


def _find_tensors(x: Any) -> list[Tensor]:
    """The tensors of inputs."""
    return [part for part in tree_leaves(as_tree(x)) if isinstance(part, Tensor)]


def count_rows(x: Any) -> int:
    """Return the number of rows N; parts of one row may be shared by all rows of the others.

    Args:
        x: Inputs: a tensor, or a dict or tuple of tensors.

    Returns:
        The number N of examples.

    Example:
        >>> count_rows((torch.zeros(1, 4), torch.zeros(3, 2))), count_rows(torch.zeros(1, 4))
        (3, 1)
    """
    lengths = [len(part) for part in _find_tensors(x) if part.ndim]
    return next((length for length in lengths if length != 1), min(1, len(lengths)))


def map_rows(function: Callable[[Tensor], Any], x: Any) -> Any:
    """Apply a function to every tensor that has one row per example.

    A part that does not have one, such as positions (1, T) beside images (N, …), is shared by all rows and stays
    unchanged.

    Args:
        function: Function of a tensor (N, …).
        x: Inputs: a tensor, or a dict or tuple of tensors.

    Returns:
        The inputs with the results.
    """
    n = count_rows(x)
    return tree_map_only(Tensor, lambda part: function(part) if part.ndim and len(part) == n else part, as_tree(x))


def take_rows(x: Any, rows: slice | Tensor) -> Any:
    """Select rows by a slice or an index tensor.

    Args:
        x: Inputs: a tensor, or a dict or tuple of tensors.
        rows: The rows.

    Returns:
        The inputs of these rows.
    """
    return map_rows(lambda part: part[rows], x)


def tile_rows(x: Any, times: int) -> Any:
    """Repeat the rows as `torch.tile` does along the first axis.

    Args:
        x: Inputs: a tensor, or a dict or tuple of tensors.
        times: How often.

    Returns:
        The inputs of times · N rows.
    """
    return map_rows(lambda part: part.repeat(times, *[1] * (part.ndim - 1)), x)


def sample_rows(x: Any) -> Any:
    """Select up to 16 evenly spaced rows, to probe what a net does with them.

    Args:
        x: Inputs: a tensor, or a dict or tuple of tensors.

    Returns:
        The inputs of these rows.
    """
    n = count_rows(x)
    return take_rows(x, torch.linspace(0, n - 1, min(_PROBE_ROWS, n)).round().long())


def row_slices(n: int, size: int) -> list[slice]:
    """Split rows into slices; the last one never has a single row, which a net may squeeze away.

    Args:
        n: Number of rows.
        size: Rows of a slice.

    Returns:
        The slices.

    Example:
        >>> row_slices(5, 2), row_slices(0, 2)
        ([slice(0, 2, None), slice(2, 5, None)], [slice(0, 0, None)])
    """
    starts = [start for start in range(0, max(1, n), max(1, size)) if start == 0 or start < n - 1]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], n], strict=True)]


def float_tensors(x: Any) -> list[Tensor]:
    """Return the floating-point tensors of an input.

    Args:
        x: Inputs: a tensor, or a dict or tuple of tensors.

    Returns:
        The tensors.
    """
    return [part for part in _find_tensors(x) if part.is_floating_point()]


def map_float_tensors(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """Apply a function to every floating-point tensor, in the order of `float_tensors`.

    Args:
        function: Function of a tensor.
        x: Inputs: a tensor, or a dict or tuple of tensors.

    Returns:
        The inputs with the results.
    """
    return tree_map_only(Tensor, lambda part: function(part) if part.is_floating_point() else part, as_tree(x))


# -- inputs and outputs of a net -----------------------------------------------------------------------


def call_net(net: nn.Module, x: Any) -> Any:
    """Call the net: a mapping is passed as keyword arguments (Hugging Face), a tuple or list as positional ones.

    Args:
        net: The net.
        x: Inputs: a tensor, or a dict or tuple of tensors.

    Returns:
        What the net returns.
    """
    if isinstance(x, Mapping):
        return net(**x)
    return net(*x) if isinstance(x, tuple | list) else net(x)


def cast_inputs(net: nn.Module, x: Any) -> Any:
    """Return x on the net's device, with floating-point tensors in the net's precision and of class `Tensor`.

    Args:
        net: The net.
        x: Inputs: a tensor, or a dict or tuple of tensors.

    Returns:
        The converted inputs.
    """
    like = next((p for p in net.parameters() if p.is_floating_point() and not is_lazy(p)), None)
    if like is None:
        return x

    def convert(part: Tensor) -> Tensor:
        # Subclasses with their own functions (MONAI's MetaTensor, torchvision's tv_tensors) are converted, those with
        # another layout (DTensor) are not.
        if type(part) is not Tensor and type(part).__torch_dispatch__ is Tensor.__torch_dispatch__:
            part = as_plain_tensor(part)
        return part.to(like.device, like.dtype if part.is_floating_point() else part.dtype)

    return tree_map_only(Tensor, convert, as_tree(x))


def find_not_finite(tensors: Mapping[str, Tensor], parameters: Collection[str] = ()) -> str | None:
    """Return the name of a tensor that is not finite, or None.

    NaN is refused everywhere, and infinity in parameters and in statistics. Other tensors may have −∞, as attention
    masks do, and scalars ±∞, as bounds do.

    Args:
        tensors: Tensors by name.
        parameters: Names of those that are parameters.

    Returns:
        The first name, or None.

    Example:
        >>> mask = torch.tensor([0.0, -torch.inf])
        >>> find_not_finite({"mask": mask}), find_not_finite({"weight": mask}, ["weight"])
        (None, 'weight')
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.is_meta:  # a module may keep other state
            continue
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        values = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()
        if bool(torch.isfinite(values.sum())):  # one cheap read: then all are
            continue
        allowed = torch.isfinite(values)
        if name not in parameters and not values.is_complex():
            allowed |= ~values.isnan() if values.ndim == 0 else values == -torch.inf
        if not bool(allowed.all()):
            return name
    return None


def check_module(model: Any) -> None:
    """Raise ArgumentError unless the model of `from_trained` is a module with finite weights.

    Args:
        model: The trained net.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", type(model), "a trained nn.Module", hint="call the factory and train its net")
    named = {name: tensor for name, tensor in model.named_parameters() if not is_lazy(tensor)}
    buffers = {name: tensor for name, tensor in model.named_buffers() if not is_lazy(tensor)}
    if (name := find_not_finite(named | buffers, named)) is not None:
        raise ArgumentError("model", f"NaN or infinite values in {name!r}", "finite weights", hint="train it again")


def check_inputs(x: Any) -> None:
    """Raise ArgumentError unless x is a tensor, or a dict, tuple or list of them, without NaN and infinite values.

    Args:
        x: Inputs: a tensor, or a dict or tuple of tensors.
    """
    tensors = _find_tensors(x)
    if not tensors:
        raise ArgumentError("x", type(x), "a tensor, or a dict or tuple of tensors", hint="use torch.as_tensor(x)")
    for tensor in tensors:
        if tensor.dtype == torch.uint8:
            raise ArgumentError("x", tensor.dtype, "floating-point inputs", hint="use x.float() / 255")
        # one cheap read: a finite sum has no NaN and no infinity in it
        suspicious = tensor.is_floating_point() and not torch.isfinite(tensor.detach().sum())
        if suspicious and not torch.isfinite(tensor).all():
            raise ArgumentError("x", "NaN or infinite values", "finite numbers", hint="impute or drop them")


def extract_output(result: Any, x: Any = None) -> Tensor:
    """Return the tensor of a net's result: itself, its `.logits`, its "out" or "logits", or the only tensor in it.

    Args:
        result: What the net returned.
        x: Its inputs; if they have a single row, the first axis is restored that a net may have squeezed away.

    Returns:
        The output, (N, C, *) or (N,).

    Raises:
        ArgumentError: If the result has several tensors, or none.

    Example:
        >>> extract_output(torch.zeros(1, 3).squeeze(), torch.zeros(1, 5)).shape
        torch.Size([1, 3])
    """
    output = _find_output(result)
    single_row = {len(part) for part in _find_tensors(x) if part.ndim} == {1}
    return output[None] if single_row and output.shape[:1] != (1,) else output


def _find_output(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    sequence = dict(enumerate(result)) if isinstance(result, Sequence) else {}
    items: Mapping[Any, Any] = result if isinstance(result, Mapping) else sequence
    for named in (getattr(result, "logits", None), items.get("out"), items.get("logits")):
        if isinstance(named, Tensor):
            return named
    tensors = {str(key): value for key, value in items.items() if isinstance(value, Tensor)}
    if len(tensors) == 1:
        return next(iter(tensors.values()))
    got = f"a net that returns a {type(result).__name__} with tensors {sorted(tensors)}"
    raise ArgumentError("model", got, 'one tensor, a dict with "out" or "logits", or an object with .logits')


def compute_output(net: nn.Module, x: Any) -> Tensor:
    """Return the net's output at x, on its device and in its precision, (N, C, *) or (N,); see `channels_first`.

    Args:
        net: The net.
        x: Inputs: a tensor, or a dict or tuple of tensors.

    Returns:
        The output.
    """
    x = cast_inputs(net, x)
    return channels_first(net, x, extract_output(call_net(net, x), x))


def add_output_axis(output: Tensor, *, ndim: int = 2) -> Tensor:
    """Append an axis to outputs without one: (N,) becomes (N, 1), and (K, N) becomes (K, N, 1) with `ndim=3`.

    Args:
        output: Outputs of a net.
        ndim: Number of axes that the outputs should have.

    Returns:
        The outputs with at least `ndim` axes.
    """
    return output if output.ndim >= ndim else output[..., None]


def load_example(net: nn.Module, data: Dataset[Any], *, seed: int) -> Any:
    """Return the inputs of two examples (or of the only one) as the net will see them; initialise its lazy layers.

    Args:
        net: The net that will read them.
        data: Data set of pairs (x, y).
        seed: Seed of what is drawn.

    Returns:
        A batch of inputs.
    """
    with preserve_rng_state():
        try:
            x = _read_inputs(data, 2, seed)
        except RuntimeError:  # inputs of several sizes
            x = tile_rows(_read_inputs(data, 1, seed), 2)
        x = cast_inputs(net, x)
        check_inputs(x)
        seed_everything(seed, "lazy")
        initialize_lazy_layers(unwrap_model(net), x)
    return x


def _read_inputs(data: Dataset[Any], size: int, seed: int) -> Any:
    """Inputs of the first batch."""
    loader = EpochLoader(data, batch_size=size, seed=seed, shuffle=False, steps_per_epoch=1)
    return next(loader.epoch(0))[1].x


# -- modules -------------------------------------------------------------------------------------------


def unwrap_model(net: nn.Module) -> nn.Module:
    """Return the module inside DataParallel, DistributedDataParallel and torch.compile wrappers.

    Args:
        net: The net.

    Returns:
        The inner module.
    """
    while True:
        if isinstance(net, nn.DataParallel | nn.parallel.DistributedDataParallel):
            net = net.module
        elif isinstance(inner := getattr(net, "_orig_mod", None), nn.Module):
            net = inner
        else:
            return net


@contextmanager
def eval_mode(net: nn.Module) -> Iterator[None]:
    """Put the net into evaluation mode; restore the mode of every module on exit.

    Args:
        net: The net.

    Yields:
        Nothing.
    """
    training = [module for module in net.modules() if module.training]
    net.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def eager_mode(net: nn.Module) -> AbstractContextManager[Any]:
    """Run compiled parts of the net eagerly, since a compiler cannot see recorded operations.

    Args:
        net: The net.

    Returns:
        A context manager.
    """
    calls = [vars(m).get(name) for m in net.modules() for name in ("dynamo_ctx", "_compiled_call_impl")]
    compiled = any(call is not None for call in calls)  # not in a copy for a thread: the stance is that of all threads
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def has_lazy_layers(net: nn.Module) -> bool:
    """Return whether a layer needs a first input to know its shape.

    Args:
        net: The net.

    Returns:
        Whether it has lazy layers.
    """
    return any(is_lazy(parameter) for parameter in net.parameters())


def initialize_lazy_layers(net: nn.Module, example: Any) -> None:
    """Run the net once if it has lazy layers; raise ArgumentError if there is no example input.

    Args:
        net: The net.
        example: Input of the net.
    """
    if not has_lazy_layers(net):
        return
    if example is None:
        raise ArgumentError("example", None, "an input, since the net has lazy layers without a shape")
    with eval_mode(net), torch.no_grad():
        call_net(net, example)


def _derived_tensors(net: nn.Module) -> dict[int, Tensor]:
    """Tensors that a layer computes and keeps, itself or in containers (torch's older weight_norm), by id, cloned."""
    found = (value for module in net.modules() for value in tree_leaves(dict(vars(module))))
    return {id(value): value.detach().clone() for value in found if isinstance(value, Tensor) and not value.is_leaf}


def copy_net(net: nn.Module) -> nn.Module:
    """Return a copy that shares nothing with the net.

    Args:
        net: The net.

    Returns:
        The copy.
    """
    return copy.deepcopy(net, dict(_derived_tensors(net)))


def _is_proxy(value: Any) -> bool:
    """Whether an object is a `weakref.proxy`, which has the class of another object."""
    return type(value) in weakref.ProxyTypes


def _attributes(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes of an object and values of its `__slots__`, copied at once: another thread may add one."""
    state: Any = object.__getstate__(value)
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    return dict(attributes or {}), slots or {}


def _references(value: Any) -> list[Any]:
    """Objects to which a container, a function, a weak reference or any other object refers."""
    if _is_proxy(value):
        try:
            return [value.__repr__.__self__]  # a proxy has the methods of its object
        except ReferenceError:
            return []
    match value:
        case weakref.WeakMethod():
            return _references(value())
        case weakref.ref():
            return [value()]
        case dict():
            return [*value, *value.values()]
        case list() | tuple() | set() | frozenset() | deque():
            return [*value]
        case types.MethodType():
            return [value.__self__]
        case partial():
            return [value.func, value.args, value.keywords]
        case types.FunctionType():
            return [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
        case types.CellType():
            return [value.cell_contents] if value != types.CellType() else []  # an empty cell has no contents
        case type() | types.ModuleType() | Tensor() | threading.local():
            return []
    return [item for part in _attributes(value) for item in part.values()]


class StructureCopier:
    """Copies nets, and objects that hold nets; copies share all tensors and are in evaluation mode.

    What a call changes for its duration (modes, a substituted head, other weights) then changes the copy only.
    Functions are copied with the modules that they capture, also in slots and behind weak references. Lists, dicts,
    sets and deques in attributes of modules are copied; so are those in variables that functions capture, except in the
    main thread, where a hook of the user may record in them. What a net reaches through a global variable or an
    attribute of a class is not copied. Compiled modules run without compilation.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}  # originals and copies, by the ids of the originals
        self._references: list[tuple[Any, list[Any]]] = []  # of what was copied
        self._captured = () if threading.current_thread() is threading.main_thread() else _CONTAINERS

    def is_current(self) -> bool:
        """Whether all originals refer to the same objects as when they were copied."""
        for value, before in self._references:
            now = _references(value)
            if len(now) != len(before) or any(map(operator.is_not, now, before)):
                return False
        return True

    def copy(self, value: Any, *, always: bool = False) -> Any:
        """Return the copy of an object.

        Args:
            value: A module, or any object.
            always: Whether to copy it even if no module can be reached from it.

        Returns:
            The copy.

        Raises:
            ArgumentError: If a ScriptModule is in training mode, which its copy would share.
        """
        if id(value) not in self._copies and not always:
            self._find_plain(value)
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if isinstance(value, torch.jit.ScriptModule):
            if value.training:
                raise ArgumentError("model", "a ScriptModule in training mode", "a net in evaluation mode")
            return value
        self._references.append((value, _references(value)))
        new = self._start_copy(value)
        self._copies[id(value)] = value, new
        if _is_proxy(value) or isinstance(value, types.FunctionType | types.MethodType | weakref.ref):
            return new
        if isinstance(value, types.CellType):
            new.cell_contents = self.copy(value.cell_contents, always=isinstance(value.cell_contents, self._captured))
            return new
        if isinstance(value, dict):
            items = {self.copy(key): self.copy(item) for key, item in list(value.items())}
            new.clear()
            new.update(items)
        elif isinstance(value, list | deque):
            parts = [*map(self.copy, list(value))]
            new.clear()
            new.extend(parts)
        attributes, slots = _attributes(value)
        if isinstance(value, nn.Module):
            attributes |= {"training": False, "_compiled_call_impl": None}
            if "_orig_mod" in value._modules:  # its forward is compiled for the original
                attributes |= {"forward": value._modules["_orig_mod"], "dynamo_ctx": None}
        for name, item in attributes.items():  # containers of modules, such as dictionaries of hooks, are never shared
            always = isinstance(value, nn.Module) and isinstance(item, _CONTAINERS)
            vars(new)[name] = self.copy(item, always=always)
        for name, item in slots.items():
            object.__setattr__(new, name, self.copy(item))
        return new

    def _start_copy(self, value: Any) -> Any:
        """The copy of an immutable object; of another one a copy whose parts are not copied yet."""
        if _is_proxy(value):
            return weakref.proxy(self.copy(*_references(value)))
        match value:
            case weakref.ref():
                key = [None, value.key] if isinstance(value, weakref.KeyedRef) else []
                return type(value)(self.copy(value()), *key)
            case nn.Module():
                return object.__new__(type(value))
            case types.CellType():
                return types.CellType()
            case tuple() | set() | frozenset():
                items = map(self.copy, value)
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
            case types.MethodType():
                return types.MethodType(value.__func__, self.copy(value.__self__))
            case partial():
                return partial(self.copy(value.func), *self.copy(value.args), **self.copy(value.keywords))
            case types.FunctionType():
                cells = tuple(map(self.copy, value.__closure__ or ()))
                new = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
                new.__defaults__, new.__kwdefaults__ = map(self.copy, (value.__defaults__, value.__kwdefaults__))
                return new
        return copy.copy(value)

    def _find_plain(self, value: Any) -> None:
        """If an object reaches no module and no captured container, mark all that it reaches as their own copies."""
        seen: dict[int, Any] = {}
        stack = [value]
        while stack:
            each = stack.pop()
            if id(each) in seen:
                continue
            original, new = self._copies.get(id(each), (each, None))
            found = _references(each) if new is None else []
            if (found or not _is_proxy(each)) and isinstance(each, nn.Module):  # a dead proxy has no class
                return
            if found and type(each) is types.CellType and isinstance(found[0], self._captured):
                return
            if new is None:
                seen[id(each)] = each
                stack += found
            elif new is not original:
                return
        self._copies |= {key: (each, each) for key, each in seen.items()}


def copy_to_meta(net: nn.Module) -> nn.Module:
    """Return a copy on torch's meta device: the architecture, without memory for the weights.

    Args:
        net: The net.

    Returns:
        The copy.
    """
    memo: dict[int, Any] = dict(_derived_tensors(net))
    for tensor in [*net.parameters(), *net.buffers()]:
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(net, memo)


def _is_plain(module: nn.Module, types: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module is of one of these classes, with the forward of that class, which torch calls."""
    base = next((base for base in types if isinstance(module, base)), None)
    # the projection inside MultiheadAttention: its weights are read, its forward is never called
    called = not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return called and base is not None and base.forward is type(module).forward


def replace_layers(
    net: nn.Module, types: tuple[type[nn.Module], ...], make: Callable[[nn.Module, str], nn.Module]
) -> dict[str, nn.Module]:
    """Replace every layer of these types by make(layer, name), in place.

    A layer that is used in several places gets one replacement; if `make` returns the layer itself, it stays. Layers
    with a forward of their own, and those that torch never calls, stay.

    Args:
        net: Module to change.
        types: Classes of the layers.
        make: Function of a layer and its name that returns the replacement.

    Returns:
        The new layers by name.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> list(replace_layers(net, (nn.ReLU,), lambda layer, name: nn.Tanh())), net[1]
        (['1'], Tanh())
    """
    made: dict[nn.Module, nn.Module] = {}
    new_layers: dict[str, nn.Module] = {}
    for path, parent in list(net.named_modules()):
        for key, child in list(parent._modules.items()):
            if child is None or not _is_plain(child, types):
                continue
            name = f"{path}.{key}" if path else key
            if child not in made:
                made[child] = make(child, name)
                made[child].train(child.training)
                if made[child] is not child:
                    new_layers[name] = made[child]
            parent._modules[key] = made[child]
    for module in net.modules():
        if not any(new in new_layers.values() for new in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # else torch's fast path reads the weights and never calls the layers
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False  # which belongs to the fast path
    return new_layers


class LayerWrapper(nn.Module):
    """A module that replaces a layer of a net and holds it as `layer`.

    Attributes that the wrapper does not have are those of the layer, so that a net can still read `in_features`.

    Args:
        layer: The layer.
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


# -- recording and replaying operations ----------------------------------------------------------------

# Operations that read values: the net could branch on them, and a replay would not.
_READS = {
    getattr(Tensor, name)
    for name in (
        *("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"),
        *("__contains__", "__iter__", "is_nonzero", "equal", "allclose"),
    )
} | {torch.equal, torch.allclose, torch.is_nonzero}

# Operations that replace a tensor's data without its version counter.
_SETTERS = {Tensor.data.__set__, Tensor.set_}  # type: ignore[attr-defined]

_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}


@dataclass(frozen=True)
class _Slot:
    """Position of a recorded tensor."""

    number: int


def _writes_in_place(func: Any, kwargs: Any) -> bool:
    """Whether an operation changes one of its inputs."""
    name = getattr(func, "__name__", "")
    dunder = name.endswith("__")
    return name in _IN_PLACE or (name.endswith("_") and not dunder) or "out" in kwargs or bool(kwargs.get("inplace"))


def _set_item(target: Tensor, key: Any, value: Any) -> Tensor:
    """target[key] = value, as an operation that returns the target."""
    target[key] = value
    return target


def as_plain_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor as an instance of `Tensor` itself.

    Args:
        tensor: The tensor.

    Returns:
        The plain tensor, which shares its data.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _unsupported(found: str, hint: str) -> ArgumentError:
    return ArgumentError(
        "model", f"a net that {found} after its head", "tensor operations that can be replayed", hint=hint
    )


class TracedTensor(Tensor):
    """A tensor that records the operations on it."""

    recording: "Recording"
    slot: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        if func is Tensor.__setitem__:
            func = _set_item
        inputs = tree_leaves((args, kwargs))
        recording = next(leaf.recording for leaf in inputs if isinstance(leaf, TracedTensor))
        if recording.strict and func in _SETTERS:
            raise _unsupported("replaces the data of a tensor (.data, set_)", "use ordinary operations")
        if recording.strict and func in _READS:
            hint = "move this out of forward, or end the net at its head"
            raise _unsupported(f"reads values ({func.__name__})", hint)
        # slots are read before the call: an operation in place gives the tensor a new one
        recorded = tree_map(lambda leaf: _Slot(leaf.slot) if isinstance(leaf, TracedTensor) else leaf, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        constants = [leaf for leaf in inputs if isinstance(leaf, Tensor) and not isinstance(leaf, TracedTensor)]
        writes = func is _set_item or _writes_in_place(func, kwargs)
        if recording.strict and writes and any(out is other for out in outputs for other in constants):
            raise _unsupported("writes its output into another tensor", "use torch.cat, torch.where or addition")
        if not outputs:
            return result
        recording.written |= writes
        recording.use(*constants)
        return recording.record(func, recorded, result)


@dataclass
class Recording:
    """The operations that follow one or more source tensors, in order, with the real values of other tensors.

    Args:
        strict: Whether operations that cannot be replayed raise ArgumentError.
        sources: Names of the sources by position.
        steps: The operations with their inputs and the positions of their outputs.
        num_slots: Number of recorded tensors.
        written: Whether a step changed a tensor in place.
        constants: Other tensors that the steps use, with their versions.
    """

    strict: bool = True
    sources: dict[int, str] = field(default_factory=dict)
    steps: list[tuple[Any, Any, Any]] = field(default_factory=list)
    num_slots: int = 0
    written: bool = False
    constants: list[tuple[Tensor, int]] = field(default_factory=list)

    def source(self, tensor: Tensor, name: str) -> Tensor:
        """Return the tensor as a named source whose operations are recorded."""
        traced = self._wrap(tensor)
        self.sources[traced.slot] = name
        return traced

    def use(self, *tensors: Tensor) -> None:
        """Note the versions of other tensors that the steps use."""
        self.constants += [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def _wrap(self, tensor: Tensor) -> TracedTensor:
        traced = tensor if isinstance(tensor, TracedTensor) else tensor.as_subclass(TracedTensor)
        traced.recording, traced.slot = self, self.num_slots
        self.num_slots += 1
        return traced

    def record(self, func: Any, inputs: Any, result: Any) -> Any:
        """Append an operation and return its result with traced tensors."""
        wrapped = tree_map(lambda leaf: self._wrap(leaf) if isinstance(leaf, Tensor) else leaf, result)
        slots = tree_map(lambda leaf: leaf.slot if isinstance(leaf, TracedTensor) else None, wrapped)
        self.steps.append((func, inputs, slots))
        return wrapped

    def replay(self, value: Tensor, slot: int) -> Tensor:
        """Return the tensor in `slot` as it would be if the first source were `value`."""
        values: dict[int | None, Any] = {0: value}
        for func, inputs, slots in self.steps:
            args, kwargs = tree_map(lambda leaf: values[leaf.number] if isinstance(leaf, _Slot) else leaf, inputs)
            result = func(*args, **kwargs)
            values.update(zip(tree_leaves(slots), tree_leaves(result), strict=True))
        return cast(Tensor, values[slot])

    def origins(self, slot: int) -> tuple[set[str], bool]:
        """Return the sources that reach `slot` past no other source, and whether parameters are used in between."""
        learned = False
        wanted = {slot}
        for _, inputs, slots in reversed(self.steps):
            if wanted.isdisjoint(tree_leaves(slots)):
                continue
            leaves = tree_leaves(inputs)
            wanted |= {leaf.number for leaf in leaves if isinstance(leaf, _Slot)}
            learned |= any(isinstance(leaf, nn.Parameter) for leaf in leaves)
        names = {name for number, name in self.sources.items() if number in wanted}
        return names, learned


# -- finding the head ----------------------------------------------------------------------------------


def is_head(module: nn.Module) -> bool:
    """Return whether the module is a plain Linear or 1×1 convolution: M(φ) = Wφ + b and nothing more.

    Args:
        module: A module.

    Returns:
        Whether it can be a head.
    """
    if not _is_plain(module, _HEAD_TYPES) or is_lazy(cast(Tensor, module.weight)):
        return False
    if isinstance(module, nn.Linear):
        return True
    conv = cast(nn.Conv2d, module)
    pointwise = set(conv.kernel_size) == {1} and set(conv.stride) == {1} and conv.groups == 1
    return pointwise and conv.padding in ("valid", "same", (0,) * len(conv.kernel_size))


def make_head(weight: Tensor, bias: Tensor | None) -> Head:
    """Return a Linear or 1×1 convolution with copies of these weights, without their parametrization.

    Args:
        weight: Weights, (C, D) or (C, D, 1, …).
        bias: Biases, (C,), or None.

    Returns:
        The layer.
    """
    outputs, width = weight.shape[:2]
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[weight.ndim - 3] if weight.ndim > 2 else None
    # on "meta" no initial weights are drawn, so that the caller's random state does not change
    head: Head = nn.Linear(width, outputs, device="meta") if conv is None else conv(width, outputs, 1, device="meta")
    head.weight = nn.Parameter(weight.detach().clone())
    head.bias = None if bias is None else nn.Parameter(bias.detach().clone())
    return head


def find_head_candidates(net: nn.Module) -> list[str]:
    """Return the names of the layers that could be the head, in the order of registration.

    Args:
        net: The net.

    Returns:
        Their names.

    Example:
        >>> find_head_candidates(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
        ['0', '2']
    """
    return [name for name, module in net.named_modules() if is_head(module)]


def _head_error(net: nn.Module, name: str | None, problem: str) -> ArgumentError:
    """An error that lists the candidates."""
    names = find_head_candidates(net)
    shown = ", ".join(map(repr, names[-8:])) + (f" (the last 8 of {len(names)})" if len(names) > 8 else "")
    hint = "name one (head=…), pass an example input (example=x), or add a last layer"
    expected = f"one of the layers {shown or '(none)'}, used once and followed by no learned layer; {problem}"
    return ArgumentError("head", name, expected, hint=hint)


def find_head(net: nn.Module, *, example: Any = None) -> str:
    """Return the name of the head, the last Linear or 1×1 convolution.

    Args:
        net: Module.
        example: Input. With it, the head is the layer whose output reaches the net's output past no other learned
            layer; without, the last registered layer with parameters.

    Returns:
        Its name.

    Raises:
        ArgumentError: If there is no such layer, or several; the message lists the candidates.
    """
    candidates = find_head_candidates(net)
    layers: list[str] = [
        name for name, module in net.named_modules() if next(module.parameters(recurse=False), None) is not None
    ]
    if not candidates:
        problem = f"the net ends in no Linear or 1×1 convolution (layers with parameters: {layers[-8:]})"
        raise _head_error(net, None, problem)
    if example is not None:
        return _find_by_running(net, candidates, example)
    if layers[-1] in candidates:
        return layers[-1]
    raise _head_error(net, None, f"the last layer with parameters is {layers[-1]!r}")


def _find_by_running(net: nn.Module, candidates: list[str], example: Any) -> str:
    names, learned, calls = _trace_candidates(net, candidates, example)
    if len(names) == 1 and not learned:
        (name,) = names
        if calls[name] == 1:
            return name
        raise _head_error(net, name, f"{name!r} is called {calls[name]} times")
    if learned:
        raise _head_error(net, None, "learned layers follow the last candidate")
    raise _head_error(net, None, f"these reach the output directly: {sorted(names) or 'none'}")


def _trace_candidates(net: nn.Module, candidates: list[str], example: Any) -> tuple[set[str], bool, dict[str, int]]:
    """The candidates that reach the output past no other one, whether parameters follow them, and numbers of calls."""
    recording = Recording(strict=False)
    calls = dict.fromkeys(candidates, 0)

    def make_traced(name: str) -> Callable[[Head, Tensor], Tensor]:
        def act(head: Head, phi: Tensor) -> Tensor:
            calls[name] += 1
            return recording.source(head(as_plain_tensor(phi)), name)

        return act

    substitutes = {cast(Head, net.get_submodule(name)): make_traced(name) for name in candidates}
    with eval_mode(net), torch.no_grad(), eager_mode(net), _substitute(net, substitutes):
        output = extract_output(call_net(net, example))
    names, learned = recording.origins(output.slot) if isinstance(output, TracedTensor) else (set(), False)
    return names, learned, calls


class _Substitute(LayerWrapper):
    """Replaces the head for one call."""

    def __init__(self, head: Head, act: Callable[[Head, Tensor], Tensor]) -> None:
        super().__init__(head)
        self.act = act
        self.training = head.training

    def forward(self, phi: Tensor) -> Tensor:
        return self.act(self.layer, phi)


@contextmanager
def _substitute(net: nn.Module, acts: Mapping[Head, Callable[[Head, Tensor], Tensor]]) -> Iterator[None]:
    """Replace each head by `act(head, φ)`."""
    places = [
        (parent, key, child)
        for parent in list(net.modules())
        for key, child in parent._modules.items()
        if child in acts
    ]
    for parent, key, child in places:
        head = cast(Head, child)
        parent._modules[key] = _Substitute(head, acts[head])
    try:
        yield
    finally:
        for parent, key, child in places:
            parent._modules[key] = child


# -- the axis of the outputs ---------------------------------------------------------------------------

# by net and number of axes of its output
_OUTPUT_AXES: "weakref.WeakKeyDictionary[nn.Module, dict[int, int]]" = weakref.WeakKeyDictionary()


def channels_first(net: nn.Module, x: Any, output: Tensor, *, head: Head | None = None) -> Tensor:
    """Move the outputs of a Linear head on (N, T, D) to axis 1: (N, T, C) becomes (N, C, T), as pixels are.

    The head decides, not the shape: the axis is the one along which a change of the head's first output stays at one
    index. Where the net mixes outputs (softmax), it is the one along which a change at the first token spreads. A net
    that puts its outputs on axis 1 by itself, and one with another head, keep their layout.

    Args:
        net: The net.
        x: Inputs, on the net's device and in its precision.
        output: The net's output at x, (N, C), (N, C, *) or (N, *, C).
        head: The head; None: the last Linear or 1×1 convolution, found by running the net.

    Returns:
        The output, (N, C, *).

    Raises:
        ArgumentError: If neither changes nor shapes tell the outputs from the tokens.

    Example:
        >>> net, x = nn.Linear(4, 3), torch.zeros(2, 5, 4)
        >>> channels_first(net, x, net(x)).shape
        torch.Size([2, 3, 5])
    """
    return output.movedim(find_output_axis(net, x, output, head=head), 1) if output.ndim > 2 else output


def find_output_axis(net: nn.Module, x: Any, output: Tensor, *, head: Head | None = None) -> int:
    """Return the axis of the outputs C in the net's output; see `channels_first`.

    Args:
        net: The net.
        x: Inputs, on the net's device and in its precision.
        output: The net's output at x.
        head: The head; None: it is found.

    Returns:
        The axis, 1 unless the head is a Linear.
    """
    net = unwrap_model(net)
    known = _OUTPUT_AXES.setdefault(net, {})
    if output.ndim not in known:
        with eval_mode(net), torch.no_grad(), eager_mode(net):
            heads = [head] if head is not None else _find_linear_heads(net, x)
            axis = _find_changed_axis(net, x, heads) if heads and isinstance(heads[0], nn.Linear) else 1
        if axis is None:  # not for good: other inputs may tell
            return output.ndim - 1
        known[output.ndim] = axis
    return known[output.ndim]


def _clone(x: Any) -> Any:
    """A copy of the inputs, into which a net may write."""
    return tree_map_only(Tensor, torch.clone, as_tree(x))


def _find_linear_heads(net: nn.Module, x: Any) -> list[Head]:
    """The Linear layers that give the net's output; none if another layer does, or if they cannot be found."""
    candidates = find_head_candidates(net)
    if not any(isinstance(net.get_submodule(name), nn.Linear) for name in candidates):
        return []
    if is_head(net):
        return [cast(Head, net)]
    try:
        with preserve_rng_state():
            names, learned, _ = _trace_candidates(net, candidates, _clone(x))
    except (RuntimeError, TypeError, ValueError, AttributeError):  # it runs with its own layers only
        return []
    heads = [cast(Head, net.get_submodule(name)) for name in sorted(names)]
    return heads if not learned and all(isinstance(each, nn.Linear) for each in heads) else []


def _find_changed_axis(net: nn.Module, x: Any, heads: list[Head]) -> int | None:
    """The axis of the net's output that belongs to the last axis of its heads' outputs.

    Returns:
        The axis; 1 where the heads give no tokens, or other axes; None if it is the last one by its length.
    """
    shapes: set[torch.Size] = set()

    def run(change: Callable[[Tensor], Tensor]) -> Tensor:
        def act(head: Head, phi: Tensor) -> Tensor:
            z: Tensor = head(phi)
            shapes.add(z.shape)
            return z + change(z)

        if heads == [net]:
            return act(heads[0], x)
        with preserve_rng_state(), _substitute(net, dict.fromkeys(heads, act)):
            return extract_output(call_net(net, _clone(x)), x)

    def change_first_output(z: Tensor) -> Tensor:
        change = torch.zeros_like(z)
        change[..., 0] = 1.0
        return change

    def change_first_token(z: Tensor) -> Tensor:
        change = torch.zeros_like(z)
        first: tuple[Any, ...] = (slice(None), *[0] * (z.ndim - 2))
        change[first] = torch.linspace(1.0, 2.0, z.shape[-1]).to(z)
        return change

    output = run(torch.zeros_like)
    if all(len(shape) < 3 for shape in shapes):
        return 1

    def changed_at_one(change: Callable[[Tensor], Tensor], length: int) -> list[int]:
        """Axes of at least this length along which a change of the heads stays at one index."""
        moved = (run(change) - output).abs() > 0
        axes = [a for a in range(1, output.ndim) if output.shape[a] >= length]
        return [a for a in axes if int(moved.movedim(a, 0).flatten(1).any(1).sum()) == 1]

    outputs = changed_at_one(change_first_output, min(2, *(shape[-1] for shape in shapes)))
    if len(outputs) == 1:
        return outputs[0]
    tokens = changed_at_one(change_first_token, 2)
    others = [a for a in range(1, output.ndim) if a not in tokens]
    if tokens and len(others) == 1:
        return others[0]
    if output.shape not in shapes:
        return 1
    if len(set(output.shape[1:])) == output.ndim - 1 or output.shape[-1] == 1:
        return None
    got = f"a net with outputs {tuple(output.shape)}, of which neither axis is that of the head"
    raise ArgumentError("model", got, "outputs (N, C, *)", hint="transpose them at the end of the net")


# -- the split -----------------------------------------------------------------------------------------


class _StopForward(Exception):  # noqa: N818 (not an error)
    """Raised by the substitute when nothing after the head is needed."""


@dataclass(frozen=True)
class ForwardTrace:
    """One forward pass.

    Attributes:
        phi: Features φ = F(x).
        output: Output of the net.
        recording: Operations after the head.
        slot: Position of the output in the recording.
    """

    phi: Tensor
    output: Tensor
    recording: Recording
    slot: int

    @property
    def ends_at_head(self) -> bool:
        """Whether the head's output is the net's output, and nothing wrote into it."""
        return self.slot == 0 and not self.recording.written

    def finish(self, z: Tensor) -> Tensor:
        """Return the net's output for another output z of the head, which is copied."""
        return self.recording.replay(z.clone(memory_format=torch.contiguous_format), self.slot)


@dataclass(frozen=True)
class HeadSplit:
    """A net split at its head: net = finish ∘ head ∘ features.

    Attributes:
        net: The net.
        name: Name of the head.
        head: The head; kept, since a substitute replaces it while the net runs.
        guessed: Whether the head was chosen by the order of registration, without running the net.
    """

    net: nn.Module
    name: str
    head: Head
    guessed: bool = False

    @property
    def width(self) -> int:
        """Number of features D that the head reads."""
        head = self.head
        return head.in_features if isinstance(head, nn.Linear) else head.in_channels

    @property
    def axis(self) -> int:
        """Axis of the features and of the head's outputs: last for Linear, 1 for convolutions."""
        return -1 if isinstance(self.head, nn.Linear) else 1

    def run(self, x: Any, act: Callable[[Head, Tensor], Tensor]) -> Any:
        """Run the net with `act(head, φ)` instead of head(φ); raise ArgumentError unless the head is called once."""
        calls = 0

        def once(head: Head, phi: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise _head_error(self.net, self.name, "it is called more than once")
            return act(head, phi)

        with _substitute(self.net, {self.head: once}):
            result = call_net(self.net, x)
        if calls == 0:
            raise _head_error(self.net, self.name, "it is never called")
        return result

    def features(self, x: Any) -> Tensor:
        """Return φ = F(x), without computing what follows the head."""
        seen: list[Tensor] = []

        def stop(head: Head, phi: Tensor) -> Tensor:
            seen.append(phi)
            raise _StopForward

        with suppress(_StopForward):
            self.run(x, stop)
        return seen[0]

    def trace(self, x: Any) -> ForwardTrace:
        """Run the net and record what follows the head.

        Raises:
            ArgumentError: If the head does not reach the output, or an operation after it cannot be replayed.
        """
        recording, seen = Recording(), []

        def record(head: Head, phi: Tensor) -> Tensor:
            seen.append(phi)
            recording.use(phi)
            return recording.source(head(phi), self.name)

        with eager_mode(self.net):
            output = extract_output(self.run(x, record), x)
        if not isinstance(output, TracedTensor):
            raise _head_error(self.net, self.name, "it does not reach the net's output")
        if any(tensor._version != version for tensor, version in recording.constants):  # a replay would use the new one
            raise _unsupported("changes a tensor in place that it has used", "create a new tensor")
        if self.guessed and recording.origins(output.slot)[1]:
            raise _head_error(
                self.net, self.name, f"{self.name!r}, the last registered one, has learned layers after it"
            )
        return ForwardTrace(seen[0], as_plain_tensor(output), recording, output.slot)


def split_head(net: nn.Module, name: str | None = None, *, example: Any = None) -> HeadSplit:
    """Split the net at its last Linear or 1×1 convolution.

    Args:
        net: Module; wrappers such as DataParallel are removed.
        name: Name of the head; None: it is found.
        example: Input with which the head is found by running the net, and lazy layers are initialised.

    Returns:
        The split; the net is not changed.

    Raises:
        ArgumentError: If the head cannot be found, is not a plain layer, or has hooks.

    Example:
        >>> split = split_head(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
        >>> split.name, split.width, split.features(torch.zeros(2, 4)).shape
        ('2', 8, torch.Size([2, 8]))
    """
    net = unwrap_model(net)
    initialize_lazy_layers(net, example)
    if is_head(net):
        net = nn.Sequential(net)  # a bare layer: its input is its features
        name = "0"
    guessed = name is None and example is None
    if name is None:
        name = find_head(net, example=example)
    if name not in find_head_candidates(net):
        raise _head_error(net, name, "this is no Linear or 1×1 convolution of the net")
    head = cast(Head, net.get_submodule(name))
    # the product of B heads uses the weights only: anything else that changes the head's output would be lost
    setters = {"WeightNorm", "SpectralNorm"}  # torch's older ones only set the weight
    hooks = [hook for hook in head._forward_pre_hooks.values() if type(hook).__name__ not in setters]
    if head._forward_hooks or hooks or "forward" in vars(head):
        raise _head_error(net, name, f"{name!r} has hooks or its own forward")
    return HeadSplit(net, name, head, guessed)
