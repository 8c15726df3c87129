"""What callers of two store processes see has one order; faults that are planted in their database are noticed."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from kvasir import errors
from kvasir.clients import AioStoreClient, StoreClient
from kvasir.formats.block_hash import kv_identity_hash

from tests.cachestore.bucket.test_over_s3 import credentials, faults, pytestmark  # noqa: F401
from tests.cachestore.replicas.processes import replicas_in
from tests.cachestore.service.running import publish
from tests.campaigns.history.record import AnyStore, Record
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.postgres import PostgresServer, postgres  # noqa: F401

KV = kv_identity_hash(SMALL)
_DROP = """DELETE FROM kvasir.versions WHERE version = {version} AND line_id IN
    (SELECT lines.id FROM kvasir.lines JOIN kvasir.agents ON agents.id = agent_id WHERE name = '{agent}')"""
_LEASES_END = "UPDATE kvasir.leases SET granted = 0"
LOST, TAKEN_BACK, NONE = "lost", "taken back", "none"


class Callers:
    """Of two stores: each act goes to any of them, and is recorded."""

    def __init__(self, addresses: Sequence[str], clients: Sequence[StoreClient], seed: int) -> None:
        self.record = Record()
        self.store = AnyStore([AioStoreClient.connect(address) for address in addresses], self.record, seed)
        self._clients = clients

    async def commit_twice(self, agent: str) -> None:
        synthetic = SyntheticAgent(SMALL, 1)
        for version, client in enumerate(self._clients):
            began = time.monotonic()
            made = await asyncio.to_thread(publish, client, agent, synthetic.turn(30), version)
            self.record.wrote(agent, began, "store", made)

    async def look(self, agent: str) -> None:
        for version in (None, 1, 2, None):
            try:
                await self.store.get_snapshot(agent, version)
            except errors.NotFound:
                continue
        await self.store.list_snapshots(agent)

    async def take_lease(self, owner: str) -> bool:
        try:
            _, span = await self.store.acquire_lease("held", KV, owner, ttl_s=30)
        except errors.FailedPrecondition:
            return False
        self.record.spans.append(span)
        return True


@pytest.mark.long(4)
def test_histories_over_two_stores_have_an_order_and_planted_faults_are_noticed(
    tmp_path: Path,
    postgres: PostgresServer,  # noqa: F811
    credentials: Path,  # noqa: F811
) -> None:
    async def scene(callers: Callers, database: psycopg.Connection[tuple[object]]) -> list[str]:
        for agent in (LOST, TAKEN_BACK, NONE):
            await callers.commit_twice(agent)
            await callers.look(agent)
        for agent in (TAKEN_BACK, NONE):
            assert (await callers.store.rollback_agent(agent, 1)).version == 3
        await callers.store.fork_agent(NONE, "forked")
        await callers.store.delete_agent("forked")
        assert [await callers.take_lease(owner) for owner in ("engine-1", "engine-2")] == [True, False]
        for agent in (LOST, TAKEN_BACK, NONE, "forked"):
            with contextlib.suppress(errors.NotFound):
                await callers.look(agent)
        before = callers.record.problems()
        database.execute(_DROP.format(agent=LOST, version=2))
        database.execute(_DROP.format(agent=TAKEN_BACK, version=3))
        database.execute(_LEASES_END)
        for agent in (LOST, TAKEN_BACK, NONE):
            await callers.look(agent)
        assert await callers.take_lease("engine-2")
        await callers.store.close()
        assert before == []
        return callers.record.problems()

    with replicas_in(tmp_path, postgres, credentials) as replicas:
        running = [replicas.start(name) for name in "ab"]
        with running[0].client() as a, running[1].client() as b, closing(psycopg.connect(replicas.url)) as database:
            database.autocommit = True

            async def judged() -> list[str]:
                return await scene(Callers([each.address for each in running], [a, b], 1), database)

            problems = asyncio.run(judged())
    assert sorted(each.split(":")[0] for each in problems) == ["held", LOST, TAKEN_BACK]
