"""Changes of the syntax tree of one function, each written as a kind and the node that it changes.

A node is named by its code, whatever the layout: an expression by all of it, a statement or a condition by a part.
"""

import ast
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

STATEMENT, CONDITION, MEMBER, EXPRESSION = range(4)
_STEP = re.compile(r"(?P<kind>\w+) `(?P<which>[^`]+)`(?: (?P<number>\d+))?(?: by `(?P<new>[^`]*)`)?")
_CONDITIONS = ast.If | ast.While | ast.IfExp | ast.Assert
_LISTS_OF_MEMBERS = (
    (ast.BoolOp, "values"),
    (ast.Call, "args"),
    (ast.Call, "keywords"),
    (ast.Tuple | ast.List | ast.Set, "elts"),
    (ast.comprehension, "ifs"),
)


class VoidStep(Exception):
    """The function does not have the one node that a step changes."""


@dataclass(frozen=True)
class Place:
    """A node in its parent."""

    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST

    def is_named(self, part: str, whole: ast.AST | None) -> bool:
        """Whether a step means this node: by all of its code if that is given, or else by a part of its first line."""
        if whole is not None:
            return type(self.node) is type(whole) and ast.unparse(self.node) == ast.unparse(whole)
        text = ast.unparse(self.node)
        return part in (text.partition("\n")[0] if hasattr(self.node, "body") else text)

    def become(self, *nodes: ast.AST) -> None:
        """Put these nodes in its place."""
        if self.index is None:
            setattr(self.parent, self.field, nodes[0])
        else:
            getattr(self.parent, self.field)[self.index : self.index + 1] = nodes


@dataclass(frozen=True)
class Step:
    """One change: of the only node that fits, or of the one with this number."""

    kind: str
    which: str
    number: int
    new: str

    def apply(self, function: ast.AST) -> None:
        """Change the function's tree. Raises VoidStep."""
        sort, change = KINDS[self.kind]
        which = _argument(self.which) if sort in (MEMBER, EXPRESSION) else None
        found = [place for place in _places(function, sort) if place.is_named(self.which, which)]
        if len(found) < max(self.number, 1) or (len(found) > 1 and not self.number):
            raise VoidStep(f"{len(found)} places for {self}")
        change(found[max(self.number, 1) - 1], self.new)

    def __str__(self) -> str:
        number = f" {self.number}" if self.number else ""
        return f"{self.kind} `{self.which}`{number}" + (f" by `{self.new}`" if self.new else "")


def read_steps(text: str) -> list[Step]:
    """The steps of a table's cell. Raises VoidStep."""
    steps = []
    for part in text.split("; then "):
        found = _STEP.fullmatch(part)
        if found is None or found["kind"] not in KINDS:
            raise VoidStep(f"not a step: {part}")
        steps.append(Step(found["kind"], found["which"], int(found["number"] or 0), found["new"] or ""))
    return steps


def function_of(tree: ast.Module, name: str) -> ast.AST:
    """The function or class of this qualified name; the module without one. Raises VoidStep."""
    node: ast.AST = tree
    for part in filter(None, name.split(".")):
        named = [child for child in _definitions(node) if child.name == part]
        if len(named) != 1:
            raise VoidStep(f"{len(named)} functions are called {name}")
        node = named[0]
    return node


def _definitions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Below a node. No expression, which most nodes are, holds one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
        if not isinstance(child, ast.expr):
            yield from _definitions(child)


def _places(node: ast.AST, sort: int) -> Iterator[Place]:
    """The places of a sort below a node, in the order of the code."""
    for name, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                if _is_of(sort, node, name, child):
                    yield Place(node, name, index, child)
                yield from _places(child, sort)


def _is_of(sort: int, parent: ast.AST, name: str, child: ast.AST) -> bool:
    if sort == STATEMENT:
        return isinstance(child, ast.stmt)
    if sort == EXPRESSION:
        return isinstance(child, ast.expr)
    if sort == MEMBER:
        return any(isinstance(parent, parents) and name == members for parents, members in _LISTS_OF_MEMBERS)
    return (isinstance(parent, _CONDITIONS) and name == "test") or (
        isinstance(parent, ast.comprehension) and name == "ifs"
    )


def _argument(code: str) -> ast.AST:
    """An expression, or a keyword argument."""
    try:
        return ast.parse(code, mode="eval").body
    except SyntaxError:
        call = ast.parse(f"f({code})", mode="eval").body
        assert isinstance(call, ast.Call)
        return call.keywords[0]


def _drop(place: Place, _new: str) -> None:
    alone = len(getattr(place.parent, place.field)) == 1
    place.become(*([ast.Pass()] if alone else []))


def _unwrap(place: Place, _new: str) -> None:
    place.become(*place.node.body, *getattr(place.node, "orelse", ()), *getattr(place.node, "finalbody", ()))


def _late(place: Place, _new: str) -> None:
    siblings = getattr(place.parent, place.field)
    siblings.insert(place.index + 1 if place.index is not None else 0, siblings.pop(place.index))


def _before(place: Place, new: str) -> None:
    place.become(*ast.parse(new).body, place.node)


def _after(place: Place, new: str) -> None:
    place.become(place.node, *ast.parse(new).body)


def _replace(place: Place, new: str) -> None:
    place.become(*ast.parse(new).body)


def _never(place: Place, _new: str) -> None:
    place.become(ast.Constant(False))


def _always(place: Place, _new: str) -> None:
    place.become(ast.Constant(True))


def _omit(place: Place, _new: str) -> None:
    place.become()
    if isinstance(place.parent, ast.BoolOp) and len(place.parent.values) == 1:
        place.parent.values *= 2  # Python has no "and" of one


def _put(place: Place, new: str) -> None:
    place.become(_Filled(place.node).visit(ast.parse(new, mode="eval").body))


class _Filled(ast.NodeTransformer):
    """In new code, the name `_` stands for the old expression."""

    def __init__(self, old: ast.AST) -> None:
        self._old = old

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self._old) if node.id == "_" else node


KINDS: dict[str, tuple[int, Callable[[Place, str], None]]] = {
    "drop": (STATEMENT, _drop),  # a statement is left out
    "unwrap": (STATEMENT, _unwrap),  # of a lock, a condition, a loop only the body stays
    "late": (STATEMENT, _late),  # a statement comes behind the next one
    "before": (STATEMENT, _before),  # new code comes before a statement
    "after": (STATEMENT, _after),
    "replace": (STATEMENT, _replace),  # new code comes instead of a statement
    "never": (CONDITION, _never),
    "always": (CONDITION, _always),
    "omit": (MEMBER, _omit),  # one of several conditions, arguments or elements is left out
    "put": (EXPRESSION, _put),  # another expression instead of one
}
