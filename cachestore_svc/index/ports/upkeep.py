"""References to blobs, blobs without any, when these may go, namespaces, and sums over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvasir.formats.digest import Digest

from cachestore_svc.facts.records import EventBody


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Marks and promises older than these have rested."""

    marked_until_unix_ms: int
    promised_until_unix_ms: int


@dataclass(frozen=True, slots=True)
class Evicted:
    freed: list[Digest]
    events: list[EventBody]
    versions: int


class NotEnough(Exception):
    """Giving up all that may go would not free enough; so nothing was given up."""


# The name or hash that a slice ends with, None when there was nothing left; and sums over the slice.
Sums = tuple[str | None, list[int]]


class UpkeepView(Protocol):
    def named_after(self, manifest: Digest, position: int, limit: int) -> list[tuple[int, Digest]]:
        """Blobs that a manifest names behind a position, with theirs."""

    def names_others(self, manifest: Digest, named: Sequence[Digest]) -> bool:
        """Whether a manifest that is held holds on to other blobs than these."""

    def count_unheld(self) -> tuple[int, int]:
        """How many unheld blobs are not marked yet, and the bytes of all that nothing holds."""

    def rested(self, deadlines: Deadlines, limit: int) -> list[tuple[int, Digest]]:
        """Marked blobs that may go, at most `limit` (-1: all): still unheld, and neither marked nor promised lately."""

    def namespaces(self) -> list[str]:
        """Names of all namespaces, sorted."""

    def stored_bytes(self) -> dict[str, int]:
        """Bytes of all blobs, by namespace."""

    def sums_of_agents(self, after: str) -> Sums:
        """Agents, versions, bytes of the newest, over the next SLICE agents after `after`, and the last one's name."""

    def sums_of_blobs(self, after: str) -> Sums:
        """Blobs, bytes, damaged ones, unheld bytes, over the next SLICE hashes after `after`, and the last hash."""

    def counts(self) -> tuple[int, int]:
        """Blobs and versions of a namespace, all in one operation."""

    def written(self, day: int) -> dict[str, int]:
        """Bytes of blobs written on a day (UTC, counted from 1970), by namespace."""


class UpkeepChange(UpkeepView, Protocol):
    def hold_anew(self, manifest: Digest, named: Sequence[Digest]) -> None:
        """Rewrite a manifest's references to those of its blobs that are listed."""

    def mark_unheld(self, now_unix_ms: int) -> int:
        """Mark the blobs that nothing holds; how many were not marked before."""

    def remove_blobs(self, blob_ids: Sequence[int]) -> None:
        """Unlist blobs that nothing holds."""

    def remove_unused_schemas(self) -> None:
        """Forget tensor schemas that no blob has."""

    def evict(self, wanted_bytes: int, evict_heads: bool, now_unix_ms: int, deadlines: Deadlines) -> Evicted:
        """Give up versions until their blobs free enough at once. Raises NotEnough, which undoes all of it."""

    def count_written(self, day: int, size_bytes: int) -> None:
        """Add to the bytes written on a day."""


def rested_at(now_unix_ms: int, grace_ms: int) -> Deadlines:
    """Promises are renewed only from an eighth of the grace period on (see `needs_promise`): so they rest for more."""
    return Deadlines(now_unix_ms - grace_ms, now_unix_ms - grace_ms - grace_ms // 8)


def gone_by(now_unix_ms: int, grace_ms: int) -> int:
    return now_unix_ms + grace_ms + grace_ms // 8


def needs_promise(promised_unix_ms: int, now_unix_ms: int, grace_ms: int) -> bool:
    return promised_unix_ms <= now_unix_ms - grace_ms // 8
