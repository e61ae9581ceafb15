"""A tape of what is done with a tensor, ready to be repeated on another one.

    source → op₁ → op₂ → … → output

Operations are noted by torch's own override protocol (`__torch_function__`) as they happen, with real values:
no symbolic tracing, so any Python code may stand around them. Constants on the tape belong to the pass in which
it was recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

# Reading values out of a tensor: the net could branch on them, and a repetition would not.
_READS = {
    getattr(Tensor, name)
    for name in (
        *("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"),
        *("__contains__", "__iter__", "is_nonzero", "equal", "allclose"),
    )
} | {torch.equal, torch.allclose, torch.is_nonzero}

# Replacing a tensor's data behind the back of everybody who holds it.
_SETTERS = {Tensor.data.__set__, Tensor.set_}  # type: ignore[attr-defined]

_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}


@dataclass(frozen=True)
class _Slot:
    number: int


def _swap(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _swap(value, leaf) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        values = [_swap(value, leaf) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return leaf(tree)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in _leaves(value)]
    return [tree]


def _writes(func: Any, kwargs: Any) -> bool:
    """Whether an operation changes one of its inputs in place."""
    name = getattr(func, "__name__", "")
    dunder = name.endswith("__")
    return name in _IN_PLACE or (name.endswith("_") and not dunder) or "out" in kwargs or bool(kwargs.get("inplace"))


def _set_item(target: Tensor, key: Any, value: Any) -> Tensor:
    """target[key] = value, as an operation that gives the target back."""
    target[key] = value
    return target


def as_plain_tensor(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


class TracedTensor(Tensor):
    """A tensor that notes on its tape what is done with it."""

    tape: "Recording"
    slot: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__setitem__:
            func = _set_item
        inputs = _leaves((args, kwargs))
        tape = next(leaf.tape for leaf in inputs if isinstance(leaf, TracedTensor))
        if tape.strict and func in _SETTERS:
            raise ValueError(
                "after its head the net replaces the data of a tensor (.data, set_), which cannot be repeated; "
                "expected ordinary operations"
            )
        if tape.strict and func in _READS:
            raise ValueError(
                f"after its head the net reads values ({func.__name__}), so what it does may differ between "
                "replicates; expected tensor operations only: move this out of forward, or end the net at its head"
            )
        # Slots are read before the call: an operation in place gives the tensor a new one.
        noted = _swap((args, kwargs), lambda leaf: _Slot(leaf.slot) if isinstance(leaf, TracedTensor) else leaf)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        outputs = [leaf for leaf in _leaves(result) if isinstance(leaf, Tensor)]
        constants = [leaf for leaf in inputs if isinstance(leaf, Tensor) and not isinstance(leaf, TracedTensor)]
        writes = func is _set_item or _writes(func, kwargs)
        if tape.strict and writes and any(out is other for out in outputs for other in constants):
            raise ValueError(
                "the net writes its head's output into another tensor in place; expected it to be returned "
                "or combined by ordinary operations: use torch.cat, torch.where or addition instead"
            )
        if not outputs:
            return result
        tape.written |= writes
        tape.constants += [(leaf, leaf._version) for leaf in constants if not leaf.is_inference()]
        return tape.note(func, noted, result)


@dataclass
class Recording:
    """The operations that follow one or more source tensors, in order, ready to be repeated."""

    strict: bool = True
    sources: dict[int, str] = field(default_factory=dict)
    steps: list[tuple[Any, Any, Any]] = field(default_factory=list)
    num_slots: int = 0
    written: bool = False  # whether a step changed a tensor in place
    constants: list[tuple[Tensor, int]] = field(default_factory=list)  # what the steps use, and its version then

    def source(self, tensor: Tensor, name: str) -> Tensor:
        traced = self._wrap(tensor)
        self.sources[traced.slot] = name
        return traced

    def _wrap(self, tensor: Tensor) -> TracedTensor:
        traced = tensor if isinstance(tensor, TracedTensor) else tensor.as_subclass(TracedTensor)
        traced.tape, traced.slot = self, self.num_slots
        self.num_slots += 1
        return traced

    def note(self, func: Any, inputs: Any, result: Any) -> Any:
        wrapped = _swap(result, lambda leaf: self._wrap(leaf) if isinstance(leaf, Tensor) else leaf)
        slots = _swap(wrapped, lambda leaf: leaf.slot if isinstance(leaf, TracedTensor) else None)
        self.steps.append((func, inputs, slots))
        return wrapped

    def check_constants(self) -> None:
        """Refuse a pass that changed a tensor after a step had used it: repeated, the step would see the change."""
        if any(tensor._version != version for tensor, version in self.constants):
            raise ValueError(
                "after its head the net changes a tensor in place that it has used before; expected it to be left as "
                "it was: make a new tensor instead"
            )

    def repeat(self, value: Tensor, slot: int) -> Tensor:
        """The tensor in `slot`, had the first source been `value`."""
        values: dict[int | None, Any] = {0: value}
        for func, inputs, slots in self.steps:
            args, kwargs = _swap(inputs, lambda leaf: values[leaf.number] if isinstance(leaf, _Slot) else leaf)
            result = func(*args, **kwargs)
            values.update(zip(_leaves(slots), _leaves(result), strict=True))
        return cast(Tensor, values[slot])

    def origins(self, slot: int) -> tuple[set[str], bool]:
        """The sources that reach `slot` past no other source, and whether learned parameters come between."""
        learned = False
        wanted = {slot}
        for _, inputs, slots in reversed(self.steps):
            if wanted.isdisjoint(_leaves(slots)):
                continue
            leaves = _leaves(inputs)
            wanted |= {leaf.number for leaf in leaves if isinstance(leaf, _Slot)}
            learned |= any(isinstance(leaf, nn.Parameter) for leaf in leaves)
        names = {name for number, name in self.sources.items() if number in wanted}
        return names, learned
