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

STORE_DOCSTRING = '''\
"""The cache store's blocking client: every RPC a method, typed errors, transfers that go on after a cut.

Made from `aio_store_client.py` by `tools/make_sync_client.py`; change that one. Errors are the types of
`kvasir.errors`. Round trips have a deadline (`timeout_s` of the client, or of the call); transfers have none,
because a dead peer is noticed by keepalive. One client may be used by many threads.
"""'''

INFERENCE_DOCSTRING = '''\
"""The inference service's blocking client: turns as streams of events, and what was kept when one breaks.

Made from `aio_inference_client.py` by `tools/make_sync_client.py`; change that one. Every turn has a request id, so
that it can be asked again after a break without being done twice. One client may be used by many threads.
"""'''

CLIENTS = (
    (SDK / "aio_store_client.py", SDK / "store_client.py", STORE_DOCSTRING),
    (SDK / "aio_inference_client.py", SDK / "inference_client.py", INFERENCE_DOCSTRING),
)

REPLACEMENTS = (
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsyncGenerator\[(.+), None\]", r"Generator[\1, None, None]"),
    (r"\bAsyncGenerator\b", "Generator"),
    (r"\bAio(Store|Inference)Client\b", r"\1Client"),
    (r"\baio_channel\b", "sync_channel"),
    (r"\bgrpc\.aio\.Channel\b", "grpc.Channel"),
    (r"\bimport grpc\.aio\n", ""),
    (r"\bimport asyncio\b", "import time"),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"\baclosing\b", "closing"),
    (r"__aenter__", "__enter__"),
    (r"__aexit__", "__exit__"),
)


def sync_source(source: Path, target: Path, docstring: str) -> str:
    """What a blocking client must be."""
    text = source.read_text()
    text = re.sub(r'\A""".*?"""', lambda _: docstring, text, count=1, flags=re.DOTALL)
    body = text[len(docstring) :]
    for pattern, replacement in REPLACEMENTS:
        body = re.sub(pattern, replacement, body)
    name = ("--stdin-filename", str(target), "-")
    sorted_imports = _ruff(
        "check", "--select", "I,UP028", "--fix", "--unsafe-fixes", "--quiet", *name, text=docstring + body
    )
    return _ruff("format", *name, text=sorted_imports)


def _ruff(*arguments: str, text: str) -> str:
    return subprocess.run([*RUFF, *arguments], input=text, capture_output=True, text=True, check=True).stdout


def main() -> int:
    if "--check" in sys.argv:
        return int(any(target.read_text() != sync_source(source, target, doc) for source, target, doc in CLIENTS))
    for source, target, docstring in CLIENTS:
        target.write_text(sync_source(source, target, docstring))
    return 0


if __name__ == "__main__":
    sys.exit(main())
