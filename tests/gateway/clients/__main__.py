"""Clients of others, each unmodified but for its base URL, before real services: `make test-http-clients` runs it.

They are installed into a folder of their own, because their dependencies are none of ours. A client whose toolchain is
not there is named and left out. Then everything is killed, and each goes on with its conversation, which must be warm.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gateway.conftest import Front, running_front
from tests.gateway.serving import MODEL

HERE = Path(__file__).parent
# Each in an environment of its own: they want different versions of the same packages.
PYTHON_CLIENTS = {
    "langchain_talk.py": ("langchain-openai",),
    "litellm_talk.py": ("litellm", "mcp"),
    "ollama_talk.py": ("ollama",),
}


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if a client failed. The argument is the folder to install into."""
    folder = Path(arguments[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    talks = [_python(folder, script, packages) for script, packages in PYTHON_CLIENTS.items()]
    talks += [_node(folder), Talk("curl", ["sh", str(HERE / "curl_talk.sh")])]
    there = [talk for talk in talks if talk is not None]
    with tempfile.TemporaryDirectory() as root, running_front(Path(root)) as front:
        ended = [_talk(front, talk) for talk in there]
        front.gateway.kill()
        front.house.restart()
        front.gateway.start()
        ended += [_talk(front, talk, "go on") for talk in there]
    return 0 if all(ended) else 1


@dataclass(frozen=True)
class Talk:
    """A client's program."""

    name: str
    command: list[str]


def _python(folder: Path, script: str, packages: Sequence[str]) -> Talk:
    python = folder / packages[0] / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages], check=True)
    return Talk(packages[0], [str(python), str(HERE / script)])


def _node(folder: Path) -> Talk | None:
    if shutil.which("npm") is None:
        print("AI SDK: left out, there is no npm here")
        return None
    own = folder / "ai-sdk"
    own.mkdir(exist_ok=True)
    for name in ("package.json", "ai_sdk_talk.mjs"):
        shutil.copy(HERE / name, own / name)
    if not (own / "node_modules").exists():
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=own, check=True)
    return Talk("AI SDK", ["node", str(own / "ai_sdk_talk.mjs")])


def _talk(front: Front, talk: Talk, *words: str) -> bool:
    """Run it. What it wants to say when it goes on, it keeps in a file."""
    known = {
        "KVASIR_TOLD": str(front.house.root / f"{talk.name}.json"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "KVASIR_URL": front.gateway.url,
        "KVASIR_KEY": front.keys["ada"],
        "KVASIR_MODEL": MODEL,
    }
    code = subprocess.run([*talk.command, *words], env={**os.environ, **known}, timeout=300, check=False).returncode
    if code:
        print(f"{talk.name}: failed with {code}")
    return code == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
