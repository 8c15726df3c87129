"""The owner of an agent: the one fact that decides which store may extend its memory, and how it changes hands. Pure.

A move goes from a source to a destination. The source's fact alone decides: the destination owns the agent only after
the source has answered MOVED for that move. Between the first step and the last nobody may write, and two never may.

    source       OWNED ── offered ──▶ MOVING ── handed_over ──▶ MOVED
                   ▲───── undone ───────┘
    destination  OWNED (no agent yet, or an older copy) or MOVED ── arriving ──▶ ARRIVING ── arrived ──▶ OWNED
                   ▲──────────────────── did_not_arrive ───────────┘

`claimed` is for a store that is gone. Its generation is above all that moves can reach: it fences every store that
learns of it and has a lower one, and ends the bonds of all peers with the agent (`pairing.rights`). An agent of which a
store has no fact is OWNED in generation 0. Facts outlive their agents.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from kvasir.errors import AlreadyExists, FailedPrecondition, InvalidArgument, PermissionDenied

# A move adds 1 to a generation; a claim begins the next multiple of this. Above it, chance keeps two claims apart.
CLAIM_STEP = 1 << 40
MAX_CLAIM_CHANCE = 1 << 20
MAX_GENERATION = 1 << 62
# The highest generation that another store is believed: a claim here must find room above it, and be announced.
MAX_TOLD_GENERATION = MAX_GENERATION - (1 << 50)
# So many claims that it has not heard of may another store be believed at once: claims are made by hand.
MAX_UNHEARD_CLAIMS = 64

_OFFERED = "?"  # after a peer's name in `had_by`: it was offered the agent, and never given it
# In `had_by`, how its last move brought the agent: its newest version then, and the peer that gave it.
_CAME = re.compile(r"(=(\d+)=)(.+)")

# The label that a first move gives an agent: that move's id. Moves carry it as they carry every label.
FIRST_MOVE = "kvasir.first_move"


class OwnerState(IntEnum):
    """Numbers are those of the wire."""

    OWNED = 1
    MOVING = 2
    MOVED = 3
    ARRIVING = 4


@dataclass(frozen=True, slots=True)
class Ownership:
    state: OwnerState = OwnerState.OWNED
    generation: int = 0  # rises whenever the agent changes hands; never goes back
    peer: str = ""  # where it goes, went, or comes from
    move_id: str = ""  # of the last move
    since_unix_ms: int = 0
    was_owned: bool = False  # ARRIVING: its state again if the move is undone
    tells: tuple[str, ...] = ()  # peers that have yet to hear of this generation, sorted
    had_by: tuple[str, ...] = ()  # peers that had it since the last claim here, or were offered it, sorted; and `_CAME`

    @property
    def is_owned(self) -> bool:
        return self.state is OwnerState.OWNED

    @property
    def is_on_its_way(self) -> bool:
        """Whether nobody may extend or delete it before a source has decided."""
        return self.state in (OwnerState.MOVING, OwnerState.ARRIVING)

    def has_part(self, peers: Collection[str], *, may_move: bool) -> bool:
        """Whether one of these names had the agent since the last claim here, or may have been given it."""
        return any(name in peers for name in (_name_of(each) if may_move else each for each in self.had_by))

    @property
    def came(self) -> tuple[str, int]:
        """The peer that gave the agent by the last move, and its newest version then; ("", 0) of other agents."""
        for each in self.had_by if self.is_owned and self.move_id else ():
            if found := _CAME.fullmatch(each):
                return found[3], int(found[2])
        return "", 0

    @property
    def waits_for_claim(self) -> bool:
        """Whether it came back from a loss of the index that may have lost its last move, too."""
        return self.state is OwnerState.MOVING and not self.peer


HERE = Ownership()


def check_writable(agent_id: str, known: Ownership) -> None:
    """Raises FailedPrecondition (AGENT_MOVED, AGENT_MOVING) unless this store may extend the agent's memory."""
    if known.state is OwnerState.MOVED:
        back = f"call that store, or move it back with `kvasir agents move {agent_id} --from {known.peer}`"
        raise _refusal("AGENT_MOVED", agent_id, known, f" has moved to {known.peer}: {back}")
    if known.waits_for_claim:
        problem = " came back from `kvasir store recover`, which cannot tell whether it had moved"
        claim = f"`kvasir agents claim {agent_id}` asks the peers, and makes it this store's if none owns it"
        raise _refusal("AGENT_MOVING", agent_id, known, f"{problem}: {claim}")
    if not known.is_owned:
        way = "to" if known.state is OwnerState.MOVING else "from"
        raise _refusal("AGENT_MOVING", agent_id, known, f" is on its way {way} {known.peer}")


def check_came_by(agent_id: str, known: Ownership, move_id: str) -> None:
    """Raises FailedPrecondition (MOVE_UNKNOWN) unless the agent's last move was this one."""
    if known.move_id != move_id:
        raise _refusal("MOVE_UNKNOWN", agent_id, known, f" is here, but by another move than {move_id}")


def check_takes_copy(agent_id: str, known: Ownership, generation: int | None) -> None:
    """As `check_writable`; but a copy takes what the owner of `generation` gives; None: it comes from elsewhere."""
    if known.state is not OwnerState.MOVED or generation is None or generation < known.generation:
        check_writable(agent_id, known)


# --- another store's word ---


def is_believable(known: Ownership, generation: int) -> bool:
    """Whether another store may have come to this generation by claims: a liar's would leave none above it."""
    most = (known.generation // CLAIM_STEP + MAX_UNHEARD_CLAIMS + 1) * CLAIM_STEP
    return 0 <= generation < min(most, MAX_TOLD_GENERATION + 1)


def _check_believable(agent_id: str, known: Ownership, peer: str, generation: int) -> None:
    """Raises PermissionDenied (PEER_MAY_NOT)."""
    if not is_believable(known, generation):
        raise PermissionDenied(
            f"agent {agent_id!r}, peer {peer}: no claims can have led from generation {known.generation}, which this "
            f"store knows, to {generation}",
            reason="PEER_MAY_NOT",
            metadata={"agent_id": agent_id, "generation": str(known.generation)},
        )


# --- which agent it is ---


def are_two(ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Whether agents of one name are surely two: each moved first by another move, as their labels show."""
    one, other = ours.get(FIRST_MOVE), theirs.get(FIRST_MOVE)
    return bool(one and other and one != other)


def check_stays_itself(before: Mapping[str, str], labels: Mapping[str, str]) -> None:
    """Raises InvalidArgument for new labels by which an agent would be taken for another, or for none."""
    is_it = before.get(FIRST_MOVE, "")
    if labels.get(FIRST_MOVE, is_it) != is_it:
        raise InvalidArgument.of(
            f"labels.{FIRST_MOVE}", "expected it left out or unchanged: stores give it, and know the agent by it"
        )


# --- the source ---


def offered(
    agent_id: str,
    known: Ownership,
    peer: str,
    move_id: str,
    generation: int,
    now_unix_ms: int,
    *,
    is_ordered: bool = False,
) -> Ownership:
    """The fact after `peer`, which knows `generation`, has requested the agent. A repeated request goes on with the
    same move, a new one of the same peer replaces its earlier move. Unchanged if the move was handed over already.
    Each move that begins raises the generation, and none begins by an offer from before: so none begins twice.
    `is_ordered`: this store's owner gives it, also to a store that once claimed it. Raises FailedPrecondition
    (MOVE_UNKNOWN for one that ended), PermissionDenied (PEER_MAY_NOT) for a generation that is not to be believed.
    """
    is_on_its_way_there = known.state is OwnerState.MOVING and known.peer == peer
    if (is_on_its_way_there or known.state is OwnerState.MOVED) and (known.peer, known.move_id) == (peer, move_id):
        return known
    if not is_on_its_way_there:
        check_writable(agent_id, known)
    if generation < known.generation or known.move_id == move_id:
        raise _not_under_way(agent_id, known)
    if generation > known.generation:
        if not is_ordered:  # this store has been replaced, and is to be fenced first
            raise outranked_by(agent_id, known)
        _check_believable(agent_id, known, peer, generation)
    peers = known.tells, _with(gone(known).had_by, peer, is_only_offered=not is_ordered)
    return Ownership(OwnerState.MOVING, generation + 1, peer, move_id, now_unix_ms, False, *peers)


def handed_over(
    agent_id: str, known: Ownership, peer: str, move_id: str, generation: int, now_unix_ms: int
) -> Ownership:
    """The decision: from now on the agent is the peer's. `generation`: of the offer whose content the peer has
    received; a later offer may hold more. Raises FailedPrecondition (MOVE_UNKNOWN) for every move but the one that is
    under way or was the last."""
    if (known.peer, known.move_id, known.generation) == (peer, move_id, generation):
        if known.state is OwnerState.MOVED:
            return known
        if known.state is OwnerState.MOVING:
            had_by = _with(known.had_by, peer)
            return replace(known, state=OwnerState.MOVED, since_unix_ms=now_unix_ms, had_by=had_by)
    raise _not_under_way(agent_id, known)


def undone(known: Ownership, peer: str, move_id: str, now_unix_ms: int) -> Ownership:
    """The fact without a move that was not handed over, whose id is never taken again; else unchanged."""
    if known.state is not OwnerState.MOVING or (known.peer, known.move_id) != (peer, move_id):
        return known
    return replace(known, state=OwnerState.OWNED, peer="", since_unix_ms=now_unix_ms)


def taken_back(known: Ownership, now_unix_ms: int) -> Ownership:
    """The fact once its owner claimed an agent that was not handed over: no peer has a part in it from now on."""
    kept = undone(known, known.peer, known.move_id, now_unix_ms)
    return replace(kept, had_by=()) if kept.is_owned else kept


# --- the destination ---


def arriving(
    agent_id: str, known: Ownership, peer: str, move_id: str, generation: int, now_unix_ms: int, *, exists: bool
) -> Ownership:
    """The fact when all of the agent is here and the source has not decided yet. `exists`: there is an agent here.
    Raises FailedPrecondition (AGENT_MOVING, AGENT_MOVED when this store knows a newer owner), PermissionDenied
    (PEER_MAY_NOT) for a generation that is not to be believed."""
    if known.state is OwnerState.ARRIVING and (known.peer, known.move_id) == (peer, move_id):
        return known
    if known.is_on_its_way:
        check_writable(agent_id, known)
    if generation <= known.generation:
        raise outranked_by(agent_id, known)
    _check_believable(agent_id, known, peer, generation)
    was_owned = known.is_owned and exists
    tells, had_by = _who_may_count_on(known, peer), _with(known.had_by, peer)
    return Ownership(OwnerState.ARRIVING, generation, peer, move_id, now_unix_ms, was_owned, tells, had_by)


def received(known: Ownership, version: int) -> Ownership:
    """The fact of an arriving agent whose newest version is here. It may be an older one that the move brought back."""
    return replace(known, had_by=_with(gone(known).had_by, f"={version}={known.peer}"))


def arrived(agent_id: str, known: Ownership, move_id: str, now_unix_ms: int) -> Ownership:
    """The fact once the source has handed the agent over. Raises FailedPrecondition if this store gave the move up."""
    if known.move_id != move_id or known.state not in (OwnerState.ARRIVING, OwnerState.OWNED):
        raise _not_under_way(agent_id, known)
    if known.is_owned:
        return known
    return replace(known, state=OwnerState.OWNED, peer="", was_owned=False, since_unix_ms=now_unix_ms)


def did_not_arrive(known: Ownership, move_id: str, now_unix_ms: int) -> Ownership:
    """The fact once the source has refused to hand over. A first copy of the source's is its own now, as it reports."""
    if known.state is not OwnerState.ARRIVING or known.move_id != move_id:
        return known
    state = OwnerState.OWNED if known.was_owned else OwnerState.MOVED
    peer = "" if known.was_owned else known.peer
    return replace(known, state=state, peer=peer, move_id="", was_owned=False, since_unix_ms=now_unix_ms)


def gone(known: Ownership) -> Ownership:
    """The fact once what came by the last move is not here any more."""
    return replace(known, had_by=tuple(each for each in known.had_by if not _CAME.fullmatch(each)))


# --- claims ---


def claimed(known: Ownership, chance: int, now_unix_ms: int, above: int = 0, tells: Sequence[str] = ()) -> Ownership:
    """The fact after a claim: OWNED here, and above every generation that moves can have reached. `chance`: a random
    number, so that two claims at two places are not of one generation. `above`: a generation that a peer has heard of.
    `tells`: further peers that are to hear of the claim."""
    step = (max(known.generation, above) // CLAIM_STEP + 1) * CLAIM_STEP
    generation = step + (chance % MAX_CLAIM_CHANCE) * MAX_CLAIM_CHANCE
    who = tuple(sorted({*_who_may_count_on(known, ""), *tells}))
    return Ownership(OwnerState.OWNED, generation, "", "", now_unix_ms, tells=who)


def fenced(agent_id: str, known: Ownership, peer: str, generation: int, now_unix_ms: int) -> Ownership:
    """The fact after `peer` has reported that the agent's owner is of `generation`. Stores that may still count on the
    older owner hear of it next. Raises FailedPrecondition (OWNER_NEWER) when this store knows a newer one,
    PermissionDenied (PEER_MAY_NOT) for a generation that is not to be believed."""
    if known.state is OwnerState.MOVED and known.generation == generation:
        return known
    if generation <= known.generation:
        raise outranked_by(agent_id, known)
    _check_believable(agent_id, known, peer, generation)
    tells, had_by = _who_may_count_on(known, peer), _with(known.had_by, peer)
    return Ownership(OwnerState.MOVED, generation, peer, "", now_unix_ms, tells=tells, had_by=had_by)


def yielded(
    agent_id: str, known: Ownership, peer: str, known_generation: int, generation: int, now_unix_ms: int
) -> Ownership:
    """The fact once a peer has answered that it knows an owner of `generation`. Raises PermissionDenied."""
    if known.generation != known_generation:
        return known
    _check_believable(agent_id, known, peer, generation)
    rest = {other for other in known.tells if other != peer}
    if known.state is OwnerState.MOVED and generation > known.generation:
        rest |= {known.peer} - {peer, ""}  # it counts on the older owner, or is it
    newest, had_by = max(generation, known.generation), _with(known.had_by, peer)
    return Ownership(OwnerState.MOVED, newest, peer, "", now_unix_ms, tells=tuple(sorted(rest)), had_by=had_by)


def told(known: Ownership, peer: str, known_generation: int) -> Ownership:
    if known.generation != known_generation:
        return known
    return replace(known, tells=tuple(other for other in known.tells if other != peer))


def renamed(known: Ownership, names: Mapping[str, str]) -> Ownership:
    def today(each: str) -> str:
        came = found[1] if (found := _CAME.fullmatch(each)) else ""
        peer = _name_of(each.removeprefix(came))
        return came + names.get(peer, peer) + each.removeprefix(came + peer)

    tells, had_by = (tuple(sorted({*map(today, each)})) for each in (known.tells, known.had_by))
    return replace(known, peer=names.get(known.peer, known.peer), tells=tells, had_by=had_by)


def had_before(state: int, peer: str, move_id: str, came_from: Iterable[str]) -> str:
    """`had_by` of a fact that was written before it was kept: whom the fact names, and whom moves came from.
    `came_from`: the origins of those moves, as "peer/agent@1", or sealed. After a claim nobody."""
    if state == OwnerState.OWNED and not move_id:
        return ""
    return " ".join(sorted({peer, *(origin.partition("/")[0] for origin in came_from if "/" in origin)} - {""}))


def _with(peers: tuple[str, ...], peer: str, *, is_only_offered: bool = False) -> tuple[str, ...]:
    if is_only_offered:
        return peers if peer in peers else tuple(sorted({*peers, peer + _OFFERED}))
    return tuple(sorted({*peers, peer} - {peer + _OFFERED}))


def _name_of(peer: str) -> str:
    return peer.removesuffix(_OFFERED)


def _who_may_count_on(known: Ownership, but_not: str) -> tuple[str, ...]:
    """Peers that must hear of a newer owner: those in this store's fact, and those that wait for the news anyway."""
    named = {known.peer} if not known.is_owned else set()
    return tuple(sorted({*named, *known.tells} - {but_not, ""}))


def outranked_by(agent_id: str, known: Ownership) -> FailedPrecondition:
    newer = f": this store knows a newer owner (generation {known.generation})"
    return _refusal("OWNER_NEWER", agent_id, known, newer)


def _not_under_way(agent_id: str, known: Ownership) -> FailedPrecondition:
    return _refusal("MOVE_UNKNOWN", agent_id, known, ": this move is not under way here any more")


def owned_here(agent_id: str) -> AlreadyExists:
    """The refusal of a move or a copy onto an agent of this store that is no older version of the arriving one."""
    return AlreadyExists(
        f"agent {agent_id!r} exists here and is another memory: remove or fork it first", reason="NOT_AN_ANCESTOR"
    )


def _refusal(reason: str, agent_id: str, known: Ownership, words: str) -> FailedPrecondition:
    facts = {"agent_id": agent_id, "owner": known.peer, "generation": str(known.generation)}
    return FailedPrecondition(f"agent {agent_id!r}{words}", reason=reason, metadata=facts)
