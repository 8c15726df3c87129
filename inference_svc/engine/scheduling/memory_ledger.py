"""Bytes of KV: how many each turn and memory holds, and how many are free. Numbers only: no byte is allocated here.

free + reserved + resident = total, always, and none of them is ever negative. A running turn holds a reservation, made
before it begins, for all the bytes that it may come to need. An idle hot memory is resident. A turn borrows the memory
that it extends: the memory's bytes are part of the turn's reservation until the turn is over.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

OwnerT = TypeVar("OwnerT", bound=Hashable)
KeyT = TypeVar("KeyT", bound=Hashable)


class MemoryLedger(Generic[OwnerT, KeyT]):
    """Reservations by owner (a turn), residents by key (a hot memory)."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._reserved: dict[OwnerT, int] = {}
        self._resident: dict[KeyT, int] = {}
        self._borrowed_by: dict[KeyT, OwnerT] = {}
        self._resident_bytes = 0  # kept beside them: there may be thousands, and every step asks

    @property
    def reserved_bytes(self) -> int:
        return sum(self._reserved.values())

    @property
    def resident_bytes(self) -> int:
        return self._resident_bytes

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.reserved_bytes - self.resident_bytes

    @property
    def residents(self) -> dict[KeyT, int]:
        """Bytes of every idle memory, a copy."""
        return dict(self._resident)

    def reserved_by(self, owner: OwnerT) -> int:
        """Bytes of the owner's reservation; 0 if it has none."""
        return self._reserved.get(owner, 0)

    def is_borrowed(self, key: KeyT) -> bool:
        return key in self._borrowed_by

    def bytes_needed(self, needed_bytes: int, extends: KeyT | None = None) -> tuple[int, int]:
        """(bytes that a reservation holds, bytes of these that must be free). A borrowed memory brings its own bytes. A
        memory that is larger than the turn needs, because the prompt goes back far, is held whole: its buffers do not
        shrink.
        """
        own = self._resident.get(extends, 0) if extends is not None else 0
        held = max(needed_bytes, own)
        return held, held - own

    def reserve(self, owner: OwnerT, needed_bytes: int, extends: KeyT | None = None) -> bool:
        """Hold bytes for `owner`; False, and nothing changed, if they are not free. `extends`: key of the resident
        memory that the owner borrows; without effect if there is none.
        """
        if owner in self._reserved:
            raise ValueError("the owner holds a reservation already")
        held, missing = self.bytes_needed(needed_bytes, extends)
        if missing > self.free_bytes:
            return False
        if extends is not None and extends in self._resident:
            self.drop(extends)
            self._borrowed_by[extends] = owner
        self._reserved[owner] = held
        return True

    def release(self, owner: OwnerT) -> None:
        """Free the owner's bytes and those of the memory that it borrowed. Without effect if it holds none."""
        self._reserved.pop(owner, None)
        self._borrowed_by = {key: borrower for key, borrower in self._borrowed_by.items() if borrower != owner}

    def keep(self, key: KeyT, size_bytes: int) -> bool:
        """Make the key's memory resident with `size_bytes`, whatever size it had before. False if they are not free;
        the key has no memory then.
        """
        self.drop(key)
        if size_bytes > self.free_bytes:
            return False
        self._resident[key] = size_bytes
        self._resident_bytes += size_bytes
        return True

    def drop(self, key: KeyT) -> int:
        """Free an idle memory and return its bytes; 0 for a borrowed memory, whose bytes its turn holds."""
        size_bytes = self._resident.pop(key, 0)
        self._resident_bytes -= size_bytes
        return size_bytes
