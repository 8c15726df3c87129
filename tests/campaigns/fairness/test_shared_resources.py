"""The table of shared resources is the code's: every cap has its value, every counter and queue its row."""

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns.fairness.shared_resources import OWN, SHARED
from tests.campaigns.fairness.shared_table import Shared, markdown
from tests.source_trees import modules, nodes

ROOT = Path(__file__).parents[3]
PACKAGES = ("inference_svc/", "cachestore_svc/", "clients/python/kvasir/", "clients/python/kvasir_gateway/")
# What a caller could fill or use up, by the name of what makes it. A thread pool is behind one of these.
MAKERS = {
    "Shares",
    "SharedRoom",
    "RoundRobin",
    "Semaphore",
    "BoundedSemaphore",
    "Queue",
    "SimpleQueue",
    "LifoQueue",
    "PriorityQueue",
}


def value_of(name: str) -> object:
    """What "module:attribute" is; of a settings class, the field's default."""
    module, _, path = name.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        fields = getattr(found, "__dataclass_fields__", None)
        found = fields[part].default if isinstance(fields, dict) and part in fields else getattr(found, part)
    return found


def sources() -> list[tuple[str, ast.Module]]:
    return [(path, tree) for path, tree in modules().items() if path.startswith(PACKAGES)]


@functools.cache
def reasons() -> frozenset[str]:
    """Every text of capitals alone in the sources."""
    constants = (node for _, tree in sources() for node in nodes(tree)[ast.Constant])
    return frozenset(node.value for node in constants if isinstance(node.value, str) and node.value.isupper())


def sites(path: str, tree: ast.Module) -> Iterator[str]:
    """Where the file makes something that can be full: the name that it gets, or else the function that makes it."""
    if not any(_name(call.func) in MAKERS for call in nodes(tree)[ast.Call]):
        return
    kinds = (ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in (node for kind in kinds for node in nodes(tree)[kind]):
        made = {maker for maker in ast.walk(node) if isinstance(maker, ast.Call) and _name(maker.func) in MAKERS}
        if not made:
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield f"{path}: {_name(target)}"
        else:
            assigned = {
                call
                for each in ast.walk(node)
                if isinstance(each, ast.Assign | ast.AnnAssign)
                for call in ast.walk(each)
            }
            if made - assigned:
                yield f"{path}: {node.name}"


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("row", SHARED, ids=lambda row: row.resource)
def test_a_row_names_a_limit_that_has_the_value_it_says(row: Shared) -> None:
    name, value = row.cap
    path, attribute = row.site.split(": ")
    if name:
        assert value_of(name) == value
    else:
        assert re.search(rf"\b{attribute} = \w+\({value}\)", (ROOT / path).read_text())


@pytest.mark.parametrize("row", SHARED, ids=lambda row: row.resource)
def test_a_row_names_where_it_is_counted_and_a_reason_that_is_raised(row: Shared) -> None:
    path, attribute = row.site.split(": ")
    assert re.search(rf"\b{attribute}\b", (ROOT / path).read_text())
    if row.told.isupper():
        assert {*row.told.split(", ")} <= reasons()


def test_whatever_callers_could_fill_has_a_row() -> None:
    """A new Shares, SharedRoom, queue or semaphore is shared by somebody: say by whom, or why by nobody."""
    found = {site for path, tree in sources() for site in sites(path, tree)}
    told = {row.site for row in SHARED} | {row.site for row in OWN}
    assert found - told == set()


def test_no_row_is_about_what_is_gone() -> None:
    gone = [row.site for row in (*SHARED, *OWN) if not (ROOT / row.site.split(": ")[0]).is_file()]
    assert gone == []
    assert len({row.resource for row in SHARED}) == len(SHARED)


def test_a_new_queue_is_seen_however_it_is_made() -> None:
    source = "\n".join(
        [
            "import queue, asyncio",
            "class A:",
            "    def __init__(self):",
            "        self.one: Shares = Shares(3)",
            "        self.two = [asyncio.Semaphore(2)]",
            "def three():",
            "    return use(queue.SimpleQueue())",
        ]
    )
    assert set(sites("f.py", ast.parse(source))) == {"f.py: one", "f.py: two", "f.py: three"}


def test_people_are_shown_the_same_table() -> None:
    """`python -m tests.campaigns.fairness.shared_resources` prints it."""
    assert markdown(SHARED) in (ROOT / "clients/python/kvasir/server/SHARED.md").read_text()
