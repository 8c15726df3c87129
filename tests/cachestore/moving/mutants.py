"""Faults of the protocol of moves, each with the tests that are asked whether they notice it."""

from pathlib import Path

from tests.mutation.mutant import Mutant, Suite

MUTANTS = (
    Mutant(
        "a move to one peer is taken over by another",
        "ownership.py",
        "    if known.state is OwnerState.MOVING and known.peer == peer:\n",
        "    if known.state is OwnerState.MOVING:\n",
        "ownership",
    ),
    Mutant(
        "an agent that is still arriving is handed over",
        "ownership.py",
        "        if known.state is OwnerState.MOVING:\n            return replace(known, state=OwnerState.MOVED",
        "        if known.state is not OwnerState.MOVED:\n            return replace(known, state=OwnerState.MOVED",
        "ownership",
    ),
    Mutant(
        "an agent is handed over by an earlier move of the same peer",
        "ownership.py",
        "    if (known.peer, known.move_id, known.generation) == (peer, move_id, generation):\n",
        "    if (known.peer, known.generation) == (peer, generation):\n",
        "ownership",
    ),
    Mutant(
        "what was received before the source went on is handed over",
        "ownership.py",
        "    if (known.peer, known.move_id, known.generation) == (peer, move_id, generation):\n",
        "    if (known.peer, known.move_id) == (peer, move_id):\n",
        "ownership",
    ),
    Mutant(
        "a move that was undone is taken up again",
        "ownership.py",
        "    if known.move_id == move_id:  # undone",
        "    if False:  # undone",
        "ownership",
    ),
    Mutant(
        "a move that was handed over is undone",
        "ownership.py",
        "    if known.state is not OwnerState.MOVING or (known.peer, known.move_id) != (peer, move_id):\n",
        "    if (known.peer, known.move_id) != (peer, move_id):\n",
        "ownership",
    ),
    Mutant(
        "a move is undone by another's silence",
        "ownership.py",
        "OwnerState.MOVING or (known.peer, known.move_id) != (peer, move_id):\n",
        "OwnerState.MOVING:\n",
        "ownership",
    ),
    Mutant(
        "a destination owns the agent before its source has decided",
        "ownership.py",
        "        OwnerState.ARRIVING, generation, peer,",
        "        OwnerState.OWNED, generation, peer,",
        "ownership",
    ),
    Mutant(
        "a destination owns the agent whose source has refused",
        "ownership.py",
        "    state = OwnerState.OWNED if known.was_owned else OwnerState.MOVED\n",
        "    state = OwnerState.OWNED\n",
        "ownership",
    ),
    Mutant(
        "an older generation arrives",
        "ownership.py",
        "    if generation <= known.generation:\n        raise outranked_by(agent_id, known)\n    was_owned",
        "    was_owned",
        "ownership",
    ),
    Mutant(
        "a fenced source goes on to offer",
        "ownership.py",
        "    if generation > known.generation:  # this store has been replaced, and is to be fenced first\n"
        "        raise outranked_by(agent_id, known)\n",
        "",
        "ownership",
    ),
    Mutant(
        "a claim is no higher than a move",
        "ownership.py",
        "    step = (known.generation // CLAIM_STEP + 1) * CLAIM_STEP\n"
        "    generation = step + (chance % MAX_CLAIM_CHANCE) * MAX_CLAIM_CHANCE\n",
        "    generation = known.generation + 1\n",
        "ownership",
    ),
    Mutant(
        "a claim tells nobody",
        "ownership.py",
        '"", "", now_unix_ms, tells=_who_may_count_on(known, ""))\n',
        '"", "", now_unix_ms)\n',
        "ownership moves",
    ),
    Mutant(
        "who hears of a claim does not tell on",
        "ownership.py",
        'peer, "", now_unix_ms, tells=_who_may_count_on(known, peer))\n',
        'peer, "", now_unix_ms)\n',
        "ownership",
    ),
    Mutant(
        "an old generation fences a new owner",
        "ownership.py",
        "    if generation <= known.generation:\n        raise outranked_by(agent_id, known)\n    return Ownership(",
        "    return Ownership(",
        "ownership",
    ),
    Mutant(
        "who is outranked stays the owner",
        "ownership.py",
        "    if known.state is OwnerState.MOVED:\n        return replace(known, tells=rest)\n",
        "    return replace(known, tells=rest)\n",
        "ownership",
    ),
    Mutant(
        "a commit does not ask whose the agent is",
        "committing.py",
        "    if asked.origin is not Origin.MOVE:\n",
        "    if asked.origin is None:\n",
        "moves",
    ),
    Mutant(
        "a lease is given for an agent of another store",
        "lease_store.py",
        "            check_writable(agent_id, change.ownership_of(namespace, agent_id))\n            token =",
        "            token =",
        "owner_store",
    ),
    Mutant(
        "an agent is offered while an engine may extend it",
        "owner_store.py",
        "        return self._changing_hands(namespace, agent_id, work, takes_back=False)\n",
        "        return self._core.catalog.write(namespace, work)\n",
        "owner_store",
    ),
    Mutant(
        "the journal does not have the owner",
        "recording.py",
        '    _Caught("UPDATE ON main.owners", _OWNER, _OF_NAMESPACE.format(row="NEW")),\n',
        "",
        "owner_store",
    ),
    Mutant(
        "a recovery without a whole journal trusts old owners",
        "recovering.py",
        "            if state.owners:\n",
        "            if False:\n",
        "owner_store",
    ),
    Mutant(
        "a deletion forgets whose the name is",
        "store.py",
        "            unshared_bytes = change.forget_agent(namespace, agent_id, force, now)\n",
        "            unshared_bytes = change.forget_agent(namespace, agent_id, force, now)\n"
        "            change.set_ownership(namespace, agent_id, type(known)())\n",
        "owner_store",
    ),
    Mutant(
        "any credential of a peer may take agents",
        "handing_over.py",
        "        if peer not in self._peers.names(namespace):\n",
        "        if not peer:\n",
        "moves",
    ),
    Mutant(
        "nobody looks after what a crash left",
        "__main__.py",
        "        caring.append(asyncio.create_task(services.moves.keep()))\n",
        "",
        "moves",
    ),
)

MOVES = Suite(
    "moves",
    "Mutants of moves",
    "cachestore_svc",
    Path("tests/cachestore/moving/MUTANTS.md"),
    MUTANTS,
    tests="tests/cachestore/moving/test_{}.py",
)
