"""Counts a reader's way along a request's static calls: `python tools/trip.py [--show] [ROOT]`.

The reader enters each function that a call names, once, in the order of the source. Functions of other rooms are
entered and not followed. A stay is a run of functions in one file; a return is a stay in a file that was left before.
The kind of a value follows from annotations and constructors alone, so calls of callbacks end the way there. Standard
library only: it counts any checkout."""

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE, ROOM, START = "inference_svc", "inference_svc.turns", "inference_svc.turns.turn_flow:TurnFlow._serve"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class _Module:
    tree: ast.Module
    names: dict[str, str] = field(default_factory=dict)  # by name here: the module, or "module:name", that it names
    functions: dict[str, Function] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)  # by "Class.attribute": its class


class House:
    """The functions and classes of a package, each as "module:name"."""

    def __init__(self, root: Path) -> None:
        self._modules: dict[str, _Module] = {}
        for path in sorted((root / PACKAGE).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            self._modules[name] = _Module(ast.parse(path.read_text(encoding="utf-8")))
        for name, module in self._modules.items():
            self._read_names(name, module)
        for name, module in self._modules.items():
            for node in _classes(module.tree):
                self._read_attributes(name, node)

    def _read_names(self, name: str, module: _Module) -> None:
        for node in module.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    place = whole if whole in self._modules else f"{node.module}:{alias.name}"
                    module.names[alias.asname or alias.name] = place
            elif isinstance(node, Function | ast.ClassDef):
                module.names[node.name] = f"{name}:{node.name}"
        for prefix, body in (("", module.tree.body), *((f"{each.name}.", each.body) for each in _classes(module.tree))):
            module.functions |= {f"{prefix}{node.name}": node for node in body if isinstance(node, Function)}

    def _read_attributes(self, name: str, class_: ast.ClassDef) -> None:
        """From annotations of the class, and from what its functions assign to `self`."""
        found = self._modules[name].attributes
        for node in class_.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[f"{class_.name}.{node.target.id}"] = self._class_in(name, node.annotation)
            known = self._parameters(name, f"{class_.name}.{node.name}") if isinstance(node, Function) else {}
            for part in ast.walk(node) if isinstance(node, Function) else ():
                target = part.targets[0] if isinstance(part, ast.Assign) else getattr(part, "target", None)
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    kind = self._class_in(name, getattr(part, "annotation", None))
                    kind = kind or self._kind(name, getattr(part, "value", None), known)
                    found[f"{class_.name}.{target.attr}"] = found.get(f"{class_.name}.{target.attr}") or kind

    def _class_in(self, name: str, annotation: ast.AST | None) -> str:
        """The class that an annotation names last: of a mapping or a list, that of its values."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval")
        names = [part.id for part in ast.walk(annotation) if isinstance(part, ast.Name)] if annotation else []
        places = (self._modules[name].names.get(each, "") for each in reversed(names))
        return next((place for place in places if self._is_class(place)), "")

    def _is_class(self, place: str) -> bool:
        module, _, name = place.partition(":")
        return module in self._modules and name in (each.name for each in _classes(self._modules[module].tree))

    def _parameters(self, name: str, function: str) -> dict[str, str]:
        given = self._modules[name].functions[function].args
        known = {each.arg: self._class_in(name, each.annotation) for each in (*given.args, *given.kwonlyargs)}
        own = function.rpartition(".")[0]
        return known | ({"self": f"{name}:{own}"} if own else {})

    def _kind(self, name: str, value: ast.AST | None, known: dict[str, str]) -> str:
        """The class of a value, or the place that a name stands for; empty: not known."""
        match value:
            case ast.Name(each):
                return known.get(each) or self._modules[name].names.get(each, "")
            case ast.Await(inner) | ast.Subscript(inner) | ast.NamedExpr(value=inner):
                return self._kind(name, inner, known)
            case ast.BoolOp(values=several):
                return next((found for each in several if (found := self._kind(name, each, known))), "")
            case ast.IfExp(body=one, orelse=other):
                return self._kind(name, one, known) or self._kind(name, other, known)
            case ast.Attribute(inner, attribute):
                module, _, class_ = self._kind(name, inner, known).partition(":")
                there, key = self._modules.get(module, _Module(ast.Module([], []))), f"{class_}.{attribute}"
                if key in there.functions:
                    return self._class_in(module, there.functions[key].returns)
                return there.attributes.get(key, "")
            case ast.Call(func=called):
                place = self._called(name, called, known)
                module, _, function = place.partition(":")
                if place and not function.endswith("__init__"):
                    return self._class_in(module, self._modules[module].functions[function].returns)
                found_class = self._kind(name, called.value if isinstance(called, ast.Attribute) else called, known)
                return found_class if self._is_class(found_class) else ""
        return ""

    def _called(self, name: str, called: ast.AST, known: dict[str, str]) -> str:
        """The function that a call names; of a class its `__init__`."""
        place = self._kind(name, called, known) if isinstance(called, ast.Name) else ""
        if isinstance(called, ast.Attribute):
            inner = self._kind(name, called.value, known)
            place = f"{inner}.{called.attr}" if ":" in inner else f"{inner}:{called.attr}"
        module, _, function = place.partition(":")
        functions = self._modules[module].functions if module in self._modules else {}
        return next((f"{module}:{each}" for each in (function, f"{function}.__init__") if each in functions), "")

    def calls(self, place: str) -> Iterator[str]:
        name, _, function = place.partition(":")
        known = self._parameters(name, function)
        for node in _in_order(self._modules[name].functions[function]):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                known[node.targets[0].id] = self._kind(name, node.value, known)
            elif isinstance(node, ast.Call) and (found := self._called(name, node.func, known)):
                yield found


def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a function, those inside a part before the part."""
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
        yield child


def trip(root: Path) -> list[tuple[str, list[str]]]:
    """The stays in their order: a module, and the functions that are entered there."""
    house, stays = House(root), list[tuple[str, list[str]]]()

    def enter(place: str) -> None:
        module, _, function = place.partition(":")
        if not stays or stays[-1][0] != module:
            stays.append((module, []))
        stays[-1][1].append(function)
        seen.add(place)
        for each in house.calls(place) if module.rpartition(".")[0] == ROOM else ():
            if each not in seen:
                enter(each)

    seen: set[str] = set()
    enter(START)
    return stays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=Path())
    parser.add_argument("--show", action="store_true", help="print each stay")
    options = parser.parse_args()
    stays = trip(options.root)
    for module, functions in stays if options.show else ():
        print(f"{module.removeprefix(PACKAGE + '.'):36} {', '.join(functions)}")
    files = {module for module, _ in stays}
    print(f"{len(stays)} stays in {len(files)} files, {len(stays) - len(files)} returns")


if __name__ == "__main__":
    main()
