"""Code that MLX compiles for a CPU is kept, and found, in a folder of this user alone."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from inference_svc import compiled_code
from tests.inference.kv.attention.emulators import needs_compiler

_PROGRAM = """
import tempfile
from inference_svc.compiled_code import keep_compiled_code_private

keep_compiled_code_private()
import mlx.core as mx

function = mx.compile(lambda x: mx.tanh(x) * x + 1)
print(function(mx.zeros((9,))).sum().item(), tempfile.gettempdir())
"""
# The disk of the kept folder as the system would describe it.
_DISK = """
import os
from types import SimpleNamespace

own, named = os.statvfs, ("f_bavail", "f_frsize", "f_flag")

def described(path):
    facts = {{name: getattr(own(path), name) for name in named}}
    return SimpleNamespace(**facts | (dict({facts}) if str(path) == {kept!r} else {{}}))

os.statvfs = described
"""
pytestmark = [needs_compiler, pytest.mark.cpu_only("a GPU's code is not kept so")]


@pytest.mark.long(5)
@pytest.mark.parametrize("home_is", ["private", "shared", "full", "without programs"])
def test_compiled_code_is_neither_kept_nor_found_among_other_users_files(home_is: str, tmp_path: Path) -> None:
    """A file stands for a folder of another user, in which MLX can make nothing."""
    shared, home = tmp_path / "tmp", tmp_path / "home"
    shared.mkdir()
    (shared / "mlx").touch()
    kept = home / ".cache/kvasir/mlx"
    kept.mkdir(parents=True)
    kept.chmod(0o777 if home_is == "shared" else 0o700)
    facts = {"full": "f_bavail=0", "without programs": "f_flag=os.ST_NOEXEC"}.get(home_is, "")
    program = _DISK.format(kept=str(kept), facts=facts) + _PROGRAM
    environment = {**os.environ, "TMPDIR": str(shared), "HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, f"9.0 {shared}\n"), done.stderr
    beside = shared / f"kvasir-{os.getuid()}-mlx"
    assert list((kept if home_is == "private" else beside).rglob("*.so"))
    assert beside.exists() == (home_is != "private")


@pytest.mark.parametrize("leads_to", ["own", "nothing"])
def test_a_name_that_another_user_took_is_no_place_for_compiled_code(
    leads_to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maker of a link could lead it to a folder of another user later, from which programs would be run."""
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / f"kvasir-{os.getuid()}-mlx").symlink_to(tmp_path / leads_to)
    tmp_path.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(compiled_code, "kept_folder", lambda _: None)
    compiled_code.keep_compiled_code_private()
    found = Path(os.environ["TMPDIR"])
    assert found.parent == tmp_path
    assert (found.name.startswith("kvasir-mlx-"), found.stat().st_mode & 0o777) == (True, 0o700)
