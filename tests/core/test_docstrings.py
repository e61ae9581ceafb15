"""Every public object of the library has a Google-style docstring.

Public means: no leading underscore in the module path or in the name. A class or function documents each argument under
`Args:` and, if it returns a value, `Returns:`; the top-level API also has a runnable example. A method or property
needs a summary, unless it overrides a documented one.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import neuboots

SRC = Path(neuboots.__file__).parent
FILES = [
    file
    for file in sorted(SRC.rglob("*.py"))
    if not any(part.startswith("_") and part != "__init__.py" for part in file.relative_to(SRC).parts)
]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_public(node: ast.AST) -> bool:
    return isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")


def has_decorator(node: Function | ast.ClassDef, *names: str) -> bool:
    return any(name in ast.unparse(decorator) for decorator in node.decorator_list for name in names)


def argument_names(node: Function) -> list[str]:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]


def field_names(node: ast.ClassDef) -> list[str]:
    """Constructor arguments: the fields of a dataclass, or those of `__init__`."""
    if has_decorator(node, "dataclass"):
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
        names = [item.target.id for item in fields if isinstance(item.target, ast.Name)]
        return [name for name in names if not name.startswith("_")]
    init = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    return argument_names(init[0]) if init else []


def returns_value(node: Function) -> bool:
    return node.returns is not None and ast.unparse(node.returns) not in ("None", "Never", "NoReturn")


def missing_parts(node: Function | ast.ClassDef) -> Iterator[str]:
    text = ast.get_docstring(node)
    if text is None:
        yield "docstring"
        return
    names = field_names(node) if isinstance(node, ast.ClassDef) else argument_names(node)
    documented = text.partition("Args:")[2] + text.partition("Attributes:")[2]
    absent = [name for name in names if f"{name}:" not in documented and f"{name} (" not in documented]
    if absent:
        yield "Args: " + ", ".join(absent)
    if isinstance(node, Function) and returns_value(node) and not any(word in text for word in ("Returns:", "Yields:")):
        yield "Returns"


def find_missing(file: Path) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = []
    if ast.get_docstring(tree) is None:
        found.append("module: docstring")
    for node in filter(is_public, tree.body):
        assert isinstance(node, Function | ast.ClassDef)
        found += [f"{node.name}: {part}" for part in missing_parts(node)]
        if isinstance(node, ast.ClassDef):
            for item in filter(is_public, node.body):
                assert isinstance(item, Function | ast.ClassDef)
                overrides = bool(node.bases) or has_decorator(item, "override", ".setter")
                if ast.get_docstring(item) is None and not overrides:
                    found.append(f"{node.name}.{item.name}: docstring")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(SRC).as_posix())
def test_public_objects_are_documented(file: Path) -> None:
    assert find_missing(file) == []


@pytest.mark.parametrize("name", sorted(set(neuboots.__all__)))
def test_top_level_objects_have_an_example(name: str) -> None:
    assert ">>>" in (getattr(neuboots, name).__doc__ or "")


def test_public_names_are_unambiguous() -> None:
    """No two public classes share a name, and no two public names of one module differ only by case."""
    classes: dict[str, str] = {}
    for file in FILES:
        names: dict[str, str] = {}
        for node in filter(is_public, ast.parse(file.read_text(encoding="utf-8")).body):
            assert isinstance(node, Function | ast.ClassDef)
            where = f"{file.relative_to(SRC)}:{node.name}"
            assert names.setdefault(node.name.lower(), where) == where
            if isinstance(node, ast.ClassDef):
                assert classes.setdefault(node.name, where) == where
