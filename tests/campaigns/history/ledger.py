"""What callers were told is stored, version by version: none of it may be lost, and no version may be two memories."""

import asyncio
import time
from dataclasses import dataclass, field

from kvasir import errors

from tests.campaigns.history.record import AnyStore

_RETAINED_VERSIONS = 8
_AT_ONCE = 8


@dataclass
class Ledger:
    """By agent and version, the hash of the manifest that a caller was told."""

    agents: dict[str, dict[int, str]] = field(default_factory=dict)
    commits: int = 0
    longest_stall_s: float = 0.0  # without a commit
    last_at: float = field(default_factory=time.monotonic)

    def acknowledged(self, agent: str, version: int, manifest_hash: str) -> list[str]:
        """Note it. Returns a problem if another memory was acknowledged as this version: its line had two owners."""
        self.commits += 1
        self.looked_at(time.monotonic())
        self.last_at = time.monotonic()
        other = self.agents.setdefault(agent, {}).setdefault(version, manifest_hash)
        return [] if other == manifest_hash else [f"{agent}: version {version} was acknowledged as two memories"]

    def looked_at(self, now: float) -> None:
        """Whatever has not come by now stalls."""
        self.longest_stall_s = max(self.longest_stall_s, now - self.last_at)

    def gone(self, agent: str) -> None:
        """It was deleted or replaced, or may have been: versions are counted anew."""
        self.agents.pop(agent, None)

    async def lost(self, store: AnyStore) -> list[str]:
        """A problem for each agent whose newest acknowledged version is not there as it was told."""
        places = asyncio.Semaphore(_AT_ONCE)

        async def looked_for(agent: str) -> list[str]:
            async with places:
                return await self._lost(store, agent)

        return [problem for found in await asyncio.gather(*map(looked_for, self.agents)) for problem in found]

    async def _lost(self, store: AnyStore, agent: str) -> list[str]:
        version, told = max(self.agents[agent].items())
        try:
            head, _ = await store.get_snapshot(agent)
            if head.version < version:
                return [f"{agent}: version {version} was acknowledged, and {head.version} is the newest"]
            if head.version - version >= _RETAINED_VERSIONS:
                return []
            snapshot, _ = await store.get_snapshot(agent, version=version)
        except errors.KvasirError as error:
            return [f"{agent}: version {version} was acknowledged: {error.message}"]
        if snapshot.manifest.hash != told:
            return [f"{agent}: version {version} is another memory than was acknowledged"]
        return []
