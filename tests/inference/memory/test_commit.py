"""One commit of a line against a store that is here, and a lease that was taken anew before it was sent."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from kvasir.errors import Conflict
from kvasir.formats.digest import Digest

from inference_svc.memory.lines.commit import Commit
from inference_svc.memory.lines.line_states import Doubt, Lease, Standing, Use
from inference_svc.memory.store.answers import NO_HEAD, Head


def test_a_commit_that_moves_to_a_new_lease_stands_under_it() -> None:
    """Else the hot memory could not be used while the store is away, though the lease holds."""
    first, second = (Head(number, Digest.of(bytes([number])), number - 1) for number in (1, 2))
    lease = SimpleNamespace(held=Lease.granted(2, first.identity, 0.0))
    publication = SimpleNamespace(standing=Standing(first, generation=1))
    memory: Any = SimpleNamespace(publication=publication, is_brought=False)
    store, files, parts, draft = (MagicMock() for _ in range(4))
    store.agents.commit = AsyncMock(return_value=second)
    store.events.was_taken_back = AsyncMock(return_value=False)
    store.blobs.write_manifest = files.named = files.all_stored = AsyncMock()
    files.sent_bytes, parts.limits.timeout_s, parts.owner = 0, 5, "engine"
    agent: Any = SimpleNamespace(agent_id="a")
    draft.completed = AsyncMock(return_value=(b"manifest", second.manifest))
    commit: Any = Commit(agent, memory, files, draft, store, lease, parts, frozenset())  # type: ignore[arg-type]
    asyncio.run(commit._commit())
    assert store.agents.commit.call_args.kwargs["lease"] == ("engine", 2)
    assert publication.standing.generation == 2
    assert publication.standing.use(None, lease.held, 1.0) is Use.YES


@pytest.mark.parametrize(
    ("generation", "is_taken_back", "is_stored"), [(1, True, True), (2, False, True), (2, True, False)]
)
def test_a_first_version_is_not_written_if_the_agent_was_deleted_before_its_engine_got_a_lease(
    generation: int, is_taken_back: bool, is_stored: bool
) -> None:
    """Another engine made and deleted the agent meanwhile; before the first lease nobody can have done so."""
    publication = SimpleNamespace(standing=Standing(NO_HEAD))
    memory: Any = SimpleNamespace(publication=publication, is_brought=False)
    lease, store, agent = MagicMock(), MagicMock(), SimpleNamespace(agent_id="a")
    lease.obtain = AsyncMock(return_value=Lease.granted(generation, NO_HEAD.identity, 0.0))
    store.events.was_taken_back = AsyncMock(return_value=is_taken_back)
    unused = MagicMock()
    commit: Any = Commit(agent, memory, unused, unused, store, lease, MagicMock(), frozenset())  # type: ignore[arg-type]
    with nullcontext() if is_stored else pytest.raises(Conflict, match="the agent was changed"):
        asyncio.run(commit._learn(Doubt.LEASE))
    assert publication.standing.generation == (generation if is_stored else 0)
