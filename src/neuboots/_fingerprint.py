"""Descriptions of options, functions, nets and data that are equal in every process, to recognise a run.

    description = {path: text},   for example {"optimizer.groups[0].lr": "0.1", "model.act": "torch.nn.functional.relu"}

Functions are described by their code, defaults, captured values and the globals that they read; objects by their class
and attributes; data by their numbers. Texts contain no addresses and do not depend on line numbers, on the names of
modules of the user, or on the seed of Python's hashes. A hash of code, "#" and 16 digits, depends on the version of
Python; `find_differences` ignores it where versions differ.
"""

import dis
import functools
import hashlib
import itertools
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from neuboots.loading import (
    Batch,
    _BatchReader,
    _unwrap_subsets,
    collate_examples,
    dataset_length,
    get_tensors,
    preserve_rng_state,
    seed_everything,
)

NO_EFFECT = {"no effect": True}  # metadata of fields of a dataclass on which results do not depend

_MAX_HASHED = 1 << 28  # bytes of a tensor, or of rows of data; of more, evenly spaced elements are hashed
_MAX_HASHED_ATTRIBUTE = 1 << 16  # the same where a description is made at every checkpoint
_NUM_ROWS = 32  # rows of data that are read
_NUM_PROBED = 16  # of these, in the batch that shows what a net does
_MAX_TEXT, _MAX_ITEMS = 160, 64
_ENTRY_POINTS = ("forward", "__call__", "step", "get_lr", "_get_closed_form_lr", "sample")  # of objects
_MODULE_INTERNALS = {*vars(nn.Module()), "_forward_hooks_with_kwargs", "_compiled_call_impl"}
_OPTIMIZER_INTERNALS = {*vars(torch.optim.SGD([torch.zeros(1)])), "step", "_opt_called"}
_PERFORMANCE_OPTIONS = {"foreach", "fused", "capturable", "params", "initial_lr"}  # of groups; or described elsewhere


def describe(value: Any, path: str = "", *, training: bool = False) -> dict[str, str]:
    """Return texts by path that are equal for equal values, in every process.

    Args:
        value: Options, functions, nets, tensors, data sets, or containers of them.
        path: Path of the value.
        training: Whether the value takes part in a training run: the weights that it trains are left out, large
            tensors are sampled, and no data set is read.

    Returns:
        The texts.

    Example:
        >>> describe({"rate": 0.5, "widths": [2, 3]}, "x")
        {'x': 'dict of 2', "x['rate']": '0.5', "x['widths']": '(2, 3)'}
    """
    parts: dict[str, str] = {}
    seen: dict[int, tuple[str, Any]] = {}  # objects with parts are kept, since a freed one gives its id away
    stack = [(path, value)]
    while stack:
        path, value = stack.pop()
        if (text := _describe_plain(value)) is None:
            text, children = _open(value, training)
            if children and id(value) in seen:
                text, children = f"is {seen[id(value)][0]}", {}
            elif children:
                seen[id(value)] = path, value
            stack += [(path + key, child) for key, child in reversed(children.items())]
        parts[path] = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 20]}… {digest(text)}"
    return parts


def digest(*values: str | bytes) -> str:
    """Return a hash of texts and bytes, 16 hexadecimal digits."""
    state = hashlib.sha1(usedforsecurity=False)
    for value in values:
        state.update(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value)
        state.update(b"\0")
    return state.hexdigest()[:16]


def hash_description(parts: Mapping[str, str]) -> str:
    """Return one hash of a description."""
    return digest(*itertools.chain(*sorted(parts.items())))


def find_differences(
    old: Mapping[str, str], new: Mapping[str, str], *, same_python: bool
) -> dict[str, tuple[str, str]]:
    """Return old and new text of the paths that are in both descriptions and differ.

    Args:
        old: A description.
        new: Another one.
        same_python: Whether both were made by one version of Python, so that code can be compared.

    Returns:
        The texts by path.

    Example:
        >>> find_differences(
        ...     {"lr": "0.1", "f": "g#0123456789abcdef"}, {"lr": "0.2", "f": "g#fedcba9876543210"}, same_python=False
        ... )
        {'lr': ('0.1', '0.2')}
    """

    def comparable(text: str) -> str:
        return text if same_python else re.sub(r"#[0-9a-f]{16}", "", text)

    pairs = {path: (old[path], text) for path, text in new.items() if path in old}
    return {path: pair for path, pair in pairs.items() if comparable(pair[0]) != comparable(pair[1])}


# -- values --------------------------------------------------------------------------------------------


def _describe_plain(value: Any) -> str | None:
    """Text of a number, a string, or a few of them; None for other values."""
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        value = value.item()
    kind = type(value)
    if kind in (int, float):
        return repr(value).removesuffix(".0")
    if kind is str and re.fullmatch(r"(cpu|cuda|mps)(:\d+)?", value):
        return "a device"
    if value is None or value is Ellipsis or kind in (bool, complex, str, bytes, range, slice, torch.dtype, torch.Size):
        return repr(value)
    if isinstance(value, torch.device):
        return "a device"
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Enum):
        return str(value)
    if kind in (tuple, list) and len(value) <= _MAX_ITEMS:
        texts = [_describe_plain(item) if type(item) not in (tuple, list) else None for item in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    return None


def _open(value: Any, training: bool) -> tuple[str, dict[str, Any]]:
    """Text of a value, and its parts by the ends of their paths."""
    match value:
        case Tensor():
            trained = training and isinstance(value, nn.Parameter) and value.requires_grad
            return _describe_tensor(value, 0 if trained else _MAX_HASHED_ATTRIBUTE if training else _MAX_HASHED), {}
        case np.ndarray():
            if value.dtype.kind in "biuf" and value.dtype.isnative:
                limit = _MAX_HASHED_ATTRIBUTE if training else _MAX_HASHED
                return _describe_tensor(torch.as_tensor(np.require(value, requirements=["C", "W"])), limit), {}
            return f"{value.dtype} {value.shape} {digest(repr(value.tolist()))}", {}
        case nn.Module():
            public = {key: item for key, item in vars(value).items() if key not in _MODULE_INTERNALS}
            hooks = {key: [*vars(value)[key].values()] for key in _MODULE_INTERNALS if key.endswith("_hooks")}
            tensors = {**value._parameters, **value._buffers}
            named = {**tensors, **public, **{key: item for key, item in hooks.items() if item}, **value._modules}
            return _open_object(value, named)
        case Optimizer():
            groups = [{k: v for k, v in g.items() if k not in _PERFORMANCE_OPTIONS} for g in value.param_groups]
            sizes = [len(group["params"]) for group in value.param_groups]
            public = {key: item for key, item in vars(value).items() if key not in _OPTIMIZER_INTERNALS}
            flat = {f"groups[{i}].{key}": item for i, group in enumerate(groups) for key, item in group.items()}
            return _open_object(value, {"parameters": sizes, **flat, **public})
        case DataLoader():
            drop = value.batch_size if value.drop_last else None
            return "loader", {".dataset": value.dataset, ".sampler": type(value.sampler), ".drop_last": drop}
        case functools.partial():
            named = {str(k): v for k, v in [*enumerate(value.args), *value.keywords.items()]}
            return "partial", {".func": value.func, **{f"({key})": item for key, item in sorted(named.items())}}
        case FunctionType():
            library, children = _is_library(value.__module__), {}
            if not library or str(value.__module__).startswith("neuboots"):
                children = _captured(value, with_globals=not library)
            return _function_name(value) if library else f"{value.__name__}#{_hash_code(value.__code__)}", children
        case MethodType():
            return "method", {".function": value.__func__, ".self": value.__self__}
        case BuiltinFunctionType():
            return value.__qualname__, {}
        case type():
            if _is_library(value.__module__):
                return _function_name(value), {}
            functions = _reachable(value)
            return _class_name(value, functions), _class_attributes(value, functions) | _captured_by(functions)
        case CodeType():
            return f"{value.co_name}#{_hash_code(value)}", {}
        case Mapping():
            keys = {key: _describe_plain(key) or hash_description(describe(key, training=training)) for key in value}
            children = {f"[{keys[key]}]": value[key] for key in sorted(keys, key=lambda key: keys[key])}
            return _open_items(type(value), children, training)
        case set() | frozenset():
            texts = sorted(_describe_plain(i) or hash_description(describe(i, training=training)) for i in value)
            return f"{type(value).__name__} of {len(texts)} {digest(*texts)}", {}
        case Sequence() if not isinstance(value, Dataset):
            return _open_items(type(value), {f"[{i}]": item for i, item in enumerate(value)}, training)
        case Namespace() | SimpleNamespace():
            return _open_object(value, vars(value))
        case _ if not training and hasattr(value, "__len__") and hasattr(value, "__getitem__"):
            return _open_rows(value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            shown = [f for f in fields(value) if f.compare and f.metadata != NO_EFFECT]
            return _open_object(value, {f.name: getattr(value, f.name) for f in shown}, exhaustive=True)
    if not _is_library(type(value).__module__) or type(value).__module__.startswith("neuboots"):
        slots = {name: getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)}
        return _open_object(value, {**slots, **getattr(value, "__dict__", {})})
    text = repr(value)
    return _function_name(type(value)) if " at 0x" in text else f"{_function_name(type(value))} {text}", {}


def _open_items(kind: type, children: dict[str, Any], training: bool) -> tuple[str, dict[str, Any]]:
    """Text and parts of a container; the items of a long one are hashed."""
    text = f"{kind.__name__} of {len(children)}"
    if len(children) <= _MAX_ITEMS:
        return text, children
    texts = (_describe_plain(item) or hash_description(describe(item, training=training)) for item in children.values())
    return f"{text} {digest(*itertools.chain(*zip(children, texts, strict=True)))}", {}


def _open_rows(data: Any) -> tuple[str, dict[str, Any]]:
    """Text and parts of a data set: tensors in memory; else targets and some rows, read under a fixed seed."""
    tensors, rows = get_tensors(data)
    if tensors is not None:
        return f"{len(data)} examples", {f"[{i}]": t if rows is None else t[rows] for i, t in enumerate(tensors)}
    places = _spaced(len(data), _NUM_ROWS)
    with preserve_rng_state():
        seed_everything(0, "identity")
        some = [data[i] for i in places.tolist()]
    base, rows = _unwrap_subsets(data)
    parts = {".rows": rows, ".targets": getattr(base, "targets", None), ".some": some}
    return f"{_function_name(type(base))} of {len(data)}", parts


def _open_object(value: Any, named: Mapping[str, Any], *, exhaustive: bool = False) -> tuple[str, dict[str, Any]]:
    """Class and attributes of an object, with the code of its class if that is the user's."""
    cls = type(value)
    functions = [] if _is_library(cls.__module__) else _reachable(cls)
    names = {} if exhaustive or not named else {".*": ", ".join(sorted(map(str, named)))}
    attributes = _class_attributes(cls, functions) | {f".{key}": item for key, item in named.items()}
    return _class_name(cls, functions), {**names, **attributes, **_captured_by(functions)}


def _describe_tensor(tensor: Tensor, limit: int) -> str:
    """Type, shape and numbers of a tensor: all of them, or a hash of at most `limit` bytes; of none if that is 0."""
    if is_lazy(tensor):
        return "uninitialized"
    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if limit == 0 or tensor.device.type == "meta":
        return text
    if tensor.layout is not torch.strided or tensor.is_quantized:
        tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor.dequantize()
    flat = tensor.detach().flatten().resolve_conj().resolve_neg()
    shown = f" [{', '.join(f'{x:.6g}' for x in flat[:3].tolist())}{', …' * (len(flat) > 3)}]" if len(flat) else ""
    if flat.nbytes > limit:
        flat = flat[_spaced(len(flat), limit // 16 // flat.element_size()).to(flat.device)]
    data = flat.cpu().contiguous().view(torch.uint8).numpy()
    return f"{text}{shown} {digest(data.tobytes())}"


def _spaced(n: int, count: int) -> Tensor:
    """Numbers of up to `count` evenly spaced ones of n elements."""
    return torch.linspace(0, n - 1, min(n, count), dtype=torch.float64).round().long()


# -- code ----------------------------------------------------------------------------------------------


@functools.cache
def _is_library(module: str | None) -> bool:
    """Whether a module is not the user's: its functions are described by their names."""
    root = str(module).partition(".")[0]
    if root in sys.stdlib_module_names - {"__main__"} or root in ("neuboots", "neuboots_paper", "torch", "numpy"):
        return True
    file = getattr(sys.modules.get(root), "__file__", None)
    return file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _function_name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}".replace("<locals>.", "")


def _class_name(cls: type, functions: Sequence[FunctionType]) -> str:
    """Name of a class with a hash of the code of these functions of it."""
    if not functions:
        return _function_name(cls) if _is_library(cls.__module__) else cls.__name__
    return f"{cls.__name__}#{digest(*(f'{f.__name__} {_hash_code(f.__code__)}' for f in functions))}"


def _reachable(cls: type) -> list[FunctionType]:
    """Functions of the user's classes among the bases that a call of an object, or a step, may run."""
    classes = [base for base in cls.__mro__ if not _is_library(base.__module__)]
    names, found = [*_ENTRY_POINTS], list[FunctionType]()
    for name in names:  # grows
        for base in classes:
            member = vars(base).get(name)
            member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            while isinstance(member, FunctionType):
                inner = getattr(member, "__wrapped__", None)
                decorator = inner is not None and _is_library(member.__globals__.get("__name__"))
                if not decorator and member not in found:
                    found.append(member)
                    names += [other for other in _read_names(member.__code__)[0] if other not in names]
                member = inner
    return found


def _class_attributes(cls: type, functions: Iterable[FunctionType]) -> dict[str, Any]:
    """Values of the user's classes among the bases that functions read, unless they are methods or descriptors."""
    read = {name for function in functions for name in _read_names(function.__code__)[0]}
    classes = [base for base in reversed(cls.__mro__) if not _is_library(base.__module__)]
    values = {name: value for base in classes for name, value in vars(base).items() if name in read}
    return {f".{name}": value for name, value in values.items() if not hasattr(value, "__get__")}


@functools.cache
def _read_names(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of attributes and globals that code uses, and of globals that it reads and does not write."""
    inner = [_read_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    ops = [(op.opname, op.argval) for op in dis.get_instructions(code) if op.opname.endswith(("_GLOBAL", "_NAME"))]
    written = {name for op, name in ops if op.startswith("STORE")}
    read = [name for op, name in ops if op.startswith("LOAD") and name not in written]
    names = [*code.co_names, *itertools.chain(*(names for names, _ in inner))]
    return tuple(dict.fromkeys(names)), tuple(dict.fromkeys([*read, *itertools.chain(*(read for _, read in inner))]))


@functools.cache
def _hash_code(code: CodeType) -> str:
    """Hash of what code does: not of its place, its names of variables, or its docstring."""

    def constant(value: Any) -> str:
        if isinstance(value, CodeType):
            return _hash_code(value)
        return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)

    # the first constant is the docstring, or None in functions that have none
    documented = bool(code.co_consts) and isinstance(code.co_consts[0], str | None)
    first_used = any(op.opname == "LOAD_CONST" and op.arg == 0 for op in dis.get_instructions(code))
    consts = code.co_consts[1:] if documented and not first_used else code.co_consts
    return digest(code.co_code, *code.co_names, *map(constant, consts))


def _is_named(value: Any) -> bool:
    """Whether a value is a module, function or class of a library, which code that reads it names."""
    if isinstance(value, ModuleType):
        return _is_library(value.__name__)
    return isinstance(value, FunctionType | type | BuiltinFunctionType) and _is_library(value.__module__)


def _captured(function: FunctionType, *, with_globals: bool) -> dict[str, Any]:
    """Defaults, captured variables and globals of a function by their names in parentheses."""
    code, values = function.__code__, dict[str, Any]()
    defaults = function.__defaults__ or ()
    values |= zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    values |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    names, read = _read_names(code)
    for name in read if with_globals else ():
        if name in function.__globals__ and not _is_named(value := function.__globals__[name]):
            values.setdefault(name, value)
    values.pop("__class__", None)  # of super()
    modules = {name: value for name, value in values.items() if isinstance(value, ModuleType)}
    values = {name: value for name, value in values.items() if name not in modules}
    for name, module in modules.items():
        constants = {key: vars(module)[key] for key in names if key in vars(module) and not _is_named(module)}
        values |= {
            f"{name}.{key}": value
            for key, value in constants.items()
            if not (isinstance(value, ModuleType) or _is_named(value))
        }
    return {f"({name})": value for name, value in values.items()}


def _captured_by(functions: Iterable[FunctionType]) -> dict[str, Any]:
    captured = (_captured(function, with_globals=True) for function in functions)
    return {name: value for each in captured for name, value in each.items()}


# -- data ----------------------------------------------------------------------------------------------


def describe_data(
    data: Dataset[Any], path: str, *, seed: int = 0, batch_size: int = _NUM_PROBED
) -> tuple[dict[str, str], Batch | None]:
    """Describe data by all numbers of tensors in memory, or by up to 32 examples, and all targets that are in memory.

    Examples are read as in the first epoch of a run. Of a stream, the first batch is read, unless it is an iterator,
    which could not be read again.

    Args:
        data: Data set of pairs (x, y).
        path: Path of the description.
        seed: Seed of the run.
        batch_size: Number of examples of a batch of the run.

    Returns:
        The description, and a batch of up to 16 of the examples (None if nothing was read).
    """
    n, size = dataset_length(data), min(batch_size, _NUM_PROBED)
    parts = {path: "a stream" if n is None else f"{n} examples"}
    with preserve_rng_state():
        if n is None:
            batches = _read_stream(data, seed, size)
        else:
            rows = _spaced(n, _NUM_ROWS)
            batches = _read_rows(data, rows, seed, size)
        read, first, used = list[tuple[str, str]](), None, 0
        for batch in batches:
            first = first or batch
            read.append((hash_description(describe(batch.x)), hash_description(describe(batch.y))))
            used += sum(part.nbytes for part in torch.utils._pytree.tree_leaves(batch.x) if isinstance(part, Tensor))
            if used > _MAX_HASHED:
                break
    if first is not None:
        for name, values, hashes in (
            ("inputs", first.x, [pair[0] for pair in read]),
            ("targets", first.y, [pair[1] for pair in read]),
        ):
            text = describe(values)[""]
            parts[f"{path}.{name}"] = f"{text} {digest(*hashes)}"
    tensors, places = get_tensors(data)
    if tensors is not None and n is not None:
        for name, some in (("inputs", tensors[:-1]), ("targets", tensors[-1:])):
            parts[f"{path}.all {name}"] = ", ".join(_describe_examples(tensor, places) for tensor in some)
    elif n is not None and (targets := _stored_targets(data)) is not None:
        parts[f"{path}.all targets"] = targets
    return parts, first


def _read_rows(data: Dataset[Any], rows: Tensor, seed: int, size: int) -> Iterator[Batch]:
    """Batches of these rows."""
    reader = _BatchReader(data, seed)
    for start in range(0, len(rows), size):
        x, y, index = reader[0, rows[start : start + size]]
        yield Batch(x, y, index)


def _read_stream(data: Any, seed: int, size: int) -> Iterator[Batch]:
    """The first batch of a stream, if another pass gives it again."""
    seed_everything(seed, "stream", 0, 0)
    examples = iter(data)
    if examples is data or examples is iter(data):
        return
    some = list(itertools.islice(examples, size))
    if some:
        x, y = collate_examples(data, some)
        yield Batch(x, y, torch.arange(len(some)))


def _describe_examples(tensor: Tensor, places: Tensor | None) -> str:
    """Description of the selected rows of a tensor; of evenly spaced ones if there are many."""
    n = len(tensor) if places is None else len(places)
    row_bytes = tensor.nbytes // max(1, len(tensor))
    if n * row_bytes > _MAX_HASHED:
        some = (
            torch.linspace(0, n - 1, max(2, _MAX_HASHED // 4 // max(1, row_bytes)), dtype=torch.float64).round().long()
        )
        places = some if places is None else places[some]
    return f"{n} × {_describe_tensor(tensor if places is None else tensor[places], _MAX_HASHED)}"


def _stored_targets(data: Dataset[Any]) -> str | None:
    """Description of targets that a data set keeps in memory; None if it has none that are numbers."""
    inner, places = _unwrap_subsets(data)
    stored = getattr(inner, "targets", None)
    if stored is None or getattr(inner, "target_transform", None) is not None:
        return None
    try:
        targets = torch.as_tensor(stored)
        return _describe_examples(targets, places) if targets.ndim else None
    except (TypeError, ValueError, RuntimeError, IndexError):
        return None
