"""The emulated kernels read and write nothing but their arguments: an address sanitizer looks on. A campaign."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulation.emulator import cxx
from tests.inference.kv.attention.emulators import needs_compiler

pytestmark = [needs_compiler, pytest.mark.campaign]

ROOT = Path(__file__).parents[5]
STRAY = """
import mlx.core as mx
from inference_svc.kv.attention.kernels import Dialect
from tests.inference.kv.attention.emulators import attention
from tests.inference.kv.attention.scenes import Scene, page_format
scene = Scene(page_format("q4", 1, 64), (300,), 8, dtype=mx.{dtype})
scene.block_table = mx.array([[0, scene.pages.shape[0]]], mx.int32)
mx.eval(attention(scene, Dialect.{dialect}))
"""


def sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python so that every allocation has guarded surroundings. C++'s library comes with the sanitizer: one that a
    module loads later would throw where the sanitizer knows no way on.
    """
    names = ("libasan.so", "libstdc++.so.6")
    found = [
        subprocess.run([cxx(), f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in names
    ]
    environment = os.environ | {"LD_PRELOAD": ":".join(found), "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )


def test_every_scene_stays_within_its_arguments() -> None:
    run = sanitized(
        "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not campaign", str(Path(__file__).parents[1])
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


@pytest.mark.parametrize(("dtype", "dialect"), [("bfloat16", "CUDA"), ("float32", "METAL")])
def test_a_page_that_is_not_there_is_noticed(dtype: str, dialect: str) -> None:
    run = sanitized("-c", STRAY.format(dtype=dtype, dialect=dialect))
    assert run.returncode != 0
    assert "heap-buffer-overflow" in run.stderr
