"""Argument checks that raise `ArgumentError`, an exception with fields; names in messages; lazy imports."""

import itertools
import math
import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from numbers import Real
from types import ModuleType
from typing import Any


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


def format_names(names: Sequence[object], max_names: int = 8, *, max_length: int = 60) -> str:
    """Join quoted names, at most `max_names` of them, each cut to `max_length` characters."""
    texts = [str(name) for name in names[:max_names]]
    shown = ", ".join(repr(text if len(text) <= max_length else f"{text[: max_length - 1]}…") for text in texts)
    return shown + (f" and {len(names) - max_names:,} more" if len(names) > max_names else "")


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
