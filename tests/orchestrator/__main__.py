"""The LangGraph example before real services: `make test-langgraph` installs LangGraph into out/ and runs it.

It stands apart from the tests because LangGraph's dependencies are none of ours.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.running.system_fixtures import ROOT, running_house


def main(folder: Path) -> int:
    """The example's exit code. `folder` is where LangGraph is installed, once."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, f"{ROOT}[orchestrator]", "langgraph>=1"], check=True)
    command = [python, "-m", "kvasir_orchestrator.examples.langgraph_talk"]
    with tempfile.TemporaryDirectory() as root, running_house(Path(root)) as house:
        ended = subprocess.run([*command, house.engine.address], env={**os.environ, "PYTHONPATH": ""}, check=False)
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
