"""The leases of a sealed namespace: plain names in memory, sealed ones in the tables."""

from cachestore_svc.facts.records import LeaseToken, LineKey
from cachestore_svc.index.live_leases import LiveLeases
from cachestore_svc.sealing.sealed_names import SealedNames


class SealedLiveLeases(LiveLeases):
    """Live leases as the verbs of the tables ask for them: by sealed names."""

    def __init__(self, live: LiveLeases, names: SealedNames) -> None:
        self._live = live
        self._names = names

    def grant(self, line: LineKey, token: LeaseToken, ttl_s: float) -> None:
        self._live.grant(self._open(line), token, ttl_s)

    def left_s(self, line: LineKey, token: LeaseToken, ttl_s: float) -> float:
        return self._live.left_s(self._open(line), token, ttl_s)

    def barred_s(self, line: LineKey) -> float:
        return self._live.barred_s(self._open(line))

    def drop(self, line: LineKey) -> None:
        self._live.drop(self._open(line))

    def taken_back(self, line: LineKey) -> None:
        self._live.taken_back(self._open(line))

    def _open(self, line: LineKey) -> LineKey:
        return line._replace(agent_id=self._names.open_text(line.agent_id))
