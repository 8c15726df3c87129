"""Puts agents to sleep that nobody used for long, one at a time, while no turn runs. A turn that comes goes first."""

import asyncio
from collections.abc import Callable, Mapping

import structlog
from kvasir.errors import KvasirError
from kvasir.waits import RETRY_S

from inference_svc.engine.api import AgentKey
from inference_svc.memory.store.answers import ListedAgent
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.turns.asleep.own_turns import OwnTurns
from inference_svc.turns.turn_data import Work

_LOG = structlog.get_logger(__name__)
_LOOKS = 100  # at all agents, within the time after which they may sleep
_MOST_REFUSED = 10_000


class IdleAgents:
    def __init__(
        self,
        turns: OwnTurns,
        stores: Mapping[str, RemoteCache],
        kv_identity_hash: str,
        after_s: float,
        now_ms: Callable[[], int],
    ) -> None:
        """`stores`: by namespace; more may come later. `after_s`: how long an agent must be unused."""
        self._turns = turns
        self._stores = stores
        self._kv_identity_hash = kv_identity_hash
        self._after_s = after_s
        self._now_ms = now_ms
        self._refused: dict[AgentKey, int] = {}  # the version of an agent that cannot sleep

    async def run(self) -> None:
        while True:
            await asyncio.sleep(max(self._after_s / _LOOKS, RETRY_S))
            for namespace, store in [*self._stores.items()]:
                try:
                    await self._look(namespace, store)
                except (KvasirError, TimeoutError):
                    continue  # a store that does not answer has time
                except Exception as error:  # noqa: BLE001 - one namespace must not keep the others awake, nor for ever
                    _LOG.error("memory.not_put_to_sleep", exc_info=error)

    async def _look(self, namespace: str, store: RemoteCache) -> None:
        token = ""
        while True:
            agents, token = await store.agents.page(token)
            for agent in agents:
                if self._turns.may_begin and self._may_sleep(namespace, agent):
                    await self._put_to_sleep(AgentKey(namespace, agent.agent_id), agent.version)
            if not token:
                return

    def _may_sleep(self, namespace: str, agent: ListedAgent) -> bool:
        is_tried = self._refused.get(AgentKey(namespace, agent.agent_id)) == agent.version
        return not is_tried and may_sleep(agent, self._kv_identity_hash, self._now_ms(), self._after_s)

    async def _put_to_sleep(self, key: AgentKey, version: int) -> None:
        try:
            await self._turns.make(key, Work.SLEEP)
        except KvasirError as error:
            _LOG.info("memory.stays_awake", reason=error.reason)
            if error.reason == "CANNOT_SLEEP":
                self._refuse(key, version)

    def _refuse(self, key: AgentKey, version: int) -> None:
        if len(self._refused) >= _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[key] = version


def may_sleep(agent: ListedAgent, kv_identity_hash: str, now_ms: int, after_s: float) -> bool:
    """Whether its newest version is awake, of this model, and unused for so long. Pinned agents stay awake."""
    is_ours = agent.version > 0 and agent.kv_identity_hash == kv_identity_hash
    is_unused = now_ms - agent.used_unix_ms >= 1000 * after_s
    return is_ours and is_unused and agent.is_free and not agent.is_asleep
