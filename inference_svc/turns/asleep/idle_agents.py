"""Puts agents to sleep that nobody used for long, one at a time, while no turn runs. A turn that comes goes first."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from itertools import count

import structlog
from kvasir.errors import KvasirError
from kvasir.waits import PAUSE_S, RETRY_S

from inference_svc.engine.api import Pace, Priority, SamplingParams
from inference_svc.memory.store.answers import ListedAgent
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.turns.turn_data import PromptInput, TurnRequest, Work
from inference_svc.turns.turn_service import Choices, TurnService

_LOG = structlog.get_logger(__name__)
_LOOKS = 100  # at all agents, within the time after which they may sleep
_MOST_REFUSED = 10_000


class IdleAgents:
    def __init__(
        self,
        turns: TurnService,
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
        self._numbers = count(1)
        self._refused: dict[tuple[str, str], int] = {}  # the version of an agent that cannot sleep

    async def run(self) -> None:
        while True:
            await asyncio.sleep(max(self._after_s / _LOOKS, RETRY_S))
            for namespace, store in [*self._stores.items()]:
                with contextlib.suppress(KvasirError, TimeoutError):  # a store that does not answer has time
                    await self._look(namespace, store)

    async def _look(self, namespace: str, store: RemoteCache) -> None:
        token = ""
        while True:
            agents, token = await store.agents.page(token)
            for agent in agents:
                if self._turns.is_idle and self._may_sleep(namespace, agent):
                    await self._put_to_sleep(namespace, agent)
            if not token:
                return

    def _may_sleep(self, namespace: str, agent: ListedAgent) -> bool:
        is_tried = self._refused.get((namespace, agent.agent_id)) == agent.version
        return not is_tried and may_sleep(agent, self._kv_identity_hash, self._now_ms(), self._after_s)

    async def _put_to_sleep(self, namespace: str, agent: ListedAgent) -> None:
        request = TurnRequest(
            request_id=f"asleep-{next(self._numbers)}",
            namespace=namespace,
            agent_id=agent.agent_id,
            input=PromptInput(""),
            input_digest="",
            sampling=SamplingParams(max_tokens=0),
            clamps_max_tokens=False,
            pace=Pace(Priority.BACKGROUND),
            work=Work.SLEEP,
        )
        try:
            await self._until_over(self._turns.begin(request))
        except KvasirError as error:
            _LOG.info("memory.stays_awake", reason=error.reason)
            if error.reason == "CANNOT_SLEEP":
                self._refuse(namespace, agent)

    async def _until_over(self, running: Choices) -> None:
        """A caller's turn ends it: that one may be the agent's own, and would wait for it. Raises why it failed."""
        reading = asyncio.create_task(_read(running))
        try:
            while not (await asyncio.wait({reading}, timeout=PAUSE_S))[0]:
                if len(self._turns.under_way()) > 1:
                    running.cancel()
            await reading
        finally:
            running.cancel()

    def _refuse(self, namespace: str, agent: ListedAgent) -> None:
        if len(self._refused) >= _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[namespace, agent.agent_id] = agent.version


def may_sleep(agent: ListedAgent, kv_identity_hash: str, now_ms: int, after_s: float) -> bool:
    """Whether its newest version is awake, of this model, and unused for so long. Pinned agents stay awake."""
    is_ours = agent.version > 0 and agent.kv_identity_hash == kv_identity_hash
    is_unused = now_ms - agent.used_unix_ms >= 1000 * after_s
    return is_ours and is_unused and agent.is_free and not agent.is_asleep


async def _read(running: Choices) -> None:
    async for _ in running.events():
        pass
