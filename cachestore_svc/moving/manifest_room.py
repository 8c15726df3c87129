"""Memory for manifests while they are read, shared by namespace: 15 MiB take 100 MiB while they are checked."""

from contextlib import AbstractAsyncContextManager, AsyncExitStack

from kvasir.formats.manifest import MAX_MANIFEST_BYTES
from kvasir.formats.manifest_checks import MAX_STATES
from kvasir.server.shared_room import SharedRoom

MANIFEST_ROOM_BYTES = 256 << 20  # two of the largest at once, or hundreds of usual ones
PARSED_PER_BYTE = 8  # measured: 7.3 for tokens, 5 for messages, 2 for text
ANSWERED_PER_BYTE = 3  # GetSnapshot's answer holds the bytes, their copy in the message, and the message as it is sent
_LISTED_BLOB_BYTES = 256
_TOKENS_PER_BLOB = 256
_AHEAD_PART = 4  # of the room: as much may be taken ahead


class ManifestRoom:
    """Wait here before a manifest is read. On one event loop."""

    def __init__(self) -> None:
        self.room = SharedRoom(MANIFEST_ROOM_BYTES)

    def parsing(self, namespace: str, size_bytes: int) -> AbstractAsyncContextManager[None]:
        """Room to parse a manifest of this size. The size is a caller's claim, so the limit of manifests bounds it."""
        return self.room.held_for(namespace, _parsed_bytes(size_bytes))

    def take_ahead(self, namespace: str, size_bytes: int) -> bool:
        """Take room to parse a manifest before somebody waits for it; False unless much stays free for others."""
        units = _parsed_bytes(size_bytes)
        is_little = self.room.held_units + units <= self.room.max_units // _AHEAD_PART
        return is_little and self.room.take_if_fits(namespace, units)

    def give_back(self, namespace: str, size_bytes: int) -> None:
        """Give back the room that `take_ahead` took."""
        self.room.give_back(namespace, _parsed_bytes(size_bytes))

    def answering(self, namespace: str, size_bytes: int) -> AbstractAsyncContextManager[None]:
        return self.room.held_for(namespace, ANSWERED_PER_BYTE * size_bytes)

    def keep_list(self, room: AsyncExitStack, namespace: str, blobs: int, beside_bytes: int = 0) -> None:
        """Charge a manifest's list of blobs, and bytes kept beside it, until `room` closes; without a wait, as
        parsing gives back more.
        """
        units = _LISTED_BLOB_BYTES * blobs + beside_bytes
        self.room.take(namespace, units)
        room.callback(self.room.give_back, namespace, units)

    def listing(self, namespace: str, token_count: int) -> AbstractAsyncContextManager[None]:
        blobs = token_count // _TOKENS_PER_BLOB + 1 + MAX_STATES
        return self.room.held_for(namespace, _LISTED_BLOB_BYTES * blobs)


def _parsed_bytes(size_bytes: int) -> int:
    return PARSED_PER_BYTE * min(size_bytes, MAX_MANIFEST_BYTES)
