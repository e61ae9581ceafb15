"""The tool that measures the mutation score: which mutants it makes, and that functions get the code of a mutant."""

import ast
from pathlib import Path

import benchmarks.mutation.__main__ as mutation
from benchmarks.mutation.operators import find_mutants, mutated
from neuboots.prediction import num_bytes

SOURCE = '''
"""Text of the module."""
SIZE: int = 3


def f(x: int, y: int = 1) -> bool:
    """Text of the function."""
    assert x > 0, "a guard"
    if not x:
        raise ArgumentError("x", x, "a positive number")
    x = max(x, y)
    return g(x, y, strict=True) < SIZE and x is not None
'''


def test_mutants_of_a_function() -> None:
    found = [(mutant.scope, mutant.after) for mutant in find_mutants(ast.parse(SOURCE))]
    expected = [
        ("", "SIZE: int = 4"),
        ("", "def f(x: int, y: int=2) -> bool:"),
        ("f", "if x:"),
        ("f", "pass"),
        ("f", "raise ArgumentError('XXx', x, 'a positive number')"),
        ("f", "pass"),
        ("f", "x = max(x)"),
        ("f", "return None"),
        ("f", "return g(x, y, strict=True) < SIZE or x is not None"),
        ("f", "return g(x, y, strict=True) <= SIZE and x is not None"),
        ("f", "return g(x, y, strict=True) >= SIZE and x is not None"),
        ("f", "return g(x, strict=True) < SIZE and x is not None"),
        ("f", "return g(y, x, strict=True) < SIZE and x is not None"),
        ("f", "return g(x, y, strict=True) < SIZE and x is None"),
    ]
    assert sorted(found) == sorted(expected)


def test_a_tree_is_changed_for_the_duration_of_a_block() -> None:
    tree = ast.parse(SOURCE)
    before = ast.unparse(tree)
    for mutant in find_mutants(tree):
        with mutated(mutant):
            assert ast.unparse(tree) != before
        assert ast.unparse(tree) == before


def test_imported_functions_get_the_code_of_a_mutant() -> None:
    path = Path(num_bytes.__code__.co_filename)
    tree, code = ast.parse(path.read_text(encoding="utf-8")), num_bytes.__code__
    (mutant,) = (each for each in find_mutants(tree) if each.scope == "num_bytes" and each.after == "return None")
    with mutated(mutant):
        changed = compile(tree, str(path), "exec", dont_inherit=True)
    try:
        assert mutation.patch(changed, mutation.find_functions(path))
        assert num_bytes(None) is None  # type: ignore[arg-type]
    finally:
        num_bytes.__code__ = code


def test_listed_equivalents_have_reasons() -> None:
    for listed in mutation.equivalents().values():
        assert all(reason and before != after for (_, before, after), reason in listed.items())
