"""The words that a peer may send about an agent: the table of the protocol between two stores, and its one check.
Rights are per namespace and direction; a word has an effect only in some states of an agent, and some words only from a
peer with a bond. A walk with a lying peer compares the stores with `EFFECTS`. Pure.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from kvasir.errors import InvalidArgument, PermissionDenied, ResourceExhausted
from kvasir.names import RESERVED_PREFIXES, check_namespace

from cachestore_svc.facts.ownership import Ownership, OwnerState


class Gives(IntEnum):
    """What a peer may do with the agents of a namespace here. Each right includes those before it."""

    READ = 1
    MOVE = 2  # take agents away
    CLAIM = 3  # be believed when it claims an agent that ever changed hands, also after a claim here


class Takes(IntEnum):
    """What this store takes from a peer that acts of its own accord."""

    NOTHING = 0
    COPY = 1
    MOVE = 2  # agents, to own them; a peer that may give them may give copies


@dataclass(frozen=True, slots=True)
class Given:
    """The rights of one peer in one namespace: those that a pairing gives unless it names more."""

    gives: Gives = Gives.READ
    takes: Takes = Takes.NOTHING


class Verb(StrEnum):
    OFFER = "take agents away"  # OfferAgent
    HAND_OVER = "end its move"  # HandOverAgent
    UNDO = "undo its move"  # UndoMove
    FENCE = "be the agent's owner"  # FenceAgent, its answer about a claim
    COPY = "give copies"  # PullAgent, by the peer
    MOVE = "give agents"  # MoveAgent, by the peer
    TURN = "give turns"  # TakeTurn, at the engine


class Bond(IntEnum):
    """What an agent has to do with a peer, by this store's own word alone."""

    NONE = 0
    HAD = 1  # the peer had it since the last claim here; or was offered it, and may still take agents away
    NAMED = 2  # it goes or went to the peer, or comes from it


# In which states of the agent a word may change something, and the least bond that its sender needs. In a state that is
# not listed nobody may, and `ownership` has the refusal.
EFFECTS: Mapping[Verb, Mapping[OwnerState, Bond]] = {
    Verb.OFFER: {OwnerState.OWNED: Bond.NONE, OwnerState.MOVING: Bond.NAMED},
    Verb.HAND_OVER: {OwnerState.MOVING: Bond.NAMED},
    Verb.UNDO: {OwnerState.MOVING: Bond.NAMED},
    Verb.FENCE: dict.fromkeys(OwnerState, Bond.HAD),
    Verb.COPY: {OwnerState.OWNED: Bond.NONE, OwnerState.MOVED: Bond.NAMED},
    Verb.MOVE: {OwnerState.OWNED: Bond.NONE, OwnerState.MOVED: Bond.NAMED, OwnerState.ARRIVING: Bond.NAMED},
    Verb.TURN: {OwnerState.OWNED: Bond.HAD},  # the engine checks the very move with which the turn comes
}
# The rights that words need. A peer whose move is under way has shown its right already; to end the move it needs it
# still, or this store's owner ordered the move, or the peer had the agent before.
NEEDS: Mapping[Verb, Gives | Takes] = {
    Verb.OFFER: Gives.MOVE,
    Verb.COPY: Takes.COPY,
    Verb.MOVE: Takes.MOVE,
    Verb.TURN: Takes.MOVE,
}
# Words that are refused here where the bond is not enough; others are refused by the state (AGENT_MOVED, MOVE_UNKNOWN).
_BY_BOND = frozenset({Verb.FENCE, Verb.TURN})
_BRINGING = frozenset({Verb.COPY, Verb.MOVE})  # words that bring a memory under a name of the peer's choice

# Per peer and namespace: facts about owners that it has a part in, and agents that are on their way to it.
MAX_FACTS, MAX_OPEN_MOVES = 10_000, 256

# Raises PermissionDenied (PEER_MAY_NOT) unless a word may have an effect on an agent of which this is known.
May = Callable[[Ownership], None]


@dataclass(frozen=True, slots=True)
class Said:
    verb: Verb
    agent_id: str
    names: Collection[str]  # the peer's, today's first: the earlier ones may stand in a fact
    given: Given
    is_ordered: bool = False  # this store's owner ordered this very move


def bond(known: Ownership, names: Collection[str], given: Given) -> Bond:
    """What an agent has to do with the peer of these names and rights."""
    if known.peer and known.peer in names:
        return Bond.NAMED
    return Bond.HAD if known.has_part(names, may_move=given.gives >= Gives.MOVE) else Bond.NONE


def check(said: Said, known: Ownership) -> None:
    """The one place where a peer's rights are checked. See May."""
    verb, tie = said.verb, bond(known, said.names, said.given)
    is_named = tie is Bond.NAMED
    needs, reserved = NEEDS.get(verb), said.agent_id.startswith(RESERVED_PREFIXES)
    if verb in _BRINGING and reserved and not (is_named and known.state is OwnerState.MOVED):
        raise _may_not(said, f"agents named {said.agent_id.partition('/')[0]}… are this side's own", "")
    has = said.given.gives if isinstance(needs, Gives) else said.given.takes
    began = said.is_ordered or (verb is Verb.OFFER and is_named)
    if needs is not None and has < needs and not began:
        way = "gives" if isinstance(needs, Gives) else "takes"
        raise _may_not(said, f"it may not {verb}", f"--{way} {needs.name.lower()}")
    may_move = said.given.gives >= Gives.MOVE
    if verb is Verb.HAND_OVER and not known.has_part(said.names, may_move=may_move):
        raise _may_not(said, f"it may not {verb}: its right to take agents was lowered since", "--gives move")
    if verb in _BY_BOND and tie < EFFECTS[verb].get(known.state, Bond.NAMED):
        if verb is Verb.FENCE and said.given.gives is Gives.CLAIM and known.generation:
            return
        raise _may_not(said, f"it may not {verb}: it never had it, or lost it by a claim here", "")


def _may_not(said: Said, problem: str, option: str) -> PermissionDenied:
    peer = next(iter(said.names))
    remedy = f"; `kvasir peers allow {peer} {option}` there allows it" if option else ""
    return PermissionDenied(
        f"agent {said.agent_id!r}, peer {peer}: {problem}{remedy}",
        reason="PEER_MAY_NOT",
        metadata={"agent_id": said.agent_id, "verb": said.verb.name.lower()},
    )


def over_limit(peer: str, what: str, retry_after_s: float = 60.0) -> ResourceExhausted:
    """The refusal of a peer that wants more than one peer may have."""
    text = f"peer {peer} has asked for all that a peer may: {what}"
    return ResourceExhausted(text, reason="PEER_LIMIT", retry_after_s=retry_after_s, metadata={"limit": what})


def read_rights(texts: Iterable[str], kind: type[Gives] | type[Takes], namespace: str = "") -> dict[str, str]:
    """Rights by namespace, as "move" or "work=move"; one without it is for `namespace`. Raises InvalidArgument."""
    field = kind.__name__.lower()
    rights = {}
    for text in texts:
        named, _, right = text.rpartition("=")
        if right.upper() not in kind.__members__ or not (named or namespace):
            known = ", ".join(kind.__members__).lower()
            raise InvalidArgument.of(field, f"expected [NAMESPACE=] and one of {known}; got {text!r}")
        rights[check_namespace(named or namespace, field)] = right.lower()
    return rights


def write_rights(rights: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{namespace}={right}" for namespace, right in sorted(rights.items()))
