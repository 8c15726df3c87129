"""Writes the blocking clients of store and engine: the asynchronous ones with their awaits taken out.

Two clients by hand drift apart, and a thread behind every blocking call is one more thing to stop. `--check` says
whether the committed files are what would be written.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SDK = ROOT / "clients/python/kvasir/clients"
RUFF = (sys.executable, "-m", "ruff")

NAMES = ("service_client", "agent_client", "blob_transfers", "store_client", "inference_client")

_MAKES = r"`(\w+)\.py` is this file with the awaits taken out, by `tools/make_sync_client.py`; change this one\."
_IS_MADE = r"Made from `aio/\1.py` by `tools/make_sync_client.py`; change that one. Many threads may use one client."
REPLACEMENTS = (
    (_MAKES.replace(" ", r"\s+"), _IS_MADE),
    (r",\s+asynchronously\b", ""),
    (r"\basynchronous client\b", "blocking client"),
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsyncGenerator\[(.+), None\]", r"Generator[\1, None, None]"),
    (r"\bAsyncGenerator\b", "Generator"),
    (r"\bAio([A-Z]\w+)\b", r"\1"),
    (r"\bkvasir\.clients\.aio\.", "kvasir.clients."),
    (r"\baio_channel\b", "sync_channel"),
    (r"\bgrpc\.aio\.Channel\b", "grpc.Channel"),
    (r"\bimport grpc\.aio\n", ""),
    (r"\bimport asyncio\b", "import time"),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"\baclosing\b", "closing"),
    (r"__aenter__", "__enter__"),
    (r"__aexit__", "__exit__"),
)


def sync_source(name: str) -> str:
    """What a blocking file must be."""
    text = (SDK / "aio" / f"{name}.py").read_text()
    for pattern, replacement in REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    target = ("--stdin-filename", str(SDK / f"{name}.py"), "-")
    fixes = ("--select", "I,UP028", "--fix", "--unsafe-fixes", "--quiet")
    return _ruff("format", *target, text=_ruff("check", *fixes, *target, text=text))


def _ruff(*arguments: str, text: str) -> str:
    return subprocess.run([*RUFF, *arguments], input=text, capture_output=True, text=True, check=True).stdout


def main() -> int:
    made = {SDK / f"{name}.py": sync_source(name) for name in NAMES}
    if "--check" in sys.argv:
        return int(any(not path.exists() or path.read_text() != text for path, text in made.items()))
    for path, text in made.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
