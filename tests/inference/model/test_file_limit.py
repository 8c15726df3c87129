"""The engine may open as many files as its system lets it, whatever mlx-lm's import wants."""

import resource
import subprocess
import sys

import pytest

LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (500, 1000))
import inference_svc
import mlx_lm.utils
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_import_of_mlx_lm_leaves_the_limits_of_files() -> None:
    """Also where the system allows fewer than it asks for, where its import would fail."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("500 1000", 0), done.stderr


@pytest.mark.long(1)
def test_other_limits_are_set_while_it_is_imported() -> None:
    code = "import inference_svc, mlx_lm.utils, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (400, 1000))"
    code += "; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.setrlimit.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["400", resource.setrlimit.__name__]
