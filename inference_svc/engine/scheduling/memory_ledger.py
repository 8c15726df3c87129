"""Bytes of KV: who holds how many, and what is free. Numbers only: nothing is allocated or dropped here.

free + reserved + resident = total, always, and none of them is ever negative. A running turn holds a reservation, made
before it begins, for all that it may come to need; an idle hot memory is resident. A memory that a running turn extends
is lent to it: its bytes are part of that turn's reservation until it is settled.
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
        self._lent: dict[KeyT, OwnerT] = {}
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
        """0 if it holds nothing."""
        return self._reserved.get(owner, 0)

    def is_lent(self, key: KeyT) -> bool:
        return key in self._lent

    def charge(self, needed_bytes: int, extends: KeyT | None = None) -> tuple[int, int]:
        """(what a reservation holds, what of it must be free): a lent memory brings its own bytes along. One that is
        larger than all the turn needs (the prompt goes back far) is held whole: its buffers do not shrink.
        """
        own = self._resident.get(extends, 0) if extends is not None else 0
        held = max(needed_bytes, own)
        return held, held - own

    def reserve(self, owner: OwnerT, needed_bytes: int, extends: KeyT | None = None) -> bool:
        """Hold bytes for `owner`; False, and nothing changed, if they are not free. `extends`: the resident memory that
        it takes over; without effect if there is none.
        """
        if owner in self._reserved:
            raise ValueError("the owner holds a reservation already")
        held, missing = self.charge(needed_bytes, extends)
        if missing > self.free_bytes:
            return False
        if extends is not None and extends in self._resident:
            self.drop(extends)
            self._lent[extends] = owner
        self._reserved[owner] = held
        return True

    def resize(self, owner: OwnerT, needed_bytes: int) -> bool:
        """Hold more or less for an owner that runs; False, and nothing changed, if that much is not free."""
        if needed_bytes - self._reserved[owner] > self.free_bytes:
            return False
        self._reserved[owner] = needed_bytes
        return True

    def release(self, owner: OwnerT) -> None:
        """The owner's bytes are free, with those of a memory that was lent to it. Without effect if it holds none."""
        self._reserved.pop(owner, None)
        self._lent = {key: lender for key, lender in self._lent.items() if lender != owner}

    def keep(self, key: KeyT, size_bytes: int) -> bool:
        """The key's memory is resident with `size_bytes`, instead of what it was; False, and the key has none any more,
        if they are not free.
        """
        self.drop(key)
        if size_bytes > self.free_bytes:
            return False
        self._resident[key] = size_bytes
        self._resident_bytes += size_bytes
        return True

    def drop(self, key: KeyT) -> int:
        """Free an idle memory; what it held. 0 for a lent one: its turn holds the bytes."""
        size_bytes = self._resident.pop(key, 0)
        self._resident_bytes -= size_bytes
        return size_bytes
