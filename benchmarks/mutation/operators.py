"""Mutants of a module: small changes of its syntax tree that a test should notice.

Operators of arithmetic and comparison, `and`, `or` and `not`, numbers, strings and Booleans (also as default values),
conditions, arguments, return values and whole statements are changed, one at a time. Not changed are what only people
or type checkers read (docstrings, annotations, messages of errors, texts of progress bars and of `__str__`), what only
guards (`assert`, `zip(strict=…)`), decorators, and what matters on other devices only (`device=`, `stable=`).
"""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {  # the limit, and the opposite
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
# Calls of methods that a mutant leaves out: x.clamp_min(0) → x.
_METHODS = {"abs", "clamp", "clamp_max", "clamp_min", "exp", "log", "log1p", "neg", "sqrt", "sort", "square"}
_METHODS |= {f"{name}_" for name in _METHODS}
_SYMMETRIC = {"min", "max", "minimum", "maximum", "hypot", "isclose", "lcm", "allclose", "equal", "promote_types"}
_MESSAGES = {"expected", "hint", "message", "title", "summary", "reference", "predict_cost"}  # names of texts
_FIXED = {"strict", "device", "stable"}  # arguments that only guard, or matter on other devices
Site = tuple[ast.AST, str, int | None]  # a node's parent, its field, and its place in a list


@dataclass(frozen=True)
class Mutant:
    """A node of a tree and what replaces it.

    Attributes:
        scope: Qualified name of the function or class that holds it.
        before: Its statement as it is.
        after: Its statement with the change.
        first: First line of the node.
        last: Last line of the node.
        statement: Line of the statement.
        outer: Lines of the outermost function that holds it in its body; None for what runs at import.
        site: Where the node is.
        new: What replaces it.
    """

    scope: str
    before: str
    after: str
    first: int
    last: int
    statement: int
    outer: tuple[int, int] | None
    site: Site
    new: ast.AST

    @property
    def key(self) -> tuple[str, str, str]:
        return self.scope, self.before, self.after


def find_mutants(tree: ast.Module) -> list[Mutant]:
    """All mutants of a module, in the order of its lines, those with the same text once."""
    found: dict[tuple[str, str, str], Mutant] = {}
    for mutant in _Finder().visit_body(tree, ()):
        found.setdefault(mutant.key, mutant)
    return list(found.values())


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Change the tree that holds the mutant for the duration of a block."""
    with _replaced(mutant.site, mutant.new):
        yield


@contextmanager
def _replaced(site: Site, new: ast.AST) -> Iterator[None]:
    parent, name, place = site
    if place is None:
        old = getattr(parent, name)
        setattr(parent, name, new)
    else:
        items = getattr(parent, name)
        old = items[place]
        items[place] = new
    try:
        yield
    finally:
        if place is None:
            setattr(parent, name, old)
        else:
            items[place] = old


def text_of(statement: ast.stmt) -> str:
    """A statement in one line; of a compound statement its head."""
    if not isinstance(getattr(statement, "body", None), list):
        return " ".join(ast.unparse(statement).split())
    saved = {
        name: getattr(statement, name)
        for name in ("body", "orelse", "finalbody", "handlers")
        if hasattr(statement, name)
    }
    saved |= {"decorator_list": statement.decorator_list} if hasattr(statement, "decorator_list") else {}
    try:
        for name in saved:
            setattr(statement, name, [])
        statement.body = [ast.Pass()]  # type: ignore[attr-defined]
        if isinstance(statement, ast.Try | ast.TryStar):
            return "try:"
        return " ".join(ast.unparse(statement).split()).removesuffix(" pass")
    finally:
        for name, value in saved.items():
            setattr(statement, name, value)


class _Finder:
    """Walks over a module with the names of scopes, the statement and the outermost function at hand."""

    def __init__(self) -> None:
        self.scope: list[str] = []
        self.outer: ast.AST | None = None
        self.bound: set[str] = set()

    def visit_body(self, parent: ast.AST, fields: tuple[str, ...]) -> Iterator[Mutant]:
        for name in fields or ("body",):
            for place, statement in enumerate(getattr(parent, name, [])):
                if isinstance(statement, ast.stmt):
                    yield from self.visit_statement((parent, name, place), statement)
                else:  # the handler of an exception
                    yield from self.visit_body(statement, ("body",))

    def visit_statement(self, site: Site, statement: ast.stmt) -> Iterator[Mutant]:
        if isinstance(
            statement, ast.Import | ast.ImportFrom | ast.Assert | ast.Delete | ast.Global | ast.Nonlocal | ast.Pass
        ):
            return
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return
        if isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(statement, ast.Assign) and self._is_text_or_alias(statement):
            return
        for child, new in self._statement_changes(site, statement):
            yield from self._make(child, new, statement)
        if isinstance(statement, ast.ClassDef):
            self.scope.append(statement.name)
            yield from self.visit_body(statement, ("body",))
            self.scope.pop()
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in ("defaults", "kw_defaults"):
                for place, default in enumerate(getattr(statement.args, name)):
                    if default is not None:
                        yield from self.visit_expression((statement.args, name, place), default, statement)
            outer, bound = self.outer, self.bound
            self.outer = self.outer or statement
            self.bound = {arg.arg for arg in ast.walk(statement.args) if isinstance(arg, ast.arg)}
            self.scope += [statement.name]
            yield from self.visit_body(statement, ("body",))
            self.scope.pop()
            self.outer, self.bound = outer, bound
        elif isinstance(statement, ast.Raise):
            yield from self._raised_names(statement)
        else:
            blocks = ("body", "orelse", "handlers", "finalbody")
            for name, value in ast.iter_fields(statement):
                if name in blocks or name == "annotation":
                    continue
                if isinstance(value, ast.expr):
                    yield from self.visit_expression((statement, name, None), value, statement)
                elif isinstance(value, list):
                    for place, item in enumerate(value):
                        if isinstance(item, ast.withitem):
                            yield from self.visit_expression((item, "context_expr", None), item.context_expr, statement)
                        elif isinstance(item, ast.expr):
                            yield from self.visit_expression((statement, name, place), item, statement)
            if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For):
                self.bound |= {
                    name.id
                    for name in ast.walk(statement)
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
                }
            yield from self.visit_body(statement, blocks)

    def visit_expression(self, site: Site, node: ast.AST, statement: ast.stmt) -> Iterator[Mutant]:
        if isinstance(node, ast.expr):
            for new in self._expression_changes(node):
                yield from self._make(site, new, statement)
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.AST):
                if isinstance(node, ast.keyword) and (node.arg in _MESSAGES or node.arg in _FIXED):
                    continue
                if isinstance(node, ast.FormattedValue) and name == "format_spec":
                    continue
                yield from self.visit_expression((node, name, None), value, statement)
            elif isinstance(value, list):
                for place, item in enumerate(value):
                    if isinstance(node, ast.JoinedStr) and isinstance(item, ast.Constant):
                        continue
                    if isinstance(node, ast.Call) and name == "args" and _is_text_argument(node, place):
                        continue
                    if isinstance(item, ast.AST):
                        yield from self.visit_expression((node, name, place), item, statement)

    def _make(self, site: Site, new: ast.AST, statement: ast.stmt) -> Iterator[Mutant]:
        node = getattr(site[0], site[1]) if site[2] is None else getattr(site[0], site[1])[site[2]]
        if isinstance(new, ast.expr | ast.stmt):
            ast.fix_missing_locations(ast.copy_location(new, node))
        before = text_of(statement)
        if node is statement:
            after = "pass" if isinstance(new, ast.Pass) else text_of(new)  # type: ignore[arg-type]
        else:
            with _replaced(site, new):
                after = text_of(statement)
        if before == after:
            return
        outer = None
        if self.outer is not None:
            outer = (self.outer.lineno, self.outer.end_lineno)  # type: ignore[attr-defined]
        place = node if isinstance(node, ast.expr) else statement
        lines = place.lineno, place.end_lineno or place.lineno
        yield Mutant(".".join(self.scope), before, after, *lines, statement.lineno, outer, site, new)

    def _is_text_or_alias(self, statement: ast.Assign) -> bool:
        """Whether it assigns a message, `__all__`, or at the top of the module the name of a type."""
        names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
        text = any(
            isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
            for node in ast.walk(statement.value)
        )
        if names and set(names) <= _MESSAGES and text:
            return True
        alias = not self.scope and len(names) == 1 and not names[0].isupper() and names[0][0].isupper()
        return alias or names == ["__all__"]

    def _statement_changes(self, site: Site, statement: ast.stmt) -> Iterator[tuple[Site, ast.AST]]:
        match statement:
            case ast.Expr(value=ast.Yield() | ast.YieldFrom()):
                pass
            case ast.Expr() | ast.Raise() | ast.AugAssign():
                yield site, ast.Pass()
                if isinstance(statement, ast.AugAssign) and type(statement.op) in _ARITHMETIC:
                    yield (statement, "op", None), _ARITHMETIC[type(statement.op)]()
            case ast.Assign(targets=[target]):
                stored = [
                    name.id
                    for name in ast.walk(target)
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
                ]
                if self.outer is not None and set(stored) <= self.bound:  # names that had a value, attributes, items
                    yield site, ast.Pass()
            case ast.Return(value=ast.expr() as value):
                if not (isinstance(value, ast.Constant) and value.value is None):
                    yield (statement, "value", None), ast.Constant(None)
            case ast.Break():
                yield site, ast.Continue()
            case ast.Continue():
                yield site, ast.Break()
            case ast.If() | ast.While():
                if not isinstance(statement.test, ast.Compare | ast.UnaryOp):
                    yield (statement, "test", None), ast.UnaryOp(ast.Not(), statement.test)
            case _:
                pass

    def _raised_names(self, statement: ast.Raise) -> Iterator[Mutant]:
        """The name of the argument in ArgumentError(name, …): the rest is a message."""
        call = statement.exc
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "ArgumentError":
            name = call.args[0]
            if isinstance(name, ast.Constant):
                yield from self._make((call, "args", 0), ast.Constant(f"XX{name.value}"), statement)

    def _expression_changes(self, node: ast.expr) -> Iterator[ast.expr]:
        match node:
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                yield ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
            case ast.BoolOp():
                yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
            case ast.UnaryOp():
                yield node.operand
            case ast.Compare():
                for place, op in enumerate(node.ops):
                    for other in _COMPARISONS[type(op)]:
                        yield ast.Compare(
                            node.left, [*node.ops[:place], other(), *node.ops[place + 1 :]], node.comparators
                        )
            case ast.IfExp() if not isinstance(node.test, ast.Compare | ast.UnaryOp):
                yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
            case ast.Constant():
                value = node.value
                if isinstance(value, bool):
                    yield ast.Constant(not value)
                elif isinstance(value, int | float):
                    yield ast.Constant(value + 1)
                elif isinstance(value, str) and self.scope[-1:] != ["__str__"]:
                    yield ast.Constant(f"XX{value}")
            case ast.Call():
                yield from _call_changes(node)
            case _:
                pass


def _is_text_argument(call: ast.Call, place: int) -> bool:
    """Whether an argument is a message or a type."""
    name = ast.unparse(call.func)
    return (
        name == "warnings.warn" or (name == "cast" and place == 0) or (name in ("TypeVar", "isinstance") and place == 1)
    )


def _call_changes(node: ast.Call) -> Iterator[ast.expr]:
    """Leave out the last argument or one with a keyword, swap two neighbours, leave out the call of a method."""
    name = ast.unparse(node.func)
    if name in ("cast", "isinstance", "hasattr", "super", "TypeVar", "warnings.warn", "print"):
        return
    if node.args:  # without the last one a default takes its place; without another one most calls only fail
        yield ast.Call(node.func, node.args[:-1], node.keywords)
    for place, (first, second) in enumerate(pairwise(node.args)):
        constant = isinstance(first, ast.Constant) or isinstance(second, ast.Constant)
        if not constant and name.rpartition(".")[2] not in _SYMMETRIC:
            yield ast.Call(node.func, [*node.args[:place], second, first, *node.args[place + 2 :]], node.keywords)
    for place, keyword in enumerate(node.keywords):
        if keyword.arg not in (*_MESSAGES, *_FIXED):
            yield ast.Call(node.func, node.args, [*node.keywords[:place], *node.keywords[place + 1 :]])
    if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS and not _is_module(node.func.value):
        yield node.func.value


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "math")
