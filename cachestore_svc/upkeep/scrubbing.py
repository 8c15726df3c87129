"""The scrub in the background: every blob is hashed again, over days and restarts, by namespace and by number. Where it
is is noted in the index now and then. `background_scrub` drives it, and sets its speed.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from kvasir.errors import DataLoss, KvasirError, Unavailable
from kvasir.formats.digest import Digest

from cachestore_svc.core.core import Core
from cachestore_svc.core.stored_blobs import verified
from cachestore_svc.facts.records import ScrubState
from cachestore_svc.index.catalog import HOUSE

_FACT = "scrub"
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class ToScrub:
    namespace: str
    number: int
    digest: Digest


class Scrubbing:
    """Where the scrub of one store is. Driven by one task at a time; `state` is read from any thread."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.state = ScrubState()

    def load(self) -> ScrubState:
        """Go on where an earlier run was. A store that was never scrubbed begins with a rest."""
        noted = self._core.catalog.read(HOUSE, lambda view: view.fact(_FACT))
        if noted:
            self.state = ScrubState(**json.loads(noted))
        else:
            now = self._core.now_unix_ms()
            self.state = ScrubState(began_unix_ms=now, ended_unix_ms=now)
            self.save()
        return self.state

    def save(self) -> None:
        """Note where it is. Raises what a full or failing disk raises."""
        text = json.dumps(asdict(self.state))
        self._core.catalog.write(HOUSE, lambda change: change.set_fact(_FACT, text), frees_space=True)

    def due_in_s(self, every_s: float) -> float:
        """Seconds until the next pass; 0 while one is under way. A clock that was set back makes it wait no longer."""
        if not self.state.ended_unix_ms:
            return 0.0
        passed_s = max(0, self._core.now_unix_ms() - self.state.ended_unix_ms) / 1000
        return max(0.0, every_s - passed_s)

    def begin(self) -> None:
        self.state = ScrubState(began_unix_ms=self._core.now_unix_ms())
        self.save()

    def next(self) -> Sequence[ToScrub]:
        """The next blobs of the pass; none when it is over, which is noted."""
        for namespace in self._core.open_namespaces():
            if namespace < self.state.namespace:
                continue
            after = self.state.number if namespace == self.state.namespace else 0
            found = self._some(namespace, after)
            if found:
                return [ToScrub(namespace, number, digest) for number, digest in found]
        self.state = replace(self.state, ended_unix_ms=self._core.now_unix_ms(), namespace="", number=0)
        self.save()
        return ()

    def is_whole(self, blob: ToScrub) -> bool:
        """Hash it, and count it. What is damaged is quarantined. Raises Unavailable when it cannot be read now."""
        is_whole = True
        try:
            verified(self._core, blob.namespace, blob.digest, past_copies=True)
        except DataLoss:
            is_whole = False
        except Unavailable:
            raise
        except KvasirError:
            return self.skip(blob)  # swept meanwhile, or not to be read without a key
        self.state = replace(
            self.state,
            namespace=blob.namespace,
            number=blob.number,
            blobs_checked=self.state.blobs_checked + 1,
            bytes_checked=self.state.bytes_checked + blob.digest.size_bytes,
            blobs_damaged=self.state.blobs_damaged + (not is_whole),
        )
        self._core.counters.add(blob.namespace, "blobs_scrubbed")
        return is_whole

    def skip(self, blob: ToScrub) -> bool:
        self.state = replace(self.state, namespace=blob.namespace, number=blob.number)
        return True

    def repaired(self) -> None:
        self.state = replace(self.state, blobs_repaired=self.state.blobs_repaired + 1)

    def _some(self, namespace: str, after: int) -> list[tuple[int, Digest]]:
        try:
            return self._core.catalog.read(namespace, lambda view: view.blobs_after(after, _AT_ONCE))
        except KvasirError:
            return []  # a namespace that cannot be read now has its turn in the next pass
