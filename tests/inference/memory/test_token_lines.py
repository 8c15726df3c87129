"""Agents of conversations that come as token ids: which of them stay, and by whose clock they go."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir import expires_after
from kvasir.clients import AioStoreClient

from inference_svc.memory import token_lines
from inference_svc.memory.token_lines import PREFIX, TokenLines
from tests.cachestore.service.running import RunningStore, publish, store_home
from tests.made_models.synthetic import SyntheticAgent

_DAY_MS = 86_400_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunningStore]:
    with store_home(tmp_path) as home:
        yield home.start()


def _labels(store: RunningStore) -> dict[str, str]:
    with store.client() as client:
        return {agent.agent_id: agent.labels[expires_after.LABEL] for agent in client.every_agent()}


def _learned(lines: TokenLines, store: RunningStore) -> dict[str, str]:
    """The store's agents after a look, each with the days that it may stay unused."""

    async def learn() -> None:
        async with AioStoreClient.connect(store.address) as client:
            there: Any = SimpleNamespace(connection=SimpleNamespace(client=client))
            lines._stores = {"default": there}
            await lines.learn("default")

    asyncio.run(learn())
    return _labels(store)


@pytest.mark.long(4)
def test_a_clock_that_is_set_deletes_no_line_and_too_many_go(
    store: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{PREFIX}9-{number:024}/a" for number in range(3)]
    with store.client() as client:
        for name in names:
            publish(client, name, SyntheticAgent().turn(9), 0)
        now_ms = [client.get_agent(names[0]).used_at.ToMilliseconds() + 400 * _DAY_MS]

    lines = TokenLines({}, new_name=lambda: "new", now_ms=lambda: now_ms[0])
    assert _learned(lines, store) == dict.fromkeys(names, "7d")
    monkeypatch.setattr(token_lines, "_MAX_KEPT", 2)
    assert _learned(lines, store) == dict.fromkeys(names, "7d")  # now and then, not each time
    now_ms[0] -= 800 * _DAY_MS  # nor is a clock waited for that was set back
    assert _learned(lines, store) == dict.fromkeys(names[1:], "7d")


def test_a_line_that_cannot_go_keeps_no_other_one(store: RunningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{PREFIX}9-{number:024}/a" for number in range(4)]
    with store.client() as client:
        for name in names:
            publish(client, name, SyntheticAgent().turn(9), 0)
        client.update_agent(names[0], is_pinned=True)
    monkeypatch.setattr(token_lines, "_MAX_KEPT", 2)
    lines = TokenLines({}, new_name=lambda: "new", now_ms=lambda: 0)
    assert _learned(lines, store) == {names[0]: "", names[2]: "7d", names[3]: "7d"}
