"""What a manifest remembers."""

from kvasir.cachestore.v1 import manifest_pb2


def token_ids(memory: manifest_pb2.Manifest) -> list[int]:
    """All tokens: also the last one, where its KV is in no file."""
    return [*memory.token_ids, *([memory.pending.id] if memory.HasField("pending") else [])]
