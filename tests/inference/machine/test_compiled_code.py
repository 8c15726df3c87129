"""Code that MLX compiles for a CPU is kept, and found, in a folder of this user alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inference.kv.attention.emulators import needs_compiler

_PROGRAM = """
import tempfile
from inference_svc.compiled_code import keep_compiled_code_private

keep_compiled_code_private()
import mlx.core as mx

function = mx.compile(lambda x: mx.tanh(x) * x + 1)
print(function(mx.zeros((9,))).sum().item(), tempfile.gettempdir())
"""
pytestmark = [needs_compiler, pytest.mark.cpu_only("a GPU's code is not kept so")]


@pytest.mark.long(3)
@pytest.mark.parametrize("mode", [0o700, 0o777], ids=["private", "shared"])
def test_compiled_code_is_neither_kept_nor_found_among_other_users_files(mode: int, tmp_path: Path) -> None:
    """A file stands for a folder of another user, in which MLX can make nothing. Below a home that others may write in
    there is no better place.
    """
    shared, home = tmp_path / "tmp", tmp_path / "home"
    shared.mkdir()
    (shared / "mlx").touch()
    kept = home / ".cache/kvasir/mlx"
    kept.mkdir(parents=True)
    kept.chmod(mode)
    environment = {**os.environ, "TMPDIR": str(shared), "HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, env=environment
    )
    if mode == 0o700:
        assert (done.returncode, done.stdout) == (0, f"9.0 {shared}\n"), done.stderr
        assert list(kept.rglob("*.so"))
    else:
        assert "cannot create directories" in done.stderr
