"""One loaded model and the parts that serve it: engine, tokenizer, turns."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from inference_svc.engine.engine import Engine
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.lines.line_parts import LineParts
from inference_svc.memory.lines.lines import Lines, store_owed
from inference_svc.memory.service_stats import OwedCount
from inference_svc.memory.store.answers import EventCursor
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.model.model_host import MemoriesLeft
from inference_svc.model.prompting import Prompting
from inference_svc.model.weights.digest_check import DigestCheck
from inference_svc.turns.asleep.woken import WokenAgents
from inference_svc.turns.embedding.turn_embedder import TurnEmbedder
from inference_svc.turns.turn_service import TurnService
from inference_svc.warming import warm_up_while_idle


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    engine: Engine
    prompting: Prompting
    turns: TurnService
    lines: dict[str, Lines]
    line_parts: LineParts
    grace_s: float
    digest_check: DigestCheck
    embedder: TurnEmbedder
    woken: WokenAgents
    tasks: list[asyncio.Task[None]] = field(default_factory=list)  # that go on beside turns
    is_leaving: asyncio.Event = field(default_factory=asyncio.Event)  # set: nothing but callers' turns begins

    @property
    def is_idle(self) -> bool:
        return self.turns.is_idle and self.embedder.is_idle

    @property
    def owed(self) -> Mapping[str, OwedCount]:
        """The hot memories that the store lacks, by namespace. On any thread."""
        owed = defaultdict[str, OwedCount](OwedCount)
        for key in self.engine.memories.sizes():
            tag = self.engine.memories.tag_of(key)
            if isinstance(tag, AgentMemory) and tag.publication.is_owed:
                owed[key.namespace].memories += 1
                owed[key.namespace].failed += tag.publication.has_failed
                owed[key.namespace].size_bytes += tag.unstored_tokens * self.engine.model.kv_bytes_per_token
        return owed

    def add_store(self, namespace: str, store: RemoteCache, now: EventCursor | None) -> None:
        """A namespace gets a store. Hot memories go on unless changed there since `now`; None: none does."""
        for key in self.engine.memories.sizes():
            hot = self.engine.memories.get(key)
            if key.namespace == namespace and hot is not None and isinstance(hot.tag, AgentMemory):
                publication = hot.tag.publication
                publication.standing = replace(publication.standing, event_cursor=now)
        self.lines[namespace] = Lines(namespace, store, self.line_parts)
        self.lines[namespace].start()

    async def retire(self) -> MemoriesLeft:
        """Let turns end for `grace_s`, cancel the rest, and give the store as long to take the hot memories."""
        self.is_leaving.set()
        await asyncio.gather(self.turns.drain(self.grace_s), self.embedder.drain(self.grace_s))
        return await store_owed(self.engine, self.lines, self.grace_s, self.line_parts.clock)

    def stay(self) -> None:
        """Go on after a `retire`."""
        self.is_leaving.clear()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.prompting.close()
        for lines in self.lines.values():
            lines.end_retries()
        await asyncio.to_thread(self.digest_check.close)
        await asyncio.gather(*(lines.close() for lines in self.lines.values()))
        await asyncio.to_thread(self.engine.close)

    def warm_up_while_idle(self, clock: Callable[[], float]) -> None:
        self.tasks.append(asyncio.create_task(warm_up_while_idle(self.engine, self._may_warm_up, clock)))

    def _may_warm_up(self) -> bool:
        return self.is_idle and not self.is_leaving.is_set()
