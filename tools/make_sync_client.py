"""Writes clients/python/kvasir/store_client.py: the asynchronous client with its awaits taken out.

Two clients by hand drift apart, and a thread behind every blocking call is one more thing to stop. `--check` says
whether the committed file is what would be written.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "clients/python/kvasir/aio_store_client.py"
TARGET = ROOT / "clients/python/kvasir/store_client.py"
RUFF = (sys.executable, "-m", "ruff")

DOCSTRING = '''"""The cache store's blocking client: every RPC a method, typed errors, transfers that go on after a cut.

Made from `aio_store_client.py` by `tools/make_sync_client.py`; change that one. Errors are the types of
`kvasir.errors`. Round trips have a deadline (`timeout_s` of the client, or of the call); transfers have none,
because a dead peer is noticed by keepalive. One client may be used by many threads.
"""'''

REPLACEMENTS = (
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsyncGenerator\[(.+), None\]", r"Generator[\1, None, None]"),
    (r"\bAsyncGenerator\b", "Generator"),
    (r"\bAioStoreClient\b", "StoreClient"),
    (r"\baio_channel\b", "sync_channel"),
    (r"\bgrpc\.aio\.Channel\b", "grpc.Channel"),
    (r"\bimport grpc\.aio\n", ""),
    (r"\bimport asyncio\b", "import time"),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"\baclosing\b", "closing"),
    (r"__aenter__", "__enter__"),
    (r"__aexit__", "__exit__"),
)


def sync_source() -> str:
    """What the blocking client must be."""
    text = SOURCE.read_text()
    text = re.sub(r'\A""".*?"""', lambda _: DOCSTRING, text, count=1, flags=re.DOTALL)
    body = text[len(DOCSTRING) :]
    for pattern, replacement in REPLACEMENTS:
        body = re.sub(pattern, replacement, body)
    name = ("--stdin-filename", str(TARGET), "-")
    sorted_imports = _ruff(
        "check", "--select", "I,UP028", "--fix", "--unsafe-fixes", "--quiet", *name, text=DOCSTRING + body
    )
    return _ruff("format", *name, text=sorted_imports)


def _ruff(*arguments: str, text: str) -> str:
    return subprocess.run([*RUFF, *arguments], input=text, capture_output=True, text=True, check=True).stdout


def main() -> int:
    if "--check" in sys.argv:
        return int(TARGET.read_text() != sync_source())
    TARGET.write_text(sync_source())
    return 0


if __name__ == "__main__":
    sys.exit(main())
