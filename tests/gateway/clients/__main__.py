"""Clients of others, each unmodified but for its base URL, before real services: `make test-http-clients` runs it.

They are installed into a folder of their own, because their dependencies are none of ours. A client whose toolchain is
not there is named and left out.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.gateway.conftest import Front, running_front
from tests.gateway.serving import MODEL

HERE = Path(__file__).parent
# Each in an environment of its own: they want different versions of the same packages.
PYTHON_CLIENTS = {"langchain_talk.py": ("langchain-openai",), "litellm_talk.py": ("litellm", "mcp")}


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if a client failed. The argument is the folder to install into."""
    folder = Path(arguments[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as root, running_front(Path(root)) as front:
        ended = [_python(front, folder, script, packages) for script, packages in PYTHON_CLIENTS.items()]
        ended.append(_node(front, folder))
        ended.append(_talk(front, ["sh", str(HERE / "curl_talk.sh")], "curl"))
    return 0 if all(ended) else 1


def _python(front: Front, folder: Path, script: str, packages: Sequence[str]) -> bool:
    python = folder / packages[0] / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages], check=True)
    return _talk(front, [str(python), str(HERE / script)], packages[0])


def _node(front: Front, folder: Path) -> bool:
    if shutil.which("npm") is None:
        print("AI SDK: left out, there is no npm here")
        return True
    own = folder / "ai-sdk"
    own.mkdir(exist_ok=True)
    for name in ("package.json", "ai_sdk_talk.mjs"):
        shutil.copy(HERE / name, own / name)
    if not (own / "node_modules").exists():
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=own, check=True)
    return _talk(front, ["node", str(own / "ai_sdk_talk.mjs")], "AI SDK")


def _talk(front: Front, command: list[str], name: str) -> bool:
    known = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "KVASIR_URL": front.gateway.url,
        "KVASIR_KEY": front.keys["ada"],
        "KVASIR_MODEL": MODEL,
    }
    code = subprocess.run(command, env={**os.environ, **known}, timeout=300, check=False).returncode
    if code:
        print(f"{name}: failed with {code}")
    return code == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
