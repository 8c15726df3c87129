"""The BLAS that MLX computes by on a Linux CPU: its threads keep no core while there is nothing to compute."""

import os
import subprocess
import sys

import pytest

from inference_svc import __main__
from tests.inference.kv.greedy import IS_MKL

_REST_S = 0.15
_SPENT_AFTER_A_PRODUCT = f"""
import time
from inference_svc.model.blas import load_optimized_blas
load_optimized_blas()
import mlx.core as mx
mx.set_default_device(mx.cpu)
given = mx.ones((1024, 1024))
mx.eval(given, given @ given)
before_s = time.process_time()
time.sleep({_REST_S})
print(time.process_time() - before_s)
"""


@pytest.mark.skipif(not IS_MKL, reason="only MKL's threads wait so")
def test_a_thread_of_mkl_that_has_nothing_to_do_leaves_its_core() -> None:
    two = {"MKL_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    environment = {name: value for name, value in os.environ.items() if name != "KMP_BLOCKTIME"} | two
    run = [sys.executable, "-c", _SPENT_AFTER_A_PRODUCT]
    spent_s = float(subprocess.run(run, env=environment, check=True, capture_output=True, timeout=60).stdout)
    assert spent_s < _REST_S / 10


_LOADED_BESIDE = """
import sys, threading
from pathlib import Path
import inference_svc
from inference_svc.model import blas

if sys.argv[1] == "broken":
    blas.find_spec = lambda name: 1 / 0
blas.begin_loading_mlx()
for thread in threading.enumerate():
    if thread.name == "mlx-library":
        thread.join()
maps = lambda: {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libmlx" in line}
before = maps()
assert "mlx.core" not in sys.modules
import mlx.core as mx
assert mx.ones(3).sum().item() == 3
print(len(before), before <= maps(), len([path for path in maps() if path.endswith("libmlx.so")]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux's loader that is called")
@pytest.mark.parametrize(("state", "found"), [("whole", "1 True 1"), ("broken", "0 True 1")])
def test_mlxs_library_is_loaded_by_a_thread_and_once(state: str, found: str) -> None:
    done = subprocess.run([sys.executable, "-c", _LOADED_BESIDE, state], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (found, "")


def test_a_start_needs_no_package_for_its_haste_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as came with a version of another."""
    monkeypatch.setattr(__main__, "_WITH_LIBRARIES", ("no_such_package",))
    monkeypatch.setattr(__main__, "begin_loading_mlx", lambda: None)
    __main__._import_beside_mlx()
