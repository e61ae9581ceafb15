"""Identity: what results depend on, as a text, by which a folder of them is found again or refused.

    identity_of(a) = identity_of(b)  if results under the settings a are those under b, in any process

A function is known by its name, its code and all that the code refers to, down to the code of libraries, of which the
name is enough; a dataclass by its fields; a tensor by every byte; a net by its classes, options and weights; a data set
by its length, its targets if they are in memory, and some of its rows, lest a large one be read whole. What has no
other description is known by its repr without addresses in memory, which change between processes.
"""

import dis
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.hooks import RemovableHandle

from neuboots.batches import in_memory, own_randomness, seed_everything
from neuboots.training import Recipe, make_seeded

_CUT = 120  # characters of a text that are kept; a digest stands for the rest
_SHOWN = 80
_ROWS = 18  # rows of a data set that are read: the first, the last, and some between
_TOGETHER = 4096  # rows hashed at a time
_OF_MODULES = frozenset(vars(nn.Module()))  # what every module has, hooks and the like
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (sysconfig.get_path("stdlib"), Path(torch.__file__).parents[1], Path(__file__).parents[1])
)


def identity_of(**settings: Any) -> str:
    """The settings as a text: name=description for each, a long one cut, with a digest of the whole.

    Of a recipe, what changes no result is left out: progress, workers, folder, checkpoints, `on_epoch`.

    >>> a, b, c = (identity_of(score=lambda x, k=k: k * x, n=3) for k in (1, 1, 2))
    >>> a == b != c
    True
    >>> identity_of(n=3, names=("a", "b"))
    "n=3; names=('a', 'b')"
    """
    known = _Known()
    return "; ".join(f"{name}={known.text(value)}" for name, value in settings.items())


def net_of(make_net: Callable[[], nn.Module] | None, seed: int) -> nn.Module | None:
    """One net, to know `make_net` by, having seen that the next is another one; None for a method without a net."""
    if make_net is None:
        return None
    first, second = make_seeded(make_net, seed), make_seeded(make_net, seed)
    if {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}:
        raise ValueError(
            "make_net() gave the same weights twice, so that each fit would go on with the net of the last; "
            "expected a new net at each call: build it inside make_net, or copy.deepcopy what is pretrained"
        )
    return first


class _Known:
    """Texts by the objects they describe: each is looked at once, and what contains itself comes to an end."""

    def __init__(self) -> None:
        self.texts: dict[int, tuple[Any, str]] = {}  # with the object, whose id would else be given to another

    def text(self, value: Any) -> str:
        if id(value) not in self.texts:
            self.texts[id(value)] = value, "itself"
            self.texts[id(value)] = value, _cut(self._described(value))
        return self.texts[id(value)][1]

    def _described(self, value: Any) -> str:
        match value:
            case np.generic():
                return repr(value.item())
            case Tensor() | np.ndarray():
                return self._array(value)
            case Mapping():
                return f"{{{', '.join(sorted(f'{self.text(key)}: {self.text(value[key])}' for key in value))}}}"
            case set() | frozenset():
                return f"{{{', '.join(sorted(map(self.text, value)))}}}"  # the order depends on the process
            case str() | bytes() | range():
                return repr(value)
            case Sequence():
                return f"({', '.join(map(self.text, value))})"
            case ModuleType():
                return value.__name__
            case CodeType():
                return self._call(value.co_name, value.co_code, value.co_names, value.co_consts)
            case CellType():
                return self.text(_inside(value))
            case partial():
                return self._call("partial", value.func, value.args, value.keywords)
            case MethodType():
                return self._call("method", value.__self__, value.__func__)
            case staticmethod() | classmethod():
                return self._call(type(value).__name__, value.__func__)
            case property():
                return self._call("property", value.fget)
            case cached_property():
                return self._call("property", value.func)
            case FunctionType():
                return self._function(value)
            case type():
                return self._class(value)
            case nn.Module():
                return self._module(value)
            case DataLoader():
                return self._loader(value)
            case IterableDataset():
                return self._call(self.text(type(value)), *_read(value, None))
            case RemovableHandle():
                return "hook"  # its number counts the hooks of the process
            case Recipe():
                same = replace(value, progress=False, num_workers=0, folder=None, checkpoint_steps=None, on_epoch=None)
                return self._fields(same)
        return self._object(value)

    def _call(self, name: str, *parts: Any) -> str:
        return f"{name}({', '.join(map(self.text, parts))})"

    def _array(self, array: Any, places: Tensor | None = None) -> str:
        """Shape, type, and a hash of every byte, of these rows or of all."""
        if isinstance(array, UninitializedBuffer | UninitializedParameter):
            return "a tensor to come"
        if isinstance(array, np.ndarray) and array.dtype.hasobject:
            return self._call("array", array.shape, array.tolist())
        parts = [array] if places is None else (array[rows] for rows in torch.split(places, _TOGETHER))
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(_bytes(part))
        shape = (*array.shape,) if places is None else (len(places), *array.shape[1:])
        return f"{str(array.dtype).removeprefix('torch.')}{shape}#{digest.hexdigest()}"

    def _function(self, function: FunctionType) -> str:
        """Code, defaults, and what it refers to: variables around it, and global ones."""
        parts: list[Any] = [function.__defaults__, function.__kwdefaults__, function.__closure__, function.__dict__]
        if not _is_library(function.__module__):
            everywhere = function.__globals__
            named = {name: everywhere[name] for name in _names(function.__code__) if name in everywhere}
            parts += [function.__code__, named]
        return self._call(_name(function), *parts)

    def _class(self, kind: type) -> str:
        """All that its body defines, and its bases."""
        if _is_library(kind.__module__):
            return _name(kind)
        body = {
            name: value
            for name, value in vars(kind).items()
            if isinstance(value, FunctionType) or not (name.startswith("__") and name.endswith("__"))
        }
        return self._call(_name(kind), body, kind.__bases__)

    def _module(self, module: nn.Module) -> str:
        """Each module in it: class, options, weights and buffers."""
        parts = [
            (
                name,
                type(part),
                {option: value for option, value in vars(part).items() if option not in _OF_MODULES},
                dict(part.named_parameters(recurse=False)),
                dict(part.named_buffers(recurse=False)),
            )
            for name, part in module.named_modules()
        ]
        return self._call(_name(type(module)), *parts)

    def _loader(self, loader: DataLoader[Any]) -> str:
        """Its data set, the rows that it gives of it, and how it puts them together."""
        order = loader.batch_sampler if loader.batch_size is None else loader.sampler
        dropped = loader.batch_size if loader.drop_last else None
        return self._call("DataLoader", loader.dataset, order, dropped, loader.collate_fn)

    def _rows(self, data: Any) -> str:
        """Length, targets in memory, and some rows; all of what is in tensors."""
        n = len(data)
        tensors, places = in_memory(data)
        if tensors is not None:
            return f"{n} rows({', '.join(self._array(tensor, places) for tensor in tensors)})"
        whole = data
        parts: list[Any] = []
        while isinstance(whole, Subset):
            parts.append(np.asarray(whole.indices))
            whole = whole.dataset
        parts.append(_as_array(getattr(whole, "targets", None)))
        some = torch.linspace(0, n - 1, min(n, _ROWS)).round().long().tolist()
        return self._call(f"{n} rows of {_name(type(whole))}", *parts, *_read(data, some))

    def _fields(self, value: Any) -> str:
        """A dataclass; fields that do not count in comparing two do not count here."""
        named = {field.name: getattr(value, field.name, None) for field in fields(value) if field.compare}
        texts = (f"{name}={self.text(part)}" for name, part in named.items())
        return f"{self.text(type(value))}({', '.join(texts)})"

    def _object(self, value: Any) -> str:
        kind: Any = type(value)
        if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
            return self._rows(value)
        if is_dataclass(value):
            return self._fields(value)
        if kind.__repr__ is object.__repr__:
            return self._call(self.text(kind), getattr(value, "__dict__", {}))
        shown = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
        return shown if _is_library(kind.__module__) else f"{self.text(kind)} {shown}"


def _cut(text: str) -> str:
    if len(text) <= _CUT:
        return text
    return f"{text[:_SHOWN]}…#{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _names(code: CodeType) -> list[str]:
    """Names of global variables in the code and in the functions that it makes."""
    mine = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (name for part in code.co_consts if isinstance(part, CodeType) for name in _names(part))
    return sorted(mine.union(inner))


def _inside(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_library(module: str | None) -> bool:
    """Whether this is code that its name and version stand for, and not the caller's own."""
    if module is None or module == "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return module in sys.builtin_module_names if file is None else file.startswith(_LIBRARIES)


def _bytes(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).tobytes()
    dense = array.detach().cpu().to_dense() if array.layout != torch.strided else array.detach().cpu()
    return dense.resolve_conj().contiguous().flatten().view(torch.uint8).numpy()


def _as_array(targets: Any) -> Any:
    """A list as one array, which is hashed at once, where its elements are alike."""
    try:
        return np.asarray(targets) if isinstance(targets, list) else targets
    except ValueError:
        return targets


def _read(data: Any, rows: list[int] | None) -> list[Any]:
    """These rows, or the first of a stream, augmented as by one seed."""
    with own_randomness():
        seed_everything(0, "identity")
        return list(islice(data, _ROWS)) if rows is None else [data[i] for i in rows]
