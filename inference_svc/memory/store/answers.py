"""What the cache store answers, in the engine's words: versions, leases, events, prefixes, and why a read failed."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvasir import errors, on_full, volatile
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.digest import Digest

from inference_svc.memory.outcomes import Miss, MissReason
from inference_svc.memory.stored_windows import FoundPrefix, blocks_seen, stored_windows

# Short, because a rollback waits so long for an engine that died or cannot be reached. Long enough that a store which
# restarts, or a machine that stalls for a second or two, does not cost hot agents their memory.
LEASE_TTL_S = 5.0


class StoreMiss(Exception):
    def __init__(self, miss: Miss) -> None:
        super().__init__(miss.detail)
        self.miss = miss


class Version(NamedTuple):
    """A version of a line. Number 0 without a manifest: the line has none."""

    number: int
    manifest: Digest | None

    def is_behind(self, known: "Version") -> bool:
        """Whether it cannot follow a version that is known: numbers of an agent only rise."""
        return self != known and self.number <= known.number


@dataclass(frozen=True, slots=True)
class Head:
    """A version of an agent, mostly its newest. Version 0 with no manifest: there is none."""

    version: int
    manifest: Digest | None
    parent_version: int
    kv_identity_hash: str = ""
    is_brought: bool = False  # it has rows from an archive or another store: no engine of this store computed them
    is_text_own: bool = True  # its text came by no archive and no copy, at most by a move from its owner
    is_of_turn: bool = True  # a turn made it: no rollback, fork, import or pull

    @property
    def identity(self) -> Version:
        return Version(self.version, self.manifest)


NO_HEAD = Head(0, None, 0)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The settings of its turns that an agent's labels have. Empty: none."""

    on_full: str = ""
    volatile: str = ""


NO_SETTINGS = AgentSettings()


@dataclass(frozen=True, slots=True)
class AgentHeads:
    """The agent's newest version, and that of the line of this KV identity, where the agent's is of another."""

    newest: Head = NO_HEAD
    own_line: Head | None = None
    settings: AgentSettings = NO_SETTINGS
    made_unix_ms: int = 0  # the agent, by the store's clock


@dataclass(frozen=True, slots=True)
class LastMove:
    """How an agent came to this store, and whether it is as it came."""

    move_id: str  # of its last move, in or out; empty: it never moved
    is_owned: bool = False
    given_by: str = ""  # the peer that gave it by that move, as it is; empty: it went on since, or is not owned here
    brought_by: str = ""  # the peer that gave its newest version, by a move or a pull; empty: it was made here
    newest: Head = NO_HEAD
    settings: AgentSettings = NO_SETTINGS


NEVER_MOVED = LastMove("")


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    generation: int
    head: Head


@dataclass(frozen=True, slots=True)
class LeaseRenewal:
    """Agents whose leases were lost, and agents whose leases were prolonged while other engines wait for them."""

    lost: frozenset[str]
    wanted: frozenset[str]


@dataclass(frozen=True, slots=True)
class LeaseWanted:
    agent_id: str
    kv_identity_hash: str
    takes_back: bool


@dataclass(frozen=True, slots=True)
class HeadMoved:
    agent_id: str
    head: Head


@dataclass(frozen=True, slots=True)
class AgentGone:
    agent_id: str


@dataclass(frozen=True, slots=True)
class EventsLost:
    """Events were lost: the store cannot repeat them."""


class EventCursor(NamedTuple):
    incarnation: str
    sequence: int


StoreEvent = LeaseWanted | HeadMoved | AgentGone | EventsLost


def head_of(snapshot: cachestore_pb2.SnapshotVersion) -> Head:
    return Head(
        snapshot.version,
        Digest.from_proto(snapshot.manifest),
        snapshot.parent_version,
        snapshot.kv_identity_hash,
        is_brought=snapshot.is_brought,
        is_text_own=snapshot.is_text_own or not snapshot.is_brought,
        is_of_turn=snapshot.origin == cachestore_pb2.ORIGIN_TURN,
    )


def last_move_of(agent: cachestore_pb2.Agent) -> LastMove:
    """From the store's answer; where an older store names no giver, the newest version does, if a move made it."""
    newest = max(agent.lines, key=lambda line: int(line.version), default=cachestore_pb2.SnapshotVersion())
    is_moved = newest.origin == cachestore_pb2.ORIGIN_MOVE
    is_brought = is_moved or newest.origin == cachestore_pb2.ORIGIN_PULL
    brought_by = newest.origin_detail.rpartition(f"/{agent.agent_id}@")[0] if is_brought else ""
    known = agent.ownership
    return LastMove(
        known.move_id,
        not agent.HasField("ownership") or known.state == cachestore_pb2.OWNER_STATE_OWNED,
        known.given_by or (brought_by if is_moved else ""),
        brought_by,
        head_of(newest) if agent.lines else NO_HEAD,
        settings_of(agent),
    )


@dataclass(frozen=True, slots=True)
class ListedAgent:
    """An agent as a list has it, by its newest version."""

    agent_id: str
    version: int  # 0: it has none
    tokens: int
    kv_identity_hash: str
    used_unix_ms: int
    is_asleep: bool  # its manifest names no blob
    is_free: bool  # this store owns it, and it is not pinned
    request_id: str = ""  # of the turn that made its newest version


def listed_agent(agent: cachestore_pb2.Agent) -> ListedAgent:
    newest = max(agent.lines, key=lambda line: int(line.version), default=cachestore_pb2.SnapshotVersion())
    is_owned = not agent.HasField("ownership") or agent.ownership.state == cachestore_pb2.OWNER_STATE_OWNED
    return ListedAgent(
        agent.agent_id,
        int(newest.version),
        int(newest.token_count),
        newest.kv_identity_hash,
        agent.used_at.ToMilliseconds(),
        is_asleep=newest.total_bytes == newest.manifest.size_bytes,
        is_free=is_owned and not agent.is_pinned,
        request_id=newest.request_id,
    )


def settings_of(agent: cachestore_pb2.Agent) -> AgentSettings:
    return AgentSettings(agent.labels.get(on_full.LABEL, ""), agent.labels.get(volatile.LABEL, ""))


def event_of(response: cachestore_pb2.WatchEventsResponse) -> StoreEvent | None:
    match response.WhichOneof("event"):
        case "lease_wanted":
            wanted = response.lease_wanted
            return LeaseWanted(wanted.agent_id, wanted.kv_identity_hash, wanted.takes_back)
        case "committed":
            return HeadMoved(response.committed.agent_id, head_of(response.committed))
        case "agent_deleted":
            return AgentGone(response.agent_deleted.agent_id)
        case "lost":
            return EventsLost()
        case _:
            return None


def takes_back(response: cachestore_pb2.WatchEventsResponse, agent_id: str) -> bool:
    """Whether the event is a change of the agent that is no turn, or may stand for one."""
    match response.WhichOneof("event"):
        case "lost":
            return True
        case "agent_deleted":
            return response.agent_deleted.agent_id == agent_id
        case "committed":
            made = response.committed
            return made.agent_id == agent_id and made.origin != cachestore_pb2.ORIGIN_TURN
        case _:
            return False


def moves(response: cachestore_pb2.WatchEventsResponse, agent_id: str, own: Collection[Digest]) -> bool:
    """Whether the event is a new version of the agent, with none of the manifests `own`."""
    made = response.committed
    if response.WhichOneof("event") != "committed" or made.agent_id != agent_id:
        return False
    return made.manifest.hash not in {each.hash for each in own}


@contextlib.contextmanager
def answer_checked(what: str) -> Iterator[None]:
    """A malformed answer of the store is a miss too."""
    try:
        yield
    except ValueError as error:
        raise StoreMiss(Miss(MissReason.STORE_REFUSED, f"{what} is malformed: {error}")) from error


_REASONS: tuple[tuple[type[Exception], MissReason], ...] = (
    (errors.Unavailable, MissReason.STORE_UNREACHABLE),
    (errors.DeadlineExceeded, MissReason.STORE_TIMEOUT),
    (errors.NotFound, MissReason.BLOB_MISSING),
    (errors.DataLoss, MissReason.BLOB_DAMAGED),
)


def found_prefix(answer: cachestore_pb2.FindPrefixResponse, groups: Sequence[int], most: int) -> FoundPrefix:
    """The store's answer for these groups and `most` block hashes. Raises ValueError unless it can be one."""
    count = int(answer.tokens) // BLOCK_TOKENS
    if not count:
        return FoundPrefix()
    windows = stored_windows(answer.windows)
    has_all = len(answer.blocks) == (count if 0 in groups else 0)
    is_whole = all(stored.full == {*blocks_seen(window, int(answer.tokens))} for window, stored in windows.items())
    if count > most or not has_all or not is_whole or list(windows) != [group for group in groups if group]:
        raise ValueError("FindPrefix: the answer is not a prefix of the requested groups")
    return FoundPrefix(count * BLOCK_TOKENS, tuple(map(Digest.from_proto, answer.blocks)), windows)


def miss_of(error: Exception) -> Miss:
    if isinstance(error, errors.KvasirError) and error.reason == "NAMESPACE_SEALED":
        return Miss(MissReason.STORE_REFUSED, error.message, is_sealed=True)
    reason = next((reason for kind, reason in _REASONS if isinstance(error, kind)), MissReason.STORE_REFUSED)
    named = error.metadata.get("digest", "") if isinstance(error, errors.KvasirError) else ""
    return Miss(reason, f"{type(error).__name__}{f' (blob {named[:12]}…)' if named else ''}")
