"""Argument checks that raise `ArgumentError`, an exception with fields; limits of memory; names; lazy imports."""

import itertools
import math
import operator
import os
import sys
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

_UNCHECKED_BYTES = 1 << 26  # that every machine has


class ArgumentError(ValueError):
    """An argument has a value that is not accepted.

    The message is made from the fields, so that a caller such as the command line can format them differently.

    Args:
        name: Name of the argument.
        value: The value that was passed.
        expected: What is accepted, as a noun phrase.
        hint: What the caller can do, as an imperative clause.

    Example:
        >>> raise ArgumentError("level", 1.5, "a number between 0 and 1", hint="use 0.95 for 95 %")
        Traceback (most recent call last):
        neuboots._validation.ArgumentError: got level=1.5; expected a number between 0 and 1: use 0.95 for 95 %
    """

    def __init__(self, name: str, value: Any, expected: str, *, hint: str = "") -> None:
        self.name = name
        self.value = value
        self.expected = expected
        self.hint = hint
        super().__init__(f"got {name}={value!r}; expected {expected}" + (f": {hint}" if hint else ""))

    def __reduce__(self) -> Any:
        # a value may be anything, also a function, which another process cannot be sent
        return partial(ArgumentError, hint=self.hint), (self.name, _Shown(repr(self.value)), self.expected)


class _Shown(str):
    """Representation of a value."""

    __repr__ = str.__str__


def check_int(name: str, value: Any, *, minimum: int | None = None) -> int:
    """Return the value as an `int` (integers of NumPy and torch are accepted); raise ArgumentError otherwise.

    >>> import numpy as np
    >>> check_int("k", np.int64(3), minimum=1)
    3
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (minimum is not None and number < minimum):
        raise ArgumentError(name, value, "an integer" + ("" if minimum is None else f", at least {minimum}"))
    return number


def check_fraction(name: str, value: Any, *, zero: bool = False, one: bool = False) -> float:
    """Return the value as a `float` between 0 and 1, where `zero` and `one` include the ends; else raise ArgumentError.

    >>> check_fraction("level", 0.95)
    0.95
    """
    valid = isinstance(value, Real) and not isinstance(value, bool)
    if not valid or not 0 <= value <= 1 or (value == 0 and not zero) or (value == 1 and not one):
        ends = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
        raise ArgumentError(name, value, f"a number in {ends}")
    return float(value)


def check_positive(name: str, value: Any) -> float:
    """Return the value as a `float` if it is positive and finite; raise ArgumentError otherwise.

    >>> check_positive("scale", 2)
    2.0
    """
    valid = isinstance(value, Real) and not isinstance(value, bool)
    if not valid or not 0 < value < math.inf:
        raise ArgumentError(name, value, "a positive number")
    return float(value)


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return the value if it is one of the choices; raise ArgumentError otherwise.

    >>> check_choice("link", "identity", ("identity", "exp"))
    'identity'
    """
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(name, value, "one of " + ", ".join(map(repr, choices)))
    return value


Count = Annotated[int, 1]  # for `check_types`: an integer of at least 1
Positive = Annotated[float, sys.float_info.min]


def check_types(name: str, values: Any, hints: Mapping[str, Any] | type) -> Any:
    """Return a JSON object; raise ArgumentError unless each key has a value of its type.

    Args:
        name: What the object is, for the error.
        values: The object.
        hints: Types by key, or a dataclass, whose fields are then all keys.

    >>> check_types("net", {"width": 3, "names": ["a"]}, {"width": Count, "names": tuple[str, ...]})["width"]
    3
    >>> check_types("net", {"width": True}, {"width": int})
    Traceback (most recent call last):
    neuboots._validation.ArgumentError: got net["width"]=True; expected <class 'int'>
    """
    exact = isinstance(hints, type)
    types = get_type_hints(hints, include_extras=True) if isinstance(hints, type) else hints
    types = {key: types[key] for key in ([field.name for field in fields(hints)] if isinstance(hints, type) else types)}
    if not isinstance(values, dict) or not values.keys() >= types.keys() or (exact and values.keys() > types.keys()):
        keys = sorted(values) if isinstance(values, dict) else values
        raise ArgumentError(name, keys, f"an object with the keys {', '.join(types)}")
    for key, hint in types.items():
        if not _fits_type(values[key], hint):
            raise ArgumentError(f'{name}["{key}"]', values[key], str(hint))
    return values


def _fits_type(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of a type; of the arguments of a type whose values are not in JSON nothing is known."""
    origin, options = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits_type(value, options[0]) and value >= options[1]
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in options)
    if origin in (Union, UnionType):
        return any(_fits_type(value, option) for option in options)
    if origin in (tuple, list, Sequence, Collection):
        if origin is tuple and options[-1] is not Ellipsis:
            return isinstance(value, list) and len(value) == len(options) and all(map(_fits_type, value, options))
        return isinstance(value, list) and all(_fits_type(each, options[0]) for each in value)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(_fits_type(each, options[1]) for each in value.values())
    if hint in (bool, int, str, dict, None, NoneType):
        return type(value) is hint or value is hint
    if hint is float:
        return type(value) in (int, float)
    if is_dataclass(hint) and isinstance(hint, type):
        check_types(hint.__name__, value, hint)
    return True


def available_memory() -> int:
    """Return the bytes of main memory that this process can still allocate, as far as the system tells.

    That is the least of the machine's available memory, the limits of the control group, and that of `ulimit -v`.
    """
    free = [sys.maxsize]
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        free.append(page * os.sysconf("SC_PHYS_PAGES"))
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        free.append(1024 * int(fields["MemAvailable"].split()[0]))
        used = page * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit

        if (limit := getrlimit(RLIMIT_AS)[0]) != RLIM_INFINITY:
            free.append(limit - used)
    except (AttributeError, ImportError, KeyError, OSError, ValueError):
        pass  # another system: what was found so far
    for folder, limit_name, used_name in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit, used = (int(Path(folder, name).read_text(encoding="ascii")) for name in (limit_name, used_name))
            lines = Path(folder, "memory.stat").read_text(encoding="ascii").splitlines()
        except (OSError, ValueError):  # "max": no limit
            continue
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))  # given back
        free.append(limit - used + cached)
    return max(0, min(free))


def check_memory(name: str, value: Any, num_bytes: int, *, hint: str) -> None:
    """Raise ArgumentError if what the argument asks for needs more memory than there is; the message has both."""
    if num_bytes > _UNCHECKED_BYTES and num_bytes > (available := available_memory()):
        expected = (
            f"a size that fits into {format_bytes(available)} of memory; this one needs {format_bytes(num_bytes)}"
        )
        raise ArgumentError(name, value, expected, hint=hint)


def format_bytes(number: int) -> str:
    """Format a number of bytes.

    >>> format_bytes(2_500_000_000), format_bytes(10**30)
    ('2.5 GB', '1.0e+21 GB')
    """
    return f"{number / 1e9:,.1f} GB" if number < 10**15 else f"{number / 1e9:.1e} GB"


def format_names(names: Sequence[object], max_names: int = 8, *, max_length: int = 60) -> str:
    """Join quoted names, at most `max_names` of them, each cut to `max_length` characters."""
    texts = [str(name) for name in names[:max_names]]
    shown = ", ".join(repr(text if len(text) <= max_length else f"{text[: max_length - 1]}…") for text in texts)
    return shown + (f" and {len(names) - max_names:,} more" if len(names) > max_names else "")


def escape_text(text: str) -> str:
    """Write control characters, bidirectional overrides and whatever else is not printable as escapes.

    >>> print(escape_text("two\\nlines, \\x1b[31mred, größe 🐈"))
    two\\nlines, \\x1b[31mred, größe 🐈
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or unicodedata.category(char) == "Zs" else char.encode("unicode_escape").decode()
        for char in text
    )


def import_optional(module: str, extra: str = "data") -> ModuleType:
    """Import a module of an optional dependency, with an install hint if it is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ImportError(f"{package} is required ({error}): pip install 'neuboots[{extra}]'") from None


def lazy_exports(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package whose modules are imported when they are used (PEP 562).

    Args:
        package: Name of the package.
        modules: Public names by module.

    Returns:
        Both functions.
    """

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *itertools.chain(*modules.values())})

    def get_attribute(name: str) -> Any:
        for module, names in modules.items():
            if name in names:
                return getattr(import_module(f"{package}.{module}"), name)
        if not name.startswith("_") and find_spec(f"{package}.{name}"):
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get_attribute, list_names
