"""Counts boxes (folders, flat modules), arrows and floors (longest chains of imports): `draw_house.py [CHECKOUT]`."""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

SDK = "clients/python/kvasir"
GATEWAY = "clients/python/kvasir_gateway"
ORCHESTRATOR = "clients/python/kvasir_orchestrator"
BENCH = "clients/python/kvasir_bench"
PACKAGES = {
    "inference_svc": "inference_svc",
    "cachestore_svc": "cachestore_svc",
    SDK: "kvasir",
    GATEWAY: "kvasir_gateway",
    ORCHESTRATOR: "kvasir_orchestrator",
    BENCH: "kvasir_bench",
}
# What begins a statement and not an English sentence.
_SQL = re.compile(
    r"\b(SELECT\s[\s\S]+?\sFROM|INSERT\s+(OR\s+\w+\s+)?INTO|UPDATE\s+\w+\s+SET|DELETE\s+FROM|PRAGMA\s|CREATE\s)"
)

_TIME = re.compile(r"(?<!_PER)_(S|SECONDS|MS|NS|MINUTES|HOURS|DAYS)$")

Graph = Mapping[str, set[str]]


def modules(root: Path, package: str) -> dict[str, Path]:
    """Every module of a package that is not generated, by its dotted name."""
    name = PACKAGES[package]
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        if "_pb2" not in path.name:
            parts = path.relative_to(root / package).with_suffix("").parts
            found[".".join((name, *(part for part in parts if part != "__init__")))] = path
    return found


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module, known: Iterable[str]) -> Iterator[str]:
    """The modules of `known` that a file imports anywhere, under TYPE_CHECKING and inside functions too."""
    known = set(known)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in known or node.module in known:
                    yield whole if whole in known else node.module


def module_graph(root: Path, package: str, tree_of: Callable[[Path], ast.Module] = parsed) -> dict[str, set[str]]:
    """Which module imports which, packages' own `__init__` left out unless something is imported from it."""
    found = modules(root, package)
    return {name: set(imports(tree_of(path), found)) - {name} for name, path in found.items()}


def box_of(module: str) -> str:
    """The first name below the package: a room, or a module that lies flat."""
    return ".".join(module.split(".")[:2])


def boxes(graph: Graph) -> dict[str, set[str]]:
    """The same arrows between boxes."""
    drawn: dict[str, set[str]] = {}
    for module, targets in graph.items():
        box = box_of(module)
        drawn.setdefault(box, set()).update(box_of(target) for target in targets)
        drawn[box].discard(box)
    return drawn


def floors(graph: Graph) -> dict[str, int]:
    """The floor of each, from 1. Raises CycleError, which names those that import each other."""
    found: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        found[name] = 1 + max((found[target] for target in graph.get(name, ())), default=0)
    return found


def files_per_folder(root: Path, package: str) -> dict[str, int]:
    """Modules that lie in each folder, without `__init__` and generated ones."""
    counts: dict[str, int] = {}
    for path in modules(root, package).values():
        if path.name != "__init__.py":
            folder = path.parent.relative_to(root).as_posix()
            counts[folder] = counts.get(folder, 0) + 1
    return counts


def statements_of_sql(root: Path) -> dict[str, int]:
    """String literals that hold SQL, by file; docstrings are prose."""
    counts: dict[str, int] = {}
    for path in modules(root, "cachestore_svc").values():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        count = sum(
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in prose
            and bool(_SQL.search(node.value))
            for node in ast.walk(tree)
        )
        if count:
            counts[path.relative_to(root).as_posix()] = count
    return counts


def waits(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Names of times that are numbers of their own at the top of a module, by file; rates are none."""
    found: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.Assign) and not any(map(_is_no_number, ast.walk(node.value))):
                names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
                if times := [name for name in names if _TIME.search(name)]:
                    found.setdefault(path, []).extend(times)
    return found


def _is_no_number(part: ast.AST) -> bool:
    """Whether it is something else, or follows from another."""
    return isinstance(part, ast.Name | ast.Call | ast.Dict) or isinstance(getattr(part, "value", None), str)


def importers_of_mlx(root: Path) -> list[str]:
    """Files that import MLX or mlx-lm."""
    pattern = re.compile(r"^\s*(from|import)\s+mlx(_lm)?\b", re.MULTILINE)
    return [
        path.relative_to(root).as_posix()
        for package in PACKAGES
        for path in modules(root, package).values()
        if pattern.search(path.read_text(encoding="utf-8"))
    ]


def report(root: Path) -> str:
    lines = []
    for package in PACKAGES:
        graph = module_graph(root, package)
        drawn = boxes(graph)
        folders = files_per_folder(root, package)
        most = max(folders, key=lambda folder: folders[folder])
        lines.append(
            f"{package}: {len(graph)} modules, {max(floors(graph).values())} floors; {len(drawn)} boxes, "
            f"{sum(map(len, drawn.values()))} arrows, {max(floors(drawn).values())} floors; most files in a folder: "
            f"{folders[most]} ({most})"
        )
    sql = statements_of_sql(root)
    outside = {path: count for path, count in sql.items() if not re.search("/index/(sqlite|postgres)/", path)}
    paths = [path for package in PACKAGES for path in modules(root, package).values()]
    times = waits({str(path): ast.parse(path.read_text(encoding="utf-8")) for path in paths})
    lines.append(f"Times that are numbers of their own: {sum(map(len, times.values()))} in {len(times)} files")
    mlx = [path for path in importers_of_mlx(root) if not re.match(r"inference_svc/(engine|model|kv)/", path)]
    lines.append(f"SQL outside index/: {sum(outside.values())} statements in {len(outside)} files")
    lines += [f"  {path}: {count}" for path, count in outside.items()]
    lines.append(f"MLX outside engine/, model/, kv/: {len(mlx)} files")
    lines += [f"  {path}" for path in mlx]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent))
