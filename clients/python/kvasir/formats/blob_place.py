"""Where a blob lies below a store's data directory: no name from outside becomes part of a path but a digest."""

import re
from functools import lru_cache
from pathlib import Path

from blake3 import blake3

# The directory of a namespace in which whole files wait for the store to take them.
HANDED = "handed"
_TOKEN = re.compile(r"[0-9a-f]{32}")


@lru_cache(1024)
def namespace_place(namespace: str) -> str:
    """The name of a namespace's directory: 32 hex digits."""
    return blake3(namespace.encode()).hexdigest()[:32]


def blob_place(data_dir: Path, namespace: str, hash_: str) -> Path:
    """The file of a blob that is not sealed. `hash_`: 64 lower-case hex digits, as a Digest has them."""
    return data_dir / "namespaces" / namespace_place(namespace) / "blobs" / hash_[:2] / hash_


def handed_place(data_dir: Path, namespace: str) -> Path:
    """The directory for whole files that a caller hands to the store of its host. Only the store makes it."""
    return data_dir / "namespaces" / namespace_place(namespace) / HANDED


def is_token(text: str) -> bool:
    """Whether the text can name a handed file: exactly 32 lower-case hex digits."""
    return _TOKEN.fullmatch(text) is not None
