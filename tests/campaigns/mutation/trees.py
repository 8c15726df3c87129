"""Copies of the tree in which the code is broken, and commands that run in them."""

import ast
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.campaigns.mutation.mutant import ROOT, Mutant

_COPIED = ("cachestore_svc", "inference_svc", "clients", "compose", "proto", "tests", "tools", "pyproject.toml")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# That a test fails is enough to know here; the smallest example of it takes minutes.
_NO_SHRINKING = """
from hypothesis import Phase, settings
settings.register_profile("no shrinking", phases=[Phase.explicit, Phase.generate], deadline=None)
settings.load_profile("no shrinking")
"""


def copy_tree(target: Path, source: Path = ROOT) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    target.mkdir(parents=True)
    for name in _COPIED:
        path = source / name
        (shutil.copytree(path, target / name, ignore=ignored) if path.is_dir() else shutil.copy(path, target))


def do_not_shrink(copy: Path) -> None:
    """In every folder that loads a profile of its own."""
    for path in (copy / "tests").rglob("conftest.py"):
        if "load_profile" in (source := path.read_text()):
            path.write_text(source + _NO_SHRINKING)


def digest_of(copy: Path) -> str:
    """Of what decides how a run ends: the code, its tests and the model. Tables are no part of it."""
    hasher = hashlib.sha256()
    for path in sorted(path for path in copy.rglob("*") if path.is_file() and path.suffix not in {".md", ".pyc"}):
        hasher.update(str(path.relative_to(copy)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return hasher.hexdigest()


@contextlib.contextmanager
def broken(mutant: Mutant, package: Path) -> Iterator[None]:
    """The mutant's fault is in the package, and gone afterwards. Raises VoidMutant."""
    path = mutant.path_in(package)
    source = path.read_text()
    path.write_text(ast.unparse(mutant.applied_to(source)))
    try:
        yield
    finally:
        path.write_text(source)


def run_in(copy: Path, command: Sequence[str], timeout_s: float, more: Mapping[str, str] | None = None) -> "Ran":
    """Run it with the copy's code. A command that does not end takes the processes that it started along."""
    path = f"{copy}{os.pathsep}{copy / 'clients/python'}"
    environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": path, **(more or {})}
    with subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
    return Ran(command, process.returncode, out, err)


Ran = subprocess.CompletedProcess[str]
