"""`make test-gpu` says when there is no GPU, and what is skipped on one has a reason."""

import os
import subprocess
import sys

import pytest

from tests.on_gpu import NO_GPU, gpu, skip_with_reasons


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
