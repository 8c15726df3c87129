"""Where a blob lies below a store's data directory: no name from outside becomes part of a path but a digest."""

from pathlib import Path

from blake3 import blake3


def namespace_place(namespace: str) -> str:
    """The name of a namespace's directory: 32 hex digits."""
    return blake3(namespace.encode()).hexdigest()[:32]


def blob_place(data_dir: Path, namespace: str, hash_: str) -> Path:
    """The file of a blob that is not sealed. `hash_`: 64 lower-case hex digits, as a Digest has them."""
    return data_dir / "namespaces" / namespace_place(namespace) / "blobs" / hash_[:2] / hash_
