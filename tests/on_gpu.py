"""`python -m tests.on_gpu [arguments of pytest]`: the conformance suites of KV and engine on the GPU that MLX finds.

`make test-gpu` runs it; a host that has nothing but Python and wheels runs it with PYTHONPATH. fp32 products are exact
only without TF32, so that is switched off before MLX is loaded. Without a GPU it ends with 69, and says so. One process
takes 40 minutes on an H200, eight take 5: `-n 8 --dist worksteal`.
"""

import os
import sys
import tempfile
from collections.abc import Iterable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

SUITES = ("tests/inference/kv", "tests/inference/engine")
NO_GPU = 69  # EX_UNAVAILABLE of sysexits.h


def gpu() -> str:
    """The name of MLX's GPU; empty without one."""
    import mlx.core as mx

    if mx.default_device().type == mx.DeviceType.cpu:
        return ""
    return str(mx.device_info().get("device_name", mx.default_device()))


def keep_kernels_apart(environment: MutableMapping[str, str]) -> None:
    """Give each process of several its own folder of kernels that MLX compiled: MLX 0.32 reads what another has half
    written. Before the first kernel.
    """
    if worker := environment.get("PYTEST_XDIST_WORKER"):
        shared = environment.get("MLX_PTX_CACHE_DIR") or Path(tempfile.gettempdir(), "kernels-of-tests")
        environment["MLX_PTX_CACHE_DIR"] = str(Path(shared, worker))


def skip_with_reasons(items: "Iterable[pytest.Item]") -> None:
    """Skip tests that are marked `cpu_only`, each with the reason that its marker gives."""
    import pytest

    for item in items:
        marker = item.get_closest_marker("cpu_only")
        assert marker is not None
        item.add_marker(pytest.mark.skip(reason=marker.args[0]))


def main(arguments: Sequence[str]) -> int:
    """Run the suites; returns pytest's exit code, or NO_GPU."""
    os.environ["MLX_ENABLE_TF32"] = "0"
    if not (name := gpu()):
        print("no GPU: MLX computes on the CPU here, where `make test` runs the same suites", file=sys.stderr)
        return NO_GPU
    print(f"on {name}, TF32 off", flush=True)
    import pytest

    # Without the options of pyproject.toml, some of which need plugins that such a host may lack.
    return int(pytest.main(["-o", "addopts=", "-q", "-rs", "-p", "no:cacheprovider", *SUITES, *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
