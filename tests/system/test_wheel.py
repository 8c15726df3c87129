"""The wheel carries everything: built from the checkout, installed into an environment without it, and run there."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "inference_svc",
    "cachestore_svc",
    "clients/python/kvasir",
    "clients/python/kvasir_gateway",
    "clients/python/kvasir_bench",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [built] = folder.glob("*.whl")
    return built


def tracked() -> Iterator[str]:
    """The files of the packages, as a wheel names them."""
    for package in PACKAGES:
        listed = subprocess.run(
            ["git", "ls-files", "-z", package], cwd=ROOT, check=True, capture_output=True, text=True
        )
        above = Path(package).parent
        yield from (Path(name).relative_to(above).as_posix() for name in listed.stdout.split("\0") if name)


@pytest.mark.long(3)
def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    carried = set(zipfile.ZipFile(wheel).namelist())
    names = set(tracked())
    assert "inference_svc/model/kvasir_tiny/weights/model.safetensors" in names
    assert names - carried == set()
    assert "kvasir/py.typed" in carried, "without it mypy takes every call of an installed SDK for Any"


@pytest.mark.long(4)
def test_an_installed_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Other people's packages are borrowed from this environment: `make try-wheel` installs them too."""
    venv.create(tmp_path / "env", symlinks=True)
    [packages] = (tmp_path / "env").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    borrowed = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "borrowed.pth").write_text(f"{borrowed}\n")

    def run(*arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [tmp_path / "env" / "bin" / "python", "-m", "kvasir", "--home", tmp_path / "home", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode in (0, 1), done.stderr
        return done.stdout

    where = "import kvasir, inference_svc, cachestore_svc, kvasir_gateway as g; print(kvasir.__file__, g.__file__)"
    imported = subprocess.run(
        [tmp_path / "env" / "bin" / "python", "-I", "-c", where], capture_output=True, text=True, check=True
    ).stdout
    assert imported.count(str(packages)) == 2, "nothing of the checkout is found"
    assert json.loads(run("doctor", "--json"))["model"]["name"] == "kvasir-tiny"
