"""Counts boxes (folders, flat modules), arrows, floors (longest chains of imports), cycles; --svg draws them."""

import argparse
import ast
import html
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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


def cycles(graph: Graph) -> list[list[str]]:
    """Groups in which each is reached from each, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def floors(graph: Graph) -> dict[str, int]:
    """The floor of each, from 1; those of a cycle share one."""
    together = {name: group[0] for group in cycles(graph) for name in group}
    known: dict[str, int] = {}

    def floor(name: str) -> int:
        group = [other for other in graph if together.get(other, other) == together.get(name, name)]
        if group[0] not in known:
            below = {target for other in group for target in graph[other] if target not in group and target in graph}
            level = 1 + max((floor(target) for target in below), default=0)
            known.update(dict.fromkeys(group, level))
        return known[name]

    return {name: floor(name) for name in graph}


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
            f"{package}: {len(graph)} modules, {max(floors(graph).values())} floors, {len(cycles(graph))} cycles; "
            f"{len(drawn)} boxes, {sum(map(len, drawn.values()))} arrows, {max(floors(drawn).values())} floors, "
            f"{len(cycles(drawn))} cycles; most files in a folder: {folders[most]} ({most})"
        )
        lines += [f"  cycle: {' · '.join(group)}" for group in (*cycles(graph), *cycles(drawn))]
    outside = {path: n for path, n in statements_of_sql(root).items() if "/index/sqlite/" not in path}
    paths = [path for package in PACKAGES for path in modules(root, package).values()]
    times = waits({str(path): ast.parse(path.read_text(encoding="utf-8")) for path in paths})
    lines.append(f"Times that are numbers of their own: {sum(map(len, times.values()))} in {len(times)} files")
    mlx = [path for path in importers_of_mlx(root) if not re.match(r"inference_svc/(engine|model|kv)/", path)]
    lines.append(f"SQL outside index/sqlite: {sum(outside.values())} statements in {len(outside)} files")
    lines += [f"  {path}: {count}" for path, count in outside.items()]
    lines.append(f"MLX outside engine/, model/, kv/: {len(mlx)} files")
    lines += [f"  {path}" for path in mlx]
    return "\n".join(lines)


def picture(root: Path, package: str) -> str:
    """The boxes of a package on their floors, as SVG: an arrow goes from who imports to what is imported."""
    graph = boxes(module_graph(root, package))
    level = floors(graph)
    width, height, gap = 168, 34, 60
    rows = [sorted(name for name in graph if level[name] == floor) for floor in range(max(level.values()), 0, -1)]
    wide = max(map(len, rows)) * (width + 24) + 24
    place = {
        name: (24 + (wide - 24 - len(row) * (width + 24)) / 2 + column * (width + 24), 24 + number * (height + gap))
        for number, row in enumerate(rows)
        for column, name in enumerate(row)
    }
    arrows = [
        f'<path d="M{place[a][0] + width / 2:.0f},{place[a][1] + height} '
        f"C{place[a][0] + width / 2:.0f},{place[a][1] + height + gap / 2} "
        f'{place[b][0] + width / 2:.0f},{place[b][1] - gap / 2} {place[b][0] + width / 2:.0f},{place[b][1]}" '
        'fill="none" stroke="#8aa" stroke-width="1" marker-end="url(#tip)"/>'
        for a in graph
        for b in sorted(graph[a])
    ]
    names = [
        f'<rect x="{x:.0f}" y="{y}" width="{width}" height="{height}" rx="5" fill="#eef4f4" stroke="#355"/>'
        f'<text x="{x + width / 2:.0f}" y="{y + 22}" text-anchor="middle">{html.escape(name.split(".")[-1])}</text>'
        for name, (x, y) in place.items()
    ]
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 8,4 0,8z" fill="#577"/></marker>'
    )
    size = f'width="{wide:.0f}" height="{24 + len(rows) * (height + gap)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">'
    return "\n".join([head, f"<defs>{tip}</defs>", *arrows, *names, "</svg>", ""])


def main() -> None:
    """Prints the numbers; with --svg also writes one package's picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent, help="a checkout")
    parser.add_argument("--svg", type=Path, help="write the picture of --package here")
    parser.add_argument("--package", choices=list(PACKAGES), default="inference_svc")
    given = parser.parse_args()
    print(report(given.root))
    if given.svg:
        given.svg.write_text(picture(given.root, given.package), encoding="utf-8")


if __name__ == "__main__":
    main()
