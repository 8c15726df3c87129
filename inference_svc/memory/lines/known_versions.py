"""The versions in the store that this engine knows of one agent. They outlive the agent's line."""

from collections import deque
from typing import NamedTuple

from kvasir.formats.digest import Digest

from inference_svc.memory.outcomes import SnapshotOutcome
from inference_svc.memory.store.answers import AgentHeads, Version

_MOST_OWN = 16


class Known(NamedTuple):
    """The newest version that was read or committed, as long as nobody took it back: the store's is never older."""

    newest: Version | None = None
    made_unix_ms: int = 0  # its agent, by the store's clock; 0: it is not known when
    times_gone: int = 0  # the agent

    def is_ahead_of(self, heads: AgentHeads) -> bool:
        """Whether a store that answers so lacks it. Of two agents that had one name the later one counts, and no
        number, also where the event is lost that the one before was deleted.
        """
        if self.newest is None or heads.newest.identity == self.newest:
            return False
        if 0 not in (self.made_unix_ms, heads.made_unix_ms) and heads.made_unix_ms != self.made_unix_ms:
            return heads.made_unix_ms < self.made_unix_ms
        return heads.newest.identity.is_behind(self.newest)

    def with_found(self, heads: AgentHeads) -> "Known":
        read = heads.newest.identity
        if read.manifest is None or self.is_ahead_of(heads):
            return self
        return self._replace(newest=read, made_unix_ms=heads.made_unix_ms)


class KnownVersions:
    def __init__(self) -> None:
        self.now = Known()
        self._own: deque[Version] = deque(maxlen=_MOST_OWN)

    @property
    def own(self) -> frozenset[Digest]:
        """Manifests that this engine stored last: the store reports them as turns."""
        return frozenset(each.manifest for each in self._own if each.manifest is not None)

    def found(self, heads: AgentHeads, before: Known) -> None:
        """The store answered so. `before`: as of the question; an agent that is gone since may be in the answer."""
        if before.times_gone == self.now.times_gone:
            self.now = self.now.with_found(heads)

    def committed(self, outcome: SnapshotOutcome, before: Known) -> None:
        """This engine made a version. An answer to a commit that was repeated may name one that is not the newest any
        more: another engine's that was read since `before` stays known.
        """
        version = Version(outcome.version, outcome.manifest)
        if version.manifest is None or version in self._own:
            return
        self._own.append(version)
        newer = self.now.newest if self.now != before else None
        if before.times_gone == self.now.times_gone and not (newer is not None and version.is_behind(newer)):
            self.now = self.now._replace(newest=version)

    def moved(self, to: Version) -> None:
        """The agent got this version by no turn. One that it has since stays known."""
        if self.now.newest is not None and to.is_behind(self.now.newest):
            self.now = Known(times_gone=self.now.times_gone)

    def gone(self) -> None:
        self.now = Known(times_gone=self.now.times_gone + 1)
