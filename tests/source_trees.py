"""The syntax trees of all modules that are not generated, parsed once in a process, and the names that they have."""

import ast
import gc
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tools.draw_house import (
    PACKAGES,
)

ROOT = Path(__file__).parent.parent


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of ours that is not generated, by its path from the root."""
    found: dict[str, ast.Module] = {}
    gc.disable()  # two thirds of the time would go into looking for garbage among nodes that stay
    try:
        for package in PACKAGES:
            for path in sorted((ROOT / package).rglob("*.py")):
                if "_pb2" not in path.name:
                    found[path.relative_to(ROOT).as_posix()] = ast.parse(path.read_text(), str(path))
    finally:
        gc.enable()
        gc.freeze()
    return found


@cache
def nodes(tree: ast.Module) -> dict[type[ast.AST], list[Any]]:
    """A module's nodes by their kinds: most tests look at a few kinds, and a walk takes as long as the parser."""
    found = defaultdict[type[ast.AST], list[Any]](list)
    todo: list[ast.AST] = [tree]
    while todo:  # as ast.walk, whose generators take half of the time
        node = todo.pop()
        found[type(node)].append(node)
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, ast.AST):
                todo.append(value)
            elif isinstance(value, list):
                todo += [each for each in value if isinstance(each, ast.AST)]
    return found


@cache
def imported(tree: ast.Module) -> list[tuple[int, str]]:
    return list(_imported(tree))


def _imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name that a module imports anywhere: `import a.b`, `from a import b` as a.b, importlib with a literal."""
    found = nodes(tree)
    for node in found[ast.Import]:
        yield from ((node.lineno, alias.name) for alias in node.names)
    for node in found[ast.ImportFrom]:
        assert node.level == 0, f"line {node.lineno}: relative import; the walls read absolute ones"
        yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
    for node in found[ast.Call]:
        if _dotted(node.func) in ("importlib.import_module", "__import__"):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def touched(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every dotted name that is read, with `from x import y` names spelled in full."""
    names, found = _imported_names(tree), nodes(tree)
    for node in (*found[ast.Attribute], *found[ast.Name]):
        if name := _dotted(node):
            yield node.lineno, _in_full(name, names)


def called(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Like `touched`, of what is called: `clock: Clock = time.monotonic` passes a clock in and calls nothing."""
    names = _imported_names(tree)
    for node in nodes(tree)[ast.Call]:
        if name := _dotted(node.func):
            yield node.lineno, _in_full(name, names)


def _imported_names(tree: ast.Module) -> dict[str, str]:
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes(tree)[ast.ImportFrom]
        for alias in node.names
    }


def _in_full(name: str, names: dict[str, str]) -> str:
    first, dot, rest = name.partition(".")
    return names.get(first, first) + dot + rest


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def class_names(trees: dict[str, ast.Module], package: str) -> dict[str, list[str]]:
    """Files of a package by the name of each class that they define at their top level, private ones included."""
    files: dict[str, list[str]] = {}
    for path, tree in trees.items():
        if path.startswith(f"{package}/"):
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    files.setdefault(node.name, []).append(path)
    return files
