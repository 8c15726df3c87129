"""`make test-gpu` says when there is no GPU, and what is skipped on one has a reason."""

import os
import subprocess
import sys

import pytest

from tests.on_gpu import NO_GPU, gpu, keep_kernels_apart, skip_with_reasons


def test_without_a_gpu_the_suites_do_not_run_and_that_is_no_success() -> None:
    # Where there is a GPU the tests are only collected.
    argv = [sys.executable, "-m", "tests.on_gpu", "--collect-only"]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, env=dict(os.environ))
    if gpu():
        assert ended.returncode == 0
        assert "TF32 off" in ended.stdout
    else:
        assert ended.returncode == NO_GPU
        assert "no GPU" in ended.stderr


def test_a_test_for_cpus_is_skipped_with_the_reason_of_its_marker(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.cpu_only("a reason"))
    skip_with_reasons([request.node])
    skip = request.node.get_closest_marker("skip")
    assert skip is not None
    assert skip.kwargs == {"reason": "a reason"}


def test_each_of_several_processes_keeps_its_compiled_kernels_apart() -> None:
    """This one too, if it is one of several."""
    names, environments = ("gw0", "gw1"), list[dict[str, str]]()
    for given in ({}, {"MLX_PTX_CACHE_DIR": "/kept"}):
        for name in names:
            environments.append({**given, "PYTEST_XDIST_WORKER": name})
            keep_kernels_apart(environments[-1])
    folders = [each["MLX_PTX_CACHE_DIR"] for each in environments]
    assert len({*folders}) == 4
    assert folders[2:] == ["/kept/gw0", "/kept/gw1"]
    keep_kernels_apart(alone := {"MLX_PTX_CACHE_DIR": "/kept"})
    assert alone == {"MLX_PTX_CACHE_DIR": "/kept"}
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        assert os.environ["MLX_PTX_CACHE_DIR"].endswith(f"/{worker}")
