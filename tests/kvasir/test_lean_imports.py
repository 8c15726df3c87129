"""What programs import before they are of use: each start is a user who waits, and anything may be installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inference_svc.model import kvasir_tiny

# What libraries of ours import where they find it: a second each, and PyTorch far more.
_HEAVY = ("torch", "jax", "tensorflow", "numba", "pandas", "matplotlib", "bm25s")
_TRAP = """
import sys
print("imported:", __name__, file=sys.stderr)
raise AttributeError("a trap")
"""
_IMPORTED = """
import runpy, sys
module, *sys.argv[1:] = sys.argv[1:]
before = set(sys.modules)
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit:
    pass
found = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
print("!", *sorted(name for name in found if not name.startswith("_")))
"""
_LOADS = """
import sys
from pathlib import Path
import inference_svc.serving
from inference_svc.model.loading import load
assert load(Path(sys.argv[1]), None).tokenizer.encode("Hello.")
sys.path.insert(0, sys.argv[2])
import torch
print(torch.here)
"""
_CALLS = {"blake3", "google", "grpc", "grpc_health", "grpc_reflection", "grpc_tools", "kvasir", "safetensors"}
_SHOWS = {"annotated_doc", "click", "markdown_it", "mdurl", "pygments", "rich", "shellingham", "typer"}
_CHECKS = {"annotated_types", "pydantic", "pydantic_core", "typing_inspection"}
_SMALL = {"cython_runtime", "sysconfigdata", "typing_extensions"}
_SERVES = {"prometheus_client", "structlog", "uvloop", "colorama"}  # the last where it is, for structlog
_STORE = {"cachestore_svc", "cryptography", "dateutil", "pluggy", "spake2", "sqlite_fts4", "sqlite_utils"}
_GATEWAY = {"anyio", "h11", "httptools", "jinja2", "kvasir_gateway", "markupsafe", "sniffio", "starlette", "uvicorn"}


@pytest.fixture(scope="module")
def traps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which large packages are installed, and tell when they are imported."""
    folder = tmp_path_factory.mktemp("traps")
    for name in _HEAVY:
        info = folder / f"{name}-9.9.9.dist-info"
        for place in (folder / name, info):
            place.mkdir()
        (folder / name / "__init__.py").write_text(_TRAP)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9.9\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


def _run(env: dict[str, str], *arguments: str) -> str:
    ended = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=120)
    assert "imported:" not in ended.stderr, ended.stderr
    return ended.stdout


@pytest.mark.long(6)
@pytest.mark.parametrize(
    ("module", "words", "allowed"),
    [
        ("kvasir", ("--help",), _CALLS | _SHOWS | _CHECKS | {"kvasir_bench"}),
        ("kvasir", ("--home", "/nowhere", "agents", "ls"), _CALLS | _SHOWS | _CHECKS | {"kvasir_bench"}),
        ("cachestore_svc", ("--help",), _CALLS | _SHOWS | _CHECKS | _SERVES | _STORE),
        ("kvasir_gateway", ("--help",), _CALLS | _CHECKS | _SERVES | _GATEWAY | {"click"}),
    ],
)
def test_a_program_imports_what_it_needs(
    traps: dict[str, str], module: str, words: tuple[str, ...], allowed: set[str]
) -> None:
    imported = set(_run(traps, "-c", _IMPORTED, module, *words).rpartition("!")[2].split())
    assert "kvasir" in imported
    assert imported <= allowed | _SMALL, imported - allowed - _SMALL


def test_the_sdk_needs_neither_mlx_nor_sql_nor_the_service_extras() -> None:
    program = (
        "import sys, kvasir.clients;"
        "import kvasir.formats.archive, kvasir.formats.seed_file, kvasir.credentials;"
        "print([m for m in ('mlx', 'sqlite3', 'numpy', 'pydantic', 'structlog', 'rich', 'typer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.long(4)
def test_an_engine_loads_its_model_without_pytorch_which_others_find(traps: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("here = True")
    told = _run(traps, "-c", _LOADS, str(kvasir_tiny.path()), str(tmp_path))
    assert "True" in told.splitlines(), told


_BEGINS_SERVICES = """
import asyncio, os, sys

async def begin(*_argv, **_options):
    print([m for m in ("grpc", "kvasir.clients", "kvasir.cli.main", "kvasir_bench") if m in sys.modules], flush=True)
    os._exit(0)

asyncio.create_subprocess_exec = begin
from kvasir.__main__ import main
main()
"""


def test_services_of_up_in_the_background_wait_neither_for_grpc_nor_for_other_commands(tmp_path: Path) -> None:
    words = ("--home", str(tmp_path / "home"), "up", "-d")
    program = [sys.executable, "-X", "resting", "-c", _BEGINS_SERVICES, *words]
    log = tmp_path / "log"
    log.touch()
    done = subprocess.run(program, input=str(log), capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]", log.read_text()
