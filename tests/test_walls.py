"""The walls of the house: who may import what, kept by reading every module's imports with `ast`.

A row says what is walled in, who may hold it, and why. Lazy imports and those under TYPE_CHECKING count too.
"""

import ast
import fnmatch
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError
from pathlib import Path

import pytest

from tests.source_trees import called, class_names, imported, modules, nodes, touched
from tools.draw_house import (
    BENCH,
    GATEWAY,
    ORCHESTRATOR,
    PACKAGES,
    SDK,
    boxes,
    files_per_folder,
    floors,
    module_graph,
    statements_of_sql,
    waits,
)

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Wall:
    """Names at or below one of `names` may appear in the files of `inside` only, those of `but_not` left out."""

    names: tuple[str, ...]
    inside: tuple[str, ...]
    reason: str
    but_not: tuple[str, ...] = ()

    def covers(self, path: str) -> bool:
        return not matches(path, self.inside) or matches(path, self.but_not)


IMPORTS = (
    Wall(
        ("mlx", "mlx_lm"),
        (
            "inference_svc/engine/*",
            "inference_svc/model/*",
            "inference_svc/kv/*",
            f"{BENCH}/attention/*",
            f"{BENCH}/engine/*",
            f"{BENCH}/played/*",
            f"{BENCH}/synthetic/*",
            f"{SDK}/store_for_mlx_lm/fitting.py",
            f"{SDK}/store_for_mlx_lm/server.py",
            f"{SDK}/store_for_mlx_lm/stored_caches.py",
        ),
        "streams belong to the MLX thread; everything else, the scheduling too, must be testable without MLX",
        but_not=("inference_svc/engine/scheduling/*",),
    ),
    Wall(("vllm",), (f"{SDK}/store_for_vllm/connector.py",), "vLLM alone loads the connector"),
    Wall(("sqlite3", "sqlite_utils"), ("cachestore_svc/index/sqlite/*",), "one connection owns the database"),
    Wall(
        ("cachestore_svc.index.sqlite",),
        (
            "cachestore_svc/index/sqlite/*",
            "cachestore_svc/index/postgres/*",
            "cachestore_svc/index/catalog.py",
            "cachestore_svc/recovery/*",
        ),
        "the store speaks to the catalog by index/catalog.py, and knows no table",
    ),
    Wall(("psycopg",), ("cachestore_svc/index/postgres/*",), "few have its driver"),
    Wall(
        ("cachestore_svc.blobs.local_directory",),
        ("cachestore_svc/recovery/medium.py", "cachestore_svc/blobs/bucket/bucket_blobs.py"),
        "the store speaks to the port blobs/backend.py; paths and descriptors stay below it",
    ),
    Wall(("obstore",), ("cachestore_svc/blobs/bucket/bucket.py",), "an extra, and each effect has one method"),
    Wall(
        ("grpc", "grpc_status", "grpc_health", "grpc_reflection", "kvasir.*_pb2_grpc", "google.rpc"),
        (
            "*/edge/*service.py",
            "*/__main__.py",
            "inference_svc/serving.py",
            f"{SDK}/clients/*",
            f"{SDK}/server/*",
            f"{SDK}/status.py",
            f"{SDK}/cli/running/health.py",
        ),
        "the wire is an edge; what is behind it must work without it",
    ),
    Wall(
        ("kvasir.cachestore.v1.cachestore_pb2", "kvasir.inference.v1.inference_pb2"),
        (
            "*/edge/*",
            "inference_svc/memory/store/answers.py",
            "inference_svc/memory/store/agents.py",
            "inference_svc/memory/store/blobs.py",
            "inference_svc/memory/store/events.py",
            "inference_svc/memory/store/leases.py",
            f"{SDK}/clients/*",
            f"{SDK}/formats/frame*.py",
            f"{SDK}/cli/*",
            f"{GATEWAY}/*",
            f"{ORCHESTRATOR}/engine_memory.py",
        ),
        "requests and responses stay at the edge; identity and manifest are plain data",
    ),
    Wall(
        ("prometheus_client",),
        ("*/edge/metrics.py", f"{GATEWAY}/metrics.py", f"{SDK}/server/operating/operator_page.py"),
        "numbers are counted in plain data and shown in one place",
    ),
    Wall(
        ("smg_grpc_proto",),
        ("inference_svc/edge/neighbour/*",),
        "not everybody has the neighbour's package, and its messages end there",
    ),
    Wall(("starlette", "uvicorn"), (f"{GATEWAY}/*",), "HTTP is the gateway's, and ends there"),
    Wall(("kvasir_gateway",), (f"{GATEWAY}/*", f"{BENCH}/fleet/*"), "an extra; its placement alone is simulated"),
    Wall(
        ("jinja2",),
        (
            f"{GATEWAY}/*",
            f"{ORCHESTRATOR}/report/*",
            f"{BENCH}/prove/page.py",
            "inference_svc/text/templates/template_names.py",
        ),
        "pages are the gateway's, a report's and a proof's; of a chat template one place reads what it asks for",
    ),
    Wall(
        ("kvasir_orchestrator",),
        (f"{ORCHESTRATOR}/*", f"{SDK}/cli/scenarios/*", f"{BENCH}/scenarios/*"),
        "an extra: who does not run scenarios need not have it",
    ),
    Wall(("yaml",), (f"{ORCHESTRATOR}/yaml_lines.py",), "a file's lines are known where it is read, and nowhere else"),
    Wall(
        ("bm25s",),
        (f"{BENCH}/scenarios/retrieval.py",),
        "retrieval is only measured",
    ),
    Wall(("httpx2",), (f"{BENCH}/load/http.py",), "a client over HTTP is measured with, and nothing else needs one"),
    Wall(("spake2",), ("cachestore_svc/pairing/exchange.py",), "a code is used in one place, which is read as a whole"),
    Wall(("zeroconf",), ("cachestore_svc/pairing/finding.py",), "an extra, and what the network says is not trusted"),
    Wall(("cachestore_svc",), ("cachestore_svc/*",), "the services never import each other, and nobody imports them"),
    Wall(
        ("inference_svc",),
        (
            "inference_svc/*",
            *(f"{BENCH}/{room}/*" for room in ("attention", "engine", "played", "quality", "synthetic")),
            f"{BENCH}/fleet/naps.py",  # simulates with the engine's own policy
        ),
        "the services never import each other, and nobody imports them but what measures the engine from within",
    ),
    Wall(("kvasir_bench",), (f"{BENCH}/*", f"{SDK}/cli/main.py"), "an extra: what serves is not what measures"),
    Wall(
        ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"),
        (),
        "a pickle is code from whoever wrote it",
    ),
    Wall(("tools", "tests"), (), "they are no part of what is installed"),
    Wall(("typer", "click", "rich"), (f"{SDK}/cli/*", f"{BENCH}/*"), "a client of the SDK needs no command line"),
    Wall(
        ("numpy", "torch"),
        (
            "inference_svc/*",
            *(f"{BENCH}/{room}/*" for room in ("engine", "fleet", "played")),
            *(f"{SDK}/store_for_vllm/{name}.py" for name in ("connector", "worker")),
        ),
        "the store never computes on tensors, and the SDK is light",
    ),
)

# What a module does, seen as the dotted name of an attribute or a call.
ENVIRONMENT = Wall(
    ("os.environ", "os.getenv", "os.putenv", "os.environb"),
    (
        "inference_svc/model/blas.py",  # MKL's threads cannot be told otherwise,
        "inference_svc/model/device_memory.py",  # nor can MLX and transformers
        "inference_svc/__init__.py",
        "inference_svc/compiled_code.py",
        f"{SDK}/__init__.py",  # nor can gRPC, of its resolver
        f"{SDK}/options/finding.py",
    ),
    "the environment is read where the values of options are found",
)
CLOCKS = ("time.time", "time.time_ns", "time.monotonic", "time.monotonic_ns", "time.perf_counter", "time.sleep")
CHANCE = (
    "random.*",
    "secrets.token_*",
    "uuid.uuid1",
    "uuid.uuid4",
    "os.urandom",
    "datetime.now",
    "datetime.datetime.now",
)
CALLS = Wall(
    (*CLOCKS, *CHANCE),
    (
        "*/__main__.py",
        "inference_svc/serving.py",
        "*/edge/service.py",
        "inference_svc/__init__.py",  # when the process began, before all imports
        "inference_svc/model/quality/material.py",  # seeded: every model is given the same
        f"{SDK}/clients/*",
        f"{SDK}/cli/*",
        f"{BENCH}/*",
    ),
    "clock and randomness are passed in, so that a test can hold them",
)

FORKS = Wall(
    ("os.fork", "os.forkpty", "pty.fork", "multiprocessing.*", "concurrent.futures.ProcessPoolExecutor"),
    (),
    "a fork beside gRPC's threads cuts calls of the parent and ends children by signals",
)


def matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


@cache
def names_match(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


def breaches(wall: Wall, trees: dict[str, ast.Module], read: object) -> list[str]:
    return [
        f"{path}:{line} has {name}: {wall.reason}"
        for path, tree in trees.items()
        if wall.covers(path)
        for line, name in read(tree)  # type: ignore[operator]
        if names_match(name, wall.names)
    ]


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return modules()


@pytest.mark.parametrize("wall", IMPORTS, ids=lambda wall: wall.names[0])
def test_an_import_stays_behind_its_wall(wall: Wall, trees: dict[str, ast.Module]) -> None:
    assert breaches(wall, trees, imported) == []


def test_only_configuration_reads_the_environment(trees: dict[str, ast.Module]) -> None:
    assert breaches(ENVIRONMENT, trees, touched) == []


def test_clock_and_randomness_are_passed_in(trees: dict[str, ast.Module]) -> None:
    assert breaches(CALLS, trees, called) == []


def test_nothing_raises_out_of_an_except_star(trees: dict[str, ast.Module]) -> None:
    """Before Python 3.11.4 it wraps even a single error in a group, which nobody catches."""
    assert [path for path, tree in trees.items() if ast.TryStar in nodes(tree)] == []


def test_no_process_forks(trees: dict[str, ast.Module]) -> None:
    assert breaches(FORKS, trees, called) == []
    # `subprocess` forks for this alone; else the parent rests until the child's `exec`.
    words = [(path, word) for path, tree in trees.items() for word in nodes(tree)[ast.keyword]]
    assert [path for path, word in words if word.arg == "preexec_fn"] == []


@pytest.mark.parametrize(
    ("path", "source", "caught_by"),
    [
        ("inference_svc/engine/scheduling/scheduler.py", "def f():\n    import mlx.core as mx", "mlx"),
        (
            "inference_svc/engine/scheduling/scheduler.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mlx_lm",
            "mlx",
        ),
        ("cachestore_svc/store/store.py", "import sqlite3", "sqlite3"),
        ("cachestore_svc/store/store.py", "from sqlite_utils import Database", "sqlite3"),
        (
            "cachestore_svc/store/store.py",
            "from cachestore_svc.index.sqlite import rows",
            "cachestore_svc.index.sqlite",
        ),
        ("cachestore_svc/store/store.py", "import grpc.aio", "grpc"),
        ("cachestore_svc/store/store.py", "from kvasir.cachestore.v1 import cachestore_pb2_grpc", "grpc"),
        (
            "inference_svc/engine/engine.py",
            "from kvasir.inference.v1 import inference_pb2",
            "kvasir.cachestore.v1.cachestore_pb2",
        ),
        (
            "inference_svc/engine/engine.py",
            "import importlib\nimportlib.import_module('cachestore_svc.store.store')",
            "cachestore_svc",
        ),
        (f"{SDK}/cli/up.py", "from inference_svc import engine", "inference_svc"),
        (f"{SDK}/clients/store_client.py", "import pickle", "pickle"),
        (f"{SDK}/clients/store_client.py", "from rich.table import Table", "typer"),
        ("cachestore_svc/blobs/local_directory.py", "import numpy as np", "numpy"),
    ],
)
def test_a_planted_import_is_caught(path: str, source: str, caught_by: str) -> None:
    wall = next(wall for wall in IMPORTS if wall.names[0] == caught_by)
    assert breaches(wall, {path: ast.parse(source)}, imported)


@pytest.mark.parametrize(
    ("wall", "read", "source"),
    [
        (ENVIRONMENT, touched, "import os\nx = os.environ.get('HOME')"),
        (ENVIRONMENT, touched, "from os import environ\nx = environ['HOME']"),
        (CALLS, called, "import time\ndef f():\n    return time.time()"),
        (CALLS, called, "from time import monotonic\nx = monotonic()"),
        (CALLS, called, "import secrets\nx = secrets.token_hex(8)"),
        (CALLS, called, "import random\nx = random.Random().random()"),
        (CALLS, called, "from datetime import datetime, UTC\nx = datetime.now(UTC)"),
        (FORKS, called, "from os import fork\nif not fork(): pass"),
        (FORKS, called, "import multiprocessing\nx = multiprocessing.get_context('fork')"),
    ],
)
def test_a_planted_use_is_caught(wall: Wall, read: object, source: str) -> None:
    assert breaches(wall, {"cachestore_svc/store/store.py": ast.parse(source)}, read)


def test_a_clock_given_as_a_default_is_no_breach() -> None:
    source = "import time\ndef f(clock=time.monotonic):\n    return clock()"
    assert breaches(CALLS, {"cachestore_svc/index/sqlite/rights/leases.py": ast.parse(source)}, called) == []


@pytest.mark.parametrize("wall", [*IMPORTS, ENVIRONMENT, CALLS], ids=lambda wall: wall.names[0])
def test_no_door_stands_open_that_nobody_uses(wall: Wall, trees: dict[str, ast.Module]) -> None:
    read = {ENVIRONMENT: touched, CALLS: called}.get(wall, imported)
    unused = [
        door
        for door in wall.inside
        if not any(
            names_match(name, wall.names)
            for path, tree in trees.items()
            if matches(path, [door])
            for _, name in read(tree)
        )
    ]
    assert unused == []


def test_every_module_opens_with_a_sentence(trees: dict[str, ast.Module]) -> None:
    opening = {path: ast.get_docstring(tree) for path, tree in trees.items()}
    for path in (ROOT / "tests").rglob("*.py"):
        if text := path.read_text().strip():
            docstring = re.match(r'"""(.*?)"""', text, re.DOTALL)
            opening[path.relative_to(ROOT).as_posix()] = docstring and docstring[1]
    without = [path for path, docstring in opening.items() if not _opens_with_sentence(docstring)]
    assert without == []


def _opens_with_sentence(docstring: str | None) -> bool:
    first_paragraph = (docstring or "").split("\n\n")[0].strip()
    return bool(re.match(r"\S.*[.:]", first_paragraph, re.DOTALL)) and first_paragraph[-1] in ".:"


@cache
def graph_of(package: str) -> dict[str, set[str]]:
    return module_graph(ROOT, package, lambda path: modules()[path.relative_to(ROOT).as_posix()])


# Which rooms a room may import: the arrows between folders, and none that is not here.
ROOMS = {
    "inference_svc": {
        "edge": "served_model handover turns memory engine model formats text",
        "handover": "turns memory engine model",
        "turns": "memory engine model text",
        "memory": "engine model text",
        "engine": "model formats kv text",
        "model": "formats kv text",
        "formats": "",
        "kv": "",
        "text": "",
    },
    "cachestore_svc": {
        "commands": "store edge pairing recovery sealing facts config",
        "edge": "store moving pairing index config facts",
        "moving": "store pairing index facts",
        "store": "upkeep recovery core pairing index sealing blobs facts",
        "pairing": "config facts",
        "upkeep": "recovery core index journal blobs facts",
        "recovery": "core index journal sealing blobs facts",
        "core": "index journal sealing blobs facts",
        "index": "journal sealing blobs facts",
        "sealing": "blobs",
        "journal": "blobs",
        "blobs": "facts",
        "facts": "",
    },
    SDK: {
        "cli": "address clients credentials errors expires_after formats names on_full options syncing volatile waits",
        "clients": "address call_context certificates errors formats status syncing waits",
        "server": "address call_context certificates credentials errors formats status waits",
        "formats": "errors names",
        "options": "address credentials errors expires_after volatile",
        "on_full": "errors",
        "volatile": "errors",
        "expires_after": "errors",
    },
    GATEWAY: {},
    ORCHESTRATOR: {
        "report": "memory model outcomes plan scenario",
    },
    BENCH: {
        "prove": "attention engine memory_path pictures program system tables",
        "commands": "arithmetic attention engine fleet load memory_path paper pictures program quality scenarios store "
        "system tables",
        "paper": "arithmetic pictures tables",
        "scenarios": "arithmetic pictures tables",
        "memory_path": "arithmetic pictures program tables wire",
        "load": "arithmetic pictures program tables",
        "fleet": "pictures tables",
        "quality": "pictures program tables",
        "attention": "arithmetic program tables",
        "store": "arithmetic tables wire",
        "engine": "arithmetic pictures program system tables",
        "played": "synthetic",
        "synthetic": "program",
    },
}


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_the_rooms_below_them(package: str) -> None:
    name = PACKAGES[package]
    # The package's own `__init__` imports nothing: any room may have its version from it.
    graph = {room: below - {name} for room, below in boxes(graph_of(package)).items()}
    allowed = {
        f"{name}.{room}": {f"{name}.{other}" for other in below.split()} for room, below in ROOMS[package].items()
    }
    assert {room: graph[room] - below for room, below in allowed.items() if graph[room] - below} == {}
    assert {room: below - graph[room] for room, below in allowed.items() if below - graph[room]} == {}, "no such arrow"


@pytest.mark.parametrize("package", ROOMS)
def test_nothing_imports_in_a_circle(package: str) -> None:
    graph = graph_of(package)
    floors(graph)
    floors(boxes(graph))


def test_a_planted_circle_is_seen() -> None:
    with pytest.raises(CycleError):
        floors({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})


@pytest.mark.parametrize("package", ROOMS)
def test_a_folder_holds_no_more_files_than_one_sees_at_a_glance(package: str) -> None:
    assert {folder: count for folder, count in files_per_folder(ROOT, package).items() if count > 14} == {}


def test_nor_does_a_folder_of_tests() -> None:
    counts = Counter(file.parent.relative_to(ROOT) for file in (ROOT / "tests").rglob("*.py"))
    assert {folder: count for folder, count in counts.items() if count > 14} == {}


# The longest chain of imports between rooms may become shorter, not longer.
FLOORS = {"inference_svc": 9, "cachestore_svc": 12, SDK: 7, GATEWAY: 8, ORCHESTRATOR: 10, BENCH: 3}


@pytest.mark.parametrize("package", ROOMS)
def test_no_package_grows_a_floor(package: str) -> None:
    assert max(floors(boxes(graph_of(package))).values()) <= FLOORS[package]


def functions_of(trees: dict[str, ast.Module]) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    found = [
        (path, node)
        for path, tree in trees.items()
        for node in (*nodes(tree)[ast.FunctionDef], *nodes(tree)[ast.AsyncFunctionDef])
    ]
    return {f"{path}:{node.lineno} {node.name}": node for path, node in found}


def test_a_function_is_seen_at_a_glance(trees: dict[str, ast.Module]) -> None:
    sizes = {name: node.end_lineno - node.lineno + 1 for name, node in functions_of(trees).items() if node.end_lineno}
    long = {name: lines for name, lines in sizes.items() if lines > 50}
    assert len(long) <= 4, long


def test_a_function_takes_few_parameters(trees: dict[str, ast.Module]) -> None:
    lists = {name: [*node.args.args, *node.args.kwonlyargs] for name, node in functions_of(trees).items()}
    sizes = {name: sum(each.arg not in ("self", "cls") for each in given) for name, given in lists.items()}
    assert {name: size for name, size in sizes.items() if size > 7} == {}


def test_a_record_has_few_fields(trees: dict[str, ast.Module]) -> None:
    sizes = {
        f"{path} {node.name}": sum(isinstance(each, ast.AnnAssign) for each in node.body)
        for path, tree in trees.items()
        for node in nodes(tree)[ast.ClassDef]
        if any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    }
    assert {name: fields for name, fields in sizes.items() if fields > 14} == {}


def test_no_further_class_has_more_than_ten_public_methods(trees: dict[str, ast.Module]) -> None:
    """Those that have are ports, the calls of a service, and clients of one; and a few that should have fewer."""
    sizes = {
        f"{path} {node.name}": sum(
            isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not each.name.startswith("_")
            for each in node.body
        )
        for path, tree in trees.items()
        for node in nodes(tree)[ast.ClassDef]
    }
    wide = {name: methods for name, methods in sizes.items() if methods > 10}
    assert len(wide) <= 20, wide


def test_pages_for_newcomers_stay_short() -> None:
    words = {page: len((ROOT / page).read_text().split()) for page in ("README.md", "DESIGN.md")}
    assert words["README.md"] <= 900
    assert words["DESIGN.md"] <= 7_000


def test_a_wait_that_others_have_too_is_named_once(trees: dict[str, ast.Module]) -> None:
    """Kinds of waits are in `kvasir.waits`. Few have a number of their own; fewer are better."""
    assert sum(map(len, waits(trees).values())) <= 60


def test_sql_stands_in_the_folders_of_two_databases() -> None:
    assert [
        path for path in statements_of_sql(ROOT) if "/index/sqlite/" not in path and "/index/postgres/" not in path
    ] == []


def shared_names(trees: dict[str, ast.Module], package: str) -> dict[str, list[str]]:
    return {name: paths for name, paths in class_names(trees, package).items() if len(paths) > 1}


@pytest.mark.parametrize("package", ROOMS)
def test_two_classes_of_one_name_do_not_exist(package: str, trees: dict[str, ast.Module]) -> None:
    assert shared_names(trees, package) == {}


def test_a_planted_second_class_of_a_name_is_seen() -> None:
    planted = {
        "inference_svc/engine/engine.py": ast.parse("class _Row:\n    pass"),
        "inference_svc/turns/turn_flow.py": ast.parse("class _Row:\n    pass"),
        "cachestore_svc/store/store.py": ast.parse("class _Row:\n    pass"),
    }
    assert list(shared_names(planted, "inference_svc")) == ["_Row"]
    assert shared_names(planted, "cachestore_svc") == {}
