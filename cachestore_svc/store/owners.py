"""The part of the store that knows agents' owners: the steps of a move at both ends, and claims.

Each step is one transaction and is durable on return; repeating it changes nothing. The meaning of steps, and their
order, are in `ownership`; the order in which two stores take them is in `moving.moves`.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from kvasir.errors import FailedPrecondition, NotFound, ResourceExhausted
from kvasir.formats.digest import Digest
from kvasir.names import check_agent_id

from cachestore_svc.blobs.manifests import read_manifest
from cachestore_svc.facts import ownership
from cachestore_svc.facts.ownership import Ownership, OwnerState
from cachestore_svc.facts.records import (
    AgentRecord,
    AgentUpdated,
    Committed,
    LineKey,
    LineQuery,
    Origin,
    SnapshotVersion,
)
from cachestore_svc.index.catalog import CatalogChange, CatalogView, Commit
from cachestore_svc.index.refusals import head_moved
from cachestore_svc.pairing.rights import MAX_FACTS, MAX_OPEN_MOVES, May, over_limit
from cachestore_svc.store.leases import LeaseStore

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class ArrivingLine:
    """The newest version of a line that comes by a move; its manifest and blobs are stored already."""

    kv_identity_hash: str
    manifest: Digest
    origin_detail: str
    is_text_own: bool  # at its source
    replaces: SnapshotVersion | None  # the line's newest version here, as the mover knows it


@dataclass(frozen=True, slots=True)
class ArrivingAgent:
    """Everything that a move brings."""

    agent_id: str
    peer: str
    move_id: str
    generation: int
    lines: Sequence[ArrivingLine]  # in the order of their versions at the source
    labels: Mapping[str, str]
    is_pinned: bool
    retained_versions: int


class OwnerStore(LeaseStore):
    """Owners of the agents of all namespaces."""

    def ownership(self, namespace: str, agent_id: str) -> Ownership:
        """What this store knows of an agent's owner. The agent need not exist."""
        self._core.check_open(namespace)
        check_agent_id(agent_id)
        return self._core.catalog.read(namespace, lambda view: view.ownership_of(namespace, agent_id))

    def unfinished_moves(self) -> list[tuple[str, str, Ownership]]:
        """Namespace, agent and fact of all that are on their way, or whose owner must still be announced."""
        return self._facts(lambda namespace, view: view.unfinished_moves(namespace))

    def owners(self) -> list[tuple[str, str, Ownership]]:
        """Namespace, agent and fact of all agents that ever changed hands, also of those that are gone."""
        return self._facts(lambda namespace, view: view.owners(namespace))

    def rename_peers(self, names: Mapping[str, str]) -> None:
        """Call peers by their new names in all that is known of owners. `names`: new ones by the old."""
        for namespace, agent_id, known in self.owners():
            if ownership.renamed(known, names) != known:
                self._transition(namespace, agent_id, lambda known, _: ownership.renamed(known, names))

    # --- the source ---

    def offer(
        self,
        namespace: str,
        agent_id: str,
        peer: str,
        move_id: str,
        generation: int,
        may: May,
        is_bounded: bool = True,
    ) -> tuple[AgentRecord, Ownership]:
        """Let nobody extend the agent from now on, until it is handed over to the peer or the move is undone; returns
        the agent, which stays as it is. `is_bounded`: the peer asks, and not this store's owner. Raises NotFound,
        PermissionDenied as `may` does, ResourceExhausted (PEER_LIMIT, DISK_FULL), and FailedPrecondition (LEASE_HELD
        while an engine may extend it: that one has been asked to let go when its turn is stored; AGENT_MOVED,
        AGENT_MOVING).
        """

        def work(change: CatalogChange) -> tuple[AgentRecord, Ownership]:
            agent = change.get_agent(namespace, agent_id, self._core.config.retained_versions)
            may(agent.ownership)
            if is_bounded and agent.ownership.state is not OwnerState.MOVING:
                facts, open_moves = change.count_owners(namespace, peer)
                self._check_room_of(peer, facts + (not agent.ownership.has_part([peer], may_move=True)), open_moves + 1)
            now = self._core.now_unix_ms()
            known = ownership.offered(
                agent_id, agent.ownership, peer, move_id, generation, now, is_ordered=not is_bounded
            )
            if not agent.ownership.generation:
                change.update_agent(namespace, agent_id, {ownership.FIRST_MOVE: move_id}, None, None)
                agent = change.get_agent(namespace, agent_id, self._core.config.retained_versions)
            self._set(change, namespace, agent_id, known)
            return agent, known

        return self._changing_hands(namespace, agent_id, work, takes_back=False, frees_space=False)

    def hand_over(self, namespace: str, agent_id: str, peer: str, move_id: str, generation: int) -> Ownership:
        """The decision of a move: the agent is the peer's. Raises FailedPrecondition (MOVE_UNKNOWN)."""
        return self._transition(
            namespace,
            agent_id,
            lambda known, now: ownership.handed_over(agent_id, known, peer, move_id, generation, now),
        )

    def undo_move(self, namespace: str, agent_id: str, peer: str, move_id: str) -> Ownership:
        """This store keeps the agent, if it has not handed it over."""
        return self._transition(namespace, agent_id, lambda known, now: ownership.undone(known, peer, move_id, now))

    def take_back(self, namespace: str, agent_id: str) -> Ownership:
        """This store's owner claims an agent that it has not handed over."""
        return self._transition(namespace, agent_id, ownership.taken_back)

    # --- the destination ---

    def receive(self, namespace: str, arriving: ArrivingAgent) -> Ownership:
        """Commit all that a move brings; nobody here extends it before `arrive`. Raises FailedPrecondition
        (AGENT_MOVING, OWNER_NEWER; LEASE_HELD; BLOB_MISSING, BLOB_UNFIT), Conflict (HEAD_MOVED), InvalidArgument."""
        self._core.check_open(namespace)
        agent_id = check_agent_id(arriving.agent_id)
        commits = [self._commit_of(namespace, agent_id, line) for line in arriving.lines]

        def work(change: CatalogChange) -> Ownership:
            now = self._core.now_unix_ms()
            exists = self._exists(change, namespace, agent_id)
            known = ownership.arriving(
                agent_id,
                change.ownership_of(namespace, agent_id),
                arriving.peer,
                arriving.move_id,
                arriving.generation,
                now,
                exists=exists,
            )
            self._receive_lines(change, namespace, arriving.lines, commits, now)
            before = change.get_agent(namespace, agent_id, self._core.config.retained_versions)
            labels = {**dict.fromkeys(before.labels, ""), **arriving.labels}
            kept = arriving.retained_versions if arriving.retained_versions != before.retained_versions else None
            change.update_agent(namespace, agent_id, labels, arriving.is_pinned, kept)
            self._set(change, namespace, agent_id, known)
            return known

        return self._changing_hands(namespace, agent_id, work, takes_back=True)

    def arrive(self, namespace: str, agent_id: str, move_id: str) -> Ownership:
        """The source has handed the agent over: it is this store's. Raises FailedPrecondition (MOVE_UNKNOWN)."""
        return self._transition(
            namespace, agent_id, lambda known, now: ownership.arrived(agent_id, known, move_id, now)
        )

    def did_not_arrive(self, namespace: str, agent_id: str, move_id: str) -> Ownership:
        """The source keeps the agent. What the move brought stays, as an older copy."""
        return self._transition(namespace, agent_id, lambda known, now: ownership.did_not_arrive(known, move_id, now))

    # --- claims ---

    def claim(
        self,
        namespace: str,
        agent_id: str,
        chance: int,
        above: int = 0,
        tells: Sequence[str] = (),
        expected: Ownership | None = None,
    ) -> Ownership:
        """Take over the agent from a peer that is gone, which is fenced when it hears of the claim; see
        ownership.claimed. `expected`: the fact that the claim rests on; if it has changed, nothing is done and today's
        is returned. Raises NotFound when nothing of the agent is here and nothing is known of it."""
        self._core.check_open(namespace)
        check_agent_id(agent_id)

        def work(change: CatalogChange) -> Ownership:
            known = change.ownership_of(namespace, agent_id)
            if known == ownership.HERE:
                change.get_agent(namespace, agent_id, self._core.config.retained_versions)
            if expected is not None and known != expected:
                return known
            new = ownership.claimed(known, chance, self._core.now_unix_ms(), above, tells)
            self._set(change, namespace, agent_id, new)
            return new

        return self._core.catalog.write(namespace, work)

    def fence(self, namespace: str, agent_id: str, peer: str, generation: int, may: May) -> Ownership:
        """A peer says that an owner of this generation is known to it. Raises PermissionDenied as `may` does,
        ResourceExhausted (DISK_FULL), FailedPrecondition (OWNER_NEWER when this store knows a newer one; LEASE_HELD
        while an engine here may still extend the agent)."""

        def work(change: CatalogChange) -> Ownership:
            known = change.ownership_of(namespace, agent_id)
            may(known)
            self._check_disk()
            new = ownership.fenced(agent_id, known, peer, generation, self._core.now_unix_ms())
            self._set(change, namespace, agent_id, new)
            return new

        return self._changing_hands(namespace, agent_id, work, takes_back=True, frees_space=False)

    def told(self, namespace: str, agent_id: str, peer: str, generation: int) -> Ownership:
        """A peer has heard of this generation."""
        return self._transition(namespace, agent_id, lambda known, _: ownership.told(known, peer, generation))

    def yield_to(self, namespace: str, agent_id: str, peer: str, told: int, generation: int, may: May) -> Ownership:
        """A peer, told of a generation, knows an owner of a newer one. Raises PermissionDenied as `may` does."""

        def work(change: CatalogChange) -> Ownership:
            known, now = change.ownership_of(namespace, agent_id), self._core.now_unix_ms()
            may(known)
            new = ownership.yielded(agent_id, known, peer, told, generation, now)
            self._set(change, namespace, agent_id, new)
            return new

        return self._changing_hands(namespace, agent_id, work, takes_back=True)

    # --- inside ---

    def _receive_lines(
        self,
        change: CatalogChange,
        namespace: str,
        lines: Sequence[ArrivingLine],
        commits: Sequence[Commit],
        now_unix_ms: int,
    ) -> None:
        """Commit lines in the order of their versions at the source, so that what is the newest there is so here."""
        last = 0
        for line, asked in zip(lines, commits, strict=True):
            ours, newest = (change.newest_of(each) for each in (asked.line, LineQuery(*asked.line[:2])))
            is_last = line is lines[-1]
            if ours is not None and ours.manifest == line.manifest:
                if ours.version > last and (ours == newest or not is_last):
                    last = ours.version  # it comes back as it left
                    continue
            elif _identity(ours) != _identity(line.replaces):
                raise head_moved(_identity(ours)[0], _identity(line.replaces)[0])
            asked = replace(asked, parent_version=_identity(newest)[0])
            done = change.commit_version(asked, self._core.leases, now_unix_ms)
            self._core.report(change, namespace, [Committed(done.snapshot)])
            last = done.snapshot.version

    def _facts(
        self, find: Callable[[str, CatalogView], list[tuple[str, Ownership]]]
    ) -> list[tuple[str, str, Ownership]]:
        found = list[tuple[str, str, Ownership]]()
        for namespace in self._core.sound_namespaces():
            with contextlib.suppress(FailedPrecondition):  # sealed, and without its key here
                self._core.check_open(namespace)
                facts = self._core.catalog.read(namespace, partial(find, namespace))
                found += [(namespace, *each) for each in facts]
        return found

    def _check_writable(self, change: CatalogChange, namespace: str, agent_id: str) -> None:
        """Raises FailedPrecondition (AGENT_MOVED, AGENT_MOVING)."""
        ownership.check_writable(agent_id, change.ownership_of(namespace, agent_id))

    def _transition(self, namespace: str, agent_id: str, step: Callable[[Ownership, int], Ownership]) -> Ownership:
        self._core.check_open(namespace)
        check_agent_id(agent_id)

        def work(change: CatalogChange) -> Ownership:
            new = step(change.ownership_of(namespace, agent_id), self._core.now_unix_ms())
            self._set(change, namespace, agent_id, new)
            return new

        return self._core.catalog.write(namespace, work, frees_space=True)

    def _changing_hands(
        self,
        namespace: str,
        agent_id: str,
        work: Callable[[CatalogChange], _Answer],
        *,
        takes_back: bool,
        frees_space: bool = True,
    ) -> _Answer:
        """As `_taking_back`; but where the memory is not taken back, an engine may first store its turn."""
        self._core.check_open(namespace)
        check_agent_id(agent_id)
        return self._taking_back(LineQuery(namespace, agent_id), work, frees_space=frees_space, at_once=takes_back)

    def _check_room_of(self, peer: str, facts: int, open_moves: int) -> None:
        """Raises ResourceExhausted: PEER_LIMIT, DISK_FULL."""
        if facts > MAX_FACTS:
            raise over_limit(peer, "facts about owners")
        if open_moves > MAX_OPEN_MOVES:
            raise over_limit(peer, "open moves")
        self._check_disk()

    def _check_disk(self) -> None:
        """A peer's word is written beside what must stay free. Raises ResourceExhausted (DISK_FULL)."""
        if self._core.space.is_disk_full:
            text = "disk: no room for a peer's word beside what must stay free"
            raise ResourceExhausted(text, reason="DISK_FULL", retry_after_s=60)

    def _set(self, change: CatalogChange, namespace: str, agent_id: str, known: Ownership) -> None:
        if known != change.ownership_of(namespace, agent_id):
            change.set_ownership(namespace, agent_id, known)
            self._core.report(change, namespace, [AgentUpdated(agent_id)])

    def _exists(self, change: CatalogChange, namespace: str, agent_id: str) -> bool:
        try:
            change.get_agent(namespace, agent_id, self._core.config.retained_versions)
        except NotFound:
            return False
        return True

    def _commit_of(self, namespace: str, agent_id: str, line: ArrivingLine) -> Commit:
        facts = read_manifest(self._core.read_blob(namespace, line.manifest))
        return Commit(
            LineKey(namespace, agent_id, facts.kv_identity_hash),
            line.manifest,
            facts,
            0,  # as `_receive_lines` finds it
            None,
            Origin.MOVE,
            line.origin_detail,
            (),
            self._core.config.retained_versions,
            is_text_own=line.is_text_own,
        )


def _identity(version: SnapshotVersion | None) -> tuple[int, Digest | None]:
    return (version.version, version.manifest) if version else (0, None)
