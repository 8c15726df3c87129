"""Namespaces, and sums over their agents and blobs."""

from typing import Protocol

# The name or hash that a slice ends with, None when there was nothing left; and sums over the slice.
Sums = tuple[str | None, list[int]]


class SumsView(Protocol):
    def namespaces(self) -> list[str]:
        """Names of all namespaces, sorted."""

    def stored_bytes(self) -> dict[str, int]:
        """Bytes of all blobs, by namespace."""

    def sums_of_agents(self, after: str) -> Sums:
        """Agents, versions, and bytes of the newest versions, over the next SLICE agents after `after`.

        Also returns the last agent's name.
        """

    def sums_of_blobs(self, after: str) -> Sums:
        """Blobs, their bytes, how many are damaged, and bytes that nothing holds, over the next SLICE hashes after
        `after`. Also returns the last hash.
        """

    def counts(self) -> tuple[int, int]:
        """Blobs and versions of a namespace, all in one operation."""

    def written(self, day: int) -> dict[str, int]:
        """Bytes of blobs written on a day (UTC, counted from 1970), by namespace."""


class SumsChange(SumsView, Protocol):
    def count_written(self, day: int, size_bytes: int) -> None:
        """Add to the bytes written on a day."""
