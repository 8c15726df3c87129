"""The steps of a move at both ends; repeating one changes nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvasir.formats.digest import Digest
from kvasir.names import check_agent_id

from cachestore_svc.blobs.manifests import read_manifest
from cachestore_svc.core.core import Core
from cachestore_svc.core.stored_blobs import read_blob
from cachestore_svc.facts import ownership
from cachestore_svc.facts.ownership import Ownership, OwnerState
from cachestore_svc.facts.records import AgentRecord, Committed, LineKey, LineQuery, Origin, SnapshotVersion, with_wake
from cachestore_svc.index.catalog import CatalogChange, end_order, give_order, has_order
from cachestore_svc.index.refusals import head_moved
from cachestore_svc.index.values import Commit, CommitTerms
from cachestore_svc.pairing.rights import MAX_FACTS, MAX_OPEN_MOVES, May, over_limit
from cachestore_svc.store.leases import Leases
from cachestore_svc.store.owners import OwnerChanges


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
    agent_id: str
    peer: str
    move_id: str
    generation: int
    lines: Sequence[ArrivingLine]  # in the order of their versions at the source
    labels: Mapping[str, str]
    is_pinned: bool
    retained_versions: int


class MoveSteps:
    def __init__(self, core: Core, leases: Leases, changes: OwnerChanges) -> None:
        self._core = core
        self._leases = leases
        self._changes = changes

    # --- the source ---

    def order(self, namespace: str, agent_id: str, peer: str, number: str) -> None:
        """Let all stores over a shared catalog know for a while that this store's owner gives an agent to a peer."""
        self._core.write(namespace, lambda change: give_order(change, agent_id, peer, number))

    def end_order(self, namespace: str, agent_id: str, peer: str, number: str) -> None:
        self._core.write(namespace, lambda change: end_order(change, agent_id, peer, number))

    def is_ordered(self, namespace: str, agent_id: str, peer: str) -> bool:
        """Whether the owner of any store over a shared catalog gives the agent to the peer now."""
        return self._core.read(namespace, lambda view: has_order(view, agent_id, peer))

    def offer(
        self, namespace: str, agent_id: str, peer: str, move_id: str, generation: int, may: May, is_bounded: bool = True
    ) -> tuple[AgentRecord, Ownership]:
        """Let nobody extend the agent from now on, until it is handed over to the peer or the move is undone; returns
        the agent, which stays as it is. `is_bounded`: the peer asks, and not this store's owner. Raises NotFound,
        PermissionDenied as `may` does, ResourceExhausted (PEER_LIMIT, DISK_FULL), and FailedPrecondition (LEASE_HELD
        while an engine may extend it: that one has been asked to let go when its turn is stored; AGENT_MOVED,
        AGENT_MOVING).
        """

        def work(change: CatalogChange) -> tuple[AgentRecord, Ownership]:
            agent = change.get_agent(agent_id, self._core.config.retained_versions)
            may(agent.ownership)
            if is_bounded and agent.ownership.state is not OwnerState.MOVING:
                facts, open_moves = change.count_owners(peer)
                self._check_room_of(peer, facts + (not agent.ownership.has_part([peer], may_move=True)), open_moves + 1)
            now = self._core.now_unix_ms()
            known = ownership.offered(
                agent_id, agent.ownership, peer, move_id, generation, now, is_ordered=not is_bounded
            )
            if not agent.ownership.generation:
                change.update_agent(agent_id, {ownership.FIRST_MOVE: move_id}, None, None)
                agent = change.get_agent(agent_id, self._core.config.retained_versions)
            self._changes.note(change, namespace, agent_id, known)
            if known == agent.ownership and known.state is OwnerState.MOVING and self._core.catalog.is_shared:
                # Another store may look after the move: by this it hears that the peer goes on.
                change.set_ownership(agent_id, replace(known, since_unix_ms=now))
            return agent, known

        return self._leases.taking_back(namespace, agent_id, work, at_once=False)

    def hand_over(self, namespace: str, agent_id: str, peer: str, move_id: str, generation: int, may: May) -> Ownership:
        """The decision of a move: the agent is the peer's. Raises FailedPrecondition (MOVE_UNKNOWN), and as `may`
        does unless it was decided before."""

        def decided(known: Ownership, now_unix_ms: int) -> Ownership:
            after = ownership.handed_over(agent_id, known, peer, move_id, generation, now_unix_ms)
            if after is not known:
                may(known)
            return after

        return self._changes.step(namespace, agent_id, decided)

    def undo(self, namespace: str, agent_id: str, peer: str, move_id: str) -> Ownership:
        return self._changes.step(namespace, agent_id, lambda known, now: ownership.undone(known, peer, move_id, now))

    def take_back(self, namespace: str, agent_id: str) -> Ownership:
        """This store's owner claims an agent that it has not handed over."""
        return self._changes.step(namespace, agent_id, ownership.taken_back)

    # --- the destination ---

    def receive(self, namespace: str, arriving: ArrivingAgent) -> Ownership:
        """Commit all that a move brings; nobody here extends it before `arrive`. Raises FailedPrecondition
        (AGENT_MOVING, OWNER_NEWER; LEASE_HELD; BLOB_MISSING, BLOB_UNFIT), Conflict (HEAD_MOVED), InvalidArgument."""
        agent_id = check_agent_id(arriving.agent_id)
        commits = [self._commit_of(namespace, agent_id, line) for line in arriving.lines]

        def work(change: CatalogChange) -> Ownership:
            now = self._core.now_unix_ms()
            known, exists = change.ownership_of(agent_id), change.newest_of(LineQuery(agent_id)) is not None
            move = arriving.peer, arriving.move_id, arriving.generation
            known = ownership.arriving(agent_id, known, *move, now, exists=exists)
            newest = self._receive_lines(change, namespace, arriving.lines, commits, now)
            before = change.get_agent(agent_id, self._core.config.retained_versions)
            labels = {**dict.fromkeys(before.labels, ""), **arriving.labels}
            kept = arriving.retained_versions if arriving.retained_versions != before.retained_versions else None
            change.update_agent(agent_id, labels, arriving.is_pinned, kept)
            known = ownership.received(known, newest)
            self._changes.note(change, namespace, agent_id, known)
            return known

        return self._leases.taking_back(namespace, agent_id, work, frees_space=True)

    def arrive(self, namespace: str, agent_id: str, move_id: str) -> Ownership:
        """The source has handed the agent over: it is this store's. Raises FailedPrecondition (MOVE_UNKNOWN)."""
        return self._changes.step(
            namespace, agent_id, lambda known, now: ownership.arrived(agent_id, known, move_id, now)
        )

    def did_not_arrive(self, namespace: str, agent_id: str, move_id: str) -> Ownership:
        """The source keeps the agent. What the move brought stays, as an older copy."""
        return self._changes.step(namespace, agent_id, lambda known, now: ownership.did_not_arrive(known, move_id, now))

    # --- inside ---

    def _receive_lines(
        self,
        change: CatalogChange,
        namespace: str,
        lines: Sequence[ArrivingLine],
        commits: Sequence[Commit],
        now_unix_ms: int,
    ) -> int:
        """Commit lines in the order of their versions at the source; the number of the newest here."""
        last = 0
        for line, asked in zip(lines, commits, strict=True):
            ours, newest = (change.newest_of(each) for each in (asked.line, LineQuery(asked.line.agent_id)))
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
        return last

    def _check_room_of(self, peer: str, facts: int, open_moves: int) -> None:
        if facts > MAX_FACTS:
            raise over_limit(peer, "facts about owners")
        if open_moves > MAX_OPEN_MOVES:
            raise over_limit(peer, "open moves")
        self._changes.check_disk()

    def _commit_of(self, namespace: str, agent_id: str, line: ArrivingLine) -> Commit:
        facts = read_manifest(read_blob(self._core, namespace, line.manifest))
        return Commit(
            LineKey(namespace, agent_id, facts.kv_identity_hash),
            line.manifest,
            facts,
            0,  # as `_receive_lines` finds it
            CommitTerms(
                origin=Origin.MOVE,
                origin_detail=with_wake(line.origin_detail, facts.wake_ms),
                is_text_own=line.is_text_own,
            ),
            (),
            self._core.config.retained_versions,
        )


def _identity(version: SnapshotVersion | None) -> tuple[int, Digest | None]:
    return (version.version, version.manifest) if version else (0, None)
